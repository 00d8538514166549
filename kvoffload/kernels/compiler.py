"""Compiles kernels with Triton, for any compute capability, with no GPU, no driver and no PyTorch."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

from kvoffload.errors import CapabilityError

THREADS_PER_WARP = 32

_FORMATS = {"i64": "q", "i32": "i4x"}  # each in 8 bytes, where a launch finds it

# Left on, Triton 3.9 warns that a later version will turn it off.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}

_DISTRIBUTIONS = ("triton", "pytorch-triton", "triton-nightly")
_INSTALL = "install it: pip install 'triton>=3.3'"
_FOLDER = "TRITON_CACHE_DIR"
_BINARY_ONLY = "TRITON_STORE_BINARY_ONLY"
_NEWER_PTXAS = "TRITON_PTXAS_BLACKWELL_PATH"  # as of Triton 3.6; in 3.9 also for GPUs before Blackwell
_SET = (_FOLDER, _BINARY_ONLY, _NEWER_PTXAS)  # while a kernel is compiled


class KernelSpec(NamedTuple):
    """A Triton kernel with its constants.

    Attributes:
        module: the module that holds it, as a dotted name that can be imported.
        function: its name there, decorated with `triton.jit`.
        parameters: name and type, "i64" or "i32", of each argument of a launch, in the kernel's order. Addresses are
            "i64", and the kernel casts them: Triton takes pointers from PyTorch's tensors only.
        constants: name and value of its `tl.constexpr` parameters.
        warps: of 32 threads each, in a block.
        registers: the most that a thread may have; 0: as many as the compiler takes.
    """

    module: str
    function: str
    parameters: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int], ...]
    warps: int
    registers: int = 0

    @property
    def threads(self) -> int:
        return self.warps * THREADS_PER_WARP

    def constant(self, name: str) -> int:
        return dict(self.constants)[name]

    @property
    def arguments(self) -> struct.Struct:
        """Packs the arguments, 8 bytes each. Raises struct.error for a wrong number, and for one out of range."""
        return struct.Struct("<" + "".join(_FORMATS[kind] for _, kind in self.parameters))

    def __str__(self) -> str:
        constants = ", ".join(f"{name}={value}" for name, value in self.constants)
        return f"{self.module}.{self.function}({constants})"


class Compiled(NamedTuple):
    """A kernel for one compute capability.

    Attributes:
        cubin: the machine code.
        ptx: the assembly that it was assembled from.
        name: of the kernel in both.
        shared_bytes: dynamic shared memory of a block.
        parameter_count: of the machine code: the kernel's own, then Triton's, whose number depends on its version; a
            launch passes 0 for these.
        threads: of a block.
    """

    cubin: bytes
    ptx: str
    name: str
    shared_bytes: int
    parameter_count: int
    threads: int


def compile_kernel(spec: KernelSpec, compute_capability: tuple[int, int], *, cuda: int = 13) -> Compiled:
    """Compile a kernel, in about a second. No other thread may use Triton meanwhile.

    Standard output of the whole process goes to standard error while it compiles, whichever thread writes it with
    `print` or `sys.stdout`: Triton prints whole programs there.

    Args:
        spec: names the kernel.
        compute_capability: of the GPU, for example `(9, 0)`.
        cuda: major version of the driver that will load it. A driver of CUDA 12 need not load what a ptxas of CUDA 13
            assembles, so it gets the older one that Triton brings, unless TRITON_PTXAS_BLACKWELL_PATH names another.

    Raises:
        CapabilityError: Triton is missing, or cannot compile this.
    """
    import tempfile

    from kvoffload.simulator.interpreter import LOCK  # a simulated launch alters triton.language

    with LOCK, contextlib.redirect_stdout(sys.stderr):  # Triton prints to stdout when it fails
        before = dict(filter(lambda item: item[0] in _SET, os.environ.items()))
        try:
            older = Path(require_triton().__file__).with_name("backends") / "nvidia" / "bin" / "ptxas"
            with tempfile.TemporaryDirectory(prefix="kvoffload-") as folder:
                # A cache folder of its own: the user's may be read-only, or hold this kernel by another ptxas, or
                # without its PTX, which says how many parameters the machine code has.
                os.environ.update({_FOLDER: folder, _BINARY_ONLY: "0"})
                if cuda < 13:
                    os.environ.setdefault(_NEWER_PTXAS, os.environ.get("TRITON_PTXAS_PATH", str(older)))
                return _build(spec, compute_capability)
        except CapabilityError:
            raise
        except Exception as error:
            raise CapabilityError(
                f"Triton {triton_version()} cannot compile {spec} for compute capability "
                f"{compute_capability[0]}.{compute_capability[1]}: {_essence(error)}"
            ) from error
        finally:
            for name in _SET:
                os.environ.pop(name, None)
            os.environ.update(before)


def triton_version() -> str | None:
    """Return the version of the installed Triton, without importing it; None if none is installed."""
    from importlib import metadata

    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def require_triton() -> Any:
    """Import Triton; CapabilityError if that fails. Before 3.3 its interpreter gave wrong results: refused."""
    try:
        import triton
    except Exception as error:  # a Triton for another Python or machine raises more than ImportError
        raise CapabilityError(
            f"kernels need Triton, which cannot be imported ({_essence(error)}); {_INSTALL}"
        ) from error
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
        raise CapabilityError(f"kernels need Triton 3.3 or newer, and {triton.__version__} is installed; {_INSTALL}")
    return triton


def no_triton() -> str:
    return f"kernels need Triton, which is not installed; {_INSTALL}"


def _build(spec: KernelSpec, compute_capability: tuple[int, int]) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    function = getattr(importlib.import_module(spec.module), spec.function)
    if not isinstance(function, JITFunction):  # TRITON_INTERPRET is set
        function = JITFunction(function.fn)
    signature, constants = dict(spec.parameters), dict(spec.constants)
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(function, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", 10 * compute_capability[0] + compute_capability[1], THREADS_PER_WARP)
    options = {"num_warps": spec.warps, **OPTIONS, **({"maxnreg": spec.registers} if spec.registers else {})}
    built: Any = triton.compile(source, target=target, options=options)
    ptx, facts = built.asm["ptx"], built.metadata
    assert not getattr(facts, "global_scratch_size", 0), (
        "the kernel needs scratch memory, which kvoffload does not allocate"
    )
    header = re.search(rf"\.entry\s+{re.escape(facts.name)}\s*\((.*?)\)", ptx, re.DOTALL)
    assert header is not None, f"the PTX has no entry {facts.name}"
    return Compiled(
        cubin=built.asm["cubin"],
        ptx=ptx,
        name=facts.name,
        shared_bytes=int(facts.shared),
        parameter_count=len(re.findall(r"^\s*\.param\b", header.group(1), re.MULTILINE)),
        threads=THREADS_PER_WARP * int(facts.num_warps),
    )


def _essence(error: Exception) -> str:
    """Return the most informative line of a message: Triton quotes whole programs, and ptxas its command line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    fatal = [line for line in lines if "fatal" in line]
    errors = [line for line in lines if "rror" in line]
    return [type(error).__name__, *lines[-1:], *errors[-1:], *fatal[:1]][-1][:300]

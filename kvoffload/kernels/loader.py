"""Loads kernels into a context and launches them. Compiled ones are kept in the cache folder.

There is a file for each kernel, compute capability, version of Triton and ptxas. It is checked before it is used: a
kernel is compiled again if its file is damaged, of another kernel, or if another user owns it or may write it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.driver import Capabilities, Driver, address_of
from kvoffload.errors import CapabilityError, DriverError
from kvoffload.internal import cachefiles
from kvoffload.kernels.compiler import (
    OPTIONS,
    Compiled,
    KernelSpec,
    compile_kernel,
    no_triton,
    require_triton,
    triton_version,
)

_FREE_SHARED_BYTES = 48 << 10


def why_not(capabilities: Capabilities) -> str | None:
    """Return why a device can launch no kernel; None if no reason is known before one is loaded."""
    if not capabilities.kernels:
        return capabilities.missing["kernels"]
    return no_triton() if triton_version() is None else None


def load_kernel(
    driver: Driver, capabilities: Capabilities, spec: KernelSpec, *, modules: list[Any] | None = None
) -> LoadedKernel:
    """Load a kernel into the current context, compiling it if it is not in the cache folder.

    Args:
        driver, capabilities: of the device whose context is current.
        spec: names the kernel.
        modules: the module's handle is appended here, and the caller unloads it, also after an error. None: the
            kernel's `close` unloads it, and after an error nothing stays loaded.

    Raises:
        CapabilityError: the device cannot launch it; the message says why, or which call CUDA refused.
        DriverError: the context is lost, or memory ran out.
    """
    if not capabilities.kernels:
        raise CapabilityError(capabilities.missing["kernels"])
    compiled = machine_code(driver, capabilities, spec)
    if compiled.shared_bytes > capabilities.max_shared_bytes:
        raise CapabilityError(
            f"{spec} needs {compiled.shared_bytes} bytes of shared memory in a block, and this GPU has "
            f"{capabilities.max_shared_bytes}"
        )
    loaded: list[Any] = [] if modules is None else modules
    try:
        driver.create("cuModuleLoadData", loaded, compiled.cubin)
        return LoadedKernel(driver, spec, compiled, int(loaded[-1]), loaded if modules is None else [])
    except BaseException as error:
        if modules is None:
            with contextlib.suppress(DriverError):
                driver.destroy("cuModuleUnload", loaded)
        if not isinstance(error, DriverError) or error.sticky or error.out_of_memory:
            raise
        version = ".".join(map(str, capabilities.driver_version))
        raise CapabilityError(
            f"{spec} cannot be loaded into this GPU: {error}. If the ptxas of Triton {triton_version()} is too new for "
            f"this driver of CUDA {version}, update it, or let TRITON_PTXAS_PATH and "
            f"TRITON_PTXAS_BLACKWELL_PATH name a ptxas of CUDA {version} or older"
        ) from error


def machine_code(driver: Driver, capabilities: Capabilities, spec: KernelSpec) -> Compiled:
    """Return a kernel as this driver loads it: for the simulated one its name, since Triton's interpreter runs it."""
    if not driver.simulated:
        return compiled_kernel(spec, capabilities.compute_capability, cuda=capabilities.driver_version[0])
    from kvoffload.simulator.kernels import IMAGE_SHARED_BYTES, pack

    require_triton()
    fields = spec._asdict() | {"constants": dict(spec.constants), "threads": spec.threads}
    del fields["warps"], fields["registers"]
    return Compiled(pack(**fields), "", spec.function, IMAGE_SHARED_BYTES, len(spec.parameters), spec.threads)


class LoadedKernel:
    """A kernel loaded into a context by `load_kernel`. Only one thread at a time may pack and queue it.

    Attributes:
        spec: names the kernel.
        threads, shared_bytes: of a block.
        pack: sets the arguments of the next launch, one for each of `spec.parameters`. Raises struct.error if their
            number is wrong, or one is more than its type can hold.
    """

    def __init__(
        self, driver: Driver, spec: KernelSpec, compiled: Compiled, module: int, own_modules: list[Any]
    ) -> None:
        self.spec = spec
        self.threads = compiled.threads
        self.shared_bytes = compiled.shared_bytes
        self._driver = driver
        self._modules = own_modules  # those that `close` unloads
        self._function = driver.module_function(module, compiled.name)
        most = driver.function_max_threads(self._function)
        if most < self.threads:
            raise CapabilityError(
                f"{spec} needs {self.threads} threads in a block, and this GPU launches at most {most}"
            )
        if self.shared_bytes > _FREE_SHARED_BYTES:
            driver.function_allow_shared(self._function, self.shared_bytes)
        values = np.zeros(compiled.parameter_count, np.uint64)
        self.pack: partial[None] = partial(spec.arguments.pack_into, values.data, 0)
        self._pointers = address_of(values) + 8 * np.arange(compiled.parameter_count, dtype=np.uint64)
        self._pointers_address = address_of(self._pointers)

    def launch(self, stream: int, grid: int, arguments: Sequence[int]) -> None:
        self.pack(*arguments)
        self.queue(stream, grid)

    def queue(self, stream: int, grid: int) -> None:
        """Queue `grid` programs with the arguments that were packed last; CUDA copies them during the call.

        Raises:
            DriverError: CUDA refused.
        """
        self._driver.launch(self._function, grid, self.threads, self.shared_bytes, stream, self._pointers_address)

    def close(self) -> None:
        """Unload it; its launches must have ended, and its context must be current. Idempotent, also after an error."""
        self._driver.destroy("cuModuleUnload", self._modules)

    def __repr__(self) -> str:
        state = "" if self._modules else ", closed"
        return f"LoadedKernel({self.spec}, {self.threads} threads, {self.shared_bytes} shared bytes{state})"


# kernels in the cache folder ------------------------------------------------------------------------------------------


_FORMAT = 2
_MOST_PARAMETERS = 4096  # of 8 bytes each; CUDA takes fewer


def compiled_kernel(spec: KernelSpec, compute_capability: tuple[int, int], *, cuda: int = 13) -> Compiled:
    """Return a kernel from the cache folder, or compiled and then written there.

    Args:
        spec, compute_capability, cuda: as for `compile_kernel`.

    Raises:
        CapabilityError: no Triton is installed, or the kernel is not in the cache folder and Triton cannot compile it.
    """
    path = kernel_path(spec, compute_capability, cuda=cuda)
    content = cachefiles.read(path, trusted=True)
    kept = None if content is None else _unpack(content, path, spec)
    if kept is not None:
        return kept
    compiled = compile_kernel(spec, compute_capability, cuda=cuda)
    cachefiles.write(path, _pack(compiled, path))
    return compiled


def kernel_path(spec: KernelSpec, compute_capability: tuple[int, int], *, cuda: int = 13) -> Path:
    """Return the file of a kernel, named after all that the machine code depends on; found without importing Triton."""
    version = triton_version()
    if version is None:
        raise CapabilityError(no_triton())
    # Triton's version says which ptxas it uses, unless a variable names one: its file may be replaced, too.
    named = sorted(each for each in os.environ.items() if "PTX" in each[0] or "LLVM" in each[0])
    changed = [os.path.getmtime(value) for _, value in named if os.path.isfile(value)]
    assembler = [cuda < 13, named, changed]
    parts = [_FORMAT, _source(spec.module), version, compute_capability, spec, OPTIONS, assembler]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return cachefiles.cache_folder() / "kernels" / f"{digest}.json"


def _source(module: str) -> str:
    """Return the text of a module that need not be imported for it."""
    found = importlib.util.find_spec(module)
    loader: Any = None if found is None else found.loader
    text = None if loader is None else loader.get_source(module)
    if text is None:
        raise CapabilityError(f"the source of {module} is needed to compile its kernels, and cannot be found")
    return str(text)


def _pack(compiled: Compiled, path: Path) -> bytes:
    fields = compiled._asdict() | {"cubin": base64.b64encode(compiled.cubin).decode(), "made_for": path.stem}
    return json.dumps({"sha256": _digest(fields), "kernel": fields}).encode()


def _unpack(content: bytes, path: Path, spec: KernelSpec) -> Compiled | None:
    """Return the kernel that `_pack` wrote for this path; None for any other content."""
    try:
        document = json.loads(content)
        fields = document["kernel"]
        if document["sha256"] != _digest(fields) or fields.pop("made_for") != path.stem:
            return None
        kept = Compiled(**fields | {"cubin": base64.b64decode(fields["cubin"], validate=True)})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    # Whether a launch can use it: another version of kvoffload may have written the file.
    texts, numbers = (kept.ptx, kept.name), (kept.shared_bytes, kept.parameter_count, kept.threads)
    if not all(isinstance(each, str) for each in texts) or not all(type(each) is int for each in numbers):
        return None
    counts = len(spec.parameters) <= kept.parameter_count <= _MOST_PARAMETERS
    return kept if counts and kept.shared_bytes >= 0 and kept.threads == spec.threads else None


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

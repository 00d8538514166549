"""Compiled kernels in the cache folder: one file for each kernel, compute capability and version of Triton.

A file is checked before it is used. A kernel is compiled again if its file is damaged, truncated, of another kernel, or
if another user owns it or may write it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from kvoffload.errors import CapabilityError
from kvoffload.internal import cachefiles
from kvoffload.kernels.compiler import OPTIONS, Compiled, compile_kernel, no_triton, triton_version
from kvoffload.kernels.spec import KernelSpec

_FORMAT = 2
_MOST_PARAMETERS = 4096  # of 8 bytes each; CUDA takes fewer


def compiled_kernel(spec: KernelSpec, compute_capability: tuple[int, int], folder: Path | None = None) -> Compiled:
    """A kernel from the cache folder, or compiled and then written there.

    Args:
        folder: instead of `cachefiles.cache_folder()`.

    Raises:
        CapabilityError: no Triton is installed, or the kernel is not in the cache folder and Triton cannot compile it.
    """
    path = kernel_path(spec, compute_capability, folder)
    content = cachefiles.read_own(path)
    kept = None if content is None else _unpack(content, path, spec)
    if kept is not None:
        return kept
    compiled = compile_kernel(spec, compute_capability)
    cachefiles.write(path, _pack(compiled, path))
    return compiled


def kernel_path(spec: KernelSpec, compute_capability: tuple[int, int], folder: Path | None = None) -> Path:
    """The file of a kernel, named after all that the machine code depends on; found without importing Triton."""
    version = triton_version()
    if version is None:
        raise CapabilityError(no_triton())
    parts = [_FORMAT, _source(spec.module), version, compute_capability, spec, OPTIONS]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    base = cachefiles.cache_folder() if folder is None else folder
    return base / "kernels" / f"{digest}.json"


def _source(module: str) -> str:
    """The text of a module that need not be imported for it."""
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
    """The kernel that `_pack` wrote for this path; None for any other content."""
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

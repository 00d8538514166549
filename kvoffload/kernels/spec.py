"""The name of a kernel, with its constants."""

from __future__ import annotations

import struct
from typing import NamedTuple

THREADS_PER_WARP = 32

_FORMATS = {"i64": "q", "i32": "i4x"}  # each in 8 bytes, where a launch finds it


class KernelSpec(NamedTuple):
    """A Triton kernel with its constants.

    Attributes:
        module: the module that holds it, as a dotted name that can be imported.
        function: its name there, decorated with `triton.jit`.
        parameters: name and type, "i64" or "i32", of each argument of a launch, in the kernel's order. Addresses are
            "i64", and the kernel casts them: Triton takes pointers from PyTorch's tensors only.
        constants: name and value of its `tl.constexpr` parameters.
        warps: of 32 threads each, in a block.
    """

    module: str
    function: str
    parameters: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int], ...]
    warps: int

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

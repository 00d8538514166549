"""Modules of simulated kernels, their functions, and launches.

The machine code of the simulated GPU is the name of a Triton kernel with its constants, as JSON behind `MAGIC`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvoffload.simulator import interpreter
from kvoffload.simulator.contexts import Context, Operation
from kvoffload.simulator.memory import MemoryTable
from kvoffload.simulator.operations import BYTES_PER_MICROSECOND, MICROSECONDS_PER_COPY, DeviceFaultError

MAGIC = b"kvoffload simulated kernel\n"
DEFAULT_SHARED_BYTES = 48 << 10  # what a launch may ask for without cuFuncSetAttribute
IMAGE_SHARED_BYTES = 64 << 10  # what launches of an image need if it does not say: more than they get without asking


@dataclass(slots=True, eq=False)
class Code:
    """What an image says. `parameters`: names and types, "i32" or "i64"; `threads` and `shared_bytes` of a block."""

    module: str
    function: str
    parameters: list[tuple[str, str]]
    constants: dict[str, int]
    threads: int
    shared_bytes: int

    @classmethod
    def parse(cls, image: bytes) -> Code:
        """Read an image; ValueError or TypeError if it is none."""
        if not image.startswith(MAGIC):
            raise ValueError("no image of a simulated kernel")
        code = cls(**json.loads(image[len(MAGIC) :]))
        code.parameters = [(str(name), str(kind)) for name, kind in code.parameters]
        if {kind for _, kind in code.parameters} - {"i32", "i64"}:
            raise ValueError(f"parameters are i32 or i64, these are {code.parameters}")
        return code


@dataclass(slots=True, eq=False)
class Function:
    """A kernel of a module; `max_dynamic_shared_bytes` is what its launches may ask for."""

    handle: int
    module: Module
    kernel: interpreter.Interpreted
    max_dynamic_shared_bytes: int = DEFAULT_SHARED_BYTES


@dataclass(slots=True, eq=False)
class Module:
    """Code loaded into a context; `pending` counts the queued launches of its functions."""

    handle: int
    context: Context
    code: Code
    functions: list[Function] = field(default_factory=list)
    pending: int = 0


@dataclass(slots=True, eq=False)
class LaunchOperation(Operation):
    """A kernel's launch. Arguments were read when it was launched; the memory they point to is read when it runs."""

    function: Function
    grid: int
    shared_bytes: int
    arguments: Sequence[tuple[str, str, int]]
    memory: MemoryTable
    chance: random.Random
    stored_bytes: int = 0

    def __post_init__(self) -> None:
        self.function.module.pending += 1

    def run(self) -> float:
        """Run the programs in random order: CUDA promises none."""
        code = self.function.module.code
        if self.shared_bytes < code.shared_bytes:
            raise DeviceFaultError(f"{code.function} uses {code.shared_bytes} shared bytes, got {self.shared_bytes}")
        order = self.chance.sample(range(self.grid), self.grid)
        self.function.kernel.run(self.grid, order, self.arguments, code.constants, self.check)
        return MICROSECONDS_PER_COPY + self.stored_bytes / BYTES_PER_MICROSECOND

    def end(self) -> None:
        self.function.module.pending -= 1

    def check(self, addresses: NDArray[np.int64], nbytes: int, writes: bool) -> None:
        device = self.function.module.context.device
        if not self.memory.reachable(addresses, nbytes, device):
            each = addresses.reshape(-1, 1)
            address = next(int(one[0]) for one in each if not self.memory.reachable(one, nbytes, device))
            name, verb = self.function.module.code.function, "stored" if writes else "loaded"
            raise DeviceFaultError(f"{name} {verb} {nbytes} bytes at {address:#x}, which the GPU cannot reach")
        if writes:
            self.stored_bytes += nbytes * addresses.size


def pack(*, shared_bytes: Any = IMAGE_SHARED_BYTES, **fields: Any) -> bytes:
    return MAGIC + json.dumps(fields | {"shared_bytes": shared_bytes}).encode()

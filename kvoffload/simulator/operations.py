"""The operations in a stream's queue: each has a condition for starting, an effect, and a cost.

Costs are microseconds of a simulated clock: round figures in the proportion of a PCIe Gen5 GPU, so that elapsed
times are positive and plausible. They measure nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver as cuda

from kvoffload.simulator import space
from kvoffload.simulator.contexts import MICROSECONDS_PER_MARKER, Operation, Record
from kvoffload.simulator.errors import RefusedError
from kvoffload.simulator.memory import Indices, MemoryTable

BYTES_PER_MICROSECOND = 50_000
FLAT_COPIES_PER_PLACE = 23
MICROSECONDS_PER_COPY = 1.0
EVENT_RESOLUTION = 0.5  # microseconds

ILLEGAL_ADDRESS = cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
MISALIGNED_ADDRESS = cuda.CUresult.CUDA_ERROR_MISALIGNED_ADDRESS

_ORDER = cuda.CUmemcpySrcAccessOrder
STREAM = int(_ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)
DURING_API_CALL = int(_ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL)
ANY = int(_ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_ANY)


class DeviceFaultError(Exception):
    """The operation used an address that it may not use: its context is lost, and every call in it returns `status`."""

    def __init__(self, text: str, status: Any = ILLEGAL_ADDRESS) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True, eq=False)
class RecordOperation(Operation):
    """Records the time, in the resolution of CUDA's events: two that are close together are 0 apart."""

    record: Record
    clock: Callable[[], float]

    def run(self) -> float:
        self.record.microseconds = self.clock() // EVENT_RESOLUTION * EVENT_RESOLUTION
        return MICROSECONDS_PER_MARKER


@dataclass(slots=True, eq=False)
class WaitValueOperation(Operation):
    """Holds its stream until a word satisfies a condition of CUstreamWaitValue_flags."""

    address: int
    value: int
    condition: int

    def open(self) -> bool:
        word = space.read_word(self.address)
        if self.condition == 0:  # cyclic: (int32_t)(*addr - value) >= 0
            return (word - self.value) & 0xFFFFFFFF < 0x80000000
        if self.condition == 1:
            return word == self.value
        return bool(word & self.value) if self.condition == 2 else (word | self.value) != 0xFFFFFFFF


@dataclass(slots=True, eq=False)
class FillOperation(Operation):
    address: int
    byte: int
    nbytes: int

    def run(self) -> float:
        space.view(self.address, self.nbytes)[:] = self.byte
        return MICROSECONDS_PER_COPY + self.nbytes / BYTES_PER_MICROSECOND


@dataclass(slots=True, eq=False)
class KernelOperation(Operation):
    """A Python function in the place of a kernel; its pointers are checked when it runs, as on a GPU."""

    function: Callable[[], object]
    spans: Sequence[tuple[int, int]]
    memory: MemoryTable

    def run(self) -> float:
        for address, nbytes in self.spans:
            try:
                region = self.memory.find(address, nbytes)
            except RefusedError:
                region = None
            if region is None:
                raise DeviceFaultError(f"a kernel touched {nbytes} bytes at {address:#x}, which no GPU can reach")
        self.function()
        return MICROSECONDS_PER_COPY + sum(nbytes for _, nbytes in self.spans) / BYTES_PER_MICROSECOND


class Descriptors(NamedTuple):
    """The copies of one batch as arrays: `height` rows of `width` bytes each, pitches in bytes."""

    target: Indices
    source: Indices
    width: Indices
    height: Indices
    target_pitch: Indices
    source_pitch: Indices

    @property
    def nbytes(self) -> int:
        return int((self.width * self.height).sum())

    def select(self, chosen: Indices) -> Descriptors:
        return Descriptors(*(column[chosen] for column in self))


class Copy:
    """Copies that share one source access order. The source is read by `snapshot`, or at the latest by `run`."""

    __slots__ = ("done", "nbytes")
    places = 1

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.done = False

    def snapshot(self) -> None:
        raise NotImplementedError

    def run(self, fault: bool) -> None:
        """Write the target; with `fault` only a part, like a copy that is cut off."""
        raise NotImplementedError


class LinearCopy(Copy):
    __slots__ = ("_bytes", "source", "target")

    def __init__(self, target: int, source: int, nbytes: int) -> None:
        super().__init__(nbytes)
        self.target = target
        self.source = source
        self._bytes: space.Bytes | None = None

    def snapshot(self) -> None:
        if self._bytes is None and not self.done:
            self._bytes = space.view(self.source, self.nbytes).copy()

    def run(self, fault: bool) -> None:
        nbytes = self.nbytes // 2 if fault else self.nbytes
        source = space.view(self.source, nbytes) if self._bytes is None else self._bytes[:nbytes]
        space.view(self.target, nbytes)[:] = source
        self.done, self._bytes = True, None


class BatchCopy(Copy):
    """Many strided copies, carried out in random order: CUDA promises none."""

    __slots__ = ("_bytes", "chance", "descriptors", "places")

    def __init__(self, descriptors: Descriptors, chance: random.Random) -> None:
        super().__init__(descriptors.nbytes)
        count = len(descriptors.width)
        self.places = count if (descriptors.height > 1).any() else -(-count // FLAT_COPIES_PER_PLACE)
        self.descriptors = descriptors
        self.chance = chance
        self._bytes: list[space.Bytes] | None = None

    def snapshot(self) -> None:
        if self._bytes is None and not self.done:
            columns = self.descriptors
            lists = (columns.source, columns.width, columns.height, columns.source_pitch)
            self._bytes = [space.rows(*row).copy() for row in zip(*(each.tolist() for each in lists), strict=True)]

    def run(self, fault: bool) -> None:
        count = len(self.descriptors.width)
        order = np.random.default_rng(self.chance.getrandbits(32)).permutation(count)
        if fault:
            order = order[: count // 2]
        rows, view = space.rows, space.view
        columns = self.descriptors.select(order)
        copies = zip(*(column.tolist() for column in columns), strict=True)
        if self._bytes is not None:
            for index, (target, _, width, height, pitch, _) in zip(order.tolist(), copies, strict=True):
                rows(target, width, height, pitch)[:] = self._bytes[index]
        elif (columns.height == 1).all():  # slices are quicker
            for target, source, width, *_ in copies:
                view(target, width)[:] = view(source, width)
        else:
            for target, source, width, height, target_pitch, source_pitch in copies:
                rows(target, width, height, target_pitch)[:] = rows(source, width, height, source_pitch)
        self.done, self._bytes = True, None


@dataclass(slots=True, eq=False)
class CopyOperation(Operation):
    parts: Sequence[Copy]
    fault: bool = False

    def run(self) -> float:
        for part in self.parts:
            part.run(self.fault)
        if self.fault:
            raise DeviceFaultError("an injected fault")
        return MICROSECONDS_PER_COPY * len(self.parts) + sum(p.nbytes for p in self.parts) / BYTES_PER_MICROSECOND

    def end(self) -> None:
        for part in self.parts:  # a dropped copy must not be read early when its source is long gone
            part.done = True

"""The blocks that `bench interop` moves between a framework's cache and the host, and how methods are timed.

Times are of the wall clock, from the call until the bytes can be used: a store ends when the host may read them, a load
when the framework has computed with them. Transfers back to back are queued one after the other and waited for
at their end; the time of one is its share of the whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job
from kvoffload.internal.models import ModelGeometry
from kvoffload.internal.types import UInt8Array
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.transfer_plan import Direction
from kvoffload_bench.harness import POISON, Lab, Scenario

Elements = npt.NDArray[np.uint16]
Move = Callable[[], Job | None]

POISON_ELEMENT = POISON * 0x101
_MAX_POOL_BYTES = 512 << 20  # unless the slots of a transfer are more
_KEPT_BITS, _SET_BITS = 0x9FFF, 0x2000


class FrameworkData:
    """Random blocks of a cache of 16-bit elements, random slots for them, and their bytes.

    Attributes:
        shape: of the cache: (planes, blocks, elements).
        num_slots: of an engine's pool.
        blocks, slots: int64, (count,); no two blocks are adjacent.
        right: what the blocks hold, plane by plane: (planes, count, elements). Normal numbers as fp16 and as bf16, so
            that a framework may compute with them.
        right_by_block: the same as (count, planes, elements).
        nbytes: of all these blocks.
    """

    def __init__(self, lab: Lab, geometry: ModelGeometry, count: int) -> None:
        generator = np.random.default_rng(lab.seed)
        self.lab, self.block_bytes = lab, geometry.block_bytes
        num_blocks = max(lab.size.plane_bytes // self.block_bytes, 2 * count)
        self.shape = (geometry.planes, num_blocks, self.block_bytes // 2)
        self.num_slots = max(count, min(4 * count, _MAX_POOL_BYTES // geometry.bytes_per_block))
        self.blocks = generator.permutation(np.arange(0, num_blocks - 1, 2, dtype=np.int64))[:count]
        self.slots = generator.permutation(np.arange(self.num_slots, dtype=np.int64))[:count]
        bits = generator.integers(0, 1 << 16, (geometry.planes, count, self.shape[2]), dtype=np.uint16)
        self.right: Elements = bits & np.uint16(_KEPT_BITS) | np.uint16(_SET_BITS)
        self.right_by_block: Elements = np.ascontiguousarray(self.right.swapaxes(0, 1))
        self.nbytes = self.right.nbytes

    def wrong(self, found: Iterable[npt.NDArray[Any]], right: Iterable[Elements]) -> int:
        """How many rows, each as long as a block of a plane, differ between these arrays."""
        pairs = [(_bytes_of(each), _bytes_of(expected)) for each, expected in zip(found, right, strict=True)]
        return self.lab.wrong_rows(pairs, self.block_bytes)

    def engine(self, layout: KVLayout) -> OffloadEngine:
        return OffloadEngine(layout, device=self.lab.device, num_slots=self.num_slots)


def _bytes_of(array: npt.NDArray[Any]) -> UInt8Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Side(Protocol):
    """The blocks on one side: in the framework's cache, or on the host."""

    def fill(self) -> None:
        """Write the right bytes into the blocks."""

    def poison(self) -> None:
        """Overwrite the blocks."""

    def wait(self) -> None:
        """Wait until the bytes of all queued transfers to this side can be used."""

    def wrong(self) -> int:
        """The number of rows that do not hold the bytes that `fill` writes."""


class EngineSlots:
    """The slots of an engine."""

    def __init__(self, data: FrameworkData, engine: OffloadEngine) -> None:
        payload = data.right_by_block[0].nbytes
        self._data, self._engine = data, engine
        self._slots = [engine.slots[slot, :payload] for slot in data.slots]

    def fill(self) -> None:
        for slot, block in zip(self._slots, self._data.right_by_block, strict=True):
            slot[:] = _bytes_of(block)

    def poison(self) -> None:
        self._data.lab.poison(self._slots)

    def wait(self) -> None:
        self._engine.drain()

    def wrong(self) -> int:
        return self._data.wrong(self._slots, self._data.right_by_block)


@dataclass(frozen=True)
class FrameworkMethod:
    """A method of moving the blocks from a framework's cache to the host and back.

    Attributes:
        framework, name: for tables.
        cache, host: the two sides.
        store: queues a store.
        load: queues a load, and a computation that reads what is loaded. Both return a job if this library does it.
    """

    framework: str
    name: str
    cache: Side
    host: Side
    store: Move
    load: Move

    @property
    def label(self) -> str:
        return f"{self.framework}: {self.name}"

    def source(self, direction: Direction) -> Side:
        return self.cache if direction is Direction.STORE else self.host

    def move(self, direction: Direction) -> Move:
        return self.store if direction is Direction.STORE else self.load

    def target(self, direction: Direction) -> Side:
        return self.host if direction is Direction.STORE else self.cache

    def execute(self, direction: Direction, times: int = 1) -> list[Job]:
        """Queue `times` transfers, and wait for all. Returns the jobs of this library's, which may have failed."""
        move = self.move(direction)
        moved = [move() for _ in range(times)]
        self.target(direction).wait()
        return [job for job in moved if job is not None]

    def scenario(self, direction: Direction, data: FrameworkData, times: int) -> Scenario:
        """`times` transfers back to back; one before them warms up the CPU's caches. No block to be stored is in the
        GPU's cache.
        """
        target = self.target(direction)

        def poison() -> None:
            self.execute(direction)
            target.poison()
            if direction is Direction.STORE:
                data.lab.flush()

        def execute() -> float:
            begin = time.perf_counter()
            jobs = self.execute(direction, times)
            seconds = time.perf_counter() - begin
            for job in jobs:
                job.wait()  # raises if it failed
            return seconds / times

        return Scenario(execute, poison, target.wrong, data.nbytes)

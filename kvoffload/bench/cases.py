"""What every benchmark needs: a clock on the GPU, the big copy, exact comparison, and interleaved rounds.

In a round every case runs once: its targets are poisoned, it is timed, and all that it had to move is compared with
what must be there. Figures are medians over the rounds after the first. Just before it is timed, the same way of
copying moves a few blocks elsewhere: a CPU that has compared 32 MiB has cold caches, one that serves has not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvoffload.device.buffers import DeviceBuffer
from kvoffload.device.device import Device
from kvoffload.device.pinned import PAGE_BYTES, PinnedMemory
from kvoffload.internal import hostinfo
from kvoffload.internal.types import UInt8Array
from kvoffload.planning.transfer_plan import Direction

POISON = 0xA5
WARM_UP = 1  # rounds that are not counted
BIG_COPY = "big copy"
_THREADED_BYTES = 1 << 20
_TILE_BYTES = 8 << 20  # of the big copy's pattern: repeated, so that it stays in the CPU's caches


class Size(NamedTuple):
    """How big the cases are.

    Attributes:
        payload_bytes: of a transfer, at least.
        plane_bytes: of a plane, about.
        big_bytes: of the big copy.
        scale: of block bytes.
        descriptors: of the flat batches that are compared at one number of descriptors.
        flush_bytes: more than the GPU's cache holds.
    """

    payload_bytes: int
    plane_bytes: int
    big_bytes: int
    scale: float
    descriptors: int
    flush_bytes: int


# Strided copies are faster where planes lie less than 32 MiB apart; beyond that, up to 1 GiB, they are all alike.
FULL = Size(32 << 20, 64 << 20, 256 << 20, 1.0, 4096, 160 << 20)
SMALL = Size(8 << 10, 32 << 10, 1 << 20, 1 / 64, 128, 1 << 16)  # for the simulated device


class GpuTimer:
    """A stream of its own, and what is queued on it timed by two events. Free it with `close`."""

    def __init__(self, device: Device) -> None:
        self._device, driver = device, device.driver
        self._driver = driver
        with device.current(), ExitStack() as undo:
            self.stream = driver.stream_create(0)
            undo.callback(driver.stream_destroy, self.stream)
            self._start, self._end = driver.event_create(timing=True), 0
            undo.callback(driver.event_destroy, self._start)
            self._end = driver.event_create(timing=True)
            undo.pop_all()

    def seconds(self, submit: Callable[[], object]) -> float:
        """Seconds on the GPU clock from before to after what `submit` queues on an idle stream; waits for it."""
        with self._device.current():
            try:
                self._driver.event_record(self._start, self.stream)
                submit()
                self._driver.event_record(self._end, self.stream)
                while not self._driver.event_query(self._end):
                    pass
            except BaseException:  # what is queued may use memory that is given back next
                self._driver.stream_synchronize(self.stream)
                raise
            return self._driver.event_seconds(self._start, self._end)

    def close(self) -> None:
        with self._device.current():
            self._driver.stream_destroy(self.stream)
            self._driver.event_destroy(self._start)
            self._driver.event_destroy(self._end)


class Case(NamedTuple):
    """Something to time.

    Attributes:
        run: does it once, and waits; seconds.
        poison: overwrites what it has to write.
        wrong: how many rows of bytes are not what they must be.
        nbytes: what it moves.
        warm: does the like, of other bytes.
    """

    run: Callable[[], float]
    poison: Callable[[], None]
    wrong: Callable[[], int]
    nbytes: int
    warm: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Timing:
    """What came out of the rounds of one case.

    Attributes:
        nbytes: moved each time.
        seconds: of each counted round.
        wrong: rows of bytes that were wrong, over all rounds.
    """

    nbytes: int
    seconds: list[float] = field(default_factory=list)
    wrong: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.median / 1e9


def run_rounds(cases: Mapping[str, Case], repeats: int) -> dict[str, Timing]:
    """Every case once a round; each round begins with another one."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    wrong = dict.fromkeys(cases, 0)
    names = list(cases)
    for number in range(WARM_UP + repeats):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            case = cases[name]
            case.poison()
            case.warm()
            seconds[name].append(case.run())
            wrong[name] += case.wrong()
    return {name: Timing(cases[name].nbytes, seconds[name][WARM_UP:], wrong[name]) for name in names}


class Lab:
    """A device with what benchmarks share. A context manager.

    Attributes:
        big: the big copy.
        timer: of what is not the engine's; also for whatever has to be queued and waited for.
    """

    def __init__(self, device: Device, size: Size, *, repeats: int, seed: int) -> None:
        self.device, self.size, self.repeats, self.seed = device, size, repeats, seed
        self.driver = device.driver
        with ExitStack() as stack:
            self._threads = stack.enter_context(ThreadPoolExecutor(min(16, hostinfo.usable_cpus())))
            self.timer = stack.enter_context(closing(GpuTimer(device)))
            self.big = stack.enter_context(closing(BigCopy(self, size.big_bytes)))
            self._flush = stack.enter_context(device.allocate(size.flush_bytes))
            self._stack = stack.pop_all()

    def wrong_rows(self, pairs: Sequence[tuple[UInt8Array, UInt8Array]], row_bytes: int) -> int:
        """In how many rows of `row_bytes` (a multiple of 8) bytes differ, between contiguous 1-D arrays."""
        if sum(found.nbytes for found, _ in pairs) < _THREADED_BYTES:
            return sum(_wrong_rows(pair, row_bytes) for pair in pairs)
        return sum(self._threads.map(partial(_wrong_rows, row_bytes=row_bytes), pairs))

    def flush(self) -> None:
        """Drive everything else out of the GPU's cache."""
        self.timer.seconds(lambda: self.driver.fill(self._flush.address, 0, self._flush.nbytes, self.timer.stream))

    def in_threads(self, work: Callable[[Any], object], items: Iterable[Any]) -> None:
        list(self._threads.map(work, items))

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _wrong_rows(pair: tuple[UInt8Array, UInt8Array], row_bytes: int) -> int:
    words, right = (array.view(np.uint64) for array in pair)
    if np.array_equal(words, right):
        return 0
    return int((words != right).reshape(-1, row_bytes // 8).any(axis=1).sum())


class BigCopy:
    """One contiguous pinned copy: what the link gives. Close it before the device."""

    def __init__(self, lab: Lab, nbytes: int) -> None:
        self._lab, self.nbytes = lab, -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self._tile = np.random.default_rng(lab.seed).integers(0, 256, min(self.nbytes, _TILE_BYTES), dtype=np.uint8)
        self._buffers: list[DeviceBuffer] = []
        self._pinned: list[PinnedMemory] = []
        try:
            for _ in range(2):
                with lab.device.current():
                    self._pinned.append(PinnedMemory(lab.driver, self.nbytes))
                self._buffers.append(lab.device.allocate(self.nbytes))
            self._host, self._check = self._pinned
            self._gpu, self._spoiled = self._buffers
            lab.in_threads(lambda tile: np.copyto(tile, self._tile[: len(tile)]), self._tiles(self._host))
            self._queue(lambda stream: lab.driver.fill(self._spoiled.address, POISON, self.nbytes, stream))
            self._copy(self._gpu.address, self._host.address)
        except BaseException:
            self.close()
            raise

    def case(self, direction: Direction) -> Case:
        """There is nothing to prepare: what one direction has written right is the source of the other."""
        if direction is Direction.STORE:
            return Case(
                lambda: self._copy(self._host.address, self._gpu.address),
                lambda: self._spoil(self._host),
                lambda: self._wrong(self._host),
                self.nbytes,
            )
        return Case(lambda: self._copy(self._gpu.address, self._host.address), self._fill, self._read_back, self.nbytes)

    def queue(self, direction: Direction, stream: int) -> None:
        """Queue the copy, without a look at its bytes."""
        target, source = self._host.address, self._gpu.address
        if direction is Direction.LOAD:
            target, source = source, target
        self._lab.driver.copy(target, source, self.nbytes, stream)

    def _queue(self, submit: Callable[[int], object]) -> float:
        timer = self._lab.timer
        return timer.seconds(lambda: submit(timer.stream))

    def _copy(self, target: int, source: int) -> float:
        return self._queue(lambda stream: self._lab.driver.copy(target, source, self.nbytes, stream))

    def _fill(self) -> None:
        self._queue(lambda stream: self._lab.driver.fill(self._gpu.address, POISON, self.nbytes, stream))

    def _spoil(self, host: PinnedMemory) -> None:
        self._copy(host.address, self._spoiled.address)

    def _read_back(self) -> int:
        self._spoil(self._check)
        self._copy(self._check.address, self._gpu.address)
        return self._wrong(self._check)

    def _wrong(self, host: PinnedMemory) -> int:
        """Rows of a page that are wrong."""
        pairs = [(tile, self._tile[: tile.nbytes]) for tile in self._tiles(host)]
        return self._lab.wrong_rows(pairs, PAGE_BYTES)

    def _tiles(self, host: PinnedMemory) -> list[UInt8Array]:
        step = len(self._tile)
        return [host.array[start : start + step] for start in range(0, self.nbytes, step)]

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        with self._lab.device.current():
            for memory in self._pinned:
                memory.release()

"""What all benchmarks of transfers measure with: a clock, an exact comparison, rounds in turns, the contiguous copy.

Interleaved rounds: each scenario executes once a round, so that one slow minute of the machine hits all alike. Before a
scenario is timed its targets are poisoned, after it all bytes that it had to write are compared with what they must be.
Figures are medians over the rounds that follow `WARM_UP` uncounted ones. Right before it is timed, a scenario may move
a few other blocks with the same copy method: a CPU that has just compared 32 MiB has cold caches, the CPU of a server
has not.
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


class GpuTimer:
    """A stream with two timing events. Free it with `close` before the device is closed.

    Attributes:
        stream: handle of the stream; it is idle whenever no method of the timer is being called.
    """

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
        """Call `submit`, which queues work on the idle stream, and wait. Returns its seconds on the GPU clock."""
        with self._device.current():
            try:
                self._driver.event_record(self._start, self.stream)
                submit()
                self._driver.event_record(self._end, self.stream)
                while not self._driver.event_query(self._end):
                    pass
            except BaseException:  # the queued work may use memory that the caller frees next
                self._driver.stream_synchronize(self.stream)
                raise
            return self._driver.event_seconds(self._start, self._end)

    def close(self) -> None:
        """Destroy the stream and the events."""
        with self._device.current():
            self._driver.stream_destroy(self.stream)
            self._driver.event_destroy(self._start)
            self._driver.event_destroy(self._end)


# tools ----------------------------------------------------------------------------------------------------------------

POISON = 0xA5
_THREADED_BYTES = 1 << 20


class Size(NamedTuple):
    """How large the measured transfers are.

    Attributes:
        payload_bytes: bytes of a transfer, at least.
        plane_bytes: bytes of a plane, about.
        contiguous_bytes: bytes of the contiguous copy.
        scale: factor on the block bytes of models.
        descriptors: copies of the flat batches that are compared at one number of descriptors.
        flush_bytes: more bytes than the GPU's cache holds.
    """

    payload_bytes: int
    plane_bytes: int
    contiguous_bytes: int
    scale: float
    descriptors: int
    flush_bytes: int


# Strided copies are faster where planes lie less than 32 MiB apart; from there up to 1 GiB they are all alike.
FULL = Size(32 << 20, 64 << 20, 256 << 20, 1.0, 4096, 160 << 20)
SMALL = Size(8 << 10, 32 << 10, 1 << 20, 1 / 64, 128, 1 << 16)  # for the simulated device


class BenchTools:
    """Free it with `close`, before the device is closed.

    Attributes:
        device, size, repeats, seed: as given.
        driver: of the device.
        timer: times bare driver calls; benchmarks also use its stream for work that they wait for.
    """

    def __init__(self, device: Device, size: Size, *, repeats: int, seed: int) -> None:
        self.device, self.size, self.repeats, self.seed = device, size, repeats, seed
        self.driver = device.driver
        with ExitStack() as stack:
            self._threads = stack.enter_context(ThreadPoolExecutor(min(16, hostinfo.usable_cpus())))
            self.timer = stack.enter_context(closing(GpuTimer(device)))
            self._flush = stack.enter_context(device.allocate(size.flush_bytes))
            self._stack = stack.pop_all()

    def wrong_rows(self, pairs: Sequence[tuple[UInt8Array, UInt8Array]], row_bytes: int) -> int:
        """The number of rows that differ between contiguous 1-D arrays; `row_bytes` is a multiple of 8."""
        if sum(found.nbytes for found, _ in pairs) < _THREADED_BYTES:
            return sum(_wrong_rows(pair, row_bytes) for pair in pairs)
        return sum(self._threads.map(partial(_wrong_rows, row_bytes=row_bytes), pairs))

    def flush(self) -> None:
        """Replace the content of the GPU's cache."""
        self.timer.seconds(lambda: self.driver.fill(self._flush.address, 0, self._flush.nbytes, self.timer.stream))

    def in_threads(self, work: Callable[[Any], object], items: Iterable[Any]) -> None:
        """Call `work` for each item, on several threads; returns when all calls have."""
        list(self._threads.map(work, items))

    def close(self) -> None:
        self._stack.close()


def _wrong_rows(pair: tuple[UInt8Array, UInt8Array], row_bytes: int) -> int:
    words, right = (array.view(np.uint64) for array in pair)
    if np.array_equal(words, right):
        return 0
    return int((words != right).reshape(-1, row_bytes // 8).any(axis=1).sum())


# rounds in turns ------------------------------------------------------------------------------------------------------

WARM_UP = 1  # rounds that are not counted


class Scenario(NamedTuple):
    """A transfer, or anything else that writes bytes, to be timed.

    Attributes:
        execute: does it once, waits for its end, and returns its seconds.
        poison: overwrites the bytes that `execute` has to write.
        wrong: the number of rows whose bytes are not what `execute` must have written.
        nbytes: bytes that one execution moves.
        warm_up: the same kind of work on other bytes, not timed.
    """

    execute: Callable[[], float]
    poison: Callable[[], None]
    wrong: Callable[[], int]
    nbytes: int
    warm_up: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Timing:
    """The result of the rounds of one scenario.

    Attributes:
        nbytes: bytes that one execution moves.
        seconds: of each counted round.
        wrong: wrong rows, summed over all rounds, the uncounted ones included.
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


def time_rounds(scenarios: Mapping[str, Scenario], repeats: int, warm_up: int = WARM_UP) -> dict[str, Timing]:
    """Execute every scenario once in each of `warm_up + repeats` rounds; each round begins with another scenario."""
    seconds: dict[str, list[float]] = {name: [] for name in scenarios}
    wrong = dict.fromkeys(scenarios, 0)
    names = list(scenarios)
    for number in range(warm_up + repeats):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            scenario = scenarios[name]
            scenario.poison()
            scenario.warm_up()
            seconds[name].append(scenario.execute())
            wrong[name] += scenario.wrong()
    return {name: Timing(scenarios[name].nbytes, seconds[name][warm_up:], wrong[name]) for name in names}


# the contiguous copy --------------------------------------------------------------------------------------------------

CONTIGUOUS_COPY = "contiguous copy"
_PATTERN_BYTES = 8 << 20  # the pattern repeats, so that it stays in the CPU's caches


class ContiguousCopy:
    """One copy of `nbytes` (rounded up to pages) between pinned and GPU memory. Free it with `close`."""

    def __init__(self, tools: BenchTools, nbytes: int) -> None:
        self._tools, self.nbytes = tools, -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        random = np.random.default_rng(tools.seed)
        self._pattern = random.integers(0, 256, min(self.nbytes, _PATTERN_BYTES), dtype=np.uint8)
        self._buffers: list[DeviceBuffer] = []
        self._pinned: list[PinnedMemory] = []
        try:
            for _ in range(2):
                with tools.device.current():
                    self._pinned.append(PinnedMemory(tools.driver, self.nbytes, unit_bytes=self.nbytes))
                self._buffers.append(tools.device.allocate(self.nbytes))
            self._host, self._check = self._pinned
            self._gpu, self._poison = self._buffers
            tools.in_threads(lambda each: np.copyto(each, self._pattern[: len(each)]), self._sections(self._host))
            self._queue(lambda stream: tools.driver.fill(self._poison.address, POISON, self.nbytes, stream))
            self._copy(self._gpu.address, self._host.address)
        except BaseException:
            self.close()
            raise

    def scenario(self, direction: Direction) -> Scenario:
        """Needs no preparation: the bytes that one direction has written are the source of the other."""
        if direction is Direction.STORE:
            return Scenario(
                lambda: self._copy(self._host.address, self._gpu.address),
                lambda: self._poison_host(self._host),
                lambda: self._wrong(self._host),
                self.nbytes,
            )
        return Scenario(
            lambda: self._copy(self._gpu.address, self._host.address), self._poison_gpu, self._read_back, self.nbytes
        )

    def queue(self, direction: Direction, stream: int, *, first: int = 0, nbytes: int | None = None) -> None:
        """Queue the copy on a stream, and return: of `nbytes` from byte `first` on, None: of all. Its bytes are not
        verified here.
        """
        target, source = self._host.address + first, self._gpu.address + first
        if direction is Direction.LOAD:
            target, source = source, target
        self._tools.driver.copy(target, source, self.nbytes if nbytes is None else nbytes, stream)

    def _queue(self, submit: Callable[[int], object]) -> float:
        timer = self._tools.timer
        return timer.seconds(lambda: submit(timer.stream))

    def _copy(self, target: int, source: int) -> float:
        return self._queue(lambda stream: self._tools.driver.copy(target, source, self.nbytes, stream))

    def _poison_gpu(self) -> None:
        self._queue(lambda stream: self._tools.driver.fill(self._gpu.address, POISON, self.nbytes, stream))

    def _poison_host(self, host: PinnedMemory) -> None:
        self._copy(host.address, self._poison.address)

    def _read_back(self) -> int:
        self._poison_host(self._check)
        self._copy(self._check.address, self._gpu.address)
        return self._wrong(self._check)

    def _wrong(self, host: PinnedMemory) -> int:
        """Wrong rows of a page each."""
        pairs = [(each, self._pattern[: each.nbytes]) for each in self._sections(host)]
        return self._tools.wrong_rows(pairs, PAGE_BYTES)

    def _sections(self, host: PinnedMemory) -> list[UInt8Array]:
        step = len(self._pattern)
        return [host.array[start : start + step] for start in range(0, self.nbytes, step)]

    def close(self) -> None:
        """Free the memory; no copy of it may be queued."""
        for buffer in self._buffers:
            buffer.close()
        with self._tools.device.current():
            for memory in self._pinned:
                memory.release()


class Lab(BenchTools):
    """A context manager. Close it before the device.

    Attributes:
        contiguous: the contiguous copy, of `size.contiguous_bytes`.
    """

    def __init__(self, device: Device, size: Size, *, repeats: int, seed: int) -> None:
        super().__init__(device, size, repeats=repeats, seed=seed)
        with ExitStack() as undo:
            undo.callback(super().close)
            self.contiguous = undo.enter_context(closing(ContiguousCopy(self, size.contiguous_bytes)))
            self._undo = undo.pop_all()

    def close(self) -> None:
        self._undo.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

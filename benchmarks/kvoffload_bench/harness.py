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
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from kvoffload.calibration.compute import new_events, pinned_memory
from kvoffload.device.device import Device
from kvoffload.device.pinned import PAGE_BYTES
from kvoffload.driver import address_of
from kvoffload.internal import hostinfo
from kvoffload.internal.teardown import Undoing as Undoing
from kvoffload.internal.types import UInt8Array
from kvoffload.planning.transfer_plan import Direction


class GpuTimer(Undoing):
    """A stream with two timing events. Free it with `close` before the device is closed.

    Attributes:
        stream: handle of the stream; it is idle whenever no method of the timer is being called.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._driver = device, device.driver
        with ExitStack() as undo:
            self.stream = undo.enter_context(device.stream()).handle
            self._start, self._end = undo.enter_context(new_events(device, 2, timing=True))
            self._undo = undo.pop_all()

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


class Lab(Undoing):
    """A device, and what every benchmark of transfers needs. A context manager; close it before the device.

    Attributes:
        device, size, repeats, seed: as given.
        driver: of the device.
        timer: times bare driver calls; benchmarks also use its stream for work that they wait for.
        contiguous: the contiguous copy, of `size.contiguous_bytes`.
    """

    def __init__(self, device: Device, size: Size, *, repeats: int, seed: int) -> None:
        self.device, self.size, self.repeats, self.seed = device, size, repeats, seed
        self.driver = device.driver
        with ExitStack() as undo:
            self._threads = undo.enter_context(ThreadPoolExecutor(min(16, hostinfo.usable_cpus())))
            self.timer = undo.enter_context(GpuTimer(device))
            self._poison = undo.enter_context(device.allocate(size.flush_bytes))
            self.flush()
            self.contiguous = undo.enter_context(ContiguousCopy(self, size.contiguous_bytes))
            self._undo = undo.pop_all()

    def wait(self, submit: Callable[[int], object]) -> float:
        """Call `submit` with the timer's stream, to queue work on it, and wait. Returns seconds on the GPU clock."""
        return self.timer.seconds(lambda: submit(self.timer.stream))

    def flush(self) -> None:
        """Replace the content of the GPU's cache."""
        self.fill([(self._poison.address, self._poison.nbytes)])

    def fill(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Overwrite ranges of GPU memory, each an address and a number of bytes."""

        def submit(stream: int) -> None:
            for address, nbytes in ranges:
                self.driver.fill(address, POISON, nbytes, stream)

        self.wait(submit)

    def poison(self, targets: Iterable[UInt8Array]) -> None:
        """Overwrite arrays in pinned memory. The GPU does it, so that the CPU's caches hold nothing of them."""
        most = self._poison.nbytes

        def submit(stream: int) -> None:
            for target in targets:
                for first in range(0, target.nbytes, most):
                    nbytes = min(most, target.nbytes - first)
                    self.driver.copy(address_of(target) + first, self._poison.address, nbytes, stream)

        self.wait(submit)

    def write(self, pairs: Iterable[tuple[UInt8Array, UInt8Array]]) -> None:
        """Copy the second array of each pair to the first, on several threads."""
        list(self._threads.map(lambda pair: np.copyto(*pair), pairs))

    def wrong_rows(self, pairs: Sequence[tuple[UInt8Array, UInt8Array]], row_bytes: int) -> int:
        """The number of rows that differ between contiguous 1-D arrays; `row_bytes` is a multiple of 8."""
        count = partial(_wrong_rows, row_bytes=row_bytes)
        small = sum(found.nbytes for found, _ in pairs) < _THREADED_BYTES
        return sum(map(count, pairs) if small else self._threads.map(count, pairs))


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


class ContiguousCopy(Undoing):
    """One copy of `nbytes` (rounded up to pages) between pinned and GPU memory. Free it with `close`, when no copy is
    queued.
    """

    def __init__(self, lab: Lab, nbytes: int) -> None:
        self._lab, self.nbytes = lab, -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        random = np.random.default_rng(lab.seed)
        self._pattern = random.integers(0, 256, min(self.nbytes, _PATTERN_BYTES), dtype=np.uint8)
        with ExitStack() as undo:
            self._gpu = undo.enter_context(lab.device.allocate(self.nbytes))
            self._host, self._check = (
                undo.enter_context(pinned_memory(lab.device, self.nbytes)).array for _ in range(2)
            )
            lab.write(self._sections(self._host))
            lab.wait(lambda stream: self.queue(Direction.LOAD, stream))
            self._undo = undo.pop_all()

    def scenario(self, direction: Direction) -> Scenario:
        """Needs no preparation: the bytes that one direction has written are the source of the other."""
        execute = partial(self._lab.wait, partial(self.queue, direction))
        if direction is Direction.STORE:
            return Scenario(
                execute, lambda: self._lab.poison([self._host]), lambda: self._wrong(self._host), self.nbytes
            )
        return Scenario(
            execute, lambda: self._lab.fill([(self._gpu.address, self.nbytes)]), self._read_back, self.nbytes
        )

    def queue(self, direction: Direction, stream: int, *, first: int = 0, nbytes: int | None = None) -> None:
        """Queue the copy on a stream, and return: of `nbytes` from byte `first` on, None: of all. Its bytes are not
        verified here.
        """
        target, source = address_of(self._host) + first, self._gpu.address + first
        if direction is Direction.LOAD:
            target, source = source, target
        self._lab.driver.copy(target, source, self.nbytes if nbytes is None else nbytes, stream)

    def _read_back(self) -> int:
        self._lab.poison([self._check])
        target, copy = address_of(self._check), self._lab.driver.copy
        self._lab.wait(lambda stream: copy(target, self._gpu.address, self.nbytes, stream))
        return self._wrong(self._check)

    def _wrong(self, host: UInt8Array) -> int:
        """Wrong rows of a page each."""
        return self._lab.wrong_rows(self._sections(host), PAGE_BYTES)

    def _sections(self, host: UInt8Array) -> list[tuple[UInt8Array, UInt8Array]]:
        """Parts of an array, each with its right bytes."""
        step = len(self._pattern)
        parts = (host[start : start + step] for start in range(0, self.nbytes, step))
        return [(part, self._pattern[: part.nbytes]) for part in parts]

"""Transfers that follow each other without a pause, concurrent with a computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from kvoffload.device.streams import NO_WAIT
from kvoffload.engine.job import Job
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopierChoice
from kvoffload_bench.baselines import GridStride
from kvoffload_bench.lab import Lab
from kvoffload_bench.setup import TransferSetup


def _queued(lab: Lab) -> int:
    """Unfinished transfers to keep: on a GPU one that is being copied and two behind it."""
    return 1 if lab.device.simulated else 3


class Background(Protocol):
    """Submits the same transfer repeatedly.

    Attributes:
        nbytes: bytes of one transfer.
        seconds: on the GPU clock, of every transfer that had ended when `finish` was called.
    """

    nbytes: int
    seconds: list[float]

    def submit(self, after: int | None = None) -> None:
        """Queue one transfer; it starts after the work that is queued on the stream `after` now."""

    def top_up(self) -> None:
        """Queue transfers until as many are unfinished as should be."""

    def finish(self) -> None:
        """Wait until all have ended. The time of those still unfinished is not counted: the computation is over."""


class EngineBackground:
    """Transfers through an engine; `copier` as for `TransferSetup.submit`."""

    def __init__(self, setup: TransferSetup, direction: Direction, copier: CopierChoice) -> None:
        self._setup, self._direction, self._copier = setup, direction, copier
        self.nbytes = setup.nbytes
        self.seconds: list[float] = []
        self.reason = ""
        self._jobs: deque[Job] = deque()

    def submit(self, after: int | None = None) -> None:
        order: Any = NO_WAIT if after is None else after
        jobs = self._setup.submit(self._direction, self._copier, after=order)
        self.reason = jobs[0].reason
        self._jobs += jobs

    def top_up(self) -> None:
        while self._jobs and self._jobs[0].done:
            self._retire()
        while len(self._jobs) < _queued(self._setup.lab):
            self.submit()

    def finish(self) -> None:
        while self._jobs and self._jobs[0].done:
            self._retire()
        while self._jobs:
            self._jobs.popleft().wait()

    def _retire(self) -> None:
        self.seconds.append(self._jobs.popleft().wait().seconds)


class StreamBackground:
    """Transfers by bare driver calls: `queue` is called with the stream of the lab's timer. Free it with `close`."""

    def __init__(self, lab: Lab, queue: Callable[[int], object], nbytes: int) -> None:
        self._lab, self._queue = lab, queue
        self.nbytes = nbytes
        self.seconds: list[float] = []
        self._driver, self._stream = lab.driver, lab.timer.stream
        self._timers: list[int] = []
        self._free: list[tuple[int, int]] = []
        self._unfinished: deque[tuple[int, int]] = deque()
        with lab.device.current():
            self._order = self._driver.event_create(timing=False)

    def submit(self, after: int | None = None) -> None:
        driver, stream = self._driver, self._stream
        with self._lab.device.current():
            pair = self._free.pop() if self._free else (self._timer(), self._timer())
            if after is not None:
                driver.event_record(self._order, after)
                driver.stream_wait_event(stream, self._order)
            driver.event_record(pair[0], stream)
            self._queue(stream)
            driver.event_record(pair[1], stream)
            self._unfinished.append(pair)

    def _timer(self) -> int:
        self._timers.append(self._driver.event_create(timing=True))
        return self._timers[-1]

    def top_up(self) -> None:
        self._collect()
        while len(self._unfinished) < _queued(self._lab):
            self.submit()

    def finish(self) -> None:
        self._collect()
        while self._unfinished:
            self._collect(counted=False)

    def _collect(self, *, counted: bool = True) -> None:
        with self._lab.device.current():
            while self._unfinished and self._driver.event_query(self._unfinished[0][1]):
                pair = self._unfinished.popleft()
                if counted:
                    self.seconds.append(self._driver.event_seconds(*pair))
                self._free.append(pair)

    def close(self) -> None:
        """Wait for all queued work, also that of a `submit` that failed: the caller frees its memory next."""
        with self._lab.device.current(), ExitStack() as undo:
            for event in (self._order, *self._timers):
                undo.callback(self._driver.event_destroy, event)
            self._driver.stream_synchronize(self._stream)


def grid_background(grid: GridStride, setup: TransferSetup, direction: Direction, programs: int) -> StreamBackground:
    """Transfers by the grid-stride kernel; its arrays are written once and copied to the GPU for every transfer."""
    return StreamBackground(setup.lab, grid.stage(setup, direction, setup.ends(direction), programs), setup.nbytes)

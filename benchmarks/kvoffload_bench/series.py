"""Series of transfers, concurrent with a computation, by several methods in turns: `bench field` and `bench vllm`.

A *place* is a situation of the GPU with the directions that transfers move in. In it every method has a series once a
round, and the computation is timed alone once a round. A *cell* is the record of one method in one place, with these
fields; those of times are missing on the simulated device:

    situation, direction, method                            where it was measured, and what copied
    nbytes, transfers                                       bytes of a transfer; transfers of a series
    wrong                                                   wrong rows of targets, over all rounds
    chosen                                                  of a choice: jobs by direction and copy method
    gb_per_s, samples_gb_per_s                              median of the series that count; of every counted round
    rounds, rounds_compute_ended                            counted rounds; those whose computation ended or paused
    call_median_us, call_max_us                             of the calls that submit a transfer
    compute_slowdown, samples_compute_slowdown              time of a product during the series over its time alone;
                                                            None in a round whose computation ended or paused
    product_alone_us                                        time of a product alone, median of the same rounds
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from kvoffload import kernels
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job
from kvoffload.errors import CapabilityError
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Advance
from kvoffload.tuning import CopierName
from kvoffload_bench.field_compute import ComputeTimes, ConcurrentCompute, Situation, compute_ended, slowdown
from kvoffload_bench.harness import WARM_UP, Lab, Scenario, Timing, Undoing, time_rounds

ALONE = "alone"  # the computation without transfers
Directions: TypeAlias = Literal["store", "load", "both"]
DIRECTIONS: dict[Directions, tuple[Direction, ...]] = {
    "store": (Direction.STORE,),
    "load": (Direction.LOAD,),
    "both": tuple(Direction),
}
_SETTLING = 16  # transfers of a direction, uncounted, in which a choice learns where it is
_HURRIED = 1  # rounds of a place while the run is behind its schedule


class Submitter(Protocol):
    """Submits the transfers of series. The device's context must be current."""

    def submit(self, direction: Direction, index: int) -> None:
        """Submit transfer `index` of the series of a direction; returns when the call that submits it does."""

    def done(self) -> bool:
        """Whether all that was submitted has ended. Never waits."""

    def finish(self) -> None:
        """Raise the failure of a transfer; all have ended."""


class Targets(Protocol):
    """What a series writes."""

    def poison(self, directions: Sequence[Direction]) -> None:
        """Overwrite the targets of the series of these directions."""

    def wrong(self, directions: Sequence[Direction]) -> int:
        """The number of wrong rows in them."""


class SeriesMethod(NamedTuple):
    """A method of a place.

    Attributes:
        nbytes: of a transfer.
        chosen: jobs of all series so far by what copied them, for its cell; None: its copy method is its name.
    """

    submitter: Submitter
    targets: Targets
    nbytes: int
    chosen: Callable[[], dict[str, Any]] | None = None


class EngineSubmitter:
    """Submits to an engine, with the copier of each direction; None leaves the choice to it.

    Args:
        transfers: by direction what each transfer copies, group by group: with `blocks` and `slots`.
        after: of every submission.
        series: transfers of a series; those with a higher index warm up, and are not counted.

    Attributes:
        chosen: by direction, how many jobs of series each copy method has carried.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        transfers: Mapping[Direction, Sequence[Sequence[Any]]],
        copiers: Mapping[Direction, CopierName | None],
        *,
        after: Any,
        series: int,
    ) -> None:
        self._engine, self._transfers, self._copiers, self._after = engine, transfers, copiers, after
        self._series = series
        self._in_series = True
        self._unfinished: deque[Job] = deque()
        self._ended: list[Job] = []
        self.chosen: dict[Direction, Counter[str]] = {direction: Counter() for direction in copiers}

    def submit(self, direction: Direction, index: int) -> None:
        engine, after, copier = self._engine, self._after, self._copiers[direction]
        self._in_series = index < self._series
        for group, each in enumerate(self._transfers[direction][index]):
            job = engine.submit(direction, each.blocks, each.slots, group=group, after=after, copier=copier)
            self._unfinished.append(job)

    def methods(self) -> dict[str, int]:
        """How many jobs of series each copy method has carried, in all directions."""
        return dict(sum(self.chosen.values(), Counter()))

    def by_direction(self) -> dict[str, dict[str, int]]:
        return {str(direction): dict(counts) for direction, counts in self.chosen.items()}

    def done(self) -> bool:
        while self._unfinished and self._unfinished[0].done:
            self._ended.append(self._unfinished.popleft())
        return not self._unfinished

    def finish(self) -> None:
        for job in self._ended:
            job.wait()
            if self._in_series and job.nbytes:
                self.chosen[job.direction][job.copier] += 1
        self._ended.clear()
        self._engine.poll()


# rounds ---------------------------------------------------------------------------------------------------------------


@dataclass
class Recorded:
    """What was recorded of the rounds of one method, in their order, the uncounted ones included.

    Attributes:
        seconds: wall clock of each series, from the first call until the last transfer has ended.
        calls: seconds of each call that submitted a transfer, by round.
        compute: of the computation, by round; empty on an idle GPU.
    """

    seconds: list[float] = field(default_factory=list)
    calls: list[list[float]] = field(default_factory=list)
    compute: list[ComputeTimes] = field(default_factory=list)


Pace = Callable[[Submitter, Sequence[Direction], int, "ConcurrentCompute | None"], tuple[float, list[float]]]
"""Executes a series: method, directions, transfers, computation. Gives the seconds of all, and those of each call."""


def queued(
    submitter: Submitter, directions: Sequence[Direction], transfers: int, compute: ConcurrentCompute | None
) -> tuple[float, list[float]]:
    """A `Pace`: all transfers are submitted, then waited for."""
    clock, calls = time.perf_counter, []
    enabled = gc.isenabled()
    gc.disable()  # with the objects of this benchmark a collection takes as long as a series
    try:
        begin = clock()
        for index in range(transfers):
            for direction in directions:
                called = clock()
                submitter.submit(direction, index)
                calls.append(clock() - called)
                if compute is not None:
                    compute.top_up()
        while not submitter.done():
            if compute is not None:
                compute.top_up()
        return clock() - begin, calls
    finally:
        if enabled:
            gc.enable()


def repeats_now(repeats: int, seconds: float | None, elapsed: float, done: int, places: int) -> int:
    """Rounds for the next place: fewer while the run is behind a schedule of `seconds`; None: no schedule."""
    behind = seconds is not None and elapsed * places > seconds * done
    return min(repeats, _HURRIED) if behind and done else repeats


class SeriesRun(Undoing):
    """The places of one run. A context manager, which keeps the computations.

    Args:
        groups: how often `cells` will be called.
        seconds: fewer rounds once the run is behind that schedule; None: never.
        pace: how a series is executed.
        spare: whether methods have one transfer more than a series has. It warms up caches before each series; then
            only the first place of each group has a round that is not counted.

    Attributes:
        lab: as given.
        not_run: by situation, why its computation cannot be had here.
    """

    def __init__(
        self,
        lab: Lab,
        situations: Sequence[Situation],
        directions: Sequence[Directions],
        *,
        groups: int,
        seconds: float | None,
        progress: Advance,
        pace: Pace = queued,
        spare: bool = False,
    ) -> None:
        self.lab, self._directions, self._groups, self._seconds = lab, directions, groups, seconds
        self._progress, self._pace, self._spare = progress, pace, spare
        self._begin, self._done = time.perf_counter(), 0
        self.not_run: dict[str, str] = {}
        self._computes: dict[Situation, ConcurrentCompute | None] = {}
        with ExitStack() as undo:
            for situation in situations:
                if situation is Situation.IDLE:
                    self._computes[situation] = None
                    continue
                reason = kernels.why_not(lab.device.capabilities)
                try:
                    if reason is None:
                        compute = self._computes[situation] = ConcurrentCompute(lab, situation)
                        undo.callback(compute.close)
                except CapabilityError as error:
                    reason = str(error)
                if reason is not None:
                    self.not_run[situation] = reason
            self._undo = undo.pop_all()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._begin

    def cells(
        self,
        methods_of: Callable[[Sequence[Direction]], Mapping[str, SeriesMethod]],
        transfers: int,
        fields: Mapping[str, Any],
    ) -> Iterator[dict[str, Any]]:
        """Every cell of a group of places: each situation in each of the directions.

        Args:
            methods_of: gives the methods of a place.
            transfers: of a series in one direction.
            fields: of each cell, beside those that are measured.
        """
        places = self._groups * len(self._computes) * len(self._directions)
        warm = self._spare and self.lab.device.simulated  # it has no caches
        for situation, compute in self._computes.items():
            for directions in self._directions:
                repeats = repeats_now(self.lab.repeats, self._seconds, self.elapsed, self._done, places)
                methods = methods_of(DIRECTIONS[directions])
                place = {**fields, "situation": str(situation), "direction": directions}
                place["transfers"] = transfers * len(DIRECTIONS[directions])
                for cell in self._place(methods, DIRECTIONS[directions], transfers, compute, repeats, warm):
                    yield place | cell
                warm = self._spare
                self._done += 1
                self._progress(self._done, places)

    def _place(
        self,
        methods: Mapping[str, SeriesMethod],
        directions: Sequence[Direction],
        transfers: int,
        compute: ConcurrentCompute | None,
        repeats: int,
        warm: bool,
    ) -> Iterator[dict[str, Any]]:
        recorded, scenarios = {name: Recorded() for name in methods}, {}
        for submitter, _, _, chosen in methods.values():
            for _ in range(-(-_SETTLING // transfers) if chosen is not None and not self.lab.device.simulated else 0):
                self._execute(submitter, directions, transfers, compute, Recorded())
        simulated, uncounted = self.lab.device.simulated, 0 if warm else WARM_UP
        for name, (submitter, targets, nbytes, _) in methods.items():
            scenarios[name] = Scenario(
                partial(self._execute, submitter, directions, transfers, compute, recorded[name]),
                partial(targets.poison, directions),
                partial(targets.wrong, directions),
                nbytes * transfers * len(directions),
                partial(self._warm_up, submitter, directions, transfers),
            )
        if compute is not None:
            scenarios[ALONE] = Scenario(partial(self._alone, compute), lambda: None, lambda: 0, 0)
        timings = time_rounds(scenarios, repeats, uncounted)
        alone = timings[ALONE].median if compute is not None else None
        for name, method in methods.items():
            cell: dict[str, Any] = {"method": name, "nbytes": method.nbytes, "wrong": timings[name].wrong}
            if method.chosen is not None:
                cell["chosen"] = method.chosen()
            yield cell if simulated else cell | figures(recorded[name], timings[name], uncounted, alone)

    def _warm_up(self, submitter: Submitter, directions: Sequence[Direction], index: int) -> None:
        if not self._spare or self.lab.device.simulated:
            return
        with self.lab.device.current():
            for direction in directions:
                submitter.submit(direction, index)
            while not submitter.done():
                pass
            submitter.finish()

    def _alone(self, compute: ConcurrentCompute) -> float:
        with self.lab.device.current():
            return compute.seconds_alone()

    def _execute(
        self,
        submitter: Submitter,
        directions: Sequence[Direction],
        transfers: int,
        compute: ConcurrentCompute | None,
        recorded: Recorded,
    ) -> float:
        """One series; seconds from the first call until the last transfer has ended, wall clock."""
        with self.lab.device.current():
            try:
                if compute is not None:
                    compute.begin()
                seconds, calls = self._pace(submitter, directions, transfers, compute)
                if compute is not None:
                    recorded.compute.append(compute.end(seconds))
            except BaseException:
                if compute is not None:
                    compute.abandon()
                raise
            submitter.finish()
        recorded.seconds.append(seconds)
        recorded.calls.append(calls)
        return seconds


def figures(recorded: Recorded, timing: Timing, warm_up: int, alone_seconds: float | None) -> dict[str, Any]:
    """Medians over the counted rounds; of those alone during which the computation lasted as long as the transfers.

    `gb_per_s` is None if there is no such round.
    """
    compute = recorded.compute[warm_up:]
    rates = [timing.nbytes / seconds / 1e9 for seconds in recorded.seconds[warm_up:]]
    ended = [compute_ended(times) for times in compute] or [False] * len(rates)
    valid = [rate for rate, early in zip(rates, ended, strict=True) if not early]
    calls = [call for of_round in recorded.calls[warm_up:] for call in of_round]
    record: dict[str, Any] = {
        "gb_per_s": statistics.median(valid) if valid else None,
        "rounds": len(rates),
        "rounds_compute_ended": sum(ended),
        "samples_gb_per_s": [round(rate, 3) for rate in rates],
        "call_median_us": statistics.median(calls) * 1e6,
        "call_max_us": max(calls) * 1e6,
    }
    if alone_seconds is None:
        return record
    found = [None if early else slowdown(times, alone_seconds) for times, early in zip(compute, ended, strict=True)]
    values = [value for value in found if value is not None]
    return record | {
        "compute_slowdown": statistics.median(values) if values else None,
        "product_alone_us": alone_seconds * 1e6,
        "samples_compute_slowdown": [None if value is None else round(value, 4) for value in found],
    }

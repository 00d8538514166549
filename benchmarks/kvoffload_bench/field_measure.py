"""Measures the cells of `bench field`: one copy method on one setup, in one situation, in one direction or in both.

A cell is a record with these fields; those of times are missing on the simulated device:

    model, layout, situation, direction, method             where it was measured, and what copied
    blocks, planes, block_bytes, groups                     of a transfer; planes of each group
    row_bytes, nbytes, transfers                            bytes of a flat copy, of a transfer; transfers of a series
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from kvoffload.planning.transfer_plan import Direction
from kvoffload_bench.contiguous import CONTIGUOUS_COPY
from kvoffload_bench.field_compute import ComputeTimes, ConcurrentCompute, Situation, compute_ended, slowdown
from kvoffload_bench.field_methods import CHOICES, EngineSubmitter, FieldMethods, Submitter
from kvoffload_bench.field_setup import ContiguousSeries, FieldSetup
from kvoffload_bench.rounds import WARM_UP, Scenario, Timing, time_rounds

ALONE = "alone"  # the computation without transfers
Directions: TypeAlias = Literal["store", "load", "both"]
DIRECTIONS: dict[Directions, tuple[Direction, ...]] = {
    "store": (Direction.STORE,),
    "load": (Direction.LOAD,),
    "both": tuple(Direction),
}


@dataclass
class Recorded:
    """What was recorded of the rounds of one copy method, in their order, the uncounted ones included.

    Attributes:
        seconds: wall clock of each series, from the first call until the last transfer has ended.
        calls: seconds of each call that submitted a transfer, by round.
        compute: of the computation, by round; empty on an idle GPU.
    """

    seconds: list[float] = field(default_factory=list)
    calls: list[list[float]] = field(default_factory=list)
    compute: list[ComputeTimes] = field(default_factory=list)


class FieldMeasurer:
    """Measures the cells of one setup."""

    def __init__(self, setup: FieldSetup, contiguous: ContiguousSeries, methods: FieldMethods, layout: str) -> None:
        self._setup, self._contiguous, self._methods, self._layout = setup, contiguous, methods, layout
        self._warm = setup.lab.device.simulated  # it has no caches

    def cells(
        self, situation: Situation, directions: Directions, compute: ConcurrentCompute | None, repeats: int
    ) -> Iterator[dict[str, Any]]:
        """A record for each copy method; they are measured in interleaved rounds, with the computation alone."""
        submitters = self._methods.of(DIRECTIONS[directions])
        recorded = {name: Recorded() for name in submitters}
        scenarios = {
            name: self._scenario(name, submitter, directions, compute, recorded[name])
            for name, submitter in submitters.items()
        }
        if compute is not None:
            scenarios[ALONE] = Scenario(partial(self._alone, compute), lambda: None, lambda: 0, 0)
        warm_up = 0 if self._warm else WARM_UP
        timings = time_rounds(scenarios, repeats, warm_up)
        self._warm = True
        alone = timings[ALONE].median if compute is not None else None
        for name, submitter in submitters.items():
            record = self._dimensions(situation, directions, name) | {"wrong": timings[name].wrong}
            if name in CHOICES and isinstance(submitter, EngineSubmitter):
                record["chosen"] = {str(each): dict(counts) for each, counts in submitter.chosen.items()}
            if not self._setup.lab.device.simulated:
                record |= figures(recorded[name], timings[name], warm_up, alone)
            yield record

    def _dimensions(self, situation: Situation, directions: Directions, method: str) -> dict[str, Any]:
        setup, size = self._setup.setup, self._setup.size
        return {
            "model": setup.model,
            "layout": self._layout,
            "situation": str(situation),
            "direction": directions,
            "method": method,
            "blocks": size.slots * len(setup.groups),
            "planes": setup.plane_count,
            "block_bytes": setup.block_bytes,
            "groups": len(setup.groups),
            "row_bytes": setup.row_bytes,
            "transfers": size.transfers * len(DIRECTIONS[directions]),
            "nbytes": self._contiguous.step if method == CONTIGUOUS_COPY else size.nbytes,
        }

    def _scenario(
        self,
        name: str,
        submitter: Submitter,
        directions: Directions,
        compute: ConcurrentCompute | None,
        recorded: Recorded,
    ) -> Scenario:
        moved, setup = DIRECTIONS[directions], self._setup
        targets = self._methods.targets(name)
        nbytes = self._contiguous.step if name == CONTIGUOUS_COPY else setup.size.nbytes
        return Scenario(
            partial(self._execute, submitter, moved, compute, recorded),
            lambda: targets.poison(moved),
            lambda: targets.wrong(moved),
            nbytes * setup.size.transfers * len(moved),
            (lambda: None) if setup.lab.device.simulated else partial(self._warm_up, submitter, moved),
        )

    def _warm_up(self, submitter: Submitter, directions: Sequence[Direction]) -> None:
        with self._setup.lab.device.current():
            for direction in directions:
                submitter.submit(direction, self._setup.size.transfers)
            while not submitter.done():
                pass
            submitter.finish()

    def _alone(self, compute: ConcurrentCompute) -> float:
        with self._setup.lab.device.current():
            return compute.seconds_alone()

    def _execute(
        self,
        submitter: Submitter,
        directions: Sequence[Direction],
        compute: ConcurrentCompute | None,
        recorded: Recorded,
    ) -> float:
        """One series; seconds from the first call until the last transfer has ended, wall clock."""
        with self._setup.lab.device.current():
            if compute is None:
                seconds, calls = self._series(submitter, directions, None)
            else:
                try:
                    compute.begin()
                    seconds, calls = self._series(submitter, directions, compute)
                    recorded.compute.append(compute.end(seconds))
                except BaseException:
                    compute.abandon()
                    raise
            submitter.finish()
        recorded.seconds.append(seconds)
        recorded.calls.append(calls)
        return seconds

    def _series(
        self, submitter: Submitter, directions: Sequence[Direction], compute: ConcurrentCompute | None
    ) -> tuple[float, list[float]]:
        clock, calls = time.perf_counter, []
        with _without_collections():
            begin = clock()
            for index in range(self._setup.size.transfers):
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


@contextmanager
def _without_collections() -> Iterator[None]:
    """No garbage collection inside: with the objects of this benchmark one takes as long as a series."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
    if alone_seconds is not None:
        record |= _slowdowns(compute, ended, alone_seconds)
    return record


def _slowdowns(compute: Sequence[ComputeTimes], ended: Sequence[bool], alone_seconds: float) -> Mapping[str, Any]:
    found = [None if early else slowdown(times, alone_seconds) for times, early in zip(compute, ended, strict=True)]
    values = [value for value in found if value is not None]
    return {
        "compute_slowdown": statistics.median(values) if values else None,
        "product_alone_us": alone_seconds * 1e6,
        "samples_compute_slowdown": [None if value is None else round(value, 4) for value in found],
    }

"""Measures the cells of `bench vllm`: a geometry, a number of blocks, a direction and a situation, by every method.

A series' transfers follow each other: one (in both directions: two) is submitted, and the next once that is reported to
have ended. So GB/s include the host time of both. A cell is a record with these fields:

    allocator, model, planes, block_bytes, blocks, situation, direction, method    where it was measured
    transfers, nbytes                                                              of a series; bytes of a transfer
    wrong                                                                          wrong rows over all rounds
    chosen                                                                         of this library: jobs by copy method
    and those of `field_measure.figures`
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Advance, CommandError
from kvoffload_bench.field import repeats_now
from kvoffload_bench.field_compute import ConcurrentCompute, Situation
from kvoffload_bench.field_measure import ALONE, DIRECTIONS, Directions, Recorded, figures
from kvoffload_bench.lab import Lab
from kvoffload_bench.rounds import WARM_UP, Scenario, time_rounds
from kvoffload_bench.vllm_classes import TransferClasses
from kvoffload_bench.vllm_methods import EngineMethod, VllmMethod, VllmMethods
from kvoffload_bench.vllm_setup import Geometry, Series, TensorSetup

_SERIES_BYTES = 128 << 20
_MOST_TRANSFERS = 32
_LONGEST_SECONDS = 30.0  # of a transfer; a thread of vLLM's that has failed never ends one


class VllmPlan(NamedTuple):
    """What is measured of transfers.

    Attributes:
        seconds: fewer rounds once the run is behind that schedule; None: never.
        apart: this library copies a tensor of its own, of the same kind, with the same blocks.
    """

    geometries: Sequence[Geometry]
    blocks: Sequence[int]
    directions: Sequence[Directions]
    situations: Sequence[Situation]
    allocator: str
    seconds: float | None
    apart: bool = False

    @property
    def places(self) -> int:
        """How many groups of interleaved rounds there are."""
        return len(self.geometries) * len(self.blocks) * len(self.directions) * len(self.situations)


def series_of(geometry: Geometry, blocks: int) -> Series:
    """As many transfers as make 128 MiB, but at most 32."""
    wanted = _SERIES_BYTES // (blocks * geometry.planes * geometry.block_bytes)
    return Series(blocks, min(max(wanted, 1), _MOST_TRANSFERS))


class VllmRun:
    """The cells of one process. A context manager, which keeps the computations."""

    def __init__(self, plan: VllmPlan, lab: Lab, classes: TransferClasses, progress: Advance) -> None:
        self._plan, self._lab, self._classes, self._progress = plan, lab, classes, progress
        self._begin, self._done = time.perf_counter(), 0
        self.profile = ""
        self._computes: dict[Situation, ConcurrentCompute | None] = {}
        with ExitStack() as undo:
            for situation in plan.situations:
                compute = None
                if situation is not Situation.IDLE:
                    compute = ConcurrentCompute(lab, situation)
                    undo.callback(compute.close)
                self._computes[situation] = compute
            self._undo = undo.pop_all()

    def cells(self) -> Iterator[dict[str, Any]]:
        """Every cell, in the order in which they are measured."""
        torch, plan = self._classes.torch, self._plan
        where = torch.device("cuda", self._lab.device.index)
        torch.cuda.set_device(where)
        with torch.cuda.stream(torch.cuda.Stream(where)):  # the default stream would wait for the products' stream
            for geometry in plan.geometries:
                most = max(series_of(geometry, blocks).places for blocks in plan.blocks)
                with ExitStack() as stack:
                    setups = []
                    for _ in range(1 + plan.apart):
                        setups.append(TensorSetup(torch, where, geometry, most, self._lab.seed))
                        stack.callback(setups[-1].close)
                        self._check_allocator(setups[-1])
                    methods = stack.enter_context(VllmMethods(self._lab, self._classes, setups[0], setups[-1]))
                    yield from self._of_setups(setups, methods.by_name)

    def _check_allocator(self, setup: TensorSetup) -> None:
        if setup.expandable() != (self._plan.allocator != "default"):
            raise CommandError(
                f"PyTorch's allocator is not the one that was asked for ({self._plan.allocator}): check "
                "PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"
            )

    def _of_setups(self, setups: Sequence[TensorSetup], methods: Mapping[str, VllmMethod]) -> Iterator[dict[str, Any]]:
        for method in methods.values():
            if isinstance(method, EngineMethod):
                self.profile = method.engine.profile.source
        for blocks in self._plan.blocks:
            for setup in setups:
                setup.take(series_of(setup.geometry, blocks))
            for method in methods.values():
                method.take()
            for situation, compute in self._computes.items():
                for directions in self._plan.directions:
                    for record in self._measure(methods, directions, compute):
                        yield {"situation": str(situation), **record}
                    self._done += 1
                    self._progress(self._done, self._plan.places)

    def _repeats(self) -> int:
        elapsed, plan = time.perf_counter() - self._begin, self._plan
        return repeats_now(self._lab.repeats, plan.seconds, elapsed, self._done, plan.places)

    def _measure(
        self,
        methods: Mapping[str, VllmMethod],
        directions: Directions,
        compute: ConcurrentCompute | None,
    ) -> Iterator[dict[str, Any]]:
        """A record for each method; they are measured in interleaved rounds, with the computation alone."""
        recorded = {name: Recorded() for name in methods}
        moved = DIRECTIONS[directions]
        setup = next(iter(methods.values())).setup
        geometry, series = setup.geometry, setup.series
        nbytes = series.blocks * geometry.planes * geometry.block_bytes
        scenarios = {
            name: Scenario(
                partial(self._execute, method, moved, compute, recorded[name]),
                partial(_poison, method, moved),
                partial(_wrong, method, moved),
                nbytes * series.transfers * len(moved),
            )
            for name, method in methods.items()
        }
        if compute is not None:
            scenarios[ALONE] = Scenario(partial(self._alone, compute), lambda: None, lambda: 0, 0)
        timings = time_rounds(scenarios, self._repeats())
        alone = timings[ALONE].median if compute is not None else None
        for name, method in methods.items():
            record = {
                "allocator": self._plan.allocator,
                "model": geometry.name,
                "planes": geometry.planes,
                "block_bytes": geometry.block_bytes,
                "blocks": series.blocks,
                "direction": directions,
                "method": name,
                "transfers": series.transfers * len(moved),
                "nbytes": nbytes,
                "wrong": timings[name].wrong,
            }
            if isinstance(method, EngineMethod):
                record["chosen"] = dict(method.chosen)
                method.chosen.clear()
            yield record | figures(recorded[name], timings[name], WARM_UP, alone)

    def _alone(self, compute: ConcurrentCompute) -> float:
        with self._lab.device.current():
            return compute.seconds_alone()

    def _execute(
        self,
        method: VllmMethod,
        directions: Sequence[Direction],
        compute: ConcurrentCompute | None,
        recorded: Recorded,
    ) -> float:
        """One series; seconds from the first call until the last transfer is reported to have ended."""
        with self._lab.device.current():
            if compute is None:
                seconds, calls = run_series(method, directions, None)
            else:
                try:
                    compute.begin()
                    seconds, calls = run_series(method, directions, compute)
                    recorded.compute.append(compute.end(seconds))
                except BaseException:
                    compute.abandon()
                    raise
            method.finish()
        recorded.seconds.append(seconds)
        recorded.calls.append(calls)
        return seconds

    def __enter__(self) -> VllmRun:
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()


def _poison(method: VllmMethod, directions: Sequence[Direction]) -> None:
    if Direction.STORE in directions:
        method.poison_slots()
    if Direction.LOAD in directions:
        method.setup.poison_blocks()


def _wrong(method: VllmMethod, directions: Sequence[Direction]) -> int:
    wrong = method.wrong_slots() if Direction.STORE in directions else 0
    return wrong + (method.setup.wrong_blocks() if Direction.LOAD in directions else 0)


def run_series(
    method: VllmMethod, directions: Sequence[Direction], compute: ConcurrentCompute | None
) -> tuple[float, list[float]]:
    """Transfer after transfer. Returns the seconds of all, and those of each call that submits one.

    Raises:
        RuntimeError: a transfer did not end within 30 seconds.
    """
    clock, calls = time.perf_counter, []
    begin = clock()
    for index in range(method.setup.series.transfers):
        for direction in directions:
            called = clock()
            method.submit(direction, index)
            calls.append(clock() - called)
        while not method.done():
            time.sleep(0)  # gives the interpreter to a thread that submits
            if compute is not None:
                compute.top_up()
            if clock() - called > _LONGEST_SECONDS:
                raise RuntimeError(f"a transfer of {type(method).__name__} has not ended for {_LONGEST_SECONDS:.0f} s")
    return clock() - begin, calls

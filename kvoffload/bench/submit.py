"""`kvoffload bench submit`: how long `store()` and `load()` keep the host, by copier, and where that time goes."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from kvoffload.bench import marshal
from kvoffload.bench.bed import Bed, Placement
from kvoffload.bench.cases import WARM_UP, Lab, run_rounds
from kvoffload.bench.latency import geometry_of
from kvoffload.bench.report import Fields, add_bench_options, conduct, number
from kvoffload.bench.rows import COPY_ENGINE, METHODS, bed_case, choice, shared_ways, warm_engine
from kvoffload.copiers import BatchCopier, GatherCopier, LoopCopier, StridedCopier
from kvoffload.copiers.base import Staged
from kvoffload.device.streams import NO_WAIT
from kvoffload.driver import Driver
from kvoffload.engine.job import Job
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Output
from kvoffload.tuning import CopyMethod

_KINDS = (StridedCopier, BatchCopier, LoopCopier, GatherCopier)
_STAGE = "stage"
_BLOCKS, _PLANES, _BLOCK_BYTES = 128, 64, 4096
_WARM_CALLS = 5
_DESCRIPTION = """\
Host time of a call for transfers of 128 blocks x 64 planes of 4 KiB, folded and scattered, in both directions, for
each copier and for the engine's own choice: the whole of store() or load(); "stage", what the copier writes down
before the transfer's start event; "queue", its driver calls. Medians; the GPU is idle before each call; targets are
poisoned before, and all bytes verified after, every call; just before it the same copier moves 8 blocks elsewhere,
five times, as a CPU that has just compared 32 MiB has cold caches. Then what `bench marshal` shows."""


def add_parser(benches: Any) -> None:
    parser = benches.add_parser("submit", help="host time of store() and load()", description=_DESCRIPTION)
    add_bench_options(parser, 25, figures=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    return conduct(arguments, "submit", _measure, _show)


def _measure(lab: Lab, output: Output) -> Fields:
    rows: list[dict[str, Any]] = []
    not_run: dict[str, str] = {}
    placements = (Placement.FOLDED, Placement.SCATTERED)
    blocks = 4 if lab.device.simulated else _BLOCKS
    profile = ""
    with output.progress("layouts") as progress:
        for done, placement in enumerate(placements, start=1):
            geometry = geometry_of(_PLANES, _BLOCK_BYTES, lab.size.scale)
            with Bed(lab, geometry, placement=placement, count=blocks) as bed, bed.twin() as twin:
                rows += [row for direction in Direction for row in _rows(bed, twin, direction)]
                not_run |= {name: reason for name, reason in bed.missing.items() if reason is not None}
                profile = bed.engine.profile.source
            progress(done, len(placements))
    return {
        "submit": rows,
        "marshal": marshal.measure(50),
        "not_run": not_run,
        "profile": profile,
        "wrong_rows": sum(row["wrong"] for row in rows),
    }


class _Spent(NamedTuple):
    """Seconds of each call, and within it."""

    call: list[float]
    stage: list[float]
    queue: list[float]


def _rows(bed: Bed, twin: Bed, direction: Direction) -> Iterator[dict[str, Any]]:
    wanted: dict[str, str | CopyMethod | None] = {choice("overlap"): None}
    wanted |= {name: name for name in COPY_ENGINE if bed.missing[name] is None}
    wanted |= {
        method.label: method for method in shared_ways(bed, direction, METHODS) if bed.missing[method.copier] is None
    }
    spent = {name: _Spent([], [], []) for name in wanted}
    bed.prepare(direction)

    def call(name: str) -> float:
        with _watched(spent[name], bed.lab.driver):
            begin = time.perf_counter()
            job = _call(bed, direction, wanted[name])
            spent[name].call.append(time.perf_counter() - begin)
        bed.seconds([job])
        return spent[name].call[-1]

    cases = {
        name: bed_case(
            bed, direction, partial(call, name), partial(warm_engine, twin, bed, direction, copier, "overlap")
        )
        for name, copier in wanted.items()
    }
    timings = run_rounds(cases, bed.lab.repeats)
    for name, timing in timings.items():
        row: dict[str, Any] = {
            "placement": bed.placement,
            "direction": str(direction),
            "copier": name,
            "blocks": bed.block_count,
            "planes": bed.plane_count,
            "block_bytes": bed.block_bytes,
            "wrong": timing.wrong,
        }
        if not bed.lab.device.simulated:
            row |= {f"{what}_us": _median_us(values) for what, values in spent[name]._asdict().items()}
        yield row


def _call(bed: Bed, direction: Direction, copier: str | CopyMethod | None) -> Job:
    engine, (part,) = bed.engine, bed.parts
    if isinstance(copier, CopyMethod):
        return engine.submit(direction, part.blocks, part.slots, after=NO_WAIT, copier=copier)
    if direction is Direction.STORE:
        return engine.store(part.blocks, part.slots, after=NO_WAIT, copier=copier)
    return engine.load(part.slots, part.blocks, after=NO_WAIT, copier=copier)


def _median_us(seconds: Sequence[float]) -> float:
    return statistics.median(seconds[WARM_UP:]) * 1e6


@contextmanager
def _watched(spent: _Spent, driver: Driver) -> Iterator[None]:
    """Note what the copiers' parts of one call take, in sum."""
    stages: list[float] = []
    queues: list[float] = []
    with ExitStack() as undo:
        for kind in _KINDS:
            undo.callback(setattr, kind, _STAGE, kind.stage)
            setattr(kind, _STAGE, _timed_stage(kind.stage, driver, stages, queues))
        yield
    spent.stage.append(sum(stages))
    spent.queue.append(sum(queues))


def _timed_stage(
    stage: Callable[..., Staged | None], driver: Driver, stages: list[float], queues: list[float]
) -> Callable[..., Staged | None]:
    def timed(self: Any, work: Any, order: Any) -> Staged | None:
        begin = time.perf_counter()
        staged = stage(self, work, order)
        stages.append(time.perf_counter() - begin)
        if staged is None:
            return None

        def submit(stream: int, start: int | None = None) -> None:
            if start is not None:
                driver.event_record(start, stream)
            begin = time.perf_counter()
            staged.submit(stream)
            queues.append(time.perf_counter() - begin)

        return staged._replace(submit=submit)

    return timed


def _show(fields: Fields, output: Output) -> None:
    simulated = fields["simulated"]
    columns = ["copier", "direction", "planes", "blocks", "planes x bytes", "wrong rows"]
    columns += [] if simulated else ["call us", "of it stage us", "queue us", "stage + queue us"]
    lines = []
    for row in fields["submit"]:
        line = [row["copier"], row["direction"], row["placement"], row["blocks"]]
        line += [f"{row['planes']} x {row['block_bytes']}", row["wrong"]]
        if not simulated:
            line += [number(row[f"{what}_us"]) for what in ("call", "stage", "queue")]
            line.append(number(row["stage_us"] + row["queue_us"]))
        lines.append(line)
    output.table("host time of one store() or load()" + (", SIMULATED" if simulated else ""), columns, lines)
    marshal.show(fields["marshal"], output)

"""`kvoffload bench submit`: how long `store()` and `load()` keep their caller, against the bare driver calls.

A *pair* is a block with the slot that it is stored to or loaded from. The engine and the bare calls use pairs of their
own, of the same planes and the same pool; each submission takes the next few pairs of a random order.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple, Protocol

from kvoffload.engine.job import Job
from kvoffload.internal.types import Int64Array
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Output
from kvoffload.terminal.options import COMMON, add_command, add_wide
from kvoffload.tuning import CopierName
from kvoffload_bench.bare_submissions import BareBatch, BareGather, BareStrided, BareSubmission
from kvoffload_bench.contiguous import CONTIGUOUS_COPY
from kvoffload_bench.lab import Lab
from kvoffload_bench.report import Fields, add_bench_options, conduct, number
from kvoffload_bench.rounds import time_rounds
from kvoffload_bench.setup import Placement, TransferSetup, geometry_of

_PLANES, _BLOCK_BYTES = 64, 32 << 10
_SIMULATED_PLANES = 4
_BLOCKS = (2, 8, 32)
_MOST_PAIRS = 64
_IDLE_SECONDS = 3e-3
_BURST = 8  # submissions of each kind that follow each other without a wait; fewer than bare ones may be unfinished
_UNCOUNTED = _BURST
_LINK_ROUNDS = 10
_DONE_BLOCKS = 2
_DONE_BAR_US = 120.0
_SUBMISSIONS = 100
_TEXT = """\
Times the calls of store() and load(), and the bare driver calls of the same transfer, in turns, in a hot loop and \
after 3 ms of idleness (cold). Every byte is verified."""


class _Layout(NamedTuple):
    """One line of the tables: where planes lie, and which copier is given to the engine."""

    name: str
    placement: Placement
    copier: CopierName
    bare: type[BareSubmission]


_LAYOUTS = (
    _Layout("block-major", Placement.INTERLEAVED, "batch", BareBatch),
    _Layout("plane-major", Placement.FOLDED, "strided", BareStrided),
    _Layout("separate allocations", Placement.SCATTERED, "gather", BareGather),
)


class _Bar(NamedTuple):
    """What a figure should not exceed. `of`: "ratio" of the medians, or "us" of the engine's."""

    of: str
    limit: float

    @property
    def text(self) -> str:
        return f"<= {self.limit:g}" + ("x" if self.of == "ratio" else " us")


def bar_of(copier: str, blocks: int, cold: bool) -> _Bar | None:
    """The bar of a line, None if it has none."""
    if copier != "batch":
        return _Bar("ratio", 2.5 if cold else 3.0)
    if blocks >= 8:
        return _Bar("ratio", 2.0 if cold else 2.5)
    return None if cold else _Bar("us", 45.0)


def add_parser(benches: Any) -> None:
    parser = add_command(
        benches,
        "submit",
        "host time of store() and load()",
        _TEXT,
        example="bench submit --save submit.json",
        common=COMMON,
    )
    add_wide(parser, "95th percentiles and bars")
    add_bench_options(parser, _SUBMISSIONS, drawn=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    return conduct(arguments, "submit", _measure, _show)


def _measure(lab: Lab, output: Output) -> Fields:
    submissions: list[dict[str, Any]] = []
    loads: list[dict[str, Any]] = []
    not_run: dict[str, str] = {}
    links = time_rounds({str(each): lab.contiguous.scenario(each) for each in Direction}, _LINK_ROUNDS)
    planes = _SIMULATED_PLANES if lab.device.simulated else _PLANES
    with output.progress("layouts") as progress:
        for done, layout in enumerate(_LAYOUTS, start=1):
            geometry = geometry_of(planes, _BLOCK_BYTES, lab.size.scale)
            with TransferSetup(lab, geometry, placement=layout.placement, count=2 * _MOST_PAIRS) as setup:
                reason = _why_not(setup, layout)
                if reason is None:
                    for direction in Direction:
                        submissions += _submissions(setup, layout, direction)
                else:
                    not_run[f"{layout.name} by {layout.copier}"] = reason
                if layout.placement is not Placement.SCATTERED:
                    loads += _loads(setup, layout.name, links[str(Direction.LOAD)].gb_per_s)
                profile = setup.engine.profile.source
            progress(done, len(_LAYOUTS))
    wrong = sum(each["wrong"] for each in (*submissions, *loads)) + sum(each.wrong for each in links.values())
    fields: Fields = {"submissions": submissions, "loads": loads}
    if not lab.device.simulated:
        fields["contiguous_copy_gb_per_s"] = {name: timing.gb_per_s for name, timing in links.items()}
    return fields | {"not_run": not_run, "profile": profile, "wrong_rows": wrong}


def _why_not(setup: TransferSetup, layout: _Layout) -> str | None:
    capabilities = setup.lab.device.capabilities
    if layout.copier == "strided" and not capabilities.strided_batch:
        return capabilities.missing["cuMemcpy3DBatchAsync"]
    return setup.missing[layout.copier]


# submissions ----------------------------------------------------------------------------------------------------------


class _Submitter(Protocol):
    """Submits transfers of blocks and slots, int64, (n,) each; see `BareSubmission`."""

    def submit(self, blocks: Int64Array, slots: Int64Array) -> None: ...

    def check(self) -> None: ...

    def wait(self) -> None: ...


class _EngineSubmission:
    """Submits transfers through an engine; a copier of None leaves the choice to it."""

    def __init__(self, setup: TransferSetup, direction: Direction, copier: CopierName | None) -> None:
        self._engine, self._copier, self._before = setup.engine, copier, setup.lab.timer.stream
        self._call = self._engine.store if direction is Direction.STORE else self._engine.load
        self._stores = direction is Direction.STORE
        self.jobs: list[Job] = []

    def submit(self, blocks: Int64Array, slots: Int64Array) -> None:
        ends = (blocks, slots) if self._stores else (slots, blocks)
        self.jobs.append(self._call(*ends, after=self._before, copier=self._copier))

    def check(self) -> None:
        """The jobs raise their failures when they are waited for."""

    def wait(self) -> None:
        for job in self.jobs:
            while not job.done:
                pass
            job.wait()
        self.jobs.clear()
        self._engine.poll()


Pairs = tuple[Int64Array, Int64Array]  # blocks and slots


def _windows(setup: TransferSetup, pairs: range, count: int) -> Iterator[Pairs]:
    """Endless: the next `count` of these pairs, in turn."""
    blocks, slots = (each[pairs.start : pairs.stop] for each in (setup.groups[0].blocks, setup.groups[0].slots))
    for start in itertools.cycle(range(0, len(pairs), count)):
        yield blocks[start : start + count], slots[start : start + count]


def _submissions(setup: TransferSetup, layout: _Layout, direction: Direction) -> Iterator[dict[str, Any]]:
    setup.take(2 * _MOST_PAIRS)
    setup.prepare(direction)
    engine = _EngineSubmission(setup, direction, layout.copier)
    with closing(layout.bare(setup, direction, max(_BLOCKS))) as bare:
        for blocks in _BLOCKS:
            pairs = min(_MOST_PAIRS, 4 * blocks)
            setup.take(2 * pairs)
            sources = [_windows(setup, range(at, at + pairs), blocks) for at in (0, pairs)]
            for cold in (False, True):
                setup.poison(direction)
                seconds = _time_submissions((engine, bare), sources, setup.lab, pairs // blocks, cold)
                yield _record(setup, layout, direction, blocks, cold, seconds)


def _time_submissions(
    submitters: tuple[_Submitter, ...],
    sources: Sequence[Iterator[Pairs]],
    lab: Lab,
    least: int,
    cold: bool,
) -> list[list[float]]:
    """Host seconds of every counted submission, of each submitter: bare and through the engine in turn."""
    uncounted = 0 if lab.device.simulated else _UNCOUNTED
    seconds: list[list[float]] = [[] for _ in submitters]

    def wait() -> None:
        for each in submitters:
            each.wait()

    with ExitStack() as undo:
        undo.callback(wait)
        for number in range(max(lab.repeats, least) + uncounted):
            if number % _BURST == 0:
                wait()
            for submitter, source, found in zip(submitters, sources, seconds, strict=True):
                if cold:
                    wait()
                    time.sleep(_IDLE_SECONDS)
                found.append(_seconds_of(submitter.submit, next(source)))
                submitter.check()
    return [each[uncounted:] for each in seconds]


def _seconds_of(submit: Callable[[Int64Array, Int64Array], None], pairs: Pairs) -> float:
    begin = time.perf_counter()
    submit(*pairs)
    return time.perf_counter() - begin


def _record(
    setup: TransferSetup, layout: _Layout, direction: Direction, blocks: int, cold: bool, seconds: list[list[float]]
) -> dict[str, Any]:
    bar = bar_of(layout.copier, blocks, cold)
    record: dict[str, Any] = {
        "layout": layout.name,
        "copier": layout.copier,
        "direction": str(direction),
        "blocks": blocks,
        "planes": setup.plane_count,
        "block_bytes": setup.block_bytes,
        "cold": cold,
        "submissions": len(seconds[0]),
        "bar": None if bar is None else bar.text,
        "wrong": setup.wrong(direction),
    }
    if not setup.lab.device.simulated:
        for name, values in zip(("ours", "bare"), seconds, strict=True):
            record |= _figures(name, values)
        record["ratio"] = record["ours_us"] / record["bare_us"]
        record["bar_met"] = None
        if bar is not None:
            record["bar_met"] = record["ratio" if bar.of == "ratio" else "ours_us"] <= bar.limit
    return record


def _figures(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile in microseconds."""
    ordered = sorted(seconds)
    return {f"{name}_us": statistics.median(ordered) * 1e6, f"{name}_p95_us": ordered[int(0.95 * len(ordered))] * 1e6}


# until done -----------------------------------------------------------------------------------------------------------


def _loads(setup: TransferSetup, layout: str, link_gb_per_s: float) -> Iterator[dict[str, Any]]:
    """Loads of a few blocks, from the call until the polled job is done; hot and cold."""
    direction, lab = Direction.LOAD, setup.lab
    setup.take(4 * _DONE_BLOCKS)
    setup.prepare(direction)
    windows = _windows(setup, range(4 * _DONE_BLOCKS), _DONE_BLOCKS)
    submitter = _EngineSubmission(setup, direction, None)
    uncounted = 0 if lab.device.simulated else _UNCOUNTED
    for cold in (False, True):
        setup.poison(direction)
        seconds = []
        copier = ""
        for _ in range(max(lab.repeats, 4) + uncounted):
            if cold:
                time.sleep(_IDLE_SECONDS)
            blocks, slots = next(windows)
            begin = time.perf_counter()
            submitter.submit(blocks, slots)
            (job,) = submitter.jobs
            while not job.done:
                pass
            seconds.append(time.perf_counter() - begin)
            copier = job.copier
            submitter.wait()
        nbytes = _DONE_BLOCKS * setup.nbytes // setup.block_count
        record = {"layout": layout, "copier": copier, "blocks": _DONE_BLOCKS, "nbytes": nbytes, "cold": cold}
        record["wrong"] = setup.wrong(direction)
        yield record | ({} if lab.device.simulated else _beyond_link(seconds[uncounted:], nbytes, link_gb_per_s))


def _beyond_link(seconds: Sequence[float], nbytes: int, link_gb_per_s: float) -> dict[str, Any]:
    figures = _figures("wall", seconds)
    link_us = nbytes / link_gb_per_s / 1e3
    beyond = figures["wall_us"] - link_us
    return figures | {
        "link_us": link_us,
        "beyond_link_us": beyond,
        "bar_us": _DONE_BAR_US,
        "bar_met": beyond <= _DONE_BAR_US,
    }


# tables ---------------------------------------------------------------------------------------------------------------


def _show(fields: Fields, output: Output) -> None:
    output.line(_verdict(fields["submissions"], fields["loads"]))
    for layout in dict.fromkeys(each["layout"] for each in fields["submissions"]):
        _show_submissions([each for each in fields["submissions"] if each["layout"] == layout], output)
    lines = []
    for each in fields["loads"]:
        line = [each["layout"], each["copier"], each["blocks"], _host(each)]
        line += [number(each[f"{name}_us"]) for name in ("wall", "link", "beyond_link")]
        line += [number(each["wall_p95_us"]), f"<= {each['bar_us']:g} us", _met(each["bar_met"])] if output.wide else []
        lines.append(line)
    columns = ["layout", "copier", "blocks", "host", "wall us", "link us", "wall - link us"]
    columns += ["p95", "bar", "met"] if output.wide else []
    output.table("from the call of load() until the job is done", columns, lines)
    rates = ", ".join(f"{name} {rate:.1f}" for name, rate in fields["contiguous_copy_gb_per_s"].items())
    output.line(f"{CONTIGUOUS_COPY}, GB/s on the GPU clock: {rates}")
    output.line("hot: submissions without a wait; cold: each after the GPU and the host were idle for 3 ms")
    output.line("bar: what kvoffload aims at; nothing fails if it is missed")


def _verdict(submissions: Sequence[dict[str, Any]], loads: Sequence[dict[str, Any]]) -> str:
    if not submissions:
        return "bench submit: no submission was timed"
    ratios = [each["ratio"] for each in submissions]
    missed = sum(each["bar_met"] is False for each in (*submissions, *loads))
    return (
        f"bench submit: store() and load() take {min(ratios):.1f} to {max(ratios):.1f} times the bare driver calls; "
        f"{missed} of {sum(each['bar_met'] is not None for each in (*submissions, *loads))} bars missed"
    )


def _show_submissions(records: Sequence[dict[str, Any]], output: Output) -> None:
    lines = []
    for each in records:
        line = [each["direction"], each["blocks"], _host(each), number(each["bare_us"]), number(each["ours_us"])]
        line += [f"{each['ratio']:.2f}", each["bar"] or "-", _met(each["bar_met"])]
        line += [number(each[f"{name}_us"]) for name in ("bare_p95", "ours_p95")] if output.wide else []
        lines.append(line)
    columns = ["direction", "blocks", "host", "bare us", "ours us", "ours / bare", "bar", "met"]
    columns += ["bare p95", "ours p95"] if output.wide else []
    output.table(f"host time of one submission, {records[0]['layout']} by {records[0]['copier']}", columns, lines)


def _host(record: dict[str, Any]) -> str:
    return "cold" if record["cold"] else "hot"


def _met(met: bool | None) -> str:
    return "-" if met is None else "yes" if met else "no"

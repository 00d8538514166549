"""`kvoffload bench parts`: what loading layer by layer costs, and how early the first layers can be used."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from kvoffload.calibration.compute import new_events
from kvoffload.device.streams import NO_WAIT
from kvoffload.engine.job import Job
from kvoffload.internal.models import MODELS, ModelGeometry
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import CommandError, Output
from kvoffload.terminal.options import COMMON, add_command, model, numbers
from kvoffload.tuning import CopierName
from kvoffload_bench.copy_methods import COPY_ENGINE, scenario_of
from kvoffload_bench.harness import WARM_UP, Lab, Undoing, time_rounds
from kvoffload_bench.report import Fields, add_bench_options, conduct, fixed
from kvoffload_bench.setup import TransferSetup

_MODEL = "llama-3.1-8b"
_BLOCKS = [32, 256]
_PARTS = [1, 2, 4, 8, 16, 32]
_SIMULATED_SHARE = 16  # of the blocks, one in so many is loaded on the simulated device
_TEXT = """\
Times loads in 1, 2, 4, ... parts of equally many planes: until the first part may be used, and until all may. Every \
byte is verified."""


def add_parser(benches: Any) -> None:
    example = "bench parts --blocks 32 --parts 1,8"
    parser = add_command(benches, "parts", "loading layer by layer", _TEXT, example=example, common=COMMON)
    add, text = parser.add_argument, f"geometry of one group ({_MODEL})"
    add("--model", type=model, default=MODELS[_MODEL], metavar="NAME", help=text)
    add("--blocks", type=numbers, default=_BLOCKS, metavar="N,...", help="of a load (default 32,256)")
    add("--parts", type=numbers, default=_PARTS, metavar="N,...", help="default 1,2,4,8,16,32")
    add("--copier", choices=COPY_ENGINE, metavar="NAME", help=", ".join(COPY_ENGINE))
    add_bench_options(parser, 15, drawn=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    geometry: ModelGeometry = arguments.model
    if len(geometry.groups) > 1:
        raise CommandError(f"--model {geometry.name} has {len(geometry.groups)} groups; name one with a single group")
    for count in arguments.parts:
        if geometry.planes % count:
            raise CommandError(
                f"--parts {count} does not divide the {geometry.planes} planes of {geometry.name}: give divisors, such "
                "as 1,2,4"
            )

    def measure(lab: Lab, output: Output) -> Fields:
        share, records = _SIMULATED_SHARE if lab.device.simulated else 1, list[dict[str, Any]]()
        with output.progress("loads") as progress:
            for done, blocks in enumerate(arguments.blocks, start=1):
                setup = TransferSetup(lab, geometry.scaled(lab.size.scale), count=-(-blocks // share))
                with setup, setup.smaller() as small_setup, _Watch(lab) as watch:
                    records += _measure(setup, small_setup, watch, arguments.parts, arguments.copier)
                    profile = setup.engine.profile.source
                progress(done, len(arguments.blocks))
        return {"parts": records, "profile": profile, "wrong_rows": sum(record["wrong"] for record in records)}

    return conduct(arguments, "parts", measure, _show)


class _Spent(NamedTuple):
    """Seconds of each load: of the call; on the GPU clock from just before it until part 0 and until all has ended."""

    call: list[float]
    first: list[float]
    all: list[float]


class _Watch(Undoing):
    """Streams that are ordered behind part 0 and behind all of a load, and events on them. Free it with `close`."""

    def __init__(self, lab: Lab) -> None:
        self._device, self._driver = lab.device, lab.driver
        with ExitStack() as undo:
            self._streams = [undo.enter_context(lab.device.stream()).handle for _ in range(3)]
            self._events = undo.enter_context(new_events(lab.device, 3, timing=True))
            self._undo = undo.pop_all()

    def load(
        self, setup: TransferSetup, parts: int, copier: CopierName | None, spent: _Spent, copiers: dict[int, str]
    ) -> float:
        """One load; seconds on the GPU clock, without what it waited for."""
        with self._device.current():
            self._record(0)
            begin = time.perf_counter()
            job = load(setup, parts, copier)
            spent.call.append(time.perf_counter() - begin)
            copiers[parts] = job.copier
            job.order_before(self._streams[1], part=0)
            self._record(1)
            job.order_before(self._streams[2])
            self._record(2)
            seconds = setup.seconds([job])
            while not all(map(self._driver.event_query, self._events)):
                pass
            for found, event in ((spent.first, self._events[1]), (spent.all, self._events[2])):
                found.append(self._driver.event_seconds(self._events[0], event))
        return seconds

    def _record(self, index: int) -> None:
        self._driver.event_record(self._events[index], self._streams[index])


def load(setup: TransferSetup, parts: int, copier: CopierName | None) -> Job:
    (group,) = setup.groups
    return setup.engine.load(group.slots, group.blocks, after=NO_WAIT, copier=copier, parts=parts)


def _measure(
    setup: TransferSetup, small_setup: TransferSetup, watch: _Watch, counts: Sequence[int], copier: CopierName | None
) -> Iterator[dict[str, Any]]:
    spent = {count: _Spent([], [], []) for count in counts}
    copiers: dict[int, str] = {}
    setup.prepare(Direction.LOAD)
    scenarios = {
        str(count): scenario_of(
            setup,
            Direction.LOAD,
            partial(watch.load, setup, count, copier, spent[count], copiers),
            lambda count=count: small_setup.seconds([load(small_setup, count, copier)]),  # type: ignore[misc]
        )
        for count in spent
    }
    timings = time_rounds(scenarios, setup.lab.repeats)
    place: dict[str, Any] = {"model": setup.model, "planes": setup.plane_count, "block_bytes": setup.block_bytes}
    place |= {"blocks": setup.block_count, "nbytes": setup.nbytes}
    for count, each in spent.items():
        timing = timings[str(count)]
        record = place | {"parts": count, "copier": copiers[count], "wrong": timing.wrong}
        if not setup.lab.device.simulated:
            record |= {f"{what}_us": statistics.median(found[WARM_UP:]) * 1e6 for what, found in each._asdict().items()}
            record |= {"gpu_us": timing.median * 1e6, "gb_per_s": timing.gb_per_s}
        yield record


def _show(fields: Fields, output: Output) -> None:
    records = fields["parts"]
    output.line(_verdict(records))
    for name in dict.fromkeys(map(_load_text, records)):
        lines = [
            (
                record["parts"],
                record["copier"],
                *(fixed(record[f"{what}_us"], 0) for what in ("call", "first", "all", "gpu")),
                fixed(record["gb_per_s"]),
            )
            for record in records
            if _load_text(record) == name
        ]
        output.table(name, ("parts", "copier", "call us", "part 0 us", "all us", "GPU us", "GB/s"), lines)


def _verdict(records: Sequence[Mapping[str, Any]]) -> str:
    """The load whose first part is usable soonest, beside the same load as a whole."""
    soonest = min(records, key=lambda record: float(record["first_us"]))
    text = f"bench parts: {_load_text(soonest)}: part 0 of {soonest['parts']} usable after {soonest['first_us']:.0f} us"
    whole = [record for record in records if record["parts"] == 1 and _load_text(record) == _load_text(soonest)]
    return text + (f", without parts after {whole[0]['all_us']:.0f} us" if whole else "")


def _load_text(record: Mapping[str, Any]) -> str:
    return f"{record['model']}: {record['blocks']} blocks, {record['planes']} x {record['block_bytes']} B"

"""`kvoffload bench sweep`: every copy method over bytes of a copy, number of copies, direction and placement."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Advance, CommandError, Output
from kvoffload.terminal.options import COMMON, add_command, add_wide, numbers, one_of
from kvoffload_bench.lab import Lab
from kvoffload_bench.latency import geometry_of
from kvoffload_bench.measurements import Measurement, Measurer, describe, size_text, wrong_rows
from kvoffload_bench.report import Fields, add_bench_options, conduct
from kvoffload_bench.setup import Placement, TransferSetup
from kvoffload_bench.summary import ratios
from kvoffload_bench.tables import (
    choice_verdict,
    chosen_methods,
    direction_text,
    figures,
    headings,
    scenarios_of,
    show_choice,
    show_methods,
)

_STEP_BYTES = 32  # block bytes are multiples of this
_SIZES = [4096, 8192, 16384, 32768, 65536]
_COUNTS = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
_PLANES = 64
_SMALL_SIZES, _SMALL_COUNTS, _SMALL_PLANES = [4096, 32768], [8, 32], 8  # for the simulated device
_TEXT = """\
Times transfers of 64 to 8192 copies of 4 to 64 KiB over 64 planes, by every copy method and in both directions. \
Medians on the GPU clock; every byte is verified."""


class Grid(NamedTuple):
    """What is measured: every size (bytes of a copy) with every count (copies of a transfer)."""

    sizes: list[int]
    counts: list[int]
    planes: int
    placements: list[Placement]


def add_parser(benches: Any) -> None:
    parser = add_command(
        benches,
        "sweep",
        "bytes of a copy x number of copies",
        _TEXT,
        example="bench sweep --sizes 4096,32768 --counts 64,1024",
        common=COMMON,
    )
    parser.add_argument("--sizes", type=numbers, metavar="BYTES,...", help="of a copy (default 4096 to 65536)")
    parser.add_argument("--counts", type=numbers, metavar="N,...", help="copies of a transfer (64 to 8192)")
    parser.add_argument(
        "--planes",
        type=one_of(Placement.FOLDED, Placement.SCATTERED),
        nargs="+",
        default=[Placement.FOLDED, Placement.SCATTERED],
        metavar="NAME",
        help="folded or scattered (default both)",
    )
    add_wide(parser, "a column for each method")
    add_bench_options(parser, 5)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    wrong = [size for size in arguments.sizes or () if size % _STEP_BYTES]
    if wrong:
        raise CommandError(f"--sizes: {wrong[0]} is no multiple of {_STEP_BYTES}")
    return conduct(arguments, "sweep", lambda lab, output: _measure(_grid(arguments, lab), lab, output), _show)


def _grid(arguments: argparse.Namespace, lab: Lab) -> Grid:
    small = lab.device.simulated
    sizes = arguments.sizes or (_SMALL_SIZES if small else _SIZES)
    counts = arguments.counts or (_SMALL_COUNTS if small else _COUNTS)
    return Grid(sorted(sizes), sorted(counts), _SMALL_PLANES if small else _PLANES, arguments.planes)


def _measure(grid: Grid, lab: Lab, output: Output) -> Fields:
    measurer = Measurer()
    with output.progress("transfers") as progress:
        records = list(_records(grid, lab, measurer, progress))
    return {
        "transfers": describe(records),
        "ratios": ratios(records),
        "not_run": measurer.not_run,
        "profile": measurer.profile,
        "wrong_rows": wrong_rows(records),
    }


def _records(grid: Grid, lab: Lab, measurer: Measurer, progress: Advance) -> Iterator[Measurement]:
    """One setup for all counts of a size: shorter transfers move its first blocks."""
    slot_counts = sorted({-(-count // grid.planes) for count in grid.counts})
    done, total = 0, len(grid.placements) * len(grid.sizes) * len(Direction) * len(slot_counts)
    for placement in grid.placements:
        for size in grid.sizes:
            geometry = geometry_of(grid.planes, size, lab.size.scale)
            with (
                TransferSetup(lab, geometry, placement=placement, count=slot_counts[-1]) as setup,
                measurer.on(setup) as measure,
            ):
                for direction in Direction:
                    for each in slot_counts:
                        yield measure(direction, each)
                        done += 1
                        progress(done, total)


def _show(fields: Fields, output: Output) -> None:
    records = fields["transfers"]
    output.line(choice_verdict("sweep", records))
    for placement in dict.fromkeys(record["placement"] for record in records):
        here = [record for record in records if record["placement"] == placement]
        show_choice(f"planes {placement}", ("bytes of a copy", "copies"), _label, here, output)
        show_methods(f"planes {placement}", here, output)
        if output.wide:
            for direction in Direction:
                of_it = [record for record in here if record["direction"] == direction]
                _show_records(f"{direction} ({direction_text(direction)}), {placement}", of_it, output)


def _label(record: Mapping[str, Any]) -> tuple[object, ...]:
    return size_text(record["row_bytes"]), record["copies"]


def _show_records(title: str, records: Sequence[Mapping[str, Any]], output: Output) -> None:
    """With a column for each copy method."""
    scenarios = scenarios_of(records)
    lines = [[*_label(record), *figures(record, scenarios), chosen_methods(record)] for record in records]
    columns = ("bytes of a copy", "copies", *headings(scenarios), "overlap / latency by")
    output.table(f"{title}: GB/s on the GPU clock", columns, lines, left=columns[-1:])

"""`kvoffload bench transfer` and `bench sweep`: every copy method, in both directions, against the contiguous copy.

`transfer` measures the geometries of models, `sweep` a grid of sizes and numbers of copies over 64 planes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvoffload.internal.models import MODELS, ModelGeometry
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import CommandError, Output
from kvoffload.terminal.options import COMMON, add_command, add_wide, models, numbers
from kvoffload.tuning import CopyMethod
from kvoffload_bench.lab import Lab
from kvoffload_bench.measurements import METHODS, Measurer, describe, size_text, wrong_rows
from kvoffload_bench.report import Fields, add_bench_options, conduct
from kvoffload_bench.setup import Placement, TransferSetup, geometry_of
from kvoffload_bench.transfer_report import choice_verdict, ratios, show_choice, show_methods, show_wide

_FEWER_METHODS = (CopyMethod("gather", 4, 1.0), CopyMethod("split", 2), CopyMethod("split", 1))
_STEP_BYTES = 32  # block bytes of a sweep are multiples of this
_SIZES = [4096, 8192, 16384, 32768, 65536]
_COUNTS = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
_PLANES = 64
_SMALL_SIZES, _SMALL_COUNTS, _SMALL_PLANES = [4096, 32768], [8, 32], 8  # for the simulated device
_TEXT = """\
Times every copy method for the geometries of models, in both directions, on random blocks and slots. Medians on the \
GPU clock; every byte is verified."""
_SWEEP_TEXT = """\
Times transfers of 64 to 8192 copies of 4 to 64 KiB over 64 planes, by every copy method and in both directions. \
Medians on the GPU clock; every byte is verified."""


class Case(NamedTuple):
    """A setup to measure.

    Attributes:
        count: blocks of a transfer; None for 32 MiB.
        slots: of each group, in each of its transfers; None: all that the setup has.
    """

    geometry: ModelGeometry
    placement: Placement
    blocks_per_slot: int = 1
    count: int | None = None
    slots: Sequence[int] | None = None


def add_parser(benches: Any) -> None:
    """Those of both."""
    parser = add_command(
        benches,
        "transfer",
        "every copy method, by model",
        _TEXT,
        example="bench transfer --model llama-3.1-8b --blocks-per-slot 1",
        common=COMMON,
    )
    every = [list(MODELS.values())]
    parser.add_argument(
        "--model", type=models, nargs="+", default=every, metavar="NAME", help="geometries (default all)"
    )
    parser.add_argument("--blocks", type=numbers, metavar="N,...", help="blocks of a transfer (default 32 MiB)")
    parser.add_argument(
        "--blocks-per-slot", type=numbers, default=[1, 8], metavar="N,...", help="adjacent blocks (default 1,8)"
    )
    _add_planes(parser, tuple(Placement), f"default all: {', '.join(Placement)}")
    parser.set_defaults(run=partial(run, "transfer", _of_models, _FEWER_METHODS))
    parser = add_command(
        benches,
        "sweep",
        "bytes of a copy x number of copies",
        _SWEEP_TEXT,
        example="bench sweep --sizes 4096,32768 --counts 64,1024",
        common=COMMON,
    )
    parser.add_argument("--sizes", type=numbers, metavar="BYTES,...", help="of a copy (default 4096 to 65536)")
    parser.add_argument("--counts", type=numbers, metavar="N,...", help="copies of a transfer (64 to 8192)")
    _add_planes(parser, (Placement.FOLDED, Placement.SCATTERED), "folded or scattered (default both)")
    parser.set_defaults(run=partial(run, "sweep", _of_grid, METHODS))


def _add_planes(parser: argparse.ArgumentParser, known: tuple[Placement, ...], text: str) -> None:
    def placement(given: str) -> Placement:
        if given not in known:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(known)}, got {given!r:.80}")
        return Placement(given)

    parser.add_argument("--planes", type=placement, nargs="+", default=list(known), metavar="NAME", help=text)
    add_wide(parser, "a column for each method")
    add_bench_options(parser, 5)


def run(name: str, cases: Any, methods: Sequence[CopyMethod], arguments: argparse.Namespace) -> int:
    wrong = [size for size in getattr(arguments, "sizes", None) or () if size % _STEP_BYTES]
    if wrong:
        raise CommandError(f"--sizes: {wrong[0]} is no multiple of {_STEP_BYTES}")

    def measure(lab: Lab, output: Output) -> Fields:
        return _measure(list(cases(arguments, lab)), methods, lab, output)

    return conduct(arguments, name, measure, partial(show, name))


def _of_models(arguments: argparse.Namespace, lab: Lab) -> Iterable[Case]:
    for model in (model for group in arguments.model for model in group):
        for placement in arguments.planes:
            for blocks_per_slot in arguments.blocks_per_slot:
                for count in arguments.blocks or (None,):
                    yield Case(model.scaled(lab.size.scale), placement, blocks_per_slot, count)


def _of_grid(arguments: argparse.Namespace, lab: Lab) -> Iterable[Case]:
    """One setup for all counts of a size: shorter transfers move its first blocks."""
    small = lab.device.simulated
    sizes = arguments.sizes or (_SMALL_SIZES if small else _SIZES)
    counts = arguments.counts or (_SMALL_COUNTS if small else _COUNTS)
    planes = _SMALL_PLANES if small else _PLANES
    slots = sorted({-(-count // planes) for count in counts})
    for placement in arguments.planes:
        for size in sorted(sizes):
            yield Case(geometry_of(planes, size, lab.size.scale), placement, 1, slots[-1], slots)


def _measure(cases: Sequence[Case], methods: Sequence[CopyMethod], lab: Lab, output: Output) -> Fields:
    measurer, records = Measurer(methods), []
    with output.progress("transfers") as progress:
        for number, case in enumerate(cases, start=1):
            with (
                TransferSetup(
                    lab,
                    case.geometry,
                    placement=case.placement,
                    blocks_per_slot=case.blocks_per_slot,
                    count=case.count,
                ) as setup,
                measurer.on(setup) as measure,
            ):
                every = len(setup.groups[0].slots)
                records += [measure(direction, slots) for direction in Direction for slots in case.slots or (every,)]
            progress(number, len(cases))
    return {
        "transfers": describe(records),
        "ratios": ratios(records),
        "not_run": measurer.not_run,
        "profile": measurer.profile,
        "wrong_rows": wrong_rows(records),
    }


# tables ---------------------------------------------------------------------------------------------------------------


class _Label(NamedTuple):
    """What identifies a transfer in the tables of a benchmark, and in the wide ones."""

    columns: tuple[str, ...]
    wide: tuple[str, ...]

    def of(self, record: Mapping[str, Any], columns: Sequence[str]) -> tuple[object, ...]:
        texts = {
            "bytes of a copy": size_text(record["row_bytes"]),
            "planes x bytes": f"{record['planes']} x {record['block_bytes']}",
        }
        return tuple(texts.get(each, record.get(_KEYS.get(each, each))) for each in columns)


_KEYS = {"blocks a slot": "blocks_per_slot"}
_LABELS = {
    "transfer": _Label(("model", "blocks a slot", "blocks"), ("model", "planes x bytes", "blocks a slot", "blocks")),
    "sweep": _Label(("bytes of a copy", "copies"), ("bytes of a copy", "copies")),
}


def show(name: str, fields: Fields, output: Output) -> None:
    records, label = fields["transfers"], _LABELS[name]
    output.line(choice_verdict(name, records))
    for placement in dict.fromkeys(record["placement"] for record in records):
        here = [record for record in records if record["placement"] == placement]
        lines = [label.of(record, label.columns) for record in here]
        show_choice(f"planes {placement}", label.columns, lines, here, output)
        show_methods(f"planes {placement}", here, output)
        if output.wide:
            for direction in Direction:
                of_direction = [record for record in here if record["direction"] == direction]
                lines = [label.of(record, label.wide) for record in of_direction]
                show_wide(f"{direction}, {placement}", label.wide, lines, of_direction, output)

"""`kvoffload bench transfer` and `bench sweep`: every copy method, in both directions, against the contiguous copy.

`transfer` measures the geometries of models, `sweep` a grid of sizes and numbers of copies over 64 planes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from kvoffload.internal.models import MODELS, ModelGeometry
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import CommandError, Output, counted
from kvoffload.terminal.options import COMMON, add_command, models, numbers
from kvoffload.tuning import COPIERS
from kvoffload_bench.copy_methods import (
    BARE_STRIDED,
    COPY_LOOP,
    FLAT_BATCH,
    GRID_STRIDE,
    PREFERENCES,
    choice,
    measure,
    size_text,
)
from kvoffload_bench.harness import CONTIGUOUS_COPY, Lab
from kvoffload_bench.report import Fields, add_bench_options, conduct, fixed
from kvoffload_bench.setup import Placement, TransferSetup, geometry_of

Record = Mapping[str, Any]
_ORDER = (
    *map(choice, PREFERENCES),
    *COPIERS,
    *(BARE_STRIDED, FLAT_BATCH, COPY_LOOP, GRID_STRIDE),
    CONTIGUOUS_COPY,
)
_CHOICE = choice(PREFERENCES[0])
_LARGE_BYTES = 32 << 20


# tables ---------------------------------------------------------------------------------------------------------------


def method_of(reason: str) -> str:
    """The copy method at the beginning of a job's reason."""
    return reason.partition(":")[0]


def choice_verdict(name: str, records: Sequence[Record]) -> str:
    """How near the engine's choice comes to the contiguous copy, at least and in the middle."""
    found = [(share, record) for record in records if (share := ratio_of(record, _CHOICE, CONTIGUOUS_COPY)) is not None]
    if not found:
        return f"bench {name}: the engine's choice was not measured"
    lowest, at = min(found, key=lambda each: each[0])
    middle = statistics.median(share for share, _ in found)
    return (
        f"bench {name}: the engine's choice has {lowest:.2f} (lowest) and {middle:.2f} (median) of the contiguous "
        f"copy's GB/s; lowest: {at['model']}, {at['placement']}, {at['direction']}, "
        f"{counted(at['blocks'], 'block')}"
    )


def ratio_of(record: Record, over: str, under: str) -> float | None:
    """The ratio of two scenarios' bandwidths; None if one was not measured."""
    rates = record["gb_per_s"]
    return rates[over] / rates[under] if over in rates and under in rates else None


def show_choice(title: str, columns: Mapping[str, str], records: Sequence[Record], output: Output) -> None:
    """A line for each transfer: for each direction GB/s of the engine's choice, in brackets over those of the
    contiguous copy, and the copy method that it was. `columns`: the fields that name a transfer, by heading.
    """
    by_label: dict[tuple[object, ...], dict[str, Record]] = {}
    for record in records:
        texts = {**record, "row_bytes": size_text(record["row_bytes"])}
        by_label.setdefault(tuple(texts[key] for key in columns.values()), {})[record["direction"]] = record
    lines = []
    for label, found in by_label.items():
        line = list(label)
        for direction in Direction:
            record = found.get(direction, {"gb_per_s": {}, "chosen": {}})
            share, reason = ratio_of(record, _CHOICE, CONTIGUOUS_COPY), record["chosen"].get(_CHOICE)
            line += [f"{fixed(record['gb_per_s'].get(_CHOICE))} ({fixed(share, 2)})"]
            line += ["-" if reason is None else method_of(reason)]
        lines.append(line)
    names = (*columns, "store GB/s (ratio)", "by", "load GB/s (ratio)", "by")
    output.table(f"{title}: the engine's choice; ratio: to one contiguous copy", names, lines, left=("by",))


def show_methods(title: str, records: Sequence[Record], output: Output) -> None:
    """A line for each copy method: its bandwidths over all these transfers."""
    present, lines = set().union(*(record["wrong"] for record in records)), []
    for name in (name for name in _ORDER if name in present):
        line: list[str] = [name]
        for direction in Direction:
            every = [record["gb_per_s"] for record in records if record["direction"] == direction]
            rates = [each[name] for each in every if name in each]
            line += [fixed(statistics.median(rates)), fixed(min(rates))] if rates else ["-", "-"]
        lines.append(line)
    columns = ("copy method", "store median", "lowest", "load median", "lowest")
    output.table(f"{title}: GB/s on the GPU clock, by copy method", columns, lines)


# ratios: the lowest of each, and where --------------------------------------------------------------------------------


def ratios(records: Iterable[Record]) -> list[dict[str, Any]]:
    """For each ratio and direction the lowest value, and where; of transfers that are one job each."""
    records = [record for record in records if record["groups"] == 1]
    found = []
    for name, over, under, conditions in _ratios():
        for direction in Direction:
            values = [
                (value, _place(record))
                for record in records
                if record["direction"] == direction and conditions(record) and (value := ratio_of(record, over, under))
            ]
            if values:
                value, at = min(values)
                found.append({"ratio": f"{name}, {direction}", "which": "lowest", "value": value, "at": at})
    return found


def _ratios() -> Iterator[tuple[str, str, str, Callable[[Record], bool]]]:
    """Name, the scenario, the one that it is compared with, and of which records."""
    pack, wide, scattered = f"pack / {CONTIGUOUS_COPY}, scattered, 4 to 64 KiB", (4, 64), Placement.SCATTERED
    yield f"{pack}, from 32 MiB", "pack", CONTIGUOUS_COPY, _where(scattered, wide)
    yield f"{pack}, n = 1024", "pack", CONTIGUOUS_COPY, _where(scattered, wide, 1024)
    for kib in (4, 8, 16):
        yield (
            f"pack / {GRID_STRIDE}, scattered, n = 128, {kib} KiB",
            "pack",
            GRID_STRIDE,
            _where(scattered, (kib, kib), 128),
        )
    for kib in (4, 8, 16):
        name = f"pack / {CONTIGUOUS_COPY}, folded, from 32 MiB, {kib} KiB"
        yield name, "pack", CONTIGUOUS_COPY, _where(Placement.FOLDED, (kib, kib))
    for kib in (8, 16, 32, 64):
        name = f"batch / {FLAT_BATCH}, scattered, n = 4096, {kib} KiB"
        yield name, "batch", FLAT_BATCH, _where(scattered, (kib, kib), 4096)
    yield f"strided / {BARE_STRIDED}, from 32 MiB", "strided", BARE_STRIDED, _where(None, (0, 1 << 30))


def _where(placement: Placement | None, kib: tuple[int, int], copies: int | None = None) -> Callable[[Record], bool]:
    """Picks records by their planes and KiB of a copy: with so many copies, None: transfers from 32 MiB."""

    def picked(record: Record) -> bool:
        amount = record["nbytes"] >= _LARGE_BYTES if copies is None else record["copies"] == copies
        return placement in (None, record["placement"]) and kib[0] <= record["row_bytes"] / 1024 <= kib[1] and amount

    return picked


def _place(record: Record) -> str:
    adjacent = f", {record['blocks_per_slot']} blocks adjacent" if record["blocks_per_slot"] > 1 else ""
    size = size_text(record["block_bytes"])
    return f"{record['model']}, {size}, n = {record['copies']}, {record['placement']}{adjacent}"


# the commands ---------------------------------------------------------------------------------------------------------

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
        blocks: of a transfer; None for 32 MiB.
        slots: of each group, in each of its transfers; None: all that the setup has.
    """

    geometry: ModelGeometry
    placement: Placement
    blocks_per_slot: int = 1
    blocks: int | None = None
    slots: Sequence[int] | None = None


def add_parser(benches: Any) -> None:
    """Those of both."""
    example = "bench transfer --model llama-3.1-8b --blocks-per-slot 1"
    parser = add_command(benches, "transfer", "every copy method, by model", _TEXT, example=example, common=COMMON)
    add, every = parser.add_argument, [list(MODELS.values())]
    add("--model", type=models, nargs="+", default=every, metavar="NAME", help="geometries (default all)")
    add("--blocks", type=numbers, metavar="N,...", help="blocks of a transfer (default 32 MiB)")
    add("--blocks-per-slot", type=numbers, default=[1, 8], metavar="N,...", help="adjacent blocks (default 1,8)")
    _add_planes(parser, tuple(Placement), f"default all: {', '.join(Placement)}", drawn=False)
    parser.set_defaults(run=partial(run, "transfer", _of_models))
    example = "bench sweep --sizes 4096,32768 --counts 64,1024"
    text = "bytes of a copy x number of copies"
    parser = add_command(benches, "sweep", text, _SWEEP_TEXT, example=example, common=COMMON)
    add = parser.add_argument
    add("--sizes", type=numbers, metavar="BYTES,...", help="of a copy (default 4096 to 65536)")
    add("--counts", type=numbers, metavar="N,...", help="copies of a transfer (64 to 8192)")
    _add_planes(parser, (Placement.FOLDED, Placement.SCATTERED), "folded or scattered (default both)", drawn=True)
    parser.set_defaults(run=partial(run, "sweep", _of_grid))


def _add_planes(parser: argparse.ArgumentParser, known: tuple[Placement, ...], text: str, *, drawn: bool) -> None:
    names = list(map(str, known))
    parser.add_argument("--planes", choices=names, nargs="+", default=names, metavar="NAME", help=text)
    add_bench_options(parser, 5, drawn=drawn)


def run(name: str, cases: Any, arguments: argparse.Namespace) -> int:
    wrong = [size for size in getattr(arguments, "sizes", None) or () if size % _STEP_BYTES]
    if wrong:
        raise CommandError(f"--sizes: {wrong[0]} is no multiple of {_STEP_BYTES}")

    def measured(lab: Lab, output: Output) -> Fields:
        return _measure(list(cases(arguments, lab)), lab, output)

    return conduct(arguments, name, measured, partial(show, name))


def _of_models(arguments: argparse.Namespace, lab: Lab) -> Iterable[Case]:
    for model in (model for group in arguments.model for model in group):
        for placement in map(Placement, arguments.planes):
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
    for placement in map(Placement, arguments.planes):
        for size in sorted(sizes):
            yield Case(geometry_of(planes, size, lab.size.scale), placement, 1, slots[-1], slots)


def _measure(cases: Sequence[Case], lab: Lab, output: Output) -> Fields:
    fields: Fields = {"transfers": [], "not_run": {}}
    with output.progress("transfers") as progress:
        for number, (geometry, placement, blocks_per_slot, blocks, slots) in enumerate(cases, start=1):
            places: dict[str, Any] = {"placement": placement, "blocks_per_slot": blocks_per_slot, "count": blocks}
            with TransferSetup(lab, geometry, **places) as setup:
                fields["transfers"] += measure(setup, slots, fields["not_run"])
                fields["profile"] = setup.engine.profile.source
            progress(number, len(cases))
    records = fields["transfers"]
    return fields | {"ratios": ratios(records), "wrong_rows": sum(sum(each["wrong"].values()) for each in records)}


_COLUMNS = {
    "transfer": {"model": "model", "blocks a slot": "blocks_per_slot", "blocks": "blocks"},
    "sweep": {"bytes of a copy": "row_bytes", "copies": "copies"},
}


def show(name: str, fields: Fields, output: Output) -> None:
    records = fields["transfers"]
    output.line(choice_verdict(name, records))
    for placement in dict.fromkeys(record["placement"] for record in records):
        here = [record for record in records if record["placement"] == placement]
        show_choice(f"planes {placement}", _COLUMNS[name], here, output)
        show_methods(f"planes {placement}", here, output)

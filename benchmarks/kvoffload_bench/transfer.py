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
from kvoffload.terminal.options import COMMON, add_command, add_wide, models, numbers
from kvoffload.tuning import CopyMethod
from kvoffload_bench.copy_methods import (
    BARE_STRIDED,
    COPY_ENGINE,
    COPY_LOOP,
    FLAT_BATCH,
    GRID,
    METHODS,
    PREFERENCES,
    Measurement,
    Measurer,
    choice,
    describe,
    grid_stride,
    size_text,
    wrong_rows,
)
from kvoffload_bench.harness import CONTIGUOUS_COPY, Lab
from kvoffload_bench.report import Fields, add_bench_options, conduct, fixed
from kvoffload_bench.setup import Placement, TransferSetup, geometry_of

Record = Mapping[str, Any]
Labels = Sequence[tuple[object, ...]]
_COPIERS = (*COPY_ENGINE, *(method.label for method in METHODS))
_ORDER = (
    *map(choice, PREFERENCES),
    *_COPIERS,
    *(BARE_STRIDED, FLAT_BATCH, COPY_LOOP, *(grid_stride(GRID, pinned=pinned) for pinned in (False, True))),
    CONTIGUOUS_COPY,
)
_CHOICE = choice(PREFERENCES[0])
_LARGE_BYTES = 32 << 20
_KIB = 1024


# tables ---------------------------------------------------------------------------------------------------------------


def method_of(reason: str) -> str:
    """The copy method at the beginning of a job's reason, as `CopyMethod.label`."""
    copier, _, rest = reason.partition(":")[0].partition(" with ")
    return f"{copier} {rest.split(' ')[0]}".rstrip()


def choice_verdict(name: str, records: Sequence[Record]) -> str:
    """How near the engine's choice comes to the contiguous copy, at least and in the middle."""
    found = [(share, record) for record in records if (share := _over_limit(record)) is not None]
    if not found:
        return f"bench {name}: the engine's choice was not measured"
    lowest, at = min(found, key=lambda each: each[0])
    middle = statistics.median(share for share, _ in found)
    return (
        f"bench {name}: the engine's choice has {lowest:.2f} (lowest) and {middle:.2f} (median) of the contiguous "
        f"copy's GB/s; lowest: {at['model']}, {at['placement']}, {at['direction']}, "
        f"{counted(at['blocks'], 'block')}"
    )


def _over_limit(record: Record) -> float | None:
    rates = record["gb_per_s"]
    return rates[_CHOICE] / rates[CONTIGUOUS_COPY] if _CHOICE in rates and CONTIGUOUS_COPY in rates else None


def show_choice(title: str, names: Sequence[str], labels: Labels, records: Sequence[Record], output: Output) -> None:
    """A line for each label, that is, each transfer: for each direction GB/s of the engine's choice, in brackets over
    those of the contiguous copy, and the copy method that it was.
    """
    by_label: dict[tuple[object, ...], dict[str, Record]] = {}
    for label, record in zip(labels, records, strict=True):
        by_label.setdefault(label, {})[record["direction"]] = record
    lines = []
    for label, found in by_label.items():
        line = list(label)
        for direction in Direction:
            record = found.get(direction, {"gb_per_s": {}, "chosen": {}})
            reason = record["chosen"].get(_CHOICE)
            line += [f"{fixed(record['gb_per_s'].get(_CHOICE))} ({fixed(_over_limit(record), 2)})"]
            line += ["-" if reason is None else method_of(reason)]
        lines.append(line)
    columns = (*names, "store GB/s (ratio)", "by", "load GB/s (ratio)", "by")
    output.table(f"{title}: the engine's choice; ratio: to one contiguous copy", columns, lines, left=("by",))


def _measured(records: Sequence[Record]) -> list[str]:
    """Names of the scenarios that any of the records has, in the order of the columns."""
    present = set().union(*(record["wrong"] for record in records))
    return [name for name in _ORDER if name in present]


def show_methods(title: str, records: Sequence[Record], output: Output) -> None:
    """A line for each copy method: its bandwidths over all these transfers."""
    lines = []
    for name in _measured(records):
        line: list[str] = [name]
        for direction in Direction:
            every = [record["gb_per_s"] for record in records if record["direction"] == direction]
            rates = [each[name] for each in every if name in each]
            line += [fixed(statistics.median(rates)), fixed(min(rates))] if rates else ["-", "-"]
        lines.append(line)
    columns = ("copy method", "store median", "lowest", "load median", "lowest")
    output.table(f"{title}: GB/s on the GPU clock, by copy method", columns, lines)


def show_wide(title: str, names: Sequence[str], labels: Labels, records: Sequence[Record], output: Output) -> None:
    """A line for each transfer, a column for each copy method; last what the engine chose, by preference."""
    scenarios = _measured(records)
    lines = []
    for label, record in zip(labels, records, strict=True):
        chosen = [method_of(record["chosen"][name]) for name in map(choice, PREFERENCES) if name in record["chosen"]]
        rates = [fixed(record["gb_per_s"].get(name)) for name in scenarios]
        lines.append([*label, *rates, " / ".join(dict.fromkeys(chosen))])
    headings = [name.replace(",", "").replace("-", " ") for name in scenarios]  # they break between words only
    columns = (*names, *headings, "overlap / latency by")
    output.table(f"{title}: GB/s on the GPU clock", columns, lines, left=columns[-1:])


# ratios: the worst value of each, and where ---------------------------------------------------------------------------


class Ratio(NamedTuple):
    """A ratio of bandwidths over the records that `of` picks; None where a record lacks one of them."""

    name: str
    value: Callable[[Measurement], float | None]
    of: Callable[[Measurement], bool]
    which: str = "lowest"  # the worst


def ratios(records: Iterable[Measurement]) -> list[dict[str, Any]]:
    """For each ratio and direction: the worst value, and where; of transfers that are one job each."""
    records = [record for record in records if record.groups == 1]
    found = []
    for ratio in _all():
        for direction in Direction:
            values = [
                (value, record.where)
                for record in records
                if record.direction is direction and ratio.of(record) and (value := ratio.value(record)) is not None
            ]
            if values:
                worst, at = (min if ratio.which == "lowest" else max)(values)
                found.append({"ratio": f"{ratio.name}, {direction}", "which": ratio.which, "value": worst, "at": at})
    return found


def _all() -> Iterator[Ratio]:
    gather, overlap, scattered, folded = "gather 4", _CHOICE, Placement.SCATTERED, Placement.FOLDED
    served = _where(scattered, 4, 64)
    yield _over(gather, CONTIGUOUS_COPY, ", scattered, 4 to 64 KiB, from 32 MiB", _where(scattered, 4, 64, large=True))
    yield _over(gather, CONTIGUOUS_COPY, ", scattered, 4 to 64 KiB, n = 1024", _where(scattered, 4, 64, copies=1024))
    for grid in (grid_stride(GRID), grid_stride(GRID, pinned=True)):
        for kib in (4, 8, 16):
            yield _over(gather, grid, f", scattered, n = 128, {kib} KiB", _where(scattered, kib, kib, copies=128))
    for kib in (4, 8, 16):
        large = _where(folded, kib, kib, large=True)
        yield Ratio(f"split 1 or 2 / {CONTIGUOUS_COPY}, folded, from 32 MiB, {kib} KiB", _best_split, large)
    yield _over(overlap, CONTIGUOUS_COPY, ", folded, from 32 MiB, from 8 KiB", _where(folded, 8, large=True))
    yield _over(overlap, CONTIGUOUS_COPY, ", folded, from 32 MiB, 4 KiB", _where(folded, 4, 4, large=True))
    yield _over(overlap, CONTIGUOUS_COPY, ", interleaved, from 32 MiB", _where(Placement.INTERLEAVED, large=True))
    name = "time of the choice (latency) / of the best copier"
    yield Ratio(f"{name}, scattered, 4 to 64 KiB", _behind_best, served, "highest")
    yield Ratio(f"{name}, folded", _behind_best, _where(folded), "highest")
    for kib in (8, 16, 24, 32, 64):
        wanted = _where(scattered, kib, kib, copies=4096)
        yield _over("batch", FLAT_BATCH, f", scattered, n = 4096, {kib} KiB", wanted)
    yield _over("strided", BARE_STRIDED, ", from 32 MiB", _where(None, large=True))


def _over(over: str, under: str, conditions: str, of: Callable[[Measurement], bool]) -> Ratio:
    return Ratio(f"{over} / {under}{conditions}", lambda record: record.ratio(over, under), of)


def _where(
    placement: Placement | None, least: int = 0, most: int = 1 << 30, *, copies: int | None = None, large: bool = False
) -> Callable[[Measurement], bool]:
    """Picks records: copies of `least` to `most` KiB; `large`: transfers from 32 MiB."""

    def of(record: Measurement) -> bool:
        return (
            placement in (None, record.placement)
            and least * _KIB <= record.row_bytes <= most * _KIB
            and copies in (None, record.copies)
            and (not large or record.nbytes >= _LARGE_BYTES)
        )

    return of


def _best_split(record: Measurement) -> float | None:
    return max(filter(None, (record.ratio(name, CONTIGUOUS_COPY) for name in ("split 1", "split 2"))), default=None)


def _behind_best(record: Measurement) -> float | None:
    rates, chosen = record.gb_per_s, choice("latency")
    of_copiers = [rates[name] for name in _COPIERS if name in rates]
    return max(of_copiers) / rates[chosen] if of_copiers and chosen in rates else None


# the commands ---------------------------------------------------------------------------------------------------------

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
                    count=case.blocks,
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

"""What `bench transfer` and `bench sweep` print: GB/s of the engine's choice and of every copy method, and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Output, counted
from kvoffload_bench.baselines import BARE_STRIDED, COPY_LOOP, FLAT_BATCH, grid_stride
from kvoffload_bench.contiguous import CONTIGUOUS_COPY
from kvoffload_bench.measurements import COPY_ENGINE, GRID, METHODS, PREFERENCES, Measurement, choice
from kvoffload_bench.report import number
from kvoffload_bench.setup import Placement

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
            line += [f"{number(record['gb_per_s'].get(_CHOICE))} ({number(_over_limit(record), 2)})"]
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
            line += [number(statistics.median(rates)), number(min(rates))] if rates else ["-", "-"]
        lines.append(line)
    columns = ("copy method", "store median", "lowest", "load median", "lowest")
    output.table(f"{title}: GB/s on the GPU clock, by copy method", columns, lines)


def show_wide(title: str, names: Sequence[str], labels: Labels, records: Sequence[Record], output: Output) -> None:
    """A line for each transfer, a column for each copy method; last what the engine chose, by preference."""
    scenarios = _measured(records)
    lines = []
    for label, record in zip(labels, records, strict=True):
        chosen = [method_of(record["chosen"][name]) for name in map(choice, PREFERENCES) if name in record["chosen"]]
        rates = [number(record["gb_per_s"].get(name)) for name in scenarios]
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

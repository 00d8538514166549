"""The few ratios that sum up what `bench transfer` and `bench sweep` measured: the worst value of each, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from kvoffload.planning.transfer_plan import Direction
from kvoffload_bench.baselines import BARE_STRIDED, FLAT_BATCH, grid_stride
from kvoffload_bench.contiguous import CONTIGUOUS_COPY
from kvoffload_bench.measurements import COPY_ENGINE, GRID, METHODS, Measurement, choice
from kvoffload_bench.setup import Placement

_LARGE_BYTES = 32 << 20
_KIB = 1024
_COPIERS = (*COPY_ENGINE, *(method.label for method in METHODS))


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
    gather, overlap = "gather 4", choice("overlap")
    scattered, folded = _at(Placement.SCATTERED), _at(Placement.FOLDED)
    served = _all_of(_between(4 * _KIB, 64 * _KIB), scattered)
    yield _over(gather, CONTIGUOUS_COPY, ", scattered, 4 to 64 KiB, from 32 MiB", _all_of(served, _large))
    yield _over(gather, CONTIGUOUS_COPY, ", scattered, 4 to 64 KiB, n = 1024", _all_of(served, _count(1024)))
    for grid in (grid_stride(GRID), grid_stride(GRID, pinned=True)):
        for kib in (4, 8, 16):
            yield _over(gather, grid, f", scattered, n = 128, {kib} KiB", _all_of(scattered, _size(kib), _count(128)))
    for kib in (4, 8, 16):
        large = _all_of(folded, _size(kib), _large)
        yield Ratio(f"split 1 or 2 / {CONTIGUOUS_COPY}, folded, from 32 MiB, {kib} KiB", _best_split, large)
    from_eight = _all_of(folded, _large, _between(8 * _KIB, 1 << 40))
    yield _over(overlap, CONTIGUOUS_COPY, ", folded, from 32 MiB, from 8 KiB", from_eight)
    yield _over(overlap, CONTIGUOUS_COPY, ", folded, from 32 MiB, 4 KiB", _all_of(folded, _large, _size(4)))
    yield _over(overlap, CONTIGUOUS_COPY, ", interleaved, from 32 MiB", _all_of(_at(Placement.INTERLEAVED), _large))
    name = "time of the choice (latency) / of the best copier"
    yield Ratio(f"{name}, scattered, 4 to 64 KiB", _behind_best(choice("latency")), served, "highest")
    yield Ratio(f"{name}, folded", _behind_best(choice("latency")), folded, "highest")
    for kib in (8, 16, 24, 32, 64):
        wanted = _all_of(scattered, _size(kib), _count(4096))
        yield _over("batch", FLAT_BATCH, f", scattered, n = 4096, {kib} KiB", wanted)
    yield _over("strided", BARE_STRIDED, ", from 32 MiB", _large)


def _over(over: str, under: str, conditions: str, of: Callable[[Measurement], bool]) -> Ratio:
    return Ratio(f"{over} / {under}{conditions}", lambda record: record.ratio(over, under), of)


def _best_split(record: Measurement) -> float | None:
    return max(filter(None, (record.ratio(name, CONTIGUOUS_COPY) for name in ("split 1", "split 2"))), default=None)


def _behind_best(chosen: str) -> Callable[[Measurement], float | None]:
    def value(record: Measurement) -> float | None:
        rates = [record.gb_per_s[name] for name in _COPIERS if name in record.gb_per_s]
        return max(rates) / record.gb_per_s[chosen] if rates and chosen in record.gb_per_s else None

    return value


def _all_of(*conditions: Callable[[Measurement], bool]) -> Callable[[Measurement], bool]:
    return lambda record: all(condition(record) for condition in conditions)


def _at(placement: Placement) -> Callable[[Measurement], bool]:
    return lambda record: record.placement is placement


def _between(least: int, most: int) -> Callable[[Measurement], bool]:
    return lambda record: least <= record.row_bytes <= most


def _size(kib: int) -> Callable[[Measurement], bool]:
    return lambda record: record.row_bytes == kib * _KIB


def _count(copies: int) -> Callable[[Measurement], bool]:
    return lambda record: record.copies == copies


def _large(record: Measurement) -> bool:
    return record.nbytes >= _LARGE_BYTES

"""What a busy disk tier costs the GPU's transfers: both use the same pinned pool, in interleaved rounds.

Each transfer is measured on an idle GPU and concurrent with products, without and with disk traffic. Ratios are to the
same transfers, concurrent with the same products, without disk traffic. On the simulated device bytes are compared, and
nothing is timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from kvoffload.device.device import Device
from kvoffload.internal.models import MODELS
from kvoffload.terminal.console import SIMULATED_NOTE, Output
from kvoffload_bench.disk_gpu_setup import DiskTraffic, DiskTransfers, Move, Series
from kvoffload_bench.field_compute import ConcurrentCompute, Situation, compute_ended
from kvoffload_bench.lab import Lab
from kvoffload_bench.report import number
from kvoffload_bench.tools import FULL, SMALL

_MODEL = "llama-3.1-8b"
_BLOCKS, _SIMULATED_BLOCKS = 128, 8
_TRANSFERS = 8  # of a series, in each direction
_SERIES = 3  # of a round, without and with disk traffic
_MOVES: tuple[Move, ...] = ("store", "load", "both")
_SITUATIONS = (Situation.IDLE, Situation.LARGE, Situation.SMALL)  # the simulated device has one size of products


class _Round(NamedTuple):
    """One round: series without and with disk traffic, and bytes a second of the disk meanwhile."""

    idle: list[Series]
    busy: list[Series]
    disk: float


def measure(device: Device, file: Path, *, repeats: int) -> dict[str, Any]:
    """Bandwidths of series of transfers while the disk does nothing, and while it writes and reads records.

    Args:
        file: for the tier; lost afterwards.
        repeats: rounds.

    Returns:
        For JSON. Times are the host's, from the first call to the last byte.
    """
    size = SMALL if device.simulated else FULL
    geometry = MODELS[_MODEL].scaled(size.scale)
    blocks = _SIMULATED_BLOCKS if device.simulated else _BLOCKS
    with ExitStack() as undo:
        lab = undo.enter_context(Lab(device, size, repeats=repeats, seed=0))
        transfers = undo.enter_context(closing(DiskTransfers(device, geometry, blocks, _TRANSFERS)))
        traffic = undo.enter_context(closing(DiskTraffic(file, transfers)))
        records = [
            record
            for situation in (_SITUATIONS[:2] if device.simulated else _SITUATIONS)
            for record in _of_situation(lab, transfers, traffic, situation, 1 if device.simulated else repeats)
        ]
    return {
        "simulated": device.simulated,
        "device": device.name,
        "model": _MODEL,
        "blocks": blocks,
        "verified_blocks": transfers.verified.records,
        "wrong_blocks": transfers.verified.wrong,
        "verified_records": traffic.verified.records,
        "wrong_records": traffic.verified.wrong,
        "missing_records": traffic.verified.missing,
        "records": records,
    }


def _of_situation(
    lab: Lab, transfers: DiskTransfers, traffic: DiskTraffic, situation: Situation, repeats: int
) -> Iterator[dict[str, Any]]:
    with _computing(lab, situation) as compute:
        rounds: dict[Move, list[_Round]] = {move: [] for move in _MOVES}
        for number in range(repeats):
            for move in _MOVES:
                rounds[move].append(_round(lab, transfers, traffic, move, compute, busy_first=bool(number % 2)))
    for move in _MOVES:
        record = {"situation": str(situation), "moves": move}
        yield record if lab.device.simulated else record | _summary(rounds[move], transfers.series_bytes())


@contextmanager
def _computing(lab: Lab, situation: Situation) -> Iterator[ConcurrentCompute | None]:
    if situation is Situation.IDLE:
        yield None
        return
    with closing(ConcurrentCompute(lab, situation)) as compute:
        yield compute


def _round(
    lab: Lab,
    transfers: DiskTransfers,
    traffic: DiskTraffic,
    move: Move,
    compute: ConcurrentCompute | None,
    *,
    busy_first: bool,
) -> _Round:
    def series() -> list[Series]:
        with lab.device.current():
            return [transfers.series(move, compute) for _ in range(1 if lab.device.simulated else _SERIES)]

    def with_disk() -> tuple[list[Series], float]:
        before, begun = traffic.moved(), time.perf_counter()
        with traffic.busy():
            found = series()
            return found, (traffic.moved() - before) / (time.perf_counter() - begun)

    if busy_first:
        busy, disk = with_disk()
        return _Round(series(), busy, disk)
    idle = series()
    return _Round(idle, *with_disk())


# figures --------------------------------------------------------------------------------------------------------------


def _summary(rounds: Sequence[_Round], nbytes: int) -> dict[str, Any]:
    """Medians over the rounds; of series during which the products did not end before the transfers."""
    idle = [each for of_round in rounds for each in _counted(of_round.idle)]
    busy = [each for of_round in rounds for each in _counted(of_round.busy)]
    pairs = [(_counted(each.idle), _counted(each.busy)) for each in rounds]
    ratios = [_seconds(without) / _seconds(with_disk) for without, with_disk in pairs if without and with_disk]
    return {
        "idle_gb_per_s": nbytes / _seconds(idle) / 1e9 if idle else None,
        "busy_gb_per_s": nbytes / _seconds(busy) / 1e9 if busy else None,
        "ratio": median(ratios) if ratios else None,
        "product_ratio": _product_ratio(idle, busy),
        "disk_gb_per_s": median(each.disk for each in rounds) / 1e9,
        "series": len(idle) + len(busy),
        "series_compute_ended": 2 * _SERIES * len(rounds) - len(idle) - len(busy),
    }


def _counted(series: Sequence[Series]) -> list[Series]:
    return [each for each in series if each.compute is None or not compute_ended(each.compute)]


def _seconds(series: Sequence[Series]) -> float:
    return median(each.seconds for each in series)


def _product_ratio(idle: Sequence[Series], busy: Sequence[Series]) -> float | None:
    """Time of a product while the disk works over its time while it does not, during the same transfers."""
    times = [
        [each.compute.window_seconds / each.compute.products for each in series if each.compute is not None]
        for series in (idle, busy)
    ]
    return median(times[1]) / median(times[0]) if all(times) else None


def wrong(fields: Mapping[str, Any]) -> int:
    """Blocks and records whose bytes were wrong, or that were missing."""
    return int(fields["wrong_blocks"] + fields["wrong_records"] + fields["missing_records"])


def show(fields: Mapping[str, Any], output: Output) -> None:
    title = f"the GPU's transfers while the disk works, {fields['model']}, {fields['blocks']} blocks; GB/s"
    if not fields["simulated"]:
        columns = ("GPU", "moves", "disk idle", "disk busy", "busy / idle", "product", "disk")
        output.table(title, columns, [_line(each) for each in fields["records"]], left=("moves",))
        output.line("")
        output.line("product: time of a product while the disk works over its time while it does not")
    output.line("")
    compared = f"{fields['verified_blocks']:,} blocks of transfers and {fields['verified_records']:,} records compared"
    missing = f", {fields['missing_records']} missing" if fields["missing_records"] else ""
    note = f"; {SIMULATED_NOTE}" if fields["simulated"] else ""
    output.line(f"{compared}, {fields['wrong_blocks'] + fields['wrong_records']} wrong{missing}{note}")


def _line(each: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("idle_gb_per_s", "busy_gb_per_s", "ratio", "product_ratio", "disk_gb_per_s")
    digits = (1, 1, 2, 2, 1)
    figures = [number(each[name], count) for name, count in zip(names, digits, strict=True)]
    return (each["situation"], each["moves"], *figures)

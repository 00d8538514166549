"""`kvoffload bench transfer`: every way of copying the same addresses, against the big copy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvoffload.cli.cases import Bed, BigCopy, GpuTimer, Size
from kvoffload.copiers import why_not
from kvoffload.device import Device
from kvoffload.models import ModelGeometry
from kvoffload.plan import Direction

WARM_UP = 2
RATIOS = (
    ("strided/bare", "strided", "bare strided"),
    ("strided/big copy", "strided", "big copy"),
    ("strided/flat batch", "strided", "flat batch"),
    ("batch/flat batch", "batch", "flat batch"),
)


@dataclass(frozen=True)
class Row:
    """One geometry, one row width, one direction.

    Attributes:
        planes, block_bytes, row_blocks, blocks, pitch, nbytes: what was moved; see `Bed`.
        gb_per_s: payload over the median seconds on the GPU clock, by case; empty on the simulated device.
        ratios: of those, by name.
        wrong: rows of bytes that were wrong, by case; 0 each when all is well.
    """

    model: str
    direction: Direction
    planes: int
    block_bytes: int
    row_blocks: int
    blocks: int
    pitch: int
    nbytes: int
    gb_per_s: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        models, row_blocks: geometries, and adjacent blocks in a row.
        blocks: of a transfer; None for about `size.payload_bytes`.
        repeats: timed rounds; every round runs every case once.
    """

    models: list[ModelGeometry]
    row_blocks: list[int]
    blocks: list[int] | None
    repeats: int
    size: Size
    seed: int = 0

    @property
    def beds(self) -> list[tuple[ModelGeometry, int, int | None]]:
        counts: list[int | None] = [None] if self.blocks is None else [*self.blocks]
        return [
            (model.scaled(self.size.scale), row_blocks, count)
            for model in self.models
            for row_blocks in self.row_blocks
            for count in counts
        ]


def measure_all(
    plan: Plan, device: Device, timer: GpuTimer, big: BigCopy, progress: Callable[[int, int], None]
) -> Iterator[Row]:
    """Every bed in both directions."""
    beds = plan.beds
    for number, (model, row_blocks, count) in enumerate(beds, start=1):
        with Bed(device, timer, model, row_blocks=row_blocks, count=count, size=plan.size, seed=plan.seed) as bed:
            for direction in Direction:
                yield _measure(bed, direction, plan.repeats, device, big)
        progress(number, len(beds))


def _measure(bed: Bed, direction: Direction, repeats: int, device: Device, big: BigCopy) -> Row:
    cases = _cases(bed, direction, device)
    bed.prepare(direction)
    seconds, wrong = run_rounds(bed, direction, cases, repeats, lambda: big.seconds(direction))
    row = Row(
        bed.model,
        direction,
        bed.plane_count,
        bed.block_bytes,
        bed.row_blocks,
        len(bed.blocks),
        bed.pitch,
        bed.nbytes,
        wrong=wrong,
    )
    if not device.simulated:
        rates = {name: bed.nbytes / value / 1e9 for name, value in seconds.items() if name != "big copy"}
        rates["big copy"] = big.nbytes / seconds["big copy"] / 1e9
        row.gb_per_s.update(rates)
        row.ratios.update(ratios_of(rates))
    return row


def _cases(bed: Bed, direction: Direction, device: Device) -> dict[str, Callable[[], float]]:
    def by_engine(copier: str) -> Callable[[], float]:
        return lambda: bed.engine_seconds(direction, copier)

    cases = {name: by_engine(name) for name, missing in why_not(device.capabilities).items() if missing is None}
    if device.capabilities.strided_batch:
        cases["bare strided"] = bed.bare_strided(direction)
    if device.capabilities.flat_batch:
        cases["flat batch"] = bed.bare_flat(direction)
    return cases


def run_rounds(
    bed: Bed,
    direction: Direction,
    cases: dict[str, Callable[[], float]],
    repeats: int,
    big_seconds: Callable[[], float],
) -> tuple[dict[str, float], dict[str, int]]:
    """Run every case once a round, and the big copy with them: median seconds and wrong rows, by case.

    Targets are poisoned before and verified after each case's timed transfer of the last round.
    """
    samples: dict[str, list[float]] = {name: [] for name in (*cases, "big copy")}
    wrong = {}
    for number in range(WARM_UP + repeats):
        samples["big copy"].append(big_seconds())
        for name, run in cases.items():
            last = number == WARM_UP + repeats - 1
            if last:
                bed.poison(direction)
            samples[name].append(run())
            if last:
                wrong[name] = bed.wrong(direction)
    return {name: statistics.median(values[WARM_UP:]) for name, values in samples.items()}, wrong


def ratios_of(rates: dict[str, float]) -> dict[str, float]:
    return {name: rates[over] / rates[under] for name, over, under in RATIOS if over in rates and under in rates}


def lowest_ratios(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """For each ratio and direction its lowest and median value, and where it is lowest."""
    rows = list(rows)
    found = []
    for name, *_ in RATIOS:
        for direction in Direction:
            values = sorted(
                (row.ratios[name], index)
                for index, row in enumerate(rows)
                if name in row.ratios and row.direction is direction
            )
            if values:
                where = rows[values[0][1]]
                found.append(
                    {
                        "ratio": name,
                        "direction": str(direction),
                        "lowest": values[0][0],
                        "median": statistics.median(value for value, _ in values),
                        "lowest_at": f"{where.model}, rows of {where.row_blocks}",
                    }
                )
    return found

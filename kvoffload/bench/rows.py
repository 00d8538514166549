"""One set of addresses, one direction, every way of copying: what `bench transfer` and `bench sweep` are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvoffload import kernels
from kvoffload.bench.baselines import GRID_PROGRAMS, GridStride, Run, bare_calls, grid_stride
from kvoffload.bench.bed import Bed, Placement
from kvoffload.bench.cases import BIG_COPY, Case, Timing, run_rounds
from kvoffload.engine.job import Job
from kvoffload.errors import CapabilityError
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopyMethod

PREFERENCES = ("overlap", "latency")
COPY_ENGINE = ("strided", "batch", "loop")
METHODS = (
    CopyMethod("gather", 4, 1.0),
    CopyMethod("gather", 3, 1.0),
    CopyMethod("gather", 2, 1.0),
    CopyMethod("split", 2),
    CopyMethod("split", 1),
)
GRID = GRID_PROGRAMS[0]
_SHORT_BYTES = 8 << 20  # transfers that take so little time that a hiccup of the host shows
_MORE_ROUNDS = 3


def choice(prefer: str) -> str:
    """What the engine's own choice is called in tables."""
    return f"choice, {prefer}"


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        model, placement, planes, block_bytes, row_blocks, row_bytes: see `Bed`.
        blocks, copies, nbytes: of a transfer; `copies` are of `row_bytes` each.
        gb_per_s: payload over the median seconds, by case; empty on the simulated device.
        samples_us: microseconds of every counted round, by case; empty on the simulated device.
        wrong: rows of bytes that were wrong, by case, over all rounds; 0 each when all is well.
        chosen: what the engine chose and why, by preference.
        groups: of the model, each a job of the engine's.
    """

    model: str
    placement: Placement
    direction: Direction
    planes: int
    block_bytes: int
    row_blocks: int
    row_bytes: int
    blocks: int
    copies: int
    nbytes: int
    gb_per_s: dict[str, float] = field(default_factory=dict)
    samples_us: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    groups: int = 1

    def ratio(self, over: str, under: str) -> float | None:
        """Of two bandwidths; None if one was not measured."""
        rates = self.gb_per_s
        return rates[over] / rates[under] if over in rates and under in rates else None

    @property
    def where(self) -> str:
        adjacent = f", {self.row_blocks} blocks adjacent" if self.row_blocks > 1 else ""
        return f"{self.model}, {size_text(self.block_bytes)}, n = {self.copies}, {self.placement}{adjacent}"


def size_text(nbytes: int) -> str:
    """KiB where they are whole."""
    return f"{nbytes} B" if nbytes % 1024 else f"{nbytes // 1024} KiB"


class Measurer:
    """Measures beds, `ways` among other things; keeps in `not_run` what cannot run here, and why."""

    def __init__(self, methods: Sequence[CopyMethod] = METHODS) -> None:
        self._methods = methods
        self.not_run: dict[str, str] = {}
        self.profile: str | None = None

    @contextmanager
    def on(self, bed: Bed) -> Iterator[Callable[[Direction, int], Row]]:
        """What measures a direction of this bed, on transfers of so many runs a group; sources are prepared once."""
        self.profile = bed.engine.profile.source
        prepared: list[Direction] = []
        with ExitStack() as stack:
            twin = stack.enter_context(bed.twin())
            grid = self._grid(bed, max(bed.copies, twin.copies))
            if grid is not None:
                stack.enter_context(closing(grid))

            def measure(direction: Direction, runs: int) -> Row:
                if prepared[-1:] != [direction]:
                    bed.prepare(direction)
                    prepared.append(direction)
                bed.take(runs)
                return self._measure(bed, twin, direction, grid)

            yield measure

    def _grid(self, bed: Bed, capacity: int) -> GridStride | None:
        lab = bed.lab
        reason = kernels.why_not(lab.device.capabilities)
        if reason is None:
            try:
                return GridStride(lab, bed.row_bytes, capacity)
            except CapabilityError as error:
                reason = str(error)
        self.not_run[grid_stride(GRID)] = reason
        return None

    def _measure(self, bed: Bed, twin: Bed, direction: Direction, grid: GridStride | None) -> Row:
        chosen: dict[str, str] = {}
        wanted = self._wanted(bed, direction)
        cases = {
            name: bed_case(
                bed,
                direction,
                partial(run_engine, bed, direction, name, chosen, *given),
                partial(warm_engine, twin, bed, direction, *given),
            )
            for name, given in wanted.items()
        }
        bare, warm = (_bare_runs(each, direction, grid) for each in (bed, twin))
        cases |= {name: bed_case(bed, direction, run, warm[name]) for name, run in bare.items()}
        cases[BIG_COPY] = bed.lab.big.case(direction)
        short = bed.nbytes <= _SHORT_BYTES and not bed.lab.device.simulated
        repeats = bed.lab.repeats * (_MORE_ROUNDS if short else 1)
        return row_of(bed, direction, run_rounds(cases, repeats), chosen)

    def _wanted(self, bed: Bed, direction: Direction) -> dict[str, tuple[str | CopyMethod | None, str]]:
        """What the engine is asked for, by name: the copier, and what to prefer."""
        missing = bed.missing
        self.not_run |= {name: reason for name, reason in missing.items() if reason is not None}
        wanted: dict[str, tuple[str | CopyMethod | None, str]] = {
            choice(prefer): (None, prefer) for prefer in PREFERENCES
        }
        wanted |= {name: (name, PREFERENCES[0]) for name in COPY_ENGINE if missing[name] is None}
        return wanted | {
            method.label: (method, PREFERENCES[0])
            for method in shared_ways(bed, direction, self._methods)
            if not missing[method.copier]
        }


def _bare_runs(bed: Bed, direction: Direction, grid: GridStride | None) -> dict[str, Run]:
    runs = bare_calls(bed, direction)
    if grid is not None:
        for pinned in (False,) if bed.lab.device.simulated else (False, True):
            runs[grid_stride(GRID, pinned=pinned)] = grid.run(bed, direction, GRID, pinned=pinned)
    return runs


def run_engine(
    bed: Bed, direction: Direction, name: str, chosen: dict[str, str], copier: str | CopyMethod | None, prefer: str
) -> float:
    """One transfer; the engine's own choice is noted under `name`."""

    def note(job: Job) -> None:
        if copier is None:
            chosen[name] = job.reason

    return bed.transfer_seconds(direction, copier, prefer, note)


def warm_engine(twin: Bed, bed: Bed, direction: Direction, copier: str | CopyMethod | None, prefer: str) -> float:
    """A small transfer, carried as the next one on `bed` will be."""
    return twin.seconds(twin.submit(direction, copier or bed.chosen_way(direction, prefer)))


def shared_ways(bed: Bed, direction: Direction, methods: Sequence[CopyMethod]) -> list[CopyMethod]:
    """Ways with the shares that the engine's profile gives them here; without a split that is none."""
    shape, profile = bed.shape(direction), bed.engine.profile
    shared = [
        method._replace(share=profile.split_share(shape, method.programs)) if method.copier == "split" else method
        for method in methods
    ]
    return [method for method in shared if method.copier != "split" or 0 < method.share < 1]


def bed_case(bed: Bed, direction: Direction, run: Run, warm: Callable[[], object] | None = None) -> Case:
    """A way of copying what a bed copies."""
    if warm is None or bed.lab.device.simulated:
        return Case(run, lambda: bed.poison(direction), lambda: bed.wrong(direction), bed.nbytes)
    return Case(run, lambda: bed.poison(direction), lambda: bed.wrong(direction), bed.nbytes, warm)


def row_of(bed: Bed, direction: Direction, timings: Mapping[str, Timing], chosen: dict[str, str]) -> Row:
    row = Row(
        bed.model,
        bed.placement,
        direction,
        bed.plane_count,
        bed.block_bytes,
        bed.row_blocks,
        bed.row_bytes,
        bed.block_count,
        bed.copies,
        bed.nbytes,
        wrong={name: timing.wrong for name, timing in timings.items()},
        chosen=chosen,
        groups=len(bed.parts),
    )
    if not bed.lab.device.simulated:
        row.gb_per_s.update({name: timing.gb_per_s for name, timing in timings.items()})
        row.samples_us.update({name: microseconds(timing) for name, timing in timings.items()})
    return row


def microseconds(timing: Timing) -> list[float]:
    return [round(seconds * 1e6, 2) for seconds in timing.seconds]


def describe(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For tables, plots and JSON."""
    return [dict(vars(row)) for row in rows]


def wrong_rows(rows: Sequence[Row]) -> int:
    return sum(sum(row.wrong.values()) for row in rows)

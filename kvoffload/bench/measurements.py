"""One set of addresses, one direction, every way of copying: what `bench transfer` and `bench sweep` are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvoffload import kernels
from kvoffload.bench.baselines import GRID_PROGRAMS, GridStride, Run, bare_calls, grid_stride
from kvoffload.bench.contiguous import CONTIGUOUS_COPY
from kvoffload.bench.rounds import Scenario, Timing, time_rounds
from kvoffload.bench.setup import Placement, TransferSetup
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
class Measurement:
    """One line of a table.

    Attributes:
        model, placement, planes, block_bytes, blocks_per_slot, row_bytes: see `TransferSetup`.
        blocks, copies, nbytes: of a transfer; `copies` are of `row_bytes` each.
        gb_per_s: payload over the median seconds, by case; empty on the simulated device.
        samples_us: microseconds of every counted round, by case; empty on the simulated device.
        wrong: rows of bytes that were wrong, by scenario, over all rounds; 0 each when all is well.
        chosen: what the engine chose and why, by preference.
        groups: of the model, each a job of the engine's.
    """

    model: str
    placement: Placement
    direction: Direction
    planes: int
    block_bytes: int
    blocks_per_slot: int
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
        adjacent = f", {self.blocks_per_slot} blocks adjacent" if self.blocks_per_slot > 1 else ""
        return f"{self.model}, {size_text(self.block_bytes)}, n = {self.copies}, {self.placement}{adjacent}"


def size_text(nbytes: int) -> str:
    """KiB where they are whole."""
    return f"{nbytes} B" if nbytes % 1024 else f"{nbytes // 1024} KiB"


class Measurer:
    """Measures setups, `ways` among other things; keeps in `not_run` what cannot run here, and why."""

    def __init__(self, methods: Sequence[CopyMethod] = METHODS) -> None:
        self._methods = methods
        self.not_run: dict[str, str] = {}
        self.profile: str | None = None

    @contextmanager
    def on(self, setup: TransferSetup) -> Iterator[Callable[[Direction, int], Measurement]]:
        """What measures a direction of this setup, on transfers of so many runs a group; sources are prepared once."""
        self.profile = setup.engine.profile.source
        prepared: list[Direction] = []
        with ExitStack() as stack:
            small_setup = stack.enter_context(setup.smaller())
            grid = self._grid(setup, max(setup.copies, small_setup.copies))
            if grid is not None:
                stack.enter_context(closing(grid))

            def measure(direction: Direction, runs: int) -> Measurement:
                if prepared[-1:] != [direction]:
                    setup.prepare(direction)
                    prepared.append(direction)
                setup.take(runs)
                return self._measure(setup, small_setup, direction, grid)

            yield measure

    def _grid(self, setup: TransferSetup, capacity: int) -> GridStride | None:
        lab = setup.lab
        reason = kernels.why_not(lab.device.capabilities)
        if reason is None:
            try:
                return GridStride(lab, setup.row_bytes, capacity)
            except CapabilityError as error:
                reason = str(error)
        self.not_run[grid_stride(GRID)] = reason
        return None

    def _measure(
        self, setup: TransferSetup, small_setup: TransferSetup, direction: Direction, grid: GridStride | None
    ) -> Measurement:
        chosen: dict[str, str] = {}
        wanted = self._wanted(setup, direction)
        scenarios = {
            name: scenario_of(
                setup,
                direction,
                partial(run_engine, setup, direction, name, chosen, *given),
                partial(warm_engine, small_setup, setup, direction, *given),
            )
            for name, given in wanted.items()
        }
        bare, warm = (_bare_runs(each, direction, grid) for each in (setup, small_setup))
        scenarios |= {name: scenario_of(setup, direction, run, warm[name]) for name, run in bare.items()}
        scenarios[CONTIGUOUS_COPY] = setup.lab.contiguous.scenario(direction)
        short = setup.nbytes <= _SHORT_BYTES and not setup.lab.device.simulated
        repeats = setup.lab.repeats * (_MORE_ROUNDS if short else 1)
        return measurement_of(setup, direction, time_rounds(scenarios, repeats), chosen)

    def _wanted(self, setup: TransferSetup, direction: Direction) -> dict[str, tuple[str | CopyMethod | None, str]]:
        """What the engine is asked for, by name: the copier, and what to prefer."""
        missing = setup.missing
        self.not_run |= {name: reason for name, reason in missing.items() if reason is not None}
        wanted: dict[str, tuple[str | CopyMethod | None, str]] = {
            choice(prefer): (None, prefer) for prefer in PREFERENCES
        }
        wanted |= {name: (name, PREFERENCES[0]) for name in COPY_ENGINE if missing[name] is None}
        return wanted | {
            method.label: (method, PREFERENCES[0])
            for method in with_shares(setup, direction, self._methods)
            if not missing[method.copier]
        }


def _bare_runs(setup: TransferSetup, direction: Direction, grid: GridStride | None) -> dict[str, Run]:
    runs = bare_calls(setup, direction)
    if grid is not None:
        for pinned in (False,) if setup.lab.device.simulated else (False, True):
            runs[grid_stride(GRID, pinned=pinned)] = grid.run(setup, direction, GRID, pinned=pinned)
    return runs


def run_engine(
    setup: TransferSetup,
    direction: Direction,
    name: str,
    chosen: dict[str, str],
    copier: str | CopyMethod | None,
    prefer: str,
) -> float:
    """One transfer; the engine's own choice is noted under `name`."""

    def note(job: Job) -> None:
        if copier is None:
            chosen[name] = job.reason

    return setup.transfer_seconds(direction, copier, prefer, note)


def warm_engine(
    small_setup: TransferSetup, setup: TransferSetup, direction: Direction, copier: str | CopyMethod | None, prefer: str
) -> float:
    """A small transfer, carried as the next one on `setup` will be."""
    return small_setup.seconds(small_setup.submit(direction, copier or setup.chosen_method(direction, prefer)))


def with_shares(setup: TransferSetup, direction: Direction, methods: Sequence[CopyMethod]) -> list[CopyMethod]:
    """Ways with the shares that the engine's profile gives them here; without a split that is none."""
    shape, profile = setup.shape(direction), setup.engine.profile
    shared = [
        method._replace(share=profile.split_share(shape, method.programs)) if method.copier == "split" else method
        for method in methods
    ]
    return [method for method in shared if method.copier != "split" or 0 < method.share < 1]


def scenario_of(
    setup: TransferSetup, direction: Direction, run: Run, warm: Callable[[], object] | None = None
) -> Scenario:
    """A way of copying what a setup copies."""
    if warm is None or setup.lab.device.simulated:
        return Scenario(run, lambda: setup.poison(direction), lambda: setup.wrong(direction), setup.nbytes)
    return Scenario(run, lambda: setup.poison(direction), lambda: setup.wrong(direction), setup.nbytes, warm)


def measurement_of(
    setup: TransferSetup, direction: Direction, timings: Mapping[str, Timing], chosen: dict[str, str]
) -> Measurement:
    row = Measurement(
        setup.model,
        setup.placement,
        direction,
        setup.plane_count,
        setup.block_bytes,
        setup.blocks_per_slot,
        setup.row_bytes,
        setup.block_count,
        setup.copies,
        setup.nbytes,
        wrong={name: timing.wrong for name, timing in timings.items()},
        chosen=chosen,
        groups=len(setup.groups),
    )
    if not setup.lab.device.simulated:
        row.gb_per_s.update({name: timing.gb_per_s for name, timing in timings.items()})
        row.samples_us.update({name: microseconds(timing) for name, timing in timings.items()})
    return row


def microseconds(timing: Timing) -> list[float]:
    return [round(seconds * 1e6, 2) for seconds in timing.seconds]


def describe(rows: Sequence[Measurement]) -> list[dict[str, Any]]:
    """For tables, plots and JSON."""
    return [dict(vars(row)) for row in rows]


def wrong_rows(rows: Sequence[Measurement]) -> int:
    return sum(sum(row.wrong.values()) for row in rows)

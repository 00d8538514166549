"""Measures one transfer with every copy method, on the same addresses: for `bench transfer` and `bench sweep`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvoffload import kernels
from kvoffload.engine.job import Job
from kvoffload.errors import CapabilityError
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopierChoice, CopierName, CopyMethod
from kvoffload_bench.baselines import GRID_PROGRAMS, GridStride, TimedCopy, bare_calls, grid_stride
from kvoffload_bench.contiguous import CONTIGUOUS_COPY
from kvoffload_bench.rounds import Scenario, Timing, time_rounds
from kvoffload_bench.setup import Placement, TransferSetup

PREFERENCES = ("overlap", "latency")
COPY_ENGINE: tuple[CopierName, ...] = ("strided", "batch", "loop")
METHODS = (
    CopyMethod("gather", 4, 1.0),
    CopyMethod("gather", 3, 1.0),
    CopyMethod("gather", 2, 1.0),
    CopyMethod("split", 2),
    CopyMethod("split", 1),
)
GRID = GRID_PROGRAMS[0]
_SHORT_BYTES = 8 << 20  # up to here a delay of the host shows in the figures
_MORE_ROUNDS = 3


def choice(prefer: str) -> str:
    """The name of the engine's own choice in tables and JSON."""
    return f"choice, {prefer}"


@dataclass(frozen=True)
class Measurement:
    """The figures of one transfer: a line of a table.

    Attributes:
        model, placement, planes, block_bytes, blocks_per_slot, row_bytes: of the `TransferSetup`.
        blocks, copies, nbytes: of the transfer; `copies` of `row_bytes` each.
        gb_per_s: payload over the median seconds, by scenario; empty on the simulated device.
        samples_us: microseconds of every counted round, by scenario; empty on the simulated device.
        wrong: rows of bytes that were wrong, by scenario, over all rounds; 0 each when all is well.
        chosen: the reason of the engine's choice, by preference.
        groups: groups of the model; the engine makes a job of each.
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
        """The ratio of two scenarios' bandwidths; None if one was not measured."""
        rates = self.gb_per_s
        return rates[over] / rates[under] if over in rates and under in rates else None

    @property
    def where(self) -> str:
        adjacent = f", {self.blocks_per_slot} blocks adjacent" if self.blocks_per_slot > 1 else ""
        return f"{self.model}, {size_text(self.block_bytes)}, n = {self.copies}, {self.placement}{adjacent}"


def size_text(nbytes: int) -> str:
    """Bytes as text, in KiB if they are whole KiB."""
    return f"{nbytes} B" if nbytes % 1024 else f"{nbytes // 1024} KiB"


class Measurer:
    """Measures setups.

    Attributes:
        not_run: by name, why a copy method cannot be used here.
        profile: the source of the engine's profile.
    """

    def __init__(self, methods: Sequence[CopyMethod] = METHODS) -> None:
        self._methods = methods
        self.not_run: dict[str, str] = {}
        self.profile: str | None = None

    @contextmanager
    def on(self, setup: TransferSetup) -> Iterator[Callable[[Direction, int], Measurement]]:
        """Yields a function that measures a direction of this setup, with so many slots of each group."""
        self.profile = setup.engine.profile.source
        prepared: list[Direction] = []
        with ExitStack() as stack:
            small_setup = stack.enter_context(setup.smaller())
            grid = self._grid(setup, max(setup.copies, small_setup.copies))
            if grid is not None:
                stack.enter_context(closing(grid))

            def measure(direction: Direction, slots: int) -> Measurement:
                if prepared[-1:] != [direction]:
                    setup.prepare(direction)
                    prepared.append(direction)
                setup.take(slots)
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
                partial(time_engine, setup, direction, name, chosen, *given),
                partial(warm_engine, small_setup, setup, direction, *given),
            )
            for name, given in wanted.items()
        }
        bare, warm = (_bare_copies(each, direction, grid) for each in (setup, small_setup))
        scenarios |= {name: scenario_of(setup, direction, run, warm[name]) for name, run in bare.items()}
        scenarios[CONTIGUOUS_COPY] = setup.lab.contiguous.scenario(direction)
        short = setup.nbytes <= _SHORT_BYTES and not setup.lab.device.simulated
        repeats = setup.lab.repeats * (_MORE_ROUNDS if short else 1)
        return measurement_of(setup, direction, time_rounds(scenarios, repeats), chosen)

    def _wanted(self, setup: TransferSetup, direction: Direction) -> dict[str, tuple[CopierChoice, str]]:
        """By name: the copier that the engine is given, and the preference."""
        missing = setup.missing
        self.not_run |= {name: reason for name, reason in missing.items() if reason is not None}
        wanted: dict[str, tuple[CopierChoice, str]] = {choice(prefer): (None, prefer) for prefer in PREFERENCES}
        wanted |= {name: (name, PREFERENCES[0]) for name in COPY_ENGINE if missing[name] is None}
        return wanted | {
            method.label: (method, PREFERENCES[0])
            for method in with_shares(setup, direction, self._methods)
            if not missing[method.copier]
        }


def _bare_copies(setup: TransferSetup, direction: Direction, grid: GridStride | None) -> dict[str, TimedCopy]:
    copies = bare_calls(setup, direction)
    if grid is not None:
        for pinned in (False,) if setup.lab.device.simulated else (False, True):
            copies[grid_stride(GRID, pinned=pinned)] = grid.timed(setup, direction, GRID, pinned=pinned)
    return copies


def time_engine(
    setup: TransferSetup,
    direction: Direction,
    name: str,
    chosen: dict[str, str],
    copier: CopierChoice,
    prefer: str,
) -> float:
    """One transfer; seconds on the GPU clock. The reason of the engine's own choice goes to `chosen[name]`."""

    def note(job: Job) -> None:
        if copier is None:
            chosen[name] = job.reason

    return setup.transfer_seconds(direction, copier, prefer, note)


def warm_engine(
    small_setup: TransferSetup, setup: TransferSetup, direction: Direction, copier: CopierChoice, prefer: str
) -> float:
    """A small transfer with the copy method that the next one on `setup` will have."""
    return small_setup.seconds(small_setup.submit(direction, copier or setup.chosen_method(direction, prefer)))


def with_shares(setup: TransferSetup, direction: Direction, methods: Sequence[CopyMethod]) -> list[CopyMethod]:
    """Copy methods with the shares that the engine's profile gives to splits; splits of share 0 or 1 are left out."""
    shape, profile = setup.shape(direction), setup.engine.profile
    shared = [
        method._replace(share=profile.split_share(shape, method.programs)) if method.copier == "split" else method
        for method in methods
    ]
    return [method for method in shared if method.copier != "split" or 0 < method.share < 1]


def scenario_of(
    setup: TransferSetup, direction: Direction, run: TimedCopy, warm: Callable[[], object] | None = None
) -> Scenario:
    """A copy method on the blocks of a setup, as a scenario."""
    if warm is None or setup.lab.device.simulated:
        return Scenario(run, lambda: setup.poison(direction), lambda: setup.wrong(direction), setup.nbytes)
    return Scenario(run, lambda: setup.poison(direction), lambda: setup.wrong(direction), setup.nbytes, warm)


def measurement_of(
    setup: TransferSetup, direction: Direction, timings: Mapping[str, Timing], chosen: dict[str, str]
) -> Measurement:
    record = Measurement(
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
        record.gb_per_s.update({name: timing.gb_per_s for name, timing in timings.items()})
        record.samples_us.update({name: microseconds(timing) for name, timing in timings.items()})
    return record


def microseconds(timing: Timing) -> list[float]:
    return [round(seconds * 1e6, 2) for seconds in timing.seconds]


def describe(records: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Measurements as records for tables, plots and JSON."""
    return [dict(vars(record)) for record in records]


def wrong_rows(records: Sequence[Measurement]) -> int:
    return sum(sum(record.wrong.values()) for record in records)

"""`kvoffload bench interference`: how much slower a computation is while transfers are concurrent with it."""

from __future__ import annotations

import argparse
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any, NamedTuple, Protocol

from kvoffload import kernels
from kvoffload.calibration.compute import MATMUL, SKINNY, SMALL, Computation, Product
from kvoffload.device.streams import NO_WAIT
from kvoffload.engine.job import Job
from kvoffload.errors import CapabilityError
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import CommandError, Output
from kvoffload.terminal.options import COMMON, add_command
from kvoffload.tuning import CopierChoice, CopyMethod
from kvoffload_bench.copy_methods import GRID_PROGRAMS, GridStride, choice, grid_stride, with_shares
from kvoffload_bench.harness import CONTIGUOUS_COPY, ContiguousCopy, Lab, Scenario, time_rounds
from kvoffload_bench.report import ALONE, Fields, add_bench_options, conduct, fixed
from kvoffload_bench.setup import TransferSetup, geometry_of


def _queued(lab: Lab) -> int:
    """Unfinished transfers to keep: on a GPU one that is being copied and two behind it."""
    return 1 if lab.device.simulated else 3


class Background(Protocol):
    """Submits the same transfer repeatedly.

    Attributes:
        nbytes: bytes of one transfer.
        seconds: on the GPU clock, of every transfer that had ended when `finish` was called.
    """

    nbytes: int
    seconds: list[float]

    def submit(self, after: int | None = None) -> None:
        """Queue one transfer; it starts after the work that is queued on the stream `after` now."""

    def top_up(self) -> None:
        """Queue transfers until as many are unfinished as should be."""

    def finish(self) -> None:
        """Wait until all have ended. The time of those still unfinished is not counted: the computation is over."""


class EngineBackground:
    """Transfers through an engine; `copier` as for `TransferSetup.submit`."""

    def __init__(self, setup: TransferSetup, direction: Direction, copier: CopierChoice) -> None:
        self._setup, self._direction, self._copier = setup, direction, copier
        self.nbytes = setup.nbytes
        self.seconds: list[float] = []
        self.reason = ""
        self._jobs: deque[Job] = deque()

    def submit(self, after: int | None = None) -> None:
        order: Any = NO_WAIT if after is None else after
        jobs = self._setup.submit(self._direction, self._copier, after=order)
        self.reason = jobs[0].reason
        self._jobs += jobs

    def top_up(self) -> None:
        while self._jobs and self._jobs[0].done:
            self._retire()
        while len(self._jobs) < _queued(self._setup.lab):
            self.submit()

    def finish(self) -> None:
        while self._jobs and self._jobs[0].done:
            self._retire()
        while self._jobs:
            self._jobs.popleft().wait()

    def _retire(self) -> None:
        self.seconds.append(self._jobs.popleft().wait().seconds)


class StreamBackground:
    """Transfers by bare driver calls: `queue` is called with the stream of the lab's timer. Free it with `close`."""

    def __init__(self, lab: Lab, queue: Callable[[int], object], nbytes: int) -> None:
        self._lab, self._queue = lab, queue
        self.nbytes = nbytes
        self.seconds: list[float] = []
        self._driver, self._stream = lab.driver, lab.timer.stream
        self._timers: list[int] = []
        self._free: list[tuple[int, int]] = []
        self._unfinished: deque[tuple[int, int]] = deque()
        with lab.device.current():
            self._order = self._driver.event_create(timing=False)

    def submit(self, after: int | None = None) -> None:
        driver, stream = self._driver, self._stream
        with self._lab.device.current():
            pair = self._free.pop() if self._free else (self._timer(), self._timer())
            if after is not None:
                driver.event_record(self._order, after)
                driver.stream_wait_event(stream, self._order)
            driver.event_record(pair[0], stream)
            self._queue(stream)
            driver.event_record(pair[1], stream)
            self._unfinished.append(pair)

    def _timer(self) -> int:
        self._timers.append(self._driver.event_create(timing=True))
        return self._timers[-1]

    def top_up(self) -> None:
        self._collect()
        while len(self._unfinished) < _queued(self._lab):
            self.submit()

    def finish(self) -> None:
        self._collect()
        while self._unfinished:
            self._collect(counted=False)

    def _collect(self, *, counted: bool = True) -> None:
        with self._lab.device.current():
            while self._unfinished and self._driver.event_query(self._unfinished[0][1]):
                pair = self._unfinished.popleft()
                if counted:
                    self.seconds.append(self._driver.event_seconds(*pair))
                self._free.append(pair)

    def close(self) -> None:
        """Wait for all queued work, also that of a `submit` that failed: the caller frees its memory next."""
        with self._lab.device.current(), ExitStack() as undo:
            for event in (self._order, *self._timers):
                undo.callback(self._driver.event_destroy, event)
            self._driver.stream_synchronize(self._stream)


def grid_background(grid: GridStride, setup: TransferSetup, direction: Direction, programs: int) -> StreamBackground:
    """Transfers by the grid-stride kernel; its arrays are written once and copied to the GPU for every transfer."""
    return StreamBackground(setup.lab, grid.stage(setup, direction, setup.ends(direction), programs), setup.nbytes)


# the command ----------------------------------------------------------------------------------------------------------

LOOP = "decode-like loop, stores only"
_CHOICE = choice("overlap")
_PROGRAMS = (1, 2, 4, 8)
_METHODS = (
    CopyMethod("strided"),
    CopyMethod("batch"),
    CopyMethod("split", 1),
    CopyMethod("split", 2),
    *(CopyMethod("gather", programs, 1.0) for programs in _PROGRAMS),
)
_PLANES, _BLOCK_BYTES = 64, 8192
_SMALL_PLANES, _SMALL_BLOCKS = 2, 2  # on the simulated device
_TEXT = """\
Times a computation alone and concurrent with transfers by each copy method: a matrix product, a skinny one, and a \
loop of steps. Medians on the GPU clock; every byte is verified."""


class Effort(NamedTuple):
    """How much to compute: products in a timed run, of which the first are not counted; steps, and products of each."""

    products: int
    skipped: int
    steps: int
    step_products: int


_FULL = Effort(36, 4, 6, 32)
_SMALL = Effort(1, 0, 1, 1)


def add_parser(benches: Any) -> None:
    parser = add_command(
        benches,
        "interference",
        "how much transfers slow a computation",
        _TEXT,
        example="bench interference --repeats 3",
        common=COMMON,
    )
    add_bench_options(parser, 7)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    return conduct(arguments, "interference", _measure, _show)


def _measure(lab: Lab, output: Output) -> Fields:
    reason = kernels.why_not(lab.device.capabilities)
    if reason is not None:
        raise CommandError(f"the computation is a Triton kernel: {reason}")
    simulated = lab.device.simulated
    effort = _SMALL if simulated else _FULL
    records: list[dict[str, Any]] = []
    not_run: dict[str, str] = {}
    with ExitStack() as stack, output.progress("computations") as progress:
        geometry = geometry_of(_SMALL_PLANES if simulated else _PLANES, _BLOCK_BYTES, lab.size.scale)
        count = _SMALL_BLOCKS if simulated else None
        setup = stack.enter_context(TransferSetup(lab, geometry, count=count, sm_limit=_PROGRAMS[-1]))
        not_run |= {name: reason for name, reason in setup.missing.items() if reason is not None}
        grid = _grid(stack, setup, not_run)
        jobs = list(_computations(simulated))
        for done, (name, product, directions) in enumerate(jobs, start=1):
            with Computation(lab.device, product) as computation:
                for direction in directions:
                    timed = _Timed(setup, direction, grid, computation, effort, looped=name == LOOP)
                    records += timed.records(name)
            progress(done, len(jobs))
        profile = setup.engine.profile.source
    return {
        "interference": records,
        "ratios": [] if simulated else _ratios(records),
        "not_run": not_run,
        "profile": profile,
        "wrong_rows": sum(record["wrong"] for record in records),
    }


def _grid(stack: ExitStack, setup: TransferSetup, not_run: dict[str, str]) -> GridStride | None:
    try:
        return stack.enter_context(closing(GridStride(setup.lab, setup.row_bytes, setup.copies)))
    except CapabilityError as error:
        not_run |= {grid_stride(programs): str(error) for programs in GRID_PROGRAMS}
        return None


def _computations(simulated: bool) -> Iterator[tuple[str, Product, tuple[Direction, ...]]]:
    both = tuple(Direction)
    yield MATMUL.name, SMALL if simulated else MATMUL, both
    yield SKINNY.name, SMALL if simulated else SKINNY, both
    yield LOOP, SMALL if simulated else SKINNY, (Direction.STORE,)


class _Timed:
    """One computation, concurrent with transfers of one direction by every copy method."""

    def __init__(
        self,
        setup: TransferSetup,
        direction: Direction,
        grid: GridStride | None,
        computation: Computation,
        effort: Effort,
        *,
        looped: bool,
    ) -> None:
        self._setup, self._direction, self._grid = setup, direction, grid
        self._computation, self._effort, self._looped = computation, effort, looped

    def records(self, name: str) -> list[dict[str, Any]]:
        """A record for each copy method; slow-downs are relative to the median of the computation alone."""
        setup = self._setup
        setup.prepare(self._direction)
        with ExitStack() as stack:
            contiguous = setup.lab.contiguous
            if self._looped:  # a step's copy, as large as the others
                contiguous = stack.enter_context(closing(ContiguousCopy(setup.lab, setup.nbytes)))
            backgrounds = self._backgrounds(stack, contiguous)
            scenarios = {
                method: self._scenario(background, method, contiguous) for method, background in backgrounds.items()
            }
            scenarios[ALONE] = Scenario(lambda: self._execute(None), lambda: None, lambda: 0, 0)
            timings = time_rounds(scenarios, setup.lab.repeats)
        records = []
        for method, timing in timings.items():
            record = {"computation": name, "direction": str(self._direction), "method": method, "wrong": timing.wrong}
            background = backgrounds.get(method)
            if isinstance(background, EngineBackground) and method == _CHOICE:
                record["chosen"] = background.reason
            if not setup.lab.device.simulated:
                record |= {"seconds": timing.median, "slowdown": timing.median / timings[ALONE].median}
                record["samples_us"] = [round(each * 1e6, 2) for each in timing.seconds]
                if background is not None and background.seconds:
                    record["gb_per_s"] = background.nbytes / statistics.median(background.seconds) / 1e9
            records.append(record)
        return records

    def _backgrounds(self, stack: ExitStack, contiguous: ContiguousCopy) -> dict[str, Background]:
        setup, direction, lab = self._setup, self._direction, self._setup.lab

        def bare(background: StreamBackground) -> StreamBackground:
            return stack.enter_context(closing(background))

        found: dict[str, Background] = {_CHOICE: EngineBackground(setup, direction, None)}
        for method in with_shares(setup, direction, _METHODS):
            if setup.missing[method.copier] is None:
                found[method.label] = EngineBackground(setup, direction, method)
        found[CONTIGUOUS_COPY] = bare(
            StreamBackground(lab, lambda stream: contiguous.queue(direction, stream), contiguous.nbytes)
        )
        if self._grid is not None:
            for programs in GRID_PROGRAMS:
                found[grid_stride(programs)] = bare(grid_background(self._grid, setup, direction, programs))
        return found

    def _scenario(self, background: Background, method: str, contiguous: ContiguousCopy) -> Scenario:
        setup, direction = self._setup, self._direction
        if method == CONTIGUOUS_COPY:
            copy = contiguous.scenario(direction)
            return Scenario(lambda: self._execute(background), copy.poison, copy.wrong, copy.nbytes)
        return Scenario(
            lambda: self._execute(background),
            lambda: setup.poison(direction),
            lambda: setup.wrong(direction),
            setup.nbytes,
        )

    def _execute(self, background: Background | None) -> float:
        """Seconds of one product, or of one step of the loop."""
        seconds = self._loop(background) if self._looped else self._products(background)
        if background is not None:
            background.finish()
        return seconds

    def _products(self, background: Background | None) -> float:
        meanwhile: Callable[[], None] | None = None
        if background is not None:
            meanwhile = background.top_up
            background.top_up()
        seconds = self._computation.seconds_each(self._effort.products, meanwhile)
        return statistics.fmean(seconds[self._effort.skipped :])

    def _loop(self, background: Background | None) -> float:
        """A step starts while the stores of earlier steps are unfinished."""
        device, driver, stream = self._setup.lab.device, self._setup.lab.driver, self._computation.stream
        with device.current(), ExitStack() as stack:
            start, end = (driver.event_create(timing=True) for _ in range(2))
            stack.callback(driver.event_destroy, start)
            stack.callback(driver.event_destroy, end)
            driver.event_record(start, stream)
            for _ in range(self._effort.steps):
                self._computation.queue(self._effort.step_products)
                if background is not None:
                    background.submit(after=stream)
            driver.event_record(end, stream)
            while not driver.event_query(end):
                pass
            return driver.event_seconds(start, end) / self._effort.steps


def _ratios(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choice's slow-downs, and what was chosen."""
    return [
        {
            "ratio": f"{record['computation']} with the choice (overlap), {record['direction']}",
            "which": "slow-down",
            "value": record["slowdown"],
            "at": record["chosen"],
        }
        for record in records
        if record["method"] == _CHOICE
    ]


def _show(fields: Fields, output: Output) -> None:
    chosen = [record for record in fields["interference"] if record["method"] == _CHOICE]
    if chosen:
        worst = max(chosen, key=lambda record: float(record["slowdown"]))
        output.line(
            f"bench interference: the engine's choice slows a computation by {worst['slowdown']:.2f} times at most "
            f"({worst['computation']}, {worst['direction']}, {worst['chosen']})"
        )
    for name in dict.fromkeys((record["computation"], record["direction"]) for record in fields["interference"]):
        lines = [
            (
                record["method"],
                fixed(record["seconds"] * 1e6),
                fixed(record["slowdown"], 3),
                fixed(record.get("gb_per_s")),
            )
            for record in fields["interference"]
            if (record["computation"], record["direction"]) == name
        ]
        title = ", ".join(name)
        output.table(title, ("copy method", "us", "slow-down", "transfers GB/s"), lines)

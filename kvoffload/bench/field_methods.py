"""How the transfers of a series are submitted: by the engine, by bare driver calls, or as contiguous copies."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Protocol

import numpy as np

from kvoffload import kernels
from kvoffload.bench.baselines import FLAT_BATCH, GRID_PROGRAMS, GridStride, grid_stride
from kvoffload.bench.contiguous import CONTIGUOUS_COPY
from kvoffload.bench.field_setup import ContiguousSeries, FieldSetup
from kvoffload.bench.measurements import with_shares
from kvoffload.bench.setup import GroupBlocks
from kvoffload.device.streams import NO_WAIT
from kvoffload.driver import FlatTable, SourceOrder
from kvoffload.engine.job import Job
from kvoffload.engine.shard import Prefer
from kvoffload.errors import CapabilityError
from kvoffload.internal.types import UInt64Array
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopierChoice, CopyMethod, Profile, default_profile, key_of

CHOICE = "choice"
SHIPPED_CHOICE = "shipped choice"  # by the default profile
CHOICES = (CHOICE, SHIPPED_CHOICE)
METHODS = (
    CopyMethod("strided"),
    CopyMethod("gather", 4, 1.0),
    CopyMethod("split", 2),
    CopyMethod("batch"),
    CopyMethod("loop"),
)
GRID = grid_stride(GRID_PROGRAMS[0], pinned=True)
_APART = (FLAT_BATCH, "batch", "loop")
_FLAT_COPIES = 32_768  # of one driver call; a call with 51,828 has crashed a driver

Queue = Callable[[int], object]  # puts one transfer on a stream


class Submitter(Protocol):
    """Submits the transfers of series. The device's context must be current."""

    def submit(self, direction: Direction, index: int) -> None:
        """Submit transfer `index` of the series of a direction; returns when the call that submits it does."""

    def done(self) -> bool:
        """Whether all that was submitted has ended. Never waits."""

    def finish(self) -> None:
        """Raise the failure of a transfer; all have ended."""


class EngineSubmitter:
    """Submits to the engine, with the copier of each direction; None leaves the choice to it.

    Args:
        profile: for the choice.

    Attributes:
        chosen: by direction, how many jobs of series each copy method has carried.
    """

    def __init__(self, field: FieldSetup, copiers: Mapping[Direction, CopierChoice], profile: Profile) -> None:
        self._engine, self._copiers, self._count = field.setup.engine, copiers, field.size.transfers
        self._profile = profile
        self._in_series = True
        self._transfers = _transfers(field, copiers)
        self._unfinished: deque[Job] = deque()
        self._ended: list[Job] = []
        self.chosen: dict[Direction, Counter[str]] = {direction: Counter() for direction in copiers}

    def submit(self, direction: Direction, index: int) -> None:
        copier = self._copiers[direction]
        self._engine.profile = self._profile
        self._in_series = index < self._count
        for group, each in enumerate(self._transfers[direction][index]):
            if direction is Direction.STORE:
                job = self._engine.store(each.blocks, each.slots, group=group, after=NO_WAIT, copier=copier)
            else:
                job = self._engine.load(each.slots, each.blocks, group=group, after=NO_WAIT, copier=copier)
            self._unfinished.append(job)

    def done(self) -> bool:
        while self._unfinished and self._unfinished[0].done:
            self._ended.append(self._unfinished.popleft())
        return not self._unfinished

    def finish(self) -> None:
        for job in self._ended:
            job.wait()
            if self._in_series and job.method is not None:
                self.chosen[job.direction][job.method.label] += 1
        self._ended.clear()
        self._engine.poll()


def _transfers(field: FieldSetup, directions: Iterable[Direction]) -> dict[Direction, list[Sequence[GroupBlocks]]]:
    """By direction, what each transfer of the series copies, and last the one that warms up."""
    indices = range(field.size.transfers + 1)
    return {direction: [field.transfer(direction, index) for index in indices] for direction in directions}


def _each(
    field: FieldSetup, make: Callable[[Direction, int, Sequence[GroupBlocks]], Queue]
) -> dict[Direction, list[Queue]]:
    """By direction, a queue function for each transfer, made of its blocks and slots."""
    return {
        direction: [make(direction, index, groups) for index, groups in enumerate(each)]
        for direction, each in _transfers(field, Direction).items()
    }


class StreamSubmitter:
    """Puts transfers on one stream for each direction; `queues` has a function for each transfer."""

    def __init__(self, field: FieldSetup, queues: Mapping[Direction, Sequence[Queue]]) -> None:
        self._driver, self._queues = field.lab.driver, queues
        self._streams, self._events = field.streams, field.events
        self._used: set[Direction] = set()

    def submit(self, direction: Direction, index: int) -> None:
        stream = self._streams[direction]
        self._queues[direction][index](stream)
        self._driver.event_record(self._events[direction], stream)
        self._used.add(direction)

    def done(self) -> bool:
        return all(self._driver.event_query(self._events[direction]) for direction in self._used)

    def finish(self) -> None:
        self._used.clear()


class Targets(Protocol):
    """What a series writes."""

    def poison(self, directions: Sequence[Direction]) -> None:
        """Overwrite the targets of the series of these directions."""

    def wrong(self, directions: Sequence[Direction]) -> int:
        """The number of wrong rows in them."""


class FieldMethods:
    """Every copy method for the series of a setup, by name. Free it with `close`.

    The flat batch and the engine's flat copies have memory of their own. On an idle stream the driver copies rows under
    28 KiB with the CPU, and GPU memory that the CPU has written to stays different from then on, for megabytes around:
    strided copies of other rows of 18 KiB in it, concurrent with large products, had 45 GB/s instead of 29 on an H200.
    Kernels, memsets and large copies, which are what fills a cache, do not do that.

    Args:
        prefer: of the engine, for its choice.
        shipped: whether the choice by the default profile is a method too.

    Attributes:
        not_run: by name, why a copy method cannot be used here.
    """

    def __init__(self, field: FieldSetup, contiguous: ContiguousSeries, prefer: Prefer, *, shipped: bool) -> None:
        self._field, self._contiguous = field, contiguous
        field.setup.engine.prefer = prefer
        self._profiles = {CHOICE: field.setup.engine.profile}
        if shipped:
            self._profiles[SHIPPED_CHOICE] = default_profile(key_of(field.lab.device))
        self.not_run: dict[str, str] = {}
        with ExitStack() as undo:
            self._apart = undo.enter_context(field.another())
            self._bare = {CONTIGUOUS_COPY: StreamSubmitter(field, self._contiguous_queues())}
            capabilities = field.lab.device.capabilities
            if capabilities.flat_batch:
                self._bare[FLAT_BATCH] = StreamSubmitter(self._apart, self._flat_queues())
            else:
                self.not_run[FLAT_BATCH] = capabilities.missing["cuMemcpyBatchAsync"]
            grid = self._grid(undo)
            if grid is not None:
                self._bare[GRID] = StreamSubmitter(field, self._grid_queues(grid))
            self._undo = undo.pop_all()

    def targets(self, name: str) -> Targets:
        """What the series of a copy method write."""
        return self._contiguous if name == CONTIGUOUS_COPY else self._memory(name)

    def _memory(self, name: str) -> FieldSetup:
        return self._apart if name in _APART else self._field

    def of(self, directions: Sequence[Direction]) -> dict[str, Submitter]:
        """By name; of these directions at once."""
        setup = self._field.setup
        missing = setup.missing
        self.not_run |= {name: reason for name, reason in missing.items() if reason is not None}
        found: dict[str, Submitter] = {
            name: EngineSubmitter(self._field, dict.fromkeys(directions), profile)
            for name, profile in self._profiles.items()
        }
        methods: dict[str, dict[Direction, CopierChoice]] = {}
        for direction in directions:
            self._field.transfer(direction, 0)
            for method in with_shares(setup, direction, METHODS):
                if missing[method.copier] is None:
                    methods.setdefault(method.label, {})[direction] = method
        found |= {
            name: EngineSubmitter(self._memory(name), copiers, self._profiles[CHOICE])
            for name, copiers in methods.items()
            if len(copiers) == len(directions)
        }
        return found | self._bare

    def _contiguous_queues(self) -> dict[Direction, list[Queue]]:
        """The transfer that warms up copies nothing."""

        def queue(direction: Direction, index: int) -> Queue:
            return lambda stream: self._contiguous.queue(direction, index, stream)

        none: Queue = lambda _: None  # noqa: E731
        indices = range(self._field.size.transfers)
        return {direction: [*(queue(direction, index) for index in indices), none] for direction in Direction}

    def _flat_queues(self) -> dict[Direction, list[Queue]]:
        setup, driver = self._apart.setup, self._apart.lab.driver
        sizes = np.array([setup.row_bytes], dtype=np.uint64)
        table = FlatTable(min(self._copies_of_a_transfer(), _FLAT_COPIES))
        if not driver.use_raw:
            table.lists(0, table.capacity)  # makes the objects that the bindings take

        def make(direction: Direction, _: int, groups: Sequence[GroupBlocks]) -> Queue:
            def queue(stream: int) -> None:
                for sources, targets in _chunks(*setup.ends_of(groups, direction)):
                    table.fill(targets, sources, sizes)  # the driver has read it when the call returns
                    driver.copy_batch(table, 0, len(sources), SourceOrder.STREAM, stream)

            return queue

        return _each(self._apart, make)

    def _grid(self, undo: ExitStack) -> GridStride | None:
        lab, setup, size = self._field.lab, self._field.setup, self._field.size
        reason = kernels.why_not(lab.device.capabilities)
        if reason is None:
            try:
                self._copies = self._copies_of_a_transfer()
                capacity = 2 * (size.transfers + 1) * self._copies
                return undo.enter_context(closing(GridStride(lab, setup.row_bytes, capacity)))
            except CapabilityError as error:
                reason = str(error)
        self.not_run[GRID] = reason
        return None

    def _copies_of_a_transfer(self) -> int:
        self._field.transfer(Direction.STORE, 0)
        return self._field.setup.copies

    def _grid_queues(self, grid: GridStride) -> dict[Direction, list[Queue]]:
        places, setup = self._field.size.transfers + 1, self._field.setup

        def make(direction: Direction, index: int, groups: Sequence[GroupBlocks]) -> Queue:
            first = ((direction is Direction.LOAD) * places + index) * self._copies

            def queue(stream: int) -> None:
                ends = setup.ends_of(groups, direction)
                grid.stage(setup, direction, ends, GRID_PROGRAMS[0], pinned=True, first=first)(stream)

            return queue

        return _each(self._field, make)

    def close(self) -> None:
        """Wait for the streams, and free the kernel and the memory of flat copies."""
        with self._field.lab.device.current():
            for stream in self._field.streams.values():
                self._field.lab.driver.stream_synchronize(stream)
        self._undo.close()


def _chunks(sources: UInt64Array, targets: UInt64Array) -> list[tuple[UInt64Array, UInt64Array]]:
    starts = range(0, len(sources), _FLAT_COPIES)
    return [(sources[at : at + _FLAT_COPIES], targets[at : at + _FLAT_COPIES]) for at in starts]

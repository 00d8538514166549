"""What `bench field` measures: series of transfers by the engine, by bare driver calls, and as contiguous copies.

Each transfer of a series has blocks and slots of its own, and so has one more of each direction, which warms up caches
and is not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np

from kvoffload.calibration.compute import new_events
from kvoffload.device.pinned import PAGE_BYTES
from kvoffload.device.streams import NO_WAIT
from kvoffload.driver import FlatTable, SourceOrder
from kvoffload.errors import CapabilityError, LayoutError
from kvoffload.internal.models import ModelGeometry
from kvoffload.layout.coding import CodecName
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import COPIERS, CopierName
from kvoffload_bench.copy_methods import FLAT_BATCH, GRID_PROGRAMS, GRID_STRIDE, GridStride, open_grid
from kvoffload_bench.harness import CONTIGUOUS_COPY, ContiguousCopy, Lab, Undoing
from kvoffload_bench.series import EngineSubmitter, SeriesMethod
from kvoffload_bench.setup import GroupBlocks, Placement, TransferSetup

_SERIES_BYTES = 256 << 20
_FEWEST, _MOST = 2, 64  # transfers of a series
CHOICE = "choice"
GRID = f"{GRID_STRIDE}, pinned"
_APART = (FLAT_BATCH, "batch", "loop")
_FLAT_COPIES = 32_768  # of one driver call; a call with 51,828 has crashed a driver

Queue = Callable[[int], object]  # puts one transfer on a stream


class SeriesSize(NamedTuple):
    """How large a series of one direction is.

    Attributes:
        slots: of each group in a transfer.
        transfers: in the series; index `transfers` is that of the one that warms up.
        nbytes: of a transfer.
    """

    slots: int
    transfers: int
    nbytes: int


def series_size(model: ModelGeometry, blocks: int | None, nbytes: int, transfers: int | None) -> SeriesSize:
    """Transfers of at least `blocks` blocks over all groups, or if that is None of at least `nbytes` bytes.

    Of a series without a number of transfers as many as make 256 MiB, but 2 to 64.
    """
    groups, group_bytes = len(model.groups), model.planes_per_group[0] * model.block_bytes
    slots = -(-blocks // groups) if blocks is not None else -(-nbytes // (groups * group_bytes))
    transfer = slots * groups * group_bytes
    return SeriesSize(slots, transfers or min(max(_SERIES_BYTES // transfer, _FEWEST), _MOST), transfer)


class FieldSetup(Undoing):
    """A `TransferSetup` with room for a series of each direction. A context manager.

    Attributes:
        model, placement: as given.
        setup: the planes, the pool and the engine. Which slots it takes changes from call to call.
        size: of the series.
        streams: by direction, a stream for bare driver calls.
        events: by direction, an event without times.
    """

    def __init__(
        self, lab: Lab, model: ModelGeometry, placement: Placement, size: SeriesSize, codec: CodecName = "raw"
    ) -> None:
        self.lab, self.size, self.model, self.placement = lab, size, model, placement
        self.slots_in_series = size.slots * size.transfers
        count = 2 * (self.slots_in_series + size.slots) * len(model.groups)
        with ExitStack() as undo:
            self.setup = undo.enter_context(TransferSetup(lab, model, placement=placement, count=count, codec=codec))
            events = undo.enter_context(new_events(lab.device, len(Direction), timing=False))
            self.events = dict(zip(Direction, events, strict=True))
            self.streams = {each: undo.enter_context(lab.device.stream()).handle for each in Direction}
            self._prepare(undo)
            self._undo = undo.pop_all()

    def _prepare(self, undo: ExitStack) -> None:
        """Write the right bytes into all sources; keep a copy of the planes, in which all else is poison.

        `poison` restores the planes from it, and so does not touch the sources of stores.
        """
        setup = self.setup
        self._take(Direction.LOAD)
        setup.prepare(Direction.LOAD)
        setup.poison(Direction.LOAD)
        self._take(Direction.STORE)
        setup.prepare(Direction.STORE)
        copies = [(*span, undo.enter_context(self.lab.device.allocate(span[1]))) for span in setup.spans()]
        self._images = [(address, copy.address, nbytes) for address, nbytes, copy in copies]
        self._copy_planes(back=False)

    def _copy_planes(self, *, back: bool) -> None:
        """Copy the planes to their copies, or back."""

        def submit(stream: int) -> None:
            for plane, image, nbytes in self._images:
                self.lab.driver.copy(*((plane, image) if back else (image, plane)), nbytes, stream)

        self.lab.wait(submit)

    def _take(self, direction: Direction) -> None:
        """Make the setup stand for the whole series of a direction."""
        self.setup.take(self.slots_in_series, 0 if direction is Direction.STORE else self.slots_in_series)

    def transfer(self, direction: Direction, index: int) -> Sequence[GroupBlocks]:
        """Make the setup stand for one transfer of the series. Returns what it copies of each group."""
        slots, series = self.size.slots, self.slots_in_series
        load = direction is Direction.LOAD
        first = load * series + index * slots if index < self.size.transfers else 2 * series + load * slots
        self.setup.take(slots, first)
        return self.setup.groups

    def transfers(self, directions: Sequence[Direction]) -> dict[Direction, list[Sequence[GroupBlocks]]]:
        """By direction, what each transfer of the series copies, and last the one that warms up."""
        indices = range(self.size.transfers + 1)
        return {direction: [self.transfer(direction, index) for index in indices] for direction in directions}

    def poison(self, directions: Sequence[Direction]) -> None:
        """Overwrite the targets of the series of these directions."""
        if Direction.LOAD in directions:
            self._copy_planes(back=True)
        if Direction.STORE in directions:
            self._take(Direction.STORE)
            self.setup.poison(Direction.STORE)

    def wrong(self, directions: Sequence[Direction]) -> int:
        """The number of wrong rows in the targets of the series of these directions."""
        found = 0
        for direction in directions:
            self._take(direction)
            found += self.setup.wrong(direction)
        return found


class ContiguousSeries(Undoing):
    """As many contiguous copies between pinned and GPU memory, as large as the transfers of a series, page by page.

    Attributes:
        size: of the series.
        step: bytes of each copy.
    """

    def __init__(self, lab: Lab, size: SeriesSize) -> None:
        self.size, self.step = size, -(-size.nbytes // PAGE_BYTES) * PAGE_BYTES
        with ExitStack() as undo:
            self._copies = {
                direction: undo.enter_context(ContiguousCopy(lab, self.step * size.transfers))
                for direction in Direction
            }
            self._undo = undo.pop_all()

    def queue(self, direction: Direction, index: int, stream: int) -> None:
        self._copies[direction].queue(direction, stream, first=index * self.step, nbytes=self.step)

    def poison(self, directions: Sequence[Direction]) -> None:
        for direction in directions:
            self._copies[direction].scenario(direction).poison()

    def wrong(self, directions: Sequence[Direction]) -> int:
        return sum(self._copies[direction].scenario(direction).wrong() for direction in directions)


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


def by_engine(field: FieldSetup, copiers: Mapping[Direction, CopierName | None]) -> EngineSubmitter:
    """Submits the transfers of these directions to a setup's engine."""
    transfers = field.transfers(tuple(copiers))
    return EngineSubmitter(field.setup.engine, transfers, copiers, after=NO_WAIT, series=field.size.transfers)


class FieldMethods:
    """Every copy method for the series of a setup, by name; and "pack" with a codec, by the codec's, unless that is
    "raw". Free it with `close`.

    The flat batch and the engine's flat copies have memory of their own. On an idle stream the driver copies rows under
    28 KiB with the CPU, and GPU memory that the CPU has written to stays different from then on, for megabytes around:
    strided copies of other rows of 18 KiB in it, concurrent with large products, had 45 GB/s instead of 29 on an H200.
    Kernels, memsets and large copies, which are what fills a cache, do not do that.

    Attributes:
        not_run: by name, why a copy method cannot be used here.
    """

    def __init__(self, field: FieldSetup, contiguous: ContiguousSeries, codec: CodecName = "raw") -> None:
        self._field, self._contiguous, self._codec = field, contiguous, codec
        self._coded: FieldSetup | None = None
        self.not_run: dict[str, str] = {}
        with ExitStack() as undo:
            self._apart = undo.enter_context(FieldSetup(field.lab, field.model, field.placement, field.size))
            limit = StreamSubmitter(field, self._contiguous_queues())
            self._bare = {CONTIGUOUS_COPY: SeriesMethod(limit, contiguous, contiguous.step)}
            self._field.transfer(Direction.STORE, 0)
            self._copies = self._field.setup.copies  # of a transfer
            capabilities = field.lab.device.capabilities
            if capabilities.flat_batch:
                self._bare[FLAT_BATCH] = self._on_streams(self._apart, self._flat_queues())
            else:
                self.not_run[FLAT_BATCH] = capabilities.missing["cuMemcpyBatchAsync"]
            grid, reason = open_grid(field.lab, field.setup.row_bytes, 2 * (field.size.transfers + 1) * self._copies)
            if grid is None:
                self.not_run[GRID] = reason
            else:
                undo.enter_context(grid)
                self._bare[GRID] = self._on_streams(field, self._grid_queues(grid))
            if codec != "raw":
                try:
                    given = field.lab, field.model, field.placement, field.size
                    self._coded = undo.enter_context(FieldSetup(*given, codec))
                except (LayoutError, CapabilityError) as error:
                    self.not_run[codec] = str(error)
            self._undo = undo.pop_all()

    def of(self, directions: Sequence[Direction]) -> dict[str, SeriesMethod]:
        """By name; of these directions at once."""
        setup = self._field.setup
        missing = setup.missing
        self.not_run |= {name: reason for name, reason in missing.items() if reason is not None}
        submitter, nbytes = by_engine(self._field, dict.fromkeys(directions)), self._field.size.nbytes
        found = {CHOICE: SeriesMethod(submitter, self._field, nbytes, submitter.by_direction)}
        for direction in directions:
            self._field.transfer(direction, 0)
        for name in COPIERS:
            if missing[name] is None:
                field = self._apart if name in _APART else self._field
                found[name] = SeriesMethod(by_engine(field, dict.fromkeys(directions, name)), field, nbytes)
        if self._coded is not None:
            coded = by_engine(self._coded, dict.fromkeys(directions))
            found[self._codec] = SeriesMethod(coded, self._coded, nbytes)
        return found | self._bare

    def _on_streams(
        self, field: FieldSetup, make: Callable[[Direction, int, Sequence[GroupBlocks]], Queue]
    ) -> SeriesMethod:
        """Bare calls; `make` gives a queue function for each transfer, of its blocks and slots."""
        queues = {
            direction: [make(direction, index, groups) for index, groups in enumerate(each)]
            for direction, each in field.transfers(tuple(Direction)).items()
        }
        return SeriesMethod(StreamSubmitter(field, queues), field, field.size.nbytes)

    def _contiguous_queues(self) -> dict[Direction, list[Queue]]:
        """The transfer that warms up copies nothing."""
        queue, indices = self._contiguous.queue, range(self._field.size.transfers)
        return {
            direction: [*(partial(queue, direction, index) for index in indices), lambda _: None]
            for direction in Direction
        }

    def _flat_queues(self) -> Callable[[Direction, int, Sequence[GroupBlocks]], Queue]:
        setup, driver = self._apart.setup, self._apart.lab.driver
        sizes = np.array([setup.row_bytes], dtype=np.uint64)
        capacity = min(self._copies, _FLAT_COPIES)
        table = FlatTable(capacity)
        if not driver.use_raw:
            table.lists(0, capacity)  # makes the objects that the bindings take

        def make(direction: Direction, _: int, groups: Sequence[GroupBlocks]) -> Queue:
            def queue(stream: int) -> None:
                sources, targets = setup.ends_of(groups, direction)
                for at in range(0, len(sources), _FLAT_COPIES):
                    stop = min(at + _FLAT_COPIES, len(sources))
                    table.fill(targets[at:stop], sources[at:stop], sizes)  # read by the driver when the call returns
                    driver.copy_batch(table, 0, stop - at, SourceOrder.STREAM, stream)

            return queue

        return make

    def _grid_queues(self, grid: GridStride) -> Callable[[Direction, int, Sequence[GroupBlocks]], Queue]:
        places, setup = self._field.size.transfers + 1, self._field.setup

        def make(direction: Direction, index: int, groups: Sequence[GroupBlocks]) -> Queue:
            first = ((direction is Direction.LOAD) * places + index) * self._copies

            def queue(stream: int) -> None:
                ends = setup.ends_of(groups, direction)
                grid.stage(setup, direction, ends, GRID_PROGRAMS, pinned=True, first=first)(stream)

            return queue

        return make

    def close(self) -> None:
        """Wait for the streams, and free the kernel and the memory of flat copies."""
        with self._field.lab.device.current():
            for stream in self._field.streams.values():
                self._field.lab.driver.stream_synchronize(stream)
        self._undo.close()

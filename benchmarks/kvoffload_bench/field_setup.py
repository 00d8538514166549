"""Blocks and slots of a series of transfers in both directions: right bytes, poisoned targets, and their comparison.

Each transfer of a series has blocks and slots of its own, and so has one more of each direction, which warms up caches
and is not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import NamedTuple

from kvoffload.device.pinned import PAGE_BYTES
from kvoffload.internal.models import ModelGeometry
from kvoffload.planning.transfer_plan import Direction
from kvoffload_bench.contiguous import ContiguousCopy
from kvoffload_bench.lab import Lab
from kvoffload_bench.setup import GroupBlocks, Placement, TransferSetup

_SERIES_BYTES = 256 << 20
_FEWEST, _MOST = 2, 64  # transfers of a series


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


class FieldSetup:
    """A `TransferSetup` with room for a series of each direction. A context manager.

    Attributes:
        setup: the planes, the pool and the engine. Which slots it takes changes from call to call.
        size: of the series.
        streams: by direction, a stream for bare driver calls.
        events: by direction, an event without times.
    """

    def __init__(self, lab: Lab, model: ModelGeometry, placement: Placement, size: SeriesSize) -> None:
        self.lab, self.size = lab, size
        self._model, self._placement = model, placement
        self.slots_in_series = size.slots * size.transfers
        count = 2 * (self.slots_in_series + size.slots) * len(model.groups)
        with ExitStack() as undo:
            self.setup = undo.enter_context(TransferSetup(lab, model, placement=placement, count=count))
            self.streams: dict[Direction, int] = {}
            self.events: dict[Direction, int] = {}
            undo.callback(self._destroy)
            with lab.device.current():
                for direction in Direction:
                    self.streams[direction] = lab.driver.stream_create(0)
                    self.events[direction] = lab.driver.event_create(timing=False)
            self._prepare(undo)
            self._undo = undo.pop_all()

    def another(self) -> FieldSetup:
        """One of the same kind and size, with memory of its own."""
        return FieldSetup(self.lab, self._model, self._placement, self.size)

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
        spans = setup.spans()
        copies = [undo.enter_context(self.lab.device.allocate(nbytes)) for _, nbytes in spans]
        self._images = [(address, copy.address, copy.nbytes) for (address, _), copy in zip(spans, copies, strict=True)]
        self._copy_planes(lambda plane, image: (image, plane))

    def _copy_planes(self, ends: Callable[[int, int], tuple[int, int]]) -> None:
        driver, timer = self.lab.driver, self.lab.timer

        def submit() -> None:
            for plane, image, nbytes in self._images:
                driver.copy(*ends(plane, image), nbytes, timer.stream)

        timer.seconds(submit)

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

    def poison(self, directions: Sequence[Direction]) -> None:
        """Overwrite the targets of the series of these directions."""
        if Direction.LOAD in directions:
            self._copy_planes(lambda plane, image: (plane, image))
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

    def _destroy(self) -> None:
        with self.lab.device.current():
            for stream in self.streams.values():
                self.lab.driver.stream_synchronize(stream)
                self.lab.driver.stream_destroy(stream)
            for event in self.events.values():
                self.lab.driver.event_destroy(event)

    def close(self) -> None:
        """Wait for the streams; free all memory."""
        self._undo.close()

    def __enter__(self) -> FieldSetup:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ContiguousSeries:
    """As many contiguous copies between pinned and GPU memory, as large as the transfers of a series, page by page.

    Attributes:
        step: bytes of each copy.
    """

    def __init__(self, copies: dict[Direction, ContiguousCopy], size: SeriesSize) -> None:
        self._copies = copies
        self.step = _pages(size.nbytes)

    def queue(self, direction: Direction, index: int, stream: int) -> None:
        self._copies[direction].queue(direction, stream, first=index * self.step, nbytes=self.step)

    def poison(self, directions: Sequence[Direction]) -> None:
        for direction in directions:
            self._copies[direction].scenario(direction).poison()

    def wrong(self, directions: Sequence[Direction]) -> int:
        return sum(self._copies[direction].scenario(direction).wrong() for direction in directions)


@contextmanager
def contiguous_series(lab: Lab, size: SeriesSize) -> Iterator[ContiguousSeries]:
    with ExitStack() as stack:
        copies = {
            direction: stack.enter_context(closing(ContiguousCopy(lab, _pages(size.nbytes) * size.transfers)))
            for direction in Direction
        }
        yield ContiguousSeries(copies, size)


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES

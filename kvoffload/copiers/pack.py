"""Blocks that a kernel packs into device memory, from where the copy engine carries them as whole blocks.

    store    planes ──kernel──> ring of device memory ──contiguous copies──> slots
    load     slots ──contiguous copies──> ring of device memory ──kernel──> planes

The kernel is many short programs that move about 2 TB/s together, so it takes microseconds, and the link sees copies of
whole blocks whatever the size of the rows. On an H200, 64 MiB with rows of 4 to 32 KiB alike: 0.98 of what block-major
blocks of the same size reach (idle, median). A kernel that reads or writes the host itself, on a few multiprocessors,
came to 0.6 to 0.9, and slowed concurrent computation more.

A transfer goes through the ring in *pieces*, each of two *halves* on streams of their own: one fills a place in the
ring, the other empties it. The next piece is packed while one is copied. A load in parts has pieces of each part, if
the planes of a part follow each other: then they are one range of a slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvoffload.copiers.base import Copier, Submit
from kvoffload.copiers.pack_kernels import PackKernels, PlaneRange
from kvoffload.copiers.table_arena import Table
from kvoffload.device.streams import LaneStream
from kvoffload.driver import Driver, SourceOrder
from kvoffload.internal.checks import at_least
from kvoffload.layout.fold import ONE
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.transfer_plan import LOAD, BlockPlan, TransferPlan

# A piece is a launch, which may wait for a wave of a long kernel of others. 64 MiB with rows of 32 KiB on an H200, GB/s
# of stores / loads / both beside 8192^3 products: pieces of 64 MiB 41 / 44 / 78, of 32 MiB 41 / 43 / 70, of 16 MiB of
# a ring of 64 37 / 35 / 51. The ring holds two pieces, with their tables.
PIECE_BYTES = 64 << 20
STAGING_BYTES = 2 * PIECE_BYTES + (1 << 20)  # for each direction
_ALIGNMENT = 256  # of places, and of the blocks behind their tables
_SMALLEST_RING = 4  # blocks, of the largest ones


def ring_bytes(layout: KVLayout, pool_bytes: int, staging_bytes: int) -> int:
    """Return how many bytes a ring has: `staging_bytes`, or less if two transfers as large as the pool need less."""
    largest = max(group.bytes_per_block for group in layout.groups)
    return min(staging_bytes, max(2 * pool_bytes, _SMALLEST_RING * _place_bytes(1, largest)))


def checked_staging(staging_bytes: Any, layout: KVLayout) -> int:
    """Raise unless it is 0 or has room for a block. The default is never refused: larger blocks go another way."""
    nbytes = at_least("staging_bytes", staging_bytes, 0)
    largest = max(group.bytes_per_block for group in layout.groups)
    least = min(STAGING_BYTES, _place_bytes(1, largest))
    if 0 < nbytes < least:
        raise ValueError(
            f"staging_bytes={nbytes} has no room for a block of {largest} bytes; give at least {least}, or 0 to forbid "
            "kernels"
        )
    return nbytes


def why_not_packed(layout: KVLayout, ring: int) -> str | None:
    """Return why blocks of this layout cannot go through a ring of so many bytes; None if they can."""
    for index, group in enumerate(layout.groups):
        if layout.blocks_per_slot > 1 and int(group.host_steps[0]) != group.slot_block_bytes:
            return (
                f"a block of group {index} is not one range of its slot: slots of {layout.blocks_per_slot} blocks are "
                'plane-major here, and slot_order="block-major" of the layout makes it one'
            )
        if _place_bytes(1, group.bytes_per_block) > ring // _ALIGNMENT * _ALIGNMENT:
            return f"a block of group {index} has {group.bytes_per_block} bytes, too many for a ring of {ring}"
    return None


def _place_bytes(blocks: int, block_bytes: int) -> int:
    """Return a place for so many blocks: their table, then the blocks."""
    return _aligned(16 * blocks) + _aligned(blocks * block_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Half(Protocol):
    """A segment of the engine, as a place refers to it."""

    stream: LaneStream
    event: int | None


class Place:
    """A range of a ring, for one piece.

    Attributes:
        ring: whose range it is.
        start, stop: bytes taken from the ring, round after round, before it and with it. Bytes that were skipped at the
            end of a round count as its own, so places follow each other without a gap.
        address: in device memory.
        halves: the halves of its piece that have not ended, the one that fills it first. The truth is in the transfers.
        joined: the stream of the second half waits for the first one, so an event there tells when it is free.
    """

    __slots__ = ("address", "halves", "joined", "ring", "start", "stop")

    def __init__(self, ring: StagingRing, start: int, stop: int, address: int) -> None:
        self.ring = ring
        self.start = start
        self.stop = stop
        self.address = address
        self.halves: list[Half] = []
        self.joined = False


class StagingRing:
    """Device memory of one direction, whose places are given round and round, in the order in which pieces are queued.

        |place 7|place 8|..skipped..|          place 9 takes the room of 6, and waits on the GPU until it is free
        |place 9|  ...  |place 6 ...

    A place is given while earlier pieces still use its bytes; the new piece waits for them on the GPU. Pieces of one
    direction end in their order. So it waits for the newest of these places, which tells that all before it are free.
    A piece that failed halfway may not wait for those before it: it is waited for, and so are those.

    Args:
        nbytes: how much memory it allocates when it is opened.

    Attributes:
        address: of its memory; 0 until it is opened.
    """

    address = 0

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver = driver
        self._memory: list[int] = []  # one address, once it was needed
        self._places: deque[Place] = deque()  # the oldest first; without those that are free or in `_left`
        self._left: list[Place] = []  # whose bytes were taken again since the last piece that has joined
        self._next = 0
        self.nbytes = nbytes // _ALIGNMENT * _ALIGNMENT

    @property
    def allocated(self) -> int:
        """Bytes of device memory that it has."""
        return self.nbytes if self._memory else 0

    def open(self) -> None:
        """Allocate it, unless it is. The context must be current.

        Raises:
            DriverError: there is no room for it, or the driver failed.
        """
        if not self._memory:
            self._driver.create("cuMemAlloc", self._memory, self.nbytes)
        self.address = int(self._memory[0])

    def take(self, nbytes: int) -> Place:
        """Return a place of `nbytes`, at most those of the ring. Before it is filled, wait for `used_before`."""
        size, start = self.nbytes, self._next
        stop, offset = start + nbytes, start % size
        if offset + nbytes > size:  # does not fit before the end of the ring
            stop, offset = stop + size - offset, 0
        places, taken = self._places, stop - size
        while places and (places[0].stop <= taken or not places[0].halves):
            self._left.append(places.popleft())
        place = Place(self, start, stop, self.address + offset)
        places.append(place)
        self._next = stop
        return place

    def used_before(self, place: Place) -> list[Place]:
        """Return the places to wait for before the latest place is filled: behind a joined one are all before it.

        1. The oldest place that loses some of its bytes to this one, then the places that lose all, the newest first.
        2. None of these has joined: the first joined place behind them has waited in their stead.
        """
        oldest = self._places[0]
        straddles = oldest is not place and oldest.start < place.stop - self.nbytes
        again = [*self._left, oldest] if straddles else self._left
        found: list[Place] = []
        for other in reversed(again):  # 1
            found.append(other)
            if other.joined:
                return found
        if again:  # 2
            found += [other for other in self._places if other.joined][:1]
        return found

    def join(self, place: Place) -> None:
        """Have all of a piece end on the stream of its second half, behind what it had to wait for."""
        place.joined = True
        self._left.clear()

    def restore(self, used: Mapping[Place, list[Half]]) -> None:
        """Restore the places in use after an interrupt: its own in `used`, by these segments; the oldest first."""
        self._places = deque(place for place in used if place.ring is self)
        self._left.clear()
        for place in self._places:
            place.halves = used[place]
        self._next = self._places[-1].stop if self._places else 0

    def close(self) -> None:
        """Free it; nothing on the GPU may still use it. If it is interrupted, call it again."""
        self._driver.destroy("cuMemFree", self._memory)


def is_range(planes: Sequence[int]) -> bool:
    """Return whether planes follow each other, in any order."""
    return max(planes) - min(planes) == len(planes) - 1


class PartOfBlocks(NamedTuple):
    """Blocks in the planes of one part of a load."""

    blocks: BlockPlan
    planes: PlaneRange


class BlocksInParts:
    """The blocks of a load in parts: operation `i` is block `i % n` of `n`, in the planes of part `i // n`.

    Args:
        planes: of each part.
    """

    __slots__ = ("_blocks", "_planes", "part_ends")

    def __init__(self, blocks: BlockPlan, planes: list[PlaneRange]) -> None:
        count = len(blocks)
        self._blocks = blocks
        self._planes = planes
        self.part_ends = tuple(range(count, count * len(planes) + 1, count))

    def cut(self, start: int, stop: int) -> PartOfBlocks:
        """Return the operations `[start, stop)` of one part."""
        part, first = divmod(start, len(self._blocks))
        return PartOfBlocks(self._blocks.cut(first, first + stop - start), self._planes[part])


@dataclass(slots=True, eq=False)
class Piece:
    """A staged piece: `kernel` goes to the lane's stream for kernels and reads `table`, `copies` to one for copies."""

    kernel: Submit
    table: Table
    copies: Submit
    place: Place


class PackCopier:
    """Carries the blocks of one group through a ring. It is no `Copier`, since what it stages has two halves.

    Args:
        kernels: of its engine.
        copies: carries contiguous copies.
        rings: by direction: of stores, of loads; open when a piece is staged.
        planes: all of the group.

    Attributes:
        segment_operations: the most blocks of a piece. Half of the ring holds them, if it can hold a block.
        queue_cost: how many places of the queue for copies so many blocks take; the kernels take `KERNEL_PLACES`.
    """

    def __init__(
        self, kernels: PackKernels, copies: Copier, rings: tuple[StagingRing, StagingRing], planes: PlaneRange
    ) -> None:
        block_bytes = planes.nbytes
        self._kernels = kernels
        self._planes = planes
        self._copies, self.queue_cost = copies, copies.queue_cost
        self._rings = rings
        of_ring = (rings[0].nbytes // 2 - 2 * _ALIGNMENT) // (block_bytes + 16)
        self.segment_operations = max(1, min(PIECE_BYTES // block_bytes, of_ring, copies.segment_operations))
        self._width = np.array([block_bytes], dtype=np.uint64)

    def prepare(self, plan: BlockPlan) -> BlockPlan | BlocksInParts:
        if plan.group.num_parts == 1:
            return plan
        of = plan.group_index
        planes = [self._kernels.planes(of, min(part), max(part) + 1) for part in plan.group.parts]
        return BlocksInParts(plan, planes)

    def stage(self, work: Any, order: SourceOrder) -> Piece | None:
        """Write down a piece of at most `segment_operations` blocks; None while there is no room for its table.

        It is valid until the copier of contiguous copies stages other work.

        Args:
            work: a `BlockPlan`, or a `PartOfBlocks`.
        """
        planes, width = self._planes, self._width
        if work.__class__ is PartOfBlocks:
            work, planes = work
            width = np.array([planes.nbytes], dtype=np.uint64)
        kernels, count, direction = self._kernels, len(work.blocks), work.direction
        table = kernels.write_blocks(work)
        if table is None:
            return None
        before = _aligned(16 * count)  # the table
        nbytes = planes.nbytes
        place = self._rings[direction is LOAD].take(before + _aligned(count * nbytes))
        first = place.address + before
        address = np.arange(first, first + count * nbytes, nbytes, dtype=np.uint64)
        host = work.slot_address
        table.words[count : 2 * count] = address
        if work.sub_block is not None or planes.offset:
            # Where they begin in a slot. The kernel adds this to what it takes for the address of the slot.
            inside = planes.offset
            if work.sub_block is not None:
                inside = inside + work.sub_block * self._planes.nbytes
            host = host + np.asarray(inside).astype(np.uint64)
            table.words[count : 2 * count] -= inside
        plan = TransferPlan(direction, address, host, width, ONE, width, width)
        copies = self._copies.stage(plan, order)
        return Piece(kernels.launch(work, planes, table, place.address), table, copies, place)

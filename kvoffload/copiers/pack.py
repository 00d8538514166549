"""Blocks that a kernel packs into device memory, from where the copy engine carries them as whole blocks.

    store    planes ──kernel──> ring of device memory ──contiguous copies──> slots
    load     slots ──contiguous copies──> ring of device memory ──kernel──> planes

The kernel is many short programs that move about 2 TB/s together, so it takes microseconds, and the link sees copies of
whole blocks whatever the size of the rows. On an H200, 64 MiB with rows of 4 to 32 KiB alike: 0.99 of what block-major
blocks of the same size reach. A kernel that reads or writes the host itself, on a few multiprocessors, came to 0.6 to
0.9, and slowed concurrent computation more.

A transfer goes through the ring in *pieces*. The next piece is packed while one is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvoffload.copiers.base import Copier, Submit
from kvoffload.copiers.pack_kernels import LAUNCH_PLACES, PackKernels
from kvoffload.copiers.table_arena import Table
from kvoffload.driver import Driver, SourceOrder
from kvoffload.layout.fold import ONE
from kvoffload.planning.transfer_plan import BlockPlan, Direction, TransferPlan

if TYPE_CHECKING:
    from kvoffload.engine.job import Segment

# A piece is a launch, which may wait for a wave of a long kernel of others. 64 MiB with rows of 32 KiB on an H200, GB/s
# of stores / loads / both beside 8192^3 products: pieces of 64 MiB 41 / 44 / 78, of 32 MiB 41 / 43 / 70, of 16 MiB (in
# a ring of 64) 37 / 35 / 51. The ring holds two pieces, with their tables.
_PIECE_BYTES = 64 << 20
STAGING_BYTES = 2 * _PIECE_BYTES + (1 << 20)  # for each direction
_TABLE_BYTES_PER_BLOCK = 16
_ALIGNMENT_BYTES = 256


def least_ring_bytes(block_bytes: int) -> int:
    """The smallest ring for blocks of so many bytes: two pieces of one block each."""
    return 2 * (2 * _ALIGNMENT_BYTES + block_bytes)


def blocks_of_piece(block_bytes: int, ring_bytes: int) -> int:
    """How many blocks a piece has at most, so that the ring holds two pieces with their tables."""
    room = (ring_bytes // 2 - 2 * _ALIGNMENT_BYTES) // (block_bytes + _TABLE_BYTES_PER_BLOCK)
    return max(1, min(room, _PIECE_BYTES // block_bytes))


class Place:
    """A range of the ring, for one piece.

    Attributes:
        ring: whose range it is.
        start, stop: bytes from the beginning of the ring.
        address: of the range, in device memory.
        halves: the segments that write it and that read it.
        released: both have ended.
    """

    __slots__ = ("address", "halves", "released", "ring", "start", "stop")

    def __init__(self, ring: StagingRing, start: int, stop: int, address: int) -> None:
        self.ring = ring
        self.start = start
        self.stop = stop
        self.address = address
        self.halves: tuple[Segment, Segment] | None = None
        self.released = False


class StagingRing:
    """Device memory of one direction, whose places are given round and round, in the order in which pieces are queued.

    A place is given while an earlier piece may still use it: the new piece then waits for that one, on the GPU. Both
    are of one direction and the earlier one is queued already, so these waits form no circle, and no call waits.
    """

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver = driver
        self._memory: list[int] = []  # one address, once it was needed
        self._places: deque[Place] = deque()  # not released, or not yet reached again; the oldest first
        self._next = 0
        self.nbytes = nbytes

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

    def take(self, nbytes: int) -> tuple[Place, list[Place]]:
        """A place of `nbytes`, at most those of the ring, and the places that must have ended before it is written.

        1. There is room up to the end of the ring: what lies there must have ended.
        2. There is not: the rest of the ring is skipped, as if it were taken, so that places stay in the order of age.
        """
        ended: list[Place] = []
        nbytes = -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES  # the next place begins aligned, too
        if self._next + nbytes > self.nbytes:  # 2
            self._claim(self._next, self.nbytes, ended)
            self._next = 0
        place = Place(self, self._next, self._next + nbytes, int(self._memory[0]) + self._next)
        self._claim(place.start, place.stop, ended)
        self._places.append(place)
        self._next = place.stop
        return place, ended

    def _claim(self, start: int, stop: int, ended: list[Place]) -> None:
        places = self._places
        while places and (places[0].released or (places[0].start < stop and start < places[0].stop)):
            if not places[0].released:
                ended.append(places[0])
                if places[0].stop > stop:  # the next one waits for it, too: it may be on another stream
                    break
            places.popleft()

    def restore(self, used: Iterable[Place]) -> None:
        """After an interrupt: of its places exactly those in `used` are in use, the oldest first. One that was reached
        again since is left out, as the newer place waits for it.
        """
        kept: deque[Place] = deque()
        for place in reversed([each for each in dict.fromkeys(used) if each.ring is self]):
            if any(place.start < other.stop and other.start < place.stop for other in kept):
                break
            kept.appendleft(place)
        self._places = kept
        self._next = kept[-1].stop if kept else 0

    def close(self) -> None:
        """Free it; nothing on the GPU may still use it. If it is interrupted, call it again."""
        self._places.clear()
        self._driver.destroy("cuMemFree", self._memory)


class Piece(NamedTuple):
    """A staged piece: `kernel`, which reads `table`, goes to the lane's stream for kernels, `copies` to another."""

    kernel: Submit
    table: Table
    copies: Submit
    place: Place
    ended: list[Place]


class PackCopier:
    """Carries the blocks of one group through a ring.

    Args:
        shared: the kernels.
        copies: carries contiguous copies.
        rings: by direction: of stores, of loads.
        block_bytes: of a block of its group.
    """

    is_kernel = True

    def __init__(
        self, shared: PackKernels, copies: Copier, rings: tuple[StagingRing, StagingRing], block_bytes: int
    ) -> None:
        self._kernels = shared
        self._copies = copies
        self._rings = rings
        self._nbytes = block_bytes
        self.segment_operations = min(blocks_of_piece(block_bytes, rings[0].nbytes), copies.segment_operations)

    def prepare(self, plan: BlockPlan) -> BlockPlan:
        return plan

    def queue_cost(self, operations: int) -> int:  # noqa: ARG002
        """Of the kernel; `copy_cost` is that of the copies."""
        return LAUNCH_PLACES

    def copy_cost(self, operations: int) -> int:
        return self._copies.queue_cost(operations)

    def stage_piece(self, work: BlockPlan, order: SourceOrder) -> Piece | None:
        """Write down a piece; None while there is no room for the kernel's table."""
        nbytes, count = self._nbytes, len(work)
        table = self._kernels.write_blocks(work)
        if table is None:
            return None
        head = -(-_TABLE_BYTES_PER_BLOCK * count // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        place, ended = self._rings[0 if work.direction is Direction.STORE else 1].take(head + count * nbytes)
        address = place.address + head + np.arange(count) * nbytes
        host = work.slot_address
        table.words[count : 2 * count] = address
        if work.sub_block is not None:
            inside = work.sub_block * nbytes
            host = host + inside
            table.words[count : 2 * count] -= inside
        width = np.array([nbytes], dtype=np.uint64)
        plan = TransferPlan(work.direction, address.view(np.uint64), host.view(np.uint64), width, ONE, width, width)
        copies = self._copies.stage(plan, order)
        launch = self._kernels.launch(work, place.address)
        self._kernels.copy_table.pack((table.device_address, place.address, 2 * count))
        return Piece(partial(self._submit, launch), table, copies, place, ended)

    def _submit(self, launch: Submit, stream: int, start: int | None) -> None:
        self._kernels.copy_table.queue(stream, 1)
        launch(stream, start)

    def stage(self, work: BlockPlan, order: SourceOrder) -> Submit:  # noqa: ARG002
        raise AssertionError("a piece is staged by stage_piece")

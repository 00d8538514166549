"""Blocks that a kernel packs into device memory, from where the copy engine carries them as whole blocks.

    store    planes ──kernel──> ring of device memory ──contiguous copies──> slots
    load     slots ──contiguous copies──> ring of device memory ──kernel──> planes

The kernel is that of `gather`, with places in the ring in the role of slots, and as many short programs as there are
tiles: it moves about 2 TB/s, so it takes microseconds, and the link sees copies of whole blocks whatever the size of
the rows. On an H200, 64 MiB with rows of 4 to 32 KiB alike: 0.99 of what block-major blocks of the same size reach.

A transfer goes through the ring in *pieces*. The next piece is packed while one is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvoffload.copiers.base import Copier, Staged, Submit
from kvoffload.copiers.gather import GatherCopier, GatherKernels
from kvoffload.driver import Driver, SourceOrder
from kvoffload.layout.fold import ONE
from kvoffload.planning.transfer_plan import BlockPlan, Direction, TransferPlan

if TYPE_CHECKING:
    from kvoffload.engine.job import Segment

# A piece is a launch, which may wait for a wave of a long kernel of others. 64 MiB with rows of 32 KiB on an H200, GB/s
# of stores / loads / both beside 8192^3 products: pieces of 64 MiB 41 / 44 / 78, of 32 MiB 41 / 43 / 70, of 16 MiB (of a
# ring of 64) 37 / 35 / 51. The ring holds two pieces, with their tables.
PIECE_BYTES = 64 << 20
STAGING_BYTES = 2 * PIECE_BYTES + (1 << 20)  # for each direction


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
    """A staged piece: `kernel` goes to the lane's stream for kernels, `copies` to one for copies."""

    kernel: Staged
    copies: Submit
    place: Place
    ended: list[Place]


class PackCopier:
    """Carries the blocks of one group through a ring.

    Args:
        shared: kernels and fragments.
        copies: carries contiguous copies.
        rings: by direction: of stores, of loads.
        group: index of the group.
    """

    is_kernel = True

    def __init__(
        self, shared: GatherKernels, copies: Copier, rings: tuple[StagingRing, StagingRing], group: int
    ) -> None:
        self._kernels = GatherCopier(shared, 0)
        self._copy_table = shared.copy_table
        self._copies = copies
        self._rings = rings
        self._fragments = shared.groups[group].fragments
        self._nbytes = shared.groups[group].group.bytes_per_block
        self.segment_operations = min(max(1, PIECE_BYTES // self._nbytes), copies.segment_operations)

    def prepare(self, plan: BlockPlan) -> BlockPlan:
        return plan

    def queue_cost(self, operations: int) -> int:
        """Of the kernel; `copy_cost` is that of the copies."""
        return self._kernels.queue_cost(operations)

    def copy_cost(self, operations: int) -> int:
        return self._copies.queue_cost(operations)

    def stage_piece(self, work: BlockPlan, order: SourceOrder) -> Piece | None:
        """Write down a piece; None while there is no room for the kernel's table."""
        nbytes, count = self._nbytes, len(work)
        table = self._kernels.write_blocks(work)
        if table is None:
            return None
        head = -(-16 * count // 256) * 256
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
        assert copies is not None
        launch = self._kernels.pack(work, self._fragments, place.address)
        self._copy_table.pack((table.device_address, place.address, 2 * count))
        kernel = Staged(partial(self._submit, launch), table)
        return Piece(kernel, copies.submit, place, ended)

    def _submit(self, launch: Submit, stream: int, start: int | None) -> None:
        self._copy_table.queue(stream, 1)
        launch(stream, start)

    def stage(self, work: BlockPlan, order: SourceOrder) -> Staged | None:
        raise AssertionError("a piece is staged by stage_piece")

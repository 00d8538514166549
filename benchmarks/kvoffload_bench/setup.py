"""Planes, a slot pool, and one set of addresses that every measured copy method is given; and the right bytes.

The blocks are random and no two ranges of them are adjacent; the slots are random.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from kvoffload.calibration.compute import pinned_memory
from kvoffload.device.pinned import HostMemory
from kvoffload.device.streams import NO_WAIT
from kvoffload.driver import FlatTable, SourceOrder, address_of
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job
from kvoffload.internal.models import ModelGeometry
from kvoffload.internal.types import Int64Array, UInt8Array, UInt64Array
from kvoffload.layout.coding import CodecName, Coding
from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import Plane
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import COPIERS, CopierName
from kvoffload_bench.harness import Lab, Undoing

_CHUNKS = 4096  # different ones
_FLAT_COPIES = 4096  # of one driver call; a call with 51,828 has crashed a driver


class SetupBytes(Undoing):
    """Random bytes for `slots` slots of each of `groups` groups; with a coding, bf16 values of a normal distribution.
    Free it with `close`.
    """

    def __init__(self, lab: Lab, groups: int, slots: int, payload_bytes: int, coding: Coding | None = None) -> None:
        self._lab, self._payload_bytes = lab, payload_bytes
        random = np.random.default_rng(lab.seed + 1)
        if coding is None:
            words = random.integers(0, 1 << 64, (groups, slots, payload_bytes // 8), np.uint64)
            self._right = self._coded = words.view(np.uint8)
        else:
            values = random.standard_normal((_CHUNKS, coding.values)).astype(np.float32).view(np.uint32) >> 16
            chunks, chosen = values.astype(np.uint16), (groups, slots, payload_bytes // coding.chunk_bytes)
            index = random.integers(0, _CHUNKS, chosen)
            self._right = chunks.view(np.uint8)[index].reshape(groups, slots, -1)
            self._coded = coding.encode(chunks)[0][index].reshape(groups, slots, -1)
        self._table = FlatTable(_FLAT_COPIES)
        with ExitStack() as undo:
            pinned = undo.enter_context(pinned_memory(lab.device, self._right.nbytes)).array
            self._mirror = pinned[: self._right.nbytes].reshape(self._right.shape)
            self._undo = undo.pop_all()

    def take(self, slots: int, first: int = 0) -> None:
        """Make all methods concern `slots` slots of each group, from `first` on."""
        taken = slice(first, first + slots)
        self._expected, self._in_slots, self._found = (
            [slot for group in each for slot in group[taken]] for each in (self._right, self._coded, self._mirror)
        )

    def in_slots(self, found: Sequence[UInt8Array]) -> list[tuple[UInt8Array, UInt8Array]]:
        """Pairs of what was found in each slot, and what it is to hold."""
        return list(zip(found, self._in_slots, strict=True))

    def against(self, found: Sequence[UInt8Array]) -> list[tuple[UInt8Array, UInt8Array]]:
        """Pairs of the found and the right bytes of each slot's blocks."""
        return list(zip(found, self._expected, strict=True))

    def upload(self, device: UInt64Array, row_bytes: int) -> None:
        """Copy the right bytes to device addresses, one for each row of every slot."""
        self._lab.write(self.against(self._found))
        self._copy(device, self._rows(row_bytes), row_bytes)

    def download(self, device: UInt64Array, row_bytes: int) -> list[UInt8Array]:
        """Copy rows from device addresses. Returns the payload of each slot, valid until the next call."""
        self._lab.poison(self._found)
        self._copy(self._rows(row_bytes), device, row_bytes)
        return self._found

    def _rows(self, row_bytes: int) -> UInt64Array:
        starts = np.array([address_of(slot) for slot in self._found], dtype=np.int64)[:, np.newaxis]
        return (starts + np.arange(0, self._payload_bytes, row_bytes)).reshape(-1).astype(np.uint64)

    def _copy(self, targets: UInt64Array, sources: UInt64Array, row_bytes: int) -> None:
        driver, sizes = self._lab.driver, np.array([row_bytes], dtype=np.uint64)

        def submit(stream: int) -> None:
            if not self._lab.device.capabilities.flat_batch:
                for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
                    driver.copy(target, source, row_bytes, stream)
                return
            for start in range(0, len(targets), _FLAT_COPIES):
                stop = min(start + _FLAT_COPIES, len(targets))
                self._table.fill(targets[start:stop], sources[start:stop], sizes)
                driver.copy_batch(self._table, 0, stop - start, SourceOrder.STREAM, stream)

        self._lab.wait(submit)


# planes, pool and addresses -------------------------------------------------------------------------------------------

_MAX_SPARE_POOL_BYTES = 512 << 20
_WARM_UP_SLOTS = 8


def geometry_of(planes: int, block_bytes: int, scale: float) -> ModelGeometry:
    """A geometry of one group; `block_bytes` is a multiple of 32."""
    return ModelGeometry(f"{planes} planes", planes, 1, block_bytes // 32, kv_split=False, scale=scale)


class Placement(enum.StrEnum):
    """Where the planes of a group lie."""

    FOLDED = "folded"  # all in one allocation: one strided operation copies a block of all of them
    SCATTERED = "scattered"  # each in a driver allocation of its own: nothing folds
    INTERLEAVED = "interleaved"  # block-major, (blocks, planes, ...): a block of all planes is one range


class GroupBlocks(NamedTuple):
    """The blocks and slots of one group that a transfer copies.

    Attributes:
        planes: of the group.
        starts: int64, (slots,); the first device block of each slot; a slot holds `blocks_per_slot` adjacent blocks.
        blocks: int64, (slots * blocks_per_slot,); all device blocks.
        slots: int64, (slots,).
    """

    planes: Sequence[Plane]
    starts: Int64Array
    blocks: Int64Array
    slots: Int64Array


class TransferSetup(Undoing):
    """Memory, an engine over it for each preference, and the blocks and slots of one transfer. A context manager.

    Args:
        lab: device and tools.
        geometry: of a model.
        placement: of the planes.
        blocks_per_slot: adjacent device blocks in a slot.
        count: blocks of a transfer, summed over the groups; None for `size.payload_bytes`. At least one slot a group.
        plane_bytes: bytes of a plane, about; None for `size.plane_bytes`.
        codec: of the slots.
        options: of the engines.

    Attributes:
        engine: the one that prefers "overlap".
        groups: what a transfer copies of each group; `take` shortens it.
        rows_per_slot: contiguous ranges that a slot is copied to or from: one a plane; one in all if block-major.
        row_bytes: bytes of such a range.
    """

    def __init__(
        self,
        lab: Lab,
        geometry: ModelGeometry,
        *,
        placement: Placement = Placement.FOLDED,
        blocks_per_slot: int = 1,
        count: int | None = None,
        plane_bytes: int | None = None,
        codec: CodecName = "raw",
        **options: Any,
    ) -> None:
        self.lab, self.model, self.placement, self.blocks_per_slot = lab, geometry.name, placement, blocks_per_slot
        self._geometry, self._options = geometry, options
        self.plane_count, self.block_bytes = geometry.planes_per_group[0], geometry.block_bytes
        interleaved = placement is Placement.INTERLEAVED
        self.rows_per_slot = 1 if interleaved else self.plane_count
        self.row_bytes = blocks_per_slot * self.block_bytes * (self.plane_count if interleaved else 1)
        groups = len(geometry.groups)
        wanted = count or -(-lab.size.payload_bytes // (self.plane_count * self.block_bytes))
        slots = -(-wanted // (groups * blocks_per_slot))  # of each group
        self._random = np.random.default_rng(lab.seed)
        with ExitStack() as stack:
            places = max((plane_bytes or lab.size.plane_bytes) // (self.block_bytes * blocks_per_slot), 2 * slots)
            planes = [self._allocate_planes(stack, places * blocks_per_slot) for _ in range(groups)]
            self.layout = KVLayout(planes, blocks_per_slot=blocks_per_slot, codec=codec)
            self._coding = self.layout.groups[0].coding
            spare = min(4 * slots * groups, _MAX_SPARE_POOL_BYTES // self.layout.slot_bytes)
            self.engine = stack.enter_context(
                OffloadEngine(self.layout, device=lab.device, num_slots=max(slots * groups, spare), **options)
            )
            payload_bytes = self.rows_per_slot * self.row_bytes
            self._bytes = stack.enter_context(SetupBytes(lab, groups, slots, payload_bytes, self._coding))
            self._choose_blocks(places, slots, planes)
            self._undo = stack.pop_all()
        self._engines = {"overlap": self.engine}
        self.take(slots)

    def smaller(self) -> TransferSetup:
        """A small setup of the same kind, for transfers that warm up caches."""
        count = _WARM_UP_SLOTS * len(self._geometry.groups) * self.blocks_per_slot
        return TransferSetup(
            self.lab,
            self._geometry,
            placement=self.placement,
            blocks_per_slot=self.blocks_per_slot,
            count=count,
            plane_bytes=1,
            codec=self.layout.codecs[0],
            **self._options,
        )

    def _allocate_planes(self, stack: ExitStack, num_blocks: int) -> list[Plane]:
        """The planes of one group."""
        device, count, block_bytes = self.lab.device, self.plane_count, self.block_bytes
        if self.placement is Placement.SCATTERED:
            buffers = [stack.enter_context(device.allocate(num_blocks * block_bytes)) for _ in range(count)]
            return [Plane(each.address, block_bytes=block_bytes, num_blocks=num_blocks) for each in buffers]
        if self.placement is Placement.FOLDED:
            planes = device.allocate_planes(count, block_bytes=block_bytes, num_blocks=num_blocks)
        else:
            planes = device.allocate_blocks(num_blocks, planes=count, block_bytes=block_bytes)
        stack.enter_context(planes[0].owner)  # type: ignore[arg-type]
        return planes

    def _choose_blocks(self, places: int, slot_count: int, planes_of_groups: list[list[Plane]]) -> None:
        """Random even places for the blocks of each group, so that no two are adjacent; random slots."""
        slots = self._random.permutation(self.engine.num_slots).astype(np.int64)
        self._all = []
        for index, planes in enumerate(planes_of_groups):
            chosen = self._random.permutation(np.arange(0, places - places % 2, 2))[:slot_count]
            starts = (chosen * self.blocks_per_slot).astype(np.int64)
            blocks = (starts[:, np.newaxis] + np.arange(self.blocks_per_slot)).reshape(-1)
            self._all.append(GroupBlocks(planes, starts, blocks, slots[index * slot_count : (index + 1) * slot_count]))

    def take(self, slots: int, first: int = 0) -> None:
        """Make what follows copy, prepare, poison and compare `slots` slots of each group only, from `first` on."""
        taken = slice(first, first + slots)
        blocks = slice(first * self.blocks_per_slot, (first + slots) * self.blocks_per_slot)
        self.groups = [
            GroupBlocks(group.planes, group.starts[taken], group.blocks[blocks], group.slots[taken])
            for group in self._all
        ]
        self._ends = {direction: self.ends_of(self.groups, direction) for direction in Direction}
        self._bytes.take(slots, first)

    @property
    def slot_count(self) -> int:
        """Slots of a transfer, of all groups."""
        return sum(len(group.slots) for group in self.groups)

    @property
    def block_count(self) -> int:
        return self.slot_count * self.blocks_per_slot

    @property
    def copies(self) -> int:
        """Flat copies of `row_bytes` each in a transfer."""
        return self.slot_count * self.rows_per_slot

    @property
    def nbytes(self) -> int:
        return self.copies * self.row_bytes

    @property
    def pool_address(self) -> int:
        return address_of(self.engine.slots)

    def ends(self, direction: Direction) -> tuple[UInt64Array, UInt64Array]:
        """Source and target address of every flat copy, slot by slot and row by row; uint64, (copies,) each."""
        return self._ends[direction]

    def ends_of(self, groups: Sequence[GroupBlocks], direction: Direction) -> tuple[UInt64Array, UInt64Array]:
        """The same of some blocks and slots, computed from them."""
        device, host = (np.concatenate(each) for each in zip(*map(self._row_addresses, groups), strict=True))
        return (device, host) if direction is Direction.STORE else (host, device)

    def _row_addresses(self, group: GroupBlocks) -> tuple[UInt64Array, UInt64Array]:
        stride = group.planes[0].block_stride
        rows = np.array([plane.address for plane in group.planes[: self.rows_per_slot]], dtype=np.int64)
        device = group.starts[:, np.newaxis] * stride + rows
        host = self.pool_address + group.slots[:, np.newaxis] * self.layout.slot_bytes
        host = host + np.arange(self.rows_per_slot) * self.row_bytes
        return device.reshape(-1).astype(np.uint64), host.reshape(-1).astype(np.uint64)

    # the engine ---------------------------------------------------------------------------------------------------

    @property
    def missing(self) -> Mapping[str, str | None]:
        """For every copier None, or why it cannot be used here."""
        return dict.fromkeys(COPIERS) | self.engine.missing_copiers

    def chosen_copier(self, direction: Direction, prefer: str) -> CopierName:
        """The copier that the engine chooses for a group."""
        copier = self._preferring(prefer).plan(direction, self.groups[0].blocks, self.groups[0].slots).copier
        assert copier is not None
        return copier

    def _preferring(self, prefer: str) -> OffloadEngine:
        """The engine with that preference; all have the same slots. Each selects by its own last transfers."""
        if prefer not in self._engines:
            pool, slot_bytes = self.engine.slots, self.layout.slot_bytes
            memory = HostMemory(
                address=address_of(pool), num_slots=len(pool), slot_stride=slot_bytes, registered=True, owner=pool
            )
            engine = OffloadEngine(
                self.layout, device=self.lab.device, host_memory=memory, prefer="latency", **self._options
            )
            self._engines[prefer] = self._undo.enter_context(engine)
        return self._engines[prefer]

    def submit(
        self,
        direction: Direction,
        copier: CopierName | None = None,
        *,
        prefer: str = "overlap",
        after: Any = NO_WAIT,
    ) -> list[Job]:
        """Submit the transfer: a job for each group."""
        engine = self._preferring(prefer)
        return [
            engine.submit(direction, each.blocks, each.slots, group=group, after=after, copier=copier)
            for group, each in enumerate(self.groups)
        ]

    def seconds(self, jobs: Sequence[Job]) -> float:
        """Wait for jobs. Returns the sum of their times on the GPU clock."""
        while not all(job.done for job in jobs):  # wait() sleeps between looks, which a wall clock would see
            pass
        return sum(job.wait().seconds for job in jobs)

    # bytes --------------------------------------------------------------------------------------------------------

    def prepare(self, direction: Direction) -> None:
        """Write the right bytes into the sources of a direction."""
        if direction is Direction.STORE:
            self._bytes.upload(self.ends(Direction.STORE)[0], self.row_bytes)
        else:
            self.lab.write(self._bytes.in_slots(self._stored()))

    def poison(self, direction: Direction) -> None:
        """Overwrite the targets of a direction. The GPU does it, so that the CPU's caches hold nothing of them; of
        blocks that are to be stored nothing stays in the GPU's cache.
        """
        if direction is Direction.STORE:
            self.lab.poison(self._stored())
            self.lab.flush()
        else:
            self.lab.fill(self.spans())

    def spans(self) -> list[tuple[int, int]]:
        """Address and bytes of the ranges that hold the planes of all groups, and of no allocation but theirs."""
        if self.placement is Placement.SCATTERED:
            return [(plane.address, plane.span_bytes) for group in self.groups for plane in group.planes]
        ends = [(group.planes[0].address, group.planes[-1].end) for group in self.groups]
        return [(address, end - address) for address, end in ends]

    def wrong(self, direction: Direction) -> int:
        """The number of rows of a transfer's targets that do not hold the right bytes."""
        row_bytes = self.row_bytes
        if direction is Direction.STORE:
            coded = row_bytes if self._coding is None else self._coding.coded(row_bytes)
            return self.lab.wrong_rows(self._bytes.in_slots(self._stored()), coded)
        found = self._bytes.download(self.ends(Direction.LOAD)[1], row_bytes)
        return self.lab.wrong_rows(self._bytes.against(found), row_bytes)

    def _stored(self) -> list[UInt8Array]:
        """The payload of each slot."""
        payload = self.layout.groups[0].payload_bytes
        return [self.engine.slots[slot, :payload] for group in self.groups for slot in group.slots]

"""The copies of a transfer, as numpy arrays. No device is touched here.

A `BlockPlan` has the blocks and their places in slots, which is enough for a copy kernel. Its `operations()` are
strided copies: n x k for n blocks over k folds (`kvoffload.layout.fold`), before adjacent blocks merge. `flat()` splits
those into copies of one row each.

Every transfer passes through `build`, `count` and `operations`. For an ordinary group these call only each other and
numpy functions written in C, not `concatenate`, `any` or `full`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvoffload.internal.types import Int64Array, UInt64Array
from kvoffload.layout.fold import ONE as _ONE
from kvoffload.layout.fold import FoldClass, FoldedGroup
from kvoffload.layout.layout import KVLayout


class Direction(enum.StrEnum):
    """The direction of a transfer: STORE ("store") from the GPU to the host, LOAD ("load") from the host to the GPU.

    The members are strings: `Direction.STORE == "store"`.
    """

    STORE = "store"
    LOAD = "load"

    @classmethod
    def _missing_(cls, value: object) -> Direction:
        raise ValueError(f'direction must be "store" or "load", got {value!r:.80}')

    @property
    def opposite(self) -> Direction:
        return LOAD if self is STORE else STORE


STORE, LOAD = Direction.STORE, Direction.LOAD  # looking a member up in its enum takes 0.1 us


@dataclass(slots=True, eq=False)
class BlockPlan:
    """Copies between block `blocks[i]` of a group's planes and sub-block `sub_block[i]` of the slot at
    `slot_address[i]`. Immutable; `cut` shares its arrays.

    Attributes:
        direction: store or load.
        group: the group's folds.
        group_index: its index in the layout.
        blocks: device block ids, int64, (n,).
        slots, slot_address: where they are on the host: int64, (n,), and host addresses, uint64, (n,).
        sub_block: int64, (n,); None if a slot holds one block.
        nbytes: payload bytes.
        part_ends: empty, since a block has planes of all parts; see `TransferPlan.part_ends`.
    """

    direction: Direction
    group: FoldedGroup
    group_index: int
    blocks: Int64Array
    slots: Int64Array
    slot_address: UInt64Array
    sub_block: Int64Array | None
    nbytes: int
    _merged: tuple[Int64Array, Int64Array] | None = None
    part_ends: ClassVar[tuple[int, ...]] = ()

    def __len__(self) -> int:
        return len(self.blocks)

    def cut(self, start: int, stop: int) -> BlockPlan:
        """Return the plan of blocks `[start, stop)`; it shares memory."""
        if start == 0 and stop >= len(self.blocks):
            return self
        cut = slice(start, stop)
        sub_block = None if self.sub_block is None else self.sub_block[cut]
        of, blocks = (self.direction, self.group, self.group_index), self.blocks[cut]
        nbytes = self.group.bytes_per_block * len(blocks)
        return BlockPlan(*of, blocks, self.slots[cut], self.slot_address[cut], sub_block, nbytes)

    def count(self) -> tuple[int, int]:
        """Return how many strided operations `operations` returns, and how many rows these have together."""
        operations = rows = 0
        for each in self.group.classes:
            starts = len(self.blocks)
            if each.mergeable and self.sub_block is not None:
                starts = len((self._merged or self._merge(self.sub_block))[0])
            operations += starts * len(each.rows)
            rows += starts * each.row_count
        return operations, rows

    def operations(self) -> TransferPlan:
        """Return strided operations, one for each fold and block, in the order of the parts. Adjacent blocks of a slot
        merge into wider rows.
        """
        classes, single = self.group.classes, self.group.single
        # 1. One fold, one block a slot, as in most transfers. Few numpy calls, no reshaping.
        if single is not None and self.sub_block is None:
            device = single.block_addresses[self.blocks]
            host = self.slot_address if single.first_offset is None else self.slot_address + single.first_offset
            height, device_pitch, host_pitch = single.columns
            return TransferPlan(self.direction, device, host, single.width_column, height, device_pitch, host_pitch)
        # 2. Folds of one class.
        if len(classes) == 1 and self.group.num_parts == 1:
            return TransferPlan(self.direction, *self._columns(classes[0]))
        # 3. Several classes: class after class.
        planned = [self._columns(each) for each in classes]
        columns = planned[0]
        if len(classes) > 1:
            spread = [[np.broadcast_to(column, each[0].shape) for column in each] for each in planned]
            columns = [np.concatenate(column) for column in zip(*spread, strict=True)]
        if self.group.num_parts == 1:
            return TransferPlan(self.direction, *columns)
        # 4. Several parts: each class has its operations in the order of the parts; several classes are sorted by part.
        per_fold = [len(found[0]) // len(folds.rows) for folds, found in zip(classes, planned, strict=True)]
        counts = np.array([folds.part_folds * each for folds, each in zip(classes, per_fold, strict=True)])
        if len(classes) > 1:
            parts = np.tile(np.arange(self.group.num_parts), len(classes))
            order = np.argsort(np.repeat(parts, counts.reshape(-1)), kind="stable")
            columns = [column[order] for column in columns]
        return TransferPlan(self.direction, *columns, part_ends=tuple(counts.sum(axis=0).cumsum().tolist()))

    def _columns(self, folds: FoldClass) -> list[UInt64Array]:
        """Return the six columns for the folds of one class: fold after fold, each with all blocks in their order."""
        blocks, slot_address, sub_block = self.blocks, self.slot_address.view(np.int64), self.sub_block
        width = folds.width_column
        if sub_block is not None:
            slot_address = slot_address + sub_block * folds.host_step
            if folds.mergeable:
                starts, merged = self._merged or self._merge(sub_block)
                blocks, slot_address = blocks[starts], slot_address[starts]
                width = (merged * folds.width).view(np.uint64)
        device = folds.address + blocks * folds.block_stride  # (folds, blocks)
        host = folds.host_offset + slot_address
        if len(folds.address) > 1 and len(width) > 1:
            spread = np.empty(device.shape, dtype=np.uint64)
            spread[...] = width
            width = spread.reshape(-1)
        columns = [device.reshape(-1).view(np.uint64), host.reshape(-1).view(np.uint64), width]
        for column in folds.columns:  # a comprehension is a call of its own before Python 3.12
            columns.append(column if len(column) == 1 else column.repeat(len(blocks)))  # noqa: PERF401
        return columns

    def _merge(self, sub_block: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the start and the length of each run of blocks that are adjacent on both sides.

        Blocks of two slots never merge, even if the slots are full and adjacent: the driver refuses a copy across two
        registered ranges of the pool, and a plan does not know the ranges.
        """
        blocks = self.blocks
        is_start = np.empty(len(blocks), dtype=np.bool_)
        is_start[:1] = True
        np.not_equal(blocks[1:], blocks[:-1] + 1, out=is_start[1:])
        is_start[1:] |= sub_block[1:] == 0
        starts = is_start.nonzero()[0]
        merged = np.empty(len(starts), dtype=np.int64)
        np.subtract(starts[1:], starts[:-1], out=merged[:-1])
        merged[-1:] = len(blocks) - starts[-1:]
        self._merged = starts, merged
        return self._merged

    def __repr__(self) -> str:
        place = f"{len(self.blocks)} blocks of group {self.group_index}"
        return f"BlockPlan({self.direction}, {place}, {self.nbytes} bytes)"


@dataclass(slots=True, eq=False)
class TransferPlan:
    """Strided operations: `height` rows of `width` bytes, at `*_address + row * *_pitch`. Immutable.

    Addresses are uint64, (n,); the other columns are uint64, (n,), or (1,) if all operations have the same value. The
    operations of a part have no order among each other, and no two write the same byte.

    Attributes:
        part_ends: the number of operations in the first part, the first two, ...; empty if there is one part.
        source, target: the device and host addresses, by direction.
    """

    direction: Direction
    device_address: UInt64Array
    host_address: UInt64Array
    width: UInt64Array
    height: UInt64Array
    device_pitch: UInt64Array
    host_pitch: UInt64Array
    part_ends: tuple[int, ...] = field(default=(), kw_only=True)

    def __len__(self) -> int:
        return len(self.device_address)

    @property
    def source(self) -> UInt64Array:
        return self.device_address if self.direction is STORE else self.host_address

    @property
    def target(self) -> UInt64Array:
        return self.host_address if self.direction is STORE else self.device_address

    @property
    def is_flat(self) -> bool:
        return bool(np.logical_and.reduce(self.height == 1))

    def cut(self, start: int, stop: int) -> TransferPlan:
        """Return the plan of operations `[start, stop)` of one part; it shares memory."""
        if start == 0 and stop >= len(self.device_address):
            return self
        cut = slice(start, stop)
        columns = (self.device_address, self.host_address, self.width, self.height, self.device_pitch, self.host_pitch)
        return TransferPlan(self.direction, *(column if len(column) == 1 else column[cut] for column in columns))

    def flat(self) -> TransferPlan:
        """Return the same bytes with one row per operation."""
        # 1. Every operation is one row already. The first test is true for most transfers, and costs no call.
        if self.height is _ONE or self.is_flat:
            return self
        # 2. All have the same number of rows: one broadcast.
        if len(self.height) == 1:
            height = int(self.height[0])
            row = np.arange(height, dtype=np.uint64)
            device = (self.device_address[:, np.newaxis] + row * self.device_pitch[:, np.newaxis]).reshape(-1)
            host = (self.host_address[:, np.newaxis] + row * self.host_pitch[:, np.newaxis]).reshape(-1)
            width = self.width if len(self.width) == 1 else self.width.repeat(height)
            ends = tuple([height * end for end in self.part_ends])
            return TransferPlan(self.direction, device, host, width, _ONE, width, width, part_ends=ends)
        # 3. They have different numbers of rows: say for each row which operation it belongs to.
        counts = self.height.astype(np.intp)
        operation = np.arange(len(counts)).repeat(counts)
        stops = np.add.accumulate(counts)
        row = (np.arange(len(operation)) - (stops - counts)[operation]).astype(np.uint64)
        columns = (self.width, self.device_pitch, self.host_pitch)
        width, device_pitch, host_pitch = (each if len(each) == 1 else each[operation] for each in columns)
        device = self.device_address[operation] + row * device_pitch
        host = self.host_address[operation] + row * host_pitch
        ends = tuple([int(stops[end - 1]) for end in self.part_ends])
        return TransferPlan(self.direction, device, host, width, _ONE, width, width, part_ends=ends)

    def __repr__(self) -> str:
        return f"TransferPlan({self.direction}, {len(self.device_address)} operations)"


def joined(plans: Sequence[TransferPlan]) -> TransferPlan:
    """Return the operations of several plans in a row. All have one part and the same direction."""
    sizes = [len(plan) for plan in plans]

    def column(name: str) -> UInt64Array:
        of_each: list[UInt64Array] = [getattr(plan, name) for plan in plans]
        if all(len(each) == 1 and each[0] == of_each[0][0] for each in of_each):
            return of_each[0]
        return np.concatenate([np.broadcast_to(each, size) for each, size in zip(of_each, sizes, strict=True)])

    return TransferPlan(
        plans[0].direction,
        np.concatenate([plan.device_address for plan in plans]),
        np.concatenate([plan.host_address for plan in plans]),
        *map(column, ("width", "height", "device_pitch", "host_pitch")),
    )


def addresses_of_slots(
    layout: KVLayout, pool_address: int, num_slots: int, slot_stride: int | None = None
) -> UInt64Array:
    """Return the host addresses of the slots, uint64, (num_slots,). A look-up takes a fifth of the arithmetic's time.

    Args:
        slot_stride: bytes from slot to slot; None: `slot_bytes`.
    """
    stride = layout.slot_bytes if slot_stride is None else slot_stride
    return np.uint64(pool_address) + np.arange(num_slots, dtype=np.uint64) * np.uint64(stride)


def build(
    group: FoldedGroup,
    layout: KVLayout,
    direction: Direction,
    slot_addresses: UInt64Array,
    slots: Int64Array,
    blocks: Int64Array,
    first_sub_block: int = 0,
    group_index: int = 0,
) -> BlockPlan:
    """Plan a transfer. Block `i` is sub-block `(first_sub_block + i) % f` of slot `slots[(first_sub_block + i) // f]`.

    Args:
        group, group_index: the group's folds, and its index in the layout.
        slot_addresses: from `addresses_of_slots`.
        slots, blocks: valid ids, int64, that must not change while the plan is used;
            `len(slots) == layout.slots_for(len(blocks), first_sub_block=...)`.
    """
    factor = layout.blocks_per_slot
    if factor == 1:
        sub_block = None
    else:
        position = np.arange(first_sub_block, first_sub_block + len(blocks))
        index, sub_block = np.divmod(position, factor)
        slots = slots[index]
    nbytes = group.bytes_per_block * len(blocks)
    return BlockPlan(direction, group, group_index, blocks, slots, slot_addresses[slots], sub_block, nbytes)

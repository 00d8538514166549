"""What a transfer must copy, as numpy arrays: fold planes, merge adjacent blocks, flatten what must be flat.

Folding happens once per layout. Planes whose device address and slot offset rise together in equal steps, inside one
driver allocation, become one *run*: for a block it is one strided operation, a row per plane. (The driver refuses rows
that cross an allocation.) Any index step is allowed: every second plane may form a run of its own.

    device   |plane 0 .. block b ..|plane 1 .. block b ..|plane 2 ...      pitch: bytes from plane to plane
    slot     |p0: sub 0 .. f-1|p1: sub 0 .. f-1|p2 ...                     pitch: step x f x block bytes

A transfer is a `BlockPlan`: blocks, and where each lies in a slot. That is all that a copy kernel needs. `operations()`
gives it as strided operations, n x r of them for n blocks over r runs, computed by broadcasting; `flat()` of those as
copies of one row each. Pure numpy: no device is seen here.

A group may be folded in *parts*, lists of planes that are copied one after the other: then no run is of two parts, and
all operations of a part come before those of the next.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.layout.layout import Group, Int64Array, KVLayout

MAX_PITCH = (1 << 31) - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far; larger ones are not promised to work

UInt64Array = npt.NDArray[np.uint64]


class Direction(enum.StrEnum):
    """Which way a transfer goes."""

    STORE = "store"  # device to host
    LOAD = "load"  # host to device

    @property
    def opposite(self) -> Direction:
        return Direction.LOAD if self is Direction.STORE else Direction.STORE


class Run(NamedTuple):
    """Planes that one strided operation covers: row `i` of block 0 begins at `address + i * device_pitch`."""

    address: int
    host_offset: int
    rows: int
    device_pitch: int
    host_pitch: int


class RunClass(NamedTuple):
    """Runs with the same row width and block stride, as arrays of shape (runs, 1)."""

    width: int
    block_stride: int
    address: Int64Array
    host_offset: Int64Array
    rows: Int64Array
    device_pitch: Int64Array
    host_pitch: Int64Array
    mergeable: bool  # no padding between blocks: adjacent blocks of a slot are one wider row
    row_count: int  # rows of all runs together
    part_runs: Int64Array  # how many of the runs are of each part, (parts,); those of a part come before the next one's


class FoldedGroup(NamedTuple):
    """A group as the planner sees it."""

    classes: tuple[RunClass, ...]
    planes: int
    bytes_per_block: int
    parts: tuple[tuple[int, ...], ...]  # indices of the planes of each

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    @property
    def runs(self) -> int:
        """Operations per block that does not merge with a neighbour."""
        return sum(len(each.address) for each in self.classes)


def fold(layout: KVLayout, allocations: Sequence[Sequence[int]] | None = None) -> tuple[FoldedGroup, ...]:
    """Fold each group's planes into runs.

    Args:
        layout: the layout.
        allocations: per group, per plane: an id of the driver allocation that holds the plane. None: by address alone.
    """
    known = allocations or [[0] * len(group.planes) for group in layout.groups]
    return tuple(
        fold_group(group, layout.blocks_per_slot, ids, [range(len(group.planes))])
        for group, ids in zip(layout.groups, known, strict=True)
    )


def fold_group(
    group: Group, blocks_per_slot: int, allocations: Sequence[int], parts: Sequence[Sequence[int]]
) -> FoldedGroup:
    """Fold the planes of one group into runs, none of which is of two parts; `parts` has every plane's index once."""
    alike: dict[tuple[int, int, int, int], list[int]] = {}
    for part, planes in enumerate(parts):
        for index in sorted(planes):
            plane = group.planes[index]
            alike.setdefault((plane.block_bytes, plane.block_stride, allocations[index], part), []).append(index)
    runs: dict[tuple[int, int], list[tuple[Run, int]]] = {}
    for (block_bytes, block_stride, _, part), members in alike.items():
        points = [(group.planes[index].address, int(group.host_offsets[index])) for index in members]
        for run in _find_runs(points, block_bytes):
            contiguous = run.rows > 1 and run.device_pitch == run.host_pitch == block_bytes
            if contiguous:  # the interleaved layout (blocks, planes, ...) with one block a slot: one range a block
                run = Run(run.address, run.host_offset, 1, block_bytes * run.rows, block_bytes * run.rows)
            elif run.rows == 1:  # a pitch is not used, but must not be less than the width of merged blocks
                run = run._replace(device_pitch=blocks_per_slot * block_bytes, host_pitch=blocks_per_slot * block_bytes)
            width = run.device_pitch if contiguous else block_bytes
            runs.setdefault((width, block_stride), []).append((run, part))
    classes = tuple(_run_class(key, members, len(parts)) for key, members in runs.items())
    return FoldedGroup(classes, len(group.planes), group.bytes_per_block, tuple(map(tuple, parts)))


def _run_class(key: tuple[int, int], members: list[tuple[Run, int]], num_parts: int) -> RunClass:
    width, block_stride = key
    runs, parts = zip(*members, strict=True)
    address, host_offset, rows, device_pitch, host_pitch = np.array(runs, dtype=np.int64).T[:, :, np.newaxis]
    mergeable, row_count, part_runs = block_stride == width, int(rows.sum()), np.bincount(parts, minlength=num_parts)
    columns = (address, host_offset, rows, device_pitch, host_pitch)
    return RunClass(width, block_stride, *columns, mergeable, row_count, part_runs)


def _find_runs(points: list[tuple[int, int]], block_bytes: int) -> list[Run]:
    """Cover `(address, host offset)` points, offsets ascending, by arithmetic progressions, longest first per start.

    Greedy from the first uncovered point: exact for the layouts that occur (one stride, or a few interleaved ones).
    """
    runs = []
    remaining = dict.fromkeys(points)
    while remaining:
        start = next(iter(remaining))
        best = [start]
        for second in remaining:
            pitch, host_pitch = second[0] - start[0], second[1] - start[1]
            if host_pitch <= 0 or not block_bytes <= pitch <= MAX_PITCH or host_pitch > MAX_PITCH:
                continue
            if len(best) > 1 and (start[0] + len(best) * pitch, start[1] + len(best) * host_pitch) not in remaining:
                continue  # cannot be longer than the best
            chain = _follow(start, pitch, host_pitch, remaining)
            if len(chain) > len(best):
                best = chain
            if len(best) == len(remaining):
                break
        for point in best:
            del remaining[point]
        step = (best[1][0] - start[0], best[1][1] - start[1]) if len(best) > 1 else (0, 0)
        runs.append(Run(*start, len(best), *step))
    return runs


def _follow(
    start: tuple[int, int], pitch: int, host_pitch: int, points: dict[tuple[int, int], None]
) -> list[tuple[int, int]]:
    """The points that continue `start` in steps of `(pitch, host_pitch)`."""
    chain = [start]
    while (following := (chain[-1][0] + pitch, chain[-1][1] + host_pitch)) in points:
        chain.append(following)
    return chain


def describe_fold(groups: Sequence[FoldedGroup]) -> str:
    """How groups fold, in words: '64 planes fold into 1 run' or '3 planes do not fold: 3 operations a block'."""
    parts = []
    for group in groups:
        if group.runs == group.planes and group.planes > 1:
            parts.append(f"{group.planes} planes do not fold ({group.runs} operations a block)")
        else:
            planes = f"{group.planes} planes fold" if group.planes > 1 else "1 plane folds"
            parts.append(f"{planes} into {group.runs} run{'s' if group.runs > 1 else ''}")
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """What a transfer moves: block `blocks[i]` of a group's planes, and sub-block `sub_block[i]` of a slot.

    Attributes:
        group: the group's runs, from `fold`.
        group_index: of the group in its layout.
        blocks: device block ids, int64, (n,).
        slot_address: host address of the slot of each block, int64, (n,).
        sub_block: which part of its slot, int64, (n,); None where a slot holds one block.
    """

    direction: Direction
    group: FoldedGroup
    group_index: int
    blocks: Int64Array
    slot_address: Int64Array
    sub_block: Int64Array | None

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return self.group.bytes_per_block * len(self.blocks)

    @property
    def part_ends(self) -> tuple[int, ...]:
        """None: every block is of all parts. `operations` has them."""
        return ()

    def cut(self, start: int, stop: int) -> BlockPlan:
        """Blocks `[start, stop)` as a plan of their own, sharing memory."""
        if start == 0 and stop >= len(self):
            return self
        cut = slice(start, stop)
        sub_block = None if self.sub_block is None else self.sub_block[cut]
        return replace(self, blocks=self.blocks[cut], slot_address=self.slot_address[cut], sub_block=sub_block)

    def count(self) -> tuple[int, int]:
        """How many strided operations, and how many rows in them, `operations` would give."""
        operations = rows = 0
        merged = None
        for each in self.group.classes:
            starts = len(self.blocks)
            if self.sub_block is not None and each.mergeable:
                merged = merged or len(_adjacent(self.blocks, self.sub_block)[0])
                starts = merged
            operations += starts * len(each.rows)
            rows += starts * each.row_count
        return operations, rows

    def operations(self) -> TransferPlan:
        """As strided operations, one per run and block, in the order of the parts; adjacent blocks of a slot merge into
        wider rows."""
        classes = self.group.classes
        planned = [_plan_class(each, self.blocks, self.slot_address, self.sub_block) for each in classes]
        columns = planned[0]
        if len(classes) > 1:
            spread = [[np.broadcast_to(column, each[0].shape) for column in each] for each in planned]
            columns = [np.concatenate(column) for column in zip(*spread, strict=True)]
        if self.group.num_parts == 1:
            return TransferPlan(self.direction, *columns)
        per_run = [len(found[0]) // len(runs.rows) for runs, found in zip(classes, planned, strict=True)]
        counts = np.array([runs.part_runs * each for runs, each in zip(classes, per_run, strict=True)])
        if len(classes) > 1:
            parts = np.tile(np.arange(self.group.num_parts), len(classes))
            order = np.argsort(np.repeat(parts, counts.reshape(-1)), kind="stable")
            columns = [column[order] for column in columns]
        return TransferPlan(self.direction, *columns, part_ends=tuple(counts.sum(axis=0).cumsum().tolist()))


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Strided operations: `height` rows of `width` bytes, at `*_address + row * *_pitch`.

    Addresses are uint64, (n,); the other columns uint64, (n,), or (1,) where all operations have one value. Operations
    of a part have no order among each other and no two write the same byte.

    Attributes:
        part_ends: how many operations the first part has, the first two, ...; empty where there is one part.
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
        return self.device_address if self.direction is Direction.STORE else self.host_address

    @property
    def target(self) -> UInt64Array:
        return self.host_address if self.direction is Direction.STORE else self.device_address

    @property
    def source_pitch(self) -> UInt64Array:
        return self.device_pitch if self.direction is Direction.STORE else self.host_pitch

    @property
    def target_pitch(self) -> UInt64Array:
        return self.host_pitch if self.direction is Direction.STORE else self.device_pitch

    @property
    def is_flat(self) -> bool:
        """Whether every operation is a single row."""
        return bool((self.height == 1).all())

    def cut(self, start: int, stop: int) -> TransferPlan:
        """Operations `[start, stop)` as a plan of their own, of one part, sharing memory."""
        if start == 0 and stop >= len(self):
            return self
        cut = slice(start, stop)
        columns = (self.device_address, self.host_address, self.width, self.height, self.device_pitch, self.host_pitch)
        return TransferPlan(self.direction, *(column if len(column) == 1 else column[cut] for column in columns))

    def flat(self) -> TransferPlan:
        """The same bytes with one row per operation."""
        if self.is_flat:
            return self
        row, operation = _rows_of(self.height, len(self))

        def of_each(column: UInt64Array) -> UInt64Array:
            return column if len(column) == 1 else column[operation]

        return TransferPlan(
            self.direction,
            self.device_address[operation] + row * of_each(self.device_pitch),
            self.host_address[operation] + row * of_each(self.host_pitch),
            width := of_each(self.width),
            np.ones(1, dtype=np.uint64),
            width,
            width,
            part_ends=tuple(np.searchsorted(operation, self.part_ends).tolist()) if self.part_ends else (),
        )


def _rows_of(height: UInt64Array, operations: int) -> tuple[UInt64Array, npt.NDArray[np.intp]]:
    """For every row of all operations: its number within its operation, and its operation."""
    counts = np.broadcast_to(height.astype(np.intp), (operations,))
    operation = np.repeat(np.arange(operations), counts)
    first = np.cumsum(counts) - counts
    return (np.arange(len(operation)) - first[operation]).astype(np.uint64), operation


def build(
    group: FoldedGroup,
    layout: KVLayout,
    direction: Direction,
    *,
    group_index: int = 0,
    pool_address: int,
    slots: Int64Array,
    blocks: Int64Array,
    first_sub_block: int = 0,
) -> BlockPlan:
    """Plan a transfer. Block `i` is sub-block `(first_sub_block + i) % f` of slot `slots[(first_sub_block + i) // f]`.

    Args:
        group, group_index: the group's runs, from `fold`, and which group it is.
        pool_address: host address of slot 0; slots follow each other every `layout.slot_bytes` bytes.
        slots, blocks: valid ids, int64; `len(slots) == layout.slots_for(len(blocks), first_sub_block)`.
    """
    factor = layout.blocks_per_slot
    if factor == 1:
        slot_address, sub_block = pool_address + slots * layout.slot_bytes, None
    else:
        position = np.arange(first_sub_block, first_sub_block + len(blocks))
        slot_address = pool_address + slots[position // factor] * layout.slot_bytes
        sub_block = position % factor
    return BlockPlan(direction, group, group_index, blocks, slot_address, sub_block)


def _plan_class(
    runs: RunClass, blocks: Int64Array, slot_address: Int64Array, sub_block: Int64Array | None
) -> list[UInt64Array]:
    """The six columns of a plan for one class of runs."""
    merged = None
    if sub_block is not None:
        slot_address = slot_address + sub_block * runs.width
        if runs.mergeable:
            starts, merged = _adjacent(blocks, sub_block)
            blocks, slot_address = blocks[starts], slot_address[starts]
    device = runs.address + blocks * runs.block_stride
    host = runs.host_offset + slot_address
    width = np.full((1, 1), runs.width) if merged is None else merged * runs.width
    columns = (device, host, width, runs.rows, runs.device_pitch, runs.host_pitch)
    return [_spread(column, device.shape) for column in columns]


def _spread(column: npt.NDArray[np.int64], shape: tuple[int, ...]) -> UInt64Array:
    """One number per operation, run after run, from what may be one per run or one per block; one if all share it."""
    if column.shape == shape or column.size == 1:
        return column.reshape(-1).view(np.uint64)
    spread = np.empty(shape, dtype=np.uint64)
    spread[...] = column
    return spread.reshape(-1)


def _adjacent(blocks: Int64Array, sub_block: Int64Array) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Where stretches of blocks that are adjacent on both sides start, and how many blocks each holds."""
    breaks = (blocks[1:] != blocks[:-1] + 1) | (sub_block[1:] == 0)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))[: len(blocks)]
    return starts, np.diff(starts, append=len(blocks))

"""Planes that one strided copy covers.

There are two steps. Planes whose bytes of a block follow each other on the device and in the slot are one *row*: all
planes of a block-major group. Rows of one width whose device address and slot offset rise together in equal steps,
inside one driver allocation, *fold*: for a block they are one strided operation. (The driver refuses rows that cross an
allocation; mapped virtual memory without a gap counts as one, see `kvoffload.device.allocations`.) Any index step is
allowed: every second plane may fold with the others of its kind.

    plane-major   device   |plane 0 .. block b ..|plane 1 .. block b ..|plane 2 ...      pitch: from plane to plane
                  slot     |p0: sub 0 .. f-1|p1: sub 0 .. f-1|p2 ...                     pitch: step x f x block bytes
    block-major   device   ...|block b: p0 p1 p2 ...|block b+1: p0 p1 p2 ...|...         one row a block
                  slot     |sub 0: p0 p1 p2 ...|sub 1: p0 p1 p2 ...|...

A group may be folded in *parts*, lists of planes that a load copies one after the other: then no fold has planes of two
parts. Pure numpy; folding happens once for a layout, or for a layout and its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvoffload.internal.types import Int64Array, UInt64Array
from kvoffload.layout.planes import Group

ONE = np.ones(1, dtype=np.uint64)  # the height of operations of a single row
MAX_PITCH = (1 << 31) - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far; larger ones are not promised to work


class HasGroups(Protocol):
    """The part of a `KVLayout` that folding needs."""

    @property
    def groups(self) -> Sequence[Group]: ...

    @property
    def blocks_per_slot(self) -> int: ...


class PlaneFold(NamedTuple):
    """Rows that one strided operation covers: row `i` of block 0 begins at `address + i * device_pitch`."""

    address: int
    host_offset: int
    rows: int
    device_pitch: int
    host_pitch: int


class _Row(NamedTuple):
    """Planes whose bytes of a block are one range on both sides, which begins at `address` for block 0."""

    address: int
    host_offset: int
    width: int
    block_stride: int
    host_step: int
    allocation: int

    def is_continued_by(self, following: _Row) -> bool:
        return (
            self.address + self.width == following.address
            and self.host_offset + self.width == following.host_offset
            and self.block_stride == following.block_stride
            and self.allocation == following.allocation
            and self.width + following.width <= MAX_PITCH
        )


class FoldClass(NamedTuple):
    """The folds of a group that have the same row width, and the same steps from block to block.

    Attributes:
        width: bytes of a row of one block.
        block_stride: bytes from one block to the next on the device.
        host_step: bytes from one sub-block to the next in a slot.
        address, host_offset, rows, device_pitch, host_pitch: see `PlaneFold`; int64, (folds, 1).
        mergeable: whether adjacent blocks of a slot are one wider row, since nothing lies between them on either side
            (and a full slot is no wider than a pitch may be).
        row_count: rows of all folds together.
        part_folds: int64, (parts,): how many of the folds are of each part; a part's folds come before the next one's.
        columns: height, device pitch and host pitch as the columns of a plan: uint64, (1,) where all folds have one
            value, else (folds,).
        width_column: `width` as such a column.
        block_addresses: of a class of a single fold, the device address of each of the group's blocks, uint64,
            (num_blocks,). Else empty.
        first_offset: of the first fold, uint64, (1,); None for 0.
    """

    width: int
    block_stride: int
    host_step: int
    address: Int64Array
    host_offset: Int64Array
    rows: Int64Array
    device_pitch: Int64Array
    host_pitch: Int64Array
    mergeable: bool
    row_count: int
    part_folds: Int64Array
    columns: tuple[UInt64Array, UInt64Array, UInt64Array]
    width_column: UInt64Array
    block_addresses: UInt64Array
    first_offset: UInt64Array | None


class FoldedGroup(NamedTuple):
    """A group, folded, with all that planning a transfer needs.

    Attributes:
        classes: the folds, by width and steps.
        planes: how many planes the group has.
        bytes_per_block: bytes of one block over all planes.
        parts: indices of the planes of each part.
        num_parts: 1 if all planes are folded together.
        folds: operations for a block that does not merge with a neighbour.
        single: the class of the only fold, if there is one part and one fold.
    """

    classes: tuple[FoldClass, ...]
    planes: int
    bytes_per_block: int
    parts: tuple[tuple[int, ...], ...]
    num_parts: int
    folds: int
    single: FoldClass | None


def fold(layout: HasGroups, allocations: Sequence[Sequence[int]] | None = None) -> tuple[FoldedGroup, ...]:
    """Fold the planes of each group.

    Args:
        layout: a `KVLayout`.
        allocations: per group, per plane: an id of the allocation that holds the plane, as `Device.allocations`
            returns. None: by address alone.
    """
    known = allocations or [[0] * len(group.planes) for group in layout.groups]
    return tuple(
        fold_group(group, layout.blocks_per_slot, ids, [range(len(group.planes))])
        for group, ids in zip(layout.groups, known, strict=True)
    )


def fold_group(
    group: Group, blocks_per_slot: int, allocations: Sequence[int], parts: Sequence[Sequence[int]]
) -> FoldedGroup:
    """Fold the planes of one group, no two planes of different parts together; `parts` has every plane's index once."""
    alike: dict[tuple[int, int, int, int, int], list[tuple[int, int]]] = {}
    for part, planes in enumerate(parts):
        for row in _rows(group, sorted(planes), allocations):
            kind = (row.width, row.block_stride, row.host_step, row.allocation, part)
            alike.setdefault(kind, []).append((row.address, row.host_offset))
    found: dict[tuple[int, int, int, bool], list[tuple[PlaneFold, int]]] = {}
    for (width, block_stride, host_step, _, part), points in alike.items():
        mergeable = block_stride == width == host_step and width * blocks_per_slot <= MAX_PITCH
        widest = width * blocks_per_slot if mergeable else width
        members = found.setdefault((width, block_stride, host_step, mergeable), [])
        for each in _find_folds(points, width):
            if each.rows == 1:  # a single row has no pitch, but the driver refuses one below the width
                each = each._replace(device_pitch=widest, host_pitch=widest)
            members.append((each, part))
    classes = []
    for (width, block_stride, host_step, mergeable), members in found.items():
        folds, part_of = zip(*members, strict=True)
        address, host_offset, rows, device_pitch, host_pitch = np.array(folds, dtype=np.int64).T[:, :, np.newaxis]
        places = (address, host_offset, rows, device_pitch, host_pitch)
        starts = np.arange(group.num_blocks if len(folds) == 1 else 0) * block_stride
        classes.append(
            FoldClass(
                width,
                block_stride,
                host_step,
                *places,
                mergeable=mergeable,
                row_count=int(rows.sum()),
                part_folds=np.bincount(part_of, minlength=len(parts)),
                columns=(_column(rows), _column(device_pitch), _column(host_pitch)),
                width_column=np.array([width], dtype=np.uint64),
                block_addresses=(address[0] + starts).view(np.uint64),
                first_offset=host_offset[0].astype(np.uint64) if host_offset[0, 0] else None,
            )
        )
    operations = sum(map(len, found.values()))
    single = classes[0] if operations == len(parts) == 1 else None
    sizes = len(group.planes), group.bytes_per_block
    return FoldedGroup(tuple(classes), *sizes, tuple(map(tuple, parts)), len(parts), operations, single)


def _rows(group: Group, planes: Sequence[int], allocations: Sequence[int]) -> list[_Row]:
    """Return the rows of a block of some planes, whose indices ascend."""
    rows: list[_Row] = []
    for index in planes:
        plane, offset, step = group.planes[index], int(group.host_offsets[index]), int(group.host_steps[index])
        row = _Row(plane.address, offset, plane.block_bytes, plane.block_stride, step, allocations[index])
        if rows and rows[-1].is_continued_by(row):
            rows[-1] = rows[-1]._replace(width=rows[-1].width + row.width)
        else:
            rows.append(row)
    return rows


def _column(values: Int64Array) -> UInt64Array:
    flat = values.reshape(-1).astype(np.uint64)
    if not (flat == flat[0]).all():
        return flat
    return ONE if flat[0] == 1 else flat[:1]


def _find_folds(points: list[tuple[int, int]], width: int) -> list[PlaneFold]:
    """Cover `(address, host offset)` points, offsets ascending, by arithmetic progressions, longest first per start.

    Greedy from the first uncovered point: exact for the layouts that occur (one stride, or a few interleaved ones).
    """
    folds = []
    remaining = dict.fromkeys(points)
    while remaining:
        start = next(iter(remaining))
        best = [start]
        for second in remaining:
            pitch, host_pitch = second[0] - start[0], second[1] - start[1]
            if host_pitch <= 0 or not width <= pitch <= MAX_PITCH or host_pitch > MAX_PITCH:
                continue
            if len(best) > 1 and (start[0] + len(best) * pitch, start[1] + len(best) * host_pitch) not in remaining:
                continue  # cannot be longer than the best
            chain = [start]
            while (following := (chain[-1][0] + pitch, chain[-1][1] + host_pitch)) in remaining:
                chain.append(following)
            if len(chain) > len(best):
                best = chain
            if len(best) == len(remaining):
                break
        for point in best:
            del remaining[point]
        step = (best[1][0] - start[0], best[1][1] - start[1]) if len(best) > 1 else (0, 0)
        folds.append(PlaneFold(*start, len(best), *step))
    return folds


def describe_fold(groups: Sequence[FoldedGroup]) -> str:
    """Return how groups fold: '64 planes fold into 1 operation a block' or '3 planes do not fold (3 operations a
    block)'.
    """
    texts = []
    for group in groups:
        operations = f"{group.folds} operation{'' if group.folds == 1 else 's'} a block"
        if group.planes == 1:
            texts.append(f"1 plane ({operations})")
        elif group.folds == group.planes:
            texts.append(f"{group.planes} planes do not fold ({operations})")
        else:
            texts.append(f"{group.planes} planes fold into {operations}")
    return ", ".join(texts)

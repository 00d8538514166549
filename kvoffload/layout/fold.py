"""Planes that one strided copy covers.

Planes whose device address and slot offset rise together in equal steps, inside one driver allocation, *fold*: for a
block they are one strided operation, a row per plane. (The driver refuses rows that cross an allocation.) Any index
step is allowed: every second plane may fold with the others of its kind.

    device   |plane 0 .. block b ..|plane 1 .. block b ..|plane 2 ...      pitch: bytes from plane to plane
    slot     |p0: sub 0 .. f-1|p1: sub 0 .. f-1|p2 ...                     pitch: step x f x block bytes

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
    """What of a `KVLayout` folding depends on."""

    @property
    def groups(self) -> Sequence[Group]: ...

    @property
    def blocks_per_slot(self) -> int: ...


class PlaneFold(NamedTuple):
    """Planes that one strided operation covers: row `i` of block 0 begins at `address + i * device_pitch`."""

    address: int
    host_offset: int
    rows: int
    device_pitch: int
    host_pitch: int


class FoldClass(NamedTuple):
    """The folds of a group that have the same row width and block stride.

    Attributes:
        width: bytes of a row of one block.
        block_stride: bytes from one block to the next on the device.
        address, host_offset, rows, device_pitch, host_pitch: see `PlaneFold`; int64, (folds, 1).
        mergeable: whether adjacent blocks of a slot are one wider row, since no padding lies between them.
        row_count: rows of all folds together.
        part_folds: int64, (parts,): how many of the folds are of each part; a part's folds come before the next one's.
        columns: height, device pitch and host pitch as the columns of a plan: uint64, (1,) where all folds have one
            value, else (folds,).
        width_column: `width` as such a column.
        block_addresses: where the class is a single fold, the device address of each of the group's blocks in it,
            int64, (num_blocks,): a look-up takes a fifth of the arithmetic's time. Else empty.
        first_offset: of the first fold, int64, (1,): numpy adds arrays sooner than ints.
        has_offset: whether `first_offset` is not 0.
    """

    width: int
    block_stride: int
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
    block_addresses: Int64Array
    first_offset: Int64Array
    has_offset: bool


class FoldedGroup(NamedTuple):
    """A group, folded: all that planning a transfer needs of it.

    Attributes:
        classes: the folds, by width and block stride.
        planes: how many the group has.
        bytes_per_block: of one block over all planes.
        parts: indices of the planes of each part.
        num_parts: 1 for a group that is folded with all planes together.
        folds: operations for a block that does not merge with a neighbour.
    """

    classes: tuple[FoldClass, ...]
    planes: int
    bytes_per_block: int
    parts: tuple[tuple[int, ...], ...]
    num_parts: int
    folds: int


def fold(layout: HasGroups, allocations: Sequence[Sequence[int]] | None = None) -> tuple[FoldedGroup, ...]:
    """Fold the planes of each group.

    Args:
        layout: a `KVLayout`.
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
    """Fold the planes of one group, no two planes of different parts together; `parts` has every plane's index once."""
    alike: dict[tuple[int, int, int, int], list[int]] = {}
    for part, planes in enumerate(parts):
        for index in sorted(planes):
            plane = group.planes[index]
            alike.setdefault((plane.block_bytes, plane.block_stride, allocations[index], part), []).append(index)
    found: dict[tuple[int, int], list[tuple[PlaneFold, int]]] = {}
    for (block_bytes, block_stride, _, part), members in alike.items():
        points = [(group.planes[index].address, int(group.host_offsets[index])) for index in members]
        for each in _find_folds(points, block_bytes):
            width, shaped = _shape(each, block_bytes, blocks_per_slot)
            found.setdefault((width, block_stride), []).append((shaped, part))
    classes = tuple(_fold_class(key, members, len(parts), group.num_blocks) for key, members in found.items())
    folds = sum(len(each.address) for each in classes)
    return FoldedGroup(classes, len(group.planes), group.bytes_per_block, tuple(map(tuple, parts)), len(parts), folds)


def _shape(found: PlaneFold, block_bytes: int, blocks_per_slot: int) -> tuple[int, PlaneFold]:
    """The width of a row, and the fold as the driver is to see it."""
    if found.rows > 1 and found.device_pitch == found.host_pitch == block_bytes:
        # The interleaved layout (blocks, planes, ...) with one block a slot: one contiguous range a block.
        width = block_bytes * found.rows
        return width, PlaneFold(found.address, found.host_offset, 1, width, width)
    if found.rows == 1:  # a pitch is not used, but must not be less than the width of merged blocks
        pitch = blocks_per_slot * block_bytes
        return block_bytes, found._replace(device_pitch=pitch, host_pitch=pitch)
    return block_bytes, found


def _fold_class(
    key: tuple[int, int], members: list[tuple[PlaneFold, int]], num_parts: int, num_blocks: int
) -> FoldClass:
    width, block_stride = key
    folds, parts = zip(*members, strict=True)
    address, host_offset, rows, device_pitch, host_pitch = np.array(folds, dtype=np.int64).T[:, :, np.newaxis]
    return FoldClass(
        width,
        block_stride,
        address,
        host_offset,
        rows,
        device_pitch,
        host_pitch,
        mergeable=block_stride == width,
        row_count=int(rows.sum()),
        part_folds=np.bincount(parts, minlength=num_parts),
        columns=(_column(rows), _column(device_pitch), _column(host_pitch)),
        width_column=np.array([width], dtype=np.uint64),
        block_addresses=address[0] + np.arange(num_blocks if len(folds) == 1 else 0) * block_stride,
        first_offset=host_offset[0].copy(),
        has_offset=bool(host_offset[0, 0]),
    )


def _column(values: Int64Array) -> UInt64Array:
    flat = values.reshape(-1).astype(np.uint64)
    if not (flat == flat[0]).all():
        return flat
    return ONE if flat[0] == 1 else flat[:1]


def _find_folds(points: list[tuple[int, int]], block_bytes: int) -> list[PlaneFold]:
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
        folds.append(PlaneFold(*start, len(best), *step))
    return folds


def _follow(
    start: tuple[int, int], pitch: int, host_pitch: int, points: dict[tuple[int, int], None]
) -> list[tuple[int, int]]:
    """The points that continue `start` in steps of `(pitch, host_pitch)`."""
    chain = [start]
    while (following := (chain[-1][0] + pitch, chain[-1][1] + host_pitch)) in points:
        chain.append(following)
    return chain


def describe_fold(groups: Sequence[FoldedGroup]) -> str:
    """How groups fold: '64 planes fold into 1 operation a block' or '3 planes do not fold (3 operations a block)'."""
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

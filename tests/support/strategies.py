"""Hypothesis strategies for layouts and transfers, as plain numbers; `place` puts a layout on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from helpers import COPY_ENGINE_ONLY, STAGING
from hypothesis import strategies as st

import kvoffload
from kvoffload import Direction, KVLayout, OffloadEngine, Plane
from kvoffload.copiers import why_not
from kvoffload.device.buffers import DeviceBuffer
from kvoffload.layout.planes import SlotOrder
from kvoffload.testing import scramble
from kvoffload.tuning import COPIERS, CopierName

Draw = Callable[[st.SearchStrategy[int]], int]


class PlaneSpec(NamedTuple):
    """A plane at `offset` bytes into allocation number `allocation`."""

    allocation: int
    offset: int
    block_bytes: int
    block_stride: int
    num_blocks: int


class LayoutSpec(NamedTuple):
    """A layout without addresses: bytes of each allocation, and planes by group."""

    allocations: tuple[int, ...]
    groups: tuple[tuple[PlaneSpec, ...], ...]
    blocks_per_slot: int
    slot_order: SlotOrder | None = None


class TransferSpec(NamedTuple):
    """One call of `store` or `load`; `copier` indexes the copiers of the engine, with None as the last, and begins
    again."""

    direction: Direction
    group: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    first_sub_block: int
    copier: int


class Case(NamedTuple):
    """A layout and transfers over it, to be submitted one after the other without waiting."""

    layout: LayoutSpec
    num_slots: int
    staging_bytes: int
    transfers: tuple[TransferSpec, ...]


NUM_SLOTS = 6
MOST_INTERPRETED_BYTES = 32 << 10
SLOT_ORDERS: tuple[SlotOrder | None, ...] = (None, None, "block-major", "plane-major")
BLOCK_BYTES = (1, 3, 16, 48, 100, 256, 1000, 4096, 18 * 1024)


class _Group:
    """Collects the allocations and planes of one group."""

    def __init__(self, draw: Draw, first_allocation: int) -> None:
        self.draw = draw
        self.first = first_allocation
        self.allocations: list[int] = []
        self.planes: list[PlaneSpec] = []
        self.block_bytes = draw(st.sampled_from(BLOCK_BYTES))
        self.num_blocks = draw(st.integers(1, 6 if self.block_bytes > 4096 else 24))
        self.count = draw(st.integers(1, 4 if self.block_bytes > 4096 else 10))
        self.padding = draw(st.sampled_from((0, 0, 0, 1, 16, 100)))

    def padded(self, block_bytes: int) -> int:
        return block_bytes + self.padding

    def slab(self) -> None:
        """One allocation, gaps between planes in a repeating pattern, some planes of another block size."""
        gaps = [self.draw(st.sampled_from((0, 0, 16, 64, 509))) for _ in range(self.draw(st.integers(1, 3)))]
        odd_one = self.draw(st.sampled_from((0, 0, 1, 2)))  # every plane of that remainder is twice as big
        at = start = self.draw(st.sampled_from((0, 1, 512)))
        for index in range(self.count):
            size = self.block_bytes * (2 if odd_one and index % 3 == odd_one else 1)
            self.planes.append(PlaneSpec(self.first, at, size, self.padded(size), self.num_blocks))
            at += self.padded(size) * self.num_blocks + gaps[index % len(gaps)]
        self.allocations.append(at + start)

    def separate(self) -> None:
        """One allocation per plane; a block size of its own for each third one."""
        for index in range(self.count):
            size = self.block_bytes + (self.block_bytes // 2 + 1 if index % 3 == 2 else 0)
            margin = self.draw(st.sampled_from((0, 0, 32)))
            span = self.padded(size) * (self.num_blocks - 1) + size
            self.planes.append(PlaneSpec(self.first + index, margin, size, self.padded(size), self.num_blocks))
            self.allocations.append(span + 2 * margin)

    def interleaved(self) -> None:
        """`(blocks, planes, ...)` in one allocation, with padding behind each block; some planes of another size."""
        odd_one = self.draw(st.sampled_from((0, 0, 0, 1, 2)))  # every plane of that remainder is twice as big
        sizes = [self.block_bytes * (2 if odd_one and index % 3 == odd_one else 1) for index in range(self.count)]
        stride = sum(sizes) + self.padding
        for index, size in enumerate(sizes):
            self.planes.append(PlaneSpec(self.first, sum(sizes[:index]), size, stride, self.num_blocks))
        self.allocations.append(stride * self.num_blocks)

    def shuffle(self) -> None:
        """Leave the order of addresses: reversed, every second plane first, or at random."""
        how = self.draw(st.sampled_from((0, 0, 0, 1, 2, 3)))
        if how == 1:
            self.planes.reverse()
        elif how == 2:
            self.planes = self.planes[::2] + self.planes[1::2]
        elif how == 3:
            order = np.random.default_rng(self.draw(st.integers(0, 99))).permutation(len(self.planes))
            self.planes = [self.planes[index] for index in order]


@st.composite
def layouts(draw: st.DrawFn) -> LayoutSpec:
    """Layouts of one to three groups; a second group may be over the first one's planes, as in hybrid models."""
    allocations: list[int] = []
    groups: list[tuple[PlaneSpec, ...]] = []
    for index in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        if index and draw(st.sampled_from((False, False, True))):
            groups.append(groups[0][: draw(st.integers(1, len(groups[0])))])
            continue
        group = _Group(draw, len(allocations))
        draw(st.sampled_from((group.slab, group.separate, group.interleaved, group.interleaved)))()
        group.shuffle()
        allocations += group.allocations
        groups.append(tuple(group.planes))
    factor = draw(st.sampled_from((1, 2, 3, 5, 8)))
    return LayoutSpec(tuple(allocations), tuple(groups), factor, draw(st.sampled_from(SLOT_ORDERS)))


@st.composite
def ids(draw: st.DrawFn, limit: int, count: int, distinct: bool) -> tuple[int, ...]:
    """`count` ids below `limit`: in rising stretches as an allocator hands them out, or without any order."""
    if distinct:
        stretch = draw(st.integers(1, limit))
        starts = draw(st.permutations(range(0, limit, stretch)))
        return tuple(each for start in starts for each in range(start, min(start + stretch, limit)))[:count]
    if draw(st.booleans()):
        first = draw(st.integers(0, limit - 1))
        return tuple((first + index) % limit for index in range(count))
    return tuple(draw(st.lists(st.integers(0, limit - 1), min_size=count, max_size=count)))


@st.composite
def transfers(draw: st.DrawFn, layout: LayoutSpec) -> TransferSpec:
    """A valid transfer; also of nothing, of one block, and of partial first and last slots."""
    factor = layout.blocks_per_slot
    group = draw(st.integers(0, len(layout.groups) - 1))
    num_blocks = layout.groups[group][0].num_blocks
    direction = draw(st.sampled_from(Direction))
    first = draw(st.integers(0, factor - 1))
    most = NUM_SLOTS * factor - first if direction is Direction.STORE else num_blocks
    count = draw(st.integers(0, most) | st.just(min(most, 1)) | st.just(most))
    spanned = -(-(count + first) // factor) if count else 0
    storing = direction is Direction.STORE
    blocks = draw(ids(num_blocks, count, distinct=not storing))
    slots = draw(ids(NUM_SLOTS, spanned, distinct=storing))
    return TransferSpec(direction, group, blocks, slots, first, draw(st.integers(0, 5)))


@st.composite
def cases(draw: st.DrawFn, most_transfers: int = 5) -> Case:
    layout = draw(layouts())
    several = tuple(draw(transfers(layout)) for _ in range(draw(st.integers(1, most_transfers))))
    return Case(layout, NUM_SLOTS, draw(staging(layout, several)), several)


@st.composite
def staging(draw: st.DrawFn, layout: LayoutSpec, several: tuple[TransferSpec, ...]) -> int:
    """Kernels where they can carry every group, and for small transfers only: interpreting one takes 2 ms for a tile,
    which may hold no more than 1 KiB.
    """
    nbytes = sum(len(each.blocks) * plane.block_bytes for each in several for plane in layout.groups[each.group])
    able = layout.blocks_per_slot == 1 or layout.slot_order == "block-major"
    return draw(st.sampled_from((0, STAGING))) if able and nbytes <= MOST_INTERPRETED_BYTES else 0


def place(device: kvoffload.Device, spec: LayoutSpec, seed: int) -> tuple[KVLayout, list[DeviceBuffer]]:
    """Allocate a layout, with random bytes everywhere, padding and gaps included."""
    buffers = [device.allocate(nbytes) for nbytes in spec.allocations]
    for index, buffer in enumerate(buffers):
        scramble(buffer, seed + index)
    groups = [
        [
            Plane(
                buffers[plane.allocation].address + plane.offset,
                block_bytes=plane.block_bytes,
                num_blocks=plane.num_blocks,
                block_stride=plane.block_stride,
                owner=buffers[plane.allocation],
            )
            for plane in group
        ]
        for group in spec.groups
    ]
    return KVLayout(groups, blocks_per_slot=spec.blocks_per_slot, slot_order=spec.slot_order), buffers


def slab_of(planes: list[Plane]) -> DeviceBuffer:
    """The buffer behind the planes of `Device.allocate_planes`."""
    owner = planes[0].owner
    assert isinstance(owner, DeviceBuffer)
    return owner


def copiers_of(device: kvoffload.Device) -> list[CopierName]:
    """The copiers that can run on a device."""
    missing = why_not(device.capabilities)
    return [name for name in COPIERS if missing[name] is None]


def engine_on(device: kvoffload.Device, **options: Any) -> OffloadEngine:
    """A small engine over a slab of its own; transfers take the copy engine unless `staging_bytes` says otherwise."""
    layout = KVLayout([device.allocate_planes(4, block_bytes=64, num_blocks=8)])
    return OffloadEngine(layout, device=device, num_slots=8, **{**COPY_ENGINE_ONLY, **options})

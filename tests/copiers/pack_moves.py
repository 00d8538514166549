"""Layouts and transfers for pack, drawn by hypothesis or at random, and what a caller of it may check."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import pytest
from hypothesis import strategies as st
from strategies import Draw, LayoutSpec, PlaneSpec, place

import kvoffload
from kvoffload import NO_WAIT, Direction, Job, OffloadEngine
from kvoffload.copiers import BatchCopier, pack_kernels
from kvoffload.copiers.table_arena import Table
from kvoffload.device.buffers import DeviceBuffer
from kvoffload.kernels import LoadedKernel
from kvoffload.testing import Mirror
from kvoffload.tuning import CopierName

NUM_SLOTS = 6
BLOCK_BYTES = {
    16: (16, 48, 656, 2048, 4096, 18 * 1024),
    8: (8, 24, 1000, 2056),
    4: (4, 20, 100, 2052),
    1: (1, 3, 5, 17, 1001, 2047),
}  # by what all addresses and sizes are multiples of

T = TypeVar("T")


class Chance(Protocol):
    """Where choices come from."""

    def number(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""


class Drawn:
    """Choices of hypothesis, which it can make smaller."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def number(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))


class Seeded:
    """Choices at random."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def number(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high + 1))


class Move(NamedTuple):
    """A transfer, how it is carried, and in which parts."""

    direction: Direction
    group: int
    blocks: list[int]
    slots: list[int]
    first_sub_block: int
    copier: CopierName
    parts: list[list[int]] | None = None


def store(blocks: Any, slots: Any, copier: CopierName = "pack") -> Move:
    return Move(Direction.STORE, 0, list(blocks), list(slots), 0, copier)


def load(slots: Any, blocks: Any, copier: CopierName = "pack") -> Move:
    return Move(Direction.LOAD, 0, list(blocks), list(slots), 0, copier)


def pick(chance: Chance, options: Sequence[T]) -> T:
    return options[chance.number(0, len(options) - 1)]


def layout_spec(chance: Chance) -> LayoutSpec:
    """One to three groups; planes of one or two sizes, padded, at odd addresses, in one allocation or one each, or
    block-major."""
    allocations: list[int] = []
    groups = [_group(chance, allocations) for _ in range(pick(chance, (1, 1, 2, 3)))]
    return LayoutSpec(tuple(allocations), tuple(groups), pick(chance, (1, 2, 3, 8)), "block-major")


def _group(chance: Chance, allocations: list[int]) -> tuple[PlaneSpec, ...]:
    multiple = pick(chance, tuple(BLOCK_BYTES))
    sizes = [pick(chance, BLOCK_BYTES[multiple]) for _ in range(chance.number(1, 2))]
    padding, offset = (multiple * pick(chance, (0, 0, 1, 3)) for _ in range(2))
    num_blocks = chance.number(1, 5 if max(sizes) > 4096 else 16)
    placement = pick(chance, ("scattered", "slab", "block-major"))
    count, scattered = chance.number(1, 5), placement == "scattered"
    planes, at, first = [], offset, len(allocations)
    if placement == "block-major":
        of_planes = [sizes[index % len(sizes)] for index in range(count)]
        stride = sum(of_planes) + padding
        allocations.append(offset + stride * num_blocks)
        starts = itertools.accumulate(of_planes, initial=offset)
        return tuple(
            PlaneSpec(first, start, size, stride, num_blocks) for start, size in zip(starts, of_planes, strict=False)
        )
    for index in range(count):
        size = sizes[index % len(sizes)]
        span = (size + padding) * (num_blocks - 1) + size
        planes.append(PlaneSpec(first + index * scattered, at, size, size + padding, num_blocks))
        at += span + multiple
        if scattered:
            allocations.append(at)
            at = offset
    if not scattered:
        allocations.append(at)
    return tuple(planes)


def move(chance: Chance, layout: LayoutSpec, copier: CopierName = "pack") -> Move:
    """A valid transfer, with partial first and last slots, and repeats among its sources; every second load in parts
    of planes that follow each other.
    """
    direction = pick(chance, tuple(Direction))
    group = chance.number(0, len(layout.groups) - 1)
    num_blocks, factor = layout.groups[group][0].num_blocks, layout.blocks_per_slot
    first = chance.number(0, factor - 1)
    count = chance.number(1, NUM_SLOTS * factor - first)
    if direction is Direction.LOAD:
        count = min(count, num_blocks)
    rng = np.random.default_rng(chance.number(0, 1 << 16))
    spanned = -(-(count + first) // factor)
    if direction is Direction.LOAD:
        blocks, slots = rng.permutation(num_blocks)[:count], rng.integers(0, NUM_SLOTS, spanned)
    else:
        blocks, slots = rng.integers(0, num_blocks, count), rng.permutation(NUM_SLOTS)[:spanned]
    parts, planes = None, len(layout.groups[group])
    if direction is Direction.LOAD and planes > 1 and chance.number(0, 1):
        borders = sorted({0, planes, *(chance.number(1, planes - 1) for _ in range(2))})
        parts = [rng.permutation(range(*each)).tolist() for each in itertools.pairwise(borders)]
        parts = [parts[number] for number in rng.permutation(len(parts))]
    return Move(direction, group, blocks.tolist(), slots.tolist(), first, copier, parts)


def submit(engine: OffloadEngine, each: Move, after: Any = NO_WAIT) -> Job:
    return engine.submit(
        each.direction,
        each.blocks,
        each.slots,
        group=each.group,
        first_sub_block=each.first_sub_block,
        after=after,
        copier=each.copier,
        parts=each.parts,
    )


def expect(mirror: Mirror, each: Move) -> None:
    mirror.expect(each.direction, each.blocks, each.slots, group=each.group, first_sub_block=each.first_sub_block)


def check_moves(
    device: kvoffload.Device, spec: LayoutSpec, moves: Sequence[Move], seed: int, blocks: int = 5, **options: Any
) -> None:
    """Submit them one after the other without waiting, and compare every byte with a naive loop.

    Args:
        blocks: that the ring has room for.
        options: of the engine.
    """
    layout, buffers = place(device, spec, seed)
    staging_bytes = blocks * (512 + max(group.bytes_per_block for group in layout.groups))
    with OffloadEngine(layout, device=device, num_slots=NUM_SLOTS, staging_bytes=staging_bytes, **options) as engine:
        fill_slots(engine, seed)
        mirror = Mirror(engine, buffers)
        jobs = [submit(engine, each) for each in moves]
        engine.drain(60)
        for job, each in zip(jobs, moves, strict=True):
            result = job.wait(10)
            assert result.copier == each.copier
            assert result.nbytes == len(each.blocks) * layout.groups[each.group].bytes_per_block
            expect(mirror, each)
        mirror.check()
    for buffer in buffers:
        buffer.close()


def fill_slots(engine: OffloadEngine, seed: int) -> None:
    engine.slots[:] = np.random.default_rng(seed).integers(0, 256, engine.slots.shape, dtype=np.uint8)


def separate(
    device: kvoffload.Device, count: int, block_bytes: int, num_blocks: int, offset: int = 0
) -> tuple[list[kvoffload.Plane], list[DeviceBuffer]]:
    """Planes in an allocation of their own each, `offset` bytes in."""
    buffers = [device.allocate(block_bytes * num_blocks + 2 * offset) for _ in range(count)]
    planes = [
        kvoffload.Plane(buffer.address + offset, block_bytes=block_bytes, num_blocks=num_blocks, owner=buffer)
        for buffer in buffers
    ]
    return planes, buffers


def small_tables(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """Pieces of so many blocks at most, and room for 2 KiB of tables of blocks in each direction."""
    monkeypatch.setattr(BatchCopier, "segment_operations", blocks)
    monkeypatch.setattr(pack_kernels, "ARENA_BYTES", 2048)


def overwrite_on_release(monkeypatch: pytest.MonkeyPatch, block: int, slot_address: int) -> list[int]:
    """Have tables overwritten when they are given back, with one block and slot for all; where they began."""
    release, starts = Table.release, []

    def overwriting(table: Table) -> None:
        if not table.released:
            starts.append(table.start)
            table.words[: len(table.words) // 2] = block
            table.words[len(table.words) // 2 :] = slot_address
        release(table)

    monkeypatch.setattr(Table, "release", overwriting)
    return starts


class Launch(NamedTuple):
    """A launch of a kernel as its caller asked for it."""

    stream: int
    grid: int
    arguments: tuple[int, ...]


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every launch from now on."""
    launches: list[Launch] = []
    queue = LoadedKernel.queue

    def recording(kernel: LoadedKernel, stream: int, grid: int) -> None:
        launches.append(Launch(stream, grid, kernel.spec.arguments.unpack_from(kernel.pack.args[0])))
        queue(kernel, stream, grid)

    monkeypatch.setattr(LoadedKernel, "queue", recording)
    return launches

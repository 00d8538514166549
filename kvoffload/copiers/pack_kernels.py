"""The kernels of `pack`, the coding ones among them, and the tables that they read.

A kernel gets planes and blocks, never an address per copy, so the host writes 16 bytes per block. Planes are cut into
*fragments* of one power of two, at most 2 KiB; the last fragment of a block may be shorter. A table of fragments is
written once, to device memory. The blocks of a piece are written to pinned memory; one program copies them into device
memory, where thousands of programs read them. If the group has a codec, a fragment is a chunk, and a third row of the
pinned table has which blocks do not fit.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from kvoffload.copiers.base import Submit
from kvoffload.copiers.table_arena import Table, TableArena
from kvoffload.device.pinned import PinnedMemory
from kvoffload.driver import Capabilities, Driver, address_of
from kvoffload.driver.core import LEGACY_STREAM
from kvoffload.internal.teardown import run_all
from kvoffload.internal.types import Int64Array
from kvoffload.kernels import THREADS_PER_WARP, KernelSpec, LoadedKernel, load_kernel
from kvoffload.layout.coding import Coding
from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import Group
from kvoffload.planning.transfer_plan import STORE, BlockPlan, Direction

_FRAGMENT_BYTES = 2048
_WORDS_PER_THREAD = 8
_UNALIGNED_WORDS_PER_THREAD = 4  # each is then of a fragment of its own, whose addresses take registers
_WARPS = 4  # a program moves one tile, within device memory; 2 and 8 measured the same
_MAX_TILE_FRAGMENTS = 1024
_MAX_IDLE = 1 / 8  # of the threads: longer fragments may leave so many without a word to copy
# Of coding kernels, whose programs are small, to find room beside long ones. On an H100, encoding / decoding, GB/s:
# 2 KiB by a warp of 72 registers 1,380 / 1,480, of as many as the compiler takes 1,300 / 1,480; by 2 warps 1,250 /
# 1,410, by 4 warps 1,060 / 1,330; 4 KiB by 2 warps 1,130 / 1,360.
_CODED_TILE_BYTES, _CODING_WARPS, _CODING_REGISTERS = 2048, 1, 72
_SUB_BLOCK_SHIFT = 40  # a table's first word for a block: its id, and above these bits its place in the slot
ARENA_BYTES = 1 << 20  # for each direction
KERNEL_PLACES = 4  # of a driver's queue, that the two launches of a piece take
_TABLES = (("fragment_table", "i64"), ("block_table", "i64"))
_COUNTS = (("row_fragments", "i32"), ("num_fragments", "i32"), ("num_blocks", "i32"))


class FragmentShape(NamedTuple):
    """How the blocks of a group are cut: into fragments of at most `fragment_bytes`, in words of `word_bytes`, at
    multiples of `alignment` bytes. `uniform`: every fragment has `fragment_bytes`. `coding`: fragments are its chunks.
    """

    fragment_bytes: int
    word_bytes: int
    alignment: int
    uniform: bool = True
    coding: Coding | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes of a whole fragment in a slot."""
        return self.fragment_bytes if self.coding is None else self.coding.record_bytes

    @property
    def tile_fragments(self) -> int:
        """How many fragments a program moves."""
        nbytes = _tile_bytes(self.alignment) if self.coding is None else _CODED_TILE_BYTES
        return min(_MAX_TILE_FRAGMENTS, nbytes // self.fragment_bytes)


def _tile_bytes(alignment: int) -> int:
    words = _WORDS_PER_THREAD if alignment == 16 else _UNALIGNED_WORDS_PER_THREAD
    return _WARPS * THREADS_PER_WARP * words * min(8, alignment)


def kernel_spec(shape: FragmentShape, direction: Direction) -> KernelSpec:
    if shape.coding is not None:
        return KernelSpec(
            module="kvoffload.kernels.coding",
            function="encode" if direction is STORE else "decode",
            parameters=(*_TABLES, ("outcomes", "i64"), *_COUNTS),
            constants=(
                ("VALUES", shape.coding.values),
                ("CHUNKS", shape.tile_fragments),
                ("ALIGNMENT", shape.alignment),
                ("SUB_BLOCK_SHIFT", _SUB_BLOCK_SHIFT),
            ),
            warps=_CODING_WARPS,
            registers=_CODING_REGISTERS,
        )
    return KernelSpec(
        module="kvoffload.kernels.pack",
        function="pack",
        parameters=(*_TABLES, *_COUNTS),
        constants=(
            ("STORE", int(direction is STORE)),
            ("WORD_BITS", 8 * shape.word_bytes),
            ("WORDS", shape.fragment_bytes // shape.word_bytes),
            ("FRAGMENTS", shape.tile_fragments),
            ("ALIGNMENT", shape.alignment),
            ("UNIFORM", int(shape.uniform)),
            ("SUB_BLOCK_SHIFT", _SUB_BLOCK_SHIFT),
        ),
        warps=_WARPS,
    )


TABLE_SPEC = KernelSpec(
    module="kvoffload.kernels.pack",
    function="copy_table",
    parameters=(("source", "i64"), ("target", "i64"), ("num_words", "i32")),
    constants=(("WORDS", 256),),
    warps=4,
)


def fragment_shape_of(group: Group) -> FragmentShape:
    """Return the longest fragments that leave few threads idle, in the widest words that all addresses allow."""
    coding = group.coding
    if coding is not None:
        alignment = math.gcd(16, *(each for plane in group.planes for each in (plane.address, plane.block_stride)))
        return FragmentShape(coding.chunk_bytes, 4, alignment, coding=coding)
    alignment = math.gcd(16, group.bytes_per_block)
    for plane, offset in zip(group.planes, group.host_offsets.tolist(), strict=True):
        alignment = math.gcd(alignment, plane.address, plane.block_stride, plane.block_bytes, offset)
    alignment = alignment if alignment >= 4 else 1
    widths = [plane.block_bytes for plane in group.planes]
    longest = min(_FRAGMENT_BYTES, _tile_bytes(alignment))
    fragment_bytes = min(longest, 1 << (max(widths).bit_length() - 1))
    while _idle(widths, fragment_bytes) > _MAX_IDLE:  # none are idle where a fragment is as long as the alignment
        fragment_bytes //= 2
    return FragmentShape(fragment_bytes, min(8, alignment), alignment, uniform=_idle(widths, fragment_bytes) == 0)


def _idle(widths: list[int], fragment_bytes: int) -> float:
    """Return the share of the threads that have nothing to copy."""
    return 1 - sum(widths) / sum(-(-width // fragment_bytes) * fragment_bytes for width in widths)


def fragment_table(group: Group, shape: FragmentShape) -> Int64Array:
    """Return the fragments of a group's planes: int64, (5, fragments).

    Its rows: address in block 0, block stride, offset in the slot, bytes between sub-blocks, number of words.
    """
    columns: list[Int64Array] = []
    places = zip(group.planes, group.host_offsets.tolist(), group.host_steps.tolist(), strict=True)
    for plane, offset, step in places:
        start = np.arange(0, plane.block_bytes, shape.fragment_bytes)
        words = np.minimum(shape.fragment_bytes, plane.block_bytes - start) // shape.word_bytes
        stride, sub_blocks = np.full(start.shape, plane.block_stride), np.full(start.shape, step)
        in_slot = offset + start // shape.fragment_bytes * shape.slot_bytes
        columns.append(np.stack([plane.address + start, stride, in_slot, sub_blocks, words]))
    return np.ascontiguousarray(np.concatenate(columns, axis=1))


class PlaneRange(NamedTuple):
    """Planes of a group that follow each other: their fragments in its table, and their bytes in a block of a slot."""

    first_fragment: int
    num_fragments: int
    offset: int
    nbytes: int


class _GroupKernels(NamedTuple):
    """The kernels and fragments of a group. They may outlive a forgotten engine, so they must not keep planes alive.

    Attributes:
        fragments: address of the table in device memory, see `fragment_table`.
        starts: the first fragment of each plane, and how many there are.
        offsets: where the bytes of each plane begin in a slot, and their number.
        tile: fragments that a program moves.
        coded: whether the kernels code.
        store, load: the kernels.
    """

    fragments: int
    starts: tuple[int, ...]
    offsets: tuple[int, ...]
    tile: int
    coded: bool
    store: LoadedKernel
    load: LoadedKernel


class PackKernels:
    """Kernels, fragment tables, and pinned memory for tables of blocks, which the pack copiers of an engine share.

    Args:
        driver: its context must be current in `open` and `close`.

    Attributes:
        copy_table: the kernel that brings a table of blocks to the device.
        arenas: pinned memory for tables of blocks: one for stores, one for loads.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._kernels: list[LoadedKernel] = []
        self._modules: list[int] = []
        self._copying = False  # fragments to the device
        self._fragment_tables: list[int] = []  # addresses of device memory
        self._tables: list[PinnedMemory] = []  # one, once it is being pinned
        self._groups: list[_GroupKernels] = []
        self.arenas: tuple[TableArena, ...] = ()  # of stores, of loads

    def open(self, capabilities: Capabilities, layout: KVLayout) -> None:
        """Load the kernels for the layout's groups, and allocate tables.

        Raises:
            CapabilityError: no kernel can run here, and why.
            CapacityError, DriverError: memory is short, or the driver failed. Then call `close`.
        """

        def loaded(spec: KernelSpec) -> LoadedKernel:
            if all(kernel.spec != spec for kernel in self._kernels):
                self._kernels.append(load_kernel(self.driver, capabilities, spec, modules=self._modules))
            return next(kernel for kernel in self._kernels if kernel.spec == spec)

        self.copy_table = loaded(TABLE_SPEC)
        for group in layout.groups:
            shape = fragment_shape_of(group)
            store, load = (loaded(kernel_spec(shape, direction)) for direction in Direction)
            fragments = fragment_table(group, shape)
            self.driver.create("cuMemAlloc", self._fragment_tables, fragments.nbytes)
            address = int(self._fragment_tables[-1])
            self._copying = True
            self.driver.copy_to_device(address, address_of(fragments), fragments.nbytes)
            self._copying = False
            counts = [-(-plane.block_bytes // shape.fragment_bytes) for plane in group.planes]
            starts, offsets = (0, *accumulate(counts)), (*group.host_offsets.tolist(), group.slot_block_bytes)
            tile, coded = shape.tile_fragments, shape.coding is not None
            self._groups.append(_GroupKernels(address, starts, offsets, tile, coded, store, load))
        tables = PinnedMemory(self.driver, 2 * ARENA_BYTES, holder=self._tables)
        self.arenas = tuple(
            TableArena(half, self.driver.host_device_address(address_of(half))) for half in tables.array.reshape(2, -1)
        )

    def write_blocks(self, blocks: BlockPlan) -> Table | None:
        """Return a table of these blocks; None while there is no room. Its second row, where each block lies in the
        ring, is left to the caller.
        """
        count, coded = len(blocks.blocks), self._groups[blocks.group_index].coded
        table = self.arenas[0 if blocks.direction is STORE else 1].take((3 if coded else 2) * count)
        if table is not None:
            if coded:
                table.slots, table.unfit = blocks.slots, table.words[2 * count :]
                table.unfit[:] = 0
            table.words[:count] = blocks.blocks
            if blocks.sub_block is not None:
                table.words[:count] |= blocks.sub_block << _SUB_BLOCK_SHIFT
        return table

    def planes(self, group_index: int, first: int, stop: int) -> PlaneRange:
        """Return the planes `[first, stop)` of a group."""
        _, starts, offsets, *_ = self._groups[group_index]
        return PlaneRange(starts[first], starts[stop] - starts[first], offsets[first], offsets[stop] - offsets[first])

    def launch(self, blocks: BlockPlan, planes: PlaneRange, table: Table, address: int) -> Submit:
        """Return the launches that copy their table to this address in device memory, and then move these planes of the
        blocks in it.

        Read over the link by thousands of programs, the table would take too long.
        """
        count, of = len(blocks.blocks), self._groups[blocks.group_index]
        kernel = of.store if blocks.direction is STORE else of.load
        fragments = planes.num_fragments
        self.copy_table.pack(table.device_address, address, 2 * count)
        outcomes = (table.device_address + 16 * count,) if of.coded else ()
        kernel.pack(of.fragments + 8 * planes.first_fragment, address, *outcomes, of.starts[-1], fragments, count)
        return partial(self._submit, kernel, -(-fragments * count // of.tile))

    def _submit(self, kernel: LoadedKernel, grid: int, stream: int) -> None:
        self.copy_table.queue(stream, 1)
        kernel.queue(stream, grid)

    def restore(self, tables: list[Table]) -> None:
        for arena in self.arenas:
            arena.restore(tables)

    def keep(self) -> None:
        for tables in self._tables:
            tables.keep()

    def close(self) -> None:
        """Free everything; nothing on the GPU may still use it. If it is interrupted, call it again."""
        if self._copying:  # and interrupted: the copy may still be queued
            self.driver.stream_synchronize(LEGACY_STREAM)
            self._copying = False
        steps = [partial(self.driver.destroy, "cuModuleUnload", self._modules)]
        steps.append(partial(self.driver.destroy, "cuMemFree", self._fragment_tables))
        run_all((*steps, *(tables.release for tables in self._tables)))

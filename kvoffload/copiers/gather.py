"""Blocks that a kernel carries: for planes that do not fold, and for blocks too small for the copy engine.

The kernel gets planes and blocks, never an address per copy, so the host writes 16 bytes per block. Planes are cut into
*fragments* of one power of two, at most 2 KiB; the last fragment of a block may be shorter. A table of fragments is
written once, to device memory. The blocks of a transfer are written to pinned memory, which the kernel reads over the
link while it copies.

A load in parts launches the same kernel once per part, on the fragments of the part's planes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import numpy as np

from kvoffload.copiers.base import Staged, Submit, Work
from kvoffload.copiers.part_fragments import BlocksInParts, BlocksOfPart, Fragments, PartFragments
from kvoffload.copiers.table_arena import Table, TableArena
from kvoffload.device.pinned import PinnedMemory, RegisteredMemory
from kvoffload.driver import Capabilities, Driver, SourceOrder, address_of
from kvoffload.driver.core import LEGACY_STREAM
from kvoffload.internal.teardown import run_all
from kvoffload.internal.types import Int64Array
from kvoffload.kernels import THREADS_PER_WARP, KernelSpec, LoadedKernel, load_kernel
from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import Group
from kvoffload.planning.layer_groups import Parts
from kvoffload.planning.transfer_plan import BlockPlan, Direction

_FRAGMENT_BYTES = 2048
_WORDS_PER_THREAD = 8
_UNALIGNED_WORDS_PER_THREAD = 4  # each is then of a fragment of its own, whose addresses take registers
# Warps of a program; each thread has 8 words in flight. Two programs of 1024 threads fill PCIe Gen5 x16 with loads.
# Several such programs store more than the link takes, and the rest delays other programs' access to memory. Measured
# on an H200, GB/s alone, and how many times as long a bf16 matrix product takes meanwhile: 2 of 1024 threads, loads 50,
# 1.03; stores 51, 1.3 to 1.6; 4 of 256 threads, stores 51, 1.12; 1 of 1024, stores 35, 1.02. (Waiting for the stores of
# each tile, membar.sys, came to 33 GB/s with 4 of 1024.)
_WARPS = 32
_WARPS_OF_SEVERAL_STORING = 8
_WARPS_OF_PACKING = 8  # a program moves one tile; 2 and 4 measured the same, but a tile must hold a whole fragment
_MAX_TILE_FRAGMENTS = 1024
_MAX_IDLE = 1 / 8  # of the threads: longer fragments may leave so many without a word to copy
_SUB_BLOCK_SHIFT = 40  # a table's first word for a block: its id, and above these bits its place in the slot
MAX_TABLE_BLOCKS = 16384
ARENA_BYTES = 1 << 20  # for each direction
_MAX_ITEMS = (1 << 31) - (1 << 22)  # fragments of one launch: the kernel counts them in 32 bits, and one step beyond
_LAUNCH_PLACES = 2
_MOST_DIVISIONS = 64  # divisions of a group into parts; their fragments stay until the engine is closed
_DIVISIONS_BYTES = 4 << 20  # of device memory for these fragments, at most


class FragmentShape(NamedTuple):
    """How the blocks of a group are cut: into fragments of at most `fragment_bytes`, in words of `word_bytes`, at
    multiples of `alignment` bytes. `uniform`: every fragment has `fragment_bytes`.
    """

    fragment_bytes: int
    word_bytes: int
    alignment: int
    uniform: bool = True

    def tile_fragments(self, warps: int) -> int:
        """How many fragments a program with this many warps moves at a time."""
        return min(_MAX_TILE_FRAGMENTS, _tile_bytes(self.alignment, warps) // self.fragment_bytes)


def _tile_bytes(alignment: int, warps: int) -> int:
    words = _WORDS_PER_THREAD if alignment == 16 else _UNALIGNED_WORDS_PER_THREAD
    return warps * THREADS_PER_WARP * words * min(8, alignment)


def kernel_spec(shape: FragmentShape, direction: Direction, programs: int) -> KernelSpec:
    """The kernel for a shape and so many programs; 0: one for each tile."""
    several_storing = direction is Direction.STORE and programs > 1
    warps = _WARPS_OF_PACKING if programs == 0 else _WARPS_OF_SEVERAL_STORING if several_storing else _WARPS
    return KernelSpec(
        module="kvoffload.kernels.gather",
        function="gather",
        parameters=(("fragment_table", "i64"), ("block_table", "i64"), ("num_fragments", "i32"), ("num_blocks", "i32")),
        constants=(
            ("STORE", int(direction is Direction.STORE)),
            ("WORD_BITS", 8 * shape.word_bytes),
            ("WORDS", shape.fragment_bytes // shape.word_bytes),
            ("FRAGMENTS", shape.tile_fragments(warps)),
            ("ALIGNMENT", shape.alignment),
            ("UNIFORM", int(shape.uniform)),
            ("SUB_BLOCK_SHIFT", _SUB_BLOCK_SHIFT),
        ),
        warps=warps,
    )


TABLE_SPEC = KernelSpec(
    module="kvoffload.kernels.gather",
    function="copy_table",
    parameters=(("source", "i64"), ("target", "i64"), ("num_words", "i32")),
    constants=(("WORDS", 256),),
    warps=4,
)


def fragment_shape_of(group: Group, slot_bytes: int, pool_address: int) -> FragmentShape:
    """The longest fragments that leave few threads idle, in the widest words that all addresses allow."""
    alignment = math.gcd(16, slot_bytes, pool_address)
    for plane, offset in zip(group.planes, group.host_offsets.tolist(), strict=True):
        alignment = math.gcd(alignment, plane.address, plane.block_stride, plane.block_bytes, offset)
    alignment = alignment if alignment >= 4 else 1
    widths = [plane.block_bytes for plane in group.planes]
    longest = min(_FRAGMENT_BYTES, _tile_bytes(alignment, _WARPS_OF_SEVERAL_STORING))
    fragment_bytes = min(longest, 1 << (max(widths).bit_length() - 1))
    while _idle(widths, fragment_bytes) > _MAX_IDLE:  # none are idle where a fragment is as long as the alignment
        fragment_bytes //= 2
    return FragmentShape(fragment_bytes, min(8, alignment), alignment, uniform=_idle(widths, fragment_bytes) == 0)


def _idle(widths: list[int], fragment_bytes: int) -> float:
    """The share of the threads that have nothing to copy."""
    return 1 - sum(widths) / sum(-(-width // fragment_bytes) * fragment_bytes for width in widths)


def fragment_table(group: Group, shape: FragmentShape, planes: Iterable[int] | None = None) -> Int64Array:
    """The fragments of a group's planes, or of some: int64, (5, fragments).

    Its rows: address in block 0, block stride, offset in the slot, bytes between sub-blocks, number of words.
    """
    columns: list[Int64Array] = []
    for index in range(len(group.planes)) if planes is None else sorted(planes):
        plane, offset, step = group.planes[index], int(group.host_offsets[index]), int(group.host_steps[index])
        start = np.arange(0, plane.block_bytes, shape.fragment_bytes)
        words = np.minimum(shape.fragment_bytes, plane.block_bytes - start) // shape.word_bytes
        stride, sub_blocks = np.full(start.shape, plane.block_stride), np.full(start.shape, step)
        columns.append(np.stack([plane.address + start, stride, offset + start, sub_blocks, words]))
    return np.ascontiguousarray(np.concatenate(columns, axis=1))


class _GroupKernels(NamedTuple):
    """The kernels and fragments of a group. They may outlive a forgotten engine, so they must not keep planes alive.

    Attributes:
        fragments: of all planes.
        room: device addresses behind these, each with room for the fragments of one division into parts.
        kernels: by (stores, programs): the kernel, and the fragments of a tile. Programs are 0 (one for each tile), 1,
            or 2 (several).
    """

    group: Group
    shape: FragmentShape
    fragments: Fragments
    room: range
    kernels: dict[tuple[bool, int], tuple[LoadedKernel, int]]


class GatherKernels:
    """Kernels, fragment tables, and pinned memory for tables of blocks, which the gather copiers of an engine share.

    Args:
        driver: its context must be current in `open` and `close`.
        memory: the slot pool.

    Attributes:
        groups: kernels and fragments of each group.
        arenas: pinned memory for tables of blocks: one for stores, one for loads.
    """

    def __init__(self, driver: Driver, memory: RegisteredMemory) -> None:
        self.driver = driver
        self._memory = memory
        self._kernels: list[LoadedKernel] = []
        self._modules: list[int] = []
        self._copying = False  # fragments to the device
        self._fragment_tables: list[int] = []  # addresses of device memory
        self._tables: list[PinnedMemory] = []  # one, once it is being pinned
        self.groups: list[_GroupKernels] = []
        self.arenas: tuple[TableArena, ...] = ()  # of stores, of loads
        self._divided: list[dict[Parts, PartFragments]] = []

    def open(self, capabilities: Capabilities, layout: KVLayout) -> None:
        """Load the kernels for the layout's groups, and allocate tables.

        Raises:
            CapabilityError: no kernel can run here, and why.
            CapacityError, DriverError: memory is short, or the driver failed. Then call `close`.
        """
        self.copy_table = load_kernel(self.driver, capabilities, TABLE_SPEC, modules=self._modules)
        pool_address = int(self._memory.device_addresses(np.array([self._memory.address]))[0])
        for group in layout.groups:
            shape = fragment_shape_of(group, layout.slot_bytes, pool_address)
            kernels = {}
            for stores, programs in itertools.product((True, False), range(3)):
                spec = kernel_spec(shape, Direction.STORE if stores else Direction.LOAD, programs)
                if all(kernel.spec != spec for kernel in self._kernels):
                    self._kernels.append(load_kernel(self.driver, capabilities, spec, modules=self._modules))
                kernel = next(kernel for kernel in self._kernels if kernel.spec == spec)
                kernels[stores, programs] = kernel, spec.constant("FRAGMENTS")
            fragments = fragment_table(group, shape)
            divisions = min(_MOST_DIVISIONS, _DIVISIONS_BYTES // fragments.nbytes) if len(group.planes) > 1 else 0
            self.driver.create("cuMemAlloc", self._fragment_tables, (1 + divisions) * fragments.nbytes)
            address = int(self._fragment_tables[-1])
            self._copying = True
            self.driver.copy_to_device(address, address_of(fragments), fragments.nbytes)
            self._copying = False
            room = range(address, address + (1 + divisions) * fragments.nbytes, fragments.nbytes)[1:]
            of_all = Fragments(fragments.shape[1], address)
            self.groups.append(_GroupKernels(group.disowned(), shape, of_all, room, kernels))
            self._divided.append({})
        tables = PinnedMemory(self.driver, 2 * ARENA_BYTES, holder=self._tables)
        self.arenas = tuple(
            TableArena(half, self.driver.host_device_address(address_of(half))) for half in tables.array.reshape(2, -1)
        )

    def why_not_in_parts(self, group: int, parts: Parts) -> str | None:
        """Why the kernel cannot load a group in these parts; None if it can."""
        of, divided = self.groups[group], self._divided[group]
        most = (ARENA_BYTES // 8 - 2 * MAX_TABLE_BLOCKS) // 5  # as many as fit behind the longest table
        if of.fragments.num_fragments > most:
            count = of.fragments.num_fragments
            return f"its blocks have {count} fragments of {of.shape.fragment_bytes} bytes, more than {most}"
        if parts not in divided and len(divided) == len(of.room):
            return f"the GPU has room for {len(of.room)} divisions of its planes into parts, and all are taken"
        return None

    def in_parts(self, group: int, parts: Parts) -> PartFragments:
        """The fragments of a group by part; ask `why_not_in_parts` first. They are kept: queued launches read them."""
        of, divided = self.groups[group], self._divided[group]
        if parts not in divided:
            tables = [fragment_table(of.group, of.shape, planes) for planes in parts]
            divided[parts] = PartFragments(of.room[len(divided)], tables)
        return divided[parts]

    def slot_addresses(self, addresses: Int64Array) -> Int64Array:
        return self._memory.device_addresses(addresses)

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


class GatherCopier:
    """A persistent grid of at most `programs` programs, each on a multiprocessor of its own. 0: a short program for
    each tile, on all of them, for a PackCopier.
    """

    is_kernel = True

    def __init__(self, shared: GatherKernels, programs: int) -> None:
        most_fragments = max(group.fragments.num_fragments for group in shared.groups)
        self.segment_operations = min(MAX_TABLE_BLOCKS, _MAX_ITEMS // most_fragments)
        self._shared = shared
        self._programs = programs

    def prepare(self, plan: BlockPlan) -> Work:
        if plan.group.num_parts == 1:
            return plan
        return BlocksInParts(plan, self._shared.in_parts(plan.group_index, plan.group.parts))

    def queue_cost(self, operations: int) -> int:  # noqa: ARG002
        return _LAUNCH_PLACES

    def stage(self, work: BlockPlan | BlocksOfPart, order: SourceOrder) -> Staged | None:  # noqa: ARG002
        if not isinstance(work, BlocksOfPart):
            table = self._write(work)
            if table is None:
                return None
            return Staged(self.pack(work, self._shared.groups[work.group_index].fragments, table.device_address), table)
        # Blocks of a part: an earlier part's launch may have left their table. The very first launch also copies the
        # fragments of every part to the GPU, from the words behind its blocks.
        blocks, fragments, table = work.blocks, work.whole.fragments, work.table
        missing = fragments.missing
        if table is None:
            table = self._write(blocks, 0 if missing is None else len(missing))
            if table is None:
                return None
            work.whole.tables[work.first] = table
        submit = self.pack(blocks, fragments.parts[work.part], table.device_address)
        if missing is not None:
            source = table.words[2 * len(blocks) :]
            source[:] = missing
            submit = partial(self._submit_behind_fragments, fragments, source, submit)
        return Staged(submit, table)

    def _write(self, blocks: BlockPlan, more_words: int = 0) -> Table | None:
        """A table of these blocks with `more_words` behind it; None while there is no room."""
        table = self.write_blocks(blocks, more_words)
        if table is not None:
            count = len(blocks)
            table.words[count : 2 * count] = self._shared.slot_addresses(blocks.slot_address)
        return table

    def write_blocks(self, blocks: BlockPlan, more_words: int = 0) -> Table | None:
        """As `_write`, but the second row of the table, the addresses of the slots, is left to the caller."""
        count = len(blocks)
        arena = self._shared.arenas[0 if blocks.direction is Direction.STORE else 1]
        table = arena.take(2 * count + more_words)
        if table is not None:
            table.words[:count] = blocks.blocks
            if blocks.sub_block is not None:
                table.words[:count] |= blocks.sub_block << _SUB_BLOCK_SHIFT
        return table

    def pack(self, blocks: BlockPlan, fragments: Fragments, table_address: int) -> Submit:
        """The launch that copies these fragments of the blocks in the table there."""
        stores = blocks.direction is Direction.STORE
        kernel, tile_fragments = self._shared.groups[blocks.group_index].kernels[stores, min(self._programs, 2)]
        kernel.pack((fragments.address, table_address, fragments.num_fragments, len(blocks)))
        tiles = -(-fragments.num_fragments * len(blocks) // tile_fragments)
        grid = min(self._programs, tiles) if self._programs else tiles
        return partial(self._submit, kernel, grid)

    def _submit(self, kernel: LoadedKernel, grid: int, stream: int, start: int | None) -> None:
        if start is not None:
            self._shared.driver.event_record(start, stream)
        kernel.queue(stream, grid)

    def _submit_behind_fragments(
        self, fragments: PartFragments, source: Int64Array, submit: Submit, stream: int, start: int | None
    ) -> None:
        self._shared.driver.copy(fragments.address, address_of(source), source.nbytes, stream)
        fragments.missing = None
        submit(stream, start)

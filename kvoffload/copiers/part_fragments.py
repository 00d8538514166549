"""A load in parts by the gather copier: fragments by part on the GPU, and blocks that all parts share.

fragments on the GPU   |fragments of part 0|fragments of part 1|...      for each division of a group into parts
launches               part 0: blocks 0 .. n-1 | part 1: blocks 0 .. n-1 | ...
table of blocks        written for the first launch, read by all
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvoffload.copiers.table_arena import Table
from kvoffload.internal.types import Int64Array
from kvoffload.planning.transfer_plan import BlockPlan


class Fragments(NamedTuple):
    """A table of fragments in device memory, (5, num_fragments), see `fragment_table`."""

    num_fragments: int
    address: int


class PartFragments:
    """The fragments of a group by part, one part after the other on the GPU.

    An asynchronous copy brings them to the GPU, before the first launch that reads them and on its stream. All loads
    launch kernels on this stream, so later kernels find the fragments even if the first load fails. (A synchronous copy
    would wait for the legacy default stream with the engine's lock held, for ever if the caller blocks that stream.)

    Args:
        address: device memory for these fragments only, as large as all tables together.
        tables: one per part, from `fragment_table`.

    Attributes:
        missing: the words to copy to `address`, int64; None once that copy is queued.
        parts: the fragments of each part.
    """

    def __init__(self, address: int, tables: Sequence[Int64Array]) -> None:
        self.address = address
        self.missing: Int64Array | None = np.concatenate([table.reshape(-1) for table in tables])
        before = itertools.accumulate((table.nbytes for table in tables), initial=address)
        self.parts = tuple(Fragments(table.shape[1], start) for table, start in zip(tables, before, strict=False))


class BlocksInParts:
    """The blocks of a load in parts. An operation is a block in a part; parts follow each other.

    Attributes:
        tables: the tables that launches of an earlier part read, by their first block.
    """

    def __init__(self, blocks: BlockPlan, fragments: PartFragments) -> None:
        self.blocks = blocks
        self.fragments = fragments
        self.part_ends = tuple(range(len(blocks), len(self) + 1, len(blocks)))
        self.tables: dict[int, Table] = {}

    def __len__(self) -> int:
        return len(self.blocks) * len(self.fragments.parts)

    def cut(self, start: int, stop: int) -> BlocksOfPart:
        """Operations `[start, stop)`, all of one part."""
        part, first = divmod(start, len(self.blocks))
        return BlocksOfPart(self, part, first, self.blocks.cut(first, first + stop - start))


class BlocksOfPart(NamedTuple):
    """Some of the blocks of a load, from the `first` on, for one of its parts."""

    whole: BlocksInParts
    part: int
    first: int
    blocks: BlockPlan

    @property
    def table(self) -> Table | None:
        """The table of these blocks from an earlier part, unless it was released."""
        table = self.whole.tables.get(self.first)
        return None if table is None or table.released else table

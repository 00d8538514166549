"""A load in parts, as the gather copier launches it: fragments by part on the GPU, and blocks that all parts share.

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
    """The fragments of a group by part, one part's after the other on the GPU.

    They are copied to the GPU with their first use. A synchronous copy would follow the legacy default stream: the
    engine would hold its lock while that stream is busy, and for ever where the caller blocks it. So an asynchronous
    copy of the fragments precedes the first launch that reads them, on its stream. All loads launch their kernels on
    this one stream, so that later kernels find the fragments, even if the first load fails.

    Args:
        address: of device memory for these fragments only, as large as all tables together.
        tables: of each part, from `fragment_table`.

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
    """The blocks of a load, all of them for one part after the other. An operation is a block in a part.

    Attributes:
        tables: by their first block, those that launches of an earlier part read.
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
        """The table of these blocks that an earlier part left, if it is not back with its lender."""
        table = self.whole.tables.get(self.first)
        return None if table is None or table.released else table

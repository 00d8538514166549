"""A load in parts as the gather copier carries it: rows by part on the GPU, and blocks that all parts share.

rows on the GPU     |rows of part 0|rows of part 1|...        for each way of dividing a group into parts
launches            part 0: blocks 0 .. n-1 | part 1: blocks 0 .. n-1 | ...
table of blocks     written by the first of them, read by all of them
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvoffload.copiers.table_arena import Table
from kvoffload.layout.layout import Int64Array
from kvoffload.planning.transfer_plan import BlockPlan


class Rows(NamedTuple):
    """A table of rows in device memory, (5, num_rows), see `row_table`."""

    num_rows: int
    address: int


class PartRows:
    """The rows of a group by part, one part's after the other on the GPU.

    They are not there from the start. A synchronous copy follows the legacy default stream: it would keep the engine's
    lock while that is busy, and for ever where the caller holds it. So whoever launches the first kernel that reads
    them has them copied ahead of it, on its stream. The kernels of all loads have one stream; those behind find the
    rows there, whatever becomes of the load that brought them.

    Args:
        address: of device memory that is theirs, as large as all tables together.
        tables: of each part, from `row_table`.

    Attributes:
        missing: what is to be copied to `address`, int64; None from when that is queued.
        parts: the rows of each part.
    """

    def __init__(self, address: int, tables: Sequence[Int64Array]) -> None:
        self.address = address
        self.missing: Int64Array | None = np.concatenate([table.reshape(-1) for table in tables])
        before = itertools.accumulate((table.nbytes for table in tables), initial=address)
        self.parts = tuple(Rows(table.shape[1], start) for table, start in zip(tables, before, strict=False))


class BlocksInParts:
    """The blocks of a load, all of them for one part after the other. An operation is a block in a part.

    Attributes:
        tables: by their first block, those that launches of an earlier part read.
    """

    def __init__(self, blocks: BlockPlan, rows: PartRows) -> None:
        self.blocks = blocks
        self.rows = rows
        self.part_ends = tuple(range(len(blocks), len(self) + 1, len(blocks)))
        self.tables: dict[int, Table] = {}

    def __len__(self) -> int:
        return len(self.blocks) * len(self.rows.parts)

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

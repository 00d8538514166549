"""Flat copies in chunks, for what does not fold, with the copy engine and no SM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvoffload.driver import Driver, FlatTable, SourceOrder
from kvoffload.plan import TransferPlan

# When its stream is idle, the driver copies H2D sources under 28 KiB with the CPU, inside the call. A first small chunk
# makes the stream busy, and the copy engine does the rest: at n = 4096, 8 KiB, 13.8 instead of 3.0 GB/s.
CHUNK = 128
FIRST_CHUNK = 16
_CAPACITY = 4096
_COPIES_PER_PLACE = 16  # about 23 copies took one place of the driver's queue; counted with some margin


class BatchCopier:
    """cuMemcpyBatchAsync, at most `CHUNK` copies a call. (A call with 51,828 copies has crashed a driver.)"""

    name = "batch"
    piece_operations = _CAPACITY

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._table: FlatTable | None = None

    def prepare(self, plan: TransferPlan) -> TransferPlan:
        return plan.flat()

    def queue_cost(self, operations: int) -> int:
        return 1 + -(-operations // CHUNK) + operations // _COPIES_PER_PLACE

    def stage(self, plan: TransferPlan, order: SourceOrder) -> Callable[[int], None]:
        if self._table is None:
            self._table = FlatTable(_CAPACITY)
        self._table.fill(plan.target, plan.source, plan.width)
        return partial(self._submit, self._table, len(plan), order)

    def _submit(self, table: FlatTable, count: int, order: SourceOrder, stream: int) -> None:
        start, stop = 0, FIRST_CHUNK
        while start < count:
            self._driver.copy_batch(table, start, min(stop, count), order, stream)
            start, stop = stop, stop + CHUNK

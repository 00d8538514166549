"""Flat copies in chunks, for what does not fold, with the copy engine and no SM."""

from __future__ import annotations

from functools import partial

import numpy as np

from kvoffload.copiers.base import Staged
from kvoffload.driver import Driver, FlatTable, SourceOrder, StridedTable
from kvoffload.errors import DriverError
from kvoffload.planning.transfer_plan import BlockPlan, Direction, TransferPlan

CHUNK = 128
_FIRST_CHUNK = 64
_CAPACITY = 4096
_COPIES_PER_PLACE = 16  # about 23 copies took one place of the driver's queue; counted with some margin
_OVERHEAD_PLACES = 3

# When its stream is idle, the driver copies sources in host memory of less than 28 KiB with the CPU, inside the call.
_CPU_COPY_BYTES = 28 << 10
_PRELUDE_MIN_COPIES = 8
_PRELUDE_ROWS_PER_COPY = 512
_PRELUDE_PITCH = 2
_SCRATCH_BYTES = _PRELUDE_PITCH * _PRELUDE_ROWS_PER_COPY * _FIRST_CHUNK


class BatchCopier:
    """cuMemcpyBatchAsync, at most `CHUNK` copies a call. (A call with 51,828 copies has crashed a driver.)

    Loads of small rows begin with a *prelude*: a strided copy of single bytes between two scratch buffers on the
    device, whose rows take the copy engine about as long (0.7 ns each) as the driver needs to take in the first chunk.
    So the stream is busy when that is submitted, and all of it goes to the copy engine. Measured on an H200, loads of
    128 rows of 4 / 8 / 24 KiB, GB/s: one call 1.4 / 2.3 / 4.1; a first chunk of 16 to make the stream busy 1.7 / 5.2 /
    13.1; cuStreamWaitValue32 before the first chunk, opened behind it, 4.1 / 6.3 / 21.5; prelude 3.9 / 6.6 / 23.5. And
    no gate means that nothing waits for the host: another thread in a driver call that holds a lock until the GPU is
    idle could otherwise keep the gate from ever being opened. (At 4,096 rows: 2.0 / 2.9 / 5.0; 4.5 / 8.3 / 33.8; then
    4.9 / 9 / 43 with either.)

    Args:
        driver: its context must be current, here and in `close`.
        with_prelude: False where the driver has no batch calls: nothing is allocated then.
    """

    piece_operations = _CAPACITY
    is_kernel = False

    def __init__(self, driver: Driver, *, with_prelude: bool = True) -> None:
        self._driver = driver
        self._table: FlatTable | None = None
        self._scratch = _allocate(driver, 2 * _SCRATCH_BYTES) if with_prelude else 0
        self._preludes = _preludes(self._scratch)

    def prepare(self, plan: BlockPlan) -> TransferPlan:
        return plan.operations().flat()

    def queue_cost(self, operations: int) -> int:
        return _OVERHEAD_PLACES + -(-operations // CHUNK) + operations // _COPIES_PER_PLACE

    def stage(self, work: TransferPlan, order: SourceOrder) -> Staged:
        if self._table is None:
            self._table = FlatTable(_CAPACITY)
        self._table.fill(work.target, work.source, work.width)
        small = work.direction is Direction.LOAD and int(work.width.min()) < _CPU_COPY_BYTES
        prelude = small and len(work) >= _PRELUDE_MIN_COPIES and self._scratch != 0
        return Staged(partial(self._submit, self._table, len(work), order, prelude))

    def clear(self, direction: Direction) -> None:
        """It has no tables."""

    def _submit(
        self, table: FlatTable, count: int, order: SourceOrder, prelude: bool, stream: int, start: int | None = None
    ) -> None:
        if start is not None:
            self._driver.event_record(start, stream)
        if prelude:
            self._driver.copy_strided(self._preludes, min(count, _FIRST_CHUNK) - 1, stream)
        first, stop = 0, _FIRST_CHUNK
        while first < count:
            self._driver.copy_batch(table, first, min(stop, count), order, stream)
            first, stop = stop, stop + CHUNK

    def close(self) -> None:
        """Free the scratch buffers; nothing may be in flight."""
        scratch, self._scratch = self._scratch, 0
        if scratch:
            self._driver.free(scratch)


def _preludes(scratch: int) -> StridedTable:
    """The preludes of 1 to `_FIRST_CHUNK` copies, between the two halves of the scratch memory."""
    table = StridedTable(_FIRST_CHUNK, batched=False)
    values = {"source": scratch, "target": scratch + _SCRATCH_BYTES, "width": 1}
    values |= {"source_pitch": _PRELUDE_PITCH, "target_pitch": _PRELUDE_PITCH}
    columns = {name: np.full(_FIRST_CHUNK, value, dtype=np.uint64) for name, value in values.items()}
    columns["height"] = np.arange(1, _FIRST_CHUNK + 1, dtype=np.uint64) * np.uint64(_PRELUDE_ROWS_PER_COPY)
    table.fill(columns, SourceOrder.STREAM)
    return table


def _allocate(driver: Driver, nbytes: int) -> int:
    """Scratch memory on the device, or 0 if it is full: then there is no prelude."""
    try:
        return driver.allocate(nbytes)
    except DriverError as error:
        if not error.out_of_memory:
            raise
        return 0

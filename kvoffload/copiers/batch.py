"""Flat copies in chunks, by the copy engine."""

from __future__ import annotations

from functools import partial

import numpy as np

from kvoffload.copiers.base import Submit
from kvoffload.driver import Driver, FlatTable, SourceOrder, StridedTable
from kvoffload.errors import DriverError
from kvoffload.planning.transfer_plan import LOAD, BlockPlan, TransferPlan

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
    device. Its rows keep the copy engine busy (0.7 ns each) while the driver takes in the first chunk, which therefore
    goes to the copy engine and not to the CPU. Measured on an H200, loads of 128 rows of 4 / 8 / 24 KiB, GB/s: one call
    1.4 / 2.3 / 4.1; a first chunk of 16 copies 1.7 / 5.2 / 13.1; a gate (cuStreamWaitValue32, opened behind the first
    chunk) 4.1 / 6.3 / 21.5; prelude 3.9 / 6.6 / 23.5. At 4,096 rows: 2.0 / 2.9 / 5.0; 4.5 / 8.3 / 33.8; 4.9 / 9 / 43
    with gate or prelude. A gate would wait for the host, which another thread could block for ever, in a driver call
    that holds a lock until the GPU is idle.

    Args:
        driver: its context must be current in `open` and `close`.
        with_prelude: False if the driver has no batch calls: nothing is allocated then.
    """

    segment_operations = _CAPACITY

    def __init__(self, driver: Driver, *, with_prelude: bool = True) -> None:
        self._driver = driver
        self._table = FlatTable(_CAPACITY)
        self._scratch: list[int] = []  # one address, or none
        self._preludes: StridedTable | None = None
        self._with_prelude = with_prelude

    def open(self) -> None:
        """Allocate the scratch buffers; without them there are no preludes."""
        if not self._with_prelude:
            return
        try:
            self._driver.create("cuMemAlloc", self._scratch, 2 * _SCRATCH_BYTES)
        except DriverError as error:
            if not error.out_of_memory:
                raise
        else:
            self._preludes = _preludes(int(self._scratch[0]))

    def prepare(self, plan: BlockPlan) -> TransferPlan:
        return plan.operations().flat()

    def queue_cost(self, operations: int) -> int:
        return _OVERHEAD_PLACES + -(-operations // CHUNK) + operations // _COPIES_PER_PLACE

    def stage(self, work: TransferPlan, order: SourceOrder) -> Submit:
        count, loads = len(work.device_address), work.direction is LOAD
        if loads:
            self._table.fill(work.device_address, work.host_address, work.width)
        else:
            self._table.fill(work.host_address, work.device_address, work.width)
        prelude = (
            loads
            and count >= _PRELUDE_MIN_COPIES
            and self._preludes is not None
            and int(work.width[0] if len(work.width) == 1 else np.minimum.reduce(work.width)) < _CPU_COPY_BYTES
        )
        return partial(self._submit, count, order, prelude)

    def _submit(self, count: int, order: SourceOrder, prelude: bool, stream: int) -> None:
        if prelude:
            assert self._preludes is not None
            self._driver.copy_strided(self._preludes, min(count, _FIRST_CHUNK) - 1, stream)
        first, stop = 0, _FIRST_CHUNK
        while first < count:
            self._driver.copy_batch(self._table, first, stop if stop < count else count, order, stream)
            first, stop = stop, stop + CHUNK

    def close(self) -> None:
        """Free the scratch buffers; nothing may be in flight. If it is interrupted, call it again."""
        self._preludes = None
        self._driver.destroy("cuMemFree", self._scratch)


def _preludes(scratch: int) -> StridedTable:
    """Return the preludes of 1 to `_FIRST_CHUNK` copies, between the two halves of the scratch memory."""
    table = StridedTable(_FIRST_CHUNK, batched=False)
    rows = np.arange(1, _FIRST_CHUNK + 1, dtype=np.uint64) * np.uint64(_PRELUDE_ROWS_PER_COPY)
    of_all = scratch, scratch + _SCRATCH_BYTES, _PRELUDE_PITCH, 1
    source, target, pitch, width = np.full((_FIRST_CHUNK, 4), of_all, np.uint64).T
    table.fill((source, target, pitch, pitch, width, rows), SourceOrder.STREAM)
    return table

"""Strided copies: one operation per block carries all the planes that fold, with the copy engine and no SM."""

from __future__ import annotations

from functools import partial

from kvoffload.copiers.base import Submit
from kvoffload.device.streams import SEGMENT_LIMIT
from kvoffload.driver import Driver, SourceOrder, StridedTable
from kvoffload.planning.transfer_plan import STORE, BlockPlan, TransferPlan


class StridedCopier:
    """cuMemcpy3DBatchAsync where the driver has it (one call), else cuMemcpy2DAsync for each operation.

    2D copies are as fast on the GPU and cost 3 to 3.6 us each to submit instead of 1.3.
    """

    segment_operations = SEGMENT_LIMIT
    prepare = staticmethod(BlockPlan.operations)
    queue_cost = staticmethod(int)  # each operation takes a place

    def __init__(self, driver: Driver, *, batched: bool) -> None:
        self._driver = driver
        self._batched = batched
        self._stores, self._loads = (StridedTable(SEGMENT_LIMIT, batched=batched) for _ in range(2))

    def stage(self, work: TransferPlan, order: SourceOrder) -> Submit:
        if work.direction is STORE:
            table, source, target = self._stores, work.device_address, work.host_address
            pitch, target_pitch = work.device_pitch, work.host_pitch
        else:
            table, source, target = self._loads, work.host_address, work.device_address
            pitch, target_pitch = work.host_pitch, work.device_pitch
        count = len(source)
        # Arrays of plans never change, so all but the addresses may be in the table.
        rows, as_order, as_pitch, as_target_pitch, width, height = table.shape
        same = pitch is as_pitch and target_pitch is as_target_pitch and work.width is width and work.height is height
        if same and order is as_order and count <= rows:
            table.sources[:count], table.targets[:count] = source, target
        else:
            table.fill((source, target, pitch, target_pitch, work.width, work.height), order)
        if self._batched:
            return partial(self._driver.copy_strided_batch, table, count)

        def one_by_one(stream: int) -> None:
            for index in range(count):
                self._driver.copy_strided(table, index, stream)

        return one_by_one

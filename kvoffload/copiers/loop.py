"""Flat copies one by one: slow to submit (2 us each), and right on every driver."""

from __future__ import annotations

from functools import partial

import numpy as np

from kvoffload.copiers.base import Submit
from kvoffload.device.streams import SEGMENT_LIMIT
from kvoffload.driver import Driver, SourceOrder
from kvoffload.planning.transfer_plan import BlockPlan, TransferPlan


class LoopCopier:
    """cuMemcpyAsync for every row. Always in stream order, whatever source order was asked for."""

    segment_operations = SEGMENT_LIMIT

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def prepare(self, plan: BlockPlan) -> TransferPlan:
        return plan.operations().flat()

    def queue_cost(self, operations: int) -> int:
        return operations

    def stage(self, work: TransferPlan, order: SourceOrder) -> Submit:  # noqa: ARG002
        width = np.broadcast_to(work.width, work.target.shape)
        copies = list(zip(work.target.tolist(), work.source.tolist(), width.tolist(), strict=True))
        return partial(self._submit, copies)

    def _submit(self, copies: list[tuple[int, int, int]], stream: int) -> None:
        copy = self._driver.copy
        for target, source, nbytes in copies:
            copy(target, source, nbytes, stream)

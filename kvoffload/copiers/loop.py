"""Flat copies one by one: slow to submit (2 us each), and right on every driver."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvoffload.driver import Driver, SourceOrder
from kvoffload.plan import TransferPlan
from kvoffload.streams import PIECE_LIMIT


class LoopCopier:
    """cuMemcpyAsync for every row. Always in stream order, whatever source order was asked for."""

    name = "loop"
    piece_operations = PIECE_LIMIT

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def prepare(self, plan: TransferPlan) -> TransferPlan:
        return plan.flat()

    def queue_cost(self, operations: int) -> int:
        return operations

    def stage(self, plan: TransferPlan, order: SourceOrder) -> Callable[[int], None]:  # noqa: ARG002
        copies = list(zip(plan.target.tolist(), plan.source.tolist(), plan.width.tolist(), strict=True))
        return partial(self._submit, copies)

    def _submit(self, copies: list[tuple[int, int, int]], stream: int) -> None:
        copy = self._driver.copy
        for target, source, nbytes in copies:
            copy(target, source, nbytes, stream)

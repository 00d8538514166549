"""What every copier offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from kvoffload.driver import SourceOrder
from kvoffload.planning.transfer_plan import BlockPlan, TransferPlan

Submit: TypeAlias = Callable[[int], None]
"""Queues the staged copies on a stream. Makes driver calls only. DriverError: the driver refused; the copies queued
before that still run.
"""


class Copier(Protocol):
    """Carries out plans by one copy method. Belongs to one engine and is called under its lock.

    Attributes:
        segment_operations: the most operations of a prepared plan that are queued together; they fit a driver queue.
    """

    segment_operations: int

    def prepare(self, plan: BlockPlan) -> TransferPlan:
        """Return the plan in the shape that this copier carries."""

    def queue_cost(self, operations: int) -> int:
        """Return how many places of a driver queue this many operations of a prepared plan take."""

    def stage(self, work: Any, order: SourceOrder) -> Submit:
        """Write the arguments of at most `segment_operations` operations.

        This is a separate step so that only driver calls lie between a transfer's start event, which the caller
        records, and its first copy.
        Staged work is valid until the copier stages other work.
        """

"""What every copier offers."""

from __future__ import annotations

from typing import Any, Protocol

from kvoffload.driver import SourceOrder
from kvoffload.planning.transfer_plan import BlockPlan, TransferPlan


class Submit(Protocol):
    """Records `start` on a stream, unless it is None, then queues the staged copies. Makes driver calls only.

    Raises:
        DriverError: the driver refused; the copies queued before that still run.
    """

    def __call__(self, stream: int, start: int | None, /) -> None: ...


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

        This is a separate step so that only driver calls lie between a transfer's start event and its first copy.
        Staged work is valid until the copier stages other work.
        """

"""What every copier offers."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

from kvoffload.copiers.part_fragments import BlocksInParts
from kvoffload.copiers.table_arena import Table
from kvoffload.driver import SourceOrder
from kvoffload.planning.transfer_plan import BlockPlan, TransferPlan

Work: TypeAlias = TransferPlan | BlockPlan | BlocksInParts  # a plan in the shape that a copier carries


class Submit(Protocol):
    """Records `start` on a stream, unless it is None, then queues the staged copies. Makes driver calls only.

    Raises:
        DriverError: the driver refused; the copies queued before that still run.
    """

    def __call__(self, stream: int, start: int | None, /) -> None: ...


class Staged(NamedTuple):
    """Copies that are ready to be queued.

    Attributes:
        submit: queues them.
        table: pinned memory that the GPU reads while they run, or None. The tracker releases it when all copies of the
            transfer that use it have ended.
    """

    submit: Submit
    table: Table | None = None


class Copier(Protocol):
    """Carries out plans by one copy method. Belongs to one engine and is called under its lock.

    Attributes:
        segment_operations: the most operations of a prepared plan that are queued together; they fit a driver queue.
        is_kernel: whether it runs on multiprocessors, on the lane's stream for kernels.
    """

    segment_operations: int
    is_kernel: bool

    def prepare(self, plan: BlockPlan) -> Work:
        """The plan in the shape that this copier carries."""

    def queue_cost(self, operations: int) -> int:
        """How many places of a driver queue this many operations of a prepared plan take."""

    def stage(self, work: Any, order: SourceOrder) -> Staged | None:
        """Write the arguments of at most `segment_operations` operations; None while there is no room for their table.

        This is a separate step so that only driver calls lie between a transfer's start event and its first copy.
        Staged work is valid until the copier stages other work.
        """

"""What every copier offers, and the shares of a transfer."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from kvoffload.copiers.table_arena import Table
from kvoffload.driver import SourceOrder
from kvoffload.planning.transfer_plan import BlockPlan


class Work(Protocol):
    """A plan in the shape that a copier carries, and how many operations it has: `TransferPlan` or `BlockPlan`."""

    @property
    def part_ends(self) -> tuple[int, ...]:
        """How many operations the first of its parts has, the first two, ...; empty where there is one part."""

    def __len__(self) -> int: ...

    def cut(self, start: int, stop: int) -> Any:
        """Operations `[start, stop)`."""


class Submit(Protocol):
    """Queues what was staged on a stream, with nothing but driver calls, after a record of `start` if there is one.

    Raises:
        DriverError: the driver refused; what was queued before that still runs.
    """

    def __call__(self, stream: int, start: int | None, /) -> None: ...


class Staged(NamedTuple):
    """Copies that are ready to be queued.

    Attributes:
        submit: queues them.
        table: the pinned memory that the GPU reads while they run. The launcher releases it when they, and everything
            else of the same transfer that was queued with this table, have ended. None where there is none.
    """

    submit: Submit
    table: Table | None = None


class Copier(Protocol):
    """Carries plans out by one copy method. Belongs to one engine and is called under its lock.

    Attributes:
        segment_operations: how many operations of a prepared plan may be queued together, so that a driver queue holds
            them.
        is_kernel: runs on multiprocessors, on the lane's stream for kernels.
    """

    segment_operations: int
    is_kernel: bool

    def prepare(self, plan: BlockPlan) -> Work:
        """The plan in the shape that this copier carries."""

    def queue_cost(self, operations: int) -> int:
        """Places that so many operations of a prepared plan take in a driver queue."""

    def stage(self, work: Any, order: SourceOrder) -> Staged | None:
        """Write down prepared work of at most `segment_operations`; None while there is no room for its table.

        Staging and queueing are apart, so that nothing but a driver call lies between a transfer's start event and its
        first copy. What is staged is valid until something else is. What is queued may not be touched until it has
        ended.
        """


class Share(NamedTuple):
    """Some of a transfer's blocks and the copier that carries them; the shares of a transfer run at the same time.

    Attributes:
        size: how many operations the work has.
        nbytes: payload of the work.
    """

    work: Work
    copier: Copier
    size: int
    nbytes: int

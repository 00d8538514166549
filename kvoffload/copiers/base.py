"""What every copier offers, and the shares of a transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from kvoffload.driver import SourceOrder
from kvoffload.planning.transfer_plan import BlockPlan, TransferPlan, joined

Work: TypeAlias = TransferPlan | BlockPlan  # a plan in the shape that a copier carries


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
        is_kernel: whether it runs on multiprocessors, on the lane's stream for kernels.
    """

    segment_operations: int
    is_kernel: bool

    def prepare(self, plan: BlockPlan) -> Work:
        """The plan in the shape that this copier carries."""

    def queue_cost(self, operations: int) -> int:
        """How many places of a driver queue this many operations of a prepared plan take."""

    def stage(self, work: Any, order: SourceOrder) -> Submit:
        """Write the arguments of at most `segment_operations` operations.

        This is a separate step so that only driver calls lie between a transfer's start event and its first copy.
        Staged work is valid until the copier stages other work.
        """


class Share(NamedTuple):
    """Some of a transfer's blocks and their copier. The shares of a transfer run at the same time.

    Attributes:
        size: how many operations the work has.
        nbytes: its payload bytes.
    """

    work: Work
    copier: Copier
    size: int
    nbytes: int


def shares_together(shares: Sequence[Share]) -> tuple[Share, ...]:
    """The same work in as few shares as possible, for a transfer of several groups. Kernels come first, since they are
    quicker to queue.

    A kernel is launched per group, so its shares stay apart. Shares of one copier of the copy engine become one, since
    it has room for one staged share.

    Args:
        shares: of plans in one direction, none of them in parts.
    """
    found = [share for share in shares if share.copier.is_kernel]
    alike: dict[int, list[Share]] = {}
    for share in shares:
        if not share.copier.is_kernel:
            alike.setdefault(id(share.copier), []).append(share)
    for same in alike.values():
        if len(same) > 1:
            plans: list[TransferPlan] = [share.work for share in same]  # type: ignore[misc]  # what these copiers prepare
            size, nbytes = sum(share.size for share in same), sum(share.nbytes for share in same)
            same = [Share(joined(plans), same[0].copier, size, nbytes)]
        found += same
    return tuple(found)

"""The private record of a transfer on several devices: what its transfers on each of them say."""

from __future__ import annotations

import math
from typing import Any

from kvoffload.engine.transfer import Event, State, Transfer
from kvoffload.errors import TransferError
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopyMethod


class ShardedTransfer:
    """One submitted store or load of a `ShardedEngine`. It has no state of its own: it has ended when all of its
    transfers have, and has failed if one of them has.

    Attributes:
        id, direction, nbytes, num_parts: as `Job` has them.
        transfers: one for each device, with the same id; none where there is nothing to copy.
        names: of the shards, for messages.
        sequence: counts those of its direction; 0 where there is nothing to copy.
        trace: if a tracer follows it, which one, and what that has started.
        forgotten: whether `poll` is not to report it: its caller has waited for it.
    """

    __slots__ = (
        *("direction", "forgotten", "id", "names", "nbytes", "num_parts", "sequence", "simulated", "trace"),
        "transfers",
    )

    def __init__(
        self,
        number: int,
        direction: Direction,
        num_parts: int,
        transfers: tuple[Transfer, ...],
        names: tuple[str, ...],
        simulated: bool,
    ) -> None:
        self.id = number
        self.direction = direction
        self.num_parts = num_parts
        self.transfers = transfers
        self.names = names
        self.simulated = simulated
        self.nbytes = sum([transfer.nbytes for transfer in transfers])
        self.sequence = 0
        self.forgotten = False
        self.trace: Any = None

    @property
    def finished(self) -> bool:
        """Whether all of it is known to have ended: none of its slots and blocks is touched any more."""
        for transfer in self.transfers:  # noqa: SIM110  (asked often; a generator would be resumed for each)
            if not transfer.finished:
                return False
        return True

    @property
    def error(self) -> TransferError | None:
        """The failure of the first shard that has failed, with its name."""
        for name, transfer in zip(self.names, self.transfers, strict=False):
            if transfer.error is not None:
                error = TransferError(f"{name}: {transfer.error}")
                error.__cause__ = transfer.error.__cause__
                return error
        return None

    @property
    def state(self) -> State:
        failed = self.error is not None
        if self.finished:
            return State.FAILED if failed else State.DONE
        return State.DRAINING if failed else State.RUNNING

    @property
    def held(self) -> bool:
        """Whether some of it waits on the host for room in a driver's queues."""
        return any(not transfer.enqueued for transfer in self.transfers)

    @property
    def seconds(self) -> float:
        """Of the shard that took longest; NaN if one is unknown."""
        each = [transfer.seconds for transfer in self.transfers]
        return math.nan if any(map(math.isnan, each)) else max(each, default=0.0)

    @property
    def method(self) -> CopyMethod | None:
        """That of all shards; None where they differ, and where there is nothing to copy."""
        methods = {transfer.method for transfer in self.transfers}
        return methods.pop() if len(methods) == 1 else None

    @property
    def copier(self) -> str:
        """The copiers of the shards, each once, joined by "+"."""
        return "+".join(dict.fromkeys(transfer.copier for transfer in self.transfers)) or "none"

    @property
    def reason(self) -> str:
        reasons = dict.fromkeys(transfer.reason for transfer in self.transfers)
        return "; ".join(reasons) or Transfer.reason


def fail_unqueued(transfer: Transfer, cause: BaseException) -> None:
    """A transfer that never came into its queue has failed. May be interrupted and called again."""
    if transfer.state is State.NEW:
        transfer.step(Event.SUBMITTED)
    transfer.seconds = math.nan
    transfer.fail(cause)
    if not transfer.finished:
        transfer.step(Event.ENDED)
    transfer.conflict = transfer.engine = None
    transfer.markers, transfer.shares = [], ()

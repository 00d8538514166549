"""The private record of a submitted transfer, and its states as a table.

                    SUBMITTED           ENDED
            NEW ────────────> RUNNING ─────────> DONE
                                 │ ERROR   ENDED
                                 ├──────> DRAINING ─────> FAILED
                                 │ LOST       │ LOST        ^
                                 └────────────┴─────────────┘

A transfer is cut into segments: operations of one share and one part that are queued on one stream together.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from typing import Any

from kvoffload.copiers import Share
from kvoffload.copiers.table_arena import Table
from kvoffload.device.streams import LaneStream
from kvoffload.driver import SourceOrder
from kvoffload.errors import TransferError
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopyMethod


class State(enum.IntEnum):
    """Where a transfer stands. (Hashing an IntEnum calls no Python function.)"""

    NEW = enum.auto()  # being submitted
    RUNNING = enum.auto()  # in flight: waiting on the host for room, queued on the GPU, or being copied
    DRAINING = enum.auto()  # failed, but the GPU may still touch its slots and blocks
    DONE = enum.auto()
    FAILED = enum.auto()


class Event(enum.IntEnum):
    """What happens to a transfer."""

    SUBMITTED = enum.auto()
    ERROR = enum.auto()  # a driver call for it failed, or its submission was interrupted
    ENDED = enum.auto()  # nothing of it is left on the GPU
    LOST = enum.auto()  # the context is lost: nothing will run any more


TRANSITIONS: dict[State, dict[Event, State]] = {
    State.NEW: {Event.SUBMITTED: State.RUNNING},
    State.RUNNING: {Event.ENDED: State.DONE, Event.ERROR: State.DRAINING, Event.LOST: State.FAILED},
    State.DRAINING: {Event.ENDED: State.FAILED, Event.LOST: State.FAILED},
    State.DONE: {},
    State.FAILED: {},
}


class Segment:
    """Operations of one share and one part of a transfer that are queued on one stream together.

    Attributes:
        share, part: which.
        stream: where they are queued.
        places: of the driver's queue that they take.
        nbytes: payload bytes, where they are bounded; else 0.
        table: the pinned table that the GPU reads while they run, if there is one.
        event: recorded behind them; None until then.
    """

    __slots__ = ("event", "nbytes", "part", "places", "share", "stream", "table")

    def __init__(self, share: int, part: int, stream: LaneStream, places: int) -> None:
        self.share = share
        self.part = part
        self.stream = stream
        self.places = places
        self.nbytes = 0
        self.table: Table | None = None
        self.event: int | None = None


class Transfer:
    """One submitted store or load. The engine's lock guards it; `Job` is the caller's handle on it.

    Attributes:
        id: unique within the engine, rising in the order of submission.
        direction, nbytes, num_parts: as `Job` has them.
        method, reason: what carries it, and why; `method` is None for an empty transfer.
        sequence: counts the transfers of its direction.
        shares: of its blocks, in the order in which they are queued; they run at the same time.
        engine: its engine, which is kept alive as long as the transfer is in flight.
        source_order: when the driver may read the sources.
        urgent: whether it goes ahead of loads that wait on the host.
        conflict: the latest transfer of the other direction that touches the same slots or blocks, if it was in flight.
        markers: events on the caller's streams, which it waits for.
        start, end: timing events.
        segments: queued, and not known to have ended.
        share, part, queued: what is queued next: operations of that share and part, from number `queued` on.
        ordered: all its waits are queued.
        enqueued: no more of it will be queued.
        submitting: a call is submitting it or queueing a segment; still true afterwards if the call was interrupted.
        query_failures: errors in a row when asking whether it has ended.
        seconds: between `start` and `end`, on the GPU's clock; NaN if unknown.
        error: why it failed.
        trace: if a tracer follows it, which one, and what that has started.
    """

    # What most transfers have when they are made stays in the class: assigning it to each would take 1 us.
    simulated = False
    source_order = SourceOrder.STREAM
    method: CopyMethod | None = None
    reason = "nothing to copy"
    state = State.NEW
    sequence = 0
    shares: tuple[Share, ...] = ()
    engine: object = None
    conflict: Transfer | None = None
    start: int | None = None
    end: int | None = None
    share = part = queued = 0
    ordered = enqueued = False
    submitting = True
    urgent = False
    query_failures = 0
    seconds = 0.0
    error: TransferError | None = None
    trace: Any = None

    def __init__(self, number: int, direction: Direction, nbytes: int, num_parts: int) -> None:
        self.id = number
        self.direction = direction
        self.nbytes = nbytes
        self.num_parts = num_parts
        self.markers: list[int] = []
        self.segments: deque[Segment] = deque()

    def step(self, event: Event) -> None:
        """Move along the table; an event that is not in it raises AssertionError and changes nothing."""
        following = TRANSITIONS[self.state].get(event)
        assert following is not None, f"transfer {self.id}: {event.name} in {self.state.name}"
        self.state = following

    @property
    def finished(self) -> bool:
        """Whether it is known to have ended."""
        return self.state is State.DONE or self.state is State.FAILED

    @property
    def copier(self) -> str:
        return "none" if self.method is None else self.method.copier

    def fail(self, cause: BaseException) -> None:
        """Nothing more of it will be queued. It has failed when what is queued has ended."""
        self._note(cause)
        self.enqueued = True
        if self.state is State.RUNNING:
            self.step(Event.ERROR)

    def mark_lost(self, cause: BaseException) -> None:
        """The context is lost, so nothing of it runs any more: it has failed now."""
        self._note(cause)
        self.enqueued = True
        self.segments.clear()
        self.seconds = math.nan
        self.step(Event.LOST)

    def _note(self, cause: BaseException) -> None:
        if self.error is None:
            error = TransferError(
                f"{self.direction} {self.id} ({self.nbytes} bytes, {self.copier}) failed: {str(cause) or repr(cause)}"
            )
            error.__cause__ = cause.with_traceback(None)  # its frames would keep the engine alive
            self.error = error

    def events(self) -> list[int]:
        """All events that it refers to."""
        found = [*self.markers, *(segment.event for segment in self.segments), self.start, self.end]
        return [event for event in found if event is not None]

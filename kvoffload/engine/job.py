"""A transfer: its private record, with its states as a table, and Job, the caller's handle on it.

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
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from kvoffload.copiers import Place, Share
from kvoffload.copiers.observed import Forecast
from kvoffload.copiers.table_arena import Table
from kvoffload.device.streams import LaneStream
from kvoffload.driver import SourceOrder
from kvoffload.engine.callbacks import Waitable
from kvoffload.errors import TransferError
from kvoffload.internal.checks import index_or
from kvoffload.internal.nesting import refuse_nested
from kvoffload.internal.types import StreamLike
from kvoffload.internal.waiting import wait_until
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopierName


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


NEW, RUNNING, DRAINING, DONE, FAILED = State
SUBMITTED, ERROR, ENDED, LOST = Event
_STREAM, _NOTHING = SourceOrder.STREAM, "nothing to copy"
_ALL_FIT: frozenset[int] = frozenset()

TRANSITIONS: dict[State, dict[Event, State]] = {
    NEW: {SUBMITTED: RUNNING},
    RUNNING: {ENDED: DONE, ERROR: DRAINING, LOST: FAILED},
    DRAINING: {ENDED: FAILED, LOST: FAILED},
    DONE: {},
    FAILED: {},
}


class Segment:
    """Operations of one share and one part of a transfer that are queued on one stream together.

    Attributes:
        share, part: their numbers.
        stream: where they are queued.
        places: how many places of the driver's queue they take.
        nbytes: payload bytes if `most_queued_bytes` is set, else 0.
        table: the pinned table that the GPU reads while they run, if there is one.
        place: in the staging ring, which it shares with the other half of its piece; None without one.
        event: recorded behind them; None until then.
    """

    __slots__ = ("event", "nbytes", "part", "place", "places", "share", "stream", "table")

    def __init__(self, share: int, part: int, stream: LaneStream, places: int) -> None:
        self.share = share
        self.part = part
        self.stream = stream
        self.places = places
        self.nbytes = 0
        self.table: Table | None = None
        self.place: Place | None = None
        self.event: int | None = None


class Transfer:
    """One submitted store or load. The engine's lock guards it; `Job` is the caller's handle on it.

    Attributes:
        id, direction, nbytes, num_parts, copier, reason: as `Job` has them.
        sequence: counts the transfers of its direction.
        shares: in the order in which they are queued; they run at the same time.
        engine: its engine, which it keeps alive while it is in flight.
        source_order: when the driver may read the sources.
        urgent: whether it goes ahead of loads that wait on the host.
        conflict: the latest transfer of the other direction that touches the same slots or blocks, if it was in flight.
        markers: events on the caller's streams, which it waits for.
        start, end: timing events.
        segments: queued, and not known to have ended.
        share, part, queued: the next segment begins with operation `queued` of this share and part.
        ordered: all its waits are queued.
        enqueued: no more segments will be queued.
        submitting: a call is submitting it or queueing a segment; stays True if that call is interrupted.
        query_failures: errors in a row when asking whether it has ended.
        seconds: between `start` and `end`, on the GPU's clock; NaN if unknown.
        error: why it failed.
        trace: its tracer and the value that `on_submit` returned; None without a tracer, or once `on_end` is due.
        forecast: what `seconds` answers, if the last transfers decided between two copiers.
        overlap: the part of `seconds` in which the transfer before it still ran.
        forgotten: its caller has waited for it, so `poll` does not report it.
        noted: it is counted, and reported unless `forgotten`.
        unfit: the slots whose blocks do not fit the codec, as far as is known.
    """

    # With slots Python 3.11 takes 0.4 us less to make, fill and read it than with defaults in the class.
    __slots__ = (
        *("id", "direction", "nbytes", "num_parts", "markers", "segments", "simulated", "source_order", "copier"),
        *("reason", "forecast", "overlap", "state", "sequence", "shares", "engine", "conflict", "start", "end"),
        *("share", "part", "queued", "ordered", "enqueued", "submitting", "urgent", "query_failures", "seconds"),
        *("error", "trace", "forgotten", "noted", "unfit"),
    )

    def __init__(self, number: int, direction: Direction, nbytes: int, num_parts: int) -> None:
        self.id = number
        self.direction = direction
        self.nbytes = nbytes
        self.num_parts = num_parts
        self.markers: list[int] = []
        self.segments: deque[Segment] = deque()
        self.simulated = self.ordered = self.enqueued = self.urgent = self.forgotten = self.noted = False
        self.submitting = True
        self.source_order = _STREAM
        self.copier: CopierName | Literal["none"] = "none"
        self.reason: str | Forecast = _NOTHING
        self.shares: tuple[Share, ...] = ()
        self.state = NEW
        self.sequence = self.share = self.part = self.queued = self.query_failures = 0
        self.seconds = self.overlap = 0.0
        self.unfit = _ALL_FIT
        self.engine: object = None
        self.trace: Any = None
        self.forecast: Forecast | None = None
        self.conflict: Transfer | None = None
        self.start: int | None = None
        self.end: int | None = None
        self.error: TransferError | None = None

    def step(self, event: Event) -> None:
        """Move along the table. An event that it does not have raises AssertionError and changes nothing."""
        following = TRANSITIONS[self.state].get(event)
        assert following is not None, f"transfer {self.id}: {event.name} in {self.state.name}"
        self.state = following

    @property
    def finished(self) -> bool:
        """Whether it is known to have ended."""
        return self.state is DONE or self.state is FAILED

    @property
    def held(self) -> bool:
        return not self.enqueued

    def fail(self, cause: BaseException) -> None:
        """Queue no more segments. The transfer has failed when the queued ones have ended."""
        if self.error is None:
            error = TransferError(
                f"{self.direction} {self.id} ({self.nbytes} bytes, {self.copier}) failed: {str(cause) or repr(cause)}"
            )
            error.__cause__ = cause.with_traceback(None)  # its frames would keep the engine alive
            self.error = error
        self.enqueued = True
        if self.state is RUNNING:
            self.step(ERROR)

    def mark_lost(self, cause: BaseException) -> None:
        """Fail the transfer now: the context is lost and nothing runs any more."""
        self.fail(cause)
        self.segments.clear()
        self.seconds = math.nan
        self.step(LOST)

    def abandon(self, cause: BaseException) -> None:
        """Fail a transfer that never came into its queue. May be interrupted and called again."""
        if self.state is NEW:
            self.step(SUBMITTED)
        self.seconds = math.nan
        self.fail(cause)
        if not self.finished:
            self.step(ENDED)
        self.let_go()

    def let_go(self) -> None:
        """Drop the references that it needed while it ran."""
        self.start = self.end = self.conflict = self.engine = None
        self.markers, self.shares = [], ()

    def events(self) -> list[int]:
        found = [*self.markers, *(segment.event for segment in self.segments), self.start, self.end]
        return [event for event in found if event is not None]


class ShardedTransfer:
    """One submitted store or load on several devices. It has ended when all of its transfers have, and has failed if
    one of them has.

    Attributes:
        transfers: one for each device, with the same id; empty if there is nothing to copy.
        simulated: whether one of the devices is.
        sequence: counts the transfers of its direction; 0 if there is nothing to copy.
    """

    sequence = 0
    trace: Any = None
    forgotten = noted = simulated = False

    def __init__(
        self, number: int, direction: Direction, num_parts: int, transfers: Sequence[Transfer], names: tuple[str, ...]
    ) -> None:
        self.id = number
        self.direction = direction
        self.num_parts = num_parts
        self.transfers = tuple(transfers)
        self.names = names
        self.nbytes = sum([transfer.nbytes for transfer in transfers])

    @property
    def finished(self) -> bool:
        for transfer in self.transfers:  # noqa: SIM110  (asked often; a generator would be resumed for each)
            if not transfer.finished:
                return False
        return True

    @property
    def error(self) -> TransferError | None:
        """The failure of the first shard, in their order, that has failed; the message names it."""
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
            return FAILED if failed else DONE
        return DRAINING if failed else RUNNING

    @property
    def held(self) -> bool:
        return any(transfer.held for transfer in self.transfers)

    @property
    def unfit(self) -> frozenset[int]:
        return (
            _ALL_FIT.union(*(transfer.unfit for transfer in self.transfers)) or _ALL_FIT
        )  # one object for all results

    @property
    def seconds(self) -> float:
        """The longest time of a shard; NaN if one is unknown."""
        each = [transfer.seconds for transfer in self.transfers]
        return math.nan if any(map(math.isnan, each)) else max(each, default=0.0)

    @property
    def copier(self) -> str:
        """The copiers of the shards, each once, joined by "+"."""
        return "+".join(dict.fromkeys(transfer.copier for transfer in self.transfers)) or "none"

    @property
    def reason(self) -> str:
        reasons = dict.fromkeys(str(transfer.reason) for transfer in self.transfers)
        return "; ".join(reasons) or _NOTHING


AnyTransfer = Transfer | ShardedTransfer
"""The record behind a job."""


class TransferResult(NamedTuple):
    """How a transfer ended.

    Attributes:
        job_id: `Job.id`.
        direction: `Direction.STORE` or `Direction.LOAD`, which are the strings "store" and "load".
        nbytes: payload bytes that it was to copy, on all devices together.
        seconds: from its first copy to the end of its last one, on the GPU's clock. The wait before the first copy does
            not count, but if the transfer did not fit into the driver's queues, waits of later segments do. NaN if it
            failed or the driver could not say; 0 if it was empty. For several devices, the longest. Invented on a
            simulated device.
        copier: "strided", "pack", "batch" or "loop"; "none" for an empty transfer; the names of all, joined
            by "+", if devices used different ones.
        error: why it failed, or None.
        unfit: as `Job.unfit`.
    """

    job_id: int
    direction: Direction
    nbytes: int
    seconds: float
    copier: str
    error: TransferError | None
    unfit: frozenset[int] = _ALL_FIT

    @property
    def gb_per_s(self) -> float:
        """`nbytes / seconds`, in 10^9 bytes a second.

        NaN for an empty or failed transfer, if the seconds are unknown, and on the simulated device, whose seconds are
        invented.
        """
        return self.nbytes / self.seconds / 1e9 if self.nbytes and self.seconds > 0 else math.nan


class SimulatedTransferResult(TransferResult):
    """A result of the simulated device: `seconds` is invented."""

    __slots__ = ()

    @property
    def gb_per_s(self) -> float:
        return math.nan


def result_of(transfer: AnyTransfer) -> TransferResult:
    kind = SimulatedTransferResult if transfer.simulated else TransferResult
    fields = transfer.id, transfer.direction, transfer.nbytes, transfer.seconds, transfer.copier, transfer.error
    return kind(*fields, transfer.unfit)


class JobEngine(Protocol):
    """The engine, as a job calls it."""

    lock: threading.RLock

    def advance(self) -> None: ...

    def forget_report(self, record: AnyTransfer) -> None: ...

    def order_job_before(self, record: Any, streams: Any, part: int | None) -> None: ...

    def when_done(self, job: Any, callback: Callable[[Any], object]) -> None: ...


class Job(Waitable[TransferResult]):
    """One submitted transfer; returned by `store` and `load` of an engine. Usable from any thread, and awaitable.

    Until it is done, its blocks and slots are in use: do not write them, and do not read its targets (a load's blocks,
    a store's slots), except in work on a stream after `order_before`. This holds for a failed job, too: its `error` may
    be known before it is done. If you drop it, it goes on.

    A job of a `ShardedEngine` is the transfer on all of its devices. It is done when it has ended on all of them, and
    fails if it fails on one. `error` is that of the first device, in their order, that has failed.
    """

    __slots__ = ("__weakref__", "_engine", "_transfer")

    def __init__(self, engine: JobEngine, transfer: AnyTransfer) -> None:
        self._engine = engine
        self._transfer = transfer

    @property
    def lock(self) -> threading.RLock:
        """The engine's lock, for integrations; see `OffloadEngine`."""
        return self._engine.lock

    @property
    def id(self) -> int:
        """Unique within the engine; rises in the order of submission."""
        return self._transfer.id

    @property
    def direction(self) -> Direction:
        """`Direction.STORE` (device to slots) or `Direction.LOAD`."""
        return self._transfer.direction

    @property
    def nbytes(self) -> int:
        """Payload bytes that it copies, on all devices together. With a codec, too, the bytes of the blocks there."""
        return self._transfer.nbytes

    @property
    def num_parts(self) -> int:
        """How many parts `load(..., parts=)` divided it into; 1 without `parts`, and for a store."""
        return self._transfer.num_parts

    @property
    def reason(self) -> str:
        """Why the copier was selected, as text for people: the times that the profile or the last transfers predict, or
        that it was asked for, or that there is nothing to copy.
        """
        return str(self._transfer.reason)

    @property
    def copier(self) -> str:
        """The name of the copier, such as "strided"; "none" for an empty transfer; the names of all, joined by "+", if
        devices use different ones.
        """
        return self._transfer.copier

    @property
    def error(self) -> TransferError | None:
        """Why the transfer failed; None if no failure is known. `wait` raises it. Until `done`, the GPU may still use
        blocks and slots of a failed transfer.
        """
        return self._transfer.error

    @property
    def unfit(self) -> frozenset[int]:
        """The slots whose blocks do not fit the layout's codec: a store has not stored them, and yet does not fail; a
        load from them fails. Known once the job has `finished`; empty without a codec. A `BlockCache` declines the keys
        of such slots.
        """
        return self._transfer.unfit

    @property
    def finished(self) -> bool:
        """Whether the engine already knows that the transfer has ended, well or not. It does not ask the GPU: if you
        look at nothing else, it may stay False for ever. `done` asks.
        """
        return self._transfer.finished

    @property
    def done(self) -> bool:
        """Whether the transfer has ended, well or not. Asks the GPU without waiting for it.

        It takes the engine's lock for a moment, and may call a tracer's `on_end` in this thread. Inside another call of
        its engine in the same thread (a hook, a signal handler) it returns `finished`.

        Raises:
            ClosedError: not known to have ended, and this is a forked child.
        """
        if not self._transfer.finished:
            self._engine.advance()
        return self._transfer.finished

    def wait(self, timeout: float | None = None) -> TransferResult:
        """Wait on the host until the transfer has ended, and return its result. From then on the engine's `poll` does
        not report it, also if this raises its error; after a TimeoutError it does.

        Args:
            timeout: seconds, 0 to look once; None waits for as long as it takes.

        Raises:
            TransferError: the transfer failed, and has ended.
            TimeoutError: `timeout` seconds have passed; the transfer goes on.
            ValueError: `timeout` is no number.
            RuntimeError: you called it inside another call in the same thread, for example in a signal handler.
            ClosedError: this is a forked child.
        """
        refuse_nested(self._engine.lock, "wait")
        wait_until(lambda: self.done, timeout, repr(self))
        self._engine.forget_report(self._transfer)
        error = self._transfer.error
        if error is not None:  # a copy each time, so that the stored one refers to no frames
            raise TransferError(*error.args) from error.__cause__
        return result_of(self._transfer)

    def outcome(self) -> TransferResult:
        """Return the result of a finished transfer. If it failed, the result has the `error`; nothing is raised.

        Raises:
            RuntimeError: the transfer is not known to have ended; call `wait()`, or ask `done`, first.
        """
        if not self._transfer.finished:
            raise RuntimeError(f"{self!r} has not ended; call wait(), or ask done, before outcome()")
        return result_of(self._transfer)

    def _call_when_done(self, callback: Callable[[Any], object]) -> None:
        self._engine.when_done(self, callback)

    def order_before(self, stream: StreamLike | Sequence[StreamLike], *, part: int | None = None) -> None:
        """Make work that you queue on `stream` from now on start after this transfer has ended.

        The GPU waits, not the host. (If segments of the transfer, or of the part, still wait on the host, this call
        waits until they are queued, up to a second for each device.) If the transfer fails later, the stream goes on
        all the same: check `wait()` or `poll()`.

        Args:
            stream: a handle (0: the legacy default stream), or an object with `__cuda_stream__`. For a job of a
                `ShardedEngine`, a list or tuple with one stream per device, in their order. Each waits for its own
                device only. A collective operation follows the transfer on all devices, since it starts when all
                streams have reached it.
            part: for a load in parts: wait for this part, counted from 0, and all before it. None waits for the whole
                transfer.

        Raises:
            TypeError: `stream` is no stream, or not a list with one per device.
            ValueError: the transfer has no such part; or CUDA does not know the stream in this context.
            TransferError: the transfer has failed already (the GPU may still be at work on it: `wait` before you use
                its blocks), the stream is being captured, or the CUDA context is lost.
            CapacityError: the transfer, or the part, could not all be queued within a second on a device; you may call
                it again. With several devices, the streams of the devices before the one that refused wait all the
                same.
            ClosedError: the device is closed, or this is a forked child.
            DriverError: the driver failed in another way.
            RuntimeError: you called it inside another call in the same thread.
        """
        if part is not None:
            number, count = index_or(part, -1), self._transfer.num_parts
            if not 0 <= number < count:
                raise ValueError(
                    f"part must be None or an integer in [0, {count}), got {part!r}: {self!r} was submitted in {count} "
                    "parts, see `load(..., parts=)`"
                )
            part = number
        self._engine.order_job_before(self._transfer, stream, part)

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - {"lock"})

    def __repr__(self) -> str:
        return describe(self._transfer)


def describe(transfer: AnyTransfer) -> str:
    name = f"{transfer.id}, {transfer.direction}, {transfer.nbytes} bytes"
    return f"Job({name}, {transfer.copier}, {transfer.state.name.lower()})"

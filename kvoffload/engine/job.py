"""Jobs: the states of a transfer as a table, its result, and the handle that callers hold."""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvoffload.errors import TransferError
from kvoffload.planning.transfer_plan import Direction

if TYPE_CHECKING:
    from kvoffload.copiers.table_arena import Table
    from kvoffload.device.streams import LaneStream
    from kvoffload.engine.books import Flight
    from kvoffload.engine.engine import OffloadEngine
    from kvoffload.tuning import CopyMethod


class State(enum.Enum):
    """Where a job stands."""

    NEW = "new"  # being submitted
    RUNNING = "running"  # in flight: waiting for room, queued on the GPU, or under way
    DRAINING = "draining"  # failed, but the GPU may still touch its slots and blocks
    DONE = "done"
    FAILED = "failed"


class Step(enum.Enum):
    """What happens to a job."""

    SUBMITTED = "submitted"
    ERROR = "error"  # a driver call for it failed
    ENDED = "ended"  # nothing of it is left on the GPU
    LOST = "lost"  # the context died: nothing will run any more


TRANSITIONS: dict[tuple[State, Step], State] = {
    (State.NEW, Step.SUBMITTED): State.RUNNING,
    (State.RUNNING, Step.ENDED): State.DONE,
    (State.RUNNING, Step.ERROR): State.DRAINING,
    (State.RUNNING, Step.LOST): State.FAILED,
    (State.DRAINING, Step.ENDED): State.FAILED,
    (State.DRAINING, Step.LOST): State.FAILED,
}
FINAL = frozenset({State.DONE, State.FAILED})


class TransferResult(NamedTuple):
    """How a transfer ended.

    Attributes:
        job_id: `Job.id`.
        direction: "store" or "load".
        nbytes: payload bytes.
        seconds: from the transfer's start to its end on the GPU's clock, without what it waited for before; NaN if
            unknown. A transfer too long for the driver's queues also waits between its pieces, for room and for a call.
        copier: what carried it: "strided", "gather", "split", "batch", "loop"; "none" for an empty transfer.
        error: None, or why it failed.
    """

    job_id: int
    direction: Direction
    nbytes: int
    seconds: float
    copier: str
    error: TransferError | None


class SimulatedTransferResult(TransferResult):
    """A result of the simulated device: `seconds` is made up."""

    __slots__ = ()


class Listener(Protocol):
    """Who wants to know of a job's fate. Called under the engine's lock; must not raise."""

    def boarded(self, job: Job) -> None:
        """The job is about to be in flight: whatever happens, `ended` will be called."""

    def ended(self, job: Job) -> None:
        """The job has ended, well or not: nothing of it is left on the GPU. Interrupted, it may be called again."""


class _Both:
    """Two listeners in the place of one."""

    def __init__(self, first: Listener, second: Listener) -> None:
        self._listeners = (first, second)

    def boarded(self, job: Job) -> None:
        for listener in self._listeners:
            listener.boarded(job)

    def ended(self, job: Job) -> None:
        for listener in self._listeners:
            listener.ended(job)


class JobGroup:
    """Listens to several jobs, and finishes when all of them have ended.

    The submission counts as unfinished work, too: one job may end before the next has boarded.
    """

    def __init__(self) -> None:
        self._finish: Callable[[bool], None] | None = None
        self._unfinished: set[int | None] = {None}  # job ids; None stands for the submission
        self._failed = False
        self.any_boarded = False  # whether copies may be under way

    def boarded(self, job: Job) -> None:
        self.any_boarded = True
        self._unfinished.add(job.id)

    def ended(self, job: Job) -> None:
        self._conclude(job.id, job.error is not None)

    def submitted(self, finish: Callable[[bool], None], *, failed: bool = False) -> None:
        """No further job will come. `finish` is called with whether anything failed, once all have ended."""
        self._finish = finish
        self._conclude(None, failed)

    def _conclude(self, job_id: int | None, failed: bool) -> None:
        self._failed |= failed
        self._unfinished.discard(job_id)
        if not self._unfinished and self._finish is not None:
            finish, self._finish = self._finish, None
            finish(self._failed)


class Piece:
    """Operations of a job on a stream, of one share and one part: their places in the driver's queue, the table that
    they read, and the event at their end, once recorded."""

    __slots__ = ("event", "part", "places", "share", "stream", "table")

    def __init__(self, share: int, part: int, stream: LaneStream, places: int) -> None:
        self.share = share
        self.part = part
        self.stream = stream
        self.places = places
        self.table: Table | None = None
        self.event: int | None = None


class Job:
    """One submitted transfer. Made by `OffloadEngine.store` and `load`; usable from any thread.

    Until it is done, the caller must not write its blocks (a load's targets, a store's sources) or, for a store, read
    its slots, except on a stream ordered with `order_before`.

    Attributes:
        id: unique within the engine, rising in the order of submission.
        direction: `Direction.STORE` or `Direction.LOAD`.
        nbytes: payload bytes.
        num_parts: in how many parts it is copied, one after the other; see `OffloadEngine.load`.
        way, reason: what carries it, with how many programs of a kernel, and why that was chosen; `way` is None for an
            empty transfer.
    """

    # engine bookkeeping: `sequence` counts jobs of one direction; `pieces` are queued and have not ended; `share` and
    # `part` are those being queued, `queued` counts operations of the share, `launched` says that no more will be,
    # `followed` that the job's waits are queued; `start` and `end` are timing events, `markers` plain ones

    def __init__(
        self, engine: OffloadEngine, job_id: int, direction: Direction, nbytes: int, num_parts: int = 1
    ) -> None:
        self.id = job_id
        self.direction = direction
        self.nbytes = nbytes
        self.num_parts = num_parts
        self.method: CopyMethod | None = None
        self.reason = "nothing to copy"
        self.state = State.NEW
        self.error: TransferError | None = None
        self.seconds = 0.0
        self.sequence = 0
        self.flight: Flight | None = None  # while in flight
        self.pieces: deque[Piece] = deque()
        self.share = 0
        self.part = 0
        self.queued = 0
        self.followed = False
        self.launched = False
        self.start: int | None = None
        self.end: int | None = None
        self.markers: list[int] = []
        self.query_failures = 0
        self.counted = False
        self.listener: Listener | None = None
        self._engine = engine
        self._simulated = engine.device.simulated

    def step(self, event: Step) -> None:
        """Move along the table; an illegal step raises AssertionError and changes nothing."""
        following = TRANSITIONS.get((self.state, event))
        assert following is not None, f"job {self.id}: {event} in {self.state}"
        self.state = following

    def fail(self, cause: BaseException) -> None:
        """Note the first error; what the GPU still does has to end before the job has failed."""
        self.step(Step.ERROR)
        self._note(cause)

    def lose(self, cause: BaseException) -> None:
        """The context is gone: the job has failed now."""
        self.step(Step.LOST)
        self._note(cause)

    def _note(self, cause: BaseException) -> None:
        if self.error is None:
            self.error = TransferError(
                f"{self.direction} {self.id} ({self.nbytes} bytes, {self.copier}) failed: {str(cause) or repr(cause)}"
            )
            self.error.__cause__ = cause.with_traceback(None)  # its frames would keep the engine alive

    @property
    def copier(self) -> str:
        """The name of the copier; "none" for an empty transfer."""
        return "none" if self.method is None else self.method.copier

    @property
    def finished(self) -> bool:
        """Whether the job is known to have ended; does not ask the GPU."""
        return self.state in FINAL

    @property
    def done(self) -> bool:
        """Whether the job has ended, well or not. Asks the GPU; never blocks."""
        if not self.finished:
            self._engine.advance()
        return self.finished

    def wait(self, timeout: float | None = None) -> TransferResult:
        """Wait until the job has ended; `poll()` will not report it any more.

        Raises:
            TransferError: the job failed.
            TimeoutError: `timeout` seconds have passed; the job goes on.
        """
        wait_until(lambda: self.done, timeout, repr(self))
        self._engine.forget_report(self)
        self.raise_error()
        return self.outcome()

    @property
    def lock(self) -> threading.RLock:
        """Of its engine."""
        return self._engine.lock

    def tell(self, listener: Listener) -> None:
        """Have `listener.ended` called when the job ends, or now if it has ended."""
        with self._engine.lock:
            if self.finished:
                listener.ended(self)
            else:
                self.listener = listener if self.listener is None else _Both(self.listener, listener)

    def raise_error(self) -> None:
        """Raise the job's error, if it has one: a copy each time, so that the stored one holds nobody's frames."""
        if self.error is not None:
            raise TransferError(*self.error.args) from self.error.__cause__

    def result(self) -> TransferResult:
        """The same as `wait()`."""
        return self.wait()

    def outcome(self) -> TransferResult:
        """The result of a finished job, failed or not."""
        kind = SimulatedTransferResult if self._simulated else TransferResult
        return kind(self.id, self.direction, self.nbytes, self.seconds, self.copier, self.error)

    def order_before(self, stream: Any, part: int | None = None) -> None:
        """Work queued on `stream` from now on starts after this transfer has ended. The host does not wait for that.

        (Where the driver's queues are full, it waits up to a second for the job, or the part, to be queued.)
        A transfer that fails on the GPU later does not hold the stream back: check `wait()` or `poll()`.

        Args:
            stream: a handle, or anything with `__cuda_stream__`.
            part: of a load in parts: after this part has landed, and so all before it. None: after all of it.

        Raises:
            ValueError: the job has no such part.
            TransferError: the job has failed already, or the stream is being captured.
            CapacityError: the driver's queues are full, and for a second there was no room for the rest of the job, or
                of the part.
        """
        self._engine.order_before(self, stream, part)

    def __repr__(self) -> str:
        return f"Job({self.id}, {self.direction}, {self.nbytes} bytes, {self.copier}, {self.state.value})"


def wait_until(condition: Callable[[], bool], timeout: float | None, what: str) -> None:
    """Poll `condition` with sleeps that grow from nothing to 0.2 ms, so that Ctrl-C and timeouts work.

    A sleep is a fiftieth of what was waited so far, so it delays the caller by 2% at most. Linux adds 50 us to every
    sleep (its timer slack), so there is none in the first 2.5 ms.

    Raises:
        TimeoutError: `timeout` seconds have passed.
    """
    begin = time.perf_counter()
    while not condition():
        waited = time.perf_counter() - begin
        if timeout is not None and waited >= timeout:
            raise TimeoutError(f"{what} was not done within {timeout} seconds; it goes on")
        time.sleep(0.0 if waited < 2.5e-3 else min(2e-4, waited / 50))

"""The streams of the engine's callers: what they are made to wait for, and which stand for what a transfer follows."""

from __future__ import annotations

import operator
import weakref
from typing import TYPE_CHECKING, Any

from kvoffload.device.streams import refuse_capturing, stream_handle
from kvoffload.engine.flight import FlightDeck
from kvoffload.engine.job import Job, wait_until
from kvoffload.engine.wait_streams import Source
from kvoffload.errors import CapacityError

if TYPE_CHECKING:
    from kvoffload.engine.engine import OffloadEngine

_LAUNCH_SECONDS = 1.0  # how long `order_before` waits for room in the driver's queues


class CallersStreams:
    """Waits between an engine's jobs and streams that are not its own.

    Args:
        engine: whose lock is taken where the jobs are looked at. Not kept alive: it owns this.
        flights: its jobs.
    """

    def __init__(self, engine: OffloadEngine, flights: FlightDeck) -> None:
        self._owner = weakref.ref(engine)
        self._flights = flights
        self._followers = 0  # threads that make a relay wait

    @property
    def _engine(self) -> OffloadEngine:
        engine = self._owner()
        assert engine is not None, "whoever calls this holds the engine"
        return engine

    @property
    def idle(self) -> bool:
        """Whether no thread is about to use a relay."""
        return self._followers == 0

    def behind(self, sources: tuple[Source, ...]) -> int | None:
        """The stream that stands for all that a transfer is to follow; None for nothing. See `Relays.follow`.

        The context must be current, and the engine's lock not held: arrays are asked for their producers, and that is
        other people's code.
        """
        if len(sources) == 1 and isinstance(sources[0], int):
            return sources[0]
        if not sources:
            return None
        with self._engine.lock:
            self._engine.check_usable()
            self._followers += 1
        try:
            return self._flights.wait_streams.follow(sources)
        finally:
            with self._engine.lock:
                self._followers -= 1

    def wait_stream(self) -> int:
        """A stream of the engine's that may be made to wait, and be waited for; transfers of others may follow it."""
        return self._flights.wait_streams.next()

    def order_before(self, job: Job, stream: Any, part: int | None = None) -> None:
        """See `Job.order_before`."""
        handle = stream_handle(stream, "stream")
        if part is not None:
            part = _as_part(part, job)
        self._await_launch(job, part)
        with self._engine.at_work():
            job.raise_error()
            self._wait_for(job, handle, part)

    def order_all_before(self, stream: int) -> None:
        """Work queued on `stream` from now on starts after every transfer submitted so far has ended, well or not.

        Raises:
            CapacityError, TransferError: as `Job.order_before`.
        """
        with self._engine.lock:
            jobs = self._flights.latest()
        for job in jobs:
            self._await_launch(job)
            with self._engine.at_work():
                self._wait_for(job, stream)

    def _wait_for(self, job: Job, stream: int, part: int | None = None) -> None:
        self._flights.check_alive()
        refuse_capturing(self._engine.device.driver, stream, "stream")
        if job.finished:
            return
        if part is None:
            self._flights.wait_for_job(stream, job)
        else:
            self._flights.wait_for_part(stream, job, part)

    def _await_launch(self, job: Job, part: int | None = None) -> None:
        """Wait until all of a job, or of a part, is queued; that is at once, unless the driver's queues are full."""

        def queued() -> bool:
            return job.launched or (part is not None and job.part > part) or job.done

        try:
            wait_until(queued, _LAUNCH_SECONDS, "queueing")
        except TimeoutError:
            raise CapacityError(
                f"{job!r} still waits on the host: the driver's queues are full and do not move; poll() until some end"
            ) from None


def _as_part(part: Any, job: Job) -> int:
    try:
        number = operator.index(part)
    except TypeError:
        number = -1
    if isinstance(part, bool) or not 0 <= number < job.num_parts:
        raise ValueError(
            f"part must be None or an integer in [0, {job.num_parts}), got {part!r}: {job!r} was submitted in "
            f"{job.num_parts} parts, see `load(..., parts=)`"
        )
    return number

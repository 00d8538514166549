"""The jobs in flight: their streams and events, when they have landed, and what to do when the GPU is lost.

Called under the engine's lock, with the context current.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import NamedTuple

from kvoffload.copiers import Copier
from kvoffload.driver import Driver, SourceOrder
from kvoffload.errors import CapacityError, DriverError, KVOffloadError, TransferError
from kvoffload.jobs import Job, Listener, State, Step, TransferResult
from kvoffload.memory import PinnedMemory
from kvoffload.metrics import DirectionTotals, EngineStatistics
from kvoffload.plan import Direction, TransferPlan
from kvoffload.streams import LONGEST_TRANSFER, MAX_STREAMS, WAIT_COST, EventPool, Lane, PooledStream, StreamPool
from kvoffload.teardown import run_all

_MAX_REPORTS = 1 << 16
_NOT_A_STREAM_HERE = frozenset({101, 201, 400})  # CUDA_ERROR_INVALID_DEVICE, _CONTEXT, _HANDLE
_MAX_QUERY_FAILURES = 8  # errors in a row when asking whether one job has ended, before the GPU counts as lost


class Flight(NamedTuple):
    """A job that has its streams and events: one stream per piece of its plan.

    `previous` is the job before it in its lane if that may end on another stream; `marker` is an event recorded on the
    caller's stream, None to follow none.
    """

    job: Job
    streams: list[PooledStream]
    previous: Job | None
    marker: int | None


class _Books:
    """One direction: jobs in flight in the order of submission, and totals of those that ended."""

    def __init__(self, pool: StreamPool) -> None:
        self.lane = Lane(pool)
        self.jobs: deque[Job] = deque()
        self.submitted = 0
        self.totals = DirectionTotals()


class FlightDeck:
    """Boards jobs (gives them streams and events), lands them (takes those back), keeps reports for `poll`."""

    def __init__(self, driver: Driver, memory: PinnedMemory, max_in_flight: int, stream_priority: int) -> None:
        self._driver = driver
        self._memory = memory
        self._max_in_flight = max_in_flight
        self._streams = StreamPool(driver, MAX_STREAMS, stream_priority)
        self._timers = EventPool(driver, 2 * max_in_flight, timing=True)
        self._markers = EventPool(driver, 4 * max_in_flight + MAX_STREAMS, timing=False)
        self._books = {direction: _Books(self._streams) for direction in Direction}
        self._ids = itertools.count(1)
        self._lost: Exception | None = None
        self.reports: dict[int, TransferResult] = {}
        self._dropped_reports = 0

    @property
    def in_flight(self) -> int:
        return sum(len(books.jobs) for books in self._books.values())

    def next_id(self) -> int:
        return next(self._ids)

    def check_alive(self) -> None:
        """Raise the one exception that a lost context leaves behind."""
        if self._lost is not None:
            raise TransferError(
                f"the CUDA context is lost and the engine with it: {self._lost}; restart the process"
            ) from self._lost

    def check_room(self, jobs: int) -> None:
        """Raise CapacityError unless `jobs` more may be in flight; `advance` first."""
        if self.in_flight + jobs > self._max_in_flight:
            raise CapacityError(
                f"{self.in_flight} jobs are unfinished (max_in_flight={self._max_in_flight}); poll() until some end"
            )

    # boarding -----------------------------------------------------------------------------------------------------

    def board(self, job: Job, copier: Copier, operations: int, marker: int | None) -> Flight:
        """Give a job its sequence number, a stream per piece and its events, and note it as in flight.

        Raises:
            CapacityError, DriverError: streams or events are to be had no more. Everything is as before.
        """
        books = self._books[job.direction]
        previous = books.jobs[-1] if books.jobs else None
        if marker is not None:
            job.markers.append(marker)
        try:
            job.start = self._timers.acquire()
            job.end = self._timers.acquire()
            self._acquire_streams(job, books.lane, copier, operations)
        except BaseException:
            self._give_back(job)
            raise
        books.submitted += 1
        job.sequence = books.submitted
        books.jobs.append(job)
        if job.listener is not None:
            job.listener.boarded(job)
        streams = [stream for stream, _ in job.pieces]
        same_stream = previous is not None and previous.end_recorded and previous.pieces[-1][0] is streams[0]
        return Flight(job, streams, None if same_stream else previous, marker)

    def mark(self, stream: int) -> int:
        """An event recorded on a stream of the caller's.

        Raises:
            ValueError: CUDA does not know the stream in this context.
        """
        event = self._markers.acquire()
        try:
            self._driver.event_record(event, stream)
        except BaseException as error:
            self._markers.release(event)
            if isinstance(error, DriverError) and error.code in _NOT_A_STREAM_HERE:
                raise ValueError(
                    f"after={stream:#x} is no stream of this device's context ({error.name}): wait for it yourself and "
                    "pass NO_WAIT, or open the device with its context, open_device(context=...)"
                ) from error
            raise
        return event

    def _acquire_streams(self, job: Job, lane: Lane, copier: Copier, operations: int) -> None:
        if copier.queue_cost(operations) > LONGEST_TRANSFER:
            raise CapacityError(
                f"a transfer of {operations} operations through {copier.name!r} is too long for the driver's queues, "
                f"which hold {LONGEST_TRANSFER}; split it into several"
            )
        for begin in range(0, operations, copier.piece_operations):
            piece = min(copier.piece_operations, operations - begin)
            cost = copier.queue_cost(piece) + WAIT_COST
            job.pieces.append((lane.take(cost), cost))
            if begin:
                job.links.append(self._markers.acquire())

    def take_off(
        self,
        flight: Flight,
        plan: TransferPlan,
        copier: Copier,
        order: SourceOrder,
        rival: Job | None,
    ) -> None:
        """Queue a boarded job: the waits, then its pieces between two events.

        Args:
            plan: as the copier prepared it.
            rival: the latest job of the other direction that touches the same slots or blocks, if any.
        """
        driver, job = self._driver, flight.job
        assert job.start is not None
        assert job.end is not None
        stream = flight.streams[0].handle
        if flight.marker is not None:
            driver.stream_wait_event(stream, flight.marker)
        if flight.previous is not None:
            self.wait_for_job(stream, flight.previous)
        if rival is not None:
            self.wait_for_job(stream, rival)
        driver.event_record(job.start, stream)
        for index, pooled in enumerate(flight.streams):
            if pooled.handle != stream:
                driver.event_record(job.links[index - 1], stream)
                driver.stream_wait_event(pooled.handle, job.links[index - 1])
                stream = pooled.handle
            begin = index * copier.piece_operations
            copier.submit(plan.part(begin, begin + copier.piece_operations), order, stream)
        driver.event_record(job.end, stream)
        job.end_recorded = True

    def wait_for_job(self, stream: int, job: Job) -> None:
        """Have `stream` wait for `job` and all jobs before it in its lane.

        The end of a job implies the end of those before it. A job whose submission failed half-way has no end, and its
        streams may lack the wait for its predecessor: then all that it queued is waited for, and its predecessor.
        """
        last: Job | None = job
        while last is not None and not last.end_recorded:
            self._wait_for_streams(stream, last)
            last = self.unfinished(last.direction, last.sequence - 1)
        if last is not None:
            assert last.end is not None
            self._driver.stream_wait_event(stream, last.end)

    def _wait_for_streams(self, stream: int, job: Job) -> None:
        for pooled in {piece for piece, _ in job.pieces}:
            event = self._markers.acquire()
            job.markers.append(event)
            self._driver.event_record(event, pooled.handle)
            self._driver.stream_wait_event(stream, event)

    def any_unfinished(self, direction: Direction) -> bool:
        return bool(self._books[direction].jobs)

    def unfinished(self, direction: Direction, sequence: int) -> Job | None:
        """The job with that sequence number if it is still in flight."""
        jobs = self._books[direction].jobs
        if not jobs or sequence < jobs[0].sequence:
            return None
        return jobs[sequence - jobs[0].sequence]

    def submission_failed(self, job: Job, error: BaseException) -> None:
        """A driver call failed while the job was queued; parts of it may run. It fails when nothing of it is left."""
        if isinstance(error, DriverError) and error.sticky:
            self.lose(error)
            return
        job.fail(error)

    # landing ------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Land every job that has ended."""
        for books in self._books.values():
            while books.jobs and self._has_ended(books.jobs[0]):
                job = books.jobs[0]  # stays until it has landed: an interrupt in between must not lose it
                if not job.finished:
                    self._measure(job)
                    self._give_back(job)
                    self.land(job)
                books.jobs.popleft()

    def _has_ended(self, job: Job) -> bool:
        if not job.pieces:  # given back already
            return True
        try:
            if job.end_recorded:
                assert job.end is not None
                ended = self._driver.event_query(job.end)
            else:
                ended = all(self._driver.stream_query(stream.handle) for stream, _ in job.pieces)
        except DriverError as error:
            job.query_failures += 1
            if error.sticky or job.query_failures >= _MAX_QUERY_FAILURES:
                self.lose(error)
            return False
        job.query_failures = 0
        return ended

    def _measure(self, job: Job) -> None:
        job.seconds = math.nan
        if job.state is State.RUNNING:
            assert job.start is not None
            assert job.end is not None
            try:
                job.seconds = self._driver.event_seconds(job.start, job.end)
            except KVOffloadError:
                pass  # the bytes are there; only their time is unknown

    def _give_back(self, job: Job) -> None:
        """Return streams and events of a job that is not in flight (any more)."""
        lane = self._books[job.direction].lane
        for stream, cost in job.pieces:
            lane.give_back(stream, cost)
        for event in (job.start, job.end):
            if event is not None:
                self._timers.release(event)
        for event in job.markers + job.links:
            self._markers.release(event)
        job.pieces, job.markers, job.links, job.start, job.end = [], [], [], None, None

    def fly_nothing(self, job: Job, listener: Listener | None) -> Job:
        """A job with nothing to copy ends at once."""
        job.listener = listener
        if listener is not None:
            listener.boarded(job)
        job.step(Step.SUBMITTED)
        self.land(job)
        return job

    def land(self, job: Job) -> None:
        """The job has ended: settle its state, tell who asked to be told, keep it for `poll`."""
        job.step(Step.ENDED)
        self._settle(job)

    def _settle(self, job: Job) -> None:
        books = self._books[job.direction]
        failed = job.error is not None
        seconds = 0.0 if failed or math.isnan(job.seconds) else job.seconds
        totals = books.totals
        books.totals = DirectionTotals(
            totals.jobs + 1,
            totals.failed + failed,
            totals.nbytes + (0 if failed else job.nbytes),
            totals.seconds + seconds,
        )
        self.reports[job.id] = job.outcome()
        if len(self.reports) > _MAX_REPORTS:
            del self.reports[next(iter(self.reports))]
            self._dropped_reports += 1
        if job.listener is not None:
            job.listener.ended(job)

    def take_reports(self) -> list[TransferResult]:
        results = list(self.reports.values())
        self.reports.clear()
        return results

    def lose(self, error: Exception) -> None:
        """The context is dead: nothing runs any more, nothing can be given back, every job in flight has failed."""
        self._lost = self._lost or error
        for books in self._books.values():
            books.lane.abandon()
            while books.jobs:
                job = books.jobs.popleft()
                job.lose(error)
                job.seconds = math.nan
                job.pieces = []
                self._settle(job)

    # the end ------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Destroy streams and events, unpin the pool. Nothing may be in flight.

        After a loss nothing is given back: the GPU may still use it, or the context has taken it along.
        """
        assert self.in_flight == 0
        if self._lost is not None:
            self._memory.keep()
            return
        run_all((self._streams.close, self._timers.close, self._markers.close, self._memory.release))

    def statistics(self, num_slots: int, simulated: bool) -> EngineStatistics:
        return EngineStatistics(
            simulated=simulated,
            num_slots=num_slots,
            pinned_bytes=self._memory.nbytes,
            in_flight=self.in_flight,
            unreported=len(self.reports),
            dropped_reports=self._dropped_reports,
            streams=self._streams.created,
            streams_in_use=self._streams.in_use,
            events=self._timers.created + self._markers.created,
            events_in_use=self._timers.in_use + self._markers.in_use,
            store=self._books[Direction.STORE].totals,
            load=self._books[Direction.LOAD].totals,
        )

"""The jobs in flight: their pieces on streams, when they have landed, and what to do when the GPU is lost.

A job boards (it is in flight from then on, whatever happens), is launched piece by piece as its lane has room, and
lands when all of it has ended. What finds no room waits on the host, in order, and is launched in a later call.
Everything here is called under the engine's lock, with the context current, and nothing waits for the GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from kvoffload.copiers import CopierSet
from kvoffload.device.pinned import PinnedMemory
from kvoffload.device.streams import EVENT_COST, QUEUE_LIMIT, STREAMS_PER_LANE, EventPool, Lane
from kvoffload.driver import Driver
from kvoffload.engine.books import Books, Flight
from kvoffload.engine.job import Job, Listener, Piece, State, Step, TransferResult
from kvoffload.engine.launcher import Launcher
from kvoffload.engine.metrics import DirectionTotals, EngineStatistics
from kvoffload.engine.wait_streams import WaitStreams
from kvoffload.errors import CapacityError, DriverError, KVOffloadError, TransferError
from kvoffload.internal.teardown import run_all
from kvoffload.planning.transfer_plan import Direction

_MAX_REPORTS = 1 << 16
_NOT_A_STREAM_HERE = frozenset({101, 201, 400})  # CUDA_ERROR_INVALID_DEVICE, _CONTEXT, _HANDLE
# Each takes a place at least, and those for its events. So pieces find an event, however many parts a load has.
_MOST_PIECES = len(Direction) * (STREAMS_PER_LANE + 1) * QUEUE_LIMIT // (1 + EVENT_COST)
_MAX_QUERY_FAILURES = 8  # errors in a row when asking whether one job has ended, before the GPU counts as lost


class FlightDeck:
    """Boards jobs, launches and lands them, and keeps the reports for `poll`."""

    def __init__(
        self, driver: Driver, memory: PinnedMemory, copier_set: CopierSet, max_in_flight: int, stream_priority: int
    ) -> None:
        self._driver = driver
        self._memory = memory
        self._copier_set = copier_set
        self._max_in_flight = max_in_flight
        # two timers a job, and markers for jobs and for the ends of pieces; some to spare for what interrupts lose
        self._timers = EventPool(driver, 2 * max_in_flight + 256, timing=True)
        self._markers = EventPool(driver, 4 * max_in_flight + _MOST_PIECES + 1024, timing=False)
        with ExitStack() as undo:
            store = Lane(driver, stream_priority)
            undo.callback(store.close)
            load = Lane(driver, stream_priority)
            undo.callback(load.close)
            self.wait_streams = WaitStreams(driver, stream_priority)
            undo.pop_all()
        self._books = {Direction.STORE: Books(store), Direction.LOAD: Books(load)}
        self._launcher = Launcher(driver, self._books, self._markers, self.lose)
        self._ids = itertools.count(1)
        self._lost: Exception | None = None
        self.reports: dict[int, TransferResult] = {}
        self._dropped_reports = 0

    @property
    def in_flight(self) -> int:
        return sum(len(books.jobs) for books in self._books.values())

    def next_id(self) -> int:
        return next(self._ids)

    def jobs(self) -> Iterator[Job]:
        """In flight."""
        return itertools.chain.from_iterable(books.jobs for books in self._books.values())

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

    def mark(self, job: Job, stream: int) -> None:
        """Record an event of the job's on a stream of the caller's, for the job to follow.

        Raises:
            ValueError: CUDA does not know the stream in this context.
        """
        job.markers.append(self._markers.acquire())
        try:
            self._driver.event_record(job.markers[0], stream)
        except DriverError as error:
            if error.code in _NOT_A_STREAM_HERE:
                raise ValueError(
                    f"after={stream:#x} is no stream of this device's context ({error.name}): wait for it yourself and "
                    "pass NO_WAIT, or open the device with its context, open_device(context=...)"
                ) from error
            raise

    def board(self, job: Job, flight: Flight, record: Callable[[], None]) -> None:
        """Give a job its sequence number and its timing events; it is in flight. `launch` queues it.

        Args:
            record: called when the job has its sequence number, before anything can be queued.

        Raises:
            CapacityError, DriverError: no events are to be had. `unboard` it.
        """
        books = self._books[job.direction]
        job.start = self._timers.acquire()
        job.end = self._timers.acquire()
        job.sequence = books.next_sequence()
        job.flight = flight
        record()
        job.step(Step.SUBMITTED)
        if job.listener is not None:
            job.listener.boarded(job)
        books.jobs.append(job)
        books.submitted = job.sequence

    def fly_nothing(self, job: Job, listener: Listener | None) -> Job:
        """A job with nothing to copy ends at once."""
        job.listener = listener
        if listener is not None:
            listener.boarded(job)
        job.step(Step.SUBMITTED)
        self._land(job)
        return job

    @property
    def submitted(self) -> int:
        """How many jobs have ever been in flight."""
        return sum(books.next_sequence() - 1 for books in self._books.values())

    def latest(self) -> list[Job]:
        """The latest unfinished job of each direction; those before it end before it."""
        return [books.jobs[-1] for books in self._books.values() if books.jobs]

    def any_unfinished(self, direction: Direction) -> bool:
        return bool(self._books[direction].jobs)

    def unfinished(self, direction: Direction, sequence: int) -> Job | None:
        """The job with that sequence number if it is still in flight."""
        return self._launcher.unfinished(direction, sequence)

    def launch(self) -> None:
        """Queue what there is room for, in order within each direction."""
        self._launcher.launch()

    def wait_for_job(self, stream: int, job: Job) -> None:
        """Have `stream` wait for a launched `job` and all jobs before it in its lane."""
        self._launcher.wait_for_job(stream, job)

    def wait_for_part(self, stream: int, job: Job, part: int) -> None:
        """Have `stream` wait for a part of a job in flight, all of which is queued, and for all before it."""
        self._launcher.wait_for_part(stream, job, part)

    # landing ------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Land every job that has ended, and launch what there is room for."""
        for direction, books in self._books.items():
            while books.jobs and self._has_ended(books.jobs[0]):
                self._land(books.jobs[0])
                books.jobs.popleft()  # last: an interrupt before that must not lose the job
            if not books.jobs:
                books.lane.clear()
                self._copier_set.clear(direction)
        self.launch()

    def _has_ended(self, job: Job) -> bool:
        """Whether all of a job is over. Pieces that have ended make room at once."""
        try:
            while job.pieces and self._piece_has_ended(job.pieces[0]):
                self._launcher.give_back(job, job.pieces.popleft())
        except DriverError as error:
            job.query_failures += 1
            if error.sticky or job.query_failures >= _MAX_QUERY_FAILURES:
                self.lose(error)
            return False
        job.query_failures = 0
        return job.launched and not job.pieces

    def _piece_has_ended(self, piece: Piece) -> bool:
        if piece.event is not None:
            return self._driver.event_query(piece.event)
        return self._driver.stream_query(piece.stream.handle)

    def _measure(self, job: Job) -> None:
        job.seconds = math.nan
        if job.state is State.RUNNING:
            assert job.start is not None
            assert job.end is not None
            try:
                job.seconds = self._driver.event_seconds(job.start, job.end)
            except KVOffloadError:
                pass  # the bytes are there; only their time is unknown

    def unboard(self, job: Job) -> None:
        """Take back the events of a job, unless it has boarded."""
        if self.unfinished(job.direction, job.sequence) is job:
            return
        self._give_back(job)
        if job.listener is not None:  # an interrupt may have come after it was told
            job.listener.ended(job)
            job.listener = None

    def _give_back(self, job: Job) -> None:
        """Return the events of a job that is not in flight (any more): if interrupted, too few, but none twice."""
        timers, markers = (job.start, job.end), job.markers
        job.markers, job.start, job.end = [], None, None
        for event in timers:
            if event is not None:
                self._timers.release(event)
        for event in markers:
            self._markers.release(event)

    def _land(self, job: Job) -> None:
        """All of the job has ended. May be repeated after an interrupt, from where it stopped."""
        if job.start is not None:
            self._measure(job)
            self._give_back(job)
        if not job.finished:
            job.step(Step.ENDED)
        self._settle(job)

    def _settle(self, job: Job) -> None:
        """Keep the result for `poll`, and tell who asked to be told."""
        job.flight = None
        if not job.counted:
            job.counted = True
            self._count(job)
        if job.listener is not None:
            job.listener.ended(job)
            job.listener = None

    def _count(self, job: Job) -> None:
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

    def take_reports(self) -> list[TransferResult]:
        results = list(self.reports.values())
        self.reports.clear()
        return results

    def lose(self, error: Exception) -> None:
        """The context is dead: nothing runs any more, nothing can be given back, every job in flight has failed."""
        self._lost = self._lost or error
        for books in self._books.values():
            while books.jobs:
                job = books.jobs[0]
                job.launched = True
                job.pieces.clear()
                if not job.finished:
                    job.lose(error)
                    job.seconds = math.nan
                self._settle(job)
                books.jobs.popleft()

    # the end ------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Destroy streams and events, give back what copiers hold, unpin the pool. Nothing may be in flight.

        After a loss nothing is given back: the GPU may still use it, or the context has taken it along.
        """
        assert self.in_flight == 0
        if self._lost is not None:
            self._memory.keep()
            self._copier_set.keep()
            return
        lanes = [books.lane.close for books in self._books.values()]
        run_all(
            (
                *lanes,
                self.wait_streams.close,
                self._timers.close,
                self._markers.close,
                self._copier_set.close,
                self._memory.release,
            )
        )

    def statistics(self, num_slots: int, simulated: bool) -> EngineStatistics:
        lanes = [books.lane for books in self._books.values()]
        return EngineStatistics(
            simulated=simulated,
            num_slots=num_slots,
            pinned_bytes=self._memory.nbytes,
            in_flight=self.in_flight,
            held=sum(not job.launched for books in self._books.values() for job in books.jobs),
            unreported=len(self.reports),
            dropped_reports=self._dropped_reports,
            streams=sum(len(lane.streams) for lane in lanes) + len(self.wait_streams),
            streams_in_use=sum(lane.in_use for lane in lanes),
            events=self._timers.created + self._markers.created,
            events_in_use=self._timers.in_use + self._markers.in_use,
            store=self._books[Direction.STORE].totals,
            load=self._books[Direction.LOAD].totals,
        )

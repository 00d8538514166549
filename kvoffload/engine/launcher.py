"""Queues the pieces of jobs on the streams of their lanes, behind everything that they must follow.

A job has one share of its blocks, or two that run at the same time. Pieces of a share follow each other, on one stream
or on several.

    lane's stream for kernels   ─after, previous, rival─●start─[kernel's share]──────●
    lane's stream for copies                     wait start ─[piece]─●─[piece]─ wait ●─●end

A load in parts has one share. No piece is of two parts, so a part has landed at the event behind its last piece.

    lane's stream for copies    ─after, previous, rival─●start─[part 0]─●─[piece of part 1]─●─[its rest]─●─[part 2]─●end

Everything here is called under the engine's lock, with the context current.
"""

from __future__ import annotations

from collections.abc import Callable

from kvoffload.copiers import Staged, Submit
from kvoffload.device.streams import EVENT_COST, EventPool, Lane, LaneStream
from kvoffload.driver import Driver
from kvoffload.engine.books import Books, Flight
from kvoffload.engine.job import Job, Piece
from kvoffload.errors import DriverError, KVOffloadError
from kvoffload.planning.transfer_plan import Direction


class Launcher:
    """Queues jobs of both directions.

    Args:
        books: of each direction.
        markers: plain events.
        lose: called with a sticky error, which ends everything.
    """

    def __init__(
        self, driver: Driver, books: dict[Direction, Books], markers: EventPool, lose: Callable[[Exception], None]
    ) -> None:
        self._driver = driver
        self._books = books
        self._markers = markers
        self._lose = lose

    def unfinished(self, direction: Direction, sequence: int) -> Job | None:
        """The job with that sequence number if it is still in flight."""
        return self._books[direction].job(sequence)

    def launch(self) -> None:
        """Queue what there is room for, in order within each direction."""
        launched = True
        while launched:  # again: a job of one direction may have waited for one of the other
            launched = False
            for books in self._books.values():
                while (job := books.next_to_launch()) is not None and self._launch(job, books.lane):
                    books.launched = job.sequence
                    launched = True

    def _launch(self, job: Job, lane: Lane) -> bool:
        """Queue pieces of a job while there is room; False while some are left or its rival is not all queued."""
        if job.launched:
            return True
        assert job.flight is not None
        flight = job.flight
        if flight.rival is not None and not (flight.rival.launched or flight.rival.finished):
            return False
        ahead: dict[int, Staged] = {}
        cleared = False
        while not job.launched:
            share = flight.shares[job.share]
            work, copier = share
            stop = min(job.queued + copier.piece_operations, share.end_of(job.part))
            places = copier.queue_cost(stop - job.queued) + EVENT_COST
            stream = lane.take(places, kernel=copier.is_kernel)
            if stream is None:
                return False
            last = job.pieces[-1] if job.pieces else None
            piece = Piece(job.share, job.part, stream, places)
            job.pieces.append(piece)
            try:
                if job.share == 0 and job.queued == 0:
                    ahead = _stage_ahead(flight)
                staged = ahead.pop(job.share, None) or copier.stage(work.cut(job.queued, stop), flight.order)
                if staged is None:
                    self.give_back(job, job.pieces.pop())
                    if cleared or not self._is_alone(job):
                        return False
                    copier.clear(job.direction)  # an interrupt has lost tables
                    cleared = True
                    continue
                piece.table = staged.table
                self._launch_piece(job, flight, stop, piece, last, staged.submit)
            except BaseException as error:
                self._submission_failed(job, error)
                if not isinstance(error, KVOffloadError):
                    raise
        return True

    def _is_alone(self, job: Job) -> bool:
        """Whether nothing of the job's direction is queued."""
        return not job.pieces and self._books[job.direction].jobs[0] is job

    def _launch_piece(
        self, job: Job, flight: Flight, stop: int, piece: Piece, last: Piece | None, submit: Submit
    ) -> None:
        """Queue operations `[job.queued, stop)` of the job's share: behind what they must follow, before an event."""
        handle, share = piece.stream.handle, flight.shares[job.share]
        self._begin_piece(job, flight, piece, last)
        submit(handle, job.start if job.share == 0 and job.queued == 0 else None)
        done = stop == len(share.work)
        if done and job.share == len(flight.shares) - 1:
            self._join(job, piece)
            assert job.end is not None
            self._driver.event_record(job.end, handle)
            piece.event = job.end
            job.launched = True
            return
        event = self._mark(job, piece.stream)
        job.markers.remove(event)
        piece.event = event
        if done:
            job.share, job.queued = job.share + 1, 0
        else:
            job.part, job.queued = job.part + (stop == share.end_of(job.part)), stop

    def _begin_piece(self, job: Job, flight: Flight, piece: Piece, last: Piece | None) -> None:
        """Have the piece's stream wait: for all that the job must follow, its start, or the piece before it."""
        driver, handle = self._driver, piece.stream.handle
        if job.share == 0 and job.queued == 0:
            self._follow(job, flight, piece.stream)
        elif job.queued == 0:
            assert job.start is not None
            driver.stream_wait_event(handle, job.start)
        elif last is not None and last.stream is not piece.stream:
            assert last.event is not None
            driver.stream_wait_event(handle, last.event)

    def _join(self, job: Job, final: Piece) -> None:
        """Have the stream of the final piece wait for the end of the job's other shares."""
        ends = {piece.share: piece.event for piece in job.pieces if piece.share != final.share}
        for event in ends.values():
            assert event is not None
            self._driver.stream_wait_event(final.stream.handle, event)

    def _follow(self, job: Job, flight: Flight, stream: LaneStream) -> None:
        """Have a job's first stream wait for all that the job must follow."""
        previous = self.unfinished(job.direction, job.sequence - 1)
        if flight.marked:
            self._driver.stream_wait_event(stream.handle, job.markers[0])
        if previous is not None and not self._ends_on(previous, stream):
            self.wait_for_job(stream.handle, previous)
        if flight.rival is not None and not flight.rival.finished:
            self.wait_for_job(stream.handle, flight.rival)
        job.followed = True

    def _ends_on(self, job: Job, stream: LaneStream) -> bool:
        """Whether what is queued on `stream` next follows `job` without a wait."""
        return job.error is None and (not job.pieces or job.pieces[-1].stream is stream)

    def wait_for_job(self, stream: int, job: Job) -> None:
        """Have `stream` wait for a launched `job` and all jobs before it in its lane.

        The end of a job implies the end of those before it. A job whose submission failed half-way has no end, and may
        not follow its predecessor: then what it queued is waited for, piece by piece, and its predecessor.
        """
        last: Job | None = job
        while last is not None and last.error is not None:
            for piece in last.pieces:
                event = self._mark(job, piece.stream) if piece.event is None else piece.event
                self._driver.stream_wait_event(stream, event)
            last = None if last.followed else self.unfinished(last.direction, last.sequence - 1)
        if last is not None:
            assert last.end is not None
            self._driver.stream_wait_event(stream, last.end)

    def wait_for_part(self, stream: int, job: Job, part: int) -> None:
        """Have `stream` wait for a part of a job in flight, all of which is queued, and for all before it.

        The parts of which no piece is left have landed.
        """
        last = next((piece for piece in reversed(job.pieces) if piece.part <= part), None)
        if last is not None:
            assert last.event is not None
            self._driver.stream_wait_event(stream, last.event)

    def _mark(self, job: Job, stream: LaneStream) -> int:
        """An event of the job's behind everything on `stream`."""
        event = self._markers.acquire()
        job.markers.append(event)
        self._driver.event_record(event, stream.handle)
        return event

    def _submission_failed(self, job: Job, error: BaseException) -> None:
        """A driver call failed while the job was queued; some of it may run. It fails when nothing of it is left."""
        if isinstance(error, DriverError) and error.sticky:
            self._lose(error)
            return
        job.fail(error)
        job.launched = True  # no more of it will be queued
        if job.pieces and job.pieces[-1].event is None:
            try:  # so that its end can be told from that of later work on the stream
                job.pieces[-1].event = self._mark(job, job.pieces[-1].stream)
            except KVOffloadError:
                pass  # then it ends when the stream is idle
            else:
                job.markers.pop()

    def give_back(self, job: Job, piece: Piece) -> None:
        """A piece has ended, or was never queued, and is not among the job's any more: return its places, its event,
        and its table unless another piece reads that, too."""
        piece.stream.queued -= piece.places
        if piece.event is not None and piece.event != job.end:
            self._markers.release(piece.event)
        table = piece.table
        if table is not None and all(each.table is not table for each in job.pieces):  # no later part reads it
            table.release()  # last: tables that an interrupt loses come back when there is no room for others


def _stage_ahead(flight: Flight) -> dict[int, Staged]:
    """Stage the first piece of the shares behind the first, so that this need not be done while the first one runs.

    Kernels come first: what is staged here holds no table, so it may be forgotten.
    """
    found = {}
    for number, (work, copier) in enumerate(flight.shares[1:], start=1):
        staged = copier.stage(work.cut(0, copier.piece_operations), flight.order)
        assert staged is not None
        assert staged.table is None
        found[number] = staged
    return found

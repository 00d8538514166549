"""Finds out which transfers have ended, keeps their results for `poll`, and repairs what an interrupt left behind.

Everything here is called under the engine's lock, with the context current, and nothing waits for the GPU.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

from kvoffload.copiers import CopierSet
from kvoffload.copiers.table_arena import Table
from kvoffload.driver import Driver
from kvoffload.engine.job import TransferResult, result_of
from kvoffload.engine.launcher import Launcher
from kvoffload.engine.queues import InFlight, TransferQueue
from kvoffload.engine.tracing import new_notices, note_failure, note_loss
from kvoffload.engine.transfer import Event, Segment, State, Transfer
from kvoffload.engine.urgent import restore_order
from kvoffload.errors import CapacityError, DriverError, KVOffloadError, TransferError

MOST_REPORTS = 1 << 16
_MOST_QUERY_FAILURES = 8  # errors in a row when asking whether a transfer has ended, before the GPU counts as lost


class Tracker:
    """Completes transfers.

    Attributes:
        reports: by id, the results that `poll` has still to report, the oldest first. They keep no transfer alive.
        dropped_reports: how many were dropped because there were more than `most_reports`.
        notices: what is reported once the lock is released, see `tracing`.
    """

    def __init__(self, driver: Driver, in_flight: InFlight, launcher: Launcher, copiers: CopierSet) -> None:
        self._driver = driver
        self._in_flight = in_flight
        self._launcher = launcher
        self._copiers = copiers
        self.most_reports = MOST_REPORTS
        self.reports: OrderedDict[int, TransferResult] = OrderedDict()  # forgets its oldest in O(1)
        self.dropped_reports = 0
        self.notices = new_notices()

    def check_alive(self) -> None:
        """Raise the one exception that a lost context leaves behind."""
        lost = self._in_flight.lost
        if lost is not None:
            raise TransferError(
                f"the CUDA context is lost and the engine with it: {lost}; restart the process"
            ) from lost

    def check_room(self, transfers: int) -> None:
        """Raise CapacityError if `transfers` more would exceed `max_in_flight`. Call `advance` before."""
        count, most = self._in_flight.count, self._in_flight.max_in_flight
        if count + transfers > most:
            raise CapacityError(f"{count} jobs are unfinished (max_in_flight={most}); poll() until some end")

    def advance(self) -> None:
        """Complete every transfer that has ended, and queue as many segments as there is room for."""
        in_flight = self._in_flight
        in_flight.consistent = False
        try:
            for queue in in_flight.both:
                while queue.transfers and self._has_ended(queue.transfers[0]):
                    self._complete(queue)
            if in_flight.stores.waiting or in_flight.loads.waiting:
                self._launcher.launch()
        except DriverError as error:  # of a lost context; all others have failed a transfer
            self.mark_lost(error)
        in_flight.consistent = True

    def _has_ended(self, transfer: Transfer) -> bool:
        """Whether all of a transfer is over. Segments that have ended make room at once.

        Raises:
            DriverError: the CUDA context is lost.
        """
        segments = transfer.segments
        try:
            while segments and self._segment_has_ended(segments[0]):
                self._release(transfer, segments.popleft())
        except DriverError as error:
            transfer.query_failures += 1
            if error.sticky or transfer.query_failures >= _MOST_QUERY_FAILURES:
                raise
            return False
        transfer.query_failures = 0
        return transfer.enqueued and not segments

    def _segment_has_ended(self, segment: Segment) -> bool:
        if segment.event is not None:
            return self._driver.event_query(segment.event)
        return self._driver.stream_query(segment.stream.handle)

    def _release(self, transfer: Transfer, segment: Segment) -> None:
        """A segment has ended: free its places, its event, and its table unless a later segment reads that, too."""
        segment.stream.places -= segment.places
        if segment.nbytes:
            segment.stream.nbytes -= segment.nbytes
        if segment.event is not None and segment.event != transfer.end:
            self._in_flight.markers.idle.append(segment.event)
        if segment.table is not None:
            self._release_table(transfer, segment.table)

    def _release_table(self, transfer: Transfer, table: Table) -> None:
        if all(each.table is not table for each in transfer.segments):
            table.release()

    def _complete(self, queue: TransferQueue) -> None:
        """The first transfer of a queue has ended. It leaves the queue last, so that an interrupt does not lose it."""
        transfer = queue.transfers[0]
        if not transfer.finished:
            transfer.seconds = self._measure(transfer)
            transfer.step(Event.ENDED)
        self._report(queue, transfer)
        if transfer.start is not None and transfer.end is not None:
            self._in_flight.timers.idle += (transfer.start, transfer.end)
        self._in_flight.markers.idle += transfer.markers
        transfer.start = transfer.end = transfer.conflict = transfer.engine = None
        transfer.markers, transfer.shares = [], ()
        queue.transfers.popleft()

    def _measure(self, transfer: Transfer) -> float:
        if transfer.state is State.RUNNING:
            assert transfer.start is not None
            assert transfer.end is not None
            try:
                return self._driver.event_seconds(transfer.start, transfer.end)
            except KVOffloadError:
                pass  # the bytes are there; only their time is unknown
        return math.nan

    def complete_empty(self, transfer: Transfer) -> None:
        """A transfer with nothing to copy ends at once; it is never in a queue."""
        transfer.step(Event.SUBMITTED)
        transfer.step(Event.ENDED)
        self._report(self._in_flight.of(transfer.direction), transfer)

    def _report(self, queue: TransferQueue, transfer: Transfer) -> None:
        """Count a finished transfer, once, and keep its result for `poll`."""
        if transfer.sequence == 0 or transfer.sequence > queue.counted:
            result = result_of(transfer)
            queue.counted = transfer.sequence or queue.counted  # no call from here to the report: all of it is done
            queue.ended += 1
            if transfer.error is not None:
                queue.failed += 1
            else:
                queue.nbytes += transfer.nbytes
                if transfer.seconds == transfer.seconds:  # not NaN
                    queue.seconds += transfer.seconds
            self.reports[transfer.id] = result
            if transfer.trace is not None:
                self.notices.append(transfer)
            if transfer.error is not None and self._in_flight.lost is None:
                note_failure(self.notices, transfer.error)
        if len(self.reports) > self.most_reports:
            self.dropped_reports += 1
            self.reports.popitem(last=False)

    def take_reports(self) -> list[TransferResult]:
        """The results that `poll` has still to report, which are then reported."""
        reports, self.reports = self.reports, OrderedDict()
        return list(reports.values())

    def mark_lost(self, error: Exception) -> None:
        """The context is lost: nothing runs any more, nothing can be freed, every transfer in flight has failed."""
        in_flight = self._in_flight
        if in_flight.lost is None:
            note_loss(self.notices, error, in_flight.count)
            in_flight.lost = error
        for queue in in_flight.both:
            queue.waiting.clear()
            while queue.transfers:
                transfer = queue.transfers[0]
                if not transfer.finished:
                    transfer.mark_lost(in_flight.lost)
                transfer.conflict = transfer.engine = None
                transfer.shares = ()
                self._report(queue, transfer)
                queue.transfers.popleft()

    def repair(self) -> None:
        """A call was interrupted: compute everything again from the transfers in flight. May be interrupted itself.

        1. A transfer that is finished and still in its queue has been completed but for leaving it.
        2. Where a transfer was being put ahead of others, their numbers and what they touch are brought in order.
        3. Places, idle events and tables are computed from what the remaining transfers refer to.
        4. A transfer that a call was submitting, or whose segments it was queueing, fails. Its segments say what the
           GPU may still be doing for it.
        """
        in_flight = self._in_flight
        if in_flight.lost is not None:
            self.mark_lost(in_flight.lost)
        used: set[int] = set()
        tables = []
        for queue in in_flight.both:
            transfers = queue.transfers
            if transfers:
                queue.submitted = max(queue.submitted, transfers[-1].sequence)
            while transfers and transfers[0].finished:
                self._report(queue, transfers[0])
                transfers[0].conflict = transfers[0].engine = None
                transfers.popleft()
            if queue.reordering:
                restore_order(in_flight)
            for stream in queue.lane.streams:
                segments = [each for transfer in transfers for each in transfer.segments if each.stream is stream]
                stream.places = sum(segment.places for segment in segments)
                stream.nbytes = sum(segment.nbytes for segment in segments)
            for transfer in transfers:
                used.update(transfer.events())
                tables += [segment.table for segment in transfer.segments if segment.table is not None]
        in_flight.timers.keep_in_use(used)
        in_flight.markers.keep_in_use(used)
        self._copiers.restore(tables)
        self._fail_interrupted()
        in_flight.consistent = True

    def _fail_interrupted(self) -> None:
        for queue in self._in_flight.both:
            for transfer in queue.transfers:
                if transfer.submitting:
                    try:
                        self._launcher.fail(transfer, KeyboardInterrupt("its submission was interrupted"))
                    except DriverError as error:
                        self.mark_lost(error)
                        return
                    transfer.submitting = False
            queue.waiting = deque(transfer for transfer in queue.transfers if not transfer.enqueued)

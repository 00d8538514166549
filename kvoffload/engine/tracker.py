"""Finds the transfers that have ended, and repairs the engine after an interrupt.

Call everything here under the engine's lock, with the context current. Nothing waits for the GPU.
"""

from __future__ import annotations

import logging
import math
from collections import deque

from kvoffload.copiers import CopierSet, Half, Place
from kvoffload.driver import Driver
from kvoffload.engine.job import ENDED, RUNNING, Segment, Transfer
from kvoffload.engine.launcher import Launcher
from kvoffload.engine.queues import InFlight, Reports, TransferQueue, restore_order
from kvoffload.engine.tracing import Notice
from kvoffload.errors import DriverError, KVOffloadError, TransferError
from kvoffload.planning.transfer_plan import LOAD

_MOST_QUERY_FAILURES = 8  # errors in a row when asking whether a transfer has ended, before the GPU counts as lost


class Tracker:
    def __init__(
        self, driver: Driver, in_flight: InFlight, launcher: Launcher, copiers: CopierSet, reports: Reports
    ) -> None:
        self._driver = driver
        self._in_flight = in_flight
        self._launcher = launcher
        self._copiers = copiers
        self._reports = reports
        self._unfit = 0  # slots of stores

    def check_alive(self) -> None:
        """Raise TransferError if the context is lost."""
        lost = self._in_flight.lost
        if lost is not None:
            text = f"the CUDA context is lost and the engine with it: {lost}; restart the process"
            raise TransferError(text) from lost

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
        """Return whether a transfer has ended. Its ended segments make room at once.

        Raises:
            DriverError: the CUDA context is lost.
        """
        segments = transfer.segments
        try:
            while segments:
                event = segments[0].event
                stream = segments[0].stream.handle
                if not (self._driver.stream_query(stream) if event is None else self._driver.event_query(event)):
                    break
                table = segments[0].table
                if table is not None and table.unfit is not None:  # before the segment is off the record
                    transfer.unfit = transfer.unfit.union(table.unfit_slots())
                self._release(transfer, segments.popleft())
        except DriverError as error:
            transfer.query_failures += 1
            if error.sticky or transfer.query_failures >= _MOST_QUERY_FAILURES:
                raise
            return False
        transfer.query_failures = 0
        return transfer.enqueued and not segments

    def _release(self, transfer: Transfer, segment: Segment) -> None:
        """Free an ended segment's places, event, table and room in a ring."""
        segment.stream.places -= segment.places
        if segment.nbytes:
            segment.stream.nbytes -= segment.nbytes
        if segment.event is not None and segment.event != transfer.end:
            self._in_flight.markers.idle.append(segment.event)
        if segment.table is not None:
            segment.table.release()
        if segment.place is not None:
            segment.place.halves.remove(segment)

    def _complete(self, queue: TransferQueue) -> None:
        """Complete the first transfer of a queue, which has ended. It leaves the queue last: an interrupt cannot lose
        it. If the last transfers decided on its copier, tell them its time:

        1. Of several groups the forecast is about one, which took its share of the time.
        2. The copies of a load by pack begin before the transfer ahead of it has unpacked its own blocks. Only the time
           after that counts. It is known when that transfer completes, while the events of both are there.

        A load from slots whose blocks did not fit the codec when they were stored fails here.
        """
        transfer, in_flight = queue.transfers[0], self._in_flight
        if not transfer.finished:
            seconds, forecast = math.nan, transfer.forecast
            if transfer.unfit and transfer.direction is LOAD:
                transfer.fail(
                    TransferError(
                        f"slots {sorted(transfer.unfit)!s:.80} hold blocks that did not fit the codec when they were "
                        "stored: see `unfit` of that job"
                    )
                )
            if transfer.state is RUNNING:
                assert transfer.start is not None
                assert transfer.end is not None
                try:
                    seconds = self._driver.event_seconds(transfer.start, transfer.end)
                except KVOffloadError:
                    pass  # the bytes are there; only their time is unknown
                if forecast is not None and seconds > 0.0:  # 1
                    forecast.comparison.note(forecast, (seconds - transfer.overlap) * forecast.nbytes / transfer.nbytes)
                following = queue.transfers[1] if queue is in_flight.loads and len(queue.transfers) > 1 else None
                if following is not None and following.forecast and following.copier == "pack" and following.ordered:
                    assert following.start is not None  # 2
                    try:
                        if self._driver.event_query(following.start):  # else there is no overlap
                            following.overlap = max(0.0, self._driver.event_seconds(following.start, transfer.end))
                    except KVOffloadError:
                        pass  # only the overlap is unknown
            transfer.seconds = seconds
            transfer.step(ENDED)
        self._report(queue, transfer)
        if transfer.start is not None and transfer.end is not None:
            in_flight.timers.idle += (transfer.start, transfer.end)
        in_flight.markers.idle += transfer.markers
        transfer.let_go()
        queue.transfers.popleft()

    def _report(self, queue: TransferQueue, transfer: Transfer) -> None:
        """Count a finished transfer and keep its result, once. Log its failure, but not one per lost transfer; and
        blocks that did not fit the codec, whenever there are ten times as many.
        """
        if not self._reports.note(queue, transfer):
            return
        if transfer.error is not None and self._in_flight.lost is None:
            self._reports.notices.append(Notice(logging.WARNING, str(transfer.error)))
        elif transfer.unfit:
            before, self._unfit = self._unfit, self._unfit + len(transfer.unfit)
            if before == 0 or len(str(before)) < len(str(self._unfit)):
                text = (
                    f"slots with blocks that do not fit the codec, which are not stored: {self._unfit} so far; if that "
                    "is more than a percent of all, leave the codec out"
                )
                self._reports.notices.append(Notice(logging.WARNING, text))

    def mark_lost(self, error: Exception) -> None:
        """Fail every transfer in flight: the context is lost and nothing runs any more."""
        in_flight = self._in_flight
        if in_flight.lost is None:
            text = f"the CUDA context is lost with {in_flight.count} transfers in flight, which fail: {error}"
            self._reports.notices.append(Notice(logging.ERROR, text))
            in_flight.lost = error
        for queue in in_flight.both:
            queue.waiting.clear()
            while queue.transfers:
                transfer = queue.transfers[0]
                if not transfer.finished:
                    transfer.mark_lost(in_flight.lost)
                self._report(queue, transfer)
                transfer.let_go()
                queue.transfers.popleft()

    def repair(self) -> None:
        """Compute everything again from the transfers in flight, after a call was interrupted. If an interrupt hits
        this, too, the next call starts it again. The cases:

        1. The context is lost, and some transfers are not failed yet: fail them.
        2. A finished transfer is still in its queue. Only that step was missing, so take it out.
        3. Loads were being moved for an urgent one: number them anew.
        4. Places, events or tables were taken or given back halfway: count those that the transfers refer to.
        5. A transfer was being submitted, or its segments queued. Nobody knows whether its last driver call was made,
           so fail it. It ends when its segments have, which the GPU may still run.
        """
        in_flight = self._in_flight
        if in_flight.lost is not None:  # 1; before anything asks the driver, which would fail
            self.mark_lost(in_flight.lost)
        used: set[int] = set()
        tables = []
        places: dict[Place, list[Half]] = {}
        for queue in in_flight.both:
            transfers = queue.transfers
            if transfers:  # an append publishes a transfer; the interrupt may have come before the number was raised
                queue.submitted = max(queue.submitted, transfers[-1].sequence)
            while transfers and transfers[0].finished:  # 2
                self._report(queue, transfers[0])
                transfers[0].let_go()
                transfers.popleft()
            if queue.reordering:  # 3; after 2, since numbers go on from `counted`
                restore_order(in_flight)
            for stream in queue.lane.streams:  # 4; segments are on record before their driver calls
                segments = [each for transfer in transfers for each in transfer.segments if each.stream is stream]
                stream.places = sum(segment.places for segment in segments)
                stream.nbytes = sum(segment.nbytes for segment in segments)
            for transfer in transfers:
                used.update(transfer.events())
                tables += [segment.table for segment in transfer.segments if segment.table is not None]
                for segment in transfer.segments:
                    if segment.place is not None:
                        places.setdefault(segment.place, []).append(segment)
        in_flight.timers.keep_in_use(used)
        in_flight.markers.keep_in_use(used)
        self._copiers.restore(tables, places)
        for queue in in_flight.both:  # 5; last, since it takes idle events for segments without one
            for transfer in queue.transfers:
                if transfer.submitting:
                    try:
                        self._launcher.fail(transfer, KeyboardInterrupt("its submission was interrupted"))
                    except DriverError as error:
                        self.mark_lost(error)
                        break
                    transfer.submitting = False
            queue.waiting = deque(transfer for transfer in queue.transfers if not transfer.enqueued)
        in_flight.consistent = True

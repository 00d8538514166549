"""Queues the segments of transfers on the streams of their lanes, behind everything that they must follow.

The shares of a transfer run at the same time if they are on different streams. Segments of a share follow each other.

    stream for copies           ─markers, previous, conflict─●start─[first share]─────────●
    another stream for copies                        wait start ─[segment]─●─[segment]─ wait ●─●end

A load in parts has one share. No segment has two parts, so a part has ended at the event behind its last segment.

    stream for copies           ─markers, ...─●start─[part 0]─●─[some of part 1]─●─[the rest]─●─[part 2]─●end

Call everything here under the engine's lock, with the context current and `InFlight.consistent` False.
"""

from __future__ import annotations

from kvoffload.copiers import PackCopier, Share
from kvoffload.copiers.pack import Place
from kvoffload.device.streams import EVENT_COST, KERNEL_STREAM, QUEUE_LIMIT, STREAMS_PER_LANE, Lane, LaneStream
from kvoffload.driver import Driver
from kvoffload.engine.job import Segment, Transfer
from kvoffload.engine.queues import InFlight, TransferQueue
from kvoffload.errors import DriverError, KVOffloadError
from kvoffload.planning.transfer_plan import BlockPlan, Direction

_SEGMENTS_OF_BOUND = 4  # that fill `most_queued_bytes`


class Launcher:
    def __init__(self, driver: Driver, in_flight: InFlight) -> None:
        self._driver = driver
        self._in_flight = in_flight
        self._markers = in_flight.markers
        self._most_bytes = in_flight.most_queued_bytes

    def launch(self) -> None:
        """Queue segments while the streams have room, in order within each direction.

        Raises:
            DriverError: the CUDA context is lost.
        """
        stores, loads = self._in_flight.both
        progress = True
        while progress and (stores.waiting or loads.waiting):
            progress = False  # several rounds: a transfer may wait until one of the other direction is queued
            for queue in (stores, loads):
                while queue.waiting and self.enqueue(queue, queue.waiting[0]):
                    queue.waiting.popleft()
                    progress = True

    def enqueue(self, queue: TransferQueue, transfer: Transfer) -> bool:
        """Queue segments of the first waiting transfer until one of these cases ends it:

        1. The conflicting transfer is not all queued yet. Its last event is not recorded, and a wait for it would pass.
        2. All segments are queued.
        3. There is no room: in the driver's queues, in `most_queued_bytes`, or in the tables that kernels read.
        4. A driver call fails. The transfer fails; its queued segments run to their end.
        5. An interrupt. `submitting` stays True, and the repair fails the transfer as in case 4.

        Returns:
            False in cases 1 and 3: a later call queues the rest.

        Raises:
            DriverError: the CUDA context is lost.
        """
        conflict = transfer.conflict
        if conflict is not None and not (conflict.enqueued or conflict.finished):  # 1
            return False
        transfer.submitting = True  # before the first driver call, so that a repair knows of it (5)
        try:
            while not transfer.enqueued:  # 2
                if not self._enqueue_segment(queue, transfer):  # 3
                    if transfer.ordered:
                        transfer.forecast = None  # it has begun, so its time will have waits for the host in it
                    break
        except KVOffloadError as error:  # 4
            self.fail(transfer, error)
        transfer.submitting = False
        return transfer.enqueued

    def _enqueue_segment(self, queue: TransferQueue, transfer: Transfer) -> bool:
        """Queue the next segment, then record an event behind it. False if there is no room. Before the segment,

        1. if it is the transfer's first: the stream waits for all that the transfer follows, and records `start`;
        2. if it is the first of a later share: the stream waits for `start`, since shares run at the same time;
        3. else: the stream waits for the segment before it, unless that is on the same stream.
        """
        number, begin = transfer.share, transfer.queued
        share = transfer.shares[number]
        work, copier, size, _ = share
        # Where it ends: a segment never crosses a part's end, so that the event behind it is the part's.
        stop = min(begin + copier.segment_operations, work.part_ends[transfer.part] if work.part_ends else size)
        nbytes = 0
        if self._most_bytes is not None:
            stop, nbytes = self._bounded(queue, share, begin, stop)
            if stop == begin:
                return False
        if isinstance(copier, PackCopier):
            return self._enqueue_piece(queue, transfer, copier, stop, nbytes)
        # Look for room first: with a full queue the driver call would block, under the engine's lock.
        places = copier.queue_cost(stop - begin) + EVENT_COST
        stream = stream_with_room(queue.lane, places, kernel=False)
        if stream is None:
            return False
        first = number == 0 and begin == 0
        submit = copier.stage(work if begin == 0 and stop == size else work.cut(begin, stop), transfer.source_order)
        # Record it before any driver call: after an interrupt, the record says which work the GPU may have.
        previous = transfer.segments[-1] if transfer.segments else None
        segment = Segment(number, transfer.part, stream, places)
        transfer.segments.append(segment)
        stream.places += places
        if nbytes:
            segment.nbytes = nbytes
            stream.nbytes += nbytes
        # Waits, copies, and the event that tells when it has ended.
        if first:
            self._follow(queue, transfer, stream)
        elif begin == 0:
            if previous is None or previous.stream is not stream:
                assert transfer.start is not None
                self._driver.stream_wait_event(stream.handle, transfer.start)
        elif previous is not None and previous.stream is not stream:
            assert previous.event is not None
            self._driver.stream_wait_event(stream.handle, previous.event)
        submit(stream.handle, transfer.start if first else None)
        self._end_segment(transfer, segment, stop)
        return True

    def _enqueue_piece(
        self, queue: TransferQueue, transfer: Transfer, copier: PackCopier, stop: int, nbytes: int
    ) -> bool:
        """Queue the next piece of a share that goes through a ring: two segments, on the stream for kernels and on one
        for copies. False if there is no room for it.

            store    kernels  ─waits─place free─[pack]─●─────────────[pack]─●
                     copies   ─waits, previous─start──wait ●─[copies]─wait ●─[copies]─●end
            load     copies   ─waits─start─place free─[copies]─●─[copies]─●
                     kernels  ─waits, previous──────────wait ●─[unpack]─wait ●─[unpack]─●end

        The first half follows what the transfer must follow, but not the transfer before it in its lane: that one's
        copies and this one's kernel run at the same time, so that the link never waits for a kernel. Transfers end in
        their order all the same, as the second half follows it.
        """
        number, begin, lane = transfer.share, transfer.queued, queue.lane
        work = transfer.shares[number].work
        kernel_places, copy_places = copier.queue_cost(stop - begin), copier.copy_cost(stop - begin)
        kernels = stream_with_room(lane, kernel_places + EVENT_COST, kernel=True)
        copies = stream_with_room(lane, copy_places + EVENT_COST, kernel=False)
        if kernels is None or copies is None:
            return False
        assert isinstance(work, BlockPlan)
        piece = copier.stage_piece(work.cut(begin, stop), transfer.source_order)
        if piece is None:  # no room in the tables
            return False
        # On record before any driver call.
        previous = transfer.segments[-1] if transfer.segments else None
        by_kernel = Segment(number, transfer.part, kernels, kernel_places + EVENT_COST)
        by_copies = Segment(number, transfer.part, copies, copy_places + EVENT_COST)
        by_kernel.table = piece.table
        stores = transfer.direction is Direction.STORE
        front, back = (by_kernel, by_copies) if stores else (by_copies, by_kernel)
        front.place = back.place = piece.place
        back.nbytes = nbytes
        piece.place.halves = front, back
        transfer.segments.append(front)
        transfer.segments.append(back)
        kernels.places += by_kernel.places
        copies.places += by_copies.places
        back.stream.nbytes += nbytes
        # What the halves must follow.
        first = number == 0 and begin == 0
        if first:
            self._follow(queue, transfer, back.stream, also=front.stream)
        elif begin == 0:
            assert transfer.start is not None
            for stream in (kernels, copies):
                self._driver.stream_wait_event(stream.handle, transfer.start)
        elif previous is not None and previous.stream is not back.stream:
            assert previous.event is not None
            self._driver.stream_wait_event(back.stream.handle, previous.event)
        for place in piece.ended:
            self._wait_for_place(front.stream.handle, place)
        # Its halves, with an event between them. A transfer starts where its copies may.
        start = transfer.start if first else None
        if stores:
            if start is not None:
                self._driver.event_record(start, copies.handle)
            piece.kernel(kernels.handle, None)
        else:
            piece.copies(copies.handle, start)
        front.event = self._mark(front.stream)
        self._driver.stream_wait_event(back.stream.handle, front.event)
        if stores:
            piece.copies(copies.handle, None)
        else:
            piece.kernel(kernels.handle, None)
        self._end_segment(transfer, back, stop)
        return True

    def _wait_for_place(self, stream: int, place: Place) -> None:
        """Have `stream` wait until an earlier piece has left its place in the ring.

        1. Both of its halves are queued: the second one's event says it.
        2. A driver error came between: its transfer has failed, and what was queued of either half still runs.
        """
        assert place.halves is not None
        front, back = place.halves
        for segment in (back,) if back.event is not None else (front, back):
            if segment.event is None:
                segment.event = self._mark(segment.stream)
            self._driver.stream_wait_event(stream, segment.event)

    def _bounded(self, queue: TransferQueue, share: Share, begin: int, stop: int) -> tuple[int, int]:
        """The end, at most `stop`, and the bytes of a segment from `begin` on, under `most_queued_bytes`. The end is
        `begin` while there is no room.

        A segment has at most a quarter of the bound, or one operation, so that the stream has work while the next one
        is queued.
        """
        assert self._most_bytes is not None
        of_each = max(1, share.nbytes // share.size)
        stop = min(stop, begin + max(1, self._most_bytes // (_SEGMENTS_OF_BOUND * of_each)))
        nbytes = (stop - begin) * of_each
        queued = queue.lane.nbytes
        return (begin, 0) if queued and queued + nbytes > self._most_bytes else (stop, nbytes)

    def _end_segment(self, transfer: Transfer, segment: Segment, stop: int) -> None:
        """Record the event behind a segment that ends before operation `stop`, and move on to the next segment."""
        share, handle = transfer.shares[segment.share], segment.stream.handle
        done = stop == share.size
        if done and segment.share == len(transfer.shares) - 1:
            if segment.share:
                self._join(transfer, segment)
            assert transfer.end is not None
            self._driver.event_record(transfer.end, handle)
            segment.event = transfer.end
            transfer.enqueued = True
            return
        segment.event = self._mark(segment.stream)
        if done:
            transfer.share, transfer.queued = transfer.share + 1, 0
        else:
            ends = share.work.part_ends
            transfer.part, transfer.queued = transfer.part + (bool(ends) and stop == ends[transfer.part]), stop

    def _join(self, transfer: Transfer, final: Segment) -> None:
        """Make the stream of the final segment wait for the transfer's other shares."""
        others = [each for each in transfer.segments if each.share != final.share and each.stream is not final.stream]
        ends = {segment.stream.handle: segment.event for segment in others}
        for event in ends.values():
            assert event is not None
            self._driver.stream_wait_event(final.stream.handle, event)

    def _follow(
        self, queue: TransferQueue, transfer: Transfer, stream: LaneStream, also: LaneStream | None = None
    ) -> None:
        """Have a transfer's first stream wait for all that the transfer must follow, and `also` for all but the one
        before it in its lane.
        """
        for marker in transfer.markers:
            self._driver.stream_wait_event(stream.handle, marker)
            if also is not None:
                self._driver.stream_wait_event(also.handle, marker)
        if queue.transfers[0] is not transfer:
            previous = queue.unfinished(transfer.sequence - 1)
            if previous is not None:
                last = previous.segments[-1].stream if previous.segments else stream
                if previous.error is not None or last is not stream:  # else the stream itself keeps the order
                    self.wait_for_transfer(stream.handle, previous)
        if transfer.conflict is not None and not transfer.conflict.finished:
            self.wait_for_transfer(stream.handle, transfer.conflict)
            if also is not None:
                self.wait_for_transfer(also.handle, transfer.conflict)
        transfer.ordered = True

    def wait_for_transfer(self, stream: int, transfer: Transfer) -> None:
        """Make `stream` wait for a queued transfer in flight and all transfers before it in its lane.

        1. It was queued whole: its end implies the end of the transfers before it.
        2. Its submission failed halfway. It has no end event, and may not follow its predecessor. So wait for each of
           its segments and, unless it was ordered, for the predecessor, which may have failed in the same way.
        """
        queue = self._in_flight.of(transfer.direction)
        last: Transfer | None = transfer
        while last is not None and last.error is not None:
            for segment in last.segments:
                if segment.event is None:
                    segment.event = self._mark(segment.stream)
                self._driver.stream_wait_event(stream, segment.event)
            last = None if last.ordered else queue.unfinished(last.sequence - 1)
        if last is not None:
            assert last.end is not None
            self._driver.stream_wait_event(stream, last.end)

    def wait_for_part(self, stream: int, transfer: Transfer, part: int) -> None:
        """Make `stream` wait for a part, which is queued whole, and all parts before it. Parts without a segment have
        ended.
        """
        last = next((segment for segment in reversed(transfer.segments) if segment.part <= part), None)
        if last is not None:
            assert last.event is not None
            self._driver.stream_wait_event(stream, last.event)

    def _mark(self, stream: LaneStream) -> int:
        """An event behind everything on `stream`."""
        event = self._markers.idle.pop() if self._markers.idle else self._markers.make()
        try:
            self._driver.event_record(event, stream.handle)
        except DriverError:  # the transfer fails, and nothing refers to the event
            self._markers.idle.append(event)
            raise
        return event

    def fail(self, transfer: Transfer, error: BaseException) -> None:
        """Fail a transfer whose submission failed or was interrupted. It ends when its queued segments have.

        Raises:
            DriverError: `error`, if it says that the CUDA context is lost.
        """
        if isinstance(error, DriverError) and error.sticky:
            raise error
        transfer.fail(error)
        if transfer.segments and transfer.segments[-1].event is None:
            try:  # so that its end is known apart from that of later work on the stream
                transfer.segments[-1].event = self._mark(transfer.segments[-1].stream)
            except KVOffloadError:
                pass  # then it has ended when the stream is idle


def stream_with_room(lane: Lane, places: int, kernel: bool) -> LaneStream | None:
    """The stream for the lane's next work, or None if there is no room for so many places of the driver's queue."""
    streams, limit = lane.streams, QUEUE_LIMIT - places
    if kernel:
        return streams[KERNEL_STREAM] if streams[KERNEL_STREAM].places <= limit else None
    if streams[lane.tail].places > limit:
        following = (lane.tail + 1) % STREAMS_PER_LANE
        if streams[following].places > limit:
            return None
        lane.tail = following
    return streams[lane.tail]

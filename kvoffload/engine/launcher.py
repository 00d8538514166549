"""Queues the segments of transfers on the streams of their lanes, behind everything that they must follow.

Segments follow each other, those of a later share, too.

    a stream for copies         ─markers, previous, conflict─●start─[segment]─●─[segment]─●
    another stream for copies                                                        wait ─[segment]─●end

A load in parts has one share. No segment has two parts, so a part has ended at the event behind its last segment.

    a stream for copies         ─markers, ...─●start─[part 0]─●─[some of part 1]─●─[the rest]─●─[part 2]─●end

A share that is packed is queued in pieces of two segments; `_enqueue_piece` has the drawing.

Call everything here under the engine's lock, with the context current and `InFlight.consistent` False.
"""

from __future__ import annotations

from kvoffload.copiers import PackCopier, Share
from kvoffload.copiers.pack_kernels import KERNEL_PLACES
from kvoffload.device.streams import EVENT_COST, KERNEL_STREAM, QUEUE_LIMIT, STREAMS_PER_LANE, Lane, LaneStream
from kvoffload.driver import Driver
from kvoffload.engine.job import Segment, Transfer
from kvoffload.engine.queues import InFlight, TransferQueue
from kvoffload.errors import DriverError, KVOffloadError
from kvoffload.planning.transfer_plan import STORE

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
        2. if it is the first behind a share in pieces: the stream waits as in 1, and the shares run at the same time;
        3. else: the stream waits for the segment before it, unless that is on the same stream.
        """
        number, begin = transfer.share, transfer.queued
        share = transfer.shares[number]
        work, copier, size, _ = share
        # Where it ends: a segment never crosses a part's end, so that the event behind it is the part's.
        stop = work.part_ends[transfer.part] if work.part_ends else size
        if stop - begin > copier.segment_operations:
            stop = begin + copier.segment_operations
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
        first = not (number or begin)
        submit = copier.stage(work if begin == 0 and stop == size else work.cut(begin, stop), transfer.source_order)
        # Record it before any driver call: after an interrupt, the record says which work the GPU may have.
        segment = Segment(number, transfer.part, stream, places)
        transfer.segments.append(segment)
        stream.places += places
        if nbytes:
            segment.nbytes = nbytes
            stream.nbytes += nbytes
        # Waits, copies, and the event that tells when it has ended.
        if first or (begin == 0 and isinstance(transfer.shares[0][1], PackCopier)):
            self._follow(queue, transfer, stream)
        elif len(transfer.segments) > 1 and (previous := transfer.segments[-2]).stream is not stream:
            assert previous.event is not None
            self._driver.stream_wait_event(stream.handle, previous.event)
        if first:
            assert transfer.start is not None
            self._driver.event_record(transfer.start, stream.handle)
        submit(stream.handle)
        self._end_segment(transfer, segment, stop)
        return True

    def _enqueue_piece(
        self, queue: TransferQueue, transfer: Transfer, copier: PackCopier, stop: int, nbytes: int
    ) -> bool:
        """Queue the next piece of a share, up to operation `stop`. False if there is no room for it.

            store    kernels  ─1─3─[pack]─●───────────2─3─[pack]─●
                     copies   ─1───start──wait ●─[copies]─●──────wait ●─[copies]─●end
            load     copies   ─1─start─3─[copies]─●───2─3─[copies]─●
                     kernels  ─1──────────────────wait ●─[unpack]─●─wait ●─[unpack]─●end

        1. The transfer's first piece: both halves wait for what the transfer follows, but the first half does not wait
           for the transfer before it in its lane. So this one is packed while that one is copied.
        2. A later piece, of any share: each half follows the same half of the piece before it.
        3. The first half waits until the place in the ring is free; the second half waits for the first.

        All of these are queued before, so waits form no circle. Nothing starves: a piece needs room on two streams, in
        tables and in `most_queued_bytes`, and earlier work gives all of it back without later pieces. Second halves end
        in the order of the queue, so the end of one tells that all places before it are free.
        """
        number, begin, lane = transfer.share, transfer.queued, queue.lane
        kernel_cost, copy_cost = KERNEL_PLACES + EVENT_COST, copier.queue_cost(stop - begin) + EVENT_COST
        kernels = stream_with_room(lane, kernel_cost, kernel=True)
        copies = kernels and stream_with_room(lane, copy_cost, kernel=False)
        if kernels is None or copies is None:
            return False
        work, _, size, _ = transfer.shares[number]
        piece = copier.stage(work if begin == 0 and stop == size else work.cut(begin, stop), transfer.source_order)
        if piece is None:  # no room in the tables
            return False
        # Record both halves before any driver call: after an interrupt, the record says which work the GPU may have.
        by_kernel = Segment(number, transfer.part, kernels, kernel_cost)
        by_copies = Segment(number, transfer.part, copies, copy_cost)
        by_kernel.table = piece.table
        stores = transfer.direction is STORE
        front, back = (by_kernel, by_copies) if stores else (by_copies, by_kernel)
        fill, empty = (piece.kernel, piece.copies) if stores else (piece.copies, piece.kernel)
        place, previous = piece.place, next((each for each in reversed(transfer.segments) if each.place), None)
        front.place = back.place = place
        place.halves = [front, back]
        transfer.segments += (front, back)
        kernels.places += kernel_cost
        copies.places += copy_cost
        back.nbytes = nbytes
        back.stream.nbytes += nbytes
        if previous is None and begin == 0:  # 1
            self._follow(queue, transfer, back.stream, also=front.stream)
        self._wait_for_places(front, back, previous)  # 2, 3
        if not (number or begin):  # it starts where its copies may
            assert transfer.start is not None
            self._driver.event_record(transfer.start, copies.handle)
        fill(front.stream.handle)
        front.event = self._mark(front.stream)
        self._driver.stream_wait_event(back.stream.handle, front.event)
        place.ring.join(place)
        empty(back.stream.handle)
        self._end_segment(transfer, back, stop)
        return True

    def _wait_for_places(self, front: Segment, back: Segment, previous: Segment | None) -> None:
        """Wait in cases 2 and 3 of `_enqueue_piece`; `previous` is the last segment of the piece before it."""
        place = front.place
        assert place is not None
        if previous is not None and previous.place is not None:  # 2
            for segment, half in zip(reversed(previous.place.halves), (back, front), strict=False):
                if segment.stream is not half.stream:
                    assert segment.event is not None
                    self._driver.stream_wait_event(half.stream.handle, segment.event)
        for earlier in place.ring.used_before(place):  # 3
            for segment in earlier.halves[-1:] if earlier.joined else earlier.halves:
                if segment.event is None:  # its transfer failed there
                    segment.event = self._mark(segment.stream)
                self._driver.stream_wait_event(front.stream.handle, segment.event)

    def _bounded(self, queue: TransferQueue, share: Share, begin: int, stop: int) -> tuple[int, int]:
        """Return the end, at most `stop`, and the bytes of a segment from `begin` on, under `most_queued_bytes`. The
        end is `begin` while there is no room.

        A segment has at most a quarter of the bound, or one operation, so that the stream has work while the next one
        is queued.
        """
        assert self._most_bytes is not None
        _, _, size, of_all = share
        of_each = max(1, of_all // size)
        stop = min(stop, begin + max(1, self._most_bytes // (_SEGMENTS_OF_BOUND * of_each)))
        nbytes = (stop - begin) * of_each
        queued = queue.lane.nbytes
        return (begin, 0) if queued and queued + nbytes > self._most_bytes else (stop, nbytes)

    def _end_segment(self, transfer: Transfer, segment: Segment, stop: int) -> None:
        """Record the event behind a segment that ends before operation `stop`, and move on to the next segment."""
        share = transfer.shares[segment.share]
        work, _, size, _ = share
        done = stop == size
        if done and share is transfer.shares[-1]:
            if segment.share:
                self._join(transfer, segment)
            assert transfer.end is not None
            self._driver.event_record(transfer.end, segment.stream.handle)
            segment.event = transfer.end
            transfer.enqueued = True
            return
        segment.event = self._mark(segment.stream)
        if done:
            transfer.share, transfer.queued = transfer.share + 1, 0
        else:
            ends = work.part_ends
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
        """Have a share's first stream wait for all that the transfer must follow, and `also` for all but the transfer
        before it in its lane.
        """
        for marker in transfer.markers:
            self._driver.stream_wait_event(stream.handle, marker)
            if also is not None:
                self._driver.stream_wait_event(also.handle, marker)
        first = queue.transfers[0]
        if first is not transfer:
            previous = queue.transfers[transfer.sequence - 1 - first.sequence]
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
        """Return an event behind everything on `stream`."""
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
        for segment in transfer.segments:  # the last one, or both of the last piece
            if segment.event is None:
                try:  # so that its end is known apart from that of later work on the stream
                    segment.event = self._mark(segment.stream)
                except KVOffloadError:
                    pass  # then it has ended when the stream is idle


def stream_with_room(lane: Lane, places: int, kernel: bool) -> LaneStream | None:
    """Return the stream for the lane's next work; None if the driver's queue has no room for so many places."""
    streams, limit = lane.streams, QUEUE_LIMIT - places
    if kernel:
        return streams[KERNEL_STREAM] if streams[KERNEL_STREAM].places <= limit else None
    if streams[lane.tail].places > limit:
        following = (lane.tail + 1) % STREAMS_PER_LANE
        if streams[following].places > limit:
            return None
        lane.tail = following
    return streams[lane.tail]

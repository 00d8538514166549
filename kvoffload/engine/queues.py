"""The transfers in flight, by direction, the streams and events that they use, and the results of the others.

What is true is in two places: the transfers of each queue, and what each transfer refers to (its segments, its events).
All else (transfers that wait, places taken on streams, idle events, tables in use) follows from that, and is computed
again after a call was interrupted; see `Tracker.repair`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any, Generic, TypeVar

from kvoffload.device.streams import EVENT_COST, QUEUE_LIMIT, STREAMS_PER_LANE, EventPool, Lane
from kvoffload.driver import Driver
from kvoffload.engine.hazards import HazardTable
from kvoffload.engine.job import AnyTransfer, Event, Transfer, TransferResult, result_of
from kvoffload.engine.request import Requests
from kvoffload.engine.statistics import DirectionTotals
from kvoffload.engine.tracing import Notices
from kvoffload.errors import CapacityError
from kvoffload.planning.transfer_plan import Direction

# Each takes a place at least, and those for its events. So segments find an event, however many parts a load has.
MOST_REPORTS = 1 << 16
_MOST_UNASKED = 16  # asking takes 1 to 4 us a transfer, and a submission only needs the answer for room
_MOST_SEGMENTS = 2 * (STREAMS_PER_LANE + 1) * QUEUE_LIMIT // (1 + EVENT_COST)

_Record = TypeVar("_Record")


class RecordQueue(Generic[_Record]):
    """The transfers of one direction that have not ended, in the order of submission, which is that of their ends.

    Attributes:
        transfers: in flight; their sequence numbers have no gaps.
        submitted: sequence number of the latest transfer.
        counted: sequence number of the latest transfer that the following count.
        ended, failed: how many have ended, and how many of them failed.
        nbytes, seconds: payload bytes and time on the GPU's clock, summed over the transfers that did not fail.
    """

    def __init__(self) -> None:
        self.transfers: deque[_Record] = deque()
        self.submitted = self.counted = self.ended = self.failed = self.nbytes = 0
        self.seconds = 0.0

    @property
    def totals(self) -> DirectionTotals:
        """What the transfers that have ended add up to."""
        return DirectionTotals(self.ended, self.failed, self.nbytes, self.seconds)


class TransferQueue(RecordQueue[Transfer]):
    """The transfers of one direction on one device.

    Attributes:
        lane: the streams that they run on.
        opposite: the queue of the other direction.
        waiting: the transfers of which something is still to be queued on the GPU.
        reordering: a transfer is being put ahead of others, see `put_ahead`; True afterwards if that was interrupted.
    """

    opposite: TransferQueue

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self.lane = Lane(driver)
        self.waiting: deque[Transfer] = deque()
        self.reordering = False

    def unfinished(self, sequence: int) -> Transfer | None:
        """The transfer with that sequence number if it is in flight."""
        transfers = self.transfers
        if not transfers or not transfers[0].sequence <= sequence <= transfers[-1].sequence:
            return None
        return transfers[sequence - transfers[0].sequence]

    def renumber(self) -> None:
        """Give the transfers in flight the sequence numbers of their order."""
        for sequence, transfer in enumerate(self.transfers, self.counted + 1):
            transfer.sequence = sequence


_Queue = TypeVar("_Queue", bound=RecordQueue[Any])


class Queues(Generic[_Queue]):
    """The queues of both directions.

    Attributes:
        stores, loads, both: the queues.
        max_in_flight: how many transfers may be unfinished.
        consistent: False while a call changes anything here, and after such a call was interrupted: then the next call
            repairs before it does anything else.
    """

    def __init__(self, stores: _Queue, loads: _Queue, max_in_flight: int) -> None:
        self.stores, self.loads = self.both = (stores, loads)
        self.max_in_flight = max_in_flight
        self.consistent = True

    def of(self, direction: Direction) -> _Queue:
        """The queue of a direction."""
        return self.stores if direction is Direction.STORE else self.loads

    @property
    def count(self) -> int:
        """How many transfers are in flight, as far as is known."""
        return len(self.stores.transfers) + len(self.loads.transfers)

    def check_room(self, jobs: int) -> None:
        """Raise CapacityError if `jobs` more would exceed `max_in_flight`. Ask which have ended before."""
        if self.count + jobs > self.max_in_flight:
            raise CapacityError(
                f"{self.count} jobs are unfinished (max_in_flight={self.max_in_flight}); poll() until some end"
            )


class InFlight(Queues[TransferQueue]):
    """The queues of one device, and their events.

    Attributes:
        timers: events that take the time: two for each transfer.
        markers: plain events: behind segments, and on the caller's streams.
        hazards: which transfer touches what.
        most_queued_bytes: what the driver is given at a time in each direction; None: what its queues hold.
        lost: the error after which the CUDA context is lost.
        most_unasked: with so many transfers of its direction in flight, a submission asks which of them have ended.
    """

    def __init__(self, driver: Driver, max_in_flight: int, hazards: HazardTable, most_queued_bytes: int | None) -> None:
        super().__init__(TransferQueue(driver), TransferQueue(driver), max_in_flight)
        self.stores.opposite, self.loads.opposite = self.loads, self.stores
        self.timers = EventPool(driver, 2 * max_in_flight + 64, timing=True)
        self.markers = EventPool(driver, 4 * max_in_flight + _MOST_SEGMENTS + 64, timing=False)
        self.hazards = hazards
        self.most_queued_bytes = most_queued_bytes
        self.most_unasked = min(_MOST_UNASKED, max_in_flight)
        self.lost: Exception | None = None


class Reports:
    """Counts transfers that have ended, and keeps their results until `poll` takes them. Under the engine's lock.

    Attributes:
        most: how many results are kept; 0 for the shards of a ShardedEngine, which reports each job itself.
        results: by id, what `poll` has still to report, the oldest first. They keep no transfer alive.
        dropped: how many were dropped because there were more than `most`.
        notices: what is told once the lock is released, see `tracing`.
    """

    def __init__(self, notices: Notices, most: int = MOST_REPORTS) -> None:
        self.most = most
        self.results: OrderedDict[int, TransferResult] = OrderedDict()  # forgets its oldest in O(1)
        self.dropped = 0
        self.notices = notices

    def note(self, queue: RecordQueue[Any], record: AnyTransfer) -> bool:
        """Count a finished transfer and keep its result for `poll`. Returns False if that has been done before."""
        new = record.sequence == 0 or record.sequence > queue.counted
        if new:
            result = result_of(record)
            queue.counted = record.sequence or queue.counted  # no call from here to the report: all of it is done
            queue.ended += 1
            if result.error is not None:
                queue.failed += 1
            else:
                queue.nbytes += result.nbytes
                if result.seconds == result.seconds:  # not NaN
                    queue.seconds += result.seconds
            if not record.forgotten:
                self.results[record.id] = result
            if record.trace is not None:
                self.notices.append(record)
        if len(self.results) > self.most:
            self.dropped += 1
            self.results.popitem(last=False)
        return new

    def take(self) -> list[TransferResult]:
        """The results that are still to be reported, which are then reported."""
        results, self.results = self.results, OrderedDict()
        return list(results.values())

    def forget(self, record: AnyTransfer) -> None:
        """Report a transfer no more, also if its end is noted later: of several devices, all before it must end."""
        record.forgotten = True
        self.results.pop(record.id, None)


def put_ahead(in_flight: InFlight, transfer: Transfer, requests: Requests) -> bool:
    """Put an urgent load in flight ahead of the loads that wait on the host, except for those that it must follow.

        loads in flight    |queued on the GPU|begun|held|held|held|
                                                   ^ an urgent one goes here, or further behind

    Sequence numbers say in which order loads end, so those of the loads behind it rise. It is in flight from when it is
    in its queue. Under the engine's lock, with `InFlight.consistent` False; what an interrupt leaves, `restore_order`
    mends.

    Returns:
        False if it may go ahead of none: then nothing has changed.
    """
    queue, hazards = in_flight.loads, in_flight.hazards
    place = _place_ahead(in_flight, transfer, requests)
    if place == len(queue.waiting):
        return False
    sequence = queue.waiting[place].sequence
    queue.reordering = True
    hazards.make_room(Direction.LOAD, sequence)
    for request in requests:
        hazards.record_ahead(Direction.LOAD, request.group, request.slots, request.blocks, sequence)
    transfer.step(Event.SUBMITTED)
    queue.transfers.insert(len(queue.transfers) - len(queue.waiting) + place, transfer)
    queue.submitted += 1
    queue.renumber()
    queue.reordering = False
    queue.waiting.insert(place, transfer)
    return True


def _place_ahead(in_flight: InFlight, transfer: Transfer, requests: Requests) -> int:
    """How many of the loads that wait stay ahead of an urgent one. There are four that do, and those ahead of them:

    1. One that has begun: some of it is queued on the GPU.
    2. Another urgent one: these keep their order.
    3. One that writes a block that this one writes, too.
    4. One that a store follows which this one follows: else each would wait for the next one, in a circle.
    """
    waiting = in_flight.loads.waiting
    latest = max(
        in_flight.hazards.latest_on_blocks(Direction.LOAD, request.group, request.blocks) for request in requests
    )
    if transfer.conflict is not None:
        for store in in_flight.stores.waiting:
            if store.sequence <= transfer.conflict.sequence and store.conflict is not None:
                latest = max(latest, store.conflict.sequence)
    place = len(waiting)
    while place:
        other = waiting[place - 1]
        if other.urgent or other.ordered or other.segments or other.sequence <= latest:
            break
        place -= 1
    return place


def restore_order(in_flight: InFlight) -> None:
    """`put_ahead` was interrupted: number the transfers anew. May be interrupted itself.

    Which of them touches what is not known any more, so all of it counts as touched by the latest: later transfers of
    the other direction wait for more than they need.
    """
    queue = in_flight.loads
    queue.renumber()
    queue.submitted = queue.counted + len(queue.transfers)
    in_flight.hazards.forget_order(Direction.LOAD, queue.counted, queue.submitted)
    queue.reordering = False

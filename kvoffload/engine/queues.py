"""The transfers in flight by direction, their streams and events, and the results of ended transfers.

The truth is the transfers in each queue, with the segments and events that each refers to. Everything else (waiting
transfers, places taken on streams, idle events, tables in use) follows from it, and `Tracker.repair` computes it again
after an interrupt.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any, Generic, TypeVar

from kvoffload.device.streams import EVENT_COST, QUEUE_LIMIT, STREAMS_PER_LANE, EventPool, Lane
from kvoffload.driver import Driver
from kvoffload.engine.hazards import HazardTable
from kvoffload.engine.job import SUBMITTED, AnyTransfer, Transfer, TransferResult, result_of
from kvoffload.engine.request import Requests
from kvoffload.engine.statistics import DirectionTotals
from kvoffload.engine.tracing import Notices
from kvoffload.errors import CapacityError
from kvoffload.planning.transfer_plan import LOAD, STORE, Direction

# Each takes a place at least, and those for its events. So segments find an event, however many parts a load has.
MOST_REPORTS = 1 << 16
_MOST_UNASKED = 16  # asking takes 1 to 4 us a transfer, and a submission only needs the answer for room
_MOST_SEGMENTS = 2 * (STREAMS_PER_LANE + 1) * QUEUE_LIMIT // (1 + EVENT_COST)

_Record = TypeVar("_Record")


class RecordQueue(Generic[_Record]):
    """The transfers of one direction that have not ended. They end in this order, that of submission; but urgent loads
    of a ShardedEngine may end before others.

    Attributes:
        transfers: in flight; their sequence numbers have no gaps.
        submitted: sequence number of the latest transfer.
        counted: sequence number of the transfer that the totals included last.
        ended, failed, nbytes, seconds: the totals, see `DirectionTotals`.
    """

    def __init__(self) -> None:
        self.transfers: deque[_Record] = deque()
        self.submitted = self.counted = self.ended = self.failed = self.nbytes = 0
        self.seconds = 0.0

    @property
    def totals(self) -> DirectionTotals:
        return DirectionTotals(self.ended, self.failed, self.nbytes, self.seconds)


class TransferQueue(RecordQueue[Transfer]):
    """The transfers of one direction on one device.

    Attributes:
        lane: their streams.
        opposite: the queue of the other direction.
        waiting: the transfers with segments that are not queued on the GPU yet.
        reordering: `put_ahead` is moving a transfer; stays True if it was interrupted.
    """

    opposite: TransferQueue

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self.lane = Lane(driver)
        self.waiting: deque[Transfer] = deque()
        self.reordering = False

    def unfinished(self, sequence: int) -> Transfer | None:
        transfers = self.transfers
        if not transfers or not transfers[0].sequence <= sequence <= transfers[-1].sequence:
            return None
        return transfers[sequence - transfers[0].sequence]

    def renumber(self) -> None:
        for sequence, transfer in enumerate(self.transfers, self.counted + 1):
            transfer.sequence = sequence


_Queue = TypeVar("_Queue", bound=RecordQueue[Any])


class Queues(Generic[_Queue]):
    """The queues of both directions.

    Attributes:
        stores, loads, both: the queues.
        max_in_flight: how many transfers may be unfinished.
        consistent: False while a call changes anything here. If it is False at the beginning of a call, the last one
            was interrupted, and the call repairs first.
    """

    def __init__(self, stores: _Queue, loads: _Queue, max_in_flight: int) -> None:
        self.stores, self.loads = self.both = (stores, loads)
        self.max_in_flight = max_in_flight
        self.consistent = True

    def of(self, direction: Direction) -> _Queue:
        return self.stores if direction is STORE else self.loads

    @property
    def count(self) -> int:
        """How many transfers are not known to have ended."""
        return len(self.stores.transfers) + len(self.loads.transfers)

    def check_room(self, jobs: int) -> None:
        """Raise CapacityError if `jobs` more would exceed `max_in_flight`. Find ended transfers first."""
        if self.count + jobs > self.max_in_flight:
            raise CapacityError(
                f"{self.count} jobs are unfinished (max_in_flight={self.max_in_flight}); poll() until some end"
            )


class InFlight(Queues[TransferQueue]):
    """The queues of one device, and their events.

    Attributes:
        timers: timing events, two for each transfer.
        markers: plain events: behind segments, and on the caller's streams.
        hazards: which transfers touch which slots and blocks.
        most_queued_bytes: as `OffloadEngine` has it.
        lost: the error that lost the CUDA context, or None.
        most_unasked: with this many transfers of its direction in flight, a submission asks which have ended.
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
    """Counts ended transfers, and keeps their results until `poll` takes them. Under the engine's lock.

    Attributes:
        most: how many results are kept; 0 for the shards of a ShardedEngine, which reports each job itself.
        results: for `poll`, by id, the oldest first. They keep no transfer alive.
        dropped: how many results were dropped because there were more than `most`.
        notices: see `tracing`.
    """

    def __init__(self, notices: Notices, most: int = MOST_REPORTS) -> None:
        self.most = most
        self.results: OrderedDict[int, TransferResult] = OrderedDict()  # forgets its oldest in O(1)
        self.dropped = 0
        self.notices = notices

    def note(self, queue: RecordQueue[Any], record: AnyTransfer) -> bool:
        """Count a finished transfer and keep its result for `poll`. Returns False if an earlier call did so."""
        new = not record.noted
        if new:
            result = result_of(record)
            record.noted = True  # no call from here to the report: all of it is done
            queue.counted = record.sequence or queue.counted
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
        """Hand over the results, once."""
        results, self.results = self.results, OrderedDict()
        return list(results.values())

    def forget(self, record: AnyTransfer) -> None:
        """Do not report a transfer, even if its end is noted later, as with several devices."""
        record.forgotten = True
        self.results.pop(record.id, None)


def put_ahead(in_flight: InFlight, transfer: Transfer, requests: Requests) -> bool:
    """Put an urgent load in flight ahead of loads that wait on the host, but not of loads that it must follow.

        loads in flight    |queued on the GPU|begun|held|held|held|
                                                   ^ an urgent one goes here, or further behind

    Loads end in the order of their sequence numbers, so the loads behind it get higher ones. Under the engine's lock,
    with `InFlight.consistent` False. After an interrupt `restore_order` cleans up.

    Returns:
        False if it may go ahead of none: then nothing has changed.
    """
    queue, hazards = in_flight.loads, in_flight.hazards
    place = _place_ahead(in_flight, transfer, requests)
    if place == len(queue.waiting):
        return False
    sequence = queue.waiting[place].sequence
    queue.reordering = True
    hazards.make_room(LOAD, sequence)
    for request in requests:
        hazards.record_ahead(LOAD, request.group, request.slots, request.blocks, sequence)
    transfer.step(SUBMITTED)
    queue.transfers.insert(len(queue.transfers) - len(queue.waiting) + place, transfer)
    queue.submitted += 1
    queue.renumber()
    queue.reordering = False
    queue.waiting.insert(place, transfer)
    return True


def _place_ahead(in_flight: InFlight, transfer: Transfer, requests: Requests) -> int:
    """Return how many of the waiting loads stay ahead of an urgent one. A load does, with all loads ahead of it,

    1. if it has begun: some segments are queued on the GPU;
    2. if it is urgent, too: urgent loads keep their order;
    3. if it writes a block that this one writes;
    4. if a store follows it which this one follows: else all three would wait in a circle.
    """
    waiting = in_flight.loads.waiting
    latest = max(in_flight.hazards.latest_on_blocks(LOAD, request.group, request.blocks) for request in requests)
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
    """Number the transfers anew after an interrupt of `put_ahead`. May be interrupted itself.

    It is not known any more which load touches which block, so all count as touched by the latest load: stores wait for
    more than they need.
    """
    queue = in_flight.loads
    queue.renumber()
    queue.submitted = queue.counted + len(queue.transfers)
    in_flight.hazards.forget_order(LOAD, queue.counted, queue.submitted)
    queue.reordering = False

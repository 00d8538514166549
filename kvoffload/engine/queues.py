"""The transfers in flight, by direction, and the streams and events that they use.

What is true is in two places: the transfers of each queue, and what each transfer refers to (its segments, its events).
All else (transfers that wait, places taken on streams, idle events, tables in use) follows from that, and is computed
again after a call was interrupted; see `Tracker.repair`.
"""

from __future__ import annotations

from collections import deque

from kvoffload.device.streams import EVENT_COST, QUEUE_LIMIT, STREAMS_PER_LANE, EventPool, Lane
from kvoffload.driver import Driver
from kvoffload.engine.hazards import HazardTable
from kvoffload.engine.statistics import DirectionTotals
from kvoffload.engine.transfer import Transfer
from kvoffload.planning.transfer_plan import Direction

# Each takes a place at least, and those for its events. So segments find an event, however many parts a load has.
_MOST_UNASKED = 16  # asking takes 1 to 4 us a transfer, and a submission only needs the answer for room
_MOST_SEGMENTS = 2 * (STREAMS_PER_LANE + 1) * QUEUE_LIMIT // (1 + EVENT_COST)


class TransferQueue:
    """The transfers of one direction that have not ended, in the order of submission, which is that of their ends.

    Attributes:
        lane: the streams that they run on.
        opposite: the queue of the other direction.
        transfers: in flight; their sequence numbers have no gaps.
        waiting: those of them of which something is still to be queued.
        submitted: sequence number of the latest transfer.
        reordering: a transfer is being put ahead of others, see `urgent`; True afterwards if that was interrupted.
        counted: sequence number of the latest transfer that the following count.
        ended, failed: how many have ended, and how many of them failed.
        nbytes, seconds: of those that did not fail: payload bytes, and time on the GPU's clock, summed.
    """

    opposite: TransferQueue

    def __init__(self, driver: Driver) -> None:
        self.lane = Lane(driver)
        self.transfers: deque[Transfer] = deque()
        self.waiting: deque[Transfer] = deque()
        self.submitted = 0
        self.counted = 0
        self.reordering = False
        self.ended = self.failed = self.nbytes = 0
        self.seconds = 0.0

    @property
    def totals(self) -> DirectionTotals:
        """Of the transfers that have ended."""
        return DirectionTotals(self.ended, self.failed, self.nbytes, self.seconds)

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


class InFlight:
    """The queues of both directions, and their events.

    Attributes:
        stores, loads: the queues.
        timers: events that take the time: two for each transfer.
        markers: plain events: behind segments, and on the caller's streams.
        hazards: which of them touch what.
        most_queued_bytes: of each direction that the driver is given at a time; None: what its queues hold.
        consistent: False while a call changes anything here, and after such a call was interrupted: then the next call
            repairs before it does anything else.
        lost: the error after which the CUDA context is lost.
        most_unasked: with so many transfers of its direction in flight, a submission asks which of them have ended.
    """

    def __init__(
        self, driver: Driver, max_in_flight: int, hazards: HazardTable, most_queued_bytes: int | None = None
    ) -> None:
        self.stores = TransferQueue(driver)
        self.loads = TransferQueue(driver)
        self.both = (self.stores, self.loads)
        self.stores.opposite, self.loads.opposite = self.loads, self.stores
        self.timers = EventPool(driver, 2 * max_in_flight + 64, timing=True)
        self.markers = EventPool(driver, 4 * max_in_flight + _MOST_SEGMENTS + 64, timing=False)
        self.max_in_flight = max_in_flight
        self.hazards = hazards
        self.most_queued_bytes = most_queued_bytes
        self.most_unasked = min(_MOST_UNASKED, max_in_flight)
        self.consistent = True
        self.lost: Exception | None = None

    def of(self, direction: Direction) -> TransferQueue:
        """The queue of a direction."""
        return self.stores if direction is Direction.STORE else self.loads

    @property
    def count(self) -> int:
        """How many transfers are in flight."""
        return len(self.stores.transfers) + len(self.loads.transfers)

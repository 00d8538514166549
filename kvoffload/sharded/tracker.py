"""The transfers of a ShardedEngine that have not ended, and the results of those that have.

The truth is the records of each queue, and what the engine of each device has in flight. A record is published by one
append; its transfers are put in flight after that, device after device. A call that was interrupted in between leaves a
record of which some transfers are in no queue of their device: `repair` fails these, and the record has ended, failed,
when the others have.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence

from kvoffload.engine.job import TransferResult, result_of
from kvoffload.engine.statistics import DirectionTotals
from kvoffload.engine.tracing import new_notices
from kvoffload.engine.tracker import MOST_REPORTS
from kvoffload.planning.transfer_plan import Direction
from kvoffload.sharded.record import ShardedTransfer, fail_unqueued
from kvoffload.sharded.shard import Shard


class ShardedQueue:
    """Those of one direction that have not ended, in the order of submission, which is that of their ends.

    Attributes:
        transfers: in flight, or ended and not looked at since.
        submitted: sequence number of the latest.
        counted: sequence number of the latest that `totals` has.
        totals: of those that have ended.
    """

    def __init__(self) -> None:
        self.transfers: deque[ShardedTransfer] = deque()
        self.submitted = 0
        self.counted = 0
        self.totals = DirectionTotals()


class ShardedTracker:
    """All methods are called under the engine's lock.

    Attributes:
        consistent: False while a call submits, and after it was interrupted there: then the next one repairs.
        reports: by id, the results that `poll` has still to report, the oldest first. They keep no transfer alive.
        dropped_reports: how many were dropped because there were more than 65,536.
        notices: transfers that a tracer follows and that have ended; reported once the lock is released.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self.stores, self.loads = ShardedQueue(), ShardedQueue()
        self.both = (self.stores, self.loads)
        self.consistent = True
        self.reports: OrderedDict[int, TransferResult] = OrderedDict()  # forgets its oldest in O(1)
        self.dropped_reports = 0
        self.notices = new_notices()

    @property
    def count(self) -> int:
        """How many are in flight, as far as is known."""
        return len(self.stores.transfers) + len(self.loads.transfers)

    def records(self) -> list[ShardedTransfer]:
        """Those that are in flight, as far as is known."""
        return [record for queue in self.both for record in list(queue.transfers)]

    @property
    def submitted(self) -> int:
        latest = (queue.transfers[-1].sequence if queue.transfers else 0 for queue in self.both)
        return sum(max(queue.submitted, sequence) for queue, sequence in zip(self.both, latest, strict=True))

    def publish(self, record: ShardedTransfer) -> None:
        """The record is in flight from here on; its transfers follow. `consistent` is set when they have."""
        queue = self.stores if record.direction is Direction.STORE else self.loads
        record.sequence = queue.submitted + 1
        self.consistent = False
        queue.transfers.append(record)
        queue.submitted = record.sequence

    def repair(self) -> None:
        """Complete an interrupted submission: what it has not put in flight has failed. May be interrupted itself."""
        if self.consistent:
            return
        cause = KeyboardInterrupt("its submission was interrupted")
        for queue in self.both:
            for record in queue.transfers:
                queue.submitted = max(queue.submitted, record.sequence)
                for shard, transfer in zip(self._shards, record.transfers, strict=True):
                    if not (transfer.finished or shard.has_queued(transfer)):
                        fail_unqueued(transfer, cause)
        self.consistent = True

    def settle(self) -> None:
        """Take note of what has ended on all devices, without asking them."""
        for queue in self.both:
            transfers = queue.transfers
            while transfers and transfers[0].finished:
                self.report(transfers[0])
                transfers.popleft()

    def report(self, record: ShardedTransfer) -> None:
        """Count a finished transfer, once, and keep its result for `poll`."""
        queue = self.stores if record.direction is Direction.STORE else self.loads
        if record.sequence == 0 or record.sequence > queue.counted:
            totals, result = _with(queue.totals, record), result_of(record)
            queue.counted = record.sequence or queue.counted  # no call from here to the report: all of it is done
            queue.totals = totals
            if not record.forgotten:
                self.reports[record.id] = result
            if record.trace is not None:
                self.notices.append(record)
        if len(self.reports) > MOST_REPORTS:
            self.dropped_reports += 1
            self.reports.popitem(last=False)

    def take_reports(self) -> list[TransferResult]:
        """The results that `poll` has still to report, which are then reported."""
        self.settle()
        reports, self.reports = self.reports, OrderedDict()
        return list(reports.values())

    def forget(self, job_id: int) -> None:
        """Keep `poll` from reporting a job that has ended, also if that is noted later, when all before it have."""
        if self.reports.pop(job_id, None) is None:
            for record in itertools.chain.from_iterable(queue.transfers for queue in self.both):
                record.forgotten |= record.id == job_id


def _with(totals: DirectionTotals, record: ShardedTransfer) -> DirectionTotals:
    """The totals when a record has ended."""
    if record.error is not None:
        return DirectionTotals(totals.jobs + 1, totals.failed + 1, totals.nbytes, totals.seconds)
    seconds = record.seconds
    known = seconds if seconds == seconds else 0.0  # not NaN
    return DirectionTotals(totals.jobs + 1, totals.failed, totals.nbytes + record.nbytes, totals.seconds + known)

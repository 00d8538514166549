"""What is in flight in one direction, and what each job carries."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvoffload.copiers import Share
from kvoffload.device.streams import Lane
from kvoffload.driver import SourceOrder
from kvoffload.engine.job import Job
from kvoffload.engine.metrics import DirectionTotals


class Flight(NamedTuple):
    """What a job carries while it is in flight.

    Attributes:
        shares: of the blocks, one after the other as they are queued; they run at the same time.
        marked: whether the job follows the caller's stream, on which its first marker was recorded.
        rival: the latest job of the other direction that touches the same slots or blocks, if one was in flight.
    """

    shares: tuple[Share, ...]
    order: SourceOrder
    marked: bool
    rival: Job | None


class Books:
    """One direction: jobs in flight in the order of submission, totals of those that have ended.

    Being in `jobs` is being in flight: one append, which an interrupt cannot halve. The other numbers may lag behind.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.jobs: deque[Job] = deque()
        self.submitted = 0  # sequence number of the latest job
        self.launched = 0  # every job up to this one is all queued, or has ended
        self.totals = DirectionTotals()

    def next_sequence(self) -> int:
        return max(self.submitted, self.jobs[-1].sequence if self.jobs else 0) + 1

    def job(self, sequence: int) -> Job | None:
        """The job with that sequence number if it is in flight."""
        if not self.jobs or not self.jobs[0].sequence <= sequence <= self.jobs[-1].sequence:
            return None
        return self.jobs[sequence - self.jobs[0].sequence]

    def next_to_launch(self) -> Job | None:
        """The first job that is not all queued."""
        return self.job(max(self.launched + 1, self.jobs[0].sequence)) if self.jobs else None

"""The threads of a tier, what they do next, and counts. One lock for all of it; none is held while work is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvoffload.errors import ClosedError
from kvoffload.internal.checks import shown
from kvoffload.internal.log import LOGGER
from kvoffload.tiers.job import Outcome, TierJob
from kvoffload.tiers.queues import Removal, Work, WorkQueues, Write

_COUNT_OF = {
    Outcome.DECLINED: "declined",
    Outcome.FAILED: "failed",
    Outcome.EXPIRED: "expired",
    Outcome.CANCELLED: "cancelled",
}
_SECONDS_BETWEEN_WARNINGS = 10.0  # a medium that fails does so for every key


class Workers:
    """Threads that carry out work. Nothing that work or a caller's function raises ends one.

    Args:
        max_queued: reads that may wait, and as many writes.

    Attributes:
        closed: no work is taken any more.
    """

    def __init__(self, max_queued: int) -> None:
        self.closed = False
        self._max_queued = max_queued
        self._label = ""
        # Re-entrant, as a signal handler may cancel a job anywhere; entered as itself, as an interrupt in the __exit__
        # of the Condition would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queues = WorkQueues()
        self._threads: list[threading.Thread] = []
        self._working = 0  # threads that have not ended
        self._at_end: Callable[[], None] = lambda: None
        self._since: dict[int, float] = {}  # of each thread that is in a call: when that began
        self._warned = -_SECONDS_BETWEEN_WARNINGS
        self._any_ended_early = False  # of what is in the queues
        self._counts = dict.fromkeys(
            ("written", "read", "bytes_written", "bytes_read", "missing", "corrupt", *_COUNT_OF.values()), 0
        )

    def start(self, count: int, label: str, at_end: Callable[[], None]) -> None:
        """Start the threads, named after the tier's name; ClosedError if closed.

        Args:
            at_end: called by the last one of them, when it is about to end.
        """
        with self._lock:
            if self.closed:
                raise ClosedError(f"{label} was closed while it got its pool: make another one")
            self._label, self._at_end = label, at_end
            for number in range(count):
                name = f"kvoffload-{label}-{number}"
                self._threads.append(threading.Thread(target=self._work, args=(number,), name=name, daemon=True))
                self._working += 1  # before it starts: an interrupt in between must not make another thread the last
                self._threads[-1].start()

    # queues -------------------------------------------------------------------------------------------------------

    def queue_reads(self, works: Sequence[Work]) -> int:
        """Queue as many as there is room for, the first ones; how many. 0 if closed."""
        with self._lock:
            room = self._room(len(works))
            self._queues.reads.extend(works[:room])
            self._changed.notify(room)
        return room

    def queue_flush(self, works: Sequence[Work]) -> int:
        """Queue them all; 0 if closed."""
        with self._lock:
            room = 0 if self.closed else len(works)
            self._queues.reads.extend(works[:room])
            self._changed.notify(room)
        return room

    def queue_writes(self, works: Sequence[Write]) -> int:
        """As `queue_reads`."""
        with self._lock:
            room = self._room(len(works), writes=True)
            self._queues.add_writes(works[:room])
            self._changed.notify(room)
        return room

    def queue_removals(self, removals: Sequence[Removal]) -> int:
        """Cancel the writes of their keys that wait, and queue them all; 0 if closed.

        The writes end before a removal is queued: else it could be over before, and a write begin after it.
        """
        with self._lock:
            writes = [work for removal in removals for work in self._queues.waiting_writes(removal)]
        for work in writes:
            work.job.settle_waiting(Outcome.CANCELLED, work.positions)
        with self._lock:
            room = 0 if self.closed else len(removals)
            self._queues.removals.extend(removals[:room])
            self._changed.notify(room)
        return room

    def unfinished_writes(self) -> list[TierJob]:
        """The jobs of all writes that wait or are being carried out."""
        with self._lock:
            running = [work for work in self._queues.running if isinstance(work, Write)]
            return [*dict.fromkeys(work.job for work in (*running, *self._queues.writes))]

    def _room(self, wanted: int, writes: bool = False) -> int:
        """How many of `wanted` works may be queued; under the lock."""
        if self.closed:
            return 0
        queues = self._queues
        if len(queues.writes if writes else queues.reads) + wanted > self._max_queued:
            self._drop_ended()
        queued = len(queues.writes if writes else queues.reads)
        return min(wanted, max(0, self._max_queued - queued))

    def _drop_ended(self) -> None:
        if self._any_ended_early:
            self._any_ended_early = False
            self._queues.drop_ended()

    # counts -------------------------------------------------------------------------------------------------------

    def count(self, **more: int) -> None:
        """Add to counts of `TierStatistics`."""
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number

    def count_ended(self, outcome: Outcome, keys: int) -> None:
        """Keys of a job have this outcome."""
        name = _COUNT_OF.get(outcome)
        if name is not None:
            with self._lock:
                self._counts[name] += keys
                self._any_ended_early |= outcome in (Outcome.EXPIRED, Outcome.CANCELLED)
                if self._queues.removals:  # what ends may be one that writes wait for
                    self._changed.notify_all()

    def figures(self) -> dict[str, Any]:
        """All fields of `TierStatistics` but `records`."""
        now = time.monotonic()
        with self._lock:
            since, queues = list(self._since.values()), self._queues
            self._drop_ended()
            return {
                "queued_reads": len(queues.reads) + sum(len(each.positions) for each in queues.removals if each.waits),
                "queued_writes": len(queues.writes),
                "in_calls": len(since),
                "longest_call": max(0.0, now - min(since, default=now)),
                **self._counts,
            }

    # threads ------------------------------------------------------------------------------------------------------

    def close(self, timeout: float) -> bool:
        """Cancel what waits, and wait for the threads; whether all have ended. May be called again."""
        end = time.monotonic() + timeout
        with self._lock:
            self.closed = True
            self._changed.notify_all()
            waiting = dict.fromkeys(work.job for work in self._queues.waiting())
        for job in waiting:
            job.settle_waiting(Outcome.CANCELLED)
        with self._lock:
            self._queues.clear()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, number: int) -> None:
        while (work := self._take(number)) is not None:
            try:
                self._carry_out(work, number)
            except BaseException as error:  # from a caller's function: SystemExit, say
                self._warn(error)
            with self._lock:
                self._since.pop(number, None)
                self._queues.finish(work)
                if self._queues.removals or self._queues.writes:
                    self._changed.notify_all()
        with self._lock:
            self._working -= 1
            last = self._working == 0
        if last:
            self._at_end()

    def _take(self, number: int) -> Work | None:
        """What the thread does next, once there is something; None when closed."""
        with self._lock:
            while not self.closed:
                work = self._queues.take()
                if work is not None:
                    self._since[number] = time.monotonic()
                    return work
                self._changed.wait()
        return None

    def _carry_out(self, work: Work, number: int) -> None:
        positions = [position for position in work.positions if work.job.begin(position)]
        if not positions:
            return
        outcomes = self._outcomes(work)
        with self._lock:
            self._since.pop(number, None)
        for position in positions:
            try:
                work.job.settle(position, outcomes[position - work.positions[0]])
            except BaseException as error:
                self._warn(error)

    def _outcomes(self, work: Work) -> list[Outcome]:
        try:
            outcomes = work.run()
            wrong = [outcome for outcome in outcomes if not isinstance(outcome, Outcome)]
            if wrong or len(outcomes) != len(work.positions):
                raise TypeError(f"{len(work.positions)} outcomes expected, got {shown(outcomes)}")
        except BaseException as error:  # nothing ends the thread: the tier would be dead without a word
            self._warn(error)
            return [Outcome.FAILED] * len(work.positions)
        return outcomes

    def _warn(self, error: BaseException) -> None:
        now = time.monotonic()
        with self._lock:
            due = now - self._warned >= _SECONDS_BETWEEN_WARNINGS
            self._warned = now if due else self._warned
        if due:
            try:
                LOGGER.warning("tier %s: %s; its keys are misses", self._label, shown(error))
            except BaseException:  # a handler or filter of the caller's
                pass

"""The threads of a tier, what they do next, and counts. One lock for all of it; none is held while work is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvoffload.cache.tiering.job import Outcome, TierJob
from kvoffload.errors import ClosedError
from kvoffload.internal.checks import reason, shown
from kvoffload.internal.log import LOGGER
from kvoffload.tiers.queues import Removal, Work, WorkQueues, Write

W = TypeVar("W", bound=Work)

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
        self._calls: dict[int, tuple[float, int]] = {}  # of each thread that is in one: when it began, and its keys
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
        """Queue works of one job, its first keys if there is no room for all; of how many keys. 0 if closed."""
        with self._lock:
            taken = self._fitting(works, lambda: self._queues.read_keys)
            self._queues.add_reads(taken)
            self._changed.notify(len(taken))
        return _end_of(taken)

    def queue_flush(self, works: Sequence[Work]) -> int:
        """As `queue_reads`, whatever waits."""
        with self._lock:
            taken = [] if self.closed else works
            self._queues.add_reads(taken)
            self._changed.notify(len(taken))
        return _end_of(taken)

    def queue_writes(self, works: Sequence[Write]) -> int:
        """As `queue_reads`."""
        with self._lock:
            taken = self._fitting(works, lambda: self._queues.write_keys)
            self._queues.add_writes(taken)
            self._changed.notify(len(taken))
        return _end_of(taken)

    def queue_removals(self, removals: Sequence[Removal]) -> int:
        """Cancel the writes of their keys that wait, and queue them all; of how many keys. 0 if closed.

        The writes end before a removal is queued: else it could be over before, and a write begin after it.
        """
        with self._lock:
            writes = [(work, removal) for removal in removals for work in self._queues.waiting_writes(removal)]
        for work, removal in writes:
            work.job.settle_waiting(Outcome.CANCELLED, removal.concerned(work))
        with self._lock:
            taken = [] if self.closed else removals
            self._queues.removals.extend(taken)
            self._changed.notify(len(taken))
        return _end_of(taken)

    def unfinished_writes(self) -> list[TierJob]:
        """The jobs of all writes that wait or are being carried out."""
        with self._lock:
            running = [work for work in self._queues.running if isinstance(work, Write)]
            return [*dict.fromkeys(work.job for work in (*running, *self._queues.writes))]

    def _fitting(self, works: Sequence[W], queued: Callable[[], int]) -> Sequence[W]:
        """Those for which there is room, the last of them cut if needed; under the lock. `queued`: keys that wait."""
        if self.closed:
            return []
        if queued() + _end_of(works) > self._max_queued:
            self._drop_ended()
        room = max(0, self._max_queued - queued())
        if _end_of(works) <= room:
            return works
        cut = (replace(work, positions=work.positions[: max(0, room - work.positions.start)]) for work in works)
        return [work for work in cut if work.positions]

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

    def count_ended(self, outcomes: Sequence[Outcome]) -> None:
        """Keys of a job have these outcomes."""
        unusual = [outcome for outcome in outcomes if outcome in _COUNT_OF]
        if unusual:
            with self._lock:
                for outcome in unusual:
                    self._counts[_COUNT_OF[outcome]] += 1
                self._any_ended_early |= Outcome.EXPIRED in unusual or Outcome.CANCELLED in unusual
                if self._queues.removals:  # what ends may be one that writes wait for
                    self._changed.notify_all()

    def figures(self) -> dict[str, Any]:
        """All fields of `TierStatistics` but `records`."""
        now = time.monotonic()
        with self._lock:
            self._drop_ended()
            calls, queues = list(self._calls.values()), self._queues
            return {
                "queued_reads": queues.read_keys + sum(len(each.positions) for each in queues.removals if each.waits),
                "queued_writes": queues.write_keys,
                "in_calls": sum(keys for _, keys in calls),
                "longest_call": max(0.0, now - min((begin for begin, _ in calls), default=now)),
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
                self.warn(error)
            with self._lock:
                self._calls.pop(number, None)
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
                    self._calls[number] = time.monotonic(), len(work.positions)
                    return work
                self._changed.wait()
        return None

    def _carry_out(self, work: Work, number: int) -> None:
        positions = work.job.begin(work.positions)
        if not positions:
            return
        outcomes = self._outcomes(work, positions)
        with self._lock:
            self._calls.pop(number, None)
        work.job.settle(positions, outcomes)

    def _outcomes(self, work: Work, positions: Sequence[int]) -> list[Outcome]:
        try:
            outcomes = list(work.run(positions))
            if len(outcomes) != len(positions) or not all(isinstance(outcome, Outcome) for outcome in outcomes):
                raise TypeError(f"{len(positions)} outcomes expected, got {shown(outcomes)}")
        except BaseException as error:  # nothing ends the thread: the tier would be dead without a word
            self.warn(error)
            return [Outcome.FAILED] * len(positions)
        return outcomes

    def warn(self, error: BaseException) -> None:
        """Log it, unless there was one a moment ago."""
        now = time.monotonic()
        with self._lock:
            due = now - self._warned >= _SECONDS_BETWEEN_WARNINGS
            self._warned = now if due else self._warned
        if due:
            try:
                LOGGER.warning("tier %s: %s; its keys are misses", self._label, reason(error))
            except BaseException:  # a handler or filter of the caller's
                pass


def _end_of(works: Sequence[Work]) -> int:
    """How many keys of their job the works reach to, if they begin with the first."""
    return works[-1].positions.stop if works else 0

"""The threads of a tier, and the order of their work. One lock guards all state; none is held during the work.

    waiting work     begins when
    a read           at once; reads, questions and flushes are one queue
    a removal        no write of its keys runs; before reads
    a write          no write of its key runs, and no removal of its key waits or runs

Reads come before writes, but a write follows 16 reads, because entries stay occupied until they are written. A removal
also cancels waiting writes of its keys. So no record that was put before comes back after it. Work whose keys have all
ended may begin at any time: it does nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvoffload.cache.tiering.tier import Outcome, TierJob
from kvoffload.errors import ClosedError
from kvoffload.internal.checks import reason, shown
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import in_any_call, new_lock, new_thread, refuse_waiting, run_outside

_R = TypeVar("_R")
Run = Callable[[Sequence[int]], Sequence[Outcome]]
"""Does the work for some positions of a job, and returns the outcome of each."""

READS_PER_WRITE = 16  # as long as both wait
_MOST_OLD_KEYS = 4096
_POLL = 1e-3  # seconds
_LOOK = 0.5  # seconds after which a thread looks for work that nobody has told it of


@dataclass(slots=True, eq=False)
class Work:
    """Neighbouring keys of a job, for one call of `run` with those positions that have no outcome when it begins."""

    job: TierJob
    positions: range
    run: Run

    @property
    def waits(self) -> bool:
        return None in self.job.outcomes[self.positions.start : self.positions.stop]


@dataclass(slots=True, eq=False)
class Write(Work):
    @property
    def keys(self) -> tuple[bytes, ...]:
        return self.job.keys[self.positions.start : self.positions.stop]


@dataclass(slots=True, eq=False)
class Remove(Work):
    """Keys to remove; None: all."""

    keys: frozenset[bytes] | None

    def concerns(self, write: Write) -> bool:
        return self.keys is None or not self.keys.isdisjoint(write.keys)

    def concerned(self, write: Write) -> list[int]:
        keys = write.job.keys
        return [at for at in write.positions if self.keys is None or keys[at] in self.keys]


class WorkQueues:
    """Waiting work by kind, oldest first, with its number of keys, and `running` work, one for each busy thread."""

    def __init__(self) -> None:
        self.reads = deque[Work]()
        self.writes = deque[Write]()
        self.removals = deque[Remove]()
        self.read_keys = self.write_keys = 0
        self.running: list[Work] = []
        self._reads_in_a_row = 0
        self._written_keys = set[bytes]()  # those of all writes that wait, and of some that did

    def add(self, works: Sequence[Work]) -> None:
        if len(self._written_keys) > 2 * self.write_keys + _MOST_OLD_KEYS:
            self._written_keys = {key for work in self.writes for key in work.keys}
        for work in works:
            if isinstance(work, Remove):
                self.removals.append(work)
            elif isinstance(work, Write):
                self._written_keys.update(work.keys)
                self.writes.append(work)
                self.write_keys += len(work.positions)
            else:
                self.reads.append(work)
                self.read_keys += len(work.positions)

    def take(self) -> Work | None:
        """Take the work that may begin now, which runs from here on; None if none may. In this order:

        1. A removal, unless a write of its keys is running.
        2. After many reads in a row a write.
        3. A read.
        4. A write.
        """
        work: Work | None = None
        for at, removal in enumerate(self.removals):
            if not removal.waits or not any(
                isinstance(each, Write) and removal.concerns(each) for each in self.running
            ):
                work = removal
                del self.removals[at]
                break
        if work is None and self._reads_in_a_row >= READS_PER_WRITE:
            work = self._take_write()
        if work is None and self.reads:
            work = self.reads.popleft()
            self.read_keys -= len(work.positions)
        work = work or self._take_write()
        if work is not None:
            self._reads_in_a_row = 0 if isinstance(work, Write) or not self.writes else self._reads_in_a_row + 1
            self.running.append(work)
        return work

    def finish(self, work: Work) -> None:
        self.running = [each for each in self.running if each is not work]

    def waiting_writes(self, concerned: Remove) -> list[Write]:
        if concerned.keys is not None and self._written_keys.isdisjoint(concerned.keys):
            return []
        return [work for work in self.writes if concerned.concerns(work)]

    def drop_ended(self) -> None:
        self.removals = deque(work for work in self.removals if work.waits)
        self.reads = deque(work for work in self.reads if work.waits)
        self.writes = deque(work for work in self.writes if work.waits)
        self.read_keys, self.write_keys = _keys_of(self.reads), _keys_of(self.writes)

    def jobs(self) -> list[TierJob]:
        return list(dict.fromkeys(each.job for queue in (self.removals, self.reads, self.writes) for each in queue))

    def _take_write(self) -> Write | None:
        removals = [*self.removals, *(each for each in self.running if isinstance(each, Remove))]
        if any(each.keys is None for each in removals):
            return None
        busy = {key for each in self.running if isinstance(each, Write) for key in each.keys}
        for at, work in enumerate(self.writes):
            if busy.isdisjoint(work.keys) and not any(each.concerns(work) for each in removals):
                del self.writes[at]
                self.write_keys -= len(work.positions)
                return work
        return None


def _keys_of(works: Iterable[Work]) -> int:
    return sum(len(work.positions) for work in works)


_COUNT_OF = {
    Outcome.DECLINED: "declined",
    Outcome.FAILED: "failed",
    Outcome.EXPIRED: "expired",
    Outcome.CANCELLED: "cancelled",
}
_SECONDS_BETWEEN_WARNINGS = 10.0  # a medium that fails does so for every key


class Workers:
    """Threads that do the work, and its queues, bounded by `max_queued` keys of reads and as many of writes.

    No exception of the work or of a caller's function ends a thread. `foreign`: the work is code of the caller's, which
    may wait for engines and caches of its own.
    """

    def __init__(self, max_queued: int, *, foreign: bool) -> None:
        self.closed = False
        self._max_queued = max_queued
        self._label, self._foreign = "", foreign
        # Never entered through the Condition: an interrupt in its __exit__ would leave it locked.
        self._lock = new_lock()
        self._changed = threading.Condition(self._lock)
        self._queues = WorkQueues()
        self._threads: list[threading.Thread] = []
        self._at_end: Callable[[], None] = lambda: None
        self._calls: dict[int, tuple[float, int]] = {}  # of each thread that is in one: when it began, and its keys
        self._warned = -_SECONDS_BETWEEN_WARNINGS
        self._any_ended_early = False  # of what is in the queues
        self._counts = dict.fromkeys(
            ("written", "read", "bytes_written", "bytes_read", "missing", "corrupt", *_COUNT_OF.values()), 0
        )

    def start(self, count: int, label: str, at_end: Callable[[], None]) -> None:
        """Start threads named after the tier. Each that ends while no work runs calls `at_end`, so that may be called
        more than once, and by several threads at a time. ClosedError if closed.
        """
        with self._lock:
            if self.closed:
                raise ClosedError(f"{label} was closed while it got its pool: make another one")
            self._label, self._at_end = label, at_end
            self._threads += [new_thread(f"kvoffload-{label}-{number}", self._work, number) for number in range(count)]
        for thread in self._threads:  # without the lock: `start` waits for the thread, where a finalizer may want it
            thread.start()

    # queues -------------------------------------------------------------------------------------------------------

    def queue(self, works: Sequence[Work], *, bounded: bool = True) -> int:
        """Queue works of one job and one kind; if `bounded`, only the first keys, as far as there is room.

        A removal first cancels waiting writes of its keys. They end before it is queued; else it could be over first,
        and a write begin after it.

        Returns:
            How many keys were queued; 0 if closed.
        """
        for removal in works:
            if isinstance(removal, Remove):
                with self._lock:
                    writes = self._queues.waiting_writes(removal)
                for write in writes:
                    write.job.settle_waiting(Outcome.CANCELLED, removal.concerned(write))
        with self._lock:
            taken = [] if self.closed else works
            if taken and bounded:
                queues, queued = self._queues, "write_keys" if isinstance(taken[0], Write) else "read_keys"
                if getattr(queues, queued) + _end_of(taken) > self._max_queued:
                    self._drop_ended()
                room = max(0, self._max_queued - getattr(queues, queued))
                if _end_of(taken) > room:  # the last work may be cut
                    cut = [replace(one, positions=one.positions[: max(0, room - one.positions.start)]) for one in taken]
                    taken = list(filter(lambda one: one.positions, cut))
            self._queues.add(taken)
            self._changed.notify(len(taken))
        return _end_of(taken)

    def unfinished_writes(self) -> list[TierJob]:
        with self._lock:
            running = filter(lambda work: isinstance(work, Write), self._queues.running)
            return [*dict.fromkeys(work.job for work in (*running, *self._queues.writes))]

    def _drop_ended(self) -> None:
        if self._any_ended_early:
            self._any_ended_early = False
            self._queues.drop_ended()

    # counts -------------------------------------------------------------------------------------------------------

    def count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number

    def count_ended(self, outcomes: Sequence[Outcome]) -> None:
        unusual = [outcome for outcome in outcomes if outcome in _COUNT_OF]
        if unusual:
            with self._lock:
                for outcome in unusual:
                    self._counts[_COUNT_OF[outcome]] += 1
                self._any_ended_early |= Outcome.EXPIRED in unusual or Outcome.CANCELLED in unusual
                if self._queues.removals:  # what ends may be one that writes wait for
                    self._changed.notify_all()

    def figures(self) -> dict[str, Any]:
        """Return the counts and the state of queues and threads, by their names in `TierStatistics`.

        Inside another call this takes no lock, since this lock comes before the cache's, and may count ended keys.
        """
        now = time.monotonic()
        if not in_any_call():
            with self._lock:
                self._drop_ended()
        calls, queues, removals = self._calls.copy().values(), self._queues, self._queues.removals.copy()
        return {
            "queued_reads": queues.read_keys + sum(len(each.positions) for each in removals if each.waits),
            "queued_writes": queues.write_keys,
            "in_calls": sum(keys for _, keys in calls),
            "longest_call": max(0.0, now - min((begin for begin, _ in calls), default=now)),
            **self._counts,
        }

    # threads ------------------------------------------------------------------------------------------------------

    def close(self, timeout: float) -> bool:
        """Cancel waiting work, and wait for the threads. Returns whether all have ended."""
        refuse_waiting("close")
        end = time.monotonic() + timeout
        with self._lock:
            self.closed = True
            self._changed.notify_all()
            waiting = self._queues.jobs()
        for job in waiting:
            job.settle_waiting(Outcome.CANCELLED)
        with self._lock:
            self._queues.drop_ended()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        # After an interrupt of `join` or `is_alive`, Python takes a thread that goes on for one that has ended.
        while self._queues.running and threading.current_thread() not in self._threads and time.monotonic() < end:
            time.sleep(_POLL)
        return not self._queues.running and not any(thread.is_alive() for thread in self._threads)

    def calling(self, call: Callable[..., _R], *arguments: object) -> _R:
        """Call one of the tier's own methods. A user's may wait for the library: it runs as outside of its calls."""
        return run_outside(call, *arguments) if self._foreign else call(*arguments)

    def _work(self, number: int) -> None:
        while (work := self._take(number)) is not None:
            try:
                positions = work.job.begin(work.positions)
                if positions:
                    try:
                        outcomes = list(self.calling(work.run, positions))
                        if len(outcomes) != len(positions) or not all(isinstance(each, Outcome) for each in outcomes):
                            raise TypeError(f"{len(positions)} outcomes expected, got {shown(outcomes)}")
                    except BaseException as error:  # noqa: BLE001  # nothing ends the thread: the tier would be dead
                        self.warn(error)
                        outcomes = [Outcome.FAILED] * len(positions)
                    with self._lock:
                        self._calls.pop(number, None)
                    work.job.settle(positions, outcomes)
            except BaseException as error:  # noqa: BLE001  # from a caller's function: SystemExit, say
                self.warn(error)
            with self._lock:
                self._calls.pop(number, None)
                self._queues.finish(work)
                if self._queues.removals or self._queues.writes:
                    self._changed.notify_all()
        if not self._queues.running:
            self._at_end()

    def _take(self, number: int) -> Work | None:
        """Wait for the thread's next work; None when closed."""
        with self._lock:
            while True:
                if self.closed:
                    return None
                work = self._queues.take()
                if work is not None:
                    self._calls[number] = time.monotonic(), len(work.positions)
                    return work
                self._changed.wait(_LOOK)  # `notify`, interrupted by a signal, makes the next one wake nobody

    def warn(self, error: BaseException) -> None:
        now = time.monotonic()
        with self._lock:
            due = now - self._warned >= _SECONDS_BETWEEN_WARNINGS
            self._warned = now if due else self._warned
        if due:
            LOGGER.warning("tier %s: %s; its keys are misses", self._label, reason(error))


def _end_of(works: Sequence[Work]) -> int:
    """Return how many keys the works have, which begin with the first of their job."""
    return works[-1].positions.stop if works else 0

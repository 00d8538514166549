"""ThreadedTier: a tier whose methods may block. Threads of its own call them; queues are bounded, reads come first.

What removes keys waits for writes of these keys that have begun, and cancels those that have not; so no record that
was put before comes back after it.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvoffload.errors import ClosedError, LayoutError
from kvoffload.internal.checks import at_least
from kvoffload.internal.log import LOGGER
from kvoffload.internal.types import UInt8Array
from kvoffload.internal.waiting import wait_until
from kvoffload.tiers.job import Outcome, TierJob
from kvoffload.tiers.tier import Notify, Tier, TierStatistics, check_entries, check_keys, check_pools

Rows = list[UInt8Array]
"""The ranges of one record: a row of each pool, uint8, (bytes,)."""

_WHOLE_TIER = (b"",)  # the key of jobs that concern all records
_COUNT_OF = {
    Outcome.DECLINED: "declined",
    Outcome.FAILED: "failed",
    Outcome.EXPIRED: "expired",
    Outcome.CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a record that is put comes from.

    Attributes:
        tenant: whose it is.
        call: the number of the `put`, rising from 0 in this process.
        position: of the key among those of that call.
    """

    tenant: str
    call: int
    position: int


class _Work(NamedTuple):
    """What a thread does next: one or all keys of a job.

    Attributes:
        run: does it, and returns the outcome of each position.
        writes: the key, if it is a write.
        after: must not begin while one of these keys is being written; None: while any is.
    """

    job: TierJob
    positions: range
    run: Callable[[], list[Outcome]]
    writes: bytes | None = None
    after: frozenset[bytes] | None = frozenset()


class ThreadedTier(Tier):
    """A tier over methods that may block: a subclass has `read_record`, `write_record` and the others below.

    Whatever such a method raises makes its keys FAILED, and the thread goes on. Calls for different keys run at the
    same time, never two writes of one key. A method that never returns keeps one thread, and its keys without an
    outcome.

    Args:
        threads: that call the methods.
        max_queued: keys that may wait to be put, and as many to be fetched; what goes beyond is DECLINED.

    Attributes:
        pools: as given to `attach`.
        record_bytes: of one record, over all pools.
    """

    def __init__(self, *, threads: int = 4, max_queued: int = 4096) -> None:
        self.threads = at_least("threads", threads, 1)
        self.max_queued = at_least("max_queued", max_queued, 1)
        self.pools: tuple[UInt8Array, ...] = ()
        self.record_bytes = 0
        self._changed = threading.Condition()
        self._reads = deque[_Work]()  # and what asks, removes and flushes
        self._writes = deque[_Work]()
        self._written_now = set[bytes]()
        self._since: dict[int, float] = {}  # of each thread that is in a call: when that began
        self._workers: list[threading.Thread] = []
        self._counts = dict.fromkeys(
            ("written", "read", "bytes_written", "bytes_read", "missing", "corrupt", *_COUNT_OF.values()), 0
        )
        self._calls = 0
        self._closed = False

    # what a subclass does -----------------------------------------------------------------------------------------

    @abstractmethod
    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        """Copy a record to the rows, and verify it: DONE, MISSING or FAILED."""

    @abstractmethod
    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:
        """Copy the rows to a record: DONE, DECLINED or FAILED. If it has the key: DONE, and nothing is copied."""

    @abstractmethod
    def has_record(self, key: bytes) -> bool:
        """Whether there is a record, as far as can be said without reading it."""

    @abstractmethod
    def remove_records(self, keys: Sequence[bytes]) -> list[bool]:
        """Forget records, durably on return; of each key whether there was one."""

    @abstractmethod
    def remove_all(self) -> None:
        """Forget all records, durably on return."""

    def flush(self) -> None:
        """Make durable what was written."""

    def start(self, layout: bytes | None) -> None:
        """The pools are known (`self.pools`): open what is needed. What it raises leaves `attach`."""

    def release(self) -> None:
        """Let go of what `start` has opened; no other method is called afterwards."""

    def count_corrupt(self) -> None:
        """For `read_record`: the record had other bytes than were put."""
        with self._changed:
            self._counts["corrupt"] += 1

    # the interface ------------------------------------------------------------------------------------------------

    def attach(self, pools: Sequence[UInt8Array], layout: bytes | None) -> None:
        record_bytes = check_pools(pools)
        with self._changed:
            if self._closed or self._workers:
                state = "is closed" if self._closed else "has a pool"
                raise ClosedError(f"{self!r} {state}: make another one")
            if layout is None and (self.capabilities.durable or self.capabilities.shared):
                raise LayoutError(
                    f"{self!r} outlives this process or is shared, and the layout does not say what its bytes mean: "
                    "give it dtype, block_axes and tokens_per_block"
                )
            self.pools, self.record_bytes = tuple(pools), record_bytes
            self.start(layout)
            for number in range(self.threads):
                name = f"kvoffload-{self.name}-{number}"
                self._workers.append(threading.Thread(target=self._work, args=(number,), name=name, daemon=True))
                self._workers[-1].start()

    def put(
        self,
        keys: Sequence[bytes],
        entries: Sequence[int],
        *,
        tenant: str = "",
        deadline: float | None = None,
        notify: Notify | None = None,
    ) -> TierJob:
        job = self._checked(TierJob(check_keys(keys), check_entries(entries, keys, self.pools), deadline, notify))
        with self._changed:
            call, self._calls = self._calls, self._calls + 1
        works = [
            _Work(job, range(at, at + 1), partial(self._write, key, entry, Origin(tenant, call, at)), key)
            for at, (key, entry) in enumerate(zip(job.keys, job.entries, strict=True))
        ]
        return self._queue(self._writes, job, works)

    def get(
        self,
        keys: Sequence[bytes],
        entries: Sequence[int],
        *,
        deadline: float | None = None,
        notify: Notify | None = None,
    ) -> TierJob:
        job = self._checked(TierJob(check_keys(keys), check_entries(entries, keys, self.pools), deadline, notify))
        works = [
            _Work(job, range(at, at + 1), partial(self._read, key, entry))
            for at, (key, entry) in enumerate(zip(job.keys, job.entries, strict=True))
        ]
        return self._queue(self._reads, job, works)

    def exists(self, keys: Sequence[bytes], *, deadline: float | None = None, notify: Notify | None = None) -> TierJob:
        job = self._checked(TierJob(check_keys(keys), (), deadline, notify))
        works = [_Work(job, range(at, at + 1), partial(self._ask, key)) for at, key in enumerate(job.keys)]
        return self._queue(self._reads, job, works)

    def remove(self, keys: Sequence[bytes], *, notify: Notify | None = None) -> TierJob:
        job = self._checked(TierJob(check_keys(keys), (), None, notify))
        mine = frozenset(job.keys)
        self._cancel_writes(mine.__contains__)
        work = _Work(job, range(len(job.keys)), partial(self._remove, job.keys), after=mine)
        return self._queue(self._reads, job, [work] if mine else [], bounded=False)

    def clear(self, *, notify: Notify | None = None) -> TierJob:
        job = self._checked(TierJob(_WHOLE_TIER, (), None, notify))
        self._cancel_writes(lambda _: True)
        return self._queue(
            self._reads, job, [_Work(job, range(1), partial(self._run_all, self.remove_all), after=None)]
        )

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [self.has_record(key) for key in keys] if self.capabilities.local_index else [False] * len(keys)

    def statistics(self) -> TierStatistics:
        now = time.monotonic()
        with self._changed:
            since = list(self._since.values())
            return TierStatistics(
                records=self.num_records(),
                queued_reads=sum(len(work.positions) for work in self._reads),
                queued_writes=len(self._writes),
                in_calls=len(since),
                longest_call=now - min(since, default=now),
                **self._counts,
            )

    def num_records(self) -> int | None:
        """How many records it holds; None if it does not know at once."""
        return None

    def drain(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if end is None else max(0.0, end - time.monotonic())

        job = TierJob(_WHOLE_TIER, deadline=end)
        try:
            wait_until(lambda: not self._writes and not self._written_now, left(), "writes of a tier")
            self._queue(self._reads, job, [_Work(job, range(1), partial(self._run_all, self.flush))], bounded=False)
            return job.wait(left()) == [Outcome.DONE]
        except TimeoutError:
            job.cancel()
            return False

    def close(self, timeout: float = 10.0) -> bool:
        with self._changed:
            first, self._closed = not self._closed, True
            waiting = {id(work.job): work.job for work in [*self._reads, *self._writes]}
            self._reads.clear()
            self._writes.clear()
            self._changed.notify_all()
        for job in waiting.values():
            job.settle_waiting(Outcome.CANCELLED)
        end = time.monotonic() + timeout
        for worker in self._workers:
            worker.join(max(0.0, end - time.monotonic()))
        if any(worker.is_alive() for worker in self._workers):
            return False
        if first:
            self.release()
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    # queues -------------------------------------------------------------------------------------------------------

    def _checked(self, job: TierJob) -> TierJob:
        if self._closed or not self._workers:
            state = "is closed: make another one" if self._closed else "has no pool yet: give it to a BlockCache"
            raise ClosedError(f"{self!r} {state}")
        return job

    def _queue(self, queue: deque[_Work], job: TierJob, works: list[_Work], *, bounded: bool = True) -> TierJob:
        with self._changed:
            if self._closed or not self._workers:
                room, refused = 0, Outcome.CANCELLED
            else:
                room = max(0, self.max_queued - len(queue)) if bounded else len(works)
                refused = Outcome.DECLINED
                queue.extend(works[:room])
                self._changed.notify(len(works[:room]))
        for work in works[room:]:
            for position in work.positions:
                if job.begin(position):
                    self._settle(work, position, refused)
        return job

    def _cancel_writes(self, concerned: Callable[[bytes], bool]) -> None:
        with self._changed:
            gone = [work for work in self._writes if work.writes is not None and concerned(work.writes)]
            for work in gone:
                self._writes.remove(work)
        for work in gone:
            if work.job.begin(work.positions[0]):
                self._settle(work, work.positions[0], Outcome.CANCELLED)

    # threads ------------------------------------------------------------------------------------------------------

    def _work(self, number: int) -> None:
        while True:
            with self._changed:
                while (work := self._next()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
                self._since[number] = time.monotonic()
            try:
                self._carry_out(work)
            finally:
                with self._changed:
                    del self._since[number]
                    self._written_now.discard(work.writes or b"")
                    self._changed.notify_all()

    def _next(self) -> _Work | None:
        """Take what may begin: the first of what reads and removes, else the first write; under the lock."""
        for queue in (self._reads, self._writes):
            for work in queue:
                blocked = self._written_now if work.after is None else self._written_now & work.after
                if not blocked and work.writes not in self._written_now:
                    queue.remove(work)
                    if work.writes is not None:
                        self._written_now.add(work.writes)
                    return work
        return None

    def _carry_out(self, work: _Work) -> None:
        positions = [position for position in work.positions if work.job.begin(position)]
        if not positions:
            return
        try:
            outcomes = work.run()
        except BaseException as error:  # nothing ends the thread: the tier would be dead without a word
            LOGGER.warning("%r: %r; the keys are misses", self, error)
            outcomes = [Outcome.FAILED] * len(work.positions)
        for position in positions:
            self._settle(work, position, outcomes[position - work.positions[0]])

    def _settle(self, work: _Work, position: int, outcome: Outcome) -> None:
        name = _COUNT_OF.get(outcome)
        if name is not None:
            with self._changed:
                self._counts[name] += 1
        try:
            work.job.settle(position, outcome)
        except Exception:
            LOGGER.exception("%r: a notify function of the caller's raised", self)

    def _rows(self, entry: int) -> Rows:
        return [pool[entry] for pool in self.pools]

    def _write(self, key: bytes, entry: int, origin: Origin) -> list[Outcome]:
        outcome = self.write_record(key, self._rows(entry), origin)
        if outcome is Outcome.DONE:
            self._count(written=1, bytes_written=self.record_bytes)
        return [outcome]

    def _read(self, key: bytes, entry: int) -> list[Outcome]:
        outcome = self.read_record(key, self._rows(entry))
        if outcome is Outcome.DONE:
            self._count(read=1, bytes_read=self.record_bytes)
        elif outcome is Outcome.MISSING:
            self._count(missing=1)
        return [outcome]

    def _ask(self, key: bytes) -> list[Outcome]:
        return [Outcome.DONE if self.has_record(key) else Outcome.MISSING]

    def _remove(self, keys: Sequence[bytes]) -> list[Outcome]:
        return [Outcome.DONE if found else Outcome.MISSING for found in self.remove_records(keys)]

    @staticmethod
    def _run_all(run: Callable[[], None]) -> list[Outcome]:
        run()
        return [Outcome.DONE]

    def _count(self, **more: int) -> None:
        with self._changed:
            for name, count in more.items():
                self._counts[name] += count

"""ThreadedTier: a tier whose methods may block. Threads of its own call them; queues are bounded, reads come first.

A removal cancels the writes of its keys that wait, and waits for the writes that have begun; writes that are put
afterwards wait for the removal. So no record that was put before comes back after it.
"""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvoffload.cache.tiering.job import Outcome, TierJob
from kvoffload.cache.tiering.tier import (
    Notify,
    Tier,
    TierStatistics,
    check_call,
    check_entries,
    check_keys,
    check_layout,
    check_pools,
)
from kvoffload.errors import ClosedError
from kvoffload.internal.checks import as_timeout, shown, to_wait
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import in_call
from kvoffload.internal.types import UInt8Array
from kvoffload.internal.waiting import wait_until
from kvoffload.tiers.options import Limits, given_or_default
from kvoffload.tiers.workers import Removal, Work, Workers, Write

Rows = list[UInt8Array]
"""The ranges of one record: a row of each pool, uint8, (bytes,)."""

_METHODS = (("read_record", "read_records"), ("write_record", "write_records"), ("has_record", "have_records"))
_WHOLE_TIER = (b"",)  # the key of jobs that concern all records


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a record that is put comes from.

    Attributes:
        tenant: whose it is.
        job: the `put`, with all of its keys.
    """

    tenant: str
    job: TierJob


class ThreadedTier(Tier):
    """A tier over methods that may block: a subclass has `read_record`, `write_record` and the others below.

    A medium that transfers several records in a call has `read_records`, `write_records` and `have_records` instead,
    and says by the class attribute `bytes_per_call` how many it wants at a time.

    Whatever such a method raises makes its keys FAILED, and so does a result of another type; the thread goes on. A
    method that never returns keeps one thread, and its keys without an outcome. Methods are called at the same time by
    several threads, except two writes of one key, and a write of a key with what removes that key.

    Args:
        limits: see `Limits`; None: `Limits()`.

    Attributes:
        threads: that call the methods. A class attribute says how many suit the medium; `limits` may say otherwise.
        bytes_per_call: of the records that `read_records` or `write_records` is given at most, if they are more than
            one. A job that is smaller is divided among the threads.
        pools: as given to `attach`.
        record_bytes: of one record, over all pools.
    """

    threads = 4
    bytes_per_call = 0

    def __init__(self, *, limits: Limits | None = None) -> None:
        for one, several in _METHODS:
            if all(getattr(type(self), name) is getattr(ThreadedTier, name) for name in (one, several)):
                raise TypeError(f"{type(self).__name__} must have the method {one}, or {several}")
        limits = given_or_default("limits", limits, Limits)
        self.threads = self.threads if limits.threads is None else limits.threads
        self.pools: tuple[UInt8Array, ...] = ()
        self.record_bytes = 0
        self.max_queued = limits.max_queued
        self._workers = Workers(self.max_queued)
        self._attaching = threading.RLock()
        self._attached = False  # or being attached
        self._opened = False  # `start` has returned, and `release` has not
        self._releasing = threading.RLock()
        self._process = os.getpid()

    # what a subclass does -----------------------------------------------------------------------------------------

    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        """Copy a record to the rows, and verify it: DONE, MISSING or FAILED.

        If its bytes are not those that were put: `count_corrupt`, and MISSING. Unless it returns DONE the rows may hold
        any bytes. It must not use them after it has returned.
        """
        raise NotImplementedError(f"{type(self).__name__} must have read_record, or read_records")

    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:
        """Copy the rows to a record: DONE, DECLINED or FAILED. If it has the key: DONE, and nothing is copied.

        It must not write to the rows, nor use them after it has returned.
        """
        raise NotImplementedError(f"{type(self).__name__} must have write_record, or write_records")

    def has_record(self, key: bytes) -> bool:
        """Whether there is a record, as far as can be said without reading it.

        With a local index `contains` calls it in the caller's thread, also while `start` or `release` runs: it must
        not block there, and what it raises counts as False.
        """
        raise NotImplementedError(f"{type(self).__name__} must have has_record, or have_records")

    def read_records(self, keys: Sequence[bytes], rows: Sequence[Rows]) -> Sequence[Outcome]:
        """`read_record` for neighbouring keys of a job, and the rows of each."""
        return [self._guarded(partial(self.read_record, *each)) for each in zip(keys, rows, strict=True)]

    def write_records(self, keys: Sequence[bytes], rows: Sequence[Rows], origin: Origin) -> Sequence[Outcome]:
        """`write_record` for neighbouring keys of a job, and the rows of each."""
        return [self._guarded(partial(self.write_record, *each, origin)) for each in zip(keys, rows, strict=True)]

    def have_records(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """`has_record` for neighbouring keys of a job; `contains` calls it, too. What it raises is FAILED."""
        return [bool(self.has_record(key)) for key in keys]

    @abstractmethod
    def remove_records(self, keys: Sequence[bytes]) -> list[bool]:
        """Forget records, durably on return; of each key whether there was one."""

    @abstractmethod
    def remove_all(self) -> None:
        """Forget all records, durably on return."""

    def put_ended(self, job: TierJob) -> None:
        """Every key of a `put` has its outcome: `write_record` will not be called for it. Must not block or raise."""

    def get_ended(self, job: TierJob) -> None:
        """Every key of a `get` has its outcome. Must not block or raise."""

    def flush(self) -> None:
        """Make durable what was written."""

    def start(self, layout: bytes | None) -> None:
        """The pools are known (`self.pools`): open what is needed. What it raises leaves `attach`, which may be called
        again.
        """

    def release(self) -> None:
        """Close what `start` has opened. All calls of other methods but `has_record` have returned. May block, as it is
        called by a thread of the tier's.
        """

    def num_records(self) -> int | None:
        """How many records it holds; None if it does not know at once. Must not block; called until after `release`."""
        return None

    def count_corrupt(self, records: int = 1) -> None:
        """For `read_record`: the record had other bytes than were put."""
        self._workers.count(corrupt=records)

    def warn(self, error: BaseException) -> None:
        """Log why a key is FAILED or DECLINED, unless another one was logged in the 10 seconds before."""
        self._workers.warn(error)

    # the interface ------------------------------------------------------------------------------------------------

    def attach(self, pools: Sequence[UInt8Array], layout: bytes | None) -> None:
        record_bytes = check_pools(pools)
        check_layout(layout, self.capabilities)
        with self._attaching:
            if self._workers.closed or self._attached:
                raise ClosedError(f"{self!r} {'is closed' if self._workers.closed else 'has a pool'}: make another one")
            self._attached = True
        try:
            self.pools, self.record_bytes = tuple(pools), record_bytes
            self.start(layout)
            self._opened = True
            self._workers.start(self.threads, self.name, self._release)
        except BaseException:
            if self._opened:
                self.close()
            self._attached = False
            raise

    def put(
        self,
        keys: Sequence[bytes],
        entries: Sequence[int],
        *,
        tenant: str = "",
        deadline: float | None = None,
        notify: Notify | None = None,
    ) -> TierJob:
        job = self._checked(keys, entries, deadline, notify, self.put_ended)
        origin = Origin(tenant, job)

        def write(positions: Sequence[int]) -> Sequence[Outcome]:
            outcomes = self.write_records([job.keys[at] for at in positions], self._rows(job, positions), origin)
            written = outcomes.count(Outcome.DONE)
            self._workers.count(written=written, bytes_written=written * self.record_bytes)
            return outcomes

        return self._queue(job, [Write(job, each, write) for each in self._calls(job)])

    def get(
        self,
        keys: Sequence[bytes],
        entries: Sequence[int],
        *,
        deadline: float | None = None,
        notify: Notify | None = None,
    ) -> TierJob:
        job = self._checked(keys, entries, deadline, notify, self.get_ended)

        def read(positions: Sequence[int]) -> Sequence[Outcome]:
            outcomes = self.read_records([job.keys[at] for at in positions], self._rows(job, positions))
            done, missing = outcomes.count(Outcome.DONE), outcomes.count(Outcome.MISSING)
            self._workers.count(read=done, bytes_read=done * self.record_bytes, missing=missing)
            return outcomes

        return self._queue(job, [Work(job, each, read) for each in self._calls(job)])

    def exists(self, keys: Sequence[bytes], *, deadline: float | None = None, notify: Notify | None = None) -> TierJob:
        job = self._checked(keys, None, deadline, notify)

        def has(key: bytes) -> Outcome:
            return Outcome.DONE if self.have_records([key])[0] else Outcome.MISSING

        def ask(positions: Sequence[int]) -> Sequence[Outcome]:
            wanted = [job.keys[at] for at in positions]
            try:
                found = self.have_records(wanted)
            except Exception as error:  # noqa: BLE001  # for some of the keys, if they are asked for one by one
                self._workers.warn(error)
                if type(self).has_record is ThreadedTier.has_record:
                    return [Outcome.FAILED] * len(wanted)
                return [self._guarded(partial(has, key)) for key in wanted]
            return [Outcome.DONE if each else Outcome.MISSING for each in found]

        return self._queue(job, [Work(job, each, ask) for each in self._calls(job, bounded=False)])

    def remove(self, keys: Sequence[bytes], *, notify: Notify | None = None) -> TierJob:
        job = self._checked(keys, notify=notify)

        def remove(_: Sequence[int]) -> Sequence[Outcome]:
            return [Outcome.DONE if found else Outcome.MISSING for found in self.remove_records(job.keys)]

        removal = Removal(job, range(len(job.keys)), remove, frozenset(job.keys))
        return self._queue(job, [removal] if job.keys else [], bounded=False)

    def clear(self, *, notify: Notify | None = None) -> TierJob:
        self._check_open()
        check_call(None, notify)
        job = self._job(_WHOLE_TIER, notify)
        return self._queue(job, [Removal(job, range(1), partial(self._run_all, self.remove_all), None)], bounded=False)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        known = self._opened and not self._workers.closed and self.capabilities.local_index
        if not known or os.getpid() != self._process:
            return [False] * len(keys)
        try:
            return list(self.have_records(keys))
        except Exception:  # noqa: BLE001  # for some of the keys
            found = [False] * len(keys)
            for at, key in enumerate(keys):
                try:
                    found[at] = self.have_records([key])[0]
                except Exception:  # noqa: BLE001  # a failing medium, or one that is being closed: a miss
                    pass
            return found

    def statistics(self) -> TierStatistics:
        self._check_process()
        return TierStatistics(records=self.num_records(), **self._workers.figures())

    def drain(self, timeout: float | None = None) -> bool:
        timeout = as_timeout(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        self._check_open()
        job = self._job(_WHOLE_TIER)
        jobs = self._workers.unfinished_writes()

        def all_ended() -> bool:
            while jobs and jobs[-1].done:
                jobs.pop()
            return not jobs

        try:
            wait_until(all_ended, timeout, "writes of a tier")
            flush = Work(job, range(1), partial(self._run_all, self.flush))
            self._queue(job, [flush], bounded=False)
            return job.wait(None if end is None else max(0.0, end - time.monotonic())) == [Outcome.DONE]
        except TimeoutError:
            return False
        finally:
            job.cancel()

    def close(self, timeout: float = 10.0) -> bool:
        if os.getpid() != self._process:  # its threads are in the parent, and so is the owner of what is open
            return True
        if not self._workers.close(to_wait("timeout", timeout)):
            return False
        self._release()  # if no thread has ended: `attach` was interrupted
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def _release(self) -> None:
        """By the last thread, so that `close` does not wait longer than it was asked to; once."""
        if in_call(self._releasing):
            return  # the call that has not returned sees to it
        with self._releasing:
            if self._opened:
                try:
                    self.release()
                except Exception as error:  # noqa: BLE001  # a medium may raise anything
                    LOGGER.warning("%r: release: %s", self, shown(error))
                self._opened = False

    # jobs ---------------------------------------------------------------------------------------------------------

    def _checked(
        self,
        keys: Sequence[bytes],
        entries: Sequence[int] | None = None,
        deadline: float | None = None,
        notify: Notify | None = None,
        ended: Callable[[TierJob], None] | None = None,
    ) -> TierJob:
        self._check_open()
        keys = check_keys(keys)
        places = () if entries is None else check_entries(entries, keys, self.pools)
        check_call(deadline, notify)
        return TierJob(keys, places, deadline=deadline, notify=notify, count=self._workers.count_ended, ended=ended)

    def _job(self, keys: Sequence[bytes], notify: Notify | None = None) -> TierJob:
        return TierJob(keys, notify=notify, count=self._workers.count_ended)

    def _check_open(self) -> None:
        self._check_process()
        if self._workers.closed or not self._opened:
            closed = self._workers.closed
            state = "is closed: make another one" if closed else "has no pool yet: give it to a BlockCache"
            raise ClosedError(f"{self!r} {state}")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ClosedError(f"{self!r} belongs to the parent of this forked process: make another one")

    def _queue(self, job: TierJob, works: Sequence[Work], *, bounded: bool = True) -> TierJob:
        """Queue the works of a job; keys that find no room end at once."""
        try:
            taken = self._workers.queue(works, bounded=bounded)
            if taken < len(job.keys):
                outcome = Outcome.CANCELLED if self._workers.closed else Outcome.DECLINED
                job.settle_waiting(outcome, range(taken, len(job.keys)))
        except BaseException:  # an interrupt: the caller gets no job, so nothing more is to begin
            job.cancel()
            raise
        return job

    def _calls(self, job: TierJob, *, bounded: bool = True) -> list[range]:
        """The positions of each call for a job: about the same number for each thread, `bounded` by bytes."""
        keys = -(-len(job.keys) // self.threads)
        if bounded:
            keys = min(keys, self.bytes_per_call // self.record_bytes)
        keys = max(1, keys)
        return [range(at, min(at + keys, len(job.keys))) for at in range(0, len(job.keys), keys)]

    # what the threads do ------------------------------------------------------------------------------------------

    def _rows(self, job: TierJob, positions: Sequence[int]) -> list[Rows]:
        return [[pool[job.entries[at]] for pool in self.pools] for at in positions]

    def _guarded(self, call: Callable[[], Outcome]) -> Outcome:
        """Make one key FAILED if its call raises, and not the others."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # a medium may raise anything
            self._workers.warn(error)
            return Outcome.FAILED

    @staticmethod
    def _run_all(run: Callable[[], None], _positions: Sequence[int]) -> list[Outcome]:
        run()
        return [Outcome.DONE]

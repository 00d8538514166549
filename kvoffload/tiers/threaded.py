"""ThreadedTier: a tier whose methods may block, because its own threads call them. See `workers` for the order."""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvoffload.cache.tiering.tier import (
    Notify,
    Outcome,
    Tier,
    TierJob,
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
from kvoffload.internal.nesting import in_call, new_lock, refuse_under_locks, refuse_waiting
from kvoffload.internal.types import UInt8Array
from kvoffload.internal.waiting import wait_until
from kvoffload.tiers.options import Limits, given_or_default
from kvoffload.tiers.refusals import outcome_of
from kvoffload.tiers.workers import Remove, Work, Workers, Write

Rows = list[UInt8Array]
"""The ranges of one record: a row of each pool, uint8, (bytes,)."""

_R = TypeVar("_R")
_METHODS = (("read_record", "read_records"), ("write_record", "write_records"), ("has_record", "have_records"))
_WHOLE_TIER = (b"",)  # the key of jobs that concern all records


@dataclass(frozen=True, slots=True)
class Origin:
    """The call of `Tier.put` that writes a record; an argument of `write_record` and `write_records` of `ThreadedTier`.

    Attributes:
        tenant: as given to `put`.
        job: the job of that call, with all its keys; `put_ended` gets the same one. Do not wait for it.
    """

    tenant: str
    job: TierJob


class ThreadedTier(Tier):
    """A tier whose methods may block. A subclass calls this constructor, sets `name` and `capabilities`, and has the
    methods below.

    Per record: `read_record`, `write_record`, `has_record`. If one call of your medium transfers several records, have
    `read_records`, `write_records`, `have_records` instead, and set `bytes_per_call`. Always: `remove_records` and
    `remove_all`. The hooks `start`, `release`, `flush`, `num_records`, `put_ended` and `get_ended` do nothing unless
    you override them; each says which thread calls it.

    The tier's threads call the methods for records, several at a time. Two calls never write one key at a time, and
    none writes a key while another removes it. A read of it may run beside either, and two removals beside each other.
    Removals come first, then reads, then writes, but a write follows 16 reads.

    If a method for keys raises, or its result has a wrong length, or an outcome is no `Outcome`, its keys are FAILED;
    the thread goes on. If a write raises since there is no room (OSError with ENOSPC, EDQUOT or EFBIG, or what obstore
    and glide say then), its keys are DECLINED. Where bools are asked for, any value counts as one: None is False. A
    method that never returns blocks its thread and leaves its keys without an outcome: so none may wait for a cache
    that has this tier.

    Args:
        limits: threads and queue; None: `Limits()`.

    Attributes:
        threads: how many call the methods, 4 by default. Set it in the class; `limits` overrides it.
        bytes_per_call: most bytes of the records in one call of `read_records` or `write_records`; a single record may
            be larger. The keys of a job are first divided among the threads. 0, the default: one record a call.
        max_queued: keys of puts that may wait, and as many keys of `get` and `exists`; more are DECLINED.
        pools: the arrays that `attach` was given; () before `attach`, after one that raised, and after `release`.
        record_bytes: bytes of one record, over all pools; 0 before `attach`, and after one that raised.

    Raises:
        TypeError: a method is missing, or `limits` is no `Limits`.
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
        self._workers = Workers(self.max_queued, foreign=not type(self).__module__.startswith("kvoffload.tiers."))
        self._attaching = new_lock()
        self._attached = False  # or being attached
        self._opened = False  # `start` has returned, and `release` has not
        self._releasing = threading.RLock()  # not of `new_lock`: `release` may close other tiers, and wait for them
        self._process = os.getpid()

    # what a subclass does -----------------------------------------------------------------------------------------

    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        """Copy a record to the rows and verify it. Return DONE, MISSING or FAILED.

        `rows`: one uint8 array, one-dimensional, for each of `pools`: views of one entry. If the record's bytes
        differ from the ones that were put, call `count_corrupt` and return MISSING. Unless you return DONE, the rows
        may hold anything. Do not touch them after returning. A write or a removal of the key may run meanwhile. If you
        raise, the key is FAILED.
        """
        raise NotImplementedError(f"{type(self).__name__} must have read_record, or read_records")

    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:
        """Copy the rows to a record. Return DONE, DECLINED (no room) or FAILED; DONE without a copy if the key has a
        record.

        `rows`: one uint8 array, one-dimensional, for each of `pools`: views of one entry. Do not write to them, nor
        read them after returning. `origin` has the tenant and the job. A read of the key may run meanwhile: it must not
        return DONE for a half written record. If you raise, the key is FAILED, or DECLINED if the error says that there
        is no room (see the class); leave no half of a record that a read would return.
        """
        raise NotImplementedError(f"{type(self).__name__} must have write_record, or write_records")

    def has_record(self, key: bytes) -> bool:
        """Return whether there is a record of this key, without reading it. A thread of the tier calls it for `exists`;
        if you raise, the key is FAILED.

        If `capabilities.local_index` is True, `contains` calls it, too, in its caller's thread, even while `release`
        runs. Then it must not block; if it raises, `contains` says False.
        """
        raise NotImplementedError(f"{type(self).__name__} must have has_record, or have_records")

    def read_records(self, keys: Sequence[bytes], rows: Sequence[Rows]) -> Sequence[Outcome]:
        """Read records for several keys of one `get`, and return a list of their outcomes, in order. Override this one
        instead of `read_record` if your medium reads several at once.

        `rows[i]` belongs to `keys[i]`; for each key the rules of `read_record` hold. If you raise, all are FAILED.
        """
        calls = [partial(self.read_record, *each) for each in zip(keys, rows, strict=True)]
        return [self._guarded(call, lambda _: Outcome.FAILED) for call in calls]

    def write_records(self, keys: Sequence[bytes], rows: Sequence[Rows], origin: Origin) -> Sequence[Outcome]:
        """Write records for several keys of one `put`, and return a list of their outcomes, in order. Override this one
        instead of `write_record` if your medium writes several at once.

        `rows[i]` belongs to `keys[i]`; for each key the rules of `write_record` hold. If you raise, all are FAILED,
        or DECLINED if the error says that there is no room.
        """
        calls = [partial(self.write_record, *each, origin) for each in zip(keys, rows, strict=True)]
        return [self._guarded(call, outcome_of) for call in calls]

    def have_records(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return for each key, in order, whether there is a record: a list of bools. Override this one instead of
        `has_record` if your medium answers for several at once. A thread of the tier calls it for `exists`.

        If it raises, the keys are FAILED; if you have `has_record`, too, `exists` first tries again with each key
        alone. If `capabilities.local_index` is True, `contains` calls it, too, in its caller's thread, even while
        `release` runs: then it must not block, and if it raises, `contains` says False.
        """
        return [bool(self.has_record(key)) for key in keys]

    @abstractmethod
    def remove_records(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove records, durably when you return. Return for each key, in order, whether there was one.

        `keys` are all keys of one `remove`. None is written meanwhile; reads and other removals may, so a record
        may be gone already. Raise if a record may still be there, or come back after a crash: then all keys of the job
        are FAILED.
        """

    @abstractmethod
    def remove_all(self) -> None:
        """Remove all records that reads of this tier could find, no others, durably when you return. No write runs
        meanwhile; reads and other removals may. If this raises, the outcome of `clear` is FAILED.
        """

    def put_ended(self, job: TierJob) -> None:
        """Override to learn that a `put` has ended: all its keys have outcomes, so none of its writes runs or will
        begin. Called once, by any thread (a caller of `put`, `cancel`, `remove`, `clear` or `close`, or one of the
        tier's); not for a put of no keys. Must not block; what it raises is logged.
        """

    def get_ended(self, job: TierJob) -> None:
        """Override to learn that a `get` has ended: all its keys have outcomes. Called once, by any thread (a caller of
        `get`, `cancel` or `close`, or one of the tier's); not for a get of no keys. Must not block; what it raises is
        logged.
        """

    def flush(self) -> None:
        """Make durable what was written so far; override it in a durable tier. For `drain` a thread of the tier calls
        it, while others may read, write, remove and flush. If it raises, `drain` returns False.
        """

    def start(self, layout: bytes | None) -> None:
        """Override to open files or connections. `attach` calls it in its caller's thread, before the tier's threads
        start; `pools` and `record_bytes` are set. May block. `layout`: the 16 bytes that `attach` was given, or None
        (never in a durable or shared tier). If this raises, close what you opened yourself: `attach` passes the error
        on, `release` is not called, and `attach` may be called again.
        """

    def release(self) -> None:
        """Close what `start` opened. Called once, when no thread reads, writes or removes any more; `has_record` and
        `have_records` (with `local_index`), `num_records`, `put_ended` and `get_ended` may still be called. May block:
        a tier's thread calls it, or `close` if none runs. What it raises is logged.
        """

    def num_records(self) -> int | None:
        """Override to say how many records there are, for `statistics`; None: unknown. Must not block or raise. Called
        at any time, even before `start` and after `release`.
        """
        return None

    def count_corrupt(self, records: int = 1) -> None:
        """Add `records` to the statistics' `corrupt`. Call it where you read a record whose bytes are not those put.
        Any thread may.
        """
        self._workers.count(corrupt=records)

    def warn(self, error: BaseException) -> None:
        """Log a warning with type and first line of `error`, to say why you return FAILED or DECLINED. (What your
        methods raise, the tier logs itself.) Does nothing if the tier has logged an error less than 10 seconds ago. Any
        thread may call it.
        """
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
            self._attached, self.pools, self.record_bytes = False, (), 0
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
        job = self._checked(keys, entries, deadline, notify, self.put_ended, tenant)
        origin = Origin(tenant, job)

        def write(positions: Sequence[int]) -> Sequence[Outcome]:
            call = partial(self.write_records, [job.keys[at] for at in positions], self._rows(job, positions), origin)
            outcomes = self._guarded(call, lambda error: [outcome_of(error)] * len(positions))
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

        def ask(positions: Sequence[int]) -> Sequence[Outcome]:
            alone = type(self).has_record is not ThreadedTier.has_record
            found = self._asked([job.keys[at] for at in positions], Outcome.FAILED, self.warn, alone=alone)
            return [each if each is Outcome.FAILED else Outcome.DONE if each else Outcome.MISSING for each in found]

        return self._queue(job, [Work(job, each, ask) for each in self._calls(job, bounded=False)])

    def remove(self, keys: Sequence[bytes], *, notify: Notify | None = None) -> TierJob:
        job = self._checked(keys, notify=notify)

        def remove(_: Sequence[int]) -> Sequence[Outcome]:
            return [Outcome.DONE if found else Outcome.MISSING for found in self.remove_records(job.keys)]

        removal = Remove(job, range(len(job.keys)), remove, frozenset(job.keys))
        return self._queue(job, [removal] if job.keys else [], bounded=False)

    def clear(self, *, notify: Notify | None = None) -> TierJob:
        self._check_open()
        check_call(None, notify)
        job = TierJob(_WHOLE_TIER, notify=notify, count=self._workers.count_ended)
        return self._queue(job, [Remove(job, range(1), partial(self._run_all, self.remove_all), None)], bounded=False)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        known = self._opened and not self._workers.closed and self.capabilities.local_index
        if not known or os.getpid() != self._process:
            return [False] * len(keys)
        return self._asked(keys, False, lambda _: None)

    def statistics(self) -> TierStatistics:
        self._check_process()
        return TierStatistics(records=self.num_records(), **self._workers.figures())

    def drain(self, timeout: float | None = None) -> bool:
        timeout = as_timeout(timeout)
        end = None if timeout is None else time.monotonic() + timeout
        self._check_open()
        refuse_waiting("drain")
        job = TierJob(_WHOLE_TIER, count=self._workers.count_ended)
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
        """Call `release` once. The last thread does it, so that `close` waits no longer than its timeout."""
        if in_call(self._releasing):
            return  # the call that has not returned sees to it
        with self._releasing:
            if self._opened:
                try:
                    self._workers.calling(self.release)
                except Exception as error:  # noqa: BLE001  # a medium may raise anything
                    LOGGER.warning("%r: release: %s", self, shown(error))
                self._opened, self.pools = False, ()  # memory that must not wait until cycles are collected

    # jobs ---------------------------------------------------------------------------------------------------------

    def _checked(
        self,
        keys: Sequence[bytes],
        entries: Sequence[int] | None = None,
        deadline: float | None = None,
        notify: Notify | None = None,
        ended: Callable[[TierJob], None] | None = None,
        tenant: str = "",
    ) -> TierJob:
        self._check_open()
        keys = check_keys(keys)
        places = () if entries is None else check_entries(entries, keys, self.pools)
        check_call(deadline, notify, tenant)
        return TierJob(keys, places, deadline=deadline, notify=notify, count=self._workers.count_ended, ended=ended)

    def _check_open(self) -> None:
        self._check_process()
        refuse_under_locks("a tier")
        if self._workers.closed:
            raise ClosedError(f"{self!r} is closed: make another one")
        if not self._opened:
            raise ClosedError(f"{self!r} has no pool yet: give it to a BlockCache")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ClosedError(f"{self!r} belongs to the parent of this forked process: make another one")

    def _asked(
        self, keys: Sequence[bytes], unknown: _R, failed: Callable[[Exception], None], *, alone: bool = True
    ) -> list[bool | _R]:
        """Ask whether there are records of these keys, together, and if that raises, for each key `alone`.

        If that raises, too, or is not asked, the answer is `unknown`. `failed` is called with each error.
        """
        try:
            return [found for _, found in zip(keys, self.have_records(keys), strict=True)]
        except Exception as error:  # noqa: BLE001  # a failing medium, or one that is being closed
            failed(error)
            if not alone:
                return [unknown] * len(keys)
            return [found for key in keys for found in self._asked([key], unknown, failed, alone=False)]

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
        """Return the positions of each call for a job: divided evenly among the threads, then `bounded` by bytes."""
        keys = -(-len(job.keys) // self.threads)
        if bounded:
            keys = min(keys, self.bytes_per_call // self.record_bytes)
        keys = max(1, keys)
        return [range(at, min(at + keys, len(job.keys))) for at in range(0, len(job.keys), keys)]

    # what the threads do ------------------------------------------------------------------------------------------

    def _rows(self, job: TierJob, positions: Sequence[int]) -> list[Rows]:
        return [[pool[job.entries[at]] for pool in self.pools] for at in positions]

    def _guarded(self, call: Callable[[], _R], judge: Callable[[Exception], _R]) -> _R:
        """Make a call for one key, or several. If it raises, log that, and return what `judge` says of the error."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001  # a medium may raise anything
            self._workers.warn(error)
            return judge(error)

    @staticmethod
    def _run_all(run: Callable[[], None], _positions: Sequence[int]) -> list[Outcome]:
        run()
        return [Outcome.DONE]

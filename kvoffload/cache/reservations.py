"""The objects that a cache hands out: reservations of entries to fill, leases of entries to read, jobs, open requests.

`Reservation` and `Lease` are handles of the caller. The index keeps a record for each (see `entries`), which holds the
entries until it is settled. If a handle becomes garbage first, no Python runs: a weak reference appends itself to a
queue of the index, and the next call of the index aborts the reservation or releases the lease.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from kvoffload.cache.engines import CacheAfter, CacheStreams
from kvoffload.cache.entries import OPEN, Completion, EntryTable, LeaseRecord, ReservationRecord, Stage
from kvoffload.cache.pools import RequestRecord
from kvoffload.cache.weights import UsedWeights, split_namespace
from kvoffload.engine.callbacks import Callbacks, Waitable
from kvoffload.engine.job import Job, TransferResult
from kvoffload.errors import ClosedError, MissingKeyError, TransferError
from kvoffload.internal.checks import as_timeout
from kvoffload.internal.nesting import refuse_nested
from kvoffload.internal.teardown import run_all
from kvoffload.internal.types import Int64Array
from kvoffload.internal.waiting import wait_until
from kvoffload.planning.layer_groups import PartsLike


class EndsRecords(Protocol):
    """The part of `RecordCalls` that handles use."""

    lock: threading.RLock
    weights: UsedWeights

    def slots(self, indices: Sequence[int], group: int, /) -> Int64Array: ...

    def commit(self, record: ReservationRecord, /) -> None: ...

    def commit_after(self, record: ReservationRecord, jobs: tuple[Completion, ...]) -> None: ...

    def abort(self, record: ReservationRecord, /) -> None: ...

    def release(self, record: LeaseRecord, /) -> None: ...

    def end_request(self, record: RequestRecord, /) -> bool: ...

    def settle_ended(self, _: None, /) -> None: ...


class Reservation:
    """Entries for missing keys: fill them, then commit or abort. Usable from any thread.

    As a context manager it aborts on an exception, and otherwise commits at the end of the block, without jobs: the
    slots must be filled by then. (Or call `commit(*jobs)` or `abort` inside.) Until then no other request gets these
    entries, and the keys are pending. If a reservation becomes garbage first, a later call of the cache aborts it.

    Attributes:
        keys: the keys to store, in the order given: the missing ones without `declined`. Perhaps none.
        positions: the position of each of `keys` in the list given.
        indices: the entry of each of `keys`.
        evicted: keys that were evicted for them; without keys of other weights, and none over a shared pool.
        declined: missing keys that are not to be stored: worth less than the keys they would displace, not looked up
            often enough yet, over a quota, or beyond the entries that were free or could be evicted.
        short: whether keys were declined because too few entries were free or could be evicted.
        present: keys that were resident, or pending by another reservation.
        tenant: of the open request if one was named, else as given; over a shared pool the pool's.
    """

    def __init__(self, records: EndsRecords, record: ReservationRecord) -> None:
        self._records = records
        self._record = record
        plain = records.weights.plain
        self.tenant, weights = split_namespace(record.tenant)
        self.keys = plain(record.keys)
        self.positions = tuple(record.positions)
        self.indices = tuple(record.indices)
        self.evicted = records.weights.own(record.evicted, weights)
        self.declined = plain(record.declined)
        self.present = plain(record.present)
        self.short = record.short

    @property
    def stage(self) -> Stage:
        """OPEN, also while an `abort` is left to the next call; SETTLING: committed, but no call of the cache has seen
        its transfers end; COMMITTED; or ABORTED.
        """
        return self._record.stage

    def slots(self, group: int = 0) -> Int64Array:
        """Return the engine's slot of each of `keys`, in order, that takes its blocks of this group, from 0 (not
        checked): a new array, int64, (keys,). You may write these slots until you call `commit` or `abort`.
        """
        return self._records.slots(self.indices, group)

    def commit(self, *jobs: Completion) -> None:
        """Say that the slots of all groups are filled: the keys, unless removed, become hits; without `jobs`, at once.
        Do not write the slots any more.

        Args:
            jobs: transfers into the slots that may not have ended: what `engine.store` returned. The keys are pending
                until all have succeeded; if one fails, the next call of the cache aborts the reservation. A
                `CacheIndex` takes none: wait for the transfers, then commit. With a codec always give them: only they
                tell which blocks do not fit. Without them such a key is a hit, tiers get it, and each load of it fails.

        Raises:
            ClosedError: it was committed or aborted before; or there is an engine, and this is a forked child.
            TypeError, ValueError: one of `jobs` is not a job, or is a job of another engine.
            RuntimeError: called inside another call in the same thread.
            Nothing has changed in these cases.
        """
        if jobs:
            for position, job in enumerate(jobs):
                lock = getattr(job, "lock", None)
                if lock is None or not hasattr(job, "finished"):
                    raise TypeError(f"jobs[{position}] must be what OffloadEngine.store returned, got {job!r:.80}")
                if lock is not self._records.lock:
                    raise ValueError(f"jobs[{position}] must be of the engine whose slots these are, got {job!r:.80}")
            self._records.commit_after(self._record, jobs)
        else:
            self._records.commit(self._record)

    def abort(self) -> None:
        """Make the keys missing at once. With a `BlockCache` the entries are free when the transfers in flight in its
        engine have ended, as they may write the slots; a `CacheIndex` knows of no transfers and frees them at once.
        Wait for anything else that writes the slots, in any process, before you call this. Inside another call of the
        cache in the same thread, the next call does it.

        Raises:
            ClosedError: as for `commit`; nothing has changed.
        """
        self._records.abort(self._record)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._record.stage is Stage.OPEN:
            if kind is None:
                self.commit()
            else:
                self.abort()

    def __repr__(self) -> str:
        more = "".join(
            f", {len(keys)} {name}"
            for name, keys in (("evicted", self.evicted), ("declined", self.declined), ("present", self.present))
            if keys
        )
        return f"Reservation({len(self.keys)} keys{more}, {self._record.stage.value})"


class Lease:
    """Keys whose slots stay as they are while you read them; `acquire` makes it. They are not evicted, and if one is
    removed, no other key gets its slots before you release the lease.

    A context manager. Usable from any thread. If a lease becomes garbage, a later call of the cache releases it.

    Attributes:
        keys: as given.
        indices: the number of each key's entry; not a slot's number, see `slots`.
        pending: keys whose stores had not ended when the lease was taken; first call the lease's `wait` or
            `order_before`.
    """

    def __init__(self, records: EndsRecords, record: LeaseRecord) -> None:
        self._records = records
        self._record = record
        self.keys = records.weights.plain(record.keys) if records.weights.names else tuple(record.keys)
        self.indices = tuple(record.indices)
        awaited = {key for source in record.sources for key in source.keys}
        self.pending = records.weights.plain(list(filter(awaited.__contains__, record.keys))) if awaited else ()

    @property
    def released(self) -> bool:
        """Whether it has been released. False while a `release` is left to the next call."""
        return self._record.released

    def slots(self, group: int = 0) -> Int64Array:
        """Return the engine's slot of each of `keys`, in order, with its blocks of this group, from 0 (not checked): a
        new array, int64, (keys,). Read these slots until `release`; if a key is `pending`, only after `wait` or
        `order_before`.
        """
        return self._records.slots(self.indices, group)

    def order_before(self, stream: CacheStreams) -> None:
        """Make work queued on `stream` from now on wait until all entries have been written. The host waits only for
        copies that are not in the driver's queues yet: up to a second for each device of each store.

        If a store fails later, the stream goes on; `wait` and `check` raise its error. If no key is `pending`, it does
        nothing, and checks nothing.

        Args:
            stream: a stream; with a `ShardedEngine`, a list with one for each device.

        Raises:
            CapacityError: after these seconds copies still wait on the host; you may call it again.
            TransferError: a store has failed already, the stream is being captured, or the CUDA context is lost.
            TypeError, ValueError: `stream` is no stream, no such list, or one that CUDA does not know here.
            ClosedError: the device is closed, or this is a forked child.
            RuntimeError: called inside another call in the same thread.
        """
        run_all(partial(job.order_before, stream) for job in self._jobs())

    def wait(self, timeout: float | None = None) -> None:
        """Wait on the host until all entries have been written, at most `timeout` seconds in total (None: no limit).
        The engine's `poll` still reports the jobs.

        Raises:
            TransferError: a store failed; its slot does not hold the bytes of its key. The lease still holds all keys.
            TimeoutError: `timeout` seconds have passed; the transfers go on.
            ValueError: `timeout` is no number.
            RuntimeError: called inside another call in the same thread.
            ClosedError: a store is not known to have ended, and this is a forked child.
        """
        refuse_nested(self._records.lock, "wait")
        wait_until(lambda: all(job.done for job in self._jobs()), timeout, repr(self))
        self.check()

    def check(self) -> None:
        """Raise TransferError if the store of a key in `pending` failed or declined it, as far as is known: it neither
        asks the GPU nor waits.
        """
        self._record.check_sources()

    def release(self) -> None:
        """Unpin the keys. Their slots may be overwritten from now on, so end all work that reads them first: nothing
        waits for it. Idempotent. Inside another call of the cache in the same thread, the next call does it.

        Raises:
            ClosedError: the cache has an engine, and this is a forked child.
        """
        self._records.release(self._record)

    def _jobs(self) -> list[Any]:
        return [job for source in self._record.sources for job in source.jobs]

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Lease({len(self.keys)} keys, {'released' if self.released else 'held'})"


@dataclass(frozen=True, eq=False, repr=False)
class CacheJob(Waitable[list[TransferResult]]):
    """The transfers of one `BlockCache.store` or `load`: one job per group, none if there was nothing to copy.

    Usable from any thread, and awaitable: `await job` returns or raises what `wait` does, and the event
    loop goes on. Until `done` (`error` may be set before), do not write its blocks, nor read those of a load, except on
    a stream after `order_before`.

    Once `wait` has returned, or `done` was True, the cache knows of the end: a store's keys are hits, or missing if it
    failed or they are `unfit`; the event "stored", "failed" or "declined" was reported, or follows in a thread that is
    in `on_event` now. (Nothing is reported of keys that were removed meanwhile.) If you drop the job, its transfers go
    on, and a later call of the cache finds their end.

    Attributes:
        keys: the keys whose blocks are copied: of a store, without keys that were present, pending or declined.
        jobs: the engine's jobs, one per group.
    """

    keys: tuple[bytes, ...]
    jobs: tuple[Job, ...]
    _records: EndsRecords
    _record: ReservationRecord | LeaseRecord

    @property
    def done(self) -> bool:
        """Whether all jobs have ended, well or not. Asks the GPU, and does not wait for it.

        Takes the engine's lock. The call that finds the end tells the cache; so it may call `on_event`, and a tracer's
        `on_end`, in this thread before it returns. Inside another call in the same thread it does not ask the GPU, and
        may be True before the cache knows of the end.

        Raises:
            ClosedError: not known to have ended, and this is a forked child.
        """
        ended = all(job.done for job in self.jobs)
        if ended:
            self._settle()
        return ended

    def wait(self, timeout: float | None = None) -> list[TransferResult]:
        """Wait on the host for all jobs, at most `timeout` seconds for each (None: no limit), one after the other, and
        return a result per job; [] if there was nothing to copy.

        Raises:
            TransferError: a transfer failed, or the store of a key that `load(pending=True)` found pending failed or
                declined it. With a `timeout`, others may still run: ask `done`.
            TimeoutError: a job took more than `timeout` seconds; the transfers go on.
            ValueError: `timeout` is no number.
            RuntimeError: called inside another call in the same thread.
            ClosedError: this is a forked child.
        """
        refuse_nested(self._records.lock, "wait")
        timeout, results = as_timeout(timeout), list[TransferResult]()
        try:
            run_all(partial(lambda job: results.append(job.wait(timeout)), job) for job in self.jobs)
        finally:
            self._settle()
        self._record.check_sources()
        return results

    @property
    def unfit(self) -> tuple[bytes, ...]:
        """Of a store that is `done`, those of `keys` that are declined after all: the layout's codec cannot hold their
        blocks. Always empty of a load, and without a codec.
        """
        record = self._record
        if isinstance(record, LeaseRecord) or not (unfit := record.unfit):
            return ()
        found = [key for key, index in zip(record.keys, record.indices, strict=True) if index in unfit]
        return self._records.weights.plain(found)

    @property
    def finished(self) -> bool:
        """Whether engine and cache know that all jobs have ended, well or not. Does not ask the GPU; `done` does."""
        return self._settled and all(job.finished for job in self.jobs)

    @property
    def error(self) -> TransferError | None:
        """Why a transfer failed, or the store of a key that `load(pending=True)` found pending. None: no failure is
        known yet. `wait` raises it.
        """
        for job in self.jobs:
            if job.error is not None:
                return job.error
        try:
            self._record.check_sources()
        except TransferError as error:
            return error
        return None

    def outcome(self) -> list[TransferResult]:
        """Return a result per job once all have ended. The result of a job that failed has its `error`; none of these
        errors is raised. Only `error` and `wait` tell of the failed store of a key that `load(pending=True)` found
        pending.

        Raises:
            RuntimeError: a job is not known to have ended; `wait` for it, or ask `done`, first.
        """
        return [job.outcome() for job in self.jobs]

    @property
    def num_parts(self) -> int:
        """How many parts `load(..., parts=)` divided it into; else 1."""
        return self.jobs[0].num_parts if self.jobs else 1

    def order_before(self, stream: CacheStreams, *, part: int | None = None) -> None:
        """Make work queued on `stream` from now on wait until all jobs have ended. The host waits only for copies that
        are not in the driver's queues yet: up to a second for each device of each job.

        If a transfer fails later, the stream goes on; `wait` raises its error. If there was nothing to copy, it does
        nothing, and checks nothing.

        Args:
            stream: a stream; with a `ShardedEngine`, a list with one for each device.
            part: of a load in parts, counted from 0: after this part of every job, and all parts before it.

        Raises:
            CapacityError: after these seconds copies still wait on the host; you may call it again.
            TransferError: a transfer has failed already, the stream is being captured, or the CUDA context is lost.
            TypeError: `stream` is no stream, or no such list.
            ValueError: there is no such part, or CUDA does not know the stream in this context.
            ClosedError: the device is closed, or this is a forked child.
            RuntimeError: called inside another call in the same thread.
        """
        jobs: tuple[Any, ...] = self.jobs  # of one device or of several
        run_all(partial(job.order_before, stream, part=part) for job in jobs)

    @property
    def _settled(self) -> bool:
        record = self._record
        settled = record.released if isinstance(record, LeaseRecord) else record.stage is not Stage.SETTLING
        return settled or not self.jobs

    def _settle(self) -> None:
        if not self._settled:
            self._records.settle_ended(None)

    def _call_when_done(self, callback: Callable[[Any], object]) -> None:
        if self.jobs:
            self.jobs[0]._engine.when_done(self, callback)
        else:
            Callbacks().add(self, callback)  # which calls it at once

    def __repr__(self) -> str:
        return f"CacheJob({len(self.keys)} keys, {list(self.jobs)})"


def check_open(record: ReservationRecord) -> None:
    if record.stage is not OPEN:
        raise ClosedError(
            f"the reservation of {len(record.keys)} keys has been settled before: it is {record.stage.value}"
        )


def check_readable(
    table: EntryTable, position: int, key: bytes, weights: UsedWeights, pending: bool
) -> ReservationRecord | None:
    """Return the reservation to wait for before the key can be read; None if it is ready."""
    record, name = table.pending.get(key), f"keys[{position}] ({weights.plain([key])[0].hex()[:16]})"
    if key not in table.of:
        raise MissingKeyError(f"{name} is not in the cache; load only what lookup() found")
    if record is not None and not pending:
        raise MissingKeyError(f"{name} is still being stored; load only what lookup() found")
    if record is not None and not record.jobs:
        raise MissingKeyError(f"{name} is reserved, and no transfer that fills it is known yet")
    return record


class CacheRequest:
    """A handle for calls that store and load the keys of one request in pieces. Made by `open_request`.

    A call with `request=` adds the call's keys to the request, whether stored, present, declined or loaded, even if the
    engine then refuses a store, but not if a load is refused. While the request is open, no call that names it evicts
    any of them; if nothing else can be evicted, new keys are declined. Other calls may evict them, unless they are
    leased or pending.

    As a context manager it ends with the block. After an exception, or if you drop it without `end`, it ends without
    recording the use of its keys. Usable from any thread.

    Attributes:
        tenant: whose quota and priority its keys have.
    """

    def __init__(self, records: EndsRecords, record: RequestRecord) -> None:
        self._records = records
        self._record = record
        self.tenant, _ = split_namespace(record.tenant)

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The keys of its calls so far, each once, in the order in which they first came; a copy."""
        with self._records.lock:
            return self._records.weights.plain(list(self._record.keys))

    @property
    def ended(self) -> bool:
        """Whether it has ended: calls that name it raise ClosedError."""
        return self._record.ended

    def end(self) -> None:
        """End the request, and record the use of all its keys: do not call `touch`, it would count twice. Transfers go
        on; nothing waits for them. Idempotent.

        Raises:
            RuntimeError: called inside another call of the cache in the same thread; the request is still open.
            ClosedError: the cache has an engine, and this is a forked child.
        """
        if self._records.end_request(self._record) and self._record.on_end is not None:
            self._record.on_end(tuple(self._record.keys))

    def __enter__(self) -> CacheRequest:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.end()
        else:
            self._record.ended = True

    def __repr__(self) -> str:
        return f"CacheRequest({len(self._record.keys)} keys, {'ended' if self.ended else 'open'})"


class LoadArguments(NamedTuple):
    """The checked arguments of a load, on their way from `BlockCache.fetch` or `Promotion.load` to the engine.

    Attributes:
        keys: a list of the cache's own.
        blocks: for each group the target ids, int64, (keys, blocks_per_slot).
        after: from `Engine.resolve`.
        parts: as given.
        request: the open request that the keys belong to once they are loaded; None: none.
        pending: load keys whose store has not ended, too.
    """

    keys: list[bytes]
    blocks: list[Int64Array]
    after: CacheAfter
    parts: PartsLike
    request: CacheRequest | None
    pending: bool = False

    def leading(self, count: int) -> LoadArguments:
        """Return the arguments for the first `count` keys."""
        if count == len(self.keys):
            return self
        return self._replace(keys=self.keys[:count], blocks=[ids[:count] for ids in self.blocks])


def record_of(request: CacheRequest, owner: object) -> RequestRecord:
    """Return the record behind a `request=` argument. Under the lock."""
    if not isinstance(request, CacheRequest):
        raise TypeError(f"request must be what open_request() returned, got {request!r:.80}")
    record = request._record
    if record.owner is not owner:
        raise ValueError(f"request must be one of this cache, got {request!r:.80} of another one")
    if record.ended:
        raise ClosedError(f"the request of {len(record.keys)} keys has ended: open another one by open_request()")
    return record

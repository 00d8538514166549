"""CacheIndex: which key has which entry, and which entries are read, filled or evicted. No device, no bytes.

    free ──reserve──> pending ──commit──> ready ──evicted, removed──> free
                         └──abort, removed─────────────────────────────^

An entry that is leased, or being filled when its key is removed, is free only once that has ended. Where a call is
refused, nothing has changed; where an exception interrupts one, see `state`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from kvoffload.cache import promoting, repair, restoring
from kvoffload.cache.admission import ReuseFilter, Tenant
from kvoffload.cache.entries import Completion, LeaseRecord, ReservationRecord, Status, check_keys, watch
from kvoffload.cache.policies import DEFAULT_POLICY, PolicyChoice
from kvoffload.cache.pools import Pools
from kvoffload.cache.reservations import Lease, Reservation, check_open
from kvoffload.cache.state import CacheState
from kvoffload.cache.statistics import CacheEvent, CacheStatistics, StatisticsRecorder
from kvoffload.internal.checks import at_least
from kvoffload.internal.types import Int64Array

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _entry(method: Callable[Concatenate[CacheIndex, _P], _R]) -> Callable[Concatenate[CacheIndex, _P], _R]:
    """A call of the index: the lock is taken, the state brought up to date, and events are reported at the end."""

    @wraps(method)
    def call(self: CacheIndex, *args: _P.args, **options: _P.kwargs) -> _R:
        self._check_usable()
        state = self._state
        with self.lock:
            if state.working:
                state.refuse_nested()
            try:
                state.working = True
                state.enter()
                result = method(self, *args, **options)
            finally:
                state.working = False
        if state.recorder.unreported:
            state.recorder.notify()
        return result

    return call  # type: ignore[return-value]  # wraps() forgets that `self` may be passed by position


class CacheIndex:
    """The bookkeeping of a prefix cache. Usable from any thread.

    Args:
        capacity: keys that it holds, at most 2**32.
        policy: what is evicted: "prefix", "lru", "arc", "s3fifo", a `policies.Policy`, or a function that takes the
            capacity in keys and returns one.
        tenants: quotas and priorities by name; see `Tenant`. Calls may name these tenants and "", and no others.
        store_after: a key is stored only once this many lookups have missed it; 0: at once.
        max_load_blocks: `lookup` reports no more hits (a very long load delays all others of the link); None: all.
        on_event: called with each `CacheEvent`, one at a time and in their order, outside the lock: at the end of a
            call of the index, by the thread that makes that call.
        lock: for owners such as BlockCache: a lock that is shared with an engine.
        check_usable: for owners: is called before the lock is taken, and may raise.
        num_groups: for owners: slots of an entry.
        in_flight: for owners: returns the transfers that have been submitted and have not ended. The entries of a
            reservation or lease that was dropped without being ended stay in use until these have ended.

    Raises:
        ValueError, TypeError: bad arguments.
        CapacityError: the memory for `capacity` keys cannot be allocated.
    """

    def __init__(
        self,
        capacity: int,
        *,
        policy: PolicyChoice = DEFAULT_POLICY,
        tenants: Mapping[str, Tenant] | None = None,
        store_after: int = 0,
        max_load_blocks: int | None = None,
        on_event: Callable[[CacheEvent], None] | None = None,
        lock: threading.RLock | None = None,
        check_usable: Callable[[], None] = lambda: None,
        num_groups: int = 1,
        in_flight: Callable[[], tuple[Completion, ...]] = tuple,
    ) -> None:
        self.capacity = at_least("capacity", capacity, 1)
        if self.capacity > 1 << 32:
            raise ValueError(
                f"capacity must be at most {1 << 32}, got {capacity}; lower it, or num_slots of the engine"
            )
        self.max_load_blocks = None if max_load_blocks is None else at_least("max_load_blocks", max_load_blocks, 1)
        self.num_groups = num_groups
        self.lock = threading.RLock() if lock is None else lock
        self._check_usable = check_usable
        self._state = CacheState(
            self.capacity,
            Pools(policy, {} if tenants is None else tenants, self.capacity),
            ReuseFilter(store_after, self.capacity),
            StatisticsRecorder(self.capacity, on_event),
            self.lock,
            in_flight,
            num_groups,
        )

    # asking -------------------------------------------------------------------------------------------------------

    @_entry
    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are present and ready, at most `max_load_blocks`. Not counted as a use: see `touch`."""
        return self._lookup(check_keys(keys))

    @_entry
    def lookup_many(self, requests: Sequence[Sequence[bytes]]) -> list[int]:
        """`lookup` for each of several requests; the index does not change in between."""
        return [self._lookup(keys) for keys in [check_keys(keys) for keys in requests]]

    @_entry
    def status(self, keys: Sequence[bytes]) -> list[Status]:
        """For each key, whether it is missing, ready or pending."""
        of, pending = self._state.table.of, self._state.table.pending
        return [
            Status.MISS if key not in of else Status.PENDING if key in pending else Status.HIT
            for key in check_keys(keys)
        ]

    @_entry
    def touch(self, keys: Sequence[bytes]) -> None:
        """Record that a request with these keys, found or not, has ended. Once per request: see `BlockCache.touch`."""
        used = list(dict.fromkeys(check_keys(keys)))
        state, table = self._state, self._state.table
        entries = [entry for entry in map(table.of.get, used) if entry is not None]
        state.recorder.note_touched(np.array(entries, dtype=np.int64), len(used))
        for pool, mine in state.pools.split(table.originals(used), state.pool_number):
            state.consistent = False
            pool.stale = True
            pool.policy.touch(mine)
            pool.stale = False
        state.consistent = True

    # filling ------------------------------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[bytes], tenant: str = "", *, all_or_nothing: bool = False) -> Reservation:
        """Reserve entries for those keys that are neither present nor pending.

        Free entries are used first, then keys are evicted: none of `keys`, and none that is pending or leased. If there
        are too few entries for all missing keys, the first ones get them and the others are declined.

        Args:
            keys: bytes, no repeats, in the order of the request: each needs those before it. May be a whole request's
                keys: what is present is skipped, and kept.
            tenant: whose quota and priority they have.
            all_or_nothing: raise CapacityError instead of declining a missing key, for whatever reason.

        Raises:
            CapacityError: `all_or_nothing`, and not all missing keys can be stored.
            LayoutError: `keys` repeats a key, or is not a list of bytes.
            ValueError: the cache has no such tenant; or its policy chose keys that must not be evicted.
            Nothing has changed in any of these cases.
        """
        checked = check_keys(keys, repeats=False)
        self._check_usable()
        state, record = self._state, None
        try:
            with self.lock:
                if state.working:
                    state.refuse_nested()
                try:
                    state.working = True
                    state.enter()
                    record = state.propose(checked, tenant, all_or_nothing)
                    handle = Reservation(self, record)
                    watch(handle, record, state.abandoned.append)
                    state.reserve(record)
                finally:
                    state.working = False
            if state.recorder.unreported:
                state.recorder.notify()
        except BaseException:
            state.abandoned.append(record)  # ignored if it has not begun
            raise
        return handle

    @_entry
    def reserve_each(self, keys: Sequence[bytes], tenant: str = "") -> list[ReservationRecord]:
        """For tiers: see `promoting.reserve_each`. `commit` or `abort_after` ends each."""
        return promoting.reserve_each(self._state, check_keys(keys, repeats=False), tenant)

    @_entry
    def next_to_go(self, count: int) -> list[bytes]:
        """For tiers: see `promoting.next_to_go`."""
        return promoting.next_to_go(self._state, count)

    @_entry
    def abort_after(self, record: ReservationRecord, jobs: tuple[Completion, ...]) -> None:
        """Make its key missing at once; its entry is free when `jobs`, which may write it, have ended."""
        check_open(record)
        record.jobs = jobs
        self._state.settle(record, well=False)

    @_entry
    def commit(self, record: ReservationRecord, jobs: tuple[Completion, ...] = ()) -> None:
        """See `Reservation.commit`."""
        check_open(record)
        if jobs:
            self._state.submitted(record, jobs, in_order=False)
            self._state.enter()
        else:
            self._state.settle(record, well=True)

    def abort(self, record: ReservationRecord) -> None:
        """See `Reservation.abort`. Called inside another call of the index, it takes effect at the next call."""
        self._drop(record)

    def settle_ended(self) -> None:
        """Settle what waits for transfers that have ended, and report events. Inside another call it does nothing."""
        self._check_usable()
        state = self._state
        with self.lock:
            if state.working:
                return
            try:
                state.working = True
                state.enter()
            finally:
                state.working = False
        if state.recorder.unreported:
            state.recorder.notify()

    @_entry
    def restore(
        self,
        keys: Sequence[bytes],
        entries: Int64Array,
        requests: Int64Array,
        tenants: Sequence[str] | None = None,
    ) -> int:
        """Fill an index that has held no key yet: each key is ready, at the entry given. For owners, after a restart.

        Args:
            keys: those of the oldest request first, and within a request in its order.
            entries: int64, (keys,): different numbers below `capacity`.
            requests: int64, (keys,): the same number for keys of one request.
            tenants: whose keys they are; a name that is none of this index's stands for "".

        Returns:
            How many keys there are now: of those of a tenant beyond its quota, the oldest are left out.

        Raises:
            LayoutError, ValueError: an argument, or the index holds something; nothing has changed.
        """
        return restoring.restore(self._state, check_keys(keys), entries, requests, tenants)

    # reading ------------------------------------------------------------------------------------------------------

    def acquire(self, keys: Sequence[bytes], *, pending: bool = False) -> Lease:
        """Hold the entries of keys that are all present and ready, until the lease is released.

        Args:
            keys: bytes; repeats are legal.
            pending: also take keys that are pending, if the transfers that fill them have been submitted: see
                `Lease.order_before` and `Lease.wait`.

        Raises:
            MissingKeyError: a key is absent or not ready. Nothing has changed.
        """
        checked = check_keys(keys)
        self._check_usable()
        state, record = self._state, None
        try:
            with self.lock:
                if state.working:
                    state.refuse_nested()
                try:
                    state.working = True
                    state.enter()
                    record = state.propose_lease(checked, pending)
                    handle = Lease(self, record)
                    watch(handle, record, state.abandoned.append)
                    state.begin(record)
                finally:
                    state.working = False
            if state.recorder.unreported:
                state.recorder.notify()
        except BaseException:
            state.abandoned.append(record)  # ignored if it has not begun
            raise
        return handle

    @_entry
    def load(self, keys: Sequence[bytes]) -> None:
        """Record that a request loads those of `keys` that are present. Policies count that use before its `touch`."""
        self._state.use([key for key in dict.fromkeys(check_keys(keys)) if key in self._state.table.of])

    def release(self, record: LeaseRecord) -> None:
        """See `Lease.release`. Called inside another call of the index, it takes effect at the next call."""
        self._drop(record)

    @_entry
    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove keys: from now on they are missing. Returns how many of them were present or pending.

        An entry that a lease or a transfer uses becomes free when that has ended; a pending key's, when its reservation
        has been committed or aborted.
        """
        gone = [key for key in dict.fromkeys(check_keys(keys)) if key in self._state.table.of]
        self._state.remove(gone)
        return len(gone)

    @_entry
    def clear(self) -> int:
        """Remove all keys, as `remove` does. Returns how many there were."""
        gone = list(self._state.table.of)
        self._state.remove(gone)
        return len(gone)

    @_entry
    def statistics(self) -> CacheStatistics:
        """Counts now and since the cache was created."""
        table = self._state.table
        pinned = {index for lease in table.leases for index in lease.indices}
        return self._state.recorder.statistics(
            capacity=self.capacity,
            resident=len(table) - len(table.pending),
            pending=len(table.pending),
            pinned=len(pinned),
        )

    @_entry
    def check(self) -> None:
        """Verify that derived state, and what each policy knows, agree with the truth (see GLOSSARY); meant for tests.

        Raises:
            AssertionError: it does not; the message says where.
        """
        state = self._state
        repair.check(state.table)
        state.pools.check(list(state.table.of), state.pool_number)

    # showing ------------------------------------------------------------------------------------------------------

    @property
    @_entry
    def keys(self) -> list[bytes]:
        """All keys, ready or pending."""
        return list(self._state.table.of)

    @_entry
    def __len__(self) -> int:
        return len(self._state.table)

    def __repr__(self) -> str:
        return f"CacheIndex({self.describe()})"

    def describe(self) -> str:
        """The state in one line. Takes no lock, so it may be called from anywhere."""
        table = self._state.table
        counts = f"{len(table.pending)} pending, {len(table.leases)} leases"
        return f"{len(table)} of {self.capacity} keys, {counts}; {self._state.pools}"

    # inner workings -----------------------------------------------------------------------------------------------

    def _lookup(self, keys: list[bytes]) -> int:
        table, state = self._state.table, self._state
        found = table.leading(keys)
        if table.pending:
            found = next((place for place, key in enumerate(keys[:found]) if key in table.pending), found)
        if state.filter.store_after:
            state.filter.note(key for key in keys[found:] if key not in table.of)
        found = found if self.max_load_blocks is None else min(found, self.max_load_blocks)
        state.recorder.note_lookup(keys, found)
        return found

    def _drop(self, record: ReservationRecord | LeaseRecord) -> None:
        """Abort a reservation, or release a lease; the caller does not use the entries any more."""
        with self.lock:
            nested = self._state.working
        if nested:
            self._state.abandoned.append(record)
        elif isinstance(record, LeaseRecord):
            self._end(record)
        else:
            self._abort(record)

    @_entry
    def _end(self, record: LeaseRecord) -> None:
        self._state.end(record)

    @_entry
    def _abort(self, record: ReservationRecord) -> None:
        check_open(record)
        self._state.settle(record, well=False)

"""CacheIndex: which key has which entry, and which entries are read, filled or evicted. No device, no bytes.

    free ──reserve──> pending ──commit──> ready ──evicted, removed──> free
                         └──abort, removed─────────────────────────────^

An entry that is leased, or being filled when its key is removed, is free only once that has ended. Where a call is
refused, nothing has changed; where an exception interrupts one, see `state`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvoffload.cache import promoting, restoring
from kvoffload.cache.calls import end_later, guarded
from kvoffload.cache.entries import OPEN, Completion, LeaseRecord, Record, ReservationRecord, Status, check_keys, watch
from kvoffload.cache.policies import DEFAULT_POLICY, PolicyChoice
from kvoffload.cache.pools import Pools, RequestRecord, ReuseFilter, Tenant
from kvoffload.cache.queries import Queries, note_end
from kvoffload.cache.reservations import CacheRequest, Lease, Reservation, check_open, record_of
from kvoffload.cache.state import CacheState
from kvoffload.cache.statistics import CacheEvent, StatisticsRecorder
from kvoffload.internal.checks import at_least, flag, names_its_calls
from kvoffload.internal.types import Int64Array


@names_its_calls
class CacheIndex(Queries):
    """The bookkeeping of a prefix cache. Usable from any thread.

    Args:
        capacity: keys that it holds, at most 2**32. With 0 every lookup misses, and every key is declined.
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
        check_usable: Callable[[], None] | None = None,
        num_groups: int = 1,
        in_flight: Callable[[], tuple[Completion, ...]] = tuple,
    ) -> None:
        self.capacity = at_least("capacity", capacity, 0)
        if self.capacity > 1 << 32:
            raise ValueError(
                f"capacity must be at most {1 << 32}, got {capacity}; lower it, or num_slots of the engine"
            )
        self.max_load_blocks = None if max_load_blocks is None else at_least("max_load_blocks", max_load_blocks, 1)
        self.num_groups = num_groups
        self.lock = threading.RLock() if lock is None else lock
        self._check_usable = check_usable
        self._unlocked = check_usable is None and on_event is None
        self._state = CacheState(
            self.capacity,
            Pools(policy, {} if tenants is None else tenants, self.capacity),
            ReuseFilter(store_after, self.capacity),
            StatisticsRecorder(self.capacity, on_event),
            self.lock,
            in_flight,
            num_groups,
        )

    # filling ------------------------------------------------------------------------------------------------------

    def open_request(
        self, *, tenant: str = "", on_end: Callable[[tuple[bytes, ...]], None] = lambda _: None
    ) -> CacheRequest:
        """A handle for a request whose keys are stored and loaded in pieces: see `CacheRequest`.

        Args:
            tenant: whose quota and priority its keys have.
            on_end: for owners: is called with all of its keys after `end`, outside the lock.

        Raises:
            ValueError: the cache has no such tenant.
        """
        return self._open_request((tenant, on_end))

    @guarded
    def _open_request(self, given: tuple[str, Callable[[tuple[bytes, ...]], None]]) -> CacheRequest:
        tenant, on_end = given
        self._state.pools.of(tenant)
        return CacheRequest(self, RequestRecord(self._state, tenant, on_end))

    @guarded
    def end_request(self, record: RequestRecord) -> bool:
        """See `CacheRequest.end`. Returns whether it had not ended before."""
        if record.ended:
            return False
        record.ended = True
        note_end(self._state, list(record.keys))
        return True

    def reserve(
        self,
        keys: Sequence[bytes],
        *,
        tenant: str = "",
        all_or_nothing: bool = False,
        request: CacheRequest | None = None,
    ) -> Reservation:
        """Reserve entries for those keys that are neither present nor pending.

        Free entries are used first, then keys are evicted: none of `keys`, and none that is pending or leased. If there
        are too few entries for all missing keys, the first ones get them and the others are declined.

        Args:
            keys: bytes, no repeats, in the order of the request: each needs those before it. May be a whole request's
                keys: what is present is skipped, and kept.
            tenant: whose quota and priority they have.
            all_or_nothing: raise CapacityError instead of declining a missing key, for whatever reason.
            request: the open request that these are keys of, the new ones or more; the tenant is the request's.

        Raises:
            CapacityError: `all_or_nothing`, and not all missing keys can be stored.
            LayoutError: `keys` repeats a key, or is not a list of bytes.
            ValueError: the cache has no such tenant; or its policy chose keys that must not be evicted; or `request` is
                of another cache, or of another tenant than `tenant`.
            ClosedError: `request` has ended. Nothing has changed in any of these cases.
        """
        return self._reserve((check_keys(keys, repeats=False), tenant, flag("all_or_nothing", all_or_nothing), request))

    @guarded
    def _reserve(self, given: tuple[list[bytes], str, bool, CacheRequest | None]) -> Reservation:
        keys, tenant, all_or_nothing, request = given
        state = self._state
        opened = None if request is None else record_of(request, state)
        record = state.propose(keys, tenant, all_or_nothing, opened, False)
        handle = Reservation(self, record)
        watch(handle, record, state.abandoned.append)
        state.publish(record)
        state.fill(record)
        return handle

    @guarded
    def reserve_record(
        self, given: tuple[list[bytes], list[ReservationRecord], RequestRecord | None]
    ) -> ReservationRecord:
        """`load(keys, request)` and `reserve(keys, request=request)` in one call, for owners that keep the record.

        Args:
            given: the keys, which are not checked: bytes, no repeats; `kept`, and the open request. The record is in
                `kept` before the reservation begins, so that an interrupt does not lose it. `commit`, `abort` or
                `abandon` ends it.
        """
        keys, kept, opened = given
        state = self._state
        record = state.propose(keys, "", False, opened, True)
        kept.append(record)
        state.publish(record)
        state.fill(record)
        return record

    def reserve_each(self, keys: Sequence[bytes], *, tenant: str = "") -> list[ReservationRecord]:
        """For tiers: see `promoting.reserve_each`. `commit` or `abort_after` ends each."""
        return self._reserve_each((check_keys(keys, repeats=False), tenant))

    @guarded
    def _reserve_each(self, given: tuple[list[bytes], str]) -> list[ReservationRecord]:
        return promoting.reserve_each(self._state, *given)

    def hold_ready(self, keys: list[bytes], hold: bool) -> tuple[list[Status | None], Lease | None]:
        """For tiers: see `promoting.hold_ready`; the keys are not checked."""
        return self._hold_ready((keys, hold))

    @guarded
    def _hold_ready(self, given: tuple[list[bytes], bool]) -> tuple[list[Status | None], Lease | None]:
        found, record = promoting.hold_ready(self._state, *given)
        return found, None if record is None else self._handle(record)

    def commit_and_hold(self, record: ReservationRecord, hold: bool) -> tuple[bool, Lease | None]:
        """For tiers: see `promoting.commit_and_hold`."""
        return self._commit_and_hold((record, hold))

    @guarded
    def _commit_and_hold(self, given: tuple[ReservationRecord, bool]) -> tuple[bool, Lease | None]:
        mine, record = promoting.commit_and_hold(self._state, *given)
        return mine, None if record is None else self._handle(record)

    def _handle(self, record: LeaseRecord) -> Lease:
        handle = Lease(self, record)
        watch(handle, record, self._state.abandoned.append)
        return handle

    @guarded
    def next_to_go(self, count: int) -> list[bytes]:
        """For tiers: see `promoting.next_to_go`."""
        return promoting.next_to_go(self._state, count)

    @guarded
    def note_promotion(self, given: tuple[list[bytes], int, Counter[str]]) -> None:
        """For tiers: count a promotion as a lookup of its keys. It has found so many leading ones, some in tiers."""
        keys, found, in_tiers = given
        self._state.filter.note(key for key in keys[found:] if key not in self._state.table.of)
        self._state.recorder.note_promotion(keys, found, in_tiers)

    def abort_after(self, record: ReservationRecord, jobs: tuple[Completion, ...]) -> None:
        """Make its key missing at once; its entry is free when `jobs`, which may write it, have ended."""
        self._abort_after((record, jobs))

    @guarded
    def _abort_after(self, given: tuple[ReservationRecord, tuple[Completion, ...]]) -> None:
        record, jobs = given
        check_open(record)
        record.jobs = jobs
        self._state.settle(record, well=False)

    @guarded
    def commit(self, record: ReservationRecord) -> None:
        """See `Reservation.commit`."""
        if record.stage is not OPEN:
            check_open(record)
        self._state.settle(record, True)

    def commit_after(self, record: ReservationRecord, jobs: tuple[Completion, ...]) -> None:
        """See `Reservation.commit`, with jobs."""
        self._commit_after((record, jobs))

    @guarded
    def _commit_after(self, given: tuple[ReservationRecord, tuple[Completion, ...]]) -> None:
        record, jobs = given
        check_open(record)
        self._state.submitted(record, jobs, in_order=False)
        self._state.enter()

    @partial(guarded, nested=end_later)
    def abort(self, record: ReservationRecord) -> None:
        """See `Reservation.abort`. Called inside another call of the index, it takes effect at the next call."""
        check_open(record)
        self._state.settle(record, well=False)

    def abandon(self, record: Record) -> None:
        """Have the next call of the index abort or release a record of an owner; ignored if it has ended."""
        self._state.abandoned.append(record)

    def restore(
        self,
        keys: Sequence[bytes],
        entries: Int64Array,
        requests: Int64Array,
        *,
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
        return self._restore((check_keys(keys), entries, requests, tenants))

    @guarded
    def _restore(self, given: tuple[list[bytes], Int64Array, Int64Array, Sequence[str] | None]) -> int:
        return restoring.restore(self._state, *given)

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
        return self._acquire((check_keys(keys), flag("pending", pending)))

    @guarded
    def _acquire(self, given: tuple[list[bytes], bool]) -> Lease:
        keys, pending = given
        record = self._state.propose_lease(keys, pending)
        handle = self._handle(record)
        self._state.begin(record)
        return handle

    def load(self, keys: Sequence[bytes], *, request: CacheRequest | None = None) -> None:
        """Record that a request loads those of `keys` that are present. Policies count that use before its `touch`.

        Args:
            request: the open request: `keys` are its own from now on. Those that were before are not counted again.

        Raises:
            LayoutError: `keys` is not a list of bytes.
            ClosedError, ValueError, TypeError: `request` has ended, is of another cache, or no CacheRequest.
        """
        self._load((check_keys(keys), request))

    @guarded
    def _load(self, given: tuple[list[bytes], CacheRequest | None]) -> None:
        keys, request = given
        self._state.use(keys, None if request is None else record_of(request, self._state))

    @guarded
    def hold(self, given: tuple[list[bytes], list[LeaseRecord], RequestRecord | None, list[bytes]]) -> LeaseRecord:
        """`acquire(keys)` and `load(used, request)` in one call, for owners that keep the record instead of a handle.

        Args:
            given: the keys, which are not checked; `kept`; the open request, and `used`: the keys in the order in which
                it uses them. The record is in `kept` before the entries are held, so that an interrupt does not lose
                it. `release` or `abandon` ends it.

        Raises:
            MissingKeyError: as `acquire`; nothing has changed.
        """
        keys, kept, opened, used = given
        state = self._state
        record = state.propose_lease(keys, False)
        kept.append(record)
        state.begin(record)
        state.use(used, opened)
        return record

    @guarded
    def use(self, given: tuple[list[bytes], RequestRecord | None]) -> None:
        """`load(keys, request)` for owners; the keys are not checked."""
        keys, opened = given
        self._state.use(keys, opened)

    @partial(guarded, nested=end_later)
    def release(self, record: LeaseRecord) -> None:
        """See `Lease.release`. Called inside another call of the index, it takes effect at the next call."""
        self._state.end(record)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove keys: from now on they are missing. Returns how many of them were present or pending.

        An entry that a lease or a transfer uses becomes free when that has ended; a pending key's, when its reservation
        has been committed or aborted.
        """
        return self._remove(list(dict.fromkeys(check_keys(keys))))

    def clear(self) -> int:
        """Remove all keys, as `remove` does. Returns how many there were."""
        return self._remove(None)

    @guarded
    def _remove(self, keys: list[bytes] | None) -> int:
        """`keys`: no repeats; None: all."""
        of = self._state.table.of
        gone = list(of) if keys is None else list(filter(of.__contains__, keys))
        self._state.remove(gone)
        return len(gone)

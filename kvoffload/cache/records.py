"""Records: the calls of an index whose results are records: for handles, for tiers, and for hosts without handles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from kvoffload.cache.calls import Owner, end_later, from_truth, guarded, locked, reading
from kvoffload.cache.entries import (
    OPEN,
    Completion,
    EntryTable,
    LeaseRecord,
    Record,
    ReservationRecord,
    Stage,
    Status,
    watch,
)
from kvoffload.cache.pools import RequestRecord, most_victims
from kvoffload.cache.reservations import Lease, check_open
from kvoffload.cache.state import CacheState
from kvoffload.cache.statistics import CacheStatistics


def unready(table: EntryTable) -> list[ReservationRecord]:
    """Reservations in whose entries the bytes are not known to be, by the truth alone."""
    return [record for record in list(table.reservations) if record.stage is not Stage.COMMITTED]


@from_truth
def statuses_from_truth(owner: Owner, keys: list[bytes]) -> list[Status]:
    of = owner._state.table.of
    pending = {index for record in unready(owner._state.table) for index in record.indices}
    entries = map(of.get, keys)
    return [Status.MISS if entry is None else Status.PENDING if entry in pending else Status.HIT for entry in entries]


class Records:
    """The reservations and leases of an index as records, whose owner says when they end. Usable from any thread.

    A record that a call adds to the caller's list is there before anything is held for it, so that an interrupt does
    not lose it. Keys are not checked here: a list of bytes, without repeats.
    """

    def __init__(self, state: CacheState, check_usable: Callable[[], None] | None) -> None:
        self._state = state
        self._check_usable = check_usable
        self.lock = state.lock
        self.num_groups = state.num_groups
        self.capacity = state.table.capacity
        self.recorder = state.recorder

    # asking -------------------------------------------------------------------------------------------------------

    @partial(guarded, nested=statuses_from_truth)
    def status(self, keys: list[bytes]) -> list[Status]:
        """See `CacheIndex.status`."""
        of, pending = self._state.table.of, self._state.table.pending
        return [Status.MISS if key not in of else Status.PENDING if key in pending else Status.HIT for key in keys]

    @property
    def keys(self) -> list[bytes]:
        """All keys, ready or pending."""
        return reading(self, lambda state: list(state.table.of))

    def statistics(self) -> CacheStatistics:
        """See `CacheIndex.statistics`."""

        def step(state: CacheState) -> CacheStatistics:
            table = state.table
            pending = sum(len(table.still_mine(record)) for record in unready(table))
            pinned = {index for lease in list(table.leases) for index in lease.indices}
            return state.recorder.statistics(
                capacity=table.capacity, resident=len(table) - pending, pending=pending, pinned=len(pinned)
            )

        return reading(self, step)

    # reservations -------------------------------------------------------------------------------------------------

    @guarded
    def reserve(self, given: tuple[list[bytes], list[ReservationRecord], RequestRecord | None]) -> ReservationRecord:
        """`load(keys, request)` and `reserve(keys, request=request)` of an index, in one call.

        Args:
            given: the keys; the list that gets the record; the open request. `commit`, `abort` or `abandon` ends the
                record.
        """
        keys, kept, opened = given
        state = self._state
        record = state.propose(keys, "", False, opened, True)
        kept.append(record)
        state.publish(record)
        state.fill(record)
        return record

    @guarded
    def commit(self, record: ReservationRecord) -> None:
        """See `Reservation.commit`."""
        if record.stage is not OPEN:
            check_open(record)
        self._state.settle(record, True)

    def commit_after(self, record: ReservationRecord, jobs: tuple[Completion, ...]) -> None:
        """See `Reservation.commit`, with jobs."""

        def step(state: CacheState) -> None:
            check_open(record)
            state.submitted(record, jobs, in_order=False)
            state.enter()

        locked(self, step)

    @partial(guarded, nested=end_later)
    def abort(self, record: ReservationRecord) -> None:
        """See `Reservation.abort`. Called inside another call of the index, it takes effect at the next call."""
        check_open(record)
        self._state.settle(record, well=False)

    def abort_after(self, record: ReservationRecord, jobs: tuple[Completion, ...]) -> None:
        """Make its key missing at once; its entry is free when `jobs`, which may write it, have ended."""

        def step(state: CacheState) -> None:
            check_open(record)
            record.jobs = jobs
            state.settle(record, well=False)

        locked(self, step)

    def abandon(self, record: Record) -> None:
        """Have the next call of the index abort or release a record; ignored if it has ended."""
        self._state.abandoned.append(record)

    @partial(guarded, nested=lambda *_: None)
    def settle_ended(self, _: None) -> None:
        """Settle what waits for transfers that have ended, and report events. Inside another call it does nothing."""

    # leases and requests ------------------------------------------------------------------------------------------

    @guarded
    def hold(self, given: tuple[list[bytes], list[LeaseRecord], RequestRecord | None, list[bytes]]) -> LeaseRecord:
        """`acquire(keys)` and `load(used, request)` of an index, in one call.

        Args:
            given: the keys; the list that gets the record; the open request, and `used`: the keys in the order in which
                it uses them. `release` or `abandon` ends the record.

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
    def acquire(self, given: tuple[list[bytes], bool]) -> Lease:
        """`keys, pending`: see `CacheIndex.acquire`."""
        return self.begin_lease(*given)

    @guarded
    def touch(self, used: list[bytes]) -> None:
        """See `CacheIndex.touch`."""
        self._state.touch(used)

    @guarded
    def use(self, given: tuple[list[bytes], RequestRecord | None]) -> None:
        """`load(keys, request)` of an index."""
        keys, opened = given
        self._state.use(keys, opened)

    @partial(guarded, nested=end_later)
    def release(self, record: LeaseRecord) -> None:
        """See `Lease.release`. Called inside another call of the index, it takes effect at the next call."""
        self._state.end(record)

    @guarded
    def end_request(self, record: RequestRecord) -> bool:
        """See `CacheRequest.end`. Returns whether it had not ended before."""
        if record.ended:
            return False
        record.ended = True
        self._state.touch(list(record.keys))
        return True

    # for tiers ----------------------------------------------------------------------------------------------------

    @guarded
    def reserve_each(self, given: tuple[list[bytes], str]) -> list[ReservationRecord]:
        """Reserve entries for `keys, tenant`, with a record for each key that gets one, in the order of the keys.

        `commit` or `abort_after` ends each. For a thread that no signal handler interrupts: an interrupt would leave
        keys pending for ever.
        """
        keys, tenant = given
        state = self._state
        record = state.propose(keys, tenant, False, None, False)
        record.promoted, record.declined = True, []
        if not record.keys:
            return []
        state.publish(record)
        state.fill(record)
        state.consistent = False
        parts = _split(state.table, record)
        state.consistent = True
        return parts

    @guarded
    def hold_ready(self, given: tuple[list[bytes], bool]) -> tuple[list[Status | None], Lease | None]:
        """Of each key its status; None if it is pending and becomes ready, or missing, without a call of the cache.

        With `hold`, those that are ready are held by the lease, so that nothing evicts them; None: there is none.
        """
        keys, hold = given
        of, pending = self._state.table.of, self._state.table.pending
        hit, found = Status.HIT, list[Status | None]()
        for key in keys:
            record = pending.get(key)
            filled = record is not None and (record.promoted or bool(record.jobs))
            found.append(None if filled else Status.PENDING if record else hit if key in of else Status.MISS)
        ready = [key for key, status in zip(keys, found, strict=True) if status is hit]
        return found, self.begin_lease(ready, False) if ready and hold else None

    @guarded
    def commit_and_hold(self, given: tuple[list[ReservationRecord], bool]) -> tuple[list[bool], Lease | None]:
        """Make the keys of records from `reserve_each` hits, unless they were removed meanwhile.

        Returns whether each was not; with `hold`, those that were not are held by the lease.
        """
        records, hold = given
        state, mine, ready = self._state, list[bool](), list[bytes]()
        for record in records:
            key = record.keys[0]
            mine.append(state.table.of.get(key) == record.indices[0])
            state.settle(record, well=True)
            if mine[-1]:
                ready.append(key)
        return mine, self.begin_lease(ready, False) if ready and hold else None

    def begin_lease(self, keys: list[bytes], pending: bool) -> Lease:
        """Hold keys by a lease. Under the lock.

        Raises:
            MissingKeyError: a key is absent or not ready.
        """
        state = self._state
        record = state.propose_lease(keys, pending)
        handle = Lease(self, record)
        watch(handle, record, state.abandoned.append)
        state.begin(record)
        return handle

    @guarded
    def next_to_go(self, count: int) -> list[bytes]:
        """The keys that would be evicted for so many new ones, beyond the entries that are free. Changes nothing."""
        table, found = self._state.table, list[bytes]()
        wanted = count - table.num_free
        for pool in sorted(self._state.pools.all, key=lambda pool: pool.priority):
            if len(found) < wanted and len(pool.policy):
                found += most_victims(pool.policy, wanted - len(found), lambda key: table.of.get(key) in table.holds)
        return found

    @guarded
    def note_promotion(self, given: tuple[list[bytes], int, Counter[str]]) -> None:
        """Count a promotion as a lookup of its keys. It has found so many leading ones, some in tiers."""
        keys, found, in_tiers = given
        self._state.filter.note(key for key in keys[found:] if key not in self._state.table.of)
        self._state.recorder.note_promotion(keys, found, in_tiers)


def _split(table: EntryTable, record: ReservationRecord) -> list[ReservationRecord]:
    """Put a record for each key in the place of an open one."""
    parts = []
    for key, position, index in zip(record.keys, record.positions, record.indices, strict=True):
        part = ReservationRecord(record.pool, record.tenant, [key], [], [], record.policy)
        part.positions, part.indices, part.promoted = (position,), [index], record.promoted
        parts.append(part)
    table.reservations.update(parts)
    table.reservations.discard(record)
    table.pending.update(zip(record.keys, parts, strict=True))
    return parts

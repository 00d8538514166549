"""What can be asked of an index: which keys it has, what has happened, and whether it is as it should be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from operator import eq

from kvoffload.cache import repair
from kvoffload.cache.calls import from_truth, guarded
from kvoffload.cache.entries import EntryTable, ReservationRecord, Stage, Status, check_keys
from kvoffload.cache.state import CacheState
from kvoffload.cache.statistics import CacheStatistics

_FEW = 8  # adjacent keys; where fewer are, comparing neighbours is not worth it
_MISS, _HIT, _PENDING = Status  # looking them up in the class takes as long as all the rest of a call


def _unready(table: EntryTable) -> list[ReservationRecord]:
    """Those in whose entries the bytes are not known to be, by the truth alone."""
    return [record for record in list(table.reservations) if record.stage is not Stage.COMMITTED]


@from_truth
def _statuses(queries: Queries, keys: list[bytes]) -> list[Status]:
    of = queries._state.table.of
    unready = {index for record in _unready(queries._state.table) for index in record.indices}
    entries = map(of.get, keys)
    return [_MISS if entry is None else _PENDING if entry in unready else _HIT for entry in entries]


def _status_from_truth(queries: Queries, key: bytes) -> Status:
    return _statuses(queries, [key])[0]


def _hits_from_truth(queries: Queries, requests: list[list[bytes]]) -> list[int]:
    most = queries.max_load_blocks
    found = [len(list(takewhile(lambda status: status is _HIT, _statuses(queries, keys)))) for keys in requests]
    return found if most is None else [min(each, most) for each in found]


class Queries:
    """The part of a `CacheIndex` that makes no reservation and no lease.

    Inside another call in the same thread (see `internal.nesting`) look-ups answer from the truth, and count nothing.

    Attributes:
        capacity, max_load_blocks: as given to `CacheIndex`.
        lock: taken by every call.
    """

    capacity: int
    max_load_blocks: int | None
    lock: threading.RLock
    _state: CacheState
    _check_usable: Callable[[], None] | None
    _unlocked: bool  # whether hits of one key need no lock: nothing is to be called for them

    # asking -------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are present and ready, at most `max_load_blocks`. Not counted as a use: see `touch`."""
        return self._lookup_many([check_keys(keys)])[0]

    def lookup_many(self, requests: Sequence[Sequence[bytes]]) -> list[int]:
        """`lookup` for each of several requests; the index does not change in between."""
        return self._lookup_many([check_keys(keys) for keys in requests])

    @partial(guarded, nested=_hits_from_truth)
    def _lookup_many(self, requests: list[list[bytes]]) -> list[int]:
        return [self._leading_hits(keys) for keys in requests]

    def status(self, keys: Sequence[bytes]) -> list[Status]:
        """For each key, whether it is missing, ready or pending."""
        return self._status(check_keys(keys))

    @partial(guarded, nested=_statuses)
    def _status(self, keys: list[bytes]) -> list[Status]:
        of, pending = self._state.table.of, self._state.table.pending
        return [Status.MISS if key not in of else Status.PENDING if key in pending else Status.HIT for key in keys]

    def status_of(self, key: bytes) -> Status:
        """Whether one key is missing, ready or pending. Counted as `lookup([key])` is.

        A key is a HIT only if its bytes are in its entry. What is not a HIT counts as a miss in statistics and events;
        a MISS, not a PENDING key, is one of the lookups that `store_after` asks for. `status` counts nothing.

        Raises:
            LayoutError: `key` is not bytes.
        """
        # A key that is ready is a hit, whatever waits to be settled. So a hit needs no lock, unless a call of another
        # thread changes the index while it is read. Such a call counts in `changes` before it clears `working`, and
        # `working` is read first: if neither shows a call, there was none. A hit takes 0.14 us then instead of 0.44.
        state = self._state
        changes, table = state.changes, state.table
        if (
            self._unlocked
            and type(key) is bytes
            and key in table.of
            and key not in table.pending
            and state.consistent
            and not state.working
            and state.changes == changes
        ):
            recorder = state.recorder
            recorder.lookups += 1
            recorder.hits += 1
            return _HIT
        return self._status_of(key if type(key) is bytes else check_keys([key])[0])

    @partial(guarded, nested=_status_from_truth)
    def _status_of(self, key: bytes) -> Status:
        table, recorder = self._state.table, self._state.recorder
        recorder.lookups += 1
        if key not in table.of:
            status = _MISS
            if self._state.filter.store_after:
                self._state.filter.note((key,))
        elif key in table.pending:
            status = _PENDING
        else:
            status = _HIT
            recorder.hits += 1
        if recorder.has_hook:
            recorder.announce_lookup(key, status is _HIT)
        return status

    def settle_ended(self) -> None:
        """Settle what waits for transfers that have ended, and report events. Inside another call it does nothing."""
        self._settle_ended(None)

    @partial(guarded, nested=lambda *_: None)
    def _settle_ended(self, _: None) -> None: ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record that a request with these keys, found or not, has ended. Once per request: see `BlockCache.touch`."""
        used = check_keys(keys)
        if len(used) > 1 and len(frozenset(used)) < len(used):
            used = list(dict.fromkeys(used))
        self._touch(used)

    @guarded
    def _touch(self, used: list[bytes]) -> None:
        note_end(self._state, used)

    # looking ------------------------------------------------------------------------------------------------------

    def statistics(self) -> CacheStatistics:
        """Counts now and since the cache was created."""
        return self._statistics(None)

    def _statistics_now(self, _: None) -> CacheStatistics:
        """By the truth alone."""
        table = self._state.table
        pending = sum(len(table.still_mine(record)) for record in _unready(table))
        pinned = {index for lease in list(table.leases) for index in lease.indices}
        return self._state.recorder.statistics(
            capacity=self.capacity, resident=len(table) - pending, pending=pending, pinned=len(pinned)
        )

    _statistics = guarded(_statistics_now, nested=_statistics_now)

    def check(self) -> None:
        """Verify that derived state, and what each policy knows, agree with the truth (see GLOSSARY); meant for tests.

        Raises:
            AssertionError: it does not; the message says where.
        """
        self._check(None)

    @guarded
    def _check(self, _: None) -> None:
        check_state(self._state)

    # showing ------------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> list[bytes]:
        """All keys, ready or pending."""
        return self._keys(None)

    def _keys_now(self, _: None) -> list[bytes]:
        return list(self._state.table.of)

    _keys = guarded(_keys_now, nested=_keys_now)

    def __len__(self) -> int:
        return self._count(None)

    def _count_now(self, _: None) -> int:
        return len(self._state.table)

    _count = guarded(_count_now, nested=_count_now)

    def __repr__(self) -> str:
        return f"CacheIndex({self.describe()})"

    def describe(self) -> str:
        """The state in one line. Takes no lock, so it may be called from anywhere."""
        table = self._state.table
        counts = f"{len(table.pending)} pending, {len(table.leases)} leases"
        return f"{len(table)} of {self.capacity} keys, {counts}; {self._state.pools}"

    # inner workings -----------------------------------------------------------------------------------------------

    def _leading_hits(self, keys: list[bytes]) -> int:
        table, state = self._state.table, self._state
        found = leading(table, keys)
        if table.pending:
            found = next((place for place, key in enumerate(keys[:found]) if key in table.pending), found)
        if state.filter.store_after:
            state.filter.note(key for key in keys[found:] if key not in table.of)
        found = found if self.max_load_blocks is None else min(found, self.max_load_blocks)
        state.recorder.note_lookup(keys, found)
        return found


def check_state(state: CacheState) -> None:
    """See `CacheIndex.check`. Under the lock."""
    repair.check(state.table)
    state.pools.check(list(state.table.of), state.pool_number)


def note_end(state: CacheState, used: list[bytes]) -> None:
    """A request with these keys, no repeats, found or not, has ended. Under the lock."""
    table, pools = state.table, state.pools
    try:
        entries = list(map(table.of.__getitem__, used))
        used = list(map(table.keys.__getitem__, entries))  # type: ignore[arg-type]  # they have keys
    except KeyError:
        used = table.originals(used)
        entries = [table.of[key] for key in used if key in table.of]
    state.recorder.note_touched(entries, len(used))
    split = ((pools.all[0], used),) if len(pools.all) == 1 else pools.split(used, state.pool_number)
    for pool, mine in split if table.capacity else ():
        state.consistent = False
        pool.stale = True
        pool.policy.touch(mine)
        pool.stale = False
    state.consistent = True


def leading(table: EntryTable, keys: list[bytes]) -> int:
    """How many leading keys have entries.

    Keys that were stored together mostly have adjacent entries: comparing them in order costs a fifth of looking up
    each in a large dictionary (`kvoffload bench cache`), where nearly every step misses the CPU's caches.
    """
    found, compared = 0, 2 * _FEW
    while found < len(keys):
        index = table.of.get(keys[found])
        if index is None:
            return found
        together = _together(table, index, keys[found : found + compared])
        found += together
        if together < _FEW:
            break
        compared = 2 * together  # so that many short ranges cost no more than one long one
    return found + len(list(takewhile(table.of.__contains__, keys[found:])))


def _together(table: EntryTable, index: int, keys: list[bytes]) -> int:
    """How many of these keys, from the first, have the entries from `index` on."""
    there = table.keys[index : index + len(keys)]
    return len(keys) if there == keys else len(list(takewhile(bool, map(eq, there, keys))))

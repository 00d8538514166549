"""RecordCalls: an index's calls in terms of records, for handles, tiers, and hosts without handles.

A call (`guarded`) takes the lock, brings the state up to date, and reports events at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from itertools import takewhile
from operator import eq
from typing import Any, Protocol, TypeVar

from kvoffload.cache import repair
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
from kvoffload.cache.reservations import CacheRequest, Lease, check_open
from kvoffload.cache.sessions import Hint, HintAnswer
from kvoffload.cache.state import CacheState
from kvoffload.cache.statistics import CacheStatistics
from kvoffload.internal.nesting import in_call, raise_nested

_FEW = 8  # adjacent keys; where fewer are, comparing neighbours is not worth it
_MISS, _HIT, _PENDING = Status  # looking them up in the class takes as long as all the rest of a call

_A = TypeVar("_A")
_R = TypeVar("_R")


class Guarded(Protocol):
    """An object with guarded methods.

    Attributes:
        _state: they change it, under its lock.
        _check_usable: called before the lock is taken, and may raise; None: no call.
    """

    _state: CacheState
    _check_usable: Callable[[], None] | None


_O = TypeVar("_O", bound=Guarded)


def refuse(owner: Guarded, argument: object) -> Any:
    """Raise RuntimeError: a policy, a signal handler or a finalizer calls the cache in the middle of a call."""
    del owner, argument
    raise_nested("the cache")


def end_later(owner: Guarded, record: Record) -> None:
    """Have the next call of the index abort or release a record; ignored if it has ended."""
    owner._state.abandoned.append(record)


def guarded(step: Callable[[_O, _A], _R], nested: Callable[[Any, Any], _R] = refuse) -> Callable[[_O, _A], _R]:
    """Make a method a call of the cache. Public calls check their arguments, and then make one guarded call.

    The step takes one argument: `*arguments, **options` cost a call 0.14 us more (Python 3.11, in a loop). It runs
    under the lock, with `state.working` set and the state up to date. If an exception leaves the call, out of the step,
    out of a hook of `notify`, or from a signal at any point, the record that the step proposed (`CacheState.propose`)
    is abandoned.

    Args:
        nested: called in place of the step if a call in the same thread has not returned, of this cache or of anything
            that shares its lock. The state is then in the middle of a change: `nested` may read only the truth.
    """

    @wraps(step)
    def call(self: _O, argument: _A) -> _R:
        if self._check_usable is not None:
            self._check_usable()
        state, record = self._state, None
        if in_call(state.lock):
            return nested(self, argument)
        try:
            with state.lock:
                try:
                    state.working = True
                    waiting = state.abandoned or state.storing or state.loading or state.awaited
                    if waiting or not state.consistent or state.growing is not None:
                        state.enter()
                    result = step(self, argument)
                finally:
                    record, state.proposed = state.proposed, None
                    state.changes += 1
                    state.working = state.consulting = False
            if state.recorder.unreported:
                state.recorder.notify()
        except BaseException:
            state.abandoned.append(record)  # ignored if it has not begun, or has come to its end
            raise
        return result

    return call


class _GivesState(Protocol):
    def __call__(self, owner: Guarded, step: Callable[[CacheState], _R], /) -> _R: ...


def _given_the_state(owner: Guarded, step: Callable[[CacheState], _R]) -> _R:
    return step(owner._state)


locked: _GivesState = guarded(_given_the_state)  # type: ignore[assignment]  # mypy drops the type variable
"""`locked(self, step)`: a guarded call of a function of the state, where a tenth of a microsecond does not matter."""

reading: _GivesState = guarded(_given_the_state, nested=_given_the_state)
"""The same for a function that reads only the truth (see `entries`): it also answers inside another call."""


def unready(table: EntryTable) -> list[ReservationRecord]:
    """Return the reservations whose entries may not hold their bytes yet, judged by the truth alone."""
    return [record for record in list(table.reservations) if record.stage is not Stage.COMMITTED]


def statuses_from_truth(owner: Guarded, keys: list[bytes]) -> list[Status]:
    """Answer in the middle of another call; refuse if a policy asks, since that call is changing it, or follows its
    advice.
    """
    state = owner._state
    if state.consulting or any(pool.stale for pool in state.pools.all):
        refuse(owner, keys)
    pending = {index for record in unready(state.table) for index in record.indices}
    entries = map(state.table.of.get, keys)
    return [Status.MISS if entry is None else Status.PENDING if entry in pending else Status.HIT for entry in entries]


def _hits_from_truth(records: RecordCalls, given: tuple[list[list[bytes]], int | None]) -> list[int]:
    requests, most = given
    statuses = [statuses_from_truth(records, keys) for keys in requests]
    found = [len(list(takewhile(lambda status: status is _HIT, each))) for each in statuses]
    return found if most is None else [min(each, most) for each in found]


class RecordCalls:
    """The reservations and leases of an index as records, whose owner says when they end. Usable from any thread.

    A call adds its record to the caller's list before it holds anything for it, so that an interrupt does not lose the
    record. Keys are not checked here: a list of bytes, without repeats.
    """

    def __init__(self, state: CacheState, check_usable: Callable[[], None] | None) -> None:
        self._state = state
        self._check_usable = check_usable
        self.lock = state.lock
        self.slots = state.slots
        self.most_entries = state.table.most
        self.recorder = state.recorder
        self.weights = state.weights

    def share(self, part: float) -> int:
        """Return how many entries `part` of the current ones are, at least one."""
        return max(1, int(part * self._state.table.capacity))

    # asking -------------------------------------------------------------------------------------------------------

    @partial(guarded, nested=statuses_from_truth)
    def status(self, keys: list[bytes]) -> list[Status]:
        of, pending = self._state.table.of, self._state.table.pending
        return [Status.MISS if key not in of else Status.PENDING if key in pending else Status.HIT for key in keys]

    @partial(guarded, nested=lambda records, key: statuses_from_truth(records, [key])[0])
    def status_of(self, key: bytes) -> Status:
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
            recorder.announce("hit" if status is _HIT else "miss", (key,))
        return status

    @partial(guarded, nested=_hits_from_truth)
    def look_up(self, given: tuple[list[list[bytes]], int | None]) -> list[int]:
        """Return how many leading keys of each request are ready. `given`: the requests, and the most hits of one."""
        requests, most = given
        state, hits = self._state, list[int]()
        table = state.table
        for keys in requests:
            found = leading(table, keys)
            if table.pending:
                found = next((place for place, key in enumerate(keys[:found]) if key in table.pending), found)
            if state.filter.store_after:
                state.filter.note(key for key in keys[found:] if key not in table.of)
            found = found if most is None else min(found, most)
            state.recorder.note_lookup(keys, found)
            hits.append(found)
        return hits

    @property
    def keys(self) -> list[bytes]:
        return reading(self, lambda state: list(state.table.of))

    def size(self) -> int:
        return reading(self, lambda state: len(state.table))

    @guarded
    def check(self, _: None) -> None:
        """Raise AssertionError unless derived state and policies agree with the truth."""
        state = self._state
        repair.check(state.table)
        keys = list(state.table.of)
        state.pools.check(keys, state.table.pool_numbers(keys))
        waiting = bool(state.in_flight and (state.storing or state.loading))
        assert not waiting or state.in_flight[0](), "reservations and loads wait for transfers in flight"

    @guarded
    def remove(self, given: tuple[list[bytes] | None, bool]) -> int:
        """Make keys, or all, missing; returns how many there were. `given`: the keys, and whether those of tiers that
        only the owner of a shared pool knows go, too.
        """
        of, keys = self._state.table.of, given[0]
        gone = list(of) if keys is None else list(filter(of.__contains__, keys))
        self._state.remove(gone)
        return len(gone)

    def statistics(self) -> CacheStatistics:
        def step(state: CacheState) -> CacheStatistics:
            table = state.table
            pending = sum(len(table.still_mine(record)) for record in unready(table))
            pinned = {index for lease in list(table.leases) for index in lease.indices}
            statistics = state.recorder.statistics(
                capacity=table.capacity, resident=len(table) - pending, pending=pending, pinned=len(pinned)
            )
            of_hints = {} if state.sessions is None else state.sessions.counts()
            others = state.pools.of_other_weights
            return replace(statistics, **of_hints, weights=state.weights.now.name, of_other_weights=others)

        return reading(self, step)

    # reservations -------------------------------------------------------------------------------------------------

    @guarded
    def reserve(self, given: tuple[list[bytes], list[ReservationRecord], RequestRecord | None]) -> ReservationRecord:
        """Do `load(keys, request)` and `reserve(keys, request=request)` of an index in one call.

        Args:
            given: the keys; the list that gets the record; the open request. End the record by `commit`, `abort` or
                `abandon`.
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
        if record.stage is not OPEN:
            check_open(record)
        self._state.settle(record, True)

    def commit_after(self, record: ReservationRecord, jobs: tuple[Completion, ...]) -> None:
        def step(state: CacheState) -> None:
            check_open(record)
            state.commit_after(record, jobs)
            state.enter()

        locked(self, step)

    @partial(guarded, nested=end_later)
    def abort(self, record: ReservationRecord) -> None:
        """Abort a reservation; inside another call of the index, at the next call.

        The caller may have submitted stores into the entries that no record knows. So the entries stay held until
        such transfers in flight have ended: a tier's thread would write into them at once.
        """
        check_open(record)
        state = self._state
        known = {
            getattr(job, "id", None) for each in (*state.storing, *state.loading, *state.awaited) for job in each.jobs
        }
        record.jobs = tuple(job for job in state.all_in_flight() if getattr(job, "id", None) not in known)
        state.settle(record, well=False)

    def abort_after(self, record: ReservationRecord, jobs: tuple[Completion, ...]) -> None:
        """Make its key missing at once. Its entry is free when `jobs`, which may write it, have ended."""

        def step(state: CacheState) -> None:
            check_open(record)
            record.jobs = jobs
            state.settle(record, well=False)

        locked(self, step)

    abandon = end_later

    @partial(guarded, nested=lambda *_: None)
    def settle_ended(self, _: None) -> None:
        """Settle records whose transfers have ended, and report events. Inside another call it does nothing."""

    # leases and requests ------------------------------------------------------------------------------------------

    @guarded
    def hold(self, given: tuple[list[bytes], list[LeaseRecord], RequestRecord | None, list[bytes]]) -> LeaseRecord:
        """Do `acquire(keys)` and `load(used, request)` of an index in one call.

        Args:
            given: the keys; the list that gets the record; the open request; and `used`: the keys in the order in which
                the request uses them. End the record by `release` or `abandon`.
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
        """Hold keys by a lease. `given`: keys, pending."""
        return self.begin_lease(*given)

    @guarded
    def touch(self, used: list[bytes]) -> None:
        self._state.touch(used)

    @guarded
    def use(self, given: tuple[list[bytes], RequestRecord | None]) -> None:
        """Do `load(keys, request)` of an index."""
        keys, opened = given
        self._state.use(keys, opened)

    @partial(guarded, nested=end_later)
    def release(self, record: LeaseRecord) -> None:
        """Release a lease; inside another call of the index, at the next call."""
        self._state.end(record)

    @guarded
    def open_request(self, given: tuple[str, str | None, Callable[[tuple[bytes, ...]], None] | None]) -> CacheRequest:
        """Open a request. `given`: tenant, session, and what is called with the keys at the end."""
        (tenant, session, on_end), state = given, self._state
        tenant = state.weights.now.namespace(tenant)
        state.pools.of(tenant)
        record = RequestRecord(state, tenant, on_end, state.weights.now)
        state.open_request(record, session)
        return CacheRequest(self, record)

    def keep_weights(self, names: frozenset[str]) -> None:
        """Let the keys of all other weights than these go first from now on: of an index with keys of several."""
        locked(self, lambda state: state.keep_weights(names))

    @guarded
    def end_request(self, record: RequestRecord) -> bool:
        """End a request. Returns whether this call has ended it."""
        if record.ended:
            return False
        record.ended = True
        self._state.end_request(record)
        return True

    @guarded
    def hint(self, given: tuple[Hint, bool]) -> tuple[HintAnswer, list[bytes], RequestRecord]:
        """Carry out a hint. `given`: the hint, and whether there are tiers. Returns the answer, the keys that tiers are
        to move, and the request that they are for if they come.
        """
        (hint, has_tiers), state = given, self._state
        state.pools.of(hint.tenant)
        request = RequestRecord(state, hint.tenant, None, state.weights.now)
        state.consistent = False
        sessions = state.with_sessions()
        answer, keys = sessions.execute(hint, has_tiers)
        if keys:
            sessions.promised(hint, request)
        state.consistent = True
        return answer, keys, request

    # for tiers ----------------------------------------------------------------------------------------------------

    @guarded
    def reserve_each(self, given: tuple[list[bytes], str, RequestRecord | None]) -> list[ReservationRecord]:
        """Reserve entries for `keys, tenant, request`, with one record for each key that gets an entry, in the order of
        the keys.

        End each by `commit` or `abort_after`. Only for a thread that no signal handler interrupts: an interrupt would
        leave keys pending for ever.
        """
        keys, tenant, request = given
        state = self._state
        record = state.propose(keys, tenant, False, request, False)
        record.promoted, record.declined = True, []
        if not record.keys:
            return []
        state.publish(record)
        state.fill(record)
        state.consistent = False
        table, parts = state.table, list[ReservationRecord]()
        for key, place, index in zip(record.keys, record.positions, record.indices, strict=True):
            part = ReservationRecord(record.pool, record.tenant, [key], (place,), [], [], record.policy, record.groups)
            part.indices, part.promoted = [index], True
            parts.append(part)
        table.reservations.update(parts)
        table.reservations.discard(record)
        table.pending.update(zip(record.keys, parts, strict=True))
        state.consistent = True
        return parts

    @guarded
    def hold_ready(self, given: tuple[list[bytes], bool]) -> tuple[list[Status | None], Lease | None]:
        """Return the status of each key; None for a pending one that ends without a commit or abort of a caller's.

        With `hold`, the lease holds the ready keys, so that nothing evicts them; None: no key is ready.
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

        Returns for each key whether it is a hit; with `hold`, the lease holds the hits.
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
        """Hold keys by a lease. Under the lock."""
        state = self._state
        record = state.propose_lease(keys, pending)
        handle = Lease(self, record)
        watch(handle, record, state.abandoned.append)
        state.begin(record)
        return handle

    def bring(self, keys: list[bytes], wait: float | None) -> None:
        """Let whoever has the index promote the keys, before a promotion without tiers. Here nothing comes."""

    @guarded
    def set_free(self, given: tuple[tuple[bytes, ...], str]) -> None:
        """Let resident keys of a tenant go first from now on. `given`: the keys, the tenant."""
        state, (keys, tenant) = self._state, given
        state.consistent = False
        state.with_sessions().set_free([key for key in keys if key in state.table.of], tenant)
        state.consistent = True

    @guarded
    def hinted(self, keys: tuple[bytes, ...]) -> dict[bytes, bool]:
        """Return which of these keys hints retain (True), and which they have released (False)."""
        table, pools = self._state.table, self._state.pools.all
        if len(pools) == 1:
            return {}
        here = [(key, pools[table.pool_of[table.of[key]]]) for key in keys if key in table.of]
        return {key: not pool.released for key, pool in here if pool.beside is not None}

    @guarded
    def next_to_go(self, count: int) -> list[bytes]:
        """Return the keys that would be evicted for `count` new ones, beyond the free entries. Changes nothing."""
        table, found = self._state.table, list[bytes]()
        wanted = count - table.num_free
        for pool in sorted(self._state.pools.all, key=lambda pool: pool.priority):
            if len(found) < wanted and len(pool.policy):
                found += most_victims(pool.policy, wanted - len(found), lambda key: table.of.get(key) in table.holds)
        return found

    @guarded
    def note_promotion(self, given: tuple[list[bytes], int, list[str]]) -> None:
        """Count a promotion as a lookup of its keys that found `found` leading ones. `given`: keys, found, and for each
        hit that a tier has brought the name of that tier.
        """
        (keys, found, in_tiers), state = given, self._state
        if state.filter.store_after:
            state.filter.note(key for key in keys[found:] if key not in state.table.of)
        state.recorder.note_promotion(keys, found, in_tiers)


def leading(table: EntryTable, keys: list[bytes]) -> int:
    """Return how many leading keys have entries.

    Keys stored together mostly have adjacent entries. Comparing those in order costs a fifth of looking up each key in
    a large dictionary (`kvoffload bench cache`), where nearly every step misses the CPU's caches.
    """
    found, compared = 0, 2 * _FEW
    while found < len(keys):
        index = table.of.get(keys[found])
        if index is None:
            return found
        asked = keys[found : found + compared]
        there = table.keys[index : index + len(asked)]
        together = len(asked) if there == asked else len(list(takewhile(bool, map(eq, there, asked))))
        found += together
        if together < _FEW:
            break
        compared = 2 * together  # so that many short ranges cost no more than one long one
    return found + len(list(takewhile(table.of.__contains__, keys[found:])))

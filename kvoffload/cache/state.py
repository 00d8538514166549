"""CacheState: the life of reservations and leases, from the decision which keys to store to the end of their transfers.

    propose ──publish──> open ──commit──> settling ──transfers end──> committed
       │         │         └──abort, abandoned, a transfer failed──> aborted
    refused   withdrawn

Transfers call nothing back. A call takes the lock and then calls `enter`, which brings the state up to date: it repairs
interrupted changes, aborts abandoned records, and settles records whose transfers have ended.

Exceptions. `consistent` is False from before the first change of an operation until after its last one. If an exception
ends the operation in between, the next `enter` calls `repair`, which completes the changes published in the truth (see
`entries`) and computes the rest from it. So an exception at any point leaves no key visible whose bytes are not there.
"""

from __future__ import annotations

import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import filterfalse

import numpy as np

from kvoffload.cache.engines import CacheEngine
from kvoffload.cache.entries import (
    ABORTED,
    COMMITTED,
    OPEN,
    SETTLING,
    Completion,
    EntryTable,
    HandleWatch,
    Journal,
    LeaseRecord,
    Record,
    ReservationRecord,
)
from kvoffload.cache.pools import OfSession, Pools, RequestRecord, ReuseFilter, Victims
from kvoffload.cache.repair import repair
from kvoffload.cache.reservations import check_readable
from kvoffload.cache.sessions import SessionRequest, Sessions
from kvoffload.cache.statistics import StatisticsRecorder
from kvoffload.cache.victims import find_space, shortage
from kvoffload.cache.weights import UsedWeights
from kvoffload.errors import CapacityError
from kvoffload.internal.nesting import new_lock
from kvoffload.internal.types import Int64Array


class CacheState:
    """The state behind a `CacheIndex`.

    A caller takes the lock, calls `enter`, calls other methods, releases the lock: see `records.guarded`. The engine
    calls `busy` and `check_store` under the same lock; these call `enter` themselves where needed.

    Attributes:
        working: a call has not returned in the thread that holds the lock.
        consulting: the policy is being asked where new keys go.
        changes: how many calls have ended; counted before `working` is cleared, see `KeyCache.status_of`.
        proposed: the record that this call has proposed.
        storing, loading: records with transfers, in the order of submission, in which transfers of one direction end.
        awaited: records with transfers in any order; every `enter` looks through them.
        coded: the engine's layout has a codec.
        in_flight: functions that return the transfers that may still read or write entries. If a record was dropped
            without being ended, its entries stay in use until these have ended.
        abandoned: watches of handles that became garbage, and records whose call has raised. Appended to at any time.
    """

    def __init__(
        self,
        capacity: int,
        pools: Pools,
        reuse_filter: ReuseFilter,
        recorder: StatisticsRecorder,
        engine: CacheEngine | None = None,
        weights: UsedWeights | None = None,
    ) -> None:
        self.lock = new_lock() if engine is None else engine.lock
        self.table = EntryTable(capacity)
        self.pools = pools
        self.filter = reuse_filter
        self.recorder = recorder
        self.working = False
        self.consulting = False
        self.changes = 0
        self.consistent = True
        self.proposed: Record | None = None
        self.storing: deque[ReservationRecord] = deque()
        self.loading: deque[LeaseRecord] = deque()
        self.abandoned: deque[HandleWatch | Record | None] = deque()
        self.awaited: dict[Record, None] = {}
        self.owner: Callable[[], object | None] = lambda: None  # the cache whose state this is, while it lives
        self.has_tiers = False
        self.sessions: Sessions | None = None  # from the first request of a session on
        self.clock: Callable[[], float] = time.monotonic
        self.weights = weights or UsedWeights()
        self.journal: Journal | None = None  # told of every change before bytes may follow it
        self.in_flight: list[Callable[[], tuple[Completion, ...]]] = [] if engine is None else [engine.jobs_in_flight]
        self.num_groups = 1 if engine is None else engine.layout.num_groups
        grows = engine is not None and engine.pinned_slots < engine.num_slots
        self.growing = engine if grows else None  # so that each call asks how many entries there are
        self.coded = engine is not None and any(codec != "raw" for codec in engine.layout.codecs)

    # up to date ---------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Bring the state up to date: repair, abort abandoned records, settle ended ones."""
        if not self.consistent:
            self.repair()
        if self.growing is not None:
            self._grow(self.growing)
        if self.abandoned:
            self._abort_abandoned()
        storing, loading = self.storing, self.loading
        while storing:
            reservation = storing[0]
            if not reservation.transfers_ended:
                break
            self.settle(reservation, well=not reservation.any_failed)
            del storing[0]
        while loading:
            lease = loading[0]
            if not lease.transfers_ended:
                break
            if self.coded:
                self.decline_unfit(lease, lease.unfit)
            self.end(lease, loaded=not lease.any_failed)
            del loading[0]
        for record in list(self.awaited) if self.awaited else ():
            if record.transfers_ended:
                if isinstance(record, LeaseRecord):
                    self.end(record)
                else:
                    self.settle(record, well=record.stage is SETTLING and not record.any_failed)
                self.awaited.pop(record, None)

    def _grow(self, engine: CacheEngine) -> None:
        """Make the entries usable whose slots are pinned by now. Slots are pinned in order, so a number tells which."""
        growing = engine.growing  # asked first: once it is False, `pinned_slots` is final
        self.table.capacity = self.pools.capacity = entries = engine.pinned_slots // self.num_groups
        if not growing:
            if entries < self.table.most:
                self.consistent = False
                self.pools.shrink(entries)
                self.repair()
            self.growing = None

    def repair(self) -> None:
        """Make derived state and the policies agree with the truth. May be interrupted and called again."""
        self.awaited = repair(self.table, self.pools, {*self.storing, *self.loading})
        self.pools.use(self.weights.in_use)
        if self.sessions is not None:
            self.sessions.recount()
        self.consistent = True

    def _abort_abandoned(self) -> None:
        """Abort reservations and release leases whose handle is gone or whose call has raised.

        An interrupted call may have submitted a transfer that is not in its record. So the entries are held until all
        transfers now in flight have ended.
        """
        abandoned = self.abandoned
        while abandoned:
            item = abandoned[0]
            record = item.record if isinstance(item, HandleWatch) else item
            if isinstance(record, LeaseRecord):
                if record in self.table.leases and not record.released and record not in self.loading:
                    record.jobs = self.all_in_flight()
                    self.end(record)
            elif record in self.table.reservations and record.stage is OPEN:
                record.jobs = self.all_in_flight()
                self.settle(record, well=False)
            del abandoned[0]  # not popleft(): an interrupt after that call would lose the record

    def use_weights(self, name: str) -> None:
        """Have calls mean these weights from now on, and let the keys of all others go first."""
        if name != self.weights.now.name:
            self.consistent = False
            self.weights.use(name, self.pools.tenants)
            self.pools.use(self.weights.in_use)
            self.consistent = True
        self.recorder.note_weights(name)

    def keep_weights(self, names: frozenset[str]) -> None:
        """Let the keys of all other weights than these go first from now on."""
        self.consistent = False
        self.weights.kept = names
        self.pools.use(names)
        self.consistent = True

    def all_in_flight(self) -> tuple[Completion, ...]:
        return tuple(job for source in self.in_flight for job in source())

    def with_sessions(self) -> Sessions:
        if self.sessions is None:
            self.sessions = Sessions(self.table, self.pools, self.clock)
        return self.sessions

    # filling ------------------------------------------------------------------------------------------------------

    def propose(
        self, keys: list[bytes], tenant: str, all_or_nothing: bool, opened: RequestRecord | None, uses: bool
    ) -> ReservationRecord:
        """Decide what storing these keys does, and return the record of it. Changes nothing, with two exceptions: an
        open request gets the keys, and with `uses` it uses the present ones.

        Raises:
            CapacityError: `all_or_nothing`, and a missing key would be declined.
            ValueError: no such tenant, or not the request's; or the policy names keys that must not be evicted.
        """
        table = self.table
        if opened is not None:
            tenant = opened.tenant_of_call(tenant) if tenant else opened.tenant
        pool = (self.pools.by_tenant.get(tenant) if type(tenant) is str else None) or self.pools.of(tenant)
        if opened is not None and opened.of_session is not None:
            pool = opened.of_session.pool_for(opened.keys.keys(), keys, pool)
        resident = table.of.__contains__
        present = list(filter(resident, keys))
        missing = list(filterfalse(resident, keys)) if present else keys
        if uses and present:
            self.use(keys, opened)
        new = self.filter.passing(missing) if self.filter.store_after else missing
        if pool.max_blocks is not None:
            new = new[: pool.max_blocks - table.pool_numbers(present).count(pool.number)]  # if the present ones stay
        victims: Victims = []
        free, short = table.num_free, False
        if not table.capacity or (opened is not None and opened.weights is not self.weights.now):
            new, short = [], bool(missing) and not table.capacity  # what it computes depends on the weights before, too
        policy = pool.policy if opened is None or not new else pool.policy_for(opened)
        if new and (len(new) > free or pool.selective):
            self.consulting = True  # until the call ends, if this raises
            admitted, victims, short = find_space(table, self.pools, pool, policy, new, free, present, opened)
            if admitted < len(new) and (all_or_nothing or self.has_tiers) and pool.beside and opened is not None:
                pool = pool.beside  # promised for later than all that is here; only from an entry does it get to a tier
                policy = pool.policy_for(opened)
                admitted, victims, short = find_space(table, self.pools, pool, policy, new, free, present, opened)
            self.consulting = False
            new = new[:admitted]
        if all_or_nothing and len(new) < len(missing):
            raise CapacityError(shortage(table, len(missing), len(new), short))
        record = ReservationRecord(pool, tenant, new, range(len(new)), victims, present, policy, self.num_groups)
        if len(new) < len(keys):
            chosen = set(new)
            record.positions = [place for place, key in enumerate(keys) if key in chosen]
            if len(new) < len(missing):
                record.declined = [key for key in missing if key not in chosen]
            record.short = short
        if opened is not None:
            opened.keys.update(dict.fromkeys(keys))
            if opened.of_session is not None:
                opened.of_session.stored.update(new)
        if new:
            table.allocate(record)
        self.proposed = record
        return record

    def publish(self, record: ReservationRecord) -> None:
        """Change the truth: the victims are gone, the record's keys are pending. `fill` follows; or `withdraw`, if
        nothing may be written.
        """
        table, number, several_pools = self.table, record.pool.number, len(self.pools.all) > 1
        of, pool_of = table.of, table.pool_of
        self.consistent = False
        if record.num_unused:
            pool_of.extend(array("I", (number,)) * (len(table.keys) + record.num_unused - len(pool_of)))
        if self.journal is not None:
            self.journal.reserved(record)
        record.victim_pools = [pool_of[index] for index in record.victim_indices] if several_pools else []
        for key in record.evicted:
            del of[key]
        if several_pools:
            for index in record.indices:
                pool_of[index] = number
        table.reservations.add(record)
        of.update(zip(record.keys, record.indices))  # noqa: B905  they are as many; saying so takes 0.1 us
        table.writable.update(record.indices)  # what a caller's transfer that fills them is checked against

    def withdraw(self, record: ReservationRecord) -> None:
        """Undo `publish`: nothing was written to the entries."""
        table = self.table
        of, pool_of = table.of, table.pool_of
        record.stage = ABORTED
        for key in record.keys:
            del of[key]
        table.reservations.discard(record)
        for index, number in zip(record.victim_indices, record.victim_pools, strict=False):
            pool_of[index] = number
        of.update(zip(record.evicted, record.victim_indices, strict=True))
        table.writable.difference_update(record.indices)
        del pool_of[len(table.keys) :]
        self.consistent = True

    def fill(self, record: ReservationRecord, jobs: tuple[Completion, ...] = ()) -> None:
        """Complete `publish`: change what follows from the truth, tell the policies, count.

        Args:
            jobs: the transfers that fill the entries, if they are submitted. They end after those of all records
                before; then the record is settled.
        """
        table, keys, indices = self.table, record.keys, record.indices
        known, free = table.keys, table.free
        for index in record.victim_indices:
            known[index] = None
        if record.num_recycled:
            del free[len(free) - record.num_recycled :]
        free += record.victim_indices[len(keys) :]  # those that no new key takes
        if record.num_unused:
            known += [None] * record.num_unused
        pending, holds = table.pending, table.holds
        for place, key in enumerate(keys):
            index = indices[place]
            known[index] = key
            pending[key] = record
            holds[index] = 1
        begin = 0
        for pool, victims in record.victims:
            pool.stale = True
            pool.policy.remove(victims, evicted=True)
            pool.stale = False
            end = begin + len(victims)
            self.recorder.note_evicted(victims, record.victim_indices[begin:end])
            begin = end
        if keys:
            record.pool.stale = True
            record.policy.insert(keys)
            record.pool.stale = False
            self.recorder.note_new(indices)
        if record.declined:
            self.recorder.note("declined", record.declined, record.tenant)
        if jobs:
            record.jobs = jobs
            record.stage = SETTLING
            self.storing.append(record)
            table.writable.difference_update(indices)
        self.consistent = True

    def commit_after(self, record: ReservationRecord, jobs: tuple[Completion, ...]) -> None:
        """Have the record settled as soon as these transfers of the caller's have ended."""
        self.consistent = False
        record.jobs = jobs
        record.stage = SETTLING
        self.awaited[record] = None
        self.table.writable.difference_update(record.indices)
        self.consistent = True

    def settle(self, record: ReservationRecord, well: bool) -> None:
        """Make the keys hits, or missing; the entries stay held while transfers may still write them."""
        table, pending = self.table, self.table.pending
        if record not in table.reservations:
            return
        self.consistent = False
        if well and self.coded:
            self.decline_unfit(record, record.unfit)
        record.stage = COMMITTED if well else ABORTED
        mine = table.still_mine(record)
        held = not (well or record.transfers_ended)
        if not well:
            self._unlink(mine)
        if held:
            self.awaited[record] = None
        else:
            table.reservations.discard(record)
        for key in mine:
            del pending[key]
        table.writable.difference_update(record.indices)
        if not held:
            table.release(record.indices)
        if well:
            indices = record.indices if mine is record.keys else list(map(table.of.__getitem__, mine))
            if self.journal is not None:
                self.journal.filled(indices)
            self.recorder.note_stored(mine, indices, record.tenant, record.promoted)
            if self.filter.store_after:
                self.filter.forget(mine)
        elif mine and not record.promoted:
            self.recorder.note("failed", mine, record.tenant)
        record.watch = None
        self.consistent = True

    def decline_unfit(self, record: Record, unfit: Collection[int]) -> None:
        """Take out the keys of entries whose blocks do not fit the codec, as `remove` does; a reservation goes on
        without them. The caller makes the state consistent.
        """
        of, entries = self.table.of, dict(zip(record.keys, record.indices, strict=True))
        mine = [key for key, index in entries.items() if index in unfit and of.get(key) == index]
        for _, keys in self.pools.split(mine, self.table.pool_numbers(mine)):
            self._unlink(keys)
            self._note_removed(keys)
            self.recorder.note_unfit(keys, record.tenant)

    def _unlink(self, keys: list[bytes]) -> None:
        """Take keys out of their entries and pools. The caller makes the state consistent."""
        of = self.table.of
        for pool, mine in self.pools.split(keys, self.table.pool_numbers(keys)):  # hints may have moved them
            self.consistent = False
            indices = list(map(of.__getitem__, mine))
            if self.journal is not None:
                self.journal.removed(indices)
            for key in mine:
                del of[key]
            for index in indices:
                self.table.unlink(index)
            pool.stale = True
            pool.policy.remove(mine, evicted=False)
            pool.stale = False

    # reading ------------------------------------------------------------------------------------------------------

    def propose_lease(
        self, keys: list[bytes], pending: bool, loads: bool = False, opened: RequestRecord | None = None
    ) -> LeaseRecord:
        """Return a record for reading the entries of these keys. Changes nothing.

        Args:
            loads, opened: `use` follows, for this request; see `PooledState`.
        """
        del loads, opened
        table = self.table
        indices = list(map(table.of.get, keys))
        sources: tuple[ReservationRecord, ...] = ()
        if None in indices or (table.pending and not table.pending.keys().isdisjoint(keys)):
            awaited = [check_readable(table, position, key, self.weights, pending) for position, key in enumerate(keys)]
            sources = tuple(dict.fromkeys(filter(None, awaited)))
        self.proposed = lease = LeaseRecord(keys, indices, sources, self.num_groups)  # type: ignore[arg-type]  # no None
        return lease

    def begin(self, lease: LeaseRecord) -> None:
        """Begin a lease: each of its entries gets one more holder."""
        self.consistent = False
        self.table.leases.add(lease)
        holds = self.table.holds
        for index in lease.held:
            holds[index] = holds.get(index, 0) + 1
        self.consistent = True

    def end(self, lease: LeaseRecord, *, loaded: bool = False) -> None:
        """Release the entries, at once or when the transfers of the lease have ended. `loaded`: these have
        succeeded.
        """
        if lease not in self.table.leases:
            return
        self.consistent = False
        lease.released = True
        lease.watch = None
        if not lease.jobs or lease.transfers_ended:
            self.table.leases.discard(lease)
            self.table.release(lease.held)
            if loaded:
                self.recorder.loaded += len(lease.keys)
        else:
            self.awaited[lease] = None
        self.consistent = True

    def use(self, keys: list[bytes], opened: RequestRecord | None = None) -> None:
        """Tell the policies that a request loads these keys, except keys not resident and keys that were its own."""
        if opened is not None and opened.keys:
            keys = list(filterfalse(opened.keys.__contains__, keys))
        unique = dict.fromkeys(keys)
        if opened is not None:
            opened.keys.update(unique)
        of, pools, table = self.table.of, self.pools, self.table
        entries = list(map(of.__getitem__, filter(of.__contains__, unique)))
        used: list[bytes] = list(map(table.keys.__getitem__, entries))  # type: ignore[arg-type]  # they have keys
        if not used:
            return
        self.consistent = False
        if self.sessions is not None:
            self.sessions.shared(used, None if opened is None else opened.of_session)
        one = len(pools.all) == 1
        split = ((pools.all[0], used),) if one else pools.split(used, list(map(table.pool_of.__getitem__, entries)))
        for pool, mine in split:
            if pool.beside is not None and self.sessions is not None:
                self.sessions.asked(pool, mine)
                if pool.released:
                    continue
            pool.stale = True
            (pool.policy if opened is None else pool.policy_for(opened)).load(mine)
            pool.stale = False
        self.consistent = True

    def touch(self, used: list[bytes], of_session: OfSession | None = None) -> None:
        """Tell the policies that a request has ended. `used`: its keys, found or not, without repeats."""
        table, pools = self.table, self.pools
        try:
            entries = list(map(table.of.__getitem__, used))
            used = list(map(table.keys.__getitem__, entries))  # type: ignore[arg-type]  # they have keys
        except KeyError:
            used = table.originals(used)
            entries = [table.of[key] for key in used if key in table.of]
        self.recorder.note_touched(entries, len(used))
        split = ((pools.all[0], used),) if len(pools.all) == 1 else pools.split(used, table.pool_numbers(used))
        self.consistent = False
        for pool, mine in split if table.capacity else ():
            if pool.released and self.sessions is not None:
                self.sessions.asked(pool, [key for key in mine if key in table.of])
                continue
            pool.stale = True
            pool.policy.touch(mine)
            pool.stale = False
        if self.sessions is not None:
            if isinstance(of_session, SessionRequest):
                self.sessions.ended(of_session, used)
            else:
                self.sessions.used_by_others(used)
        self.consistent = True

    def open_request(self, record: RequestRecord, session: str | None) -> None:
        if session is not None:
            self.consistent = False
            record.of_session = self.with_sessions().open(session, record.tenant, weakref.ref(record))
            self.consistent = True

    def end_request(self, record: RequestRecord) -> None:
        self.touch(list(record.keys), record.of_session)

    def remove(self, keys: list[bytes]) -> None:
        """Take resident keys, no repeats, out of their entries; their reservations go on without them."""
        gone = self.table.originals(keys)
        self._unlink(gone)
        self._note_removed(gone)
        self.consistent = True

    def _note_removed(self, keys: list[bytes]) -> None:
        """Report keys that have lost their entries, but for those that were pending: they were never announced."""
        pending = self.table.pending
        self.recorder.note("removed", [key for key in keys if pending.pop(key, None) is None])

    # for the engine -----------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether the slots are in use: the cache lives, or an entry is reserved or leased."""
        if self.owner() is not None:
            return True
        self._come_up_to_date()
        return bool(self.table.reservations or self.table.leases)

    def check_store(self, slots: Int64Array) -> None:
        """Raise ValueError unless a store may write these slots: each is of an entry of an open reservation.

        The engine calls it for every store but the cache's own, before anything has happened.
        """
        self._come_up_to_date()
        entries = (slots if self.num_groups == 1 else slots // self.num_groups).tolist()
        if not self.table.writable.issuperset(entries):
            wrong = next(place for place, entry in enumerate(entries) if entry not in self.table.writable)
            raise ValueError(
                f"slots[{wrong}] is {slots[wrong]}, which belongs to a BlockCache: write only the slots of an open "
                "reservation (cache.reserve(keys).slots()), or use cache.store()"
            )

    def _come_up_to_date(self) -> None:
        with self.lock:
            try:
                self.working = True
                self.enter()
            finally:
                self.changes += 1
                self.working = False

    def slots(self, indices: Sequence[int], group: int) -> Int64Array:
        """Return the slots of these entries in a group: entry `i` owns `num_groups` slots, one after the other."""
        slots = np.array(indices, dtype=np.int64)
        return slots if self.num_groups == 1 else slots * self.num_groups + group

"""A cache over a shared pool: the same calls, with the pool's owner in place of an index of one's own.

`BlockCache` and `CacheIndex` change a `CacheState` in steps: propose, publish, submit, fill, settle. `PooledState`
takes the same steps, and asks the owner in two of them: where entries are chosen (`propose`), and where they are held
for reading (`take`). What it keeps here are the records of its own transfers. Their truth is `table.reservations`,
`table.leases` and `numbers`: a record is in them before the owner is asked for it, so an interrupt at any point leaves
nothing at the owner that nobody ends. Ending twice is harmless, since the owner ignores numbers that it does not know.
"""

from __future__ import annotations

import json
import os
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

from kvoffload.cache.entries import Completion, LeaseRecord, Record, ReservationRecord, Stage, Status, watch
from kvoffload.cache.pools import OfSession, Pools, RequestRecord, ReuseFilter, Tenant
from kvoffload.cache.record_calls import RecordCalls, guarded, locked
from kvoffload.cache.repair import rebuild
from kvoffload.cache.reservations import Lease
from kvoffload.cache.sessions import Hint, HintAnswer
from kvoffload.cache.state import CacheState
from kvoffload.cache.statistics import CacheStatistics, StatisticsRecorder
from kvoffload.cache.weights import UsedWeights
from kvoffload.errors import CapacityError, MissingKeyError
from kvoffload.pool import messages
from kvoffload.pool.messages import NUMBER, STATUSES, Grant, Operation, pack_entries, unpack_entries

if TYPE_CHECKING:
    from kvoffload.cache.engines import CacheEngine

OPEN, SETTLING, COMMITTED, ABORTED = Stage
_REQUEST = -1  # in `RequestRecord.notes`: the number of a request at the owner
MOST_SECONDS = 60.0  # that a promotion by the owner is waited for
_NO_OWNER = "the pool's owner does not answer"


class Link(Protocol):
    """The way to the owner: a `SharedPool`."""

    tenant: str
    num_groups: int
    capacity: int
    generation: int
    has_tiers: bool

    @property
    def connected(self) -> bool: ...

    def next_number(self) -> int: ...

    def ask(self, operation: Operation, payload: bytes, /, *, granted: Grant | None = None) -> bytes | None: ...

    def tell(self, operation: Operation, payload: bytes, /, *, generation: int | None = None) -> None: ...

    def use_weights(self, name: str, /) -> None: ...

    def ask_slowly(self, operation: Operation, payload: bytes, wait: float, /) -> bytes | None: ...

    def wake(self) -> None: ...


class PooledState(CacheState):
    """The records of one member's transfers.

    Attributes:
        pool: the membership.
        numbers: of each record: the generation of owners that granted it, and its number there. A lease that reads
            what another one holds has the other one's number.
        unfit: entries whose blocks do not fit the codec, and the generation and number of the grant whose end tells the
            owner so.
    """

    def __init__(
        self,
        pool: Link,
        recorder: StatisticsRecorder,
        engine: CacheEngine | None,
        clean: float,
        weights: UsedWeights | None = None,
    ) -> None:
        capacity, tenants = pool.capacity, {pool.tenant: Tenant()}
        super().__init__(capacity, Pools("lru", tenants, capacity), ReuseFilter(0, capacity), recorder, engine, weights)
        self.num_groups = pool.num_groups
        self.pool = pool
        self.numbers: dict[Record, Grant] = {}
        self.unfit: dict[int, Grant] = {}
        self.fetched: LeaseRecord | None = None  # the latest that a look-up holds, which its load shares
        self._removed = 0  # leases with smaller numbers may hold keys that have been removed since
        self.salt = b""
        self._opened: dict[int, weakref.ref[RequestRecord]] = {}  # by their numbers at the owner
        self._told: LeaseRecord | None = None  # the latest lease that the owner was asked for together with its use
        self._clean = clean  # nothing of owners before this generation is in use, and the owner knows; inf: it may be

    def tidy(self) -> None:
        """Tell a new owner once nothing is in use any more that the last one granted. Under the lock."""
        generation = self.pool.generation
        if self._clean >= generation or not self.pool.connected:
            return
        if all(granted == generation for granted, _ in self.numbers.values()):
            self.pool.tell(Operation.CLEAN, b"", generation=generation)
            self._clean = generation  # set last: after an interrupt the next call tells it again

    def use_weights(self, name: str) -> None:
        super().use_weights(name)
        self.pool.use_weights(name)

    def forget_leases(self) -> None:
        """Have loads ask the owner, whatever leases hold: keys are about to be removed, or renamed."""
        self.fetched = None
        self._removed = self.pool.next_number()

    def pack(self, keys: list[bytes]) -> bytes:
        return messages.pack_keys(keys, self.salt, len(self.weights.now.tag))

    def repair(self) -> None:
        """Repair as every state does, and tell the owner what has ended."""
        rebuild(self.table)
        for record in list(self.numbers):
            if record not in self.table.reservations and record not in self.table.leases:
                self._end_at_owner(record)
        super().repair()

    # filling ------------------------------------------------------------------------------------------------------

    def propose(
        self, keys: list[bytes], tenant: str, all_or_nothing: bool, opened: RequestRecord | None, uses: bool
    ) -> ReservationRecord:
        """As `CacheState.propose`, but the entries are reserved at the owner from now on. Without an owner all keys are
        declined.
        """
        if opened is not None:
            tenant = opened.tenant_of_call(tenant)
            opened.keys.update(dict.fromkeys(keys))
        named, namespace = self.pools.of(tenant), self.weights.now.namespace(self.pool.tenant)
        record = ReservationRecord(named, namespace, [], (), [], [], named.policy, self.num_groups)
        self.proposed = record
        if opened is not None and opened.weights is not self.weights.now:
            record.declined = keys  # as in `CacheState.propose`
            keys = []
        if not keys:
            return record
        flags = messages.ALL_OR_NOTHING * all_or_nothing + messages.USES * uses
        payload = messages.FOR_REQUEST.pack(flags, _number_of(opened)) + self.pack(keys)
        self.table.reservations.add(record)
        answer = self.ask_for(record, Operation.RESERVE, payload)
        if answer is None:
            record.declined = keys
        else:
            codes = answer[1 : 1 + len(keys)]
            record.short, record.indices = bool(answer[0]), unpack_entries(answer, 1 + len(keys))
            if codes.count(messages.NEW) == len(keys):
                record.keys, record.positions = keys, range(len(keys))
                return record
            record.positions = [place for place, code in enumerate(codes) if code == messages.NEW]
            record.keys = [keys[place] for place in record.positions]
            record.present = [key for key, code in zip(keys, codes, strict=True) if code == messages.PRESENT]
            record.declined = [key for key, code in zip(keys, codes, strict=True) if code == messages.DECLINED]
        if not record.keys:
            self._end_at_owner(record)
            self.table.reservations.discard(record)
        if answer is None and all_or_nothing:
            raise CapacityError(f"{len(keys)} keys would be declined: {_NO_OWNER}")
        return record

    def publish(self, record: ReservationRecord) -> None:
        self.consistent = False
        self.table.writable.update(record.indices)

    def withdraw(self, record: ReservationRecord) -> None:
        self.settle(record, well=False)

    def fill(self, record: ReservationRecord, jobs: tuple[Completion, ...] = ()) -> None:
        self.recorder.note_new(record.indices)
        if record.declined:
            self.recorder.note("declined", record.declined, record.tenant)
        if jobs:
            record.jobs = jobs
            record.stage = SETTLING
            self.storing.append(record)
            self.table.writable.difference_update(record.indices)
            self.pool.wake()
        self.consistent = True

    def commit_after(self, record: ReservationRecord, jobs: tuple[Completion, ...]) -> None:
        super().commit_after(record, jobs)
        self.pool.wake()

    def settle(self, record: ReservationRecord, well: bool) -> None:
        """Have the owner make the keys hits, or free again, once no transfer may write their entries."""
        if record not in self.table.reservations:
            record.stage = COMMITTED if well else ABORTED
            return
        self.consistent = False
        if well and self.coded:
            self.decline_unfit(record, record.unfit)
        record.stage = COMMITTED if well else ABORTED
        self.table.writable.difference_update(record.indices)
        if not well and not record.transfers_ended:
            self.awaited[record] = None
            self.pool.wake()
        else:
            keys = record.keys
            if self.unfit:
                keys = [key for key, entry in zip(keys, record.indices, strict=True) if entry not in self.unfit]
            self._end_at_owner(record)
            self.table.reservations.discard(record)
            if well:
                self.recorder.note_stored(keys, record.indices, record.tenant, False)
            else:
                self.recorder.note("failed", record.keys, record.tenant)
        record.watch = None
        self.consistent = True

    def decline_unfit(self, record: Record, unfit: Collection[int]) -> None:
        """Have the owner remove these keys when the record ends. Keys that a load read behind their store go when the
        store ends.
        """
        new = set(unfit).difference(self.unfit, *(source.indices for source in getattr(record, "sources", ())))
        if new and record in self.numbers:
            self.unfit |= dict.fromkeys(new, self.numbers[record])
            keys = [key for key, entry in zip(record.keys, record.indices, strict=True) if entry in new]
            self.recorder.note_unfit(keys, "" if isinstance(record, LeaseRecord) else record.tenant)

    # reading ------------------------------------------------------------------------------------------------------

    def take(self, keys: list[bytes], pending: bool, loads: int | None = None) -> LeaseRecord:
        """Lease the leading keys that are ready. With `pending`, also those that this member is storing.

        Args:
            loads: the number of the request that is about to load all of them; 0: of none.
        """
        self.proposed = lease = LeaseRecord(keys, [], (), self.num_groups)
        if not keys:
            return lease
        source = self.fetched
        self.table.leases.add(lease)
        if source is not None and self._shares(lease, source):
            return lease
        reserved = [each for each in self.table.reservations if pending and each.stage is not SETTLING]
        if any(not set(each.keys).isdisjoint(keys) for each in reserved):
            loads = None  # it may be refused, and then it uses none
        flags = messages.PENDING * pending | messages.LOADS * (loads is not None)
        payload = messages.FOR_REQUEST.pack(flags, loads or 0) + self.pack(keys)
        self._told = None if loads is None else lease
        answer = self.ask_for(lease, Operation.TAKE, payload)
        if answer:
            indices = unpack_entries(answer)
            if pending:  # reserved by this member, but no transfer fills them, or it has failed
                unfilled = {entry for each in reserved for entry in each.indices}
                indices = list(takewhile(lambda entry: entry not in unfilled, indices))
            lease.indices = indices
        lease.keys = keys[: len(lease.indices)]
        if not lease.indices:
            self.end(lease)
        elif pending:
            taken = set(lease.indices)
            mine = [each for each in self.table.reservations if not taken.isdisjoint(each.indices)]
            lease.sources = tuple(each for each in mine if each.stage is SETTLING)
        return lease

    def propose_lease(
        self, keys: list[bytes], pending: bool, loads: bool = False, opened: RequestRecord | None = None
    ) -> LeaseRecord:
        """Lease all keys. With `loads`, the message that asks for them also says what `use` would.

        Raises MissingKeyError: not all are ready.
        """
        lease = self.take(keys, pending, _number_of(opened) if loads else None)
        found = len(lease.indices)
        if found < len(keys):
            self.end(lease)
            if not self.pool.connected:  # what another lease of this member holds is there without the owner, too
                self.proposed = lease = LeaseRecord(keys, [], (), self.num_groups)
                for source, (_, number) in list(self.numbers.items()):
                    if isinstance(source, LeaseRecord) and number > self._removed and self._shares(lease, source):
                        return lease
            raise MissingKeyError(
                f"keys[{found}] ({self.weights.plain(keys)[found].hex()[:16]}) is not ready; load only what lookup() "
                "found"
            )
        return lease

    def _shares(self, lease: LeaseRecord, source: LeaseRecord) -> bool:
        """Have a lease read what another one holds, if that has all its keys. Returns whether it has."""
        keys, found = lease.keys, source.indices[: len(lease.keys)]
        if source.keys[: len(keys)] != keys:
            entry_of = dict(zip(source.keys, source.indices, strict=True))
            found = [entry_of[key] for key in keys if key in entry_of]
        if source.released or source.sources or len(found) < len(keys):
            return False
        self.table.leases.add(lease)
        lease.indices, self.numbers[lease] = found, self.numbers[source]
        return True

    def begin(self, lease: LeaseRecord) -> None:
        """Note a lease whose entries the owner holds already."""
        self.table.leases.add(lease)  # also one of no keys, which the owner was not asked for

    def end(self, lease: LeaseRecord, *, loaded: bool = False) -> None:
        super().end(lease, loaded=loaded)
        self.consistent = False  # until the owner knows
        if lease not in self.table.leases:
            self._end_at_owner(lease)
        self.consistent = True

    def use(self, keys: list[bytes], opened: RequestRecord | None = None) -> None:
        if opened is not None:
            opened.keys.update(dict.fromkeys(keys))  # the owner knows which of them the request has used before
        if keys and (self._told is None or self._told is not self.proposed):
            self.pool.tell(Operation.USE, messages.REQUEST.pack(_number_of(opened)) + self.pack(keys))

    def touch(self, used: list[bytes], of_session: OfSession | None = None) -> None:
        del of_session  # the owner knows it
        self.pool.tell(Operation.TOUCH, self.pack(used))

    def open_request(self, record: RequestRecord, session: str | None) -> None:
        number = self.pool.next_number()
        record.notes[_REQUEST] = {"number": number}
        if session is not None or len(self._opened) % 64 == 0:
            self.end_dropped()
        self._opened[number] = weakref.ref(record)
        named = b"" if session is None else b"\1" + session.encode("utf-8", "surrogatepass")
        self.pool.tell(Operation.OPEN, messages.REQUEST.pack(number) + named)

    def end_request(self, record: RequestRecord) -> None:
        self._opened.pop(_number_of(record), None)
        self.pool.tell(Operation.CLOSE, messages.REQUEST.pack(_number_of(record)))

    def end_dropped(self) -> None:
        """Tell the owner of requests that no call has ended: what it does for their sessions depends on that."""
        for number, opened in list(self._opened.items()):
            if (record := opened()) is None or record.ended:
                del self._opened[number]
                self.pool.tell(Operation.END, messages.ENDING.pack(number, False))

    # at the owner -------------------------------------------------------------------------------------------------

    def ask_for(self, record: Record, operation: Operation, payload: bytes) -> bytes | None:
        """Ask for entries; `numbers` has the record before the owner can grant them."""
        if not self.pool.connected and self.pool.ask(Operation.STATUS, messages.pack_keys([])) is None:
            return None  # without a number: its end would wait for the owner, and crowd out those of real leases
        self.numbers[record] = granted = self.pool.generation, self.pool.next_number()
        return self.pool.ask(operation, payload, granted=granted)

    def _end_at_owner(self, record: Record) -> None:
        granted = self.numbers.get(record)
        if granted is None:
            return
        generation, number = granted
        if list(self.numbers.values()).count(granted) == 1:
            well = getattr(record, "stage", None) is COMMITTED
            unfit = [entry for entry, by in self.unfit.items() if by == granted]
            payload = messages.ENDING.pack(number, well) + pack_entries(unfit)
            self.pool.tell(Operation.END, payload, generation=generation)
            self.unfit = {entry: by for entry, by in self.unfit.items() if by != granted}
        self.numbers.pop(record, None)
        self.tidy()


class PoolRecordCalls(RecordCalls):
    """The calls of an index that its owner answers. Inside another call, where the owner cannot be asked, every key is
    a miss.
    """

    def __init__(self, state: PooledState, check_usable: Callable[[], None] | None, engine: CacheEngine | None) -> None:
        super().__init__(state, check_usable)
        self._pool, self._pooled, self._engine = state.pool, state, engine
        self._evicted = 0  # as the owner has last said
        self._answers = Counter[str]()

    def settle(self) -> bool:
        """Bring the cache up to date, for the membership's thread. Returns whether its transfers are in flight."""
        engine, state = self._engine, self._pooled
        if engine is not None and not engine.closed:
            engine.advance()
        locked(self, lambda _: state.tidy())
        return bool(state.storing or state.loading or state.awaited)

    @partial(guarded, nested=lambda _, keys: [Status.MISS] * len(keys))
    def status(self, keys: list[bytes]) -> list[Status]:
        answer = self._pool.ask(Operation.STATUS, self._pooled.pack(keys))
        return [Status.MISS] * len(keys) if answer is None else [STATUSES[code] for code in answer]

    @partial(guarded, nested=lambda *_: Status.MISS)
    def status_of(self, key: bytes) -> Status:
        answer = self._pool.ask(Operation.STATUS, self._pooled.pack([key]))
        status = Status.MISS if answer is None else STATUSES[answer[0]]
        self._state.recorder.note_lookup([key], int(status is Status.HIT))
        return status

    @partial(guarded, nested=lambda _, given: [0] * len(given[0]))
    def look_up(self, given: tuple[list[list[bytes]], int | None]) -> list[int]:
        requests, most = given
        hits = list[int]()
        for keys in requests:
            answer = self._pool.ask(Operation.FIND, self._pooled.pack(keys)) if keys else None
            found = 0 if answer is None else NUMBER.unpack(answer)[0]
            hits.append(found if most is None else min(found, most))
            self._state.recorder.note_lookup(keys, hits[-1])
        return hits

    @property
    def keys(self) -> list[bytes]:
        raise AttributeError("a shared pool does not list its keys: ask `status` for those that you know")

    def size(self) -> int:
        counted = self.statistics()
        return counted.resident + counted.pending

    def statistics(self) -> CacheStatistics:
        """Count what this member has done; `resident`, `pending`, `pinned` and `evicted` are of the region. If no owner
        answers, or the pool is closed, the first three are 0, and `evicted` is as before: a counter does not fall.
        """
        counts = json.loads(self._count(None)) if self._pool.connected else {}
        found: dict[str, int] = {name: int(counts.get(name, 0)) for name in ("resident", "pending", "pinned")}
        statistics = self._state.recorder.statistics(capacity=self.most_entries, **found)
        self._evicted = int(counts.get("evicted", self._evicted))
        hints, weights = tuple(sorted(self._answers.items())), self.weights.now.name
        return replace(statistics, evicted=self._evicted, hints=hints, weights=weights)

    @guarded
    def check(self, _: None) -> None:
        table, numbers = self._state.table, self._pooled.numbers
        opened = [record for record in table.reservations if record.stage is OPEN]
        assert table.writable == {entry for record in opened for entry in record.indices}, "writable entries are open"
        assert numbers.keys() <= {*table.reservations, *table.leases}, "numbers are of records"

    def remove(self, given: tuple[list[bytes] | None, bool]) -> int:
        """Remove keys, or all; with `below` from the owner's tiers, too, for which it waits up to a minute, without the
        cache's lock. Returns how many there were. Returns 0 and raises nothing if the owner does not answer, or a tier
        takes longer or fails: then they may be there still.
        """
        locked(self, lambda _: self._pooled.forget_leases())
        keys, below = given
        payload = b"" if keys is None else self._pooled.pack(keys)
        wait = MOST_SECONDS if below and self._pool.has_tiers else 0.0
        answer = self._pool.ask_slowly(Operation.REMOVE if below else Operation.FORGET, payload, wait)
        return int(NUMBER.unpack(answer)[0]) if answer else 0

    @guarded
    def hint(self, given: tuple[Hint, bool]) -> tuple[HintAnswer, list[bytes], RequestRecord]:
        """Pass a hint on to the owner, which moves the keys itself."""
        hint, _ = given
        self._pooled.end_dropped()
        answer = self._pool.ask(Operation.HINT, json.dumps(hint._asdict()).encode())
        said = hint.declined(_NO_OWNER) if answer is None else HintAnswer(*json.loads(answer))
        self._answers[f"{said.action} {said.outcome}"] += 1
        return said, [], RequestRecord(self._state, hint.tenant, None, self.weights.now)

    @guarded
    def hold_ready(self, given: tuple[list[bytes], bool]) -> tuple[list[Status | None], Lease | None]:
        keys, hold = given
        self._pooled.fetched = None  # what the owner has brought it holds until it is asked for a lease
        record = self._pooled.take(keys, False)
        found = len(record.indices)
        statuses: list[Status | None] = [*[Status.HIT] * found, *[Status.MISS] * (len(keys) - found)]
        if not found or not hold:
            self._state.end(record)
            return statuses, None
        handle = Lease(self, record)
        watch(handle, record, self._state.abandoned.append)
        self._pooled.fetched = record
        return statuses, handle

    @guarded
    def hold_each(self, given: tuple[list[bytes], list[LeaseRecord]]) -> tuple[dict[bytes, int], set[bytes]]:
        """Hold the keys that are ready, whichever these are. Returns their entries, and the keys that this member is
        storing. A load of such keys that follows asks nobody.

        Args:
            given: the keys, without repeats; the list that gets the record. End that by `release` or `abandon`.
        """
        (keys, kept), state = given, self._pooled
        state.proposed = lease = LeaseRecord([], [], ())
        state.table.leases.add(lease)
        payload = messages.FOR_REQUEST.pack(messages.EACH, 0) + state.pack(keys)
        answer = state.ask_for(lease, Operation.TAKE, payload) or pack_entries([messages.MISSING] * len(keys))
        entries = dict(zip(keys, unpack_entries(answer), strict=True))
        ready = {key: entry for key, entry in entries.items() if entry < messages.STORING}
        lease.keys, lease.indices = list(ready), list(ready.values())
        if ready:
            kept.append(lease)
            state.fetched = lease
        else:
            state.end(lease)
        return ready, {key for key, entry in entries.items() if entry == messages.STORING}

    @guarded
    def part(self, _: None) -> None:
        """Rename this member's keys: it shares none with other members, or with its own earlier stores, any more."""
        self._pooled.forget_leases()
        self._pooled.salt = os.urandom(8)

    def bring(self, keys: list[bytes], wait: float | None) -> None:
        """Let the owner promote these keys from its tiers, and wait for that, without the cache's lock."""
        pool = self._pool
        if pool.has_tiers and keys:
            wait = MOST_SECONDS if wait is None else min(wait, MOST_SECONDS)
            pool.ask_slowly(Operation.BRING, NUMBER.pack(int(wait * 1000)) + self._pooled.pack(keys), wait)

    @partial(guarded, nested=lambda *_: b"{}")
    def _count(self, _: None) -> bytes:
        return self._pool.ask(Operation.COUNTS, b"") or b"{}"


def _number_of(record: RequestRecord | None) -> int:
    return 0 if record is None else int(record.notes[_REQUEST]["number"])

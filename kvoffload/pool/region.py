"""Region: the owner's side of members that share keys: their memory, the index of it, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from kvoffload.cache.entries import LeaseRecord, ReservationRecord, Status
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.records import guarded, leading, locked
from kvoffload.cache.reservations import CacheRequest
from kvoffload.cache.state import CacheState
from kvoffload.errors import CapabilityError, CapacityError
from kvoffload.internal.checks import reason
from kvoffload.internal.log import LOGGER
from kvoffload.pool.memory import OWNER, Meaning, PoolMemory
from kvoffload.pool.messages import ALL_OR_NOTHING, MISSING, STORING, USES

if TYPE_CHECKING:
    from kvoffload.cache.tiering.promotion import Promotion

MOST_REQUESTS = 4096  # open ones of a member; the oldest are forgotten
_MOST_MARKED = 65_536  # entries of a member, after which marks of ended reads are removed

MakeIndex = Callable[[PoolMemory], CacheIndex]


class Alive:
    """A member that has gone, as a transfer that may still touch entries: it has ended once no process holds the
    member's lock, or the member is back and says that it has. A `Completion`.
    """

    error = None

    def __init__(self, memory: PoolMemory, number: int, lock: Any) -> None:
        self._memory, self._number, self.lock = memory, number, lock
        self.ended = False

    @property
    def finished(self) -> bool:
        self.ended = self.ended or not self._memory.locked(self._number)
        return self.ended

    done = finished

    def order_before(self, stream: Any) -> None:
        raise AssertionError(f"stream {stream!r} would wait for another process")


class Holdings:
    """What one member has of a region.

    Attributes:
        number: the member's, and its lock's. Processes of one engine share it.
        tenant: of all its calls.
        joined: what its JOIN said.
        reservations, leases: by the number of the message that asked for them.
        requests: by the member's number for them.
        promotions: hold keys until it takes some, once they have ended.
        marked: entries whose headers say that it may read them.
    """

    def __init__(self, number: int, tenant: str) -> None:
        self.number, self.tenant = number, tenant
        self.joined: dict[str, Any] = {}
        self.reservations: dict[int, ReservationRecord] = {}
        self.leases: dict[int, LeaseRecord] = {}
        self.requests: dict[int, CacheRequest] = {}
        self.promotions: list[Promotion] = []
        self.marked: set[int] = set()

    @property
    def engine(self) -> str:
        """Name of the engine, if several processes form it and each has joined; "" for an engine of one process."""
        return str(self.joined.get("engine", ""))

    def release_promotions(self, *, ended: bool) -> None:
        """`ended`: release only promotions that have ended; another thread of the member waits for the rest."""
        promotions, self.promotions = self.promotions, []
        for promotion in promotions:
            if ended and not promotion.done:
                self.promotions.append(promotion)
            else:
                promotion.release()


class Region:
    """Memory, index, and the members that are there.

    Args:
        memory: closed with the region, also if this raises.
        make_index: makes the index, with the owner's tiers.

    Attributes:
        inherited: what members of the last owner may still read or write, by their numbers; from `adopt` on, until the
            member says that it has ended, or its lock is free.
        gone: members that have gone, and may still touch entries, by their numbers.
    """

    _check_usable: Callable[[], None] | None = None

    def __init__(self, memory: PoolMemory, make_index: MakeIndex) -> None:
        self.memory = memory
        self.members: set[Holdings] = set()
        self.inherited: dict[int, LeaseRecord] = {}
        self.gone: dict[int, Alive] = {}
        self._writer, self._sequence = OWNER, 0
        try:
            self.index = make_index(memory)
        except BaseException:
            memory.close()
            raise
        self._records = self.index.records
        self._state = self._records._state
        self._state.journal = self
        if not memory.locked(OWNER):
            memory.lock(OWNER)

    @classmethod
    def adopt(cls, memory: PoolMemory, make_index: MakeIndex) -> Region:
        """A region of an owner that has ended, with the keys that its headers say are there."""
        region = cls(memory, make_index)
        try:
            region._read_headers()
        except BaseException:
            region.close()
            raise
        return region

    def _read_headers(self) -> None:
        memory, records = self.memory, self._records
        found, living = memory.found(), [number for number in range(64) if memory.locked(number)]
        users = {
            number: [entry for entry, bits in found.users if bits >> number & 1]
            for number in living
            if number != OWNER or not memory.holds_lock
        }
        tenants = {tenant_digest(name): name for name in records._state.pools.by_tenant}
        named = [tenants.get(digest, "") for digest in found.tenants]
        self.index.restore(found.keys, found.entries, found.sequences, tenants=named)
        self._sequence = int(found.sequences[-1]) + 1 if len(found.sequences) else 0
        self.inherited = locked(records, partial(_hold, users=users))
        known = locked(records, lambda state: list(state.table.of.values()))
        memory.gone(set(range(memory.meaning.capacity)).difference(known))  # keys that this index does not have

    @property
    def busy(self) -> bool:
        """Whether members are there, or may still touch the memory."""
        return bool(self.members or self.waits)

    @property
    def waits(self) -> bool:
        """Whether entries are in quarantine."""
        return bool(self.inherited or self._state.awaited)

    # the journal, which the index tells under its lock --------------------------------------------------------------

    def reserved(self, record: ReservationRecord) -> None:
        if len(record.victim_indices) > len(record.indices):
            self.memory.gone(record.victim_indices[len(record.indices) :])  # which no new key takes
        if record.indices:
            self._sequence += 1
            self.memory.reserved(record.indices, self._sequence, OWNER if record.promoted else self._writer)
            if record.promoted:
                self.memory.named(record.keys, record.indices, tenant_digest(record.tenant))

    def filled(self, entries: Sequence[int]) -> None:
        self.memory.ready(entries)

    def removed(self, entries: Sequence[int]) -> None:
        self.memory.gone(entries)

    # members ------------------------------------------------------------------------------------------------------

    def of_engine(self, name: str) -> list[Holdings]:
        """The processes of an engine that have joined."""
        return [member for member in self.members if name and member.engine == name]

    def copying_for(self, name: str) -> int:
        """How many processes of an engine have joined, without the one with its index."""
        return sum("processes" not in each.joined for each in self.of_engine(name))

    def number_for(self, member: Holdings, old: int | None) -> int:
        """The number of a member that joins: that of its engine's other processes, or one that no member has, and no
        process the lock of.

        Args:
            old: that a member with the memory of the last owner has.

        Raises CapacityError, CapabilityError, ValueError.
        """
        self.settle()  # else a quarantine that is over would last until the next member with this number has ended
        beside = self.of_engine(member.engine)
        if "processes" in member.joined and any("processes" in each.joined for each in beside):
            raise ValueError(f"an engine named {member.engine:.80} is there already: give each a name of its own")
        numbers = {each.number for each in self.members.difference(beside)}
        place = old
        if old is None:
            free = (each for each in range(OWNER) if each not in numbers | self.inherited.keys())
            place = beside[0].number if beside else next((each for each in free if not self.memory.locked(each)), None)
        if place is None or place in numbers:
            raise CapacityError("the region has as many members as it can, 63, or processes of theirs are left")
        if any(each.number != place for each in beside):
            raise CapabilityError(f"processes of the engine {member.engine:.80} have joined under another number")
        return place

    def leave(self, member: Holdings, *, dead: bool) -> None:
        """A member has gone. What it was writing stays in quarantine until nothing of it can write any more. So does
        what it was reading, unless it is `dead`: it may have lost its connection alone.
        """
        self.members.discard(member)
        number = member.number
        member.release_promotions(ended=False)
        if member.leases or member.reservations:
            known = self.gone.get(number)
            alive = Alive(self.memory, number, self._records.lock) if known is None or known.ended else known
            self.gone[number] = alive
        for lease in member.leases.values():
            lease.jobs = () if dead else (alive,)
            self._records.release(lease)
        for record in member.reservations.values():
            self._records.abort_after(record, (alive,))
        for request in member.requests.values():
            request._record.ended = True

    def settle(self) -> None:
        """End quarantines whose reason has gone."""
        for number in [number for number, alive in self.gone.items() if alive.finished]:
            del self.gone[number]
        self._records.settle_ended(None)
        for number in list(self.inherited):
            if not self.memory.locked(number):
                self.end_inherited(number)
        if OWNER not in self.inherited and not self.memory.holds_lock:
            self.memory.lock(OWNER)

    def end_inherited(self, number: int) -> None:
        """The member has nothing in use that was granted before it joined: by the last owner, or by this one."""
        alive = self.gone.pop(number, None)
        if alive is not None:
            alive.ended = True
        lease = self.inherited.pop(number, None)
        if lease is not None:
            self._records.release(lease)
            members = [member for member in self.members if member.number == number]
            still = {entry for each in members for lease in each.leases.values() for entry in lease.indices}
            self.memory.read(set(lease.indices) - still, number)

    def _granted_before(self, number: int) -> set[int]:
        """Entries that a member with this number may still use since before it joined: the next owner must know."""
        found, lease, alive = set[int](), self.inherited.get(number), self.gone.get(number)
        if lease is not None:
            found.update(lease.indices)
        if alive is not None:
            found.update(*(record.indices for record in self._state.awaited if alive in record.jobs))
        return found

    @property
    def has_tiers(self) -> bool:
        return self.index._tiers is not None

    def look_up(self, keys: list[bytes]) -> int:
        return self._records.look_up(([keys], None))[0]

    def status(self, keys: list[bytes]) -> bytes:
        return bytes([_CODES[status] for status in self._records.status(keys)])

    @guarded
    def reserve(
        self, given: tuple[Holdings, int, list[bytes], Callable[[ReservationRecord], None], int, int]
    ) -> ReservationRecord:
        """Entries for missing keys, reserved under the number. Raises CapacityError with `ALL_OR_NOTHING`.

        Args:
            given: member, number, keys; what tells the member, before the policy is told: the entries are the member's
                even if that raises; flags and request, as in RESERVE.
        """
        member, number, keys, granted, flags, request = given
        state, opened = self._state, member.requests.get(request)
        its = None if opened is None else opened._record
        self._writer = member.number
        tenant = "" if its is not None else member.tenant
        record = state.propose(keys, tenant, bool(flags & ALL_OR_NOTHING), its, bool(flags & USES))
        state.publish(record)
        if record.keys:
            member.reservations[number] = record
        granted(record)
        self.memory.named(record.keys, record.indices, tenant_digest(record.tenant))
        try:
            state.fill(record)
        except Exception as error:  # noqa: BLE001  # a policy's, and the member has its answer; the next call repairs
            LOGGER.warning("the policy of a shared pool: %s", reason(error))
        else:
            if not record.keys:
                state.settle(record, well=True)
        return record

    @guarded
    def take(self, given: tuple[Holdings, int, list[bytes], bool]) -> list[int]:
        """Hold the leading keys that are ready, or with `pending` that the member itself is storing. Returns their
        entries. `given`: member, number, keys, pending.
        """
        member, number, keys, pending = given
        table = self._state.table
        found = leading(table, keys)
        if table.pending:
            own = {None, *member.reservations.values()} if pending else {None}
            waiting = (place for place, key in enumerate(keys[:found]) if table.pending.get(key) not in own)
            found = next(waiting, found)
        return self._hold(member, number, keys[:found])

    @guarded
    def take_each(self, given: tuple[Holdings, int, list[bytes]]) -> list[int]:
        """Hold the keys that are ready. Returns for each its entry, `MISSING`, or `STORING`."""
        member, number, keys = given
        of, pending, own = self._state.table.of, self._state.table.pending, set(member.reservations.values())
        ready = [key for key in keys if key in of and key not in pending]
        found = dict(zip(ready, self._hold(member, number, ready), strict=True))
        return [found.get(key, STORING if pending.get(key) in own else MISSING) for key in keys]

    def _hold(self, member: Holdings, number: int, keys: list[bytes]) -> list[int]:
        """Hold keys that have entries, also pending ones. Under the lock."""
        if not keys:
            return []
        state = self._state
        state.proposed = record = LeaseRecord(keys, list(map(state.table.of.__getitem__, keys)), ())
        state.begin(record)
        member.leases[number] = record
        self.memory.reading(record.indices, member.number)
        member.marked.update(record.indices)
        return record.indices

    def end(self, member: Holdings, number: int, *, well: bool, unfit: Sequence[int] = ()) -> None:
        """End what the member holds under the number, and remove its keys of `unfit` entries. Numbers that it holds
        nothing under are ignored.
        """
        record = member.reservations.get(number)
        if unfit and (holding := record or member.leases.get(number)) is not None:

            def decline(state: CacheState) -> None:
                state.decline_unfit(holding, frozenset(unfit))
                state.consistent = True

            locked(self._records, decline)
        if record is not None:
            (self._records.commit if well else self._records.abort)(record)
            del member.reservations[number]
        lease = member.leases.pop(number, None)
        if lease is not None:
            self._records.release(lease)
            if not member.leases or len(member.marked) > _MOST_MARKED:
                still = {entry for each in member.leases.values() for entry in each.indices}
                before = self._granted_before(member.number) if self.inherited or self.gone else set()
                self.memory.read(member.marked - still - before, member.number)
                member.marked = still

    def open_request(self, member: Holdings, number: int, session: str | None) -> None:
        while len(member.requests) >= MOST_REQUESTS:
            member.requests.pop(next(iter(member.requests)))
        member.requests[number] = self.index.open_request(tenant=member.tenant, session=session)

    def close_request(self, member: Holdings, number: int) -> None:
        request = member.requests.pop(number, None)
        if request is not None:
            request.end()

    def use(self, member: Holdings, request: int, keys: list[bytes]) -> None:
        opened = member.requests.get(request)
        self._records.use((keys, None if opened is None else opened._record))

    def counts(self) -> dict[str, int]:
        statistics = self.index.statistics()
        names = ("resident", "pending", "pinned", "evicted")
        return {name: getattr(statistics, name) for name in names}

    def close(self) -> None:
        self.index.close(1.0)
        self._state.journal = None  # else the memory would be mapped until cycles are collected
        self.memory.close()


def _hold(state: CacheState, users: dict[int, list[int]]) -> dict[int, LeaseRecord]:
    """Hold the entries of each user, with a key or without."""
    held, table = {number: LeaseRecord([], entries, ()) for number, entries in users.items()}, state.table
    state.consistent = False
    most = max((entry for entries in users.values() for entry in entries), default=-1)
    table.pool_of.extend([0] * (most + 1 - len(table.pool_of)))
    table.leases.update(held.values())
    state.repair()
    return held


@lru_cache(64)
def tenant_digest(tenant: str) -> bytes:
    return blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def meaning_of(fingerprint: bytes, identity: str, row_bytes: int, *, nbytes: int = 0, capacity: int = 0) -> Meaning:
    """With `nbytes`, of as many entries as fit."""
    digest = blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    meaning = Meaning(capacity or max(0, nbytes // (row_bytes + 1)), row_bytes, fingerprint, digest)
    while not capacity and meaning.capacity and meaning.nbytes > nbytes:
        over = meaning.nbytes - nbytes
        meaning = meaning._replace(capacity=max(0, meaning.capacity - -(-over // (row_bytes + 128))))
    return meaning


_CODES = {Status.MISS: 0, Status.HIT: 1, Status.PENDING: 2}

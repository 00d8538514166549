"""Region: the owner's side of members that share keys: their memory, the index of it, and what they hold."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from kvoffload.cache.entries import LeaseRecord, ReservationRecord
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.record_calls import locked
from kvoffload.cache.reservations import CacheRequest
from kvoffload.cache.state import CacheState
from kvoffload.cache.weights import lost_namespace, namespace_digest, split_namespace
from kvoffload.errors import CapabilityError, CapacityError
from kvoffload.internal.checks import reason
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import begin_thread, new_lock, run_outside
from kvoffload.pool.messages import DATAGRAM_BYTES, Assembler, datagrams
from kvoffload.pool.pool_memory import HEADER, MEMBERS, OWNER, PAGE, Meaning, PoolMemory

if TYPE_CHECKING:
    from kvoffload.cache.pools import RequestRecord
    from kvoffload.cache.tiering.promotion import Promotion

MOST_REMOVALS = 64  # of a region, that wait or are under way
TAKING_SECONDS = 1.0  # after a promotion's deadline: until then the member takes what that brought, or waits no more
_MOST_OUTGOING = 64 << 20  # bytes that a member has not read yet

MakeIndex = Callable[[PoolMemory], CacheIndex]
Step = Callable[[], object]


class Alive:
    """A member that has gone, or was of the last owner, as a transfer that may still touch entries. A `Completion`.

    Attributes:
        marked: entries whose headers say that it may read them.
        finished: no process holds the member's lock any more, or the member is back and has said that it has ended.
    """

    error = None

    def __init__(self) -> None:
        self.marked: set[int] = set()
        self.finished = False


class Member:
    """A connection of a process, and what that has of a region. Of the owner's thread, but for `answer_later`.

    Args:
        watched: descriptors that `epoll` watches: the connection's; and the process (a pidfd), if it can be seen here.
        post: has the owner's thread do something.

    Attributes:
        files: descriptors that came with its JOIN: of the memory that it brings.
        join: number of its JOIN; -1: it has not asked to join.
        asked: what its JOIN said.
        key: of the region that it wants, once that is known.
        notice: when it hears next that its region is still being made.
        region: once it has joined.
        number: the member's, and its lock's. Processes of one engine share it.
        tenant: of all its calls, its namespace since it has named its weights.
        reservations, leases: by the number of the message that asked for them.
        requests: by the member's number for them.
        promotions: hold keys until it takes some, once they have ended, and not for long.
        marked: entries whose headers say that it may read them.
    """

    def __init__(
        self, connection: socket.socket, watched: list[int], epoll: select.epoll, post: Callable[[Step], object]
    ) -> None:
        self.connection, self.watched = connection, watched
        self._epoll, self._post = epoll, post
        self.assembler = Assembler()
        self._outgoing: deque[bytes] = deque()
        self.files = list[int]()
        self.join = -1
        self.asked: dict[str, Any] = {}
        self.key: tuple[bytes, bytes, int] | None = None
        self.notice = 0.0
        self.region: Region | None = None
        self.number, self.tenant = -1, ""
        self.reservations: dict[int, ReservationRecord] = {}
        self.leases: dict[int, LeaseRecord] = {}
        self.requests: dict[int, CacheRequest] = {}
        self.promotions: list[Promotion] = []
        self.marked: set[int] = set()
        self.gone = False

    @property
    def engine(self) -> str:
        """Name of the engine, if several processes form it and each has joined; "" for an engine of one process."""
        return str(self.asked.get("engine", ""))

    def opened(self, number: int) -> RequestRecord | None:
        """Return the member's open request with this number; None: it has none."""
        request = self.requests.get(number)
        return None if request is None else request._record

    def answer(self, number: int, kind: int, payload: bytes) -> None:
        """Send an answer, or keep it until there is room. A member that does not read is cut off."""
        if self.gone:
            return
        before = len(self._outgoing)
        self._outgoing.extend(datagrams(number, kind, payload))
        if not before and not self.flush():
            self._epoll.modify(self.connection, select.EPOLLIN | select.EPOLLOUT)
        if len(self._outgoing) * DATAGRAM_BYTES > _MOST_OUTGOING:
            LOGGER.warning("a member of a shared pool is cut off: it does not read its answers")
            self._outgoing.clear()
            self.connection.shutdown(socket.SHUT_RDWR)  # which the owner's thread sees as its end

    def answer_later(self, number: int, kind: int, payload: bytes) -> None:
        """As `answer`, from any thread."""
        self._post(partial(self.answer, number, kind, payload))

    def flush(self) -> bool:
        """Send the answers that are kept. Returns whether all are sent."""
        try:
            while self._outgoing:
                self.connection.send(self._outgoing[0])
                self._outgoing.popleft()
        except BlockingIOError:
            return False
        except OSError:  # reading finds that it has ended
            self._outgoing.clear()
        return True

    def release_promotions(self, until: float, *, ended: bool = False) -> None:
        """Release promotions with a deadline up to then, by `time.monotonic`; with `ended`, also all that have ended.
        Another thread of the member may wait for the rest.
        """
        for promotion in list(self.promotions):
            if (promotion._record.deadline or 0.0) <= until or (ended and promotion.done):
                self.promotions.remove(promotion)
                promotion.release()


@contextmanager
def survived() -> Iterator[None]:
    """Go on if a policy raises; the next call repairs it."""
    try:
        yield
    except BaseException as error:  # noqa: BLE001  # SystemExit, too
        LOGGER.warning("the policy of a shared pool: %s", reason(error))


class Removals:
    """Removals of a region, which one thread does in order; it ends when there are none."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._steps: deque[Step] = deque()

    def add(self, step: Step) -> bool:
        """Have the thread run a step. Returns False, and runs nothing, if too many wait."""
        with self._lock:
            waiting = len(self._steps)
            if waiting >= MOST_REMOVALS:
                return False
            if not waiting:
                begin_thread("kvoffload-pool-remove", self._work)
            self._steps.append(step)
        if waiting + 1 == MOST_REMOVALS:
            LOGGER.warning("%d removals wait for tiers of a shared pool: more do nothing until one ends", waiting + 1)
        return True

    def _work(self) -> None:
        while True:
            with self._lock:
                step = self._steps[0]
            step()
            with self._lock:
                del self._steps[0]
                if not self._steps:
                    return


class Region:
    """Memory, index, and the members that are there.

    Args:
        memory: closed with the region, also if this raises; later, if a tier is still at work on it.
        make_index: makes the index, with the owner's tiers.
        adopts: the memory is of an owner that has ended, and has the keys that its headers say.

    Raises BlockingIOError: that owner, or a tier of it, has not ended. Also what `make_index` raises.

    Attributes:
        gone: members that have gone, or were of the last owner, and may still touch entries, by their numbers.
        writer: the number of the member for whom entries are reserved.
    """

    _check_usable: Callable[[], None] | None = None

    def __init__(self, memory: PoolMemory, make_index: MakeIndex, *, adopts: bool = False) -> None:
        self.memory = memory
        self.members: set[Member] = set()
        self.removals = Removals()
        self.gone: dict[int, Alive] = {}
        self.writer, self._sequence = OWNER, 0
        self.filled, self.removed = memory.ready, memory.gone  # with `reserved` the index's journal
        with ExitStack() as opened:
            opened.callback(memory.close)
            memory.lock(OWNER)
            self.index = make_index(memory)
            opened.callback(self.index.close, 1.0)
            self.records, self._state = self.index.records, self.index._state
            self.has_tiers = self.index._tiers is not None
            if adopts:
                self._read_headers()
            opened.pop_all()
        self._state.journal = self

    def _read_headers(self) -> None:
        def hold(state: CacheState) -> None:
            """Lease the entries of each user, with a key or without."""
            state.consistent = False
            for alive in self.gone.values():
                lease = LeaseRecord([], list(alive.marked), ())
                lease.jobs, lease.released = (alive,), True
                state.table.leases.add(lease)
                most = max(alive.marked)
                state.table.pool_of.extend([0] * (most + 1 - len(state.table.pool_of)))
            state.repair()

        memory, found = self.memory, self.memory.found()
        for number in filter(memory.locked, range(MEMBERS)):
            alive = Alive()
            alive.marked.update(entry for entry, bits in found.users.items() if bits >> number & 1)
            if alive.marked:
                self.gone[number] = alive
        tenants = {tenant_digest(name): name for name in self._state.pools.by_tenant}
        named = [tenants.get(digest) or lost_namespace(digest) for digest in found.tenants]
        self.index.restore(found.keys, found.entries, found.sequences, tenants=named)
        self._sequence = int(found.sequences[-1]) if found.keys else 0
        locked(self.records, hold)
        memory.gone(set(range(memory.meaning.capacity)).difference(self._state.table.of.values()))  # other keys

    @property
    def waits(self) -> bool:
        """Whether entries are in quarantine, or held until a member takes them."""
        return bool(self._state.awaited or any(member.promotions for member in self.members))

    def reserved(self, record: ReservationRecord) -> None:
        """Write headers before a record's entries are written. The index calls it under its lock."""
        if len(record.victim_indices) > len(record.indices):
            self.memory.gone(record.victim_indices[len(record.indices) :])  # which no new key takes
        if record.indices:
            self._sequence += 1
            self.memory.reserved(record.indices, self._sequence, OWNER if record.promoted else self.writer)
            if record.promoted:
                self.memory.named(record.keys, record.indices, tenant_digest(record.tenant))

    def keep_weights(self) -> None:
        """Let the keys of weights that no member uses go first."""
        indexing = [member for member in self.members if not member.engine or "processes" in member.asked]
        names = frozenset(split_namespace(member.tenant)[1] for member in indexing)
        self.records.keep_weights(names)
        if self.index._tiers is not None:
            self.index._tiers.keep_weights(names)

    # members ------------------------------------------------------------------------------------------------------

    def of_engine(self, name: str) -> list[Member]:
        """Return the processes of an engine that have joined."""
        return [member for member in self.members if name and member.engine == name]

    def copying_for(self, name: str) -> int:
        """Count the processes of an engine that have joined, without the one with its index."""
        return sum("processes" not in each.asked for each in self.of_engine(name))

    def number_for(self, member: Member, old: int | None) -> int:
        """Choose the number of a member that joins: that of its engine's other processes, or one that no member has,
        and no process the lock of.

        Args:
            old: that a member with the memory of the last owner has.

        Raises CapacityError, CapabilityError, ValueError.
        """
        self.settle()  # else a quarantine that is over would last until the next member with this number has ended
        beside = self.of_engine(member.engine)
        if "processes" in member.asked and any("processes" in each.asked for each in beside):
            raise ValueError(f"an engine named {member.engine:.80} is there already: give each a name of its own")
        numbers = {each.number for each in self.members.difference(beside)}
        free = (each for each in range(OWNER) if each not in numbers | self.gone.keys())
        if old is None:
            old = beside[0].number if beside else next((each for each in free if not self.memory.locked(each)), None)
        if old is None or old in numbers:
            raise CapacityError("the region has as many members as it can, 63, or processes of theirs are left")
        if any(each.number != old for each in beside):
            raise CapabilityError(f"processes of the engine {member.engine:.80} have joined under another number")
        return old

    def leave(self, member: Member, *, dead: bool) -> None:
        """Take out a member that has gone. What it was writing stays in quarantine until nothing of it can write any
        more. So does what it was reading, unless it is `dead`: it may have lost its connection alone.
        """
        self.members.discard(member)
        member.release_promotions(float("inf"))
        known: Any = self.gone.get(member.number)
        if (member.leases or member.reservations) and known is None:
            self.gone[member.number] = known = Alive()
        if known is not None:
            known.marked |= member.marked
        for lease in member.leases.values():
            lease.jobs = () if dead else (known,)
            with survived():
                self.records.release(lease)
        for record in member.reservations.values():
            with survived():
                self.records.abort_after(record, (known,))
        member.requests.clear()  # they end as dropped ones do
        self.keep_weights()
        self.settle()  # its lock is free, if its process has ended

    def settle(self) -> None:
        """End quarantines whose reason has gone, and promotions that no member has taken anything from."""
        for member in self.members:
            member.release_promotions(time.monotonic() - TAKING_SECONDS)
        for number in [number for number in self.gone if not self.memory.locked(number)]:
            self.end_quarantine(number)
        self.records.settle_ended(None)

    def end_quarantine(self, number: int) -> None:
        """Free the entries kept for a member. It uses nothing any more that it got before it joined, from the last
        owner or from this one.
        """
        alive = self.gone.pop(number, None)
        if alive is not None:
            alive.finished = True
            members = [member for member in self.members if member.number == number]
            still = {entry for each in members for lease in each.leases.values() for entry in lease.indices}
            self.memory.read(alive.marked - still, number)

    def unmark(self, member: Member) -> None:
        """Take the member's mark from headers of entries that it does not read any more. It may still read what it has
        leased, and what was granted before it joined, which the next owner must know.
        """
        still = {entry for lease in member.leases.values() for entry in lease.indices}
        alive = self.gone.get(member.number)
        before = set[int]() if alive is None else alive.marked
        self.memory.read(member.marked - still - before, member.number)
        member.marked = still

    def counts(self) -> dict[str, Any]:
        meaning, statistics = self.memory.meaning, self.index.statistics()
        whole = {"name": meaning.name, "nbytes": meaning.nbytes, "capacity": meaning.capacity}
        counted = {name: getattr(statistics, name) for name in ("resident", "pending", "pinned", "evicted")}
        return {**whole, "members": len(self.members), **counted}

    def close(self) -> None:
        if run_outside(self.index.close, 1.0):
            self._release()
            return
        LOGGER.warning("a tier of a shared pool hangs: the next owner gets the memory once its calls have ended")
        begin_thread("kvoffload-pool-region", self._release)

    def _release(self) -> None:
        # A tier may still read and write rows, which headers must say.
        while not run_outside(self.index.close, 1.0):
            time.sleep(0.1)
        self._state.journal = None  # else the memory would be mapped until cycles are collected
        self.memory.close()


@lru_cache(64)
def tenant_digest(tenant: str) -> bytes:
    return namespace_digest(tenant) or blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def meaning_of(fingerprint: bytes, identity: str, row_bytes: int, *, nbytes: int = 0) -> Meaning:
    """Describe a region of as many entries as fit into `nbytes`."""
    digest = blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    most = max(0, (nbytes - PAGE) // (row_bytes + HEADER.size))
    meaning = Meaning(most, row_bytes, fingerprint, digest)
    return meaning if meaning.nbytes <= nbytes else meaning._replace(capacity=max(0, most - 1))  # headers fill pages

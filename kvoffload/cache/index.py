"""CacheIndex: which key lies in which entry, and who may read, fill or displace it. No device, no bytes.

    free ──reserve──> pending ──commit──> ready ──given up, removed──> free
                         └──abort, removed──────────────────────────────^

An entry that is leased, or being filled when its key is removed, is free only once that has ended. Where a call raises,
nothing has changed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from kvoffload.cache.admission import Namespace, Pool, Pools, ReuseFilter
from kvoffload.cache.entries import EntryTable, check_keys
from kvoffload.cache.policies import DEFAULT_POLICY, Policy, Protected
from kvoffload.cache.recorder import Journal
from kvoffload.cache.reservations import Lease, Proposal, Reservation, Stage, Status
from kvoffload.engine.job import Job, JobGroup
from kvoffload.engine.statistics import CacheEvent, CacheStatistics
from kvoffload.errors import CapacityError, MissingKeyError
from kvoffload.internal.checks import at_least


class CacheIndex:
    """The bookkeeping of a prefix cache. Usable from any thread.

    Args:
        capacity: keys that it holds.
        policy: what gives way: "prefix", "lru", "arc", "s3fifo", a `policies.Policy`, or a function that makes one for
            so many keys.
        namespaces: quotas and priorities by namespace; see `Namespace`.
        store_after: a key is stored only after so many lookups that missed it; 0: at once.
        max_load_blocks: `lookup` reports no more hits than this; None: all. (Loading a very long prefix delays whatever
            else waits for the link.)
        on_event: is called with a `CacheEvent` for what has happened, one at a time and in the order in which it did,
            by a thread whose call of this cache has come to its end, outside the lock.
        lock: to share.
        check_usable: is called before the lock is taken, and may raise.
        num_groups: slots of an entry.

    Raises:
        ValueError, TypeError: bad arguments.
    """

    def __init__(
        self,
        capacity: int,
        *,
        policy: str | Policy | Callable[[int], Policy] = DEFAULT_POLICY,
        namespaces: Mapping[str, Namespace] | None = None,
        store_after: int = 0,
        max_load_blocks: int | None = None,
        on_event: Callable[[CacheEvent], None] | None = None,
        lock: threading.RLock | None = None,
        check_usable: Callable[[], None] = lambda: None,
        num_groups: int = 1,
    ) -> None:
        self.capacity = at_least("capacity", capacity, 1)
        self.max_load_blocks = None if max_load_blocks is None else at_least("max_load_blocks", max_load_blocks, 1)
        self.num_groups = num_groups
        self._pools = Pools(policy, namespaces or {}, self.capacity)
        self._filter = ReuseFilter(store_after, self.capacity)
        self._entries = EntryTable(self.capacity)
        self._pending: dict[bytes, Reservation] = {}
        self._reservations: set[Reservation] = set()  # not settled
        self._leases: set[Lease] = set()  # not released
        self._journal = Journal(self.capacity, on_event)
        self.lock = threading.RLock() if lock is None else lock
        self._check_usable = check_usable
        self._depth = 0  # calls of this index within each other

    # asking -------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are present and ready, at most `max_load_blocks`. Changes no recency: see `touch`."""
        check_keys(keys)
        with self.guarded():
            return self._lookup(keys)

    def lookup_many(self, requests: Sequence[Sequence[bytes]]) -> list[int]:
        """`lookup` for each of several requests, at one moment."""
        for keys in requests:
            check_keys(keys)
        with self.guarded():
            return [self._lookup(keys) for keys in requests]

    def status(self, keys: Sequence[bytes]) -> list[Status]:
        """What is known of each key."""
        check_keys(keys)
        with self.guarded():
            return [
                Status.MISS if key not in self._entries.of else Status.PENDING if key in self._pending else Status.HIT
                for key in keys
            ]

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that a request with these keys has ended.

        Call it once per request, at its end, with all of its keys in their order, also those that were not found: then
        recency and frequency follow requests, not the order in which copies happened to complete.
        """
        check_keys(keys)
        with self.guarded():
            used = list(dict.fromkeys(keys))
            entries = [entry for entry in map(self._entries.of.get, used) if entry is not None]
            self._journal.note_touched(np.array(entries, dtype=np.int64), len(used))
            for pool, mine in self._pools.split(self._entries.originals(used), self._pool_number):
                pool.policy.touch(mine)

    # filling ------------------------------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[bytes], namespace: str = "") -> Reservation:
        """Take entries for those keys that are neither present nor on their way.

        Entries that hold nothing go first, then keys are given up: as many as are needed or none. Keys among `keys`,
        pending ones and leased ones are not given up.

        Args:
            keys: bytes, no repeats, in the order of the request: each needs those before it. May be a whole request's
                keys: what is present is skipped, and kept.
            namespace: whose quota and priority they have.

        Raises:
            CapacityError: not enough keys may be given up.
            LayoutError: `keys` repeats a key, or is not a list of bytes.
            Nothing has changed in any of these cases.
        """
        check_keys(keys, repeats=False)
        with self.guarded():
            return self.take(self.propose(keys, namespace))

    def propose(self, keys: Sequence[bytes], namespace: str) -> Proposal:
        """What `reserve` would do; under the lock. Changes nothing, raises as `reserve`."""
        of, free = self._entries.of, self._entries.num_free
        missing = [key for key in keys if key not in of]
        present = [key for key in keys if key in of] if len(missing) < len(keys) else []
        pool = self._pools.of(namespace)
        new = pool.within_quota(self._filter.passing(missing), present, self._pool_number)
        space = self._pools.make_space(pool, new, free, self._protected(present))
        if space is None:
            raise CapacityError(
                f"{len(new)} keys find {free} entries free (capacity {self.capacity}), and too few of {len(self)} may "
                "be given up: others are the request's own, in use, or of a namespace with a quota or higher priority"
            )
        admitted = new[: space.admitted]
        chosen = set(admitted)
        return Proposal(
            pool=pool,
            namespace=namespace,
            keys=admitted,
            positions=[place for place, key in enumerate(keys) if key in chosen],
            draw=self._entries.draw(space.admitted, (key for _, victims in space.victims for key in victims)),
            victims=space.victims,
            declined=[key for key in missing if key not in chosen] if len(admitted) < len(missing) else [],
            present=present,
        )

    def _protected(self, present: list[bytes]) -> Protected:
        """What says of a resident key whether it has to stay for a request with these resident keys."""
        of, held, request = self._entries.of, self._entries.holds, set(present)
        if not request and not held:
            return lambda _: False
        return lambda key: key in request or of[key] in held

    def take(self, proposal: Proposal) -> Reservation:
        """Carry a proposal out; under the lock, and nothing may have changed since it was made."""
        for pool, victims in proposal.victims:
            self._evict(pool, victims)
        self._entries.fill(proposal.keys, proposal.draw, proposal.pool.number)
        proposal.pool.policy.insert(proposal.keys)
        self._journal.note_taken(proposal.draw.indices)
        reservation = Reservation(
            self,
            keys=tuple(proposal.keys),
            positions=tuple(proposal.positions),
            indices=tuple(proposal.draw.indices),
            evicted=tuple(key for _, victims in proposal.victims for key in victims),
            declined=tuple(proposal.declined),
            present=tuple(proposal.present),
            namespace=proposal.namespace,
        )
        self._reservations.add(reservation)
        self._pending.update(dict.fromkeys(reservation.keys, reservation))
        self._journal.note("declined", reservation.declined, reservation.namespace)
        return reservation

    def commit(self, reservation: Reservation, jobs: tuple[Job, ...] = ()) -> None:
        """See `Reservation.commit`."""
        with self.guarded():
            reservation.check_open()
            if jobs:
                reservation.stage, reservation.jobs = Stage.SETTLING, jobs
                group = JobGroup()
                for job in jobs:
                    group.boarded(job)
                    job.tell(group)
                group.submitted(lambda failed: self.settle(reservation, well=not failed))
            else:
                self.settle(reservation, well=True)

    def abort(self, reservation: Reservation) -> None:
        """See `Reservation.abort`."""
        with self.guarded():
            reservation.check_open()
            self.settle(reservation, well=False)

    def settle(self, reservation: Reservation, *, well: bool) -> None:
        """Nothing fills these entries any more; under the lock."""
        reservation.stage = Stage.COMMITTED if well else Stage.ABORTED
        self._reservations.remove(reservation)
        removed = reservation.keys_removed
        mine = [key for key in reservation.keys if key not in removed] if removed else list(reservation.keys)
        for key in mine:
            del self._pending[key]
        if well:
            entries = [self._entries.of[key] for key in mine] if removed else reservation.indices
            self._journal.note_stored(mine, entries, reservation.namespace)
            self._filter.forget(mine)
        else:
            self._part(mine)
            self._journal.note("failed", mine, reservation.namespace)
        self._entries.let_go(reservation.indices)

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
        check_keys(keys)
        with self.guarded():
            awaited = [self._check_readable(position, key, pending) for position, key in enumerate(keys)]
            indices = tuple(self._entries.of[key] for key in keys)
            self._entries.hold(set(indices))
            sources = dict.fromkeys(reservation for reservation in awaited if reservation is not None)
            lease = Lease(self, tuple(keys), indices, tuple(sources))
            self._leases.add(lease)
            return lease

    def load(self, keys: Sequence[bytes]) -> None:
        """Note that a request loads those of these keys that are here: they are in use, before its `touch` says so."""
        check_keys(keys)
        with self.guarded():
            used = self._entries.originals(key for key in dict.fromkeys(keys) if key in self._entries.of)
            for pool, mine in self._pools.split(used, self._pool_number):
                pool.policy.load(mine)

    def release(self, lease: Lease) -> None:
        """See `Lease.release`."""
        with self.guarded():
            self.end(lease)

    def end(self, lease: Lease, *, loaded: bool = False) -> None:
        """`release` for who has the lock; `loaded`: a transfer has brought all of its blocks to the device."""
        if not lease.released:
            lease.released = True
            self._leases.remove(lease)
            self._entries.let_go(set(lease.indices))
            self._journal.note_loaded(len(lease.keys) if loaded else 0)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Take keys out; how many were there. Entries in use are free when that has ended; reservations go nowhere."""
        check_keys(keys)
        with self.guarded():
            gone = [key for key in dict.fromkeys(keys) if key in self._entries.of]
            for key in gone:
                if key in self._pending:
                    self._pending.pop(key).keys_removed.add(key)
            self._part(gone)
            self._journal.note("removed", gone)
            return len(gone)

    def clear(self) -> int:
        """Take all keys out, as `remove` does."""
        with self.guarded():
            return self.remove(self.keys)

    def statistics(self) -> CacheStatistics:
        """Counts now and since the cache was made."""
        with self.guarded():
            return CacheStatistics(
                capacity=self.capacity,
                resident=len(self._entries) - len(self._pending),
                pending=len(self._pending),
                pinned=self._pinned(),
                residency_seconds=self._journal.residency_seconds,
                reuse_distance_blocks=self._journal.reuse_distance_blocks,
                **self._journal.counts(),
            )

    def check(self) -> None:
        """Verify the invariants; meant for tests and for a bad day.

        Raises:
            AssertionError: one does not hold; the message says which.
        """
        with self.guarded():
            self._entries.check()
            self._pools.check(list(self._entries.of), self._pool_number)
            assert self._pending.keys() <= self._entries.of.keys(), "what is pending has an entry"
            assert set(self._pending.values()) <= self._reservations, "what is pending will be settled"
            holders = [index for holder in self._reservations | self._leases for index in set(holder.indices)]
            assert self._entries.holds == Counter(holders), "entries are held by reservations and leases alone"

    @property
    def keys(self) -> list[bytes]:
        """All keys, ready or pending."""
        return list(self._entries.of)

    @property
    def busy(self) -> bool:
        """Whether anybody may read or fill an entry."""
        return bool(self._reservations or self._leases)

    @property
    def settling(self) -> list[Reservation]:
        """Reservations that wait for transfers."""
        return [each for each in self._reservations if each.stage is Stage.SETTLING]

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"CacheIndex({self.describe()})"

    def describe(self) -> str:
        """The state in a line; takes no lock, so that it can be shown from anywhere."""
        counts = f"{len(self._pending)} pending, {len(self._leases)} leases"
        return f"{len(self)} of {self.capacity} keys, {counts}; {self._pools}"

    # inner workings, under the lock -------------------------------------------------------------------------------

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """The lock; what has happened is told when the outermost call that took it this way has given it back."""
        self._check_usable()
        depth = None
        try:
            with self.lock:
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth = depth = self._depth - 1
        finally:
            if depth == 0:
                self._journal.tell()

    def _lookup(self, keys: Sequence[bytes]) -> int:
        found = self._entries.leading(keys)
        if self._pending:
            found = next((place for place, key in enumerate(keys[:found]) if key in self._pending), found)
        self._filter.note(key for key in keys[found:] if key not in self._entries.of)
        found = found if self.max_load_blocks is None else min(found, self.max_load_blocks)
        self._journal.note_lookup(keys, found)
        return found

    def _check_readable(self, position: int, key: bytes, pending: bool) -> Reservation | None:
        """None if the key is ready, or the reservation to wait for."""
        reservation, name = self._pending.get(key), f"keys[{position}] ({key.hex()[:16]})"
        if key not in self._entries.of:
            raise MissingKeyError(f"{name} is not in the cache; load only what lookup() found")
        if reservation is not None and not pending:
            raise MissingKeyError(f"{name} is still being stored; load only what lookup() found")
        if reservation is not None and not reservation.jobs:
            raise MissingKeyError(f"{name} is reserved, and no transfer that fills it is known yet")
        return reservation

    def _evict(self, pool: Pool, victims: list[bytes]) -> None:
        if victims:
            pool.policy.remove(victims, evicted=True)
            self._journal.note_evicted(victims, self._entries.give_up(victims))

    def _part(self, keys: Sequence[bytes]) -> None:
        """Keys that go for another reason than eviction lose their entries."""
        for pool, mine in self._pools.split(self._entries.originals(keys), self._pool_number):
            pool.policy.remove(mine, evicted=False)
        for key in keys:
            self._entries.part(key)

    def _pool_number(self, key: bytes) -> int | None:
        index = self._entries.of.get(key)
        return None if index is None else self._entries.pool_of[index]

    def _pinned(self) -> int:
        return len({index for lease in self._leases for index in lease.indices})

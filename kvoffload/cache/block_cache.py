"""BlockCache: keys to slots of an engine's pool.

A key becomes visible to `lookup` after its copy has completed, never before; a store that fails is never visible. A
slot is given to another key only when no transfer uses it. Where a call raises, nothing has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvoffload.cache.admission import Namespace
from kvoffload.cache.cache_job import CacheJob
from kvoffload.cache.entries import check_keys
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.policies import DEFAULT_POLICY, Policy
from kvoffload.cache.reservations import Lease, Reservation, Stage, Status
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job, JobGroup
from kvoffload.engine.statistics import CacheEvent, CacheStatistics
from kvoffload.errors import CapacityError, LayoutError
from kvoffload.layout.layout import Int64Array, as_ids
from kvoffload.planning.layer_groups import as_parts
from kvoffload.planning.transfer_plan import Direction

_Owner = tuple[weakref.ref["BlockCache"], weakref.ref[CacheIndex]]
_owners: weakref.WeakKeyDictionary[OffloadEngine, _Owner] = weakref.WeakKeyDictionary()


class BlockCache:
    """A prefix cache over the slots of an engine, which it takes for itself. Usable from any thread.

    A key stands for `blocks_per_slot` blocks of every group of the layout; see `kvoffload.chain_keys`. With several
    groups it takes one slot for each, and `blocks` is a sequence with one list of ids per group.

    A server's request:

        hits = cache.lookup(keys)
        cache.load(keys[:hits], blocks[:hits], after=stream).order_before(stream)
        ...                                                            # compute what is missing
        cache.store(keys, blocks, after=stream)                        # skips what is there
        cache.touch(keys)                                              # once, at its end

    Who moves the bytes by other means reserves slots, fills them and commits; or acquires a lease, reads, releases it.

    Args:
        engine: its slots must not be used otherwise.
        policy: what gives way when the cache is full: "prefix", "lru", "arc", "s3fifo", a `policies.Policy`, or a
            function that makes one for so many keys.
        namespaces: quotas and priorities by namespace; see `Namespace`.
        store_after: a key is stored only after so many lookups that missed it; 0: at once.
        max_load_blocks: `lookup` reports no more hits than this; None: all. (Loading a very long prefix delays whatever
            else waits for the link.)
        on_event: is called with a `CacheEvent` for what has happened, one at a time and in the order in which it did,
            by a thread whose call of this cache has come to its end, outside all locks.

    Raises:
        CapacityError: the engine has fewer slots than groups, or belongs to another cache.
        ValueError, TypeError: bad arguments.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        policy: str | Policy | Callable[[int], Policy] = DEFAULT_POLICY,
        *,
        namespaces: Mapping[str, Namespace] | None = None,
        store_after: int = 0,
        max_load_blocks: int | None = None,
        on_event: Callable[[CacheEvent], None] | None = None,
    ) -> None:
        self.engine = engine
        self._groups = engine.layout.num_groups
        self.capacity = engine.num_slots // self._groups
        if self.capacity == 0:
            raise CapacityError(f"{engine.num_slots} slots hold no key of {self._groups} groups; raise num_slots")
        if self._groups > engine.max_in_flight:
            raise CapacityError(
                f"a key of {self._groups} groups takes as many jobs, but max_in_flight is {engine.max_in_flight}"
            )
        self._index = CacheIndex(
            self.capacity,
            policy=policy,
            namespaces=namespaces,
            store_after=store_after,
            max_load_blocks=max_load_blocks,
            on_event=on_event,
            lock=engine.lock,
            check_usable=engine.device.check_process,
            num_groups=self._groups,
        )
        self._namespaces = dict(namespaces or {})
        self._claim_slots()

    def _claim_slots(self) -> None:
        with self.engine.lock:
            owner = _owners.get(self.engine)
            cache, index = (None, None) if owner is None else (owner[0](), owner[1]())
            if cache is not None or (index is not None and index.busy):
                raise CapacityError(
                    "the engine's slots belong to another BlockCache: delete that one first, end its reservations and "
                    "leases, or make a second engine"
                )
            _owners[self.engine] = (weakref.ref(self), weakref.ref(self._index))

    # asking -------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are present and ready, at most `max_load_blocks`. Changes no recency: see `touch`."""
        self.engine.advance()
        return self._index.lookup(keys)

    def lookup_many(self, requests: Sequence[Sequence[bytes]]) -> list[int]:
        """`lookup` for each of several requests, at one moment."""
        self.engine.advance()
        return self._index.lookup_many(requests)

    def status(self, keys: Sequence[bytes]) -> list[Status]:
        """Of each key whether it is missing, can be loaded, or is on its way."""
        self.engine.advance()
        return self._index.status(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that a request with these keys has ended.

        Call it once per request, at its end, with all of its keys in their order, also those that were not found: then
        recency and frequency follow requests, not the order in which copies happened to complete.
        """
        self._index.touch(keys)

    # moving bytes -------------------------------------------------------------------------------------------------

    def store(self, keys: Sequence[bytes], blocks: Any, after: Any = None, namespace: str = "") -> CacheJob:
        """Store the blocks of those keys that are neither present nor on their way; they can be loaded once it has
        ended.

        Entries that hold nothing go first, then the policy gives up keys: as many as are needed or none. Keys among
        `keys`, keys being stored and keys being loaded are not given up. Of new keys, those may be declined that are
        worth less than what they would displace, that were not looked up often enough, or that are beyond a quota.

        Args:
            keys: bytes, no repeats, in the order of the request. May be a whole request's keys: what is present is
                skipped, and kept.
            blocks: source ids, `blocks_per_slot` per key in the order of the keys (for each group).
            after: as for `OffloadEngine.store`.
            namespace: whose quota and priority the keys have.

        Returns:
            The job; its `keys` are those being stored.

        Raises:
            CapacityError: not enough keys may be given up, or the engine has no room for the transfer.
            LayoutError, and what `OffloadEngine.store` raises. Nothing has changed in any of these cases, but for one:
                if the driver fails between two groups of one call, the keys given up for it are gone.
        """
        per_group = self._block_ids(keys, blocks, repeats=False)
        after = self.engine.resolve(after)
        self.engine.advance()
        with self._index.guarded():
            proposal = self._index.propose(keys, namespace)
            self.engine.check_room(self._groups if proposal.keys else 0)
            if not proposal.keys:
                self._index.take(proposal).commit()
                return CacheJob((), ())
            transfer = JobGroup()
            indices = tuple(proposal.draw.indices)
            try:
                jobs = self._submit(
                    Direction.STORE, indices, [ids[proposal.positions] for ids in per_group], after, transfer
                )
            except BaseException:
                if transfer.any_boarded:  # the slots are spent: they become free when the copies into them have ended
                    transfer.submitted(partial(self._stored, self._index.take(proposal)), failed=True)
                raise
            reservation = self._index.take(proposal)
            reservation.stage, reservation.jobs = Stage.SETTLING, jobs
            transfer.submitted(partial(self._stored, reservation))
            return CacheJob(reservation.keys, jobs)

    def load(
        self,
        keys: Sequence[bytes],
        blocks: Any,
        after: Any = None,
        *,
        pending: bool = False,
        parts: int | Sequence[Sequence[int]] | None = None,
    ) -> CacheJob:
        """Load the blocks of keys that are all present and ready. Until it has ended they are not given up.

        Args:
            keys: bytes; repeats are legal.
            blocks: target ids, `blocks_per_slot` per key in the order of the keys (for each group), no repeats.
            after: as for `OffloadEngine.load`.
            pending: also load keys whose store has been submitted and has not ended: the GPU waits for it, the host
                does not. If such a store fails, so does the job's `wait`, and what was loaded is nobody's.
            parts: as for `OffloadEngine.load`, so that `job.order_before(stream, part=k)` need not wait for later ones.
                With several groups only a number, for each of them. Their jobs follow each other, so part k of the last
                group lands after all of those before it: for what needs one group,
                `job.jobs[group].order_before(stream, part=k)`.

        Raises:
            MissingKeyError: a key is absent or not ready.
            LayoutError, and what `OffloadEngine.load` raises. Nothing has changed in any of these cases.
        """
        per_group = self._block_ids(keys, blocks)
        self._check_parts(parts)
        after = self.engine.resolve(after)
        self.engine.advance()
        with self._index.guarded():
            lease = self._index.acquire(keys, pending=pending)
            transfer = JobGroup()
            try:
                self.engine.check_room(self._groups if keys else 0)
                jobs = self._submit(Direction.LOAD, lease.indices, per_group, after, transfer, parts) if keys else ()
            except BaseException:
                transfer.submitted(partial(self._loaded, lease), failed=True)
                raise
            transfer.submitted(partial(self._loaded, lease))
            self._index.load(keys)
            return CacheJob(lease.keys, jobs, lease.pending)

    # entries for other hands --------------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[bytes], namespace: str = "") -> Reservation:
        """Take slots for those keys that are neither present nor on their way; see `store`, which also copies.

        Whoever has the reservation writes `reservation.slots()` of every group, by `engine.store`, by `engine.slots` or
        otherwise, and commits it (`reservation.commit(job)`), or aborts it.

        Raises:
            CapacityError: not enough keys may be given up.
            LayoutError: `keys` repeats a key, or is not a list of bytes.
            ClosedError: the engine is closed.
            Nothing has changed in any of these cases.
        """
        self.engine.advance()
        self.engine.check_room(0)
        return self._index.reserve(keys, namespace)

    def acquire(self, keys: Sequence[bytes], *, pending: bool = False) -> Lease:
        """Hold the slots of keys that are all present and ready, until the lease is released; `pending` as for `load`.

        With `pending`, whoever reads the slots on the GPU first calls `lease.order_before(stream)`.

        Raises:
            MissingKeyError: a key is absent or not ready. Nothing has changed.
        """
        self.engine.advance()
        return self._index.acquire(keys, pending=pending)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Take keys out; how many were there. At once nobody finds them; slots in use are free when that has ended."""
        self.engine.advance()
        return self._index.remove(keys)

    def clear(self) -> int:
        """Take all keys out, as `remove` does."""
        self.engine.advance()
        return self._index.clear()

    # looking ------------------------------------------------------------------------------------------------------

    def statistics(self) -> CacheStatistics:
        """Counts now and since the cache was made."""
        self.engine.advance()
        return self._index.statistics()

    def check(self) -> None:
        """Verify the cache's invariants; meant for tests and for a bad day.

        Raises:
            AssertionError: one does not hold; the message says which.
        """
        with self._index.guarded():
            self._index.check()
            if self.engine.statistics().in_flight == 0:
                assert not self._index.settling, "nothing is on its way without a transfer"

    def __len__(self) -> int:
        return len(self._index)

    def __repr__(self) -> str:
        return f"BlockCache({self._index.describe()})"

    def _repr_html_(self) -> str:
        from kvoffload.observability.notebook import cache_card

        statistics = None if self.engine.device.foreign else self._index.statistics()
        return cache_card(self, statistics, self._index.describe(), self._namespaces)

    # inner workings -----------------------------------------------------------------------------------------------

    def _stored(self, reservation: Reservation, failed: bool) -> None:
        self._index.settle(reservation, well=not failed)

    def _loaded(self, lease: Lease, failed: bool) -> None:
        self._index.end(lease, loaded=not failed)

    def _block_ids(self, keys: Sequence[bytes], blocks: Any, *, repeats: bool = True) -> list[Int64Array]:
        """Per group an array of shape (keys, blocks_per_slot)."""
        check_keys(keys, repeats=repeats)
        layout = self.engine.layout
        lists = [blocks] if self._groups == 1 else list(blocks)
        if len(lists) != self._groups:
            raise LayoutError(f"blocks must hold one list of ids per group ({self._groups}), got {len(lists)}")
        per_group = []
        for group, ids in enumerate(lists):
            name = "blocks" if self._groups == 1 else f"blocks[{group}]"
            array = as_ids(name, ids, layout.groups[group].num_blocks)
            if len(array) != len(keys) * layout.blocks_per_slot:
                raise LayoutError(
                    f"{name} must hold {layout.blocks_per_slot} ids per key, {len(keys) * layout.blocks_per_slot} for "
                    f"{len(keys)} keys, got {len(array)}"
                )
            per_group.append(array.reshape(len(keys), layout.blocks_per_slot))
        return per_group

    def _submit(
        self,
        direction: Direction,
        indices: tuple[int, ...],
        per_group: list[Int64Array],
        after: Any,
        transfer: JobGroup,
        parts: int | Sequence[Sequence[int]] | None = None,
    ) -> tuple[Job, ...]:
        first = np.array(indices, dtype=np.int64) * self._groups
        return tuple(
            self.engine.submit(
                direction, ids.reshape(-1), first + group, group=group, after=after, listener=transfer, parts=parts
            )
            for group, ids in enumerate(per_group)
        )

    def _check_parts(self, parts: Any) -> None:
        """Raise what loads of all groups would raise, before there is one of any."""
        if self._groups > 1 and parts is not None and not isinstance(parts, int | np.integer):
            raise LayoutError(
                f"parts must be a number for a layout of {self._groups} groups, each of which is copied in so many; "
                f"got {parts!r:.80}"
            )
        for group in self.engine.layout.groups:
            as_parts(parts, len(group.planes))

"""CacheIndex: which key has which entry, and which entries are read, filled or evicted. No device, no bytes.

    free ──reserve──> pending ──commit──> ready ──evicted, removed──> free
                         └──abort, removed─────────────────────────────^

An entry that is leased, or being filled when its key is removed, is free only once that has ended. Where a call is
refused, nothing has changed; where an exception interrupts one, see `state`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from kvoffload.cache.entries import Status, check_keys
from kvoffload.cache.key_cache import KeyCache, KeyCacheOptions, Membership
from kvoffload.cache.policies import DEFAULT_POLICY, PolicyChoice
from kvoffload.cache.pools import Pool, Tenant, claimed
from kvoffload.cache.record_calls import locked
from kvoffload.cache.repair import rebuild
from kvoffload.cache.reservations import CacheRequest, record_of
from kvoffload.cache.state import CacheState
from kvoffload.cache.statistics import CacheEvent
from kvoffload.cache.weights import namespace_digest
from kvoffload.errors import LayoutError
from kvoffload.internal.checks import at_least
from kvoffload.internal.types import Int64Array, UInt8Array

if TYPE_CHECKING:  # what is imported where there are tiers
    from kvoffload.cache.tiering.attaching import WriteName
    from kvoffload.cache.tiering.tier import Tier

MOST_INSERTS = 4096  # of one pool's policy: many small requests are inserted together, which takes less time


class CacheIndex(KeyCache):
    """The bookkeeping of a prefix cache whose bytes you move yourself. Usable from any thread; a context manager.

    With tiers it serves a host whose index is in one process and whose engines are in others, one per device. Their
    slots lie in memory that all processes map, such as `SharedSlots`. You reserve an entry, have the engines store into
    that slot, and commit once all have; `acquire` holds the entries that they load. A thread of the index promotes keys
    that only a tier has:

        with index.promote(keys, deadline=0.2) as promotion:
            hits = promotion.wait()                                    # or poll `promotion.done`
            lease = index.acquire(keys[:hits])

    Entry `e` is slot `e` of every engine. A tier's record is one entry: row `e` of every pool, all or nothing.

    Args:
        capacity: keys that it holds, at most 2**32. With 0 every lookup misses, and every key is declined. Or a
            `SharedPool`, whose owner has the index: see `pool` of `BlockCache`.
        policy, tenants, store_after, max_load_blocks, on_event, tiers, write, hung: as for `BlockCache`.
        pools: with tiers, the slots of each engine, in an order that never changes: uint8, (capacity, bytes), as for
            `Tier.attach`. They must stay mapped until `close` has returned True.
        layout: 16 bytes that say what the rows of all pools mean, see `Tier.attach`; None only if no tier is durable or
            shared.
        seconds_per_key: seconds that computing the blocks of a key takes. Keys are not promoted if their tier, at its
            latest measured speed, would take longer. None: all are promoted.

    Attributes:
        capacity: keys that it holds.
        max_load_blocks: as given.
        lock: for integrations. Nearly every call takes it, for a moment. A call made while you hold it raises
            RuntimeError, or answers at once.
        records: for integrations, and may change: calls that take records in place of a `Reservation` or `Lease`.

    Raises:
        ValueError, TypeError: bad arguments.
        CapacityError: the memory for `capacity` keys cannot be allocated; there are tiers and no entries; or another
            cache is over the `SharedPool`.
        ClosedError: the `SharedPool` is closed.
        LayoutError: `pools` do not fit `capacity`, or are not as `Tier.attach` says.
        With tiers, also the errors of `Tier.attach`; close the tiers yourself then.
    """

    def __init__(
        self,
        capacity: SupportsIndex | Membership,
        *,
        policy: PolicyChoice = DEFAULT_POLICY,
        tenants: Mapping[str, Tenant] | None = None,
        store_after: int = 0,
        max_load_blocks: int | None = None,
        on_event: Callable[[CacheEvent], None] | None = None,
        tiers: Sequence[Tier] = (),
        pools: Sequence[UInt8Array] = (),
        layout: bytes | None = None,
        write: WriteName = "admitted",
        seconds_per_key: float | None = None,
        hung: float = 30.0,
    ) -> None:
        pool: Any = capacity if hasattr(capacity, "open") else None
        capacity = at_least("capacity", capacity if pool is None else pool.capacity, 0)
        below = None
        if tiers != ():
            from kvoffload.cache.tiering.attaching import TierPlan

            below = TierPlan.of(tiers, write, hung, seconds_per_key)
            if below is not None:
                below.check_pools(pools, capacity)
        with claimed(policy):
            options = KeyCacheOptions(policy, tenants, store_after, max_load_blocks, on_event)
            super().__init__(capacity, options, below=below, pool=pool)
            self.lock, self.records, self.max_load_blocks = self._state.lock, self._records, self._most_hits
            if below is not None:
                self._tiers = below.attach(self.records, pools, layout)

    @property
    def keys(self) -> list[bytes]:
        """All keys of the weights in use, ready or pending, in a new list without order.

        Raises:
            AttributeError: it is over a shared pool, which does not list its keys.
        """
        return list(self._weights.own(self._records.keys, self._weights.now.name))

    def load(self, keys: Sequence[bytes], *, request: CacheRequest | None = None) -> None:
        """Tell the policies that a request loads the keys that are ready or pending; others are passed over. Moves no
        bytes.

        Call it when the load begins, and `touch` when the request ends (an open request's `end` does that). To keep the
        keys from being evicted, `acquire`.

        Args:
            request: the open request that loads them. The keys belong to it from now on; keys that it had before are
                not counted again.

        Raises:
            LayoutError: `keys` is not a list of bytes.
            ClosedError, ValueError, TypeError: `request` has ended, is of another cache, or is not a CacheRequest.
            RuntimeError: called inside another call of the index, by a policy for example.
        """
        checked = check_keys(keys, tag=self._weights.now.tag)
        locked(self, lambda state: state.use(checked, None if request is None else record_of(request, state)))

    describe = KeyCache._describe

    def status_below(self, key: bytes) -> Status:
        """Return whether a tier of this index has a key that has no entry. HIT: a tier has it; PENDING: only asking a
        tier would tell, as `promote` does; MISS: no tier has it, or those that may have it failed lately and are not
        asked now. Without tiers always MISS; so it is over a shared pool, whose tiers are the owner's.

        It does not look whether the key has an entry. Counts nothing, never blocks; a hint.

        Raises:
            LayoutError: `key` is not bytes.
        """
        (key,) = check_keys([key], tag=self._weights.now.tag)
        askable = [] if self._tiers is None else [below for below in self._tiers.tiers if below.may_be_asked(key)]
        if any(below.local_index for below in askable):
            return Status.HIT
        return Status.PENDING if askable else Status.MISS

    def restore(
        self, keys: Sequence[bytes], entries: Int64Array, requests: Int64Array, *, tenants: Sequence[str] | None = None
    ) -> int:
        """Fill an index that has not held a key yet: each key becomes ready at the entry given, where its bytes must be
        already. For programs that find them there after a restart. Reports no event. The arguments are not kept.

        Args:
            keys: of weights without a name. The oldest request's first; within a request in its order.
            entries: a numpy array, int64, (keys,): different numbers below `capacity`.
            requests: a numpy array, int64, (keys,): the same number for keys of one request.
            tenants: the tenant of each key; a name that this index does not know stands for "". None: all "".

        Returns:
            How many keys the index has now: where a tenant has more than its quota, its oldest are left out.

        Raises:
            LayoutError, ValueError: a bad argument, or the index has held a key; nothing has changed.
            RuntimeError: called inside another call of the index, by a policy for example.
        """
        checked = check_keys(keys)
        return locked(self, lambda state: _restore(state, checked, entries, requests, tenants))


def _restore(
    state: CacheState, keys: list[bytes], entries: Int64Array, requests: Int64Array, tenants: Sequence[str] | None
) -> int:
    table = state.table
    if table.pool_of or table.reservations:
        raise ValueError("restore needs an index that has held no key yet; make another one")
    if not len(keys) == len(entries) == len(requests) == (len(keys) if tenants is None else len(tenants)):
        raise LayoutError(f"keys, entries, requests and tenants must be of one length; there are {len(keys)} keys")
    if not keys:
        return 0
    if entries.min() < 0 or entries.max() >= table.capacity or np.bincount(entries).max() > 1:
        raise LayoutError(f"entries must be different numbers in [0, {table.capacity})")
    for namespace in filter(namespace_digest, dict.fromkeys(tenants or ())):
        state.pools.of(namespace)  # each has a pool, which a later `use_weights` may bring back
    number_of = {name: pool.number for name, pool in state.pools.by_tenant.items()}
    shared = state.pools.of("").number
    if tenants is None:
        numbers = np.full(len(keys), shared, dtype=np.uint32)
    else:
        numbers = np.fromiter((number_of.get(name, shared) for name in tenants), np.uint32, len(keys))
    stays = np.ones(len(keys), dtype=bool)
    for pool in state.pools.all:
        if pool.max_blocks is not None:  # of a tenant whose quota was lowered the latest keys stay
            mine = np.flatnonzero(numbers == pool.number)
            stays[mine[: max(0, len(mine) - pool.max_blocks)]] = False
    kept = np.flatnonzero(stays)
    if len(kept) < len(keys):
        keys = [keys[place] for place in kept.tolist()]
        entries, requests, numbers = entries[kept], requests[kept], numbers[kept]
    of = dict(zip(keys, entries.tolist(), strict=True))
    if len(of) < len(keys):
        raise LayoutError("keys repeats a key; each key must be given once")
    pool_of = np.zeros(int(entries.max()) + 1 if len(entries) else 0, dtype=np.uint32)
    pool_of[entries] = numbers
    state.consistent = False
    table.pool_of = array("I", pool_of.tobytes())
    table.of = of
    rebuild(table)
    for pool in state.pools.all:
        _insert(pool, keys, requests, np.flatnonzero(numbers == pool.number))
    state.recorder.note_restored(entries)
    state.consistent = True
    return len(keys)


def _insert(pool: Pool, keys: list[bytes], requests: Int64Array, mine: Int64Array) -> None:
    """Tell a pool's policy its keys: request by request, or several at a time if they are many and small.

    Requests inserted together are given the latest first: in one call, the first keys are evicted last.
    """
    if not len(mine):
        return
    begins = np.r_[0, np.flatnonzero(np.diff(requests[mine])) + 1]  # of each request, among `mine`
    lengths = np.diff(np.r_[begins, len(mine)])
    step = -(-len(begins) // MOST_INSERTS)
    if step > 1:
        number = np.arange(len(begins))
        first = number // step * step
        order = np.minimum(first + step, len(begins)) - 1 - (number - first)  # backwards, `step` at a time
        ends = np.cumsum(lengths[order])
        mine = mine[np.repeat(begins[order] - ends + lengths[order], lengths[order]) + np.arange(len(mine))]
        begins = begins[::step]
    ordered = [keys[place] for place in mine.tolist()]
    pool.stale = True
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(mine)], strict=True):
        pool.policy.insert(ordered[begin:end])
    pool.stale = False

"""Filling an empty index with keys that are known already, such as those on a disk after a restart."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.cache.pools import Pool, Pools
from kvoffload.cache.repair import rebuild
from kvoffload.cache.state import CacheState
from kvoffload.errors import LayoutError
from kvoffload.internal.types import Int64Array

_MOST_INSERTS = 4096  # of one pool's policy: many small requests are inserted together, which takes less time


def restore(
    state: CacheState, keys: list[bytes], entries: Int64Array, requests: Int64Array, tenants: Sequence[str] | None
) -> int:
    """See `CacheIndex.restore`. The lock is held, and `enter` was called."""
    table = state.table
    if table.pool_of or table.reservations:
        raise ValueError("restore needs an index that has held no key yet; make another one")
    if not len(keys) == len(entries) == len(requests) == (len(keys) if tenants is None else len(tenants)):
        raise LayoutError(f"keys, entries, requests and tenants must be of one length; there are {len(keys)} keys")
    if not keys:
        return 0
    if entries.min() < 0 or entries.max() >= table.capacity or np.bincount(entries).max() > 1:
        raise LayoutError(f"entries must be different numbers in [0, {table.capacity})")
    numbers = _pool_numbers(state.pools, len(keys), tenants)
    kept = _within_quotas(state.pools, numbers)
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


def _pool_numbers(pools: Pools, count: int, tenants: Sequence[str] | None) -> npt.NDArray[np.uint32]:
    """The number of each key's pool; that of "" for tenants that the cache does not have any more."""
    shared = pools.by_tenant[""].number
    if tenants is None:
        return np.full(count, shared, dtype=np.uint32)
    number_of = {name: pool.number for name, pool in pools.by_tenant.items()}
    return np.fromiter((number_of.get(name, shared) for name in tenants), np.uint32, count)


def _within_quotas(pools: Pools, numbers: npt.NDArray[np.uint32]) -> Int64Array:
    """The places of the keys that stay: of a tenant whose quota was lowered the latest."""
    stays = np.ones(len(numbers), dtype=bool)
    for pool in pools.all:
        if pool.max_blocks is not None:
            mine = np.flatnonzero(numbers == pool.number)
            stays[mine[: max(0, len(mine) - pool.max_blocks)]] = False
    return np.flatnonzero(stays)


def _insert(pool: Pool, keys: list[bytes], requests: Int64Array, mine: Int64Array) -> None:
    """Have a policy know its keys: request by request, or, of many small requests, some at a time.

    Requests that are inserted together are given the latest first: what comes first in one call is evicted last.
    """
    if not len(mine):
        return
    begins = np.r_[0, np.flatnonzero(np.diff(requests[mine])) + 1]  # of each request, among `mine`
    lengths = np.diff(np.r_[begins, len(mine)])
    step = -(-len(begins) // _MOST_INSERTS)
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

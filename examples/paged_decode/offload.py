"""Stores conversations in a block cache after a turn; finds and loads them by their tokens before the next."""

from __future__ import annotations

from typing import Any

import kvoffload
from kvoffload.pool import SharedPool
from kvoffload.tiers import Tier, TierStatistics
from paged_decode.backend import Backend
from paged_decode.model import BLOCK_TOKENS
from paged_decode.timeline import Timeline


def complete_tokens(tokens: list[int]) -> int:
    """How many of a conversation's tokens are in complete blocks. The last token does not count: the next step computes
    its K and V."""
    return max(0, len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


Engine = kvoffload.OffloadEngine | kvoffload.ShardedEngine


def open_engine(
    backend: Backend,
    layout: kvoffload.KVLayout | kvoffload.ShardedLayout,
    num_slots: int,
    pool: SharedPool | None = None,
) -> Engine:
    """An engine over a backend's cache, on one device or on several; or over the memory of a shared pool."""
    if isinstance(layout, kvoffload.ShardedLayout):
        return kvoffload.ShardedEngine(layout, devices=backend.devices, num_slots=num_slots)
    if pool is not None:
        return kvoffload.OffloadEngine(layout, device=backend.devices[0], host_memory=pool.host_memory)
    return kvoffload.OffloadEngine(layout, device=backend.devices[0], num_slots=num_slots)


def block_bytes(layout: kvoffload.KVLayout | kvoffload.ShardedLayout) -> int:
    """Bytes of a block, on all devices."""
    shards = layout.layouts if isinstance(layout, kvoffload.ShardedLayout) else (layout,)
    return sum(shard.groups[0].bytes_per_block for shard in shards)


class Offloader:
    """Stores and loads the complete blocks of conversations. Without a tier, no call waits for a running transfer.

    Args:
        engine: over the backend's cache.
        timeline: records when transfers ran.
        by_layer: load one part for each layer, so that the first layer need not wait for the last.
        corrupt: spoil a stored block before the first load.
        tier: keeps blocks that do not fit on the host; `close` closes it. None: the host has room for all.
        pool: which the engine's memory belongs to; None: the engine's own. `close` leaves it open.
        stores: False if another process has put the blocks of all conversations into the tier, or the pool.
    """

    def __init__(
        self,
        backend: Backend,
        engine: Engine,
        timeline: Timeline | None,
        *,
        by_layer: bool,
        corrupt: bool,
        tier: Tier | None = None,
        pool: SharedPool | None = None,
        stores: bool = True,
    ) -> None:
        self._backend, self._engine, self._timeline = backend, engine, timeline
        self._by_layer, self._corrupt, self._stores_blocks = by_layer, corrupt, stores
        below: dict[str, Any] = {} if tier is None else {"tiers": [tier], "write": "through" if stores else "none"}
        self._cache = kvoffload.BlockCache(engine, pool=pool, **below)
        self._stores: dict[int, kvoffload.CacheJob] = {}
        self._loads: dict[int, kvoffload.CacheJob] = {}

    def store(self, conversation: int, tokens: list[int], blocks: list[int]) -> None:
        """Store the complete blocks that are not stored yet."""
        if not self._stores_blocks:
            return
        keys = self._keys(tokens)
        job = self._cache.store(keys, blocks[: len(keys)], after=self._backend.after())
        self._cache.touch(keys)
        self._stores[conversation] = job
        self._note(job)
        self._cache.drain(60)  # only here, because the tier must have everything later; a server goes on

    def follow_store(self, conversation: int) -> None:
        """Make steps from now on follow the store of a conversation whose blocks another one has taken."""
        job = self._stores.get(conversation)
        if job is not None and not job.done:
            self._backend.follow(job)

    def load(self, conversation: int, tokens: list[int], blocks: list[int]) -> None:
        """Load the complete blocks of a conversation into as many `blocks`."""
        if conversation in self._stores:
            self._stores[conversation].wait()  # it ended long ago: other conversations were served since
        keys = self._keys(tokens)
        with self._cache.promote(keys, deadline=60) as promotion:  # reads from the tier, and holds what it has read
            found = promotion.wait()
            if found < len(keys):
                raise RuntimeError(f"only {found} of {len(keys)} blocks of a stored prefix were found")
            self._spoil(keys)
            parts = self._backend.size.layers if self._by_layer else None  # planes 2k and 2k + 1 are part k
            job = self._loads[conversation] = self._cache.load(keys, blocks, after=self._backend.after(), parts=parts)
        self._note(job)

    def follow_load(self, conversation: int) -> None:
        """Make steps from now on follow the load of a conversation, if there is one."""
        job = self._loads.get(conversation)
        if job is not None:
            follow = self._backend.follow_by_layer if self._by_layer else self._backend.follow
            follow(job)

    def end_load(self, conversation: int) -> None:
        """Raise if the load failed. The computation followed it, so it has ended."""
        if conversation in self._loads:
            self._loads.pop(conversation).wait()

    def tier_statistics(self) -> TierStatistics | None:
        """Counts of the tier; None without a tier."""
        found = self._cache.tier_statistics()
        return found[0].tier if found else None

    def statistics(self) -> kvoffload.CacheStatistics:
        """Counts of the cache; in a shared pool `resident` is of all members together."""
        return self._cache.statistics()

    def clear(self) -> None:
        """Remove all blocks, also those that earlier runs left in the tier, or the pool."""
        self._cache.clear()

    def close(self) -> None:
        """Close the cache and its tier; the engine stays open."""
        self._cache.close()

    def count_blocks(self) -> tuple[int, int]:
        """Blocks stored and loaded so far; waits until all transfers have ended."""
        self._engine.drain()
        totals, nbytes = self._engine.statistics(), block_bytes(self._engine.layout)
        return totals.store.nbytes // nbytes, totals.load.nbytes // nbytes

    def _keys(self, tokens: list[int]) -> list[bytes]:
        """Keys of the complete blocks."""
        complete = tokens[: complete_tokens(tokens)]
        return kvoffload.chain_keys(complete, layout=self._engine.layout, salt="paged decode")

    def _note(self, job: kvoffload.CacheJob) -> None:
        if self._timeline is not None:
            self._timeline.transfer(job)

    def _spoil(self, keys: list[bytes]) -> None:
        """Change a bit in every byte of the last of these blocks, once. With several devices, do it on the last one."""
        if self._corrupt:
            slots = self._engine.slots
            pool = slots[-1] if isinstance(slots, tuple) else slots
            with self._cache.acquire(keys[-1:]) as lease:
                pool[lease.slots()] ^= 1
            self._corrupt = False

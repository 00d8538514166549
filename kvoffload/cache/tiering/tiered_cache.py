"""TieredCache: a BlockCache over the slots of an engine, with tiers below them, such as a disk."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvoffload.cache.block_cache import BlockCache, BlockIds, Parts
from kvoffload.cache.engines import CacheAfter, EngineT, check_engine
from kvoffload.cache.entries import check_keys
from kvoffload.cache.policies import DEFAULT_POLICY, PolicyChoice
from kvoffload.cache.pools import Tenant
from kvoffload.cache.reservations import CacheJob, CacheRequest
from kvoffload.cache.statistics import CacheEvent
from kvoffload.cache.tiering.attaching import admits_all, checked_tiers, digest_of, pools_of, seconds_per_key
from kvoffload.cache.tiering.below import CacheTierStatistics
from kvoffload.cache.tiering.index_tiers import HUNG, Hook, IndexTiers, WriteName, check_options
from kvoffload.cache.tiering.promotion import ChainedLoad, Promotion, PromotionRecord
from kvoffload.cache.tiering.tier import Tier
from kvoffload.errors import CapacityError, ClosedError


class TieredCache(BlockCache[EngineT]):
    """A prefix cache over the slots of an engine, and tiers below. Usable from any thread; a context manager.

    What `BlockCache` has works as it does there, and knows the slots alone: `lookup` says what can be loaded now. Keys
    that are only in a tier are promoted into slots first, which a thread of the cache does:

        with cache.promote(keys, deadline=0.2) as promotion:           # what is in slots stays there
            hits = promotion.wait()
            cache.load(keys[:hits], blocks[:hits], after=stream).order_before(stream)
        cache.store(keys, blocks, after=stream)                        # tiers get what is worth writing
        cache.touch(keys)

    A tier that fails, hangs or is full is a miss, and raises nothing here. No stream of the GPU waits for a tier.

    Args:
        engine, tenants, store_after, max_load_blocks, on_event: as for `BlockCache`.
        tiers: asked in this order, each for what those before have not brought; each gets what is written. They become
            the cache's own, and are closed with it.
        policy: as for `BlockCache`; "prefix" declines nothing here, since only what is in slots can be written.
        write: what is written to the tiers: "admitted" what is worth it, as learned from what is asked for again, at
            the end of requests (`touch`); "through" every key as soon as it is in slots; "back" every key shortly
            before it is evicted; "none" nothing.
        prefill_tokens_per_second: what computing costs: nothing is promoted that is expected to take longer, going by
            the tier's speed as measured lately. None: everything is promoted. The layout must say tokens_per_block.
        hung: seconds after which a tier's call is taken for one that hangs; until it returns, the tier is not used.

    Raises:
        What `BlockCache` raises; LayoutError, CapacityError and others that `Tier.attach` raises.
        ValueError, TypeError: bad arguments.
    """

    def __init__(
        self,
        engine: EngineT,
        *,
        policy: PolicyChoice = DEFAULT_POLICY,
        tiers: Sequence[Tier],
        write: WriteName = "admitted",
        prefill_tokens_per_second: float | None = None,
        hung: float = HUNG,
        tenants: Mapping[str, Tenant] | None = None,
        store_after: int = 0,
        max_load_blocks: int | None = None,
        on_event: Callable[[CacheEvent], None] | None = None,
    ) -> None:
        check_engine(engine)
        check_options(write, hung)
        if engine.num_slots == 0:
            raise CapacityError("tiers are read into slots, and this engine has none; raise num_slots")
        key_seconds = seconds_per_key(engine.layout, prefill_tokens_per_second)
        checked = checked_tiers(tiers)
        hook = Hook(on_event)
        super().__init__(
            engine,
            policy=admits_all if policy == "prefix" else policy,
            tenants=tenants,
            store_after=store_after,
            max_load_blocks=max_load_blocks,
            on_event=hook,
        )
        pools = [pool[: self.capacity * self._groups].reshape(self.capacity, -1) for pool in pools_of(engine)]
        reference = weakref.ref(self)
        self._tiers = IndexTiers(
            self._index,
            hook,
            checked,
            pools,
            digest_of(engine.layout),
            write=write,
            hung=hung,
            seconds_per_key=key_seconds,
            settle=lambda: _settle(reference),
            submit=lambda chained: _submit(reference, chained),
        )
        self._manager = self._tiers.manager

    # tiers --------------------------------------------------------------------------------------------------------

    def locate(self, keys: Sequence[bytes]) -> list[str]:
        """Where each key is: "host" (can be loaded), "pending" (is being stored or promoted), the name of a tier, or
        "missing"; "unknown" if a tier would have to be asked, which `promote` does. Never blocks; a hint.
        """
        self.engine.advance()
        return self._tiers.locate(keys)

    def promote(self, keys: Sequence[bytes], *, deadline: float | None = 10.0, tenant: str = "") -> Promotion:
        """Bring leading keys into slots, as many as come in time. Returns at once.

        Call it for what is about to run: each promotion takes slots. Keys that are in slots already are held there.
        Statistics and events count it, once it has ended, as a `lookup` that found what it has made ready: so call one
        of the two for a request.

        Args:
            keys: bytes, no repeats, in the order of a request; may be all of its keys.
            deadline: seconds from now, after which no more is waited for; None: no limit. Half of what is left when a
                tier is asked is kept for the tiers after it that may have the same keys.
            tenant: whose quota and priority the promoted keys have.

        Raises:
            LayoutError: `keys` repeats a key, or is not a list of bytes.
            ValueError: the cache has no such tenant; `deadline` is not above 0.
            ClosedError: the cache or its engine is closed.
        """
        record = self._tiers.promote(keys, deadline, tenant, self._check_tiers_open)
        return Promotion(record, self._manager.wake, self._manager.when_done, self._load_after)

    def tier_statistics(self) -> list[CacheTierStatistics]:
        """What has been done with each tier so far; never blocks."""
        self.engine.check_process()
        return self._tiers.statistics()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until what is to be written so far is in the tiers, durable where a tier is.

        Returns:
            Whether it is, within `timeout` seconds; what a tier has not taken, since it fails or is full, left out.

        Raises:
            ClosedError: the cache or its engine is closed.
        """
        self._check_tiers_open()
        return self._manager.drain(timeout)

    def close(self, timeout: float = 10.0) -> bool:
        """Give up promotions and writes that have not begun, and close the tiers. The engine stays open. Idempotent.

        Returns:
            Whether it has all ended within about `timeout` seconds; else calls of a tier hang, and their slots stay
            kept from other keys until they have returned.
        """
        if self.engine.devices[0].foreign:  # the threads are in the parent
            return True
        return self._manager.close(timeout)

    # what the base class does, and tiers need to know -------------------------------------------------------------

    def store(
        self,
        keys: Sequence[bytes],
        blocks: BlockIds,
        *,
        after: CacheAfter = None,
        tenant: str = "",
        all_or_nothing: bool = False,
        request: CacheRequest | None = None,
    ) -> CacheJob:
        job = super().store(keys, blocks, after=after, tenant=tenant, all_or_nothing=all_or_nothing, request=request)
        self._manager.stored()
        return job

    store.__doc__ = BlockCache.store.__doc__

    def touch(self, keys: Sequence[bytes]) -> None:
        super().touch(keys)
        self._manager.post(tuple(keys))

    touch.__doc__ = BlockCache.touch.__doc__

    def open_request(self, *, tenant: str = "") -> CacheRequest:
        return self._index.open_request(tenant=tenant, on_end=self._manager.post)

    open_request.__doc__ = BlockCache.open_request.__doc__

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove keys from the slots, and from the tiers: durably, and whatever is going on with them.

        Returns:
            How many were in slots.

        Raises:
            TierError: a tier failed, or did not answer within 60 seconds: it may have them still. The slots have not.
        """
        checked = list(dict.fromkeys(check_keys(keys)))
        self._check_tiers_open()
        return self._tiers.remove(checked, lambda: BlockCache.remove(self, checked))

    def clear(self) -> int:
        """Remove all keys, as `remove` does. Other processes that share a tier lose its records, too."""
        self._check_tiers_open()
        return self._tiers.clear(lambda: BlockCache.clear(self))

    def __enter__(self) -> TieredCache[EngineT]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TieredCache({self._index.describe()}; tiers {self._tiers.names})"

    # for promotions -----------------------------------------------------------------------------------------------

    def _load_after(self, record: PromotionRecord, blocks: BlockIds, after: CacheAfter, parts: Parts) -> ChainedLoad:
        """See `Promotion.load`."""
        per_group = [ids.copy() for ids in self._block_ids(len(record.keys), blocks)]
        if parts is not None:
            self._check_parts(parts)
        self._check_tiers_open()
        chained = ChainedLoad(record, per_group, self.engine.resolve(after), parts, self._manager.when_done)
        record.loads.add(chained)
        self._manager.post(chained)
        return chained

    def _check_tiers_open(self) -> None:
        self.engine.check_process()
        if self._manager.closed or self.engine.closed:
            what = "cache" if self._manager.closed else "engine of the cache"
            raise ClosedError(f"the {what} is closed: make an engine and a cache")


def _settle(reference: weakref.ref[TieredCache[Any]]) -> bool:
    """Bring a cache up to date; whether stores are in flight, so that this has to be done again."""
    cache = reference()
    if cache is None or cache.engine.closed:
        return False
    cache.engine.advance()
    cache._index.settle_ended()
    return bool(cache._state.storing)


def _submit(reference: weakref.ref[TieredCache[Any]], chained: ChainedLoad) -> None:
    """Load what a promotion has brought."""
    cache = reference()
    chained._submit(None if cache is None else cache.load)

"""TieredKVOffloadManager: a KVOffloadManager with tiers below the workers' slots, which it maps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from vllm.v1.kv_offload.base import LoadStoreSpec, LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload.cache.entries import Status
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.reservations import Lease
from kvoffload.cache.statistics import CacheEvent
from kvoffload.cache.tiering.tiered_index import TieredIndex
from kvoffload.errors import MissingKeyError, TierError
from kvoffload.internal.log import LOGGER
from kvoffload.vllm.manager import KVOffloadManager
from kvoffload.vllm.promotions import Promotions

OpenTieredIndex = Callable[[Callable[[CacheEvent], None] | None], TieredIndex]


class TieredKVOffloadManager(KVOffloadManager):
    """A `KVOffloadManager` whose index has tiers below: keys that are missing in slots are promoted from them.

    A thread of the tiers evicts keys for what it promotes. So a key that `lookup` has called a hit is held until the
    end of the step, in which vLLM begins to load it.

    Args:
        num_chunks, options: as for `KVOffloadManager`.
        open_index: makes the index at its first use.
        promotion_seconds: that a request waits for tiers at most.
        windows: see `Promotions`.
        source: where promoted keys come from, for vLLM's metrics.
    """

    def __init__(
        self,
        num_chunks: int,
        *,
        open_index: OpenTieredIndex,
        promotion_seconds: float,
        windows: Mapping[int, int],
        source: CacheHitSource = CacheHitSource.EXTERNAL_UNSPECIFIED,
        **options: Any,
    ) -> None:
        super().__init__(num_chunks, **options)
        self._open_index = open_index
        self._promotion_seconds, self._windows, self._source = promotion_seconds, windows, source
        self._held: list[Lease] = []  # hits of this step
        self._tiered: TieredIndex | None = None
        self._below: Promotions | None = None

    def _make_index(self, on_event: Callable[[CacheEvent], None] | None) -> CacheIndex:
        self._tiered = self._open_index(on_event)
        self._below = Promotions(self._tiered, self._promotion_seconds, self._windows)
        return self._tiered

    @property
    def _promotions(self) -> Promotions:
        if self._below is None:
            self.index  # noqa: B018  # makes it
        assert self._below is not None
        return self._below

    # loading ------------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT: it can be loaded. HIT_PENDING, RETRY: it is being stored or promoted, or may be promoted."""
        promotions, status = self._promotions, self.index.status_of(key)
        if status is Status.HIT:
            try:
                self._held.append(self.index.acquire([key]))
            except MissingKeyError:  # evicted meanwhile
                status = Status.MISS
        if status is Status.MISS:
            return promotions.ask(key, req_context)
        promotions.note(key, req_context)
        return LookupResult.HIT if status is Status.HIT else LookupResult.HIT_PENDING

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return self._source if self._promotions.brought(key, req_context) else CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        spec = super().prepare_load(keys, req_context)
        self._promotions.release(req_context)
        return spec

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._release_hits()
        self._promotions.advance()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._promotions.release(req_context)
        super().on_request_finished(req_context)

    def _release_hits(self) -> None:
        for lease in self._held:
            lease.release()
        self._held.clear()

    # the rest -----------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """In the tiers, too: what vLLM resets for, such as other weights, makes their records wrong."""
        self._release_hits()
        self._promotions.forget()
        try:
            self.index.clear()
        except TierError as error:
            LOGGER.error("the tiers are not used any more, since a reset of vLLM's cache failed there: %s", error)
            self._promotions.end()
            assert self._tiered is not None
            self._tiered.close(0.0)

    def _forget(self, keys: list[bytes]) -> None:
        """Without the tiers' records: their bytes are not at fault."""
        CacheIndex.remove(self.index, keys)

    def get_stats(self) -> Any:
        stats = super().get_stats()
        if self._tiered is not None:
            self._reporter.report_tiers(stats, self._tiered.tier_statistics())
        return stats

    def shutdown(self) -> None:
        """Close the tiers, once what is being written has been; at most 10 seconds."""
        if self._tiered is None or self._below is None:
            return
        self._release_hits()
        self._below.end()
        if not self._tiered.close():
            LOGGER.warning("a call of a tier has not returned; it ends with the process")
        self._tiered = None

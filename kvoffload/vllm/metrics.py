"""Statistics of the manager as vLLM's own metrics, and as metrics that only kvoffload has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics as Names

from kvoffload.cache.statistics import CacheStatistics
from kvoffload.cache.tiering import BreakerState, CacheTierStatistics

_COUNTERS = {
    "lookups": "Chunks that vLLM has asked for.",
    "hits": "Chunks that were there when vLLM asked.",
    "stored": "Chunks stored.",
    "evicted": "Chunks evicted.",
    "declined": "Chunks not stored: no room, or worth less than the chunks that they would have displaced.",
    "failed": "Chunks whose store failed, or had a block that the codec cannot hold.",
}
_GAUGES = {"resident": "Chunks that can be loaded.", "pending": "Chunks being stored.", "capacity": "Chunks that fit."}
_TIER_COUNTERS = {
    "promoted": "Chunks that a tier has brought into host memory.",
    "not_found": "Chunks that a tier was asked for and did not bring.",
    "slower": "Chunks that a tier was not asked for, because computing them was expected to be faster.",
    "written": "Chunks that a tier has taken.",
    "not_written": "Chunks given to a tier that it did not write.",
    "dropped": "Chunks worth writing that were not given to a tier.",
}
_NAME, _TIER_NAME = "vllm:kvoffload_{}_chunks".format, "vllm:kvoffload_tier_{}_chunks".format
_TIER_USABLE = "vllm:kvoffload_tier_usable"
_SIZES = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


def _grown(now: object, before: object, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the counts that have grown since the last report (None: none yet), and by how much."""
    for name in names:
        count, counted = getattr(now, name), getattr(before, name, 0)
        grown = count - counted if count >= counted else count  # the next owner of a shared pool counts from 0
        if grown:
            yield name, grown


def tier_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics of each tier, labelled with its name, which come besides `definitions`."""
    counters = _TIER_COUNTERS.items()
    return {
        _TIER_USABLE: OffloadingGaugeMetadata(
            "1 while a tier is used, 0 while it is left alone.", labelnames=("tier",)
        ),
        **{_TIER_NAME(each): OffloadingCounterMetadata(text, labelnames=("tier",)) for each, text in counters},
    }


def definitions(store_threshold: int) -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics for `OffloadingSpec.build_metric_definitions`. Below a threshold of 2 no chunk is skipped."""
    skipped = OffloadingCounterMetadata("Chunks not stored, as they were not offered often enough.")
    share = "of the CPU KV cache's chunks, 0.0 to 1.0."
    return {
        Names.CPU_CACHE_USAGE_PERC: OffloadingGaugeMetadata(f"Share in use by transfers {share}"),
        Names.CPU_CACHE_WRITE_USAGE_PERC: OffloadingGaugeMetadata(f"Share being stored {share}"),
        Names.CPU_CACHE_READ_USAGE_PERC: OffloadingGaugeMetadata(f"Share being loaded {share}"),
        Names.CPU_ALLOCATION_SIZE: OffloadingHistogramMetadata("Chunks of a store.", buckets=_SIZES),
        **({Names.STORES_SKIPPED: skipped} if store_threshold >= 2 else {}),
        **{_NAME(each): OffloadingCounterMetadata(text) for each, text in _COUNTERS.items()},
        **{_NAME(each): OffloadingGaugeMetadata(text) for each, text in _GAUGES.items()},
    }


class Reporter:
    """Reports the changes since the last report. (An index counts from its creation.)

    Attributes:
        sizes: chunks of each store since the last report.
    """

    def __init__(self, *, counts_skipped: bool) -> None:
        self.sizes: list[int] = []
        self._counts_skipped = counts_skipped
        self._before: CacheStatistics | None = None
        self._tiers_before: dict[str, CacheTierStatistics] = {}

    def report(self, now: CacheStatistics, skipped: int) -> OffloadingConnectorStats:
        stats = OffloadingConnectorStats()
        capacity = max(now.capacity, 1)
        stats.set_gauge(Names.CPU_CACHE_USAGE_PERC, (now.pending + now.pinned) / capacity)
        stats.set_gauge(Names.CPU_CACHE_WRITE_USAGE_PERC, now.pending / capacity)
        stats.set_gauge(Names.CPU_CACHE_READ_USAGE_PERC, now.pinned / capacity)
        for size in self.sizes:
            stats.observe_histogram(Names.CPU_ALLOCATION_SIZE, size)
        self.sizes.clear()
        if self._counts_skipped:
            stats.increase_counter(Names.STORES_SKIPPED, skipped)
        for counted, grown in _grown(now, self._before, _COUNTERS):
            stats.increase_counter(_NAME(counted), grown)
        for counted in _GAUGES:
            stats.set_gauge(_NAME(counted), getattr(now, counted))
        self._before = now
        return stats

    def report_tiers(self, stats: OffloadingConnectorStats, now: Sequence[CacheTierStatistics]) -> None:
        for tier in now:
            for counted, grown in _grown(tier, self._tiers_before.get(tier.name), _TIER_COUNTERS):
                stats.increase_counter(_TIER_NAME(counted), grown, (tier.name,))
            stats.set_gauge(_TIER_USABLE, int(tier.state is not BreakerState.OPEN), (tier.name,))
            self._tiers_before[tier.name] = tier

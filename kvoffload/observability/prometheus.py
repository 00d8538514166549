"""Statistics of block caches, and of the engines and tiers below them, as Prometheus metrics; needs prometheus_client.

    collector = prometheus.register(cache, gpu="0")     the registry's exporters now export this cache
    collector.add(another, gpu="1")                     more caches of one registry go into the same collector

Statistics are read at each scrape. A collector does not keep a cache alive. A cache that is garbage, whose engine is
closed, or that belongs to the parent of a forked process, has no metrics.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from kvoffload.cache.statistics import CacheStatistics, Histogram
from kvoffload.cache.tiering.below import BreakerState, CacheTierStatistics
from kvoffload.engine.statistics import DirectionTotals, EngineStatistics
from kvoffload.errors import CapabilityError, ClosedError


class Cache(Protocol):
    """What a collector needs of a cache. If it has an `engine`, or `tier_statistics()`, these are exported as well."""

    def statistics(self) -> CacheStatistics: ...


class _Metric(NamedTuple):
    """A metric: `kind` is "Gauge", "Counter" or "Histogram", `label` its own label besides those of the cache."""

    kind: str
    text: str
    label: str = ""


_STATES = ("resident", "pending", "pinned")
_COUNTED = {
    "lookups": "Blocks that lookups and promotions asked for.",
    "hits": "Leading blocks that lookups and promotions found.",
    "stored": "Blocks stored.",
    "loaded": "Blocks loaded.",
    "evicted": "Blocks evicted to make room for others.",
    "failed": "Blocks whose store failed or was aborted.",
    "declined": "Blocks that were not stored: not worth it, over a quota, or without room.",
    "removed": "Blocks removed by remove() and clear().",
    "promoted": "Blocks that a tier has filled.",
}
_COUNTED_BY_TENANT = ("stored", "failed", "declined")
_OF_TIERS = {
    "promoted": "Blocks that the tier has brought into slots.",
    "not_found": "Blocks that the tier was asked for and did not bring.",
    "slower": "Blocks that were not asked for, since computing them was expected to take less time.",
    "written": "Blocks that the tier has taken.",
    "not_written": "Blocks that were given to the tier and not written: it failed, was full or had a full queue.",
    "dropped": "Blocks that were worth writing and not given to the tier: not usable, too many writes, or evicted.",
}
_IN_TIERS = {
    "bytes_read": "Bytes of records that were read.",
    "bytes_written": "Bytes of records that were written.",
    "corrupt": "Records that were read with other bytes than were written; each was a miss.",
    "missing": "Records that were asked for and not there: never written, or evicted by the tier.",
    "failed": "Blocks for which the medium failed.",
    "declined": "Blocks that the tier did not take, as it is full or its queue is.",
    "expired": "Blocks whose deadline passed before the tier began.",
}
_OF_TIERS_NOW = {
    "queued_reads": "Blocks that wait to be read from the tier.",
    "queued_writes": "Blocks that wait to be written to the tier.",
    "longest_call_seconds": "How long the oldest call of the tier has been going on.",
}
_BREAKER = {BreakerState.CLOSED: 0, BreakerState.TRYING: 1, BreakerState.OPEN: 2}
_METRICS = {
    "kvoffload_cache_blocks": _Metric("Gauge", "Blocks in the cache; pinned ones are among the resident.", "state"),
    "kvoffload_cache_capacity_blocks": _Metric("Gauge", "Blocks that fit into the cache."),
    **{f"kvoffload_cache_{field}": _Metric("Counter", text) for field, text in _COUNTED.items()},
    **{
        f"kvoffload_cache_tenant_{field}": _Metric("Counter", f"{_COUNTED[field][:-1]}; by tenant.", "tenant")
        for field in _COUNTED_BY_TENANT
    },
    "kvoffload_cache_tier_hits": _Metric(
        "Counter", "The hits by where they were: host, or the name of a tier.", "tier"
    ),
    "kvoffload_cache_residency_seconds": _Metric("Histogram", "How long evicted blocks had been in the cache."),
    "kvoffload_cache_reuse_distance_blocks": _Metric("Histogram", "Blocks touched between two touches of a block."),
    "kvoffload_transfer_bytes": _Metric("Counter", "Payload bytes of transfers that did not fail.", "direction"),
    "kvoffload_transfer_seconds": _Metric("Counter", "GPU time of transfers that did not fail.", "direction"),
    "kvoffload_transfer_jobs": _Metric("Counter", "Transfers that have ended.", "direction"),
    "kvoffload_transfer_failed_jobs": _Metric("Counter", "Transfers that have failed.", "direction"),
    "kvoffload_transfer_jobs_in_flight": _Metric("Gauge", "Transfers that have not ended."),
    "kvoffload_transfer_jobs_held": _Metric("Gauge", "Transfers in flight that wait on the host for the driver."),
    "kvoffload_pinned_bytes": _Metric("Gauge", "Pinned host memory of the slots."),
    "kvoffload_tier_breaker": _Metric("Gauge", "0: the tier is used; 1: it is tried; 2: it is not used.", "tier"),
    "kvoffload_tier_breaker_opened": _Metric("Counter", "How often a tier was found failing or hung.", "tier"),
    "kvoffload_tier_records": _Metric("Gauge", "Records in the tier, if it knows how many.", "tier"),
    "kvoffload_tier_seconds_per_block": _Metric("Gauge", "What a block has taken in promotions lately.", "tier"),
    **{f"kvoffload_tier_{name}": _Metric("Gauge", text, "tier") for name, text in _OF_TIERS_NOW.items()},
    **{
        f"kvoffload_tier_{field}": _Metric("Counter", text, "tier")
        for field, text in {**_OF_TIERS, **_IN_TIERS}.items()
    },
}
_OWN_LABELS = {"state", "direction", "le", "tenant", "tier"}


class CacheCollector:
    """A custom collector of prometheus_client that exports the statistics of caches.

    Times of a simulated device mean nothing and are not exported.

    Args:
        cache: a BlockCache, or an object with the same `statistics()`. Not kept alive.
        labels: put on every metric of this cache.

    Raises:
        CapabilityError: prometheus_client is not installed.
        ValueError, TypeError: Prometheus does not allow a label's name or value, or the metrics use the name already.
    """

    def __init__(self, cache: Cache, /, **labels: str) -> None:
        self._client = _client()
        self._label_names = tuple(sorted(_checked(labels)))
        self._caches = [(weakref.ref(cache), self._values(labels))]

    def add(self, cache: Cache, /, **labels: str) -> None:
        """Export another cache as well.

        Args:
            labels: the names that the first cache has, with other values.

        Raises:
            ValueError: the names differ from those of the first cache, or another living cache has these values.
        """
        if tuple(sorted(labels)) != self._label_names:
            raise ValueError(f"labels must be {list(self._label_names)} as for the first cache, got {sorted(labels)}")
        values = self._values(_checked(labels))
        living = [(known, taken) for known, taken in self._caches if known() is not None]
        if any(taken == values for _, taken in living):
            raise ValueError(f"labels {labels} belong to another cache; give each its own values")
        self._caches = [*living, (weakref.ref(cache), values)]

    def describe(self) -> Iterator[Any]:
        """The metrics without values: a registry refuses two collectors of the same ones."""
        for name in _METRICS:
            yield self._family(name)

    def collect(self) -> Iterator[Any]:
        """The metrics of all living caches; a metric without values is left out."""
        families = {name: self._family(name) for name in _METRICS}
        for reference, values in self._caches:
            for sample in _samples(reference()):
                own = [sample.label] if _METRICS[sample.name].label else []
                families[sample.name].add_metric([*values, *own], **self._arguments(sample.value))
        yield from (family for family in families.values() if family.samples)

    def _values(self, labels: dict[str, str]) -> tuple[str, ...]:
        return tuple(labels[name] for name in self._label_names)

    def _family(self, name: str) -> Any:
        metric = _METRICS[name]
        own = [metric.label] if metric.label else []
        family = getattr(self._client.core, f"{metric.kind}MetricFamily")
        return family(name, metric.text, labels=[*self._label_names, *own])

    def _arguments(self, value: float | Histogram) -> dict[str, Any]:
        """Arguments for `add_metric` of a family, whose buckets are cumulative."""
        if not isinstance(value, Histogram):
            return {"value": value}
        bounds = [self._client.utils.floatToGoString(bound) for bound in (*value.bounds, float("inf"))]
        return {"buckets": list(zip(bounds, accumulate(value.counts), strict=True)), "sum_value": value.total}


def register(cache: Cache, /, registry: Any = None, **labels: str) -> CacheCollector:
    """Register a collector for a cache.

    Args:
        registry: a `prometheus_client.CollectorRegistry`; None: the default one.
        cache, labels: as for CacheCollector.

    Returns:
        The collector. `collector.add` exports more caches, `registry.unregister(collector)` ends the export.

    Raises:
        ValueError: the registry has a collector of these metrics already.
        What CacheCollector raises.
    """
    collector = CacheCollector(cache, **labels)
    chosen = _client().core.REGISTRY if registry is None else registry
    try:
        chosen.register(collector)
    except ValueError as error:
        raise ValueError(
            "registry has a collector of these metrics already: add() the cache to that one, or unregister() it"
        ) from error
    return collector


class _Sample(NamedTuple):
    """A value of a metric; `label` is the value of the metric's own label, if it has one."""

    name: str
    value: float | Histogram
    label: str = ""


def _samples(cache: Cache | None) -> Iterator[_Sample]:
    if cache is None:
        return
    engine = getattr(cache, "engine", None)
    if getattr(engine, "closed", False):
        return
    tiers: Callable[[], Sequence[CacheTierStatistics]] = getattr(cache, "tier_statistics", tuple)
    try:
        of_cache, of_engine = cache.statistics(), engine.statistics() if engine is not None else None
        of_tiers = tiers()
    except ClosedError:  # must not keep a registry from collecting everything else
        return
    yield from _cache_samples(of_cache)
    if of_engine is not None:
        yield from _engine_samples(of_engine)
    for of_tier in of_tiers:
        yield from _tier_samples(of_tier)


def _cache_samples(statistics: CacheStatistics) -> Iterator[_Sample]:
    for state in _STATES:
        yield _Sample("kvoffload_cache_blocks", getattr(statistics, state), state)
    yield _Sample("kvoffload_cache_capacity_blocks", statistics.capacity)
    for field in _COUNTED:
        yield _Sample(f"kvoffload_cache_{field}", getattr(statistics, field))
    for tenant, counts in statistics.tenants:
        for field in _COUNTED_BY_TENANT:
            yield _Sample(f"kvoffload_cache_tenant_{field}", getattr(counts, field), tenant)
    for place, hits in statistics.hits_from:
        yield _Sample("kvoffload_cache_tier_hits", hits, place)
    yield _Sample("kvoffload_cache_residency_seconds", statistics.residency_seconds)
    yield _Sample("kvoffload_cache_reuse_distance_blocks", statistics.reuse_distance_blocks)


def _engine_samples(statistics: EngineStatistics) -> Iterator[_Sample]:
    directions: dict[str, DirectionTotals] = {"store": statistics.store, "load": statistics.load}
    for direction, totals in directions.items():
        yield _Sample("kvoffload_transfer_bytes", totals.nbytes, direction)
        if not statistics.simulated:
            yield _Sample("kvoffload_transfer_seconds", totals.seconds, direction)
        yield _Sample("kvoffload_transfer_jobs", totals.jobs, direction)
        yield _Sample("kvoffload_transfer_failed_jobs", totals.failed, direction)
    yield _Sample("kvoffload_transfer_jobs_in_flight", statistics.in_flight)
    yield _Sample("kvoffload_transfer_jobs_held", statistics.held)
    yield _Sample("kvoffload_pinned_bytes", statistics.pinned_bytes)


def _tier_samples(statistics: CacheTierStatistics) -> Iterator[_Sample]:
    name, tier = statistics.name, statistics.tier
    yield _Sample("kvoffload_tier_breaker", _BREAKER[statistics.state], name)
    yield _Sample("kvoffload_tier_breaker_opened", statistics.opened, name)
    if tier.records is not None:
        yield _Sample("kvoffload_tier_records", tier.records, name)
    if statistics.seconds_per_record is not None:
        yield _Sample("kvoffload_tier_seconds_per_block", statistics.seconds_per_record, name)
    for metric in _OF_TIERS_NOW:
        yield _Sample(f"kvoffload_tier_{metric}", getattr(tier, metric.removesuffix("_seconds")), name)
    for field in _OF_TIERS:
        yield _Sample(f"kvoffload_tier_{field}", getattr(statistics, field), name)
    for field in _IN_TIERS:
        yield _Sample(f"kvoffload_tier_{field}", getattr(tier, field), name)


def _checked(labels: dict[str, str]) -> dict[str, str]:
    for name, value in labels.items():
        if name in _OWN_LABELS or not re.fullmatch("(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name):
            raise ValueError(
                f"label {name!r} must be letters, digits and underscores, not two of them first, and none of "
                f"{sorted(_OWN_LABELS)}"
            )
        if not isinstance(value, str):
            raise TypeError(f"label {name} must be a string, got {value!r:.80}")
    return labels


def _client() -> Any:
    """prometheus_client, with its modules `core` and `utils`."""
    try:
        import prometheus_client.core
        import prometheus_client.utils
    except ImportError as error:
        raise CapabilityError(
            f"metrics need prometheus_client, which cannot be imported ({error}); install it: "
            "pip install 'kvoffload[prometheus]'"
        ) from None
    return prometheus_client

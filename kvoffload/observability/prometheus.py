"""Statistics of block caches, their engines and their tiers as Prometheus metrics. Needs prometheus_client.

    collector = prometheus.register(cache, gpu="0")     the registry's exporters now export this cache
    collector.add(another, gpu="1")                     more caches of one registry go into the same collector

Each scrape reads the statistics. A collector does not keep a cache alive. A cache that is garbage, or
whose engine is closed or belongs to the parent of a forked process, has no metrics.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from kvoffload.cache.statistics import CacheStatistics, Histogram
from kvoffload.cache.tiering.below import BreakerState
from kvoffload.errors import CapabilityError, ClosedError


class Cache(Protocol):
    """A cache as a collector sees it. If it has an `engine`, or `tier_statistics()`, these are exported as well."""

    def statistics(self) -> CacheStatistics: ...


class _Metric(NamedTuple):
    """A metric.

    Attributes:
        kind: "Gauge", "Counter" or "Histogram".
        label: its own label besides those of the cache; "" for none.
        read: returns its values from some statistics, by the values of that label; None is left out.
    """

    kind: str
    text: str
    label: str
    read: Callable[[Any], Mapping[str, float | Histogram | None]]


_COUNTED = {
    "lookups": "Blocks that lookups and promotions asked for.",
    "hits": "Leading blocks that lookups and promotions found.",
    "stored": "Blocks stored.",
    "loaded": "Blocks loaded.",
    "evicted": "Blocks evicted to make room for others.",
    "failed": "Blocks whose store failed or was aborted.",
    "declined": "Blocks that were not stored: not worth it, over a quota, without room, or unfit.",
    "unfit": "Blocks that the layout's codec cannot hold; if many, turn it off.",
    "removed": "Blocks that could be loaded and were taken out: remove(), clear(), unfit.",
    "promoted": "Blocks that a tier has filled.",
}
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
_BREAKER = {BreakerState.CLOSED: 0, BreakerState.TRYING: 1, BreakerState.OPEN: 2}


def _one(kind: str, text: str, path: str) -> _Metric:
    """A metric with one value: an attribute of the statistics."""
    return _Metric(kind, text, "", lambda statistics: {"": getattr(statistics, path)})


def _by_tenant(field: str) -> _Metric:
    text = f"{_COUNTED[field][:-1]}; by tenant."
    return _Metric("Counter", text, "tenant", lambda of: {name: getattr(each, field) for name, each in of.tenants})


def _by_direction(text: str, path: str) -> _Metric:
    read = attrgetter(path)
    return _Metric("Counter", text, "direction", lambda of: {"store": read(of.store), "load": read(of.load)})


def _by_tier(kind: str, text: str, path: str) -> _Metric:
    """`path`: of an attribute of a CacheTierStatistics."""
    read = attrgetter(path)
    return _Metric(kind, text, "tier", lambda statistics: {statistics.name: read(statistics)})


# Names without "kvoffload_", which all have.
_OF_A_CACHE = {
    "cache_blocks": _Metric(
        "Gauge",
        "Blocks in the cache; pinned ones are among the resident.",
        "state",
        lambda of: {state: getattr(of, state) for state in ("resident", "pending", "pinned")},
    ),
    "cache_other_weights_blocks": _Metric(
        "Gauge",
        "Blocks of weights that are not in use, which go first; the label names those in use.",
        "weights",
        lambda of: {of.weights: of.of_other_weights},
    ),
    "cache_capacity_blocks": _one("Gauge", "Blocks that fit into the cache.", "capacity"),
    **{f"cache_{field}": _one("Counter", text, field) for field, text in _COUNTED.items()},
    **{f"cache_tenant_{field}": _by_tenant(field) for field in ("stored", "failed", "declined")},
    "cache_tier_hits": _Metric(
        "Counter", "The hits by where they were: host, or the name of a tier.", "tier", lambda of: dict(of.hits_from)
    ),
    "cache_hints": _Metric("Counter", "Hints, by action and answer.", "answer", lambda of: dict(of.hints)),
    "cache_retained_hits": _one("Counter", "Blocks used while a promise retained them.", "retained_hits"),
    "cache_residency_seconds": _one("Histogram", "How long evicted blocks had been in the cache.", "residency_seconds"),
    "cache_reuse_distance_blocks": _one(
        "Histogram", "Blocks touched between two touches of a block.", "reuse_distance_blocks"
    ),
}
_OF_AN_ENGINE = {
    "transfer_bytes": _by_direction("Payload bytes of transfers that did not fail.", "nbytes"),
    "transfer_seconds": _Metric(
        "Counter",
        "GPU time of transfers that did not fail.",
        "direction",
        lambda of: {} if of.simulated else {"store": of.store.seconds, "load": of.load.seconds},
    ),
    "transfer_jobs": _by_direction("Transfers that have ended.", "jobs"),
    "transfer_failed_jobs": _by_direction("Transfers that have failed.", "failed"),
    "transfer_jobs_in_flight": _one("Gauge", "Transfers that have not ended.", "in_flight"),
    "transfer_jobs_held": _one("Gauge", "Transfers in flight that wait on the host for the driver.", "held"),
    "slots": _one("Gauge", "Slots of the pool.", "num_slots"),
    "pinned_slots": _one("Gauge", "Slots that are pinned: fewer while the pool grows.", "pinned_slots"),
    "pinned_bytes": _one("Gauge", "Pinned host memory of the slots.", "pinned_bytes"),
    "staging_bytes": _one("Gauge", "Device memory of the staging rings.", "staging_bytes"),
}
_OF_A_TIER = {
    "tier_breaker": _Metric(
        "Gauge",
        "0: the tier is used; 1: it is tried; 2: it is not used; 3: it is read, and not written.",
        "tier",
        lambda of: {of.name: _BREAKER[of.state] or 3 * (of.puts is BreakerState.OPEN)},
    ),
    "tier_breaker_opened": _by_tier("Counter", "How often a tier was found failing or hung.", "opened"),
    "tier_records": _by_tier("Gauge", "Records in the tier, if it knows how many.", "tier.records"),
    "tier_seconds_per_block": _by_tier("Gauge", "What a block has taken in promotions lately.", "seconds_per_record"),
    "tier_queued_reads": _by_tier("Gauge", "Blocks that wait to be read from the tier.", "tier.queued_reads"),
    "tier_queued_writes": _by_tier("Gauge", "Blocks that wait to be written to the tier.", "tier.queued_writes"),
    "tier_longest_call_seconds": _by_tier(
        "Gauge", "How long the oldest call of the tier has been going on.", "tier.longest_call"
    ),
    **{f"tier_{field}": _by_tier("Counter", text, field) for field, text in _OF_TIERS.items()},
    **{f"tier_{field}": _by_tier("Counter", text, f"tier.{field}") for field, text in _IN_TIERS.items()},
}
_METRICS = {**_OF_A_CACHE, **_OF_AN_ENGINE, **_OF_A_TIER}
_OWN_LABELS = {"le"} | {metric.label for metric in _METRICS.values()} - {""}


class CacheCollector:
    """A custom collector of prometheus_client: each time it is asked, it exports the statistics of caches, of their
    engines and of their tiers. Caches that are garbage, or whose engine is closed, are left out.

    Transfer times of a simulated device mean nothing and are not exported.

    Args:
        cache: a BlockCache, or an object with the same `statistics()`. Not kept alive.
        labels: strings, put on every metric of this cache.

    Raises:
        CapabilityError: prometheus_client is not installed.
        ValueError: a label's name is not one that Prometheus allows, or the metrics use it already.
        TypeError: a label's value is not a string, or `cache` does not allow weak references.
    """

    def __init__(self, cache: Cache, /, **labels: str) -> None:
        self._client = _client()
        self._label_names = tuple(sorted(_checked(labels)))
        self._caches = [(weakref.ref(cache), self._values(labels))]

    def add(self, cache: Cache, /, **labels: str) -> None:
        """Export another cache as well, from the next scrape on.

        Args:
            cache: as for the first: a BlockCache, or an object with the same `statistics()`. Not kept alive.
            labels: the same names as for the first cache, with other values.

        Raises:
            ValueError: the names differ from the first cache's, or a cache that is not garbage, perhaps with a closed
                engine, has these values.
            TypeError: a value is not a string, or `cache` does not allow weak references.
        """
        if tuple(sorted(labels)) != self._label_names:
            raise ValueError(f"labels must be {list(self._label_names)} as for the first cache, got {sorted(labels)}")
        values = self._values(_checked(labels))
        living = [(known, taken) for known, taken in self._caches if known() is not None]
        if any(taken == values for _, taken in living):
            raise ValueError(f"labels {labels} belong to another cache; give each its own values")
        self._caches = [*living, (weakref.ref(cache), values)]

    def describe(self) -> Iterator[Any]:
        """Yield the metrics without values: with these, a registry refuses a second collector."""
        for name in _METRICS:
            yield self._family(name)

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of the caches, without those that are garbage or whose engine is closed. A metric without
        values is left out.
        """
        families = {name: self._family(name) for name in _METRICS}
        for reference, values in self._caches:
            for statistics, metrics in _statistics(reference()):
                for name, metric in metrics.items():
                    for label, value in metric.read(statistics).items():
                        own = [label] if metric.label else []
                        if value is not None:
                            families[name].add_metric([*values, *own], **self._arguments(value))
        yield from (family for family in families.values() if family.samples)

    def _values(self, labels: dict[str, str]) -> tuple[str, ...]:
        return tuple(labels[name] for name in self._label_names)

    def _family(self, name: str) -> Any:
        metric = _METRICS[name]
        own = [metric.label] if metric.label else []
        make = getattr(self._client.core, f"{metric.kind}MetricFamily")
        return make(f"kvoffload_{name}", metric.text, labels=[*self._label_names, *own])

    def _arguments(self, value: float | Histogram) -> dict[str, Any]:
        """Return the arguments for a family's `add_metric`; its buckets are cumulative."""
        if not isinstance(value, Histogram):
            return {"value": value}
        bounds = [self._client.utils.floatToGoString(bound) for bound in (*value.bounds, float("inf"))]
        return {"buckets": list(zip(bounds, accumulate(value.counts), strict=True)), "sum_value": value.total}


def register(cache: Cache, /, registry: Any = None, **labels: str) -> CacheCollector:
    """Register a collector for a cache.

    Args:
        cache: a BlockCache, or an object with the same `statistics()`. Not kept alive: once it is garbage, or its
            engine is closed, it has no metrics.
        registry: a `prometheus_client.CollectorRegistry`; None: the default one.
        labels: strings, put on every metric of this cache.

    Returns:
        The collector. `collector.add` exports more caches, `registry.unregister(collector)` ends the export.

    Raises:
        CapabilityError: prometheus_client is not installed.
        ValueError: the registry has a collector of these metrics already, or a label's name is not allowed.
        TypeError: a label's value is not a string, or `cache` does not allow weak references.
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


def _statistics(cache: Any) -> list[tuple[Any, Mapping[str, _Metric]]]:
    """Return the statistics of a cache, its engine and its tiers, with the metrics of each; empty if the cache is
    closed.
    """
    engine = getattr(cache, "engine", None)
    if cache is None or getattr(engine, "closed", False):
        return []
    try:
        found: list[tuple[Any, Mapping[str, _Metric]]] = [(cache.statistics(), _OF_A_CACHE)]
        found += [(engine.statistics(), _OF_AN_ENGINE)] if engine is not None else []
        return found + [(each, _OF_A_TIER) for each in getattr(cache, "tier_statistics", tuple)()]
    except ClosedError:  # must not keep a registry from collecting everything else
        return []


def _checked(labels: dict[str, str]) -> dict[str, str]:
    for name, value in labels.items():
        if name in _OWN_LABELS or not re.fullmatch("(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name):
            raise ValueError(
                f"label {name!r} must be letters, digits and underscores, without a digit or two underscores at the "
                f"beginning, and none of {sorted(_OWN_LABELS)}"
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

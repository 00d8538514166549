"""Frozen snapshots of what an engine and a cache have done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DirectionTotals:
    """Transfers of one direction that have ended.

    Attributes:
        jobs, failed: how many ended, and how many of them failed.
        nbytes: payload bytes of those that did not fail.
        seconds: their time on the GPU clock, summed.
    """

    jobs: int = 0
    failed: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What an engine holds and has done.

    Attributes:
        simulated: whether `seconds` are made up.
        in_flight: jobs that have not ended.
        held: those of them that wait on the host, wholly or in part, for room in the driver's queues.
        unreported: ended jobs that `poll` will report.
        dropped_reports: jobs whose result nobody took before 65,536 newer ones ended.
        streams, streams_in_use, events, events_in_use: made, and busy now.
        pinned_bytes: of the slot pool.
    """

    simulated: bool
    num_slots: int
    pinned_bytes: int
    in_flight: int
    held: int
    unreported: int
    dropped_reports: int
    streams: int
    streams_in_use: int
    events: int
    events_in_use: int
    store: DirectionTotals
    load: DirectionTotals


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often values fell where.

    Attributes:
        bounds: upper bounds of the ranges, rising; a value equal to a bound counts below it.
        counts: values of each range, and one more for those above the last bound.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class TenantCounts:
    """What a cache has done for one tenant since it was made, in blocks of the cache, one per key.

    Attributes:
        stored, failed, declined: as in `CacheStatistics`.
    """

    stored: int = 0
    failed: int = 0
    declined: int = 0


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What a block cache holds and has done; counted in blocks of the cache, one per key.

    Attributes:
        capacity: keys that fit.
        resident: keys that can be loaded.
        pending: keys reserved or being stored, not ready yet.
        pinned: keys that a lease or an unfinished load holds.
        lookups, hits: keys asked for by `lookup`, and leading ones found.
        stored, loaded, evicted, failed: blocks stored, loaded, evicted, and stores that failed or were given up.
        declined: blocks that were not stored, being worth less than what they would have displaced, or not asked for
            often enough.
        removed: keys taken out by `remove` and `clear`.
        residency_seconds: how long evicted keys had been in the cache.
        reuse_distance_blocks: blocks that were touched between two touches of a key.
        tenants: the same counts by tenant, for tenants that have stored something; "" is the default tenant.
    """

    capacity: int
    resident: int
    pending: int
    pinned: int
    lookups: int
    hits: int
    stored: int
    loaded: int
    evicted: int
    failed: int
    declined: int
    removed: int
    residency_seconds: Histogram
    reuse_distance_blocks: Histogram
    tenants: tuple[tuple[str, TenantCounts], ...] = ()


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Something that happened in a block cache.

    Attributes:
        kind: "hit" and "miss" (what `lookup` found and did not find of a request), "stored" (can be loaded from now
            on), "evicted", "declined", "failed", "removed".
        keys: the keys concerned, in the order of the request.
        namespace: of the request that stored them; "" if it is not known or there is none.
    """

    kind: str
    keys: tuple[bytes, ...]
    namespace: str = ""

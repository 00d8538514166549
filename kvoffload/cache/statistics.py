"""Counts, histograms and events of a cache, and what a restore has done."""

from __future__ import annotations

import math
import threading
import time
import warnings
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.errors import CapacityError, KVOffloadWarning
from kvoffload.internal.types import Int64Array

EventKind = Literal["hit", "miss", "stored", "promoted", "evicted", "declined", "failed", "removed", "weights"]

_RESIDENCY_SECONDS = tuple(float(4**power) for power in range(-5, 12))  # 1 ms to 48 days
_REUSE_DISTANCES = tuple(float(2**power) for power in range(6, 31))
_BY_TENANT = ("stored", "failed", "declined")
_COUNTED = ("promoted", "evicted", "removed", *_BY_TENANT)
_FEW = 6  # keys of one call: where there are no more, Python's own numbers take less time than numpy's
_MANY = 64  # the same, where nearly all of it is done in C
_SHOWN_WHERE_NOT_0 = (
    *("pending", "pinned", "stored", "loaded", "evicted", "declined", "unfit", "failed", "removed", "promoted"),
)


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values fell into each range.

    Attributes:
        bounds: upper bounds of the ranges, rising; a range includes its bound.
        counts: values in each range, and at the end, values above the last bound.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Restored(NamedTuple):
    """What `BlockCache.restore` has done.

    Attributes:
        tokens: how many tokens of the file, from the first, are hits of this cache now, those included that were.
        of: how many tokens the file has.
        reason: why `tokens` are not all of them; "": they are.
    """

    tokens: int
    of: int
    reason: str


@dataclass(frozen=True, slots=True)
class TenantCounts:
    """Counts for one tenant since the cache was created, in blocks of the cache, one per key.

    Attributes:
        stored, failed, declined: as in `CacheStatistics`.
    """

    stored: int = 0
    failed: int = 0
    declined: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class CacheStatistics:
    """How full a block cache is, and its counts since it was created, in blocks of the cache, one per key.

    Attributes:
        capacity: keys that fit now; more later, while the engine's pool grows.
        resident: keys that can be loaded, or could with the weights that they are of.
        pending: keys reserved, being stored or being promoted, not ready yet.
        pinned: entries that a lease, a promotion, an unfinished load or a write to a tier holds.
        lookups, hits: keys that `lookup`, `status_of` and promotions asked for, and the leading ones that they found
            (and reported: see `max_load_blocks`).
        stored, evicted: blocks that became ready by `store` or `commit`; blocks that made room for others.
        loaded: blocks that `load` and `fetch` of a BlockCache have copied, repeats included.
        failed: blocks whose store failed or was aborted.
        declined: blocks not stored because they were worth less than the blocks they would have displaced, were not
            looked up often enough, were over a tenant's quota, found too few entries free or evictable, or no owner of
            their shared pool, were of a request opened with other weights, or did not fit the layout's codec.
        removed: keys that could be loaded, and were taken out: by `remove` or `clear`, or because a load found that
            their blocks do not fit the layout's codec. With these, `stored + promoted - evicted - removed` is
            `resident`, except after `restore`, and over a shared pool: there `resident`, `pending`, `pinned` and
            `evicted` are those of all members (the first three 0 while no owner answers), and the others this one's.
        residency_seconds: how long evicted keys had been in the cache.
        reuse_distance_blocks: blocks that were touched, repeats included, between two touches of a key that stayed in
            the cache.
        tenants: (name, counts) of each tenant that has such counts, by name; "" is the default tenant.
        promoted: blocks that a tier has filled; they do not count as stored.
        hits_from: the hits by where they were found: "host", then each tier that promotions brought hits from.
        hints: how many hints got which answer: ("retain accepted", 3) and so on.
        retained_hits: blocks that were loaded, or used, while a promise retained them.
        unfit: of `declined`, the blocks that the layout's codec could not hold.
        weights: the name that `use_weights` was given last; "": none.
        of_other_weights: keys of other weights that have entries still. They go first.
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
    promoted: int = 0
    hits_from: tuple[tuple[str, int], ...] = ()
    hints: tuple[tuple[str, int], ...] = ()
    retained_hits: int = 0
    unfit: int = 0
    weights: str = ""
    of_other_weights: int = 0

    @property
    def hit_rate(self) -> float:
        """`hits / lookups` since the cache was created, 0.0 to 1.0; NaN if there were no lookups."""
        return self.hits / self.lookups if self.lookups else math.nan

    def __repr__(self) -> str:
        """One line: keys held, the hit rate, and the counts that are not 0."""
        rate = f"hit_rate={self.hit_rate:.3f}" if self.lookups else "no lookups"
        counts = {name: getattr(self, name) for name in _SHOWN_WHERE_NOT_0}
        shown = "".join(f", {name}={count}" for name, count in counts.items() if count)
        return f"CacheStatistics(capacity={self.capacity}, resident={self.resident}, {rate}{shown})"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Something that happened in a block cache.

    Attributes:
        kind: "hit": the leading keys of a request that `lookup`, `status_of` or a promotion found; "miss": all its
            other keys, even present ones; "stored": can be loaded from now on; "promoted": the same, but a tier brought
            it; "evicted": made room for others; "declined": not stored, as `CacheStatistics` says, or (after its
            transfer, or by a load) found to be more than the layout's codec holds; "failed": its store failed or was
            aborted; "removed": could be loaded, and was taken out by `remove` or `clear`, or by a load that found it
            unfit; "weights": `use_weights` has changed the weights, to `weights`. A key that is removed while it is
            stored was never announced, so nothing is told of it.
        keys: the keys concerned: in the order of the request; evicted ones in the order in which they went. None for
            "weights".
        tenant: for "stored", "promoted", "declined" and "failed", the tenant of the call or its request; else "".
        weights: the name of the weights that the keys are of: an event concerns keys of one name.
    """

    kind: EventKind
    keys: tuple[bytes, ...]
    tenant: str = ""
    weights: str = ""


class Tally:
    """A histogram while it grows."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._edges = bounds
        self._bounds = np.array(bounds, dtype=np.float64)
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._each = self._counts.data  # the same numbers; one of them takes less time than by numpy
        self._total = 0.0

    def add(self, values: npt.NDArray[Any]) -> None:
        self._counts += np.bincount(self._bounds.searchsorted(values), minlength=len(self._counts))
        self._total += float(values.sum())

    def add_one(self, value: float, times: int = 1) -> None:
        self._each[bisect_left(self._edges, value)] += times
        self._total += value * times

    def snapshot(self) -> Histogram:
        return Histogram(tuple(self._bounds.tolist()), tuple(self._counts.tolist()), self._total)


class StatisticsRecorder:
    """Counts at once; keeps events in order until `notify` calls the hook, outside all locks.

    After an interrupt, the counts and events of that call may be missing.
    """

    def __init__(self, capacity: int, on_event: Callable[[CacheEvent], None] | None) -> None:
        if on_event is not None and not callable(on_event):
            raise TypeError(f"on_event must be a function of a CacheEvent, got {on_event!r:.80}")
        self._on_event = on_event
        self.has_hook = on_event is not None
        self.unreported = deque[CacheEvent]()
        self.lookups = self.hits = self.loaded = self.unfit = 0  # keys; blocks
        self._hits_in_tiers = Counter[str]()  # among the hits, by the tier's name
        self._notifier: dict[str, list[int]] = {}  # "now": the thread of the call of `notify` that calls the hook
        self.deferred_by = 0  # a thread whose calls of `notify` do nothing, since it holds a lock
        self._counts = Counter[tuple[EventKind, str]]()  # keys, by the event's kind and tenant
        self._touched_blocks = 0
        try:
            self._stored_at = np.zeros(capacity)  # by entry, seconds
            self._touched_at = np.zeros(capacity, dtype=np.int64)  # by entry: `_touched_blocks` at its last touch, or 0
        except (MemoryError, ValueError) as error:
            raise CapacityError(
                f"capacity={capacity} keys need {16 * capacity} bytes for their statistics, which cannot be allocated "
                f"({error}); lower capacity, or pool_bytes or num_slots of the engine"
            ) from None
        self._stored_at_each: Any = self._stored_at.data  # the same numbers, see `Tally`
        self._touched_at_each = self._touched_at.data
        self._residency = Tally(_RESIDENCY_SECONDS)
        self._distances = Tally(_REUSE_DISTANCES)

    def note(self, kind: EventKind, keys: Sequence[bytes], tenant: str = "") -> None:
        self._counts[kind, tenant.partition("\0")[0]] += len(keys)  # of a namespace its tenant
        if self._on_event is not None:
            self.announce(kind, keys, tenant)

    def note_lookup(self, keys: Sequence[bytes], found: int) -> None:
        self.lookups += len(keys)
        self.hits += found
        if self._on_event is not None:
            self.announce("hit", keys[:found])
            self.announce("miss", keys[found:])

    def note_promotion(self, keys: Sequence[bytes], found: int, in_tiers: Sequence[str]) -> None:
        """As `note_lookup`, for a promotion that has ended. `in_tiers`: the tier's name for each hit that one has
        brought; all others were in the host.
        """
        self.note_lookup(keys, found)
        if in_tiers:
            self._hits_in_tiers.update(in_tiers)

    def note_stored(self, keys: Sequence[bytes], entries: Sequence[int], tenant: str, promoted: bool) -> None:
        now, each = time.monotonic(), self._stored_at_each
        for entry in entries:  # numpy takes as long for many, and longer for few
            each[entry] = now
        kind: EventKind = "promoted" if promoted else "stored"
        self._counts[kind, tenant.partition("\0")[0]] += len(keys)
        if self._on_event is not None:
            self.announce(kind, keys, tenant)

    def note_unfit(self, keys: Sequence[bytes], tenant: str) -> None:
        self.unfit += len(keys)
        self.note("declined", keys, tenant)

    def note_restored(self, entries: Int64Array) -> None:
        """Count the residency of these entries, which hold keys of an earlier process, from now on."""
        now = time.monotonic()
        self._stored_at[entries] = now

    def note_evicted(self, keys: Sequence[bytes], entries: Sequence[int]) -> None:
        now = time.monotonic()
        if len(entries) <= _FEW:
            for entry in entries:
                self._residency.add_one(now - self._stored_at_each[entry])
        else:
            self._residency.add(now - self._stored_at[entries])
        self._counts["evicted", ""] += len(keys)
        if self._on_event is not None:
            self.announce("evicted", keys)

    def note_new(self, entries: Sequence[int]) -> None:
        """Forget earlier touches of these entries: they have new keys, which may be touched before they are stored."""
        for entry in entries:
            self._touched_at_each[entry] = 0

    def note_touched(self, entries: list[int], blocks: int) -> None:
        """Count the touches of a request that has ended. `blocks`: those it asked for; `entries`: those present."""
        now = self._touched_blocks
        self._touched_blocks = later = now + blocks
        if not entries:
            return
        each = self._touched_at_each
        if len(entries) == 1:
            before = each[entries[0]]
            if before:
                self._distances.add_one(now - before)
            each[entries[0]] = later
            return
        if len(entries) <= _MANY:
            all_before = list(map(each.__getitem__, entries))
            before = all_before[0]
            if all_before.count(before) == len(entries):  # as of keys that were touched together, or never
                if before:
                    self._distances.add_one(now - before, len(entries))
                for entry in entries:
                    each[entry] = later
                return
        several = np.array(entries, dtype=np.int64)
        earlier = self._touched_at[several]
        self._distances.add(now - earlier[earlier > 0])
        self._touched_at[several] = later

    def statistics(self, *, capacity: int, resident: int, pending: int, pinned: int) -> CacheStatistics:
        counts: dict[str, Any] = dict.fromkeys(_COUNTED, 0)
        by_tenant: dict[str, dict[str, int]] = {}
        for (kind, tenant), count in list(self._counts.items()):
            counts[kind] += count
            if count and kind in _BY_TENANT:
                by_tenant.setdefault(tenant, {})[kind] = count
        return CacheStatistics(
            capacity=capacity,
            resident=resident,
            pending=pending,
            pinned=pinned,
            residency_seconds=self._residency.snapshot(),
            reuse_distance_blocks=self._distances.snapshot(),
            tenants=tuple((name, TenantCounts(**mine)) for name, mine in sorted(by_tenant.items())),
            lookups=self.lookups,
            hits=self.hits,
            hits_from=(("host", self.hits - self._hits_in_tiers.total()), *sorted(self._hits_in_tiers.items())),
            loaded=self.loaded,
            unfit=self.unfit,
            **counts,
        )

    def reporting(self, thread: int = 0) -> bool:
        """Return whether another thread than this (0: the caller's) is telling the hook of events, or will tell it."""
        notifier = self._notifier.get("now")
        if notifier is None:
            return bool(self.unreported)
        return notifier[0] != (thread or threading.get_ident())

    def notify(self) -> None:
        """Call the hook for every unreported event. An Exception that it raises becomes a warning.

        No lock may be held. The hook gets one event at a time, in order. If another call of `notify` has not returned,
        in another thread or further up in this one, that call reports these events, too.
        """
        if self.deferred_by and self.deferred_by == threading.get_ident():
            return
        while self.unreported:
            mine = [threading.get_ident()]
            try:
                if self._notifier.setdefault("now", mine) is not mine:  # one operation: a lock could be taken twice
                    return
                if self.unreported:  # no other thread has reported the last one meanwhile
                    event = self.unreported[0]
                    del self.unreported[0]  # not popleft(): an interrupt after that call would lose the event
                    try:
                        self._on_event(event)  # type: ignore[misc]
                    except Exception as error:  # noqa: BLE001  # a hook of the caller's
                        message = f"on_event raised {error!r}; the cache goes on"
                        warnings.warn(message, KVOffloadWarning, stacklevel=4)
            finally:
                if "now" in self._notifier and self._notifier["now"] is mine:  # no call, after which a signal comes
                    del self._notifier["now"]

    def note_weights(self, name: str) -> None:
        if self._on_event is not None:
            self.unreported.append(CacheEvent("weights", (), "", name))

    def announce(self, kind: EventKind, keys: Sequence[bytes], tenant: str = "") -> None:
        if keys:
            self.unreported.append(CacheEvent(kind, tuple(keys), tenant))

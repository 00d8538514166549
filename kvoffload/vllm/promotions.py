"""Promotions: bring keys that vLLM's scheduler asks for from tiers into slots.

vLLM asks key by key, in each step, until it gets an answer. For a request and the keys of one group:

    lookup  HIT, HIT, RETRY, RETRY, MISS        RETRY: a tier may have it     HIT_PENDING: a tier has it
    end of the step                             one promotion of the first four, which holds the two that are there
    next steps  HIT, HIT, HIT_PENDING, ...      until the promotion has ended: then each is a HIT or a MISS

A key of a request is promoted once, and the promotions of a request share one deadline. Promoted keys are not evicted
until the request's load has begun, the request has finished, or the deadline has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload.cache.entries import Status
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.reservations import Lease
from kvoffload.cache.statistics import CacheEvent, CacheStatistics
from kvoffload.cache.tiering import BreakerState, CacheTierStatistics
from kvoffload.cache.tiering.promotion import Promotion
from kvoffload.errors import KVOffloadError, MissingKeyError, TierError
from kvoffload.internal.log import LOGGER

OpenIndex = Callable[[Callable[[CacheEvent], None] | None], CacheIndex]


@dataclass(slots=True, eq=False)
class PromotionState:
    """State of one request, kept in vLLM's `ReqContext` by its type.

    Attributes:
        owner: several managers may see one context.
        seen: for each group the keys that vLLM asked for in this step and that are in slots or to be promoted.
        wanted: keys to promote at the end of the step.
        asked: keys that are or were being promoted.
        held: promotions that have not been released.
        until: when they end, by `time.monotonic`; 0: none has begun.
        counted: keys that statistics have counted, until its load begins.
    """

    owner: Promotions
    seen: dict[int, dict[OffloadKey, None]] = field(default_factory=dict)
    wanted: set[OffloadKey] = field(default_factory=set)
    asked: dict[OffloadKey, Promotion] = field(default_factory=dict)
    held: list[Promotion] = field(default_factory=list)
    until: float = 0.0
    counted: set[OffloadKey] = field(default_factory=set)


class Promotions:
    """The tiers below a manager's slots, and the promotions from these. Only vLLM's scheduler thread uses it.

    A thread of the tiers may evict keys to promote others. So each hit of `lookup` is held until the end of the step,
    in which vLLM begins to load it.

    Args:
        open_index: opens the index over the tiers, at the manager's first use.
        seconds: longest time that a request waits for tiers.
        windows: window size in chunks, for each group that has a window, by the group's number. If a tier has no local
            index, only the last chunks of a request in such a group are promoted.
        source: where promoted keys come from, for vLLM's metrics.
    """

    def __init__(
        self,
        open_index: OpenIndex,
        *,
        seconds: float,
        windows: Mapping[int, int],
        source: CacheHitSource = CacheHitSource.EXTERNAL_UNSPECIFIED,
    ) -> None:
        self._open_index = open_index
        self._seconds, self._windows, self._source = seconds, windows, source
        self._index: CacheIndex | None = None
        self._ended = False
        self._active: set[PromotionState] = set()
        self._held: list[Lease] = []  # hits of this step

    def open(self, on_event: Callable[[CacheEvent], None] | None) -> CacheIndex:
        self._index = self._open_index(on_event)
        return self._index

    def lookup(self, index: CacheIndex, key: OffloadKey, context: ReqContext) -> LookupResult:
        """Answer a request's lookup of a key. Statistics count the final answer only: vLLM asks again in each step
        until it gets one.
        """
        state = self._state(context)
        [status] = index.status([key])  # counts nothing
        if status is Status.HIT:
            try:
                self._held.append(index.acquire([key]))
            except MissingKeyError:  # evicted meanwhile
                status = Status.MISS
        if status is Status.MISS:
            result = self._ask(index, state, key)
        else:
            state.seen.setdefault(get_offload_group_idx(key), {})[key] = None
            result = LookupResult.HIT if status is Status.HIT else LookupResult.HIT_PENDING
        if result in (LookupResult.HIT, LookupResult.MISS) and key not in state.counted:
            index.status_of(key)
            state.counted.add(key)
        return result

    def _ask(self, index: CacheIndex, state: PromotionState, key: OffloadKey) -> LookupResult:
        promotion = state.asked.get(key)
        if promotion is not None:
            return LookupResult.MISS if promotion.done else LookupResult.RETRY
        if self._ended or 0 < state.until <= time.monotonic():
            return LookupResult.MISS
        below = index.status_below(key)
        group = get_offload_group_idx(key)
        seen = state.seen.setdefault(group, {})
        if below is Status.PENDING and group in self._windows and len(seen) > self._windows[group]:
            below = Status.MISS
        if below is Status.MISS:
            return LookupResult.MISS
        seen[key] = None
        state.wanted.add(key)
        return LookupResult.HIT_PENDING if below is Status.HIT else LookupResult.RETRY

    def source_of(self, key: OffloadKey, context: ReqContext) -> CacheHitSource:
        state = context.get_state(PromotionState)
        brought = state is not None and state.owner is self and key in state.asked
        return self._source if brought else CacheHitSource.HOST

    def advance(self) -> None:
        """End a step: promote the keys that were asked for, and release promotions that were held for too long."""
        self._release_hits()
        now = time.monotonic()
        for state in list(self._active):
            if state.wanted and not self._ended:
                state.until = state.until or now + self._seconds
                for seen in state.seen.values():
                    self._promote(state, seen, state.until - now)
            state.seen.clear()
            state.wanted.clear()
            if state.held and now >= state.until and all(promotion.done for promotion in state.held):
                self._release(state)
            if not state.held:
                self._active.discard(state)

    def _promote(self, state: PromotionState, seen: Mapping[OffloadKey, None], seconds: float) -> None:
        wanted = state.wanted.intersection(seen)
        if not wanted or seconds <= 0:
            return
        assert self._index is not None
        try:
            promotion = self._index.promote(list(seen), deadline=seconds, counted=False)  # `lookup` counts
        except KVOffloadError:  # closed
            return
        state.held.append(promotion)
        state.asked.update(dict.fromkeys(wanted, promotion))

    def release(self, context: ReqContext) -> None:
        """Let keys that were promoted for this request be evicted: it has begun to load, or has finished."""
        state = context.get_state(PromotionState)
        if state is not None and state.owner is self:
            self._release(state)
            state.counted.clear()

    def clear(self, index: CacheIndex) -> None:
        """Drop all keys, in the tiers, too: vLLM resets for new weights, for example, which make all records wrong."""
        self._forget()
        try:
            index.clear(below=not self._ended)
        except TierError as error:
            LOGGER.error("the tiers are not used any more, since a reset of vLLM's cache failed there: %s", error)
            self._ended = True
            index.close(0.0)

    def statistics(self, index: CacheIndex) -> CacheStatistics:
        return index.statistics()

    def tier_statistics(self) -> tuple[CacheTierStatistics, ...]:
        now = () if self._index is None else tuple(self._index.tier_statistics())
        return tuple(replace(tier, state=BreakerState.OPEN) for tier in now) if self._ended else now

    def close(self) -> None:
        """Close the tiers, and wait at most 10 seconds for their writes. Nothing more is promoted."""
        if self._index is None:
            return
        self._ended = True
        self._forget()
        if not self._index.close():
            LOGGER.warning("a call of a tier has not returned; it ends with the process")
        self._index = None

    def _forget(self) -> None:
        self._release_hits()
        for state in list(self._active):
            self._release(state)

    def _release_hits(self) -> None:
        for lease in self._held:
            lease.release()
        self._held.clear()

    def _release(self, state: PromotionState) -> None:
        for promotion in state.held:
            promotion.release()
        state.held.clear()
        state.seen.clear()
        state.wanted.clear()
        self._active.discard(state)

    def _state(self, context: ReqContext) -> PromotionState:
        state: PromotionState | None = context.get_state(PromotionState)
        if state is None or state.owner is not self:
            state = PromotionState(self)
            context.set_state(state)
        self._active.add(state)
        return state

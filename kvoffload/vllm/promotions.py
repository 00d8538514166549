"""Promotions: keys that vLLM's scheduler asks for, and tiers have, on their way into slots.

vLLM asks key by key, in each step, until it gets an answer. Per request, of the keys of one group in one step:

    lookup  HIT, HIT, RETRY, RETRY, MISS        RETRY: a tier may have it     HIT_PENDING: a tier has it
    end of the step                             one promotion of the first four, which holds the two that are there
    next steps  HIT, HIT, HIT_PENDING, ...      until the promotion has ended: then each is a HIT or a MISS

A key of a request is promoted once, and the promotions of a request share one deadline. They hold what they have
brought until the request's load has begun, it has finished, or the deadline has passed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, get_offload_group_idx

from kvoffload.cache.entries import Status
from kvoffload.cache.tiering.promotion import IndexPromotion
from kvoffload.cache.tiering.tiered_index import TieredIndex
from kvoffload.errors import KVOffloadError


@dataclass(slots=True, eq=False)
class PromotionState:
    """Of one request; kept in vLLM's `ReqContext`, by its type.

    Attributes:
        owner: several managers may see one context.
        seen: of each group, the keys that were asked for in this step, and are in slots or to be promoted.
        wanted: those to be promoted.
        asked: keys that are promoted, or were.
        held: promotions that have not been released.
        until: when they end, by `time.monotonic`; 0: none has begun.
    """

    owner: Promotions
    seen: dict[int, dict[OffloadKey, None]] = field(default_factory=dict)
    wanted: set[OffloadKey] = field(default_factory=set)
    asked: dict[OffloadKey, IndexPromotion] = field(default_factory=dict)
    held: list[IndexPromotion] = field(default_factory=list)
    until: float = 0.0


class Promotions:
    """The promotions of a manager. Used by vLLM's scheduler thread alone.

    Args:
        index: where keys are promoted to.
        seconds: that a request waits at most.
        windows: chunks of the window of each group that has one: of a request's chunks in such a group no more than
            the last ones are promoted where a tier cannot say what it has.
    """

    def __init__(self, index: TieredIndex, seconds: float, windows: Mapping[int, int]) -> None:
        self._index, self._seconds, self._windows = index, seconds, windows
        self._active: set[PromotionState] = set()
        self.ended = False

    def note(self, key: OffloadKey, context: ReqContext) -> None:
        """A request has asked for a key that has a slot."""
        self._state(context).seen.setdefault(get_offload_group_idx(key), {})[key] = None

    def ask(self, key: OffloadKey, context: ReqContext) -> LookupResult:
        """The answer to a request that has looked up a key without a slot."""
        state = self._state(context)
        promotion = state.asked.get(key)
        if promotion is not None:
            return LookupResult.MISS if promotion.done else LookupResult.RETRY
        if self.ended or 0 < state.until <= time.monotonic():
            return LookupResult.MISS
        below = self._index.status_below(key)
        group = get_offload_group_idx(key)
        seen = state.seen.setdefault(group, {})
        if below is Status.PENDING and group in self._windows and len(seen) > self._windows[group]:
            below = Status.MISS
        if below is Status.MISS:
            return LookupResult.MISS
        seen[key] = None
        state.wanted.add(key)
        return LookupResult.HIT_PENDING if below is Status.HIT else LookupResult.RETRY

    def brought(self, key: OffloadKey, context: ReqContext) -> bool:
        """Whether a key came from a tier for this request."""
        state = context.get_state(PromotionState)
        return state is not None and state.owner is self and key in state.asked

    def advance(self) -> None:
        """At the end of a step: promote what was asked for in it, and release what was held for too long."""
        now = time.monotonic()
        for state in list(self._active):
            if state.wanted and not self.ended:
                self._begin(state, now)
            state.seen.clear()
            state.wanted.clear()
            if state.held and now >= state.until and all(promotion.done for promotion in state.held):
                self._release(state)
            if not state.held:
                self._active.discard(state)

    def _begin(self, state: PromotionState, now: float) -> None:
        if not state.until:
            state.until = now + self._seconds
        left = state.until - now
        for seen in state.seen.values():
            wanted = state.wanted.intersection(seen)
            if not wanted or left <= 0:
                continue
            try:
                promotion = self._index.promote(list(seen), deadline=left, counted=False)  # `lookup` counts
            except KVOffloadError:  # closed
                continue
            state.held.append(promotion)
            state.asked.update(dict.fromkeys(wanted, promotion))

    def release(self, context: ReqContext) -> None:
        """The request has begun to load, or has finished: what was promoted for it may be evicted."""
        state = context.get_state(PromotionState)
        if state is not None and state.owner is self:
            self._release(state)

    def end(self) -> None:
        """Release all, and promote nothing more."""
        self.ended = True
        self.forget()

    def forget(self) -> None:
        """Release all."""
        for state in list(self._active):
            self._release(state)

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

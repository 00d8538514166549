"""TierBelow: a tier as the manager sees it: whether it is to be used now, how fast it is, and what it did."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvoffload.internal.log import LOGGER
from kvoffload.tiering.breaker import Breaker, BreakerState
from kvoffload.tiering.speed import TierSpeed
from kvoffload.tiers.job import Outcome
from kvoffload.tiers.tier import Tier, TierStatistics


@dataclass(frozen=True, slots=True)
class BelowStatistics:
    """What a cache has done with one of its tiers.

    Attributes:
        name: of the tier.
        state: of its breaker: whether it is used.
        opened: how often the breaker has opened.
        promoted: keys that it has brought.
        not_found: keys that it was asked for and did not bring.
        slower: keys that were not asked for, since computing them was expected to take less time.
        written: keys that it has taken.
        not_written: keys that were given to it, and were not written: its queue was full, it failed, or had no room.
        dropped: keys that were worth writing, and were not given to it: too many slots were being written already, it
            was not usable, or they had been evicted.
        seconds_per_record: that fetching one takes, as measured lately; None if it was not.
        tier: the tier's own statistics.
    """

    name: str
    state: BreakerState
    opened: int
    promoted: int
    not_found: int
    slower: int
    written: int
    not_written: int
    dropped: int
    seconds_per_record: float | None
    tier: TierStatistics


class TierBelow:
    """One tier of a cache. Changed under the manager's lock.

    Attributes:
        tier: the tier.
        breaker, speed: see there.
        promoted, not_found, slower, written, not_written, dropped: see `BelowStatistics`.
    """

    def __init__(self, tier: Tier, hung: float) -> None:
        self.tier = tier
        self.breaker = Breaker(hung)
        self.speed = TierSpeed()
        self.promoted = self.not_found = self.slower = self.written = self.not_written = self.dropped = 0

    @property
    def usable(self) -> bool:
        """Whether it may be given a job now."""
        before = self.breaker.state
        usable = self.breaker.usable(time.monotonic(), self.tier.statistics().longest_call)
        if before is not BreakerState.OPEN and self.breaker.state is BreakerState.OPEN:
            LOGGER.warning("tier %s: a call does not return; it is not used until it has", self.tier.name)
        return usable

    def may_have(self, keys: Sequence[bytes]) -> list[bool]:
        """Of each key whether it is worth asking for; a tier without a local index may have any."""
        if not self.tier.capabilities.local_index:
            return [True] * len(keys)
        return self.tier.contains(keys)

    def answered(self, outcome: Outcome) -> None:
        """What an outcome says of the tier's health."""
        if outcome in (Outcome.DONE, Outcome.MISSING):
            self.breaker.succeeded()
        elif outcome is Outcome.FAILED:
            self.failed()

    def failed(self) -> None:
        before = self.breaker.opened
        self.breaker.failed(time.monotonic())
        if self.breaker.opened > before:
            LOGGER.warning("tier %s fails; it is not used for a while", self.tier.name)

    def statistics(self) -> BelowStatistics:
        return BelowStatistics(
            self.tier.name,
            self.breaker.state,
            self.breaker.opened,
            self.promoted,
            self.not_found,
            self.slower,
            self.written,
            self.not_written,
            self.dropped,
            self.speed.expected(1, time.monotonic()),
            self.tier.statistics(),
        )

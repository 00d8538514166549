"""TierBelow: a tier as the manager sees it: whether it is to be used now, how fast it is, and what it did."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvoffload.internal.checks import reason, shown
from kvoffload.internal.log import LOGGER
from kvoffload.tiering.breaker import Breaker, BreakerState
from kvoffload.tiering.speed import TierSpeed
from kvoffload.tiers.job import Outcome, TierJob
from kvoffload.tiers.tier import LONGEST_KEY, Notify, Tier, TierStatistics

_SECONDS_BETWEEN_WARNINGS = 10.0  # a tier that raises does so for every key


@dataclass(frozen=True, slots=True)
class CacheTierStatistics:
    """What a cache, or a TieredIndex, has done with one of its tiers.

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
    """One tier of a cache. Changed under the manager's lock. No Exception of a tier leaves a method.

    Attributes:
        tier: the tier.
        local_index: whether it knows at once what it has.
        hung: seconds after which a call is taken for one that does not return.
        breaker, speed: see there.
        promoted, not_found, slower, written, not_written, dropped: see `CacheTierStatistics`.
    """

    def __init__(self, tier: Tier, hung: float) -> None:
        self.tier = tier
        self.local_index = tier.capabilities.local_index
        self.hung = hung
        self.breaker = Breaker(hung)
        self.speed = TierSpeed()
        self.promoted = self.not_found = self.slower = self.written = self.not_written = self.dropped = 0
        self._warned = -_SECONDS_BETWEEN_WARNINGS
        self._corrupt = 0  # records of other bytes than were put, of which note was taken

    # asking -------------------------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether it may be given a job now."""
        if self.breaker.pauses(time.monotonic()):
            return False
        before = self.breaker.state
        usable = self.breaker.usable(time.monotonic(), self._tier_statistics().longest_call)
        if before is not BreakerState.OPEN and self.breaker.state is BreakerState.OPEN:
            LOGGER.warning("tier %s: a call does not return; it is not used until it has", self.tier.name)
        return usable

    @property
    def left_alone(self) -> bool:
        """Whether its breaker is open; not while one job tries it."""
        return not self.usable and self.breaker.state is BreakerState.OPEN

    def may_be_asked(self, key: bytes) -> bool:
        """Whether it may have a key, and is not left alone. Changes nothing; for any thread."""
        if self.breaker.pauses(time.monotonic()):
            return False
        if self.breaker.state is not BreakerState.CLOSED:  # else the manager's thread looks
            longest_call = self._tier_statistics().longest_call
            if self.breaker.refuses(time.monotonic(), longest_call):
                return False
        return self.may_have([key])[0]

    @property
    def hangs(self) -> bool:
        """Whether a call of it does not return."""
        return self._tier_statistics().longest_call >= self.hung

    def may_have(self, keys: Sequence[bytes]) -> list[bool]:
        """Of each key whether it is worth asking for; a tier without a local index may have any that it can have."""
        return self.has(keys) if self.local_index else [fits(key) for key in keys]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Of each key whether it is known to have it. Never blocks; for any thread."""
        if not self.local_index:
            return [False] * len(keys)
        try:
            found = list(self.tier.contains(keys))
        except Exception as error:  # a tier of the user's
            self._warn(error)
            found = []
        return found if len(found) == len(keys) else [False] * len(keys)

    def statistics(self) -> CacheTierStatistics:
        return CacheTierStatistics(
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
            self._tier_statistics(),
        )

    def _tier_statistics(self) -> TierStatistics:
        try:
            statistics = self.tier.statistics()
        except Exception:  # a tier of the user's
            return TierStatistics()
        return statistics if isinstance(statistics, TierStatistics) else TierStatistics()

    # jobs ---------------------------------------------------------------------------------------------------------

    def get(self, keys: Sequence[bytes], entries: Sequence[int], deadline: float | None, notify: Notify) -> TierJob:
        """`Tier.get`; what it raises makes all keys FAILED."""
        return self._given(lambda: self.tier.get(keys, entries, deadline=deadline, notify=notify), keys, entries)

    def put(self, keys: Sequence[bytes], entries: Sequence[int], tenant: str, notify: Notify) -> TierJob:
        """`Tier.put`; what it raises makes all keys FAILED."""
        return self._given(lambda: self.tier.put(keys, entries, tenant=tenant, notify=notify), keys, entries)

    def _given(self, call: Callable[[], TierJob], keys: Sequence[bytes], entries: Sequence[int]) -> TierJob:
        self.breaker.given(time.monotonic())
        try:
            job = call()
            if not isinstance(job, TierJob) or job.keys != tuple(keys):
                raise TypeError(f"a TierJob of {len(keys)} keys expected, got {shown(job)}")
            return job
        except BaseException as error:  # a tier of the user's, or one that was closed
            self._warn(error)
            return TierJob(keys, entries).settle_waiting(Outcome.FAILED)

    def _warn(self, error: BaseException) -> None:
        now = time.monotonic()
        if now - self._warned >= _SECONDS_BETWEEN_WARNINGS:
            self._warned = now
            LOGGER.warning("tier %s: %s; its keys are misses", self.tier.name, reason(error))

    def answered(self, outcomes: Sequence[Outcome | None]) -> None:
        """What outcomes of one job, in its order, say of the tier's health; None says nothing."""
        known = self._corrupt
        if Outcome.MISSING in outcomes:  # each corrupt record is one of these, and was counted before
            known = self._tier_statistics().corrupt
        for outcome in outcomes:
            corrupt = outcome is Outcome.MISSING and known > self._corrupt
            self._corrupt += corrupt
            if outcome is Outcome.FAILED or corrupt:
                self._failed()
            elif outcome in (Outcome.DONE, Outcome.MISSING):
                self.breaker.succeeded()
            elif outcome is not None:
                self.breaker.undecided(time.monotonic())

    def late(self, *, begun: bool) -> None:
        """A promotion's deadline passed: it worked on a key, or had begun with none, since other calls go on."""
        self.breaker.late(time.monotonic())
        if begun:
            self._failed()

    def _failed(self) -> None:
        before = self.breaker.opened
        self.breaker.failed(time.monotonic())
        if self.breaker.opened > before:
            LOGGER.warning("tier %s fails; it is not used for a while", self.tier.name)


def fits(key: bytes) -> bool:
    """Whether tiers can have a key at all: those of `chain_keys` have 16 bytes."""
    return 0 < len(key) <= LONGEST_KEY

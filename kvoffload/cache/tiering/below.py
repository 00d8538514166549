"""TierBelow: a tier as the manager sees it: whether to use it now, its speed, and its counts."""

from __future__ import annotations

import enum
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvoffload.cache.tiering.tier import LONGEST_KEY, Notify, Outcome, Tier, TierJob, TierStatistics
from kvoffload.internal.checks import reason, shown
from kvoffload.internal.log import LOGGER

_SECONDS_BETWEEN_WARNINGS = 10.0  # a tier that raises does so for every key


class BreakerState(enum.Enum):
    """Whether a cache uses a tier.

    CLOSED: it does. OPEN: it does not, for 1 to 60 seconds after 5 failures in a row or a failed try, and while a call
    hangs, or has not returned since a promotion's deadline passed. TRYING: then one job is given to the tier, and its
    outcome closes the breaker or opens it again. If it is declined or cancelled, the next job is the try.
    """

    CLOSED = "closed"
    OPEN = "open"
    TRYING = "trying"


@dataclass(frozen=True, slots=True)
class CacheTierStatistics:
    """A cache's counts for one of its tiers, since the cache was created.

    Attributes:
        name: of the tier.
        state: of its breaker: whether it is used.
        opened: how often this breaker and that of `puts` have opened, together.
        promoted: keys that it brought.
        not_found: keys that it was asked for and did not bring.
        slower: keys that it was not asked for, since computing them was expected to take less time.
        written: keys that it wrote, or had already when it came to them.
        not_written: the other keys that the cache gave to it: its own queue was full, it failed, or had no room; or its
            breaker opened, and what it had not begun was cancelled.
        dropped: keys worth writing that the cache did not give to it: too many keys waited in the cache, one of its
            breakers was open, the key had been evicted, or is longer than 64 bytes.
        seconds_per_record: a fetch's seconds from beginning to end, waiting included, divided by its keys answered: a
            running mean. None if none was measured in the last 30 seconds.
        tier: the tier's own statistics.
        puts: of the breaker of its puts: whether a tier that is used is also written, or only read.
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
    puts: BreakerState = BreakerState.CLOSED


class TierBelow:
    """One tier of a cache. Changed under the manager's lock. No method lets an Exception of the tier out.

    It has two breakers. Gets that fail, or a call that hangs, open the tier's: then the cache neither reads nor writes
    it. Puts that fail open the breaker of its puts, so a store that became read-only is still read. One put may be the
    try of both breakers. If it fails, that says nothing about gets, and the next job is the try of the tier.

    Attributes:
        local_index: whether it knows at once which keys it has.
        breaker, puts: the breakers of the tier, and of its puts.
    """

    def __init__(self, tier: Tier, hung: float) -> None:
        self.tier = tier
        self.local_index = tier.capabilities.local_index
        self.hung = hung
        self.breaker, self.puts = Breaker(hung), Breaker(hung)
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
            LOGGER.warning("tier %s: a call hangs; the tier is not used until it returns", self.tier.name)
        return usable

    @property
    def takes_puts(self) -> bool:
        return self.usable and self.puts.usable(time.monotonic(), 0.0)

    @property
    def left_alone(self) -> bool:
        """True if it is not worth waiting for puts that it has not begun."""
        return (not self.usable and self.breaker.state is BreakerState.OPEN) or self.puts.pauses(time.monotonic())

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
        return self._tier_statistics().longest_call >= self.hung

    def may_have(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is worth asking for. Without a local index, the tier may have any key that it
        can hold.
        """
        return self.has(keys) if self.local_index else [fits(key) for key in keys]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        if not self.local_index:
            return [False] * len(keys)
        try:
            found = list(self.tier.contains(keys))
        except Exception as error:  # noqa: BLE001  # a tier of the user's
            self._warn(error)
            found = []
        return found if len(found) == len(keys) else [False] * len(keys)

    def statistics(self) -> CacheTierStatistics:
        return CacheTierStatistics(
            self.tier.name,
            self.breaker.state,
            self.breaker.opened + self.puts.opened,
            self.promoted,
            self.not_found,
            self.slower,
            self.written,
            self.not_written,
            self.dropped,
            self.speed.expected(time.monotonic()),
            self._tier_statistics(),
            self.puts.state,
        )

    def _tier_statistics(self) -> TierStatistics:
        try:
            statistics = self.tier.statistics()
        except Exception:  # noqa: BLE001  # a tier of the user's
            return TierStatistics()
        return statistics if isinstance(statistics, TierStatistics) else TierStatistics()

    def keep_weights(self, names: frozenset[str]) -> None:
        try:
            self.tier.keep_weights(names)
        except Exception as error:  # noqa: BLE001  # a tier of the user's
            self._warn(error)

    # jobs ---------------------------------------------------------------------------------------------------------

    def get(self, keys: Sequence[bytes], entries: Sequence[int], deadline: float | None, notify: Notify) -> TierJob:
        """Call `Tier.get`; if it raises, all keys are FAILED."""
        return self._given(lambda: self.tier.get(keys, entries, deadline=deadline, notify=notify), keys, entries)

    def put(self, keys: Sequence[bytes], entries: Sequence[int], tenant: str, notify: Notify) -> TierJob:
        """Call `Tier.put`; if it raises, all keys are FAILED."""
        self.puts.given(time.monotonic())
        return self._given(lambda: self.tier.put(keys, entries, tenant=tenant, notify=notify), keys, entries)

    def _given(self, call: Callable[[], TierJob], keys: Sequence[bytes], entries: Sequence[int]) -> TierJob:
        self.breaker.given(time.monotonic())
        try:
            job = call()
            if not isinstance(job, TierJob) or job.keys != tuple(keys):
                raise TypeError(f"a TierJob of {len(keys)} keys expected, got {shown(job)}")
            return job
        except BaseException as error:  # noqa: BLE001  # a tier of the user's, or one that was closed
            self._warn(error)
            return TierJob(keys, entries).settle_waiting(Outcome.FAILED)

    def _warn(self, error: BaseException) -> None:
        now = time.monotonic()
        if now - self._warned >= _SECONDS_BETWEEN_WARNINGS:
            self._warned = now
            LOGGER.warning("tier %s: %s; its keys are misses", self.tier.name, reason(error))

    def answered(self, outcomes: Sequence[Outcome | None], *, of_put: bool = False) -> None:
        """Judge the tier's health by outcomes of one job, in order; None says nothing."""
        breaker, known = self.puts if of_put else self.breaker, self._corrupt
        if Outcome.MISSING in outcomes:  # each corrupt record is one of these, and was counted before
            known = self._tier_statistics().corrupt
        well = False
        for outcome in outcomes:
            corrupt = outcome is Outcome.MISSING and known > self._corrupt
            self._corrupt += corrupt
            before, well = well, False
            if outcome is Outcome.FAILED or corrupt:
                self._failed(breaker)
            elif outcome in (Outcome.DONE, Outcome.MISSING):
                well = True
                if not before:  # a second one in a row says nothing new
                    breaker.succeeded()
            elif outcome is not None:
                breaker.undecided(time.monotonic())
        if of_put and self.breaker.state is BreakerState.TRYING:  # by this job, perhaps
            self.answered([Outcome.DONE if Outcome.DONE in outcomes else Outcome.DECLINED])

    def late(self, *, begun: bool) -> None:
        """Note that a promotion's deadline passed. `begun`: the tier was working on one of its keys; else other calls
        kept it busy.
        """
        self.breaker.late(time.monotonic())
        if begun:
            self._failed(self.breaker)

    def _failed(self, breaker: Breaker) -> None:
        before = breaker.opened
        breaker.failed(time.monotonic())
        if breaker.opened > before:
            what = "fails; it is left alone" if breaker is self.breaker else "takes no puts; it is only read"
            LOGGER.warning("tier %s %s for a while", self.tier.name, what)


def fits(key: bytes) -> bool:
    """Whether tiers can have a key at all; keys of `chain_keys` have 16 bytes."""
    return 0 < len(key) <= LONGEST_KEY


_FAILURES = 5  # in a row
_FIRST_PAUSE = 1.0  # seconds
_LOOK = 0.05  # seconds between looks at calls that do not return
_LONGEST_PAUSE = 60.0
_HUNG = 30.0  # seconds: a call that has gone on for so long is taken for one that does not return


class Breaker:
    """The breaker of one tier. Not for several threads at a time."""

    def __init__(self, hung: float = _HUNG) -> None:
        self.state = BreakerState.CLOSED
        self.opened = 0
        self._hung = hung
        self._failures = 0
        self._pause = _FIRST_PAUSE
        self._until = 0.0
        self._late = -math.inf  # when a promotion's deadline passed last

    def usable(self, now: float, longest_call: float) -> bool:
        """Whether the tier may be given another job. Opens if its longest call hangs, or was given up."""
        hangs = longest_call >= self._hung
        stuck = hangs or now - longest_call < self._late
        if stuck and self.state is not BreakerState.OPEN:
            self._open(now, self._pause if hangs else 0.0)
        if stuck:
            self._until = max(self._until, now + _LOOK)
        return not self.refuses(now, longest_call)

    def refuses(self, now: float, longest_call: float) -> bool:
        """The opposite of `usable`, but changes nothing: for any thread."""
        decided = self.state is BreakerState.CLOSED or now >= self._until
        return not decided or longest_call >= self._hung or now - longest_call < self._late

    def pauses(self, now: float) -> bool:
        """Whether it is open, and stays so whatever the tier's calls do. Changes nothing; for any thread."""
        return self.state is BreakerState.OPEN and now < self._until

    def given(self, now: float) -> None:
        """Note that the tier is given a job. Unless closed, that job is the try, for at most `hung` seconds."""
        if self.state is not BreakerState.CLOSED:
            self.state = BreakerState.TRYING
            self._until = now + self._hung

    def succeeded(self) -> None:
        """Note that a key has come, or gone, well. An open breaker stays open: the job was given before."""
        if self.state is not BreakerState.OPEN:
            self.state = BreakerState.CLOSED
            self._failures = 0
            self._pause = _FIRST_PAUSE

    def failed(self, now: float) -> None:
        """Note that the medium failed for a key, or that a deadline passed while the tier worked on it."""
        if self.state is BreakerState.OPEN:
            return
        self._failures += 1
        if self.state is BreakerState.TRYING or self._failures >= _FAILURES:
            self._open(now, self._pause)

    def late(self, now: float) -> None:
        """Note that a promotion's deadline passed: the tier is not usable until the calls going on now return."""
        self._late = now

    def undecided(self, now: float) -> None:
        """Note that a key was declined or cancelled, which says nothing of the tier: the next job is the try."""
        if self.state is BreakerState.TRYING:
            self._until = now

    def _open(self, now: float, pause: float) -> None:
        self.state = BreakerState.OPEN
        self.opened += 1
        self._failures = 0
        self._until = now + pause
        if pause:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)


_WEIGHT = 0.3  # of the newest measurement
_VALID = 30.0  # seconds: an older measurement says nothing, so that a tier that was slow is measured again


class TierSpeed:
    """Seconds a record while a tier fetches, measured over whole jobs. Not for several threads at a time."""

    def __init__(self) -> None:
        self._seconds_per_record: float | None = None
        self._measured_at = 0.0

    def measured(self, records: int, seconds: float, now: float) -> None:
        """Record that a job fetched this many records in this many seconds, queueing included."""
        if records == 0:
            return
        latest = seconds / records
        known = self.expected(now)
        self._seconds_per_record = latest if known is None else known + _WEIGHT * (latest - known)
        self._measured_at = now

    def expected(self, now: float) -> float | None:
        """Return the seconds that fetching a record takes; None without a recent measurement."""
        return None if now - self._measured_at > _VALID else self._seconds_per_record


_MOST_MISSED = 1 << 16  # keys
_FORGOTTEN = 60.0  # seconds after which a key that was missed again counts as missed then
_FEWEST, _LATEST = 8, 64  # stores that the median is taken of


class ComputeTime:
    """Seconds that the host takes to compute a key: as given, or measured. None until enough was seen.

    A key that a fetch did not find had to be computed afterwards, and it is computed once a store of it has ended. So
    computing the keys of a store took at most the time from the first such fetch until then. That is too long by
    everything else the host did meanwhile: other requests of its batch, waiting in its queue, decoding before it called
    `keep`. A bound that is too long only has tiers bring keys that the host would have computed sooner, as they all do
    without it. Where a host stores keys that it did not compute (it had them in GPU memory), the time is too short. So
    the median of the latest 64 stores counts, and nothing before there are 8.

    `missed` is for any thread.

    Attributes:
        seconds_per_key: the time, or None.
        clock: seconds; for tests.
    """

    def __init__(self, given: float | None) -> None:
        self.seconds_per_key = given
        self.clock = time.monotonic
        self._measures = given is None
        self._missed: dict[bytes, float] = {}
        self._bounds = deque[float](maxlen=_LATEST)

    def missed(self, keys: Sequence[bytes]) -> None:
        """Note that a fetch has ended without these keys."""
        now, missed = self.clock(), self._missed
        if len(missed) > _MOST_MISSED:
            missed.clear()
        for key in keys if self._measures else ():
            if now - missed.setdefault(key, now) > _FORGOTTEN:
                missed[key] = now

    def stored(self, keys: Sequence[bytes]) -> None:
        """Note that a store of these keys has ended."""
        begun = [since for key in keys if (since := self._missed.pop(key, None)) is not None]
        if begun:
            self._bounds.append((self.clock() - min(begun)) / len(begun))
            if len(self._bounds) >= _FEWEST:
                self.seconds_per_key = statistics.median(self._bounds)

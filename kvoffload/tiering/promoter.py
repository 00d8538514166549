"""The Promoter: brings keys from tiers into entries of the index. Used by the manager's thread alone.

A promotion's keys are reserved with a record each. What a tier has brought and verified is committed and leased at
once; what has not come by the deadline is given up, and its entry is kept from other keys until the tier's call has
returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvoffload.cache.entries import Stage, Status
from kvoffload.cache.index import CacheIndex
from kvoffload.errors import KVOffloadError
from kvoffload.tiering.below import TierBelow
from kvoffload.tiering.promotion import Fetch, PromotionRecord, TierIo
from kvoffload.tiers.job import Outcome, TierJob
from kvoffload.tiers.tier import Notify


class Promoter:
    """The promotions that are going on.

    Args:
        index: whose entries are filled.
        tiers: in the order in which they are asked.
        seconds_per_key: what computing a key's blocks takes; None: not known, so that every promotion is worth it.
        most: entries that may be reserved for promotions or kept for calls that have not returned.
        notify: makes the manager's thread call `advance` soon.
    """

    def __init__(
        self,
        index: CacheIndex,
        tiers: Sequence[TierBelow],
        seconds_per_key: float | None,
        most: int,
        notify: Notify,
    ) -> None:
        self._index = index
        self._tiers = tiers
        self._seconds_per_key = seconds_per_key
        self._most = most
        self._notify = notify
        self.refused: Callable[[bytes], bool] = lambda _: False  # keys that are being removed
        self.going_on: list[PromotionRecord] = []
        self._late: list[tuple[TierJob, int]] = []  # keys that were given up before their outcome

    def io(self) -> tuple[TierIo, ...]:
        """What may write entries now, for the index; called by any thread."""
        lock = self._index.lock
        jobs = [
            (fetch.job, at)
            for record in list(self.going_on)
            for fetch in list(record.fetches)
            for at in range(len(fetch.job.keys))
        ]
        return tuple(TierIo(job, at, lock) for job, at in [*jobs, *self._late] if job.outcomes[at] is None)

    def begin(self, record: PromotionRecord) -> None:
        """Take up a promotion: lease what is there, and ask tiers for the rest, as far as it is worth it."""
        self.going_on.append(record)
        if record.cancelled:
            return
        wanted = self._lease_present(record)
        if wanted:
            self._ask(record, wanted)

    def advance(self) -> list[PromotionRecord]:
        """Take note of outcomes and deadlines; returns the promotions that have ended."""
        now = time.monotonic()
        self._late = [(job, at) for job, at in self._late if job.outcomes[at] is None]
        ended = []
        for record in self.going_on:
            for fetch in record.fetches:
                self._collect(record, fetch, now)
            late = record.deadline is not None and now >= record.deadline
            if record.records and (late or record.cancelled or record.broken):
                self._stop(record, at_once=late or record.cancelled)
            if not record.records:
                ended.append(record)
        for record in ended:
            self.going_on.remove(record)
        return ended

    def next_deadline(self) -> float | None:
        return min((record.deadline for record in self.going_on if record.deadline is not None), default=None)

    def abandon(self) -> list[PromotionRecord]:
        """End all of them now, keeping entries whose calls have not returned."""
        ended = list(self.going_on)
        for record in ended:
            self._stop(record, at_once=True)
        self.going_on.clear()
        return ended

    # beginning ----------------------------------------------------------------------------------------------------

    def _lease_present(self, record: PromotionRecord) -> list[int]:
        """Lease the keys that can be loaded; returns the positions of leading keys that are missing."""
        wanted: list[int] = []
        present: list[int] = []
        for position, status in enumerate(self._index.status(record.keys)):
            if status is Status.PENDING:
                break
            (present if status is Status.HIT else wanted).append(position)
        if present:
            try:
                record.leases.append(self._index.acquire([record.keys[position] for position in present]))
            except KVOffloadError:  # evicted since
                return wanted[: sum(position < present[0] for position in wanted)]
            for position in present:
                record.settled(position, Outcome.DONE)
            record.advance_ready()
        return wanted

    def _ask(self, record: PromotionRecord, wanted: list[int]) -> None:
        """Reserve entries for missing keys that tiers may have, and fetch them; the others are gone."""
        chosen = self._choose(record, wanted)
        for position in wanted[len(chosen) :]:
            record.settled(position, Outcome.MISSING)
        in_use = sum(len(other.records) for other in self.going_on) + len(self._late)
        chosen = chosen[: max(0, self._most - in_use)]
        keys = [record.keys[position] for position, _ in chosen]
        try:
            reserved = {each.keys[0]: each for each in self._index.reserve_each(keys, record.tenant)} if keys else {}
        except (KVOffloadError, ValueError):
            reserved = {}
        for position in wanted:
            each = reserved.get(record.keys[position])
            if each is None:
                record.settled(position, Outcome.DECLINED)
            else:
                record.records[position] = each
        for below in self._tiers:
            mine = [position for position, tier in chosen if tier is below and position in record.records]
            if mine:
                self._fetch(record, below, mine)

    def _choose(self, record: PromotionRecord, wanted: list[int]) -> list[tuple[int, TierBelow]]:
        """The leading ones of these that tiers may have, each with its tier, if fetching is worth it."""
        keys = [record.keys[position] for position in wanted]
        usable = [below for below in self._tiers if below.usable]
        known = [(below, below.may_have(keys)) for below in usable]
        chosen = []
        for at, position in enumerate(wanted):
            below = next((below for below, has in known if has[at]), None)
            if below is None or self.refused(keys[at]):
                break
            chosen.append((position, below))
        return self._worth_it(chosen)

    def _worth_it(self, chosen: list[tuple[int, TierBelow]]) -> list[tuple[int, TierBelow]]:
        """Without what is expected to take longer than computing it, from the first such key on."""
        if self._seconds_per_key is None:
            return chosen
        now = time.monotonic()
        for at, (_, below) in enumerate(chosen):
            expected = below.speed.expected(1, now)
            if expected is not None and expected >= self._seconds_per_key:
                below.slower += len(chosen) - at
                return chosen[:at]
        return chosen

    def _fetch(self, record: PromotionRecord, below: TierBelow, positions: list[int]) -> None:
        keys = [record.keys[position] for position in positions]
        entries = [record.records[position].indices[0] for position in positions]
        try:
            job = below.tier.get(keys, entries, deadline=record.deadline, notify=self._notify)
        except Exception:  # a tier of the user's, or one that was closed
            below.failed()
            job = TierJob(keys, entries).settle_waiting(Outcome.FAILED)
        record.fetches.append(Fetch(below, job, positions))

    # going on -----------------------------------------------------------------------------------------------------

    def _collect(self, record: PromotionRecord, fetch: Fetch, now: float) -> None:
        """Commit what has come, abort what has not."""
        done = 0
        for at, position in enumerate(fetch.positions):
            outcome = fetch.job.outcomes[at]
            if outcome is None or position not in record.records:
                continue
            fetch.below.answered(outcome)
            if outcome is Outcome.DONE and not self.refused(record.keys[position]):
                fetch.below.promoted += 1
                done += 1
                self._commit(record, position)
            else:
                fetch.below.not_found += 1
                self._give_up(record, position, ())
        if fetch.job.done and not fetch.measured:
            fetch.measured = True
            brought = fetch.job.outcomes.count(Outcome.DONE)
            fetch.below.speed.measured(brought, now - fetch.begun, now)
        record.advance_ready()

    def _commit(self, record: PromotionRecord, position: int) -> None:
        each = record.records.pop(position)
        key, index = record.keys[position], self._index
        try:
            with index.lock:  # so that nothing evicts it in between
                index.commit(each)
                if not record.released:
                    record.leases.append(index.acquire([key]))
            record.settled(position, Outcome.DONE)
        except KVOffloadError:  # removed meanwhile
            record.settled(position, Outcome.MISSING)

    def _give_up(self, record: PromotionRecord, position: int, io: tuple[TierIo, ...]) -> None:
        each = record.records.pop(position)
        if each.stage is Stage.OPEN:
            self._index.give_up(each, io)
        record.settled(position, Outcome.MISSING)

    def _stop(self, record: PromotionRecord, *, at_once: bool) -> None:
        """Cancel what has not begun. `at_once`: and give up the rest, whose entries stay kept."""
        for fetch in record.fetches:
            fetch.job.cancel()
            self._collect(record, fetch, time.monotonic())
            for at, position in enumerate(fetch.positions):
                if at_once and position in record.records:
                    fetch.below.failed()
                    self._late.append((fetch.job, at))
                    self._give_up(record, position, (TierIo(fetch.job, at, self._index.lock),))

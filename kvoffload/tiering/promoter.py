"""The Promoter: brings keys from tiers into entries of the index. Used by the manager's thread alone.

A promotion's keys are reserved with a record each. What a tier has brought and verified is committed and leased at
once; what has not come by the deadline is given up, and its entry is kept from other keys until the tier's call has
returned.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence

from kvoffload.cache.entries import ReservationRecord, Stage, Status
from kvoffload.cache.index import CacheIndex
from kvoffload.errors import KVOffloadError
from kvoffload.tiering.below import TierBelow
from kvoffload.tiering.promotion import Fetch, PromotionRecord, TierIo
from kvoffload.tiers.job import Outcome, TierJob
from kvoffload.tiers.tier import Notify

_MOST_PROMOTIONS = 4096  # that go on at a time
_POLL = 2e-3  # seconds between looks at keys that transfers store
_POLL_HUNG = 0.2  # and at calls that do not return


class Promoter:
    """The promotions that are going on.

    Args:
        index: whose entries are filled.
        tiers: in the order in which they are asked.
        seconds_per_key: what computing a key's blocks takes; None: not known, so that every promotion is worth it.
        most: entries that may be reserved for promotions, hold what they have brought until they are released, or are
            kept for calls that have not returned.
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
        self._occupying: list[weakref.ref[PromotionRecord]] = []  # that have reserved entries
        self._settled = 0  # keys of fetches
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
        crowded = len(self.going_on) >= _MOST_PROMOTIONS
        self.going_on.append(record)
        if not record.cancelled and not crowded:
            self._look(record, range(len(record.keys)))

    def ends_at_once(self, record: PromotionRecord) -> bool:
        """End a promotion that no tier can lengthen: its keys are in slots, or no tier is to be asked for the first one
        that is not. By any thread, without the manager's lock; what it needs are the index and the new record alone.
        """
        keys, table = record.keys, self._index._state.table
        of, pending = table.of, table.pending  # without the index's lock: `acquire` verifies it
        if not keys or (pending and not pending.keys().isdisjoint(keys)):
            return False
        present = [key for key in keys if key in of]
        missing = next((position for position, key in enumerate(keys) if key not in of), len(keys))
        if missing < len(keys) and any(below.may_be_asked(keys[missing]) for below in self._tiers):
            return False
        try:
            if present:
                record.leases.append(self._index.acquire(present))
        except KVOffloadError:  # evicted since
            return False
        record.ready = missing
        record.end()
        return True

    def advance(self) -> list[PromotionRecord]:
        """Take note of outcomes and deadlines; returns the promotions that have ended."""
        now = time.monotonic()
        self._late = [(job, at) for job, at in self._late if job.outcomes[at] is None]
        before = self._settled
        for record in self.going_on:
            if record.awaited:
                self._look(record, record.awaited)
            for fetch in record.fetches:
                self._collect(record, fetch, now)
            late = record.deadline is not None and now >= record.deadline
            if record.goes_on and (late or record.cancelled or record.broken or self._hangs(record, now)):
                gently = record.broken and not late and not record.cancelled and not self._hangs(record, now)
                self._stop(record, at_once=not gently, blame=late and not record.cancelled)
        ended = [record for record in self.going_on if not record.goes_on]
        self.going_on = [record for record in self.going_on if record.goes_on]
        if self._settled != before and any(record.awaited for record in self.going_on):
            self._notify()  # what they wait for may have come
        return ended

    def next_look(self) -> float | None:
        """When `advance` is due next although nothing has happened, by `time.monotonic`; None: not at all."""
        now, times = time.monotonic(), []
        for record in self.going_on:
            if record.deadline is not None:
                times.append(record.deadline)
            if record.awaited:
                times.append(now + _POLL)
            hung = [fetch.begun + fetch.below.hung for fetch in record.fetches if not fetch.job.done]
            times += [max(each, now + _POLL_HUNG) for each in hung]
        return min(times, default=None)

    def abandon(self) -> list[PromotionRecord]:
        """End all of them now, keeping entries whose calls have not returned."""
        for record in self.going_on:
            self._stop(record, at_once=True, blame=False)
        ended, self.going_on = self.going_on, []
        return ended

    # beginning ----------------------------------------------------------------------------------------------------

    def _look(self, record: PromotionRecord, positions: Sequence[int]) -> None:
        """Look which of some keys are in slots: lease these, wait for pending ones, and ask tiers for the rest."""
        keys = [record.keys[position] for position in positions]
        with self._index.lock:  # so that nothing evicts them in between
            found = dict(zip(positions, self._index.status(keys), strict=True))
            present = [position for position in positions if found[position] is Status.HIT]
            if present and not record.released:
                record.leases.append(self._index.acquire([record.keys[position] for position in present]))
            filled = {position for position in positions if self._is_filled(record.keys[position])}
        for position in positions:
            if found[position] is Status.HIT:
                record.settle(position, Outcome.DONE)
            elif found[position] is Status.PENDING and position not in filled:
                record.settle(position, Outcome.MISSING)
        record.awaited = [position for position in positions if position in filled]
        record.advance_ready()
        wanted = [position for position in positions if found[position] is Status.MISS]
        if wanted:
            self._ask(record, wanted)

    def _is_filled(self, key: bytes) -> bool:
        """Whether a key is pending, and will be ready, or missing, without more calls of the cache."""
        pending = self._index._state.table.pending.get(key)
        return pending is not None and (pending.promoted or bool(pending.jobs))

    def _ask(self, record: PromotionRecord, wanted: list[int]) -> None:
        """Reserve entries for missing keys that tiers may have, and fetch them; the others are gone."""
        chosen = dict(self._choose(record, wanted)[: self._room()])
        reserved: dict[bytes, ReservationRecord] = {}
        try:
            keys = [record.keys[position] for position in chosen]
            reserved = {each.keys[0]: each for each in self._index.reserve_each(keys, record.tenant)} if keys else {}
        except (KVOffloadError, ValueError):
            pass
        for position in wanted:
            each = reserved.get(record.keys[position])
            if each is None:
                record.settle(position, Outcome.DECLINED)
            else:
                record.records[position] = each
        if record.records:
            self._occupying = [each for each in self._occupying if each() is not record]
            self._occupying.append(weakref.ref(record))
        for below in self._tiers:
            mine = [position for position, tier in chosen.items() if tier is below and position in record.records]
            if mine:
                self._fetch(record, below, mine)

    def _room(self) -> int:
        """Entries that may be reserved."""
        self._occupying = [each for each in self._occupying if (record := each()) is not None and record.occupied]
        occupied = sum(record.occupied for each in self._occupying if (record := each()) is not None)
        return max(0, self._most - occupied - len(self._late))

    def _choose(self, record: PromotionRecord, wanted: list[int]) -> list[tuple[int, TierBelow]]:
        """The leading ones of these that tiers may have, each with its tier, if fetching is worth it."""
        keys = [record.keys[position] for position in wanted]
        known = [(below, below.may_have(keys)) for below in self._tiers if below.usable]
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
        record.fetches.append(Fetch(below, below.get(keys, entries, record.deadline, self._notify), positions))

    # going on -----------------------------------------------------------------------------------------------------

    def _collect(self, record: PromotionRecord, fetch: Fetch, now: float) -> None:
        """Commit what has come, abort what has not."""
        left = []
        outcomes = [fetch.job.outcomes[at] for at in fetch.left]  # once: the tier sets more of them meanwhile
        fetch.below.answered(outcomes)
        for at, outcome in zip(fetch.left, outcomes, strict=True):
            position = fetch.positions[at]
            if outcome is None:
                left.append(at)
            else:
                came = outcome is Outcome.DONE and not self.refused(record.keys[position])
                if came:
                    came = self._commit(record, position)
                else:
                    self._abort(record, position, ())
                fetch.below.promoted += came
                fetch.below.not_found += not came
        self._settled += len(fetch.left) - len(left)
        fetch.left = left
        if not left and not fetch.measured:
            fetch.measured = True
            answered = sum(outcome in (Outcome.DONE, Outcome.MISSING) for outcome in fetch.job.outcomes)
            fetch.below.speed.measured(answered if Outcome.DONE in fetch.job.outcomes else 0, now - fetch.begun, now)
        record.advance_ready()

    def _commit(self, record: PromotionRecord, position: int) -> bool:
        """A key has come: make it a hit, and lease it; False if it has been removed meanwhile."""
        key, index = record.keys[position], self._index
        each = record.records.pop(position)
        with index.lock:  # so that nothing evicts it in between
            mine = bool(index._state.table.still_mine(each))
            index.commit(each)
            if mine and not record.released:
                record.leases.append(index.acquire([key]))
                record.brought += 1
        record.settle(position, Outcome.DONE if mine else Outcome.MISSING)
        return mine

    def _abort(self, record: PromotionRecord, position: int, io: tuple[TierIo, ...]) -> None:
        each = record.records.pop(position)
        if each.stage is Stage.OPEN:
            self._index.abort_after(each, io)
        record.settle(position, Outcome.MISSING)

    def _stop(self, record: PromotionRecord, *, at_once: bool, blame: bool) -> None:
        """Cancel what has not begun. `at_once`: and give up the rest, whose entries stay kept.

        Args:
            blame: the deadline has passed, so tiers that have not answered are too slow.
        """
        for position in record.awaited:
            record.settle(position, Outcome.MISSING)
        record.awaited = []
        for fetch in record.fetches:
            waited = bool(fetch.left)
            fetch.job.cancel()
            self._collect(record, fetch, time.monotonic())
            if blame and waited:
                fetch.below.late(begun=bool(fetch.left))
            if at_once and fetch.left:
                for at in fetch.left:
                    self._late.append((fetch.job, at))
                    self._abort(record, fetch.positions[at], (TierIo(fetch.job, at, self._index.lock),))
                fetch.below.not_found += len(fetch.left)
                self._settled += len(fetch.left)
                fetch.left = []
        fetched = {fetch.positions[at] for fetch in record.fetches for at in fetch.left}
        for position in [position for position in record.records if position not in fetched]:
            self._abort(record, position, ())

    @staticmethod
    def _hangs(record: PromotionRecord, now: float) -> bool:
        """Whether a call that it waits for does not return."""
        return any(
            fetch.left and now - fetch.begun >= fetch.below.hung and fetch.below.hangs for fetch in record.fetches
        )

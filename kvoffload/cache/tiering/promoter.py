"""The Promoter: brings keys from tiers into entries of the index. Used only by the manager's thread.

Each key of a promotion is reserved with a record of its own. A key that a tier brought and verified is committed and
leased at once. For the others the next tiers are asked. `Promoter.advance` lists the cases.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Sequence

from kvoffload.cache.entries import Stage, Status
from kvoffload.cache.record_calls import RecordCalls
from kvoffload.cache.tiering.below import ComputeTime, TierBelow
from kvoffload.cache.tiering.promotion import PromotionRecord, TierGet, TierIo
from kvoffload.cache.tiering.tier import Notify, Outcome, TierJob
from kvoffload.errors import KVOffloadError

_MOST_PROMOTIONS = 4096  # that go on at a time
_POLL = 2e-3  # seconds between looks at keys that transfers store
_POLL_HUNG = 0.2  # and at calls that do not return


class Promoter:
    """The promotions that are going on.

    Args:
        compute: how long computing a key takes; while that is not known, every promotion is worth it.
        share: part of the entries that promotions may occupy: reserved, holding keys that tiers brought until they are
            released, or kept for calls that have not returned.
        notify: makes the manager's thread call `advance` soon.
    """

    def __init__(
        self, records: RecordCalls, tiers: Sequence[TierBelow], compute: ComputeTime, share: float, notify: Notify
    ) -> None:
        self._records = records
        self._tiers = tiers
        self._compute = compute
        self._share = share
        self._notify = notify
        self.refused: Callable[[Sequence[bytes]], Collection[bytes]] = lambda _: ()  # those that are being removed
        self.going_on: list[PromotionRecord] = []
        self._occupying: list[weakref.ref[PromotionRecord]] = []  # that have reserved entries
        self._settled = 0  # keys of gets whose outcome was collected, or given up
        self._late: list[tuple[TierJob, int]] = []  # keys that were given up before their outcome

    @property
    def busy(self) -> bool:
        """Whether promotions go on, or tiers may still write entries for some that have ended. For any thread."""
        return bool(self.going_on) or any(job.outcomes[at] is None for job, at in self._late)

    def begin(self, record: PromotionRecord) -> None:
        """Take up a promotion: lease the keys in slots, and ask tiers for the others as far as that is worth it."""
        crowded = len(self.going_on) >= _MOST_PROMOTIONS
        self.going_on.append(record)
        if not record.cancelled and not record.outdated and not crowded:
            self._look(record, range(len(record.keys)))

    def advance(self) -> list[PromotionRecord]:
        """Collect outcomes, act on deadlines; returns the promotions that have ended.

        For each promotion, keys that it awaits from another promotion or a transfer are looked up first. Then each job
        of a tier:

        1. A key came. It is committed and leased in one call of the index, so that nothing evicts it in between.
        2. A key did not come. The tier does not touch its entry any more, so the next tier gets the same entry.
        3. The tier is late, or its call hangs. It may still write the entries of its keys, so these are kept from other
           keys until the call has returned, and the next tier gets other entries.

        Then the promotion as a whole:

        4. No key can lengthen it, since one before will not come, or a policy has raised and no tier was asked. Work
           that tiers have not begun is cancelled; work that they have begun is awaited: they may be writing those
           entries, and no deadline presses.
        5. Its deadline has passed, or it was cancelled. The caller waits no longer: all keys that have not come are
           given up, with entries kept as in case 3. No other tier is asked.
        """
        now = time.monotonic()
        if self._late:
            self._late = [(job, at) for job, at in self._late if job.outcomes[at] is None]
        before = self._settled
        for record in self.going_on:
            if record.awaited:  # keys that another promotion brings, or a transfer stores, may be there by now
                self._look(record, record.awaited)
            late = record.deadline is not None and now >= record.deadline
            outdated = record.used.now is not record.weights
            over = late or record.cancelled or outdated
            for get in list(record.gets):  # `_ask` adds to them
                missed = self._collect(record, get, now)  # case 1
                if get.left and not over and (get.late(now) or get.hangs(now)):  # case 3
                    missed += self._stop_waiting(record, get, now, blame=get.late(now))
                if missed:  # case 2; after the deadline no tier is asked, so that their entries become free
                    self._ask(record, sorted(missed), () if over else get.others)
            if record.goes_on and (over or record.broken):  # cases 5 and 4
                self._stop(record, now, at_once=over, blame=late and not (record.cancelled or outdated))
        ended = [record for record in self.going_on if not record.goes_on]
        for record in ended:
            record.count(self._records)
        if ended:
            self.going_on = [record for record in self.going_on if record.goes_on]
        if self._settled != before and any(record.awaited for record in self.going_on):
            self._notify()  # what they wait for may have come
        return ended

    def next_look(self) -> float | None:
        """Return when `advance` is due next although nothing happens, by `time.monotonic`; None: not at all."""
        now, times = time.monotonic(), []
        for record in self.going_on:
            if record.deadline is not None:
                times.append(record.deadline)
            if record.awaited:
                times.append(now + _POLL)
            unfinished = [get for get in record.gets if get.left]
            times += [max(get.begun + get.below.hung, now + _POLL_HUNG) for get in unfinished]
            times += [get.deadline for get in unfinished if get.deadline is not None]
        return min(times, default=None)

    def abandon(self) -> list[PromotionRecord]:
        """End all promotions now, keeping entries whose calls have not returned."""
        for record in self.going_on:
            self._stop(record, time.monotonic(), at_once=True, blame=False)
            record.count(self._records)
        ended, self.going_on = self.going_on, []
        return ended

    # beginning ----------------------------------------------------------------------------------------------------

    def _look(self, record: PromotionRecord, positions: Sequence[int]) -> None:
        """Look which keys are in slots: lease these, wait for pending ones, and ask tiers for the rest."""
        statuses, lease = self._records.hold_ready(
            ([record.keys[position] for position in positions], not record.released)
        )
        found = dict(zip(positions, statuses, strict=True))
        if lease is not None:
            record.leases.append(lease)
        for position, status in found.items():
            if status is Status.HIT:
                record.here[position] = 1
            elif status is Status.PENDING:
                record.gone[position] = 1
        record.awaited = [position for position, status in found.items() if status is None]
        record.advance_ready()
        wanted = [position for position, status in found.items() if status is Status.MISS]
        if wanted:
            self._ask(record, wanted, self._tiers)

    def _ask(self, record: PromotionRecord, wanted: list[int], tiers: Sequence[TierBelow]) -> None:
        """Have these tiers get missing keys that they may have, into their entries or new ones; the others are gone.

        No call of a tier may be writing the entries that keys have.
        """
        chosen = self._choose(record, wanted, tiers)
        held = record.records
        self._reserve(record, [position for position in chosen if position not in held])
        for position in wanted:
            if position not in chosen or position not in held:
                self._drop(record, position)
        for number, below in enumerate(tiers):
            mine = [position for position, tier in chosen.items() if tier is below and position in held]
            if mine:
                self._get(record, below, mine, tiers[number + 1 :])

    def _reserve(self, record: PromotionRecord, positions: list[int]) -> None:
        live = [(each, found) for each in self._occupying if (found := each()) is not None and found.occupied]
        occupied = sum([found.occupied for _, found in live])
        self._occupying = [each for each, _ in live]
        room = max(0, self._records.share(self._share) - occupied - len(self._late))
        keys = [record.keys[position] for position in positions[:room]]
        if keys:
            try:
                for each in self._records.reserve_each((keys, record.tenant, record.request)):
                    record.records[positions[each.positions[0]]] = each
            except (KVOffloadError, ValueError):
                pass  # they are misses
        if record.records and record not in [found for _, found in live]:
            self._occupying.append(weakref.ref(record))

    def _choose(self, record: PromotionRecord, wanted: list[int], tiers: Sequence[TierBelow]) -> dict[int, TierBelow]:
        """Return the leading keys that can lengthen the promotion, each with the first tier that is worth asking."""
        end = record.gone.find(1)
        wanted = wanted if end < 0 else [position for position in wanted if position < end]
        keys = [record.keys[position] for position in wanted]
        known = [(below, self._worth_it(below), below.may_have(keys)) for below in tiers if below.usable]
        refused = self.refused(keys)
        chosen: dict[int, TierBelow] = {}
        for at, position in enumerate(wanted):
            slow = None  # the first tier that may have it, and takes longer than computing it
            for below, worth_it, has in known:
                if has[at] and worth_it:
                    chosen[position] = below
                    break
                slow = below if has[at] and slow is None else slow
            else:  # no key behind it can lengthen the promotion
                if slow is not None:
                    slow.slower += len(wanted) - at
                break
            if refused and keys[at] in refused:
                del chosen[position]
                break
        return chosen

    def _worth_it(self, below: TierBelow) -> bool:
        seconds = self._compute.seconds_per_key
        if seconds is None:
            return True
        expected = below.speed.expected(time.monotonic())
        return expected is None or expected < seconds

    def _get(
        self, record: PromotionRecord, below: TierBelow, positions: list[int], others: Sequence[TierBelow]
    ) -> None:
        """Give a tier a job. If `others` may have its keys, too, half of the time is left to them."""
        keys = [record.keys[position] for position in positions]
        entries = [record.records[position].indices[0] for position in positions]
        deadline = record.deadline
        if deadline is not None and any(
            each.usable and self._worth_it(each) and any(each.may_have(keys)) for each in others
        ):
            deadline = (time.monotonic() + deadline) / 2
        job = below.get(keys, entries, deadline, self._notify)
        left = list(range(len(keys)))
        record.gets.append(TierGet(below, job, positions, others, deadline, left, time.monotonic()))

    # going on -----------------------------------------------------------------------------------------------------

    def _collect(self, record: PromotionRecord, get: TierGet, now: float) -> list[int]:
        """Commit keys that came; returns the positions of keys that did not, whose entries the tier no longer
        touches.
        """
        job, below = get.job, get.below
        outcomes = [job.outcomes[at] for at in get.left]  # once: the tier sets more of them meanwhile
        below.answered(outcomes)
        left, came, missed = list[int](), list[int](), list[int]()
        for at, outcome in zip(get.left, outcomes, strict=True):
            places = left if outcome is None else came if outcome is Outcome.DONE else missed
            places.append(at if outcome is None else get.positions[at])
        if came:
            refused = self.refused([record.keys[position] for position in came])
            if refused:
                missed += [position for position in came if record.keys[position] in refused]
                came = [position for position in came if record.keys[position] not in refused]
        if came:
            # The keys become hits and are leased in one call of the index: nothing evicts them in between. Where one
            # was removed meanwhile, it will not come.
            given = [record.records[position] for position in came]  # still, if this raises: a policy's error, say
            mine, lease = self._records.commit_and_hold((given, not record.released))
            if lease is not None:
                record.leases.append(lease)
                record.brought += len(lease.keys)
            for position, is_mine in zip(came, mine, strict=True):
                del record.records[position]
                record.tiers[position] = below.tier.name
                (record.here if is_mine else record.gone)[position] = 1
            below.promoted += sum(mine)
            below.not_found += len(came) - sum(mine)
        below.not_found += len(missed)
        self._settled += len(get.left) - len(left)
        get.left = left
        if not left and not get.measured:
            get.measured = True
            done = job.outcomes.count(Outcome.DONE)
            answered = done + job.outcomes.count(Outcome.MISSING) if done else 0
            below.speed.measured(answered, now - get.begun, now)
        record.advance_ready()
        return sorted(missed)

    def _stop_waiting(self, record: PromotionRecord, get: TierGet, now: float, *, blame: bool) -> list[int]:
        """Wait for a tier no longer; return the keys that it has not brought. Entries that it may write are kept."""
        waited = bool(get.left)
        get.job.cancel()
        missed = self._collect(record, get, now)
        if blame and waited:
            get.below.late(begun=bool(get.left))
        for at in get.left:
            position = get.positions[at]
            self._late.append((get.job, at))
            self._drop(record, position, (TierIo(get.job, at),))
            missed.append(position)
        get.below.not_found += len(get.left)
        self._settled += len(get.left)
        get.left, get.measured = [], True
        return missed

    def _drop(self, record: PromotionRecord, position: int, io: tuple[TierIo, ...] = ()) -> None:
        """Give up a key that does not come from where it was asked for; its entry is free when `io` have ended."""
        each = record.records.get(position)
        if each is not None and each.stage is Stage.OPEN:
            self._records.abort_after(each, io)
        record.records.pop(position, None)  # not before: if that raises, it is tried again
        if not io:
            record.gone[position] = 1

    def _stop(self, record: PromotionRecord, now: float, *, at_once: bool, blame: bool) -> None:
        """Cancel work that has not begun. `at_once`: and give up the rest."""
        dropped, record.awaited = record.awaited, []
        for get in record.gets:
            if at_once:
                dropped += self._stop_waiting(record, get, now, blame=blame)
            else:
                get.job.cancel()
                dropped += self._collect(record, get, now)
        underway = {get.positions[at] for get in record.gets for at in get.left}
        for position in [*dropped, *(position for position in record.records if position not in underway)]:
            self._drop(record, position)

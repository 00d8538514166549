"""The Writer: copies entries of the index to tiers. Used only by the manager's thread.

While tiers read an entry it is leased, so that no other key gets it. The number of leased entries is bounded: further
keys worth writing are dropped and counted, and no eviction waits for a tier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from kvoffload.cache.entries import Status
from kvoffload.cache.record_calls import RecordCalls
from kvoffload.cache.reservations import Lease
from kvoffload.cache.tiering.below import TierBelow, fits
from kvoffload.cache.tiering.tier import Notify, Outcome, TierJob
from kvoffload.errors import KVOffloadError

_TOGETHER = 32  # keys of one lease, whose entries are free when all of them are written


class _Put:
    __slots__ = ("jobs", "lease")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.jobs: list[tuple[TierBelow, TierJob]] = []

    @property
    def done(self) -> bool:
        return all(job.done for _, job in self.jobs)


class Writer:
    """Keys being written, and keys that wait.

    Args:
        tiers: get every key.
        share: part of the entries that may be leased for it at a time.
        notify: makes the manager's thread call `advance` soon.
        choice: learns which keys a tier has taken, and which none has.

    Attributes:
        going_on: what is being written.
        taken: keys that a tier has taken, until its owner clears it.
    """

    def __init__(
        self, records: RecordCalls, tiers: Sequence[TierBelow], share: float, notify: Notify, choice: WriteChoice
    ) -> None:
        self._records, self._tiers, self._share = records, tiers, share
        self._notify, self._choice = notify, choice
        self._waiting = deque[tuple[bytes, str]]()
        self.going_on, self.taken = list[_Put](), set[bytes]()

    @property
    def idle(self) -> bool:
        return not self._waiting and not self.going_on

    @property
    def leased(self) -> int:
        return sum(len(put.lease.keys) for put in self.going_on)

    def add(self, keys: Sequence[bytes], tenant: str) -> None:
        """Queue keys that are worth writing, or drop them if no tier takes puts now."""
        used = any(below.takes_puts for below in self._tiers)
        room = max(0, self._records.most_entries - len(self._waiting)) if used else 0
        self._waiting.extend((key, tenant) for key in keys[:room])
        for below in self._tiers:
            below.dropped += len(keys[room:])
        self._not_taken(keys[room:])

    def forget(self, concerned: Callable[[Sequence[bytes]], Collection[bytes]]) -> None:
        """Drop the waiting keys that `concerned` returns."""
        gone = concerned([key for key, _ in self._waiting])
        self._waiting = deque(each for each in self._waiting if each[0] not in gone)

    def advance(self) -> None:
        left_alone = [below for below in self._tiers if below.left_alone] if self.going_on else []
        for put in self.going_on if left_alone else ():  # what such a tier has not begun only keeps entries from others
            for below, job in put.jobs:
                if below in left_alone:
                    job.cancel()
        for put in [put for put in self.going_on if put.done]:
            self._end(put)
        most = self._records.share(self._share) if self._waiting else 0
        while self._waiting and self.leased < most:
            tenant = self._waiting[0][1]
            keys: list[bytes] = []
            room = min(_TOGETHER, most - self.leased)
            while self._waiting and self._waiting[0][1] == tenant and len(keys) < room:
                keys.append(self._waiting.popleft()[0])
            self._put(list(dict.fromkeys(keys)), tenant)

    def _put(self, keys: list[bytes], tenant: str) -> None:
        there = [key for key, status in zip(keys, self._records.status(keys), strict=True) if status is Status.HIT]
        fitting = [key for key in there if fits(key)]
        lacking: dict[TierBelow, set[bytes]] = {}
        for below in self._tiers:
            given = fitting if fitting and below.takes_puts else []
            below.dropped += len(keys) - len(given)
            lacking[below] = (
                {key for key, has in zip(given, below.has(given), strict=True) if not has} if given else set()
            )
        wanted = [key for key in there if any(key in mine for mine in lacking.values())]
        self._not_taken([key for key in keys if key not in wanted])
        if not wanted:
            return
        try:
            put = _Put(self._records.acquire((wanted, False)))
        except KVOffloadError:  # evicted since
            self._not_taken(wanted)
            return
        entries = dict(zip(wanted, put.lease.indices, strict=True))
        self.going_on.append(put)
        for below, mine in lacking.items():
            chosen = [key for key in wanted if key in mine]
            if chosen:
                put.jobs.append((below, below.put(chosen, [entries[key] for key in chosen], tenant, self._notify)))
        if put.done:
            self._end(put)

    def _end(self, put: _Put) -> None:
        self.going_on.remove(put)
        put.lease.release()
        left = set(put.lease.keys)
        for below, job in put.jobs:
            taken = [key for key, outcome in zip(job.keys, job.outcomes, strict=True) if outcome is Outcome.DONE]
            below.written += len(taken)
            below.not_written += len(job.keys) - len(taken)
            below.answered(job.outcomes, of_put=True)
            self._choice.written(taken)
            self.taken.update(taken)
            left.difference_update(taken)
        self._not_taken([key for key in put.lease.keys if key in left])

    def _not_taken(self, keys: Sequence[bytes]) -> None:
        """Let these keys be chosen again, unless a tier has them."""
        known = [below.has(keys) for below in self._tiers] if keys else []
        self._choice.dropped([key for at, key in enumerate(keys) if not any(has[at] for has in known)])


class WriteChoice:
    """Follows the keys in the pool of slots, and chooses which to write. Used by one thread at a time.

    `stored`, `ended` and `about_to_go` return keys to write, among the keys given; the caller leaves out keys that
    cannot be written any more, or need not be. This class writes nothing: write="none".

    Attributes:
        looks_ahead: whether to call `about_to_go`.
        learns: whether to tell `written` and `left_disk` which keys tiers have, and lack, already.
    """

    looks_ahead = learns = False

    def stored(self, keys: Sequence[bytes]) -> Sequence[bytes]:  # noqa: ARG002
        """Note that these keys of a request, in its order, were computed and are in slots now."""
        return ()

    def ended(self, keys: Sequence[bytes]) -> list[bytes]:  # noqa: ARG002
        """Note that a request with these keys, in slots or not, has ended."""
        return []

    def about_to_go(self, keys: Sequence[bytes]) -> Sequence[bytes]:  # noqa: ARG002
        """Note that these are among the next keys to be evicted from the slots."""
        return ()

    def promoted(self, keys: Sequence[bytes]) -> None:
        """Note that a tier has brought these keys into slots."""

    def written(self, keys: Iterable[bytes]) -> None:
        """Note that a tier has taken these keys, or has them already."""

    def left_disk(self, keys: Iterable[bytes]) -> None:
        """Note that no tier has these keys, in slots or not: it has evicted them, or never had them."""

    def left_host(self, keys: Iterable[bytes]) -> None:
        """Note that these keys are no longer in slots."""

    def dropped(self, keys: Iterable[bytes]) -> None:
        """Note that these keys were to be written, and that no tier has taken them, or has them."""

    def resynchronise(self, keys: Sequence[bytes]) -> Sequence[bytes]:  # noqa: ARG002
        """Start again from the keys in slots, which are exactly these: events were lost. Returns keys to write."""
        return ()


class WriteThrough(WriteChoice):
    """Every key, as soon as it is in slots: write="through"."""

    def stored(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        return keys

    resynchronise = stored


class WriteBack(WriteChoice):
    """Every key, shortly before it is evicted: write="back"."""

    looks_ahead = True

    def __init__(self) -> None:
        self._chosen = set[bytes]()  # of the keys in slots; a tier has them, or is given them

    def about_to_go(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        fresh = [key for key in keys if key not in self._chosen]
        self._chosen.update(fresh)
        return fresh

    def left_host(self, keys: Iterable[bytes]) -> None:
        self._chosen.difference_update(keys)

    dropped = left_host

    def resynchronise(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        self._chosen.intersection_update(keys)
        return ()

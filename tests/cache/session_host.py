"""A cache without a device for tests of sessions, whose clock the test moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from helpers import key, keys

from kvoffload import CacheIndex, Status
from kvoffload.cache.pools import RequestRecord
from kvoffload.cache.sessions import Hint, HintAnswer

TURN = (0, 1, 2, 3)


class Host:
    """A cache, a clock that the test moves, and the key that was written into each entry."""

    def __init__(self, capacity: int = 64, policy: Any = "lru", **options: Any) -> None:
        self.now = 1000.0
        self.index = CacheIndex(capacity, policy=policy, **options)
        self.index._state.clock = lambda: self.now
        self.written: dict[int, bytes] = {}
        self.fresh = 1000

    def store(self, names: Sequence[bytes], **options: Any) -> list[bytes]:
        """Returns the keys that were evicted for them."""
        with self.index.reserve(names, **options) as reservation:
            self.written.update(zip(reservation.indices, reservation.keys, strict=True))
        return list(reservation.evicted)

    def turn(self, session: str, *numbers: int, tenant: str = "", **promise: float) -> HintAnswer | None:
        """A request of a session, which promises meanwhile to come back if `ttl` is given."""
        answer = None
        with self.index.open_request(session=session, tenant=tenant) as request:
            if promise:
                answer = self.index.hint("retain", session=session, tenant=tenant, **promise)
            self.store(keys(*numbers), request=request)
        return answer

    def trusted(self, session: str, *numbers: int, **promise: Any) -> HintAnswer:
        """A session that has kept a promise, and has given another one."""
        self.turn(session, *numbers, **promise)
        answer = self.turn(session, *numbers, **promise)
        assert answer is not None
        return answer

    def alone(self, *numbers: int) -> list[bytes]:
        """A request without a session; returns the keys that were evicted."""
        evicted = self.store(keys(*numbers))
        self.index.touch(keys(*numbers))
        return evicted

    def prefetch(self, session: str, ttl: float, due: float | None) -> tuple[HintAnswer, list[bytes], RequestRecord]:
        """Hint it above tiers: the answer, the keys that these are asked for, and for what they bring them."""
        return self.index.records.hint((Hint("prefetch", session, "", ttl, due), True))

    def bring(self, request: RequestRecord, *numbers: int) -> None:
        """As a tier that has these keys."""
        records = self.index.records
        for name in keys(*numbers):
            (brought,) = records.reserve_each(([name], "", request))
            self.written[brought.indices[0]] = name
            assert records.commit_and_hold(([brought], False)) == ([True], None)

    def retained(self) -> list[bytes]:
        """The keys that hints retain, now."""
        self.index.touch([])  # ends promises whose time is over
        return sorted(name for name, kept in self.index.records.hinted(tuple(self.index.keys)).items() if kept)

    def scan(self, caches: int = 4) -> None:
        """Requests that nobody repeats."""
        for _ in range(caches * self.index.capacity // 4):
            self.fresh += 4
            self.alone(*range(self.fresh, self.fresh + 4))

    def left(self, *numbers: int) -> list[int]:
        """Those of these keys that are hits; every hit of the cache is in the entry that it was written into."""
        self.index.check()
        with self.index.acquire(self.index.keys) as lease:
            assert [self.written[entry] for entry in lease.indices] == list(lease.keys)
        return [number for number in numbers if self.index.status([key(number)]) == [Status.HIT]]

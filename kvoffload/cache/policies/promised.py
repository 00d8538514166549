"""Keys that requests have promised to come back for: the order of what hints retain."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import filterfalse, islice, takewhile
from math import inf
from operator import attrgetter

from kvoffload.cache.policies.base import Policy, Protected, RequestCalls, RequestPolicy, Room

Place = tuple[int, float, float]
"""Where a promise stands among others: the lowest is given up first."""

FIRST: Place = (0, -inf, 0.0)
_LAST: Place = (2, 0.0, 0.0)


def place_of(now: float, ttl: float, due: float | None) -> Place:
    """Return the place of a promise made at `now` (the cache's clock, seconds) to come back in `due` seconds. It stands
    above one without a time.

    Of two promises with a time the one that is due later goes first, as in Belady's rule; without one, that with the
    longer `ttl`, since who asks for more time probably takes it, and of equal ones the older.
    """
    return (0, -ttl, now) if due is None else (1, -now - due, now)


class Promise:
    """Keys of one request that are retained until a time, the deepest last. Neither `place` nor `until` changes while
    it retains any.
    """

    __slots__ = ("keys", "place", "tenant", "until")

    def __init__(self, place: Place, until: float, tenant: str) -> None:
        self.place = place
        self.until = until
        self.tenant = tenant
        self.keys: dict[bytes, None] = {}  # one that is gone may come back


_place, _until = attrgetter("place"), attrgetter("until")


class Promised(Policy):
    """Evicts keys of the lowest promise first, and of a promise the deepest."""

    declines_with_room = False

    def __init__(self, capacity: int = 0) -> None:
        del capacity
        self._promise_of: dict[bytes, Promise] = {}
        self._live: dict[Promise, int] = {}  # how many keys are retained for it, and for no later promise; at least one
        self._by_place: list[Promise] = []
        self._by_end: list[Promise] = []
        self._by_tenant = Counter[str]()

    def put(self, promise: Promise, keys: Sequence[bytes]) -> None:
        """Retain keys for a promise, and for no other any more."""
        self._leave(Counter(filter(None, map(self._promise_of.get, keys))))
        promise.keys.update(dict.fromkeys(keys))
        self._promise_of.update(dict.fromkeys(keys, promise))
        if keys:
            if promise not in self._live:
                insort(self._by_place, promise, key=_place)
                insort(self._by_end, promise, key=_until)
            self._live[promise] = self.live(promise) + len(keys)
            self._by_tenant[promise.tenant] += len(keys)

    def ended(self, now: float) -> list[bytes]:
        """Return the keys of promises whose time is over."""
        return [key for each in takewhile(lambda each: each.until < now, self._by_end) for key in self.held(each)]

    def live(self, promise: Promise) -> int:
        """Return how many keys are retained for a promise."""
        return self._live.get(promise, 0)

    def promised_by(self, tenant: str, but: Sequence[bytes]) -> int:
        """Return how many keys are retained for a tenant, without some."""
        promises = (self._promise_of.get(key) for key in but)
        return self._by_tenant[tenant] - sum(each is not None and each.tenant == tenant for each in promises)

    def held(self, promise: Promise) -> list[bytes]:
        """Return the keys that are retained for a promise, in the order of its request."""
        return [key for key in promise.keys if self._promise_of.get(key) is promise] if promise in self._live else []

    def below(self, place: Place, count: int, protected: Protected) -> list[bytes]:
        """Return at most `count` keys of promises that are given up before this place."""
        if count <= 0:
            return []
        lower = takewhile(lambda each: each.place < place, self._by_place)
        mine = (key for each in lower for key in reversed(each.keys) if self._promise_of.get(key) is each)
        return list(islice(filterfalse(protected, mine), count))

    def insert(self, keys: Sequence[bytes]) -> None:
        """Retain keys after an exception, when it is not known any more whose promise it was; they go first."""
        self.put(Promise(FIRST, -inf, ""), keys)

    def load(self, keys: Sequence[bytes]) -> None:
        """Change nothing: the promise stands until its request ends."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Change nothing, as `load`."""

    def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
        del evicted
        self._leave(Counter(list(map(self._promise_of.pop, keys))))

    def _leave(self, counts: Counter[Promise]) -> None:
        """Lower each promise's count of retained keys."""
        for promise, count in counts.items():
            self._live[promise] -= count
            self._by_tenant[promise.tenant] -= count
            if not self._live[promise]:
                del self._live[promise]
                for ordered, key in ((self._by_place, _place), (self._by_end, _until)):
                    del ordered[ordered.index(promise, bisect_left(ordered, key(promise), key=key))]

    def victims(self, count: int, protected: Protected) -> list[bytes] | None:
        found = self.below(_LAST, count, protected)
        return found if len(found) == count else None

    def for_promise(self, promise: Promise | None) -> RequestPolicy:
        """Return the calls for an open request that has promised to come back: only lower promises give way to it."""
        if promise is None:
            return self

        def make_room(newcomers: Sequence[bytes], room: int, protected: Protected) -> Room:
            wanted = max(0, len(newcomers) - room)
            victims = self.below(promise.place, wanted, protected)
            return Room(max(0, len(newcomers) - wanted + len(victims)), victims)  # the last are declined

        return RequestCalls(partial(self.put, promise), self.load, make_room)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.below(_LAST, len(self), lambda _: False))

    def __len__(self) -> int:
        return len(self._promise_of)

    def __repr__(self) -> str:
        return f"Promised({len(self)} keys, {len(self._live)} promises)"

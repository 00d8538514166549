"""ARC: recency and frequency, balanced by keys that were evicted too early."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, filterfalse, repeat

from kvoffload.cache.policies.base import Protected
from kvoffload.cache.policies.open_keys import OpenKeys, Places, Queue, TwoQueues


class ARC(TwoQueues):
    """Keeps keys used once and keys used more often, and learns how much room each deserve.

    Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003), with its names: T1 has the
    resident keys used once, T2 the others; B1 and B2 remember keys evicted from T1 and T2; p is the size that T1 should
    have. A key that comes back while B1 remembers it raises p; one that B2 remembers lowers it. A scan of new keys goes
    through T1 and leaves T2 as it is.

    If a request brings many keys at once, `make_room` evicts the keys that the paper would, had they come one by one. p
    is kept in whole keys, and protected keys are passed over. O(1) amortised, plus the keys passed over. In each of T1
    and T2 the keys of an open request are as recent as the latest of these.

    Args:
        capacity: keys of the cache, the paper's c. At most as many evicted keys are remembered.
    """

    loads_move = True

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # the oldest first; the value: whether the request that brought the key to T1 has still to end
        self._t1: Queue[bool] = OrderedDict()
        self._t2: Queue[bool] = OrderedDict()
        super().__init__(OpenKeys(self._t1, True), OpenKeys(self._t2, False))
        self._b1: OrderedDict[bytes, None] = OrderedDict()
        self._b2: OrderedDict[bytes, None] = OrderedDict()
        self._target = 0  # p

    def insert(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._target = self._adapted(self._target, key)
            ghosts = self._b1 if key in self._b1 else self._b2
            if key in ghosts:
                del ghosts[key]
                self._t2[key] = False
            else:
                self._t1[key] = True
            self._forget()

    def load(self, keys: Sequence[bytes]) -> None:
        self._leave(keys)
        for key in reversed(keys):
            self._use(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._leave(keys)
        for key in reversed(keys):
            if self._t1.get(key):
                self._t1[key] = False
                self._t1.move_to_end(key)
            elif key in self._t1 or key in self._t2:
                self._use(key)

    def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
        self._leave(keys)
        for key in keys:
            ghosts = self._b1 if key in self._t1 else self._b2
            self._take(key)
            if evicted:
                ghosts[key] = None

    def victims(self, count: int, protected: Protected) -> list[bytes] | None:
        return self._choose(repeat(self._target, count), protected)

    def _limits(self, newcomers: Sequence[bytes]) -> list[int]:
        """p as each newcomer finds it, less the keys that have come to T1 by then."""
        target, arrived, limits = self._target, 0, list[int]()
        for key in reversed(newcomers):
            target = self._adapted(target, key)
            limits.append(target - arrived - (key in self._b2))
            arrived += key not in self._b1 and key not in self._b2
        return limits

    def __repr__(self) -> str:
        sizes = (
            f"T1 {len(self._open1)}, T2 {len(self._open2)}, B1 {len(self._b1)}, B2 {len(self._b2)}, p {self._target}"
        )
        return f"ARC({len(self)} of {self._capacity} keys: {sizes})"

    def _use(self, key: bytes) -> None:
        self._take(key)
        self._t2[key] = False

    def _adapted(self, target: int, key: bytes) -> int:
        if key in self._b1:
            return min(self._capacity, target + max(1, len(self._b2) // len(self._b1)))
        if key in self._b2:
            return max(0, target - max(1, len(self._b1) // len(self._b2)))
        return target

    def _forget(self) -> None:
        """Keep T1 and B1 within the capacity, and all four lists within twice as much."""
        while self._b1 and len(self._open1) + len(self._b1) > self._capacity:
            self._b1.popitem(last=False)
        while self._b2 and len(self) + len(self._b1) + len(self._b2) > 2 * self._capacity:
            self._b2.popitem(last=False)

    def _choose(self, limits: Iterable[int], protected: Protected, places: Places = (None, None)) -> list[bytes] | None:
        """Choose T1's oldest key while T1 has more keys than the limit, else T2's, else the other's.

        This is the paper's REPLACE.
        """
        once = filterfalse(protected, self._open1.oldest_first(places[0]))
        often = filterfalse(protected, self._open2.oldest_first(places[1]))
        first, opened = self._t1, self._open1.opened_of
        left, victims = len(self._open1), list[bytes]()
        for limit in limits:
            key = next(chain(once, often) if left > limit else chain(often, once), None)
            if key is None:
                return None
            left -= key in first or key in opened
            victims.append(key)
        return victims

"""ARC: recency and frequency, balanced by keys that were evicted too early."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, filterfalse, repeat
from typing import Any

from kvoffload.cache.policies.base import Policy, Protected, RequestPolicy, Room
from kvoffload.cache.policies.open_keys import Opened, OpenKeys, Queue


class ARC(Policy):
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

    declines_with_room = False

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # the oldest first; T1's values: whether the request that brought the key has still to end
        self._t1: Queue[bool] = OrderedDict()
        self._t2: Queue[None] = OrderedDict()
        self._open1, self._open2 = OpenKeys(self._t1, True), OpenKeys(self._t2, None)
        self._b1: OrderedDict[bytes, None] = OrderedDict()
        self._b2: OrderedDict[bytes, None] = OrderedDict()
        self._target = 0  # p

    def insert(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._target = self._adapted(self._target, key)
            ghosts = self._b1 if key in self._b1 else self._b2
            if key in ghosts:
                del ghosts[key]
                self._t2[key] = None
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

    def for_request(self, notes: dict[Any, Any]) -> RequestPolicy:
        return _ForRequest(self, self._open1.of_request(notes, "T1"), self._open2.of_request(notes, "T2"))

    def make_room(
        self,
        newcomers: Sequence[bytes],
        room: int,
        protected: Protected,
        opened1: Opened | None = None,
        opened2: Opened | None = None,
    ) -> Room | None:
        """As `Policy.make_room`; the keys in `opened1` and `opened2` are passed over."""
        target, arrived, limits = self._target, 0, list[int]()
        for key in reversed(newcomers):
            target = self._adapted(target, key)
            limits.append(target - arrived - (key in self._b2))
            arrived += key not in self._b1 and key not in self._b2
        victims = self._choose(limits[room:], protected, opened1, opened2)
        return None if victims is None else Room(len(newcomers), victims)

    def __iter__(self) -> Iterator[bytes]:
        return chain(self._open1.oldest_first(), self._open2.oldest_first())

    def __len__(self) -> int:
        return len(self._t1) + self._open1.extra + len(self._t2) + self._open2.extra

    @property
    def _size1(self) -> int:
        return len(self._t1) + self._open1.extra

    def __repr__(self) -> str:
        sizes = (
            f"T1 {self._size1}, T2 {len(self) - self._size1}, B1 {len(self._b1)}, B2 {len(self._b2)}, p {self._target}"
        )
        return f"ARC({len(self)} of {self._capacity} keys: {sizes})"

    def _leave(self, keys: Sequence[bytes]) -> None:
        self._open1.leave(keys)
        self._open2.leave(keys)

    def _use(self, key: bytes) -> None:
        self._take(key)
        self._t2[key] = None

    def _take(self, key: bytes) -> None:
        if self._t1.pop(key, None) is None:
            del self._t2[key]

    def _adapted(self, target: int, key: bytes) -> int:
        if key in self._b1:
            return min(self._capacity, target + max(1, len(self._b2) // len(self._b1)))
        if key in self._b2:
            return max(0, target - max(1, len(self._b1) // len(self._b2)))
        return target

    def _forget(self) -> None:
        """Keep T1 and B1 within the capacity, and all four lists within twice as much."""
        while self._b1 and len(self._t1) + self._open1.extra + len(self._b1) > self._capacity:
            self._b1.popitem(last=False)
        while self._b2 and len(self) + len(self._b1) + len(self._b2) > 2 * self._capacity:
            self._b2.popitem(last=False)

    def _choose(
        self, limits: Iterable[int], protected: Protected, opened1: Opened | None = None, opened2: Opened | None = None
    ) -> list[bytes] | None:
        """One key for each limit: T1's oldest while T1 has more keys than that, else T2's, else the other's.

        This is the paper's REPLACE.
        """
        once = filterfalse(protected, self._open1.oldest_first(opened1))
        often = filterfalse(protected, self._open2.oldest_first(opened2))
        first, opened = self._t1, self._open1.opened_of
        left, victims = self._size1, list[bytes]()
        for limit in limits:
            key = next(chain(once, often) if left > limit else chain(often, once), None)
            if key is None:
                return None
            left -= key in first or key in opened
            victims.append(key)
        return victims


class _ForRequest:
    """The policy for an open request, with its places in T1 and T2."""

    def __init__(self, policy: ARC, opened1: Opened, opened2: Opened) -> None:
        self._policy = policy
        self._opened1, self._opened2 = opened1, opened2

    def insert(self, keys: Sequence[bytes]) -> None:
        policy = self._policy
        policy.insert(keys)
        first = [key for key in keys if policy._t1.pop(key, None) is not None]
        second = [key for key in keys if key in policy._t2]
        self._join(first, second)

    def load(self, keys: Sequence[bytes]) -> None:
        self._policy.load(keys)
        self._join([], keys)

    def make_room(self, newcomers: Sequence[bytes], room: int, protected: Protected) -> Room | None:
        return self._policy.make_room(newcomers, room, protected, self._opened1, self._opened2)

    def _join(self, first: Sequence[bytes], second: Sequence[bytes]) -> None:
        policy = self._policy
        for key in second:
            del policy._t2[key]
        policy._open1.join(self._opened1, first)
        policy._open2.join(self._opened2, second)

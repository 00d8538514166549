"""S3FIFO: keys move between queues only when something is evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, filterfalse, repeat
from typing import NamedTuple

from kvoffload.cache.policies.base import Protected
from kvoffload.cache.policies.open_keys import OpenKeys, Places, Queue, TwoQueues

_SMALL_SHARE = 10  # the small queue has the capacity divided by this
_MOST_USES = 3
_COUNTED = 4  # a flag above the uses in a queue's values: the use by an unfinished request is counted already


class _Plan(NamedTuple):
    """The side effects of evicting `victims`."""

    victims: tuple[bytes, ...]
    ghosts: list[bytes]  # victims that leave the small queue
    moved: OrderedDict[bytes, int]  # keys that go to the recent end of the main queue, in this order, and their values


class S3FIFO(TwoQueues):
    """A small queue that newcomers must survive, before a main queue.

    Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction" (SOSP 2023). New keys enter the
    small queue. At its end, a key that was used more than once since it came moves on to the main queue; others are
    evicted, and enter the main queue if they come back while remembered. At the end of the main queue, a used key gets
    another round for every use, up to three. Uses are only counted and move nothing.

    Choosing victims moves keys between queues, but `victims` and `make_room` must change nothing. So the search leaves
    the queues as they are, and puts the keys it would move into a queue of its own, which follows the main queue. The
    moves are carried out if exactly those victims are evicted before anything else changes; otherwise they are dropped.
    Protected keys are passed over and keep their places. O(1) amortised, plus the keys passed over. In each queue the
    keys that an open request has stored move to the recent end with the latest of these.

    Args:
        capacity: keys of the cache. About nine tenths as many evicted keys are remembered.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small_size = max(1, capacity // _SMALL_SHARE)
        # the oldest first; the value: uses since the key came here, and _COUNTED
        self._small: Queue[int] = OrderedDict()
        self._main: Queue[int] = OrderedDict()
        super().__init__(OpenKeys(self._small, _COUNTED), OpenKeys(self._main, _COUNTED))
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._plan: _Plan | None = None  # of the latest answer, unless anything has changed since

    def insert(self, keys: Sequence[bytes]) -> None:
        self._plan = None
        for key in reversed(keys):
            queue = self._main if key in self._ghosts else self._small
            self._ghosts.pop(key, None)
            queue[key] = _COUNTED

    def load(self, keys: Sequence[bytes]) -> None:
        self._plan = None
        self._leave(keys)
        for key in keys:
            queue = self._small if key in self._small else self._main
            queue[key] = _used(queue[key]) | _COUNTED

    def touch(self, keys: Sequence[bytes]) -> None:
        self._plan = None
        self._leave(keys)
        for key in keys:
            queue = self._small if key in self._small else self._main
            value = queue.get(key)
            if value is not None:
                queue[key] = value - _COUNTED if value & _COUNTED else _used(value)

    def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
        plan, self._plan = self._plan, None
        self._leave(keys)
        if evicted and plan is not None and plan.victims == tuple(keys):
            for key, value in plan.moved.items():
                self._take(key)
                self._main[key] = value
            ghosts = plan.ghosts
        else:
            ghosts = [key for key in keys if key in self._small] if evicted else []
        for key in keys:
            self._take(key)
        self._ghosts.update(dict.fromkeys(ghosts))
        while len(self._ghosts) > self._capacity - self._small_size:
            self._ghosts.popitem(last=False)

    def victims(self, count: int, protected: Protected) -> list[bytes] | None:
        return self._choose(repeat(self._small_size, count), protected)

    def _limits(self, newcomers: Sequence[bytes]) -> list[int]:
        """The size of the small queue, less the keys that have come to it by then."""
        arrived, limits = 0, list[int]()
        for key in reversed(newcomers):
            limits.append(self._small_size - arrived)
            arrived += key not in self._ghosts
        return limits

    def __repr__(self) -> str:
        sizes = f"small {len(self._open1)}, main {len(self._open2)}, ghosts {len(self._ghosts)}"
        return f"S3FIFO({len(self)} of {self._capacity} keys: {sizes})"

    def _choose(self, limits: Iterable[int], protected: Protected, places: Places = (None, None)) -> list[bytes] | None:
        """Choose a key of the small queue while that has at least as many keys as the limit, else of the main queue.
        Keys that were used since go to the end of the main queue, instead of being evicted. Changes nothing.
        """
        small = filterfalse(protected, self._open1.oldest_first(places[0]))
        main = filterfalse(protected, self._open2.oldest_first(places[1]))
        opened, left = self._open1.opened_of, len(self._open1)
        victims, ghosts, moved = list[bytes](), list[bytes](), OrderedDict[bytes, int]()
        for limit in limits:
            while True:
                key = next(chain(main, moved, small) if left < limit else chain(small, main, moved), None)
                if key is None:
                    return None
                if key in opened or (key in self._small and key not in moved):
                    left -= 1
                    value = self._small.get(key, 0)  # 0: of an open request, not used since it was inserted
                    if _uses(value) <= 1:
                        ghosts.append(key)
                        break
                    moved[key] = value & _COUNTED
                else:
                    value = moved.pop(key) if key in moved else self._main.get(key, 0)  # 0: of an open request
                    if not _uses(value):
                        break
                    moved[key] = value - 1
            victims.append(key)
        self._plan = _Plan(tuple(victims), ghosts, moved)
        return victims


def _uses(value: int) -> int:
    return value & _MOST_USES


def _used(value: int) -> int:
    return min(_uses(value) + 1, _MOST_USES)

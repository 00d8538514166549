"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import filterfalse, islice
from typing import Any

from kvoffload.cache.policies.base import Policy, Protected, RequestCalls, RequestPolicy, Room
from kvoffload.cache.policies.open_keys import Opened, OpenKeys, Queue


class LRU(Policy):
    """Evicts the least recently used key. O(1), plus the protected keys that it passes over.

    An open request is as recent as its latest piece, with all its keys. `capacity` is not used.
    """

    declines_with_room = False

    def __init__(self, capacity: int = 0) -> None:
        del capacity  # any number of keys
        self._keys: Queue[None] = OrderedDict()
        self._open = OpenKeys(self._keys, None)

    def insert(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._keys[key] = None

    def load(self, keys: Sequence[bytes]) -> None:
        self._open.leave(keys)
        for key in reversed(keys):
            self._keys.move_to_end(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        if self._open.leave(keys) == len(keys):
            return  # which has made them the most recent
        for key in reversed(keys):
            if key in self._keys:
                self._keys.move_to_end(key)

    def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
        del evicted
        self._open.leave(keys)
        for key in keys:
            del self._keys[key]

    def victims(self, count: int, protected: Protected) -> list[bytes] | None:
        return self._oldest(count, protected, None)

    def for_request(self, notes: dict[Any, Any]) -> RequestPolicy:
        opened = self._open.of_request(notes, "keys")
        join = partial(self._open.join, opened)

        def load(keys: Sequence[bytes]) -> None:
            self.remove(keys, evicted=False)
            join(keys)

        def make_room(newcomers: Sequence[bytes], room: int, protected: Protected) -> Room | None:
            victims = self._oldest(max(0, len(newcomers) - room), protected, opened)
            return None if victims is None else Room(len(newcomers), victims)

        return RequestCalls(join, load, make_room)

    def __iter__(self) -> Iterator[bytes]:
        return self._open.oldest_first()

    def __len__(self) -> int:
        return len(self._keys) + self._open.extra

    def __repr__(self) -> str:
        return f"LRU({len(self)} keys)"

    def _oldest(self, count: int, protected: Protected, but: Opened | None) -> list[bytes] | None:
        found = list(islice(filterfalse(protected, self._open.oldest_first(but)), count))
        return found if len(found) == count else None

"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import filterfalse, islice

from kvoffload.cache.policies.base import Policy, Protected


class LRU(Policy):
    """Evicts the least recently used key, in O(1) plus the keys passed over because they are protected."""

    declines_with_room = False

    def __init__(self, capacity: int = 0) -> None:
        del capacity  # any number of keys
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def insert(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._keys[key] = None

    def load(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._keys.move_to_end(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._keys:
                self._keys.move_to_end(key)

    def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
        del evicted
        for key in keys:
            del self._keys[key]

    def victims(self, count: int, protected: Protected) -> list[bytes] | None:
        found = list(islice(filterfalse(protected, self._keys), count))
        return found if len(found) == count else None

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"LRU({len(self)} keys)"

"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import filterfalse, islice
from typing import Any

from kvoffload.cache.policies.base import Policy, Protected, RequestPolicy, Room


class _Open:
    """The keys of an open request, in its order: as recent as its latest piece, the deepest evicted first."""

    __slots__ = ("keys",)

    def __init__(self) -> None:
        self.keys: dict[bytes, None] = {}


class LRU(Policy):
    """Evicts the least recently used key, in O(1) plus the keys passed over because they are protected."""

    declines_with_room = False

    def __init__(self, capacity: int = 0) -> None:
        del capacity  # any number of keys
        self._order: OrderedDict[bytes | _Open, None] = OrderedDict()  # the oldest first
        self._open_of: dict[bytes, _Open] = {}  # of keys that are in `_order` with their open request
        self._num_open = 0

    def insert(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._order[key] = None

    def load(self, keys: Sequence[bytes]) -> None:
        if self._open_of:
            self._leave(keys)
        for key in reversed(keys):
            self._order.move_to_end(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        if self._open_of:
            self._leave(keys)
        for key in reversed(keys):
            if key in self._order:
                self._order.move_to_end(key)

    def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
        del evicted
        if self._open_of:
            self._leave(keys)
        for key in keys:
            del self._order[key]

    def victims(self, count: int, protected: Protected) -> list[bytes] | None:
        return self._oldest(count, protected, None)

    def for_request(self, notes: dict[Any, Any]) -> RequestPolicy:
        found = notes.get("open")
        if found is None or found not in self._order:
            found = notes["open"] = _Open()
        return _ForRequest(self, found)

    def __iter__(self) -> Iterator[bytes]:
        return self._keys(None)

    def __len__(self) -> int:
        return len(self._order) - self._num_open + len(self._open_of)

    def __repr__(self) -> str:
        return f"LRU({len(self)} keys)"

    # open requests ------------------------------------------------------------------------------------------------

    def _join(self, opened: _Open, keys: Sequence[bytes]) -> None:
        """Keys, resident or not, become the latest of an open request, which becomes the most recently used."""
        self._leave(keys)
        for key in keys:
            self._order.pop(key, None)
        if opened not in self._order:
            self._order[opened] = None
            self._num_open += 1
        opened.keys.update(dict.fromkeys(keys))
        self._open_of.update(dict.fromkeys(keys, opened))
        self._order.move_to_end(opened)

    def _leave(self, keys: Iterable[bytes]) -> None:
        """Those of the keys that are with an open request are recently used keys of their own now."""
        for key in keys:
            opened = self._open_of.pop(key, None)
            if opened is not None:
                del opened.keys[key]
                self._order[key] = None
                if not opened.keys:
                    del self._order[opened]
                    self._num_open -= 1

    def _oldest(self, count: int, protected: Protected, but: _Open | None) -> list[bytes] | None:
        found = list(islice(filterfalse(protected, self._keys(but)), count))
        return found if len(found) == count else None

    def _keys(self, but: _Open | None) -> Iterator[bytes]:
        """The keys from the oldest on, but for those of one open request, which are passed over as one."""
        if not self._num_open:
            return iter(self._order)  # type: ignore[arg-type]  # all of it is keys
        return self._with_open(but)

    def _with_open(self, but: _Open | None) -> Iterator[bytes]:
        for each in self._order:
            if not isinstance(each, _Open):
                yield each
            elif each is not but:
                yield from reversed(each.keys)


class _ForRequest:
    """The policy for an open request."""

    def __init__(self, policy: LRU, opened: _Open) -> None:
        self._policy = policy
        self._opened = opened

    def insert(self, keys: Sequence[bytes]) -> None:
        self._policy._join(self._opened, keys)

    load = insert

    def make_room(self, newcomers: Sequence[bytes], room: int, protected: Protected) -> Room | None:
        victims = self._policy._oldest(max(0, len(newcomers) - room), protected, self._opened)
        return None if victims is None else Room(len(newcomers), victims)

"""Keys of open requests in a policy's queue: the keys of one request share one place, and are passed over together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Generic, TypeAlias, TypeVar

V = TypeVar("V")


class Opened:
    """The keys of one open request in one queue, in request order: the deepest is the next to be evicted."""

    __slots__ = ("keys",)

    def __init__(self) -> None:
        self.keys: dict[bytes, None] = {}


Queue: TypeAlias = OrderedDict[bytes | Opened, V]


class OpenKeys(Generic[V]):
    """The part of a queue that belongs to open requests.

    The policy works on `queue` itself with single keys, and calls `leave` before it looks for keys that may be here.

    Args:
        queue: the oldest first. While a request is open, some of its elements are `Opened`.
        value: the value in `queue` of a key that leaves.

    Attributes:
        opened_of: for each key here, its request.
        extra: how many more keys the queue has than `len(queue)`.
    """

    def __init__(self, queue: Queue[V], value: V) -> None:
        self._queue = queue
        self._value = value
        self.opened_of: dict[bytes, Opened] = {}
        self.extra = 0

    def of_request(self, notes: dict[Any, Any], name: str) -> Opened:
        """The place of an open request in this queue; `notes` keeps it by this name."""
        found: Opened | None = notes.get(name)
        if found is None or found not in self._queue:
            found = notes[name] = Opened()
        return found

    def join(self, opened: Opened, keys: Sequence[bytes]) -> None:
        """Keys that are in no queue become the latest of an open request, whose place moves to the recent end."""
        if not keys:
            return
        if opened not in self._queue:
            self._queue[opened] = self._value
            self.extra -= 1
        opened.keys.update(dict.fromkeys(keys))
        self.opened_of.update(dict.fromkeys(keys, opened))
        self.extra += len(keys)
        self._queue.move_to_end(opened)

    def leave(self, keys: Sequence[bytes]) -> int:
        """The keys that are here become single keys at the recent end, the first the most recent.

        1. No request is open, or `keys` is empty: nothing is here. This is the usual case, and costs a comparison.
        2. They are all keys of one request, as when it ends: its place goes as a whole. The last key, which needs the
           others, is put in first, and so is the oldest.
        3. Some are here: each leaves the place of its request; with its last key the place goes, too.

        `extra` stays equal to the number of keys less `len(queue)`: a place counts as one in the queue.

        Returns:
            How many were here.
        """
        queue, value, left = self._queue, self._value, 0
        if not self.opened_of or not keys:
            return 0
        found = list(map(self.opened_of.pop, keys, repeat(None)))
        first = found[0]
        if first is not None and len(first.keys) == len(keys) == found.count(first):  # case 2
            for key in reversed(keys):
                queue[key] = value
            first.keys = {}
            del queue[first]
            self.extra -= len(keys) - 1
            return len(keys)
        for key, opened in zip(reversed(keys), reversed(found), strict=True):  # case 3
            if opened is None:
                continue
            del opened.keys[key]
            queue[key] = value
            left += 1
            if not opened.keys:
                del queue[opened]
                self.extra += 1
        self.extra -= left
        return left

    def oldest_first(self, but: Opened | None = None) -> Iterator[bytes]:
        """All keys of the queue, except those from one open request."""
        if not self.opened_of:
            return iter(self._queue)  # type: ignore[arg-type]  # no element is `Opened`

        def keys() -> Iterator[bytes]:
            for each in self._queue:
                if not isinstance(each, Opened):
                    yield each
                elif each is not but:
                    yield from reversed(each.keys)

        return keys()

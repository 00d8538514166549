"""Keys of open requests in a policy's queue: the keys of one request share one place, and are passed over together."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from kvoffload.cache.policies.base import Policy, Protected, RequestCalls, RequestPolicy, Room

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
        queue: as given.
        opened_of: for each key here, its request.
        extra: how many more keys the queue has than `len(queue)`.
    """

    def __init__(self, queue: Queue[V], value: V) -> None:
        self.queue = queue
        self._value = value
        self.opened_of: dict[bytes, Opened] = {}
        self.extra = 0

    def of_request(self, notes: dict[Any, Any], name: str) -> Opened:
        """Return the place of an open request in this queue; `notes` keeps it by this name."""
        found: Opened | None = notes.get(name)
        if found is None or found not in self.queue:
            found = notes[name] = Opened()
        return found

    def join(self, opened: Opened, keys: Sequence[bytes]) -> None:
        """Add keys that are in no queue to an open request, as its latest; its place moves to the recent end."""
        if not keys:
            return
        if opened not in self.queue:
            self.queue[opened] = self._value
            self.extra -= 1
        opened.keys.update(dict.fromkeys(keys))
        self.opened_of.update(dict.fromkeys(keys, opened))
        self.extra += len(keys)
        self.queue.move_to_end(opened)

    def leave(self, keys: Sequence[bytes]) -> int:
        """Make the keys that are here single keys at the recent end, the first the most recent.

        1. No request is open, or `keys` is empty: nothing is here. This is the usual case, and costs a comparison.
        2. They are all keys of one request, as when it ends: its place goes as a whole. The last key, which needs the
           others, is put in first, and so is the oldest.
        3. Some are here: each leaves the place of its request; with its last key the place goes, too.

        `extra` stays equal to the number of keys less `len(queue)`: a place counts as one in the queue.

        Returns:
            How many were here.
        """
        queue, value, left = self.queue, self._value, 0
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
        """Return all keys of the queue, except those of one open request."""
        if not self.opened_of:
            return iter(self.queue)  # type: ignore[arg-type]  # no element is `Opened`

        def keys() -> Iterator[bytes]:
            for each in self.queue:
                if not isinstance(each, Opened):
                    yield each
                elif each is not but:
                    yield from reversed(each.keys)

        return keys()

    def __len__(self) -> int:
        return len(self.queue) + self.extra


Places: TypeAlias = tuple[Opened | None, Opened | None]
_NOWHERE: Places = (None, None)


class TwoQueues(Policy):
    """A policy with two queues, in each of which an open request has a place.

    Attributes:
        loads_move: whether keys that an open request loads move to its places.
    """

    declines_with_room = False
    loads_move: ClassVar[bool] = False

    def __init__(self, first: OpenKeys[Any], second: OpenKeys[Any]) -> None:
        self._open1, self._open2 = first, second

    @abstractmethod
    def _limits(self, newcomers: Sequence[bytes]) -> list[int]:
        """For each newcomer, the last first, as if they came one by one: the limit at which `_choose` makes room."""

    @abstractmethod
    def _choose(self, limits: Iterable[int], protected: Protected, places: Places = _NOWHERE) -> list[bytes] | None:
        """Choose a victim for each limit, which says from which queue; None if there are too few. Changes nothing.

        The keys in `places` are passed over.
        """

    def make_room(
        self, newcomers: Sequence[bytes], room: int, protected: Protected, places: Places = _NOWHERE
    ) -> Room | None:
        victims = self._choose(self._limits(newcomers)[room:], protected, places)
        return None if victims is None else Room(len(newcomers), victims)

    def for_request(self, notes: dict[Any, Any]) -> RequestPolicy:
        places = self._open1.of_request(notes, "first"), self._open2.of_request(notes, "second")

        def join(step: Callable[[Sequence[bytes]], None], keys: Sequence[bytes]) -> None:
            """Take a step, then put its keys from the two queues into the places of the request."""
            step(keys)
            for mine, place in zip((self._open1, self._open2), places, strict=True):
                mine.join(place, [key for key in keys if mine.queue.pop(key, None) is not None])

        load = partial(join, self.load) if self.loads_move else self.load
        return RequestCalls(partial(join, self.insert), load, partial(self.make_room, places=places))

    def _leave(self, keys: Sequence[bytes]) -> None:
        self._open1.leave(keys)
        self._open2.leave(keys)

    def _take(self, key: bytes) -> None:
        """Take a single key out of its queue."""
        if self._open1.queue.pop(key, None) is None:
            del self._open2.queue[key]

    def __iter__(self) -> Iterator[bytes]:
        return chain(self._open1.oldest_first(), self._open2.oldest_first())

    def __len__(self) -> int:
        return len(self._open1) + len(self._open2)

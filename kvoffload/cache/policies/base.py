"""What every eviction policy offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

Protected = Callable[[bytes], bool]


class Room(NamedTuple):
    """How new keys come into a full cache.

    Attributes:
        admitted: how many of the new keys, from the first, are worth storing.
        victims: the resident keys to evict for them, the first to go first.
    """

    admitted: int
    victims: list[bytes]


class RequestPolicy(Protocol):
    """The calls for an open request; see `Policy.for_request`."""

    def insert(self, keys: Sequence[bytes]) -> None:
        """The request has stored these keys, which come after those that it has inserted or loaded before."""

    def load(self, keys: Sequence[bytes]) -> None:
        """The request has loaded these keys, none of which it has inserted or loaded before."""

    def make_room(self, newcomers: Sequence[bytes], room: int, protected: Protected) -> Room | None:
        """As `Policy.make_room`; `protected` is True for all keys of the request."""


class Policy(ABC):
    """Chooses which keys a full cache evicts. It only advises: the cache checks the keys that it chooses.

    Called under the cache's lock, with keys in the order of a request: the first is the start of the prefix, each needs
    those before it. A request's life, as a policy sees it:

        load(keys found)   insert(keys stored)   ...   touch(all of its keys, once, at its end)

    A request is one use of each of its keys. `load` and `insert` report that use early, so that a key in use does not
    look old; `touch` is a use only of keys that were neither inserted nor loaded since their last `touch`, and of the
    others it renews the recency alone. Among the keys of one call the first counts as the most recently used, so that
    the keys that need it are evicted before it.

    A method that raises leaves no wrong key in the cache. The exception reaches the caller of the cache, and before the
    next call the policy is created again (`reset`, if the cache was given an object and not a name or a function).

    Attributes:
        declines_with_room: whether `make_room` may admit fewer keys than there is room for. Where it is False the cache
            asks only when room is missing.
    """

    declines_with_room: ClassVar[bool] = True

    @abstractmethod
    def insert(self, keys: Sequence[bytes]) -> None:
        """A request has stored these keys. They become resident; none of them was before."""

    @abstractmethod
    def load(self, keys: Sequence[bytes]) -> None:
        """A request has loaded these keys. They are resident, each is given once."""

    @abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """A request with these keys has ended. Some may not be resident; each is given once."""

    @abstractmethod
    def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
        """These resident keys have been taken out.

        Args:
            evicted: True if `victims` or `make_room` chose them, False if the cache took them out for another reason.
        """

    @abstractmethod
    def victims(self, count: int, protected: Protected) -> list[bytes] | None:
        """The `count` resident keys to evict, the first to go first; None if fewer may be evicted. Changes nothing.

        Args:
            protected: whether a resident key must stay, `protected(key)`: because it is leased, for example.
        """

    @abstractmethod
    def __iter__(self) -> Iterator[bytes]:
        """The resident keys; if the policy keeps them in one order, the next to be evicted first."""

    @abstractmethod
    def __len__(self) -> int:
        """How many keys are resident."""

    def make_room(self, newcomers: Sequence[bytes], room: int, protected: Protected) -> Room | None:
        """Which of `newcomers` to store when `room` entries are free, and what to evict for them. Changes nothing.

        This default admits all of them.

        Returns:
            None if more keys would have to be evicted than may be.
        """
        victims = self.victims(max(0, len(newcomers) - room), protected)
        return None if victims is None else Room(len(newcomers), victims)

    def for_request(self, notes: dict[Any, Any]) -> RequestPolicy:
        """What is called in place of this policy while a request stores and loads its keys in pieces.

        `touch` follows with all of its keys once it has ended, or never. The last key of a piece need not be the last
        of the request. This default is the policy itself, which takes each piece for a request of its own. A class that
        overrides `insert`, `load` or `make_room` of another policy has to override this, too.

        Args:
            notes: for what the policy remembers of the request: the same dict in every call for it, empty at first.
                After an exception it may hold what was written before the policy was created again or reset.
        """
        del notes
        return self

    def reset(self, keys: Sequence[bytes]) -> None:
        """Make `keys` the resident keys, after a call was interrupted or has raised. What was learned may be lost."""
        known = list(self)
        if known:
            self.remove(known, evicted=False)
        if keys:
            self.insert(keys)

    def evict(self, count: int, protected: Protected) -> list[bytes] | None:
        """Evict `count` keys and return them. None if fewer may be evicted; then nothing has changed."""
        victims = self.victims(count, protected)
        if victims is not None:
            self.remove(victims, evicted=True)
        return victims

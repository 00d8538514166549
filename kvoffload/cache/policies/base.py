"""What every eviction policy offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

Protected = Callable[[bytes], bool]


class Room(NamedTuple):
    """How new keys come into a full cache.

    Attributes:
        admitted: how many of the new keys, from the first, are worth storing.
        victims: the resident keys to evict for them, in the order in which they go.
    """

    admitted: int
    victims: list[bytes]


class Policy(ABC):
    """Which keys a full cache evicts. A policy advises: it knows keys and their use; the cache checks what it names.

    Called under the cache's lock, with keys in the order of a request: the first is the start of the prefix, each needs
    those before it. A request's life, as a policy sees it:

        load(keys found)   insert(keys stored)   ...   touch(all of its keys, once, at its end)

    One request is one use of a key, and the first two are reported early so that nothing in use looks old. So `touch`
    counts as a use for those keys only that were neither inserted nor loaded since their last `touch`; for the others
    it renews their place. Among keys of one call the first counts as the most recently used: what needs it goes first.

    A method that raises leaves no wrong key in the cache. The exception reaches the caller of the cache, and before the
    next call the policy is created anew (`reset`, where the cache was given an object and not a name or a function).

    Attributes:
        declines_with_room: whether `make_room` may admit fewer keys than there is room for. Where it is False the cache
            asks only when room is missing.
    """

    declines_with_room: ClassVar[bool] = True

    @abstractmethod
    def insert(self, keys: Sequence[bytes]) -> None:
        """These keys, not resident before, are from now on; a request has stored them."""

    @abstractmethod
    def load(self, keys: Sequence[bytes]) -> None:
        """A request has loaded these resident keys; no repeats."""

    @abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """A request with these keys, resident or not, has ended; no repeats."""

    @abstractmethod
    def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
        """These resident keys are gone: evicted, as `victims` or `make_room` said, or for another reason."""

    @abstractmethod
    def victims(self, count: int, protected: Protected) -> list[bytes] | None:
        """`count` resident keys to evict, in the order in which they go; None if too few may. Changes nothing.

        Args:
            count: how many.
            protected: says of a resident key whether it has to stay.
        """

    @abstractmethod
    def __iter__(self) -> Iterator[bytes]:
        """The resident keys; where the policy has one order, the next to go first."""

    @abstractmethod
    def __len__(self) -> int:
        """How many keys are resident."""

    def make_room(self, newcomers: Sequence[bytes], room: int, protected: Protected) -> Room | None:
        """Which of `newcomers` to store where `room` entries are free, and what to evict for them. Changes nothing.

        All of them, unless a policy knows better.

        Returns:
            None if those worth storing need more keys to be evicted than may go.
        """
        victims = self.victims(max(0, len(newcomers) - room), protected)
        return None if victims is None else Room(len(newcomers), victims)

    def reset(self, keys: Sequence[bytes]) -> None:
        """Know exactly these keys, after a call was interrupted or has raised; what was learned may be lost."""
        known = list(self)
        if known:
            self.remove(known, evicted=False)
        if keys:
            self.insert(keys)

    def evict(self, count: int, protected: Protected) -> list[bytes] | None:
        """Evict `count` keys and return them; None, and nothing has changed, if too few may go."""
        victims = self.victims(count, protected)
        if victims is not None:
            self.remove(victims, evicted=True)
        return victims

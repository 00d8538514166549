"""The interface of eviction policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

Protected = Callable[[bytes], bool]


class Room(NamedTuple):
    """How new keys come into a full cache.

    Attributes:
        admitted: how many of the new keys, from the first, are worth storing: at most as many as the free entries and
            `victims` together.
        victims: the resident keys to evict for them, no repeats, in the order in which they go.
    """

    admitted: int
    victims: list[bytes]


class RequestPolicy(Protocol):
    """The calls for an open request; see `Policy.for_request`."""

    def insert(self, keys: Sequence[bytes], /) -> None:
        """Note that the request has stored a piece, these keys. They become resident, and follow the keys that the
        request has inserted or loaded before. Called once for each piece, under the cache's lock.
        """

    def load(self, keys: Sequence[bytes], /) -> None:
        """Note that the request has loaded a piece, these keys. All are resident, and new to the request, which has
        neither inserted nor loaded them before. Called once for each piece, under the cache's lock.
        """

    def make_room(self, newcomers: Sequence[bytes], room: int, protected: Protected, /) -> Room | None:
        """Decide as `Policy.make_room` does, for a piece of the request; `protected` is True for all its keys. Changes
        nothing.
        """


class RequestCalls(NamedTuple):
    """A `RequestPolicy` made of functions: methods of the policy that are given the request's place in it."""

    insert: Callable[[Sequence[bytes]], None]
    load: Callable[[Sequence[bytes]], None]
    make_room: Callable[[Sequence[bytes], int, Protected], Room | None]


class Policy(ABC):
    """Chooses which keys a full cache evicts. It only advises: the cache checks its choice. One of your own has
    `insert`, `load`, `touch`, `remove`, `victims`, `__iter__` and `__len__`; the other methods have defaults.

    The cache calls it under the cache's lock, with keys in the order of a request: the first is the start of the
    prefix, and each key needs the ones before. A policy sees a request as:

        load(keys found)   insert(keys stored)   ...   touch(all of its keys, once, at its end)

    A request is one use of each of its keys. `load` and `insert` report that use early, so that a key in use does not
    look old. `touch` is a use only of keys that were neither inserted nor loaded since their last `touch`; for the
    others it just renews the recency. Among the keys of one call the first counts as the most recently used, so that a
    key is evicted after the keys that need it.

    If a method raises, no wrong key stays in the cache, and the exception reaches the caller of the cache. If that was
    `insert`, `load`, `touch` or `remove`, the cache creates the policy again before the next call; if it was given an
    object, rather than a name or a function, it calls `reset`. By then copies of a `store` or `load` may have been
    submitted, and nobody has their job: call `cache.drain` before you use the blocks.

    Attributes:
        declines_with_room: whether `make_room` may admit fewer keys than there is room for. If False, the cache asks
            only when room is missing, or the keys have a quota. True by default.
    """

    declines_with_room: ClassVar[bool] = True

    @abstractmethod
    def insert(self, keys: Sequence[bytes]) -> None:
        """Note that a request has stored these keys. They become resident; none was before."""

    @abstractmethod
    def load(self, keys: Sequence[bytes]) -> None:
        """Note that a request has loaded these keys. All are resident; no repeats."""

    @abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that a request with these keys has ended. Some may not be resident; no repeats; perhaps no key."""

    @abstractmethod
    def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
        """Take out these resident keys: from now on they are not resident.

        Args:
            keys: resident, no repeats.
            evicted: True if `victims` or `make_room` chose them, in their order; False if the cache took them out for
                another reason.
        """

    @abstractmethod
    def victims(self, count: int, protected: Protected) -> list[bytes] | None:
        """Return the `count` resident keys to evict, in the order in which they go, no repeats; None if fewer may go.
        Changes nothing: the cache calls `remove` with the keys that it evicts, perhaps with none or only with some.

        Args:
            count: 0 or more.
            protected: `protected(key)` is whether a resident key must stay, for example because it is leased. Return no
                such key: the cache's call then raises ValueError. Call it only before you return.
        """

    @abstractmethod
    def __iter__(self) -> Iterator[bytes]:
        """Go through the resident keys; if the policy keeps them in one order, the next to be evicted first."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many keys are resident."""

    def make_room(self, newcomers: Sequence[bytes], room: int, protected: Protected) -> Room | None:
        """Decide which of `newcomers` to store when `room` entries are free, and what to evict. Changes nothing: if the
        cache follows, it calls `remove` with the victims, then `insert` with the newcomers admitted.

        This default admits all newcomers.

        Args:
            newcomers: keys that are not resident, in the order of the request.
            room: entries that they may take without evicting a key: the free ones, or fewer if a quota leaves
                fewer.
            protected: as for `victims`.

        Returns:
            The decision; None if it would have to evict more keys than it may: the cache may then ask for fewer
            newcomers.
        """
        victims = self.victims(max(0, len(newcomers) - room), protected)
        return None if victims is None else Room(len(newcomers), victims)

    def for_request(self, notes: dict[Any, Any]) -> RequestPolicy:
        """Return what the cache calls in place of this policy's `insert`, `load` and `make_room` while a request stores
        and loads its keys in pieces. Called for each piece, under the cache's lock.

        When the request ends, the policy itself gets `touch` with all of its keys; a dropped request gets none. The
        last key of a piece need not be the last of the request. This default returns the policy itself, which takes
        each piece for a request. If you override `insert`, `load` or `make_room` of an existing policy, override this,
        too: what that policy returns here does not call your methods.

        Args:
            notes: a dict for the policy's notes on the request: the same dict in every call for the request, empty at
                first. After an exception it may hold notes from before the policy was created again or reset.
        """
        del notes
        return self

    def at(self, seconds: float, promised: float) -> None:  # noqa: B027  # few policies measure time
        """Note the time of the calls that follow. Called only where requests name sessions (`open_request`,
        `hint`); this default does nothing. Changes no key.

        Args:
            seconds: by `time.monotonic`; never falls.
            promised: which part of the keys asked for lately came with a promise to come back, 0 to 1. Keys that are
                retained for one are not this policy's: it gets `remove` for those that it had.
        """

    def reset(self, keys: Sequence[bytes]) -> None:
        """Make `keys`, and no others, the resident keys: the cache calls this for a policy object after a call was
        interrupted or raised. You may forget all that the policy has learned. If this raises, LRU replaces the policy,
        with a KVOffloadWarning.
        """
        known = list(self)
        if known:
            self.remove(known, evicted=False)
        if keys:
            self.insert(keys)

    def evict(self, count: int, protected: Protected) -> list[bytes] | None:
        """Evict `count` keys, and return them in the order in which they went. None if fewer may be evicted; then
        nothing has changed. For simulations and tests: a cache calls `victims` or `make_room`, and `remove`.
        """
        victims = self.victims(count, protected)
        if victims is not None:
            self.remove(victims, evicted=True)
        return victims

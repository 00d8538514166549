"""Which key a full cache gives up. A policy knows keys and their use, not slots; the cache says what may not go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Protocol


class Policy(Protocol):
    """Keeps track of the resident keys of one cache. Called under the cache's lock."""

    def insert(self, key: bytes) -> None:
        """`key` has become resident and is the most recently used."""

    def touch(self, key: bytes) -> None:
        """`key`, resident, was used."""

    def remove(self, key: bytes) -> None:
        """`key`, resident, is gone."""

    def victims(self, count: int, may_go: Callable[[bytes], bool]) -> list[bytes] | None:
        """`count` resident keys to give up, best first, or None if so many may not go. Changes nothing."""

    def __iter__(self) -> Iterator[bytes]:
        """The resident keys, the next to go first."""


class LRU:
    """Gives up the least recently used key, in O(1) plus the keys passed over because they may not go."""

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict.fromkeys(keys)

    def insert(self, key: bytes) -> None:
        self._keys[key] = None

    def touch(self, key: bytes) -> None:
        self._keys.move_to_end(key)

    def remove(self, key: bytes) -> None:
        del self._keys[key]

    def victims(self, count: int, may_go: Callable[[bytes], bool]) -> list[bytes] | None:
        found = list(islice(filter(may_go, self._keys), count))
        return found if len(found) == count else None

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


POLICIES: dict[str, Callable[[], Policy]] = {"lru": LRU}


def make_policy(policy: str | Policy) -> Policy:
    """A policy by name, or the caller's own object."""
    if not isinstance(policy, str):
        return policy
    if policy not in POLICIES:
        raise ValueError(
            f"policy must be one of {', '.join(POLICIES)}, or an object with their methods, got {policy!r}"
        )
    return POLICIES[policy]()

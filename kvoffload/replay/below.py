"""What lies below the host pool of a replay without bytes: a disk."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

from kvoffload.cache.index import CacheIndex
from kvoffload.cache.policies import make_policy
from kvoffload.cache.statistics import CacheEvent


class Below(Protocol):
    """A tier as a host pool sees it.

    Attributes:
        keys: what it holds now; the same object as long as the tier is used.
        num_slots: keys that it can hold.
    """

    @property
    def keys(self) -> Container[bytes]: ...

    @property
    def num_slots(self) -> int: ...

    def read(self, keys: Sequence[bytes]) -> None:
        """These keys, all of which it holds, are read into the host pool."""

    def write(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Take those of these keys that it lacks out of the host pool; returns those that it has taken."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """A request of this host with these keys, held or not, has ended."""


class Disk:
    """A disk of one host: the index that a `DiskTier` has.

    Attributes:
        index: which keys it holds.
    """

    def __init__(self, num_slots: int, policy: str) -> None:
        self.num_slots = num_slots
        self.keys: set[bytes] = set()
        self.index = CacheIndex(num_slots, policy=make_policy(policy, num_slots), on_event=self._on_event)

    def read(self, keys: Sequence[bytes]) -> None:
        self.index.load(keys)

    def write(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        with self.index.reserve([key for key in keys if key not in self.keys]) as reservation:
            taken = list(reservation.keys)
        self.keys.update(taken)
        return taken

    def touch(self, keys: Sequence[bytes]) -> None:
        self.index.touch(keys)

    def _on_event(self, event: CacheEvent) -> None:
        if event.kind == "evicted":
            self.keys.difference_update(event.keys)

"""Entries of a cache: which key has which, who holds them, which are free.

An entry without a key that is still held is *doomed*: it is free when its last holder lets go.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvoffload.errors import LayoutError


class Draw(NamedTuple):
    """Entries for new keys: those of victims, then never-used ones, then such as were given up before."""

    indices: list[int]
    fresh: int  # how many of them have never been used
    recycled: int  # how many come from the free list
    unused: list[int]  # entries of victims that no new key takes


class EntryTable:
    """`capacity` entries and the keys in them. Not for several threads at a time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.of: dict[bytes, int] = {}
        self.pool_of = array("H")  # of each used entry: the number of its pool
        self._keys: list[bytes] = []  # of each used entry: the object that `of` has, so that nobody keeps copies
        self.holds: dict[int, int] = {}  # holders of each entry that has any
        self._doomed: set[int] = set()
        self._free: list[int] = []

    @property
    def num_free(self) -> int:
        return self.capacity - len(self._keys) + len(self._free)

    def key_at(self, index: int) -> bytes:
        """The key that an entry has, or had last."""
        return self._keys[index]

    def draw(self, count: int, victims: Iterable[bytes]) -> Draw:
        """Choose entries for so many new keys; changes nothing."""
        given_up = [self.of[key] for key in victims]
        indices = given_up[:count]
        begin = len(self._keys)
        fresh = min(count - len(indices), self.capacity - begin)
        indices += range(begin, begin + fresh)
        recycled = count - len(indices)
        indices += self._free[len(self._free) - recycled :]
        return Draw(indices, fresh, recycled, given_up[count:])

    def fill(self, keys: Sequence[bytes], draw: Draw, pool: int) -> None:
        """Give the keys their entries, each with one holder. The victims have lost theirs."""
        del self._free[len(self._free) - draw.recycled :]
        self._free += draw.unused
        self._keys += [b""] * draw.fresh
        self.pool_of.extend([0] * draw.fresh)
        for key, index in zip(keys, draw.indices, strict=True):
            self._keys[index] = key
            self.pool_of[index] = pool
        self.of.update(zip(keys, draw.indices, strict=True))
        self.holds.update(dict.fromkeys(draw.indices, 1))

    def hold(self, indices: Iterable[int]) -> None:
        """One holder more for each of them; repeats count once."""
        for index in dict.fromkeys(indices):
            self.holds[index] = self.holds.get(index, 0) + 1

    def let_go(self, indices: Iterable[int]) -> None:
        """One holder less for each of them; repeats count once."""
        unique = list(dict.fromkeys(indices))
        for index, count in zip(unique, list(map(self.holds.pop, unique)), strict=True):
            if count > 1:
                self.holds[index] = count - 1
            elif index in self._doomed:
                self._doomed.remove(index)
                self._free.append(index)

    def part(self, key: bytes) -> int:
        """Take a key from its entry, which is free as soon as nobody holds it."""
        index = self.of.pop(key)
        if index in self.holds:
            self._doomed.add(index)
        else:
            self._free.append(index)
        return index

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        used = [*self.of.values(), *self._doomed]
        assert sorted(used + self._free) == list(range(len(self._keys))), "every entry is used, free or never used"
        assert len(self._keys) <= self.capacity, "no more entries than capacity"
        assert all(self._keys[index] is key for key, index in self.of.items()), "entries know their keys"
        assert all(count > 0 for count in self.holds.values()), "holds are counted"
        assert self._doomed <= self.holds.keys(), "what has no key and no holder is free"

    def __len__(self) -> int:
        return len(self.of)


def check_keys(keys: Sequence[bytes], *, repeats: bool = True) -> None:
    """Raise LayoutError unless `keys` is a sequence of bytes, without repeats unless they are legal."""
    if isinstance(keys, bytes | str):
        raise LayoutError(f"keys must be a list of keys, got one: {keys!r:.80}")
    if not set(map(type, keys)) <= {bytes}:
        for position, key in enumerate(keys):
            if not isinstance(key, bytes):
                raise LayoutError(f"keys[{position}] must be bytes, got {key!r:.80}")
    if not repeats and len(set(keys)) != len(keys):
        raise LayoutError("keys repeats a key; each key of a store must be given once")

"""Entries of a cache: which key has which, who holds them, which are free.

An entry without a key that is still held is *doomed*: it is free when its last holder lets go.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from operator import eq
from typing import NamedTuple

from kvoffload.errors import LayoutError

_FEW = 8  # keys side by side; where fewer are, neighbours are not worth looking at


class Draw(NamedTuple):
    """Entries for new keys: those of victims, then never-used ones, then such as were given up before."""

    indices: list[int]
    fresh: int  # how many of them have never been used
    recycled: slice  # where in the free list the others are; entries that come free meanwhile are behind them
    unused: list[int]  # entries of victims that no new key takes


class EntryTable:
    """`capacity` entries and the keys in them. Not for several threads at a time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.of: dict[bytes, int] = {}
        self.pool_of = array("I")  # of each used entry: the number of its pool
        self._keys: list[bytes | None] = []  # of each used entry: the object that `of` has, so that nobody keeps copies
        self.holds: dict[int, int] = {}  # holders of each entry that has any
        self._doomed: set[int] = set()
        self._free: list[int] = []

    @property
    def num_free(self) -> int:
        return self.capacity - len(self._keys) + len(self._free)

    def originals(self, keys: Iterable[bytes]) -> list[bytes]:
        """The same keys, as the objects that `of` has where they have entries."""
        of, known = self.of, self._keys
        return [known[of[key]] or key if key in of else key for key in keys]

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many leading keys have entries.

        Keys that were stored together mostly lie side by side: comparing them as they lie costs a fifth of looking up
        each in a large dictionary (`kvoffload bench cache`), where nearly every step misses the CPU's caches.
        """
        wanted, found, compared = list(keys), 0, 2 * _FEW
        while found < len(wanted):
            index = self.of.get(wanted[found])
            if index is None:
                return found
            together = self._together(index, wanted[found : found + compared])
            found += together
            if together < _FEW:
                break
            compared = 2 * together  # so that many short runs cost no more than one long one
        return found + len(list(takewhile(self.of.__contains__, wanted[found:])))

    def _together(self, index: int, keys: list[bytes]) -> int:
        """How many of these keys, from the first, have the entries from `index` on."""
        there = self._keys[index : index + len(keys)]
        return len(keys) if there == keys else len(list(takewhile(bool, map(eq, there, keys))))

    def draw(self, count: int, victims: Iterable[bytes]) -> Draw:
        """Choose entries for so many new keys, neighbours if possible; changes nothing."""
        given_up = [self.of[key] for key in victims]
        indices = sorted(given_up[:count])
        begin = len(self._keys)
        fresh = min(count - len(indices), self.capacity - begin)
        indices += range(begin, begin + fresh)
        recycled = slice(len(self._free) - (count - len(indices)), len(self._free))
        indices += sorted(self._free[recycled])
        return Draw(indices, fresh, recycled, given_up[count:])

    def give_up(self, keys: Iterable[bytes]) -> list[int]:
        """Keys that nobody holds lose their entries, which are not free: somebody has drawn them."""
        indices = [self.of.pop(key) for key in keys]
        for index in indices:
            self._keys[index] = None
        return indices

    def fill(self, keys: Sequence[bytes], draw: Draw, pool: int) -> None:
        """Give the keys their entries, each with one holder. The victims have lost theirs."""
        del self._free[draw.recycled]
        self._free += draw.unused
        self._keys += [None] * draw.fresh
        self.pool_of.extend([0] * draw.fresh)
        known, pool_of = self._keys, self.pool_of
        for key, index in zip(keys, draw.indices, strict=True):
            known[index] = key
            pool_of[index] = pool
        self.of.update(zip(keys, draw.indices, strict=True))
        self.holds.update(dict.fromkeys(draw.indices, 1))

    def hold(self, indices: Iterable[int]) -> None:
        """One holder more for each of them."""
        for index in indices:
            self.holds[index] = self.holds.get(index, 0) + 1

    def let_go(self, indices: Collection[int]) -> None:
        """One holder less for each of them; no repeats."""
        for index, count in zip(indices, list(map(self.holds.pop, indices)), strict=True):
            if count > 1:
                self.holds[index] = count - 1
            elif index in self._doomed:
                self._doomed.remove(index)
                self._free.append(index)

    def part(self, key: bytes) -> None:
        """Take a key from its entry, which is free as soon as nobody holds it."""
        index = self.of.pop(key)
        self._keys[index] = None
        if index in self.holds:
            self._doomed.add(index)
        else:
            self._free.append(index)

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        used = [*self.of.values(), *self._doomed]
        assert sorted(used + self._free) == list(range(len(self._keys))), "every entry is used, free or never used"
        assert len(self._keys) <= self.capacity, "no more entries than capacity"
        assert all(self._keys[index] is key for key, index in self.of.items()), "entries know their keys"
        assert len(self._keys) - self._keys.count(None) == len(self.of), "no entry has a key that is gone"
        assert all(count > 0 for count in self.holds.values()), "holds are counted"
        assert self._doomed <= self.holds.keys(), "what has no key and no holder is free"

    def __len__(self) -> int:
        return len(self.of)


def check_keys(keys: Sequence[bytes], *, repeats: bool = True) -> None:
    """Raise LayoutError unless `keys` is a sequence of bytes, without repeats unless they are legal."""
    if isinstance(keys, bytes | str):
        raise LayoutError(f"keys must be a list of keys, got one: {keys!r:.80}")
    if not isinstance(keys, Sequence):
        raise LayoutError(f"keys must be a list of bytes, got {keys!r:.80}")
    if not set(map(type, keys)) <= {bytes}:
        for position, key in enumerate(keys):
            if not isinstance(key, bytes):
                raise LayoutError(f"keys[{position}] must be bytes, got {key!r:.80}")
    if not repeats and len(frozenset(keys)) != len(keys):
        raise LayoutError("keys repeats a key; each key of a store must be given once")

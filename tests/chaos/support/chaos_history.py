"""What a disk tier may return: memory whose contents name their version, and the versions that each key may have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.testing.tier_pools import TierPools
from kvoffload.tiers import DiskTier, Limits, Outcome

PAGE = 4096
POOLS = 2
RECORD_BYTES = POOLS * PAGE
LAYOUT = bytes(range(16))
SECONDS = 60.0  # that anything may take
_WORDS = np.arange(PAGE // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7)  # odd: every word tells versions apart
_MASK = (1 << 64) - 1


def content(version: int) -> list[npt.NDArray[np.uint8]]:
    """A row for each pool; every 8 bytes are of this version and place only."""
    rows = []
    for factor in _FACTORS:
        words = _WORDS + np.uint64(version * factor & _MASK)
        words[0] = version
        rows.append(words.view(np.uint8))
    return rows


class Memory:
    """Pools whose entries are filled with versions, and compared byte by byte."""

    def __init__(self, entries: int = 16) -> None:
        self._pools = TierPools(entries, PAGE, POOLS, seed=1)
        self.arrays = self._pools.arrays
        self.layout = LAYOUT
        self.entries = entries

    def fill(self, entry: int, version: int) -> None:
        for array, row in zip(self.arrays, content(version), strict=True):
            array[entry] = row

    def version(self, entry: int) -> int | None:
        """What an entry holds; None if it is no version, whole."""
        version = int(self.arrays[0][entry].view(np.uint64)[0])
        whole = all(np.array_equal(array[entry], row) for array, row in zip(self.arrays, content(version), strict=True))
        return version if whole else None

    def check_guards(self) -> None:
        self._pools.check_guards()


class History:
    """The versions that a key may have: those put, but not those put before a removal that has ended."""

    def __init__(self) -> None:
        self._may: dict[bytes, set[int]] = defaultdict(set)
        self._removals: dict[int, dict[bytes, set[int]]] = {}

    def put(self, key: bytes, version: int) -> None:
        """A put is about to be called."""
        self._may[key].add(version)

    def never(self, key: bytes, version: int) -> None:
        """A put has ended before it began."""
        self._may[key].discard(version)

    def removing(self, number: int, keys: Sequence[bytes] | None) -> None:
        """A removal of these or all keys is about to be called."""
        concerned = list(self._may) if keys is None else keys
        self._removals[number] = {key: set(self._may[key]) for key in concerned}

    def removed(self, number: int) -> None:
        """It has ended, and promises that its keys are gone."""
        for key, versions in self._removals.pop(number).items():
            self._may[key] -= versions

    def may(self, key: bytes) -> frozenset[int]:
        return frozenset(self._may[key])

    def apply(self, what: str, arguments: Sequence[Any]) -> None:
        """Do what a note says: the name of a method and its arguments."""
        getattr(self, what)(*arguments)


def size_of(files: int, slots: int) -> int:
    """`nbytes` for so many slots in each file."""
    return files * (2 * PAGE + -(-slots * 192 // PAGE) * PAGE + slots * RECORD_BYTES)


def make_tier(folder: Path, memory: Memory, *, files: int = 2, slots: int = 3, **options: Any) -> DiskTier:
    """A tier on small files of a folder, with its pool."""
    chosen: dict[str, Any] = {"identity": "model@1", "policy": "lru", "direct": False, "limits": Limits(threads=1)}
    chosen |= {} if options.get("read_only") else {"nbytes": size_of(files, slots)}
    tier = DiskTier([folder / f"{number}.kv" for number in range(files)], **(chosen | options))
    tier.attach(memory.arrays, memory.layout)
    return tier


def fetch(tier: DiskTier, memory: Memory, keys: Sequence[bytes]) -> dict[bytes, int]:
    """The records of these keys, by key; AssertionError if one is no version."""
    found: dict[bytes, int] = {}
    for first in range(0, len(keys), memory.entries):
        some = keys[first : first + memory.entries]
        outcomes = tier.get(some, range(len(some))).wait(SECONDS)
        for entry, (key, outcome) in enumerate(zip(some, outcomes, strict=True)):
            if outcome.value == "done":
                version = memory.version(entry)
                assert version is not None, f"{key!r} is DONE with bytes of no version"
                found[key] = version
    return found


def names(numbers: Iterable[int]) -> list[bytes]:
    return [b"key %d" % number for number in numbers]


SIX = names(range(6))  # as many keys as `make_tier` has slots


def put_all(tier: DiskTier, memory: Memory, first: int, keys: Sequence[bytes] = SIX) -> list[Outcome]:
    """Put versions `first`, `first + 1` and so on."""
    for entry in range(len(keys)):
        memory.fill(entry, first + entry)
    return tier.put(keys, range(len(keys))).wait(SECONDS)


def versions(first: int, keys: Sequence[bytes] = SIX) -> dict[bytes, int]:
    """What `put_all` has put."""
    return {key: first + place for place, key in enumerate(keys)}

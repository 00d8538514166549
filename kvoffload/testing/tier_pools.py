"""Pools for tiers without a GPU: page-aligned host memory with guards around it, and numbered contents."""

from __future__ import annotations

import hashlib
import mmap

import numpy as np

from kvoffload.internal.types import UInt8Array
from kvoffload.testing.transfers import POISON

_GUARD = 4096  # bytes before and after each array
_GUARD_BYTE = 0x5C
_DIFFERENT = 61  # rows of random bytes that contents are made of


class TierPools:
    """One array for each of some devices, (entries, row_bytes), all entries poisoned.

    Attributes:
        arrays: for `Tier.attach`.
        layout: 16 bytes that name shape and seed.
    """

    def __init__(self, entries: int, row_bytes: int, count: int, seed: int) -> None:
        self.arrays: list[UInt8Array] = []
        self._whole: list[UInt8Array] = []
        for _ in range(count):
            whole = np.frombuffer(mmap.mmap(-1, entries * row_bytes + 2 * _GUARD), dtype=np.uint8)
            whole[:] = _GUARD_BYTE
            self._whole.append(whole)
            self.arrays.append(whole[_GUARD:-_GUARD].reshape(entries, row_bytes))
        name = repr((entries, row_bytes, count, seed))
        self.layout = hashlib.blake2b(name.encode(), digest_size=16).digest()
        chance = np.random.default_rng(seed)
        self._rows = chance.integers(0, 256, (count, _DIFFERENT, row_bytes), dtype=np.uint8)
        for entry in range(entries):
            self.poison(entry)

    @property
    def record_bytes(self) -> int:
        return sum(array.shape[1] for array in self.arrays)

    def fill(self, entry: int, version: int) -> None:
        """Write the content with this number, 0 to 2**63 - 1, to an entry."""
        for array, rows in zip(self.arrays, self._rows, strict=True):
            array[entry] = rows[version % _DIFFERENT]
            array[entry, :8] = np.frombuffer(version.to_bytes(8, "little"), dtype=np.uint8)

    def version(self, entry: int) -> int | None:
        """The number of the content in an entry, every byte of which is compared; None if it is none."""
        version = int.from_bytes(self.arrays[0][entry, :8].tobytes(), "little")
        for array, rows in zip(self.arrays, self._rows, strict=True):
            row = array[entry]
            if int.from_bytes(row[:8].tobytes(), "little") != version:
                return None
            if not np.array_equal(row[8:], rows[version % _DIFFERENT, 8:]):
                return None
        return version

    def poison(self, entry: int) -> None:
        for array in self.arrays:
            array[entry] = POISON

    def poisoned(self, entry: int) -> bool:
        """Whether nothing has been written to an entry since it was poisoned."""
        return all(bool((array[entry] == POISON).all()) for array in self.arrays)

    def check_guards(self) -> None:
        """Raise AssertionError if a byte before or after an array has changed."""
        for number, whole in enumerate(self._whole):
            for where, guard in (("before", whole[:_GUARD]), ("after", whole[-_GUARD:])):
                assert (guard == _GUARD_BYTE).all(), f"the tier has written {where} pools[{number}]"

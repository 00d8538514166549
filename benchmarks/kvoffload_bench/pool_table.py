"""SharedTable: which keys are ready, in memory that other processes read: what a pool's socket is compared with.

An open-addressing hash table in a memfd, with a version that its only writer makes odd while it changes something. A
reader that finds the version odd, or changed, looks again. It answers look-ups alone: whoever wants to read the bytes
of a key must ask the owner all the same, who holds them meanwhile.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence

import numpy as np

_EMPTY, _DELETED = 0, (1 << 64) - 1  # in the first word of a place
_FEW = 32  # keys up to which one by one is as fast as numpy
_WORDS = struct.Struct("<QQ")


class SharedTable:
    """Keys of 16 bytes, and an entry of each.

    Args:
        places: a power of two, four times the keys or more.
        descriptor: of the memory of another process's table, which is mapped read-only; None: a new one.
    """

    def __init__(self, places: int, descriptor: int | None = None) -> None:
        nbytes = 4096 + 24 * places  # version, then two words of a key and an entry for each place
        writes = descriptor is None
        self.descriptor = os.memfd_create("kvoffload-table") if descriptor is None else descriptor
        if writes:
            os.posix_fallocate(self.descriptor, 0, nbytes)
        self._mapped = mmap.mmap(self.descriptor, nbytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0))
        self._version = memoryview(self._mapped)[:8].cast("Q")
        self._words = memoryview(self._mapped)[4096:].cast("Q")
        self._table = np.frombuffer(self._mapped, np.uint64, offset=4096).reshape(places, 3)
        self._mask = places - 1

    # the writer ---------------------------------------------------------------------------------------------------

    def put(self, keys: Sequence[bytes], entries: Sequence[int]) -> None:
        """Keys that the table does not have."""
        words, mask = self._words, self._mask
        self._version[0] += 1
        for key, entry in zip(keys, entries, strict=True):
            first, second = _WORDS.unpack(key)
            place = first & mask
            while words[3 * place] not in (_EMPTY, _DELETED):
                place = (place + 1) & mask
            words[3 * place + 1], words[3 * place + 2] = second, entry
            words[3 * place] = first
        self._version[0] += 1

    def remove(self, keys: Sequence[bytes]) -> None:
        """Keys that the table has."""
        words, mask = self._words, self._mask
        self._version[0] += 1
        for key in keys:
            first, second = _WORDS.unpack(key)
            place = first & mask
            while words[3 * place] != first or words[3 * place + 1] != second:
                place = (place + 1) & mask
            following = words[3 * ((place + 1) & mask)]
            words[3 * place] = _EMPTY if following == _EMPTY else _DELETED
        self._version[0] += 1

    # readers ------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading keys it has."""
        find = self._one_by_one if len(keys) <= _FEW else self._together
        while True:
            version = self._version[0]
            found = find(keys)
            if version % 2 == 0 and self._version[0] == version:
                return found

    def _one_by_one(self, keys: Sequence[bytes]) -> int:
        words, mask = self._words, self._mask
        for number, key in enumerate(keys):
            first, second = _WORDS.unpack(key)
            place = first & mask
            while (word := words[3 * place]) != _EMPTY:
                if word == first and words[3 * place + 1] == second:
                    break
                place = (place + 1) & mask
            else:
                return number
        return len(keys)

    def _together(self, keys: Sequence[bytes]) -> int:
        wanted = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2)
        places = wanted[:, 0] & np.uint64(self._mask)
        rows = self._table[places]
        found = (rows[:, 0] == wanted[:, 0]) & (rows[:, 1] == wanted[:, 1])
        waiting = np.flatnonzero(~found & (rows[:, 0] != _EMPTY))
        while len(waiting):
            places[waiting] = (places[waiting] + np.uint64(1)) & np.uint64(self._mask)
            rows = self._table[places[waiting]]
            here = (rows[:, 0] == wanted[waiting, 0]) & (rows[:, 1] == wanted[waiting, 1])
            found[waiting[here]] = True
            waiting = waiting[~here & (rows[:, 0] != _EMPTY)]
        return len(keys) if found.all() else int(found.argmin())

    def close(self) -> None:
        os.close(self.descriptor)

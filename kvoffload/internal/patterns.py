"""Bytes that follow from a key, cheap to make and to check: what a block of that key must hold.

A pattern is a fixed random array XOR one 64-bit word per (key, group). So two keys differ in every 8-byte word, two
groups of one key too, and bytes that belong to another plane, another sub-block or another offset do not pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvoffload.internal import hostinfo
from kvoffload.internal.types import UInt8Array

WORD_BYTES = 8
_CHUNK_BYTES = 1 << 21  # one thread's share at a time: its scratch memory stays in the CPU's cache

UInt64Array = npt.NDArray[np.uint64]
_T = TypeVar("_T")


class KeyPatterns:
    """Fills and checks rows of host memory, a row per key. Usable from one thread at a time; works with several.

    Args:
        payload_bytes: bytes of a row that carry the pattern, a multiple of 8.
        seed: of the random array.

    Raises:
        ValueError: `payload_bytes` is not a positive multiple of 8.
    """

    def __init__(self, payload_bytes: int, seed: int = 0) -> None:
        if payload_bytes < WORD_BYTES or payload_bytes % WORD_BYTES:
            raise ValueError(f"payload_bytes must be a positive multiple of {WORD_BYTES}, got {payload_bytes}")
        self.payload_bytes = payload_bytes
        words = payload_bytes // WORD_BYTES
        self._base = np.random.default_rng(seed).integers(0, 1 << 64, words, dtype=np.uint64)
        self._rows_per_chunk = max(1, _CHUNK_BYTES // payload_bytes)
        self._threads = min(16, hostinfo.usable_cpus())
        self._pool: ThreadPoolExecutor | None = None

    def expected(self, key: bytes, group: int = 0) -> UInt8Array:
        """The pattern of a key: uint8, (payload_bytes,)."""
        return (self._base ^ word_of(key, group)).view(np.uint8)

    def fill(self, rows: UInt8Array, keys: Sequence[bytes], group: int = 0) -> None:
        """Write each key's pattern into its row: uint8, (keys, at least payload_bytes), rows aligned to 8 bytes."""
        targets, words = self._words_of(rows), self._key_words(keys, group)

        def work(part: slice) -> None:
            np.bitwise_xor(self._base, words[part], out=targets[part])

        self._spread(work, len(keys))

    def wrong(self, rows: UInt8Array, keys: Sequence[bytes], group: int = 0) -> list[int]:
        """Which rows differ from their key's pattern in any byte."""
        found, words = self._words_of(rows), self._key_words(keys, group)

        def work(part: slice) -> list[int]:
            differs = np.bitwise_xor(self._base, words[part]) != found[part]
            return [part.start + int(index) for index in np.flatnonzero(differs.any(axis=1))]

        return [index for part in self._spread(work, len(keys)) for index in part]

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _words_of(self, rows: UInt8Array) -> UInt64Array:
        return rows[:, : self.payload_bytes].view(np.uint64)

    def _key_words(self, keys: Sequence[bytes], group: int) -> UInt64Array:
        return np.array([word_of(key, group) for key in keys], dtype=np.uint64)[:, np.newaxis]

    def _spread(self, work: Callable[[slice], _T], count: int) -> Iterable[_T]:
        """`work` on every chunk of rows; numpy lets other threads run meanwhile."""
        step = self._rows_per_chunk
        parts = [slice(start, min(start + step, count)) for start in range(0, count, step)]
        if self._threads < 2 or len(parts) < 2:
            return [work(part) for part in parts]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="kvoffload-patterns")
        return list(self._pool.map(work, parts))


def word_of(key: bytes, group: int = 0) -> np.uint64:
    """The word that sets a key's pattern apart; the same in every process."""
    digest = blake2b(key, digest_size=WORD_BYTES, salt=group.to_bytes(8, "little")).digest()
    return np.uint64(int.from_bytes(digest, "little"))

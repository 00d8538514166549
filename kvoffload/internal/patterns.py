"""Bytes that follow from a key, cheap to compute and to check: the content of a test's block of that key.

A pattern is a fixed random array XOR one 64-bit word per (key, group). So two keys differ in every 8-byte word, two
groups of one key too, and bytes that belong to another plane, another sub-block or another offset do not pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import TypeVar

import numpy as np

from kvoffload.internal import hostinfo
from kvoffload.internal.types import UInt8Array, UInt64Array

WORD_BYTES = 8
_CHUNK_BYTES = 1 << 21  # that a thread works on at a time: its scratch memory stays in the CPU's cache

_T = TypeVar("_T")


class KeyPatterns:
    """Fills and checks slots of host memory, a slot per key. To be used from one thread at a time; it uses several."""

    def __init__(self, payload_bytes: int, seed: int = 0) -> None:
        if payload_bytes < WORD_BYTES or payload_bytes % WORD_BYTES:
            raise ValueError(f"payload_bytes must be a positive multiple of {WORD_BYTES}, got {payload_bytes}")
        self.payload_bytes = payload_bytes
        words = payload_bytes // WORD_BYTES
        self._base = np.random.default_rng(seed).integers(0, 1 << 64, words, dtype=np.uint64)
        self._slots_per_chunk = max(1, _CHUNK_BYTES // payload_bytes)
        self._threads = min(16, hostinfo.usable_cpus())
        self._pool: ThreadPoolExecutor | None = None

    def expected(self, key: bytes, group: int = 0) -> UInt8Array:
        """Return the pattern of a key: uint8, (payload_bytes,)."""
        return (self._base ^ word_of(key, group)).view(np.uint8)

    def fill(self, slots: UInt8Array, keys: Sequence[bytes], group: int = 0) -> None:
        """Write each key's pattern into its slot: uint8, (keys, at least payload_bytes), slots aligned to 8 bytes."""
        targets, words = self._words_of(slots), self._key_words(keys, group)

        def work(chunk: slice) -> None:
            np.bitwise_xor(self._base, words[chunk], out=targets[chunk])

        self._spread(work, len(keys))

    def wrong(self, slots: UInt8Array, keys: Sequence[bytes], group: int = 0) -> list[int]:
        """Return the indices of the slots that differ from their key's pattern in any byte."""
        found, words = self._words_of(slots), self._key_words(keys, group)

        def work(chunk: slice) -> list[int]:
            differs = np.bitwise_xor(self._base, words[chunk]) != found[chunk]
            return [chunk.start + int(index) for index in np.flatnonzero(differs.any(axis=1))]

        return [index for indices in self._spread(work, len(keys)) for index in indices]

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _words_of(self, slots: UInt8Array) -> UInt64Array:
        return slots[:, : self.payload_bytes].view(np.uint64)

    def _key_words(self, keys: Sequence[bytes], group: int) -> UInt64Array:
        return np.array([word_of(key, group) for key in keys], dtype=np.uint64)[:, np.newaxis]

    def _spread(self, work: Callable[[slice], _T], count: int) -> Iterable[_T]:
        """Call `work` on every chunk of slots; numpy releases the GIL meanwhile."""
        step = self._slots_per_chunk
        chunks = [slice(start, min(start + step, count)) for start in range(0, count, step)]
        if self._threads < 2 or len(chunks) < 2:
            return [work(chunk) for chunk in chunks]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="kvoffload-patterns")
        return list(self._pool.map(work, chunks))


def word_of(key: bytes, group: int = 0) -> np.uint64:
    """Return the word that sets a key's pattern apart; the same in every process."""
    digest = blake2b(key, digest_size=WORD_BYTES, salt=group.to_bytes(8, "little")).digest()
    return np.uint64(int.from_bytes(digest, "little"))

"""`bench disk`: writing and reading records with a DiskTier and with a bare loop, in interleaved rounds.

A round puts new keys, which displace those of the round before. The tier and the bare loop take turns in being first.
Both write the same bytes to the same slots, so that the records stay valid whichever wrote last. Between two of their
turns, outside of all times, what was written is synced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.internal.types import UInt8Array
from kvoffload.tiers import DiskTier, TierJob
from kvoffload_bench.disk_files import BareLoop, Place, open_tier, pages, places_of
from kvoffload_bench.tier_calls import Times, Verified, carry_out

WRITE, READ, COLD_READ, WARM_READ = "write", "read", "cold read", "warm read"
_TIER, _BARE = 0, 1
_WARM_UP = 1  # rounds that are not counted
_POISON = 0xA5
_KEY_BYTES = 16


def measure_cell(
    paths: Sequence[Path], *, slot_bytes: int, threads: int, direct: bool, nbytes: int, repeats: int, verified: Verified
) -> list[dict[str, Any]]:
    """Figures of one size, number of threads and kind of I/O, for each operation; empty without direct I/O.

    Args:
        paths: of files that do not exist; they are removed again.
        nbytes: of the records of a round, together.
        verified: is added to.
    """
    count = max(threads, nbytes // slot_bytes)
    pool = pages(2 * count, slot_bytes)
    tier = open_tier(paths, pool, count, threads=threads, direct=direct)
    try:
        if direct and not all(tier.direct_io):
            return []
        with BareLoop(paths, threads=threads, direct=direct) as bare:
            rounds = _Rounds(tier, bare, pool, paths, verified)
            operations = (WRITE, READ) if direct else (WRITE, COLD_READ, WARM_READ)
            times = {operation: Times() for operation in operations}
            for number in range(-_WARM_UP, repeats):
                seconds = rounds.execute(operations, bare_first=bool(number % 2))
                for operation, (of_tier, of_bare) in seconds.items() if number >= 0 else ():
                    times[operation].tier.append(of_tier)
                    times[operation].bare.append(of_bare)
    finally:
        tier.close()
        for path in paths:
            path.unlink(missing_ok=True)
    what = {"record_bytes": slot_bytes, "threads": threads, "io": "direct" if direct else "buffered", "records": count}
    return [what | {"operation": name} | times[name].figures(count * slot_bytes) for name in operations]


class _Rounds:
    """Rounds of one cell; the first half of the pool holds what is written, the second half gets what is read."""

    def __init__(
        self, tier: DiskTier, bare: BareLoop, pool: UInt8Array, paths: Sequence[Path], verified: Verified
    ) -> None:
        count = len(pool) // 2
        self._tier, self._bare, self._paths, self._verified = tier, bare, paths, verified
        self._sources, self._targets = pool[:count], pool[count:]
        self._source_entries, self._target_entries = range(count), range(count, 2 * count)
        self._sources[:] = np.random.default_rng(0).integers(0, 256, self._sources.shape, np.uint8)
        self._number = 0
        self._keys: list[bytes] = []
        self._places: list[Place] = []

    def execute(self, operations: Sequence[str], *, bare_first: bool) -> dict[str, tuple[float, float]]:
        """Seconds of the tier and of the bare loop for each operation."""
        self._number += 1
        self._sources[:, :: 1 << 12] = self._number % 251  # other bytes in each page than the round before wrote
        self._keys = [(self._number << 64 | entry).to_bytes(_KEY_BYTES, "little") for entry in self._source_entries]
        order = (_BARE, _TIER) if bare_first and self._places else (_TIER, _BARE)
        seconds: dict[str, tuple[float, float]] = {}
        for operation in operations:
            calls = (self._put, self._write) if operation == WRITE else (self._get, self._read)
            each = [0.0, 0.0]
            for who in order:
                each[who] = self._turn(operation, calls[who])
            seconds[operation] = (each[_TIER], each[_BARE])
        return seconds

    def _turn(self, operation: str, call: Callable[[], float]) -> float:
        if operation == WRITE:
            seconds = call()
            assert self._tier.drain(), "a disk that cannot sync is no disk to measure"
            self._bare.sync()
            return seconds
        self._targets.fill(_POISON)
        if operation == COLD_READ:
            self._bare.drop_page_cache()
        seconds = call()
        self._verified.records += len(self._targets)
        self._verified.wrong += sum(
            not np.array_equal(*pair) for pair in zip(self._sources, self._targets, strict=True)
        )
        return seconds

    def _put(self) -> float:
        seconds = self._timed(self._tier.put, self._source_entries)
        places = places_of(self._paths)
        self._places = [places[key] for key in self._keys]
        return seconds

    def _get(self) -> float:
        return self._timed(self._tier.get, self._target_entries)

    def _timed(self, call: Callable[..., TierJob], entries: range) -> float:
        begin = time.perf_counter()
        carry_out(call, self._keys, entries, self._verified)
        return time.perf_counter() - begin

    def _write(self) -> float:
        return self._bare.write(list(self._sources), self._places)

    def _read(self) -> float:
        return self._bare.read(list(self._targets), self._places)

"""`bench remote`: records put and got by a tier and by its client's bare batch calls, in interleaved rounds.

A round moves the same rows by batches of so many records as are in flight, and waits for each batch. The tier and the
bare loop take turns in being first, and have names of their own. After a round its records are deleted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvoffload.internal.types import UInt8Array
from kvoffload.terminal.stores import Store
from kvoffload.tiers import RemoteTier
from kvoffload_bench.disk_files import LAYOUT, pages
from kvoffload_bench.remote_bare import BareLoop, bare_loop
from kvoffload_bench.tier_calls import Times, Verified, carry_out, numbered_keys

PUT, GET = "put", "get"
IDENTITY = "kvoffload bench remote"
_WARM_UP = 1  # rounds that are not counted
_POISON = 0xA5


def records_of_round(record_bytes: int, in_flight: int, nbytes: int) -> int:
    """Whole batches, at least one, of `nbytes` together if that is more."""
    return max(1, nbytes // record_bytes // in_flight) * in_flight


def measure_size(
    store: Store,
    *,
    prefix: str,
    record_bytes: int,
    in_flight: Sequence[int],
    nbytes: int,
    repeats: int,
    verified: Verified,
) -> list[dict[str, Any]]:
    """Figures of one size of records, for each number in flight, put and get.

    Args:
        prefix: of all names in the store, which has no others of them.
        nbytes: of the records of a round, together.
        verified: is added to.
    """
    most = max(records_of_round(record_bytes, count, nbytes) for count in in_flight)
    pool = pages(2 * most, record_bytes)
    pool[:most] = np.random.default_rng(0).integers(0, 256, (most, record_bytes), np.uint8)
    tier = store.tier(identity=IDENTITY, prefix=f"{prefix}/tier")
    tier.attach([pool], LAYOUT)
    cells = []
    try:
        with bare_loop(store, threads=tier.threads, prefix=f"{prefix}/bare", pool=pool) as bare:
            rounds = _Rounds(tier, bare, pool, verified)
            for count in in_flight:
                records = records_of_round(record_bytes, count, nbytes)
                times = {PUT: Times(), GET: Times()}
                for number in range(-_WARM_UP, repeats):
                    seconds = rounds.execute(records, count, bare_first=bool(number % 2))
                    for name, (of_tier, of_bare) in seconds.items() if number >= 0 else ():
                        times[name].tier.append(of_tier)
                        times[name].bare.append(of_bare)
                what = {"store": store.kind, "record_bytes": record_bytes, "in_flight": count, "records": records}
                cells += [
                    what | {"operation": name} | each.figures(records * record_bytes) for name, each in times.items()
                ]
    finally:
        tier.close()
    return cells


class _Rounds:
    """The first half of the pool holds what is put, the second half gets what is read."""

    def __init__(self, tier: RemoteTier, bare: BareLoop, pool: UInt8Array, verified: Verified) -> None:
        self._tier, self._bare, self._pool, self._verified = tier, bare, pool, verified
        self._half = len(pool) // 2
        self._number = 0

    def execute(self, records: int, in_flight: int, *, bare_first: bool) -> dict[str, tuple[float, float]]:
        """Seconds of the tier and of the bare loop, for put and get."""
        self._number += 1
        self._pool[: self._half, :: 1 << 12] = self._number % 251  # other bytes than the round before put
        batches = [range(at, at + in_flight) for at in range(0, records, in_flight)]
        keys = numbered_keys(self._number << 32, records)
        numbers = [self._number << 32 | at for at in range(records)]
        turns: list[tuple[int, Callable[[range], None], Callable[[range], Sequence[UInt8Array]]]] = [
            (0, lambda part: self._put(keys, part), lambda part: self._get(keys, part)),
            (1, lambda part: self._bare_put(numbers, part), lambda part: self._bare_get(numbers, part)),
        ]
        seconds = {PUT: [0.0, 0.0], GET: [0.0, 0.0]}
        try:
            for at, put, _ in turns[:: -1 if bare_first else 1]:
                seconds[PUT][at] = _timed(put, batches)[0]
            for at, _, get in turns[:: -1 if bare_first else 1]:
                self._pool[self._half :].fill(_POISON)
                seconds[GET][at], found = _timed(get, batches)
                self._compare([row for batch in found for row in batch])
        finally:
            self._tier.clear().wait()
            for part in batches:
                self._bare.delete(numbers[part.start : part.stop])
        return {name: (each[0], each[1]) for name, each in seconds.items()}

    def _put(self, keys: Sequence[bytes], part: range) -> None:
        carry_out(self._tier.put, keys[part.start : part.stop], part, self._verified)

    def _get(self, keys: Sequence[bytes], part: range) -> Sequence[UInt8Array]:
        targets = range(self._half + part.start, self._half + part.stop)
        carry_out(self._tier.get, keys[part.start : part.stop], targets, self._verified)
        return list(self._pool[targets.start : targets.stop])

    def _bare_put(self, numbers: Sequence[int], part: range) -> None:
        self._bare.put(numbers[part.start : part.stop], list(self._pool[part.start : part.stop]))

    def _bare_get(self, numbers: Sequence[int], part: range) -> Sequence[UInt8Array]:
        rows = list(self._pool[self._half + part.start : self._half + part.stop])
        return self._bare.get(numbers[part.start : part.stop], rows)

    def _compare(self, found: Sequence[UInt8Array]) -> None:
        self._verified.records += len(found)
        self._verified.wrong += sum(
            not np.array_equal(*pair) for pair in zip(found, self._pool[: len(found)], strict=True)
        )


def _timed(call: Callable[[range], Any], batches: Sequence[range]) -> tuple[float, list[Any]]:
    """Seconds of a round, and what the calls have returned."""
    begin = time.perf_counter()
    found = [call(each) for each in batches]
    return time.perf_counter() - begin, found

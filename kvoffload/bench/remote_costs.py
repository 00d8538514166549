"""`bench remote`: host time of calls, Python memory of a job, and the time until a promotion's keys can be loaded."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from contextlib import closing, suppress
from typing import Any

import numpy as np

from kvoffload.bench import tier_calls
from kvoffload.bench.disk_files import LAYOUT, pages
from kvoffload.bench.remote_rounds import IDENTITY
from kvoffload.bench.tier_calls import KEYS_OF_A_CALL, Verified, numbered_keys
from kvoffload.cache.block_cache import BlockCache
from kvoffload.device.device import Device
from kvoffload.engine.engine import OffloadEngine
from kvoffload.errors import TierError
from kvoffload.layout.layout import KVLayout
from kvoffload.terminal.stores import Store

_PLANES = 16
_PROMOTED = 64  # keys
_POLL_SECONDS = 5e-5
_MOST_SECONDS = 120.0  # that a promotion may take
_COUNTED = 8  # records, whose memory is counted


def measure_calls(store: Store, *, prefix: str, record_bytes: int, verified: Verified) -> dict[str, Any]:
    """Host time of `put` and `get`, as for a disk; and the Python memory that a job of 8 records takes."""
    pool = pages(KEYS_OF_A_CALL, record_bytes)
    pool.fill(1)
    tier = store.tier(identity=IDENTITY, prefix=f"{prefix}/calls")
    tier.attach([pool], LAYOUT)
    try:
        calls = tier_calls.measure_calls(tier, verified, lambda: tier.clear().wait())
        keys = numbered_keys(1 << 40, _COUNTED)
        tracemalloc.start()
        try:
            for call in (tier.put, tier.get):
                job = call(keys, range(_COUNTED))
                job.wait()
                verified.note(job)
            allocated = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    finally:
        tier.clear().wait()
        tier.close()
    what = {"store": store.kind, "record_bytes": record_bytes, "threads": tier.threads}
    return what | calls | {"python_bytes_a_record": allocated / _COUNTED}


def measure_promotion(
    store: Store, device: Device, *, prefix: str, record_bytes: int, repeats: int, verified: Verified
) -> dict[str, Any]:
    """Milliseconds from `promote` of 64 keys that only the store has, until the first and the last can be loaded."""
    planes = device.allocate_blocks(1, planes=_PLANES, block_bytes=record_bytes // _PLANES)
    layout = KVLayout([planes], blocks_per_slot=1, dtype="uint8", tokens_per_block=1, block_axes=("tokens",))
    keys = numbered_keys(0, _PROMOTED)
    times: list[tuple[float, float]] = []
    with OffloadEngine(layout, device=device, num_slots=2 * _PROMOTED) as engine:
        tier = store.tier(identity=IDENTITY, prefix=f"{prefix}/promote")
        with closing(BlockCache(engine, policy="lru", tiers=[tier], write="through")) as cache:
            try:
                with cache.reserve(keys) as reserved:
                    slots = reserved.slots()
                    content = np.random.default_rng(1).integers(0, 256, (_PROMOTED, record_bytes), np.uint8)
                    engine.slots[slots] = content
                    reserved.commit()
                cache.drain(_MOST_SECONDS)
                for number in range(-1, repeats):
                    cache.clear(below=False)
                    engine.slots[:] = 0
                    found, first, last = _promote(cache, keys)
                    if number >= 0:
                        times.append((first, last))
                    verified.records += found
                    verified.missing += _PROMOTED - found
                    with cache.acquire(keys[:found]) as lease:
                        rows = engine.slots[lease.slots()]
                        verified.wrong += sum(not np.array_equal(*pair) for pair in zip(rows, content, strict=False))
            finally:
                with suppress(TierError):  # it failed before
                    cache.clear()
    first, last = (statistics.median(each) for each in zip(*times, strict=True))
    return {
        "store": store.kind,
        "record_bytes": record_bytes,
        "keys": _PROMOTED,
        "first_ms": 1e3 * first,
        "all_ms": 1e3 * last,
    }


def promotion_bytes(record_bytes: int) -> int:
    """Host memory that `measure_promotion` takes: slots, and their content."""
    return 3 * _PROMOTED * record_bytes


def _promote(cache: BlockCache[OffloadEngine], keys: list[bytes]) -> tuple[int, float, float]:
    """How many keys have come, and seconds until the first one and the last one."""
    begin = time.perf_counter()
    first = 0.0
    with cache.promote(keys, deadline=_MOST_SECONDS) as promotion:
        while not promotion.done:
            if not first and promotion.ready:
                first = time.perf_counter() - begin
            time.sleep(_POLL_SECONDS)
        last = time.perf_counter() - begin
        return promotion.ready, first or last, last

"""Rigs for tests of the block cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from helpers import COPY_ENGINE_ONLY, Rig, cache_state, number_blocks, rig, simulated

import kvoffload
from kvoffload import BlockCache, CacheIndex, KVLayout, OffloadEngine, Reservation


@contextmanager
def caches(
    capacity: int = 4, seed: int = 0, level: str = "batch", policy: Any = "lru", **options: Any
) -> Iterator[tuple[Rig, BlockCache]]:
    """Options are the engine's."""
    device = simulated(seed, level)
    with device, rig(device, num_blocks=32, num_slots=capacity, **options) as bench:
        yield bench, BlockCache(bench.engine, policy=policy)


@contextmanager
def grouped(capacity: int = 4, seed: int = 0) -> Iterator[tuple[Rig, BlockCache, list[list[kvoffload.Plane]]]]:
    """Two groups with two blocks a key; block `b` holds `b + 1` in group 0 and `b + 101` in group 1."""
    device = simulated(seed)
    with device, rig(device, num_blocks=32, num_slots=1) as bench:
        other = device.allocate_planes(3, block_bytes=32, num_blocks=40)
        number_blocks(other, 101)
        layout = KVLayout([bench.planes, other], blocks_per_slot=2)
        with OffloadEngine(layout, device=device, num_slots=2 * capacity + 1, **COPY_ENGINE_ONLY) as engine:
            try:
                yield bench, BlockCache(engine, policy="lru"), [bench.planes, other]
            finally:
                for gate in bench.gates:  # one that a failed test left closed
                    gate.open()


def state(index: CacheIndex) -> dict[str, Any]:
    """Everything that a refused call must leave as it was."""
    idle = SimpleNamespace(statistics=lambda: SimpleNamespace(in_flight=0))
    stub: Any = SimpleNamespace(_state=index._state, statistics=index.statistics, engine=idle)
    policies = [repr(pool.policy) for pool in index._state.pools.all]
    return {**cache_state(stub), "sizes": policies, "seen": dict(index._state.filter._seen)}


def store(index: CacheIndex, wanted: Iterable[bytes], tenant: str = "") -> Reservation:
    """Reserve and commit."""
    reservation = index.reserve(list(wanted), tenant=tenant)
    reservation.commit()
    return reservation

"""Rigs for tests of the block cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from helpers import COPY_ENGINE_ONLY, Rig, number_blocks, rig, simulated

import kvoffload
from kvoffload import BlockCache, KVLayout, OffloadEngine


@contextmanager
def caches(
    capacity: int = 4, seed: int = 0, level: str = "batch", policy: Any = "lru", **options: Any
) -> Iterator[tuple[Rig, BlockCache]]:
    """Options are the engine's."""
    device = simulated(seed, level)
    with device, rig(device, num_blocks=32, num_slots=capacity, **options) as bench:
        yield bench, BlockCache(bench.engine, policy)


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
                yield bench, BlockCache(engine, "lru"), [bench.planes, other]
            finally:
                for gate in bench.gates:  # one that a failed test left closed
                    gate.open()

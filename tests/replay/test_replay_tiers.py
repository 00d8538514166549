"""Requests over a small pool of slots with a disk below: every byte of what comes back from the disk is compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from replay_oracles import keys_of
from replaying import TINY

import kvoffload
from kvoffload.cache.block_cache import BlockCache
from kvoffload.replay.verified import VerifiedCache
from kvoffload.tiers import DiskTier


def disk_in(folder: Path) -> Callable[[int], DiskTier]:
    return lambda _: DiskTier(folder / "blocks.kv", nbytes=8 << 20, identity="replay")


def tiered(served: VerifiedCache) -> BlockCache:
    assert isinstance(served.cache, BlockCache)
    return served.cache


def test_what_slots_have_no_room_for_comes_from_the_disk(device: kvoffload.Device, tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    prefixes = [list(range(100 * each, 100 * each + 12)) for each in range(12)]
    trace = [prefixes[random.integers(12)][: random.integers(1, 13)] for _ in range(120)]
    cache = VerifiedCache(
        device, TINY, capacity=36, longest=12, policy="lru", seed=seed, make_tier=disk_in(tmp_path), write="through"
    )
    with cache as served:
        seen = set[bytes]()
        for ids in trace:
            keys = keys_of(ids)
            expected = next((place for place, key in enumerate(keys) if key not in seen), len(keys))
            hits = served.serve(keys)
            assert tiered(served).drain(30), seed
            assert hits == expected, (seed, ids)
            seen.update(keys)
        counts = served.counts
        assert counts.blocks_promoted > 0, seed
        assert counts.verified_blocks == counts.blocks_hit
        assert counts.corrupt_blocks == 0
        served.cache.check()


def test_a_second_replay_finds_what_the_first_one_wrote(device: kvoffload.Device, tmp_path: Path) -> None:
    trace = [[1, 2, 3], [4, 5, 6], [1, 2, 3, 7]]
    for restart in range(2):
        make = disk_in(tmp_path)
        with VerifiedCache(
            device, TINY, capacity=8, longest=4, policy="lru", make_tier=make, write="through"
        ) as served:
            hits = [served.serve(keys_of(ids)) for ids in trace]
            assert tiered(served).drain(30)
            assert hits == ([3, 3, 4] if restart else [0, 0, 3])
            assert served.counts.corrupt_blocks == 0

"""TieredCache: what it promises about lookup, promotion and writing, on the simulated device."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from tier_classes import DictTier, GatedTier
from tiering import SECONDS, Bench, key, keys, tiered, until

import kvoffload
from kvoffload import NO_WAIT, BlockCache, CapacityError, ClosedError, LayoutError, MissingKeyError
from kvoffload.testing import FaultyTier
from kvoffload.tiering.breaker import BreakerState
from kvoffload.tiers import DiskTier, MemoryTier


def pinned(bench: Bench) -> int:
    return bench.cache.statistics().pinned


def test_keys_come_back_from_a_tier_with_their_bytes() -> None:
    with tiered() as bench:
        bench.written(range(20))
        assert bench.cache.lookup(keys(range(4))) == 0
        with bench.cache.promote(keys(range(4))) as promotion:
            assert promotion.wait(SECONDS) == 4
            bench.check_loaded(range(4))
        assert bench.cache.statistics().promoted == 4


@pytest.mark.parametrize("groups", [1, 2])
def test_all_groups_of_a_key_come_back(groups: int) -> None:
    with tiered(groups=groups) as bench:
        bench.written(range(12))
        with bench.cache.promote(keys([3, 1, 2])) as promotion:
            assert promotion.wait(SECONDS) == 3
            bench.check_loaded([3, 1, 2])


def test_lookup_knows_the_slots_alone() -> None:
    with tiered() as bench:
        bench.written(range(8))
        bench.store([0, 1])
        assert bench.cache.lookup(keys(range(8))) == 2
        assert bench.cache.lookup_many([keys([2]), keys([1])]) == [0, 1]
        with pytest.raises(MissingKeyError):
            bench.cache.load(keys([5]), [0], NO_WAIT)


def test_locate_says_where_each_key_is() -> None:
    tiers = DictTier(), MemoryTier(1 << 20)
    with tiered(*tiers) as bench:
        bench.written([1, 2])
        tiers[0].store.pop(key(2))
        bench.store([0])
        reservation = bench.cache.reserve([b"reserved"])
        found = bench.cache.locate([*keys([0, 1, 2, 9]), b"reserved"])
        assert found == ["host", "dict", "memory", "missing", "pending"]
        reservation.abort()


def test_what_no_local_index_knows_is_unknown() -> None:
    tier = DictTier()
    tier.capabilities = kvoffload.tiers.TierCapabilities(durable=False, shared=False, local_index=False)
    with tiered(tier) as bench:
        bench.written([1])
        bench.store([2])
        assert bench.cache.locate(keys([1, 2, 3])) == ["unknown", "host", "unknown"]
        with bench.cache.promote(keys([1, 3])) as promotion:
            assert promotion.wait(SECONDS) == 1
            bench.check_loaded([1])

"""What is written to a tier, by each way of choosing; and whose it is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiering import SECONDS, Bench, keys, tiered

from kvoffload import Tenant
from kvoffload.tiers import MemoryTier, Origin, Outcome
from kvoffload.tiers.threaded import Rows


def serve(bench: Bench, numbers: list[int]) -> int:
    """A request: promoted, loaded, stored, ended, and written where that is worth it; how many keys were found."""
    wanted = keys(numbers)
    with bench.cache.promote(wanted) as promotion:
        found = promotion.wait(SECONDS)
        if found:
            bench.cache.load(wanted[:found], range(found)).wait(SECONDS)
    bench.cache.store(wanted, range(len(wanted))).wait(SECONDS)
    bench.cache.touch(wanted)
    assert bench.cache.drain(SECONDS)
    return found


def traffic(bench: Bench, seed: int, requests: int = 150) -> tuple[int, int]:
    """Every other request has one of 12 prefixes, the others come once; keys found, and keys written."""
    random = np.random.default_rng(seed)
    found, once = 0, 1_000_000
    for number in range(requests):
        if number % 2:
            found += serve(bench, [100 * int(random.integers(12)) + each for each in range(6)])
        else:
            found += serve(bench, list(range(once, once + 6)))
            once += 6
    return found, bench.cache.tier_statistics()[0].written


@pytest.mark.parametrize("write", ["admitted", "through", "back", "none"])
def test_what_is_written(write: Any, seed: int) -> None:
    tier = MemoryTier(1 << 20)
    with tiered(tier, capacity=24, write=write) as bench:
        found, written = traffic(bench, seed)
        stored = bench.cache.statistics().stored
        bench.cache.check()
    if write == "none":
        assert written == 0
    elif write == "admitted":
        assert 0 < written < stored, (seed, stored, written)
        assert found > 150, (seed, found)
    else:  # some are evicted before they are written: eviction does not wait
        assert stored // 2 < written <= stored, (seed, stored, written)
        assert found > 150, (seed, found)


def test_what_a_tier_has_lost_is_written_again_while_it_is_in_slots() -> None:
    tier = MemoryTier(1 << 20)
    with tiered(tier, capacity=24, write="admitted") as bench:
        traffic(bench, 3)
        wanted = [100 * 5 + each for each in range(6)]
        while not all(tier.contains(keys(wanted))):
            serve(bench, wanted)
        tier.remove(keys(wanted)).wait(SECONDS)  # as if it had evicted them
        assert not any(tier.contains(keys(wanted)))
        serve(bench, wanted)
        assert all(tier.contains(keys(wanted)))


class ByTenant(MemoryTier):
    """Keeps whose each record is."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.tenants: dict[bytes, str] = {}

    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:
        self.tenants[key] = origin.tenant
        return super().write_record(key, rows, origin)


@pytest.mark.parametrize("write", ["through", "back"])
def test_records_are_of_the_tenant_that_stored_them(write: Any) -> None:
    tier = ByTenant()
    with tiered(tier, capacity=8, write=write, tenants={"a": Tenant(), "b": Tenant()}) as bench:
        for number, tenant in enumerate(["a", "b", "", "a", "b", "", "a", "b"]):
            bench.cache.store(keys([number]), [number], tenant=tenant).wait(SECONDS)
            bench.cache.touch(keys([number]))
        assert bench.cache.drain(SECONDS)
        if write == "through":
            assert [tier.tenants[key] for key in keys(range(8))] == ["a", "b", "", "a", "b", "", "a", "b"]
        assert {tier.tenants[key] for key in keys([0, 3, 6]) if key in tier.tenants} <= {"a"}
        assert {tier.tenants[key] for key in keys([1, 4, 7]) if key in tier.tenants} <= {"b"}
        assert tier.tenants

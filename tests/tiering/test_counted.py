"""Promotions in statistics and events: each counts as a lookup of its keys once it has ended."""

from __future__ import annotations

import pytest
from tier_classes import DictTier, GatedTier
from tiering import SECONDS, aligned, keys, tiered, until

from kvoffload import BlockCache, CacheEvent, CacheIndex, CacheStatistics, Status


def named(name: str) -> DictTier:
    tier = DictTier()
    tier.name = name
    return tier


def counts(statistics: CacheStatistics) -> tuple[int, int, dict[str, int]]:
    return statistics.lookups, statistics.hits, dict(statistics.hits_from)


def test_hits_are_counted_where_they_were() -> None:
    with tiered(named("near"), named("far")) as bench:
        near, far = (below.tier for below in bench.manager.tiers)
        bench.written(range(4))
        assert far.remove(keys([2])).wait(SECONDS)
        assert near.remove(keys([1, 3])).wait(SECONDS)
        bench.store([0])
        before = counts(bench.cache.statistics())
        assert before == (0, 0, {"host": 0})
        with bench.cache.promote(keys([0, 1, 2, 3, 9, 10])) as promotion:
            assert promotion.wait(SECONDS) == 4
            assert counts(bench.cache.statistics()) == (6, 4, {"host": 1, "far": 2, "near": 1})
            assert bench.cache.statistics().hit_rate == 4 / 6


def test_keys_behind_one_that_does_not_come_are_misses() -> None:
    with tiered(DictTier()) as bench:
        bench.written([0, 2])
        with bench.cache.promote(keys([0, 1, 2])) as promotion:
            assert promotion.wait(SECONDS) == 1
        assert bench.cache.status(keys([2])) == [Status.MISS], "what cannot be used does not come"
        assert counts(bench.cache.statistics()) == (3, 1, {"host": 0, "dict": 1})


@pytest.mark.parametrize("there", [3, 1, 0])
def test_a_promotion_that_no_tier_can_lengthen_is_counted_as_it_returns(there: int) -> None:
    with tiered(DictTier(), write="none") as bench:
        bench.store(range(there))
        with bench.cache.promote(keys(range(3))) as promotion:
            assert promotion.ready == there
            assert counts(bench.cache.statistics()) == (3, there, {"host": there})


def test_one_that_is_cancelled_counts_what_had_come() -> None:
    tier = GatedTier()
    with tiered(tier) as bench:
        tier.permit(1)
        bench.written([1])
        bench.store([0])
        with bench.cache.promote(keys([0, 1]), deadline=None) as promotion:
            until(lambda: ("read", keys([1])[0]) in tier.begun)
            promotion.cancel()
            assert promotion.wait(SECONDS) == 1
        assert counts(bench.cache.statistics()) == (2, 1, {"host": 1})


def test_events_tell_what_a_promotion_found() -> None:
    events: list[CacheEvent] = []
    with tiered(DictTier(), on_event=events.append) as bench:
        bench.written([0, 1])
        events.clear()
        with bench.cache.promote(keys([0, 1, 2])) as promotion:
            promotion.wait(SECONDS)
            assert bench.cache.drain(SECONDS)  # until all has been told
    told = [(event.kind, event.keys) for event in events if event.kind in ("hit", "miss")]
    assert told == [("hit", tuple(keys([0, 1]))), ("miss", tuple(keys([2])))]


def test_a_key_that_promotions_have_missed_is_stored() -> None:
    with tiered(DictTier(), store_after=2) as bench:
        for stored in (0, 0, 1):
            bench.store([5])
            assert BlockCache.lookup(bench.cache, []) == 0
            assert len(bench.cache) == stored
            with bench.cache.promote(keys([5])) as promotion:
                promotion.wait(SECONDS)


def test_an_index_counts_them_unless_its_host_does() -> None:
    with CacheIndex(4, pools=[aligned(4)], tiers=[DictTier()], layout=None, write="through") as index:
        index.reserve(keys([0])).commit()
        for counted in (True, False):
            with index.promote(keys([0, 1]), counted=counted) as promotion:
                assert promotion.wait(SECONDS) == 1
            assert counts(index.statistics()) == (2, 1, {"host": 1})

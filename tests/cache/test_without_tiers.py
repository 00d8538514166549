"""The calls for tiers of a cache and an index that have none: they end at once, with what is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from caching import caches
from helpers import keys

from kvoffload import NO_WAIT, BlockCache, CacheIndex
from kvoffload.errors import ClosedError


@pytest.fixture
def cache() -> Iterator[BlockCache]:
    with caches(capacity=4) as (_, made):
        made.store(keys(0, 1, 3), [0, 1, 3], after=NO_WAIT).wait(10)
        yield made


def test_a_promotion_has_ended_with_the_leading_keys_that_are_ready(cache: BlockCache) -> None:
    held = cache.reserve(keys(2))
    with cache.promote(keys(0, 1, 2, 3)) as promotion:
        assert (promotion.done, promotion.ready, promotion.wait(0)) == (True, 2, 2)
        assert cache.statistics().pinned == 3, "keys that are ready are held, as far as the promotion goes and beyond"
        assert promotion.load([4, 5, 6, 7]).wait(10) == tuple(keys(0, 1))
    assert cache.statistics().pinned == 0
    statistics = cache.statistics()
    assert (statistics.lookups, statistics.hits, statistics.hits_from) == (4, 2, (("host", 2),))
    held.abort()


def test_nothing_is_below(cache: BlockCache) -> None:
    assert cache.locate(keys(0, 9)) == ["host", "missing"]
    assert (cache.tier_statistics(), cache.drain(0), cache.close(), cache.remove(keys(0, 9))) == ([], True, True, 1)
    assert cache.clear(below=False) == 2


def test_an_empty_list_of_tiers_is_none() -> None:
    options: dict[str, Any] = {"tiers": []}
    with CacheIndex(4, **options) as index:
        index.reserve(keys(0)).commit()
        with index.promote(keys(0, 1), counted=False) as promotion:
            assert promotion.ready == 1
            with pytest.raises(TypeError, match="copies nothing"):
                promotion.load([0, 1])
        assert index.statistics().lookups == 0


def test_a_closed_engine_promotes_nothing(cache: BlockCache) -> None:
    cache.engine.close()
    for call in (lambda: cache.promote(keys(0)), cache.drain):
        with pytest.raises(ClosedError, match="engine of the cache is closed"):
            call()

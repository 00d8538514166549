"""A cache of 0 entries: every lookup misses, every key is declined, and no policy is asked."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import key, keys, simulated

import kvoffload
from kvoffload import NO_WAIT, BlockCache, CacheIndex, CapacityError, MissingKeyError, OffloadEngine, Status, Tenant
from kvoffload.cache.policies import LRU, POLICIES
from kvoffload.tiers import MemoryTier


class Unasked(LRU):
    """Fails wherever it is asked or told."""

    def __getattribute__(self, name: str) -> Any:
        assert name not in ("insert", "load", "touch", "remove", "victims", "make_room", "for_request"), name
        return super().__getattribute__(name)


@pytest.mark.parametrize("policy", [Unasked, *POLICIES], ids=str)
@pytest.mark.parametrize("options", [{}, {"store_after": 1, "max_load_blocks": 3}], ids=str)
def test_an_index(policy: Any, options: dict[str, Any]) -> None:
    index = CacheIndex(0, policy=policy, **options)
    use_all(index)
    assert index.statistics().capacity == 0
    assert repr(index).startswith("CacheIndex(0 of 0 keys")


def test_an_index_with_tenants() -> None:
    index = CacheIndex(0, tenants={"a": Tenant(max_blocks=3), "b": Tenant(priority=1)})
    for name in ("a", "b"):
        assert index.reserve(keys(0, 1), tenant=name).declined == tuple(keys(0, 1))
    index.check()


def use_all(cache: Any) -> None:
    assert (cache.lookup(keys(0, 1)), cache.lookup_many([keys(0), []])) == (0, [0, 0])
    assert (cache.status(keys(0)), cache.status_of(key(0))) == ([Status.MISS], Status.MISS)
    with cache.open_request() as request:
        for number in range(3):
            reservation = cache.reserve(keys(number), request=request)
            assert (reservation.keys, reservation.declined, reservation.short) == ((), (key(number),), True)
            reservation.commit()
    with pytest.raises(CapacityError, match=r"0 entries free \(capacity 0\)"):
        cache.reserve(keys(0, 1), all_or_nothing=True)
    with pytest.raises(MissingKeyError):
        cache.acquire(keys(0))
    with cache.acquire([]) as lease:
        assert lease.keys == ()
    assert cache.reserve([]).keys == ()
    cache.touch(keys(0, 1))
    assert (cache.remove(keys(0)), cache.clear(), len(cache)) == (0, 0, 0)
    statistics = cache.statistics()
    assert (statistics.resident, statistics.hits, statistics.stored, statistics.declined) == (0, 0, 0, 3)
    assert statistics.lookups == 4
    cache.check()


def use_blocks(cache: Any) -> None:
    use_all(cache)
    job = cache.store(keys(0, 1), [0, 1], after=NO_WAIT)
    assert (job.keys, job.wait(10)) == ((), [])
    with pytest.raises(CapacityError):
        cache.store(keys(0, 1), [0, 1], after=NO_WAIT, all_or_nothing=True)
    with pytest.raises(MissingKeyError):
        cache.load(keys(0), [0], after=NO_WAIT)
    assert cache.load([], [], after=NO_WAIT).wait(10) == []
    assert cache.statistics().declined == 5
    cache.check()


def test_a_cache_over_an_engine_without_slots() -> None:
    with simulated() as device:
        layout = kvoffload.KVLayout([device.allocate_blocks(8, planes=2, block_bytes=64)])
        with OffloadEngine(layout, device=device, num_slots=0) as engine:
            use_blocks(BlockCache(engine))
            with pytest.raises(CapacityError, match="tiers"):
                BlockCache(engine, tiers=[MemoryTier(1 << 16)])


def test_slots_that_hold_no_key_are_refused() -> None:
    with simulated() as device:
        planes = device.allocate_planes(2, block_bytes=64, num_blocks=8)
        layout = kvoffload.KVLayout([planes[:1], planes[1:]])
        with (
            OffloadEngine(layout, device=device, num_slots=1) as engine,
            pytest.raises(CapacityError, match="1 slots hold no key of 2 groups"),
        ):
            BlockCache(engine)

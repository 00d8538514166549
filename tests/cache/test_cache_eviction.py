"""BlockCache when copies fail, and what it gives up for what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from caching import caches
from helpers import Rig, cache_state, keys, rig, simulated

import kvoffload
from kvoffload import NO_WAIT, BlockCache, CapacityError, MissingKeyError, TransferError


@pytest.fixture
def pair() -> Iterator[tuple[Rig, BlockCache]]:
    """A rig and a cache of four keys, one block each."""
    with caches() as made:
        yield made


# failures


@pytest.mark.parametrize("call", ["cuMemcpy3DBatchAsync", "cuEventRecord", "cuStreamWaitEvent", "cuEventQuery"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_pitfall_23_a_failed_store_is_never_visible(call: str, nth: int) -> None:
    with caches() as (bench, cache):
        simulator: Any = bench.device.simulator
        simulator.faults.fail_call(call, nth=nth)
        try:
            job = cache.store(keys(0, 1), [3, 4])
            failed = None
        except kvoffload.KVOffloadError as error:
            failed = error
        bench.engine.drain(10)
        simulator.faults.clear()
        if failed is not None or job.jobs[0].error is not None:
            assert cache.lookup(keys(0, 1)) == 0
            assert cache.lookup(keys(1)) == 0
            with pytest.raises(MissingKeyError):
                cache.load(keys(0), [20])
        else:
            assert cache.lookup(keys(0, 1)) == 2
        cache.check()
        cache.store(keys(0, 1), [5, 6]).wait(10)
        cache.load(keys(0, 1), [20, 21]).wait(10)
        assert (bench.block(20) == (6 if failed is not None or job.jobs[0].error else 4)).all()
        assert cache.statistics().evicted == 0


def test_a_lost_context_hides_what_was_on_its_way() -> None:
    device = simulated()
    with rig(device, num_slots=4) as bench:
        cache = BlockCache(bench.engine)
        cache.store(keys(0), [3]).wait(10)
        simulator: Any = device.simulator
        simulator.faults.fail_operation()
        job = cache.store(keys(1), [4])
        with pytest.raises(TransferError):
            job.wait(10)
        assert cache.lookup(keys(1)) == 0
        cache.check()
        with pytest.raises(TransferError, match="context is lost"):
            cache.store(keys(2), [4])
        cache.check()
    device.close()


# eviction


def test_pitfall_26_recency_follows_requests_not_lookups_or_completions(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    cache.store(keys(0, 1, 2, 3), [0, 1, 2, 3]).wait(10)
    for _ in range(5):
        cache.lookup(keys(3, 2, 1, 0))
    assert list(cache._state.pools.all[0].policy) == keys(3, 2, 1, 0)
    cache.touch(keys(2, 3, 9))
    assert list(cache._state.pools.all[0].policy) == keys(1, 0, 3, 2)
    held = bench.stream()
    gate = bench.gate(held)
    late = cache.load(keys(1), [20], after=held)
    cache.load(keys(3), [21], after=NO_WAIT)
    gate.open()
    late.wait(10)
    assert list(cache._state.pools.all[0].policy) == keys(0, 2, 1, 3)


def test_pitfall_24_eviction_is_all_or_nothing(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    cache.store(keys(0, 1, 2), [0, 1, 2]).wait(10)
    held = bench.stream()
    gate = bench.gate(held)
    cache.load(keys(1, 2), [20, 21], after=held)
    before = cache_state(cache)
    for wanted in ((5, 6, 7), (5, 6, 7, 8), (0, 5, 6), (5, 6, 7, 8, 9, 10)):
        with pytest.raises(CapacityError, match="may be evicted"):
            cache.store(keys(*wanted), list(wanted), after=NO_WAIT, all_or_nothing=True)
        assert cache_state(cache) == before
        cache.check()
    cache.store(keys(5, 6), [5, 6], after=NO_WAIT)
    assert cache.lookup(keys(0)) == 0
    gate.open()
    bench.engine.drain(10)
    assert cache.lookup(keys(5, 6)) == 2
    assert (bench.block(20) == 2).all()
    assert (bench.block(21) == 3).all()


def test_a_full_engine_changes_nothing() -> None:
    with simulated() as device, rig(device, num_blocks=32, num_slots=4, max_in_flight=1) as bench:
        cache = BlockCache(bench.engine, policy="lru")
        cache.store(keys(0, 1, 2, 3), [0, 1, 2, 3]).wait(10)
        held = bench.stream()
        gate = bench.gate(held)
        job = bench.engine.load([0], [25], after=held)
        before = cache_state(cache)
        with pytest.raises(CapacityError, match="max_in_flight=1"):
            cache.store(keys(5), [5], all_or_nothing=True)
        with pytest.raises(CapacityError, match="max_in_flight=1"):
            cache.load(keys(1), [20])
        assert cache_state(cache) == before
        gate.open()
        job.wait(10)
        cache.check()


def test_a_refusal_of_the_engine_changes_nothing(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    cache.store(keys(0, 1, 2, 3), [0, 1, 2, 3]).wait(10)
    bench.engine.poll()
    before = cache_state(cache)
    simulator: Any = bench.device.simulator
    simulator.faults.fail_call("cuStreamIsCapturing")
    with pytest.raises(kvoffload.DriverError):
        cache.store(keys(5), [5])
    assert cache_state(cache) == before
    simulator.faults.fail_call("cuStreamIsCapturing")
    with pytest.raises(kvoffload.DriverError):
        cache.load(keys(1), [20])
    assert cache_state(cache) == before
    cache.check()


def test_a_refused_load_holds_nothing_while_others_are_in_flight(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    cache.store(keys(0, 1), [0, 1]).wait(10)
    held = bench.stream()
    gate = bench.gate(held)
    cache.store(keys(2), [2], after=held)
    before = cache_state(cache)
    with pytest.raises(kvoffload.LayoutError):
        cache.load(keys(0, 1), [20, 20])
    assert cache_state(cache) == before
    gate.open()
    bench.engine.drain(10)
    cache.check()


def test_pitfall_25_what_is_in_use_is_never_evicted(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    cache.store(keys(0, 1), [0, 1]).wait(10)
    held = bench.stream()
    gate = bench.gate(held)
    reading = cache.load(keys(0), [20], after=held)
    writing = cache.store(keys(2, 3), [2, 3], after=held)
    cache.store(keys(4), [4], after=NO_WAIT)
    with pytest.raises(CapacityError):
        cache.store(keys(5), [5], after=NO_WAIT, all_or_nothing=True)
    assert set(cache._records.keys) == set(keys(0, 2, 3, 4))
    assert (cache.statistics().pinned, cache.statistics().pending) == (1, 3)
    gate.open()
    reading.wait(10)
    writing.wait(10)
    bench.engine.drain(10)
    assert (bench.block(20) == 1).all()
    cache.store(keys(5), [5], after=NO_WAIT).wait(10)
    cache.check()

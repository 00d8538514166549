"""BlockCache when copies fail, and what it gives up for what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from caching import caches
from helpers import Rig, cache_state, key, keys, rig, simulated

import kvoffload
from kvoffload import NO_WAIT, BlockCache, CapacityError, MissingKeyError, TransferError
from kvoffload.cache.policies import LRU


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


def test_a_slot_of_a_failed_store_is_not_used_again_while_copies_run() -> None:
    """Half of a store is queued behind a gate when it fails: its slots must stay out of use until that has ended."""
    with caches(level="no-batch") as (bench, cache):
        held = bench.stream()
        gate = bench.gate(held)
        assert bench.device.simulator is not None
        for call in ("cuMemcpy2DAsync", "cuMemcpyAsync"):  # whichever is chosen
            bench.device.simulator.faults.fail_call(call, nth=3)
        cache.store(keys(0, 1, 2), [3, 4, 5], after=held)
        with pytest.raises(CapacityError):
            cache.store(keys(3, 4), [6, 7], after=NO_WAIT, all_or_nothing=True)
        cache.check()
        gate.open()
        bench.engine.drain(10)
        bench.device.simulator.faults.clear()
        cache.store(keys(3, 4, 5, 6), [6, 7, 8, 9], after=NO_WAIT).wait(10)
        assert cache.lookup(keys(3, 4, 5, 6)) == 4
        cache.check()


def test_a_failed_load_unpins_and_the_key_stays(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    cache.store(keys(0), [3]).wait(10)
    assert bench.device.simulator is not None
    for call in ("cuMemcpy3DBatchAsync", "cuMemcpyBatchAsync"):  # whichever is chosen
        bench.device.simulator.faults.fail_call(call)
    with pytest.raises(TransferError):
        cache.load(keys(0), [20]).wait(10)
    bench.device.simulator.faults.clear()
    assert (cache.lookup(keys(0)), cache.statistics().pinned, cache.statistics().loaded) == (1, 0, 0)
    cache.check()
    cache.load(keys(0), [20]).wait(10)
    assert (bench.block(20) == 4).all()


def test_a_store_that_fails_while_another_is_being_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots that come free meanwhile must not be mistaken for those that the new store was given."""
    with caches(capacity=3) as (bench, cache):
        simulator: Any = bench.device.simulator
        for number in range(3):
            cache.store(keys(number), [number]).wait(10)
        simulator.faults.fail_call("cuMemcpy3DBatchAsync")
        cache.store(keys(3), [3])
        bench.engine.drain(10)
        assert len(cache) == 2, "one slot is free again"
        held = bench.stream()
        gate = bench.gate(held)
        cache.load(keys(1), [20], after=NO_WAIT).wait(10)
        simulator.faults.fail_call("cuEventRecord", nth=3)  # the end of the copy: after it was queued
        cache.store(keys(4), [4], after=held)
        check_room = bench.engine.check_room

        def landing(jobs: int) -> None:
            check_room(jobs)
            gate.open()
            simulator.run_all()

        monkeypatch.setattr(bench.engine, "check_room", landing)
        cache.store(keys(5), [5], after=NO_WAIT)
        monkeypatch.undo()
        cache.check()
        bench.engine.drain(10)
        cache.check()
        cache.store(keys(6), [6]).wait(10)
        present = [number for number in range(7) if cache.lookup(keys(number))]
        cache.load([key(number) for number in present], range(20, 20 + len(present))).wait(10)
        assert [int(bench.block(20 + at)[0]) for at in range(len(present))] == [number + 1 for number in present]
        cache.check()


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


def test_never_used_slots_go_first(pair: tuple[Rig, BlockCache]) -> None:
    _, cache = pair
    for number in range(4):
        cache.store(keys(number), [number]).wait(10)
    assert cache.statistics().evicted == 0
    cache.store(keys(4), [4]).wait(10)
    assert cache.statistics().evicted == 1
    assert len(cache) == 4


def test_the_least_recently_used_key_goes(pair: tuple[Rig, BlockCache]) -> None:
    _, cache = pair
    cache.store(keys(0, 1, 2, 3), [0, 1, 2, 3]).wait(10)
    assert list(cache._state.pools.all[0].policy) == keys(3, 2, 1, 0), "a prefix stays longer than what needs it"
    cache.load(keys(3), [20]).wait(10)
    cache.store(keys(4), [4]).wait(10)
    assert list(cache._state.pools.all[0].policy) == keys(1, 0, 3, 4)


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


def test_pitfall_25_a_job_completes_once(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    job = cache.store(keys(0), [0])
    job.wait(10)
    before = cache.statistics()
    for _ in range(3):
        job.wait(10)
        assert job.jobs[0].done
        bench.engine.poll()
        bench.engine.drain(10)
    assert cache.statistics() == before
    bench.engine.advance()
    assert cache.statistics() == before
    assert bench.engine.statistics().store.jobs == 1
    assert job.jobs[0].finished


def test_keys_of_the_request_are_not_evicted_for_it(pair: tuple[Rig, BlockCache]) -> None:
    _, cache = pair
    cache.store(keys(0, 1, 2, 3), [0, 1, 2, 3]).wait(10)
    cache.store(keys(3, 2, 8), [3, 2, 8]).wait(10)
    assert set(cache._records.keys) == set(keys(0, 2, 3, 8))


def test_more_keys_than_the_cache_holds_are_refused(pair: tuple[Rig, BlockCache]) -> None:
    _, cache = pair
    before = cache_state(cache)
    with pytest.raises(CapacityError, match="capacity 4"):
        cache.store(keys(*range(5)), list(range(5)), all_or_nothing=True)
    assert cache_state(cache) == before


def test_a_policy_of_ones_own() -> None:
    class MostRecent(LRU):
        def victims(self, count: int, protected: Callable[[bytes], bool]) -> list[bytes] | None:
            found = [k for k in reversed(list(self)) if not protected(k)][:count]
            return found if len(found) == count else None

    with simulated() as device, rig(device, num_slots=2) as bench:
        cache = BlockCache(bench.engine, policy=MostRecent())
        cache.store(keys(0), [0]).wait(10)
        cache.store(keys(1), [1]).wait(10)
        cache.store(keys(2), [2]).wait(10)
        assert set(cache._records.keys) == set(keys(0, 2))
        cache.check()
        with pytest.raises(ValueError, match="policy must be one of arc, lru"):
            BlockCache(bench.engine, policy="lfu")  # type: ignore[arg-type]

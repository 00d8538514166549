"""BlockCache: its contract, a plain model of it, eviction, failures, threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from helpers import LEVELS, Rig, cache_state, key, keys, rig, simulated, whole

import kvoffload
from kvoffload import (
    NO_WAIT,
    BlockCache,
    CapacityError,
    ClosedError,
    KVLayout,
    LayoutError,
    MissingKeyError,
    OffloadEngine,
    TransferError,
)
from kvoffload.policies import LRU


@contextmanager
def caches(capacity: int = 4, seed: int = 0, level: str = "batch", **options: Any) -> Iterator[tuple[Rig, BlockCache]]:
    device = simulated(seed, level)
    with rig(device, num_blocks=32, num_slots=capacity, **options) as bench:
        yield bench, BlockCache(bench.engine)
    device.close()


@pytest.fixture
def pair() -> Iterator[tuple[Rig, BlockCache]]:
    """A rig and a cache of four keys, one block each."""
    with caches() as made:
        yield made


# the contract


@pytest.mark.parametrize("level", LEVELS)
def test_what_was_stored_can_be_found_and_loaded(level: str) -> None:
    with caches(level=level) as (bench, cache):
        job = cache.store(keys(0, 1, 2), [10, 11, 12])
        assert job.keys == tuple(keys(0, 1, 2))
        assert len(job.wait(10)) == 1
        assert cache.lookup(keys(0, 1, 2, 3)) == 3
        assert cache.lookup(keys(3, 0)) == 0
        cache.load(keys(2, 0), [20, 21]).wait(10)
        assert (bench.block(20) == 13).all()
        assert (bench.block(21) == 11).all()
        cache.check()
        statistics = cache.statistics()
        assert (statistics.capacity, statistics.resident, statistics.pending, statistics.pinned) == (4, 3, 0, 0)
        assert (statistics.lookups, statistics.hits, statistics.stored, statistics.loaded) == (6, 3, 3, 2)


def test_a_key_may_be_loaded_to_several_blocks(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    cache.store(keys(0), [10]).wait(10)
    cache.load(keys(0, 0, 0), [20, 21, 22]).wait(10)
    assert all((bench.block(block) == 11).all() for block in (20, 21, 22))


def test_publish_only_after_the_copy_has_completed(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    held = bench.stream()
    gate = bench.gate(held)
    bench.fill(held, 77)
    job = cache.store(keys(0), [3], after=held)
    bench.settle()
    assert not job.done
    assert cache.lookup(keys(0)) == 0
    assert cache.statistics().pending == 1
    with pytest.raises(MissingKeyError, match="still being stored"):
        cache.load(keys(0), [20])
    gate.open()
    job.wait(10)
    assert cache.lookup(keys(0)) == 1
    cache.load(keys(0), [20]).wait(10)
    assert (bench.block(20) == 77).all()


def test_the_cache_learns_of_completions_without_poll(pair: tuple[Rig, BlockCache]) -> None:
    _, cache = pair
    cache.store(keys(0), [3])
    deadline = time.monotonic() + 10
    while not cache.lookup(keys(0)):
        assert time.monotonic() < deadline
    assert len(cache._engine.poll()) == 1


def test_polling_the_engine_elsewhere_does_not_confuse_it(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    cache.store(keys(0), [3])
    bench.engine.drain(10)
    bench.engine.poll()
    assert cache.lookup(keys(0)) == 1
    cache.check()


def test_keys_present_or_on_their_way_are_skipped(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    held = bench.stream()
    gate = bench.gate(held)
    first = cache.store(keys(0, 1), [3, 4], after=held)
    second = cache.store(keys(1, 2, 0), [10, 11, 12], after=NO_WAIT)
    assert second.keys == tuple(keys(2))
    third = cache.store(keys(0, 1, 2), [13, 14, 15])
    assert (third.keys, third.jobs, third.done, third.wait()) == ((), (), True, [])
    gate.open()
    first.wait(10)
    second.wait(10)
    cache.load(keys(0, 1, 2), [20, 21, 22]).wait(10)
    assert [int(bench.block(block)[0]) for block in (20, 21, 22)] == [4, 5, 12]
    assert cache.statistics().stored == 3


def test_bad_arguments_change_nothing(pair: tuple[Rig, BlockCache]) -> None:
    _, cache = pair
    cache.store(keys(0, 1), [3, 4]).wait(10)
    before = cache_state(cache)
    bad: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: cache.store(keys(2, 2), [1, 2]), LayoutError, "repeats"),
        (lambda: cache.store(keys(2), [1, 2]), LayoutError, "1 ids per key"),
        (lambda: cache.store(keys(2), [99]), LayoutError, "99"),
        (lambda: cache.store(["text"], [1]), LayoutError, "bytes"),  # type: ignore[list-item]
        (lambda: cache.load(keys(0), [99]), LayoutError, "99"),
        (lambda: cache.load(keys(0, 1), [5, 5]), LayoutError, "repeats"),
        (lambda: cache.load(keys(0, 7), [5, 6]), MissingKeyError, "not in the cache"),
        (lambda: cache.store(keys(2), [1], after="x"), TypeError, "after"),
    ]
    for call, error, text in bad:
        with pytest.raises(error, match=text):
            call()
        assert cache_state(cache) == before
        cache.check()


def test_empty_lists_are_legal(pair: tuple[Rig, BlockCache]) -> None:
    _, cache = pair
    assert cache.lookup([]) == 0
    assert cache.store([], []).wait() == []
    assert cache.load([], []).wait() == []


def test_the_engine_closed_under_a_cache(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    cache.store(keys(0), [3])
    bench.engine.close()
    assert cache.lookup(keys(0)) == 1
    with pytest.raises(ClosedError):
        cache.store(keys(1), [4])
    with pytest.raises(ClosedError):
        cache.load(keys(0), [4])
    cache.check()


def test_an_engine_too_small_for_one_key_is_refused() -> None:
    with simulated() as device:
        planes = [device.allocate_planes(1, block_bytes=64, num_blocks=4) for _ in range(3)]
        with OffloadEngine(KVLayout(planes), device=device, num_slots=2) as engine, pytest.raises(CapacityError):
            BlockCache(engine)


# several groups, several blocks a key


@contextmanager
def grouped(capacity: int = 4, seed: int = 0) -> Iterator[tuple[Rig, BlockCache, list[list[kvoffload.Plane]]]]:
    """Two groups with two blocks a key; block `b` holds `b + 1` in group 0 and `b + 101` in group 1."""
    device = simulated(seed)
    with rig(device, num_blocks=32, num_slots=1) as bench:
        other = device.allocate_planes(3, block_bytes=32, num_blocks=40)
        slab: Any = other[0].owner
        image = np.zeros(slab.nbytes, np.uint8)
        for plane in other:
            start = plane.address - slab.address
            image[start : start + plane.span_bytes] = np.repeat(np.arange(101, 141, dtype=np.uint8), 32)
        slab.copy_from(image)
        layout = KVLayout([bench.planes, other], blocks_per_slot=2)
        with OffloadEngine(layout, device=device, num_slots=2 * capacity + 1) as engine:
            yield bench, BlockCache(engine), [bench.planes, other]
    device.close()


def test_several_groups_and_blocks_per_key() -> None:
    with grouped() as (bench, cache, groups):
        assert cache.capacity == 4
        stored = cache.store(keys(0, 1), [[1, 2, 7, 9], [11, 12, 17, 19]])
        assert len(stored.wait(10)) == 2
        loaded = cache.load(keys(1, 0), [[20, 21, 22, 23], [30, 31, 32, 33]])
        assert len(loaded.wait(10)) == 2
        assert [int(bench.block(block)[0]) for block in range(20, 24)] == [8, 10, 2, 3]
        assert [int(bench.block(block, groups[1])[-1]) for block in range(30, 34)] == [118, 120, 112, 113]
        statistics = cache.statistics()
        assert (statistics.stored, statistics.loaded) == (2, 2), "counted once per key, however many groups"
        cache.check()


@pytest.mark.parametrize("seed", range(3))
def test_counts_do_not_depend_on_when_copies_end(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's copies may have ended before the next group's are submitted."""
    with grouped(seed=seed) as (bench, cache, _):
        simulator: Any = bench.device.simulator
        submit = cache._engine.submit

        def slowly(*arguments: Any, **options: Any) -> Any:
            simulator.run_all()
            return submit(*arguments, **options)

        monkeypatch.setattr(cache._engine, "submit", slowly)
        cache.store(keys(0, 1), [[1, 2, 3, 4], [5, 6, 7, 8]]).wait(10)
        assert cache.statistics().stored == 2
        assert cache.lookup(keys(0, 1)) == 2
        cache.check()


@pytest.mark.parametrize("call", ["cuMemcpy3DBatchAsync", "cuMemcpyBatchAsync"], ids=["first", "second"])
def test_a_key_is_visible_only_if_every_group_was_stored(call: str) -> None:
    """Group 0 is copied by strided copies, group 1, of three planes, by flat ones."""
    with grouped() as (bench, cache, _):
        assert bench.device.simulator is not None
        bench.device.simulator.faults.fail_call(call)
        job = cache.store(keys(0), [[1, 2], [11, 12]])
        cache._engine.drain(10)
        assert sorted(each.error is None for each in job.jobs) == [False, True]
        assert cache.lookup(keys(0)) == 0
        with pytest.raises(TransferError):
            job.wait()
        cache.check()
        assert (len(cache), cache.statistics().failed, cache.statistics().stored) == (0, 1, 0)
        cache.store(keys(0, 1, 2, 3), [list(range(8)), list(range(8))]).wait(10)
        assert cache.lookup(keys(0, 1, 2, 3)) == 4
        cache.check()


def test_a_refusal_after_the_first_group_spends_its_slots_until_they_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with grouped() as (bench, cache, _):
        held = bench.stream()
        gate = bench.gate(held)
        submit = cache._engine.submit

        def only_first(*arguments: Any, group: int, **options: Any) -> Any:
            if group:
                raise CapacityError("no room for the second group")
            return submit(*arguments, group=group, **options)

        monkeypatch.setattr(cache._engine, "submit", only_first)
        with pytest.raises(CapacityError, match="second group"):
            cache.store(keys(0, 1), [[1, 2, 3, 4], [1, 2, 3, 4]], after=held)
        monkeypatch.undo()
        cache.check()
        assert cache.lookup(keys(0)) == 0
        with pytest.raises(CapacityError):
            cache.store(keys(2, 3, 4), [list(range(6)), list(range(6))], after=NO_WAIT)
        cache.store(keys(2, 3), [list(range(4)), list(range(4))], after=NO_WAIT)
        gate.open()
        cache._engine.drain(10)
        cache.check()
        cache.store(keys(4, 5), [list(range(4)), list(range(4))], after=NO_WAIT).wait(10)
        assert cache.lookup(keys(2, 3, 4, 5)) == 4
        cache.check()


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
        bench.device.simulator.faults.fail_call("cuMemcpy2DAsync", nth=3)
        cache.store(keys(0, 1, 2), [3, 4, 5], after=held)
        with pytest.raises(CapacityError):
            cache.store(keys(3, 4), [6, 7], after=NO_WAIT)
        cache.check()
        gate.open()
        bench.engine.drain(10)
        cache.store(keys(3, 4, 5, 6), [6, 7, 8, 9], after=NO_WAIT).wait(10)
        assert cache.lookup(keys(3, 4, 5, 6)) == 4
        cache.check()


def test_a_failed_load_unpins_and_the_key_stays(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    cache.store(keys(0), [3]).wait(10)
    assert bench.device.simulator is not None
    bench.device.simulator.faults.fail_call("cuMemcpy3DBatchAsync")
    with pytest.raises(TransferError):
        cache.load(keys(0), [20]).wait(10)
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
    assert list(cache._policy) == keys(3, 2, 1, 0), "a prefix stays longer than what needs it"
    cache.load(keys(3), [20]).wait(10)
    cache.store(keys(4), [4]).wait(10)
    assert list(cache._policy) == keys(1, 0, 3, 4)


def test_pitfall_26_recency_follows_requests_not_lookups_or_completions(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    cache.store(keys(0, 1, 2, 3), [0, 1, 2, 3]).wait(10)
    for _ in range(5):
        cache.lookup(keys(3, 2, 1, 0))
    assert list(cache._policy) == keys(3, 2, 1, 0)
    cache.touch(keys(2, 3, 9))
    assert list(cache._policy) == keys(1, 0, 3, 2)
    held = bench.stream()
    gate = bench.gate(held)
    late = cache.load(keys(1), [20], after=held)
    cache.load(keys(3), [21], after=NO_WAIT)
    gate.open()
    late.wait(10)
    assert list(cache._policy) == keys(0, 2, 1, 3)


def test_pitfall_24_eviction_is_all_or_nothing(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    cache.store(keys(0, 1, 2), [0, 1, 2]).wait(10)
    held = bench.stream()
    gate = bench.gate(held)
    cache.load(keys(1, 2), [20, 21], after=held)
    before = cache_state(cache)
    for wanted in ((5, 6, 7), (5, 6, 7, 8), (0, 5, 6), (5, 6, 7, 8, 9, 10)):
        with pytest.raises(CapacityError, match="given up"):
            cache.store(keys(*wanted), list(wanted), after=NO_WAIT)
        assert cache_state(cache) == before
        cache.check()
    cache.store(keys(5, 6), [5, 6], after=NO_WAIT)
    assert cache.lookup(keys(0)) == 0
    gate.open()
    bench.engine.drain(10)
    assert cache.lookup(keys(5, 6)) == 2
    assert (bench.block(20) == 2).all()
    assert (bench.block(21) == 3).all()


def test_a_refusal_of_the_engine_changes_nothing(pair: tuple[Rig, BlockCache], monkeypatch: pytest.MonkeyPatch) -> None:
    bench, cache = pair
    cache.store(keys(0, 1, 2, 3), [0, 1, 2, 3]).wait(10)
    bench.engine.poll()
    before = cache_state(cache)
    monkeypatch.setattr(bench.engine._flights, "_max_in_flight", 0)
    with pytest.raises(CapacityError):
        cache.store(keys(5), [5])
    with pytest.raises(CapacityError):
        cache.load(keys(1), [20])
    assert cache_state(cache) == before
    monkeypatch.undo()
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


def test_pitfall_25_what_is_in_use_is_never_evicted(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    cache.store(keys(0, 1), [0, 1]).wait(10)
    held = bench.stream()
    gate = bench.gate(held)
    reading = cache.load(keys(0), [20], after=held)
    writing = cache.store(keys(2, 3), [2, 3], after=held)
    cache.store(keys(4), [4], after=NO_WAIT)
    with pytest.raises(CapacityError):
        cache.store(keys(5), [5], after=NO_WAIT)
    assert set(cache._entries) == set(keys(0, 2, 3, 4))
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
    with pytest.raises(AssertionError):
        bench.engine._flights.land(job.jobs[0])
    assert job.jobs[0].state is job.jobs[0].state.DONE


def test_keys_of_the_request_are_not_evicted_for_it(pair: tuple[Rig, BlockCache]) -> None:
    _, cache = pair
    cache.store(keys(0, 1, 2, 3), [0, 1, 2, 3]).wait(10)
    cache.store(keys(3, 2, 8), [3, 2, 8]).wait(10)
    assert set(cache._entries) == set(keys(0, 2, 3, 8))


def test_more_keys_than_the_cache_holds_are_refused(pair: tuple[Rig, BlockCache]) -> None:
    _, cache = pair
    before = cache_state(cache)
    with pytest.raises(CapacityError, match="capacity 4"):
        cache.store(keys(*range(5)), list(range(5)))
    assert cache_state(cache) == before


def test_a_policy_of_ones_own() -> None:
    class MostRecent(LRU):
        def victims(self, count: int, may_go: Callable[[bytes], bool]) -> list[bytes] | None:
            found = [k for k in reversed(list(self)) if may_go(k)][:count]
            return found if len(found) == count else None

    with simulated() as device, rig(device, num_slots=2) as bench:
        cache = BlockCache(bench.engine, policy=MostRecent())
        cache.store(keys(0), [0]).wait(10)
        cache.store(keys(1), [1]).wait(10)
        cache.store(keys(2), [2]).wait(10)
        assert set(cache._entries) == set(keys(0, 2))
        cache.check()
        with pytest.raises(ValueError, match="policy must be one of lru"):
            BlockCache(bench.engine, policy="lfu")


# threads


def test_threads_share_a_cache() -> None:
    with caches(capacity=12) as (bench, cache):
        errors: list[BaseException] = []

        def work(number: int) -> None:
            """Store and load keys of several threads; a block of key k always holds the same byte."""
            rng = np.random.default_rng(number)
            target = 24 + number
            try:
                for _ in range(40):
                    chosen = sorted({int(each) for each in rng.integers(0, 20, size=3)})
                    try:
                        cache.store(keys(*chosen), chosen, after=NO_WAIT).wait(30)
                    except CapacityError:
                        continue
                    try:
                        cache.load(keys(chosen[0]), [target], after=NO_WAIT).wait(30)
                    except MissingKeyError:
                        continue  # another thread is still storing it, or has pushed it out
                    assert (bench.block(target) == chosen[0] + 1).all()
                    cache.check()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        bench.engine.drain(10)
        cache.check()
        whole(bench.engine)


# scale


def test_pitfall_27_evictions_take_linear_time() -> None:
    """100,000 evictions in caches of two sizes: the cost of one does not grow with the cache."""

    def seconds_per_eviction(capacity: int, evictions: int) -> float:
        class NoCopies:
            """An engine whose transfers are over at once: what is left is the cache's own work."""

            def __init__(self) -> None:
                self.lock = threading.RLock()
                self.num_slots = capacity
                self.layout = layout

            def submit(self, *_: Any, **options: Any) -> Any:
                listener = options["listener"]
                listener.boarded(done)
                listener.ended(done)
                return done

            def advance(self) -> None: ...

            def check_room(self, jobs: int) -> None: ...

        cache = BlockCache(NoCopies())  # type: ignore[arg-type]
        batch = 500
        names = [b"%d" % number for number in range(capacity + evictions)]
        blocks = np.zeros(batch, np.int64)
        for start in range(0, capacity, batch):
            cache.store(names[start : start + batch], blocks)
        began = time.process_time()
        for start in range(capacity, capacity + evictions, batch):
            cache.store(names[start : start + batch], blocks)
        assert cache.statistics().evicted == evictions
        return (time.process_time() - began) / evictions

    layout = KVLayout([[kvoffload.Plane(4096, block_bytes=16, num_blocks=4)]])

    class Done:
        error = None

    done = Done()
    small = min(seconds_per_eviction(1_000, 10_000) for _ in range(3))
    large = seconds_per_eviction(50_000, 100_000)
    assert large < 6 * small + 5e-6, f"{small * 1e6:.2f} us with 1,000 keys, {large * 1e6:.2f} us with 50,000"

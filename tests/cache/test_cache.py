"""BlockCache: its contract, a plain model of it, eviction, failures, threads."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from caching import caches, grouped
from helpers import LEVELS, Rig, cache_state, change_streams, keys, release, rig, simulated
from seeds import seeds

from kvoffload import (
    NO_WAIT,
    BlockCache,
    CapacityError,
    KVLayout,
    LayoutError,
    MissingKeyError,
    OffloadEngine,
    TransferError,
)


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


def test_the_cache_learns_of_completions_without_poll(pair: tuple[Rig, BlockCache]) -> None:
    _, cache = pair
    cache.store(keys(0), [3])
    deadline = time.monotonic() + 10
    while not cache.lookup(keys(0)):
        assert time.monotonic() < deadline
    assert len(cache.engine.poll()) == 1


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


def test_a_block_may_be_stored_under_several_keys(pair: tuple[Rig, BlockCache]) -> None:
    """Sources may repeat, targets may not."""
    bench, cache = pair
    assert cache.store(keys(0, 1), [3, 3]).wait(10)[0].error is None
    with pytest.raises(LayoutError, match=r"^blocks\[[01]\] repeats 20; "):
        cache.load(keys(0, 1), [20, 20])
    cache.load(keys(0, 1, 0), [20, 21, 22]).wait(10)
    assert [int(bench.block(block)[0]) for block in (20, 21, 22)] == [4, 4, 4]
    cache.check()


def test_bad_arguments_change_nothing(pair: tuple[Rig, BlockCache]) -> None:
    _, cache = pair
    cache.store(keys(0, 1), [3, 4]).wait(10)
    before = cache_state(cache)
    bad: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: cache.store(keys(2, 2), [1, 2]), LayoutError, "repeats"),
        (lambda: cache.store(keys(2), [1, 2]), LayoutError, "blocks must hold one id for each key, here"),
        (lambda: cache.store(keys(2), [99]), LayoutError, "99"),
        (lambda: cache.store(["text"], [1]), LayoutError, "bytes"),  # type: ignore[list-item]
        (lambda: cache.load(["text"], [1]), LayoutError, "bytes"),  # type: ignore[list-item]
        (lambda: cache.load(keys(0), [99]), LayoutError, "99"),
        (lambda: cache.load(keys(0, 1), [5, 5]), LayoutError, "repeats"),
        (lambda: cache.load(keys(0, 7), [5, 6]), MissingKeyError, "not in the cache"),
        (lambda: cache.store(keys(2), [1], after="x"), TypeError, "after"),  # type: ignore[arg-type]
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


def test_an_engine_too_small_for_one_key_is_refused() -> None:
    with simulated() as device:
        planes = [device.allocate_planes(1, block_bytes=64, num_blocks=4) for _ in range(3)]
        with OffloadEngine(KVLayout(planes), device=device, num_slots=2) as engine, pytest.raises(CapacityError):
            BlockCache(engine)


def test_an_engine_with_room_for_fewer_jobs_than_groups_is_refused() -> None:
    """A key's groups travel as one job each: with fewer jobs no key could ever be stored."""
    with simulated() as device:
        planes = [device.allocate_planes(1, block_bytes=64, num_blocks=4) for _ in range(3)]
        for jobs in (2, 3):
            with OffloadEngine(KVLayout(planes), device=device, num_slots=6, max_in_flight=jobs) as engine:
                if jobs == 3:
                    assert len(BlockCache(engine).store(keys(0), [[1]] * 3).wait(10)) == 3
                    continue
                with pytest.raises(CapacityError, match="max_in_flight is 2"):
                    BlockCache(engine)
                engine.store([1], [1]).wait(10)


def test_a_store_of_keys_that_are_there_needs_no_room_for_a_job() -> None:
    with simulated() as device, rig(device, num_slots=4, max_in_flight=1) as bench:
        cache = BlockCache(bench.engine)
        cache.store(keys(0), [0]).wait(10)
        held = bench.stream()
        gate = bench.gate(held)
        job = cache.store(keys(1), [1], after=held)
        assert cache.store(keys(0), [0]).keys == ()
        with pytest.raises(CapacityError, match="max_in_flight=1"):
            cache.store(keys(2), [2])
        gate.open()
        assert job.wait(10)


def test_an_engine_has_one_cache_at_a_time() -> None:
    with simulated() as device, rig(device, num_slots=4) as bench:
        first = BlockCache(bench.engine)
        for _ in range(2):
            with pytest.raises(CapacityError, match="belong to another BlockCache"):
                BlockCache(bench.engine)
        held = bench.stream()
        bench.gate(held)
        first.store(keys(0), [3], after=held)
        del first
        gc.collect()
        with pytest.raises(CapacityError, match="belong to another BlockCache"):
            BlockCache(bench.engine)  # a copy into its slots is still queued
        release(bench)
        gc.collect()
        second = BlockCache(bench.engine)
        assert second.lookup(keys(0)) == 0
        second.store(keys(0, 1, 2, 3), [4, 5, 6, 7]).wait(10)
        second.load(keys(0), [12]).wait(10)
        assert (bench.block(12) == 5).all()
        with OffloadEngine(KVLayout([bench.planes]), device=device, num_slots=4) as other:
            assert BlockCache(other).capacity == 4


# several groups, several blocks a key


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


def test_a_load_whose_later_group_repeats_a_block_overwrites_none_of_an_earlier_group() -> None:
    with grouped() as (bench, cache, _):
        cache.store(keys(0), [[1, 2], [11, 12]]).wait(10)
        before = bench.block(20).copy()
        with pytest.raises(LayoutError, match=r"blocks\[1\] repeats an id"):
            cache.load(keys(0), [[20, 21], [30, 30]])
        bench.engine.drain(10)
        assert np.array_equal(bench.block(20), before)
        cache.load(keys(0), [[20, 21], [30, 31]]).wait(10)
        assert not np.array_equal(bench.block(20), before)


def test_slots_of_several_groups_lie_side_by_side() -> None:
    with grouped() as (_, cache, _):
        reservation = cache.reserve(keys(0, 1))
        assert [list(reservation.slots(group)) for group in range(2)] == [[0, 2], [1, 3]]
        reservation.commit()
        assert [list(cache.acquire(keys(1, 1, 0)).slots(group)) for group in range(2)] == [[2, 2, 0], [3, 3, 1]]


@pytest.mark.parametrize("seed", seeds(3))
def test_counts_do_not_depend_on_when_copies_end(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group's copies may have ended before the next group's are submitted."""
    with grouped(seed=seed) as (bench, cache, _):
        simulator: Any = bench.device.simulator
        submit = cache.engine.submit_locked

        def slowly(*arguments: Any, **options: Any) -> Any:
            simulator.run_all()
            return submit(*arguments, **options)

        monkeypatch.setattr(cache.engine, "submit_locked", slowly)
        cache.store(keys(0, 1), [[1, 2, 3, 4], [5, 6, 7, 8]]).wait(10)
        assert cache.statistics().stored == 2
        assert cache.lookup(keys(0, 1)) == 2
        cache.check()


@pytest.mark.parametrize("group", [0, 1], ids=["first", "second"])
def test_a_key_is_visible_only_if_every_group_was_stored(group: int) -> None:
    """The copies of either group are refused."""
    with grouped() as (bench, cache, _):
        simulator: Any = bench.device.simulator
        simulator.faults.calls = []
        cache.store(keys(0), [[1, 2], [11, 12]]).wait(10)
        copies = [name for name, _ in simulator.faults.calls if "Batch" in name]
    assert len(copies) == 2, "a call for each group"
    with grouped() as (bench, cache, _):
        simulator = bench.device.simulator
        simulator.faults.fail_call(copies[group], nth=copies[: group + 1].count(copies[group]))
        job = cache.store(keys(0), [[1, 2], [11, 12]])
        cache.engine.drain(10)
        assert sorted(each.error is None for each in job.jobs) == [False, True]
        assert cache.lookup(keys(0)) == 0
        with pytest.raises(TransferError):
            job.wait()
        cache.check()
        assert (len(cache), cache.statistics().failed, cache.statistics().stored) == (0, 1, 0)
        cache.store(keys(0, 1, 2, 3), [list(range(8)), list(range(8))]).wait(10)
        assert cache.lookup(keys(0, 1, 2, 3)) == 4
        cache.check()


@pytest.mark.parametrize("call", ["wait", "result", "order_before"])
def test_a_cache_job_whose_first_group_failed_is_over_only_when_the_second_is(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is told of the failure may use the blocks again: then nothing may touch them any more."""
    change_streams(monkeypatch)
    with grouped() as (bench, cache, _):
        held, reader = bench.stream(), bench.stream()
        gate = bench.gate(held)
        simulator: Any = bench.device.simulator
        simulator.faults.fail_call("cuStreamWaitEvent")  # the first group's first call: nothing of it is queued
        job = cache.store(keys(0), [[3, 4], [3, 4]], after=held)
        assert simulator.faults.pending == 0
        first, second = job.jobs
        assert (first.done, first.error is not None, second.done) == (True, True, False)
        if call == "order_before":
            with pytest.raises(TransferError):
                job.order_before(reader)
            order: list[int] = []
            with bench.device.current():
                simulator.enqueue(reader, lambda: order.append(1))
            simulator.run_all()
            assert order == [], "the stream waits for the second group"
            gate.open()
            simulator.run_all()
            assert order == [1]
            return
        opener = threading.Timer(0.1, gate.open)
        opener.start()
        with pytest.raises(TransferError):
            getattr(job, call)()
        assert second.finished
        assert second.error is None
        assert cache.lookup(keys(0)) == 0
        opener.join()
        cache.check()
        cache.engine.drain(10)
        assert job.jobs[0].id not in [result.job_id for result in cache.engine.poll()], "both were waited for"


def test_a_refusal_after_the_first_group_spends_its_slots_until_they_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with grouped() as (bench, cache, _):
        held = bench.stream()
        gate = bench.gate(held)
        submit = cache.engine.submit_locked

        def only_first(*arguments: Any, **options: Any) -> Any:
            if options["group"]:
                raise CapacityError("no room for the second group")
            return submit(*arguments, **options)

        monkeypatch.setattr(cache.engine, "submit_locked", only_first)
        with pytest.raises(CapacityError, match="second group"):
            cache.store(keys(0, 1), [[1, 2, 3, 4], [1, 2, 3, 4]], after=held)
        monkeypatch.undo()
        cache.check()
        assert cache.lookup(keys(0)) == 0
        with pytest.raises(CapacityError):
            cache.store(keys(2, 3, 4), [list(range(6)), list(range(6))], after=NO_WAIT, all_or_nothing=True)
        cache.store(keys(2, 3), [list(range(4)), list(range(4))], after=NO_WAIT)
        gate.open()
        cache.engine.drain(10)
        cache.check()
        cache.store(keys(4, 5), [list(range(4)), list(range(4))], after=NO_WAIT).wait(10)
        assert cache.lookup(keys(2, 3, 4, 5)) == 4
        cache.check()


# threads


# scale

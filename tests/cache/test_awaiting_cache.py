"""`await cache.store(...)`: a CacheJob is awaited, and has callbacks and an outcome, as the engine's jobs are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from caching import caches, grouped
from helpers import Rig, keys, rig, simulated

from kvoffload import NO_WAIT, BlockCache, CacheEvent, CacheJob, Job, TransferError, TransferResult


@pytest.fixture
def pair() -> Iterator[tuple[Rig, BlockCache]]:
    with caches() as made:
        yield made


async def within(job: CacheJob) -> list[TransferResult]:
    """Its results; as a coroutine for `asyncio.wait_for`."""
    return await job


def test_a_store_and_a_load_are_awaited(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair

    async def main() -> list[TransferResult]:
        (stored,) = await cache.store(keys(0, 1), [10, 11])
        assert stored.direction == "store"
        assert cache.lookup(keys(0, 1)) == 2
        return await cache.load(keys(1), [20])

    assert [result.direction for result in asyncio.run(main())] == ["load"]
    assert np.array_equal(bench.block(20), bench.block(11))
    assert bench.engine.poll() == [], "each was waited for"


def test_several_are_awaited_while_the_loop_goes_on(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    held = bench.stream()
    gate = bench.gate(held)

    async def main() -> int:
        tasks = [asyncio.create_task(within(cache.store(keys(index), [index], after=held))) for index in range(3)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in tasks)
        gate.open()
        return len(await asyncio.gather(*tasks))

    assert asyncio.run(main()) == 3
    assert cache.lookup(keys(0, 1, 2)) == 3


def test_a_job_of_several_groups_is_awaited_as_one() -> None:
    with grouped() as (bench, cache, _):
        held = bench.stream()
        gate = bench.gate(held)
        called: list[CacheJob] = []

        async def main() -> list[TransferResult]:
            job = cache.store(keys(0), [[0, 1], [2, 3]], after=held)
            job.add_done_callback(called.append)
            asyncio.get_running_loop().call_later(0.01, gate.open)
            results = await job
            assert called == [job], "once, before whoever came later"
            return results

        assert len(asyncio.run(main())) == 2
        assert cache.lookup(keys(0)) == 1


def test_a_failure_is_raised_and_kept(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    bench.device.simulator.faults.fail_call("cuMemcpy3DBatchAsync")
    job = cache.store(keys(0), [10])
    with pytest.raises(TransferError, match="cuMemcpy3DBatchAsync"):
        asyncio.run(within(job))
    assert job.finished
    assert "cuMemcpy3DBatchAsync" in str(job.error)
    (result,) = job.outcome()
    assert str(result.error) == str(job.error)
    assert cache.lookup(keys(0)) == 0


def test_a_load_of_a_store_that_fails_has_its_error(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    held = bench.stream()
    gate = bench.gate(held)
    bench.device.simulator.faults.fail_call("cuMemcpy3DBatchAsync")
    cache.store(keys(0), [10], after=held)
    job = cache.load(keys(0), [20], after=NO_WAIT, pending=True)
    gate.open()
    with pytest.raises(TransferError, match="pending"):
        asyncio.run(within(job))
    assert "pending" in str(job.error)
    assert [result.error for result in job.outcome()] == [None], "the load itself did not fail"


def test_a_timeout_leaves_the_job_alone(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    held = bench.stream()
    gate = bench.gate(held)

    async def main() -> list[TransferResult]:
        job = cache.store(keys(0), [10], after=held)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(within(job), 0.01)
        assert not job.finished
        assert job.error is None
        with pytest.raises(RuntimeError, match="has not ended"):
            job.outcome()
        gate.open()
        return await job

    assert len(asyncio.run(main())) == 1


def test_a_callback_comes_once_the_cache_has_taken_note() -> None:
    with simulated(1) as device, rig(device, num_blocks=32, num_slots=4) as bench:
        events: list[CacheEvent] = []
        cache = BlockCache(bench.engine, policy="lru", on_event=events.append)
        held = bench.stream()
        gate = bench.gate(held)
        told: list[tuple[bool, int, int, int]] = []
        ended = threading.Event()

        def callback(done: CacheJob) -> None:
            told.append((done.finished, cache.lookup(keys(0)), len(events), threading.get_ident()))
            ended.set()

        cache.store(keys(0), [10], after=held).add_done_callback(callback)
        assert told == []
        gate.open()
        assert ended.wait(10)
        ((finished, found, heard, thread),) = told
        assert (finished, found) == (True, 1)
        assert heard >= 1, "the cache's event came first"
        assert thread != threading.get_ident()


def test_what_has_ended_for_the_engine_alone_is_settled_before_the_callback(pair: tuple[Rig, BlockCache]) -> None:
    _, cache = pair
    job = cache.store(keys(0), [10])
    job.jobs[0].wait(10)
    assert not job.finished, "the cache has not taken note"
    ended = threading.Event()
    job.add_done_callback(lambda done: ended.set() if done.finished else None)
    assert ended.wait(10)


def test_a_job_with_nothing_to_copy_has_ended(pair: tuple[Rig, BlockCache]) -> None:
    _, cache = pair
    cache.store(keys(0), [10]).wait(10)
    job = cache.store(keys(0), [10])
    called: list[CacheJob] = []
    job.add_done_callback(called.append)
    assert called == [job]
    assert (job.done, job.finished, job.error, job.outcome(), job.result()) == (True, True, None, [], [])
    assert asyncio.run(within(job)) == []


@pytest.mark.parametrize("callback", [None, 3])
def test_what_is_no_function_is_refused(pair: tuple[Rig, BlockCache], callback: object) -> None:
    _, cache = pair
    for job in (cache.store([], []), cache.store(keys(0), [10])):
        with pytest.raises(TypeError, match=r"callback must be a function of a CacheJob, got "):
            job.add_done_callback(callback)  # type: ignore[arg-type]


def test_it_has_what_an_engines_job_has(pair: tuple[Rig, BlockCache]) -> None:
    """All but what one copy has: its number, direction, bytes and method."""
    _, cache = pair
    of_one = {"copier", "direction", "id", "method", "nbytes", "reason"}
    job = cache.store(keys(0), [10])
    shape = {name for name in dir(job.jobs[0]) if not name.startswith("_")} - of_one
    assert isinstance(job.jobs[0], Job)
    assert shape <= set(dir(job))

"""Transfers of a StagedCache over several batches: the memory they take, and what an error leaves."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import Gate
from random_programs import jax_on
from tiering import aligned

import kvoffload
from kvoffload import BlockCache, CapacityError, LayoutError, OffloadEngine, ShardedEngine
from kvoffload.jax import StagedCache
from kvoffload.tiers import MemoryTier

PLANES, BLOCKS, WIDTH = 2, 12, 8
CONTENT = np.arange(PLANES * BLOCKS * WIDTH, dtype=np.float32).reshape(PLANES, BLOCKS, WIDTH)
PER_THREAD_STREAM = 2


@pytest.fixture
def jax(device: kvoffload.Device) -> Iterator[Any]:
    with jax_on(device) as module:
        yield module


def cache_of(jax: Any, device: kvoffload.Device, stage_blocks: int) -> StagedCache:
    return StagedCache(device, jax.numpy.array(CONTENT), stage_blocks=stage_blocks, plane_axis=0, block_axis=1)


class Gathered:
    """Notes what a cache gathers, and the most arrays of it that existed when another was gathered."""

    def __init__(self, cache: StagedCache, monkeypatch: pytest.MonkeyPatch) -> None:
        self._arrays: list[weakref.ref[Any]] = []
        self.most = 0
        gather = cache._gather

        def noting(*arguments: Any) -> Any:
            array = gather(*arguments)
            self._arrays.append(weakref.ref(array))
            self.most = max(self.most, self.alive)
            return array

        monkeypatch.setattr(cache, "_gather", noting)

    @property
    def alive(self) -> int:
        return sum(reference() is not None for reference in self._arrays)

    @property
    def count(self) -> int:
        return len(self._arrays)


def test_the_host_waits_before_a_third_array_is_gathered(
    jax: Any, device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(jax, device, 1)
    gathered = Gathered(cache, monkeypatch)
    with OffloadEngine(cache.layout, device=device, num_slots=BLOCKS, sm_limit=0) as engine:
        gate = Gate(device)
        ended = threading.Event()

        def store() -> None:
            gate.hold(PER_THREAD_STREAM)
            cache.store(engine, range(BLOCKS), range(BLOCKS))
            ended.set()

        thread = threading.Thread(target=store)
        thread.start()
        assert not ended.wait(0.5)
        assert (gathered.count, engine.in_flight) == (2, 2)
        gate.open()
        thread.join(30)
        assert (gathered.count, gathered.most) == (BLOCKS, 2)
        engine.drain(10)
        gate.close()
        stored = (
            engine.slots[:, : engine.layout.groups[0].bytes_per_block].view(np.float32).reshape(BLOCKS, PLANES, WIDTH)
        )
        assert (stored == CONTENT.swapaxes(0, 1)).all()


@pytest.mark.parametrize("use", [lambda cache, _: cache.array, lambda cache, engine: cache.load(engine, [0], [0])])
def test_gathered_arrays_are_freed_when_the_cache_is_used(
    jax: Any, device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch, use: Callable[[StagedCache, Any], object]
) -> None:
    cache = cache_of(jax, device, 4)
    gathered = Gathered(cache, monkeypatch)
    with OffloadEngine(cache.layout, device=device, num_slots=BLOCKS, sm_limit=0) as engine:
        cache.store(engine, range(8), range(8))
        engine.drain(10)
        assert gathered.alive > 0
        use(cache, engine)
        assert gathered.alive == 0


def test_arrays_of_failed_stores_are_bounded_too(
    jax: Any, device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No job says when these have been copied."""
    cache = cache_of(jax, device, 4)
    gathered = Gathered(cache, monkeypatch)
    with OffloadEngine(cache.layout, device=device, num_slots=BLOCKS, sm_limit=0) as engine:

        def fail(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine, "store", fail)
            for _ in range(5):
                with pytest.raises(KeyboardInterrupt):
                    cache.store(engine, [0], [0])
        assert gathered.most == 2
        cache.store(engine, [7], [3])[0].wait(10)
        assert (
            engine.slots[3, : engine.layout.groups[0].bytes_per_block].view(np.float32) == CONTENT[:, 7].ravel()
        ).all()


# what is refused before the first batch


@pytest.mark.parametrize("call", ["store", "load"])
def test_more_jobs_than_the_engine_has_room_for_are_refused_together(
    jax: Any, device: kvoffload.Device, call: str
) -> None:
    cache = cache_of(jax, device, 2)
    with OffloadEngine(cache.layout, device=device, num_slots=BLOCKS, sm_limit=0, max_in_flight=2) as engine:
        transfer, array = getattr(cache, call), cache.array
        with pytest.raises(CapacityError, match=r"6 blocks are 3 jobs of up to 2 blocks, .* max_in_flight=2: copy few"):
            transfer(engine, range(6), range(6))
        gate = Gate(device)
        gate.hold(PER_THREAD_STREAM)
        cache.store(engine, [8], [8])
        array = cache._arrays[0]
        with pytest.raises(CapacityError, match=r"1 jobs are unfinished \(max_in_flight=2\)"):
            transfer(engine, range(4), range(4))
        assert engine.submitted == 1
        assert cache._arrays[0] is array
        gate.open()
        engine.drain(10)
        gate.close()
        transfer(engine, range(4), range(4))
        assert engine.submitted == 3


def test_jobs_that_have_ended_make_room(jax: Any, device: kvoffload.Device) -> None:
    cache = cache_of(jax, device, 2)
    with OffloadEngine(cache.layout, device=device, num_slots=BLOCKS, sm_limit=0, max_in_flight=2) as engine:
        for _ in range(5):
            jobs = cache.store(engine, range(4), range(4))
            assert len(jobs) == 2
            engine.order_all_before(PER_THREAD_STREAM)
            with device.current():
                device.driver.stream_synchronize(PER_THREAD_STREAM)


def test_a_slot_that_repeats_in_another_batch_is_refused(jax: Any, device: kvoffload.Device) -> None:
    cache = cache_of(jax, device, 2)
    with OffloadEngine(cache.layout, device=device, num_slots=BLOCKS, sm_limit=0) as engine:
        with pytest.raises(LayoutError, match="slots repeats an id; the targets of a store must be distinct"):
            cache.store(engine, [0, 1, 2], [0, 1, 0])
        with pytest.raises(LayoutError, match="blocks repeats an id; the targets of a load must be distinct"):
            cache.load(engine, [0, 1, 2], [0, 1, 0])
        assert engine.submitted == 0


def test_a_closed_engine_is_refused_first(jax: Any, device: kvoffload.Device) -> None:
    cache = cache_of(jax, device, 2)
    engine = OffloadEngine(cache.layout, device=device, num_slots=BLOCKS, sm_limit=0)
    engine.close()
    array = cache.array
    with pytest.raises(kvoffload.ClosedError, match="the engine is closed"):
        cache.load(engine, [0], [0])
    assert cache.array is array


def test_a_cache_of_keys_over_the_staging_array_is_refused(jax: Any, device: kvoffload.Device) -> None:
    """It would store what the staging array holds: hits with the bytes of other blocks."""
    cache, tier = cache_of(jax, device, 4), MemoryTier(1 << 16)
    message = (
        r"^engine copies the staging array of a kvoffload\.jax\.StagedCache, .* needs a kvoffload\.jax\.OwnedCache"
    )
    with (
        OffloadEngine(cache.layout, device=device, num_slots=BLOCKS, sm_limit=0) as engine,
        ShardedEngine([cache.layout], devices=[device], num_slots=BLOCKS, sm_limit=0) as sharded,
    ):
        for each in (engine, sharded):
            for make in (BlockCache, partial(BlockCache, tiers=[tier])):
                with pytest.raises(LayoutError, match=message):
                    make(each)
        cache.store(engine, [7], [3])[0].wait(10)
        stored = engine.slots[3, : engine.layout.groups[0].bytes_per_block].view(np.float32)
        assert (stored == CONTENT[:, 7].ravel()).all(), "no cache owns the slots"
    tier.attach([aligned(4)], None)
    assert tier.close(), "no cache owns the tier"

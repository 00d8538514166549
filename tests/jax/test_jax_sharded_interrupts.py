"""Interrupts in a OwnedCache: what is read afterwards is right on every device; a lost result is recovered."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from interrupts import interrupted_everywhere
from sharded_jax import JaxDevices, two_devices

import kvoffload
from kvoffload import ShardedEngine
from kvoffload.jax import OwnedCache

PLANES, BLOCKS, WIDTH = 2, 6, 8


two = pytest.fixture(two_devices)


@pytest.fixture
def cache(two: JaxDevices) -> OwnedCache:
    return two.cache((PLANES, BLOCKS, WIDTH), "float32", None, None, "heads", plane_axis=0, block_axis=1)


@pytest.fixture
def engine(two: JaxDevices, cache: OwnedCache) -> Iterator[ShardedEngine]:
    with two.engine(cache, 2) as opened:
        yield opened


def updater(two: JaxDevices, cache: OwnedCache) -> Any:
    return two.jax.jit(lambda array, value: array.at[:, 2].set(value), donate_argnums=0, out_shardings=cache.sharding)


def test_reading_it_after_a_load(cache: OwnedCache, engine: ShardedEngine) -> None:
    def read_after_load(value: int) -> Callable[[], object]:
        for pool in engine.slots:
            pool[0].view(np.float32)[:] = value
        engine.load([0], [1], after=cache).wait(10)
        return lambda: cache.arrays

    for value, _ in interrupted_everywhere(read_after_load):
        before = cache.unordered
        assert (np.asarray(cache.arrays)[:, 1] == value).all()
        assert cache.arrays is cache.arrays
        assert before.is_deleted() or before is cache.arrays


def test_setting_it(two: JaxDevices, cache: OwnedCache, engine: ShardedEngine) -> None:
    update = updater(two, cache)

    def set_result(value: int) -> Callable[[], object]:
        result = update(cache.arrays, float(value))
        return lambda: setattr(cache, "arrays", result)

    for value, raised in interrupted_everywhere(set_result):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", kvoffload.KVOffloadWarning)
            found = set(np.asarray(cache.arrays)[:, 2].ravel().tolist())
        assert found <= {float(value - 1), float(value)}
        assert raised or found == {float(value)}
        cache.arrays = update(cache.arrays, float(value))
        engine.store([2], [0], after=cache)
        engine.load([0], [3], after=cache)
        assert (np.asarray(cache.arrays)[:, 2:4] == value).all()


def test_following_it(cache: OwnedCache, engine: ShardedEngine) -> None:
    """To ask what is to be followed changes nothing."""
    for pool in engine.slots:
        pool[0].view(np.float32)[:] = 9
    engine.load([0], [1], after=cache)
    assert (np.asarray(cache.arrays)[:, 1] == 9).all()
    for _ in interrupted_everywhere(lambda _: cache.after):
        engine.store([1], [1], after=cache).wait(10)
        assert all((pool[1].view(np.float32)[: PLANES * WIDTH // 2] == 9).all() for pool in engine.slots)


def test_it_recovers_when_the_result_of_a_step_is_lost(
    two: JaxDevices, cache: OwnedCache, engine: ShardedEngine
) -> None:
    """As after an interrupt between a step and the assignment of its result."""
    update = updater(two, cache)
    update(cache.arrays, 5.0)
    assert cache.is_deleted()
    with pytest.raises(ValueError, match=r"the cache's array was donated, and no result was set: set cache\.array"):
        engine.store([0], [0], after=cache)
    assert engine.submitted == 0
    with pytest.warns(kvoffload.KVOffloadWarning, match="array was donated and no result was set") as caught:
        array = cache.arrays
    assert [each.filename for each in caught] == [__file__]
    assert not array.is_deleted()
    cache.arrays = update(array, 5.0)
    engine.store([2], [0], after=cache)
    engine.load([0], [3], after=cache)
    assert (np.asarray(cache.arrays)[:, 3] == 5).all()

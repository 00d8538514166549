"""Interrupts in the cache for JAX: no array that the library holds is lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from interrupts import interrupted_everywhere
from random_programs import jax_on

import kvoffload
from kvoffload import OffloadEngine
from kvoffload.jax import OwnedCache

PLANES, BLOCKS, WIDTH = 2, 6, 8


@pytest.fixture
def gpu_jax(gpu_device: kvoffload.Device) -> Iterator[Any]:
    with jax_on(gpu_device) as module:
        yield module


def test_reading_an_owned_cache_after_a_load(jax: Any, device: kvoffload.Device) -> None:  # noqa: ARG001
    cache = OwnedCache(device, (PLANES, BLOCKS, WIDTH), "float32", plane_axis=0, block_axis=1)
    with OffloadEngine(cache.layout, device=device, num_slots=2, sm_limit=0) as engine:

        def read_after_load(value: int) -> Callable[[], object]:
            engine.slots[0].view(np.float32)[:] = value
            engine.load([0], [1], after=cache).wait()
            return lambda: cache.arrays

        for value, _ in interrupted_everywhere(read_after_load):
            before = cache.unordered
            assert (np.asarray(cache.arrays)[:, 1] == value).all()
            assert cache.arrays is cache.arrays
            assert before.is_deleted() or before is cache.arrays


def test_setting_an_owned_cache(jax: Any, device: kvoffload.Device) -> None:
    cache = OwnedCache(device, (PLANES, BLOCKS, WIDTH), "float32", plane_axis=0, block_axis=1)
    update = jax.jit(lambda array, value: array.at[:, 2].set(value), donate_argnums=0)
    with OffloadEngine(cache.layout, device=device, num_slots=2, sm_limit=0) as engine:

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


def test_an_owned_cache_recovers_when_the_result_of_a_step_is_lost(jax: Any, device: kvoffload.Device) -> None:
    """As after an interrupt between a step and the assignment of its result."""
    cache = OwnedCache(device, (PLANES, BLOCKS, WIDTH), "float32", plane_axis=0, block_axis=1)
    update = jax.jit(lambda array: array.at[:, 2].set(5), donate_argnums=0)
    with OffloadEngine(cache.layout, device=device, num_slots=2, sm_limit=0) as engine:
        update(cache.arrays)
        assert cache.is_deleted()
        with pytest.raises(ValueError, match="after was deleted"):
            engine.store([0], [0], after=cache)
        with pytest.warns(kvoffload.KVOffloadWarning, match="array was donated and no result was set"):
            array = cache.arrays
        assert not array.is_deleted()
        cache.arrays = update(array)
        engine.store([2], [0], after=cache)
        engine.load([0], [3], after=cache)
        assert (np.asarray(cache.arrays)[:, 3] == 5).all()


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_what_a_lost_step_wrote_is_stored_on_a_gpu(gpu_jax: Any, gpu_device: kvoffload.Device) -> None:
    """The step still runs when its result is lost, so reading the array has to wait for it."""
    jax = gpu_jax
    slow = jax.jit(
        lambda c, a: c.at[:].set(jax.lax.fori_loop(0, 60, lambda _, x: x @ x * 1e-4, a)[0, 0] * 0 + 3), donate_argnums=0
    )
    burn = jax.numpy.ones((6144, 6144), jax.numpy.bfloat16)
    cache = OwnedCache(gpu_device, (PLANES, BLOCKS, WIDTH), "float32", plane_axis=0, block_axis=1)
    with OffloadEngine(cache.layout, device=gpu_device, num_slots=2) as engine:
        cache.arrays = slow(cache.arrays, burn)
        cache.arrays = jax.jit(lambda c: c * 0, donate_argnums=0)(cache.arrays)
        engine.slots[:] = 0
        slow(cache.arrays, burn)
        with pytest.warns(kvoffload.KVOffloadWarning, match="array was donated and no result was set"):
            array = cache.arrays
        assert array.unsafe_buffer_pointer() == cache.memories[0].address
        engine.store([2], [0], after=cache).wait(30)
        assert (engine.slots[0].view(np.float32)[: PLANES * WIDTH] == 3).all()

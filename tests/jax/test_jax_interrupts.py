"""Interrupts in an OwnedCache of one device and of two: what is read afterwards is right on every device, no array that
the library holds is lost, and a lost result is recovered.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from interrupts import interrupted_everywhere
from random_programs import jax_on
from sharded_jax import FORMS, cache_in_form, planes_of, simulated_devices

import kvoffload
from kvoffload import OffloadEngine
from kvoffload.jax import OwnedCache

PLANES, BLOCKS, WIDTH = 2, 6, 8


class Owned(NamedTuple):
    """A cache, an engine over it, the pool of each device, and a step of a model, which sets block 2 to a value."""

    cache: OwnedCache
    engine: Any
    pools: list[Any]
    update: Callable[[Any, float], Any]

    def fill(self, value: float) -> None:
        """Slot 0, on every device."""
        for pool in self.pools:
            pool[0].view(np.float32)[:] = value


@pytest.fixture(params=[(count, form) for count in (1, 2) for form in FORMS], ids="{0[0]}-{0[1]}".format)
def owned(request: pytest.FixtureRequest, seed: int) -> Iterator[Owned]:
    count, form = request.param
    with simulated_devices(count, seed) as on:
        several = count > 1
        devices, sharding = (on.devices, on.sharding(None, "heads")) if several else (on.devices[0], None)
        cache = cache_in_form(on.jax, form, devices, (PLANES, BLOCKS, WIDTH), "float32", sharding)

        def update(arrays: Any, value: float) -> Any:
            if form == "array":
                return arrays.at[:, 2].set(value)
            return [array.at[2].set(value) for array in arrays]

        placed = {"out_shardings": cache.sharding} if several else {}
        opened: Any = (
            on.engine(cache, 2)
            if several
            else OffloadEngine(cache.layout, device=on.devices[0], num_slots=2, staging_bytes=0)
        )
        with opened as engine:
            pools = list(engine.slots) if several else [engine.slots]
            yield Owned(cache, engine, pools, on.jax.jit(update, donate_argnums=0, **placed))


@pytest.fixture
def gpu_jax(gpu_device: kvoffload.Device) -> Iterator[Any]:
    with jax_on(gpu_device) as module:
        yield module


def leaves(arrays: Any) -> list[Any]:
    return arrays if isinstance(arrays, list) else [arrays]


def test_reading_it_after_a_load(owned: Owned) -> None:
    cache = owned.cache

    def read_after_load(value: int) -> Callable[[], object]:
        owned.fill(value)
        owned.engine.load([0], [1], after=cache).wait(10)
        return lambda: cache.arrays

    for value, _ in interrupted_everywhere(read_after_load):
        before = cache.unordered
        assert (planes_of(cache)[:, 1] == value).all()
        now = cache.arrays
        assert all(one is other for one, other in zip(leaves(now), leaves(cache.arrays), strict=True))
        assert all(old.is_deleted() or old is new for old, new in zip(leaves(before), leaves(now), strict=True))


def test_setting_it(owned: Owned) -> None:
    cache = owned.cache

    def set_result(value: int) -> Callable[[], object]:
        result = owned.update(cache.arrays, float(value))
        return lambda: setattr(cache, "arrays", result)

    for value, raised in interrupted_everywhere(set_result):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", kvoffload.KVOffloadWarning)
            found = set(planes_of(cache)[:, 2].ravel().tolist())
        assert found <= {float(value - 1), float(value)}
        assert raised or found == {float(value)}
        cache.arrays = owned.update(cache.arrays, float(value))
        owned.engine.store([2], [0], after=cache)
        owned.engine.load([0], [3], after=cache)
        assert (planes_of(cache)[:, 2:4] == value).all()


def test_following_it(owned: Owned) -> None:
    """To ask what is to be followed changes nothing."""
    cache, engine = owned.cache, owned.engine
    owned.fill(9)
    engine.load([0], [1], after=cache)
    assert (planes_of(cache)[:, 1] == 9).all()
    for _ in interrupted_everywhere(lambda _: cache.after):
        engine.store([1], [1], after=cache).wait(10)
        nbytes = 4 * PLANES * WIDTH // len(owned.pools)
        assert all((pool[1, :nbytes].view(np.float32) == 9).all() for pool in owned.pools)


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

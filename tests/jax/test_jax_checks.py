"""What the caches for JAX refuse, with errors that name the argument, the value and what is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from random_programs import jax_on
from sharded_jax import JaxDevices, simulated_devices

import kvoffload
from kvoffload import LayoutError, OffloadEngine
from kvoffload.jax import AdoptedCache, CallbackCache, OwnedCache, StagedCache, from_device

SHAPE = (4, 6, 8)  # planes, blocks, elements
AXES: dict[str, Any] = {"plane_axis": 0, "block_axis": 1}
DONATED = "array was donated and its result was not set, so JAX has freed the memory of the cache: close its engines"


@pytest.fixture
def jax(device: kvoffload.Device) -> Iterator[Any]:
    with jax_on(device) as module:
        yield module


@pytest.fixture
def two(seed: int) -> Iterator[JaxDevices]:
    with simulated_devices(2, seed) as on:
        yield on


def owned(device: kvoffload.Device, jax: Any) -> OwnedCache:  # noqa: ARG001
    return OwnedCache(device, SHAPE, "float32", **AXES)


def staged(device: kvoffload.Device, jax: Any) -> StagedCache:
    return StagedCache(device, jax.numpy.zeros(SHAPE), stage_blocks=2, **AXES)


# arrays that are set


@pytest.mark.parametrize("make", [owned, staged])
def test_what_is_set_must_be_an_update(jax: Any, device: kvoffload.Device, make: Callable[..., Any]) -> None:
    cache, jnp = make(device, jax), jax.numpy
    before = cache.array
    with pytest.raises(
        LayoutError, match=r"array must be float32 of shape \(4, 6, 8\), got float32 of \(4, 3, 8\): set"
    ):
        cache.array = jnp.zeros((4, 3, 8))
    with pytest.raises(LayoutError, match=r"array must be float32 of shape .*, got float16 of .*: set it to the updat"):
        cache.array = jnp.zeros(SHAPE, "float16")
    with pytest.raises(LayoutError, match=r"array must be a jax\.Array, got ndarray: set it to the updated cache"):
        cache.array = np.zeros(SHAPE, "float32")
    with pytest.raises(LayoutError, match=r"array must be a jax\.Array, got ShapeDtypeStruct"):
        cache.array = jax.ShapeDtypeStruct(SHAPE, "float32")
    deleted = jnp.zeros(SHAPE)
    deleted.delete()
    with pytest.raises(LayoutError, match=r"array was deleted, .*: float32 of shape \(4, 6, 8\); pass the array that"):
        cache.array = deleted

    def traced(array: Any) -> Any:
        cache.array = array
        return array

    with pytest.raises(LayoutError, match=r"array must be a jax\.Array with memory, got .*Tracer.*: leave the jitted"):
        jax.jit(traced)(jnp.zeros(SHAPE))
    assert cache.array is before


@pytest.mark.parametrize(("make", "said"), [(owned, "array must be on one device"), (staged, "array is on NamedShard")])
def test_an_array_on_two_devices_cannot_be_set(two: JaxDevices, make: Callable[..., Any], said: str) -> None:
    cache = make(two.devices[0], two.jax)
    with pytest.raises(LayoutError, match=said):
        cache.array = two.jax.device_put(np.zeros(SHAPE, "float32"), two.sharding("heads"))


def test_a_staged_cache_may_move(jax: Any, device: kvoffload.Device) -> None:
    cache = staged(device, jax)
    with OffloadEngine(cache.layout, device=device, num_slots=2, sm_limit=0) as engine:
        for value in (3, 4):
            cache.array = jax.numpy.full(SHAPE, value, "float32")
            cache.store(engine, [5], [1])[0].wait(10)
            assert (engine.slots[1, : engine.layout.groups[0].bytes_per_block].view("float32") == value).all()


# arrays that are lost


def test_a_lost_array_of_a_staged_cache_is_refused(jax: Any, device: kvoffload.Device) -> None:
    cache = staged(device, jax)
    with OffloadEngine(cache.layout, device=device, num_slots=2, sm_limit=0) as engine:
        jax.jit(lambda array: array + 1, donate_argnums=0)(cache.array)
        assert cache.is_deleted()
        assert repr(cache) == "StagedCache((4, 6, 8), float32, stage_blocks=2)"
        for use in (
            lambda: cache.array,
            lambda: cache.store(engine, [0], [0]),
            lambda: cache.load(engine, [0], [0]),
            lambda: cache.__dlpack__(),
        ):
            with pytest.raises(LayoutError, match=DONATED):
                use()
        with pytest.raises(ValueError, match="after was deleted, or donated"):
            engine.store([0], [0], after=cache)
        assert engine.submitted == 0


def test_staged_and_adopted_caches_say_the_same_of_a_lost_array(jax: Any, device: kvoffload.Device) -> None:
    for cache in (staged(device, jax), AdoptedCache(device, jax.numpy.zeros(SHAPE), **AXES)):
        cache.array.delete()
        with pytest.raises(LayoutError, match=DONATED):
            _ = cache.array


# constructors


def test_a_cache_needs_a_device(jax: Any) -> None:
    wrong: Any = 3
    for make in (
        lambda: OwnedCache(wrong, SHAPE, "float32", **AXES),
        lambda: StagedCache(wrong, jax.numpy.zeros(SHAPE), **AXES),
        lambda: AdoptedCache(wrong, jax.numpy.zeros(SHAPE), **AXES),
        lambda: CallbackCache(wrong, jax.numpy.zeros(SHAPE), **AXES),
    ):
        with pytest.raises(TypeError, match=r"device must be a device from open_device\(\), got 3"):
            make()


@pytest.mark.usefixtures("jax")
def test_device_memory_must_be_that() -> None:
    wrong: Any = np.ones(3)
    with pytest.raises(TypeError, match=r"memory must be a DeviceArray from Device\.empty\(\), got array\(\[1"):
        from_device(wrong)


@pytest.mark.parametrize("make", [AdoptedCache, CallbackCache, StagedCache])
def test_arrays_of_several_devices_and_deleted_ones_are_no_caches(two: JaxDevices, make: Any) -> None:
    spread = two.jax.device_put(np.zeros(SHAPE, "float32"), two.sharding("heads"))
    with pytest.raises(LayoutError, match=r"^array (must be on one device, got|is on) NamedSharding.*device_put"):
        make(two.devices[0], spread, **AXES)
    spread.delete()
    with pytest.raises(LayoutError, match="array was deleted"):
        make(two.devices[0], spread, **AXES)


@pytest.mark.parametrize("wrong", [0, -1, True, 2.5, None])
def test_stage_blocks_is_a_positive_integer(jax: Any, device: kvoffload.Device, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"stage_blocks must be an integer of at least 1, got {wrong}"):
        StagedCache(device, jax.numpy.zeros(SHAPE), stage_blocks=wrong, **AXES)


def test_axes_of_a_staged_cache_are_two_of_its_array(jax: Any, device: kvoffload.Device) -> None:
    array = jax.numpy.zeros(SHAPE)
    wrong: Any
    for wrong in (9, 3, -4, True, "0", None):
        with pytest.raises(LayoutError, match=rf"plane_axis must be an axis of shape \(4, 6, 8\), got '?{wrong}"):
            StagedCache(device, array, plane_axis=wrong, block_axis=0)
        with pytest.raises(LayoutError, match=rf"block_axis must be an axis of shape \(4, 6, 8\), got '?{wrong}"):
            StagedCache(device, array, plane_axis=0, block_axis=wrong)
    with pytest.raises(LayoutError, match="plane_axis and block_axis must differ, both are 1"):
        StagedCache(device, array, plane_axis=1, block_axis=-2)

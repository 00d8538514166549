"""What the caches for JAX refuse, with errors that name the argument, the value and what is right."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from sharded_jax import JaxDevices, two_devices

import kvoffload
from kvoffload import LayoutError
from kvoffload.jax import OwnedCache, from_device

SHAPE = (4, 6, 8)  # planes, blocks, elements
AXES: dict[str, Any] = {"plane_axis": 0, "block_axis": 1}


two = pytest.fixture(two_devices)


def owned(device: kvoffload.Device) -> OwnedCache:
    return OwnedCache(device, SHAPE, "float32", **AXES)


# arrays that are set


def test_what_is_set_must_be_an_update(jax: Any, device: kvoffload.Device) -> None:
    cache, jnp = owned(device), jax.numpy
    before = cache.arrays
    with pytest.raises(LayoutError, match=r"array must be float32 of shape .*, got float16 of .*: set it to the updat"):
        cache.arrays = jnp.zeros(SHAPE, "float16")
    with pytest.raises(LayoutError, match=r"array must be a jax\.Array, got ShapeDtypeStruct"):
        cache.arrays = jax.ShapeDtypeStruct(SHAPE, "float32")

    def traced(array: Any) -> Any:
        cache.arrays = array
        return array

    with pytest.raises(LayoutError, match=r"array must be a jax\.Array with memory, got .*Tracer.*: leave the jitted"):
        jax.jit(traced)(jnp.zeros(SHAPE))
    assert cache.arrays is before


def in_order(jax: Any, order: tuple[int, ...], sharding: Any) -> Any:
    """A step whose result has its axes in this order in memory. XLA may give it the donated memory all the same."""
    layouts = importlib.import_module("jax.experimental.layout")
    placed = layouts.Format(layouts.Layout(order), sharding)
    return jax.jit(lambda array: array + 1, donate_argnums=0, out_shardings=placed)


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_an_update_with_another_order_in_memory_is_refused(
    jax: Any, device: kvoffload.Device, order: tuple[int, ...]
) -> None:
    cache = owned(device)
    cache.arrays = in_order(jax, (0, 1, 2), cache.arrays.sharding)(cache.arrays)
    other = in_order(jax, order, cache.arrays.sharding)(cache.arrays)
    words = rf"array must have its axes in memory in the order of its shape, got the order \({order[0]}, {order[1]}"
    with pytest.raises(LayoutError, match=words):
        cache.arrays = other
    with pytest.raises(LayoutError, match=words):
        OwnedCache(device, other, adopt=True, **AXES)
    with pytest.warns(kvoffload.KVOffloadWarning, match="array was donated and no result was set"):
        assert (np.asarray(cache.arrays) == 1).all()


def test_a_sharded_update_with_another_order_in_memory_is_refused(two: JaxDevices) -> None:
    cache = OwnedCache(two.devices, SHAPE, "float32", sharding=two.sharding("heads"), **AXES)
    with pytest.raises(LayoutError, match=r"array must have its axes in memory .*, got the order \(2, 0, 1\)"):
        cache.arrays = in_order(two.jax, (2, 0, 1), cache.sharding)(cache.arrays)


def test_an_array_on_two_devices_cannot_be_set(two: JaxDevices) -> None:
    cache = owned(two.devices[0])
    with pytest.raises(LayoutError, match="array must be on one device"):
        cache.arrays = two.jax.device_put(np.zeros(SHAPE, "float32"), two.sharding("heads"))


# constructors


@pytest.mark.usefixtures("jax")
def test_a_cache_needs_a_device() -> None:
    wrong: Any = 3
    with pytest.raises(TypeError, match=r"devices must be a device from open_device\(\), or a list of them, got 3"):
        OwnedCache(wrong, SHAPE, "float32", **AXES)


@pytest.mark.usefixtures("jax")
def test_device_memory_must_be_that() -> None:
    wrong: Any = np.ones(3)
    with pytest.raises(TypeError, match=r"memory must be a DeviceArray from Device\.empty\(\), got array\(\[1"):
        from_device(wrong)


def test_what_is_followed_must_be_an_array_that_is_there(jax: Any, device: kvoffload.Device) -> None:
    cache, memory, deleted = owned(device), device.empty((4, 4), "float32"), jax.numpy.ones(3)
    deleted.delete()
    wrong: Any = 5
    cases: list[tuple[Any, type[Exception], str]] = [
        (wrong, TypeError, r"must be a jax\.Array, got int"),
        (deleted, ValueError, "was deleted, or donated to a computation"),
    ]
    for given, kind, said in cases:
        with pytest.raises(kind, match=rf"^after {said}"):
            from_device(memory, after=given)
        with pytest.raises(kind, match=rf"^results\[0\] {said}"):
            cache.after(given)

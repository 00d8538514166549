"""The cache for JAX on a simulated device, where JAX computes on the CPU: the same bytes, no streams."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from random_programs import JaxProgram, run_random_program
from sharded_jax import FORMS, cache_in_form, planes_of

import kvoffload
from kvoffload import KVLayout, OffloadEngine
from kvoffload.jax import OwnedCache, from_device


def test_without_jax_the_error_says_what_to_install(device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(kvoffload.CapabilityError, match=r"needs JAX.*pip install 'kvoffload\[jax\]'"):
        OwnedCache(device, (2, 4, 8), "float32", plane_axis=0, block_axis=1)
    with pytest.raises(kvoffload.CapabilityError, match=r"pip install 'kvoffload\[jax\]'"):
        OwnedCache([device], (2, 4, 8), "float32", sharding=None, plane_axis=0, block_axis=1)
    with pytest.raises(kvoffload.CapabilityError, match=r"pip install 'kvoffload\[jax\]'"):
        from_device(device.empty((2, 4), "float32"))


def test_random_steps(jax: Any, device: kvoffload.Device, seed: int) -> None:
    assert run_random_program(JaxProgram(jax, device), 150, seed) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
def test_an_owned_cache_updates_stores_and_loads(jax: Any, device: kvoffload.Device, dtype: str) -> None:
    jnp = jax.numpy
    cache = OwnedCache(device, (4, 16, 8, 32), dtype, plane_axis=0, block_axis=1)
    update = jax.jit(lambda array, ids, values: array.at[:, ids].set(values), donate_argnums=0)
    assert (cache.layout.dtype, cache.layout.on_default_stream) == (dtype, False)
    assert bool((cache.arrays == 0).all())
    with OffloadEngine(cache.layout, device=device, num_slots=8, staging_bytes=0) as engine:
        cache.arrays = update(cache.arrays, jnp.array([1, 2]), jnp.full((4, 2, 8, 32), 3, dtype))
        with pytest.raises(ValueError, match="after=None stands for the legacy default stream"):
            engine.store([1], [0])
        engine.store([1, 2], [5, 6], after=cache)
        engine.load([5, 6], [9, 10], after=cache)
        assert bool((cache.arrays[:, 9:11] == 3).all())
        assert bool((cache.arrays[:, 3:9] == 0).all())


def test_a_tree_of_arrays_whose_slots_are_coded(jax: Any, device: kvoffload.Device) -> None:
    jnp, random = jax.numpy, jax.random
    shape = jax.ShapeDtypeStruct((8, 8, 32), jnp.bfloat16)
    cache = OwnedCache(device, {"k": shape, "v": shape}, plane_axis=None, block_axis=0)
    layout = cache.layout.with_codec("bf16-12")
    assert layout.groups[0].planes == cache.layout.groups[0].planes
    values = {name: random.normal(random.key(number), shape.shape, shape.dtype) for number, name in enumerate("kv")}
    fill = jax.jit(lambda arrays, given: jax.tree.map(lambda a, b: a.at[:].set(b), arrays, given), donate_argnums=0)
    with OffloadEngine(layout, device=device, num_slots=4) as engine:
        cache.arrays = fill(cache.arrays, values)
        assert engine.store([1, 2], [3, 0], after=cache).wait(30).unfit == frozenset()
        engine.load([3, 0], [6, 7], after=cache)
        for name, array in cache.arrays.items():
            assert bool((array[6:8] == values[name][1:3]).all())
            assert bool((array[:6] == values[name][:6]).all())


def test_a_block_major_cache_is_addressed_by_block_and_plane(jax: Any, device: kvoffload.Device) -> None:
    """A paged gather and a paged update, as a decoder does them; and a block is one copy."""
    jnp = jax.numpy
    cache = OwnedCache(device, (16, 4, 8, 32), "float32", plane_axis=1, block_axis=0, blocks_per_slot=2)
    assert cache.layout.groups[0].slot_order == "block-major"
    write = jax.jit(lambda array, blocks, plane, values: array.at[blocks, plane].set(values), donate_argnums=0)
    table = jnp.array([5, 6])
    values = jnp.arange(2 * 8 * 32, dtype="float32").reshape(2, 8, 32)
    with OffloadEngine(cache.layout, device=device, num_slots=4, staging_bytes=0) as engine:
        cache.arrays = write(cache.arrays, table, 3, values)
        device.simulator.faults.calls = []
        engine.store([5, 6], [1], after=cache).wait(10)
        engine.load([1], [9, 10], after=cache).wait(10)
        copies = [name for name, *_ in device.simulator.faults.calls if name.startswith("cuMemcpy")]
        assert len(copies) == 2, "both blocks are one range on both sides"
        assert bool((cache.arrays[table + 4, 3] == values).all())
        assert (engine.slots[1].view(np.float32).reshape(2, 4, 8, 32)[:, 3] == np.asarray(values)).all()


Make = Callable[[], OwnedCache]


@pytest.fixture(params=FORMS)
def make(request: pytest.FixtureRequest, jax: Any, device: kvoffload.Device) -> Make:
    """Makes a cache of zeros, (2, 4, 8) float32, as one array, as a list of arrays, or of arrays of JAX's."""
    return lambda: cache_in_form(jax, request.param, device, (2, 4, 8), "float32")


def leaves(arrays: Any) -> list[Any]:
    return arrays if isinstance(arrays, list) else [arrays]


def add_one(jax: Any, **options: Any) -> Any:
    return jax.jit(lambda arrays: jax.tree.map(lambda array: array + 1, arrays), **options)


def test_arrays_from_before_a_transfer_are_deleted(make: Make, device: kvoffload.Device) -> None:
    cache = make()
    with OffloadEngine(cache.layout, device=device, num_slots=2, staging_bytes=0) as engine:
        old = cache.arrays
        assert all(one is other for one, other in zip(leaves(cache.arrays), leaves(old), strict=True))
        engine.load([0], [1], after=cache)
        assert not any(one is other for one, other in zip(leaves(cache.arrays), leaves(old), strict=True))
        for each in leaves(old):
            with pytest.raises(ValueError, match="after was deleted"):
                engine.load([0], [1], after=each)


def test_what_was_computed_concurrently_with_a_transfer_is_refused_on_a_simulated_device(
    make: Make, jax: Any, device: kvoffload.Device
) -> None:
    """It would be copied back over what was loaded meanwhile."""
    cache = make()
    with OffloadEngine(cache.layout, device=device, num_slots=2, staging_bytes=0) as engine:
        engine.slots[0].view(np.float32)[:] = 5
        before = cache.arrays
        engine.load([0], [1], after=cache)
        computed = add_one(jax, donate_argnums=0)(before)
        with pytest.raises(
            kvoffload.TransferError, match="concurrently with transfers, which a simulated device cannot do"
        ):
            cache.arrays = computed
        with pytest.warns(kvoffload.KVOffloadWarning, match="array was donated and no result was set"):
            assert (planes_of(cache)[:, 1] == 5).all()


def test_transfers_of_a_later_engine_are_followed_too(make: Make, device: kvoffload.Device) -> None:
    """As many as the first engine's, which is gone."""
    cache = make()
    for value in (1, 2):
        before = cache.arrays
        with OffloadEngine(cache.layout, device=device, num_slots=2, staging_bytes=0) as engine:
            engine.slots[0].view(np.float32)[:] = value
            engine.load([0], [1], after=cache)
            assert cache.arrays is not before
            assert (planes_of(cache)[:, 1] == value).all()
        del engine
        gc.collect()
        before = cache.arrays


def test_an_update_that_was_not_donated_is_refused_as_on_a_gpu(make: Make, jax: Any) -> None:
    cache = make()
    before = cache.arrays
    zeros = jax.tree.map(jax.numpy.zeros_like, before)
    for not_donated in (add_one(jax)(before), zeros):
        with pytest.raises(kvoffload.LayoutError, match=r"was not donated to it, which makes a copy on a GPU\. Donate"):
            cache.arrays = not_donated
        assert all(one is other for one, other in zip(leaves(cache.arrays), leaves(before), strict=True))
    assert (cache.memories[0].to_numpy() == 0).all()
    cache.arrays = before
    cache.arrays = add_one(jax, donate_argnums=0)(before)
    assert (planes_of(cache) == 1).all()
    first = leaves(cache.arrays)[0]
    copied = cache.memories[0].to_numpy()[: first.nbytes]
    assert (copied.view(np.float32) == 1).all()


@pytest.mark.usefixtures("jax")
def test_what_keys_need_is_named_at_the_cache(device: kvoffload.Device) -> None:
    axes: Any = {"plane_axis": 1, "block_axis": 0, "tokens_per_block": 16, "block_axes": ("tokens", "heads", "dim")}
    cache = OwnedCache(device, (8, 2, 16, 4, 8), "bfloat16", **axes)
    layout = cache.layout
    assert (layout.dtype, layout.tokens_per_block, layout.block_axes) == ("bfloat16", 16, ("tokens", "heads", "dim"))
    assert len(kvoffload.chain_keys(range(32), layout=layout, salt="model")) == 2
    bare = OwnedCache(device, (8, 2, 16, 4, 8), "bfloat16", plane_axis=1, block_axis=0)
    with pytest.raises(
        kvoffload.LayoutError, match="block_axes and tokens_per_block of the layout are None, and keys depend on them"
    ):
        kvoffload.chain_keys(range(32), layout=bare.layout, salt="model")


def test_options_of_a_cache_are_named_in_its_signature() -> None:
    cache = OwnedCache
    parameters = inspect.signature(cache).parameters
    named = {"plane_axis", "block_axis", "tokens_per_block", "block_axes", "blocks_per_slot", "slot_order"}
    assert named <= set(parameters)
    assert not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    assert cache.__doc__ is not None
    assert all(name in cache.__doc__ for name in named)
    assert "needed for keys" in cache.__doc__


def test_arrays_of_the_cpu_are_no_planes(jax: Any) -> None:
    cpu = jax.device_put(np.zeros((2, 4, 8)), jax.devices("cpu")[0])
    with pytest.raises(kvoffload.LayoutError, match="array is not in GPU memory"):
        KVLayout.from_stacked(cpu, plane_axis=0, block_axis=1)

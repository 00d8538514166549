"""JAX on a GPU: its arrays, its order without streams to name, and the cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from random_programs import ELEMENTS, PLANES, SHAPE, JaxProgram, JaxTreeProgram, jax_on, run_random_program
from sharded_jax import FORMS, cache_in_form, planes_of

import kvoffload
from kvoffload import KVLayout, OffloadEngine
from kvoffload.jax import OwnedCache, from_device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PAGED: dict[str, Any] = {"block_axis": 0, "plane_axis": None}


@pytest.fixture(autouse=True)
def jax(gpu_device: kvoffload.Device) -> Iterator[Any]:
    with jax_on(gpu_device) as module:
        yield module


def test_two_thousand_random_steps(jax: Any, gpu_device: kvoffload.Device, seed: int) -> None:
    assert run_random_program(JaxProgram(jax, gpu_device), 2000, seed) == 0


def test_without_the_ordering_calls_these_steps_go_wrong(jax: Any, gpu_device: kvoffload.Device, seed: int) -> None:
    programs = (run_random_program(JaxProgram(jax, gpu_device, ordered=False), 2000, seed + more) for more in range(8))
    assert any(programs)  # now and then one happens to read the right bytes


# arrays in


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "int8"])
def test_arrays_of_jax_are_planes_without_a_copy(jax: Any, gpu_device: kvoffload.Device, dtype: str) -> None:
    cache = jax.random.randint(jax.random.key(0), SHAPE, 0, 100).astype(dtype)
    layout = KVLayout.from_stacked(cache, plane_axis=0, block_axis=1)
    assert (layout.dtype, layout.on_default_stream) == (dtype, False)
    assert layout.groups[0].planes[0].address == cache.unsafe_buffer_pointer()
    with OffloadEngine(layout, device=gpu_device, num_slots=2) as engine:
        engine.store([1, 2], [0, 1], after=cache)
        engine.load([0, 1], [3, 4], after=cache).wait(30)
    assert bool((cache[:, 1:3] == cache[:, 3:5]).all())


def test_a_list_of_arrays_of_jax(jax: Any, gpu_device: kvoffload.Device) -> None:
    arrays = [jax.random.normal(jax.random.key(p), SHAPE[1:], jax.numpy.bfloat16) for p in range(PLANES)]
    layout = KVLayout.from_arrays(arrays)
    with OffloadEngine(layout, device=gpu_device, num_slots=2) as engine:
        engine.store([1, 2], [0, 1], after=arrays)
        engine.load([0, 1], [3, 4], after=arrays).wait(30)
    assert all(bool((array[1:3] == array[3:5]).all()) for array in arrays)


def test_an_array_of_jaxs_in_another_layout_has_the_keys_of_its_memory(jax: Any, gpu_device: kvoffload.Device) -> None:
    """JAX lays its memory out as `Format` says; its shape does not show it, and its DLPack strides do."""
    from jax.experimental.layout import Format, Layout

    axes = ("blocks", "tokens", "heads", "dim")
    straight = jax.device_put(jax.numpy.arange(8 * 4 * 2 * 8, dtype="float16").reshape(8, 4, 2, 8))
    other = jax.device_put(straight, Format(Layout((0, 2, 1, 3)), straight.sharding))
    assert KVLayout.from_tree(straight, axes=axes).block_axes == ("tokens", "heads", "dim")
    layout = KVLayout.from_tree(other, axes=axes)
    assert layout.block_axes == ("heads", "tokens", "dim")
    with OffloadEngine(layout, device=gpu_device, num_slots=1) as engine:
        engine.store([3], [0], after=other).wait(30)
        slot = engine.slots[0, : layout.groups[0].bytes_per_block].view(np.float16).reshape(2, 4, 8)
        assert (slot.transpose(1, 0, 2) == np.asarray(straight[3])).all()
    with pytest.raises(kvoffload.LayoutError, match=r"^arrays\[1\] of shape .* use KVLayout\.from_tree\("):
        KVLayout.from_arrays([straight, other], tokens_per_block=4, block_axes=axes[1:])
    with pytest.raises(kvoffload.LayoutError, match=r"arrays\[1\] in the order \['heads', 'tokens', 'dim'\]"):
        KVLayout.from_tree([straight, other], axes=axes)
    with pytest.raises(kvoffload.LayoutError, match=r"array must have its axes in memory in the order"):
        OwnedCache(gpu_device, other, adopt=True, **PAGED)


def test_an_update_that_changes_the_order_of_memory_is_refused(jax: Any, gpu_device: kvoffload.Device) -> None:
    """Also where XLA has put it into the donated memory."""
    from jax.experimental.layout import Format, Layout

    cache = OwnedCache(gpu_device, (8, 4, 2, 64), "float16", **PAGED)
    array = cache.arrays
    placed = Format(Layout((0, 2, 1, 3)), array.sharding)
    result = jax.jit(lambda array: array + 1, donate_argnums=0, out_shardings=placed)(array)
    with pytest.raises(kvoffload.LayoutError, match=r"got the order \(0, 2, 1, 3\)"):
        cache.arrays = result


def test_after_none_is_refused_and_says_what_to_pass(jax: Any, gpu_device: kvoffload.Device) -> None:
    layout = KVLayout.from_stacked(jax.numpy.zeros(SHAPE), plane_axis=0, block_axis=1)
    with OffloadEngine(layout, device=gpu_device, num_slots=2) as engine:
        for submit in (engine.store, engine.load):
            with pytest.raises(ValueError, match=r"after=None .* pass after=cache, or after=array.* kvoffload.NO_WAIT"):
                submit([0], [0])
        assert engine.submitted == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_store_follows_jax_without_the_host_waiting(jax: Any, gpu_device: kvoffload.Device, form: str) -> None:
    """It follows all arrays, also if each is computed by a step of its own."""
    slow = slow_step(jax)
    cache = cache_in_form(jax, form, gpu_device, SHAPE, "float32")
    engine = OffloadEngine(cache.layout, device=gpu_device, num_slots=2)
    with engine:
        for layer in (None, *range(PLANES if form != "array" else 0)):
            for value in (2, 3):
                arrays = cache.arrays
                if layer is None:
                    arrays = jax.tree.map(lambda array, value=value: slow(array, value), arrays)
                else:
                    arrays[layer] = slow(arrays[layer], value)
                if value == 2:
                    jax.block_until_ready(arrays)
                    engine.slots[:] = 0
                cache.arrays = arrays  # the second takes about 35 ms
                if value == 2:
                    cache.after()  # compiled
            job = engine.store([5], [0], after=cache)
            assert not job.done, "the call has returned before JAX's computation ended"
            job.wait(30)
            assert bool((engine.slots[0].view(np.float32)[: PLANES * ELEMENTS] == 3).all())


def slow_step(jax: Any) -> Any:
    """A jitted step that fills its array with a number, after some 35 ms."""
    burn = jax.numpy.ones((6144, 6144), jax.numpy.bfloat16)

    def fill(array: Any, value: Any, burn: Any) -> Any:
        burned = jax.lax.fori_loop(0, 60, lambda _, x: x @ x * 1e-4, burn)[0, 0] * 0
        return array.at[:].set((burned + value).astype(array.dtype))

    jitted = jax.jit(fill, donate_argnums=0)
    return lambda array, value: jitted(array, jax.numpy.float32(value), burn)


def test_a_step_of_any_single_array_follows_a_load(jax: Any, gpu_device: kvoffload.Device) -> None:
    """The load follows a slow computation, so it has not ended when the steps are dispatched."""
    slow, read = slow_step(jax), jax.jit(lambda array: array[7, 0] + 0)
    cache = cache_in_form(jax, "tree", gpu_device, SHAPE, "float32")
    with OffloadEngine(cache.layout, device=gpu_device, num_slots=2) as engine:
        engine.load([0], [7], after=cache.after(slow(jax.numpy.zeros(8), 1))).wait(30)
        read(cache.arrays[0]).block_until_ready()  # all is compiled
        for layer in range(PLANES):
            engine.slots[0].view(np.float32)[:] = 10 + layer
            job = engine.load([0], [7], after=cache.after(slow(jax.numpy.zeros(8), 1)))
            arrays = cache.arrays
            found = read(arrays[layer])
            assert not job.done
            assert float(found) == 10 + layer


def test_engines_over_some_of_the_arrays_are_followed(jax: Any, gpu_device: kvoffload.Device) -> None:
    """Also one that does not touch the first array."""
    slow, read = slow_step(jax), jax.jit(lambda array: array[7, 0] + 0)
    cache = cache_in_form(jax, "tree", gpu_device, SHAPE, "float32")
    some = KVLayout([cache.layout.groups[0].planes[2:]], on_default_stream=False)
    with OffloadEngine(some, device=gpu_device, num_slots=2) as engine:
        for value in (5, 6):
            engine.slots[0].view(np.float32)[:] = value
            engine.load([0], [7], after=cache.after(slow(jax.numpy.zeros(8), 1)))
            assert float(read(cache.arrays[PLANES - 1])) == value
            assert float(read(cache.arrays[0])) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_arrays_of_jax_become_a_cache_where_they_are(jax: Any, gpu_device: kvoffload.Device, dtype: str) -> None:
    given = [jax.numpy.full((24, 16, 128), value, dtype) for value in range(8)]
    where = [each.unsafe_buffer_pointer() for each in given]
    cache = OwnedCache(gpu_device, given, adopt=True, **PAGED)
    fill = jax.jit(lambda arrays: [each.at[3].set(2) for each in arrays], donate_argnums=0)
    with OffloadEngine(cache.layout, device=gpu_device, num_slots=2) as engine:
        assert [plane.address for plane in cache.layout.groups[0].planes] == where
        for turn in range(5):
            engine.store([5], [0], after=cache)
            engine.load([0], [20], after=cache)
            assert [float(each[20, 0, 0]) for each in cache.arrays] == list(range(8))
            cache.arrays = fill(cache.arrays)
            assert [each.unsafe_buffer_pointer() for each in cache.arrays] == where, turn
        fill(cache.arrays)
        with pytest.warns(kvoffload.KVOffloadWarning, match="array was donated and no result was set"):
            arrays = cache.arrays
        assert [float(each[3, 0, 0]) for each in arrays] == [2.0] * 8
        with contextlib.suppress(Exception):  # JAX's own
            fill(given)
        assert not any(each.is_deleted() for each in given), "they cannot be donated"
        cache.arrays = fill(cache.arrays)
        assert [each.unsafe_buffer_pointer() for each in cache.arrays] == where


def test_arrays_to_adopt_are_on_the_gpu(jax: Any, gpu_device: kvoffload.Device) -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        given = [jax.numpy.zeros((24, 16, 128))]
    with pytest.raises(kvoffload.LayoutError, match=r"arrays\[0\] is on .*, and the cache on the GPU"):
        OwnedCache(gpu_device, given, adopt=True, **PAGED)


@pytest.mark.parametrize(("by_layer", "adopt"), [(False, False), (True, False), (False, True), (True, True)])
def test_two_thousand_random_steps_of_a_tree(
    jax: Any, gpu_device: kvoffload.Device, seed: int, by_layer: bool, adopt: bool
) -> None:
    program = JaxTreeProgram(jax, gpu_device, by_layer=by_layer, adopt=adopt)
    assert run_random_program(program, 2000, seed) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
def test_a_layer_for_each_array_is_updated_in_place_and_moved(
    jax: Any, gpu_device: kvoffload.Device, dtype: str
) -> None:
    """An array for each of 32 layers: imports, updates and a reinterpretation keep each at its own address."""
    cache = OwnedCache(gpu_device, {"k": [(24, 16, 128)] * 32, "v": [(24, 16, 128)] * 32}, dtype, **PAGED)
    addresses = [plane.address for plane in cache.layout.groups[0].planes]
    fill = jax.jit(
        lambda tree, block, value: jax.tree.map(lambda leaf: leaf.at[block].set(value.astype(leaf.dtype)), tree),
        donate_argnums=0,
    )
    with OffloadEngine(cache.layout, device=gpu_device, num_slots=2) as engine:
        for turn in range(5):
            cache.arrays = fill(cache.arrays, turn, jax.numpy.float32(turn))
            before = jax.tree.leaves(cache.arrays)
            assert [leaf.unsafe_buffer_pointer() for leaf in before] == addresses
            engine.store([turn], [0], after=cache)
            engine.load([0], [20], after=cache)
            assert all(bool((leaf[20].astype("float32") == turn).all()) for leaf in jax.tree.leaves(cache.arrays))
            assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.arrays)] == addresses
            assert all(leaf.is_deleted() for leaf in before)


@pytest.mark.parametrize("factor", [1, 2])
def test_a_block_major_cache_is_updated_in_place_and_moved(jax: Any, gpu_device: kvoffload.Device, factor: int) -> None:
    """A paged update, a store and a load that JAX follows, and a paged gather; the setter checks the address."""
    jnp = jax.numpy
    options: dict[str, Any] = {"block_axis": 0, "plane_axis": 1, "blocks_per_slot": factor}
    cache = OwnedCache(gpu_device, (24, PLANES, 8, 64), "bfloat16", **options)
    write = jax.jit(lambda array, blocks, plane, values: array.at[blocks, plane].set(values), donate_argnums=0)
    read = jax.jit(lambda array, blocks, plane: array[blocks, plane])
    values = jnp.arange(2 * 8 * 64).reshape(2, 8, 64).astype("bfloat16")
    with OffloadEngine(cache.layout, device=gpu_device, num_slots=2) as engine:
        for turn in range(5):
            blocks = jnp.array([4 + turn, 5 + turn])
            cache.arrays = write(cache.arrays, blocks, jnp.int32(turn % PLANES), values + turn)
            slots = range(2 // factor)
            engine.store([4 + turn, 5 + turn], slots, after=cache)
            engine.load(slots, [20, 21], after=cache)
            found = read(cache.arrays, jnp.array([20, 21]), jnp.int32(turn % PLANES))
            assert bool((found == values + turn).all())


# wrong uses that can be told


def test_an_update_that_moved_is_refused(gpu_device: kvoffload.Device) -> None:
    cache = OwnedCache(gpu_device, SHAPE, np.float32, plane_axis=0, block_axis=1)
    with pytest.raises(kvoffload.LayoutError, match="the update made a copy"):
        cache.arrays = cache.arrays + 1
    with pytest.raises(kvoffload.LayoutError, match=r"array must be float32 of shape \(4, 24, 4096\), got float32 of"):
        cache.arrays = cache.arrays[:2]
    with pytest.raises(kvoffload.LayoutError, match=r"array must be a jax.Array, got ndarray"):
        cache.arrays = np.zeros(SHAPE, np.float32)


def test_an_array_from_before_a_transfer_is_deleted(gpu_device: kvoffload.Device) -> None:
    cache = OwnedCache(gpu_device, SHAPE, "bfloat16", plane_axis=0, block_axis=1)
    with OffloadEngine(cache.layout, device=gpu_device, num_slots=2) as engine:
        old = cache.arrays
        assert cache.arrays is old
        engine.load([0], [1], after=cache)
        assert cache.unordered is old
        assert cache.arrays is not old
        with pytest.raises(RuntimeError, match="deleted"):
            _ = old + 1
        with pytest.raises(ValueError, match="after was deleted, or donated"):
            engine.store([0], [0], after=old)
        assert engine.submitted == 1
        assert bool((cache.arrays[:, 0] == 0).all())


@pytest.mark.parametrize("form", FORMS)
def test_a_stale_host_copy_is_not_seen(jax: Any, gpu_device: kvoffload.Device, form: str) -> None:
    cache = cache_in_form(jax, form, gpu_device, SHAPE, "float32")
    with OffloadEngine(cache.layout, device=gpu_device, num_slots=2) as engine:
        assert (planes_of(cache) == 0).all()  # remembered on the arrays
        engine.slots[0].view(np.float32)[:] = 9
        engine.load([0], [7], after=cache)
        assert (planes_of(cache)[:, 7] == 9).all()


def test_our_memory_as_an_array_of_jax(gpu_device: kvoffload.Device) -> None:
    for dtype in ("bfloat16", "float8_e4m3fn", "float16", "int32"):
        memory = gpu_device.empty((4, 8, 1024), dtype)
        array = from_device(memory)
        assert (array.shape, str(array.dtype)) == ((4, 8, 1024), dtype)
        assert array.unsafe_buffer_pointer() == memory.address

"""OwnedCache on several simulated devices, where JAX computes on as many CPU devices: the same bytes, no streams."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_programs import run_random_program
from sharded_jax import PROGRAMS, JaxDevices, ShardedProgram, Spec, simulated_devices, two_devices

import kvoffload
from kvoffload import BlockCache, LayoutError, OffloadEngine
from kvoffload.jax import OwnedCache

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "jax.md"
SHAPE = (8, 6, 4, 4, 2)  # blocks, planes, tokens, heads, head size
AXES: dict[str, Any] = {"block_axis": 0, "plane_axis": 1}
HEADS: Spec = (None, None, None, "heads")


two = pytest.fixture(two_devices)


@pytest.fixture
def four(seed: int) -> Iterator[JaxDevices]:
    with simulated_devices(4, seed) as on:
        yield on


def numbers(shape: tuple[int, ...], dtype: str) -> Any:
    """Small integers, which every type has, as float32."""
    highest = 16 if "float8" in dtype else 100
    return np.random.default_rng(0).integers(0, highest, shape).astype(np.float32)


def updater(jax: Any, cache: OwnedCache) -> Any:
    """A jitted update of some blocks of a block-major cache."""

    def update(array: Any, blocks: Any, values: Any) -> Any:
        return array.at[blocks].set(values.astype(array.dtype))

    return jax.jit(update, donate_argnums=0, out_shardings=cache.sharding)


def contents(cache: OwnedCache) -> Any:
    return np.asarray(cache.arrays).astype(np.float32)


# bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "uint8"])
@pytest.mark.parametrize(
    ("spec", "extents", "shard"),
    [
        ((None, None, None, "heads"), (4,), (8, 6, 4, 1, 2)),
        ((None, "planes", None, "heads"), (2, 2), (8, 3, 4, 2, 2)),
        ((), (4,), SHAPE),
    ],
)
def test_a_cache_is_updated_stored_and_loaded(
    four: JaxDevices, dtype: str, spec: Spec, extents: tuple[int, ...], shard: tuple[int, ...]
) -> None:
    cache = four.cache(SHAPE, dtype, *spec, extents=extents, **AXES)
    assert (cache.shapes.shape, cache.shapes.dtype.name, cache.layout.dtype) == (SHAPE, dtype, dtype)
    assert [each.data.shape for each in cache.arrays.addressable_shards] == [shard] * 4
    assert cache.nbytes == sum(memory.nbytes for memory in cache.memories)
    assert all(not layout.on_default_stream for layout in cache.layout.layouts)
    assert (contents(cache) == 0).all()
    update, expected = updater(four.jax, cache), np.zeros(SHAPE, np.float32)
    with four.engine(cache) as engine:
        expected[[1, 6]] = numbers((2, *SHAPE[1:]), dtype)
        cache.arrays = update(cache.arrays, np.array([1, 6]), expected[[1, 6]])
        engine.store([1, 6], [5, 2], after=cache)
        engine.load([2, 5], [0, 3], after=cache)
        expected[[0, 3]] = expected[[6, 1]]
        assert (contents(cache) == expected).all()
        slices = cache.sharding.devices_indices_map(SHAPE)
        for device, pool, layout in zip(four.of_jax, engine.slots, cache.layout.layouts, strict=True):
            there = expected.astype(np.asarray(cache.unordered).dtype)[slices[device]]
            stored = np.ascontiguousarray(there[[6, 1]]).view(np.uint8).reshape(2, -1)
            assert (pool[[2, 5], : layout.groups[0].bytes_per_block] == stored).all()


def test_a_pipeline_of_planes_first(two: JaxDevices) -> None:
    """Plane-major; each device has half of the planes."""
    cache = two.cache((6, 8, 16), "float32", "planes", plane_axis=0, block_axis=1, blocks_per_slot=2)
    assert [len(layout.groups[0].planes) for layout in cache.layout.layouts] == [3, 3]
    update = two.jax.jit(lambda array, values: array.at[:, [2, 3]].set(values), donate_argnums=0)
    values = numbers((6, 2, 16), "float32")
    with two.engine(cache) as engine:
        cache.arrays = update(cache.arrays, values)
        engine.store([2, 3], [1], after=cache)
        engine.load([1], [7, 0], after=cache)
        assert (np.asarray(cache.arrays)[:, [7, 0]] == values).all()


@pytest.mark.parametrize("order", [(1, 0), (2, 0, 3)])
def test_devices_may_be_in_another_order_than_those_of_the_sharding(four: JaxDevices, order: tuple[int, ...]) -> None:
    on = JaxDevices(four.jax, [four.devices[index] for index in order])
    sharding = JaxDevices(four.jax, [four.devices[index] for index in sorted(order)]).sharding(*HEADS)
    shape = (*SHAPE[:3], 2 * len(order), 2)
    cache = OwnedCache(on.devices, shape, "bfloat16", sharding=sharding, **AXES)
    values = numbers((1, *shape[1:]), "bfloat16")
    with on.engine(cache) as engine:
        cache.arrays = updater(on.jax, cache)(cache.arrays, np.array([4]), values)
        engine.store([4], [0], after=cache)
        engine.load([0], [7], after=cache)
        assert (contents(cache)[7] == values).all()
        slices = cache.sharding.devices_indices_map(shape)
        for device, memory in zip(on.of_jax, cache.memories, strict=True):
            assert memory.device.index == device.id
            there = np.asarray(cache.arrays)[slices[device]]
            assert (memory.to_numpy() == np.ascontiguousarray(there).view(np.uint8).ravel()).all()


@pytest.mark.parametrize(("form", "by_layer"), PROGRAMS)
def test_random_steps(two: JaxDevices, seed: int, form: str, by_layer: bool) -> None:
    assert run_random_program(ShardedProgram(two, form=form, by_layer=by_layer), 100, seed) == 0


def test_a_block_cache_on_it(two: JaxDevices) -> None:
    described = {"tokens_per_block": 4, "block_axes": ("tokens", "heads", "dim")}
    cache = two.cache(SHAPE, "bfloat16", *HEADS, **AXES, **described)
    keys = kvoffload.chain_keys(range(12), layout=cache.layout, salt="")
    values = numbers((3, *SHAPE[1:]), "bfloat16")
    with two.engine(cache) as engine:
        blocks = BlockCache(engine)
        cache.arrays = updater(two.jax, cache)(cache.arrays, np.array([3, 1, 2]), values)
        logits = two.jax.jit(lambda array: array.astype("float32").sum((0, 1, 2, 4)))(cache.arrays)
        blocks.store(keys, [3, 1, 2], after=cache).wait(10)
        cache.arrays = updater(two.jax, cache)(cache.arrays, np.array([3, 1, 2]), 0 * values)
        assert blocks.lookup(keys) == 3
        blocks.load(keys, [5, 6, 7], after=cache.after(logits))
        assert (contents(cache)[5:] == values).all()
        assert (contents(cache)[:5] == 0).all()


def test_updates_by_shard_map_and_with_an_explicit_mesh(two: JaxDevices) -> None:
    """Two ways to keep each device's shard where it is, without naming the sharding of the result."""
    jax = two.jax
    spec = jax.sharding.PartitionSpec(*HEADS)
    kinds = jax.sharding.AxisType
    for kind in (kinds.Auto, kinds.Explicit):
        mesh = jax.sharding.Mesh(np.array(two.of_jax), ("heads",), axis_types=(kind,))
        sharding = jax.sharding.NamedSharding(mesh, spec)
        cache = OwnedCache(two.devices, SHAPE, "float32", sharding=sharding, **AXES)

        def write(shard: Any) -> Any:
            return shard.at[3].set(jax.lax.axis_index("heads") + 1.0)

        step = jax.jit(jax.shard_map(write, mesh=mesh, in_specs=spec, out_specs=spec), donate_argnums=0)
        cache.arrays = step(cache.arrays)
        with two.engine(cache) as engine:
            engine.store([3], [0], after=cache)
            engine.load([0], [4], after=cache)
            assert (np.asarray(cache.arrays)[4] == np.array([1, 1, 2, 2])[:, None]).all()


# what is followed


def test_what_a_transfer_follows_on_each_device(two: JaxDevices) -> None:
    jax = two.jax
    cache = two.cache(SHAPE, "bfloat16", *HEADS, **AXES)
    assert [[shard.devices() for shard in shards] for shards in cache.after()] == [[{each}] for each in two.of_jax]
    sharded = jax.jit(lambda array: array.astype("float32").sum((0, 1, 2, 4)))(cache.arrays)
    replicated = jax.device_put(np.ones(3), two.sharding())
    on_one = jax.device_put(np.ones(3), two.of_jax[1])
    first, second = cache.after(sharded, replicated, on_one)
    assert [shard.shape for shard in first] == [(8, 6, 4, 2, 2), sharded.sharding.shard_shape((4,)), (3,)]
    assert [shard.devices() for shard in second] == [{two.of_jax[1]}] * 4
    with two.engine(cache) as engine:
        engine.store([0], [0], after=cache.after(sharded, replicated, on_one)).wait(10)


def test_results_that_cannot_be_followed_are_refused(two: JaxDevices) -> None:
    jax = two.jax
    cache = two.cache(SHAPE, "float32", *HEADS, **AXES)
    with pytest.raises(TypeError, match=r"results\[1\] must be a jax.Array, got ndarray"):
        cache.after(cache.arrays, np.ones(3))
    deleted = jax.device_put(np.ones(3), two.of_jax[0])
    deleted.delete()
    with pytest.raises(ValueError, match=r"results\[0\] was deleted, or donated to a computation: pass the array that"):
        cache.after(deleted)
    elsewhere = jax.device_put(np.ones(3), jax.devices("cpu")[3])
    with pytest.raises(ValueError, match=r"results\[0\] is on .*, and the cache on"):
        cache.after(elsewhere)


@pytest.mark.parametrize("number", range(2))
def test_transfers_of_one_device_alone_are_followed_too(two: JaxDevices, number: int) -> None:
    """By an engine over the shard of that device."""
    cache = two.cache(SHAPE, "float32", *HEADS, **AXES)
    layout = cache.layout.layouts[number]
    with OffloadEngine(layout, device=two.devices[number], num_slots=2, staging_bytes=0) as engine:
        engine.slots[0].view(np.float32)[:] = 5
        before = cache.arrays
        engine.load([0], [1], after=cache.after()[number])
        assert cache.arrays is not before
        heads = slice(2 * number, 2 * number + 2)
        assert (contents(cache)[1, :, :, heads] == 5).all()
        assert contents(cache).sum() == 5 * SHAPE[1] * SHAPE[2] * 2 * SHAPE[4]


# what is refused


def allocated(on: JaxDevices) -> dict[str, int]:
    for device in on.devices:
        device.reclaim()
    simulator: Any = on.devices[0].simulator
    left: dict[str, int] = simulator.leaks()
    return left


@pytest.mark.parametrize(
    ("spec", "changes", "text"),
    [
        (
            HEADS,
            {"shapes": (8, 6, 4, 3, 2)},
            r"shape \(8, 6, 4, 3, 2\) cannot be divided evenly by sharding .*multiple",
        ),
        (("heads",), {}, r"divides the 8 blocks of block_axis=0, and every device needs every block: divide heads"),
        ((*HEADS, None, None), {}, r"is for 6 axes, and shape \(8, 6, 4, 4, 2\) has fewer"),
        (HEADS, {"block_axis": 1}, r"plane_axis and block_axis must differ"),
        (HEADS, {"plane_axis": 9}, r"plane_axis must be an axis of shape"),
        (HEADS, {"shapes": (8, 0, 4, 4, 2)}, r"shape must be a sequence of positive integers"),
        (HEADS, {"dtype": "words"}, r"dtype"),
        (HEADS, {"blocks_per_slot": 0}, r"blocks_per_slot"),
        (HEADS, {"slot_order": "any"}, r"slot_order must be"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_allocated(
    two: JaxDevices, spec: Spec, changes: dict[str, Any], text: str
) -> None:
    before = allocated(two)
    arguments: dict[str, Any] = {
        "shapes": SHAPE,
        "dtype": "float32",
        "sharding": two.sharding(*spec),
        **AXES,
        **changes,
    }
    with pytest.raises(ValueError, match=text) as caught:
        OwnedCache(two.devices, **arguments)
    assert allocated(two) == before
    assert caught.tb is not None, "what its frames refer to is not garbage"


def test_devices_that_are_not_those_of_the_sharding_are_refused(four: JaxDevices) -> None:
    before = allocated(four)
    two = JaxDevices(four.jax, four.devices[:2])
    for devices in (four.devices, four.devices[1:3], four.devices[:1] * 2, []):
        with pytest.raises(
            LayoutError, match=r"sharding is over \[\('cpu', 0\), \('cpu', 1\)\], and devices are .*give"
        ):
            OwnedCache(devices, SHAPE, "float32", sharding=two.sharding(*HEADS), **AXES)
    with pytest.raises(LayoutError, match=r"sharding is over \[.*\], and devices are \[\('cpu', 0\)\]"):
        OwnedCache(four.devices[0], SHAPE, "float32", sharding=two.sharding(*HEADS), **AXES)
    for wrong in (5, [5]):
        with pytest.raises(TypeError, match=r"devices must be .* from open_device\(\),.* got"):
            OwnedCache(wrong, SHAPE, "float32", sharding=two.sharding(*HEADS), **AXES)  # type: ignore[arg-type]
    one = four.jax.sharding.SingleDeviceSharding(four.of_jax[0])
    for sharding in (None, one, "heads"):
        with pytest.raises(TypeError, match=r"sharding must be a jax\.sharding\.NamedSharding over the devices, got"):
            OwnedCache(two.devices, SHAPE, "float32", sharding=sharding, **AXES)
    kept = two.sharding(*HEADS).with_memory_kind("pinned_host")
    with pytest.raises(LayoutError, match=r"sharding has memory_kind='pinned_host', .* leave memory_kind out"):
        OwnedCache(two.devices, SHAPE, "float32", sharding=kept, **AXES)
    assert allocated(four) == before


def test_a_device_without_room_leaves_nothing_on_the_others(two: JaxDevices) -> None:
    simulator: Any = two.devices[0].simulator
    before = allocated(two)
    simulator.faults.fail_call("cuMemAlloc", nth=2)
    with pytest.raises(kvoffload.KVOffloadError) as caught:
        two.cache(SHAPE, "float32", *HEADS, **AXES)
    assert allocated(two) == before
    assert caught.tb is not None, "what its frames refer to is not garbage"


def test_what_is_no_update_of_the_cache_is_refused(two: JaxDevices) -> None:
    jax = two.jax
    cache = two.cache(SHAPE, "float32", *HEADS, **AXES)
    for other in (two.sharding(), two.sharding(None, "planes"), jax.sharding.SingleDeviceSharding(two.of_jax[0])):
        with pytest.raises(LayoutError, match=r"array must have the sharding .*out_shardings=cache.sharding"):
            cache.arrays = jax.device_put(np.zeros(SHAPE, np.float32), other)
    assert (contents(cache) == 0).all()


def test_the_snippet_of_the_document_runs(two: JaxDevices, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"<!-- run: several devices -->\n```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    program = found[1].replace("kvoffload.open_device(index)", "given[index]")
    exec(program.replace("(512, 64, 16, 8, 128)", "(64, 4, 16, 8, 16)"), {"given": two.devices})
    assert capsys.readouterr().out == "True\n"


def test_it_is_shown(two: JaxDevices) -> None:
    cache = two.cache(SHAPE, "bfloat16", *HEADS, **AXES)
    shown = repr(cache)
    assert shown.startswith("OwnedCache((8, 6, 4, 4, 2), bfloat16, P")
    assert shown.endswith("devices [0, 1])")

"""An OwnedCache of a tree of arrays, an array a layer: bytes, order by all arrays, refusals, interrupts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from random_programs import JaxTreeProgram, run_random_program
from sharded_jax import JaxDevices, two_devices

import kvoffload
from kvoffload import BlockCache, LayoutError, OffloadEngine, ShardedEngine
from kvoffload.jax import OwnedCache
from kvoffload.jax.imports import import_memory

PAGES, TOKENS, HEADS, DIM = 8, 4, 2, 8
PAGE = (PAGES, TOKENS, HEADS, DIM)
PAGED: dict[str, Any] = {"block_axis": 0, "plane_axis": None}


two = pytest.fixture(two_devices)


def fill(jax: Any, **options: Any) -> Any:
    """A jitted step that writes a number of its own into a block of each array: `value`, `value + 1`, ..."""

    def step(tree: Any, block: int, value: float) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten([leaf.at[block].set(value + index) for index, leaf in enumerate(leaves)])

    return jax.jit(step, donate_argnums=0, **options)


def block_of(jax: Any, cache: OwnedCache, block: int) -> list[set[float]]:
    """What each array has in a block."""
    return [set(np.asarray(leaf[block], np.float32).ravel().tolist()) for leaf in jax.tree.leaves(cache.arrays)]


@pytest.mark.parametrize(("by_layer", "adopt"), [(False, False), (True, False), (False, True), (True, True)])
def test_random_steps(jax: Any, device: kvoffload.Device, seed: int, by_layer: bool, adopt: bool) -> None:
    assert run_random_program(JaxTreeProgram(jax, device, by_layer=by_layer, adopt=adopt), 100, seed) == 0


def test_layers_that_are_alike_are_one_copy_a_block(jax: Any, device: kvoffload.Device) -> None:  # noqa: ARG001
    """They lie in one allocation, at equal distances; a page of 252 bytes shows that these are rounded up."""
    for page in (PAGE, (PAGES, 63)):
        cache = OwnedCache(device, [page] * 5, "float32", **PAGED)
        with OffloadEngine(cache.layout, device=device, num_slots=2, staging_bytes=0) as engine:
            device.simulator.faults.calls = []
            engine.store([2], [0], after=cache).wait(10)
            copies = [name for name, *_ in device.simulator.faults.calls if name.startswith("cuMemcpy")]
            assert len(copies) == 1


def test_planes_may_be_an_axis_of_each_array(jax: Any, device: kvoffload.Device) -> None:
    """K and V of a layer in one array; and MLA, in arrays whose blocks differ."""
    cache = OwnedCache(device, [(2, PAGES, 16)] * 3, "float32", block_axis=1, plane_axis=0)
    assert len(cache.layout.groups[0].planes) == 6
    shapes = [jax.ShapeDtypeStruct((PAGES, 16), "bfloat16"), jax.ShapeDtypeStruct((PAGES, 4), "float32")]
    mixed = OwnedCache(device, shapes, **PAGED)
    assert mixed.layout.dtype is None, "keys need it to be named"
    assert OwnedCache(device, shapes, "bfloat16", **PAGED).layout.dtype == "bfloat16"
    assert [plane.block_bytes for plane in mixed.layout.groups[0].planes] == [32, 16]
    assert [each.dtype.name for each in mixed.arrays] == ["bfloat16", "float32"]


@pytest.mark.usefixtures("jax")
def test_keys_find_pages_of_all_layers(jax: Any, device: kvoffload.Device) -> None:
    described: dict[str, Any] = {"tokens_per_block": TOKENS, "block_axes": ("tokens", "heads", "dim")}
    cache = OwnedCache(device, [PAGE] * 4, "bfloat16", **PAGED, **described)
    keys = kvoffload.chain_keys(range(2 * TOKENS), layout=cache.layout, salt="")
    step = fill(jax)
    with OffloadEngine(cache.layout, device=device, num_slots=4, staging_bytes=0) as engine:
        blocks = BlockCache(engine)
        cache.arrays = step(step(cache.arrays, 1, 1.0), 2, 5.0)
        blocks.store(keys, [1, 2], after=cache).wait(10)
        blocks.load(keys, [6, 7], after=cache)
        assert block_of(jax, cache, 6) == [{1.0}, {2.0}, {3.0}, {4.0}]
        assert block_of(jax, cache, 7) == [{5.0}, {6.0}, {7.0}, {8.0}]
    with pytest.raises(LayoutError, match="tokens_per_block is 8, but the axis 'tokens'"):
        OwnedCache(device, [PAGE] * 4, "bfloat16", **PAGED, **described | {"tokens_per_block": 8})


def test_engines_over_some_of_the_arrays_are_followed(jax: Any, device: kvoffload.Device) -> None:
    cache = OwnedCache(device, [PAGE] * 3, "float32", **PAGED)
    some = kvoffload.KVLayout([cache.layout.groups[0].planes[2:]], on_default_stream=False)
    with OffloadEngine(some, device=device, num_slots=2, staging_bytes=0) as engine:
        engine.slots[0].view(np.float32)[:] = 5
        engine.load([0], [7], after=cache)
        assert block_of(jax, cache, 7) == [{0.0}, {0.0}, {5.0}]


@pytest.mark.usefixtures("jax")
def test_an_import_follows_the_engines_that_are_named(device: kvoffload.Device) -> None:
    """One array is imported for all, so it follows engines that do not touch it."""
    asked: list[int] = []
    engine: Any = SimpleNamespace(order_all_before=asked.append)
    import_memory(device.empty((8, 4), "float32"), None, [engine, engine])
    assert asked == [1, 1], "on the CPU JAX names no stream, which stands for the legacy default stream"


@pytest.mark.usefixtures("jax")
def test_groups_have_block_tables_of_their_own(device: kvoffload.Device) -> None:
    """Full attention and windows: other numbers of blocks, and blocks of other sizes."""
    shapes = {"full": {"k": [PAGE] * 2, "v": [PAGE] * 2}, "window": [(5, TOKENS, HEADS, DIM // 2)] * 3}
    cache = OwnedCache(device, shapes, "float32", groups={"full": 0, "window": 1}, **PAGED)
    assert [(len(group.planes), group.num_blocks) for group in cache.layout.groups] == [(4, 8), (3, 5)]
    alternating = OwnedCache(device, [PAGE, (5, 9), PAGE], "float32", groups=[0, 1, 0], **PAGED)
    assert [len(group.planes) for group in alternating.layout.groups] == [2, 1]
    for wrong in (1, -1, 0.5, [0, 2, 0], [0, 0], {"k": 0}, "full"):
        with pytest.raises(LayoutError, match=r"groups must be a group number for each array, .*, got"):
            OwnedCache(device, [PAGE, (5, 9), PAGE], "float32", groups=wrong, **PAGED)


def test_a_sharding_divides_blocks_of_no_group(two: JaxDevices) -> None:
    heads, pages = two.sharding(None, None, "heads"), two.sharding("heads")
    shapes = [two.jax.ShapeDtypeStruct(PAGE, "float32", sharding=each) for each in (heads, pages)]
    with pytest.raises(LayoutError, match=r"sharding .*'heads'.* divides the 8 blocks of block_axis=0"):
        OwnedCache(two.devices, shapes, groups=[0, 1], **PAGED)


# adopted arrays


def test_arrays_that_jax_has_allocated_become_the_cache(jax: Any, device: kvoffload.Device) -> None:
    """With what they hold."""
    given = {"k": [jax.numpy.full(PAGE, 7, "bfloat16")], "v": [jax.numpy.zeros(PAGE, "bfloat16")]}
    cache = OwnedCache(device, given, adopt=True, **PAGED)
    assert (jax.tree.structure(cache.arrays), cache.layout.dtype) == (jax.tree.structure(given), "bfloat16")
    assert block_of(jax, cache, 3) == [{7.0}, {0.0}]
    with OffloadEngine(cache.layout, device=device, num_slots=2, staging_bytes=0) as engine:
        engine.store([3], [1], after=cache)
        cache.arrays = fill(jax)(cache.arrays, 3, 1.0)
        engine.load([1], [5], after=cache)
        assert block_of(jax, cache, 5) == [{7.0}, {0.0}]
        assert block_of(jax, cache, 3) == [{1.0}, {2.0}]


def test_arrays_of_two_devices_become_the_cache(two: JaxDevices) -> None:
    sharding = two.sharding(None, None, "heads")
    given = [two.jax.device_put(np.full(PAGE, value, "float32"), sharding) for value in (3, 4)]
    cache = OwnedCache(two.devices, given, adopt=True, **PAGED)
    with ShardedEngine(cache.layout, devices=two.devices, num_slots=2, staging_bytes=0) as engine:
        engine.store([3], [1], after=cache)
        cache.arrays = fill(two.jax, out_shardings=cache.sharding)(cache.arrays, 3, 1.0)
        engine.load([1], [5], after=cache)
        assert block_of(two.jax, cache, 5) == [{3.0}, {4.0}]


def test_what_cannot_be_adopted(jax: Any, device: kvoffload.Device) -> None:
    deleted = jax.numpy.zeros(PAGE)
    deleted.delete()
    for wrong, said in [
        (PAGE, r"arrays\[1\] must be a jax.Array, got tuple: adopt=True takes the arrays of your cache"),
        (np.zeros(PAGE, "float32"), r"arrays\[1\] must be a jax.Array, got ndarray: adopt=True takes"),
        (deleted, r"arrays\[1\] was deleted, or donated"),
    ]:
        with pytest.raises(LayoutError, match=said):
            OwnedCache(device, [jax.numpy.zeros(PAGE), wrong], "float32", adopt=True, **PAGED)
    with pytest.raises(ValueError, match="adopt must be True or False"):
        OwnedCache(device, [PAGE], "float32", adopt=1, **PAGED)  # type: ignore[arg-type]


def test_meshes_in_another_order_are_ordered_array_by_array(two: JaxDevices) -> None:
    """No jitted function takes arrays of both."""
    sharding = two.sharding(None, None, "heads")
    mesh = two.jax.sharding.Mesh(np.array(two.of_jax)[::-1], ("heads",))
    other = two.jax.sharding.NamedSharding(mesh, sharding.spec)
    shapes = [two.jax.ShapeDtypeStruct(PAGE, "float32", sharding=each) for each in (sharding, other)]
    cache = OwnedCache(two.devices, shapes, **PAGED)
    steps = [
        two.jax.jit(lambda array: array.at[3].set(5), donate_argnums=0, out_shardings=each)
        for each in (sharding, other)
    ]
    with ShardedEngine(cache.layout, devices=two.devices, num_slots=2, staging_bytes=0) as engine:
        cache.arrays = [step(array) for step, array in zip(steps, cache.arrays, strict=True)]
        engine.store([3], [1], after=cache)
        engine.load([1], [5], after=cache)
        assert block_of(two.jax, cache, 5) == [{5.0}, {5.0}]


def test_layers_on_two_devices(two: JaxDevices) -> None:
    jax = two.jax
    sharding = two.sharding(None, None, "heads")
    shapes = [jax.ShapeDtypeStruct(PAGE, "bfloat16", sharding=sharding) for _ in range(3)]
    cache = OwnedCache(two.devices, shapes, **PAGED)
    assert cache.sharding == [sharding] * 3
    step = fill(jax, out_shardings=cache.sharding)
    with ShardedEngine(cache.layout, devices=two.devices, num_slots=2, staging_bytes=0) as engine:
        cache.arrays = step(cache.arrays, 3, 1.0)
        engine.store([3], [1], after=cache)
        engine.load([1], [5], after=cache.after(jax.device_put(np.ones(3), two.sharding())))
        assert block_of(jax, cache, 5) == [{1.0}, {2.0}, {3.0}]
        assert [len(each) for each in cache.after()] == [1, 1], "one array on each device stands for all three"


def test_one_device_may_have_a_mesh(two: JaxDevices) -> None:
    """As servers have one whatever the number of devices: arrays keep their NamedSharding."""
    on = JaxDevices(two.jax, two.devices[:1])
    sharding = on.sharding(None, None, "heads")
    cache = OwnedCache(on.devices[0], [PAGE] * 2, "float32", sharding=sharding, **PAGED)
    assert [array.sharding for array in cache.arrays] == [sharding] * 2
    with OffloadEngine(cache.layout, device=on.devices[0], num_slots=2, staging_bytes=0) as engine:
        cache.arrays = fill(two.jax)(cache.arrays, 3, 1.0)
        engine.store([3], [1], after=cache)
        engine.load([1], [5], after=cache)
        assert block_of(two.jax, cache, 5) == [{1.0}, {2.0}]


def test_a_cache_on_two_devices_is_not_followed_by_one(two: JaxDevices) -> None:
    cache = OwnedCache(two.devices, PAGE, "float32", sharding=two.sharding(None, None, "heads"), **PAGED)
    with (
        OffloadEngine(cache.layout.layouts[0], device=two.devices[0], num_slots=2, staging_bytes=0) as engine,
        pytest.raises(BufferError, match=r"the cache is on 2 devices, .* pass after=cache to a ShardedEngine, or"),
    ):
        engine.store([0], [0], after=cache)


def test_large_arrays_are_computed_in_threads_of_jax(jax: Any, device: kvoffload.Device) -> None:
    """On the CPU, which frees what was imported there: it needs the GIL, so nothing may wait for it with the GIL."""
    cache = OwnedCache(device, [(64, 16, 8, 128)] * 8, "bfloat16", **PAGED)
    with OffloadEngine(cache.layout, device=device, num_slots=2, staging_bytes=0) as engine:
        for turn in range(5):
            cache.arrays = fill(jax)(cache.arrays, 3, float(turn))
            engine.store([3], [1], after=cache)
            engine.load([1], [5], after=cache)
        assert block_of(jax, cache, 5) == [{4.0 + layer} for layer in range(8)]


def test_on_the_cpu_the_address_of_an_array_is_read_when_it_is_computed(
    jax: Any, device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX would wait for it with the GIL, which threads of its own may need before they can compute it."""
    cache = OwnedCache(device, [PAGE] * 2, "float32", **PAGED)
    read, computed = type(cache.arrays[0]).unsafe_buffer_pointer, []

    def reading(array: Any) -> Any:
        computed.append(array.is_ready())
        return read(array)

    monkeypatch.setattr(type(cache.arrays[0]), "unsafe_buffer_pointer", reading)
    slow = jax.jit(lambda matrix: jax.lax.fori_loop(0, 20, lambda _, each: (each @ each) / 500, matrix)[0, 0])
    step, matrix = fill(jax), jax.numpy.ones((500, 500))
    for block in range(3):  # the first turn compiles them
        cache.arrays = step(cache.arrays, block, slow(matrix))
    assert computed
    assert all(computed)


# what is refused


def test_a_copy_that_a_release_of_jax_makes_is_not_the_users_fault(
    jax: Any, device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX 0.11.2 says nothing when it does not donate. pip leaves it out, but it may be installed."""
    cache = OwnedCache(device, [PAGE], "float32", **PAGED)
    for version, said in (
        ("0.11.2", ", and install another JAX: 0.11.2 does not donate a sharded array that np.asarray has read"),
        ("1.0", ""),
    ):
        monkeypatch.setattr(jax, "__version__", version)
        with pytest.raises(LayoutError, match=rf"arrays\[0\] is no update in place.*Donate the cache.*\){said}$"):
            cache.arrays = [jax.numpy.ones(PAGE, "float32")]


@pytest.mark.usefixtures("jax")
@pytest.mark.parametrize(
    ("shapes", "options", "error", "said"),
    [
        ([], {}, ValueError, r"shapes must be a shape, or a tree with a shape for each array, got \[\]"),
        ([PAGE, 5], {}, ValueError, "shape must be a sequence of positive integers, got 5"),
        ([PAGE, (9, 4)], {}, LayoutError, r"num_blocks differ: \[8, 9\]"),
        ([PAGE], {"dtype": None}, ValueError, r"dtype of arrays\[0\] is missing: give dtype=, or a jax.ShapeDtypeStru"),
        ([PAGE], {"block_axis": 4}, LayoutError, "block_axis must be an axis of shape"),
        ([PAGE], {"block_axis": 1}, LayoutError, r"arrays\[0\] is not contiguous within a block"),
        ([PAGE], {"sharding": "heads"}, TypeError, "sharding must be a jax.sharding.NamedSharding"),
    ],
)
def test_trees_that_are_no_caches(
    device: kvoffload.Device, shapes: Any, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        OwnedCache(device, shapes, **{"dtype": "float32", **PAGED, **options})


# interrupts

"""JAX on two GPUs of one process: updates in place on both, and order on the streams of each without the host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_programs import jax_on, run_random_program
from sharded_jax import PROGRAMS, JaxDevices, ShardedProgram, Spec

import kvoffload
from kvoffload.jax import OwnedCache

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "jax_paged_decode.py"
SHAPE = (24, 8, 16, 4, 64)  # blocks, planes, tokens, heads, head size
AXES = {"block_axis": 0, "plane_axis": 1}
HEADS: Spec = (None, None, None, "heads")
SPECS: list[Spec] = [HEADS, (None, "planes"), ()]
ELEMENTS = 8 * 16 * 4 * 64  # of a block


@pytest.fixture(autouse=True)
def two(gpu_device: kvoffload.Device) -> Iterator[JaxDevices]:
    try:
        other = kvoffload.open_device(0 if gpu_device.index else 1, backend="cuda")
    except (kvoffload.KVOffloadError, ValueError) as error:
        pytest.skip(f"needs a second GPU: {error}")
    with other, jax_on(gpu_device) as jax:
        yield JaxDevices(jax, [gpu_device, other])


def updater(jax: Any, cache: OwnedCache) -> Any:
    def update(array: Any, blocks: Any, values: Any) -> Any:
        return array.at[blocks].set(values.astype(array.dtype))

    return jax.jit(update, donate_argnums=0, out_shardings=cache.sharding)


def slow_update(jax: Any, cache: OwnedCache) -> tuple[Any, Any]:
    """A jitted function that fills the cache with a value, 35 ms later on each device; and its second argument."""

    def fill(array: Any, burn: Any, value: Any) -> Any:
        burned = jax.lax.fori_loop(0, 60, lambda _, x: x @ x * 1e-4, burn)
        return array.at[:].set((burned[0, 0] * 0 + value).astype(array.dtype))

    everywhere = jax.sharding.NamedSharding(cache.sharding.mesh, jax.sharding.PartitionSpec())
    burn = jax.device_put(jax.numpy.ones((6144, 6144), jax.numpy.bfloat16), everywhere)
    return jax.jit(fill, donate_argnums=0, out_shardings=cache.sharding), burn


def addresses(cache: OwnedCache) -> dict[int, int]:
    """Where JAX's array lies on each GPU."""
    shards = cache.unordered.addressable_shards
    return {shard.device.local_hardware_id: shard.data.unsafe_buffer_pointer() for shard in shards}


# the random programs


@pytest.mark.parametrize(("form", "by_layer"), PROGRAMS)
def test_two_thousand_random_steps(two: JaxDevices, seed: int, form: str, by_layer: bool) -> None:
    assert run_random_program(ShardedProgram(two, form=form, by_layer=by_layer), 2000, seed) == 0


def test_without_the_ordering_calls_these_steps_go_wrong(two: JaxDevices, seed: int) -> None:
    programs = (run_random_program(ShardedProgram(two, ordered=False), 2000, seed + more) for more in range(8))
    assert any(programs)  # now and then one happens to read the right bytes


# in place, and the right bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("spec", SPECS)
def test_updates_stay_in_place_on_both_gpus_and_blocks_are_moved(two: JaxDevices, spec: Spec, dtype: str) -> None:
    cache = two.cache(SHAPE, dtype, *spec, **AXES)
    ours = {memory.device.index: memory.address for memory in cache.memories}
    assert addresses(cache) == ours
    update, expected = updater(two.jax, cache), np.zeros(SHAPE, np.float32)
    chance = np.random.default_rng(0)
    with two.engine(cache, 4) as engine:
        for turn in range(6):
            values = chance.integers(0, 16, (2, *SHAPE[1:])).astype(np.float32)
            cache.arrays = update(cache.arrays, np.array([turn, turn + 1]), values)
            expected[[turn, turn + 1]] = values
            assert addresses(cache) == ours
            engine.store([turn, turn + 1], [3, 1], after=cache)
            engine.load([1, 3], [20, 21], after=cache)
            expected[[20, 21]] = expected[[turn + 1, turn]]
            assert (np.asarray(cache.arrays).astype(np.float32) == expected).all()
            assert addresses(cache) == ours


# order, without the host


@pytest.mark.parametrize("spec", SPECS)
def test_a_store_follows_jax_on_each_gpu_without_the_host_waiting(two: JaxDevices, spec: Spec) -> None:
    cache = two.cache(SHAPE, "float32", *spec, **AXES)
    slow, burn = slow_update(two.jax, cache)
    with two.engine(cache, 2) as engine:
        cache.arrays = slow(cache.arrays, burn, 1.0)
        engine.store([5], [0], after=cache).wait(30)
        cache.arrays.block_until_ready()
        cache.arrays = slow(cache.arrays, burn, 3.0)
        job = engine.store([5], [0], after=cache)
        assert not job.done, "the call has returned before JAX's computation ended"
        job.wait(30)
        for pool, layout in zip(engine.slots, cache.layout.layouts, strict=True):
            assert (pool[0, : layout.groups[0].bytes_per_block].view(np.float32) == 3).all()


def test_a_load_follows_jax_and_jax_follows_it_without_the_host_waiting(two: JaxDevices) -> None:
    """A slow update, a load over some of it, and a computation that reads what was loaded."""
    cache = two.cache(SHAPE, "float32", *HEADS, **AXES)
    slow, burn = slow_update(two.jax, cache)
    total = two.jax.jit(lambda array: array.sum(axis=(1, 2, 3, 4)))
    with two.engine(cache, 2) as engine:
        for value in (5.0, 7.0):  # the first time, things are compiled
            for pool in engine.slots:
                pool[0].view(np.float32)[:] = value
            cache.arrays = slow(cache.arrays, burn, 2.0)
            job = engine.load([0], [9], after=cache)
            totals = total(cache.arrays)
            ended = job.done
            assert np.asarray(totals).tolist() == [(value if block == 9 else 2.0) * ELEMENTS for block in range(24)]
            job.wait(30)
        assert not ended, "reading the array has not waited for the load"


def test_a_transfer_follows_results_that_only_read_the_cache(two: JaxDevices) -> None:
    """A load overwrites a block that a slow computation still reads: named, it is followed."""
    jax = two.jax
    cache = two.cache(SHAPE, "float32", *HEADS, **AXES)
    _, burn = slow_update(jax, cache)

    def read(array: Any, burn: Any) -> Any:
        burned = jax.lax.fori_loop(0, 60, lambda _, x: x @ x * 1e-4, burn)
        block = (burned[0, 0] * 0).astype(int) + 4  # known when the product has been computed
        return array[block].sum(axis=(0, 1, 3))

    read = jax.jit(read)
    with two.engine(cache, 2) as engine:
        cache.arrays = updater(jax, cache)(cache.arrays, np.array([4]), np.ones((1, *SHAPE[1:]), np.float32))
        for pool in engine.slots:
            pool[0].view(np.float32)[:] = 100
        read(cache.arrays, burn).block_until_ready()
        logits = read(cache.arrays, burn)
        job = engine.load([0], [4], after=cache.after(logits))
        assert not job.done
        assert (np.asarray(logits) == ELEMENTS // 4).all()
        job.wait(30)
        assert bool((cache.arrays[4] == 100).all())


def test_what_a_lost_step_wrote_is_stored(two: JaxDevices) -> None:
    """The step still runs when its result is lost, so reading the array has to wait for it, on both GPUs."""
    cache = two.cache(SHAPE, "float32", *HEADS, **AXES)
    slow, burn = slow_update(two.jax, cache)
    with two.engine(cache, 2) as engine:
        cache.arrays = slow(cache.arrays, burn, 1.0)
        slow(cache.arrays, burn, 3.0)
        with pytest.warns(kvoffload.KVOffloadWarning, match="array was donated and no result was set"):
            array = cache.arrays
        assert not array.is_deleted()
        engine.store([2], [0], after=cache).wait(30)
        for pool, layout in zip(engine.slots, cache.layout.layouts, strict=True):
            assert (pool[0, : layout.groups[0].bytes_per_block].view(np.float32) == 3).all()


# wrong uses that can be told


def test_an_update_that_moved_is_refused(two: JaxDevices) -> None:
    cache = two.cache(SHAPE, "float32", *HEADS, **AXES)
    with pytest.raises(kvoffload.LayoutError, match=r"array lies at 0x\w+ on device \d, .*the update made a copy"):
        cache.arrays = two.jax.jit(lambda array: array + 1, out_shardings=cache.sharding)(cache.arrays)
    with pytest.raises(kvoffload.LayoutError, match=r"array must have the sharding .*out_shardings=cache.sharding"):
        cache.arrays = two.jax.device_put(cache.arrays, two.sharding())
    assert bool((cache.arrays == 0).all())


# the example and the document


def run(*arguments: str, exit_code: int = 0) -> str:
    root = EXAMPLE.parent.parent
    paths = {"PYTHONPATH": f"{root}{os.pathsep}{EXAMPLE.parent}"}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | paths | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done.stdout


def decode(*options: str, exit_code: int = 0) -> str:
    return run(str(EXAMPLE), "--small", "--devices", "2", *options, exit_code=exit_code)


@pytest.mark.parametrize("layout", ["block-major", "plane-major"])
def test_the_example_decodes_the_same_bits_on_two_gpus(layout: str) -> None:
    said = decode("--layout", layout)
    assert said.count(": bitwise equal") == 2, said
    assert "ShardedJaxBackend on 2 x " in said


def test_the_example_notices_a_spoiled_block(two: JaxDevices) -> None:  # noqa: ARG001
    assert ": DIFFERENT" in decode("--corrupt", exit_code=1)


@pytest.mark.parametrize("layout", ["block-major", "plane-major"])
def test_a_step_of_the_example_copies_nothing_of_the_cache(layout: str) -> None:
    """A copy of the whole cache, written back, would undo loads that are concurrent with the step."""
    program = f"""
import jax, kvoffload
from jax_paged_decode import ShardedJaxBackend
from paged_decode import model
size = model.SMALL._replace(layout={layout!r})
sharded = ShardedJaxBackend([kvoffload.open_device(index) for index in range(2)], size)
cache = jax.ShapeDtypeStruct(size.cache_shape(200_000), "uint16", sharding=sharded._sharding)
on_each = cache.size * 2 // 2  # bytes: more than 600 MB; products have workspaces of tens of MB
for step in (model.Step.padding(2, 1, 10), model.Step.padding(1, 32, 10)):
    memory = sharded._compute.lower(sharded._weights, cache, step).compile().memory_analysis()
    print(memory.alias_size_in_bytes >= on_each, memory.temp_size_in_bytes < on_each // 4)
"""
    assert run("-c", program) == "True True\nTrue True\n"

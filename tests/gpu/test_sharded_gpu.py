"""ShardedEngine on GPUs: two of them, and one twice; bytes beside the naive loop; order is in the contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import STAGING
from sharding import Machine, RandomTransfers, gpus, machine

import kvoffload
from kvoffload import BlockCache, ShardedEngine, ShardedLayout

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

KIB = 1024


@pytest.fixture(params=["two GPUs", "one GPU twice"])
def devices(request: pytest.FixtureRequest, gpu_device: kvoffload.Device) -> Iterator[list[kvoffload.Device]]:
    with gpus(gpu_device, request.param) as opened:
        yield opened


@pytest.fixture
def bench(devices: list[kvoffload.Device]) -> Iterator[Machine]:
    """Blocks of 16 and 8 planes of 64 KiB, long enough to be overtaken."""
    with machine((16, 8), devices=devices, block_bytes=64 * KIB) as made:
        made.warm_up()
        yield made
        made.whole()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("kernels", [False, True])
def test_random_transfers_give_the_bytes_of_loops(
    devices: list[kvoffload.Device], kernels: bool, number: int, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    shape = {"groups": 1 + number % 2, "blocks_per_slot": 1 + number, "staging_bytes": STAGING if kernels else 0}
    with machine((6, 2), devices=devices, seed=number, num_slots=8, block_bytes=4 * KIB, **shape) as made:
        RandomTransfers(made, chance).check(100)
        made.whole()


def test_a_cache_over_the_devices(bench: Machine) -> None:
    cache, mirrors = BlockCache(bench.engine), bench.mirrors()
    keys = [b"%d" % number for number in range(3)]
    cache.store(keys, [4, 2, 9], after=bench.one_each()).wait(30)
    assert cache.lookup(keys) == 3
    with cache.acquire(keys) as lease:
        slots = lease.slots().tolist()
    cache.load(keys[1:], [10, 11], parts=4).wait(30)
    mirrors.expect("store", [4, 2, 9], slots)
    mirrors.expect("load", [10, 11], slots[1:])
    mirrors.check()


@pytest.mark.parametrize(("block_axis", "plane_axis"), [(0, 1), (1, 0)])
def test_arrays_of_cupy_on_each_device(devices: list[kvoffload.Device], block_axis: int, plane_axis: int) -> None:
    """The heads of a cache, an array on each device; each array is written and read on a stream of its device."""
    cupy = pytest.importorskip("cupy")
    arrays, streams, expected = [], [], []
    for number, device in enumerate(devices):
        with cupy.cuda.Device(device.index):
            values = np.random.default_rng(number).random((12, 12, 16, 2 + number, 64)).astype(np.float16)
            stream = cupy.cuda.Stream(non_blocking=True)
            array = cupy.zeros(values.shape, values.dtype)
            cupy.cuda.Device().synchronize()
            with stream:
                array.set(values)
            arrays.append(array)
            streams.append(stream)
            expected.append(values)
    layout = ShardedLayout.from_stacked(arrays, block_axis=block_axis, plane_axis=plane_axis)
    with ShardedEngine(layout, devices=devices, num_slots=4) as engine:
        engine.store([1, 2, 7], [0, 3, 1], after=streams)
        engine.load([3, 1], [10, 11], after=streams).order_before(streams)
        for array, stream, values in zip(arrays, streams, expected, strict=True):
            with array.device, stream:
                found = array.get(stream=stream)
            stream.synchronize()
            at: Any = (slice(None),) * block_axis
            values[(*at, [10, 11])] = values[(*at, [2, 7])]
            assert (found == values).all()

"""ShardedEngine on GPUs: two of them, and one twice; bytes beside the naive loop, order on each device's streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import all_are
from sharding import Machine, RandomTransfers, machine

import kvoffload
from kvoffload import NO_WAIT, BlockCache, Job, ShardedEngine, ShardedLayout

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

KIB = 1024
SHARDS = range(2)


@pytest.fixture(params=["two GPUs", "one GPU twice"])
def devices(request: pytest.FixtureRequest, gpu_device: kvoffload.Device) -> Iterator[list[kvoffload.Device]]:
    if request.param == "one GPU twice":
        yield [gpu_device, gpu_device]
        return
    try:
        other = kvoffload.open_device(0 if gpu_device.index else 1, backend="cuda")
    except (kvoffload.KVOffloadError, ValueError) as error:
        pytest.skip(f"needs a second GPU: {error}")
    with other:
        yield [gpu_device, other]


@pytest.fixture
def bench(devices: list[kvoffload.Device]) -> Iterator[Machine]:
    """Blocks of 16 and 8 planes of 64 KiB, long enough to be overtaken. Every kind of transfer has been made once:
    the driver may synchronise when it does something first.
    """
    with machine((16, 8), devices=devices, block_bytes=64 * KIB) as made:
        streams = made.one_each()
        for copier in ("strided", "batch", "loop", None):
            made.engine.store([0], [0], after=streams, copier=copier).wait(30)
            made.engine.load([0], [0], after=streams, copier=copier).order_before(streams)
        for number in SHARDS:
            marker = made.marker(number)
            made.fill(number, marker, 1, streams[number])
            made.hold(number, streams[number]).open()
            synchronize(made, number, streams[number])
        made.engine.drain(30)
        made.engine.poll()
        yield made
        for gate in made.gates:
            gate.open()
        made.engine.drain(30)
        made.whole()


def synchronize(made: Machine, number: int, stream: int) -> None:
    with made.devices[number].current():
        made.devices[number].driver.stream_synchronize(stream)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("kernels", [False, True])
def test_random_transfers_give_the_bytes_of_loops(
    devices: list[kvoffload.Device], kernels: bool, number: int, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    shape = {"groups": 1 + number % 2, "blocks_per_slot": 1 + number, "sm_limit": 2 if kernels else 0}
    with machine((6, 2), devices=devices, seed=number, num_slots=8, block_bytes=4 * KIB, **shape) as made:
        random = RandomTransfers(made, chance)
        jobs: list[Job] = []
        for _ in range(100):
            job, expected = random.transfer()
            jobs.append(job)
            for mirror in random.mirrors:
                mirror.expect(**expected)
        made.engine.drain(30)
        for mirror in random.mirrors:
            mirror.check()
        assert all(job.outcome().error is None for job in jobs)
        made.whole()


@pytest.mark.parametrize("held", SHARDS)
def test_each_device_follows_its_own_stream_and_its_stream_waits(bench: Machine, held: int) -> None:
    streams, theirs = bench.one_each(), bench.one_each()
    markers = [bench.marker(number) for number in SHARDS]
    mirrors = bench.mirrors()
    bench.hold(held, streams[held])
    stored = bench.engine.store([1, 2], [3, 4], after=streams)
    loaded = bench.engine.load([3, 4], [9, 10], after=NO_WAIT)  # of the slots that are being stored
    loaded.order_before(theirs)
    for number in SHARDS:
        bench.fill(number, markers[number], 9, theirs[number])
    bench.settle()
    assert not stored.done
    assert not loaded.done
    for gate in bench.gates:
        gate.open()
    assert [job.wait(30).error for job in (stored, loaded)] == [None, None]
    for number in SHARDS:
        synchronize(bench, number, theirs[number])
    for mirror in mirrors:
        mirror.expect("store", [1, 2], [3, 4])
        mirror.expect("load", [9, 10], [3, 4])
        mirror.check()
    assert all(all_are(marker.to_numpy(), 9) for marker in markers)


def test_a_cache_over_the_devices(bench: Machine) -> None:
    cache, mirrors = BlockCache(bench.engine), bench.mirrors()
    keys = [b"%d" % number for number in range(3)]
    cache.store(keys, [4, 2, 9], after=bench.one_each()).wait(30)
    assert cache.lookup(keys) == 3
    with cache.acquire(keys) as lease:
        slots = lease.slots().tolist()
    cache.load(keys[1:], [10, 11], parts=4).wait(30)
    for mirror in mirrors:
        mirror.expect("store", [4, 2, 9], slots)
        mirror.expect("load", [10, 11], slots[1:])
        mirror.check()


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

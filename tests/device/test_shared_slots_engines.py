"""Slots in a memfd that processes share, registered with the driver by the process that has the engine."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from helpers import STAGING, Bytes, copiers_in
from slot_peers import NUM_BLOCKS, NUM_SLOTS, SECONDS, buffer_of, map_slots, planes_on, random_slots, run_rank, started

import kvoffload
from kvoffload import NO_WAIT, DriverError, KVLayout, OffloadEngine, SharedSlots
from kvoffload.driver import address_of
from kvoffload.testing import Mirror, scramble

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name} {os.getpid()}"


@pytest.fixture
def planes(each_device: kvoffload.Device) -> list[kvoffload.Plane]:
    return planes_on(each_device)


def shared_memory() -> set[str]:
    """What of shared slots this process maps or has open, and files of shared memory that have a name."""
    gc.collect()
    mapped = {line for line in Path("/proc/self/maps").read_text().splitlines() if "kvoffload-slots" in line}
    links = {f"{each.name}: {os.readlink(each)}" for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    return mapped | {each for each in {*links, *os.listdir("/dev/shm")} if "kvoffload" in each}


def test_another_process_reads_what_was_stored_and_writes_what_is_loaded(
    each_device: kvoffload.Device, planes: list[kvoffload.Plane], name: str
) -> None:
    layout, buffer = KVLayout([planes]), buffer_of(planes)
    rng = np.random.default_rng(3)
    with SharedSlots(NUM_SLOTS, layout.slot_bytes) as slots, started(map_slots, name) as peer:
        slots.offer(name)
        with OffloadEngine(layout, device=each_device, host_memory=slots.host_memory, staging_bytes=STAGING) as engine:
            for number, copier in enumerate([*copiers_in(engine), None]):
                scramble(buffer, number)
                mirror = Mirror(engine, [buffer])
                blocks, ids = rng.permutation(NUM_BLOCKS)[:12].tolist(), rng.permutation(NUM_SLOTS)[:12].tolist()
                engine.store(blocks, ids, after=NO_WAIT, copier=copier).wait(60)
                mirror.expect("store", blocks, ids)
                assert np.array_equal(peer.ask("read"), mirror.pool), copier
                peer.ask("write", 100 + number)
                mirror.pool = random_slots(mirror.pool.shape, 100 + number)
                engine.load(ids, blocks[::-1], after=NO_WAIT, copier=copier).wait(60)
                mirror.expect("load", blocks[::-1], ids)
                mirror.check()


def test_close_unregisters_the_slots_and_leaves_no_memory(
    each_device: kvoffload.Device, planes: list[kvoffload.Plane], name: str
) -> None:
    layout, driver = KVLayout([planes]), each_device.driver
    before = shared_memory()
    slots = SharedSlots(NUM_SLOTS, layout.slot_bytes)
    slots.offer(name)
    address, nbytes = address_of(slots.array), slots.array.nbytes
    for _ in range(3):  # a second engine over the same slots registers them again
        engine = OffloadEngine(layout, device=each_device, host_memory=slots.host_memory, staging_bytes=0)
        engine.store([1], [0], after=NO_WAIT).wait(60)
        with each_device.current(), pytest.raises(DriverError, match="ALREADY_REGISTERED"):
            driver.host_register(address, nbytes)
        engine.close()
        with each_device.current():
            driver.host_register(address, nbytes)
            driver.host_unregister(address)
    slots.close()
    assert shared_memory() - before, "the mapping"
    del engine, slots
    assert shared_memory() <= before
    with pytest.raises(TimeoutError):
        SharedSlots.receive(name)


def test_two_processes_have_an_engine_over_the_same_slots(
    each_device: kvoffload.Device, planes: list[kvoffload.Plane], name: str
) -> None:
    """Each registers its own mapping. What one stores from its memory of the device the other loads into its own."""
    layout, buffer = KVLayout([planes]), buffer_of(planes)
    with (
        started(run_rank, name, each_device.simulated, each_device.index) as rank,
        SharedSlots.receive(name, timeout=SECONDS) as slots,
    ):
        ids = list(range(NUM_SLOTS))
        with OffloadEngine(layout, device=each_device, host_memory=slots.host_memory, staging_bytes=0) as engine:
            stored = rank.ask("store", ids, ids, 5)
            engine.load(ids, ids, after=NO_WAIT).wait(60)
            assert same_blocks(planes, buffer.to_numpy(), stored, ids)
            content = scramble(buffer, 6)
            engine.store(ids, ids[::-1], after=NO_WAIT).wait(60)
            loaded = rank.ask("load", ids[::-1], ids)
            assert same_blocks(planes, loaded, content, ids)


def test_slots_of_a_killed_rank_stay_usable(
    each_device: kvoffload.Device, planes: list[kvoffload.Plane], name: str
) -> None:
    """It dies with its memory registered and transfers in flight, which never end."""
    layout, buffer = KVLayout([planes]), buffer_of(planes)
    before = shared_memory()
    half = NUM_SLOTS // 2
    blocks, ids = list(range(half)), list(range(half, NUM_SLOTS))
    with (
        started(run_rank, name, each_device.simulated, each_device.index) as rank,
        SharedSlots.receive(name, timeout=SECONDS) as slots,
    ):
        stored = rank.ask("store", blocks, ids, 7)
        content = slots.array[half:].copy()
        assert rank.ask("hold", blocks, blocks) == 2 * half
        rank.kill()
        with pytest.raises(TimeoutError):
            SharedSlots.receive(name, timeout=0.05)
        assert np.array_equal(slots.array[half:], content)
        assert not slots.array[:half].any(), "what was held back has been stored"
        with OffloadEngine(layout, device=each_device, host_memory=slots.host_memory, staging_bytes=0) as engine:
            engine.load(ids, blocks, after=NO_WAIT).wait(60)
            assert same_blocks(planes, buffer.to_numpy(), stored, blocks)
            engine.store(blocks, blocks, after=NO_WAIT).wait(60)
        assert np.array_equal(slots.array[:half], content)
    del engine, slots, content
    assert shared_memory() <= before


def same_blocks(planes: list[kvoffload.Plane], found: Bytes, expected: Bytes, blocks: list[int]) -> bool:
    """Whether these blocks of all planes are the same in two copies of the planes' memory."""
    base = buffer_of(planes).address
    starts = [plane.address - base + block * plane.block_stride for plane in planes for block in blocks]
    nbytes = planes[0].block_bytes
    return all(np.array_equal(found[at : at + nbytes], expected[at : at + nbytes]) for at in starts)

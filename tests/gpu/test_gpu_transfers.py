"""Many descriptors on a GPU, and what pinned memory takes there."""

from __future__ import annotations

import numpy as np
import pytest
from strategies import copiers_of

import kvoffload
from kvoffload import NO_WAIT, KVLayout, OffloadEngine, Plane
from kvoffload.testing import Mirror, scramble

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("num_blocks", [520, 1000])
def test_pitfall_16_100_000_descriptors_pass(gpu_device: kvoffload.Device, num_blocks: int) -> None:
    buffers = [gpu_device.allocate(512 * num_blocks) for _ in range(100)]
    for index, buffer in enumerate(buffers):
        scramble(buffer, index)
    planes = [Plane(buffer.address, block_bytes=512, num_blocks=num_blocks, owner=buffer) for buffer in buffers]
    copiers = [name for name in copiers_of(gpu_device) if name != "strided"]
    with OffloadEngine(KVLayout([planes]), device=gpu_device, num_slots=num_blocks) as engine:
        mirror = Mirror(engine, buffers)
        ids = np.random.default_rng(0).permutation(num_blocks)
        for copier in copiers:
            engine.store(ids, range(num_blocks), after=NO_WAIT, copier=copier).wait(60)
            mirror.expect("store", ids.tolist(), range(num_blocks))
            engine.load(range(num_blocks), ids[::-1], after=NO_WAIT, copier=copier).wait(60)
            mirror.expect("load", ids[::-1].tolist(), range(num_blocks))
        mirror.check()


@pytest.mark.parametrize("num_slots", [1, 3, 234, 20_000])
def test_pitfall_17_a_pool_pins_exactly_its_slots(gpu_device: kvoffload.Device, num_slots: int) -> None:
    """As the driver sees it: the last byte is pinned, and one past the end is not of this pool."""
    from cuda.bindings import driver as cuda

    layout = KVLayout([gpu_device.allocate_planes(3, block_bytes=4000, num_blocks=4)])
    with OffloadEngine(layout, device=gpu_device, num_slots=num_slots) as engine, gpu_device.current():
        assert engine.statistics().pinned_bytes == num_slots * layout.slot_bytes == engine.slots.nbytes
        address = int(engine.slots.__array_interface__["data"][0])
        kind = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        for at in (address, address + engine.slots.nbytes - 1):
            error, value = cuda.cuPointerGetAttribute(kind, at)
            assert int(error) == 0
            assert int(value) == int(cuda.CUmemorytype.CU_MEMORYTYPE_HOST)
    with gpu_device.current():
        error, value = cuda.cuPointerGetAttribute(kind, address)
    assert int(error) != 0 or int(value) != int(cuda.CUmemorytype.CU_MEMORYTYPE_HOST)  # ordinary memory again


def test_pitfall_20_slots_beside_the_borders_of_registered_pieces(
    gpu_device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvoffload.device import pinned as memory

    monkeypatch.setattr(memory, "RANGE_BYTES", 1 << 20)
    planes = gpu_device.allocate_planes(3, block_bytes=100_000, num_blocks=64)
    with OffloadEngine(KVLayout([planes]), device=gpu_device, num_slots=64) as engine:
        engine.slots[:] = np.arange(64, dtype=np.uint8)[:, np.newaxis]
        for copier in copiers_of(gpu_device):
            engine.load(range(64), range(64), after=NO_WAIT, copier=copier)
            engine.store(range(64), range(63, -1, -1), after=NO_WAIT, copier=copier).wait(10)
            assert (engine.slots[:, :300_000] == np.arange(63, -1, -1)[:, np.newaxis]).all()
            engine.slots[:] = np.arange(64, dtype=np.uint8)[:, np.newaxis]

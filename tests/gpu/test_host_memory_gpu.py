"""Slots in memory that the caller brings, several groups in one transfer and urgent loads, on a GPU."""

from __future__ import annotations

import mmap
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvoffload
from kvoffload import NO_WAIT, GroupTransfer, HostMemory, KVLayout, OffloadEngine
from kvoffload.driver import address_of
from kvoffload.testing import Mirror, scramble

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PAGE = 4096
SLOTS = 32


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("copier", ["strided", "batch", "loop", "gather", "split", None])
def test_transfers_touch_the_slots_and_nothing_between_them(
    gpu_device: kvoffload.Device, registered: bool, copier: Any
) -> None:
    groups = [
        gpu_device.allocate_planes(8, block_bytes=8192, num_blocks=64),
        gpu_device.allocate_blocks(64, planes=4, block_bytes=2048),
    ]
    for number, planes in enumerate(groups):
        scramble(planes[0].owner, number)  # type: ignore[arg-type]
    layout = KVLayout(groups)
    stride = layout.slot_bytes + 3 * PAGE
    memory = np.frombuffer(mmap.mmap(-1, SLOTS * stride), dtype=np.uint8)
    memory[:] = np.random.default_rng(0).integers(0, 256, memory.nbytes, dtype=np.uint8)
    expected = memory.copy()
    driver = gpu_device.driver
    with gpu_device.current():
        if registered:
            driver.host_register(address_of(memory), memory.nbytes)
        given = HostMemory.of_buffer(memory, num_slots=SLOTS, slot_stride=stride, registered=registered)
        options: dict[str, Any] = {"host_memory": given, "most_queued_bytes": 1 << 18}
        with OffloadEngine(layout, device=gpu_device, **options) as engine:
            mirror = Mirror(engine, [planes[0].owner for planes in groups])  # type: ignore[misc]
            rounds = np.random.default_rng(1)
            for _ in range(8):
                blocks, slots = rounds.permutation(64)[:24].tolist(), rounds.permutation(SLOTS)[:24].tolist()
                several = [GroupTransfer(0, blocks[:12], slots[:12]), GroupTransfer(1, blocks[12:], slots[12:])]
                engine.store_groups(several, after=NO_WAIT, copier=copier)
                moved = [
                    replace(each, blocks=[(block + 7) % 64 for block in blocks[at : at + 12]])
                    for each, at in zip(several, (0, 12), strict=True)
                ]
                engine.load_groups(moved, after=NO_WAIT, copier=copier, urgent=True)
                for direction, transfers in (("store", several), ("load", moved)):
                    for each in transfers:
                        ids: tuple[Any, Any] = each.blocks, each.slots
                        mirror.expect(direction, *ids, group=each.group)
            engine.drain(30)
            mirror.check()
            expected.reshape(SLOTS, stride)[:, : layout.slot_bytes] = mirror.pool
        assert np.array_equal(memory, expected), "a byte outside of the slots has changed"
        if registered:
            driver.host_unregister(address_of(memory))


def test_memory_that_is_not_registered_is_refused(gpu_device: kvoffload.Device) -> None:
    layout = KVLayout([gpu_device.allocate_blocks(8, planes=2, block_bytes=2048)])
    memory = np.frombuffer(mmap.mmap(-1, 4 * PAGE), dtype=np.uint8)
    given = HostMemory.of_buffer(memory, num_slots=4, slot_stride=PAGE, registered=True)
    with pytest.raises(ValueError, match="is not registered with this driver"):
        OffloadEngine(layout, device=gpu_device, host_memory=given)
    first = HostMemory.of_buffer(memory, num_slots=4, slot_stride=PAGE)
    with (
        OffloadEngine(layout, device=gpu_device, host_memory=first),
        pytest.raises(ValueError, match="overlaps memory that is registered already"),
    ):
        OffloadEngine(layout, device=gpu_device, host_memory=first)


def test_an_engine_of_no_slots(gpu_device: kvoffload.Device) -> None:
    layout = KVLayout([gpu_device.allocate_blocks(8, planes=2, block_bytes=2048)])
    with OffloadEngine(layout, device=gpu_device, num_slots=0) as engine:
        assert engine.load([], []).wait(10).nbytes == 0

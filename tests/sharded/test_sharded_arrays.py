"""ShardedLayout.from_stacked: an array on each device, of any library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvoffload
from kvoffload import Device, KVLayout, LayoutError, ShardedEngine, ShardedLayout
from kvoffload.testing import SimulatedDriver, check_clean_close

DESCRIBED: Any = {"tokens_per_block": 4, "block_axes": ("tokens", "heads", "dim")}


@pytest.fixture
def devices(seed: int) -> Iterator[list[Device]]:
    simulator = SimulatedDriver(device_count=2, seed=seed)
    opened = [kvoffload.open_device(index, backend=simulator) for index in range(2)]
    yield opened
    opened[1].close(10)
    check_clean_close(opened[0])


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        ([(8, 6, 4, 2, 3), (8, 6, 4, 1, 3)], {"block_axis": 0, "plane_axis": 1}),  # heads
        ([(2, 8, 4, 2, 3), (5, 8, 4, 2, 3)], {"block_axis": 1, "plane_axis": 0}),  # planes
    ],
)
def test_arrays_are_moved_by_a_sharded_engine(
    devices: list[Device], shapes: list[tuple[int, ...]], axes: dict[str, Any]
) -> None:
    memories = [device.empty(shape, "float32") for device, shape in zip(devices, shapes, strict=True)]
    content = [np.random.default_rng(n).random(shape, dtype=np.float32) for n, shape in enumerate(shapes)]
    for memory, values in zip(memories, content, strict=True):
        memory.buffer.copy_from(values)
    layout = ShardedLayout.from_stacked(memories, **axes, blocks_per_slot=2, **DESCRIBED)
    assert (layout.num_groups, layout.groups[0].num_blocks, layout.blocks_per_slot) == (1, 8, 2)
    assert (layout.dtype, layout.tokens_per_block) == ("float32", 4)
    alone = [KVLayout.from_stacked(memory, **axes, blocks_per_slot=2, **DESCRIBED) for memory in memories]
    assert layout.fingerprint == ShardedLayout(alone).fingerprint
    with ShardedEngine(layout, devices=devices, num_slots=4, staging_bytes=0) as engine:
        engine.store([1, 2], [3])
        engine.load([3], [6, 7]).wait(10)
    for memory, values in zip(memories, content, strict=True):
        found = memory.buffer.to_numpy().view(np.float32).reshape(values.shape)
        expected = values.copy()
        at: Any = (slice(None),) * axes["block_axis"]
        expected[(*at, [6, 7])] = values[(*at, [1, 2])]
        assert (found == expected).all()


def test_arrays_that_are_no_list_are_refused(devices: list[Device]) -> None:
    memory: Any = devices[0].empty((4, 2, 8), "float32")
    with pytest.raises(TypeError, match="arrays must be a list with an array for each device, got DeviceArray"):
        ShardedLayout.from_stacked(memory, plane_axis=1, block_axis=0)
    with pytest.raises(LayoutError, match="layouts is empty"):
        ShardedLayout.from_stacked([], plane_axis=1, block_axis=0)


def test_the_array_that_is_wrong_is_named(devices: list[Device]) -> None:
    memories: list[Any] = [device.empty((4, 2, 8), "float32") for device in devices]
    with pytest.raises(LayoutError, match="array must be an array in GPU memory") as caught:
        ShardedLayout.from_stacked([memories[0], 5], plane_axis=1, block_axis=0)  # type: ignore[list-item]
    assert caught.value.__notes__ == ["for arrays[1]"]
    fewer = devices[1].empty((3, 2, 8), "float32")
    with pytest.raises(LayoutError, match=r"layouts\[1\] has groups\[0\].num_blocks 3, layouts\[0\] has 4"):
        ShardedLayout.from_stacked([memories[0], fewer], plane_axis=1, block_axis=0)
    with pytest.raises(LayoutError, match=r"share bytes of device memory"):
        ShardedLayout.from_stacked([memories[0], memories[0]], plane_axis=1, block_axis=0)

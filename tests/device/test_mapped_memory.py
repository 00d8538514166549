"""Planes in mapped virtual memory, of which cuMemGetAddressRange returns one handle's range: PyTorch's expandable
segments, for example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from helpers import STAGING
from mapped_memory import check_every_copier, planes_at

import kvoffload
from kvoffload import DriverError, KVLayout, LayoutError, OffloadEngine, Plane
from kvoffload.testing import SimulatedDriver, check_clean_close

HANDLE = 4096


@pytest.fixture
def two_gpus() -> Iterator[kvoffload.Device]:
    """The first of two devices."""
    with kvoffload.open_device(0, backend=SimulatedDriver(seed=1, device_count=2)) as device:
        yield device
        check_clean_close(device)


def mapped(device: kvoffload.Device, nbytes: int) -> int:
    return int(device.simulator.allocate_outside(nbytes, device=0, allocator="mapped", handle_bytes=HANDLE))


def free(device: kvoffload.Device, *addresses: int) -> None:
    for address in addresses:
        device.simulator.free_outside(address)


def ids_of(device: kvoffload.Device, *groups: list[Plane]) -> list[list[int]]:
    with device.current():
        return device.allocations(KVLayout(list(groups)))


def refuse(device: kvoffload.Device, plane: Plane, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        OffloadEngine(KVLayout([[plane]]), device=device, num_slots=2, staging_bytes=0)


@pytest.mark.parametrize("staging_bytes", [0, STAGING])
def test_planes_that_cross_handles_fold_and_have_right_bytes(any_device: kvoffload.Device, staging_bytes: int) -> None:
    """Blocks of 1008 bytes: some cross from a handle to the next, and each plane lies in 3 or 4 of them."""
    pitch, nbytes = 10 * 1024, 5 * 10 * 1024
    base = mapped(any_device, nbytes)
    planes = planes_at([base + index * pitch for index in range(5)], block_bytes=1008, num_blocks=10)
    folds = "5 planes fold into 1 operation a block"
    check_every_copier(any_device, planes, [(base, nbytes)], folds=folds, staging_bytes=staging_bytes)
    free(any_device, base)


def test_planes_that_each_lie_in_a_handle_of_their_own_fold(any_device: kvoffload.Device) -> None:
    base = mapped(any_device, 7 * HANDLE)
    planes = planes_at([base + index * 2 * HANDLE for index in range(4)], block_bytes=256, num_blocks=16)
    folds = "4 planes fold into 1 operation a block"
    check_every_copier(any_device, planes, [(base, 7 * HANDLE)], folds=folds, staging_bytes=0)
    free(any_device, base)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_the_order_of_the_planes_and_of_groups_changes_no_allocation(
    device: kvoffload.Device, order: tuple[int, ...]
) -> None:
    base = mapped(device, 8 * HANDLE)
    planes = planes_at([base + HANDLE + each * HANDLE for each in order], block_bytes=64, num_blocks=64)
    assert ids_of(device, planes[:1], planes[1:]) == [[base + HANDLE], [base + HANDLE] * 3]
    free(device, base)


def test_planes_on_both_sides_of_a_gap_do_not_fold(any_device: kvoffload.Device) -> None:
    first, gap, last = any_device.simulator.allocate_adjacent(
        [3 * HANDLE, HANDLE, 2 * HANDLE], [0, 0, 0], "mapped", handle_bytes=HANDLE
    )
    free(any_device, gap)
    planes = planes_at([first, first + 2 * HANDLE, last], block_bytes=256, num_blocks=16)
    ranges = [(first, 3 * HANDLE), (last, 2 * HANDLE)]
    check_every_copier(any_device, planes, ranges, folds="3 planes fold into 2 operations a block", staging_bytes=0)
    over = Plane(first + HANDLE, block_bytes=256, num_blocks=48)
    refuse(any_device, over, f"runs {HANDLE} bytes past the end of its allocation of {2 * HANDLE} bytes at")
    free(any_device, first, last)


def test_memory_of_another_device_in_between_is_a_gap(two_gpus: kvoffload.Device) -> None:
    parts = two_gpus.simulator.allocate_adjacent([2 * HANDLE, HANDLE, HANDLE], [0, 1, 0], "mapped", handle_bytes=HANDLE)
    planes = planes_at([parts[0], parts[0] + HANDLE, parts[2]], block_bytes=256, num_blocks=16)
    assert ids_of(two_gpus, planes) == [[parts[0], parts[0], parts[2]]]
    over = Plane(parts[0], block_bytes=256, num_blocks=64)
    refuse(two_gpus, over, f"runs {2 * HANDLE} bytes past the end of its allocation of {2 * HANDLE} bytes at")
    refuse(two_gpus, planes_at([parts[1]], block_bytes=256, num_blocks=16)[0], "is memory of device 1, but")
    free(two_gpus, *parts)


@pytest.mark.parametrize("allocator", ["unknown", "default pool"])
def test_allocations_at_addresses_that_follow_each_other_do_not_fold(
    any_device: kvoffload.Device, allocator: str
) -> None:
    parts = any_device.simulator.allocate_adjacent([HANDLE] * 3, [0] * 3, allocator)
    planes = planes_at(parts, block_bytes=256, num_blocks=16)
    ranges = [(part, HANDLE) for part in parts]
    check_every_copier(any_device, planes, ranges, folds="3 planes do not fold (3 operations a block)", staging_bytes=0)
    over = Plane(parts[0], block_bytes=256, num_blocks=17)
    refuse(any_device, over, rf"^groups\[0\]\[0\]: .* runs 256 bytes past the end of its allocation of {HANDLE} bytes")
    free(any_device, *parts)


def test_a_plane_past_the_last_handle_is_refused(any_device: kvoffload.Device) -> None:
    base = mapped(any_device, 3 * HANDLE - 512)
    fits = Plane(base + 512, block_bytes=512, num_blocks=22)
    OffloadEngine(KVLayout([[fits]]), device=any_device, num_slots=2, staging_bytes=0).close()
    over = Plane(base + 513, block_bytes=512, num_blocks=22)
    text = (
        rf"^groups\[0\]\[0\]: .* runs 1 bytes past the end of its allocation of {3 * HANDLE - 512} bytes at {base:#x}$"
    )
    refuse(any_device, over, text)
    free(any_device, base)


def test_of_several_wrong_planes_the_first_of_the_layout_is_named(device: kvoffload.Device) -> None:
    low, high = device.simulator.allocate_adjacent([HANDLE] * 2, [0] * 2, "unknown")
    wrong = planes_at([high + 1, low + 1], block_bytes=64, num_blocks=64)
    with pytest.raises(LayoutError, match=rf"^groups\[0\]\[0\]: .*{high + 1:#x}"):
        ids_of(device, wrong[:1], [Plane(low, block_bytes=1, num_blocks=1)])
    free(device, low, high)


@pytest.mark.parametrize("planes_in_each", [1, 16])
def test_each_range_is_asked_for_once_however_many_planes_it_has(device: kvoffload.Device, planes_in_each: int) -> None:
    handles, spare, step = 12, 3, HANDLE // planes_in_each
    base = mapped(device, (handles + spare) * HANDLE)
    addresses = [base + index * step for index in range(handles * planes_in_each)]
    planes = planes_at(addresses[::-1], block_bytes=16, num_blocks=step // 16)
    device.simulator.faults.calls = []
    assert set(ids_of(device, planes)[0]) == {base}
    asked = Counter(name for name, _ in device.simulator.faults.calls)
    assert asked["cuMemGetAddressRange"] == asked["cuMemRetainAllocationHandle"] == handles
    assert asked["cuMemRelease"] == handles
    assert device.simulator.leaks()["allocation_handles"] == 0
    free(device, base)


def test_a_lost_context_in_the_middle_is_an_error_and_no_gap(device: kvoffload.Device) -> None:
    base = mapped(device, 3 * HANDLE)
    device.simulator.faults.fail_call("cuMemRetainAllocationHandle", nth=2, error=700)
    with device.current(), pytest.raises(DriverError, match="cuMemRetainAllocationHandle"):
        device.allocations(KVLayout([planes_at([base], block_bytes=HANDLE, num_blocks=3)]))
    free(device, base)


def test_bindings_without_the_calls_take_each_handle_for_an_allocation() -> None:
    def absent(_: SimulatedDriver) -> None:
        raise AttributeError

    simulator = type("Older", (SimulatedDriver,), {"cuMemRetainAllocationHandle": property(absent)})()
    with kvoffload.open_device(backend=simulator) as device:
        base = mapped(device, 2 * HANDLE)
        planes = planes_at([base, base + HANDLE], block_bytes=64, num_blocks=64)
        assert ids_of(device, planes) == [[base, base + HANDLE]]
        free(device, base)

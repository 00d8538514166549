"""Planes in mapped virtual memory of a GPU, such as PyTorch's expandable segments: over handles, gaps, reservations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from cuda.bindings import driver as cuda
from helpers import STAGING
from mapped_memory import Mapping, check_every_copier, planes_at

import kvoffload
from kvoffload import KVLayout, LayoutError, OffloadEngine, Plane
from kvoffload.device.allocations import is_mapped_on

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BLOCK_BYTES, NUM_BLOCKS = 12288, 90


@contextmanager
def mapping(
    device: kvoffload.Device, parts: int, *, without: tuple[int, ...] = (), address: int = 0
) -> Iterator[Mapping]:
    """Mapped memory, which is all unmapped and freed at the end."""
    with ExitStack() as stack:
        with device.current():
            made = Mapping(device, parts, without=without, address=address)

        def close() -> None:
            with device.current():
                made.close()

        stack.callback(close)
        yield made


def spread(first: int, nbytes: int, count: int) -> list[Plane]:
    """Planes at one stride over `nbytes` from an address on; their last blocks end near the end of it."""
    stride = (nbytes - BLOCK_BYTES * NUM_BLOCKS) // (count - 1) // 512 * 512
    return planes_at([first + at * stride for at in range(count)], block_bytes=BLOCK_BYTES, num_blocks=NUM_BLOCKS)


@pytest.mark.parametrize("staging_bytes", [0, STAGING])
def test_planes_across_handles_fold_and_have_right_bytes(gpu_device: kvoffload.Device, staging_bytes: int) -> None:
    with mapping(gpu_device, 3) as memory:
        planes = spread(memory.address, memory.nbytes, 5)
        borders = [memory.part(1), memory.part(2)]
        assert any(plane.address < border < plane.end for plane in planes for border in borders)
        assert any((border - plane.address) % BLOCK_BYTES for plane in planes for border in borders)
        folds = "5 planes fold into 1 operation a block"
        ranges = [(memory.address, memory.nbytes)]
        check_every_copier(gpu_device, planes, ranges, folds=folds, staging_bytes=staging_bytes)


def test_a_plane_past_the_last_handle_is_refused(gpu_device: kvoffload.Device) -> None:
    """What follows is reserved, so that nobody else has mapped memory there."""
    with mapping(gpu_device, 4, without=(3,)) as memory:
        nbytes = 3 * memory.part_bytes
        for address, fits in ((memory.address, True), (memory.address + 1, False)):
            layout = KVLayout([[Plane(address, block_bytes=4096, num_blocks=nbytes // 4096)]])
            if fits:
                OffloadEngine(layout, device=gpu_device, num_slots=2).close()
            else:
                text = rf"groups\[0\]\[0\].* runs 1 bytes past the end of its allocation of {nbytes} bytes"
                with pytest.raises(LayoutError, match=text):
                    OffloadEngine(layout, device=gpu_device, num_slots=2)


def test_planes_on_both_sides_of_a_gap_do_not_fold(gpu_device: kvoffload.Device) -> None:
    with mapping(gpu_device, 3, without=(1,)) as memory:
        addresses = [memory.part(0), memory.part(2)]
        planes = planes_at(addresses, block_bytes=BLOCK_BYTES, num_blocks=NUM_BLOCKS)
        ranges = [(address, memory.part_bytes) for address in addresses]
        check_every_copier(gpu_device, planes, ranges, folds="2 planes do not fold (2 operations a block)")
        over = KVLayout([[Plane(memory.address, block_bytes=4096, num_blocks=memory.nbytes // 4096)]])
        with pytest.raises(LayoutError, match=r"past the end of its allocation"):
            OffloadEngine(over, device=gpu_device, num_slots=2)


def test_planes_across_two_reservations_without_a_gap_have_right_bytes(gpu_device: kvoffload.Device) -> None:
    """No driver call says where a reservation ends, so their planes fold like those of one."""
    with mapping(gpu_device, 4) as both:
        first = both.address
    with ExitStack() as stack:
        low = stack.enter_context(mapping(gpu_device, 2, address=first))
        high = stack.enter_context(mapping(gpu_device, 2, address=low.address + low.nbytes))
        if high.address != low.address + low.nbytes:
            pytest.skip("the driver reserved other addresses than those that it was asked for")
        nbytes = low.nbytes + high.nbytes
        planes = spread(low.address, nbytes, 5)
        folds = "5 planes fold into 1 operation a block"
        check_every_copier(gpu_device, planes, [(low.address, nbytes)], folds=folds)


def test_mapped_memory_is_told_from_that_of_allocators(gpu_device: kvoffload.Device) -> None:
    """Ranges of allocators must not be joined: the driver refuses strided copies from one to the next."""
    index, driver, buffer = gpu_device.index, gpu_device.driver, gpu_device.allocate(1 << 20)
    with mapping(gpu_device, 2, without=(1,)) as memory, gpu_device.current():
        status, pooled = cuda.cuMemAllocAsync(1 << 20, 0)
        assert int(status) == 0
        addresses = {
            "mapped": memory.part(1) - 1,
            "reserved": memory.part(1),
            "cuMemAlloc": buffer.address,
            "pool": int(pooled),
        }
        found = {name: is_mapped_on(driver, address, index) for name, address in addresses.items()}
        assert int(cuda.cuMemFreeAsync(pooled, 0)[0]) == 0
    assert found == {"mapped": True, "reserved": False, "cuMemAlloc": False, "pool": False}

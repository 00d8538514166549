"""Arrays of other libraries as planes: where their blocks lie, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvoffload
from kvoffload import NO_WAIT, KVLayout, LayoutError, OffloadEngine
from kvoffload.testing import pattern


class DeviceArray:
    """What CuPy or Numba would hand over: a numpy view's shape and strides, at an address on the device."""

    def __init__(self, view: Any, base: Any, address: int, **changes: Any) -> None:
        offset = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        self.__cuda_array_interface__ = {
            "shape": view.shape,
            "typestr": view.dtype.str,
            "data": (address + offset, False),
            "strides": None if view.flags.c_contiguous else view.strides,
            "version": 3,
        } | changes


def fake(shape: tuple[int, ...], dtype: str = "<f2", address: int = 1 << 20, **changes: Any) -> DeviceArray:
    view = np.empty(shape, dtype)
    return DeviceArray(view, view, address, **changes)


def check_blocks(device: kvoffload.Device, layout: KVLayout, expected: list[list[bytes]]) -> None:
    """Store every block; `expected[block][plane]` are its bytes in the order of memory."""
    count = layout.groups[0].num_blocks
    with OffloadEngine(layout, device=device, num_slots=count) as engine:
        engine.store(range(count), range(count), after=NO_WAIT).wait(10)
        for block in range(count):
            payload = b"".join(expected[block])
            assert engine.slots[block, : len(payload)].tobytes() == payload


# arrays, one per plane


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "|u1", "|V2"])
def test_a_contiguous_array_is_a_plane_without_a_copy(dtype: str) -> None:
    array = fake((10, 16, 8), dtype)
    plane = KVLayout.from_arrays([array]).groups[0].planes[0]
    item = np.dtype(dtype).itemsize
    assert (plane.address, plane.block_bytes, plane.num_blocks) == (1 << 20, 16 * 8 * item, 10)
    assert plane.block_stride == plane.block_bytes
    assert plane.owner is array


def test_options_go_to_the_layout() -> None:
    layout = KVLayout.from_arrays(
        (fake((4, 8), address=(index + 1) << 20) for index in range(3)), blocks_per_slot=2, dtype="float16"
    )
    assert (layout.blocks_per_slot, layout.dtype, len(layout.groups[0].planes)) == (2, "float16", 3)


def test_padding_between_blocks_is_a_stride() -> None:
    base = np.empty((6, 20), np.float32)
    plane = KVLayout.from_arrays([DeviceArray(base[:, 3:13], base, 4096)]).groups[0].planes[0]
    assert (plane.address, plane.block_bytes, plane.block_stride) == (4096 + 12, 40, 80)


def test_a_block_may_be_permuted_in_itself_and_be_one_element() -> None:
    base = np.empty((5, 4, 6), np.int16)
    plane = KVLayout.from_arrays([DeviceArray(base.transpose(0, 2, 1), base, 4096)]).groups[0].planes[0]
    assert (plane.block_bytes, plane.block_stride) == (48, 48)
    single = KVLayout.from_arrays([fake((7,), "<f4")]).groups[0].planes[0]
    assert (single.block_bytes, single.num_blocks) == (4, 7)


def test_one_block_needs_no_stride() -> None:
    base = np.empty((1, 4), np.float32)
    plane = KVLayout.from_arrays([DeviceArray(base, base, 4096, strides=(3, 4))]).groups[0].planes[0]
    assert (plane.block_bytes, plane.block_stride, plane.num_blocks) == (16, 16, 1)


def test_a_buffer_is_an_array_of_single_bytes(device: kvoffload.Device) -> None:
    buffer = device.allocate(100)
    plane = KVLayout.from_arrays([buffer]).groups[0].planes[0]
    assert (plane.address, plane.block_bytes, plane.num_blocks, plane.owner) == (buffer.address, 1, 100, buffer)


# arrays with a plane axis

AXES = [(p, b) for p in range(4) for b in range(4) if p != b]


@pytest.mark.parametrize(("plane_axis", "block_axis"), AXES)
def test_planes_and_blocks_may_be_any_axes_of_a_stacked_array(
    device: kvoffload.Device, plane_axis: int, block_axis: int
) -> None:
    """The other axes make up a block if they are the inner ones; else it is refused, never copied wrongly."""
    shape = (3, 4, 5, 2)
    base = pattern("stacked", 3 * 4 * 5 * 2 * 2).view("<u2").reshape(shape)
    buffer = device.allocate(base.nbytes)
    buffer.copy_from(base)
    array = DeviceArray(base, base, buffer.address)
    rest = [axis for axis in range(4) if axis not in (plane_axis, block_axis)]
    if set(rest) != {2, 3}:
        with pytest.raises(LayoutError, match="array plane 0 is not contiguous within a block"):
            KVLayout.from_stacked(array, plane_axis=plane_axis, block_axis=block_axis)
        return
    layout = KVLayout.from_stacked(array, plane_axis=plane_axis - 4, block_axis=block_axis)
    moved = np.moveaxis(base, (plane_axis, block_axis), (0, 1))
    expected = [[moved[p, b].tobytes() for p in range(moved.shape[0])] for b in range(moved.shape[1])]
    check_blocks(device, layout, expected)


def test_a_stacked_array_always_folds(device: kvoffload.Device) -> None:
    buffer = device.allocate(6 * 8 * 64)
    view = np.empty((6, 8, 64), np.uint8)
    for plane_axis, block_axis in ((0, 1), (1, 0)):
        layout = KVLayout.from_stacked(
            DeviceArray(view, view, buffer.address), plane_axis=plane_axis, block_axis=block_axis
        )
        with OffloadEngine(layout, device=device, num_slots=2) as engine:
            assert "planes fold into 1 operation a block" in repr(engine)


def test_a_view_of_a_stacked_array_with_padding(device: kvoffload.Device) -> None:
    base = pattern("padded", 4 * 5 * 16).reshape(4, 5, 16)
    buffer = device.allocate(base.nbytes)
    buffer.copy_from(base)
    view = base[1:, ::2, 4:12]
    layout = KVLayout.from_stacked(DeviceArray(view, base, buffer.address), plane_axis=0, block_axis=1)
    check_blocks(device, layout, [[view[p, b].tobytes() for p in range(3)] for b in range(3)])


@pytest.mark.parametrize(
    ("plane_axis", "block_axis", "words"),
    [
        (3, 1, r"plane_axis must be an axis of shape \(2, 3, 4\), got 3"),
        (0, -4, r"block_axis must be an axis of shape \(2, 3, 4\), got -4"),
        (1, 1, "plane_axis and block_axis must differ, both are 1"),
        (1, -2, "plane_axis and block_axis must differ, both are 1"),
    ],
)
def test_bad_axes_are_refused_by_name(plane_axis: int, block_axis: int, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        KVLayout.from_stacked(fake((2, 3, 4)), plane_axis=plane_axis, block_axis=block_axis)


# what is refused


def from_arrays(array: Any) -> KVLayout:
    return KVLayout.from_arrays([fake((4, 8), address=1 << 30), array])


def from_stacked(array: Any) -> KVLayout:
    return KVLayout.from_stacked(array, plane_axis=0, block_axis=1)


BOTH = pytest.mark.parametrize(("make", "name"), [(from_arrays, r"arrays\[1\]"), (from_stacked, "array")])


@BOTH
@pytest.mark.parametrize("given", [[1, 2], 4096, None, "cache"])
def test_pitfall_32_what_is_no_device_array_is_refused(make: Any, name: str, given: Any) -> None:
    kind = type(given).__name__
    with pytest.raises(LayoutError, match=rf"^{name} must be an array in GPU memory.*got {kind}"):
        make(given)


@BOTH
def test_pitfall_32_arrays_in_host_memory_are_refused(make: Any, name: str) -> None:
    with pytest.raises(LayoutError, match=rf"^{name} is not in GPU memory \(DLPack device type 1\)"):
        make(np.empty((4, 4, 4)))


@BOTH
def test_pitfall_32_read_only_arrays_are_refused(make: Any, name: str) -> None:
    array = fake((4, 4, 8), data=(1 << 20, True))
    with pytest.raises(LayoutError, match=rf"^{name} is read-only; loads write it"):
        make(array)


@BOTH
@pytest.mark.parametrize("shape", [(0, 4, 4), (4, 0, 4), (4, 4, 0)])
def test_pitfall_32_empty_arrays_are_refused(make: Any, name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=rf"^{name} is empty: shape "):
        make(fake(shape))


@BOTH
def test_pitfall_32_arrays_with_gaps_inside_a_block_are_refused(make: Any, name: str) -> None:
    base = np.empty((4, 4, 8, 8), np.uint8)
    for view in (base[..., ::2], base[:, :, ::2], base[..., :4]):
        with pytest.raises(LayoutError, match=rf"^{name}.* is not contiguous within a block: shape .*strides"):
            make(DeviceArray(view, base, 1 << 20))


@BOTH
def test_pitfall_32_blocks_in_descending_order_or_overlapping_are_refused(make: Any, name: str) -> None:
    base = np.empty((4, 4, 8), np.uint8)
    for view in (base[::-1] if make is from_arrays else base[:, ::-1],):
        with pytest.raises(LayoutError, match=rf"^{name}.*: blocks overlap or lie in descending order: block stride -"):
            make(DeviceArray(view, base, 1 << 20))
    repeated = np.lib.stride_tricks.as_strided(base, (2, 4, 8), (4, 4, 1))
    if make is from_arrays:
        repeated = np.lib.stride_tricks.as_strided(base, (4, 8), (4, 1))
    with pytest.raises(LayoutError, match=rf"^{name}.*block stride 4 bytes, block 8 bytes"):
        make(DeviceArray(repeated, base, 1 << 20, strides=repeated.strides))


def test_pitfall_32_arrays_without_axes_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"^arrays\[1\] has no axes; a plane needs a block axis"):
        from_arrays(fake(()))
    with pytest.raises(LayoutError, match="block_axis must be an axis of shape"):
        KVLayout.from_stacked(fake((5,)), plane_axis=0, block_axis=1)


def test_pitfall_32_one_array_given_twice_is_refused() -> None:
    array = fake((4, 8))
    with pytest.raises(LayoutError, match=r"groups\[0\]\[0\] and groups\[0\]\[1\] share bytes"):
        KVLayout.from_arrays([array, array])


def test_pitfall_32_no_arrays_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"groups\[0\] has no planes"):
        KVLayout.from_arrays([])


@pytest.mark.kernels
def test_pitfall_32_an_array_of_memory_that_is_gone_is_refused_by_the_engine(device: kvoffload.Device) -> None:
    buffer = device.allocate(64)
    layout = KVLayout.from_arrays([buffer])
    buffer.close()
    with pytest.raises(LayoutError, match=r"groups\[0\]\[0\].* is not memory of"):
        OffloadEngine(layout, device=device, num_slots=2)

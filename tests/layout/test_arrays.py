"""GPU memory of ours as arrays of other libraries. On a simulated device they see it as host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from seeds import seeds

import kvoffload
from kvoffload import NO_WAIT, KVLayout, LayoutError, OffloadEngine
from kvoffload.layout.dtypes import element_bytes
from kvoffload.testing import SimulatedDriver


@pytest.mark.parametrize(
    ("dtype", "name", "itemsize"),
    [
        (np.float16, "float16", 2),
        ("bf16", "bfloat16", 2),
        ("float8_e4m3fn", "float8_e4m3fn", 1),
        ("<f4", "float32", 4),
        (np.uint8, "uint8", 1),
        (bool, "bool", 1),
        ("complex64", "complex64", 8),
    ],
)
def test_an_array_says_what_it_is(device: kvoffload.Device, dtype: Any, name: str, itemsize: int) -> None:
    array = device.empty((3, 5, 7), dtype)
    assert (array.shape, array.dtype, array.itemsize, array.nbytes) == ((3, 5, 7), name, itemsize, 105 * itemsize)
    assert (array.buffer.address, array.buffer.nbytes) == (array.address, array.nbytes)
    assert repr(array) == f"DeviceArray((3, 5, 7), {name}, {array.address:#x})"


@pytest.mark.parametrize("dtype", ["float2_e1m0", "nonsense", None, object, "U4"])
def test_types_without_a_known_size_are_refused(device: kvoffload.Device, dtype: Any) -> None:
    with pytest.raises(LayoutError, match="dtype must be"):
        device.empty((3,), dtype)


def test_a_view_has_elements_of_the_same_size(device: kvoffload.Device) -> None:
    array = device.empty((4, 4), "bfloat16")
    view = array.view("uint16")
    assert (view.dtype, view.address, view.buffer) == ("uint16", array.address, array.buffer)
    with pytest.raises(ValueError, match="dtype must have 2 bytes like bfloat16, got 'uint8'"):
        array.view("uint8")


def test_sizes_of_types() -> None:
    assert [element_bytes(name) for name in ("float64", "bfloat16", "float8_e5m2")] == [8, 2, 1]


# as planes


def test_an_array_of_any_type_is_planes(device: kvoffload.Device) -> None:
    for dtype in ("bfloat16", "float8_e4m3fn", "float32"):
        array = device.empty((3, 8, 4, 2), dtype)
        layout = KVLayout.from_stacked(array, plane_axis=0, block_axis=1)
        assert layout.dtype == dtype
        assert layout.groups[0].planes[2].address == array.address + 2 * array.nbytes // 3
        assert all(plane.owner is array for plane in layout.groups[0].planes)
        assert KVLayout.from_stacked(array, plane_axis=1, block_axis=0).groups[0].num_blocks == 3


def test_a_layout_knows_the_type_of_its_arrays_unless_they_differ(device: kvoffload.Device) -> None:
    half, single = device.empty((4, 4), "float16"), device.empty((4, 4), "float32")
    assert KVLayout.from_arrays([half]).dtype == "float16"
    assert KVLayout.from_arrays([half, single]).dtype is None
    assert KVLayout.from_arrays([half], dtype="bfloat16").dtype == "bfloat16"
    assert KVLayout.from_arrays([device.allocate(64)]).dtype is None


# exports


def test_numpy_sees_the_memory_itself(device: kvoffload.Device) -> None:
    array = device.empty((2, 3, 4), "float32")
    seen = np.from_dlpack(array)
    assert (seen.shape, seen.dtype.name) == ((2, 3, 4), "float32")
    array.buffer.copy_from(np.arange(24, dtype=np.float32))
    assert (seen.reshape(-1) == np.arange(24)).all()
    whole = np.from_dlpack(array.buffer)
    assert (whole.dtype.name, whole.shape) == ("uint8", (96,))


@pytest.mark.parametrize("seed", seeds(8))
def test_an_export_waits_for_the_transfers_in_flight(seed: int) -> None:
    with kvoffload.open_device(backend=SimulatedDriver(seed=seed)) as device:
        array = device.empty((4, 16, 64), "uint8")
        array.buffer.copy_from(np.zeros(array.nbytes, np.uint8))
        other = device.empty((4, 16, 64), "uint8")
        with (
            OffloadEngine(
                KVLayout.from_stacked(array, plane_axis=0, block_axis=1), device=device, num_slots=8, staging_bytes=0
            ) as engine,
            OffloadEngine(
                KVLayout.from_stacked(other, plane_axis=0, block_axis=1), device=device, num_slots=8, staging_bytes=0
            ) as bystander,
        ):
            engine.slots[:] = 9
            job = engine.load(range(8), range(8), after=NO_WAIT)
            waiting = bystander.load(range(8), range(8), after=NO_WAIT)
            assert (np.from_dlpack(array)[:, :8] == 9).all()
            assert job.finished
            assert not waiting.finished


@pytest.mark.parametrize("seed", seeds(8))
def test_the_array_interface_names_a_stream_behind_the_transfers_in_flight(seed: int) -> None:
    with kvoffload.open_device(backend=SimulatedDriver(seed=seed)) as device:
        array = device.empty((4, 16, 64), "uint8")
        array.buffer.copy_from(np.zeros(array.nbytes, np.uint8))
        layout = KVLayout.from_stacked(array, plane_axis=0, block_axis=1)
        with (
            OffloadEngine(layout, device=device, num_slots=8, staging_bytes=0) as first,
            OffloadEngine(layout, device=device, num_slots=8, staging_bytes=0) as second,
        ):
            assert array.__cuda_array_interface__["stream"] is None
            first.slots[:], second.slots[:] = 7, 9
            first.load(range(4), range(4), after=NO_WAIT)
            second.load(range(4), range(4, 8), after=NO_WAIT)
            stream = array.__cuda_array_interface__["stream"]
            seen: list[np.ndarray[Any, Any]] = []
            view = device.simulator.view(array.address, array.nbytes).reshape(array.shape)
            with device.current():
                device.simulator.enqueue(stream, lambda: seen.append(view.copy()))
            first.drain(10)
            second.drain(10)
            device.simulator.run_all()
            assert (seen[0][:, :4] == 7).all()
            assert (seen[0][:, 4:8] == 9).all()
            assert array.__cuda_array_interface__["stream"] is None


def test_the_array_interface_of_a_type_that_numpy_knows(device: kvoffload.Device) -> None:
    array = device.empty((3, 4), "float16")
    found = array.__cuda_array_interface__
    assert (found["shape"], found["typestr"], found["data"]) == ((3, 4), "<f2", (array.address, False))
    assert not hasattr(array.view("bfloat16"), "__cuda_array_interface__")


def test_exports_that_cannot_be(device: kvoffload.Device) -> None:
    array = device.empty((3, 4), "float16")
    with pytest.raises(BufferError, match="exported without a copy"):
        array.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="only where it is"):
        array.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match=r"bfloat16 is not exported; view\('uint16'\) is"):
        array.view("bfloat16").__dlpack__()
    array.buffer.close()
    for use in (array.__dlpack__, lambda: array.__cuda_array_interface__):
        with pytest.raises(kvoffload.ClosedError):
            use()
    with pytest.raises(kvoffload.ClosedError):
        KVLayout.from_stacked(array, plane_axis=0, block_axis=1)


def test_a_closed_device_exports_nothing() -> None:
    device = kvoffload.open_device(backend="simulated")
    array = device.empty((3, 4), "float16")
    device.close()
    with pytest.raises(kvoffload.ClosedError):
        np.from_dlpack(array)


@pytest.mark.parametrize(
    ("shape", "names", "tokens", "wrong"),
    [
        ((8, 2, 16, 4, 64), ("tokens", "heads", "dim"), 16, False),
        ((8, 2, 16, 4, 64), ("tokens", "heads", "dim"), 32, True),
        ((8, 2, 4, 16, 64), ("tokens", "heads", "dim"), 16, True),
        ((8, 2, 4, 16, 64), ("heads", "tokens", "dim"), 16, False),
        ((8, 2, 16, 4, 64), ("a", "b", "c"), 32, False),
        ((8, 2, 4096), ("tokens", "heads", "dim"), 16, False),
        ((8, 2, 16, 4, 64), None, 32, False),
    ],
)
def test_tokens_of_a_block_are_those_of_its_keys(
    device: kvoffload.Device, shape: tuple[int, ...], names: tuple[str, ...] | None, tokens: int, wrong: bool
) -> None:
    array = device.empty(shape, "float16")
    options: Any = {"block_axis": 0, "plane_axis": 1, "tokens_per_block": tokens, "block_axes": names}
    if wrong:
        with pytest.raises(kvoffload.LayoutError, match=rf"tokens_per_block is {tokens}, but the axis 'tokens'"):
            kvoffload.KVLayout.from_stacked(array, **options)
    else:
        assert kvoffload.KVLayout.from_stacked(array, **options).tokens_per_block == tokens


def test_tokens_of_a_block_are_checked_in_separate_arrays_too(device: kvoffload.Device) -> None:
    arrays = [device.empty((8, 16, 4, 64), "float16") for _ in range(2)]
    names = ("tokens", "heads", "dim")
    assert KVLayout.from_arrays(arrays, tokens_per_block=16, block_axes=names).tokens_per_block == 16
    with pytest.raises(LayoutError, match="tokens_per_block is 8, but the axis 'tokens'"):
        KVLayout.from_arrays(arrays, tokens_per_block=8, block_axes=names)


@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [
        ("float16", ((16, 64),)),
        ("bfloat16", ((16, 64),)),  # its bits
        (">f2", (None,)),
        ("float4_e2m1fn_x2", (None,)),  # of no size that is known here
        ("uint8", (None,)),  # the array has half as many elements
    ],
)
def test_extents_of_a_block_are_known_if_they_count_the_elements_of_dtype(
    device: kvoffload.Device, dtype: Any, shapes: Any
) -> None:
    """Any other layout has keys all the same."""
    array = device.empty((8, 2, 16, 64), "float16")
    options: Any = {"dtype": dtype, "tokens_per_block": 16, "block_axes": ("tokens", "dim")}
    layout = KVLayout.from_stacked(array, plane_axis=1, block_axis=0, **options)
    assert layout.block_shapes == shapes
    assert len(layout.fingerprint) == 16
    assert layout.with_codec("raw").block_shapes == shapes

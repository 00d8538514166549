"""Arrays of other libraries as planes, through `__cuda_array_interface__`; nothing is imported and nothing copied."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvoffload.errors import LayoutError
from kvoffload.layout import Plane


class _DeviceArray(NamedTuple):
    """What an array interface says, in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


def plane_from_array(array: Any, name: str) -> Plane:
    """The plane behind a device array of shape `(num_blocks, ...)`.

    Raises:
        LayoutError: no device array, read-only, empty, or not contiguous within a block; the message names it.
    """
    view = _describe(array, name)
    if not view.shape:
        raise LayoutError(f"{name} has no axes; a plane needs a block axis: shape (num_blocks, ...)")
    return _plane(view, 0, name, array)


def planes_from_stacked(array: Any, plane_axis: int, block_axis: int) -> list[Plane]:
    """The planes of one device array that has a plane axis and a block axis; the other axes make up a block."""
    view = _describe(array, "array")
    axes = len(view.shape)
    for name, axis in (("plane_axis", plane_axis), ("block_axis", block_axis)):
        if not -axes <= axis < axes:
            raise LayoutError(f"{name} must be an axis of shape {view.shape}, got {axis}")
    plane_axis, block_axis = plane_axis % axes, block_axis % axes
    if plane_axis == block_axis:
        raise LayoutError(f"plane_axis and block_axis must differ, both are {plane_axis}")
    rest = [axis for axis in range(axes) if axis != plane_axis]
    planes = []
    for index in range(view.shape[plane_axis]):
        part = _DeviceArray(
            view.address + index * view.strides[plane_axis],
            tuple(view.shape[axis] for axis in rest),
            tuple(view.strides[axis] for axis in rest),
            view.itemsize,
        )
        planes.append(_plane(part, rest.index(block_axis), f"array plane {index}", array))
    return planes


def _describe(array: Any, name: str) -> _DeviceArray:
    try:
        interface = array.__cuda_array_interface__
    except AttributeError:
        raise LayoutError(
            f"{name} must be a device array with __cuda_array_interface__ (CuPy, Numba, DeviceBuffer), "
            f"got {type(array).__name__}; make a kvoffload.Plane from its address instead"
        ) from None
    shape = tuple(int(extent) for extent in interface["shape"])
    itemsize = np.dtype(interface["typestr"]).itemsize
    address, read_only = interface["data"]
    if read_only:
        raise LayoutError(f"{name} is read-only; loads write it: pass a writable array")
    if interface.get("mask") is not None:
        raise LayoutError(f"{name} has a mask; blocks are copied whole")
    if 0 in shape:
        raise LayoutError(f"{name} is empty: shape {shape}")
    strides = interface.get("strides")
    if strides is None:
        strides = tuple(itemsize * int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape)))
    return _DeviceArray(int(address), shape, tuple(int(stride) for stride in strides), itemsize)


def _plane(view: _DeviceArray, block_axis: int, name: str, owner: object) -> Plane:
    """A plane over one array; everything but the block axis must be one contiguous range."""
    inner = sorted(
        (view.strides[axis], view.shape[axis])
        for axis in range(len(view.shape))
        if axis != block_axis and view.shape[axis] > 1
    )
    expected = view.itemsize
    for stride, extent in inner:
        if stride != expected:
            raise LayoutError(
                f"{name} is not contiguous within a block: shape {view.shape}, strides {view.strides} bytes, "
                f"block axis {block_axis}"
            )
        expected *= extent
    num_blocks = view.shape[block_axis]
    stride = view.strides[block_axis] if num_blocks > 1 else expected
    if stride < expected:
        raise LayoutError(
            f"{name}: blocks overlap or run backwards: block stride {stride} bytes, block {expected} bytes"
        )
    return Plane(view.address, block_bytes=expected, num_blocks=num_blocks, block_stride=stride, owner=owner)

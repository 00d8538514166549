"""Arrays of other libraries as planes, through `__cuda_array_interface__` or DLPack. Nothing is copied.

cuda.core is imported for an array that has DLPack only, and no other library for any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, SupportsIndex, runtime_checkable

import numpy as np

from kvoffload.errors import LayoutError
from kvoffload.internal.checks import index_or, shown
from kvoffload.internal.types import GpuArray
from kvoffload.layout.dlpack import CUDA, MANAGED, ArrayView, packed_strides, view_dlpack
from kvoffload.layout.dtypes import dtype_name
from kvoffload.layout.planes import Plane


@runtime_checkable
class DescribesItself(Protocol):
    """An array of kvoffload's own, which can be described without DLPack: `kvoffload.DeviceArray`."""

    def array_view(self) -> ArrayView:
        """Return where the elements lie. ClosedError if the memory has been freed."""


def is_jax_array(array: object) -> bool:
    """Return whether JAX owns an array: it computes on streams that the legacy default stream does not order."""
    return type(array).__module__.partition(".")[0] in ("jax", "jaxlib")


def check_jax_array(name: str, array: Any) -> None:
    """Raise TypeError unless it is a `jax.Array`, ValueError if that was deleted."""
    if not is_jax_array(array):
        raise TypeError(f"{name} must be a jax.Array, got {type(array).__name__}")
    if array.is_deleted():
        raise ValueError(f"{name} was deleted, or donated to a computation: pass the array that took its place")


def common_dtype(arrays: Sequence[GpuArray]) -> str | None:
    """Return the name of the arrays' type of elements; None if they differ, or have none that has a name."""
    try:
        names = {dtype_name(getattr(array, "dtype", None)) for array in arrays}
    except LayoutError:
        return None
    return names.pop() if len(names) == 1 else None


def leaves(tree: Any, name: str) -> list[tuple[str, Any]]:
    """Return the arrays of a tree, with their names for messages; those of a dict in the order of its sorted keys."""
    if not isinstance(tree, Mapping | list | tuple):
        return [(name, tree)]
    nodes = [(key, tree[key]) for key in sorted(tree)] if isinstance(tree, Mapping) else enumerate(tree)
    return [leaf for key, node in nodes for leaf in leaves(node, f"{name}[{key!r}]")]


def plane_of_view(view: ArrayView, name: str, owner: object, *, block_axis: SupportsIndex = 0) -> Plane:
    """Return the plane behind an array with one block axis that lies where `view` says; it keeps `owner` alive.

    Raises:
        LayoutError: empty, or not contiguous within a block; the message begins with `name`. `block_axis` is no axis.
    """
    if not view.shape:
        raise LayoutError(f"{name} has no axes; a plane needs a block axis: shape (num_blocks, ...)")
    return _plane(view, _axis("block_axis", block_axis, view.shape), name, owner)


def memory_order(view: ArrayView, axes: Sequence[int]) -> list[int]:
    """Return `axes` in the order of memory, the slowest first. Axes of extent 1 keep their place: their strides mean
    nothing, and each library has its own for them.
    """
    wide = [axis for axis in axes if view.shape[axis] > 1]
    slowest_first = iter(sorted(wide, key=lambda axis: -view.strides[axis]))
    return [next(slowest_first) if view.shape[axis] > 1 else axis for axis in axes]


def planes_of_view(view: ArrayView, plane_axis: SupportsIndex, block_axis: SupportsIndex, owner: object) -> list[Plane]:
    """Return the planes of an array that lies where `view` says; they keep `owner` alive.

    Raises:
        LayoutError: axes that are out of range or the same, or blocks that are not contiguous.
    """
    planes_at, blocks_at = _axis("plane_axis", plane_axis, view.shape), _axis("block_axis", block_axis, view.shape)
    if planes_at == blocks_at:
        raise LayoutError(f"plane_axis and block_axis must differ, both are {planes_at}")
    rest = [axis for axis in range(len(view.shape)) if axis != planes_at]
    shape, strides = (tuple(values[axis] for axis in rest) for values in (view.shape, view.strides))
    return [
        _plane(
            view._replace(address=view.address + index * view.strides[planes_at], shape=shape, strides=strides),
            rest.index(blocks_at),
            f"array plane {index}",
            owner,
        )
        for index in range(view.shape[planes_at])
    ]


def _axis(name: str, axis: SupportsIndex, shape: tuple[int, ...]) -> int:
    number = index_or(axis, len(shape))
    if not -len(shape) <= number < len(shape):
        raise LayoutError(f"{name} must be an axis of shape {shape}, got {shown(axis)}")
    return number % len(shape)


def view_of(array: Any, name: str) -> ArrayView:
    """Return where a device array lies. In this order: an array of kvoffload's says so itself;
    `__cuda_array_interface__`, unless it is JAX's, which calls every array read-only; DLPack.

    Raises:
        LayoutError: not an array in GPU memory, or read-only; the message begins with `name`.
    """
    if isinstance(array, DescribesItself):
        return array.array_view()
    interface: dict[str, Any] | None = None
    if not is_jax_array(array):
        with contextlib.suppress(Exception):  # PyTorch refuses bfloat16 here, for one, and has DLPack for it
            interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        if interface.get("mask") is not None:
            raise LayoutError(f"{name} has a mask; blocks are copied whole")
        shape = tuple(int(extent) for extent in interface["shape"])
        itemsize, strides = np.dtype(interface["typestr"]).itemsize, interface.get("strides")
        in_bytes = packed_strides(shape, itemsize) if strides is None else tuple(int(stride) for stride in strides)
        address, read_only = interface["data"]
        view = ArrayView(int(address), shape, in_bytes, itemsize, bool(read_only))
    elif hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        try:
            kind = int(array.__dlpack_device__()[0])
            found = view_dlpack(array, None if is_jax_array(array) else -1) if kind in (CUDA, MANAGED) else None
        except Exception as error:  # each library raises its own; the user needs its text
            raise LayoutError(f"{name}: its {type(array).__name__} gives no access to its memory: {error}") from error
        if found is None:
            remedy = ": kvoffload.jax.OwnedCache makes a cache of JAX arrays, also without a GPU"
            raise LayoutError(
                f"{name} is not in GPU memory (DLPack device type {kind}); planes are GPU memory"
                + (remedy if is_jax_array(array) else "")
            )
        view = found
    else:
        raise LayoutError(
            f"{name} must be an array in GPU memory, with __cuda_array_interface__ or __dlpack__ (CuPy, JAX, Numba, "
            f"cuda.core, PyTorch, DeviceArray), got {type(array).__name__}; or make a kvoffload.Plane from its address"
        )
    if view.read_only:
        raise LayoutError(f"{name} is read-only; loads write it: pass a writable array")
    if 0 in view.shape:
        raise LayoutError(f"{name} is empty: shape {view.shape}")
    return view


def _plane(view: ArrayView, block_axis: int, name: str, owner: object) -> Plane:
    """Return a plane over one array; everything but the block axis must be one contiguous range."""
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
                f"block axis {block_axis}; a plane's block must be one range of memory: name an axis outside of it (K "
                'and V, layers) "planes" in axes, or give it as plane_axis, or put the other axes after the blocks'
            )
        expected *= extent
    num_blocks = view.shape[block_axis]
    stride = view.strides[block_axis] if num_blocks > 1 else expected
    if stride < expected:
        raise LayoutError(
            f"{name}: blocks overlap or lie in descending order: block stride {stride} bytes, block {expected} bytes"
        )
    return Plane(view.address, block_bytes=expected, num_blocks=num_blocks, block_stride=stride, owner=owner)

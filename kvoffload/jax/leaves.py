"""The arrays of a cache, as records, and all checks that come before anything is allocated."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from kvoffload.device.buffers import check_shape
from kvoffload.device.device import Device
from kvoffload.errors import LayoutError
from kvoffload.internal.checks import shown
from kvoffload.internal.types import DTypeLike
from kvoffload.jax.imports import import_jax
from kvoffload.layout.arrays import is_jax_array, plane_of_view, planes_of_view
from kvoffload.layout.dlpack import ArrayView, packed_strides
from kvoffload.layout.dtypes import dtype_name, element_bytes
from kvoffload.layout.layout import KVLayout, check_block, know_shapes
from kvoffload.layout.planes import Plane, SlotOrder

_ALIGNMENT = 256  # of each array in the memory of the cache, as cuMemAlloc aligns one


class Leaf(NamedTuple):
    """One array of the tree.

    Attributes:
        name: for messages: "array", or in a tree "arrays[3]" or "arrays['k'][3]".
        group: the number of its group.
        shape, dtype: of the whole array; dtype is a name.
        sharding: a NamedSharding; None: whole, on one device.
        shard_shape: shape of the part on each device.
        offset: where this part begins in memory of ours on each device, bytes.
        nbytes: bytes of this part.
    """

    name: str
    group: int
    shape: tuple[int, ...]
    dtype: str
    sharding: Any
    shard_shape: tuple[int, ...]
    offset: int
    nbytes: int

    def check_array(self, array: Any, remedy: str = "set it to the updated cache") -> None:
        """Raise LayoutError unless `array` is a `jax.Array` with memory, has this shape, dtype and sharding, and is
        row-major in memory."""
        jax = import_jax()
        if not is_jax_array(array) or not isinstance(array, jax.Array):
            raise LayoutError(f"{self.name} must be a jax.Array, got {type(array).__name__}: {remedy}")
        if isinstance(array, jax.core.Tracer):
            raise LayoutError(
                f"{self.name} must be a jax.Array with memory, got {type(array).__name__}, which has none: leave the "
                "jitted function first"
            )
        if array.is_deleted():
            raise LayoutError(
                f"{self.name} was deleted, or donated to a computation: {array.dtype} of shape {array.shape}; pass the "
                "array that the computation has returned"
            )
        if (tuple(array.shape), dtype_name(array.dtype)) != (self.shape, self.dtype):
            raise LayoutError(
                f"{self.name} must be {self.dtype} of shape {self.shape}, got {array.dtype} of {array.shape}: {remedy}"
            )
        order = array.format.layout.major_to_minor
        if order != tuple(range(len(self.shape))):
            raise LayoutError(
                f"{self.name} must have its axes in memory in the order of its shape, got the order {order}: leave "
                "out_shardings=Format(...) out, since blocks would lie elsewhere, and keys would stand for other bytes"
            )
        if self.sharding is None:
            if len(array.sharding.device_set) > 1:
                raise LayoutError(
                    f"{self.name} must be on one device, got {array.sharding}: move it there (jax.device_put(array, "
                    "device), or jax.jit(..., out_shardings=...)), or create the cache with a list of devices and a "
                    "sharding"
                )
        elif not array.sharding.is_equivalent_to(self.sharding, len(self.shape)):
            raise LayoutError(
                f"{self.name} must have the sharding {self.sharding}, got {array.sharding}: name it in the update, "
                "jax.jit(..., out_shardings=cache.sharding), or update with jax.shard_map"
            )


def as_leaves(
    shapes: Any, dtype: DTypeLike | None, sharding: Any, groups: Any, *, several: bool
) -> tuple[tuple[Leaf, ...], Any, list[Any]]:
    """Return the wanted arrays, the structure of their tree, and what `shapes` has for each; see `OwnedCache`."""

    def is_shape(node: Any) -> bool:  # and no list or tuple of shapes
        return (
            isinstance(node, list | tuple) and bool(node) and all(isinstance(each, int | np.integer) for each in node)
        )

    found, structure = import_jax().tree_util.tree_flatten_with_path(shapes, is_leaf=is_shape)
    if not found:
        raise ValueError(f"shapes must be a shape, or a tree with a shape for each array, got {shown(shapes)}")
    tree = import_jax().tree
    group_numbers, upper_part = tree.flatten(groups)
    try:
        parts = upper_part.flatten_up_to(structure.unflatten([0] * structure.num_leaves))
        numbers = [
            operator.index(each) for each, part in zip(group_numbers, parts, strict=True) for _ in tree.leaves(part)
        ]
    except (TypeError, ValueError):
        numbers = []
    if not numbers or sorted(set(numbers)) != list(range(max(numbers) + 1)):
        raise LayoutError(
            "groups must be a group number for each array, or for each part of the tree, counted from 0 without gaps; "
            f"the tree is {structure}, got {shown(groups)}"
        )
    leaves: list[Leaf] = []
    offset = 0
    for (path, given), group in zip(found, numbers, strict=True):
        name = f"arrays{import_jax().tree_util.keystr(path)}" if path else "array"
        shape = check_shape(getattr(given, "shape", given))
        its_dtype = getattr(given, "dtype", dtype)
        if its_dtype is None:
            raise ValueError(f"dtype of {name} is missing: give dtype=, or a jax.ShapeDtypeStruct for each array")
        its_sharding = getattr(given, "sharding", None) if sharding is None else sharding
        its_sharding, shard_shape = _divided(shape, its_sharding, several=several)
        nbytes = math.prod(shard_shape) * element_bytes(dtype_name(its_dtype))
        leaves.append(Leaf(name, group, shape, dtype_name(its_dtype), its_sharding, shard_shape, offset, nbytes))
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    if len({leaf.sharding is None for leaf in leaves}) > 1:
        raise LayoutError("sharding is given for some arrays and not for others: give it for all, or for none")
    return tuple(leaves), structure, [given for _, given in found]


class Description(NamedTuple):
    plane_axis: SupportsIndex | None
    block_axis: SupportsIndex
    dtype: DTypeLike | None
    tokens_per_block: SupportsIndex | None
    block_axes: Sequence[str] | None
    blocks_per_slot: SupportsIndex
    slot_order: SlotOrder | None

    def check(self, leaves: Sequence[Leaf], num_devices: int) -> None:
        """Raise LayoutError if these arrays cannot have such a layout, or a sharding divides blocks."""
        whole = [leaf._replace(shard_shape=leaf.shape, offset=leaf.offset * num_devices) for leaf in leaves]
        complete, divided = (
            self.layout(each, [SimpleNamespace(address=(1 << 20) + leaf.offset, buffer=None) for leaf in each])
            for each in (whole, leaves)
        )
        for group, (all_blocks, of_shard) in enumerate(zip(complete.groups, divided.groups, strict=True)):
            if all_blocks.num_blocks != of_shard.num_blocks:
                spec = next(leaf.sharding.spec for leaf in leaves if leaf.group == group)
                raise LayoutError(
                    f"sharding {spec} divides the {all_blocks.num_blocks} blocks of block_axis={self.block_axis}, "
                    "and every device needs every block: divide heads or planes, or replicate the cache"
                )

    def layout(self, leaves: Sequence[Leaf], parts: Sequence[Any]) -> KVLayout:
        """Return the layout of one device, where each leaf's part has an `address`, and a `buffer` that planes keep."""
        groups: list[list[Plane]] = [[] for _ in {leaf.group for leaf in leaves}]
        counting = [axis for axis in (self.plane_axis, self.block_axis) if axis is not None]
        views: list[ArrayView] = []
        for leaf, part in zip(leaves, parts, strict=True):
            shape, itemsize, planes = leaf.shard_shape, element_bytes(leaf.dtype), groups[leaf.group]
            strides = packed_strides(shape, itemsize)
            views.append(view := ArrayView(part.address, shape, strides, itemsize, read_only=False))
            try:
                if self.plane_axis is None:
                    planes.append(plane_of_view(view, leaf.name, part.buffer, block_axis=self.block_axis))
                else:
                    planes += planes_of_view(view, self.plane_axis, self.block_axis, part.buffer)
            except LayoutError as error:
                error.add_note(f"for {leaf.name} of shape {shape}")
                raise
        types = {leaf.dtype for leaf in leaves}
        common = types.pop() if len(types) == 1 else None
        layout = KVLayout(
            groups,
            blocks_per_slot=self.blocks_per_slot,
            dtype=common if self.dtype is None else dtype_name(self.dtype),
            tokens_per_block=self.tokens_per_block,
            on_default_stream=False,
            slot_order=self.slot_order,
            block_axes=self.block_axes,
        )
        shapes: list[set[tuple[int, ...]]] = [set() for _ in groups]
        for leaf, view in zip(leaves, views, strict=True):
            shapes[leaf.group].add(check_block(layout, view, counting, leaf.name))
        know_shapes(layout, *shapes)
        return layout


def jax_devices(devices: Sequence[Device], leaves: Sequence[Leaf]) -> tuple[Any, ...]:
    """Return JAX's device for each of ours, () without a sharding. LayoutError: a sharding is over others."""
    if leaves[0].sharding is None:
        return ()

    def place(jax_device: Any) -> tuple[str, int]:  # simulated devices have the numbers of JAX's CPU devices
        platform = str(jax_device.platform)
        return platform, int(jax_device.id if platform == "cpu" else jax_device.local_hardware_id)

    ours = [("cpu" if device.simulated else "gpu", device.index) for device in devices]
    for sharding in {leaf.sharding for leaf in leaves}:
        if not sharding.is_fully_addressable:
            raise LayoutError(
                f"sharding has devices of other processes: {sharding}; name devices of this process alone"
            )
        theirs = {place(each): each for each in sharding.device_set}
        if len(ours) != len(theirs) or set(ours) != set(theirs):
            raise LayoutError(
                f"sharding is over {sorted(theirs)}, and devices are {ours} (platform, index): give one device for "
                "each of the sharding's, with the index that JAX calls local_hardware_id"
            )
    return tuple(theirs[each] for each in ours)


class Mesh(NamedTuple):
    """Leaves that one jitted function can take.

    Attributes:
        indices: of these leaves.
        sharding: of an array with one element on each device; None: on one device.
        renewed: new arrays in place of a list of these, which are donated; they wait for a further array, too.
        ready: an array that is ready when a list of these is.
    """

    indices: list[int]
    sharding: Any
    renewed: Callable[[list[Any], Any], list[Any]]
    ready: Callable[[list[Any]], Any]


def meshes_of(leaves: Sequence[Leaf]) -> list[Mesh]:
    """Return one mesh for all leaves, or several if their shardings have the devices in different orders."""
    jax = import_jax()
    orders: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        orders.setdefault(leaf.sharding and tuple(leaf.sharding.mesh.devices.flat), []).append(index)
    meshes = []
    for indices in orders.values():
        places = [leaves[index].sharding for index in indices]
        mesh = places[0] and places[0].mesh
        sharding = mesh and jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))
        renewed = jax.jit(lambda arrays, _: arrays, donate_argnums=0, out_shardings=places, keep_unused=True)
        ready = jax.jit(lambda _: np.int32(0), keep_unused=True)
        meshes.append(Mesh(indices, sharding, renewed, ready))
    return meshes


def how_to_donate() -> str:
    """Return the remedy for an update that made a copy. With one release of JAX the copy may be JAX's fault."""
    remedy = "Donate the cache to it (jax.jit(..., donate_argnums=...))"
    if import_jax().__version__ == "0.11.2":
        remedy += ", and install another JAX: 0.11.2 does not donate a sharded array that np.asarray has read"
    return remedy


def shards_of(array: Any) -> dict[Any, Any]:
    """Return the shard of a `jax.Array` on each of its devices, as an array there. Does not wait."""
    return {shard.device: shard.data for shard in array.addressable_shards}


def _divided(shape: tuple[int, ...], sharding: Any, *, several: bool) -> tuple[Any, tuple[int, ...]]:
    """Return the NamedSharding of an array (None: on one device), and the shape of its part on each device."""
    shardings = import_jax().sharding
    if not several and (sharding is None or isinstance(sharding, shardings.SingleDeviceSharding)):
        return None, shape
    if not isinstance(sharding, shardings.NamedSharding):
        raise TypeError(f"sharding must be a jax.sharding.NamedSharding over the devices, got {shown(sharding)}")
    kind, usual = sharding.memory_kind, next(iter(sharding.device_set)).default_memory().kind
    if kind not in (None, usual):
        raise LayoutError(
            f"sharding has memory_kind={kind!r}, and the cache is in device memory: leave memory_kind out"
        )
    if len(sharding.spec) > len(shape):
        raise LayoutError(f"sharding {sharding.spec} is for {len(sharding.spec)} axes, and shape {shape} has fewer")
    try:
        return sharding, tuple(sharding.shard_shape(shape))
    except ValueError as error:
        raise LayoutError(
            f"shape {shape} cannot be divided evenly by sharding {sharding.spec} over the mesh "
            f"{dict(sharding.mesh.shape)}: make each divided axis a multiple of the devices along it"
        ) from error

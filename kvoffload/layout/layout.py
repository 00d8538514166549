"""Where the blocks of a paged KV cache lie in GPU memory and in a host slot. No device is touched here.

A *plane* is one device tensor indexed by block. A *group* is the planes that share one block table. A *slot* of the
host pool holds `f = blocks_per_slot` blocks of one group, payload only, in one of two orders:

    block-major  | sub-block 0: planes 0 .. n-1 | sub-block 1: planes 0 .. n-1 | ... | padding to whole pages |
    plane-major  | plane 0: sub-blocks 0 .. f-1 | plane 1: sub-blocks 0 .. f-1 | ... | padding to whole pages |
                 0                                                            payload_bytes            slot_bytes

In the order of the device's memory, a block is one range (block-major) or one strided range (plane-major) on both
sides, and adjacent blocks of a slot merge. A slot is one contiguous range for a disk or a network.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from itertools import combinations
from typing import Any, NamedTuple, SupportsIndex

from kvoffload.errors import LayoutError
from kvoffload.internal.checks import flag, shown
from kvoffload.internal.representation import HtmlRepresentation
from kvoffload.internal.types import DTypeLike, GpuArray
from kvoffload.layout.arrays import (
    common_dtype,
    is_jax_array,
    leaves,
    memory_order,
    plane_of_view,
    planes_of_view,
    view_of,
)
from kvoffload.layout.coding import CODECS, CodecName
from kvoffload.layout.dlpack import ArrayView
from kvoffload.layout.dtypes import dtype_name, element_bytes
from kvoffload.layout.fold import describe_fold, fold
from kvoffload.layout.planes import Group, Plane, SlotOrder, clusters, positive, share_bytes

FINGERPRINT_VERSION = 2  # 1, of version 0.1, had neither the names of the axes nor the order of a slot
SLOT_ALIGNMENT = 4096  # a page: slots can be registered, written to disk with O_DIRECT, and sent, one by one


class KVLayout(HtmlRepresentation):
    """Where the planes of a KV cache lie on the device, group by group, and how a host slot holds their blocks. Moves
    and allocates nothing.

    Keys need `dtype`, `tokens_per_block` and `block_axes`: if one is None, `fingerprint` and `chain_keys` raise
    LayoutError.

    Args:
        groups: a list of planes for each group. The planes of a group share one block table. The layout keeps their
            `owner`s alive.
        blocks_per_slot: how many device blocks a host slot holds, `f` for short. Blocks that are adjacent on the device
            and in the slot are copied together, as rows up to `f` times as wide. That makes small blocks faster.
        dtype: the type of the elements, such as "bfloat16". Keys depend on it; transfers do not.
        tokens_per_block: how many tokens a block holds. Keys depend on it; transfers do not.
        on_default_stream: whether the kernels that compute on the planes are ordered by the legacy default stream. If
            so, a transfer with `after=None` follows that stream. False, as for JAX: `after=None` raises ValueError.
        slot_order: the order of the bytes in a slot, "block-major" or "plane-major". None means the order of each
            group's device memory: "block-major" if a block of all planes is one range, as in an array
            `(blocks, planes, ...)`, else "plane-major". The other order works too, but is slower. Keys depend on it if
            `blocks_per_slot` is more than 1, so name one order if caches with different arrays share stored bytes.
        block_axes: names for the axes of one block of one plane, the slowest in memory first, such as
            `("tokens", "heads", "dim")`. Keys depend on them. Any names will do, if all programs that share stored
            bytes use the same.
        block_shape: the extents of `block_axes`, such as (16, 8, 128), or a list with those of each group. Only what
            leaves the process block by block needs them, such as a file (`BlockCache.save`). Keys do not.
        codec: "raw": slots hold the blocks as they are. "bf16-12": slots hold bf16 values in 12 bits each, without
            loss, so that there are nearly a third more of them in the same memory; `kvoffload.layout.coding` has the
            format. A list has one codec for each group. A block that the codec cannot hold is not stored, see
            `Job.unfit`. Needs kernels, bf16 values or their bits as uint16, and blocks of a multiple of 512 bytes in
            each plane, at addresses and strides of a multiple of 4; 2,048 are best. Its slots are block-major. Keys
            depend on it.

    Attributes:
        groups: a tuple of `Group`.
        slot_bytes: the size of one host slot: the payload of the largest group, coded where it is, rounded up to a
            multiple of 4096.
        codecs: that of each group.
        block_shapes: the extents of each group's block; None where they are not known.
        blocks_per_slot, dtype, tokens_per_block, on_default_stream, block_axes: as given; `from_tree` puts block_axes
            in the order of memory.

    Raises:
        LayoutError: there are no groups, or one is no list of at least one `Plane`; planes of one group share bytes, or
            have different `num_blocks`; a number is no integer of at least 1; a slot would be larger than 1 TiB;
            `dtype` is not the type of one element; `slot_order` or `codec` is unknown; the codec cannot code the
            blocks, or not in that order; or `block_axes` is not a list of different ASCII names.
        ValueError: `on_default_stream` is neither True nor False.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Plane]],
        *,
        blocks_per_slot: SupportsIndex = 1,
        dtype: DTypeLike | None = None,
        tokens_per_block: SupportsIndex | None = None,
        on_default_stream: bool = True,
        slot_order: SlotOrder | None = None,
        block_axes: Sequence[str] | None = None,
        block_shape: Sequence[int] | Sequence[Sequence[int] | None] | None = None,
        codec: CodecName | Sequence[CodecName] = "raw",
    ) -> None:
        self.blocks_per_slot = positive("blocks_per_slot", blocks_per_slot)
        if dtype is not None:
            dtype_name(dtype)
        self.dtype = dtype
        self.on_default_stream = flag("on_default_stream", on_default_stream)
        self.tokens_per_block = None if tokens_per_block is None else positive("tokens_per_block", tokens_per_block)
        if block_axes is not None and not (
            isinstance(block_axes, Sequence)
            and not isinstance(block_axes, str)
            and all(isinstance(name, str) and name and name.isascii() for name in block_axes)
            and 1 <= len(block_axes) == len(set(block_axes))
        ):
            raise LayoutError(
                "block_axes must be the names of the axes of one block of one plane, ASCII, each once, the slowest "
                f'first, such as ("tokens", "heads", "dim"), got {shown(block_axes)}'
            )
        self.block_axes = None if block_axes is None else tuple(block_axes)
        if slot_order not in (None, "plane-major", "block-major"):
            raise LayoutError(f'slot_order must be "block-major", "plane-major" or None, got {shown(slot_order)}')
        if not isinstance(groups, Sequence) or not all(isinstance(group, Sequence) for group in groups):
            raise LayoutError(f"groups must be a list of lists of planes: KVLayout([planes]), got {shown(groups)}")
        self._slot_order: SlotOrder | None = slot_order
        self.codecs = checked_codecs(codec, len(groups), dtype)
        self.groups = tuple(
            Group(planes, self.blocks_per_slot, f"groups[{index}]", slot_order, self.codecs[index])
            for index, planes in enumerate(groups)
        )
        if not self.groups:
            raise LayoutError("groups is empty; a layout needs at least one group of planes")
        self.block_shapes = self._checked_shapes(block_shape)
        largest = max(group.payload_bytes for group in self.groups)
        self.slot_bytes = -(-largest // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    def _checked_shapes(self, block_shape: Any) -> tuple[tuple[int, ...] | None, ...]:
        one = isinstance(block_shape, Sequence) and all(isinstance(each, SupportsIndex) for each in block_shape)
        shapes = [block_shape] * self.num_groups if one or block_shape is None else list(block_shape)
        if len(shapes) != self.num_groups:
            raise LayoutError(
                f"block_shape must be one shape, or one for each of {self.num_groups} groups, got {shapes}"
            )
        checked = list[tuple[int, ...] | None]()
        for group, shape in zip(self.groups, shapes, strict=True):
            if shape is None:
                checked.append(None)
                continue
            extents = tuple(positive("block_shape", extent) for extent in shape)
            nbytes = math.prod(extents) * (0 if self.dtype is None else element_bytes(dtype_name(self.dtype)))
            if len(extents) != len(self.block_axes or ()) or {plane.block_bytes for plane in group.planes} != {nbytes}:
                raise LayoutError(
                    f"block_shape must be the extents of block_axes={self.block_axes}, which with dtype={self.dtype} "
                    f"make the block_bytes of every plane, got {extents}"
                )
            checked.append(extents)
        return tuple(checked)

    @classmethod
    def from_arrays(
        cls,
        arrays: Iterable[GpuArray],
        *,
        blocks_per_slot: SupportsIndex = 1,
        dtype: DTypeLike | None = None,
        tokens_per_block: SupportsIndex | None = None,
        on_default_stream: bool | None = None,
        slot_order: SlotOrder | None = None,
        block_axes: Sequence[str] | None = None,
    ) -> KVLayout:
        """Return a layout of one group, with a plane for each array. Nothing is copied; the layout keeps the arrays
        alive.

        Args:
            arrays: arrays in GPU memory with `__cuda_array_interface__` or `__dlpack__`: CuPy, JAX, Numba, cuda.core,
                PyTorch, or `DeviceArray`. Each has the shape `(num_blocks, ...)`, and a block is one contiguous range.
                For a JAX array, the host waits until the array is computed.
            blocks_per_slot, tokens_per_block, slot_order: as for `KVLayout`.
            block_axes: as for `KVLayout`. The arrays must have a block's axes in the order of memory: if they are
                transposed views, use `from_tree`.
            dtype: as for `KVLayout`. None takes the type of the arrays, if all have the same; else it stays None.
            on_default_stream: as for `KVLayout`. None means False if one of the arrays is JAX's, else True.

        Raises:
            LayoutError: an array is not in GPU memory, is read-only or empty, or its blocks are not contiguous; or
                `block_axes` is given and a block's axes have another order in memory; or the axis that it names
                "tokens" does not have `tokens_per_block` elements; or as for `KVLayout`.
            ClosedError: the memory of a `DeviceArray` has been freed.
            TypeError: `arrays` cannot be iterated.
            ValueError: `on_default_stream` is not None, True or False.
        """
        given = list(arrays)
        names = [f"arrays[{index}]" for index in range(len(given))]
        views = [view_of(*each) for each in zip(given, names, strict=True)]
        layout = cls(
            [[plane_of_view(*each) for each in zip(views, names, given, strict=True)]],
            blocks_per_slot=blocks_per_slot,
            dtype=common_dtype(given) if dtype is None else dtype,
            tokens_per_block=tokens_per_block,
            on_default_stream=not any(map(is_jax_array, given)) if on_default_stream is None else on_default_stream,
            slot_order=slot_order,
            block_axes=block_axes,
        )
        shapes = {check_block(layout, view, [0], name) for view, name in zip(views, names, strict=True)}
        know_shapes(layout, shapes)
        return layout

    @classmethod
    def from_stacked(
        cls,
        array: GpuArray,
        *,
        plane_axis: SupportsIndex,
        block_axis: SupportsIndex,
        blocks_per_slot: SupportsIndex = 1,
        dtype: DTypeLike | None = None,
        tokens_per_block: SupportsIndex | None = None,
        on_default_stream: bool | None = None,
        slot_order: SlotOrder | None = None,
        block_axes: Sequence[str] | None = None,
    ) -> KVLayout:
        """Return a layout of one group, from one array that holds all planes. Nothing is copied; the layout keeps the
        array alive.

        A block is then one copy, however many planes there are: one contiguous range if the array is block-major,
        `(blocks, planes, ...)`, which is faster, above all for small transfers; one strided operation, with a row for
        each plane, if it is `(planes, blocks, ...)`. (There, planes of 2 GiB or more take a copy each.)

        Args:
            array: as for `from_arrays`. All axes but the two named here make up a block.
            plane_axis, block_axis: which axis counts the planes, and which the blocks. Both orders are common, and the
                shape does not tell them apart, so you always name them.
            blocks_per_slot, tokens_per_block, dtype, on_default_stream, slot_order, block_axes: as for `from_arrays`.

        Raises:
            LayoutError: as for `from_arrays`, or the two axes are the same, or out of range.
            ClosedError, ValueError: as for `from_arrays`.
        """
        view = view_of(array, "array")
        layout = cls(
            [planes_of_view(view, plane_axis, block_axis, array)],
            blocks_per_slot=blocks_per_slot,
            dtype=common_dtype([array]) if dtype is None else dtype,
            tokens_per_block=tokens_per_block,
            on_default_stream=not is_jax_array(array) if on_default_stream is None else on_default_stream,
            slot_order=slot_order,
            block_axes=block_axes,
        )
        know_shapes(layout, {check_block(layout, view, [plane_axis, block_axis], "array")})
        return layout

    @classmethod
    def from_tree(cls, arrays: Any, *, axes: Sequence[str], blocks_per_slot: SupportsIndex = 1) -> KVLayout:
        """Return a layout of one group, from an array or a tree of arrays: lists, tuples and dicts, with an array a
        layer, say. All have the same axes. Nothing is copied; the layout keeps the arrays alive. `dtype` and
        `on_default_stream` are as `from_arrays` finds them, `tokens_per_block` is the extent of "tokens", or None.

        Args:
            arrays: as for `from_arrays`. The order of a dict is that of its sorted keys, as in JAX.
            axes: what each axis of an array counts: "blocks", and where there are such axes "planes" (K and V, layers)
                and "tokens". The others are axes of a block, and so is "tokens": any names will do, if all programs
                that share stored bytes use the same. Their order is that of the shape, and the layout's `block_axes`
                that of memory: a transposed view has the keys of the array behind it. An axis of 1 keeps its place.
            blocks_per_slot: as for `KVLayout`.

        Raises:
            LayoutError: as for `from_stacked`; `axes` does not name all axes, in ASCII; or two arrays differ in the
                extent of "tokens", or in the order of a block's axes in memory.
            ClosedError: as for `from_arrays`.
        """
        names = tuple(axes) if isinstance(axes, Sequence) and not isinstance(axes, str) else ()
        known = all(isinstance(name, str) for name in names)
        if not known or names.count("blocks") != 1 or len(set(names)) < len(names):
            raise LayoutError(
                'axes must name each axis of an array once, "blocks" among them, such as ("planes", "blocks", '
                f'"tokens", "heads", "dim"), got {shown(axes)}'
            )
        planes, views, given = list[Plane](), list[ArrayView](), leaves(arrays, "arrays")
        if not given:
            raise LayoutError(f"arrays must be an array in GPU memory, or a tree of them, got {shown(arrays)}")
        for name, array in given:
            views.append(view := view_of(array, name))
            if len(view.shape) != len(names):
                raise LayoutError(f"{name} has shape {view.shape}, and axes names {len(names)} axes: {names}")
            if "planes" in names:
                planes += planes_of_view(view, names.index("planes"), names.index("blocks"), array)
            else:
                planes.append(plane_of_view(view, name, array, block_axis=names.index("blocks")))
        tokens = {view.shape[names.index("tokens")] for view in views} if "tokens" in names else set()
        if len(tokens) > 1:
            raise LayoutError(f"a block of all arrays must hold as many tokens, got {sorted(tokens)} for axes {names}")
        inner = [axis for axis, name in enumerate(names) if name not in ("blocks", "planes")]
        orders = [memory_order(view, inner) for view in views]
        # An array's axes of extent 1 fit any order, so another array may say where in memory they would be.
        common = next((it for it in orders if all(memory_order(view, it) == it for view in views)), None)
        if common is None:
            other = next(at for at, view in enumerate(views) if memory_order(view, orders[0]) != orders[0])
            first, differing = ([names[axis] for axis in orders[at]] for at in (0, other))
            raise LayoutError(
                f"{given[0][0]} has a block's axes in the order {first} in memory, and {given[other][0]} in the order "
                f"{differing}. Keys name one order for all arrays: allocate them alike, or make a cache for each order"
            )
        layout = cls(
            [planes],
            blocks_per_slot=blocks_per_slot,
            dtype=common_dtype([array for _, array in given]),
            tokens_per_block=min(tokens, default=None),
            on_default_stream=not any(is_jax_array(array) for _, array in given),
            block_axes=[names[axis] for axis in common] or None,
        )
        know_shapes(layout, {tuple(view.shape[axis] for axis in common) for view in views})
        return layout

    def with_codec(self, codec: CodecName | Sequence[CodecName]) -> KVLayout:
        """Return a new layout, like this one but with `codec` (a name, or a list with one for each group): slots have
        another size and order of bytes then, and keys change. This layout stays as it is.

        Raises:
            LayoutError: no such codec, or it cannot code the blocks, see `KVLayout`.
        """
        return KVLayout(
            [group.planes for group in self.groups],
            blocks_per_slot=self.blocks_per_slot,
            dtype=self.dtype,
            tokens_per_block=self.tokens_per_block,
            on_default_stream=self.on_default_stream,
            slot_order=self._slot_order,
            block_axes=self.block_axes,
            block_shape=self.block_shapes,
            codec=codec,
        )

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that are equal for two layouts if one cache can load blocks that the other has stored.

        It depends on `dtype`, `block_axes`, `tokens_per_block`, `blocks_per_slot`, and for every group on the order of
        its slots, on its codec, and on the `block_bytes` of each plane, but not on addresses, padding, or the number of
        blocks. docs/keys.md says how it is computed.

        Raises:
            LayoutError: `dtype`, `block_axes` or `tokens_per_block` is None, or `dtype` is not the type of one element.
        """
        missing = [name for name in ("dtype", "block_axes", "tokens_per_block") if getattr(self, name) is None]
        if missing:
            verb, what = ("is", "it") if len(missing) == 1 else ("are", "them")
            raise LayoutError(
                f"{' and '.join(missing)} of the layout {verb} None, and keys depend on {what}: give the layout (or "
                'OwnedCache) for example dtype="bfloat16", tokens_per_block=16, block_axes=("tokens", "heads", "dim"); '
                'for arrays in open_cache, name "tokens" in axes'
            )
        assert self.block_axes is not None
        message = struct.pack("<Q", FINGERPRINT_VERSION) + _with_length(dtype_name(self.dtype))
        message += struct.pack("<Q", len(self.block_axes)) + b"".join(map(_with_length, self.block_axes))
        words = [self.tokens_per_block, self.blocks_per_slot, len(self.groups)]
        for group in self.groups:
            differs = self.blocks_per_slot > 1 and len(group.planes) > 1  # else both orders give the same bytes
            words += [int(differs and group.slot_order == "block-major"), len(group.planes)]
            words += [plane.block_bytes for plane in group.planes]
        message += struct.pack(f"<{len(words)}Q", *words)
        if any(group.coding for group in self.groups):
            message += b"".join(map(_with_length, self.codecs))
        return blake2b(message, digest_size=16, person=b"kvoffload layout").digest()

    def slots_for(self, num_blocks: int, *, first_sub_block: int = 0) -> int:
        """Return how many slots a transfer of so many blocks needs if it begins at sub-block `first_sub_block`, from 0,
        of its first slot. The numbers are not checked; no blocks need no slot.
        """
        return -(-(num_blocks + first_sub_block) // self.blocks_per_slot) if num_blocks else 0

    def __repr__(self) -> str:
        folds = describe_fold(fold(self))
        return f"KVLayout({describe_groups(self)}, slot_bytes={self.slot_bytes}; {folds} by address alone)"


def know_shapes(layout: KVLayout, *found: set[tuple[int, ...]]) -> None:
    """Take the extents of the blocks in a group's arrays, if these are alike and have the layout's axes and dtype."""
    with suppress(LayoutError):  # they may count other elements than dtype names, such as the bytes of packed ones
        layout.block_shapes = layout._checked_shapes([max(each) if len(each) == 1 else None for each in found])


def check_block(layout: KVLayout, view: ArrayView, counting: Sequence[SupportsIndex], name: str) -> tuple[int, ...]:
    """Return the shape of a block of this array. LayoutError if `block_axes` does not say what lies where in it.

    1. The block is permuted in memory. The names may be in the order of memory, as documented, or in that of the shape,
       so sorting them would give those who obeyed the key of other bytes.
    2. The axis named "tokens" does not have `tokens_per_block` elements. A key for more tokens than a block holds would
       give wrong bytes for a hit.

    Args:
        counting: the axes that count blocks and planes. The others are those of a block.
    """
    names, tokens = layout.block_axes, layout.tokens_per_block
    outer = {operator.index(axis) % len(view.shape) for axis in counting}
    inner = [axis for axis in range(len(view.shape)) if axis not in outer]
    shape = tuple(view.shape[axis] for axis in inner)
    if names is None:
        return shape
    if (order := memory_order(view, inner)) != inner:
        raise LayoutError(
            f"{name} of shape {view.shape} has the axes {inner} of a block in the order {order} in memory (strides of "
            f"{view.strides} bytes), and block_axes={names} does not tell which order it is in: use "
            "KVLayout.from_tree(..., axes=...), which takes a name for each axis of the shape and finds the order, or "
            "pass the array transposed to the order of its memory"
        )
    if tokens is None or len(names) != len(shape) or "tokens" not in names:
        return shape
    extent = shape[names.index("tokens")]
    if extent != tokens:
        raise LayoutError(
            f"tokens_per_block is {tokens}, but the axis 'tokens' of a block of shape {shape}, named {names} by "
            f"block_axes, has {extent}: give tokens_per_block={extent}, or the names in the order of the axes"
        )
    return shape


def checked_codecs(codec: Any, groups: int, dtype: DTypeLike | None) -> tuple[CodecName, ...]:
    codecs = (codec,) * groups if isinstance(codec, str) else tuple(codec) if isinstance(codec, list | tuple) else ()
    if len(codecs) != groups or any(each not in CODECS for each in codecs):
        raise LayoutError(
            f"codec must be one of {', '.join(CODECS)}, or a list with one for each group, got {shown(codec)}"
        )
    if dtype is not None and dtype_name(dtype) not in ("bfloat16", "uint16") and "bf16-12" in codecs:
        raise LayoutError(
            f"codec={shown(codec)} codes bfloat16, or its bits as uint16, and dtype is {dtype_name(dtype)}: leave "
            "codec out"
        )
    return codecs  # type: ignore[return-value]  # each is in CODECS


def _with_length(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def describe_groups(layout: KVLayout) -> str:
    """Return the groups of a layout in words, for a repr: planes x block bytes, blocks, device order, blocks per slot.

    It names the order of the slots only if that differs from the device's and changes the bytes.
    """
    texts = []
    for group in layout.groups:
        sizes = sorted({plane.block_bytes for plane in group.planes})
        listed = "/".join(str(size) for size in sizes[:3]) + ("/..." if len(sizes) > 3 else "")
        other = group.slot_order != group.device_order and layout.blocks_per_slot > 1 and len(group.planes) > 1
        slots = f" in {group.slot_order} slots" if other else ""
        order = f"{group.device_order}{slots}{', coded' if group.coding else ''}"
        texts.append(f"{len(group.planes)} planes x {listed} B x {group.num_blocks} blocks ({order})")
    return " + ".join(texts) + f", blocks_per_slot={layout.blocks_per_slot}"


# planes on several devices --------------------------------------------------------------------------------------------


class ShardedGroup(NamedTuple):
    """A group of a sharded layout: planes on every device that share a block table.

    Attributes:
        num_blocks: how many blocks each plane has.
        members: the `Group` of each device.
    """

    num_blocks: int
    members: tuple[Group, ...]


class ShardedLayout:
    """One KV cache spread over several devices: each has some heads of every layer, or some of the layers.

    Block `b` of a group is block `b` on every device. Devices may have different numbers and sizes of planes.

    Args:
        layouts: one per device, in the order of the engine's devices. They must agree in `num_groups`, `num_blocks` of
            each group, `blocks_per_slot`, `tokens_per_block`, `dtype`, `block_axes` and `codecs`.

    Attributes:
        layouts: a tuple of them.
        groups: a tuple of `ShardedGroup`, each with the `Group` of every device.
        blocks_per_slot, tokens_per_block, dtype, codecs: the values that all layouts have.

    Raises:
        LayoutError: the layouts do not agree, planes of two layouts share bytes, or the list is empty.
        TypeError: `layouts` is no sequence, or one is no KVLayout.
    """

    def __init__(self, layouts: Sequence[KVLayout]) -> None:
        if not isinstance(layouts, Sequence):
            raise TypeError(f"layouts must be a list with a KVLayout for each device, got {shown(layouts)}")
        for index, layout in enumerate(layouts):
            if not isinstance(layout, KVLayout):
                raise TypeError(f"layouts[{index}] must be a KVLayout, got {shown(layout)}")
        if not layouts:
            raise LayoutError("layouts is empty; give one KVLayout for each device")
        self.layouts = tuple(layouts)
        first = layouts[0]
        for index, layout in enumerate(layouts):
            for (what, mine), (_, other) in zip(_in_common(layout), _in_common(first), strict=False):
                if mine != other:
                    raise LayoutError(
                        f"layouts[{index}] has {what} {mine}, layouts[0] has {other}; a block and a slot have one "
                        "number on all devices, so make them the same"
                    )
        # Planes of two layouts share no bytes: the engines of two devices do not wait for each other.
        spread = [(plane, at) for at, layout in enumerate(layouts) for group in layout.groups for plane in group.planes]
        for cluster in clusters([plane for plane, _ in spread]):
            for (low, owner), (high, index) in combinations([spread[at] for at in cluster], 2):
                if owner != index and share_bytes(low, high):
                    raise LayoutError(
                        f"layouts[{owner}] and layouts[{index}] share bytes of device memory, {low} and {high}; the "
                        "planes of each device must be its own"
                    )
        self.blocks_per_slot = first.blocks_per_slot
        self.tokens_per_block = first.tokens_per_block
        self.dtype = first.dtype
        self.codecs = first.codecs
        self.groups = tuple(
            ShardedGroup(members[0].num_blocks, members)
            for members in zip(*(layout.groups for layout in layouts), strict=True)
        )

    @classmethod
    def from_stacked(
        cls, arrays: Sequence[GpuArray], *, plane_axis: SupportsIndex, block_axis: SupportsIndex, **options: Any
    ) -> ShardedLayout:
        """Return a layout of one group from one array per device. Nothing is copied; the layout keeps the arrays alive.

        Args:
            arrays: a list or tuple of arrays for `KVLayout.from_stacked`, in the order of the engine's devices. All
                must have the same number of blocks; heads or planes may differ.
            plane_axis, block_axis: which axis of every array counts the planes, and which the blocks.
            options: further keyword arguments of `KVLayout.from_stacked`; the same for all arrays.

        Raises:
            LayoutError: an array cannot be a layout; a note names it. Or the layouts do not agree, see `ShardedLayout`,
                or `arrays` is empty.
            ClosedError, ValueError: as `KVLayout.from_stacked`.
            TypeError: `arrays` is no list or tuple, or an option is unknown.
        """
        if not isinstance(arrays, list | tuple):
            raise TypeError(f"arrays must be a list with an array for each device, got {shown(arrays)}")
        layouts = []
        for index, array in enumerate(arrays):
            try:
                layouts.append(KVLayout.from_stacked(array, plane_axis=plane_axis, block_axis=block_axis, **options))
            except Exception as error:
                error.add_note(f"for arrays[{index}]")
                raise
        return cls(layouts)

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that are equal for two layouts if one cache can load blocks that the other has stored.

        It depends on the number of layouts and, in order, on the fingerprint of each, so it never equals that of a
        shard alone. docs/keys.md says how it is computed.

        Raises:
            LayoutError: `dtype`, `block_axes` or `tokens_per_block` is None.
        """
        each = b"".join(layout.fingerprint for layout in self.layouts)
        message = struct.pack("<Q", len(self.layouts)) + each
        return blake2b(message, digest_size=16, person=b"kvoffload shards").digest()

    def with_codec(self, codec: CodecName | Sequence[CodecName]) -> ShardedLayout:
        return ShardedLayout([layout.with_codec(codec) for layout in self.layouts])

    def slots_for(self, num_blocks: int, *, first_sub_block: int = 0) -> int:
        """Return how many slots a transfer of so many blocks needs if it begins at sub-block `first_sub_block`, from 0,
        of its first slot, the same on every device. The numbers are not checked; no blocks need no slot.
        """
        return self.layouts[0].slots_for(num_blocks, first_sub_block=first_sub_block)

    def __repr__(self) -> str:
        return f"ShardedLayout({list(self.layouts)})"


def _in_common(layout: KVLayout) -> Iterator[tuple[str, object]]:
    """Yield the properties that the layouts of all devices have in common: name and value."""
    yield "num_groups", layout.num_groups
    yield from ((f"groups[{number}].num_blocks", group.num_blocks) for number, group in enumerate(layout.groups))
    yield from ((name, getattr(layout, name)) for name in ("blocks_per_slot", "tokens_per_block", "block_axes"))
    yield "dtype", None if layout.dtype is None else dtype_name(layout.dtype)
    yield "codecs", layout.codecs

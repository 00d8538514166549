"""Whole blocks: what a block holds, by the names of its axes, however a program lays it out.

A slot holds blocks in the order of the device's memory, several in one slot, coded, or on each device those of some
heads. The *whole block* of a group is one array, (planes, *axes), with the heads of all devices and the axes in one
order: "tokens", "heads", then others by name, "dim" last. Files and peers compare and exchange these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvoffload.errors import LayoutError, MissingKeyError
from kvoffload.internal.types import Int64Array, UInt8Array
from kvoffload.layout.dtypes import dtype_name, element_bytes
from kvoffload.layout.layout import SLOT_ALIGNMENT, KVLayout, ShardedLayout
from kvoffload.layout.planes import Group

Blocks = NDArray[Any]  # whole blocks of one group: unsigned, of the elements' size, (blocks, planes, *axes)
MOST_AXES = 24  # numpy 1.26 has arrays of 32
_RANKS = {"tokens": 0, "heads": 1, "dim": 3}  # of axes in a whole block; all others have 2


class GroupForm(NamedTuple):
    """What a whole block of a group is.

    Attributes:
        planes: how many.
        shape: the extents of the axes of a block of one plane.
    """

    planes: int
    shape: tuple[int, ...]


class BlockForm(NamedTuple):
    """What the whole blocks of a cache are; equal for two caches if each can hold the blocks of the other.

    Attributes:
        dtype: of the elements, as `dtype_name` spells it.
        tokens_per_block: of the device, not of a key.
        axes: names, in the order of whole blocks.
        groups: the form of each.
    """

    dtype: str
    tokens_per_block: int
    axes: tuple[str, ...]
    groups: tuple[GroupForm, ...]

    @property
    def element(self) -> np.dtype[Any]:
        """An unsigned integer (or raw bytes) of an element's size: numpy does not know every type of element."""
        nbytes = element_bytes(self.dtype)
        return np.dtype(f"<u{nbytes}" if nbytes in (1, 2, 4, 8) else f"V{nbytes}")

    def block_bytes(self, group: int) -> int:
        form = self.groups[group]
        return form.planes * math.prod(form.shape) * element_bytes(self.dtype)


class WholeBlocks:
    """The blocks in the slots of an engine as whole blocks. Usable from any thread.

    Args:
        layout: of the engine.
        slots: `engine.slots`, an array for each device.

    Attributes:
        form: of the blocks.

    Raises:
        LayoutError: the layout does not say what its blocks hold, or its shards do not divide heads.
    """

    def __init__(self, layout: KVLayout | ShardedLayout, slots: Sequence[UInt8Array]) -> None:
        self._layouts = layout.layouts if isinstance(layout, ShardedLayout) else (layout,)
        self._slots = slots
        self._factor = layout.blocks_per_slot
        assert layout.fingerprint, "raises LayoutError if the meaning of the bytes is not known"
        axes = self._layouts[0].block_axes
        assert axes is not None
        if len(axes) > MOST_AXES:
            raise LayoutError(f"block_axes must be at most {MOST_AXES} for blocks that go into files, got {axes}")
        assert layout.tokens_per_block is not None
        self._order = sorted(range(len(axes)), key=lambda place: (_RANKS.get(axes[place], 2), axes[place]))
        self._heads = axes.index("heads") if "heads" in axes else None
        groups = tuple(self._form_of(group) for group in range(layout.num_groups))
        ordered = tuple(axes[place] for place in self._order)
        self.form = BlockForm(dtype_name(layout.dtype), layout.tokens_per_block, ordered, groups)

    def _form_of(self, group: int) -> GroupForm:
        """Return the form of a group, with the heads of all devices."""
        shapes = [list(shape) for layout in self._layouts if (shape := layout.block_shapes[group]) is not None]
        if len(shapes) < len(self._layouts):
            raise LayoutError(
                f"block_shape of groups[{group}] is None, and a file of whole blocks needs it: give each layout the "
                "extents of block_axes, such as block_shape=(16, 8, 128), or make it from arrays"
            )
        planes = {len(layout.groups[group].planes) for layout in self._layouts}
        if len(shapes) > 1:
            others = {tuple(size for axis, size in enumerate(shape) if axis != self._heads) for shape in shapes}
            if self._heads is None or len(planes) > 1 or len(others) > 1:
                raise LayoutError(
                    f"the devices of a layout whose blocks go into a file must have some heads of every plane each: "
                    f'an axis "heads", as many planes and the same other extents, got {shapes} for groups[{group}]'
                )
            shapes[0][self._heads] = sum(shape[self._heads] for shape in shapes)
        return GroupForm(planes.pop(), tuple(shapes[0][axis] for axis in self._order))

    def gather(self, group: int, rows: Int64Array) -> Blocks:
        """Return the whole blocks in these slots: a new array, C-contiguous, that begins with a page.

        Raises:
            MissingKeyError: a slot has no blocks that its codec can hold.
        """
        form = self.form.groups[group]
        shape = (len(rows) * self._factor, form.planes, *form.shape)
        blocks = pages(math.prod(shape) * self.form.element.itemsize).view(self.form.element).reshape(shape)
        for slots, mine, parts in self._parts(group, blocks):
            for row, part in zip(rows.tolist(), parts, strict=True):
                stored = slots[row, : mine.payload_bytes]
                values, fit = stored.view(self.form.element), True
                if mine.coding is not None:
                    values, fits = mine.coding.decode(stored)
                    fit = bool(fits.all())
                if not fit:
                    raise MissingKeyError(f"slot {row} holds blocks that did not fit the codec")
                part[...] = values.reshape(part.shape)
        return blocks

    def scatter(self, group: int, rows: Int64Array, blocks: Blocks) -> NDArray[np.bool_]:
        """Write whole blocks into slots. Returns for each slot whether its blocks fit; without a codec all do."""
        fits = np.ones(len(rows), dtype=bool)
        for slots, mine, parts in self._parts(group, blocks):
            for place, (row, part) in enumerate(zip(rows.tolist(), parts, strict=True)):
                stored = slots[row, : mine.payload_bytes]
                if mine.coding is None:
                    stored.view(self.form.element).reshape(part.shape)[...] = part
                else:
                    records, fit = mine.coding.encode(part)
                    stored[:] = records.reshape(-1)
                    fits[place] &= fit.all()
        return fits

    def _parts(self, group: int, blocks: Blocks) -> Iterator[tuple[UInt8Array, Group, Blocks]]:
        """Yield for each device its slots, its group, and its part of whole blocks as it lies in slots: a view, (slots,
        blocks of a slot, planes, *axes in memory), or (slots, planes, blocks of a slot, *axes in memory).
        """
        begin, back = 0, np.argsort(self._order) + 3
        for slots, layout in zip(self._slots, self._layouts, strict=True):
            mine, shape = layout.groups[group], layout.block_shapes[group]
            assert shape is not None
            parts = blocks.reshape(-1, self._factor, *blocks.shape[1:]).transpose(0, 1, 2, *back)
            if len(self._layouts) > 1:
                assert self._heads is not None
                end = begin + shape[self._heads]
                parts = parts[(slice(None),) * (3 + self._heads) + (slice(begin, end),)]
                begin = end
            yield slots, mine, parts if mine.slot_order == "block-major" else parts.swapaxes(1, 2)


def pages(nbytes: int) -> UInt8Array:
    """Return bytes that begin with a page of memory, as direct I/O needs it."""
    found = np.empty(nbytes + SLOT_ALIGNMENT, dtype=np.uint8)
    begin = -found.__array_interface__["data"][0] % SLOT_ALIGNMENT
    return found[begin : begin + nbytes]

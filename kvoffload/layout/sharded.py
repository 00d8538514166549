"""ShardedLayout: one KV cache whose planes are on several devices."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple, SupportsIndex

from kvoffload.errors import LayoutError
from kvoffload.internal.checks import shown
from kvoffload.internal.types import GpuArray
from kvoffload.layout.dtypes import dtype_name
from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import Group, Plane, share_bytes


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
        layouts: one per device, in the order of the devices. They must agree in `num_groups`, `num_blocks` of each
            group, `blocks_per_slot`, `tokens_per_block`, `dtype` and `block_axes`.

    Attributes:
        layouts: a tuple of them.
        groups: a tuple of `ShardedGroup`, each with the `Group` of every device.
        blocks_per_slot, tokens_per_block, dtype: the values that all layouts have.

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
            for what, mine, other in _agreements(layout, first):
                if mine != other:
                    raise LayoutError(
                        f"layouts[{index}] has {what} {mine}, layouts[0] has {other}; a block and a slot have one "
                        "number on all devices, so make them the same"
                    )
        # Planes of two layouts share no bytes: the engines of two devices do not wait for each other.
        spread = ((plane, at) for at, layout in enumerate(layouts) for group in layout.groups for plane in group.planes)
        active: list[tuple[Plane, int]] = []  # planes that may reach into the following ones
        for plane, index in sorted(spread, key=lambda each: (each[0].address, each[1])):
            active = [each for each in active if each[0].end > plane.address]
            for low, owner in active:
                if owner != index and share_bytes(low, plane):
                    raise LayoutError(
                        f"layouts[{owner}] and layouts[{index}] share bytes of device memory, {low} and {plane}; the "
                        "planes of each device must be its own"
                    )
            active.append((plane, index))
        self.blocks_per_slot = first.blocks_per_slot
        self.tokens_per_block = first.tokens_per_block
        self.dtype = first.dtype
        self.groups = tuple(
            ShardedGroup(members[0].num_blocks, members)
            for members in zip(*(layout.groups for layout in layouts), strict=True)
        )

    @classmethod
    def from_stacked(
        cls, arrays: Sequence[GpuArray], *, plane_axis: SupportsIndex, block_axis: SupportsIndex, **options: Any
    ) -> ShardedLayout:
        """A layout of one group from one array per device. Nothing is copied; the layout keeps the arrays alive.

        Args:
            arrays: a list or tuple of arrays for `KVLayout.from_stacked`, in the order of the devices. All must have
                the same number of blocks; heads or planes may differ.
            plane_axis, block_axis: which axis of every array counts the planes, and which the blocks.
            options: further keyword arguments of `KVLayout.from_stacked`; the same for all arrays.

        Raises:
            LayoutError: an array cannot be a layout; a note names it. Or the layouts do not agree, see `ShardedLayout`.
            ClosedError: as `KVLayout.from_stacked`.
            TypeError: `arrays` is no list or tuple.
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

    def slots_for(self, num_blocks: int, *, first_sub_block: int = 0) -> int:
        """How many slots a transfer of so many blocks needs if it begins at sub-block `first_sub_block`, from 0, of its
        first slot, the same on every device. The numbers are not checked.
        """
        return self.layouts[0].slots_for(num_blocks, first_sub_block=first_sub_block)

    def __repr__(self) -> str:
        return f"ShardedLayout({list(self.layouts)})"


def _agreements(layout: KVLayout, first: KVLayout) -> Iterator[tuple[str, object, object]]:
    """The properties that two layouts must have in common: name, and both values."""
    yield "num_groups", layout.num_groups, first.num_groups
    for number, (mine, other) in enumerate(zip(layout.groups, first.groups, strict=True)):
        yield f"groups[{number}].num_blocks", mine.num_blocks, other.num_blocks
    yield "blocks_per_slot", layout.blocks_per_slot, first.blocks_per_slot
    yield "tokens_per_block", layout.tokens_per_block, first.tokens_per_block
    yield "block_axes", layout.block_axes, first.block_axes
    yield "dtype", _name_of_dtype(layout), _name_of_dtype(first)


def _name_of_dtype(layout: KVLayout) -> str | None:
    return None if layout.dtype is None else dtype_name(layout.dtype)

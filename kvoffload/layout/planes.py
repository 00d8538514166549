"""Device tensors indexed by block, and groups of such planes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations, pairwise
from typing import Literal, SupportsIndex, TypeAlias

import numpy as np

from kvoffload.errors import LayoutError
from kvoffload.internal.checks import index_or, shown
from kvoffload.internal.types import Int64Array
from kvoffload.layout.coding import CodecName, Coding, coding_of

INTEGER_LIMIT = 1 << 63  # numbers of a layout, and what follows from them, are int64 in plans and in the fingerprint
SlotOrder: TypeAlias = Literal["plane-major", "block-major"]  # see `Group`
MAX_SLOT_BYTES = 1 << 40  # of one slot: 1 TiB is far beyond any use, and sums of such sizes stay far below 2**63


def positive(name: str, value: SupportsIndex) -> int:
    """Return `value` as an int in `[1, 2**63)`.

    Args:
        value: an integer of Python or numpy, or a `cuda.bindings.driver.CUdeviceptr`.

    Raises:
        LayoutError: it is no such integer; the message names the argument and the value.
    """
    number = int(value) if type(value).__name__ == "CUdeviceptr" else index_or(value, 0)
    if not 1 <= number < INTEGER_LIMIT:
        raise LayoutError(f"{name} must be an integer of at least 1 and below 2**63, got {shown(value)}")
    return number


@dataclass(frozen=True, init=False, repr=False)
class Plane:
    """One device tensor indexed by block: block `i` is `block_bytes` bytes at `address + i * block_stride`.

    Args:
        address: the device address of block 0.
        block_bytes: the bytes of one block. Padding between blocks is never read or written.
        num_blocks: how many blocks there are; block ids go from 0 to `num_blocks - 1`.
        block_stride: bytes from one block to the next. None means `block_bytes`: no padding.
        owner: any object that the plane is to keep alive, such as the array that the memory belongs to. Without
            one, keep the memory allocated until every engine over the plane is closed.

    Raises:
        LayoutError: a number is not an integer of at least 1, the stride is smaller than the block, or the plane ends
            beyond the largest address, 2**63 - 1.
    """

    address: int
    block_bytes: int
    num_blocks: int
    block_stride: int
    owner: object = field(compare=False)

    def __init__(
        self,
        address: SupportsIndex,
        *,
        block_bytes: SupportsIndex,
        num_blocks: SupportsIndex,
        block_stride: SupportsIndex | None = None,
        owner: object = None,
    ) -> None:
        put = object.__setattr__
        put(self, "address", positive("address", address))
        put(self, "block_bytes", positive("block_bytes", block_bytes))
        put(self, "num_blocks", positive("num_blocks", num_blocks))
        stride = self.block_bytes if block_stride is None else positive("block_stride", block_stride)
        if stride < self.block_bytes:
            raise LayoutError(f"block_stride must be at least block_bytes ({self.block_bytes}), got {stride}")
        put(self, "block_stride", stride)
        put(self, "owner", owner)
        if self.end >= INTEGER_LIMIT:
            raise LayoutError(
                f"{self} ends beyond the largest address, 2**63 - 1; check num_blocks and block_stride (bytes)"
            )

    def disowned(self) -> Plane:
        sizes = {"num_blocks": self.num_blocks, "block_stride": self.block_stride}
        return Plane(self.address, block_bytes=self.block_bytes, **sizes)

    @property
    def span_bytes(self) -> int:
        """Bytes from the first byte of block 0 to the last byte of the last block, padding between blocks included."""
        return (self.num_blocks - 1) * self.block_stride + self.block_bytes

    @property
    def end(self) -> int:
        """The device address after the last byte of the last block."""
        return self.address + self.span_bytes

    def __repr__(self) -> str:
        padding = f", block_stride={self.block_stride}" if self.block_stride != self.block_bytes else ""
        return f"Plane({self.address:#x}, block_bytes={self.block_bytes}, num_blocks={self.num_blocks}{padding})"


def refuse_overlap(planes: Sequence[Plane], name: str) -> None:
    """Raise LayoutError if two planes share a byte: a load would write it twice, in no particular order.

    Interleaved planes, `(blocks, planes, ...)`, overlap as ranges and still share no byte: they have one stride, and
    their blocks lie at different places within it. Planes that overlap with different strides count as sharing.

    Args:
        name: names the sequence in the message, which gives both planes by index.
    """
    for cluster in clusters(planes):
        if len(cluster) > 1 and not _interleaved([planes[index] for index in cluster]):  # sooner than all pairs
            for low, high in combinations(cluster, 2):
                if share_bytes(planes[low], planes[high]):
                    raise LayoutError(f"{name}[{low}] and {name}[{high}] share bytes of device memory")


def _interleaved(planes: Sequence[Plane]) -> bool:
    """Return True if all planes have the same stride and use different bytes in it. False proves nothing."""
    stride = planes[0].block_stride
    if any(plane.block_stride != stride for plane in planes):
        return False
    places = sorted((plane.address % stride, plane.block_bytes) for plane in planes)
    following = [*(start for start, _ in places[1:]), places[0][0] + stride]
    return all(start + nbytes <= limit for (start, nbytes), limit in zip(places, following, strict=True))


def clusters(planes: Sequence[Plane]) -> Iterator[list[int]]:
    """Yield the indices of planes whose ranges overlap, by rising addresses; a plane alone is a cluster."""
    order = sorted(range(len(planes)), key=lambda index: planes[index].address)
    cluster, end = order[:1], planes[order[0]].end
    for index in order[1:]:
        if planes[index].address >= end:
            yield cluster
            cluster = []
        cluster.append(index)
        end = max(end, planes[index].end)
    yield cluster


def share_bytes(low: Plane, high: Plane) -> bool:
    """Return whether two planes share a byte; `low` begins first."""
    if high.address >= low.end or low.block_stride != high.block_stride:
        return high.address < low.end
    shift = (high.address - low.address) % low.block_stride
    return shift < low.block_bytes or shift + high.block_bytes > low.block_stride


def refuse_unaligned(planes: Sequence[Plane], name: str) -> None:
    for index, plane in enumerate(planes):
        if (plane.address | plane.block_stride) % 4:
            raise LayoutError(
                "a codec needs planes whose address and block_stride are multiples of 4, and "
                f'{name}[{index}] is {plane}: give {name} codec="raw"'
            )


class Group:
    """Planes that share one block table, in the order in which a slot holds them.

    Args:
        planes, blocks_per_slot, slot_order, codec: see `KVLayout`.
        name: for messages.

    Attributes:
        planes: the planes. All have the same `num_blocks`, and no two share a byte.
        num_blocks: how many blocks each plane has.
        device_order: "block-major" if a block of all planes is one range on the device, as in an array
            `(blocks, planes, ...)`, else "plane-major".
        slot_order: "block-major" (one sub-block after the other, each with all planes) or "plane-major" (one plane
            after the other, each with all sub-blocks). The bytes are the same if a slot holds one block, or if there is
            one plane.
        host_offsets: int64, (planes,): where in a slot each plane's first sub-block begins, in bytes.
        host_steps: int64, (planes,): bytes from one sub-block of a plane to its next.
        payload_bytes: how many bytes of a slot this group uses.
        bytes_per_block: bytes of one block over all planes.
        coding: how slots hold the blocks; None: as they are.
        slot_block_bytes: bytes of one block in a slot; as `bytes_per_block`, or fewer with a coding.

    Raises:
        LayoutError: there are no planes, one is not a `Plane`, `num_blocks` differ, planes share bytes, blocks are too
            large for a slot, or the codec cannot code them.
    """

    def __init__(
        self,
        planes: Sequence[Plane],
        blocks_per_slot: int,
        name: str,
        slot_order: SlotOrder | None = None,
        codec: CodecName = "raw",
    ) -> None:
        self.planes = tuple(planes)
        if not self.planes:
            raise LayoutError(f"{name} has no planes; give each group at least one Plane")
        for index, plane in enumerate(self.planes):
            if not isinstance(plane, Plane):
                raise LayoutError(f"{name}[{index}] must be a Plane, got {type(plane).__name__}")
        self.num_blocks = self.planes[0].num_blocks
        if any(plane.num_blocks != self.num_blocks for plane in self.planes):
            counts = sorted({plane.num_blocks for plane in self.planes})
            raise LayoutError(f"{name}: planes of one group share a block table, but num_blocks differ: {counts}")
        refuse_overlap(self.planes, name)
        self.bytes_per_block = sum(plane.block_bytes for plane in self.planes)
        sizes = [plane.block_bytes for plane in self.planes]
        self.coding: Coding | None = None if codec == "raw" else coding_of(sizes, name)
        if self.coding is not None:
            sizes = [self.coding.coded(size) for size in sizes]
            refuse_unaligned(self.planes, name)
            if slot_order == "plane-major" and blocks_per_slot > 1:
                raise LayoutError(
                    f'slot_order="plane-major" and codec={codec!r} of {name}: coded blocks are whole ranges of slots; '
                    'give slot_order="block-major", or blocks_per_slot=1'
                )
            slot_order = "block-major"
        self.slot_block_bytes = sum(sizes)
        self.payload_bytes = self.slot_block_bytes * blocks_per_slot
        # sizes and offsets in a slot are int64: larger ones would wrap around, and copies would miss the pool
        if self.bytes_per_block > MAX_SLOT_BYTES:
            raise LayoutError(
                f"{name}: one block has {self.bytes_per_block} bytes over its planes, more than a slot may have "
                f"({MAX_SLOT_BYTES}); check block_bytes of the planes"
            )
        if self.payload_bytes > MAX_SLOT_BYTES:
            raise LayoutError(
                f"blocks_per_slot must be at most {MAX_SLOT_BYTES // self.bytes_per_block} for blocks of "
                f"{self.bytes_per_block} bytes over the planes of {name} (a slot has at most {MAX_SLOT_BYTES} bytes), "
                f"got {blocks_per_slot}"
            )
        stride = self.planes[0].block_stride
        whole = stride >= self.bytes_per_block and all(plane.block_stride == stride for plane in self.planes)
        whole = whole and all(one.address + one.block_bytes == other.address for one, other in pairwise(self.planes))
        self.device_order: SlotOrder = "block-major" if whole else "plane-major"
        order: SlotOrder = slot_order or self.device_order
        self.slot_order = order
        factor = 1 if order == "block-major" else blocks_per_slot
        self.host_offsets: Int64Array = np.array(
            list(accumulate((size * factor for size in sizes[:-1]), initial=0)), dtype=np.int64
        )
        steps = [self.slot_block_bytes] * len(sizes) if order == "block-major" else sizes
        self.host_steps: Int64Array = np.array(steps, dtype=np.int64)

    def disowned(self) -> Group:
        group = copy.copy(self)
        group.planes = tuple(plane.disowned() for plane in self.planes)
        return group

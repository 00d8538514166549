"""What a paged KV cache looks like in GPU memory, and where its blocks lie in a host slot. No device is touched here.

A *plane* is one device tensor indexed by block. A *group* is the planes that share one block table. A *slot* of the
host pool holds `f = blocks_per_slot` blocks of one group: plane 0's `f` sub-blocks, then plane 1's, ..., payload only:

    slot  | plane 0: sub-block 0 .. f-1 | plane 1: sub-block 0 .. f-1 | ... | padding to a multiple of 4096 |
          0                      f * block_bytes[0]                   payload_bytes                     slot_bytes

so that one block is one strided range on both sides, and a slot is one contiguous range for a disk or a network.
"""

from __future__ import annotations

import copy
import itertools
import operator
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.errors import LayoutError

SLOT_ALIGNMENT = 4096  # a page: slots can be registered, written to disk with O_DIRECT, and sent, one by one

Int64Array = npt.NDArray[np.int64]


def _positive(name: str, value: Any, minimum: int = 1) -> int:
    """`value` as an int of at least `minimum`, or a LayoutError that names it."""
    try:
        number = int(value) if type(value).__name__ == "CUdeviceptr" else operator.index(value)
    except TypeError:
        raise LayoutError(f"{name} must be an integer, got {value!r}") from None
    if isinstance(value, bool | np.bool_) or number < minimum:
        raise LayoutError(f"{name} must be an integer of at least {minimum}, got {value!r}")
    return number


@dataclass(frozen=True, init=False, repr=False)
class Plane:
    """One device tensor indexed by block: block `i` is `block_bytes` bytes at `address + i * block_stride`.

    Args:
        address: device address of block 0, bytes.
        block_bytes: payload of one block, bytes. Padding between blocks is never read or written.
        num_blocks: blocks in the plane; ids are in `[0, num_blocks)`.
        block_stride: bytes from one block to the next; None means `block_bytes` (no padding).
        owner: kept alive as long as the plane is; what the memory belongs to.

    Raises:
        LayoutError: a number that is not a positive integer, or a stride smaller than the payload.
    """

    address: int
    block_bytes: int
    num_blocks: int
    block_stride: int
    owner: object = field(compare=False)

    def __init__(
        self, address: int, *, block_bytes: int, num_blocks: int, block_stride: int | None = None, owner: object = None
    ) -> None:
        put = object.__setattr__
        put(self, "address", _positive("address", address))
        put(self, "block_bytes", _positive("block_bytes", block_bytes))
        put(self, "num_blocks", _positive("num_blocks", num_blocks))
        stride = self.block_bytes if block_stride is None else _positive("block_stride", block_stride)
        if stride < self.block_bytes:
            raise LayoutError(f"block_stride must be at least block_bytes ({self.block_bytes}), got {stride}")
        put(self, "block_stride", stride)
        put(self, "owner", owner)
        if self.end >= 1 << 63:
            raise LayoutError(f"{self} ends beyond the largest address, 2**63 - 1")

    def disowned(self) -> Plane:
        """The same plane without its owner."""
        sizes = {"num_blocks": self.num_blocks, "block_stride": self.block_stride}
        return Plane(self.address, block_bytes=self.block_bytes, **sizes)

    @property
    def span_bytes(self) -> int:
        """Bytes from the first byte of block 0 to the last byte of the last block."""
        return (self.num_blocks - 1) * self.block_stride + self.block_bytes

    @property
    def end(self) -> int:
        """One past the last byte of the last block."""
        return self.address + self.span_bytes

    def __repr__(self) -> str:
        padding = f", block_stride={self.block_stride}" if self.block_stride != self.block_bytes else ""
        return f"Plane({self.address:#x}, block_bytes={self.block_bytes}, num_blocks={self.num_blocks}{padding})"


class Group:
    """Planes that share one block table, in the order in which a slot holds them.

    Attributes:
        planes: the planes; all have the same `num_blocks`, and no two share a byte.
        host_offsets: int64, (planes,): where plane p's sub-blocks begin in a slot, bytes.
        payload_bytes: bytes of a slot that this group uses.
        bytes_per_block: bytes of one block over all planes.
    """

    def __init__(self, planes: Sequence[Plane], blocks_per_slot: int, name: str) -> None:
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
        _refuse_overlap(self.planes, name)
        sizes = np.array([plane.block_bytes for plane in self.planes], dtype=np.int64) * blocks_per_slot
        self.host_offsets: Int64Array = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int64)
        self.payload_bytes = int(sizes.sum())
        self.bytes_per_block = self.payload_bytes // blocks_per_slot

    def disowned(self) -> Group:
        """The same group, which keeps nothing alive: planes without their owners."""
        group = copy.copy(self)
        group.planes = tuple(plane.disowned() for plane in self.planes)
        return group


def _refuse_overlap(planes: Sequence[Plane], name: str) -> None:
    """Raise LayoutError when two planes share a byte: a load would then write it twice, in no order.

    Interleaved planes, `(blocks, planes, ...)`, overlap as ranges and yet share nothing: with one stride, what counts
    is where their payloads lie within it.
    """
    order = sorted(range(len(planes)), key=lambda index: planes[index].address)
    cluster: list[int] = []  # planes whose ranges overlap
    end = 0
    for index in order:
        if planes[index].address >= end:
            _refuse_shared_bytes(planes, cluster, name)
            cluster = []
        cluster.append(index)
        end = max(end, planes[index].end)
    _refuse_shared_bytes(planes, cluster, name)


def _refuse_shared_bytes(planes: Sequence[Plane], cluster: list[int], name: str) -> None:
    if len(cluster) < 2 or _interleaved([planes[index] for index in cluster]):
        return
    for low, high in itertools.combinations(cluster, 2):
        if planes[high].address < planes[low].end and _share_bytes(planes[low], planes[high]):
            raise LayoutError(f"{name}[{low}] and {name}[{high}] share bytes of device memory")


def _interleaved(planes: Sequence[Plane]) -> bool:
    """Whether all planes have one stride and keep to different bytes within it; says nothing when False."""
    stride = planes[0].block_stride
    if any(plane.block_stride != stride for plane in planes):
        return False
    places = sorted((plane.address % stride, plane.block_bytes) for plane in planes)
    following = [*(start for start, _ in places[1:]), places[0][0] + stride]
    return all(start + nbytes <= limit for (start, nbytes), limit in zip(places, following, strict=True))


def _share_bytes(low: Plane, high: Plane) -> bool:
    """Whether two planes whose ranges overlap share a byte. Different strides count as sharing."""
    if low.block_stride != high.block_stride:
        return True
    shift = (high.address - low.address) % low.block_stride
    return shift < low.block_bytes or shift + high.block_bytes > low.block_stride


class KVLayout:
    """The planes of a KV cache by group, and the slot that holds their blocks on the host.

    Args:
        groups: one list of planes per group (per block table).
        blocks_per_slot: `f`, device blocks in a host slot. Adjacent device blocks in one slot are copied as rows `f`
            times as wide, which is what planes with small blocks need.
        dtype: of the cache's elements; a description that keys depend on, never used to interpret bytes.
        tokens_per_block: a description that keys depend on.
        on_default_stream: whether the legacy default stream orders what computes on the planes, so that transfers may
            follow it when they are not told what to follow (`after=None`). False for JAX.

    Attributes:
        groups: tuple of `Group`.
        slot_bytes: bytes of one row of the host pool: the largest group's payload, rounded up to 4096.

    Raises:
        LayoutError: no groups, planes that share bytes, planes of one group with different `num_blocks`.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Plane]],
        blocks_per_slot: int = 1,
        dtype: Any = None,
        tokens_per_block: int | None = None,
        on_default_stream: bool = True,
    ) -> None:
        self.blocks_per_slot = _positive("blocks_per_slot", blocks_per_slot)
        self.dtype = dtype
        self.on_default_stream = on_default_stream
        self.tokens_per_block = None if tokens_per_block is None else _positive("tokens_per_block", tokens_per_block)
        if not isinstance(groups, Sequence) or not all(isinstance(group, Sequence) for group in groups):
            raise LayoutError(f"groups must be a list of lists of planes: KVLayout([planes]), got {groups!r:.80}")
        self.groups = tuple(
            Group(planes, self.blocks_per_slot, f"groups[{index}]") for index, planes in enumerate(groups)
        )
        if not self.groups:
            raise LayoutError("groups is empty; a layout needs at least one group of planes")
        largest = max(group.payload_bytes for group in self.groups)
        self.slot_bytes = -(-largest // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    @classmethod
    def from_arrays(cls, arrays: Iterable[Any], **options: Any) -> KVLayout:
        """A layout of one group with a plane per array, without a copy. It keeps the arrays alive.

        Args:
            arrays: objects with `__cuda_array_interface__` or `__dlpack__` in GPU memory: of CuPy, JAX, Numba,
                cuda.core, PyTorch, or `DeviceArray`. Shape `(num_blocks, ...)`, contiguous within a block. For a JAX
                array the host waits until it is computed.
            options: as for `KVLayout`. `dtype` is the arrays', if they have one; `on_default_stream` is False for
                arrays of JAX.

        Raises:
            LayoutError: an array that is not in GPU memory, is read-only, empty, or not contiguous within a block.
        """
        from kvoffload.layout.arrays import options_of, plane_from_array

        given = list(arrays)
        planes = [plane_from_array(array, name=f"arrays[{index}]") for index, array in enumerate(given)]
        return cls([planes], **options_of(given) | options)

    @classmethod
    def from_stacked(cls, array: Any, plane_axis: int = 0, block_axis: int = 1, **options: Any) -> KVLayout:
        """A layout of one group from one array with a plane axis and a block axis, without a copy.

        Such an array always folds: every transfer is one strided copy per block, whatever the number of planes.

        Args:
            array: as for `from_arrays`; the axes besides the two named make up a block.
            plane_axis, block_axis: which axes count planes and blocks.
            options: as for `KVLayout`.

        Raises:
            LayoutError: as `from_arrays`, and for axes that are out of range or the same.
        """
        from kvoffload.layout.arrays import options_of, planes_from_stacked

        return cls([planes_from_stacked(array, plane_axis, block_axis)], **options_of([array]) | options)

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that say what a key's bytes mean: equal where one cache could load what another has stored.

        Over dtype, tokens_per_block, blocks_per_slot and every group's block_bytes, plane by plane; not over where the
        planes lie, how many blocks they have, or padding. Computed once; docs/keys.md has the byte layout.

        Raises:
            LayoutError: dtype or tokens_per_block is None, or dtype names no type of one element.
        """
        for missing in ("dtype", "tokens_per_block"):
            if getattr(self, missing) is None:
                remedy = "KVLayout(..., dtype=..., tokens_per_block=...)"
                raise LayoutError(f"{missing} of the layout is None, and keys depend on it: {remedy}")
        name = dtype_name(self.dtype).encode()
        words = [self.tokens_per_block, self.blocks_per_slot, len(self.groups)]
        for group in self.groups:
            words += [len(group.planes), *(plane.block_bytes for plane in group.planes)]
        message = struct.pack("<Q", len(name)) + name + struct.pack(f"<{len(words)}Q", *words)
        return blake2b(message, digest_size=16, person=b"kvoffload layout").digest()

    def slots_for(self, num_blocks: int, first_sub_block: int = 0) -> int:
        """Slots that a transfer of `num_blocks` blocks spans when its first block is sub-block `first_sub_block`."""
        return -(-(num_blocks + first_sub_block) // self.blocks_per_slot) if num_blocks else 0

    def __repr__(self) -> str:
        from kvoffload.planning.transfer_plan import describe_fold, fold

        folds = describe_fold(fold(self))
        return f"KVLayout({describe_groups(self)}, slot_bytes={self.slot_bytes}; {folds} if each run is one allocation)"

    def _repr_html_(self) -> str:
        from kvoffload.observability.notebook import layout_card

        return layout_card(self)


def describe_groups(layout: KVLayout) -> str:
    """The groups of a layout in words, for a repr: planes x block bytes, blocks, blocks per slot."""
    parts = []
    for group in layout.groups:
        sizes = sorted({plane.block_bytes for plane in group.planes})
        shown = "/".join(str(size) for size in sizes[:3]) + ("/..." if len(sizes) > 3 else "")
        parts.append(f"{len(group.planes)} planes x {shown} B x {group.num_blocks} blocks")
    return " + ".join(parts) + f", blocks_per_slot={layout.blocks_per_slot}"


_ABBREVIATIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def dtype_name(dtype: Any) -> str:
    """The one spelling of an element's type: numpy's name of it, with ">" before it if it is big-endian.

    Args:
        dtype: what numpy takes for a dtype, or an object or a string with a name that numpy does not know, such as
            "bfloat16" without ml_dtypes, or PyTorch's dtypes: the last part of its text, in lower case.

    Raises:
        LayoutError: no type of one element.
    """
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError):
        name = str(dtype).rpartition(".")[2].lower()
        if re.fullmatch("[a-z][a-z0-9_]*", name):  # else a repr, perhaps with an address in it
            return _ABBREVIATIONS.get(name, name)
    else:
        if dtype is not None and not issubclass(found.type, np.flexible | np.object_):
            return f"{'>' if found.str[0] == '>' else ''}{found.name}"
    raise LayoutError(f'dtype must be the type of one element, such as "bfloat16" or np.float16, got {dtype!r:.80}')


# Types that numpy does not know without ml_dtypes, whose names both give them, and their bytes.
NARROW_BYTES = {
    "bfloat16": 2,
    **dict.fromkeys(
        (
            "float8_e4m3fn",
            "float8_e5m2",
            "float8_e4m3fnuz",
            "float8_e5m2fnuz",
            "float8_e4m3b11fnuz",
            "float8_e3m4",
            "float8_e4m3",
            "float8_e8m0fnu",
        ),
        1,
    ),
}


def element_bytes(name: str) -> int:
    """Bytes of an element of a type, by what `dtype_name` says.

    Raises:
        LayoutError: the type is not known.
    """
    if name in NARROW_BYTES:
        return NARROW_BYTES[name]
    try:
        return np.dtype(name).itemsize
    except TypeError:
        known = ", ".join(NARROW_BYTES)
        raise LayoutError(f"dtype must be one that numpy knows, or one of {known}; got {name!r}") from None


def as_ids(name: str, ids: Any, limit: int) -> Int64Array:
    """`ids` as a 1-D int64 array with every value in `[0, limit)`; an empty list is legal.

    Raises:
        LayoutError: not 1-D, not integers, or a value out of range; the message names the position and the value.
    """
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError) as error:
        raise LayoutError(f"{name} must be something numpy turns into a 1-D integer array: {error}") from None
    if array.ndim != 1:
        raise LayoutError(f"{name} must be one-dimensional, got shape {array.shape}")
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise LayoutError(f"{name} must hold integers, got dtype {array.dtype}")
    ids64 = array.astype(np.int64, copy=False)
    if ids64.view(np.uint64).max() >= limit:  # a negative id is a huge unsigned one
        wrong = int(np.flatnonzero((ids64 < 0) | (ids64 >= limit))[0])
        raise LayoutError(f"{name}[{wrong}] is {array[wrong]}, outside [0, {limit})")
    return ids64

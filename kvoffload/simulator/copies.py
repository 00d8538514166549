"""From the arguments of a copy call to arrays: the C structures decoded, the documented limits checked.

Nothing here looks at allocations or streams. Structures are read from their memory, as the driver reads them, so that
an object made with `_ptr=` over a caller's array stands for what the array holds at the call.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver as cuda
from numpy.typing import NDArray

from kvoffload.simulator import space
from kvoffload.simulator.errors import RefusedError, SimulatorError
from kvoffload.simulator.memory import Indices
from kvoffload.simulator.operations import ANY, DURING_API_CALL, STREAM, Descriptors

INVALID_VALUE = cuda.CUresult.CUDA_ERROR_INVALID_VALUE
ATTRIBUTES_BYTES = 24  # sizeof(CUmemcpyAttributes): order, two locations, flags
_POINTER_OPERAND = 1

# CUDA_MEMCPY3D_BATCH_OP with pointer operands
OPERATION_DTYPE = np.dtype(
    {
        "names": [
            "src_type", "src_ptr", "src_row_length", "src_layer_height", "dst_type", "dst_ptr", "dst_row_length",
            "dst_layer_height", "width", "height", "depth", "order", "flags",
        ],
        "formats": ["<u4", "<u8", "<u8", "<u8", "<u4", "<u8", "<u8", "<u8", "<u8", "<u8", "<u8", "<u4", "<u4"],
        "offsets": [0, 8, 16, 24, 40, 48, 56, 64, 80, 88, 96, 104, 108],
        "itemsize": 112,
    }
)  # fmt: skip

# CUDA_MEMCPY2D; the array operands are between, and unsupported
RECTANGLE_DTYPE = np.dtype(
    {
        "names": [
            "src_x", "src_y", "src_type", "src_host", "src_device", "src_pitch", "dst_x", "dst_y", "dst_type",
            "dst_host", "dst_device", "dst_pitch", "width", "height",
        ],
        "formats": ["<u8", "<u8", "<u4", "<u8", "<u8", "<u8", "<u8", "<u8", "<u4", "<u8", "<u8", "<u8", "<u8", "<u8"],
        "offsets": [0, 8, 16, 24, 32, 48, 56, 64, 72, 80, 88, 104, 112, 120],
        "itemsize": 128,
    }
)  # fmt: skip

MEMORY_HOST = int(cuda.CUmemorytype.CU_MEMORYTYPE_HOST)
MEMORY_DEVICE = int(cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE)
MEMORY_UNIFIED = int(cuda.CUmemorytype.CU_MEMORYTYPE_UNIFIED)


class Batch(NamedTuple):
    """A batch call's copies and, for each, its source access order."""

    descriptors: Descriptors
    orders: Indices


def require_list(values: Any, kind: type, argument: str, count: int) -> Sequence[Any]:
    """What the bindings require of a list argument: every element of one type, at least `count` of them."""
    values = [] if values is None else values
    if not set(map(type, values)) <= {kind} and not all(isinstance(value, kind) for value in values):
        name = kind.__name__ if kind is int else f"cydriver.{kind.__name__},"
        raise TypeError(f"Argument '{argument}' is not instance of type (expected tuple[{name}] or list[{name}]")
    if count > len(values):
        raise RuntimeError(f"List is too small: {len(values)} < {count}")
    return values  # type: ignore[no-any-return]


def flat_batch(targets: Any, sources: Any, sizes: Any, orders: Indices, count: int) -> Batch:
    """Descriptors of a flat batch from sequences of at least `count` unsigned integers."""
    target = _unsigned(targets, count)
    source = _unsigned(sources, count)
    width = _unsigned(sizes, count)
    ones = np.ones(count, np.int64)
    return Batch(_checked(target, source, width, ones, width, width), orders)


def access_orders(orders: Sequence[int], first_indices: Sequence[int], count: int) -> Indices:
    """The order of each copy: attribute k applies from `first_indices[k]` on. Raises RefusedError as documented."""
    starts = list(first_indices)
    rising = all(a < b for a, b in itertools.pairwise(starts))
    if not orders or len(orders) > count or starts[0] != 0 or not rising or starts[-1] >= count:
        raise RefusedError(INVALID_VALUE)
    if any(order not in (STREAM, DURING_API_CALL, ANY) for order in orders):
        raise RefusedError(INVALID_VALUE)
    return np.repeat(np.array(orders, np.int64), np.diff([*starts, count]))


def order_at(address: int) -> int:
    """The source access order of the CUmemcpyAttributes at an address: its first field."""
    return space.read_word(address)


def structures(addresses: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A copy of C structures that lie anywhere, as one structured array."""
    nbytes = dtype.itemsize
    if len(addresses) and addresses[-1] - addresses[0] == nbytes * (len(addresses) - 1):
        steps = np.diff(np.array(addresses, np.int64))
        if (steps == nbytes).all():
            return space.view(addresses[0], nbytes * len(addresses)).view(dtype).copy()
    packed = np.empty((len(addresses), nbytes), np.uint8)
    for row, address in zip(packed, addresses, strict=True):
        row[:] = space.view(address, nbytes)
    return packed.reshape(-1).view(dtype)


def strided_batch(operations: NDArray[Any]) -> Batch:
    """Descriptors of an array of OPERATION_DTYPE; raises RefusedError as documented."""
    if (operations["src_type"] != _POINTER_OPERAND).any() or (operations["dst_type"] != _POINTER_OPERAND).any():
        raise RefusedError(INVALID_VALUE)
    if not np.isin(operations["order"], (STREAM, DURING_API_CALL, ANY)).all():
        raise RefusedError(INVALID_VALUE)
    _check_layers(operations)
    descriptors = _checked(
        operations["dst_ptr"],
        operations["src_ptr"],
        operations["width"],
        operations["height"],
        operations["dst_row_length"],
        operations["src_row_length"],
    )
    return Batch(descriptors, operations["order"].astype(np.int64))


def rectangle(address: int) -> tuple[Descriptors, int, int]:
    """The CUDA_MEMCPY2D at an address as one descriptor, and the memory types of its source and its target.

    A width or height of 0 gives a descriptor without rows.
    """
    fields = structures([address], RECTANGLE_DTYPE)[0]
    source, source_pitch = _operand(fields, "src")
    target, target_pitch = _operand(fields, "dst")
    width, height = int(fields["width"]), int(fields["height"])
    columns = (target, source, width, height, target_pitch, source_pitch)
    if width == 0 or height == 0:
        none = np.zeros(0, np.int64)
        return Descriptors(none, none, none, none, none, none), int(fields["src_type"]), int(fields["dst_type"])
    if int(fields["src_x"]) + width > (source_pitch or width) or int(fields["dst_x"]) + width > (target_pitch or width):
        raise RefusedError(INVALID_VALUE)
    descriptors = _checked(*(_unsigned([column], 1) for column in columns))
    return descriptors, int(fields["src_type"]), int(fields["dst_type"])


def _operand(fields: Any, side: str) -> tuple[int, int]:
    kind = int(fields[f"{side}_type"])
    if kind not in (MEMORY_HOST, MEMORY_DEVICE, MEMORY_UNIFIED):
        raise RefusedError(INVALID_VALUE)
    base = int(fields[f"{side}_host" if kind == MEMORY_HOST else f"{side}_device"])
    pitch = int(fields[f"{side}_pitch"])
    return base + int(fields[f"{side}_y"]) * pitch + int(fields[f"{side}_x"]), pitch


def _check_layers(operations: NDArray[Any]) -> None:
    for side in ("src", "dst"):
        layer = operations[f"{side}_layer_height"]
        if ((layer != 0) & (layer < operations["height"])).any():
            raise RefusedError(INVALID_VALUE)
    if (operations["depth"] == 0).any():
        raise RefusedError(INVALID_VALUE)
    if (operations["depth"] > 1).any():
        raise SimulatorError("copies of more than one layer are not simulated")


def _checked(target: Any, source: Any, width: Any, height: Any, target_pitch: Any, source_pitch: Any) -> Descriptors:
    """Unsigned columns as Descriptors: no empty copy, no pitch below the width (0 is packed), none above the limits."""
    columns = (target, source, width, height, target_pitch, source_pitch)
    if not len(width) or any((column >= space.ADDRESS_LIMIT).any() for column in columns):
        raise RefusedError(INVALID_VALUE)
    signed = Descriptors(*(column.astype(np.int64) for column in columns))
    if (signed.width == 0).any() or (signed.height == 0).any():
        raise RefusedError(INVALID_VALUE)
    pitches = [np.where(pitch == 0, signed.width, pitch) for pitch in (signed.target_pitch, signed.source_pitch)]
    for pitch in pitches:
        if (pitch < signed.width).any() or int(pitch.max()) * int(signed.height.max()) >= space.ADDRESS_LIMIT:
            raise RefusedError(INVALID_VALUE)
    return signed._replace(target_pitch=pitches[0], source_pitch=pitches[1])


def _unsigned(values: Any, count: int) -> NDArray[np.uint64]:
    if isinstance(values, np.ndarray):
        return values[:count].astype(np.uint64)
    return np.fromiter(map(int, values[:count]), np.uint64, count)

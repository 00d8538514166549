"""Driver calls that copy and fill memory: their arguments decoded, checked and queued.

Structures are read from their memory, as the driver reads them: an object made with `_ptr=` over a caller's array has
the values that are in the array at the call.
"""

# ruff: noqa: N802, N803 (names and signatures are CUDA's)

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver as cuda
from numpy.typing import NDArray

from kvoffload.simulator import space
from kvoffload.simulator.contexts import LEGACY, UNSUPPORTED, Operation, Stream
from kvoffload.simulator.driver import FAIL_INDEX, SimulatedDriver, driver_call, integer, raw_call, size
from kvoffload.simulator.errors import INVALID_VALUE, FunctionNotFoundError, RefusedError, SimulatorError
from kvoffload.simulator.memory import Indices, Region
from kvoffload.simulator.operations import (
    ANY,
    DURING_API_CALL,
    STREAM,
    BatchCopy,
    Copy,
    CopyOperation,
    Descriptors,
    FillOperation,
    LinearCopy,
)

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


Spans = tuple[Indices, Indices]  # where each begins and ends
Columns = Sequence[NDArray[Any]]  # those of Descriptors, as the caller gave them


class Sides(NamedTuple):
    """The memory that a call touches on its two sides; `pageable` where that is host memory that is not pinned."""

    regions: list[Region]
    pageable_source: bool
    pageable_target: bool


@driver_call()
def cuMemcpyHtoD(driver: SimulatedDriver, dstDevice: Any, srcHost: Any, ByteCount: int) -> Any:
    target, source, nbytes = integer(dstDevice), space.host_address(srcHost), size(ByteCount)
    return _copy_now(driver, target, source, nbytes, device=target, host=source)


@driver_call()
def cuMemcpyDtoH(driver: SimulatedDriver, dstHost: Any, srcDevice: Any, ByteCount: int) -> Any:
    target, source, nbytes = space.host_address(dstHost), integer(srcDevice), size(ByteCount)
    return _copy_now(driver, target, source, nbytes, device=source, host=target)


@driver_call()
def cuMemcpyAsync(driver: SimulatedDriver, dst: Any, src: Any, ByteCount: int, hStream: Any) -> Any:
    target, source, nbytes = integer(dst), integer(src), size(ByteCount)
    stream = driver.submission_stream(hStream)
    if nbytes == 0:
        return None
    _submit_linear(driver, stream, target, source, nbytes)
    driver.scheduler.drift()
    return None


@driver_call()
def cuMemcpy2DAsync(driver: SimulatedDriver, pCopy: Any, hStream: Any) -> Any:
    if pCopy is not None and not isinstance(pCopy, cuda.CUDA_MEMCPY2D):
        name = type(pCopy).__name__
        raise TypeError(
            f"Argument 'pCopy' has incorrect type (expected cuda.bindings.driver.CUDA_MEMCPY2D, got {name})"
        )
    stream = driver.submission_stream(hStream)
    if pCopy is None:
        return INVALID_VALUE
    descriptors, source_type, target_type = rectangle(int(pCopy.getPtr()))
    if not len(descriptors.width):
        return None
    for address, kind in ((descriptors.source[0], source_type), (descriptors.target[0], target_type)):
        region = driver.memory.at(int(address))
        if (kind == MEMORY_HOST and region is not None and region.on_device) or (
            kind == MEMORY_DEVICE and region is None
        ):
            return INVALID_VALUE
    _submit_checked(driver, stream, descriptors, np.array([STREAM], np.int64), staged=True)
    return None


@driver_call()
def cuMemsetD8Async(driver: SimulatedDriver, dstDevice: Any, uc: int, N: int, hStream: Any) -> Any:
    address, nbytes = integer(dstDevice), size(N)
    if not 0 <= integer(uc) < 256:
        raise OverflowError("value too large to convert to unsigned char")
    stream = driver.submission_stream(hStream)
    if nbytes == 0:
        return None
    region = driver.memory.find(address, nbytes)
    if region is None:
        return INVALID_VALUE
    driver.submit(stream, FillOperation([region], address, integer(uc), nbytes))
    driver.scheduler.drift()
    return None


@driver_call(values=FAIL_INDEX)
def cuMemcpyBatchAsync(
    driver: SimulatedDriver,
    dsts: Any,
    srcs: Any,
    sizes: Any,
    count: int,
    attrs: Any,
    attrsIdxs: Any,
    numAttrs: int,
    hStream: Any,
) -> Any:
    number, attribute_count = size(count), size(numAttrs)
    indices = require_list(attrsIdxs, int, "attrsIdxs", attribute_count)
    attributes = require_list(attrs, cuda.CUmemcpyAttributes, "attrs", attribute_count)
    widths = require_list(sizes, int, "sizes", number)
    sources = require_list(srcs, cuda.CUdeviceptr, "srcs", number)
    targets = require_list(dsts, cuda.CUdeviceptr, "dsts", number)
    stream = _batch_stream(driver, hStream, "cuMemcpyBatchAsync")
    given = [space.read_word(int(each.getPtr())) for each in attributes[:attribute_count]]
    orders = access_orders(given, indices[:attribute_count], number)
    _submit_batch(driver, stream, flat_columns(targets, sources, widths, number), orders)
    return driver.fail_index


@driver_call(values=FAIL_INDEX)
def cuMemcpy3DBatchAsync(driver: SimulatedDriver, numOps: int, opList: Any, flags: int, hStream: Any) -> Any:
    number = size(numOps)
    operations = require_list(opList, cuda.CUDA_MEMCPY3D_BATCH_OP, "opList", number)
    addresses = [int(operation.getPtr()) for operation in operations[:number]]
    stream = _batch_stream(driver, hStream, "cuMemcpy3DBatchAsync")
    if size(flags) != 0:
        return INVALID_VALUE
    rows = structures(addresses, OPERATION_DTYPE)
    _submit_batch(driver, stream, strided_columns(rows), rows["order"].astype(np.int64))
    return driver.fail_index


@raw_call
def memcpy_batch_async_v2(
    driver: SimulatedDriver,
    dsts: int,
    srcs: int,
    sizes: int,
    count: int,
    attrs: int,
    indices: int,
    num_attrs: int,
    stream: int,
) -> Any:
    queue = _batch_stream(driver, stream, "cuMemcpyBatchAsync_v2")
    targets, sources, widths = (space.view(each, 8 * count).view(np.uint64) for each in (dsts, srcs, sizes))
    given = [space.read_word(attrs + k * ATTRIBUTES_BYTES) for k in range(num_attrs)]
    starts = space.view(indices, 8 * num_attrs).view(np.uint64).tolist()
    orders = access_orders(given, starts, count)
    _submit_batch(driver, queue, flat_columns(targets, sources, widths, count), orders)


@raw_call
def memcpy_3d_batch_async_v2(driver: SimulatedDriver, num_ops: int, op_list: int, flags: int, stream: int) -> Any:
    """`op_list`: the address of the operations' array."""
    queue = _batch_stream(driver, stream, "cuMemcpy3DBatchAsync_v2")
    if flags != 0 or num_ops < 1:
        return INVALID_VALUE
    rows = space.view(op_list, OPERATION_DTYPE.itemsize * num_ops).view(OPERATION_DTYPE).copy()
    _submit_batch(driver, queue, strided_columns(rows), rows["order"].astype(np.int64))
    return None


# From checked copies to a stream's queue


def _batch_stream(driver: SimulatedDriver, handle: Any, function: str) -> Stream:
    """Return the stream of a batch call, which needs its entry point and refuses two kinds of stream."""
    needed = (12, 8) if driver.bindings_version < (13, 0) else (13, 0)
    if driver.driver_version < needed:
        raise FunctionNotFoundError(f"function {function} is not found")
    number = integer(handle)
    if number in (0, LEGACY):
        raise RefusedError(INVALID_VALUE)
    stream = driver.submission_stream(handle)
    if stream.capture is not None:  # unlike others that a capture cannot contain, these calls do not end it
        stream.capture.check()
        raise RefusedError(UNSUPPORTED)
    return stream


def _copy_now(driver: SimulatedDriver, target: int, source: int, nbytes: int, device: int, host: int) -> Any:
    """Make a synchronous copy: through the legacy default stream, and over when the call returns.

    With `staged_copies`, one from pageable memory to the device returns once its bytes are staged, as CUDA's
    documentation allows: the device gets them later, in the order of the legacy stream.
    """
    if nbytes == 0:
        return None
    on_device, on_host = driver.memory.at(device), driver.memory.at(host)
    if on_device is None or (on_host is not None and on_host.on_device):
        return INVALID_VALUE
    stream = driver.context().legacy
    staged = driver.staged_copies and on_host is None and target == device
    if staged:
        driver.finish(stream, driver.submit(stream, Operation(())), "a synchronous copy")
    serial = _submit_linear(driver, stream, target, source, nbytes)
    if staged:
        driver.scheduler.drift()
    else:
        driver.finish(stream, serial, "a synchronous copy")
    return None


def _submit_linear(driver: SimulatedDriver, stream: Stream, target: int, source: int, nbytes: int) -> int:
    into, out_of = driver.memory.find(target, nbytes), driver.memory.find(source, nbytes)
    if into is out_of and abs(target - source) < nbytes:
        driver.violate(f"source and target overlap: {nbytes} bytes from {source:#x} to {target:#x}")
    sides = Sides([each for each in (out_of, into) if each is not None], out_of is None, into is None)
    if any(region.pages is not None for region in sides.regions):
        target, source = driver.memory.physical(np.array([target, source])).tolist()
    return _submit_copies(driver, stream, [LinearCopy(target, source, nbytes)], [STREAM], sides, staged=True)


def _submit_batch(driver: SimulatedDriver, stream: Stream, columns: Columns, orders: Indices) -> None:
    """Queue the copies of a batch call. If it fails, some of those before the first wrong one are queued all the same,
    as driver 580 was seen to do. `orders`: each copy's access order.
    """
    try:
        if driver.cut:
            driver.cut = False
            raise RefusedError(INVALID_VALUE)
        _submit_checked(driver, stream, _checked(*columns), orders)
    except RefusedError:
        some = driver.scheduler.chance.randrange(max(1, len(orders)))
        if some:
            _submit_batch(driver, stream, [column[:some] for column in columns], orders[:some])
        raise


def _submit_checked(
    driver: SimulatedDriver, stream: Stream, columns: Descriptors, orders: Indices, staged: bool = False
) -> None:
    """Check all copies against memory before anything is queued."""
    source = columns.source, columns.source_pitch, columns
    target = columns.target, columns.target_pitch, columns
    targets = _spans(*target)
    source_regions, pageable_source = driver.memory.locate(*_spans(*source))
    target_regions, pageable_target = driver.memory.locate(*targets)
    # Copies of one batch have no order: targets that overlap, or a source that is a target, are undefined.
    if _any_overlap(*targets) and _any_overlap(*_row_spans(*target)):
        driver.violate("targets overlap within one batch of copies")
    one_region = set(map(id, source_regions)) & set(map(id, target_regions))
    if one_region and _any_meets(_row_spans(*source), _row_spans(*target)):
        driver.violate("a target is also a source within one batch of copies")
    if any(region.pages is not None for region in source_regions + target_regions):
        physical = driver.memory.physical
        columns = columns._replace(source=physical(columns.source), target=physical(columns.target))
    distinct = np.unique(orders).tolist()
    groups = [columns] if len(distinct) == 1 else [columns.select(np.flatnonzero(orders == o)) for o in distinct]
    copies = [BatchCopy(group, driver.scheduler.chance) for group in groups]
    sides = Sides(source_regions + target_regions, pageable_source, pageable_target)
    _submit_copies(driver, stream, copies, distinct, sides, staged)
    driver.scheduler.drift()


def _submit_copies(
    driver: SimulatedDriver, stream: Stream, copies: Sequence[Copy], orders: Sequence[int], sides: Sides, staged: bool
) -> int:
    """Queue one operation of these copies, each with its source access order. Returns its number in the stream.

    `staged`: a pageable source is read before the call returns. The batch calls do not do that.
    """
    driver.pageable_copies += sides.pageable_source or sides.pageable_target
    operation = CopyOperation(sides.regions, copies, places=sum(copy.places for copy in copies))
    serial = driver.submit(stream, operation)
    if serial:
        for copy, order in zip(copies, orders, strict=True):
            driver.scheduler.read_source(copy, DURING_API_CALL if staged and sides.pageable_source else order)
        if sides.pageable_target:
            driver.finish(stream, serial, "a copy to pageable memory")
    return serial


# Bytes that copies touch


def _spans(first: Indices, pitch: Indices, columns: Descriptors) -> Spans:
    return first, first + (columns.height - 1) * pitch + columns.width


def _row_spans(first: Indices, pitch: Indices, columns: Descriptors) -> Spans:
    height = columns.height
    copy_index = np.repeat(np.arange(len(first)), height)
    row = np.arange(len(copy_index)) - np.repeat(np.cumsum(height) - height, height)
    starts = first[copy_index] + row * pitch[copy_index]
    return starts, starts + columns.width[copy_index]


def _any_overlap(starts: Indices, ends: Indices) -> bool:
    order = np.argsort(starts, kind="stable")
    return bool((starts[order][1:] < ends[order][:-1]).any())


def _any_meets(some: Spans, others: Spans) -> bool:
    """Return whether a span of one set meets a span of the other; spans of `others` do not overlap each other."""
    order = np.argsort(others[0], kind="stable")
    starts, ends = others[0][order], others[1][order]
    following = np.searchsorted(starts, some[1], side="left") - 1  # the last span that begins before ours ends
    return bool(((following >= 0) & (ends[following] > some[0])).any())


# From the arguments of a call to arrays; documented limits are checked, and nothing about allocations


def require_list(values: Any, kind: type, argument: str, count: int) -> Sequence[Any]:
    """Return a list argument, checked as the bindings do: every element of one type, at least `count` elements."""
    values = [] if values is None else values
    if not set(map(type, values)) <= {kind} and not all(isinstance(value, kind) for value in values):
        name = kind.__name__ if kind is int else f"cydriver.{kind.__name__},"
        raise TypeError(f"Argument '{argument}' is not instance of type (expected tuple[{name}] or list[{name}]")
    if count > len(values):
        raise RuntimeError(f"List is too small: {len(values)} < {count}")
    return values  # type: ignore[no-any-return]


def flat_columns(targets: Any, sources: Any, sizes: Any, count: int) -> Columns:
    width = _unsigned(sizes, count)
    return _unsigned(targets, count), _unsigned(sources, count), width, np.ones(count, np.int64), width, width


def access_orders(orders: Sequence[int], first_indices: Sequence[int], count: int) -> Indices:
    """Return the order of each copy: attribute k applies from `first_indices[k]` on. RefusedError as documented."""
    starts = list(first_indices)
    rising = all(a < b for a, b in itertools.pairwise(starts))
    if not orders or len(orders) > count or starts[0] != 0 or not rising or starts[-1] >= count:
        raise RefusedError(INVALID_VALUE)
    if any(order not in (STREAM, DURING_API_CALL, ANY) for order in orders):
        raise RefusedError(INVALID_VALUE)
    return np.repeat(np.array(orders, np.int64), np.diff([*starts, count]))


def structures(addresses: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    nbytes = dtype.itemsize
    if len(addresses) and addresses[-1] - addresses[0] == nbytes * (len(addresses) - 1):
        steps = np.diff(np.array(addresses, np.int64))
        if (steps == nbytes).all():
            return space.view(addresses[0], nbytes * len(addresses)).view(dtype).copy()
    packed = np.empty((len(addresses), nbytes), np.uint8)
    for row, address in zip(packed, addresses, strict=True):
        row[:] = space.view(address, nbytes)
    return packed.reshape(-1).view(dtype)


def strided_columns(operations: NDArray[Any]) -> Columns:
    wrong = (operations["src_type"] != _POINTER_OPERAND) | (operations["dst_type"] != _POINTER_OPERAND)
    wrong |= ~np.isin(operations["order"], (STREAM, DURING_API_CALL, ANY)) | (operations["depth"] == 0)
    for side in ("src", "dst"):
        layer = operations[f"{side}_layer_height"]
        wrong |= (layer != 0) & (layer < operations["height"])
    if wrong.any():
        raise RefusedError(INVALID_VALUE)
    if (operations["depth"] > 1).any():
        raise SimulatorError("copies of more than one layer are not simulated")
    names = ("dst_ptr", "src_ptr", "width", "height", "dst_row_length", "src_row_length")
    return [operations[name] for name in names]


def rectangle(address: int) -> tuple[Descriptors, int, int]:
    """Return the CUDA_MEMCPY2D at an address as one descriptor, and the memory types of its source and its target.

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


def _checked(target: Any, source: Any, width: Any, height: Any, target_pitch: Any, source_pitch: Any) -> Descriptors:
    """Return unsigned columns as Descriptors, if there is no empty copy, no pitch below the width (0 is packed), none
    above the limits.
    """
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

"""Driver calls that copy and fill memory."""

# ruff: noqa: N802, N803 (names and signatures are CUDA's)

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver as cuda

from kvoffload.simulator import copies, space
from kvoffload.simulator.calls import FAIL_INDEX, INVALID_VALUE, Core, driver_call, integer, size
from kvoffload.simulator.capture import UNSUPPORTED
from kvoffload.simulator.contexts import LEGACY, Operation, Stream
from kvoffload.simulator.copies import Batch
from kvoffload.simulator.errors import FunctionNotFoundError, RefusedError
from kvoffload.simulator.memory import Indices, Region
from kvoffload.simulator.operations import (
    DURING_API_CALL,
    STREAM,
    BatchCopy,
    Copy,
    CopyOperation,
    Descriptors,
    FillOperation,
    LinearCopy,
)


class Sides(NamedTuple):
    """What the two sides of a call touch; `pageable` where that is host memory that is not pinned."""

    sources: list[Region]
    targets: list[Region]
    pageable_source: bool
    pageable_target: bool

    @property
    def regions(self) -> list[Region]:
        return self.sources + self.targets


class CopyCalls(Core):
    staged_copies = True

    @driver_call()
    def cuMemcpyHtoD(self, dstDevice: Any, srcHost: Any, ByteCount: int) -> Any:
        target, source, nbytes = integer(dstDevice), space.host_address(srcHost), size(ByteCount)
        return self._copy_now(target, source, nbytes, device=target, host=source)

    @driver_call()
    def cuMemcpyDtoH(self, dstHost: Any, srcDevice: Any, ByteCount: int) -> Any:
        target, source, nbytes = space.host_address(dstHost), integer(srcDevice), size(ByteCount)
        return self._copy_now(target, source, nbytes, device=source, host=target)

    @driver_call()
    def cuMemcpyAsync(self, dst: Any, src: Any, ByteCount: int, hStream: Any) -> Any:
        target, source, nbytes = integer(dst), integer(src), size(ByteCount)
        stream = self.submission_stream(hStream)
        if nbytes == 0:
            return None
        self._submit_linear(stream, target, source, nbytes)
        self.scheduler.drift()
        return None

    @driver_call()
    def cuMemcpy2DAsync(self, pCopy: Any, hStream: Any) -> Any:
        if pCopy is not None and not isinstance(pCopy, cuda.CUDA_MEMCPY2D):
            kind = type(pCopy).__name__
            raise TypeError(
                f"Argument 'pCopy' has incorrect type (expected cuda.bindings.driver.CUDA_MEMCPY2D, got {kind})"
            )
        stream = self.submission_stream(hStream)
        if pCopy is None:
            return INVALID_VALUE
        descriptors, source_type, target_type = copies.rectangle(int(pCopy.getPtr()))
        if not len(descriptors.width):
            return None
        self._require_memory_type(int(descriptors.source[0]), source_type)
        self._require_memory_type(int(descriptors.target[0]), target_type)
        self._submit_batch(stream, Batch(descriptors, np.array([STREAM], np.int64)))
        return None

    @driver_call()
    def cuMemsetD8Async(self, dstDevice: Any, uc: int, N: int, hStream: Any) -> Any:
        address, nbytes = integer(dstDevice), size(N)
        if not 0 <= integer(uc) < 256:
            raise OverflowError("value too large to convert to unsigned char")
        stream = self.submission_stream(hStream)
        if nbytes == 0:
            return None
        region = self.memory.find(address, nbytes)
        if region is None:
            return INVALID_VALUE
        self.submit(stream, FillOperation([region], address, integer(uc), nbytes))
        self.scheduler.drift()
        return None

    @driver_call(values=FAIL_INDEX)
    def cuMemcpyBatchAsync(
        self, dsts: Any, srcs: Any, sizes: Any, count: int, attrs: Any, attrsIdxs: Any, numAttrs: int, hStream: Any
    ) -> Any:
        number, attribute_count = size(count), size(numAttrs)
        indices = copies.require_list(attrsIdxs, int, "attrsIdxs", attribute_count)
        attributes = copies.require_list(attrs, cuda.CUmemcpyAttributes, "attrs", attribute_count)
        widths = copies.require_list(sizes, int, "sizes", number)
        sources = copies.require_list(srcs, cuda.CUdeviceptr, "srcs", number)
        targets = copies.require_list(dsts, cuda.CUdeviceptr, "dsts", number)
        stream = self._batch_stream(hStream, "cuMemcpyBatchAsync")
        given = [copies.order_at(int(each.getPtr())) for each in attributes[:attribute_count]]
        orders = copies.access_orders(given, indices[:attribute_count], number)
        self._submit_batch(stream, copies.flat_batch(targets, sources, widths, orders, number))
        return (0,) * self.fail_index_values

    @driver_call(values=FAIL_INDEX)
    def cuMemcpy3DBatchAsync(self, numOps: int, opList: Any, flags: int, hStream: Any) -> Any:
        number = size(numOps)
        operations = copies.require_list(opList, cuda.CUDA_MEMCPY3D_BATCH_OP, "opList", number)
        addresses = [int(operation.getPtr()) for operation in operations[:number]]
        stream = self._batch_stream(hStream, "cuMemcpy3DBatchAsync")
        if size(flags) != 0:
            return INVALID_VALUE
        self._submit_batch(stream, copies.strided_batch(copies.structures(addresses, copies.OPERATION_DTYPE)))
        return (0,) * self.fail_index_values

    def _raw_batch(
        self, dsts: int, srcs: int, sizes: int, count: int, attrs: int, indices: int, num_attrs: int, stream: int
    ) -> None:
        """The body of `memcpy_batch_async_v2`: every array by its address."""
        queue = self._batch_stream(stream, "cuMemcpyBatchAsync_v2")
        columns = [space.view(each, 8 * count).view(np.uint64) for each in (dsts, srcs, sizes)]
        given = [copies.order_at(attrs + k * copies.ATTRIBUTES_BYTES) for k in range(num_attrs)]
        starts = space.view(indices, 8 * num_attrs).view(np.uint64).tolist()
        orders = copies.access_orders(given, starts, count)
        self._submit_batch(queue, copies.flat_batch(columns[0], columns[1], columns[2], orders, count))

    def _raw_strided_batch(self, num_ops: int, op_list: int, flags: int, stream: int) -> Any:
        """The body of `memcpy_3d_batch_async_v2`: the address of the operations' array."""
        queue = self._batch_stream(stream, "cuMemcpy3DBatchAsync_v2")
        if flags != 0 or num_ops < 1:
            return INVALID_VALUE
        dtype = copies.OPERATION_DTYPE
        operations = space.view(op_list, dtype.itemsize * num_ops).view(dtype).copy()
        self._submit_batch(queue, copies.strided_batch(operations))
        return None

    # Shared

    def _batch_stream(self, handle: Any, function: str) -> Stream:
        """The stream of a batch call, which needs its entry point and refuses two kinds of stream."""
        needed = (12, 8) if self.bindings_version < (13, 0) else (13, 0)
        if self.driver_version < needed:
            raise FunctionNotFoundError(f"function {function} is not found")
        number = integer(handle)
        if number in (0, LEGACY):
            raise RefusedError(INVALID_VALUE)
        stream = self.submission_stream(handle)
        if stream.capture is not None:
            stream.capture.refuse(UNSUPPORTED)
        return stream

    def _copy_now(self, target: int, source: int, nbytes: int, device: int, host: int) -> Any:
        """A synchronous copy: it goes through the legacy default stream, and is over when the call returns.

        With `staged_copies`, one from pageable memory to the device returns once its bytes are staged, as CUDA's
        documentation allows: the device gets them later, in the order of the legacy stream.
        """
        if nbytes == 0:
            return None
        on_device, on_host = self.memory.at(device), self.memory.at(host)
        if on_device is None or (on_host is not None and on_host.on_device):
            return INVALID_VALUE
        stream = self.context().legacy
        staged = self.staged_copies and on_host is None and target == device
        if staged:
            self.finish(stream, self.submit(stream, Operation()), "a synchronous copy")
        serial = self._submit_linear(stream, target, source, nbytes)
        if staged:
            self.scheduler.drift()
        else:
            self.finish(stream, serial, "a synchronous copy")
        return None

    def _submit_linear(self, stream: Stream, target: int, source: int, nbytes: int) -> int:
        into, out_of = self.memory.find(target, nbytes), self.memory.find(source, nbytes)
        if into is out_of and abs(target - source) < nbytes:
            self.violate(f"source and target overlap: {nbytes} bytes from {source:#x} to {target:#x}")
        sides = Sides(_known(out_of), _known(into), out_of is None, into is None)
        return self._submit_parts(stream, [(LinearCopy(target, source, nbytes), STREAM)], sides)

    def _submit_batch(self, stream: Stream, batch: Batch) -> None:
        """Check a call's copies against memory, all of them, before anything is queued."""
        columns = batch.descriptors
        source_regions, pageable_source = self.memory.locate(columns.source, _ends(columns, target=False))
        target_regions, pageable_target = self.memory.locate(columns.target, _ends(columns, target=True))
        sides = Sides(source_regions, target_regions, pageable_source, pageable_target)
        self._check_overlap(columns, sides)
        orders = np.unique(batch.orders).tolist()
        groups = [columns] if len(orders) == 1 else [columns.select(np.flatnonzero(batch.orders == o)) for o in orders]
        copies_made = [BatchCopy(group, self.scheduler.chance) for group in groups]
        self._submit_parts(stream, list(zip(copies_made, orders, strict=True)), sides)
        self.scheduler.drift()

    def _submit_parts(self, stream: Stream, parts: list[tuple[Any, int]], sides: Sides) -> int:
        if sides.pageable_source or sides.pageable_target:
            self.pageable_copies += 1
        copy_list: list[Copy] = [copy for copy, _ in parts]
        serial = self.submit(stream, CopyOperation(copy_list, sides.regions))
        if serial:
            for copy, order in parts:  # pageable sources are staged: read before the call returns
                self.scheduler.read_source(copy, DURING_API_CALL if sides.pageable_source else order)
            if sides.pageable_target:
                self.finish(stream, serial, "a copy to pageable memory")
        return serial

    def _require_memory_type(self, address: int, memory_type: int) -> None:
        region = self.memory.at(address)
        on_device = region is not None and region.on_device
        wrong_host = memory_type == copies.MEMORY_HOST and on_device
        wrong_device = memory_type == copies.MEMORY_DEVICE and region is None
        if wrong_host or wrong_device:
            raise RefusedError(INVALID_VALUE)

    def _check_overlap(self, columns: Descriptors, sides: Sides) -> None:
        """Copies of one batch have no order: targets that overlap, or a source that is a target, are undefined."""
        targets = _row_spans(columns.target, columns.width, columns.height, columns.target_pitch)
        if targets is not None and _any_overlap(*targets):
            self.violate("targets overlap within one batch of copies")
        if set(map(id, sides.sources)) & set(map(id, sides.targets)):
            sources = _row_spans(columns.source, columns.width, columns.height, columns.source_pitch, always=True)
            targets = _row_spans(columns.target, columns.width, columns.height, columns.target_pitch, always=True)
            if sources is not None and targets is not None and _intersect(sources, targets):
                self.violate("a target is also a source within one batch of copies")


def _known(region: Region | None) -> list[Region]:
    return [] if region is None else [region]


def _ends(columns: Descriptors, target: bool) -> Indices:
    """Where each copy's last row ends."""
    first, pitch = (columns.target, columns.target_pitch) if target else (columns.source, columns.source_pitch)
    return first + (columns.height - 1) * pitch + columns.width


def _row_spans(
    first: Indices, width: Indices, height: Indices, pitch: Indices, always: bool = False
) -> tuple[Indices, Indices] | None:
    """(start, end) of every row of every copy; None if whole copies are already apart, unless `always`."""
    ends = first + (height - 1) * pitch + width
    if not always and not _any_overlap(first, ends):
        return None
    copy_index = np.repeat(np.arange(len(first)), height)
    row = np.arange(len(copy_index)) - np.repeat(np.cumsum(height) - height, height)
    starts = first[copy_index] + row * pitch[copy_index]
    return starts, starts + width[copy_index]


def _any_overlap(starts: Indices, ends: Indices) -> bool:
    order = np.argsort(starts, kind="stable")
    return bool((starts[order][1:] < ends[order][:-1]).any())


def _intersect(some: tuple[Indices, Indices], others: tuple[Indices, Indices]) -> bool:
    """Whether a span of one set meets a span of the other; spans of `others` do not overlap each other."""
    order = np.argsort(others[0], kind="stable")
    starts, ends = others[0][order], others[1][order]
    following = np.searchsorted(starts, some[1], side="left") - 1  # the last span that begins before ours ends
    return bool(((following >= 0) & (ends[following] > some[0])).any())

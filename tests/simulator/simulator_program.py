"""A program on a simulated driver, and the C structures of its copy calls: what the tests of the simulator share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from cuda.bindings import driver as cuda

from kvoffload.simulator import SimulatedDriver

R = cuda.CUresult
ORDER = cuda.CUmemcpySrcAccessOrder
STREAM = ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
DURING_API_CALL = ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL
ANY = ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
NON_BLOCKING = 1
LEGACY = 1
PER_THREAD = 2
ILLEGAL_ADDRESS = R.CUDA_ERROR_ILLEGAL_ADDRESS


class Program:
    """A simulated driver with a current context, and its calls as plain functions that must succeed."""

    def __init__(self, **options: Any) -> None:
        self.sim = SimulatedDriver(**{"deadlock_seconds": 0.05, **options})
        self.ok("cuInit", 0)
        self.context = self.ok("cuDevicePrimaryCtxRetain", 0)
        self.ok("cuCtxPushCurrent", self.context)

    def ok(self, name: str, *args: Any) -> Any:
        status, *values = getattr(self.sim, name)(*args)
        assert status == R.CUDA_SUCCESS, (name, status)
        return values[0] if len(values) == 1 else tuple(values)

    def status(self, name: str, *args: Any) -> Any:
        return getattr(self.sim, name)(*args)[0]

    def stream(self, flags: int = NON_BLOCKING) -> Any:
        return self.ok("cuStreamCreateWithPriority", flags, 0)

    def event(self, flags: int = 0) -> Any:
        return self.ok("cuEventCreate", flags)

    def device(self, nbytes: int, fill: int | None = None) -> Any:
        pointer = self.ok("cuMemAlloc", nbytes)
        if fill is not None:
            self.bytes(pointer, nbytes)[:] = fill
        return pointer

    def host(self, nbytes: int, fill: int | None = None) -> int:
        address = int(self.ok("cuMemHostAlloc", nbytes, 0))
        if fill is not None:
            self.bytes(address, nbytes)[:] = fill
        return address

    def bytes(self, pointer: Any, nbytes: int) -> Any:
        return self.sim.view(pointer, nbytes)

    def gate(self, stream: Any) -> Callable[[], None]:
        """Hold a stream until the returned function is called."""
        word = self.bytes(self.host(4, 0), 4)
        self.ok("cuStreamWaitValue32", stream, address_of(word), 1, 0)
        return lambda: word.view(np.uint32).fill(1)

    def batch(self, triples: list[tuple[Any, Any, int]], stream: Any, order: Any = STREAM) -> Any:
        targets, sources = (
            [cuda.CUdeviceptr(int(each)) for each in side] for side in list(zip(*triples, strict=True))[:2]
        )
        sizes = [nbytes for *_, nbytes in triples]
        count = len(triples)
        return self.status("cuMemcpyBatchAsync", targets, sources, sizes, count, [attributes(order)], [0], 1, stream)

    def strided(self, operations: list[Any], stream: Any) -> Any:
        return self.status("cuMemcpy3DBatchAsync", len(operations), operations, 0, stream)


def in_threads(work: Callable[[], object], count: int = 1) -> None:
    """Call `work` in so many threads, and raise what it raises."""
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work) for _ in range(count)]:
            future.result(60)


def address_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def attributes(order: Any) -> Any:
    made = cuda.CUmemcpyAttributes()
    made.srcAccessOrder = order
    return made


def strided_operation(
    target: Any, source: Any, width: int, height: int, target_pitch: int, source_pitch: int, order: Any = STREAM
) -> Any:
    operation = cuda.CUDA_MEMCPY3D_BATCH_OP()
    for operand, pointer, pitch in ((operation.src, source, source_pitch), (operation.dst, target, target_pitch)):
        operand.type = cuda.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
        operand.op.ptr.ptr = int(pointer)
        operand.op.ptr.rowLength = pitch
    operation.extent.width, operation.extent.height, operation.extent.depth = width, height, 1
    operation.srcAccessOrder = order
    return operation


def rectangle(target: Any, source: Any, width: int, height: int, target_pitch: int, source_pitch: int) -> Any:
    made = cuda.CUDA_MEMCPY2D()
    made.srcMemoryType = made.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    made.srcDevice, made.dstDevice = cuda.CUdeviceptr(int(source)), cuda.CUdeviceptr(int(target))
    made.srcPitch, made.dstPitch = source_pitch, target_pitch
    made.WidthInBytes, made.Height = width, height
    return made

"""Driver calls that allocate, free and describe memory."""

# ruff: noqa: N802, N803 (names and signatures are CUDA's)

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

from kvoffload.simulator import space
from kvoffload.simulator.calls import INVALID_VALUE, driver_call, integer, size
from kvoffload.simulator.errors import RefusedError
from kvoffload.simulator.memory import PAGE_BYTES, Kind, Region
from kvoffload.simulator.outside import OutsideCalls

OUT_OF_MEMORY = cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
NOT_FOUND = cuda.CUresult.CUDA_ERROR_NOT_FOUND
ALREADY_REGISTERED = cuda.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
NOT_REGISTERED = cuda.CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
DEVICE_ALIGNMENT = 512


class MemoryCalls(OutsideCalls):
    memory_bytes: int
    max_register_bytes: int | None
    pinnable_bytes: int | None

    @driver_call(values=2)
    def cuMemGetInfo(self) -> Any:
        return (self.memory_bytes - self._device_bytes(), self.memory_bytes)

    @driver_call(values=1)
    def cuMemAlloc(self, bytesize: int) -> Any:
        nbytes = size(bytesize)
        if nbytes == 0:
            return INVALID_VALUE
        if self._device_bytes() + nbytes > self.memory_bytes:
            return OUT_OF_MEMORY
        return (cuda.CUdeviceptr(self._allocate(Kind.DEVICE, nbytes, DEVICE_ALIGNMENT).base),)

    @driver_call()
    def cuMemFree(self, dptr: Any) -> Any:
        if integer(dptr):
            self.free_region(self._starting_at(dptr, Kind.DEVICE, INVALID_VALUE))

    @driver_call(values=2)
    def cuMemGetAddressRange(self, dptr: Any) -> Any:
        region = self.memory.at(integer(dptr))
        if region is None:
            return NOT_FOUND
        base, nbytes = region.range_at(integer(dptr))
        return (cuda.CUdeviceptr(base), nbytes)

    @driver_call(values=1)
    def cuPointerGetAttribute(self, attribute: Any, ptr: Any) -> Any:
        number, region = attribute.value, self.memory.at(integer(ptr))  # unlike elsewhere: no plain integer
        if region is None:
            return INVALID_VALUE
        if number == cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            kinds = cuda.CUmemorytype
            return (kinds.CU_MEMORYTYPE_DEVICE if region.on_device else kinds.CU_MEMORYTYPE_HOST,)
        return self.pointer_attribute(attribute, region)

    @driver_call(values=1)
    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> Any:
        nbytes = size(bytesize)
        if nbytes == 0 or not 0 <= integer(Flags) < 8:
            return INVALID_VALUE
        self._require_pinnable(nbytes)
        return (self._allocate(Kind.PINNED, nbytes, PAGE_BYTES).base,)

    @driver_call()
    def cuMemFreeHost(self, p: Any) -> Any:
        self.free_region(self._starting_at(p, Kind.PINNED, INVALID_VALUE))

    @driver_call()
    def cuMemHostRegister(self, p: Any, bytesize: int, Flags: int) -> Any:
        address, nbytes = space.host_address(p), size(bytesize)
        too_big = self.max_register_bytes is not None and nbytes > self.max_register_bytes
        if nbytes == 0 or too_big or not 0 <= integer(Flags) < 16:
            return INVALID_VALUE
        if self.memory.overlapping(address, nbytes):
            return ALREADY_REGISTERED
        if not self.memory.mapped(address, nbytes):
            return INVALID_VALUE
        self._require_pinnable(nbytes)
        self.memory.register(address, nbytes, self.context())
        return None

    @driver_call()
    def cuMemHostUnregister(self, p: Any) -> Any:
        self.free_region(self._starting_at(p, Kind.REGISTERED, NOT_REGISTERED))

    @driver_call(values=1)
    def cuMemHostGetDevicePointer(self, p: Any, Flags: int) -> Any:
        region = self.memory.at(integer(p))
        if region is None or region.on_device or integer(Flags) != 0:
            return INVALID_VALUE
        return (cuda.CUdeviceptr(integer(p)),)

    def _allocate(self, kind: Kind, nbytes: int, alignment: int) -> Region:
        try:
            return self.memory.allocate(kind, nbytes, alignment, self.context())
        except (MemoryError, ValueError):  # numpy: no memory, or a size that cannot be
            raise RefusedError(OUT_OF_MEMORY) from None

    def _starting_at(self, pointer: Any, kind: Kind, error: Any) -> Region:
        region = self.memory.at(integer(pointer))
        if region is None or region.base != integer(pointer) or region.kind is not kind:
            raise RefusedError(error)
        return region

    def _device_bytes(self) -> int:
        ordinal = self.context().device
        live = self.memory.live()
        return sum(each.nbytes for each in live if each.on_device and each.context.device == ordinal)

    def _require_pinnable(self, nbytes: int) -> None:
        pinned = sum(region.nbytes for region in self.memory.live() if not region.on_device)
        if self.pinnable_bytes is not None and pinned + nbytes > self.pinnable_bytes:
            raise RefusedError(OUT_OF_MEMORY)

"""Driver calls that allocate, free and describe memory, and say on which GPU memory is that others allocated."""

# ruff: noqa: N802, N803 (names and signatures are CUDA's)

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

from kvoffload.simulator import space
from kvoffload.simulator.driver import Needs, Pool, SimulatedDriver, driver_call, integer, size
from kvoffload.simulator.errors import INVALID_VALUE, RefusedError
from kvoffload.simulator.memory import PAGE_BYTES, Kind, Region

OUT_OF_MEMORY = cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
NOT_FOUND = cuda.CUresult.CUDA_ERROR_NOT_FOUND
ALREADY_REGISTERED = cuda.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
NOT_REGISTERED = cuda.CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
DEVICE_ALIGNMENT = 512
_FIRST_HANDLE = 0xB_0000_0000


@driver_call(values=2)
def cuMemGetInfo(driver: SimulatedDriver) -> Any:
    return (driver.memory_bytes - _device_bytes(driver), driver.memory_bytes)


@driver_call(values=1)
def cuMemAlloc(driver: SimulatedDriver, bytesize: int) -> Any:
    nbytes = size(bytesize)
    if nbytes == 0:
        return INVALID_VALUE
    if _device_bytes(driver) + nbytes > driver.memory_bytes:
        return OUT_OF_MEMORY
    return (cuda.CUdeviceptr(_allocate(driver, Kind.DEVICE, nbytes, DEVICE_ALIGNMENT).base),)


@driver_call()
def cuMemFree(driver: SimulatedDriver, dptr: Any) -> Any:
    if integer(dptr):
        driver.free_region(_starting_at(driver, dptr, Kind.DEVICE, INVALID_VALUE))


@driver_call(values=2)
def cuMemGetAddressRange(driver: SimulatedDriver, dptr: Any) -> Any:
    region = driver.memory.at(integer(dptr))
    if region is None:
        return NOT_FOUND
    base, nbytes = region.range_at(integer(dptr))
    return (cuda.CUdeviceptr(base), nbytes)


@driver_call(values=1)
def cuPointerGetAttribute(driver: SimulatedDriver, attribute: Any, ptr: Any) -> Any:
    number, region = attribute.value, driver.memory.at(integer(ptr))  # unlike elsewhere: no plain integer
    names, kinds = cuda.CUpointer_attribute, cuda.CUmemorytype
    if region is None:
        return INVALID_VALUE
    if number == names.CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        return (kinds.CU_MEMORYTYPE_DEVICE if region.on_device else kinds.CU_MEMORYTYPE_HOST,)
    if number == names.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        return (region.context.device if driver.device_ordinal_works else 0,)
    if number == names.CU_POINTER_ATTRIBUTE_CONTEXT:
        return (cuda.CUcontext(region.context.handle),)
    if number == names.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        return (cuda.CUmemoryPool(driver.pool_of.get(region.base, 0)),)
    return INVALID_VALUE


@driver_call(values=1)
def cuMemHostAlloc(driver: SimulatedDriver, bytesize: int, Flags: int) -> Any:
    nbytes = size(bytesize)
    if nbytes == 0 or not 0 <= integer(Flags) < 8:
        return INVALID_VALUE
    _require_pinnable(driver, nbytes)
    return (_allocate(driver, Kind.PINNED, nbytes, PAGE_BYTES).base,)


@driver_call()
def cuMemFreeHost(driver: SimulatedDriver, p: Any) -> Any:
    driver.free_region(_starting_at(driver, p, Kind.PINNED, INVALID_VALUE))


@driver_call()
def cuMemHostRegister(driver: SimulatedDriver, p: Any, bytesize: int, Flags: int) -> Any:
    address, nbytes = space.host_address(p), size(bytesize)
    too_big = driver.max_register_bytes is not None and nbytes > driver.max_register_bytes
    if nbytes == 0 or too_big or not 0 <= integer(Flags) < 16:
        return INVALID_VALUE
    if driver.memory.overlapping(address, nbytes):
        return ALREADY_REGISTERED
    if not driver.memory.mapped(address, nbytes):
        return INVALID_VALUE
    _require_pinnable(driver, nbytes)
    driver.memory.register(address, nbytes, driver.context())
    return None


@driver_call()
def cuMemHostUnregister(driver: SimulatedDriver, p: Any) -> Any:
    driver.free_region(_starting_at(driver, p, Kind.REGISTERED, NOT_REGISTERED))


@driver_call(values=1)
def cuMemHostGetDevicePointer(driver: SimulatedDriver, p: Any, Flags: int) -> Any:
    region = driver.memory.at(integer(p))
    if region is None or region.on_device or integer(Flags) != 0:
        return INVALID_VALUE
    return (cuda.CUdeviceptr(integer(p)),)


# Mapped memory and pools


@driver_call(values=1, needs=Needs.DRIVER)
def cuMemRetainAllocationHandle(driver: SimulatedDriver, addr: Any) -> Any:
    region = driver.memory.at(integer(addr))
    if region is None or not region.handle_bytes:
        return INVALID_VALUE
    handle = _FIRST_HANDLE + len(driver.retained) + 1
    driver.retained[handle] = region
    return (cuda.CUmemGenericAllocationHandle(handle),)


@driver_call(values=1, needs=Needs.DRIVER)
def cuMemGetAllocationPropertiesFromHandle(driver: SimulatedDriver, handle: Any) -> Any:
    region = driver.retained.get(integer(handle))
    if region is None:
        return INVALID_VALUE
    properties = cuda.CUmemAllocationProp()
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = region.context.device
    return (properties,)


@driver_call(needs=Needs.DRIVER)
def cuMemRelease(driver: SimulatedDriver, handle: Any) -> Any:
    return None if driver.retained.pop(integer(handle), None) is not None else INVALID_VALUE


@driver_call(values=1, needs=Needs.DRIVER)
def cuDeviceGetDefaultMemPool(driver: SimulatedDriver, dev: Any) -> Any:
    return (cuda.CUmemoryPool(driver.default_pool(integer(dev))),)


@driver_call(values=1, needs=Needs.DRIVER)
def cuDeviceGetMemPool(driver: SimulatedDriver, dev: Any) -> Any:
    return (cuda.CUmemoryPool(driver.default_pool(integer(dev))),)


@driver_call(values=1, needs=Needs.DRIVER)
def cuMemPoolGetAttribute(driver: SimulatedDriver, pool: Any, attr: Any) -> Any:
    found = _pool(driver, pool)
    names = cuda.CUmemPool_attribute
    if driver.pools_report_their_device and attr == getattr(names, "CU_MEMPOOL_ATTR_LOCATION_TYPE", None):
        return (int(cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE),)
    if driver.pools_report_their_device and attr == getattr(names, "CU_MEMPOOL_ATTR_LOCATION_ID", None):
        return (found.device,)
    return INVALID_VALUE


@driver_call(values=1, needs=Needs.DRIVER)
def cuMemPoolGetAccess(driver: SimulatedDriver, memPool: Any, location: Any) -> Any:
    flags = cuda.CUmemAccess_flags
    accessible = int(location.id) in _pool(driver, memPool).readers
    return (flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if accessible else flags.CU_MEM_ACCESS_FLAGS_PROT_NONE,)


# Shared


def _pool(driver: SimulatedDriver, handle: Any) -> Pool:
    try:
        return driver.pools[integer(handle)]
    except KeyError:
        raise RefusedError(INVALID_VALUE) from None


def _allocate(driver: SimulatedDriver, kind: Kind, nbytes: int, alignment: int) -> Region:
    try:
        return driver.memory.allocate(kind, nbytes, alignment, driver.context())
    except (MemoryError, ValueError):  # numpy: no memory, or a size that cannot be
        raise RefusedError(OUT_OF_MEMORY) from None


def _starting_at(driver: SimulatedDriver, pointer: Any, kind: Kind, error: Any) -> Region:
    region = driver.memory.at(integer(pointer))
    if region is None or region.base != integer(pointer) or region.kind is not kind:
        raise RefusedError(error)
    return region


def _device_bytes(driver: SimulatedDriver) -> int:
    ordinal = driver.context().device
    live = driver.memory.live()
    return sum(each.nbytes for each in live if each.on_device and each.context.device == ordinal)


def _require_pinnable(driver: SimulatedDriver, nbytes: int) -> None:
    pinned = sum(region.nbytes for region in driver.memory.live() if not region.on_device)
    if driver.pinnable_bytes is not None and pinned + nbytes > driver.pinnable_bytes:
        raise RefusedError(OUT_OF_MEMORY)

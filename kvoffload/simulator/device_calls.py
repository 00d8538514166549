"""Driver calls about the process, devices and contexts, and calls that allocate, free and describe memory."""

# ruff: noqa: N802, ARG001 (names and signatures are CUDA's)

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

from kvoffload.simulator import space
from kvoffload.simulator.contexts import Context
from kvoffload.simulator.driver import (
    CONTEXT_IS_DESTROYED,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    Needs,
    Pool,
    SimulatedDriver,
    driver_call,
    integer,
    size,
)
from kvoffload.simulator.errors import INVALID_VALUE, RefusedError
from kvoffload.simulator.memory import PAGE_BYTES, Kind, Region

GREATEST_PRIORITY = -5

_PCI_BUS_ID = int(cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)


@driver_call(needs=Needs.NOTHING)
def cuInit(driver: SimulatedDriver, flags: int) -> Any:
    if integer(flags) != 0:
        return INVALID_VALUE
    driver.initialized = True
    return None


@driver_call(values=1, needs=Needs.NOTHING)
def cuDriverGetVersion(driver: SimulatedDriver) -> Any:
    major, minor = driver.driver_version
    return (major * 1000 + minor * 10,)


@driver_call(values=1, needs=Needs.DRIVER)
def cuDeviceGetCount(driver: SimulatedDriver) -> Any:
    return (driver.device_count,)


@driver_call(values=1, needs=Needs.DRIVER)
def cuDeviceGet(driver: SimulatedDriver, ordinal: int) -> Any:
    return (cuda.CUdevice(_ordinal(driver, ordinal)),)


@driver_call(values=1, needs=Needs.DRIVER)
def cuDeviceGetName(driver: SimulatedDriver, length: int, dev: Any) -> Any:
    _ordinal(driver, dev)
    return (_padded(b"NVIDIA simulated GPU", length),)


@driver_call(values=1, needs=Needs.DRIVER)
def cuDeviceGetPCIBusId(driver: SimulatedDriver, length: int, dev: Any) -> Any:
    return (_padded(b"0000:%02X:00.0" % (_ordinal(driver, dev) + 1), length),)


@driver_call(values=1, needs=Needs.DRIVER)
def cuDeviceGetAttribute(driver: SimulatedDriver, attrib: Any, dev: Any) -> Any:
    ordinal, number = _ordinal(driver, dev), int(attrib)
    offset = ordinal if number == _PCI_BUS_ID else 0
    return (driver.attributes.get(number, 0) + offset,)


@driver_call(values=1, needs=Needs.DRIVER)
def cuDevicePrimaryCtxRetain(driver: SimulatedDriver, dev: Any) -> Any:
    ordinal = _ordinal(driver, dev)
    context = driver.primaries.get(ordinal)
    if context is None:
        context = driver.primaries[ordinal] = driver.contexts.add(Context, ordinal, True)
    context.retain_count += 1
    return (cuda.CUcontext(context.handle),)


@driver_call(needs=Needs.DRIVER)
def cuDevicePrimaryCtxRelease(driver: SimulatedDriver, dev: Any) -> Any:
    ordinal = _ordinal(driver, dev)
    context = driver.primaries.get(ordinal)
    if context is None:
        return INVALID_CONTEXT
    context.retain_count -= 1
    if context.retain_count == 0:
        del driver.primaries[ordinal]
        if context.error is None:  # in a lost context nothing can be freed
            for kind, count in driver.contents(context).items():
                driver.left_in_contexts[kind] = driver.left_in_contexts.get(kind, 0) + count
        _destroy(driver, context)
    return None


@driver_call(values=1, needs=Needs.DRIVER)
def cuCtxCreate(driver: SimulatedDriver, *args: Any) -> Any:
    expected = 2 if driver.bindings_version < (13, 0) else 3
    if len(args) != expected:
        raise TypeError(f"cuCtxCreate() takes exactly {expected} positional arguments ({len(args)} given)")
    context = driver.contexts.add(Context, _ordinal(driver, args[-1]), False)
    driver.context_stack.append(context)
    return (cuda.CUcontext(context.handle),)


@driver_call(needs=Needs.DRIVER)
def cuCtxDestroy(driver: SimulatedDriver, ctx: Any) -> Any:
    context = _context_of(driver, ctx)
    if context.primary:
        return INVALID_CONTEXT
    _destroy(driver, context)
    if driver.current_context() is context:
        driver.context_stack.pop()
    return None


@driver_call(needs=Needs.DRIVER)
def cuCtxPushCurrent(driver: SimulatedDriver, ctx: Any) -> Any:
    driver.context_stack.append(_context_of(driver, ctx))


@driver_call(values=1, needs=Needs.DRIVER)
def cuCtxPopCurrent(driver: SimulatedDriver) -> Any:
    if not driver.context_stack:
        return INVALID_CONTEXT
    return (cuda.CUcontext(driver.context_stack.pop().handle),)


@driver_call(values=1, needs=Needs.DRIVER)
def cuCtxGetCurrent(driver: SimulatedDriver) -> Any:
    context = driver.current_context()
    return (cuda.CUcontext(context.handle if context is not None else 0),)


@driver_call(values=1, needs=Needs.DRIVER)
def cuCtxGetDevice(driver: SimulatedDriver) -> Any:
    context = driver.current_context()
    return (cuda.CUdevice(context.device),) if context is not None else INVALID_CONTEXT


@driver_call()
def cuCtxSynchronize(driver: SimulatedDriver) -> Any:
    targets = [(stream, stream.submitted) for stream in driver.context().all_streams()]
    if any(stream.capture for stream, _ in targets):
        return cuda.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    for stream, serial in targets:
        driver.finish(stream, serial, f"cuCtxSynchronize: {stream}")
    return None


@driver_call(values=2)
def cuCtxGetStreamPriorityRange(driver: SimulatedDriver) -> Any:
    return (0, GREATEST_PRIORITY)


def _ordinal(driver: SimulatedDriver, dev: Any) -> int:
    ordinal = integer(dev, signed=True)
    if not 0 <= ordinal < driver.device_count:
        raise RefusedError(INVALID_DEVICE)
    return ordinal


def _context_of(driver: SimulatedDriver, ctx: Any) -> Context:
    number = integer(ctx)
    if driver.contexts.is_stale(number):
        raise RefusedError(CONTEXT_IS_DESTROYED)
    return driver.contexts.get(number, INVALID_CONTEXT)


def _destroy(driver: SimulatedDriver, context: Context) -> None:
    """End a context: its work is done as far as nothing holds it, then everything in it goes."""
    streams = context.all_streams()
    while any(stream.queue for stream in streams) and driver.scheduler.step():
        pass
    for stream in streams:
        driver.scheduler.drop_queue(stream)
        stream.destroyed = True
        driver.streams.remove(stream.handle)
    for event in driver.events.values():
        if event.context is context:
            driver.events.remove(event.handle)
    for module in driver.modules.values():
        if module.context is context:
            driver.drop_module(module)
    for region in driver.memory.live(context):
        driver.memory.remove(region)
    context.streams = {}
    context.alive = False
    driver.contexts.remove(context.handle)


def _padded(text: bytes, length: int) -> bytes:
    if length <= len(text):
        raise RefusedError(INVALID_VALUE)
    return text + b"\0" + b" " * (length - len(text) - 1)


# memory ---------------------------------------------------------------------------------------------------------------


# ruff: noqa: N802, N803 (names and signatures are CUDA's)


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
    if not driver.memory.can_be_pinned(address, nbytes):
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
        return driver.memory.allocate(kind, [nbytes], alignment, [driver.context()])[0]
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

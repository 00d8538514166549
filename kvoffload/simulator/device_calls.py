"""Driver calls about the process, devices and contexts."""

# ruff: noqa: N802, ARG001 (names and signatures are CUDA's)

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

from kvoffload.simulator.contexts import Context
from kvoffload.simulator.driver import (
    CONTEXT_IS_DESTROYED,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    Needs,
    SimulatedDriver,
    driver_call,
    integer,
)
from kvoffload.simulator.errors import INVALID_VALUE, RefusedError

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
        context = driver.primaries[ordinal] = _new_context(driver, ordinal, primary=True)
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
    context = _new_context(driver, _ordinal(driver, args[-1]), primary=False)
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


def _new_context(driver: SimulatedDriver, ordinal: int, primary: bool) -> Context:
    context = Context(driver.contexts.new_handle(), ordinal, primary)
    driver.contexts.add(context)
    return context


def _context_of(driver: SimulatedDriver, ctx: Any) -> Context:
    number = integer(ctx)
    if driver.contexts.is_stale(number):
        raise RefusedError(CONTEXT_IS_DESTROYED)
    try:
        return driver.contexts.get(number)
    except RefusedError:
        raise RefusedError(INVALID_CONTEXT) from None


def _destroy(driver: SimulatedDriver, context: Context) -> None:
    """End a context: its work is done as far as nothing holds it, then everything in it goes."""
    streams = context.all_streams()
    while any(stream.queue for stream in streams) and driver.scheduler.step():
        pass
    for stream in streams:
        driver.scheduler.drop_queue(stream)
        stream.destroyed = True
    for handle in list(context.streams):
        driver.streams.remove(handle)
    for handle in list(context.events):
        driver.events.remove(handle)
    for module in driver.modules.values():
        if module.context is context:
            driver.drop_module(module)
    for region in driver.memory.live(context):
        driver.memory.remove(region)
    context.streams, context.events = {}, {}
    context.alive = False
    driver.contexts.remove(context.handle)


def _padded(text: bytes, length: int) -> bytes:
    if length <= len(text):
        raise RefusedError(INVALID_VALUE)
    return text + b"\0" + b" " * (length - len(text) - 1)

"""Driver calls about the process, devices and contexts."""

# ruff: noqa: N802 (names and signatures are CUDA's)

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

from kvoffload.simulator.calls import INVALID_CONTEXT, INVALID_VALUE, Core, Needs, driver_call, integer
from kvoffload.simulator.contexts import Context
from kvoffload.simulator.errors import RefusedError
from kvoffload.simulator.memory import Kind

INVALID_DEVICE = cuda.CUresult.CUDA_ERROR_INVALID_DEVICE
CONTEXT_IS_DESTROYED = cuda.CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED
GREATEST_PRIORITY = -5

_A = cuda.CUdevice_attribute


def default_attributes() -> dict[int, int]:
    """The device attributes of a PCIe Gen5 data-center GPU, by number; those not listed read as 0."""
    attributes = {
        _A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 9,
        _A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
        _A.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 132,
        _A.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: 1024,
        _A.CU_DEVICE_ATTRIBUTE_WARP_SIZE: 32,
        _A.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 232_448,
        _A.CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: 1,
        _A.CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: 1,
        _A.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: 1,
        _A.CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: 1,
        _A.CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: 1,
        _A.CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: 3,
        _A.CU_DEVICE_ATTRIBUTE_MAX_PITCH: 2**31 - 1,
        _A.CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: 1,
        _A.CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: 0,
        _A.CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: 0,
        _A.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: 0,
        # Stream memory operations: driver 580 on an H200 answers 0 to the attributes of the first version (92 to 94).
        _A.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: 1,
        _A.CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR: 1,
    }
    return {int(key): value for key, value in attributes.items()}


class DeviceCalls(Core):
    device_count: int
    attributes: dict[int, int]
    left_in_contexts: dict[str, int]
    _primaries: dict[int, Context]

    @driver_call(needs=Needs.NOTHING)
    def cuInit(self, flags: int) -> Any:
        if integer(flags) != 0:
            return INVALID_VALUE
        self.initialized = True
        return None

    @driver_call(values=1, needs=Needs.NOTHING)
    def cuDriverGetVersion(self) -> Any:
        major, minor = self.driver_version
        return (major * 1000 + minor * 10,)

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuDeviceGetCount(self) -> Any:
        return (self.device_count,)

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuDeviceGet(self, ordinal: int) -> Any:
        return (cuda.CUdevice(self._ordinal(ordinal)),)

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuDeviceGetName(self, length: int, dev: Any) -> Any:
        self._ordinal(dev)
        return (_padded(b"NVIDIA simulated GPU", length),)

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuDeviceGetPCIBusId(self, length: int, dev: Any) -> Any:
        return (_padded(b"0000:%02X:00.0" % (self._ordinal(dev) + 1), length),)

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuDeviceGetAttribute(self, attrib: Any, dev: Any) -> Any:
        ordinal, number = self._ordinal(dev), int(attrib)
        offset = ordinal if number == int(_A.CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) else 0
        return (self.attributes.get(number, 0) + offset,)

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuDevicePrimaryCtxRetain(self, dev: Any) -> Any:
        ordinal = self._ordinal(dev)
        context = self._primaries.get(ordinal)
        if context is None:
            context = self._primaries[ordinal] = self._new_context(ordinal, primary=True)
        context.retain_count += 1
        return (cuda.CUcontext(context.handle),)

    @driver_call(needs=Needs.DRIVER)
    def cuDevicePrimaryCtxRelease(self, dev: Any) -> Any:
        ordinal = self._ordinal(dev)
        context = self._primaries.get(ordinal)
        if context is None:
            return INVALID_CONTEXT
        context.retain_count -= 1
        if context.retain_count == 0:
            del self._primaries[ordinal]
            if context.error is None:  # in a lost context nothing can be freed
                for kind, count in self._contents(context).items():
                    self.left_in_contexts[kind] = self.left_in_contexts.get(kind, 0) + count
            self._destroy(context)
        return None

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuCtxCreate(self, *args: Any) -> Any:
        expected = 2 if self.bindings_version < (13, 0) else 3
        if len(args) != expected:
            raise TypeError(f"cuCtxCreate() takes exactly {expected} positional arguments ({len(args)} given)")
        context = self._new_context(self._ordinal(args[-1]), primary=False)
        self.context_stack.append(context)
        return (cuda.CUcontext(context.handle),)

    @driver_call(needs=Needs.DRIVER)
    def cuCtxDestroy(self, ctx: Any) -> Any:
        context = self._context_of(ctx)
        if context.primary:
            return INVALID_CONTEXT
        self._destroy(context)
        if self.current_context() is context:
            self.context_stack.pop()
        return None

    @driver_call(needs=Needs.DRIVER)
    def cuCtxPushCurrent(self, ctx: Any) -> Any:
        self.context_stack.append(self._context_of(ctx))

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuCtxPopCurrent(self) -> Any:
        if not self.context_stack:
            return INVALID_CONTEXT
        return (cuda.CUcontext(self.context_stack.pop().handle),)

    @driver_call(needs=Needs.DRIVER)
    def cuCtxSetCurrent(self, ctx: Any) -> Any:
        context = self._context_of(ctx) if integer(ctx) else None
        if self.context_stack:
            self.context_stack.pop()
        if context is not None:
            self.context_stack.append(context)

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuCtxGetCurrent(self) -> Any:
        context = self.current_context()
        return (cuda.CUcontext(context.handle if context is not None else 0),)

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuCtxGetDevice(self) -> Any:
        context = self.current_context()
        return (cuda.CUdevice(context.device),) if context is not None else INVALID_CONTEXT

    @driver_call()
    def cuCtxSynchronize(self) -> Any:
        targets = [(stream, stream.submitted) for stream in self.context().all_streams()]
        if any(stream.capture for stream, _ in targets):
            return cuda.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        for stream, serial in targets:
            self.finish(stream, serial, f"cuCtxSynchronize: {stream}")
        return None

    @driver_call(values=2)
    def cuCtxGetStreamPriorityRange(self) -> Any:
        return (0, GREATEST_PRIORITY)

    def _ordinal(self, dev: Any) -> int:
        ordinal = integer(dev, signed=True)
        if not 0 <= ordinal < self.device_count:
            raise RefusedError(INVALID_DEVICE)
        return ordinal

    def _new_context(self, ordinal: int, primary: bool) -> Context:
        context = Context(self.contexts.new_handle(), ordinal, primary)
        self.contexts.add(context)
        return context

    def _context_of(self, ctx: Any) -> Context:
        number = integer(ctx)
        if self.contexts.is_stale(number):
            raise RefusedError(CONTEXT_IS_DESTROYED)
        try:
            return self.contexts.get(number)
        except RefusedError:
            raise RefusedError(INVALID_CONTEXT) from None

    def _contents(self, context: Context) -> dict[str, int]:
        kinds = [region.kind for region in self.memory.live(context)]
        return {
            "streams": len(context.streams),
            "events": len(context.events),
            "device_allocations": kinds.count(Kind.DEVICE),
            "host_allocations": kinds.count(Kind.PINNED),
            "registered_ranges": kinds.count(Kind.REGISTERED),
            "modules": sum(module.context is context for module in self.modules.values()),
        }

    def _destroy(self, context: Context) -> None:
        """End a context: its work is done as far as nothing holds it, then everything in it goes."""
        streams = context.all_streams()
        while any(stream.queue for stream in streams) and self.scheduler.step():
            pass
        for stream in streams:
            self.scheduler.drop_queue(stream)
            stream.destroyed = True
        for handle in list(context.streams):
            self.streams.remove(handle)
        for handle in list(context.events):
            self.events.remove(handle)
        for module in self.modules.values():
            if module.context is context:
                self.drop_module(module)
        for region in self.memory.live(context):
            self.memory.remove(region)
        context.streams, context.events = {}, {}
        context.alive = False
        self.contexts.remove(context.handle)


def _padded(text: bytes, length: int) -> bytes:
    """A C string in a buffer of `length` bytes, as the bindings return it."""
    if length <= len(text):
        raise RefusedError(INVALID_VALUE)
    return text + b"\0" + b" " * (length - len(text) - 1)

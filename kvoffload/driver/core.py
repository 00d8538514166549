"""`Driver`: errors to exceptions, one method per driver call that the library makes. `Current`: a current context.

Handles and addresses are plain ints outside this package; the bindings accept them wherever they take a handle, except
in the lists of the batch calls, which `tables` builds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from kvoffload.driver.functions import OPTIONAL, RAW, REQUIRED
from kvoffload.driver.tables import FlatTable, SourceOrder, StridedTable
from kvoffload.errors import CapabilityError, DriverError

CAPTURE_IMPLICIT = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
NOT_READY = 600  # CUDA_ERROR_NOT_READY: the answer "not yet" of the query calls, not a failure
# CU_STREAM_LEGACY: handle 0 may mean the per-thread stream (CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM)
LEGACY_STREAM = 1
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the legacy default stream
_FROM_THE_FIRST = [0]  # cuMemcpyBatchAsync: the one set of attributes holds from copy 0 on
DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every context


def _missing(*_: Any) -> Any:
    raise CapabilityError("this driver or these bindings have no batch copies; the loop copier works")


class Driver:
    """Calls a driver API through a table of its functions, and raises DriverError for errors."""

    def __init__(self, api: Any, *, raw: Any, bindings_version: tuple[int, int], simulated: bool) -> None:
        self._functions: dict[str, Callable[..., Any]] = {name: getattr(api, name) for name in REQUIRED}
        self._functions |= {name: getattr(api, name) for name in OPTIONAL if hasattr(api, name)}
        self._raw: dict[str, Callable[..., Any]] = {name: getattr(raw, name) for name in RAW if hasattr(raw, name)}
        self.api = api
        self.bindings_version = bindings_version
        self.simulated = simulated
        self._relaxed: Any = None
        self.use_raw = False  # set once, by the capability probe
        self._bind()

    def _bind(self) -> None:
        # Called in every transfer, so without `call` between: a Python call costs more than some of these functions.
        self._current_context = self._functions["cuCtxGetCurrent"]
        self._push_context = self._functions["cuCtxPushCurrent"]
        self._pop_context = self._functions["cuCtxPopCurrent"]
        self._exchange_capture_mode = self._functions["cuThreadExchangeStreamCaptureMode"]
        self._event_record = self._functions["cuEventRecord"]
        self._event_query = self._functions["cuEventQuery"]
        self._stream_wait_event = self._functions["cuStreamWaitEvent"]
        self._stream_is_capturing = self._functions["cuStreamIsCapturing"]
        self._batch_3d: Callable[..., Any] = self._functions.get("cuMemcpy3DBatchAsync", _missing)
        self._batch: Callable[..., Any] = self._functions.get("cuMemcpyBatchAsync", _missing)
        self._launch_kernel: Callable[..., Any] = self._functions.get("cuLaunchKernel", _missing)

    def has(self, name: str) -> bool:
        """Return whether the function is there; it may still raise CapabilityError on a driver that lacks it."""
        return name in self._functions or name in self._raw

    def intercept(self, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Call `wrap(function)` in place of a driver function from now on; for tests and tools that watch calls."""
        functions = self._functions if name in self._functions else self._raw
        functions[name] = wrap(functions[name])
        self._bind()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call `name`. Returns its single value, its tuple of values, or None. Most need a current context."""
        try:
            result = self._functions[name](*arguments)
        except RuntimeError as error:  # FunctionNotFoundError, DynamicLibNotFoundError
            raise CapabilityError(f"{name} cannot be called: {error}") from error
        if result[0]:
            raise DriverError(name, result[0].name, int(result[0]))
        if len(result) == 1:
            return None
        return result[1] if len(result) == 2 else result[1:]

    def create(self, name: str, holder: list[Any], *arguments: Any) -> None:
        """Call `name`, which makes something, and append its handle to `holder`.

        Python delivers a KeyboardInterrupt after a C function has returned, and not between the plain statements that
        follow. So the handle is in `holder` unless the driver call itself was interrupted.
        """
        try:
            result = self._functions[name](*arguments)
            holder += result[1:] if not result[0] else ()
        except RuntimeError as error:
            raise CapabilityError(f"{name} cannot be called: {error}") from error
        if result[0]:
            raise DriverError(name, result[0].name, int(result[0]))

    def destroy(self, name: str, handles: list[Any]) -> None:
        """Call `name` for every handle, the last first. Each leaves `handles` right before its call.

        No interrupt can come between the two, since no Python function is entered: no handle is lost, and none is freed
        twice. Call it again after an exception to free the rest.
        """
        function = self._functions[name]
        while handles:
            handle = handles[-1]
            del handles[-1]
            result = function(handle)
            if result[0]:
                raise DriverError(name, result[0].name, int(result[0]))

    def init(self) -> None:
        self.call("cuInit", 0)

    # contexts -----------------------------------------------------------------------------------------------------

    def current_context(self) -> int:
        code, context = self._current_context()
        if code:
            raise DriverError("cuCtxGetCurrent", code.name, int(code))
        return int(context)

    def relax_capture_mode(self) -> Any:
        """Allow this thread any call while streams are captured. Returns the old mode for `restore_capture_mode`."""
        if self._relaxed is None:
            from cuda.bindings.driver import CUstreamCaptureMode

            self._relaxed = CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        code, before = self._exchange_capture_mode(self._relaxed)
        if code:
            raise DriverError("cuThreadExchangeStreamCaptureMode", code.name, int(code))
        return before

    def restore_capture_mode(self, mode: Any) -> None:
        code = self._exchange_capture_mode(mode)[0]
        if code:
            raise DriverError("cuThreadExchangeStreamCaptureMode", code.name, int(code))

    # streams and events -------------------------------------------------------------------------------------------

    def stream_create(self, priority: int) -> int:
        return int(self.call("cuStreamCreateWithPriority", NON_BLOCKING, priority))

    def stream_destroy(self, stream: int) -> None:
        self.call("cuStreamDestroy", stream)

    def stream_query(self, stream: int) -> bool:
        code = self._functions["cuStreamQuery"](stream)[0]
        if code and int(code) != NOT_READY:
            raise DriverError("cuStreamQuery", code.name, int(code))
        return not code

    def stream_synchronize(self, stream: int) -> None:
        self.call("cuStreamSynchronize", stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        code = self._stream_wait_event(stream, event, 0)[0]
        if code:
            raise DriverError("cuStreamWaitEvent", code.name, int(code))

    def stream_is_capturing(self, stream: int) -> bool:
        """Return whether `stream` is being captured into a graph; for the legacy stream, whether any stream is."""
        code, status = self._stream_is_capturing(stream)
        if not code:
            return bool(status)
        if int(code) != CAPTURE_IMPLICIT:
            raise DriverError("cuStreamIsCapturing", code.name, int(code))
        return True

    def event_create(self, *, timing: bool) -> int:
        return int(self.call("cuEventCreate", 0 if timing else DISABLE_TIMING))

    def event_destroy(self, event: int) -> None:
        self.call("cuEventDestroy", event)

    def event_record(self, event: int, stream: int) -> None:
        code = self._event_record(event, stream)[0]
        if code:
            raise DriverError("cuEventRecord", code.name, int(code))

    def event_query(self, event: int) -> bool:
        code = self._event_query(event)[0]
        if code and int(code) != NOT_READY:
            raise DriverError("cuEventQuery", code.name, int(code))
        return not code

    def event_seconds(self, start: int, end: int) -> float:
        """Return the seconds on the GPU clock from one completed event to another; the resolution is about 0.5 us."""
        return float(self.call("cuEventElapsedTime", start, end)) * 1e-3

    # memory -------------------------------------------------------------------------------------------------------

    def free_and_total_bytes(self) -> tuple[int, int]:
        free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    def address_range(self, address: int) -> tuple[int, int]:
        base, nbytes = self.call("cuMemGetAddressRange", address)
        return int(base), int(nbytes)

    def host_register(self, address: int, nbytes: int) -> None:
        self.call("cuMemHostRegister", address, nbytes, PORTABLE)

    def host_unregister(self, address: int) -> None:
        self.call("cuMemHostUnregister", address)

    def host_device_address(self, address: int) -> int:
        """Return the address that a kernel uses for pinned host memory; that of registered memory may differ."""
        return int(self.call("cuMemHostGetDevicePointer", address, 0))

    # kernels ------------------------------------------------------------------------------------------------------

    def module_function(self, module: int, name: str) -> int:
        return int(self.call("cuModuleGetFunction", module, name.encode()))

    def function_max_threads(self, function: int) -> int:
        """Return the most threads a block of this function can have on this GPU: its registers bound that, too."""
        from cuda.bindings.driver import CUfunction_attribute

        return int(
            self.call("cuFuncGetAttribute", CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function)
        )

    def function_allow_shared(self, function: int, nbytes: int) -> None:
        """Allow launches of the function to ask for up to `nbytes` of shared memory; without it 48 KiB are the most."""
        from cuda.bindings.driver import CUfunction_attribute

        attribute = CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.call("cuFuncSetAttribute", function, attribute, nbytes)

    def launch(self, function: int, grid: int, threads: int, shared_bytes: int, stream: int, pointers: int) -> None:
        """Queue `grid` blocks of `threads`. `pointers`: address of an array with each argument's address (uint64);
        the arguments are read during the call.
        """
        code = self._launch_kernel(function, grid, 1, 1, threads, 1, 1, shared_bytes, stream, pointers, 0)[0]
        if code:
            raise DriverError("cuLaunchKernel", code.name, int(code))

    # copies -------------------------------------------------------------------------------------------------------

    def copy_to_device(self, target: int, source: int, nbytes: int) -> None:
        """Copy, and wait, from any host memory, ordered with the legacy default stream."""
        self.call("cuMemcpyHtoD", target, source, nbytes)
        try:
            self.stream_synchronize(LEGACY_STREAM)  # from pageable memory the call returns when the bytes are staged
        except DriverError as error:
            if not error.sticky:  # once more: the caller may free the target now
                with contextlib.suppress(DriverError):
                    self.stream_synchronize(LEGACY_STREAM)
            raise

    def copy_to_host(self, target: int, source: int, nbytes: int) -> None:
        """Copy, and wait, to any host memory, ordered with the legacy default stream."""
        self.call("cuMemcpyDtoH", target, source, nbytes)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.call("cuMemcpyAsync", target, source, nbytes, stream)

    def fill(self, target: int, value: int, nbytes: int, stream: int) -> None:
        self.call("cuMemsetD8Async", target, value, nbytes, stream)

    def copy_strided(self, table: StridedTable, index: int, stream: int) -> None:
        """Queue one operation of `table` through cuMemcpy2DAsync."""
        if index >= len(table.objects):
            table.make_objects(index + 1)
        self.call("cuMemcpy2DAsync", table.objects[index], stream)

    def copy_strided_batch(self, table: StridedTable, count: int, stream: int) -> None:
        """Queue the first `count` operations of `table`, in no order; the driver reads the table during the call."""
        if self.use_raw:
            self._call_raw("memcpy_3d_batch_async_v2", count, table.address, 0, stream)
        else:
            objects = table.objects[:count]
            if len(objects) < count:
                table.make_objects(count)
                objects = table.objects[:count]
            code = self._batch_3d(count, objects, 0, stream)[0]
            if code:
                raise DriverError("cuMemcpy3DBatchAsync", code.name, int(code))

    def copy_batch(self, table: FlatTable, start: int, stop: int, order: SourceOrder, stream: int) -> None:
        """Queue copies `[start, stop)` of `table`, in no order; the driver reads the table during the call."""
        count = stop - start
        if self.use_raw:
            arrays, pair = table.raw_arrays(start), table.raw_attributes(order)
            self._call_raw("memcpy_batch_async_v2", *arrays, count, *pair, 1, stream)
        else:
            targets, sources, sizes = table.lists(start, stop)
            code = self._batch(targets, sources, sizes, count, table.attributes[order], _FROM_THE_FIRST, 1, stream)[0]
            if code:
                raise DriverError("cuMemcpyBatchAsync", code.name, int(code))

    def _call_raw(self, name: str, *arguments: Any) -> None:
        """Call a raw-address function: these return None and raise exceptions of their own, with a `status`."""
        try:
            self._raw[name](*arguments)
        except Exception as error:
            status = getattr(error, "status", None)
            if status is None:
                raise
            raise DriverError(name, "CUDA_" + str(error).split(" ")[0], int(status)) from error


class Current:
    """Makes a context current for the calling thread inside a `with`, and the caller's own again afterwards.

    If the context is current already, none is pushed or popped. Inside, the thread may also make calls while another
    stream is being captured into a graph: an event query, say, would otherwise fail and break the capture (capture
    modes GLOBAL, which is CUDA's default, and THREAD_LOCAL). With `any_call` false it may not: that saves two driver
    calls, for what only records events, waits for them, and queues copies and kernels.

    An interrupt in `__enter__` leaves the caller's context current. An interrupt at the entry of `__exit__`, where
    Python code cannot catch it, leaves this one current.

    Attributes:
        driver, context, any_call: set right after construction. There is no `__init__`: this is on the path of every
            transfer.
    """

    __slots__ = ("_capture_mode", "_pushed", "any_call", "context", "driver")

    driver: Driver
    context: int
    any_call: bool
    _capture_mode: Any
    _pushed: bool

    def __enter__(self) -> None:
        driver = self.driver
        self._pushed = False
        try:
            code, before = driver._current_context()
            if code:
                raise DriverError("cuCtxGetCurrent", code.name, int(code))
            if int(before) != self.context:
                self._pushed = True
                code = driver._push_context(self.context)[0]
                if code:
                    raise DriverError("cuCtxPushCurrent", code.name, int(code))
            if self.any_call:
                self._capture_mode = driver.relax_capture_mode()
        except BaseException:
            self._pop_own()
            raise

    def __exit__(self, *exception: object) -> None:
        driver = self.driver
        try:
            if self.any_call:
                driver.restore_capture_mode(self._capture_mode)
            if self._pushed and driver._pop_context()[0]:
                self._pop_own()
        except DriverError:  # what was done inside stands; an error here must not hide it or undo it
            self._pop_own()
        except BaseException:
            self._pop_own()
            raise

    def _pop_own(self) -> None:
        """Pop the context if this pushed it and it is still current."""
        try:
            if self._pushed and self.driver.current_context() == self.context:
                self.driver._pop_context()
        except DriverError:
            pass  # the context is lost or destroyed: the caller gets the error of its own call


def make_current(driver: Driver, context: int, any_call: bool = True) -> Current:
    current = Current()
    current.driver = driver
    current.context = context
    current.any_call = any_call
    return current

"""`open_device`: a GPU (or a simulated one), its context, its memory and its engines."""

from __future__ import annotations

import atexit
import logging
import math
import operator
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from kvoffload.device.allocations import AllocationFinder
from kvoffload.device.buffers import DeviceArray, DeviceBuffer, check_shape
from kvoffload.device.ownership import FORKS, DeviceResources, DeviceUser, Resource, Watch, warn_unreleased
from kvoffload.device.streams import Stream
from kvoffload.driver import Capabilities, Current, Driver, cuda, probe
from kvoffload.errors import CapabilityError, CapacityError, ClosedError, DriverError, KVOffloadError, KVOffloadWarning
from kvoffload.internal import hostinfo
from kvoffload.internal.checks import as_timeout, at_least, shown
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import new_lock, refuse_nested
from kvoffload.internal.teardown import Closing, run_all
from kvoffload.layout.dtypes import dtype_name, element_bytes
from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import Plane

if TYPE_CHECKING:
    from kvoffload.simulator import SimulatedDriver

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_ALLOCATION_ALIGNMENT = 512  # what cuMemAlloc aligns to, at least; planes of a slab keep it

_FOR_ENGINES = frozenset(
    [
        *("adopt", "advance_engines", "allocations", "check_open", "check_process", "check_stream_priority"),
        *("engines", "engines_over", "foreign", "lifecycle", "owned", "reclaim", "register_engine"),
        *("refuse_nested", "wait_lifecycle"),
    ]
)

_watches: set[Watch] = set()  # of the devices that are not closed
_garbage: deque[Watch] = deque()  # of devices that are garbage and were not closed


def open_device(
    index: int = 0,
    *,
    backend: Literal["cuda", "simulated", "auto"] | SimulatedDriver = "cuda",
    context: Any = None,
) -> Device:
    """Open a device. This is the first moment at which kvoffload touches CUDA.

    Args:
        index: which GPU, as CUDA counts them.
        backend: "cuda"; "simulated", a new `kvoffload.testing.SimulatedDriver()`; "auto", which falls back to
            "simulated" on a machine without a driver library or GPU; or your own SimulatedDriver, to give seed and
            versions or to open several of its devices.
        context: your CUDA context on that GPU: a handle, or an object that `int()` takes. It must exist until the
            device is closed. None: the GPU's primary context, which CuPy, JAX, PyTorch and the CUDA runtime use; it is
            created if needed.

    Raises:
        CapabilityError: there is no driver library or no usable bindings; the message says how to go on.
        DriverError: the driver failed, for example since the machine has no GPU.
        ValueError: an unknown backend, no such GPU, or a context of another GPU.
        TypeError: `context` is no positive integer, nor does `int()` make one of it.
    """
    _release_garbage()
    driver = _load_driver(backend)
    count = int(driver.call("cuDeviceGetCount"))
    if at_least("the device's index", index, 0) >= count:
        raise ValueError(f"the device's index must name one of the {count} devices, 0 to {count - 1}, got {index}")
    try:
        handle = None if context is None else -1 if isinstance(context, bool | str | bytes) else int(context)
    except (TypeError, ValueError, OverflowError):
        handle = -1
    if handle is not None and handle <= 0:
        raise TypeError(f"context must be None or the handle of a CUDA context, got {context!r:.80}")
    device = Device(driver, operator.index(index), handle, count)
    can = device.capabilities
    kind = "simulated device" if device.simulated else "device"
    versions = can.driver_version, can.bindings_version
    LOGGER.info("opened %s %d (%s): driver %s, cuda-bindings %s", kind, device.index, device.name, *versions)
    for name, reason in can.missing.items():
        level = logging.INFO if can.flat_batch and can.strided_batch else logging.WARNING  # else copies go one by one
        LOGGER.log(level, "%s cannot be used on device %d: %s", name, device.index, reason)
    return device


def _load_driver(backend: Any) -> Driver:
    if backend in ("cuda", "auto"):
        try:
            return cuda.load()
        except (CapabilityError, DriverError) as error:  # no driver library, or no GPU; a broken GPU is not passed over
            if backend == "cuda" or (isinstance(error, DriverError) and error.code != _NO_DEVICE):
                raise
    if backend in ("simulated", "auto"):
        from kvoffload.simulator import SimulatedDriver

        backend = SimulatedDriver()
    if not getattr(backend, "simulated", False):
        raise ValueError(f"backend must be 'cuda', 'simulated', 'auto' or a SimulatedDriver, got {backend!r:.80}")
    driver = Driver(backend, raw=backend.raw, bindings_version=backend.bindings_version, simulated=True)
    driver.init()
    return driver


class Device(Closing):
    """An open device, made by `open_device`. Usable from any thread; a context manager.

    Closing it drains and closes its engines, then frees the memory and streams that it made. A device that you forget
    is closed at the end of the interpreter, which waits up to ten seconds for transfers, or, once it is garbage, by the
    next `open_device`, with a ResourceWarning. A child of `fork` cannot use its parent's device: there, `close` does
    nothing, and calls that need the GPU raise ClosedError.

    Attributes:
        capabilities: the features of driver, bindings and GPU, a `kvoffload.driver.Capabilities`.
        pci: the PCIe link and NUMA node, as far as Linux reports them.
        index, name: of the GPU.
        context: the handle of its CUDA context. `with device.current():` makes it current for the calling thread.
        stream_priorities: a range of the priorities that streams can have; lower numbers go first.
        driver: for tests, and for driver calls of your own: `driver.call("cuMemGetInfo")`, inside `current()`.
        simulated: True for the simulated device: its bytes are right, its times say nothing about a GPU.
        simulator: its `SimulatedDriver`, which has the functions of `cuda.bindings.driver` and more; None on a GPU.
        closed: whether its engines are closed and it takes no more calls.
        lifecycle: a lock, held while an engine is constructed or closed, while memory or a stream is made, and while
            the device closes.
    """

    context: int
    capabilities: Capabilities

    def __init__(self, driver: Driver, index: int, context: int | None, device_count: int) -> None:
        self.driver = driver
        self.index = index
        self.simulated = driver.simulated
        self.simulator: Any = driver.api if driver.simulated else None
        self.lifecycle = new_lock()
        self._device_count = device_count
        self.closed = False
        self._users: list[weakref.ref[DeviceUser]] = []
        handle = int(driver.call("cuDeviceGet", index))
        self._resources = resources = DeviceResources(driver, handle)
        self._process, self._forks = resources.process, resources.forks
        self._watch = Watch(self, _garbage.append)
        self._watch.target = resources
        try:
            _watches.add(self._watch)
            if context is None:
                driver.create("cuDevicePrimaryCtxRetain", resources.retained, handle)
                context = int(resources.retained[0])
            self.context = resources.context = context
            with resources.current():
                actual = int(driver.call("cuCtxGetDevice"))
                if actual != handle:
                    raise ValueError(f"context belongs to device {actual}, but index is {index}; pass index={actual}")
                self.capabilities = probe(driver, handle)
                low, high = driver.call("cuCtxGetStreamPriorityRange")
            self.stream_priorities = range(int(high), int(low) + 1)  # numerically lowest is the highest priority
            self.name = driver.call("cuDeviceGetName", 256, handle).split(b"\0")[0].decode()
            bus = driver.call("cuDeviceGetPCIBusId", 32, handle).split(b"\0")[0].decode()
            self.pci = hostinfo.pci_device(bus)
        except BaseException:
            resources.release_context()
            _watches.discard(self._watch)  # it was never opened: its garbage needs no attention
            raise

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Allocate exactly `nbytes` bytes of uninitialised GPU memory, in one driver allocation.

        It is freed by `close` of the result, when the device closes, or, once the result and all arrays that other
        libraries made of it are garbage, by the device's next `allocate`, `stream` or new engine.

        Raises:
            CapacityError: the GPU has too little free memory; the message says how much.
            ValueError: `nbytes` is not an integer of at least 1.
            ClosedError: the device is closed, or this is a forked child.
            DriverError: the driver failed otherwise.
            RuntimeError: you called it inside a call of an engine on this device, in the same thread.
        """
        nbytes = at_least("nbytes", nbytes, 1)
        self.refuse_nested("allocate")
        self.reclaim()
        try:
            with self.lifecycle:
                return DeviceBuffer(self, nbytes)
        except DriverError as error:
            if not error.out_of_memory:
                raise
            with self.current():
                free, total = self.driver.free_and_total_bytes()
            raise CapacityError(
                f"cannot allocate {nbytes} bytes on {self.name}: {free} of {total} bytes are free"
            ) from error

    def allocate_blocks(self, num_blocks: int, *, planes: int, block_bytes: int) -> list[Plane]:
        """Allocate a block-major cache `(num_blocks, planes, block_bytes)`, uninitialised, and return its planes.

        This is the recommended layout if your kernels can read it: a block of all planes is one contiguous range, and
        so one copy. Plane p of block b lies at `result[0].address + (b * planes + p) * block_bytes`. Kernels that
        want one array per layer need `allocate_planes`. Once all planes are garbage, the memory is freed as `allocate`
        says; `result[0].owner` is its DeviceBuffer.

        Args:
            num_blocks: how many blocks the cache has.
            planes: how many planes; a layer's K and V are two.
            block_bytes: bytes of one block of one plane.

        Raises:
            ValueError: not integers of at least 1.
            CapacityError: the GPU has too little free memory.
            ClosedError: the device is closed, or this is a forked child.
            DriverError: the driver failed otherwise.
            RuntimeError: you called it inside a call of an engine on this device, in the same thread.
        """
        num_blocks, planes = at_least("num_blocks", num_blocks, 1), at_least("planes", planes, 1)
        block_bytes = at_least("block_bytes", block_bytes, 1)
        memory, stride = self.allocate(num_blocks * planes * block_bytes), planes * block_bytes
        return [
            Plane(address, block_bytes=block_bytes, num_blocks=num_blocks, block_stride=stride, owner=memory)
            for address in range(memory.address, memory.address + stride, block_bytes)
        ]

    def allocate_planes(
        self, count: int, *, block_bytes: int, num_blocks: int, block_stride: int | None = None
    ) -> list[Plane]:
        """Allocate `count` planes in one driver allocation, each at the next multiple of 512 bytes, uninitialised.

        They are for kernels that want an array for each plane. If each plane is below 2 GiB, one strided operation
        copies a block of all planes, slower than the contiguous copy of `allocate_blocks`; larger planes take a copy
        each. Once all planes are garbage, the memory is freed as `allocate` says; `result[0].owner` is its
        DeviceBuffer.

        Args:
            count: how many planes.
            block_bytes, num_blocks: bytes of a block, and blocks, of each plane.
            block_stride: bytes from one block to the next; None: `block_bytes`, without padding.

        Raises:
            ValueError: `count` is not an integer of at least 1.
            LayoutError: a number is not an integer of at least 1, or the stride is less than `block_bytes`.
            CapacityError: the GPU has too little free memory.
            ClosedError: the device is closed, or this is a forked child.
            DriverError: the driver failed otherwise.
            RuntimeError: you called it inside a call of an engine on this device, in the same thread.
        """
        count = at_least("count", count, 1)
        plane = partial(Plane, block_bytes=block_bytes, num_blocks=num_blocks, block_stride=block_stride)
        span = plane(1).span_bytes
        pitch = -(-span // _ALLOCATION_ALIGNMENT) * _ALLOCATION_ALIGNMENT
        slab = self.allocate(pitch * (count - 1) + span)
        return [plane(slab.address + index * pitch, owner=slab) for index in range(count)]

    def empty(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        """Return an uninitialised C-contiguous array in one driver allocation, which other libraries take without a
        copy.

        For a cache, give it the shape `(blocks, planes, ...)` or `(planes, blocks, ...)`, see `KVLayout.from_stacked`.
        The memory is kept while the array or an import of it is referred to. But closing `result.buffer` or the device
        frees it at once: use no import after that.

        Args:
            shape: extents, all positive.
            dtype: type of the elements: anything that numpy takes as a dtype, or a name such as "bfloat16" or
                "float8_e4m3fn".

        Raises:
            ValueError: `shape` is not a sequence of positive integers.
            LayoutError: `dtype` is not the type of one element, or its size is unknown.
            CapacityError: the GPU has too little free memory.
            ClosedError: the device is closed, or this is a forked child.
            DriverError: the driver failed otherwise.
            RuntimeError: you called it inside a call of an engine on this device, in the same thread.
        """
        name, extents = dtype_name(dtype), check_shape(shape)
        return DeviceArray(self.allocate(math.prod(extents) * element_bytes(name)), extents, name)

    def stream(self, *, priority: int = 0) -> Stream:
        """Return a new stream, for programs without a library that makes streams. It also works on the simulated
        device.

            with device.stream() as stream:
                engine.load(slots, blocks, after=stream).order_before(stream)

        At the end of the block the host waits for the work on the stream, then the stream is destroyed.

        Args:
            priority: one of `stream_priorities`; lower numbers go first. It orders kernels, not copies.

        Raises:
            ValueError: no such priority.
            ClosedError: the device is closed, or this is a forked child.
            DriverError: the driver failed.
            RuntimeError: you called it inside a call of an engine on this device, in the same thread.
        """
        self.check_process()
        self.check_stream_priority(priority, "priority")
        self.refuse_nested("stream")
        self.reclaim()
        with self.lifecycle:
            return Stream(self, priority)

    def check_stream_priority(self, priority: int, name: str = "stream_priority") -> None:
        """Raise ValueError unless streams of this device can have that priority; the message calls it `name`."""
        if priority not in self.stream_priorities:
            lowest, highest = self.stream_priorities[0], self.stream_priorities[-1]
            raise ValueError(f"{name} must be in {lowest} .. {highest}, got {priority!r}")

    def allocations(self, layout: KVLayout) -> list[list[int]]:
        """Return the base address of each plane's allocation: `result[group][plane]`. The device's context must be
        current: call it inside `with device.current():`.

        Mapped virtual memory without a gap between two planes is one allocation. Issues a KVOffloadWarning if the
        driver does not say whether a plane's memory is on this device.

        Raises:
            LayoutError: a plane is not GPU memory of this device, or runs past the end of its allocation; or the
                context is not current.
            DriverError: the context is lost.
        """
        groups = [group.planes for group in layout.groups]
        finder = AllocationFinder(self.driver, self.index, self.name, self._device_count)
        found = iter(finder.find([plane for planes in groups for plane in planes]))
        bases: list[list[int]] = [[] for _ in groups]
        doubts = []
        for g, planes in enumerate(groups):
            for p, plane in enumerate(planes):
                name, allocation = f"groups[{g}][{p}]", next(found)
                allocation.check(plane, name)
                if allocation.doubt:
                    doubts.append(f"{name}: the device of {plane} cannot be determined: {allocation.doubt}")
                bases[g].append(allocation.base)
        if doubts:
            warnings.warn(
                f"{doubts[0]} ({len(doubts)} such planes). They are taken to be memory of device {self.index}; if they "
                "are not, open the device that they are on",
                KVOffloadWarning,
                stacklevel=2,
            )
        return bases

    def current(self) -> Current:
        """Return a context manager for one `with`: inside, the device's context is current for this thread; afterwards,
        the one that was current before.

        Raises:
            ClosedError: the device is closed, or this is a forked child.
            DriverError: from `with`: the driver failed.
        """
        if self.closed or len(FORKS) != self._forks:
            self.check_open()
        current = Current()  # `make_current`, without the call: this is on the path of every transfer
        current.driver = self.driver
        current.context = self.context
        current.any_call = True
        return current

    def check_open(self) -> None:
        """Raise ClosedError if the device is closed, or in a forked child."""
        if self.closed:
            raise ClosedError(
                f"{self.name} (device {self.index}) is closed and its memory is freed; open it again with open_device()"
            )
        self.check_process()

    def check_process(self) -> None:
        """Raise ClosedError in a forked child of the process that opened the device. In that process itself a closed
        device passes. Call it before you take a lock, which the parent may have held.
        """
        if self.foreign:
            raise ClosedError(
                f"device {self.index} was opened by process {self._process}, before fork(); CUDA does not "
                "survive a fork: open a device in the child, or start it with the 'spawn' method"
            )

    @property
    def foreign(self) -> bool:
        """Whether this process is a forked child of the one that opened the device."""
        return self._resources.foreign

    # resources --------------------------------------------------------------------------------------------------------

    def adopt(self, owner: object, release: Callable[[], None], what: str | None = None) -> Resource:
        return self._resources.adopt(owner, release, what)

    @property
    def owned(self) -> int:
        """How many buffers, streams and engines of this device are not freed yet, dropped ones included."""
        return len(self._resources.registered)

    def reclaim(self) -> None:
        """Free what you have dropped, under `lifecycle`: no `close` ends meanwhile. Call `refuse_nested` first."""
        with self.lifecycle, self.current():
            self.advance_engines()
            texts = self._resources.collect()
        warn_unreleased(texts)

    # engines ----------------------------------------------------------------------------------------------------------

    def register_engine(self, engine: DeviceUser) -> None:
        """Have `close` of the device first close this engine. Engines call it for themselves. The device does not keep
        the engine alive, and knows it until it is garbage.

        Raises:
            ClosedError: this is a forked child.
        """
        self.check_process()
        self._users.append(weakref.ref(engine, self._users.remove))

    def engines(self) -> list[DeviceUser]:
        return [engine for known in list(self._users) if (engine := known()) is not None]

    def refuse_nested(self, call: str) -> None:
        """Raise RuntimeError, which names `call`, if this thread is inside a call of an engine on this device, or pins
        a piece of its pool, or is a thread of the library (a finalizer can run there). Without engines it never raises.

        Call it before you take `lifecycle`, which must never be taken inside an engine's lock.
        """
        for engine in self.engines():
            engine.refuse_nested(call)

    def advance_engines(self) -> None:
        """Ask the GPU, without waiting, which transfers of this device's engines have ended, so that engines that you
        have dropped can become garbage: an unfinished transfer keeps its engine alive. It may call a tracer's `on_end`.
        ClosedError in a forked child, if there is an engine.
        """
        for engine in self.engines():
            engine.advance()

    def engines_over(self, address: int, nbytes: int) -> list[DeviceUser]:
        """Return the parts of engines with a plane that overlaps a range of device memory, closed ones included, on any
        open `Device` of the same driver: a GPU may be opened several times, and no two GPUs of a process have an
        address in common.

        A part is what an engine has on one device, not the object that you made. Padding between blocks counts. The
        list is a snapshot, and keeps its elements alive.

        Raises:
            ClosedError: the device is closed, or this is a forked child.
        """
        self.check_open()
        devices = [device for device in _open_devices() if device.driver.api is self.driver.api]
        engines = (engine for device in devices for engine in device.engines())
        return [engine for engine in engines if engine.touches(address, nbytes)]

    def wait_lifecycle(self, timeout: float | None) -> None:
        """Wait until no other thread holds `lifecycle`, for at most `timeout` seconds. None: return at once,
        held or not.

        The lock is not held on return: take it then with `with device.lifecycle:`, which waits without a limit. (An
        interrupted `acquire` could leave it locked for ever.)

        Raises:
            TimeoutError: another thread held it all the time.
            ClosedError: in a forked child, where a thread of the parent may seem to hold it for ever.
        """
        self.check_process()
        if timeout is None:
            return
        # No signal handler runs between the end of an `__enter__` that is a C function and the body of its `with`
        # (docs/how/repair.md). A `partial` of a C function is one. Python 3.14 would bind it to the instance;
        # `staticmethod`, which is in C as well, keeps it as it is.
        acquire = staticmethod(partial(self.lifecycle.acquire, True, min(max(0.0, timeout), threading.TIMEOUT_MAX)))
        attempt: Any = type("Attempt", (), {"__enter__": acquire, "__exit__": self.lifecycle.__exit__})()
        acquired = False
        try:
            with attempt as acquired:
                pass
        except RuntimeError:  # `__exit__` releases a lock that was not taken
            pass
        if not acquired:
            raise TimeoutError(f"another thread opens or closes an engine of {self!r} for more than {timeout} seconds")

    def close(self, timeout: float | None = None) -> None:
        """Drain and close the engines, free every buffer and stream, release the primary context (a context of yours
        stays). End your own work on the GPU first: this waits for transfers only.

        Idempotent; after an interrupt or an error, call it again to close the rest. In a forked child it does nothing.
        Arrays that you took from `engine.slots` stay valid (over `host_memory` while you keep that mapped); arrays over
        GPU memory do not.

        Args:
            timeout: seconds to wait for all engines and transfers together, 0 to look once; None waits for as long as
                they take.

        Raises:
            TimeoutError: an engine's transfers were still running: engines without any are closed. Or another thread
                held `lifecycle`: nothing has happened. The device stays open, with all that it has allocated.
            DriverError: a driver call failed. Call it again for what is left.
            ValueError: `timeout` is no number; nothing has happened.
            RuntimeError: you called it inside a call of an engine or of the device, in the same thread.
        """
        if self.foreign:
            return
        self.refuse_nested("close")
        refuse_nested(self.lifecycle, "close")
        timeout = as_timeout(timeout)
        deadline = None if timeout is None else time.perf_counter() + timeout

        def close_in_time(engine: DeviceUser) -> None:
            engine.close(None if deadline is None else max(0.0, deadline - time.perf_counter()))

        self.wait_lifecycle(timeout)
        with self.lifecycle:
            if not self.closed:
                run_all(partial(close_in_time, engine) for engine in self.engines())
                self.closed = True
            texts = self._resources.free_all()  # also after an interrupted `close`: what is freed is not freed again
            _watches.discard(self._watch)
        warn_unreleased(texts)

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - _FOR_ENGINES)

    def __repr__(self) -> str:
        kind = "simulated, " if self.simulated else ""
        state = "closed" if self.closed else f"{len(self.engines())} engines"
        return f"Device({self.index}, {self.name!r}, {kind}{state})"


def _open_devices() -> list[Device]:
    return [device for watch in list(_watches) if (device := watch()) is not None]


def _release_garbage() -> None:
    """Free the resources of devices that became garbage without `close`."""
    texts: list[str] = []
    for device in _open_devices():
        if not device.foreign:
            device.advance_engines()
    while _garbage:
        watch = _garbage[0]
        resources: DeviceResources = watch.target
        if not resources.foreign and watch in _watches:
            try:
                texts += resources.free_all()
            except DriverError as error:  # not of the caller's making
                texts.append(f"the resources of a Device could not all be freed: {error}")
            if resources.context:
                texts.append("a Device was never closed; close it, or use it in a with statement")
        _watches.discard(watch)
        try:
            _garbage.remove(watch)
        except ValueError:
            pass  # another thread opens a device, too
    warn_unreleased(texts)


def checked_devices(devices: Any, name: str = "devices") -> tuple[Device, ...]:
    """Return `devices`, if they are a list or tuple of open_device()'s; else TypeError."""
    if not isinstance(devices, Sequence) or not all(isinstance(each, Device) for each in devices):
        raise TypeError(f"{name} must be a list of devices from open_device(), got {shown(devices)}")
    return tuple(devices)


@atexit.register
def _close_all() -> None:
    """Wait for running transfers before their memory goes, at interpreter exit: ten seconds in all."""
    deadline = time.perf_counter() + 10.0
    for device in _open_devices():
        try:
            device.close(timeout=max(0.0, deadline - time.perf_counter()))
        except (KVOffloadError, TimeoutError):
            pass  # nothing was freed; the process is about to end anyway

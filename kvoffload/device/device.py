"""`open_device`: a GPU (or a simulated one), its context, and what was allocated on it."""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvoffload.device.buffers import DeviceArray, DeviceBuffer, check_shape
from kvoffload.device.ownership import Claim, Current, Holdings, complain
from kvoffload.driver import Capabilities, Driver, probe
from kvoffload.errors import CapabilityError, CapacityError, ClosedError, DriverError, KVOffloadError, LayoutError
from kvoffload.internal import hostinfo
from kvoffload.internal.checks import at_least
from kvoffload.layout.dtypes import dtype_name, element_bytes
from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import Plane

if TYPE_CHECKING:
    from kvoffload.engine.engine import OffloadEngine

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_ALLOCATION_ALIGNMENT = 512  # what cuMemAlloc aligns to, at least; planes of a slab keep it

_open_devices: weakref.WeakSet[Device] = weakref.WeakSet()
_abandoned: deque[Holdings] = deque()  # of devices that are garbage


def open_device(
    index: int = 0,
    *,
    backend: Any = "cuda",
    context: Any = None,
    seed: int | None = None,
    driver_version: tuple[int, int] | None = None,
    bindings_version: tuple[int, int] | None = None,
) -> Device:
    """Open a device. This is the first moment at which kvoffload touches CUDA.

    Args:
        index: which GPU, as CUDA counts them.
        backend: "cuda"; "simulated"; "auto" for a GPU where there is one and else the simulated device; or a
            `kvoffload.testing.SimulatedDriver` to share between devices.
        context: a CUDA context of the caller's (handle, or anything `int()` takes) on that GPU. None: the GPU's primary
            context, which is what CuPy, JAX, PyTorch and the CUDA runtime use; it is created if nobody has yet.
        seed, driver_version, bindings_version: of the simulated device: its scheduling, 0, and what it can do,
            `(13, 0)` and `(13, 3)`.

    Raises:
        CapabilityError: no driver library or no usable bindings; the message says how to go on.
        DriverError: the driver failed.
        ValueError: an unknown backend, no such GPU, a context of another GPU.
    """
    _release_abandoned()
    options = {"seed": seed, "driver_version": driver_version, "bindings_version": bindings_version}
    driver = _load(backend, {name: value for name, value in options.items() if value is not None})
    count = int(driver.call("cuDeviceGetCount"))
    if at_least("index", index, 0) >= count:
        raise ValueError(f"index must name one of the {count} devices, 0 to {count - 1}, got {index}")
    return Device(driver, int(index), context)


def _load(backend: Any, simulation: dict[str, Any]) -> Driver:
    from kvoffload.driver import cuda

    if backend == "cuda":
        if simulation:
            raise ValueError(f"{', '.join(simulation)} belong to the simulated device, but backend is 'cuda'")
        return cuda.load()
    if backend == "auto":
        try:
            return cuda.load()
        except CapabilityError:  # no driver library
            backend = "simulated"
        except DriverError as error:
            if error.code != _NO_DEVICE:  # a GPU that is there and broken is not passed over
                raise
            backend = "simulated"
    if backend == "simulated":
        from kvoffload.simulator import SimulatedDriver

        backend = SimulatedDriver(**simulation)
    if not getattr(backend, "simulated", False):
        raise ValueError(f"backend must be 'cuda', 'simulated', 'auto' or a SimulatedDriver, got {backend!r:.80}")
    driver = Driver(backend, raw=backend.raw, bindings_version=backend.bindings_version, simulated=True)
    driver.init()
    return driver


class Device:
    """An open device; made by `open_device`. Usable from any thread; a context manager.

    Closing drains and closes its engines, then frees what it allocated. A child of `fork` cannot use its parent's
    device: every call raises ClosedError there, and nothing of the parent's is touched.

    Attributes:
        driver: the `Driver`; for tests and for programs that want calls of their own.
        capabilities: what driver, bindings and GPU can do.
        simulated: whether this is no GPU; every time and bandwidth is then made up.
        simulator: the SimulatedDriver behind it, or None.
        index, name: which GPU.
        pci: its PCIe link and NUMA node, as far as Linux tells.
    """

    def __init__(self, driver: Driver, index: int, context: Any) -> None:
        self.driver = driver
        self.index = index
        self.simulated = driver.simulated
        self.simulator: Any = driver.api if driver.simulated else None
        self._closed = False
        self.lifecycle = threading.RLock()  # held while something is made on the device, and while it closes
        self._engines: weakref.WeakSet[OffloadEngine] = weakref.WeakSet()
        handle = int(driver.call("cuDeviceGet", index))
        primary = context is None
        self.context = int(driver.call("cuDevicePrimaryCtxRetain", handle) if primary else context)
        self._holdings = Holdings(driver, handle, self.context, primary=primary)
        try:
            self._describe(handle)
        except BaseException:
            self._holdings.release_context()
            raise
        self._finalizer = weakref.finalize(self, _abandoned.append, self._holdings)
        self._finalizer.atexit = False
        _open_devices.add(self)

    def _describe(self, handle: int) -> None:
        with self._holdings.current():
            actual = int(self.driver.call("cuCtxGetDevice"))
            if actual != handle:
                raise ValueError(f"context belongs to device {actual}, but index is {self.index}; pass index={actual}")
            self.capabilities: Capabilities = probe(self.driver, handle)
            low, high = self.driver.call("cuCtxGetStreamPriorityRange")
        self.stream_priorities = range(int(high), int(low) + 1)  # numerically lowest is the highest priority
        self.name = _text(self.driver.call("cuDeviceGetName", 256, handle))
        self.pci = hostinfo.pci_device(_text(self.driver.call("cuDeviceGetPCIBusId", 32, handle)))

    def current(self) -> Current:
        """A context manager: the device's context is current inside, the caller's again afterwards.

        Raises:
            ClosedError: the device is closed, or this is a forked child.
        """
        if self._closed:
            raise ClosedError(f"{self.name} (device {self.index}) is closed; open it again with open_device()")
        self.check_process()
        return self._holdings.current()

    def check_process(self) -> None:
        """Raise ClosedError in a forked child. To be asked before a lock is taken: the parent may have held it."""
        if self.foreign:
            raise ClosedError(
                f"device {self.index} was opened by process {self._holdings.process}, before fork(); CUDA does not "
                "survive a fork: open a device in the child, or start it with the 'spawn' method"
            )

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """GPU memory, uninitialised, of exactly `nbytes` bytes in one driver allocation.

        Raises:
            CapacityError: the GPU has not that much free; the message says what it has.
        """
        nbytes = at_least("nbytes", nbytes, 1)
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

    def allocate_planes(
        self, count: int, *, block_bytes: int, num_blocks: int, block_stride: int | None = None
    ) -> list[Plane]:
        """`count` planes in one slab, which always fold: one strided operation per block carries all of them.

        The slab lives as long as any of the planes; `planes[0].owner` is its DeviceBuffer.
        """
        count = at_least("count", count, 1)
        span = Plane(1, block_bytes=block_bytes, num_blocks=num_blocks, block_stride=block_stride).span_bytes
        pitch = -(-span // _ALLOCATION_ALIGNMENT) * _ALLOCATION_ALIGNMENT
        slab = self.allocate(pitch * (count - 1) + span)
        return [
            Plane(
                slab.address + index * pitch,
                block_bytes=block_bytes,
                num_blocks=num_blocks,
                block_stride=block_stride,
                owner=slab,
            )
            for index in range(count)
        ]

    def empty(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        """An uninitialised C-contiguous array in one driver allocation, for other libraries to take without a copy.

        With a plane axis in front, `KVLayout.from_stacked(array)` always folds.

        Args:
            shape: extents, all positive.
            dtype: of an element: what numpy takes for a dtype, or a name such as "bfloat16" or "float8_e4m3fn".

        Raises:
            CapacityError, ValueError, LayoutError: as `allocate` and `DeviceArray`.
        """
        name, extents = dtype_name(dtype), check_shape(shape)
        return DeviceArray(self.allocate(math.prod(extents) * element_bytes(name)), extents, name)

    def check_stream_priority(self, priority: int) -> None:
        """Raise ValueError unless streams of this device can have that priority."""
        if priority not in self.stream_priorities:
            lowest, highest = self.stream_priorities[0], self.stream_priorities[-1]
            raise ValueError(f"stream_priority must be in {lowest} .. {highest}, got {priority!r}")

    def allocations(self, layout: KVLayout) -> list[list[int]]:
        """For each plane of each group, the base of the driver allocation that holds it; the context must be current.

        Raises:
            LayoutError: a plane that no allocation of this device holds, or that runs past the end of one.
        """
        return [
            [self._allocation(plane, f"groups[{g}][{p}]") for p, plane in enumerate(group.planes)]
            for g, group in enumerate(layout.groups)
        ]

    def _allocation(self, plane: Plane, name: str) -> int:
        try:
            base, nbytes = self.driver.address_range(plane.address)
        except DriverError as error:
            raise LayoutError(f"{name}: {plane} is not memory of {self.name} (device {self.index}): {error}") from error
        if not self.driver.is_device_memory(plane.address):
            raise LayoutError(f"{name}: {plane} is host memory; planes are GPU memory")
        ordinal = self.driver.device_ordinal(plane.address)
        if ordinal != self.index:
            raise LayoutError(
                f"{name}: {plane} is memory of device {ordinal}, but the engine is on device {self.index}"
            )
        excess = plane.end - base - nbytes
        if excess > 0:
            raise LayoutError(
                f"{name}: {plane} runs {excess} bytes past the end of its allocation of {nbytes} bytes at {base:#x}"
            )
        return base

    def claim(self, owner: object, free: Callable[[], None], what: str | None = None) -> Claim:
        """See `Holdings.claim`."""
        return self._holdings.claim(owner, free, what)

    @property
    def owned(self) -> int:
        """How many things are allocated on the device: buffers, and engines that were not closed."""
        return len(self._holdings.claims)

    def reclaim(self) -> None:
        """Free what has become garbage since the last time."""
        with self.current():
            self.advance_engines()
            complaints = self._holdings.collect()
        complain(complaints)

    def advance_engines(self) -> None:
        """Have every engine take note of jobs that have ended: an engine with unfinished jobs cannot become garbage."""
        for engine in list(self._engines):
            engine.advance()

    def engines_over(self, address: int, nbytes: int) -> list[OffloadEngine]:
        """The engines with a plane in a range of device memory."""
        if self._closed:
            raise ClosedError(f"{self.name} (device {self.index}) is closed, and its memory is freed")
        self.check_process()
        return [engine for engine in list(self._engines) if engine.touches(address, nbytes)]

    def register_engine(self, engine: OffloadEngine) -> None:
        """Have the engine closed with the device."""
        self._engines.add(engine)

    @contextmanager
    def hold_lifecycle(self, timeout: float | None) -> Iterator[None]:
        """Hold `lifecycle`; TimeoutError if another thread keeps it for `timeout` seconds (None: for ever)."""
        if not self.lifecycle.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            raise TimeoutError(f"another thread opens or closes something on {self!r}, for more than {timeout} seconds")
        try:
            yield
        finally:
            self.lifecycle.release()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def foreign(self) -> bool:
        """Whether this process is a forked child of the one that opened the device."""
        return self._holdings.foreign

    def close(self, timeout: float | None = None) -> None:
        """Drain and close the engines, free every buffer, let go of the context. Idempotent.

        Arrays over `engine.slots` stay valid. In a forked child this does nothing.

        Args:
            timeout: seconds to wait for transfers in all; None waits for as long as they take.

        Raises:
            TimeoutError: an engine's transfers were still running; nothing it uses was freed, the device stays open.
            DriverError: a call failed, and what it should have freed may be lost; closing again goes on with the rest.
        """
        if self.foreign:
            return
        deadline = None if timeout is None else time.perf_counter() + timeout
        with self.hold_lifecycle(timeout):
            if self._closed:
                return
            for engine in list(self._engines):
                engine.close(None if deadline is None else max(0.0, deadline - time.perf_counter()))
            complaints = _release(self._holdings)
            self._closed = True
            self._finalizer.detach()
        complain(complaints)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = "simulated, " if self.simulated else ""
        state = "closed" if self._closed else f"{len(self._engines)} engines"
        return f"Device({self.index}, {self.name!r}, {kind}{state})"


def _text(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode()


def _release(holdings: Holdings) -> list[str]:
    """Free all that a device holds. A lost context has taken its memory with it, so that is no error."""
    complaints: list[str] = []
    if holdings.claims:
        try:
            with holdings.current():
                complaints = holdings.free_everything()
        except DriverError as error:
            if not error.sticky:
                raise
    holdings.release_context()
    return complaints


def _release_abandoned() -> None:
    """Free what devices held that became garbage without having been closed."""
    complaints: list[str] = []
    for device in list(_open_devices):
        if not device.foreign:
            device.advance_engines()
    while _abandoned:
        holdings = _abandoned.popleft()
        if holdings.foreign:
            continue
        try:
            complaints += _release(holdings)
        except DriverError as error:  # not the caller's
            complaints.append(f"not all that a Device held could be freed: {error}")
        complaints.append("a Device was never closed; close it, or use it in a with statement")
    complain(complaints)


@atexit.register
def _close_all() -> None:
    """At interpreter exit: let running transfers end before their memory goes. Stuck GPUs get ten seconds in all."""
    deadline = time.perf_counter() + 10.0
    for device in list(_open_devices):
        try:
            device.close(timeout=max(0.0, deadline - time.perf_counter()))
        except (KVOffloadError, TimeoutError):
            pass  # nothing was freed; the process is about to end anyway

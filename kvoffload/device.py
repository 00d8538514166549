"""`open_device`: a GPU (or a simulated one), its context, and what was allocated on it."""

from __future__ import annotations

import atexit
import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from kvoffload import hostinfo
from kvoffload.driver import Capabilities, Driver, probe
from kvoffload.errors import CapacityError, ClosedError, DriverError, KVOffloadError, LayoutError
from kvoffload.layout import KVLayout, Plane
from kvoffload.memory import DeviceBuffer
from kvoffload.teardown import run_all

if TYPE_CHECKING:
    from kvoffload.engine import OffloadEngine

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_ALLOCATION_ALIGNMENT = 512  # what cuMemAlloc aligns to, at least; planes of a slab keep it

Finalizer: TypeAlias = "weakref.finalize[Any, Any]"

_open_devices: weakref.WeakSet[Device] = weakref.WeakSet()


def open_device(
    index: int = 0,
    *,
    backend: Any = "cuda",
    context: Any = None,
    seed: int = 0,
    driver_version: tuple[int, int] = (13, 0),
    bindings_version: tuple[int, int] = (13, 3),
) -> Device:
    """Open a device. This is the first moment at which kvoffload touches CUDA.

    Args:
        index: which GPU, as CUDA counts them.
        backend: "cuda"; "simulated"; "auto" for a GPU where there is one and else the simulated device; or a
            `kvoffload.testing.SimulatedDriver` to share between devices.
        context: a CUDA context of the caller's (handle, or anything `int()` takes) on that GPU. None: the GPU's primary
            context, which is what CuPy, JAX, PyTorch and the CUDA runtime use; it is created if nobody has yet.
        seed, driver_version, bindings_version: of the simulated device: its scheduling, and what it can do.

    Raises:
        CapabilityError: no driver library or no usable bindings; the message says how to go on.
        DriverError: the driver failed.
        ValueError: an unknown backend, no such GPU, a context of another GPU.
    """
    driver = _load(backend, {"seed": seed, "driver_version": driver_version, "bindings_version": bindings_version})
    count = int(driver.call("cuDeviceGetCount"))
    if not 0 <= index < count:
        raise ValueError(f"index must name one of the {count} devices, 0 to {count - 1}, got {index}")
    return Device(driver, index, context)


def _load(backend: Any, simulation: dict[str, Any]) -> Driver:
    from kvoffload.driver import cuda

    if backend == "cuda":
        return cuda.load()
    if backend == "auto":
        try:
            return cuda.load()
        except KVOffloadError:
            backend = "simulated"
    if backend == "simulated":
        from kvoffload.driver.simulator import SimulatedDriver

        backend = SimulatedDriver(**simulation)
    if not hasattr(backend, "cuInit"):
        raise ValueError(f"backend must be 'cuda', 'simulated', 'auto' or a SimulatedDriver, got {backend!r}")
    driver = Driver(backend, raw=backend.raw, bindings_version=backend.bindings_version, simulated=True)
    driver.init()
    return driver


class Current:
    """Makes a context current for the calling thread, and the caller's current again afterwards. Reentrant."""

    __slots__ = ("_context", "_driver")

    def __init__(self, driver: Driver, context: int) -> None:
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        self._driver.context_push(self._context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._driver.context_pop()
        except DriverError:  # what was done inside stands; an error here must not hide it or undo it
            if self._driver.current_context() == self._context:
                self._driver.context_pop()


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
        self._process = os.getpid()
        self._closed = False
        self._keys = itertools.count()
        self._garbage: deque[tuple[int, Callable[[], None]]] = deque()
        self._owned: dict[int, Finalizer] = {}
        self._engines: weakref.WeakSet[OffloadEngine] = weakref.WeakSet()
        self._handle = int(driver.call("cuDeviceGet", index))
        self._primary = context is None
        if self._primary:
            self.context = int(driver.call("cuDevicePrimaryCtxRetain", self._handle))
        else:
            self.context = int(context)
        self._current = Current(driver, self.context)
        try:
            self._describe()
        except BaseException:
            self._release_context()
            raise
        _open_devices.add(self)

    def _describe(self) -> None:
        with self._current:
            actual = int(self.driver.call("cuCtxGetDevice"))
            if actual != self._handle:
                raise ValueError(f"context belongs to device {actual}, but index is {self.index}; pass index={actual}")
            self.capabilities: Capabilities = probe(self.driver, self._handle)
            low, high = self.driver.call("cuCtxGetStreamPriorityRange")
        self.stream_priorities = range(int(high), int(low) + 1)  # numerically lowest is the highest priority
        self.name = _text(self.driver.call("cuDeviceGetName", 256, self._handle))
        self.pci = hostinfo.pci_device(_text(self.driver.call("cuDeviceGetPCIBusId", 32, self._handle)))

    def current(self) -> Current:
        """A context manager: the device's context is current inside, the caller's again afterwards.

        Raises:
            ClosedError: the device is closed, or this is a forked child.
        """
        if self._closed:
            raise ClosedError(f"{self.name} (device {self.index}) is closed; open it again with open_device()")
        self.check_process()
        return self._current

    def check_process(self) -> None:
        """Raise ClosedError in a forked child. To be asked before a lock is taken: the parent may have held it."""
        if self.foreign:
            raise ClosedError(
                f"device {self.index} was opened by process {self._process}, before fork(); CUDA does not survive a "
                "fork: open a device in the child, or start it with the 'spawn' method"
            )

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """GPU memory, uninitialised, of exactly `nbytes` bytes in one driver allocation.

        Raises:
            CapacityError: the GPU has not that much free; the message says what it has.
        """
        if nbytes < 1:
            raise ValueError(f"nbytes must be at least 1, got {nbytes}")
        self.reclaim()
        try:
            return DeviceBuffer(self, nbytes)
        except DriverError as error:
            if error.code != _OUT_OF_MEMORY:
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
        if count < 1:
            raise LayoutError(f"count must be at least 1, got {count}")
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

    def own(self, thing: object, free: Callable[[], None]) -> Finalizer:
        """Have `free()` called, with the context current, some time after `thing` is garbage, or at close.

        The finalizer only appends to a queue: it may run anywhere, so it takes no lock and calls no driver. `reclaim`
        frees. Calling the finalizer has the same effect as `thing` becoming garbage.
        """
        key = next(self._keys)
        finalizer = weakref.finalize(thing, self._garbage.append, (key, free))
        finalizer.atexit = False
        self._owned[key] = finalizer
        return finalizer

    def reclaim(self) -> None:
        """Free what has become garbage since the last time."""
        with self.current():
            for engine in list(self._engines):
                engine.advance()
            run_all(self._collect())

    def _collect(self) -> Iterator[Callable[[], None]]:
        while True:
            try:
                key, free = self._garbage.popleft()
            except IndexError:  # empty; another thread may be collecting too
                return
            del self._owned[key]
            yield free

    def register_engine(self, engine: OffloadEngine) -> None:
        """Have the engine closed with the device."""
        self._engines.add(engine)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def foreign(self) -> bool:
        """Whether this process is a forked child of the one that opened the device."""
        return os.getpid() != self._process

    def close(self, timeout: float | None = None) -> None:
        """Drain and close the engines, free every buffer, let go of the context. Idempotent.

        Arrays over `engine.slots` stay valid. In a forked child this does nothing.

        Args:
            timeout: seconds to wait for transfers; None waits for as long as they take.

        Raises:
            TimeoutError: transfers were still running; nothing they use was freed, and the device stays open.
            DriverError: something could not be freed; the rest was, and closing again finishes.
        """
        if self._closed or self.foreign:
            return
        for engine in list(self._engines):
            engine.drain(timeout)
        try:
            run_all([engine.close for engine in self._engines])
            run_all(list(self._owned.values()))
            if self._garbage:
                self.reclaim()
        except DriverError as error:
            if not error.sticky:  # a lost context has taken its memory with it
                raise
        self._closed = True
        self._release_context()

    def _release_context(self) -> None:
        if not self._primary:
            return
        try:
            self.driver.call("cuDevicePrimaryCtxRelease", self._handle)
        except DriverError as error:
            if not error.sticky:
                raise

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


@atexit.register
def _close_all() -> None:
    """At interpreter exit: let running transfers end before their memory goes. A stuck GPU gets ten seconds."""
    for device in list(_open_devices):
        try:
            device.close(timeout=10.0)
        except (KVOffloadError, TimeoutError):
            pass  # nothing was freed; the process is about to end anyway

"""`DeviceContext`: the context of an open device, the resources in it, and the engines that use it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from kvoffload.device.current import Current
from kvoffload.device.ownership import DeviceResources, Resource, warn_unreleased
from kvoffload.driver import Driver
from kvoffload.errors import ClosedError
from kvoffload.internal.nesting import refuse_nested


class DeviceUser(Protocol):
    """What a device needs of an engine on it.

    Attributes:
        lock: held by its calls.
        submitted: transfers submitted so far.
    """

    lock: threading.RLock

    @property
    def submitted(self) -> int: ...

    @property
    def in_flight(self) -> int:
        """Transfers that have not ended yet."""

    def advance(self) -> None:
        """Take note of transfers that have ended. The context is current."""

    def touches(self, address: int, nbytes: int) -> bool:
        """Whether transfers of the engine can read or write a byte of that range of device memory."""

    def drain(self, timeout: float | None = None) -> None:
        """Wait on the host until every submitted transfer has ended."""

    def order_all_before(self, stream: int) -> None:
        """Work queued on `stream` from now on starts after every transfer submitted so far."""

    def wait_stream(self) -> int:
        """A stream of the engine that other streams may wait for, and that can be made to wait for them."""

    def close(self, timeout: float | None = None) -> None:
        """Drain and free everything. Idempotent.

        Raises:
            TimeoutError: transfers were still running after `timeout` seconds; nothing was freed.
        """


_contexts: list[weakref.ref[DeviceContext]] = []  # each takes itself out; changed by one operation at a time


class DeviceContext:
    """What buffers and engines need of an open device. `Device` adds opening, allocating and closing.

    Attributes:
        driver: the `Driver`; for tests and for programs that want calls of their own.
        index: which GPU, as CUDA counts them.
        name: what CUDA calls it.
        simulated: whether this is the simulated device; its times and bandwidths say nothing about a GPU.
        simulator: the SimulatedDriver behind it, or None.
        context: handle of the CUDA context.
        lifecycle: held while an engine is constructed or closed, and while the device closes.
    """

    context: int

    def __init__(self, driver: Driver, index: int, resources: DeviceResources) -> None:
        self.driver = driver
        self.index = index
        self.name = f"GPU {index}"
        self.simulated = driver.simulated
        self.simulator: Any = driver.api if driver.simulated else None
        self.lifecycle = threading.RLock()
        self._resources = resources
        self._process = resources.process
        self._closed = False
        self._users: list[weakref.ref[DeviceUser]] = []
        _contexts.append(weakref.ref(self, _contexts.remove))

    def current(self) -> Current:
        """A context manager: the device's context is current inside, the caller's again afterwards.

        Raises:
            ClosedError: the device is closed, or this is a forked child.
        """
        if self._closed or os.getpid() != self._process:
            self.check_open()
        current = Current()  # `make_current`, without the call: this is on the path of every transfer
        current.driver = self.driver
        current.context = self.context
        current.any_call = True
        return current

    def check_open(self) -> None:
        """Raise ClosedError if the device is closed, or in a forked child."""
        if self._closed:
            raise ClosedError(
                f"{self.name} (device {self.index}) is closed and its memory is freed; open it again with open_device()"
            )
        self.check_process()

    def check_process(self) -> None:
        """Raise ClosedError in a forked child. To be called before a lock is taken: the parent may have held it."""
        if self.foreign:
            raise ClosedError(
                f"device {self.index} was opened by process {self._process}, before fork(); CUDA does not "
                "survive a fork: open a device in the child, or start it with the 'spawn' method"
            )

    @property
    def foreign(self) -> bool:
        """Whether this process is a forked child of the one that opened the device."""
        return os.getpid() != self._process

    @property
    def closed(self) -> bool:
        return self._closed

    # resources --------------------------------------------------------------------------------------------------------

    def adopt(self, owner: object, release: Callable[[], None], what: str | None = None) -> Resource:
        """Register what is about to be made for `owner`; see `DeviceResources.adopt`."""
        return self._resources.adopt(owner, release, what)

    @property
    def owned(self) -> int:
        """How many resources are on the device: buffers, and engines that were not closed."""
        return len(self._resources.registered)

    def free(self, resource: Resource) -> None:
        """Make the context current and free a resource. Does nothing the second time, and in a forked child.

        Raises:
            DriverError: a call failed; call it again to free the rest.
        """
        if resource.alive and not self.foreign:
            with self._resources.current():
                resource.free()

    def reclaim(self) -> None:
        """Free the resources whose owners have become garbage since the last time."""
        with self.current():
            self.advance_engines()
            texts = self._resources.collect()
        warn_unreleased(texts)

    # engines ----------------------------------------------------------------------------------------------------------

    def register_engine(self, engine: DeviceUser) -> None:
        """Have the engine closed with the device. It is not kept alive."""
        self.check_process()
        self._users.append(weakref.ref(engine, self._users.remove))

    def engines(self) -> list[DeviceUser]:
        """The registered engines that are not garbage."""
        return [engine for known in list(self._users) if (engine := known()) is not None]

    def refuse_nested(self, call: str) -> None:
        """Raise RuntimeError inside a call of an engine: `lifecycle` is taken before its lock, never after it."""
        for engine in self.engines():
            refuse_nested(engine.lock, call)

    def advance_engines(self) -> None:
        """Have every engine take note of transfers that have ended: an engine with unfinished ones is kept alive."""
        for engine in self.engines():
            engine.advance()

    def engines_over(self, address: int, nbytes: int) -> list[DeviceUser]:
        """The engines with a plane in a range of device memory, also those of other `Device` objects: a GPU may be
        opened several times, and no two of a process have an address in common.

        Raises:
            ClosedError: the device is closed, or this is a forked child.
        """
        self.check_open()
        devices = (device for known in list(_contexts) if (device := known()) is not None)
        engines = (engine for device in devices if device.driver.api is self.driver.api for engine in device.engines())
        return [engine for engine in engines if engine.touches(address, nbytes)]

    def wait_lifecycle(self, timeout: float | None) -> None:
        """Wait until no other thread holds `lifecycle`, for at most `timeout` seconds (None: without a limit).

        Follow it by `with device.lifecycle:`. An `acquire` with a timeout outside of a `with` could be interrupted when
        the lock is taken already, and the lock would never be released.

        Raises:
            TimeoutError: another thread held it all the time.
            ClosedError: in a forked child, where a thread of the parent may seem to hold it for ever.
        """
        self.check_process()
        if timeout is not None and not _was_free(self.lifecycle, min(max(0.0, timeout), threading.TIMEOUT_MAX)):
            raise TimeoutError(f"another thread opens or closes an engine of {self!r} for more than {timeout} seconds")


def _was_free(lock: Any, seconds: float) -> bool:
    """Whether `lock` could be taken within so many seconds; it is free again on return.

    CPython runs no signal handler between the end of an `__enter__` that is a C function and the body of its `with`.
    A `partial` of a C function is one, and on a class of its own it is not bound to the instance.
    """
    attempt: Any = type("Attempt", (), {"__enter__": partial(lock.acquire, True, seconds), "__exit__": lock.__exit__})()
    try:
        with attempt as acquired:
            return bool(acquired)
    except RuntimeError:  # `__exit__` releases a lock that was not taken
        return False

"""Driver objects that must be freed: who owns them, and how they are freed although an interrupt can come anywhere.

A `Resource` is registered before anything is made for it. From then on it is freed exactly once, by the first of:

1. its owner's `close()`, which calls `Resource.free`;
2. a later call that runs `collect`, after the owner has become garbage;
3. the end of the device.

Its `release` callback frees everything made so far. After an interrupt or a driver error in it the resource stays
registered, and the next attempt frees the rest. A weakref callback may run in any thread, inside any lock, so it is a C
function that only appends to a deque, which `collect` reads.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from kvoffload.driver import Current, Driver, make_current
from kvoffload.errors import DriverError
from kvoffload.internal.nesting import new_lock, refuse_nested
from kvoffload.internal.teardown import run_all

FORKS: list[None] = []
"""Grows in a forked child. (`os.getpid`, a system call, takes 0.4 us.)"""
os.register_at_fork(after_in_child=partial(FORKS.append, None))  # in C: no interrupt comes in between


class OpenDevice(Protocol):
    """A `Device`, as the buffers and streams on it see it."""

    driver: Driver
    index: int
    simulated: bool
    simulator: Any

    @property
    def foreign(self) -> bool: ...

    def current(self) -> Current: ...

    def check_open(self) -> None: ...

    def adopt(self, owner: object, release: Callable[[], None], what: str | None = None) -> Resource: ...

    def engines_over(self, address: int, nbytes: int) -> list[DeviceUser]: ...


class DeviceUser(Protocol):
    """An engine's part on a device, as the device calls it; see `Shard`."""

    lock: threading.RLock

    def refuse_nested(self, call: str) -> None: ...

    @property
    def submitted(self) -> int: ...

    @property
    def in_flight(self) -> int: ...

    def advance(self) -> None: ...

    def touches(self, address: int, nbytes: int) -> bool: ...

    def drain(self, timeout: float | None = None) -> None: ...

    def order_all_before(self, stream: int) -> None: ...

    def wait_stream(self) -> int: ...

    def close(self, timeout: float | None = None) -> None: ...


class Watch(weakref.ref[Any]):
    """A weak reference to an owner; `target` must be freed once the owner is garbage."""

    __slots__ = ("target",)

    target: Any


class Resource:
    """Driver objects to free for one owner. Made by `DeviceResources.adopt`.

    Attributes:
        what: named in a ResourceWarning if the garbage collector found the owner unclosed; None: no warning.
    """

    __slots__ = ("_lock", "_release", "_resources", "_watch", "what")

    def __init__(self, resources: DeviceResources, release: Callable[[], None], what: str | None, watch: Watch) -> None:
        self.what = what
        self._resources = resources
        self._release = release
        self._watch: Watch | None = watch
        self._lock = new_lock()

    @property
    def alive(self) -> bool:
        return self in self._resources.registered

    def free(self) -> None:
        """Free everything now. Does nothing the second time, and in a forked child.

        Raises:
            DriverError: a call failed. The resource stays registered; call `free` again for the rest.
            RuntimeError: the same thread is inside a call of it, so something would be freed twice.
        """
        if self._resources.foreign:
            return
        refuse_nested(self._lock, "close")
        with self._lock:
            if self.alive:
                with self._resources.current():
                    self._release()
                self.drop()

    def drop(self) -> None:
        """Take the resource out of the register: everything is freed, or gone with its context."""
        self._watch = None
        self._resources.registered.pop(self, None)


class DeviceResources:
    """The context of a device and the resources in it. Lives until they are freed, even if the Device is garbage.

    Args:
        driver: the driver.
        device_handle: the device whose primary context `retained` counts.

    Attributes:
        context: the context's handle; 0 until it is known.
        retained: one element for each time that the primary context was retained; filled by `Driver.create`.
        registered: the truth: resources that must still be freed, oldest first.
        garbage: the watches of owners that are garbage. A hint only: `registered` has their resources, too.
    """

    def __init__(self, driver: Driver, device_handle: int) -> None:
        self.driver = driver
        self.context = 0
        self.process, self.forks = os.getpid(), len(FORKS)
        self.retained: list[Any] = []
        self.registered: dict[Resource, None] = {}
        self.garbage: deque[Watch] = deque()
        self._device_handle = device_handle

    @property
    def foreign(self) -> bool:
        """Whether this process is a forked child of the one that opened the device, so it must touch nothing."""
        return len(FORKS) != self.forks

    def current(self) -> Current:
        return make_current(self.driver, self.context)

    def adopt(self, owner: object, release: Callable[[], None], what: str | None = None) -> Resource:
        """Register a resource for `owner`. Call it before you make anything.

        Args:
            owner: some time after it becomes garbage, `release` is called.
            release: frees everything made so far, with the context current. It must not refer to `owner`. It may be
                called again, also after an interrupt or an exception, and then frees the rest.
            what: see `Resource`.
        """
        watch = Watch(owner, self.garbage.append)
        watch.target = resource = Resource(self, release, what, watch)
        self.registered[resource] = None
        return resource

    def collect(self) -> list[str]:
        """Free the resources whose owners are garbage. Returns texts of warnings.

        A resource that cannot be freed raises nothing here, since the caller asked for something else. The device tries
        again when it closes.
        """
        texts: list[str] = []
        while True:
            try:
                watch = self.garbage[0]
            except IndexError:
                return texts
            resource: Resource = watch.target
            if resource.what is not None and resource.alive:
                texts.append(f"{resource.what} was never closed; close it, or use it in a with statement")
            try:
                resource.free()
            except DriverError as error:
                texts.append(f"a resource whose owner is garbage could not be freed: {error}")
            try:
                self.garbage.remove(watch)
            except ValueError:
                pass  # another thread was collecting, too

    def free_all(self) -> list[str]:
        """Free every resource, the newest first, then the primary context. Returns texts of warnings.

        A lost context has taken its memory with it, so that is no error.
        """
        texts: list[str] = []
        if self.registered:
            try:
                with self.current():
                    texts = self.collect()
                    run_all(resource.free for resource in list(self.registered)[::-1])
            except DriverError as error:
                if not error.sticky:
                    raise
                for resource in list(self.registered):
                    resource.drop()
        self.release_context()
        return texts

    def release_context(self) -> None:
        self.retained[:] = [self._device_handle] * len(self.retained)  # `create` put the context's handle there
        try:
            self.driver.destroy("cuDevicePrimaryCtxRelease", self.retained)
        except DriverError as error:
            if not error.sticky:
                raise


def warn_unreleased(texts: list[str]) -> None:
    """Issue a ResourceWarning for each text. Call it last: if warnings are errors, nothing after it runs."""
    for text in texts:
        warnings.warn(text, ResourceWarning, 3)

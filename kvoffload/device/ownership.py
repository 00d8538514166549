"""What a device owns of the driver: its context, and everything allocated in it that must be given back.

Things (buffers, engines) are freed by name, or some time after they have become garbage. A finalizer may run anywhere,
in any thread, inside any lock; so it only appends to a queue, and the next call that has the context current frees.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable

from kvoffload.driver import Driver
from kvoffload.errors import DriverError
from kvoffload.internal.teardown import run_all


class Current:
    """Makes a context current for the calling thread inside a `with`, and the caller's own again afterwards.

    Inside, the thread may also make calls while some other stream is being captured into a graph: an event query, say,
    would otherwise fail and break the capture (capture modes GLOBAL, which is CUDA's default, and THREAD_LOCAL).
    """

    __slots__ = ("_capture_mode", "_context", "_driver")

    def __init__(self, driver: Driver, context: int) -> None:
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        self._driver.context_push(self._context)
        try:
            self._capture_mode = self._driver.relax_capture_mode()
        except BaseException:
            self._pop()
            raise

    def __exit__(self, *exception: object) -> None:
        try:
            self._driver.restore_capture_mode(self._capture_mode)
        except DriverError:
            pass  # what was done inside stands; an error here must not hide it or undo it
        self._pop()

    def _pop(self) -> None:
        try:
            self._driver.context_pop()
        except DriverError:
            try:
                if self._driver.current_context() == self._context:
                    self._driver.context_pop()
            except DriverError:
                pass


class Claim:
    """One thing to be given back, once: by `free`, or by the holdings after its owner is garbage."""

    __slots__ = ("_finalizer", "_free", "_holdings", "what")

    def __init__(self, holdings: Holdings, owner: object, free: Callable[[], None], what: str | None) -> None:
        self._holdings = holdings
        self._free = free
        self.what = what
        self._finalizer = weakref.finalize(owner, holdings.garbage.append, self)
        self._finalizer.atexit = False

    @property
    def alive(self) -> bool:
        """Whether it has not been given back, nor its owner become garbage."""
        return self._finalizer.alive

    def free(self) -> None:
        """Give it back now; the context must be current. Does nothing the second time."""
        if self._finalizer.detach() is not None:
            self.settle()

    def settle(self) -> None:
        """Give back what nobody else will: the finalizer has run or was detached."""
        self._holdings.claims.discard(self)
        self._free()


def complain(complaints: list[str]) -> None:
    """A ResourceWarning for each. To be called last: where warnings are errors, nothing after it happens."""
    for complaint in complaints:
        warnings.warn(complaint, ResourceWarning, 3)


class Holdings:
    """The context of a device and the claims in it. Outlives a Device that was forgotten.

    Args:
        driver: the driver.
        device_handle: whose primary context to let go of at the end.
        context: its handle.
        primary: whether `context` is the primary context, retained once for these holdings.
    """

    def __init__(self, driver: Driver, device_handle: int, context: int, *, primary: bool) -> None:
        self.driver = driver
        self.context = context
        self.process = os.getpid()
        self.claims: set[Claim] = set()
        self.garbage: deque[Claim] = deque()
        self._device_handle = device_handle
        self._retained = primary
        self._lock = threading.Lock()

    @property
    def foreign(self) -> bool:
        """Whether this process is a forked child of the one that made them; it must touch nothing."""
        return os.getpid() != self.process

    def current(self) -> Current:
        return Current(self.driver, self.context)

    def claim(self, owner: object, free: Callable[[], None], what: str | None = None) -> Claim:
        """Have `free()` called with the context current some time after `owner` is garbage, if not before.

        Args:
            free: must not hold `owner`.
            what: named in a ResourceWarning if it was left to the garbage collector; None: that is no mistake.
        """
        claim = Claim(self, owner, free, what)
        self.claims.add(claim)
        return claim

    def collect(self) -> list[str]:
        """Free what has become garbage; the context must be current. Returns what there is to `complain` about.

        What could not be freed is no error here: the caller wanted something else.
        """
        complaints: list[str] = []
        while True:
            try:
                claim = self.garbage.popleft()
            except IndexError:  # empty; another thread may be collecting too
                return complaints
            if claim.what is not None:
                complaints.append(f"{claim.what} was never closed; close it, or use it in a with statement")
            try:
                claim.settle()
            except DriverError as error:
                complaints.append(f"what became garbage could not be freed: {error}")

    def free_everything(self) -> list[str]:
        """Free every claim, garbage or not; the context must be current. Returns what there is to `complain` about."""
        run_all(claim.free for claim in list(self.claims))
        return self.collect()

    def release_context(self) -> None:
        """Let go of the primary context, once."""
        with self._lock:
            retained, self._retained = self._retained, False
        if not retained:
            return
        try:
            self.driver.call("cuDevicePrimaryCtxRelease", self._device_handle)
        except DriverError as error:
            if not error.sticky:
                raise

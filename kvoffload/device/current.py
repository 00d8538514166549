"""`Current`: a context is current for the calling thread inside a `with`."""

from __future__ import annotations

from typing import Any

from kvoffload.driver import Driver
from kvoffload.errors import DriverError


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
            if driver.current_context() != self.context:
                self._pushed = True
                driver.context_push(self.context)
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
            if self._pushed:
                driver.context_pop()
        except DriverError:  # what was done inside stands; an error here must not hide it or undo it
            self._pop_own()
        except BaseException:
            self._pop_own()
            raise

    def _pop_own(self) -> None:
        """Pop the context if this pushed it and it is still current."""
        try:
            if self._pushed and self.driver.current_context() == self.context:
                self.driver.context_pop()
        except DriverError:
            pass  # the context is lost or destroyed: the caller gets the error of its own call


def make_current(driver: Driver, context: int, any_call: bool = True) -> Current:
    current = Current()
    current.driver = driver
    current.context = context
    current.any_call = any_call
    return current

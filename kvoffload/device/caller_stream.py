"""`Stream`: a stream for callers without a library that makes streams."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvoffload.device.ownership import OpenDevice
from kvoffload.driver.core import NON_BLOCKING
from kvoffload.errors import ClosedError, DriverError
from kvoffload.internal.waiting import wait_until


class Stream:
    """A stream of a device. Work on it runs in the order in which it was queued. Made by `Device.stream`.

    Pass it wherever kvoffload takes a stream (`after=stream`, `job.order_before(stream)`), and to other libraries by
    `__cuda_stream__` (`cupy.cuda.Stream.from_external(stream)`) or by its `handle`. It does not wait for the legacy
    default stream, which CuPy uses by default, nor does that wait for it.

    Usable from any thread. A context manager: leaving the block waits for the work and destroys the stream. If you
    forget to close it, a later call of the device destroys it with a ResourceWarning once it is garbage, or the device
    when it closes.

    Attributes:
        device: its device.
    """

    def __init__(self, device: OpenDevice, priority: int) -> None:
        handles: list[Any] = []  # the truth about what must be destroyed
        self.device = device
        with device.current():
            # The driver lets work that is queued on it end before it destroys it, and does not wait for that.
            destroy = partial(device.driver.destroy, "cuStreamDestroy", handles)
            self._resource = device.adopt(self, destroy, "a Stream")
            try:
                device.driver.create("cuStreamCreateWithPriority", handles, NON_BLOCKING, priority)
            except DriverError:
                self._resource.free()
                raise
        self._handle = int(handles[0])

    @property
    def handle(self) -> int:
        """The CUstream, as an integer.

        Raises:
            ClosedError: the stream is destroyed, its device is closed, or this is a forked child.
        """
        self.device.check_open()
        if not self._resource.alive:
            raise ClosedError(f"the stream {self._handle:#x} is destroyed: its with block has ended; make another one")
        return self._handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """(0, `handle`): the protocol by which Python libraries for CUDA take each other's streams."""
        return 0, self.handle

    @property
    def done(self) -> bool:
        """Whether all work queued so far has ended. Asks the GPU without waiting for it.

        Raises:
            ClosedError: the stream or its device is closed, or this is a forked child.
            DriverError: the driver failed, for example because the context is lost.
        """
        handle = self.handle
        with self.device.current():
            return self.device.driver.stream_query(handle)

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait on the host until all work queued so far has ended.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            ClosedError: the stream or its device is closed, or this is a forked child.
            DriverError: the driver failed.
            TimeoutError: `timeout` seconds have passed; the work goes on.
            ValueError: `timeout` is no number.
        """
        wait_until(lambda: self.done, timeout, repr(self))

    def close(self) -> None:
        """Wait on the host until all work queued on the stream has ended, without limit, and destroy the stream.

        Idempotent; if it is interrupted, call it again. Does nothing in a forked child, after the device is closed, or
        if the CUDA context is lost.

        Raises:
            DriverError: the driver failed in another way.
        """
        if not self._resource.alive or self.device.foreign:
            return
        try:
            self.synchronize()
            self.device.free(self._resource)
        except DriverError as error:
            if not error.sticky:
                raise
            self._resource.drop()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._resource.alive else ", destroyed"
        return f"Stream({self._handle:#x}, device {self.device.index}{state})"

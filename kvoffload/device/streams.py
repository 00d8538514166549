"""The streams of a lane, pools of events, and streams of other programs.

How much can be queued. Measured on driver 580 (CUDA 13.0): for each direction a context has 4 hardware queues of 1022
places, which all its streams share (with CUDA_DEVICE_MAX_CONNECTIONS at its default); when they are full, submission
blocks until the GPU has made progress, however long that takes. A cuMemcpyAsync takes a place, so does every operation
of a strided batch and every record of a timing event; about 23 copies of a flat batch take one; waits and records of
plain events take none. Making a stream can block behind queued work as well. So a lane makes its streams at once, fills
each to `QUEUE_LIMIT`, and has no room when they are full.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, Final, NoReturn

from kvoffload.device.ownership import OpenDevice
from kvoffload.driver import Driver
from kvoffload.driver.core import DISABLE_TIMING, LEGACY_STREAM, NON_BLOCKING
from kvoffload.errors import CapacityError, ClosedError, DriverError, TransferError
from kvoffload.internal.checks import index_or
from kvoffload.internal.teardown import Closing
from kvoffload.internal.waiting import wait_until

STREAMS_PER_LANE = 4  # for copies
KERNEL_STREAM = STREAMS_PER_LANE  # index of the lane's stream for kernels
QUEUE_LIMIT = 768
SEGMENT_LIMIT = 380  # operations of a transfer queued together: two such segments and their events fill a stream
EVENT_COST = 2  # places that a segment's timing events may take
_NOT_A_STREAM_HERE = frozenset({101, 201, 400})  # CUDA_ERROR_INVALID_DEVICE, _CONTEXT, _HANDLE


class NoWait:
    """`after=NO_WAIT`: the transfer waits for no stream. You guarantee that no queued work touches its blocks, for
    example since the host has waited. The engine still orders its own transfers.
    """

    def __repr__(self) -> str:
        return "NO_WAIT"


NO_WAIT: Final = NoWait()


class EventPool:
    """Events that nothing is pending on, up to `limit` made in all.

    Attributes:
        idle: events that may be taken: `idle.pop() if idle else make()`. An event goes back by `idle.append(event)`
            when no call will query it, or have a stream wait for it, any more.
    """

    def __init__(self, driver: Driver, limit: int, *, timing: bool) -> None:
        self._driver = driver
        self._limit = limit
        self._flags = 0 if timing else DISABLE_TIMING
        self._events: list[int] = []  # all that exist
        self.idle: list[int] = []

    @property
    def created(self) -> int:
        return len(self._events)

    @property
    def in_use(self) -> int:
        return len(self._events) - len(self.idle)

    def make(self) -> int:
        """Return a new event, which is in use."""
        events = self._events
        if len(events) >= self._limit:
            raise CapacityError(f"all {self._limit} events are in use; poll() the engine until transfers have ended")
        self._driver.create("cuEventCreate", events, self._flags)
        events[-1] = event = int(events[-1])
        return event

    def keep_in_use(self, events: AbstractSet[int]) -> None:
        """Note that exactly these events of the pool, and of others, are in use; all others are idle."""
        self._events = [int(event) for event in self._events]
        self.idle = [event for event in self._events if event not in events]

    def close(self) -> None:
        """Destroy all events; nothing may be pending on one. If it is interrupted, call it again."""
        self.idle.clear()
        self._driver.destroy("cuEventDestroy", self._events)


class LaneStream:
    """A stream of a lane.

    Attributes:
        handle: the stream.
        places: how many places of the driver's queue the work on it takes.
        nbytes: payload bytes of that work, where they are bounded; else 0.
    """

    __slots__ = ("handle", "nbytes", "places")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.places = 0
        self.nbytes = 0


class Lane:
    """The streams of one direction: for copies, filled one after the other and round again, and one for kernels.

    A kernel has a stream of its own so that it runs at the same time as the copies of the same transfer.

    Attributes:
        streams: those for copies, then the one for kernels.
        tail: index of the stream for copies that was given work last. Work ends in the order in which it was queued, so
            the next stream round is the one that empties first.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._handles: list[int] = []
        self.streams: tuple[LaneStream, ...] = ()
        self.tail = 0

    def open(self, priority: int, kernel_priority: int) -> None:
        for each in (*[priority] * STREAMS_PER_LANE, kernel_priority):
            self._driver.create("cuStreamCreateWithPriority", self._handles, NON_BLOCKING, each)
        self.streams = tuple(LaneStream(int(handle)) for handle in self._handles)

    @property
    def in_use(self) -> int:
        return sum(stream.places > 0 for stream in self.streams)

    @property
    def nbytes(self) -> int:
        return sum([stream.nbytes for stream in self.streams])

    def close(self) -> None:
        """Destroy the streams; nothing may be queued on them. If it is interrupted, call it again."""
        self.streams = ()
        self._driver.destroy("cuStreamDestroy", self._handles)


def stream_handle(stream: Any, name: str) -> int:
    """Return the handle of a stream: an int, a cuda.bindings stream, or anything with `__cuda_stream__` (CuPy,
    cuda.core).

    0 means the legacy default stream and becomes its handle 1: the bindings may read 0 as the per-thread stream.
    Handle 2, the per-thread default stream, is the calling thread's.

    Raises:
        TypeError: nothing of the kind; the message names the argument.
    """
    given = stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        found = protocol() if callable(protocol) else protocol
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TypeError(
                f"{name}: __cuda_stream__ of {given!r:.80} must give (version, handle), got {found!r:.80}; pass the "
                "handle itself"
            )
        stream = found[1]
    elif type(stream).__name__ in ("CUstream", "cudaStream_t"):
        stream = int(stream)
    handle = index_or(stream, -1)
    if not 0 <= handle < 1 << 64:
        raise TypeError(f"{name} must be a stream handle (int) or an object with __cuda_stream__, got {given!r:.80}")
    return handle or LEGACY_STREAM


def refuse_capturing(driver: Driver, handle: int, name: str) -> None:
    """Raise TransferError while `handle` is being captured into a graph.

    Asked before an event is recorded there: waiting on a captured event would pull our own stream into the capture.
    """
    try:
        capturing = driver.stream_is_capturing(handle)
    except DriverError as error:
        raise_for_stream(error, handle, name)
    if capturing:
        raise TransferError(
            f"{name}={handle:#x} is being captured into a graph; transfers cannot be part of one: end the capture "
            "first, or pass a stream that is not captured (after=kvoffload.NO_WAIT waits for none)"
        )


def raise_for_stream(error: DriverError, handle: int, name: str) -> NoReturn:
    """Raise ValueError if a driver error about a caller's stream says that this context does not know it, else `error`.

    The message names the argument, `name`.
    """
    if error.code in _NOT_A_STREAM_HERE:
        remedy = "wait for it yourself and pass NO_WAIT, or " if name.startswith("after") else ""
        raise ValueError(
            f"{name}={handle:#x} is no stream of this device's context ({error.name}): {remedy}open the device with "
            "its context, open_device(context=...)"
        ) from error
    raise error


# the caller's own stream ----------------------------------------------------------------------------------------------


class Stream(Closing):
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
        """Return (0, `handle`): the protocol by which Python libraries for CUDA take each other's streams."""
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
        """Wait on the host until no work is left on the stream; what other threads queue meanwhile counts, too.

        Args:
            timeout: seconds, 0 to look once; None waits for as long as it takes.

        Raises:
            ClosedError: the stream or its device is closed, or this is a forked child.
            DriverError: the driver failed.
            TimeoutError: `timeout` seconds have passed; the work goes on.
            ValueError: `timeout` is no number.
        """
        wait_until(lambda: self.done, timeout, repr(self))

    def close(self) -> None:
        """Wait on the host until all work queued on the stream has ended, without limit, and destroy the stream.

        Idempotent; if it is interrupted or raises, call it again. Does nothing in a forked child, after the device is
        closed, or if the CUDA context is lost.

        Raises:
            DriverError: the driver failed for another reason than a lost context.
        """
        if not self._resource.alive or self.device.foreign:
            return
        try:
            self.synchronize()
            self._resource.free()
        except DriverError as error:
            if not error.sticky:
                raise
            self._resource.drop()

    def __repr__(self) -> str:
        state = "" if self._resource.alive else ", destroyed"
        return f"Stream({self._handle:#x}, device {self.device.index}{state})"

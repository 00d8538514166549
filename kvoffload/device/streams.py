"""The streams of a lane, pools of events, and streams of other programs.

How much can be queued. Measured on driver 580 (CUDA 13.0): for each direction a context has 4 hardware queues of 1022
places, which all its streams share (with CUDA_DEVICE_MAX_CONNECTIONS at its default); when they are full, submission
blocks until the GPU has made progress, however long that takes. A cuMemcpyAsync takes a place, so does every operation
of a strided batch and every record of a timing event; about 23 copies of a flat batch take one; waits and records of
plain events take none. Making a stream can block behind queued work as well. So a lane makes its streams at once, fills
each to `QUEUE_LIMIT`, and has no room when they are full.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any, Final

from kvoffload.driver import Driver
from kvoffload.driver.core import LEGACY_STREAM
from kvoffload.errors import CapacityError, DriverError, TransferError
from kvoffload.internal.teardown import run_all

STREAMS_PER_LANE = 4  # for copies
QUEUE_LIMIT = 768
PIECE_LIMIT = 380  # operations of a transfer that are queued together: two such pieces and their events fill a stream
EVENT_COST = 2  # places that a piece's timing events may take


class _NoWait:
    def __repr__(self) -> str:
        return "NO_WAIT"


NO_WAIT: Final = _NoWait()  # after=NO_WAIT: the transfer waits for no stream of the caller's


class EventPool:
    """Events that nothing is pending on, up to `limit` made in all."""

    def __init__(self, driver: Driver, limit: int, *, timing: bool) -> None:
        self._driver = driver
        self._limit = limit
        self._timing = timing
        self._idle: list[int] = []
        self.created = 0

    @property
    def in_use(self) -> int:
        return self.created - len(self._idle)

    def acquire(self) -> int:
        """An idle event.

        Raises:
            CapacityError: all of them are out.
        """
        if self._idle:
            return self._idle.pop()
        if self.created >= self._limit:
            raise CapacityError(f"all {self._limit} events are in use; poll() the engine so that transfers can retire")
        event = self._driver.event_create(timing=self._timing)
        self.created += 1
        return event

    def release(self, event: int) -> None:
        """Give back an event whose record nobody will query, or have a stream wait for, any more."""
        self._idle.append(event)

    def close(self) -> None:
        """Destroy the idle events."""
        idle, self._idle = self._idle, []
        self.created -= len(idle)
        run_all(partial(self._driver.event_destroy, event) for event in idle)


class LaneStream:
    """A stream and how many places of the driver's queue its work takes."""

    __slots__ = ("handle", "queued")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.queued = 0


class Lane:
    """The streams of one direction: for copies, filled one after the other and round again, and one for kernels.

    A kernel has a stream of its own so that it runs beside the copies of the same transfer.
    """

    def __init__(self, driver: Driver, priority: int) -> None:
        self._driver = driver
        self.streams: list[LaneStream] = []
        try:
            for _ in range(STREAMS_PER_LANE + 1):
                self.streams.append(LaneStream(driver.stream_create(priority)))
        except BaseException:
            self.close()
            raise
        self._tail = 0

    @property
    def in_use(self) -> int:
        """Streams with work on them."""
        return sum(stream.queued > 0 for stream in self.streams)

    def take(self, places: int, *, kernel: bool = False) -> LaneStream | None:
        """The stream for the lane's next work, with so many more places counted as taken; None if there is no room.

        Work ends in the order in which it was queued, so the next stream round is the one that drains first.
        """
        if kernel:
            return self._take_at(STREAMS_PER_LANE, places)
        for position in (self._tail, (self._tail + 1) % STREAMS_PER_LANE):
            stream = self._take_at(position, places)
            if stream is not None:
                self._tail = position
                return stream
        return None

    def _take_at(self, position: int, places: int) -> LaneStream | None:
        stream = self.streams[position]
        if stream.queued + places > QUEUE_LIMIT:
            return None
        stream.queued += places
        return stream

    def clear(self) -> None:
        """Nothing is queued on any stream: forget places that an interrupt may have left counted."""
        for stream in self.streams:
            stream.queued = 0

    def close(self) -> None:
        """Destroy the streams; nothing may be queued on them."""
        streams, self.streams = self.streams, []
        run_all(partial(self._driver.stream_destroy, stream.handle) for stream in streams)


def stream_handle(stream: Any, name: str) -> int:
    """The handle of a stream: an int, a cuda.bindings stream, or anything with `__cuda_stream__` (CuPy, cuda.core).

    0 means the legacy default stream and becomes its handle 1: the bindings may read 0 as the per-thread stream.
    Handle 2, the per-thread default stream, is the calling thread's.

    Raises:
        TypeError: nothing of the kind; the message names the argument.
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        stream = protocol()[1] if callable(protocol) else protocol[1]
    elif type(stream).__name__ in ("CUstream", "cudaStream_t"):
        stream = int(stream)
    try:
        handle = operator.index(stream)
    except TypeError:
        handle = -1
    if isinstance(stream, bool) or handle < 0:
        raise TypeError(f"{name} must be a stream handle (int) or an object with __cuda_stream__, got {stream!r}")
    return handle or LEGACY_STREAM


def refuse_capturing(driver: Driver, handle: int, name: str) -> None:
    """Raise TransferError while `handle` is being captured into a graph.

    Asked before an event is recorded there: waiting on a captured event would pull our own stream into the capture.
    """
    try:
        capturing = driver.stream_is_capturing(handle)
    except DriverError as error:
        if error.name != "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT":
            raise
        capturing = True  # the legacy stream, while some stream of the context captures
    if capturing:
        raise TransferError(
            f"{name}={handle:#x} is being captured into a graph; transfers cannot be part of one: end the capture "
            "first, or pass a stream that is not captured (after=kvoffload.NO_WAIT waits for none)"
        )

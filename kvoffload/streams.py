"""Pools of streams and events, lanes that keep transfers of one direction in order, and streams of other programs.

A driver queue holds about 1022 operations; when it is full, submission blocks until the GPU has made progress (2 us
become as long as it takes). Measured on driver 580: every operation of a strided batch takes a place, so does every
cuMemcpyAsync; flat batches take one for about 23 copies; event records none. Lanes therefore count what they queue,
fill a stream to `QUEUE_LIMIT`, and go on with another one behind an event.
"""

from __future__ import annotations

import operator
from collections import deque
from functools import partial
from typing import Any, Final

from kvoffload.driver import Driver
from kvoffload.driver.core import LEGACY_STREAM
from kvoffload.errors import CapacityError, DriverError, TransferError
from kvoffload.teardown import run_all

QUEUE_LIMIT = 768
PIECE_LIMIT = 380  # operations of a transfer that are queued together: two such pieces and their waits fill a stream
MAX_STREAMS = 256  # 0.4 MiB of GPU memory and 20 us each, made when first needed
LONGEST_TRANSFER = MAX_STREAMS * QUEUE_LIMIT // 2  # queue places; the other direction needs streams, too
WAIT_COST = 4  # queue places set aside for a transfer's waits


class _NoWait:
    def __repr__(self) -> str:
        return "NO_WAIT"


NO_WAIT: Final = _NoWait()  # after=NO_WAIT: the transfer waits for no stream of the caller's


class PooledStream:
    """A stream of a pool and how many operations queue on it, counted by the lane that uses it."""

    __slots__ = ("handle", "queued")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.queued = 0


class StreamPool:
    """Streams that are idle, up to `limit` made in all."""

    def __init__(self, driver: Driver, limit: int, priority: int) -> None:
        self._driver = driver
        self._limit = limit
        self._priority = priority
        self._idle: list[PooledStream] = []
        self.created = 0

    @property
    def in_use(self) -> int:
        return self.created - len(self._idle)

    def acquire(self) -> PooledStream | None:
        """An idle stream, or None when all of them are out."""
        if self._idle:
            return self._idle.pop()
        if self.created >= self._limit:
            return None
        stream = PooledStream(self._driver.stream_create(self._priority))
        self.created += 1
        return stream

    def release(self, stream: PooledStream) -> None:
        """Give back a stream on which everything has ended."""
        assert stream.queued == 0
        self._idle.append(stream)

    def close(self) -> None:
        """Destroy the idle streams."""
        idle, self._idle = self._idle, []
        self.created -= len(idle)
        run_all(partial(self._driver.stream_destroy, stream.handle) for stream in idle)


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
        """Give back an event that has completed or was never recorded."""
        self._idle.append(event)

    def close(self) -> None:
        """Destroy the idle events."""
        idle, self._idle = self._idle, []
        self.created -= len(idle)
        run_all(partial(self._driver.event_destroy, event) for event in idle)


class Lane:
    """The streams of one direction, in the order in which work was queued on them."""

    def __init__(self, pool: StreamPool) -> None:
        self._pool = pool
        self._streams: deque[PooledStream] = deque()  # the last one is being filled

    @property
    def tail(self) -> PooledStream | None:
        """The stream that holds the lane's latest work, or None while the lane holds none."""
        return self._streams[-1] if self._streams else None

    def take(self, operations: int) -> PooledStream:
        """A stream with room for `operations` more, counted as queued; it becomes the tail.

        Raises:
            CapacityError: every stream is full. Nothing has changed.
        """
        tail = self.tail
        if tail is not None and tail.queued + operations <= QUEUE_LIMIT:
            stream = tail
        else:
            stream = self._pool.acquire() or self._share(operations)
            if stream in self._streams:
                self._streams.remove(stream)
            self._streams.append(stream)
        stream.queued += operations
        return stream

    def _share(self, operations: int) -> PooledStream:
        """A stream of this lane that has drained far enough, for when the pool is empty."""
        for stream in self._streams:
            if stream.queued + operations <= QUEUE_LIMIT:
                return stream
        queued = sum(stream.queued for stream in self._streams)
        raise CapacityError(
            f"{queued} operations are queued in this direction and every stream is full; poll() the engine until some "
            "have ended"
        )

    def give_back(self, stream: PooledStream, operations: int) -> None:
        """`operations` on `stream` have ended. An empty stream goes back to the pool."""
        stream.queued -= operations
        if stream.queued == 0:
            self._streams.remove(stream)
            self._pool.release(stream)

    def abandon(self) -> None:
        """Forget streams whose context is lost."""
        self._streams.clear()


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

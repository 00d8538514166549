"""Contexts, streams, events and graph captures, the tables of their handles, and what every operation in a stream's
queue has. They are in one file because they refer to each other; `operations.py` has the operations.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, NoReturn, TypeVar

from cuda.bindings import driver as cuda

from kvoffload.simulator.errors import INVALID_HANDLE, RefusedError
from kvoffload.simulator.memory import Region

LEGACY = 1  # CU_STREAM_LEGACY; the handle 0 means the same
PER_THREAD = 2  # CU_STREAM_PER_THREAD
INVALIDATED = cuda.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
UNSUPPORTED = cuda.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
MICROSECONDS_PER_MARKER = 0.25  # of the simulated clock, see operations.py

_MODE = cuda.CUstreamCaptureMode
GLOBAL = _MODE.CU_STREAM_CAPTURE_MODE_GLOBAL
RELAXED = _MODE.CU_STREAM_CAPTURE_MODE_RELAXED

UNSAFE = frozenset(  # what CUDA calls "potentially unsafe API calls", of those that there are here
    [
        *("cuEventQuery", "cuEventSynchronize", "cuStreamQuery", "cuStreamSynchronize"),
        *("cuMemAlloc", "cuMemFree", "cuMemHostAlloc", "cuMemHostRegister", "cuMemHostUnregister"),
        "cuModuleUnload",
    ]
)


Item = TypeVar("Item")


class HandleTable(Generic[Item]):
    """Live objects by handle. Handles are never used twice, so a stale one is recognised."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._next = first
        self._live: dict[int, Item] = {}

    def add(self, make: Callable[..., Item], *fields: Any) -> Item:
        """Make an object of a new handle and these fields, and keep it."""
        self._next += 16
        item = self._live[self._next] = make(self._next, *fields)
        return item

    def get(self, handle: int, otherwise: Any = INVALID_HANDLE) -> Item:
        """Return the object of a handle. RefusedError with the status `otherwise` if there is none."""
        try:
            return self._live[handle]
        except KeyError:
            raise RefusedError(otherwise) from None

    def is_stale(self, handle: int) -> bool:
        return self._first < handle <= self._next and handle % 16 == 0 and handle not in self._live

    def remove(self, handle: int) -> None:
        self._live.pop(handle, None)

    def __len__(self) -> int:
        return len(self._live)

    def values(self) -> list[Item]:
        return list(self._live.values())


class StreamState(Enum):
    IDLE = "idle"  # nothing queued
    RUNNABLE = "runnable"
    BLOCKED = "blocked"  # its first operation waits for another stream
    GATED = "gated"  # its first operation waits for a word in memory


@dataclass(slots=True, eq=False)
class Operation:
    """An entry of a stream's queue. It runs once all `dependencies`, (stream, operation number) pairs, are done.

    It takes `places` of the queue's depth, as measured on driver 580 with CUDA 13.0: waits and records of plain events
    none, records of timing events one, every operation of a strided batch one, about 23 copies of a flat batch one.
    (There, all streams of a context share four queues per direction; here, each stream has its own.)
    """

    regions: Sequence[Region]
    places: int = field(default=1, kw_only=True)
    dependencies: list[tuple[Stream, int]] = field(default_factory=list, init=False)

    def open(self) -> bool:
        return True

    def run(self) -> float:
        """Do the work. Returns the microseconds that it took."""
        return MICROSECONDS_PER_MARKER

    def end(self) -> None:
        """Note that the operation has left its queue, whether it ran or was dropped."""


@dataclass(slots=True, eq=False)
class Stream:
    """A queue of operations. Operation number n is done when `completed >= n`; numbers start at 1."""

    handle: int
    context: Context
    blocking: bool  # synchronises with the legacy default stream
    destroyed: bool = False
    queue: deque[Operation] = field(default_factory=deque)
    occupied: int = 0  # places of the queue's depth
    submitted: int = 0
    completed: int = 0
    waiters: list[tuple[int, Stream]] = field(default_factory=list)
    state: StreamState = StreamState.IDLE
    position: int = -1  # in the scheduler's list of runnable streams
    capture: Capture | None = None

    def refuse_implicit_capture(self, *, asking: bool = False) -> None:
        """Refuse a call on the legacy stream that would wait for a captured one. That ends the capture, unless the call
        is `asking` about it.
        """
        for other in self.context.blocking() if self is self.context.legacy else ():
            if other.capture is not None:
                other.capture.invalidated |= not asking
                raise RefusedError(cuda.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)

    def __repr__(self) -> str:
        name = {LEGACY: "legacy", PER_THREAD: "per-thread"}.get(self.handle, hex(self.handle))
        return f"<stream {name} {self.state.value} queued={len(self.queue)}>"


class Capture:
    """One graph capture: the stream it began on, and the streams that joined it by waiting for its events."""

    def __init__(self, origin: Stream, mode: Any) -> None:
        self.origin = origin
        self.mode = mode
        self.thread = threading.get_ident()
        self.streams = [origin]
        self.unjoined: set[Stream] = set()  # joined it, and not yet waited for by another of the capture's streams
        self.invalidated = False

    def check(self) -> None:
        """Raise RefusedError if it is invalidated: its streams and events are of no use until it is ended."""
        if self.invalidated:
            raise RefusedError(INVALIDATED)

    def refuse(self, status: Any) -> NoReturn:
        """Fail a call that a capture cannot contain, and invalidate the capture."""
        self.invalidated = True
        raise RefusedError(status)


class Captures:
    """The captures of one driver, and every thread's capture mode. Used under the driver's lock."""

    def __init__(self) -> None:
        self._under_way: list[Capture] = []
        self._local = threading.local()

    def begin(self, stream: Stream, mode: Any) -> None:
        stream.capture = Capture(stream, _MODE(int(mode)))
        self._under_way.append(stream.capture)

    def end(self, capture: Capture) -> None:
        self._under_way.remove(capture)
        for stream in capture.streams:
            stream.capture = None

    def exchange_mode(self, mode: Any) -> Any:
        before = getattr(self._local, "mode", GLOBAL)
        self._local.mode = _MODE(int(mode))
        return before

    def refuse_unsafe(self, name: str) -> None:
        """Fail a call that the captures under way forbid to the calling thread, and invalidate those captures."""
        if not self._under_way or name not in UNSAFE:
            return
        mode, forbidden = getattr(self._local, "mode", GLOBAL), False
        self._under_way = [capture for capture in self._under_way if not capture.origin.destroyed]
        for capture in self._under_way:
            ours = capture.thread == threading.get_ident() or (mode == GLOBAL and capture.mode == GLOBAL)
            if ours and RELAXED not in (mode, capture.mode):
                capture.invalidated = forbidden = True
        if forbidden:
            raise RefusedError(UNSUPPORTED)


@dataclass(slots=True, eq=False)
class Record:
    """What an event holds after one cuEventRecord: a position in a stream, and the time when it was reached."""

    stream: Stream
    capture: Capture | None
    serial: int = 1 << 62
    microseconds: float = 0.0

    @property
    def done(self) -> bool:
        return self.stream.completed >= self.serial


@dataclass(slots=True, eq=False)
class Event:
    handle: int
    context: Context
    timing: bool
    record: Record | None = None


class Context:
    """A context: what belongs to it dies with it.

    `error` is the sticky error that every call in it returns once its work has faulted.
    """

    def __init__(self, handle: int, device: int, primary: bool) -> None:
        self.handle = handle
        self.device = device
        self.primary = primary
        self.retain_count = 0
        self.alive = True
        self.error: Any = None
        self.legacy = Stream(LEGACY, self, blocking=False)
        self.streams: dict[Stream, None] = {}  # all others, also those destroyed with work left
        self._per_thread: dict[int, Stream] = {}

    def per_thread(self) -> Stream:
        thread = threading.get_ident()
        stream = self._per_thread.get(thread)
        if stream is None:
            stream = self._per_thread[thread] = Stream(PER_THREAD, self, blocking=True)
            self.streams[stream] = None
        return stream

    def blocking(self) -> list[Stream]:
        """Return the streams that synchronise with `legacy`."""
        return [stream for stream in self.streams if stream.blocking]

    def all_streams(self) -> list[Stream]:
        return [*self.streams, self.legacy]

"""Contexts, streams and events: plain state, with the handle tables that give them their numbers."""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from cuda.bindings import driver as cuda

from kvoffload.simulator.errors import RefusedError

if TYPE_CHECKING:
    from kvoffload.simulator.capture import Capture
    from kvoffload.simulator.operations import Operation

LEGACY = 1  # CU_STREAM_LEGACY; the handle 0 means the same
PER_THREAD = 2  # CU_STREAM_PER_THREAD
INVALID_HANDLE = cuda.CUresult.CUDA_ERROR_INVALID_HANDLE


class StreamState(Enum):
    IDLE = "idle"  # nothing queued
    RUNNABLE = "runnable"
    BLOCKED = "blocked"  # its first operation waits for another stream
    GATED = "gated"  # its first operation waits for a word in memory


class Stream:
    """A queue of operations. Operation number n is done when `completed >= n`; numbers start at 1."""

    __slots__ = (
        "blocking",
        "capture",
        "completed",
        "context",
        "destroyed",
        "handle",
        "occupied",
        "position",
        "queue",
        "state",
        "submitted",
        "waiters",
    )  # fmt: skip

    def __init__(self, handle: int, context: Context, blocking: bool) -> None:
        self.handle = handle
        self.context = context
        self.blocking = blocking  # synchronises with the legacy default stream
        self.destroyed = False
        self.queue: deque[Operation] = deque()
        self.occupied = 0  # places of the queue's depth
        self.submitted = 0
        self.completed = 0
        self.waiters: list[tuple[int, Stream]] = []
        self.state = StreamState.IDLE
        self.position = -1  # in the scheduler's list of runnable streams
        self.capture: Capture | None = None

    def __repr__(self) -> str:
        name = {LEGACY: "legacy", PER_THREAD: "per-thread"}.get(self.handle, hex(self.handle))
        return f"<stream {name} {self.state.value} queued={len(self.queue)}>"


class Record:
    """What an event holds after one cuEventRecord: a position in a stream, and the time when it was reached."""

    __slots__ = ("capture", "microseconds", "serial", "stream")

    def __init__(self, stream: Stream, capture: Capture | None = None) -> None:
        self.stream = stream
        self.serial = 1 << 62
        self.microseconds = 0.0
        self.capture = capture

    @property
    def done(self) -> bool:
        return self.stream.completed >= self.serial


class Event:
    __slots__ = ("context", "destroyed", "handle", "record", "timing")

    def __init__(self, handle: int, context: Context, timing: bool) -> None:
        self.handle = handle
        self.context = context
        self.timing = timing
        self.record: Record | None = None
        self.destroyed = False


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
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.legacy = Stream(LEGACY, self, blocking=False)
        self.blocking: dict[int, Stream] = {}  # the streams that synchronise with `legacy`, by id()
        self.draining: dict[int, Stream] = {}  # destroyed with work left, by id()
        self._per_thread: dict[int, Stream] = {}

    def per_thread(self) -> Stream:
        """The calling thread's default stream."""
        thread = threading.get_ident()
        stream = self._per_thread.get(thread)
        if stream is None:
            stream = self._per_thread[thread] = Stream(PER_THREAD, self, blocking=True)
            self.blocking[id(stream)] = stream
        return stream

    def all_streams(self) -> list[Stream]:
        """Every stream that may have work."""
        known = [*self.streams.values(), *self.blocking.values(), *self.draining.values(), self.legacy]
        return list(dict.fromkeys(known))

    def destroy(self, stream: Stream) -> None:
        """Take a stream's handle away; the stream itself goes once its work is done."""
        stream.destroyed = True
        self.streams.pop(stream.handle, None)
        if stream.queue:
            self.draining[id(stream)] = stream
        else:
            self.remove(stream)

    def remove(self, stream: Stream) -> None:
        self.blocking.pop(id(stream), None)
        self.draining.pop(id(stream), None)


class _HasHandle(Protocol):
    handle: int


Item = TypeVar("Item", bound=_HasHandle)


class HandleTable(Generic[Item]):
    """Live objects by handle. Handles are never used twice, so a stale one is recognised."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._next = first
        self._live: dict[int, Item] = {}

    def new_handle(self) -> int:
        self._next += 16
        return self._next

    def add(self, item: Item) -> None:
        self._live[item.handle] = item

    def get(self, handle: int) -> Item:
        """The live object; raises RefusedError with INVALID_HANDLE."""
        try:
            return self._live[handle]
        except KeyError:
            raise RefusedError(INVALID_HANDLE) from None

    def is_stale(self, handle: int) -> bool:
        """Whether this was a handle of ours whose object is destroyed."""
        return self._first < handle <= self._next and handle % 16 == 0 and handle not in self._live

    def remove(self, handle: int) -> None:
        self._live.pop(handle, None)

    def __len__(self) -> int:
        return len(self._live)

    def values(self) -> list[Item]:
        return list(self._live.values())

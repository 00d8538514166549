"""The streams and arrays that a transfer follows.

Some libraries do not show their streams (JAX), but every array with DLPack can make our stream wait for its producer:
`array.__dlpack__(stream=...)`. Such a *wait stream* only waits, and a transfer follows it like a caller's stream. Each
use has its own wait stream, if there are not too many: a transfer waits for its own producers, and for those of the
transfers that it follows.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from kvoffload.device.streams import NO_WAIT, NoWait, refuse_capturing, stream_handle
from kvoffload.driver import Driver
from kvoffload.driver.core import DISABLE_TIMING, LEGACY_STREAM, NON_BLOCKING
from kvoffload.errors import CapacityError, ClosedError
from kvoffload.internal.nesting import new_lock, refuse_nested
from kvoffload.internal.types import GpuArray, StreamLike
from kvoffload.layout.dlpack import CPU, CUDA_HOST

MOST_WAIT_STREAMS = 64
WAIT_SECONDS = 1.0  # how long a transfer waits on the host for a wait stream


class Array:
    """An array to follow, and its name for messages."""

    def __init__(self, given: Any, name: str) -> None:
        self.given = given
        self.name = name


Source = int | Array  # a stream handle, or an array


class Followed:
    """Handles of streams to follow. While this object exists, its wait stream is reserved."""

    __slots__ = ("__weakref__", "streams")

    def __init__(self, streams: tuple[int, ...]) -> None:
        self.streams = streams


After: TypeAlias = StreamLike | GpuArray | Sequence[StreamLike | GpuArray] | NoWait | Followed | None
"""The argument `after` of a transfer. A sequence must be a list or a tuple."""


@runtime_checkable
class FollowedPerDevice(Protocol):
    """An object with an `after` value for each device, such as `kvoffload.jax.OwnedCache`."""

    def after(self) -> Sequence[After]:
        """Return a list or tuple with the `after` value of each device, in their order.

        A submission calls it without the engine's lock. If it raises, nothing is submitted.
        """


ShardedAfter: TypeAlias = Sequence[After] | FollowedPerDevice | NoWait | None
"""A list or tuple with one value for each device, an object that has it, or None or NO_WAIT for all devices."""


def as_sources(after: After) -> tuple[Source, ...]:
    """Return the streams and arrays in `after`. None is the legacy default stream; NO_WAIT gives an empty tuple.

    Raises:
        TypeError: something else is in it.
        ValueError: an array was deleted.
    """
    if after is None:
        return (LEGACY_STREAM,)
    if after is NO_WAIT:
        return ()
    if isinstance(after, list | tuple):
        return tuple(_as_source(each, f"after[{index}]") for index, each in enumerate(after))
    return (_as_source(after, "after"),)


def _as_source(given: Any, name: str) -> Source:
    if hasattr(given, "__cuda_stream__"):
        return stream_handle(given, name)
    is_array = hasattr(given, "__dlpack__")
    try:
        is_array = is_array or hasattr(given, "__cuda_array_interface__")
    except Exception:  # noqa: BLE001  # PyTorch raises RuntimeError for tensors that need a gradient
        pass
    if is_array:
        if hasattr(given, "is_deleted") and given.is_deleted():  # JAX's
            raise ValueError(f"{name} was deleted, or donated to a computation: pass the array that took its place")
        return Array(given, name)
    if given is None or given is NO_WAIT:
        raise TypeError(f"{name} must be a stream or an array, got {given!r}; leave it out of the list")
    return stream_handle(given, name)


class WaitStreams:
    """A pool of wait streams. The device's context must be current in all methods.

    `follow` calls methods of the caller's arrays: hold no lock that these may want.
    """

    def __init__(self, driver: Driver, priority: int) -> None:
        self._driver = driver
        self._priority = priority
        self._lock = new_lock()  # of the lists below
        self._handles: list[int] = []
        self._users: dict[int, weakref.ref[Followed]] = {}
        self._event: list[int] = []  # one, once a stream has been followed
        self._exported: list[int] = []  # one, once it was asked for
        self._closed = False

    def __len__(self) -> int:
        return len(self._handles) + len(self._exported)

    def follow(self, sources: tuple[Source, ...]) -> Followed:
        """Return the given streams, and one wait stream for all arrays. If all wait streams are busy, the host waits
        for one.

        Raises:
            TypeError: an array is in host memory (on a simulated device: is not).
            TransferError: a stream is being captured.
            RuntimeError: it was called inside another call of it in the same thread.
            CapacityError: for a second, 64 other transfers followed arrays that were still being computed.
            Whatever an array raises when it is asked for its producer.
        """
        streams = [source for source in sources if isinstance(source, int)]
        arrays = [source for source in sources if isinstance(source, Array)]
        if not arrays:
            return Followed(tuple(streams))
        refuse_nested(self._lock, "a transfer after an array")
        followed = Followed(())
        wait_stream = self._reserve(followed)
        for array in arrays:
            given, name = array.given, array.name
            # 1. Without DLPack: the array names a stream, or none if there is nothing to wait for.
            if not hasattr(given, "__dlpack__"):
                stream = given.__cuda_array_interface__.get("stream")
                if stream:
                    handle = stream_handle(stream, name)
                    refuse_capturing(self._driver, handle, name)
                    with self._lock:  # between record and wait no other thread may record the event again
                        if not self._event:
                            self._driver.create("cuEventCreate", self._event, DISABLE_TIMING)
                        self._driver.event_record(int(self._event[0]), handle)
                        self._driver.stream_wait_event(wait_stream, int(self._event[0]))
                continue
            kind = int(given.__dlpack_device__()[0])
            if (kind in (CPU, CUDA_HOST)) is not self._driver.simulated:
                where = "host memory" if kind in (CPU, CUDA_HOST) else "a GPU's memory, but the device is simulated"
                raise TypeError(f"{name}: the {type(given).__name__} given is in {where}, where no stream produces it")
            if self._driver.simulated:  # 2. A host array returns when the bytes are there.
                given.__dlpack__()
            else:  # 3. An array on the GPU makes the stream wait.
                given.__dlpack__(stream=wait_stream)
        followed.streams = (*streams, wait_stream)
        return followed

    def exported(self) -> int:
        """Return the export stream, see `Shard.wait_stream`."""
        refuse_nested(self._lock, "wait_stream")
        with self._lock:
            if self._closed:
                raise ClosedError("the engine was closed while its memory was exported; export it again")
            if not self._exported:
                self._driver.create("cuStreamCreateWithPriority", self._exported, NON_BLOCKING, self._priority)
            return int(self._exported[0])

    def _reserve(self, user: Followed) -> int:
        """Return an idle wait stream, reserved until `user` is garbage."""
        begin = time.perf_counter()
        while True:
            with self._lock:
                free = (each for each in map(int, self._handles) if not self._users.get(each, bool)())
                handle = next(filter(self._driver.stream_query, free), 0)
                if not handle and len(self._handles) < MOST_WAIT_STREAMS:
                    self._driver.create("cuStreamCreateWithPriority", self._handles, NON_BLOCKING, self._priority)
                    handle = int(self._handles[-1])
                elif (
                    not handle
                ):  # reserved for loads that wait for tiers on the host: one of them then waits for it, too
                    handle = next(filter(self._driver.stream_query, map(int, self._handles)), 0)
                if handle:
                    self._users[handle] = weakref.ref(user)
                    return handle
            if time.perf_counter() - begin > WAIT_SECONDS:
                raise CapacityError(
                    f"{MOST_WAIT_STREAMS} transfers follow arrays that are not computed yet: wait until some are, or "
                    "pass the streams that compute them"
                )
            time.sleep(1e-4)

    def close(self) -> None:
        """Destroy the streams; nothing may wait on them. If it is interrupted, call it again."""
        refuse_nested(self._lock, "close")
        self._closed = True
        self._users.clear()
        self._driver.destroy("cuStreamDestroy", self._handles)
        self._driver.destroy("cuStreamDestroy", self._exported)
        self._driver.destroy("cuEventDestroy", self._event)

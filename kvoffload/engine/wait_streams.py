"""What a transfer is to follow: streams, and arrays whose producer is asked for.

Some libraries do not show their streams (JAX), but every array that speaks DLPack can make a stream of ours wait for
what computes it: `array.__dlpack__(stream=...)`. Such a stream is a *wait stream*: it waits, and a transfer follows it
as it would follow a stream of the caller's. Each use has a wait stream of its own, on which nothing else waits:
transfers that have nothing to do with each other never wait for each other's producers.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from kvoffload.device.streams import NO_WAIT, NoWait, refuse_capturing, stream_handle
from kvoffload.driver import Driver
from kvoffload.driver.core import DISABLE_TIMING, LEGACY_STREAM, NON_BLOCKING
from kvoffload.errors import CapacityError, ClosedError
from kvoffload.internal.nesting import refuse_nested
from kvoffload.internal.types import GpuArray, StreamLike
from kvoffload.layout.dlpack import CPU, CUDA_HOST

MOST_WAIT_STREAMS = 64
WAIT_SECONDS = 1.0  # how long a transfer waits on the host for a wait stream


class Array:
    """An array that a transfer is to follow, as it was given."""

    def __init__(self, given: Any, name: str) -> None:
        self.given = given
        self.name = name


Source = int | Array  # a stream handle, or an array


class Followed:
    """Streams that stand for all that a transfer is to follow. While it is referred to, its wait stream is reserved.

    Attributes:
        streams: handles.
    """

    __slots__ = ("__weakref__", "streams")

    def __init__(self, streams: tuple[int, ...]) -> None:
        self.streams = streams


After: TypeAlias = StreamLike | GpuArray | Sequence[StreamLike | GpuArray] | NoWait | Followed | None
"""What a transfer is to follow. A sequence must be a list or a tuple."""


@runtime_checkable
class FollowedPerDevice(Protocol):
    """An object that knows what is to be followed on each device, such as `kvoffload.jax.OwnedCache`."""

    def after(self) -> Sequence[After]:
        """A list or tuple with what a transfer is to follow on each device, in the order of the devices.

        Called when a transfer is submitted, without the engine's lock. What it raises leaves nothing in flight.
        """


ShardedAfter: TypeAlias = Sequence[After] | FollowedPerDevice | NoWait | None
"""A list or tuple with one value for each device, an object that has it, or the same for all devices."""


def as_sources(after: After) -> tuple[Source, ...]:
    """What `after` names: a stream, an array, or a list or tuple of these; nothing for NO_WAIT.

    None is the legacy default stream.

    Raises:
        TypeError: something that is neither.
        ValueError: an array that was deleted.
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
    if hasattr(given, "__dlpack__") or _has_cuda_array_interface(given):
        if hasattr(given, "is_deleted") and given.is_deleted():  # JAX's
            raise ValueError(f"{name} was deleted, or donated to a computation: pass the array that took its place")
        return Array(given, name)
    if given is None or given is NO_WAIT:
        raise TypeError(f"{name} must be a stream or an array, got {given!r}; leave it out of the list")
    return stream_handle(given, name)


def _has_cuda_array_interface(given: Any) -> bool:
    try:
        return hasattr(given, "__cuda_array_interface__")
    except Exception:  # noqa: BLE001  # PyTorch raises RuntimeError for tensors that need a gradient
        return False


class WaitStreams:
    """A pool of streams that wait for what has no stream handle.

    `follow` calls methods of the arrays given, so it must not be called under a lock that these may want. The device's
    context must be current in all methods.

    Args:
        driver: the driver.
        priority: of the streams.
    """

    def __init__(self, driver: Driver, priority: int) -> None:
        self._driver = driver
        self._priority = priority
        self._lock = threading.RLock()  # of the lists below
        self._handles: list[int] = []
        self._users: dict[int, weakref.ref[Followed]] = {}
        self._event: list[int] = []  # one, once a stream has been followed
        self._exported: list[int] = []  # one, once it was asked for
        self._closed = False

    def __len__(self) -> int:
        return len(self._handles) + len(self._exported)

    def follow(self, sources: tuple[Source, ...]) -> Followed:
        """Streams that stand for all sources: those given, and a wait stream for the arrays.

        The host waits up to a second if all wait streams are busy, and not otherwise.

        Raises:
            TypeError: an array in host memory (on a simulated device: one that is not).
            TransferError: a stream is being captured.
            RuntimeError: it is called in the middle of another call of it in the same thread.
            CapacityError: 64 other transfers follow arrays that are still being computed.
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
            self._follow_array(wait_stream, array)
        followed.streams = (*streams, wait_stream)
        return followed

    def exported(self) -> int:
        """A stream for importers of our memory to wait for. It is made to wait for transfers, and for nothing else."""
        refuse_nested(self._lock, "wait_stream")
        with self._lock:
            if self._closed:
                raise ClosedError("the engine was closed while its memory was exported; export it again")
            if not self._exported:
                self._driver.create("cuStreamCreateWithPriority", self._exported, NON_BLOCKING, self._priority)
            return int(self._exported[0])

    def _reserve(self, user: Followed) -> int:
        """A stream that nothing waits on; reserved until `user` is garbage."""
        begin = time.perf_counter()
        while True:
            with self._lock:
                for handle in map(int, self._handles):
                    last = self._users.get(handle)
                    if (last is None or last() is None) and self._driver.stream_query(handle):
                        break
                else:
                    handle = 0
                    if len(self._handles) < MOST_WAIT_STREAMS:
                        self._driver.create("cuStreamCreateWithPriority", self._handles, NON_BLOCKING, self._priority)
                        handle = int(self._handles[-1])
                if handle:
                    self._users[handle] = weakref.ref(user)
                    return handle
            if time.perf_counter() - begin > WAIT_SECONDS:
                raise CapacityError(
                    f"{MOST_WAIT_STREAMS} transfers follow arrays that are not computed yet: wait until some are, or "
                    "pass the streams that compute them"
                )
            time.sleep(1e-4)

    def _follow_array(self, wait_stream: int, array: Array) -> None:
        """Have `wait_stream` wait for what computes an array."""
        given, name = array.given, array.name
        if not hasattr(given, "__dlpack__"):
            stream = given.__cuda_array_interface__.get("stream")
            if not stream:  # its owner says that there is nothing to wait for
                return
            handle = stream_handle(stream, name)
            refuse_capturing(self._driver, handle, name)
            with self._lock:  # between record and wait no other thread may record the event again
                if not self._event:
                    self._driver.create("cuEventCreate", self._event, DISABLE_TIMING)
                self._driver.event_record(int(self._event[0]), handle)
                self._driver.stream_wait_event(wait_stream, int(self._event[0]))
            return
        kind = int(given.__dlpack_device__()[0])
        if (kind in (CPU, CUDA_HOST)) is not self._driver.simulated:
            where = "host memory" if kind in (CPU, CUDA_HOST) else "a GPU's memory, but the device is simulated"
            raise TypeError(f"{name}: the {type(given).__name__} given is in {where}, where no stream produces it")
        if self._driver.simulated:
            given.__dlpack__()  # host arrays: returns when the bytes are there
        else:
            given.__dlpack__(stream=wait_stream)

    def close(self) -> None:
        """Destroy the streams; nothing may wait on them. If it is interrupted, call it again."""
        refuse_nested(self._lock, "close")
        self._closed = True
        self._users.clear()
        self._driver.destroy("cuStreamDestroy", self._handles)
        self._driver.destroy("cuStreamDestroy", self._exported)
        self._driver.destroy("cuEventDestroy", self._event)

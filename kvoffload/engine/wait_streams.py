"""What a transfer is to follow: streams, and arrays whose producer is asked for.

Some libraries do not show their streams (JAX), but every array that speaks DLPack can make a stream of ours wait for
what computes it: `array.__dlpack__(stream=...)`. Such a stream is a *relay*: it waits, and a transfer follows it as it
would follow the caller's stream.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvoffload.device.streams import NO_WAIT, refuse_capturing, stream_handle
from kvoffload.driver import Driver
from kvoffload.driver.core import LEGACY_STREAM
from kvoffload.internal.teardown import run_all
from kvoffload.layout.dlpack import CPU, CUDA_HOST

WAIT_STREAMS = 2  # taken in turn: what follows one array should not have to follow many that others asked for


class Array:
    """An array that a transfer is to follow, as it was given."""

    def __init__(self, given: Any) -> None:
        self.given = given


Source = int | Array  # a stream handle, or an array


def as_sources(after: Any) -> tuple[Source, ...]:
    """What `after` names: a stream, an array, or a list or tuple of these; nothing for NO_WAIT.

    None is the legacy default stream.

    Raises:
        TypeError: something that is neither.
        ValueError: an array that was deleted.
    """
    if after is NO_WAIT:
        return ()
    if after is None:
        return (LEGACY_STREAM,)
    if isinstance(after, list | tuple):
        return tuple(_as_source(each, f"after[{index}]") for index, each in enumerate(after))
    return (_as_source(after, "after"),)


def _as_source(given: Any, name: str) -> Source:
    if hasattr(given, "__cuda_stream__"):
        return stream_handle(given, name)
    if hasattr(given, "__dlpack__") or _has_cuda_array_interface(given):
        if hasattr(given, "is_deleted") and given.is_deleted():  # JAX's
            raise ValueError(f"{name} was deleted, or donated to a computation: pass what took its place")
        return Array(given)
    if given is None or given is NO_WAIT:
        raise TypeError(f"{name} must be a stream or an array, got {given!r}; leave it out of the list")
    return stream_handle(given, name)


def _has_cuda_array_interface(given: Any) -> bool:
    try:
        return hasattr(given, "__cuda_array_interface__")
    except Exception:  # PyTorch raises others than AttributeError, for instance for tensors that need a gradient
        return False


class WaitStreams:
    """Streams that wait for what has no stream handle.

    `follow` runs other people's code, so it must not be called under a lock that a callback of theirs may want.

    Args:
        driver: its context must be current, here and in all methods.
        priority: of the streams.
    """

    def __init__(self, driver: Driver, priority: int) -> None:
        self._driver = driver
        self._streams: list[int] = []
        self._turn = 0
        self._lock = threading.Lock()  # of the event
        self._event: int | None = None
        try:
            for _ in range(WAIT_STREAMS):
                self._streams.append(driver.stream_create(priority))
            self._event = driver.event_create(timing=False)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._streams)

    def next(self) -> int:
        """A relay; other threads may make it wait for more."""
        self._turn = (self._turn + 1) % len(self._streams)
        return self._streams[self._turn]

    def follow(self, sources: Sequence[Source]) -> int:
        """A relay that waits for what all sources have queued so far. The host does not wait.

        Raises:
            TypeError: an array in host memory (on a simulated device: one that is not).
            TransferError: a stream is being captured.
            Whatever an array raises when it is asked for its producer.
        """
        wait_stream = self.next()
        for source in sources:
            if isinstance(source, int):
                self._follow_stream(wait_stream, source)
            else:
                self._follow_array(wait_stream, source.given)
        return wait_stream

    def _follow_stream(self, wait_stream: int, stream: int) -> None:
        refuse_capturing(self._driver, stream, "after")
        assert self._event is not None
        with self._lock:
            self._driver.event_record(self._event, stream)
            self._driver.stream_wait_event(wait_stream, self._event)  # holds on to this record

    def _follow_array(self, wait_stream: int, array: Any) -> None:
        if not hasattr(array, "__dlpack__"):
            stream = array.__cuda_array_interface__.get("stream")
            if stream:  # else its owner says that there is nothing to wait for
                self._follow_stream(wait_stream, stream_handle(stream, "after"))
            return
        kind = int(array.__dlpack_device__()[0])
        if (kind in (CPU, CUDA_HOST)) is not self._driver.simulated:
            where = "host memory" if kind in (CPU, CUDA_HOST) else "a GPU's memory, but the device is simulated"
            raise TypeError(f"after: the {type(array).__name__} given is in {where}, where no stream produces it")
        if self._driver.simulated:
            array.__dlpack__()  # host arrays: returns when the bytes are there
        else:
            array.__dlpack__(stream=wait_stream)

    def close(self) -> None:
        """Destroy the streams; nothing may wait on them any more."""
        streams, self._streams = self._streams, []
        event, self._event = self._event, None
        events = [] if event is None else [event]
        run_all(
            (
                *(partial(self._driver.stream_destroy, stream) for stream in streams),
                *(partial(self._driver.event_destroy, each) for each in events),
            )
        )

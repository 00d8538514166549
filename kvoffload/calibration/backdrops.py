"""Work for the GPU while transfers are timed in the field: products of matrices, or copies in the other direction."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from kvoffload.calibration.compute import Computation, Product, new_events, pinned_memory
from kvoffload.device.device import Device
from kvoffload.planning.transfer_plan import Direction

_CHUNKS = 3  # unfinished, at most: when one ends, the GPU has work for as long as two more take
_CHUNK_SECONDS = 4e-3
_MOST_IN_CHUNK = 200  # a stream's queue has about 1000 places
_WARM_UP = 10


class Backdrop:
    """A stream that always has work, queued in chunks.

    Args:
        queue_chunk: queues a chunk on the stream; called with the device's context current.
        events: to put behind chunks: as many as may be unfinished.
    """

    def __init__(self, device: Device, stream: int, queue_chunk: Callable[[], None], events: list[int]) -> None:
        self._device, self._driver = device, device.driver
        self._stream, self._queue_chunk = stream, queue_chunk
        self._unfinished: deque[int] = deque()  # events behind chunks
        self._idle = list(events)

    def top_up(self) -> None:
        """Queue chunks until there is enough. Called before each transfer, and while it runs."""
        with self._device.current():
            while self._unfinished and self._driver.event_query(self._unfinished[0]):
                self._idle.append(self._unfinished.popleft())
            while self._idle:
                self._queue_chunk()
                self._driver.event_record(self._idle[-1], self._stream)
                self._unfinished.append(self._idle.pop())

    def drain(self) -> None:
        with self._device.current():
            self._driver.stream_synchronize(self._stream)


@contextmanager
def _backdrop(device: Device, stream: int, queue_chunk: Callable[[], None]) -> Iterator[Backdrop]:
    """Yield a backdrop; the end waits for the last chunk."""
    with new_events(device, _CHUNKS, timing=False) as events:
        backdrop = Backdrop(device, stream, queue_chunk, events)
        try:
            yield backdrop
        finally:
            backdrop.drain()


@contextmanager
def products(device: Device, product: Product) -> Iterator[Backdrop]:
    """Keep the GPU busy with products of matrices, one after the other without a pause.

    Raises:
        CapabilityError: no kernel can be loaded here; the message says why.
    """
    with Computation(device, product) as computation:
        seconds = statistics.median(computation.seconds_each(1 if device.simulated else _WARM_UP))
        count = 1 if device.simulated else math.ceil(_CHUNK_SECONDS / max(seconds, 1e-9))
        queue_chunk = partial(computation.queue, min(count, _MOST_IN_CHUNK))
        with _backdrop(device, computation.stream, queue_chunk) as backdrop:
            yield backdrop


@contextmanager
def opposite_copies(device: Device, direction: Direction, nbytes: int) -> Iterator[Backdrop]:
    """Keep copies of `nbytes` going against the direction of the transfers, one after the other without a pause."""
    with device.allocate(nbytes) as buffer, pinned_memory(device, nbytes) as pinned, device.stream() as stream:
        target, source = buffer.address, pinned.address
        if direction is Direction.LOAD:
            target, source = source, target
        queue_chunk = partial(device.driver.copy, target, source, nbytes, stream.handle)
        with _backdrop(device, stream.handle, queue_chunk) as backdrop:
            yield backdrop

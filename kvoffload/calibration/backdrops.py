"""Work for the GPU while transfers are timed in the field: products of matrices, or copies in the other direction."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from kvoffload.calibration.compute import Computation, Product, in_context
from kvoffload.device.device import Device
from kvoffload.device.pinned import PinnedMemory
from kvoffload.planning.transfer_plan import Direction

_CHUNKS = 3  # unfinished, at most: when one ends, the GPU has work for as long as two more take
_CHUNK_SECONDS = 4e-3
_MOST_IN_CHUNK = 200  # a stream's queue has about 1000 places
_WARM_UP = 10


class Backdrop:
    """A stream that always has work, queued in chunks. A context manager; its end waits for the last chunk.

    Args:
        queue_chunk: queues a chunk on the stream; called with the device's context current.
    """

    def __init__(self, device: Device, stream: int, queue_chunk: Callable[[], None]) -> None:
        self._device, self._driver = device, device.driver
        self._stream, self._queue_chunk = stream, queue_chunk
        self._unfinished: deque[int] = deque()  # events behind chunks
        self._idle: list[int] = []

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

    def __enter__(self) -> Backdrop:
        try:
            with self._device.current():
                while len(self._idle) < _CHUNKS:
                    self._idle.append(self._driver.event_create(timing=False))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.drain()
        with self._device.current():
            for event in (*self._idle, *self._unfinished):
                self._driver.event_destroy(event)


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
        with Backdrop(device, computation.stream, queue_chunk) as backdrop:
            yield backdrop


@contextmanager
def opposite_copies(device: Device, direction: Direction, nbytes: int) -> Iterator[Backdrop]:
    """Keep copies of `nbytes` going against the direction of the transfers, one after the other without a pause."""
    driver = device.driver
    with ExitStack() as undo:
        buffer = undo.enter_context(device.allocate(nbytes))
        with device.current():
            pinned = PinnedMemory(driver, nbytes)
            undo.callback(in_context, device, pinned.release)
        stream = undo.enter_context(device.stream()).handle
        target, source = buffer.address, pinned.address
        if direction is Direction.LOAD:
            target, source = source, target
        with Backdrop(device, stream, partial(driver.copy, target, source, nbytes, stream)) as backdrop:
            yield backdrop

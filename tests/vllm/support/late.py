"""A GPU that is slow where it matters: what it is asked to do begins late, on any device.

Copies take microseconds, and the host's next step milliseconds: that it has not waited for them would never show.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from transfers import COPY_CALLS, intercepted, queueing

import kvoffload
from kvoffload.device.pinned import PAGE_BYTES, PinnedMemory
from kvoffload.engine.job import Transfer


class Late:
    """Holds streams back for a while: they wait for a pinned word, which a thread of its own writes in any case.

    Args:
        device: theirs.
        seconds: for how long.
        seed: of what decides which are held.

    Attributes:
        count: how often one was.
    """

    def __init__(self, device: kvoffload.Device, seconds: float, seed: int) -> None:
        self._device, self._seconds, self._random = device, seconds, random.Random(seed)
        with device.current():
            self._memory = PinnedMemory(device.driver, PAGE_BYTES)
        self._word = self._memory.array[:4].view(np.uint32)
        self._lock = threading.Lock()  # of the word, which only grows
        self.count = 0

    def hold(self, stream: int, share: float) -> None:
        """Hold back what is queued on a stream from now on, in this share of the calls."""
        if self._random.random() >= share:
            return
        self.count += 1
        opener = threading.Timer(self._seconds, self._open, [self.count])
        opener.daemon = True
        opener.start()  # before anything waits for it
        with self._device.current():
            self._device.driver.call("cuStreamWaitValue32", stream, self._memory.address, self.count, 0)

    def copies(self, engine: kvoffload.OffloadEngine, share: float) -> AbstractContextManager[None]:
        """While entered, hold back this share of the engine's transfers before their first copy."""
        held: list[Transfer] = []  # the last one asked about

        def around(function: Callable[..., Any], *arguments: Any) -> Any:
            transfer = queueing(engine)
            if transfer is not None and transfer not in held:
                held[:] = [transfer]
                self.hold(transfer.segments[-1].stream.handle, share)
            return function(*arguments)

        return intercepted(engine.device.driver, COPY_CALLS, around)

    def _open(self, turn: int) -> None:
        with self._lock:
            self._word[0] = max(int(self._word[0]), turn)

    def close(self) -> None:
        """Hold nothing back any more. The streams must be idle soon after."""
        self._open(self.count)
        with self._device.current():
            self._device.driver.api.cuCtxSynchronize()
            self._memory.release()

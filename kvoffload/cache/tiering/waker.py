"""Waker: has the thread of the tiers look at everything, now or soon."""

from __future__ import annotations

import queue
import time

SOON = 5e-3  # seconds


class Waker:
    """What is urgent wakes the thread now; the rest within 5 ms, so that the thread looks once at what a request does,
    and not concurrently with each of its calls. `now` and `soon` are for any thread, finalizers included.
    """

    def __init__(self) -> None:
        self._woken = queue.SimpleQueue[bool]()  # an Event may not be set by a finalizer
        self._lingers = False  # written by the thread alone: it is about to look

    def now(self) -> None:
        if self._woken.qsize() < 2:  # of two at least one is urgent
            self._woken.put(True)

    def soon(self) -> None:
        if not self._lingers and self._woken.empty():
            self._woken.put(False)

    # of the thread ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Before anything is looked at: what happens afterwards wakes the thread again."""
        self._lingers = False
        while not self._woken.empty():
            self._woken.get()

    def wait(self, seconds: float) -> None:
        """Sleep until it is time to look, at most so long."""
        end = time.monotonic() + seconds
        try:
            urgent = self._woken.get(timeout=seconds)
            self._lingers = True
            end = min(end, time.monotonic() + SOON)
            while not urgent:
                urgent = self._woken.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            pass

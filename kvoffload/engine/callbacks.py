"""Callbacks at the end of transfers: one thread for an engine, which runs while there is something to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvoffload.engine.job import Job
from kvoffload.errors import ClosedError
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import in_call

_POLL_SECONDS = 2e-4
_WAITING = tuple[Job, Callable[[Job], object]]


class Callbacks:
    """Calls functions when jobs have ended."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # of the thread's begin and end
        self._waiting: list[_WAITING] = []
        self._thread: threading.Thread | None = None

    def add(self, job: Job, callback: Callable[[Job], object]) -> None:
        """Call `callback(job)` once the job has ended, from a thread; now, if it is known to have ended."""
        if not callable(callback):
            raise TypeError(f"callback must be a function of a Job, got {callback!r:.80}")
        if job.finished:
            _call(callback, job)
            return
        self._waiting.append((job, callback))
        if in_call(self._lock):
            return  # a call of `add` that has not returned sees to the thread
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="kvoffload-callbacks", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        """Poll until nothing is waited for. Nothing else ends the thread: `await` and all callbacks depend on it."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
            ended = [entry for entry in list(self._waiting) if _has_ended(entry[0])]
            for entry in ended:
                self._waiting.remove(entry)
                try:
                    _call(entry[1], entry[0])
                except BaseException:  # SystemExit, CancelledError: they would end the thread
                    LOGGER.exception("a done callback of %r raised", entry[0])
            if not ended:
                time.sleep(_POLL_SECONDS)


def _has_ended(job: Job) -> bool:
    try:
        return job.done
    except ClosedError:  # a closed device: the job will not change any more
        return True
    except BaseException:  # the driver's, which may pass, or a tracer's: it is asked again
        return job.finished


def _call(callback: Callable[[Job], object], job: Job) -> None:
    try:
        callback(job)
    except Exception:  # as concurrent.futures does: the other callbacks are called all the same
        LOGGER.exception("a done callback of %r raised", job)

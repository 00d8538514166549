"""Callbacks at the end of transfers: one thread for an engine, which runs while there is something to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvoffload.engine.job import Job
from kvoffload.errors import KVOffloadError
from kvoffload.internal.log import LOGGER

_POLL_SECONDS = 2e-4
_WAITING = tuple[Job, Callable[[Job], object]]


class Callbacks:
    """Calls functions when jobs have ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_WAITING] = []
        self._thread: threading.Thread | None = None

    def add(self, job: Job, callback: Callable[[Job], object]) -> None:
        """Call `callback(job)` once the job has ended, from a thread; now, if it is known to have ended."""
        if not callable(callback):
            raise TypeError(f"callback must be a function of a Job, got {callback!r:.80}")
        if job.finished:
            _call(callback, job)
            return
        with self._lock:
            self._waiting.append((job, callback))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="kvoffload-callbacks", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        """Poll until nothing is waited for."""
        while True:
            with self._lock:
                waiting = list(self._waiting)
                if not waiting:
                    self._thread = None
                    return
            ended = [entry for entry in waiting if _has_ended(entry[0])]
            with self._lock:
                for entry in ended:
                    self._waiting.remove(entry)
            for job, callback in ended:
                _call(callback, job)
            if not ended:
                time.sleep(_POLL_SECONDS)


def _has_ended(job: Job) -> bool:
    try:
        return job.done
    except KVOffloadError:  # a forked child, a closed device: the job will not change any more
        return True


def _call(callback: Callable[[Job], object], job: Job) -> None:
    try:
        callback(job)
    except Exception:  # as concurrent.futures does: the other callbacks are called all the same
        LOGGER.exception("a done callback of %r raised", job)

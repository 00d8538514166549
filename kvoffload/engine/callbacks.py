"""Waiting, awaiting and callbacks for jobs, jobs of caches, and promotions.

One thread of an engine, or of the tiers of a cache, makes the callbacks. It exists only while it has jobs to wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, Generic, Self, TypeVar

from kvoffload.errors import ClosedError
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import begin_thread

_POLL_SECONDS = 2e-4
_R = TypeVar("_R")
WhenDone = Callable[[Any, Callable[[Any], object]], None]
"""`Callbacks.add`."""


class Waitable(Generic[_R]):
    """A handle that a thread can wait for, an asyncio task can await, and callbacks can follow."""

    __slots__ = ()
    _when_done: WhenDone

    @property
    def done(self) -> bool:
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> _R:
        raise NotImplementedError

    def result(self) -> _R:
        """Return or raise what `wait()` does, without a timeout."""
        return self.wait()

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call `callback(self)` once the work behind this handle has ended, well or not.

        If it is already known to have ended, this thread makes the call before it returns. Otherwise this returns, and
        a daemon thread of the engine, or of the cache's tiers, polls for the end and makes the call, with no lock held.
        All callbacks of an engine share that thread, so let the callback return soon. An Exception from it is logged
        (logger "kvoffload").

        Raises:
            TypeError: `callback` cannot be called.
            ClosedError: this is a forked child, and an engine of the parent is asked.
            RuntimeError: the system has no thread left. The call is made all the same once another callback is added.
        """
        self._call_when_done(callback)

    def _call_when_done(self, callback: Callable[[Any], object]) -> None:
        self._when_done(self, callback)

    def __await__(self) -> Generator[Any, None, _R]:
        """Wait as `wait` does, in an asyncio task, while the event loop goes on. If the task is cancelled, the work
        goes on.
        """
        import asyncio

        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ended.done():  # the task may have been cancelled
                ended.set_result(None)

        def notify_loop(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(notify_loop)
        yield from ended
        return self.wait()


class Callbacks:
    def __init__(self) -> None:
        self._waiting: list[tuple[Waitable[Any], Callable[[Any], object]]] = []
        self._serving = False  # by a thread

    def add(self, job: Waitable[Any], callback: Callable[[Any], object]) -> None:
        if not callable(callback):
            raise TypeError(f"callback must be a function of a {type(job).__name__}, got {callback!r:.80}")
        if job.finished:
            _call(callback, job)
            return
        self._waiting.append((job, callback))
        if not self._serving:  # for two callers at a time, perhaps: then two threads serve
            self._serving = True
            try:
                begin_thread("kvoffload-callbacks", self._serve)
            except BaseException:  # the system has no thread left, or an interrupt: the next call tries again
                self._serving = False
                raise

    def _serve(self) -> None:
        """Poll until no job is left. Nothing else may end the thread: `await` and all callbacks depend on it."""
        while True:
            if not self._waiting:
                self._serving = False
                if not self._waiting:  # else `add` may have seen the thread
                    return
            waiting = list(self._waiting)
            known = [_has_ended(entry[0]) for entry in waiting]  # asking for one may find the end of one before it
            ended = [entry for entry, over in zip(waiting, known, strict=True) if over or entry[0].finished]
            for entry in ended:
                try:
                    self._waiting.remove(entry)
                except ValueError:  # another thread has made the call
                    continue
                try:
                    _call(entry[1], entry[0])
                except BaseException:  # noqa: BLE001  # SystemExit, CancelledError: they would end the thread
                    LOGGER.exception("a done callback of %r raised", entry[0])
            if not ended:
                time.sleep(_POLL_SECONDS)


def _has_ended(job: Waitable[Any]) -> bool:
    try:
        return job.done
    except ClosedError:  # a closed device: the job will not change any more
        return True
    except BaseException:  # noqa: BLE001  # the driver's, which may pass, or a tracer's: it is asked again
        return job.finished


def _call(callback: Callable[[Any], object], job: Waitable[Any]) -> None:
    try:
        callback(job)
    except Exception:  # noqa: BLE001  # as concurrent.futures does: the other callbacks are called all the same
        LOGGER.exception("a done callback of %r raised", job)

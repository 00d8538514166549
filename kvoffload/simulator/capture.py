"""Graph captures: which are under way, the streams in them, and which calls of which threads they forbid."""

from __future__ import annotations

import threading
from typing import Any

from cuda.bindings import driver as cuda

from kvoffload.simulator.contexts import Capture, Stream
from kvoffload.simulator.errors import RefusedError

_MODE = cuda.CUstreamCaptureMode
GLOBAL = _MODE.CU_STREAM_CAPTURE_MODE_GLOBAL
THREAD_LOCAL = _MODE.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
RELAXED = _MODE.CU_STREAM_CAPTURE_MODE_RELAXED
UNSUPPORTED = cuda.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED

# What CUDA calls "potentially unsafe API calls", of those that there are here.
UNSAFE = frozenset(
    {
        "cuEventQuery",
        "cuEventSynchronize",
        "cuMemAlloc",
        "cuMemFree",
        "cuMemHostAlloc",
        "cuMemHostRegister",
        "cuMemHostUnregister",
        "cuModuleUnload",
        "cuStreamQuery",
        "cuStreamSynchronize",
    }
)


class Captures:
    """The captures of one driver, and every thread's capture mode. Used under the driver's lock."""

    def __init__(self) -> None:
        self._under_way: list[Capture] = []
        self._local = threading.local()

    def begin(self, stream: Stream, mode: Any) -> None:
        stream.capture = Capture(stream, _MODE(int(mode)))
        self._under_way.append(stream.capture)

    def end(self, capture: Capture) -> None:
        self._under_way.remove(capture)
        for stream in capture.streams:
            stream.capture = None

    def exchange_mode(self, mode: Any) -> Any:
        """Set the calling thread's mode, and return the previous one."""
        before = getattr(self._local, "mode", GLOBAL)
        self._local.mode = _MODE(int(mode))
        return before

    def refuse_unsafe(self, name: str) -> None:
        """Fail a call that the captures under way forbid to the calling thread, and invalidate those captures."""
        if not self._under_way or name not in UNSAFE:
            return
        mode, forbidden = getattr(self._local, "mode", GLOBAL), False
        self._under_way = [capture for capture in self._under_way if not capture.origin.destroyed]
        for capture in self._under_way:
            if _forbids(capture, mode):
                capture.invalidated = forbidden = True
        if forbidden:
            raise RefusedError(UNSUPPORTED)


def _forbids(capture: Capture, mode: Any) -> bool:
    """Whether a capture forbids unsafe calls to the calling thread, which is in `mode`."""
    if RELAXED in (mode, capture.mode):
        return False
    return capture.thread == threading.get_ident() or (mode == GLOBAL and capture.mode == GLOBAL)

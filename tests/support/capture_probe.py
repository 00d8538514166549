"""Captures of other streams, simulated or real: one that must survive, and which calls a capture forbids."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver as cuda

import kvoffload
from kvoffload.driver import address_of

MODE = cuda.CUstreamCaptureMode
GLOBAL = MODE.CU_STREAM_CAPTURE_MODE_GLOBAL
THREAD_LOCAL = MODE.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
RELAXED = MODE.CU_STREAM_CAPTURE_MODE_RELAXED
NBYTES = 1 << 16
ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


class Verdict(NamedTuple):
    """What a call returned, and what the end of the capture did, as CUDA's names."""

    call: str
    end: str


class Probe:
    """Calls `api` on a stream, an event and memory of its own while another stream is captured.

    The context must be current for the calling thread.
    """

    def __init__(self, api: Any, context: Any) -> None:
        self.api = api
        self.context = context
        self.captured, self.stream = (self._ok("cuStreamCreateWithPriority", 1, 0) for _ in range(2))
        self.start, self.end = self._ok("cuEventCreate", 0), self._ok("cuEventCreate", 0)
        self.pages = np.zeros(NBYTES + 4096, np.uint8)
        self.page = -(-address_of(self.pages) // 4096) * 4096
        self.pinned = self._ok("cuMemHostAlloc", NBYTES, 0)
        self.memory = self._ok("cuMemAlloc", NBYTES)
        for event in (self.start, self.end):
            self._ok("cuEventRecord", event, self.stream)
        self._ok("cuStreamSynchronize", self.stream)

    def _ok(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self.api, name)(*arguments)
        assert int(status) == 0, (name, status)
        return values[0] if values else None

    def cases(self) -> dict[str, Callable[[], Any]]:
        """A call of every function; its status. What it makes it leaves behind."""
        api = self.api
        host, device, stream = int(self.pinned), self.memory, self.stream
        spare_event, spare_stream = self._ok("cuEventCreate", 0), self._ok("cuStreamCreateWithPriority", 1, 0)
        spare_memory = self._ok("cuMemAlloc", NBYTES)
        registered = self.page
        return {
            "cuEventQuery": lambda: api.cuEventQuery(self.end),
            "cuEventSynchronize": lambda: api.cuEventSynchronize(self.end),
            "cuEventElapsedTime": lambda: api.cuEventElapsedTime(self.start, self.end),
            "cuEventRecord": lambda: api.cuEventRecord(self.end, stream),
            "cuEventCreate": lambda: api.cuEventCreate(0),
            "cuEventDestroy": lambda: api.cuEventDestroy(spare_event),
            "cuStreamQuery": lambda: api.cuStreamQuery(stream),
            "cuStreamSynchronize": lambda: api.cuStreamSynchronize(stream),
            "cuStreamWaitEvent": lambda: api.cuStreamWaitEvent(stream, self.start, 0),
            "cuStreamIsCapturing": lambda: api.cuStreamIsCapturing(stream),
            "cuStreamCreateWithPriority": lambda: api.cuStreamCreateWithPriority(1, 0),
            "cuStreamDestroy": lambda: api.cuStreamDestroy(spare_stream),
            "cuMemAlloc": lambda: api.cuMemAlloc(NBYTES),
            "cuMemFree": lambda: api.cuMemFree(spare_memory),
            "cuMemGetInfo": lambda: api.cuMemGetInfo(),
            "cuMemGetAddressRange": lambda: api.cuMemGetAddressRange(device),
            "cuMemHostAlloc": lambda: api.cuMemHostAlloc(NBYTES, 0),
            "cuMemHostRegister": lambda: api.cuMemHostRegister(registered, NBYTES, 1),
            "cuMemcpyAsync": lambda: api.cuMemcpyAsync(device, host, 64, stream),
            "cuMemsetD8Async": lambda: api.cuMemsetD8Async(device, 1, 64, stream),
            "cuMemcpyHtoD": lambda: api.cuMemcpyHtoD(device, host, 64),
            "cuMemcpyDtoH": lambda: api.cuMemcpyDtoH(host, device, 64),
        }

    def verdict(self, call: Callable[[], Any], capture_mode: Any, thread_mode: Any, other_thread: bool) -> Verdict:
        """Capture a stream, make the call in this thread or in another one, end the capture."""
        self._ok("cuStreamBeginCapture", self.captured, capture_mode)
        answers: list[Any] = []

        def ask() -> None:
            before = self._ok("cuThreadExchangeStreamCaptureMode", thread_mode)
            answers.append(call()[0])
            self._ok("cuThreadExchangeStreamCaptureMode", before)

        def ask_elsewhere() -> None:
            self._ok("cuCtxPushCurrent", self.context)
            ask()

        if other_thread:
            thread = threading.Thread(target=ask_elsewhere)
            thread.start()
            thread.join()
        else:
            ask()
        end = self.api.cuStreamEndCapture(self.captured)
        answer = _name(answers[0])
        if answer == "CUDA_ERROR_NOT_READY":  # the query was allowed; the stream may be busy where others use the GPU
            answer = "CUDA_SUCCESS"
        return Verdict(answer, _name(end[0]))

    def table(self, capture_mode: Any, thread_mode: Any, other_thread: bool) -> dict[str, Verdict]:
        """Every call's verdict. Also of giving a registration back."""
        table = {}
        for name, call in self.cases().items():
            table[name] = self.verdict(call, capture_mode, thread_mode, other_thread)
        if table["cuMemHostRegister"].call != "CUDA_SUCCESS":
            self._ok("cuMemHostRegister", self.page, NBYTES, 1)
        unregister: Any = self.api.cuMemHostUnregister
        table["cuMemHostUnregister"] = self.verdict(
            lambda: unregister(self.page), capture_mode, thread_mode, other_thread
        )
        if table["cuMemHostUnregister"].call != "CUDA_SUCCESS":
            self._ok("cuMemHostUnregister", self.page)
        return table


class Capturing:
    """A stream of the caller's that is captured, in this thread or in one of its own, until `end`."""

    def __init__(self, device: kvoffload.Device, mode: Any, *, other_thread: bool) -> None:
        self._device = device
        self._mode = mode
        self._begun, self._over = threading.Event(), threading.Event()
        self.ended: list[str] = []
        self._thread = threading.Thread(target=self._elsewhere) if other_thread else None
        if self._thread is None:
            self._begin()
        else:
            self._thread.start()
            assert self._begun.wait(10)

    def _begin(self) -> None:
        api = self._device.driver.api
        with self._device.current():
            self._stream = self._device.driver.stream_create(0)
        with pushed(self._device):
            assert int(api.cuStreamBeginCapture(self._stream, self._mode)[0]) == 0
        self._begun.set()

    def _finish(self) -> None:
        api = self._device.driver.api
        with pushed(self._device):
            status = int(api.cuStreamIsCapturing(self._stream)[1])
            self.ended.append(api.cuStreamEndCapture(self._stream)[0].name)
        assert (status == ACTIVE) == (self.ended[-1] == "CUDA_SUCCESS")
        with self._device.current():
            self._device.driver.stream_destroy(self._stream)

    def _elsewhere(self) -> None:
        self._begin()
        self._over.wait(30)
        self._finish()

    def end(self) -> str:
        """End the capture; what CUDA says of it."""
        if self._thread is None:
            self._finish()
        else:
            self._over.set()
            self._thread.join(10)
        (verdict,) = self.ended
        return verdict


@contextmanager
def pushed(device: kvoffload.Device) -> Iterator[None]:
    """The context current, as a program without kvoffload makes it: the capture mode stays."""
    assert int(device.driver.api.cuCtxPushCurrent(device.context)[0]) == 0
    yield
    assert int(device.driver.api.cuCtxPopCurrent()[0]) == 0


def _name(status: Any) -> str:
    return str(cuda.CUresult(int(status)).name)

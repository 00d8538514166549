"""Driver calls about streams, events, words in memory, and graph capture."""

# ruff: noqa: N802, N803, ARG002 (names and signatures are CUDA's)

from __future__ import annotations

import threading
from typing import Any

from cuda.bindings import driver as cuda

from kvoffload.simulator.calls import INVALID_VALUE, Core, Needs, driver_call, integer, word
from kvoffload.simulator.capture import RELAXED, UNSUPPORTED
from kvoffload.simulator.contexts import INVALIDATED, LEGACY, Event, Operation, Record, Stream
from kvoffload.simulator.errors import RefusedError
from kvoffload.simulator.handles import INVALID_HANDLE
from kvoffload.simulator.memory import Region
from kvoffload.simulator.operations import (
    RecordOperation,
    WaitEventOperation,
    WaitValueOperation,
    WriteValueOperation,
)

_R = cuda.CUresult
NOT_READY = _R.CUDA_ERROR_NOT_READY
CAPTURED_EVENT = _R.CUDA_ERROR_CAPTURED_EVENT
NON_BLOCKING = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
DISABLE_TIMING = int(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
MEMORY_OPERATIONS = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS


class StreamCalls(Core):
    attributes: dict[int, int]

    @driver_call(values=1)
    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Any:
        return self._new_stream(integer(flags))

    @driver_call(values=1)
    def cuStreamCreate(self, Flags: int) -> Any:
        return self._new_stream(integer(Flags))

    @driver_call()
    def cuStreamDestroy(self, hStream: Any) -> Any:
        if integer(hStream) < 16:
            return INVALID_HANDLE
        stream = self.stream(hStream)
        self.streams.remove(stream.handle)
        stream.context.destroy(stream)
        return None

    @driver_call(values=1)
    def cuStreamGetCtx(self, hStream: Any) -> Any:
        return (cuda.CUcontext(self.stream(hStream).context.handle),)

    @driver_call()
    def cuStreamQuery(self, hStream: Any) -> Any:
        stream = self._not_capturing(self.stream(hStream))
        others = list(stream.context.blocking.values()) if stream is stream.context.legacy else []
        if self._busy(stream, others):
            self.scheduler.poll()
        return NOT_READY if self._busy(stream, others) else None

    @driver_call()
    def cuStreamSynchronize(self, hStream: Any) -> Any:
        stream = self._not_capturing(self.stream(hStream))
        serial = stream.submitted
        if stream is stream.context.legacy:  # work that also waits for the blocking streams
            serial = self.submit(stream, Operation())
        self.finish(stream, serial, f"cuStreamSynchronize: {stream}")

    @driver_call()
    def cuStreamWaitEvent(self, hStream: Any, hEvent: Any, Flags: int) -> Any:
        stream, event = self.stream(hStream), self.event(hEvent)
        record = event.record
        if record is None:
            return None
        if record.capture is not None or stream.capture is not None:
            return self._wait_in_capture(stream, record)
        operation = WaitEventOperation()
        operation.dependencies.append((record.stream, record.serial))
        self.submit(stream, operation)
        self.scheduler.drift()
        return None

    @driver_call(values=1)
    def cuEventCreate(self, Flags: int) -> Any:
        context = self.context()
        event = Event(self.events.new_handle(), context, timing=not integer(Flags) & DISABLE_TIMING)
        self.events.add(event)
        context.events[event.handle] = event
        return (cuda.CUevent(event.handle),)

    @driver_call()
    def cuEventDestroy(self, hEvent: Any) -> Any:
        event = self.event(hEvent)
        event.destroyed = True
        self.events.remove(event.handle)
        event.context.events.pop(event.handle, None)

    @driver_call()
    def cuEventRecord(self, hEvent: Any, hStream: Any) -> Any:
        event, stream = self.event(hEvent), self.stream(hStream)
        if event.context is not stream.context:
            return INVALID_HANDLE
        record = Record(stream, stream.capture)
        record.serial = self.submit(stream, RecordOperation(record, self.scheduler.now, event.timing))
        event.record = record
        self.scheduler.drift()
        return None

    @driver_call()
    def cuEventQuery(self, hEvent: Any) -> Any:
        record = self._uncaptured(self.event(hEvent))
        if record is not None and not record.done:
            self.scheduler.poll()
        return None if record is None or record.done else NOT_READY

    @driver_call()
    def cuEventSynchronize(self, hEvent: Any) -> Any:
        record = self._uncaptured(self.event(hEvent))
        if record is not None:
            self.finish(record.stream, record.serial, f"cuEventSynchronize: {record.stream}")

    @driver_call(values=1)
    def cuEventElapsedTime(self, hStart: Any, hEnd: Any) -> Any:
        start, end = self.event(hStart), self.event(hEnd)
        records = self._uncaptured(start), self._uncaptured(end)
        if records[0] is None or records[1] is None or not (start.timing and end.timing):
            return INVALID_HANDLE
        if not (records[0].done and records[1].done):
            return NOT_READY
        return ((records[1].microseconds - records[0].microseconds) / 1000,)

    # Words in memory

    @driver_call()
    def cuStreamWaitValue32(self, stream: Any, addr: Any, value: Any, flags: int) -> Any:
        target, number = self._memory_operation_stream(stream), word(value)
        regions, address = self._word(addr)
        self.submit(target, WaitValueOperation(regions, address, number, integer(flags)))
        self.scheduler.drift()

    @driver_call()
    def cuStreamWriteValue32(self, stream: Any, addr: Any, value: Any, flags: int) -> Any:
        target, number = self._memory_operation_stream(stream), word(value)
        regions, address = self._word(addr)
        self.submit(target, WriteValueOperation(regions, address, number))
        self.scheduler.drift()

    # Capture

    @driver_call()
    def cuStreamBeginCapture(self, hStream: Any, mode: Any) -> Any:
        stream = self.stream(hStream)
        if stream.handle == LEGACY:
            return UNSUPPORTED
        if stream.capture is not None:
            return _R.CUDA_ERROR_ILLEGAL_STATE
        self.captures.begin(stream, mode)
        return None

    @driver_call(values=1)
    def cuStreamEndCapture(self, hStream: Any) -> Any:
        capture = self.stream(hStream).capture
        if capture is None:
            return _R.CUDA_ERROR_ILLEGAL_STATE
        if capture.origin is not self.stream(hStream):
            return _R.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
        if capture.mode != RELAXED and capture.thread != threading.get_ident():
            return _R.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
        self.captures.end(capture)
        if capture.invalidated:
            return INVALIDATED
        return (cuda.CUgraph(),) if not capture.unjoined else _R.CUDA_ERROR_STREAM_CAPTURE_UNJOINED

    @driver_call(values=1)
    def cuStreamIsCapturing(self, hStream: Any) -> Any:
        stream = self.stream(hStream)
        self._refuse_implicit_capture(stream, asking=True)
        status = cuda.CUstreamCaptureStatus
        if stream.capture is None:
            return (status.CU_STREAM_CAPTURE_STATUS_NONE,)
        if stream.capture.invalidated:
            return (status.CU_STREAM_CAPTURE_STATUS_INVALIDATED,)
        return (status.CU_STREAM_CAPTURE_STATUS_ACTIVE,)

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        return (self.captures.exchange_mode(mode),)

    # Shared

    def _new_stream(self, flags: int) -> tuple[Any]:
        if flags not in (0, NON_BLOCKING):
            raise RefusedError(INVALID_VALUE)
        context = self.context()
        stream = Stream(self.streams.new_handle(), context, blocking=flags != NON_BLOCKING)
        self.streams.add(stream)
        context.streams[stream.handle] = stream
        if stream.blocking:
            context.blocking[id(stream)] = stream
        return (cuda.CUstream(stream.handle),)

    @staticmethod
    def _busy(stream: Stream, others: list[Stream]) -> bool:
        return bool(stream.queue) or any(other.queue for other in others)

    @staticmethod
    def _not_capturing(stream: Stream) -> Stream:
        if stream.capture is not None:
            stream.capture.refuse(UNSUPPORTED)
        return stream

    @staticmethod
    def _uncaptured(event: Event) -> Record | None:
        if event.record is not None and event.record.capture is not None:
            event.record.capture.refuse(CAPTURED_EVENT)
        return event.record

    def _wait_in_capture(self, stream: Stream, record: Record) -> Any:
        """A wait for an event of a capture makes the waiting stream join the capture, or is an error."""
        capture = record.capture
        if capture is None:
            assert stream.capture is not None
            stream.capture.refuse(_R.CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
        capture.check()
        if stream.capture is not None and stream.capture is not capture:
            stream.capture.invalidated = True
            capture.refuse(_R.CUDA_ERROR_STREAM_CAPTURE_MERGE)
        self._refuse_implicit_capture(stream)
        if stream.capture is None:
            stream.capture = capture
            capture.streams.append(stream)
            capture.unjoined.add(stream)
        elif stream is not record.stream:
            capture.unjoined.discard(record.stream)
        return None

    def _memory_operation_stream(self, handle: Any) -> Stream:
        if not self.attributes.get(MEMORY_OPERATIONS, 0):
            raise RefusedError(_R.CUDA_ERROR_NOT_SUPPORTED)
        return self.submission_stream(handle)

    def _word(self, pointer: Any) -> tuple[list[Region], int]:
        address = integer(pointer)
        region = self.memory.find(address, 4)
        if region is None or address % 4:
            raise RefusedError(INVALID_VALUE)
        return [region], address

"""Driver calls about streams, events, words in memory, and graph capture."""

# ruff: noqa: N802, N803, ARG001 (names and signatures are CUDA's)

from __future__ import annotations

import threading
from typing import Any

from cuda.bindings import driver as cuda

from kvoffload.simulator.contexts import INVALIDATED, LEGACY, RELAXED, UNSUPPORTED, Event, Operation, Record, Stream
from kvoffload.simulator.driver import Needs, SimulatedDriver, driver_call, integer
from kvoffload.simulator.errors import INVALID_HANDLE, INVALID_VALUE, RefusedError
from kvoffload.simulator.operations import RecordOperation, WaitValueOperation

_R = cuda.CUresult
NOT_READY = _R.CUDA_ERROR_NOT_READY
CAPTURED_EVENT = _R.CUDA_ERROR_CAPTURED_EVENT
NON_BLOCKING = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
DISABLE_TIMING = int(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
MEMORY_OPERATIONS = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS


@driver_call(values=1)
def cuStreamCreateWithPriority(driver: SimulatedDriver, flags: int, priority: int) -> Any:
    return _new_stream(driver, integer(flags))


@driver_call(values=1)
def cuStreamCreate(driver: SimulatedDriver, Flags: int) -> Any:
    return _new_stream(driver, integer(Flags))


@driver_call()
def cuStreamDestroy(driver: SimulatedDriver, hStream: Any) -> Any:
    if integer(hStream) < 16:
        return INVALID_HANDLE
    stream = driver.stream(hStream)
    driver.streams.remove(stream.handle)
    stream.destroyed = True
    if not stream.queue:  # else once its work is done
        stream.context.streams.pop(stream)
    return None


@driver_call()
def cuStreamQuery(driver: SimulatedDriver, hStream: Any) -> Any:
    stream = _not_capturing(driver.stream(hStream))
    if _busy(stream):
        driver.scheduler.poll()
    return NOT_READY if _busy(stream) else None


@driver_call()
def cuStreamSynchronize(driver: SimulatedDriver, hStream: Any) -> Any:
    stream = _not_capturing(driver.stream(hStream))
    serial = stream.submitted
    if stream is stream.context.legacy:  # work that also waits for the blocking streams
        serial = driver.submit(stream, Operation(()))
    driver.finish(stream, serial, f"cuStreamSynchronize: {stream}")


@driver_call()
def cuStreamWaitEvent(driver: SimulatedDriver, hStream: Any, hEvent: Any, Flags: int) -> Any:
    stream, event = driver.stream(hStream), driver.event(hEvent)
    record = event.record
    if record is None:
        return None
    if record.capture is not None or stream.capture is not None:
        return _wait_in_capture(stream, record)
    operation = Operation((), places=0)
    operation.dependencies.append((record.stream, record.serial))
    driver.submit(stream, operation)
    driver.scheduler.drift()
    return None


@driver_call(values=1)
def cuEventCreate(driver: SimulatedDriver, Flags: int) -> Any:
    event = driver.events.add(Event, driver.context(), not integer(Flags) & DISABLE_TIMING)
    return (cuda.CUevent(event.handle),)


@driver_call()
def cuEventDestroy(driver: SimulatedDriver, hEvent: Any) -> Any:
    driver.events.remove(driver.event(hEvent).handle)


@driver_call()
def cuEventRecord(driver: SimulatedDriver, hEvent: Any, hStream: Any) -> Any:
    event, stream = driver.event(hEvent), driver.stream(hStream)
    if event.context is not stream.context:
        return INVALID_HANDLE
    record = Record(stream, stream.capture)
    operation = RecordOperation((), record, driver.scheduler.now, places=int(event.timing))
    record.serial = driver.submit(stream, operation)
    event.record = record
    driver.scheduler.drift()
    return None


@driver_call()
def cuEventQuery(driver: SimulatedDriver, hEvent: Any) -> Any:
    record = _uncaptured(driver.event(hEvent))
    if record is not None and not record.done:
        driver.scheduler.poll()
    return None if record is None or record.done else NOT_READY


@driver_call()
def cuEventSynchronize(driver: SimulatedDriver, hEvent: Any) -> Any:
    record = _uncaptured(driver.event(hEvent))
    if record is not None:
        driver.finish(record.stream, record.serial, f"cuEventSynchronize: {record.stream}")


@driver_call(values=1)
def cuEventElapsedTime(driver: SimulatedDriver, hStart: Any, hEnd: Any) -> Any:
    start, end = driver.event(hStart), driver.event(hEnd)
    records = _uncaptured(start), _uncaptured(end)
    if records[0] is None or records[1] is None or not (start.timing and end.timing):
        return INVALID_HANDLE
    if not (records[0].done and records[1].done):
        return NOT_READY
    return ((records[1].microseconds - records[0].microseconds) / 1000,)


# Words in memory


@driver_call()
def cuStreamWaitValue32(driver: SimulatedDriver, stream: Any, addr: Any, value: Any, flags: int) -> Any:
    if not driver.attributes.get(MEMORY_OPERATIONS, 0):
        raise RefusedError(_R.CUDA_ERROR_NOT_SUPPORTED)
    target, address, number = driver.submission_stream(stream), integer(addr), integer(value)
    if number > 0xFFFFFFFF:
        raise OverflowError("value too large to convert to uint32_t")
    region = driver.memory.find(address, 4)
    if region is None or address % 4:
        raise RefusedError(INVALID_VALUE)
    driver.submit(target, WaitValueOperation([region], address, number, integer(flags) & 3))
    driver.scheduler.drift()


# Capture


@driver_call()
def cuStreamBeginCapture(driver: SimulatedDriver, hStream: Any, mode: Any) -> Any:
    stream = driver.stream(hStream)
    if stream.handle == LEGACY:
        return UNSUPPORTED
    if stream.capture is not None:
        return _R.CUDA_ERROR_ILLEGAL_STATE
    driver.captures.begin(stream, mode)
    return None


@driver_call(values=1)
def cuStreamEndCapture(driver: SimulatedDriver, hStream: Any) -> Any:
    capture = driver.stream(hStream).capture
    if capture is None:
        return _R.CUDA_ERROR_ILLEGAL_STATE
    if capture.origin is not driver.stream(hStream):
        return _R.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
    if capture.mode != RELAXED and capture.thread != threading.get_ident():
        return _R.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
    driver.captures.end(capture)
    if capture.invalidated:
        return INVALIDATED
    return (cuda.CUgraph(),) if not capture.unjoined else _R.CUDA_ERROR_STREAM_CAPTURE_UNJOINED


@driver_call(values=1)
def cuStreamIsCapturing(driver: SimulatedDriver, hStream: Any) -> Any:
    stream = driver.stream(hStream)
    stream.refuse_implicit_capture(asking=True)
    status = cuda.CUstreamCaptureStatus
    if stream.capture is None:
        return (status.CU_STREAM_CAPTURE_STATUS_NONE,)
    if stream.capture.invalidated:
        return (status.CU_STREAM_CAPTURE_STATUS_INVALIDATED,)
    return (status.CU_STREAM_CAPTURE_STATUS_ACTIVE,)


@driver_call(values=1, needs=Needs.DRIVER)
def cuThreadExchangeStreamCaptureMode(driver: SimulatedDriver, mode: Any) -> Any:
    return (driver.captures.exchange_mode(mode),)


# Shared


def _new_stream(driver: SimulatedDriver, flags: int) -> tuple[Any]:
    if flags not in (0, NON_BLOCKING):
        raise RefusedError(INVALID_VALUE)
    context = driver.context()
    stream = driver.streams.add(Stream, context, flags != NON_BLOCKING)
    context.streams[stream] = None
    return (cuda.CUstream(stream.handle),)


def _busy(stream: Stream) -> bool:
    others = stream.context.blocking() if stream is stream.context.legacy else ()
    return bool(stream.queue) or any(other.queue for other in others)


def _not_capturing(stream: Stream) -> Stream:
    if stream.capture is not None:
        stream.capture.refuse(UNSUPPORTED)
    return stream


def _uncaptured(event: Event) -> Record | None:
    if event.record is not None and event.record.capture is not None:
        event.record.capture.refuse(CAPTURED_EVENT)
    return event.record


def _wait_in_capture(stream: Stream, record: Record) -> Any:
    """Make a stream that waits for an event of a capture join it, or refuse the wait."""
    capture = record.capture
    if capture is None:
        assert stream.capture is not None
        stream.capture.refuse(_R.CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
    capture.check()
    if stream.capture is not None and stream.capture is not capture:
        stream.capture.invalidated = True
        capture.refuse(_R.CUDA_ERROR_STREAM_CAPTURE_MERGE)
    stream.refuse_implicit_capture()
    if stream.capture is None:
        stream.capture = capture
        capture.streams.append(stream)
        capture.unjoined.add(stream)
    elif stream is not record.stream:
        capture.unjoined.discard(record.stream)
    return None

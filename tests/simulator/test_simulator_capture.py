"""The simulated driver: capturing streams, and the calls that a capture forbids."""

from __future__ import annotations

from typing import Any

import pytest
from capture_probe import GLOBAL, RELAXED, THREAD_LOCAL, Probe, Verdict
from cuda.bindings import driver as cuda
from simulator_program import LEGACY, Program, R, in_threads

STATUS = cuda.CUstreamCaptureStatus
FORBIDDEN = {
    "cuEventQuery",
    "cuEventSynchronize",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemHostAlloc",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuStreamQuery",
    "cuStreamSynchronize",
}
INVALIDATES = Verdict("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
FINE = Verdict("CUDA_SUCCESS", "CUDA_SUCCESS")


def test_a_capturing_stream_records_instead_of_running(program: Program) -> None:
    stream, other, event = program.stream(), program.stream(), program.event()
    source, target = program.host(8, 1), program.device(8, 0)
    program.ok("cuStreamBeginCapture", stream, RELAXED)
    assert program.ok("cuStreamIsCapturing", stream) == STATUS.CU_STREAM_CAPTURE_STATUS_ACTIVE
    program.ok("cuMemcpyAsync", target, source, 8, stream)
    program.ok("cuEventRecord", event, stream)
    assert program.ok("cuStreamIsCapturing", other) == STATUS.CU_STREAM_CAPTURE_STATUS_NONE
    program.ok("cuStreamWaitEvent", other, event, 0)
    assert program.ok("cuStreamIsCapturing", other) == STATUS.CU_STREAM_CAPTURE_STATUS_ACTIVE
    assert program.status("cuStreamEndCapture", other) == R.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
    assert program.status("cuStreamEndCapture", stream) == R.CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    assert program.ok("cuStreamIsCapturing", other) == STATUS.CU_STREAM_CAPTURE_STATUS_NONE
    program.ok("cuStreamSynchronize", stream)
    assert (program.bytes(target, 8) == 0).all()


def test_a_joined_capture_ends_well(program: Program) -> None:
    stream, other, events = program.stream(0), program.stream(), [program.event(), program.event()]
    program.ok("cuStreamBeginCapture", stream, GLOBAL)
    program.ok("cuEventRecord", events[0], stream)
    program.ok("cuStreamWaitEvent", other, events[0], 0)
    program.ok("cuEventRecord", events[1], other)
    program.ok("cuStreamWaitEvent", stream, events[1], 0)
    program.ok("cuStreamEndCapture", stream)


def test_the_legacy_stream_is_unusable_while_a_blocking_stream_is_captured(program: Program) -> None:
    stream, event = program.stream(0), program.event()
    program.ok("cuStreamBeginCapture", stream, RELAXED)
    assert program.status("cuStreamIsCapturing", LEGACY) == R.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    assert program.ok("cuStreamIsCapturing", stream) == STATUS.CU_STREAM_CAPTURE_STATUS_ACTIVE  # asking is harmless
    assert program.status("cuEventRecord", event, LEGACY) == R.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    assert program.ok("cuStreamIsCapturing", stream) == STATUS.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    assert program.status("cuStreamEndCapture", stream) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    program.ok("cuEventRecord", event, LEGACY)


def test_a_stream_that_is_not_blocking_leaves_the_legacy_stream_alone(program: Program) -> None:
    stream, event = program.stream(), program.event()
    program.ok("cuStreamBeginCapture", stream, GLOBAL)
    program.ok("cuEventRecord", event, LEGACY)
    program.ok("cuStreamEndCapture", stream)


@pytest.mark.parametrize(
    ("name", "arguments", "status"),
    [
        ("cuStreamQuery", ("captured",), R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
        ("cuStreamSynchronize", ("captured",), R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
        ("cuEventQuery", ("event",), R.CUDA_ERROR_CAPTURED_EVENT),
        ("cuEventSynchronize", ("event",), R.CUDA_ERROR_CAPTURED_EVENT),
        ("cuStreamWaitEvent", ("captured", "outside"), R.CUDA_ERROR_STREAM_CAPTURE_ISOLATION),
    ],
)
def test_an_illegal_call_invalidates_the_capture(
    program: Program, name: str, arguments: tuple[str, ...], status: Any
) -> None:
    """In whatever mode."""
    stream, made = program.stream(), {each: program.event() for each in ("event", "outside")}
    program.ok("cuEventRecord", made["outside"], program.stream())
    program.ok("cuStreamBeginCapture", stream, RELAXED)
    program.ok("cuEventRecord", made["event"], stream)
    made["captured"] = stream
    flags = (0,) if name == "cuStreamWaitEvent" else ()
    assert program.status(name, *map(made.get, arguments), *flags) == status
    event = program.event()
    assert program.ok("cuStreamIsCapturing", stream) == STATUS.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    assert program.status("cuEventRecord", event, stream) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    assert program.status("cuStreamEndCapture", stream) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    assert program.ok("cuStreamIsCapturing", stream) == STATUS.CU_STREAM_CAPTURE_STATUS_NONE
    program.ok("cuEventRecord", event, stream)
    program.ok("cuStreamSynchronize", stream)


def test_two_captures_that_merge_are_both_invalid(program: Program) -> None:
    streams, event = [program.stream(), program.stream()], program.event()
    for stream in streams:
        program.ok("cuStreamBeginCapture", stream, RELAXED)
    program.ok("cuEventRecord", event, streams[0])
    assert program.status("cuStreamWaitEvent", streams[1], event, 0) == R.CUDA_ERROR_STREAM_CAPTURE_MERGE
    for stream in streams:
        assert program.status("cuStreamEndCapture", stream) == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


# unsafe calls on other streams, events and memory


@pytest.mark.parametrize("other_thread", [False, True])
@pytest.mark.parametrize("thread_mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("capture_mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_unsafe_calls_are_forbidden_as_the_modes_of_capture_and_thread_say(
    program: Program, capture_mode: Any, thread_mode: Any, other_thread: bool
) -> None:
    if RELAXED in (capture_mode, thread_mode):
        forbidden = False
    else:
        forbidden = not other_thread or capture_mode == thread_mode == GLOBAL
    table = Probe(program.sim, program.context).table(capture_mode, thread_mode, other_thread)
    assert len(table) > 20
    assert {name for name, verdict in table.items() if verdict != FINE} == (FORBIDDEN if forbidden else set())
    assert {verdict for name, verdict in table.items() if name in FORBIDDEN} == {INVALIDATES if forbidden else FINE}


def test_a_forbidden_call_does_nothing(program: Program) -> None:
    stream, pointer = program.stream(), program.device(64)
    before = program.sim.leaks()
    program.ok("cuStreamBeginCapture", stream, GLOBAL)
    assert program.sim.cuMemAlloc(64) == (R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, None)
    assert program.status("cuMemFree", pointer) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    assert program.sim.leaks() == before
    program.status("cuStreamEndCapture", stream)
    program.ok("cuMemFree", pointer)


def test_the_capture_mode_is_each_threads_own(program: Program) -> None:
    exchange, seen = "cuThreadExchangeStreamCaptureMode", []
    assert program.ok(exchange, RELAXED) == GLOBAL
    in_threads(lambda: seen.append(program.ok(exchange, THREAD_LOCAL)))
    assert seen == [GLOBAL]
    assert program.ok(exchange, GLOBAL) == RELAXED


def test_a_capture_is_ended_by_the_thread_that_began_it_unless_it_is_relaxed(program: Program) -> None:
    def begin(stream: Any, mode: Any) -> None:
        program.ok("cuCtxPushCurrent", program.context)
        program.ok("cuStreamBeginCapture", stream, mode)

    for mode, status in (
        (GLOBAL, R.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD),
        (THREAD_LOCAL, R.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD),
        (RELAXED, R.CUDA_SUCCESS),
    ):
        stream = program.stream()
        in_threads(lambda stream=stream, mode=mode: begin(stream, mode))  # type: ignore[misc]
        assert program.status("cuStreamEndCapture", stream) == status


def test_a_captured_stream_that_is_destroyed_forbids_nothing_any_more(program: Program) -> None:
    stream = program.stream()
    program.ok("cuStreamBeginCapture", stream, GLOBAL)
    program.ok("cuStreamDestroy", stream)
    program.device(64)

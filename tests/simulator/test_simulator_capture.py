"""The simulated driver: capturing streams."""

from __future__ import annotations

from cuda.bindings import driver as cuda
from program import (
    LEGACY,
    Program,
    R,
    program_fixture,  # noqa: F401
)


def test_a_capturing_stream_records_instead_of_running(program: Program) -> None:
    stream, other, event = program.stream(), program.stream(), program.event()
    source, target = program.host(8, 1), program.device(8, 0)
    status = cuda.CUstreamCaptureStatus
    program.ok("cuStreamBeginCapture", stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    assert program.ok("cuStreamIsCapturing", stream) == status.CU_STREAM_CAPTURE_STATUS_ACTIVE
    program.ok("cuMemcpyAsync", target, source, 8, stream)
    assert program.batch([(target, source, 8)], stream) == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    program.ok("cuEventRecord", event, stream)
    assert program.status("cuEventQuery", event) == R.CUDA_ERROR_CAPTURED_EVENT
    assert program.ok("cuStreamIsCapturing", other) == status.CU_STREAM_CAPTURE_STATUS_NONE
    program.ok("cuStreamWaitEvent", other, event, 0)
    assert program.ok("cuStreamIsCapturing", other) == status.CU_STREAM_CAPTURE_STATUS_ACTIVE
    assert program.status("cuStreamEndCapture", other) == R.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
    assert program.status("cuStreamEndCapture", stream) == R.CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    assert program.ok("cuStreamIsCapturing", other) == status.CU_STREAM_CAPTURE_STATUS_NONE
    program.ok("cuStreamSynchronize", stream)
    assert (program.bytes(target, 8) == 0).all()


def test_a_joined_capture_ends_well_and_the_legacy_stream_is_unusable_meanwhile(program: Program) -> None:
    stream, other, events = program.stream(0), program.stream(), [program.event(), program.event()]
    program.ok("cuStreamBeginCapture", stream, 0)
    assert program.status("cuStreamIsCapturing", LEGACY) == R.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    assert program.status("cuEventRecord", events[0], LEGACY) == R.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    program.ok("cuEventRecord", events[0], stream)
    program.ok("cuStreamWaitEvent", other, events[0], 0)
    program.ok("cuEventRecord", events[1], other)
    program.ok("cuStreamWaitEvent", stream, events[1], 0)
    program.ok("cuStreamEndCapture", stream)

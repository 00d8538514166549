"""The simulated driver: streams, events, words in memory, full queues."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seeds
from simulator_program import LEGACY, PER_THREAD, Program, R

from kvoffload.simulator import SimulatorError


def test_nothing_runs_while_a_gate_is_shut(program: Program) -> None:
    source, target, stream = program.host(64, 1), program.device(64, 0), program.stream()
    release = program.gate(stream)
    program.ok("cuMemcpyAsync", target, source, 64, stream)
    for _ in range(50):
        assert program.status("cuStreamQuery", stream) == R.CUDA_ERROR_NOT_READY
    program.bytes(source, 64)[:] = 2  # read when the copy executes
    release()
    while program.status("cuStreamQuery", stream) != R.CUDA_SUCCESS:
        pass
    assert (program.bytes(target, 64) == 2).all()


def polls_until_done(program: Program, count: int) -> int:
    """How often a stream with so many functions in its queue is asked before it has called them all."""
    stream = program.stream()
    called: list[int] = []
    program.sim.scheduler.drift_probability = 0
    for number in range(count):
        program.sim.enqueue(stream, partial(called.append, number))
    polls = 1
    while program.status("cuStreamQuery", stream) != R.CUDA_SUCCESS:
        polls += 1
    assert called == list(range(count))
    return polls


@pytest.mark.parametrize("seed", seeds(5))
def test_a_program_that_only_waits_gets_there_sooner(seed: int) -> None:
    """And one that waits for little has asked about every third time in vain, as before."""
    assert polls_until_done(Program(seed=seed), 100) > 12
    assert polls_until_done(Program(seed=seed), 1000) < 150


@pytest.mark.parametrize(("condition", "word"), [(0, 5), (0, 6), (1, 5), (2, 4), (3, 0)])
def test_words_release_streams(program: Program, condition: int, word: int) -> None:
    waiting, writing = program.stream(), program.stream()
    address = program.host(4, 0xFF if condition == 3 else 0)
    program.ok("cuStreamWaitValue32", waiting, address, 5, condition)
    for _ in range(20):
        assert program.status("cuStreamQuery", waiting) == R.CUDA_ERROR_NOT_READY
    source = program.host(4)
    program.bytes(source, 4)[:] = [word, 0, 0, 0]
    program.ok("cuMemcpyAsync", cuda.CUdeviceptr(address), source, 4, writing)
    program.ok("cuStreamSynchronize", waiting)


def test_words_are_checked(program: Program) -> None:
    stream, address = program.stream(), program.host(8)
    assert program.status("cuStreamWaitValue32", stream, address + 2, 0, 0) == R.CUDA_ERROR_INVALID_VALUE
    assert program.status("cuStreamWaitValue32", stream, address + 8, 0, 0) == R.CUDA_ERROR_INVALID_VALUE
    program.sim.attributes[int(cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)] = 0
    assert program.status("cuStreamWaitValue32", stream, address, 0, 0) == R.CUDA_ERROR_NOT_SUPPORTED


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_events_order_streams_whatever_the_seed(seed: int) -> None:
    program = Program(seed=seed)
    first, second, event = program.stream(), program.stream(), program.event()
    trace: list[Any] = []
    for step in range(5):
        program.sim.enqueue(first, partial(trace.append, step))
    program.ok("cuEventRecord", event, first)
    program.sim.enqueue(first, lambda: trace.append("later"))
    program.ok("cuStreamWaitEvent", second, event, 0)
    program.ok("cuEventRecord", event, second)  # recording again does not move the wait
    program.sim.enqueue(second, lambda: trace.append("after"))
    program.ok("cuStreamSynchronize", second)
    assert trace[:5] == [0, 1, 2, 3, 4]
    assert "after" in trace


def test_unordered_streams_interleave_and_seeds_decide_how() -> None:
    def run(seed: int) -> tuple[str, ...]:
        program = Program(seed=seed)
        trace: list[str] = []
        for name in ("a", "b"):
            stream = program.stream()
            for _ in range(8):
                program.sim.enqueue(stream, partial(trace.append, name))
        program.ok("cuCtxSynchronize")
        return tuple(trace)

    traces = {run(seed) for seed in range(20)}
    assert len(traces) > 5
    assert run(3) == run(3)


def test_an_event_never_recorded_is_complete_and_holds_nothing(program: Program) -> None:
    stream, event = program.stream(), program.event()
    program.ok("cuStreamWaitEvent", stream, event, 0)
    program.ok("cuEventQuery", event)
    program.ok("cuEventSynchronize", event)
    assert program.sim.pending_operations() == 0


def test_elapsed_time_needs_two_finished_timing_events(program: Program) -> None:
    stream, start, end = program.stream(), program.event(), program.event()
    untimed = program.event(int(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    assert program.sim.cuEventElapsedTime(start, end) == (R.CUDA_ERROR_INVALID_HANDLE, None)
    release = program.gate(stream)
    program.ok("cuEventRecord", start, stream)
    program.ok("cuMemcpyAsync", program.device(1 << 16), program.host(1 << 16), 1 << 16, stream)
    for event in (end, untimed):
        program.ok("cuEventRecord", event, stream)
    assert program.status("cuEventElapsedTime", start, end) == R.CUDA_ERROR_NOT_READY
    release()
    program.ok("cuStreamSynchronize", stream)
    assert 0.001 < program.ok("cuEventElapsedTime", start, end) < 1
    assert program.status("cuEventElapsedTime", start, untimed) == R.CUDA_ERROR_INVALID_HANDLE


def test_the_legacy_stream_synchronises_with_blocking_streams_only(program: Program) -> None:
    blocking, free, trace = program.stream(0), program.stream(), []
    release = program.gate(blocking)
    program.sim.enqueue(LEGACY, lambda: trace.append("legacy"))
    program.sim.enqueue(PER_THREAD, lambda: trace.append("per-thread"))
    program.sim.enqueue(free, lambda: trace.append("free"))
    program.ok("cuStreamSynchronize", free)
    program.sim.run_all()
    assert trace == ["free"]
    assert program.status("cuStreamQuery", 0) == R.CUDA_ERROR_NOT_READY
    release()
    program.ok("cuStreamSynchronize", PER_THREAD)
    assert trace == ["free", "legacy", "per-thread"]


def test_a_synchronous_copy_waits_for_blocking_streams(program: Program) -> None:
    blocking, pointer, back = program.stream(0), program.device(8, 0), np.zeros(8, np.uint8)
    program.ok("cuMemsetD8Async", pointer, 3, 8, blocking)
    program.ok("cuMemcpyDtoH", back, pointer, 8)
    assert (back == 3).all()


def test_a_full_queue_holds_submissions_up() -> None:
    program = Program(queue_depth=4)
    stream, pointer = program.stream(), program.device(8)
    for _ in range(50):
        program.ok("cuMemsetD8Async", pointer, 0, 8, stream)
        assert program.sim.pending_operations() <= 4
    assert program.sim.blocked_submissions > 0


def test_a_wait_without_end_is_reported_instead_of_hanging() -> None:
    program = Program(queue_depth=4)
    stream, pointer = program.stream(), program.device(8)
    program.gate(stream)
    with pytest.raises(SimulatorError, match="deadlock"):
        program.sim.cuStreamSynchronize(stream)
    for _ in range(3):
        program.ok("cuMemsetD8Async", pointer, 0, 8, stream)
    with pytest.raises(SimulatorError, match="queue is full"):
        program.sim.cuMemsetD8Async(pointer, 0, 8, stream)
    assert program.sim.blocked_submissions == 1
    assert len(program.sim.violations) == 2


def test_another_thread_may_open_the_gate() -> None:
    program = Program(deadlock_seconds=10)
    stream = program.stream()
    release = program.gate(stream)

    def other() -> None:
        program.ok("cuCtxPushCurrent", program.context)  # the sleeping synchronise holds no lock
        program.ok("cuMemGetInfo")
        release()

    thread = threading.Timer(0.05, other)
    thread.start()
    program.ok("cuStreamSynchronize", stream)
    thread.join()


def test_destroying_a_busy_stream_lets_its_work_finish(program: Program) -> None:
    stream, event, pointer = program.stream(), program.event(), program.device(8, 0)
    release = program.gate(stream)
    program.ok("cuMemsetD8Async", pointer, 5, 8, stream)
    program.ok("cuEventRecord", event, stream)
    program.ok("cuStreamDestroy", stream)
    release()
    program.ok("cuCtxSynchronize")
    assert (program.bytes(pointer, 8) == 5).all()
    program.ok("cuEventQuery", event)


def test_use_after_destroy_is_found() -> None:
    program = Program(strict=False)
    stream, event = program.stream(), program.event()
    program.ok("cuStreamDestroy", stream)
    program.ok("cuEventDestroy", event)
    assert program.status("cuStreamQuery", stream) == R.CUDA_ERROR_INVALID_HANDLE
    assert program.status("cuEventDestroy", event) == R.CUDA_ERROR_INVALID_HANDLE
    assert program.status("cuEventQuery", 0x1234560) == R.CUDA_ERROR_INVALID_HANDLE  # never was one: only an error
    assert len(program.sim.violations) == 2


def test_events_close_together_are_no_time_apart(program: Program) -> None:
    stream, start, end = program.stream(), program.event(), program.event()
    program.ok("cuEventRecord", start, stream)
    program.ok("cuEventRecord", end, stream)
    program.ok("cuStreamSynchronize", stream)
    assert program.ok("cuEventElapsedTime", start, end) == 0


@pytest.mark.parametrize("per_thread", [False, True])
def test_handle_0_is_the_stream_that_the_environment_says(monkeypatch: pytest.MonkeyPatch, per_thread: bool) -> None:
    monkeypatch.setenv("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", str(int(per_thread)))
    program = Program()
    release = program.gate(program.stream(0))  # only the legacy stream waits for this one
    event = program.event()
    program.ok("cuEventRecord", event, 0)
    program.sim.run_all()
    assert (program.status("cuEventQuery", event) == R.CUDA_SUCCESS) == per_thread
    release()
    program.ok("cuEventRecord", event, LEGACY)
    program.ok("cuEventSynchronize", event)


def test_an_eager_device_is_done_before_the_call_returns(program: Program) -> None:
    program.sim.scheduler.drift_probability = 1
    stream, pointer = program.stream(), program.device(8, 0)
    for byte in range(20):
        program.ok("cuMemsetD8Async", pointer, byte, 8, stream)
        assert (program.bytes(pointer, 8) == byte).all()

"""The simulated driver: failures on demand."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from simulator_program import (
    ANY,
    ILLEGAL_ADDRESS,
    Program,
    R,
    program_fixture,  # noqa: F401
)

from kvoffload.simulator import space


def test_a_planned_call_fails_once_and_before_it_did_anything(program: Program) -> None:
    program.sim.faults.fail_call("cuStreamCreateWithPriority", nth=2, error=R.CUDA_ERROR_OUT_OF_MEMORY)
    program.stream()
    assert program.sim.cuStreamCreateWithPriority(1, 0) == (R.CUDA_ERROR_OUT_OF_MEMORY, None)
    program.stream()
    assert program.sim.leaks()["streams"] == 2
    assert program.sim.call_count["cuStreamCreateWithPriority"] == 3


def test_a_planned_call_can_fail_after_its_work(program: Program) -> None:
    pointer = program.device(8)
    program.sim.faults.fail_call("cuMemFree", after=True)
    assert program.status("cuMemFree", pointer) == R.CUDA_ERROR_UNKNOWN
    assert program.sim.leaks()["device_allocations"] == 0


def test_any_nth_call_fails_and_calls_can_be_logged(program: Program) -> None:
    faults = program.sim.faults
    faults.calls = []
    faults.fail_nth(2)
    faults.fail_nth(3, error=R.CUDA_ERROR_OUT_OF_MEMORY)
    assert program.status("cuMemGetInfo") == R.CUDA_SUCCESS
    assert program.status("cuEventCreate", 0) == R.CUDA_ERROR_UNKNOWN
    assert program.status("cuEventCreate", 1) == R.CUDA_ERROR_OUT_OF_MEMORY
    assert faults.calls == [("cuMemGetInfo", ()), ("cuEventCreate", (0,)), ("cuEventCreate", (1,))]
    faults.fail_nth(1)
    faults.clear()
    assert program.status("cuMemGetInfo") == R.CUDA_SUCCESS
    with pytest.raises(ValueError, match="counts from 1"):
        faults.fail_nth(0)


def test_delays_hold_no_lock(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep, go_on = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        assert seconds == 0.2
        asleep.set()
        assert go_on.wait(60)

    monkeypatch.setattr(time, "sleep", sleep)
    program.sim.faults.delay("cuMemGetInfo", 0.2)
    thread = threading.Thread(target=program.sim.cuMemGetInfo)
    thread.start()
    assert asleep.wait(60)
    program.event()  # would wait for the lock
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()


def test_a_sticky_error_lasts_until_the_context_is_gone(program: Program) -> None:
    other = program.ok("cuCtxCreate", None, 0, 0)
    stream, event, pointer = program.stream(), program.event(), program.device(8)
    program.ok("cuMemsetD8Async", pointer, 1, 8, stream)
    program.ok("cuEventRecord", event, stream)
    program.sim.run_all()
    program.sim.faults.sticky()
    program.sim.cuMemsetD8Async(pointer, 2, 8, stream)
    program.sim.run_all()
    assert program.sim.pending_operations() == 0
    for name, *arguments in (
        ("cuStreamQuery", stream),
        ("cuMemFree", pointer),
        ("cuEventQuery", event),
        ("cuEventCreate", 0),
    ):
        assert program.status(name, *arguments) == ILLEGAL_ADDRESS
    program.ok("cuCtxPopCurrent")
    program.ok("cuMemGetInfo")  # the other context is well
    program.ok("cuCtxDestroy", other)
    assert program.sim.leaks()["device_allocations"] == 0


def test_a_context_can_be_lost_at_a_call(program: Program) -> None:
    program.sim.faults.sticky(at_call=2)
    program.ok("cuMemGetInfo")
    assert program.status("cuMemGetInfo") == ILLEGAL_ADDRESS
    assert program.status("cuMemGetInfo") == ILLEGAL_ADDRESS


def test_a_faulting_copy_leaves_half_a_target_and_a_lost_context(program: Program) -> None:
    source, target, stream = program.host(64, 1), program.device(64, 0), program.stream()
    waiting, event = program.stream(), program.event()
    view = program.bytes(target, 64)
    program.sim.faults.fail_operation(2)
    program.ok("cuMemcpyAsync", program.device(64), source, 64, stream)
    program.sim.cuMemcpyAsync(target, source, 64, stream)
    program.sim.cuEventRecord(event, stream)
    program.sim.cuStreamWaitEvent(waiting, event, 0)
    assert program.status("cuStreamSynchronize", waiting) == ILLEGAL_ADDRESS
    assert 0 < view.sum() < 64
    assert program.sim.pending_operations() == 0


def test_a_dropped_copy_never_reads_its_source_early(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, stream = program.host(64), program.device(64), program.stream()
    program.gate(stream)
    program.sim.scheduler.drift_probability = 0
    for _ in range(20):  # every third is to be read early
        assert program.batch([(target, source, 64)], stream, ANY) == R.CUDA_SUCCESS
    reads: list[Any] = []
    monkeypatch.setattr(space, "rows", lambda *given: reads.append(given))
    program.sim.faults.sticky(at_call=1)
    assert program.status("cuMemGetInfo") == ILLEGAL_ADDRESS
    for _ in range(64):
        program.sim.scheduler.step()
    assert reads == []  # by now the source may be unmapped: reading it would end the process
    assert program.sim.pending_operations() == 0

"""The simulated driver: failures on demand."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from seeds import seeds
from simulator_program import ANY, ILLEGAL_ADDRESS, Program, R, strided_operation

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


def batch_that_fails(program: Program, blocks: int = 8) -> list[int]:
    """Which of the blocks of a batch that fails on demand are copied."""
    source, target, stream = program.host(64 * blocks, 1), program.device(64 * blocks, 0), program.stream()
    program.sim.faults.fail_call("cuMemcpyBatchAsync", error=R.CUDA_ERROR_OUT_OF_MEMORY)
    triples = [(int(target) + 64 * at, source + 64 * at, 64) for at in range(blocks)]
    assert program.batch(triples, stream) == R.CUDA_ERROR_OUT_OF_MEMORY
    program.ok("cuStreamSynchronize", stream)
    rows = program.bytes(target, 64 * blocks).reshape(blocks, 64).copy()
    assert (rows == rows[:, :1]).all()
    assert program.batch(triples, stream) == R.CUDA_SUCCESS
    program.ok("cuStreamSynchronize", stream)
    return [at for at in range(blocks) if rows[at, 0]]


def test_with_one_seed_of_four_a_batch_that_fails_has_copied_a_part() -> None:
    copied = {seed: batch_that_fails(Program(seed=seed)) for seed in seeds(64)}
    assert all(entries == list(range(len(entries))) for entries in copied.values())
    some = {seed: len(entries) for seed, entries in copied.items() if entries}
    assert {seed % 4 for seed in some} == {1}
    assert len(set(some.values())) > 4


def test_a_partial_copy_can_be_asked_for_and_happens_in_every_kind_of_batch(seed: int) -> None:
    program = Program(seed=seed, bindings_version=(13, 5))
    faults = program.sim.faults
    faults.partial = True
    source, target, stream = program.host(64, 1), program.device(64, 0), program.stream()
    for _ in range(8):
        faults.fail_call("cuMemcpy3DBatchAsync")
        operations = [strided_operation(int(target) + 8 * at, source + 8 * at, 4, 2, 4, 4) for at in range(8)]
        assert program.strided(operations, stream) == R.CUDA_ERROR_UNKNOWN
    program.ok("cuStreamSynchronize", stream)
    copied = program.bytes(target, 64).reshape(8, 8).all(axis=1).tolist()
    assert copied == sorted(copied, reverse=True)
    assert copied[0]
    assert not copied[7]


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

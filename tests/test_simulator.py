"""The simulated driver: each rule that the product's tests lean on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.driver import functions
from kvoffload.driver.simulator import (
    DriverError,
    FunctionNotFoundError,
    SimulatedDriver,
    SimulatorError,
    copies,
    memory,
    space,
)

R = cuda.CUresult
ORDER = cuda.CUmemcpySrcAccessOrder
STREAM = ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
DURING_API_CALL = ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL
ANY = ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
NON_BLOCKING = 1
LEGACY = 1
PER_THREAD = 2
ILLEGAL_ADDRESS = R.CUDA_ERROR_ILLEGAL_ADDRESS


class Program:
    """A simulated driver with a current context, and its calls as plain functions that must succeed."""

    def __init__(self, **options: Any) -> None:
        self.sim = SimulatedDriver(**{"deadlock_seconds": 0.05, **options})
        self.ok("cuInit", 0)
        self.context = self.ok("cuDevicePrimaryCtxRetain", 0)
        self.ok("cuCtxPushCurrent", self.context)

    def ok(self, name: str, *args: Any) -> Any:
        status, *values = getattr(self.sim, name)(*args)
        assert status == R.CUDA_SUCCESS, (name, status)
        return values[0] if len(values) == 1 else tuple(values)

    def status(self, name: str, *args: Any) -> Any:
        return getattr(self.sim, name)(*args)[0]

    def stream(self, flags: int = NON_BLOCKING) -> Any:
        return self.ok("cuStreamCreateWithPriority", flags, 0)

    def event(self, flags: int = 0) -> Any:
        return self.ok("cuEventCreate", flags)

    def device(self, nbytes: int, fill: int | None = None) -> Any:
        pointer = self.ok("cuMemAlloc", nbytes)
        if fill is not None:
            self.bytes(pointer, nbytes)[:] = fill
        return pointer

    def host(self, nbytes: int, fill: int | None = None) -> int:
        address = int(self.ok("cuMemHostAlloc", nbytes, 0))
        if fill is not None:
            self.bytes(address, nbytes)[:] = fill
        return address

    def bytes(self, pointer: Any, nbytes: int) -> Any:
        return self.sim.view(pointer, nbytes)

    def gate(self, stream: Any) -> Callable[[], None]:
        """Hold a stream until the returned function is called."""
        word = self.bytes(self.host(4, 0), 4)
        self.ok("cuStreamWaitValue32", stream, address_of(word), 1, 0)
        return lambda: word.view(np.uint32).fill(1)

    def batch(self, triples: list[tuple[Any, Any, int]], stream: Any, order: Any = STREAM) -> Any:
        targets, sources = (
            [cuda.CUdeviceptr(int(each)) for each in side] for side in list(zip(*triples, strict=True))[:2]
        )
        sizes = [nbytes for *_, nbytes in triples]
        count = len(triples)
        return self.status("cuMemcpyBatchAsync", targets, sources, sizes, count, [attributes(order)], [0], 1, stream)

    def strided(self, operations: list[Any], stream: Any) -> Any:
        return self.status("cuMemcpy3DBatchAsync", len(operations), operations, 0, stream)


def address_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def attributes(order: Any) -> Any:
    made = cuda.CUmemcpyAttributes()
    made.srcAccessOrder = order
    return made


def strided_operation(
    target: Any, source: Any, width: int, height: int, target_pitch: int, source_pitch: int, order: Any = STREAM
) -> Any:
    operation = cuda.CUDA_MEMCPY3D_BATCH_OP()
    for operand, pointer, pitch in ((operation.src, source, source_pitch), (operation.dst, target, target_pitch)):
        operand.type = cuda.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
        operand.op.ptr.ptr = int(pointer)
        operand.op.ptr.rowLength = pitch
    operation.extent.width, operation.extent.height, operation.extent.depth = width, height, 1
    operation.srcAccessOrder = order
    return operation


def rectangle(target: Any, source: Any, width: int, height: int, target_pitch: int, source_pitch: int) -> Any:
    made = cuda.CUDA_MEMCPY2D()
    made.srcMemoryType = made.dstMemoryType = cuda.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    made.srcDevice, made.dstDevice = cuda.CUdeviceptr(int(source)), cuda.CUdeviceptr(int(target))
    made.srcPitch, made.dstPitch = source_pitch, target_pitch
    made.WidthInBytes, made.Height = width, height
    return made


@pytest.fixture
def program() -> Program:
    return Program()


# Surface


def test_offers_every_function_of_the_seam() -> None:
    simulated = SimulatedDriver(bindings_version=(13, 5))
    assert [name for name in functions.REQUIRED + functions.OPTIONAL if not hasattr(simulated, name)] == []
    assert [name for name in functions.RAW if not hasattr(simulated.raw, name)] == []
    assert SimulatedDriver().raw is None


def test_describes_a_device(program: Program) -> None:
    sim = program.sim
    assert program.ok("cuDriverGetVersion") == 13000
    assert program.ok("cuDeviceGetCount") == 1
    assert program.ok("cuDeviceGetName", 64, 0).startswith(b"NVIDIA simulated GPU\0")
    assert program.ok("cuDeviceGetPCIBusId", 32, 0).startswith(b"0000:01:00.0\0")
    major = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    assert program.ok("cuDeviceGetAttribute", major, cuda.CUdevice(0)) == 9
    assert program.ok("cuDeviceGetAttribute", cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED, 0) == 0
    assert sim.cuDeviceGet(1) == (R.CUDA_ERROR_INVALID_DEVICE, None)
    assert program.ok("cuCtxGetStreamPriorityRange") == (0, -5)


def test_structures_are_laid_out_as_the_installed_bindings_lay_them_out() -> None:
    operation = strided_operation(0x22, 0x11, 3, 4, 6, 5, ANY)
    operation.src.op.ptr.layerHeight, operation.dst.op.ptr.layerHeight, operation.flags = 7, 8, 1
    (seen,) = copies.structures([int(operation.getPtr())], copies.OPERATION_DTYPE)
    assert seen.tolist() == (1, 0x11, 5, 7, 1, 0x22, 6, 8, 3, 4, 1, int(ANY), 1)

    made = rectangle(0x22, 0x11, 3, 4, 6, 5)
    made.srcHost, made.dstHost = 0x33, 0x44
    made.srcXInBytes, made.srcY, made.dstXInBytes, made.dstY = 9, 10, 11, 12
    (seen,) = copies.structures([int(made.getPtr())], copies.RECTANGLE_DTYPE)
    assert seen.tolist() == (9, 10, 4, 0x33, 0x11, 5, 11, 12, 4, 0x44, 0x22, 6, 3, 4)
    assert (copies.OPERATION_DTYPE.itemsize, copies.RECTANGLE_DTYPE.itemsize) == (112, 128)
    assert copies.order_at(int(attributes(DURING_API_CALL).getPtr())) == int(DURING_API_CALL)


# Context rules


def test_calls_need_cuinit_then_a_context() -> None:
    sim = SimulatedDriver()
    assert sim.cuDeviceGetCount() == (R.CUDA_ERROR_NOT_INITIALIZED, None)
    sim.cuInit(0)
    assert sim.cuMemGetInfo() == (R.CUDA_ERROR_INVALID_CONTEXT, None, None)
    assert int(sim.cuCtxGetCurrent()[1]) == 0


def test_context_stacks_belong_to_threads(program: Program) -> None:
    seen = []
    thread = threading.Thread(target=lambda: seen.append(program.status("cuEventCreate", 0)))
    thread.start()
    thread.join()
    assert seen == [R.CUDA_ERROR_INVALID_CONTEXT]
    assert program.ok("cuCtxGetCurrent") == program.context
    assert program.ok("cuCtxPopCurrent") == program.context
    assert program.status("cuCtxPopCurrent") == R.CUDA_ERROR_INVALID_CONTEXT


@pytest.mark.parametrize(("bindings", "arguments"), [((12, 9), (0, 0)), ((13, 3), (None, 0, 0))])
def test_made_contexts_take_their_contents_with_them(bindings: tuple[int, int], arguments: tuple[Any, ...]) -> None:
    program = Program(bindings_version=bindings)
    own = program.ok("cuCtxCreate", *arguments)
    stream = program.stream()
    program.device(16)
    assert program.ok("cuStreamGetCtx", stream) == own
    with pytest.raises(TypeError):
        program.sim.cuCtxCreate(*arguments, 0)
    program.ok("cuCtxDestroy", own)
    assert program.ok("cuCtxGetCurrent") == program.context
    assert program.status("cuCtxPushCurrent", own) == R.CUDA_ERROR_CONTEXT_IS_DESTROYED
    assert {kind: n for kind, n in program.sim.leaks().items() if n} == {"primary_retains": 1}


def test_releasing_the_primary_context_does_not_hide_what_was_left_in_it(program: Program) -> None:
    program.stream()
    program.host(8)
    program.ok("cuDevicePrimaryCtxRelease", 0)
    assert {kind: n for kind, n in program.sim.leaks().items() if n} == {"streams": 1, "host_allocations": 1}
    assert program.status("cuMemGetInfo") == R.CUDA_ERROR_CONTEXT_IS_DESTROYED


def test_streams_and_events_of_two_contexts_do_not_mix(program: Program) -> None:
    event, stream = program.event(), program.stream()
    source, target = program.host(8), program.device(8)
    own = program.ok("cuCtxCreate", None, 0, 0)
    assert program.status("cuEventRecord", event, program.stream()) == R.CUDA_ERROR_INVALID_HANDLE
    assert program.status("cuMemcpyAsync", target, source, 8, stream) == R.CUDA_ERROR_INVALID_HANDLE
    program.ok("cuEventRecord", event, stream)
    program.ok("cuStreamWaitEvent", program.stream(), event, 0)  # waiting across contexts is what events are for
    program.ok("cuCtxSynchronize")
    program.ok("cuCtxDestroy", own)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_gets_errors_and_no_deadlock(program: Program) -> None:
    with program.sim.lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if program.status("cuMemGetInfo") == R.CUDA_ERROR_NOT_INITIALIZED else 1)
    assert os.waitpid(child, 0)[1] == 0


# Memory


def test_allocations_are_exact_aligned_and_poisoned(program: Program) -> None:
    pointer, address = program.device(1000), program.host(1000)
    assert int(pointer) % 512 == 0
    assert address % 4096 == 0
    assert (program.bytes(pointer, 1000) == memory.FRESH_BYTE).all()
    assert program.ok("cuMemGetAddressRange", int(pointer) + 999)[1] == 1000
    assert program.status("cuMemGetAddressRange", int(pointer) + 1000) == R.CUDA_ERROR_NOT_FOUND
    free, total = program.ok("cuMemGetInfo")
    assert total - free == 1000


def test_freed_memory_is_poisoned_and_its_address_refused(program: Program) -> None:
    pointer, other = program.device(64), program.device(64)
    view = program.bytes(pointer, 64)
    program.ok("cuMemFree", pointer)
    assert (view == memory.FREED_BYTE).all()
    assert program.status("cuMemFree", pointer) == R.CUDA_ERROR_INVALID_VALUE
    assert program.status("cuMemcpyAsync", other, pointer, 64, program.stream()) == R.CUDA_ERROR_INVALID_VALUE


def test_a_write_beside_an_allocation_is_found(program: Program) -> None:
    pointer = program.device(100)
    beyond = space.view(int(pointer) + 100, 1)
    beyond[:] = 0
    with pytest.raises(SimulatorError, match="overwritten"):
        program.sim.check_guards()
    with pytest.raises(SimulatorError, match="overwritten"):
        program.sim.cuMemFree(pointer)
    beyond[:] = memory.GUARD_BYTE
    program.ok("cuMemFree", pointer)


def test_memory_has_limits() -> None:
    program = Program(memory_bytes=1000, max_register_bytes=8192, pinnable_bytes=10_000)
    program.device(900)
    assert program.sim.cuMemAlloc(101) == (R.CUDA_ERROR_OUT_OF_MEMORY, None)
    assert program.status("cuMemAlloc", 0) == R.CUDA_ERROR_INVALID_VALUE
    array = np.zeros(16_384, np.uint8)
    assert program.status("cuMemHostRegister", address_of(array), 8193, 0) == R.CUDA_ERROR_INVALID_VALUE
    program.host(9000)
    assert program.status("cuMemHostRegister", address_of(array), 4096, 0) == R.CUDA_ERROR_OUT_OF_MEMORY
    assert program.sim.cuMemHostAlloc(1001, 0) == (R.CUDA_ERROR_OUT_OF_MEMORY, None)


def test_pages_register_once(program: Program) -> None:
    array = np.zeros(5 * 4096, np.uint8)
    address = -(-address_of(array) // 4096) * 4096
    program.ok("cuMemHostRegister", address, 5000, 0)
    assert program.status("cuMemHostRegister", address + 8000, 10, 0) == R.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    program.ok("cuMemHostRegister", address + 8192, 10, 0)
    assert program.status("cuMemHostUnregister", address + 1) == R.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
    assert int(program.ok("cuMemHostGetDevicePointer", address, 0)) == address
    assert program.sim.leaks()["registered_ranges"] == 2
    for start in (address, address + 8192):
        program.ok("cuMemHostUnregister", start)
    assert program.sim.leaks()["registered_ranges"] == 0


def test_a_copy_may_not_span_two_registered_ranges(program: Program) -> None:
    array = np.zeros(4 * 4096, np.uint8)
    address = -(-address_of(array) // 4096) * 4096
    target, stream = program.device(8192), program.stream()
    for start in (address, address + 4096):
        program.ok("cuMemHostRegister", start, 4096, 0)
    assert program.status("cuMemcpyAsync", target, address, 8192, stream) == R.CUDA_ERROR_INVALID_VALUE
    assert program.batch([(target, address, 8192)], stream) == R.CUDA_ERROR_INVALID_VALUE
    assert program.batch([(target, address + 4096, 4096)], stream) == R.CUDA_SUCCESS


def test_pageable_copies_are_staged_and_counted(program: Program) -> None:
    source, back = np.full(64, 7, np.uint8), np.zeros(64, np.uint8)
    pointer, stream = program.device(64), program.stream()
    release = program.gate(stream)
    program.ok("cuMemcpyAsync", pointer, address_of(source), 64, stream)
    source[:] = 9
    release()
    program.ok("cuMemcpyAsync", address_of(back), pointer, 64, stream)  # over when it returns
    assert (back == 7).all()
    program.ok("cuMemcpyHtoD", pointer, source, 64)
    program.ok("cuMemcpyDtoH", back, pointer, 64)
    assert (back == 9).all()
    assert program.sim.pageable_copies == 4


def test_a_wild_address_is_an_error_not_a_crash(program: Program) -> None:
    pointer, stream = program.device(64), program.stream()
    for wild in (0, 0x10, 1 << 46, int(pointer) - 8, int(pointer) + 8, (1 << 64) - 8):
        assert program.status("cuMemcpyAsync", pointer, wild, 64, stream) == R.CUDA_ERROR_INVALID_VALUE
        assert program.batch([(pointer, wild, 64)], stream) == R.CUDA_ERROR_INVALID_VALUE
    assert program.sim.pending_operations() == 0
    program.ok("cuStreamSynchronize", stream)  # nothing of it is sticky


# Order and time


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


@pytest.mark.parametrize(("condition", "word"), [(0, 5), (0, 6), (1, 5), (2, 4), (3, 0)])
def test_words_release_streams_and_streams_write_words(program: Program, condition: int, word: int) -> None:
    waiting, writing = program.stream(), program.stream()
    address = program.host(4, 0xFF if condition == 3 else 0)
    program.ok("cuStreamWaitValue32", waiting, address, 5, condition)
    for _ in range(20):
        assert program.status("cuStreamQuery", waiting) == R.CUDA_ERROR_NOT_READY
    program.ok("cuStreamWriteValue32", writing, cuda.CUdeviceptr(address), cuda.cuuint32_t(word), 0)
    program.ok("cuStreamSynchronize", waiting)


def test_words_are_checked(program: Program) -> None:
    stream, address = program.stream(), program.host(8)
    assert program.status("cuStreamWaitValue32", stream, address + 2, 0, 0) == R.CUDA_ERROR_INVALID_VALUE
    assert program.status("cuStreamWaitValue32", stream, address + 8, 0, 0) == R.CUDA_ERROR_INVALID_VALUE
    program.sim.attributes[int(cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1)] = 0
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


# Copies


def carried(program: Program, order: Any) -> bool:
    """Whether a gated batch copy carried bytes written after its submission."""
    source, target, stream = program.host(64, 1), program.device(64), program.stream()
    release = program.gate(stream)
    assert program.batch([(target, source, 64)], stream, order) == R.CUDA_SUCCESS
    program.status("cuStreamQuery", stream)
    program.bytes(source, 64)[:] = 2
    release()
    program.ok("cuStreamSynchronize", stream)
    (value,) = set(program.bytes(target, 64).tolist())
    return bool(value == 2)


def test_access_order_stream_reads_when_the_copy_runs() -> None:
    assert all(carried(Program(seed=seed), STREAM) for seed in range(20))


def test_access_order_during_api_call_reads_at_submission() -> None:
    assert not any(carried(Program(seed=seed), DURING_API_CALL) for seed in range(20))


def test_access_order_any_may_read_at_any_moment() -> None:
    assert {carried(Program(seed=seed), ANY) for seed in range(20)} == {True, False}


@pytest.mark.parametrize("order", [ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_INVALID, ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_MAX])
def test_an_invalid_access_order_is_refused(program: Program, order: Any) -> None:
    source, target, stream = program.host(64), program.device(64), program.stream()
    assert program.batch([(target, source, 64)], stream, order) == R.CUDA_ERROR_INVALID_VALUE
    assert program.strided([strided_operation(target, source, 8, 2, 8, 8, order)], stream) == R.CUDA_ERROR_INVALID_VALUE


def test_each_copy_of_a_batch_has_the_order_of_its_attribute(program: Program) -> None:
    source, target, stream = program.host(64, 1), program.device(64), program.stream()
    release = program.gate(stream)
    pointers = [[cuda.CUdeviceptr(int(base) + 16 * i) for i in range(4)] for base in (target, source)]
    given = [attributes(STREAM), attributes(DURING_API_CALL)]
    program.ok("cuMemcpyBatchAsync", *pointers, [16] * 4, 4, given, [0, 3], 2, stream)
    program.bytes(source, 64)[:] = 2
    release()
    program.ok("cuStreamSynchronize", stream)
    assert program.bytes(target, 64).tolist() == [2] * 48 + [1] * 16
    for indices in ([1, 3], [0, 0], [0, 4]):
        arguments = (*pointers, [16] * 4, 4, given, indices, 2, stream)
        assert program.status("cuMemcpyBatchAsync", *arguments) == R.CUDA_ERROR_INVALID_VALUE


def test_batches_refuse_what_the_bindings_refuse(program: Program) -> None:
    call: Callable[..., Any] = program.sim.cuMemcpyBatchAsync
    stream = program.stream()
    pointers, given = [cuda.CUdeviceptr(8)], [attributes(STREAM)]
    for arguments in (
        ([8], pointers, [8], 1, given, [0], 1),
        (pointers, pointers, [8.0], 1, given, [0], 1),
        (pointers, pointers, [np.int64(8)], 1, given, [0], 1),
        (pointers, pointers, [8], 1, [STREAM], [0], 1),
    ):
        with pytest.raises(TypeError):
            call(*arguments, stream)
    with pytest.raises(RuntimeError, match="too small"):
        call(pointers, pointers, [8], 2, given, [0], 1, stream)
    with pytest.raises(TypeError):
        program.sim.cuMemcpy3DBatchAsync(1, [3], 0, stream)
    with pytest.raises(TypeError):
        program.sim.cuMemcpy2DAsync(3, stream)


def test_batches_refuse_the_legacy_stream_empty_copies_and_no_copies(program: Program) -> None:
    source, target, stream = program.host(64), program.device(64), program.stream()
    for handle in (0, LEGACY):
        assert program.batch([(target, source, 64)], handle) == R.CUDA_ERROR_INVALID_VALUE
        assert program.strided([strided_operation(target, source, 8, 2, 8, 8)], handle) == R.CUDA_ERROR_INVALID_VALUE
    assert program.batch([(target, source, 64)], PER_THREAD) == R.CUDA_SUCCESS
    assert program.batch([(target, source, 0)], stream) == R.CUDA_ERROR_INVALID_VALUE
    assert program.strided([strided_operation(target, source, 8, 0, 8, 8)], stream) == R.CUDA_ERROR_INVALID_VALUE
    assert program.strided([], stream) == R.CUDA_ERROR_INVALID_VALUE
    assert program.status("cuMemcpyBatchAsync", [], [], [], 0, [], [], 0, stream) == R.CUDA_ERROR_INVALID_VALUE


def test_strided_rows_stay_inside_one_allocation(program: Program) -> None:
    source, stream = program.host(4096), program.stream()
    first, second = sorted(int(program.device(1024)) for _ in range(2))
    good = strided_operation(first, source, 64, 4, 256, 64)
    crossing = strided_operation(first, source, 64, 2, second - first, 64)
    past_end = strided_operation(first, source, 64, 5, 256, 64)
    narrow = strided_operation(first, source, 64, 2, 63, 64)
    for bad in (crossing, past_end, narrow):
        assert program.strided([good, bad], stream) == R.CUDA_ERROR_INVALID_VALUE
    for bad in ((second - first, 2), (256, 5), (63, 2)):
        made = rectangle(first, source, 64, bad[1], bad[0], 64)
        assert program.status("cuMemcpy2DAsync", made, stream) == R.CUDA_ERROR_INVALID_VALUE
    assert program.sim.pending_operations() == 0  # nothing of a refused call is copied
    assert program.strided([good], stream) == R.CUDA_SUCCESS


def test_a_rectangle_honours_offsets_and_memory_types(program: Program) -> None:
    source, target, stream = program.host(256), program.device(256, 0), program.stream()
    program.bytes(source, 256)[:] = np.arange(256)
    made = rectangle(target, 0, 4, 3, 16, 32)
    made.srcMemoryType, made.srcHost = cuda.CUmemorytype.CU_MEMORYTYPE_HOST, source
    made.srcXInBytes, made.srcY, made.dstXInBytes, made.dstY = 8, 2, 1, 5
    program.ok("cuMemcpy2DAsync", made, stream)
    program.ok("cuStreamSynchronize", stream)
    expected = np.zeros((16, 16), np.uint8)
    expected[5:8, 1:5] = np.arange(256).reshape(8, 32)[2:5, 8:12]
    assert (program.bytes(target, 256) == expected.reshape(-1)).all()
    made.srcHost = int(target)
    assert program.status("cuMemcpy2DAsync", made, stream) == R.CUDA_ERROR_INVALID_VALUE


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(["strided", "2d", "batch", "loop"]), st.sampled_from([STREAM, ANY]))
def test_every_copy_call_moves_the_bytes_of_a_naive_loop(data: st.DataObject, way: str, order: Any) -> None:
    program = Program(seed=data.draw(st.integers(0, 99)))
    blocks, width, height = (data.draw(st.integers(1, 4)) for _ in range(3))
    pitch = width * blocks
    shuffled = data.draw(st.permutations(range(blocks)))
    source, target, stream = program.host(pitch * height), program.device(pitch * height, 0), program.stream()
    grid = np.random.default_rng(0).integers(1, 255, (height, blocks, width), np.uint8)
    program.bytes(source, pitch * height)[:] = grid.reshape(-1)
    starts = [(int(target) + to * width, source + at * width) for at, to in enumerate(shuffled)]
    rows = [(to + r * pitch, at + r * pitch, width) for to, at in starts for r in range(height)]
    if way == "strided":
        made = [strided_operation(to, at, width, height, pitch, pitch, order) for to, at in starts]
        assert program.strided(made, stream) == R.CUDA_SUCCESS
    elif way == "2d":
        for to, at in starts:
            program.ok("cuMemcpy2DAsync", rectangle(to, at, width, height, pitch, pitch), stream)
    elif way == "batch":
        assert program.batch(rows, stream, order) == R.CUDA_SUCCESS
    else:
        for to, at, nbytes in rows:
            program.ok("cuMemcpyAsync", to, at, nbytes, stream)
    program.ok("cuStreamSynchronize", stream)
    expected = np.empty_like(grid)
    expected[:, shuffled] = grid
    assert (program.bytes(target, pitch * height) == expected.reshape(-1)).all()
    program.sim.check_guards()


@pytest.mark.parametrize("flat", [True, False])
def test_overlapping_targets_in_one_batch_are_found(program: Program, flat: bool) -> None:
    source, target, stream = program.host(256), program.device(256), program.stream()
    interleaved = [strided_operation(int(target) + 8 * i, source, 8, 4, 32, 8) for i in range(4)]
    assert program.strided(interleaved, stream) == R.CUDA_SUCCESS
    with pytest.raises(SimulatorError, match="overlap"):  # noqa: PT012
        if flat:
            program.batch([(target, source, 64), (int(target) + 63, source, 64)], stream)
        else:
            program.strided([interleaved[0], strided_operation(int(target) + 7, source, 8, 4, 32, 8)], stream)


def test_a_target_that_is_also_a_source_is_found(program: Program) -> None:
    pointer, stream = int(program.device(256)), program.stream()
    assert program.batch([(pointer, pointer + 128, 64), (pointer + 64, pointer + 192, 64)], stream) == R.CUDA_SUCCESS
    with pytest.raises(SimulatorError, match="also a source"):
        program.batch([(pointer, pointer + 64, 64), (pointer + 64, pointer + 128, 64)], stream)
    with pytest.raises(SimulatorError, match="overlap"):
        program.sim.cuMemcpyAsync(pointer, pointer + 8, 64, stream)


@pytest.mark.parametrize("kind", ["device", "host", "registered"])
def test_freeing_under_a_queued_copy_is_found(program: Program, kind: str) -> None:
    array = np.zeros(64, np.uint8)
    source, target, stream = program.host(64), program.device(64), program.stream()
    free = {"device": ("cuMemFree", target), "host": ("cuMemFreeHost", source)}.get(kind)
    if free is None:
        source = address_of(array)
        program.ok("cuMemHostRegister", source, 64, 0)
        free = ("cuMemHostUnregister", source)
    release = program.gate(stream)
    program.ok("cuMemcpyAsync", target, source, 64, stream)
    with pytest.raises(SimulatorError, match="freed while"):
        getattr(program.sim, free[0])(free[1])
    release()
    program.ok("cuStreamSynchronize", stream)
    program.ok(*free)


def test_without_strict_a_late_copy_reads_poison() -> None:
    program = Program(strict=False)
    source, target, stream = program.host(64, 1), program.device(64), program.stream()
    release = program.gate(stream)
    program.ok("cuMemcpyAsync", target, source, 64, stream)
    program.ok("cuMemFreeHost", source)
    release()
    program.ok("cuStreamSynchronize", stream)
    assert (program.bytes(target, 64) == memory.FREED_BYTE).all()
    assert len(program.sim.violations) == 1


def test_a_kernel_may_not_touch_unpinned_memory(program: Program) -> None:
    array, stream, ran = np.zeros(64, np.uint8), program.stream(), []
    event = program.event()
    pinned = program.host(64)
    program.sim.enqueue(stream, lambda: ran.append(1), reads=[(pinned, 64)], writes=[(int(program.device(8)), 8)])
    program.ok("cuStreamSynchronize", stream)
    program.sim.enqueue(stream, lambda: ran.append(2), reads=[(address_of(array), 64)])
    assert program.status("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS
    assert program.status("cuEventRecord", event, stream) == ILLEGAL_ADDRESS
    assert ran == [1]


# Capture


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


# Capability levels


@pytest.mark.parametrize(
    ("bindings", "driver", "works"),
    [((12, 9), (12, 7), False), ((12, 9), (12, 8), True), ((13, 3), (12, 9), False), ((13, 3), (13, 0), True)],
)
def test_batch_calls_by_version(bindings: tuple[int, int], driver: tuple[int, int], works: bool) -> None:
    program = Program(bindings_version=bindings, driver_version=driver)
    source, target, stream = program.host(64), program.device(64), program.stream()
    arguments = ([target], [cuda.CUdeviceptr(source)], [64], 1, [attributes(STREAM)], [0], 1, stream)
    operation = strided_operation(target, source, 8, 2, 8, 8)
    if not works:
        with pytest.raises(FunctionNotFoundError):
            program.sim.cuMemcpyBatchAsync(*arguments)
        with pytest.raises(RuntimeError):
            program.strided([operation], stream)
        return
    extra = 1 if bindings < (13, 0) else 0
    assert program.sim.cuMemcpyBatchAsync(*arguments) == (R.CUDA_SUCCESS, *(0,) * extra)
    assert program.sim.cuMemcpyBatchAsync(*arguments[:-1], 0) == (R.CUDA_ERROR_INVALID_VALUE, *(None,) * extra)
    assert len(program.sim.cuMemcpy3DBatchAsync(1, [operation], 0, stream)) == 1 + extra


def test_raw_calls_take_addresses_and_raise() -> None:
    program = Program(bindings_version=(13, 5))
    raw, stream = program.sim.raw, program.stream()
    assert raw is not None
    source, target = program.host(64), program.device(64)
    program.bytes(source, 64)[:] = np.arange(64)
    columns = [np.array([int(base), int(base) + 32], np.uint64) for base in (target, source)]
    sizes, indices = np.array([32, 32], np.uint64), np.zeros(1, np.uint64)
    given = attributes(STREAM)
    arguments = [*map(address_of, [*columns, sizes]), 2, int(given.getPtr()), address_of(indices), 1]
    assert raw.memcpy_batch_async_v2(*arguments, int(stream)) is None
    program.ok("cuStreamSynchronize", stream)
    assert (program.bytes(target, 64) == np.arange(64)).all()

    operations = np.zeros(2, copies.OPERATION_DTYPE)
    for field, value in (("src_type", 1), ("dst_type", 1), ("width", 8), ("height", 4), ("depth", 1), ("order", 1)):
        operations[field] = value
    operations["src_ptr"], operations["dst_ptr"] = [source + 32, source], [int(target), int(target) + 32]
    raw.memcpy_3d_batch_async_v2(2, address_of(operations), 0, int(stream))
    program.ok("cuStreamSynchronize", stream)
    assert (program.bytes(target, 64) == np.roll(np.arange(64), 32)).all()
    with pytest.raises(DriverError) as caught:
        raw.memcpy_3d_batch_async_v2(2, address_of(operations), 0, 0)
    assert (caught.value.status, str(caught.value)) == (1, "ERROR_INVALID_VALUE (1)")
    with pytest.raises(TypeError):
        raw.memcpy_batch_async_v2(*arguments, stream)


# Faults


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
    faults.fail_nth(3, R.CUDA_ERROR_OUT_OF_MEMORY)
    assert program.status("cuMemGetInfo") == R.CUDA_SUCCESS
    assert program.status("cuEventCreate", 0) == R.CUDA_ERROR_UNKNOWN
    assert program.status("cuEventCreate", 1) == R.CUDA_ERROR_OUT_OF_MEMORY
    assert faults.calls == [("cuMemGetInfo", ()), ("cuEventCreate", (0,)), ("cuEventCreate", (1,))]
    faults.fail_nth(1)
    faults.clear()
    assert program.status("cuMemGetInfo") == R.CUDA_SUCCESS
    with pytest.raises(ValueError, match="counts from 1"):
        faults.fail_nth(0)


def test_delays_hold_no_lock(program: Program) -> None:
    program.sim.faults.delay("cuMemGetInfo", 0.2)
    thread = threading.Thread(target=program.sim.cuMemGetInfo)
    started = time.monotonic()
    thread.start()
    program.event()
    assert time.monotonic() - started < 0.15
    thread.join()
    assert time.monotonic() - started >= 0.2


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


# Books and speed


def test_leaks_and_repr_show_what_is_alive(program: Program) -> None:
    stream, event, pointer, address = program.stream(), program.event(), program.device(8), program.host(8)
    assert "streams=1 events=1 device_allocations=1 host_allocations=1 primary_retains=1" in repr(program.sim)
    program.ok("cuStreamDestroy", stream)
    program.ok("cuEventDestroy", event)
    program.ok("cuMemFree", pointer)
    program.ok("cuMemFreeHost", address)
    program.ok("cuDevicePrimaryCtxRelease", 0)
    assert set(program.sim.leaks().values()) == {0}


def test_big_batches_are_cheap(program: Program) -> None:
    count, stream = 50_000, program.stream()
    source, target = program.host(16 * count), int(program.device(16 * count))
    pointers = [[cuda.CUdeviceptr(base + 16 * i) for i in range(count)] for base in (target, source)]
    started = time.perf_counter()
    program.ok("cuMemcpyBatchAsync", *pointers, [16] * count, count, [attributes(ANY)], [0], 1, stream)
    program.ok("cuStreamSynchronize", stream)
    assert time.perf_counter() - started < 2  # 3 us a copy when the machine is quiet
    assert (program.bytes(target, 16 * count) == program.bytes(source, 16 * count)).all()


def test_many_small_loads_are_cheap(program: Program) -> None:
    source, target = program.host(4096), program.device(4096)
    streams, events = [program.stream() for _ in range(32)], [program.event() for _ in range(64)]
    sim, caller, count = program.sim, program.stream(), 4000
    started = time.perf_counter()
    for i in range(count):
        stream, first, last = streams[i % 32], events[i % 32], events[32 + i % 32]
        sim.cuEventRecord(first, caller)
        sim.cuStreamWaitEvent(stream, first, 0)
        sim.cuEventRecord(first, stream)
        sim.cuMemcpyAsync(target, source, 64, stream)
        sim.cuEventRecord(last, stream)
        sim.cuEventQuery(last)
        sim.cuEventQuery(events[32 + (i + 1) % 32])
    program.ok("cuCtxSynchronize")
    assert time.perf_counter() - started < 8  # 60 us a load when the machine is quiet
    assert program.sim.pending_operations() == 0


def test_threads_share_one_driver(program: Program) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            program.ok("cuCtxPushCurrent", program.context)
            stream, event = program.stream(), program.event()
            source, target = program.host(256, 9), program.device(256)
            for _ in range(100):
                program.ok("cuMemcpyAsync", target, source, 256, stream)
                program.ok("cuEventRecord", event, stream)
                while program.status("cuEventQuery", event) != R.CUDA_SUCCESS:
                    pass
            assert (program.bytes(target, 256) == 9).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []

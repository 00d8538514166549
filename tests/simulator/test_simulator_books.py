"""The simulated driver: what is alive, how fast it is, and threads that share it."""

from __future__ import annotations

import pytest
from counting import steps
from cuda.bindings import driver as cuda
from simulator_program import ANY, Program, R, attributes, in_threads


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

    def copy_all() -> None:
        program.ok("cuMemcpyBatchAsync", *pointers, [16] * count, count, [attributes(ANY)], [0], 1, stream)
        program.ok("cuStreamSynchronize", stream)

    taken = steps(copy_all)
    assert taken < 30 * count
    assert (program.bytes(target, 16 * count) == program.bytes(source, 16 * count)).all()


@pytest.mark.long
def test_many_small_loads_are_cheap(program: Program) -> None:
    source, target = program.host(4096), program.device(4096)
    streams, events = [program.stream() for _ in range(32)], [program.event() for _ in range(64)]
    sim, caller, count = program.sim, program.stream(), 4000

    def load_all() -> None:
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

    taken = steps(load_all)
    assert taken < 3000 * count
    assert program.sim.pending_operations() == 0


def test_threads_share_one_driver(program: Program) -> None:
    def work() -> None:
        program.ok("cuCtxPushCurrent", program.context)
        stream, event = program.stream(), program.event()
        source, target = program.host(256, 9), program.device(256)
        for _ in range(100):
            program.ok("cuMemcpyAsync", target, source, 256, stream)
            program.ok("cuEventRecord", event, stream)
            while program.status("cuEventQuery", event) != R.CUDA_SUCCESS:
                pass
        assert (program.bytes(target, 256) == 9).all()

    in_threads(work, 4)

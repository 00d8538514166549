"""The simulated driver: contexts, threads and processes."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from simulator_program import Program, R

from kvoffload.simulator import SimulatedDriver


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
    program.stream()
    program.device(16)
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
@pytest.mark.filterwarnings("ignore:os.fork")  # where another test of this process has loaded JAX
def test_a_forked_child_gets_errors_and_no_deadlock(program: Program) -> None:
    with program.sim.lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if program.status("cuMemGetInfo") == R.CUDA_ERROR_NOT_INITIALIZED else 1)
    assert os.waitpid(child, 0)[1] == 0

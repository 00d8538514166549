"""The end of the process with work in flight, and forks."""

from __future__ import annotations

import textwrap

import pytest
from programs import run_program

PRELUDE = """
import gc, os, signal, sys, threading, time, warnings
import kvoffload
from helpers import Gate, simulated
from kvoffload import NO_WAIT, BlockCache, KVLayout, OffloadEngine, ClosedError
device = simulated(1)
planes = device.allocate_planes(2, block_bytes=64, num_blocks=8)
engine = OffloadEngine(KVLayout([planes]), device=device, num_slots=8)
def gated_store():
    with device.current():
        stream = device.driver.stream_create(0)
    gate = Gate(device)
    gate.hold(stream)
    return gate, engine.store([1], [1], after=stream)
def fork():
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
    sys.stdout.flush()
    return os.fork()
"""


def run_script(script: str, exit_code: int = 0) -> str:
    """Run a program that begins with PRELUDE; its stdout."""
    return run_program(PRELUDE + textwrap.dedent(script), exit_code=exit_code)


def test_pitfall_31_interpreter_exit_with_work_in_flight() -> None:
    run_script("gate, job = gated_store()\nthreading.Timer(0.1, gate.open).start()")


def test_pitfall_31_interpreter_exit_without_closing_anything() -> None:
    run_script("engine.store([1], [1])\nbuffers = [device.allocate(100) for _ in range(3)]")


def test_interpreter_exit_by_an_exception_shows_only_that() -> None:
    run_script("engine.store([1], [1])\nsys.exit(3)", exit_code=3)


def test_interpreter_exit_after_forgetting_everything() -> None:
    """Garbage that nothing had an occasion to free is no reason to hang or to complain when all ends."""
    run_script("engine.store([1], [1]).wait(10)\ndel engine, planes, device\ngc.collect()")


def test_pitfall_31_a_forked_child_is_told_and_touches_nothing() -> None:
    out = run_script(
        """
        gate, job = gated_store()
        done = engine.store([2], [2], after=NO_WAIT)
        calls = device.simulator.faults.total_calls
        child = fork()
        if child == 0:
            told = 0
            for call in (lambda: engine.store([1], [1]), lambda: engine.load([1], [1]), engine.poll,
                         lambda: job.done, lambda: job.wait(60), lambda: engine.drain(60), lambda: device.allocate(10),
                         lambda: planes[0].owner.to_numpy(), lambda: job.order_before(1), device.reclaim):
                try:
                    call()
                except ClosedError as error:
                    told += "fork" in str(error)
            engine.close()
            device.close()
            print("told", told, "calls", device.simulator.faults.total_calls - calls, flush=True)
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        print("status", status, flush=True)
        gate.open()
        job.wait(10)
        engine.store([3], [3]).wait(10)
        engine.close()
        print("parent goes on", flush=True)
        """
    )
    assert out.splitlines() == ["told 10 calls 0", "status 0", "parent goes on"]


LOCKS = {"engine": "engine.lock", "device": "device.lifecycle", "simulator": "device.simulator.lock"}
HOLD_AND_FORK = """
cache = BlockCache(engine)
stored = cache.store([b"a"], [2], after=NO_WAIT)
stored.wait(10)
finished = stored.jobs[0]
buffer = device.allocate(10)
gate = Gate(device)
with device.current():
    held = device.driver.stream_create(0)
gate.hold(held)
job = engine.load([1], [1], after=held)
taken, let_go = threading.Event(), threading.Event()
def hold():
    with LOCK:
        taken.set()
        let_go.wait()
thread = threading.Thread(target=hold)
thread.start()
taken.wait()
child = fork()
if child == 0:
    signal.alarm(20)
    refused = dict(
        store=lambda: engine.store([1], [1]), load=lambda: engine.load([1], [1]), poll=engine.poll,
        done=lambda: job.done, wait=lambda: job.wait(1), order=lambda: job.order_before(1),
        submitted=lambda: engine.submitted, jobs=engine.jobs_in_flight, plan=lambda: engine.plan("load", [1], [1]),
        advance=engine.advance, order_all=lambda: engine.order_all_before(1), claim=lambda: engine.guard_slots(cache),
        wait_stream=engine.wait_stream, resolve=lambda: engine.resolve(1), forget=lambda: engine.forget_report(1),
        callback=lambda: job.add_done_callback(print),
        drain=lambda: engine.drain(1), statistics=engine.statistics, room=lambda: engine.check_room(1),
        lookup=lambda: cache.lookup([b"a"]), touch=lambda: cache.touch([b"a"]), check=cache.check,
        cache_store=lambda: cache.store([b"b"], [1]), cache_load=lambda: cache.load([b"a"], [1]),
        cache_statistics=cache.statistics, remove=lambda: cache.remove([b"a"]),
        wait_finished=lambda: finished.wait(60), results=lambda: stored.wait(60),
        allocate=lambda: device.allocate(1), reclaim=device.reclaim, read=buffer.to_numpy,
        write=lambda: buffer.copy_from(b"a"), dlpack=buffer.__dlpack__, empty=lambda: device.empty((1,), "int8"),
        interface=lambda: buffer.__cuda_array_interface__, register=lambda: device.register_engine(engine),
        lifecycle=lambda: device.wait_lifecycle(None), current=device.current,
    )
    harmless = dict(
        finished=lambda: finished.done, buffer=buffer.close, engine=engine.close, device=device.close,
        repr=lambda: repr((engine, device, job, cache)),
    )
    slow, returned = [], []
    for name, call in (*refused.items(), *harmless.items()):
        began = time.perf_counter()
        try:
            call()
            returned.append(name)
        except ClosedError as error:
            assert "fork" in str(error), (name, error)
        if time.perf_counter() - began > 20:  # it waited for a lock, or for work of the parent's
            slow.append(name)
    del buffer, engine, device, planes, cache
    gc.collect()
    print("slow", slow, "returned", returned, flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
print("status", status, flush=True)
let_go.set()
thread.join()
gate.open()
job.wait(10)
"""


@pytest.mark.parametrize("lock", LOCKS)
def test_pitfall_31_a_child_forked_while_another_thread_holds_a_lock_does_not_hang(lock: str) -> None:
    """Each call comes back at once: it raises ClosedError, or has nothing to do."""
    out = run_script(HOLD_AND_FORK.replace("LOCK:", LOCKS[lock] + ":"))
    assert out.splitlines() == ["slow [] returned ['finished', 'buffer', 'engine', 'device', 'repr']", "status 0"]

"""The life of devices and engines: closing, forgetting, exiting, forking, threads, limits."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
from helpers import no_leaks, rig, simulated, whole

import kvoffload
from kvoffload import NO_WAIT, CapacityError, ClosedError, KVLayout, OffloadEngine

ROOT = Path(__file__).resolve().parent.parent


def run_script(script: str, *, exit_code: int = 0, timeout: float = 60) -> str:
    """Run a program of its own; nothing may come out on its stderr. Its stdout."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", PRELUDE + textwrap.dedent(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert (done.returncode, done.stderr) == (exit_code, ""), done.stdout
    return done.stdout


PRELUDE = """
import os, sys, threading, time
import kvoffload
from helpers import Gate, simulated, rig
from kvoffload import NO_WAIT, KVLayout, OffloadEngine, ClosedError
device = simulated(1)
planes = device.allocate_planes(2, block_bytes=64, num_blocks=8)
engine = OffloadEngine(KVLayout([planes]), device=device, num_slots=8)
def gated_store():
    with device.current():
        stream = device.driver.stream_create(0)
    gate = Gate(device)
    gate.hold(stream)
    return gate, engine.store([1], [1], after=stream)
"""


# closing


def test_pitfall_31_use_after_close_is_a_clear_error() -> None:
    with simulated(1) as device:
        engine = OffloadEngine(
            KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)]), device=device, num_slots=4
        )
        job = engine.store([1], [1])
        engine.close()
        for call, ids in ((engine.store, [1]), (engine.load, [1]), (engine.store, [])):
            with pytest.raises(ClosedError, match="closed"):
                call(ids, ids)
        assert job.done
        assert job.wait().nbytes == 128
        assert engine.poll() == []
        assert engine.statistics().in_flight == 0
        engine.drain(1)
        assert "closed" in repr(engine)


def test_pitfall_31_closing_twice_is_closing_once() -> None:
    device = simulated(1)
    engine = OffloadEngine(
        KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)]), device=device, num_slots=4
    )
    for _ in range(2):
        engine.close()
    for _ in range(2):
        device.close()
    engine.close()
    no_leaks(device.simulator)


def test_pitfall_31_closing_with_work_in_flight_waits_for_it() -> None:
    device = simulated(1)
    with rig(device) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        job = bench.engine.store([3], [0], after=held)
        with pytest.raises(TimeoutError):
            bench.engine.close(timeout=0.02)
        bench.engine.load([5], [5], after=NO_WAIT).wait(10)
        opener = threading.Timer(0.05, gate.open)
        opener.start()
        bench.engine.close()
        assert job.done
        assert (bench.slot(0) == 4).all()
        opener.join()
    device.close()
    no_leaks(device.simulator)


def test_closing_a_device_closes_its_engines_and_frees_its_memory() -> None:
    device = simulated(1)
    engines = [
        OffloadEngine(KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)]), device=device, num_slots=4)
        for _ in range(3)
    ]
    jobs = [engine.store([1], [1]) for engine in engines]
    device.close()
    assert all(job.finished for job in jobs)
    for engine in engines:
        with pytest.raises(ClosedError):
            engine.store([1], [1])
    with pytest.raises(ClosedError):
        device.allocate(1)
    no_leaks(device.simulator)


def test_a_device_that_cannot_close_in_time_stays_open() -> None:
    device = simulated(1)
    with rig(device) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        job = bench.engine.store([3], [0], after=held)
        with pytest.raises(TimeoutError):
            device.close(timeout=0.02)
        assert not device.closed
        gate.open()
        job.wait(10)
    device.close()
    no_leaks(device.simulator)


def test_views_of_the_pool_stay_valid_after_close() -> None:
    device = simulated(1)
    engine = OffloadEngine(
        KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)]), device=device, num_slots=64
    )
    engine.slots[:] = 7
    row, whole_pool = engine.slots[3], engine.slots
    engine.close()
    device.close()
    no_leaks(device.simulator)
    del engine, device
    gc.collect()
    others = [np.zeros(64 * 4096, np.uint8) for _ in range(8)]
    whole_pool[5] = 9
    assert (row == 7).all()
    assert (whole_pool[5] == 9).all()
    assert not any(other.any() for other in others)


def test_an_engine_and_a_device_are_context_managers() -> None:
    with simulated(1) as device:
        layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)])
        with OffloadEngine(layout, device=device, num_slots=4) as engine:
            job = engine.store([1], [1])
        assert job.finished
    assert device.closed


def test_closing_from_two_threads_at_once() -> None:
    device = simulated(1)
    with rig(device) as bench:
        bench.engine.store([1], [1])
        errors: list[BaseException] = []

        def close() -> None:
            try:
                bench.engine.close(10)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
    device.close()
    no_leaks(device.simulator)


# forgetting


def test_a_forgotten_engine_gives_everything_back_without_a_warning() -> None:
    with simulated(1) as device, warnings.catch_warnings():
        warnings.simplefilter("error")
        planes = device.allocate_planes(2, block_bytes=64, num_blocks=4)
        engine = OffloadEngine(KVLayout([planes]), device=device, num_slots=4)
        engine.store([1], [1]).wait(10)
        watch = weakref.ref(engine)
        del engine
        gc.collect()
        assert watch() is None
        device.reclaim()
        assert device.simulator is not None
        leaks = device.simulator.leaks()
        assert (leaks["streams"], leaks["events"], leaks["registered_ranges"]) == (0, 0, 0)


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_forgotten_with_work_in_flight_lives_until_it_has_ended(fails: bool) -> None:
    with simulated(1) as device:
        planes = device.allocate_planes(2, block_bytes=64, num_blocks=4)
        assert device.simulator is not None
        if fails:
            device.simulator.faults.fail_call("cuMemcpy3DBatchAsync")
        engine = OffloadEngine(KVLayout([planes]), device=device, num_slots=4)
        engine.store([1], [1])
        watch = weakref.ref(engine)
        del engine
        gc.collect()
        for _ in range(200):
            device.reclaim()
            gc.collect()
            if watch() is None:
                break
        assert watch() is None
        device.reclaim()
        assert device.simulator.leaks()["registered_ranges"] == 0


def test_a_forgotten_buffer_is_freed_later_and_takes_no_lock() -> None:
    with simulated(1) as device:
        assert device.simulator is not None
        buffer = device.allocate(1000)
        calls = device.simulator.faults.total_calls
        del buffer
        assert device.simulator.faults.total_calls == calls, "a finalizer may run anywhere: it calls no driver"
        device.reclaim()
        assert device.simulator.leaks()["device_allocations"] == 0


def test_a_slab_lives_as_long_as_one_of_its_planes() -> None:
    with simulated(1) as device:
        assert device.simulator is not None
        planes = device.allocate_planes(3, block_bytes=64, num_blocks=4)
        last = planes[2]
        del planes
        device.reclaim()
        assert device.simulator.leaks()["device_allocations"] == 1
        del last
        device.reclaim()
        assert device.simulator.leaks()["device_allocations"] == 0


# the end of the process


def test_pitfall_31_interpreter_exit_with_work_in_flight() -> None:
    run_script("gate, job = gated_store()\nthreading.Timer(0.1, gate.open).start()")


def test_pitfall_31_interpreter_exit_without_closing_anything() -> None:
    run_script("engine.store([1], [1])\nbuffers = [device.allocate(100) for _ in range(3)]")


def test_interpreter_exit_by_an_exception_shows_only_that() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + "engine.store([1], [1])\nsys.exit(3)"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3, "")


def test_pitfall_31_a_forked_child_is_told_and_touches_nothing() -> None:
    out = run_script(
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        gate, job = gated_store()
        done = engine.store([2], [2], after=NO_WAIT)
        calls = device.simulator.faults.total_calls
        child = os.fork()
        if child == 0:
            told = 0
            for call in (lambda: engine.store([1], [1]), lambda: engine.load([1], [1]), engine.poll,
                         lambda: job.done, lambda: job.wait(1), lambda: engine.drain(1), lambda: device.allocate(10),
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


def test_pitfall_31_a_child_forked_while_another_thread_holds_the_lock_does_not_hang() -> None:
    out = run_script(
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        import signal
        gate, job = gated_store()
        taken, let_go = threading.Event(), threading.Event()
        def hold():
            with engine.lock:
                taken.set()
                let_go.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        taken.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(5)
            told = 0
            for call in (engine.poll, lambda: job.done, lambda: engine.store([1], [1]), lambda: engine.drain(1)):
                try:
                    call()
                except ClosedError:
                    told += 1
            print("told", told, flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print("status", status, flush=True)
        let_go.set()
        thread.join()
        gate.open()
        job.wait(10)
        """
    )
    assert out.splitlines() == ["told 4", "status 0"]


# waiting and polling


def test_wait_with_a_timeout_raises_and_the_job_goes_on() -> None:
    with simulated(1) as device, rig(device) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        job = bench.engine.store([3], [0], after=held)
        began = time.perf_counter()
        with pytest.raises(TimeoutError, match="goes on"):
            job.wait(timeout=0.05)
        assert 0.05 <= time.perf_counter() - began < 2
        with pytest.raises(TimeoutError):
            bench.engine.drain(timeout=0.01)
        with pytest.raises(TimeoutError):
            job.wait(timeout=0)
        assert not job.done
        gate.open()
        assert job.wait(10).job_id == job.id
        assert job.result().job_id == job.id
        assert (bench.slot(0) == 4).all()


def test_poll_reports_each_job_once_and_not_those_waited_for() -> None:
    with simulated(1) as device, rig(device) as bench:
        jobs = [bench.engine.store([index], [index]) for index in range(6)]
        empty = bench.engine.load([], [])
        jobs[2].wait(10)
        jobs[4].result()
        bench.engine.drain(10)
        results = bench.engine.poll()
        assert sorted(result.job_id for result in results) == sorted([jobs[i].id for i in (0, 1, 3, 5)] + [empty.id])
        assert bench.engine.poll() == []
        stored = next(result for result in results if result.job_id == jobs[0].id)
        assert (stored.direction, stored.nbytes, stored.copier, stored.error) == ("store", 256, "strided", None)
        assert stored.seconds >= 0
        assert stored.simulated
        nothing = next(result for result in results if result.job_id == empty.id)
        assert (nothing.nbytes, nothing.copier, nothing.seconds) == (0, "none", 0.0)


def test_done_does_not_take_the_report_away() -> None:
    with simulated(1) as device, rig(device) as bench:
        job = bench.engine.store([1], [1])
        while not job.done:
            pass
        assert [result.job_id for result in bench.engine.poll()] == [job.id]


# threads


def test_four_threads_submit_poll_and_wait() -> None:
    """Each thread has slots and blocks of its own and checks its own bytes."""
    with simulated(1) as device, rig(device, num_blocks=32, num_slots=32) as bench:
        engine = bench.engine
        polled: list[int] = []
        waited: list[int] = []
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                rng = np.random.default_rng(number)
                mine = range(8 * number, 8 * number + 8)
                for turn in range(25):
                    blocks, slots = rng.permutation(mine)[:4], rng.permutation(mine)[:4]
                    store = engine.store(blocks, slots, after=NO_WAIT)
                    load = engine.load(slots, blocks, after=NO_WAIT)
                    if turn % 2:
                        polled.extend(result.job_id for result in engine.poll())
                    store.wait(30)
                    load.wait(30)
                    waited.extend([store.id, load.id])
                    for block, slot in zip(blocks, slots, strict=True):
                        assert (bench.slot(int(slot)) == int(block) + 1).all()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        polled.extend(result.job_id for result in engine.poll())
        assert len(polled) == len(set(polled))
        assert len(waited) == 200
        whole(engine)
        assert (bench.block(5) == 6).all()


def test_waiting_in_one_thread_does_not_keep_others_from_submitting() -> None:
    with simulated(1) as device, rig(device) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        job = bench.engine.store([3], [0], after=held)
        thread = threading.Thread(target=job.wait)
        thread.start()
        time.sleep(0.02)
        bench.engine.load([5], [5], after=NO_WAIT).wait(10)
        assert thread.is_alive()
        gate.open()
        thread.join(10)
        assert not thread.is_alive()


# limits


def test_too_many_jobs_in_flight_raise_and_nothing_happens() -> None:
    with simulated(1) as device, rig(device, max_in_flight=3) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        jobs = [bench.engine.store([index], [index], after=held) for index in range(3)]
        before = bench.engine.statistics()
        for _ in range(3):
            with pytest.raises(CapacityError, match="max_in_flight=3"):
                bench.engine.store([5], [5], after=held)
            with pytest.raises(CapacityError):
                bench.engine.load([6], [6])
        assert bench.engine.statistics() == before
        assert device.simulator is not None
        gate.open()
        bench.engine.drain(10)
        assert [result.job_id for result in bench.engine.poll()] == [job.id for job in jobs]
        assert (bench.slot(5) == 105).all()
        assert bench.engine.store([5], [5]).wait(10).job_id > jobs[-1].id


def test_full_streams_raise_and_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvoffload import flight, streams

    monkeypatch.setattr(flight, "MAX_STREAMS", 3)
    monkeypatch.setattr(streams, "QUEUE_LIMIT", 10)
    with simulated(1) as device, rig(device) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        for _ in range(6):  # two fit on each stream
            bench.engine.store([1], [1], after=held)
        for _ in range(3):
            with pytest.raises(CapacityError, match="full"):
                bench.engine.store([2], [2], after=held)
        assert bench.engine.statistics().in_flight == 6
        gate.open()
        bench.engine.drain(10)
        whole(bench.engine)
        bench.engine.store([1], [1]).wait(10)
        assert bench.engine.statistics().streams == 3


def test_reports_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvoffload import flight

    monkeypatch.setattr(flight, "_MAX_REPORTS", 10)
    with simulated(1) as device, rig(device) as bench:
        jobs = [bench.engine.store([], []) for _ in range(25)]
        statistics = bench.engine.statistics()
        assert (statistics.unreported, statistics.dropped_reports) == (10, 15)
        assert [result.job_id for result in bench.engine.poll()] == [job.id for job in jobs[-10:]]


def test_a_second_device_of_the_same_driver_keeps_the_context_alive() -> None:
    first = simulated(1)
    second = kvoffload.open_device(backend=first.simulator)
    with rig(second) as bench:
        first.close()
        bench.engine.store([1], [1]).wait(10)
    second.close()
    no_leaks(second.simulator)

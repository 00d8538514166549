"""The life of devices and engines: closing, forgetting, waiting, threads, limits."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
from helpers import STAGING, in_threads, leaks_of, no_leaks, rig, shuttles, simulated, whole

import kvoffload
from kvoffload import NO_WAIT, CapacityError, DriverError, KVLayout, OffloadEngine
from kvoffload.engine import launcher
from kvoffload.tuning import CopierName

# closing


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


def test_a_device_closes_its_other_engines_when_the_driver_fails_in_one() -> None:
    device = simulated(1)
    engines = [
        OffloadEngine(KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)]), device=device, num_slots=4)
        for _ in range(2)
    ]
    device.simulator.faults.fail_call("cuStreamDestroy", after=True)
    with pytest.raises(DriverError, match="cuStreamDestroy"):
        device.close()
    assert all(engine.closed for engine in engines)
    device.close()  # the rest
    no_leaks(device.simulator)


def test_a_device_that_cannot_close_in_time_stays_open() -> None:
    device = simulated(1)
    with rig(device) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        job = bench.engine.store([3], [0], after=held)
        idle = OffloadEngine(bench.engine.layout, device=device, num_slots=1)  # made later, and closed all the same
        with pytest.raises(TimeoutError):
            device.close(timeout=0.02)
        assert (device.closed, bench.engine.closed, idle.closed) == (False, False, True)
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


def test_closing_from_two_threads_at_once() -> None:
    device = simulated(1)
    with rig(device) as bench:
        bench.engine.store([1], [1])
        in_threads(*[lambda: bench.engine.close(10)] * 4)
    device.close()
    no_leaks(device.simulator)


# forgetting


@pytest.mark.parametrize(("staging_bytes", "copier"), [(0, "strided"), (STAGING, "pack")])
def test_a_forgotten_engine_gives_everything_back_and_is_told_of(staging_bytes: int, copier: CopierName) -> None:
    with simulated(1) as device:
        planes = device.allocate_planes(2, block_bytes=64, num_blocks=4)
        engine = OffloadEngine(KVLayout([planes]), device=device, num_slots=4, staging_bytes=staging_bytes)
        engine.store([1], [1], copier=copier).wait(10)
        watch = weakref.ref(engine)
        del engine
        gc.collect()
        assert watch() is None
        with pytest.warns(ResourceWarning, match="an OffloadEngine was never closed") as told:
            device.reclaim()
        assert len(told) == 1
        assert leaks_of(device) == {"primary_retains": 1, "device_allocations": 1}
        device.reclaim()
    assert leaks_of(device) == {}


def test_an_engine_without_references_is_garbage_at_once() -> None:
    """No cycle keeps it until the collector comes, and with it gigabytes of pinned memory."""
    with simulated(1) as device:
        layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)])
        engine = OffloadEngine(layout, device=device, num_slots=4)
        engine.store([1], [1], after=[1, np.zeros(2)]).wait(10)
        engine.load([1], [1], parts=2).order_before(1, part=0)
        engine.drain(10)
        watch = weakref.ref(engine)
        gc.disable()
        try:
            del engine
            assert watch() is None
        finally:
            gc.enable()
        with pytest.warns(ResourceWarning, match="an OffloadEngine was never closed"):
            device.reclaim()


@pytest.mark.parametrize(("staging_bytes", "copier"), [(0, "strided"), (STAGING, "pack")])
def test_a_forgotten_device_is_freed_by_the_next_one_and_is_told_of(staging_bytes: int, copier: CopierName) -> None:
    device = simulated(1)
    simulator = device.simulator
    assert simulator is not None
    planes = device.allocate_planes(2, block_bytes=64, num_blocks=4)
    engine = OffloadEngine(KVLayout([planes]), device=device, num_slots=4, staging_bytes=staging_bytes)
    engine.store([1], [1], copier=copier).wait(10)
    made = simulator.leaks()
    # the pool, and what kernels read their blocks from; planes and scratch, what kernels find their rows in, a ring
    assert (made["registered_ranges"], made["device_allocations"]) == ((2, 4) if staging_bytes else (1, 2))
    assert (made["modules"] > 0) == (staging_bytes > 0)
    del device, engine, planes
    gc.collect()
    assert simulator.leaks() == made, "a finalizer calls no driver"
    with pytest.warns(ResourceWarning, match="was never closed") as told, simulated(2):
        pass
    assert sorted(str(each.message).split(" was")[0] for each in told) == ["a Device", "an OffloadEngine"]
    no_leaks(simulator)


@pytest.mark.parametrize("call", ["cuMemcpy3DBatchAsync", "cuLaunchKernel"])
@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_forgotten_with_work_in_flight_lives_until_it_has_ended(fails: bool, call: str) -> None:
    with simulated(1) as device:
        planes = device.allocate_planes(4, block_bytes=64, num_blocks=4)
        assert device.simulator is not None
        if fails:
            device.simulator.faults.fail_call(call)
        engine = OffloadEngine(KVLayout([planes]), device=device, num_slots=4)
        job = engine.store([1], [1], copier="pack" if call == "cuLaunchKernel" else "strided")
        assert (job.error is not None) == fails
        watch = weakref.ref(engine)
        del engine, job
        gc.collect()
        assert watch() is not None, "the device knows that it works"
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(200):
                device.reclaim()
                gc.collect()
                if watch() is None:
                    break
            device.reclaim()
        assert watch() is None
        assert [str(each.message).split(";")[0] for each in told] == ["an OffloadEngine was never closed"]
        assert device.simulator.leaks()["registered_ranges"] == 0


# threads


@pytest.mark.timeout(300)
def test_four_threads_submit_poll_and_wait(each_device: kvoffload.Device) -> None:
    """Each thread has slots and blocks of its own and checks its own bytes."""
    sizes = {} if each_device.simulated else {"planes": 16, "block_bytes": 64 << 10, "staging_bytes": STAGING}
    with rig(each_device, num_blocks=32, num_slots=32, **sizes) as bench:
        engine = bench.engine
        polled: list[int] = []
        turns = 25 if each_device.simulated else 50
        waited = shuttles(bench, 4, turns, between=lambda: polled.extend(result.job_id for result in engine.poll()))
        polled.extend(result.job_id for result in engine.poll())
        assert len(polled) == len(set(polled))
        assert sorted(waited) == list(range(1, 8 * turns + 1))
        whole(engine)


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


def test_what_finds_no_room_in_the_queues_waits_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes off later, in order and behind what it has to follow; until then no stream can wait for it."""
    monkeypatch.setattr(launcher, "QUEUE_LIMIT", 6)  # two transfers of a block on each stream
    with simulated(1) as device, rig(device) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        stores = [bench.engine.store([index], [0], after=held) for index in range(10)]
        load = bench.engine.load([0], [14], after=NO_WAIT)
        assert bench.engine.statistics().in_flight == 11
        assert bench.engine.statistics().held == 3, "two stores of ten, and the load that follows the last"
        for job in (stores[-1], load):
            with pytest.raises(CapacityError, match="waits on the host"):
                job.order_before(held)
        stores[0].order_before(held)
        gate.open()
        bench.engine.drain(10)
        whole(bench.engine)
        assert (bench.slot(0) == 10).all()
        assert (bench.block(14) == 10).all()
        reported = [result.job_id for result in bench.engine.poll() if result.direction == "store"]
        assert reported == [job.id for job in stores]
        load.order_before(held)


def test_reports_that_are_not_taken_are_bounded() -> None:
    with simulated(1) as device, rig(device) as bench:
        reports = bench.engine._reports
        assert reports.most == 65_536
        reports.most = 10
        jobs = [bench.engine.store([], []) for _ in range(25)]
        statistics = bench.engine.statistics()
        assert (statistics.unreported, statistics.dropped_reports) == (10, 15)
        assert [result.job_id for result in bench.engine.poll()] == [job.id for job in jobs[-10:]]

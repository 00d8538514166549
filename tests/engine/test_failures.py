"""Every driver call fails once, before and after it did its work; submissions are interrupted; memory is short."""

from __future__ import annotations

import gc
import itertools
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from helpers import COPY_ENGINE_ONLY, LEVELS, STAGING, leaks_of, make_and_close, no_leaks, rig, simulated, whole
from seeds import seeds
from workload import program, several_streams

import kvoffload
from kvoffload import NO_WAIT, ClosedError, DriverError, KVLayout, KVOffloadError, OffloadEngine, TransferError
from kvoffload.tuning import CopierName

PUSH_POP = ("cuCtxPushCurrent", "cuCtxPopCurrent")  # a caller's stack cannot be put right when these lie
# made and denied: nobody has the handle
CREATE = ("cuStreamCreateWithPriority", "cuEventCreate", "cuMemAlloc", "cuModuleLoadData")

# what such a call was to give back is lost when it fails: nobody knows how much of it was done
# What lets go of something is not repeated after an error, for it may have let go; unregistering is safe to repeat.
LETTING_GO = ("cuStreamDestroy", "cuEventDestroy", "cuMemFree", "cuModuleUnload", "cuDevicePrimaryCtxRelease")


@pytest.fixture(autouse=True)
def _several_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    several_streams(monkeypatch)


def _calls_of_a_clean_run(level: str, copiers: tuple[CopierName, ...] = ()) -> list[str]:
    with program(level, copiers) as made:
        simulator = made.simulator
        simulator.faults.calls = []
        checks = made.run()
        names = [name for name, _ in simulator.faults.calls]
        made.verify(checks, all_well=True)
    no_leaks(simulator)
    return names


def _fail_once(level: str, nth: int, name: str, *, after: bool, copiers: tuple[CopierName, ...] = ()) -> None:
    with program(level, copiers) as made:
        simulator = made.simulator
        simulator.faults.fail_nth(nth, after=after)
        checks = made.run()
        assert simulator.faults.pending == 0, "the failure happened"
        simulator.faults.clear()
        made.verify(checks, all_well=False)
        made.bench.engine.poll()
        made.verify(made.run(offset=12), all_well=True)
    leaks = {kind: count for kind, count in simulator.leaks().items() if count}
    tolerated = 1 if after and name in CREATE else 0
    assert sum(leaks.values()) <= tolerated, leaks
    assert simulator.violations == []


SHARDS = 2  # so that two workers share the work


@pytest.mark.long
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("after", [False, True], ids=["instead", "afterwards"])
@pytest.mark.parametrize("level", LEVELS)
def test_pitfall_29_every_driver_call_fails_once(level: str, after: bool, shard: int) -> None:
    """The one job fails or the one call raises; the engine goes on, and nothing leaks."""
    names = _calls_of_a_clean_run(level)
    assert {"cuStreamWaitEvent", "cuEventRecord", "cuEventQuery", "cuEventElapsedTime"} <= set(names)
    seen: Counter[str] = Counter()
    stride = 8 if level == "batch" and not after else 20
    tried = 0
    for nth, name in enumerate(names, start=1):
        seen[name] += 1
        if after and name in PUSH_POP:
            continue
        polled = name in ("cuEventQuery", "cuStreamQuery", *PUSH_POP)
        if (seen[name] > 2 and nth % (5 * stride if polled else stride)) or nth % SHARDS != shard:
            continue
        tried += 1
        try:
            _fail_once(level, nth, name, after=after)
        except BaseException as error:
            error.add_note(f"failing call {nth} of {len(names)}, {name}, level {level}")
            raise
    assert tried > 5


@pytest.mark.long
@pytest.mark.parametrize("after", [False, True], ids=["instead", "afterwards"])
def test_pitfall_29_every_driver_call_of_transfers_with_a_kernel_fails_once(after: bool) -> None:
    names = _calls_of_a_clean_run("batch", ("pack",))
    last = max(index for index, name in enumerate(names) if name == "cuLaunchKernel")
    seen: Counter[str] = Counter()
    for nth, name in enumerate(names, start=1):
        seen[name] += 1
        polled = name in ("cuEventQuery", *PUSH_POP)
        if (after and name in PUSH_POP) or (polled and seen[name] > 2) or nth > last + 8:
            continue  # what comes then is of the cache, which has no kernel
        try:
            _fail_once("batch", nth, name, after=after, copiers=("pack",))
        except BaseException as error:
            error.add_note(f"failing call {nth} of {len(names)}, {name}")
            raise
    assert seen["cuLaunchKernel"] == 4, "two of the store, two of the load"


# one call at a time, by name


@pytest.mark.parametrize(("call", "nth"), [("cuMemcpy3DBatchAsync", 1), ("cuStreamWaitEvent", 1), ("cuEventRecord", 2)])
def test_a_failed_submission_fails_the_job_and_says_why(call: str, nth: int) -> None:
    with simulated(1) as device, rig(device) as bench:
        assert device.simulator is not None
        device.simulator.faults.fail_call(call, nth=nth)
        job = bench.engine.store([1], [1])
        with pytest.raises(TransferError, match=f"{call} returned CUDA_ERROR_UNKNOWN") as caught:
            job.wait(10)
        assert isinstance(caught.value.__cause__, DriverError)
        assert caught.value.__cause__.name == "CUDA_ERROR_UNKNOWN"
        assert bench.engine.statistics().store.failed == 1
        assert bench.engine.poll() == []
        bench.engine.store([1], [1]).wait(10)
        whole(bench.engine)


@pytest.mark.parametrize("call", ["cuStreamIsCapturing", "cuEventRecord", "cuCtxPushCurrent"])
def test_a_failure_before_anything_is_queued_raises_and_nothing_has_happened(call: str) -> None:
    with simulated(1) as device, rig(device) as bench:
        assert device.simulator is not None
        bench.engine.store([2], [2]).wait(10)
        before = bench.engine.statistics()
        device.simulator.faults.fail_call(call)
        with pytest.raises(DriverError, match=f"{call} returned CUDA_ERROR_UNKNOWN"):
            bench.engine.store([1], [1])
        assert bench.engine.statistics() == before
        assert device.simulator.pending_operations() == 0
        whole(bench.engine)
        assert (bench.slot(1) == 101).all()
        bench.engine.store([1], [1]).wait(10)
        assert (bench.slot(1) == 2).all()


@pytest.mark.parametrize("seen_by", ["nobody", "poll", "wait", "order_before"])
def test_a_failed_job_does_not_keep_its_forgotten_engine_alive(seen_by: str) -> None:
    with simulated(1) as device:
        layout = KVLayout([device.allocate_planes(4, block_bytes=64, num_blocks=4)])
        engine = OffloadEngine(layout, device=device, num_slots=4, **COPY_ENGINE_ONLY)
        assert device.simulator is not None
        device.simulator.faults.fail_call("cuMemcpy3DBatchAsync")
        job = engine.store([1], [1])
        engine.drain(10)
        results = engine.poll() if seen_by == "poll" else []
        if seen_by in ("wait", "order_before"):
            call: Callable[[], object] = job.wait if seen_by == "wait" else partial(job.order_before, 1)
            with pytest.raises(TransferError):
                call()
            del call
        watch = weakref.ref(engine)
        del engine, job
        gc.collect()
        assert watch() is None
        assert [result.error is not None for result in results] == ([True] if seen_by == "poll" else [])
        with pytest.warns(ResourceWarning, match="an OffloadEngine was never closed"):
            device.reclaim()
        assert leaks_of(device) == {"primary_retains": 1, "device_allocations": 1}


def test_an_error_that_is_raised_again_does_not_grow() -> None:
    with simulated(1) as device, rig(device) as bench:
        assert device.simulator is not None
        device.simulator.faults.fail_call("cuMemcpy3DBatchAsync")
        job = bench.engine.store([1], [1])
        for call in (lambda: job.wait(10), lambda: job.order_before(1)):
            depths = []
            for _ in range(4):
                try:
                    call()
                except TransferError as error:
                    depths.append(len(traceback.extract_tb(error.__traceback__)))
            assert depths == [depths[0]] * 4


def test_a_failed_job_is_polled_once_with_its_error() -> None:
    with simulated(1) as device, rig(device) as bench:
        assert device.simulator is not None
        device.simulator.faults.fail_call("cuMemcpy3DBatchAsync")
        job = bench.engine.store([1], [1])
        bench.engine.drain(10)
        (result,) = bench.engine.poll()
        assert (result.job_id, result.error) == (job.id, job.error)
        assert bench.engine.poll() == []


def test_a_failed_job_keeps_its_slots_until_nothing_of_it_is_left() -> None:
    with simulated(1, "no-batch") as device, rig(device) as bench:
        assert device.simulator is not None
        held = bench.stream()
        gate = bench.gate(held)
        device.simulator.faults.fail_call("cuMemcpy2DAsync", nth=3)
        job = bench.engine.store(range(4), range(4), after=held, copier="strided")
        bench.settle()
        assert job.error is not None
        assert not job.done, "two copies are still queued"
        with pytest.raises(TimeoutError):
            job.wait(0.01)
        gate.open()
        with pytest.raises(TransferError):
            job.wait(10)
        whole(bench.engine)


# what a failed call may have copied

# with which the simulated driver copies a part of a batch that fails
PARTIAL_SEEDS = [number for number in seeds(40) if number % 4 == 1]
BATCHES: dict[CopierName, str] = {"strided": "cuMemcpy3DBatchAsync", "batch": "cuMemcpyBatchAsync"}


@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("copier", BATCHES)
def test_pitfall_69_a_batch_that_fails_may_have_copied_some_rows_and_nothing_else(
    copier: CopierName, direction: str
) -> None:
    slots, blocks, copied = np.array([9, 3, 12, 5, 0, 7, 14, 2]), np.array([5, 11, 2, 8, 15, 1, 6, 12]), set()
    targets, sources = (slots, blocks) if direction == "store" else (blocks, slots)
    for seed in PARTIAL_SEEDS:
        with simulated(seed) as device, rig(device) as bench:
            assert device.simulator is not None
            transfer = partial(getattr(bench.engine, direction), sources, targets, copier=copier)
            look, before, after = (bench.slot, 100, 1) if direction == "store" else (bench.block, 1, 100)
            expected = np.arange(16) + before
            device.simulator.faults.fail_call(BATCHES[copier])
            with pytest.raises(TransferError, match=f"{BATCHES[copier]} returned CUDA_ERROR_UNKNOWN"):
                transfer().wait(10)
            assert device.simulator.pending_operations() == 0, "it has ended, so nothing is written any more"
            rows = np.stack([look(target).reshape(4, 64) for target in range(16)])
            new = np.zeros((16, 4), bool)
            new[targets] = rows[targets, :, 0] == (sources + after)[:, np.newaxis]
            copied.add(int(new.sum()))
            others = np.where(new, 0, expected[:, np.newaxis])
            others[targets] += np.where(new[targets], (sources + after)[:, np.newaxis], 0)
            assert (rows == others[:, :, np.newaxis]).all()
            transfer().wait(10)
            expected[targets] = sources + after
            assert [int(look(target)[0]) for target in range(16)] == expected.tolist()
            whole(bench.engine)
    assert copied - {0}


@pytest.mark.parametrize("copier", BATCHES)
def test_pitfall_69_later_transfers_follow_what_a_failed_batch_has_queued(copier: CopierName) -> None:
    """Its part is still queued when it has failed: the next store and load of these slots come behind it."""
    slots, queued = [9, 3, 12, 5], [0, 0]
    for seed, copies_a_part in itertools.product(PARTIAL_SEEDS, (False, True)):
        with simulated(seed) as device, rig(device) as bench:
            assert device.simulator is not None
            device.simulator.faults.partial = copies_a_part
            device.simulator.scheduler.drift_probability = 0
            held = bench.stream()
            gate = bench.gate(held)
            device.simulator.faults.fail_call(BATCHES[copier])
            failed = bench.engine.store([5, 11, 2, 8], slots, after=held, copier=copier)
            queued[copies_a_part] += device.simulator.pending_operations()
            stored = bench.engine.store([1, 6, 15, 10], slots, after=NO_WAIT)
            loaded = bench.engine.load(slots, [0, 7, 3, 4], after=NO_WAIT)
            bench.settle()
            assert failed.error is not None
            assert [job.done for job in (failed, stored, loaded)] == [False] * 3
            gate.open()
            loaded.wait(10)
            assert [int(bench.slot(slot)[0]) for slot in slots] == [2, 7, 16, 11]
            assert [set(bench.block(block).tolist()) for block in (0, 7, 3, 4)] == [{2}, {7}, {16}, {11}]
            with pytest.raises(TransferError):
                failed.wait(10)
            stored.wait(10)
            whole(bench.engine)
    assert queued[True] > queued[False]


# making and closing things


KERNEL_CALLS = {"cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetAttribute", "cuFuncSetAttribute"}


@pytest.mark.filterwarnings("ignore:no copy kernels")
@pytest.mark.parametrize("staging_bytes", [0, STAGING])
@pytest.mark.parametrize("after", [False, True], ids=["instead", "afterwards"])
def test_every_call_of_making_an_engine_fails_once(staging_bytes: int, after: bool) -> None:
    with simulated(2) as device:
        layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)])
        simulator = device.simulator
        assert simulator is not None
        before = simulator.leaks()
        simulator.faults.calls = []
        OffloadEngine(layout, device=device, num_slots=2, staging_bytes=staging_bytes).close()
        names = [name for name, _ in simulator.faults.calls]
        of_kernels = {"cuMemHostGetDevicePointer", "cuMemcpyHtoD", "cuModuleUnload", *KERNEL_CALLS}
        assert of_kernels & set(names) == (of_kernels if staging_bytes else set())
        for nth, name in enumerate(names, start=1):
            if after and name in (*PUSH_POP, "cuMemHostRegister", "cuMemcpyHtoD"):
                continue  # what they did goes on although they deny it: pages stay registered, memory is being written
            simulator.faults.fail_nth(nth, after=after)
            make_and_close(device, layout, num_slots=2, staging_bytes=staging_bytes)
            left = sum(simulator.leaks().values()) - sum(before.values())
            assert left == (1 if name in (CREATE if after else LETTING_GO) else 0), (name, nth)
            before = simulator.leaks()


def test_every_call_of_opening_a_device_fails_once() -> None:
    driver = kvoffload.simulator.SimulatedDriver()
    driver.faults.calls = []
    kvoffload.open_device(backend=driver).close()
    for nth, (name, _) in enumerate(list(driver.faults.calls), start=1):
        driver.faults.fail_nth(nth)
        device = None
        try:
            device = kvoffload.open_device(backend=driver)
            device.close()
        except KVOffloadError:
            driver.faults.clear()
            if device is not None:
                device.close()
        assert driver.faults.pending == 0
        assert device is None or device.closed
        tolerated = 1 if name == "cuDevicePrimaryCtxRelease" else 0  # the very call that lets go
        assert driver.leaks()["primary_retains"] <= tolerated, name
        if driver.leaks()["primary_retains"]:
            driver.cuDevicePrimaryCtxRelease(0)


def _used_device() -> tuple[kvoffload.Device, OffloadEngine, kvoffload.DeviceBuffer]:
    """With an engine that has worked and a buffer. To be held: what is garbage is freed apart, with a warning."""
    device = simulated(5)
    bench_planes = device.allocate_planes(2, block_bytes=64, num_blocks=4)
    engine = OffloadEngine(KVLayout([bench_planes]), device=device, num_slots=4)
    for index in range(3):
        engine.store([index], [index])
        engine.load([index], [index])
    engine.drain(10)
    return device, engine, device.allocate(100)


def test_every_call_of_closing_fails_once_and_closing_again_finishes() -> None:
    device, engine, buffer = _used_device()
    assert device.simulator is not None
    device.simulator.faults.calls = []
    device.close()
    names = [name for name, _ in device.simulator.faults.calls]
    for nth, name in enumerate(names, start=1):
        device, engine, buffer = _used_device()
        simulator = device.simulator
        assert simulator is not None
        simulator.faults.fail_nth(nth)
        try:
            device.close()
        except KVOffloadError:
            pass
        simulator.faults.clear()
        device.close()
        with pytest.raises(ClosedError):
            engine.store([1], [1])
        with pytest.raises(ClosedError):
            buffer.to_numpy()
        left = sum(simulator.leaks().values())
        assert left <= (1 if name in LETTING_GO else 0), (name, nth, simulator.leaks())
        assert simulator.violations == []


# memory


def test_failed_transfers_do_not_spoil_bytes_of_others() -> None:
    """Random failures among many transfers: whatever is reported as done is right."""
    rng = np.random.default_rng(7)
    with simulated(6) as device, rig(device, num_blocks=40, num_slots=40) as bench:
        assert device.simulator is not None
        for _ in range(60):
            slot, block = int(rng.integers(40)), int(rng.integers(40))
            device.simulator.faults.clear()
            if rng.random() < 0.4:
                device.simulator.faults.fail_nth(int(rng.integers(1, 12)))
            bench.engine.slots[slot] = 200
            try:
                bench.engine.store([block], [slot]).wait(10)
            except KVOffloadError:
                continue
            assert (bench.slot(slot) == block + 1).all()
        device.simulator.faults.clear()
        bench.engine.drain(10)
        whole(bench.engine)

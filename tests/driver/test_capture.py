"""Other streams being captured into graphs, in this thread and in others: no entry point breaks their capture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from capture_probe import GLOBAL, RELAXED, THREAD_LOCAL, Capturing, pushed
from helpers import STAGING, copiers_in
from strategies import engine_on, slab_of

import kvoffload
from kvoffload import NO_WAIT, BlockCache, KVLayout, OffloadEngine
from kvoffload.testing import scramble


def exchange(device: kvoffload.Device, mode: Any) -> Any:
    status, before = device.simulator.cuThreadExchangeStreamCaptureMode(mode)
    assert int(status) == 0
    return before


def mode_of(device: kvoffload.Device) -> Any:
    """The calling thread's capture mode."""
    before = exchange(device, GLOBAL)
    exchange(device, before)
    return before


METHODS = pytest.mark.parametrize(
    ("mode", "other_thread"),
    [(GLOBAL, False), (GLOBAL, True), (THREAD_LOCAL, False), (RELAXED, False)],
    ids=["global", "global, other thread", "thread local", "relaxed"],
)


@METHODS
def test_pitfall_07_transfers_and_a_capture_do_not_disturb_each_other(
    any_device: kvoffload.Device, seed: int, mode: Any, other_thread: bool
) -> None:
    planes = any_device.allocate_planes(4, block_bytes=64, num_blocks=8)
    before = scramble(slab_of(planes), seed)
    with OffloadEngine(KVLayout([planes]), device=any_device, num_slots=8) as engine:
        capture = Capturing(any_device, mode, other_thread=other_thread)
        for copier in copiers_in(engine):
            job = engine.store(range(8), range(8), copier=copier)
            job.order_before(1)
            assert job.wait(10).error is None
            second = engine.load(range(8), range(8), after=NO_WAIT, copier=copier)
            while not second.done:
                pass
            assert [result.error for result in engine.poll()] == [None]
        with OffloadEngine(engine.layout, device=any_device, num_slots=1):
            pass
        third = engine.load(range(8), range(8))
        engine.drain(10)
        assert third.result().error is None
        assert capture.end() == "CUDA_SUCCESS"
        assert (slab_of(planes).to_numpy() == before).all()


@METHODS
def test_pitfall_07_everything_else_leaves_a_capture_alone_too(
    device: kvoffload.Device, mode: Any, other_thread: bool
) -> None:
    capture = Capturing(device, mode, other_thread=other_thread)
    with kvoffload.open_device(backend=device.simulator) as second, second.allocate(64) as buffer:
        buffer.copy_from(np.arange(64, dtype=np.uint8))
        assert buffer.to_numpy()[9] == 9
        with engine_on(second) as engine:
            cache = BlockCache(engine)
            cache.store([b"a"], [1]).wait(10)
            cache.load([b"a"], [2]).wait(10)
            engine.statistics()
        second.allocate(64)
        second.reclaim()
    assert capture.end() == "CUDA_SUCCESS"


def test_the_capture_notices_a_call_in_a_mode_that_is_not_relaxed(device: kvoffload.Device) -> None:
    """What the tests above would see if an entry point forgot."""
    capture = Capturing(device, GLOBAL, other_thread=False)
    with device.current():
        event = device.driver.event_create(timing=False)
    with pushed(device), pytest.raises(kvoffload.DriverError, match="STREAM_CAPTURE_UNSUPPORTED"):
        device.driver.event_query(event)
    assert capture.end() == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    with device.current():
        device.driver.event_destroy(event)


# the thread's mode


def entry_points(device: kvoffload.Device, engine: OffloadEngine) -> dict[str, Callable[[], object]]:
    job = engine.store([0], [0])
    buffer = device.allocate(64)
    return {
        "open_device": lambda: kvoffload.open_device(backend=device.simulator).close(),
        "allocate": lambda: device.allocate(64),
        "copy_from": lambda: buffer.copy_from(np.zeros(64, np.uint8)),
        "to_numpy": buffer.to_numpy,
        "engine": lambda: engine_on(device).close(),
        "engine with kernels": lambda: engine_on(device, staging_bytes=STAGING).close(),
        "store": lambda: engine.store([1], [1]),
        "load": lambda: engine.load([1], [1]),
        "pack": lambda: engine.store(range(8), range(8), copier="pack"),
        "pack, load": lambda: engine.load(range(8), range(8), copier="pack"),
        "order_before": lambda: job.order_before(1),
        "done": lambda: job.done,
        "wait": lambda: job.wait(10),
        "poll": engine.poll,
        "drain": lambda: engine.drain(10),
        "reclaim": device.reclaim,
        "buffer.close": buffer.close,
        "engine.close": engine.close,
    }


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.kernels
def test_every_entry_point_is_relaxed_inside_and_restores_the_callers_mode(device: kvoffload.Device, mode: Any) -> None:
    exchange(device, mode)
    try:
        with device.current():
            assert mode_of(device) == RELAXED
            with device.current():
                assert mode_of(device) == RELAXED
            assert mode_of(device) == RELAXED
        for name, call in entry_points(device, engine_on(device, staging_bytes=STAGING)).items():
            call()
            assert mode_of(device) == mode, name
    finally:
        exchange(device, GLOBAL)


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL])
def test_the_callers_mode_is_restored_when_the_body_raises(device: kvoffload.Device, mode: Any) -> None:
    exchange(device, mode)
    engine, faults = engine_on(device), device.simulator.faults

    def mine() -> None:
        with device.current():
            raise RuntimeError("mine")

    try:
        with pytest.raises(RuntimeError, match="mine"):
            mine()
        assert mode_of(device) == mode
        faults.fail_call("cuMemAlloc", error=2)
        with pytest.raises(kvoffload.CapacityError):
            device.allocate(64)
        assert mode_of(device) == mode
        faults.fail_call("cuEventRecord")
        with pytest.raises(kvoffload.DriverError, match="cuEventRecord"):
            engine.store([0], [0])
        assert mode_of(device) == mode
        faults.fail_call("cuMemHostRegister")
        with pytest.raises(kvoffload.CapacityError, match="cannot pin"):
            engine_on(device)
        assert mode_of(device) == mode
        faults.fail_call("cuThreadExchangeStreamCaptureMode")
        with pytest.raises(kvoffload.DriverError, match="cuThreadExchangeStreamCaptureMode"):
            device.reclaim()
        assert mode_of(device) == mode
        assert device.simulator.context_stack == []
    finally:
        exchange(device, GLOBAL)
        engine.close()


def test_another_threads_mode_is_not_touched(device: kvoffload.Device) -> None:
    seen: list[Any] = []
    with device.current():
        thread = threading.Thread(target=lambda: seen.append(mode_of(device)))
        thread.start()
        thread.join(10)
        assert mode_of(device) == RELAXED
    assert seen == [GLOBAL]

"""Pools, lanes with their sharing and limits, and streams of other programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from cuda.bindings import runtime

import kvoffload
from kvoffload import NO_WAIT, CapacityError, KVLayout, OffloadEngine, TransferError
from kvoffload.driver import Driver
from kvoffload.streams import (
    QUEUE_LIMIT,
    EventPool,
    Lane,
    PooledStream,
    StreamPool,
    refuse_capturing,
    stream_handle,
)

LEGACY, PER_THREAD = 1, 2


@pytest.fixture
def driver(device: kvoffload.Device) -> Iterator[Driver]:
    """The driver of a simulated device whose context is current."""
    with device.current():
        yield device.driver


@pytest.fixture
def engine(device: kvoffload.Device) -> Iterator[OffloadEngine]:
    layout = KVLayout([device.allocate_planes(4, block_bytes=64, num_blocks=8)])
    with OffloadEngine(layout, device=device, num_slots=8) as made:
        yield made


# pools


def test_a_stream_pool_makes_streams_when_needed_and_reuses_them(driver: Driver, device: kvoffload.Device) -> None:
    pool = StreamPool(driver, 2, priority=0)
    assert (pool.created, pool.in_use) == (0, 0)
    first, second = pool.acquire(), pool.acquire()
    assert first is not None
    assert second is not None
    assert first.handle != second.handle
    assert pool.acquire() is None
    assert (pool.created, pool.in_use) == (2, 2)
    pool.release(first)
    assert pool.acquire() is first
    pool.release(first)
    pool.release(second)
    pool.close()
    assert (pool.created, device.simulator.leaks()["streams"]) == (0, 0)


def test_a_stream_with_work_is_not_given_back(driver: Driver) -> None:
    pool = StreamPool(driver, 1, priority=0)
    stream = pool.acquire()
    assert stream is not None
    stream.queued = 1
    with pytest.raises(AssertionError):
        pool.release(stream)
    stream.queued = 0
    pool.release(stream)
    pool.close()


def test_a_stream_that_cannot_be_made_is_not_counted(driver: Driver, device: kvoffload.Device) -> None:
    pool = StreamPool(driver, 2, priority=0)
    device.simulator.faults.fail_call("cuStreamCreateWithPriority")
    with pytest.raises(kvoffload.DriverError):
        pool.acquire()
    assert (pool.created, pool.in_use) == (0, 0)


def test_an_event_pool_is_bounded_and_says_so(driver: Driver, device: kvoffload.Device) -> None:
    pool = EventPool(driver, 2, timing=False)
    events = [pool.acquire(), pool.acquire()]
    with pytest.raises(CapacityError, match=r"all 2 events are in use; poll\(\)"):
        pool.acquire()
    pool.release(events[0])
    assert pool.acquire() == events[0]
    for event in events:
        pool.release(event)
    pool.close()
    assert (pool.created, pool.in_use, device.simulator.leaks()["events"]) == (0, 0, 0)


def test_an_event_that_cannot_be_made_is_not_counted(driver: Driver, device: kvoffload.Device) -> None:
    pool = EventPool(driver, 2, timing=True)
    device.simulator.faults.fail_call("cuEventCreate")
    with pytest.raises(kvoffload.DriverError):
        pool.acquire()
    assert (pool.created, pool.in_use) == (0, 0)


@pytest.mark.parametrize("timing", [True, False])
def test_only_timing_events_can_be_measured(driver: Driver, timing: bool) -> None:
    pool = EventPool(driver, 2, timing=timing)
    start, end = pool.acquire(), pool.acquire()
    for event in (start, end):
        driver.event_record(event, LEGACY)
    driver.stream_synchronize(LEGACY)
    if timing:
        assert driver.event_seconds(start, end) >= 0
    else:
        with pytest.raises(kvoffload.DriverError, match="cuEventElapsedTime"):
            driver.event_seconds(start, end)
    pool.release(start)
    pool.release(end)
    pool.close()


def test_a_pool_that_fails_to_destroy_one_stream_destroys_the_others(driver: Driver, device: kvoffload.Device) -> None:
    pool = StreamPool(driver, 3, priority=0)
    for stream in [pool.acquire() for _ in range(3)]:
        assert stream is not None
        pool.release(stream)
    device.simulator.faults.fail_call("cuStreamDestroy", nth=2, after=True)
    with pytest.raises(kvoffload.DriverError):
        pool.close()
    assert device.simulator.leaks()["streams"] == 0


# lanes


def lane_of(driver: Driver, limit: int) -> tuple[Lane, StreamPool]:
    pool = StreamPool(driver, limit, priority=0)
    return Lane(pool), pool


def test_a_lane_fills_a_stream_before_it_takes_another(driver: Driver) -> None:
    lane, pool = lane_of(driver, 4)
    assert lane.tail is None
    first = lane.take(QUEUE_LIMIT - 10)
    assert lane.take(10) is first
    assert first.queued == QUEUE_LIMIT
    second = lane.take(1)
    assert second is not first
    assert lane.tail is second
    for stream, operations in ((first, QUEUE_LIMIT - 10), (first, 10), (second, 1)):
        lane.give_back(stream, operations)
    assert lane.tail is None
    assert (pool.created, pool.in_use) == (2, 0)
    pool.close()


def test_a_stream_goes_back_to_the_pool_when_the_last_of_its_work_has_ended(driver: Driver) -> None:
    lane, pool = lane_of(driver, 2)
    stream = lane.take(5)
    lane.take(7)
    lane.give_back(stream, 5)
    assert (pool.in_use, stream.queued) == (1, 7)
    lane.give_back(stream, 7)
    assert pool.in_use == 0
    pool.close()


def test_with_the_pool_empty_a_lane_goes_back_to_a_stream_that_has_room(driver: Driver) -> None:
    lane, pool = lane_of(driver, 2)
    first, second = lane.take(500), lane.take(500)
    lane.give_back(first, 300)
    assert lane.take(400) is first
    assert lane.tail is first  # the latest work is there now
    assert lane.take(100) is first
    assert lane.take(260) is second
    assert max(first.queued, second.queued) <= QUEUE_LIMIT
    with pytest.raises(CapacityError, match=r"1460 operations are queued in this direction.*poll\(\)"):
        lane.take(100)
    assert (first.queued, second.queued) == (700, 760)  # nothing has changed
    for stream in (first, second):
        lane.give_back(stream, stream.queued)
    pool.close()


def test_two_lanes_share_a_pool_and_no_stream(driver: Driver) -> None:
    pool = StreamPool(driver, 2, priority=0)
    one, other = Lane(pool), Lane(pool)
    streams: list[PooledStream] = [one.take(1), other.take(1)]
    assert streams[0] is not streams[1]
    with pytest.raises(CapacityError, match="1 operations are queued"):
        other.take(QUEUE_LIMIT)
    one.give_back(streams[0], 1)
    assert other.take(QUEUE_LIMIT) is streams[0]
    other.give_back(streams[0], QUEUE_LIMIT)
    other.give_back(streams[1], 1)
    pool.close()


def test_no_queue_of_an_engine_is_filled_beyond_the_limit(device: kvoffload.Device) -> None:
    layout = KVLayout([device.allocate_planes(1, block_bytes=16, num_blocks=64)])
    simulator = device.simulator
    with OffloadEngine(layout, device=device, num_slots=64) as engine:
        with device.current():
            gate = device.driver.stream_create(0)
            word = engine.slots[63, 4092:].view(np.uint32)
            word[0] = 0
            address = int(word.__array_interface__["data"][0])
            device.driver.call("cuStreamWaitValue32", gate, address, 1, 0)
        for _ in range(60):
            engine.store(range(60), range(60), after=gate, copier="loop")
        deepest = max(len(stream.queue) for stream in simulator.streams.values())
        assert deepest <= 1022
        assert simulator.blocked_submissions == 0
        assert engine.statistics().streams_in_use >= 60 * 60 // QUEUE_LIMIT
        word[0] = 1
        engine.drain(timeout=30)
        assert engine.statistics().streams_in_use == 0
        with device.current():
            device.driver.stream_destroy(gate)


@pytest.mark.parametrize("priority", [0, -1, -5])
def test_streams_are_made_with_the_priority_asked_for(device: kvoffload.Device, priority: int) -> None:
    layout = KVLayout([device.allocate_planes(1, block_bytes=16, num_blocks=4)])
    device.simulator.faults.calls = []
    with OffloadEngine(layout, device=device, num_slots=4, stream_priority=priority) as engine:
        engine.store([0], [0]).wait(10)
    made = [args for name, args in device.simulator.faults.calls if name == "cuStreamCreateWithPriority"]
    assert made == [(1, priority)]  # non-blocking


def test_a_priority_out_of_range_is_refused(device: kvoffload.Device) -> None:
    layout = KVLayout([device.allocate_planes(1, block_bytes=16, num_blocks=4)])
    with pytest.raises(ValueError, match=r"stream_priority must be in -5 \.\. 0, got 1"):
        OffloadEngine(layout, device=device, num_slots=4, stream_priority=1)


# streams of other programs


class WithMethod:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


class WithAttribute:
    __cuda_stream__ = (0, 0x77)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, LEGACY),
        (LEGACY, LEGACY),
        (PER_THREAD, PER_THREAD),
        (0x7F00_1234_5670, 0x7F00_1234_5670),
        (np.int64(0x77), 0x77),
        (np.uint64(0), LEGACY),
        (cuda.CUstream(0x77), 0x77),
        (cuda.CUstream(0), LEGACY),
        (runtime.cudaStream_t(0x77), 0x77),
        (WithMethod(0x77), 0x77),
        (WithMethod(0), LEGACY),
        (WithAttribute(), 0x77),
    ],
)
def test_pitfall_07_every_kind_of_stream_becomes_a_handle_and_0_becomes_1(stream: Any, handle: int) -> None:
    found = stream_handle(stream, "after")
    assert found == handle
    assert type(found) is int


@pytest.mark.parametrize("stream", [None, "1", 1.0, True, False, object(), [1], b"1", NO_WAIT, np.array([1])])
def test_pitfall_07_anything_else_is_refused_by_name(stream: Any) -> None:
    with pytest.raises(TypeError, match=r"after must be a stream handle \(int\) or an object with __cuda_stream__"):
        stream_handle(stream, "after")


def test_pitfall_07_negative_handles_are_refused(engine: OffloadEngine) -> None:
    with pytest.raises((TypeError, ValueError, kvoffload.DriverError)):
        engine.store([0], [0], after=-1)
    assert engine.statistics().in_flight == 0


@pytest.mark.parametrize("after", [None, 0, LEGACY, PER_THREAD, WithMethod(0), "own", NO_WAIT])
def test_pitfall_07_no_copy_call_ever_gets_a_default_stream(any_device: kvoffload.Device, after: Any) -> None:
    layout = KVLayout([any_device.allocate_planes(6, block_bytes=64, num_blocks=8)])
    calls = any_device.simulator.faults.calls = []
    with any_device.current():
        own = any_device.driver.stream_create(0)
    with OffloadEngine(layout, device=any_device, num_slots=8) as engine:
        for copier in ("strided", "loop", None):
            job = engine.store([1, 2], [1, 2], after=own if after == "own" else after, copier=copier)
            job.order_before(own if after in ("own", NO_WAIT, None) else after)
            job.wait(10)
    with any_device.current():
        any_device.driver.stream_destroy(own)
    submitted = {int(args[-1]) for name, args in calls if "memcpy" in name.lower()}
    assert submitted
    assert not {0, LEGACY, PER_THREAD} & submitted
    named = {int(args[1]) for name, args in calls if name == "cuEventRecord"}
    assert 0 not in named  # the bindings may read 0 as the per-thread stream
    waited = {int(args[0]) for name, args in calls if name == "cuStreamWaitEvent"}
    assert 0 not in waited


def test_pitfall_07_after_none_waits_for_the_legacy_stream_and_no_wait_for_nothing(
    engine: OffloadEngine, device: kvoffload.Device
) -> None:
    calls = device.simulator.faults.calls = []
    engine.store([0], [0]).wait(10)
    assert LEGACY in {int(args[1]) for name, args in calls if name == "cuEventRecord"}
    calls.clear()
    engine.store([0], [0], after=NO_WAIT).wait(10)
    assert "cuStreamWaitEvent" not in {name for name, _ in calls}
    assert LEGACY not in {int(args[1]) for name, args in calls if name == "cuEventRecord"}


# capture


@pytest.fixture
def capturing(device: kvoffload.Device) -> Iterator[int]:
    """A blocking stream of the caller's that is being captured."""
    with device.current():
        stream = int(device.driver.call("cuStreamCreateWithPriority", 0, 0))
        mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        assert device.simulator.cuStreamBeginCapture(stream, mode)[0] == 0
    yield stream
    with device.current():
        assert device.simulator.cuStreamEndCapture(stream)[0] == 0  # not invalidated, nothing unjoined
        device.driver.stream_destroy(stream)


def test_pitfall_07_a_capturing_stream_is_a_clear_error_and_the_capture_goes_on(
    engine: OffloadEngine, capturing: int
) -> None:
    for transfer in (engine.store, engine.load):
        with pytest.raises(TransferError, match=rf"after={capturing:#x} is being captured into a graph.*NO_WAIT"):
            transfer([0], [0], after=capturing)
    assert engine.statistics().in_flight == 0
    job = engine.store([0], [0], after=NO_WAIT)
    with pytest.raises(TransferError, match=rf"stream={capturing:#x} is being captured"):
        job.order_before(capturing)
    job.wait(10)


def test_pitfall_07_the_legacy_stream_counts_as_captured_while_a_blocking_stream_is(
    engine: OffloadEngine, capturing: int
) -> None:
    assert capturing
    with pytest.raises(TransferError, match="after=0x1 is being captured"):
        engine.store([0], [0])
    assert engine.statistics().in_flight == 0


def test_other_failures_of_the_question_are_passed_on(driver: Driver, device: kvoffload.Device) -> None:
    device.simulator.faults.fail_call("cuStreamIsCapturing", error=cuda.CUresult.CUDA_ERROR_INVALID_HANDLE)
    with pytest.raises(kvoffload.DriverError, match="cuStreamIsCapturing returned CUDA_ERROR_INVALID_HANDLE"):
        refuse_capturing(driver, LEGACY, "after")
    refuse_capturing(driver, LEGACY, "after")

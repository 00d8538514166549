"""Events, lanes and what they have no room for, and streams of other programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from cuda.bindings import runtime
from helpers import COPY_ENGINE_ONLY, ENGINE_STREAMS, LANE_STREAMS, held_stream
from strategies import slab_of

import kvoffload
from kvoffload import NO_WAIT, CapacityError, KVLayout, OffloadEngine, TransferError
from kvoffload.device.streams import (
    QUEUE_LIMIT,
    STREAMS_PER_LANE,
    EventPool,
    Lane,
    LaneStream,
    refuse_capturing,
    stream_handle,
)
from kvoffload.driver import Driver
from kvoffload.engine.launcher import stream_with_room
from kvoffload.testing import scramble
from kvoffload.tuning import CopierName

LEGACY, PER_THREAD = 1, 2


@pytest.fixture
def driver(device: kvoffload.Device) -> Iterator[Driver]:
    """The driver of a simulated device whose context is current."""
    with device.current():
        yield device.driver


@pytest.fixture
def engine(device: kvoffload.Device) -> Iterator[OffloadEngine]:
    layout = KVLayout([device.allocate_planes(4, block_bytes=64, num_blocks=8)])
    with OffloadEngine(layout, device=device, num_slots=8, **COPY_ENGINE_ONLY) as made:
        yield made


# events


def test_an_event_pool_is_bounded_and_says_so(driver: Driver, device: kvoffload.Device) -> None:
    pool = EventPool(driver, 2, timing=False)
    events = [pool.make(), pool.make()]
    with pytest.raises(CapacityError, match=r"all 2 events are in use; poll\(\)"):
        pool.make()
    assert (pool.created, pool.in_use, pool.idle) == (2, 2, [])
    pool.idle.append(events[0])
    assert (pool.created, pool.in_use) == (2, 1)
    pool.keep_in_use({events[1], 12345})
    assert pool.idle == [events[0]]
    pool.keep_in_use(set())
    assert sorted(pool.idle) == sorted(events)
    pool.close()
    assert (pool.created, pool.in_use, device.simulator.leaks()["events"]) == (0, 0, 0)


def test_an_event_that_cannot_be_made_is_not_counted(driver: Driver, device: kvoffload.Device) -> None:
    pool = EventPool(driver, 2, timing=True)
    device.simulator.faults.fail_call("cuEventCreate")
    with pytest.raises(kvoffload.DriverError):
        pool.make()
    assert (pool.created, pool.in_use) == (0, 0)


@pytest.mark.parametrize("timing", [True, False])
def test_only_timing_events_can_be_measured(driver: Driver, timing: bool) -> None:
    pool = EventPool(driver, 2, timing=timing)
    start, end = pool.make(), pool.make()
    for event in (start, end):
        driver.event_record(event, LEGACY)
    driver.stream_synchronize(LEGACY)
    if timing:
        assert driver.event_seconds(start, end) >= 0
    else:
        with pytest.raises(kvoffload.DriverError, match="cuEventElapsedTime"):
            driver.event_seconds(start, end)
    pool.idle += (start, end)
    pool.close()


# lanes


def open_lane(driver: Driver, priority: int = 0) -> Lane:
    lane = Lane(driver)
    lane.open(priority, priority)
    return lane


def take(lane: Lane, places: int, *, kernel: bool = False) -> LaneStream | None:
    """What the launcher does: places on the stream that has room, or None."""
    stream = stream_with_room(lane, places, kernel)
    if stream is not None:
        stream.places += places
    return stream


def test_a_lane_makes_its_streams_at_once_and_destroys_them_all(driver: Driver, device: kvoffload.Device) -> None:
    lane = open_lane(driver, -2)
    assert len({stream.handle for stream in lane.streams}) == LANE_STREAMS
    assert device.simulator.leaks()["streams"] == LANE_STREAMS
    assert lane.in_use == 0
    device.simulator.faults.fail_call("cuStreamDestroy", nth=2, after=True)
    with pytest.raises(kvoffload.DriverError):
        lane.close()
    lane.close()
    assert device.simulator.leaks()["streams"] == 0


@pytest.mark.parametrize("nth", range(1, LANE_STREAMS + 1))
def test_a_lane_that_cannot_have_all_its_streams_can_be_closed(
    driver: Driver, device: kvoffload.Device, nth: int
) -> None:
    lane = Lane(driver)
    device.simulator.faults.fail_call("cuStreamCreateWithPriority", nth=nth)
    with pytest.raises(kvoffload.DriverError, match="cuStreamCreateWithPriority"):
        lane.open(0, 0)
    assert device.simulator.leaks()["streams"] == nth - 1
    lane.close()
    assert device.simulator.leaks()["streams"] == 0


def test_a_lane_fills_a_stream_before_it_takes_the_next(driver: Driver) -> None:
    lane = open_lane(driver)
    first = take(lane, QUEUE_LIMIT - 10)
    assert first is lane.streams[0]
    assert take(lane, 10) is first
    assert first.places == QUEUE_LIMIT
    second = take(lane, 1)
    assert second is lane.streams[1]
    assert lane.in_use == 2
    first.places = 0
    assert take(lane, 1) is second  # the order of the work is the order of the streams
    lane.close()


def test_a_full_lane_says_no_and_goes_round_to_the_stream_that_drains_first(driver: Driver) -> None:
    lane = open_lane(driver)
    streams = [take(lane, 500) for _ in range(STREAMS_PER_LANE)]
    assert streams == [*lane.streams[:-1]]
    before = [stream.places for stream in lane.streams]
    assert take(lane, 300) is None
    assert [stream.places for stream in lane.streams] == before
    lane.streams[1].places -= 500  # not the next one round: work may not overtake what is on stream 0
    assert take(lane, 300) is None
    lane.streams[0].places -= 300
    assert take(lane, 300) is lane.streams[0]
    assert take(lane, 200) is lane.streams[0]
    assert max(stream.places for stream in lane.streams) <= QUEUE_LIMIT
    lane.close()


def test_the_stream_for_kernels_is_apart_from_those_for_copies(driver: Driver) -> None:
    lane = open_lane(driver)
    kernels = take(lane, QUEUE_LIMIT, kernel=True)
    assert kernels is lane.streams[-1]
    assert [take(lane, 500) for _ in range(STREAMS_PER_LANE)] == [*lane.streams[:-1]]
    assert take(lane, 500) is None
    assert kernels is not None
    assert take(lane, 1, kernel=True) is None, "it is full as others are"
    kernels.places -= 1
    assert take(lane, 1, kernel=True) is kernels
    assert take(lane, 500) is None, "room there is none for copies"
    lane.close()


@pytest.mark.parametrize("copier", ["strided", "batch", "loop"])
def test_pitfall_06_what_finds_no_room_is_held_on_the_host_and_ends_in_order(
    device: kvoffload.Device, copier: CopierName
) -> None:
    """Far more work than the driver's queues hold, behind a gate: no call blocks, and all of it is done in the end."""
    planes = device.allocate_planes(1, block_bytes=16, num_blocks=1024)
    content = scramble(slab_of(planes), 5)
    simulator = device.simulator
    options = {"num_slots": 1025, **COPY_ENGINE_ONLY}
    with OffloadEngine(KVLayout([planes]), device=device, **options) as engine, held_stream(device) as (stream, held):
        jobs = [engine.store(range(1024), range(1024), after=stream, copier=copier) for _ in range(12)]
        statistics = engine.statistics()
        assert (statistics.in_flight, statistics.streams) == (12, ENGINE_STREAMS)
        deepest = max(stream.occupied for stream in simulator.streams.values())
        assert deepest <= QUEUE_LIMIT + 2
        assert simulator.blocked_submissions == 0
        if copier == "batch":
            assert statistics.held == 0
        else:
            assert statistics.held >= 12 - STREAMS_PER_LANE  # a job of 1024 operations takes more than a stream
            with pytest.raises(CapacityError, match="the driver's queues are full"):
                jobs[-1].order_before(1)
        held.open()
        ended: list[int] = []
        while len(ended) < 12:
            ended += [result.job_id for result in engine.poll()]
        assert ended == [job.id for job in jobs]
        assert all(job.error is None for job in jobs)
        statistics = engine.statistics()
        assert (statistics.held, statistics.streams_in_use, statistics.events_in_use) == (0, 0, 0)
        assert (engine.slots[:1024, :16].reshape(-1) == content[: 1024 * 16]).all()


def test_pitfall_06_a_load_follows_a_store_that_is_held(device: kvoffload.Device) -> None:
    """The store into slots 0 to 1023 is not on the GPU yet when the load from them is submitted."""
    planes = device.allocate_planes(1, block_bytes=16, num_blocks=2048)
    content = scramble(slab_of(planes), 6)
    options = {"num_slots": 1025, **COPY_ENGINE_ONLY}
    with OffloadEngine(KVLayout([planes]), device=device, **options) as engine, held_stream(device) as (stream, held):
        for _ in range(6):
            engine.store(range(1024), range(1024), after=stream, copier="loop")
        engine.slots[:1024] = 0
        last = engine.load(range(1024), range(1024, 2048), after=NO_WAIT)
        device.simulator.run_all()
        engine.poll()
        assert not last.done
        held.open()
        assert last.wait(20).error is None
        assert (slab_of(planes).to_numpy()[1024 * 16 : 2048 * 16] == content[: 1024 * 16]).all()


def test_pitfall_06_no_transfer_is_too_long(device: kvoffload.Device) -> None:
    """Through every copier, and as its own choice: more operations than all queues hold, queued as room is made."""
    many = 110_000
    planes = device.allocate_planes(4, block_bytes=1, num_blocks=4)
    layout, num_slots = KVLayout([planes], blocks_per_slot=4096), many // 4096 + 1
    with OffloadEngine(layout, device=device, num_slots=num_slots, **COPY_ENGINE_ONLY) as engine:
        blocks, slots = np.arange(many) % 4, np.arange(many // 4096 + 1)
        for copier in ("strided", None):
            job = engine.store(blocks, slots, copier=copier)
            assert engine.statistics().held == 1
            assert job.wait(60).error is None
            assert job.copier == "strided"
            assert device.simulator.blocked_submissions == 0


@pytest.mark.parametrize("priority", [0, -1, -5])
def test_streams_are_made_with_the_priority_asked_for(device: kvoffload.Device, priority: int) -> None:
    layout = KVLayout([device.allocate_planes(1, block_bytes=16, num_blocks=4)])
    device.simulator.faults.calls = []
    with OffloadEngine(layout, device=device, num_slots=4, stream_priority=priority) as engine:
        engine.store([0], [0]).wait(10)
    made = [args for name, args in device.simulator.faults.calls if name == "cuStreamCreateWithPriority"]
    assert made == [(1, priority)] * ENGINE_STREAMS  # non-blocking


def test_without_a_priority_kernels_go_first(device: kvoffload.Device) -> None:
    layout = KVLayout([device.allocate_planes(1, block_bytes=512, num_blocks=4)])
    device.simulator.faults.calls = []
    with OffloadEngine(layout, device=device, num_slots=4):
        pass
    made = [args[1] for name, args in device.simulator.faults.calls if name == "cuStreamCreateWithPriority"]
    assert made == [0, 0, 0, 0, -5] * 2, "of stores, then of loads"


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


@pytest.mark.parametrize("stream", [None, "1", 1.0, -1, True, False, object(), [1], b"1", NO_WAIT, np.array([1])])
def test_pitfall_07_anything_else_is_refused_by_name(stream: Any) -> None:
    with pytest.raises(TypeError, match=r"after must be a stream handle \(int\) or an object with __cuda_stream__"):
        stream_handle(stream, "after")


@pytest.mark.parametrize("after", [None, 0, LEGACY, PER_THREAD, WithMethod(0), "own", NO_WAIT])
@pytest.mark.kernels
def test_pitfall_07_no_copy_call_ever_gets_a_default_stream(any_device: kvoffload.Device, after: Any) -> None:
    layout = KVLayout([any_device.allocate_planes(6, block_bytes=64, num_blocks=8)])
    calls = any_device.simulator.faults.calls = []
    with any_device.current():
        own = any_device.driver.stream_create(0)
    with OffloadEngine(layout, device=any_device, num_slots=8) as engine:
        for copier in ("strided", "loop", "pack", None):
            job = engine.store([1, 2], [1, 2], after=own if after == "own" else after, copier=copier)
            job.order_before(own if after in ("own", NO_WAIT, None) else after)
            job.wait(10)
    with any_device.current():
        any_device.driver.stream_destroy(own)
    submitted = {int(args[-1]) for name, args in calls if "memcpy" in name.lower() and "async" in name.lower()}
    submitted |= {int(args[8]) for name, args in calls if name == "cuLaunchKernel"}
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


def test_pitfall_07_the_legacy_stream_counts_as_captured_while_a_blocking_stream_is(
    engine: OffloadEngine, capturing: int
) -> None:
    assert capturing
    with pytest.raises(TransferError, match="after=0x1 is being captured"):
        engine.store([0], [0])
    assert engine.statistics().in_flight == 0


def test_other_failures_of_the_question_are_passed_on(driver: Driver, device: kvoffload.Device) -> None:
    device.simulator.faults.fail_call("cuStreamIsCapturing", error=cuda.CUresult.CUDA_ERROR_INVALID_VALUE)
    with pytest.raises(kvoffload.DriverError, match="cuStreamIsCapturing returned CUDA_ERROR_INVALID_VALUE"):
        refuse_capturing(driver, LEGACY, "after")
    refuse_capturing(driver, LEGACY, "after")


@pytest.mark.parametrize(("name", "remedy"), [("after", "pass NO_WAIT, or open"), ("stream", "HANDLE[)]: open")])
def test_a_handle_that_cuda_does_not_know_is_named(driver: Driver, name: str, remedy: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{name}=0x1e240 is no stream of this device's context .*{remedy} the device"
    ):
        refuse_capturing(driver, 123456, name)

"""OffloadEngine: arguments, refusals, copiers, streams of other libraries, capture, groups, contexts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import COPY_ENGINE_ONLY, LEVELS, STAGING, Rig, number_blocks, rig, simulated, whole

import kvoffload
from kvoffload import (
    NO_WAIT,
    CapabilityError,
    KVLayout,
    LayoutError,
    OffloadEngine,
    Plane,
)
from kvoffload.simulator import SimulatedDriver
from kvoffload.tuning import COPIERS, CopierName


@pytest.fixture(params=LEVELS)
def bench(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with simulated(11, request.param) as device, rig(device) as made:
        yield made
        made.engine.drain(10)
        whole(made.engine)


def busy(bench: Rig) -> Any:
    """A count of everything that a submission would change."""
    simulator: Any = bench.device.simulator
    statistics = bench.engine.statistics()
    return statistics.in_flight, statistics.streams_in_use, statistics.events_in_use, simulator.pending_operations()


# arguments


def test_pitfall_08_planes_that_share_bytes_are_refused() -> None:
    with simulated(1) as device:
        address = device.allocate(1 << 16).address
        planes = [Plane(address + shift, block_bytes=64, num_blocks=8) for shift in (0, 256)]
        with pytest.raises(LayoutError, match="share bytes"):
            KVLayout([planes])


@pytest.mark.parametrize("copier", COPIERS)
def test_a_repeated_source_block_is_stored_to_each_of_its_slots(device: kvoffload.Device, copier: CopierName) -> None:
    """Also twice in one slot, and next to others."""
    planes = device.allocate_planes(2, block_bytes=64, num_blocks=16)
    number_blocks(planes, 1)
    layout = KVLayout([planes], blocks_per_slot=2, slot_order="block-major")
    with OffloadEngine(layout, device=device, num_slots=4, staging_bytes=STAGING) as engine:
        engine.store([1, 1, 2, 1, 3], [2, 0, 1], copier=copier).wait(10)
        stored = engine.slots[[2, 0, 1], : 2 * 128].reshape(6, 128)[:5]
        assert (stored == np.array([[2], [2], [3], [2], [4]])).all()
        engine.load([2, 2], [10, 11, 12, 13], copier=copier).wait(10)  # a slot as a source, twice
        for text, blocks in ((r"blocks\[[01]\] repeats 10", [10, 10]), (r"blocks\[[12]\] repeats 11", [10, 11, 11])):
            with pytest.raises(LayoutError, match=f"^{text}; the targets of a transfer must be distinct$"):
                engine.load(range(-(-len(blocks) // 2)), blocks, copier=copier)


# copiers


@pytest.mark.parametrize("copier", ["strided", "batch", "loop"])
def test_a_copier_asked_for_by_name_is_used_or_refused(bench: Rig, copier: CopierName) -> None:
    if copier == "batch" and not bench.device.capabilities.flat_batch:
        with pytest.raises(CapabilityError, match="cannot run here"):
            bench.engine.store([1], [1], copier=copier)
        return
    job = bench.engine.store([1], [1], copier=copier)
    assert job.wait(10).copier == copier
    assert job.reason == "asked for by name"
    assert (bench.slot(1) == 2).all()


@pytest.mark.parametrize("level", LEVELS)
def test_pack_is_used_where_kernels_are_allowed(level: str) -> None:
    with simulated(11, level) as device, rig(device, staging_bytes=STAGING) as bench:
        job = bench.engine.store(range(8), range(8), copier="pack")
        assert (job.wait(10).copier, job.copier, job.reason) == ("pack", "pack", "asked for by name")
        bench.engine.load(range(8), range(8, 16), copier="pack").wait(10)
        for number in range(8):
            assert (bench.slot(number) == number + 1).all()
            assert (bench.block(8 + number) == number + 1).all()


def test_pack_is_refused_where_kernels_are_forbidden(bench: Rig) -> None:
    before = busy(bench)
    with pytest.raises(CapabilityError, match="copier='pack' cannot run here: staging_bytes=0 forbids kernels"):
        bench.engine.store([1], [1], copier="pack")
    assert busy(bench) == before
    assert bench.engine.missing_copiers["pack"] == "staging_bytes=0 forbids kernels"


def test_without_kernels_the_choice_is_among_the_others(bench: Rig) -> None:
    """One block, whose planes fold and so make one operation; and a plane alone, which the profile finds no better."""
    job = bench.engine.store([1], [1])
    assert (job.wait(10).copier, bench.engine.staging_bytes) == ("strided", 0)
    assert job.reason.startswith("strided: ")
    assert " expected concurrent with compute, " in job.reason
    assert job.copier == "strided"
    with rig(bench.device, planes=1, num_blocks=64, num_slots=64) as alone:
        available = {"strided", "loop"} | ({"batch"} if bench.device.capabilities.flat_batch else set())
        for count in (1, 8, 64):
            assert alone.engine.store(range(count), range(count)).wait(10).copier in available


def test_a_submission_asks_what_has_ended_where_it_needs_to_know() -> None:
    """Not after each transfer of its own direction; after 16 of them, and with transfers of the other direction."""
    with simulated(1) as device, rig(device) as bench:
        simulator: Any = device.simulator
        asked = simulator.faults.call_count
        stream = bench.stream()
        gate = bench.gate(stream)
        before = asked["cuEventQuery"], asked["cuThreadExchangeStreamCaptureMode"]
        for _ in range(16):
            bench.engine.store([1], [1], after=stream)
        assert (asked["cuEventQuery"], asked["cuThreadExchangeStreamCaptureMode"]) == before
        bench.engine.store([1], [1], after=stream)
        assert asked["cuEventQuery"] == before[0] + 1
        bench.engine.load([2], [2], after=stream)
        assert asked["cuEventQuery"] == before[0] + 2
        gate.open()
        bench.engine.drain(10)
        assert (bench.slot(1) == 2).all()


# streams of other libraries


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_pitfall_07_default_streams_never_reach_a_batch_call(bench: Rig, handle: int) -> None:
    simulator: Any = bench.device.simulator
    simulator.faults.calls = []
    job = bench.engine.store([3], [0], after=handle)
    job.order_before(handle)
    job.wait(10)
    for name, arguments in simulator.faults.calls:
        if "Batch" in name or "batch" in name or name == "cuMemcpyAsync":
            assert int(arguments[-1]) > 2
        if name in ("cuEventRecord", "cuStreamWaitEvent", "cuStreamIsCapturing"):
            assert 0 not in [int(argument) for argument in arguments[:2]], "0 may mean either default stream"


def test_a_stream_of_another_device_is_refused_and_nothing_happens() -> None:
    driver = SimulatedDriver(device_count=2, deadlock_seconds=0.3)
    with kvoffload.open_device(0, backend=driver) as device, rig(device) as bench:
        context = driver.cuCtxCreate(None, 0, 1)[1]
        stream = int(driver.cuStreamCreate(1)[1])
        before = busy(bench)
        for call in (bench.engine.store, bench.engine.load):
            with pytest.raises(ValueError, match=f"after={stream:#x} is no stream of this device's context") as caught:
                call([1], [1], after=stream)
            assert "NO_WAIT" in str(caught.value)
        assert busy(bench) == before
        assert bench.engine.poll() == []
        assert (bench.slot(1) == 101).all()
        assert int(driver.cuCtxGetCurrent()[1]) == int(context)
        bench.engine.store([1], [1], after=NO_WAIT).wait(10)
        assert (bench.slot(1) == 2).all()
        driver.cuStreamDestroy(stream)
        driver.cuCtxDestroy(context)


# several groups and sub-blocks


def test_groups_have_block_tables_of_their_own() -> None:
    with simulated(1) as device:
        first = device.allocate_planes(4, block_bytes=64, num_blocks=8)
        second = device.allocate_planes(2, block_bytes=32, num_blocks=20)
        number_blocks(first, 1)
        number_blocks(second, 51)
        with OffloadEngine(KVLayout([first, second]), device=device, num_slots=4, **COPY_ENGINE_ONLY) as engine:
            engine.store([3], [0], group=0)
            engine.store([19], [1], group=1).wait(10)
            engine.drain(10)
            assert (engine.slots[0, :256] == 4).all()
            assert (engine.slots[1, :64] == 70).all()
            assert (engine.slots[1, 64:] == 0).all()
            with pytest.raises(LayoutError, match="outside"):
                engine.store([8], [2], group=0)


@pytest.mark.parametrize("first_sub_block", [0, 1, 2, 3])
def test_sub_blocks_of_partial_slots_stay_as_they_are(first_sub_block: int) -> None:
    with simulated(1) as device:
        planes = device.allocate_planes(2, block_bytes=16, num_blocks=16)
        number_blocks(planes, 1)
        with OffloadEngine(
            KVLayout([planes], blocks_per_slot=4), device=device, num_slots=4, **COPY_ENGINE_ONLY
        ) as engine:
            engine.slots[:] = 99
            blocks = [5, 6, 7, 2, 11]
            slots = [2, 0, 3][: engine.layout.slots_for(5, first_sub_block=first_sub_block)]
            engine.store(blocks, slots, first_sub_block=first_sub_block).wait(10)
            expected = np.full((4, 2, 4), 99)
            for index, block in enumerate(blocks):
                at = first_sub_block + index
                expected[slots[at // 4], :, at % 4] = block + 1
            payload = engine.slots[:, : 2 * 4 * 16].reshape(4, 2, 4, 16)
            assert (payload == expected[..., np.newaxis]).all()
            assert (engine.slots[:, 128:] == 99).all()


# making an engine


def test_planes_that_are_not_this_devices_memory_are_refused() -> None:
    with simulated(1) as device:
        buffer = device.allocate(1000)
        with pytest.raises(LayoutError, match=r"groups\[0\]\[0\].*past the end"):
            OffloadEngine(
                KVLayout([[Plane(buffer.address, block_bytes=100, num_blocks=11)]]), device=device, num_slots=1
            )
        with pytest.raises(LayoutError, match="is not memory of"):
            OffloadEngine(KVLayout([[Plane(64, block_bytes=100, num_blocks=1)]]), device=device, num_slots=1)
        OffloadEngine(
            KVLayout([[Plane(buffer.address, block_bytes=100, num_blocks=10)]]), device=device, num_slots=1
        ).close()


@pytest.mark.parametrize(
    "options",
    [
        {"num_slots": -1},
        {"num_slots": 2.0},
        {"max_in_flight": 0},
        {"staging_bytes": -1},
        {"stream_priority": 3},
        {"num_slots": True},
    ],
    ids=str,
)
def test_bad_options_are_value_errors(options: dict[str, Any]) -> None:
    with simulated(1) as device:
        layout = KVLayout([device.allocate_planes(1, block_bytes=16, num_blocks=4)])
        with pytest.raises(ValueError, match=next(iter(options))):
            OffloadEngine(layout, device=device, **options)
        assert device.simulator is not None
        assert device.simulator.leaks()["registered_ranges"] == 0


def test_stream_priority_reaches_the_driver() -> None:
    with simulated(1) as device:
        layout = KVLayout([device.allocate_planes(1, block_bytes=16, num_blocks=4)])
        simulator: Any = device.simulator
        simulator.faults.calls = []
        with OffloadEngine(layout, device=device, num_slots=4, stream_priority=-5) as engine:
            engine.store([1], [1]).wait(10)
            made = [arguments for name, arguments in simulator.faults.calls if name == "cuStreamCreateWithPriority"]
            assert made
            assert set(made) == {(1, -5)}
            assert engine.statistics().streams == len(made)


def test_the_pool_is_exactly_as_large_as_asked_for() -> None:
    with simulated(1) as device:
        layout = KVLayout([device.allocate_planes(3, block_bytes=1000, num_blocks=4)], blocks_per_slot=3)
        with OffloadEngine(layout, device=device, num_slots=7) as engine:
            assert layout.slot_bytes == 12288
            assert engine.slots.shape == (7, 12288)
            assert engine.slots.dtype == np.uint8
            assert engine.slots.flags.writeable
            assert engine.statistics().pinned_bytes == 7 * 12288


# contexts


def test_a_device_in_a_context_of_the_callers() -> None:
    driver = SimulatedDriver()
    driver.cuInit(0)
    context = driver.cuCtxCreate(None, 0, 0)[1]
    with kvoffload.open_device(backend=driver, context=context) as device, rig(device) as bench:
        bench.engine.store([1], [1]).wait(10)
        assert (bench.slot(1) == 2).all()
    leaks = driver.leaks()
    assert (leaks.pop("contexts"), sum(leaks.values())) == (1, 0), "the caller's context is the caller's to destroy"


def test_completion_shows_users_what_is_theirs(device: kvoffload.Device) -> None:
    with rig(device) as bench:
        shown = {name for name in dir(bench.engine) if not name.startswith("_")}
        assert shown == {
            *(
                "close",
                "closed",
                "device",
                "drain",
                "growing",
                "layout",
                "load",
                "load_groups",
                "max_in_flight",
                "missing_copiers",
                "num_slots",
                "pinned_slots",
                "plan",
            ),
            *("poll", "prefer", "profile", "slots", "staging_bytes", "statistics", "store", "store_groups", "submit"),
        }

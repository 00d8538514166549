"""OffloadEngine: arguments, refusals, copiers, streams of other libraries, capture, groups, contexts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import LEVELS, STAGING, Rig, number_blocks, rig, settled, simulated

import kvoffload
from kvoffload import CapabilityError, KVLayout, LayoutError, OffloadEngine
from kvoffload.tuning import COPIERS, CopierName


@pytest.fixture(params=LEVELS)
def bench(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with simulated(11, request.param) as device:
        yield from settled(device)


def busy(bench: Rig) -> Any:
    """A count of everything that a submission would change."""
    simulator: Any = bench.device.simulator
    statistics = bench.engine.statistics()
    return statistics.in_flight, statistics.streams_in_use, statistics.events_in_use, simulator.pending_operations()


# arguments


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


# several groups and sub-blocks


# making an engine


# contexts


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

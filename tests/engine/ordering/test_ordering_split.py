"""Order of the two parts of a split transfer, which run at the same time: one start, one end.

As in test_ordering.py: a gate holds a stream back, everything else runs, the gate opens, and bytes are compared. To
hold the kernel alone, a gate is put on its stream at the launch, behind the transfer's start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from helpers import Gate, Rig, all_are, cut_segments, release, rig, whole
from transfers import segments_of

import kvoffload
from kvoffload import NO_WAIT, Direction, Job, TransferError
from kvoffload.driver import Driver
from kvoffload.tuning import CopyMethod

HALF = CopyMethod("split", 1, 0.5)  # the first half of the blocks by strided copies, the other by the kernel
GATHER = CopyMethod("gather", 1, 1.0)


@pytest.fixture
def rig_options() -> dict[str, Any]:
    return {"sm_limit": 1}


def submit(bench: Rig, direction: Direction, first_block: int, first_slot: int, count: int = 8, **options: Any) -> Job:
    blocks, slots = range(first_block, first_block + count), range(first_slot, first_slot + count)
    return bench.engine.submit(direction, blocks, slots, **{"copier": HALF, "after": NO_WAIT, **options})


def hold_kernels(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A closed gate that holds kernels launched from now on, and what follows them on their stream."""
    gate = bench.gate()
    launch = Driver.launch

    def held(
        driver: Driver, function: int, grid: int, threads: int, shared_bytes: int, stream: int, pointers: int
    ) -> None:
        gate.hold(stream)
        launch(driver, function, grid, threads, shared_bytes, stream, pointers)

    monkeypatch.setattr(Driver, "launch", held)
    return gate


def slots_hold(bench: Rig, values: Sequence[int]) -> bool:
    return all(all_are(bench.slot(slot), value) for slot, value in enumerate(values))


def test_a_split_has_a_part_on_the_stream_for_kernels_and_one_on_another(bench: Rig) -> None:
    """Else the tests below would be about something else."""
    held = bench.stream()
    bench.gate(held)
    job = submit(bench, Direction.STORE, 0, 0, after=held)
    kernel, copies = segments_of(job)
    lane = bench.engine._parts.in_flight.stores.lane
    assert kernel.stream is lane.streams[-1]
    assert copies.stream is not kernel.stream
    release(bench, job)
    assert slots_hold(bench, range(1, 9))


@pytest.mark.parametrize("direction", Direction)
def test_both_parts_wait_for_the_callers_stream(bench: Rig, direction: Direction) -> None:
    held = bench.stream()
    scratch = bench.device.allocate(8 * 4 * 64)
    bench.gate(held)
    if direction is Direction.STORE:
        bench.fill(held, 77)
    else:
        for block in range(8):
            bench.copy_block(held, scratch.address + block * 4 * 64, block)
    job = submit(bench, direction, 0, 0, after=held)
    release(bench, job)
    if direction is Direction.STORE:
        assert slots_hold(bench, [77] * 8)
    else:
        assert scratch.to_numpy()[:: 4 * 64].tolist() == list(range(1, 9)), "the reader saw the blocks before the load"
        assert [int(bench.block(block)[-1]) for block in range(8)] == list(range(100, 108))


@pytest.mark.parametrize("before", [GATHER, HALF, "strided"], ids=["gather", "split", "strided"])
def test_both_parts_wait_for_the_transfer_before(bench: Rig, before: CopyMethod | str) -> None:
    held = bench.stream()
    bench.gate(held)
    submit(bench, Direction.STORE, 0, 0, copier=before, after=held)
    job = submit(bench, Direction.STORE, 8, 0)
    release(bench, job)
    assert slots_hold(bench, range(9, 17))


@pytest.mark.parametrize("before", [GATHER, HALF, "strided"], ids=["gather", "split", "strided"])
def test_both_shares_wait_for_a_conflicting_transfer(bench: Rig, before: CopyMethod | str) -> None:
    held = bench.stream()
    bench.gate(held)
    submit(bench, Direction.STORE, 0, 0, copier=before, after=held)
    job = submit(bench, Direction.LOAD, 8, 0)
    release(bench, job)
    assert [int(bench.block(block)[0]) for block in range(8, 16)] == list(range(1, 9))


def test_a_split_has_not_ended_before_its_kernel(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = hold_kernels(bench, monkeypatch)
    job = submit(bench, Direction.STORE, 0, 0)
    bench.settle()
    assert [int(bench.slot(slot)[0]) for slot in range(8)] == [1, 2, 3, 4, 104, 105, 106, 107], "half of it is there"
    assert not job.done
    gate.open()
    assert job.wait(10).error is None
    assert slots_hold(bench, range(1, 9))


def test_order_before_covers_both_parts(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_kernels(bench, monkeypatch)
    writer = bench.stream()
    job = submit(bench, Direction.STORE, 0, 0)
    job.order_before(writer)
    bench.fill(writer, 88)
    release(bench, job)
    bench.synchronize(writer)
    assert slots_hold(bench, range(1, 9))


@pytest.mark.parametrize("follower", [GATHER, HALF, "strided"], ids=["gather", "split", "strided"])
@pytest.mark.parametrize("direction", Direction)
def test_what_follows_waits_for_both_parts(
    bench: Rig, monkeypatch: pytest.MonkeyPatch, direction: Direction, follower: CopyMethod | str
) -> None:
    """A store of the same direction over the same slots; a load out of the slots."""
    with monkeypatch.context() as patch:
        hold_kernels(bench, patch)
        submit(bench, Direction.STORE, 0, 0)
    job = submit(bench, direction, 8, 0, copier=follower)
    release(bench, job)
    if direction is Direction.STORE:
        assert slots_hold(bench, range(9, 17))
    else:
        assert [int(bench.block(block)[0]) for block in range(8, 16)] == list(range(1, 9))


def test_every_segment_of_both_shares_is_waited_for(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_segments(monkeypatch, bench.engine)
    held, writer = bench.stream(), bench.stream()
    bench.gate(held)
    bench.fill(held, 77)
    job = submit(bench, Direction.STORE, 0, 0, after=held)
    assert [segment.share for segment in segments_of(job)] == [0, 0, 0, 0, 1, 1, 1, 1]
    job.order_before(writer)
    bench.fill(writer, 88)
    release(bench, job)
    assert slots_hold(bench, [77] * 8)


def strided_call(device: kvoffload.Device) -> str:
    """What carries strided copies at the device's level."""
    if not device.capabilities.strided_batch:
        return "cuMemcpy2DAsync"
    return "memcpy_3d_batch_async_v2" if device.driver.use_raw else "cuMemcpy3DBatchAsync"


@pytest.mark.parametrize("part", ["kernel", "copies"])
def test_what_follows_a_failed_split_waits_for_what_it_left_queued(device: kvoffload.Device, part: str) -> None:
    """The kernel may be queued although the copies were refused, and then writes its slots behind the gate."""
    call = "cuLaunchKernel" if part == "kernel" else strided_call(device)
    with rig(device, sm_limit=1) as bench:
        simulator: Any = device.simulator
        held = bench.stream()
        bench.gate(held)
        simulator.faults.fail_call(call)
        failed = submit(bench, Direction.STORE, 0, 0, after=held)
        assert failed.error is not None
        assert simulator.faults.pending == 0
        job = submit(bench, Direction.STORE, 8, 0)
        release(bench, job)
        assert slots_hold(bench, range(9, 17))
        with pytest.raises(TransferError, match=call):
            failed.wait(10)
        whole(bench.engine)

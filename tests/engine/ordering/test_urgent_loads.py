"""Urgent loads go ahead of loads that wait on the host, and of nothing that they must follow; bounded queueing."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import Rig, all_are, cut_segments, interrupt_call, release, rig, simulated, whole
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import Case, cases, place
from transfers import segments_of, transfer_of

import kvoffload
from kvoffload import NO_WAIT, CapacityError, Direction, Job, KVLayout, OffloadEngine
from kvoffload.engine.hazards import HazardTable
from kvoffload.engine.job import Transfer
from kvoffload.engine.queues import TransferQueue
from kvoffload.testing import Mirror, SimulatedDriver, check_clean_close, poison

# Of a rig: so much that the driver has one block of each direction at a time.
ONE_BLOCK: dict[str, Any] = {"most_queued_bytes": 4 * 64}


@pytest.fixture
def rig_options() -> dict[str, Any]:
    return ONE_BLOCK


def hold_first(bench: Rig, slot: int = 0, block: int = 0) -> Job:
    """A load that is queued on the GPU and held back there, so that those behind it wait on the host."""
    stream = bench.stream()
    bench.gate(stream)
    job = bench.engine.load([slot], [block], after=stream)
    assert transfer_of(job).enqueued
    return job


def order_of_ends(bench: Rig, *jobs: Job) -> list[int]:
    """Indices of the jobs in the order in which they end."""
    ids = [job.id for job in jobs]
    release(bench, *jobs)
    return [ids.index(result.job_id) for result in bench.engine.poll() if result.job_id in ids]


def test_an_urgent_load_goes_ahead_of_those_that_wait_on_the_host(bench: Rig) -> None:
    first = hold_first(bench)
    usual = [bench.engine.load([block], [block], after=NO_WAIT) for block in (1, 2)]
    urgent = [bench.engine.load([block], [block], after=NO_WAIT, urgent=True) for block in (3, 4)]
    last = bench.engine.load([5], [5], after=NO_WAIT)
    assert order_of_ends(bench, first, *usual, *urgent, last) == [0, 3, 4, 1, 2, 5]
    for block in range(6):
        assert all_are(bench.block(block), 100 + block)


def test_without_a_bound_it_goes_ahead_of_what_the_drivers_queues_have_no_room_for(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.engine.launcher.QUEUE_LIMIT", 6)
    with rig(device) as bench:
        cut_segments(monkeypatch, bench.engine)
        stream = bench.stream()
        bench.gate(stream)
        jobs = [bench.engine.load([block], [block], after=stream) for block in range(14)]
        held = [job for job in jobs if not transfer_of(job).enqueued]
        assert 1 < len(held) < 14
        urgent = bench.engine.load([15], [15], after=stream, urgent=True)
        order = order_of_ends(bench, *jobs, urgent)
        begun = 14 - len(held)
        assert order == [*range(begun), 14, *range(begun, 14)]


def test_loads_of_the_same_blocks_keep_their_order(bench: Rig) -> None:
    """Else the block would hold what the earlier load brings."""
    first = hold_first(bench)
    usual = [bench.engine.load([block], [block], after=NO_WAIT) for block in (1, 2, 3)]
    urgent = bench.engine.load([9], [2], after=NO_WAIT, urgent=True)
    assert order_of_ends(bench, first, *usual, urgent) == [0, 1, 2, 4, 3]
    assert all_are(bench.block(2), 109)


def test_what_a_store_follows_is_not_overtaken_by_a_load_that_follows_the_store(bench: Rig) -> None:
    """The store waits for the load of block 2, the urgent load for the store: ahead of it, all would wait for ever."""
    first = hold_first(bench)
    usual = [bench.engine.load([block], [block], after=NO_WAIT) for block in (1, 2, 3)]
    stored = bench.engine.store([2], [9], after=NO_WAIT)
    urgent = bench.engine.load([9], [10], after=NO_WAIT, urgent=True)
    assert order_of_ends(bench, first, *usual, urgent) == [0, 1, 2, 4, 3]
    assert stored.done
    assert all_are(bench.block(10), 102)


def test_a_store_waits_for_the_load_that_was_overtaken(bench: Rig) -> None:
    """Both read slot 2; the later store to it must wait for the one that ends last, which was submitted first."""
    first = hold_first(bench)
    usual = bench.engine.load([2], [1], after=NO_WAIT)
    urgent = bench.engine.load([2], [5], after=NO_WAIT, urgent=True)
    stored = bench.engine.store([7], [2], after=NO_WAIT)
    assert order_of_ends(bench, first, usual, urgent) == [0, 2, 1]
    assert stored.done
    assert all_are(bench.block(1), 102)
    assert all_are(bench.block(5), 102)
    assert all_are(bench.slot(2), 8)


def test_a_store_that_waits_for_an_overtaken_load_still_does(bench: Rig) -> None:
    first = hold_first(bench)
    usual = bench.engine.load([2], [1], after=NO_WAIT)
    stored = bench.engine.store([7], [2], after=NO_WAIT)
    urgent = bench.engine.load([4], [5], after=NO_WAIT, urgent=True)
    assert order_of_ends(bench, first, usual, urgent) == [0, 2, 1]
    assert stored.done
    assert all_are(bench.block(1), 102)


def test_a_stream_that_follows_an_overtaken_load_waits_for_it(bench: Rig) -> None:
    hold_first(bench)
    usual = bench.engine.load([2], [1], after=NO_WAIT)
    bench.engine.load([4], [5], after=NO_WAIT, urgent=True)
    stream, scratch = bench.stream(), bench.device.allocate(4 * 64)
    for gate in bench.gates:
        gate.open()
    usual.order_before(stream)
    bench.copy_block(stream, scratch.address, 1)
    bench.synchronize(stream)
    assert all_are(scratch.to_numpy(), 102)


def test_urgent_is_for_loads_and_is_true_or_false(bench: Rig) -> None:
    with pytest.raises(ValueError, match="urgent=True is for loads"):
        bench.engine.submit("store", [1], [1], urgent=True)
    with pytest.raises(ValueError, match="urgent must be True or False, got 1"):
        bench.engine.load([1], [1], urgent=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("bound", [0, -1, True, 2.5, "8"], ids=repr)
def test_a_bound_that_is_none_is_named(device: kvoffload.Device, bound: Any) -> None:
    layout = KVLayout([device.allocate_planes(1, block_bytes=64, num_blocks=4)])
    with pytest.raises(ValueError, match="most_queued_bytes must be an integer of at least 1"):
        OffloadEngine(layout, device=device, num_slots=4, most_queued_bytes=bound)


@pytest.mark.parametrize("bound", [1, 300, 256 * 4, 1 << 30])
@pytest.mark.parametrize("parts", [None, 2])
def test_no_more_than_the_bound_is_queued(device: kvoffload.Device, bound: int, parts: int | None) -> None:
    with rig(device, most_queued_bytes=bound) as bench:
        stream = bench.stream()
        bench.gate(stream)
        jobs = [bench.engine.load(range(8 * n, 8 * n + 8), range(8), after=stream, parts=parts) for n in (0, 1)]
        of_operation = 256 if parts is None else 128
        queued = sum(segment.nbytes for job in jobs for segment in segments_of(job))
        assert 0 < queued <= max(bound, of_operation)
        assert (bench.engine.statistics().held > 0) is (bound < 1 << 30)
        release(bench, *jobs)
        assert [int(bench.block(block)[0]) for block in range(8)] == [108 + block for block in range(8)]


def test_a_part_half_of_which_is_queued_is_not_followed_yet() -> None:
    with simulated() as device, rig(device, **ONE_BLOCK) as bench:
        stream, theirs = bench.stream(), bench.stream()
        bench.gate(stream)
        job = bench.engine.load(range(4), range(4), after=stream, parts=2)  # 8 copies of 64 bytes in each part
        assert sum(segment.nbytes for segment in segments_of(job)) == 4 * 64
        with pytest.raises(CapacityError, match="still waits on the host"):
            job.order_before(theirs, part=0)
        release(bench, job)
        job.order_before(theirs, part=0)
        assert [int(bench.block(block)[0]) for block in range(4)] == [100, 101, 102, 103]


def test_a_job_under_a_bound_ends_when_it_is_waited_for(bench: Rig) -> None:
    """Nothing else calls the engine."""
    assert bench.engine.load(range(16), range(16), after=NO_WAIT).wait(10).nbytes == 16 * 4 * 64
    assert [int(bench.block(block)[0]) for block in range(16)] == [100 + block for block in range(16)]


@pytest.mark.long
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=cases(most_transfers=9),
    urgent=st.lists(st.booleans(), min_size=9, max_size=9),
    seed=st.integers(0, 1 << 16),
    bound=st.sampled_from((1, 64, 4096)),
)
def test_urgent_loads_among_others_leave_the_bytes_of_a_naive_loop(
    case: Case, urgent: list[bool], seed: int, bound: int
) -> None:
    device = kvoffload.open_device(backend=SimulatedDriver(seed=seed))
    layout, buffers = place(device, case.layout, seed)
    options: dict[str, Any] = {"staging_bytes": case.staging_bytes, "most_queued_bytes": bound}
    with OffloadEngine(layout, device=device, num_slots=case.num_slots, **options) as engine:
        poison(engine.slots)
        mirror = Mirror(engine, buffers)
        for transfer, asked in zip(case.transfers, urgent, strict=False):
            direction, group, blocks, slots, first, _ = transfer
            now = asked and direction is Direction.LOAD
            engine.submit(direction, blocks, slots, group=group, first_sub_block=first, after=NO_WAIT, urgent=now)
            mirror.expect(direction, blocks, slots, group=group, first_sub_block=first)
        engine.drain(timeout=30)
        mirror.check()
    for buffer in buffers:
        buffer.close()
    check_clean_close(device)


INTERRUPTED: list[tuple[type, str]] = [
    (HazardTable, "make_room"),
    (HazardTable, "record_ahead"),
    (Transfer, "step"),
    (TransferQueue, "renumber"),
]


@pytest.mark.parametrize(("owner", "name"), INTERRUPTED, ids=[name for _, name in INTERRUPTED])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupt_while_an_urgent_load_is_put_ahead_leaves_the_order_whole(
    owner: type, name: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with simulated() as device, rig(device, **ONE_BLOCK) as bench:
        hold_first(bench)
        usual = [bench.engine.load([block], [block], after=NO_WAIT) for block in (1, 2, 3)]
        with monkeypatch.context() as patch:
            interrupt_call(patch, owner, name, after=after)
            with pytest.raises(KeyboardInterrupt):
                bench.engine.load([2], [5], after=NO_WAIT, urgent=True)
        stored = bench.engine.store([13], [3], after=NO_WAIT)  # of the last load's slot alone
        release(bench, *usual, stored)
        ended = [result.job_id for result in bench.engine.poll() if result.error is None]
        assert [each for each in ended if each in [job.id for job in usual]] == [job.id for job in usual]
        for block in (1, 2, 3):
            assert all_are(bench.block(block), 100 + block), "a store to its slot did not wait for the load"
        assert all_are(bench.slot(3), 14)
        whole(bench.engine)
        assert bench.engine.submitted == bench.engine.statistics().load.jobs + bench.engine.statistics().store.jobs

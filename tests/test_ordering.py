"""Order between transfers, and between transfers and a caller's streams.

Every test holds a stream back with a gate, lets everything run that is not held back, opens the gate, and compares
bytes: without the wait that it is about, the wrong bytes are there on every seed, or on some.
KVOFFLOAD_ORDERING_SEEDS says how many seeds to run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import BLOCKING, LEGACY, LEVELS, NON_BLOCKING, PER_THREAD, OrderSpy, Rig, no_leaks, rig, simulated, whole

import kvoffload
from kvoffload import NO_WAIT, KVLayout, OffloadEngine, Plane, TransferError, streams
from kvoffload.driver import SourceOrder

SEEDS = range(int(os.environ.get("KVOFFLOAD_ORDERING_SEEDS", "20")))
COPIERS = ("strided", "batch", "loop")


@pytest.fixture(params=SEEDS, ids=lambda seed: f"seed{seed}")
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def device(seed: int) -> Iterator[kvoffload.Device]:
    """A simulated device whose capability level changes with the seed."""
    level = list(LEVELS)[seed % len(LEVELS)]
    with simulated(seed, level) as opened:
        yield opened
    no_leaks(opened.simulator)


@pytest.fixture
def bench(device: kvoffload.Device) -> Iterator[Rig]:
    with rig(device) as made:
        yield made
        for gate in made.gates:  # one that a failed test left closed
            gate.open()
        made.engine.drain(10)
        whole(made.engine)


@pytest.fixture
def short_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that are full after one transfer, so that each transfer goes to another one."""
    monkeypatch.setattr(streams, "QUEUE_LIMIT", streams.WAIT_COST + 1)


def run(bench: Rig, held: kvoffload.Job | None = None) -> None:
    """Let run what can, make sure that `held` could not, open all gates, and wait for everything."""
    bench.settle()
    if held is not None:
        assert not held.done, "the gate holds this one back"
    for gate in bench.gates:
        gate.open()
    bench.engine.drain(10)
    bench.settle()


def is_all(array: Any, value: int) -> bool:
    return bool((np.asarray(array) == value).all())


# with the caller's streams


@pytest.mark.parametrize("kind", ["own", "blocking", "legacy", "per-thread"])
def test_pitfall_01_store_waits_for_the_writer(bench: Rig, kind: str) -> None:
    handles = {"legacy": 0, "per-thread": PER_THREAD}
    stream = handles[kind] if kind in handles else bench.stream(BLOCKING if kind == "blocking" else NON_BLOCKING)
    bench.gate(stream)
    bench.fill(stream, 77)
    job = bench.engine.store([3, 4], [0, 1], after=stream)
    run(bench, job)
    assert is_all(bench.slot(0), 77)
    assert is_all(bench.slot(1), 77)


@pytest.mark.parametrize("kind", ["own", "blocking", "legacy", "per-thread"])
def test_pitfall_02_load_waits_for_the_reader(bench: Rig, kind: str) -> None:
    handles = {"legacy": LEGACY, "per-thread": PER_THREAD}
    stream = handles[kind] if kind in handles else bench.stream(BLOCKING if kind == "blocking" else NON_BLOCKING)
    scratch = bench.device.allocate(4 * 64)
    bench.gate(stream)
    bench.copy_block(stream, scratch.address, 5)
    job = bench.engine.load([2], [5], after=stream)
    run(bench, job)
    bench.synchronize(stream)
    assert is_all(scratch.to_numpy(), 6), "the reader saw the block before the load"
    assert is_all(bench.block(5), 102)


def test_without_after_a_store_waits_for_the_legacy_stream_and_the_blocking_ones(bench: Rig) -> None:
    blocking = bench.stream(BLOCKING)
    bench.gate(LEGACY, blocking)
    bench.fill(LEGACY, 78, block=3)
    bench.fill(blocking, 79, block=4)
    job = bench.engine.store([3, 4], [0, 1])
    run(bench, job)
    assert is_all(bench.slot(0), 78)
    assert is_all(bench.slot(1), 79)


def test_without_after_a_load_waits_for_the_legacy_stream(bench: Rig) -> None:
    scratch = bench.device.allocate(4 * 64)
    bench.gate(LEGACY)
    bench.copy_block(LEGACY, scratch.address, 5)
    job = bench.engine.load([2], [5])
    run(bench, job)
    assert is_all(scratch.to_numpy(), 6)
    assert is_all(bench.block(5), 102)


def test_without_after_a_store_follows_what_was_copied_from_the_host(bench: Rig) -> None:
    """Such a copy returns when its bytes are staged; the device gets them later, on the legacy stream."""
    assert bench.device.simulator is not None
    bench.device.simulator.staged_copies = True
    bench.slab.copy_from(np.full(bench.slab.nbytes, 66, np.uint8))
    job = bench.engine.store([3], [0])
    bench.slab.copy_from(np.full(bench.slab.nbytes, 67, np.uint8))
    job.wait(10)
    bench.device.simulator.staged_copies = False
    assert is_all(bench.slot(0), 66) or is_all(bench.slot(0), 67)
    bench.engine.store([3], [0]).wait(10)
    assert is_all(bench.slot(0), 67)


def test_no_wait_waits_for_no_stream(bench: Rig) -> None:
    stream = bench.stream()
    bench.gate(stream, LEGACY)
    job = bench.engine.store([3], [0], after=NO_WAIT)
    bench.settle()
    assert job.done
    assert is_all(bench.slot(0), 4)


def test_after_covers_only_what_was_queued_before(bench: Rig) -> None:
    stream = bench.stream()
    job = bench.engine.store([3], [0], after=stream)
    bench.gate(stream)
    bench.fill(stream, 77)
    bench.settle()
    assert job.done
    assert is_all(bench.slot(0), 4)


def test_order_before_holds_a_writer_back_until_a_store_has_read(bench: Rig) -> None:
    held, writer = bench.stream(), bench.stream()
    bench.gate(held)
    job = bench.engine.store([3], [0], after=held)
    job.order_before(writer)
    bench.fill(writer, 88)
    run(bench, job)
    bench.synchronize(writer)
    assert is_all(bench.slot(0), 4)
    assert is_all(bench.block(3), 88)


@pytest.mark.parametrize("kind", ["own", "legacy", "per-thread"])
def test_order_before_holds_a_reader_back_until_a_load_has_written(bench: Rig, kind: str) -> None:
    held = bench.stream()
    reader = {"legacy": 0, "per-thread": PER_THREAD}.get(kind) if kind != "own" else bench.stream()
    assert reader is not None
    scratch = bench.device.allocate(4 * 64)
    bench.gate(held)
    job = bench.engine.load([2], [5], after=held)
    job.order_before(reader)
    bench.copy_block(reader or LEGACY, scratch.address, 5)
    run(bench, job)
    bench.synchronize(reader or LEGACY)
    assert is_all(scratch.to_numpy(), 102)


@pytest.mark.usefixtures("short_queues")
def test_order_before_covers_every_piece(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    _small_pieces(bench, monkeypatch)
    held, writer = bench.stream(), bench.stream()
    bench.gate(held)
    job = bench.engine.store(range(6), range(6), after=held, copier="loop")
    job.order_before(writer)
    bench.fill(writer, 88)
    run(bench, job)
    assert [int(bench.slot(slot)[0]) for slot in range(6)] == [1, 2, 3, 4, 5, 6]


# within a direction


@pytest.mark.usefixtures("short_queues")
def test_stores_keep_their_order_on_different_streams(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    first = bench.engine.store([3], [0], after=held)
    second = bench.engine.store([4], [0], after=NO_WAIT)
    assert first.pieces[0][0] is not second.pieces[0][0], "the test needs two streams"
    run(bench, second)
    assert is_all(bench.slot(0), 5)


@pytest.mark.usefixtures("short_queues")
def test_loads_keep_their_order_on_different_streams(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    bench.engine.load([3], [0], after=held)
    second = bench.engine.load([4], [0], after=NO_WAIT)
    run(bench, second)
    assert is_all(bench.block(0), 104)


def test_transfers_on_one_stream_keep_their_order(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    for block in (3, 4, 5):
        last = bench.engine.store([block], [0], after=held if block == 3 else NO_WAIT)
    run(bench, last)
    assert is_all(bench.slot(0), 6)


# across directions


def test_load_follows_a_store_into_its_slots(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    bench.engine.store([3], [0], after=held)
    job = bench.engine.load([0], [5], after=NO_WAIT)
    run(bench, job)
    assert is_all(bench.block(5), 4)


def test_load_follows_a_store_out_of_its_blocks(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    bench.engine.store([3], [0], after=held)
    job = bench.engine.load([9], [3], after=NO_WAIT)
    run(bench, job)
    assert is_all(bench.slot(0), 4)
    assert is_all(bench.block(3), 109)


def test_store_follows_a_load_out_of_its_slots(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    bench.engine.load([0], [3], after=held)
    job = bench.engine.store([7], [0], after=NO_WAIT)
    run(bench, job)
    assert is_all(bench.block(3), 100)
    assert is_all(bench.slot(0), 8)


def test_store_follows_a_load_into_its_blocks(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    bench.engine.load([0], [3], after=held)
    job = bench.engine.store([3], [6], after=NO_WAIT)
    run(bench, job)
    assert is_all(bench.slot(6), 100)


def test_a_transfer_waits_only_for_rivals(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    store = bench.engine.store([3], [0], after=held)
    load = bench.engine.load([1], [4], after=NO_WAIT)
    bench.settle()
    assert load.done
    run(bench, store)


def test_the_latest_of_several_rivals_counts(bench: Rig) -> None:
    first, second = bench.stream(), bench.stream()
    gates = bench.gate(first), bench.gate(second)
    bench.engine.store([3], [0], after=first)
    bench.engine.store([4], [1], after=second)
    load = bench.engine.load([0, 1], [8, 9], after=NO_WAIT)
    gates[0].open()
    run(bench, load)
    assert is_all(bench.block(8), 4)
    assert is_all(bench.block(9), 5)


def test_a_chain_through_both_directions(bench: Rig) -> None:
    """Block 3 to slot 0, slot 0 to block 4, block 4 to slot 1, and so on, all queued behind one gate."""
    held = bench.stream()
    bench.gate(held)
    bench.engine.store([3], [0], after=held)
    for step in range(5):
        bench.engine.load([step], [4 + step], after=NO_WAIT)
        job = bench.engine.store([4 + step], [step + 1], after=NO_WAIT)
    run(bench, job)
    assert [int(value) for value in bench.engine.slots[:6, 0]] == [4] * 6


# groups


def _two_groups(device: kvoffload.Device, kind: str) -> tuple[Rig, list[Plane], list[Plane]]:
    """An engine over two groups whose planes are the same, overlap, or are apart."""
    planes = device.allocate_planes(4, block_bytes=64, num_blocks=16)
    slab = planes[0].owner
    assert isinstance(slab, kvoffload.DeviceBuffer)
    others = {
        "same": planes,
        "subset": planes[:2],
        "apart": planes[2:],
        # the same memory cut into blocks half as big, from plane 1 on
        "partial": [Plane(p.address, block_bytes=32, num_blocks=32, owner=slab) for p in planes[1:]],
    }[kind]
    first = planes[:2] if kind == "apart" else planes
    engine = OffloadEngine(KVLayout([first, others]), device=device, num_slots=16)
    slab.copy_from(np.full(slab.nbytes, 1, np.uint8))
    return Rig(device, engine, slab, first), first, others


@pytest.mark.parametrize("kind", ["same", "subset", "partial"])
def test_groups_over_shared_memory_are_ordered(device: kvoffload.Device, kind: str) -> None:
    bench, _, others = _two_groups(device, kind)
    scale = 2 if kind == "partial" else 1
    bench.engine.slots[0] = 50
    held = bench.stream()
    bench.gate(held)
    first = bench.engine.load([0], [3], group=0, after=held)
    job = bench.engine.store([3 * scale], [1], group=1, after=NO_WAIT)
    run(bench, first)
    payload = sum(plane.block_bytes for plane in others)
    assert job.done
    assert is_all(bench.engine.slots[1, :payload], 50)
    bench.close()


@pytest.mark.parametrize("kind", ["same", "partial"])
def test_a_store_of_one_group_is_read_before_a_load_of_another_overwrites(device: kvoffload.Device, kind: str) -> None:
    bench, first, _ = _two_groups(device, kind)
    scale = 2 if kind == "partial" else 1
    bench.engine.slots[1] = 50
    held = bench.stream()
    bench.gate(held)
    store = bench.engine.store([3], [0], group=0, after=held)
    bench.engine.load([1], [3 * scale], group=1, after=NO_WAIT)
    run(bench, store)
    assert is_all(bench.engine.slots[0, : 64 * len(first)], 1)
    bench.close()


def test_groups_apart_share_slots_only(device: kvoffload.Device) -> None:
    bench, _, others = _two_groups(device, "apart")
    held = bench.stream()
    bench.gate(held)
    bench.fill(held, 60)
    store = bench.engine.store([3], [0], group=0, after=held)
    free = bench.engine.load([1], [3], group=1, after=NO_WAIT)
    bench.settle()
    assert free.done, "other memory, another slot: nothing to wait for"
    bound = bench.engine.load([0], [4], group=1, after=NO_WAIT)
    run(bench, store)
    assert bound.done
    assert is_all(bench.block(4, others), 60)
    bench.close()


def test_groups_over_the_same_planes_with_different_counts(device: kvoffload.Device) -> None:
    planes = device.allocate_planes(2, block_bytes=64, num_blocks=16)
    fewer = [Plane(plane.address, block_bytes=64, num_blocks=8, owner=plane.owner) for plane in planes]
    with OffloadEngine(KVLayout([fewer, planes]), device=device, num_slots=8) as engine:
        engine.store([12], [0], group=1).wait(10)
        engine.load([0], [7], group=0).wait(10)
        whole(engine)


# transfers in pieces


def _small_pieces(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one operation at a time: with `short_queues`, every operation has a stream of its own."""
    for copier in bench.engine._copiers.values():
        monkeypatch.setattr(copier, "piece_operations", 1)


@pytest.mark.usefixtures("short_queues")
@pytest.mark.parametrize("copier", COPIERS)
def test_every_piece_of_a_store_waits(bench: Rig, monkeypatch: pytest.MonkeyPatch, copier: str) -> None:
    copier = copier if copier in bench.engine._copiers else "loop"
    _small_pieces(bench, monkeypatch)
    held = bench.stream()
    bench.gate(held)
    bench.fill(held, 77)
    job = bench.engine.store(range(5), range(5), after=held, copier=copier)
    assert len({stream for stream, _ in job.pieces}) > 2
    run(bench, job)
    assert is_all(bench.engine.slots[:5, :256], 77)


@pytest.mark.usefixtures("short_queues")
def test_every_piece_of_a_load_waits(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    _small_pieces(bench, monkeypatch)
    held = bench.stream()
    scratch = bench.device.allocate(4 * 64)
    bench.gate(held)
    bench.copy_block(held, scratch.address, 4)
    job = bench.engine.load(range(5), range(5), after=held)
    run(bench, job)
    assert is_all(scratch.to_numpy(), 5)
    assert [int(bench.block(block)[-1]) for block in range(5)] == [100, 101, 102, 103, 104]


@pytest.mark.usefixtures("short_queues")
def test_a_job_of_pieces_ends_with_its_last_piece(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    _small_pieces(bench, monkeypatch)
    held = bench.stream()
    bench.gate(held)
    bench.engine.store(range(5), range(5), after=held)
    load = bench.engine.load(range(5), range(8, 13), after=NO_WAIT)
    run(bench, load)
    assert [int(bench.block(block)[0]) for block in range(8, 13)] == [1, 2, 3, 4, 5]


# behind a failure


def _fail_in_the_middle(bench: Rig, held: int) -> kvoffload.Job:
    """A store of blocks 0..3 to slots 0..3 whose second copy the driver refuses; the first is queued behind a gate."""
    simulator = bench.device.simulator
    assert simulator is not None
    simulator.faults.fail_call("cuMemcpyAsync", nth=2)
    job = bench.engine.store(range(4), range(4), after=held, copier="loop")
    assert job.error is not None
    assert simulator.faults.pending == 0
    return job


@pytest.mark.usefixtures("short_queues")
@pytest.mark.parametrize("piece_operations", [1, 512])
def test_stores_follow_what_a_failed_one_left_queued(
    bench: Rig, monkeypatch: pytest.MonkeyPatch, piece_operations: int
) -> None:
    monkeypatch.setattr(streams, "QUEUE_LIMIT", 21 if piece_operations > 1 else 5)
    monkeypatch.setattr(bench.engine._copiers["loop"], "piece_operations", piece_operations)
    held = bench.stream()
    bench.gate(held)
    failed = _fail_in_the_middle(bench, held)
    job = bench.engine.store([9], [0], after=NO_WAIT, copier="loop")
    run(bench, job)
    assert is_all(bench.slot(0), 10)
    with pytest.raises(TransferError):
        failed.wait()


@pytest.mark.usefixtures("short_queues")
def test_loads_follow_what_a_failed_store_left_queued(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    failed = _fail_in_the_middle(bench, held)
    job = bench.engine.load([9], [0], after=NO_WAIT)
    run(bench, job)
    assert is_all(bench.slot(0)[:64], 1), "what was queued of the failed store read its block before the load"
    assert is_all(bench.block(0), 109)
    assert failed.state is failed.state.FAILED


@pytest.mark.usefixtures("short_queues")
@pytest.mark.parametrize("call", ["cuStreamWaitEvent", "cuEventRecord"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_failed_job_does_not_break_the_chain_of_its_direction(bench: Rig, call: str, nth: int) -> None:
    """The second store fails before it waits for the first; the third still has to follow the first."""
    simulator = bench.device.simulator
    assert simulator is not None
    held = bench.stream()
    bench.gate(held)
    bench.engine.store([3], [0], after=held)
    simulator.faults.fail_call(call, nth=nth)
    failed = bench.engine.store([4], [1], after=NO_WAIT, copier="loop")
    simulator.faults.clear()
    job = bench.engine.store([5], [0], after=NO_WAIT)
    run(bench, job if failed.error is not None else None)
    assert is_all(bench.slot(0), 6)


@pytest.mark.usefixtures("short_queues")
@pytest.mark.parametrize("nth", [1, 2])
def test_a_load_behind_a_failed_store_follows_the_stores_before_it(bench: Rig, nth: int) -> None:
    simulator = bench.device.simulator
    assert simulator is not None
    held = bench.stream()
    bench.gate(held)
    bench.engine.store([3], [0], after=held)
    simulator.faults.fail_call("cuStreamWaitEvent", nth=nth)
    bench.engine.store([4], [1], after=NO_WAIT, copier="loop")
    simulator.faults.clear()
    bench.engine.load([0, 1], [8, 9], after=NO_WAIT)
    run(bench)
    assert is_all(bench.block(8), 4)


@pytest.mark.usefixtures("short_queues")
def test_order_before_a_running_job_behind_a_failed_one(bench: Rig) -> None:
    held, writer = bench.stream(), bench.stream()
    bench.gate(held)
    failed = _fail_in_the_middle(bench, held)
    job = bench.engine.store([9], [5], after=NO_WAIT)
    job.order_before(writer)
    bench.fill(writer, 88)
    with pytest.raises(TransferError):
        failed.order_before(writer)
    run(bench, job)
    assert is_all(bench.slot(5), 10)
    assert is_all(bench.slot(0)[:64], 1)


# when a source may be read


def _orders(spy: OrderSpy, direction: str) -> set[int]:
    return {order for way, order in spy.seen if way == direction}


@pytest.mark.parametrize("copier", ["strided", "batch"])
def test_pitfall_03_stores_read_in_stream_order(copier: str, seed: int) -> None:
    level = ("batch", "fail-index", "raw")[seed % 3]
    with simulated(seed, level) as device, rig(device) as bench:
        spy = OrderSpy(device)
        stream = bench.stream()
        bench.gate(stream)
        bench.fill(stream, 77)
        job = bench.engine.store(range(8), range(8), after=stream, copier=copier)
        run(bench, job)
        assert _orders(spy, "store") == {SourceOrder.STREAM}
        assert is_all(bench.engine.slots[:8, :256], 77)
        bench.engine.load(range(8), range(8), copier=copier, source_order="auto").wait(10)
        assert _orders(spy, "load") == {SourceOrder.ANY}
        bench.engine.load(range(8), range(8), copier=copier, source_order="stream").wait(10)
        assert _orders(spy, "load") == {SourceOrder.ANY, SourceOrder.STREAM}
        bench.engine.load(range(8), range(8), copier=copier, source_order="any").wait(10)
        assert _orders(spy, "store") == {SourceOrder.STREAM}


@pytest.mark.parametrize("copier", ["strided", "batch"])
def test_pitfall_04_a_load_behind_an_unfinished_store_reads_in_stream_order(copier: str, seed: int) -> None:
    level = ("batch", "fail-index", "raw")[seed % 3]
    with simulated(seed, level) as device, rig(device) as bench:
        spy = OrderSpy(device)
        held = bench.stream()
        bench.gate(held)
        store = bench.engine.store([3, 4], [0, 1], after=held, copier=copier)
        chained = bench.engine.load([7, 0], [8, 9], after=NO_WAIT, copier=copier)
        free = bench.engine.load([6, 7], [10, 11], after=NO_WAIT, copier=copier)
        orders = [order for way, order in spy.seen if way == "load"]
        assert orders == [SourceOrder.STREAM, SourceOrder.ANY]
        with pytest.raises(ValueError, match="unfinished"):
            bench.engine.load([0], [8], after=NO_WAIT, copier=copier, source_order="any")
        assert bench.engine.statistics().in_flight == 3
        run(bench, store)
        assert chained.done
        assert free.done
        assert is_all(bench.block(9), 4)


def test_pitfall_04_any_returns_once_the_host_has_seen_the_store_end(seed: int) -> None:
    with simulated(seed) as device, rig(device) as bench:
        spy = OrderSpy(device)
        for _ in range(3):
            bench.engine.store([3], [0]).wait(10)
            bench.engine.load([0], [4]).wait(10)
        assert _orders(spy, "load") == {SourceOrder.ANY}
        assert _orders(spy, "store") == {SourceOrder.STREAM}

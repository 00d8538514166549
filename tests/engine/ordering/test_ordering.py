"""Order between transfers, and between transfers and a caller's streams.

Every test holds a stream back with a gate, lets everything run that is not held back, opens the gate, and compares
bytes: without the wait that it is about, the wrong bytes are there on every seed, or on some.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import (
    BLOCKING,
    COPY_ENGINE_ONLY,
    LEGACY,
    NON_BLOCKING,
    PER_THREAD,
    Rig,
    all_are,
    change_streams,
    cut_segments,
    release,
    whole,
)

import kvoffload
from kvoffload import NO_WAIT, KVLayout, OffloadEngine, Plane
from kvoffload.tuning import CopierName

# with the caller's streams


def stream_of(bench: Rig, kind: str) -> int:
    handles = {"legacy": 0, "per-thread": PER_THREAD}
    return handles[kind] if kind in handles else bench.stream(BLOCKING if kind == "blocking" else NON_BLOCKING)


def block_bytes(bench: Rig) -> int:
    """Bytes of a block over all planes."""
    return sum(plane.block_bytes for plane in bench.planes)


@pytest.mark.parametrize("kind", ["own", "blocking", "legacy", "per-thread"])
def test_pitfall_01_store_waits_for_the_writer(carried: tuple[Rig, CopierName | None], kind: str) -> None:
    bench, copier = carried
    stream = stream_of(bench, kind)
    bench.gate(stream or LEGACY)
    bench.fill(stream or LEGACY, 77)
    job = bench.engine.store(range(8), range(8), after=stream, copier=copier)
    release(bench, job)
    assert all(all_are(bench.slot(slot), 77) for slot in range(8))


@pytest.mark.parametrize("kind", ["own", "blocking", "legacy", "per-thread"])
def test_pitfall_02_load_waits_for_the_reader(carried: tuple[Rig, CopierName | None], kind: str) -> None:
    bench, copier = carried
    stream = stream_of(bench, kind)
    scratch = bench.device.allocate(block_bytes(bench))
    bench.gate(stream or LEGACY)
    bench.copy_block(stream or LEGACY, scratch.address, 5)
    job = bench.engine.load([2], [5], after=stream, copier=copier)
    release(bench, job)
    bench.synchronize(stream or LEGACY)
    assert all_are(scratch.to_numpy(), 6), "the reader saw the block before the load"
    assert all_are(bench.block(5), 102)


def test_without_after_a_store_waits_for_the_legacy_stream_and_the_blocking_ones(each_bench: Rig) -> None:
    bench, blocking = each_bench, each_bench.stream(BLOCKING)
    bench.gate(LEGACY, blocking)
    bench.fill(LEGACY, 78, block=3)
    bench.fill(blocking, 79, block=4)
    job = bench.engine.store([3, 4], [0, 1])
    release(bench, job)
    assert all_are(bench.slot(0), 78)
    assert all_are(bench.slot(1), 79)


def test_without_after_a_load_waits_for_the_legacy_stream(bench: Rig) -> None:
    scratch = bench.device.allocate(4 * 64)
    bench.gate(LEGACY)
    bench.copy_block(LEGACY, scratch.address, 5)
    job = bench.engine.load([2], [5])
    release(bench, job)
    assert all_are(scratch.to_numpy(), 6)
    assert all_are(bench.block(5), 102)


def test_without_after_a_store_follows_what_was_copied_from_the_host(bench: Rig) -> None:
    """Such a copy returns when its bytes are staged; the device gets them later, on the legacy stream."""
    assert bench.device.simulator is not None
    bench.device.simulator.staged_copies = True
    bench.slab.copy_from(np.full(bench.slab.nbytes, 66, np.uint8))
    job = bench.engine.store([3], [0])
    bench.slab.copy_from(np.full(bench.slab.nbytes, 67, np.uint8))
    job.wait(10)
    bench.device.simulator.staged_copies = False
    assert all_are(bench.slot(0), 66) or all_are(bench.slot(0), 67)
    bench.engine.store([3], [0]).wait(10)
    assert all_are(bench.slot(0), 67)


def test_no_wait_waits_for_no_stream(each_bench: Rig) -> None:
    bench = each_bench
    bench.gate(bench.stream(), LEGACY)
    bench.engine.store([3], [0], after=NO_WAIT).wait(30)
    assert all_are(bench.slot(0), 4)


def test_after_covers_only_what_was_queued_before(bench: Rig) -> None:
    stream = bench.stream()
    job = bench.engine.store([3], [0], after=stream)
    bench.gate(stream)
    bench.fill(stream, 77)
    bench.settle()
    assert job.done
    assert all_are(bench.slot(0), 4)


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
    release(bench, job)
    bench.synchronize(reader or LEGACY)
    assert all_are(scratch.to_numpy(), 102)


@pytest.mark.usefixtures("changing_streams")
def test_order_before_covers_every_segment(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_segments(monkeypatch, bench.engine)
    held, writer = bench.stream(), bench.stream()
    bench.gate(held)
    job = bench.engine.store(range(6), range(6), after=held, copier="loop")
    job.order_before(writer)
    bench.fill(writer, 88)
    release(bench, job)
    assert [int(bench.slot(slot)[0]) for slot in range(6)] == [1, 2, 3, 4, 5, 6]


# within a direction


@pytest.mark.usefixtures("changing_streams")
def test_loads_keep_their_order_on_different_streams(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    bench.engine.load([3], [0], after=held)
    second = bench.engine.load([4], [0], after=NO_WAIT)
    release(bench, second)
    assert all_are(bench.block(0), 104)


@pytest.mark.parametrize("changing", [False, True], ids=["one stream", "many streams"])
def test_several_transfers_keep_their_order(each_bench: Rig, changing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, held = each_bench, each_bench.stream()
    if changing:
        change_streams(monkeypatch)
    bench.gate(held)
    for block in (3, 4, 5, 6):
        last = bench.engine.store([block], [0], after=held if block == 3 else NO_WAIT)
    release(bench, last)
    assert all_are(bench.slot(0), 7)


# across directions


def test_load_follows_a_store_out_of_its_blocks(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    bench.engine.store([3], [0], after=held)
    job = bench.engine.load([9], [3], after=NO_WAIT)
    release(bench, job)
    assert all_are(bench.slot(0), 4)
    assert all_are(bench.block(3), 109)


def test_store_follows_a_load_out_of_its_slots(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    bench.engine.load([0], [3], after=held)
    job = bench.engine.store([7], [0], after=NO_WAIT)
    release(bench, job)
    assert all_are(bench.block(3), 100)
    assert all_are(bench.slot(0), 8)


def test_the_latest_of_several_conflicting_transfers_counts(bench: Rig) -> None:
    first, second = bench.stream(), bench.stream()
    gates = bench.gate(first), bench.gate(second)
    bench.engine.store([3], [0], after=first)
    bench.engine.store([4], [1], after=second)
    load = bench.engine.load([0, 1], [8, 9], after=NO_WAIT)
    gates[0].open()
    release(bench, load)
    assert all_are(bench.block(8), 4)
    assert all_are(bench.block(9), 5)


def test_a_chain_through_both_directions(carried: tuple[Rig, CopierName | None]) -> None:
    """Block 3 to slot 0, slot 0 to block 4, block 4 to slot 1, and so on, all queued behind one gate."""
    bench, copier = carried
    held = bench.stream()
    bench.gate(held)
    bench.fill(held, 61, block=3)
    bench.engine.store([3], [0], after=held, copier=copier)
    for step in range(8):
        bench.engine.load([step], [4 + step], after=NO_WAIT, copier=copier)
        job = bench.engine.store([4 + step], [step + 1], after=NO_WAIT, copier=copier)
    release(bench, job)
    assert all(all_are(bench.slot(slot), 61) for slot in range(9))
    assert all(all_are(bench.block(block), 61) for block in range(3, 12))


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
    engine = OffloadEngine(KVLayout([first, others]), device=device, num_slots=16, **COPY_ENGINE_ONLY)
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
    release(bench, first)
    payload = sum(plane.block_bytes for plane in others)
    assert job.done
    assert all_are(bench.engine.slots[1, :payload], 50)
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
    release(bench, store)
    assert all_are(bench.engine.slots[0, : 64 * len(first)], 1)
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
    release(bench, store)
    assert bound.done
    assert all_are(bench.block(4, others), 60)
    bench.close()


def test_groups_over_the_same_planes_with_different_counts(device: kvoffload.Device) -> None:
    planes = device.allocate_planes(2, block_bytes=64, num_blocks=16)
    fewer = [Plane(plane.address, block_bytes=64, num_blocks=8, owner=plane.owner) for plane in planes]
    with OffloadEngine(KVLayout([fewer, planes]), device=device, num_slots=8, **COPY_ENGINE_ONLY) as engine:
        engine.store([12], [0], group=1).wait(10)
        engine.load([0], [7], group=0).wait(10)
        whole(engine)

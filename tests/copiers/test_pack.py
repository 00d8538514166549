"""Packed transfers: their bytes, their rings, what cannot be packed, and what remains when something fails."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from capture_probe import GLOBAL, Capturing
from cuda.bindings import driver as cuda
from helpers import (
    STAGING,
    Rig,
    all_are,
    change_streams,
    choose_kernels_too,
    leaks_of,
    number_blocks,
    release,
    rig,
    simulated,
    whole,
)
from pack_moves import Move, Seeded, check_moves, layout_spec, move
from packing import (
    OPTIONS,
    PACK,
    blocks_hold,
    carry_by_group,
    copies_held,
    hold_the_kernels,
    in_use,
    load,
    pieces_of_one_block,
    poison_places,
    rings,
    slots_hold,
    store,
)
from seeds import rest_long, seeds
from sharding import Machine

import kvoffload
from kvoffload import (
    NO_WAIT,
    CapabilityError,
    Direction,
    DriverError,
    GroupTransfer,
    KVLayout,
    KVOffloadError,
    OffloadEngine,
    TransferError,
)
from kvoffload.copiers import Place, StagingRing, copier_set, selection
from kvoffload.tuning import CopierName

OUT_OF_MEMORY = cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
BLOCK = 4 * 64  # bytes of a block in a rig

# bytes


@pytest.mark.parametrize("level", ["no-batch", "raw"])
@pytest.mark.parametrize("seed", rest_long(seeds(8), 3))
def test_any_packed_transfers_move_the_bytes_of_a_naive_loop(
    monkeypatch: pytest.MonkeyPatch, level: str, seed: int
) -> None:
    """Rows of 1 byte and more, aligned or not, folded or not, sub-blocks, groups; rings of one place and of a few."""
    chance = Seeded(seed)
    spec = layout_spec(chance)._replace(slot_order="block-major")
    largest = max(sum(plane.block_bytes for plane in group) for group in spec.groups)
    monkeypatch.setattr(copier_set, "ring_bytes", lambda *_: 512 + chance.number(1, 4) * (largest + 256))
    poison_places(monkeypatch)
    if seed % 2:
        change_streams(monkeypatch)
    copiers: tuple[CopierName, ...] = (PACK, PACK, "strided")
    moves: list[Move] = [move(chance, spec, copiers[chance.number(0, 2)]) for _ in range(8)]
    bound = {"most_queued_bytes": 3000} if seed % 3 == 0 else {}
    with simulated(seed, level) as device:
        check_moves(device, spec, moves, seed, **bound)


@pytest.mark.parametrize("move", [store, load])
def test_packed_transfers_say_how_long_they_took(device: kvoffload.Device, move: Any) -> None:
    with rig(device, staging_bytes=STAGING) as bench:
        job = move(bench, [1, 2], [1, 2])
        while not job.done:
            pass
        (result,) = bench.engine.poll()
        assert (result.copier, math.isnan(result.seconds)) == (PACK, False)


@pytest.mark.parametrize("urgent", [False, True])
def test_loads_in_pieces_keep_their_bytes_when_urgent_ones_go_ahead(
    monkeypatch: pytest.MonkeyPatch, urgent: bool
) -> None:
    """Places are given when a piece is queued, in the order of the queue."""
    pieces_of_one_block(monkeypatch, 2, BLOCK)
    poison_places(monkeypatch)
    with simulated(3) as device, rig(device, most_queued_bytes=BLOCK, **OPTIONS) as bench:
        held = bench.stream()
        bench.gate(held)
        load(bench, range(4), range(4), after=held)
        for first in (4, 8):
            load(bench, range(first, first + 4), range(first, first + 4))
        bench.engine.load(range(12, 16), range(12, 16), after=NO_WAIT, copier=PACK, urgent=urgent)
        assert sum(job.held for job in bench.engine._parts.in_flight.loads.transfers) >= 3
        release(bench)
        assert blocks_hold(bench, range(16), range(100, 116))
        assert in_use(bench) == [0, 0]


def test_both_directions_at_once_and_many_transfers_in_a_ring_of_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces_of_one_block(monkeypatch, 1, BLOCK)
    poison_places(monkeypatch)
    with simulated(4) as device, rig(device, **OPTIONS) as bench:
        held = bench.stream()
        bench.gate(held)
        for first in range(0, 20, 2):
            store(bench, range(first, first + 2), range(first, first + 2), after=held)
            load(bench, range(20 + first, 22 + first), range(20 + first, 22 + first), after=held)
        release(bench)
        assert slots_hold(bench, range(20), range(1, 21))
        assert blocks_hold(bench, range(20, 40), range(120, 140))
        whole(bench.engine)


def groups_of(device: kvoffload.Device, **options: Any) -> OffloadEngine:
    """Two groups of plane-major blocks and a block-major one; block `b` of each holds `b + 1`."""
    groups = [device.allocate_planes(count, block_bytes=64, num_blocks=16) for count in (2, 3)]
    groups.append(device.allocate_blocks(16, planes=2, block_bytes=64))
    for planes in groups:
        number_blocks(planes, 1)
    engine = OffloadEngine(KVLayout(groups), device=device, num_slots=48, staging_bytes=STAGING, **options)
    engine.slots[:] = 0xB7
    return engine


@pytest.mark.parametrize("first", ["pack", "strided"])
def test_groups_of_one_transfer_by_different_copiers(monkeypatch: pytest.MonkeyPatch, first: CopierName) -> None:
    """Contiguous copies, which pieces use as well, and strided ones behind the pieces."""
    pieces_of_one_block(monkeypatch, 3, 3 * 64)
    poison_places(monkeypatch)
    methods: tuple[CopierName, ...] = (first, "pack", "batch")
    carry_by_group(monkeypatch, *methods)
    with simulated(5) as device, groups_of(device) as engine:
        out = [GroupTransfer(group, range(4), range(8 * group, 8 * group + 4)) for group in range(3)]
        back = [GroupTransfer(group, range(8, 12), range(8 * group, 8 * group + 4)) for group in range(3)]
        assert engine.store_groups(out, after=NO_WAIT).copier in methods
        engine.load_groups(back, after=NO_WAIT)
        again = [GroupTransfer(group, range(8, 12), range(24 + 8 * group, 28 + 8 * group)) for group in range(3)]
        engine.store_groups(again, after=NO_WAIT)
        engine.drain(10)
        assert all(result.error is None for result in engine.poll())
        for group, nbytes in enumerate((128, 192, 128)):
            for index in range(4):
                assert all_are(engine.slots[8 * group + index, :nbytes], index + 1)
                assert all_are(engine.slots[24 + 8 * group + index, :nbytes], index + 1)


@pytest.mark.parametrize("late", ["store", "load"])
@pytest.mark.parametrize("methods", [("pack", "strided"), ("pack", "pack")])
def test_a_later_group_of_a_load_follows_what_the_load_must_follow(
    monkeypatch: pytest.MonkeyPatch, methods: tuple[Any, Any], late: str
) -> None:
    """A store to one of its slots, and a load before it to one of its blocks."""
    change_streams(monkeypatch)
    with simulated(6) as device, groups_of(device) as engine:
        engine.slots[:] = 50
        bench = Rig(device, engine, engine.layout.groups[0].planes[0].owner, list(engine.layout.groups[1].planes))  # type: ignore[arg-type]
        held = bench.stream()
        bench.gate(held)
        engine.store([7], [1], group=1, after=held if late == "store" else NO_WAIT, copier="strided")
        engine.load([0], [5], group=1, after=held if late == "load" else NO_WAIT, copier="strided")
        carry_by_group(monkeypatch, *methods)
        engine.load_groups([GroupTransfer(0, [4], [0]), GroupTransfer(1, [5], [1])], after=NO_WAIT)
        release(bench)
        assert all_are(bench.block(5), 8), "of the store; the second load wins"
        bench.close()


def test_packed_transfers_over_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces_of_one_block(monkeypatch, 2, 3 * 64)
    machine = Machine(staging_bytes=STAGING)
    mirrors = machine.mirrors()
    for direction in Direction:
        blocks, slots = list(range(6)), list(range(5, -1, -1))
        job = machine.engine.submit(direction, blocks, slots, after=NO_WAIT, copier=PACK)
        assert job.wait(10).copier == job.copier == PACK
        mirrors.expect(direction, blocks, slots)
    mirrors.check()
    machine.close()


# what cannot be packed


@pytest.mark.parametrize("asked", ["pack", PACK])
def test_blocks_that_are_no_range_of_their_slot_go_another_way(device: kvoffload.Device, asked: Any) -> None:
    planes = device.allocate_planes(3, block_bytes=64, num_blocks=12)
    reason = 'slots of 3 blocks are plane-major here, and slot_order="block-major" of the layout makes it one'
    with OffloadEngine(
        KVLayout([planes], blocks_per_slot=3), device=device, num_slots=4, staging_bytes=STAGING
    ) as engine:
        assert reason in engine.missing_copiers["pack"]
        assert set(engine.missing_copiers) == {"pack"}
        for call in (
            lambda: engine.store([1, 2], [0], copier=asked),
            lambda: engine.plan("store", [1, 2], [0], copier=asked),
        ):
            with pytest.raises(CapabilityError, match=f"copier='pack' cannot run here: .*{reason}"):
                call()
        engine.store([1, 2], [0]).wait(10)
        assert engine.submitted == 1
    one = device.allocate_planes(1, block_bytes=64, num_blocks=12)  # one plane: both orders are the same
    with OffloadEngine(KVLayout([one], blocks_per_slot=3), device=device, num_slots=4, staging_bytes=STAGING) as engine:
        assert engine.store([1, 2], [0], copier=asked).wait(10).copier == "pack"


def test_a_block_that_is_larger_than_the_ring_goes_another_way(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier_set, "ring_bytes", lambda *_: 511)
    too_many = "a block of group 0 has 256 bytes, too many for a ring of 511"
    with rig(device, staging_bytes=STAGING) as bench, pytest.raises(CapabilityError, match=too_many):
        store(bench, [1], [1])
    monkeypatch.setattr(copier_set, "ring_bytes", lambda *_: 512)
    with rig(device, staging_bytes=STAGING) as bench:
        store(bench, range(3), range(3)).wait(10)
        assert slots_hold(bench, range(3), range(1, 4))


@pytest.mark.parametrize("asked", ["pack", PACK])
def test_a_load_in_parts_that_are_no_ranges_goes_another_way(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch, asked: Any
) -> None:
    choose_kernels_too(monkeypatch)
    with rig(device, staging_bytes=STAGING) as bench:
        with pytest.raises(ValueError, match="copies parts whose planes follow each other"):
            bench.engine.load([1], [1], copier=asked, parts=[[0, 2], [1, 3]])
        job = bench.engine.load([1], [1], after=NO_WAIT, parts=[[0, 2], [1, 3]])
        assert job.copier != "pack"
        job.wait(10)
        assert bench.engine.load([1], [1], after=NO_WAIT, copier=asked, parts=1).wait(10).copier == "pack"


# no memory


def prefer_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have "pack" chosen wherever it could be, as on a GPU."""
    choose_kernels_too(monkeypatch)
    choose = selection.choose

    def choosing(question: selection.Question) -> selection.Selection:
        packs = question.available & {"pack"}
        return choose(question._replace(available=packs or question.available))

    monkeypatch.setattr(copier_set, "choose", choosing)


def test_without_memory_for_the_ring_another_method_carries_it(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefer_packing(monkeypatch)
    simulator: Any = device.simulator
    caplog.set_level(logging.WARNING, "kvoffload")
    with rig(device, staging_bytes=STAGING) as bench:
        assert bench.engine.plan("store", [1], [1]).copier == PACK
        assert bench.engine.store([1], [1], after=NO_WAIT).wait(10).copier == "pack"
        before = simulator.faults.call_count["cuMemAlloc"]
        simulator.faults.fail_call("cuMemAlloc", error=OUT_OF_MEMORY)
        job = bench.engine.load([1], [2], after=NO_WAIT)
        assert job.copier != "pack"
        job.wait(10)
        assert bench.engine.store([3], [3], after=NO_WAIT).wait(10).copier != "pack"
        for _ in range(3):
            bench.engine.load([2], [4], after=NO_WAIT).wait(10)
        assert simulator.faults.call_count["cuMemAlloc"] == before + 1, "nothing tries again"
        said = [record.getMessage() for record in caplog.records if "'pack' is out" in record.getMessage()]
        assert len(said) == 1
        assert "bytes of device memory to pack loads into: " in said[0]
        assert bench.engine.missing_copiers["pack"] in said[0]
        with pytest.raises(CapabilityError, match=r"copier='pack' cannot run here: no .* bytes of device memory"):
            load(bench, [1], [1])
        assert (all_are(bench.slot(3), 4), all_are(bench.block(4), 102)) == (True, True)
    assert leaks_of(device)["device_allocations"] == 1, "the planes"


def test_without_memory_a_transfer_that_names_pack_is_refused(device: kvoffload.Device) -> None:
    simulator: Any = device.simulator
    with rig(device, staging_bytes=STAGING) as bench:
        simulator.faults.fail_call("cuMemAlloc", error=OUT_OF_MEMORY)
        with pytest.raises(CapabilityError, match=r"copier='pack' cannot run here: no .* bytes of device memory"):
            store(bench, [1], [1])
        assert bench.engine.submitted == 0
        whole(bench.engine)


def test_another_failure_of_the_allocation_is_raised_and_tried_again(device: kvoffload.Device) -> None:
    simulator: Any = device.simulator
    with rig(device, staging_bytes=STAGING) as bench:
        simulator.faults.fail_call("cuMemAlloc")
        with pytest.raises(DriverError, match="cuMemAlloc"):
            store(bench, [1], [1])
        assert bench.engine.submitted == 0
        store(bench, [1], [1]).wait(10)
        assert all_are(bench.slot(1), 2)


def test_rings_are_allocated_on_first_use_by_direction_and_freed(device: kvoffload.Device) -> None:
    with rig(device, staging_bytes=STAGING) as bench:
        for use, sizes in ((None, (0, 0)), (store, (1, 0)), (load, (1, 1))):
            if use is not None:
                use(bench, [1], [1]).wait(10)
            assert [ring.allocated // ring.nbytes for ring in rings(bench)] == list(sizes)
        pool = bench.engine.slots.nbytes
        assert rings(bench)[0].nbytes == 2 * pool, "no more than two transfers of the whole pool need"
    assert leaks_of(device)["device_allocations"] == 1


def test_the_ring_is_allocated_while_the_caller_captures_a_graph(device: kvoffload.Device) -> None:
    """In CUDA's default mode a capture forbids cuMemAlloc to all threads, unless they say that they know."""
    with rig(device, staging_bytes=STAGING) as bench:
        capture = Capturing(device, GLOBAL, other_thread=False)
        job = store(bench, [1], [1])
        assert capture.end() == "CUDA_SUCCESS"
        job.wait(10)
        assert all_are(bench.slot(1), 2)


# failures


def attempt(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The call's value, or None if it raised an error of the library's."""
    try:
        return call(*arguments, **options)
    except KVOffloadError:
        return None


def there_and_back(bench: Rig, first: int, streams: list[int]) -> list[Any]:
    """Four pieces out, in again, and an order after them; what came of the store and of the load."""
    stored = attempt(store, bench, range(first, first + 4), range(4), after=streams[0])
    loaded = attempt(load, bench, range(4), range(30, 34), after=streams[0])
    if loaded is not None:
        attempt(loaded.order_before, streams[1])
    attempt(bench.engine.drain, 10)
    return [stored, loaded]


def test_pitfall_29_every_driver_call_of_a_packed_transfer_fails_once(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A sample of them: the first two of each name, and others by the seed."""
    pieces_of_one_block(monkeypatch, 2, BLOCK)
    poison_places(monkeypatch)
    change_streams(monkeypatch)

    def run(nth: int) -> list[str]:
        with simulated(4) as device:
            simulator: Any = device.simulator
            with rig(device, **OPTIONS) as bench:
                streams = [bench.stream(), bench.stream()]
                store(bench, [0], [0]).wait(10)
                load(bench, [0], [0]).wait(10)
                if nth:
                    simulator.faults.fail_nth(nth)
                simulator.faults.calls = []
                stored, loaded = there_and_back(bench, 2, streams)
                names = [name for name, _ in simulator.faults.calls]
                simulator.faults.calls = None
                assert simulator.faults.pending == 0
                bench.engine.drain(10)
                whole(bench.engine)
                assert in_use(bench) == [0, 0]
                if stored is not None and stored.error is None:
                    assert slots_hold(bench, range(4), range(3, 7))
                    assert loaded is None or loaded.error is not None or blocks_hold(bench, range(30, 34), range(3, 7))
                stored, loaded = there_and_back(bench, 12, streams)
                assert (stored.error, loaded.error) == (None, None)
                assert slots_hold(bench, range(4), range(13, 17))
                assert blocks_hold(bench, range(30, 34), range(13, 17))
        assert sum(simulator.leaks().values()) == 0
        assert simulator.violations == []
        return names

    names = run(0)
    assert names.count("cuLaunchKernel") == 16
    seen: Counter[str] = Counter()
    for nth, name in enumerate(names, start=1):
        seen[name] += 1
        polled = name in ("cuEventQuery", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode")
        if seen[name] > (1 if polled else 2) and nth % (80 if polled else 14) != seed % 7:
            continue
        try:
            run(nth)
        except BaseException as error:
            error.add_note(f"failing call {nth} of {len(names)}, {name}")
            raise


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("call", ["event", "wait", "second half"])
def test_a_place_stays_taken_until_what_is_queued_of_a_failed_piece_has_ended(
    monkeypatch: pytest.MonkeyPatch, direction: Direction, call: str
) -> None:
    """The first half is queued and held; a driver call behind it fails. The ring has one place, which the next transfer
    needs: it waits, although its other half is ready. An earlier transfer that has the place is still waited for."""
    stores = direction is Direction.STORE
    name, nth = {
        "event": ("cuEventRecord", 2),
        "wait": ("cuStreamWaitEvent", 1),
        "second half": ("cuMemcpyBatchAsync" if stores else "cuLaunchKernel", 1),
    }[call]
    pieces_of_one_block(monkeypatch, 1, BLOCK)
    poison_places(monkeypatch)
    change_streams(monkeypatch)
    with simulated(5) as device, rig(device, **OPTIONS) as bench:
        for use in (store, load):
            use(bench, [0], [0]).wait(10)
        gate = bench.gate()
        device.simulator.faults.fail_call(name, nth=nth)
        move = store if stores else load
        if stores:
            with monkeypatch.context() as patch:
                hold_the_kernels(patch, gate)
                failed = move(bench, [2], [2])
        else:
            with copies_held(bench, gate):
                failed = move(bench, [2], [2])
        assert failed.error is not None
        assert device.simulator.faults.pending == 0
        following = [move(bench, [number], [number]) for number in (3, 4)]
        bench.settle()
        assert not failed.done
        assert not any(job.done for job in following)
        assert in_use(bench)[0 if stores else 1] > 0
        gate.open()
        with pytest.raises(TransferError, match=name):
            failed.wait(10)
        for job in following:
            job.wait(10)
        expected = [4, 5] if stores else [103, 104]
        assert (slots_hold if stores else blocks_hold)(bench, [3, 4], expected)
        whole(bench.engine)


def test_a_piece_that_fails_before_its_waits_uncovers_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first transfer's copies still read the place; the second fails before it waits for them; the third must."""
    pieces_of_one_block(monkeypatch, 1, BLOCK)
    with simulated(6) as device, rig(device, **OPTIONS) as bench:
        store(bench, [0], [0]).wait(10)
        with copies_held(bench, bench.gate()):
            store(bench, [1], [1])
        device.simulator.faults.fail_call("cuStreamWaitEvent")
        failed = store(bench, [2], [2])
        assert failed.error is not None
        store(bench, [3], [3])
        release(bench)
        assert slots_hold(bench, [1, 3], [2, 4])


@pytest.mark.parametrize("nth", range(1, 60, 4))
def test_a_context_lost_during_packed_transfers_ends_every_job_and_frees_nothing(
    monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    pieces_of_one_block(monkeypatch, 2, BLOCK)
    device = simulated(6)
    simulator: Any = device.simulator
    with rig(device, **OPTIONS) as bench:
        streams = [bench.stream(), bench.stream()]
        simulator.faults.sticky(at_call=nth)
        simulator.faults.calls = []
        jobs = there_and_back(bench, 2, streams)
        bench.engine.drain(10)
        assert all(job is None or job.done for job in jobs)
        assert bench.engine.statistics().in_flight == 0
        bench.streams.clear()
        bench.engine.close(10)
        assert "cuMemFree" not in [name for name, _ in simulator.faults.calls]
    device.close(10)
    assert simulator.violations == []


def test_close_waits_for_packed_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces_of_one_block(monkeypatch, 2, BLOCK)
    with simulated(7) as device:
        with rig(device, **OPTIONS) as bench:
            jobs = [store(bench, range(6), range(6)), load(bench, range(10, 16), range(10, 16))]
            bench.engine.close(10)
            assert [job.done for job in jobs] == [True, True]
            assert slots_hold(bench, range(6), range(1, 7))
        assert leaks_of(device)["device_allocations"] == 1


# the ring


class _NoDriver:
    """Memory from 0 on."""

    def create(self, _: str, holder: list[int], __: int) -> None:
        holder.append(0)


@pytest.mark.parametrize("seed", seeds(20))
def test_a_place_is_filled_behind_all_that_use_its_bytes(seed: int) -> None:
    """Pieces of any sizes; those in front end in their order; some fail before they have waited, or between halves."""
    chance = random.Random(seed)
    ring = StagingRing(_NoDriver(), 256 * chance.randint(1, 12))  # type: ignore[arg-type]
    ring.open()
    running: list[tuple[Place, range]] = []  # with its bytes; the oldest first
    for _ in range(300):
        while running and chance.random() < 0.4:
            running.pop(0)[0].halves = []
        nbytes = chance.randint(1, ring.nbytes // 256) * 256
        place = ring.take(nbytes)
        assert 0 <= place.address <= ring.nbytes - nbytes
        place.halves = [object(), object()]  # type: ignore[list-item]
        fails = chance.random()
        span = range(place.address, place.address + nbytes)
        if fails >= 0.1:
            behind = set(ring.used_before(place))
            for index, (other, _) in enumerate(running):
                if other in behind and other.joined:  # it ends behind all before it
                    behind |= {each for each, _ in running[:index]}
            for other, taken in running:
                assert other in behind or taken.stop <= span.start or span.stop <= taken.start
        if fails >= 0.2:
            ring.join(place)
        running.append((place, span))
        if chance.random() < 0.05:  # an interrupt
            ring.restore({other: other.halves for other, _ in running})

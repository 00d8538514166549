"""Tables of the gather copier: nobody uses one again too early, they find room or wait, and all of it is pinned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import STAGING, Rig, interrupt_call, rig, simulated, whole
from packing import expect, load, overwrite_on_release, record_launches, small_tables, store, submit
from transfers import segments_of, transfer_of

import kvoffload
from kvoffload import CapacityError, KVLayout, OffloadEngine, TransferError
from kvoffload.copiers import GatherCopier, Staged
from kvoffload.copiers.table_arena import TableArena
from kvoffload.driver import address_of
from kvoffload.planning.transfer_plan import BlockPlan
from kvoffload.simulator.memory import Kind
from kvoffload.testing import Mirror

# more than there is room for


def test_what_finds_no_room_for_its_table_waits_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tables(monkeypatch, blocks=32)
    with simulated(1) as device, rig(device, num_blocks=400, num_slots=400, staging_bytes=STAGING) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        blocks = np.random.default_rng(0).permutation(400)
        mirror = Mirror(bench.engine, [bench.slab])
        long = submit(bench.engine, store(blocks, range(400)), after=held)
        short = submit(bench.engine, store([5], [1]))
        bench.settle()
        assert bench.engine.statistics().held == 2
        assert not transfer_of(long).enqueued
        assert len(segments_of(long)) == 4, "of 13; the ring has 2 KiB, and a table of 32 blocks 512 bytes"
        assert bench.engine._parts.in_flight.stores.lane.streams[-1].places < 20
        gate.open()
        bench.engine.drain(10)
        assert (long.error, short.error, bench.engine.statistics().held) == (None, None, 0)
        expect(mirror, store(blocks, range(400)))
        expect(mirror, store([5], [1]))
        mirror.check()
        whole(bench.engine)
        gather = bench.engine._parts.copiers._kernels
        assert gather is not None
        assert [arena.in_use for arena in gather.arenas] == [0, 0]


# tables


def _release_at_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copier that gives its table back when the kernel is queued and has not run."""
    stage = GatherCopier.stage

    def hasty(copier: GatherCopier, work: BlockPlan, order: Any) -> Staged | None:
        staged = stage(copier, work, order)
        if staged is None:
            return None

        def submit_and_release(stream: int, start: int | None = None, /) -> None:
            staged.submit(stream, start)
            assert staged.table is not None
            staged.table.release()

        return Staged(submit_and_release)

    monkeypatch.setattr(GatherCopier, "stage", hasty)


@pytest.mark.timeout(300)
def test_pitfall_05_tables_belong_to_a_transfer_until_its_end(
    each_device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 transfers behind a gate, of which the arena has room for a few; every table that is given back is overwritten
    at once: on the simulated device with what loses the context, on a GPU with block 0 and slot 0.
    """
    small_tables(monkeypatch, blocks=8)
    simulated, ids = each_device.simulated, 21 if each_device.simulated else 64
    sizes = {"planes": 4, "block_bytes": 64 if simulated else 16 << 10, "num_blocks": ids, "num_slots": ids}
    with rig(each_device, **sizes, staging_bytes=STAGING) as bench:
        for programs in range(1, 5):  # loading a kernel for the first time may wait for the GPU to be idle
            method = "pack"
            submit(bench.engine, store(range(4), range(4), method)).wait(30)
            submit(bench.engine, load(range(4), range(4), method)).wait(30)
        bench.engine.poll()
        spoiled = (1 << 30, 64) if simulated else (0, bench.engine._parts.memory.address)
        starts = overwrite_on_release(monkeypatch, *spoiled)
        held = bench.stream()
        gate = bench.gate(held)
        mirror = Mirror(bench.engine, [bench.slab])
        rng, moves = np.random.default_rng(5), []
        for number in range(100):
            blocks, slots = (1 + rng.permutation(ids - 1)[: 8 if simulated else 16] for _ in range(2))
            method = CopyMethod("gather", 1 + number % 4, 1.0)
            moves.append(store(blocks, slots, method) if number % 3 else load(slots, blocks, method))
        jobs = [submit(bench.engine, each, after=held) for each in moves]
        for each in moves:
            expect(mirror, each)
        bench.settle()
        assert not any(job.done for job in jobs)
        assert bench.engine.statistics().held > 50, "tables are used again before all are through"
        gate.open()
        bench.engine.drain(60)
        assert [job.error for job in jobs] == [None] * 100
        mirror.check()
        whole(bench.engine)
    assert len(starts) == (100 if simulated else 200)
    assert len(set(starts)) <= (19 if simulated else 16), "the room of many was used again"


@pytest.mark.parametrize("poison", ["nothing", "another block"])
def test_pitfall_05_a_table_used_again_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch, poison: str) -> None:
    """What the test above would see: later transfers written over a table, or the bytes of another block."""
    with simulated(2) as device:
        _release_at_launch(monkeypatch)
        with rig(device, num_blocks=21, num_slots=21, staging_bytes=STAGING) as bench:
            if poison == "another block":
                overwrite_on_release(monkeypatch, 0, bench.engine._parts.memory.address)
            held = bench.stream()
            bench.gate(held)
            mirror = Mirror(bench.engine, [bench.slab])
            moves = [store(range(1 + 4 * n, 5 + 4 * n), range(1 + 4 * n, 5 + 4 * n)) for n in range(4)]
            jobs = [submit(bench.engine, each, after=held) for each in moves]
            for each in moves:
                expect(mirror, each)
            bench.gates[0].open()
            bench.engine.drain(10)
            assert [job.error for job in jobs] == [None] * 4
            with pytest.raises(AssertionError, match="the slot pool differs"):
                mirror.check()


def test_pitfall_05_a_table_overwritten_too_early_loses_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    _release_at_launch(monkeypatch)
    overwrite_on_release(monkeypatch, block=1 << 30, slot_address=64)
    _expect_a_loss(_spoil_nothing, "gather loaded 8 bytes")


def test_an_interrupt_that_loses_a_table_does_not_stop_the_ring(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the taking of a table and its place in the books; later transfers go round the ring several times."""
    small_tables(monkeypatch, blocks=32)
    with rig(device, num_blocks=40, num_slots=40, staging_bytes=STAGING) as bench:
        with monkeypatch.context() as patch:
            stage = GatherCopier.stage

            def interrupted(copier: GatherCopier, work: BlockPlan, order: Any) -> Staged | None:
                stage(copier, work, order)
                raise KeyboardInterrupt

            patch.setattr(GatherCopier, "stage", interrupted)
            with pytest.raises(KeyboardInterrupt):
                submit(bench.engine, store(range(32), range(32)))
        bench.engine.drain(10)
        for first in range(8):
            submit(bench.engine, store(range(first, first + 32), range(32))).wait(5)
        assert (bench.slot(31) == 7 + 31 + 1).all()
        whole(bench.engine)


def test_a_lost_table_does_not_stop_transfers_that_wait_for_room(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring is never idle: there is always a transfer that waits behind the lost table."""
    small_tables(monkeypatch, blocks=32)
    with rig(device, num_blocks=400, num_slots=400, staging_bytes=STAGING) as bench:
        with monkeypatch.context() as patch:
            interrupt_call(patch, TableArena, "take", after=True)  # the call has a table that nothing refers to
            with pytest.raises(KeyboardInterrupt):
                submit(bench.engine, store(range(32), range(32)))
        jobs = [submit(bench.engine, store(range(400), range(400))) for _ in range(3)]
        bench.engine.drain(10)
        assert [job.error for job in jobs] == [None] * 3
        whole(bench.engine)


# memory that is not pinned


def _spoil_nothing(_: Rig) -> None:
    pass


def _expect_a_loss(spoil: Callable[[Rig], object], fault: str) -> None:
    """Submit a store behind a gate, spoil something, open the gate: the context is lost, and everybody is told."""
    device = simulated(3)
    with rig(device, staging_bytes=STAGING) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        spoil(bench)
        job = submit(bench.engine, store([1, 2], [3, 4]), after=held)
        gate.open()
        with pytest.raises(TransferError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            job.wait(10)
        (told,) = device.simulator.device_faults
        assert fault in told
        with pytest.raises(TransferError, match="the CUDA context is lost"):
            bench.engine.store([1], [1])
        assert bench.engine.statistics().in_flight == 0
        bench.streams.clear()
        bench.engine.close(10)
    device.close(10)


def test_pitfall_18_a_pool_unpinned_behind_the_engine_is_not_written() -> None:
    pools = []

    def unpin(bench: Rig) -> None:
        with bench.device.current():
            bench.device.driver.host_unregister(bench.engine._parts.memory.address)
        pools.append(bench.engine.slots)

    _expect_a_loss(unpin, "gather stored 8 bytes")
    assert (pools[0] == (100 + np.arange(16)).astype(np.uint8)[:, np.newaxis]).all()


def test_pitfall_18_a_slot_address_in_pageable_memory_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    pageable = np.zeros(1 << 16, np.uint8)
    stage = GatherCopier.stage

    def elsewhere(copier: GatherCopier, work: BlockPlan, order: Any) -> Staged | None:
        staged = stage(copier, work, order)
        assert staged is not None
        assert staged.table is not None
        staged.table.words[len(work) :] = address_of(pageable) // 16 * 16 + 16
        return staged

    monkeypatch.setattr(GatherCopier, "stage", elsewhere)
    _expect_a_loss(_spoil_nothing, "gather stored 8 bytes")
    assert not pageable.any()


def test_pitfall_18_every_launch_is_on_registered_memory(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = record_launches(monkeypatch)
    with rig(device, staging_bytes=STAGING) as bench:
        pool = device.simulator.memory.at(bench.engine._parts.memory.address)
        for method in ("pack", CopyMethod("split", 1, 0.5)):
            submit(bench.engine, store(range(8), range(8), method)).wait(10)
            submit(bench.engine, load(range(8), range(8), method)).wait(10)
        memory: Any = device.simulator.memory
        assert (pool.kind, pool.nbytes) == (Kind.REGISTERED, bench.engine.slots.nbytes)
        assert len(launches) == 4
        for launch in launches:
            rows, table = (memory.at(address) for address in launch.arguments[:2])
            assert (rows.kind, table.kind) == (Kind.DEVICE, Kind.REGISTERED)


def test_pitfall_18_tables_that_cannot_be_pinned_make_no_engine() -> None:
    with simulated(1, pinnable_bytes=1 << 20) as device:
        layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)])
        before = device.simulator.leaks()
        with pytest.raises(CapacityError, match=r"cannot pin .*CUDA_ERROR_OUT_OF_MEMORY"):
            OffloadEngine(layout, device=device, num_slots=4, staging_bytes=STAGING)
        assert device.simulator.leaks() == before
        with OffloadEngine(layout, device=device, num_slots=4, staging_bytes=0) as engine:
            engine.store([1], [1]).wait(10)

"""Tables of the pack copier: nobody uses one again too early, they find room or wait, and all of it is pinned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import STAGING, interrupt_call, rig, simulated, whole
from pack_moves import expect, load, overwrite_on_release, record_launches, small_tables, store, submit
from transfers import segments_of, transfer_of

import kvoffload
from kvoffload import CapacityError, KVLayout, OffloadEngine
from kvoffload.copiers.table_arena import TableArena
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
        assert len(segments_of(long)) == 8, "of 26; there are 2 KiB for tables, and one of 32 blocks has 512 bytes"
        assert bench.engine._parts.in_flight.stores.lane.streams[-1].places < 30
        gate.open()
        bench.engine.drain(10)
        assert (long.error, short.error, bench.engine.statistics().held) == (None, None, 0)
        expect(mirror, store(blocks, range(400)))
        expect(mirror, store([5], [1]))
        mirror.check()
        whole(bench.engine)
        kernels = bench.engine._parts.copiers._kernels
        assert kernels is not None
        assert [arena.in_use for arena in kernels.arenas] == [0, 0]


# tables


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
        submit(bench.engine, store(range(4), range(4))).wait(30)  # a kernel's first launch may wait for an idle GPU
        submit(bench.engine, load(range(4), range(4))).wait(30)
        bench.engine.poll()
        spoiled = (1 << 30, 64) if simulated else (0, bench.engine._parts.memory.address)
        starts = overwrite_on_release(monkeypatch, *spoiled)
        held = bench.stream()
        gate = bench.gate(held)
        mirror = Mirror(bench.engine, [bench.slab])
        rng, moves = np.random.default_rng(5), []
        for number in range(100):
            blocks, slots = (1 + rng.permutation(ids - 1)[: 8 if simulated else 16] for _ in range(2))
            moves.append(store(blocks, slots) if number % 3 else load(slots, blocks))
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


def test_pitfall_18_every_launch_is_on_memory_that_the_gpu_may_read(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many programs read device memory only, one reads the table in pinned memory."""
    launches = record_launches(monkeypatch)
    with rig(device, staging_bytes=STAGING) as bench:
        submit(bench.engine, store(range(8), range(8))).wait(10)
        submit(bench.engine, load(range(8), range(8))).wait(10)
        memory: Any = device.simulator.memory
        of_tables, moving = launches[::2], launches[1::2]
        assert (len(of_tables), len(moving)) == (2, 2)
        for launch in of_tables:
            assert launch.grid == 1
            assert [memory.at(address).kind for address in launch.arguments[:2]] == [Kind.REGISTERED, Kind.DEVICE]
        for launch in moving:
            assert [memory.at(address).kind for address in launch.arguments[:2]] == [Kind.DEVICE, Kind.DEVICE]


def test_pitfall_18_tables_that_cannot_be_pinned_make_no_engine() -> None:
    with simulated(1, pinnable_bytes=1 << 20) as device:
        layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)])
        before = device.simulator.leaks()
        with pytest.raises(CapacityError, match=r"cannot pin .*CUDA_ERROR_OUT_OF_MEMORY"):
            OffloadEngine(layout, device=device, num_slots=4, staging_bytes=STAGING)
        assert device.simulator.leaks() == before
        with OffloadEngine(layout, device=device, num_slots=4, staging_bytes=0) as engine:
            engine.store([1], [1]).wait(10)

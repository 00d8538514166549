"""Loads in parts that the kernel carries: the rows of every part, the table of blocks that all of them read, and what
happens to both when something goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gathering import Seeded, fill_slots, layout_spec, overwrite_on_release, record_launches, small_tables
from helpers import LEGACY, Rig, change_streams, cut_segments, leaks_of, rig, simulated, whole
from layerwise import (
    DEFAULTS,
    PARTS,
    PLANES,
    Reader,
    blocks_hold,
    check_after_interrupt,
    hold_from,
    interrupt_loads,
    load,
    reader_of,
)
from seeds import rest_long
from strategies import place
from transfers import segments_of, transfer_of

import kvoffload
from kvoffload import NO_WAIT, CapabilityError, Direction, KVLayout, OffloadEngine, TransferError
from kvoffload.copiers import gather
from kvoffload.engine.job import Job
from kvoffload.simulator.kernels import LaunchOperation
from kvoffload.testing import Mirror, SimulatedDriver, check_clean_close
from kvoffload.tuning import CopyMethod

LAYERS = [[0, 4], [1, 5], [2, 6], [3, 7]]  # all of K, then all of V


@pytest.fixture(autouse=True)
def _by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEFAULTS, "copier", "gather")


@pytest.fixture
def bench(device: kvoffload.Device) -> Iterator[Rig]:
    with rig(device, planes=PLANES, sm_limit=4) as made:
        yield made
        for gate in made.gates:
            gate.open()
        made.engine.drain(10)
        whole(made.engine)


@pytest.fixture
def kernels_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaunchOperation, "run", lambda operation: 1.0 + operation.grid)


def calls(bench: Rig, name: str) -> int:
    """How often a function of the driver has been called."""
    assert bench.device.simulator is not None
    return int(bench.device.simulator.faults.call_count[name])


def tables_out(bench: Rig) -> int:
    """Of loads."""
    kernels = bench.engine._parts.copiers._kernels
    assert kernels is not None
    return kernels.arenas[1].in_use


# bytes


def random_parts(random: np.random.Generator, num_planes: int) -> list[list[int]]:
    """Lists of planes in any order."""
    count = int(random.integers(1, num_planes + 1))
    planes = random.permutation(num_planes)
    borders = np.sort(random.choice(np.arange(1, num_planes), count - 1, replace=False))
    return [each.tolist() for each in np.split(planes, borders)]


@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("cut", [False, True], ids=["", "several launches a part"])
def test_any_parts_move_the_bytes_of_a_naive_loop_and_no_others(
    number: int, cut: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of layouts of any alignment, with planes of two sizes, several blocks in a slot, and partial slots."""
    if cut:
        monkeypatch.setattr(gather, "MAX_TABLE_BLOCKS", 1 + number % 3)
    random, device = np.random.default_rng(seed), kvoffload.open_device(backend=SimulatedDriver(seed=number))
    layout, buffers = place(device, layout_spec(Seeded(seed)), seed)
    with OffloadEngine(layout, device=device, num_slots=6, sm_limit=4) as engine:
        fill_slots(engine, seed)
        mirror = Mirror(engine, buffers)
        for programs in (1, 2, 4):
            group, first = int(random.integers(layout.num_groups)), int(random.integers(layout.blocks_per_slot))
            num_blocks, num_planes = layout.groups[group].num_blocks, len(layout.groups[group].planes)
            count = int(random.integers(1, min(num_blocks, 6 * layout.blocks_per_slot - first) + 1))
            blocks = random.permutation(num_blocks)[:count]
            slots = random.integers(0, 6, layout.slots_for(count, first_sub_block=first))
            where: dict[str, Any] = {"group": group, "first_sub_block": first}
            job = engine.submit(
                Direction.LOAD,
                blocks,
                slots,
                **where,
                after=NO_WAIT,
                copier=CopyMethod("gather", programs, 1.0),
                parts=random_parts(random, num_planes),
            )
            mirror.expect(Direction.LOAD, blocks.tolist(), slots.tolist(), **where)
            assert job.copier == "gather"
        engine.drain(30)
        assert [result.error for result in engine.poll()] == [None] * 3
        mirror.check()
    for buffer in buffers:
        buffer.close()
    check_clean_close(device)


# one launch a part


def test_every_part_is_a_launch_on_its_rows_and_all_read_one_table(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    copies, uploads = calls(bench, "cuMemcpyHtoD"), calls(bench, "cuMemcpyAsync")
    held = leaks_of(bench.device)
    gate = bench.gate(waiting := bench.stream())
    job = load(bench, range(8), range(8), parts=LAYERS, after=waiting)
    assert len(launches) == len(segments_of(job)) == PARTS
    rows, tables, row_counts, blocks = zip(*(launch.arguments for launch in launches), strict=True)
    assert rows == tuple(rows[0] + part * 2 * 5 * 8 for part in range(PARTS)), "five words a row, a row a plane"
    assert (set(row_counts), set(blocks), len(set(tables))) == ({2}, {8}, 1)
    assert len({launch.stream for launch in launches}) == 1
    assert tables_out(bench) == 1
    gate.open()
    job.wait(10)
    assert tables_out(bench) == 0
    assert calls(bench, "cuMemcpyAsync") == uploads + 1, "the rows"
    load(bench, range(8), range(8), parts=LAYERS).wait(10)
    assert [launch.arguments[0] for launch in launches[PARTS:]] == list(rows)
    assert calls(bench, "cuMemcpyAsync") == uploads + 1
    assert calls(bench, "cuMemcpyHtoD") == copies
    assert leaks_of(bench.device)["device_allocations"] == held["device_allocations"]
    assert blocks_hold(bench, range(8), range(100, 108))


def test_two_divisions_have_rows_of_their_own(bench: Rig) -> None:
    with_gate = bench.gate(waiting := bench.stream())
    jobs = [
        load(bench, range(first, first + 4), range(first, first + 4), parts=parts, after=waiting)
        for first, parts in ((0, LAYERS), (4, PARTS), (8, [[7, 6, 5, 4, 3, 2, 1], [0]]))
    ]
    with_gate.open()
    bench.engine.drain(10)
    assert [job.error for job in jobs] == [None] * 3
    assert blocks_hold(bench, range(12), range(100, 112))


def test_a_held_default_stream_does_not_hold_the_call(bench: Rig) -> None:
    """Rows that are not on the GPU yet get there in stream order: nothing waits for the GPU under the engine's lock."""
    gate = bench.gate(LEGACY)
    job = load(bench, range(4), range(4), after=None)
    reader = reader_of(bench, job, PARTS - 1, PLANES - 1, 3)
    bench.settle()
    assert (transfer_of(job).enqueued, job.done) == (True, False)
    gate.open()
    job.wait(10)
    bench.settle()
    assert reader.value == 103


# blocks that find no room in one table


def test_a_part_of_more_blocks_than_a_table_holds_is_several_launches(
    bench: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_segments(monkeypatch, bench.engine, 3)
    launches = record_launches(monkeypatch)
    gate = bench.gate(waiting := bench.stream())
    job = load(bench, range(8), range(8), after=waiting)
    assert [segment.part for segment in segments_of(job)] == [part for part in range(PARTS) for _ in range(3)]
    assert [launch.arguments[-1] for launch in launches] == [3, 3, 2] * PARTS
    tables = [launch.arguments[1] for launch in launches]
    assert tables == tables[:3] * PARTS
    assert (len(set(tables)), tables_out(bench)) == (3, 3)
    readers = [reader_of(bench, job, part, 2 * part, 7) for part in range(PARTS)]
    gate.open()
    job.wait(10)
    bench.settle()
    assert tables_out(bench) == 0
    assert [reader.value for reader in readers] == [107] * PARTS
    assert blocks_hold(bench, range(8), range(100, 108))


def test_parts_that_find_no_room_for_a_table_wait_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """13 tables for each part; the ring has room for 4, and each is written again for the next part."""
    small_tables(monkeypatch, blocks=32)
    launches = record_launches(monkeypatch)
    starts = overwrite_on_release(monkeypatch, block=1 << 30, slot_address=64)
    with simulated(1) as device, rig(device, num_blocks=400, num_slots=400, sm_limit=4) as bench:
        gate = bench.gate(waiting := bench.stream())
        blocks = np.random.default_rng(0).permutation(400)
        mirror = Mirror(bench.engine, [bench.slab])
        job = load(bench, range(400), blocks, parts=2, after=waiting)
        short = load(bench, [3], [blocks[0]], parts=4)
        bench.settle()
        assert bench.engine.statistics().held == 2
        assert len(segments_of(job)) in (3, 4), "the first has the rows, too"
        gate.open()
        bench.engine.drain(10)
        assert (job.error, short.error, tables_out(bench)) == (None, None, 0)
        assert len(launches) == 26 + 4
        assert len(starts) == 26 + 1
        mirror.expect(Direction.LOAD, blocks.tolist(), list(range(400)))
        mirror.expect(Direction.LOAD, [int(blocks[0])], [3])
        mirror.check()
        whole(bench.engine)


def hundred_gated(bench: Rig) -> tuple[list[Job], Mirror]:
    """100 loads behind a gate, in parts and not, of which the arena has room for a few. The gate opens."""
    gate = bench.gate(waiting := bench.stream())
    mirror, random = Mirror(bench.engine, [bench.slab]), np.random.default_rng(5)
    jobs = []
    for number in range(100):
        blocks, slots = random.permutation(20)[:8] + 1, random.permutation(20)[:8] + 1
        parts = (2, [[0, 2], [1], [3]], None, 4)[number % 4]
        jobs.append(load(bench, slots, blocks, parts=parts, after=waiting))
        mirror.expect(Direction.LOAD, blocks.tolist(), slots.tolist())
    bench.settle()
    assert not any(job.done for job in jobs)
    assert bench.engine.statistics().held > 50, "tables are used again before all are through"
    gate.open()
    bench.engine.drain(30)
    return jobs, mirror


def test_pitfall_05_a_table_belongs_to_all_parts_until_the_last_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tables(monkeypatch, blocks=8)
    starts = overwrite_on_release(monkeypatch, block=1 << 30, slot_address=64)
    with simulated(2) as device, rig(device, num_blocks=21, num_slots=21, sm_limit=4) as bench:
        jobs, mirror = hundred_gated(bench)
        assert [job.error for job in jobs] == [None] * 100
        mirror.check()
        whole(bench.engine)
        assert tables_out(bench) == 0
    assert len(starts) == 100, "one for each load, however many parts it has"
    assert len(set(starts)) < 30, "the room of many was used again"


def test_pitfall_05_a_table_given_back_after_the_first_part_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would see."""
    with simulated(2) as device, rig(device, planes=PLANES, sm_limit=4) as bench:
        load(bench, [0], [0]).wait(10)  # the rows are there: the next table is blocks alone
        overwrite_on_release(monkeypatch, 9, bench.engine._parts.memory.address)
        gate = hold_from(bench, 1)
        job = load(bench, range(1, 5), range(1, 5))
        tables = [segment.table for segment in segments_of(job) if segment.table is not None]
        bench.settle()
        assert not job.done
        for table in tables:
            table.release()
        gate.open()
        job.wait(10)
        assert not blocks_hold(bench, range(1, 5), range(101, 105))


def test_tables_that_nothing_refers_to_are_free_after_a_repair(bench: Rig) -> None:
    """A table taken by a call that was interrupted before it was told of: its room is free again, and not twice."""
    kernels = bench.engine._parts.copiers._kernels
    assert kernels is not None
    arena = kernels.arenas[1]
    used, lost = arena.take(8), arena.take(arena.words.size - 16)
    assert used is not None
    assert lost is not None
    arena.restore([used])
    assert (used.released, lost.released, arena.in_use) == (False, True, 1)
    used.release()
    load(bench, range(8), range(8)).wait(10)
    assert tables_out(bench) == 0
    assert blocks_hold(bench, range(8), range(100, 108))


# as many divisions as there is room for


@pytest.mark.usefixtures("kernels_do_nothing")
def test_the_copy_engine_carries_what_the_kernel_has_no_rows_for(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.engine._parts.copiers, "interpreted", False)  # as on a GPU: kernels, too, are chosen
    random = np.random.default_rng(1)
    divisions = list({tuple(random.permutation(PLANES).tolist()) for _ in range(80)})[:66]
    before = leaks_of(bench.device)["device_allocations"]

    def divided(number: int, copier: str | None = "gather") -> Job:
        parts = [[plane] for plane in divisions[number]]
        job = load(bench, [number % 16], [number % 16], parts=parts, copier=copier)
        job.wait(10)
        return job

    for number in range(64):
        assert divided(number).copier == "gather"
    assert leaks_of(bench.device)["device_allocations"] == before
    for number in (64, 65):
        job = divided(number, None)
        assert job.copier in ("strided", "batch", "loop")
        with pytest.raises(CapabilityError, match="copier='gather' cannot carry these parts: the GPU has room"):
            divided(number)
        with pytest.raises(CapabilityError, match="for 64 divisions of its planes into parts, and all are taken"):
            bench.engine.submit(
                Direction.LOAD,
                [1],
                [1],
                after=NO_WAIT,
                copier=CopyMethod("gather", 1, 1.0),
                parts=[[each] for each in divisions[number]],
            )
    for number in (0, 63):
        assert divided(number).copier == "gather"
    assert load(bench, [1], [1], parts=None).wait(10).copier == "gather"


@pytest.mark.usefixtures("kernels_do_nothing")
def test_rows_take_four_mib_of_the_gpu_at_most(device: kvoffload.Device) -> None:
    planes = device.allocate_planes(2, block_bytes=8 << 20, num_blocks=2)  # 8192 rows, 320 KiB of words
    with OffloadEngine(KVLayout([planes]), device=device, num_slots=2, sm_limit=1) as engine:
        kernels = engine._parts.copiers._kernels
        assert kernels is not None
        (group,) = kernels.groups
        assert len(group.room) == (4 << 20) // (8192 * 5 * 8) == 12
        with device.current():
            assert device.driver.address_range(group.fragments.address)[1] == 13 * 8192 * 5 * 8
        assert engine.load([0], [0], after=NO_WAIT, copier="gather", parts=2).wait(10).copier == "gather"
    planes = device.allocate_planes(2, block_bytes=20 << 20, num_blocks=2)
    with OffloadEngine(KVLayout([planes]), device=device, num_slots=2, sm_limit=1) as engine:
        with pytest.raises(
            CapabilityError, match=r"blocks have 20480 fragments of 2048 bytes, more than 19660; the loop"
        ):
            engine.load([0], [0], after=NO_WAIT, copier="gather", parts=2)
        assert engine.load([0], [0], after=NO_WAIT, parts=2).wait(10).error is None
        assert engine.load([0], [0], after=NO_WAIT, copier="gather").wait(10).error is None


# failures


@pytest.mark.parametrize("after", [False, True], ids=["instead", "afterwards"])
def test_rows_that_did_not_get_to_the_gpu_go_with_the_next_load(bench: Rig, after: bool) -> None:
    simulator: Any = bench.device.simulator
    simulator.faults.fail_call("cuMemcpyAsync", after=after)
    failed = load(bench, range(4), range(4))
    assert failed.error is not None
    assert "cuMemcpyAsync" in str(failed.error)
    uploads = calls(bench, "cuMemcpyAsync")
    load(bench, range(4, 8), range(4, 8)).wait(10)
    assert calls(bench, "cuMemcpyAsync") == uploads + 1
    assert blocks_hold(bench, range(8), [1, 2, 3, 4, 104, 105, 106, 107])
    assert failed.done
    assert tables_out(bench) == 0


@pytest.mark.parametrize("part", range(PARTS))
def test_a_load_that_fails_in_a_part_keeps_its_table_until_what_was_queued_has_ended(bench: Rig, part: int) -> None:
    """And leaves the rows, which its first launch brought, to the next one."""
    simulator: Any = bench.device.simulator
    gate = bench.gate(waiting := bench.stream())
    simulator.faults.fail_call("cuLaunchKernel", nth=part + 1)
    failed = load(bench, range(4), range(4), after=waiting)
    uploads = calls(bench, "cuMemcpyAsync")
    assert "cuLaunchKernel" in str(failed.error)
    follower = load(bench, range(4, 8), range(4, 8))
    assert tables_out(bench) == 2
    bench.settle()
    assert not failed.done
    gate.open()
    follower.wait(10)
    assert failed.done
    assert calls(bench, "cuMemcpyAsync") == uploads
    assert tables_out(bench) == 0
    planes = [set(bench.block(2, [plane]).tolist()) for plane in bench.planes]
    assert planes == [{102}] * 2 * part + [{3}] * (PLANES - 2 * part)
    assert blocks_hold(bench, range(4, 8), range(104, 108))


def test_no_stream_passes_a_part_that_failed(bench: Rig) -> None:
    simulator: Any = bench.device.simulator
    simulator.faults.fail_call("cuLaunchKernel", nth=3)
    job = load(bench, range(4), range(4))
    for part in (*range(PARTS), None):
        with pytest.raises(TransferError, match="cuLaunchKernel"):
            job.order_before(bench.stream(), part=part)


@pytest.mark.parametrize("offset", rest_long(range(2), 1))
def test_an_interrupted_load_in_parts_loses_no_job(monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    """At every sixtieth point where a KeyboardInterrupt can come."""

    def check(bench: Rig) -> None:
        check_after_interrupt(bench)
        assert tables_out(bench) == 0

    change_streams(monkeypatch)
    interrupt_loads(2 + 30 * offset, 60, check, sm_limit=4)


def test_loads_in_parts_follow_each_other(bench: Rig) -> None:
    readers: list[Callable[[], int]] = []
    gate = bench.gate(waiting := bench.stream())
    for turn in range(12):
        job = load(bench, [turn], [turn], parts=(PARTS, LAYERS)[turn % 2], after=waiting if turn == 0 else NO_WAIT)
        reader = Reader(bench)
        job.order_before(reader.stream, part=turn % PARTS)
        reader.read((2 * (turn % PARTS), LAYERS[turn % PARTS][1])[turn % 2], turn)
        readers.append(lambda reader=reader: reader.value)  # type: ignore[misc]
    gate.open()
    bench.engine.drain(10)
    bench.settle()
    assert [value() for value in readers] == [100 + turn for turn in range(12)]

"""Loads in parts: the bytes of any other load, one job, and nothing lost when something goes wrong on the way."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from driver_levels import LEVELS
from helpers import (
    COPY_ENGINE_ONLY,
    STAGING,
    Rig,
    all_are,
    cache_state,
    change_streams,
    choose_kernels_too,
    copiers_in,
    cut_segments,
    keys,
    leaks_of,
    release,
    rig,
    settled,
    simulated,
    whole,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layerwise import PARTS, PLANES, Reader, blocks_hold, hold_from, interrupt_loads, load, reader_of
from seeds import rest_long
from strategies import LayoutSpec, layouts, place, slab_of
from transfers import segments_of, transfer_of

import kvoffload
from kvoffload import (
    NO_WAIT,
    BlockCache,
    CapabilityError,
    CapacityError,
    Direction,
    KVLayout,
    KVOffloadError,
    LayoutError,
    OffloadEngine,
    TransferError,
)
from kvoffload.copiers.pack import is_range
from kvoffload.engine import launcher, shard
from kvoffload.engine.job import Job
from kvoffload.layout.fold import fold_group
from kvoffload.planning.layer_groups import Parts, as_parts
from kvoffload.planning.transfer_plan import TransferPlan, addresses_of_slots, build
from kvoffload.testing import Mirror, SimulatedDriver, check_clean_close, scramble
from kvoffload.tuning import CopierName, default_profile

BY_ENGINE: tuple[CopierName, ...] = ("strided", "batch", "loop")
NUM_SLOTS = 6


@pytest.fixture
def bench(device: kvoffload.Device) -> Iterator[Rig]:
    yield from settled(device, planes=PLANES)


# what parts are


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (None, None),
        (1, None),
        ([[2, 0, 3, 1]], None),
        (2, ((0, 1), (2, 3))),
        (np.int64(4), ((0,), (1,), (2,), (3,))),
        ([[0, 2], [1, 3]], ((0, 2), (1, 3))),
        (([3], range(3)), ((3,), (0, 1, 2))),
        (np.array([[2, 3], [0, 1]]), ((2, 3), (0, 1))),
    ],
)
def test_parts_are_given_as_a_number_or_as_lists_of_planes(parts: Any, expected: Parts | None) -> None:
    assert as_parts(parts, 4) == expected


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (3, "parts=3 does not divide the group's 4 planes: give one of 1, 2, 4, or list"),
        (0, "parts=0 does not divide"),
        (-2, "parts=-2 does not divide"),
        (8, "parts=8 does not divide"),
        ([[0, 1], [2]], "plane 3 is in no part; parts must name each of the group's 4 planes once"),
        ([[0, 1], [2, 1, 3]], "plane 1 is named 2 times"),
        ([[0, 1], [2, 4], [3]], r"parts[1] names plane 4, and the group has planes [0, 4)"),
        ([[0, 1], [2, -1]], r"parts[1] names plane -1"),
        ([[0, 1, 2, 3], []], r"parts[1] has no planes; leave it out"),
        ([], "plane 0 is in no part"),
    ],
)
def test_parts_that_are_no_partition_are_refused(device: kvoffload.Device, parts: Any, message: str) -> None:
    with rig(device, planes=4) as bench:
        before = bench.engine.statistics()
        with pytest.raises(LayoutError, match=re.escape(message)):
            load(bench, [0], [0], parts=parts)
        assert bench.engine.statistics() == before
        assert all_are(bench.block(0), 1)


@pytest.mark.parametrize("parts", [True, "2", b"ab", 2.0, [0, 1, 2, 3], [[0.0, 1.0], [2, 3]], [None], object()])
def test_what_is_no_list_of_lists_is_refused(bench: Rig, parts: Any) -> None:
    with pytest.raises(TypeError, match="parts must be None, a number of parts, or for each part the indices"):
        load(bench, [0], [0], parts=parts)
    whole(bench.engine)


@pytest.mark.parametrize("parts", [2, [[0, 1, 2, 3], [4, 5, 6, 7]], 1])
def test_stores_have_no_parts(bench: Rig, parts: Any) -> None:
    with pytest.raises(ValueError, match=r"parts=.* is for loads"):
        bench.engine.submit(Direction.STORE, [0], [0], after=NO_WAIT, parts=parts)
    whole(bench.engine)


def test_kernels_that_cannot_run_are_said_to_be_missing_first(bench: Rig) -> None:
    with pytest.raises(CapabilityError, match="staging_bytes=0 forbids kernels"):
        load(bench, [0], [0], parts=None, copier="pack")


def test_the_choice_is_among_what_carries_parts(device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    known = default_profile(None)
    slow = {each: replace(found, strided=None) for each, found in known.costs.items()}
    choose_kernels_too(monkeypatch)
    with rig(
        device, planes=PLANES, staging_bytes=STAGING, prefer="latency", profile=replace(known, costs=slow)
    ) as bench:
        assert load(bench, range(8), range(8), parts=None).copier == "pack"
        assert load(bench, range(8), range(8), parts=2).copier == "pack"
        mixed = [[0, 2], [1, *range(3, PLANES)]]
        assert load(bench, range(8), range(8), parts=mixed).copier in BY_ENGINE
        assert load(bench, range(8), range(8), parts=None).copier == "pack"


# bytes


def random_parts(random: np.random.Generator, num_planes: int) -> Any:
    """A number, or lists of planes in any order."""
    if random.random() < 0.3:
        return int(random.choice([each for each in range(1, num_planes + 1) if num_planes % each == 0]))
    count = int(random.integers(1, num_planes + 1))
    planes = random.permutation(num_planes)
    borders = np.sort(random.choice(np.arange(1, num_planes), count - 1, replace=False))
    return [each.tolist() for each in np.split(planes, borders)]


def check_loads(device: kvoffload.Device, spec: LayoutSpec, random: np.random.Generator) -> None:
    layout, buffers = place(device, spec, int(random.integers(1 << 16)))
    with OffloadEngine(layout, device=device, num_slots=NUM_SLOTS, staging_bytes=STAGING) as engine:
        engine.slots[:] = random.integers(0, 256, engine.slots.shape, dtype=np.uint8)
        mirror = Mirror(engine, buffers)
        copiers = [name for name in (*BY_ENGINE, "pack", None) if name is None or name in copiers_in(engine)]
        for _ in range(4):
            group, first = int(random.integers(layout.num_groups)), int(random.integers(layout.blocks_per_slot))
            num_blocks, num_planes = layout.groups[group].num_blocks, len(layout.groups[group].planes)
            blocks = random.permutation(num_blocks)[: int(random.integers(1, num_blocks + 1))]
            blocks = np.sort(blocks) if random.random() < 0.5 else blocks
            slots = random.integers(0, NUM_SLOTS, layout.slots_for(len(blocks), first_sub_block=first))
            parts, copier = random_parts(random, num_planes), copiers[int(random.integers(len(copiers)))]
            options: dict[str, Any] = {"group": group, "first_sub_block": first}
            if copier == "pack" and not all(map(is_range, as_parts(parts, num_planes) or ())):
                copier = None
            job = engine.load(slots, blocks, **options, after=NO_WAIT, copier=copier, parts=parts)
            assert job.num_parts == (parts if isinstance(parts, int) else len(parts))
            mirror.expect(Direction.LOAD, blocks.tolist(), slots.tolist(), **options)
        engine.drain(timeout=30)
        assert all(result.error is None for result in engine.poll())
        mirror.check()
    for buffer in buffers:
        buffer.close()


@pytest.mark.parametrize("level", rest_long(LEVELS, 1))
@settings(max_examples=5, suppress_health_check=[HealthCheck.too_slow])
@given(spec=layouts(), seed=st.integers(0, 1 << 16))
def test_any_parts_move_the_bytes_of_a_naive_loop_and_no_others(level: str, spec: LayoutSpec, seed: int) -> None:
    driver_version, bindings_version = LEVELS[level]
    device = kvoffload.open_device(
        backend=SimulatedDriver(seed=seed, driver_version=driver_version, bindings_version=bindings_version)
    )
    check_loads(device, spec, np.random.default_rng(seed))
    check_clean_close(device)


@pytest.mark.parametrize("number", range(10))
def test_parts_in_segments_on_many_streams_move_the_same_bytes(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch, seed: int, number: int
) -> None:
    random = np.random.default_rng([seed, number])
    monkeypatch.setattr(launcher, "QUEUE_LIMIT", 12)
    planes = device.allocate_planes(12, block_bytes=96, num_blocks=30, block_stride=112 if number % 2 else None)
    scramble(slab_of(planes), number)
    layout = KVLayout([planes], blocks_per_slot=1 + number % 3)
    with OffloadEngine(layout, device=device, num_slots=30, **COPY_ENGINE_ONLY) as engine:
        cut_segments(monkeypatch, engine, 4)
        engine.slots[:] = random.integers(0, 256, engine.slots.shape, dtype=np.uint8)
        mirror = Mirror(engine, [slab_of(planes)])
        for copier in (*BY_ENGINE, None):
            blocks, parts = random.permutation(30)[:20], random_parts(random, 12)
            slots = random.permutation(30)[: layout.slots_for(20)]
            engine.load(slots, blocks, after=NO_WAIT, copier=copier, parts=parts)
            mirror.expect(Direction.LOAD, blocks.tolist(), slots.tolist())
        engine.drain(30)
        mirror.check()


def ranges_of(plan: TransferPlan) -> set[tuple[int, int]]:
    """Device addresses of all bytes, as ranges of 8."""
    rows = plan.flat()
    device, width = np.broadcast_arrays(rows.device_address, rows.width)
    return {
        (at, at + 8)
        for start, size in zip(device, width, strict=True)
        for at in range(int(start), int(start + size), 8)
    }


@pytest.mark.parametrize("flat", [False, True], ids=["strided", "flat"])
@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("kind", ["alike", "two sizes", "scattered", "interleaved"])
def test_the_operations_of_a_part_are_those_of_its_planes(kind: str, factor: int, flat: bool) -> None:
    sizes = [64, 128 if kind == "two sizes" else 64] * 6
    starts = {"scattered": 100_000, "interleaved": 64}.get(kind, 4096)
    stride = 12 * 64 if kind == "interleaved" else None
    planes = [
        kvoffload.Plane(4096 + index * starts, block_bytes=size, num_blocks=16, block_stride=stride)
        for index, size in enumerate(sizes)
    ]
    layout = KVLayout([planes], blocks_per_slot=factor)
    parts = [[0, 1, 2], [11], [3, 9, 10], [8, 4, 5, 6, 7]]
    allocations = list(range(12)) if kind == "scattered" else [0] * 12
    group = fold_group(layout.groups[0], factor, allocations, parts)
    blocks = np.array([3, 4, 5, 9, 11, 10])
    slots = np.arange(layout.slots_for(6))
    addresses = addresses_of_slots(layout, 1 << 20, len(slots))
    plan = build(group, layout, Direction.LOAD, slot_addresses=addresses, slots=slots, blocks=blocks)
    operations = plan.operations().flat() if flat else plan.operations()
    assert plan.count() == (len(plan.operations()), len(plan.operations().flat()))
    assert operations.part_ends[-1] == len(operations)
    begin = 0
    for members, end in zip(parts, operations.part_ends, strict=True):
        wanted = {
            (at, at + 8)
            for index in members
            for block in blocks.tolist()
            for start in [planes[index].address + block * planes[index].block_stride]
            for at in range(start, start + sizes[index], 8)
        }
        assert ranges_of(operations.cut(begin, end)) == wanted
        begin = end


def test_planes_of_a_part_fold_in_whatever_order_they_are_listed(device: kvoffload.Device) -> None:
    planes = device.allocate_planes(8, block_bytes=64, num_blocks=4)
    (group,) = KVLayout([planes]).groups
    for parts in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[2, 0, 3, 1], [7, 6, 5, 4]], [[6, 4, 2, 0], [1, 3, 7, 5]]):
        assert fold_group(group, 1, [0] * 8, parts).folds == 2


# one job


def test_a_load_in_parts_is_one_job_with_one_result(bench: Rig) -> None:
    simulator: Any = bench.device.simulator
    simulator.faults.calls = []
    job = load(bench, range(8), range(8), copier="strided")
    bench.engine.drain(10)
    (result,) = bench.engine.poll()
    assert (result.job_id, result.copier, result.nbytes) == (job.id, "strided", 8 * PLANES * 64)
    assert job.num_parts == PARTS
    names = Counter(name for name, _ in simulator.faults.calls)
    assert names["cuMemcpy3DBatchAsync"] == PARTS
    assert names["cuEventRecord"] == PARTS + 1, "the start, and the end of each part"
    assert names["cuStreamWaitEvent"] == 0
    totals = bench.engine.statistics().load
    assert (totals.jobs, totals.nbytes, totals.seconds) == (1, result.nbytes, result.seconds)
    assert load(bench, range(8), range(8), parts=None).num_parts == 1


def test_the_time_of_a_load_is_that_of_all_its_parts(bench: Rig) -> None:
    """By the clock of the simulator, to which an operation costs something whatever it holds."""
    job, whole_job = (load(bench, range(8), range(8), copier="strided", parts=parts) for parts in (PARTS, None))
    bench.engine.drain(10)
    assert job.outcome().seconds > whole_job.outcome().seconds > 0, "8 operations for each part against 8"


def test_a_fold_is_made_once_for_each_group_and_parts(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def counted(*arguments: Any) -> Any:
        made.append(arguments[-1])
        return fold_group(*arguments)

    monkeypatch.setattr("kvoffload.planning.layer_groups.fold_group", counted)
    lists = [[0, 4], [1, 5], [2, 6], [3, 7]]
    for _ in range(3):
        for parts in (2, 4, lists, np.array(lists)):
            load(bench, [0], [0], parts=parts)
    assert len(made) == 3
    for first in range(100):
        order = np.roll(np.arange(PLANES), first % PLANES).tolist()
        load(bench, [0], [0], parts=[order[: 1 + first // PLANES % 7], order[1 + first // PLANES % 7 :]])
    assert bench.engine._shard.folds.of.cache_info().currsize <= 64  # type: ignore[attr-defined]
    assert len(made) > 40


def test_an_empty_load_has_its_parts_too(bench: Rig) -> None:
    job = load(bench, [], [])
    assert (job.done, job.num_parts) == (True, PARTS)
    job.order_before(bench.stream(), part=PARTS - 1)
    with pytest.raises(LayoutError):
        load(bench, [], [], parts=3)


@pytest.mark.parametrize("part", [PARTS, -1, 99, True, 1.0, "0"])
def test_parts_that_a_job_does_not_have_are_refused(bench: Rig, part: Any) -> None:
    job = load(bench, [0], [0])
    for _ in range(2):  # in flight, and then not
        with pytest.raises(ValueError, match=rf"part must be None or an integer in \[0, {PARTS}\), got {part!r}"):
            job.order_before(1, part=part)
        job.wait(10)
    with pytest.raises(ValueError, match=r"in \[0, 1\), got 1: .* 1 parts, see `load\(\.\.\., parts=\)`"):
        bench.engine.store([0], [0]).order_before(1, part=1)


def test_part_0_of_a_job_without_parts_is_all_of_it(bench: Rig) -> None:
    held, reader = bench.stream(), Reader(bench)
    bench.gate(held)
    job = load(bench, [2], [5], parts=None, after=held)
    job.order_before(reader.stream, part=0)
    reader.read(PLANES - 1, 5)
    release(bench, job)
    assert reader.value == 102


# queues that are full


def test_a_part_can_be_ordered_behind_while_later_ones_find_no_room(
    bench: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "QUEUE_LIMIT", 10)  # a stream holds one part of 6 operations
    monkeypatch.setattr(shard, "QUEUEING_SECONDS", 0.02)
    bench.engine.close()
    with OffloadEngine(bench.engine.layout, device=bench.device, num_slots=16, **COPY_ENGINE_ONLY) as engine:
        bench.engine = engine
        engine.slots[:] = 50
        held = bench.stream()
        gate = bench.gate(held)
        job = load(bench, range(6), range(6), parts=PLANES, copier="loop", after=held)
        assert not transfer_of(job).enqueued
        queued = transfer_of(job).part
        assert 0 < queued < PLANES
        readers = [reader_of(bench, job, part, part, 4) for part in range(queued)]
        late = Reader(bench)
        for part in (queued, PLANES - 1, None):
            with pytest.raises(CapacityError, match="queues are full"):
                job.order_before(late.stream, part=part)
        assert engine.statistics().held == 1
        monkeypatch.setattr(shard, "QUEUEING_SECONDS", 20.0)  # now it moves, however busy this machine is
        gate.open()
        job.order_before(late.stream, part=PLANES - 1)
        late.read(PLANES - 1, 4)
        release(bench)
        assert [reader.value for reader in (*readers, late)] == [50] * (queued + 1)
        assert blocks_hold(bench, range(6), [50] * 6)


def test_as_many_parts_as_the_queues_hold_and_more(device: kvoffload.Device) -> None:
    """Each is a segment with an event: there are enough of them, whatever `max_in_flight` is."""
    planes = device.allocate_planes(1500, block_bytes=16, num_blocks=4)
    slab_of(planes).copy_from(np.zeros(slab_of(planes).nbytes, np.uint8))
    engine = OffloadEngine(KVLayout([planes]), device=device, num_slots=4, max_in_flight=2, **COPY_ENGINE_ONLY)
    engine.slots[:] = 9
    bench = Rig(device, engine, slab_of(planes), planes)
    held = bench.stream()
    gate = bench.gate(held)
    job = load(bench, [1], [0], parts=1500, copier="loop", after=held)
    store = engine.store([2, 3], [2, 3], after=held, copier="loop")
    assert len(segments_of(job)) > 1000, "as many as there is room for"
    assert (transfer_of(job).enqueued, transfer_of(store).enqueued) == (False, True)
    assert len(segments_of(store)) == 8, "as many as there is room for in the other direction"
    with pytest.raises(CapacityError, match="max_in_flight=2"):
        load(bench, [1], [1], parts=1500)
    gate.open()
    engine.drain(60)
    assert (job.error, store.error) == (None, None)
    assert blocks_hold(bench, [0], [9])
    assert not engine.slots[2:, : 1500 * 16].any()
    whole(engine)
    bench.close()


def test_closing_waits_for_every_part(device: kvoffload.Device) -> None:
    with rig(device, planes=PLANES) as bench:
        gate = hold_from(bench, 2)
        job = load(bench, range(6), range(6))
        reader = reader_of(bench, job, PARTS - 1, PLANES - 1, 3)
        bench.settle()
        with pytest.raises(TimeoutError):
            bench.engine.close(timeout=0.02)
        gate.open()
        bench.engine.close(timeout=10)
        assert job.done
        job.order_before(reader.stream, part=1)
        bench.settle()
        assert reader.value == 103


# failures

PUSH_POP = ("cuCtxPushCurrent", "cuCtxPopCurrent")  # a caller's stack cannot be put right when these lie
CREATE = "cuEventCreate"  # made and denied: nobody has the handle


def attempt(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The call's value, True for None, or None if it raised an error of the library's."""
    try:
        value = call(*arguments, **options)
    except KVOffloadError:
        return None
    return True if value is None else value


def there_and_back(bench: Rig, first: int, readers: list[Reader]) -> tuple[Job | None, Job | None, list[bool]]:
    """A store of 4 blocks, a load in parts of them, and what was ordered behind each part of it."""
    stored = attempt(bench.engine.store, range(first, first + 4), range(4), after=readers[0].stream)
    loaded = attempt(load, bench, range(4), range(12, 16), after=readers[0].stream)
    ordered = [False] * PARTS
    if loaded is not None:
        for part, reader in enumerate(readers):
            ordered[part] = attempt(loaded.order_before, reader.stream, part=part) is not None
            ordered[part] &= attempt(reader.read, 2 * part, 15) is not None
    attempt(bench.engine.drain, 10)
    attempt(bench.engine.poll)
    return stored, loaded, ordered


def calls_of_a_clean_run(level: str) -> list[str]:
    with simulated(4, level) as device, rig(device, planes=PLANES, staging_bytes=0) as bench:
        readers = [Reader(bench) for _ in range(PARTS)]
        device.simulator.faults.calls = []
        stored, loaded, ordered = there_and_back(bench, 2, readers)
        names = [name for name, _ in device.simulator.faults.calls]
        assert stored is not None
        assert loaded is not None
        assert all(ordered)
        bench.settle()
        assert [reader.value for reader in readers] == [6] * PARTS
    return names


def fail_once(level: str, nth: int, name: str, *, after: bool) -> None:
    with simulated(4, level) as device:
        simulator: Any = device.simulator
        with rig(device, planes=PLANES, staging_bytes=0) as bench:
            readers = [Reader(bench) for _ in range(PARTS)]
            simulator.faults.fail_nth(nth, after=after)
            stored, loaded, ordered = there_and_back(bench, 2, readers)
            assert simulator.faults.pending == 0, "the failure happened"
            simulator.faults.clear()
            bench.engine.drain(10)
            whole(bench.engine)
            bench.settle()
            well = stored is not None and stored.error is None and loaded is not None and loaded.error is None
            if well:
                assert blocks_hold(bench, range(12, 16), range(3, 7))
                assert {reader.value for reader, each in zip(readers, ordered, strict=True) if each} <= {6}
            if loaded is None:
                assert blocks_hold(bench, range(12, 16), range(13, 17))
            stored, loaded, ordered = there_and_back(bench, 7, readers)
            assert stored is not None
            assert loaded is not None
            assert (stored.error, loaded.error, ordered) == (None, None, [True] * PARTS)
            bench.settle()
            assert blocks_hold(bench, range(12, 16), range(8, 12))
            assert [reader.value for reader in readers] == [11] * PARTS
    leaks = leaks_of(device)
    assert sum(leaks.values()) <= (1 if after and name == CREATE else 0), leaks
    assert simulator.violations == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("level", "after"),
    [("batch", False), ("no-batch", False), ("batch", True)],
    ids=["batch, instead", "no batch, instead", "batch, afterwards"],
)
def test_pitfall_29_every_driver_call_of_a_load_in_parts_fails_once(
    monkeypatch: pytest.MonkeyPatch, level: str, after: bool
) -> None:
    change_streams(monkeypatch)
    names = calls_of_a_clean_run(level)
    copy = "cuMemcpy3DBatchAsync" if level == "batch" else "cuMemcpy2DAsync"
    assert {copy, "cuStreamWaitEvent", "cuEventRecord", "cuEventQuery", "cuEventElapsedTime"} <= set(names)
    seen: Counter[str] = Counter()
    for nth, name in enumerate(names, start=1):
        seen[name] += 1
        polled = name in ("cuEventQuery", *PUSH_POP, "cuThreadExchangeStreamCaptureMode", "cuStreamIsCapturing")
        if (after and name in PUSH_POP) or (seen[name] > 2 and nth % (20 if polled else 6)):
            continue
        try:
            fail_once(level, nth, name, after=after)
        except BaseException as error:
            error.add_note(f"failing call {nth} of {len(names)}, {name}")
            raise


@pytest.mark.parametrize("call", ["cuMemcpy3DBatchAsync", "cuEventRecord"])
@pytest.mark.parametrize("part", range(PARTS))
def test_no_stream_passes_a_part_of_a_load_that_failed(bench: Rig, part: int, call: str) -> None:
    """Nor one that was queued before the failure; and the blocks stay in use until what was queued has ended."""
    simulator: Any = bench.device.simulator
    held = bench.stream()
    gate = bench.gate(held)
    of_the_job = 2 if call == "cuEventRecord" else 0  # on the caller's stream, and at the start
    simulator.faults.fail_call(call, nth=of_the_job + part + 1)
    job = load(bench, range(4), range(4), after=held, copier="strided")
    assert simulator.faults.pending == 0
    reader = Reader(bench)
    for each in (*range(PARTS), None):
        with pytest.raises(TransferError, match=f"{call} returned CUDA_ERROR_UNKNOWN"):
            job.order_before(reader.stream, part=each)
    bench.settle()
    assert not job.done, "what was queued waits for the caller's stream"
    follower = load(bench, range(8, 12), range(4))
    store = bench.engine.store(range(4), range(12, 16), after=NO_WAIT)
    bench.settle()
    assert not follower.done
    assert not store.done
    gate.open()
    with pytest.raises(TransferError):
        job.wait(10)
    bench.engine.drain(10)
    assert blocks_hold(bench, range(4), range(108, 112))
    assert [set(bench.slot(slot).tolist()) for slot in range(12, 16)] == [{value} for value in range(108, 112)]


@pytest.mark.parametrize("nth", range(1, 60, 3))
def test_a_context_lost_during_a_load_in_parts_ends_every_job(nth: int) -> None:
    device = simulated(6)
    simulator: Any = device.simulator
    with rig(device, planes=PLANES, staging_bytes=0) as bench:
        readers = [Reader(bench) for _ in range(PARTS)]
        simulator.faults.sticky(at_call=nth)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Reader, "read", lambda *_: None)
            stored, loaded, _ = there_and_back(bench, 2, readers)
        bench.engine.drain(10)
        assert all(job is None or job.done for job in (stored, loaded))
        assert bench.engine.statistics().in_flight == 0
        if simulator.faults.pending == 0 and any(context.error for context in simulator.contexts.values()):
            with pytest.raises(TransferError, match="context is lost"):
                load(bench, [0], [0])
            if loaded is not None and loaded.error is not None:
                with pytest.raises(TransferError):
                    loaded.order_before(readers[0].stream, part=0)
        bench.streams.clear()
        bench.engine.close(10)
    device.close(10)
    assert simulator.violations == []


@pytest.mark.parametrize("nth", range(1, PARTS + 1))
def test_a_part_that_faults_on_the_gpu_fails_the_load(nth: int) -> None:
    device = simulated(7)
    with rig(device, planes=PLANES, staging_bytes=0) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        job = load(bench, range(4), range(4), after=held, copier="strided")
        job.order_before(bench.stream(), part=0)
        device.simulator.faults.fail_operation(nth)
        gate.open()
        bench.engine.drain(10)
        assert job.error is not None
        with pytest.raises(TransferError):
            job.order_before(1, part=0)
        bench.streams.clear()
        bench.engine.close(10)
    device.close(10)
    assert device.simulator.violations == []


@pytest.mark.long
@pytest.mark.parametrize("offset", range(4))
def test_an_interrupted_load_in_parts_loses_no_job(monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    """At every twelfth point where a KeyboardInterrupt can come."""
    change_streams(monkeypatch)
    interrupt_loads(1 + 3 * offset, 12)


# the cache


def test_the_cache_loads_in_parts(device: kvoffload.Device) -> None:
    with rig(device, planes=PLANES) as bench:
        cache = BlockCache(bench.engine)
        cache.store(keys(1, 2, 3), [1, 2, 3]).wait(10)
        hold_from(bench, 1)
        job = cache.load(keys(1, 2, 3), [10, 11, 12], after=NO_WAIT, parts=PARTS)
        assert job.num_parts == PARTS
        readers = [Reader(bench) for _ in range(PARTS)]
        for part, reader in enumerate(readers):
            job.order_before(reader.stream, part=part)
            reader.read(2 * part + 1, 12)
        bench.settle()
        assert [reader.idle for reader in readers] == [True, False, False, False]
        assert readers[0].value == 4
        with pytest.raises(ValueError, match="part must be None or an integer"):
            job.order_before(readers[0].stream, part=PARTS)
        release(bench)
        job.wait(10)
        assert [reader.value for reader in readers] == [4] * PARTS
        cache.check()
        assert cache.load([], [], parts=PARTS).num_parts == 1


def two_groups(device: kvoffload.Device) -> tuple[OffloadEngine, list[kvoffload.Plane]]:
    planes = device.allocate_planes(PLANES, block_bytes=64, num_blocks=8)
    slab_of(planes).copy_from(np.repeat(np.arange(PLANES * 8, dtype=np.uint8), 64))  # a value for each block of a plane
    layout = KVLayout([planes[:6], planes[6:]])
    return OffloadEngine(layout, device=device, num_slots=8, **COPY_ENGINE_ONLY), planes


def test_the_cache_loads_every_group_in_as_many_parts(device: kvoffload.Device) -> None:
    engine, planes = two_groups(device)
    with engine:
        bench = Rig(device, engine, slab_of(planes), planes)
        cache = BlockCache(engine)
        cache.store(keys(1, 2), [[1, 2], [3, 4]]).wait(10)
        gate = hold_from(bench, 1)
        job = cache.load(keys(1, 2), [[5, 6], [6, 7]], after=NO_WAIT, parts=2)
        assert [each.num_parts for each in job.jobs] == [2, 2]
        first, second, both = Reader(bench), Reader(bench), Reader(bench)
        job.jobs[0].order_before(first.stream, part=0)
        first.read(2, 6)
        job.jobs[1].order_before(second.stream, part=0)
        second.read(6, 7)
        job.order_before(both.stream, part=1)
        both.read(7, 7)
        bench.settle()
        assert (first.idle, second.idle, both.idle) == (True, False, False)
        gate.open()
        job.wait(10)
        bench.settle()
        assert (first.value, second.value, both.value) == (2 * 8 + 2, 6 * 8 + 4, 7 * 8 + 4)
        with device.current():
            for reader in (first, second, both):
                device.driver.stream_destroy(reader.stream)
        gate.close()


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (3, LayoutError, "parts=3 does not divide the group's 2 planes"),
        (4, LayoutError, "parts=4 does not divide the group's 6 planes"),
        ([[0, 1]], LayoutError, "parts must be a number for a layout of 2 groups"),
        ("2", LayoutError, "parts must be a number for a layout of 2 groups"),
        (True, TypeError, "parts must be None, a number of parts"),
    ],
)
def test_the_cache_refuses_parts_before_anything_is_loaded(
    device: kvoffload.Device, parts: Any, error: type[Exception], message: str
) -> None:
    engine, _ = two_groups(device)
    with engine:
        cache = BlockCache(engine)
        cache.store(keys(1, 2), [[1, 2], [3, 4]]).wait(10)
        engine.poll()
        before, state = slab_bytes(engine), cache_state(cache)
        with pytest.raises(error, match=re.escape(message)):
            cache.load(keys(1, 2), [[5, 6], [5, 6]], parts=parts)
        assert cache_state(cache) == state
        assert engine.statistics().load.jobs == 0
        assert slab_bytes(engine) == before


def slab_bytes(engine: OffloadEngine) -> bytes:
    return slab_of(list(engine.layout.groups[0].planes)).to_numpy().tobytes()

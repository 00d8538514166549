"""One transfer of several groups: checked together, ordered together, one job; every byte as a naive loop has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from driver_levels import LEVELS
from helpers import COPY_ENGINE_ONLY, STAGING, Gate, OrderSpy, copiers_in
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from seeds import rest_long
from sharding import Machine
from strategies import Case, TransferSpec, cases, place

import kvoffload
from kvoffload import NO_WAIT, BlockCache, Direction, GroupTransfer, KVLayout, LayoutError, OffloadEngine, Plane
from kvoffload.driver import SourceOrder
from kvoffload.testing import Mirror, SimulatedDriver, check_clean_close, leak_check, poison, scramble

SLOTS = 12


def ids_of(ids: Any) -> list[int]:
    return [int(each) for each in ids]


def as_group(transfer: TransferSpec) -> GroupTransfer:
    return GroupTransfer(transfer.group, transfer.blocks, transfer.slots, first_sub_block=transfer.first_sub_block)


def submit_all(engine: OffloadEngine, several: Sequence[TransferSpec], copier: Any) -> bool:
    """All of these, of one direction, in one transfer. False if targets repeat: then nothing has happened."""
    submit = engine.store_groups if several[0].direction is Direction.STORE else engine.load_groups
    before = engine.statistics()
    try:
        job = submit([as_group(each) for each in several], after=NO_WAIT, copier=copier)
    except LayoutError:
        assert engine.statistics() == before
        return False
    of_each = [len(each.blocks) * engine.layout.groups[each.group].bytes_per_block for each in several]
    assert job.nbytes == sum(of_each)
    return True


def check_case(device: kvoffload.Device, case: Case, seed: int, bound: int | None, copier: int) -> None:
    layout, buffers = place(device, case.layout, seed)
    options: dict[str, Any] = {"staging_bytes": case.staging_bytes, "most_queued_bytes": bound}
    with OffloadEngine(layout, device=device, num_slots=case.num_slots, **options) as engine:
        poison(engine.slots)
        mirror = Mirror(engine, buffers)
        copiers = [*copiers_in(engine), None]
        for _, grouped in groupby(case.transfers, key=lambda each: each.direction):
            several = list(grouped)
            together = submit_all(engine, several, copiers[copier % len(copiers)])
            for each in several:
                if not together:
                    assert len(several) > 1
                    submit_all(engine, [each], None)
                mirror.expect(
                    each.direction, each.blocks, each.slots, group=each.group, first_sub_block=each.first_sub_block
                )
        engine.drain(timeout=30)
        mirror.check()
    for buffer in buffers:
        buffer.close()


@pytest.mark.parametrize("level", rest_long(LEVELS, 1))
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=cases(), seed=st.integers(0, 1 << 16), bound=st.sampled_from((None, None, 1, 4096)), copier=st.integers(0, 5)
)
def test_any_groups_together_move_the_bytes_of_a_naive_loop(
    level: str, case: Case, seed: int, bound: int | None, copier: int
) -> None:
    driver_version, bindings_version = LEVELS[level]
    device = kvoffload.open_device(
        backend=SimulatedDriver(seed=seed, driver_version=driver_version, bindings_version=bindings_version)
    )
    check_case(device, case, seed, bound, copier)
    check_clean_close(device)


@pytest.fixture
def engine(device: kvoffload.Device) -> Iterator[OffloadEngine]:
    """Three groups of other planes each."""
    groups = [device.allocate_planes(count, block_bytes=nbytes, num_blocks=8) for count, nbytes in ((4, 64), (2, 256))]
    groups.append(device.allocate_blocks(8, planes=3, block_bytes=128))
    for number, planes in enumerate(groups):
        scramble(planes[0].owner, number)  # type: ignore[arg-type]
    with OffloadEngine(KVLayout(groups), device=device, num_slots=SLOTS, **COPY_ENGINE_ONLY) as made:
        made.slots[:] = 0
        yield made


def mirror_of(engine: OffloadEngine) -> Mirror:
    return Mirror(engine, [group.planes[0].owner for group in engine.layout.groups])  # type: ignore[misc]


def calls(engine: OffloadEngine, name: str) -> int:
    return int(engine.device.simulator.faults.call_count[name])


THREE = [GroupTransfer(0, [1, 2], [0, 1]), GroupTransfer(1, [3], [2]), GroupTransfer(2, [4, 5], [3, 4])]


def test_copies_of_all_groups_by_one_copier_are_one_call_between_one_pair_of_events(engine: OffloadEngine) -> None:
    mirror = mirror_of(engine)
    names = ("cuMemcpy3DBatchAsync", "cuEventRecord", "cuStreamWaitEvent")
    counts = [[calls(engine, name) for name in names]]
    engine.store([0], [5], after=NO_WAIT, copier="strided").wait(10)
    counts.append([calls(engine, name) for name in names])
    job = engine.store_groups(THREE, after=NO_WAIT, copier="strided")
    job.wait(10)
    counts.append([calls(engine, name) for name in names])
    of_one, of_three = np.diff(counts, axis=0).tolist()
    assert of_three == of_one == [1, 2, 0]
    assert (engine.submitted, len(engine.poll()), job.copier) == (2, 0, "strided")
    assert job.nbytes == 2 * 4 * 64 + 2 * 256 + 2 * 3 * 128
    assert job.reason == "; ".join(f"group {number}: asked for by name" for number in range(3))
    for each in (GroupTransfer(0, [0], [5]), *THREE):
        mirror.expect("store", ids_of(each.blocks), ids_of(each.slots), group=each.group)
    mirror.check()


def test_each_group_is_copied_by_the_method_for_it(device: kvoffload.Device) -> None:
    """Planes that fold and a block-major group: the profile chooses for each, and the copies are of one job."""
    folded = device.allocate_planes(16, block_bytes=32 << 10, num_blocks=8)
    whole = device.allocate_blocks(8, planes=16, block_bytes=4096)
    for planes in (folded, whole):
        scramble(planes[0].owner, len(planes))  # type: ignore[arg-type]
    with OffloadEngine(KVLayout([folded, whole]), device=device, num_slots=SLOTS) as engine:
        mirror = mirror_of(engine)
        alone = [engine.plan("store", range(4), range(4), group=group).copier for group in (0, 1)]
        assert alone[0] != alone[1]
        job = engine.store_groups(
            [GroupTransfer(1, range(4), range(4)), GroupTransfer(0, range(4), range(4, 8))], after=NO_WAIT
        )
        assert job.copier == alone[0], "of most bytes"
        assert [str(copier) in job.reason for copier in alone] == [True, True]
        job.wait(10)
        mirror.expect("store", range(4), range(4), group=1)
        mirror.expect("store", range(4), range(4, 8), group=0)
        mirror.check()


def test_kernels_of_several_groups_are_of_one_job(device: kvoffload.Device) -> None:
    groups = [device.allocate_planes(2, block_bytes=64, num_blocks=8) for _ in range(3)]
    for number, planes in enumerate(groups):
        scramble(planes[0].owner, number)  # type: ignore[arg-type]
    with OffloadEngine(KVLayout(groups), device=device, num_slots=SLOTS, staging_bytes=STAGING) as engine:
        poison(engine.slots)
        mirror = mirror_of(engine)
        several = [GroupTransfer(number, [1, 2, 3], range(4 * number, 4 * number + 3)) for number in range(3)]
        engine.store_groups(several, after=NO_WAIT, copier="pack")
        engine.load_groups([replace(each, blocks=[5, 6, 7]) for each in several], after=NO_WAIT, copier="pack")
        engine.drain(10)
        for each in several:
            mirror.expect("store", [1, 2, 3], ids_of(each.slots), group=each.group)
            mirror.expect("load", [5, 6, 7], ids_of(each.slots), group=each.group)
        mirror.check()


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (GroupTransfer(2, [8], [3]), r"transfers\[1\]: blocks\[0\]"),
        (GroupTransfer(2, [0], [SLOTS]), r"transfers\[1\]: slots\[0\]"),
        (GroupTransfer(3, [0], [3]), r"transfers\[1\]: group must be"),
        (GroupTransfer(2, [0, 1], [3]), r"transfers\[1\]: 2 blocks from sub-block 0 on need 2 slots"),
        (GroupTransfer(2, [0, 1], [3, 3]), "repeats 3"),
        (GroupTransfer(2, [0], [1]), "slot 1 is a target of two of the transfers"),
        (GroupTransfer(0, [5], [0]), "slot 0 is a target of two of the transfers"),
    ],
)
def test_a_bad_last_group_is_refused_and_nothing_has_happened(
    engine: OffloadEngine, last: GroupTransfer, said: str
) -> None:
    mirror, before = mirror_of(engine), (calls(engine, "cuEventRecord"), engine.statistics())
    with leak_check(engine.device), pytest.raises(LayoutError, match=said):
        engine.store_groups([GroupTransfer(0, [1, 2], [0, 1]), last])
    assert (calls(engine, "cuEventRecord"), engine.statistics()) == before
    mirror.check()


@pytest.mark.parametrize(
    "transfers",
    [GroupTransfer(0, [1], [1]), 7, None, [(0, [1], [1])], [GroupTransfer(0, [1], [1]), None], {}],
    ids=repr,
)
def test_what_is_no_list_of_groups_is_refused(engine: OffloadEngine, transfers: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a (list of )?GroupTransfer"):
        engine.load_groups(transfers)


def test_elements_without_blocks_count_for_nothing(engine: OffloadEngine) -> None:
    empty = GroupTransfer(1, [], [])
    for nothing in ([], [empty], (empty, empty)):
        job = engine.load_groups(nothing, after=NO_WAIT)
        assert (job.done, job.nbytes, job.copier, job.direction) == (True, 0, "none", Direction.LOAD)
    with pytest.raises(TypeError, match="after"):
        engine.store_groups([], after="stream")  # type: ignore[arg-type]
    assert engine.store_groups([empty, THREE[1], empty], after=NO_WAIT).wait(10).nbytes == 2 * 256


def test_blocks_of_groups_over_the_same_planes_are_targets_once(device: kvoffload.Device) -> None:
    planes = device.allocate_planes(2, block_bytes=64, num_blocks=8)
    with OffloadEngine(KVLayout([planes, planes]), device=device, num_slots=SLOTS, **COPY_ENGINE_ONLY) as engine:
        with pytest.raises(LayoutError, match=r"block 3 of groups \[0, 1\], which have the same planes, is a target"):
            engine.load_groups([GroupTransfer(0, [2, 3], [0, 1]), GroupTransfer(1, [3], [2])], after=NO_WAIT)
        with pytest.raises(LayoutError, match="block 3 of group 1 is a target of two"):
            engine.load_groups([GroupTransfer(1, [2, 3], [0, 1]), GroupTransfer(1, [3], [2])], after=NO_WAIT)
        engine.load_groups([GroupTransfer(0, [2, 3], [0, 1]), GroupTransfer(1, [4], [2])], after=NO_WAIT).wait(10)
        engine.store_groups([GroupTransfer(0, [3], [0]), GroupTransfer(1, [3], [1])], after=NO_WAIT).wait(10)
        assert np.array_equal(engine.slots[0, :128], engine.slots[1, :128])


def test_groups_that_share_memory_otherwise_may_load_to_blocks_that_share_no_byte(device: kvoffload.Device) -> None:
    """One group has pages of 256 bytes, the other one the first 192 of pages half as far apart."""
    buffer = device.allocate(8 * 512)
    wide = [Plane(buffer.address, block_bytes=512, num_blocks=8, owner=buffer)]
    narrow = [Plane(buffer.address, block_bytes=192, num_blocks=16, block_stride=256, owner=buffer)]
    with OffloadEngine(KVLayout([wide, narrow]), device=device, num_slots=SLOTS, **COPY_ENGINE_ONLY) as engine:
        with pytest.raises(LayoutError, match=r"groups \[0, 1\] share memory, and two of the transfers load to"):
            engine.load_groups([GroupTransfer(0, [1], [0]), GroupTransfer(1, [0, 3], [1, 2])], after=NO_WAIT)
        scramble(buffer, 1)
        mirror = Mirror(engine, [buffer])
        engine.load_groups([GroupTransfer(0, [1], [0]), GroupTransfer(1, [1, 4], [1, 2])], after=NO_WAIT).wait(10)
        mirror.expect("load", [1], [0], group=0)
        mirror.expect("load", [1, 4], [1, 2], group=1)
        mirror.check()


@pytest.mark.parametrize("apart", [63, 64])
def test_targets_of_two_groups_may_touch_and_not_share_a_byte(device: kvoffload.Device, apart: int) -> None:
    buffer = device.allocate(1024)
    first, second = (
        [Plane(buffer.address + start, block_bytes=64, num_blocks=4, block_stride=256, owner=buffer)]
        for start in (0, apart)
    )
    together = [GroupTransfer(0, [1], [0]), GroupTransfer(1, [1], [1])]
    with OffloadEngine(KVLayout([first, second]), device=device, num_slots=SLOTS, **COPY_ENGINE_ONLY) as engine:
        engine.load_groups([together[0], GroupTransfer(1, [2], [1])], after=NO_WAIT).wait(10)
        if apart == 64:
            engine.load_groups(together, after=NO_WAIT).wait(10)
        else:
            with pytest.raises(LayoutError, match=r"groups \[0, 1\] share memory, and two of the transfers load to"):
                engine.load_groups(together, after=NO_WAIT)


@pytest.mark.parametrize("of_last", [False, True], ids=["by-slot", "by-block"])
def test_a_transfer_of_several_groups_waits_for_the_other_direction_in_each(
    device: kvoffload.Device, engine: OffloadEngine, of_last: bool
) -> None:
    """What the last group touches is held back, and what comes after the transfer waits for its last group."""
    mirror = mirror_of(engine)
    with device.stream() as stream:
        gate = Gate(device)
        gate.hold(stream.handle)
        engine.load([7], [4], group=2, after=stream)
        mirror.expect("load", [4], [7], group=2)
        last = GroupTransfer(2, [4], [3]) if of_last else GroupTransfer(2, [6], [7])
        stored = engine.store_groups([GroupTransfer(0, [1], [0]), last], after=NO_WAIT)
        mirror.expect("store", [1], [0], group=0)
        mirror.expect("store", ids_of(last.blocks), ids_of(last.slots), group=2)
        loaded = engine.load(last.slots, [5], group=2, after=NO_WAIT)
        mirror.expect("load", [5], ids_of(last.slots), group=2)
        device.simulator.run_all()
        assert not stored.done
        assert not loaded.done
        gate.open()
        engine.drain(10)
        gate.close()
    mirror.check()


def test_the_slots_of_every_group_decide_when_the_driver_may_read_them(
    device: kvoffload.Device, engine: OffloadEngine
) -> None:
    spy = OrderSpy(device)
    with device.stream() as stream:
        gate = Gate(device)
        gate.hold(stream.handle)
        engine.store([4], [3], group=2, after=stream)
        several = [GroupTransfer(0, [1], [0]), GroupTransfer(2, [5], [3])]
        with pytest.raises(ValueError, match='source_order="any" while a store to one of the slots'):
            engine.load_groups(several, after=NO_WAIT, source_order="any")
        engine.load_groups(several, after=NO_WAIT)
        gate.open()
        engine.drain(10)
        gate.close()
    assert {order for direction, order in spy.seen if direction == "load"} == {int(SourceOrder.STREAM)}


def test_every_share_of_a_transfer_of_several_groups_waits(device: kvoffload.Device) -> None:
    """Kernels and copies are on streams of their own."""
    groups = [device.allocate_planes(2, block_bytes=64, num_blocks=8) for _ in range(2)]
    with (
        OffloadEngine(KVLayout(groups), device=device, num_slots=SLOTS, staging_bytes=STAGING) as engine,
        device.stream() as stream,
    ):
        engine.slots[:] = 7
        gate = Gate(device)
        gate.hold(stream.handle)
        several = [GroupTransfer(number, range(4), range(4 * number, 4 * number + 4)) for number in range(2)]
        engine.store_groups(several, after=stream, copier="pack")
        device.simulator.run_all()
        assert (engine.slots == 7).all()
        gate.open()
        engine.drain(10)
        gate.close()
        assert not (engine.slots[:8, :128] == 7).all(axis=1).any()


def test_a_cache_that_owns_the_slots_refuses_a_store_of_any_group(device: kvoffload.Device) -> None:
    groups = [device.allocate_planes(2, block_bytes=64, num_blocks=8) for _ in range(2)]
    with OffloadEngine(KVLayout(groups), device=device, num_slots=SLOTS, **COPY_ENGINE_ONLY) as engine:
        cache = BlockCache(engine)
        reservation = cache.reserve([b"a"])
        mine = [reservation.slots(0)[0], reservation.slots(1)[0]]
        other = next(slot for slot in range(SLOTS) if slot not in mine)
        with pytest.raises(ValueError, match="reservation"):
            engine.store_groups([GroupTransfer(0, [1], [mine[0]]), GroupTransfer(1, [1], [other])])
        engine.store_groups([GroupTransfer(0, [1], [mine[0]]), GroupTransfer(1, [1], [mine[1]])]).wait(10)
        reservation.commit()
        assert cache.lookup([b"a"]) == 1


def test_a_driver_error_in_one_group_fails_the_one_job(engine: OffloadEngine) -> None:
    engine.device.simulator.faults.fail_call("cuMemcpyBatchAsync")
    job = engine.store_groups([GroupTransfer(0, [1], [0]), GroupTransfer(2, [1], [1])], after=NO_WAIT, copier="batch")
    with pytest.raises(kvoffload.TransferError):
        job.wait(10)
    assert engine.statistics().store.failed == 1
    engine.store_groups(THREE, after=NO_WAIT).wait(10)


def test_several_groups_on_several_devices() -> None:
    machine = Machine(groups=2, num_slots=SLOTS)
    engine = machine.engine
    mirrors = machine.mirrors()
    anything: Any = iter([1, 2])
    several = [GroupTransfer(0, anything, (0, 1)), GroupTransfer(1, [3], [2])]
    with pytest.raises(LayoutError, match=r"transfers\[0\]: blocks"):
        engine.store_groups(several, after=NO_WAIT)
    several[0] = GroupTransfer(0, [1, 2], [0, 1])
    job = engine.store_groups(several, after=NO_WAIT)
    moved = [replace(each, blocks=[block + 4 for block in ids_of(each.blocks)]) for each in several]
    back = engine.load_groups(moved, after=NO_WAIT, urgent=True)
    assert job.wait(10).nbytes == back.wait(10).nbytes > 0
    for mirror in mirrors:
        for each, target in zip(several, moved, strict=True):
            mirror.expect("store", ids_of(each.blocks), ids_of(each.slots), group=each.group)
            mirror.expect("load", ids_of(target.blocks), ids_of(each.slots), group=each.group)
        mirror.check()
    machine.close()

"""Any layout, ids, copier, direction and capability level: the bytes of a naive loop, and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from counting import COPY_CALLS, copies_by_call
from driver_levels import LEVELS
from helpers import COPY_ENGINE_ONLY, copiers_in
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from seeds import rest_long
from strategies import Case, TransferSpec, cases, copiers_of, place, slab_of

import kvoffload
from kvoffload import NO_WAIT, CapabilityError, Direction, Job, KVLayout, OffloadEngine, Plane
from kvoffload.copiers import pack_kernels
from kvoffload.device.buffers import DeviceBuffer
from kvoffload.testing import (
    Mirror,
    SimulatedDriver,
    check_clean_close,
    check_copier_conformance,
    leak_check,
    naive_transfer,
    pattern,
    poison,
    scramble,
)
from kvoffload.tuning import COPIERS, CopierName

EXAMPLES = 18  # at each of five levels
DEFAULT = "driver13.0-bindings13.3"  # the level of the fixture `device`


def open_level(level: str, seed: int) -> kvoffload.Device:
    driver_version, bindings_version = LEVELS[level]
    return kvoffload.open_device(
        backend=SimulatedDriver(seed=seed, driver_version=driver_version, bindings_version=bindings_version)
    )


def run_transfer(engine: OffloadEngine, transfer: TransferSpec) -> Job:
    copiers = [*copiers_in(engine), None]
    options: dict[str, Any] = {"group": transfer.group, "first_sub_block": transfer.first_sub_block}
    options |= {"copier": copiers[transfer.copier % len(copiers)], "after": NO_WAIT}
    if transfer.direction is Direction.STORE:
        return engine.store(transfer.blocks, transfer.slots, **options)
    return engine.load(transfer.slots, transfer.blocks, **options)


def check_case(device: kvoffload.Device, case: Case, seed: int) -> None:
    layout, buffers = place(device, case.layout, seed)
    with OffloadEngine(layout, device=device, num_slots=case.num_slots, staging_bytes=case.staging_bytes) as engine:
        poison(engine.slots)
        mirror = Mirror(engine, buffers)
        jobs = [run_transfer(engine, transfer) for transfer in case.transfers]
        engine.drain(timeout=30)
        for job, transfer in zip(jobs, case.transfers, strict=True):
            assert job.wait().nbytes == len(transfer.blocks) * layout.groups[transfer.group].bytes_per_block
            mirror.expect(
                transfer.direction,
                transfer.blocks,
                transfer.slots,
                group=transfer.group,
                first_sub_block=transfer.first_sub_block,
            )
        mirror.check()
    for buffer in buffers:
        buffer.close()


@pytest.mark.parametrize("level", rest_long(LEVELS, 2))
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), seed=st.integers(0, 1 << 16))
def test_any_transfers_move_the_bytes_of_a_naive_loop_and_no_others(level: str, case: Case, seed: int) -> None:
    device = open_level(level, seed)
    check_case(device, case, seed)
    of_this_test, of_making_kernels = (
        3 * len(case.layout.allocations),
        len(case.layout.groups) if case.staging_bytes else 0,
    )
    assert device.simulator.pageable_copies == of_this_test + of_making_kernels, "no transfer's"
    check_clean_close(device)


@pytest.mark.gpu
@pytest.mark.timeout(600)  # dozens of kernels are compiled, about a second each
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(case=cases(), seed=st.integers(0, 1 << 16))
def test_any_transfers_on_a_gpu_move_the_bytes_of_a_naive_loop_and_no_others(
    gpu_device: kvoffload.Device, case: Case, seed: int
) -> None:
    check_case(gpu_device, case, seed)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_conformance_suite_passes_with_every_copier(each_device: kvoffload.Device) -> None:
    device = each_device
    if device.simulated:
        assert (device.simulator.driver_version, device.simulator.bindings_version) == LEVELS[DEFAULT]
        assert set(copiers_of(device)) == set(COPIERS)
    else:
        check_copier_conformance(device)  # drivers open files when first used
    with leak_check(device):
        checked = check_copier_conformance(device)
    assert {each.copier for each in checked} == set(copiers_of(device))


@pytest.mark.long
@pytest.mark.parametrize("any_device", [level for level in LEVELS if level != DEFAULT], indirect=True)
def test_conformance_suite_passes_at_every_other_level(any_device: kvoffload.Device) -> None:
    """Without kernels, which no level changes, and which take seconds to interpret."""
    by_engine = [name for name in copiers_of(any_device) if name != "pack"]
    assert set(by_engine) == {"strided", "loop"} | ({"batch"} if any_device.capabilities.flat_batch else set())
    with leak_check(any_device):
        checked = check_copier_conformance(any_device, by_engine)
    assert {each.copier for each in checked} == set(by_engine)


def test_conformance_suite_finds_a_copier_that_copies_too_little(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = device.driver.copy
    monkeypatch.setattr(
        device.driver, "copy", lambda target, source, nbytes, stream: copy(target, source, max(1, nbytes - 1), stream)
    )
    with pytest.raises(AssertionError, match="the slot pool differs"):
        check_copier_conformance(device, ["loop"])


def test_conformance_suite_finds_a_kernel_that_leaves_a_row_out(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragment_table = pack_kernels.fragment_table

    def one_less(*arguments: Any) -> Any:
        rows = fragment_table(*arguments)
        rows[:, -1] = rows[:, 0]
        return rows

    monkeypatch.setattr(pack_kernels, "fragment_table", one_less)
    with pytest.raises(AssertionError, match="differs in"):
        check_copier_conformance(device, ["pack"])


# many planes and blocks


def separate_planes(device: kvoffload.Device, count: int, num_blocks: int) -> tuple[KVLayout, list[DeviceBuffer]]:
    buffers = [device.allocate(16 * num_blocks) for _ in range(count)]
    for index, buffer in enumerate(buffers):
        scramble(buffer, index)
    planes = [Plane(buffer.address, block_bytes=16, num_blocks=num_blocks, owner=buffer) for buffer in buffers]
    return KVLayout([planes]), buffers


@pytest.mark.parametrize(
    ("bindings", "copier", "num_blocks"),
    rest_long(
        [
            ((13, 3), "batch", 520),
            ((13, 5), "strided", 520),
            ((13, 3), "loop", 200),
            ((12, 9), "strided", 60),
            ((13, 3), "batch", 1000),
            ((13, 5), "batch", 1000),
            ((13, 3), "strided", 520),
        ],
        now=3,
    ),
)
def test_pitfall_16_many_descriptors_go_in_capped_calls_over_several_streams(
    bindings: tuple[int, int], copier: CopierName, num_blocks: int
) -> None:
    driver = (12, 4) if bindings < (13, 0) else (13, 0)
    device = kvoffload.open_device(backend=SimulatedDriver(driver_version=driver, bindings_version=bindings))
    layout, buffers = separate_planes(device, 100, num_blocks)
    simulator = device.simulator
    with OffloadEngine(layout, device=device, num_slots=num_blocks, **COPY_ENGINE_ONLY) as engine:
        engine.slots[:] = np.random.default_rng(0).integers(0, 256, engine.slots.shape, dtype=np.uint8)
        mirror = Mirror(engine, buffers)
        blocks = np.random.default_rng(1).permutation(num_blocks)
        slots = np.arange(num_blocks)
        simulator.faults.calls = []
        engine.load(slots, blocks, after=NO_WAIT, copier=copier).wait(60)
        calls = copies_by_call(simulator)
        simulator.faults.calls = None
        if copier == "batch":  # a prelude before every segment, between two buffers on the device
            preludes = [call for call in calls if call[0] == "cuMemcpy2DAsync"]
            assert len(preludes) == -(-100 * num_blocks // 4096)
            calls = [call for call in calls if call not in preludes]
        mirror.expect(Direction.LOAD, blocks.tolist(), slots.tolist())
        mirror.check()
    assert sum(count for _, count, _ in calls) == 100 * num_blocks  # up to 100,000
    assert all(0 < count <= COPY_CALLS[name][1] for name, count, _ in calls)
    assert len({stream for *_, stream in calls}) > 1
    assert simulator.blocked_submissions == 0
    check_clean_close(device)


@pytest.mark.long
@pytest.mark.parametrize("any_device", LEVELS, indirect=True)
def test_segments_of_one_transfer_run_in_order_between_two_others(any_device: kvoffload.Device) -> None:
    """More operations than one queue holds: a later transfer over the same slots must follow every segment."""
    layout, buffers = separate_planes(any_device, 40, 30)
    with OffloadEngine(layout, device=any_device, num_slots=30, **COPY_ENGINE_ONLY) as engine:
        poison(engine.slots)
        mirror = Mirror(engine, buffers)
        ids = np.arange(30)
        for copier in ("strided", "loop", "strided"):
            turned = np.roll(ids, 7)
            engine.store(ids, turned, after=NO_WAIT, copier=copier)
            mirror.expect(Direction.STORE, ids.tolist(), turned.tolist())
            engine.load(turned, ids[::-1], after=NO_WAIT, copier=copier)
            mirror.expect(Direction.LOAD, ids[::-1].tolist(), turned.tolist())
        engine.drain(timeout=60)
        mirror.check()


# one transfer at a time


def test_pitfall_09_padding_is_neither_read_nor_written(any_device: kvoffload.Device) -> None:
    spec_padding = 24
    planes = any_device.allocate_planes(4, block_bytes=100, num_blocks=9, block_stride=100 + spec_padding)
    slab = slab_of(planes)
    content = scramble(slab, 1)
    for copier in copiers_of(any_device):
        layout = KVLayout([planes], blocks_per_slot=3, slot_order="block-major" if copier == "pack" else None)
        with OffloadEngine(layout, device=any_device, num_slots=3) as engine:
            poison(engine.slots, value=0x11)
            engine.store(range(9), range(3), after=NO_WAIT, copier=copier).wait(10)
            assert (engine.slots[:, layout.groups[0].payload_bytes :] == 0x11).all()
            poison(engine.slots, value=0x22)
            engine.load(range(3), range(9), after=NO_WAIT, copier=copier).wait(10)
        after = slab.to_numpy()
        payload = np.zeros(slab.nbytes, dtype=bool)
        for plane in planes:
            for block in range(9):
                start = plane.address - slab.address + block * plane.block_stride
                payload[start : start + 100] = True
        assert (after[payload] == 0x22).all()
        assert (after[~payload] == content[~payload]).all()
        slab.copy_from(content)


def test_pitfall_09_a_padded_last_block_may_end_with_its_allocation(any_device: kvoffload.Device) -> None:
    """The stride of the last block reaches past the end of the allocation; its payload does not."""
    buffer = any_device.allocate(4 * 128 + 100)
    content = scramble(buffer, 2)
    plane = Plane(buffer.address, block_bytes=100, num_blocks=5, block_stride=128, owner=buffer)
    with OffloadEngine(KVLayout([[plane]]), device=any_device, num_slots=5) as engine:
        engine.store(range(5), range(5), after=NO_WAIT).wait(10)
        assert engine.slots[4, :100].tolist() == content[512:612].tolist()


@pytest.mark.parametrize("factor", [2, 3, 5])
def test_pitfall_11_partial_first_and_last_slots(any_device: kvoffload.Device, factor: int) -> None:
    """A running sequence stored in uneven parts, each beginning where the last one ended."""
    planes = any_device.allocate_planes(3, block_bytes=40, num_blocks=17)
    slab = slab_of(planes)
    content = scramble(slab, 3)
    layout = KVLayout([planes], blocks_per_slot=factor)
    with OffloadEngine(layout, device=any_device, num_slots=17) as engine:
        poison(engine.slots)
        begin = 0
        for end in (1, 3, 4, 10, 17):
            skip = begin % factor
            count = end - begin
            used = -(-(count + skip) // factor)
            assert layout.slots_for(count, first_sub_block=skip) == used
            slots = range(begin // factor, begin // factor + used)
            engine.store(range(begin, end), slots, first_sub_block=skip, after=NO_WAIT).wait(10)
            begin = end
        for block in range(17):
            row = engine.slots[block // factor]
            for index, plane in enumerate(planes):
                at = plane.address - slab.address + block * 40
                where = (index * factor + block % factor) * 40
                assert row[where : where + 40].tolist() == content[at : at + 40].tolist()
        unused = (-17) % factor
        if unused:  # the last slot's other sub-blocks are as they were
            last = engine.slots[16 // factor, : 3 * factor * 40].reshape(3, factor, 40)
            assert (last[:, factor - unused :] == 0xB7).all()


def test_pitfall_10_the_copier_follows_the_size_of_the_operations(any_device: kvoffload.Device) -> None:
    """One and the same block of 32 x 64 bytes: what counts is whether it is one operation or 32."""
    slab = any_device.allocate_planes(32, block_bytes=64, num_blocks=8)
    buffers = [any_device.allocate(512) for _ in range(32)]
    apart = [Plane(buffer.address, block_bytes=64, num_blocks=8, owner=buffer) for buffer in buffers]
    flat = {"batch"} if any_device.capabilities.flat_batch else {"loop", "strided"}  # both make a call for every row
    for planes, copiers in ((slab, {"strided"}), (apart, flat), (slab[::-1], flat)):
        with OffloadEngine(KVLayout([planes]), device=any_device, num_slots=2, **COPY_ENGINE_ONLY) as engine:
            job = engine.store([0, 1], [1, 0], after=NO_WAIT)
            assert job.wait(10).copier in copiers


def test_pitfall_12_groups_have_block_tables_and_sizes_of_their_own(any_device: kvoffload.Device) -> None:
    full = any_device.allocate_planes(6, block_bytes=96, num_blocks=20)
    window = any_device.allocate_planes(2, block_bytes=33, num_blocks=5)
    buffers = [slab_of(planes) for planes in (full, window)]
    for index, buffer in enumerate(buffers):
        scramble(buffer, index)
    layout = KVLayout([full, window], blocks_per_slot=2)
    with OffloadEngine(layout, device=any_device, num_slots=8) as engine:
        poison(engine.slots)
        mirror = Mirror(engine, buffers)
        steps: list[tuple[int, list[int], list[int]]] = [(0, [19, 3, 4, 7], [0, 1]), (1, [4, 0], [2]), (0, [7, 8], [4])]
        for group, blocks, slots in steps:
            assert (
                engine.store(blocks, slots, group=group, after=NO_WAIT).nbytes == len(blocks) * (6 * 96, 2 * 33)[group]
            )
            mirror.expect("store", blocks, slots, group=group)
        for group, blocks, slots in steps:
            engine.load(slots, blocks[::-1], group=group, after=NO_WAIT)
            mirror.expect("load", blocks[::-1], slots, group=group)
        engine.drain(timeout=10)
        mirror.check()
        with pytest.raises(kvoffload.LayoutError, match=r"blocks\[0\] is 5, outside \[0, 5\)"):
            engine.store([5], [0], group=1)


def test_pitfall_14_without_the_batch_entry_points_other_calls_copy_the_same_bytes() -> None:
    """Bindings 13 on a 12.8 driver raise at the call; 2D copies and the loop then do the work."""
    content: list[list[int]] = []
    for level in LEVELS:
        other = open_level(level, 5)
        planes = other.allocate_planes(8, block_bytes=64, num_blocks=8)
        scramble(slab_of(planes), 9)
        with OffloadEngine(KVLayout([planes]), device=other, num_slots=8, **COPY_ENGINE_ONLY) as engine:
            poison(engine.slots)
            other.simulator.faults.calls = []
            engine.store([5, 1, 7], [2, 0, 6], after=NO_WAIT).wait(10)
            engine.store([3, 0], [3, 4], after=NO_WAIT, copier="loop").wait(10)
            called = {name for name, *_ in copies_by_call(other.simulator)}
            assert ("cuMemcpy2DAsync" in called) == (not other.capabilities.strided_batch)
            content.append(engine.slots.reshape(-1).tolist())
            if not other.capabilities.flat_batch:
                with pytest.raises(CapabilityError, match=r"copier='batch' cannot run here.*the loop copier works"):
                    engine.store([0], [0], copier="batch")
        check_clean_close(other)
    assert all(each == content[0] for each in content[1:])


@pytest.mark.parametrize("copier", ["strided", "batch", "loop"])
def test_pitfall_15_a_bad_pointer_fails_the_job_with_every_copier(device: kvoffload.Device, copier: CopierName) -> None:
    """The memory goes while the engine lives, which no check at construction can see."""
    buffer = device.allocate(4096)
    layout = KVLayout([[Plane(buffer.address, block_bytes=64, num_blocks=64)]])
    good = device.allocate_planes(1, block_bytes=64, num_blocks=64)
    with OffloadEngine(layout, device=device, num_slots=4, **COPY_ENGINE_ONLY) as engine:
        buffer.close()
        with pytest.raises(kvoffload.TransferError, match="CUDA_ERROR_INVALID_VALUE"):
            engine.store([1, 2], [1, 2], after=NO_WAIT, copier=copier).wait(10)
    with OffloadEngine(KVLayout([good]), device=device, num_slots=4, **COPY_ENGINE_ONLY) as engine:
        assert engine.store([1, 2], [1, 2], after=NO_WAIT, copier=copier).wait(10).error is None


def test_pitfall_15_a_fallback_that_fails_half_way_fails_the_job() -> None:
    device = open_level("driver12.4-bindings12.9", 0)
    planes = device.allocate_planes(8, block_bytes=64, num_blocks=8)
    with OffloadEngine(KVLayout([planes]), device=device, num_slots=8, **COPY_ENGINE_ONLY) as engine:
        failing: dict[CopierName, str] = {"loop": "cuMemcpyAsync", "strided": "cuMemcpy2DAsync"}
        for copier, name in failing.items():
            device.simulator.faults.fail_call(name, nth=3)
            with pytest.raises(kvoffload.TransferError, match=f"{name} returned CUDA_ERROR_UNKNOWN"):
                engine.store(range(8), range(8), after=NO_WAIT, copier=copier).wait(10)
    check_clean_close(device)


def test_pitfall_18_transfers_never_copy_pageable_memory(any_device: kvoffload.Device) -> None:
    planes = any_device.allocate_planes(5, block_bytes=80, num_blocks=12)
    with OffloadEngine(
        KVLayout([planes], blocks_per_slot=2, slot_order="block-major"), device=any_device, num_slots=6
    ) as engine:
        assert "pack" in copiers_in(engine)
        before = any_device.simulator.pageable_copies
        for copier in copiers_in(engine):
            engine.store(range(12), range(6), after=NO_WAIT, copier=copier)
            engine.load(range(6), range(12), after=NO_WAIT, copier=copier)
        engine.drain(timeout=10)
        assert any_device.simulator.pageable_copies == before


# the reference itself


def test_naive_transfer_against_numbers_written_by_hand() -> None:
    planes = [Plane(1000, block_bytes=2, num_blocks=3, block_stride=4), Plane(2000, block_bytes=1, num_blocks=3)]
    layout = KVLayout([planes], blocks_per_slot=2)
    memory = {1000: np.arange(10, dtype=np.uint8), 2000: np.array([90, 91, 92], dtype=np.uint8)}
    pool = np.zeros((2, layout.slot_bytes), dtype=np.uint8)
    naive_transfer(layout, "store", blocks=[2, 0], slots=[1, 0], memory=memory, pool=pool, first_sub_block=1)
    assert pool[1, :6].tolist() == [0, 0, 8, 9, 0, 92]  # block 2 is sub-block 1 of the first slot of the list
    assert pool[0, :6].tolist() == [0, 1, 0, 0, 90, 0]
    naive_transfer(layout, Direction.LOAD, blocks=[1], slots=[1], memory=memory, pool=pool, first_sub_block=1)
    assert memory[1000].tolist() == [0, 1, 2, 3, 8, 9, 6, 7, 8, 9]
    assert memory[2000].tolist() == [90, 92, 92]


def test_naive_transfer_keeps_block_major_blocks_whole() -> None:
    planes = [
        Plane(1000, block_bytes=2, num_blocks=3, block_stride=4),
        Plane(1002, block_bytes=1, num_blocks=3, block_stride=4),
    ]
    layout = KVLayout([planes], blocks_per_slot=2)
    memory = {1000: np.arange(12, dtype=np.uint8)}
    pool = np.zeros((2, layout.slot_bytes), dtype=np.uint8)
    naive_transfer(layout, "store", blocks=[2, 0], slots=[1, 0], memory=memory, pool=pool, first_sub_block=1)
    assert pool[1, :6].tolist() == [0, 0, 0, 8, 9, 10]  # block 2 is sub-block 1 of the first slot of the list
    assert pool[0, :6].tolist() == [0, 1, 2, 0, 0, 0]
    naive_transfer(layout, Direction.LOAD, blocks=[1], slots=[1], memory=memory, pool=pool, first_sub_block=1)
    assert memory[1000].tolist() == [0, 1, 2, 3, 8, 9, 10, 7, 8, 9, 10, 11]


def test_pattern_depends_on_the_key_alone() -> None:
    assert pattern(("key", 1), 6).tolist() == pattern(("key", 1), 6).tolist()
    assert pattern(7, 3).tolist() == pattern(7, 6)[:3].tolist()
    assert pattern(7, 64).tolist() != pattern(8, 64).tolist()

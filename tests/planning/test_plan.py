"""Folding planes, merging blocks into rows, flattening, and what it costs. Pure numpy: no device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from counting import python_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import LayoutSpec, layouts

from kvoffload import Direction, KVLayout, Plane
from kvoffload.layout.fold import MAX_PITCH, FoldedGroup, describe_fold, fold
from kvoffload.planning.transfer_plan import BlockPlan, TransferPlan, addresses_of_slots, build

MIB = 1 << 20
POOL = 1 << 40
NUM_SLOTS = 4096


def layout_of(addresses: Iterable[int], block_bytes: int = 4096, num_blocks: int = 8, **options: Any) -> KVLayout:
    stride = options.pop("block_stride", None)
    planes = [Plane(each, block_bytes=block_bytes, num_blocks=num_blocks, block_stride=stride) for each in addresses]
    return KVLayout([planes], **options)


def fold_lengths(group: FoldedGroup) -> list[int]:
    return sorted((int(rows) for each in group.classes for rows in each.rows.reshape(-1)), reverse=True)


def folded(layout: KVLayout, allocations: list[int] | None = None) -> list[int]:
    """Planes per fold."""
    return fold_lengths(fold(layout, None if allocations is None else [allocations])[0])


def block_plan(
    layout: KVLayout,
    blocks: Iterable[int],
    slots: Iterable[int],
    first: int = 0,
    direction: Direction = Direction.STORE,
) -> BlockPlan:
    return build(
        fold(layout)[0],
        layout,
        direction,
        slot_addresses=addresses_of_slots(layout, POOL, NUM_SLOTS),
        slots=np.array(list(slots), np.int64),
        blocks=np.array(list(blocks), np.int64),
        first_sub_block=first,
    )


def plan(*arguments: Any, **options: Any) -> TransferPlan:
    """The strided operations of a transfer, a value for each in every column; counted as the plan of blocks says."""
    blocks = block_plan(*arguments, **options)
    made = spread(blocks.operations())
    assert blocks.count() == (len(made), made.height.sum())
    assert blocks.nbytes == (made.width * made.height).sum()
    return made


def spread(made: TransferPlan) -> TransferPlan:
    """A plan with no column shortened to the one value that all operations share."""
    columns = [made.device_address, made.host_address, made.width, made.height, made.device_pitch, made.host_pitch]
    assert all(column.shape in ((1,), (len(made),)) for column in columns)
    return TransferPlan(made.direction, *(np.broadcast_to(column, (len(made),)) for column in columns))


def row_count(made: TransferPlan) -> int:
    return int(made.height.sum())


# folding


def test_planes_at_a_constant_stride_fold_into_one_operation() -> None:
    group = fold(layout_of(MIB * (1 + index) for index in range(64)))[0]
    assert (fold_lengths(group), group.folds, group.planes) == ([64], 1, 64)
    found = group.classes[0]
    assert (found.width, int(found.device_pitch[0, 0]), int(found.host_pitch[0, 0])) == (4096, MIB, 4096)


def test_gaps_in_a_repeating_pattern_fold_once_for_each_phase() -> None:
    """160 CuPy arrays of 9.8 MB: gaps of 10,485,760 and 12,582,912 bytes in turn."""
    addresses = np.cumsum([MIB] + [10485760, 12582912] * 79 + [10485760]).tolist()
    assert folded(layout_of(addresses)) == [80, 80]
    three = np.cumsum([MIB] + [MIB, 2 * MIB, 5 * MIB] * 20).tolist()
    assert sum(folded(layout_of(three))) == 61
    assert len(folded(layout_of(three))) <= 4


def test_every_second_plane_folds_with_twice_the_host_pitch() -> None:
    """K planes in one place, V planes in another, given in turn: K0, V0, K1, V1, ..."""
    addresses = [MIB * (1 + index) if index % 2 == 0 else 777 * MIB - 4096 + 3 * MIB * index for index in range(20)]
    group = fold(layout_of(addresses))[0]
    assert fold_lengths(group) == [10, 10]
    assert group.classes[0].host_pitch.reshape(-1).tolist() == [2 * 4096] * 2
    group = fold(layout_of(addresses, blocks_per_slot=3))[0]
    assert group.classes[0].host_pitch.reshape(-1).tolist() == [2 * 3 * 4096] * 2


def test_pitfall_37_planes_of_separate_allocations_do_not_fold_at_a_perfect_stride() -> None:
    layout = layout_of(MIB * (1 + index) for index in range(8))
    assert folded(layout, list(range(8))) == [1] * 8
    assert folded(layout, [7, 7, 7, 7, 9, 9, 9, 9]) == [4, 4]
    assert folded(layout, [7, 9] * 4) == [4, 4]
    assert folded(layout, [7] * 8) == [8]


def test_descending_addresses_do_not_fold() -> None:
    assert folded(layout_of(MIB * (9 - index) for index in range(8))) == [1] * 8


def test_two_exchanged_planes_leave_the_rest_folded() -> None:
    addresses = [MIB * (1 + index) for index in range(16)]
    addresses[4], addresses[9] = addresses[9], addresses[4]
    lengths = folded(layout_of(addresses))
    assert sum(lengths) == 16
    assert len(lengths) <= 6


def test_interleaved_planes_become_one_range_per_block() -> None:
    layout = layout_of((MIB + 4096 * index for index in range(6)), block_stride=6 * 4096)
    made = plan(layout, [5, 0], [2, 3])
    assert (len(made), row_count(made), made.width.tolist()) == (2, 2, [6 * 4096] * 2)
    assert made.device_address.tolist() == [MIB + 5 * 6 * 4096, MIB]
    assert made.is_flat


def test_block_major_blocks_stay_whole_in_a_slot_and_adjacent_ones_merge() -> None:
    block = 6 * 4096
    layout = layout_of((MIB + 4096 * index for index in range(6)), block_stride=block, blocks_per_slot=4)
    assert layout.groups[0].slot_order == "block-major"
    made = plan(layout, [5, 6, 7, 0, 2, 3], [2, 1], first=1)
    assert made.is_flat
    assert made.width.tolist() == [3 * block, block, 2 * block]
    assert made.device_address.tolist() == [MIB + 5 * block, MIB, MIB + 2 * block]
    slot = layout.slot_bytes
    assert made.host_address.tolist() == [POOL + 2 * slot + block, POOL + slot, POOL + slot + block]


def test_block_major_planes_of_several_sizes_are_one_range() -> None:
    """And blocks with padding behind them are a range each, which never merges with the next."""
    sizes = [4096, 64, 4096, 128]
    starts = np.cumsum([0, *sizes])
    for padding, widths in ((0, [2 * 8384]), (16, [8384, 8384])):
        planes = [
            Plane(MIB + int(start), block_bytes=size, num_blocks=8, block_stride=8384 + padding)
            for start, size in zip(starts, sizes, strict=False)
        ]
        layout = KVLayout([planes], blocks_per_slot=2)
        assert layout.groups[0].slot_order == "block-major"
        assert plan(layout, [3, 4], [0]).width.tolist() == widths


def test_a_slot_order_that_is_not_the_devices_is_rows() -> None:
    """Blocks that are whole in the slot and rows on the device, and the other way round."""
    apart = layout_of((MIB * (1 + index) for index in range(6)), blocks_per_slot=2, slot_order="block-major")
    made = plan(apart, [4, 5], [1])
    assert (made.height.tolist(), made.width.tolist()) == ([6, 6], [4096, 4096])
    assert (made.device_pitch.tolist(), made.host_pitch.tolist()) == ([MIB] * 2, [4096] * 2)
    assert (np.diff(made.host_address.astype(np.int64)) == 6 * 4096).all()


def test_no_merged_row_is_wider_than_a_pitch_may_be() -> None:
    whole = 1 << 30
    layout = layout_of([MIB, MIB + whole // 2], block_bytes=whole // 2, block_stride=whole, blocks_per_slot=2)
    assert plan(layout, [0, 1], [0]).width.tolist() == [whole, whole]


def test_plane_major_slots_of_a_block_major_cache_are_rows() -> None:
    layout = layout_of(
        (MIB + 4096 * index for index in range(6)), block_stride=6 * 4096, blocks_per_slot=2, slot_order="plane-major"
    )
    made = plan(layout, [5, 0], [2])
    assert made.height.tolist() == [6, 6]
    assert made.device_pitch.tolist() == [4096, 4096]
    assert made.host_pitch.tolist() == [8192, 8192]


def test_planes_of_different_block_sizes_fold_apart() -> None:
    small = [Plane(MIB * (1 + index), block_bytes=64, num_blocks=8) for index in range(4)]
    big = [Plane(MIB * (101 + index), block_bytes=4096, num_blocks=8) for index in range(4)]
    assert folded(KVLayout([small + big])) == [4, 4]
    mixed = [plane for pair in zip(small, big, strict=True) for plane in pair]
    group = fold(KVLayout([mixed]))[0]
    assert fold_lengths(group) == [4, 4]
    assert {int(pitch) for each in group.classes for pitch in each.host_pitch.reshape(-1)} == {64 + 4096}


def test_a_pitch_that_drivers_do_not_promise_is_not_used() -> None:
    beyond = MAX_PITCH + 1
    assert folded(layout_of([MIB, MIB + beyond, MIB + 2 * beyond])) == [1, 1, 1]
    allowed = MAX_PITCH - MAX_PITCH % 4096
    assert folded(layout_of([MIB, MIB + allowed, MIB + 2 * allowed])) == [3]


def test_a_host_pitch_beyond_the_promise_is_not_used_either() -> None:
    """Two small planes with a plane of 2 GiB blocks between them in the slot."""
    small = [Plane(MIB * (1 + index), block_bytes=64, num_blocks=1) for index in range(2)]
    huge = Plane(1 << 33, block_bytes=MAX_PITCH + 1, num_blocks=1)
    assert folded(KVLayout([[small[0], huge, small[1]]])) == [1, 1, 1]
    large = Plane(1 << 33, block_bytes=MAX_PITCH - 64, num_blocks=1)
    assert folded(KVLayout([[small[0], large, small[1]]])) == [2, 1]


def test_one_plane_and_fold_descriptions() -> None:
    def words(*addresses: int) -> str:
        return describe_fold(fold(layout_of(addresses)))

    assert words(MIB) == "1 plane (1 operation a block)"
    assert words(MIB, 2 * MIB) == "2 planes fold into 1 operation a block"
    assert words(2 * MIB, MIB) == "2 planes do not fold (2 operations a block)"
    assert words(MIB, 2 * MIB, 3 * MIB, 3 * MIB + 65536) == "4 planes fold into 2 operations a block"


# planning


def test_a_plan_is_one_operation_per_block_and_fold() -> None:
    layout = layout_of(MIB * (1 + index) for index in range(64))
    made = plan(layout, [3, 1, 1], [0, 2, 5])
    assert len(made) == 3
    assert made.height.tolist() == [64] * 3
    assert made.device_address.tolist() == [MIB + block * 4096 for block in (3, 1, 1)]
    assert made.host_address.tolist() == [POOL + slot * layout.slot_bytes for slot in (0, 2, 5)]
    assert made.width.tolist() == [4096] * 3
    assert all(column.dtype == np.uint64 for column in (made.source, made.target, made.width, made.height))


def test_sides_change_with_the_direction() -> None:
    layout = layout_of([MIB, 2 * MIB])
    store = plan(layout, [1], [0])
    load = plan(layout, [1], [0], direction=Direction.LOAD)
    assert store.source.tolist() == load.target.tolist() == [MIB + 4096]
    assert store.target.tolist() == load.source.tolist() == [POOL]
    assert store.device_pitch.tolist() == load.device_pitch.tolist() == [MIB]
    assert store.host_pitch.tolist() == load.host_pitch.tolist() == [4096]


def test_adjacent_blocks_of_one_slot_are_one_wider_row() -> None:
    layout = layout_of((MIB * (1 + index) for index in range(3)), blocks_per_slot=4, num_blocks=32)
    made = plan(layout, [8, 9, 10, 11, 12, 13, 20, 19], [0, 1])
    assert made.width.tolist() == [4 * 4096, 2 * 4096, 4096, 4096]
    assert row_count(made) == 12


def test_rows_do_not_reach_into_the_next_slot() -> None:
    layout = layout_of([MIB], blocks_per_slot=4, num_blocks=32)
    made = plan(layout, range(8), [0, 1])
    assert made.width.tolist() == [4 * 4096] * 2
    made = plan(layout, range(8), [0, 1, 2], first=3)
    assert made.width.tolist() == [4096, 4 * 4096, 3 * 4096]
    assert made.host_address.tolist() == [POOL + 3 * 4096, POOL + layout.slot_bytes, POOL + 2 * layout.slot_bytes]


def test_padded_blocks_are_never_one_row() -> None:
    layout = layout_of([MIB], blocks_per_slot=4, num_blocks=32, block_stride=4096 + 16)
    assert plan(layout, range(4), [0]).width.tolist() == [4096] * 4


def test_pitches_are_never_below_the_width() -> None:
    """Drivers refuse such an operation even where it has a single row."""
    layout = layout_of([9 * MIB, 5 * MIB, MIB], blocks_per_slot=4, num_blocks=32)
    made = plan(layout, range(8), [0, 1])
    assert (made.device_pitch >= made.width).all()
    assert (made.host_pitch >= made.width).all()


def test_an_empty_plan() -> None:
    for factor in (1, 3):
        made = block_plan(layout_of([MIB], blocks_per_slot=factor), [], [])
        assert (len(made), made.nbytes, made.count()) == (0, 0, (0, 0))
        assert len(made.operations()) == len(made.operations().flat()) == 0


def test_pitfall_10_the_path_follows_the_operation_and_not_the_size_of_a_block() -> None:
    """A block of 160 x 8 KiB is 1.25 MiB, yet where its planes do not fold the copies are of 8 KiB: counted as such."""
    scattered = layout_of((MIB * (200 - index) for index in range(160)), block_bytes=8192)
    made = plan(scattered, range(4), range(4))
    assert row_count(made) == len(made) == 640  # one row an operation: not for strided copies
    slab = layout_of((MIB * (1 + index) for index in range(160)), block_bytes=8192)
    made = plan(slab, range(4), range(4))
    assert row_count(made) == 160 * len(made)


def test_parts_share_memory_and_add_up() -> None:
    whole = block_plan(layout_of([MIB, 2 * MIB, 9 * MIB], blocks_per_slot=2), range(7), range(4)).operations()
    parts = [whole.cut(start, start + 3) for start in range(0, len(whole), 3)]
    assert sum(len(part) for part in parts) == len(whole)
    assert sorted(row for part in parts for row in rows(part)) == rows(whole)
    assert np.concatenate([part.source for part in parts]).tolist() == whole.source.tolist()
    assert np.shares_memory(parts[1].source, whole.source)
    assert whole.cut(0, len(whole)) is whole
    assert [len(whole.cut(0, stop)) for stop in range(len(whole) + 1)] == list(range(len(whole) + 1))


@pytest.mark.parametrize("factor", [1, 2])
def test_parts_of_blocks_share_memory_and_add_up(factor: int) -> None:
    layout = layout_of([MIB, 2 * MIB, 9 * MIB], blocks_per_slot=factor)
    whole = block_plan(layout, range(7), range(layout.slots_for(7)))
    parts = [whole.cut(start, start + 3) for start in range(0, len(whole), 3)]
    assert [len(part) for part in parts] == [3, 3, 1]
    assert sum(part.nbytes for part in parts) == whole.nbytes
    assert np.shares_memory(parts[1].blocks, whole.blocks)
    assert (whole.sub_block is None) == (factor == 1)
    flat = [row for part in parts for row in pages(part.operations())]
    assert sorted(flat) == sorted(pages(whole.operations()))
    assert whole.cut(0, len(whole)) is whole
    assert [len(whole.cut(0, stop)) for stop in range(len(whole) + 1)] == list(range(len(whole) + 1))


def pages(made: TransferPlan) -> list[tuple[int, int]]:
    """Where every page of 4 KiB comes from and goes to."""
    return [(device + at, host + at) for device, host, width in rows(made) for at in range(0, width, 4096)]


def rows(made: TransferPlan) -> list[tuple[int, int, int]]:
    """Every row of a plan, as (device address, host address, bytes), in a plain loop."""
    made = spread(made)
    columns = (made.device_address, made.host_address, made.width, made.height, made.device_pitch, made.host_pitch)
    return sorted(
        (device + row * device_pitch, host + row * host_pitch, width)
        for device, host, width, height, device_pitch, host_pitch in zip(*map(np.ndarray.tolist, columns), strict=True)
        for row in range(height)
    )


def spec_layout(spec: LayoutSpec) -> KVLayout:
    bases = np.cumsum([0, *spec.allocations]) + np.arange(len(spec.allocations) + 1) * 4096 + MIB
    return KVLayout(
        [
            [
                Plane(
                    int(bases[each.allocation]) + each.offset,
                    block_bytes=each.block_bytes,
                    num_blocks=each.num_blocks,
                    block_stride=each.block_stride,
                )
                for each in group
            ]
            for group in spec.groups
        ],
        blocks_per_slot=spec.blocks_per_slot,
        slot_order=spec.slot_order,
    )


@settings(max_examples=150)
@given(spec=layouts(), data=st.data())
def test_any_plan_covers_exactly_the_bytes_of_its_blocks(spec: LayoutSpec, data: st.DataObject) -> None:
    layout = spec_layout(spec)
    allocations = [[plane.allocation for plane in group] for group in spec.groups]
    number = data.draw(st.integers(0, layout.num_groups - 1))
    group, factor = layout.groups[number], layout.blocks_per_slot
    first = data.draw(st.integers(0, factor - 1))
    blocks = data.draw(st.lists(st.integers(0, group.num_blocks - 1), max_size=20, unique=True))
    if data.draw(st.booleans()):
        blocks.sort()
    slots = list(range(layout.slots_for(len(blocks), first_sub_block=first)))
    transfer = build(
        fold(layout, allocations)[number],
        layout,
        Direction.LOAD,
        slot_addresses=addresses_of_slots(layout, POOL, NUM_SLOTS),
        slots=np.array(slots, np.int64),
        blocks=np.array(blocks, np.int64),
        first_sub_block=first,
    )
    made = transfer.operations()
    expected = set()
    for index, block in enumerate(blocks):
        slot, sub_block = divmod(first + index, factor)
        at = 0  # of sub-block 0 of a plane, or of the first plane of a sub-block
        for plane in group.planes:
            device = plane.address + block * plane.block_stride
            host = POOL + slot * layout.slot_bytes
            if group.slot_order == "block-major":
                host += sub_block * group.bytes_per_block + at
                at += plane.block_bytes
            else:
                host += at + sub_block * plane.block_bytes
                at += factor * plane.block_bytes
            expected |= {(device + byte, host + byte) for byte in {0, plane.block_bytes // 2, plane.block_bytes - 1}}
    covered = [(device, host, width) for device, host, width in rows(made)]
    assert sum(width for *_, width in covered) == transfer.nbytes == len(blocks) * group.bytes_per_block
    assert transfer.count() == (len(made), len(covered))
    assert rows(made.flat()) == covered
    assert made.flat().is_flat
    starts = np.array([device for device, *_ in covered], np.int64)
    for device, host in expected:
        at = int(np.searchsorted(starts, device, side="right")) - 1
        row_device, row_host, width = covered[at]
        assert device - row_device < width
        assert host - row_host == device - row_device


# cost


def scattered_blocks(layout: KVLayout, count: int, num_blocks: int) -> Callable[[], TransferPlan]:
    """Plans them, down to the operations."""
    chance = np.random.default_rng(0)
    group, blocks = fold(layout)[0], chance.permutation(num_blocks)[:count]
    slots = chance.permutation(layout.slots_for(count))
    addresses = addresses_of_slots(layout, POOL, len(slots))

    def action() -> TransferPlan:
        transfer = build(group, layout, Direction.STORE, slot_addresses=addresses, slots=slots, blocks=blocks)
        transfer.count()
        return transfer.operations()

    return action


@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize("stride", [None, 8192], ids=["packed", "padded"])
@pytest.mark.parametrize(("plane_count", "block_count"), [(64, 8), (160, 512)])
def test_planning_costs_eight_python_calls_at_most(
    factor: int, stride: int | None, plane_count: int, block_count: int
) -> None:
    """However many blocks and planes there are."""
    addresses = (MIB * 64 * (1 + index) for index in range(plane_count))
    layout = layout_of(addresses, num_blocks=4096, blocks_per_slot=factor, block_stride=stride)
    action = scattered_blocks(layout, block_count, 4096)
    action()
    calls = python_calls(action)
    assert len(calls) <= 8, calls


def test_planning_of_planes_that_do_not_fold_costs_as_many_python_calls() -> None:
    layout = layout_of((MIB * 64 * (65 - index) for index in range(64)), num_blocks=4096)
    action = scattered_blocks(layout, 8, 4096)
    assert len(action()) == 8 * 64
    assert len(python_calls(action)) <= 8


def test_columns_that_are_the_same_for_all_operations_hold_one_value() -> None:
    layout = layout_of(MIB * 64 * (1 + index) for index in range(64))
    made = scattered_blocks(layout, 8, 8)()
    assert len(made) == 8
    assert [len(each) for each in (made.width, made.height, made.device_pitch, made.host_pitch)] == [1] * 4


def test_folding_random_planes_compares_each_pair_once_at_most() -> None:
    """Folding follows a progression only from where it could be longer than the longest found so far."""
    addresses = (np.random.default_rng(0).permutation(4096)[:160] + 1) * MIB
    calls = python_calls(lambda: fold(layout_of(addresses.tolist())))
    assert calls.count("_follow") <= 160 * 160 / 2

"""The hazard table against a naive list of everything that ever touched a slot or a byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import rest_long

from kvoffload import KVLayout, Plane
from kvoffload.engine.hazards import HazardTable
from kvoffload.planning.transfer_plan import Direction


def plane(address: int, block_bytes: int = 16, num_blocks: int = 8, stride: int | None = None) -> Plane:
    return Plane(address, block_bytes=block_bytes, num_blocks=num_blocks, block_stride=stride)


LAYOUTS = {
    "one": KVLayout([[plane(4096), plane(8192)]]),
    "apart": KVLayout([[plane(4096)], [plane(8192)], [plane(12288)]]),
    "same": KVLayout([[plane(4096), plane(8192)], [plane(8192), plane(4096)]]),
    "same, counts differ": KVLayout([[plane(4096, num_blocks=4)], [plane(4096)], [plane(4096, num_blocks=6)]]),
    "subset": KVLayout([[plane(4096), plane(8192)], [plane(8192)]]),
    "shifted": KVLayout([[plane(4096)], [plane(4096 + 64)]]),
    "other sizes": KVLayout([[plane(4096, 32, 4)], [plane(4096)], [plane(16384)]]),
    "chained": KVLayout([[plane(4096)], [plane(4096 + 112)], [plane(4096 + 224)], [plane(65536)]]),
    "interleaved": KVLayout([[plane(4096, 16, 8, 32)], [plane(4112, 16, 8, 32)]]),
    "nested": KVLayout([[plane(4096, 64, 32)], [plane(4096 + 128, 64, 2)], [plane(4096 + 640, 64, 2)]]),
    "order": KVLayout([[plane(65536)], [plane(4096)], [plane(65536 + 64)], [plane(4096 + 16)]]),
}


def touched(layout: KVLayout, group: int, blocks: list[int]) -> set[int]:
    """Addresses of every byte of these blocks."""
    return {
        each.address + block * each.block_stride + offset
        for each in layout.groups[group].planes
        for block in blocks
        for offset in range(each.block_bytes)
    }


@pytest.mark.parametrize("name", rest_long(LAYOUTS, 4))
@settings(max_examples=40)
@given(data=st.data())
def test_never_misses_a_transfer_that_touched_the_same_bytes(name: str, data: st.DataObject) -> None:
    layout = LAYOUTS[name]
    table = HazardTable(layout, num_slots=6)
    history: list[tuple[Direction, set[int], set[int], int]] = []
    for sequence in range(1, data.draw(st.integers(1, 8)) + 1):
        direction = data.draw(st.sampled_from(list(Direction)))
        group = data.draw(st.integers(0, layout.num_groups - 1))
        count = layout.groups[group].num_blocks
        blocks = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True))
        slots = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True))
        block_ids, slot_ids = np.array(blocks), np.array(slots)
        bytes_touched = touched(layout, group, blocks)
        for other in Direction:
            on_slots = [s for method, at, _, s in history if method is other and at & set(slots)]
            on_bytes = [s for method, _, at, s in history if method is other and at & bytes_touched]
            assert table.latest_on_slots(other, slot_ids) == max(on_slots, default=0)
            assert table.latest_on_blocks(other, group, block_ids) >= max(on_bytes, default=0)
            if name in ("one", "apart", "same"):
                assert table.latest_on_blocks(other, group, block_ids) == max(on_bytes, default=0)
        table.record(direction, group, slot_ids, block_ids, sequence)
        history.append((direction, set(slots), bytes_touched, sequence))


def test_nothing_touched_and_nothing_asked() -> None:
    table = HazardTable(LAYOUTS["one"], num_slots=4)
    nothing = np.empty(0, dtype=np.int64)
    assert table.latest_on_slots(Direction.STORE, nothing) == 0
    assert table.latest_on_blocks(Direction.LOAD, 0, nothing) == 0
    assert table.latest_on_slots(Direction.STORE, np.arange(4)) == 0


def test_groups_apart_do_not_hinder_each_other() -> None:
    table = HazardTable(LAYOUTS["order"], num_slots=4)
    table.record(Direction.STORE, 0, np.array([0]), np.array([0]), 5)
    assert table.latest_on_blocks(Direction.STORE, 2, np.array([7])) == 5, "overlapping groups share an entry"
    assert table.latest_on_blocks(Direction.STORE, 1, np.array([0])) == 0
    assert table.latest_on_blocks(Direction.STORE, 3, np.array([0])) == 0


def test_when_the_order_is_forgotten_all_that_may_be_in_flight_counts_as_the_latest() -> None:
    """Transfers 1 and 2 have ended; 3 to 5, of which nobody knows any more which is which, have not."""
    table = HazardTable(LAYOUTS["one"], num_slots=6)
    for sequence in range(1, 6):
        table.record(Direction.LOAD, 0, np.array([sequence]), np.array([sequence]), sequence)
        table.record(Direction.STORE, 0, np.array([sequence]), np.array([sequence]), sequence)
    table.forget_order(Direction.LOAD, ended=2, latest=7)
    expected = [0, 1, 2, 7, 7, 7]
    assert [table.latest_on_slots(Direction.LOAD, np.array([slot])) for slot in range(6)] == expected
    assert [table.latest_on_blocks(Direction.LOAD, 0, np.array([block])) for block in range(6)] == expected
    assert [table.latest_on_slots(Direction.STORE, np.array([slot])) for slot in range(6)] == list(range(6))


def test_a_group_inside_another_one_shares_its_entry_also_behind_a_third() -> None:
    """The third group begins behind the end of the second one, and before that of the first."""
    table = HazardTable(LAYOUTS["nested"], num_slots=4)
    table.record(Direction.STORE, 2, np.array([0]), np.array([1]), 5)
    assert table.latest_on_blocks(Direction.STORE, 0, np.array([11])) == 5
    assert table.sharing_memory([2]) == [{0, 1, 2}]

"""The ring of tables: no two that are out share a byte, none leaves the memory, all of it comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvoffload.copiers.table_arena import Table, TableArena
from kvoffload.driver import address_of

NBYTES = 1024
DEVICE_ADDRESS = 0x7000_0000


def make_arena(nbytes: int = NBYTES) -> tuple[TableArena, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    memory = np.zeros(nbytes, dtype=np.uint8)
    return TableArena(memory, DEVICE_ADDRESS), memory


class Ring(RuleBasedStateMachine):
    """Takes and gives back in any order. Every table is filled with a number of its own when it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.arena, self.memory = make_arena()
        self.out: list[tuple[Table, int]] = []
        self.taken = 0

    @rule(count=st.integers(1, NBYTES // 8))
    def take(self, count: int) -> None:
        table = self.arena.take(count)
        if table is None:
            assert self.out, "an arena of which nothing is out has room"
            return
        self.taken += 1
        assert table.words.shape == (count,)
        start = address_of(table.words) - address_of(self.memory)
        assert start % 64 == 0
        assert table.device_address == DEVICE_ADDRESS + start
        assert 0 <= start <= start + 8 * count <= NBYTES
        table.words[:] = self.taken
        self.out.append((table, self.taken))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table, _ = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        table.release()

    @precondition(lambda self: self.out)
    @rule()
    def release_the_oldest(self) -> None:
        self.out.pop(0)[0].release()

    @invariant()
    def no_table_that_is_out_has_changed(self) -> None:
        assert all((table.words == number).all() for table, number in self.out)
        assert self.arena.in_use == len(self.out)

    def teardown(self) -> None:
        for table, _ in self.out:
            table.release()
        assert self.arena.take(NBYTES // 8) is not None, "all of it has come back"


TestRing = Ring.TestCase


@given(counts=st.lists(st.integers(1, 40), min_size=1, max_size=60), held=st.integers(1, 3))
def test_tables_given_back_in_order_never_stop_the_ring(counts: list[int], held: int) -> None:
    """At most three are out, of at most 320 bytes each: two gaps at the seam of the ring leave room for that."""
    arena, _ = make_arena(4 * NBYTES)
    out: list[Table] = []
    for count in counts:
        table = arena.take(count)
        assert table is not None
        out.append(table)
        if len(out) > held:
            out.pop(0).release()


def test_a_full_ring_has_no_room_until_its_oldest_table_is_back() -> None:
    arena, _ = make_arena()
    tables = [arena.take(8) for _ in range(NBYTES // 64)]
    assert None not in tables
    assert arena.take(1) is None
    newest, oldest = tables[-1], tables[0]
    assert newest is not None
    assert oldest is not None
    newest.release()
    assert arena.take(1) is None, "the ring is taken in from its old end"
    oldest.release()
    assert arena.take(1) is None, "full and empty must differ"
    second = tables[1]
    assert second is not None
    second.release()
    again = arena.take(8)
    assert again is not None
    assert again.start == 0


def test_releasing_twice_takes_no_other_tables_room() -> None:
    arena, _ = make_arena()
    first = arena.take(100)
    assert first is not None
    first.release()
    second = arena.take(100)
    assert second is not None
    assert second.start == first.start
    first.release()
    assert arena.in_use == 1
    assert arena.take(100) is None


@pytest.mark.parametrize("count", [NBYTES // 8 + 1, NBYTES])
def test_a_table_larger_than_the_arena_finds_no_room(count: int) -> None:
    arena, _ = make_arena()
    assert arena.take(count) is None
    assert arena.in_use == 0


def test_after_an_interrupt_tables_in_use_keep_their_room() -> None:
    """Where the ring was written last is forgotten, which tables are in use is not."""
    arena, _ = make_arena()
    tables = [arena.take(16) for _ in range(4)]
    assert None not in tables
    used = [table for table in tables[1:3] if table is not None]
    for number, each in enumerate(used):
        each.words[:] = number
    arena.restore(used)
    assert arena.in_use == 2
    taken = []
    while (table := arena.take(16)) is not None:
        table.words[:] = 7
        taken.append(table.start)
    assert taken == [384, 512, 640, 768, 896], "behind those in use"
    assert [set(each.words.tolist()) for each in used] == [{0}, {1}]
    arena.restore([])
    whole = arena.take(NBYTES // 8)
    assert whole is not None
    assert whole.start == 0

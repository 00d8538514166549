"""`status_of`: one key, counted as a lookup."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers import key, keys, rig, simulated

from kvoffload import NO_WAIT, BlockCache, CacheEvent, CacheIndex, ClosedError, LayoutError, Status
from kvoffload.cache.policies import LRU

MISS, HIT, PENDING = Status.MISS, Status.HIT, Status.PENDING


def test_it_says_what_status_says_and_counts_what_lookup_counts() -> None:
    told: list[CacheEvent] = []
    index = CacheIndex(4, on_event=told.append)
    index.reserve(keys(0)).commit()
    with index.reserve(keys(1)):
        found = []
        for name in keys(0, 1, 2):
            told.clear()
            found.append((index.status_of(name), list(told)))
            mine = list(told)
            told.clear()
            assert index.lookup([name]) == (found[-1][0] is HIT)
            assert told == mine, "the same event"
        assert [status for status, _ in found] == index.status(keys(0, 1, 2)) == [HIT, PENDING, MISS]
    assert (index.statistics().lookups, index.statistics().hits) == (6, 2)


def test_misses_are_lookups_for_store_after() -> None:
    index = CacheIndex(4, store_after=2)
    for status in (MISS, MISS):
        assert index.reserve(keys(0)).declined == (key(0),)
        assert index.status_of(key(0)) is status
    with index.reserve(keys(0)) as reservation:
        assert reservation.keys == (key(0),)
        assert index.status_of(key(0)) is PENDING
    index.remove(keys(0))
    assert index.reserve(keys(0)).declined == (key(0),), "a pending key was not missing"


@pytest.mark.parametrize("wrong", ["text", 5, None, [b"a"]])
def test_a_key_is_bytes(wrong: Any) -> None:
    index = CacheIndex(4)
    with pytest.raises(LayoutError):
        index.status_of(wrong)
    assert index.statistics().lookups == 0


def test_a_subclass_of_bytes_is_taken_for_its_bytes() -> None:
    class Key(bytes):
        def __hash__(self) -> int:
            raise ZeroDivisionError

    index = CacheIndex(4)
    index.reserve(keys(0)).commit()
    assert index.status_of(Key(key(0))) is HIT


def test_no_thread_sees_a_key_between_its_reservation_and_its_bytes() -> None:
    """A thread asks while another one's call is inserting the key into the policy."""
    seen: list[Status] = []
    threads: list[threading.Thread] = []

    class Slow(LRU):
        def insert(self, keys: Sequence[bytes]) -> None:
            threads.append(threading.Thread(target=lambda: seen.append(index.status_of(keys[0]))))
            threads[-1].start()
            threads[-1].join(0.05)
            assert seen == [], "it waits for the call to end"
            super().insert(keys)

    index = CacheIndex(4, policy=Slow)
    reservation = index.reserve(keys(0))
    threads[0].join(10)
    assert seen == [PENDING]
    reservation.commit()
    assert index.status_of(key(0)) is HIT


class Meanwhile(dict[bytes, int]):
    """The keys of a table; once one of them has been found, another thread does something."""

    def __init__(self, of: dict[bytes, int], call: Callable[[], object]) -> None:
        super().__init__(of)
        self._calls = [call]

    def __contains__(self, name: object) -> bool:
        found = super().__contains__(name)
        if found and self._calls:
            thread = threading.Thread(target=self._calls.pop())
            thread.start()
            thread.join(0.2)
        return found


def test_a_key_that_changes_while_it_is_looked_up_is_looked_up_again() -> None:
    """It was pending when it was found, and is gone when it is looked for among the pending ones."""
    index = CacheIndex(4)
    reservation = index.reserve(keys(0))
    table = index._state.table
    table.of = Meanwhile(table.of, reservation.abort)
    assert index.status_of(key(0)) is MISS
    assert (index.statistics().lookups, index.statistics().hits) == (1, 0)


def test_a_key_that_a_call_is_changing_is_no_hit() -> None:
    """The other thread's call aborts two dropped reservations, and has aborted that of this key."""
    asked: list[float] = []

    def in_flight() -> tuple[()]:
        asked.append(0.0)
        if len(asked) == 2:
            ended.wait(0.5)
        return ()

    ended = threading.Event()
    index = CacheIndex(4)
    index._state.in_flight.append(in_flight)
    mine, other = index.reserve(keys(0)), index.reserve(keys(1))
    del mine
    del other
    table = index._state.table
    table.of = Meanwhile(table.of, lambda: index.lookup([]))
    assert index.status_of(key(0)) is MISS
    ended.set()


def test_a_policy_must_not_ask() -> None:
    asked: list[bytes] = []

    class Asking(LRU):
        def insert(self, keys: Sequence[bytes]) -> None:
            if not asked:
                asked.extend(keys)
                index.status_of(keys[0])
            super().insert(keys)

    index = CacheIndex(4, policy=Asking)
    with pytest.raises(RuntimeError, match="in the middle of another call"):
        index.reserve(keys(0))
    assert index.status_of(key(0)) is MISS
    index.check()


def test_it_settles_what_has_ended_and_what_was_abandoned() -> None:
    with simulated() as device, rig(device) as bench:
        cache = BlockCache(bench.engine)
        gate = bench.gate(stream := bench.stream())
        job = cache.store(keys(0), [0], after=stream)
        assert cache.status_of(key(0)) is PENDING
        gate.open()
        bench.engine.drain(10)
        assert cache.status_of(key(0)) is HIT
        job.wait(10)
        cache.reserve(keys(1))
        assert cache.status_of(key(1)) is MISS, "the reservation is garbage"
        cache.check()
        bench.engine.close()
        with pytest.raises(ClosedError):
            cache.status_of(key(0))


def test_a_store_that_failed_is_no_hit() -> None:
    with simulated(level="no-batch") as device, rig(device) as bench:
        cache, simulator = BlockCache(bench.engine), device.simulator
        assert simulator is not None
        simulator.faults.fail_call("cuEventRecord", nth=2)
        cache.store(keys(0), [0], after=NO_WAIT)
        bench.engine.drain(10)
        assert cache.status_of(key(0)) is MISS

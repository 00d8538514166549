"""CacheIndex: what is reserved, committed, leased, removed, told and counted. No device."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from caching import state, store
from counting import steps
from helpers import in_threads, key, keys

from kvoffload import (
    CacheEvent,
    CacheIndex,
    CapacityError,
    ClosedError,
    KVOffloadWarning,
    LayoutError,
    MissingKeyError,
    Status,
    Tenant,
)
from kvoffload.cache import statistics as recorder
from kvoffload.cache.entries import EntryTable
from kvoffload.cache.policies import LRU, POLICIES, Prefix
from kvoffload.cache.record_calls import leading

MISS, HIT, PENDING = Status.MISS, Status.HIT, Status.PENDING


@pytest.fixture(params=POLICIES)
def index(request: pytest.FixtureRequest) -> Iterator[CacheIndex]:
    """Four keys, whatever the policy; sound at the end."""
    made = CacheIndex(4, policy=request.param)
    yield made
    made.check()


def free_entries(index: CacheIndex) -> int:
    """How many new keys can be reserved without giving any up."""
    return index._state.table.num_free


# reserve, commit, abort


def test_a_key_is_missing_then_pending_then_a_hit(index: CacheIndex) -> None:
    assert index.status(keys(0, 1)) == [MISS, MISS]
    reservation = index.reserve(keys(0, 1))
    assert (reservation.keys, reservation.positions, reservation.tenant) == (tuple(keys(0, 1)), (0, 1), "")
    assert (reservation.evicted, reservation.declined, reservation.present) == ((), (), ())
    assert len(set(reservation.indices)) == 2
    assert index.status(keys(0, 1, 2)) == [PENDING, PENDING, MISS]
    assert index.lookup(keys(0, 1)) == 0
    assert len(index) == 2
    reservation.commit()
    assert index.status(keys(2, 1, 0)) == [MISS, HIT, HIT]
    assert index.lookup(keys(0, 1, 2)) == 2


def test_a_block_commits_and_an_exception_aborts(index: CacheIndex) -> None:
    with index.reserve(keys(0)):
        assert index.status(keys(0)) == [PENDING]
    assert index.status(keys(0)) == [HIT]
    with pytest.raises(ZeroDivisionError), index.reserve(keys(1)):
        raise ZeroDivisionError
    assert index.status(keys(0, 1)) == [HIT, MISS]


def test_a_block_that_settles_by_itself_is_left_alone(index: CacheIndex) -> None:
    with index.reserve(keys(0)) as reservation:
        reservation.abort()
    reservation = index.reserve(keys(1))
    reservation.commit()
    with pytest.raises(ZeroDivisionError), reservation:
        raise ZeroDivisionError
    assert index.status(keys(0, 1)) == [MISS, HIT]


@pytest.mark.parametrize("first", ["commit", "abort"])
@pytest.mark.parametrize("second", ["commit", "abort"])
def test_pitfall_25_a_reservation_is_settled_once(
    index: CacheIndex, first: Literal["commit", "abort"], second: Literal["commit", "abort"]
) -> None:
    """A second settlement would free entries that others have by now, or make hits of what was given up."""
    store(index, keys(5))
    reservation = index.reserve(keys(0, 1))
    getattr(reservation, first)()
    other = index.reserve(keys(2, 3)) if first == "abort" else index.reserve(keys(2))
    before = state(index)
    for _ in range(2):
        with pytest.raises(ClosedError, match=f"2 keys has been settled before: it is {first}"):
            getattr(reservation, second)()
        assert state(index) == before
    other.abort()


def test_commits_take_jobs_and_nothing_else(index: CacheIndex) -> None:
    reservation = index.reserve(keys(0))
    before = state(index)
    wrong: Any = "job"
    with pytest.raises(TypeError, match=r"jobs\[0\] must be what OffloadEngine.store returned, got 'job'"):
        reservation.commit(wrong)
    assert state(index) == before
    reservation.commit()
    assert index.status(keys(0)) == [HIT]


def test_entries_of_open_reservations_and_resident_keys_are_distinct(index: CacheIndex) -> None:
    store(index, keys(0))
    first, second = index.reserve(keys(1)), index.reserve(keys(2, 3))
    lease = index.acquire(keys(0))
    assert sorted(first.indices + second.indices + lease.indices) == [0, 1, 2, 3]
    assert list(second.slots()) == list(second.indices)
    assert (str(second.slots().dtype), lease.slots().shape) == ("int64", (1,))
    lease.release()
    first.abort()
    second.abort()


def test_a_refusal_counts_keys_and_free_entries() -> None:
    index = CacheIndex(5)
    store(index, keys(0, 1))
    with (
        index.acquire(keys(0)),
        pytest.raises(CapacityError, match=r"5 keys find 3 entries free \(capacity 5\), and too few of 2 "),
    ):
        index.reserve(keys(2, 3, 4, 5, 6), all_or_nothing=True)


def test_an_empty_reservation_is_legal(index: CacheIndex) -> None:
    with index.reserve([]) as reservation:
        assert (reservation.keys, list(reservation.slots())) == ((), [])
    assert index._state.table.reservations == set()


def test_keys_that_lie_apart_or_side_by_side_are_found_alike(seed: int) -> None:
    """Lookups compare runs of neighbours; these are runs of every length, and each may be cut short anywhere."""
    index = CacheIndex(600, policy="lru")
    wanted: list[bytes] = []
    for length in (1, 7, 8, 9, 40, 3, 16, 17, 64, 100):
        wanted += [b"%d-%d" % (length, place) for place in range(length)]
        store(index, wanted[-length:])
        store(index, [b"between-%d" % length])
    assert index.lookup(wanted) == len(wanted)
    order = [(seed + 7 * step) % len(wanted) for step in range(len(wanted))]
    for gone in order[:60]:
        index.remove([wanted[gone]])
        expected = next(place for place, name in enumerate(wanted) if index.status([name]) == [MISS])
        assert index.lookup(wanted) == expected
        assert index.lookup([*wanted[:expected], b"other"]) == expected
    index.check()


def in_runs_of(length: int) -> tuple[EntryTable, list[bytes]]:
    """16,384 keys, so many of which have adjacent entries."""
    index = CacheIndex(1 << 15, policy="lru")
    wanted = [b"%d" % number for number in range(1 << 14)]
    for start in range(0, len(wanted), length):
        for names in (wanted[start : start + length], [b"between-%d" % start]):
            store(index, names)
    return index._state.table, wanted


def test_many_short_runs_cost_little_more_than_one_long_one() -> None:
    """A lookup takes as many steps as there are runs, not as many as runs times keys; below 8 keys no run is sought."""

    def steps_of(length: int) -> int:
        table, wanted = in_runs_of(length)
        found: list[int] = []
        count = steps(lambda: found.append(leading(table, wanted)))
        assert found == [len(wanted)]
        return count

    together, apart, scattered = map(steps_of, (1 << 14, 8, 4))
    assert apart < together + 16 * (1 << 11)
    assert scattered < 64


@pytest.mark.parametrize(("length", "most"), [(1 << 14, 16), (64, 512)])
def test_of_keys_with_adjacent_entries_few_are_looked_up(length: int, most: int) -> None:
    class Counting(dict[bytes, int]):
        asked = 0

        def get(self, key: bytes, default: Any = None) -> Any:
            self.asked += 1
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            self.asked += 1
            return super().__contains__(key)

    table, wanted = in_runs_of(length)
    table.of = counting = Counting(table.of)
    assert leading(table, wanted) == len(wanted)
    assert counting.asked <= most


# leases


def test_entries_are_held_and_loaded_in_one_call(index: CacheIndex) -> None:
    """The record is kept only if the call succeeds; the keys are the request's, and stay until the release."""
    store(index, keys(0, 1, 2))
    kept: list[Any] = []
    with index.open_request() as request:
        with pytest.raises(MissingKeyError, match=r"keys\[1\]"):
            index.records.hold(([key(0), key(99)], kept, request._record, [key(0)]))
        assert (kept, request.keys, index.statistics().pinned) == ([], (), 0)
        record = index.records.hold((keys(0, 2), kept, request._record, keys(0, 2)))
        assert kept == [record]
        assert request.keys == tuple(keys(0, 2))
        assert index.statistics().pinned == 2
        index.records.release(record)
        index.records.release(record)
        assert index.statistics().pinned == 0
        index.check()


def test_every_lease_of_a_key_counts(index: CacheIndex) -> None:
    store(index, keys(0, 1, 2, 3))
    first, second = index.acquire(keys(0, 1, 2, 3)), index.acquire(keys(0))
    first.release()
    assert key(0) not in store(index, keys(4, 5, 6)).evicted
    with pytest.raises(CapacityError), index.acquire(keys(4, 5, 6)):
        index.reserve(keys(7), all_or_nothing=True)
    second.release()
    assert index.statistics().pinned == 0


def test_releasing_twice_lets_nobody_elses_lease_go(index: CacheIndex) -> None:
    store(index, keys(0))
    first, second = index.acquire(keys(0, 0)), index.acquire(keys(0))
    assert (first.keys, first.indices[0], repr(first)) == (tuple(keys(0, 0)), first.indices[1], "Lease(2 keys, held)")
    with first:
        first.release()
        before = state(index)
        first.release()
    assert (state(index), repr(first)) == (before, "Lease(2 keys, released)")
    assert index.statistics().pinned == 1
    second.release()
    assert (index.statistics().pinned, index.statistics().loaded) == (0, 0)


def test_only_hits_can_be_leased(index: CacheIndex) -> None:
    store(index, keys(0))
    reservation = index.reserve(keys(1))
    before = state(index)
    with pytest.raises(MissingKeyError, match=r"keys\[1\] \(6b65792d37\) is not in the cache"):
        index.acquire(keys(0, 7))
    with pytest.raises(MissingKeyError, match=r"keys\[2\] .* is still being stored"):
        index.acquire(keys(0, 0, 1))
    with pytest.raises(MissingKeyError, match=r"keys\[0\] .* is reserved, and no transfer"):
        index.acquire(keys(1), pending=True)
    assert state(index) == before
    with index.acquire(keys(0), pending=True) as lease:
        assert lease.pending == ()
        lease.wait()
        lease.check()
    reservation.abort()


def test_an_exception_in_its_block_releases_a_lease(index: CacheIndex) -> None:
    store(index, keys(0))
    with pytest.raises(ZeroDivisionError), index.acquire(keys(0)):
        raise ZeroDivisionError
    assert index.statistics().pinned == 0


# remove, clear


@pytest.mark.parametrize("end", ["commit", "abort"])
@pytest.mark.parametrize("call", ["remove", "clear"])
def test_pitfall_25_what_is_removed_while_being_stored_goes_nowhere(index: CacheIndex, call: str, end: str) -> None:
    store(index, keys(0))
    old = index.reserve(keys(1, 2))
    removed = index.remove(keys(1, 9, 1)) if call == "remove" else index.clear()
    assert removed == (1 if call == "remove" else 3)
    assert index.status(keys(1)) == [MISS]
    assert index.status(keys(2)) == [PENDING if call == "remove" else MISS]
    again = index.reserve(keys(1))
    assert not set(again.indices) & set(old.indices), "the old entry may still be written"
    index.check()
    spare = free_entries(index)
    getattr(old, end)()
    index.check()
    assert free_entries(index) == spare + (1 if call == "remove" and end == "commit" else 2), "back exactly once"
    assert index.status(keys(1)) == [PENDING], "of the new reservation"
    assert index.status(keys(2)) == [HIT if call == "remove" and end == "commit" else MISS]
    again.commit()
    assert index.status(keys(1)) == [HIT]
    statistics = index.statistics()
    assert statistics.stored == 2 + (call == "remove" and end == "commit")
    assert statistics.failed == int(call == "remove" and end == "abort"), "what was removed has not failed as well"
    assert statistics.removed == (call == "clear"), "of key 0, which alone was announced"


@pytest.mark.parametrize("call", ["remove", "clear"])
def test_what_is_removed_while_being_read_keeps_its_entry(index: CacheIndex, call: str) -> None:
    store(index, keys(0, 1))
    first, second = index.acquire(keys(0, 1)), index.acquire(keys(0))
    assert (index.remove(keys(0, 1)) if call == "remove" else index.clear()) == 2
    assert (index.status(keys(0, 1)), len(index)) == ([MISS, MISS], 0)
    assert (free_entries(index), index.statistics().pinned) == (2, 2)
    again = index.reserve(keys(0, 1))
    assert not set(again.indices) & set(first.indices)
    with pytest.raises(CapacityError):
        index.reserve(keys(2), all_or_nothing=True)
    first.release()
    first.release()
    assert free_entries(index) == 1, "the other is read by somebody else as well"
    index.check()
    second.release()
    assert free_entries(index) == 2
    again.commit()
    assert store(index, keys(2, 3)).evicted == ()
    assert index.lookup(keys(0, 1, 2, 3)) == 4


def test_removing_nothing(index: CacheIndex) -> None:
    assert index.remove([]) == index.remove(keys(1)) == index.clear() == 0
    assert index.statistics().removed == 0


# uses


def test_touch_of_absent_and_repeated_keys(index: CacheIndex) -> None:
    store(index, keys(0, 1))
    index.touch(keys(7, 0, 7, 0, 8))
    assert (len(index), index.status(keys(7, 8))) == (2, [MISS, MISS])
    index.touch([])
    index.check()
    distances = index.statistics().reuse_distance_blocks
    assert sum(distances.counts) == 0
    index.touch(keys(0))
    assert index.statistics().reuse_distance_blocks.total == 0, "nothing lay between, and repeats count once"


def test_recency_follows_touch() -> None:
    index = CacheIndex(4, policy="lru")
    store(index, keys(0, 1, 2, 3))
    index.lookup(keys(3))
    index.status(keys(3))
    index.acquire(keys(3)).release()
    assert list(index._state.pools.all[0].policy) == keys(3, 2, 1, 0)
    index.touch(keys(2, 9, 3, 2))
    assert list(index._state.pools.all[0].policy) == keys(1, 0, 3, 2)
    index.load(keys(1, 1))
    assert list(index._state.pools.all[0].policy) == keys(0, 3, 2, 1)


def test_loads_of_absent_keys_are_passed_over(index: CacheIndex) -> None:
    """A policy must never learn of keys that are not there: it would give them up one day."""
    store(index, keys(0, 1))
    index.load(keys(7, 0, 8))
    index.check()
    assert index.status(keys(7, 8)) == [MISS, MISS]
    store(index, keys(2, 3))
    store(index, keys(4, 5, 6, 9))
    assert index.lookup(keys(4, 5, 6, 9)) == 4


# lookups


def test_lookup_many_asks_for_each(index: CacheIndex) -> None:
    store(index, keys(0, 1))
    reservation = index.reserve(keys(2))
    requests = [keys(0, 1, 2), keys(2, 0), [], keys(1), keys(0, 9, 1)]
    assert index.lookup_many(requests) == [2, 0, 0, 1, 1] == [index.lookup(request) for request in requests]
    assert index.statistics().lookups == 2 * 9
    assert index.lookup_many([]) == []
    reservation.commit()
    assert index.lookup_many(requests) == [3, 2, 0, 1, 1]


# events


def told(kind: Any, *numbers: int, tenant: str = "") -> CacheEvent:
    return CacheEvent(kind, tuple(keys(*numbers)), tenant)


def test_events_in_their_order() -> None:
    events: list[CacheEvent] = []
    index = CacheIndex(
        2, policy="lru", tenants={"tenant": Tenant(), "other": Tenant()}, store_after=1, on_event=events.append
    )

    def new() -> list[CacheEvent]:
        found = events[:]
        events.clear()
        return found

    index.lookup_many([keys(0, 1), keys(2, 3)])
    assert new() == [told("miss", 0, 1), told("miss", 2, 3)]
    reservation = index.reserve(keys(0, 9, 1), tenant="tenant")
    assert new() == [told("declined", 9, tenant="tenant")]
    reservation.commit()
    assert new() == [told("stored", 0, 1, tenant="tenant")]
    index.lookup(keys(0, 1, 5))
    assert new() == [told("hit", 0, 1), told("miss", 5)]
    index.reserve(keys(2), tenant="other").abort()
    assert new() == [told("evicted", 1), told("failed", 2, tenant="other")]
    index.acquire(keys(0)).release()
    index.touch(keys(0))
    index.status(keys(0))
    assert new() == []
    index.lookup(keys(3))
    reservation = index.reserve(keys(3))
    index.remove(keys(0, 7))
    index.clear()
    reservation.commit()
    assert new() == [told("miss", 3), told("removed", 0)], "nothing for no keys, nor for one that was not announced"


def test_a_refused_call_tells_nothing() -> None:
    events: list[CacheEvent] = []
    index = CacheIndex(2, policy="lru", on_event=events.append)
    lease = (store(index, keys(0, 1)), index.acquire(keys(0)))[1]
    events.clear()
    with pytest.raises(CapacityError):
        index.reserve(keys(2, 3), all_or_nothing=True)
    with pytest.raises(LayoutError):
        index.reserve(keys(2, 2))
    assert events == []
    lease.release()


def test_a_hook_may_call_the_cache_and_so_may_others_meanwhile() -> None:
    """The lock is free while a hook runs: another thread gets through, too."""
    seen: list[tuple[CacheEvent, list[Status], int]] = []

    def hook(event: CacheEvent) -> None:
        found: list[int] = []
        if event.kind == "stored":
            other = threading.Thread(target=lambda: found.append(len(cache.status(keys(0, 1)))))
            other.start()
            other.join(10)
            assert not other.is_alive()
        seen.append((event, cache.status(list(event.keys)), len(cache)))

    cache = CacheIndex(2, policy="lru", on_event=hook)
    store(cache, keys(0, 1))
    assert seen == [(told("stored", 0, 1), [HIT, HIT], 2)]
    store(cache, keys(2))
    assert seen[1:] == [(told("evicted", 1), [MISS], 2), (told("stored", 2), [HIT], 2)]


def test_what_a_hook_causes_is_told_after_what_came_before_it() -> None:
    seen: list[CacheEvent] = []

    def hook(event: CacheEvent) -> None:
        seen.append(event)
        if event == told("miss", 4):
            cache.remove(keys(1))
            assert seen[-1] == event, "the event of that call waits"

    cache = CacheIndex(4, policy="lru", on_event=hook)
    store(cache, keys(0, 1))
    seen.clear()
    cache.lookup_many([keys(4), keys(5), keys(6)])  # one call with three events
    assert seen == [told("miss", 4), told("miss", 5), told("miss", 6), told("removed", 1)]


def test_hooks_hear_of_all_threads_calls_in_order() -> None:
    """While a hook dawdles over one event in one thread, another thread's calls come to their end."""
    seen: list[CacheEvent] = []
    started, go_on = threading.Event(), threading.Event()

    def hook(event: CacheEvent) -> None:
        if event == told("stored", 0):
            started.set()
            assert go_on.wait(10)
        seen.append(event)

    index = CacheIndex(4, policy="lru", on_event=hook)

    def first() -> None:
        store(index, keys(0))

    def second() -> None:
        assert started.wait(10)
        index.remove(keys(0))
        store(index, keys(0, 1))
        go_on.set()

    in_threads(first, second)
    assert seen == [told("stored", 0), told("removed", 0), told("stored", 0, 1)]


def test_a_hook_that_raises_is_a_warning() -> None:
    seen: list[str] = []

    def hook(event: CacheEvent) -> None:
        seen.append(event.kind)
        raise LookupError("not today")

    index = CacheIndex(2, policy="lru", on_event=hook)
    reservation = index.reserve(keys(0, 1))
    with pytest.warns(
        KVOffloadWarning, match=r"on_event raised LookupError\('not today'\); the cache goes on"
    ) as noted:
        reservation.commit()
    assert len(noted) == 1
    with pytest.warns(KVOffloadWarning) as noted:
        second = index.reserve(keys(2, 3))
    assert (len(noted), seen) == (1, ["stored", "evicted"])
    with pytest.warns(KVOffloadWarning), pytest.raises(ZeroDivisionError), second:
        raise ZeroDivisionError
    assert seen == ["stored", "evicted", "failed"]
    assert (len(index), free_entries(index)) == (0, 2)
    index.check()


# statistics


def test_statistics_count_keys(index: CacheIndex) -> None:
    store(index, keys(0, 1, 2))
    index.lookup(keys(0, 1, 5, 2))
    index.lookup_many([keys(2), keys(6)])
    index.reserve(keys(3)).abort()
    pending = index.reserve(keys(3))
    lease = index.acquire(keys(0, 0, 2))
    evicting = index.reserve(keys(4))
    index.remove(keys(0))
    found = index.statistics()
    assert (found.capacity, found.resident, found.pending, found.pinned) == (4, 1, 2, 2)
    assert (found.lookups, found.hits, found.stored, found.loaded) == (6, 3, 3, 0)
    assert (found.evicted, found.failed, found.declined, found.removed) == (1, 1, 0, 1)
    assert evicting.evicted == tuple(keys(1))
    pending.commit()
    evicting.commit()
    assert (index.statistics().resident, index.statistics().pending, index.statistics().stored) == (3, 0, 5)
    assert not lease.released


def test_how_long_evicted_keys_had_been_there(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(recorder, "time", SimpleNamespace(monotonic=lambda: now[0]))
    index = CacheIndex(2, policy="lru")
    bounds = index.statistics().residency_seconds.bounds
    assert (bounds[0], bounds[5], bounds[6], bounds[-1], len(bounds)) == (4.0**-5, 1.0, 4.0, 4.0**11, 17)
    early = index.reserve(keys(0))
    now[0] = 1010.0
    early.commit()  # the time counts from here
    store(index, keys(1))
    for number, seconds in ((2, 4.0), (3, 0.25), (4, 100.0)):  # gone: 0 after 4 s, 1 after 4.25 s, 2 after 100.25 s
        now[0] += seconds
        store(index, keys(number))
    index.remove(keys(4))
    now[0] += 1e9
    store(index, keys(5))
    store(index, keys(6))  # gone: 3
    found = index.statistics().residency_seconds
    expected = [0] * 18
    expected[6], expected[7], expected[9], expected[17] = 1, 1, 1, 1
    assert found.counts == tuple(expected)
    assert found.total == 4.0 + 4.25 + 100.25 + (1e9 + 100.0)
    now[0] += 1.0
    store(index, keys(7))  # gone: 5
    now[0] -= 1.0 - 4.0**-5
    assert index.statistics().residency_seconds.counts[5] == 1
    assert sum(index.statistics().residency_seconds.counts) == 5, "what was removed was not evicted"


def test_how_many_blocks_lay_between_two_touches() -> None:
    index = CacheIndex(10, policy="lru")
    store(index, keys(0, 1))
    bounds = index.statistics().reuse_distance_blocks.bounds
    assert (bounds[0], bounds[1], bounds[-1], len(bounds)) == (64.0, 128.0, 2.0**30, 25)
    others = [b"absent-%d" % number for number in range(200)]
    index.touch(keys(0, 1))  # the first of both
    index.touch(keys(0))  # nothing between: 0
    index.touch([*others[:62], *keys(1)])  # 63 blocks of two requests, 1 of the same: the distance of 1 is 1
    index.touch(others[:64])
    index.touch(keys(1))  # 64
    index.touch(others[:65])
    index.touch(keys(0, 1))  # 0: 63 + 64 + 1 + 65; 1: 65
    found = index.statistics().reuse_distance_blocks
    assert found.total == 0 + 1 + 64 + (63 + 64 + 1 + 65) + 65
    assert found.counts == (3, 1, 1, *[0] * 23)


def test_keys_touched_before_their_commit_count_as_touched() -> None:
    """When a copy happens to end is no matter of the request's."""
    index = CacheIndex(2, policy="lru")
    reservation = index.reserve(keys(0, 1))
    index.touch(keys(0, 1))
    reservation.commit()
    index.touch(keys(0, 1))
    assert index.statistics().reuse_distance_blocks.counts[0] == 2
    index.clear()
    reservation = index.reserve(keys(2, 3))  # in the entries of the others, whose touches are no matter of theirs
    index.touch(keys(2))
    reservation.commit()
    index.touch(keys(2, 3))
    assert index.statistics().reuse_distance_blocks.counts[0] == 3


# looking


def test_repr_says_how_it_stands() -> None:
    index = CacheIndex(4, policy="lru", tenants={"a": Tenant(max_blocks=2), "b": Tenant(priority=1)})
    store(index, keys(0, 1))
    reservation = index.reserve(keys(2, 0), tenant="a")
    lease = index.acquire(keys(0))
    assert repr(index) == "CacheIndex(3 of 4 keys, 1 pending, 1 leases; LRU(2 keys), LRU(1 keys), LRU(0 keys))"
    assert repr(reservation) == "Reservation(1 keys, 1 present, open)"
    reservation.commit()
    assert repr(reservation) == "Reservation(1 keys, 1 present, committed)"
    full = index.reserve(keys(5, 6, 7), tenant="a")
    assert repr(full) == "Reservation(2 keys, 1 evicted, 1 declined, open)"
    full.abort()
    assert repr(full) == "Reservation(2 keys, 1 evicted, 1 declined, aborted)"
    lease.release()
    assert repr(CacheIndex(9)).startswith("CacheIndex(0 of 9 keys, 0 pending, 0 leases; Prefix(")


# scale


def test_pitfall_27_evictions_take_linear_time() -> None:
    """Evictions in indices of two sizes: the steps of one do not grow with the index."""

    def steps_per_eviction(capacity: int, evictions: int) -> float:
        index, names = CacheIndex(capacity, policy="lru"), [b"%d" % number for number in range(capacity + evictions)]

        def fill(begin: int, end: int) -> None:
            for start in range(begin, end, 500):
                store(index, names[start : start + 500])

        fill(0, capacity)
        taken = steps(lambda: fill(capacity, capacity + evictions))
        assert index.statistics().evicted == evictions
        return taken / evictions

    small, large = steps_per_eviction(1_000, 2_000), steps_per_eviction(30_000, 32_000)
    assert large < 2 * small


# what is for tiers


def test_the_keys_that_go_next_are_those_beyond_what_is_free(index: CacheIndex) -> None:
    store(index, keys(0))
    store(index, keys(1))
    assert [len(index.records.next_to_go(count)) for count in range(6)] == [0, 0, 0, 1, 2, 2]
    with index.acquire(keys(0)):
        assert index.records.next_to_go(4) == keys(1)


def test_a_promotion_that_ends_without_bytes_is_no_failed_store() -> None:
    """And neither is an aborted reservation whose keys were removed: nothing is told of either."""
    events: list[CacheEvent] = []
    index = CacheIndex(4, on_event=events.append)
    for record in index.records.reserve_each((keys(0, 1), "", None)):
        index.records.abort_after(record, ())
    assert (index.status(keys(0, 1)), events, index.statistics().failed) == ([MISS, MISS], [], 0)
    reservation = index.reserve(keys(2))
    index.remove(keys(2))
    reservation.abort()
    assert (events, index.statistics().failed) == ([], 0)
    index.check()


# bad arguments


@pytest.mark.parametrize(
    "given",
    [b"x", "", ["x"], [b"x", 1], [bytearray(b"x")], [b"x", None], iter([b"x"])],
    ids=lambda options: re.sub(r" at 0x\w+", "", repr(options)),
)
def test_keys_are_a_list_of_bytes(index: CacheIndex, given: Any) -> None:
    store(index, [b"x"])
    before = state(index)
    calls: list[Callable[[Any], object]] = [
        index.lookup,
        index.status,
        index.touch,
        index.reserve,
        index.acquire,
        index.load,
        index.remove,
    ]
    for call in calls:
        with pytest.raises(LayoutError, match="keys"):
            call(given)
    with pytest.raises(LayoutError, match="keys"):
        index.lookup_many([[b"x"], given])
    assert state(index) == before


def test_a_reservation_repeats_no_key(index: CacheIndex) -> None:
    before = state(index)
    with pytest.raises(LayoutError, match="repeats a key"):
        index.reserve(keys(0, 1, 0))
    assert state(index) == before


def test_bytes_of_every_length_are_keys(index: CacheIndex) -> None:
    odd = [b"", b"\0", b"x" * 10_000]
    store(index, odd)
    assert index.lookup(odd) == 3
    index.touch(odd)
    index.check()
    assert index.remove([b""]) == 1
    assert index.status(odd) == [MISS, HIT, HIT]


SHARED = LRU()
BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"capacity": -1}, ValueError, "capacity must be an integer of at least 0, got -1"),
    ({"capacity": 2.5}, ValueError, "capacity .* got 2.5"),
    ({"capacity": True}, ValueError, "capacity .* got True"),
    ({"store_after": -1}, ValueError, "store_after must be an integer of at least 0, got -1"),
    ({"store_after": "1"}, ValueError, "store_after"),
    ({"max_load_blocks": 0}, ValueError, "max_load_blocks must be an integer of at least 1, got 0"),
    ({"on_event": 5}, TypeError, "on_event must be a function of a CacheEvent, got 5"),
    ({"tenants": ["a"]}, TypeError, "tenants must be a mapping"),
    ({"tenants": {"a": 5}}, TypeError, r"tenants\['a'\] must be a Tenant, got 5"),
    (
        {"tenants": {"a": Tenant(max_blocks=1)}, "policy": SHARED},
        ValueError,
        "policy must be a name or a function .* 2 pools",
    ),
    ({"tenants": {"a": Tenant(priority=1)}, "policy": lambda _: SHARED}, ValueError, "2 pools need one each"),
    ({"policy": "lfu"}, ValueError, "policy must be one of arc, lru, prefix, s3fifo, .* got 'lfu'"),
    ({"policy": 5}, TypeError, "policy must be a name"),
    ({"policy": lambda _: 5}, TypeError, "policy must be a name"),
]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    BAD_OPTIONS,
    ids=["-".join(case[0]) + f"-{number}" for number, case in enumerate(BAD_OPTIONS)],
)
def test_bad_options_are_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        CacheIndex(**{"capacity": 4, **options})


@pytest.mark.parametrize("max_blocks", [0, -1, 1.5, True, "9"])
def test_quotas_are_positive_integers(max_blocks: Any) -> None:
    with pytest.raises(ValueError, match="max_blocks must be an integer of at least 1"):
        Tenant(max_blocks=max_blocks)


@pytest.mark.parametrize("priority", ["high", None, 1.5, True])
def test_priorities_are_integers(priority: Any) -> None:
    """What cannot be compared would be found out only when the cache is full."""
    with pytest.raises(TypeError, match="priority must be an integer"):
        Tenant(priority=priority)


def test_one_policy_object_for_one_pool_is_fine() -> None:
    mine = LRU()
    index = CacheIndex(4, policy=mine, tenants={"a": Tenant()})
    store(index, keys(0), "a")
    assert list(mine) == keys(0)
    capacities: list[int] = []

    def make(capacity: int) -> Prefix:
        capacities.append(capacity)
        return Prefix(capacity)

    CacheIndex(
        10, policy=make, tenants={"a": Tenant(max_blocks=3), "b": Tenant(max_blocks=99), "c": Tenant(priority=2)}
    )
    assert capacities == [10, 3, 10, 10]

"""Reservations and leases of a BlockCache on the simulated device: who may read which slot when, and what is in it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from caching import caches, grouped
from helpers import LEVELS, Rig, all_are, cache_state, keys, rig, simulated, whole

from kvoffload import (
    NO_WAIT,
    BlockCache,
    CacheEvent,
    CapacityError,
    ClosedError,
    MissingKeyError,
    OffloadEngine,
    Status,
    Tenant,
    TransferError,
)
from kvoffload.cache.policies import POLICIES

MISS, HIT, PENDING = Status.MISS, Status.HIT, Status.PENDING
END_OF_COPIES = ("cuEventRecord", 3)  # after `after` and the start: the copies are queued, and the job has failed


@pytest.fixture
def pair() -> Iterator[tuple[Rig, BlockCache]]:
    """A rig and a cache of four keys, one block each; sound and idle at the end."""
    with caches() as (bench, cache):
        yield bench, cache
        for gate in bench.gates:
            gate.open()
        bench.engine.drain(10)
        cache.check()
        whole(bench.engine)


def simulator(bench: Rig) -> Any:
    return bench.device.simulator


def gated_store(bench: Rig, cache: BlockCache, number: int, block: int) -> Any:
    """A store that waits for a gate of its own; the gate."""
    held = bench.stream()
    gate = bench.gate(held)
    cache.store(keys(number), [block], after=held)
    return gate


def failing_store(bench: Rig, cache: BlockCache, number: int, block: int) -> Any:
    """A store that has failed and whose copies still wait for a gate; the gate."""
    held = bench.stream()
    gate = bench.gate(held)
    simulator(bench).faults.fail_call(*END_OF_COPIES)
    job = cache.store(keys(number), [block], after=held)
    assert (simulator(bench).faults.pending, job.done) == (0, False)
    return gate


def at_room_check(bench: Rig, monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Do something while the cache submits its next transfer: when it has looked at its books and not yet written."""
    check_room = bench.engine.check_room

    def acting(jobs: int) -> None:
        check_room(jobs)
        monkeypatch.undo()
        action()
        simulator(bench).run_all()

    monkeypatch.setattr(bench.engine, "check_room", acting)


# filling


@pytest.mark.parametrize("level", LEVELS)
def test_reserve_copy_commit(level: str) -> None:
    with caches(level=level) as (bench, cache):
        held = bench.stream()
        gate = bench.gate(held)
        with cache.reserve(keys(0, 1)) as reservation:
            job = bench.engine.store([3, 4], reservation.slots(), after=held)
            reservation.commit(job)
        assert repr(reservation) == "Reservation(2 keys, settling)"
        bench.settle()
        assert (cache.status(keys(0, 1)), cache.lookup(keys(0, 1))) == ([PENDING, PENDING], 0)
        cache.check()
        gate.open()
        job.wait(10)
        assert (cache.status(keys(0, 1)), cache.lookup(keys(0, 1))) == ([HIT, HIT], 2)
        cache.load(keys(1, 0), [20, 21]).wait(10)
        assert all_are(bench.block(20), 5)
        assert all_are(bench.block(21), 4)
        statistics = cache.statistics()
        assert (statistics.stored, statistics.loaded, statistics.failed) == (2, 2, 0)
        cache.check()


def test_a_commit_of_jobs_that_have_ended_is_one_at_once(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    reservation = cache.reserve(keys(0))
    job = bench.engine.store([3], reservation.slots())
    job.wait(10)
    reservation.commit(job, job)
    assert repr(reservation) == "Reservation(1 keys, committed)", "before another call asks"
    assert cache.status(keys(0)) == [HIT]
    failing = cache.reserve(keys(1))
    simulator(bench).faults.fail_call(*END_OF_COPIES)
    job = bench.engine.store([4], failing.slots())
    bench.engine.drain(10)
    failing.commit(job)
    assert (cache.status(keys(1)), repr(failing)) == ([MISS], "Reservation(1 keys, aborted)")


@pytest.mark.parametrize("well", [True, False])
def test_one_job_may_fill_several_reservations(pair: tuple[Rig, BlockCache], well: bool) -> None:
    bench, cache = pair
    both = [cache.reserve(keys(0)), cache.reserve(keys(1, 2))]
    held = bench.stream()
    gate = bench.gate(held)
    if not well:
        simulator(bench).faults.fail_call(*END_OF_COPIES)
    job = bench.engine.store([3, 4, 5], np.concatenate([each.slots() for each in both]), after=held)
    for reservation in both:
        reservation.commit(job)
    assert cache.status(keys(0, 1, 2)) == [PENDING] * 3
    gate.open()
    bench.engine.drain(10)
    assert cache.status(keys(0, 1, 2)) == [HIT if well else MISS] * 3
    if well:
        cache.load(keys(0, 1, 2), [20, 21, 22]).wait(10)
        assert [int(bench.block(block)[0]) for block in (20, 21, 22)] == [4, 5, 6]


@pytest.mark.parametrize("nth", [0, 1])
def test_a_job_that_fails_aborts_when_all_copies_have_ended(nth: int) -> None:
    """Of two jobs one fails; the slots of both are given to nobody while either may be written."""
    with caches(level="no-batch") as (bench, cache):
        reservation = cache.reserve(keys(0, 1))
        gates, jobs = [], []
        for place in range(2):
            held = bench.stream()
            gates.append(bench.gate(held))
            if place == nth:
                simulator(bench).faults.fail_call(*END_OF_COPIES)
            jobs.append(bench.engine.store([3 + place], reservation.slots()[place : place + 1], after=held))
        assert [job.error is not None for job in jobs] == [place == nth for place in range(2)]
        reservation.commit(*jobs)
        with pytest.raises(ClosedError, match="is settling"):
            reservation.abort()
        for gate in gates:
            assert cache.status(keys(0, 1)) == [PENDING, PENDING]
            with pytest.raises(CapacityError):
                cache.reserve(keys(2, 3, 4), all_or_nothing=True)
            gate.open()
            bench.settle()
        assert cache.status(keys(0, 1)) == [MISS, MISS]
        assert (cache.statistics().failed, cache.statistics().stored, len(cache)) == (2, 0, 0)
        cache.check()
        cache.store(keys(2, 3, 4, 5), [5, 6, 7, 8]).wait(10)
        cache.load(keys(2, 3, 4, 5), [20, 21, 22, 23]).wait(10)
        assert [int(bench.block(block)[0]) for block in range(20, 24)] == [6, 7, 8, 9]
        assert cache.statistics().evicted == 0


def test_limits_hold_for_store_as_for_reserve() -> None:
    device = simulated()
    events: list[CacheEvent] = []
    with device, rig(device, num_blocks=32, num_slots=4) as bench:
        cache = BlockCache(
            bench.engine,
            policy="lru",
            tenants={"tenant": Tenant(max_blocks=2)},
            store_after=1,
            max_load_blocks=1,
            on_event=events.append,
        )
        assert cache.store(keys(0, 1, 2), [3, 4, 5], tenant="tenant").keys == ()
        cache.lookup(keys(0, 1, 2, 3))
        job = cache.store(keys(0, 9, 1, 2), [3, 9, 4, 5], tenant="tenant")
        assert job.keys == tuple(keys(0, 1))
        job.wait(10)
        assert cache.lookup_many([keys(0, 1), keys(1)]) == [1, 1]
        assert cache.store(keys(3), [6], tenant="tenant").keys == tuple(keys(3))
        bench.engine.drain(10)
        assert cache.status(keys(0, 1, 2, 3)) == [HIT, MISS, MISS, HIT]
        cache.load(keys(0, 3), [20, 21]).wait(10)
        assert [int(bench.block(block)[0]) for block in (20, 21)] == [4, 7], "positions follow the keys stored"
        statistics = cache.statistics()
        assert (statistics.declined, statistics.stored, statistics.evicted) == (5, 3, 1)
        kinds = [(event.kind, len(event.keys), event.tenant) for event in events]
        assert kinds == [
            ("declined", 3, "tenant"),
            ("miss", 4, ""),
            ("declined", 2, "tenant"),
            ("stored", 2, "tenant"),
            ("hit", 1, ""),
            ("miss", 1, ""),
            ("hit", 1, ""),
            ("evicted", 1, ""),
            ("stored", 1, "tenant"),
        ]
        cache.check()


# what is free meanwhile


def test_pitfall_25_an_entry_that_comes_free_during_a_submission_is_not_lost(
    pair: tuple[Rig, BlockCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store has drawn a free slot; before it has taken it, another store fails and gives back its own."""
    bench, cache = pair
    cache.store(keys(0, 1, 2, 3), [0, 1, 2, 3]).wait(10)
    cache.remove(keys(0, 1))
    gate = failing_store(bench, cache, 4, 4)
    at_room_check(bench, monkeypatch, gate.open)
    cache.store(keys(5), [5], after=NO_WAIT).wait(10)
    cache.check()
    cache.store(keys(6), [6], after=NO_WAIT).wait(10)
    cache.check()
    assert cache.statistics().evicted == 0
    cache.load(keys(2, 3, 5, 6), [20, 21, 22, 23]).wait(10)
    assert [int(bench.block(block)[0]) for block in range(20, 24)] == [3, 4, 6, 7]


@pytest.mark.parametrize("policy", POLICIES)
def test_pitfall_23_a_store_that_fails_while_its_load_is_being_submitted(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is gone when the policy is told of its use."""
    with caches(policy=policy) as (bench, cache):
        cache.store(keys(0), [3]).wait(10)
        gate = failing_store(bench, cache, 1, 4)
        at_room_check(bench, monkeypatch, gate.open)
        job = cache.load(keys(0, 1), [20, 21], after=NO_WAIT, pending=True)
        cache.check()
        assert cache.status(keys(0, 1)) == [HIT, MISS]
        with pytest.raises(TransferError):
            job.wait(10)
        for number in range(2, 12):  # the policy gives up only what is there
            cache.store(keys(number), [number]).wait(10)
        cache.check()


# leases


def test_a_lease_of_what_is_being_stored_orders_its_reader(pair: tuple[Rig, BlockCache]) -> None:
    """The reader is queued behind the copies; the host waits for nothing."""
    bench, cache = pair
    cache.store(keys(0), [3]).wait(10)
    writer = bench.stream()
    gate = bench.gate(writer)
    bench.fill(writer, 77, block=5)
    cache.store(keys(1), [5], after=writer)
    with pytest.raises(MissingKeyError, match="still being stored"):
        cache.acquire(keys(0, 1))
    reader, seen = bench.stream(), []
    with cache.acquire(keys(0, 1), pending=True) as lease:
        assert len(lease.pending) == 1
        lease.order_before(reader)
        slots = [int(slot) for slot in lease.slots()]
        with bench.device.current():
            simulator(bench).enqueue(reader, lambda: seen.append([int(bench.slot(slot)[0]) for slot in slots]))
        bench.settle()
        assert (seen, cache.status(keys(1))) == ([], [PENDING])
        gate.open()
        bench.synchronize(reader)
        assert seen == [[4, 77]]
        lease.wait(10)
        lease.check()
    assert cache.status(keys(0, 1)) == [HIT, HIT]


def test_a_lease_waits_on_the_host_if_asked(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    gate = gated_store(bench, cache, 0, 3)
    with cache.acquire(keys(0), pending=True) as lease:
        with pytest.raises(TimeoutError):
            lease.wait(0.02)
        opener = threading.Timer(0.05, gate.open)
        opener.start()
        lease.wait(10)
        opener.join()
        assert all_are(bench.slot(int(lease.slots()[0])), 4)
    assert cache.status(keys(0)) == [HIT]


def test_a_lease_of_reservations_with_jobs_of_their_own(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    reservation = cache.reserve(keys(0, 1))
    with pytest.raises(MissingKeyError, match="is reserved, and no transfer that fills it is known yet"):
        cache.acquire(keys(0), pending=True)
    with pytest.raises(MissingKeyError, match="is reserved, and no transfer"):
        cache.load(keys(0), [20], pending=True)
    assert cache.statistics().pinned == 0
    held, reader = bench.stream(), bench.stream()
    gate = bench.gate(held)
    reservation.commit(bench.engine.store([3, 4], reservation.slots(), after=held))
    other = gated_store(bench, cache, 2, 6)
    with cache.acquire(keys(0, 2, 1), pending=True) as lease:
        assert [len(each.keys) for each in lease._record.sources] == [2, 1], "each once"
        lease.order_before(reader)
        seen: list[list[int]] = []
        slots = [int(slot) for slot in lease.slots()]
        with bench.device.current():
            simulator(bench).enqueue(reader, lambda: seen.append([int(bench.slot(slot)[0]) for slot in slots]))
        for each in (gate, other):
            bench.settle()
            assert seen == []
            each.open()
        bench.synchronize(reader)
        assert seen == [[4, 7, 5]]


def test_pitfall_23_a_store_that_fails_under_a_lease(pair: tuple[Rig, BlockCache]) -> None:
    """Its slot stays the lease's until that is released, and nobody finds the key."""
    bench, cache = pair
    gate = gated_store(bench, cache, 0, 3)
    simulator(bench).faults.fail_call(*END_OF_COPIES)
    held = bench.stream()
    late = bench.gate(held)
    reservation = cache.reserve(keys(1))
    job = bench.engine.store([4], reservation.slots(), after=held)
    reservation.commit(job)
    with cache.acquire(keys(0, 1), pending=True) as lease:
        with pytest.raises(TransferError):
            lease.check()  # as soon as it is known, which is before the copies have ended
        gate.open()
        late.open()
        with pytest.raises(TransferError):
            lease.wait(10)
        bench.engine.drain(10)
        with pytest.raises(TransferError, match="were pending when they were leased"):
            lease.check()
        with pytest.raises(TransferError):
            lease.order_before(bench.stream())
        assert cache.status(keys(0, 1)) == [HIT, MISS]
        again = cache.reserve(keys(1, 2))
        assert not set(again.indices) & set(lease.indices)
        with pytest.raises(CapacityError):
            cache.reserve(keys(3), all_or_nothing=True)
    cache.reserve(keys(3)).abort()
    again.abort()


# loads of what is on its way


@pytest.mark.parametrize("level", LEVELS)
def test_a_load_of_what_is_being_stored(level: str) -> None:
    with caches(level=level) as (bench, cache):
        cache.store(keys(0), [3]).wait(10)
        writer, reader = bench.stream(), bench.stream()
        gate = bench.gate(writer)
        bench.fill(writer, 77, block=5)
        cache.store(keys(1), [5], after=writer)
        before = cache_state(cache)
        with pytest.raises(MissingKeyError, match="still being stored"):
            cache.load(keys(0, 1), [20, 21])
        with pytest.raises(MissingKeyError, match="not in the cache"):
            cache.load(keys(2), [20], pending=True)
        assert cache_state(cache) == before
        job = cache.load(keys(1, 0, 1), [20, 21, 22], after=NO_WAIT, pending=True)
        job.order_before(reader)
        bench.fill(reader, 1, block=20, planes=bench.planes[:1])
        bench.settle()
        assert not job.done
        assert cache.statistics().pinned == 2
        cache.check()
        gate.open()
        job.wait(10)
        assert all_are(bench.block(21), 4)
        assert all_are(bench.block(22), 77)
        bench.synchronize(reader)
        assert all_are(bench.block(20, bench.planes[1:]), 77)
        assert all_are(bench.block(20, bench.planes[:1]), 1)
        assert cache.status(keys(0, 1)) == [HIT, HIT]
        assert (cache.statistics().pinned, cache.statistics().loaded) == (0, 3)


@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_pitfall_23_a_load_of_a_store_that_fails(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the load hears of it, whichever of the two the cache sees end first.

    "between": the store ends just after the cache has asked for it, so that the load's end is noted before the store's.
    """
    with caches() as (bench, cache):
        gate = failing_store(bench, cache, 0, 3)
        job = cache.load(keys(0), [20], after=NO_WAIT, pending=True)
        driver = bench.device.driver
        event_query = driver.event_query

        def late(event: int) -> bool:
            ended = event_query(event)
            gate.open()
            simulator(bench).run_all()
            return ended

        if when == "between":
            monkeypatch.setattr(driver, "event_query", late)
        else:
            gate.open()
            bench.settle()
        if when == "after":
            assert cache.status(keys(0)) == [MISS]
        with pytest.raises(TransferError, match="must not be used"):
            job.wait(10)
        monkeypatch.undo()
        assert (cache.status(keys(0)), cache.lookup(keys(0)), len(cache)) == ([MISS], 0, 0)
        assert all(each.error is None for each in job.jobs), "the copies themselves went well"
        with pytest.raises(TransferError):
            job.wait(10)
        cache.check()
        assert cache.reserve(keys(0, 1, 2, 3)).evicted == ()


# several groups and blocks a key


def test_reserve_and_acquire_with_several_groups() -> None:
    with grouped() as (bench, cache, groups):
        reservation = cache.reserve(keys(0, 1))
        slots = [reservation.slots(group) for group in range(2)]
        assert len({int(slot) for each in slots for slot in each}) == 4
        held = bench.stream()
        gate = bench.gate(held)
        blocks = [[1, 2, 7, 9], [11, 12, 17, 19]]
        jobs = [cache.engine.store(blocks[group], slots[group], group=group, after=held) for group in range(2)]
        reservation.commit(*jobs)
        early = cache.load(keys(1), [[24, 25], [34, 35]], after=NO_WAIT, pending=True)
        bench.settle()
        assert (cache.status(keys(0, 1)), early.done) == ([PENDING, PENDING], False)
        gate.open()
        early.wait(10)
        assert cache.lookup(keys(0, 1)) == 2
        with cache.acquire(keys(1, 0)) as lease:
            targets = [[20, 21, 22, 23], [30, 31, 32, 33]]
            for group in range(2):
                cache.engine.load(lease.slots(group), targets[group], group=group).wait(10)
        assert [int(bench.block(block)[0]) for block in (*range(20, 24), 24, 25)] == [8, 10, 2, 3, 8, 10]
        expected = [118, 120, 112, 113, 118, 120]
        assert [int(bench.block(block, groups[1])[-1]) for block in range(30, 36)] == expected
        cache.check()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_group_that_fails_aborts_all_of_a_reservation(failing: int) -> None:
    with grouped() as (_, cache, _):
        reservation = cache.reserve(keys(0))
        faults: Any = cache.engine.device.simulator.faults
        jobs = []
        for group in range(2):
            if group == failing:
                faults.fail_call(*END_OF_COPIES)
            jobs.append(cache.engine.store([3, 4], reservation.slots(group), group=group))
        reservation.commit(*jobs)
        cache.engine.drain(10)
        assert [job.error is not None for job in jobs] == [group == failing for group in range(2)]
        assert (cache.status(keys(0)), cache.statistics().failed) == ([MISS], 1)
        cache.check()
        assert cache.reserve(keys(0, 1, 2, 3)).evicted == ()


def test_slots_of_groups_written_by_hand() -> None:
    with grouped() as (bench, cache, groups):
        with cache.reserve(keys(0)) as reservation:
            for group in range(2):
                cache.engine.slots[reservation.slots(group)] = 50 + group
        cache.load(keys(0), [[20, 21], [30, 31]]).wait(10)
        assert [int(bench.block(block)[0]) for block in (20, 21)] == [50, 50]
        assert [int(bench.block(block, groups[1])[0]) for block in (30, 31)] == [51, 51]


# remove and clear with transfers in flight


@pytest.mark.parametrize("call", ["remove", "clear"])
def test_pitfall_25_a_reset_with_jobs_in_flight(call: str) -> None:
    """A store, a load, a reservation with a job and one without, all under way: nothing that comes after meets them."""
    with caches(capacity=8) as (bench, cache):
        cache.store(keys(0, 1), [0, 1]).wait(10)
        storing, loading, filling = bench.stream(), bench.stream(), bench.stream()
        gates = [bench.gate(stream) for stream in (storing, loading, filling)]
        stored = cache.store(keys(2, 3), [2, 3], after=storing)
        loaded = cache.load(keys(0), [20], after=loading)
        with_job = cache.reserve(keys(4))
        with_job.commit(bench.engine.store([4], with_job.slots(), after=filling))
        without = cache.reserve(keys(5))
        old = {*with_job.indices, *without.indices}
        assert (cache.clear() if call == "clear" else cache.remove(keys(*range(8)))) == 6
        assert (len(cache), cache.status(keys(*range(6)))) == (0, [MISS] * 6)
        cache.check()
        again = cache.reserve(keys(0, 4))
        assert not old & set(again.indices)
        bench.engine.slots[again.slots()] = 88
        again.commit()
        fresh = cache.store(keys(5), [15], after=NO_WAIT)
        with pytest.raises(CapacityError, match="too few of 3"):
            cache.reserve(keys(10, 11, 12, 13), all_or_nothing=True)
        bench.engine.slots[without.slots()] = 99
        for gate in gates:
            bench.settle()
            cache.check()
            gate.open()
        for job in (stored, loaded, fresh):
            job.wait(10)
        bench.engine.drain(10)
        without.commit()
        assert cache.status(keys(*range(6))) == [HIT, MISS, MISS, MISS, HIT, HIT]
        assert all_are(bench.block(20), 1), "what was being loaded came whole"
        cache.load(keys(0, 4, 5), [21, 22, 23]).wait(10)
        assert [int(bench.block(block)[0]) for block in (21, 22, 23)] == [88, 88, 16]
        statistics = cache.statistics()
        assert (statistics.removed, statistics.failed, statistics.evicted, statistics.pending) == (2, 0, 0, 0)
        assert cache.reserve(keys(*range(20, 25))).evicted == (), "all of the old entries are back"
        cache.check()


def test_a_store_removed_under_way_and_stored_again(pair: tuple[Rig, BlockCache]) -> None:
    """Both copies are under way, to different slots; only the second is found."""
    bench, cache = pair
    first = gated_store(bench, cache, 0, 3)
    assert cache.remove(keys(0)) == 1
    second = gated_store(bench, cache, 0, 9)
    with pytest.raises(CapacityError):
        cache.reserve(keys(1, 2, 3), all_or_nothing=True)
    first.open()
    bench.settle()
    assert cache.status(keys(0)) == [PENDING]
    second.open()
    bench.engine.drain(10)
    cache.load(keys(0), [20]).wait(10)
    assert all_are(bench.block(20), 10)
    assert cache.reserve(keys(1, 2, 3)).evicted == ()
    assert (cache.statistics().stored, cache.statistics().removed) == (1, 0)


def test_a_lease_of_a_store_that_is_removed_still_reads_it(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    gate = gated_store(bench, cache, 0, 3)
    with cache.acquire(keys(0), pending=True) as lease:
        cache.clear()
        job = bench.engine.load(lease.slots(), [20], after=NO_WAIT)
        gate.open()
        lease.wait(10)
        job.wait(10)
        assert all_are(bench.block(20), 4)
        assert cache.status(keys(0)) == [MISS]
        with pytest.raises(CapacityError):
            cache.reserve(keys(1, 2, 3, 4), all_or_nothing=True)
    cache.reserve(keys(1, 2, 3, 4)).abort()


# the end


def test_a_closed_engine_refuses_everything_new_and_settles_what_is_open(pair: tuple[Rig, BlockCache]) -> None:
    bench, cache = pair
    cache.store(keys(0), [3]).wait(10)
    committing, aborting = cache.reserve(keys(1)), cache.reserve(keys(2))
    lease = cache.acquire(keys(0))
    bench.engine.close()
    before = cache_state(cache)
    calls: list[Callable[[], object]] = [
        lambda: cache.reserve(keys(3)),
        lambda: cache.reserve([]),
        lambda: cache.store(keys(3), [3]),
        lambda: cache.store(keys(0), [3]),
        lambda: cache.store([], []),
        lambda: cache.load(keys(0), [20]),
        lambda: cache.load([], []),
        lambda: cache.lookup(keys(0)),
        lambda: cache.lookup_many([keys(0)]),
        lambda: bench.engine.store([3], committing.slots()),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
        assert cache_state(cache) == before
    committing.commit()
    aborting.abort()
    lease.release()
    assert cache.status(keys(0, 1, 2)) == [HIT, HIT, MISS]
    assert all_are(bench.slot(int(cache.acquire(keys(0)).slots()[0])), 4), "the bytes live on"
    assert (cache.remove(keys(0)), cache.clear(), cache.statistics().stored) == (1, 1, 2)


def test_open_reservations_leases_and_settlements_keep_the_slots() -> None:
    """A cache is deleted; whoever still fills or reads its slots must not meet another cache's blocks there."""

    def refused(engine: OffloadEngine) -> bool:
        gc.collect()
        try:
            BlockCache(engine)
        except CapacityError:
            return True
        return False

    with simulated() as device, rig(device, num_slots=4) as bench:
        cache = BlockCache(bench.engine)
        reservation = cache.reserve(keys(0))
        del cache
        assert refused(bench.engine)
        held = bench.stream()
        gate = bench.gate(held)
        reservation.commit(bench.engine.store([3], reservation.slots(), after=held))
        records: Any = reservation._records
        del reservation
        assert refused(bench.engine), "a copy is still queued"
        gate.open()
        bench.engine.drain(10)
        lease = records.acquire((keys(0), False))
        del records
        assert refused(bench.engine)
        lease.release()
        assert not refused(bench.engine)
        assert repr(lease) == "Lease(1 keys, released)"


def test_a_job_of_another_engine_settles_nothing() -> None:
    with caches() as (bench, cache), rig(bench.device, num_slots=2) as other:
        reservation = cache.reserve(keys(1))
        job = other.engine.store([1], [0])
        with pytest.raises(ValueError, match=r"jobs\[0\] must be of the engine whose slots these are"):
            reservation.commit(job)
        job.wait(10)
        assert cache.status(keys(1)) == [Status.PENDING]
        reservation.abort()
        cache.check()


def test_waiting_for_a_lease_leaves_the_jobs_to_poll() -> None:
    with caches() as (bench, cache):
        stored = cache.store(keys(1), [3])
        with cache.acquire(keys(1), pending=True) as lease:
            lease.wait(10)
        assert [result.job_id for result in bench.engine.poll()] == [job.id for job in stored.jobs]

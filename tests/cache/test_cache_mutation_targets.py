"""Tests that fail where the cache forgets something: each is named in `tests/support/mutations.py`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from helpers import Rig, rig, simulated
from worlds import Fifo

from kvoffload import NO_WAIT, BlockCache, CapacityError, MissingKeyError, Status


def key(number: int) -> bytes:
    return b"key-%d" % number


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


@contextmanager
def caches(capacity: int, policy: Any = "lru", **options: Any) -> Iterator[tuple[Rig, BlockCache]]:
    """A cache of `capacity` keys; block `b` holds `b + 1` in every byte, and key `b` stands for it."""
    with simulated(3) as device, rig(device, num_blocks=32, num_slots=capacity) as bench:
        yield bench, BlockCache(bench.engine, policy=policy, **options)
        for gate in bench.gates:
            gate.open()
        bench.engine.drain(10)


def store(cache: BlockCache, *numbers: int, after: Any = NO_WAIT) -> Any:
    return cache.store(keys(*numbers), list(numbers), after=after)


def wrong_hits(bench: Rig, cache: BlockCache, count: int = 12) -> list[int]:
    """Keys that are hits and whose bytes are others'."""
    hits = [number for number in range(count) if cache.lookup([key(number)]) == 1]
    targets = list(range(16, 16 + len(hits)))
    cache.load(keys(*hits), targets, after=NO_WAIT).wait(10)
    return [number for number, block in zip(hits, targets, strict=True) if int(bench.block(block)[0]) != number + 1]


# what is on its way ---------------------------------------------------------------------------------------------------


def test_a_key_is_no_hit_before_its_bytes_are_there() -> None:
    with caches(4) as (bench, cache):
        held = bench.stream()
        bench.gate(held)
        store(cache, 0).wait(10)
        job = store(cache, 1, after=held)
        assert cache.lookup(keys(0, 1)) == 1
        assert cache.lookup_many([keys(1), keys(0, 1)]) == [0, 1]
        assert cache.status(keys(0, 1, 2)) == [Status.HIT, Status.PENDING, Status.MISS]
        with pytest.raises(MissingKeyError):
            cache.load(keys(1), [20], after=NO_WAIT)
        bench.gates[0].open()
        job.wait(10)
        assert cache.lookup(keys(0, 1)) == 2
        assert wrong_hits(bench, cache) == []


@pytest.mark.parametrize("how", ["remove", "clear"])
def test_a_slot_is_not_given_away_before_its_store_has_ended(how: str) -> None:
    """The key of a store that is held back is removed. Its slot is written later, so no other key may have it."""
    with caches(1) as (bench, cache):
        held = bench.stream()
        gate = bench.gate(held)
        job = store(cache, 0, after=held)
        if how == "remove":
            assert cache.remove(keys(0)) == 1
        else:
            assert cache.clear() == 1
        with suppress(CapacityError):  # it may also decline the key
            assert store(cache, 1).keys == ()
        with cache.reserve([]) as nothing:
            assert nothing.keys == ()
        gate.open()
        job.wait(10)
        store(cache, 2).wait(10)
        assert cache.lookup(keys(2)) == 1
        assert wrong_hits(bench, cache) == []
        cache.check()


def test_a_slot_is_not_given_away_while_it_is_loaded() -> None:
    with caches(1) as (bench, cache):
        store(cache, 0).wait(10)
        held = bench.stream()
        gate = bench.gate(held)
        job = cache.load(keys(0), [20], after=held)
        with suppress(CapacityError):
            assert store(cache, 1).keys == ()
        cache.remove(keys(0))
        with suppress(CapacityError):
            assert store(cache, 2).keys == ()
        gate.open()
        job.wait(10)
        assert int(bench.block(20)[0]) == 1
        store(cache, 3).wait(10)
        assert cache.lookup(keys(3)) == 1


def test_a_failed_store_is_no_hit_and_gives_its_slot_back() -> None:
    with caches(1) as (bench, cache):
        faults = bench.device.simulator.faults
        faults.fail_call("cuMemcpy3DBatchAsync")
        faults.fail_call("cuMemcpyBatchAsync")
        job = store(cache, 0)
        bench.engine.drain(10)
        faults.clear()
        assert [each.result for each in job.jobs]
        assert cache.status(keys(0)) == [Status.MISS]
        store(cache, 1).wait(10)
        assert wrong_hits(bench, cache) == []
        cache.check()


def test_an_abandoned_reservation_keeps_its_slots_until_the_store_has_ended() -> None:
    """A program forgets a reservation while its store is held back: the slot is written later."""
    with caches(1) as (bench, cache):
        held = bench.stream()
        gate = bench.gate(held)
        reservation = cache.reserve(keys(0))
        job = bench.engine.store([0], reservation.slots(), after=held)
        del reservation
        gc.collect()
        assert cache.status(keys(0)) == [Status.MISS]
        with suppress(CapacityError):
            assert store(cache, 1).keys == ()
        gate.open()
        job.wait(10)
        store(cache, 2).wait(10)
        assert cache.lookup(keys(2)) == 1
        assert wrong_hits(bench, cache) == []
        cache.check()


@pytest.mark.parametrize("state", ["free", "resident", "committed", "aborted"])
def test_only_an_open_reservation_may_be_written(state: str) -> None:
    """Slots of a cache are refused as targets of the engine's own stores."""
    with caches(2) as (bench, cache):
        slots = [1]
        if state == "resident":
            store(cache, 0, 1).wait(10)
        elif state != "free":
            reservation = cache.reserve(keys(0, 1))
            slots = list(reservation.slots())
            bench.engine.store([0, 1], slots, after=NO_WAIT).wait(10)
            reservation.commit() if state == "committed" else reservation.abort()
        with pytest.raises(ValueError, match="slot"):
            bench.engine.store([5] * len(slots), slots, after=NO_WAIT)
        assert wrong_hits(bench, cache) == []


# policies that are wrong ----------------------------------------------------------------------------------------------


class Wrong(Fifo):
    """Names victims that may not go, or that are not there."""

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(capacity)
        self.choose: Callable[[list[bytes], int], list[bytes]] | None = None

    def victims(self, count: int, protected: Callable[[bytes], bool]) -> list[bytes] | None:
        if self.choose is None:
            return super().victims(count, protected)
        return self.choose(list(self.keys), count)


CHOICES: dict[str, Callable[[list[bytes], int], list[bytes]]] = {
    "protected": lambda resident, count: resident[:count],
    "absent": lambda _, count: [b"absent-%d" % number for number in range(count)],
    "twice": lambda resident, count: [resident[-1]] * count,
    "too few": lambda resident, _: resident[-1:],
    "too many": lambda resident, _: list(resident),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_victims_that_may_not_go_are_not_taken(choice: str) -> None:
    """Keys 0 and 1 are being loaded: whatever a policy says, their slots stay theirs until that has ended."""
    policy = Wrong()
    with caches(4, policy) as (bench, cache):
        store(cache, 0, 1, 2, 3).wait(3)
        held = bench.stream()
        gate = bench.gate(held)
        load = cache.load(keys(0, 1), [20, 21], after=held)
        policy.choose = CHOICES[choice]
        with suppress(Exception):  # to refuse is right, and so is to decline
            store(cache, 4, 5).wait(0.3)
        policy.choose = None
        gate.open()
        load.wait(3)
        assert [int(bench.block(block)[0]) for block in (20, 21)] == [1, 2]
        cache.check()
        assert wrong_hits(bench, cache) == []
        store(cache, 6, 7).wait(3)
        assert cache.lookup(keys(6, 7)) == 2
        assert wrong_hits(bench, cache) == []


class Raising(Fifo):
    """Raises once, out of one method, after that has done its work or before."""

    def __init__(self, capacity: int = 0) -> None:
        super().__init__(capacity)
        self.due: tuple[str, bool] | None = None

    def insert(self, keys: Sequence[bytes]) -> None:
        self._raise("insert", False)
        super().insert(keys)
        self._raise("insert", True)

    def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
        self._raise("remove", False)
        super().remove(keys, evicted)
        self._raise("remove", True)

    def _raise(self, name: str, after: bool) -> None:
        if self.due == (name, after):
            self.due = None
            raise RuntimeError(name)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["insert", "remove"])
def test_a_policy_that_raises_leaves_the_truth(name: str, after: bool) -> None:
    policy = Raising()
    with caches(4, policy) as (bench, cache):
        store(cache, 0, 1, 2, 3).wait(10)
        policy.due = (name, after)
        with pytest.raises(RuntimeError, match=name):
            store(cache, 4, 5)
        bench.engine.drain(10)
        cache.check()
        assert wrong_hits(bench, cache) == []
        store(cache, 6, 7, 8, 9).wait(10)
        assert cache.lookup(keys(6, 7, 8, 9)) == 4
        assert wrong_hits(bench, cache) == []


# what statistics say --------------------------------------------------------------------------------------------------


class Clock:
    """`time.monotonic` that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_residency_is_counted_from_the_last_store_to_the_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are removed are not evicted, and what they leave behind counts for no later key."""
    clock = Clock()
    with caches(2) as (_, cache):
        monkeypatch.setattr(time, "monotonic", clock)
        store(cache, 0, 1).wait(10)
        assert cache.lookup(keys(0, 1)) == 2, "it has noticed that they are there"
        clock.now += 500.0
        assert cache.remove(keys(0, 1)) == 2
        statistics = cache.statistics()
        assert (statistics.resident, statistics.removed, statistics.evicted) == (0, 2, 0)
        assert sum(statistics.residency_seconds.counts) == 0, "what is removed was not evicted"
        store(cache, 2, 3).wait(10)
        assert cache.lookup(keys(2, 3)) == 2
        clock.now += 30.0
        store(cache, 4).wait(10)  # in the place of one of them
        statistics = cache.statistics()
        assert (statistics.resident, statistics.evicted) == (2, 1)
        assert statistics.residency_seconds.total == pytest.approx(30.0)


@pytest.mark.parametrize("state", ["ready", "pending", "leased", "reserved"])
def test_a_removed_key_is_not_resident(state: str) -> None:
    with caches(4) as (bench, cache):
        held = bench.stream()
        bench.gate(held)
        kept: list[Any] = []
        store(cache, 0).wait(10)
        if state == "reserved":
            kept.append(cache.reserve(keys(1)))
        else:
            job = store(cache, 1, after=held if state == "pending" else NO_WAIT)
            if state != "pending":
                job.wait(10)
            if state == "leased":
                kept.append(cache.acquire(keys(1)))
        before = cache.statistics()
        assert before.resident + before.pending == 2
        assert cache.remove(keys(1, 9)) == 1
        after = cache.statistics()
        assert (after.resident, after.pending, after.removed) == (1, 0, int(state in ("ready", "leased")))
        assert len(cache) == 1
        assert cache.remove(keys(1)) == 0
        for each in kept:
            each.release() if state == "leased" else each.abort()
        bench.gates[0].open()
        bench.engine.drain(10)
        assert cache.statistics().resident == 1
        store(cache, 2, 3, 4).wait(10)
        assert cache.lookup(keys(0, 2, 3, 4)) == 4
        cache.check()


# leases ---------------------------------------------------------------------------------------------------------------


def test_a_lease_holds_every_one_of_its_keys() -> None:
    with caches(4) as (bench, cache):
        store(cache, 0, 1, 2, 3).wait(10)
        for held in range(4):
            others: Sequence[int] = [number for number in range(4) if number != held]
            with cache.acquire(keys(held, held)):  # twice: it is held until the lease is released
                store(cache, *(10 + number for number in others)).wait(10)
                assert cache.lookup(keys(held)) == 1
            cache.clear()
            store(cache, 0, 1, 2, 3).wait(10)
        assert wrong_hits(bench, cache) == []


def test_two_leases_of_a_key_both_hold_it() -> None:
    with caches(1) as (_, cache):
        store(cache, 0).wait(10)
        first, second = cache.acquire(keys(0)), cache.acquire(keys(0))
        first.release()
        first.release()
        with suppress(CapacityError):
            assert store(cache, 1).keys == ()
        assert cache.lookup(keys(0)) == 1
        second.release()
        store(cache, 1).wait(10)
        assert cache.lookup(keys(1)) == 1

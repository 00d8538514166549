"""What a cache says is there is there: after interrupts, raising policies, abandoned handles, and partial stores."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from caching import caches, store
from helpers import Rig, all_are, cache_state, keys, rig, simulated
from interrupts import Inside, count_points, interrupt, interrupt_at
from seeds import rest_long, seeds

from kvoffload import (
    NO_WAIT,
    BlockCache,
    CacheIndex,
    CapacityError,
    KVOffloadWarning,
    Status,
    Tenant,
    TransferError,
)
from kvoffload.cache.policies import LRU, POLICIES, Policy

# with which the simulated driver copies a part of a batch that fails
PARTIAL_SEEDS = [number for number in seeds(24) if number % 4 == 1]

every_policy = pytest.mark.parametrize("policy", POLICIES)
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def raising(policy: str, boom: list[str], made: list[Policy] | None = None) -> Callable[[int], Policy]:
    """A function that makes a policy, which raises in the method that `boom` names, half way through its work."""

    def make(capacity: int) -> Policy:
        base: Any = POLICIES[policy]  # type: ignore[index]

        class Raising(base):  # type: ignore[misc]
            def _maybe(self, name: str) -> None:
                if name in boom:
                    boom.remove(name)
                    raise LookupError(f"policy {name}")

            def insert(self, names: Sequence[bytes]) -> None:
                super().insert(names[:1])
                self._maybe("insert")
                super().insert(names[1:])

            def remove(self, names: Sequence[bytes], evicted: bool) -> None:
                super().remove(names[:1], evicted)
                self._maybe("remove")
                super().remove(names[1:], evicted)

            def load(self, names: Sequence[bytes]) -> None:
                super().load(names)
                self._maybe("load")

            def touch(self, names: Sequence[bytes]) -> None:
                super().touch(names)
                self._maybe("touch")

            def victims(self, count: int, protected: Any) -> list[bytes] | None:
                self._maybe("victims")
                found: list[bytes] | None = super().victims(count, protected)
                return found

            def make_room(self, newcomers: Sequence[bytes], room: int, protected: Any) -> Any:
                self._maybe("victims")
                return super().make_room(newcomers, room, protected)

        policy_made = Raising(capacity)
        if made is not None:
            made.append(policy_made)
        return policy_made

    return make


# interrupts


def bytes_are_right(bench: Rig, cache: BlockCache, values: dict[bytes, int]) -> None:
    """Every key that can be loaded has the bytes of its block; block `b` holds `b + 1`."""
    names = list(values)
    for place, name in enumerate(names):
        if cache.status([name]) == [Status.HIT]:
            cache.load([name], [20 + place], after=NO_WAIT).wait(10)
            assert (bench.block(20 + place) == values[name]).all(), name
    cache.check()


@every_policy
@pytest.mark.parametrize("call", ["store", "reserve", "load", "store and reuse"])
@pytest.mark.parametrize("later", rest_long([0, 6], 1))  # half of the points that are tried, the others in long runs
def test_pitfall_39_an_interrupted_call_of_a_block_cache_leaves_no_wrong_byte(
    policy: Any, call: str, later: int, seed: int
) -> None:
    """Old keys do not hit over new bytes, and keys never stored are no hits; every few points of the cache."""
    values = {name: number + 4 for number, name in enumerate(keys(*range(8)))}

    def attempt(cache: BlockCache) -> object:
        if call == "store":
            return cache.store(keys(4, 5), [7, 8], after=NO_WAIT)
        if call == "reserve":
            return cache.reserve(keys(6, 7))
        if call == "load":
            return cache.load(keys(0, 1), [16, 17], after=NO_WAIT)
        return cache.store(keys(0, 4, 5, 6), [3, 7, 8, 9], after=NO_WAIT)

    def filled(cache: BlockCache) -> None:
        cache.store(keys(0, 1, 2), [3, 4, 5], after=NO_WAIT).wait(10)
        cache.touch(keys(0, 1, 2))

    with caches(capacity=3, policy=policy) as (bench, cache):
        filled(cache)
        points = count_points(lambda: attempt(cache), Inside("kvoffload/cache"))
        bench.engine.drain(10)
    for nth in range(1 + seed % 6 + later, points + 1, 12):
        with caches(capacity=3, policy=policy) as (bench, cache):
            bench.engine.slots[:] = 0xEE
            filled(cache)
            interrupt(lambda cache=cache: attempt(cache), nth, "kvoffload/cache")  # type: ignore[misc]
            bytes_are_right(bench, cache, values)
            bench.engine.drain(10)
            bytes_are_right(bench, cache, values)
            cache.store(keys(6, 7), [9, 10], after=NO_WAIT).wait(10)
            bytes_are_right(bench, cache, values)
            cache.clear()
            assert len(cache.reserve(keys(1, 2, 3)).keys) == 3, "no entry is lost"


def test_what_a_handler_raises_is_no_refusal_once_a_copy_is_queued(seed: int) -> None:
    """A signal handler may raise what the engine refuses by. Then victims come back only if their bytes are there."""
    values = {name: number + 4 for number, name in enumerate(keys(*range(8)))}
    number, point = 1 + seed % 5, True
    while point:
        with caches(capacity=2) as (bench, cache):
            cache.store(keys(0, 1), [3, 4], after=NO_WAIT).wait(10)
            call = partial(cache.store, keys(4, 5), [7, 8], after=NO_WAIT)
            outcome = interrupt_at(number, call, ValueError)
            point = outcome.point is not None
            bench.engine.drain(10)
            bytes_are_right(bench, cache, values)
            cache.store(keys(6, 7), [9, 10], after=NO_WAIT).wait(10)
            bytes_are_right(bench, cache, values)
        number += 5
    assert number > 100


def test_an_interrupted_store_keeps_its_slots_until_its_copies_have_ended() -> None:
    with caches(capacity=2) as (bench, cache):
        held = bench.stream()
        gate = bench.gate(held)
        submit = cache.engine.submit_locked

        def interrupted(*arguments: Any, **options: Any) -> Any:
            submit(*arguments, **options)
            raise KeyboardInterrupt

        cache.engine.submit_locked = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            cache.store(keys(0), [3], after=held)
        cache.engine.submit_locked = submit  # type: ignore[method-assign]
        assert cache.status(keys(0)) == [Status.MISS]
        assert len(cache.reserve(keys(1, 2)).keys) == 1, "the copy may still write the other slot"
        gate.open()
        bench.engine.drain(10)
        assert len(cache.reserve(keys(1, 2)).keys) == 2
        cache.check()


# policies that raise


@every_policy
@pytest.mark.parametrize("where", ["insert", "remove", "load", "touch", "victims"])
@pytest.mark.parametrize("own", [False, True])
def test_pitfall_39_a_policy_that_raises_leaves_the_cache_whole(policy: str, where: str, own: bool) -> None:
    boom: list[str] = []
    make = raising(policy, boom)
    index = CacheIndex(4, policy=make(4) if own else make)
    store(index, keys(0, 1, 2))
    index.touch(keys(0, 1, 2))
    calls: dict[str, Callable[[], object]] = {
        "insert": lambda: index.reserve(keys(5)),
        "remove": lambda: index.remove(keys(0, 1)),
        "load": lambda: index.load(keys(0, 1)),
        "touch": lambda: index.touch(keys(0, 1)),
        "victims": lambda: index.reserve(keys(5, 6, 7)),
    }
    boom.append(where)
    with pytest.raises(LookupError, match=f"policy {where}"):
        calls[where]()
    assert boom == []
    index.check()
    left = keys(2) if where == "remove" else keys(0, 1, 2)
    assert index.keys == left
    assert [index.lookup([name]) for name in left] == [1] * len(left)
    for number in range(10, 20):
        store(index, keys(number, number + 1))
        index.touch(keys(number, number + 1))
        index.check()


@every_policy
def test_a_policy_that_raises_while_a_failed_store_is_settled(policy: str) -> None:
    """The exception comes out of the call that settles it; the key is missing, and transfers go on."""
    boom: list[str] = []
    with caches(policy=raising(policy, boom)) as (bench, cache):
        simulator: Any = bench.device.simulator
        cache.store(keys(0), [3], after=NO_WAIT).wait(10)
        simulator.faults.fail_call("cuMemcpy3DBatchAsync")
        cache.store(keys(1), [4], after=NO_WAIT)
        boom.append("remove")
        bench.engine.drain(10)
        with pytest.raises(LookupError):
            cache.lookup(keys(1))
        assert (cache.lookup(keys(0)), cache.lookup(keys(1))) == (1, 0)
        cache.check()
        cache.store(keys(1), [4], after=NO_WAIT).wait(10)
        assert cache.lookup(keys(0, 1)) == 2


def test_an_own_policy_that_cannot_be_reset_is_replaced() -> None:
    class Broken(LRU):
        def insert(self, keys: Sequence[bytes]) -> None:
            super().insert(keys)
            if len(self) > 2:
                raise LookupError("never again")

    index = CacheIndex(8, policy=Broken())
    store(index, keys(0, 1))
    with pytest.raises(LookupError):
        index.reserve(keys(2))
    with pytest.warns(KVOffloadWarning, match="LRU replaces it"):
        assert index.lookup(keys(0, 1)) == 2
    store(index, keys(2, 3, 4))
    index.check()

    class Forgetful(LRU):
        def reset(self, keys: Sequence[bytes]) -> None:
            del keys

        def touch(self, keys: Sequence[bytes]) -> None:
            self.remove(keys, evicted=False)
            raise LookupError

    index = CacheIndex(8, policy=Forgetful())
    store(index, keys(0, 1))
    with pytest.raises(LookupError):
        index.touch(keys(0))
    with pytest.warns(KVOffloadWarning, match="LRU replaces it"):
        assert index.lookup(keys(0, 1)) == 2
    index.touch(keys(0))
    index.check()


@pytest.mark.parametrize("wrong", ["unknown", "twice", "protected", "few"])
def test_victims_are_checked_before_anything_changes(wrong: str) -> None:
    class Wrong(LRU):
        def victims(self, count: int, _: Any) -> list[bytes] | None:
            named = {
                "unknown": keys(*range(50, 50 + count)),
                "twice": keys(1) * count,
                "protected": keys(0, 1)[:count],
                "few": keys(1),
            }
            return named[wrong]

        def __repr__(self) -> str:
            return "Wrong()"

    index = CacheIndex(3, policy=Wrong())
    store(index, keys(0, 1, 2))
    lease = index.acquire(keys(0))
    with pytest.raises(ValueError, match=r"the policy Wrong\(\)"):
        index.reserve(keys(5, 6))
    assert (index.lookup(keys(0, 1, 2)), index.keys) == (3, keys(0, 1, 2))
    lease.release()
    index.check()


def test_entries_of_more_victims_than_new_keys_are_free() -> None:
    class Generous(LRU):
        def victims(self, count: int, protected: Any) -> list[bytes] | None:
            return super().victims(min(count + 2, len(self)), protected)

    index = CacheIndex(4, policy=Generous())
    store(index, keys(0, 1, 2, 3))
    assert store(index, keys(4)).evicted == tuple(keys(3, 2, 1))
    index.check()
    assert store(index, keys(5, 6)).evicted == ()
    assert index.lookup(keys(0, 4, 5, 6)) == 4


def test_a_refused_store_leaves_its_victims_to_their_tenant() -> None:
    tenants = {"first": Tenant(max_blocks=2), "second": Tenant(max_blocks=2)}
    with simulated() as device, rig(device, num_blocks=32, num_slots=2) as bench:
        cache = BlockCache(bench.engine, policy="lru", tenants=tenants)
        cache.store(keys(0, 1), [0, 1], tenant="first").wait(10)
        with pytest.raises(ValueError, match="after"):
            cache.store(keys(5), [5], after=0xDEAD, tenant="second")  # a stream that there is not
        assert cache.lookup(keys(0, 1)) == 2
        cache.check()
        assert cache.remove(keys(0)) == 1
        assert cache.remove(keys(1)) == 1
        cache.store(keys(5, 6), [5, 6], tenant="second").wait(10)
        cache.check()


def test_a_repair_keeps_a_key_that_was_stored_again_while_its_aborted_store_goes_on() -> None:
    """The aborted reservation's entries are still written; the key has another entry by now, and keeps it."""
    boom: list[str] = []
    with simulated() as device, rig(device, num_blocks=32, num_slots=3) as bench:
        cache = BlockCache(bench.engine, policy=raising("lru", boom))
        held = bench.stream()
        gate = bench.gate(held)
        reservation = cache.reserve(keys(0))
        bench.engine.store([3], reservation.slots(), after=held)
        del reservation
        with cache.reserve(keys(0)) as again:
            bench.engine.slots[again.slots()] = 77
            again.commit()
        assert cache.lookup(keys(0)) == 1
        boom.append("touch")
        with pytest.raises(LookupError):
            cache.touch(keys(0))
        assert cache.lookup(keys(0)) == 1
        cache.check()
        gate.open()
        bench.engine.drain(10)
        assert cache.lookup(keys(0)) == 1
        cache.load(keys(0), [9]).wait(10)
        assert all_are(bench.block(9), 77)
        cache.check()


def test_a_repair_leaves_reservations_and_leases_to_those_who_have_them() -> None:
    """Open ones stay open; what waits for a copy is settled at its end."""
    boom: list[str] = []
    with simulated() as device, rig(device, num_blocks=32, num_slots=4) as bench:
        cache = BlockCache(bench.engine, policy=raising("lru", boom))
        cache.store(keys(0), [0]).wait(10)
        held = bench.stream()
        gate = bench.gate(held)
        lease, reservation, filled = cache.acquire(keys(0)), cache.reserve(keys(1)), cache.reserve(keys(2))
        filled.commit(bench.engine.store([2], filled.slots(), after=held))
        boom.append("touch")
        with pytest.raises(LookupError):
            cache.touch(keys(0))
        assert cache.status(keys(0, 1, 2)) == [Status.HIT, Status.PENDING, Status.PENDING]
        assert cache.statistics().pinned == 1
        gate.open()
        bench.engine.drain(10)
        bench.engine.slots[reservation.slots()] = 77
        reservation.commit()
        assert cache.lookup(keys(0, 1, 2)) == 3
        assert not lease.released
        lease.release()
        cache.check()


def test_a_failed_load_does_not_count_as_loaded() -> None:
    with caches() as (bench, cache):
        cache.store(keys(0, 1), [0, 1]).wait(10)
        cache.load(keys(0, 1), [8, 9]).wait(10)
        for call in ("cuMemcpy3DBatchAsync", "cuMemcpyBatchAsync"):
            bench.device.simulator.faults.fail_call(call)
        with pytest.raises(TransferError):
            cache.load(keys(0, 1), [8, 9]).wait(10)
        bench.device.simulator.faults.clear()
        statistics = cache.statistics()
        assert (statistics.loaded, statistics.pinned, cache.lookup(keys(0, 1))) == (2, 0, 2)
        cache.check()


def test_a_policy_that_calls_the_cache_is_refused() -> None:
    class Calling(LRU):
        def insert(self, keys: Sequence[bytes]) -> None:
            super().insert(keys)
            index.lookup(keys)

    index = CacheIndex(3, policy=Calling())
    with pytest.raises(RuntimeError, match="in the middle of another call"):
        index.reserve(keys(0))


# abandoned handles


def test_handles_that_become_garbage_give_their_entries_back() -> None:
    index = CacheIndex(3, policy="lru")
    store(index, keys(0))
    index.reserve(keys(1))
    lease = index.acquire(keys(0))
    index.acquire(keys(0))
    assert index.status(keys(1)) == [Status.MISS]
    assert index.statistics().pinned == 1
    assert not lease.released
    del lease
    assert (index.statistics().pinned, index.statistics().failed) == (0, 1)
    cycle: list[Any] = [index.reserve(keys(1))]
    cycle.append(cycle)
    assert index.status(keys(1)) == [Status.PENDING]
    del cycle
    gc.collect()
    assert index.status(keys(1)) == [Status.MISS]
    index.check()


def test_the_entries_of_an_abandoned_reservation_wait_for_transfers_in_flight() -> None:
    with caches(capacity=2) as (bench, cache):
        held = bench.stream()
        gate = bench.gate(held)
        reservation = cache.reserve(keys(0))
        bench.engine.store([3], reservation.slots(), after=held)
        old = reservation.indices
        del reservation
        again = cache.reserve(keys(0, 1))
        assert len(again.keys) == 1
        assert not set(again.indices) & set(old)
        gate.open()
        bench.engine.drain(10)
        assert len(cache.reserve(keys(5, 6)).keys) == 1
        cache.check()


# partial stores


@every_policy
def test_a_prompt_longer_than_the_cache_stores_its_beginning(policy: Any) -> None:
    with caches(capacity=4, policy=policy) as (bench, cache):
        request = keys(*range(10))
        job = cache.store(request, list(range(10)), after=NO_WAIT)
        job.wait(10)
        assert job.keys == tuple(request[:4])
        assert cache.lookup(request) == 4
        assert cache.statistics().declined == 6
        assert cache.store(request, list(range(10)), after=NO_WAIT).keys == ()
        before = cache_state(cache)
        with pytest.raises(CapacityError, match="6 keys find 0 entries free"):
            cache.store(request, list(range(10)), after=NO_WAIT, all_or_nothing=True)
        assert cache_state(cache) == before
        assert len(bench.engine.poll()) == 0


@every_policy
def test_pitfall_69_no_key_is_a_hit_over_the_bytes_of_a_batch_that_failed_halfway(policy: Any) -> None:
    """Neither a key that was evicted for the store, whose slot has other bytes now, nor one that was to be stored."""
    overwritten = 0
    for seed in PARTIAL_SEEDS:
        with caches(capacity=8, seed=seed, policy=policy) as (bench, cache):
            simulator: Any = bench.device.simulator
            cache.store(keys(*range(8)), list(range(8)), after=NO_WAIT).wait(10)
            cache.touch(keys(*range(8)))
            before = bench.engine.slots.copy()
            simulator.faults.fail_call("cuMemcpy3DBatchAsync")
            job = cache.store(keys(*range(8, 14)), [8, 11, 10, 13, 9, 12], after=NO_WAIT)
            with pytest.raises(TransferError):
                job.wait(10)
            overwritten += int((bench.engine.slots != before).any(axis=1).sum())
            assert [cache.lookup([name]) for name in keys(*range(8, 14))] == [0] * 6
            hits = [number for number in range(8) if cache.lookup(keys(number))]
            assert len(hits) == 8 - len(job.keys)
            cache.check()
            targets = range(20, 20 + len(hits))
            cache.load(keys(*hits), targets, after=NO_WAIT).wait(10)
            assert [set(bench.block(target).tolist()) for target in targets] == [{number + 1} for number in hits]
    assert overwritten


def test_pitfall_69_a_fetch_that_fails_halfway_changes_blocks_and_no_key() -> None:
    overwritten = 0
    for seed in PARTIAL_SEEDS:
        with caches(capacity=8, seed=seed) as (bench, cache):
            simulator: Any = bench.device.simulator
            cache.store(keys(*range(8)), list(range(8)), after=NO_WAIT).wait(10)
            simulator.faults.fail_call("cuMemcpy3DBatchAsync")
            targets = [20, 27, 23, 25, 30, 21, 29, 18]
            job = cache.fetch(keys(*range(8)), targets, after=NO_WAIT)
            with pytest.raises(TransferError):
                job.wait(10)
            overwritten += sum(set(bench.block(target).tolist()) != {target + 1} for target in targets)
            cache.check()
            again = cache.fetch(keys(*range(8)), targets, after=NO_WAIT)
            again.wait(10)
            assert again.hits == 8
            assert [set(bench.block(target).tolist()) for target in targets] == [{number + 1} for number in range(8)]
    assert overwritten


# who may write


def test_a_store_into_slots_of_a_cache_is_refused() -> None:
    with caches(capacity=3) as (bench, cache):
        cache.store(keys(0), [3], after=NO_WAIT).wait(10)
        for slot in range(3):
            with pytest.raises(ValueError, match=rf"slots\[0\] is {slot}, which belongs to a BlockCache"):
                bench.engine.store([5], [slot], after=NO_WAIT)
        reservation = cache.reserve(keys(1))
        reservation.commit(bench.engine.store([4], reservation.slots(), after=NO_WAIT))
        with pytest.raises(ValueError, match="belongs to a BlockCache"):
            bench.engine.store([5], reservation.slots(), after=NO_WAIT)
        bench.engine.drain(10)
        aborted = cache.reserve(keys(2))
        aborted.abort()
        with pytest.raises(ValueError, match="belongs to a BlockCache"):
            bench.engine.store([5], aborted.slots(), after=NO_WAIT)
        cache.load(keys(0, 1), [20, 21], after=NO_WAIT).wait(10)
        assert [int(bench.block(block)[0]) for block in (20, 21)] == [4, 5]


def test_unknown_tenants_are_refused() -> None:
    with simulated() as device, rig(device, num_slots=4) as bench:
        cache = BlockCache(bench.engine, tenants={"guests": Tenant(max_blocks=2)})
        for call in (lambda: cache.store(keys(0), [1], tenant="guest"), lambda: cache.reserve(keys(0), tenant="guest")):
            with pytest.raises(ValueError, match="tenant must be one of '', 'guests', got 'guest'"):
                call()
        assert cache.store(keys(0), [1], tenant="guests").keys == tuple(keys(0))


@pytest.mark.parametrize("capacity", [2**33, 2**40, 2**64, 2**100])
def test_capacities_beyond_memory_are_refused_at_once(capacity: int) -> None:
    with pytest.raises((ValueError, CapacityError), match="capacity must be at most"):
        CacheIndex(capacity)


def test_a_release_in_the_middle_of_a_call_is_left_to_the_next_one() -> None:
    """As a finalizer does, which the garbage collector may start anywhere."""

    class Releasing(LRU):
        def touch(self, keys: Sequence[bytes]) -> None:
            super().touch(keys)
            lease.release()
            reservation.abort()

    index = CacheIndex(3, policy=Releasing())
    store(index, keys(0))
    lease, reservation = index.acquire(keys(0)), index.reserve(keys(1))
    index.touch(keys(0))
    assert index.statistics().pinned == 0
    assert index.status(keys(1)) == [Status.MISS]
    assert lease.released
    index.check()

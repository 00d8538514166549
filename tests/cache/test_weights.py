"""Weights: keys of other weights are no hits, go first, and come back with their name. No device."""

from __future__ import annotations

import random
import threading
from functools import partial
from itertools import count
from typing import Any

import pytest
from caching import state, store
from helpers import keys
from interrupts import interrupt_at
from seeds import seeds
from session_host import TURN, Host
from worlds import Fifo

from kvoffload import CacheEvent, CacheIndex, KVOffloadWarning, MissingKeyError, Status, Tenant
from kvoffload.cache.pools import Pools

FOUR = keys(0, 1, 2, 3)


def calls(index: CacheIndex) -> list[Any]:
    """What every call says that looks for four keys."""
    return [
        index.lookup(FOUR),
        index.lookup_many([FOUR, FOUR[:2]]),
        index.status(FOUR),
        list(map(index.status_of, FOUR)),
        index.locate(FOUR),
        index.promote(FOUR).wait(),
        sorted(index.keys),
    ]


NOTHING = [0, [0, 0], [Status.MISS] * 4, [Status.MISS] * 4, ["missing"] * 4, 0, []]
ALL = [4, [4, 2], [Status.HIT] * 4, [Status.HIT] * 4, ["host"] * 4, 4, FOUR]


@pytest.mark.parametrize("before", ["", "one", 512 * "\udc80"])
def test_no_call_finds_keys_of_other_weights_and_all_find_them_again(before: str) -> None:
    index = CacheIndex(8)
    index.use_weights(before)
    store(index, FOUR)
    assert calls(index) == ALL
    index.use_weights("two")
    assert calls(index) == NOTHING
    with pytest.raises(MissingKeyError, match=FOUR[0].hex()[:16]):
        index.acquire(FOUR)
    assert index.remove(FOUR) == 0
    index.use_weights(before)
    assert calls(index) == ALL
    index.check()


def test_the_same_keys_of_several_weights_have_entries_of_their_own() -> None:
    index, entries = CacheIndex(8), set[int]()
    for name in ("", "one"):
        index.use_weights(name)
        entries.update(store(index, FOUR).indices)
    assert len(entries) == len(index) == 8
    assert index.remove(FOUR[:1]) == 1
    index.use_weights("")
    assert index.lookup(FOUR) == 4
    assert index.clear() == 7, "of all weights"


def test_handles_show_the_keys_as_they_were_given() -> None:
    index = CacheIndex(8, tenants={"a": Tenant(max_blocks=2)})
    index.use_weights("one")
    made = index.reserve(FOUR, tenant="a")
    assert (list(made.keys), list(made.declined), made.tenant) == (FOUR[:2], FOUR[2:], "a")
    made.commit()
    assert list(index.reserve(FOUR, tenant="a").present) == FOUR[:2]
    lease = index.acquire(FOUR[:2])
    assert list(lease.keys) == FOUR[:2]
    with index.open_request(tenant="a") as request:
        index.load(FOUR[:2], request=request)
        assert (list(request.keys), request.tenant) == (FOUR[:2], "a")
    assert list(index.promote(FOUR).keys) == FOUR


def test_a_store_belongs_to_the_weights_of_its_call() -> None:
    index = CacheIndex(8)
    index.use_weights("one")
    made = index.reserve(FOUR)
    index.use_weights("two")
    made.commit()
    assert index.lookup(FOUR) == 0
    index.use_weights("one")
    assert index.lookup(FOUR) == 4


def test_a_lease_keeps_its_entries() -> None:
    index = CacheIndex(4)
    store(index, FOUR)
    with index.acquire(FOUR[:2]) as lease:
        index.use_weights("one")
        assert store(index, FOUR).short
        assert set(index.reserve(FOUR[2:]).indices).isdisjoint(lease.indices)
    index.check()


def test_a_promotion_whose_hits_nobody_has_read_has_none() -> None:
    index = CacheIndex(8)
    store(index, FOUR)
    promotion, read = index.promote(FOUR), index.promote(FOUR)
    assert read.wait() == 4
    index.use_weights("one")
    assert (promotion.ready, promotion.wait(), promotion.done) == (0, 0, True)


def test_the_same_name_again_changes_nothing() -> None:
    index = CacheIndex(8)
    index.use_weights("one")
    store(index, FOUR)
    promotion, before = index.promote(FOUR), state(index)
    index.use_weights("one")
    assert state(index) == before
    assert promotion.ready == 4


@pytest.mark.parametrize("again", ["one", "two"])
def test_after_an_interrupt_the_keys_of_the_weights_in_use_stay_and_the_next_call_is_made(again: str) -> None:
    for point in count(1, 11):
        events: list[CacheEvent] = []
        index = CacheIndex(8, on_event=events.append)
        index.use_weights("one")
        store(index, FOUR)
        over = not interrupt_at(point, partial(index.use_weights, "two")).raised
        index.check()
        assert index.statistics().of_other_weights == (0 if index.statistics().weights == "one" else 4), point
        index.use_weights(again)
        assert (index.lookup(FOUR), index.statistics().of_other_weights) == ((4, 0) if again == "one" else (0, 4)), (
            point
        )
        assert [event.weights for event in events if event.kind == "weights"][-1] == again
        if over:
            assert point > 10
            return


# open requests


def test_an_open_request_stores_nothing_more_once_the_weights_have_changed() -> None:
    index = CacheIndex(8, tenants={"a": Tenant()})
    index.use_weights("one")
    with index.open_request(tenant="a") as request:
        with index.reserve(FOUR[:2], request=request) as made:
            assert len(made.keys) == 2
        index.use_weights("two")
        late = index.reserve(FOUR, request=request)
        assert (late.keys, list(late.declined), late.short) == ((), FOUR, False)
    with index.open_request(tenant="a") as request, index.reserve(FOUR, request=request) as made:
        assert len(made.keys) == 4
        index.use_weights("one")
        index.use_weights("two")
        assert index.reserve(keys(9), request=request).keys == (), "it may have computed with both"
    index.check()


# who gives way


def test_keys_of_other_weights_go_first_in_the_order_in_which_these_went_out_of_use() -> None:
    index = CacheIndex(12, policy="lru")
    for number, name in enumerate(("one", "two", "three")):
        index.use_weights(name)
        store(index, keys(*range(10 * number, 10 * number + 4)))
    index.use_weights("one")  # "two" has been out of use for longer than "three"
    assert index.statistics().of_other_weights == 8
    store(index, keys(100, 101, 102))
    left = {}
    for number, name in enumerate(("one", "two", "three")):
        index.use_weights(name)
        left[name] = sum(each is Status.HIT for each in index.status(keys(*range(10 * number, 10 * number + 4))))
    assert left == {"one": 4, "two": 1, "three": 4}


def test_weights_that_came_back_between_go_last() -> None:
    index = CacheIndex(12, policy="lru")
    for number, name in enumerate(("one", "two", "three", "one", "four")):
        index.use_weights(name)
        if number < 3:
            store(index, FOUR)
    store(index, FOUR)
    left = {}
    for name in ("one", "two", "three"):
        index.use_weights(name)
        left[name] = index.lookup(FOUR)
    assert left == {"one": 4, "two": 0, "three": 4}


@pytest.mark.parametrize("policy", ["prefix", "lru", "arc", "s3fifo"])
def test_after_ten_changes_the_weights_in_use_have_all_entries_within_one_turn_over(policy: Any) -> None:
    index = CacheIndex(64, policy=policy)
    for step in range(10):
        index.use_weights(f"policy@{step}")
        for request in range(16):
            wanted = keys(*range(4 * request, 4 * request + 4))
            store(index, wanted)
            index.touch(wanted)
    assert index.statistics().of_other_weights == 0
    assert index.lookup_many([keys(4 * request) for request in range(16)]) == [1] * 16
    index.check()


@pytest.mark.parametrize("weights", [("", "one"), ("one", "")])
def test_neither_priority_nor_quota_nor_a_promise_protects_keys_of_other_weights(weights: tuple[str, str]) -> None:
    tenants = {"vip": Tenant(priority=9), "bound": Tenant(max_blocks=2)}
    host = Host(8, tenants=tenants)
    host.index.use_weights(weights[0])
    host.trusted("a", *TURN[:2], ttl=60)
    with host.index.reserve(keys(10, 11), tenant="vip"), host.index.reserve(keys(20, 21), tenant="bound"):
        pass
    host.index.use_weights(weights[1])
    host.store(keys(*range(100, 108)))
    assert host.index.statistics().of_other_weights == 0
    assert host.index.lookup(keys(*range(100, 108))) == 8
    host.index.check()


def test_a_quota_counts_the_keys_of_each_weights_apart() -> None:
    index = CacheIndex(8, tenants={"a": Tenant(max_blocks=2)})
    for name in ("one", "two"):
        index.use_weights(name)
        assert len(store(index, FOUR, tenant="a").keys) == 2
    index.use_weights("one")
    assert index.lookup(FOUR) == 2


def test_priorities_hold_again_once_the_weights_are_back() -> None:
    index = CacheIndex(4, policy="lru", tenants={"vip": Tenant(priority=1)})
    store(index, FOUR[:2], tenant="vip")
    index.use_weights("one")
    index.use_weights("")
    store(index, keys(10, 11))
    store(index, keys(12, 13))
    assert index.lookup(FOUR[:2]) == 2
    index.check()


def test_sessions_of_other_weights_are_others() -> None:
    host = Host(16)
    host.trusted("a", *TURN, ttl=60)
    host.index.use_weights("one")
    assert host.index.hint("release", session="a").outcome == "declined"
    host.turn("a", *TURN)
    assert host.index.hint("release", session="a").blocks == 4
    host.index.check()


@pytest.mark.parametrize("hint", ["retain", "release"])
def test_keys_that_a_hint_has_moved_have_their_pool_back_with_their_weights(hint: Any) -> None:
    host = Host(16, tenants={"b": Tenant(max_blocks=2)})
    host.index.use_weights("one")
    host.trusted("a", *TURN, ttl=60)
    if hint == "release":
        host.index.hint("release", session="a")
    for name in ("two", "one"):  # whose pools get the numbers of those that are gone
        host.index.use_weights(name)
        for tenant in ("b", ""):
            store(host.index, keys(50 if tenant else 60), tenant=tenant)
    host.now += 1000
    host.index.load(keys(*TURN))
    host.index.touch(keys(*TURN))
    host.index.check()
    assert host.index.lookup(keys(*TURN)) == 4
    for name in ("two", "one"):  # now the pools beside it are gone
        host.index.use_weights(name)
        store(host.index, keys(70), tenant="b")
    host.trusted("c", *TURN, ttl=60)
    host.index.check()


def test_a_change_that_an_interrupt_ends_is_made_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for part in ("use", "of", "tenant"):
        index = CacheIndex(8, tenants={"a": Tenant(max_blocks=2)})
        index.use_weights("one")
        with monkeypatch.context() as patch:
            patch.setattr(Pools, part, interrupt)
            with pytest.raises(KeyboardInterrupt):
                index.use_weights("two")
        assert index.statistics().weights == "two"
        with index.open_request() as request, index.reserve(FOUR, request=request) as made:
            assert len(made.keys) == 4
        assert index.statistics().of_other_weights == 0, "they are of the weights in use"
        index.check()


def test_names_that_are_kept_are_kept_by_repair() -> None:
    index = CacheIndex(8)
    index.use_weights("one")
    store(index, FOUR)
    index.records.keep_weights(frozenset({"one", "two"}))
    index._state.consistent = False  # as after an interrupt
    index.records.keep_weights(frozenset({"two"}))
    index._state.consistent = False
    assert index.statistics().of_other_weights == 4


def test_a_tenant_is_looked_up_without_the_lock_and_changes_nothing() -> None:
    index = CacheIndex(8, tenants={"a": Tenant(max_blocks=2)})
    index.use_weights("one")
    index.use_weights("two")
    before = list(index._state.pools.all), dict(index._state.pools.by_tenant)
    index.promote(FOUR, tenant="a").release()
    with pytest.raises(ValueError, match="tenant must be one of '', 'a'"):
        index.hint("prefetch", session="s", tenant="b")
    assert before == (index._state.pools.all, index._state.pools.by_tenant)


def test_a_policy_object_orders_the_keys_of_all_weights() -> None:
    index = CacheIndex(4, policy=Fifo())
    store(index, FOUR[:3])
    index.use_weights("one")
    store(index, FOUR[:3])
    assert len(index) == 4
    assert index.lookup(FOUR[:3]) == 3
    index.check()


def test_pools_of_weights_that_are_gone_are_used_again() -> None:
    index = CacheIndex(8, tenants={"a": Tenant(max_blocks=4), "b": Tenant(priority=3)})
    for step in range(300):
        index.use_weights(f"policy@{step}")
        for tenant in ("", "a", "b"):
            store(index, FOUR[: step % 4], tenant=tenant)
    assert len(index._state.pools.all) < 40
    index.check()


@pytest.mark.parametrize("seed", seeds(8))
def test_a_model_agrees_with_changes_at_random(seed: int) -> None:
    rng = random.Random(seed)
    policy: Any = rng.choice(["lru", "prefix", "arc", "s3fifo"])
    index = CacheIndex((1, 4, 7, 16)[seed % 4], policy=policy, tenants={"a": Tenant(max_blocks=3)})
    names, now = ["", "one", "two", "three"], ""
    written: dict[int, tuple[str, bytes]] = {}  # by entry: the weights and the key whose bytes it has
    for _ in range(400):
        if rng.random() < 0.2:
            now = rng.choice(names)
            index.use_weights(now)
        wanted = keys(*sorted(rng.sample(range(12), rng.randrange(1, 6))))
        if rng.random() < 0.6:
            with index.reserve(wanted, tenant=rng.choice(["", "a"])) as made:
                written.update({entry: (now, key) for entry, key in zip(made.indices, made.keys, strict=True)})
                assert set(made.evicted).isdisjoint(made.keys)
        found = index.lookup(wanted)
        with index.acquire(wanted[:found]) as lease:
            assert [written[entry] for entry in lease.indices] == [(now, key) for key in wanted[:found]]
        index.touch(wanted)
        if rng.random() < 0.1:
            index._state.consistent = False  # as after an interrupt
        index.check()


def test_threads_never_find_a_key_of_other_weights() -> None:
    index, wrong, ends = CacheIndex(32), list[str](), threading.Event()
    written: dict[int, tuple[int, bytes]] = {}
    lock, step = threading.Lock(), 0

    def serve(seed: int) -> None:
        rng = random.Random(seed)
        while not ends.is_set():
            wanted = keys(*range(rng.randrange(20), 24))
            with lock, index.reserve(wanted) as made:  # the model computes between changes
                written.update({entry: (step, key) for entry, key in zip(made.indices, made.keys, strict=True)})
            before = step
            found = index.lookup(wanted)
            with lock:
                if before == step and found:
                    with index.acquire(wanted[: index.lookup(wanted)]) as lease:
                        for entry, key in zip(lease.indices, lease.keys, strict=True):
                            if written[entry] != (step, key):
                                wrong.append(f"{written[entry]} for {step}, {key!r}")

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        with lock:
            step += 1
            index.use_weights(f"policy@{step}")
    ends.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    index.check()


# what is told


def test_events_are_of_one_name_and_say_which() -> None:
    events: list[CacheEvent] = []
    index = CacheIndex(4, policy="lru", on_event=events.append, tenants={"a": Tenant()})
    store(index, FOUR[:2])
    index.use_weights("one")
    store(index, FOUR[:2], tenant="a")
    index.use_weights("two")
    index.lookup(FOUR)
    store(index, FOUR)
    told = [(event.kind, list(event.keys), event.tenant, event.weights) for event in events]
    assert told == [
        ("stored", FOUR[:2], "", ""),
        ("weights", [], "", "one"),
        ("stored", FOUR[:2], "a", "one"),
        ("weights", [], "", "two"),
        ("miss", FOUR, "", "two"),
        ("evicted", FOUR[1::-1], "", ""),
        ("evicted", FOUR[1::-1], "", "one"),
        ("stored", FOUR, "", "two"),
    ]


def test_statistics_count_tenants_and_name_the_weights() -> None:
    index = CacheIndex(8, tenants={"a": Tenant()})
    for name in ("one", "two"):
        index.use_weights(name)
        store(index, FOUR, tenant="a")
    statistics = index.statistics()
    assert (statistics.weights, statistics.of_other_weights) == ("two", 4)
    assert [(name, counts.stored) for name, counts in statistics.tenants] == [("a", 8)]


def test_a_hook_that_raises_hears_of_the_keys_of_all_weights() -> None:
    told: list[str] = []

    def hook(event: CacheEvent) -> None:
        if event.kind == "removed":
            told.append(event.weights)
            raise ValueError

    index = CacheIndex(4, on_event=hook)
    for name in ("one", "two"):
        index.use_weights(name)
        store(index, FOUR[:2])
    with pytest.warns(KVOffloadWarning, match="on_event raised"):
        index.clear()
    assert told == ["one", "two"]


# refusals


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        (None, TypeError, "name must be a string"),
        (b"one", TypeError, "name must"),
        ("a\0b", ValueError, "no NUL"),
        ("a" * 513, ValueError, "at most 512"),
    ],
)
def test_what_is_no_name_is_refused(name: Any, error: type[Exception], says: str) -> None:
    index = CacheIndex(4)
    store(index, FOUR)
    before = state(index)
    with pytest.raises(error, match=says):
        index.use_weights(name)
    assert state(index) == before
    assert index.lookup(FOUR) == 4


def test_inside_another_call_it_is_refused() -> None:
    class Nests(Fifo):
        def insert(self, keys: Any) -> None:
            super().insert(keys)
            with pytest.raises(RuntimeError, match="in the middle of another call"):
                index.use_weights("two")

    index = CacheIndex(4, policy=Nests)
    index.use_weights("one")
    store(index, FOUR)
    assert index.lookup(FOUR) == 4


def test_a_tenant_whose_name_has_a_nul_is_refused() -> None:
    with pytest.raises(TypeError, match="the name 'a"):
        CacheIndex(4, tenants={"a\0b": Tenant()})

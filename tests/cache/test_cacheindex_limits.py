"""Limits of CacheIndex: the reuse filter, `max_load_blocks`, quotas and priorities of tenants; a policy object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from caching import state, store
from helpers import keys, rig, simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload import (
    NO_WAIT,
    BlockCache,
    CacheEvent,
    CacheIndex,
    CapacityError,
    Lease,
    Reservation,
    Status,
    Tenant,
)
from kvoffload.cache.policies import LRU, POLICIES
from kvoffload.cache.pools import ReuseFilter

every_policy = pytest.mark.parametrize("policy", POLICIES)


def names(prefix: str, count: int, start: int = 0) -> list[bytes]:
    return [b"%s-%d" % (prefix.encode(), number) for number in range(start, start + count)]


def of(index: CacheIndex, prefix: str) -> int:
    """How many keys that begin so are there."""
    return sum(name.startswith(prefix.encode()) for name in index.keys)


# store_after


@pytest.mark.parametrize("store_after", [0, 1, 2, 3])
def test_a_key_is_declined_until_it_was_looked_up_often_enough(store_after: int) -> None:
    index = CacheIndex(4, store_after=store_after)
    for _ in range(store_after):
        before = index.statistics().declined
        with index.reserve(keys(0, 1)) as reservation:
            assert (reservation.keys, reservation.declined) == ((), tuple(keys(0, 1)))
        assert index.statistics().declined == before + 2
        assert index.lookup(keys(0, 1)) == 0
    assert store(index, keys(0, 1)).keys == tuple(keys(0, 1))
    assert index.lookup(keys(0, 1)) == 2
    index.check()


def test_only_lookups_of_what_is_missing_count() -> None:
    index = CacheIndex(4, store_after=2)
    index.touch(keys(0))
    index.status(keys(0))
    index.lookup(keys(0))
    index.reserve(keys(0)).abort()
    assert store(index, keys(0)).declined == tuple(keys(0)), "looked up once"
    index.lookup_many([keys(0), keys(1)])
    pending = index.reserve(keys(0, 1))
    assert (pending.keys, pending.positions, pending.declined) == (tuple(keys(0)), (0,), tuple(keys(1)))
    index.lookup(keys(0, 1))
    index.lookup(keys(0))
    assert store(index, keys(1)).keys == tuple(keys(1)), "missing behind a key that is on its way"
    pending.commit()
    for _ in range(3):
        index.lookup(keys(0))
    index.remove(keys(0))
    assert store(index, keys(0)).keys == (), "counting starts anew when a key is gone"


def test_a_refused_or_declined_reservation_forgets_no_lookups() -> None:
    index = CacheIndex(1, store_after=1)
    index.lookup(keys(0, 1))
    before = state(index)
    with pytest.raises(CapacityError):
        index.reserve(keys(0, 1), all_or_nothing=True)
    assert state(index) == before
    assert store(index, keys(1, 5)).keys == tuple(keys(1))
    assert store(index, keys(0)).keys == tuple(keys(0))


def test_the_reuse_filter_remembers_the_latest_lookups_only() -> None:
    counted = ReuseFilter(2, capacity=10)
    old, new = names("old", 1), names("new", 16_384)
    counted.note(old)
    counted.note(new[:-1])
    counted.note(old)  # used again: no longer the one to be forgotten
    counted.note(new[-1:])
    assert counted.passing([*old, *new]) == old
    assert len(counted._seen) == 16_384
    counted.note(new)
    assert counted.passing([*old, *new]) == new[1:], "the first was forgotten, and counts anew"
    large = ReuseFilter(1, capacity=20_000)
    large.note(names("many", 30_000))
    assert len(large._seen) == 20_000
    assert large.passing(names("many", 30_000)) == names("many", 20_000, 10_000)


def test_the_reuse_filter_costs_nothing_when_off() -> None:
    index = CacheIndex(4)
    index.lookup(names("any", 1_000))
    assert len(index._state.filter._seen) == 0


# max_load_blocks


def test_lookup_reports_no_more_than_max_load_blocks() -> None:
    events: list[CacheEvent] = []
    index = CacheIndex(8, max_load_blocks=2, on_event=events.append)
    store(index, keys(0, 1, 2, 3))
    events.clear()
    assert index.lookup(keys(0, 1, 2, 3, 4)) == 2
    assert events == [CacheEvent("hit", tuple(keys(0, 1))), CacheEvent("miss", tuple(keys(2, 3, 4)))]
    assert index.lookup_many([keys(0), keys(1, 2), keys(0, 1, 2), keys(9, 0)]) == [1, 2, 2, 0]
    statistics = index.statistics()
    assert (statistics.lookups, statistics.hits) == (13, 7)
    assert index.status(keys(2, 3)) == [Status.HIT, Status.HIT]
    assert len(index.acquire(keys(0, 1, 2, 3)).keys) == 4, "a limit for what is reported, not for what may be read"


def test_hits_beyond_max_load_blocks_are_not_missing() -> None:
    index = CacheIndex(8, max_load_blocks=1, store_after=1)
    index.lookup(keys(0, 1, 2))
    store(index, keys(0, 1))
    index.lookup(keys(0, 1, 2))
    index.remove(keys(1))
    assert store(index, keys(1)).declined == tuple(keys(1)), "the lookup did not miss it"


# quotas


@every_policy
def test_a_quota_is_never_exceeded(policy: Any) -> None:
    index = CacheIndex(20, policy=policy, tenants={"tenant": Tenant(max_blocks=5)})
    store(index, names("other", 10))
    for start in range(0, 40, 3):
        reservation = store(index, names("tenant", 3, start), "tenant")
        assert all(name.startswith(b"tenant") for name in reservation.evicted), "its own, while others have room"
        assert of(index, "tenant") <= 5
        index.touch(names("tenant", 3, start))
        index.check()
    assert of(index, "other") == 10
    assert len(index) == 15, "entries beyond quotas stay free"


@every_policy
def test_a_request_longer_than_the_quota_stores_its_beginning(policy: Any) -> None:
    index = CacheIndex(20, policy=policy, tenants={"tenant": Tenant(max_blocks=5)})
    request = names("tenant", 8)
    with index.reserve(request, tenant="tenant") as reservation:
        assert (reservation.keys, reservation.declined) == (tuple(request[:5]), tuple(request[5:]))
    again = store(index, request, "tenant")
    assert (again.keys, again.present, again.declined) == ((), tuple(request[:5]), tuple(request[5:]))
    assert again.evicted == (), "what the request has there is not given up for its end"
    assert index.lookup(request) == 5
    assert index.statistics().declined == 6
    index.check()


@every_policy
def test_a_request_that_grows_beyond_the_quota_keeps_what_it_has(policy: Any) -> None:
    """The turns of a conversation: others of its tenant make room, then its end is declined."""
    index = CacheIndex(20, policy=policy, tenants={"tenant": Tenant(max_blocks=6)})
    store(index, names("tenant-old", 3), "tenant")
    request = names("tenant-new", 10)
    for length, kept, old in ((2, 2, 3), (4, 4, 2), (6, 6, 0), (8, 6, 0), (10, 6, 0)):
        store(index, request[:length], "tenant")
        assert index.lookup(request) == kept
        assert of(index, "tenant-old") == old
        index.touch(request[:length])
        index.check()


@every_policy
def test_keys_of_other_tenants_do_not_count(policy: Any) -> None:
    """A key belongs to the tenant that stored it first."""
    index = CacheIndex(20, policy=policy, tenants={"tenant": Tenant(max_blocks=2)})
    store(index, keys(0, 1, 2))
    reservation = store(index, keys(0, 1, 2, 3, 4, 5), "tenant")
    assert (reservation.keys, reservation.declined) == (tuple(keys(3, 4)), tuple(keys(5)))
    assert store(index, keys(6, 7), "tenant").evicted == tuple(keys(4, 3))
    assert index.lookup(keys(0, 1, 2, 6, 7)) == 5


@every_policy
def test_pitfall_24_a_quota_whose_keys_must_stay_refuses(policy: Any) -> None:
    index = CacheIndex(20, policy=policy, tenants={"tenant": Tenant(max_blocks=3)})
    store(index, names("other", 2))
    store(index, names("tenant", 2), "tenant")
    lease = index.acquire(names("tenant", 2))
    pending = index.reserve(names("tenant", 1, 2), tenant="tenant")
    before = state(index)
    with pytest.raises(CapacityError, match=r"1 keys find 15 entries free .* quota"):
        index.reserve(names("tenant", 1, 5), tenant="tenant", all_or_nothing=True)
    assert state(index) == before
    assert store(index, names("other", 1, 5)).evicted == ()
    lease.release()
    assert len(store(index, names("tenant", 2, 5), "tenant").evicted) == 2
    pending.commit()
    index.check()


# priorities


@every_policy
def test_keys_of_lower_priorities_go_first_and_none_of_higher_ones(policy: Any) -> None:
    levels = {"batch": Tenant(priority=-1), "chat": Tenant(priority=5), "top": Tenant(priority=9)}
    index = CacheIndex(8, policy=policy, tenants=levels)
    for name in ("chat", "", "batch", "top"):
        store(index, names(name or "plain", 2), name)
        index.touch(names(name or "plain", 2))
    for _ in range(20):  # use does not help
        index.touch(names("batch", 2))
    with pytest.raises(CapacityError, match="tenant with a quota or higher priority"):
        index.reserve(names("new-batch", 3), tenant="batch", all_or_nothing=True)
    assert set(store(index, names("new-plain", 1)).evicted) < set(names("batch", 2))
    assert set(store(index, names("new-chat", 3), "chat").evicted) > set(names("batch", 2)) & set(index.keys)
    assert (of(index, "batch"), of(index, "plain") + of(index, "new-plain")) == (0, 1)
    assert of(index, "chat") + of(index, "new-chat") == 5
    assert of(index, "top") == 2
    with pytest.raises(CapacityError):
        index.reserve(names("new-batch", 1), tenant="batch", all_or_nothing=True)
    gone = store(index, names("new-top", 8), "top").evicted
    assert len(gone) == 8
    assert of(index, "new-top") == 8, "the highest may have everything"
    index.check()


# against a plain model: LRU, quotas, priorities


class Pool(NamedTuple):
    priority: int
    quota: int | None
    keys: list[bytes]  # the least recently used first


class Refusal(Exception):  # noqa: N818
    """The model finds no room."""


CAPACITY = 8
LEVELS = {
    "": Tenant(),
    "tight": Tenant(max_blocks=3),
    "wide": Tenant(max_blocks=6),
    "low": Tenant(priority=-1),
    "low-tight": Tenant(max_blocks=4, priority=-1),
    "high": Tenant(priority=2),
    "high-tight": Tenant(max_blocks=4, priority=2),
}


class Model:
    """What should be there, without policies, tables or proposals."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pools = {name: Pool(level.priority, level.max_blocks, []) for name, level in LEVELS.items()}
        self.held: list[bytes] = []  # a key for each lease or reservation of it

    @property
    def keys(self) -> list[bytes]:
        return [key for pool in self.pools.values() for key in pool.keys]

    def plan(self, name: str, request: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """What to store and what goes for it: as many of the first new keys as find room, found by trying."""
        for most in range(len(request), 0, -1):
            try:
                return self.plan_some(name, request, most)
            except Refusal:
                pass
        return [], []

    def plan_some(self, name: str, request: Sequence[bytes], most: int) -> tuple[list[bytes], list[bytes]]:
        """The same for the first so many new keys; raises Refusal if they do not find room."""
        pool = self.pools[name]
        new = [key for key in request if key not in self.keys]
        if pool.quota is not None:
            new = new[: pool.quota - sum(key in pool.keys for key in request)]
        new = new[:most]
        missing = len(new) - (self.capacity - len(self.keys))
        beyond = 0 if pool.quota is None else len(new) + len(pool.keys) - pool.quota
        may_go = {
            other: [key for key in each.keys if key not in request and key not in self.held]
            for other, each in self.pools.items()
        }
        donors = [other for other, each in self.pools.items() if each.priority <= pool.priority and each.keys]
        donors.sort(key=lambda other: (self.pools[other].priority, -len(self.pools[other].keys), other != name))
        given: list[bytes] = []
        own: list[bytes] | None = None
        for other in [*(donors if missing > 0 else []), name]:
            wanted = max(missing - len(given), 0)
            if other != name:
                given += may_go[other][:wanted]
            elif max(wanted, beyond) <= len(may_go[name]):  # all that is missing, or nothing before the others have
                own = may_go[name][: max(wanted, beyond, 0)]
                break
        if own is None:
            raise Refusal
        return new, [*own, *given[: max(missing - len(own), 0)]]

    def use(self, request: Iterable[bytes]) -> None:
        wanted = list(dict.fromkeys(request))
        for pool in self.pools.values():
            for key in reversed([key for key in wanted if key in pool.keys]):
                pool.keys.remove(key)
                pool.keys.append(key)

    def drop(self, gone: Iterable[bytes]) -> None:
        for key in list(gone):
            for pool in self.pools.values():
                if key in pool.keys:
                    pool.keys.remove(key)


requests = st.tuples(
    st.sampled_from(["store", "store", "store", "reserve", "settle", "touch", "lease", "release", "remove"]),
    st.sampled_from(list(LEVELS)),
    st.lists(st.integers(0, 15), min_size=1, max_size=7, unique=True),
)


class Match:
    """An index and the model side by side."""

    def __init__(self) -> None:
        self.index = CacheIndex(CAPACITY, policy="lru", tenants=LEVELS)
        self.model = Model(CAPACITY)
        self.leases: list[Lease] = []
        self.open: list[Reservation] = []

    def step(self, call: str, name: str, request: list[bytes]) -> None:
        if call in ("store", "reserve"):
            self.reserve(name, request, commit=call == "store")
        elif call == "settle" and self.open:
            self.settle(self.open.pop(0), commit=len(request) % 2 == 0)
        elif call == "touch":
            self.index.touch(request)
            self.model.use(request)
        elif call == "lease":
            pending = {key for reservation in self.open for key in reservation.keys}
            found = [key for key in request if key in self.model.keys and key not in pending][:2]
            self.leases.append(self.index.acquire(found))
            self.model.held += found
        elif call == "release" and self.leases:
            lease = self.leases.pop(0)
            lease.release()
            for key in lease.keys:
                self.model.held.remove(key)
        elif call == "remove":
            gone = [key for key in request if key in self.model.keys and key not in self.model.held][:2]
            assert self.index.remove(gone) == len(gone)
            self.model.drop(gone)

    def reserve(self, name: str, request: list[bytes], *, commit: bool) -> None:
        before = state(self.index)
        new, victims = self.model.plan(name, request)
        if len(new) < sum(key not in self.model.keys for key in request):
            with pytest.raises(CapacityError):
                self.index.reserve(request, tenant=name, all_or_nothing=True)
            assert state(self.index) == before
        priority = LEVELS[name].priority
        assert all(self.level(victim) <= priority for victim in victims), "the model itself is right"
        reservation = self.index.reserve(request, tenant=name)
        assert (list(reservation.keys), list(reservation.evicted)) == (new, victims)
        assert list(reservation.present) == [key for key in request if key in self.model.keys]
        self.model.drop(victims)
        self.model.pools[name].keys.extend(reversed(new))
        self.model.held += new
        if commit:
            self.settle(reservation, commit=True)
        else:
            self.open.append(reservation)

    def level(self, key: bytes) -> int:
        return next(pool.priority for pool in self.model.pools.values() if key in pool.keys)

    def settle(self, reservation: Reservation, *, commit: bool) -> None:
        for key in reservation.keys:
            self.model.held.remove(key)
        if commit:
            reservation.commit()
        else:
            reservation.abort()
            self.model.drop(reservation.keys)

    def compare(self) -> None:
        self.index.check()
        shared = {pool.number: pool for pool in self.index._state.pools.all}
        found = {name: list(shared[self.index._state.pools.of(name).number].policy) for name in LEVELS}
        assert found == {name: pool.keys for name, pool in self.model.pools.items()}


@settings(max_examples=250)
@given(steps=st.lists(requests, min_size=5, max_size=40))
def test_lru_with_quotas_and_priorities_against_a_plain_model(steps: list[tuple[str, str, list[int]]]) -> None:
    match = Match()
    for call, name, numbers in steps:
        match.step(call, name, keys(*numbers))
        match.compare()


@every_policy
def test_rules_of_quotas_and_priorities_hold_for_every_policy(policy: Any, seed: int) -> None:
    """Random requests; what goes is never of a higher priority, nor of a higher one than something that stays."""
    index = CacheIndex(24, policy=policy, tenants=LEVELS)
    rng = np.random.default_rng(seed)
    owner: dict[bytes, str] = {}
    leases: list[Lease] = []
    for _ in range(600):
        name = list(LEVELS)[int(rng.integers(len(LEVELS)))]
        request = names(name, int(rng.integers(1, 9)), int(rng.integers(12)))
        if rng.random() < 0.3 and index.lookup(request):
            leases.append(index.acquire(request[:1]))
        if len(leases) > 3:
            leases.pop(int(rng.integers(4))).release()
        kept = {key for lease in leases for key in lease.keys}
        before, snapshot = index.keys, state(index)
        try:
            reservation = index.reserve(request, tenant=name, all_or_nothing=True)
            reservation.commit()
        except CapacityError:
            assert state(index) == snapshot
            reservation = store(index, request, name)
            missing = [key for key in request if key not in before]
            assert list(reservation.declined) == missing[len(reservation.keys) :], "the first ones are stored"
        stay = [key for key in before if key not in reservation.evicted and key not in kept and key not in request]
        for victim in reservation.evicted:
            assert victim not in kept
            assert victim not in request
            level = LEVELS[owner[victim]]
            assert level.priority <= LEVELS[name].priority
            if owner[victim] != name:  # its own may have to go for the quota's sake
                assert all(LEVELS[owner[key]].priority >= level.priority for key in stay)
        owner.update(dict.fromkeys(reservation.keys, name))
        index.touch(request)
        for each, level in LEVELS.items():
            mine = sum(owner[key] == each for key in index.keys)
            assert level.max_blocks is None or mine <= level.max_blocks
        index.check()
    assert len(index) == 24


def test_a_store_that_failed_need_not_be_asked_for_so_often_again() -> None:
    index = CacheIndex(4, policy="lru", store_after=2)
    for _ in range(2):
        index.lookup([b"a"])
    index.reserve([b"a"]).abort()
    index.reserve([b"a"]).commit()
    assert index.lookup([b"a"]) == 1
    index.remove([b"a"])
    assert index.reserve([b"a"]).declined == (b"a",)


# a policy object


def test_a_policy_object_serves_one_cache_for_good() -> None:
    policy = LRU()
    index = CacheIndex(4, policy=policy)
    index.reserve(keys(0)).commit()
    for capacity in (4, 8):
        with pytest.raises(
            ValueError, match=r"policy must be an object that no cache has had before.*LRU.*make another"
        ):
            CacheIndex(capacity, policy=policy)
    assert (list(policy), index.lookup(keys(0))) == (keys(0), 1), "the refused caches have changed nothing"
    index.check()
    index.close()
    with pytest.raises(ValueError, match="no cache has had before"):
        CacheIndex(4, policy=policy)  # it still knows the keys of the closed one, which can still be used
    del index
    with pytest.raises(ValueError, match="no cache has had before"):
        CacheIndex(4, policy=policy)


def test_a_policy_object_of_a_refused_cache_can_be_given_to_another() -> None:
    policy: Any = LRU()
    for wrong in ({"on_event": 3}, {"store_after": -1}, {"tenants": {"a": Tenant(priority=1)}}, {"tiers": 3}):
        with pytest.raises((TypeError, ValueError)):
            CacheIndex(4, policy=policy, **wrong)
    with simulated() as device, rig(device, num_slots=4) as one, rig(device, num_slots=4) as two:
        held = BlockCache(one.engine)
        held.store(keys(0), [0], after=NO_WAIT)
        with pytest.raises(CapacityError, match="belong to another BlockCache"):
            BlockCache(one.engine, policy=policy)
        cache = BlockCache(two.engine, policy=policy)
        cache.store(keys(1), [1], after=NO_WAIT).wait(10)
        assert list(policy) == keys(1)
        with pytest.raises(ValueError, match="no cache has had before"):
            BlockCache(one.engine, policy=policy)
        assert held.lookup(keys(0)) == 1

"""What all policies promise, and what each of them is for."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from counting import steps

from kvoffload import CacheIndex
from kvoffload.cache.policies import ARC, LRU, POLICIES, S3FIFO, Policy, Protected, make_policy

NAMES = ["lru", "arc", "s3fifo", "prefix"]
ADMITS_ALL = ["lru", "arc", "s3fifo"]
SCAN_RESISTANT = ["arc", "s3fifo"]


def key(index: int) -> bytes:
    return b"%d" % index


def keys(*indices: int) -> list[bytes]:
    return [key(index) for index in indices]


def nothing(_: bytes) -> bool:
    return False


def order(policy: Policy) -> list[bytes] | None:
    """All resident keys as they would go from now on."""
    return policy.victims(len(policy), nothing)


def state(policy: Policy) -> object:
    return list(policy), len(policy), repr(policy), order(policy)


def request(policy: Policy, capacity: int, wanted: Sequence[bytes]) -> int:
    """A request's life in a cache of that capacity; says how many of its keys were there."""
    resident = set(policy)
    found = [each for each in wanted if each in resident]
    newcomers = [each for each in wanted if each not in resident]
    policy.load(found)
    made = policy.make_room(newcomers, capacity - len(resident), set(wanted).__contains__)
    assert made is not None
    policy.remove(made.victims, evicted=True)
    policy.insert(newcomers[: made.admitted])
    policy.touch(wanted)
    return len(found)


# what all of them promise


def test_every_policy_is_tested() -> None:
    assert sorted(NAMES) == sorted(POLICIES)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_policy_shows_is_live(name: str) -> None:
    policy = make_policy(name, 8)
    empty = repr(policy)
    policy.insert(keys(0, 1))
    assert repr(policy) != empty
    assert "2" in repr(policy)


@pytest.mark.parametrize("name", NAMES)
def test_pitfall_26_one_request_is_one_use(name: str) -> None:
    """Whether a request loads its keys and ends, or only ends, and however long the cache was at work meanwhile."""
    loading, touching = make_policy(name, 12), make_policy(name, 12)
    for policy in (loading, touching):
        policy.insert(keys(*range(8)))
        policy.touch(keys(*range(8)))
    chance = random.Random(26)
    for _ in range(50):
        base = chance.randrange(8)
        wanted = keys(*range(base, 8))[: chance.randint(1, 4)]
        loading.load(wanted)
        loading.touch(wanted)
        touching.touch(wanted)
        assert order(loading) == order(touching)


@pytest.mark.parametrize("name", NAMES)
def test_pitfall_26_the_end_of_a_request_does_not_count_what_was_counted(name: str) -> None:
    """Requests of which none shares anything with another count as one use each, whether or not their ends are told."""
    telling, silent = make_policy(name, 30), make_policy(name, 30)
    for base in range(0, 60, 3):
        wanted = keys(base, base + 1, base + 2)
        for policy in (telling, silent):
            assert policy.evict(max(0, len(policy) + 3 - 30), set(wanted).__contains__) is not None
            policy.insert(wanted)
        telling.touch(wanted)
        assert order(telling) == order(silent)


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_pitfall_26_fifty_touches_in_a_row_are_as_good_as_one(name: str) -> None:
    """Of keys whose first request is over: they are recent and have been used again, and no more is known."""
    often, once = make_policy(name, 8), make_policy(name, 8)
    for policy, touches in ((often, 50), (once, 1)):
        policy.insert(keys(0, 1, 2, 3))
        policy.touch(keys(0, 1, 2, 3))
        for _ in range(touches):
            policy.touch(keys(3))
        policy.touch(keys(2))
    assert state(often) == state(once)
    assert list(often)[-2:] == keys(3, 2), "recency follows requests, not their length"


# scale


def steps_per_eviction(name: str, capacity: int, evictions: int) -> float:
    """In a full cache of which some recent keys are asked for again, by requests of ten keys."""
    policy, chance, batch = make_policy(name, capacity), random.Random(27), 10
    names = keys(*range(capacity + evictions))
    resident = set(names[:capacity])
    for start in range(0, capacity, batch):
        policy.insert(names[start : start + batch])
        policy.touch(names[start : start + batch])

    def evict_all() -> None:
        for start in range(capacity, capacity + evictions, batch):
            wanted = names[start : start + batch]
            recent = chance.randrange(start - 500, start - batch)
            again = [each for each in names[recent : recent + batch] if each in resident]
            policy.load(again)
            victims = policy.evict(batch, set(again).__contains__)
            assert victims is not None
            resident.difference_update(victims)
            resident.update(wanted)
            policy.insert(wanted)
            policy.touch(again + wanted)

    taken = steps(evict_all)
    assert set(policy) == resident
    assert len(resident) == capacity
    return taken / evictions


@pytest.mark.parametrize("name", NAMES)
def test_pitfall_27_the_steps_of_an_eviction_do_not_grow_with_the_cache(name: str) -> None:
    """Looking at all keys would take 10 times as many."""
    small, large = steps_per_eviction(name, 1_000, 2_000), steps_per_eviction(name, 10_000, 12_000)
    assert large < 2 * small


@pytest.mark.parametrize("name", NAMES)
def test_pitfall_27_victims_one_at_a_time_cost_as_much_as_many_at_once(name: str) -> None:
    """Also where every key has been used so often that it would get another round."""
    policy = make_policy(name, 20_000)
    names = keys(*range(20_000))
    policy.insert(names)
    for _ in range(4):
        policy.touch(names)
    at_once: list[list[bytes] | None] = []
    single: list[list[bytes] | None] = []
    of_many = steps(lambda: at_once.append(policy.victims(10_000, nothing)))
    of_single = steps(lambda: single.extend(policy.evict(1, nothing) for _ in range(10_000)))
    assert at_once[0] is not None
    assert single == [[victim] for victim in at_once[0]]
    assert max(of_many, of_single) < 200 * 10_000


# what each of them is for


def test_lru_gives_up_the_least_recently_used_first() -> None:
    policy = LRU()
    policy.insert(keys(0, 1, 2, 3))
    policy.touch(keys(3))
    policy.insert(keys(9))
    policy.load(keys(1))
    assert list(policy) == keys(2, 0, 3, 9, 1)
    assert policy.victims(3, nothing) == keys(2, 0, 3)
    assert policy.victims(3, set(keys(2, 3)).__contains__) == keys(0, 9, 1)
    assert repr(policy) == "LRU(5 keys)"


def hits_beside_scans(name: str) -> int:
    """Hits on 60 keys asked for over and over, between scans of keys that never come back."""
    policy, capacity, hits, fresh = make_policy(name, 100), 100, 0, iter(range(1_000, 100_000))
    hot = [keys(*range(start, start + 10)) for start in range(0, 60, 10)]
    for _ in range(30):
        for _ in range(3):
            hits += sum(request(policy, capacity, wanted) for wanted in hot)
        for _ in range(15):
            assert request(policy, capacity, keys(*(next(fresh) for _ in range(10)))) == 0
    return hits


@pytest.mark.parametrize("name", SCAN_RESISTANT)
def test_a_scan_does_not_wash_out_what_is_used_often(name: str) -> None:
    asked = 30 * 3 * 60
    assert hits_beside_scans("lru") == asked * 2 // 3, "every scan costs LRU all it had"
    assert hits_beside_scans(name) > 0.95 * asked


def test_arc_learns_from_what_comes_back() -> None:
    policy = ARC(4)
    policy.insert(keys(0, 1, 2, 3))
    policy.load(keys(0, 1))
    assert policy.evict(1, nothing) == keys(3)
    policy.insert(keys(3))
    assert repr(policy) == "ARC(4 of 4 keys: T1 1, T2 3, B1 0, B2 0, p 1)"
    assert policy.evict(1, nothing) == keys(1), "T1 is as large as it should be"
    policy.insert(keys(1))
    assert repr(policy) == "ARC(4 of 4 keys: T1 1, T2 3, B1 0, B2 0, p 0)"
    policy.remove(keys(2), evicted=False)
    policy.insert(keys(2))
    assert repr(policy) == "ARC(4 of 4 keys: T1 1, T2 3, B1 0, B2 0, p 0)", "what was not evicted is not remembered"


def test_arc_never_wants_more_than_there_is() -> None:
    """One key that comes back outweighs many that have not: p would pass the capacity."""
    policy = ARC(4)
    policy.insert(keys(0, 1, 2, 3))
    policy.load(keys(0, 1, 2, 3))
    assert policy.evict(3, nothing) == keys(3, 2, 1)
    for back, target in ((10, 3), (11, 4)):
        policy.insert(keys(back))
        stays = set(policy).difference(keys(back))
        assert policy.evict(1, stays.__contains__) == keys(back)
        policy.insert(keys(back))
        assert f"B1 0, B2 3, p {target}" in repr(policy)


def test_arc_remembers_no_more_than_the_paper_allows(seed: int) -> None:
    policy, chance = ARC(16), random.Random(seed)
    seen = set[str]()
    for moment in range(600):
        base = chance.choice([0, chance.randrange(40), 1000 + 8 * moment])
        request(policy, 16, keys(*range(base, base + chance.randint(1, 8))))
        assert len(policy._t1) + len(policy._b1) <= 16
        assert len(policy) + len(policy._b1) + len(policy._b2) <= 32
        assert not set(policy) & (policy._b1.keys() | policy._b2.keys())
        assert 0 <= policy._target <= 16
        seen.add(repr(policy))
    assert len({each.split()[-1] for each in seen}) > 4, "p has moved"


def test_s3fifo_keeps_what_survives_the_small_queue() -> None:
    policy = S3FIFO(20)
    policy.insert(keys(0, 1, 2, 3, 4))
    policy.touch(keys(0, 1, 2, 3, 4))
    policy.touch(keys(4, 3))
    policy.touch(keys(4, 2))
    policy.touch(keys(2))
    assert policy.victims(2, nothing) == keys(3, 1)
    assert list(policy) == keys(4, 3, 2, 1, 0), "4 and 2 move on when the others go, and not before"
    assert policy.evict(2, nothing) == keys(3, 1)
    assert list(policy) == keys(0, 4, 2)
    assert repr(policy) == "S3FIFO(3 of 20 keys: small 1, main 2, ghosts 2)"
    policy.insert(keys(1))
    assert list(policy) == keys(0, 4, 2, 1), "remembered, so it has survived"
    assert repr(policy) == "S3FIFO(4 of 20 keys: small 1, main 3, ghosts 1)"


def main_of(*uses: int) -> S3FIFO:
    """A policy with main queue 0, 1, ... of so many uses, and nothing in the small queue."""
    policy = S3FIFO(20)
    names = keys(*range(len(uses)))
    policy.insert(names[::-1])
    policy.evict(len(names), nothing)
    policy.insert(names[::-1])
    policy.touch(names)
    for name, times in zip(names, uses, strict=True):
        for _ in range(times):
            policy.touch([name])
    assert list(policy._main) == names
    return policy


def test_s3fifo_gives_another_round_for_every_use_up_to_three() -> None:
    assert main_of(1, 0, 2).victims(3, nothing) == keys(1, 0, 2)
    assert main_of(3, 50, 1).victims(3, nothing) == keys(2, 0, 1)
    policy = main_of(1, 0, 2)
    assert policy.evict(1, nothing) == keys(1)
    assert list(policy) == keys(2, 0)
    policy.touch(keys(0))
    assert policy.evict(1, nothing) == keys(0)
    assert repr(policy) == "S3FIFO(1 of 20 keys: small 0, main 1, ghosts 0)", "who leaves the main queue is forgotten"


@pytest.mark.parametrize("meanwhile", ["load", "touch", "insert", "remove", "removed itself", "others go", "more go"])
def test_s3fifo_drops_moves_if_anything_else_comes_between(meanwhile: str) -> None:
    policy = main_of(1, 0, 0, 0)
    assert policy.victims(1, nothing) == keys(1), "0 would get another round"
    going = {"others go": keys(2), "more go": keys(1, 2)}.get(meanwhile, keys(1))
    if meanwhile in ("load", "touch"):
        getattr(policy, meanwhile)(keys(3))
    elif meanwhile == "insert":
        policy.insert(keys(9))
    elif meanwhile == "remove":
        policy.remove(keys(3), evicted=False)
    policy.remove(going, evicted=meanwhile != "removed itself")
    assert next(iter(policy._main)) == key(0)
    assert not set(going) & set(policy)


def test_s3fifo_remembers_as_many_keys_as_the_main_queue_holds() -> None:
    policy = S3FIFO(20)
    for index in range(100):
        request(policy, 20, keys(index))
        assert len(policy._ghosts) <= 18
        assert not policy._ghosts.keys() & set(policy)
    assert list(policy._ghosts) == keys(*range(62, 80))


# how one is chosen


class OldestFirst(Policy):
    """A user's own: first in, first out."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: list[bytes] = []

    def insert(self, keys: Sequence[bytes]) -> None:
        self.keys += keys

    def load(self, keys: Sequence[bytes]) -> None: ...

    def touch(self, keys: Sequence[bytes]) -> None: ...

    def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
        del evicted
        self.keys = [each for each in self.keys if each not in keys]

    def victims(self, count: int, protected: Protected) -> list[bytes] | None:
        found = [each for each in self.keys if not protected(each)]
        return found[:count] if len(found) >= count else None

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)


def test_a_policy_of_the_callers_own_is_used_as_it_is() -> None:
    mine = OldestFirst(3)
    assert make_policy(mine, 8) is mine
    made = make_policy(OldestFirst, 8)
    assert isinstance(made, OldestFirst)
    assert made.capacity == 8
    made.insert(keys(0, 1, 2))
    assert made.evict(4, nothing) is None
    assert made.evict(1, nothing) == keys(0)
    assert made.make_room(keys(7, 8, 9), 2, nothing) == (3, keys(1))
    assert made.make_room(keys(7, 8, 9), 0, nothing) is None
    assert made.make_room(keys(7), 2, nothing) == (1, [])


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_is_chosen_by_name(name: str) -> None:
    made, policies = make_policy(name, 8), {str(each): kind for each, kind in POLICIES.items()}
    assert type(made) is policies[name]
    assert make_policy(type(made), 8) is not made


@pytest.mark.parametrize("name", ADMITS_ALL)
def test_a_policy_that_declines_nothing_is_asked_only_where_room_is_missing(name: str) -> None:
    asked: list[int] = []
    base: Any = POLICIES[name]  # type: ignore[index]

    class Asked(base):  # type: ignore[misc]
        def make_room(self, newcomers: Sequence[bytes], room: int, protected: Protected) -> Any:
            asked.append(room)
            return super().make_room(newcomers, room, protected)

    index = CacheIndex(4, policy=Asked)
    for number in range(2):
        index.reserve(keys(2 * number, 2 * number + 1)).commit()
    assert asked == []
    index.reserve(keys(4)).commit()
    assert asked == [0]


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"policy must be one of arc, lru, prefix, s3fifo.*got 'fifo'"):
        make_policy("fifo", 8)
    with pytest.raises(
        TypeError, match=r"policy must be a name, a kvoffload.cache.policies.Policy or a function.*got 7"
    ):
        make_policy(7, 8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a function that makes one, got \[8\]"):
        make_policy(lambda capacity: [capacity], 8)  # type: ignore[arg-type]

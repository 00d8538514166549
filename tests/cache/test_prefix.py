"""The prefix policy: the same as a brute-force one, prefixes before what needs them, and what it learns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policy_oracles import ACTIONS, PAIRS, SideBySide, Step
from policy_steps import STEPS
from prefix_oracle import PrefixOracle, Settings
from seeds import rest_long

from kvoffload.cache.index import CacheIndex
from kvoffload.cache.policies import Prefix, prefix, reuse
from kvoffload.cache.policies.reuse import KINDS, ReuseModel, Survivors, kind_of

EDGES = (0, 2, 4, 7, 11, 16, 24, 40, 70, 120, 300)


@pytest.fixture
def small() -> Iterator[None]:
    """Constants with which learning, forgetting and batches of keys happen within a few steps."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (reuse, prefix):
            patch.setattr(module, "EDGES", EDGES)
        patch.setattr(reuse, "CHANCE", 2.5)  # no whole number, which rounding might decide
        patch.setattr(prefix, "FEWEST_REMEMBERED", 9)
        patch.setattr(prefix, "SHORTEST_ROUND", 20)
        patch.setattr(prefix, "BATCH", 3)
        patch.setitem(PAIRS, "prefix", (Prefix, partial(PrefixOracle, settings=Settings(EDGES, 9, 20, 2.5))))
        yield


@pytest.mark.usefixtures("small")
@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(capacity=st.integers(1, 14), steps=st.lists(STEPS, max_size=40))
def test_any_steps_give_up_what_the_oracle_gives_up(capacity: int, steps: list[Step]) -> None:
    pair = SideBySide("prefix", capacity)
    for step in steps:
        pair.take(step)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("in_time", rest_long([True, False], 1))
@pytest.mark.parametrize("capacity", rest_long([7, 40], 1))
def test_long_courses_give_up_what_the_oracle_gives_up(capacity: int, in_time: bool, seed: int) -> None:
    """Conversations that grow and come back, and requests that never do."""
    chance = random.Random(seed)
    pair = SideBySide("prefix", capacity)
    if in_time:
        assert isinstance(pair.oracle, PrefixOracle)
        pair.oracle.settings = replace(pair.oracle.settings, in_time=True)
        pair.policy.at(0.0, 0.0)
    lengths = [1] * 6
    for moment in range(200):
        number = chance.randrange(len(lengths))
        lengths[number] = lengths[number] % 9 + chance.randint(0, 2)
        keys = (b"start", *(b"%d/%d" % (number, place) for place in range(lengths[number])))
        if chance.random() < 0.3:
            keys = (b"start", *(b"once/%d/%d" % (moment, place) for place in range(chance.randint(1, 5))))
        protected = frozenset(key for key in pair.policy if chance.random() < chance.choice([0, 0.1, 0.9]))
        action = chance.choice(["request"] * 8 + list(ACTIONS))
        pair.take(Step(action, keys[:capacity], protected, chance.randint(0, capacity // 2)))
    assert isinstance(pair.oracle, PrefixOracle)
    assert pair.oracle.due > 10 * pair.oracle.round, "it has learned often"


@pytest.mark.usefixtures("small")
def test_a_prefix_never_goes_before_what_needs_it(seed: int) -> None:
    """Whatever was learned: requests of a random tree, and the whole order of leaving after each."""
    chance = random.Random(seed)
    policy, resident = Prefix(60), set[bytes]()
    for _ in range(800):
        path = [b""]
        for _ in range(chance.randint(1, 8)):
            path.append(path[-1] + b"%d" % min(chance.randrange(4), chance.randrange(4)))
        keys = path[1:]
        policy.load([key for key in keys if key in resident])
        made = policy.make_room(
            [key for key in keys if key not in resident], 60 - len(resident), set(keys).__contains__
        )
        assert made is not None
        policy.remove(made.victims, evicted=True)
        resident -= set(made.victims)
        stored = [key for key in keys if key not in resident][: made.admitted]
        policy.insert(stored)
        resident |= set(stored)
        policy.touch(keys)
        gone = set[bytes]()
        for key in policy:
            gone.add(key)
            needing = [other for other in resident if other.startswith(key)]
            assert gone.issuperset(needing), (seed, key)


def play(index: CacheIndex, requests: Sequence[list[bytes]]) -> tuple[int, int]:
    """Hits, and blocks stored."""
    hits = 0
    before = index.statistics().stored
    for keys in requests:
        hits += index.lookup(keys)
        index.reserve(keys).commit()
        index.touch(keys)
    return hits, index.statistics().stored - before


def scan(start: int, count: int) -> list[list[bytes]]:
    return [[b"once/%d/%d" % (start + number, place) for place in range(20)] for number in range(count)]


def loop(count: int) -> list[list[bytes]]:
    return [[b"often/%d/%d" % (number % 40, place) for place in range(20)] for number in range(count)]


def test_what_never_comes_back_is_not_stored_once_that_is_known() -> None:
    """Half of the requests come back after 1,600 blocks, the others never; the cache holds what comes back."""
    mixed = [request for pair in zip(loop(4_000), scan(0, 4_000), strict=True) for request in pair]
    index = CacheIndex(900, policy="prefix")
    play(index, mixed[:4_000])
    hits, stored = play(index, mixed[4_000:])
    assert hits > 0.9 * 2_000 * 20
    assert stored < 0.15 * 2_000 * 20
    least = CacheIndex(900, policy="lru")
    play(least, mixed[:4_000])
    assert play(least, mixed[4_000:])[0] == 0


@pytest.mark.parametrize("in_time", rest_long([False, True], 1))
def test_a_change_of_the_workload_is_noticed(in_time: bool) -> None:
    """What used to come back does not any more, and what never did now does."""
    policy = Prefix(900)
    if in_time:
        policy.at(0.0, 0.0)
    index = CacheIndex(900, policy=policy)
    play(index, [request for pair in zip(loop(3_000), scan(0, 3_000), strict=True) for request in pair])
    after = [[b"new/%d/%d" % (number % 40, place) for place in range(20)] for number in range(4_000)]
    play(index, after[:2_000])
    assert play(index, after[2_000:])[0] > 0.9 * 2_000 * 20


def test_requests_need_not_be_touched() -> None:
    """Whoever only stores and loads gets recency and frequency all the same."""
    policy = Prefix(8)
    policy.insert([b"a", b"b", b"c", b"d"])
    policy.load([b"a", b"b"])
    policy.load([b"c"])
    assert policy.victims(4, lambda _: False) == [b"d", b"b", b"a", b"c"]


# the model


def model_of(make: Callable[[ReuseModel], object]) -> ReuseModel:
    model = ReuseModel(1024)
    make(model)
    return model


@pytest.mark.usefixtures("small")
def test_worth_is_the_best_density_of_uses() -> None:
    """100 blocks: 10 used at age 0..1, 30 at 4..6, 60 forgotten at 11..15; by hand."""

    def observe(model: ReuseModel) -> None:
        model.reused(1, 1, 10, resident=True, recent=0)
        model.reused(1, 5, 30, resident=True, recent=0)
        model.lost(1, 12, 60)
        model.learn([])

    model = model_of(observe)
    first = 10 / 100
    kept = 2 * (1 - first / 2)
    second = (1 - first) * 30 / 90
    by_age_7 = (first + second) / (kept + 2 * (1 - first) + 3 * (1 - first - second / 2))
    assert model.worth(1, 0) == pytest.approx(max(first / kept, by_age_7))
    assert model.worth(1, 4) == pytest.approx((30 / 90) / (3 * (1 - 30 / 90 / 2)))
    assert model.worth(1, 8) == 0.0


@pytest.mark.usefixtures("small")
def test_what_still_waits_counts_as_far_as_it_has_waited() -> None:
    def observe(model: ReuseModel) -> None:
        model.reused(1, 5, 30, resident=True, recent=0)
        model.learn([Survivors(1, 3, 50)])

    model = model_of(observe)
    assert model.worth(1, 4) == pytest.approx(1 / (3 * 0.5)), "all 30 that reached age 4 were used within 3 blocks"


@pytest.mark.usefixtures("small")
def test_too_few_observations_conclude_nothing() -> None:
    model = ReuseModel(1024)
    before = [model.worth(kind, 0) for kind in range(KINDS)]
    model.reused(3, 0, 2, resident=True, recent=0)
    model.learn([])
    assert [model.worth(kind, 0) for kind in range(KINDS)] == before
    model.reused(3, 0, 2, resident=True, recent=0)
    model.learn([])
    assert model.worth(3, 0) != before[3]


@pytest.mark.parametrize(("in_time", "least", "most"), [(False, 0, 1e-5), (True, 5e-5, 2e-4)])
def test_observations_fade(in_time: bool, least: float, most: float) -> None:
    """More slowly where ages are measured in time."""

    def observe(model: ReuseModel) -> None:
        model.in_time = in_time
        model.reused(1, 1_000, 1_000, resident=True, recent=0)
        model.learn([])
        for _ in range(30):
            model.lost(1, 100_000, 1_000)
            model.learn([])

    assert least <= model_of(observe).worth(1, 900) < most


def test_kinds_rise_along_a_chain() -> None:
    """What comes first was used as often or more, and where it was used as often, is not the end."""
    kinds = [kind_of(uses, is_end) for uses in range(1, 8) for is_end in (True, False)]
    assert kinds == sorted(kinds)
    assert (kinds[0], kinds[-1]) == (0, KINDS - 1)


def test_it_becomes_lru_at_once_where_lru_finds_more_and_declines_nothing_until_it_has_caught_up() -> None:
    model = ReuseModel(1024)
    model.reused(10, 1_000, 10_000, resident=True, recent=10_000)
    model.learn([])
    model.reused(10, 1_000, 64, resident=False, recent=64)
    assert model.worth(10, 1_000) > 0, "within its leeway: 64 blocks, or a few in ten thousand"
    model.reused(10, 1_000, 50, resident=False, recent=50)
    assert (model.chain_worths, model.worth(10, 1_000)) == (None, -1.0)
    model.learn([])
    assert (model.chain_worths, model.worth(10, 1_000)) == (None, -1.0)
    model.reused(10, 1_000, 100, resident=True, recent=0)
    model.learn([])
    assert model.chain_worths is not None
    assert model.worth(10, 1_000) > 0


def test_it_may_be_further_behind_where_lru_misses_more() -> None:
    model = ReuseModel(1024)
    model.reused(10, 1_000, 10_000, resident=False, recent=0)
    model.reused(10, 1_000, 5_000, resident=False, recent=5_000)
    assert model.worth(10, 1_000) > 0
    model.reused(10, 1_000, 45_000, resident=True, recent=45_000)
    assert model.worth(10, 1_000) == -1.0


@pytest.mark.parametrize("capacity", [1, 32])
def test_a_small_cache_finds_what_lru_finds_though_lru_misses_a_third(capacity: int, seed: int) -> None:
    """Keys come back the sooner, the later they were used: ages that all lie in the model's first range."""
    chance, stack, asked = random.Random(seed), list(range(20 * capacity)), list[int]()
    for number in range(20 * capacity, 9_000):
        depth = int(chance.expovariate(1 / capacity))
        asked.append(stack.pop(-1 - depth) if depth < len(stack) else number)
        stack.append(asked[-1])
    hits = {}
    for policy in ("prefix", "lru"):
        index, hits[policy] = CacheIndex(capacity, policy=policy), 0
        for number in asked:
            key = [b"%d" % number]
            found = index.lookup(key)
            hits[policy] += found
            index.load(key[:found])
            index.reserve(key).commit()
            index.touch(key)
    assert 0.4 * len(asked) < hits["lru"] < 2 / 3 * len(asked)
    assert hits["prefix"] > 0.97 * hits["lru"]


@pytest.mark.parametrize(("promised", "found_by_lru", "is_lru"), [(0, 900, 0), (0.9, 900, 1), (0.9, 300, 0)])
def test_below_promises_it_is_lru_where_lru_finds_most(promised: float, found_by_lru: int, is_lru: int) -> None:
    model = ReuseModel(1024)
    model.promised = promised
    model.reused(10, 1_000, 1_000, resident=True, recent=found_by_lru)
    model.learn([])
    assert (model.chain_worths is None) == bool(is_lru)


@pytest.mark.parametrize("in_time", [False, True])
def test_what_it_has_lost_has_to_be_made_up_for(in_time: bool) -> None:
    model = ReuseModel(1024)
    model.in_time = in_time
    model.reused(10, 1_000, 10_000, resident=True, recent=10_000)
    model.learn([])
    model.reused(10, 1_000, 400, resident=False, recent=400)
    for _ in range(1_000):
        model.learn([])
    assert model.worth(10, 1_000) == -1.0
    model.reused(10, 1_000, 100, resident=True, recent=0)
    model.learn([])
    first = model.worth(10, 1_000)
    model.learn([])
    again = 2 if in_time else 1
    assert model.worth(10, 1_000) == pytest.approx(again * first), "in time it declines again little by little"


def test_what_it_has_lost_is_forgotten_slowly() -> None:
    """So that a cache that was behind on other traffic does not do as LRU does for ever."""
    model = ReuseModel(1024)
    model.reused(10, 1_000, 10_000, resident=True, recent=10_000)
    model.reused(10, 1_000, 400, resident=False, recent=400)
    assert model.worth(10, 1_000) == -1.0
    for _ in range(2_000):
        model.learn([])
    assert model.worth(10, 1_000) != -1.0


def test_hits_that_it_had_more_are_forgotten_in_time() -> None:
    model = ReuseModel(1024)
    model.reused(10, 1_000, 10_000, resident=True, recent=9_000)
    for _ in range(300):
        model.learn([])
    model.reused(10, 1_000, 10_000, resident=True, recent=10_000)
    model.reused(10, 1_000, 900, resident=False, recent=900)
    assert model.worth(10, 1_000) == -1.0


@pytest.mark.usefixtures("small")
def test_a_kind_that_is_hardly_seen_is_as_the_kind_below_it_and_one_that_is_seen_often_is_not() -> None:
    """Of 1,000 blocks used twice, half are used again soon. Blocks used three times are lost: 1 or 1,000 of them."""

    def worth(lost: int) -> tuple[float, float]:
        model = ReuseModel(1024)
        for _ in range(500):
            model.reused(3, 1, 1, resident=True, recent=1)
            model.lost(3, 200, 1)
        model.lost(5, 200, lost)
        model.learn([])
        return model.worth(5, 0), model.worth(3, 0)

    hardly, below = worth(1)
    assert 0.8 * below < hardly < below
    often, below = worth(1_000)
    assert 0 < often < 0.02 * below


@pytest.mark.usefixtures("small")
def test_blocks_that_are_used_together_say_little_more_than_one() -> None:
    def worth(together: int) -> float:
        model = ReuseModel(1024)
        model.lost(3, 200, 1_000)
        for _ in range(1_000 // together):
            model.reused(5, 1, together, resident=True, recent=together)
        model.learn([])
        return model.worth(5, 0)

    few, many = worth(500), worth(1)
    assert few < 0.5 * many


@pytest.mark.usefixtures("small")
def test_chain_worths_cover_what_may_need_a_block(seed: int) -> None:
    chance = random.Random(seed)
    model = ReuseModel(1024)
    for _ in range(200):
        model.reused(chance.randrange(KINDS), chance.randrange(100), chance.randint(1, 9), resident=True, recent=0)
        model.lost(chance.randrange(KINDS), chance.randrange(400), chance.randint(1, 9))
    model.learn([])
    assert model.chain_worths is not None
    for kind in range(KINDS):
        for place, age in enumerate(EDGES):
            needing = [model.worth(low, old) for low in range(kind + 1) for old in EDGES if old >= age]
            assert model.chain_worths[kind][place] == max(needing)


def test_a_key_that_an_open_request_uses_many_times_is_known_as_long_as_it_is_resident() -> None:
    """From the sixth use on it joins the run that it is in, or was in when it was evicted."""
    policy = Prefix(8)
    request = policy.for_request({})
    request.insert([b"a"])
    for _ in range(10):
        request.load([b"a"])
        assert list(policy) == [b"a"]
    request.insert([b"b"])
    request.load([b"a", b"b"])
    assert set(policy) == {b"a", b"b"}
    policy.remove([b"a"], evicted=True)
    assert set(policy) == {b"b"}
    request.insert([b"a"])
    assert set(policy) == {b"a", b"b"}
    assert len(policy) == 2


def test_room_for_one_key_is_found_behind_a_run_that_has_no_keys_left() -> None:
    """That run comes first in its queue, since that of an open request, which was before it, is the latest now."""
    policy = Prefix(4)
    request = policy.for_request({})
    request.insert([b"a"])
    policy.for_request({}).insert([b"b"])
    policy.remove([b"b"], evicted=False)
    request.insert([b"c"])
    room = policy.for_request({}).make_room([b"d"], 0, lambda _: False)
    assert room is not None
    assert room.victims == [b"c"]
    own = request.make_room([b"d"], 0, lambda key: key in (b"a", b"c"))
    assert own is None

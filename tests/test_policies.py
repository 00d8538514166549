"""Which key goes, what may not go, and that it stays cheap."""

from __future__ import annotations

import time

import pytest

from kvoffload.policies import LRU, POLICIES, Policy, make_policy


def key(index: int) -> bytes:
    return index.to_bytes(4, "big")


def anything(_: bytes) -> bool:
    return True


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_what_was_inserted_and_gives_up_what_may_go(name: str) -> None:
    policy = make_policy(name)
    for index in range(5):
        policy.insert(key(index))
    assert set(policy) == {key(index) for index in range(5)}
    first = policy.victims(2, anything)
    assert first is not None
    assert len(set(first)) == 2
    assert policy.victims(2, anything) == first  # asking changes nothing
    assert policy.victims(5, lambda each: each != key(3)) is None
    others = policy.victims(4, lambda each: each != key(3))
    assert others is not None
    assert set(others) == {key(index) for index in (0, 1, 2, 4)}
    policy.remove(key(0))
    assert key(0) not in set(policy)
    assert policy.victims(0, anything) == []


def test_lru_gives_up_the_least_recently_used_first() -> None:
    policy = LRU(key(index) for index in range(4))
    policy.touch(key(0))
    policy.insert(key(9))
    policy.touch(key(2))
    assert list(policy) == [key(index) for index in (1, 3, 0, 9, 2)]
    assert policy.victims(3, anything) == [key(1), key(3), key(0)]
    assert len(policy) == 5


def test_a_policy_of_the_callers_own_is_used_as_it_is() -> None:
    mine: Policy = LRU()
    assert make_policy(mine) is mine
    with pytest.raises(ValueError, match=r"policy must be one of lru.*got 'fifo'"):
        make_policy("fifo")


@pytest.mark.parametrize("name", POLICIES)
def test_pitfall_27_100_000_evictions_take_linear_time(name: str) -> None:
    """A full cache of 100,000 keys in which every insertion costs an eviction: 0.3 s, and not minutes."""
    policy = make_policy(name)
    for index in range(100_000):
        policy.insert(key(index))
    begin = time.perf_counter()
    for index in range(100_000, 200_000):
        victims = policy.victims(1, anything)
        assert victims is not None
        policy.remove(victims[0])
        policy.insert(key(index))
        assert time.perf_counter() - begin < 10, f"only {index - 100_000} evictions in 10 seconds"
    assert len(list(policy)) == 100_000


@pytest.mark.parametrize("name", POLICIES)
def test_pitfall_27_many_victims_at_once_cost_as_much_as_they_are(name: str) -> None:
    policy = make_policy(name)
    for index in range(100_000):
        policy.insert(key(index))
    begin = time.perf_counter()
    victims = policy.victims(50_000, anything)
    assert time.perf_counter() - begin < 1.0
    assert victims is not None
    assert len(set(victims)) == 50_000

"""Filling an empty CacheIndex after a restart: each key at its entry, in the order of requests, for every policy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvoffload.cache import index as restoring
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.policies import LRU, PolicyName
from kvoffload.cache.pools import Tenant
from kvoffload.errors import LayoutError

POLICIES = ["prefix", "lru", "arc", "s3fifo"]


def restored(
    requests: Sequence[Sequence[bytes]], *, capacity: int = 32, entries: Sequence[int] | None = None, **options: Any
) -> CacheIndex:
    index = CacheIndex(capacity, **options)
    keys = [key for request in requests for key in request]
    numbers = np.repeat(np.arange(len(requests)) * 3, list(map(len, requests)))
    places = np.arange(len(keys)) if entries is None else np.array(entries)
    assert index.restore(keys, places, numbers) == len(keys)
    index.check()
    return index


def some_requests(rng: random.Random, keys: int) -> list[list[bytes]]:
    requests: list[list[bytes]] = []
    number = 0
    while number < keys:
        length = min(rng.randint(1, 5), keys - number)
        requests.append([b"%d" % each for each in range(number, number + length)])
        number += length
    return requests


def evicted_order(index: CacheIndex) -> list[bytes]:
    """The keys in the order in which a policy evicts them for keys that come one at a time."""
    order: list[bytes] = []
    mine = set(index.keys)
    for number in range(10 * index.capacity):
        with index.reserve([b"new %d" % number]) as reservation:
            order += [key for key in reservation.evicted if key in mine]
    return order


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_evicts_as_if_the_requests_had_just_been_stored(policy: PolicyName, seed: int) -> None:
    requests = some_requests(random.Random(seed), 32)
    index = restored(requests, policy=policy)
    fresh = CacheIndex(32, policy=policy)
    for request in requests:
        with fresh.reserve(request):
            pass
    assert evicted_order(index) == evicted_order(fresh)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_many_requests_are_inserted_together_in_their_order(
    monkeypatch: pytest.MonkeyPatch, seed: int, most: int, policy: str
) -> None:
    """For a policy of recency alone that is the same; for every policy few calls do it."""
    monkeypatch.setattr(restoring, "MOST_INSERTS", most)
    requests = some_requests(random.Random(seed), 32)
    index = restored(requests, policy=policy)
    if policy == "lru":
        assert evicted_order(index) == [key for request in requests for key in reversed(request)]

    class Counting(LRU):
        calls = 0

        def insert(self, keys: Sequence[bytes]) -> None:
            self.calls += 1
            super().insert(keys)

    counting = Counting()
    restored(requests, policy=counting)
    assert 1 <= counting.calls <= most


def test_keys_are_hits_at_their_entries_and_the_rest_is_free() -> None:
    index = restored([[b"a", b"b"], [b"c"]], capacity=8, entries=[5, 0, 3])
    assert index.lookup([b"a", b"b", b"c"]) == 3
    with index.acquire([b"a", b"b", b"c"]) as lease:
        assert lease.indices == (5, 0, 3)
    with index.reserve([b"%d" % number for number in range(5)], all_or_nothing=True) as reservation:
        assert sorted(reservation.indices) == [1, 2, 4, 6, 7]
        assert reservation.evicted == ()
    index.check()
    assert index.statistics().resident == 8
    assert index.statistics().stored == 5, "what was there is not counted as stored"


def test_residency_counts_from_the_restart() -> None:
    index = restored([[b"a"], [b"b"]], capacity=2, policy="lru")
    with index.reserve([b"c"]):
        pass
    assert index.statistics().residency_seconds.total < 1e4


def test_tenants_have_their_pools_and_quotas() -> None:
    tenants = {"a": Tenant(max_blocks=2), "b": Tenant(priority=-1)}
    index = CacheIndex(6, policy="lru", tenants=tenants)
    keys = [b"a0", b"a1", b"b0", b"a2", b"x0", b"y0"]
    owners = ["a", "a", "b", "a", "", "gone"]
    assert index.restore(keys, np.arange(6), np.arange(6), tenants=owners) == 5
    index.check()
    assert set(index.keys) == set(keys) - {b"a0"}, "beyond the quota the oldest is left out"
    with index.reserve([b"a3"], tenant="a") as reservation:
        assert reservation.evicted == (b"a1",)
    with index.reserve([b"n0", b"n1"]) as reservation:
        assert reservation.evicted == (b"b0",), "of the lower priority, and one entry was free"


def test_no_keys_are_legal() -> None:
    index = CacheIndex(4)
    assert index.restore([], np.zeros(0, np.int64), np.zeros(0, np.int64)) == 0
    index.check()


@pytest.mark.parametrize(
    ("keys", "entries", "said"),
    [
        ([b"a", b"a"], [0, 1], "repeats"),
        ([b"a", b"b"], [1, 1], "different numbers"),
        ([b"a", b"b"], [0, 4], r"in \[0, 4\)"),
        ([b"a", b"b"], [-1, 0], r"in \[0, 4\)"),
        ([b"a", b"b"], [0], "one length"),
        ([b"a", "b"], [0, 1], r"keys\[1\] must be bytes"),
    ],
)
def test_wrong_arguments_change_nothing(keys: list[bytes], entries: list[int], said: str) -> None:
    index = CacheIndex(4)
    with pytest.raises(LayoutError, match=said):
        index.restore(keys, np.array(entries), np.zeros(len(keys), np.int64))
    assert len(index) == 0
    index.check()
    assert index.restore([b"a"], np.array([2]), np.zeros(1, np.int64)) == 1
    with pytest.raises(ValueError, match="has held no key"):
        index.restore([b"b"], np.array([3]), np.zeros(1, np.int64))
    assert index.keys == [b"a"]


def test_an_interrupted_restore_is_completed_by_the_next_call() -> None:
    class Interrupted(LRU):
        left = 2

        def insert(self, keys: Sequence[bytes]) -> None:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            super().insert(keys)

    index = CacheIndex(8, policy=lambda capacity: Interrupted(capacity))
    with pytest.raises(KeyboardInterrupt):
        index.restore([b"a", b"b", b"c"], np.array([4, 1, 2]), np.array([0, 1, 2]))
    assert index.lookup([b"a", b"b", b"c"]) == 3
    with index.acquire([b"a", b"b", b"c"]) as lease:
        assert lease.indices == (4, 1, 2)
    index.check()

"""CacheIndex: the tiers of a BlockCache over memory that others fill, without an engine."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tier_classes import DictTier
from tiering import SECONDS, aligned, key, keys, until

from kvoffload import CacheIndex, CapacityError, ClosedError, LayoutError, Status
from kvoffload.cache.policies import LRU
from kvoffload.internal.types import UInt8Array
from kvoffload.tiers import Tier

DIGEST = b"d" * 16


class Ranks:
    """What engines of two processes would do: fill the slots that the index says, and read them."""

    def __init__(self, index: CacheIndex, pools: Sequence[UInt8Array]) -> None:
        self.index, self.pools = index, pools

    def store(self, numbers: Sequence[int], **options: Any) -> None:
        reservation = self.index.reserve(keys(numbers), **options)
        for name, entry in zip(reservation.keys, reservation.indices, strict=True):
            for rank, pool in enumerate(self.pools):
                pool[entry] = content(int(name[3:]), rank, pool.shape[1])
        reservation.commit()

    def holds(self, numbers: Sequence[int]) -> bool:
        with self.index.acquire(keys(numbers)) as lease:
            return all(
                np.array_equal(pool[entry], content(number, rank, pool.shape[1]))
                for number, entry in zip(numbers, lease.indices, strict=True)
                for rank, pool in enumerate(self.pools)
            )

    def written(self, numbers: Sequence[int]) -> None:
        """Store keys, have the tiers take them, and remove them from the slots alone."""
        self.store(numbers)
        assert self.index.drain(SECONDS)
        self.index.clear(below=False)


def content(number: int, rank: int, nbytes: int) -> UInt8Array:
    return np.random.default_rng([number, rank]).integers(0, 256, nbytes, dtype=np.uint8)


@contextmanager
def ranks(*tiers: Tier, capacity: int = 8, write: Any = "through", **options: Any) -> Iterator[Ranks]:
    pools = [aligned(capacity), aligned(capacity, 8192)]
    with CacheIndex(
        capacity, pools=pools, tiers=list(tiers) or [DictTier()], layout=DIGEST, write=write, policy="lru", **options
    ) as index:
        yield Ranks(index, pools)
        index.check()


def test_a_record_is_the_slots_of_all_ranks() -> None:
    with ranks() as bench:
        bench.written(range(4))
        assert bench.index.locate(keys([0, 9])) == ["dict", "missing"]
        assert bench.index.status(keys([0])) == [Status.MISS]
        with bench.index.promote(keys(range(5))) as promotion:
            assert promotion.wait(SECONDS) == 4
            assert bench.holds(range(4))
        assert bench.index.tier_statistics()[0].promoted == 4


def test_what_a_tier_is_known_to_have() -> None:
    tier = DictTier()
    with ranks(tier) as bench:
        bench.written([1])
        assert bench.index.status_below(key(1)) is Status.HIT
        assert bench.index.status_below(key(2)) is Status.MISS
        assert bench.index.status_below(b"x" * 65) is Status.MISS


def test_a_tier_that_has_to_be_asked() -> None:
    class Asked(DictTier):
        def __init__(self) -> None:
            super().__init__()
            self.capabilities = type(self.capabilities)(durable=False, shared=False, local_index=False)

    with ranks(Asked()) as bench:
        bench.written([1])
        assert bench.index.status_below(key(1)) is Status.PENDING
        assert bench.index.status_below(key(2)) is Status.PENDING
        assert bench.index.promote(keys([1, 2])).wait(SECONDS) == 1


def test_admitted_keys_are_written_at_the_end_of_their_request() -> None:
    tier = DictTier()
    with ranks(tier, write="admitted") as bench:
        for _ in range(3):
            with bench.index.open_request() as request:
                bench.store([1, 2], request=request)
        assert bench.index.drain(SECONDS)
        assert set(tier.store) == set(keys([1, 2]))
        bench.store([3])
        for _ in range(3):
            bench.index.touch(keys([3]))
        assert bench.index.drain(SECONDS)
        assert key(3) in tier.store


def test_removed_keys_are_gone_from_the_tiers() -> None:
    tier = DictTier()
    with ranks(tier) as bench:
        bench.store(range(3))
        assert bench.index.drain(SECONDS)
        assert bench.index.remove(keys([0])) == 1
        assert set(tier.store) == set(keys([1, 2]))
        assert bench.index.clear() == 2
        assert not tier.store


def test_a_closed_index_has_its_slots_only() -> None:
    with ranks() as bench:
        bench.written([1])
        bench.store([2])
        assert bench.index.close(SECONDS)
        for call in (bench.index.promote, bench.index.remove):
            with pytest.raises(ClosedError, match="the index is closed"):
                call(keys([1]))
        with pytest.raises(ClosedError):
            bench.index.clear()
        assert bench.holds([2])


def test_an_index_that_is_garbage_closes_its_tiers() -> None:
    tier = DictTier()
    index = CacheIndex(2, pools=[aligned(2)], tiers=[tier], layout=None)
    watched = weakref.ref(index)
    del index
    until(lambda: gc.collect() >= 0 and tier.released == 1, "the end of the tier")
    assert watched() is None
    until(lambda: not [each for each in threading.enumerate() if each.name == "kvoffload-tiers"])


def test_what_is_refused() -> None:
    pool = aligned(4)
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"tiers": [7]}, TypeError, "must be a Tier"),
        ({"write": "often"}, ValueError, "write must be one of admitted, through, back, none, got"),
        ({"seconds_per_key": 0.0}, ValueError, "seconds_per_key"),
        ({"hung": -1}, ValueError, "hung"),
        ({"on_event": 3}, TypeError, "on_event"),
    ]
    for options, error, words in refused:
        with pytest.raises(error, match=words):
            CacheIndex(len(pool), pools=[pool], **{"tiers": [DictTier()], "layout": None, **options})
    with pytest.raises(CapacityError, match="no entries"):
        CacheIndex(0, pools=[pool[:0]], tiers=[DictTier()], layout=None)
    with pytest.raises(LayoutError, match=r"pools\[1\] must have 4 entries"):
        CacheIndex(len(pool), pools=[pool, aligned(3)], tiers=[DictTier()], layout=None)


def test_a_tiered_index_is_not_closed_inside_a_call_of_it() -> None:
    class Closing(LRU):
        def touch(self, names: Sequence[bytes]) -> None:
            del names
            index.close()

    pools = [aligned(4)]
    with CacheIndex(len(pools[0]), pools=pools, tiers=[DictTier()], layout=DIGEST, policy=Closing()) as index:
        store = Ranks(index, pools).store
        store([0])
        with pytest.raises(RuntimeError, match=r"close was called .* in the middle of another call"):
            index.touch(keys([0]))
        assert index.lookup(keys([0])) == 1

"""How long computing a key takes, measured by what the cache sees: bounds, their median, what a fetch makes of it."""

from __future__ import annotations

import random
import time

import pytest
from seeds import seeds
from tier_classes import DictTier, Rows
from tiering import SECONDS, Bench, keys, tiered

from kvoffload import NO_WAIT
from kvoffload.cache.tiering.below import ComputeTime
from kvoffload.tiers import Outcome


class Clock:
    """Seconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def measured() -> tuple[ComputeTime, Clock]:
    compute, clock = ComputeTime(None), Clock()
    compute.clock = clock
    return compute, clock


def request(compute: ComputeTime, clock: Clock, number: int, count: int, seconds: float) -> None:
    """A request that misses `count` keys, and has them stored so long after."""
    mine = keys(range(1000 * number, 1000 * number + count))
    compute.missed(mine)
    clock.now += seconds
    compute.stored(mine)


def test_nothing_is_known_before_eight_stores() -> None:
    compute, clock = measured()
    for number in range(7):
        request(compute, clock, number, 10, 1.0)
        assert compute.seconds_per_key is None
    request(compute, clock, 7, 10, 1.0)
    assert compute.seconds_per_key == pytest.approx(0.1)


def test_a_few_stores_of_what_was_not_computed_do_not_matter() -> None:
    """Nor a few that came long after."""
    compute, clock = measured()
    for number in range(64):
        request(compute, clock, number, 10, 1e-6 if number % 4 == 0 else 50.0 if number % 4 == 1 else 1.0)
    assert compute.seconds_per_key == pytest.approx(0.1)


def test_the_latest_count() -> None:
    compute, clock = measured()
    for number in range(100):
        request(compute, clock, number, 10, 1.0 if number < 50 else 4.0)
    assert compute.seconds_per_key == pytest.approx(0.4)


def test_the_first_fetch_that_missed_a_key_counts() -> None:
    """Two requests with one prefix: the second has its blocks from the first, which began to compute them earlier."""
    compute, clock = measured()
    for number in range(8):
        mine = keys(range(100 * number, 100 * number + 10))
        compute.missed(mine)
        clock.now += 0.9
        compute.missed(mine)
        clock.now += 0.1
        compute.stored(mine)
        compute.stored(mine)  # the first request's: nothing is new
    assert compute.seconds_per_key == pytest.approx(0.1)


def test_a_request_that_went_away_is_forgotten() -> None:
    compute, clock = measured()
    for number in range(8):
        compute.missed(keys([number]))
        clock.now += 61.0
        compute.missed(keys([number]))
        clock.now += 0.5
        compute.stored(keys([number]))
    assert compute.seconds_per_key == pytest.approx(0.5)


def test_it_stays_bounded() -> None:
    compute, _ = measured()
    for number in range(70):
        compute.missed(keys(range(1000 * number, 1000 * number + 1000)))
    assert len(compute._missed) < 70_000


def test_a_speed_that_is_given_stays() -> None:
    compute, clock = ComputeTime(0.25), Clock()
    compute.clock = clock
    for number in range(20):
        request(compute, clock, number, 10, 1.0)
    assert compute.seconds_per_key == 0.25
    assert compute._missed == {}


@pytest.mark.parametrize("seed", seeds(5))
def test_it_is_never_shorter_than_computing(seed: int) -> None:
    """A random host: batches, queues, requests that share prefixes, decoding, requests that are cancelled. Each key
    takes 10 ms to compute, alone on the GPU.
    """
    chance, (compute, clock) = random.Random(seed), measured()
    waiting: list[tuple[int, int]] = []  # first key, number of keys
    for _ in range(300):
        for _ in range(chance.randrange(3)):
            first = 10_000 * chance.randrange(40)
            waiting.append((first, chance.randrange(1, 30)))
            compute.missed(keys(range(first, first + waiting[-1][1])))
        clock.now += chance.random()  # queues, decoding of others
        batch = [waiting.pop(0) for _ in range(min(len(waiting), chance.randrange(4)))]
        if chance.random() < 0.1:
            continue  # cancelled
        computed = {key for first, count in batch for key in range(first, first + count)}
        clock.now += 0.01 * len(computed)
        for first, count in batch:
            clock.now += chance.random() * 0.3  # decoding
            compute.stored(keys(range(first, first + count)))
        if compute.seconds_per_key is not None:
            assert compute.seconds_per_key >= 0.01


# a cache that measures ------------------------------------------------------------------------------------------------


class SlowTier(DictTier):
    """A read takes 20 ms."""

    reads = 0

    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        self.reads += 1
        time.sleep(0.02)
        return super().read_record(key, rows)


def serve(bench: Bench, clock: Clock, number: int, seconds: float) -> None:
    """A request of two keys that nothing has: it is computed in so many seconds, and kept."""
    wanted = keys([1000 + 2 * number, 1001 + 2 * number])
    job = bench.cache.fetch(wanted, bench.blocks([0, 1]), after=NO_WAIT)
    assert job.hits == 0
    clock.now += seconds
    bench.cache.keep(wanted, bench.blocks([0, 1]), after=NO_WAIT).wait(SECONDS)
    assert bench.cache.drain(SECONDS)


@pytest.mark.parametrize(("seconds", "asked"), [(0.004, False), (40.0, True)])
def test_a_tier_that_is_slower_than_computing_is_not_asked(seconds: float, asked: bool) -> None:
    tier, clock = SlowTier(), Clock()
    with tiered(tier) as bench:
        compute = bench.manager.compute
        compute.clock = clock
        bench.written(range(4))
        assert bench.cache.fetch(keys(range(2)), bench.blocks([0, 1]), after=NO_WAIT).wait(SECONDS) == 2
        for number in range(8):
            assert compute.seconds_per_key is None
            serve(bench, clock, number, seconds)
        assert compute.seconds_per_key == pytest.approx(seconds / 2)
        bench.cache.clear(below=False)
        reads = tier.reads
        job = bench.cache.fetch(keys(range(4)), bench.blocks(range(4)), after=NO_WAIT)
        assert job.wait(SECONDS) == (4 if asked else 0)
        assert (tier.reads > reads) is asked
        assert (bench.cache.tier_statistics()[0].slower == 4) is not asked


def test_a_promotion_that_is_no_fetch_measures_nothing() -> None:
    """Its keys may be looked up long before, or in vain."""
    with tiered(DictTier()) as bench:
        for number in range(10):
            wanted = keys([number])
            with bench.cache.promote(wanted) as promotion:
                assert promotion.wait(SECONDS) == 0
            bench.cache.keep(wanted, bench.blocks([0]), after=NO_WAIT).wait(SECONDS)
        assert bench.cache.drain(SECONDS)
        assert bench.manager.compute.seconds_per_key is None

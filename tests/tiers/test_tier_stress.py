"""Several threads with the same keys: every job ends, and what is read of a key is what is always put for it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from seeds import rest_long
from tier_classes import SECONDS, DictTier, attached

from kvoffload.testing import FaultyTier, TierFaults
from kvoffload.testing.tier_pools import TierPools
from kvoffload.tiers import Limits, MemoryTier, Outcome, Tier, TierJob

CALLERS, ROUNDS, KEYS, EACH = 4, 1500, 12, 6  # EACH: entries of a caller


def call_at_random(tier: Tier, memory: TierPools, number: int, seed: int) -> None:
    """One caller, with entries of its own and keys that all have."""
    chance = random.Random(seed + number)
    entries = range(number * EACH, (number + 1) * EACH)
    for _ in range(ROUNDS):
        numbers = chance.sample(range(KEYS), EACH)
        keys = [b"key %d" % each for each in numbers]
        deadline = chance.choice([None, time.monotonic() - 1, time.monotonic() + SECONDS])
        kind = chance.choice(["put", "put", "get", "get", "remove", "exists", "clear", "drain"])
        jobs: list[TierJob] = []
        if kind == "put":
            for entry, each in zip(entries, numbers, strict=True):
                memory.fill(entry, each)
            jobs.append(tier.put(keys, entries, deadline=deadline))
        elif kind == "get":
            jobs.append(tier.get(keys, entries, deadline=deadline))
        elif kind == "drain":
            tier.drain(0.01)
        else:
            jobs.append(tier.clear() if kind == "clear" else getattr(tier, kind)(keys))
        for job in jobs:
            if chance.random() < 0.2:
                job.cancel()
            outcomes = job.wait(SECONDS)
            for entry, each, outcome in zip(entries, numbers, outcomes, strict=False):
                if kind == "get" and outcome is Outcome.DONE:
                    assert memory.version(entry) == each, f"seed={seed}"


@pytest.mark.parametrize(
    "make",
    rest_long(
        [
            lambda seed: FaultyTier(
                TierFaults(fail=0.1, error=0.1, drop=0.1, tear=0.1), seed=seed, limits=Limits(threads=3)
            ),
            lambda _: MemoryTier(5 * 4096, limits=Limits(threads=3, max_queued=16)),
            lambda _: DictTier(threads=3),
        ],
        1,
    ),
    ids=["faulty", "memory", "dict"],
)
def test_callers_with_the_same_keys(make: Callable[[int], Tier], seed: int) -> None:
    tier = make(seed)
    with attached(tier, entries=CALLERS * EACH) as memory:
        with ThreadPoolExecutor(CALLERS) as threads:
            callers = [threads.submit(call_at_random, tier, memory, number, seed) for number in range(CALLERS)]
            for caller in callers:
                caller.result(2 * SECONDS)
        assert tier.remove([b"key 1"]).wait(SECONDS)[0] in (Outcome.DONE, Outcome.MISSING, Outcome.FAILED)
        memory.check_guards()
    statistics = tier.statistics()
    assert (statistics.queued_reads, statistics.queued_writes, statistics.in_calls) == (0, 0, 0)

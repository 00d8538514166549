"""What is written to a tier, by each way of choosing; and whose it is there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from seeds import rest_long
from tier_classes import DictTier, GatedTier
from tiering import SECONDS, Bench, key, keys, tiered, until

from kvoffload import NO_WAIT, Tenant
from kvoffload.cache.tiering.admission import WriteAdmission
from kvoffload.cache.tiering.tier_manager import MOST_MESSAGES
from kvoffload.testing import FaultyTier
from kvoffload.tiers import MemoryTier, Origin, Outcome, TierStatistics
from kvoffload.tiers.threaded import Rows


def serve(bench: Bench, numbers: list[int]) -> int:
    """A request: promoted, loaded, stored, ended, and written where that is worth it; how many keys were found."""
    wanted = keys(numbers)
    with bench.cache.promote(wanted) as promotion:
        found = promotion.wait(SECONDS)
        if found:
            bench.cache.load(wanted[:found], range(found)).wait(SECONDS)
    bench.cache.store(wanted, range(len(wanted))).wait(SECONDS)
    bench.cache.touch(wanted)
    assert bench.cache.drain(SECONDS)
    return found


def traffic(bench: Bench, seed: int, requests: int = 150) -> tuple[int, int]:
    """Every other request has one of 12 prefixes, the others come once; keys found, and keys written."""
    random = np.random.default_rng(seed)
    found, once = 0, 1_000_000
    for number in range(requests):
        if number % 2:
            found += serve(bench, [100 * int(random.integers(12)) + each for each in range(6)])
        else:
            found += serve(bench, list(range(once, once + 6)))
            once += 6
    return found, bench.cache.tier_statistics()[0].written


def test_the_end_of_an_open_request_is_told_to_what_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `touch` is; not that of one that is dropped, or whose block an exception ends."""
    heard: list[tuple[bytes, ...]] = []

    def ended(_: object, keys: Sequence[bytes]) -> Sequence[bytes]:
        heard.append(tuple(keys))
        return ()

    monkeypatch.setattr(WriteAdmission, "ended", ended)
    with tiered(MemoryTier(1 << 20), capacity=24, write="admitted") as bench:
        with bench.cache.open_request() as request:
            for begin in range(0, 6, 2):
                bench.cache.store(keys([begin, begin + 1]), [begin, begin + 1], request=request).wait(SECONDS)
        request.end()
        bench.cache.store(keys([7]), [7], request=bench.cache.open_request()).wait(SECONDS)
        with pytest.raises(InterruptedError), bench.cache.open_request():
            raise InterruptedError
        assert bench.cache.drain(SECONDS)
        until(lambda: bool(heard))
    assert heard == [tuple(keys(range(6)))]


@pytest.mark.parametrize("write", rest_long(["admitted", "back", "through", "none"], 2))
def test_what_is_written(write: Any, seed: int) -> None:
    tier = MemoryTier(1 << 20)
    with tiered(tier, capacity=24, write=write) as bench:
        found, written = traffic(bench, seed)
        stored = bench.cache.statistics().stored
        bench.cache.check()
    if write == "none":
        assert written == 0
    elif write == "admitted":
        assert 0 < written < stored, (seed, stored, written)
        assert found > 150, (seed, found)
    else:  # some are evicted before they are written: eviction does not wait
        assert stored // 2 < written <= stored, (seed, stored, written)
        assert found > 150, (seed, found)


def test_a_store_that_nothing_asks_about_is_written() -> None:
    tier = DictTier()
    with tiered(tier) as bench:
        bench.cache.store(keys([0, 1]), [0, 1], after=NO_WAIT)
        until(lambda: sorted(tier.store) == keys([0, 1]))


def test_what_a_tier_has_lost_is_written_again_while_it_is_in_slots() -> None:
    tier = MemoryTier(1 << 20)
    with tiered(tier, capacity=24, write="admitted") as bench:
        traffic(bench, 3)
        wanted = [100 * 5 + each for each in range(6)]
        while not all(tier.contains(keys(wanted))):
            serve(bench, wanted)
        tier.remove(keys(wanted)).wait(SECONDS)  # as if it had evicted them
        assert not any(tier.contains(keys(wanted)))
        serve(bench, wanted)
        assert all(tier.contains(keys(wanted)))


class ByTenant(MemoryTier):
    """Keeps whose each record is."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.tenants: dict[bytes, str] = {}

    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:
        self.tenants[key] = origin.tenant
        return super().write_record(key, rows, origin)


@pytest.mark.parametrize("write", ["through", "back"])
def test_records_are_of_the_tenant_that_stored_them(write: Any) -> None:
    tier = ByTenant()
    with tiered(tier, capacity=8, write=write, tenants={"a": Tenant(), "b": Tenant()}) as bench:
        for number, tenant in enumerate(["a", "b", "", "a", "b", "", "a", "b"]):
            bench.cache.store(keys([number]), [number], tenant=tenant).wait(SECONDS)
            bench.cache.touch(keys([number]))
        assert bench.cache.drain(SECONDS)
        if write == "through":
            assert [tier.tenants[key] for key in keys(range(8))] == ["a", "b", "", "a", "b", "", "a", "b"]
        assert {tier.tenants[key] for key in keys([0, 3, 6]) if key in tier.tenants} <= {"a"}
        assert {tier.tenants[key] for key in keys([1, 4, 7]) if key in tier.tenants} <= {"b"}
        assert tier.tenants


class Refusing(DictTier):
    """Takes nothing as long as `refusing` says what becomes of it."""

    def __init__(self, refusing: Outcome | None, name: str = "refusing") -> None:
        super().__init__()
        self.name = name
        self.refusing = refusing

    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:
        return self.refusing or super().write_record(key, rows, origin)


def fill(bench: Bench, numbers: Sequence[int]) -> None:
    """Store keys, each as a request of its own, so that the first ones go next."""
    for number in numbers:
        bench.store([number])
    bench.cache.drain(SECONDS)


def look_again(bench: Bench, number: int) -> None:
    """Store a key again: nothing is evicted, and what goes next is looked at."""
    bench.cache.remove(keys([number]), below=False)
    fill(bench, [number])


@pytest.mark.parametrize("outcome", [Outcome.DECLINED, Outcome.FAILED])
def test_what_no_tier_takes_before_it_is_evicted_is_written_later(outcome: Outcome) -> None:
    tier = Refusing(outcome)
    with tiered(tier, write="back") as bench:
        fill(bench, range(8))
        assert bench.cache.tier_statistics()[0].not_written >= 2
        tier.refusing = None
        look_again(bench, 7)
        assert sorted(tier.store) == keys([0, 1])


def test_a_tier_that_declines_is_not_offered_the_same_again_until_something_is_stored() -> None:
    tier = Refusing(Outcome.DECLINED)
    with tiered(tier, write="back") as bench:
        fill(bench, range(8))
        offered = bench.cache.tier_statistics()[0].not_written
        for _ in range(5):
            bench.cache.promote(keys([99])).wait(SECONDS)  # the thread looks at everything
        assert bench.cache.drain(SECONDS)
        assert bench.cache.tier_statistics()[0].not_written == offered
        look_again(bench, 7)
        assert bench.cache.tier_statistics()[0].not_written > offered


def test_what_finds_a_full_queue_before_it_is_evicted_is_written_later() -> None:
    tier = GatedTier(threads=1, max_queued=1)
    with tiered(tier, capacity=24, write="back") as bench:
        for number in range(24):
            bench.store([number])
        until(lambda: tier.statistics().declined)
        tier.permit()
        for _ in range(12):
            look_again(bench, 23)
        assert set(tier.store) >= set(keys(range(6)))


def test_what_is_dropped_while_a_tier_is_not_used_is_written_later() -> None:
    tier = FaultyTier()
    with tiered(tier, write="back") as bench:
        tier.fail_all()
        fill(bench, range(8))
        while not bench.cache.tier_statistics()[0].opened:
            look_again(bench, 7)
        tier.heal()

        def written() -> bool:
            look_again(bench, 7)
            return all(tier.contains(keys([0, 1])))

        until(written)


def test_what_one_tier_has_taken_is_not_written_for_another_one_that_declines() -> None:
    taking, declining = Refusing(None, "taking"), Refusing(Outcome.DECLINED, "declining")
    with tiered(taking, declining, write="back") as bench:
        fill(bench, range(8))
        for _ in range(3):
            look_again(bench, 7)
        assert set(taking.store) >= set(keys([0, 1]))
        assert bench.cache.tier_statistics()[1].not_written == len(taking.store)


class Stuck(ByTenant):
    """While `stuck` is set, it seems to have key 99, and the thread of the cache's tiers waits in `statistics`: it
    is asked before a promotion.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stuck, self.waiting, self.go_on = threading.Event(), threading.Event(), threading.Event()

    def statistics(self) -> TierStatistics:
        if self.stuck.is_set():
            self.waiting.set()
            assert self.go_on.wait(SECONDS)
        return super().statistics()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        there = super().contains(keys)
        return [has or (self.stuck.is_set() and each == key(99)) for has, each in zip(there, keys, strict=True)]


def store_and_lose_events(bench: Bench, tier: Stuck, numbers: Sequence[int]) -> None:
    """Keys are stored, and others evicted, while more messages are left for the thread than it keeps."""
    tier.stuck.set()
    promotion = bench.cache.promote(keys([99]))
    assert tier.waiting.wait(SECONDS)
    for _ in range(MOST_MESSAGES):
        bench.cache.touch(())
    bench.store(numbers)
    tier.stuck.clear()
    tier.go_on.set()
    promotion.wait(SECONDS)
    assert bench.cache.drain(SECONDS)


def test_lost_events_lose_no_key_that_is_to_be_written() -> None:
    tier = Stuck()
    with tiered(tier, write="through", tenants={"a": Tenant()}) as bench:
        bench.cache.store(keys([0]), [0], tenant="a").wait(SECONDS)
        assert bench.cache.drain(SECONDS)
        assert tier.tenants[key(0)] == "a"
        store_and_lose_events(bench, tier, range(10, 18))
        assert bench.cache.locate(keys([0])) == ["memory"], "evicted from the slots"
        assert all(tier.contains(keys(range(10, 18))))
        tier.remove(keys([0])).wait(SECONDS)
        bench.cache.store(keys([0]), [0]).wait(SECONDS)
        assert bench.cache.drain(SECONDS)
        assert tier.tenants[key(0)] == "", "it is the other tenant's no longer"


def test_lost_events_leave_no_key_that_is_never_chosen_again() -> None:
    tier = Stuck()
    with tiered(tier, write="back") as bench:
        fill(bench, range(8))
        assert all(tier.contains(keys([0, 1])))
        store_and_lose_events(bench, tier, range(10, 18))
        assert bench.cache.locate(keys([0, 1])) == ["memory", "memory"], "evicted from the slots"
        tier.remove(keys([0, 1])).wait(SECONDS)
        fill(bench, [0, 1])
        for number in range(20, 26):
            fill(bench, [number])
        assert all(tier.contains(keys([0, 1])))


def test_lost_events_do_not_stop_admission() -> None:
    tier = Stuck()
    with tiered(tier, write="admitted") as bench:
        store_and_lose_events(bench, tier, range(10, 18))
        for _ in range(2):
            bench.cache.touch(keys(range(10, 18)))
            assert bench.cache.drain(SECONDS)
        assert any(tier.contains(keys(range(10, 18))))

"""demote and prefetch: a session's keys go to the tiers, and come back before it asks. Every byte is compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from seeds import rest_long
from tier_classes import DictTier, GatedTier
from tiering import SECONDS, Bench, key, keys, tiered, until

from kvoffload import NO_WAIT, CacheIndex, ClosedError, Status
from kvoffload.testing import FaultyTier
from kvoffload.tiers import DiskTier, Tier, TierCapabilities

MINE, OTHERS, LATER = [0, 1, 2, 3], [100, 101, 102, 103], [200, 201, 202, 203]
MakeTier = Callable[[], Tier]


@pytest.fixture(params=["dict", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> MakeTier:
    if request.param == "dict":
        return DictTier
    tmp_path.chmod(0o700)
    return lambda: DiskTier(tmp_path / "records", nbytes=1 << 20, identity="one model")


def turn(bench: Bench, session: str, numbers: Sequence[int]) -> None:
    """A request of a session stores what is missing."""
    for block, number in enumerate(numbers):
        bench.write(block, number)
    with bench.cache.open_request(session=session) as request:
        bench.cache.store(keys(numbers), range(len(numbers)), after=NO_WAIT, request=request).wait(SECONDS)


def hits(bench: Bench, *numbers: int) -> list[int]:
    return [number for number in numbers if bench.cache.status([key(number)]) == [Status.HIT]]


def below(bench: Bench, *numbers: int) -> list[int]:
    return [number for number in numbers if bench.cache._tiers.tiers[0].has([key(number)])[0]]  # type: ignore[union-attr]


def test_demoted_keys_are_written_leave_their_slots_first_and_come_back(make: MakeTier) -> None:
    with tiered(make(), write="admitted") as bench:
        bench.store(OTHERS)
        turn(bench, "a", MINE)
        assert bench.cache.hint("demote", session="a") == ("demote", "accepted", 4, "")
        assert bench.cache.drain(SECONDS)
        assert below(bench, *MINE, *OTHERS) == MINE
        bench.check_loaded([*MINE, *OTHERS])
        bench.cache.clear(below=False)
        turn(bench, "a", MINE)
        bench.store(OTHERS)
        bench.cache.hint("demote", session="a")
        assert bench.cache.drain(SECONDS)
        bench.store(LATER)
        assert hits(bench, *MINE, *OTHERS, *LATER) == [*OTHERS, *LATER]
        bench.check_loaded([*OTHERS, *LATER])
        assert bench.cache.hint("prefetch", session="a") == ("prefetch", "accepted", 4, "")
        until(lambda: hits(bench, *MINE) == MINE)
        bench.check_loaded(MINE)


def test_what_a_store_without_an_index_has_taken_leaves_its_slots_first() -> None:
    tier = DictTier()
    tier.capabilities = dataclasses.replace(tier.capabilities, local_index=False)
    with tiered(tier, write="none") as bench:
        bench.store(OTHERS)
        turn(bench, "a", MINE)
        assert bench.cache.hint("demote", session="a") == ("demote", "accepted", 4, "")
        assert bench.cache.drain(SECONDS)
        assert sorted(tier.store) == keys(MINE)
        bench.store(LATER)
        assert hits(bench, *MINE, *OTHERS, *LATER) == [*OTHERS, *LATER]
        with bench.cache.promote(keys(MINE)) as promotion:
            assert promotion.wait(SECONDS) == len(MINE)
            bench.check_loaded(MINE)


def test_prefetch_brings_the_latest_request_and_holds_nothing(make: MakeTier) -> None:
    with tiered(make()) as bench:
        turn(bench, "a", OTHERS)
        turn(bench, "a", MINE[:2])
        turn(bench, "a", MINE)
        assert bench.cache.drain(SECONDS)
        bench.cache.clear(below=False)
        bench.store(MINE[:1])
        assert bench.cache.hint("prefetch", session="a") == ("prefetch", "accepted", 3, "")
        until(lambda: hits(bench, *MINE) == MINE)
        bench.check_loaded(MINE)
        assert hits(bench, *OTHERS) == []
        until(lambda: bench.cache.statistics().pinned == 0)
        declined = bench.cache.hint("prefetch", session="a")
        assert (declined.outcome, declined.reason) == ("declined", "all keys of its latest request are in entries")
        bench.store([*OTHERS, *LATER])
        assert hits(bench, *MINE) == []


@pytest.mark.parametrize("local_index", [True, False])
def test_promised_keys_that_no_tier_has_are_not_waited_for_and_keep_no_slot(local_index: bool) -> None:
    """Without an index of its own, a tier is asked for each prefetch."""
    tier = DictTier()
    tier.capabilities = TierCapabilities(durable=False, shared=False, local_index=local_index)
    with tiered(tier) as bench:
        for _ in range(3):  # the first promise is not trusted
            turn(bench, "a", MINE)
            assert bench.cache.hint("retain", session="a", ttl=60.0, due=30.0)
        assert bench.cache.drain(SECONDS)
        bench.cache.clear()
        for _ in range(2):
            until(lambda: bench.cache.hint("prefetch", session="a", ttl=60.0, due=30.0).outcome == "accepted")
            until(lambda: not bench.manager.busy)
            assert hits(bench, *MINE) == []
            counts = bench.cache.statistics()
            assert (counts.pinned, counts.pending) == (0, 0)
        assert bench.cache.tier_statistics()[0].not_found == (0 if local_index else 8)
        bench.store([*OTHERS, *LATER])
        assert hits(bench, *OTHERS, *LATER) == [*OTHERS, *LATER]
        bench.check_loaded([*OTHERS, *LATER])
        assert bench.cache.hint("retain", session="a", ttl=60.0, due=30.0).outcome == "declined"


def test_a_request_is_prefetched_once_at_a_time() -> None:
    tier = GatedTier()
    tier.permit()
    with tiered(tier, capacity=6) as bench:  # promotions get three entries
        turn(bench, "a", MINE)
        assert bench.cache.drain(SECONDS)
        for _ in range(2):
            bench.cache.clear(below=False)
            tier.hold()
            until(lambda: bench.cache.hint("prefetch", session="a") == ("prefetch", "accepted", 4, ""))
            again = [bench.cache.hint("prefetch", session="a") for _ in range(20)]
            assert {answer.reason for answer in again} == {"a prefetch of its latest request goes on"}
            tier.permit()
            until(lambda: hits(bench, *MINE) == MINE[:3])
            until(lambda: not bench.manager.busy)
        assert tier.begun.count(("read", key(0))) == 2
        bench.check_loaded(MINE[:3])


def test_a_session_is_demoted_once_at_a_time() -> None:
    tier = GatedTier()
    with tiered(tier, write="admitted") as bench:
        turn(bench, "a", MINE)
        for numbers in (MINE, [*MINE, 4]):
            turn(bench, "a", numbers)
            assert bench.cache.hint("demote", session="a") == ("demote", "accepted", len(numbers), "")
            again = [bench.cache.hint("demote", session="a") for _ in range(20)]
            assert {answer.reason for answer in again} == {"a demotion of all its keys goes on"}
        tier.permit()
        assert bench.cache.drain(SECONDS)
        until(lambda: bench.cache.hint("demote", session="a").outcome == "accepted")
        bench.check_loaded([*MINE, 4])


def test_prefetch_with_due_displaces_promises_that_are_due_later_and_is_retained(make: MakeTier) -> None:
    with tiered(make(), write="through") as bench:
        for session, numbers, due in (("c", LATER, 30.0), ("a", MINE, 3000.0), ("b", OTHERS, 300.0)):
            for _ in range(3):  # the first promise is not trusted
                turn(bench, session, numbers)
                bench.cache.hint("retain", session=session, ttl=due, due=due)
                assert bench.cache.drain(SECONDS)  # else they may be evicted before they are written
        with bench.cache.open_request(session="c") as request:
            bench.cache.hint("retain", session="c", ttl=30.0, due=30.0)
            for block, number in enumerate(LATER):
                bench.write(block, number)
            bench.cache.store(keys(LATER), range(4), after=NO_WAIT, request=request).wait(SECONDS)
        assert hits(bench, *MINE, *OTHERS, *LATER) == [*OTHERS, *LATER], "a is due last"
        assert bench.cache.hint("prefetch", session="a", ttl=60.0, due=1.0) == ("prefetch", "accepted", 4, "")
        until(lambda: hits(bench, *MINE) == MINE)
        assert hits(bench, *OTHERS, *LATER) == LATER, "now b is due last"
        bench.store(OTHERS)
        assert hits(bench, *MINE) == MINE, "retained"
        bench.check_loaded(MINE)


def test_what_a_session_leaves_behind_is_not_written(make: MakeTier) -> None:
    with tiered(make(), write="back") as bench:
        turn(bench, "a", MINE)
        bench.cache.hint("release", session="a")
        for numbers in (OTHERS, LATER, [300, 301, 302, 303]):
            bench.store(numbers)
            assert bench.cache.drain(SECONDS)
        assert not below(bench, *MINE)
        assert below(bench, *OTHERS), "ordinary keys are written before they go"
        bench.check_loaded(LATER)


@pytest.mark.parametrize("told", rest_long([True, False], 0))
def test_new_blocks_of_a_session_that_comes_back_are_written(told: bool) -> None:
    with tiered(DictTier(), write="admitted") as bench:
        for number in range(1_000, 3_400, 8):
            turn(bench, "once", range(number, number + 8))
            assert bench.cache.drain(SECONDS)
        written = bench.cache.tier_statistics()[0].written
        assert written < 2_200, "it has learned that nothing comes back"
        for count in (*[3] * 40, 6):  # all promises get the part of the entries that their requests have of all blocks
            with bench.cache.open_request(session="a") as request:
                if told:
                    bench.cache.hint("retain", session="a", ttl=60.0, due=5.0)
                wanted = keys(range(count))
                for block in range(count):
                    bench.write(block, block)
                bench.cache.store(wanted, range(count), after=NO_WAIT, request=request).wait(SECONDS)
            assert bench.cache.drain(SECONDS)
        assert below(bench, 3, 4) == ([3, 4] if told else [])
        bench.check_loaded(range(6))


def test_what_others_have_used_is_not_demoted() -> None:
    with tiered(tier := DictTier(), write="admitted") as bench:
        turn(bench, "a", MINE)
        turn(bench, "b", [0, 1, 7])
        assert bench.cache.hint("demote", session="a") == ("demote", "clipped", 2, "others use the rest, too")
        assert bench.cache.drain(SECONDS)
        assert set(keys([2, 3])) <= set(tier.store), "the others are written or not, as admission likes"
        bench.store([*OTHERS, 104])
        assert hits(bench, *MINE, 7) == [0, 1, 7]
        bench.check_loaded([0, 1, 7, *OTHERS, 104])


def test_a_broken_tier_fails_no_hint_and_spoils_no_byte() -> None:
    with tiered(tier := FaultyTier(), write="admitted") as bench:
        turn(bench, "a", MINE)
        tier.fail_all()
        assert bench.cache.hint("demote", session="a").outcome == "accepted"
        bench.cache.drain(SECONDS)
        bench.check_loaded(MINE)
        bench.store([*OTHERS, *LATER])
        assert bench.cache.hint("prefetch", session="a").outcome == "accepted"
        until(lambda: bench.cache.statistics().pinned == 0)
        bench.check_loaded([*OTHERS, *LATER])
        turn(bench, "a", MINE)
        bench.check_loaded(MINE)


def test_what_was_promised_goes_if_it_is_demoted(make: MakeTier) -> None:
    with tiered(make(), write="admitted") as bench:
        for _ in range(3):
            turn(bench, "a", MINE)
            bench.cache.hint("retain", session="a", ttl=60)
        bench.store(OTHERS)
        assert bench.cache.hint("demote", session="a") == ("demote", "accepted", 4, "")
        assert bench.cache.drain(SECONDS)
        bench.store(LATER)
        assert hits(bench, *MINE, *OTHERS, *LATER) == [*OTHERS, *LATER]


@pytest.mark.parametrize("action", ["demote", "prefetch"])
def test_a_closed_cache_moves_nothing_and_says_so(make: MakeTier, action: Any) -> None:
    with tiered(make()) as bench:
        turn(bench, "a", MINE)
        bench.cache.close()
        with pytest.raises(ClosedError):
            bench.cache.hint(action, session="a")
        assert bench.cache.statistics().hints == ()


def test_without_tiers_both_are_declined() -> None:
    index = CacheIndex(4)
    with index.open_request(session="a") as request, index.reserve(keys(MINE), request=request):
        pass
    assert index.hint("demote", session="a") == ("demote", "declined", 0, "the cache has no tiers")
    assert index.hint("prefetch", session="a") == ("prefetch", "declined", 0, "the cache has no tiers")
    assert index.lookup(keys(MINE)) == 4


def test_new_keys_that_are_promised_for_later_than_all_others_still_get_to_the_tiers(make: MakeTier) -> None:
    """Only keys in entries are written. So above tiers they displace ordinary keys, then a few promised ones."""
    with tiered(make(), write="through") as bench:
        for session, due in (("a", 10.0), ("b", 20.0)):
            for _ in range(3):  # the first promise is not trusted
                turn(bench, session, MINE if session == "a" else OTHERS)
                bench.cache.hint("retain", session=session, ttl=due, due=due)
        assert bench.cache.drain(SECONDS)  # else as many keys wait to be written as may
        for number in LATER:
            with bench.cache.open_request(session="c") as request:
                bench.cache.hint("retain", session="c", ttl=3600.0, due=3600.0)
                bench.write(0, number)
                bench.cache.store(keys([number]), [0], after=NO_WAIT, request=request).wait(SECONDS)
            assert bench.cache.drain(SECONDS)
        assert below(bench, *LATER) == LATER
        bench.check_loaded(hits(bench, *MINE, *OTHERS, *LATER))

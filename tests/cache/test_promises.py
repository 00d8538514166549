"""Promises of sessions: whose keys stay, how many and for how long. No device; the test moves the clock."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from helpers import keys
from session_host import TURN, Host

from kvoffload import Tenant
from kvoffload.cache.policies import POLICIES

# retain


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("promise", "seconds"),
    [({"ttl": 60}, 60), ({"ttl": 1000, "due": 10}, 20), ({"due": 10}, 20), ({"due": 400}, 800)],
    ids=["ttl", "both", "due", "due later than a ttl that is not given"],
)
def test_a_session_that_came_back_is_trusted_until_its_time_is_over(policy: Any, promise: Any, seconds: int) -> None:
    """Its time: `ttl`, or twice `due`. The first promise is only watched."""
    host = Host(policy=policy)
    first, second = (host.turn("a", *TURN, **promise) for _ in range(2))
    assert first is not None
    assert second is not None
    assert (first.outcome, first.blocks) == ("declined", 0)
    assert "the session has to keep a promise first" in first.reason
    assert second.outcome == "accepted"
    for passes, stays in ((seconds - 1, [*TURN]), (2, [])):
        host.now += passes
        host.scan()
        assert host.left(*TURN) == stays


def test_who_breaks_a_promise_has_to_keep_one_first() -> None:
    host = Host()
    host.trusted("a", *TURN, ttl=60)
    host.now += 61
    for outcome, stays in (("declined", []), ("accepted", [*TURN])):
        answer = host.turn("a", *TURN, ttl=60)
        assert answer is not None
        assert answer.outcome == outcome
        host.scan(1)
        assert host.left(*TURN) == stays


@pytest.mark.parametrize(("late", "outcome"), [(60, "accepted"), (61, "declined")])
def test_who_comes_back_at_the_last_moment_has_kept_a_promise(late: int, outcome: str) -> None:
    host = Host()
    host.turn("a", *TURN, ttl=60)
    host.now += late
    answer = host.turn("a", *TURN, ttl=60)
    assert answer is not None
    assert answer.outcome == outcome


def test_a_promise_for_as_long_as_any_counts_is_not_clipped() -> None:
    host = Host()
    host.trusted("a", *TURN, ttl=60)
    promises: tuple[dict[str, Any], ...] = {"ttl": 600}, {"ttl": 86_400, "due": 43_200}
    for promise in promises:
        answer = host.turn("a", *TURN, **promise)
        assert answer is not None
        assert (answer.outcome, answer.reason) == ("accepted", "")


def test_who_comes_back_for_other_keys_is_not_trusted() -> None:
    host = Host()
    for base in range(0, 40, 4):
        host.turn("a", *range(base, base + 4), ttl=60)
        host.scan()
        assert host.left(*range(base + 4)) == []


def test_which_promises_are_given_up_first() -> None:
    """Those without a time, the longer ones first; then those due last. Of each the deepest key."""
    host = Host(10)
    promises: list[dict[str, float]] = [{"ttl": 30}, {"ttl": 30}, {"ttl": 60}, {"due": 10}, {"due": 100}]
    for number, promise in enumerate(promises):
        host.trusted(str(number), 10 * number, 10 * number + 1, **promise)
        host.now += 1
    assert host.alone(*range(100, 110)) == keys(21, 20, 1, 0, 11, 10, 41, 40, 31, 30)


def test_a_promise_during_a_request_displaces_lower_ones_and_no_higher_one() -> None:
    host = Host(8)
    host.trusted("soon", 20, 21, due=10)
    host.trusted("c", *TURN[:2], due=50)
    for number in (30, 40):
        host.trusted(str(number), number, number + 1, ttl=60)
    with host.index.open_request(session="c") as request:
        host.index.hint("retain", session="c", due=50)
        assert host.store(keys(*TURN), request=request) == keys(31, 30)
        assert host.store(keys(4, 5, 6), request=request) == keys(41, 40)
    assert host.left(*range(7), 20, 21) == [0, 1, 2, 3, 4, 5, 20, 21]


def test_a_hint_during_a_request_concerns_that_request() -> None:
    host = Host()
    host.trusted("a", *TURN, ttl=60)
    request = host.index.open_request(session="a")
    host.index.hint("retain", session="a", ttl=60)
    host.store(keys(*TURN, 4, 5), request=request)
    host.scan(1)
    assert host.left(*range(6)) == [*range(6)], "while it is open"
    request.end()
    host.scan()
    assert host.left(*range(6)) == [*range(6)], "and then"


def test_a_hint_concerns_the_latest_request_that_is_open() -> None:
    host = Host()
    host.trusted("a", *TURN, ttl=60)
    with host.index.open_request(session="a") as request:
        host.index.load(keys(*TURN), request=request)
        host.turn("a", 10, 11)  # another one for a title
        assert host.index.hint("release", session="a").outcome == "accepted"
        assert not any(not retained for retained in host.index.records.hinted(tuple(keys(*TURN, 10, 11))).values())
        host.index.hint("retain", session="a", ttl=60)
        host.store(keys(4, 5), request=request)
    assert host.index.records.hinted(tuple(keys(*range(6), 10, 11))) == dict.fromkeys(keys(*range(6)), True)


@pytest.mark.parametrize("how", ["dropped", "raised"])
def test_a_request_that_does_not_end_retains_only_what_its_session_had_promised_before(how: str) -> None:
    host = Host()
    host.trusted("a", *TURN, ttl=60)
    request = host.index.open_request(session="a")
    host.index.hint("retain", session="a", ttl=9000)
    host.store(keys(*range(6)), request=request)
    if how == "raised":
        request.__exit__(ValueError)
    else:
        del request
        gc.collect()
    host.scan()
    assert host.left(*range(6)) == [*TURN]
    host.now += 61
    host.scan()
    assert host.left(*range(6)) == []
    assert len(host.index._state.pools.beside(host.index._state.pools.of(""), retained=True).policy) == 0


def test_the_time_of_a_promise_counts_from_the_end_of_its_request() -> None:
    host, new = Host(), range(100, 104)
    host.trusted("a", *TURN, ttl=60)
    with host.index.open_request(session="a") as request:
        host.index.hint("retain", session="a", due=5)
        host.store(keys(*new), request=request)
        for passes, caches, stays in ((300, 1, [*new]), (9, 1, [*new]), (2, 4, [])):  # first it decodes
            host.now += passes
            host.scan(caches)
            assert host.left(*new) == stays
            request.end()


def test_branches_of_a_session_retain_together_what_it_may() -> None:
    host = Host()
    host.trusted("a", *TURN, ttl=60)
    for base in (100, 200, 300):
        host.turn("a", *range(base, base + 4), ttl=60)
    host.scan()
    assert len(host.left(*TURN, *range(100, 104), *range(200, 204), *range(300, 304))) == 8  # twice what it has kept


def test_a_promise_never_makes_a_request_fail() -> None:
    host = Host(8)
    host.trusted("a", *range(8), due=30)
    host.trusted("b", *range(8), due=30)
    with host.index.open_request(session="a") as request:
        host.index.hint("retain", session="a", due=3000)  # later than all that is here
        host.store(keys(*range(100, 104)), request=request, all_or_nothing=True)
    assert host.left(*range(100, 104)) == [*range(100, 104)]


def test_who_releases_what_was_promised_has_promised_it_in_vain() -> None:
    host = Host()
    host.trusted("a", *TURN, ttl=60)
    host.index.hint("release", session="a")
    host.turn("a", *range(100, 104), ttl=60)
    host.scan()
    assert host.left(*range(100, 104)) == []


@pytest.mark.parametrize("in_request", [False, True])
@pytest.mark.parametrize(("due", "seconds"), [(None, 600), (1e9, 86_400)])
def test_a_promise_counts_for_ten_minutes_at_most_and_with_due_for_a_day(
    due: float | None, seconds: int, in_request: bool
) -> None:
    host = Host()
    host.trusted("a", *TURN, ttl=60)
    with host.index.open_request(session="a") as request:
        host.store(keys(*TURN), request=request)
        if in_request:
            answer = host.index.hint("retain", session="a", ttl=1e9, due=due)
    if not in_request:
        answer = host.index.hint("retain", session="a", ttl=1e9, due=due)
    assert (answer.outcome, answer.reason) == ("clipped", "ttl is at most 600 s, with due 86400 s")
    for passes, stays in ((seconds, [*TURN]), (1, [])):
        host.now += passes
        host.scan()
        assert host.left(*TURN) == stays


@pytest.mark.parametrize("capacity", [7, 8])
def test_a_promise_in_an_open_request_says_if_the_cache_has_no_room_for_all_that_it_may_retain(capacity: int) -> None:
    """Who has promised four blocks, and comes back for them, may retain twice as many."""
    answer = Host(capacity).trusted("a", *TURN, ttl=60)
    known = ("clipped", 7, "7 more keys may be retained") if capacity == 7 else ("accepted", 8, "")
    assert answer == ("retain", *known)


def test_a_request_that_stays_open_retains_nothing_after_a_day() -> None:
    host = Host()
    host.trusted("a", *TURN, ttl=60)
    with host.index.open_request(session="a") as request:
        host.index.hint("retain", session="a", ttl=1e9, due=1e9)
        host.store(keys(*range(100, 104)), request=request)
        for passes, stays in ((86_400, [*range(100, 104)]), (1, [])):
            host.now += passes
            host.scan()
            assert host.left(*range(100, 104)) == stays


# prefetch


@pytest.mark.parametrize("comes_back", [False, True])
def test_what_a_prefetch_brings_is_retained_for_a_day_at_most_and_not_after_the_next_request(comes_back: bool) -> None:
    host = Host()
    host.trusted("a", *range(8), due=30)
    host.index.remove(keys(7))
    answer, names, request = host.prefetch("a", 1e9, due=1e9)
    assert (answer, names) == (("prefetch", "accepted", 1, ""), keys(*range(8)))
    if comes_back:
        host.turn("a", *range(7))
    host.bring(request, 7)  # late
    host.now += 0 if comes_back else 86_400
    assert host.retained() == ([] if comes_back else keys(*range(8)))
    host.now += 1
    assert host.retained() == []
    assert host.left(7) == [7]


def test_keys_that_a_prefetch_promises_again_count_once_in_the_share_of_a_tenant() -> None:
    host = Host(16, tenants={"t": Tenant()})
    for _ in range(2):
        host.trusted("a", *range(8), due=30)
    assert len(host.retained()) == 8, "half of the entries"
    host.index.remove(keys(7))
    _, _, request = host.prefetch("a", 60, due=30)
    host.bring(request, 7)
    assert host.retained() == keys(*range(8))


def test_a_prefetch_without_due_retains_until_the_earlier_promise_is_over() -> None:
    host = Host()
    host.trusted("a", *range(8), due=30)
    host.index.remove(keys(7))
    _, _, request = host.prefetch("a", 1e9, due=None)
    host.bring(request, 7)
    for passes, stays in ((60, keys(*range(8))), (1, [])):
        host.now += passes
        assert host.retained() == stays


@pytest.mark.parametrize(
    ("kept", "promises", "retained"),
    [(0, True, []), (5, True, [1, 2, 3]), (8, False, [])],
    ids=["none has been kept", "fewer have been kept", "none is given"],
)
def test_a_prefetch_retains_no_more_than_the_session_is_trusted_for(
    kept: int, promises: bool, retained: list[int]
) -> None:
    """Of five that were promised and asked for, three quarters count, less two: a quarter of the eight promised now,
    which are promised anew. And whoever does not say that it comes back retains nothing, however well it is known.
    """
    host, promise = Host(), dict[str, Any](due=30)
    if kept:
        host.turn("a", *range(kept), **promise)
    host.turn("a", *range(8), **(promise if promises else {}))
    host.index.remove(keys(0, 7))
    answer, names, request = host.prefetch("a", 60, due=30)
    assert (answer, names) == (("prefetch", "accepted", 2, ""), keys(*range(8)))
    assert host.retained() == keys(*retained)
    host.bring(request, 0, 7)
    assert host.retained() == keys(*retained)
    assert host.left(*range(8)) == [*range(8)]


# keys that are nowhere


@pytest.mark.parametrize("there", [0, 2])
def test_a_promise_of_keys_that_are_gone_retains_those_that_are_left(there: int) -> None:
    host = Host()
    host.trusted("a", *TURN, ttl=60)
    host.index.remove(keys(*TURN[there:]))
    reason = f"{there} of 4 keys are in entries, and within its share"
    outcome = "clipped" if there else "declined"
    assert host.index.hint("retain", session="a", ttl=60) == ("retain", outcome, there, reason)
    assert host.retained() == keys(*TURN[:there])
    host.alone(*TURN)
    assert host.retained() == keys(*TURN[:there]), "others have stored the rest"
    host.scan()
    assert host.left(*TURN) == [*TURN[:there]]
    host.now += 61
    assert host.retained() == []


def test_a_promise_of_keys_that_no_one_has_stored_is_kept_by_asking_for_them() -> None:
    host = Host()
    for outcome in ("declined", "accepted"):
        with host.index.open_request(session="a") as request:
            host.index.load(keys(*TURN), request=request)
            assert host.index.hint("retain", session="a", ttl=60).outcome == outcome
        assert host.left(*TURN) == []
        assert host.retained() == []
    host.turn("a", *TURN, ttl=60)
    assert host.retained() == keys(*TURN)


def test_a_prefetch_of_keys_that_no_tier_has_retains_nothing_and_may_be_given_again() -> None:
    host = Host()
    host.trusted("a", *TURN, due=30)
    host.index.remove(keys(*TURN))
    for _ in range(2):
        answer, names, request = host.prefetch("a", 60, due=30)
        assert (answer, names) == (("prefetch", "accepted", 4, ""), keys(*TURN))
        assert host.prefetch("a", 60, due=30)[0].reason == "a prefetch of its latest request goes on"
        del request  # the tiers have ended it
        gc.collect()
        host.alone(*TURN[:2])
        assert host.retained() == []
        host.index.remove(keys(*TURN))
    host.now += 61
    host.turn("a", *TURN)
    assert host.retained() == []

"""Sessions and hints: whose keys go first, whose stay, and for how long. No device; the test moves the clock."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from caching import state
from counting import steps
from helpers import key, keys
from worlds import Fifo

from kvoffload import CacheIndex, Status, Tenant
from kvoffload.cache.policies import POLICIES
from kvoffload.cache.sessions import ACTIONS, Hint, HintAnswer

TURN = (0, 1, 2, 3)


class Host:
    """A cache, a clock that the test moves, and the key that was written into each entry."""

    def __init__(self, capacity: int = 64, policy: Any = "lru", **options: Any) -> None:
        self.now = 1000.0
        self.index = CacheIndex(capacity, policy=policy, **options)
        self.index._state.clock = lambda: self.now
        self.written: dict[int, bytes] = {}
        self.fresh = 1000

    def store(self, names: Sequence[bytes], **options: Any) -> list[bytes]:
        """Returns the keys that were evicted for them."""
        with self.index.reserve(names, **options) as reservation:
            self.written.update(zip(reservation.indices, reservation.keys, strict=True))
        return list(reservation.evicted)

    def turn(self, session: str, *numbers: int, tenant: str = "", **promise: float) -> HintAnswer | None:
        """A request of a session, which promises meanwhile to come back if `ttl` is given."""
        answer = None
        with self.index.open_request(session=session, tenant=tenant) as request:
            if promise:
                answer = self.index.hint("retain", session=session, tenant=tenant, **promise)
            self.store(keys(*numbers), request=request)
        return answer

    def trusted(self, session: str, *numbers: int, **promise: Any) -> HintAnswer:
        """A session that has kept a promise, and has given another one."""
        self.turn(session, *numbers, **promise)
        answer = self.turn(session, *numbers, **promise)
        assert answer is not None
        return answer

    def alone(self, *numbers: int) -> list[bytes]:
        """A request without a session; returns the keys that were evicted."""
        evicted = self.store(keys(*numbers))
        self.index.touch(keys(*numbers))
        return evicted

    def scan(self, caches: int = 4) -> None:
        """Requests that nobody repeats."""
        for _ in range(caches * self.index.capacity // 4):
            self.fresh += 4
            self.alone(*range(self.fresh, self.fresh + 4))

    def left(self, *numbers: int) -> list[int]:
        """Those of these keys that are hits; every hit of the cache is in the entry that it was written into."""
        self.index.check()
        with self.index.acquire(self.index.keys) as lease:
            assert [self.written[entry] for entry in lease.indices] == list(lease.keys)
        return [number for number in numbers if self.index.status([key(number)]) == [Status.HIT]]


# release


def test_what_a_session_leaves_behind_goes_first_and_its_end_before_its_beginning() -> None:
    host = Host(8)
    host.alone(100, 101)
    host.turn("a", *TURN)
    host.alone(102, 103)
    assert host.index.hint("release", session="a") == ("release", "accepted", 4, "")
    assert host.alone(200, 201, 202) == keys(3, 2, 1)
    assert host.left(*TURN, 100, 101, 102, 103) == [0, 100, 101, 102, 103]


def test_what_others_have_used_is_not_released() -> None:
    host = Host(8)
    host.turn("a", *TURN)
    host.turn("b", 0, 10)
    host.alone(0, 1)
    assert host.index.hint("release", session="a") == ("release", "clipped", 2, "others use the rest, too")
    assert host.alone(*range(200, 205)) == keys(3, 2)
    assert host.left(*TURN, 10) == [0, 1, 10]


@pytest.mark.parametrize("how", ["load", "touch", "another session"])
def test_a_released_key_that_is_asked_for_again_stays_as_others_do(how: str) -> None:
    host = Host(8)
    host.turn("a", *TURN)
    host.alone(*range(100, 104))
    host.index.hint("release", session="a")
    if how == "another session":
        host.turn("b", 0, 1)
    else:
        getattr(host.index, how)(keys(0, 1))
    assert {*host.alone(*range(200, 204))} == {*keys(3, 2, 103, 102)}
    assert host.left(*TURN) == [0, 1]


# promises


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


@pytest.mark.parametrize("others", [{}, {"tenant": "b"}, {"session": "b"}])
def test_what_an_open_request_uses_is_not_released_by_another_session(others: dict[str, str]) -> None:
    host = Host(8, tenants={"b": Tenant()})
    host.turn("a", *TURN)
    with host.index.open_request(**others) as request:
        host.index.load(keys(0, 1), request=request)
        assert host.index.hint("release", session="a") == ("release", "clipped", 2, "others use the rest, too")
        host.alone(*range(100, 106))
        assert host.left(*TURN) == [0, 1]


def test_a_session_that_ends_with_an_open_request_is_released_at_its_end() -> None:
    host = Host(8)
    with host.index.open_request(session="a") as request:
        host.store(keys(*TURN), request=request)
        host.index.hint("retain", session="a", ttl=60)
        assert host.index.hint("release", session="a") == ("release", "accepted", 0, "")
        host.alone(*range(100, 104))
        assert host.left(*TURN) == [*TURN]
    host.alone(*range(200, 204))
    assert host.left(*TURN, *range(100, 104)) == [*range(100, 104)]


def test_a_session_that_ends_with_a_request_without_keys_is_released_at_its_end() -> None:
    host = Host(8)
    host.alone(*range(100, 104))
    host.turn("a", *TURN)
    with host.index.open_request(session="a"):
        assert host.index.hint("release", session="a") == ("release", "accepted", 4, "")
        assert host.index.records.hinted(tuple(keys(*TURN))) == {}
    host.alone(*range(200, 204))
    assert host.left(*TURN, *range(100, 104)) == [*range(100, 104)]


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


@pytest.mark.parametrize("comes_back", [False, True])
def test_what_a_prefetch_brings_is_retained_for_a_day_at_most_and_not_after_the_next_request(comes_back: bool) -> None:
    host = Host()
    host.trusted("a", *range(8), due=30)
    host.index.remove(keys(7))
    records = host.index.records
    answer, names, request = records.hint((Hint("prefetch", "a", "", 1e9, 1e9), True))
    assert (answer.outcome, names) == ("accepted", keys(*range(8)))
    if comes_back:
        host.turn("a", *range(7))
    brought = records.reserve_each((keys(7), "", request))  # by a tier, late
    host.written[brought[0].indices[0]] = key(7)
    assert records.commit_and_hold((brought, False)) == ([True], None)
    host.now += 0 if comes_back else 86_400
    host.index.touch([])
    assert records.hinted(tuple(keys(*range(8)))) == ({} if comes_back else dict.fromkeys(keys(*range(8)), True))
    host.now += 1
    host.index.touch([])
    assert records.hinted(tuple(keys(*range(8)))) == {}
    assert host.left(7) == [7]


# shares


def test_requests_without_a_session_get_an_eighth_when_everything_is_promised() -> None:
    host = Host()
    for base in range(0, 64, 4):
        host.trusted(str(base), *range(base, base + 4), ttl=60)
    assert len(host.left(*range(64))) == 64
    for base in (100, 200):
        host.alone(*range(base, base + 8))
        assert host.left(*range(base, base + 8)) == [*range(base, base + 8)]
        assert len(host.left(*range(64))) == 56
    host.scan()
    assert len(host.left(*range(64))) == 56


def test_promises_hold_the_share_of_those_who_make_them() -> None:
    """A quarter of the blocks are asked for by a session that promises: it keeps about a quarter of the entries."""
    host = Host()
    for _ in range(12):
        host.turn("a", *range(40), ttl=60)
        for _ in range(30):
            host.alone(*range(host.fresh, host.fresh + 4))
            host.fresh += 4
    host.scan()
    stays = host.left(*range(40))
    assert 16 <= len(stays) <= 20
    assert stays == [*range(len(stays))]


# tenants


def test_a_session_is_its_tenants_own() -> None:
    host = Host(tenants={"t": Tenant(), "u": Tenant()})
    host.turn("a", *TURN, tenant="t", ttl=60)
    for tenant in ("", "u"):
        for action in ACTIONS:
            answer = host.index.hint(action, session="a", tenant=tenant)
            assert (answer.outcome, answer.blocks) == ("declined", 0)
            assert "no request has named this session" in answer.reason
    assert host.index.hint("release", session="a", tenant="t").blocks == 4


def test_one_of_several_tenants_holds_at_most_half() -> None:
    host = Host(tenants={"t": Tenant(), "u": Tenant()})
    for base in range(0, 60, 20):
        host.trusted(str(base), *range(base, base + 20), tenant="t", ttl=60)
    host.scan()
    assert len(host.left(*range(60))) == 32


def test_a_tenant_with_a_quota_orders_its_keys_alone() -> None:
    host = Host(tenants={"q": Tenant(max_blocks=8)})
    host.turn("a", *TURN, tenant="q")
    for action in ("retain", "release", "demote"):
        answer = host.index.hint(action, session="a", tenant="q")
        assert answer.outcome == "declined"
        assert "quota" in answer.reason
    assert host.left(*TURN) == [*TURN]


# what is refused


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"action": "keep"}, ValueError, "action must be one of retain, release, demote, prefetch, got 'keep'"),
        ({"ttl": 0}, ValueError, "ttl must be seconds above 0, got 0"),
        ({"due": -1.5}, ValueError, "due must be seconds above 0, got -1.5"),
        ({"ttl": float("nan")}, ValueError, "ttl must be a number of seconds, got nan"),
        ({"due": "soon"}, ValueError, "due must be a number of seconds, got 'soon'"),
        ({"tenant": "nobody"}, ValueError, "tenant must be one of '', got 'nobody'; name others in tenants="),
        ({"tenant": []}, ValueError, "tenant must be one of ''"),
    ],
    ids=str,
)
def test_wrong_hints_change_nothing(given: dict[str, Any], error: type[Exception], words: str) -> None:
    host = Host()
    host.trusted("a", *TURN, ttl=60)
    before = state(host.index)
    with pytest.raises(error, match=words):
        host.index.hint(**{"action": "release", "session": "a", **given})
    assert state(host.index) == before
    with pytest.raises(TypeError, match="session must be a string or None, got 7"):
        host.index.open_request(session=7)  # type: ignore[arg-type]
    assert state(host.index) == before
    assert host.left(*TURN) == [*TURN]


def test_a_hint_inside_another_call_is_refused_and_a_hook_may_give_one() -> None:
    answers: list[str] = []

    class Hinting(Fifo):
        def touch(self, keys: Sequence[bytes]) -> None:
            super().touch(keys)
            host.index.hint("retain", session="a")

    def on_event(_: object) -> None:
        answers.append(host.index.hint("retain", session="b").outcome)

    host: Host = Host(policy=Hinting, on_event=on_event)
    host.store(keys(*TURN))
    with pytest.raises(RuntimeError, match="in the middle of another call"):
        host.index.touch(keys(*TURN))
    assert set(answers) == {"declined"}
    assert host.left(*TURN) == [*TURN]


# bounds, and the unexpected


@pytest.mark.parametrize("names", [10_000, pytest.param(200_000, marks=pytest.mark.long)])
def test_names_without_number_take_memory_with_a_bound(names: int) -> None:
    host = Host()
    threads = threading.active_count()
    for number in range(names):
        with host.index.open_request(session=str(number)) as request:
            host.index.load(keys(number), request=request)
            host.index.hint("retain", session=str(number), ttl=60)
        host.index.hint("demote" if number % 2 else "release", session=str(number))
        host.now += 1
    sessions = host.index._state.sessions
    assert sessions is not None
    assert len(sessions) <= 1024
    assert len(sessions._owner) <= 2 * 64 + 1024
    assert sessions._known <= 2 * 64 + 1024
    assert sum(len(pool.policy) for pool in host.index._state.pools.all) <= 64
    assert threading.active_count() == threads
    host.left()


def test_names_and_chains_of_any_length_take_memory_with_a_bound() -> None:
    host = Host()
    for number in range(3):
        name = f"{number}" * 100_000
        for part in range(8):  # of a session, none of which continues another one
            with host.index.open_request(session=name) as request:
                host.index.load(keys(*range(1000 * part, 1000 * part + 500)), request=request)
        host.turn(name, number)
        assert host.index.hint("release", session=name).outcome == "accepted"
        assert host.index.hint("release", session=name + "x").outcome == "declined", "another name"
    sessions = host.index._state.sessions
    assert sessions is not None
    assert max(len(name) for _, name in sessions._all) <= 128
    assert sessions._known <= 2 * 64 + 1024


@pytest.mark.parametrize("released", [False, True])
def test_a_session_that_has_ended_or_was_forgotten_remembers_no_keys(released: bool) -> None:
    host = Host()
    for number in range(0, 200_000, 1000):
        for base in range(number, number + 800, 100):  # no request continues another one
            with host.index.open_request(session=str(number)) as request:
                if released or base == number:  # each of the latest 64 sessions owns a key
                    host.store(keys(*range(base, base + (30 if released else 1))), request=request)
                host.index.load(keys(*range(base, base + 30)), request=request)
        if released:
            host.index.hint("release", session=str(number))
    sessions = host.index._state.sessions
    assert sessions is not None
    assert len(bytes_known_to(sessions._all, sessions._owner)) <= 2 * (2 * 64 + 1024)


def test_a_request_costs_no_more_where_there_are_many_sessions() -> None:
    taken = []
    for blocks in (100, 2):  # of a session: 11 sessions are remembered, and 576
        host = Host()
        for number in range(0, 120_000, 100):
            host.turn(str(number), *range(number, number + blocks))
        costs = [steps(partial(host.turn, f"new {number}", *range(number, number + 10))) for number in range(3)]
        taken.append(min(costs))
    assert taken[1] < 1.2 * taken[0]


@pytest.mark.parametrize("over", [False, True])
def test_a_request_costs_no_more_where_there_are_many_promises(over: bool) -> None:
    taken = []
    for count in (20, 500):
        host = Host(8 * count)
        for _ in range(3):
            for number in range(count):
                host.turn(str(number), *range(8 * number, 8 * number + 8), ttl=20 * count, due=10 * count)
                host.now += 1
        assert len(host.index.records.hinted(tuple(host.index.keys))) >= 8 * count - 8, "all are retained"
        host.now += 19 * count + 2 * over  # the oldest promise is over, or not yet
        taken.append(steps(partial(host.turn, "0", *range(8), 9_000, ttl=3600, due=1)))
        host.left()
    assert taken[1] < 1.3 * taken[0]


def bytes_known_to(*holders: object) -> set[bytes]:
    """All that the holders refer to, directly or through other objects, but no function or class."""
    found, seen, waiting = set[bytes](), set[int](), list[Any](holders)
    while waiting:
        each = waiting.pop()
        if isinstance(each, bytes):
            found.add(each)
        elif id(each) not in seen and not isinstance(each, type) and not callable(each):
            seen.add(id(each))
            waiting += gc.get_referents(each)
    return found


def test_keys_that_a_request_with_a_promise_stores_again_are_retained_once() -> None:
    host = Host()
    host.trusted("a", *TURN, ttl=60, due=5)
    with host.index.open_request(session="a") as request:
        host.index.hint("retain", session="a", ttl=60, due=5)
        for _ in range(2):
            host.index.remove(keys(*TURN))
            host.store(keys(*TURN), request=request)
        answer = host.index.hint("retain", session="a", ttl=60, due=9)  # which ends the one before
        assert answer.outcome == "accepted"
    assert host.left(*TURN) == [*TURN]


@pytest.mark.parametrize("policy", POLICIES)
def test_wrong_and_reused_names_change_no_answer(policy: Any, seed: int) -> None:
    """A model knows what was stored and not evicted."""
    chance, tenants = random.Random(seed), {"t": Tenant(), "high": Tenant(priority=1), "q": Tenant(max_blocks=5)}
    host, here, opened = Host(24, policy, tenants=tenants), dict[bytes, int](), list[Any]()
    index, hint_tenants = host.index, ["", *tenants]
    for step in range(1500):
        first, session = chance.randrange(40), str(chance.randrange(6))
        asked, tenant = keys(*range(first, first + chance.randint(1, 9))), chance.choice(hint_tenants)
        host.now += chance.choice([0, 0, 0.1, 5, 50])
        what = chance.choice(
            ["open", "open", "store", "store", "store", "load", "hint", "hint", "end", "touch", "remove"]
        )
        request = chance.choice([*opened, None])
        if what == "open":
            opened.append(index.open_request(session=chance.choice([session, None]), tenant=tenant))
        elif what == "store":
            reservation = index.reserve(asked, **({"tenant": tenant} if request is None else {"request": request}))
            assert {*reservation.evicted} <= here.keys() - {*asked}
            for name in reservation.evicted:
                del here[name]
            if chance.random() < 0.8:
                here.update(zip(reservation.keys, reservation.indices, strict=True))
                host.written.update(zip(reservation.indices, reservation.keys, strict=True))
                reservation.commit()
            else:
                reservation.abort()
        elif what == "hint":
            due = chance.choice([None, 1.0, 30.0])
            index.hint(chance.choice(ACTIONS), session=session, tenant=tenant, ttl=chance.choice([1, 60]), due=due)
        elif what == "end" and opened:
            request = opened.pop(chance.randrange(len(opened)))
            if chance.random() < 0.8:
                request.end()
        elif what == "remove" and chance.random() < 0.3:
            assert index.remove(asked) == sum(here.pop(name, None) is not None for name in asked)
        elif what == "touch":
            index.touch(asked)
        else:
            index.load(asked, request=request)
        if step % 5 == 0:
            host.left()
            assert {name: host.written[entry] for name, entry in here.items()} == {name: name for name in here}
            assert {*index.keys} == here.keys()


@pytest.mark.parametrize("method", ["insert", "remove"])
def test_a_policy_that_raises_while_keys_move_leaves_no_wrong_key(method: str) -> None:
    calls = [0]

    class Raising(Fifo):
        pass

    def counted(policy: Any, *arguments: Any, **named: Any) -> None:
        calls[0] -= 1
        if calls[0] == 0:
            raise LookupError
        getattr(Fifo, method)(policy, *arguments, **named)

    setattr(Raising, method, counted)
    for nth in range(1, 40):
        host = Host(12, Raising)
        calls[0] = nth
        try:
            for _ in range(2):
                host.trusted("a", *TURN, ttl=60)
                host.trusted("b", 0, 1, 10, 11, 12, ttl=60)
                host.index.hint("release", session="a")
                host.alone(*range(20, 26), 3)
                host.now += 61
            assert calls[0] > 0
            break
        except LookupError:
            pass
        host.left()
        host.trusted("c", *range(30, 36), ttl=60)
        host.scan()
        assert host.left(*range(30, 36)) == [*range(30, 36)]
    assert nth > 5, "it was called in moves"


def test_what_was_to_be_demoted_is_not_set_free_if_others_have_it_by_then() -> None:
    """A tier takes a while. Meanwhile a request without a session uses one key, and a tenant has stored another."""
    host = Host(tenants={"b": Tenant(priority=1)})
    with host.index.open_request(session="a") as request:
        host.store(keys(1, 2, 3), request=request)
    host.index.touch(keys(1))
    host.index.remove(keys(2))
    with host.index.open_request(session="b", tenant="b") as request:
        host.store(keys(2), request=request)
    host.index.records.set_free((tuple(keys(1, 2, 3, 4)), ""))
    pools = host.index._state.pools
    assert list(pools.beside(pools.of(""), retained=False).policy) == keys(3)
    host.index.check()

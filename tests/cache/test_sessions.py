"""Sessions and hints: whose keys go first, which shares promises have, what is refused. No device."""

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
from helpers import keys
from session_host import TURN, Host
from worlds import Fifo

from kvoffload import Tenant
from kvoffload.cache.policies import POLICIES
from kvoffload.cache.sessions import ACTIONS

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


@pytest.mark.parametrize(("common", "left"), [(2, 6), (3, 4)])
def test_a_request_goes_on_where_one_ended_if_it_begins_with_all_but_its_last_key(common: int, left: int) -> None:
    """Else it is a branch, and the session has both."""
    host = Host(16)
    host.turn("a", *TURN)
    host.turn("a", *TURN[:common], *range(10, 14 - common))
    assert host.index.hint("release", session="a").blocks == left


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

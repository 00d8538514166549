"""Checks of `check_tier`: how jobs end, what closing does, and what outlives it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from kvoffload.errors import ClosedError, LayoutError
from kvoffload.internal.log import LOGGER
from kvoffload.internal.waiting import wait_until
from kvoffload.testing.tier_checks_calls import operations, refused
from kvoffload.testing.tier_session import DONE, ENDED_UNBEGUN, MISSING, TierSession, TierSetup, names
from kvoffload.tiers import Outcome, TierJob


def outcomes_are_set_once(setup: TierSetup) -> None:
    """And entries are not touched afterwards."""
    with setup.session() as session:
        numbers = list(range(setup.entries))
        session.put_all(numbers)
        job = session.tier.get(session.keys(numbers), numbers)
        before = session.outcomes(job)
        for entry in range(setup.entries):
            session.pools.poison(entry)
        job.cancel()
        session.outcomes(session.tier.exists(session.keys(numbers)))
        assert job.outcomes == before, f"outcomes have changed from {names(before)} to {job.outcomes}"
        assert all(map(session.pools.poisoned, numbers)), "an entry was written to after its outcome"


def late_keys_expire(setup: TierSetup) -> None:
    with setup.session() as session:
        session.put_all([1, 2])
        late = time.monotonic() - 1.0
        entries = session.fill([3, 4])
        put = session.tier.put(session.keys([3, 4]), entries, deadline=late)
        get = session.tier.get(session.keys([1, 2]), [4, 5], deadline=late)
        asked = session.tier.exists(session.keys([1, 2]), deadline=late)
        for name, job in (("put", put), ("get", get), ("exists", asked)):
            outcomes = session.outcomes(job)
            assert set(outcomes) == {Outcome.EXPIRED}, f"{name} with a deadline in the past: {names(outcomes)}"
        assert session.tier.drain(setup.timeout) is True, "drain has not returned True, and nothing hangs"
        assert all(map(session.pools.poisoned, (4, 5))), "get has written to the entry of a key that has EXPIRED"
        session.expect_none(session.keys([3, 4]), "a put that has EXPIRED")
        session.expect([1, 2])


def cancelled_keys_are_not_touched(setup: TierSetup) -> None:
    for _ in range(20):
        with setup.session() as session:
            half = setup.entries // 2
            session.put_all(list(range(half)))
            entries = session.fill(range(100, 100 + half))
            put = session.tier.put(session.keys(range(100, 100 + half)), entries)
            get = session.tier.get(session.keys(range(half)), range(half, 2 * half))
            get.cancel()
            put.cancel()
            put_ended, get_ended = session.outcomes(put), session.outcomes(get)
            allowed = {DONE, Outcome.CANCELLED}
            assert {*put_ended, *get_ended} <= allowed, f"cancelled: {names(put_ended)}; {names(get_ended)}"
            assert session.tier.drain(setup.timeout) is True, "drain after cancel"
            for position, outcome in enumerate(get_ended):
                _check_fetched(session, half + position, position, outcome)
            found = session.get(session.keys(range(100, 100 + half)))
            for position, outcome in enumerate(put_ended):
                wanted = 100 + position if outcome is DONE else None
                assert found[position] == wanted, f"a put that was {outcome.name}: content {found[position]} is there"


def _check_fetched(session: TierSession, entry: int, number: int, outcome: Outcome) -> None:
    """An entry that a record was to be fetched to."""
    if outcome is DONE:
        version = session.pools.version(entry)
        assert version == number, f"get is DONE, with content {version} instead of {number}"
    elif outcome in ENDED_UNBEGUN:
        assert session.pools.poisoned(entry), f"get has written to the entry of a key that was {outcome.name}"


def the_caller_is_notified(setup: TierSetup) -> None:
    """Once all keys of a job have ended; and what `notify` raises hurts nothing."""
    with setup.session() as session:
        for kind in ("put", "get", "exists", "remove", "clear"):
            call = _calls(session)[kind]
            jobs: list[TierJob] = []
            seen: list[bool] = []
            # The call may notify before it returns.
            notify = partial(lambda jobs, seen: seen.append(not jobs or jobs[0].done), jobs, seen)
            jobs.append(call(notify=notify))
            session.outcomes(jobs[0])
            try:
                wait_until(partial(any, seen), setup.timeout / 2, "notify")
            except TimeoutError as error:
                raise AssertionError(f"{kind}: notify was not called after the last outcome") from error
            with _without_log_lines():
                session.outcomes(call(notify=_raise))
                assert session.tier.drain(setup.timeout) is True, "drain, after notify has raised"
        session.put_all([1, 2])
        session.expect([1, 2])


def _raise() -> None:
    raise _OnPurposeError


class _OnPurposeError(Exception):
    """Raised by a notify function of `check_tier`."""


@contextmanager
def _without_log_lines() -> Iterator[None]:
    def keep(record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], _OnPurposeError)

    LOGGER.addFilter(keep)
    try:
        yield
    finally:
        LOGGER.removeFilter(keep)


def _calls(session: TierSession) -> dict[str, Callable[..., TierJob]]:
    tier, keys = session.tier, session.keys([1, 2])
    return {
        "put": partial(tier.put, keys, session.fill([1, 2])),
        "get": partial(tier.get, keys, [4, 5]),
        "exists": partial(tier.exists, keys),
        "remove": partial(tier.remove, keys),
        "clear": tier.clear,
    }


def closing_ends_everything(setup: TierSetup) -> None:
    for _ in range(10):
        with setup.session() as session:
            tier, half = session.tier, setup.entries // 2
            session.put_all(list(range(half)))
            entries = session.fill(range(100, 100 + half))
            jobs = {
                "put": tier.put(session.keys(range(100, 100 + half)), entries),
                "get": tier.get(session.keys(range(half)), range(half, 2 * half)),
                "exists": tier.exists(session.keys(range(half))),
                "remove": tier.remove(session.keys([500])),
            }
            session.close()
            for name, job in jobs.items():
                assert job.done, f"close has returned True, and keys of a {name} have no outcome: {job.outcomes}"
                allowed = {DONE, Outcome.CANCELLED, *((MISSING,) if name == "remove" else ())}
                assert set(job.outcomes) <= allowed, f"{name}, then close: {job.outcomes}"
            for position, outcome in enumerate(session.outcomes(jobs["get"])):
                _check_fetched(session, half + position, position, outcome)
            for name, call in operations(tier).items():
                refused(f"{name} after close", ClosedError, "", call)
            assert tier.contains([session.key(1)]) == [False], "contains after close must be False"
            tier.statistics()
            session.close()


# durable tiers --------------------------------------------------------------------------------------------------------


def records_outlive_the_tier(setup: TierSetup) -> None:
    numbers = list(range(1, 2 * setup.entries))
    with setup.session() as session:
        session.put_all(numbers)
        assert session.tier.drain(setup.timeout) is True, "drain has not returned True, and nothing hangs"
    for _ in range(2):
        with setup.session(clear=False) as session:
            session.expect(numbers)
            known = session.outcomes(session.tier.exists(session.keys(numbers[: setup.entries])))
            assert set(known) == {DONE}, f"exists, in a second tier: {names(known)}"


def removals_outlive_the_tier(setup: TierSetup) -> None:
    with setup.session() as session:
        session.put_all([1, 2, 3])
        session.outcomes(session.tier.remove(session.keys([2])))
    with setup.session(clear=False) as session:
        session.expect_none(session.keys([2]), "removed, then a second tier")
        session.expect([1, 3])
        session.outcomes(session.tier.clear())
        session.put_all([4])
    with setup.session(clear=False) as session:
        session.expect_none(session.keys([1, 2, 3]), "cleared, then a second tier")
        session.expect([4])


def another_layout_gets_no_records(setup: TierSetup) -> None:
    """It is refused, or finds nothing."""
    with setup.session() as session:
        session.put_all([1, 2])
        layout = session.pools.layout
    other = TierSession(setup.make(), setup.new_pools(), setup.timeout)
    other.pools.layout = bytes(byte ^ 0xFF for byte in layout)
    try:
        try:
            other.attach()
        except LayoutError:
            return
        other.expect_none(other.keys([1, 2]), "attached with another layout")
    finally:
        other.close()


CHECKS = [
    outcomes_are_set_once,
    late_keys_expire,
    cancelled_keys_are_not_touched,
    the_caller_is_notified,
    closing_ends_everything,
]
DURABLE_CHECKS = [records_outlive_the_tier, removals_outlive_the_tier, another_layout_gets_no_records]

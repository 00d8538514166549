"""check_tier: tries the promises of `Tier` on tiers with pools of host memory. One function a check."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from kvoffload.cache.tiering.tier import RECORD_ALIGNMENT
from kvoffload.errors import ClosedError, LayoutError
from kvoffload.internal.checks import at_least, shown, to_wait
from kvoffload.internal.log import LOGGER
from kvoffload.internal.waiting import wait_until
from kvoffload.testing.tier_model import TierFuzz
from kvoffload.testing.tier_pools import DONE, MISSING, TierSession, TierSetup, names
from kvoffload.tiers import Outcome, Tier, TierJob

_MOST_TO_FILL = 4096  # records


def refused(what: str, error: type[Exception], names: str, call: Callable[[], object]) -> None:
    """Check that a call raises this error, with `names` in its message."""
    try:
        result = call()
    except error as raised:
        if names not in str(raised):
            raise AssertionError(f"{what}: the message does not name {names!r}: {raised}") from raised
    except Exception as other:
        raise AssertionError(f"{what}: {type(other).__name__} instead of {error.__name__}: {other}") from other
    else:
        raise AssertionError(f"{what}: accepted with {result!r}, instead of {error.__name__}")


def operations(tier: Tier) -> dict[str, Callable[[], object]]:
    """Return calls that a tier without a pool, or a closed one, refuses."""
    return {
        "put": lambda: tier.put([b"a"], [0]), "get": lambda: tier.get([b"a"], [0]),
        "exists": lambda: tier.exists([b"a"]), "remove": lambda: tier.remove([b"a"]), "clear": lambda: tier.clear(),
        "drain": lambda: tier.drain(1.0),
    }  # fmt: skip


def without_a_pool_it_refuses(session: TierSession) -> None:
    tier = session.tier
    for name, call in operations(tier).items():
        refused(f"{name} without a pool", ClosedError, "", call)
    assert tier.contains([b"a"]) == [False], "contains without a pool must be False"
    tier.statistics()
    assert tier.close(session.timeout) is True, "close of a tier without a pool must return True"
    assert tier.close(session.timeout) is True, "close called twice must return True"
    refused("attach after close", ClosedError, "", session.attach)


def only_one_pool(session: TierSession) -> None:
    session.put_all([1, 2])
    other = session.setup.new_pools()
    refused("a second attach", ClosedError, "", lambda: session.tier.attach(other.arrays, other.layout))
    session.expect([1, 2])
    assert all(map(other.poisoned, range(session.count))), "a pool that was refused was written to"


def unsuitable_pools_are_refused(session: TierSession) -> None:
    """After a refusal the tier still takes another pool."""
    tier, pools, row_bytes = session.tier, session.pools, session.setup.row_bytes
    first = pools.arrays[0]
    read_only, bytewise = first.view(), session.setup.new_pools().arrays[0].reshape(-1)
    read_only.flags.writeable = False
    wrong: dict[str, Any] = {
        "no pool": [],
        "an array instead of a list of them": first,
        "rows of 4095 bytes": [np.zeros((4, 4095), np.uint8)],
        "rows of no bytes": [np.zeros((4, 0), np.uint8)],
        "one dimension": [first.reshape(-1)],
        "columns of an array": [first[:, : row_bytes // 2]],
        "every second row": [first[::2]],
        "Fortran order": [np.asfortranarray(first)],
        "a wrong dtype": [first.view(np.uint32)],
        "rows that begin at odd addresses": [bytewise[16 : 16 - row_bytes].reshape(-1, row_bytes)],
        "pools of several lengths": [first, first[:-1]],
        "pools that cannot be written to": [read_only],
    }
    for what, arrays in wrong.items():
        refused(f"attach, {what}", LayoutError, "pools", partial(tier.attach, arrays, pools.layout))
    refused("attach, layout of 3 bytes", LayoutError, "layout", lambda: tier.attach(pools.arrays, b"abc"))
    if tier.capabilities.durable or tier.capabilities.shared:
        refused("attach, layout=None", LayoutError, "layout", lambda: tier.attach(pools.arrays, None))
    session.attach()
    session.put_all([1])
    session.expect([1])


_KEYS: dict[str, Any] = {
    "an empty key": [b"a", b""], "a key of 65 bytes": [b"a", b"k" * 65], "a str": [b"a", "b"], "an int": [b"a", 7],
    "a key twice": [b"a", b"a"], "no list": None,
}  # fmt: skip
_ENTRIES: dict[str, Any] = {
    "too few": [0], "too many": [0, 1, 2], "negative": [0, -1], "one twice": [1, 1], "not whole": [0, 1.5],
    "a str": [0, "1"],
}  # fmt: skip


def unsuitable_arguments_are_refused(session: TierSession) -> None:
    tier = session.tier
    session.put_all([1])
    session.fill([])
    before = replace(tier.statistics(), in_calls=0, longest_call=0.0)
    # `a` and `b` are never put below, so that no call has anything to do.
    for name, call in {"put": tier.put, "get": tier.get}.items():
        put_or_get = cast("Callable[..., TierJob]", call)
        wrong: list[tuple[str, str, Any, Any, dict[str, Any]]] = [
            *((what, "keys", keys, [0, 1], {}) for what, keys in _KEYS.items()),
            *((f"entries: {what}", "entries", [b"a", b"b"], entries, {}) for what, entries in _ENTRIES.items()),
            ("entries: outside the pool", "entries", [b"a", b"b"], [0, session.count], {}),
            ("deadline='soon'", "deadline", [b"a", b"b"], [0, 1], {"deadline": "soon"}),
            ("deadline=nan", "deadline", [b"a", b"b"], [0, 1], {"deadline": float("nan")}),
            ("notify=3", "notify", [b"a", b"b"], [0, 1], {"notify": 3}),
        ]
        for what, named, keys, entries, options in wrong:
            refused(f"{name}, {what}", LayoutError, named, partial(put_or_get, keys, entries, **options))
    refused("put, tenant=3", LayoutError, "tenant", lambda: tier.put([b"a"], [0], tenant=cast("Any", 3)))
    for what, keys in _KEYS.items():
        refused(f"exists, {what}", LayoutError, "keys", partial(tier.exists, keys))
        refused(f"remove, {what}", LayoutError, "keys", partial(tier.remove, keys))
    assert tier.drain(session.timeout) is True, "drain after refused calls"
    after = replace(tier.statistics(), in_calls=0, longest_call=0.0)
    assert after == before, f"refused calls have changed the statistics: {before}, then {after}"
    assert all(map(session.pools.poisoned, range(session.count))), "a refused call has written to an entry"
    session.expect_none([b"a", b"b"], "after puts that were refused")
    session.expect([1])


def jobs_of_no_keys_are_done(session: TierSession) -> None:
    tier = session.tier
    for job in (tier.put([], []), tier.get([], []), tier.exists([]), tier.remove([])):
        session.outcomes(job, set(), "a job of no keys")
    assert tier.contains([]) == [], "contains([]) must be []"


def keys_and_entries_may_be_any_sequence(session: TierSession) -> None:
    session.fill([1, 2])
    entries: Any = np.array([0, 1], dtype=np.int32)
    keys = (session.key(1), session.key(2))
    session.outcomes(session.tier.put(keys, entries), {DONE}, "put of a tuple of keys and an array of entries")
    entries[:] = 0
    session.expect([1, 2])


# records --------------------------------------------------------------------------------------------------------------


def every_byte_comes_back(session: TierSession) -> None:
    numbers = list(range(1, 3 * session.count + 1))
    session.put_all(numbers)
    for order in (numbers, numbers[::-1], random.Random(session.setup.seed).sample(numbers, len(numbers))):
        session.expect(order)
    assert session.tier.drain(session.timeout) is True, "drain has not returned True, and nothing hangs"
    session.expect(numbers)


def keys_of_all_lengths(session: TierSession) -> None:
    keys = [b"a", b"b", b"a\0", b"\0", b"\xff", b"x" * 63, b"x" * 64, b"x" * 63 + b"y"]
    numbers = list(range(1, len(keys) + 1))
    session.put_all(numbers, keys)
    session.expect(numbers, keys)
    session.expect_none([b"aa", b"\0\0", b"x" * 62], "keys that were not put, but begin like some that were")


def a_known_key_keeps_its_record(session: TierSession) -> None:
    session.put_all([1, 2])
    session.put_all([11, 12, 3], session.keys([1, 2, 3]))
    session.expect([1, 2, 3])


def unknown_keys_are_missing(session: TierSession) -> None:
    session.expect_none(session.keys(range(session.count)), "an empty tier")
    session.outcomes(session.tier.remove(session.keys([1, 2])), {MISSING}, "remove of keys without records")


def results_are_in_the_order_of_the_keys(session: TierSession) -> None:
    chance = random.Random(session.setup.seed)
    session.put_all([1, 3, 5, 7])
    for _ in range(10):
        numbers = chance.sample(range(8), 8)
        there = [number % 2 == 1 for number in numbers]
        wanted = [DONE if each else MISSING for each in there]
        contents = [number if number % 2 else None for number in numbers]
        assert session.get(session.keys(numbers)) == contents, (
            "get, of known and unknown keys: results are not in the order of the keys"
        )
        asked = session.outcomes(session.tier.exists(session.keys(numbers)))
        assert asked == wanted, f"exists: {names(asked)}, instead of {names(wanted)}"
        if session.tier.capabilities.local_index:
            known = session.tier.contains(session.keys(numbers))
            assert known == there, f"contains, with a local index: {known}, instead of {there}"
    removed = session.outcomes(session.tier.remove(session.keys(range(8))))
    assert removed == [MISSING, DONE] * 4, f"remove: {names(removed)}"


def any_interleaving(session: TierSession) -> None:
    of_fuzz: dict[str, Any] = {"seed": session.setup.seed, "timeout": session.timeout, "lossless": True}
    TierFuzz(session.tier, session.pools, keys=2 * session.count, **of_fuzz).run(2000)


def removed_records_are_gone(session: TierSession) -> None:
    session.put_all([1, 2, 3, 4])
    removed = session.outcomes(session.tier.remove(session.keys([2, 9, 4])))
    assert removed == [DONE, MISSING, DONE], f"remove of [known, unknown, known]: {names(removed)}"
    session.expect_none(session.keys([2, 4]), "after remove")
    session.expect([1, 3])
    session.put_all([22, 4], session.keys([2, 4]))
    session.expect([1, 22, 3, 4], session.keys([1, 2, 3, 4]))


def cleared_records_are_gone(session: TierSession) -> None:
    session.put_all([1, 2, 3])
    job = session.tier.clear()
    assert job.keys == (b"",), f"clear: a job of the keys {job.keys}, instead of one key b''"
    session.outcomes(job, {DONE, MISSING}, "clear")
    session.expect_none(session.keys([1, 2, 3]), "after clear")
    records = session.tier.statistics().records
    assert records in (0, None), f"after clear: statistics().records is {records}"
    session.put_all([12, 2], session.keys([1, 2]))
    session.expect([12, 2], session.keys([1, 2]))


def what_removes_overtakes_no_put(session: TierSession) -> None:
    """Puts called before are gone, whether they wait or have begun."""
    keys = session.keys(range(session.count))
    ways: dict[str, Callable[[], TierJob]] = {
        "clear": session.tier.clear,
        "remove": partial(session.tier.remove, keys),
    }
    for name, remove in ways.items():
        put = session.tier.put(keys, session.fill(range(session.count)))
        session.outcomes(remove())
        session.outcomes(put, {DONE, Outcome.CANCELLED}, "put, then a removal")
        session.expect_none(keys, f"put, then {name} without waiting")


def it_stays_within_its_bytes(session: TierSession) -> None:
    most = session.tier.capabilities.max_bytes
    record_bytes = session.pools.record_bytes
    if most is None or most // record_bytes > _MOST_TO_FILL:
        return
    wanted = range(2 * (most // record_bytes) + session.count)
    parts = [wanted[start : start + session.count] for start in range(0, len(wanted), session.count)]
    for numbers in parts:
        session.put(numbers)
        records = session.tier.statistics().records
        assert records is None or records * record_bytes <= most, (
            f"{records} records of {record_bytes} bytes, and max_bytes is {most}"
        )
    found = 0
    for numbers in parts:
        for number, version in zip(numbers, session.get(session.keys(numbers)), strict=True):
            assert version in (number, None), f"get of {session.key(number)!r}: content {version}"
            found += version is not None
    assert found * record_bytes <= most, f"{found} records come back, of {record_bytes} bytes; max_bytes is {most}"


def statistics_count(session: TierSession) -> None:
    before = session.tier.statistics()
    session.put_all([1, 2, 3])
    session.get(session.keys([1, 2, 9]))
    after = session.tier.statistics()
    nbytes = session.pools.record_bytes
    changes = {
        "written": 3, "bytes_written": 3 * nbytes, "read": 2, "bytes_read": 2 * nbytes, "missing": 1, "corrupt": 0,
        "failed": 0, "declined": 0,
    }  # fmt: skip
    for name, change in changes.items():
        grown = getattr(after, name) - getattr(before, name)
        assert grown == change, f"statistics().{name} has grown by {grown} instead of {change}"
    assert after.records in (3, None), f"statistics().records is {after.records} instead of 3"


def many_threads_at_once(session: TierSession) -> None:
    each = session.count // 4

    def put_fetch_and_remove(entries: range) -> None:
        tier, pools, keys = session.tier, session.pools, session.keys(entries)
        for first in range(0, 20_000, 1000):
            for entry in entries:
                pools.fill(entry, first + entry)
            session.outcomes(tier.put(keys, entries), {DONE}, "put by several threads")
            for entry in entries:
                pools.poison(entry)
            session.outcomes(tier.exists(keys))
            tier.contains(keys)
            tier.statistics()
            session.outcomes(tier.get(keys, entries), {DONE}, "get by several threads of what was put")
            for entry in entries:
                found, wanted = pools.version(entry), first + entry
                assert found == wanted, f"get by several threads: content {found} instead of {wanted}"
            session.outcomes(tier.remove(keys), {DONE}, "remove by several threads")

    works = [partial(put_fetch_and_remove, range(at * each, (at + 1) * each)) for at in range(4)]
    errors = _errors_of(works, "check_tier: one of many threads", session.timeout)
    assert errors is not None, "a thread does not come to an end"
    for error in errors:
        raise error


# how jobs end --------------------------------------------------------------------------------------------------------


def outcomes_are_set_once(session: TierSession) -> None:
    """Entries are not touched afterwards."""
    numbers = list(range(session.count))
    session.put_all(numbers)
    job = session.tier.get(session.keys(numbers), numbers)
    before = session.outcomes(job)
    for entry in range(session.count):
        session.pools.poison(entry)
    job.cancel()
    session.outcomes(session.tier.exists(session.keys(numbers)))
    assert job.outcomes == before, f"outcomes have changed from {names(before)} to {job.outcomes}"
    assert all(map(session.pools.poisoned, numbers)), "an entry was written to after its outcome"


def late_keys_expire(session: TierSession) -> None:
    session.put_all([1, 2])
    late = time.monotonic() - 1.0
    entries = session.fill([3, 4])
    put = session.tier.put(session.keys([3, 4]), entries, deadline=late)
    get = session.tier.get(session.keys([1, 2]), [4, 5], deadline=late)
    asked = session.tier.exists(session.keys([1, 2]), deadline=late)
    for name, job in (("put", put), ("get", get), ("exists", asked)):
        session.outcomes(job, {Outcome.EXPIRED}, f"{name} with a deadline in the past")
    assert session.tier.drain(session.timeout) is True, "drain has not returned True, and nothing hangs"
    assert all(map(session.pools.poisoned, (4, 5))), "get has written to the entry of a key that has EXPIRED"
    session.expect_none(session.keys([3, 4]), "a put that has EXPIRED")
    session.expect([1, 2])


def cancelled_keys_are_not_touched(session: TierSession) -> None:
    put, get = _put_and_get(session)
    get.cancel()
    put.cancel()
    put_ended, _ = (session.outcomes(job, {DONE, Outcome.CANCELLED}, "cancelled") for job in (put, get))
    assert session.tier.drain(session.timeout) is True, "drain after cancel"
    _check_fetched(session, get)
    found = session.get(put.keys)
    for position, outcome in enumerate(put_ended):
        wanted = 100 + position if outcome is DONE else None
        assert found[position] == wanted, f"a put that was {outcome.name}: content {found[position]} is there"


def _put_and_get(session: TierSession) -> tuple[TierJob, TierJob]:
    """Put records 100, 101, ... from one half of the entries, and get records 0, 1, ... into the other."""
    half = session.count // 2
    session.put_all(list(range(half)))
    put = session.tier.put(session.keys(range(100, 100 + half)), session.fill(range(100, 100 + half)))
    return put, session.tier.get(session.keys(range(half)), range(half, 2 * half))


def _check_fetched(session: TierSession, get: TierJob) -> None:
    for number, (entry, outcome) in enumerate(zip(get.entries, get.outcomes, strict=True)):
        version = session.pools.version(entry)
        if outcome is DONE:
            assert version == number, f"get is DONE, with content {version} instead of {number}"
        else:
            assert session.pools.poisoned(entry), f"get has written to the entry of a key that is {outcome}"


class _OnPurposeError(Exception):
    """Raised by a notify function of `check_tier`."""


def the_caller_is_notified(session: TierSession) -> None:
    """Once all keys of a job have ended. An exception of `notify` does no harm."""

    def fail() -> None:
        raise _OnPurposeError

    def keep(record: logging.LogRecord) -> bool:
        return record.exc_info is None or not isinstance(record.exc_info[1], _OnPurposeError)

    tier, keys = session.tier, session.keys([1, 2])
    calls: dict[str, Callable[..., TierJob]] = {
        "put": partial(tier.put, keys, [0, 1]),
        "get": partial(tier.get, keys, [4, 5]),
        "exists": partial(tier.exists, keys),
        "remove": partial(tier.remove, keys),
        "clear": tier.clear,
    }
    for kind, call in calls.items():
        session.fill([1, 2])
        jobs: list[TierJob] = []
        seen: list[bool] = []
        # The call may notify before it returns.
        notify = partial(lambda jobs, seen: seen.append(not jobs or jobs[0].done), jobs, seen)
        jobs.append(call(notify=notify))
        session.outcomes(jobs[0])
        try:
            wait_until(partial(any, seen), session.timeout / 2, "notify")
        except TimeoutError as error:
            raise AssertionError(f"{kind}: notify was not called after the last outcome") from error
        LOGGER.addFilter(keep)
        try:
            session.outcomes(call(notify=fail))
            assert session.tier.drain(session.timeout) is True, "drain, after notify has raised"
        finally:
            LOGGER.removeFilter(keep)
    session.put_all([1, 2])
    session.expect([1, 2])


def closing_ends_everything(session: TierSession) -> None:
    tier, (put, get) = session.tier, _put_and_get(session)
    asked, removed = tier.exists(get.keys), tier.remove(session.keys([500]))
    session.close()
    for name, job in {"put": put, "get": get, "exists": asked, "remove": removed}.items():
        assert job.done, f"close has returned True, and keys of a {name} have no outcome: {job.outcomes}"
        allowed = {DONE, Outcome.CANCELLED, *((MISSING,) if name == "remove" else ())}
        session.outcomes(job, allowed, f"{name}, then close")
    _check_fetched(session, get)
    for name, call in operations(tier).items():
        refused(f"{name} after close", ClosedError, "", call)
    assert tier.contains([session.key(1)]) == [False], "contains after close must be False"
    tier.statistics()


# durable tiers --------------------------------------------------------------------------------------------------------


def records_outlive_the_tier(session: TierSession) -> None:
    numbers = list(range(1, 2 * session.count))
    session.put_all(numbers)
    assert session.tier.drain(session.timeout) is True, "drain has not returned True, and nothing hangs"
    session.close()
    for _ in range(2):
        with session.setup.session(clear=False) as second:
            second.expect(numbers)
            second.outcomes(
                second.tier.exists(second.keys(numbers[: second.count])), {DONE}, "exists, in a second tier"
            )


def removals_outlive_the_tier(session: TierSession) -> None:
    session.put_all([1, 2, 3])
    session.outcomes(session.tier.remove(session.keys([2])))
    session.close()
    with session.setup.session(clear=False) as second:
        second.expect_none(second.keys([2]), "removed, then a second tier")
        second.expect([1, 3])
        second.outcomes(second.tier.clear())
        second.put_all([4])
    with session.setup.session(clear=False) as third:
        third.expect_none(third.keys([1, 2, 3]), "cleared, then a second tier")
        third.expect([4])


def another_layout_gets_no_records(session: TierSession) -> None:
    """It is refused, or finds nothing."""
    session.put_all([1, 2])
    session.close()
    with session.setup.session(attach=False) as other:
        other.pools.layout = bytes(byte ^ 0xFF for byte in session.pools.layout)
        with suppress(LayoutError):
            other.attach()
            other.expect_none(other.keys([1, 2]), "attached with another layout")


CHECKS = [
    without_a_pool_it_refuses, only_one_pool, unsuitable_pools_are_refused, unsuitable_arguments_are_refused,
    jobs_of_no_keys_are_done, keys_and_entries_may_be_any_sequence,
    every_byte_comes_back, keys_of_all_lengths, a_known_key_keeps_its_record, unknown_keys_are_missing,
    results_are_in_the_order_of_the_keys, removed_records_are_gone, cleared_records_are_gone,
    what_removes_overtakes_no_put, it_stays_within_its_bytes, statistics_count,
    outcomes_are_set_once, late_keys_expire, cancelled_keys_are_not_touched, the_caller_is_notified,
    closing_ends_everything,
    many_threads_at_once, any_interleaving,  # last: what they find, others say better
]  # fmt: skip
DURABLE_CHECKS = [records_outlive_the_tier, removals_outlive_the_tier, another_layout_gets_no_records]
_WITHOUT_A_POOL = (without_a_pool_it_refuses, unsuitable_pools_are_refused)
_ROUNDS: dict[Callable[[TierSession], None], int] = {
    what_removes_overtakes_no_put: 10,
    cancelled_keys_are_not_touched: 20,
    closing_ends_everything: 10,
}


def check_tier(
    make: Callable[[], Tier],
    *,
    entries: int = 16,
    row_bytes: int = 4096,
    pools: int = 2,
    seed: int = 0,
    timeout: float = 60.0,
) -> list[str]:
    """Check that a tier keeps the promises of `Tier`: bytes, outcomes, removals, refusals, closing. Takes a few
    seconds.

    Args:
        make: returns a new tier each time, not attached yet; called in this thread, then in threads of the checks. If
            the tiers are durable, let all use the same store; the check clears it. Others begin empty. The first tier
            is only asked whether it is durable, never attached nor closed. A tier must have room for four times
            `entries` records and no reason to decline them. A tier whose `max_bytes` has room for more than 4096
            records is not filled up to it.
        entries: of the pool that the tier gets, at least 8.
        row_bytes: of an entry on each device, a multiple of 4096.
        pools: the number of devices, with one array for each. Check a tier with 1 and with 2; a durable one needs
            another store for another number.
        seed: of the contents and the order.
        timeout: seconds that a job may take; a check may take four times as long.

    Returns:
        The names of the checks made.

    Raises:
        AssertionError: the tier breaks a promise, raises an error or does not come to an end; the message names the
            check. Later checks are not made. A check that has not ended goes on in its thread.
        ValueError: `entries`, `row_bytes`, `pools` or `timeout`.
        TypeError: `make` returns no `Tier`.
        Any error of the first call of `make`.
    """
    at_least("entries", entries, 8)
    if at_least("row_bytes", row_bytes, RECORD_ALIGNMENT) % RECORD_ALIGNMENT:
        raise ValueError(f"row_bytes must be a multiple of {RECORD_ALIGNMENT}, got {row_bytes}")
    setup = TierSetup(make, entries, row_bytes, at_least("pools", pools, 1), seed, to_wait("timeout", timeout))

    def run(check: Callable[[TierSession], None]) -> None:
        for _ in range(_ROUNDS.get(check, 1)):
            with setup.session(attach=check not in _WITHOUT_A_POOL) as session:
                check(session)

    if not isinstance(first := make(), Tier):
        raise TypeError(f"make must return a kvoffload.tiers.Tier, got {shown(first)}")
    checks = [*CHECKS, *DURABLE_CHECKS] if first.capabilities.durable else CHECKS
    titles = [check.__name__.replace("_", " ") for check in checks]
    for check, name in zip(checks, titles, strict=True):
        where, most = f"check_tier, {name}, seed={seed}", 4 * setup.timeout
        errors = _errors_of([partial(run, check)], f"check_tier: {name}", most)
        assert errors is not None, f"{where}: not over after {most} seconds; a call or a job does not end"
        for error in errors:
            text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            raise AssertionError(f"{where}: {text}") from error
    return titles


def _errors_of(works: Sequence[Callable[[], object]], name: str, timeout: float) -> list[BaseException] | None:
    """Run each of these functions in a thread of its own, and return their exceptions. None: one takes longer than
    `timeout` seconds.
    """
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # raised by the thread that has started this one
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), name=name, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    return None if any(thread.is_alive() for thread in threads) else errors

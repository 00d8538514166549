"""Checks of `check_tier`: what is refused, and that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from kvoffload.errors import ClosedError, LayoutError
from kvoffload.internal.types import UInt8Array
from kvoffload.testing.tier_pools import TierPools
from kvoffload.testing.tier_session import DONE, TierSession, TierSetup
from kvoffload.tiers import Tier, TierJob


def refused(what: str, error: type[Exception], names: str, call: Callable[[], object]) -> None:
    """A call must raise this error, whose message has this word."""
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
    """Calls that a tier without a pool, or a closed one, refuses."""
    return {
        "put": lambda: tier.put([b"a"], [0]),
        "get": lambda: tier.get([b"a"], [0]),
        "exists": lambda: tier.exists([b"a"]),
        "remove": lambda: tier.remove([b"a"]),
        "clear": lambda: tier.clear(),
        "drain": lambda: tier.drain(1.0),
    }


def without_a_pool_it_refuses(setup: TierSetup) -> None:
    tier = setup.make()
    for name, call in operations(tier).items():
        refused(f"{name} without a pool", ClosedError, "", call)
    assert tier.contains([b"a"]) == [False], "contains without a pool must be False"
    tier.statistics()
    assert tier.close(setup.timeout) is True, "close of a tier without a pool must return True"
    assert tier.close(setup.timeout) is True, "close called twice must return True"
    pools = setup.new_pools()
    refused("attach after close", ClosedError, "", lambda: tier.attach(pools.arrays, pools.layout))


def only_one_pool(setup: TierSetup) -> None:
    with setup.session() as session:
        session.put_all([1, 2])
        other = setup.new_pools()
        refused("a second attach", ClosedError, "", lambda: session.tier.attach(other.arrays, other.layout))
        session.expect([1, 2])
        assert all(map(other.poisoned, range(setup.entries))), "a pool that was refused was written to"


def unsuitable_pools_are_refused(setup: TierSetup) -> None:
    """And after a refusal the tier still takes another pool."""
    pools = setup.new_pools()
    first = pools.arrays[0]
    wrong: dict[str, Any] = {
        "no pool": [],
        "an array instead of a list of them": first,
        "rows of 4095 bytes": [np.zeros((4, 4095), np.uint8)],
        "rows of no bytes": [np.zeros((4, 0), np.uint8)],
        "one dimension": [first.reshape(-1)],
        "columns of an array": [first[:, : setup.row_bytes // 2]],
        "every second row": [first[::2]],
        "Fortran order": [np.asfortranarray(first)],
        "a wrong dtype": [first.view(np.uint32)],
        "rows that begin at odd addresses": [_misaligned(setup)],
        "pools of several lengths": [first, first[:-1]],
        "pools that cannot be written to": [_read_only(first)],
    }
    tier = setup.make()
    try:
        for what, arrays in wrong.items():
            refused(f"attach, {what}", LayoutError, "pools", partial(tier.attach, arrays, pools.layout))
        refused("attach, layout of 3 bytes", LayoutError, "layout", lambda: tier.attach(pools.arrays, b"abc"))
        if tier.capabilities.durable or tier.capabilities.shared:
            refused("attach, layout=None", LayoutError, "layout", lambda: tier.attach(pools.arrays, None))
        session = TierSession(tier, pools, setup.timeout)
        session.attach()
        session.put_all([1])
        session.expect([1])
    finally:
        assert tier.close(setup.timeout) is True, "close after refused pools must return True"


def _misaligned(setup: TierSetup) -> UInt8Array:
    array = TierPools(setup.entries, setup.row_bytes, 1, setup.seed).arrays[0]
    whole = array.reshape(-1)[16 : 16 + (setup.entries - 1) * setup.row_bytes]
    return whole.reshape(setup.entries - 1, setup.row_bytes)


def _read_only(array: UInt8Array) -> UInt8Array:
    view = array.view()
    view.flags.writeable = False
    return view


_KEYS: dict[str, Any] = {
    "an empty key": [b"a", b""],
    "a key of 65 bytes": [b"a", b"k" * 65],
    "a str": [b"a", "b"],
    "an int": [b"a", 7],
    "a key twice": [b"a", b"a"],
}
_ENTRIES: dict[str, Any] = {
    "too few": [0],
    "too many": [0, 1, 2],
    "negative": [0, -1],
    "one twice": [1, 1],
    "not whole": [0, 1.5],
    "a str": [0, "1"],
}


def unsuitable_arguments_are_refused(setup: TierSetup) -> None:
    with setup.session() as session:
        tier = session.tier
        session.put_all([1])
        session.fill([])
        before = replace(tier.statistics(), in_calls=0, longest_call=0.0)
        # `a` and `b` are never put below, so that no call has anything to do.
        for name, call in {"put": tier.put, "get": tier.get}.items():
            _check_arguments(name, cast("Callable[..., TierJob]", call), setup.entries)
        for what, keys in _KEYS.items():
            refused(f"exists, {what}", LayoutError, "keys", partial(tier.exists, keys))
            refused(f"remove, {what}", LayoutError, "keys", partial(tier.remove, keys))
        assert tier.drain(setup.timeout) is True, "drain after refused calls"
        after = replace(tier.statistics(), in_calls=0, longest_call=0.0)
        assert after == before, f"refused calls have changed the statistics: {before}, then {after}"
        assert all(map(session.pools.poisoned, range(setup.entries))), "a refused call has written to an entry"
        session.expect_none([b"a", b"b"], "after puts that were refused")
        session.expect([1])


def _check_arguments(name: str, call: Callable[..., TierJob], entries: int) -> None:
    for what, keys in _KEYS.items():
        refused(f"{name}, {what}", LayoutError, "keys", partial(call, keys, [0, 1]))
    for what, places in {**_ENTRIES, "outside the pool": [0, entries]}.items():
        refused(f"{name}, entries: {what}", LayoutError, "entries", partial(call, [b"a", b"b"], places))
    for deadline in ("soon", float("nan")):
        refused(
            f"{name}, deadline={deadline!r}",
            LayoutError,
            "deadline",
            partial(call, [b"a", b"b"], [0, 1], deadline=deadline),
        )
    refused(f"{name}, notify=3", LayoutError, "notify", partial(call, [b"a", b"b"], [0, 1], notify=3))


def jobs_of_no_keys_are_done(setup: TierSetup) -> None:
    with setup.session() as session:
        tier = session.tier
        for job in (tier.put([], []), tier.get([], []), tier.exists([]), tier.remove([])):
            assert session.outcomes(job) == [], f"a job of no keys: {job.outcomes}"
        assert tier.contains([]) == [], "contains([]) must be []"


def keys_and_entries_may_be_any_sequence(setup: TierSetup) -> None:
    with setup.session() as session:
        session.fill([1, 2])
        entries: Any = np.array([0, 1], dtype=np.int32)
        keys = (session.key(1), session.key(2))
        outcomes = session.outcomes(session.tier.put(keys, entries))
        assert outcomes == [DONE, DONE], f"put of a tuple of keys and an array of entries: {outcomes}"
        entries[:] = 0
        session.expect([1, 2])


CHECKS = [
    without_a_pool_it_refuses,
    only_one_pool,
    unsuitable_pools_are_refused,
    unsuitable_arguments_are_refused,
    jobs_of_no_keys_are_done,
    keys_and_entries_may_be_any_sequence,
]

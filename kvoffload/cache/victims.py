"""Where new keys go: which of them get entries, and which keys are evicted for them. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvoffload.cache.entries import EntryTable
from kvoffload.cache.policies import Protected, RequestPolicy
from kvoffload.cache.pools import Pool, Pools, RequestRecord, Space, Victims


def find_space(
    table: EntryTable,
    pools: Pools,
    pool: Pool,
    policy: RequestPolicy,
    new: list[bytes],
    free: int,
    present: list[bytes],
    request: RequestRecord | None = None,
) -> Space:
    """Find entries for `new` keys of a pool, or for as many of the first as possible. Changes nothing.

    Raises ValueError if the policy names keys that must not be evicted, or admits more keys than find entries.
    """
    own: Collection[bytes] = () if request is None else request.keys
    of, held, named = table.of, table.holds, set(present)
    protected: Protected  # whether a resident key has to stay
    if own:
        protected = lambda key: key in own or key in named or of.get(key) in held  # noqa: E731
    elif not named and not held:
        protected = lambda _: False  # noqa: E731
    else:
        protected = lambda key: key in named or of.get(key) in held  # noqa: E731
    space = pools.make_space(pool, policy, new, free, protected)
    short = space is None
    if space is None and request is not None:
        new, space = _most(lambda some: pools.make_space(pool, policy, some, free, protected), new)
    elif space is None:
        staying = {index for index in held if table.keys[index] is not None}.union(map(of.__getitem__, present))
        most = pools.most_newcomers(pool, free, [table.pool_of[index] for index in staying])
        if 0 < most < len(new):
            new = new[:most]
            space = pools.make_space(pool, policy, new, free, protected)
    if space is None or space.admitted == 0:
        return Space(0, [], short)
    victims = _check_victims(table, space.victims, protected)
    if space.admitted < 0 or space.admitted > len(new) or space.admitted > free + victims:
        raise ValueError(
            f"the policy {pool.policy!r:.80} admitted {space.admitted} of {len(new)} keys with {free} entries free and "
            f"{victims} keys to evict; make_room must name enough of them"
        )
    return space._replace(short=True) if short else space


def _most(make_space: Callable[[list[bytes]], Space | None], new: list[bytes]) -> tuple[list[bytes], Space | None]:
    """Return as many of `new`, from the first, as find space, and that space; None if the first finds none.

    A bisection: counting the keys that an open request protects would take longer the more they are.
    """
    found, space, beyond = 0, None, len(new)
    while beyond - found > 1:
        middle = 1 if not found else (found + beyond) // 2
        tried = make_space(new[:middle])
        if tried is None:
            beyond = middle
        else:
            found, space = middle, tried
    return new[:found], space


def _check_victims(table: EntryTable, victims: Victims, protected: Protected) -> int:
    """Raise ValueError unless these are different resident keys, of these pools, none of which has to stay.

    Returns how many they are.
    """
    count = 0
    for pool, keys in victims:
        count += len(keys)
        repeats = len(keys) > 1 and len(frozenset(keys)) < len(keys)
        for key in keys:
            index = table.of.get(key)
            if index is None or table.pool_of[index] != pool.number:
                wrong = "is not among its resident keys"
            elif protected(key):
                wrong = "has to stay: `protected` says so"
            elif repeats and keys.count(key) > 1:
                wrong = "was named before"
            else:
                continue
            raise ValueError(f"the policy {pool.policy!r:.80} named {key!r:.80} to be evicted, which {wrong}")
    return count


def shortage(table: EntryTable, missing: int, admitted: int, short: bool) -> str:
    """Say why not all missing keys are admitted, and name a remedy."""
    if short:
        return (
            f"{missing} keys find {table.num_free} entries free (capacity {table.capacity}), and too few of "
            f"{len(table)} may be evicted: others are the request's own, in use, or of a tenant with a quota or higher "
            f"priority; without all_or_nothing the first {admitted} are stored"
        )
    return (
        f"{missing - admitted} of {missing} keys would be declined: beyond the tenant's quota, not looked up often "
        f"enough, or worth less than what they would displace; without all_or_nothing {admitted} are stored"
    )

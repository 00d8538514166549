"""Pools of keys, each ordered by a policy of its own: one for each tenant with a quota, one for each priority."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress
from math import inf
from typing import Any, NamedTuple, Protocol

from kvoffload.cache.policies import LRU, Policy, PolicyChoice, Protected, RequestPolicy, Room, make_policy
from kvoffload.cache.policies.promised import Promise, Promised
from kvoffload.errors import KVOffloadWarning
from kvoffload.internal.checks import at_least

ORDINARY_SHARE = 1 / 8  # of the entries: keys that nobody has promised to come back for may displace others up to here


class OfSession(Protocol):
    """The part of an open request's record that `sessions` fills.

    Attributes:
        stored: the keys that the request has stored.
        promised: what it has promised, for which its new keys are retained.
    """

    stored: set[bytes]
    promised: Promise | None

    def pool_for(self, known: Set[bytes], keys: Collection[bytes], ordinary: Pool, /) -> Pool: ...


class RequestRecord:
    """The index's record of an open request."""

    __slots__ = ("__weakref__", "ended", "keys", "notes", "of_session", "on_end", "owner", "tenant")

    def __init__(self, owner: object, tenant: str, on_end: Callable[[tuple[bytes, ...]], None] | None) -> None:
        self.owner = owner
        self.tenant = tenant
        self.on_end = on_end
        self.keys: dict[bytes, None] = {}
        self.notes: dict[int, dict[Any, Any]] = {}
        self.ended = False
        self.of_session: OfSession | None = None

    def tenant_of_call(self, tenant: str) -> str:
        """Return the request's tenant, for a call that names the request and `tenant`."""
        if tenant not in ("", self.tenant):
            raise ValueError(f"tenant must be the request's, {self.tenant!r}, or left out, got {tenant!r:.80}")
        return self.tenant


class Pool:
    """Keys that one policy orders: those for a tenant with a quota, or all others at one priority.

    Attributes:
        number: in `Pools.all`.
        policy: orders the keys.
        stale: a call that changes the policy has begun and has not returned: the policy's keys may be wrong.
        selective: whether the policy is asked, or a quota applies, even where there is room.
        beside: of keys released or retained: the pool of the same keys otherwise.
        released: whether its keys were released.
    """

    def __init__(
        self, number: int, policy: Policy, make: Callable[[], Policy] | None, priority: float, max_blocks: int | None
    ) -> None:
        self.number = number
        self.policy = policy
        self.make = make  # None: the policy is the caller's own object
        self.priority = priority
        self.max_blocks = max_blocks
        self.stale = False
        self.selective = policy.declines_with_room or max_blocks is not None
        self.beside: Pool | None = None
        self.released = False

    def policy_for(self, request: RequestRecord) -> RequestPolicy:
        if request.of_session is not None and isinstance(self.policy, Promised):
            return self.policy.for_promise(request.of_session.promised)
        return self.policy.for_request(request.notes.setdefault(self.number, {}))

    def restore(self, keys: list[bytes]) -> None:
        """Make the policy know exactly these resident keys, after an exception.

        1. No call was interrupted: keys that differ are inserted or removed.
        2. A call was interrupted, and the pool can create a policy: a new one gets the keys.
        3. A call was interrupted, and the policy is the caller's own object: it is reset.
        A policy that cannot be created, or does not know the keys afterwards, is replaced by LRU, with a warning.
        """
        if not self.stale:
            known, mine = set(self.policy), set(keys)
            if known == mine and len(self.policy) == len(known):
                return
            self.stale = True
            if known - mine:
                self.policy.remove([key for key in self.policy if key not in mine], evicted=False)
            if mine - known:
                self.policy.insert([key for key in keys if key not in known])
            self.stale = False
            return
        policy, fault = self.policy, None
        try:
            if self.make is None:
                policy.reset(keys)
            else:
                policy = self.make()
                if keys:
                    policy.insert(keys)
            if len(policy) != len(keys) or set(policy) != set(keys):
                fault = f"it knows {len(policy)} keys and should know {len(keys)}"
        except Exception as error:  # noqa: BLE001  # a policy of the caller's
            fault = repr(error)
        if fault is not None:
            self.make, policy = LRU, LRU()
            policy.insert(keys)
        replaced, self.policy = self.policy, policy
        self.stale = False
        if fault is not None:
            warnings.warn(
                f"the policy {replaced!r:.80} cannot be restored after an exception ({fault}); LRU replaces it",
                KVOffloadWarning,
                stacklevel=2,
            )


@contextmanager
def claimed(policy: PolicyChoice) -> Iterator[None]:
    """Construct a cache inside it: a policy object then serves that cache alone, for good. An exception frees it again.

    Raises:
        ValueError: it serves another cache, or has served one.
    """
    mine = object()
    try:
        if isinstance(policy, Policy) and vars(policy).setdefault("_claim", mine) is not mine:
            raise ValueError(
                f"policy must be an object that no cache has had before, since it knows that cache's keys, got "
                f"{policy!r:.80}; make another object, or give a name or a function of the capacity"
            )
        yield
    except BaseException:
        if isinstance(policy, Policy) and vars(policy).get("_claim") is mine:
            del vars(policy)["_claim"]
        raise


Victims = list[tuple[Pool, list[bytes]]]


class Space(NamedTuple):
    """Where a request's new keys go.

    Attributes:
        admitted: how many of the new keys, from the first, are stored.
        victims: the keys evicted for them, by pool.
        short: whether others are declined because too few entries are free or may be evicted.
    """

    admitted: int
    victims: Victims
    short: bool = False


class Pools:
    """All pools of a cache.

    Raises:
        ValueError, TypeError: as `make_policy`; also one policy object for several pools.
    """

    def __init__(self, policy: PolicyChoice, tenants: Mapping[str, Tenant], capacity: int) -> None:
        if not isinstance(tenants, Mapping):
            raise TypeError(f"tenants must be a mapping of names to Tenant, got {tenants!r:.80}")
        self.all: list[Pool] = []  # by number
        self.by_tenant: dict[str, Pool] = {}

        def add(priority: int, max_blocks: int | None) -> Pool:
            make = None if isinstance(policy, Policy) else partial(make_policy, policy, _most(max_blocks, capacity))
            made = make_policy(policy, capacity) if make is None else make()
            self.all.append(Pool(len(self.all), made, make, priority, max_blocks))
            return self.all[-1]

        shared = {0: add(0, None)}  # by priority
        self.by_tenant[""] = shared[0]
        for name, tenant in tenants.items():
            if not isinstance(name, str):
                raise TypeError(f"tenants must be a mapping of names to Tenant, got the name {name!r:.80}")
            if not isinstance(tenant, Tenant):
                raise TypeError(f"tenants[{name!r}] must be a Tenant, got {tenant!r:.80}")
            if tenant.max_blocks is not None:
                self.by_tenant[name] = add(tenant.priority, tenant.max_blocks)
                continue
            if tenant.priority not in shared:
                shared[tenant.priority] = add(tenant.priority, None)
            self.by_tenant[name] = shared[tenant.priority]
        if len({id(pool.policy) for pool in self.all}) < len(self.all):
            raise ValueError(
                f"policy must be a name or a function of the capacity, as {len(self.all)} pools need one each, got the "
                f"object {policy!r:.80}"
            )

        self.capacity = capacity  # the entries that there are
        self._policy = policy
        self._beside: dict[tuple[int, bool], Pool] = {}

    def __str__(self) -> str:
        return ", ".join(str(pool.policy) for pool in self.all)

    def shrink(self, capacity: int) -> None:
        """Let `restore` make new policies for so many entries, as the cache stays this small; not the caller's own.

        New policies have learned nothing yet.
        """
        for pool in self.all:
            if pool.beside is None and pool.make is not None:
                pool.make = partial(make_policy, self._policy, _most(pool.max_blocks, capacity))
                pool.stale = True

    def beside(self, ordinary: Pool, *, retained: bool) -> Pool:
        """Return the pool beside an ordinary one: of keys that hints retain, which go after all of its priority; or of
        keys that hints have released, which go before all others.
        """
        pool = self._beside.get((ordinary.number, retained))
        if pool is None:
            make: type[Policy] = Promised if retained else LRU
            priority = ordinary.priority + 0.5 if retained else -inf
            pool = Pool(len(self.all), make(), make, priority, None)
            pool.beside, pool.released = ordinary, not retained
            self.all.append(pool)
            self._beside[ordinary.number, retained] = pool
        return pool

    def of(self, tenant: str) -> Pool:
        """Return the pool of a tenant's keys."""
        pool = self.by_tenant.get(tenant) if isinstance(tenant, str) else None
        if pool is None:
            known = ", ".join(map(repr, sorted(self.by_tenant)))
            raise ValueError(
                f"tenant must be one of {known}, got {tenant!r:.80}; name others in tenants= of the "
                "cache, or attach to a shared pool as one of its owner's"
            )
        return pool

    def split(self, keys: list[bytes], numbers: Sequence[int | None]) -> list[tuple[Pool, list[bytes]]]:
        """Split keys by the pool that knows them. `numbers`: each one's pool; keys that none knows (None) go with the
        key before them.
        """
        if None in numbers:
            numbers = list(accumulate(numbers, lambda before, now: before if now is None else now, initial=0))[1:]
        if len(set(numbers)) == 1:
            return [(self.all[numbers[0] or 0], keys)]
        each = [number for number in dict.fromkeys(numbers) if number is not None]
        return [(self.all[number], list(compress(keys, map(number.__eq__, numbers)))) for number in each]

    def make_space(
        self, pool: Pool, own_policy: RequestPolicy, newcomers: Sequence[bytes], free: int, protected: Protected
    ) -> Space | None:
        """Find entries for new keys of a pool, where `free` hold nothing; None if there are too few. Changes nothing.

        Keys of lower priorities go first; among the pools of one priority, the one with the most keys gives first.
        """
        if len(self.all) == 1 and pool.max_blocks is None:
            room = own_policy.make_room(newcomers, free, protected)
            return None if room is None else Space(room.admitted, [(pool, room.victims)] if room.victims else [])
        wanted, found = len(newcomers), 0
        taken: Victims = []

        def make_room() -> Room | None:
            room = free + found
            room = room if pool.max_blocks is None else min(room, pool.max_blocks - len(pool.policy))
            return own_policy.make_room(newcomers, room, protected)

        own = None
        for other in [*(self._donors(pool) if wanted > free else ()), pool]:
            if other is pool:
                own = make_room()
            else:
                victims = most_victims(other.policy, wanted - free - found, protected)
                taken.append((other, victims))
                found += len(victims)
            if own is not None:
                break
        if own is None:
            return None
        spare = free + found + len(own.victims) - own.admitted  # newcomers were declined: others may stay
        for _, victims in reversed(taken):
            while victims and spare > 0:
                victims.pop()
                spare -= 1
        return Space(own.admitted, [(each, mine) for each, mine in [(pool, own.victims), *taken] if mine])

    def most_newcomers(self, pool: Pool, free: int, protected: Iterable[int]) -> int:
        """Return how many new keys of a pool find entries, where `free` hold nothing and some keys have to stay.

        Args:
            protected: for each key that has to stay, its pool's number.
        """
        movable = [len(each.policy) for each in self.all]
        for number in protected:
            movable[number] -= 1
        donors = {each.number for each in self._donors(pool)} | {pool.number}
        most = free + sum(movable[number] for number in donors)
        if pool.max_blocks is not None:
            most = min(most, pool.max_blocks - len(pool.policy) + movable[pool.number])
        return max(0, most)

    def check(self, keys: list[bytes], numbers: Sequence[int | None]) -> None:
        """Raise AssertionError unless each policy knows exactly its own among these keys, and quotas are kept."""
        for pool in self.all:
            mine = {key for key, number in zip(keys, numbers, strict=True) if number == pool.number}
            assert not pool.stale, "no policy is left half changed"
            assert set(pool.policy) == mine, f"policy {pool.number} knows exactly its resident keys"
            assert len(pool.policy) == len(mine), "policies count what they know"
            assert pool.max_blocks is None or len(mine) <= pool.max_blocks, "quotas are kept"

    def _donors(self, pool: Pool) -> list[Pool]:
        lower = [other for other in self.all if other.priority <= pool.priority and len(other.policy)]
        retained = self._beside.get((pool.number, True))
        if retained is not None and len(retained.policy) and len(pool.policy) < ORDINARY_SHARE * self.capacity:
            lower.append(retained)
        return sorted(lower, key=lambda other: (other.priority, -len(other.policy), other is not pool))


def _most(max_blocks: int | None, capacity: int) -> int:
    return capacity if max_blocks is None else min(max_blocks, capacity)


def most_victims(policy: Policy, count: int, protected: Protected) -> list[bytes]:
    """Return `count` victims, or as many as may be evicted."""
    count = min(count, len(policy))
    victims = policy.victims(count, protected)
    if victims is None:
        victims = policy.victims(sum(not protected(key) for key in policy), protected)
    return victims or []


_FEWEST_COUNTED = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The share of a cache that the keys of one tenant, model or adapter may take.

    Attributes:
        max_blocks: the most keys, resident or pending, at a time; None: as many as fit. More are declined, or displace
            keys of the same tenant.
        priority: keys of a lower priority are evicted first. A key never displaces one of a higher priority. Keys
            stored without a tenant have priority 0, unless `tenants` has an entry for "".

    Raises:
        ValueError: `max_blocks` is not an integer of at least 1.
        TypeError: `priority` is not an integer.
    """

    max_blocks: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if self.max_blocks is not None:
            at_least("max_blocks", self.max_blocks, 1)
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise TypeError(f"priority must be an integer, got {self.priority!r:.80}")


class ReuseFilter:
    """Counts lookups of missing keys: a key is worth storing after `store_after` of these.

    Remembers as many keys as the cache holds, at least 16,384. The key that was not asked for longest is forgotten
    first.
    """

    def __init__(self, store_after: int, capacity: int) -> None:
        self.store_after = at_least("store_after", store_after, 0)
        self._most = max(capacity, _FEWEST_COUNTED)
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def note(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._seen[key] = self._seen.get(key, 0) + 1
            self._seen.move_to_end(key)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def passing(self, keys: list[bytes]) -> list[bytes]:
        return [key for key in keys if self._seen.get(key, 0) >= self.store_after]

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._seen.pop(key, None)

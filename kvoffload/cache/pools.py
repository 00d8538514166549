"""Pools of keys, each ordered by a policy of its own: one for each tenant with a quota, one for each priority, and all
of these once more for the keys of other weights (see `weights`), which go before all others.
"""

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
from kvoffload.cache.weights import Weights, lost_namespace, namespace_digest, namespace_of, split_namespace
from kvoffload.errors import KVOffloadWarning
from kvoffload.internal.checks import at_least

_RELEASED = -1e300  # the priority of keys that hints have released: above those of weights that are not in use
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

    __slots__ = ("__weakref__", "ended", "keys", "notes", "of_session", "on_end", "owner", "tenant", "weights")

    def __init__(
        self, owner: object, tenant: str, on_end: Callable[[tuple[bytes, ...]], None] | None, weights: Weights
    ) -> None:
        self.owner = owner
        self.tenant, self.weights = tenant, weights
        self.on_end = on_end
        self.keys: dict[bytes, None] = {}
        self.notes: dict[object, dict[Any, Any]] = {}
        self.ended = False
        self.of_session: OfSession | None = None

    def tenant_of_call(self, tenant: str) -> str:
        """Return the request's namespace, for a call that names the request and `tenant`."""
        own, _ = split_namespace(self.tenant)
        if tenant not in ("", own, self.tenant):
            raise ValueError(f"tenant must be the request's, {own!r}, or left out, got {tenant!r:.80}")
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
        weights: the name of its keys' weights.
        usual: its priority while these are in use.
        gone: whether its number is for another pool.
    """

    def __init__(
        self,
        number: int,
        policy: Policy,
        make: Callable[[], Policy] | None,
        priority: float,
        max_blocks: int | None,
        weights: str = "",
    ) -> None:
        self.number = number
        self.policy = policy
        self.make = make  # None: the policy is the caller's own object
        self.priority = self.usual = priority
        self.weights = weights
        self.gone = False
        self.max_blocks = max_blocks
        self.stale = False
        self.selective = policy.declines_with_room or max_blocks is not None
        self.beside: Pool | None = None
        self.released = False

    def policy_for(self, request: RequestRecord) -> RequestPolicy:
        if request.of_session is not None and isinstance(self.policy, Promised):
            return self.policy.for_promise(request.of_session.promised)
        return self.policy.for_request(request.notes.setdefault(self, {}))

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
        for name, tenant in tenants.items():
            if not isinstance(name, str) or "\0" in name:
                raise TypeError(f"tenants must be a mapping of names to Tenant, got the name {name!r:.80}")
            if not isinstance(tenant, Tenant):
                raise TypeError(f"tenants[{name!r}] must be a Tenant, got {tenant!r:.80}")
        self.tenants: Mapping[str, Tenant] = {"": Tenant(), **tenants}
        self.capacity = self._most = capacity  # entries now; and in the end, for which policies are made
        self._policy = policy
        self.all: list[Pool] = []  # by number
        self.by_tenant: dict[str, Pool] = {}  # and by namespace
        self.in_use: frozenset[str] = frozenset({""})  # names of weights
        self._unused: dict[int, Pool] = {}  # of other weights, by number: the first went out of use first
        self._beside: dict[tuple[int, bool], Pool] = {}
        self._default = 0  # the number of the pool of "" in weights that are in use
        for name in self.tenants:
            self.of(name)
        if len({id(pool.policy) for pool in self.all}) < len(self.all):
            raise ValueError(
                f"policy must be a name or a function of the capacity, as {len(self.all)} pools need one each, got the "
                f"object {policy!r:.80}"
            )

    def __str__(self) -> str:
        return ", ".join(str(pool.policy) for pool in self.all if not pool.gone)

    def shrink(self, capacity: int) -> None:
        """Let `restore` make new policies for so many entries, as the cache stays this small; not the caller's own.

        New policies have learned nothing yet.
        """
        self._most = capacity
        for pool in self.all:
            if pool.beside is None and pool.make is not None:
                pool.make = self._making(pool.max_blocks)
                pool.stale = True

    def beside(self, ordinary: Pool, *, retained: bool) -> Pool:
        """Return the pool beside an ordinary one: of keys that hints retain, which go after all of its priority; or of
        keys that hints have released, which go before all others.
        """
        pool = self._beside.get((ordinary.number, retained))
        if pool is None:
            make: type[Policy] = Promised if retained else LRU
            pool = self._add(make(), make, ordinary.usual + 0.5 if retained else _RELEASED, None, ordinary.weights)
            pool.beside, pool.released = ordinary, not retained
            self._beside[ordinary.number, retained] = pool
        return pool

    def of(self, tenant: str) -> Pool:
        """Return the pool of a tenant's keys, or of a namespace's."""
        pool = self.by_tenant.get(tenant) if isinstance(tenant, str) else None
        return self._made_for(tenant) if pool is None else pool

    def tenant(self, namespace: str) -> Tenant:
        """Return the tenant of a namespace. Needs no lock. Raises ValueError: there is no such one."""
        name, _ = split_namespace(namespace) if isinstance(namespace, str) else (namespace, "")
        tenant = self.tenants.get(name) if isinstance(name, str) else None
        if tenant is None:
            known = ", ".join(map(repr, sorted(self.tenants)))
            raise ValueError(
                f"tenant must be one of {known}, got {name!r:.80}; name others in tenants= of the "
                "cache, or attach to a shared pool as one of its owner's"
            )
        return tenant

    def _made_for(self, namespace: str) -> Pool:
        tenant = self.tenant(namespace)
        name, weights = split_namespace(namespace)
        lost = self.by_tenant.get(lost_namespace(namespace_digest(namespace))) if weights else None
        if lost is not None:  # with keys from before this process
            lost.weights, lost.usual = weights, tenant.priority
            self._place(lost)
        quota, alike = tenant.max_blocks, (weights, tenant.priority, None, None, False)
        shared = [one for one in self.all if (one.weights, one.usual, one.max_blocks, one.beside, one.gone) == alike]
        pool = shared[0] if shared and quota is None else None
        if weights and isinstance(self._policy, Policy):
            pool = self.by_tenant[name]
        if pool is None:
            policy = self._policy
            make = None if isinstance(policy, Policy) else self._making(quota)
            made = make_policy(policy, self._most) if make is None else make()
            pool = self._add(made, make, tenant.priority, quota, weights)
        self.by_tenant[namespace] = pool
        self._place(pool)
        return pool

    def _making(self, quota: int | None) -> Callable[[], Policy]:
        most = self._most if quota is None else min(quota, self._most)
        return partial(make_policy, self._policy, most)

    def _add(
        self, policy: Policy, make: Callable[[], Policy] | None, priority: float, quota: int | None, weights: str
    ) -> Pool:
        """Add a pool under a number that is free."""
        number = next((pool.number for pool in self.all if pool.gone), len(self.all))
        pool = Pool(number, policy, make, priority, quota, weights)
        self.all[number : number + 1] = [pool]
        self._place(pool)
        return pool

    # weights ------------------------------------------------------------------------------------------------------

    def use(self, names: frozenset[str]) -> None:
        """Let the keys of all other weights go first, and those of these as their tenants' priorities say. Takes as
        long as there are pools, whatever the number of keys.

        A policy that is the caller's own object orders the keys of all weights alike.
        """
        self.in_use = names
        for pool in self.all:
            if not pool.gone:
                self._place(pool)
        self._drop_unused()
        for name in names:
            self._default, *_ = [self.of(namespace_of(tenant, name)).number for tenant in self.tenants]

    @property
    def of_other_weights(self) -> int:
        """How many keys are of weights that are not in use."""
        return sum(len(pool.policy) for pool in self._unused.values())

    def _place(self, pool: Pool) -> None:
        if pool.weights in self.in_use or isinstance(self._policy, Policy):
            pool.priority = pool.usual
            self._unused.pop(pool.number, None)
        else:
            pool.priority = -inf
            self._unused.setdefault(pool.number, pool)

    def _drop_unused(self) -> None:
        """Drop pools without keys of weights that are not in use, unless one beside them has keys."""
        needed = {pool.beside for pool in self.all if len(pool.policy)}
        gone = {pool for pool in self._unused.values() if not len(pool.policy)} - needed
        self.by_tenant = {name: each for name, each in self.by_tenant.items() if each not in gone}
        self._beside = {key: each for key, each in self._beside.items() if each not in gone}
        self._unused = {number: each for number, each in self._unused.items() if each not in gone}
        for pool in gone:
            pool.gone = True  # last: after an interrupt it is dropped again

    def split(self, keys: list[bytes], numbers: Sequence[int | None]) -> list[tuple[Pool, list[bytes]]]:
        """Split keys by the pool that knows them. `numbers`: each one's pool; keys that none knows (None) go with the
        key before them.
        """
        if None in numbers:
            begin = self._default
            numbers = list(accumulate(numbers, lambda before, now: before if now is None else now, initial=begin))[1:]
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

    def _donors(self, pool: Pool) -> Iterator[Pool]:
        """Yield the pools that give entries to this one: those of other weights first, in the order in which they went
        out of use.
        """
        yield from [other for other in self._unused.values() if len(other.policy)]
        lower = [
            other
            for other in self.all
            if other.priority <= pool.priority and len(other.policy) and other.number not in self._unused
        ]
        retained = self._beside.get((pool.number, True))
        if retained is not None and len(retained.policy) and len(pool.policy) < ORDINARY_SHARE * self.capacity:
            lower.append(retained)
        yield from sorted(lower, key=lambda other: (other.priority, -len(other.policy), other is not pool))


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
        priority: keys of a lower priority are evicted first. A key never displaces one of a higher priority, unless
            `hint` has released that one, or it is of other weights. Keys stored without a tenant have priority 0,
            unless `tenants` has an entry for "".

    Raises:
        ValueError: `max_blocks` is not an integer of at least 1.
        TypeError: `priority` is not an int of Python.
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

"""Who may store how much, and when: namespaces with quotas and priorities, and the reuse filter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvoffload.cache.policies import Policy, Protected, Room, make_policy
from kvoffload.internal.checks import at_least

_FEWEST_COUNTED = 16_384


@dataclass(frozen=True, slots=True)
class Namespace:
    """The share of a cache that the keys of one tenant, model or adapter may take.

    Attributes:
        max_blocks: keys that may be resident or pending at a time; None: as many as fit. What goes beyond is declined
            or displaces keys of the same namespace.
        priority: keys of a lower priority are given up first, and never for keys of a lower one than their own. Keys
            stored without a known namespace have priority 0.

    Raises:
        ValueError, TypeError: `max_blocks` is less than 1, or a value is no integer.
    """

    max_blocks: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if self.max_blocks is not None:
            at_least("max_blocks", self.max_blocks, 1)
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise TypeError(f"priority must be an integer, got {self.priority!r:.80}")


class ReuseFilter:
    """Counts lookups of keys that are missing: a key is worth storing after `store_after` of them.

    Remembers as many keys as the cache holds, at least 16,384, and forgets those first that were not asked for longest.
    """

    def __init__(self, store_after: int, capacity: int) -> None:
        self.store_after = at_least("store_after", store_after, 0)
        self._most = max(capacity, _FEWEST_COUNTED)
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def note(self, keys: Iterable[bytes]) -> None:
        """These keys, missing, were looked up."""
        if not self.store_after:
            return
        for key in keys:
            self._seen[key] = self._seen.pop(key, 0) + 1
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def passing(self, keys: list[bytes]) -> list[bytes]:
        """Those of them that are worth storing."""
        if not self.store_after:
            return keys
        return [key for key in keys if self._seen.get(key, 0) >= self.store_after]

    def forget(self, keys: Iterable[bytes]) -> None:
        if self.store_after:
            for key in keys:
                self._seen.pop(key, None)


class Pool:
    """Keys that one policy orders: those of a namespace with a quota, or all others of one priority."""

    def __init__(self, number: int, policy: Policy, priority: int, max_blocks: int | None) -> None:
        self.number = number
        self.policy = policy
        self.priority = priority
        self.max_blocks = max_blocks

    def within_quota(
        self, newcomers: list[bytes], present: Iterable[bytes], number_of: Callable[[bytes], int | None]
    ) -> list[bytes]:
        """Those of a request's new keys, from the first, that fit in the quota beside those present, which stay."""
        if self.max_blocks is None:
            return newcomers
        kept = sum(number_of(key) == self.number for key in present)
        return newcomers[: self.max_blocks - kept]


class Space(NamedTuple):
    """Where new keys go: how many of them, from the first, and what goes for them, by pool."""

    admitted: int
    victims: list[tuple[Pool, list[bytes]]]


class Pools:
    """All pools of a cache.

    Raises:
        ValueError, TypeError: as `make_policy`; also one policy object for several pools.
    """

    def __init__(
        self,
        policy: str | Policy | Callable[[int], Policy],
        namespaces: Mapping[str, Namespace],
        capacity: int,
    ) -> None:
        if not isinstance(namespaces, Mapping):
            raise TypeError(f"namespaces must be a mapping of names to Namespace, got {namespaces!r:.80}")
        self.all: list[Pool] = []  # by number
        self._of: dict[str, Pool] = {}

        def make(priority: int, max_blocks: int | None) -> Pool:
            most = capacity if max_blocks is None else min(max_blocks, capacity)
            self.all.append(Pool(len(self.all), make_policy(policy, most), priority, max_blocks))
            return self.all[-1]

        shared = {0: make(0, None)}  # by priority
        self._default = shared[0]
        for name, namespace in namespaces.items():
            if not isinstance(namespace, Namespace):
                raise TypeError(f"namespaces[{name!r}] must be a Namespace, got {namespace!r:.80}")
            if namespace.max_blocks is not None:
                self._of[name] = make(namespace.priority, namespace.max_blocks)
                continue
            if namespace.priority not in shared:
                shared[namespace.priority] = make(namespace.priority, None)
            self._of[name] = shared[namespace.priority]
        if len({id(pool.policy) for pool in self.all}) < len(self.all):
            raise ValueError(
                f"policy must be a name or a function of the capacity, as {len(self.all)} pools need one each, got the "
                f"object {policy!r:.80}"
            )

    def __str__(self) -> str:
        return ", ".join(str(pool.policy) for pool in self.all)

    def of(self, namespace: str) -> Pool:
        return self._of.get(namespace, self._default)

    def split(self, keys: Iterable[bytes], number_of: Callable[[bytes], int | None]) -> list[tuple[Pool, list[bytes]]]:
        """Keys by the pool that knows them; those that none knows go with the key before them."""
        if len(self.all) == 1:
            return [(self._default, list(keys))]
        parts: dict[int, list[bytes]] = {}
        latest = 0
        for key in keys:
            number = number_of(key)
            latest = latest if number is None else number
            parts.setdefault(latest, []).append(key)
        return [(self.all[number], mine) for number, mine in parts.items()]

    def make_space(self, pool: Pool, newcomers: Sequence[bytes], free: int, protected: Protected) -> Space | None:
        """Find entries for new keys of a pool where `free` hold nothing; None if too few may go. Changes nothing.

        Keys of lower priorities go first, then those of the pool with the most keys among those of the same priority.
        """
        wanted, found = len(newcomers), 0
        taken: list[tuple[Pool, list[bytes]]] = []

        def make_room() -> Room | None:
            room = free + found
            room = room if pool.max_blocks is None else min(room, pool.max_blocks - len(pool.policy))
            return pool.policy.make_room(newcomers, room, protected)

        own = None
        donors = self._donors(pool) if wanted > free else []
        for other in [*donors, pool]:
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
        return Space(own.admitted, [(pool, own.victims), *taken])

    def check(self, keys: Sequence[bytes], number_of: Callable[[bytes], int | None]) -> None:
        """Raise AssertionError unless each policy knows exactly its keys of these, and quotas are kept."""
        for pool in self.all:
            mine = {key for key in keys if number_of(key) == pool.number}
            assert set(pool.policy) == mine, f"policy {pool.number} knows exactly its resident keys"
            assert len(pool.policy) == len(mine), "policies count what they know"
            assert pool.max_blocks is None or len(mine) <= pool.max_blocks, "quotas are kept"

    def _donors(self, pool: Pool) -> list[Pool]:
        lower = [other for other in self.all if other.priority <= pool.priority and len(other.policy)]
        return sorted(lower, key=lambda other: (other.priority, -len(other.policy), other is not pool))


def most_victims(policy: Policy, count: int, protected: Protected) -> list[bytes]:
    """Up to `count` victims: fewer where no more may go."""
    count = min(count, len(policy))
    victims = policy.victims(count, protected)
    if victims is None:
        victims = policy.victims(sum(not protected(key) for key in policy), protected)
    return victims or []

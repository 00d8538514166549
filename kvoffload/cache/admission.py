"""Which keys may be stored: tenants with quotas and priorities, and the reuse filter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvoffload.internal.checks import at_least

_FEWEST_COUNTED = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The share of a cache that the keys of one tenant, model or adapter may take.

    Attributes:
        max_blocks: keys that may be resident or pending at a time; None: as many as fit. What goes beyond is declined
            or displaces keys of the same tenant.
        priority: keys of a lower priority are evicted first, and never for keys of a lower one than their own. Keys
            stored without naming a tenant have priority 0, unless `tenants` has an entry for "".

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
            self._seen[key] = self._seen.get(key, 0) + 1
            self._seen.move_to_end(key)
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

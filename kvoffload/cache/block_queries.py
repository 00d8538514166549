"""What can be asked of a BlockCache, and told without copying anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

from kvoffload.cache.calls import guarded
from kvoffload.cache.engines import EngineT
from kvoffload.cache.entries import Status
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.queries import check_state
from kvoffload.cache.reservations import CacheRequest
from kvoffload.cache.state import CacheState
from kvoffload.cache.statistics import CacheStatistics
from kvoffload.errors import ClosedError


class BlockQueries(Generic[EngineT]):
    """The part of a `BlockCache` that copies nothing and hands out no slots."""

    engine: EngineT
    _index: CacheIndex
    _state: CacheState
    _check_usable: Callable[[], None] | None = None  # calls of the engine check it

    # asking -------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading keys can be loaded, at most `max_load_blocks`. Counted as a request; not a use, see `touch`.

        Raises ClosedError if the engine is closed.
        """
        self._look()
        return self._index.lookup(keys)

    def lookup_many(self, requests: Sequence[Sequence[bytes]]) -> list[int]:
        """`lookup` for each of several requests; the cache does not change in between."""
        self._look()
        return self._index.lookup_many(requests)

    def status(self, keys: Sequence[bytes]) -> list[Status]:
        """For each key, whether it is missing, a hit or pending. Not counted; works with a closed engine, too."""
        self.engine.advance()
        return self._index.status(keys)

    def status_of(self, key: bytes) -> Status:
        """Whether one key is missing, a hit or pending. Counted as `lookup([key])` is: see `CacheIndex.status_of`.

        Raises:
            LayoutError: `key` is not bytes.
            ClosedError: the engine is closed.
        """
        self._look()
        return self._index.status_of(key)

    def _look(self) -> None:
        if self.engine.closed:
            raise ClosedError("the engine of the cache is closed, so nothing can be loaded: make an engine and a cache")
        self.engine.advance()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record that a request with these keys has ended: once per request, with all of its keys in their order, found
        or not. So recency and frequency follow requests, not the order in which copies happened to complete.
        """
        self._index.touch(keys)

    def open_request(self, *, tenant: str = "") -> CacheRequest:
        """A handle for a request that stores and loads its keys in pieces: see `CacheRequest`.

        Raises:
            ValueError: the cache has no such tenant.
        """
        return self._index.open_request(tenant=tenant)

    # looking ------------------------------------------------------------------------------------------------------

    def statistics(self) -> CacheStatistics:
        """Counts now and since the cache was created."""
        self.engine.advance()
        return self._index.statistics()

    def check(self) -> None:
        """Verify the cache's invariants; AssertionError says which does not hold. Meant for tests."""
        self.engine.advance()
        self._check(None)

    @guarded
    def _check(self, _: None) -> None:
        check_state(self._state)
        waiting = [*self._state.storing, *self._state.loading]
        assert not waiting or self.engine.jobs_in_flight(), "reservations and loads wait for transfers in flight"

    def __len__(self) -> int:
        return len(self._index)

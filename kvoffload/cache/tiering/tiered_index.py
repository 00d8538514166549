"""TieredIndex: a CacheIndex with tiers below the memory that its entries stand for. No engine, no device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvoffload.cache.entries import Status, check_keys
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.policies import DEFAULT_POLICY, PolicyChoice
from kvoffload.cache.pools import Tenant
from kvoffload.cache.reservations import CacheRequest
from kvoffload.cache.statistics import CacheEvent
from kvoffload.cache.tiering.attaching import admits_all, checked_tiers
from kvoffload.cache.tiering.below import CacheTierStatistics
from kvoffload.cache.tiering.index_tiers import HUNG, Hook, IndexTiers, WriteName, check_options
from kvoffload.cache.tiering.promotion import IndexPromotion
from kvoffload.cache.tiering.tier import Tier, check_pools
from kvoffload.errors import CapacityError, ClosedError
from kvoffload.internal.checks import to_wait
from kvoffload.internal.types import UInt8Array


class TieredIndex(CacheIndex):
    """A `CacheIndex` over memory that this process maps, and tiers below it. Usable from any thread; a context manager.

    For a host whose index is in one process, and whose engines are in others, one for each device: their slots lie in
    memory that all of them map, such as `SharedSlots`. Who has reserved an entry has the engines store into that slot,
    and commits when all of them have; `acquire` holds the entries that they load. What a `CacheIndex` has works as it
    does there, and knows the entries alone; keys that are only in a tier are promoted first:

        with index.promote(keys, deadline=0.2) as promotion:
            hits = promotion.wait()                                    # or poll `promotion.done`
            lease = index.acquire(keys[:hits])

    A record of a tier is one entry: its row of every pool, all or nothing.

    Args:
        pools: the slots of each engine, in an order that never changes: uint8, (entries, bytes), as for `Tier.attach`.
            They stay mapped until `close` has returned True.
        tiers, write, hung: as for `TieredCache`.
        layout: 16 bytes that say what the rows of all pools mean; see `Tier.attach`.
        seconds_per_key: what computing the blocks of a key takes: nothing is promoted that is expected to take longer,
            going by the tier's speed as measured lately. None: everything is promoted.
        policy, tenants, store_after, max_load_blocks, on_event: as for `CacheIndex`; "prefix" declines nothing here,
            and `on_event` is also called by a thread of the tiers.

    Raises:
        What `CacheIndex` raises; LayoutError, CapacityError and others that `Tier.attach` raises.
        ValueError, TypeError: bad arguments.
    """

    def __init__(
        self,
        pools: Sequence[UInt8Array],
        *,
        tiers: Sequence[Tier],
        layout: bytes | None,
        write: WriteName = "admitted",
        seconds_per_key: float | None = None,
        hung: float = HUNG,
        policy: PolicyChoice = DEFAULT_POLICY,
        tenants: Mapping[str, Tenant] | None = None,
        store_after: int = 0,
        max_load_blocks: int | None = None,
        on_event: Callable[[CacheEvent], None] | None = None,
    ) -> None:
        check_options(write, hung)
        if seconds_per_key is not None and not to_wait("seconds_per_key", seconds_per_key) > 0:
            raise ValueError(f"seconds_per_key must be above 0, or None, got {seconds_per_key!r:.80}")
        check_pools(pools)
        if len(pools[0]) == 0:
            raise CapacityError("pools have no entries, and tiers need some")
        checked = checked_tiers(tiers)
        hook = Hook(on_event)
        super().__init__(
            len(pools[0]),
            policy=admits_all if policy == "prefix" else policy,
            tenants=tenants,
            store_after=store_after,
            max_load_blocks=max_load_blocks,
            on_event=hook,
        )
        self._tiers = IndexTiers(
            self, hook, checked, pools, layout, write=write, hung=hung, seconds_per_key=seconds_per_key
        )

    # tiers --------------------------------------------------------------------------------------------------------

    def locate(self, keys: Sequence[bytes]) -> list[str]:
        """Where each key is: see `TieredCache.locate`."""
        return self._tiers.locate(keys)

    def status_below(self, key: bytes) -> Status:
        """Whether a tier has a key that has no entry: HIT; PENDING if one would have to be asked, which `promote` does;
        MISS if none has it, or none that may have it is used now. Never blocks; a hint.
        """
        askable = [below for below in self._tiers.manager.tiers if below.may_be_asked(key)]
        if any(below.local_index for below in askable):
            return Status.HIT
        return Status.PENDING if askable else Status.MISS

    def promote(
        self, keys: Sequence[bytes], *, deadline: float | None = 10.0, tenant: str = "", counted: bool = True
    ) -> IndexPromotion:
        """Bring leading keys into entries, as many as come in time. Returns at once; see `TieredCache.promote`.

        Args:
            keys, deadline, tenant: as there.
            counted: whether it counts as a lookup of its keys; False for a host that looks them up by `status_of`.

        Raises:
            LayoutError, ValueError: as there.
            ClosedError: the index is closed.
        """
        record = self._tiers.promote(keys, deadline, tenant, self._check_open, counted=counted)
        return IndexPromotion(record, self._tiers.manager.wake, self._tiers.manager.when_done)

    def tier_statistics(self) -> list[CacheTierStatistics]:
        """What has been done with each tier so far; never blocks."""
        return self._tiers.statistics()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until what is to be written so far is in the tiers: see `TieredCache.drain`."""
        self._check_open()
        return self._tiers.manager.drain(timeout)

    def close(self, timeout: float = 10.0) -> bool:
        """Give up promotions and writes that have not begun, and close the tiers. Idempotent.

        Returns:
            Whether it has all ended within about `timeout` seconds; else calls of a tier hang, and the pools must stay
            mapped until they have returned.
        """
        return self._tiers.manager.close(timeout)

    # what the base class does, and tiers need to know -------------------------------------------------------------

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record that a request with these keys, found or not, has ended: see `TieredCache.touch`."""
        super().touch(keys)
        self._tiers.manager.post(tuple(keys))

    def open_request(
        self, *, tenant: str = "", on_end: Callable[[tuple[bytes, ...]], None] = lambda _: None
    ) -> CacheRequest:
        """See `CacheIndex.open_request`."""

        def ended(keys: tuple[bytes, ...]) -> None:
            self._tiers.manager.post(keys)
            on_end(keys)

        return super().open_request(tenant=tenant, on_end=ended)

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove keys from the entries, and from the tiers: see `TieredCache.remove`. `CacheIndex.remove(index, keys)`
        removes them from the entries alone.
        """
        checked = list(dict.fromkeys(check_keys(keys)))
        self._check_open()
        return self._tiers.remove(checked, lambda: CacheIndex.remove(self, checked))

    def clear(self) -> int:
        """Remove all keys, as `remove` does. Other processes that share a tier lose its records, too."""
        self._check_open()
        return self._tiers.clear(lambda: CacheIndex.clear(self))

    def _check_open(self) -> None:
        if self._tiers.manager.closed:
            raise ClosedError("the index is closed: make another one")

    def __enter__(self) -> TieredIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TieredIndex({self.describe()}; tiers {self._tiers.names})"

"""TierPlan: tiers that are checked before there is an index above them, and attached to its slots when there is."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from kvoffload.cache.policies import PolicyChoice, Prefix
from kvoffload.cache.record_calls import RecordCalls
from kvoffload.cache.statistics import CacheEvent
from kvoffload.cache.tiering.admission import WriteAdmission
from kvoffload.cache.tiering.promotion import PromotedLoad
from kvoffload.cache.tiering.tier import Tier, TierCapabilities, check_pools
from kvoffload.cache.tiering.tier_manager import TierManager
from kvoffload.cache.tiering.writer import WriteBack, WriteChoice, WriteThrough
from kvoffload.errors import CapacityError, LayoutError
from kvoffload.internal.checks import shown, to_wait
from kvoffload.internal.nesting import run_outside
from kvoffload.internal.types import UInt8Array
from kvoffload.internal.waiting import wait_until

WriteName = Literal["admitted", "through", "back", "none"]

_CHOICES: dict[str, Callable[[int], WriteChoice]] = {
    "admitted": WriteAdmission,
    "through": lambda _: WriteThrough(),
    "back": lambda _: WriteBack(),
    "none": lambda _: WriteChoice(),
}
_PLACES = ("host", "pending", "missing", "unknown")  # what `locate` says of keys that no tier is known to have
_HEARD = ("stored", "promoted", "evicted", "removed")
_RECORDS_A_SLOT = 16  # of a tier that does not say how much it takes


class TierPlan:
    """Tiers, and how an index uses them.

    Raises:
        ValueError, TypeError: an argument does not suit `BlockCache` or `CacheIndex`.
    """

    def __init__(self, tiers: Sequence[Tier], write: str, hung: float, seconds_per_key: float | None) -> None:
        if write not in _CHOICES:
            raise ValueError(f"write must be one of {', '.join(_CHOICES)}, got {write!r:.80}")
        if not to_wait("hung", hung) > 0:
            raise ValueError(f"hung must be seconds above 0, got {hung!r:.80}")
        if seconds_per_key is not None and not to_wait("seconds_per_key", seconds_per_key) > 0:
            raise ValueError(f"seconds_per_key must be above 0, or None, got {seconds_per_key!r:.80}")
        if isinstance(tiers, Tier) or not isinstance(tiers, Iterable):
            raise TypeError(f"tiers must be a list, even for one tier: tiers=[tier], got {shown(tiers)}")
        self.tiers, self._write, self._hung, self._seconds_per_key = list(tiers), write, hung, seconds_per_key
        for number, tier in enumerate(self.tiers):
            if not isinstance(tier, Tier):
                raise TypeError(f"tiers[{number}] must be a Tier, got {shown(tier)}")
            if not isinstance(tier.capabilities, TierCapabilities) or not isinstance(tier.name, str):
                raise TypeError(f"tiers[{number}] must have capabilities (TierCapabilities) and a name (str)")
        names = [tier.name for tier in self.tiers]
        for name in names:
            if name in _PLACES or names.count(name) > 1:
                raise ValueError(
                    f"tiers (and disk) need names of their own, not {', '.join(_PLACES)}: {names}; give name="
                )
        self._manager: Callable[[], TierManager | None] = lambda: None

    @classmethod
    def of(cls, tiers: Sequence[Tier], write: str, hung: float, seconds_per_key: float | None) -> TierPlan | None:
        plan = cls(tiers, write, hung, seconds_per_key)
        return plan if plan.tiers else None

    # before there is an index ---------------------------------------------------------------------------------------

    def policy(self, policy: PolicyChoice) -> PolicyChoice:
        """Return the policy of the index: "prefix" admits every key, since only keys with an entry can be written."""
        return (lambda capacity: Prefix(capacity, declines=False)) if policy == "prefix" else policy

    def hook(self, then: Callable[[CacheEvent], None] | None) -> Callable[[CacheEvent], None]:
        """Return `on_event` for the index: it tells the manager, which is made later, then the caller's hook."""
        if then is not None and not callable(then):
            raise TypeError(f"on_event must be a function of a CacheEvent, got {then!r:.80}")

        def hear(event: CacheEvent) -> None:
            manager = self._manager()
            if manager is not None and event.kind in _HEARD:
                manager.post(event)
            if then is not None:
                run_outside(then, event)

        return hear

    def check_pools(self, pools: Sequence[UInt8Array], capacity: int) -> None:
        """Raise unless the rows of these pools are the entries of an index of so many keys."""
        check_pools(pools)
        if len(pools[0]) == 0:
            raise CapacityError("pools have no entries, and tiers need some")
        if len(pools[0]) != capacity:
            raise LayoutError(f"pools must have a row for each of the {capacity} keys, got {len(pools[0])} rows")

    # when there is one ----------------------------------------------------------------------------------------------

    def attach(
        self,
        records: RecordCalls,
        pools: Sequence[UInt8Array],
        layout: bytes | None,
        *,
        settle: Callable[[], bool] = lambda: False,
        submit: Callable[[PromotedLoad[Any]], None] = lambda _: None,
    ) -> TierManager:
        """Attach the tiers to the pools, and start the thread that moves keys. If this raises, the tiers are closed."""
        attached = list[Tier]()
        try:
            for tier in self.tiers:
                tier.attach(pools, layout)
                attached.append(tier)
            record_bytes = sum(pool.shape[1] for pool in pools)
            unknown = _RECORDS_A_SLOT * len(pools[0])
            bounds = [tier.capabilities.max_bytes for tier in self.tiers]
            room = sum(unknown if bound is None else bound // record_bytes for bound in bounds)
            manager = TierManager(
                records,
                self.tiers,
                _CHOICES[self._write](max(1, room)),
                seconds_per_key=self._seconds_per_key,
                hung=self._hung,
                settle=settle,
                submit=submit,
            )
            self._manager = weakref.ref(manager)
        except BaseException:
            for tier in attached:
                tier.close()
            raise
        return manager

    def attach_engine(self, records: RecordCalls, engine: Any, cache: weakref.ref[Any]) -> TierManager:
        """Attach the tiers to the slots of an engine, with a cache over it; as `attach`."""

        def settle() -> bool:
            """Bring the cache up to date; whether stores are in flight, so that this has to be done again."""
            owner = cache()
            if owner is None or owner.engine.closed:
                return False
            owner.engine.advance()
            records.settle_ended(None)
            return bool(records._state.storing)

        def submit(load: PromotedLoad[Any]) -> None:
            owner = cache()
            load._submit(None if owner is None else owner._load_promoted)

        slots = engine.slots if isinstance(engine.slots, tuple) else (engine.slots,)
        groups = engine.layout.num_groups
        if not all(pool.flags.c_contiguous for pool in slots):  # of several groups `reshape` would copy them
            raise LayoutError(
                "tiers need slots without gaps: host_memory of the engine must have "
                f"slot_stride={engine.layout.slot_bytes}, the layout's slot_bytes"
            )
        entries = records.most_entries
        if any(tier.capabilities.pins_pool for tier in self.tiers):
            wait_until(lambda: not engine.growing, None, "pinning the pool")
            entries = engine.pinned_slots // groups
        pools = [pool[: entries * groups].reshape(entries, groups * pool.shape[1]) for pool in slots]
        try:
            layout = bytes(engine.layout.fingerprint)
        except LayoutError:
            layout = None
        return self.attach(records, pools, layout, settle=settle, submit=submit)


def seconds_per_key(layout: Any, tokens_per_second: float | None) -> float | None:
    """Return how long computing a key's blocks takes; None if the speed is not known."""
    if tokens_per_second is None:
        return None
    number = isinstance(tokens_per_second, numbers.Real) and not isinstance(tokens_per_second, bool)
    if not number or not 0 < tokens_per_second <= 1e15:
        raise ValueError(f"prefill_tokens_per_second must be above 0, or None, got {shown(tokens_per_second)}")
    if layout.tokens_per_block is None:
        raise LayoutError('prefill_tokens_per_second needs a layout with tokens_per_block, or "tokens" in axes')
    return float(layout.tokens_per_block * layout.blocks_per_slot / tokens_per_second)

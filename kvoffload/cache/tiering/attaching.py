"""What is checked and computed before a cache takes tiers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvoffload.cache.policies.prefix import Prefix
from kvoffload.cache.tiering.tier import Tier, TierCapabilities
from kvoffload.errors import LayoutError
from kvoffload.internal.checks import shown
from kvoffload.internal.types import UInt8Array

HOST, PENDING, MISSING, UNKNOWN = "host", "pending", "missing", "unknown"
"""What `TieredCache.locate` says of keys that no tier is known to have."""

_RECORDS_A_SLOT = 16  # of a tier that does not say how much it takes


def pools_of(engine: Any) -> tuple[UInt8Array, ...]:
    slots = engine.slots
    return slots if isinstance(slots, tuple) else (slots,)


def digest_of(layout: Any) -> bytes | None:
    try:
        return bytes(layout.fingerprint)
    except LayoutError:
        return None


def attach(tiers: Sequence[Tier], pools: Sequence[UInt8Array], layout: bytes | None) -> None:
    for number, tier in enumerate(tiers):
        try:
            tier.attach(pools, layout)
        except BaseException:
            for other in tiers[:number]:
                other.close()
            raise


def admits_all(capacity: int) -> Prefix:
    return Prefix(capacity, declines=False)


def records_in(tiers: Sequence[Tier], pools: Sequence[UInt8Array]) -> int:
    """How many records the tiers hold together, as far as they say."""
    record_bytes = sum(pool.shape[1] for pool in pools)
    unknown = _RECORDS_A_SLOT * len(pools[0])
    bounds = [tier.capabilities.max_bytes for tier in tiers]
    return max(1, sum(unknown if bound is None else bound // record_bytes for bound in bounds))


def checked_tiers(tiers: Sequence[Tier]) -> list[Tier]:
    if isinstance(tiers, Tier) or not isinstance(tiers, Iterable):
        raise TypeError(f"tiers must be a list, of one tier too: tiers=[tier], got {shown(tiers)}")
    checked = list(tiers)
    for number, tier in enumerate(checked):
        if not isinstance(tier, Tier):
            raise TypeError(f"tiers[{number}] must be a Tier, got {shown(tier)}")
        if not isinstance(tier.capabilities, TierCapabilities) or not isinstance(tier.name, str):
            raise TypeError(f"tiers[{number}] must have capabilities (TierCapabilities) and a name (str)")
    if not checked:
        raise ValueError("tiers must hold at least one tier; without tiers make a BlockCache")
    names = [tier.name for tier in checked]
    for name in names:
        if name in (HOST, PENDING, MISSING, UNKNOWN) or names.count(name) > 1:
            raise ValueError(f"tiers must have names of their own, other than host, pending, missing, unknown: {names}")
    return checked


def seconds_per_key(layout: Any, tokens_per_second: float | None) -> float | None:
    if tokens_per_second is None:
        return None
    if not isinstance(tokens_per_second, int | float) or tokens_per_second is True or not tokens_per_second > 0:
        raise ValueError(f"prefill_tokens_per_second must be above 0, or None, got {tokens_per_second!r:.80}")
    if layout.tokens_per_block is None:
        raise LayoutError("prefill_tokens_per_second needs a layout with tokens_per_block: name it")
    return float(layout.tokens_per_block * layout.blocks_per_slot / tokens_per_second)

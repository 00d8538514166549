"""load_tier: a tier by its name, from this package or from one that has an entry point in the group kvoffload.tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvoffload.cache.tiering.tier import Tier
from kvoffload.internal.checks import shown
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.memory import MemoryTier
from kvoffload.tiers.mooncake import MooncakeTier
from kvoffload.tiers.object_store import ObjectStoreTier
from kvoffload.tiers.valkey import ValkeyTier

GROUP = "kvoffload.tiers"
_OWN: dict[str, Callable[..., Tier]] = {
    "disk": DiskTier,
    "memory": MemoryTier,
    "mooncake": MooncakeTier,
    "objects": ObjectStoreTier,
    "valkey": ValkeyTier,
}


def load_tier(kind: str, /, *arguments: Any, **options: Any) -> Tier:
    """Make a tier whose class is named in a configuration.

    Args:
        kind: "disk", "memory", "mooncake", "objects", "valkey", for `DiskTier`, `MemoryTier`, `MooncakeTier`,
            `ObjectStoreTier`, `ValkeyTier`; or the name of an entry point in the group `kvoffload.tiers`, which is a
            subclass of `Tier`, or a function that returns a tier. Its package is imported; no other package is.
        arguments, options: passed to that class or function.

    Raises:
        ValueError: there is no tier of that name, or several packages have one.
        TypeError: the entry point does not make a `Tier`.
        And what the class or function raises.
    """
    tier = _factory(kind)(*arguments, **options)
    if not isinstance(tier, Tier):
        raise TypeError(f"the entry point {kind!r} of {GROUP} must make a kvoffload.tiers.Tier, got {shown(tier)}")
    return tier


def _factory(kind: str) -> Callable[..., Any]:
    if kind in _OWN:
        return _OWN[kind]
    from importlib.metadata import entry_points

    found = entry_points(group=GROUP, name=kind)
    if len(found) != 1:
        known = sorted({*_OWN, *entry_points(group=GROUP).names})
        raise ValueError(
            f"kind must be one of {', '.join(known)}, or an entry point in the group {GROUP} of exactly one installed "
            f"package, got {shown(kind)}, which {len(found)} packages have"
        )
    [entry_point] = found
    factory: Callable[..., Any] = entry_point.load()
    return factory

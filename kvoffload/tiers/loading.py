"""load_tier: a tier by its name, from this package or from one that has an entry point in the group kvoffload.tiers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvoffload.cache.tiering.tier import Tier
from kvoffload.internal.checks import shown
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.memory import MemoryTier
from kvoffload.tiers.mooncake import MooncakeConnection, MooncakeTier
from kvoffload.tiers.object_store import ObjectStoreTier
from kvoffload.tiers.options import Limits
from kvoffload.tiers.valkey import ValkeyConnection, ValkeyTier

GROUP = "kvoffload.tiers"
_OWN: dict[str, type[Tier]] = {
    "disk": DiskTier,
    "memory": MemoryTier,
    "mooncake": MooncakeTier,
    "objects": ObjectStoreTier,
    "valkey": ValkeyTier,
}
_CONNECTIONS: dict[str, type[Any]] = {"mooncake": MooncakeConnection, "valkey": ValkeyConnection}


def load_tier(kind: str, /, *arguments: Any, **options: Any) -> Tier:
    """Make a tier whose class is named in a configuration.

    Args:
        kind: "disk", "memory", "mooncake", "objects", "valkey", for `DiskTier`, `MemoryTier`, `MooncakeTier`,
            `ObjectStoreTier`, `ValkeyTier`; or the name of an entry point in the group `kvoffload.tiers`, which is a
            subclass of `Tier`, or a function that returns a tier. Its package is imported; no other package is.
        arguments, options: passed to that class or function. For this package's tiers what `Limits`,
            `ValkeyConnection` and `MooncakeConnection` hold may be given flat, as configurations have it: `threads=8`.

    Raises:
        ValueError: there is no tier of that name, or several packages have one.
        TypeError: the entry point does not make a `Tier`.
        And what the class or function raises.
    """
    if kind in _OWN:
        groups: dict[str, type[Any]] = {"limits": Limits, "connection": _CONNECTIONS.get(kind, Limits)}
        for name, group in groups.items():
            flat = [each.name for each in fields(group) if each.name in options]
            if flat:
                if name in options:
                    raise TypeError(f"{name} and {', '.join(flat)} are two ways to say the same; give one of them")
                options[name] = group(**{each: options.pop(each) for each in flat})
        return _OWN[kind](*arguments, **options)
    from importlib.metadata import entry_points

    found = entry_points(group=GROUP, name=kind)
    if len(found) != 1:
        known = sorted({*_OWN, *entry_points(group=GROUP).names})
        raise ValueError(
            f"kind must be one of {', '.join(known)}, or an entry point in the group {GROUP} of exactly one installed "
            f"package, got {shown(kind)}, which {len(found)} packages have"
        )
    [entry_point] = found
    tier = entry_point.load()(*arguments, **options)
    if not isinstance(tier, Tier):
        raise TypeError(f"the entry point {kind!r} of {GROUP} must make a kvoffload.tiers.Tier, got {shown(tier)}")
    return tier

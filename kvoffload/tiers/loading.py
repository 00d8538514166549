"""load_tier: make a tier by its name, from this package or from any with an entry point in group kvoffload.tiers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvoffload.cache.tiering.tier import Tier
from kvoffload.internal.checks import shown
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.memory_tier import MemoryTier
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
    """Make a tier whose class a configuration names.

    Args:
        kind: "disk", "memory", "mooncake", "objects" or "valkey", for `DiskTier`, `MemoryTier`, `MooncakeTier`,
            `ObjectStoreTier` and `ValkeyTier`. Or the name of an entry point in the group `kvoffload.tiers`: a subclass
            of `Tier`, or a function that returns a tier. Only the package of that entry point is imported.
        arguments, options: passed to that class or function. For this package's tiers you may give the fields of
            `Limits`, `ValkeyConnection` and `MooncakeConnection` flat, as in configurations: `threads=8`.

    Raises:
        ValueError: no package has a tier of that name, or several have.
        TypeError: the entry point does not make a `Tier`, or an options object and one of its fields were given.
        Any error of the class or function, or of importing it.
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

"""Tiers below the pinned pool: they keep records that the pool has no room for. `Tier` is the contract of all."""

from kvoffload.cache.tiering.tier import Outcome, Tier, TierCapabilities, TierJob, TierStatistics
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.loading import load_tier
from kvoffload.tiers.memory_tier import MemoryTier
from kvoffload.tiers.mooncake import MooncakeConnection, MooncakeTier
from kvoffload.tiers.object_store import ObjectStoreTier
from kvoffload.tiers.options import Limits
from kvoffload.tiers.remote import RemoteTier
from kvoffload.tiers.threaded import Origin, ThreadedTier
from kvoffload.tiers.valkey import ValkeyConnection, ValkeyTier

__all__ = [
    "DiskTier",
    "Limits",
    "MemoryTier",
    "MooncakeConnection",
    "MooncakeTier",
    "ObjectStoreTier",
    "Origin",
    "Outcome",
    "RemoteTier",
    "ThreadedTier",
    "Tier",
    "TierCapabilities",
    "TierJob",
    "TierStatistics",
    "ValkeyConnection",
    "ValkeyTier",
    "load_tier",
]

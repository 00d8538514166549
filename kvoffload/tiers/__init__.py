"""Tiers below the pinned pool: where records go that it has no room for. See `Tier` for what every one promises."""

from kvoffload.tiers.job import Outcome, TierJob
from kvoffload.tiers.memory import MemoryTier
from kvoffload.tiers.threaded import Origin, ThreadedTier
from kvoffload.tiers.tier import Tier, TierCapabilities, TierStatistics

__all__ = ["MemoryTier", "Origin", "Outcome", "ThreadedTier", "Tier", "TierCapabilities", "TierJob", "TierStatistics"]

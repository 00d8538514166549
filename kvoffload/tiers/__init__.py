"""Tiers below the pinned pool: where records go that it has no room for. See `Tier` for what every one promises."""

from kvoffload.tiering.job import Outcome, TierJob
from kvoffload.tiering.tier import Tier, TierCapabilities, TierStatistics
from kvoffload.tiers.memory import MemoryTier
from kvoffload.tiers.threaded import Origin, ThreadedTier

__all__ = ["MemoryTier", "Origin", "Outcome", "ThreadedTier", "Tier", "TierCapabilities", "TierJob", "TierStatistics"]

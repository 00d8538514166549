"""Tiers below a cache's pool, as the cache uses them: when to move which keys, and which are worth writing."""

from kvoffload.cache.tiering.below import BreakerState, CacheTierStatistics
from kvoffload.cache.tiering.promotion import ChainedLoad, FetchJob, Promotion

__all__ = ["BreakerState", "CacheTierStatistics", "ChainedLoad", "FetchJob", "Promotion"]

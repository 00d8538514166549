"""Tiers below a cache's pool, as the cache uses them: when to move which keys, and which are worth writing.

Tier, TierJob    the interface of every tier; a tier's job               tier.py, job.py
TierPlan         tiers before there is an index above them               attaching.py
TierManager      the thread that moves keys                              manager.py
Promotion        keys on their way into slots                            promotion.py, promoter.py
Writer           which keys are written, and when                        admission.py, readback.py
TierBelow        a tier as the manager sees it: breaker, speed, counts   below.py
"""

from kvoffload.cache.tiering.below import BreakerState, CacheTierStatistics
from kvoffload.cache.tiering.promotion import ChainedLoad, Promotion

__all__ = ["BreakerState", "CacheTierStatistics", "ChainedLoad", "Promotion"]

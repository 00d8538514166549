"""What a cache needs of tiers below its pool: who moves what when, and what is worth writing.

Tier, TierJob    what every tier promises, and a job of it                tier.py, job.py
TierPlan         tiers before there is an index above them               attaching.py
TierManager      the thread that moves keys                              manager.py
Promotion        keys on their way into slots                            promotion.py, promoter.py
Writer           what is written, and when                               writer.py, admission.py, readback.py
TierBelow        a tier as the manager sees it: breaker, speed, counts   below.py
"""

from kvoffload.cache.tiering.below import BreakerState, CacheTierStatistics
from kvoffload.cache.tiering.promotion import ChainedLoad, Promotion

__all__ = ["BreakerState", "CacheTierStatistics", "ChainedLoad", "Promotion"]

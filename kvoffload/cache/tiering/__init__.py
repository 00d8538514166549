"""What a cache needs of tiers below its pool: who moves what when, and what is worth writing.

TieredCache      a BlockCache with tiers below its slots                 tiered_cache.py
TieredIndex      a CacheIndex with tiers below memory that others fill   tiered_index.py
IndexTiers       what both have of tiers                                 index_tiers.py, attaching.py
TierManager      the thread that moves keys                              manager.py
Promotion        keys on their way into slots                            promotion.py, promoter.py
WriteChoice      what is written, and when                               writes.py, writer.py, admission.py
TierBelow        a tier as the manager sees it: breaker, speed, counts   below.py, breaker.py, speed.py
"""

from kvoffload.cache.tiering.below import BreakerState, CacheTierStatistics
from kvoffload.cache.tiering.promotion import ChainedLoad, IndexPromotion, Promotion
from kvoffload.cache.tiering.tiered_index import TieredIndex

__all__ = ["BreakerState", "CacheTierStatistics", "ChainedLoad", "IndexPromotion", "Promotion", "TieredIndex"]

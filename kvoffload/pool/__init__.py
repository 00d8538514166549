"""One pool of host memory, and one index of what it holds, for the engines of a host.

PoolOwner     owns memory, index and tiers; `kvoffload pool serve` runs one
SharedPool    an engine's membership: its memory, and what a cache over it needs
"""

from kvoffload.pool.owner import PoolOwner
from kvoffload.pool.shared_pool import SharedPool

__all__ = ["PoolOwner", "SharedPool"]

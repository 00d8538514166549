"""Tiers below the pinned pool: they keep records that the pool has no room for. `Tier` is the contract of all.

Limits                      threads and queue of a tier                               options.py
ThreadedTier, MemoryTier    tiers over methods that block; records in host memory     threaded.py, workers.py, memory.py
RemoteTier                  records in a store that machines share                    remote.py
MooncakeTier                Mooncake Store                                            mooncake.py
ValkeyTier                  Valkey and Redis                                          valkey.py
ObjectStoreTier             S3, Google Cloud Storage, Azure, folders                  object_store.py
load_tier                   a tier by its name, of this package or of another         loading.py
DiskTier                    records on disks                                          disk.py
DiskIndex                   the records of a disk: policies, tenants, restart         disk_index.py
SlotFiles                   the files of a set as an array of verified slots          slot_files.py
open_set                    finds, refuses or creates the files of a set              sets.py
Member                      one file: superblock, headers, durability                 member.py
format                      superblocks and headers, byte by byte                     format.py
Checksum                    xxh3_128, or keyed blake2b                                checksums.py
FileOperations              the system calls, behind which tests put failures         files.py
"""

from kvoffload.cache.tiering.job import Outcome, TierJob
from kvoffload.cache.tiering.tier import Tier, TierCapabilities, TierStatistics
from kvoffload.tiers.disk import DiskTier
from kvoffload.tiers.loading import load_tier
from kvoffload.tiers.memory import MemoryTier
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

"""Move the blocks of a paged KV cache between the GPU and pinned host memory: no PyTorch, no compiled extension.

    open_cache       a cache over your arrays, and all below it  door.py
    open_device      a GPU, or the simulated device              device/
    KVLayout, Plane  where the blocks of the KV cache lie        layout/
    DeviceArray      GPU memory that other libraries import      device/buffers.py
    OffloadEngine    store, load, plan, poll                     engine/
    GroupTransfer    one transfer of several groups              engine/request.py
    Growing          a pool that is pinned while it serves       device/growth.py
    HostMemory       slots in memory that the caller brings      device/pinned.py
    Stream           for callers without their own streams       device/streams.py
    Job              a transfer: done, wait, order_before        engine/job.py
    ShardedEngine    the same over several GPUs                  engine/sharded.py
    BlockCache       keys to slots: lookup, store, load          cache/
    chain_keys       tokens to keys                              cache/keys.py
    set_tracer       follow every transfer                       engine/tracing.py
    Restored         what a session file has brought             cache/statistics.py

Imported by name:

    kvoffload.session         SessionFolder: files of conversations as a tier; BlockCache.save writes them
    kvoffload.pool            one pool of host memory for the engines of a host: its owner, its members
    kvoffload.jax             OwnedCache: a cache in JAX, one array or a tree of arrays, on one GPU or several
    kvoffload.testing         the simulated driver, byte patterns, leak checks, a naive transfer
    kvoffload.observability   Prometheus metrics; NVTX ranges; notebook cards, which need no import
    kvoffload.vllm            an OffloadingSpec and a connector for vLLM, which must be installed
    kvoffload.cache.policies  the policies, and the base class for others

ARCHITECTURE.md says how it works, GLOSSARY.md defines the words. Importing this package touches no GPU and loads no
CUDA library.
"""

from typing import Any as _Any

from kvoffload.cache.block_cache import BlockCache
from kvoffload.cache.entries import Status
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.keys import chain_keys
from kvoffload.cache.pools import Tenant
from kvoffload.cache.reservations import CacheJob, CacheRequest, Lease, Reservation
from kvoffload.cache.sessions import HintAnswer
from kvoffload.cache.statistics import CacheEvent, CacheStatistics, Restored
from kvoffload.device.buffers import DeviceArray, DeviceBuffer
from kvoffload.device.device import Device, open_device
from kvoffload.device.growth import Growing
from kvoffload.device.pinned import HostMemory
from kvoffload.device.shared_slots import SharedSlots
from kvoffload.device.streams import NO_WAIT, Stream
from kvoffload.door import open_cache
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job, TransferResult
from kvoffload.engine.plan_report import PlanReport
from kvoffload.engine.request import GroupTransfer
from kvoffload.engine.sharded import ShardedEngine
from kvoffload.engine.tracing import Tracer, set_tracer
from kvoffload.errors import (
    CapabilityError,
    CapacityError,
    ClosedError,
    DriverError,
    KVOffloadError,
    KVOffloadWarning,
    LayoutError,
    MissingKeyError,
    SessionFileError,
    TierError,
    TransferError,
)
from kvoffload.layout.layout import KVLayout, ShardedLayout
from kvoffload.layout.planes import Plane
from kvoffload.observability import notebook as _notebook
from kvoffload.observability.nvtx_ranges import nvtx_tracer
from kvoffload.planning.transfer_plan import Direction

__all__ = [
    "NO_WAIT",
    "BlockCache",
    "CacheEvent",
    "CacheIndex",
    "CacheJob",
    "CacheRequest",
    "CacheStatistics",
    "CapabilityError",
    "CapacityError",
    "ClosedError",
    "Device",
    "DeviceArray",
    "DeviceBuffer",
    "Direction",
    "DriverError",
    "GroupTransfer",
    "Growing",
    "HintAnswer",
    "HostMemory",
    "Job",
    "KVLayout",
    "KVOffloadError",
    "KVOffloadWarning",
    "LayoutError",
    "Lease",
    "MissingKeyError",
    "OffloadEngine",
    "PlanReport",
    "Plane",
    "Reservation",
    "Restored",
    "SessionFileError",
    "ShardedEngine",
    "ShardedLayout",
    "SharedSlots",
    "Status",
    "Stream",
    "Tenant",
    "TierError",
    "Tracer",
    "TransferError",
    "TransferResult",
    "chain_keys",
    "nvtx_tracer",
    "open_cache",
    "open_device",
    "set_tracer",
]

__version__ = "0.2.0.dev0"

_notebook.register_cards()


def _save(cache: BlockCache, *given: _Any) -> int:
    from kvoffload.session import saving  # by the first call: nothing else needs it

    return saving.save(cache, *given, producer=f"kvoffload {__version__}")


def _restore(cache: BlockCache, *given: _Any) -> Restored:
    from kvoffload.session import saving

    return saving.restore(cache, *given)


BlockCache._save, BlockCache._restore = _save, _restore

"""Move the blocks of a paged KV cache between the GPU and pinned host memory: no PyTorch, no compiled extension.

    open_device      a GPU, or the simulated device        device.py, ownership.py, driver/
    KVLayout, Plane  where the blocks lie                  layout.py, interop.py; what a transfer copies: plan.py
    DeviceArray      memory that others import             buffers.py; what they compute, followed: relays.py
    OffloadEngine    store, load, poll, order_before       engine.py, dispatch.py, flight.py, launch.py, ...
    BlockCache       keys to slots                         cache.py on cacheindex.py, entries.py, reservations.py, ...
    chain_keys       tokens to keys                        keys.py
    policies/        what gives way                        prefix, LRU, ARC, S3-FIFO; who may: admission.py
    copiers/         strided, gather, split, batch, loop   on streams.py, memory.py, arena.py
    kernels/         Triton without PyTorch                gather.py; what loads it, and keeps it: cachefiles.py
    tuning/          what transfers cost on a machine      measured by tuner/; which copier takes one: choice.py
    jax/             caches for JAX, which has no streams  owned.py is the one to take
    testing          the simulated driver, byte patterns   testing.py
    cli/             doctor, demo, replay, tune, bench     python -m kvoffload

Importing this package touches no GPU and loads no CUDA library.
"""

from kvoffload.cache.admission import Tenant
from kvoffload.cache.block_cache import BlockCache
from kvoffload.cache.entries import Status
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.keys import chain_keys
from kvoffload.cache.reservations import CacheJob, Lease, Reservation
from kvoffload.cache.statistics import CacheEvent, CacheStatistics
from kvoffload.device.buffers import DeviceArray, DeviceBuffer
from kvoffload.device.device import Device, open_device
from kvoffload.device.streams import NO_WAIT
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job, TransferResult
from kvoffload.engine.report import PlanReport
from kvoffload.errors import (
    CapabilityError,
    CapacityError,
    ClosedError,
    DriverError,
    KVOffloadError,
    KVOffloadWarning,
    LayoutError,
    MissingKeyError,
    TransferError,
)
from kvoffload.layout.layout import KVLayout, Plane
from kvoffload.planning.transfer_plan import Direction

__all__ = [
    "NO_WAIT",
    "BlockCache",
    "CacheEvent",
    "CacheIndex",
    "CacheJob",
    "CacheStatistics",
    "CapabilityError",
    "CapacityError",
    "ClosedError",
    "Device",
    "DeviceArray",
    "DeviceBuffer",
    "Direction",
    "DriverError",
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
    "Status",
    "Tenant",
    "TransferError",
    "TransferResult",
    "chain_keys",
    "open_device",
]

__version__ = "0.1.0"

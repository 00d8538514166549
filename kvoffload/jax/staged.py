"""A cache in JAX's memory, copied through a staging array."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from kvoffload.device.device import Device
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job
from kvoffload.errors import LayoutError
from kvoffload.internal.types import Int64Array
from kvoffload.jax.imports import follow, from_device, import_jax
from kvoffload.layout.arrays import is_jax_array
from kvoffload.layout.dlpack import CPU, CUDA, view_dlpack
from kvoffload.layout.ids import as_ids
from kvoffload.layout.layout import KVLayout

_PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD: the calling thread's default stream


class _Gathered(NamedTuple):
    """A gathered array that must live until it has been copied to the staging array.

    Attributes:
        jobs: the store of the staging array, which ends after that copy; empty if it was not submitted.
    """

    array: Any
    jobs: list[Job]


class StagedCache:
    """A KV cache in an array of JAX's that may move: jitted functions gather what is stored and scatter what is loaded.

    Relies on DLPack alone. Costs one more copy on the device for each transfer, a JAX program that is queued for each,
    and device memory for two times `stage_blocks` blocks. Transfers of more blocks are cut into several.

    One thread may use a cache: that thread's default stream orders the copies to the staging array.

    Args:
        device: of the engine.
        array: on the GPU of `device`; on the CPU if that is simulated. Set `array` to the result of every update.
        stage_blocks: the most blocks that are copied at a time.
        plane_axis, block_axis: which axes of the array count planes and blocks; always named, as for `OwnedCache`.
        options: as for `KVLayout`; `blocks_per_slot` must stay 1.

    Attributes:
        layout: of the staging array, for an `OffloadEngine` that has no other use.
        stage: the staging array, a block-major `DeviceArray` of shape (stage_blocks, planes, ...): a block is one copy,
            whatever the axes of the cache.

    Raises:
        LayoutError: `array` is no `jax.Array`, or not where it must be, or an axis is wrong.
        CapacityError: as `Device.empty`.
    """

    def __init__(
        self,
        device: Device,
        array: Any,
        stage_blocks: int = 32,
        *,
        plane_axis: int,
        block_axis: int,
        **options: Any,
    ) -> None:
        if not is_jax_array(array):
            raise LayoutError(f"array must be a jax.Array, got {type(array).__name__}")
        if options.get("blocks_per_slot", 1) != 1:
            raise LayoutError(f"blocks_per_slot must be 1 here, got {options['blocks_per_slot']}")
        shape = np.moveaxis(np.broadcast_to(False, array.shape), (block_axis, plane_axis), (0, 1)).shape
        _check_place(device, array)
        self._arrays = [array]  # one; see `load`
        self.device = device
        self.num_blocks = shape[0]
        self.stage = device.empty((stage_blocks, *shape[1:]), array.dtype)
        stated: dict[str, Any] = {"on_default_stream": False} | options
        self.layout = KVLayout.from_stacked(self.stage, plane_axis=1, block_axis=0, **stated)
        self._gather, self._scatter = _programs(len(array.shape), plane_axis, block_axis)
        self._gathered: deque[_Gathered] = deque()

    @property
    def array(self) -> Any:
        """The cache as a `jax.Array`; what JAX computes with it follows the loads submitted so far."""
        return self._arrays[0]

    @array.setter
    def array(self, new: Any) -> None:
        self._arrays[0] = new

    def store(self, engine: OffloadEngine, blocks: Any, slots: Any) -> list[Job]:
        """Copy blocks of the cache as it is now to slots; a job for each `stage_blocks` blocks.

        Later updates of the cache need not wait for the jobs: the blocks are gathered first.

        Raises:
            LayoutError, and what `OffloadEngine.store` raises.
        """
        batches = self._batches(engine, blocks, slots)
        return [self._store_batch(engine, *batch) for batch in batches]

    def _store_batch(self, engine: OffloadEngine, block_ids: Int64Array, slot_ids: Int64Array) -> Job:
        self._forget_copied()
        gathered = _Gathered(self._gather(self.array, self._padded(block_ids, 0)), [])
        self._gathered.append(gathered)
        engine.order_all_before(_PER_THREAD_STREAM)  # then no transfer uses the staging array any more
        with self.device.current():
            view = view_dlpack(gathered.array, None if self.device.simulated else _PER_THREAD_STREAM)
            self.device.driver.copy(self.stage.address, view.address, self.stage.nbytes, _PER_THREAD_STREAM)
        job = engine.store(np.arange(len(block_ids)), slot_ids, after=_PER_THREAD_STREAM)
        gathered.jobs.append(job)
        return job

    def _forget_copied(self) -> None:
        """Drop gathered arrays that have been copied. One without a job, of an interrupted store, waits for a later
        one: copies to the staging array follow each other."""
        for number, gathered in reversed(list(enumerate(self._gathered))):
            if gathered.jobs and gathered.jobs[0].done:
                for _ in range(number + 1):
                    self._gathered.popleft()
                return

    def load(self, engine: OffloadEngine, slots: Any, blocks: Any) -> list[Job]:
        """Copy slots to blocks of the cache; `array` is another one afterwards. A job for each `stage_blocks` blocks.

        Raises:
            LayoutError, and what `OffloadEngine.load` raises.
        """
        jobs = []
        for block_ids, slot_ids in self._batches(engine, blocks, slots, targets=True):
            # The last scatter, which reads the staging array, produces `array`; the stream has the copies of stores.
            after = (self.array, _PER_THREAD_STREAM)
            jobs.append(engine.load(slot_ids, np.arange(len(block_ids)), after=after))
            staged, ids = from_device(self.stage), self._padded(block_ids, self.num_blocks)
            # The array is donated. An interrupt after the call would lose the result, so one C operation calls the
            # function and puts its result in place.
            self._arrays[:] = map(self._scatter, self._arrays, [ids], [staged])
            staged.delete()
        return jobs

    def _batches(
        self, engine: OffloadEngine, blocks: Any, slots: Any, *, targets: bool = False
    ) -> list[tuple[Int64Array, Int64Array]]:
        """Block ids and slots, `stage_blocks` at a time, checked. `targets`: the blocks must be distinct."""
        if engine.layout is not self.layout:
            raise LayoutError("engine must be one of this cache's layout: OffloadEngine(cache.layout, device=...)")
        block_ids = as_ids("blocks", blocks, self.num_blocks)
        slot_ids = as_ids("slots", slots, engine.num_slots)
        if len(block_ids) != len(slot_ids):
            raise LayoutError(f"{len(block_ids)} blocks need as many slots, got {len(slot_ids)}")
        if targets and len(np.unique(block_ids)) != len(block_ids):
            raise LayoutError("blocks repeats an id; the targets of a load must be distinct")
        step = self.stage.shape[0]
        cuts = [slice(start, start + step) for start in range(0, len(block_ids), step)]
        return [(block_ids[cut], slot_ids[cut]) for cut in cuts]

    def _padded(self, ids: Int64Array, filler: int) -> Any:
        """Ids of one length, so that JAX compiles once."""
        padded = np.full(self.stage.shape[0], filler, dtype=np.int32)
        padded[: len(ids)] = ids
        return padded

    # after=cache: an array whose producer is followed

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.array.__dlpack_device__()
        return int(kind), int(index)

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        return follow(self.array, stream)

    def __repr__(self) -> str:
        return f"StagedCache({tuple(self.array.shape)}, {self.array.dtype}, stage_blocks={self.stage.shape[0]})"


def _check_place(device: Device, array: Any) -> None:
    """Raise LayoutError unless the array is on this device alone."""
    wanted = (CPU, 0) if device.simulated else (CUDA, device.index)
    try:
        kind, index = array.__dlpack_device__()
        if (int(kind), int(index)) == wanted:
            return
    except BufferError:  # it is on several devices
        pass
    target = 'jax.devices("cpu")[0], since the device is simulated' if device.simulated else f"GPU {device.index}"
    raise LayoutError(f"array is on {array.sharding}; put it on {target}: jax.device_put(array, ...)")


def _programs(num_axes: int, plane_axis: int, block_axis: int) -> tuple[Any, Any]:
    """Gather: (cache, ids) to (ids, planes, ...). Scatter: back into the cache, donated; ids beyond it do nothing.

    Axes are moved in what is gathered, never in the cache, of which XLA could make a copy.
    """
    jax = import_jax()
    in_cache, in_stage = (block_axis, plane_axis), (0, 1)
    before = (slice(None),) * (block_axis % num_axes)

    def gather(cache: Any, ids: Any) -> Any:
        return jax.numpy.moveaxis(cache[(*before, ids)], in_cache, in_stage)

    def scatter(cache: Any, ids: Any, blocks: Any) -> Any:
        return cache.at[(*before, ids)].set(jax.numpy.moveaxis(blocks, in_stage, in_cache), mode="drop")

    return jax.jit(gather), jax.jit(scatter, donate_argnums=0)

"""A cache in JAX's memory, copied through a staging array."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np

from kvoffload.device.device import Device
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job
from kvoffload.errors import CapacityError, LayoutError
from kvoffload.internal.checks import at_least
from kvoffload.internal.types import Int64Array
from kvoffload.internal.waiting import wait_until
from kvoffload.jax.base import check_device, check_is_array, check_is_not_lost, check_update
from kvoffload.jax.imports import follow, from_device, import_jax
from kvoffload.layout.arrays import checked_axes
from kvoffload.layout.dlpack import CPU, CUDA, view_dlpack
from kvoffload.layout.dtypes import dtype_name
from kvoffload.layout.ids import as_ids
from kvoffload.layout.layout import KVLayout

_MOST_GATHERED = 2  # arrays: one is copied to the staging array while JAX computes the next
_PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD: the calling thread's default stream


class _Gathered(NamedTuple):
    """A gathered array that must live until it has been copied to the staging array.

    Attributes:
        jobs: the store of the staging array, which ends after that copy; empty if it was not submitted.
    """

    array: Any
    jobs: list[Job]


class StagedCache:
    """A KV cache in an array of JAX's that may move: jitted functions gather stored blocks and scatter loaded ones.

    Relies on DLPack alone. Costs one more copy on the device for each transfer, a JAX program that is queued for each,
    and device memory for three times `stage_blocks` blocks: the staging array, and up to two arrays of blocks that were
    gathered for stores. Transfers of more blocks are cut into several. Before a third array is gathered, `store` waits
    on the host until the oldest has been copied and stored. Gathered arrays are freed when `array` is read, and by
    `store` and `load`, if their jobs have ended.

    If a step was given the array and its result is lost, JAX has freed the memory: close the engines over the cache,
    and create a new one. `array` raises then, and so does `after=cache`.

    One thread may use a cache: that thread's default stream orders the copies to the staging array.

    Args:
        device: of the engine.
        array: on the GPU of `device`; on the CPU if that is simulated. Set `array` to the result of every update.
        stage_blocks: the most blocks that are copied at a time.
        plane_axis, block_axis: which axes of the array count planes and blocks; always named, as for `OwnedCache`.
        options: as for `KVLayout`; `blocks_per_slot` must stay 1.

    Attributes:
        shape, dtype: of the array.
        layout: of the staging array, for an `OffloadEngine` that has no other use; a `BlockCache` over it is refused.
        stage: the staging array, a block-major `DeviceArray` of shape (stage_blocks, planes, ...): a block is one copy,
            whatever the axes of the cache.

    Raises:
        TypeError: `device` is no device.
        ValueError: `stage_blocks` is no positive integer.
        LayoutError: `array` is no `jax.Array`, was deleted, or is not where it must be, or an axis is wrong.
        CapacityError: as `Device.empty`.
    """

    def __init__(
        self,
        device: Device,
        array: Any,
        *,
        stage_blocks: int = 32,
        plane_axis: int,
        block_axis: int,
        **options: Any,
    ) -> None:
        check_device(device)
        check_is_array(array)
        if options.get("blocks_per_slot", 1) != 1:
            raise LayoutError(f"blocks_per_slot must be 1 here, got {options['blocks_per_slot']}")
        _check_place(device, array)
        self.shape, self.dtype = tuple(array.shape), dtype_name(array.dtype)
        axes = checked_axes(self.shape, plane_axis, block_axis)
        in_stage = np.moveaxis(np.broadcast_to(False, self.shape), axes[::-1], (0, 1)).shape
        self._arrays = [array]  # one; see `load`
        self.device = device
        self.num_blocks = in_stage[0]
        self.stage = device.empty((at_least("stage_blocks", stage_blocks, 1), *in_stage[1:]), array.dtype)
        stated: dict[str, Any] = {"on_default_stream": False} | options
        self.layout = KVLayout.from_stacked(self.stage, plane_axis=1, block_axis=0, **stated)
        self.layout._of_staging = True  # no BlockCache may be made over it
        self._gather, self._scatter = _programs(*axes)
        self._gathered: deque[_Gathered] = deque()

    @property
    def array(self) -> Any:
        """The cache as a `jax.Array`; what JAX computes with it follows the loads submitted so far.

        Set it to the result of every update, which may be at another address.

        Raises:
            LayoutError: the array that is set has another shape or dtype, is on another device, was deleted, or is no
                `jax.Array`; or the array that is read was donated, and no result has been set.
        """
        self._forget_copied()
        check_is_not_lost(self._arrays[0])
        return self._arrays[0]

    @array.setter
    def array(self, new: Any) -> None:
        check_update(new, self.shape, self.dtype)
        _check_place(self.device, new)
        self._arrays[0] = new

    def is_deleted(self) -> bool:
        """Whether the array was donated, and no result has been set."""
        return bool(self._arrays[0].is_deleted())

    def store(self, engine: OffloadEngine, blocks: Any, slots: Any) -> list[Job]:
        """Copy blocks of the cache as it is now to slots. Returns a job for each `stage_blocks` blocks.

        Later updates of the cache need not wait for the jobs: the blocks are gathered first. The host waits for jobs of
        earlier batches, as the class says; that an earlier one fails does not raise here.

        Raises:
            LayoutError: the engine is another layout's, blocks or slots are out of range or not equally many, a slot is
                given twice, or the array was donated, and no result has been set.
            CapacityError: the engine has no room for that many jobs.
            ClosedError, TransferError: as `OffloadEngine.store`.

        All arguments are checked before the first batch. A later error of JAX or the driver, or an interrupt, leaves
        earlier batches submitted: their slots are written, and the engine's `jobs_in_flight` and
        `poll` return their jobs.
        """
        batches = self._batches(engine, blocks, slots)
        return [self._store_batch(engine, *batch) for batch in batches]

    def _store_batch(self, engine: OffloadEngine, block_ids: Int64Array, slot_ids: Int64Array) -> Job:
        self._make_room()
        gathered = _Gathered(self._gather(self.array, self._padded(block_ids, 0)), [])
        self._gathered.append(gathered)
        engine.order_all_before(_PER_THREAD_STREAM)  # then no transfer uses the staging array any more
        with self.device.current():
            view = view_dlpack(gathered.array, None if self.device.simulated else _PER_THREAD_STREAM)
            self.device.driver.copy(self.stage.address, view.address, self.stage.nbytes, _PER_THREAD_STREAM)
        job = engine.store(np.arange(len(block_ids)), slot_ids, after=_PER_THREAD_STREAM)
        gathered.jobs.append(job)
        return job

    def _make_room(self) -> None:
        """Wait on the host until another array may be gathered."""
        self._forget_copied()
        if len(self._gathered) < _MOST_GATHERED:
            return
        oldest = next((job for gathered in self._gathered for job in gathered.jobs), None)
        if oldest is not None:
            wait_until(lambda: oldest.done, None, repr(oldest))
            self._forget_copied()
        else:  # all are of interrupted stores
            with self.device.current():
                self.device.driver.stream_synchronize(_PER_THREAD_STREAM)
            self._gathered.clear()

    def _forget_copied(self) -> None:
        """Drop gathered arrays that have been copied. One without a job, of an interrupted store, waits for a later
        one: copies to the staging array follow each other."""
        for number, gathered in reversed(list(enumerate(self._gathered))):
            if gathered.jobs and gathered.jobs[0].done:
                for _ in range(number + 1):
                    self._gathered.popleft()
                return

    def load(self, engine: OffloadEngine, slots: Any, blocks: Any) -> list[Job]:
        """Copy slots to blocks of the cache; `array` is then a new array. Returns a job for each `stage_blocks` blocks.

        Raises:
            LayoutError: as `store`; but a block, not a slot, is given twice.
            CapacityError: the engine has no room for that many jobs; or as `OffloadEngine.load`.
            ClosedError, TransferError: as `OffloadEngine.load`.

        As with `store`, an error later or an interrupt leaves earlier batches submitted. `array` then has their blocks;
        the others are as they were.
        """
        jobs = []
        for block_ids, slot_ids in self._batches(engine, blocks, slots, loads=True):
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
        self, engine: OffloadEngine, blocks: Any, slots: Any, *, loads: bool = False
    ) -> list[tuple[Int64Array, Int64Array]]:
        """Block ids and slots, `stage_blocks` at a time, checked, as is the engine's room for all of them. The targets
        must be distinct: for `loads` the blocks, otherwise the slots."""
        if engine.layout is not self.layout:
            raise LayoutError("engine must be one of this cache's layout: OffloadEngine(cache.layout, device=...)")
        block_ids = as_ids("blocks", blocks, self.num_blocks)
        slot_ids = as_ids("slots", slots, engine.num_slots)
        if len(block_ids) != len(slot_ids):
            raise LayoutError(f"{len(block_ids)} blocks need as many slots, got {len(slot_ids)}")
        targets, name = (block_ids, "blocks") if loads else (slot_ids, "slots")
        if len(np.unique(targets)) != len(targets):
            raise LayoutError(f"{name} repeats an id; the targets of a {'load' if loads else 'store'} must be distinct")
        check_is_not_lost(self._arrays[0])
        step = self.stage.shape[0]
        cuts = [slice(start, start + step) for start in range(0, len(block_ids), step)]
        if len(cuts) > engine.max_in_flight:
            raise CapacityError(
                f"{len(block_ids)} blocks are {len(cuts)} jobs of up to {step} blocks, and the engine has "
                f"max_in_flight={engine.max_in_flight}: copy fewer blocks at a time, or create the cache with a "
                "greater stage_blocks"
            )
        engine.advance()
        engine.check_room(len(cuts))
        return [(block_ids[cut], slot_ids[cut]) for cut in cuts]

    def _padded(self, ids: Int64Array, filler: int) -> Any:
        """Ids of one length, so that JAX compiles once."""
        padded = np.full(self.stage.shape[0], filler, dtype=np.int32)
        padded[: len(ids)] = ids
        return padded

    # after=cache: an array whose producer is followed

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self._arrays[0].__dlpack_device__()
        return int(kind), int(index)

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        return follow(self.array, stream)

    def __repr__(self) -> str:
        return f"StagedCache({self.shape}, {self.dtype}, stage_blocks={self.stage.shape[0]})"


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


def _programs(plane_axis: int, block_axis: int) -> tuple[Any, Any]:
    """Gather: (cache, ids) to (ids, planes, ...). Scatter: back into the cache, donated; ids beyond it do nothing.

    Axes are moved in what is gathered, never in the cache, of which XLA could make a copy.
    """
    jax = import_jax()
    in_cache, in_stage = (block_axis, plane_axis), (0, 1)
    before = (slice(None),) * block_axis

    def gather(cache: Any, ids: Any) -> Any:
        return jax.numpy.moveaxis(cache[(*before, ids)], in_cache, in_stage)

    def scatter(cache: Any, ids: Any, blocks: Any) -> Any:
        return cache.at[(*before, ids)].set(jax.numpy.moveaxis(blocks, in_stage, in_cache), mode="drop")

    return jax.jit(gather), jax.jit(scatter, donate_argnums=0)

"""A cache in memory of JAX's, reached through a staging array."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from kvoffload.device.device import Device
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job
from kvoffload.errors import LayoutError
from kvoffload.internal.types import Int64Array
from kvoffload.jax.imports import follow, from_device, import_jax
from kvoffload.layout.arrays import is_jax_array
from kvoffload.layout.dlpack import view_dlpack
from kvoffload.layout.ids import as_ids
from kvoffload.layout.layout import KVLayout


class StagedCache:
    """A KV cache in an array of JAX's that may move: jitted functions gather what is stored and scatter what is loaded.

    Relies on nothing but DLPack. What that costs: a copy on the device more for each transfer, `stage_blocks` blocks
    of device memory, twice, and a JAX program that is queued for each; transfers of more blocks go in pieces.

    Args:
        device: of the engine.
        array: on one GPU. Set `array` to the result of every update.
        stage_blocks: blocks of a piece.
        plane_axis, block_axis: which axes of the array count planes and blocks.
        options: as for `KVLayout`; `blocks_per_slot` must stay 1.

    Attributes:
        array: the cache now; what JAX computes with it follows the loads submitted so far.
        layout: of the staging array, for an `OffloadEngine` of its own.
        stage: the staging array, a `DeviceArray` of shape (planes, stage_blocks, ...).

    Raises:
        LayoutError: no array of JAX's, or a bad axis.
        CapacityError: as `Device.empty`.
    """

    def __init__(
        self,
        device: Device,
        array: Any,
        stage_blocks: int = 32,
        plane_axis: int = 0,
        block_axis: int = 1,
        **options: Any,
    ) -> None:
        if not is_jax_array(array):
            raise LayoutError(f"array must be a jax.Array, got {type(array).__name__}")
        if options.get("blocks_per_slot", 1) != 1:
            raise LayoutError(f"blocks_per_slot must be 1 here, got {options['blocks_per_slot']}")
        shape = np.moveaxis(np.broadcast_to(False, array.shape), (plane_axis, block_axis), (0, 1)).shape
        self.array = array
        self.device = device
        self.num_blocks = shape[1]
        self.stage = device.empty((shape[0], stage_blocks, *shape[2:]), array.dtype)
        self.layout = KVLayout.from_stacked(self.stage, **{"on_default_stream": False} | options)
        self._gather, self._scatter = _programs(plane_axis, block_axis)
        self._held: deque[tuple[Job, Any]] = deque()  # what was gathered, until it is stored

    def store(self, engine: OffloadEngine, blocks: Any, slots: Any) -> list[Job]:
        """Copy blocks of the cache as it is now to slots. Later updates need not wait: the blocks are gathered first.

        Raises:
            LayoutError, and what `OffloadEngine.store` raises.
        """
        pieces = self._pieces(engine, blocks, slots)
        while self._held and self._held[0][0].done:
            self._held.popleft()
        jobs = []
        for block_ids, slot_ids in pieces:
            gathered = self._gather(self.array, self._padded(block_ids, 0))
            wait_stream = engine.callers.wait_stream()
            engine.callers.order_all_before(wait_stream)  # the staging array is free
            with self.device.current():
                view = view_dlpack(gathered, None if self.device.simulated else wait_stream)
                self.device.driver.copy(self.stage.address, view.address, self.stage.nbytes, wait_stream)
            jobs.append(engine.store(np.arange(len(block_ids)), slot_ids, after=wait_stream))
            self._held.append((jobs[-1], gathered))
        return jobs

    def load(self, engine: OffloadEngine, slots: Any, blocks: Any) -> list[Job]:
        """Copy slots to blocks of the cache; `array` is another one then.

        Raises:
            LayoutError, and what `OffloadEngine.load` raises.
        """
        jobs = []
        for block_ids, slot_ids in self._pieces(engine, blocks, slots, targets=True):
            # what last read the staging array has made this one
            jobs.append(engine.load(slot_ids, np.arange(len(block_ids)), after=self.array))
            staged = from_device(self.stage)
            self.array = self._scatter(self.array, self._padded(block_ids, self.num_blocks), staged)
            staged.delete()
        return jobs

    def _pieces(
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
        step = self.stage.shape[1]
        cuts = [slice(start, start + step) for start in range(0, len(block_ids), step)]
        return [(block_ids[cut], slot_ids[cut]) for cut in cuts]

    def _padded(self, ids: Int64Array, filler: int) -> Any:
        """Ids of one length, so that JAX compiles once."""
        padded = np.full(self.stage.shape[1], filler, dtype=np.int32)
        padded[: len(ids)] = ids
        return padded

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.array.__dlpack_device__()
        return int(kind), int(index)

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        return follow(self.array, stream)

    def __repr__(self) -> str:
        return f"StagedCache({tuple(self.array.shape)}, {self.array.dtype}, stage_blocks={self.stage.shape[1]})"


def _programs(plane_axis: int, block_axis: int) -> tuple[Any, Any]:
    """Gather: (cache, ids) to (planes, ids, ...). Scatter: back into the cache, donated; ids beyond it do nothing."""
    jax = import_jax()
    front, back = (plane_axis, block_axis), (0, 1)

    def gather(cache: Any, ids: Any) -> Any:
        return jax.numpy.moveaxis(cache, front, back)[:, ids]

    def scatter(cache: Any, ids: Any, blocks: Any) -> Any:
        moved = jax.numpy.moveaxis(cache, front, back).at[:, ids].set(blocks, mode="drop")
        return jax.numpy.moveaxis(moved, back, front)

    return jax.jit(gather), jax.jit(scatter, donate_argnums=0)

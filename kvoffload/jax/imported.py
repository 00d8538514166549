"""Caches in kvoffload's memory, which JAX imports."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from kvoffload.device.buffers import DeviceArray, check_shape
from kvoffload.device.device import Device
from kvoffload.driver.core import LEGACY_STREAM
from kvoffload.errors import KVOffloadWarning, LayoutError, TransferError
from kvoffload.internal.teardown import run_all
from kvoffload.internal.types import DTypeLike, GpuArray
from kvoffload.jax.base import Place, PlacedCache
from kvoffload.jax.imports import address_of, from_device, import_jax, wait_for_computations
from kvoffload.layout.dlpack import ArrayView, packed_strides
from kvoffload.layout.dtypes import dtype_name, element_bytes
from kvoffload.layout.layout import KVLayout
from kvoffload.layout.planes import SlotOrder


class LayoutOptions(NamedTuple):
    """The arguments of `KVLayout.from_stacked` that callers of these caches give."""

    plane_axis: SupportsIndex
    block_axis: SupportsIndex
    tokens_per_block: SupportsIndex | None
    block_axes: Sequence[str] | None
    blocks_per_slot: SupportsIndex
    slot_order: SlotOrder | None

    def layout(self, array: GpuArray, dtype: DTypeLike) -> KVLayout:
        return KVLayout.from_stacked(array, dtype=dtype_name(dtype), on_default_stream=False, **self._asdict())


class ImportedCache(PlacedCache):
    """A cache in memory that kvoffload allocates on one or more devices. `OwnedCache` says what holds for all of them.

    Args:
        devices: of each shard of the cache.
        shard_shape: extents of each shard.
        shape: extents of the cache.
        dtype: of an element.
        options: of the layout of each shard.

    Raises:
        CapabilityError, CapacityError, LayoutError, ValueError: as `OwnedCache`; nothing stays allocated.
    """

    # Truth: `_memories`, which no interrupt can lose. Derived: `_array`, `_followed` and `_replaced`, changed together
    # by assignments between which no interrupt comes. An import that is interrupted before them is done again.

    def __init__(
        self,
        devices: Sequence[Device],
        shard_shape: Sequence[int],
        shape: Sequence[int],
        dtype: DTypeLike,
        options: LayoutOptions,
    ) -> None:
        import_jax()
        layout_of(shard_shape, dtype, options)  # refuses what is wrong before anything is allocated
        self._memories = _zeros(devices, shard_shape, dtype)
        places = tuple(
            Place(device, memory.address, memory.nbytes) for device, memory in zip(devices, self._memories, strict=True)
        )
        super().__init__(places, check_shape(shape), dtype)
        self._simulated = any(device.simulated for device in devices)
        self._layouts = [options.layout(memory, dtype) for memory in self._memories]
        self._array = self._import(None)
        self._replaced: Any = None  # an array that must be deleted
        self._followed = self._transfers()

    @property
    def unordered(self) -> Any:
        if self._simulated or self._array.is_deleted():
            return self._ordered()
        return self._array

    @property
    def _latest(self) -> Any:
        return self._array

    @abstractmethod
    def _join(self, shards: list[Any]) -> Any:
        """The cache as an array, of arrays that are the memory on each device."""

    def _import(self, previous: Any) -> Any:
        """The memory as a new array, whose computations follow the transfers so far, and on the same device the
        computation of `previous`, if that is not None."""
        follow = [None] * len(self._memories) if previous is None else self._shards(previous)
        return self._join(
            [from_device(memory, after=shard) for memory, shard in zip(self._memories, follow, strict=True)]
        )

    def _ordered(self) -> Any:
        self._delete_replaced()
        transfers = self._transfers()
        if self._array.is_deleted():
            self._recover(transfers)
        elif transfers != self._followed:
            new = self._import(self._array)
            self._replaced, self._array, self._followed = self._array, new, transfers
            self._delete_replaced()
        return self._array

    def _delete_replaced(self) -> None:
        if self._replaced is not None:
            self._replaced.delete()
            self._replaced = None

    def _recover(self, transfers: frozenset[Any]) -> None:
        """The array was donated, and no result was set: a step may still be writing the memory."""
        wait_for_computations(self._array)
        self._array, self._followed = self._import(None), transfers
        warnings.warn(
            "array was donated and no result was set; the host has waited for JAX and imported the memory anew. Set "
            "cache.array to the result of every step",
            KVOffloadWarning,
            stacklevel=4,
        )

    def _adopt(self, new: Any) -> None:
        if self._simulated:
            self._write_back(new)
        self._array = new

    def _check_places(self, new: Any) -> None:
        if not self._simulated:
            super()._check_places(new)
        elif not self._array.is_deleted() and not self._is_in_place(new):
            raise LayoutError(
                "array is no update in place: the cache's array was not donated to it, which makes a copy on a GPU. "
                "Donate the cache to it (jax.jit(..., donate_argnums=...))"
            )

    def _is_in_place(self, new: Any) -> bool:
        """On a simulated device, where JAX on the CPU copies imported memory to update it: whether an array has the
        memory of the present one."""
        shards = zip(self._shards(new), self._shards(self._array), strict=True)
        return all(address_of(shard) == address_of(present) for shard, present in shards)

    def _write_back(self, new: Any) -> None:
        """Give simulated devices what JAX computed on the CPU, where it updates no imported memory in place."""
        if self._transfers() != self._followed:
            raise TransferError("array was computed concurrently with transfers, which a simulated device cannot do")
        for engine in self._engines():
            engine.drain()
        for memory, shard in zip(self._memories, self._shards(new), strict=True):
            if address_of(shard) == memory.address:  # an imported array, as it was read
                continue
            memory.buffer.copy_from(np.asarray(shard).view(np.uint8).reshape(-1))


class _Unallocated(NamedTuple):
    """An array that is not allocated yet, as `KVLayout.from_stacked` takes one."""

    shape: tuple[int, ...]
    itemsize: int

    def array_view(self) -> ArrayView:
        some_address = 1 << 20
        strides = packed_strides(self.shape, self.itemsize)
        return ArrayView(some_address, self.shape, strides, self.itemsize, read_only=False)


def layout_of(shape: Sequence[int], dtype: DTypeLike, options: LayoutOptions) -> KVLayout:
    """The layout of such an array, but for its addresses. Raises what `Device.empty` and `from_stacked` raise."""
    array: Any = _Unallocated(check_shape(shape), element_bytes(dtype_name(dtype)))
    return options.layout(array, dtype)


def _zeros(devices: Sequence[Device], shape: Sequence[int], dtype: Any) -> tuple[DeviceArray, ...]:
    """An array on each device; fresh memory may hold NaN, which multiplying by a mask of zeros does not remove."""
    memories: list[DeviceArray] = []
    try:
        for device in devices:
            memories.append(device.empty(shape, dtype))
            with device.current():
                device.driver.fill(memories[-1].address, 0, memories[-1].nbytes, LEGACY_STREAM)
                device.driver.stream_synchronize(LEGACY_STREAM)
    except BaseException:
        run_all(memory.buffer.close for memory in memories)
        raise
    return tuple(memories)

"""A cache in kvoffload's memory that JAX imports."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvoffload.device.device import Device
from kvoffload.driver.core import LEGACY_STREAM
from kvoffload.errors import KVOffloadWarning, TransferError
from kvoffload.jax.base import PlacedCache
from kvoffload.jax.imports import from_device, wait_for_computations
from kvoffload.layout.layout import KVLayout


class OwnedCache(PlacedCache):
    """A KV cache in one array in memory of kvoffload's, zeros at first.

    Recommended is a block-major shape `(blocks, planes, ...)`, with `block_axis=0, plane_axis=1`: a block is one copy.
    JAX addresses it as it is: `array[block_table, plane]` gathers, `array.at[blocks, plane, offsets].set(...)` writes.
    With `(planes, blocks, ...)` the planes fold: one strided copy a block.

    When transfers were submitted since `array` was read last, reading it imports the memory anew and deletes the array
    before, so that using that by mistake raises. The import makes JAX wait, on the GPU, for these transfers and for its
    own computations.

    The caller's obligations:

    - Donate the cache to every update, and set `array` to the result.
    - Give transfers `after=cache`; and where other computations have read the array since its last update, name their
      results, too: `after=(cache, logits)`.
    - Keep no array across a transfer, except to use it as `unordered` says.

    If a step was given the array and its result was not set, because the step raised or was interrupted, reading
    `array` waits on the host until JAX has ended all computations, imports the memory anew and warns. The memory then
    has what the step wrote.

    JAX takes three quarters of the GPU's memory when it starts (XLA_PYTHON_CLIENT_PREALLOCATE); the cache is not in it.

    On a simulated device JAX computes on the CPU. Setting `array` copies it to the device: the bytes are those that a
    GPU would have, but no order is tested.

    Args:
        device: opened with the GPU's primary context (the default), which is JAX's.
        shape: extents.
        dtype: of an element, such as `jnp.bfloat16`.
        plane_axis, block_axis: which axes count planes (a layer's K, a layer's V) and blocks. Always named: the shape
            does not tell them apart.
        options: as for `KVLayout`.

    Attributes:
        memory: the `DeviceArray`.

    Raises:
        CapabilityError: JAX is not installed.
        CapacityError, LayoutError, ValueError: as `Device.empty` and `KVLayout.from_stacked`.
    """

    # Truth: `memory`, which no interrupt can lose. Derived: `_array`, `_followed` and `_replaced`, changed together by
    # assignments between which no interrupt comes. An import that is interrupted before them is done again.

    def __init__(
        self,
        device: Device,
        shape: Sequence[int],
        dtype: Any,
        *,
        plane_axis: int,
        block_axis: int,
        **options: Any,
    ) -> None:
        self.memory = device.empty(shape, dtype)
        with device.current():  # fresh memory may hold NaN, which multiplying by a mask of zeros does not remove
            device.driver.fill(self.memory.address, 0, self.memory.nbytes, LEGACY_STREAM)
            device.driver.stream_synchronize(LEGACY_STREAM)
        super().__init__(device, self.memory.address, self.memory.shape, self.memory.dtype)
        stated: dict[str, Any] = {"dtype": self.dtype, "on_default_stream": False} | options
        self.layout = KVLayout.from_stacked(self.memory, plane_axis=plane_axis, block_axis=block_axis, **stated)
        self._array = from_device(self.memory)
        self._replaced: Any = None  # an array that must be deleted
        self._followed = self._transfers()

    @property
    def unordered(self) -> Any:
        if self.device.simulated or self._array.is_deleted():
            return self._ordered()
        return self._array

    @property
    def _latest(self) -> Any:
        return self._array

    def _ordered(self) -> Any:
        self._delete_replaced()
        transfers = self._transfers()
        if self._array.is_deleted():
            self._recover(transfers)
        elif transfers != self._followed:
            new = from_device(self.memory, after=self._array)
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
        self._array, self._followed = from_device(self.memory), transfers
        warnings.warn(
            "array was donated and no result was set; the host has waited for JAX and imported the memory anew. Set "
            "cache.array to the result of every step",
            KVOffloadWarning,
            stacklevel=4,
        )

    def _adopt(self, new: Any) -> None:
        if self.device.simulated:
            self._write_back(new)
        self._array = new

    def _place_is_right(self, new: Any) -> bool:
        return self.device.simulated or super()._place_is_right(new)

    def _write_back(self, new: Any) -> None:
        """Give the simulated device what JAX computed on the CPU, where it updates no imported memory in place."""
        if self._transfers() != self._followed:
            raise TransferError("array was computed concurrently with transfers, which a simulated device cannot do")
        for engine in self.device.engines_over(self.address, self.nbytes):
            engine.drain()
        self.memory.buffer.copy_from(np.asarray(new).view(np.uint8).reshape(-1))

"""A cache in memory of ours that JAX imports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvoffload.device.device import Device
from kvoffload.driver.core import LEGACY_STREAM
from kvoffload.errors import TransferError
from kvoffload.jax.base import PlacedCache
from kvoffload.jax.imports import from_device
from kvoffload.layout.layout import KVLayout


class OwnedCache(PlacedCache):
    """A KV cache in one allocation of ours, of zeros at first; it always folds.

    `array` is imported anew when transfers were submitted since it was read last; the one before is deleted, so that
    using it by mistake raises. The import makes JAX wait, on the GPU, for these transfers and for what it computed
    itself.

    The caller's rules: update the cache by donating it, and set `array` to the result. Give transfers `after=cache`,
    and with it (`after=(cache, logits)`) the results of whatever has read the array since its last update. Hold no
    array across a transfer but to use it as `unordered` says.

    JAX takes three quarters of the GPU's memory when it starts (XLA_PYTHON_CLIENT_PREALLOCATE); this is not in it.

    On a simulated device JAX computes on the CPU, and what it computed is copied to the device: the same bytes, and no
    order to be got wrong.

    Args:
        device: opened with the GPU's primary context (the default), which is JAX's.
        shape: extents.
        dtype: of an element, such as `jnp.bfloat16`.
        plane_axis, block_axis: which axes count planes (a layer's K, a layer's V) and blocks.
        options: as for `KVLayout`.

    Attributes:
        memory: the `DeviceArray`.

    Raises:
        CapabilityError: JAX is not installed.
        CapacityError, LayoutError, ValueError: as `Device.empty` and `KVLayout.from_stacked`.
    """

    def __init__(
        self,
        device: Device,
        shape: Sequence[int],
        dtype: Any,
        plane_axis: int = 0,
        block_axis: int = 1,
        **options: Any,
    ) -> None:
        self.memory = device.empty(shape, dtype)
        with device.current():  # whatever is in fresh memory may be NaN, which a mask does not hide
            device.driver.fill(self.memory.address, 0, self.memory.nbytes, LEGACY_STREAM)
            device.driver.stream_synchronize(LEGACY_STREAM)
        super().__init__(device, self.memory.address, self.memory.shape, self.memory.dtype)
        stated: dict[str, Any] = {"dtype": self.dtype, "on_default_stream": False}
        self.layout = KVLayout.from_stacked(self.memory, plane_axis, block_axis, **stated | options)
        self._array = from_device(self.memory)
        self._followed = self._transfers()

    @property
    def unordered(self) -> Any:
        return self._ordered() if self.device.simulated else self._array

    @property
    def _latest(self) -> Any:
        return self._array

    def _ordered(self) -> Any:
        transfers = self._transfers()
        if transfers != self._followed:
            old = self._array
            self._array = from_device(self.memory, after=old)
            self._followed = transfers
            old.delete()
        return self._array

    def _adopt(self, new: Any) -> None:
        if self.device.simulated:
            self._write_back(new)
        self._array = new

    def _place_is_right(self, new: Any) -> bool:
        return self.device.simulated or super()._place_is_right(new)

    def _write_back(self, new: Any) -> None:
        """Give the simulated device what JAX computed on the CPU, where it updates no imported memory in place."""
        if self._transfers() != self._followed:
            raise TransferError("array was computed beside transfers, which a simulated device cannot do")
        for engine in self.device.engines_over(self.address, self.nbytes):
            engine.drain()
        self.memory.buffer.copy_from(np.asarray(new).view(np.uint8).reshape(-1))

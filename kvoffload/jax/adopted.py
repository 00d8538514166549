"""A cache that JAX allocated and updates in place."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kvoffload.device.device import Device
from kvoffload.errors import LayoutError
from kvoffload.jax.base import PlacedCache
from kvoffload.jax.imports import address_of, import_jax
from kvoffload.layout.arrays import is_jax_array, planes_of_view
from kvoffload.layout.dlpack import view_dlpack
from kvoffload.layout.layout import KVLayout


class Holder:
    """What the planes keep alive: whichever array holds their memory now."""

    def __init__(self, array: Any) -> None:
        self.array = array


class AdoptedCache(PlacedCache):
    """A KV cache in an array of JAX's that is updated by donation, and so stays in its place (checked each time).

    Nothing that JAX documents makes it wait for others' writes, so the host does: reading `array` waits until the
    transfers submitted so far have ended. That JAX then sees what they wrote is not documented either; JAX 0.10 and
    0.11 do. The array's cached host copy (of `np.asarray`) would be stale: reading `array` after a transfer makes a new
    array of the same memory.

    The caller's rules are those of `OwnedCache`.

    Args:
        device: of the engines.
        array: on one GPU; from now on it belongs to this cache.
        plane_axis, block_axis: which axes count planes and blocks.
        options: as for `KVLayout`.

    Raises:
        LayoutError: no array of JAX's, or as `KVLayout.from_stacked`.
    """

    def __init__(self, device: Device, array: Any, plane_axis: int = 0, block_axis: int = 1, **options: Any) -> None:
        if not is_jax_array(array):
            raise LayoutError(f"array must be a jax.Array, got {type(array).__name__}")
        super().__init__(device, address_of(array), tuple(array.shape), array.dtype)
        self._holder = Holder(array)
        planes = planes_of_view(view_dlpack(array, None), plane_axis, block_axis, self._holder)
        stated: dict[str, Any] = {"dtype": self.dtype, "on_default_stream": False}
        self.layout = KVLayout([planes], **stated | options)
        self._followed = self._transfers()

    @property
    def _latest(self) -> Any:
        return self._holder.array

    def _ordered(self) -> Any:
        transfers = self._transfers()
        if transfers != self._followed:
            for engine in self.device.engines_over(self.address, self.nbytes):
                engine.drain()
            renewed = _renew()(self._holder.array)
            self._check(renewed)
            self._holder.array = renewed
            self._followed = transfers
        return self._holder.array

    def _adopt(self, new: Any) -> None:
        self._holder.array = new


@lru_cache
def _renew() -> Any:
    """An array of the same memory that remembers no host copy; its argument is deleted."""
    return import_jax().jit(lambda array: array, donate_argnums=0)

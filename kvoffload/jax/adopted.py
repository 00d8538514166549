"""A cache that JAX allocated and updates in place."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kvoffload.device.device import Device
from kvoffload.jax.base import (
    OneDeviceCache,
    Place,
    check_device,
    check_is_array,
    check_is_not_lost,
    check_is_on_one_device,
)
from kvoffload.jax.imports import address_of, import_jax
from kvoffload.layout.arrays import block_shape, planes_of_view
from kvoffload.layout.dlpack import view_dlpack
from kvoffload.layout.layout import KVLayout, check_tokens


class Holder:
    """The owner of the planes: keeps the array alive that has their memory now. `arrays` has that one array.

    A donated array is gone when the jitted function returns, and an interrupt after that would lose the result. So the
    result is put in place by one C operation that also calls the function: `arrays[:] = map(function, arrays)`.
    """

    def __init__(self, array: Any) -> None:
        self.arrays = [array]


class AdoptedCache(OneDeviceCache):
    """A KV cache in an array that JAX allocated. Updates donate it, so it keeps its address (checked each time).

    No documented function of JAX makes it wait for writes by other libraries. So the host waits: reading `array`
    returns when the transfers submitted so far have ended. That JAX then sees their bytes is not documented either;
    JAX 0.10 and 0.11 do.
    The host copy that `np.asarray` keeps on an array would be stale, so reading `array` after a transfer creates a new
    array of the same memory.

    The caller's obligations are those of `OwnedCache`. If a step was given the array and its result is lost, JAX has
    freed the memory: close the engines over it, and create a new cache. `array` raises then, and so does `after=cache`.

    Args:
        device: that of the engines, which holds the array.
        array: a `jax.Array` on one GPU; from now on only this cache may use it.
        plane_axis, block_axis: which axes count planes and blocks; always named, as for `OwnedCache`.
        options: as for `KVLayout`.

    Raises:
        TypeError: `device` is no device.
        LayoutError: `array` is no `jax.Array`, was deleted, or is on several devices; or as `KVLayout.from_stacked`.
    """

    def __init__(self, device: Device, array: Any, *, plane_axis: int, block_axis: int, **options: Any) -> None:
        check_device(device)
        check_is_array(array)
        check_is_on_one_device(array)
        super().__init__((Place(device, address_of(array), int(array.nbytes)),), tuple(array.shape), array.dtype)
        self._holder = Holder(array)
        planes = planes_of_view(view_dlpack(array, None), plane_axis, block_axis, self._holder)
        stated: dict[str, Any] = {"dtype": self.dtype, "on_default_stream": False}
        self.layout = KVLayout([planes], **stated | options)
        check_tokens(self.layout, block_shape(self.shape, plane_axis, block_axis))
        self._followed = self._transfers()

    @property
    def _latest(self) -> Any:
        return self._holder.arrays[0]

    def _ordered(self) -> Any:
        check_is_not_lost(self._latest)
        transfers = self._transfers()
        if transfers != self._followed:
            for engine in self._engines():
                engine.drain()
            self._replace(_renew())
            self._followed = transfers
        return self._latest

    def _replace(self, function: Any) -> None:
        """Put the result of a jitted function with a donated argument in the array's place, and check its address."""
        arrays = self._holder.arrays
        arrays[:] = map(function, arrays)
        self._check(arrays[0])

    def _adopt(self, new: Any) -> None:
        self._holder.arrays[0] = new


@lru_cache
def _renew() -> Any:
    """A new array of the same memory, without the host copy that the argument may have; the argument is deleted."""
    return import_jax().jit(lambda array: array, donate_argnums=0)

"""What the caches have in common: checks of arrays, and for all but StagedCache an array that stays at its address."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from kvoffload.device.device import Device
from kvoffload.device.ownership import DeviceUser
from kvoffload.errors import LayoutError
from kvoffload.internal.checks import shown
from kvoffload.jax.imports import address_of, follow, import_jax
from kvoffload.layout.arrays import is_jax_array
from kvoffload.layout.dtypes import dtype_name
from kvoffload.layout.layout import KVLayout


def check_device(device: object) -> None:
    """Raise TypeError unless it is a `Device`."""
    if not isinstance(device, Device):
        raise TypeError(f"device must be a device from open_device(), got {shown(device)}")


def check_is_array(array: Any, remedy: str = "pass jax.numpy.asarray(...)") -> None:
    """Raise LayoutError unless it is a `jax.Array` that has memory."""
    if not is_jax_array(array) or not isinstance(array, import_jax().Array):
        raise LayoutError(f"array must be a jax.Array, got {type(array).__name__}: {remedy}")
    if isinstance(array, import_jax().core.Tracer):
        raise LayoutError(
            f"array must be a jax.Array with memory, got {type(array).__name__}, which has none: leave the jitted "
            "function first"
        )
    if array.is_deleted():
        raise LayoutError(
            f"array was deleted, or donated to a computation: {array.dtype} of shape {array.shape}; pass the array "
            "that the computation has returned"
        )


def check_is_on_one_device(array: Any) -> None:
    """Raise LayoutError if a `jax.Array` is on several devices."""
    if len(array.sharding.device_set) > 1:
        raise LayoutError(
            f"array must be on one device, got {array.sharding}: move it there (jax.device_put(array, device), or "
            "jax.jit(..., out_shardings=...)), or use kvoffload.jax.ShardedOwnedCache for several"
        )


def check_update(array: Any, shape: tuple[int, ...], dtype: str) -> None:
    """Raise LayoutError unless it is a `jax.Array` that has memory, of this shape and dtype."""
    remedy = "set it to the updated cache"
    check_is_array(array, remedy)
    if (tuple(array.shape), dtype_name(array.dtype)) != (shape, dtype):
        raise LayoutError(f"array must be {dtype} of shape {shape}, got {array.dtype} of {array.shape}: {remedy}")


def check_is_not_lost(array: Any) -> None:
    """Raise LayoutError if the array of a cache in JAX's memory was donated, and no result has been set."""
    if array.is_deleted():
        raise LayoutError(
            "array was donated and its result was not set, so JAX has freed the memory of the cache: close its "
            "engines and create a new cache, or use kvoffload.jax.OwnedCache, which keeps its memory"
        )


class Place(NamedTuple):
    """Where the memory of a cache lies on one device: its address, and its bytes."""

    device: Device
    address: int
    nbytes: int


class PlacedCache(ABC):
    """A cache in one array whose memory must not move, on any of its devices: the planes of `layout` are addresses.

    Attributes:
        shape, dtype: of the array.
        nbytes: of its memory on all devices.
    """

    _other_remedy = ""

    def __init__(self, places: tuple[Place, ...], shape: tuple[int, ...], dtype: Any) -> None:
        self._places = places
        self.shape = shape
        self.dtype = dtype_name(dtype)
        self.nbytes = sum(place.nbytes for place in places)

    @property
    def array(self) -> Any:
        """The cache as a `jax.Array`. What JAX computes with it follows all transfers submitted so far. After a
        transfer it is a new array, and the previous one is deleted: using that one raises.

        Set it to the result of every update, to which the array was given as a donated argument.

        Raises:
            LayoutError: the array that is set has another address, shape, dtype or sharding, was deleted, or is no
                `jax.Array`.
        """
        return self._ordered()

    @array.setter
    def array(self, new: Any) -> None:
        self._check(new)
        self._adopt(new)

    @property
    def unordered(self) -> Any:
        """The array, for computing concurrently with transfers: what JAX computes with it does not wait for transfers
        that were submitted since `array` was read last. Such a computation must not read or write blocks that are being
        loaded, nor write blocks that are being stored. `array`, read later, waits for them.
        """
        return self._latest

    @property
    @abstractmethod
    def _latest(self) -> Any:
        """The array that was set or imported last. It is deleted if it was donated and no result has been set."""

    @abstractmethod
    def _ordered(self) -> Any: ...

    @abstractmethod
    def _adopt(self, new: Any) -> None: ...

    def _shards(self, array: Any) -> list[Any]:
        """The shard of such an array on each device, in the order of the places."""
        return [array]

    def _engines(self) -> list[DeviceUser]:
        """The engines over this memory."""
        return [engine for place in self._places for engine in place.device.engines_over(place.address, place.nbytes)]

    def _transfers(self) -> frozenset[tuple[weakref.ref[Any], int]]:
        """For each engine over this memory, how many transfers it was given: changes with each submitted transfer."""
        return frozenset((weakref.ref(engine), count) for engine in self._engines() if (count := engine.submitted))

    def _check(self, new: Any) -> None:
        check_update(new, self.shape, self.dtype)
        self._check_sharding(new)
        self._check_places(new)

    @abstractmethod
    def _check_sharding(self, new: Any) -> None: ...

    def _check_places(self, new: Any) -> None:
        for place, shard in zip(self._places, self._shards(new), strict=True):
            if address_of(shard) != place.address:
                raise LayoutError(
                    f"array lies at {address_of(shard):#x} on device {place.device.index}, and the cache at "
                    f"{place.address:#x}: the update made a copy. Donate the cache to it (jax.jit(..., "
                    f"donate_argnums=...)), and use the array for nothing else meanwhile{self._other_remedy}"
                )

    def is_deleted(self) -> bool:
        """Whether the array was donated, and no result has been set."""
        return bool(self._latest.is_deleted())


class OneDeviceCache(PlacedCache):
    """A cache on one device, which transfers can follow like an array: `after=cache`.

    Attributes:
        layout: for an `OffloadEngine`.
    """

    layout: KVLayout
    _other_remedy = "; if JAX moves it even then, use kvoffload.jax.StagedCache"

    def _check_sharding(self, new: Any) -> None:
        check_is_on_one_device(new)

    @property
    def device(self) -> Device:
        """The device whose memory holds the array; engines over `layout` are made with it."""
        return self._places[0].device

    @property
    def address(self) -> int:
        """Device address of the array, bytes."""
        return self._places[0].address

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self._latest.__dlpack_device__()
        return int(kind), int(index)

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        """For `after=cache`: a transfer then follows the computation that made the array. Computations that have read
        it since must be named, too: `after=(cache, logits)`.
        """
        return follow(self._latest, stream)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shape}, {self.dtype}, {self.address:#x})"

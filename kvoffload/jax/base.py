"""What OwnedCache, AdoptedCache and CallbackCache have in common: an array that stays at its address."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any

from kvoffload.device.device import Device
from kvoffload.errors import LayoutError
from kvoffload.jax.imports import address_of, follow
from kvoffload.layout.arrays import is_jax_array
from kvoffload.layout.dtypes import dtype_name, element_bytes
from kvoffload.layout.layout import KVLayout


class PlacedCache(ABC):
    """A cache in one array whose address must not change, because the planes of `layout` are addresses.

    Attributes:
        device: the device of the engines that copy the cache.
        address, shape, dtype, nbytes: of the array.
        layout: for an `OffloadEngine`.
    """

    layout: KVLayout

    def __init__(self, device: Device, address: int, shape: tuple[int, ...], dtype: Any) -> None:
        self.device = device
        self.address = address
        self.shape = shape
        self.dtype = dtype_name(dtype)
        self.nbytes = element_bytes(self.dtype)
        for extent in shape:
            self.nbytes *= extent

    @property
    def array(self) -> Any:
        """The cache as a `jax.Array`. What JAX computes with it follows all transfers submitted so far. After a
        transfer it is a new array, and the one before is deleted: using that raises.

        Set it to the result of every update, to which the array was given as a donated argument.

        Raises:
            LayoutError: the array that is set has another address, shape or dtype, or is no `jax.Array`.
        """
        return self._ordered()

    @array.setter
    def array(self, new: Any) -> None:
        self._check(new)
        self._adopt(new)

    @property
    def unordered(self) -> Any:
        """The array without the order: what JAX computes with it does not follow transfers that were submitted since
        `array` was read last. For computing concurrently with transfers: such a computation must not read or write
        blocks that are being loaded, nor write blocks that are being stored. `array`, read later, is ordered again.
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

    def _transfers(self) -> frozenset[tuple[weakref.ref[Any], int]]:
        """For each engine over this memory, how many transfers it was given: changes with each submitted transfer."""
        engines = self.device.engines_over(self.address, self.nbytes)
        return frozenset((weakref.ref(engine), count) for engine in engines if (count := engine.submitted))

    def _check(self, new: Any) -> None:
        if not is_jax_array(new):
            raise LayoutError(f"array must be a jax.Array, got {type(new).__name__}")
        if (tuple(new.shape), dtype_name(new.dtype)) != (self.shape, self.dtype):
            raise LayoutError(f"array must be {self.dtype} of shape {self.shape}, got {new.dtype} of {new.shape}")
        if not self._place_is_right(new):
            raise LayoutError(
                f"array lies at {address_of(new):#x}, and the cache at {self.address:#x}: the update made a copy. "
                "Donate the cache to it (jax.jit(..., donate_argnums=...)), and use the array for nothing else "
                "meanwhile; if JAX moves it even then, use kvoffload.jax.StagedCache"
            )

    def _place_is_right(self, new: Any) -> bool:
        return address_of(new) == self.address

    # after=cache: an array whose producer is followed

    def is_deleted(self) -> bool:
        """Whether the array was donated, and no result has been set."""
        return bool(self._latest.is_deleted())

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

"""What the caches have in common: one array with a plane axis and a block axis that stays where it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from kvoffload.device.device import Device
from kvoffload.errors import LayoutError
from kvoffload.jax.imports import address_of, follow
from kvoffload.layout.arrays import is_jax_array
from kvoffload.layout.dtypes import dtype_name, element_bytes
from kvoffload.layout.layout import KVLayout


class PlacedCache(ABC):
    """A cache whose planes are addresses, so that every array that takes its place must lie there, too.

    Attributes:
        device: of the engines that copy it.
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
        """The cache as a `jax.Array`: what JAX computes with it follows all transfers submitted so far. It may be a new
        array at each access; older ones are deleted as soon as they must not be used any more.

        Setting it adopts the result of an update that was given the array, donated.

        Raises:
            LayoutError: what is set lies elsewhere, or is no such array.
        """
        return self._ordered()

    @array.setter
    def array(self, new: Any) -> None:
        self._check(new)
        self._adopt(new)

    @property
    def unordered(self) -> Any:
        """The array as it is: what JAX computes with it does not follow transfers that were submitted since `array` was
        read last. For computing while blocks are on their way: it must not read or write blocks that are being loaded,
        nor write blocks that are being stored. `array`, read later, is ordered again.
        """
        return self._latest

    @property
    @abstractmethod
    def _latest(self) -> Any:
        """The array that was adopted or imported last."""

    @abstractmethod
    def _ordered(self) -> Any: ...

    @abstractmethod
    def _adopt(self, new: Any) -> None: ...

    def _transfers(self) -> frozenset[tuple[int, int]]:
        """By engine, how many transfers were ever submitted that may touch the memory: changes with each of them."""
        engines = self.device.engines_over(self.address, self.nbytes)
        return frozenset((engine.number, count) for engine in engines if (count := engine.submitted))

    def _check(self, new: Any) -> None:
        if not is_jax_array(new):
            raise LayoutError(f"array must be a jax.Array, got {type(new).__name__}")
        if (tuple(new.shape), dtype_name(new.dtype)) != (self.shape, self.dtype):
            raise LayoutError(f"array must be {self.dtype} of shape {self.shape}, got {new.dtype} of {new.shape}")
        if not self._place_is_right(new):
            raise LayoutError(
                f"array lies at {address_of(new):#x}, and the cache at {self.address:#x}: the update made a copy. "
                "Donate the cache to it (jax.jit(..., donate_argnums=...)), and use the array for nothing else "
                "meanwhile; where JAX moves it all the same, take kvoffload.jax.StagedCache"
            )

    def _place_is_right(self, new: Any) -> bool:
        return address_of(new) == self.address

    # after=cache: an array whose producer is followed

    def is_deleted(self) -> bool:
        """Whether the array was donated, and nothing has been adopted in its place."""
        return bool(self._latest.is_deleted())

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self._latest.__dlpack_device__()
        return int(kind), int(index)

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        """For `after=cache`: a transfer then follows the computation that made the array. What has read it since must
        be named, too: `after=(cache, logits)`.
        """
        return follow(self._latest, stream)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shape}, {self.dtype}, {self.address:#x})"

"""A cache in kvoffload's memory on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

from kvoffload.device.device import Device
from kvoffload.internal.types import DTypeLike
from kvoffload.jax.base import OneDeviceCache, check_device
from kvoffload.jax.imported import ImportedCache, LayoutOptions
from kvoffload.layout.planes import SlotOrder


class OwnedCache(ImportedCache, OneDeviceCache):
    """A KV cache in one `jax.Array` over memory that kvoffload allocates, initially zero.

    Recommended is a block-major shape `(blocks, planes, ...)`, with `block_axis=0, plane_axis=1`: a block is one copy.
    In JAX `array[block_table, plane]` reads blocks, and `array.at[blocks, plane, offsets].set(...)` writes tokens. With
    `(planes, blocks, ...)` the planes fold: a block is one strided copy.

    If transfers were submitted since `array` was read last, reading it imports the memory again and deletes the
    previous array, so that using that one raises. The import makes JAX wait, on the GPU, for these transfers and for
    its own computations.

    The caller's obligations:

    - Donate the cache to every update, and set `array` to the result.
    - Give transfers `after=cache`; and where other computations have read the array since its last update, name their
      results, too: `after=(cache, logits)`.
    - Keep no array across a transfer, except to use it as `unordered` says.

    If a step was given the array and its result was not set, because the step raised or was interrupted, reading
    `array` waits on the host until JAX has ended all computations, imports the memory again and warns. The memory has
    what the step wrote.

    JAX takes three quarters of the GPU's memory when it starts (XLA_PYTHON_CLIENT_PREALLOCATE); the cache needs room in
    the rest.

    On a simulated device JAX computes on the CPU. Setting `array` copies it to the device: the bytes are those that a
    GPU would have, but no order is tested. An update to which the array was not donated is refused there, too.

    Args:
        device: opened with the GPU's primary context (the default), which JAX uses.
        shape: extents.
        dtype: of an element, such as `jnp.bfloat16`, also of the layout.
        plane_axis, block_axis: which axes count planes (a layer's K, a layer's V) and blocks. Always named: the shape
            does not tell them apart.
        tokens_per_block: tokens in a block; needed for keys (`chain_keys`, `layout.fingerprint`), not for transfers.
        block_axes: the names of the axes of one block of one plane, the slowest first, such as
            `("tokens", "heads", "dim")`; needed for keys.
        blocks_per_slot, slot_order: as for `KVLayout`.

    Attributes:
        memory: the `DeviceArray`.

    Raises:
        CapabilityError: JAX is not installed.
        TypeError: `device` is no device.
        CapacityError, LayoutError, ValueError: as `Device.empty` and `KVLayout.from_stacked`.
    """

    def __init__(
        self,
        device: Device,
        shape: Sequence[int],
        dtype: DTypeLike,
        *,
        plane_axis: SupportsIndex,
        block_axis: SupportsIndex,
        tokens_per_block: SupportsIndex | None = None,
        block_axes: Sequence[str] | None = None,
        blocks_per_slot: SupportsIndex = 1,
        slot_order: SlotOrder | None = None,
    ) -> None:
        check_device(device)
        options = LayoutOptions(plane_axis, block_axis, tokens_per_block, block_axes, blocks_per_slot, slot_order)
        super().__init__((device,), shape, shape, dtype, options)
        self.memory = self._memories[0]
        self.layout = self._layouts[0]

    def _join(self, shards: list[Any]) -> Any:
        return shards[0]

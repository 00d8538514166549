"""A cache in kvoffload's memory on several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

from kvoffload.device.buffers import check_shape
from kvoffload.device.device import Device, checked_devices
from kvoffload.errors import LayoutError
from kvoffload.internal.checks import shown
from kvoffload.internal.types import DTypeLike
from kvoffload.jax.imported import ImportedCache, LayoutOptions, layout_of
from kvoffload.jax.imports import import_jax
from kvoffload.layout.arrays import is_jax_array
from kvoffload.layout.planes import SlotOrder
from kvoffload.layout.sharded import ShardedLayout


class ShardedOwnedCache(ImportedCache):
    """A KV cache in one sharded `jax.Array`, over memory that kvoffload allocates on each device, initially zero.

    An `OwnedCache` over several devices: heads are divided among them (tensor parallel), or planes (pipeline), or each
    has all (replicated). Every device has every block. What `OwnedCache` says of `array`, `unordered`, donated updates,
    lost results and simulated devices holds on each device.

    The caller's obligations:

    - Donate the cache to every update, and set `array` to the result. An update must leave each device's shard where it
      is, which is checked on every device; so compute with `jax.shard_map`, or name the cache's sharding in
      `jax.jit(..., out_shardings=...)`.
    - Give transfers of a `ShardedEngine`, or of a `BlockCache` on it, `after=cache`; and where other computations have
      read the array since its last update, name their results, too: `after=cache.after(logits)`.
    - Keep no array across a transfer, except to use it as `unordered` says.

    On each device, a transfer follows that device's computation alone, and JAX's computations wait for that device's
    transfers alone. The host waits for neither.

    Args:
        devices: opened with the primary contexts (the default), each once. Their order is that of the engine's.
        shape: extents of the whole cache.
        dtype: of an element, such as `jnp.bfloat16`, also of the layout.
        sharding: a `jax.sharding.NamedSharding` over the same devices in any order, all of this process. JAX's device
            for a GPU is the one whose `local_hardware_id` is the GPU's index; for a simulated device, the CPU device
            whose `id` is that index.
        plane_axis, block_axis: which axes count planes and blocks; always named. The block axis is not divided.
        tokens_per_block, block_axes: as for `OwnedCache`; needed for keys.
        blocks_per_slot, slot_order: as for `KVLayout`.

    Attributes:
        devices, sharding: as given.
        shape, dtype: of the array.
        nbytes: of the memory on all devices.
        layout: a `ShardedLayout`, for a `ShardedEngine` over `devices`.
        memories: a `DeviceArray` on each device, in the order of `devices`.

    Raises:
        CapabilityError: JAX is not installed.
        TypeError: `devices` is no list of devices, `sharding` no NamedSharding.
        LayoutError: `sharding` is over other devices, divides blocks, divides an axis unevenly, or is for another kind
            of memory; or as `KVLayout.from_stacked`.
        CapacityError, ValueError: as `Device.empty`. Nothing stays allocated after any of these.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        shape: Sequence[int],
        dtype: DTypeLike,
        *,
        sharding: Any,
        plane_axis: SupportsIndex,
        block_axis: SupportsIndex,
        tokens_per_block: SupportsIndex | None = None,
        block_axes: Sequence[str] | None = None,
        blocks_per_slot: SupportsIndex = 1,
        slot_order: SlotOrder | None = None,
    ) -> None:
        self.devices = checked_devices(devices)
        self.sharding = _checked_sharding(sharding)
        self._jax_devices = _jax_devices(self.devices, sharding)
        options = LayoutOptions(plane_axis, block_axis, tokens_per_block, block_axes, blocks_per_slot, slot_order)
        shard_shape = _shard_shape(check_shape(shape), sharding)
        num_blocks, in_shard = (layout_of(each, dtype, options).groups[0].num_blocks for each in (shape, shard_shape))
        if in_shard != num_blocks:
            raise LayoutError(
                f"sharding {sharding.spec} divides the {num_blocks} blocks of block_axis={block_axis}, and every "
                "device needs every block: divide heads or planes, or replicate the cache"
            )
        super().__init__(self.devices, shard_shape, shape, dtype, options)
        self.memories = self._memories
        self.layout = ShardedLayout(self._layouts)

    def after(self, *results: Any) -> tuple[tuple[Any, ...], ...]:
        """What a transfer is to follow on each device, in the order of `devices`: the cache's shard there, and those of
        `results`. A `ShardedEngine` takes it as `after`; `after=cache` is the same without results.

        Args:
            results: `jax.Array`s of computations that have read the cache since its last update, such as logits,
                sharded or replicated. One that is on some of the devices only is followed there.

        Raises:
            ValueError: the cache was donated and no result was set, or a result was deleted or is on none of the
                devices.
            TypeError: a result is no `jax.Array`.
        """
        if self.is_deleted():
            raise ValueError(
                "the cache's array was donated, and no result was set: set cache.array to the result of the update; if "
                "it is lost, read cache.array, which recovers the memory"
            )
        given = [_shards_of(self._array)]
        for index, result in enumerate(results):
            given.append(_shards_of(_checked_result(f"results[{index}]", result)))
            if given[-1].keys().isdisjoint(self._jax_devices):
                raise ValueError(
                    f"results[{index}] is on {list(given[-1])}, and the cache on {list(self._jax_devices)}"
                )
        return tuple(tuple(shards[device] for shards in given if device in shards) for device in self._jax_devices)

    def _shards(self, array: Any) -> list[Any]:
        shards = _shards_of(array)
        return [shards[device] for device in self._jax_devices]

    def _join(self, shards: list[Any]) -> Any:
        jax = import_jax()
        if self._simulated:  # JAX imports memory of the host on its first CPU device
            shards = [jax.device_put(shard, device) for shard, device in zip(shards, self._jax_devices, strict=True)]
            jax.block_until_ready(shards)
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards)

    def _check_sharding(self, new: Any) -> None:
        if not new.sharding.is_equivalent_to(self.sharding, len(self.shape)):
            raise LayoutError(
                f"array must have the sharding {self.sharding}, got {new.sharding}: name it in the update, "
                "jax.jit(..., out_shardings=cache.sharding), or update with jax.shard_map"
            )

    def __repr__(self) -> str:
        indices = [device.index for device in self.devices]
        return f"ShardedOwnedCache({self.shape}, {self.dtype}, {self.sharding.spec}, devices {indices})"


def _shards_of(array: Any) -> dict[Any, Any]:
    """The shard of a `jax.Array` on each device of JAX's, as an array on that device; nothing waits."""
    return {shard.device: shard.data for shard in array.addressable_shards}


def _checked_result(name: str, result: Any) -> Any:
    if not is_jax_array(result):
        raise TypeError(f"{name} must be a jax.Array, got {type(result).__name__}")
    if result.is_deleted():
        raise ValueError(f"{name} was deleted, or donated to a computation: pass the array that took its place")
    return result


def _checked_sharding(sharding: Any) -> Any:
    jax = import_jax()
    if not isinstance(sharding, jax.sharding.NamedSharding):
        raise TypeError(f"sharding must be a jax.sharding.NamedSharding over the devices, got {shown(sharding)}")
    kind, usual = sharding.memory_kind, next(iter(sharding.device_set)).default_memory().kind
    if kind not in (None, usual):
        raise LayoutError(
            f"sharding has memory_kind={kind!r}, and the cache is in device memory: leave memory_kind out"
        )
    return sharding


def _jax_devices(devices: tuple[Device, ...], sharding: Any) -> tuple[Any, ...]:
    """JAX's device for each of ours."""
    if not sharding.is_fully_addressable:
        raise LayoutError(f"sharding has devices of other processes: {sharding}; name devices of this process alone")
    theirs = {_place_of(each): each for each in sharding.device_set}
    ours = [("cpu" if device.simulated else "gpu", device.index) for device in devices]
    if len(ours) != len(theirs) or set(ours) != set(theirs):
        raise LayoutError(
            f"sharding is over {sorted(theirs)}, and devices are {ours} (platform, index): give one device for each of "
            "the sharding's, with the index that JAX calls local_hardware_id"
        )
    return tuple(theirs[place] for place in ours)


def _place_of(jax_device: Any) -> tuple[str, int]:
    """Platform and index of a device of JAX's; simulated devices have the numbers of CPU devices."""
    platform = str(jax_device.platform)
    return platform, int(jax_device.id if platform == "cpu" else jax_device.local_hardware_id)


def _shard_shape(shape: tuple[int, ...], sharding: Any) -> tuple[int, ...]:
    """The extents on each device."""
    if len(sharding.spec) > len(shape):
        raise LayoutError(f"sharding {sharding.spec} is for {len(sharding.spec)} axes, and shape {shape} has fewer")
    try:
        return tuple(sharding.shard_shape(shape))
    except ValueError as error:
        raise LayoutError(
            f"shape {shape} cannot be divided evenly by sharding {sharding.spec} over the mesh "
            f"{dict(sharding.mesh.shape)}: make each divided axis a multiple of the devices along it"
        ) from error

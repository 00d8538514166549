"""OwnedCache: a KV cache that JAX updates in place, in memory of kvoffload's or in arrays that JAX has allocated.

Each leaf has a *part* on each device: memory that outlives the arrays of the user, so that no lost step loses it. What
the user holds are imports of the parts by DLPack, or results of donated updates of these, at the same addresses. Order
between transfers and JAX is made with one array, whatever the number of leaves, and rests on data alone:

- JAX follows transfers: the first read of `arrays` after one imports a *token*, a byte of memory on each device. That
  import waits on the GPU for the transfers. It goes through a jitted identity with all leaves, which are donated. So
  each leaf is a new array that waits as the token does, whether a step takes all of them or one, and all previous
  arrays are deleted.
- Transfers follow JAX: they wait for the result of a jitted function of all leaves, made once after each update.

Leaves over differently ordered meshes cannot go into one function: there is one for each mesh. On a simulated device
each leaf is imported first, since JAX on the CPU computes in copies.
"""

from __future__ import annotations

import itertools
import operator
import warnings
import weakref
from collections.abc import Sequence
from operator import attrgetter, methodcaller
from typing import Any, SupportsIndex

import numpy as np

from kvoffload.device.buffers import DeviceArray, DeviceBuffer
from kvoffload.device.device import Device, checked_devices
from kvoffload.device.ownership import DeviceUser
from kvoffload.driver.core import LEGACY_STREAM
from kvoffload.errors import KVOffloadWarning, LayoutError, TransferError
from kvoffload.internal.checks import flag, shown
from kvoffload.internal.types import DTypeLike
from kvoffload.jax.imports import Adopted, address_of, follow, import_jax, import_memory, wait_for_computations, zeroed
from kvoffload.jax.leaves import Description, as_leaves, how_to_donate, jax_devices, meshes_of, shards_of
from kvoffload.layout.arrays import check_jax_array
from kvoffload.layout.layout import ShardedLayout
from kvoffload.layout.planes import SlotOrder

_is_deleted, _address = methodcaller("is_deleted"), methodcaller("unsafe_buffer_pointer")
_form, _type, _start = attrgetter("shape", "dtype"), attrgetter("aval"), attrgetter("address")
_order = attrgetter("format.layout")  # of the axes in memory, which `aval` does not tell


class OwnedCache:
    """A KV cache in memory that kvoffload allocates and JAX imports: a `jax.Array` or a tree of arrays, first zeros.

    A tree is any nesting of lists, dicts and tuples that JAX accepts, with one array a layer, say. All arrays of a
    group have the same number of blocks. Pass `arrays` to your step as a donated argument, and set them to its result:

        cache = OwnedCache(device, [(pages, 16, 8, 128)] * 64, jnp.bfloat16, block_axis=0, plane_axis=None)
        cache.arrays, logits = step(cache.arrays, tokens)       # jitted with donate_argnums=0
        engine.store(blocks, slots, after=cache)                # on the GPU it follows the step
        cache.arrays, logits = step(cache.arrays, tokens)       # this step follows the store

    The first read of `arrays` after a transfer gives new arrays in the same memory, and deletes the old ones, so using
    those raises from then on. (Before that read they work, unordered.) JAX's computations with the new arrays wait on
    the GPU for the transfer. The host does not wait (only for transfers that the driver's full queues do not take yet,
    up to a second). Use the cache from one thread at a time.

    Your part:

    - Donate the cache to every update, and set `arrays` to the result. The setter checks on every device that the
      result lies in the cache's memory, and has its axes there in the order of its shape: give the step's results no
      `Format`. On several devices compute with `jax.shard_map`, or give `jax.jit` the cache's shardings:
      `out_shardings=cache.sharding`.
    - Give transfers `after=cache`; without `after` they are refused. If other computations read the arrays since their
      last update, name their results, too: `after=cache.after(logits)`.
    - Keep no array across a transfer, except as `unordered` allows, and use none after a device is closed. A
      `BlockCache.fetch` that asks a tier submits its transfer later: before you read `arrays` for a step that uses its
      blocks, call `job.order_before(cache)`, or read `job.hits`.

    If a step took the arrays and you did not set its result, because it raised or was interrupted, reading `arrays`
    waits on the host until JAX has ended all computations, imports the memory again and warns (KVOffloadWarning). The
    memory then holds whatever the step has written.

    On each device all arrays lie in one allocation. If they are alike, one strided copy moves a block of all arrays. A
    block of one block-major array `(blocks, planes, ...)` is one contiguous copy.

    If your server has allocated its arrays itself, give them with `adopt=True`, and let it use `arrays` instead from
    then on, in the same memory. Do nothing more with the arrays that you gave; they cannot be donated.

    JAX takes three quarters of the GPU's memory when it starts (XLA_PYTHON_CLIENT_PREALLOCATE); the cache needs room in
    the rest.

    On a simulated device JAX computes on the CPU, reading `arrays` waits on the host for the transfers, and setting
    them copies them to the device. You get the same bytes as on a GPU, but no order is tested. An update without
    donation is refused there, too. After a transfer that came between reading `arrays` and setting them, setting raises
    TransferError, and that update is lost: for a fetch that asks a tier, wait before you read them.

    Args:
        devices: the device, or a list of devices in the order of the engine's. Open them with the primary context (the
            default), which JAX uses.
        shapes: the shape of the whole array, or a tree with a shape for each array. Instead of a shape you may give a
            `jax.ShapeDtypeStruct` or an array: shape, dtype and sharding count, contents are not copied.
        adopt: `shapes` are arrays that JAX has allocated, and they become the cache, with what they hold. On a
            simulated device they are copied.
        dtype: dtype of arrays that `shapes` gives as bare shapes, such as `jnp.bfloat16`. It is also the dtype of the
            layout, on which keys depend. None: the arrays' own, if all have the same; else the layout has none.
        sharding: for a list of devices a `jax.sharding.NamedSharding` of all arrays, over the same devices in any
            order, all in this process. None: `shapes` has one for each. It may divide heads (tensor parallel), planes
            (pipeline) or nothing (replicated), but not blocks. A GPU is JAX's device with the GPU's index as
            `local_hardware_id`; a simulated device is the CPU device with its index as `id`.
        block_axis: the axis of each array that counts blocks.
        plane_axis: the axis of each array that counts planes (K and V, or a layer's K, a layer's V, the next layer's
            K, ...). None: each array is one plane. You must name it: the shape does not tell the axes apart.
        groups: which arrays share a block table: a tree like `shapes`, or like its upper part, with numbers from 0,
            such as `{"full": 0, "window": 1}`. Groups may have different numbers of blocks. 0: all share one.
        tokens_per_block: tokens in a block; needed for keys (`chain_keys`, `layout.fingerprint`), not for transfers.
        block_axes: the axes of one block of one plane, slowest first, such as `("tokens", "heads", "dim")`; needed for
            keys.
        blocks_per_slot, slot_order: as for `KVLayout`.

    Attributes:
        layout: for each group the planes of its arrays, in the order of the tree: a `KVLayout` for an `OffloadEngine`,
            or for a list of devices a `ShardedLayout` for a `ShardedEngine`.
        devices: a tuple.
        shapes: the tree with a `jax.ShapeDtypeStruct` for each array, for `step.lower(cache.shapes)`.
        sharding: the tree with the sharding of each array; None for each array of one device.
        memories: a `DeviceBuffer` on each device; () for arrays adopted on a GPU. It is freed once the cache, its
            layout and its arrays are garbage, or when the device closes.
        nbytes: bytes of the arrays on all devices together.

    Raises:
        CapabilityError: JAX is not installed.
        TypeError: `devices` are no devices, or a sharding is no NamedSharding, or missing for a list of devices.
        ValueError: `shapes` has no shape or a wrong one, a dtype is missing, or `adopt` is not True or False.
        LayoutError: a sharding is over other devices, divides blocks, divides an axis unevenly, or is for another kind
            of memory; `groups` do not fit the tree; an array to adopt is none, was deleted, is on another device, or
            has its axes in memory in another order; or as `KVLayout.from_stacked`.
        CapacityError: too little GPU memory.
        ClosedError: a device is closed, or this is a forked child.
        After any error nothing stays allocated.
    """

    # Truth: `_parts`, which no interrupt can lose. Derived: `_latest`, `_followed`, `_replaced`, `_renewing`, `_given`,
    # changed together by assignments that no interrupt can separate. An import that is interrupted before these is done
    # again, as after a lost step if it had donated the arrays already (`_renewing`).

    def __init__(
        self,
        devices: Device | Sequence[Device],
        shapes: Any,
        dtype: DTypeLike | None = None,
        *,
        sharding: Any = None,
        adopt: bool = False,
        plane_axis: SupportsIndex | None,
        block_axis: SupportsIndex,
        groups: Any = 0,
        tokens_per_block: SupportsIndex | None = None,
        block_axes: Sequence[str] | None = None,
        blocks_per_slot: SupportsIndex = 1,
        slot_order: SlotOrder | None = None,
    ) -> None:
        jax = import_jax()
        several = isinstance(devices, Sequence)
        if not several and not isinstance(devices, Device):
            raise TypeError(f"devices must be a device from open_device(), or a list of them, got {shown(devices)}")
        self.devices = checked_devices(devices if several else (devices,))
        self._leaves, self._structure, given = as_leaves(shapes, dtype, sharding, groups, several=several)
        self._jax_devices = jax_devices(self.devices, self._leaves)
        paged = Description(plane_axis, block_axis, dtype, tokens_per_block, block_axes, blocks_per_slot, slot_order)
        paged.check(self._leaves, len(self.devices))
        self._simulated = any(device.simulated for device in self.devices)
        for leaf, array in zip(self._leaves, given, strict=True) if flag("adopt", adopt) else ():
            leaf.check_array(array, "adopt=True takes the arrays of your cache")
        self.memories: tuple[DeviceBuffer, ...] = ()
        if not adopt or self._simulated:
            self.memories = zeroed(self.devices, self._leaves[-1].offset + self._leaves[-1].nbytes)
        self._parts: list[list[Any]] = [  # of each leaf, the memory on each device
            [DeviceArray(memory, leaf.shard_shape, leaf.dtype, offset=leaf.offset) for memory in self.memories]
            or [Adopted(*each, leaf.name) for each in zip(self._shards(array), self.devices, strict=True)]
            for leaf, array in zip(self._leaves, given, strict=True)
        ]
        if adopt and self._simulated:
            self._copy_to_device(given)
        on_devices = list(zip(*self._parts, strict=True))
        layouts = [paged.layout(self._leaves, parts) for parts in on_devices]
        self._where = list(map(_start, on_devices[0]))
        self._ends = [
            (min(map(_start, parts)), max(part.address + part.nbytes for part in parts)) for parts in on_devices
        ]
        self.layout: Any = ShardedLayout(layouts) if several else layouts[0]
        self.nbytes = sum(leaf.nbytes for leaf in self._leaves) * len(self.devices)
        forms = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding) for each in self._leaves]
        self.shapes, self._forms = self._structure.unflatten(forms), list(map(_form, forms))
        self.sharding = self._structure.unflatten([leaf.sharding for leaf in self._leaves])
        self._meshes = meshes_of(self._leaves)
        self._tokens = [device.empty((1,), "uint8") for device in self.devices]
        self._producers: tuple[Any, Sequence[Any]] = (None, ())  # what a transfer follows, for these arrays
        self._renewing = False
        self._given = True  # to the user, since they were set: a step may have taken them
        self._replaced: Sequence[Any] = ()  # arrays that must be deleted
        self._latest = self._import([None] * len(self._leaves))
        self._followed, self._types = self._transfers(), list(map(_type, self._latest))
        self._orders = list(map(_order, self._latest))

    @property
    def arrays(self) -> Any:
        """The cache in JAX: an array or the tree of arrays. JAX's computations with it wait for all transfers that were
        submitted before you read it. If any were submitted since the last read, you get new arrays of the same memory,
        and the previous ones are deleted.

        Set it to the result of every update, which must have taken the arrays as a donated argument. If you read it
        without having set that result, the host waits for JAX, and the memory is imported as it is, with a warning.

        Raises:
            LayoutError: you set another tree; or an array in it has another address, order of axes, shape, dtype or
                sharding, was deleted, or is no `jax.Array`. The cache stays as it was.
            TransferError: you set arrays that were computed concurrently with transfers, on a simulated device; or you
                read them, and the CUDA context is lost.
            CapacityError: you read them, and after a second transfers still wait on the host, since the driver's queues
                are full: `poll` the engine.
            ClosedError: you read them, and a device is closed, or this is a forked child. (On a simulated device you
                cannot set them then, either.)
        """
        return self._structure.unflatten(self._ordered())

    @arrays.setter
    def arrays(self, new: Any) -> None:
        leaves = self._checked(new)
        if self._simulated:  # JAX on the CPU updates no imported memory in place
            if self._transfers() != self._followed:
                raise TransferError(
                    "array was computed concurrently with transfers, which a simulated device cannot do"
                )
            for engine in itertools.chain(*self._engines()):
                engine.drain()
            self._copy_to_device(leaves)
        self._latest, self._renewing, self._given = leaves, False, False

    def _follow_transfers(self) -> None:
        """Have `arrays` follow the transfers submitted so far, as reading it does. If a step has the arrays now, this
        does nothing: you read them after you have set its result.
        """
        if not self.is_deleted():
            self._ordered()

    @property
    def unordered(self) -> Any:
        """The arrays, for computing concurrently with transfers: JAX does not wait for transfers that were submitted
        since you last read `arrays`. Such a computation must not touch blocks that are being loaded, nor write blocks
        that are being stored. The next read of `arrays` after a transfer deletes them. It is the same as `arrays` on a
        simulated device, and on any device once the arrays have been donated, until you set the result: it recovers the
        memory, warns, and raises as that does.
        """
        self._given = True
        return self._structure.unflatten(self._ordered() if self._simulated or self.is_deleted() else self._latest)

    def is_deleted(self) -> bool:
        """Return whether an array of the cache was donated or deleted, and no result has been set since."""
        return any(map(_is_deleted, self._latest))

    def after(self, *results: Any) -> tuple[Any, ...]:
        """Return arrays for the argument `after` of a transfer, which then follows the last update and `results`.
        Without results it is the same as `after=cache`.

        Use the arrays before the next update. Only a load needs results: it overwrites blocks that their computations
        may still read. The host does not wait for the GPU.

        Args:
            results: `jax.Array`s of computations that read the cache since its last update, such as logits, sharded or
                replicated. A result on some of the devices is followed there.

        Returns:
            The arrays: one or more that are ready when all of the cache are, and the results. For a cache on a list of
            devices, also of one, a tuple of arrays for each device, in their order.

        Raises:
            ValueError: the cache was donated and its update was not set; or one of `results` was deleted, or is on none
                of the devices.
            TypeError: one of `results` is no `jax.Array`.
        """
        if self.is_deleted():
            raise ValueError(
                "the cache's array was donated, and no result was set: set cache.arrays to the result of the update; "
                "if it is lost, read cache.arrays, which recovers the memory"
            )
        given = [shards_of(array) for array in self._followed_arrays()]
        here = self._jax_devices or tuple(given[0])
        for index, result in enumerate(results):
            check_jax_array(f"results[{index}]", result)
            given.append(shards_of(result))
            if given[-1].keys().isdisjoint(here):
                raise ValueError(f"results[{index}] is on {list(given[-1])}, and the cache on {list(here)}")
        followed = tuple(tuple(shards[device] for shards in given if device in shards) for device in here)
        return followed if isinstance(self.layout, ShardedLayout) else followed[0]

    # after=cache, for an engine of one device; a sharded engine calls `after`

    def __dlpack_device__(self) -> tuple[int, int]:
        if len(self.devices) > 1:
            raise BufferError(
                f"the cache is on {len(self.devices)} devices, and a transfer of one of them cannot follow all: pass "
                "after=cache to a ShardedEngine, or after=cache.after()[number] to the engine of that device"
            )
        kind, index = self._latest[0].__dlpack_device__()
        return int(kind), int(index)

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        """For `after=cache`: make a stream wait for the computations that made the arrays."""
        capsules = [follow(array, stream) for array in self._followed_arrays()]
        return capsules[-1]

    def _followed_arrays(self) -> Sequence[Any]:
        """Return arrays that are ready when all of the cache are; see the module."""
        latest = self._latest
        if len(latest) == 1:
            return latest
        if self._producers[0] is not latest:
            self._producers = latest, [mesh.ready([latest[index] for index in mesh.indices]) for mesh in self._meshes]
        return self._producers[1]

    # reading

    def _ordered(self) -> Sequence[Any]:
        self._delete_replaced()
        transfers = self._transfers()
        submitted = transfers != self._followed
        if (self._given or submitted) and self.is_deleted():
            # a step may still be writing the memory; or `_copy_to_device`, if it was interrupted
            wait_for_computations(self._latest[0])
            for device in self.devices if self._simulated else ():
                with device.current():
                    device.driver.stream_synchronize(LEGACY_STREAM)
            renewing = self._renewing
            self._replace(self._latest, self._import([None] * len(self._leaves)), transfers)
            if not renewing:
                warnings.warn(
                    "array was donated and no result was set; the host has waited for JAX and imported the memory "
                    "anew. Set cache.arrays to the result of every step",
                    KVOffloadWarning,
                    stacklevel=3,
                )
        elif submitted:
            engines = [None if self._simulated else users for users in self._engines()]
            shards = [import_memory(token, None, users) for token, users in zip(self._tokens, engines, strict=True)]
            new = list(self._import(self._latest) if self._simulated else self._latest)
            self._renewing = True
            for mesh in self._meshes:
                token = self._join((len(shards),), mesh.sharding, shards)
                renewed = mesh.renewed([new[index] for index in mesh.indices], token)
                for index, array in zip(mesh.indices, renewed, strict=True):
                    new[index] = array
            self._replace(self._latest if self._simulated else (), new, transfers)
        self._given = True
        return self._latest

    def _replace(self, old: Sequence[Any], new: Sequence[Any], transfers: frozenset[Any]) -> None:
        self._replaced, self._latest, self._followed, self._renewing = old, new, transfers, False
        self._delete_replaced()

    def _delete_replaced(self) -> None:
        for array in self._replaced:
            array.delete()
        self._replaced = ()

    def _import(self, previous: Sequence[Any]) -> Sequence[Any]:
        """Import the memory as new arrays. Computations with them follow the transfers so far, and on each device the
        computations of `previous`: an array or None for each leaf."""
        arrays = []
        for leaf, parts, array in zip(self._leaves, self._parts, previous, strict=True):
            after = [None] * len(parts) if array is None else self._shards(array)
            shards = list(map(import_memory, parts, after))
            arrays.append(self._join(leaf.shape, leaf.sharding, shards))
        return arrays

    def _join(self, shape: tuple[int, ...], sharding: Any, shards: list[Any]) -> Any:
        if sharding is None:
            return shards[0]
        jax = import_jax()
        if self._simulated:  # JAX imports memory of the host on its first CPU device
            shards = [jax.device_put(shard, device) for shard, device in zip(shards, self._jax_devices, strict=True)]
            jax.block_until_ready(shards)
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    def _shards(self, array: Any) -> list[Any]:
        """Return the shard of an array on each device, in the order of the devices."""
        if not self._jax_devices:
            return [array]
        shards = shards_of(array)
        return [shards[device] for device in self._jax_devices]

    def _addresses(self, array: Any) -> list[int]:
        return [address_of(shard) for shard in self._shards(array)]

    def _engines(self) -> list[list[DeviceUser]]:
        """Return for each device the engines over the memory there."""
        ranges = zip(self.devices, self._ends, strict=True)
        return [device.engines_over(start, end - start) for device, (start, end) in ranges]

    def _transfers(self) -> frozenset[tuple[weakref.ref[Any], int]]:
        """Return how many transfers each engine over this memory was given; differs after each of them."""
        engines = itertools.chain(*self._engines())
        return frozenset((weakref.ref(engine), count) for engine in engines if (count := engine.submitted))

    # setting

    def _checked(self, new: Any) -> Sequence[Any]:
        """Return the arrays of an update, in the order of the tree. Raises LayoutError, see `arrays`."""
        try:
            arrays: Sequence[Any] = self._structure.flatten_up_to(new)
        except ValueError:
            found = import_jax().tree.structure(new)
            raise LayoutError(
                f"arrays must be the tree {self._structure}, got {found}: set the updated cache"
            ) from None
        # 1. A quick look at arrays on one device, some 150 us for 64, most of it for the order of their axes in memory:
        # XLA also gives donated memory to a result with another order. On the CPU it could hang: see `address_of`.
        try:
            where = [] if self._simulated else list(map(_address, arrays))
            types, orders = list(map(_type, arrays)), [] if self._simulated else list(map(_order, arrays))
        except Exception:  # noqa: BLE001  # no arrays, deleted ones, arrays on several devices
            where, types, orders = [], [], []
        in_place = where == self._where and orders == self._orders and len(self.devices) == 1
        # The results of one jitted function have the same objects for types each time.
        if in_place and (all(map(operator.is_, types, self._types)) or list(map(_form, arrays)) == self._forms):
            self._types = types
            return arrays
        # 2. If something differs, or cannot be seen like that: look closely.
        for leaf, array in zip(self._leaves, arrays, strict=True):
            leaf.check_array(array)
        for leaf, parts, array, present in zip(self._leaves, self._parts, arrays, self._latest, strict=True):
            where = self._addresses(array)
            # JAX on the CPU copies imported memory to update it, and deletes it if it was donated
            if self._simulated and not present.is_deleted() and where != self._addresses(present):
                raise LayoutError(
                    f"{leaf.name} is no update in place: the cache's array was not donated to it, which makes a copy "
                    f"on a GPU. {how_to_donate()}"
                )
            for device, part, found in zip(self.devices, parts, where, strict=True):
                if found != part.address and not self._simulated:
                    raise LayoutError(
                        f"{leaf.name} lies at {found:#x} on device {device.index}, and the cache at "
                        f"{part.address:#x}: the update made a copy. Use the array for nothing else meanwhile. "
                        f"{how_to_donate()}"
                    )
        return arrays

    def _copy_to_device(self, arrays: Sequence[Any]) -> None:
        for leaf, parts, array in zip(self._leaves, self._parts, arrays, strict=True):
            for part, shard in zip(parts, self._shards(array), strict=True):
                if address_of(shard) != part.address:  # else it is imported, as it was read
                    part.buffer.copy_from(np.asarray(shard).view(np.uint8).reshape(-1), offset=leaf.offset)

    def __repr__(self) -> str:
        first = self._leaves[0]
        count = "" if first.name == "array" else f"{len(self._leaves)} arrays, first "
        spec = "" if first.sharding is None else f", {first.sharding.spec}"
        indices = [device.index for device in self.devices]
        return f"OwnedCache({count}{first.shape}, {first.dtype}{spec}, devices {indices})"

"""open_cache: a cache over your arrays in one call, which owns all that is below it.

    with kvoffload.open_cache(arrays, axes=AXES, pool_bytes=64 << 30, disk=path, ...) as cache:
        keys = cache.keys(tokens, salt="tenant")
        job = cache.fetch(keys, blocks, after=stream)       # leading keys that are worth it, from wherever they are
        job.order_before(stream)                            # compute what is after the first job.hits
        cache.keep(keys, blocks, after=stream)              # once the rest is computed

There is no second cache: `open_cache` makes the objects that you could make yourself, and returns the `BlockCache`.
`fetch`, `keep` and `keys` are methods of every BlockCache. `fetch` is a `promote` with a load behind it, and `FetchJob`
is the handle on both. So what holds for these holds here: no key is visible without its bytes, a tier that fails or
hangs shortens a fetch, and dropped handles release their leases.

    open_cache      makes, from below:    layout   (shared pool)   device   engine   cache (which attaches the tiers)
    cache.close     closes, from above:   tiers (their thread ends; loads of fetches are submitted)   engine   device
                                          (shared pool)

The engine is closed even if a call of a tier hangs: the pool's memory stays mapped as long as the tier refers to it. If
`open_cache` raises or is interrupted, it closes what it has made, from above. If an interrupt loses the engine that a
constructor has returned, the device's close frees it, or the next call of a device that is not ours.

Only what you name is made: a device that you pass, or that an array or `OwnedCache` comes from, stays yours.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, TypedDict, Unpack, cast

from kvoffload.cache.block_cache import BlockCache
from kvoffload.cache.policies import DEFAULT_POLICY, PolicyChoice
from kvoffload.cache.pools import Tenant
from kvoffload.device.device import Device, checked_devices, open_device
from kvoffload.device.growth import Growing
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.sharded import ShardedEngine
from kvoffload.errors import LayoutError
from kvoffload.internal.checks import shown, size
from kvoffload.internal.teardown import run_all
from kvoffload.layout.layout import KVLayout, ShardedLayout

if TYPE_CHECKING:  # what is imported where there are tiers, or a shared pool
    from kvoffload.cache.tiering.tier import Tier
    from kvoffload.pool.shared_pool import SharedPool


class CacheOptions(TypedDict, total=False):
    """What `open_cache` passes on to `BlockCache`."""

    policy: PolicyChoice
    tenants: Mapping[str, Tenant] | None
    prefill_tokens_per_second: float | None


def open_cache(
    arrays: Any,
    *,
    pool_bytes: int | str | Growing | None = None,
    pool: str | Path | SharedPool | None = None,
    axes: Sequence[str] | None = None,
    blocks_per_slot: SupportsIndex = 1,
    device: Device | Sequence[Device] | int | None = None,
    disk: str | Path | Sequence[str | Path] | None = None,
    disk_bytes: int | str = 0,
    identity: str | None = None,
    tiers: Sequence[Tier] = (),
    **options: Unpack[CacheOptions],
) -> BlockCache[Any]:
    """Open a cache of the blocks of your KV cache in pinned host memory, and on a disk. Close it, or use it in `with`.

    `fetch` loads what it has, `keep` stores, `keys` computes keys. Below are `cache.engine`, `cache.engine.devices` and
    `cache.engine.layout`. For options that are not here, make those yourself, as `BlockCache` says.

    Args:
        arrays: an array in GPU memory, or a tree of them: lists, tuples and dicts, with an array a layer, say (CuPy,
            Numba, PyTorch, `DeviceArray`). All share one block table. Or a `KVLayout` or `ShardedLayout`, with as many
            groups as you like; or an object that has a `layout` and `devices`, such as `kvoffload.jax.OwnedCache`. The
            memory must stay where it is until the cache is closed.
        pool_bytes: bytes of pinned host memory, on all devices together; also as text, "64GiB". A key takes a slot for
            each group: see `layout.slot_bytes`. `Growing(nbytes)`: this call returns once the first of them are pinned,
            and the cache has more entries as the rest is. Give this, or `pool`.
        pool: instead, a pool that engines of this host share, each over one device: the path of its owner's socket,
            with `identity` (start the owner first: `kvoffload pool serve`); or a `SharedPool` attached to this layout,
            which you close after the cache. Of the rest give only axes, blocks_per_slot and device: its owner decides.
        axes: for arrays, what each axis counts: "blocks", and where there are such axes "planes" (K and V, layers) and
            "tokens". The others are the axes of a block; call them what you like, but the same in all programs that
            share stored bytes: `("planes", "blocks", "tokens", "heads", "dim")`. Keys need "tokens".
        blocks_per_slot: for arrays, how many blocks a key stands for.
        device: the arrays' open device, or a list; it stays yours. A number: opens that GPU. None: theirs, else GPU 0.
        disk: a file, or a folder that exists (then the file `kvoffload` in it), or several on different disks, see
            `DiskTier`; created if missing. It needs the next two. To begin anew, delete the files.
        disk_bytes: size of all files together; also as text, "1TiB".
        identity: a text for everything but the layout that the bytes depend on, such as model and revision. A disk with
            another identity is refused; in a shared pool each identity has keys and memory of its own.
        tiers: more tiers, below the disk. The cache closes them; if this call raises, close them yourself.

    Keyword Args:
        policy, tenants: as for `BlockCache`.
        prefill_tokens_per_second: how fast the model computes. `fetch` then loads keys from tiers only where that is
            faster. None: measured, see `BlockCache`.

    Raises:
        LayoutError: an array is not in GPU memory, or does not have these axes; or as for `KVLayout` and `DiskTier`.
        CapacityError: `pool_bytes` is above 0 and holds no key, or cannot be pinned; or there is too little disk.
        ValueError, TypeError, FileNotFoundError: an argument, such as a `pool` without a socket.
        The others of `open_device`, `OffloadEngine`, `DiskTier`, `SharedPool.attach`, `BlockCache`. Nothing stays open.
    """
    layout = arrays if isinstance(arrays, KVLayout | ShardedLayout) else getattr(arrays, "layout", None)
    if not isinstance(layout, KVLayout | ShardedLayout):
        layout = KVLayout.from_tree(arrays, axes=() if axes is None else axes, blocks_per_slot=blocks_per_slot)
    elif axes is not None or blocks_per_slot != 1:
        raise ValueError(f"axes and blocks_per_slot are for arrays, and arrays={shown(arrays)} has a layout")
    devices = _devices_of(arrays, layout, device)
    return _make(layout, devices, (pool_bytes, pool), (disk, disk_bytes, identity), tiers=tiers, **options)


def _make(
    layout: KVLayout | ShardedLayout,
    devices: tuple[Device, ...] | int,
    memory: tuple[Any, Any],
    files: tuple[Any, Any, Any],
    *,
    tiers: Sequence[Tier],
    **options: Any,
) -> BlockCache[Any]:
    if unknown := options.keys() - CacheOptions.__annotations__.keys():
        raise TypeError(f"open_cache() got an unexpected keyword argument {min(unknown)!r}; BlockCache has more")
    (pool_bytes, pool), (disk, disk_bytes, identity) = memory, files
    disk_bytes = size("disk_bytes", disk_bytes, 0)
    opened = list[Callable[..., Any]]()  # the `close` of each
    if pool is not None:
        given = {"pool_bytes": pool_bytes, "disk": disk, "disk_bytes": disk_bytes, "tiers": tiers, **options}
        _check_shared(pool, layout, identity, given)
    elif (disk is None) != (disk_bytes == 0) or (disk is None) != (identity is None):
        raise ValueError(
            "disk needs disk_bytes, the size of its files, and identity, which names the model, and these need disk, "
            f'a path: disk_bytes=1 << 40, identity="llama-3.1-8b@0e9e39f"; got disk={shown(disk)}, '
            f"disk_bytes={shown(disk_bytes)}, identity={shown(identity)}"
        )
    elif not isinstance(pool_bytes, Growing):
        size("pool_bytes (or pool)" if pool_bytes is None else "pool_bytes", pool_bytes, 0)
    if disk is not None:
        from kvoffload.tiers.disk import DiskTier

        opened.append((below := DiskTier(disk, nbytes=disk_bytes, identity=identity)).close)
        tiers = [below, *tiers]
    try:
        slots = {"pool_bytes": pool_bytes}
        if pool is not None:
            from kvoffload.pool.messages import socket_path
            from kvoffload.pool.shared_pool import SharedPool

            if not isinstance(pool, SharedPool):
                if not Path(path := socket_path(pool)).is_socket():
                    start = f"there is no socket; start its owner first: `kvoffload pool serve {path} --bytes 64GiB`"
                    raise FileNotFoundError(errno.ENOENT, start, path)
                pool = SharedPool.attach(pool, cast(KVLayout, layout), identity=identity)
                opened.append(lambda *_: pool.close())
            options["pool"] = pool
            slots = {"host_memory": pool.host_memory}
        if isinstance(devices, int):
            opened.append((device := open_device(devices)).close)
            devices = (device,)
        engine: Any
        if isinstance(layout, ShardedLayout):
            engine = ShardedEngine(layout, devices=devices, **slots)
        else:
            engine = OffloadEngine(layout, device=devices[0], **slots)
        opened.append(engine.close)
        cache = BlockCache(engine, tiers=tiers, **options)
        cache._owned = tuple(reversed(opened))
    except BaseException:
        run_all(reversed(opened))
        raise
    return cache


def _check_shared(pool: Any, layout: KVLayout | ShardedLayout, identity: Any, given: dict[str, Any]) -> None:
    """Raise ValueError, LayoutError: what was given with a shared pool is its owner's, or does not go with it."""
    if refused := [name for name, value in given.items() if value not in (None, 0, (), [], DEFAULT_POLICY)]:
        raise ValueError(
            f"{' and '.join(refused)} cannot be given with pool, whose owner decides: leave it out, or give its owner "
            "what `kvoffload pool serve --help` or PoolOwner names"
        )
    if isinstance(layout, ShardedLayout):
        raise LayoutError("a shared pool is for engines over one device each, and the layout is over several")
    if isinstance(pool, str | os.PathLike) != (identity is not None):
        raise ValueError(
            "pool needs identity, which names the model, if it is the path of an owner's socket; a SharedPool has been "
            f"attached with one: got pool={shown(pool)}, identity={shown(identity)}"
        )


def _devices_of(arrays: Any, layout: KVLayout | ShardedLayout, device: Any) -> tuple[Device, ...] | int:
    """Open devices of the caller's, or the number of the one to open."""
    if device is None and getattr(arrays, "layout", None) is layout:
        device = arrays.devices
    elif device is None and isinstance(layout, KVLayout):
        owner = layout.groups[0].planes[0].owner  # memory of ours knows its device, and so does an array with DLPack
        device = getattr(getattr(owner, "buffer", owner), "device", None)
        if not isinstance(device, Device):
            device = int(owner.__dlpack_device__()[1]) if hasattr(owner, "__dlpack_device__") else 0
    if isinstance(layout, KVLayout) and isinstance(device, int) and not isinstance(device, bool):
        return device
    devices = checked_devices((device,) if isinstance(device, Device) else device, "device")
    wanted = len(layout.layouts) if isinstance(layout, ShardedLayout) else 1
    if len(devices) != wanted:
        raise ValueError(f"device must be the open devices of the layout, {wanted} of them, got {shown(device)}")
    return devices

"""Memory that other allocators of the process made, and the driver calls that say on which GPU it is."""

# ruff: noqa: N802, N803 (names and signatures are CUDA's)

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from cuda.bindings import driver as cuda

from kvoffload.simulator.calls import INVALID_VALUE, Core, Needs, driver_call, integer
from kvoffload.simulator.contexts import Context
from kvoffload.simulator.errors import RefusedError
from kvoffload.simulator.memory import Kind, Region

_FIRST_POOL = 0xA_0000_0000
_FIRST_HANDLE = 0xB_0000_0000
_ALIGNMENT = 512


class Allocator(Enum):
    """What made memory that `SimulatedDriver.allocate_outside` returns."""

    DEFAULT_POOL = "default pool"  # cuMemAllocAsync
    OWN_POOL = "own pool"  # cuMemPoolCreate and cuMemAllocFromPoolAsync
    MAPPED = "mapped"  # cuMemCreate and cuMemMap
    UNKNOWN = "unknown"  # such as cuMemAllocManaged: the driver reports neither context nor pool


class Pool(NamedTuple):
    handle: int
    device: int
    readers: tuple[int, ...]  # devices that can access it


class OutsideCalls(Core):
    """Driver calls about pools and mapped memory.

    Attributes:
        device_ordinal_works: whether CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL is right; False: 0, as several releases of
            the bindings answer for all memory.
        pools_report_their_device: whether pools have the attributes CU_MEMPOOL_ATTR_LOCATION_TYPE and _ID, of CUDA 13.
    """

    device_count: int
    device_ordinal_works: bool
    pools_report_their_device: bool
    _pools: dict[int, Pool]
    _pool_of: dict[int, int]
    _retained: dict[int, Region]
    _outside: dict[int, Context]

    # for tests

    def allocate_outside(
        self,
        nbytes: int,
        device: int,
        allocator: Allocator | str,
        *,
        readers: tuple[int, ...] = (),
        handle_bytes: int | None = None,
    ) -> int:
        """Allocate device memory as another library does; returns the address. Free it with `free_outside`.

        Args:
            nbytes: bytes.
            device: the GPU that it is on.
            allocator: what makes it.
            readers: of "own pool": other devices that can access it.
            handle_bytes: of "mapped": what each handle maps, the last one what is left; by default one maps all.
        """
        (address,) = self.allocate_adjacent([nbytes], [device], allocator, readers=readers, handle_bytes=handle_bytes)
        return address

    def allocate_adjacent(
        self,
        sizes: Sequence[int],
        devices: Sequence[int],
        allocator: Allocator | str,
        *,
        readers: tuple[int, ...] = (),
        handle_bytes: int | None = None,
    ) -> list[int]:
        """Like `allocate_outside`, several at addresses that follow each other. Free each with `free_outside`.

        No copy may cross from one to the next. Of "mapped" memory, one that is freed leaves a gap.

        Args:
            sizes: bytes of each.
            devices: the GPU that each is on.
            allocator, readers, handle_bytes: as of `allocate_outside`.
        """
        with self.lock:
            made_by = Allocator(allocator)
            contexts = [self._outside.setdefault(each, Context(0, each, primary=False)) for each in devices]
            regions = self.memory.allocate_adjacent(Kind.DEVICE, sizes, _ALIGNMENT, contexts)
            for region in regions:
                if made_by is Allocator.DEFAULT_POOL:
                    self._pool_of[region.base] = self._default_pool(region.context.device)
                elif made_by is Allocator.OWN_POOL:
                    pool = _FIRST_POOL + 4096 + len(self._pools)
                    device = region.context.device
                    self._pools[pool] = Pool(pool, device, (device, *readers))
                    self._pool_of[region.base] = pool
                elif made_by is Allocator.MAPPED:
                    region.handle_bytes = handle_bytes or region.nbytes
            return [region.base for region in regions]

    def free_outside(self, address: int) -> None:
        with self.lock:
            region = self.memory.at(address)
            assert region is not None, "freed twice"
            assert region.context.handle == 0, "cuMemAlloc made it"
            self._pool_of.pop(region.base, None)
            self.free_region(region)

    # driver calls

    def pointer_attribute(self, attribute: Any, region: Region) -> Any:
        """The attributes of a pointer that say where its memory is."""
        names = cuda.CUpointer_attribute
        if attribute == names.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            return (region.context.device if self.device_ordinal_works else 0,)
        if attribute == names.CU_POINTER_ATTRIBUTE_CONTEXT:
            return (cuda.CUcontext(region.context.handle),)
        if attribute == names.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
            return (cuda.CUmemoryPool(self._pool_of.get(region.base, 0)),)
        return INVALID_VALUE

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuMemRetainAllocationHandle(self, addr: Any) -> Any:
        region = self.memory.at(integer(addr))
        if region is None or not region.handle_bytes:
            return INVALID_VALUE
        handle = _FIRST_HANDLE + len(self._retained) + 1
        self._retained[handle] = region
        return (cuda.CUmemGenericAllocationHandle(handle),)

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuMemGetAllocationPropertiesFromHandle(self, handle: Any) -> Any:
        region = self._retained.get(integer(handle))
        if region is None:
            return INVALID_VALUE
        properties = cuda.CUmemAllocationProp()
        properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = region.context.device
        return (properties,)

    @driver_call(needs=Needs.DRIVER)
    def cuMemRelease(self, handle: Any) -> Any:
        return None if self._retained.pop(integer(handle), None) is not None else INVALID_VALUE

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuDeviceGetDefaultMemPool(self, dev: Any) -> Any:
        return (cuda.CUmemoryPool(self._default_pool(integer(dev))),)

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuDeviceGetMemPool(self, dev: Any) -> Any:
        return (cuda.CUmemoryPool(self._default_pool(integer(dev))),)

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuMemPoolGetAttribute(self, pool: Any, attr: Any) -> Any:
        found = self._pool(pool)
        names = cuda.CUmemPool_attribute
        if self.pools_report_their_device and attr == getattr(names, "CU_MEMPOOL_ATTR_LOCATION_TYPE", None):
            return (int(cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE),)
        if self.pools_report_their_device and attr == getattr(names, "CU_MEMPOOL_ATTR_LOCATION_ID", None):
            return (found.device,)
        return INVALID_VALUE

    @driver_call(values=1, needs=Needs.DRIVER)
    def cuMemPoolGetAccess(self, memPool: Any, location: Any) -> Any:
        flags = cuda.CUmemAccess_flags
        accessible = int(location.id) in self._pool(memPool).readers
        return (flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if accessible else flags.CU_MEM_ACCESS_FLAGS_PROT_NONE,)

    def _default_pool(self, device: int) -> int:
        if not 0 <= device < self.device_count:
            raise RefusedError(cuda.CUresult.CUDA_ERROR_INVALID_DEVICE)
        pool = Pool(_FIRST_POOL + 16 * (device + 1), device, (device,))
        self._pools[pool.handle] = pool
        return pool.handle

    def _pool(self, handle: Any) -> Pool:
        try:
            return self._pools[integer(handle)]
        except KeyError:
            raise RefusedError(INVALID_VALUE) from None

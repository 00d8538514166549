"""Asks the driver on which GPU the memory of a pointer is. A context must be current.

The driver functions are `functions.OPTIONAL`. CapabilityError: the bindings lack the function or the attribute.
DriverError: the driver has no answer.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from kvoffload.driver.core import Driver
from kvoffload.errors import CapabilityError

DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
_DEVICE_LOCATION = 1  # CU_MEM_LOCATION_TYPE_DEVICE


Attribute: TypeAlias = Literal["CONTEXT", "DEVICE_ORDINAL", "MEMORY_TYPE", "MEMPOOL_HANDLE"]


def attribute(driver: Driver, name: Attribute, address: int) -> int:
    """Return what the driver says of a pointer: CU_POINTER_ATTRIBUTE_ with this name.

    CONTEXT: that of its allocation; 0 for memory of asynchronous pools and for mapped memory. MEMPOOL_HANDLE: 0 for
    memory that is of no pool. MEMORY_TYPE: `DEVICE_MEMORY`, or another number for pinned host memory.
    """
    from cuda.bindings.driver import CUpointer_attribute

    kind = _member(CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
    return int(driver.call("cuPointerGetAttribute", kind, address))


def mapped_memory_device(driver: Driver, address: int) -> int | None:
    """Return the GPU of mapped virtual memory (cuMemCreate and cuMemMap); None if it is host memory.

    "If the address requested is not mapped, the function will fail. The returned handle must be released":
    cuMemRetainAllocationHandle in the CUDA driver API, Virtual Memory Management. `address` may be anywhere in the
    range of the handle.

    Raises:
        DriverError: `address` is not mapped virtual memory, but that of cuMemAlloc or of a pool, or nothing at all.
    """
    handles: list[Any] = []
    _require(driver, "cuMemRetainAllocationHandle", "cuMemGetAllocationPropertiesFromHandle", "cuMemRelease")
    try:
        driver.create("cuMemRetainAllocationHandle", handles, address)
        location = driver.call("cuMemGetAllocationPropertiesFromHandle", handles[0]).location
        return int(location.id) if int(location.type) == _DEVICE_LOCATION else None
    finally:
        driver.destroy("cuMemRelease", handles)


def device_pools(driver: Driver, device: int) -> tuple[int, int]:
    """Return the default and the current memory pool of a GPU; both contain its own memory only."""
    _require(driver, "cuDeviceGetDefaultMemPool", "cuDeviceGetMemPool")
    return int(driver.call("cuDeviceGetDefaultMemPool", device)), int(driver.call("cuDeviceGetMemPool", device))


def pool_device(driver: Driver, pool: int) -> int:
    """Return the GPU of a memory pool: an attribute that came with CUDA 13."""
    kind = _pool_attribute(driver, "CU_MEMPOOL_ATTR_LOCATION_TYPE", pool)
    if kind != _DEVICE_LOCATION:
        raise CapabilityError(f"the memory pool {pool:#x} is in no GPU's memory (location type {kind})")
    return _pool_attribute(driver, "CU_MEMPOOL_ATTR_LOCATION_ID", pool)


def pool_is_accessible(driver: Driver, pool: int, device: int) -> bool:
    """Return whether a GPU can access the memory of a pool; it always can access that of its own pools."""
    from cuda.bindings.driver import CUmemLocation, CUmemLocationType

    _require(driver, "cuMemPoolGetAccess")
    location = CUmemLocation()
    location.type = CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return int(driver.call("cuMemPoolGetAccess", pool, location)) != 0


def _pool_attribute(driver: Driver, name: str, pool: int) -> int:
    from cuda.bindings.driver import CUmemPool_attribute

    _require(driver, "cuMemPoolGetAttribute")
    return int(driver.call("cuMemPoolGetAttribute", pool, _member(CUmemPool_attribute, name)))


def _member(kind: Any, name: str) -> Any:
    try:
        return getattr(kind, name)
    except AttributeError:
        raise CapabilityError(f"these bindings have no {name}") from None


def _require(driver: Driver, *names: str) -> None:
    absent = [name for name in names if not driver.has(name)]
    if absent:
        raise CapabilityError(f"these bindings have no {', '.join(absent)}")

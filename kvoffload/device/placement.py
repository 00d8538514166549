"""On which GPU a pointer's memory is.

`CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL` would say it, but several releases of cuda.bindings answer 0 for every pointer
(https://github.com/NVIDIA/cuda-python/issues/2928). Every other answer of theirs is right. For 0 there are four cases:

1. Memory of a context (cuMemAlloc, and so most memory): `CU_POINTER_ATTRIBUTE_CONTEXT` names it, and it has one device.
2. Mapped virtual memory (cuMemCreate and cuMemMap): its allocation handle has a location.
3. Memory of an asynchronous pool (cuMemAllocAsync) belongs to no context. Its pool says where it is (drivers of CUDA
   13 only), or is the default or the current pool of a device, or is accessible from one device alone.
4. Anything else, such as managed memory: it cannot be known.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvoffload.device.current import make_current
from kvoffload.driver import Driver, pointers
from kvoffload.errors import CapabilityError, DriverError, KVOffloadError

T = TypeVar("T")


class UnknownPlaceError(Exception):
    """The device of a pointer cannot be determined; the text says why."""


def device_of(driver: Driver, address: int, device_count: int) -> int:
    """The GPU that holds `address`, as CUDA counts them; a context must be current.

    Raises:
        UnknownPlaceError: neither the driver nor the bindings report it.
        DriverError: the context is lost.
    """
    if device_count == 1:
        return 0
    try:
        ordinal = driver.device_ordinal(address)
        if ordinal != 0:
            return ordinal
        context = pointers.pointer_context(driver, address)
        if context:
            with make_current(driver, context):
                return int(driver.call("cuCtxGetDevice"))
    except (DriverError, CapabilityError) as error:
        _raise_sticky(error)
        raise UnknownPlaceError(str(error)) from error
    mapped = _ask(partial(pointers.mapped_memory_device, driver, address))
    if mapped is not None:
        return mapped
    pool = _ask(partial(pointers.pointer_pool, driver, address))
    if not pool:
        raise UnknownPlaceError("it belongs to no context, to no memory pool, and is not mapped virtual memory")
    return _device_of_pool(driver, pool, device_count)


def is_mapped_on(driver: Driver, address: int, device: int) -> bool:
    """Whether `address` is virtual memory that cuMemMap mapped to memory of that GPU; a context must be current.

    Raises:
        DriverError: the context is lost.
    """
    return _ask(partial(pointers.mapped_memory_device, driver, address)) == device


def _device_of_pool(driver: Driver, pool: int, device_count: int) -> int:
    for device in range(device_count):
        pools = _ask(partial(pointers.device_pools, driver, device))
        if pools is not None and pool in pools:
            return device
    place = _ask(partial(pointers.pool_device, driver, pool))
    if place is not None:
        return place
    accessible = [
        device
        for device in range(device_count)
        if _ask(partial(pointers.pool_is_accessible, driver, pool, device)) is not False
    ]
    if len(accessible) == 1:  # a device can always access its own pools
        return accessible[0]
    raise UnknownPlaceError(f"its memory pool may be on any of the devices {accessible}")


def _ask(question: Callable[[], T]) -> T | None:
    """The answer, or None where the driver or the bindings have none."""
    try:
        return question()
    except (DriverError, CapabilityError) as error:
        _raise_sticky(error)
        return None


def _raise_sticky(error: KVOffloadError) -> None:
    if isinstance(error, DriverError) and error.sticky:  # the context is lost: every later call fails, too
        raise error

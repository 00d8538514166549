"""In which driver allocation each plane of a layout is, whether a copy may go from one plane to another, and on which
GPU a pointer's memory is.

There are two kinds of device memory:

1. Memory of cuMemAlloc and of pools. cuMemGetAddressRange returns the whole allocation. The driver refuses a strided
   copy from one allocation to another with INVALID_VALUE, also where their addresses follow each other.
2. Virtual memory (cuMemAddressReserve), to which cuMemMap mapped the memory of one handle (cuMemCreate) after another:
   PyTorch does so with `expandable_segments:True`, in handles of 20 MiB. cuMemGetAddressRange returns the range of one
   handle. A strided copy may cross from a handle to the next: on an H200 with a driver of CUDA 13.0 the bytes were
   right, and the bandwidth was that of cuMemAlloc's memory. So ranges that follow each other without a gap, and whose
   memory is on one device, are one allocation here.

The planes are visited in the order of their addresses, so that each range between the first and the last is asked for
once, however many planes it holds.

`CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL` would say on which GPU memory is, but several releases of cuda.bindings answer 0
for every pointer (https://github.com/NVIDIA/cuda-python/issues/2928). Every other answer of theirs is right. For 0
there are four cases:

1. Memory of a context (cuMemAlloc, and so most memory): `CU_POINTER_ATTRIBUTE_CONTEXT` names it, and it has one device.
2. Mapped virtual memory (cuMemCreate and cuMemMap): its allocation handle has a location.
3. Memory of an asynchronous pool (cuMemAllocAsync) belongs to no context. Its pool says where it is (drivers of CUDA
   13 only), or is the default or the current pool of a device, or is accessible from one device alone.
4. Anything else, such as managed memory: it cannot be known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvoffload.driver import Driver, make_current, pointers
from kvoffload.errors import CapabilityError, DriverError, LayoutError
from kvoffload.layout.planes import Plane

T = TypeVar("T")


@dataclass(slots=True)
class Allocation:
    """The addresses `[base, end)`, as far as they are known to be one allocation.

    Attributes:
        mapped: whether it is virtual memory of the device, which may go on after `end`.
        problem: why no plane can be there; empty if one can.
        doubt: why the device of the memory is not known; empty if it is.
        cause: the driver's error behind `problem`.
    """

    base: int
    end: int
    mapped: bool = False
    problem: str = ""
    doubt: str = ""
    cause: DriverError | None = None

    def check(self, plane: Plane, name: str) -> None:
        """Raise LayoutError unless the plane lies in it; the message begins with `name`."""
        if self.problem:
            raise LayoutError(f"{name}: {plane} {self.problem}") from self.cause
        excess = plane.end - self.end
        if excess > 0:
            raise LayoutError(
                f"{name}: {plane} runs {excess} bytes past the end of its allocation of {self.end - self.base} bytes "
                f"at {self.base:#x}"
            )


class AllocationFinder:
    """Asks the driver of one device; its context must be current for every call."""

    def __init__(self, driver: Driver, index: int, name: str, device_count: int) -> None:
        self._driver = driver
        self._index = index
        self._name = name
        self._device_count = device_count

    def find(self, planes: Sequence[Plane]) -> list[Allocation]:
        """Return the allocation of each plane; planes of one allocation have the same object.

        Raises:
            DriverError: the context is lost.
        """
        found: dict[int, Allocation] = {}
        current = Allocation(0, 0)
        for at in sorted(range(len(planes)), key=lambda each: planes[each].address):
            if not self._extend(current, planes[at].address + 1):
                current = self._at(planes[at].address)
            self._extend(current, planes[at].end)
            found[at] = current
        return [found[at] for at in range(len(planes))]

    def _extend(self, allocation: Allocation, end: int) -> bool:
        """Add the mapped ranges that follow, as long as it ends before `end`; whether it reaches to there."""
        while allocation.mapped and allocation.end < end:
            if is_mapped_on(self._driver, allocation.end, self._index):
                allocation.end = sum(self._driver.address_range(allocation.end))
            else:
                allocation.mapped = False
        return allocation.end >= end

    def _at(self, address: int) -> Allocation:
        """Return what holds an address: of virtual memory, the range of one handle."""
        try:
            base, nbytes = self._driver.address_range(address)
        except DriverError as error:
            if error.sticky:
                raise
            problem = f"is not memory of {self._name} (device {self._index}): {error}"
            return Allocation(address, address, problem=problem, cause=error)
        allocation = Allocation(base, base + nbytes)
        if pointers.attribute(self._driver, "MEMORY_TYPE", address) != pointers.DEVICE_MEMORY:
            allocation.problem = "is host memory; planes are GPU memory"
            return allocation
        place = self.device_of(address)
        if isinstance(place, str):
            allocation.doubt = place
            return allocation
        if place == self._index:
            allocation.mapped = is_mapped_on(self._driver, address, self._index)
        else:
            allocation.problem = f"is memory of device {place}, but the engine is on device {self._index}"
        return allocation

    def device_of(self, address: int) -> int | str:
        """Return the GPU that holds `address`, as CUDA counts them; or why neither the driver nor the bindings report
        it.
        """
        driver, devices = self._driver, range(self._device_count)
        if len(devices) == 1:
            return 0
        try:
            ordinal = pointers.attribute(driver, "DEVICE_ORDINAL", address)
            if ordinal != 0:
                return ordinal
            context = pointers.attribute(driver, "CONTEXT", address)
            if context:
                with make_current(driver, context):
                    return int(driver.call("cuCtxGetDevice"))
        except (DriverError, CapabilityError) as error:
            if isinstance(error, DriverError) and error.sticky:
                raise
            return str(error)
        mapped = _ask(pointers.mapped_memory_device, driver, address)
        if mapped is not None:
            return mapped
        pool = _ask(pointers.attribute, driver, "MEMPOOL_HANDLE", address)
        if not pool:
            return "it belongs to no context, to no memory pool, and is not mapped virtual memory"
        for device in devices:
            if pool in (_ask(pointers.device_pools, driver, device) or ()):
                return device
        place = _ask(pointers.pool_device, driver, pool)
        if place is not None:
            return place
        accessible = [each for each in devices if _ask(pointers.pool_is_accessible, driver, pool, each) is not False]
        if len(accessible) == 1:  # a device can always access its own pools
            return accessible[0]
        return f"its memory pool may be on any of the devices {accessible}"


def is_mapped_on(driver: Driver, address: int, device: int) -> bool:
    """Return whether cuMemMap mapped `address`, virtual memory, to memory of that GPU; a context must be current."""
    return _ask(pointers.mapped_memory_device, driver, address) == device


def _ask(question: Callable[..., T], *arguments: Any) -> T | None:
    """Return the answer, or None where the driver or the bindings have none."""
    try:
        return question(*arguments)
    except (DriverError, CapabilityError) as error:
        if isinstance(error, DriverError) and error.sticky:  # the context is lost: every later call fails, too
            raise
        return None

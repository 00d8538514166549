"""In which driver allocation each plane of a layout is, and whether a copy may go from one plane to another.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvoffload.device.placement import UnknownPlaceError, device_of, is_mapped_on
from kvoffload.driver import Driver
from kvoffload.errors import DriverError, LayoutError
from kvoffload.layout.planes import Plane


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
    """Asks the driver of one device; its context must be current for every call.

    Args:
        driver: of the device.
        index, name: of the device.
        device_count: how many devices the driver has.
    """

    def __init__(self, driver: Driver, index: int, name: str, device_count: int) -> None:
        self._driver = driver
        self._index = index
        self._name = name
        self._device_count = device_count

    def find(self, planes: Sequence[Plane]) -> list[Allocation]:
        """The allocation of each plane; planes of one allocation have the same object.

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
        """What holds an address: of virtual memory, the range of one handle."""
        try:
            base, nbytes = self._driver.address_range(address)
        except DriverError as error:
            problem = f"is not memory of {self._name} (device {self._index}): {error}"
            return Allocation(address, address, problem=problem, cause=error)
        allocation = Allocation(base, base + nbytes)
        if not self._driver.is_device_memory(address):
            allocation.problem = "is host memory; planes are GPU memory"
            return allocation
        try:
            place = device_of(self._driver, address, self._device_count)
        except UnknownPlaceError as reason:
            allocation.doubt = str(reason)
            return allocation
        if place == self._index:
            allocation.mapped = is_mapped_on(self._driver, address, self._index)
        else:
            allocation.problem = f"is memory of device {place}, but the engine is on device {self._index}"
        return allocation

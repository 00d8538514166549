"""Pinned host memory as numpy arrays.

The slot pool is anonymous memory of the process: mapped, its pages touched by many threads, then registered with the
driver in ranges of about 1 GiB. Measured on an H200 machine with 16 CPUs, 4 GiB: cuMemHostAlloc 2.7 s (one thread, the
driver's lock held), touch and register 0.17 s with huge pages, 0.35 s without; the same bandwidth afterwards. When the
engine closes, the memory is unregistered, and stays ordinary memory as long as a numpy array over it lives.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.driver import Driver, address_of
from kvoffload.errors import CapacityError, DriverError
from kvoffload.internal import hostinfo
from kvoffload.internal.types import UInt8Array

Progress = Callable[[int, int], None]  # bytes done, bytes in all

PAGE_BYTES = mmap.PAGESIZE
RANGE_BYTES = 1 << 30  # registered at a time: each call is short, progress is visible, no platform limit is met
_NOT_REGISTERED = 713  # CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
SPARE_BYTES = 256 << 20  # left to the rest of the machine


_still_registered: list[RegisteredMemory] = []  # kept mapped, because the driver did not unregister it


class RegisteredMemory:
    """Host memory in ranges that are registered with the driver one by one.

    Attributes:
        address: address of the first byte.
        array: the memory, without a copy.
    """

    address: int
    array: UInt8Array

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._registered: list[int] = []  # addresses of ranges that are or may be registered
        self._device_offsets: npt.NDArray[np.int64] | None = None

    def _register(self, address: int, nbytes: int) -> None:
        self._registered += (address,)  # before the call, whose result an interrupt can lose
        self._driver.host_register(address, nbytes)

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def pinned_bytes(self) -> int:
        """`nbytes`; 0 after `release`."""
        return self.nbytes if self._mapped_apart() else 0

    def _mapped_apart(self) -> Sequence[int]:
        """Addresses, ascending. From each on, a GPU may see the memory at another offset."""
        return self._registered

    def device_addresses(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The addresses, int64, at which a kernel sees these host addresses."""
        starts = self._mapped_apart()
        if not starts:  # memory of no bytes
            return addresses
        if self._device_offsets is None:
            mapped = [self._driver.host_device_address(start) - start for start in starts]
            self._device_offsets = np.array(mapped[:1] if len(set(mapped)) == 1 else mapped, dtype=np.int64)
        offsets = self._device_offsets
        if len(offsets) == 1:
            return addresses + offsets if offsets[0] else addresses
        index = np.searchsorted(np.array(starts), addresses, side="right") - 1
        return addresses + offsets[index]

    def release(self) -> None:
        """Unpin. The bytes stay where they are. Nothing on the GPU may still use the memory.

        Idempotent. After an interrupt or an error, call it again for the rest: a range leaves the list only after the
        driver has unregistered it, and unregistering it twice is no error.
        """
        try:
            while self._registered:
                for attempt in range(2):  # safe to repeat, unlike a free
                    try:
                        self._driver.host_unregister(self._registered[-1])
                        break
                    except DriverError as error:
                        if error.code == _NOT_REGISTERED:
                            break
                        if error.sticky or attempt:
                            raise
                del self._registered[-1]
        except BaseException:
            self.keep()
            raise
        if self in _still_registered:
            _still_registered.remove(self)

    def keep(self) -> None:
        """Keep the memory mapped while it is registered: a later mapping at its address could not be registered."""
        if self._registered and self not in _still_registered:
            _still_registered.append(self)


class PinnedMemory(RegisteredMemory):
    """`nbytes` of host memory, page-aligned and pinned; `array` is uint8, (nbytes,), zeros, also valid after `release`.

    The machine's memory, or its cgroup, bounds it; RLIMIT_MEMLOCK does not: on Linux with driver 580 and a limit of 64
    KiB, registering 1 GiB worked for root and for another user.

    Args:
        nbytes: a multiple of the page size; 0 pins nothing.
        unit_bytes: registered ranges end on multiples of this, so that no copy of one unit spans two ranges, which the
            driver would refuse.
        numa_cpus: CPUs for the threads that touch the pages, so that Linux places these on that node. Empty: any.
        holder: the new object is appended here before anything is registered. If an interrupt loses the constructor's
            result, the caller can `release` the object in the list.

    Raises:
        CapacityError: memory is short, or the driver cannot pin that much. Nothing stays registered.
    """

    def __init__(
        self,
        driver: Driver,
        nbytes: int,
        *,
        unit_bytes: int = PAGE_BYTES,
        numa_cpus: frozenset[int] = frozenset(),
        progress: Progress | None = None,
        holder: list[PinnedMemory] | None = None,
    ) -> None:
        super().__init__(driver)
        self.array = _map(nbytes)
        self.address = address_of(self.array)
        if holder is not None:
            holder.append(self)
        try:
            for start, stop in ranges(nbytes, unit_bytes):
                _check_available(stop - start, nbytes, start)
                touch(self.array[start:stop], numa_cpus)
                self._register(self.address + start, stop - start)
                if progress is not None:
                    progress(stop, nbytes)
        except DriverError as error:
            done = self._registered[-1] - self.address
            self.release()
            raise CapacityError(_explain(nbytes, done, f"the driver said: {error}")) from error
        except BaseException:  # an interrupt, or the progress callback, too
            self.release()
            raise


def ranges(nbytes: int, unit_bytes: int) -> Iterator[tuple[int, int]]:
    """The ranges to register, (begin, end), from 0 to `nbytes`, at multiples of `unit_bytes`."""
    step = max(1, RANGE_BYTES // unit_bytes) * unit_bytes
    return ((start, min(start + step, nbytes)) for start in range(0, nbytes, step))


def _map(nbytes: int) -> UInt8Array:
    if nbytes == 0:  # Linux maps no empty range
        return np.empty(0, dtype=np.uint8)
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise CapacityError(_explain(nbytes, 0, f"Linux would not map it: {error}")) from error
    # Huge pages: 2.4 times as fast to touch and register. Not every kernel has them.
    # DONTFORK: a child that shares the pages would make the parent copy them on write, away from what the GPU sees.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with contextlib.suppress(AttributeError, OSError):
            mapping.madvise(getattr(mmap, advice))
    return np.frombuffer(mapping, dtype=np.uint8)


def touch(array: UInt8Array, cpus: frozenset[int] = frozenset()) -> None:
    """Write a zero to every page of fresh, page-aligned zeros, by many threads at once where that pays."""
    threads = min(16, len(cpus) or hostinfo.usable_cpus(), array.nbytes >> 24)
    if threads < 2:
        array[::PAGE_BYTES] = 0
        return
    step = -(-array.nbytes // (threads * PAGE_BYTES)) * PAGE_BYTES
    pin = None if not cpus else lambda: os.sched_setaffinity(0, cpus)  # 0 is the calling thread, not the process
    from concurrent.futures import ThreadPoolExecutor  # takes 2 ms to import, and only engines need it

    with ThreadPoolExecutor(threads, initializer=pin) as pool:
        starts = range(0, array.nbytes, step)
        list(pool.map(lambda start: array[start : start + step : PAGE_BYTES].fill(0), starts))


def _check_available(range_bytes: int, nbytes: int, done: int) -> None:
    """Raise CapacityError if memory is short: touching the pages would start Linux's out-of-memory killer."""
    for _ in range(5):
        available = hostinfo.available_bytes()
        if available is None or available >= range_bytes + min(SPARE_BYTES, range_bytes):
            return
        time.sleep(0.02)  # virtual machines that grow need a moment
    raise CapacityError(_explain(nbytes, done, "memory is short"))


def _explain(nbytes: int, done: int, reason: str) -> str:
    def gib(value: int | None) -> str:
        return "unknown" if value is None else f"{value / (1 << 30):.2f} GiB"

    cgroup = hostinfo.tightest_cgroup()
    limit = ", no cgroup limit"
    if cgroup is not None:
        limit = f", cgroup {cgroup.path} allows {gib(cgroup.limit_bytes)} with {gib(cgroup.used_bytes)} used"
    return (
        f"cannot pin {gib(nbytes)} ({nbytes} bytes) of host memory: {reason}. "
        f"Pinned before that: {gib(done)} (given back); available now {gib(hostinfo.available_bytes())} of "
        f"{gib(hostinfo.total_bytes())}{limit}. Ask for fewer slots (num_slots), or free memory"
    )

"""Pinned host memory as numpy arrays.

The slot pool is anonymous memory of the process: mapped, its pages touched by many threads, then registered with the
driver in ranges of about 1 GiB. Measured on an H200 machine with 16 CPUs, 4 GiB: cuMemHostAlloc 2.7 s (one thread, the
driver's lock held), touch and register 0.17 s with huge pages, 0.35 s without; the same bandwidth afterwards. When the
engine closes, the memory is unregistered, and stays ordinary memory as long as a numpy array over it lives. A pool that
grows (`growth`) is the same memory: its constructor pins the first range, and a thread pins the others.

Or the caller brings the memory, `HostMemory`: shared memory of several processes or a numpy array. A shared
mapping of a file on a disk cannot be registered (driver 580, ext4).

    |slot 0 of ours|others' bytes|slot 1 of ours|others' bytes| ...
    address                      address + slot_stride
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvoffload.driver import Driver, address_of, make_current
from kvoffload.errors import CapacityError, DriverError
from kvoffload.internal import hostinfo
from kvoffload.internal.checks import at_least, flag, index_or, shown
from kvoffload.internal.nesting import new_lock, run_outside
from kvoffload.internal.types import UInt8Array
from kvoffload.layout.layout import SLOT_ALIGNMENT

Progress = Callable[[int, int], None]  # bytes done, bytes in all

PAGE_BYTES = mmap.PAGESIZE
RANGE_BYTES = 1 << 30  # registered at a time: each call is short, progress is visible, no platform limit is met
_NOT_REGISTERED = 713  # CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
_MADV_WIPEONFORK = 18  # linux/mman.h, since Linux 4.14; Python has no name for it
SPARE_BYTES = 256 << 20  # left to the rest of the machine
MOST_THREADS = 16  # that touch pages at a time
BESIDE_SERVING = 4  # the same of a pool that grows: on 16 CPUs transfers waited 8 ms at most; beside 16 threads, 30 ms


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

    def _register(self, address: int, nbytes: int) -> None:
        self._registered += (address,)  # before the call, whose result an interrupt can lose
        self._driver.host_register(address, nbytes)

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    @property
    def pinned_bytes(self) -> int:
        """So many bytes are pinned now; 0 after `release`."""
        return self.nbytes

    def release(self) -> None:
        """Unpin. The bytes stay where they are. Nothing on the GPU may still use the memory.

        Idempotent. After an interrupt or an error, call it again for the rest: a range leaves the list only after the
        driver has unregistered it, and unregistering it twice is no error.
        """
        try:
            for _ in iter(self._registered.__len__, 0):  # 3.13 leaves the back edge of a `while` out of this `try`
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
        """Keep the memory mapped while it is registered: a later mapping at its address could not be registered, and
        copies from there would bring the old bytes.
        """
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
        progress: called with (bytes done, bytes in all) after each range, in the thread that has pinned it.
        holder: the new object is appended here before anything is registered. If an interrupt loses the constructor's
            result, the caller can `release` the object in the list.
        piece_bytes: the constructor pins the first range only, of about so many bytes; call `pin_next` for each of the
            others. None: it pins all, in ranges of `RANGE_BYTES`.

    Attributes:
        ready_bytes: how many bytes, from the first on, have been pinned. It never falls.
        pinning: held while a range is being pinned.

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
        piece_bytes: int | None = None,
    ) -> None:
        super().__init__(driver)
        self.array = _map(nbytes)
        self.address = address_of(self.array)
        self.ready_bytes = 0
        self._numa_cpus, self._progress, self._grows = numa_cpus, progress, piece_bytes is not None
        self._range_bytes = whole_units(RANGE_BYTES if piece_bytes is None else piece_bytes, unit_bytes)
        self.pinning = new_lock()
        self._stopped = False
        if holder is not None:
            holder.append(self)
        try:
            while True:
                if not self.pin_next() or self._grows:
                    break
        except BaseException:  # an interrupt, or the progress callback, too
            self.release()
            raise

    @property
    def pinned_bytes(self) -> int:
        return self.ready_bytes if self._registered else 0

    def pin_next(self, context: int | None = None) -> bool:
        """Touch and register the next range. Returns whether there is another one; False after `stop`, too, and then no
        call of the driver is made: the context may be gone.

        Args:
            context: made current to register the range. None: it is current.

        Raises:
            CapacityError: memory is short, or the driver cannot pin more. The ranges before stay pinned.
        """
        with self.pinning:
            start, stop = self.ready_bytes, min(self.ready_bytes + self._range_bytes, self.nbytes)
            if self._stopped or start == stop:
                return False
            self._check_available(stop - start)
            touch(self.array[start:stop], self._numa_cpus, BESIDE_SERVING if self._grows else MOST_THREADS)
            try:
                with contextlib.nullcontext() if context is None else make_current(self._driver, context):
                    self._register(self.address + start, stop - start)
            except DriverError as error:
                raise CapacityError(self._explain(f"the driver said: {error}")) from error
            self.ready_bytes = stop
        if self._progress is not None:
            run_outside(self._progress, stop, self.nbytes)
        return stop < self.nbytes

    def stop(self) -> None:
        """Pin nothing from now on. Waits for a range that another thread is pinning, which then is `release`d, too."""
        self._stopped = True
        with self.pinning:
            pass

    def _check_available(self, range_bytes: int) -> None:
        """Raise CapacityError if memory is short: touching the pages would start Linux's out-of-memory killer."""
        for _ in range(5):
            available = hostinfo.available_bytes()
            if available is None or available >= range_bytes + min(SPARE_BYTES, range_bytes):
                return
            time.sleep(0.02)  # virtual machines that grow need a moment
        raise CapacityError(self._explain("memory is short"))

    def _explain(self, reason: str) -> str:
        kept = "kept" if self._grows and self.ready_bytes else "given back"
        return why_not_pinned(self.nbytes, reason, f"{_gib(self.ready_bytes)} ({kept})")


def whole_units(range_bytes: int, unit_bytes: int) -> int:
    """Return `range_bytes`, or less, as a multiple of a unit; at least one unit."""
    return max(1, range_bytes // unit_bytes) * unit_bytes


def _map(nbytes: int) -> UInt8Array:
    if nbytes == 0:  # Linux maps no empty range
        return np.empty(0, dtype=np.uint8)
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise CapacityError(why_not_pinned(nbytes, f"Linux would not map it: {error}")) from error
    # Huge pages: 2.4 times as fast to touch and register. Not every kernel has them.
    # WIPEONFORK: a child that shares the pages would make the parent copy them on write, away from what the GPU sees. A
    # child gets zeros. DONTFORK leaves a hole, where a child's own memory may lie by the time that it unmaps this.
    for advice in (mmap.MADV_HUGEPAGE, _MADV_WIPEONFORK):
        with contextlib.suppress(OSError):
            mapping.madvise(advice)
    return np.frombuffer(mapping, dtype=np.uint8)


def touch(
    array: UInt8Array, cpus: frozenset[int] = frozenset(), most_threads: int = MOST_THREADS, *, write: bool = True
) -> None:
    """Write a zero to every page of fresh, page-aligned zeros, by many threads at once where that pays.

    Args:
        write: False: read a byte of every page instead. Shared memory that is allocated, but not mapped in this process
            yet, took the driver 10 s to register (32 GiB on an H100's host); read first, 7 s in all.
    """
    use = (lambda part: part.fill(0)) if write else np.max
    threads = min(most_threads, len(cpus) or hostinfo.usable_cpus(), array.nbytes >> 24)
    if threads < 2:
        use(array[::PAGE_BYTES])
        return
    step = -(-array.nbytes // (threads * PAGE_BYTES)) * PAGE_BYTES
    pin = None if not cpus else lambda: os.sched_setaffinity(0, cpus)  # 0 is the calling thread, not the process
    from concurrent.futures import ThreadPoolExecutor  # takes 2 ms to import, and only engines need it

    with ThreadPoolExecutor(threads, initializer=pin) as pool:
        starts = range(0, array.nbytes, step)
        list(pool.map(lambda start: use(array[start : start + step : PAGE_BYTES]), starts))


def _gib(value: int | None) -> str:
    return "unknown" if value is None else f"{value / (1 << 30):.2f} GiB"


def why_not_pinned(nbytes: int, reason: str, done: str = "nothing") -> str:
    """Return the message of a CapacityError: what was asked for, and the memory that this host has."""
    cgroup = hostinfo.tightest_cgroup()
    limit = ", no cgroup limit"
    if cgroup is not None:
        limit = f", cgroup {cgroup.path} allows {_gib(cgroup.limit_bytes)} with {_gib(cgroup.used_bytes)} used"
    return (
        f"cannot pin {_gib(nbytes)} ({nbytes} bytes) of host memory: {reason}. "
        f"Pinned before that: {done}; available now {_gib(hostinfo.available_bytes())} of "
        f"{_gib(hostinfo.total_bytes())}{limit}. Ask for less (pool_bytes, num_slots), or free memory"
    )


# memory that the caller brings ----------------------------------------------------------------------------------------


_MOST_ADDRESS = 1 << 56
_ALREADY_REGISTERED = 712  # CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Host memory for the slots of one engine, see `OffloadEngine(host_memory=)`.

    Slot `s` is the `layout.slot_bytes` bytes at `address + s * slot_stride`. The bytes between slots may belong to
    others, such as engines of other processes: the engine registers them, too, but never reads or writes them.

    Keep the memory mapped until the engine is closed and you use no array over its `slots`. (If you map other memory
    there while it is registered, the GPU goes on with the old pages, without an error.) The engine never frees it. The
    driver registers no shared mapping of a file on a disk.

    Args:
        address: address of slot 0, a multiple of 4096.
        num_slots: how many slots.
        slot_stride: bytes from one slot to the next, a multiple of 4096, at least `layout.slot_bytes`.
        registered: False: the engine registers the range from the first slot to the end of the last one with the
            driver, and `close` unregisters it; nothing else in the process may have registered any of its pages. True:
            it is registered already, or was allocated pinned, and stays so until the engine is closed; no slot may lie
            in two registered ranges. (Each process that maps shared memory registers its own mapping.)
        owner: an object to keep alive until the engine is closed and no array over its `slots` is left.
        nbytes: size of the memory from `address` on, if you know it; the engine then refuses slots past its end.

    Raises:
        ValueError: an argument out of range; the message says the right one.
    """

    address: int
    num_slots: int
    slot_stride: int
    registered: bool = False
    owner: Any = field(default=None, repr=False)
    nbytes: int | None = None

    def __post_init__(self) -> None:
        _check_multiple("address", self.address)
        _check_multiple("slot_stride", self.slot_stride)
        at_least("num_slots", self.num_slots, 0)
        flag("registered", self.registered)
        if self.nbytes is not None:
            at_least("nbytes", self.nbytes, 0)

    @classmethod
    def of_buffer(
        cls, buffer: Any, *, num_slots: int, slot_stride: int, offset: int = 0, registered: bool = False
    ) -> HostMemory:
        """Return the memory of an object with the buffer protocol: a numpy array, an mmap, `SharedMemory.buf`.

        The result keeps the object alive. Shared memory and an mmap refuse to close while this object, an engine or an
        array over its `slots` refers to them: close the engine and delete the others first.

        Args:
            buffer: writable, C-contiguous and not empty. It and `offset` must put slot 0 at a multiple of 4096, as they
                do for `mmap.mmap(-1, nbytes)`.
            num_slots, slot_stride, registered: as for `HostMemory`.
            offset: the byte of the buffer at which slot 0 begins.

        Raises:
            TypeError: `buffer` has no buffer protocol.
            ValueError: a buffer that does not meet these conditions; or as `HostMemory`. Whether the slots fit into the
                buffer, only `check_slots` and the engine's constructor check.
        """
        try:
            array: UInt8Array = np.frombuffer(buffer, dtype=np.uint8)
        except TypeError:
            raise TypeError(f"buffer must have the buffer protocol, got {type(buffer).__name__}") from None
        except ValueError as error:
            raise ValueError(f"buffer must be C-contiguous and not empty: {error}") from None
        if not array.nbytes:
            raise ValueError(f"buffer must not be empty, got an empty {type(buffer).__name__}")
        if not array.flags.writeable:
            raise ValueError(f"buffer must be writable, got a read-only {type(buffer).__name__}")
        if at_least("offset", offset, 0) > array.nbytes:
            raise ValueError(f"offset={offset} is past the end of a buffer of {array.nbytes} bytes")
        _check_multiple(f"the address of buffer, plus offset={offset},", address_of(array) + offset)
        return cls(
            address=address_of(array) + offset,
            num_slots=num_slots,
            slot_stride=slot_stride,
            registered=registered,
            owner=array,
            nbytes=array.nbytes - offset,
        )

    def check_slots(self, slot_bytes: int) -> None:
        """Raise ValueError unless slots of this size fit into the stride and, if `nbytes` is known, into the memory.
        `slot_bytes`: of the engine's layout. An engine's constructor does this; call it to find out earlier.
        """
        if self.slot_stride < slot_bytes:
            raise ValueError(
                f"host_memory: slot_stride={self.slot_stride} is less than layout.slot_bytes={slot_bytes}; slots would "
                f"overlap: give a stride of at least {slot_bytes}"
            )
        if self.nbytes is not None and self.span(slot_bytes) > self.nbytes:
            most = max(0, (self.nbytes - slot_bytes) // self.slot_stride + 1)
            raise ValueError(
                f"host_memory: num_slots={self.num_slots} of {slot_bytes} bytes, {self.slot_stride} bytes apart, take "
                f"{self.span(slot_bytes)} bytes, and the memory has {self.nbytes}: give at most {most} slots"
            )

    def span(self, slot_bytes: int) -> int:
        """Return the bytes from the beginning of the first slot to the end of the last one; 0 without slots.
        `slot_bytes`: of the engine's layout.
        """
        return (self.num_slots - 1) * self.slot_stride + slot_bytes if self.num_slots else 0


def _check_multiple(name: str, value: Any) -> None:
    number = index_or(value, 0)
    if number % SLOT_ALIGNMENT or not 0 < number < _MOST_ADDRESS:
        raise ValueError(
            f"{name} must be a positive multiple of {SLOT_ALIGNMENT} (a page; the driver registers whole pages), "
            f"got {shown(value)}"
        )


class CallerMemory(RegisteredMemory):
    """The slots of an engine in a `HostMemory`; registered by us, or found to be registered."""

    def __init__(
        self, driver: Driver, memory: HostMemory, slot_bytes: int, holder: list[CallerMemory] | None = None
    ) -> None:
        super().__init__(driver)
        memory.check_slots(slot_bytes)
        self.address = memory.address
        self.array = np.asarray(_View(memory, slot_bytes))
        if holder is not None:
            holder.append(self)
        try:
            if not memory.registered:
                span, most = memory.span(slot_bytes), whole_units(RANGE_BYTES, memory.slot_stride)
                for start in range(0, span, most):
                    nbytes = min(most, span - start)
                    try:
                        self._register(self.address + start, nbytes)
                    except DriverError as error:
                        del self._registered[-1]  # it may be its owner's registration, which must stay
                        raise _explained(error, memory, nbytes, start) from error
            else:
                self._find_registered(memory, slot_bytes)
        except BaseException:
            self.release()
            raise

    def _find_registered(self, memory: HostMemory, slot_bytes: int) -> None:
        """Check that each slot lies in one registered range: ask where the GPU sees its first and its last byte."""
        first, span = self.address, memory.num_slots * memory.slot_stride
        for number, slot in enumerate(range(first, first + span, memory.slot_stride)):
            try:
                there = self._driver.host_device_address(slot)
                end = self._driver.host_device_address(slot + slot_bytes - 1)
            except DriverError as error:
                if error.sticky:
                    raise
                raise ValueError(
                    f"host_memory: registered=True, but slot {number} at {slot:#x} is not registered with this driver "
                    f"({error.name}); register it in this process, or give registered=False"
                ) from error
            if end - there != slot_bytes - 1 or self._base(slot) != self._base(slot + slot_bytes - 1):
                raise ValueError(
                    f"host_memory: slot {number} at {slot:#x} lies in two registered ranges; a copy must not leave its "
                    "range: register whole slots"
                )

    def _base(self, address: int) -> int:
        """Return where the registered range of an address begins, or 0 if the driver does not say. Two ranges may be
        side by side for the GPU, too, and yet no copy crosses from one into the other.
        """
        try:
            return self._driver.address_range(address)[0]
        except DriverError:
            return 0

    def release(self) -> None:
        """Release as `RegisteredMemory.release` does; then drop the reference to the caller's memory."""
        super().release()
        self.array = np.empty((0, self.array.shape[1]), dtype=np.uint8)


class _View:
    def __init__(self, memory: HostMemory, slot_bytes: int) -> None:
        self._owner = memory.owner
        self.__array_interface__ = {
            "data": (memory.address, False),
            "shape": (memory.num_slots, slot_bytes),
            "strides": (memory.slot_stride, 1),
            "typestr": "|u1",
            "version": 3,
        }


def _explained(error: DriverError, memory: HostMemory, nbytes: int, done: int) -> Exception:
    if error.sticky:
        return error
    if error.code == _ALREADY_REGISTERED:
        return ValueError(
            f"host_memory: {memory} overlaps memory that is registered already, by its owner or by another engine; if "
            "all of it is registered, give registered=True"
        )
    if error.out_of_memory:
        return CapacityError(
            f"host_memory: the driver cannot pin {nbytes} bytes more (pinned before: {done}, given back): {error}; "
            "give fewer slots, or free memory"
        )
    return ValueError(
        f"host_memory: {memory} cannot be registered: {error}; is all of it mapped in this process, and "
        "none of it shared with a file on a disk? Memory of a memfd or in /dev/shm can be"
    )

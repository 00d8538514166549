"""Slots in host memory that the caller brings: shared memory of several processes, a mapped file, a numpy array.

|slot 0 of ours|others' bytes|slot 1 of ours|others' bytes| ...
address                      address + slot_stride
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvoffload.device.pinned import RegisteredMemory, ranges
from kvoffload.driver import Driver, address_of
from kvoffload.errors import CapacityError, DriverError
from kvoffload.internal.checks import at_least, flag, shown
from kvoffload.internal.types import UInt8Array
from kvoffload.layout.layout import SLOT_ALIGNMENT

_MOST_ADDRESS = 1 << 56
_ALREADY_REGISTERED = 712  # CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Host memory for the slots of one engine, see `OffloadEngine(host_memory=)`.

    Slot `s` is the `layout.slot_bytes` bytes at `address + s * slot_stride`. The bytes between slots may belong to
    others, such as engines of other processes: the engine registers them, too, but never reads or writes them.

    Keep the memory mapped until the engine is closed and you use no array over its `slots`. The engine never frees it.

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
        """The memory of an object with the buffer protocol: a numpy array, an mmap, `SharedMemory.buf`.

        The result keeps the object alive. Shared memory and an mmap refuse to close while this object, an engine or an
        array over its `slots` refers to them: close the engine and delete the others first.

        Args:
            buffer: writable, C-contiguous and not empty. It and `offset` must put slot 0 at a multiple of 4096, as they
                do for `mmap.mmap(-1, nbytes)`.
            num_slots, slot_stride, registered: as for `HostMemory`.
            offset: the byte of the buffer at which slot 0 begins.

        Raises:
            TypeError: `buffer` has no buffer protocol.
            ValueError: a buffer that does not meet these conditions; or as `HostMemory`. Only the engine's constructor
                checks that the slots fit into the buffer.
        """
        try:
            array: UInt8Array = np.frombuffer(buffer, dtype=np.uint8)
        except TypeError:
            raise TypeError(f"buffer must have the buffer protocol, got {type(buffer).__name__}") from None
        except ValueError as error:
            raise ValueError(f"buffer must be C-contiguous and not empty: {error}") from None
        if not array.flags.writeable:
            raise ValueError(f"buffer must be writable, got a read-only {type(buffer).__name__}")
        if at_least("offset", offset, 0) > array.nbytes:
            raise ValueError(f"offset={offset} is past the end of a buffer of {array.nbytes} bytes")
        return cls(
            address=address_of(array) + offset,
            num_slots=num_slots,
            slot_stride=slot_stride,
            registered=registered,
            owner=array,
            nbytes=array.nbytes - offset,
        )

    def check_slots(self, slot_bytes: int) -> None:
        """Raise ValueError unless slots of this size fit into the stride and, if `nbytes` is known, into the memory."""
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
        """Bytes from the beginning of the first slot to the end of the last one."""
        return (self.num_slots - 1) * self.slot_stride + slot_bytes if self.num_slots else 0


def _check_multiple(name: str, value: Any) -> None:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number % SLOT_ALIGNMENT or not 0 < number < _MOST_ADDRESS:
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
        self.address, self._ours = memory.address, not memory.registered
        self._slots: list[int] = []
        self.array = np.asarray(_View(memory, slot_bytes))
        if holder is not None:
            holder.append(self)
        try:
            if self._ours:
                for start, stop in ranges(memory.span(slot_bytes), memory.slot_stride):
                    try:
                        self._register(self.address + start, stop - start)
                    except DriverError as error:
                        del self._registered[-1]  # it may be its owner's registration, which must stay
                        raise _explained(error, memory, stop - start, start) from error
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
            if end - there != slot_bytes - 1:
                raise ValueError(
                    f"host_memory: slot {number} at {slot:#x} lies in two registered ranges; a copy must not leave its "
                    "range: register whole slots"
                )
            self._slots.append(slot)

    def _mapped_apart(self) -> Sequence[int]:
        return self._registered if self._ours else self._slots

    def release(self) -> None:
        """As `RegisteredMemory.release`; then drop the reference to the caller's memory."""
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
    return ValueError(f"host_memory: {memory} cannot be registered: {error}; is all of it mapped in this process?")

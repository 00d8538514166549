"""The process's memory as one numpy array, and its mapped ranges.

Simulated device memory is ordinary memory, so an address is enough to read or write it. One array from address 4096 on
(numpy refuses to start at 0) spans all user addresses, so a copy is a slice assignment of 0.4 us, with no object per
allocation. Never touch the array whole: only mapped slices are real.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

ADDRESS_LIMIT = 1 << 47  # user addresses on x86-64 and on the usual arm64 kernels
_ORIGIN = 4096


class _Held:
    """Exposes a range to numpy, and keeps its owner alive as long as an array over it lives."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


_everything: Bytes = np.asarray(_Held(_ORIGIN, ADDRESS_LIMIT - _ORIGIN, None))


def view(address: int, nbytes: int) -> Bytes:
    """Return the bytes `[address, address + nbytes)`, not a copy. The caller has checked that they are mapped."""
    start = address - _ORIGIN
    return _everything[start : start + nbytes]


def held_view(address: int, nbytes: int, owner: object) -> Bytes:
    return np.asarray(_Held(address, nbytes, owner))


def rows(address: int, width: int, height: int, pitch: int) -> Bytes:
    return np.ndarray((height, width), np.uint8, _everything, address - _ORIGIN, (pitch, 1))


def read_word(address: int) -> int:
    start = address - _ORIGIN
    return int(_everything[start : start + 4].view(np.uint32)[0])


def address_of(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def host_address(pointer: Any) -> int:
    """Return the address that the bindings take from a host pointer: an integer, or an object with a buffer."""
    if isinstance(pointer, np.ndarray):
        return address_of(pointer)
    if hasattr(pointer, "__int__"):
        return int(pointer)
    return address_of(np.frombuffer(pointer, dtype=np.uint8))


_PROBED = 1 << 16  # bytes: for longer spans the list of all pages is read, which takes a millisecond


def can_be_read(address: int, nbytes: int) -> bool:
    """Return whether the kernel, which checks each page, has copied a short span to a file in memory."""
    span = view(address, nbytes)
    if not (address >= _ORIGIN and 0 < nbytes == span.nbytes <= _PROBED and hasattr(os, "memfd_create")):
        return False
    try:
        file = os.memfd_create("kvoffload-probe")
        try:
            return os.write(file, span.data) == nbytes
        finally:
            os.close(file)
    except OSError:
        return False


# How the names of mappings without a disk begin. (Most such mappings have no name.)
_PINNABLE = (b"[", b"/memfd:", b"/dev/zero", b"/dev/shm/", b"/SYSV")


class MappedPages:
    """Which addresses the process may touch at all, so that a wild pointer becomes an error and not a crash.

    Where the system does not list them (no /proc), every address counts as mapped.
    """

    def __init__(self) -> None:
        self._lines: list[bytes] = []

    def __contains__(self, span: tuple[int, int]) -> bool:
        """Whether `span`, an (address, nbytes) pair, lies in mapped readable memory."""
        return self._known(*span) or can_be_read(*span) or self._listed(*span)

    def can_be_pinned(self, address: int, nbytes: int) -> bool:
        """Return whether a span is mapped, and not shared with a file on a disk: driver 580 registers none of those
        (ext4).
        """
        return self._listed(address, nbytes, _PINNABLE)

    def _listed(self, address: int, nbytes: int, names: tuple[bytes, ...] = (b"",)) -> bool:
        try:
            self._lines = Path("/proc/self/maps").read_bytes().splitlines()
        except OSError:
            return True
        return self._known(address, nbytes, names)

    def _known(self, address: int, nbytes: int, names: tuple[bytes, ...] = (b"",)) -> bool:
        end = address + nbytes
        begun = bisect_right(self._lines, address, key=lambda line: int(line[: line.index(b"-")], 16))
        for line in islice(self._lines, max(begun - 1, 0), None):
            pages, rights, *_, name = (line + b" ").split(b" ", maxsplit=5)
            first, last = (int(each, 16) for each in pages.split(b"-"))
            if not first <= address < last or not rights.startswith(b"r"):
                return False
            if rights.endswith(b"s") and not (name.strip() or b"[").startswith(names):
                return False
            if end <= last:
                return True
            address = last  # neighbours with different rights or files are one span to us
        return False

"""`bench disk --failing`: the system calls of a disk tier, which fail, hang, or read wrong bytes on demand."""

from __future__ import annotations

import enum
import errno
import os
import threading
from collections.abc import Sequence

from kvoffload.tiers.files import Buffer, FileOperations


class Fault(enum.StrEnum):
    """What every call that moves bytes does."""

    FAILS = "fails"
    HANGS = "hangs"
    WRONG = "wrong bytes"

    @property
    def text(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    Fault.FAILS: "every operation fails",
    Fault.HANGS: "every operation hangs",
    Fault.WRONG: "every read has wrong bytes",
}


class FaultyFiles(FileOperations):
    """The calls of `os`; from `begin` to `end` those that read, write or sync have a fault. Usable from any thread.

    Attributes:
        disturbed: calls that have had one.
    """

    def __init__(self) -> None:
        self.disturbed = 0
        self._fault: Fault | None = None
        self._changed = threading.Condition()

    def begin(self, fault: Fault) -> None:
        """From now on every call has this fault."""
        with self._changed:
            self._fault = fault

    def end(self) -> None:
        """From now on every call works; those that hang go on."""
        with self._changed:
            self._fault = None
            self._changed.notify_all()

    def preadv(self, file: int, views: Sequence[Buffer], offset: int) -> int:
        wrong = self._disturb() is Fault.WRONG
        count = super().preadv(file, views, offset)
        for view in views if wrong else ():  # a call may read several records
            view[0] ^= 1
        return count

    def pwritev(self, file: int, views: Sequence[Buffer], offset: int) -> int:
        self._disturb()
        return super().pwritev(file, views, offset)

    def fdatasync(self, file: int) -> None:
        self._disturb()
        super().fdatasync(file)

    def _disturb(self) -> Fault | None:
        """Fail, or hang until `end`; returns the fault of this call."""
        with self._changed:
            fault = self._fault
            if fault is None:
                return None
            self.disturbed += 1
            if fault is Fault.FAILS:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if fault is Fault.HANGS:
                self._changed.wait_for(lambda: self._fault is None)
            return fault

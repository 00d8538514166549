"""The system calls of the disk tier, and reads and writes of whole records with them. Offsets and sizes are bytes."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from kvoffload.internal.teardown import close_last, opened

Buffer: TypeAlias = memoryview  # of bytes, one-dimensional and contiguous: `row.data` of a numpy row
Transfer: TypeAlias = Callable[[int, Sequence[Buffer], int], int]  # preadv or pwritev

PAGE = 4096  # the unit of direct I/O: sizes, offsets and addresses are multiples of it
_MOST_RANGES = min(os.sysconf("SC_IOV_MAX"), 1024)  # of one call of preadv or pwritev; 1024 on Linux


class FileOperations:
    """The calls of `os` with files as descriptors, so that a test can record them or make them fail."""

    # `open` and `close` must be C functions, without Python around them: see `teardown.opened`.
    open: Callable[[str, int, int], int] = staticmethod(os.open)
    close: Callable[[int], None] = staticmethod(os.close)
    preadv: Transfer = staticmethod(os.preadv)
    pwritev: Transfer = staticmethod(os.pwritev)
    fdatasync: Callable[[int], None] = staticmethod(os.fdatasync)
    fsync: Callable[[int], None] = staticmethod(os.fsync)
    ftruncate: Callable[[int, int], None] = staticmethod(os.ftruncate)
    unlink: Callable[[str], None] = staticmethod(os.unlink)
    fstat: Callable[[int], os.stat_result] = staticmethod(os.fstat)
    flock: Callable[[int, int], None] = staticmethod(fcntl.flock)

    def fallocate(self, file: int, nbytes: int) -> None:
        os.posix_fallocate(file, 0, nbytes)


SYSTEM = FileOperations()


class OpenFile:
    """One file, opened for buffered I/O, and for direct I/O if that works. Usable from any thread.

    Headers and superblocks go through the page cache, payloads around it: they never share a page.

    Attributes:
        descriptor: of the file, for buffered I/O; -1 after `close`.
        direct: whether payloads bypass the page cache.
    """

    _files: list[int] = []  # noqa: RUF012  # what `__del__` finds if an interrupt came before `__init__`

    def __init__(self, path: str, operations: FileOperations, flags: int) -> None:
        self.path = path
        self.operations = operations
        self._writes = flags & os.O_ACCMODE != os.O_RDONLY
        self._files = []
        self.descriptor = self._open(flags)
        self._direct: int | None = None

    def _open(self, flags: int) -> int:
        return opened(self._files, self.operations.open, self.path, flags | os.O_CLOEXEC, 0o600)

    def _close(self, count: int) -> None:
        close_last(self._files, count, self.operations.close)

    def __del__(self) -> None:  # whoever opened it was interrupted
        if self._files:
            self._close(len(self._files))

    @property
    def direct(self) -> bool:
        return self._direct is not None

    @property
    def nbytes(self) -> int:
        return self.operations.fstat(self.descriptor).st_size

    def try_direct(self, offset: int) -> None:
        """Try direct I/O by reading a page at `offset` and writing it back; use it for payloads if that works.

        File systems differ (tmpfs, overlays). No other thread may write there meanwhile.
        """
        access = os.O_RDWR if self._writes else os.O_RDONLY
        try:
            file = self._open(access | os.O_DIRECT | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            same = os.path.samestat(self.operations.fstat(file), self.operations.fstat(self.descriptor))
            with mmap.mmap(-1, PAGE) as page, memoryview(page) as view:
                try:
                    copied = same and self.operations.preadv(file, [view], offset) == PAGE
                    copied = copied and (not self._writes or self.operations.pwritev(file, [view], offset) == PAGE)
                except OSError:
                    copied = False
            if copied:
                self._direct = file
        finally:
            if self._direct is None:
                self._close(1)

    def read(self, views: Sequence[Buffer], offset: int) -> bool:
        """Fill `views` with the bytes from `offset` on, through the page cache; False if the file ends before."""
        return self._transfer(self.operations.preadv, self.descriptor, views, offset)

    def write(self, views: Sequence[Buffer], offset: int) -> None:
        """Write all bytes of `views` at `offset`, through the page cache. Not durable before `sync`."""
        if not self._transfer(self.operations.pwritev, self.descriptor, views, offset):
            raise OSError(errno.EIO, "pwritev wrote nothing", self.path)

    def read_payload(self, views: Sequence[Buffer], offset: int) -> bool:
        """`read`, around the page cache if the addresses allow it."""
        return self._transfer_payload(self.operations.preadv, views, offset)

    def write_payload(self, views: Sequence[Buffer], offset: int) -> bool:
        """`write`, around the page cache if the addresses allow it; returns True."""
        if not self._transfer_payload(self.operations.pwritev, views, offset):
            raise OSError(errno.EIO, "pwritev wrote nothing", self.path)
        return True

    def sync(self) -> None:
        """Make all writes before this call durable.

        Raises:
            OSError: a write may be lost. A later call would not say so: the kernel reports a lost write once.
        """
        self.operations.fdatasync(self.descriptor)

    def close(self) -> None:
        """Unlock, and close the descriptors. Idempotent."""
        if self._writes and self.descriptor >= 0:  # a forked child has the same lock, and may go on for long
            self.operations.flock(self.descriptor, fcntl.LOCK_UN)
        self._direct, self.descriptor = None, -1
        self._close(len(self._files))

    def _transfer_payload(self, call: Transfer, views: Sequence[Buffer], offset: int) -> bool:
        if self._direct is not None:
            try:
                return self._transfer(call, self._direct, views, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return self._transfer(call, self.descriptor, views, offset)

    @staticmethod
    def _transfer(call: Transfer, file: int, views: Sequence[Buffer], offset: int) -> bool:
        """Repeat a call until all bytes are transferred; False if it transfers none."""
        left = views[0].nbytes if len(views) == 1 else sum(view.nbytes for view in views)
        while left:
            count = call(file, views if len(views) <= _MOST_RANGES else views[:_MOST_RANGES], offset)
            if count <= 0:
                return False
            left -= count
            offset += count
            if left:
                views = _after(views, count)
        return True


def _after(views: Iterable[Buffer], count: int) -> list[Buffer]:
    rest: list[Buffer] = []
    for view in views:
        if count >= view.nbytes:
            count -= view.nbytes
        else:
            rest.append(view[count:])
            count = 0
    return rest


def in_runs(
    call: Callable[[int, Sequence[Buffer]], bool], slots: Sequence[int], payloads: Sequence[Sequence[Buffer]]
) -> list[bool | OSError]:
    """Transfer payloads, consecutive slots with one `call`. If that fails, transfer its slots one by one."""
    results: list[bool | OSError] = []
    begin = 0
    for end in range(1, len(slots) + 1):
        if end < len(slots) and slots[end] == slots[end - 1] + 1:
            continue
        together = [view for views in payloads[begin:end] for view in views]
        try:
            result: bool | OSError = call(slots[begin], together)
        except OSError as error:
            result = error
        if result is not True and end - begin > 1:
            for at in range(begin, end):
                results += in_runs(call, slots[at : at + 1], payloads[at : at + 1])
        else:
            results += [result] * (end - begin)
        begin = end
    return results

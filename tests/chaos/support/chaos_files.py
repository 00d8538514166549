"""System calls of a disk tier for tests: they fail by seeded chance, and record what reaches the files."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvoffload.tiers.files import FileOperations

ERRORS = (errno.EIO, errno.ENOSPC, errno.EINTR, errno.EINVAL, errno.EDQUOT, errno.ESTALE)


@dataclass(frozen=True)
class Faults:
    """How often a call does what, 0.0 to 1.0 of all calls.

    Attributes:
        short: preadv and pwritev transfer a part, which may be nothing.
        error: an OSError, and nothing has happened.
        late_error: pwritev transfers a part or all, and raises OSError.
        sync_error: fdatasync and fsync raise EIO once: the kernel has dropped what was not durable.
        hang: the call waits for `ChaosFiles.release`, and then does its work.
    """

    short: float = 0.0
    error: float = 0.0
    late_error: float = 0.0
    sync_error: float = 0.0
    hang: float = 0.0


NO_FAULTS = Faults()


class Written(NamedTuple):
    path: str
    offset: int
    data: bytes


class Sized(NamedTuple):
    path: str
    nbytes: int
    shrinks: bool


class SyncBegun(NamedTuple):
    path: str
    number: int


class SyncEnded(NamedTuple):
    path: str
    number: int
    succeeded: bool


class Noted(NamedTuple):
    """What the program above the tier did between two calls; see `chaos_history`."""

    what: str
    arguments: tuple[Any, ...]


Event = Written | Sized | SyncBegun | SyncEnded | Noted


class EventLog:
    """What was written and synced, in order, by one process after the other."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.events: list[Event] = []

    def note(self, what: str, *arguments: Any) -> None:
        with self.lock:
            self.events.append(Noted(what, arguments))


class ChaosFiles(FileOperations):
    """The system calls of one process. Usable from any thread.

    Attributes:
        faults: may be replaced at any time.
        log: gets what was written and synced, if given.
        killed: set it to end the process: no call has an effect any more but `close`.
        injected: how often which fault has happened.
        hung: calls that hang now.
    """

    def __init__(self, seed: int = 0, faults: Faults = NO_FAULTS, log: EventLog | None = None) -> None:
        self.faults = faults
        self.log = log
        self.killed = False
        self.injected: Counter[str] = Counter()
        self.hung = 0
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._released = 0
        self._paths: dict[int, str] = {}

    def release(self) -> None:
        """What hangs now goes on."""
        with self._changed:
            self._released += 1
            self._changed.notify_all()

    def kill(self) -> None:
        """The process is killed; what it has written stays in the page cache."""
        self.killed = True
        self.release()

    # faults -------------------------------------------------------------------------------------------------------

    def _happens(self, name: str) -> bool:
        rate: float = getattr(self.faults, name)
        with self._changed:
            happens = rate > 0.0 and self._random.random() < rate
            self.injected[name] += happens
            return happens

    def _error(self) -> OSError:
        with self._changed:
            number = self._random.choice(ERRORS)
        return OSError(number, os.strerror(number))

    def _disturb(self) -> None:
        """Hang, or raise, as chance has it."""
        if not self.killed and self._happens("hang"):
            with self._changed:
                before = self._released
                self.hung += 1
                self._changed.wait_for(lambda: self._released != before or self.killed, 60)
                self.hung -= 1
        if self.killed:
            raise OSError(errno.EIO, "the process was killed")
        if self._happens("error"):
            raise self._error()

    def _part(self, views: Sequence[memoryview]) -> list[memoryview]:
        """The beginning of these ranges."""
        with self._changed:
            left = self._random.randrange(sum(view.nbytes for view in views) + 1)
        part: list[memoryview] = []
        for view in views:
            part.append(view[:left])
            left -= len(part[-1])
        return [view for view in part if view.nbytes]

    # calls --------------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self._disturb()
        file = super().open(path, flags, mode)
        self._paths.pop(file, None)
        if not flags & os.O_DIRECTORY:
            self._paths[file] = path
        return file

    def preadv(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        self._disturb()
        if self._happens("short"):
            views = self._part(views)
        return super().preadv(file, views, offset) if views else 0

    def pwritev(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        self._disturb()
        fails = self._happens("late_error")
        if fails or self._happens("short"):
            views = self._part(views) if not fails or self._random.random() < 0.5 else views
        count = self._write(file, views, offset) if views else 0
        if fails:
            raise self._error()
        return count

    def _write(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        if self.log is None:
            return super().pwritev(file, views, offset)
        with self.log.lock:
            if self.killed:
                raise OSError(errno.EIO, "the process was killed")
            count = super().pwritev(file, views, offset)
            self.log.events.append(Written(self._paths[file], offset, b"".join(views)[:count]))
            return count

    def fdatasync(self, file: int) -> None:
        self._sync(file)

    def fsync(self, file: int) -> None:
        self._sync(file)

    def _sync(self, file: int) -> None:
        """The disk is the log's: nothing is synced for real."""
        self._disturb()
        if self.log is None:
            if self._happens("sync_error"):
                raise OSError(errno.EIO, "lost")
            return
        path = self._paths.get(file)
        if path is None:  # of a folder: names are durable at once
            return
        with self.log.lock:
            number = len(self.log.events)
            self.log.events.append(SyncBegun(path, number))
        fails = self._happens("sync_error")
        with self.log.lock:
            if not self.killed:
                self.log.events.append(SyncEnded(path, number, not fails))
        if fails or self.killed:
            raise OSError(errno.EIO, "lost")

    def fallocate(self, file: int, nbytes: int) -> None:
        self._disturb()
        super().fallocate(file, nbytes)
        self._sized(file, nbytes, shrinks=False)

    def ftruncate(self, file: int, nbytes: int) -> None:
        self._disturb()
        super().ftruncate(file, nbytes)
        self._sized(file, nbytes, shrinks=True)

    def _sized(self, file: int, nbytes: int, *, shrinks: bool) -> None:
        if self.log is not None:
            with self.log.lock:
                self.log.events.append(Sized(self._paths[file], nbytes, shrinks))

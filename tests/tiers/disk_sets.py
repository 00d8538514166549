"""Small disk sets for tests: aligned memory, system calls that fail, and disks that lose what was not synced."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.tiers.disk_index import DiskIndex, DiskPut
from kvoffload.tiers.files import SYSTEM, FileOperations
from kvoffload.tiers.member_file import ReadResult, SlotPut
from kvoffload.tiers.slot_files import SlotFiles

SECTOR = 512
PAGE = 4096
LAYOUT = bytes(range(16))
ROWS = 2  # arrays that a record is spread over
SLOT_BYTES = ROWS * PAGE


def open_set(*paths: Path, slots: int = 8, **options: Any) -> SlotFiles:
    """A set with at least so many slots in each file. Its files are closed with the last reference to it."""
    nbytes = len(paths) * (2 * PAGE + -(-slots * 192 // PAGE) * PAGE + slots * SLOT_BYTES)
    defaults: dict[str, Any] = {
        "slot_bytes": SLOT_BYTES, "nbytes": nbytes, "layout_digest": LAYOUT, "identity": "model@1", "key": None,
        "reset": False, "read_only": False, "direct": False, "io_threads": None, "operations": SYSTEM,
    }  # fmt: skip
    return SlotFiles(paths, **(defaults | options))


def kill(files: SlotFiles) -> None:
    """End the process that has a set open: its locks are gone, and what is in the page cache stays."""
    for member in files._members:
        member.file.close()


def payload(number: int) -> list[memoryview]:
    """A record's bytes, which depend on the number alone, in aligned memory."""
    views = blank()
    rng = np.random.default_rng(number)
    for view in views:
        view[:] = rng.bytes(len(view))
    return views


def blank() -> list[memoryview]:
    """Aligned memory for a record."""
    whole = memoryview(mmap.mmap(-1, SLOT_BYTES))
    return [whole[start : start + PAGE] for start in range(0, SLOT_BYTES, PAGE)]


def same(first: Sequence[memoryview], second: Sequence[memoryview]) -> bool:
    return [bytes(each) for each in first] == [bytes(each) for each in second]


def write_one(
    files: SlotFiles,
    slot: int,
    key: bytes,
    tenant: str,
    views: Sequence[memoryview],
    sequence: int,
    position: int,
    wanted: Callable[[bytes], bool] = lambda _: True,
) -> bool:
    """`SlotFiles.write` of one record; raises what failed."""
    return _only(files.write([SlotPut(slot, key, position, views)], tenant, sequence, wanted))


def read_one(files: SlotFiles, slot: int, key: bytes, views: Sequence[memoryview]) -> bool:
    """`SlotFiles.read` of one record; raises what failed."""
    return _only(files.read([slot], [key], [views]))


def stored(files: SlotFiles, slot: int, key: bytes, number: int) -> bool:
    """Whether a slot has the record with this payload."""
    views = blank()
    return read_one(files, slot, key, views) and same(views, payload(number))


def write_key(disk: DiskIndex, put: DiskPut, key: bytes, views: Sequence[memoryview]) -> bool:
    """`DiskIndex.write` of one record; raises what failed."""
    return _only(disk.write(put, [key], [views]))


def read_key(disk: DiskIndex, key: bytes, views: Sequence[memoryview]) -> bool:
    """`DiskIndex.read` of one record; raises what failed."""
    return _only(disk.read([key], [views]))


def _only(results: Sequence[ReadResult]) -> bool:
    (result,) = results
    if isinstance(result, OSError):
        raise result
    return bool(result)


class FaultyFiles(FileOperations):
    """System calls that are recorded, and of which some fail.

    Attributes:
        calls: names of the calls, in order.
        failing: an errno by the name of the call that raises it, each time.
        most_bytes: that preadv and pwritev transfer in one call.
        before: called with the name before each call.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, int] = {}
        self.most_bytes: int | None = None
        self.before: Callable[[str], None] = lambda _: None

    def _note(self, name: str) -> None:
        self.calls.append(name)
        self.before(name)
        if name in self.failing:
            raise OSError(self.failing[name], os.strerror(self.failing[name]))

    def _short(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        if self.most_bytes is None:
            return views
        rest, left = list[memoryview](), self.most_bytes
        for view in views:
            rest.append(view[:left])
            left -= len(rest[-1])
        return rest

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self._note("open")
        return super().open(path, flags, mode)

    def preadv(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        self._note("preadv")
        return super().preadv(file, self._short(views), offset)

    def pwritev(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        self._note("pwritev")
        return super().pwritev(file, self._short(views), offset)

    def fdatasync(self, file: int) -> None:
        self._note("fdatasync")
        super().fdatasync(file)

    def fallocate(self, file: int, nbytes: int) -> None:
        self._note("fallocate")
        super().fallocate(file, nbytes)


class LosingFiles(FaultyFiles):
    """Files whose writes are not durable before a sync: `crash` leaves any subset of them, sector by sector.

    Attributes:
        lose_sync: the next sync fails, and what was written before it is lost without another word.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lose_sync = False
        self._versions: dict[tuple[str, int], list[bytes]] = defaultdict(list)  # the first one is durable
        self._lost: set[tuple[str, int]] = set()  # sectors of which the kernel forgot that they are not durable

    def pwritev(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{file}")
        first, last = offset // SECTOR, -(-(offset + sum(map(len, views))) // SECTOR)
        for sector in range(first, last):
            versions = self._versions[path, sector]
            if not versions:
                versions.append(os.pread(file, SECTOR, sector * SECTOR))
        count = super().pwritev(file, views, offset)
        for sector in range(first, last):
            self._versions[path, sector].append(os.pread(file, SECTOR, sector * SECTOR))
            self._lost.discard((path, sector))
        return count

    def fdatasync(self, file: int) -> None:
        super().fdatasync(file)
        path = os.readlink(f"/proc/self/fd/{file}")
        mine = [each for each in self._versions if each[0] == path]
        if self.lose_sync:
            self.lose_sync = False
            self._lost.update(mine)
            raise OSError(errno.EIO, "lost")
        for each in mine:
            if each not in self._lost:
                del self._versions[each]

    def crash(self, rng: random.Random, folder: Path) -> None:
        """Write to `folder` what the disks may hold after a crash now: of each sector one of its versions."""
        kept = rng.choice((0.0, 0.5, 1.0))  # the share of sectors whose latest version is there
        images: dict[str, bytearray] = {}
        for path in {path for path, _ in self._versions} | set(map(str, self._files(folder))):
            images[path] = bytearray(Path(path).read_bytes())
        for (path, sector), versions in self._versions.items():
            data = versions[-1] if rng.random() < kept else rng.choice(versions)
            images[path][sector * SECTOR : sector * SECTOR + len(data)] = data
        for path, image in images.items():
            target = folder / Path(path).name
            target.write_bytes(image)
            target.chmod(0o600)

    def _files(self, folder: Path) -> list[Path]:
        return [path for path in folder.parent.glob("*.kv") if path.parent != folder]


def flip(path: Path, offset: int, bits: int = 1) -> None:
    """Change bits of one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ bits]))

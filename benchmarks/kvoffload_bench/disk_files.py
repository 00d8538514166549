"""What `bench disk` compares: a DiskTier, and a bare loop of threads over the same slots of the same files."""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from kvoffload.internal.types import UInt8Array
from kvoffload.tiers import DiskTier, Limits
from kvoffload.tiers.checksums import make_checksum
from kvoffload.tiers.files import PAGE
from kvoffload.tiers.format import (
    HEADER_BYTES,
    HEADER_DTYPE,
    SUPERBLOCK_BYTES,
    TABLE_OFFSET,
    Superblock,
    unpack_superblock,
)

IDENTITY = "kvoffload bench disk"
LAYOUT = bytes(16)


class Place(NamedTuple):
    """Where the payload of a record lies: the number of the file, and an offset in bytes."""

    file: int
    offset: int


def pages(count: int, nbytes: int) -> UInt8Array:
    """Zeros in ordinary memory that begins with a page: uint8, (count, nbytes)."""
    return np.frombuffer(mmap.mmap(-1, count * nbytes), dtype=np.uint8).reshape(count, nbytes)


def tier_bytes(slots: int, slot_bytes: int, files: int) -> int:
    """The `nbytes` of a tier with at least so many slots, and with less than one more for each file."""
    each = -(-slots // files)
    return files * (TABLE_OFFSET + -(-each * HEADER_BYTES // PAGE) * PAGE + each * slot_bytes)


def open_tier(
    paths: Sequence[Path], pool: UInt8Array, slots: int, *, threads: int = 4, direct: bool = True
) -> DiskTier:
    """A tier with at least so many slots, whose records are rows of the pool."""
    nbytes = tier_bytes(slots, pool.shape[1], len(paths))
    limits = Limits(threads=threads, max_queued=1 << 20)
    tier = DiskTier(paths, nbytes=nbytes, identity=IDENTITY, direct=direct, limits=limits)
    tier.attach([pool], LAYOUT)
    return tier


def read_superblock(path: Path) -> Superblock:
    """Of a file that a tier has written."""
    with path.open("rb") as file:
        superblock = unpack_superblock(file.read(SUPERBLOCK_BYTES))
    assert superblock is not None, path
    return superblock


def places_of(paths: Sequence[Path]) -> dict[bytes, Place]:
    """Where the record of each key lies, as the header tables of the files say."""
    places: dict[bytes, Place] = {}
    for number, path in enumerate(paths):
        superblock = read_superblock(path)
        table = np.fromfile(path, dtype=HEADER_DTYPE, count=superblock.slots, offset=TABLE_OFFSET)
        for slot, (key, length) in enumerate(zip(table["key"], table["key_bytes"].tolist(), strict=True)):
            offset = superblock.data_offset + slot * superblock.slot_bytes
            places[key[:length].tobytes()] = Place(number, offset)
    return places


class BareLoop:
    """Threads that call pwritev or preadv once for each record, and do nothing else that a tier does.

    With buffered I/O they also compute the tier's checksum of each record. Close it after use.

    Args:
        paths: files that a tier has written.
        threads: that take records one after the other.
        direct: open the files for direct I/O.
    """

    def __init__(self, paths: Sequence[Path], *, threads: int, direct: bool) -> None:
        self._checksum = None if direct else make_checksum().of
        self._threads = threads
        with ExitStack() as undo:
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
            self._files: list[int] = []
            for path in paths:
                self._files.append(os.open(path, flags))
                undo.callback(os.close, self._files[-1])
            self._pool = undo.enter_context(ThreadPoolExecutor(threads))
            self._undo = undo.pop_all()

    def write(self, rows: Sequence[UInt8Array], places: Sequence[Place]) -> float:
        """Write rows of memory to their places; seconds."""

        def write(row: memoryview, place: Place) -> None:
            if self._checksum is not None:
                self._checksum([row])
            assert os.pwritev(self._files[place.file], [row], place.offset) == row.nbytes

        return self._run(write, rows, places)

    def read(self, rows: Sequence[UInt8Array], places: Sequence[Place]) -> float:
        """Read rows of memory from their places; seconds."""

        def read(row: memoryview, place: Place) -> None:
            assert os.preadv(self._files[place.file], [row], place.offset) == row.nbytes
            if self._checksum is not None:
                self._checksum([row])

        return self._run(read, rows, places)

    def sync(self) -> None:
        """Make durable what was written."""
        for file in self._files:
            os.fdatasync(file)

    def drop_page_cache(self) -> None:
        """The next buffered reads are from the disk; what was written must be durable."""
        for file in self._files:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def _run(
        self, call: Callable[[memoryview, Place], None], rows: Sequence[UInt8Array], places: Sequence[Place]
    ) -> float:
        waiting = deque(zip([row.data for row in rows], places, strict=True))

        def work() -> None:
            while waiting:
                try:
                    row, place = waiting.popleft()
                except IndexError:  # another thread took the last one
                    return
                call(row, place)

        begin = time.perf_counter()
        futures = [self._pool.submit(work) for _ in range(self._threads)]
        wait(futures)
        seconds = time.perf_counter() - begin
        for future in futures:
            future.result()
        return seconds

    def __enter__(self) -> BareLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

"""`kvoffload doctor --path`: tries with a file, which it removes again, whether a folder suits a disk tier."""

from __future__ import annotations

import mmap
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

from kvoffload.terminal.console import bandwidth
from kvoffload.tiers.files import SYSTEM, OpenFile
from kvoffload.tiers.sets import check_paths

MOST_BYTES = 256 << 20  # of the file
_LEAST_BYTES = 16 << 20
_SPARE_BYTES = 64 << 20  # stay free
_BLOCK_BYTES = 1 << 20
_THREADS = 4
_SECONDS = 0.5  # of writing, and of reading
MOUNTS = Path("/proc/self/mountinfo")


def probe(folder: Path) -> dict[str, Any]:
    """Try a folder with a file. Returns the findings; `problem` says why a disk tier cannot use it, or is None."""
    folder = Path(os.path.expanduser(folder))
    fields: dict[str, Any] = {
        "folder": str(folder), "problem": None, "file_system": None, "mode": None, "free_bytes": None,
        "direct_io": None, "probe_bytes": 0, "write_gb_per_s": None, "read_gb_per_s": None,
    }  # fmt: skip
    try:
        fields["mode"] = f"{stat.S_IMODE(folder.stat().st_mode):o}"
        fields["file_system"] = file_system(folder)
        state = os.statvfs(folder)
        fields["free_bytes"] = state.f_bavail * state.f_frsize
        check_paths([str(folder / "records.kv")])
        with tempfile.TemporaryDirectory(prefix="kvoffload-doctor-", dir=folder) as own:
            nbytes = min(MOST_BYTES, fields["free_bytes"] - _SPARE_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES
            file = OpenFile(f"{own}/probe.kv", SYSTEM, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            with closing(file):
                if nbytes >= _LEAST_BYTES:
                    SYSTEM.fallocate(file.descriptor, nbytes)
                    file.try_direct(0)
                    written, seconds = _write(file, nbytes)
                    found = {"probe_bytes": written, "write_gb_per_s": bandwidth(written, seconds)}
                    os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    found["read_gb_per_s"] = bandwidth(*_read(file, written))
                    fields |= found | {"direct_io": file.direct}
    except OSError as error:
        fields["problem"] = error.strerror or str(error)
    return fields


def file_system(folder: Path) -> str | None:
    """Return the type of a folder's file system, such as ext4; None if Linux does not say."""
    real = folder.resolve()
    found: dict[Path, str] = {}
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        names = before.split()
        if len(names) > 4 and after:
            mounted = Path(names[4].encode().decode("unicode_escape"))  # a space is \040
            if real.is_relative_to(mounted):
                found[mounted] = after.split()[0]  # the later one of two at one place counts
    return found[max(found, key=lambda mounted: len(mounted.parts))] if found else None


def _write(file: OpenFile, nbytes: int) -> tuple[int, float]:
    begin = time.perf_counter()
    memory = mmap.mmap(-1, _BLOCK_BYTES)
    memory.write(os.urandom(_BLOCK_BYTES))
    with memoryview(memory) as block:
        written = _transfer(lambda offset: file.write_payload([block], offset), nbytes)
    file.sync()
    return written, time.perf_counter() - begin


def _read(file: OpenFile, nbytes: int) -> tuple[int, float]:
    own = threading.local()

    def read(offset: int) -> None:
        if not hasattr(own, "block"):
            own.block = memoryview(mmap.mmap(-1, _BLOCK_BYTES))
        file.read_payload([own.block], offset)

    begin = time.perf_counter()
    return _transfer(read, nbytes), time.perf_counter() - begin


def _transfer(call: Callable[[int], object], nbytes: int) -> int:
    """Call with offsets from 0 on, in several threads, until all bytes are done or time is up. Returns the bytes."""
    blocks: Iterator[int] = iter(range(0, nbytes, _BLOCK_BYTES))
    end = time.perf_counter() + _SECONDS
    done = count()

    def work() -> None:
        for offset in blocks:
            call(offset)
            next(done)
            if time.perf_counter() >= end:
                return

    with ThreadPoolExecutor(_THREADS) as pool:
        for future in [pool.submit(work) for _ in range(_THREADS)]:
            future.result()
    return next(done) * _BLOCK_BYTES

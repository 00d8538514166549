"""What `bench disk` measures: a tier and a bare loop on the same files in turns, calls, and a restart."""

from __future__ import annotations

import mmap
import os
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from kvoffload.internal.types import UInt8Array
from kvoffload.terminal.console import Advance
from kvoffload.tiers import DiskTier, Limits, Outcome, TierJob
from kvoffload.tiers.checksums import DIGEST_BYTES, make_checksum
from kvoffload.tiers.files import PAGE
from kvoffload.tiers.format import (
    HEADER_BYTES,
    HEADER_DTYPE,
    SUPERBLOCK_BYTES,
    TABLE_OFFSET,
    Superblock,
    pack_header,
    unpack_superblock,
)
from kvoffload_bench import tier_calls
from kvoffload_bench.tier_calls import KEYS_OF_A_CALL, Verified, carry_out, measure_rounds, numbered_keys

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


# rounds in turns ------------------------------------------------------------------------------------------------------

WRITE, READ, COLD_READ, WARM_READ = "write", "read", "cold read", "warm read"
OPERATIONS = {"direct": (WRITE, READ), "buffered": (WRITE, COLD_READ, WARM_READ)}
_TIER, _BARE = 0, 1
_POISON = 0xA5
_KEY_BYTES = 16


def measure_cell(
    paths: Sequence[Path], *, slot_bytes: int, threads: int, direct: bool, nbytes: int, repeats: int, verified: Verified
) -> list[dict[str, Any]]:
    """Figures of one size, number of threads and kind of I/O, for each operation; empty without direct I/O.

    Args:
        paths: of files that do not exist; they are removed again.
        nbytes: of the records of a round, together.
        verified: is added to.
    """
    count = max(threads, nbytes // slot_bytes)
    pool = pages(2 * count, slot_bytes)
    tier = open_tier(paths, pool, count, threads=threads, direct=direct)
    try:
        if direct and not all(tier.direct_io):
            return []
        with BareLoop(paths, threads=threads, direct=direct) as bare:
            rounds = _Rounds(tier, bare, pool, paths, verified)
            io = "direct" if direct else "buffered"
            operations = OPERATIONS[io]
            what = {"record_bytes": slot_bytes, "threads": threads, "io": io, "records": count}
            execute = partial(rounds.execute, operations)
            return measure_rounds(execute, operations, repeats, what, count * slot_bytes)
    finally:
        tier.close()
        for path in paths:
            path.unlink(missing_ok=True)


class _Rounds:
    """Rounds of one cell; the first half of the pool holds what is written, the second half gets what is read."""

    def __init__(
        self, tier: DiskTier, bare: BareLoop, pool: UInt8Array, paths: Sequence[Path], verified: Verified
    ) -> None:
        count = len(pool) // 2
        self._tier, self._bare, self._paths, self._verified = tier, bare, paths, verified
        self._sources, self._targets = pool[:count], pool[count:]
        self._source_entries, self._target_entries = range(count), range(count, 2 * count)
        self._sources[:] = np.random.default_rng(0).integers(0, 256, self._sources.shape, np.uint8)
        self._number = 0
        self._keys: list[bytes] = []
        self._places: list[Place] = []

    def execute(self, operations: Sequence[str], bare_first: bool) -> dict[str, tuple[float, float]]:
        """Seconds of the tier and of the bare loop for each operation."""
        self._number += 1
        self._sources[:, :: 1 << 12] = self._number % 251  # other bytes in each page than the round before wrote
        self._keys = [(self._number << 64 | entry).to_bytes(_KEY_BYTES, "little") for entry in self._source_entries]
        order = (_BARE, _TIER) if bare_first and self._places else (_TIER, _BARE)
        seconds: dict[str, tuple[float, float]] = {}
        for operation in operations:
            calls = (self._put, self._write) if operation == WRITE else (self._get, self._read)
            each = [0.0, 0.0]
            for who in order:
                each[who] = self._turn(operation, calls[who])
            seconds[operation] = (each[_TIER], each[_BARE])
        return seconds

    def _turn(self, operation: str, call: Callable[[], float]) -> float:
        if operation == WRITE:
            seconds = call()
            assert self._tier.drain(), "a disk that cannot sync is no disk to measure"
            self._bare.sync()
            return seconds
        self._targets.fill(_POISON)
        if operation == COLD_READ:
            self._bare.drop_page_cache()
        seconds = call()
        self._verified.records += len(self._targets)
        self._verified.wrong += sum(
            not np.array_equal(*pair) for pair in zip(self._sources, self._targets, strict=True)
        )
        return seconds

    def _put(self) -> float:
        seconds = self._timed(self._tier.put, self._source_entries)
        places = places_of(self._paths)
        self._places = [places[key] for key in self._keys]
        return seconds

    def _get(self) -> float:
        return self._timed(self._tier.get, self._target_entries)

    def _timed(self, call: Callable[..., TierJob], entries: range) -> float:
        begin = time.perf_counter()
        carry_out(call, self._keys, entries, self._verified)
        return time.perf_counter() - begin

    def _write(self) -> float:
        return self._bare.write(list(self._sources), self._places)

    def _read(self) -> float:
        return self._bare.read(list(self._targets), self._places)


# calls, and a restart -------------------------------------------------------------------------------------------------

KEYS_OF_A_REQUEST = 512
_LOOKUPS = 200
_VERIFIED_RECORDS = 64
_HEADERS_AT_ONCE = 4096


def measure_calls(paths: Sequence[Path], *, slot_bytes: int, threads: int, verified: Verified) -> dict[str, Any]:
    """Host time of `put` and `get` a key: see `tier_calls.measure_calls`."""
    pool = pages(KEYS_OF_A_CALL, slot_bytes)
    pool.fill(1)
    tier = open_tier(paths, pool, 2 * KEYS_OF_A_CALL, threads=threads)
    try:
        calls = tier_calls.measure_calls(tier, verified)
    finally:
        tier.close()
        _remove(paths)
    return {"record_bytes": slot_bytes, "threads": threads} | calls


def restart_bytes(records: int, files: int) -> int:
    """What the files of `measure_restart` take, at most."""
    return records * (PAGE + 192) + files * 16 * PAGE


def measure_restart(paths: Sequence[Path], records: int, progress: Advance, verified: Verified) -> dict[str, Any]:
    """Time until a tier with many records is ready, and memory that it takes; then lookups in it.

    The files are written without the tier: headers of records of 4 KiB of zeros, which is what allocated space holds.
    Their header tables are not in the page cache.
    """
    pool = pages(_VERIFIED_RECORDS, PAGE)
    open_tier(paths, pool, records).close()
    try:
        for number, path in enumerate(paths):
            _fill(path, number, len(paths), records, progress)
            _drop_page_cache(path)
        begin, cpu = time.perf_counter(), time.process_time()
        tier = open_tier(paths, pool, records)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        found = tier.statistics().records or 0
        verified.missing += records - found
        locate = _locate_us(tier.contains, records)
        _verify(tier.get, pool, records, verified)
        tier.close()
        del tier
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            tier = open_tier(paths, pool, records)
            memory = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        tier.close()
    finally:
        _remove(paths)
    return {
        "records": records,
        "restart_seconds": seconds,
        "restart_cpu_seconds": cpu,
        "python_bytes_a_record": memory / records,
        "lookup_keys": min(KEYS_OF_A_REQUEST, records),
        "lookup_us": locate,
    }


def _fill(path: Path, number: int, files: int, records: int, progress: Advance) -> None:
    """Write the headers of one file: slot `s` of a set is slot `s // files` of file `s % files`."""
    superblock, checksum = read_superblock(path), make_checksum()
    member, digest = superblock.member_digest(), checksum.of([memoryview(bytes(PAGE))])
    mine = range(number, records, files)
    with path.open("r+b") as file:
        file.seek(TABLE_OFFSET)
        for first in range(0, len(mine), _HEADERS_AT_ONCE):
            progress(number * len(mine) + first, records)
            headers = [
                pack_header(
                    checksum, member, slot=first + place, key=numbered_keys(record, 1)[0], tenant=bytes(DIGEST_BYTES),
                    digest=digest, nbytes=PAGE, epoch=superblock.epoch, sequence=1 + record // KEYS_OF_A_REQUEST,
                    position=record % KEYS_OF_A_REQUEST,
                )
                for place, record in enumerate(mine[first : first + _HEADERS_AT_ONCE])
            ]  # fmt: skip
            file.write(b"".join(headers))
        file.flush()
        os.fsync(file.fileno())


def _locate_us(contains: Callable[[list[bytes]], list[bool]], records: int) -> float:
    count, random, times = min(KEYS_OF_A_REQUEST, records), Random(0), []
    for _ in range(_LOOKUPS):
        keys = numbered_keys(random.randrange(records - count + 1), count)
        begin = time.perf_counter()
        found = contains(keys)
        times.append(time.perf_counter() - begin)
        assert all(found), "each record is there"
    return statistics.median(times) * 1e6


def _verify(get: Callable[[list[bytes], range], TierJob], pool: Any, records: int, verified: Verified) -> None:
    """Read some of the records, and compare their bytes."""
    count = min(len(pool), records)
    pool.fill(1)
    step = records // count
    outcomes = get([numbered_keys(number * step, 1)[0] for number in range(count)], range(count)).wait()
    verified.records += count
    verified.missing += sum(outcome is not Outcome.DONE for outcome in outcomes)
    verified.wrong += sum(bool(row.any()) for row in pool[:count])


def _drop_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)

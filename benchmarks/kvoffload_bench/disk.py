"""`kvoffload bench disk`: a DiskTier compared with bare loops on the same file, its calls, and a restart.

Needs no GPU: records are in ordinary memory that begins with a page, and all times are those of the host and the disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from kvoffload.internal import hostinfo
from kvoffload.internal.types import UInt8Array
from kvoffload.terminal.console import Advance, CommandError, Output, mib, open_backend
from kvoffload.terminal.options import COMMON, LARGEST, add_command, numbers, whole
from kvoffload.tiers import DiskTier, Limits
from kvoffload.tiers import format as disk_format
from kvoffload.tiers.files import PAGE
from kvoffload.tiers.format import DIGEST_BYTES, make_checksum
from kvoffload_bench import disk_gpu, tier_calls
from kvoffload_bench.report import fixed
from kvoffload_bench.tier_calls import (
    KEYS_OF_A_CALL,
    LAYOUT,
    BareCalls,
    Rounds,
    Rows,
    Verified,
    numbered_keys,
    pages,
    tier_bytes,
)

Fields = Mapping[str, Any]
WRITE, READ, COLD_READ, WARM_READ = "write", "read", "cold read", "warm read"
OPERATIONS = {"direct": (WRITE, READ), "buffered": (WRITE, COLD_READ, WARM_READ)}


def open_tier(path: Path, pool: UInt8Array, slots: int, *, threads: int = 4, direct: bool = True) -> DiskTier:
    """A tier whose records are rows of the pool."""
    nbytes, limits = tier_bytes(slots, pool.shape[1]), Limits(threads=threads, max_queued=1 << 20)
    tier = DiskTier(path, nbytes=nbytes, identity="kvoffload bench disk", direct=direct, limits=limits)
    tier.attach([pool], LAYOUT)
    return tier


def read_superblock(path: Path) -> disk_format.Superblock:
    """Of a file that a tier has written."""
    with path.open("rb") as file:
        superblock = disk_format.unpack_superblock(file.read(disk_format.SUPERBLOCK_BYTES))
    assert superblock is not None, path
    return superblock


class BareLoop(BareCalls):
    """Threads that call pwritev or preadv once for each record, in the slots where the tier has put these records.

    With buffered I/O they also compute the tier's checksum of each record. A context manager.

    Args:
        path: of a file that the tier has written.
        threads: that take records one after the other.
        direct: open the file for direct I/O.
    """

    def __init__(self, path: Path, tier: DiskTier, *, threads: int, direct: bool) -> None:
        self._path, self._tier, self._threads = path, tier, threads
        self._checksum = None if direct else make_checksum().of
        self._offsets: list[int] = []
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        self._pool = ThreadPoolExecutor(threads)

    def put(self, keys: Sequence[bytes], rows: Rows) -> None:  # noqa: ARG002
        """Write all records of a round."""

        def write(row: memoryview, offset: int) -> None:
            if self._checksum is not None:
                self._checksum([row])
            assert os.pwritev(self._file, [row], offset) == row.nbytes

        self._share(write, rows)

    def get(self, keys: Sequence[bytes], rows: Rows) -> Rows:  # noqa: ARG002
        """Read all records of a round into the rows."""

        def read(row: memoryview, offset: int) -> None:
            assert os.preadv(self._file, [row], offset) == row.nbytes
            if self._checksum is not None:
                self._checksum([row])

        self._share(read, rows)
        return rows

    def settle(self, keys: Sequence[bytes]) -> None:
        """Make durable what was written, and find the records of the tier."""
        assert self._tier.drain(), "a disk that cannot sync is no disk to measure"
        os.fdatasync(self._file)
        superblock = read_superblock(self._path)
        table = np.fromfile(
            self._path, dtype=disk_format.HEADER_DTYPE, count=superblock.slots, offset=disk_format.TABLE_OFFSET
        )
        found = zip(table["key"], table["key_bytes"].tolist(), strict=True)
        slots = {key[:length].tobytes(): slot for slot, (key, length) in enumerate(found)}
        if all(key in slots for key in keys):  # else the tier has not yet put the keys of this round
            self._offsets = [superblock.data_offset + slots[key] * superblock.slot_bytes for key in keys]

    def before_get(self, operation: str) -> None:
        if operation == COLD_READ:
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def _share(self, call: Callable[[memoryview, int], None], rows: Rows) -> None:
        waiting = deque(zip(rows, self._offsets, strict=True))

        def work() -> None:
            while waiting:
                try:
                    row, offset = waiting.popleft()
                except IndexError:  # another thread took the last one
                    return
                call(row.data, offset)

        for future in [self._pool.submit(work) for _ in range(self._threads)]:
            future.result()

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._file)


def measure_cell(
    path: Path, *, slot_bytes: int, threads: int, direct: bool, nbytes: int, repeats: int, verified: Verified
) -> list[dict[str, Any]]:
    """Figures of one size, number of threads and kind of I/O, for each operation; empty without direct I/O.

    Args:
        path: of the file; what it held is lost.
        nbytes: of the records of a round, together.
        verified: is added to.
    """
    count, io = max(threads, nbytes // slot_bytes), "direct" if direct else "buffered"
    pool = pages(2 * count, slot_bytes)
    path.unlink(missing_ok=True)
    with closing(open_tier(path, pool, count, threads=threads, direct=direct)) as tier:
        if direct and not all(tier.direct_io):
            return []
        with BareLoop(path, tier, threads=threads, direct=direct) as bare:
            rounds = Rounds(tier, bare, pool, OPERATIONS[io], verified)
            return rounds.measure(count, count, repeats, {"record_bytes": slot_bytes, "threads": threads, "io": io})


# a restart ------------------------------------------------------------------------------------------------------------

KEYS_OF_A_REQUEST = 512
_LOOKUPS = 200
_VERIFIED_RECORDS = 64
_HEADERS_AT_ONCE = 4096


def measure_restart(path: Path, records: int, verified: Verified) -> dict[str, Any]:
    """Time until a tier with many records is ready, and memory that it takes; then lookups in it.

    The file is written without the tier: headers of records of 4 KiB of zeros, which is what allocated space holds.
    Its header table is not in the page cache.
    """
    pool = pages(_VERIFIED_RECORDS, PAGE)
    path.unlink()
    open_tier(path, pool, records).close()
    _fill(path, records)
    begin, cpu = time.perf_counter(), time.process_time()
    tier = open_tier(path, pool, records)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    verified.missing += records - (tier.statistics().records or 0)
    keys_of_lookup, random, times = min(KEYS_OF_A_REQUEST, records), Random(0), []
    for _ in range(_LOOKUPS):
        keys = numbered_keys(random.randrange(records - keys_of_lookup + 1), keys_of_lookup)
        begin = time.perf_counter()
        found = tier.contains(keys)
        times.append(time.perf_counter() - begin)
        assert all(found), "each record is there"
    count = min(len(pool), records)
    pool.fill(1)
    job = tier.get([numbered_keys(number * (records // count), 1)[0] for number in range(count)], range(count))
    job.wait()
    verified.note(job)
    verified.compare(pool[:count], [np.zeros(PAGE, np.uint8)] * count)
    tier.close()
    del tier
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tier = open_tier(path, pool, records)
        memory = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    tier.close()
    return {
        "records": records,
        "restart_seconds": seconds,
        "restart_cpu_seconds": cpu,
        "python_bytes_a_record": memory / records,
        "lookup_keys": keys_of_lookup,
        "lookup_us": statistics.median(times) * 1e6,
    }


def _fill(path: Path, records: int) -> None:
    """Write the headers of all records, and drop them from the page cache."""
    superblock, checksum = read_superblock(path), make_checksum()
    member, digest = superblock.member_digest(), checksum.of([memoryview(bytes(PAGE))])
    with path.open("r+b") as file:
        file.seek(disk_format.TABLE_OFFSET)
        for first in range(0, records, _HEADERS_AT_ONCE):
            headers = [
                disk_format.pack_header(
                    checksum, member, slot=record, key=numbered_keys(record, 1)[0], tenant=bytes(DIGEST_BYTES),
                    digest=digest, nbytes=PAGE, epoch=superblock.epoch, sequence=1 + record // KEYS_OF_A_REQUEST,
                    position=record % KEYS_OF_A_REQUEST,
                )
                for record in range(first, min(first + _HEADERS_AT_ONCE, records))
            ]  # fmt: skip
            file.write(b"".join(headers))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# the command ----------------------------------------------------------------------------------------------------------

_SPARE_BYTES = 64 << 20  # of a disk, that stay free


def add_parser(benches: Any) -> None:
    parser = add_command(
        benches, "disk", "a disk tier compared with bare loops of preadv and pwritev",
        "Writes and reads records with a DiskTier and with bare loops on the same file, in interleaved rounds; then "
        "times calls and a restart. Uses no GPU without --gpu, and removes its file.",
        example="bench disk --path /mnt/nvme --sizes 2097152 --threads 4", common=COMMON,
    )  # fmt: skip
    add = parser.add_argument
    add("--path", type=Path, default=Path(), metavar="FOLDER", help="where its file is made (default: here)")
    add("--threads", type=numbers, default=[1, 4, 8], metavar="N,...", help="default 1,4,8")
    add("--io", choices=("direct", "buffered", "both"), default="both", help="default both")
    add("--records", type=whole(1, LARGEST), default=100_000, metavar="N", help="of the restart (default 100000)")
    add("--gpu", action="store_true", help="also the GPU's transfers while the disk works")
    tier_calls.add_tier_options(parser, 256 << 20, 1 << 50)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 0 if every record was right, else 1. The file is removed also when it is interrupted."""
    output = Output(arguments.json)
    _check(arguments)
    verified = Verified()
    with _new_file(arguments.path) as path:
        try:
            with output.progress("disk") as progress:
                fields = _measure(arguments, path, verified, progress)
            if arguments.gpu:
                with open_backend(arguments, note=False) as device:
                    fields["transfers"] = disk_gpu.measure(device, path, repeats=arguments.repeats)
        except OSError as error:
            raise CommandError(f"{error.filename or 'the file in --path'}: {error.strerror or error}") from error
    status = tier_calls.conclude(arguments, fields, verified, show, output)
    if arguments.gpu:
        disk_gpu.show(fields["transfers"], output)
        return status or bool(disk_gpu.wrong(fields["transfers"]))
    return status


def _measure(arguments: argparse.Namespace, path: Path, verified: Verified, progress: Advance) -> dict[str, Any]:
    modes = {"direct": [True], "buffered": [False], "both": [True, False]}[arguments.io]
    cells: list[dict[str, Any]] = []
    without_direct = False
    planned = [(size, count, mode) for size in arguments.sizes for count in arguments.threads for mode in modes]
    for number, (size, threads, direct) in enumerate(planned):
        progress(number, len(planned) + 2)
        found = measure_cell(
            path, slot_bytes=size, threads=threads, direct=direct, nbytes=arguments.nbytes, repeats=arguments.repeats,
            verified=verified,
        )  # fmt: skip
        without_direct |= not found
        cells += found
    progress(len(planned), len(planned) + 2)
    size, threads = min(arguments.sizes), min(arguments.threads, key=lambda count: abs(count - 4))
    pool = pages(KEYS_OF_A_CALL, size)
    pool.fill(1)
    path.unlink()
    with closing(open_tier(path, pool, 2 * KEYS_OF_A_CALL, threads=threads)) as tier:
        calls = {"record_bytes": size, "threads": threads} | tier_calls.measure_calls(tier, verified)
    return {
        "benchmark": "disk",
        "folder": str(arguments.path),
        "usable_cpus": hostinfo.usable_cpus(),
        "nbytes": arguments.nbytes,
        "repeats": arguments.repeats,
        "no_direct_io": without_direct,
        "cells": cells,
        "calls": calls,
        "restart": measure_restart(path, arguments.records, verified),
    }


def _check(arguments: argparse.Namespace) -> None:
    """Raise CommandError, or CapabilityError, for what could not be carried out."""
    tier_calls.check_options(arguments, "--threads", arguments.threads, 256)
    folder, sizes = arguments.path, arguments.sizes
    if not folder.is_dir():
        raise CommandError(f"--path {folder}: there is no such folder; create it, or give another one")
    largest = max(max(max(arguments.threads), arguments.nbytes // size) * size for size in sizes)
    tier_calls.require_memory(2 * largest, "lower --nbytes")
    rounds = tier_bytes(-(-largest // min(sizes)), min(sizes)) + max(sizes)
    restart = arguments.records * (PAGE + disk_format.HEADER_BYTES) + 16 * PAGE
    needed, state = max(rounds, restart) + _SPARE_BYTES, os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    if free < needed:
        raise CommandError(
            f"--path {folder}: {mib(needed)} are needed, and {mib(free)} are free; lower --nbytes or --records, or "
            "give another folder"
        )


@contextmanager
def _new_file(folder: Path) -> Iterator[Path]:
    """A file that does not exist yet in a new folder, which is removed at the end."""
    try:
        created = Path(tempfile.mkdtemp(prefix="kvoffload-bench-", dir=folder.resolve()))
    except OSError as error:
        raise CommandError(f"--path {folder}: {error.strerror}") from error
    try:
        yield created / "records.kv"
    finally:
        shutil.rmtree(created, ignore_errors=True)


def show(fields: Fields, output: Output) -> None:
    """Print the verdict, then a table for each kind of I/O, then calls and the restart."""
    by_io = {io: [each for each in fields["cells"] if each["io"] == io] for io in OPERATIONS}
    found = ", ".join(f"{tier_calls.ratios_text(cells)} {io}" for io, cells in by_io.items() if cells)
    output.line(f"bench disk: the tier has {found}, times a bare loop's bandwidth")
    for io, cells in by_io.items():
        if cells:
            bare = "a bare loop" if io == "direct" else "a bare loop with checksums"
            title = f"{io} I/O, {mib(fields['nbytes'])} a round: bandwidth over that of {bare}, and GB/s"
            tier_calls.show_cells(title, cells, "threads", OPERATIONS[io], output)
    if fields["no_direct_io"]:
        output.line("")
        output.line("direct I/O does not work here: records go through the page cache")
    calls, restart = fields["calls"], fields["restart"]
    with_records = f"restart with {restart['records']:,} records, seconds"
    lines = [(f"host time of {name}(), of {calls['keys']} keys, us a key", fixed(calls[f"{name}_us"]))
             for name in ("put", "get")]  # fmt: skip
    lines += [
        (with_records, fixed(restart["restart_seconds"], 2)),
        ("CPU time of that, seconds", fixed(restart["restart_cpu_seconds"], 2)),
        ("Python memory a record, bytes", fixed(restart["python_bytes_a_record"], 0)),
        (f"contains() of {restart['lookup_keys']} keys, us", fixed(restart["lookup_us"], 0)),
    ]
    output.table("calls and a restart", ("", "measured"), lines)
    output.line("")
    output.line(tier_calls.verified_text(fields))
    output.line(f"in {fields['folder']}; {fields['usable_cpus']} usable CPUs")

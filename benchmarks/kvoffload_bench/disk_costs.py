"""`bench disk`: host time of calls in the caller, and a restart with many records."""

from __future__ import annotations

import os
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from kvoffload.terminal.console import Advance
from kvoffload.tiers import Outcome, TierJob
from kvoffload.tiers.checksums import DIGEST_BYTES, make_checksum
from kvoffload.tiers.files import PAGE
from kvoffload.tiers.format import TABLE_OFFSET, pack_header
from kvoffload_bench import tier_calls
from kvoffload_bench.disk_files import open_tier, pages, read_superblock
from kvoffload_bench.tier_calls import KEYS_OF_A_CALL, Verified, numbered_keys

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

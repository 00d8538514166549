"""What benchmarks of tiers share: a tier and bare calls in turns, the host time of calls, tables, and options."""

from __future__ import annotations

import argparse
import itertools
import mmap
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.internal import hostinfo
from kvoffload.internal.types import UInt8Array
from kvoffload.terminal.console import CommandError, Output, as_json, mib, require_writable, write_whole
from kvoffload.terminal.options import add_common_options, numbers, whole
from kvoffload.tiers import Outcome, Tier, TierJob
from kvoffload.tiers.files import PAGE
from kvoffload.tiers.format import HEADER_BYTES, TABLE_OFFSET, make_checksum
from kvoffload_bench.harness import Undoing
from kvoffload_bench.report import fixed

KEYS_OF_A_CALL = 64
LAYOUT = bytes(16)
POISON = 0xA5
_CALLS = 30
_TIER, _BARE = 0, 1

Rows = Sequence[UInt8Array]


def pages(count: int, nbytes: int) -> UInt8Array:
    """Zeros in ordinary memory that begins with a page: uint8, (count, nbytes)."""
    return np.frombuffer(mmap.mmap(-1, count * nbytes), dtype=np.uint8).reshape(count, nbytes)


def tier_bytes(slots: int, slot_bytes: int) -> int:
    """The `nbytes` of a tier with so many slots."""
    return TABLE_OFFSET + -(-slots * HEADER_BYTES // PAGE) * PAGE + slots * slot_bytes


@dataclass
class Verified:
    """Records that were read and compared, and those of them that had wrong bytes or were missing."""

    records: int = 0
    wrong: int = 0
    missing: int = 0

    def note(self, job: TierJob) -> None:
        """Count keys that are not DONE."""
        self.missing += sum(outcome is not Outcome.DONE for outcome in job.outcomes)

    def compare(self, found: Iterable[UInt8Array], right: Iterable[UInt8Array]) -> None:
        for pair in zip(found, right, strict=False):
            self.records += 1
            self.wrong += not np.array_equal(*pair)


def numbered_keys(start: int, count: int) -> list[bytes]:
    """Keys of 16 bytes; new objects each time, as requests bring them."""
    return [number.to_bytes(16, "little") for number in range(start + 1, start + count + 1)]


# rounds in turns ------------------------------------------------------------------------------------------------------


class BareCalls(Undoing):
    """What a tier is compared with. A context manager."""

    def put(self, keys: Sequence[bytes], rows: Rows) -> object:
        """Write a batch."""
        raise NotImplementedError

    def get(self, keys: Sequence[bytes], rows: Rows) -> Rows:
        """Read a batch, into the rows if that is possible. Returns the arrays that hold it."""
        raise NotImplementedError

    def settle(self, keys: Sequence[bytes]) -> None:
        """The tier, or this, has put the keys of a round."""

    def before_get(self, operation: str) -> None:
        """The keys of a round are about to be read."""

    def end(self, keys: Sequence[bytes]) -> None:
        """A round has ended."""


class Rounds:
    """Rounds of a tier and of bare calls in turns. Only the calls themselves are timed.

    Args:
        pool: that the tier is attached to. The first half holds what is put, the second half gets what is read.
        operations: their names: the first one puts, the others get.
        verified: is added to.
    """

    def __init__(
        self, tier: Tier, bare: BareCalls, pool: UInt8Array, operations: Sequence[str], verified: Verified
    ) -> None:
        self._tier, self._bare, self._pool, self._operations, self._verified = tier, bare, pool, operations, verified
        self._half, self._rows, self._round = len(pool) // 2, list(pool), 0
        pool[: self._half] = np.random.default_rng(0).integers(0, 256, (self._half, pool.shape[1]), np.uint8)

    def measure(self, records: int, batch: int, repeats: int, what: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A record for each operation, after one round that does not count.

        Args:
            records: of a round.
            batch: records of a call, which is waited for.
            what: of each record, beside its figures.
        """
        rounds = [self._execute(records, batch, bare_first=number % 2 == 0) for number in range(repeats + 1)][1:]
        nbytes, found = records * self._pool.shape[1], []
        for name in self._operations:
            tier, bare = (statistics.median(each[name][who] for each in rounds) for who in (_TIER, _BARE))
            ratios = [each[name][_BARE] / each[name][_TIER] for each in rounds]
            record = {**what, "records": records, "operation": name, "ratio": bare / tier}
            record |= {"ratio_lowest_round": min(ratios), "ratio_highest_round": max(ratios)}
            found.append(record | {"tier_gb_per_s": nbytes / tier / 1e9, "bare_gb_per_s": nbytes / bare / 1e9})
        return found

    def _execute(self, records: int, batch: int, *, bare_first: bool) -> dict[str, list[float]]:
        """Seconds of each operation, of the tier and of the bare calls."""
        self._round += 1
        self._pool[: self._half, ::PAGE] = self._round % 251  # other bytes in each page than the round before put
        keys = numbered_keys(self._round << 32, records)
        parts = [slice(at, at + batch) for at in range(0, records, batch)]
        turns = (_BARE, _TIER) if bare_first and self._round > 1 else (_TIER, _BARE)
        seconds: dict[str, list[float]] = {name: [0.0, 0.0] for name in self._operations}
        try:
            for name, who in itertools.product(self._operations, turns):
                put = name == self._operations[0]
                if not put:
                    self._pool[self._half :].fill(POISON)
                    self._bare.before_get(name)
                begin = time.perf_counter()
                found = [self._call(who, put, keys[part], part) for part in parts]
                seconds[name][who] = time.perf_counter() - begin
                if put:
                    self._bare.settle(keys)
                else:
                    self._verified.compare(itertools.chain.from_iterable(found), self._rows)
        finally:
            self._bare.end(keys)
        return seconds

    def _call(self, who: int, put: bool, keys: Sequence[bytes], part: slice) -> Any:
        """Put or get a batch. Returns the arrays that hold what was read."""
        first = 0 if put else self._half
        entries = range(first + part.start, first + part.stop)
        rows = self._rows[entries.start : entries.stop]
        if who == _BARE:
            return self._bare.put(keys, rows) if put else self._bare.get(keys, rows)
        jobs: list[TierJob] = []
        ended = threading.Event()

        def notify() -> None:  # a cache waits in this way, too: without polling
            if jobs and jobs[0].done:
                ended.set()

        call = self._tier.put if put else self._tier.get
        jobs.append(call(keys, entries, notify=notify))
        notify()
        ended.wait()
        self._verified.note(jobs[0])
        return rows


def measure_calls(tier: Tier, verified: Verified, between: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Host time of `put` and `get` a key, until the call returns. The tier's threads begin while it is still going on.

    Args:
        tier: with a pool of 64 entries or more.
        verified: is added to.
        between: called after each put and get.
    """
    count = KEYS_OF_A_CALL
    times: dict[str, list[float]] = {"put": [], "get": []}
    for number in range(_CALLS):
        keys = numbered_keys(number * count, count)
        for name, call in (("put", tier.put), ("get", tier.get)):
            begin = time.perf_counter()
            job = call(keys, range(count))
            times[name].append(time.perf_counter() - begin)
            job.wait()
            verified.note(job)
        between()
    return {"keys": count} | {f"{name}_us": statistics.median(each) / count * 1e6 for name, each in times.items()}


# what is printed ------------------------------------------------------------------------------------------------------


def ratios_text(cells: Sequence[Mapping[str, Any]]) -> str:
    """How near the tier comes to bare calls in these cells: at least, and in the middle."""
    ratios = [each["ratio"] for each in cells]
    return f"{min(ratios):.2f} (lowest) and {statistics.median(ratios):.2f} (median)"


def show_cells(
    title: str, cells: Sequence[Mapping[str, Any]], second: str, operations: Sequence[str], output: Output
) -> None:
    """A line for each size of records and each `second`, threads or records in flight."""
    key = second.replace(" ", "_")
    columns = ["record", second, *itertools.chain.from_iterable((name, "GB/s") for name in operations)]
    lines: dict[tuple[int, int], list[str]] = {}
    for cell in cells:
        line = lines.setdefault((cell["record_bytes"], cell[key]), [mib(cell["record_bytes"]), str(cell[key])])
        line += [f"{cell['ratio']:.2f}", fixed(cell["tier_gb_per_s"], 2)]
    output.table(title, columns, list(lines.values()))


def verified_text(fields: Mapping[str, Any]) -> str:
    """How many records were compared."""
    missing = f", {fields['missing_records']} missing" if fields["missing_records"] else ""
    return f"{fields['verified_records']:,} records verified, {fields['wrong_records']} wrong{missing}"


# the command ----------------------------------------------------------------------------------------------------------


def add_tier_options(parser: argparse.ArgumentParser, nbytes: int, most: int) -> None:
    """The options that both commands have."""
    add, sizes = parser.add_argument, [256 << 10, 1 << 20, 2 << 20, 4 << 20]
    add("--sizes", type=numbers, default=sizes, metavar="N,...", help="bytes of a record")
    add("--nbytes", type=whole(PAGE, most), default=nbytes, metavar="N", help=f"bytes of a round ({nbytes})")
    add("--repeats", type=whole(1, 1_000_000), default=5, metavar="N", help="timed rounds (default 5)")
    add("--save", type=Path, metavar="FILE", help="write all figures as JSON")
    add_common_options(parser)


def check_options(arguments: argparse.Namespace, option: str, values: Sequence[int], most: int) -> None:
    """Raise CommandError, or CapabilityError, for what could not be carried out."""
    if arguments.save is not None:
        require_writable("--save", arguments.save)
    make_checksum()
    for size in arguments.sizes:
        if size % PAGE:
            raise CommandError(f"--sizes must be multiples of {PAGE}, got {size}")
    if max(values) > most:
        raise CommandError(f"{option} must be at most {most}, got {max(values)}")


def require_memory(nbytes: int, remedy: str) -> None:
    available = hostinfo.available_bytes()
    if available is not None and nbytes > available:
        raise CommandError(f"{mib(nbytes)} of host memory are needed, and {mib(available)} are available; {remedy}")


def conclude(
    arguments: argparse.Namespace,
    fields: dict[str, Any],
    verified: Verified,
    show: Callable[[dict[str, Any], Output], None],
    output: Output,
) -> int:
    """Save and print; 0 if every record was right, else 1."""
    fields["verified_records"] = verified.records
    fields["wrong_records"], fields["missing_records"] = verified.wrong, verified.missing
    if arguments.save is not None:  # first: standard output may turn out to be full
        write_whole("--save", arguments.save, (as_json(fields) + "\n").encode())
    output.result(fields)
    show(fields, output)
    return 1 if verified.wrong or verified.missing else 0

"""What benchmarks of tiers share: rounds of a tier and of bare calls in turns, host time, tables, the command."""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvoffload.internal import hostinfo
from kvoffload.terminal.console import CommandError, Output, as_json, mib
from kvoffload.terminal.files import require_writable, write_whole
from kvoffload.terminal.options import add_common_options, add_wide, numbers, whole
from kvoffload.tiers import Outcome, Tier, TierJob
from kvoffload.tiers.checksums import make_checksum
from kvoffload.tiers.files import PAGE
from kvoffload_bench.report import fixed

KEYS_OF_A_CALL = 64
_CALLS = 30
_KEY_BYTES = 16
_WARM_UP = 1  # rounds that are not counted


@dataclass
class Verified:
    """Records that were read and compared, and those of them that had wrong bytes or were missing."""

    records: int = 0
    wrong: int = 0
    missing: int = 0

    def note(self, job: TierJob) -> None:
        """Count keys that are not DONE."""
        self.missing += sum(outcome is not Outcome.DONE for outcome in job.outcomes)


@dataclass
class Times:
    """Seconds of each counted round: of the tier, and of the bare loop."""

    tier: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)

    def figures(self, nbytes: int) -> dict[str, Any]:
        """For JSON: bandwidths of rounds that move so many bytes, and the tier's over the bare loop's."""
        tier, bare = statistics.median(self.tier), statistics.median(self.bare)
        rounds = [of_bare / of_tier for of_tier, of_bare in zip(self.tier, self.bare, strict=True)]
        return {
            "ratio": bare / tier,
            "ratio_lowest_round": min(rounds),
            "ratio_highest_round": max(rounds),
            "tier_gb_per_s": nbytes / tier / 1e9,
            "bare_gb_per_s": nbytes / bare / 1e9,
        }


def measure_rounds(
    execute: Callable[[bool], Mapping[str, tuple[float, float]]],
    operations: Sequence[str],
    repeats: int,
    what: Mapping[str, Any],
    nbytes: int,
) -> list[dict[str, Any]]:
    """A record for each operation, after one round that does not count.

    Args:
        execute: a round, in which the bare calls are first if it is given True; seconds of the tier and of these.
        what: of each record, beside its figures.
        nbytes: that a round moves.
    """
    times = {operation: Times() for operation in operations}
    for number in range(-_WARM_UP, repeats):
        seconds = execute(bool(number % 2))
        for operation, (of_tier, of_bare) in seconds.items() if number >= 0 else ():
            times[operation].tier.append(of_tier)
            times[operation].bare.append(of_bare)
    return [{**what, "operation": name} | each.figures(nbytes) for name, each in times.items()]


def numbered_keys(start: int, count: int) -> list[bytes]:
    """Keys of 16 bytes; new objects each time, as requests bring them."""
    return [number.to_bytes(_KEY_BYTES, "little") for number in range(start + 1, start + count + 1)]


def carry_out(call: Callable[..., TierJob], keys: Sequence[bytes], entries: Sequence[int], verified: Verified) -> None:
    """`put` or `get`, and wait for the last outcome without polling, as caches do."""
    jobs: list[TierJob] = []
    ended = threading.Event()

    def notify() -> None:
        if jobs and jobs[0].done:
            ended.set()

    jobs.append(call(keys, entries, notify=notify))
    notify()
    ended.wait()
    verified.note(jobs[0])


def measure_calls(tier: Tier, verified: Verified, between: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Host time of `put` and `get` a key, until the call returns: wall clock and CPU of the calling thread.

    The threads of the tier begin while the call is still going on.

    Args:
        tier: with a pool of 64 entries or more.
        verified: is added to.
        between: called after each put and get.
    """
    count = KEYS_OF_A_CALL
    times: dict[str, list[tuple[float, float]]] = {"put": [], "get": []}
    for number in range(_CALLS):
        keys = numbered_keys(number * count, count)
        for name, call in (("put", tier.put), ("get", tier.get)):
            wall, cpu = time.perf_counter(), time.thread_time()
            job = call(keys, range(count))
            times[name].append((time.perf_counter() - wall, time.thread_time() - cpu))
            job.wait()
            verified.note(job)
        between()
    fields: dict[str, Any] = {"keys": count}
    for name, calls in times.items():
        wall_times, cpu_times = zip(*calls, strict=True)
        fields[f"{name}_us"] = statistics.median(wall_times) / count * 1e6
        fields[f"{name}_cpu_us"] = statistics.median(cpu_times) / count * 1e6
    return fields


# what is printed ------------------------------------------------------------------------------------------------------


def ratios_text(name: str, cells: Sequence[Mapping[str, Any]]) -> str:
    """How near the tier comes to bare calls in these cells: at least, and in the middle."""
    ratios = [each["ratio"] for each in cells]
    return f"{name} {min(ratios):.2f} (lowest) and {statistics.median(ratios):.2f} (median)"


def show_cells(
    title: str, cells: Sequence[Mapping[str, Any]], second: str, operations: Sequence[str], digits: int, output: Output
) -> None:
    """A line for each size of records and each `second`, threads or records in flight."""
    key = second.replace(" ", "_")
    columns = ["record", second]
    for name in operations:
        columns += [name, "GB/s", *(("bare GB/s", "rounds") if output.wide else ())]
    by_place = {(each["record_bytes"], each[key], each["operation"]): each for each in cells}
    lines = []
    for nbytes, count in dict.fromkeys((each["record_bytes"], each[key]) for each in cells):
        line = [mib(nbytes), str(count)]
        for name in operations:
            cell = by_place[nbytes, count, name]
            line += [f"{cell['ratio']:.2f}", fixed(cell["tier_gb_per_s"], digits)]
            if output.wide:
                spread = f"{cell['ratio_lowest_round']:.2f} to {cell['ratio_highest_round']:.2f}"
                line += [fixed(cell["bare_gb_per_s"], digits), spread]
        lines.append(line)
    output.table(title, columns, lines)


def verified_text(fields: Mapping[str, Any]) -> str:
    """How many records were compared."""
    missing = f", {fields['missing_records']} missing" if fields["missing_records"] else ""
    return f"{fields['verified_records']:,} records verified, {fields['wrong_records']} wrong{missing}"


# the command ----------------------------------------------------------------------------------------------------------


def add_tier_options(parser: argparse.ArgumentParser, wide: str, nbytes: int, most: int) -> None:
    """The options that both commands have."""
    sizes = [256 << 10, 1 << 20, 2 << 20, 4 << 20]
    parser.add_argument("--sizes", type=numbers, default=sizes, metavar="N,...", help="bytes of a record")
    parser.add_argument(
        "--nbytes", type=whole(PAGE, most), default=nbytes, metavar="N", help=f"bytes of a round ({nbytes})"
    )
    parser.add_argument("--repeats", type=whole(1, 1_000_000), default=5, metavar="N", help="timed rounds (default 5)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write all figures as JSON")
    add_wide(parser, wide)
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

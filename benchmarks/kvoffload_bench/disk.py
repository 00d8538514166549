"""`kvoffload bench disk`: a DiskTier compared with bare loops on the same files, and what it costs the host.

Needs no GPU: records are in ordinary memory that begins with a page, and all times are those of the host and the disk.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvoffload.internal import hostinfo
from kvoffload.terminal.console import Advance, CommandError, Output, mib, open_backend
from kvoffload.terminal.options import COMMON, LARGEST, add_command, numbers, whole
from kvoffload_bench import disk_gpu
from kvoffload_bench.disk_measure import (
    OPERATIONS,
    measure_calls,
    measure_cell,
    measure_restart,
    restart_bytes,
    tier_bytes,
)
from kvoffload_bench.report import fixed
from kvoffload_bench.tier_calls import (
    Verified,
    add_tier_options,
    check_options,
    conclude,
    ratios_text,
    require_memory,
    show_cells,
    verified_text,
)

Fields = Mapping[str, Any]
_LARGE_BYTES = 1 << 20
_SMALL_BAR, _LARGE_BAR, _BUFFERED_BAR = 0.75, 0.9, 0.9
_CALL_BAR_US, _RESTART_BAR_SECONDS, _MEMORY_BAR_BYTES = 30, 3, 250
_BAR_RECORDS = 1_000_000


class _Bar(NamedTuple):
    what: str
    value: str
    bar: str


def show(fields: Fields, output: Output) -> None:
    """Print the verdict, then a table for each kind of I/O, and one of all bars."""
    output.line(verdict(fields))
    for io, operations in OPERATIONS.items():
        cells = [each for each in fields["cells"] if each["io"] == io]
        if cells:
            bare = "a bare loop" if io == "direct" else "a bare loop with checksums"
            title = f"{io} I/O, {mib(fields['nbytes'])} a round: bandwidth over that of {bare}, and GB/s"
            show_cells(title, cells, "threads", operations, 1, output)
    if fields["no_direct_io"]:
        output.line("")
        output.line("direct I/O does not work here: records go through the page cache")
    lines = [tuple(each) for each in _bars(fields)]
    output.table("what this library aims at", ("", "measured", "bar"), lines)
    if output.wide:
        calls, restart = fields["calls"], fields["restart"]
        output.line("")
        output.line(
            f"CPU time: of the calling thread a key, put {calls['put_cpu_us']:.1f} us, "
            f"get {calls['get_cpu_us']:.1f} us; "
            f"of the restart {restart['restart_cpu_seconds']:.2f} s"
        )
    output.line("")
    output.line(verified_text(fields))
    output.line(f"in {', '.join(fields['folders'])}; {fields['usable_cpus']} usable CPUs")


def verdict(fields: Fields) -> str:
    by_io = {io: [each for each in fields["cells"] if each["io"] == io] for io in OPERATIONS}
    found = [ratios_text("", cells).strip() + f" {io}" for io, cells in by_io.items() if cells]
    return f"bench disk: the tier has {', '.join(found)}, times a bare loop's bandwidth"


def _bars(fields: Fields) -> Iterator[_Bar]:
    def lowest(io: str, small: bool | None) -> float | None:
        wanted = [each for each in fields["cells"] if each["io"] == io]
        ratios = [each["ratio"] for each in wanted if small is None or (each["record_bytes"] < _LARGE_BYTES) == small]
        return min(ratios, default=None)

    yield _Bar("lowest ratio, direct, below 1 MiB", fixed(lowest("direct", True), 2), f"{_SMALL_BAR:.2f}")
    yield _Bar("lowest ratio, direct, from 1 MiB on", fixed(lowest("direct", False), 2), f"{_LARGE_BAR:.2f}")
    yield _Bar("lowest ratio, buffered", fixed(lowest("buffered", None), 2), f"{_BUFFERED_BAR:.2f}")
    calls, restart = fields["calls"], fields["restart"]
    of_calls = f"of {calls['keys']} keys, us a key"
    yield _Bar(f"host time of put(), {of_calls}", fixed(calls["put_us"]), str(_CALL_BAR_US))
    yield _Bar(f"host time of get(), {of_calls}", fixed(calls["get_us"]), str(_CALL_BAR_US))
    records = restart["records"]
    bar = f"{_RESTART_BAR_SECONDS}" if records == _BAR_RECORDS else f"{_RESTART_BAR_SECONDS} for {_BAR_RECORDS:,}"
    yield _Bar(f"restart with {records:,} records, seconds", fixed(restart["restart_seconds"], 2), bar)
    yield _Bar("Python memory a record, bytes", fixed(restart["python_bytes_a_record"], 0), str(_MEMORY_BAR_BYTES))
    yield _Bar(f"contains() of {restart['lookup_keys']} keys, us", fixed(restart["lookup_us"], 0), "-")


# the command ----------------------------------------------------------------------------------------------------------

_THREADS = [1, 4, 8]
_MOST_THREADS = 256
_SPARE_BYTES = 64 << 20  # of a disk, that stay free


def add_parser(benches: Any) -> None:
    parser = add_command(
        benches,
        "disk",
        "a disk tier compared with bare loops of preadv and pwritev",
        "Writes and reads records with a DiskTier and with bare loops on the same files, in interleaved rounds; then "
        "times calls and a restart. Uses no GPU without --gpu, and removes its files.",
        example="bench disk --path /mnt/nvme --sizes 2097152 --threads 4",
        common=f"--wide, {COMMON}",
        usage="[--path FOLDER ...] [options]",
    )
    parser.add_argument(
        "--path", nargs="+", type=Path, default=[Path()], metavar="FOLDER", help="a file in each (default: here)"
    )
    parser.add_argument("--threads", type=numbers, default=_THREADS, metavar="N,...", help="default 1,4,8")
    parser.add_argument("--io", choices=("direct", "buffered", "both"), default="both", help="default both")
    parser.add_argument(
        "--records", type=whole(1, LARGEST), default=100_000, metavar="N", help="of the restart (default 100000)"
    )
    parser.add_argument("--gpu", action="store_true", help="also the GPU's transfers while the disk works")
    add_tier_options(parser, "the bare loops' bandwidth and the range of the rounds", 256 << 20, 1 << 50)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 0 if every record was right, else 1. The files are removed also when it is interrupted."""
    output = Output(arguments.json, wide=arguments.wide)
    _check(arguments)
    verified = Verified()
    with _new_files(arguments.path) as files:
        try:
            with output.progress("disk") as progress:
                fields = _measure(arguments, files, verified, progress)
            if arguments.gpu:
                with open_backend(arguments, output, note=False) as device:
                    fields["transfers"] = disk_gpu.measure(device, files[0], repeats=arguments.repeats)
        except OSError as error:
            raise CommandError(f"{error.filename or 'a file of --path'}: {error.strerror or error}") from error
    status = conclude(arguments, fields, verified, show, output)
    if arguments.gpu:
        disk_gpu.show(fields["transfers"], output)
        return status or bool(disk_gpu.wrong(fields["transfers"]))
    return status


def _measure(
    arguments: argparse.Namespace, files: Sequence[Path], verified: Verified, progress: Advance
) -> dict[str, Any]:
    modes = {"direct": [True], "buffered": [False], "both": [True, False]}[arguments.io]
    cells: list[dict[str, Any]] = []
    without_direct = False
    planned = [(size, count, mode) for size in arguments.sizes for count in arguments.threads for mode in modes]
    for number, (size, threads, direct) in enumerate(planned):
        progress(number, len(planned) + 2)
        found = measure_cell(
            files,
            slot_bytes=size,
            threads=threads,
            direct=direct,
            nbytes=arguments.nbytes,
            repeats=arguments.repeats,
            verified=verified,
        )
        without_direct |= not found
        cells += found
    progress(len(planned), len(planned) + 2)
    threads = min(arguments.threads, key=lambda count: abs(count - 4))
    calls = measure_calls(files, slot_bytes=min(arguments.sizes), threads=threads, verified=verified)
    restart = measure_restart(files, arguments.records, lambda *_: None, verified)
    return {
        "benchmark": "disk",
        "folders": [str(folder) for folder in arguments.path],
        "usable_cpus": hostinfo.usable_cpus(),
        "nbytes": arguments.nbytes,
        "repeats": arguments.repeats,
        "no_direct_io": without_direct,
        "cells": cells,
        "calls": calls,
        "restart": restart,
    }


# before anything is written ------------------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> None:
    """Raise CommandError, or CapabilityError, for what could not be carried out."""
    check_options(arguments, "--threads", arguments.threads, _MOST_THREADS)
    for folder in arguments.path:
        if not folder.is_dir():
            raise CommandError(f"--path {folder}: there is no such folder; create it, or give another one")
    largest = max(max(max(arguments.threads), arguments.nbytes // size) * size for size in arguments.sizes)
    require_memory(2 * largest, "lower --nbytes")
    _check_space(arguments, largest)


def _check_space(arguments: argparse.Namespace, largest: int) -> None:
    count = len(arguments.path)
    slots = max(math.ceil(largest / size) for size in arguments.sizes)
    rounds = tier_bytes(slots, min(arguments.sizes), count) + count * max(arguments.sizes)
    needed = max(rounds, restart_bytes(arguments.records, count)) // count + _SPARE_BYTES
    folders: dict[int, list[Path]] = defaultdict(list)
    for folder in arguments.path:
        folders[folder.stat().st_dev].append(folder)
    for sharing in folders.values():
        state = os.statvfs(sharing[0])
        free = state.f_bavail * state.f_frsize
        if free < needed * len(sharing):
            raise CommandError(
                f"--path {sharing[0]}: {mib(needed * len(sharing))} are needed, and {mib(free)} are free; lower "
                "--nbytes or --records, or give another folder"
            )


@contextmanager
def _new_files(folders: Sequence[Path]) -> Iterator[list[Path]]:
    """A file that does not exist yet in a new folder in each of these; the new folders are removed at the end."""
    files: list[Path] = []
    with ExitStack() as undo:
        for folder in folders:
            try:
                created = Path(tempfile.mkdtemp(prefix="kvoffload-bench-", dir=folder.resolve()))
            except OSError as error:
                raise CommandError(f"--path {folder}: {error.strerror}") from error
            undo.callback(shutil.rmtree, created, ignore_errors=True)
            files.append(created / "records.kv")
        yield files

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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvoffload.internal import hostinfo
from kvoffload.terminal.console import Advance, CommandError, Output, as_json, mib, open_backend
from kvoffload.terminal.files import require_writable, write_whole
from kvoffload.terminal.options import COMMON, LARGEST, add_command, add_common_options, add_wide, numbers, whole
from kvoffload.tiers.checksums import make_checksum
from kvoffload.tiers.files import PAGE
from kvoffload_bench import disk_gpu
from kvoffload_bench.disk_costs import measure_calls, measure_restart, restart_bytes
from kvoffload_bench.disk_files import tier_bytes
from kvoffload_bench.disk_report import show
from kvoffload_bench.disk_rounds import measure_cell
from kvoffload_bench.tier_calls import Verified

_SIZES = [256 << 10, 1 << 20, 2 << 20, 4 << 20]
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
    parser.add_argument("--sizes", type=numbers, default=_SIZES, metavar="N,...", help="bytes of a record")
    parser.add_argument("--threads", type=numbers, default=_THREADS, metavar="N,...", help="default 1,4,8")
    parser.add_argument(
        "--nbytes", type=whole(PAGE, 1 << 50), default=256 << 20, metavar="N", help="bytes of a round (268435456)"
    )
    parser.add_argument("--io", choices=("direct", "buffered", "both"), default="both", help="default both")
    parser.add_argument("--repeats", type=whole(1, 1_000_000), default=5, metavar="N", help="timed rounds (default 5)")
    parser.add_argument(
        "--records", type=whole(1, LARGEST), default=100_000, metavar="N", help="of the restart (default 100000)"
    )
    parser.add_argument("--gpu", action="store_true", help="also the GPU's transfers while the disk works")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write all figures as JSON")
    add_wide(parser, "the bare loops' bandwidth and the range of the rounds")
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 0 if every record was right, else 1. The files are removed also when it is interrupted."""
    output = Output(arguments.json, wide=arguments.wide)
    if arguments.save is not None:
        require_writable("--save", arguments.save)
    _check(arguments)
    verified = Verified()
    with _new_files(arguments.path) as files:
        try:
            fields = _measure_all(arguments, files, verified, output)
        except OSError as error:
            raise CommandError(f"{error.filename or 'a file of --path'}: {error.strerror or error}") from error
    if arguments.save is not None:
        write_whole("--save", arguments.save, (as_json(fields) + "\n").encode())
    output.result(fields)
    show(fields, output)
    if arguments.gpu:
        disk_gpu.show(fields["transfers"], output)
    wrong = disk_gpu.wrong(fields["transfers"]) if arguments.gpu else 0
    return 1 if verified.wrong or verified.missing or wrong else 0


def _measure_all(
    arguments: argparse.Namespace, files: Sequence[Path], verified: Verified, output: Output
) -> dict[str, Any]:
    with output.progress("disk") as progress:
        fields = _measure(arguments, files, verified, progress)
    if arguments.gpu:
        with open_backend(arguments, output, note=False) as device:
            fields["transfers"] = disk_gpu.measure(device, files[0], repeats=arguments.repeats)
    return fields


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
        "verified_records": verified.records,
        "wrong_records": verified.wrong,
        "missing_records": verified.missing,
    }


# before anything is written ------------------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> None:
    """Raise CommandError, or CapabilityError, for what could not be carried out."""
    make_checksum()
    for size in arguments.sizes:
        if size % PAGE:
            raise CommandError(f"--sizes must be multiples of {PAGE}, got {size}")
    if max(arguments.threads) > _MOST_THREADS:
        raise CommandError(f"--threads must be at most {_MOST_THREADS}, got {max(arguments.threads)}")
    for folder in arguments.path:
        if not folder.is_dir():
            raise CommandError(f"--path {folder}: there is no such folder; create it, or give another one")
    largest = max(max(max(arguments.threads), arguments.nbytes // size) * size for size in arguments.sizes)
    available = hostinfo.available_bytes()
    if available is not None and 2 * largest > available:
        raise CommandError(
            f"{mib(2 * largest)} of host memory are needed, and {mib(available)} are available; lower --nbytes"
        )
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

"""`kvoffload bench session`: `BlockCache.save` and `restore` beside bare calls on the same disk, in turns.

Needs no GPU: blocks are in the pool's memory, and all times are those of the host and the disk. What `restore` has made
hits is compared with what was saved.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import kvoffload
from kvoffload.internal.types import UInt8Array
from kvoffload.terminal.console import CommandError, Output, open_backend
from kvoffload.terminal.options import COMMON, add_command, add_common_options, whole
from kvoffload_bench.report import fixed
from kvoffload_bench.tier_calls import pages

_PIECE = 2 << 20  # bytes of a bare call
_THREADS = 4
_SHAPE = (64, 16, 8, 128)  # of a block: keys and values of 32 layers of Llama 8B, 16 tokens
_BLOCK = math.prod(_SHAPE) * 2
_GIVEN: dict[str, Any] = {"salt": "kvoffload bench session", "identity": {"model": "none"}}


def add_parser(benches: Any) -> None:
    parser = add_command(
        benches, "session", "conversations in files beside bare calls on the same disk",
        "Saves and restores a conversation in turns with threads that write and read as many bytes by direct I/O.",
        example="bench session --gib 4", common=COMMON,
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, default=Path(), metavar="PATH", help="on the disk (default: here)")
    parser.add_argument("--gib", type=whole(1, 1024), default=4, metavar="N", help="size of the file (default 4)")
    parser.add_argument("--rounds", type=whole(1, 100), default=5, metavar="N", help="default 5")
    add_common_options(parser)
    parser.set_defaults(run=run)


def _bare(path: Path, memory: UInt8Array, call: Callable[[int, list[memoryview], int], int], flags: int) -> None:
    """Move all of the memory by calls of 2 MiB, four at a time, around the page cache; `save` has a new file, too."""
    file = os.open(path, flags | os.O_DIRECT, 0o600)
    if flags != os.O_RDONLY:
        os.posix_fallocate(file, 0, memory.nbytes)

    def move(begin: int) -> None:
        assert call(file, [memory[begin : begin + _PIECE].data], begin) == _PIECE

    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(move, range(0, memory.nbytes, _PIECE)))
        if flags != os.O_RDONLY:
            os.fdatasync(file)
    finally:
        os.close(file)


def _rounds(cache: Any, folder: Path, tokens: Any, rounds: int) -> Iterator[tuple[str, float]]:
    """Do everything in turns, and yield what it was and how many seconds it took."""
    keys = cache.keys(tokens, salt=_GIVEN["salt"])
    slots, memory = cache.engine.slots, pages(len(keys), _BLOCK).reshape(-1)
    with cache.reserve(keys) as reservation:
        rows = reservation.slots()
        for row in rows:
            slots[row, :_BLOCK] = np.arange(_BLOCK // 8, dtype=np.uint64).view(np.uint8)
            slots[row, :8] = np.array([row], dtype=np.uint64).view(np.uint8)
    some = slice(None, None, max(1, len(keys) // 64))
    wanted = {key: slots[row].copy() for key, row in zip(keys[some], rows[some], strict=True)}
    bare, path = folder / "bare", folder / "conversation"

    def restored() -> None:
        cache.clear()
        found = cache.restore(path, **_GIVEN)
        assert found == (len(tokens), len(tokens), ""), found

    steps: dict[str, Callable[[], object]] = {
        "bare write": lambda: _bare(bare, memory, os.pwritev, os.O_RDWR | os.O_CREAT | os.O_EXCL),
        "save": lambda: cache.save(path, tokens, **_GIVEN),
        "bare read": lambda: _bare(bare, memory, os.preadv, os.O_RDONLY),
        "restore": restored,
    }
    for number in range(rounds + 1):  # the first one warms up
        bare.unlink(missing_ok=True)
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            if number:
                yield name, time.perf_counter() - begun
        for key, block in wanted.items():
            with cache.acquire([key]) as lease:
                assert (slots[lease.slots()[0]] == block).all(), "a block came back with other bytes"


def run(arguments: argparse.Namespace) -> int:
    blocks = (arguments.gib << 30) // _BLOCK
    if not arguments.folder.is_dir():
        raise CommandError(f"--folder must be a folder, got {arguments.folder}")
    output = Output(arguments.json)
    with open_backend(arguments, note=False) as device, tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        layout = kvoffload.KVLayout.from_tree(
            device.empty((1, *_SHAPE), "uint16"), axes=("blocks", "planes", "tokens", "heads", "dim")
        )
        with kvoffload.open_cache(layout, device=device, pool_bytes=blocks * layout.slot_bytes) as cache:
            found: dict[str, list[float]] = {}
            for what, seconds in _rounds(cache, Path(name), range(16 * blocks), arguments.rounds):
                found.setdefault(what, []).append((blocks * _BLOCK) / seconds / 1e9)
    ratios = {
        ours: statistics.median(mine / bare for mine, bare in zip(found[ours], found[theirs], strict=True))
        for ours, theirs in (("save", "bare write"), ("restore", "bare read"))
    }
    output.result({"benchmark": "session", "gib": arguments.gib, "rates": found, "ratios": ratios})
    lines = [
        (name, fixed(statistics.median(rates), 2), fixed(min(rates), 2), fixed(ratios.get(name), 2))
        for name, rates in found.items()
    ]
    output.table(f"a conversation of {arguments.gib} GiB", ("", "GB/s", "lowest", "of bare calls"), lines)
    return 0

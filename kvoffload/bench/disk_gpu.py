"""What a busy disk tier costs the GPU's transfers: both use the same pinned pool, in interleaved rounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvoffload.device.device import Device
from kvoffload.device.streams import NO_WAIT
from kvoffload.engine.engine import OffloadEngine
from kvoffload.internal.models import MODELS
from kvoffload.layout.layout import KVLayout
from kvoffload.terminal.console import Output
from kvoffload.tiers import DiskTier

_BLOCKS = 128
_TRANSFERS = 8  # of a series, in each direction
_MOVES = ("store", "load", "both")
_MODEL = "llama-3.1-8b"


def measure(device: Device, file: Path, *, repeats: int) -> dict[str, Any]:
    """Bandwidths of series of transfers while the disk does nothing, and while it writes and reads records.

    Args:
        file: for the tier; lost afterwards.
        repeats: rounds.

    Returns:
        For JSON. Times are the host's, from the first call to the last byte.
    """
    geometry = MODELS[_MODEL]
    planes = device.allocate_blocks(_BLOCKS, planes=sum(geometry.planes_per_group), block_bytes=geometry.block_bytes)
    layout = KVLayout([planes], 1, "bfloat16", geometry.tokens_per_block, block_axes=("tokens", "heads", "dim"))
    with OffloadEngine(layout, device=device, num_slots=2 * _BLOCKS) as engine:
        tier = DiskTier(file, nbytes=4 * _BLOCKS * layout.slot_bytes, identity="bench disk", reset=True)
        tier.attach([engine.slots], layout.fingerprint)
        try:
            rounds = [_round(engine, tier, move) for _ in range(repeats) for move in _MOVES]
        finally:
            tier.close()
    return {"model": _MODEL, "blocks": _BLOCKS, "records": [_summary(rounds, move) for move in _MOVES]}


def _round(engine: OffloadEngine, tier: DiskTier, move: str) -> dict[str, Any]:
    idle = _series(engine, move)
    with _busy(tier):
        before, begun = _moved(tier), time.perf_counter()
        busy, series = 0.0, 0
        while time.perf_counter() - begun < 0.5:
            busy += _series(engine, move)
            series += 1
        disk = (_moved(tier) - before) / (time.perf_counter() - begun)
    return {"move": move, "idle": idle, "busy": busy / series, "disk": disk / 1e9}


def _moved(tier: DiskTier) -> int:
    done = tier.statistics()
    return done.bytes_written + done.bytes_read


def _series(engine: OffloadEngine, move: str) -> float:
    """Seconds of transfers between the blocks and the first half of the slots."""
    half = np.arange(_BLOCKS // 2)
    every = np.arange(_BLOCKS)
    stored, loaded = (half, half + _BLOCKS // 2) if move == "both" else (every, every)
    begin = time.perf_counter()
    jobs = []
    for _ in range(_TRANSFERS):
        if move != "load":
            jobs.append(engine.store(stored, stored, after=NO_WAIT))
        if move != "store":
            jobs.append(engine.load(loaded, loaded, after=NO_WAIT))
    for job in jobs:
        job.wait()
    return time.perf_counter() - begin


@contextmanager
def _busy(tier: DiskTier) -> Iterator[None]:
    """Meanwhile a thread keeps the tier writing and reading records of the second half of the slots."""
    stop = threading.Event()
    entries = range(_BLOCKS, 2 * _BLOCKS)

    def run() -> None:
        number = 0
        while not stop.is_set():
            keys = [(number * _BLOCKS + at).to_bytes(16, "big") for at in range(_BLOCKS)]
            number += 1
            for job in (tier.put(keys, entries), tier.get(keys, entries)):
                while not job.done and not stop.is_set():
                    time.sleep(1e-3)
                job.cancel()
                job.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        tier.clear().wait(60)


def _summary(rounds: list[dict[str, Any]], move: str) -> dict[str, Any]:
    mine = [each for each in rounds if each["move"] == move]
    nbytes = _TRANSFERS * _BLOCKS * sum(MODELS[_MODEL].planes_per_group) * MODELS[_MODEL].block_bytes
    idle, busy, disk = (median(each[name] for each in mine) for name in ("idle", "busy", "disk"))
    return {
        "moves": move,
        "idle_gb_per_s": nbytes / idle / 1e9,
        "busy_gb_per_s": nbytes / busy / 1e9,
        "ratio": median(each["idle"] / each["busy"] for each in mine),
        "disk_gb_per_s": disk,
    }


def show(fields: dict[str, Any], output: Output) -> None:
    lines = [
        (
            each["moves"],
            f"{each['idle_gb_per_s']:.1f}",
            f"{each['busy_gb_per_s']:.1f}",
            f"{each['ratio']:.2f}",
            f"{each['disk_gb_per_s']:.1f}",
        )
        for each in fields["records"]
    ]
    title = f"the GPU's transfers while the disk works, {fields['model']}, {fields['blocks']} blocks; GB/s"
    output.table(title, ("moves", "disk idle", "disk busy", "busy / idle", "disk"), lines)

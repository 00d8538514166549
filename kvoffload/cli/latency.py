"""The engine as its caller sees it: host time of `store()` and `load()`, wall clock up to the result out of `poll()`.

And the batch copier at one number of descriptors against one flat batch, both as wall clock from the call on an idle
stream and as GPU clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvoffload.cli.cases import Bed, BigCopy, GpuTimer, Size
from kvoffload.cli.transfer import WARM_UP
from kvoffload.device import Device
from kvoffload.models import ModelGeometry, find_model
from kvoffload.plan import Direction

_LATENCY_CASES = (("llama-3.1-8b", 32), ("llama-3.1-70b-tp4", 512))
_CALLS_PER_ROUND = 5  # after the 20 ms of a big copy the first call finds a cold CPU; a server calls more often
_DESCRIPTOR_PLANES = 64
_DESCRIPTOR_BYTES = (8192, 16384, 24576)


@dataclass(frozen=True)
class Latency:
    """One transfer through the engine, medians.

    Attributes:
        call_seconds: until `store()` or `load()` has returned; None on the simulated device, like the others.
        wall_seconds: from the call until `poll()` has given the result out.
        big_copy_gb_per_s: of the big copy, GPU clock, in the same rounds.
        wrong: rows of bytes that were wrong.
    """

    model: str
    direction: Direction
    planes: int
    block_bytes: int
    blocks: int
    nbytes: int
    call_seconds: float | None
    wall_seconds: float | None
    big_copy_gb_per_s: float | None
    wrong: int

    @property
    def ratio(self) -> float | None:
        """Payload over wall clock, against the big copy."""
        if self.wall_seconds is None or self.big_copy_gb_per_s is None:
            return None
        return self.nbytes / self.wall_seconds / 1e9 / self.big_copy_gb_per_s


def measure_latency(
    device: Device, timer: GpuTimer, big: BigCopy, size: Size, repeats: int, seed: int
) -> list[Latency]:
    """Stores and loads of a small and of a big transfer, interleaved with the big copy."""
    found = []
    for name, blocks in _LATENCY_CASES:
        count = max(1, round(blocks * size.payload_bytes / (64 << 20)))
        geometry = find_model(name).scaled(size.scale)
        with Bed(device, timer, geometry, row_blocks=1, count=count, size=size, seed=seed) as bed:
            found += _latency(bed, big, repeats, device.simulated)
    return found


def _latency(bed: Bed, big: BigCopy, repeats: int, simulated: bool) -> list[Latency]:
    """Stores come first in every round and have ended before the loads, so loads may read their slots at any time."""
    bed.prepare(Direction.STORE)
    calls: dict[Direction, list[float]] = {direction: [] for direction in Direction}
    walls: dict[Direction, list[float]] = {direction: [] for direction in Direction}
    bigs: dict[Direction, list[float]] = {direction: [] for direction in Direction}
    wrong = dict.fromkeys(Direction, 0)
    bed.engine.poll()
    for number in range(WARM_UP + repeats):
        for direction in Direction:
            last = number == WARM_UP + repeats - 1
            if last:
                bed.poison(direction)
            bigs[direction].append(big.seconds(direction))
            for _ in range(_CALLS_PER_ROUND):
                call, wall = _once(bed, direction)
                calls[direction].append(call)
                walls[direction].append(wall)
            if last:
                wrong[direction] = bed.wrong(direction)

    def median(values: list[float]) -> float:
        warm_up = WARM_UP * len(values) // (WARM_UP + repeats)
        return statistics.median(values[warm_up:])

    return [
        Latency(
            bed.model,
            direction,
            bed.plane_count,
            bed.block_bytes,
            len(bed.blocks),
            bed.nbytes,
            None if simulated else median(calls[direction]),
            None if simulated else median(walls[direction]),
            None if simulated else big.nbytes / median(bigs[direction]) / 1e9,
            wrong[direction],
        )
        for direction in Direction
    ]


def _once(bed: Bed, direction: Direction) -> tuple[float, float]:
    """Seconds until the call has returned, and until `poll` has reported its job."""
    engine = bed.engine
    begin = time.perf_counter()
    if direction is Direction.STORE:
        engine.store(bed.blocks, bed.slots)
    else:
        engine.load(bed.slots, bed.blocks)
    returned = time.perf_counter()
    while not (results := engine.poll()):
        pass
    ended = time.perf_counter()
    if results[0].error is not None:
        raise results[0].error
    return returned - begin, ended - begin


def measure_descriptors(device: Device, timer: GpuTimer, size: Size, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Loads of `size.descriptors` rows: the batch copier and one flat batch, wall clock and GPU clock."""
    rows = []
    for block_bytes in _DESCRIPTOR_BYTES if device.capabilities.flat_batch else ():
        geometry = ModelGeometry(
            f"{_DESCRIPTOR_PLANES} planes", _DESCRIPTOR_PLANES, 1, block_bytes // 32, kv_split=False, scale=size.scale
        )
        count = size.descriptors // _DESCRIPTOR_PLANES
        with Bed(device, timer, geometry, row_blocks=1, count=count, size=size, seed=seed) as bed:
            rows.append(_descriptors(bed, repeats, device.simulated))
    return rows


def _descriptors(bed: Bed, repeats: int, simulated: bool) -> dict[str, Any]:
    direction = Direction.LOAD
    bed.prepare(direction)
    cases: dict[str, Callable[[], float]] = {
        "batch": lambda: bed.engine_seconds(direction, "batch"),
        "flat batch": bed.bare_flat(direction),
    }
    gpu: dict[str, list[float]] = {name: [] for name in cases}
    wall: dict[str, list[float]] = {name: [] for name in cases}
    wrong = {}
    for number in range(WARM_UP + repeats):
        for name, run in cases.items():
            last = number == WARM_UP + repeats - 1
            if last:
                bed.poison(direction)
            begin = time.perf_counter()
            gpu[name].append(run())
            wall[name].append(time.perf_counter() - begin)
            if last:
                wrong[name] = bed.wrong(direction)
    row: dict[str, Any] = {
        "direction": str(direction),
        "descriptors": len(bed.blocks) * bed.plane_count,
        "row_bytes": bed.row_bytes,
        "pitch": bed.pitch,
        "wrong": wrong,
    }
    if not simulated:
        for clock, samples in (("gpu", gpu), ("wall", wall)):
            rates = {name: bed.nbytes / statistics.median(values[WARM_UP:]) / 1e9 for name, values in samples.items()}
            row |= {f"{name.replace(' ', '_')}_{clock}_gb_per_s": rate for name, rate in rates.items()}
            row[f"batch/flat batch, {clock}"] = rates["batch"] / rates["flat batch"]
    return row

"""The engine as its caller sees it: host time of `store()` and `load()`, wall clock up to the result out of `poll()`.

And the batch copier at one number of descriptors against one flat batch, both as wall clock from the call on an idle
stream and as GPU clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvoffload.bench.baselines import FLAT_BATCH, flat_batch
from kvoffload.bench.bed import Bed
from kvoffload.bench.cases import BIG_COPY, WARM_UP, Case, Lab, run_rounds
from kvoffload.bench.report import number
from kvoffload.bench.rows import bed_case, size_text, warm_engine
from kvoffload.internal.models import ModelGeometry, find_model
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Output

_LATENCY_CASES = (("llama-3.1-8b", 32), ("llama-3.1-70b-tp4", 256))
_ROUNDS = 3  # for each that was asked for: host times scatter more than those of the GPU
_DESCRIPTOR_PLANES = 64
_DESCRIPTOR_BYTES = (8 << 10, 16 << 10, 24 << 10, 32 << 10, 64 << 10)


def geometry_of(planes: int, block_bytes: int, scale: float) -> ModelGeometry:
    """So many planes of blocks of so many bytes (a multiple of 32)."""
    return ModelGeometry(f"{planes} planes", planes, 1, block_bytes // 32, kv_split=False, scale=scale)


# latency --------------------------------------------------------------------------------------------------------------


def measure_latency(lab: Lab) -> list[dict[str, Any]]:
    """Stores and loads of a small and of a big transfer, interleaved with the big copy."""
    found = []
    for name, blocks in _LATENCY_CASES:
        count = max(1, round(blocks * lab.size.payload_bytes / (32 << 20)))
        with Bed(lab, find_model(name).scaled(lab.size.scale), count=count) as bed, bed.twin() as twin:
            found += _latency(bed, twin)
    return found


def _latency(bed: Bed, twin: Bed) -> list[dict[str, Any]]:
    for direction in Direction:
        bed.prepare(direction)
    bed.engine.poll()
    rounds, big = _ROUNDS * bed.lab.repeats, bed.lab.big
    calls: dict[Direction, list[float]] = {direction: [] for direction in Direction}

    def once(direction: Direction) -> float:
        call, wall = _once(bed, direction)
        calls[direction].append(call)
        return wall

    cases: dict[str, Case] = {}
    for direction in Direction:
        warm = partial(warm_engine, twin, bed, direction, None, "overlap")
        cases[direction] = bed_case(bed, direction, partial(once, direction), warm)
        cases[f"{BIG_COPY}, {direction}"] = big.case(direction)
    timings = run_rounds(cases, rounds)
    found = []
    for direction in Direction:
        wall, link = timings[direction], timings[f"{BIG_COPY}, {direction}"]
        fields = {
            "model": bed.model,
            "direction": str(direction),
            "planes": bed.plane_count,
            "block_bytes": bed.block_bytes,
            "blocks": bed.block_count,
            "nbytes": bed.nbytes,
            "wrong": wall.wrong + link.wrong,
        }
        if not bed.lab.device.simulated:
            fields |= {
                "call_seconds": statistics.median(calls[direction][WARM_UP:]),
                "wall_seconds": wall.median,
                "big_copy_gb_per_s": link.gb_per_s,
                "wall/big copy": wall.gb_per_s / link.gb_per_s,
            }
        found.append(fields)
    return found


def _once(bed: Bed, direction: Direction) -> tuple[float, float]:
    """Seconds until the call has returned, and until `poll` has reported its job."""
    engine, part = bed.engine, bed.parts[0]
    begin = time.perf_counter()
    if direction is Direction.STORE:
        engine.store(part.blocks, part.slots)
    else:
        engine.load(part.slots, part.blocks)
    returned = time.perf_counter()
    while not (results := engine.poll()):
        pass
    ended = time.perf_counter()
    if results[0].error is not None:
        raise results[0].error
    return returned - begin, ended - begin


def print_latencies(fields: Mapping[str, Any], output: Output) -> None:
    simulated = fields["simulated"]
    columns = ["transfer", "direction", "wrong rows"]
    columns += [] if simulated else ["call us", "wall us", "GB/s, wall", "big copy GB/s", "wall/big copy"]
    lines = []
    for each in fields["latencies"]:
        name = f"{each['model']}: {each['blocks']} blocks, {each['planes']} x {each['block_bytes']}"
        line = [name, each["direction"], each["wrong"]]
        if not simulated:
            line += [f"{each['call_seconds'] * 1e6:.0f}", f"{each['wall_seconds'] * 1e6:.0f}"]
            line += [number(each["nbytes"] / each["wall_seconds"] / 1e9), number(each["big_copy_gb_per_s"])]
            line += [number(each["wall/big copy"], 2)]
        lines.append(line)
    output.table("the whole engine, from the call to poll()" + (", SIMULATED" if simulated else ""), columns, lines)


# descriptors ----------------------------------------------------------------------------------------------------------


def measure_descriptors(lab: Lab) -> list[dict[str, Any]]:
    """Loads of `size.descriptors` rows: the batch copier and one flat batch, wall clock and GPU clock."""
    rows = []
    for block_bytes in _DESCRIPTOR_BYTES if lab.device.capabilities.flat_batch else ():
        geometry = geometry_of(_DESCRIPTOR_PLANES, block_bytes, lab.size.scale)
        with Bed(lab, geometry, count=lab.size.descriptors // _DESCRIPTOR_PLANES) as bed, bed.twin() as twin:
            rows.append(_descriptors(bed, twin))
    return rows


def _runs(bed: Bed, direction: Direction) -> dict[str, Callable[[], float]]:
    return {
        "batch": lambda: bed.seconds(bed.submit(direction, "batch")),
        FLAT_BATCH: flat_batch(bed, direction),
    }


def _descriptors(bed: Bed, twin: Bed) -> dict[str, Any]:
    direction = Direction.LOAD
    bed.prepare(direction)
    runs, warm = _runs(bed, direction), _runs(twin, direction)
    walls: dict[str, list[float]] = {name: [] for name in runs}

    def timed(name: str) -> float:
        begin = time.perf_counter()
        seconds = runs[name]()
        walls[name].append(time.perf_counter() - begin)
        return seconds

    cases = {name: bed_case(bed, direction, partial(timed, name), warm[name]) for name in runs}
    timings = run_rounds(cases, bed.lab.repeats)
    row: dict[str, Any] = {
        "direction": str(direction),
        "descriptors": bed.copies,
        "row_bytes": bed.row_bytes,
        "wrong": {name: timing.wrong for name, timing in timings.items()},
    }
    if not bed.lab.device.simulated:
        wall = {name: bed.nbytes / statistics.median(walls[name][WARM_UP:]) / 1e9 for name in runs}
        gpu = {name: timing.gb_per_s for name, timing in timings.items()}
        for clock, rates in (("gpu", gpu), ("wall", wall)):
            row |= {f"{name.replace(' ', '_')}_{clock}_gb_per_s": rate for name, rate in rates.items()}
            row[f"batch/flat batch, {clock}"] = rates["batch"] / rates[FLAT_BATCH]
    return row


def other_ratios(
    descriptors: Sequence[Mapping[str, Any]], latencies: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What sums these up, as `summary.ratios`; nothing from the simulated device."""
    found = []
    for row in descriptors:
        for clock in ("gpu", "wall"):
            if f"batch/flat batch, {clock}" in row:
                name = f"batch / flat batch, n = {row['descriptors']}, {size_text(row['row_bytes'])}, load"
                value, at = row[f"batch/flat batch, {clock}"], f"{'GPU' if clock == 'gpu' else 'wall'} clock"
                found.append({"ratio": name, "which": "median", "value": value, "at": at})
    for each in latencies:
        if "wall/big copy" in each:
            name = f"wall clock to poll() / big copy, {each['blocks']} blocks of {each['model']}, {each['direction']}"
            at = f"the call itself {each['call_seconds'] * 1e6:.0f} us"
            found.append({"ratio": name, "which": "median", "value": each["wall/big copy"], "at": at})
    return found


def print_descriptors(fields: Mapping[str, Any], output: Output) -> None:
    rows, simulated = fields["descriptors"], fields["simulated"]
    if not rows:
        return
    columns = ["row bytes", "descriptors", "wrong rows"]
    clocks = () if simulated else ("wall", "gpu")
    columns += [f"{name}, {clock}" for clock in clocks for name in ("batch", "flat batch", "ratio")]
    lines = []
    for row in rows:
        line = [row["row_bytes"], row["descriptors"], sum(row["wrong"].values())]
        for clock in clocks:
            line += [number(row[f"{name}_{clock}_gb_per_s"]) for name in ("batch", "flat_batch")]
            line.append(number(row[f"batch/flat batch, {clock}"], 2))
        lines.append(line)
    output.table("load, one number of descriptors" + (", SIMULATED" if simulated else ", GB/s"), columns, lines)

"""Host time of `store()` and `load()`, and wall clock from the call until `poll()` returns the result.

Also the batch copier against one flat batch at one number of descriptors, by wall clock from the call on an idle stream
and by GPU clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvoffload.internal.models import ModelGeometry, find_model
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Output
from kvoffload_bench.baselines import FLAT_BATCH, flat_batch
from kvoffload_bench.contiguous import CONTIGUOUS_COPY
from kvoffload_bench.lab import Lab
from kvoffload_bench.measurements import scenario_of, size_text, warm_engine
from kvoffload_bench.report import number
from kvoffload_bench.rounds import WARM_UP, Scenario, time_rounds
from kvoffload_bench.setup import TransferSetup

_LATENCY_SCENARIOS = (("llama-3.1-8b", 32), ("llama-3.1-70b-tp4", 256))
_ROUNDS = 3  # for each that was asked for: host times scatter more than those of the GPU
_DESCRIPTOR_PLANES = 64
_DESCRIPTOR_BYTES = (8 << 10, 16 << 10, 24 << 10, 32 << 10, 64 << 10)


def geometry_of(planes: int, block_bytes: int, scale: float) -> ModelGeometry:
    """A geometry of one group; `block_bytes` is a multiple of 32."""
    return ModelGeometry(f"{planes} planes", planes, 1, block_bytes // 32, kv_split=False, scale=scale)


# latency --------------------------------------------------------------------------------------------------------------


def measure_latency(lab: Lab) -> list[dict[str, Any]]:
    """Stores and loads of a small and of a large transfer, interleaved with the contiguous copy."""
    found = []
    for name, blocks in _LATENCY_SCENARIOS:
        count = max(1, round(blocks * lab.size.payload_bytes / (32 << 20)))
        with (
            TransferSetup(lab, find_model(name).scaled(lab.size.scale), count=count) as setup,
            setup.smaller() as small_setup,
        ):
            found += _latency(setup, small_setup)
    return found


def _latency(setup: TransferSetup, small_setup: TransferSetup) -> list[dict[str, Any]]:
    for direction in Direction:
        setup.prepare(direction)
    setup.engine.poll()
    rounds, contiguous = _ROUNDS * setup.lab.repeats, setup.lab.contiguous
    calls: dict[Direction, list[float]] = {direction: [] for direction in Direction}

    def once(direction: Direction) -> float:
        call, wall = _once(setup, direction)
        calls[direction].append(call)
        return wall

    scenarios: dict[str, Scenario] = {}
    for direction in Direction:
        warm = partial(warm_engine, small_setup, setup, direction, None, "overlap")
        scenarios[direction] = scenario_of(setup, direction, partial(once, direction), warm)
        scenarios[f"{CONTIGUOUS_COPY}, {direction}"] = contiguous.scenario(direction)
    timings = time_rounds(scenarios, rounds)
    found = []
    for direction in Direction:
        wall, link = timings[direction], timings[f"{CONTIGUOUS_COPY}, {direction}"]
        fields = {
            "model": setup.model,
            "direction": str(direction),
            "planes": setup.plane_count,
            "block_bytes": setup.block_bytes,
            "blocks": setup.block_count,
            "nbytes": setup.nbytes,
            "wrong": wall.wrong + link.wrong,
        }
        if not setup.lab.device.simulated:
            fields |= {
                "call_seconds": statistics.median(calls[direction][WARM_UP:]),
                "wall_seconds": wall.median,
                "contiguous_copy_gb_per_s": link.gb_per_s,
                "wall/contiguous copy": wall.gb_per_s / link.gb_per_s,
            }
        found.append(fields)
    return found


def _once(setup: TransferSetup, direction: Direction) -> tuple[float, float]:
    """Seconds until the call has returned, and until `poll` has reported its job."""
    engine, group = setup.engine, setup.groups[0]
    begin = time.perf_counter()
    if direction is Direction.STORE:
        engine.store(group.blocks, group.slots)
    else:
        engine.load(group.slots, group.blocks)
    returned = time.perf_counter()
    while not (results := engine.poll()):
        pass
    ended = time.perf_counter()
    if results[0].error is not None:
        raise results[0].error
    return returned - begin, ended - begin


def print_latencies(fields: Mapping[str, Any], output: Output) -> None:
    lines = []
    for each in fields["latencies"]:
        line = [each["model"], each["blocks"], each["direction"]]
        line += [f"{each['call_seconds'] * 1e6:.0f}", f"{each['wall_seconds'] * 1e6:.0f}"]
        line += [number(each["nbytes"] / each["wall_seconds"] / 1e9), number(each["contiguous_copy_gb_per_s"])]
        lines.append([*line, number(each["wall/contiguous copy"], 2)])
    columns = ("model", "blocks", "direction", "call us", "wall us", "GB/s, wall", "limit GB/s", "wall / limit")
    title = "the whole engine, from the call until poll() returns the result"
    output.table(title, columns, lines, left=("direction",))


# descriptors ----------------------------------------------------------------------------------------------------------


def measure_descriptors(lab: Lab) -> list[dict[str, Any]]:
    """Loads of `size.descriptors` rows: the batch copier and one flat batch, wall clock and GPU clock."""
    records = []
    for block_bytes in _DESCRIPTOR_BYTES if lab.device.capabilities.flat_batch else ():
        geometry = geometry_of(_DESCRIPTOR_PLANES, block_bytes, lab.size.scale)
        with (
            TransferSetup(lab, geometry, count=lab.size.descriptors // _DESCRIPTOR_PLANES) as setup,
            setup.smaller() as small_setup,
        ):
            records.append(_descriptors(setup, small_setup))
    return records


def _copies(setup: TransferSetup, direction: Direction) -> dict[str, Callable[[], float]]:
    return {
        "batch": lambda: setup.seconds(setup.submit(direction, "batch")),
        FLAT_BATCH: flat_batch(setup, direction),
    }


def _descriptors(setup: TransferSetup, small_setup: TransferSetup) -> dict[str, Any]:
    direction = Direction.LOAD
    setup.prepare(direction)
    copies, warm = _copies(setup, direction), _copies(small_setup, direction)
    walls: dict[str, list[float]] = {name: [] for name in copies}

    def timed(name: str) -> float:
        begin = time.perf_counter()
        seconds = copies[name]()
        walls[name].append(time.perf_counter() - begin)
        return seconds

    scenarios = {name: scenario_of(setup, direction, partial(timed, name), warm[name]) for name in copies}
    timings = time_rounds(scenarios, setup.lab.repeats)
    record: dict[str, Any] = {
        "direction": str(direction),
        "descriptors": setup.copies,
        "row_bytes": setup.row_bytes,
        "wrong": {name: timing.wrong for name, timing in timings.items()},
    }
    if not setup.lab.device.simulated:
        wall = {name: setup.nbytes / statistics.median(walls[name][WARM_UP:]) / 1e9 for name in copies}
        gpu = {name: timing.gb_per_s for name, timing in timings.items()}
        for clock, rates in (("gpu", gpu), ("wall", wall)):
            record |= {f"{name.replace(' ', '_')}_{clock}_gb_per_s": rate for name, rate in rates.items()}
            record[f"batch/flat batch, {clock}"] = rates["batch"] / rates[FLAT_BATCH]
    return record


def other_ratios(
    descriptors: Sequence[Mapping[str, Any]], latencies: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Ratios of these records, as `summary.ratios`; none from the simulated device."""
    found = []
    for record in descriptors:
        for clock in ("gpu", "wall"):
            if f"batch/flat batch, {clock}" in record:
                name = f"batch / flat batch, n = {record['descriptors']}, {size_text(record['row_bytes'])}, load"
                value, at = record[f"batch/flat batch, {clock}"], f"{'GPU' if clock == 'gpu' else 'wall'} clock"
                found.append({"ratio": name, "which": "median", "value": value, "at": at})
    for each in latencies:
        if "wall/contiguous copy" in each:
            blocks = f"{each['blocks']} blocks of {each['model']}"
            name = f"wall clock to poll() / contiguous copy, {blocks}, {each['direction']}"
            at = f"the call itself {each['call_seconds'] * 1e6:.0f} us"
            found.append({"ratio": name, "which": "median", "value": each["wall/contiguous copy"], "at": at})
    return found


def print_descriptors(fields: Mapping[str, Any], output: Output) -> None:
    lines = []
    for record in fields["descriptors"]:
        for clock in ("wall", "gpu"):
            line = [record["row_bytes"], record["descriptors"], clock]
            line += [number(record[f"{name}_{clock}_gb_per_s"]) for name in ("batch", "flat_batch")]
            lines.append([*line, number(record[f"batch/flat batch, {clock}"], 2)])
    if lines:
        columns = ("bytes of a copy", "copies", "clock", "batch GB/s", FLAT_BATCH + " GB/s", "ratio")
        output.table("loads of one number of copies, by the batch copier and as one flat batch", columns, lines)

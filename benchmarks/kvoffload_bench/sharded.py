"""`kvoffload bench sharded`: a ShardedEngine over several GPUs, compared with an engine on one of them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvoffload.device.buffers import DeviceBuffer
from kvoffload.device.device import Device, open_device
from kvoffload.device.streams import NO_WAIT
from kvoffload.driver import address_of
from kvoffload.driver.core import LEGACY_STREAM
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.sharded import ShardedEngine
from kvoffload.internal.types import UInt8Array
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import CommandError, Output
from kvoffload.terminal.options import COMMON, add_command, whole
from kvoffload_bench.harness import POISON, Lab, Scenario, Undoing, time_rounds
from kvoffload_bench.report import Fields, add_bench_options, conduct, fixed
from kvoffload_bench.series import DIRECTIONS


class ShardSize(NamedTuple):
    """What each device moves in a series of one direction: transfers of so many blocks of its share of the cache."""

    planes: int
    block_bytes: int
    blocks: int
    transfers: int

    @property
    def in_series(self) -> int:
        return self.blocks * self.transfers

    @property
    def row_bytes(self) -> int:
        """A block of all planes."""
        return self.planes * self.block_bytes


class Series(Undoing):
    """Series of both directions, on an engine of one device or on one over several. A context manager.

    Stores have the first half of the blocks and of the slots, loads the second. Their order is random, and the same on
    every device.
    """

    def __init__(self, devices: Sequence[Device], size: ShardSize, seed: int, *, sharded: bool) -> None:
        self._devices, self._size, count = devices, size, size.in_series
        random = np.random.default_rng(seed)
        self._ids = {
            direction: (first + random.permutation(count), first + random.permutation(count))
            for direction, first in ((Direction.STORE, 0), (Direction.LOAD, count))
        }
        self._memory: list[DeviceBuffer] = []
        layouts = []
        for device in devices:
            planes = device.allocate_blocks(2 * count, planes=size.planes, block_bytes=size.block_bytes)
            layouts.append(KVLayout([planes], on_default_stream=False))
            assert isinstance(planes[0].owner, DeviceBuffer)
            self._memory.append(planes[0].owner)
        self._engine: OffloadEngine | ShardedEngine
        if sharded:
            self._engine = ShardedEngine(layouts, devices=devices, num_slots=2 * count)
            pools = list(self._engine.slots)
        else:
            self._engine = OffloadEngine(layouts[0], device=devices[0], num_slots=2 * count)
            pools = [self._engine.slots]
        self._slots = [pool[:, : size.row_bytes] for pool in pools]  # behind it a slot is padded
        shape = (len(devices), count, size.row_bytes)
        self._right = {each: random.integers(0, 256, shape, dtype=np.uint8) for each in Direction}
        for index, memory in enumerate(self._memory):
            self._slots[index][self._ids[Direction.LOAD][1]] = self._right[Direction.LOAD][index]
            stored = np.empty(shape[1:], np.uint8)
            stored[self._ids[Direction.STORE][0]] = self._right[Direction.STORE][index]
            memory.copy_from(stored)

    def poison(self, directions: Sequence[Direction]) -> None:
        """Overwrite the targets."""
        half = self._size.in_series * self._size.row_bytes
        for device, memory, slots in zip(self._devices, self._memory, self._slots, strict=True):
            if Direction.STORE in directions:
                slots[: self._size.in_series] = POISON
            if Direction.LOAD in directions:
                with device.current():
                    device.driver.fill(memory.address + half, POISON, half, LEGACY_STREAM)
                    device.driver.stream_synchronize(LEGACY_STREAM)

    def wrong(self, directions: Sequence[Direction]) -> int:
        """How many blocks of the targets do not hold the right bytes."""
        found = 0
        for direction in directions:
            for index, right in enumerate(self._right[direction]):
                rows = self._moved(direction, index)
                if not np.array_equal(rows, right):
                    found += int((rows != right).any(axis=1).sum())
        return found

    def _moved(self, direction: Direction, index: int) -> UInt8Array:
        """What the series of a direction has written on one device, in the order of its blocks."""
        blocks, slots = self._ids[direction]
        if direction is Direction.STORE:
            stored: UInt8Array = self._slots[index][slots]
            return stored
        back = np.empty_like(self._right[direction][index])
        with self._devices[index].current():
            address = self._memory[index].address + back.nbytes
            self._devices[index].driver.copy_to_host(address_of(back), address, back.nbytes)
        loaded: UInt8Array = back[blocks - self._size.in_series]
        return loaded

    def execute(self, directions: Sequence[Direction]) -> float:
        """Submit all transfers and wait for all; seconds by the wall clock."""
        engine, blocks_each, jobs = self._engine, self._size.blocks, []
        begin = time.perf_counter()
        for start in range(0, self._size.in_series, blocks_each):
            for direction in directions:
                blocks, slots = (ids[start : start + blocks_each] for ids in self._ids[direction])
                jobs.append(engine.submit(direction, blocks, slots, after=NO_WAIT))
        while not all(job.done for job in jobs[-len(directions) :]):
            pass
        seconds = time.perf_counter() - begin
        for job in jobs:
            job.wait()
        engine.poll()
        return seconds

    def close(self) -> None:
        self._engine.close()


# the command ----------------------------------------------------------------------------------------------------------

ONE, SHARDED = "one GPU", "sharded"
_SIZE, _SIMULATED = ShardSize(64, 32 << 10, 32, 8), ShardSize(4, 256, 2, 2)
_TEXT = """\
Times series of 64 MiB transfers a GPU: one GPU, and a ShardedEngine over all of them. By wall clock; every byte is \
verified."""


def add_parser(benches: Any) -> None:
    example = "bench sharded --gpus 2"
    parser = add_command(benches, "sharded", "several GPUs in one process", _TEXT, example=example, common=COMMON)
    gpus = "how many, from --device on (default 2)"
    parser.add_argument("--gpus", type=whole(1, 16), default=2, metavar="N", help=gpus)
    add_bench_options(parser, 5, drawn=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    def measure(lab: Lab, output: Output) -> Fields:
        size = _SIMULATED if lab.device.simulated else _SIZE
        with ExitStack() as undo:
            return _measure(open_gpus(lab.device, arguments.gpus, undo), size, lab, output, undo)

    return conduct(arguments, "sharded", measure, _show)


def open_gpus(first: Device, count: int, undo: ExitStack) -> list[Device]:
    """The device and those after it; on the simulated device, new ones of one driver."""
    if first.simulated:
        from kvoffload.simulator import SimulatedDriver

        driver = SimulatedDriver(device_count=count)
        return [undo.enter_context(open_device(index, backend=driver)) for index in range(count)]
    try:
        others = [undo.enter_context(open_device(first.index + index)) for index in range(1, count)]
    except ValueError as error:
        raise CommandError(f"--gpus {count} from --device {first.index} on: {error}") from error
    return [first, *others]


def _measure(devices: Sequence[Device], size: ShardSize, lab: Lab, output: Output, undo: ExitStack) -> Fields:
    used = {ONE: devices[:1], SHARDED: devices}
    series = {
        name: undo.enter_context(Series(each, size, lab.seed, sharded=name == SHARDED)) for name, each in used.items()
    }
    records: list[dict[str, Any]] = []
    with output.progress("directions") as progress:
        for direction, directions in DIRECTIONS.items():
            in_series = len(directions) * size.in_series * size.row_bytes
            scenarios = {
                name: Scenario(
                    partial(each.execute, directions),
                    partial(each.poison, directions),
                    partial(each.wrong, directions),
                    len(used[name]) * in_series,
                )
                for name, each in series.items()
            }
            timings = time_rounds(scenarios, lab.repeats, 0 if lab.device.simulated else 1)
            record: dict[str, Any] = {"direction": direction}
            record["wrong"] = {name: timing.wrong for name, timing in timings.items()}
            if not lab.device.simulated:
                record["gb_per_s"] = rates = {name: timing.gb_per_s for name, timing in timings.items()}
                record["sharded/one"] = rates[SHARDED] / rates[ONE]
            records.append(record)
            progress(len(records), len(DIRECTIONS))
    wrong = sum(sum(record["wrong"].values()) for record in records)
    return {"gpus": len(devices), **size._asdict(), "series": records, "not_run": {}, "wrong_rows": wrong}


def _show(fields: Fields, output: Output) -> None:
    gpus, records = fields["gpus"], fields["series"]
    slowest = min(records, key=lambda each: each["sharded/one"])
    times = f"{slowest['sharded/one']:.2f} times one GPU ({slowest['direction']})"
    output.line(f"bench sharded: {gpus} GPUs in one process: at least {times}")
    lines = [
        [each["direction"], *(fixed(rate) for rate in each["gb_per_s"].values()), fixed(each["sharded/one"], 2)]
        for each in records
    ]
    size = ShardSize(*(fields[name] for name in ShardSize._fields))
    blocks = f"{size.blocks} blocks x {size.planes} planes x {size.block_bytes} B"
    title = f"GB/s by wall clock, {size.transfers} transfers of {blocks} a GPU"
    output.table(title, ("moves", ONE, f"{SHARDED}, {gpus} GPUs", "/ one GPU"), lines)

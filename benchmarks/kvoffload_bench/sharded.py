"""`kvoffload bench sharded`: a ShardedEngine over several GPUs, against one GPU and against a process for each GPU."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvoffload.device.buffers import DeviceBuffer
from kvoffload.device.device import Device, open_device
from kvoffload.device.streams import NO_WAIT
from kvoffload.driver import address_of
from kvoffload.driver.core import LEGACY_STREAM
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.sharded import ShardedEngine
from kvoffload.internal.models import ModelGeometry, find_model
from kvoffload.internal.types import Int64Array, UInt8Array
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import CommandError, Output
from kvoffload.terminal.options import COMMON, add_command, model, whole
from kvoffload_bench.harness import POISON, Lab, Scenario, time_rounds
from kvoffload_bench.report import Fields, add_bench_options, conduct, fixed
from kvoffload_bench.series import DIRECTIONS

_LEAD_SECONDS = 20e-3  # from the command to the first transfer, so that all processes begin together
_START_SECONDS, _ROUND_SECONDS = 120.0, 60.0  # a process that takes longer has failed


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
    def nbytes(self) -> int:
        """Of a series of one direction on one device."""
        return self.in_series * self.planes * self.block_bytes


class SeriesIds:
    """Blocks and slots of the series of both directions, random and the same on every device. Stores have the first
    half of both, loads the second.
    """

    def __init__(self, size: ShardSize, seed: int) -> None:
        random, count = np.random.default_rng(seed), size.in_series
        self._size = size
        self._ids = {
            direction: (first + random.permutation(count), first + random.permutation(count))
            for direction, first in ((Direction.STORE, 0), (Direction.LOAD, count))
        }

    def of(self, direction: Direction, index: int | None = None) -> tuple[Int64Array, Int64Array]:
        """Blocks and slots of a transfer; None: of all of the series."""
        blocks, slots = self._ids[direction]
        if index is None:
            return blocks, slots
        taken = slice(index * self._size.blocks, (index + 1) * self._size.blocks)
        return blocks[taken], slots[taken]


class ShardBytes:
    """A block-major cache on a device, the range of slots that it is stored to, and what both must hold.

    Attributes:
        layout: of the cache.
    """

    def __init__(self, device: Device, size: ShardSize, ids: SeriesIds, seed: int) -> None:
        self._device, self._count = device, size.in_series
        planes = device.allocate_blocks(2 * self._count, planes=size.planes, block_bytes=size.block_bytes)
        self.layout = KVLayout([planes], on_default_stream=False)
        owner = planes[0].owner
        assert isinstance(owner, DeviceBuffer)
        self._memory, self._ids = owner, ids
        width = size.planes * size.block_bytes
        random = np.random.default_rng((seed, device.index))
        self._loaded = random.integers(0, 256, (self._count, width), dtype=np.uint8)  # by block
        stored = random.integers(0, 256, (self._count, width), dtype=np.uint8)
        self._memory.copy_from(stored)
        blocks, slots = ids.of(Direction.STORE)
        self._stored = np.empty_like(stored)  # by slot
        self._stored[slots] = stored[blocks]
        self._half = self._memory.address + self._count * width
        self._back = np.empty_like(stored)

    def prepare(self, slots: UInt8Array) -> None:
        """Give loads their sources, which nothing changes."""
        blocks, places = self._ids.of(Direction.LOAD)
        slots[places] = self._loaded[blocks - self._count]

    def poison(self, slots: UInt8Array, directions: Sequence[Direction]) -> None:
        """Overwrite the targets."""
        if Direction.STORE in directions:
            slots[: self._count] = POISON
        if Direction.LOAD in directions:
            with self._device.current():
                self._device.driver.fill(self._half, POISON, self._loaded.nbytes, LEGACY_STREAM)
                self._device.driver.stream_synchronize(LEGACY_STREAM)

    def wrong(self, slots: UInt8Array, directions: Sequence[Direction]) -> int:
        """How many blocks of the targets are not what they must be."""
        found = 0
        if Direction.STORE in directions:
            found += _differing(slots[: self._count], self._stored)
        if Direction.LOAD in directions:
            with self._device.current():
                self._device.driver.copy_to_host(address_of(self._back), self._half, self._back.nbytes)
            found += _differing(self._back, self._loaded)
        return found


def _differing(found: UInt8Array, right: UInt8Array) -> int:
    return 0 if np.array_equal(found, right) else int((found != right).any(axis=1).sum())


class Series:
    """The series on an engine of one device, or on one over several. A context manager.

    Attributes:
        nbytes: of a series of one direction, on all devices.
    """

    def __init__(self, devices: Sequence[Device], size: ShardSize, seed: int, *, sharded: bool) -> None:
        self._ids, self._transfers = SeriesIds(size, seed), size.transfers
        self._bytes = [ShardBytes(device, size, self._ids, seed) for device in devices]
        layouts = [each.layout for each in self._bytes]
        count = 2 * size.in_series
        self._engine: OffloadEngine | ShardedEngine
        if sharded:
            self._engine = ShardedEngine(layouts, devices=devices, num_slots=count)
            pools = list(self._engine.slots)
        else:
            self._engine = OffloadEngine(layouts[0], device=devices[0], num_slots=count)
            pools = [self._engine.slots]
        width = size.planes * size.block_bytes  # behind it a slot is padded
        self._slots = [pool[:, :width] for pool in pools]
        for each, slots in zip(self._bytes, self._slots, strict=True):
            each.prepare(slots)
        self.nbytes = size.nbytes * len(devices)

    def poison(self, directions: Sequence[Direction]) -> None:
        for each, slots in zip(self._bytes, self._slots, strict=True):
            each.poison(slots, directions)

    def wrong(self, directions: Sequence[Direction]) -> int:
        return sum(each.wrong(slots, directions) for each, slots in zip(self._bytes, self._slots, strict=True))

    def execute(self, directions: Sequence[Direction], begin: float | None = None) -> tuple[float, float]:
        """Submit all and wait for all; when it began and ended, by `time.perf_counter`. `begin`: not before then."""
        engine = self._engine
        while begin is not None and time.perf_counter() < begin:
            pass
        begin, jobs = time.perf_counter(), []
        for index in range(self._transfers):
            for direction in directions:
                blocks, slots = self._ids.of(direction, index)
                if direction is Direction.STORE:
                    jobs.append(engine.store(blocks, slots, after=NO_WAIT))
                else:
                    jobs.append(engine.load(slots, blocks, after=NO_WAIT))
        while not all(job.done for job in jobs[-len(directions) :]):
            pass
        end = time.perf_counter()
        for job in jobs:
            job.wait()
        engine.poll()
        return begin, end

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> Series:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# a process for each device --------------------------------------------------------------------------------------------


class _Task(NamedTuple):
    """What a process is asked: to poison, to execute from a moment on, or to compare."""

    name: str
    directions: tuple[Direction, ...]
    begin: float | None = None


def _serve(connection: Connection, index: int, size: ShardSize, seed: int) -> None:
    """The main function of a process: its own engine on one device, until it receives None."""
    with open_device(index) as device, Series([device], size, seed, sharded=False) as series:
        connection.send(None)
        while (task := connection.recv()) is not None:
            given = (task.directions,) if task.begin is None else (task.directions, task.begin)
            connection.send(getattr(series, task.name)(*given))


class Processes:
    """A process for each device, which executes the series of that device.

    Attributes:
        nbytes: of a series of one direction, by all processes.
    """

    def __init__(self, connections: Sequence[Connection], size: ShardSize) -> None:
        self._connections = connections
        self.nbytes = size.nbytes * len(connections)

    def poison(self, directions: Sequence[Direction]) -> None:
        self._ask(_Task("poison", tuple(directions)))

    def wrong(self, directions: Sequence[Direction]) -> int:
        return sum(self._ask(_Task("wrong", tuple(directions))))

    def execute(self, directions: Sequence[Direction]) -> tuple[float, float]:
        """When the first began and the last ended; their clock is that of the machine."""
        spans = self._ask(_Task("execute", tuple(directions), time.perf_counter() + _LEAD_SECONDS))
        return min(begin for begin, _ in spans), max(end for _, end in spans)

    def _ask(self, task: _Task) -> list[Any]:
        for connection in self._connections:
            connection.send(task)
        return [_answer(connection, _ROUND_SECONDS) for connection in self._connections]


def _answer(connection: Connection, seconds: float) -> Any:
    if not connection.poll(seconds):
        raise CommandError(f"a process has not answered for {seconds:.0f} s")
    try:
        return connection.recv()
    except EOFError:
        raise CommandError("a process has ended; what it printed says why") from None


@contextmanager
def processes(indices: Sequence[int], size: ShardSize, seed: int) -> Iterator[Processes]:
    """Start a process for each device. They are spawned: a fork would share this process's CUDA contexts."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as undo:
        connections = []
        for index in indices:
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, index, size, seed), daemon=True)
            process.start()
            theirs.close()
            undo.callback(_end, mine, process.join, process.kill)
            connections.append(mine)
        for connection in connections:
            _answer(connection, _START_SECONDS)
        yield Processes(connections, size)


def _end(connection: Connection, join: Callable[[float], None], kill: Callable[[], None]) -> None:
    try:
        connection.send(None)
        join(10.0)
    except OSError:  # it has ended by itself
        pass
    kill()
    connection.close()


# the command ----------------------------------------------------------------------------------------------------------

ONE, SHARDED, PROCESSES = "one GPU", "sharded", "processes"
_MODEL = "llama-3.1-8b"
_REPEATS = 5
_TRANSFER_BYTES, _TRANSFERS = 64 << 20, 8
_SIMULATED = ShardSize(4, 256, 2, 2)
_MOST_GPUS = 16
_TEXT = """\
Times series of 64 MiB transfers a GPU: one GPU, a ShardedEngine over all of them, and a process for each. By wall \
clock; every byte is verified."""


class _Mover(Protocol):
    nbytes: int

    def poison(self, directions: Sequence[Direction]) -> None: ...

    def wrong(self, directions: Sequence[Direction]) -> int: ...

    def execute(self, directions: Sequence[Direction]) -> tuple[float, float]: ...


def add_parser(benches: Any) -> None:
    parser = add_command(
        benches, "sharded", "several GPUs in one process", _TEXT, example="bench sharded --gpus 2", common=COMMON
    )
    parser.add_argument(
        "--gpus", type=whole(1, _MOST_GPUS), default=2, metavar="N", help="how many, from --device on (default 2)"
    )
    parser.add_argument(
        "--model",
        type=model,
        default=find_model(_MODEL),
        metavar="NAME",
        help=f"of one GPU's share (default {_MODEL})",
    )
    add_bench_options(parser, _REPEATS, drawn=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    def measure(lab: Lab, output: Output) -> Fields:
        size = _SIMULATED if lab.device.simulated else size_of(arguments.model)
        with ExitStack() as undo:
            devices = _open(lab.device, arguments.gpus, undo)
            return _measure(devices, size, lab, output, undo)

    return conduct(arguments, "sharded", measure, _show)


def size_of(geometry: ModelGeometry) -> ShardSize:
    blocks = -(-_TRANSFER_BYTES // geometry.bytes_per_block)
    return ShardSize(geometry.planes, geometry.block_bytes, blocks, _TRANSFERS)


def _open(first: Device, count: int, undo: ExitStack) -> list[Device]:
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
    simulated = devices[0].simulated
    movers: dict[str, _Mover] = {
        ONE: undo.enter_context(Series(devices[:1], size, lab.seed, sharded=False)),
        SHARDED: undo.enter_context(Series(devices, size, lab.seed, sharded=True)),
    }
    if not simulated:
        indices = [device.index for device in devices]
        movers[PROCESSES] = undo.enter_context(processes(indices, size, lab.seed))
    records: list[dict[str, Any]] = []
    with output.progress("directions") as progress:
        for name, directions in DIRECTIONS.items():
            records.append(_of_directions(movers, name, directions, lab.repeats, simulated))
            progress(len(records), len(DIRECTIONS))
    return {
        "gpus": len(devices),
        **size._asdict(),
        "series": records,
        "not_run": {},
        "wrong_rows": sum(sum(record["wrong"].values()) for record in records),
    }


def _of_directions(
    movers: dict[str, _Mover], name: str, directions: Sequence[Direction], repeats: int, simulated: bool
) -> dict[str, Any]:
    timings = time_rounds(
        {each: _scenario(mover, directions) for each, mover in movers.items()}, repeats, 0 if simulated else 1
    )
    record: dict[str, Any] = {"direction": name, "wrong": {each: timing.wrong for each, timing in timings.items()}}
    if not simulated:
        record["gb_per_s"] = rates = {each: timing.gb_per_s for each, timing in timings.items()}
        record["sharded/one"] = rates[SHARDED] / rates[ONE]
        record["sharded/processes"] = rates[SHARDED] / rates[PROCESSES]
    return record


def _scenario(mover: _Mover, directions: Sequence[Direction]) -> Scenario:
    def execute() -> float:
        begin, end = mover.execute(directions)
        return end - begin

    return Scenario(
        execute, partial(mover.poison, directions), partial(mover.wrong, directions), mover.nbytes * len(directions)
    )


def _show(fields: Fields, output: Output) -> None:
    gpus, records = fields["gpus"], fields["series"]
    slowest, behind = (min(records, key=lambda each: each[key]) for key in ("sharded/one", "sharded/processes"))
    output.line(
        f"bench sharded: {gpus} GPUs in one process: at least {slowest['sharded/one']:.2f} times one GPU "
        f"({slowest['direction']}), and {behind['sharded/processes']:.2f} of a process for each GPU "
        f"({behind['direction']})"
    )
    lines = [
        [
            each["direction"],
            *(fixed(rate) for rate in each["gb_per_s"].values()),
            *(fixed(each[ratio], 2) for ratio in ("sharded/one", "sharded/processes")),
        ]
        for each in records
    ]
    columns = ("moves", ONE, f"{SHARDED}, {gpus} GPUs", f"{gpus} processes", "/ one GPU", "/ processes")
    size = ShardSize(*(fields[name] for name in ShardSize._fields))
    blocks = f"{size.blocks} blocks x {size.planes} planes x {size.block_bytes} B"
    output.table(f"GB/s by wall clock, {size.transfers} transfers of {blocks} a GPU", columns, lines)

"""`kvoffload bench sharded`: a ShardedEngine over several GPUs, against one GPU and against a process for each GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from kvoffload.device.device import Device, open_device
from kvoffload.internal.models import ModelGeometry, find_model
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import CommandError, Output
from kvoffload.terminal.options import COMMON, add_command, model, whole
from kvoffload_bench.lab import Lab
from kvoffload_bench.report import Fields, add_bench_options, conduct, number
from kvoffload_bench.rounds import Scenario, time_rounds
from kvoffload_bench.series import DIRECTIONS
from kvoffload_bench.sharded_series import Series, ShardSize, processes

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
            *(number(rate) for rate in each["gb_per_s"].values()),
            *(number(each[ratio], 2) for ratio in ("sharded/one", "sharded/processes")),
        ]
        for each in records
    ]
    columns = ("moves", ONE, f"{SHARDED}, {gpus} GPUs", f"{gpus} processes", "/ one GPU", "/ processes")
    size = ShardSize(*(fields[name] for name in ShardSize._fields))
    blocks = f"{size.blocks} blocks x {size.planes} planes x {size.block_bytes} B"
    output.table(f"GB/s by wall clock, {size.transfers} transfers of {blocks} a GPU", columns, lines)

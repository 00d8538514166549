"""`kvoffload bench`: transfers against bare driver calls, and Python's share of a call."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

from kvoffload.cli import marshal
from kvoffload.cli.cases import FULL, SMALL, BigCopy, GpuTimer
from kvoffload.cli.console import Output, add_common_options, models, numbers, open_backend, whole
from kvoffload.cli.latency import Latency, measure_descriptors, measure_latency
from kvoffload.cli.transfer import RATIOS, Plan, Row, lowest_ratios, measure_all
from kvoffload.copiers import why_not
from kvoffload.device import Device
from kvoffload.models import MODELS
from kvoffload.plan import Direction

_CASES = ("strided", "batch", "loop", "bare strided", "flat batch", "big copy")
_DESCRIPTION = """\
Copy random, non-adjacent blocks between planes in one slab and random slots of the pinned pool, in both directions and
in every way: the engine's copiers; "bare strided", the same operations built once and given to cuMemcpy3DBatchAsync;
"flat batch", one cuMemcpyBatchAsync with a descriptor per row on an idle stream; "big copy", one contiguous pinned copy
of 1 GiB. All of a line use the same addresses, in interleaved rounds; figures are medians on the GPU clock. Targets are
poisoned before, and all bytes verified after, each case's timed transfer of the last round. Then: loads of 4096
descriptors of 8, 16 and 24 KiB through the batch copier and as one flat batch, also by wall clock; and how long store()
and load() take on the host, and how long until poll() gives out the result. Of models with two groups, one group's
planes are copied. On the simulated device: small sizes, verified, and no times."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure", description="Measure transfers, or Python's share of them.")
    benches = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    transfer = benches.add_parser("transfer", help="every way of copying, per geometry", description=_DESCRIPTION)
    transfer.add_argument(
        "--model",
        type=models,
        nargs="+",
        default=[list(MODELS.values())],
        metavar="NAME",
        help=f"geometries, or all (the default): {', '.join(MODELS)}",
    )
    transfer.add_argument(
        "--blocks", type=numbers, metavar="N,...", help="blocks of a transfer (default: about 64 MiB)"
    )
    transfer.add_argument(
        "--rows", type=numbers, default=[1, 8], metavar="N,...", help="adjacent blocks in a slot (default 1,8)"
    )
    transfer.add_argument("--repeats", type=whole(1), metavar="N", help="timed rounds (default 7; simulated 1)")
    transfer.add_argument("--seed", type=whole(0), default=0, help="of the bytes and of where blocks lie (default 0)")
    add_common_options(transfer)
    transfer.set_defaults(run=run_transfer)
    marshal.add_parser(benches)


def run_transfer(arguments: argparse.Namespace) -> int:
    """Measure; 0 if every byte was right, else 1."""
    output = Output(arguments.json)
    with open_backend(arguments, output, arguments.seed) as device:
        size = SMALL if device.simulated else FULL
        repeats = arguments.repeats or (1 if device.simulated else 7)
        chosen = [model for group in arguments.model for model in group]
        plan = Plan(chosen, arguments.rows, arguments.blocks, repeats, size, arguments.seed)
        fields = _measure(plan, device, output)
        _print(fields, device, output)
    output.result(_json(fields))
    return 1 if fields["wrong_rows"] else 0


def _measure(plan: Plan, device: Device, output: Output) -> dict[str, Any]:
    with ExitStack() as stack:
        timer = stack.enter_context(closing(GpuTimer(device)))
        big = stack.enter_context(closing(BigCopy(device, timer, plan.size.big_bytes, plan.seed)))
        wrong_big = big.wrong()
        with output.progress("geometries") as progress:
            rows = list(measure_all(plan, device, timer, big, progress))
        descriptors = measure_descriptors(device, timer, plan.size, plan.repeats, plan.seed)
        latencies = measure_latency(device, timer, big, plan.size, plan.repeats, plan.seed)
    wrong = wrong_big + sum(sum(row.wrong.values()) for row in rows)
    wrong += sum(sum(row["wrong"].values()) for row in descriptors) + sum(each.wrong for each in latencies)
    return {
        **describe_device(device),
        "repeats": plan.repeats,
        "transfers": rows,
        "descriptors": descriptors,
        "latencies": latencies,
        "lowest_ratios": lowest_ratios(rows),
        "not_run": {name: reason for name, reason in why_not(device.capabilities).items() if reason},
        "wrong_rows": wrong,
    }


def describe_device(device: Device) -> dict[str, Any]:
    """What a figure was measured on."""
    capabilities, pci = device.capabilities, device.pci
    return {
        "simulated": device.simulated,
        "device": device.name,
        "driver": ".".join(map(str, capabilities.driver_version)),
        "bindings": ".".join(map(str, capabilities.bindings_version)),
        "link": "made up" if device.simulated else f"{pci.link_speed or 'speed unknown'} x{pci.link_width or '?'}",
    }


def _json(fields: dict[str, Any]) -> dict[str, Any]:
    plain = dict(fields)
    plain["transfers"] = [dataclasses.asdict(row) for row in fields["transfers"]]
    plain["latencies"] = [dataclasses.asdict(each) | {"wall/big copy": each.ratio} for each in fields["latencies"]]
    return plain


# tables ---------------------------------------------------------------------------------------------------------------


def _print(fields: dict[str, Any], device: Device, output: Output) -> None:
    output.banner(device.simulated)
    rows: list[Row] = fields["transfers"]
    for direction in Direction:
        _print_direction(direction, [row for row in rows if row.direction is direction], device.simulated, output)
    _print_descriptors(fields["descriptors"], device.simulated, output)
    _print_latencies(fields["latencies"], device.simulated, output)
    for name, reason in fields["not_run"].items():
        output.line(f"not run: {name}: {reason}")
    output.line(f"{fields['device']}, driver {fields['driver']}, bindings {fields['bindings']}, link {fields['link']}")
    for each in fields["lowest_ratios"]:
        output.line(
            f"{each['ratio']}, {each['direction']}: lowest {each['lowest']:.2f} ({each['lowest_at']}), "
            f"median {each['median']:.2f}"
        )
    _print_other_ratios(fields, output)
    output.line(f"rows of bytes that were wrong: {fields['wrong_rows']}")


def _print_direction(direction: Direction, rows: Sequence[Row], simulated: bool, output: Output) -> None:
    way = "device to host" if direction is Direction.STORE else "host to device"
    title = f"{direction} ({way}), " + (
        "SIMULATED: rows of bytes that were wrong" if simulated else "GB/s on the GPU clock"
    )
    ratios = () if simulated else tuple(name for name, *_ in RATIOS)
    columns = ("model", "planes x bytes", "rows of", "blocks", "pitch MiB", *_CASES[: 5 if simulated else 6], *ratios)
    lines = []
    for row in rows:
        line = [
            row.model,
            f"{row.planes} x {row.block_bytes}",
            row.row_blocks,
            row.blocks,
            f"{row.pitch / (1 << 20):.2f}",
        ]
        if simulated:
            line += [str(row.wrong.get(name, "-")) for name in _CASES[:5]]
        else:
            line += [_number(row.gb_per_s.get(name), 1) for name in _CASES]
            line += [_number(row.ratios.get(name), 2) for name in ratios]
        lines.append(line)
    output.table(title, columns, lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _print_descriptors(rows: Sequence[dict[str, Any]], simulated: bool, output: Output) -> None:
    if not rows:
        return
    columns = ["row bytes", "descriptors", "wrong rows"]
    clocks = () if simulated else ("wall", "gpu")
    columns += [f"{name}, {clock}" for clock in clocks for name in ("batch", "flat batch", "ratio")]
    lines = []
    for row in rows:
        line = [row["row_bytes"], row["descriptors"], sum(row["wrong"].values())]
        for clock in clocks:
            line += [f"{row[f'{name}_{clock}_gb_per_s']:.1f}" for name in ("batch", "flat_batch")]
            line.append(f"{row[f'batch/flat batch, {clock}']:.2f}")
        lines.append(line)
    output.table("load, one number of descriptors" + (", SIMULATED" if simulated else ", GB/s"), columns, lines)


def _print_latencies(latencies: Sequence[Latency], simulated: bool, output: Output) -> None:
    columns = ["transfer", "direction", "wrong rows"]
    columns += [] if simulated else ["call us", "wall us", "GB/s, wall", "big copy GB/s", "wall/big copy"]
    lines = []
    for each in latencies:
        line = [f"{each.model}: {each.blocks} blocks, {each.planes} x {each.block_bytes}", each.direction, each.wrong]
        if each.call_seconds is not None and each.wall_seconds is not None:
            line += [f"{each.call_seconds * 1e6:.0f}", f"{each.wall_seconds * 1e6:.0f}"]
            line += [f"{each.nbytes / each.wall_seconds / 1e9:.1f}", _number(each.big_copy_gb_per_s, 1)]
            line += [_number(each.ratio, 2)]
        lines.append(line)
    output.table("the whole engine, from the call to poll()" + (", SIMULATED" if simulated else ""), columns, lines)


def _print_other_ratios(fields: dict[str, Any], output: Output) -> None:
    for row in fields["descriptors"]:
        if "batch/flat batch, wall" in row:
            output.line(
                f"batch/flat batch, load, {row['descriptors']} x {row['row_bytes']} bytes: "
                f"wall clock {row['batch/flat batch, wall']:.2f}, GPU clock {row['batch/flat batch, gpu']:.2f}"
            )
    for each in fields["latencies"]:
        if each.ratio is not None:
            output.line(
                f"wall/big copy, {each.direction}, {each.blocks} blocks of {each.model}: {each.ratio:.2f}; "
                f"the call itself {each.call_seconds * 1e6:.0f} us"
            )

"""`bench disk --failing`: its options, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvoffload.device.device import Device
from kvoffload.internal.models import find_model
from kvoffload.replay.trace import Request, read_trace, require_readable
from kvoffload.replay.workloads import WORKLOADS, make_workload
from kvoffload.terminal.console import CommandError, Output, mib, open_backend, verified_text
from kvoffload.terminal.options import model, scale, whole
from kvoffload_bench.disk_failing import Traffic, measure
from kvoffload_bench.disk_faults import Fault

Fields = Mapping[str, Any]
_BAR = 0.95
_WORKLOAD, _MODEL, _REQUESTS, _SLOTS = "agents", "llama-3.1-8b", 100, 1024
_SCALE, _SIMULATED_SCALE = 0.25, 1 / 64
_WARM_UP_ROUNDS = 3  # fill the slots of `agents` and some of the disk
_NEED_FAILING = ("trace", "workload", "requests", "slots", "model", "scale")


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--failing`, and the options that need it, whose defaults are None so that `check` knows who gave them."""
    group = parser.add_argument_group("instead: requests while a disk fails")
    group.add_argument("--failing", action="store_true", help="needed for the rest")
    group.add_argument("--trace", type=Path, metavar="FILE", help="the requests")
    group.add_argument("--workload", choices=tuple(WORKLOADS), metavar="NAME", help=f"or these (default {_WORKLOAD})")
    group.add_argument("--requests", type=whole(1, 1_000_000), metavar="N", help=f"default {_REQUESTS}")
    group.add_argument("--slots", type=whole(1), metavar="N", help=f"of the host (default {_SLOTS})")
    group.add_argument("--model", type=model, metavar="NAME", help=f"default {_MODEL}")
    group.add_argument("--scale", type=scale, metavar="X", help=f"of blocks' bytes (default {_SCALE}; simulated 1/64)")


def check(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together, and a trace that cannot be read.

    Raises:
        CommandError: the message names them.
    """
    if not arguments.failing:
        for name in _NEED_FAILING:
            if getattr(arguments, name) is not None:
                raise CommandError(f"--{name} is of no use without --failing: give that, too")
        return
    if arguments.gpu:
        raise CommandError("--gpu does not go with --failing, which moves the bytes of a GPU itself")
    if arguments.trace is not None and arguments.workload is not None:
        raise CommandError("--trace and --workload are both given: choose one")
    if arguments.trace is not None:
        require_readable(arguments.trace)


def run(arguments: argparse.Namespace, file: Path, output: Output) -> dict[str, Any]:
    """Measure; the fields of the result."""
    requests = _requests(arguments)
    with (
        open_backend(arguments, output, note=False) as device,
        output.progress("requests over a failing disk") as progress,
    ):
        fields = measure(device, file, _traffic(arguments, requests, device), progress)
    workload = None if arguments.trace is not None else arguments.workload or _WORKLOAD
    trace = None if arguments.trace is None else str(arguments.trace)
    return {"benchmark": "disk", "trace": trace, "workload": workload, "failing": fields}


def wrong(fields: Fields) -> int:
    """Loaded blocks whose bytes were wrong."""
    return sum(each["wrong_blocks"] for each in fields["failing"]["faults"])


def _requests(arguments: argparse.Namespace) -> list[Request]:
    each = arguments.requests or _REQUESTS
    count = (_WARM_UP_ROUNDS + arguments.repeats) * each
    if arguments.trace is None:
        return make_workload(arguments.workload or _WORKLOAD, count)
    requests = [request for request in read_trace(arguments.trace) if request][:count]
    if len(requests) < count:
        raise CommandError(
            f"--trace {arguments.trace} has {len(requests):,} requests with blocks, and {count:,} are needed: "
            f"{_WARM_UP_ROUNDS} rounds to warm up and {arguments.repeats} of {each}; lower --requests or --repeats"
        )
    return requests


def _traffic(arguments: argparse.Namespace, requests: Sequence[Request], device: Device) -> Traffic:
    factor = arguments.scale or (_SIMULATED_SCALE if device.simulated else _SCALE)
    geometry = (arguments.model or find_model(_MODEL)).scaled(factor)
    return Traffic(
        geometry, arguments.slots or _SLOTS, requests, arguments.requests or _REQUESTS, arguments.repeats, seed=0
    )


# what is printed ------------------------------------------------------------------------------------------------------


def show(fields: Fields, output: Output) -> None:
    """Print the verdict, and a table of times and one of what happened."""
    failing = fields["failing"]
    output.line(verdict(failing))
    where = "the simulated device: these are no times of a GPU" if failing["simulated"] else failing["device"]
    traffic = fields["workload"] or Path(fields["trace"]).name
    title = (
        f"{traffic}, {failing['requests_a_round']} requests a round, blocks of {mib(failing['bytes_per_block'])}, "
        f"{failing['slots']:,} slots; {where}. Requests a second over those without a disk, and latencies over those "
        "without a disk, lowest to highest round"
    )
    ratios = ("fault", "requests/s", "rounds", "median latency", "p99 latency")
    output.table(title, ratios, [_ratios(each) for each in failing["faults"]])
    title = (
        "hits while the disk fails, and without a disk; how often the breaker opened; faulty calls; the longest "
        "request, and without a disk; when a record was read again after the disk's return"
    )
    events = ("fault", "hits", "without", "opened", "calls", "longest, s", "bare, s", "back, s")
    output.table(title, events, [_events(each) for each in failing["faults"]])
    if output.wide:
        output.table(
            "host time of a request, us", ("fault", "failing", "without"), [_times(each) for each in failing["faults"]]
        )
    output.line("")
    verified = sum(each["verified_blocks"] for each in failing["faults"])
    output.line(f"{verified:,} loaded blocks compared; {verified_text(verified, wrong(fields))}")


def verdict(failing: Fields) -> str:
    """The lowest of the faults' medians, and the worst round of all."""
    faults = failing["faults"]
    lowest = min(faults, key=lambda each: each["requests_ratio"])
    worst = min(each["requests_ratio_lowest_round"] for each in faults)
    lost = [each["fault"] for each in faults if each["return_seconds"] is None]
    back = f"not used again after: {', '.join(lost)}" if lost else "used again by itself after each fault"
    return (
        f"bench disk --failing: {lowest['requests_ratio']:.2f} times the requests a second of a cache without a disk "
        f"(bar {_BAR:.2f}; {Fault(lowest['fault']).text}; worst round of all {worst:.2f}); {back}"
    )


def _ratios(each: Fields) -> tuple[str, ...]:
    return (
        each["fault"],
        f"{each['requests_ratio']:.2f}",
        f"{each['requests_ratio_lowest_round']:.2f} to {each['requests_ratio_highest_round']:.2f}",
        "{:.2f} to {:.2f}".format(*each["median_ratio"]),
        "{:.2f} to {:.2f}".format(*each["p99_ratio"]),
    )


def _events(each: Fields) -> tuple[str, ...]:
    back = each["return_seconds"]
    return (
        each["fault"],
        f"{each['hits']:,}",
        f"{each['hits_without']:,}",
        f"{each['breaker_opened']}",
        f"{each['disturbed_calls']:,}",
        f"{each['longest_request_seconds']:.3f}",
        f"{each['longest_request_without_seconds']:.3f}",
        "never" if back is None else f"{back:.2f}",
    )


def _times(each: Fields) -> tuple[str, ...]:
    return each["fault"], f"{each['request_us']:.0f}", f"{each['request_without_us']:.0f}"

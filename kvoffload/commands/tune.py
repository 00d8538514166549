"""`kvoffload tune`: measures the cost of transfers on this machine, or shows which copy methods engines choose."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice, product
from math import inf
from pathlib import Path
from typing import Any

from kvoffload.calibration import Tuning, tune
from kvoffload.copiers.selection import PREFERENCES, Question, choose, rank
from kvoffload.device.device import Device
from kvoffload.internal import cachefiles
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import CommandError, Output, counted, open_backend, require_writable, write_whole
from kvoffload.terminal.machine import describe_device, missing_copiers
from kvoffload.terminal.options import COMMON, add_command, add_common_options
from kvoffload.tuning import Profile, Shape, profile_for, render, save_profile

_PLANES = 64
_BLOCK_BYTES = tuple(1 << exponent for exponent in range(11, 19))
_BLOCKS = (1, 4, 16, 128)
_PLACEMENTS = {
    "folded": "at one stride in one allocation; one strided operation copies a block of all planes",
    "scattered": "each in its own allocation; a block takes one copy for each plane",
}
_PREFER = {
    "overlap": "the method that costs least beside large and small matrix products, counting the time that the caller "
    "loses",
    "latency": "the method that ends soonest after the call, on an idle GPU",
}
_COPIERS = {
    "batch": "contiguous copies, many in one driver call",
    "loop": "contiguous copies, one driver call each",
    "pack": "a kernel packs blocks into GPU memory for microseconds, contiguous copies carry them",
    "strided": "one operation copies a block of all planes; many operations in one call",
}
_TEXT = """\
Measures each copy method of the copy engine in less than 30 seconds. Let nothing else use the GPU meanwhile. Saves a \
profile for this GPU, driver and link, by which engines choose copy methods."""


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands, "tune", "measure the cost of transfers on this machine", _TEXT, example="tune --show", common=COMMON
    )
    parser.add_argument("--show", action="store_true", help="measure nothing: print which methods engines choose")
    parser.add_argument(
        "--prefer",
        choices=PREFERENCES,
        default="overlap",
        metavar="NAME",
        help=f"with --show: {' or '.join(PREFERENCES)}",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the profile to FILE only")
    parser.add_argument("--wide", action="store_true", help="also the runner-up, with --show; no limit of 80 columns")
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.show and arguments.output is not None:
        raise CommandError("--show measures nothing, so --output has nothing to write: use one of them")
    output = Output(arguments.json, wide=arguments.wide)
    with open_backend(arguments) as device:
        if arguments.show:
            _show(device, output, arguments.prefer)
        else:
            _tune(device, output, arguments.output)
    return 0


# measuring ------------------------------------------------------------------------------------------------------------


def _tune(device: Device, output: Output, path: Path | None) -> None:
    if path is not None:  # refused before half a minute of measuring, not after it
        require_writable("--output", path)
    elif not device.simulated and (problem := cachefiles.why_not_writable()) is not None:
        raise CommandError(
            f"the profile cannot be saved in {cachefiles.cache_folder()}: {problem}; set "
            f"{cachefiles.FOLDER_VARIABLE} to a folder that you can write, or give a file with --output"
        )
    with output.progress("measuring") as progress:
        tuning = tune(device, progress=progress)
    written = path
    if path is not None:
        write_whole("--output", path, render(tuning.profile))
    elif not device.simulated:
        written = save_profile(tuning.profile)
    fields: dict[str, Any] = {
        **describe_device(device),
        "transfers": tuning.transfers,
        "missing": tuning.missing,
        "written": None if written is None else str(written),
    }
    if not device.simulated:
        fields |= {"seconds": tuning.seconds} | _figures(tuning.profile)
    output.result(fields)
    _print_tuning(tuning, fields, output, kept=path is None and written is not None)


def _figures(profile: Profile) -> dict[str, Any]:
    return {
        "link_gb_per_s": {str(direction): costs.link / 1e9 for direction, costs in profile.costs.items()},
        "field_link_gb_per_s": {
            str(situation): {str(direction): costs.link / 1e9 for direction, costs in found.items()}
            for situation, found in profile.situations.items()
        },
        "host_us": {name: {"fixed": each.fixed * 1e6, "copy": each.copy * 1e6} for name, each in profile.host.items()},
        "errors": {name: error._asdict() for name, error in profile.errors.items()},
        "codec": profile.codec,
    }


def _print_tuning(tuning: Tuning, fields: dict[str, Any], output: Output, *, kept: bool) -> None:
    """Print what was measured. `kept`: the profile was saved where engines look for it."""
    written = "no profile written" if fields["written"] is None else f"wrote {fields['written']}"
    profile = tuning.profile
    if fields["simulated"]:
        output.line(f"tune: simulated device: {tuning.transfers:,} transfers copied, {written}; times need a GPU")
    else:
        links = ", ".join(f"{rate:.1f} ({direction})" for direction, rate in fields["link_gb_per_s"].items())
        output.line(
            f"tune: {written}: {tuning.transfers:,} transfers in {tuning.seconds:.1f} s; one contiguous copy reaches "
            f"{links} GB/s; {fields['device']}, link {fields['link']}"
        )
        errors = [
            (name, f"{100 * error.median:.1f}", f"{100 * error.worst:.1f}", error.transfers)
            for name, error in profile.errors.items()
        ]
        title = "error of the expected times, %, at sizes between the measured ones"
        output.table(title, ("copier", "median", "worst", "transfers"), errors)
        host = [(name, f"{each.fixed * 1e6:.0f}", f"{each.copy * 1e6:.2f}") for name, each in profile.host.items()]
        output.table("host time of a submission, us", ("copier", "fixed", "each copy"), host)
        coded = [
            (situation, *(f"{found[each]:.2f}" if each in found else "-" for each in Direction))
            for situation, found in profile.codec.items()
        ]
        title = "codec bf16-12: times as fast as pack without it"
        output.table(title, ("situation", *map(str, Direction)), coded)
        if tuning.missing or kept:
            output.line("")
    for name, reason in tuning.missing.items():
        output.line(f"not measured: {name}: {reason}")
    if kept:
        output.line("new engines choose copy methods by it; `kvoffload tune --show` prints the choices")


# showing --------------------------------------------------------------------------------------------------------------


def decisions(profile: Profile, available: frozenset[str], prefer: str) -> Iterator[dict[str, Any]]:
    """Yield the copy method of each kind of transfer, its expected bandwidth, and the runner-up: None if there is no
    other method. A bandwidth is None if the profile has no times for the method.
    """
    for direction, placement, block_bytes, blocks in product(Direction, _PLACEMENTS, _BLOCK_BYTES, _BLOCKS):
        copies = blocks * _PLANES
        operations = blocks if placement == "folded" else copies
        shape = Shape(direction, blocks, copies, operations, copies, copies * block_bytes)
        question = Question(shape, available, profile, prefer)
        choice = choose(question)
        seconds = {each.copier: each.seconds for each in rank(question)}
        second = next((copier for copier in seconds if copier != choice.copier), None)
        yield {
            "direction": str(direction),
            "placement": placement,
            "block_bytes": block_bytes,
            "blocks": blocks,
            "planes": _PLANES,
            "method": choice.copier,
            "gb_per_s": _rate(shape, seconds[choice.copier]),
            "runner_up": second,
            "runner_up_gb_per_s": None if second is None else _rate(shape, seconds[second]),
            "reason": choice.reason,
        }


def _rate(shape: Shape, seconds: float) -> float | None:
    return None if seconds == inf else shape.nbytes / seconds / 1e9


def _show(device: Device, output: Output, prefer: str) -> None:
    profile = profile_for(device)
    with output.progress("trying copy methods"):
        missing = missing_copiers(device)
    not_offered = ("pack",) if device.simulated else ()
    available = frozenset(name for name, reason in missing.items() if reason is None and name not in not_offered)
    found = list(decisions(profile, available, prefer))
    fields = describe_device(device) | {"profile": profile.source, "prefer": prefer}
    fields["not_available"] = {name: reason for name, reason in missing.items() if reason is not None}
    fields["not_offered"] = list(not_offered)
    output.result(fields | _figures(profile) | {"decisions": found})
    output.line(f"tune --show: figures expected by this profile: {profile.source}")
    runner_up = "then the runner-up, " if output.wide else ""
    output.line(f"each cell: the chosen copy method and its GB/s, {runner_up}for {_PLANES} planes, prefer={prefer!r}")
    output.line(f"prefer {prefer}: {_PREFER[prefer]}")
    for placement, meaning in _PLACEMENTS.items():
        output.line(f"planes {placement}: {meaning}")
    shown = {each["method"] for each in found} | {each["runner_up"] for each in found if output.wide}
    for copier in sorted(shown - {None}):
        output.line(f"{copier}: {_COPIERS[copier]}")

    def cell(each: dict[str, Any]) -> str:
        text = f"{each['method']} {_number(each['gb_per_s'])}"
        if each["runner_up"] is None or not output.wide:
            return text
        return f"{text} ({each['runner_up']} {_number(each['runner_up_gb_per_s'])})"

    columns = ("block bytes", *(counted(blocks, "block") for blocks in _BLOCKS))
    cells = map(cell, found)  # in the order of the tables, line by line
    for direction, placement in product(Direction, _PLACEMENTS):
        lines = [(f"{nbytes >> 10} KiB", *islice(cells, len(_BLOCKS))) for nbytes in _BLOCK_BYTES]
        output.table(f"{direction}, planes {placement}", columns, lines)
    if fields["not_available"] or not_offered:
        output.line("")
    for name, reason in fields["not_available"].items():
        output.line(f"not available: {name}: {reason}")
    if not_offered:
        output.line("pack is a kernel: the simulated device runs it only if you ask for it")
    if profile.key is None and not device.simulated:
        output.line("")
        output.line("these figures are from another machine: `kvoffload tune` measures this one")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"

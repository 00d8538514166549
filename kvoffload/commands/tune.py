"""`kvoffload tune`: measures what transfers cost on this machine, or shows what the profile in force decides."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from kvoffload.calibration import Tuning, tune
from kvoffload.copiers.selection import PREFERENCES, choose, rank
from kvoffload.device.device import Device
from kvoffload.internal import cachefiles
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import CommandError, Output, open_backend
from kvoffload.terminal.files import require_writable, write_whole
from kvoffload.terminal.machine import describe_device, missing_copiers
from kvoffload.terminal.options import add_common_options, whole
from kvoffload.tuning import Profile, Shape, profile_for, render, save_profile

_PLANES = 64
_BLOCK_BYTES = tuple(1 << exponent for exponent in range(11, 19))
_BLOCKS = (1, 4, 16, 128)
_PLACEMENTS = ("folded", "scattered")
_INTERPRETED = ("gather", "split")  # on the simulated device, which engines therefore do not choose there
_DESCRIPTION = """\
Measure each copy method: batches, loops and the gather kernel over sizes and numbers of copies, strided copies over
sizes of rows, rows and operations, transfers shared by kernel and copy engine; then how much each slows a bf16 matrix
product concurrent with it. Takes less than 30 seconds; nothing else should use the GPU. The profile is kept in the
user's cache folder for this GPU, driver, link and bindings, and engines that are created later choose by it. On the
simulated device: small sizes, and no profile is kept."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("tune", help="measure what transfers cost on this machine", description=_DESCRIPTION)
    parser.add_argument("--show", action="store_true", help="measure nothing: print what the profile in force decides")
    parser.add_argument(
        "--prefer", choices=PREFERENCES, default="overlap", help="of --show: what to choose by (default overlap)"
    )
    parser.add_argument(
        "--sm-limit",
        type=whole(0, 1 << 16),
        default=4,
        metavar="N",
        help="of --show: SMs for a copy kernel at most (default 4)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the profile to FILE instead of the user's cache folder"
    )
    add_common_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure or show; 0."""
    if arguments.show and arguments.output is not None:
        raise CommandError("--show measures nothing, so --output has nothing to write: use one of them")
    output = Output(arguments.json)
    with open_backend(arguments, output) as device:
        if arguments.show:
            _show(device, output, arguments.prefer, arguments.sm_limit)
        else:
            _tune(device, output, arguments.output)
    return 0


# measuring ------------------------------------------------------------------------------------------------------------


def _tune(device: Device, output: Output, path: Path | None) -> None:
    _require_kept(device, path)
    with output.progress("measuring") as progress:
        tuning = tune(device, progress=progress)
    written = _write(tuning.profile, path, device)
    fields: dict[str, Any] = {
        **describe_device(device),
        "transfers": tuning.transfers,
        "missing": tuning.missing,
        "written": None if written is None else str(written),
    }
    if not device.simulated:
        fields |= {"seconds": tuning.seconds} | _figures(tuning.profile)
    output.result(fields)
    _print_tuning(tuning, fields, output)


def _require_kept(device: Device, path: Path | None) -> None:
    """Refuse before half a minute of measuring, not after it, if the profile cannot be written."""
    if path is not None:
        require_writable("--output", path)
    elif not device.simulated and (problem := cachefiles.why_not_writable()) is not None:
        raise CommandError(
            f"the profile cannot be kept in {cachefiles.cache_folder()}: {problem}; set "
            f"{cachefiles.FOLDER_VARIABLE} to a folder that can be written, or give a file with --output"
        )


def _write(profile: Profile, path: Path | None, device: Device) -> Path | None:
    if path is not None:
        write_whole("--output", path, render(profile))
        return path
    return None if device.simulated else save_profile(profile)


def _figures(profile: Profile) -> dict[str, Any]:
    return {
        "link_gb_per_s": {str(direction): costs.link / 1e9 for direction, costs in profile.costs.items()},
        "field_link_gb_per_s": {
            str(situation): {str(direction): costs.link / 1e9 for direction, costs in found.items()}
            for situation, found in profile.situations.items()
        },
        "host_us": {name: {"fixed": each.fixed * 1e6, "copy": each.copy * 1e6} for name, each in profile.host.items()},
        "slowdowns": profile.slowdowns,
        "errors": {name: error._asdict() for name, error in profile.errors.items()},
    }


def _print_tuning(tuning: Tuning, fields: dict[str, Any], output: Output) -> None:
    output.banner(fields["simulated"])
    if not fields["simulated"]:
        profile = tuning.profile
        slow = [(label, f"{value:.2f}") for label, value in profile.slowdowns.items()]
        output.table("slow-down of a matrix product concurrent with transfers", ("method", "times"), slow)
        errors = [
            (name, f"{100 * error.median:.1f}", f"{100 * error.worst:.1f}", error.transfers)
            for name, error in profile.errors.items()
        ]
        columns = ("copier", "median", "worst", "transfers")
        output.table("expected against measured, %, at sizes in between", columns, errors)
        host = [(name, f"{each.fixed * 1e6:.0f}", f"{each.copy * 1e6:.2f}") for name, each in profile.host.items()]
        output.table("us that a submission keeps its caller", ("copier", "fixed", "each copy"), host)
        links = ", ".join(f"{direction} {rate:.1f}" for direction, rate in fields["link_gb_per_s"].items())
        output.line(f"one contiguous copy, GB/s: {links}; {fields['device']}, link {fields['link']}")
        output.line(f"{tuning.transfers} transfers in {tuning.seconds:.1f} s")
    for name, reason in tuning.missing.items():
        output.line(f"not measured: {name}: {reason}")
    written = fields["written"]
    output.line(f"no profile written, {tuning.transfers} transfers timed" if written is None else f"wrote {written}")


# showing --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """The copy method for a transfer of `blocks` blocks of `planes` planes, its expected bandwidth, and the runner-up.

    Attributes:
        gb_per_s, runner_up_gb_per_s: None where nothing was measured.
        runner_up: None if there is no other copy method.
    """

    direction: str
    placement: str
    block_bytes: int
    blocks: int
    planes: int
    method: str
    gb_per_s: float | None
    runner_up: str | None
    runner_up_gb_per_s: float | None
    reason: str


def decisions(profile: Profile, available: frozenset[str], prefer: str, sm_limit: int) -> Iterator[Decision]:
    """Over directions, placements, bytes of a block and blocks."""
    for direction in Direction:
        for placement in _PLACEMENTS:
            for block_bytes in _BLOCK_BYTES:
                for blocks in _BLOCKS:
                    copies = blocks * _PLANES
                    operations = blocks if placement == "folded" else copies
                    shape = Shape(direction, blocks, copies, operations, copies, copies * block_bytes)
                    yield _decide(shape, placement, profile, available, prefer, sm_limit)


def _decide(
    shape: Shape, placement: str, profile: Profile, available: frozenset[str], prefer: str, sm_limit: int
) -> Decision:
    choice = choose(shape, available, profile, prefer, sm_limit)
    ranked = rank(shape, available, profile, prefer, sm_limit)
    second = next((each for each in ranked if each.method.label != choice.method.label), None)
    return Decision(
        direction=str(shape.direction),
        placement=placement,
        block_bytes=shape.nbytes // shape.plane_blocks,
        blocks=shape.blocks,
        planes=shape.plane_blocks // shape.blocks,
        method=choice.method.label,
        gb_per_s=_rate(shape, choice.seconds),
        runner_up=None if second is None else second.method.label,
        runner_up_gb_per_s=None if second is None else _rate(shape, second.seconds),
        reason=choice.reason,
    )


def _rate(shape: Shape, seconds: float) -> float | None:
    return None if seconds == inf else shape.nbytes / seconds / 1e9


def _show(device: Device, output: Output, prefer: str, sm_limit: int) -> None:
    profile = profile_for(device)
    missing = missing_copiers(device, sm_limit)
    not_offered = _INTERPRETED if device.simulated else ()
    available = frozenset(name for name, reason in missing.items() if reason is None and name not in not_offered)
    found = list(decisions(profile, available, prefer, sm_limit))
    fields = describe_device(device) | {"profile": profile.source, "prefer": prefer, "sm_limit": sm_limit}
    fields["not_available"] = {name: reason for name, reason in missing.items() if reason is not None}
    fields["not_offered"] = list(not_offered)
    output.result(fields | _figures(profile) | {"decisions": [asdict(each) for each in found]})
    output.banner(device.simulated)
    for direction in Direction:
        for placement in _PLACEMENTS:
            here = [each for each in found if (each.direction, each.placement) == (direction, placement)]
            _print_decisions(f"{direction}, {_PLANES} planes {placement}, prefer={prefer!r}", here, output)
    for name, reason in fields["not_available"].items():
        output.line(f"not available: {name}: {reason}")
    if not_offered:
        output.line("gather and split are kernels: on the simulated device they run when asked for, and are not chosen")
    output.line(
        "a cell: the chosen copy method and its expected GB/s, then the runner-up; gather and split with programs"
    )
    output.line(f"the figures are expectations, from this profile: {profile.source}")


def _print_decisions(title: str, found: list[Decision], output: Output) -> None:
    columns = ("block bytes", *(f"{blocks} block{'s' if blocks > 1 else ''}" for blocks in _BLOCKS))
    lines = [
        (f"{nbytes >> 10} KiB", *(_cell(each) for each in found if each.block_bytes == nbytes))
        for nbytes in _BLOCK_BYTES
    ]
    output.table(title, columns, lines)


def _cell(decision: Decision) -> str:
    text = f"{decision.method} {_number(decision.gb_per_s)}"
    if decision.runner_up is None:
        return text
    return f"{text} ({decision.runner_up} {_number(decision.runner_up_gb_per_s)})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"

"""The end of every benchmark: opens the device, prints and saves figures, counts verified transfers and wrong bytes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvoffload.terminal import figures
from kvoffload.terminal.console import CommandError, Output, as_json, open_backend, require_writable, write_whole
from kvoffload.terminal.machine import describe_device
from kvoffload.terminal.options import add_common_options, add_seed, whole
from kvoffload_bench import plots
from kvoffload_bench.harness import FULL, SMALL, Lab

_NAMES = (  # of the fields that say which transfer a record is of
    *["framework", "allocator", "model", "layout", "placement", "situation", "method", "copier", "back_to_back"],
    *["direction", "block_bytes", "row_bytes", "blocks_per_slot", "descriptors", "blocks", "copies", "parts", "cold"],
)


class Verified(NamedTuple):
    """A transfer whose bytes were compared, in all rounds together; `wrong` rows of them differed."""

    what: str
    wrong: int


def verified(fields: Mapping[str, Any]) -> Iterator[Verified]:
    """Each transfer in the records of a benchmark, counted once however often it was repeated."""
    lists = [value for value in fields.values() if isinstance(value, list)]
    for record in (each for records in lists for each in records if isinstance(each, dict) and "wrong" in each):
        name, wrong = (
            ", ".join(f"{key} {record[key]}" for key in _NAMES if record.get(key) is not None),
            record["wrong"],
        )
        if isinstance(wrong, dict):
            yield from (Verified(f"{name}: {scenario}", rows) for scenario, rows in wrong.items())
        else:
            yield Verified(name, wrong)


def verdict(fields: Mapping[str, Any]) -> str:
    """How many were verified, and how many were wrong: "120 transfers verified, 0 wrong"."""
    found = list(verified(fields))
    wrong = sum(each.wrong > 0 for each in found)
    rows = fields["wrong_rows"]
    if rows and not wrong:  # in contiguous copies, which have no record of their own
        return f"{len(found):,} transfers verified, WRONG BYTES in {rows:,} rows of other copies"
    return f"{len(found):,} transfers verified, {wrong:,} wrong" + (f" ({rows:,} rows of bytes)" if rows else "")


# the command ----------------------------------------------------------------------------------------------------------

Fields = dict[str, Any]
MOST_REPEATS = 1_000_000


def add_bench_options(parser: argparse.ArgumentParser, repeats: int, *, drawn: bool = True) -> None:
    """`repeats` is the default; `drawn`: whether plots.py draws this benchmark."""
    parser.add_argument(
        "--repeats", type=whole(1, MOST_REPEATS), metavar="N", help=f"timed rounds (default {repeats}; simulated 1)"
    )
    add_seed(parser, "bytes and places of blocks")
    use = ", for bench plot" if drawn else ""
    parser.add_argument("--save", type=Path, metavar="FILE", help=f"write all figures as JSON{use}")
    if drawn:
        parser.add_argument("--plot", metavar="FOLDER", help="draw figures as PNGs in FOLDER")
    add_common_options(parser)
    parser.set_defaults(default_repeats=repeats)
    if not drawn:
        parser.set_defaults(plot=None)


def conduct(
    arguments: argparse.Namespace,
    name: str,
    measure: Callable[[Lab, Output], Fields],
    show: Callable[[Fields, Output], None],
) -> int:
    """Measure, print, draw; 0 if every byte was right, else 1.

    Args:
        arguments: with the options of `add_bench_options`.
        measure: gives figures that JSON can hold, among them `wrong_rows`.
        show: prints a verdict and tables of them, if they were measured on a GPU.
    """
    output = Output(arguments.json, wide=getattr(arguments, "wide", False))
    if arguments.plot:
        figures.require()
    if arguments.save is not None:
        require_writable("--save", arguments.save)
    with open_backend(arguments, arguments.seed) as device:
        if arguments.plot and device.simulated:
            raise CommandError("--plot draws times, and the simulated device has none")
        if arguments.plot:
            figures.require_folder(arguments.plot)
        repeats = arguments.repeats or (1 if device.simulated else arguments.default_repeats)
        size = SMALL if device.simulated else FULL
        fields: Fields = {"benchmark": name, **describe_device(device), "repeats": repeats}
        with Lab(device, size, repeats=repeats, seed=arguments.seed) as lab:
            fields |= measure(lab, output)
    if arguments.save is not None:  # first: standard output may turn out to be full
        write_whole("--save", arguments.save, (as_json(fields) + "\n").encode())
    print_fields(fields, show, output)
    output.result(fields)
    if arguments.plot:
        with output.progress("drawing"):
            paths = list(plots.draw({"what was measured": fields}, arguments.plot))
        for path in paths:
            output.note(f"kvoffload: wrote {path}")
    return 1 if fields["wrong_rows"] else 0


def print_fields(fields: Fields, show: Callable[[Fields, Output], None], output: Output) -> None:
    """Print the verdict first, then the tables of `show` (from the simulated device the verdict alone), the wrong
    transfers, the methods that could not be measured, the ratios, the machine and the profile.
    """
    counts = verdict(fields)
    if fields["simulated"]:
        output.line(f"bench {fields['benchmark']}: {counts}; times need a GPU")
    else:
        show(fields, output)
        output.line("")
        output.line(counts)
    wrong = [each for each in verified(fields) if each.wrong]
    if wrong:
        output.table("wrong bytes", ("transfer", "rows"), wrong)
    for name, reason in fields.get("not_run", {}).items():
        output.line(f"not run: {name}: {reason}")
    for each in fields.get("ratios", []):
        output.line(f"{each['ratio']}: {each['which']} {each['value']:.2f} ({each['at']})")
    if not fields["simulated"]:
        output.line(f"{fields['device']}, driver {fields['driver']}, bindings {fields['bindings']}, {fields['link']}")
        if "profile" in fields:
            output.line(f"profile: {fields['profile']}")


def fixed(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

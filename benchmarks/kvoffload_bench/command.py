"""`kvoffload bench`: the parsers of all benchmarks, and `bench plot`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvoffload.terminal import figures
from kvoffload.terminal.console import CommandError, write_out
from kvoffload.terminal.options import add_command
from kvoffload_bench import cache_bookkeeping as bookkeeping
from kvoffload_bench import disk, field, fleet, growth, interop, plots, pool, remote, sharded, submit, transfer, vllm
from kvoffload_bench import layer_groups as parts
from kvoffload_bench import session_files as sessions

_FOLDER = "figures"
_WRITTEN = "`kvoffload bench field --save FILE` writes a result, on a GPU; so does sweep"


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands, "bench", "compare copy methods, with and without concurrent computation",
        "Measures transfers and what they cost, or draws saved results. Without a GPU the bytes are verified, and "
        "nothing is timed.",
        example="bench field --quick", usage="BENCHMARK [options]",
    )  # fmt: skip
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", prog="kvoffload bench")
    benchmarks = (
        *(transfer, field, sharded, parts, interop, vllm, submit),
        *(bookkeeping, pool, growth, disk, sessions, remote, fleet),
    )
    for bench in benchmarks:
        bench.add_parser(benches)
    plot = add_command(
        benches, "plot", "figures of saved results",
        "Draws the figures of results that were saved with --save, on this or another machine, as PNGs.",
        example="bench plot field.json --output figures", usage="FILE [FILE ...] [--output FOLDER]",
    )  # fmt: skip
    plot.add_argument("results", nargs="+", metavar="FILE", help="of bench sweep or field")
    plot.add_argument("--output", default=_FOLDER, metavar="FOLDER", help=f"where to write them (default {_FOLDER})")
    plot.set_defaults(run=run_plot)
    parser.set_defaults(run=lambda _: parser.print_help())


def run_plot(arguments: argparse.Namespace) -> int:
    """Draw results, one of a benchmark: the figures of a second would replace those of the first."""
    found: dict[str, dict[str, Any]] = {}
    files: dict[str, str] = {}
    for name in arguments.results:
        fields = _read(name)
        kind = fields["benchmark"]
        if kind in files:
            raise CommandError(
                f"{files[kind]} and {name} are both results of `bench {kind}`: draw each into a folder of its own"
            )
        found[name], files[kind] = fields, name
    figures.require()
    for path in plots.draw(found, arguments.output):
        write_out(f"{path}\n")
    return 0


def _read(name: str) -> dict[str, Any]:
    try:
        fields = json.loads(Path(name).read_text())
    except OSError as error:
        raise CommandError(f"cannot read {name}: {error.strerror or error}; {_WRITTEN}") from error
    except ValueError as error:
        raise CommandError(f"{name} cannot be read as JSON ({error}); {_WRITTEN}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("benchmark"), str):
        raise CommandError(f"{name} is no result of a benchmark; {_WRITTEN}")
    if fields.get("simulated"):
        raise CommandError(f"{name} comes from the simulated device, which has no times to draw; {_WRITTEN}")
    return fields

"""`kvoffload bench transfer`: every way of copying, over the geometries of models, against the contiguous copy."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvoffload.bench.frameworks import measure_frameworks
from kvoffload.bench.lab import Lab
from kvoffload.bench.latency import (
    measure_descriptors,
    measure_latency,
    other_ratios,
    print_descriptors,
    print_latencies,
)
from kvoffload.bench.measurements import Measurement, Measurer, describe, wrong_rows
from kvoffload.bench.report import Fields, add_bench_options, conduct
from kvoffload.bench.setup import Placement, TransferSetup
from kvoffload.bench.summary import ratios
from kvoffload.bench.tables import chosen_methods, direction_text, figures, headings, scenarios_of, what
from kvoffload.errors import KVOffloadError
from kvoffload.internal.models import MODELS, ModelGeometry
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Advance, Output, models, numbers
from kvoffload.tuning import CopyMethod

_METHODS = (CopyMethod("gather", 4, 1.0), CopyMethod("split", 2), CopyMethod("split", 1))
_DESCRIPTION = """\
Copy random, non-adjacent blocks between planes and random slots of the pinned pool, in both directions and in every
way: by the engine's choice (prefer "overlap" and "latency"), by each of its copiers ("gather 4": with 4 programs),
and by what others do: "bare strided", the same operations built once and given to cuMemcpy3DBatchAsync; "flat batch",
one cuMemcpyBatchAsync on an idle stream; "copy loop", cuMemcpyAsync; "grid-stride 12", a kernel of 12 programs of 4
warps, three address arrays copied to the GPU at each call, from ordinary or from pinned memory; "contiguous copy", one
contiguous pinned copy of 256 MiB. All of a line use the same addresses, in interleaved rounds; figures are medians on
the GPU clock. Targets are poisoned before, and all bytes verified after, every timed transfer; just before it, the
same way moves a few blocks elsewhere, as a CPU that has just compared 32 MiB has cold caches. Of models with two
groups a transfer is two jobs, timed from before the first call on. Planes are folded (in one slab), scattered (an
allocation each) or interleaved (blocks, planes, ...). Then: loads of 4096 descriptors through the batch copier and as
one flat batch; how long store() and load() take on the host, and how long until poll() gives out the result; and at
last CuPy (indexing and get/set, pinned) and JAX (gather and device_put, by wall clock), where they are installed, on
arrays of their own.
On the simulated device: small sizes, verified, and no times."""


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        models, blocks_per_slot, placements: geometries, adjacent blocks in a slot, and where planes lie.
        blocks: of a transfer; None for 32 MiB.
    """

    models: list[ModelGeometry]
    blocks_per_slot: list[int]
    placements: list[Placement]
    blocks: list[int] | None

    def setups(self, scale: float) -> list[tuple[ModelGeometry, Placement, int, int | None]]:
        counts: list[int | None] = [None] if self.blocks is None else [*self.blocks]
        return [
            (model.scaled(scale), placement, blocks_per_slot, count)
            for model in self.models
            for placement in self.placements
            for blocks_per_slot in (self.blocks_per_slot if placement is not Placement.INTERLEAVED else [1])
            for count in counts
        ]


def add_parser(benches: Any) -> None:
    parser = benches.add_parser("transfer", help="every way of copying, per geometry", description=_DESCRIPTION)
    parser.add_argument(
        "--model",
        type=models,
        nargs="+",
        default=[list(MODELS.values())],
        metavar="NAME",
        help=f"geometries, or all (the default): {', '.join(MODELS)}",
    )
    parser.add_argument("--blocks", type=numbers, metavar="N,...", help="blocks of a transfer (default: 32 MiB)")
    parser.add_argument(
        "--rows", type=numbers, default=[1, 8], metavar="N,...", help="adjacent blocks in a slot (default 1,8)"
    )
    parser.add_argument(
        "--planes",
        type=Placement,
        nargs="+",
        choices=list(Placement),
        default=list(Placement),
        help="where planes lie (default: all)",
    )
    parser.add_argument("--no-frameworks", action="store_true", help="leave CuPy and JAX out")
    add_bench_options(parser, 5)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    chosen = [model for group in arguments.model for model in group]
    plan = Plan(chosen, arguments.rows, arguments.planes, arguments.blocks)

    def measure(lab: Lab, output: Output) -> Fields:
        fields = _measure(plan, lab, output)
        if not arguments.no_frameworks and not lab.device.simulated:
            _add_frameworks(fields, chosen, lab, output)
        return fields

    return conduct(arguments, "transfer", measure, _show)


def _measure(plan: Plan, lab: Lab, output: Output) -> Fields:
    measurer = Measurer(_METHODS)
    with output.progress("geometries") as progress:
        rows = list(_rows(plan, lab, measurer, progress))
    descriptors, latencies = measure_descriptors(lab), measure_latency(lab)
    wrong = wrong_rows(rows) + sum(sum(row["wrong"].values()) for row in descriptors)
    return {
        "transfers": describe(rows),
        "descriptors": descriptors,
        "latencies": latencies,
        "ratios": ratios(rows) + other_ratios(descriptors, latencies),
        "not_run": measurer.not_run,
        "profile": measurer.profile,
        "wrong_rows": wrong + sum(each["wrong"] for each in latencies),
    }


def _rows(plan: Plan, lab: Lab, measurer: Measurer, progress: Advance) -> Iterator[Measurement]:
    setups = plan.setups(lab.size.scale)
    for number, (model, placement, blocks_per_slot, count) in enumerate(setups, start=1):
        with (
            TransferSetup(lab, model, placement=placement, blocks_per_slot=blocks_per_slot, count=count) as setup,
            measurer.on(setup) as one,
        ):
            for direction in Direction:
                yield one(direction, len(setup.groups[0].slots))
        progress(number, len(setups))


def _add_frameworks(fields: Fields, models: Sequence[ModelGeometry], lab: Lab, output: Output) -> None:
    try:
        with output.progress("frameworks") as progress:
            rows, missing = measure_frameworks(lab, models, progress)
    except KVOffloadError:
        raise
    except Exception as error:  # other people's code, after minutes of measuring that must not be lost
        fields["not_run"]["frameworks"] = f"{type(error).__name__}: {error}"
        return
    fields["frameworks"] = describe(rows)
    fields["not_run"] |= missing
    fields["wrong_rows"] += wrong_rows(rows)


# tables ---------------------------------------------------------------------------------------------------------------


def _show(fields: Fields, output: Output) -> None:
    for direction in Direction:
        for placement in dict.fromkeys(row["placement"] for row in fields["transfers"]):
            kind = direction, placement
            rows = [row for row in fields["transfers"] if (row["direction"], row["placement"]) == kind]
            _show_rows(f"{direction} ({direction_text(direction)}), {placement}", rows, fields["simulated"], output)
    if fields.get("frameworks"):
        _show_rows("beside frameworks, on arrays of their own", fields["frameworks"], fields["simulated"], output)
    print_descriptors(fields, output)
    print_latencies(fields, output)


def _show_rows(title: str, rows: Sequence[Mapping[str, Any]], simulated: bool, output: Output) -> None:
    scenarios = scenarios_of(rows)
    columns = ("model", "planes x bytes", "rows of", "blocks", *headings(scenarios), "chosen_methods")
    lines = []
    for row in rows:
        line = [row["model"], f"{row['planes']} x {row['block_bytes']}", row["blocks_per_slot"]]
        lines.append([*line, row["blocks"], *figures(row, scenarios, simulated), chosen_methods(row)])
    output.table(f"{title}, {what(simulated)}", columns, lines)

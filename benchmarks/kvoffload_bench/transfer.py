"""`kvoffload bench transfer`: every copy method, for the geometries of models, against the contiguous copy."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvoffload.errors import KVOffloadError
from kvoffload.internal.models import MODELS, ModelGeometry
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Advance, Output
from kvoffload.terminal.options import COMMON, add_command, add_wide, models, numbers, one_of
from kvoffload.tuning import CopyMethod
from kvoffload_bench.frameworks import measure_frameworks
from kvoffload_bench.lab import Lab
from kvoffload_bench.latency import (
    measure_descriptors,
    measure_latency,
    other_ratios,
    print_descriptors,
    print_latencies,
)
from kvoffload_bench.measurements import Measurement, Measurer, describe, wrong_rows
from kvoffload_bench.report import Fields, add_bench_options, conduct
from kvoffload_bench.setup import Placement, TransferSetup
from kvoffload_bench.summary import ratios
from kvoffload_bench.tables import (
    choice_verdict,
    chosen_methods,
    direction_text,
    figures,
    headings,
    scenarios_of,
    show_choice,
    show_methods,
)

_METHODS = (CopyMethod("gather", 4, 1.0), CopyMethod("split", 2), CopyMethod("split", 1))
_TEXT = """\
Times every copy method for the geometries of models, in both directions, on random blocks and slots. Medians on the \
GPU clock; every byte is verified."""


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        models, blocks_per_slot, placements: geometries, adjacent blocks in a slot, and where planes lie.
        blocks: blocks of a transfer; None for 32 MiB.
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
            for blocks_per_slot in self.blocks_per_slot
            for count in counts
        ]


def add_parser(benches: Any) -> None:
    parser = add_command(
        benches,
        "transfer",
        "every copy method, by model",
        _TEXT,
        example="bench transfer --model llama-3.1-8b --blocks-per-slot 1",
        common=COMMON,
    )
    parser.add_argument(
        "--model",
        type=models,
        nargs="+",
        default=[list(MODELS.values())],
        metavar="NAME",
        help="geometries (default all)",
    )
    parser.add_argument("--blocks", type=numbers, metavar="N,...", help="blocks of a transfer (default 32 MiB)")
    parser.add_argument(
        "--blocks-per-slot", type=numbers, default=[1, 8], metavar="N,...", help="adjacent blocks (default 1,8)"
    )
    parser.add_argument(
        "--planes",
        type=one_of(*Placement),
        nargs="+",
        default=list(Placement),
        metavar="NAME",
        help=f"default all: {', '.join(Placement)}",
    )
    parser.add_argument("--no-frameworks", action="store_true", help="leave CuPy and JAX out")
    add_wide(parser, "a column for each method")
    add_bench_options(parser, 5)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    chosen = [model for group in arguments.model for model in group]
    plan = Plan(chosen, arguments.blocks_per_slot, arguments.planes, arguments.blocks)

    def measure(lab: Lab, output: Output) -> Fields:
        fields = _measure(plan, lab, output)
        if not arguments.no_frameworks and not lab.device.simulated:
            _add_frameworks(fields, chosen, lab, output)
        return fields

    return conduct(arguments, "transfer", measure, _show)


def _measure(plan: Plan, lab: Lab, output: Output) -> Fields:
    measurer = Measurer(_METHODS)
    with output.progress("geometries") as progress:
        records = list(_records(plan, lab, measurer, progress))
    with output.progress("batches and latencies"):
        descriptors, latencies = measure_descriptors(lab), measure_latency(lab)
    wrong = wrong_rows(records) + sum(sum(record["wrong"].values()) for record in descriptors)
    return {
        "transfers": describe(records),
        "descriptors": descriptors,
        "latencies": latencies,
        "ratios": ratios(records) + other_ratios(descriptors, latencies),
        "not_run": measurer.not_run,
        "profile": measurer.profile,
        "wrong_rows": wrong + sum(each["wrong"] for each in latencies),
    }


def _records(plan: Plan, lab: Lab, measurer: Measurer, progress: Advance) -> Iterator[Measurement]:
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
            records, missing = measure_frameworks(lab, models, progress)
    except KVOffloadError:
        raise
    except Exception as error:  # other people's code, after minutes of measuring that must not be lost
        fields["not_run"]["frameworks"] = f"{type(error).__name__}: {error}"
        return
    fields["frameworks"] = describe(records)
    fields["not_run"] |= missing
    fields["wrong_rows"] += wrong_rows(records)


# tables ---------------------------------------------------------------------------------------------------------------


def _show(fields: Fields, output: Output) -> None:
    records = fields["transfers"]
    output.line(choice_verdict("transfer", records))
    for placement in dict.fromkeys(record["placement"] for record in records):
        here = [record for record in records if record["placement"] == placement]
        show_choice(f"planes {placement}", ("model", "blocks a slot", "blocks"), _label, here, output)
        show_methods(f"planes {placement}", here, output)
        if output.wide:
            for direction in Direction:
                of_it = [record for record in here if record["direction"] == direction]
                _show_records(f"{direction} ({direction_text(direction)}), {placement}", of_it, output)
    if fields.get("frameworks"):
        show_methods("frameworks, on arrays of their own", fields["frameworks"], output)
        if output.wide:
            _show_records("frameworks, on arrays of their own", fields["frameworks"], output)
    print_descriptors(fields, output)
    print_latencies(fields, output)


def _label(record: Mapping[str, Any]) -> tuple[object, ...]:
    return record["model"], record["blocks_per_slot"], record["blocks"]


def _show_records(title: str, records: Sequence[Mapping[str, Any]], output: Output) -> None:
    """With a column for each copy method."""
    scenarios = scenarios_of(records)
    columns = ("model", "planes x bytes", "blocks per slot", "blocks", *headings(scenarios), "overlap / latency by")
    lines = []
    for record in records:
        line = [record["model"], f"{record['planes']} x {record['block_bytes']}", record["blocks_per_slot"]]
        lines.append([*line, record["blocks"], *figures(record, scenarios), chosen_methods(record)])
    output.table(f"{title}: GB/s on the GPU clock", columns, lines, left=columns[-1:])

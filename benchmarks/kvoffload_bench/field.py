"""`kvoffload bench field`: transfers concurrent with computation, and in both directions at once."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvoffload.internal.models import ModelGeometry, find_model
from kvoffload.layout.coding import CODECS, CodecName
from kvoffload.terminal.console import Output
from kvoffload.terminal.options import COMMON, add_command, models, numbers, size, whole
from kvoffload_bench import field_report
from kvoffload_bench.field_compute import Situation
from kvoffload_bench.field_methods import ContiguousSeries, FieldMethods, FieldSetup, series_size
from kvoffload_bench.harness import Lab
from kvoffload_bench.report import Fields, add_bench_options, conduct
from kvoffload_bench.series import DIRECTIONS, Directions, SeriesRun
from kvoffload_bench.setup import Placement

_Value = TypeVar("_Value")

LAYOUTS = {
    "block-major": Placement.INTERLEAVED,
    "plane-major": Placement.FOLDED,
    "scattered": Placement.SCATTERED,
}
_MODELS = ("llama-3.1-8b", "deepseek-v3-mla", "gpt-oss-120b-tp2", "qwen2.5-0.5b")
_QUICK_MODELS = ("llama-3.1-8b", "qwen2.5-0.5b")
_SIMULATED_MODELS = ("qwen2.5-0.5b",)  # kernels are interpreted there, slowly
_SIMULATED_CODED_MODELS = ("llama-3.1-8b",)  # the scaled blocks of the other are too small
_QUICK_LAYOUTS = ("block-major", "plane-major")
_QUICK_SITUATIONS = (Situation.IDLE, Situation.LARGE)
_BYTES, _MOST_BYTES = 64 << 20, 4 << 30  # of a transfer
_MOST_BLOCKS = 512
_MOST_TRANSFERS = 64
_REPEATS = 3
_SECONDS, _QUICK_SECONDS = 270.0, 40.0  # without --repeats
_SIMULATED_TRANSFERS = 2
_SIMULATED_BLOCKS = 2
_TEXT = """\
Times transfers while the GPU computes and while copies move in the other direction, by the engine's choice and every \
method. Takes 5 minutes."""


@dataclass(frozen=True)
class Plan:
    """What to measure. Transfers have `blocks` blocks, or at least `nbytes` bytes where that is None."""

    models: list[ModelGeometry]
    layouts: list[str]
    situations: list[Situation]
    directions: list[Directions]
    blocks: list[int] | None
    nbytes: int | None
    transfers: int | None
    seconds: float | None
    codec: CodecName

    @property
    def groups(self) -> int:
        """How many sizes and layouts there are: the situations and directions of each are measured in turn."""
        return len(self.models) * len(self.blocks or (None,)) * len(self.layouts)


def add_parser(benches: Any) -> None:
    example, text = "bench field --quick --model llama-3.1-8b", "transfers concurrent with computation, both directions"
    parser = add_command(benches, "field", text, _TEXT, example=example, common=COMMON)
    add = parser.add_argument
    add("--model", type=models, nargs="+", metavar="NAME", help="geometries, or all (default: four)")
    for name, values in (
        ("--layouts", tuple(LAYOUTS)),
        ("--situations", tuple(map(str, Situation))),
        ("--directions", tuple(DIRECTIONS)),
    ):
        add(name, nargs="+", choices=values, metavar="NAME", help=", ".join(values))
    blocks, most = partial(numbers, maximum=_MOST_BLOCKS), whole(1, _MOST_TRANSFERS)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--bytes", type=size_of, metavar="N", help="of a transfer, such as 4MiB (default 64MiB)")
    extent.add_argument("--blocks", type=blocks, metavar="N,...", help=f"of a transfer, 1 to {_MOST_BLOCKS}")
    add("--transfers", type=most, metavar="N", help="of a series (default: 256 MiB of them)")
    add("--codec", choices=CODECS, default="raw", metavar="NAME", help="also pack with a codec: bf16-12")
    add("--quick", action="store_true", help="fewer geometries, layouts and situations")
    add_bench_options(parser, _REPEATS)
    parser.set_defaults(run=run)


def size_of(text: str) -> int:
    """An argparse type: bytes of a transfer."""
    return whole(1, _MOST_BYTES)(str(size(text)))


def plan_of(arguments: argparse.Namespace, *, simulated: bool) -> Plan:
    """What the options ask for."""
    quick = arguments.quick
    seconds = None if arguments.repeats else _QUICK_SECONDS if quick else _SECONDS
    of_simulated = _SIMULATED_MODELS if arguments.codec == "raw" else _SIMULATED_CODED_MODELS
    names = of_simulated if simulated else _QUICK_MODELS if quick else _MODELS
    named = arguments.model or [[find_model(name) for name in names]]
    situations = arguments.situations or (_QUICK_SITUATIONS if quick or simulated else Situation)
    return Plan(
        _each_once(model for group in named for model in group),
        _each_once(arguments.layouts or (_QUICK_LAYOUTS if quick else LAYOUTS)),
        _each_once(map(Situation, situations)),
        _each_once(arguments.directions or DIRECTIONS),
        arguments.blocks and _each_once(arguments.blocks),
        arguments.bytes,
        arguments.transfers,
        seconds,
        arguments.codec,
    )


def _each_once(values: Iterable[_Value]) -> list[_Value]:
    return list(dict.fromkeys(values))


def run(arguments: argparse.Namespace) -> int:
    def measure(lab: Lab, output: Output) -> Fields:
        return _measure(plan_of(arguments, simulated=lab.device.simulated), lab, output)

    return conduct(arguments, "field", measure, field_report.show)


def _measure(plan: Plan, lab: Lab, output: Output) -> Fields:
    with (
        output.progress("places") as progress,
        SeriesRun(
            lab,
            plan.situations,
            plan.directions,
            groups=plan.groups,
            seconds=plan.seconds,
            progress=progress,
            spare=True,
        ) as series,
    ):
        fields: Fields = {"cells": [], "not_run": dict(series.not_run), "profile": ""}
        for model in (each.scaled(lab.size.scale) for each in plan.models):
            for blocks in plan.blocks or (None,):
                transfers = plan.transfers
                if lab.device.simulated:
                    transfers = transfers or _SIMULATED_TRANSFERS
                    blocks = blocks or (None if plan.nbytes else _SIMULATED_BLOCKS)
                size = series_size(model, blocks, plan.nbytes or _BYTES, transfers)
                with ContiguousSeries(lab, size) as contiguous:
                    for layout in plan.layouts:
                        _add_cells(fields, series, layout, model, contiguous, plan.codec)
    cells = fields["cells"]
    fields["wrong_rows"] = sum(cell["wrong"] for cell in cells)
    if not lab.device.simulated:
        comparisons = field_report.compare(cells)
        fields |= {"comparisons": comparisons, "worst": field_report.worst(comparisons)}
        fields["wall_seconds"] = series.elapsed
        fields["repeats"] = min(cell["rounds"] for cell in cells)
    return fields


def _add_cells(
    fields: Fields, series: SeriesRun, layout: str, model: ModelGeometry, contiguous: ContiguousSeries, codec: CodecName
) -> None:
    """Measure one layout of a model; what cannot be measured is named."""
    with (
        FieldSetup(series.lab, model, LAYOUTS[layout], contiguous.size) as field,
        closing(FieldMethods(field, contiguous, codec)) as methods,
    ):
        setup = field.setup
        fields["profile"] = setup.engine.profile.source
        dimensions = {
            "model": setup.model,
            "layout": layout,
            "blocks": field.size.slots * len(setup.groups),
            "planes": setup.plane_count,
            "block_bytes": setup.block_bytes,
            "groups": len(setup.groups),
            "row_bytes": setup.row_bytes,
        }
        fields["cells"] += series.cells(methods.of, field.size.transfers, dimensions)
        fields["not_run"] |= methods.not_run

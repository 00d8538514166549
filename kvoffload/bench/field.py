"""`kvoffload bench field`: transfers concurrent with computation, and in both directions at once."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, TypeVar

from kvoffload import kernels
from kvoffload.bench import field_report
from kvoffload.bench.field_compute import ConcurrentCompute, Situation
from kvoffload.bench.field_measure import DIRECTIONS, Directions, FieldMeasurer
from kvoffload.bench.field_methods import FieldMethods
from kvoffload.bench.field_setup import FieldSetup, SeriesSize, contiguous_series, series_size
from kvoffload.bench.lab import Lab
from kvoffload.bench.report import Fields, add_bench_options, conduct
from kvoffload.bench.setup import Placement
from kvoffload.copiers.selection import PREFERENCES
from kvoffload.engine.shard import Prefer
from kvoffload.errors import CapabilityError
from kvoffload.internal.models import ModelGeometry, find_model
from kvoffload.terminal.console import Advance, Output
from kvoffload.terminal.options import COMMON, add_command, models, numbers, whole

_Value = TypeVar("_Value")

LAYOUTS = {
    "block-major": Placement.INTERLEAVED,
    "plane-major": Placement.FOLDED,
    "scattered": Placement.SCATTERED,
}
_MODELS = ("llama-3.1-8b", "deepseek-v3-mla", "gpt-oss-120b-tp2", "qwen2.5-0.5b")
_QUICK_MODELS = ("llama-3.1-8b", "qwen2.5-0.5b")
_SIMULATED_MODELS = ("qwen2.5-0.5b",)  # kernels are interpreted there, slowly
_QUICK_LAYOUTS = ("block-major", "plane-major")
_QUICK_SITUATIONS = (Situation.IDLE, Situation.LARGE)
_BYTES = 64 << 20
_MOST_BYTES = 1 << 30
_MOST_BLOCKS = 512
_MOST_TRANSFERS = 64
_REPEATS = 3
_HURRIED = 1
_SECONDS, _QUICK_SECONDS = 270.0, 40.0  # without --repeats
_SIMULATED_TRANSFERS = 2
_SIMULATED_BLOCKS = 2
_TEXT = """\
Times transfers while the GPU computes and while copies move in the other direction, by the engine's choice and every \
method. Takes 5 minutes."""


@dataclass(frozen=True)
class Plan:
    """What is measured; `blocks` None: transfers of `nbytes`."""

    models: list[ModelGeometry]
    layouts: list[str]
    situations: list[Situation]
    directions: list[Directions]
    blocks: list[int] | None
    nbytes: int
    transfers: int | None
    prefer: Prefer
    shipped: bool
    seconds: float | None

    def places(self, situations: int) -> int:
        """How many groups of interleaved rounds there are, with so many situations that can be had."""
        return len(self.models) * len(self.blocks or (None,)) * len(self.layouts) * situations * len(self.directions)


def repeats_now(repeats: int, seconds: float | None, elapsed: float, done: int, places: int) -> int:
    """Rounds for the next place: fewer while the run is behind a schedule of `seconds`; None: no schedule."""
    behind = seconds is not None and elapsed * places > seconds * done
    return min(repeats, _HURRIED) if behind and done else repeats


def add_parser(benches: Any) -> None:
    parser = add_command(
        benches,
        "field",
        "transfers concurrent with computation, both directions",
        _TEXT,
        example="bench field --quick --model llama-3.1-8b",
        common=COMMON,
    )
    parser.add_argument("--model", type=models, nargs="+", metavar="NAME", help="geometries, or all (default: four)")
    _add_choices(parser, "--layouts", tuple(LAYOUTS))
    _add_choices(parser, "--situations", tuple(map(str, Situation)))
    _add_choices(parser, "--directions", tuple(DIRECTIONS))
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--blocks", type=_blocks, metavar="N,...", help=f"blocks of a transfer, 1 to {_MOST_BLOCKS}")
    size.add_argument(
        "--bytes", type=whole(1, _MOST_BYTES), metavar="N", help=f"bytes of a transfer (default {_BYTES})"
    )
    parser.add_argument(
        "--transfers", type=whole(1, _MOST_TRANSFERS), metavar="N", help="of a series (default: 256 MiB of them)"
    )
    parser.add_argument(
        "--prefer", choices=PREFERENCES, default=PREFERENCES[0], metavar="NAME", help=" or ".join(PREFERENCES)
    )
    parser.add_argument("--shipped", action="store_true", help="also the choice by the default profile")
    parser.add_argument("--quick", action="store_true", help="fewer geometries, layouts and situations")
    add_bench_options(parser, _REPEATS)
    parser.set_defaults(run=run)


def _add_choices(parser: argparse.ArgumentParser, name: str, values: tuple[str, ...]) -> None:
    parser.add_argument(name, nargs="+", choices=values, metavar="NAME", help=", ".join(values))


def _blocks(text: str) -> list[int]:
    """An argparse type: comma-separated numbers of blocks."""
    return numbers(text, _MOST_BLOCKS)


def plan_of(arguments: argparse.Namespace, *, simulated: bool) -> Plan:
    """What the options ask for."""
    quick = arguments.quick
    seconds = None if arguments.repeats else _QUICK_SECONDS if quick else _SECONDS
    names = _SIMULATED_MODELS if simulated else _QUICK_MODELS if quick else _MODELS
    named = arguments.model or [[find_model(name) for name in names]]
    situations = arguments.situations or (_QUICK_SITUATIONS if quick or simulated else Situation)
    return Plan(
        _each_once(model for group in named for model in group),
        _each_once(arguments.layouts or (_QUICK_LAYOUTS if quick else LAYOUTS)),
        _each_once(map(Situation, situations)),
        _each_once(arguments.directions or DIRECTIONS),
        arguments.blocks and _each_once(arguments.blocks),
        arguments.bytes or _BYTES,
        arguments.transfers,
        arguments.prefer,
        arguments.shipped,
        seconds,
    )


def _each_once(values: Iterable[_Value]) -> list[_Value]:
    return list(dict.fromkeys(values))


def run(arguments: argparse.Namespace) -> int:
    def measure(lab: Lab, output: Output) -> Fields:
        return _measure(plan_of(arguments, simulated=lab.device.simulated), lab, output)

    return conduct(arguments, "field", measure, field_report.show)


def _measure(plan: Plan, lab: Lab, output: Output) -> Fields:
    with output.progress("places") as progress, _FieldRun(plan, lab, progress) as field_run:
        cells = list(field_run.cells())
    fields: Fields = {
        "cells": cells,
        "not_run": field_run.not_run,
        "profile": field_run.profile,
        "prefer": plan.prefer,
        "wrong_rows": sum(cell["wrong"] for cell in cells),
    }
    if not lab.device.simulated:
        comparisons = field_report.compare(cells)
        fields |= {"comparisons": comparisons, "summary": field_report.summarize(comparisons)}
        fields |= {"worst": field_report.worst(comparisons), "wall_seconds": field_run.elapsed}
        fields["against_shipped"] = field_report.against_shipped(comparisons)
        fields["repeats"] = min(cell["rounds"] for cell in cells)
    return fields


class _FieldRun:
    """One run of the benchmark. A context manager, which keeps the computations."""

    def __init__(self, plan: Plan, lab: Lab, progress: Advance) -> None:
        self._plan, self._lab, self._progress = plan, lab, progress
        self._begin, self._done = time.perf_counter(), 0
        self.not_run: dict[str, str] = {}
        self.profile = ""
        self._computes: dict[Situation, ConcurrentCompute | None] = {}
        with ExitStack() as undo:
            for situation in plan.situations:
                if situation is Situation.IDLE:
                    self._computes[situation] = None
                else:
                    self._add_compute(situation, undo)
            self._undo = undo.pop_all()

    def _add_compute(self, situation: Situation, undo: ExitStack) -> None:
        """A computation, or in `not_run` why there is none."""
        reason = kernels.why_not(self._lab.device.capabilities)
        if reason is None:
            try:
                compute = self._computes[situation] = ConcurrentCompute(self._lab, situation)
                undo.callback(compute.close)
            except CapabilityError as error:
                reason = str(error)
        if reason is not None:
            self.not_run[situation] = reason

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._begin

    def cells(self) -> Iterator[dict[str, Any]]:
        """Every cell, in the order in which they are measured."""
        plan, lab = self._plan, self._lab
        for model in (each.scaled(lab.size.scale) for each in plan.models):
            for blocks in plan.blocks or (None,):
                size = self._size(model, blocks)
                with contiguous_series(lab, size) as contiguous:
                    for layout in plan.layouts:
                        with (
                            FieldSetup(lab, model, LAYOUTS[layout], size) as setup,
                            closing(FieldMethods(setup, contiguous, plan.prefer, shipped=plan.shipped)) as methods,
                        ):
                            self.profile = setup.setup.engine.profile.source
                            yield from self._of_setup(FieldMeasurer(setup, contiguous, methods, layout))
                            self.not_run |= methods.not_run

    def _size(self, model: ModelGeometry, blocks: int | None) -> SeriesSize:
        if self._lab.device.simulated:
            transfers = self._plan.transfers or _SIMULATED_TRANSFERS
            return series_size(model, blocks or _SIMULATED_BLOCKS, 0, transfers)
        return series_size(model, blocks, self._plan.nbytes, self._plan.transfers)

    def _of_setup(self, measurer: FieldMeasurer) -> Iterator[dict[str, Any]]:
        plan = self._plan
        places = plan.places(len(self._computes))
        for situation, compute in self._computes.items():
            for directions in plan.directions:
                repeats = repeats_now(self._lab.repeats, plan.seconds, self.elapsed, self._done, places)
                yield from measurer.cells(situation, directions, compute, repeats)
                self._done += 1
                self._progress(self._done, places)

    def __enter__(self) -> _FieldRun:
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

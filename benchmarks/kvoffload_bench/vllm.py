"""`kvoffload bench vllm`: this library and vLLM's own workers on the same GPU memory, and the scheduler's calls."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from kvoffload.errors import CapabilityError
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Advance, CommandError, Output
from kvoffload.terminal.options import COMMON, add_command, numbers
from kvoffload_bench import vllm_classes, vllm_report
from kvoffload_bench.field_compute import ConcurrentCompute, Situation
from kvoffload_bench.harness import Lab
from kvoffload_bench.report import Fields, add_bench_options, conduct
from kvoffload_bench.series import DIRECTIONS, Directions, SeriesRun, Submitter
from kvoffload_bench.vllm_classes import TransferClasses
from kvoffload_bench.vllm_methods import Geometry, TensorSetup, VllmMethods, series_of

GEOMETRIES = {
    each.name: each for each in (Geometry(32, 65536), Geometry(64, 32768), Geometry(160, 8192), Geometry(61, 18432))
}
BLOCKS = [4, 32, 256]
SITUATIONS = (Situation.IDLE, Situation.LARGE, Situation.SMALL)
ALLOCATORS = ("default", "expandable-segments")
PARTS = ("transfers", "scheduler")
_MOST_BLOCKS = 512
_REPEATS = 5
_SECONDS = 90.0  # of the cells, without --repeats
_SCHEDULER_REPEATS = 200
_LONGEST_SECONDS = 30.0  # of a transfer; a thread of vLLM's that has failed never ends one
_TEXT = """\
Times this library and vLLM's CPUOffloadingWorker and DmaCopyBackend on the same GPU memory, and the calls of vLLM's \
scheduler. Needs vLLM 0.33 (its Python files suffice) and PyTorch. Takes 2 minutes."""


def add_parser(benches: Any) -> None:
    example = "bench vllm --geometries 32x64K --blocks 4,32"
    text = "this library and vLLM's own workers, on the same memory"
    parser = add_command(benches, "vllm", text, _TEXT, example=example, common=COMMON)
    add = parser.add_argument
    blocks = partial(numbers, maximum=_MOST_BLOCKS)
    add("--blocks", type=blocks, default=BLOCKS, metavar="N,...", help="of a transfer (4,32,256)")
    for name, values in (
        ("--geometries", tuple(GEOMETRIES)),
        ("--directions", tuple(DIRECTIONS)),
        ("--situations", tuple(map(str, SITUATIONS))),
        ("--parts", PARTS),
    ):
        add(name, nargs="+", choices=values, default=list(values), metavar="NAME", help=", ".join(values))
    add_bench_options(parser, _REPEATS, drawn=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 0 if every byte was right, else 1. The calls of the scheduler have times on every machine."""
    try:
        vllm_classes.version()
    except CapabilityError as error:
        raise CommandError(str(error)) from error
    measured: Fields = {}

    def measure(lab: Lab, output: Output) -> Fields:
        measured.update(_measure(arguments, lab, output), simulated=lab.device.simulated)
        return measured

    status = conduct(arguments, "vllm", measure, vllm_report.show)
    if measured["simulated"]:
        vllm_report.show_scheduler(measured, Output(arguments.json))
    return status


def _measure(arguments: argparse.Namespace, lab: Lab, output: Output) -> Fields:
    """All figures; on the simulated device those of the scheduler's calls."""
    fields: Fields = {"vllm": vllm_classes.version(), "cells": [], "not_run": {}, "batch_copy": "", "scheduler": []}
    fields["triton"] = False
    if "transfers" in arguments.parts and lab.device.simulated:
        fields["not_run"]["transfers"] = "vLLM's classes copy on a GPU"
    elif "transfers" in arguments.parts:
        with output.progress("cells") as progress:
            fields |= _transfers(arguments, lab, progress)
    if "scheduler" in arguments.parts:
        with output.progress("calls of the scheduler") as progress:
            fields |= _scheduler(arguments, fields["not_run"], progress)
    comparisons = [] if lab.device.simulated else vllm_report.compare(fields["cells"])
    fields |= {"comparisons": comparisons, "summary": vllm_report.summarize(comparisons)}
    fields["wrong_rows"] = sum(cell["wrong"] for cell in fields["cells"])
    return fields


# transfers ------------------------------------------------------------------------------------------------------------


class VllmPlan(NamedTuple):
    """What is measured of transfers.

    Attributes:
        seconds: fewer rounds once the run is behind that schedule; None: never.
    """

    geometries: Sequence[Geometry]
    blocks: Sequence[int]
    directions: Sequence[Directions]
    situations: Sequence[Situation]
    seconds: float | None


def reported(
    submitter: Submitter, directions: Sequence[Direction], transfers: int, compute: ConcurrentCompute | None
) -> tuple[float, list[float]]:
    """A `Pace`: each transfer (in both directions: two) is submitted once the one before is reported to have ended.

    Raises:
        RuntimeError: a transfer did not end within 30 seconds.
    """
    clock, calls = time.perf_counter, []
    begin = clock()
    for index in range(transfers):
        for direction in directions:
            called = clock()
            submitter.submit(direction, index)
            calls.append(clock() - called)
        while not submitter.done():
            time.sleep(0)  # gives the interpreter to a thread that submits
            if compute is not None:
                compute.top_up()
            if clock() - called > _LONGEST_SECONDS:
                raise RuntimeError(
                    f"a transfer of {type(submitter).__name__} has not ended for {_LONGEST_SECONDS:.0f} s"
                )
    return clock() - begin, calls


def measure(plan: VllmPlan, lab: Lab, classes: TransferClasses, progress: Advance) -> Fields:
    """The cells of one process, in the order in which they are measured, and what else is known of them."""
    torch = classes.torch
    fields: Fields = {"cells": [], "batch_copy": classes.batch_copy, "profile": ""}
    where = torch.device("cuda", lab.device.index)
    torch.cuda.set_device(where)
    groups = len(plan.geometries) * len(plan.blocks)
    options: dict[str, Any] = {"seconds": plan.seconds, "pace": reported, "progress": progress}
    with (
        SeriesRun(lab, plan.situations, plan.directions, groups=groups, **options) as series,
        torch.cuda.stream(torch.cuda.Stream(where)),  # the default stream would wait for the products' stream
    ):
        fields["not_run"] = series.not_run
        for geometry in plan.geometries:
            most = max(series_of(geometry, blocks).places for blocks in plan.blocks)
            with ExitStack() as stack:
                setup = TensorSetup(torch, where, geometry, most, lab.seed)
                stack.callback(setup.close)
                allocator = ALLOCATORS[setup.expandable()]
                methods = stack.enter_context(VllmMethods(lab, classes, setup))
                fields["profile"] = methods.profile
                for blocks in plan.blocks:
                    wanted = series_of(geometry, blocks)
                    methods.take(wanted)
                    place = {"allocator": allocator, "model": geometry.name, **geometry._asdict()}
                    fields["cells"] += series.cells(methods.of, wanted.transfers, place | {"blocks": blocks})
    return fields


def _transfers(arguments: argparse.Namespace, lab: Lab, progress: Advance) -> Fields:
    """The cells of this process's allocator."""
    classes = vllm_classes.transfer_classes()
    geometries, blocks, directions, situations = (
        list(dict.fromkeys(getattr(arguments, name))) for name in ("geometries", "blocks", "directions", "situations")
    )
    seconds = None if arguments.repeats else _SECONDS
    shapes, busy = [GEOMETRIES[name] for name in geometries], [Situation(name) for name in situations]
    plan = VllmPlan(shapes, blocks, directions, busy, seconds)
    return measure(plan, lab, classes, progress) | {"triton": bool(classes.worker.HAS_TRITON)}


# the scheduler --------------------------------------------------------------------------------------------------------


def _scheduler(arguments: argparse.Namespace, not_run: dict[str, str], progress: Advance) -> Fields:
    capacity, repeats = vllm_report.CAPACITY, arguments.repeats or _SCHEDULER_REPEATS
    try:
        callers = vllm_report.managers(vllm_classes.manager_classes(), capacity)
    except CapabilityError as error:
        not_run["calls of the scheduler"] = str(error)
        return {}
    records = vllm_report.measure(callers, capacity, repeats, progress)
    ratios = vllm_report.scheduler_ratios(records)
    return {"scheduler": records, "scheduler_ratios": ratios, "scheduler_capacity": capacity}

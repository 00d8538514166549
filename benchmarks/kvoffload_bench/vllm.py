"""`kvoffload bench vllm`: this library and vLLM's own workers on the same GPU memory, and the scheduler's calls."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from kvoffload.errors import CapabilityError
from kvoffload.internal.models import ModelGeometry
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Advance, CommandError, Output
from kvoffload.terminal.options import COMMON, add_command, numbers
from kvoffload_bench import vllm_classes, vllm_report
from kvoffload_bench.field_compute import ConcurrentCompute, Situation
from kvoffload_bench.harness import Lab
from kvoffload_bench.report import Fields, add_bench_options, conduct
from kvoffload_bench.series import DIRECTIONS, Directions, SeriesRun, Submitter
from kvoffload_bench.setup import TransferSetup
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
_SECONDS = 90.0  # of the cells of one allocator, without --repeats
_SCHEDULER_REPEATS = 200
_SIMULATED_BLOCKS = 4
_LONGEST_SECONDS = 30.0  # of a transfer; a thread of vLLM's that has failed never ends one
_OPTIONS = "PYTORCH_CUDA_ALLOC_CONF"  # of PyTorch's allocator
_NEW_OPTIONS = "PYTORCH_ALLOC_CONF"  # what newer releases call it
_EXPANDABLE = "expandable_segments:True"
_TEXT = """\
Times this library and vLLM's CPUOffloadingWorker and DmaCopyBackend on the same GPU memory, and the calls of vLLM's \
scheduler. Needs vLLM 0.33 (its Python files suffice) and PyTorch. Takes 4 minutes."""


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
        ("--allocators", ALLOCATORS),
        ("--parts", PARTS),
    ):
        add(name, nargs="+", choices=values, default=list(values), metavar="NAME", help=", ".join(values))
    add_bench_options(parser, _REPEATS, drawn=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 0 if every byte was right, else 1. The calls of the scheduler have times on every machine."""
    simulated: Fields = {}

    def measure(lab: Lab, output: Output) -> Fields:
        fields = _measure(arguments, lab, output)
        if lab.device.simulated:
            simulated.update(fields)
        return fields

    try:
        vllm_classes.version()
    except CapabilityError as error:
        raise CommandError(str(error)) from error
    status = conduct(arguments, "vllm", measure, vllm_report.show)
    if simulated:
        vllm_report.show_scheduler(simulated, Output(arguments.json))
    return status


def _measure(arguments: argparse.Namespace, lab: Lab, output: Output) -> Fields:
    """All figures. From the simulated device: this library's bytes, and the scheduler's calls."""
    fields: Fields = {"vllm": vllm_classes.version(), "cells": [], "not_run": {}, "batch_copy": "", "scheduler": []}
    fields["triton"] = False
    if "transfers" in arguments.parts:
        if lab.device.simulated:
            fields["cells"] = _simulated_cells(lab, arguments)
        elif list(arguments.allocators) == [_current_allocator()]:
            with output.progress("cells") as progress:
                fields |= _transfers(arguments, lab, progress)
        else:
            fields |= _in_processes(arguments, output)
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
    allocator: str
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
    with (
        SeriesRun(
            lab,
            plan.situations,
            plan.directions,
            groups=len(plan.geometries) * len(plan.blocks),
            seconds=plan.seconds,
            progress=progress,
            pace=reported,
        ) as series,
        torch.cuda.stream(torch.cuda.Stream(where)),  # the default stream would wait for the products' stream
    ):
        fields["not_run"] = series.not_run
        for geometry in plan.geometries:
            most = max(series_of(geometry, blocks).places for blocks in plan.blocks)
            with ExitStack() as stack:
                setup = TensorSetup(torch, where, geometry, most, lab.seed)
                stack.callback(setup.close)
                if setup.expandable() != (plan.allocator != ALLOCATORS[0]):
                    raise CommandError(
                        f"PyTorch's allocator is not the one that was asked for ({plan.allocator}): check "
                        "PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"
                    )
                methods = stack.enter_context(VllmMethods(lab, classes, setup))
                fields["profile"] = methods.profile
                for blocks in plan.blocks:
                    wanted = series_of(geometry, blocks)
                    methods.take(wanted)
                    place = {"allocator": plan.allocator, "model": geometry.name, **geometry._asdict()}
                    fields["cells"] += series.cells(methods.of, wanted.transfers, place | {"blocks": blocks})
    return fields


def _transfers(arguments: argparse.Namespace, lab: Lab, progress: Advance) -> Fields:
    """The cells of this process's allocator."""
    classes = vllm_classes.transfer_classes()
    plan = VllmPlan(
        [GEOMETRIES[name] for name in dict.fromkeys(arguments.geometries)],
        list(dict.fromkeys(arguments.blocks)),
        list(dict.fromkeys(arguments.directions)),
        [Situation(name) for name in dict.fromkeys(arguments.situations)],
        arguments.allocators[0],
        None if arguments.repeats else _SECONDS,
    )
    return measure(plan, lab, classes, progress) | {"triton": bool(classes.worker.HAS_TRITON)}


def _current_allocator() -> str:
    """What PyTorch's allocator is in this process."""
    options = os.environ.get(_OPTIONS, "") + os.environ.get(_NEW_OPTIONS, "")
    return ALLOCATORS[_EXPANDABLE in options]


def _in_processes(arguments: argparse.Namespace, output: Output) -> Fields:
    """The cells of each allocator, which a process chooses once: in a process of its own."""
    merged: Fields = {"cells": [], "not_run": {}}
    for allocator in dict.fromkeys(arguments.allocators):
        output.note(f"kvoffload: measuring with PyTorch's {allocator} allocator")
        try:
            fields = _of_process(arguments, allocator)
        except CommandError as error:  # keep what the other process has measured
            merged["not_run"][f"{allocator} allocator"] = str(error)
        else:
            merged["cells"] += fields.pop("cells")
            merged["not_run"] |= fields.get("not_run", {})
            merged |= {name: fields[name] for name in ("batch_copy", "triton", "profile")}
    if not merged["cells"]:
        raise CommandError("; ".join(merged["not_run"].values()))
    return merged


def _of_process(arguments: argparse.Namespace, allocator: str) -> Fields:
    """Raises CommandError, with the end of its standard error, if the process printed no figures."""
    environment = dict(os.environ)
    for name in (_OPTIONS, _NEW_OPTIONS):
        environment.pop(name, None)
    if allocator != ALLOCATORS[0]:
        environment[_OPTIONS] = _EXPANDABLE
    command = [sys.executable, "-m", "kvoffload", "bench", "vllm", *_options(arguments), "--allocators", allocator]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        fields: Fields = json.loads(ended.stdout)
    except ValueError as error:
        last = (ended.stderr.strip().splitlines() or [""])[-1]
        raise CommandError(f"its process ended with {ended.returncode}: {last}") from error
    return fields


def _options(arguments: argparse.Namespace) -> Sequence[str]:
    """Those of this command, for a process that measures the transfers of one allocator."""
    options = ["--json", "--parts", "transfers", "--backend", "cuda", "--device", str(arguments.device)]
    options += ["--seed", str(arguments.seed), "--blocks", ",".join(map(str, arguments.blocks))]
    for name in ("geometries", "directions", "situations"):
        options += [f"--{name}", *getattr(arguments, name)]
    return [*options, "--repeats", str(arguments.repeats)] if arguments.repeats else options


def _simulated_cells(lab: Lab, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Stores and loads by this library's engines, small, on the simulated device; no times."""
    cells = []
    for name in dict.fromkeys(arguments.geometries):
        geometry = GEOMETRIES[name]
        model = ModelGeometry(
            name, geometry.planes, 1, geometry.block_bytes, kv_split=False, tokens_per_block=1, dtype_bytes=1
        )
        with TransferSetup(lab, model.scaled(lab.size.scale), count=_SIMULATED_BLOCKS) as setup:
            for direction in Direction:
                setup.prepare(direction)
                setup.poison(direction)
                for job in setup.submit(direction):
                    job.wait()
                record = {"model": name, "blocks": setup.block_count, "direction": str(direction)}
                cells.append(record | {"method": "kvoffload", "wrong": setup.wrong(direction)})
    return cells


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

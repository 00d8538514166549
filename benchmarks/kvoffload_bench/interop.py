"""`kvoffload bench interop`: what users of CuPy and of JAX get, with this library and without it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

from kvoffload.errors import CapabilityError
from kvoffload.internal.models import MODELS, ModelGeometry
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Advance, CommandError, Output, mib
from kvoffload.terminal.options import COMMON, add_command, model, whole
from kvoffload_bench.copy_methods import microseconds
from kvoffload_bench.cupy_methods import CUPY, CupyMethods
from kvoffload_bench.framework_data import FrameworkData, FrameworkMethod
from kvoffload_bench.harness import CONTIGUOUS_COPY, Lab, Timing, time_rounds
from kvoffload_bench.jax_methods import JAX, JaxMethods, time_tree
from kvoffload_bench.report import Fields, add_bench_options, conduct, fixed

_MODEL = "llama-3.1-8b"
_BLOCKS = 32
_BACK_TO_BACK = 8
_TIMES = (1, _BACK_TO_BACK)
_LEAVES = (1, 8, 64)  # arrays of a tree of JAX's
_TEXT = """\
Times stores and loads of blocks of CuPy and JAX arrays, with this library and with what the frameworks offer. By wall \
clock; every byte is verified. Then times what the host does in a step with a list of JAX arrays. Takes 30 GiB of GPU \
memory."""


_Created = TypeVar("_Created")
Framework = CupyMethods | JaxMethods


class _Tried(NamedTuple):
    """A method that works, and by direction the copier of this library's engine; empty for the framework's own."""

    method: FrameworkMethod
    copiers: dict[Direction, str]


def check_cupy(*, simulated: bool) -> None:
    if simulated:
        raise CapabilityError("it computes on GPUs, and this device is simulated")
    import cupy  # noqa: F401


def check_jax(platform: str = "gpu") -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # it would take three quarters of the GPU's memory
    import jax

    try:
        jax.devices(platform)
    except RuntimeError as error:
        raise CapabilityError(f"this JAX has no {platform.upper()}: {str(error).splitlines()[0]}") from error


def add_parser(benches: Any) -> None:
    text, example = "what users of CuPy and of JAX get", "bench interop --blocks 8"
    parser = add_command(benches, "interop", text, _TEXT, example=example, common=COMMON)
    add, default = parser.add_argument, MODELS[_MODEL]
    add("--model", type=model, default=default, metavar="NAME", help=f"geometry of one group ({_MODEL})")
    add("--blocks", type=whole(1, 1 << 20), default=_BLOCKS, metavar="N", help=f"of a transfer (default {_BLOCKS})")
    add_bench_options(parser, 15, drawn=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    geometry: ModelGeometry = arguments.model
    if len(geometry.groups) > 1:
        raise CommandError(f"--model {geometry.name} has {len(geometry.groups)} groups; name one with a single group")

    def measure(lab: Lab, output: Output) -> Fields:
        with output.progress("directions") as progress:
            return _measure(lab, geometry.scaled(lab.size.scale), arguments.blocks, progress)

    return conduct(arguments, "interop", measure, _show)


def _measure(lab: Lab, geometry: ModelGeometry, count: int, progress: Advance) -> Fields:
    not_run: dict[str, str] = {}
    with ExitStack() as stack:
        data = FrameworkData(lab, geometry, count)
        frameworks = [stack.enter_context(closing(each)) for each in frameworks_here(data, not_run)]
        tried = [each for framework in frameworks for each in _tried(framework, not_run)]
        timings = {}
        for done, direction in enumerate(Direction, start=1):
            timings[direction] = _timings(data, tried, direction)
            progress(done, len(Direction))
        trees = [
            time_tree(lab.device, leaves, lab.repeats)
            for leaves in (_LEAVES if any(isinstance(each, JaxMethods) for each in frameworks) else ())
        ]
    for tree in trees:
        samples = tree.pop("samples_us")
        if not lab.device.simulated:
            tree |= {"samples_us": samples, "median_us": {name: median(taken) for name, taken in samples.items()}}
    records = [record for times in _TIMES for record in _records(tried, timings, times, lab.device.simulated)]
    comparisons = list(_comparisons(records))
    return {
        "model": geometry.name,
        "planes": data.shape[0],
        "block_bytes": data.block_bytes,
        "blocks": count,
        "nbytes": data.nbytes,
        "methods": records,
        "comparisons": comparisons,
        "ratios": list(_lowest(comparisons)),
        "trees": trees,
        "not_run": not_run,
        "wrong_rows": sum(timing.wrong for by_name in timings.values() for timing in by_name.values())
        + sum(tree["wrong"] for tree in trees),
    }


def frameworks_here(data: FrameworkData, not_run: dict[str, str]) -> Iterator[Framework]:
    """Those that can be used here."""
    simulated = data.lab.device.simulated
    kinds: dict[str, tuple[Callable[[], None], Callable[[FrameworkData], Framework]]] = {
        CUPY: (lambda: check_cupy(simulated=simulated), CupyMethods),
        JAX: (lambda: check_jax("cpu" if simulated else "gpu"), JaxMethods),
    }
    for name, (check, kind) in kinds.items():
        try:
            check()
        except ImportError as error:
            not_run[name] = f"{error}; pip install 'kvoffload[{name.lower()}]'"
        except CapabilityError as error:
            not_run[name] = str(error)
        else:
            framework = _attempt(partial(kind, data), name, not_run)
            if framework is not None:
                yield framework


def _tried(framework: Framework, not_run: dict[str, str]) -> Iterator[_Tried]:
    """Those of its methods that can store and load."""
    for name, make in framework.makers.items():
        tried = _attempt(partial(_try, make), f"{framework.name}: {name}", not_run)
        if tried is not None:
            yield tried


def _try(make: Callable[[], FrameworkMethod]) -> _Tried:
    method, copiers = make(), {}
    for direction in Direction:
        method.source(direction).fill()
        jobs = method.execute(direction, _BACK_TO_BACK)
        if jobs:
            copiers[direction] = jobs[-1].copier
    return _Tried(method, copiers)


def _attempt(make: Callable[[], _Created], name: str, not_run: dict[str, str]) -> _Created | None:
    """None if it cannot be created, with the reason in `not_run`."""
    try:
        return make()
    except Exception as error:  # other people's code
        not_run[name] = (
            str(error) if isinstance(error, CapabilityError) else f"{type(error).__name__}: {error}".splitlines()[0]
        )
    return None


def _timings(data: FrameworkData, tried: Iterable[_Tried], direction: Direction) -> dict[str, Timing]:
    """By `_scenario_name`; the contiguous copy by its own."""
    scenarios = {}
    for method, _ in tried:
        method.source(direction).fill()
        for times in _TIMES:
            scenarios[_scenario_name(method.label, times)] = method.scenario(direction, data, times)
    scenarios[CONTIGUOUS_COPY] = data.lab.contiguous.scenario(direction)
    return time_rounds(scenarios, data.lab.repeats)


def _scenario_name(label: str, times: int) -> str:
    return f"{label}, {_occasion(times)}"


def _occasion(times: int) -> str:
    return "one at a time" if times == 1 else f"{times} back to back"


def _records(
    tried: Iterable[_Tried], timings: Mapping[Direction, Mapping[str, Timing]], times: int, simulated: bool
) -> Iterator[dict[str, Any]]:
    """Figures by direction, of `times` transfers back to back; none on the simulated device."""
    rows: list[tuple[str | None, str, dict[Direction, str]]] = []
    rows += [(method.framework, method.name, copiers) for method, copiers in tried]
    for framework, name, copiers in (*rows, (None, CONTIGUOUS_COPY, {})):
        label = CONTIGUOUS_COPY if framework is None else _scenario_name(f"{framework}: {name}", times)
        found = {direction: timings[direction][label] for direction in Direction}
        record: dict[str, Any] = {"framework": framework, "method": name, "back_to_back": times, "copiers": copiers}
        record["wrong"] = {direction: timing.wrong for direction, timing in found.items()}
        if not simulated:
            record["gb_per_s"] = {direction: timing.gb_per_s for direction, timing in found.items()}
            record["median_us"] = {direction: timing.median * 1e6 for direction, timing in found.items()}
            record["samples_us"] = {direction: microseconds(timing) for direction, timing in found.items()}
        yield record


def _comparisons(records: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Bandwidths of each method of this library over those of the framework's own and of the contiguous copy."""
    for ours in (record for record in records if record["copiers"] and "gb_per_s" in record):
        others = [
            record for record in records if not record["copiers"] and record["back_to_back"] == ours["back_to_back"]
        ]
        for other in (record for record in others if record["framework"] in (ours["framework"], None)):
            for direction in Direction:
                value = ours["gb_per_s"][direction] / other["gb_per_s"][direction]
                names = {"framework": ours["framework"], "back_to_back": ours["back_to_back"], "ours": ours["method"]}
                yield names | {"other": other["method"], "direction": direction, "value": value}


def _lowest(comparisons: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lowest ratio of each method of this library to the framework's own, by direction."""
    found: dict[str, list[tuple[float, str]]] = {}
    for each in comparisons:
        if each["other"] != CONTIGUOUS_COPY:
            occasion = _occasion(each["back_to_back"])
            name = f"{each['framework']}: {each['ours']} / without it, {each['direction']}, {occasion}"
            found.setdefault(name, []).append((each["value"], each["other"]))
    for name, values in found.items():
        value, other = min(values)
        yield {"ratio": name, "which": "lowest", "value": value, "at": other}


# tables ---------------------------------------------------------------------------------------------------------------


def _show(fields: Fields, output: Output) -> None:
    output.line(_verdict(fields["comparisons"]))
    moved = f"{fields['blocks']} blocks of {fields['planes']} x {fields['block_bytes']} B, {mib(fields['nbytes'])}"
    columns = ("method", "store GB/s", "load GB/s", "store us", "load us", "copier")
    for times in _TIMES:
        lines = [_line(record) for record in fields["methods"] if record["back_to_back"] == times]
        output.table(f"{moved}, {_occasion(times)}, wall clock", columns, lines)
    if fields["trees"]:
        heads = ("arrays", "JAX's own", "the cache adds", "after transfers", "after=cache")
        lines = [
            [str(tree["leaves"]), *(fixed(each, 0) for each in _added(tree["median_us"]))] for tree in fields["trees"]
        ]
        output.table("host time of a step with a list of JAX arrays, us", heads, lines)


def _added(median_us: Mapping[str, float]) -> list[float]:
    """The host time of a step without a cache, and what the cache adds to it."""
    step = median_us["step"]
    return [step, median_us["no transfer"] - step, median_us["after transfers"] - step, median_us["after=cache"]]


def _verdict(comparisons: Sequence[Mapping[str, Any]]) -> str:
    """The range of the ratios to what the frameworks offer."""
    values = [each["value"] for each in comparisons if each["other"] != CONTIGUOUS_COPY]
    if not values:
        return "bench interop: no framework could be compared"
    return (
        f"bench interop: kvoffload has {min(values):.2f} to {max(values):.2f} times the GB/s of the frameworks' own "
        "copies"
    )


def _line(record: Mapping[str, Any]) -> list[Any]:
    line = [record["method"] if record["framework"] is None else f"{record['framework']}: {record['method']}"]
    line += [fixed(record["gb_per_s"][direction]) for direction in Direction]
    line += [fixed(record["median_us"][direction], 0) for direction in Direction]
    return [*line, " / ".join(dict.fromkeys(record["copiers"].values())) or "-"]

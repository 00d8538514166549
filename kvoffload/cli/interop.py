"""`kvoffload bench interop`: what users of CuPy and of JAX get, with this library and without it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from kvoffload.cli.cargo import Cargo, Way, run_warmed
from kvoffload.cli.cases import BIG_COPY, Lab, Timing
from kvoffload.cli.console import Advance, CommandError, Output, mib, model, whole
from kvoffload.cli.cupyways import CUPY, CupyWays
from kvoffload.cli.frameworks import check_cupy, check_jax, why_not
from kvoffload.cli.jaxways import JAX, JaxWays
from kvoffload.cli.report import Fields, add_bench_options, conduct, number
from kvoffload.cli.rows import microseconds
from kvoffload.errors import CapabilityError
from kvoffload.models import MODELS, ModelGeometry
from kvoffload.plan import Direction

_MODEL = "llama-3.1-8b"
_BLOCKS = 32
_DESCRIPTION = """\
Store random, non-adjacent blocks of a KV cache of CuPy's and of JAX's to pinned host memory, and load them back, with
this library and with what the frameworks offer. By the wall clock, from the call until the bytes can be used: a store
ends when the host may read them, a load when the framework has computed with an element of the last block; so all
waiting that correctness needs is in it. Block ids come from the host, unless a line says otherwise. Every way moves the
same blocks, in rounds of a random order, twice in each: once to warm up the CPU's caches, then timed; figures are
medians. Targets are poisoned before, and all bytes verified after, every timed transfer. "big copy": one contiguous
pinned copy of 256 MiB, on the GPU clock.
A cache is one array (planes, blocks, elements), or in CuPy a "list" of arrays (blocks, elements), one for each plane,
each in an allocation of its own. What JAX offers is device_put to its memory kind pinned_host, and from there. The
default takes 30 GiB of GPU memory. On the simulated device: small sizes, verified, and no times; of JAX what works on
the CPU."""


_Made = TypeVar("_Made")


class Framework(Protocol):
    """The ways of a framework, made when they are called; `close` closes what they have opened."""

    name: str

    @property
    def makers(self) -> Mapping[str, Callable[[], Way]]: ...

    def close(self) -> None: ...


class _Tried(NamedTuple):
    """A way that works, and by direction which copier carried it; no copier where it is not ours."""

    way: Way
    carried: dict[Direction, str]


def add_parser(benches: Any) -> None:
    parser = benches.add_parser("interop", help="what users of CuPy and of JAX get", description=_DESCRIPTION)
    parser.add_argument(
        "--model", type=model, default=MODELS[_MODEL], metavar="NAME", help=f"geometry of one group (default {_MODEL})"
    )
    parser.add_argument(
        "--blocks", type=whole(1), default=_BLOCKS, metavar="N", help=f"of a transfer (default {_BLOCKS})"
    )
    add_bench_options(parser, 15, figures=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    geometry: ModelGeometry = arguments.model
    if len(geometry.groups) > 1:
        raise CommandError(f"--model {geometry.name} has {len(geometry.groups)} groups; name one with a single group")

    def measure(lab: Lab, output: Output) -> Fields:
        with output.progress("rounds") as progress:
            return _measure(lab, geometry.scaled(lab.size.scale), arguments.blocks, progress)

    return conduct(arguments, "interop", measure, _show)


def _measure(lab: Lab, geometry: ModelGeometry, count: int, progress: Advance) -> Fields:
    not_run: dict[str, str] = {}
    with ExitStack() as stack:
        cargo = stack.enter_context(closing(Cargo(lab, geometry, count)))
        frameworks = [stack.enter_context(closing(each)) for each in _frameworks(cargo, not_run)]
        tried = [each for framework in frameworks for each in _tried(framework, not_run)]
        timings = {direction: _timings(cargo, tried, direction, progress) for direction in Direction}
    rows = list(_rows(tried, timings, lab.device.simulated))
    comparisons = list(_comparisons(rows))
    return {
        "model": geometry.name,
        "planes": cargo.shape[0],
        "block_bytes": cargo.block_bytes,
        "blocks": count,
        "nbytes": cargo.nbytes,
        "ways": rows,
        "comparisons": comparisons,
        "ratios": list(_lowest(comparisons)),
        "not_run": not_run,
        "wrong_rows": sum(sum(row["wrong"].values()) for row in rows),
    }


def _frameworks(cargo: Cargo, not_run: dict[str, str]) -> Iterator[Framework]:
    """Those that can be used here."""
    simulated = cargo.lab.device.simulated
    kinds: dict[str, tuple[Callable[[], None], Callable[[Cargo], Framework]]] = {
        CUPY: (_refuse_simulated if simulated else check_cupy, CupyWays),
        JAX: (lambda: check_jax("cpu" if simulated else "gpu"), JaxWays),
    }
    for name, (check, kind) in kinds.items():
        reason = why_not(check, name.lower())
        if reason is None:
            framework = _attempt(partial(kind, cargo), name, not_run)
            if framework is not None:
                yield framework
        else:
            not_run[name] = reason


def _refuse_simulated() -> None:
    raise CapabilityError("it computes on GPUs, and this device is simulated")


def _tried(framework: Framework, not_run: dict[str, str]) -> Iterator[_Tried]:
    """Those of its ways that can store and load."""
    for name, make in framework.makers.items():
        tried = _attempt(partial(_try, make), f"{framework.name}: {name}", not_run)
        if tried is not None:
            yield tried


def _try(make: Callable[[], Way]) -> _Tried:
    way, carried = make(), {}
    for direction in Direction:
        way.source(direction).fill()
        job = way.move(direction)()
        if job is not None:
            carried[direction] = job.copier
    return _Tried(way, carried)


def _attempt(make: Callable[[], _Made], name: str, not_run: dict[str, str]) -> _Made | None:
    """None if it cannot be made, with the reason in `not_run`: the others go on."""
    try:
        return make()
    except CapabilityError as error:
        not_run[name] = str(error)
    except Exception as error:  # other people's code
        not_run[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _timings(cargo: Cargo, tried: Iterable[_Tried], direction: Direction, progress: Advance) -> dict[str, Timing]:
    """By label."""
    cases = {}
    for way, _ in tried:
        way.source(direction).fill()
        cases[way.label] = way.case(direction, cargo)
    cases[BIG_COPY] = cargo.lab.big.case(direction)
    return run_warmed(cases, cargo.lab.repeats, cargo.lab.seed, progress)


def _rows(
    tried: Iterable[_Tried], timings: Mapping[Direction, Mapping[str, Timing]], simulated: bool
) -> Iterator[dict[str, Any]]:
    """Figures by direction; none on the simulated device."""
    for way, carried in tried:
        measured = {direction: timings[direction][way.label] for direction in Direction}
        yield {"framework": way.framework, "way": way.name, "carried": carried} | _figures(measured, simulated)
    measured = {direction: timings[direction][BIG_COPY] for direction in Direction}
    yield {"framework": None, "way": BIG_COPY, "carried": {}} | _figures(measured, simulated)


def _figures(measured: Mapping[Direction, Timing], simulated: bool) -> dict[str, Any]:
    wrong = {"wrong": {direction: timing.wrong for direction, timing in measured.items()}}
    if simulated:
        return wrong
    return wrong | {
        "gb_per_s": {direction: timing.gb_per_s for direction, timing in measured.items()},
        "median_us": {direction: timing.median * 1e6 for direction, timing in measured.items()},
        "samples_us": {direction: microseconds(timing) for direction, timing in measured.items()},
    }


def _comparisons(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Bandwidths of each way of ours over those of the framework's own and of the big copy."""
    for ours in (row for row in rows if row["carried"] and "gb_per_s" in row):
        for other in (row for row in rows if not row["carried"] and row["framework"] in (ours["framework"], None)):
            for direction in Direction:
                value = ours["gb_per_s"][direction] / other["gb_per_s"][direction]
                names = {"framework": ours["framework"], "ours": ours["way"], "other": other["way"]}
                yield names | {"direction": direction, "value": value}


def _lowest(comparisons: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each way of ours and each direction, beside what the framework offers."""
    found: dict[str, list[tuple[float, str]]] = {}
    for each in comparisons:
        if each["other"] != BIG_COPY:
            name = f"{each['framework']}: {each['ours']} / without it, {each['direction']}"
            found.setdefault(name, []).append((each["value"], each["other"]))
    for name, values in found.items():
        value, other = min(values)
        yield {"ratio": name, "which": "lowest", "value": value, "at": other}


# tables ---------------------------------------------------------------------------------------------------------------


def _show(fields: Fields, output: Output) -> None:
    simulated = fields["simulated"]
    columns = ["way", *(f"{each} {what}" for what in _heads(simulated) for each in Direction), "carried by"]
    lines = []
    for row in fields["ways"]:
        line = [row["way"] if row["framework"] is None else f"{row['framework']}: {row['way']}"]
        if not simulated:
            line += [number(row["gb_per_s"][direction]) for direction in Direction]
            line += [number(row["median_us"][direction], 0) for direction in Direction]
        line += [row["wrong"][direction] for direction in Direction]
        lines.append([*line, " / ".join(dict.fromkeys(row["carried"].values()))])
    moved = f"{fields['blocks']} blocks of {fields['planes']} x {fields['block_bytes']} B, {mib(fields['nbytes'])}"
    output.table(f"{moved}, {'SIMULATED' if simulated else 'wall clock'}", columns, lines)
    for framework in dict.fromkeys(each["framework"] for each in fields["comparisons"]):
        _show_comparisons(framework, [each for each in fields["comparisons"] if each["framework"] == framework], output)


def _heads(simulated: bool) -> list[str]:
    return ["wrong rows"] if simulated else ["GB/s", "us", "wrong rows"]


def _show_comparisons(framework: str, comparisons: Sequence[Mapping[str, Any]], output: Output) -> None:
    ours = list(dict.fromkeys(each["ours"] for each in comparisons))
    values = {(each["ours"], each["other"], each["direction"]): each["value"] for each in comparisons}
    lines = [
        [other, *(" / ".join(number(values[name, other, direction], 2) for direction in Direction) for name in ours)]
        for other in dict.fromkeys(each["other"] for each in comparisons)
    ]
    output.table(f"{framework}: GB/s over those of ..., store / load", ["over", *ours], lines)

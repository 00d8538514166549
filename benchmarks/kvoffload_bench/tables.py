"""Tables of records: GB/s of the engine's choice by transfer, and of every copy method."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import Output, counted
from kvoffload_bench.baselines import BARE_STRIDED, COPY_LOOP, FLAT_BATCH, grid_stride
from kvoffload_bench.contiguous import CONTIGUOUS_COPY
from kvoffload_bench.frameworks import CUPY, JAX
from kvoffload_bench.measurements import COPY_ENGINE, GRID, METHODS, PREFERENCES, choice
from kvoffload_bench.report import number

_ORDER = (
    *map(choice, PREFERENCES),
    *COPY_ENGINE,
    *(method.label for method in METHODS),
    *(BARE_STRIDED, FLAT_BATCH, COPY_LOOP, *(grid_stride(GRID, pinned=pinned) for pinned in (False, True))),
    *(CUPY, JAX, CONTIGUOUS_COPY),
)


def scenarios_of(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the scenarios that any of the records has, in the order of the columns."""
    present = set().union(*(record["wrong"] for record in records))
    return [name for name in _ORDER if name in present]


def figures(record: Mapping[str, Any], scenarios: Sequence[str]) -> list[str]:
    """A cell for each scenario."""
    return [number(record["gb_per_s"].get(name)) for name in scenarios]


def chosen_methods(record: Mapping[str, Any]) -> str:
    """The copy methods that the engine chose, by preference: "gather 4 / strided"."""
    chosen = [record["chosen"][name] for name in map(choice, PREFERENCES) if name in record["chosen"]]
    return " / ".join(dict.fromkeys(map(method_of, chosen)))


def method_of(reason: str) -> str:
    """The copy method at the beginning of a job's reason, as `CopyMethod.label`."""
    copier, _, rest = reason.partition(":")[0].partition(" with ")
    return f"{copier} {rest.split(' ')[0]}".rstrip()


def headings(scenarios: Sequence[str]) -> list[str]:
    """Headings of columns that break between words only."""
    return [name.replace(",", "").replace("-", " ") for name in scenarios]


def choice_verdict(name: str, records: Sequence[Mapping[str, Any]]) -> str:
    """How near the engine's choice comes to the contiguous copy, at least and in the middle."""
    chosen = choice(PREFERENCES[0])
    found = [(share, record) for record in records if (share := _over_limit(record, chosen)) is not None]
    if not found:
        return f"bench {name}: the engine's choice was not measured"
    lowest, at = min(found, key=lambda each: each[0])
    middle = statistics.median(share for share, _ in found)
    return (
        f"bench {name}: the engine's choice has {lowest:.2f} (lowest) and {middle:.2f} (median) of the contiguous "
        f"copy's GB/s; lowest: {at['model']}, {at['placement']}, {at['direction']}, "
        f"{counted(at['blocks'], 'block')}"
    )


def show_choice(
    title: str,
    names: Sequence[str],
    label: Callable[[Mapping[str, Any]], tuple[object, ...]],
    records: Sequence[Mapping[str, Any]],
    output: Output,
) -> None:
    """A line for each transfer, which `label` identifies: for each direction GB/s of the engine's choice, in brackets
    over those of the contiguous copy, and the copy method that it was.
    """
    chosen = choice(PREFERENCES[0])
    by_label: dict[tuple[object, ...], dict[str, Mapping[str, Any]]] = {}
    for record in records:
        by_label.setdefault(label(record), {})[record["direction"]] = record
    lines = []
    for labels, found in by_label.items():
        line = list(labels)
        for direction in Direction:
            record = found.get(direction, {"gb_per_s": {}, "chosen": {}})
            reason = record["chosen"].get(chosen)
            rate, share = record["gb_per_s"].get(chosen), _over_limit(record, chosen)
            line += [f"{number(rate)} ({number(share, 2)})", "-" if reason is None else method_of(reason)]
        lines.append(line)
    columns = (*names, "store GB/s (ratio)", "by", "load GB/s (ratio)", "by")
    output.table(f"{title}: the engine's choice; ratio: to one contiguous copy", columns, lines, left=("by",))


def show_methods(title: str, records: Sequence[Mapping[str, Any]], output: Output) -> None:
    """A line for each copy method: its bandwidths over all these transfers."""
    lines = []
    for name in scenarios_of(records):
        line: list[str] = [name]
        for direction in Direction:
            of_it = [record["gb_per_s"] for record in records if record["direction"] == direction]
            rates = [each[name] for each in of_it if name in each]
            line += [number(statistics.median(rates)), number(min(rates))] if rates else ["-", "-"]
        lines.append(line)
    columns = ("copy method", "store median", "lowest", "load median", "lowest")
    output.table(f"{title}: GB/s on the GPU clock, by copy method", columns, lines)


def _over_limit(record: Mapping[str, Any], name: str) -> float | None:
    rates = record["gb_per_s"]
    return rates[name] / rates[CONTIGUOUS_COPY] if name in rates and CONTIGUOUS_COPY in rates else None


def direction_text(direction: Direction) -> str:
    return "device to host" if direction is Direction.STORE else "host to device"

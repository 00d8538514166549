"""Costs as plain dictionaries for JSON, and back: times in microseconds, the link in GB/s. Nothing read is trusted."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

from kvoffload.tuning.costs import Costs, Curve, FlatCosts, SplitCosts, StridedCosts

_SIGNIFICANT = 5  # digits kept of a measured value
_LINE = 110


def pretty(value: Any, indent: int = 0) -> str:
    """JSON with what fits on a line on one line."""
    text = json.dumps(value)
    if not isinstance(value, dict) or len(text) + indent <= _LINE:
        return text
    inside = [f"{' ' * indent} {json.dumps(name)}: {pretty(each, indent + 1)}" for name, each in value.items()]
    return "{\n" + ",\n".join(inside) + "\n" + " " * indent + "}"


def render_costs(costs: Costs) -> dict[str, Any]:
    strided = costs.strided
    return {
        "link_gb_per_s": short(costs.link / 1e9),
        "strided": strided
        and {
            "fixed": _us(strided.fixed),
            "row_bytes": strided.row_bytes,
            "operation": [_us(each) for each in strided.operation_seconds],
            "row": [_us(each) for each in strided.row_seconds],
        },
        "flat": {name: _render_flat(flat) for name, flat in costs.flat.items()},
        "gather": {str(programs): _render_flat(flat) for programs, flat in costs.gather.items()},
        "split": {
            str(programs): {
                "extra": _us(split.extra),
                "row_bytes": split.row_bytes,
                "stretch": [short(each) for each in split.stretch],
                "lean": [short(each) for each in split.lean],
            }
            for programs, split in costs.split.items()
        },
    }


def _render_flat(flat: FlatCosts) -> dict[str, Any]:
    """By the bytes of a copy: how many, and how long."""
    return {
        str(curve.nbytes): {"counts": curve.counts, "us": [_us(each) for each in curve.seconds]}
        for curve in flat.curves
    }


def _us(seconds: float) -> float:
    return short(seconds * 1e6)


def short(value: float) -> float:
    return float(f"{value:.{_SIGNIFICANT}g}")


# reading --------------------------------------------------------------------------------------------------------------


def parse_costs(fields: dict[str, Any]) -> Costs:
    strided = fields["strided"]
    return Costs(
        link=number(fields["link_gb_per_s"], above=0.0) * 1e9,
        strided=strided
        and StridedCosts(
            number(strided["fixed"]) * 1e-6,
            _ascending(strided["row_bytes"]),
            _seconds(strided["operation"], len(strided["row_bytes"])),
            _seconds(strided["row"], len(strided["row_bytes"])),
        ),
        flat={str(name): _parse_flat(flat) for name, flat in fields["flat"].items()},
        gather={int(programs): _parse_flat(flat) for programs, flat in fields["gather"].items()},
        split={int(programs): _parse_split(split) for programs, split in fields["split"].items()},
    )


def _parse_split(fields: dict[str, Any]) -> SplitCosts:
    sizes = _ascending(fields["row_bytes"])

    def factors(name: str) -> tuple[float, ...]:
        return tuple(number(each, above=0.0) for each in _of_length(fields[name], len(sizes)))

    return SplitCosts(number(fields["extra"]) * 1e-6, sizes, factors("stretch"), factors("lean"))


def _parse_flat(fields: dict[str, Any]) -> FlatCosts:
    sizes = _ascending([int(nbytes) for nbytes in fields])
    each = [fields[str(nbytes)] for nbytes in sizes]
    return FlatCosts(
        tuple(
            Curve(nbytes, _ascending(curve["counts"]), _seconds(curve["us"], len(curve["counts"])))
            for nbytes, curve in zip(sizes, each, strict=True)
        )
    )


def _ascending(values: list[Any]) -> tuple[int, ...]:
    numbers = tuple(int(number(value, above=0.0)) for value in values)
    if not numbers or any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
        raise ValueError(f"{values!r:.80} are not ascending")
    return numbers


def _seconds(values: list[Any], length: int) -> tuple[float, ...]:
    return tuple(number(value) * 1e-6 for value in _of_length(values, length))


def _of_length(values: list[Any], length: int) -> list[Any]:
    if len(values) != length:
        raise ValueError(f"{len(values)} values for {length} points")
    return values


def number(value: Any, above: float | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.40} is no number")
    if value < 0 or (above is not None and value <= above):
        raise ValueError(f"{value!r} is too small")
    return float(value)

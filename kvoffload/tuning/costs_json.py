"""Costs as plain dictionaries for JSON, and back: times in microseconds, the link in GB/s.

A profile file may be damaged or edited: every value that is read is checked.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

from kvoffload.tuning.costs import COPIERS, Costs, Curve, FlatCosts, HostCosts, StridedCosts

_SIGNIFICANT = 5  # digits kept of a measured value
_LINE = 110
_MOST = 10**15  # of any number in a profile: far beyond what is measured, and sums stay finite


def pretty(value: Any, indent: int = 0) -> str:
    """Return JSON with what fits on a line on one line."""
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
        "flat": {  # by the bytes of a copy: numbers of copies, and their seconds
            name: {
                str(curve.nbytes): {"counts": curve.counts, "us": [_us(each) for each in curve.seconds]}
                for curve in flat.curves
            }
            for name, flat in costs.flat.items()
        },
    }


def render_host(costs: HostCosts) -> dict[str, float]:
    return {"fixed": _us(costs.fixed), "copy": _us(costs.copy)}


def _us(seconds: float) -> float:
    return short(seconds * 1e6)


def short(value: float) -> float:
    return float(f"{value:.{_SIGNIFICANT}g}")


# reading --------------------------------------------------------------------------------------------------------------


def parse_costs(fields: dict[str, Any]) -> Costs:
    """Return what `render_costs` wrote; ValueError, KeyError, TypeError or AttributeError for anything else."""
    flat = {}
    for name, measured in fields["flat"].items():
        curves = []
        for nbytes in _ascending([_whole(nbytes) for nbytes in measured]):
            curve = measured[str(nbytes)]
            curves.append(Curve(nbytes, _ascending(curve["counts"]), _seconds(curve["us"], len(curve["counts"]))))
        flat[str(name)] = FlatCosts(tuple(curves))
    costs = Costs(link=number(fields["link_gb_per_s"], above=0.0) * 1e9, flat=flat)
    strided = fields["strided"]
    if strided is None:
        return costs
    sizes = _ascending(strided["row_bytes"])
    operation, row = (_seconds(strided[name], len(sizes)) for name in ("operation", "row"))
    return replace(costs, strided=StridedCosts(number(strided["fixed"]) * 1e-6, sizes, operation, row))


def parse_host(fields: dict[str, Any]) -> HostCosts:
    """Return what `render_host` wrote; errors as for `parse_costs`."""
    return HostCosts(number(fields["fixed"]) * 1e-6, number(fields["copy"]) * 1e-6)


def parse_copier(text: str) -> str:
    """Return the name of a copier; ValueError for anything else."""
    if text not in COPIERS:
        raise ValueError(f"{text!r:.40} is no copier; known are {', '.join(COPIERS)}")
    return text


def _ascending(values: list[Any]) -> tuple[int, ...]:
    numbers = tuple(_count(value) for value in values)
    if not numbers or any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
        raise ValueError(f"{values!r:.80} are not ascending")
    return numbers


def _seconds(values: list[Any], length: int) -> tuple[float, ...]:
    if len(values) != length:
        raise ValueError(f"{len(values)} values for {length} points")
    return tuple(number(value) * 1e-6 for value in values)


def _count(value: Any) -> int:
    """Return a JSON integer from 1 on."""
    if not isinstance(value, int):
        raise ValueError(f"{value!r:.40} is not an integer")
    number(value, above=0.0)
    return value


def _whole(text: str) -> int:
    """Return an integer from 1 on, as `str` writes it: JSON's names are texts."""
    if not (text.isascii() and text.isdecimal()) or text.startswith("0"):
        raise ValueError(f"{text!r:.40} is not an integer of at least 1")
    return _count(int(text))


def number(value: Any, above: float | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError(f"{value!r:.40} is not a number")
    if value < 0 or (above is not None and value <= above):
        raise ValueError(f"{value!r:.40} is too small")
    if value > _MOST:
        raise ValueError(f"{value!r:.40} is too large")
    return float(value)

"""Costs from measured seconds: least squares of relative errors, with no price below zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.tuning.costs import (
    CopyMethod,
    Costs,
    Curve,
    FlatCosts,
    HostCosts,
    Shape,
    SplitCosts,
    StridedCosts,
    driver_copies,
)

Float64Array = npt.NDArray[np.float64]

LEAST_STRETCH = 0.8  # less would be noise: kernel and copy engine together are not faster than each alone


class Sample(NamedTuple):
    method: CopyMethod
    shape: Shape
    seconds: float


def fit(link: float, samples: Sequence[Sample]) -> Costs:
    """The costs of one direction from samples.

    Args:
        link: bytes per second of one large contiguous copy.
        samples: "strided" needs two heights (rows per operation) for each row size, else the price of an operation
            stays zero there. All rows of a "batch" or "loop" sample, and all plane blocks of a "gather" sample, have
            one size. "split" samples have the share that was used.
    """
    by_copier: dict[str, dict[CopyMethod, None]] = {}  # each method once, without its share
    for each in samples:
        by_copier.setdefault(each.method.copier, {})[each.method._replace(share=0.0)] = None
    flat = {name: _flat_costs(name, samples) for name in by_copier if name in ("batch", "loop")}
    gather = {each.programs: _flat_costs(each.label, samples) for each in by_copier.get("gather", ())}
    strided = [each for each in samples if each.method.copier == "strided"]
    costs = Costs(link, fit_strided(strided) if strided else None, flat, gather)
    split = {}
    for method in by_copier.get("split", ()):
        own = [each for each in samples if each.method.label == method.label]
        split[method.programs] = fit_split(costs, own)
    return replace(costs, split=split)


def _flat_costs(label: str, samples: Sequence[Sample]) -> FlatCosts:
    points: dict[int, dict[int, float]] = {}
    for method, shape, seconds in samples:
        if method.label == label:
            count = shape.plane_blocks if method.copier == "gather" else shape.rows
            points.setdefault(shape.nbytes // count, {})[count] = seconds
    curves = []
    for nbytes, curve in sorted(points.items()):
        counts = tuple(sorted(curve))
        curves.append(Curve(nbytes, counts, tuple(curve[count] for count in counts)))
    return FlatCosts(tuple(curves))


def fit_strided(samples: Sequence[Sample]) -> StridedCosts:
    """One fixed cost; for each row size the price of an operation and of a row."""
    widths = np.array([each.shape.nbytes // each.shape.rows for each in samples])
    sizes = np.unique(widths)
    columns = np.zeros((len(samples), 1 + 2 * len(sizes)))
    columns[:, 0] = 1.0
    for index, size in enumerate(sizes):
        here = widths == size
        columns[here, 1 + 2 * index] = [each.shape.operations for each in samples if _width(each) == size]
        columns[here, 2 + 2 * index] = [each.shape.rows for each in samples if _width(each) == size]
    prices = solve(columns, np.array([each.seconds for each in samples]))
    row_bytes = tuple(int(size) for size in sizes)
    return StridedCosts(float(prices[0]), row_bytes, _floats(prices[1::2]), _floats(prices[2::2]))


def fit_host(samples: Sequence[Sample]) -> dict[str, HostCosts]:
    """By copier, from seconds of the host."""
    found = {}
    for copier in dict.fromkeys(each.method.copier for each in samples):
        own = [each for each in samples if each.method.copier == copier]
        columns = np.ones((len(own), 2))
        columns[:, 1] = [driver_copies(copier, each.shape) for each in own]
        found[str(copier)] = HostCosts(*_floats(solve(columns, np.array([each.seconds for each in own]))))
    return found


def _width(sample: Sample) -> int:
    return sample.shape.nbytes // sample.shape.rows


def fit_split(costs: Costs, samples: Sequence[Sample]) -> SplitCosts:
    """One price for joining two streams; for each row size the kernel's best share of the blocks, and the factor by
    which dividing them stretches the ideal time.

    If one transfer was timed with several shares, only the fastest sample is used.
    """
    best: dict[Shape, Sample] = {}
    for each in samples:
        if each.shape not in best or each.seconds < best[each.shape].seconds:
            best[each.shape] = each
    samples = list(best.values())
    sizes = sorted({_width(each) for each in samples})
    leans = []
    for size in sizes:  # by the largest transfer, since its shares have the smallest steps
        alike = [each for each in samples if _width(each) == size]
        method, shape, _ = max(alike, key=lambda each: each.shape.nbytes)
        balanced = costs.split_share(shape, method.programs, 1.0)
        leans.append(method.share / balanced if balanced else 1.0)
    columns = np.zeros((len(samples), 1 + len(sizes)))
    columns[:, 0] = 1.0
    for index, (method, shape, _) in enumerate(samples):
        ideal = costs.ideal_split(shape, method.programs, method.share)
        columns[index, 1 + sizes.index(_width(samples[index]))] = ideal
    prices = solve(columns, np.array([each.seconds for each in samples]))
    stretch = _floats(np.maximum(prices[1:], LEAST_STRETCH))
    return SplitCosts(float(prices[0]), tuple(sizes), stretch, tuple(leans))


def solve(columns: Float64Array, seconds: Float64Array) -> Float64Array:
    """Prices, none below zero, with the least sum of squared relative errors of `columns @ prices` to `seconds`.

    Columns whose price would be negative get price 0, the most negative first: exact enough for so few columns.
    """
    scaled = columns / seconds[:, np.newaxis]
    prices = np.zeros(columns.shape[1])
    kept = [index for index in range(columns.shape[1]) if columns[:, index].any()]
    while kept:
        found = np.linalg.lstsq(scaled[:, kept], np.ones(len(seconds)), rcond=None)[0]
        if found.min() >= 0.0:
            prices[kept] = found
            break
        kept.pop(int(found.argmin()))
    return prices


def _floats(values: Float64Array) -> tuple[float, ...]:
    return tuple(float(value) for value in values)

"""Costs from measured seconds: least squares of relative errors, with no price below zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.tuning.costs import CopierName, Costs, Curve, FlatCosts, HostCosts, Shape, StridedCosts, driver_copies

Float64Array = npt.NDArray[np.float64]


class Sample(NamedTuple):
    copier: CopierName
    shape: Shape
    seconds: float


def fit(link: float, samples: Sequence[Sample]) -> Costs:
    """Return the costs of one direction from samples.

    Args:
        link: bytes per second of one large contiguous copy.
        samples: "strided" needs two heights (rows per operation) for each row size, else the price of an operation
            stays zero there. All rows of a "batch" or "loop" sample have one size.
    """
    strided = [each for each in samples if each.copier == "strided"]
    points: dict[str, dict[int, dict[int, float]]] = {}  # by copier, bytes and number of copies
    for copier, shape, seconds in samples:
        if copier != "strided":
            points.setdefault(copier, {}).setdefault(shape.nbytes // shape.rows, {})[shape.rows] = seconds
    flat = {}
    for name, sizes in points.items():
        curves = [Curve(nbytes, *zip(*sorted(sizes[nbytes].items()), strict=True)) for nbytes in sorted(sizes)]
        flat[name] = FlatCosts(tuple(curves))
    return Costs(link, fit_strided(strided) if strided else None, flat)


def fit_strided(samples: Sequence[Sample]) -> StridedCosts:
    """Return one fixed cost, and for each row size the price of an operation and of a row."""
    shapes = [each.shape for each in samples]
    numbers = np.array([(shape.nbytes // shape.rows, shape.operations, shape.rows) for shape in shapes])
    widths, sizes = numbers[:, 0], np.unique(numbers[:, 0])
    columns = np.zeros((len(samples), 1 + 2 * len(sizes)))
    columns[:, 0] = 1.0
    for index, size in enumerate(sizes):
        here = widths == size
        columns[here, 1 + 2 * index : 3 + 2 * index] = numbers[here, 1:]
    prices = solve(columns, np.array([each.seconds for each in samples]))
    row_bytes = tuple(int(size) for size in sizes)
    return StridedCosts(float(prices[0]), row_bytes, _floats(prices[1::2]), _floats(prices[2::2]))


def fit_host(samples: Sequence[Sample]) -> dict[str, HostCosts]:
    """Return the costs by copier, from seconds of the host."""
    found = {}
    for copier in dict.fromkeys(each.copier for each in samples):
        own = [each for each in samples if each.copier == copier]
        columns = np.ones((len(own), 2))
        columns[:, 1] = [driver_copies(copier, each.shape) for each in own]
        found[str(copier)] = HostCosts(*_floats(solve(columns, np.array([each.seconds for each in own]))))
    return found


def solve(columns: Float64Array, seconds: Float64Array) -> Float64Array:
    """Return prices, none below zero, with the least sum of squared relative errors of `columns @ prices` to `seconds`.

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

"""The time a transfer takes on the GPU, by copier: measured points, and straight lines between them.

Costs add up: a transfer has a price, each of its copies has one, and each byte. So everything between measured points
is linear, in bytes and in counts: exact wherever one price rules, too high only near a bend. (On logarithms, 10 us plus
0.1 us a copy would come out 12% too high midway between 64 and 512 copies.)

    batch, loop   a curve over the number of copies for each of several sizes of a copy; linear between sizes
    strided       fixed + operations x a(row bytes) + rows x b(row bytes), fitted; a and b linear between sizes
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Literal, NamedTuple, TypeAlias, get_args

from kvoffload.planning.transfer_plan import Direction

CopierName: TypeAlias = Literal["strided", "pack", "batch", "loop"]
COPIERS: tuple[CopierName, ...] = get_args(CopierName)

_LEAST_SECONDS = 1e-7  # a profile may hold zeros, and times are divided by


class Shape(NamedTuple):
    """The size of a transfer, in the numbers that its cost depends on. All are at least 1.

    Attributes:
        direction: store or load.
        blocks: device blocks.
        plane_blocks: blocks x planes.
        operations: strided operations, after adjacent blocks of a slot were merged.
        rows: rows of all operations together; "batch" and "loop" make a contiguous copy of each.
        nbytes: payload bytes.
    """

    direction: Direction
    blocks: int
    plane_blocks: int
    operations: int
    rows: int
    nbytes: int


class Situation(StrEnum):
    """What else the GPU and its link do during a transfer. IDLE: nothing. LARGE_PRODUCTS, SMALL_PRODUCTS: products of
    matrices. BOTH_DIRECTIONS: contiguous copies in the other direction.
    """

    IDLE = "idle"
    LARGE_PRODUCTS = "large products"
    SMALL_PRODUCTS = "small products"
    BOTH_DIRECTIONS = "both directions"


CONCURRENT_COMPUTE = (Situation.LARGE_PRODUCTS, Situation.SMALL_PRODUCTS)
FIELD = (*CONCURRENT_COMPUTE, Situation.BOTH_DIRECTIONS)


class HostCosts(NamedTuple):
    """Host seconds of a submission: a fixed part, and a part for each copy that the driver gets.

    Such a copy is an operation for "strided", a row for "batch" and "loop".
    """

    fixed: float
    copy: float


def driver_copies(copier: CopierName, shape: Shape) -> int:
    return shape.operations if copier == "strided" else shape.rows


class Curve(NamedTuple):
    """Seconds for `counts` copies (ascending) of `nbytes` each."""

    nbytes: int
    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, count: float) -> float:
        return along(self.counts, self.seconds, count)


def along(points: Sequence[float], values: Sequence[float], x: float) -> float:
    """Return the value at `x` on the straight lines through `(points, values)`, points ascending.

    Beyond the last point the last line goes on, but never falls. Below the first point the first line goes on, but
    stays between a constant and a proportional cost. With a single point the cost is proportional.
    """
    if len(points) == 1:
        return values[0] * x / points[0]
    upper = min(max(bisect_left(points, x), 1), len(points) - 1)
    return _line(points[upper - 1], values[upper - 1], points[upper], values[upper], x)


def _line(x0: float, y0: float, x1: float, y1: float, x: float) -> float:
    y = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    if x < x0:
        return min(max(y, y0 * x / x0), y0)
    return max(y, y1) if x > x1 else y


@dataclass(frozen=True, slots=True)
class FlatCosts:
    """Contiguous copies, submitted one by one or in batches; `curves` by ascending bytes of a copy, at least one."""

    curves: tuple[Curve, ...]

    def seconds(self, nbytes: float, count: float) -> float:
        """Return the seconds for `count` copies of `nbytes` each."""
        curves = self.curves
        if len(curves) == 1:
            return curves[0].at(count) * nbytes / curves[0].nbytes
        upper = 1
        while upper < len(curves) - 1 and curves[upper].nbytes < nbytes:
            upper += 1
        low, high = curves[upper - 1], curves[upper]
        return _line(low.nbytes, low.at(count), high.nbytes, high.at(count), nbytes)


@dataclass(frozen=True, slots=True)
class StridedCosts:
    """`fixed + operations * operation_seconds + rows * row_seconds`; the last two by `row_bytes`, ascending."""

    fixed: float
    row_bytes: tuple[int, ...]
    operation_seconds: tuple[float, ...]
    row_seconds: tuple[float, ...]

    def seconds(self, row_bytes: float, rows: float, operations: float) -> float:
        a = along(self.row_bytes, self.operation_seconds, row_bytes)
        b = along(self.row_bytes, self.row_seconds, row_bytes)
        return self.fixed + operations * a + rows * b


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of all copiers in one direction.

    Attributes:
        link: bytes per second of one large contiguous copy.
        flat: of "batch" and "loop".
    """

    link: float
    strided: StridedCosts | None = None
    flat: dict[str, FlatCosts] = field(default_factory=dict)

    def seconds(self, copier: CopierName, shape: Shape) -> float:
        """Return the expected seconds; infinity for a copier that was not measured.

        Never less than `shape.nbytes / link`, whatever the straight lines say.
        """
        if copier == "strided":
            strided = self.strided
            row_bytes = shape.nbytes / shape.rows
            seconds = inf if strided is None else strided.seconds(row_bytes, shape.rows, shape.operations)
        else:
            flat = self.flat.get(copier)
            seconds = inf if flat is None else flat.seconds(shape.nbytes / shape.rows, shape.rows)
        return max(seconds, shape.nbytes / self.link, _LEAST_SECONDS)

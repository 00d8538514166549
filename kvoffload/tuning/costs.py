"""The time a transfer takes on the GPU, by copy method: measured points, and straight lines between them.

Costs add up: a transfer has a price, each of its copies has one, and each byte. So everything between measured points
is linear, in bytes and in counts: exact wherever one price rules, too high only near a bend. (On logarithms, 10 us plus
0.1 us a copy would come out 12% too high midway between 64 and 512 copies.)

    batch, loop, gather   a curve over the number of copies for each of several sizes of a copy; linear between sizes
    strided               fixed + operations x a(row bytes) + rows x b(row bytes), fitted; a and b linear between sizes
    split                 blocks divided between kernel and copy engine so that both would end together, each as if
                          alone, and no sooner than the link allows; that times a stretch for the row size, plus a price
                          for joining two streams
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Literal, NamedTuple, TypeAlias, get_args

from kvoffload.planning.transfer_plan import Direction

CopierName: TypeAlias = Literal["strided", "batch", "loop", "gather", "split"]
COPIERS: tuple[CopierName, ...] = get_args(CopierName)
WITH_PROGRAMS: tuple[CopierName, ...] = ("gather", "split")  # those that launch a kernel

_LEAST_SECONDS = 1e-7  # a profile may hold zeros, and times are divided by


class CopyMethod(NamedTuple):
    """How a transfer is copied.

    Attributes:
        copier: "strided": the copy engine does a strided copy for each block. "batch", "loop": a contiguous copy for
            each row, many submitted at once ("batch") or one by one ("loop"). "gather": a kernel copies. "split": a
            kernel copies some of the blocks, strided copies the others.
        programs: how many programs the kernel has; each takes one multiprocessor. 0 without a kernel.
        share: the fraction of the blocks that the kernel copies: 1.0 for gather, between 0 and 1 for split, else 0.0.
    """

    copier: CopierName
    programs: int = 0
    share: float = 0.0

    @property
    def label(self) -> str:
        """Without the share: "strided", "gather 4"."""
        return f"{self.copier} {self.programs}" if self.programs else self.copier

    def __str__(self) -> str:
        if not self.programs:
            return self.copier
        return f"{self.copier} with {self.programs} program{'s' if self.programs > 1 else ''}"


CopierChoice: TypeAlias = CopierName | CopyMethod | None  # None: the profile's choice


class Shape(NamedTuple):
    """The size of a transfer, in the numbers that its cost depends on. All are at least 1.

    Attributes:
        direction: store or load.
        blocks: device blocks.
        plane_blocks: blocks x planes; the gather kernel copies them one by one.
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

    Such a copy is an operation for "strided", a row for "batch" and "loop", a block for "gather" and "split".
    """

    fixed: float
    copy: float


def driver_copies(copier: CopierName, shape: Shape) -> int:
    return shape.operations if copier == "strided" else shape.rows if copier in ("batch", "loop") else shape.blocks


class Curve(NamedTuple):
    """Seconds for `counts` copies (ascending) of `nbytes` each."""

    nbytes: int
    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, count: float) -> float:
        return along(self.counts, self.seconds, count)


def along(points: Sequence[float], values: Sequence[float], x: float) -> float:
    """The value at `x` on the straight lines through `(points, values)`, points ascending.

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
        """For `count` copies of `nbytes` each."""
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
class SplitCosts:
    """The cost of dividing blocks between kernel and copy engine: `ideal * stretch + extra`; and the kernel's share.

    Attributes:
        row_bytes: ascending; `stretch` and `lean` have a value for each.
        lean: the best share for the kernel, as a multiple of the share with which kernel and copy engine would end
            together if neither slowed the other down.
    """

    extra: float
    row_bytes: tuple[int, ...]
    stretch: tuple[float, ...]
    lean: tuple[float, ...]

    def seconds(self, row_bytes: float, ideal: float) -> float:
        return self.extra + ideal * self._at(row_bytes, self.stretch)

    def lean_at(self, row_bytes: float) -> float:
        return self._at(row_bytes, self.lean)

    def _at(self, row_bytes: float, values: tuple[float, ...]) -> float:
        return along(self.row_bytes, values, min(max(row_bytes, self.row_bytes[0]), self.row_bytes[-1]))


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of all copy methods in one direction.

    Attributes:
        link: bytes per second of one large contiguous copy.
        flat: of "batch" and "loop".
        gather: by the number of programs.
        split: by the number of programs.
    """

    link: float
    strided: StridedCosts | None = None
    flat: dict[str, FlatCosts] = field(default_factory=dict)
    gather: dict[int, FlatCosts] = field(default_factory=dict)
    split: dict[int, SplitCosts] = field(default_factory=dict)

    def seconds(self, method: CopyMethod, shape: Shape) -> float:
        """Expected seconds; infinity for a copy method that was not measured. A split without a share uses the best.

        Never less than `shape.nbytes / link`, whatever the straight lines say.
        """
        return max(self._seconds(method, shape), shape.nbytes / self.link, _LEAST_SECONDS)

    def _seconds(self, method: CopyMethod, shape: Shape) -> float:
        if method.copier == "strided":
            return self._strided(shape, 1.0)
        if method.copier == "gather":
            return self._gather(method.programs, shape, 1.0)
        if method.copier == "split":
            return self._split(method.programs, shape, method.share or self.split_share(shape, method.programs))
        costs = self.flat.get(method.copier)
        return inf if costs is None else costs.seconds(shape.nbytes / shape.rows, shape.rows)

    def split_share(self, shape: Shape, programs: int, lean: float | None = None) -> float:
        """The fraction of the blocks for the kernel with which a split ends soonest; 0.0 if a split makes no sense.

        The times of kernel and copy engine are near straight lines over their share; where the lines cross, both would
        end together. The share that was measured to be best is `lean` times that (None: as `split` says).
        """
        if shape.blocks < 2:
            return 0.0
        alone, least = self._strided(shape, 1.0), self._strided(shape, 0.0)
        kernel, start = self._gather(programs, shape, 1.0), self._gather(programs, shape, 1.0 / shape.plane_blocks)
        slopes = (alone - least) + (kernel - start)
        if not 0.0 < slopes < inf:
            return 0.0
        if lean is None:
            costs = self.split.get(programs)
            lean = 1.0 if costs is None else costs.lean_at(shape.nbytes / shape.rows)
        share = min(max((alone - start) / slopes * lean, 0.0), 1.0)  # a slope near 0 makes it infinite
        return min(max(round(share * shape.blocks), 1), shape.blocks - 1) / shape.blocks

    def ideal_split(self, shape: Shape, programs: int, share: float) -> float:
        """Seconds if kernel and copy engine did not slow each other down, and only the link limited both."""
        kernel, engine = self._gather(programs, shape, share), self._strided(shape, 1.0 - share)
        return max(kernel, engine, self._strided(shape, 0.0) + shape.nbytes / self.link)

    def _split(self, programs: int, shape: Shape, share: float) -> float:
        costs = self.split.get(programs)
        if costs is None or not 0.0 < share < 1.0:
            return inf
        return costs.seconds(shape.nbytes / shape.rows, self.ideal_split(shape, programs, share))

    def _strided(self, shape: Shape, share: float) -> float:
        if self.strided is None:
            return inf
        return self.strided.seconds(shape.nbytes / shape.rows, shape.rows * share, shape.operations * share)

    def _gather(self, programs: int, shape: Shape, share: float) -> float:
        """Between measured numbers of programs linear, beyond them as the highest; infinity below them."""
        nbytes, count = shape.nbytes / shape.plane_blocks, shape.plane_blocks * share
        costs = self.gather.get(programs)
        if costs is not None:
            return costs.seconds(nbytes, count)
        below = max((each for each in self.gather if each < programs), default=None)
        if below is None:
            return inf
        above = min((each for each in self.gather if each > programs), default=below)
        low, high = self.gather[below].seconds(nbytes, count), self.gather[above].seconds(nbytes, count)
        return low if below == above else _line(below, low, above, high, programs)

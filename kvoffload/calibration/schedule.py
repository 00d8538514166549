"""What is timed for a profile: which transfers, on which planes. Pure: nothing is timed here.

scattered planes   batch, loop, gather: sizes of a copy x copies             -> curves
folded planes      strided: sizes of a row x rows in an operation x operations -> fitted prices
folded planes      split: sizes of a row x blocks x shares for the kernel    -> fitted, and the best share
both               sizes in between, for the errors alone
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvoffload.calibration.compute import MATMUL, SMALL, Product
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning.costs import CopyMethod, Costs, Shape

_LEANS = (0.8, 1.0, 1.2, 1.4)


class Case(NamedTuple):
    """What to time: a way, and the blocks of the transfer."""

    method: CopyMethod
    blocks: int


class Bed(NamedTuple):
    """Planes, and what is timed on them in each direction.

    Attributes:
        folds: whether they do; a single plane does.
    """

    folds: bool
    planes: int
    block_bytes: int
    cases: Mapping[Direction, list[Case]]

    def shape(self, direction: Direction, blocks: int) -> Shape:
        """Of a transfer of so many blocks, one a slot."""
        pieces = blocks * self.planes
        operations = blocks if self.folds else pieces
        return Shape(direction, blocks, pieces, operations, pieces, pieces * self.block_bytes)

    @property
    def most_blocks(self) -> int:
        return max((case.blocks for cases in self.cases.values() for case in cases), default=1)

    @property
    def most_programs(self) -> int:
        return max((case.method.programs for cases in self.cases.values() for case in cases), default=0)


class Scale(NamedTuple):
    """How much is measured.

    Attributes:
        planes: of most beds.
        scattered_bytes, pitch: of planes that do not fold, and from plane to plane of those that do.
        most_bytes: of a transfer; larger ones are left out, for all lines are straight there.
        link_bytes: of a block of the big copy.
        copy_bytes, copies: of batch and gather.
        loop_bytes, loop_copies: of the loop, which is slow.
        row_bytes, heights, operations: of strided copies; a height is rows in an operation.
        wide_bytes, wide_operations: of rows that are operations of their own.
        split_bytes, split_blocks: of splits.
        check_bytes, check_blocks: for the errors.
        gather_programs, split_programs: of the kernel.
        beside_bytes, beside_blocks: of the transfers beside the product.
        product, products: what is computed, and how many times in a row.
        repeats, hurried: rounds in the first `seconds`, and after that, so that a slow machine has a profile too.
    """

    planes: int
    scattered_bytes: int
    pitch: int
    most_bytes: int
    link_bytes: int
    copy_bytes: tuple[int, ...]
    copies: tuple[int, ...]
    loop_bytes: tuple[int, ...]
    loop_copies: tuple[int, ...]
    row_bytes: tuple[int, ...]
    heights: tuple[int, ...]
    operations: tuple[int, ...]
    wide_bytes: tuple[int, ...]
    wide_operations: tuple[int, ...]
    split_bytes: tuple[int, ...]
    split_blocks: tuple[int, ...]
    check_bytes: tuple[int, ...]
    check_blocks: tuple[int, ...]
    gather_programs: tuple[int, ...]
    split_programs: tuple[int, ...]
    beside_bytes: int
    beside_blocks: int
    product: Product
    products: int
    repeats: int
    hurried: int
    seconds: float


_KIB = 1 << 10
_MIB = 1 << 20
FULL = Scale(
    planes=64,
    scattered_bytes=4 * _MIB,
    pitch=32 * _MIB,
    most_bytes=128 * _MIB,
    link_bytes=64 * _MIB,
    copy_bytes=tuple(each * _KIB for each in (1, 2, 4, 8, 16, 24, 32, 64, 256)),
    copies=(64, 128, 256, 512, 1024, 4096),
    loop_bytes=tuple(each * _KIB for each in (4, 64, 1024)),
    loop_copies=(64, 512),
    row_bytes=tuple(each * _KIB for each in (1, 2, 4, 8, 16, 32, 64, 256, 1024)),
    heights=(8, 64),
    operations=(1, 8, 64),
    wide_bytes=tuple(each * _KIB for each in (64, 256, 1024)),
    wide_operations=(16, 128),
    split_bytes=tuple(each * _KIB for each in (2, 4, 8, 16, 32, 64)),
    split_blocks=(8, 32, 128),
    check_bytes=tuple(each * _KIB for each in (3, 6, 12, 48)),
    check_blocks=(3, 11, 40),
    gather_programs=(1, 2, 3, 4, 8),
    split_programs=(1, 2),
    beside_bytes=8 * _KIB,
    beside_blocks=64,
    product=MATMUL,
    products=24,
    repeats=5,
    hurried=2,
    seconds=12.0,
)
MINIATURE = Scale(  # for the simulated device
    planes=4,
    scattered_bytes=8 * _KIB,
    pitch=16 * _KIB,
    most_bytes=4 * _KIB,
    link_bytes=16 * _KIB,
    copy_bytes=(64, 256),
    copies=(4, 16),
    loop_bytes=(64, 256),
    loop_copies=(4, 16),
    row_bytes=(64, 256),
    heights=(2, 4),
    operations=(1, 4),
    wide_bytes=(256,),
    wide_operations=(2, 4),
    split_bytes=(64, 256),
    split_blocks=(2, 4),
    check_bytes=(128,),
    check_blocks=(3,),
    gather_programs=(1, 2),
    split_programs=(1, 2),
    beside_bytes=64,
    beside_blocks=4,
    product=SMALL,
    products=2,
    repeats=1,
    hurried=1,
    seconds=600.0,
)


def restrict(scale: Scale, missing: Mapping[str, str]) -> Scale:
    """Without what the kernel would do, where it cannot run."""
    gather = () if "gather" in missing else scale.gather_programs
    split = () if "split" in missing else scale.split_programs
    return scale._replace(gather_programs=gather, split_programs=split)


def flat_beds(scale: Scale, missing: Mapping[str, str]) -> Iterator[Bed]:
    """For the curves of batch, gather and loop."""
    methods = [CopyMethod("gather", programs, 1.0) for programs in scale.gather_programs]
    methods += [] if "batch" in missing else [CopyMethod("batch")]
    for nbytes in scale.copy_bytes if methods else ():
        yield _flat_bed(scale, nbytes, scale.copies, methods)
    for nbytes in scale.loop_bytes:
        yield _flat_bed(scale, nbytes, scale.loop_copies, [CopyMethod("loop")])


def _flat_bed(scale: Scale, nbytes: int, copies: tuple[int, ...], methods: list[CopyMethod]) -> Bed:
    counts = [count // scale.planes for count in copies if count * nbytes <= scale.most_bytes]
    return same_cases(False, scale.planes, nbytes, [Case(method, count) for count in counts for method in methods])


def strided_beds(scale: Scale) -> Iterator[Bed]:
    """For the prices of operations and rows."""
    for nbytes in scale.row_bytes:
        for height in scale.heights:
            counts = [count for count in scale.operations if count * height * nbytes <= scale.most_bytes]
            yield same_cases(True, height, nbytes, [Case(CopyMethod("strided"), count) for count in counts])
    for nbytes in scale.wide_bytes:
        yield same_cases(True, 1, nbytes, [Case(CopyMethod("strided"), count) for count in scale.wide_operations])


def same_cases(folds: bool, planes: int, block_bytes: int, cases: list[Case]) -> Bed:
    """A bed with the same cases in both directions."""
    return Bed(folds, planes, block_bytes, dict.fromkeys(Direction, cases))


def split_beds(scale: Scale, costs: Mapping[Direction, Costs]) -> Iterator[Bed]:
    """Shares around the one that `costs` of strided and gather would balance."""
    for nbytes in scale.split_bytes if scale.split_programs else ():
        bed = same_cases(True, scale.planes, nbytes, [])

        yield bed._replace(cases={direction: _splits(scale, bed, direction, each) for direction, each in costs.items()})


def _splits(scale: Scale, bed: Bed, direction: Direction, costs: Costs) -> list[Case]:
    found = []
    for shape in _shapes(scale, bed, direction, scale.split_blocks):
        for programs in scale.split_programs:
            shares = {costs.split_share(shape, programs, lean) for lean in _LEANS}
            found += [
                Case(CopyMethod("split", programs, share), shape.blocks) for share in sorted(shares) if 0 < share < 1
            ]
    return found


def _shapes(scale: Scale, bed: Bed, direction: Direction, blocks: tuple[int, ...]) -> list[Shape]:
    every = [bed.shape(direction, count) for count in blocks]
    return [shape for shape in every if shape.nbytes <= scale.most_bytes]


def check_beds(scale: Scale, missing: Mapping[str, str], costs: Mapping[Direction, Costs]) -> Iterator[Bed]:
    """Sizes and counts between those that `costs` were made from."""
    apart = [CopyMethod("gather", programs, 1.0) for programs in scale.gather_programs]
    apart += [] if "batch" in missing else [CopyMethod("batch")]
    together = [CopyMethod("strided"), *(CopyMethod("split", programs) for programs in scale.split_programs)]
    for nbytes in scale.check_bytes:
        for folds, methods in ((False, apart), (True, together)):
            bed = same_cases(folds, scale.planes, nbytes, [])
            cases = {direction: _checks(scale, bed, direction, each, methods) for direction, each in costs.items()}
            yield bed._replace(cases=cases)


def _checks(scale: Scale, bed: Bed, direction: Direction, costs: Costs, methods: list[CopyMethod]) -> list[Case]:
    cases = [
        Case(_with_share(method, costs, shape), shape.blocks)
        for shape in _shapes(scale, bed, direction, scale.check_blocks)
        for method in methods
    ]
    return [case for case in cases if case.method.copier != "split" or 0 < case.method.share < 1]


def _with_share(method: CopyMethod, costs: Costs, shape: Shape) -> CopyMethod:
    return method._replace(share=costs.split_share(shape, method.programs)) if method.copier == "split" else method

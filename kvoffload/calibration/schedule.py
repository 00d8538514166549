"""Which transfers are timed for a profile, and on which planes. Pure: no device is used here.

scattered planes   batch, loop: sizes of a copy x copies                       -> curves
folded planes      strided: sizes of a row x rows in an operation x operations -> fitted prices
both               sizes in between, for the errors alone
scattered planes   pack, with the codec and without: what the codec brings

`FieldScale` says which transfers are also timed in every situation of the field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from kvoffload.calibration.compute import LARGE, MEDIUM, SMALL, Product
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning.costs import CopierName, Shape


class TrialSet(NamedTuple):
    """Transfers by one copier over some planes, to time in each direction. The planes fold for "strided" alone.

    Attributes:
        blocks: how many each transfer has.
    """

    copier: CopierName
    planes: int
    block_bytes: int
    blocks: Sequence[int]

    @property
    def folds(self) -> bool:
        return self.copier == "strided"

    def shape(self, direction: Direction, blocks: int) -> Shape:
        """Return the shape of a transfer of `blocks` blocks, one a slot."""
        copies = blocks * self.planes
        operations = blocks if self.folds else copies
        return Shape(direction, blocks, copies, operations, copies, copies * self.block_bytes)

    @property
    def most_blocks(self) -> int:
        return max(self.blocks, default=1)


_KIB = 1 << 10
_MIB = 1 << 20


def _kib(*sizes: int) -> tuple[int, ...]:
    return tuple(size * _KIB for size in sizes)


class FieldScale(NamedTuple):
    """Which of the transfers are timed in the field. The defaults are for a GPU.

    Attributes:
        copy_bytes, copies: of batch and loop.
        row_bytes, operations: of strided copies.
        large, small: the products that run meanwhile.
        opposite_bytes: of the contiguous copies in the other direction.
        repeats: rounds.
    """

    copy_bytes: tuple[int, ...] = _kib(4, 16, 64, 256, 1024)
    copies: tuple[int, ...] = (64, 128, 1024, 4096, 16384)
    row_bytes: tuple[int, ...] = _kib(4, 8, 16, 24, 32, 64, 1024)
    operations: tuple[int, ...] = (1, 8, 64)
    large: Product = LARGE
    small: Product = MEDIUM
    opposite_bytes: int = 32 * _MIB
    repeats: int = 3

    def has(self, trial_set: TrialSet, blocks: int) -> bool:
        """Return whether the transfer of so many blocks of a set is timed in the field."""
        if trial_set.folds:
            return trial_set.block_bytes in self.row_bytes and blocks in self.operations
        if trial_set.copier == "pack" or trial_set.planes == 1:  # one plane: the contiguous copy, and few copies
            return True
        return trial_set.block_bytes in self.copy_bytes and blocks * trial_set.planes in self.copies


class Scale(NamedTuple):
    """How much is measured. The defaults are for a GPU.

    Attributes:
        planes: of most sets.
        scattered_bytes: size of a plane that does not fold.
        pitch: bytes from plane to plane of planes that fold; no power of two, since few real ones are. Both sizes are
            large, since transfers beyond the reach of the GPU's TLBs are slower.
        most_bytes: larger transfers are left out, since all lines are straight there.
        link_bytes: size of the contiguous copy.
        copy_bytes, copies: of batch.
        few_bytes, few: of batch, for blocks that are one range each.
        loop_bytes, loop_copies: of the loop, which is slow.
        row_bytes, heights, operations: of strided copies; a height is rows in an operation.
        wide_bytes, wide_operations: of strided operations of one row.
        check_bytes, check_blocks: for the errors.
        packed: bytes of a block and blocks of the transfers by pack, with the codec and without.
        field: the transfers beside compute and in both directions.
        repeats, hurried: rounds in the first `seconds`, and after that, so that a slow machine gets a profile, too.
    """

    planes: int = 64
    scattered_bytes: int = 32 * _MIB
    pitch: int = 33 * _MIB + 256 * _KIB
    most_bytes: int = 128 * _MIB
    link_bytes: int = 64 * _MIB
    copy_bytes: tuple[int, ...] = _kib(1, 2, 4, 8, 16, 24, 32, 64, 256, 1024)
    copies: tuple[int, ...] = (64, 128, 256, 512, 1024, 4096, 16384)
    few_bytes: tuple[int, ...] = _kib(64, 256, 1024)
    few: tuple[int, ...] = (1, 8, 32)
    loop_bytes: tuple[int, ...] = _kib(4, 64, 1024)
    loop_copies: tuple[int, ...] = (64, 512)
    row_bytes: tuple[int, ...] = _kib(1, 2, 4, 8, 16, 24, 32, 64, 256, 1024)
    heights: tuple[int, ...] = (8, 64)
    operations: tuple[int, ...] = (1, 8, 64)
    wide_bytes: tuple[int, ...] = _kib(64, 256, 1024)
    wide_operations: tuple[int, ...] = (16, 128)
    check_bytes: tuple[int, ...] = _kib(3, 6, 12, 48)
    check_blocks: tuple[int, ...] = (3, 11, 40)
    packed: tuple[int, int] = (32 * _KIB, 32)
    field: FieldScale = FieldScale()
    repeats: int = 5
    hurried: int = 2
    seconds: float = 20.0


FULL = Scale()
MINIATURE = Scale(  # for the simulated device
    planes=4, scattered_bytes=8 * _KIB, pitch=16 * _KIB,
    most_bytes=4 * _KIB, link_bytes=16 * _KIB,
    copy_bytes=(64, 256), copies=(4, 16),
    few_bytes=(256,), few=(1, 2),
    loop_bytes=(64, 256), loop_copies=(4, 16),
    row_bytes=(64, 256), heights=(2, 4), operations=(1, 4),
    wide_bytes=(256,), wide_operations=(2, 4),
    check_bytes=(128,), check_blocks=(3,),
    packed=(512, 2),
    field=FieldScale(
        copy_bytes=(64,), copies=(4,), row_bytes=(64,), operations=(1,),
        large=SMALL, small=SMALL, opposite_bytes=4 * _KIB, repeats=1,
    ),
    repeats=1, hurried=1, seconds=600.0,
)  # fmt: skip


def flat_sets(scale: Scale, missing: Mapping[str, str]) -> Iterator[TrialSet]:
    """Yield the sets for the curves of batch and loop."""
    if "batch" not in missing:
        for nbytes in scale.copy_bytes:
            yield _flat_set(scale, nbytes, scale.copies, "batch")
        for nbytes in scale.few_bytes:
            yield TrialSet("batch", 1, nbytes, scale.few)
    for nbytes in scale.loop_bytes:
        yield _flat_set(scale, nbytes, scale.loop_copies, "loop")


def _flat_set(scale: Scale, nbytes: int, copies: tuple[int, ...], copier: CopierName) -> TrialSet:
    counts = [count // scale.planes for count in copies if count * nbytes <= scale.most_bytes]
    return TrialSet(copier, scale.planes, nbytes, counts)


def strided_sets(scale: Scale) -> Iterator[TrialSet]:
    """Yield the sets for the prices of operations and rows."""
    for nbytes in scale.row_bytes:
        for height in scale.heights:
            counts = [count for count in scale.operations if count * height * nbytes <= scale.most_bytes]
            yield TrialSet("strided", height, nbytes, counts)
    for nbytes in scale.wide_bytes:
        yield TrialSet("strided", 1, nbytes, scale.wide_operations)


def check_sets(scale: Scale, missing: Mapping[str, str]) -> Iterator[TrialSet]:
    """Yield transfers of other sizes and counts than the costs were fitted to."""
    copiers: tuple[CopierName, ...] = ("strided",) if "batch" in missing else ("batch", "strided")
    for nbytes, copier in product(scale.check_bytes, copiers):
        counts = [count for count in scale.check_blocks if count * scale.planes * nbytes <= scale.most_bytes]
        yield TrialSet(copier, scale.planes, nbytes, counts)

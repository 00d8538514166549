"""Loads in parts, such as one for each layer: the planes of each part, and groups folded by parts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import SupportsIndex, TypeAlias

import numpy as np

from kvoffload.errors import LayoutError
from kvoffload.internal.checks import shown
from kvoffload.layout.fold import FoldedGroup, fold, fold_group
from kvoffload.layout.layout import KVLayout

Parts: TypeAlias = tuple[tuple[int, ...], ...]  # indices of the planes of each part
PartsLike: TypeAlias = SupportsIndex | Iterable[Iterable[SupportsIndex]] | None  # what users give as `parts`

_KEPT_FOLDS = 64
_WANTED = "parts must be None, a number of parts, or for each part the indices of its planes"


def as_parts(parts: PartsLike, num_planes: int) -> Parts | None:
    """Return the planes of each part; None if there is only one part.

    Args:
        parts: None; or a number of equal parts, in the order of the planes; or the indices of the planes of each part.
        num_planes: how many the group has.

    Raises:
        LayoutError: parts of unequal size, or not every plane in exactly one part.
        TypeError: any other value, booleans included; the message says what `parts` may be.
    """
    if parts is None:
        return None
    if isinstance(parts, bool | str | bytes):
        raise TypeError(f"{_WANTED}; got {shown(parts)}")
    try:
        count = operator.index(parts)  # type: ignore[arg-type]
    except TypeError:
        try:
            given = [list(planes) for planes in parts]  # type: ignore[union-attr]
            if any(isinstance(plane, bool) for planes in given for plane in planes):
                raise TypeError
            found: Parts = tuple(tuple(map(operator.index, planes)) for planes in given)
        except TypeError:
            raise TypeError(f"{_WANTED}; got {shown(parts)}") from None
        _check_planes(found, num_planes)
    else:
        found = _equal_parts(count, num_planes)
    return None if len(found) == 1 else found


@lru_cache(maxsize=_KEPT_FOLDS)
def _equal_parts(count: int, num_planes: int) -> Parts:
    if count < 1 or num_planes % count:
        divisors = ", ".join(str(each) for each in range(1, num_planes + 1) if num_planes % each == 0)
        raise LayoutError(
            f"parts={shown(count)} does not divide the group's {num_planes} planes: give one of {divisors}, or list "
            "the planes of each part"
        )
    size = num_planes // count
    return tuple(tuple(range(first, first + size)) for first in range(0, num_planes, size))


def _check_planes(parts: Parts, num_planes: int) -> None:
    planes = list(chain.from_iterable(parts))
    if all(parts) and sorted(planes) == list(range(num_planes)):
        return
    for number, each in enumerate(parts):
        if not each:
            raise LayoutError(f"parts[{number}] has no planes; leave it out")
        outside = [plane for plane in each if not 0 <= plane < num_planes]
        if outside:
            raise LayoutError(
                f"parts[{number}] names plane {shown(outside[0])}, and the group has planes [0, {num_planes})"
            )
    times = np.bincount(planes, minlength=num_planes)
    wrong = int(np.flatnonzero(times != 1)[0])
    what = "is in no part" if times[wrong] == 0 else f"is named {times[wrong]} times"
    raise LayoutError(f"plane {wrong} {what}; parts must name each of the group's {num_planes} planes once")


class Folds:
    """The groups of a layout, folded. Arguments as for `kvoffload.layout.fold.fold`.

    Attributes:
        groups: each group with all planes in one part.
        of: `of(index of a group, parts)` is the group folded in these parts.
    """

    def __init__(self, layout: KVLayout, allocations: Sequence[Sequence[int]]) -> None:
        self.groups = fold(layout, allocations)

        def of(group: int, parts: Parts) -> FoldedGroup:
            return fold_group(layout.groups[group], layout.blocks_per_slot, allocations[group], parts)

        self.of: Callable[[int, Parts], FoldedGroup] = lru_cache(maxsize=_KEPT_FOLDS)(of)

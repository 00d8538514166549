"""Block ids and slot ids of the caller, as arrays that the caller cannot change."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import numpy as np

from kvoffload.errors import LayoutError
from kvoffload.internal.checks import shown
from kvoffload.internal.types import Ids, Int64Array

_FEW = 32
_INT = frozenset((int,))
_INT64 = np.dtype(np.int64)


def as_ids(name: str, ids: Ids, limit: int) -> Int64Array:
    """Return a copy of `ids`: int64, (n,), C-contiguous, every value in `[0, limit)`; n may be 0.

    The result never shares memory with `ids`: a transfer may read it long after the call has returned.

    Args:
        name: the argument's name, for messages.
        ids: a list, a tuple, a range, or a one-dimensional array of integers. An empty one may have any type.
    """
    kind: object = type(ids)
    values: Any = ids
    if kind is np.ndarray and values.dtype is _INT64 and values.ndim == 1:  # as most callers have them
        copied: Int64Array = values.copy()
    elif kind is range:
        return _of_range(name, values, limit)
    elif (kind is list or kind is tuple) and _INT.issuperset(map(type, values)):
        try:
            copied = np.array(values, dtype=np.int64)
        except OverflowError:
            _refuse_outside(name, values, limit)
    else:
        if kind is not np.ndarray:
            values = _of_others(name, ids)
        if values.ndim != 1:
            raise LayoutError(f"{name} must be one-dimensional, got shape {values.shape}")
        if values.dtype.kind not in "iu" and values.size:
            remedy = "pass a list of ints or an integer array"
            if values.dtype.kind == "b":
                remedy = f"for the ids where a mask is True pass numpy.flatnonzero({name})"
            elif values.dtype.kind in "fO":
                remedy = f"if they are integers, convert them: numpy.array({name}, dtype=numpy.int64)"
            raise LayoutError(f"{name} must hold integers, got dtype {values.dtype}; {remedy}")
        copied = np.array(values, np.int64)
    count = len(copied)
    if count > _FEW:
        if int(np.maximum.reduce(copied.view(np.uint64))) >= limit:  # unsigned, negative ids are huge
            _refuse_outside(name, values, limit)
    elif count:  # Python compares these sooner than numpy
        listed = sorted(copied.tolist())
        if listed[0] < 0 or listed[-1] >= limit:
            _refuse_outside(name, values, limit)
    return copied


def _of_range(name: str, ids: range, limit: int) -> Int64Array:
    if not ids:
        return np.empty(0, dtype=np.int64)
    first = ids[0]
    if not (0 <= first < limit and 0 <= ids[-1] < limit):
        index = 0  # of the first id outside, which may be far from the start
        if 0 <= first < limit:
            index = -(-(limit - first) // ids.step) if ids.step > 0 else first // -ids.step + 1
        raise LayoutError(f"{name}[{index}] is {shown(ids[index])}, outside [0, {limit})")
    return np.arange(ids.start, ids.stop, ids.step, dtype=np.int64)


def _of_others(name: str, ids: Ids) -> np.ndarray[Any, Any]:
    """Return an array of whatever numpy can convert, except where it would take masked values or booleans for ids."""
    if isinstance(ids, np.ma.MaskedArray):
        raise LayoutError(
            f"{name} is a masked array, whose masked values are no ids; pass an array without a mask, such as "
            f"{name}.compressed()"
        )
    try:
        array = np.asarray(ids)
        if array.ndim == 1 and isinstance(ids, list | tuple):
            for index, each in enumerate(ids):  # numpy takes True for 1 where the other values are integers
                if isinstance(each, bool) or getattr(each, "dtype", None) == np.bool_:
                    if all(isinstance(other, bool | np.bool_) for other in ids):
                        break  # an array of booleans, refused as such
                    raise LayoutError(f"{name}[{index}] is {each}, a boolean among integers; pass integers")
    except LayoutError:
        raise
    except Exception as error:  # noqa: BLE001  # an array of another library raises what it likes while it is converted
        raise LayoutError(
            f"{name} must be something numpy turns into a 1-D integer array, such as a list of ints: {error}"
        ) from None
    return array


def _refuse_outside(name: str, ids: Any, limit: int) -> NoReturn:
    for index, each in enumerate(ids):
        if not 0 <= operator.index(each) < limit:
            raise LayoutError(f"{name}[{index}] is {shown(operator.index(each))}, outside [0, {limit})")
    raise LayoutError(f"{name} changed while it was read; pass an array that no other thread writes")

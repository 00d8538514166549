"""The types of a cache's elements: one spelling for each, and their sizes."""

from __future__ import annotations

import numbers
import re

import numpy as np

from kvoffload.errors import LayoutError
from kvoffload.internal.checks import shown
from kvoffload.internal.types import DTypeLike

# Types that numpy does not know without ml_dtypes, whose names both give them, and their bytes.
_FLOAT8 = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz", "e3m4", "e4m3", "e8m0fnu")
NARROW_BYTES = {"bfloat16": 2, **{f"float8_{each}": 1 for each in _FLOAT8}}

_ABBREVIATIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def dtype_name(dtype: DTypeLike | None) -> str:
    """Return the one spelling of an element's type: numpy's name, with ">" before it if it is big-endian.

    Args:
        dtype: anything that numpy takes as a dtype. For another object or string ("bfloat16" without ml_dtypes,
            PyTorch's dtypes), the name is the last component of its text, in lower case.

    Raises:
        LayoutError: `dtype` is None, or not the type of one element.
    """
    number = isinstance(dtype, numbers.Number)  # the texts of True and nan could be names of types
    try:
        found: np.dtype[np.generic] = np.dtype(dtype)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        name = str(dtype).rpartition(".")[2].lower()
        if not number and re.fullmatch("[a-z][a-z0-9_]*", name):  # else a repr, perhaps with an address in it
            return _ABBREVIATIONS.get(name, name)
    else:
        if dtype is not None and not number and not issubclass(found.type, np.flexible | np.object_):
            return f"{'>' if found.str[0] == '>' else ''}{found.name}"
    raise LayoutError(f'dtype must be the type of one element, such as "bfloat16" or np.float16, got {shown(dtype)}')


def element_bytes(name: str) -> int:
    """Return the bytes of an element of a type.

    Args:
        name: what `dtype_name` returns.
    """
    if name in NARROW_BYTES:
        return NARROW_BYTES[name]
    try:
        return np.dtype(name).itemsize
    except TypeError:
        known = ", ".join(NARROW_BYTES)
        raise LayoutError(f"dtype must be one that numpy knows, or one of {known}; got {name!r}") from None

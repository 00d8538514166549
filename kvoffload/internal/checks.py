"""Checks of plain arguments: the error names the argument, the value and the values that are accepted."""

from __future__ import annotations

import operator
from typing import Any


def at_least(name: str, value: Any, minimum: int) -> int:
    """`value` as an int.

    Raises:
        ValueError: it is not an integer, or less than `minimum`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if isinstance(value, bool) or number < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r:.80}")
    return number

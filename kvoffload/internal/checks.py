"""Checks of plain arguments: the error names the argument, the value and the values that are accepted."""

from __future__ import annotations

import operator
from typing import Any

from kvoffload.internal.masking import masked

_SHOWN_BITS = 128  # of an integer in a message; Python refuses to print very long ones
_MASKED = 10_000  # characters of a repr in which logins are looked for, so that no part of one is left where it is cut
_REASON = 500  # characters: addresses and names of records come before what is wrong


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
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {shown(value)}")
    return number


def seconds(name: str, value: Any, minimum: float = 0.001) -> float:
    """`value` as a float.

    Raises:
        ValueError: it is not a number, or less than `minimum`, a millisecond.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not minimum <= value < float("inf"):
        raise ValueError(f"{name} must be a number of seconds, {minimum} or more, got {shown(value)}")
    return float(value)


def reason(error: BaseException) -> str:
    """An exception for a message: its type and the first line of its text, masked; no error for any exception."""
    try:
        text = str(error).partition("\n")[0]
    except Exception:  # an exception that cannot show itself must not replace what is reported
        text = ""
    return f"{type(error).__name__}: {masked(text)}"[:_REASON] if text else type(error).__name__


def shown(value: Any, length: int = 80) -> str:
    """A value for an error message: its repr, masked, cut to `length` characters, and no error for any value."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # an object that cannot show itself must not replace the error that names the argument
        return f"an object of type {type(value).__name__}"
    return masked(text[:_MASKED])[:length]

"""Checks of plain arguments, and values in messages: named, cut, and without passwords."""

from __future__ import annotations

import math
import numbers
import operator
import re
import threading
from typing import Any, TypeVar

import numpy as np

_SIZE = re.compile(r"(\d{1,19}(?:\.\d{1,19})?) ?(?:([KMGT])(i?)B|B)?")
_SHOWN_BITS = 128  # of an integer in a message; Python refuses to print very long ones
_MASKED = 10_000  # characters of a repr in which logins are looked for, so that no part of one is left where it is cut
_REASON = 500  # characters: addresses and names of records come before what is wrong
_LOGIN = re.compile(r"(?<!\S)\S*@")  # with a colon: "redis://user:password@", "user:password@", "https://token@"
_FIELD = re.compile(
    r"""((?:passw|secret|signature|credential|\bsig\b|\bsas(?:_|\b)|(?:access|account|api|private|shared)[_-]?key"""
    r"""|(?:access|auth|sas|security|session)[_-]?token|[?&]token)[\w-]*["']?\s?[=:]\s?)"""
    r"""(?!env:)(?:"[^"]*"|'[^']*'|(?<==)[^\s"'&;,)}\]]+)""",
    re.IGNORECASE,
)


_Other = TypeVar("_Other")
_BOOLS = bool, np.bool_  # numpy before 2.0 takes its own for an integer, with a warning


def index_or(value: Any, other: _Other) -> int | _Other:
    """Return an integer of any library as an int; `other` for a bool, and for anything that is no integer."""
    try:
        return other if isinstance(value, _BOOLS) else operator.index(value)
    except TypeError:
        return other


def at_least(name: str, value: Any, minimum: int, also: str = "") -> int:
    """Return `value` as an int; `also` says in the error what else would be right."""
    number = index_or(value, minimum - 1)
    if number < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}{also}, got {shown(value)}")
    return number


def size(name: str, value: Any, minimum: int) -> int:
    """Return `value` as a number of bytes, which may also be text such as "64GiB"; see `parsed_size`."""
    number = parsed_size(value) if isinstance(value, str) else None
    return at_least(name, value if number is None else number, minimum, ', or text such as "64GiB"')


def parsed_size(text: str) -> int | None:
    """Return bytes, from text such as "64GiB" (64 << 30), "1.5TiB", "64GB" (64 * 10**9) or "65536"; None for others."""
    found = _SIZE.fullmatch(text)
    if found is None or ("." in found[1] and found[2] is None):
        return None
    factor = 1 if found[2] is None else (1024 if found[3] else 1000) ** " KMGT".index(found[2])
    return int(float(found[1]) * factor) if "." in found[1] else int(found[1]) * factor


def seconds(name: str, value: Any, minimum: float = 0.001) -> float:
    """Return `value` as a float; ValueError if it is no number of seconds from `minimum` on."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not minimum <= value < float("inf"):
        raise ValueError(f"{name} must be a number of seconds, {minimum} or more, got {shown(value)}")
    return float(value)


def to_wait(name: str, value: Any) -> float:
    """Return seconds as a float that locks take; ValueError if it is no number. (No time is later than a NaN.)"""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    limited = min(value, threading.TIMEOUT_MAX) if number else math.nan
    if math.isnan(limited):
        raise ValueError(f"{name} must be a number of seconds, got {shown(value)}")
    return float(limited)


def as_timeout(timeout: float | None) -> float | None:
    """Return a timeout as `to_wait` does; None waits for as long as it takes."""
    return None if timeout is None else to_wait("timeout", timeout)


def flag(name: str, value: Any) -> bool:
    if value is not True and value is not False:
        raise ValueError(f"{name} must be True or False, got {shown(value)}")
    return value


def reason(error: BaseException) -> str:
    """Describe an exception: its type and the first line of its text, masked; no error for any exception."""
    try:
        text = str(error).partition("\n")[0].encode(errors="replace").decode()  # any log can have it
    except Exception:  # noqa: BLE001  # an exception that cannot show itself must not replace what is reported
        text = ""
    return f"{type(error).__name__}: {masked(text)}"[:_REASON] if text else type(error).__name__


def shown(value: Any, length: int = 120) -> str:
    """Show a value in an error message: its repr, masked, cut to `length` characters, and no error for any value."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # it must not replace the error that names the argument
        return f"an object of type {type(value).__name__}"
    return masked(text[:_MASKED])[:length]


def masked(text: str) -> str:
    """Return the text with "***" for user and password of addresses, and for values whose names say that they are
    secret.

    It rather hides too much: whatever stands before the last "@" of a word with a colon, as passwords may have any
    characters but blanks.
    """
    return _LOGIN.sub(_without_login, _FIELD.sub(r"\1***", text))


def _without_login(found: re.Match[str]) -> str:
    word = found[0]
    if ":" not in word:
        return word
    scheme, separator, _ = word.partition("://")
    known = separator and ":" not in scheme and "@" not in scheme
    return f"{scheme}://***@" if known else "***@"

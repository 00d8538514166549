"""Logins and secrets leave no text of this package: `shown` and `reason` mask them, and the logger in every record."""

from __future__ import annotations

import re

_LOGIN = re.compile(r"(?<!\S)\S*@")  # with a colon: "redis://user:password@", "user:password@", "https://token@"
_FIELD = re.compile(
    r"""((?:passw|secret|signature|credential|\bsig\b|\bsas(?:_|\b)|(?:access|account|api|private|shared)[_-]?key"""
    r"""|(?:access|auth|sas|security|session)[_-]?token|[?&]token)[\w-]*["']?\s?[=:]\s?)"""
    r"""(?!env:)(?:"[^"]*"|'[^']*'|(?<==)[^\s"'&;,)}\]]+)""",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """The text with "***" for user and password of addresses, and for values whose names say that they are secret.

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

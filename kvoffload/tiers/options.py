"""Shared by the constructors of tiers: `Limits`, options objects with a default, and optional packages."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from kvoffload.errors import CapabilityError
from kvoffload.internal.checks import at_least, shown

_Options = TypeVar("_Options")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many threads and queued keys a tier may have.

    Attributes:
        threads: threads that call the medium. None: the tier's default.
        max_queued: keys of puts that may wait, and as many keys of `get` and `exists` together. Of a call that has more
            keys than there is room for, the last ones are DECLINED. Removals are never declined.

    Raises:
        ValueError: one is not an integer of at least 1.
    """

    threads: int | None = None
    max_queued: int = 4096

    def __post_init__(self) -> None:
        if self.threads is not None:
            at_least("threads", self.threads, 1)
        at_least("max_queued", self.max_queued, 1)


def given_or_default(name: str, value: _Options | None, kind: type[_Options]) -> _Options:
    """Return `value`, or `kind()` if it is None. TypeError if it is of another type."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be a kvoffload.tiers.{kind.__name__}, or None, got {shown(value)}")
    return kind() if value is None else value


def import_package(name: str, *, needs: str, extra: str, library: str = "") -> Any:
    """Import a module that only some tiers need. CapabilityError names its package by `needs`, and the remedy: to
    install the `extra`, or what `library` says if a shared library is missing.
    """
    try:
        return import_module(name)
    except ImportError as error:
        remedy = library if library and ".so" in str(error) else f"install it: pip install 'kvoffload[{extra}]'"
        raise CapabilityError(f"{needs}, which cannot be imported ({error}); {remedy}") from error

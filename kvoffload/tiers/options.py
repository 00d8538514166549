"""Shared by the constructors of tiers: `Limits`, options objects with a default, and optional packages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from kvoffload.errors import CapabilityError
from kvoffload.internal.checks import at_least, shown

_Options = TypeVar("_Options")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many threads and queued keys a tier may have.

    Attributes:
        threads: threads that call the medium. None: the tier's default.
        max_queued: keys of puts that may wait, and as many keys of `get` and `exists` together. Further keys are
            DECLINED. Removals are never declined.

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
    """`value`, or `kind()` if it is None; TypeError if it is of another type."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be a kvoffload.tiers.{kind.__name__}, or None, got {shown(value)}")
    return kind() if value is None else value


def import_package(name: str, *, needs: str, extra: str) -> Any:
    """Import a package that only some tiers need. CapabilityError names it by `needs`, and the `extra` to install."""
    try:
        return __import__(name)
    except ImportError as error:
        raise CapabilityError(
            f"{needs}, which cannot be imported ({error}); install it: pip install 'kvoffload[{extra}]'"
        ) from error

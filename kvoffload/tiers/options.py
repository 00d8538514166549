"""What constructors of tiers share: `Limits`, options objects that may be left out, and packages that some need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from kvoffload.errors import CapabilityError
from kvoffload.internal.checks import at_least, shown

_Options = TypeVar("_Options")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a tier does at a time; every tier of this package takes one.

    Attributes:
        threads: that call the medium. None: the tier's own number, see its class.
        max_queued: keys that may wait to be put, and as many to be fetched; what goes beyond is DECLINED.

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
    """The options that were given, `kind()` if none were; TypeError if they are of another type."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be a kvoffload.tiers.{kind.__name__}, or None, got {shown(value)}")
    return kind() if value is None else value


def import_package(name: str, *, needs: str, extra: str) -> Any:
    """A package that only some tiers need; `needs` says which, as in "ValkeyTier needs the package x".

    Raises:
        CapabilityError: it cannot be imported; says which `extra` of kvoffload to install.
    """
    try:
        return __import__(name)
    except ImportError as error:
        raise CapabilityError(
            f"{needs}, which cannot be imported ({error}); install it: pip install 'kvoffload[{extra}]'"
        ) from error

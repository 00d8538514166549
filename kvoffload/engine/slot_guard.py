"""Who may write an engine's slots: the guard that a BlockCache registers."""

from __future__ import annotations

import weakref
from typing import Protocol

from kvoffload.errors import CapacityError
from kvoffload.internal.types import Int64Array


class SlotGuard(Protocol):
    """The owner of an engine's slots, such as a BlockCache."""

    @property
    def busy(self) -> bool:
        """Whether the slots may still be read or written by its reservations, leases and transfers."""

    def check_store(self, slots: Int64Array) -> None:
        """Raise unless a store may write these slots now. Called under the engine's lock, before anything happens."""


def replaced_guard(current: weakref.ref[SlotGuard] | None, guard: SlotGuard, in_flight: int) -> weakref.ref[SlotGuard]:
    """A weak reference to `guard`, which takes the place of `current`. Under the engine's lock.

    Args:
        in_flight: how many transfers of the engine have not ended.

    Raises:
        CapacityError: the current guard is `busy`; or it has been garbage collected, and transfers are in flight
            that may be its own.
    """
    if current is not None:
        other = current()
        if in_flight if other is None else other.busy:
            raise CapacityError(
                "the engine's slots belong to another BlockCache: delete that one first, end its reservations, "
                "leases and transfers, or make a second engine"
            )
    return weakref.ref(guard)

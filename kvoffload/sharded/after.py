"""What a transfer on several devices is to follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from kvoffload.device.streams import NoWait
from kvoffload.engine.wait_streams import After


@runtime_checkable
class FollowedPerDevice(Protocol):
    """An object that knows what is to be followed on each device, such as `kvoffload.jax.OwnedCache`."""

    def after(self) -> Sequence[After]:
        """A list or tuple with what a transfer is to follow on each device, in the order of the devices.

        Called when a transfer is submitted, without the engine's lock. What it raises leaves nothing in flight.
        """


ShardedAfter: TypeAlias = Sequence[After] | FollowedPerDevice | NoWait | None
"""A list or tuple with one value for each device, an object that has it, or the same for all devices."""

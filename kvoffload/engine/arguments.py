"""Checks of the arguments of an engine."""

from __future__ import annotations

from typing import Any

from kvoffload.device.device import Device
from kvoffload.device.host_memory import HostMemory
from kvoffload.errors import CapacityError
from kvoffload.internal.checks import at_least
from kvoffload.layout.layout import KVLayout
from kvoffload.tuning import Profile

_MOST_POOL_BYTES = 1 << 50
_USUAL_SLOTS = 1024


def check_types(layout: object, device: object, profile: object) -> None:
    if not isinstance(layout, KVLayout):
        raise TypeError(f"layout must be a KVLayout, got {layout!r:.80}")
    if not isinstance(device, Device):
        raise TypeError(f"device must be a Device from open_device(), got {device!r:.80}")
    if profile is not None and not isinstance(profile, Profile):
        raise TypeError(f"profile must be a kvoffload.tuning.Profile or None, got {profile!r:.80}")


def checked_slots(num_slots: Any, host_memory: HostMemory | None, layout: KVLayout) -> int:
    """How many slots an engine has."""
    if host_memory is not None:
        if not isinstance(host_memory, HostMemory):
            raise TypeError(f"host_memory must be a HostMemory or None, got {host_memory!r:.80}")
        if num_slots is not None:
            raise ValueError(
                f"num_slots={num_slots!r:.80} and host_memory are both given: leave num_slots out, host_memory has "
                f"{host_memory.num_slots}"
            )
        host_memory.check_slots(layout.slot_bytes)
        return host_memory.num_slots
    if num_slots is None:
        return _USUAL_SLOTS
    count = at_least("num_slots", num_slots, 0)
    if count * layout.slot_bytes > _MOST_POOL_BYTES:
        raise CapacityError(
            f"num_slots={count} of {layout.slot_bytes} bytes are {count * layout.slot_bytes} bytes of host memory, "
            f"more than any machine has; ask for at most {_MOST_POOL_BYTES // layout.slot_bytes}"
        )
    return count


def checked_bound(most_queued_bytes: Any) -> int | None:
    return None if most_queued_bytes is None else at_least("most_queued_bytes", most_queued_bytes, 1)

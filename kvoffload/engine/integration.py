"""What caches and integrations ask of an engine, and users do not."""

from __future__ import annotations

import threading
import weakref

from kvoffload.device.device import Device
from kvoffload.engine.resources import EngineResources
from kvoffload.engine.slot_guard import SlotGuard, replaced_guard
from kvoffload.internal.nesting import refuse_nested
from kvoffload.internal.representation import HtmlRepresentation
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.layer_groups import PartsLike, as_parts


class EngineForIntegrations(HtmlRepresentation):
    """These methods of an `OffloadEngine`.

    Attributes:
        layout, device, lock: see `OffloadEngine`.
    """

    layout: KVLayout
    device: Device
    lock: threading.RLock
    _parts: EngineResources
    _process: int
    _closed: bool
    _closing: set[object]
    _slot_guard: weakref.ref[SlotGuard] | None

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that its transfers run on."""
        return (self.device,)

    def check_process(self) -> None:
        """Raise ClosedError in a forked child of the process that opened the device."""
        self.device.check_process()

    def check_parts(self, parts: PartsLike) -> None:
        """Raise what a load of some group would raise for these `parts`."""
        for group in self.layout.groups:
            as_parts(parts, len(group.planes))

    def guard_slots(self, guard: SlotGuard) -> None:
        """Make `guard` the owner of the slots: each store calls `guard.check_store(slots)` first, which may refuse it.

        The engine keeps a weak reference to it.

        Raises:
            CapacityError: the slots have another owner, which is `busy`; or it has been garbage collected, and
                transfers are in flight that may be its own.
        """
        self.device.check_process()
        refuse_nested(self.lock, "guard_slots")
        with self.lock:
            self._slot_guard = replaced_guard(self._slot_guard, guard, self._parts.in_flight.count)

    def wait_stream(self) -> int:
        """The handle of the export stream: importers of device memory wait for it, and it waits for transfers alone."""
        with self.device.current():
            return self._parts.wait_streams.exported()

    def touches(self, address: int, nbytes: int) -> bool:
        """Whether a plane lies, in part at least, in a range of device memory."""
        planes = (plane for group in self.layout.groups for plane in group.planes)
        return any(plane.address < address + nbytes and address < plane.end for plane in planes)

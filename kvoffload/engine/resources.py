"""An engine's pool, streams, events and copiers. They outlive an engine that becomes garbage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvoffload.copiers import CopierSet
from kvoffload.device.device import Device
from kvoffload.device.growth import Growing
from kvoffload.device.pinned import CallerMemory, HostMemory, PinnedMemory, Progress, RegisteredMemory, why_not_pinned
from kvoffload.engine.launcher import Launcher
from kvoffload.engine.queues import InFlight, Reports
from kvoffload.engine.tracker import Tracker
from kvoffload.engine.wait_streams import WaitStreams
from kvoffload.errors import CapacityError
from kvoffload.internal import hostinfo
from kvoffload.internal.checks import at_least, shown, size
from kvoffload.internal.teardown import run_all
from kvoffload.internal.types import UInt8Array, UInt64Array
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.transfer_plan import addresses_of_slots
from kvoffload.tuning import Profile

Prefer = Literal["overlap", "latency"]
_MOST_POOL_BYTES = 1 << 50
_MOST_HOSTS = 64  # times the memory of this one, at most: the tables of a larger pool may not fit before it is pinned
_USUAL_SLOTS = 1024


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The arguments of an engine that all its devices share; see `OffloadEngine`."""

    num_slots: int | None
    staging_bytes: int
    prefer: Prefer
    profile: Profile | None
    max_in_flight: int
    most_queued_bytes: int | None
    stream_priority: int | None
    progress: Progress | None
    host_memory: HostMemory | None = None
    piece_bytes: int | None = None


class EngineResources:
    """Made empty, then opened, so that `release` frees everything that exists, wherever `open` was interrupted.

    Attributes:
        memory: the slots.
        pinning_seconds: the time to map, touch and register it.
        slot_addresses: host addresses of the slots, uint64, (num_slots,).
        growing: memory that is pinned in part so far; empty if the caller gave the memory.
    """

    def __init__(
        self, device: Device, in_flight: InFlight, reports: Reports, copiers: CopierSet, priority: int | None
    ) -> None:
        driver = self._driver = device.driver
        self._numa_cpus = hostinfo.numa_node_cpus(device.pci.numa_node)
        self._priority, self._highest_priority = priority, device.stream_priorities[0]
        self.growing = self._pinned = list[PinnedMemory]()  # one in one of these, once `open` has begun to pin it
        self._callers: list[CallerMemory] = []
        self.memory: RegisteredMemory
        self.pinning_seconds = 0.0
        self.slot_addresses: UInt64Array
        self._slot_bytes = 0
        self.copiers = copiers
        self.in_flight = in_flight
        self.launcher = Launcher(driver, self.in_flight)
        self.tracker = Tracker(driver, self.in_flight, self.launcher, self.copiers, reports)
        self.wait_streams = WaitStreams(driver, priority or 0)

    def open(self, layout: KVLayout, num_slots: int, options: EngineOptions) -> None:
        """Pin the slots, with `piece_bytes` the first ones, make streams and copiers; the context must be current."""
        begin, host_memory = time.perf_counter(), options.host_memory
        self._slot_bytes = layout.slot_bytes
        if host_memory is None:
            self.memory = PinnedMemory(
                self._driver,
                num_slots * layout.slot_bytes,
                unit_bytes=layout.slot_bytes,
                numa_cpus=self._numa_cpus,
                progress=options.progress,
                holder=self._pinned,
                piece_bytes=options.piece_bytes,
            )
        else:
            self.memory = CallerMemory(self._driver, host_memory, layout.slot_bytes, self._callers)
        self.pinning_seconds = time.perf_counter() - begin
        slot_stride = None if host_memory is None else host_memory.slot_stride
        self.slot_addresses = addresses_of_slots(layout, self.memory.address, num_slots, slot_stride)
        self.copiers.open(layout, self.memory.nbytes)
        kernels = self._highest_priority if self._priority is None else self._priority
        for queue in self.in_flight.both:
            queue.lane.open(self._priority or 0, kernels)

    @property
    def slots(self) -> UInt8Array:
        """The slots: uint8, (num_slots, slot_bytes), without a copy."""
        return self.memory.array.reshape(-1, self._slot_bytes)

    @property
    def pinned_slots(self) -> int:
        """How many slots, from 0 on, have been pinned."""
        if isinstance(self.memory, PinnedMemory):
            return self.memory.ready_bytes // self._slot_bytes
        return len(self.slot_addresses)

    def release(self) -> None:
        """Destroy streams and events, free the copiers' memory, unpin the pool. If it is interrupted, call it again.

        If the context is lost nothing is freed: the GPU may still use it, or it is gone with the context.
        """
        for pinned in self._pinned:
            pinned.stop()
        if self.in_flight.lost is not None:
            for memory in (*self._pinned, *self._callers):
                memory.keep()
            self.copiers.keep()
            return
        assert self.in_flight.count == 0
        run_all(
            (
                *(queue.lane.close for queue in self.in_flight.both),
                self.wait_streams.close,
                self.in_flight.timers.close,
                self.in_flight.markers.close,
                self.copiers.close,
                *(memory.release for memory in (*self._pinned, *self._callers)),
            )
        )

    def usage(self) -> tuple[int, int, int, int, int, int]:
        """Return pinned bytes, staging bytes, streams, streams in use, events, events in use. Inside another call,
        counted from the truth.
        """
        in_flight = self.in_flight
        lanes = [queue.lane for queue in in_flight.both]
        streams_in_use = sum(lane.in_use for lane in lanes)
        events_in_use = in_flight.timers.in_use + in_flight.markers.in_use
        if not in_flight.consistent:
            transfers = [transfer for queue in in_flight.both for transfer in list(queue.transfers)]
            streams_in_use = len({segment.stream for transfer in transfers for segment in list(transfer.segments)})
            events_in_use = len({event for transfer in transfers for event in transfer.events()})
        streams = sum(len(lane.streams) for lane in lanes) + len(self.wait_streams)
        events = in_flight.timers.created + in_flight.markers.created
        staging_bytes = self.copiers.staging_bytes
        return self.memory.pinned_bytes, staging_bytes, streams, streams_in_use, events, events_in_use


def slots_in(pool_bytes: Any, num_slots: Any, layouts: Sequence[KVLayout], host: Any = None) -> tuple[Any, int | None]:
    """Return `num_slots`, or how many slots on all devices fit into `pool_bytes`; and the bytes of a piece if the pool
    grows.

    `host`: the `host_memory` that was given, which leaves no room for `pool_bytes`. Raises for layouts that are none,
    too.
    """
    for layout in layouts:
        if not isinstance(layout, KVLayout):
            raise TypeError(f"layout must be a KVLayout, got {shown(layout)}")
    if pool_bytes is None:
        return num_slots, None
    for name, other in (("num_slots", num_slots), ("host_memory", host)):
        if other is not None:
            raise ValueError(f"pool_bytes={shown(pool_bytes)} and {name}={shown(other)} are both given: leave one out")
    piece_bytes = None
    if isinstance(pool_bytes, Growing):
        pool_bytes, piece_bytes = int(pool_bytes.nbytes), int(pool_bytes.piece_bytes)  # of numpy's integers, too
    slot_bytes = sum(layout.slot_bytes for layout in layouts)
    if 0 < (pool_bytes := size("pool_bytes", pool_bytes, 0)) < slot_bytes:
        raise CapacityError(f"pool_bytes={pool_bytes} holds no slot of {slot_bytes} bytes; raise it")
    if pool_bytes > _MOST_POOL_BYTES:
        raise CapacityError(f"pool_bytes must be at most {_MOST_POOL_BYTES}, got {shown(pool_bytes)}; lower it")
    return pool_bytes // slot_bytes, piece_bytes


def checked_slots(num_slots: Any, host_memory: HostMemory | None, layout: KVLayout) -> int:
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
    nbytes = count * layout.slot_bytes
    if nbytes > _MOST_POOL_BYTES:
        raise CapacityError(
            f"num_slots={count} of {layout.slot_bytes} bytes are {nbytes} bytes of host memory, "
            f"more than any machine has; ask for at most {_MOST_POOL_BYTES // layout.slot_bytes}"
        )
    if nbytes > _MOST_HOSTS * (hostinfo.total_bytes() or _MOST_POOL_BYTES):
        raise CapacityError(why_not_pinned(nbytes, f"{_MOST_HOSTS} hosts like this one have less"))
    return count

"""What an engine holds of the driver: its pool, streams, events and copiers. Outlives an engine that became garbage."""

from __future__ import annotations

import time

from kvoffload.copiers import CopierSet
from kvoffload.device.device import Device
from kvoffload.device.host_memory import CallerMemory, HostMemory
from kvoffload.device.pinned import PinnedMemory, Progress, RegisteredMemory
from kvoffload.engine.launcher import Launcher
from kvoffload.engine.queues import InFlight
from kvoffload.engine.statistics import EngineStatistics
from kvoffload.engine.stream_order import StreamOrder
from kvoffload.engine.tracker import Tracker
from kvoffload.engine.wait_streams import WaitStreams
from kvoffload.internal import hostinfo
from kvoffload.internal.teardown import run_all
from kvoffload.internal.types import Int64Array, UInt8Array
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.transfer_plan import addresses_of_slots


class EngineResources:
    """Made empty, then opened, so that `release` frees all that exists, wherever `open` was interrupted.

    Attributes:
        memory: the slots.
        pinning_seconds: what it took to map, touch and register it.
        slot_addresses: of its slots, for planning.
        copiers: that carry transfers out.
        in_flight: the transfers that have not ended.
        launcher, tracker, order, wait_streams: what works on them.
    """

    def __init__(
        self, device: Device, in_flight: InFlight, num_slots: int, sm_limit: int, stream_priority: int
    ) -> None:
        driver = device.driver
        self._numa_cpus = hostinfo.numa_node_cpus(device.pci.numa_node)
        self._num_slots = num_slots
        self._stream_priority = stream_priority
        self._simulated = device.simulated
        self._driver = driver
        self._pinned: list[PinnedMemory] = []  # one in one of these, once `open` has begun to pin it
        self._callers: list[CallerMemory] = []
        self.memory: RegisteredMemory
        self.pinning_seconds = 0.0
        self.slot_addresses: Int64Array
        self._slot_bytes = 0
        self.copiers = CopierSet(driver, device.capabilities, sm_limit)
        self.in_flight = in_flight
        self.launcher = Launcher(driver, self.in_flight)
        self.tracker = Tracker(driver, self.in_flight, self.launcher, self.copiers)
        self.order = StreamOrder(driver, self.in_flight, self.launcher)
        self.wait_streams = WaitStreams(driver, stream_priority)

    def open(self, layout: KVLayout, host_memory: HostMemory | None, progress: Progress | None) -> None:
        """Pin the slots, make streams and copiers; the context must be current."""
        begin = time.perf_counter()
        self._slot_bytes = layout.slot_bytes
        if host_memory is None:
            self.memory = PinnedMemory(
                self._driver,
                self._num_slots * layout.slot_bytes,
                unit_bytes=layout.slot_bytes,
                numa_cpus=self._numa_cpus,
                progress=progress,
                holder=self._pinned,
            )
        else:
            self.memory = CallerMemory(self._driver, host_memory, layout.slot_bytes, self._callers)
        self.pinning_seconds = time.perf_counter() - begin
        slot_stride = None if host_memory is None else host_memory.slot_stride
        self.slot_addresses = addresses_of_slots(layout, self.memory.address, self._num_slots, slot_stride)
        self.copiers.open(layout, self.memory)
        for queue in self.in_flight.both:
            queue.lane.open(self._stream_priority)

    @property
    def slots(self) -> UInt8Array:
        """uint8, (num_slots, slot_bytes): views of the memory."""
        return self.memory.array.reshape(-1, self._slot_bytes)

    def release(self) -> None:
        """Destroy streams and events, free what copiers use, unpin the pool. If it is interrupted, call it again.

        After a loss of the context nothing is freed: the GPU may still use it, or the context has taken it along.
        """
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

    def statistics(self) -> EngineStatistics:
        """Counts and totals; in the middle of a call, what is in use by the transfers, which are the truth."""
        in_flight = self.in_flight
        lanes = [queue.lane for queue in in_flight.both]
        transfers = [transfer for queue in in_flight.both for transfer in list(queue.transfers)]
        streams_in_use = sum(lane.in_use for lane in lanes)
        events_in_use = in_flight.timers.in_use + in_flight.markers.in_use
        if not in_flight.consistent:
            streams_in_use = len({segment.stream for transfer in transfers for segment in list(transfer.segments)})
            events_in_use = len({event for transfer in transfers for event in transfer.events()})
        return EngineStatistics(
            simulated=self._simulated,
            num_slots=self._num_slots,
            pinned_bytes=self.memory.pinned_bytes,
            in_flight=in_flight.count,
            held=sum(not transfer.enqueued for transfer in transfers),
            unreported=len(self.tracker.reports),
            dropped_reports=self.tracker.dropped_reports,
            streams=sum(len(lane.streams) for lane in lanes) + len(self.wait_streams),
            streams_in_use=streams_in_use,
            events=in_flight.timers.created + in_flight.markers.created,
            events_in_use=events_in_use,
            store=in_flight.stores.totals,
            load=in_flight.loads.totals,
        )

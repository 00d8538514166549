"""ShardedEngine: one engine over the devices of a process.

A transfer is submitted in three steps, each on all devices before the next one, under one lock that all share:

    check      refuse whatever can be refused: nothing has happened on any device
    prepare    make each device's record, and record markers on the caller's streams, which CUDA may refuse
    launch     publish the job's record, then put each device's in flight; a driver error fails the job

So a refusal leaves nothing in flight, and a later failure is a job that ends when all devices are done with it.

The truth is the published records, and the transfers that each shard has in flight. One append publishes a record; its
transfers are put in flight after that. An interrupt in between leaves a record with transfers that are in no queue:
`_repair` fails these, and the job has ended, failed, once the others have.

Jobs of a direction end, and are reported, in the order of their submission, but an urgent load may end before others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvoffload.copiers import STAGING_BYTES
from kvoffload.device.device import Device, checked_devices
from kvoffload.device.growth import Growing
from kvoffload.device.pinned import Progress
from kvoffload.device.streams import NO_WAIT, stream_handle
from kvoffload.driver import make_current
from kvoffload.engine import tracing
from kvoffload.engine.base import Engine
from kvoffload.engine.job import Job, ShardedTransfer
from kvoffload.engine.plan_report import PlanReport
from kvoffload.engine.queues import Queues, RecordQueue, Reports
from kvoffload.engine.request import GroupTransfer, Request, Requests
from kvoffload.engine.resources import EngineOptions, Prefer, slots_in
from kvoffload.engine.shard import Shard
from kvoffload.engine.wait_streams import After, FollowedPerDevice, ShardedAfter
from kvoffload.errors import DriverError
from kvoffload.internal.checks import shown
from kvoffload.internal.nesting import in_call, raise_nested, refuse_nested
from kvoffload.internal.teardown import run_all
from kvoffload.internal.types import Ids, Int64Array, StreamLike, UInt8Array
from kvoffload.layout.layout import KVLayout, ShardedLayout
from kvoffload.planning.layer_groups import as_parts
from kvoffload.planning.transfer_plan import STORE, Direction
from kvoffload.tuning import Profile


class ShardedEngine(Engine[ShardedAfter, tuple[PlanReport, ...]]):
    """Moves blocks between the planes of several devices and pinned slots, as an `OffloadEngine` does on one device.

    A transfer names blocks and slots once. Each device copies the blocks between its own planes and its own pinned
    pool. So a slot has one row per device: row `s` of every array in `slots`. To save a slot elsewhere, copy its row of
    every array.

    Usable from any thread; a context manager. On each device transfers are ordered as in an `OffloadEngine`; devices do
    not wait for each other.

    Args:
        layouts: a `ShardedLayout`, or the layout of each device's planes, in the order of `devices`. Their memory must
            stay allocated until the engine is closed.
        devices: the devices that hold the planes, all opened by this process.
        num_slots: slots in each device's pool, of that layout's `slot_bytes`. None: 1024.
        pool_bytes: instead of `num_slots`: as many slots as fit into so many bytes, on all devices together.
            `Growing(nbytes)`: the pools grow while you use the engine, piece by piece in turn.
        staging_bytes: memory of each device, for each direction, for the copier "pack"; 0 forbids kernels.
        prefer: "overlap" selects copiers for GPUs that compute during transfers, "latency" the ones that end soonest
            on idle GPUs.
        profile: what transfers cost, for all devices. None: for each device the profile of its GPU.
        max_in_flight: jobs that may be unfinished at a time; a transfer on all devices is one. More: CapacityError.
        most_queued_bytes: how many payload bytes of each direction may be queued on each GPU; None: as much as the
            driver's queues hold. The rest waits on the host until a later call of the engine.
        stream_priority: of the engine's streams, within every device's `stream_priorities`; see `OffloadEngine`.
        progress: called in this thread with (bytes done, bytes in all) of one device's pool while that is pinned;
            devices follow each other. An exception from it ends the constructor. For pools that grow see
            `OffloadEngine`.

    Attributes:
        layout: the ShardedLayout.
        devices, num_slots, max_in_flight: as given.
        lock: guards the engine on all devices. Take it with `with` only. While you hold it, calls are refused, or
            answered without asking the GPUs.

    Raises:
        LayoutError: the layouts do not agree, see `ShardedLayout`; or a plane is not memory of its device, or runs past
            the end of its allocation.
        ValueError, TypeError: bad arguments; there are more or fewer devices than layouts.
        CapacityError: a pool, or 2 MiB for tables of kernels, cannot be pinned; or `pool_bytes` is less than a slot on
            all devices, but not 0.
        CapabilityError: the layouts have a codec, and no kernel can run on a device.
        DriverError: the driver failed in another way.
        ClosedError: a device is closed, or this is a forked child.
        RuntimeError: you called it inside a call of an engine on one of these devices, in the same thread.
        After any error nothing stays pinned.
    """

    layout: ShardedLayout

    def __init__(
        self,
        layouts: Sequence[KVLayout] | ShardedLayout,
        *,
        devices: Sequence[Device],
        num_slots: int | None = None,
        pool_bytes: int | str | Growing | None = None,
        staging_bytes: int = STAGING_BYTES,
        prefer: Prefer = "overlap",
        profile: Profile | None = None,
        max_in_flight: int = 4096,
        most_queued_bytes: int | None = None,
        stream_priority: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        self.layout = layouts if isinstance(layouts, ShardedLayout) else ShardedLayout(layouts)
        self.devices, count = checked_devices(devices), len(self.layout.layouts)
        if len(self.devices) != count:
            raise ValueError(
                f"devices must be as many as layouts, one for each: got {len(self.devices)}, and {count} layouts"
            )
        num_slots, piece_bytes = slots_in(pool_bytes, num_slots, self.layout.layouts)
        given = num_slots, staging_bytes, prefer, profile, max_in_flight, most_queued_bytes, stream_priority, progress
        shards: list[Shard] = []
        try:
            for layout, device in zip(self.layout.layouts, self.devices, strict=True):
                options = EngineOptions(*given, piece_bytes=piece_bytes)
                shards.append(Shard(layout, device, options, self._shared, most_reports=0))
        except BaseException:
            run_all(shard.close for shard in shards)
            raise
        self._shards = tuple(shards)
        self._names = tuple(f"shard {index} (device {each.index})" for index, each in enumerate(self.devices))
        self._simulated = any(device.simulated for device in self.devices)
        self.num_slots = shards[0].num_slots
        self.max_in_flight = shards[0].parts.in_flight.max_in_flight
        stores, loads = RecordQueue[ShardedTransfer](), RecordQueue[ShardedTransfer]()
        self._in_flight: Queues[RecordQueue[ShardedTransfer]] = Queues(stores, loads, self.max_in_flight)
        self._urgent: deque[ShardedTransfer] = deque()  # of the loads; they end in this order
        self._reports = Reports(self._shared.notices)
        self._grow()

    # submitting ---------------------------------------------------------------------------------------------------

    def _requests(self, direction: Direction, blocks: Ids, slots: Ids, *more: Any, **options: Any) -> list[Requests]:
        """Return `ArgumentChecks.requests` of each device; `after` is for all devices."""
        group, first_sub_block, after, *others = more
        read = blocks, slots

        def check(shard: Shard, following: After) -> Requests:
            nonlocal read
            (request,) = shard.limits.requests(direction, *read, group, first_sub_block, following, *others, **options)
            read = request.blocks, request.slots  # once, so that all devices have the same
            return (request,)

        return self._for_each(check, self._after_of_each(after))

    def _requests_of_groups(
        self, direction: Direction, transfers: Sequence[GroupTransfer], after: Any, *more: Any, **options: Any
    ) -> list[Requests]:
        read = transfers

        def check(shard: Shard, following: After) -> Requests:
            nonlocal read
            requests = shard.limits.requests_of_groups(direction, read, following, *more, **options)
            read = [
                GroupTransfer(each.group, each.blocks, each.slots, first_sub_block=each.first_sub_block)
                for each in requests
            ]
            return requests

        return self._for_each(check, self._after_of_each(after))

    def submit_locked(
        self, direction: Direction, blocks: Int64Array, slots: Int64Array, *, group: int, after: Any, parts: Any = None
    ) -> Job:
        requests: list[Requests] = []
        for shard, each in zip(self._shards, self._after_of_each(after), strict=True):
            planes = None if parts is None else as_parts(parts, len(shard.layout.groups[group].planes))
            streams = () if each is NO_WAIT else each.streams
            requests.append((Request(direction, group, slots, blocks, sources=streams, parts=planes),))
        return self._submit(requests, locked=True)

    def _submit(self, requests: list[Requests], *, locked: bool = False) -> Job:
        """Submit a transfer in the steps that the head of this file lists. `locked`: the guard of the slots calls it
        with the lock held.
        """
        if in_call(self.lock) and not locked:
            raise_nested("a submission")
        first = requests[0][0]
        self.check_process()
        self.check_usable()
        sources, arrays = [each[0].sources for each in requests], [each[0].arrays for each in requests]
        followed = self._for_each(Shard.follow, sources, arrays)  # while referred to, reserved
        streams = [each.streams for each in followed]
        with self.lock:
            # 1. check, on every device
            self.check_usable()
            self._repair()
            self._settle()
            in_flight, jobs = self._in_flight, 1 if len(first.blocks) else 0
            if in_flight.count + jobs > self.max_in_flight:
                self._track()
                in_flight.check_room(jobs)
            self._for_each(Shard.check, requests, streams, current=True)
            if self._slot_guard is not None and not locked and first.direction is STORE:
                self._check_store(requests[0])
            # 2. prepare
            queue, number = in_flight.of(first.direction), next(self._ids)
            prepare = partial(Shard.prepare, number=number)
            transfers = self._for_each(prepare, requests, streams, current=True) if jobs else []
            record = ShardedTransfer(number, first.direction, first.num_parts, transfers, self._names)
            record.simulated = self._simulated
            job = Job(self, record)
            if not jobs:
                self._reports.note(queue, record)
                return job
            # 3. launch: nothing is refused from here on
            record.sequence = queue.submitted + 1
            in_flight.consistent = False
            if first.urgent:
                self._urgent.append(record)
            queue.transfers.append(record)
            queue.submitted = record.sequence
            for shard, each, transfer in zip(self._shards, requests, transfers, strict=True):
                transfer.engine = self  # which is kept alive as long as it is in flight
                try:
                    with make_current(shard.driver, shard.context, False):
                        shard.enqueue(each, transfer)
                except DriverError as error:  # the context could not be made current: it is in no queue
                    transfer.abandon(error)
                    if error.sticky:
                        shard.parts.tracker.mark_lost(error)
            in_flight.consistent = True
            if tracing.current is not None:
                tracing.start(tracing.current, job, record, self._reports.notices)
            return job

    def _plan(self, requests: list[Requests]) -> tuple[PlanReport, ...]:
        return tuple(self._for_each(Shard.report, requests))

    def _resolve(self, after: ShardedAfter) -> ShardedAfter:
        return tuple(self._for_each(Shard.resolve, self._after_of_each(after)))

    # what has ended -----------------------------------------------------------------------------------------------

    def _track(self) -> None:
        for shard in self._shards:
            if shard.behind:
                shard.track()
        with self.lock:
            self._repair()
            self._settle()

    def _repair(self) -> None:
        """Fail the transfers that an interrupted submission did not put in flight. May be interrupted."""
        in_flight = self._in_flight
        if in_flight.consistent:
            return
        cause = KeyboardInterrupt("its submission was interrupted")
        for queue in in_flight.both:
            for record in queue.transfers:
                queue.submitted = max(queue.submitted, record.sequence)
                for shard, transfer in zip(self._shards, record.transfers, strict=True):
                    if not (transfer.finished or transfer in shard.parts.in_flight.of(record.direction).transfers):
                        transfer.abandon(cause)
        loads = in_flight.loads.transfers
        self._urgent = deque(record for record in self._urgent if record in loads)
        in_flight.consistent = True

    def _settle(self) -> None:
        """Report the jobs that are known to have ended on all devices, without asking these. Under the lock. A job is
        reported before it leaves its queue, so an interrupt cannot lose it; `Reports.note` reports none twice.
        """
        loads, urgent = self._in_flight.loads, self._urgent
        while urgent and urgent[0].finished:
            self._reports.note(loads, urgent[0])
            if urgent[0] in loads.transfers:
                loads.transfers.remove(urgent[0])
            urgent.popleft()
        for queue in self._in_flight.both:
            transfers = queue.transfers
            while transfers and transfers[0].finished:
                self._reports.note(queue, transfers[0])
                transfers.popleft()

    @property
    def in_flight(self) -> int:
        self.check_process()
        with self.lock:
            return sum(not record.finished for queue in self._in_flight.both for record in list(queue.transfers))

    # the devices --------------------------------------------------------------------------------------------------

    def order_job_before(self, record: ShardedTransfer, streams: Sequence[StreamLike], part: int | None) -> None:
        refuse_nested(self.lock, "order_before")
        self._check_count("stream", streams, "stream")
        names = [f"stream[{index}]" for index in range(len(streams))]
        handles = [stream_handle(stream, name) for stream, name in zip(streams, names, strict=True)]
        self.check_process()
        error = record.error
        if error is not None:
            raise error
        for shard, handle, name in zip(self._shards, handles, names, strict=True):
            shard.check_stream(handle, name)
        for shard, transfer, handle in zip(self._shards, record.transfers, handles, strict=False):  # of an empty one: 0
            shard.order_before(transfer, handle, part, raise_error=True)

    def _after_of_each(self, given: Any) -> Sequence[Any]:
        """Return the `after` of each device. None and NO_WAIT are for all."""
        if given is None or given is NO_WAIT:
            return (given,) * len(self._shards)
        source = ""
        if not isinstance(given, list | tuple) and isinstance(given, FollowedPerDevice) and callable(given.after):
            if in_call(self.lock):  # `after` is code of the caller's
                raise_nested("a submission")
            source = f" from after() of the {type(given).__name__} given"
            given = given.after()
        self._check_count("after", given, "value", or_else=", or None or NO_WAIT for all", source=source)
        return tuple(given)

    def _check_count(self, name: str, given: Any, what: str, or_else: str = "", source: str = "") -> None:
        """Raise TypeError unless `given` is a list or tuple with an element for each device."""
        count = len(self._shards)
        if not isinstance(given, list | tuple) or len(given) != count:
            raise TypeError(
                f"{name} must be a list with one {what} for each of the {count} devices, in their order{or_else}; got "
                f"{shown(given)}{source}"
            )

    @property
    def slots(self) -> tuple[UInt8Array, ...]:
        """The pinned pool of each device: uint8, (num_slots, layout.layouts[i].slot_bytes), writable.

        Row `s` of array `i` is the part of slot `s` on device `i`. Read it only after the store into it has ended on
        all devices; write it only while no unfinished transfer uses it, and only below `pinned_slots`: pinning sets
        bytes of the others to zero. The arrays stay valid after `close`.
        """
        return tuple(shard.parts.slots for shard in self._shards)

    def __repr__(self) -> str:
        return f"ShardedEngine({list(self._shards)})"

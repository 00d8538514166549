"""Shard: an engine's part on one device. An OffloadEngine has one, a ShardedEngine one for each device.

A transfer goes through three calls, under the lock and with the device's context current:

    check      refuse whatever can be refused: nothing has happened
    prepare    make its record, select the copier, find what it must follow, and record markers on the caller's
               streams, which CUDA may refuse
    enqueue    put it in flight, and queue as many segments as there is room for; a driver error fails it
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from kvoffload.copiers import CopierSet, Share, check_carries_parts, checked_staging, shape_of, shares_together
from kvoffload.copiers.observed import Forecast
from kvoffload.copiers.selection import Question, check_prefer, rank
from kvoffload.device.device import Device
from kvoffload.device.streams import raise_for_stream, refuse_capturing
from kvoffload.driver import SourceOrder, make_current
from kvoffload.engine.hazards import HazardTable
from kvoffload.engine.job import SUBMITTED, Transfer, describe
from kvoffload.engine.plan_report import Alternative, PlanReport
from kvoffload.engine.queues import InFlight, Reports, put_ahead
from kvoffload.engine.request import FEW, ArgumentChecks, Request, Requests, refuse_repeated_targets, sources_of
from kvoffload.engine.resources import EngineOptions, EngineResources, checked_slots
from kvoffload.engine.tracing import MOST_NOTICES, Notice, Notices, deliver
from kvoffload.engine.wait_streams import After, Followed
from kvoffload.errors import CapacityError, ClosedError, DriverError, TransferError
from kvoffload.internal.checks import as_timeout, at_least
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import in_call, in_ours, new_lock, raise_nested, refuse_nested
from kvoffload.internal.types import Int64Array
from kvoffload.internal.waiting import wait_until
from kvoffload.layout.fold import describe_fold
from kvoffload.layout.layout import KVLayout, describe_groups
from kvoffload.planning.layer_groups import Folds, PartsLike, as_parts
from kvoffload.planning.transfer_plan import LOAD, STORE, BlockPlan, build
from kvoffload.tuning import CopierName, Profile, profile_for

_IN_STREAM_ORDER, _IN_ANY_ORDER = SourceOrder
QUEUEING_SECONDS = 1.0  # how long a caller waits for room in the driver's queues
_Result = TypeVar("_Result")


class Shared:
    """Shared by an engine and its shards.

    Attributes:
        lock: guards them all.
        closing: a token for each call of `close` that has not returned.
        notices: see `tracing`.
    """

    def __init__(self) -> None:
        self.lock = new_lock()
        self.closing: set[object] = set()
        self.notices: Notices = deque(maxlen=MOST_NOTICES)


class Shard:
    """The pool, streams, events and transfers of an engine on one device. It does not refer to the engine.

    To the device it is a `DeviceUser`: the device closes it, and exported memory waits for its transfers.

    Args:
        most_reports: how many results of transfers to keep for `poll`.

    Attributes:
        closed: set once everything is freed, by `close` of the engine or of the device.
        folds: the groups of the layout, folded.
        parts: its driver resources. They outlive the shard until they are freed.
    """

    def __init__(
        self, layout: KVLayout, device: Device, options: EngineOptions, shared: Shared, *, most_reports: int
    ) -> None:
        profile = options.profile
        if not isinstance(device, Device):
            raise TypeError(f"device must be a Device from open_device(), got {device!r:.80}")
        if profile is not None and not isinstance(profile, Profile):
            raise TypeError(f"profile must be a kvoffload.tuning.Profile or None, got {profile!r:.80}")
        self.layout, self.device = layout, device
        self.num_slots = checked_slots(options.num_slots, options.host_memory, layout)
        device.check_process()
        if options.stream_priority is not None:
            device.check_stream_priority(options.stream_priority)
        device.refuse_nested("OffloadEngine")
        device.reclaim()
        self.staging_bytes = checked_staging(options.staging_bytes, layout)
        self.prefer = check_prefer(options.prefer)
        self.profile = profile_for(device) if profile is None else profile
        max_in_flight = at_least("max_in_flight", options.max_in_flight, 1)
        most_bytes = options.most_queued_bytes
        if most_bytes is not None:
            most_bytes = at_least("most_queued_bytes", most_bytes, 1)
        self.lock, self._closing = shared.lock, shared.closing
        self.closed = False
        self.driver, self.context = device.driver, device.context
        self.reports = Reports(shared.notices, most_reports)
        self._following: set[object] = set()  # a token for each call that asks arrays for their producers
        self._hazards = HazardTable(layout, self.num_slots)
        longest = max(self.num_slots, *(group.num_blocks for group in layout.groups))
        self._scratch: Int64Array = np.empty(longest, dtype=np.int64)
        with device.lifecycle, device.current():
            self.folds = Folds(layout, device.allocations(layout))
            in_flight = InFlight(device.driver, max_in_flight, self._hazards, most_bytes)
            copiers = CopierSet(device.driver, device.capabilities, self.staging_bytes, self.profile, self.prefer)
            self.parts = EngineResources(device, in_flight, self.reports, copiers, options.stream_priority)
            self._resource = device.adopt(self, self.parts.release, "an OffloadEngine")
            try:
                self.parts.open(layout, self.num_slots, options)
            except BaseException:
                self._resource.free()
                raise
            self._grows = self.parts.pinned_slots < self.num_slots
            self.limits = ArgumentChecks(layout, self.num_slots, self.parts.copiers.missing)
            device.register_engine(self)
        # No object of the library goes into the log record, which could keep it alive.
        sizes = self.parts.memory.pinned_bytes, self.parts.pinning_seconds, self.num_slots, device.index
        LOGGER.info("pinned %d bytes in %.3f s: %d slots for device %d; profile: %s", *sizes, self.profile.source)

    # the steps of a transfer --------------------------------------------------------------------------------------

    def check(self, requests: Requests, streams: tuple[int, ...]) -> None:
        """Raise if the transfer cannot be submitted now. Find ended transfers if that can matter here."""
        in_flight = self.parts.in_flight
        if not in_flight.consistent:
            self.parts.tracker.repair()
        if self.closed or self._closing or in_flight.lost:
            self.check_usable()
        if self._grows:
            self._check_pinned(requests)
        request = requests[0]
        stores = request.direction is STORE
        targets = request.slots if stores else request.blocks
        # Most transfers are one request with few ids, all different: a set tells that without a further call.
        count = len(targets)
        if len(requests) > 1 or count > FEW or len(set(targets.tolist())) < count:
            refuse_repeated_targets(requests, self._scratch, self.layout, self._hazards)
        for stream in streams:
            try:
                if self.driver.stream_is_capturing(stream):
                    refuse_capturing(self.driver, stream, "after")
            except DriverError as error:
                raise_for_stream(error, stream, "after")
        same = in_flight.stores if stores else in_flight.loads
        unasked = len(same.transfers) >= in_flight.most_unasked
        if unasked or same.waiting or same.opposite.transfers:
            with make_current(self.driver, self.context):
                self.parts.tracker.advance()
            self.check_usable()
            in_flight.check_room(1 if len(request.blocks) else 0)

    def _check_pinned(self, requests: Requests) -> None:
        pinned = self.parts.pinned_slots
        for request in requests:
            if (request.slots >= pinned).any():
                place = int((request.slots >= pinned).argmax())
                raise CapacityError(
                    f"slots[{place}] is {request.slots[place]}, of group {request.group}, and the pool, which grows, "
                    f"has {pinned} of {self.num_slots} slots pinned so far: use slots below engine.pinned_slots or wait"
                )
        self._grows = pinned < self.num_slots

    def prepare(self, requests: Requests, streams: tuple[int, ...], number: int) -> Transfer:
        """Return the record of a checked transfer, with id `number`, to be put in flight. Raises if CUDA does not know
        a stream, or if the driver fails: nothing is in flight then; the next call's repair takes the events back.
        """
        request, in_flight = requests[0], self.parts.in_flight
        direction = request.direction
        same = in_flight.stores if direction is STORE else in_flight.loads
        opposed, queued = len(same.opposite.transfers) > 0, len(same.transfers) > 0
        # 2. plan, 3. select
        copier, reason, shares = self._select(requests, opposed, queued)
        # 4. order: what it must follow
        nbytes = 0
        for _, _, _, of_share in shares:
            nbytes += of_share
        source_order = self._source_order(requests) if direction is LOAD else _IN_STREAM_ORDER
        transfer = Transfer(number, direction, nbytes, 1 if request.parts is None else len(request.parts))
        transfer.simulated, transfer.source_order = self.driver.simulated, source_order
        transfer.urgent = request.urgent
        if opposed:  # the latest of the other direction that touches the same; earlier ones end before it
            hazards, other, latest = self._hazards, direction.opposite, 0
            for one in requests:
                on_slots = hazards.latest_on_slots(other, one.slots)
                latest = max(latest, on_slots, hazards.latest_on_blocks(other, one.group, one.blocks))
            transfer.conflict = same.opposite.unfinished(latest)
        transfer.copier, transfer.reason, transfer.shares = copier, reason, shares
        if isinstance(reason, Forecast):
            transfer.forecast = reason
        timers, markers = in_flight.timers, in_flight.markers
        idle = timers.idle
        in_flight.consistent = False
        for stream in streams:
            marker = markers.idle.pop() if markers.idle else markers.make()
            transfer.markers.append(marker)
            try:
                self.driver.event_record(marker, stream)
            except DriverError as error:
                raise_for_stream(error, stream, "after")
        transfer.start = idle.pop() if idle else timers.make()
        transfer.end = idle.pop() if idle else timers.make()
        return transfer

    def enqueue(self, requests: Requests, transfer: Transfer) -> None:
        """Put a prepared transfer in flight, and queue as many segments as there is room for. From here on a driver
        error fails the transfer.

        The append to its queue puts it in flight. After an interrupt before that, the next call takes its events back;
        after that, `Tracker.repair` fails the transfer.
        """
        in_flight = self.parts.in_flight
        queue = in_flight.stores if transfer.direction is STORE else in_flight.loads
        in_flight.consistent = False
        if not (transfer.urgent and queue.waiting and put_ahead(in_flight, transfer, requests)):
            sequence = queue.submitted + 1
            for request in requests:
                self._hazards.record(transfer.direction, request.group, request.slots, request.blocks, sequence)
            transfer.sequence = sequence
            transfer.step(SUBMITTED)
            queue.transfers.append(transfer)
            queue.submitted = sequence
            queue.waiting.append(transfer)
        try:
            if queue.waiting[0] is transfer and self.parts.launcher.enqueue(queue, transfer):
                queue.waiting.popleft()
        except DriverError as error:  # the context is lost, and every transfer has failed
            self.parts.tracker.mark_lost(error)
        transfer.submitting = False
        in_flight.consistent = True

    def _select(self, requests: Requests, *busy: bool) -> tuple[CopierName, str | Forecast, tuple[Share, ...]]:
        """Return the copier of a transfer, why, and what it carries. Of several groups, the copier of most bytes.
        `busy`: the lanes of the other direction and of this one.
        """
        copiers, request = self.parts.copiers, requests[0]
        why: str | Forecast
        names: list[CopierName]
        if len(requests) == 1:
            plan = self._plan(request)
            copier, why, between = copiers.select(plan, request.copier, *busy)
            if between is not None:
                why = between[0].choose(between[1], plan.nbytes)
                copier = why.copier
            if copier != "pack" or copiers.has_ring(request.direction):
                return copier, why, (copiers.share(copier, plan),)
            plans, names = [plan], [copier]
        else:
            plans = [self._plan(one) for one in requests]
            each = [copiers.select(plan, one.copier, *busy) for plan, one in zip(plans, requests, strict=True)]
            (copier, _, between), plan = max(zip(each, plans, strict=True), key=lambda pair: pair[1].nbytes)
            names = [found.copier for found in each]
            reasons = [f"group {one.group}: {found.reason}" for one, found in zip(requests, each, strict=True)]
            why = "; ".join(dict.fromkeys(reasons))
            if between is not None:  # what decides about most bytes decides about all that have a choice
                why = between[0].choose(between[1], plan.nbytes)
                copier = why.copier
                names = [one.copier if one.between is None else one.between[1][why.number].copier for one in each]
        if "pack" in names and not copiers.has_ring(request.direction):
            with make_current(self.driver, self.context):
                no_ring = copiers.open_ring(request.direction)
            if no_ring is not None:
                text = f"copier 'pack' is out, other copiers carry its transfers: {no_ring}"
                self.reports.notices.append(Notice(logging.WARNING, text))
                return self._select(requests, *busy)
        return copier, why, shares_together([copiers.share(*one) for one in zip(names, plans, strict=True)])

    def _plan(self, request: Request) -> BlockPlan:
        group, parts = request.group, request.parts
        return build(
            self.folds.groups[group] if parts is None else self.folds.of(group, parts),
            self.layout,
            request.direction,
            self.parts.slot_addresses,
            request.slots,
            request.blocks,
            request.first_sub_block,
            group,
        )

    def _source_order(self, requests: Requests) -> SourceOrder:
        """Return ANY if that is safe for a load. (Stores always use STREAM: else reads of blocks could overtake it.)

        Raises:
            ValueError: "any" is asked for while a store to one of the slots is unfinished.
        """
        stores = self.parts.in_flight.stores
        if requests[0].source_order == "stream":
            return _IN_STREAM_ORDER
        if not stores.transfers:
            return _IN_ANY_ORDER
        latest = max([self._hazards.latest_on_slots(STORE, request.slots) for request in requests])
        if stores.unfinished(latest) is None:
            return _IN_ANY_ORDER
        if requests[0].source_order == "any":
            raise ValueError(
                'source_order="any" while a store to one of the slots is unfinished; use "auto" or "stream"'
            )
        return _IN_STREAM_ORDER

    def run(self, step: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call `step(self, *arguments)` with the device's context current."""
        try:
            with make_current(self.driver, self.context, False):
                return step(self, *arguments)
        except DriverError as error:
            self.mark_lost(error)
            raise

    def report(self, requests: Requests) -> PlanReport:
        """Return the PlanReport of a transfer. Under the lock. Makes no driver call."""
        self.check_usable()
        request, copiers, profile = requests[0], self.parts.copiers, self.profile
        refuse_repeated_targets(requests, self._scratch, self.layout, self._hazards)
        plan, source, simulated = self._plan(request), profile.source, self.driver.simulated
        if len(plan) == 0:
            nothing = (plan.direction, 0, 0, 0, 0, None, "nothing to copy", 0.0, ())
            return PlanReport(*nothing, profile=source, simulated=simulated)
        copier, reason, between = copiers.select(plan, request.copier)
        if between is not None:
            forecast = between[0].expect(between[1], plan.nbytes)
            copier, reason = forecast.copier, str(forecast)
        shape = shape_of(plan)
        offered = {"pack"} if copiers.coded[request.group] else copiers.offered
        ranked = rank(Question(shape, frozenset(offered), profile, self.prefer))
        others = [each for each in ranked if each.copier != copier]
        return PlanReport(
            direction=shape.direction,
            blocks=shape.blocks,
            nbytes=shape.nbytes,
            operations=shape.operations,
            rows=shape.rows,
            copier=copier,
            reason=reason,
            seconds=next((each.seconds for each in ranked if each.copier == copier), profile.seconds(copier, shape)),
            alternatives=tuple(Alternative(each.copier, each.seconds) for each in others),
            profile=source,
            simulated=simulated,
        )

    # streams and arrays that a transfer follows -------------------------------------------------------------------

    def follow(self, sources: tuple[Any, ...], arrays: bool) -> Followed:
        """Follow as `WaitStreams.follow` does. Do not hold the lock if there are arrays, which run their code."""
        if not arrays:
            return Followed(sources)
        token = object()
        try:
            with self.device.current():
                with self.lock:
                    self.check_usable()
                    self._following.add(token)
                return self.parts.wait_streams.follow(sources)
        except DriverError as error:
            self.mark_lost(error)
            raise
        finally:
            self._following.discard(token)

    def resolve(self, after: After) -> Followed:
        """Resolve as `Engine.resolve` does. Asks arrays for their producers, so do not hold the lock."""
        sources = sources_of(after, self.layout)
        self.device.check_process()
        return self.follow(sources, not all(isinstance(source, int) for source in sources))

    # what has ended -----------------------------------------------------------------------------------------------

    def advance(self) -> None:
        self.device.check_process()
        if in_call(self.lock):
            return
        if self.behind:
            self.track()
        if self.reports.notices:
            deliver(self.reports.notices)

    @property
    def behind(self) -> bool:
        """Whether `track` may have something to do."""
        with self.lock:
            return self.in_flight > 0 or not self.parts.in_flight.consistent

    def track(self) -> None:
        """Find ended transfers, and queue as many segments as there is room for. The caller may hold the lock."""
        try:
            with make_current(self.driver, self.context), self.lock:
                if not self.closed:
                    self._repair()
                    self.parts.tracker.advance()
        except DriverError as error:
            if not error.sticky:
                raise
            with self.lock:  # every transfer in flight has failed, so the question is answered
                self.parts.tracker.mark_lost(error)

    def _repair(self) -> None:
        """Repair after an interrupt. Under the lock, with the context current."""
        if not self.parts.in_flight.consistent:
            self.parts.tracker.repair()

    def mark_lost(self, error: DriverError) -> None:
        """Fail every transfer in flight and raise TransferError, if the error says that the CUDA context is lost."""
        if error.sticky:
            with self.lock:
                self.parts.tracker.mark_lost(error)
                self.parts.tracker.check_alive()

    def check_usable(self) -> None:
        """Raise ClosedError or TransferError unless transfers can be submitted."""
        if self.closed or self._closing:
            raise ClosedError(f"the engine is {'closed: open_cache makes another' if self.closed else 'being closed'}")
        if self.parts.in_flight.lost is not None:
            self.parts.tracker.check_alive()

    def check_parts(self, parts: PartsLike) -> None:
        for group in self.layout.groups:
            planes = as_parts(parts, len(group.planes))
            if planes is not None and group.coding is not None:
                check_carries_parts("pack", planes, coded=True)

    @property
    def in_flight(self) -> int:
        """How many of its transfers are not known to have ended."""
        return self.parts.in_flight.count

    @property
    def submitted(self) -> int:
        with self.lock:
            return sum(queue.submitted for queue in self.parts.in_flight.both)

    # streams that wait for transfers ------------------------------------------------------------------------------

    def order_before(self, transfer: Transfer, stream: int, part: int | None = None, *, raise_error: bool) -> None:
        """Make `stream` wait for a transfer, or for its parts up to `part`. Do not hold the lock.

        If segments of it wait on the host, so does this call, up to a second.

        Raises:
            CapacityError: after a second they were not all queued.
            TransferError: the stream is being captured; or, with `raise_error`, the transfer has failed.
        """

        def queued() -> bool:
            if not (transfer.enqueued or transfer.finished):
                self.advance()
            return transfer.enqueued or (part is not None and transfer.part > part) or transfer.finished

        try:
            wait_until(queued, QUEUEING_SECONDS, "queueing")
        except TimeoutError:
            raise CapacityError(
                f"{describe(transfer)} still waits on the host: the driver's queues are full and do not move; poll() "
                "until some end"
            ) from None
        in_flight, launcher = self.parts.in_flight, self.parts.launcher
        try:
            with self.device.current(), self.lock:
                self._repair()
                if raise_error and transfer.error is not None:
                    raise TransferError(*transfer.error.args) from transfer.error.__cause__
                if self.closed:  # so the transfer has ended, and `stream` may be the engine's own
                    return
                self.parts.tracker.check_alive()
                refuse_capturing(self.driver, stream, "stream")
                if transfer.finished:
                    return
                in_flight.consistent = False
                if part is None:
                    launcher.wait_for_transfer(stream, transfer)
                else:
                    launcher.wait_for_part(stream, transfer, part)
                in_flight.consistent = True
        except DriverError as error:
            self.mark_lost(error)
            raise

    def order_all_before(self, stream: int) -> None:
        """Let work queued on `stream` from now on start only after every transfer submitted so far has ended.

        Raises:
            CapacityError, TransferError: as `Job.order_before`.
        """
        self.device.check_process()
        refuse_nested(self.lock, "order_all_before")
        with self.lock:  # the latest of a direction ends last
            latest = [queue.transfers[-1] for queue in filter(lambda queue: queue.transfers, self.parts.in_flight.both)]
        for transfer in latest:
            self.order_before(transfer, stream, raise_error=False)

    def check_stream(self, stream: int, name: str) -> None:
        """Refuse a stream of another device: it could wait for this device's transfers, but this device's own stream
        would not.

        Raises:
            ValueError: this device's context does not know it; the message names it `name`.
            TransferError: it is being captured.
        """
        in_flight = self.parts.in_flight
        markers = in_flight.markers
        with self.device.current(), self.lock:
            if self.closed:  # so the transfer has ended, and nothing waits for it
                return
            self._repair()
            refuse_capturing(self.driver, stream, name)
            in_flight.consistent = False
            marker = markers.idle.pop() if markers.idle else markers.make()
            try:
                self.driver.event_record(marker, stream)
            except DriverError as error:
                raise_for_stream(error, stream, name)
            finally:  # an interrupt before this leaves it to the repair
                markers.idle.append(marker)
                in_flight.consistent = True

    def wait_stream(self) -> int:
        """Return the handle of the export stream. Importers of device memory wait for it, and it for transfers only."""
        with self.device.current():
            return self.parts.wait_streams.exported()

    def touches(self, address: int, nbytes: int) -> bool:
        """Return whether a plane has bytes in a range of device memory."""
        planes = (plane for group in self.layout.groups for plane in group.planes)
        return any(plane.address < address + nbytes and address < plane.end for plane in planes)

    # the end ------------------------------------------------------------------------------------------------------

    def drain(self, timeout: float | None = None) -> None:
        refuse_nested(self.lock, "drain")

        def ended() -> bool:
            self.advance()
            return self.in_flight == 0

        wait_until(ended, timeout, f"{self.in_flight} jobs in flight")

    def refuse_nested(self, call: str) -> None:
        locks = (self.lock, *(memory.pinning for memory in self.parts.growing))
        if in_ours() or any(map(in_call, locks)):  # whoever has `lifecycle` may wait for a thread of ours
            raise_nested(call)

    def close(self, timeout: float | None = None) -> None:
        if self.device.foreign:
            return
        self.refuse_nested("close")
        timeout, token = as_timeout(timeout), object()
        try:
            self._closing.add(token)
            if self.in_flight:
                LOGGER.info("an engine is being closed, and waits for %d transfers", self.in_flight)
            self.drain(timeout)
            wait_until(lambda: not self._following, timeout, "asking an array for its producer")
            self.device.wait_lifecycle(timeout)
            with self.device.lifecycle:  # nothing is in flight, nothing new is taken; one thread at a time
                self.closed = True
                try:
                    self._resource.free()
                except DriverError as error:
                    if not error.sticky:
                        raise
                    self.parts.tracker.mark_lost(error)
                    self.parts.release()  # which frees nothing now
                    self._resource.drop()
        finally:
            self._closing.discard(token)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.in_flight} in flight"
        slots = f"{self.num_slots} slots x {self.layout.slot_bytes} B, {'simulated, ' * self.device.simulated}{state}"
        return f"OffloadEngine({describe_groups(self.layout)}: {describe_fold(self.folds.groups)}; {slots})"

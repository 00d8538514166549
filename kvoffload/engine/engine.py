"""OffloadEngine: stores blocks to pinned slots and loads them back, ordered on the GPU.

Order. A transfer's stream waits for the caller's streams (`after`), for the previous transfer of its direction, and for
the latest transfer of the other direction that touches its slots or blocks. The waits are on the GPU, and point to work
submitted earlier, so they cannot form a cycle. What the driver's queues have no room for waits on the host, in order.

    caller's stream   ──compute──●after                          ┌─compute (order_before)
    store lane        ───────────┴─wait─[start copy copy end]────┤
    load lane                          wait for slot or block ───┴─[start copy copy end]

Threads. One lock guards everything that changes; nothing waits for the GPU, and no code of the caller's runs, while it
is held. It is taken by `with engine.lock:` alone, so that an interrupt cannot leave it taken.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from kvoffload.device.current import make_current
from kvoffload.device.streams import NO_WAIT, NoWait, raise_for_stream, refuse_capturing
from kvoffload.driver import SourceOrder
from kvoffload.engine import tracing
from kvoffload.engine.job import Job
from kvoffload.engine.lifecycle import EngineLifecycle
from kvoffload.engine.queues import TransferQueue
from kvoffload.engine.report import PlanReport, make_report
from kvoffload.engine.request import (
    Request,
    SourceOrderName,
    make_request,
    refuse_repeated_targets,
    sources_of,
)
from kvoffload.engine.transfer import Event, Transfer
from kvoffload.engine.wait_streams import After, Followed, Source
from kvoffload.errors import DriverError
from kvoffload.internal.types import Ids
from kvoffload.planning.transfer_plan import BlockPlan, Direction, build
from kvoffload.tuning import CopierName, CopyMethod


class OffloadEngine(EngineLifecycle):
    """Moves blocks between the planes of `layout` and a pool of pinned slots.

    Usable from any thread; a context manager.

    Args:
        layout: the KV cache. Its memory must stay allocated until the engine is closed.
        device: the device that holds the planes.
        num_slots: slots of the pinned pool, `layout.slot_bytes` bytes each.
        sm_limit: how many multiprocessors a copy kernel may use; 0 forbids kernels, and compiles none. (The simulated
            device interprets them, slowly, so it selects none by itself.)
        prefer: "overlap", for a GPU that computes during transfers: the copy method whose cost (its time, and what the
            computation loses) is nearest to the lowest, in the worse of two kinds of computation; within 1.1 times of
            it, the copy engine. "latency": the method that ends soonest on an idle GPU.
        profile: what transfers cost here, see `kvoffload.tuning`; None: what `kvoffload tune` measured for this GPU,
            driver, link and bindings, else one that comes with the package.
        max_in_flight: jobs that may be unfinished at a time.
        stream_priority: of the engine's streams, within `device.stream_priorities`. It orders kernels, not copies.
        progress: called with (bytes done, bytes in all) while the pool is pinned.

    Attributes:
        layout, device, num_slots, sm_limit, prefer, profile, max_in_flight: as given.
        lock: guards the engine; a BlockCache on it shares it. Take it with `with` alone.
        number: no two engines of a process have the same.

    Raises:
        LayoutError: a plane is not inside one allocation of this device's memory.
        CapacityError: the pool cannot be pinned; the message says what is free.
        ClosedError: the device is closed.
        ValueError, TypeError: bad arguments.
    """

    # transfers ----------------------------------------------------------------------------------------------------

    def store(
        self,
        blocks: Ids,
        slots: Ids,
        group: int = 0,
        first_sub_block: int = 0,
        after: After = None,
        copier: CopierName | CopyMethod | None = None,
    ) -> Job:
        """Copy blocks from the device to slots. Returns when the copies are queued; if the driver's queues are full, at
        once, and later calls of the engine queue them. The ids are copied: their arrays may be changed afterwards.

        Block `i` goes to sub-block `(first_sub_block + i) % f` of slot `(first_sub_block + i) // f` of the list, with
        `f = layout.blocks_per_slot`. What a slot's other sub-blocks hold stays as it is.

        Args:
            blocks: source ids: ints, or what numpy turns into a 1-D integer array; a repeated one is copied each time.
            slots: target ids, `layout.slots_for(len(blocks), first_sub_block)` of them, no repeats. If a BlockCache
                owns the engine's slots, they must belong to an open reservation of that cache.
            group: which group's block table `blocks` refers to.
            first_sub_block: where in the first slot to begin.
            after: what must have ended before a block is read: the work so far of a stream (a handle, or anything with
                `__cuda_stream__`: CuPy, cuda.core, Numba), or an array's producer (anything with `__dlpack__`, which is
                asked to make a stream of the engine's wait, or with `__cuda_array_interface__`), or a list of these.
                Other work that reads or writes an array is not waited for. A CuPy array stands for CuPy's current
                stream. None: the legacy default stream, which CuPy uses by default. `NO_WAIT`: nothing.
            copier: "strided", "gather", "split", "batch" or "loop", or a `CopyMethod`, which also says how many
                programs a kernel gets, and its share of the blocks in a split (0: what the profile says). None: the
                profile's choice.

        Returns:
            The job. A driver error while it is queued, now or later, fails the job; it does not raise here.

        Raises:
            LayoutError, ValueError, TypeError: bad arguments; ValueError also if a BlockCache owns the slots and no
                open reservation of it has them.
            CapacityError: `max_in_flight` jobs are unfinished, or for a second no wait stream for the arrays in `after`
                was free.
            CapabilityError: the copier asked for cannot run here.
            ClosedError: the engine is closed.
            TransferError: `after` is being captured, or the CUDA context is lost.
            DriverError: the driver failed before anything was queued.
            Nothing has happened in any of these cases. After a KeyboardInterrupt the transfer may have begun, and fails
            as soon as nothing of it is left on the GPU: `drain` before the blocks are used for something else.
        """
        return self._submit(Direction.STORE, blocks, slots, group, first_sub_block, after, copier, "auto", None)

    def load(
        self,
        slots: Ids,
        blocks: Ids,
        group: int = 0,
        first_sub_block: int = 0,
        after: After = None,
        copier: CopierName | CopyMethod | None = None,
        source_order: SourceOrderName = "auto",
        parts: int | Sequence[Sequence[int]] | None = None,
    ) -> Job:
        """Copy slots to blocks on the device: the inverse of `store`, with the same correspondence and errors.

        Args:
            slots: source ids; repeats are legal.
            blocks: target ids; one that repeats is refused with LayoutError, as copies of one job have no order.
            group, first_sub_block, copier: as for `store`.
            after: what must have ended before a block is overwritten, as for `store`; that includes what reads it.
            source_order: when the driver may read the slots. "stream": in stream order. "any": at any moment from now
                on, which some platforms do faster; only right when nothing on the GPU still writes them. "auto": "any"
                if the host has seen every store to these slots end, else "stream".
            parts: copy the planes in parts, one after the other, so that a layer's computation need not wait for later
                layers: `job.order_before(stream, part=k)`. A number: equal parts, in the order of the planes. Or for
                each part the indices of its planes, every plane once. The copier "split" cannot copy parts.

        Raises:
            ValueError: as `store`; also `source_order="any"` while a store to one of the slots is unfinished.
        """
        return self._submit(Direction.LOAD, blocks, slots, group, first_sub_block, after, copier, source_order, parts)

    def submit(
        self,
        direction: Direction | Literal["store", "load"],
        blocks: Ids,
        slots: Ids,
        group: int = 0,
        first_sub_block: int = 0,
        after: After = None,
        copier: CopierName | CopyMethod | None = None,
        source_order: SourceOrderName = "auto",
        parts: int | Sequence[Sequence[int]] | None = None,
    ) -> Job:
        """`store` and `load` in one; arguments and errors as there."""
        return self._submit(
            Direction(direction), blocks, slots, group, first_sub_block, after, copier, source_order, parts
        )

    def _submit(
        self,
        direction: Direction,
        blocks: Ids,
        slots: Ids,
        group: int,
        first_sub_block: int,
        after: After,
        copier: CopierName | CopyMethod | None,
        source_order: SourceOrderName,
        parts: int | Sequence[Sequence[int]] | None,
    ) -> Job:
        """A transfer in its five steps."""
        request = make_request(
            self._limits, direction, blocks, slots, group, first_sub_block, after, copier, source_order, parts
        )
        if self._closed or os.getpid() != self._process:  # what follows needs the device's context
            self.device.check_process()
            self.check_usable()
        try:
            with make_current(self._driver, self._context, request.arrays):
                followed = self._follow(request.sources) if request.arrays else None  # while referred to, reserved
                streams: tuple[int, ...] = request.sources if followed is None else followed.streams
                with self.lock:
                    # 1. check: what depends on the moment
                    self._check_submission(request, streams)
                    if len(request.blocks) == 0:
                        return self._complete_empty(request)
                    # 2. plan, 3. select, 4. order
                    transfer = self._new_transfer(next(self._ids), request)
                    # 5. enqueue: as much as there is room for; the rest waits on the host
                    self._record_markers(transfer, streams)
                    self._enqueue(request, transfer)
                    job = Job(self, transfer)
                    if tracing.current is not None:
                        tracing.start(tracing.current, job, transfer, self._parts.tracker.notices)
                    return job
        except DriverError as error:
            self._mark_lost(error)
            raise

    def _check_submission(self, request: Request, streams: tuple[int, ...]) -> None:
        """Refuse what cannot be submitted now; then take note of what has ended, where that can matter here."""
        in_flight = self._parts.in_flight
        if not in_flight.consistent:
            self._parts.tracker.repair()
        if self._closed or self._closing or in_flight.lost:
            self.check_usable()
        refuse_repeated_targets(request, self._scratch)
        if request.direction is Direction.STORE:
            guard = None if self._slot_guard is None else self._slot_guard()
            if guard is not None:
                guard.check_store(request.slots)
        for stream in streams:
            try:
                if self._driver.stream_is_capturing(stream):
                    refuse_capturing(self._driver, stream, "after")
            except DriverError as error:
                raise_for_stream(error, stream, "after")
        same = in_flight.stores if request.direction is Direction.STORE else in_flight.loads
        unasked = len(same.transfers) >= in_flight.most_unasked
        if unasked or same.waiting or same.opposite.transfers:
            with make_current(self._driver, self._context):
                self._parts.tracker.advance()
            self.check_usable()
            self._parts.tracker.check_room(1 if len(request.blocks) else 0)

    def _new_transfer(self, number: int, request: Request) -> Transfer:
        """The record of a checked transfer, which is not in flight yet. Changes nothing."""
        copiers, in_flight, direction = self._parts.copiers, self._parts.in_flight, request.direction
        # 2. plan: what is copied, per block
        plan = self._plan(request)
        # 3. select: the copy method, by the profile
        opposite = in_flight.loads if direction is Direction.STORE else in_flight.stores
        opposed = len(opposite.transfers) > 0
        method, reason = copiers.select(plan, request.copier, self.profile, self.prefer, opposed)
        # 4. order: what it must follow
        transfer = Transfer(number, direction, plan.nbytes, 1 if request.parts is None else len(request.parts))
        transfer.engine, transfer.simulated = self, self._driver.simulated
        if direction is Direction.LOAD:
            transfer.source_order = self._source_order(request)
        transfer.conflict = self._conflict(request, opposite) if opposed else None
        transfer.method, transfer.reason = method, reason
        transfer.shares = copiers.shares(method, plan)
        return transfer

    def _plan(self, request: Request) -> BlockPlan:
        group, parts = request.group, request.parts
        return build(
            self._folds.groups[group] if parts is None else self._folds.of(group, parts),
            self.layout,
            request.direction,
            group_index=group,
            slot_addresses=self._parts.slot_addresses,
            slots=request.slots,
            blocks=request.blocks,
            first_sub_block=request.first_sub_block,
        )

    def _follow(self, sources: tuple[Source, ...]) -> Followed:
        """Streams that stand for what a transfer is to follow. The lock must not be held: arrays run code of theirs.

        The wait stream of arrays is reserved as long as the result is referred to.
        """
        token = object()
        try:
            with self.lock:
                self.check_usable()
                self._following.add(token)
            return self._parts.wait_streams.follow(sources)
        finally:
            self._following.discard(token)

    def resolve(self, after: After) -> Followed | NoWait | None:
        """What stands for `after` in several transfers, so that its arrays are asked for their producers once.

        Call it before taking the lock. Raises what `store` raises for `after`.
        """
        if after is NO_WAIT or (after is None and self.layout.on_default_stream):
            return after
        sources = sources_of(after, self.layout)
        if not sources:
            return NO_WAIT
        self.device.check_process()
        return self._follow_here(sources)

    def _follow_here(self, sources: tuple[Source, ...]) -> Followed:
        """`_follow` with the device's context current."""
        try:
            with self.device.current():
                return self._follow(sources)
        except DriverError as error:
            self._mark_lost(error)
            raise

    def _complete_empty(self, request: Request) -> Job:
        """A job with nothing to copy has ended at once."""
        transfer = Transfer(next(self._ids), request.direction, 0, request.num_parts)
        transfer.simulated = self._driver.simulated
        self._parts.tracker.complete_empty(transfer)
        return Job(self, transfer)

    def _source_order(self, request: Request) -> SourceOrder:
        """Of a load: ANY where it is safe. (Of stores STREAM always: reads of device memory would overtake the stream.)

        Raises:
            ValueError: "any" is asked for while a store to one of the slots is unfinished.
        """
        stores = self._parts.in_flight.stores
        if request.source_order == "stream":
            return SourceOrder.STREAM
        if not stores.transfers:
            return SourceOrder.ANY
        latest = self._hazards.latest_on_slots(Direction.STORE, request.slots)
        if stores.unfinished(latest) is None:
            return SourceOrder.ANY
        if request.source_order == "any":
            raise ValueError(
                'source_order="any" while a store to one of the slots is unfinished; use "auto" or "stream"'
            )
        return SourceOrder.STREAM

    def _conflict(self, request: Request, queue: TransferQueue) -> Transfer | None:
        """The unfinished transfer of the other direction, whose queue this is, that this one must follow; earlier ones
        end before it.
        """
        hazards, other = self._hazards, request.direction.opposite
        on_slots = hazards.latest_on_slots(other, request.slots)
        return queue.unfinished(max(on_slots, hazards.latest_on_blocks(other, request.group, request.blocks)))

    def _record_markers(self, transfer: Transfer, streams: tuple[int, ...]) -> None:
        """Record its markers and take its events: the last that may refuse it. What is not used is found idle again
        by the next call, which repairs.
        """
        in_flight = self._parts.in_flight
        timers, markers = in_flight.timers, in_flight.markers
        in_flight.consistent = False
        for stream in streams:
            marker = markers.idle.pop() if markers.idle else markers.make()
            transfer.markers.append(marker)
            try:
                self._driver.event_record(marker, stream)
            except DriverError as error:
                raise_for_stream(error, stream, "after")
        transfer.start = timers.idle.pop() if timers.idle else timers.make()
        transfer.end = timers.idle.pop() if timers.idle else timers.make()

    def _enqueue(self, request: Request, transfer: Transfer) -> None:
        """Put a transfer in flight and queue what has room of it. A driver error fails it from here on.

        It is in flight from when it is in its queue. An interrupt before that leaves events, which the next call finds
        idle; an interrupt after that fails the transfer, see `Tracker.repair`.
        """
        in_flight = self._parts.in_flight
        queue = in_flight.stores if transfer.direction is Direction.STORE else in_flight.loads
        in_flight.consistent = False
        transfer.sequence = queue.submitted + 1
        self._hazards.record(transfer.direction, request.group, request.slots, request.blocks, transfer.sequence)
        transfer.step(Event.SUBMITTED)
        queue.transfers.append(transfer)
        queue.submitted = transfer.sequence
        queue.waiting.append(transfer)
        try:
            if len(queue.waiting) == 1 and self._parts.launcher.enqueue(queue, transfer):
                queue.waiting.clear()
        except DriverError as error:  # the context is lost, and every transfer has failed
            self._parts.tracker.mark_lost(error)
        transfer.submitting = False
        in_flight.consistent = True

    def plan(
        self,
        direction: Direction | Literal["store", "load"],
        blocks: Ids,
        slots: Ids,
        group: int = 0,
        first_sub_block: int = 0,
        copier: CopierName | CopyMethod | None = None,
    ) -> PlanReport:
        """The operations, copy method and expected time of such a transfer. Submits nothing. Raises as `store`."""
        copiers = self._parts.copiers
        request = make_request(
            self._limits, Direction(direction), blocks, slots, group, first_sub_block, NO_WAIT, copier, "auto", None
        )
        self.device.check_process()
        with self.lock:
            self.check_usable()
            refuse_repeated_targets(request, self._scratch)
            return make_report(self, self._plan(request), request.copier, copiers, simulated=self._driver.simulated)

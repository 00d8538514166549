"""OffloadEngine: stores blocks to pinned slots and loads them back, ordered on the GPU.

Order. A transfer's stream waits for the caller's streams (`after`), for the previous transfer of its direction, and for
the latest transfer of the other direction that touches its slots or blocks. The waits are on the GPU, and point to work
queued earlier, so they cannot form a cycle. What the driver's queues have no room for waits on the host, in order; an
urgent load goes ahead of what waits there.

    caller's stream   ──compute──●after                          ┌─compute (order_before)
    store lane        ───────────┴─wait─[start copy copy end]────┤
    load lane                          wait for slot or block ───┴─[start copy copy end]

Threads. One lock guards everything that changes; nothing waits for the GPU, and no code of the caller's runs, while it
is held. It is taken by `with engine.lock:` alone, so that an interrupt cannot leave it taken.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

from kvoffload.device.current import make_current
from kvoffload.device.streams import raise_for_stream
from kvoffload.engine import tracing
from kvoffload.engine.groups import GroupTransfer, make_group_requests
from kvoffload.engine.job import Job
from kvoffload.engine.preparation import Requests, TransferPreparation
from kvoffload.engine.request import Request, SourceOrderName, make_request
from kvoffload.engine.transfer import Event, Transfer
from kvoffload.engine.urgent import put_ahead
from kvoffload.engine.wait_streams import After
from kvoffload.errors import DriverError
from kvoffload.internal.checks import names_its_calls
from kvoffload.internal.nesting import in_call, raise_nested
from kvoffload.internal.types import Ids
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopierName, CopyMethod


@names_its_calls
class OffloadEngine(TransferPreparation):
    """Moves blocks between the planes of `layout` and a pool of pinned slots.

    Usable from any thread; a context manager.

    Args:
        layout: the KV cache. Its memory must stay allocated until the engine is closed.
        device: the device that holds the planes.
        num_slots: slots of the pinned pool, `layout.slot_bytes` bytes each; None: 1024. An engine of 0 slots pins
            nothing, and refuses every slot.
        host_memory: memory of the caller's for the slots, see `HostMemory`; then `num_slots` is left out.
        sm_limit: how many multiprocessors a copy kernel may use; 0 forbids kernels, and compiles none. (The simulated
            device interprets them, slowly, so it selects none by itself.)
        prefer: "overlap", for a GPU that computes during transfers: the copy method whose cost (its time, and what the
            computation loses) is nearest to the lowest, in the worse of two kinds of computation; within 1.1 times of
            it, the copy engine. "latency": the method that ends soonest on an idle GPU.
        profile: what transfers cost here, see `kvoffload.tuning`; None: what `kvoffload tune` measured for this GPU,
            driver, link and bindings, else one that comes with the package.
        max_in_flight: jobs that may be unfinished at a time.
        most_queued_bytes: what the driver is given at a time of each direction, in bytes, or one operation if that has
            more; the rest waits on the host. An urgent load waits for so much at most, and for the rest of a load that
            has begun. What waits is queued by later calls (`poll`, `drain`, a submission, `done` or `wait` of a job, or
            the thread of a done callback): give it only if the program calls one of these all the time. None: as much
            as the driver's queues hold.
        stream_priority: of the engine's streams, within `device.stream_priorities`. It orders kernels, not copies.
        progress: called with (bytes done, bytes in all) while the pool is pinned.

    Attributes:
        layout, device, num_slots, sm_limit, prefer, profile, max_in_flight: as given.
        lock: guards the engine; a BlockCache on it shares it. Take it with `with` alone. Inside, calls are refused or
            answered as inside any call of the engine.
        number: no two engines of a process have the same.

    Raises:
        LayoutError: a plane is not inside one allocation of this device's memory, or inside mapped virtual memory of it
            without a gap.
        CapacityError: the pool cannot be pinned; the message says what is free.
        ValueError: `host_memory` does not fit the layout, overlaps registered memory, or is not registered although it
            is said to be.
        ClosedError: the device is closed.
        ValueError, TypeError: bad arguments.
    """

    # transfers ----------------------------------------------------------------------------------------------------

    def store(
        self,
        blocks: Ids,
        slots: Ids,
        *,
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
            slots: target ids, as many as `layout.slots_for` says, no repeats. If a BlockCache owns the engine's slots,
                they must belong to an open reservation of that cache.
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
            RuntimeError: it is called inside another call in the same thread, such as by a signal handler.
            Nothing has happened in any of these cases. After a KeyboardInterrupt the transfer may have begun, and fails
            as soon as nothing of it is left on the GPU: `drain` before the blocks are used for something else.
        """
        request = make_request(self._limits, Direction.STORE, blocks, slots, group, first_sub_block, after, copier)
        return self._submit((request,))

    def load(
        self,
        slots: Ids,
        blocks: Ids,
        *,
        group: int = 0,
        first_sub_block: int = 0,
        after: After = None,
        copier: CopierName | CopyMethod | None = None,
        source_order: SourceOrderName = "auto",
        parts: int | Sequence[Sequence[int]] | None = None,
        urgent: bool = False,
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
            urgent: go ahead of the loads that wait on the host, but not of one that has begun, of other urgent ones, or
                of what this load must follow. How long it waits for what is queued on the GPU, `most_queued_bytes`
                bounds.

        Raises:
            ValueError: as `store`; also `source_order="any"` while a store to one of the slots is unfinished.
        """
        towards, limits = Direction.LOAD, self._limits
        request = make_request(
            limits, towards, blocks, slots, group, first_sub_block, after, copier, source_order, parts, urgent
        )
        return self._submit((request,))

    def submit(
        self,
        direction: Direction | Literal["store", "load"],
        blocks: Ids,
        slots: Ids,
        *,
        group: int = 0,
        first_sub_block: int = 0,
        after: After = None,
        copier: CopierName | CopyMethod | None = None,
        source_order: SourceOrderName = "auto",
        parts: int | Sequence[Sequence[int]] | None = None,
        urgent: bool = False,
    ) -> Job:
        """`store` and `load` in one; arguments and errors as there."""
        towards = direction if isinstance(direction, Direction) else Direction(direction)
        limits = self._limits
        request = make_request(
            limits, towards, blocks, slots, group, first_sub_block, after, copier, source_order, parts, urgent
        )
        return self._submit((request,))

    def store_groups(
        self,
        transfers: Sequence[GroupTransfer],
        *,
        after: After = None,
        copier: CopierName | CopyMethod | None = None,
    ) -> Job:
        """Store blocks of several groups as one transfer: one job, checked all together before anything happens.

        The copies of all groups by one copier of the copy engine are submitted together. `job.nbytes` is of all groups,
        `method` and `copier` are those of most bytes, and `reason` has one text for each group.

        Args:
            transfers: what is stored of each group. A group may be in it several times, for instance for pieces that
                begin at other sub-blocks. The slots of all must be distinct. What has no blocks counts for nothing.
            after, copier: as for `store`; for all groups.

        Raises:
            As `store`. The message names the element of `transfers`.
        """
        return self._submit(make_group_requests(self._limits, Direction.STORE, transfers, after, copier))

    def load_groups(
        self,
        transfers: Sequence[GroupTransfer],
        *,
        after: After = None,
        copier: CopierName | CopyMethod | None = None,
        source_order: SourceOrderName = "auto",
        urgent: bool = False,
    ) -> Job:
        """Load blocks of several groups as one transfer: the inverse of `store_groups`. It has no parts.

        Args:
            transfers: as for `store_groups`. Slots may repeat. No two blocks may share memory: not within a group, nor
                in groups over the same planes.
            after, copier, source_order, urgent: as for `load`; for all groups.

        Raises:
            As `load`. The message names the element of `transfers`.
        """
        options = after, copier, source_order, urgent
        return self._submit(make_group_requests(self._limits, Direction.LOAD, transfers, *options))

    def submit_locked(
        self, direction: Direction, blocks: Ids, slots: Ids, *, group: int, after: After, parts: Any = None
    ) -> Job:
        """`submit` for a cache, which calls it with the lock held."""
        request = make_request(self._limits, direction, blocks, slots, group, 0, after, None, parts=parts)
        return self._submit((request,), locked=True)

    def _submit(self, requests: Requests, *, locked: bool = False) -> Job:
        """A transfer in its five steps; `locked`: for a cache, which holds the lock."""
        if in_call(self.lock) and not locked:
            raise_nested("a submission")
        request = requests[0]
        if self._closed or os.getpid() != self._process:  # what follows needs the device's context
            self.device.check_process()
            self.check_usable()
        try:
            with make_current(self._driver, self._context, request.arrays):
                followed = self._follow(request.sources) if request.arrays else None  # while referred to, reserved
                streams: tuple[int, ...] = request.sources if followed is None else followed.streams
                with self.lock:
                    # 1. check: what depends on the moment
                    self._check_submission(requests, streams)
                    if len(request.blocks) == 0:
                        return self._complete_empty(request)
                    # 2. plan, 3. select, 4. order
                    transfer = self._new_transfer(next(self._ids), requests)
                    # 5. enqueue: as much as there is room for; the rest waits on the host
                    self._record_markers(transfer, streams)
                    self._enqueue(requests, transfer)
                    job = Job(self, transfer)
                    if tracing.current is not None:
                        tracing.start(tracing.current, job, transfer, self._parts.tracker.notices)
                    return job
        except DriverError as error:
            self._mark_lost(error)
            raise

    def _complete_empty(self, request: Request) -> Job:
        """A job with nothing to copy has ended at once."""
        transfer = Transfer(next(self._ids), request.direction, 0, request.num_parts)
        transfer.simulated = self._driver.simulated
        self._parts.tracker.complete_empty(transfer)
        return Job(self, transfer)

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

    def _enqueue(self, requests: Requests, transfer: Transfer) -> None:
        """Put a transfer in flight and queue what has room of it. A driver error fails it from here on.

        It is in flight from when it is in its queue. An interrupt before that leaves events, which the next call finds
        idle; an interrupt after that fails the transfer, see `Tracker.repair`.
        """
        in_flight = self._parts.in_flight
        queue = in_flight.stores if transfer.direction is Direction.STORE else in_flight.loads
        in_flight.consistent = False
        if not (transfer.urgent and queue.waiting and put_ahead(in_flight, transfer, requests)):
            sequence = queue.submitted + 1
            for request in requests:
                self._hazards.record(transfer.direction, request.group, request.slots, request.blocks, sequence)
            transfer.sequence = sequence
            transfer.step(Event.SUBMITTED)
            queue.transfers.append(transfer)
            queue.submitted = sequence
            queue.waiting.append(transfer)
        try:
            if queue.waiting[0] is transfer and self._parts.launcher.enqueue(queue, transfer):
                queue.waiting.popleft()
        except DriverError as error:  # the context is lost, and every transfer has failed
            self._parts.tracker.mark_lost(error)
        transfer.submitting = False
        in_flight.consistent = True

"""Engine: the face of an engine, over one device or several. OffloadEngine and ShardedEngine submit below it.

Threads. One lock guards everything that changes; nothing waits for the GPU, and no code of the caller's runs, while it
is held. It is taken by `with engine.lock:` alone, so that an interrupt cannot leave it taken.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

import numpy as np

from kvoffload.device.device import Device
from kvoffload.device.streams import NO_WAIT
from kvoffload.engine.callbacks import Callbacks
from kvoffload.engine.job import AnyTransfer, Job, TransferResult
from kvoffload.engine.queues import Queues, Reports
from kvoffload.engine.request import GroupTransfer, Requests, SourceOrderName
from kvoffload.engine.shard import Shard, Shared
from kvoffload.engine.statistics import EngineStatistics
from kvoffload.engine.tracing import deliver
from kvoffload.errors import CapacityError
from kvoffload.internal.checks import as_timeout
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import in_call, raise_nested, refuse_nested
from kvoffload.internal.teardown import run_all
from kvoffload.internal.types import Ids, Int64Array
from kvoffload.internal.waiting import wait_until
from kvoffload.planning.layer_groups import PartsLike
from kvoffload.planning.transfer_plan import Direction
from kvoffload.tuning import CopierName, CopyMethod

_FOR_INTEGRATIONS = frozenset(
    [
        *("advance", "check_parts", "check_process", "check_room", "check_usable", "forget_report", "guard_slots"),
        *("in_flight", "jobs_in_flight", "lock", "order_all_before", "order_job_before", "resolve"),
        *("submit_locked", "submitted", "wait_stream", "when_done"),
    ]
)
_After = TypeVar("_After")
_Plan = TypeVar("_Plan")
_Result = TypeVar("_Result")


class SlotGuard(Protocol):
    """The owner of an engine's slots, such as a BlockCache."""

    @property
    def busy(self) -> bool:
        """Whether the slots may still be read or written by its reservations, leases and transfers."""

    def check_store(self, slots: Int64Array) -> None:
        """Raise unless a store may write these slots now. Called under the engine's lock, before anything happens."""


class Engine(Generic[_After, _Plan]):
    """What `OffloadEngine` and `ShardedEngine` have in common: all calls of theirs. Each has steps of its own for
    submitting (`_requests`, `_submit`), for asking what has ended (`_track`), and for streams (`order_job_before`).

    Caches and integrations call more than users do; completion leaves these names out.

    Attributes:
        devices: that the transfers run on.
        num_slots, max_in_flight: as given.
        lock: guards the engine; a BlockCache on it shares it. Take it with `with` alone. Inside, calls are refused or
            answered as inside any call of the engine.
    """

    devices: tuple[Device, ...]
    num_slots: int
    max_in_flight: int
    _shards: tuple[Shard, ...]
    _names: tuple[str, ...]  # of the shards, for messages
    _in_flight: Queues[Any]  # what has not ended
    _reports: Reports  # what has
    _requests: Callable[..., Any]  # the checked arguments of a transfer, see `Limits.requests`; for `_submit`
    _requests_of_groups: Callable[..., Any]
    _submit: Callable[..., Job]  # submits a checked transfer; `locked=True`: for a cache, which holds the lock
    _track: Callable[[], None]  # asks which transfers have ended, queues what waits on the host; also under the lock
    _plan: Callable[[Any], _Plan]
    _resolve: Callable[[_After], Any]

    def __init__(self) -> None:
        self._shared = Shared()
        self.lock, self._closing = self._shared.lock, self._shared.closing
        self._process = os.getpid()
        self._slot_guard: weakref.ref[SlotGuard] | None = None
        self._ids, self._callbacks = itertools.count(1), Callbacks()

    def order_job_before(self, record: Any, streams: Any, part: int | None) -> None:
        """See `Job.order_before`."""
        raise NotImplementedError

    # transfers ----------------------------------------------------------------------------------------------------

    def store(
        self,
        blocks: Ids,
        slots: Ids,
        *,
        group: int = 0,
        first_sub_block: int = 0,
        after: _After = None,  # type: ignore[assignment]
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
                A `ShardedEngine` takes a list or tuple with such a value for each device, in their order; or an object
                with a method `after()` that returns one, as `kvoffload.jax.OwnedCache` (`after=cache`); None or
                `NO_WAIT`: the same for all.
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
            Nothing has happened in any of these cases, on no device; of several, a note on the exception names the one
            that refused. After a KeyboardInterrupt the transfer may have begun, and fails
            as soon as nothing of it is left on the GPU: `drain` before the blocks are used for something else.
        """
        requests = self._requests(Direction.STORE, blocks, slots, group, first_sub_block, after, copier)
        return self._submit(requests)

    def load(
        self,
        slots: Ids,
        blocks: Ids,
        *,
        group: int = 0,
        first_sub_block: int = 0,
        after: _After = None,  # type: ignore[assignment]
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
                each part the indices of its planes, every plane once; of several devices, then all must have as many
                planes in the group. The copier "split" cannot copy parts.
            urgent: go ahead of the loads that wait on the host, but not of one that has begun, of other urgent ones, or
                of what this load must follow. How long it waits for what is queued on the GPU, `most_queued_bytes`
                bounds.

        Raises:
            ValueError: as `store`; also `source_order="any"` while a store to one of the slots is unfinished.
        """
        towards = Direction.LOAD
        requests = self._requests(
            towards, blocks, slots, group, first_sub_block, after, copier, source_order, parts=parts, urgent=urgent
        )
        return self._submit(requests)

    def submit(
        self,
        direction: Direction | Literal["store", "load"],
        blocks: Ids,
        slots: Ids,
        *,
        group: int = 0,
        first_sub_block: int = 0,
        after: _After = None,  # type: ignore[assignment]
        copier: CopierName | CopyMethod | None = None,
        source_order: SourceOrderName = "auto",
        parts: int | Sequence[Sequence[int]] | None = None,
        urgent: bool = False,
    ) -> Job:
        """`store` and `load` in one; arguments and errors as there."""
        towards = direction if isinstance(direction, Direction) else Direction(direction)
        requests = self._requests(
            towards, blocks, slots, group, first_sub_block, after, copier, source_order, parts=parts, urgent=urgent
        )
        return self._submit(requests)

    def store_groups(
        self,
        transfers: Sequence[GroupTransfer],
        *,
        after: _After = None,  # type: ignore[assignment]
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
        return self._submit(self._requests_of_groups(Direction.STORE, transfers, after, copier))

    def load_groups(
        self,
        transfers: Sequence[GroupTransfer],
        *,
        after: _After = None,  # type: ignore[assignment]
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
        requests = self._requests_of_groups(Direction.LOAD, transfers, after, copier, source_order, urgent=urgent)
        return self._submit(requests)

    def submit_locked(
        self, direction: Direction, blocks: Ids, slots: Ids, *, group: int, after: Any, parts: Any = None
    ) -> Job:
        """`submit` for a cache, which calls it with the lock held; `after` comes from `resolve`."""
        return self._submit(self._requests(direction, blocks, slots, group, 0, after, parts=parts), locked=True)

    def plan(
        self,
        direction: Direction | Literal["store", "load"],
        blocks: Ids,
        slots: Ids,
        *,
        group: int = 0,
        first_sub_block: int = 0,
        copier: CopierName | CopyMethod | None = None,
    ) -> _Plan:
        """The operations, copy method and expected time of such a transfer. Submits nothing. Raises as `store`.

        Returns:
            A PlanReport; a `ShardedEngine` returns a tuple with one for each device.
        """
        towards = Direction(direction)
        requests = self._requests(towards, blocks, slots, group, first_sub_block, NO_WAIT, copier)
        self.check_process()
        refuse_nested(self.lock, "plan")
        with self.lock:
            return self._plan(requests)

    # results ------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Take note of transfers that have ended, and queue as many segments as there is room for.

        Does not wait for the GPU. `poll`, `wait` and `done` do it too, and a submission where it needs to know. Inside
        another call in the same thread it does nothing.
        """
        if os.getpid() != self._process:
            self.check_process()
        if in_call(self.lock):
            return
        with self.lock:
            in_flight = self._in_flight
            behind = in_flight.stores.transfers or in_flight.loads.transfers or not in_flight.consistent
        if behind:
            self._track()
        if self._reports.notices:
            deliver(self._reports.notices)

    def poll(self) -> list[TransferResult]:
        """Results of jobs that have ended since the last call, in the order in which they were found to have ended.

        Each job is reported once, and not at all after `wait()` or `result()` returned or raised for it. Failed jobs
        are reported with their `error`. At most 65,536 results are kept for the next call, the newest. Inside another
        call in the same thread it returns none, and the next one reports them. A job of a `ShardedEngine` has ended
        when it has ended on all devices.
        """
        if in_call(self.lock):
            return []
        self.advance()
        with self.lock:
            return self._reports.take()

    def forget_report(self, record: AnyTransfer) -> None:
        """Keep `poll` from reporting a job that its caller has waited for."""
        self.check_process()
        with self.lock:
            self._reports.forget(record)

    def when_done(self, job: Job, callback: Callable[[Job], object]) -> None:
        """See `Job.add_done_callback`."""
        self.check_process()
        self._callbacks.add(job, callback)

    def statistics(self) -> EngineStatistics:
        """Counts and totals since the engine was created; inside another call in the same thread, as they stand.

        Of several devices, jobs and their bytes are counted once, not for each device; memory, streams and events are
        summed.
        """
        self.check_process()
        if len(self._shards) > 1 or not self._in_flight.consistent:  # shards may know of ends that it does not
            self.advance()
        with self.lock:
            in_flight, reports = self._in_flight, self._reports
            usage = zip(*(shard.parts.usage() for shard in self._shards), strict=True)
            pinned_bytes, streams, streams_in_use, events, events_in_use = map(sum, usage)
            return EngineStatistics(
                simulated=any(device.simulated for device in self.devices),
                num_slots=self.num_slots,
                pinned_bytes=pinned_bytes,
                in_flight=self.in_flight,
                held=sum(record.held for queue in in_flight.both for record in list(queue.transfers)),
                unreported=len(reports.results),
                dropped_reports=reports.dropped,
                streams=streams,
                streams_in_use=streams_in_use,
                events=events,
                events_in_use=events_in_use,
                store=in_flight.stores.totals,
                load=in_flight.loads.totals,
            )

    # for caches and integrations ----------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """How many transfers have not ended."""
        return self._in_flight.count

    @property
    def submitted(self) -> int:
        """How many transfers have been submitted so far."""
        if os.getpid() != self._process:
            self.check_process()
        with self.lock:
            in_flight = self._in_flight
            return int(in_flight.stores.submitted + in_flight.loads.submitted)

    def jobs_in_flight(self) -> tuple[Job, ...]:
        """A job for each transfer that has not ended."""
        self.check_process()
        with self.lock:
            return tuple(Job(self, record) for queue in self._in_flight.both for record in queue.transfers)

    def check_process(self) -> None:
        """Raise ClosedError in a forked child of the process that opened the devices."""
        if os.getpid() != self._process:
            for device in self.devices:
                device.check_process()

    def check_usable(self) -> None:
        """Raise ClosedError or TransferError unless transfers can be submitted, on all devices."""
        self._for_each(Shard.check_usable)

    def check_parts(self, parts: PartsLike) -> None:
        """Raise what a load of some group would raise for these `parts`."""
        self._for_each(partial(Shard.check_parts, parts=parts))

    def check_room(self, jobs: int) -> None:
        """Raise CapacityError if `jobs` more would exceed `max_in_flight`, and ClosedError if the engine is closed."""
        if os.getpid() != self._process:
            self.check_process()
        with self.lock:
            self.check_usable()
            in_flight = self._in_flight
            if len(in_flight.stores.transfers) + len(in_flight.loads.transfers) + jobs > in_flight.max_in_flight:
                self._track()
                in_flight.check_room(jobs)

    def guard_slots(self, guard: SlotGuard) -> None:
        """Make `guard` the owner of the slots: each store calls `guard.check_store(slots)` first, which may refuse it.

        The engine keeps a weak reference to it.

        Raises:
            CapacityError: the slots have another owner, which is `busy`; or it has been garbage collected, and
                transfers are in flight that may be its own.
        """
        self.check_process()
        refuse_nested(self.lock, "guard_slots")
        with self.lock:
            if self._slot_guard is not None:
                owner = self._slot_guard()
                if self.in_flight if owner is None else owner.busy:
                    raise CapacityError(
                        "the engine's slots belong to another BlockCache: delete that one first, end its reservations, "
                        "leases and transfers, or make a second engine"
                    )
            self._slot_guard = weakref.ref(guard)

    def _check_store(self, requests: Requests) -> None:
        """Have the owner of the slots, if there is one, refuse a store into slots that it keeps."""
        guard = None if self._slot_guard is None else self._slot_guard()
        if guard is not None:
            several = len(requests) > 1
            guard.check_store(np.concatenate([each.slots for each in requests]) if several else requests[0].slots)

    def resolve(self, after: _After) -> Any:
        """What stands for `after` in several transfers, so that its arrays are asked for their producers once.

        Call it before taking the lock. Raises what `store` raises for `after`.
        """
        if in_call(self.lock):
            raise_nested("a submission")
        return after if after is NO_WAIT else self._resolve(after)

    def _for_each(self, step: Callable[..., _Result], *columns: Sequence[Any], current: bool = False) -> list[_Result]:
        """`step(shard, ...)` for every shard, with its element of each column. An exception gets its name as a note.

        Args:
            current: whether the step needs the context of the shard's device.
        """
        results: list[_Result] = []
        for name, shard, *row in zip(self._names, self._shards, *columns, strict=True):
            try:
                results.append(shard.run(step, *row) if current else step(shard, *row))
            except Exception as error:
                if name:
                    error.add_note(f"on {name}")
                raise
        return results

    # the end ------------------------------------------------------------------------------------------------------

    def drain(self, timeout: float | None = None) -> None:
        """Wait until no job is unfinished. Failed jobs do not raise here; `poll` reports them.

        Raises:
            TimeoutError: `timeout` seconds have passed; the jobs go on.
            RuntimeError: it is called inside another call in the same thread.
        """
        refuse_nested(self.lock, "drain")
        in_flight = self._in_flight

        def ended() -> bool:
            self.advance()
            return in_flight.count == 0

        wait_until(ended, timeout, f"{in_flight.count} jobs in flight")

    def close(self, timeout: float | None = None) -> None:
        """Refuse new transfers, drain, unpin the pool, destroy streams and events.

        Idempotent; if it is interrupted, call it again. In a forked child it does nothing. Arrays over `slots` stay
        valid: the pool is unpinned, and becomes ordinary memory. The results of finished jobs can still be polled.

        Closing one of several devices closes what the engine has there, and the engine then refuses transfers; close
        it, too.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            TimeoutError: jobs were still running. Nothing was freed, and the engine accepts transfers again.
            RuntimeError: it is called inside another call in the same thread; nothing has happened.
        """
        if os.getpid() != self._process:
            return
        refuse_nested(self.lock, "close")
        timeout, token = as_timeout(timeout), object()

        def close(shard: Shard) -> None:
            shard.close(None if deadline is None else max(0.0, deadline - time.perf_counter()))

        deadline = None if timeout is None else time.perf_counter() + timeout
        try:
            self._closing.add(token)
            if self._in_flight.count:
                LOGGER.info("an engine is being closed, and waits for %d transfers", self._in_flight.count)
            self.drain(timeout)
            run_all(partial(close, shard) for shard in self._shards)
        finally:
            self._closing.discard(token)

    @property
    def closed(self) -> bool:
        """Whether the engine is closed: by `close`, or with one of its devices. Then nothing can be transferred."""
        return any(shard.closed for shard in self._shards)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # looking ------------------------------------------------------------------------------------------------------

    @property
    def missing_copiers(self) -> dict[str, str]:
        """The copiers that cannot run for this engine, on one of its devices at least, and why."""
        missing: dict[str, str] = {}
        for name, shard in zip(self._names, self._shards, strict=True):
            for copier, reason in shard.limits.missing_copiers.items():
                if reason is not None:
                    missing.setdefault(copier, f"{name}: {reason}" if name else reason)
        return missing

    def __dir__(self) -> list[str]:
        """Without the names that are for caches and integrations, so that completion shows users theirs."""
        return sorted(set(super().__dir__()) - _FOR_INTEGRATIONS)

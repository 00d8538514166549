"""Engine: the public calls that OffloadEngine and ShardedEngine share.

Threads. One lock guards everything that changes. While it is held, nothing waits for the GPU, and apart from a tracer's
`on_submit` no code of the caller's runs. Take it with `with engine.lock:` only, so that an interrupt cannot leave it
taken.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from kvoffload.device.device import Device
from kvoffload.device.growth import Growth
from kvoffload.device.ownership import FORKS
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
from kvoffload.internal.teardown import Closing, run_all
from kvoffload.internal.types import Ids, Int64Array
from kvoffload.internal.waiting import wait_until
from kvoffload.layout.layout import KVLayout, ShardedLayout
from kvoffload.planning.layer_groups import PartsLike
from kvoffload.planning.transfer_plan import LOAD, STORE, Direction
from kvoffload.tuning import CopierName

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
    """What guards an engine's slots, such as a BlockCache."""

    @property
    def busy(self) -> bool:
        """Whether its reservations, leases or transfers may still read or write the slots."""

    def check_store(self, slots: Int64Array) -> None:
        """Raise unless a store may write these slots now. Called under the engine's lock, before anything happens."""


class Engine(Closing, Generic[_After, _Plan]):
    """The base of `OffloadEngine` and `ShardedEngine`. Each submits (`_requests`, `_submit`), asks which transfers have
    ended (`_track`) and handles streams (`order_job_before`) in its own way.

    Some names are for caches and integrations only; `dir()` leaves them out.

    Attributes:
        devices: the devices that the transfers run on.
        layout, num_slots, max_in_flight: as given.
        lock: as `OffloadEngine` has it.
    """

    layout: KVLayout | ShardedLayout
    devices: tuple[Device, ...]
    num_slots: int
    max_in_flight: int
    _shards: tuple[Shard, ...]
    _names: tuple[str, ...]  # of the shards, for messages
    _in_flight: Queues[Any]  # transfers that have not ended
    _reports: Reports  # transfers that have
    _requests: Callable[..., Any]  # the checked arguments of a transfer, see `ArgumentChecks.requests`; for `_submit`
    _requests_of_groups: Callable[..., Any]
    _submit: Callable[..., Job]  # submits a checked transfer; `locked=True`: for a cache, which holds the lock
    _track: Callable[[], None]  # asks which transfers have ended, queues what waits on the host; also under the lock
    _plan: Callable[[Any], _Plan]
    _resolve: Callable[[_After], Any]

    def __init__(self) -> None:
        self._shared = Shared()
        self.lock, self._closing = self._shared.lock, self._shared.closing
        self._forks = len(FORKS)
        self._slot_guard: weakref.ref[SlotGuard] | None = None
        self._ids, self._callbacks = itertools.count(1), Callbacks()
        self._growth: Growth | None = None

    def _grow(self) -> None:
        """Pin the rest of a pool that grows, in a thread. The last thing that a constructor does."""
        if self.pinned_slots < self.num_slots:
            pools = [(each.context, memory) for each in self._shards for memory in each.parts.growing]
            self._growth = Growth(pools)
            self._growth.start()

    def order_job_before(self, record: Any, streams: Any, part: int | None) -> None:
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
        copier: CopierName | None = None,
    ) -> Job:
        """Copy blocks from the device to pinned slots. Returns once the copies are queued on the GPU.

        If the driver's queues are full, the rest waits on the host, and later calls of the engine queue it. The ids are
        copied: you may change your arrays once it returns. A call without blocks returns a job that has ended.

        Until the job is done, do not write the blocks and do not touch the slots, except in work on a stream after
        `job.order_before(stream)`. Transfers of the same engine wait for each other where they must.

        Block `i` goes to sub-block `(first_sub_block + i) % f` of `slots[(first_sub_block + i) // f]`, with
        `f = layout.blocks_per_slot`. The other sub-blocks of these slots keep their bytes.

        An exception means that nothing was submitted, on any device. With several devices, a note on it names the
        device that refused. After an interrupt (KeyboardInterrupt, an exception from a signal handler) the transfer may
        have begun, and goes on or fails: call `drain` before you use the blocks and slots for anything else.

        Args:
            blocks: source ids: a list of ints, or anything that numpy turns into a 1-D integer array. Ids may repeat.
            slots: target ids, without repeats, as many as `layout.slots_for` says. If a BlockCache owns the engine's
                slots, they must belong to an open reservation of that cache.
            group: the group whose block table `blocks` refers to.
            first_sub_block: the sub-block of the first slot to begin with.
            after: the GPU waits for this before it reads a block. Name it in each store: one may read its blocks before
                the store ahead of it has ended. A stream (a handle, or an object with `__cuda_stream__`: CuPy,
                cuda.core, Numba): the work queued on it so far. An array: the computation that produces it, but no
                other work that reads or writes it. An array with `__dlpack__` is asked to make a stream of the engine
                wait; a CuPy array then stands for CuPy's current stream. One that only has `__cuda_array_interface__`
                names a stream, or none. A list or tuple of these: all its elements. `NO_WAIT`, or an empty list:
                nothing. None: the legacy default stream, which CuPy uses by default; a layout with
                `on_default_stream=False` refuses it. A `ShardedEngine` takes a list or tuple with one such value per
                device, in their order; or an object whose method `after()` returns one, such as
                `kvoffload.jax.OwnedCache`; or None or `NO_WAIT` for all devices.
            copier: "strided", "pack", "batch" or "loop". None: the profile decides, and the last transfers.

        Returns:
            The job. A driver error while copies are queued, now or later, fails the job and raises nothing here.

        Raises:
            LayoutError, ValueError, TypeError: bad arguments. ValueError also if a BlockCache owns the slots and no
                open reservation of it has them. An array in `after` may raise errors of its own.
            CapacityError: `max_in_flight` jobs are unfinished; a slot of a pool that grows is not pinned yet; `after`
                has an array, and for a second no wait stream was free; or the engine has no event left.
            CapabilityError: the copier that you asked for cannot run here.
            ClosedError: the engine is closed or being closed, or this is a forked child.
            TransferError: a stream in `after` is being captured, or the CUDA context is lost.
            DriverError: the driver failed before anything was queued.
            RuntimeError: you called it inside another call in the same thread, for example in a signal handler.
        """
        requests = self._requests(STORE, blocks, slots, group, first_sub_block, after, copier)
        return self._submit(requests)

    def load(
        self,
        slots: Ids,
        blocks: Ids,
        *,
        group: int = 0,
        first_sub_block: int = 0,
        after: _After = None,  # type: ignore[assignment]
        copier: CopierName | None = None,
        source_order: SourceOrderName = "auto",
        parts: int | Sequence[Sequence[int]] | None = None,
        urgent: bool = False,
    ) -> Job:
        """Copy slots to blocks on the device: the inverse of `store`, with the same sub-blocks and the same errors.

        Until the job is done, do not write the slots and do not touch the blocks, except in work on a stream after
        `job.order_before(stream)`.

        Args:
            slots: source ids. Ids may repeat.
            blocks: target ids, without repeats: the copies of one job have no order among each other.
            group, first_sub_block, copier: as for `store`.
            after: the GPU waits for this before it overwrites a block, so it must cover work that still reads the
                blocks. Values as for `store`.
            source_order: when the driver may read the slots. "stream": in stream order. "any": at any moment from now
                on, which is faster on some platforms; only right if nothing on the GPU still writes them. "auto":
                "stream" while a store to one of these slots is not known to have ended, else "any".
            parts: copy the planes in parts, one after the other, so that one layer's computation can start before later
                layers have arrived: `job.order_before(stream, part=k)`. A number gives equal parts in the order of the
                planes. A list gives the indices of the planes of each part, every plane once; then all devices must
                have as many planes in the group. The copier "pack", which codecs need, copies only parts whose planes
                follow each other.
            urgent: go ahead of loads that wait on the host, but not of a load that has begun, of other urgent loads, or
                of loads that this one must follow. `most_queued_bytes` bounds how long it waits for loads that are
                queued on the GPU already.

        Raises:
            ValueError: as `store`; also `source_order="any"` while a store to one of the slots is unfinished, or parts
                that the copier cannot copy.
            LayoutError: as `store`; also a repeated block, or parts that do not divide the planes.
        """
        requests = self._requests(
            LOAD, blocks, slots, group, first_sub_block, after, copier, source_order, parts=parts, urgent=urgent
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
        copier: CopierName | None = None,
        source_order: SourceOrderName = "auto",
        parts: int | Sequence[Sequence[int]] | None = None,
        urgent: bool = False,
    ) -> Job:
        """Submit as `store` or `load` does, by `direction`. Arguments and errors as there. ValueError for another
        direction, or for a store with `parts` or `urgent=True`; a store ignores `source_order`.
        """
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
        copier: CopierName | None = None,
    ) -> Job:
        """Store blocks of several groups as one transfer with one job. All is checked before anything happens.

        `job.nbytes` sums over the groups, `job.copier` is that of the element with the most bytes, and `job.reason` has
        one text per group, or that of this element if the last transfers decided. Copies by the same copier, except
        "pack", are submitted together.

        Args:
            transfers: a list or tuple: one element for each group, or several if pieces of a group begin at different
                sub-blocks. The slots of all must be distinct. Elements without blocks are left out; without any other
                the job has ended.
            after, copier: as for `store`; for all groups.

        Raises:
            As `store`. If an element has a bad argument, the message names it, unless a slot repeats.
        """
        return self._submit(self._requests_of_groups(STORE, transfers, after, copier))

    def load_groups(
        self,
        transfers: Sequence[GroupTransfer],
        *,
        after: _After = None,  # type: ignore[assignment]
        copier: CopierName | None = None,
        source_order: SourceOrderName = "auto",
        urgent: bool = False,
    ) -> Job:
        """Load blocks of several groups as one transfer: the inverse of `store_groups`, without parts.

        Args:
            transfers: as for `store_groups`, but slots may repeat. No two blocks may share memory, neither in one group
                nor in groups over the same planes.
            after, copier, source_order, urgent: as for `load`; for all groups.

        Raises:
            As `load`. If an element has a bad argument, the message names it, unless a block repeats.
        """
        requests = self._requests_of_groups(LOAD, transfers, after, copier, source_order, urgent=urgent)
        return self._submit(requests)

    def submit_locked(
        self, direction: Direction, blocks: Int64Array, slots: Int64Array, *, group: int, after: Any, parts: Any = None
    ) -> Job:
        """Submit as `submit` does, for the guard of the slots, see `guard_slots`, which calls it with the lock held.

        Nothing asks the guard whether a store may write its slots, and neither blocks nor slots are copied.

        Args:
            blocks, slots: ids in range, `blocks_per_slot` blocks for each slot, in arrays that nothing changes later.
            after: from `resolve`.
        """
        raise NotImplementedError

    def plan(
        self,
        direction: Direction | Literal["store", "load"],
        blocks: Ids,
        slots: Ids,
        *,
        group: int = 0,
        first_sub_block: int = 0,
        copier: CopierName | None = None,
    ) -> _Plan:
        """Return what such a transfer would copy, how, and its expected time. Submits nothing. Raises as `store`, or as
        `load`, apart from what concerns `after`, room, slots that are not pinned yet, and a BlockCache.

        Returns:
            A PlanReport. A `ShardedEngine` returns a tuple with one per device.
        """
        towards = Direction(direction)
        requests = self._requests(towards, blocks, slots, group, first_sub_block, NO_WAIT, copier)
        self.check_process()
        refuse_nested(self.lock, "plan")
        with self.lock:
            return self._plan(requests)

    # results ------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Note which transfers have ended, and queue as many segments as there is room for. Does not wait for the GPU.

        May call a tracer's `on_end`. In a forked child: ClosedError. Inside another call in this thread: does nothing.
        """
        if len(FORKS) != self._forks:
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
        """Return results of jobs that have ended, in the order in which the engine noticed. Does not wait for the GPU.

        Each job is reported once, failed ones with their `error`. A job is not reported once `wait()`, `result()` or an
        `await` of it has returned, or raised its error. The engine keeps the newest 65,536 results for the next call.
        Inside another call in the same thread it returns an empty list, and the next call reports the jobs. A job of a
        `ShardedEngine` ends when it has ended on all devices.

        It also queues transfers that wait on the host, and calls a tracer's `on_end` in this thread.

        Raises:
            ClosedError: this is a forked child.
        """
        if in_call(self.lock):
            return []
        self.advance()
        with self.lock:
            return self._reports.take()

    def forget_report(self, record: AnyTransfer) -> None:
        """Keep `poll` from reporting a job after its caller has waited for it. ClosedError in a forked child."""
        self.check_process()
        with self.lock:
            self._reports.forget(record)

    def when_done(self, job: Job, callback: Callable[[Job], object]) -> None:
        self.check_process()
        self._callbacks.add(job, callback)

    def statistics(self) -> EngineStatistics:
        """Return a snapshot: jobs, memory, streams and events now, and totals since the engine was created.

        A `ShardedEngine` counts a job and its bytes once, and sums memory, streams and events over its devices.

        Raises:
            ClosedError: this is a forked child.
        """
        self.check_process()
        if len(self._shards) > 1 or not self._in_flight.consistent:  # shards may know of ends that it does not
            self.advance()
        with self.lock:
            in_flight, reports = self._in_flight, self._reports
            usage = zip(*(shard.parts.usage() for shard in self._shards), strict=True)
            pinned_bytes, staging_bytes, streams, streams_in_use, events, events_in_use = map(sum, usage)
            return EngineStatistics(
                simulated=any(device.simulated for device in self.devices),
                num_slots=self.num_slots,
                pinned_slots=self.pinned_slots,
                pinned_bytes=pinned_bytes,
                pinning_error=None if self._growth is None else self._growth.error,
                staging_bytes=staging_bytes,
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
        """How many transfers are not known to have ended."""
        return self._in_flight.count

    @property
    def submitted(self) -> int:
        if len(FORKS) != self._forks:
            self.check_process()
        with self.lock:
            in_flight = self._in_flight
            return int(in_flight.stores.submitted + in_flight.loads.submitted)

    @property
    def pinned_slots(self) -> int:
        """Transfers may use the slots below this number: `num_slots`, or fewer while the pool grows, see `Growing`, and
        for good if it has stopped early. On several devices, the slots that are pinned on all. It never falls.
        """
        return min(shard.parts.pinned_slots for shard in self._shards)

    @property
    def growing(self) -> bool:
        """Whether more slots may be pinned. Read it before `pinned_slots`: once it is False, that is final."""
        return self._growth is not None and self._growth.running and len(FORKS) == self._forks

    def jobs_in_flight(self) -> tuple[Job, ...]:
        self.check_process()
        with self.lock:
            return tuple(Job(self, record) for queue in self._in_flight.both for record in queue.transfers)

    def check_process(self) -> None:
        """Raise ClosedError in a forked child of the process that opened the devices."""
        if len(FORKS) != self._forks:
            for device in self.devices:
                device.check_process()

    def check_usable(self) -> None:
        """Raise ClosedError or TransferError unless all devices take transfers. It lets a forked child pass."""
        self._for_each(Shard.check_usable)

    def check_parts(self, parts: PartsLike) -> None:
        """Raise what a load with these `parts` would raise for them, for any group and device."""
        self._for_each(partial(Shard.check_parts, parts=parts))

    def check_room(self, jobs: int) -> None:
        """Raise CapacityError if `jobs` more would exceed `max_in_flight`, ClosedError and TransferError as `store`."""
        if len(FORKS) != self._forks:
            self.check_process()
        for shard in self._shards:  # asked here, since `check_usable` of all shards takes many calls
            if shard.closed or self._closing or shard.parts.in_flight.lost is not None:
                self.check_usable()
        with self.lock:
            in_flight = self._in_flight
            if len(in_flight.stores.transfers) + len(in_flight.loads.transfers) + jobs > in_flight.max_in_flight:
                self._track()
                in_flight.check_room(jobs)

    def guard_slots(self, guard: SlotGuard) -> None:
        """Have `guard` guard the slots. Each store but its own, see `submit_locked`, then calls
        `guard.check_store(slots)`, which may refuse it.

        The engine keeps only a weak reference to it.

        Raises:
            CapacityError: the slots have another guard, and it is `busy`; or that one is garbage, and transfers are
                in flight that may be its own.
            ClosedError, RuntimeError: in a forked child; inside another call in the same thread.
        """
        self.check_process()
        refuse_nested(self.lock, "guard_slots")
        with self.lock:
            if self._slot_guard is not None:
                last = self._slot_guard()
                if self.in_flight if last is None else last.busy:
                    raise CapacityError(
                        "the engine's slots belong to another BlockCache: delete that one first, end its reservations, "
                        "leases and transfers, or make a second engine"
                    )
            self._slot_guard = weakref.ref(guard)

    def _check_store(self, requests: Requests) -> None:
        guard = None if self._slot_guard is None else self._slot_guard()
        if guard is not None:
            several = len(requests) > 1
            guard.check_store(np.concatenate([each.slots for each in requests]) if several else requests[0].slots)

    def resolve(self, after: _After) -> Any:
        """Return what `after` of several transfers names, for `submit_locked`: its arrays are asked for their producers
        once, now. `Followed`, for several devices a tuple with one each, or NO_WAIT. A transfer takes it as `after`,
        too.

        Call it before you take the lock. Raises what `store` raises for `after`.
        """
        if in_call(self.lock):
            raise_nested("a submission")
        return after if after is NO_WAIT else self._resolve(after)

    def _for_each(self, step: Callable[..., _Result], *columns: Sequence[Any], current: bool = False) -> list[_Result]:
        """Call `step(shard, ...)` for every shard, with its element of each column. A note on an exception names the
        shard.

        Args:
            current: make the context of the shard's device current for the step.
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
        """Wait on the host until no job is unfinished; jobs that other threads submit meanwhile count, too. Failed jobs
        do not raise here; `poll` reports them.

        Raises:
            TimeoutError: `timeout` seconds have passed (0: it looks once; None: no limit); the jobs go on.
            ValueError: `timeout` is no number.
            RuntimeError: you called it inside another call in the same thread.
            ClosedError: this is a forked child.
        """
        refuse_nested(self.lock, "drain")
        in_flight = self._in_flight

        def ended() -> bool:
            self.advance()
            return in_flight.count == 0

        wait_until(ended, timeout, f"{in_flight.count} jobs in flight")

    def close(self, timeout: float | None = None) -> None:
        """Refuse new transfers, drain, unpin the pool, destroy streams and events.

        Idempotent; if it is interrupted, call it again. In a forked child it does nothing. Arrays that you took from
        `slots` stay valid: the pool becomes ordinary memory. (Over `host_memory` they are valid while you keep that
        mapped.) `poll` still returns the results of finished jobs.

        If you close one of several devices, the engine refuses transfers from then on. Close the engine, too.

        Args:
            timeout: seconds, 0 to look once; None waits for as long as it takes.

        Raises:
            TimeoutError: jobs were still running. Nothing was freed, and the engine accepts transfers again. (Also: a
                call in another thread kept the engine or its device busy. With several devices some may be closed then;
                call it again.)
            DriverError: the driver failed; call it again to free the rest.
            ValueError: `timeout` is no number; nothing has happened.
            RuntimeError: you called it inside another call in the same thread; nothing has happened.
        """
        if len(FORKS) != self._forks:
            return
        for shard in self._shards:
            shard.refuse_nested("close")
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
        """Whether the engine, or one of its devices, has been closed. Then the engine refuses transfers."""
        return any(shard.closed for shard in self._shards)

    # looking ------------------------------------------------------------------------------------------------------

    @property
    def missing_copiers(self) -> dict[str, str]:
        """The copiers that cannot run on at least one of the engine's devices, each with the reason."""
        missing: dict[str, str] = {}
        for name, shard in zip(self._names, self._shards, strict=True):
            for copier, reason in shard.limits.missing_copiers.items():
                if reason is not None:
                    missing.setdefault(copier, f"{name}: {reason}" if name else reason)
        return missing

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - _FOR_INTEGRATIONS)

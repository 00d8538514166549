"""An engine from its creation to its end: everything but the submission of transfers."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal, Self

import numpy as np

from kvoffload.copiers.selection import check_prefer
from kvoffload.device.current import make_current
from kvoffload.device.device import Device
from kvoffload.device.host_memory import HostMemory
from kvoffload.device.pinned import Progress
from kvoffload.device.streams import stream_handle
from kvoffload.engine.arguments import check_types, checked_bound, checked_slots
from kvoffload.engine.callbacks import Callbacks
from kvoffload.engine.hazards import HazardTable
from kvoffload.engine.integration import EngineForIntegrations
from kvoffload.engine.job import Job, TransferResult
from kvoffload.engine.queues import InFlight
from kvoffload.engine.request import Limits
from kvoffload.engine.resources import EngineResources
from kvoffload.engine.slot_guard import SlotGuard
from kvoffload.engine.statistics import EngineStatistics
from kvoffload.engine.stream_order import as_part, await_queueing
from kvoffload.engine.tracing import deliver
from kvoffload.engine.transfer import Transfer
from kvoffload.errors import ClosedError, DriverError, TransferError
from kvoffload.internal.checks import as_timeout, at_least
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import in_call, refuse_nested
from kvoffload.internal.types import Int64Array, StreamLike, UInt8Array
from kvoffload.internal.waiting import wait_until
from kvoffload.layout.fold import describe_fold
from kvoffload.layout.layout import KVLayout, describe_groups
from kvoffload.planning.layer_groups import Folds
from kvoffload.tuning import Profile, profile_for

Prefer = Literal["overlap", "latency"]
_numbers = itertools.count(1)
_FOR_INTEGRATIONS = frozenset(
    [
        *("advance", "check_parts", "check_process", "check_room", "check_usable", "devices", "forget_report"),
        *("guard_slots", "in_flight", "jobs_in_flight", "lock", "number", "order_all_before"),
        *("order_job_before", "resolve", "submit_locked", "submitted", "touches", "wait_stream", "when_done"),
    ]
)


class EngineLifecycle(EngineForIntegrations):
    """What `OffloadEngine` is besides submitting transfers; its docstring has the arguments.

    For caches and integrations: `lock`, `number`, `advance`, `submitted`, `touches`, `check_room`, `guard_slots`,
    `jobs_in_flight`, `order_all_before` and `wait_stream`.

    Attributes:
        layout, device, num_slots, sm_limit, prefer, profile, max_in_flight: as given.
        lock: guards the engine; a BlockCache on it shares it. Take it with `with` alone. Inside, calls are refused or
            answered as inside any call of the engine.
        number: no two engines of a process have the same.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        device: Device,
        num_slots: int | None = None,
        host_memory: HostMemory | None = None,
        sm_limit: int = 4,
        prefer: Prefer = "overlap",
        profile: Profile | None = None,
        max_in_flight: int = 4096,
        most_queued_bytes: int | None = None,
        stream_priority: int = 0,
        progress: Progress | None = None,
    ) -> None:
        check_types(layout, device, profile)
        self.layout, self.device = layout, device
        self.num_slots = checked_slots(num_slots, host_memory, layout)
        device.check_process()
        device.check_stream_priority(stream_priority)
        device.refuse_nested("OffloadEngine")
        device.reclaim()
        self.sm_limit = at_least("sm_limit", sm_limit, 0)
        self.prefer = check_prefer(prefer)
        self.profile = profile_for(device) if profile is None else profile
        self.number = next(_numbers)
        self.max_in_flight = at_least("max_in_flight", max_in_flight, 1)
        self.lock = threading.RLock()
        self._driver, self._context = device.driver, device.context
        self._closed, self._process = False, os.getpid()
        self._closing: set[object] = set()  # a token for each call of close()
        self._following: set[object] = set()  # a token for each call that asks arrays for their producers
        self._slot_guard: weakref.ref[SlotGuard] | None = None
        self._ids, self._callbacks = itertools.count(1), Callbacks()
        self._hazards = HazardTable(layout, self.num_slots)
        longest = max(self.num_slots, *(group.num_blocks for group in layout.groups))
        self._scratch: Int64Array = np.empty(longest, dtype=np.int64)
        with device.lifecycle, device.current():
            self._folds = Folds(layout, device.allocations(layout))
            in_flight = InFlight(device.driver, self.max_in_flight, self._hazards, checked_bound(most_queued_bytes))
            self._parts = EngineResources(device, in_flight, self.num_slots, self.sm_limit, stream_priority)
            self._resource = device.adopt(self, self._parts.release, "an OffloadEngine")
            try:
                self._parts.open(layout, host_memory, progress)
            except BaseException:
                self._resource.free()
                raise
            self._limits = Limits(layout, self.num_slots, self._parts.copiers.missing)
            device.register_engine(self)
        self._log_opening()

    def _log_opening(self) -> None:
        """A record of the log is given no objects of the library, which it could keep alive."""
        sizes = self._parts.memory.nbytes, self._parts.pinning_seconds, self.num_slots, self.device.index
        LOGGER.info("pinned %d bytes in %.3f s: %d slots for device %d; profile: %s", *sizes, self.profile.source)

    @property
    def closed(self) -> bool:
        """Whether the engine is closed: by `close`, or with its device."""
        return self._closed

    # results ------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Take note of transfers that have ended, and queue as many segments as there is room for.

        Does not wait for the GPU. `poll`, `wait` and `done` do it too, and a submission where it needs to know. Inside
        another call in the same thread it does nothing.
        """
        if os.getpid() != self._process:
            self.device.check_process()
        if in_call(self.lock):
            return
        with self.lock:
            in_flight = self._parts.in_flight
            idle = not in_flight.stores.transfers and not in_flight.loads.transfers
            up_to_date = self._closed or (idle and in_flight.consistent)
        if not up_to_date:
            self._track()
        if self._parts.tracker.notices:
            deliver(self._parts.tracker.notices)

    def _track(self) -> None:
        """`advance`, also for a thread that holds the lock."""
        try:
            with make_current(self._driver, self._context), self.lock:
                self._repair()
                self._parts.tracker.advance()
        except DriverError as error:
            if not error.sticky:
                raise
            with self.lock:  # every transfer in flight has failed: that is what there was to find out
                self._parts.tracker.mark_lost(error)

    def _repair(self) -> None:
        """If a call was interrupted, put the engine in order. Under the lock, with the context current."""
        if not self._parts.in_flight.consistent:
            self._parts.tracker.repair()

    def _mark_lost(self, error: DriverError) -> None:
        """If the error says so, the CUDA context is lost, and every transfer in flight has failed.

        Raises:
            TransferError: in place of the error, if the context is lost.
        """
        if error.sticky:
            with self.lock:
                self._parts.tracker.mark_lost(error)
                self._parts.tracker.check_alive()

    def poll(self) -> list[TransferResult]:
        """Results of jobs that have ended since the last call, in the order in which they were found to have ended.

        Each job is reported once, and not at all after `wait()` or `result()` returned or raised for it. Failed jobs
        are reported with their `error`. At most 65,536 results are kept for the next call, the newest. Inside another
        call in the same thread it returns none, and the next one reports them.
        """
        if in_call(self.lock):
            return []
        self.advance()
        with self.lock:
            return self._parts.tracker.take_reports()

    def forget_report(self, job_id: int) -> None:
        """Keep `poll` from reporting a job that its caller has waited for."""
        self.device.check_process()
        with self.lock:
            self._parts.tracker.reports.pop(job_id, None)

    def when_done(self, job: Job, callback: Callable[[Job], object]) -> None:
        """See `Job.add_done_callback`."""
        self.device.check_process()
        self._callbacks.add(job, callback)

    def check_usable(self) -> None:
        """Raise ClosedError or TransferError unless transfers can be submitted."""
        if self._closed or self._closing:
            raise ClosedError("the engine is closed" if self._closed else "the engine is being closed")
        if self._parts.in_flight.lost is not None:
            self._parts.tracker.check_alive()

    def check_room(self, jobs: int) -> None:
        """Raise CapacityError if `jobs` more would exceed `max_in_flight`, and ClosedError if the engine is closed."""
        if os.getpid() != self._process:
            self.device.check_process()
        with self.lock:
            self.check_usable()
            in_flight = self._parts.in_flight
            if len(in_flight.stores.transfers) + len(in_flight.loads.transfers) + jobs > in_flight.max_in_flight:
                self._parts.tracker.check_room(jobs)

    def jobs_in_flight(self) -> tuple[Job, ...]:
        """A job for each transfer that has not ended."""
        self.device.check_process()
        with self.lock:
            in_flight = self._parts.in_flight.both
            return tuple(Job(self, transfer) for queue in in_flight for transfer in queue.transfers)

    @property
    def in_flight(self) -> int:
        """How many transfers have not ended."""
        return self._parts.in_flight.count

    @property
    def submitted(self) -> int:
        """How many transfers have been submitted so far."""
        if os.getpid() != self._process:
            self.device.check_process()
        with self.lock:
            in_flight = self._parts.in_flight
            return in_flight.stores.submitted + in_flight.loads.submitted

    def statistics(self) -> EngineStatistics:
        """Counts and totals since the engine was created; inside another call in the same thread, as they stand."""
        self.device.check_process()
        if not self._parts.in_flight.consistent:
            self.advance()
        with self.lock:
            return self._parts.statistics()

    # order --------------------------------------------------------------------------------------------------------

    def order_job_before(self, transfer: Transfer, stream: StreamLike, part: int | None) -> None:
        """See `Job.order_before`."""
        refuse_nested(self.lock, "order_before")
        handle = stream_handle(stream, "stream")
        number = None if part is None else as_part(part, transfer)
        self._order_before(transfer, handle, number, raise_error=True)

    def order_all_before(self, stream: int) -> None:
        """Work queued on `stream` from now on starts after every transfer submitted so far has ended.

        Raises:
            CapacityError, TransferError: as `Job.order_before`.
        """
        self.device.check_process()
        refuse_nested(self.lock, "order_all_before")
        with self.lock:
            latest = self._parts.order.latest()
        for transfer in latest:
            self._order_before(transfer, stream, None, raise_error=False)

    def _order_before(self, transfer: Transfer, stream: int, part: int | None, *, raise_error: bool) -> None:
        await_queueing(transfer, part, self.advance)
        try:
            with self.device.current(), self.lock:
                self._repair()
                if raise_error and transfer.error is not None:
                    raise TransferError(*transfer.error.args) from transfer.error.__cause__
                if self._closed:  # so the transfer has ended, and `stream` may be the engine's own
                    return
                self._parts.tracker.check_alive()
                self._parts.order.wait_for(transfer, stream, part)
        except DriverError as error:
            self._mark_lost(error)
            raise

    # the end ------------------------------------------------------------------------------------------------------

    def drain(self, timeout: float | None = None) -> None:
        """Wait until no job is unfinished. Failed jobs do not raise here; `poll` reports them.

        Raises:
            TimeoutError: `timeout` seconds have passed; the jobs go on.
            RuntimeError: it is called inside another call in the same thread.
        """
        refuse_nested(self.lock, "drain")
        in_flight = self._parts.in_flight

        def ended() -> bool:
            self.advance()
            return in_flight.count == 0

        wait_until(ended, timeout, f"{in_flight.count} jobs in flight")

    def close(self, timeout: float | None = None) -> None:
        """Refuse new transfers, drain, unpin the pool, destroy streams and events.

        Idempotent; if it is interrupted, call it again. In a forked child it does nothing. Arrays over `slots` stay
        valid: the pool is unpinned, and becomes ordinary memory. The results of finished jobs can still be polled.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            TimeoutError: jobs were still running. Nothing was freed, and the engine accepts transfers again.
            RuntimeError: it is called inside another call in the same thread; nothing has happened.
        """
        if self.device.foreign:
            return
        refuse_nested(self.lock, "close")
        timeout, token = as_timeout(timeout), object()
        try:
            self._closing.add(token)
            if self._parts.in_flight.count:
                LOGGER.info("an engine is being closed, and waits for %d transfers", self._parts.in_flight.count)
            self.drain(timeout)
            wait_until(lambda: not self._following, timeout, "asking an array for its producer")
            self.device.wait_lifecycle(timeout)
            with self.device.lifecycle:
                self._free()
        finally:
            self._closing.discard(token)

    def _free(self) -> None:
        """Nothing is in flight and nothing new is taken; one thread at a time."""
        self._closed = True
        if not self._resource.alive:
            return
        try:
            with self.device.current():
                self._resource.free()
        except DriverError as error:
            if not error.sticky:
                raise
            self._parts.tracker.mark_lost(error)
            self._resource.free()

    def __dir__(self) -> list[str]:
        """Without the names that are for caches and integrations, so that completion shows users theirs."""
        return sorted(set(super().__dir__()) - _FOR_INTEGRATIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # looking ------------------------------------------------------------------------------------------------------

    @property
    def missing_copiers(self) -> dict[str, str]:
        """The copiers that cannot run for this engine, and why."""
        return {name: reason for name, reason in self._parts.copiers.missing.items() if reason is not None}

    @property
    def slots(self) -> UInt8Array:
        """The pinned pool: uint8, (num_slots, layout.slot_bytes), writable.

        Row `s` holds `blocks_per_slot` blocks, in the order that the group's `slot_order` says (see `KVLayout`); the
        rest of the row is padding. A row may be read once the store into it has ended, and written when no transfer
        that uses it is unfinished. In `host_memory` rows are as far apart as its stride; after `close` there are none.
        """
        return self._parts.slots

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._parts.in_flight.count} in flight"
        simulated = "simulated, " if self.device.simulated else ""
        return (
            f"OffloadEngine({describe_groups(self.layout)}: {describe_fold(self._folds.groups)}; "
            f"{self.num_slots} slots x {self.layout.slot_bytes} B, {simulated}{state})"
        )

    def _html_options(self) -> dict[str, Any]:
        return {"folded": self._folds.groups, "copiers": self._parts.copiers.missing, "closed": self._closed}

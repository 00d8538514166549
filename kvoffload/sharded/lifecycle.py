"""A sharded engine from its creation to its end: everything but the submission of transfers."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from kvoffload.device.device import Device, checked_devices
from kvoffload.device.pinned import Progress
from kvoffload.device.streams import NO_WAIT, stream_handle
from kvoffload.engine.callbacks import Callbacks
from kvoffload.engine.job import Job, TransferResult
from kvoffload.engine.lifecycle import Prefer
from kvoffload.engine.slot_guard import SlotGuard, replaced_guard
from kvoffload.engine.statistics import EngineStatistics
from kvoffload.engine.stream_order import as_part
from kvoffload.engine.tracing import deliver
from kvoffload.errors import CapacityError, ClosedError
from kvoffload.internal.checks import as_timeout, shown
from kvoffload.internal.nesting import in_call, refuse_nested
from kvoffload.internal.teardown import run_all
from kvoffload.internal.types import StreamLike, UInt8Array
from kvoffload.internal.waiting import wait_until
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.layer_groups import PartsLike
from kvoffload.sharded.after import FollowedPerDevice
from kvoffload.sharded.job import ShardedJob
from kvoffload.sharded.layout import ShardedLayout
from kvoffload.sharded.record import ShardedTransfer
from kvoffload.sharded.shard import Shard
from kvoffload.sharded.tracker import ShardedTracker
from kvoffload.tuning import Profile

_Result = TypeVar("_Result")

_MOST_UNASKED = 16  # with so many in flight, a submission asks the devices which have ended
_FOR_INTEGRATIONS = frozenset(
    [
        *("advance", "check_parts", "check_process", "check_room", "check_usable", "forget_report", "guard_slots"),
        *("in_flight", "jobs_in_flight", "lock", "order_job_before", "resolve", "submit_locked"),
        *("submitted", "when_done"),
    ]
)


class ShardedLifecycle:
    """What `ShardedEngine` is besides submitting transfers; its docstring has the arguments.

    For caches and integrations: `lock`, `advance`, `submitted`, `check_process`, `check_parts`, `check_room`,
    `guard_slots`, `jobs_in_flight` and `resolve`.
    """

    def __init__(
        self,
        layouts: Sequence[KVLayout] | ShardedLayout,
        *,
        devices: Sequence[Device],
        num_slots: int = 1024,
        sm_limit: int = 4,
        prefer: Prefer = "overlap",
        profile: Profile | None = None,
        max_in_flight: int = 4096,
        most_queued_bytes: int | None = None,
        stream_priority: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self.layout = layouts if isinstance(layouts, ShardedLayout) else ShardedLayout(layouts)
        self.devices = _as_many(devices, len(self.layout.layouts))
        self.lock = threading.RLock()
        self._process = os.getpid()
        self._closing: set[object] = set()  # a token for each call of close()
        self._slot_guard: weakref.ref[SlotGuard] | None = None
        self._ids = itertools.count(1)
        self._callbacks = Callbacks()
        self._shards: list[Shard] = []
        self._tracker = ShardedTracker(self._shards)
        try:
            for layout, device in zip(self.layout.layouts, self.devices, strict=True):
                self._shards.append(
                    Shard(
                        layout,
                        device=device,
                        lock=self.lock,
                        num_slots=num_slots,
                        sm_limit=sm_limit,
                        prefer=prefer,
                        profile=profile,
                        max_in_flight=max_in_flight,
                        most_queued_bytes=most_queued_bytes,
                        stream_priority=stream_priority,
                        progress=progress,
                    )
                )
        except BaseException:
            run_all(shard.close for shard in self._shards)
            raise
        self.num_slots = self._shards[0].num_slots
        self.max_in_flight = self._shards[0].max_in_flight
        self._names = tuple(f"shard {index} (device {each.index})" for index, each in enumerate(self.devices))
        self._simulated = any(device.simulated for device in self.devices)

    # results ------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Take note of transfers that have ended, and queue as many segments as there is room for.

        Does not wait for a GPU. Inside another call in the same thread it does nothing.
        """
        self.check_process()
        if in_call(self.lock):
            return
        with self.lock:
            up_to_date = self._tracker.count == 0 and self._tracker.consistent
        if not up_to_date:
            for shard in self._shards:
                shard.advance()
            with self.lock:
                self._tracker.repair()
                self._tracker.settle()
        if self._tracker.notices:
            deliver(self._tracker.notices)

    def poll(self) -> list[TransferResult]:
        """As `OffloadEngine.poll`: a result for each job, of all devices together."""
        if in_call(self.lock):
            return []
        self.advance()
        with self.lock:
            return self._tracker.take_reports()

    def forget_report(self, job_id: int) -> None:
        """Keep `poll` from reporting a job that its caller has waited for."""
        self.check_process()
        with self.lock:
            self._tracker.forget(job_id)

    def when_done(self, job: Job, callback: Callable[[Job], object]) -> None:
        """See `Job.add_done_callback`."""
        self.check_process()
        self._callbacks.add(job, callback)

    @property
    def in_flight(self) -> int:
        """How many transfers have not ended on all devices."""
        self.check_process()
        with self.lock:
            return sum(not record.finished for record in self._tracker.records())

    @property
    def submitted(self) -> int:
        """How many transfers have been submitted so far."""
        self.check_process()
        with self.lock:
            return self._tracker.submitted

    def statistics(self) -> EngineStatistics:
        """Counts and totals since the engine was made. Jobs and their bytes are counted once, not for each device;
        memory, streams and events of all devices are summed.
        """
        self.check_process()
        self.advance()
        with self.lock:
            each = [shard.statistics() for shard in self._shards]
            tracker = self._tracker
            return EngineStatistics(
                simulated=self._simulated,
                num_slots=self.num_slots,
                pinned_bytes=sum(one.pinned_bytes for one in each),
                in_flight=self.in_flight,
                held=sum(record.held for record in tracker.records()),
                unreported=len(tracker.reports),
                dropped_reports=tracker.dropped_reports,
                streams=sum(one.streams for one in each),
                streams_in_use=sum(one.streams_in_use for one in each),
                events=sum(one.events for one in each),
                events_in_use=sum(one.events_in_use for one in each),
                store=tracker.stores.totals,
                load=tracker.loads.totals,
            )

    # order --------------------------------------------------------------------------------------------------------

    def order_job_before(self, record: ShardedTransfer, streams: Sequence[StreamLike], part: int | None) -> None:
        """See `ShardedJob.order_before`."""
        refuse_nested(self.lock, "order_before")
        given = self._per_device("streams", streams, "stream")
        handles = [stream_handle(stream, f"streams[{index}]") for index, stream in enumerate(given)]
        number = None if part is None else as_part(part, record)
        self.check_process()
        error = record.error
        if error is not None:
            raise error
        for index, (shard, handle) in enumerate(zip(self._shards, handles, strict=True)):
            shard.check_stream(handle, f"streams[{index}]")
        for shard, transfer, handle in zip(self._shards, record.transfers, handles, strict=False):  # of an empty one: 0
            shard.order_job_before(transfer, handle, number)

    # for caches ---------------------------------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raise ClosedError in a forked child of the process that opened the devices."""
        if os.getpid() != self._process:
            for device in self.devices:
                device.check_process()

    def check_usable(self) -> None:
        """Raise ClosedError or TransferError unless transfers can be submitted on all devices."""
        if self._closing:
            raise ClosedError("the engine is being closed")
        self._for_each(Shard.check_usable)

    def check_parts(self, parts: PartsLike) -> None:
        """Raise what a load of some group would raise for these `parts`."""
        self._for_each(partial(Shard.check_parts, parts=parts))

    def check_room(self, jobs: int) -> None:
        """Raise CapacityError if `jobs` more would exceed `max_in_flight`, and ClosedError if the engine is closed."""
        self.check_process()
        with self.lock:
            self.check_usable()
            self._make_room(jobs)

    def _make_room(self, jobs: int) -> None:
        """Ask the devices what has ended where that can matter. Under the lock.

        Raises:
            CapacityError: `jobs` more would exceed `max_in_flight`.
        """
        tracker = self._tracker
        tracker.settle()
        if tracker.count + jobs > min(_MOST_UNASKED, self.max_in_flight):
            for shard in self._shards:
                shard.track()
            tracker.repair()
            tracker.settle()
        if tracker.count + jobs > self.max_in_flight:
            raise CapacityError(
                f"{tracker.count} jobs are unfinished (max_in_flight={self.max_in_flight}); poll() until some end"
            )

    def jobs_in_flight(self) -> tuple[ShardedJob, ...]:
        """A job for each transfer that has not ended on all devices."""
        self.check_process()
        with self.lock:
            return tuple(ShardedJob(self, record) for record in self._tracker.records())

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
            self._slot_guard = replaced_guard(self._slot_guard, guard, self.in_flight)

    # the devices --------------------------------------------------------------------------------------------------

    def _for_each(self, step: Callable[..., _Result], *columns: Sequence[Any]) -> list[_Result]:
        """`step(shard, ...)` for every shard, with its element of each column. An exception gets the shard's name."""
        results: list[_Result] = []
        for name, row in zip(self._names, zip(self._shards, *columns, strict=True), strict=True):
            try:
                results.append(step(*row))
            except Exception as error:
                error.add_note(f"on {name}")
                raise
        return results

    def _per_device(self, name: str, given: Any, what: str) -> Sequence[Any]:
        """One value for each device of an argument that is a list of them. `after` may also be None or NO_WAIT, which
        are for all, or an object that has the list."""
        count, source = len(self._shards), ""
        if name == "after" and not isinstance(given, list | tuple):
            if given is None or given is NO_WAIT:
                return (given,) * count
            if isinstance(given, FollowedPerDevice) and callable(given.after):
                source = f" from after() of the {type(given).__name__} given"
                given = given.after()
        if not isinstance(given, list | tuple) or len(given) != count:
            raise TypeError(
                f"{name} must be a list with one {what} for each of the {count} devices, in their order"
                f"{', or None or NO_WAIT for all' if name == 'after' else ''}; got {shown(given)}{source}"
            )
        return given

    # the end ------------------------------------------------------------------------------------------------------

    def drain(self, timeout: float | None = None) -> None:
        """Wait until no job is unfinished on any device. Failed jobs do not raise here; `poll` reports them.

        Raises:
            TimeoutError: `timeout` seconds have passed; the jobs go on.
            RuntimeError: it is called inside another call in the same thread.
        """
        refuse_nested(self.lock, "drain")
        tracker = self._tracker

        def ended() -> bool:
            self.advance()
            return tracker.count == 0

        wait_until(ended, timeout, f"{tracker.count} jobs in flight")

    def close(self, timeout: float | None = None) -> None:
        """Refuse new transfers, drain, and close the engine of every device; as `OffloadEngine.close`.

        Closing one of the devices closes its part of this engine, which then refuses transfers; close it, too.

        Raises:
            TimeoutError: jobs were still running; the engines that could not be closed stay open.
        """
        if os.getpid() != self._process:
            return
        refuse_nested(self.lock, "close")
        timeout = as_timeout(timeout)
        deadline = None if timeout is None else time.perf_counter() + timeout

        def close(shard: Shard) -> None:
            shard.close(None if deadline is None else max(0.0, deadline - time.perf_counter()))

        token = object()
        try:
            self._closing.add(token)
            self.drain(timeout)
            run_all(partial(close, shard) for shard in self._shards)
        finally:
            self._closing.discard(token)

    def __dir__(self) -> list[str]:
        """Without the names that are for caches and integrations, so that completion shows users theirs."""
        return sorted(set(super().__dir__()) - _FOR_INTEGRATIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # looking ------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the engine of a device is closed: by `close`, or with its device. Then nothing can be transferred."""
        return any(shard.closed for shard in self._shards)

    @property
    def missing_copiers(self) -> dict[str, str]:
        """The copiers that cannot run on all devices, and why."""
        missing: dict[str, str] = {}
        for name, shard in zip(self._names, self._shards, strict=True):
            for copier, reason in shard.missing_copiers.items():
                missing.setdefault(copier, f"{name}: {reason}")
        return missing

    @property
    def slots(self) -> tuple[UInt8Array, ...]:
        """The pinned pool of each device: uint8, (num_slots, layout.layouts[i].slot_bytes), writable.

        Row `s` of each is that device's range of slot `s`; see `OffloadEngine.slots`.
        """
        return tuple(shard.slots for shard in self._shards)

    def __repr__(self) -> str:
        return f"ShardedEngine({list(self._shards)})"


def _as_many(devices: Sequence[Device], count: int) -> tuple[Device, ...]:
    """The checked devices, `count` of them."""
    found = checked_devices(devices)
    if len(found) != count:
        raise ValueError(f"devices must be as many as layouts, one for each: got {len(found)}, and {count} layouts")
    return found

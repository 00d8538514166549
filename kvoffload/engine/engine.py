"""OffloadEngine: submits transfers, orders them, learns of their end.

Order. A transfer's stream waits for the caller's stream (`after`), for the previous transfer of its direction, and for
the latest transfer of the other direction that touches its slots or blocks. The waits are on the GPU, and point to work
submitted earlier, so they cannot form a cycle. What the driver's queues have no room for waits on the host, in order.

    caller's stream   ──compute──●after                          ┌─compute (order_before)
    store lane        ───────────┴─wait─[start copy copy end]────┤
    load lane                          wait for slot or block ───┴─[start copy copy end]

Threads. One lock guards the engine's books and the submission itself; nothing waits for the GPU while holding it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from kvoffload.copiers import CopierSet
from kvoffload.copiers.selection import check_prefer
from kvoffload.device.device import Device
from kvoffload.device.pinned import PinnedMemory, Progress, UInt8Array
from kvoffload.device.streams import NO_WAIT
from kvoffload.engine.callers import CallersStreams
from kvoffload.engine.dispatch import Dispatcher
from kvoffload.engine.flight import FlightDeck
from kvoffload.engine.job import Job, Listener, TransferResult, wait_until
from kvoffload.engine.metrics import EngineStatistics
from kvoffload.engine.report import PlanReport
from kvoffload.engine.request import make_request, sources_of
from kvoffload.errors import CapacityError, ClosedError, DriverError, TransferError
from kvoffload.internal import hostinfo
from kvoffload.internal.checks import at_least
from kvoffload.internal.types import Int64Array
from kvoffload.layout.layout import KVLayout, describe_groups
from kvoffload.planning.layer_groups import Folds
from kvoffload.planning.transfer_plan import Direction, describe_fold
from kvoffload.tuning import CopyMethod, Profile, profile_for

_numbers = itertools.count(1)


class SlotGuard(Protocol):
    """What decides who may write an engine's slots; a cache has one."""

    @property
    def busy(self) -> bool:
        """Whether the slots are in use."""

    def check_store(self, slots: Int64Array) -> None:
        """Raise an error unless a store may write these slots."""


class OffloadEngine:
    """Moves blocks between the planes of `layout` and a pool of pinned slots.

    Usable from any thread; a context manager.

    Args:
        layout: the KV cache. Its memory must stay allocated until the engine is closed.
        device: where the planes live.
        num_slots: slots of the pinned pool, `layout.slot_bytes` bytes each.
        sm_limit: how many multiprocessors a copy kernel may use; 0 forbids kernels, and compiles none. (The simulated
            device interprets them, slowly, so it chooses none by itself.)
        prefer: what to choose copiers by: "overlap", whatever slows a computation beside the transfer least, of those
            that are expected to take up to 1.1 times as long as the fastest; or "latency", the fastest.
        profile: what transfers cost here, see `kvoffload.tuning`; None: what `kvoffload tune` measured for this GPU,
            driver, link and bindings, else one that comes with the package.
        max_in_flight: jobs that may be unfinished at a time.
        stream_priority: of the engine's streams, within `device.stream_priorities`. It orders kernels, not copies.
        progress: called with (bytes done, bytes in all) while the pool is pinned.

    Raises:
        LayoutError: a plane is not inside one allocation of this device's memory.
        CapacityError: the pool cannot be pinned; the message says what is free.
        ClosedError: the device is closed.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        device: Device,
        num_slots: int = 1024,
        sm_limit: int = 4,
        prefer: str = "overlap",
        profile: Profile | None = None,
        max_in_flight: int = 4096,
        stream_priority: int = 0,
        progress: Progress | None = None,
    ) -> None:
        if not isinstance(layout, KVLayout):
            raise TypeError(f"layout must be a KVLayout, got {layout!r:.80}")
        if not isinstance(device, Device):
            raise TypeError(f"device must be a Device from open_device(), got {device!r:.80}")
        num_slots = at_least("num_slots", num_slots, 1)
        device.check_stream_priority(stream_priority)
        device.reclaim()
        self.layout = layout
        self.device = device
        self.num_slots = num_slots
        self.sm_limit = at_least("sm_limit", sm_limit, 0)
        self.prefer = check_prefer(prefer)
        self.profile = profile_for(device) if profile is None else profile
        self.number = next(_numbers)  # no two engines of a process have the same
        self.max_in_flight = at_least("max_in_flight", max_in_flight, 1)
        self.lock = threading.RLock()  # a BlockCache on this engine shares it
        self._slot_guard: weakref.ref[SlotGuard] | None = None
        self._closed = False
        self._closers = 0  # threads in close()
        with device.lifecycle, device.current():
            folds = Folds(layout, device.allocations(layout))
            self._groups = folds.groups
            self._memory = PinnedMemory(
                device.driver,
                num_slots * layout.slot_bytes,
                unit_bytes=layout.slot_bytes,
                numa_cpus=hostinfo.numa_node_cpus(device.pci.numa_node),
                progress=progress,
            )
            self._slots = self._memory.array.reshape(num_slots, layout.slot_bytes)
            with ExitStack() as undo:
                undo.callback(self._memory.release)
                self._copier_set = CopierSet(device.driver, device.capabilities, layout, self._memory, self.sm_limit)
                undo.callback(self._copier_set.close)
                self._flights = FlightDeck(
                    device.driver, self._memory, self._copier_set, max_in_flight, stream_priority
                )
                undo.pop_all()
            self.callers = CallersStreams(self, self._flights)
            pool = self._memory.address
            self._dispatcher = Dispatcher(layout, num_slots, folds, pool, self._copier_set, self._flights)
            self._claim = device.claim(self, self._flights.release, "an OffloadEngine")
            device.register_engine(self)

    def store(
        self,
        blocks: Any,
        slots: Any,
        group: int = 0,
        first_sub_block: int = 0,
        after: Any = None,
        copier: str | None = None,
    ) -> Job:
        """Copy blocks from the device to slots. Returns when the copies are queued; where the driver's queues have no
        room, at once, and later calls queue them.

        Block `i` goes to sub-block `(first_sub_block + i) % f` of slot `(first_sub_block + i) // f` of the list, with
        `f = layout.blocks_per_slot`. What a slot's other sub-blocks hold stays as it is.

        Args:
            blocks: source ids, anything that numpy turns into a 1-D integer array. Repeats are legal.
            slots: target ids, `layout.slots_for(len(blocks), first_sub_block)` of them, no repeats.
            group: which group's block table `blocks` refers to.
            first_sub_block: where in the first slot to begin.
            after: what must have ended before a block is read: the work so far of a stream (a handle, or anything with
                `__cuda_stream__`: CuPy, cuda.core, Numba), or an array's producer (anything with `__dlpack__`, which is
                asked to make a stream of ours wait, or with `__cuda_array_interface__`), or a list of these. Of an
                array, who else reads or writes it is not waited for; a CuPy array stands for CuPy's current stream.
                None: the legacy default stream, what CuPy uses unless told otherwise. `NO_WAIT`: nothing.
            copier: "strided", "gather", "split", "batch" or "loop"; None lets the engine choose.

        Returns:
            The job. A driver error while it is queued, now or later, fails the job; it does not raise here.

        Raises:
            LayoutError, ValueError, TypeError: bad arguments.
            CapacityError: `max_in_flight` jobs are unfinished.
            CapabilityError: the copier asked for cannot run here.
            ClosedError: the engine is closed.
            TransferError: `after` is being captured, or the CUDA context is lost.
            DriverError: the driver failed before anything was queued.
            Nothing has happened in any of these cases.
        """
        return self.submit(Direction.STORE, blocks, slots, group, first_sub_block, after, copier)

    def load(
        self,
        slots: Any,
        blocks: Any,
        group: int = 0,
        first_sub_block: int = 0,
        after: Any = None,
        copier: str | None = None,
        source_order: str = "auto",
        parts: int | Sequence[Sequence[int]] | None = None,
    ) -> Job:
        """Copy slots to blocks on the device: the inverse of `store`, with the same correspondence and errors.

        Args:
            slots: source ids; repeats are legal.
            blocks: target ids, no repeats.
            group, first_sub_block, copier: as for `store`.
            after: what must have ended before a block is overwritten, as for `store`; that includes who reads it.
            source_order: when the driver may read the slots. "stream": in stream order. "any": at any moment from now
                on, which some platforms do faster; only right when nothing on the GPU still writes them. "auto": "any"
                if the host has seen every store to these slots end, else "stream".
            parts: copy the group's planes in parts, one part after the other, so that what needs a layer waits for that
                layer alone: `job.order_before(stream, part=k)`. A number: so many equal runs of planes, in their order.
                Or for each part the indices of its planes, every plane once. A split does not copy parts.

        Raises:
            ValueError: as `store`; also `source_order="any"` while a store to one of the slots is unfinished.
        """
        wanted = (group, first_sub_block, after, copier, source_order)
        return self.submit(Direction.LOAD, blocks, slots, *wanted, parts=parts)

    def submit(
        self,
        direction: Direction,
        blocks: Any,
        slots: Any,
        group: int = 0,
        first_sub_block: int = 0,
        after: Any = None,
        copier: str | CopyMethod | None = None,
        source_order: str = "auto",
        listener: Listener | None = None,
        parts: int | Sequence[Sequence[int]] | None = None,
    ) -> Job:
        """`store` and `load` in one, with somebody who is told of the job's fate.

        Args:
            copier: may also say how many programs a kernel gets (at most `sm_limit`), and which share of the blocks in
                a split; share 0: what the profile says.
            listener: is told when the job is in flight and when it has ended.
        """
        wanted = (direction, blocks, slots, group, first_sub_block, after, copier, source_order, listener, parts)
        request = make_request(self.layout, self.num_slots, *wanted)
        with self.in_context():
            after = self.callers.behind(request.sources)
            with self.lock:
                guard = None if self._slot_guard is None else self._slot_guard()
                if guard is not None and direction is Direction.STORE:
                    guard.check_store(request.slots)
                return self._dispatcher.submit(self, request._replace(after=after))

    def resolve(self, after: Any) -> Any:
        """A stream that stands for `after`, or NO_WAIT; for callers that submit under the lock, see `callers`."""
        with self.in_context():
            stream = self.callers.behind(sources_of(after, self.layout))
        return NO_WAIT if stream is None else stream

    def plan(
        self, direction: str, blocks: Any, slots: Any, group: int = 0, first_sub_block: int = 0, copier: Any = None
    ) -> PlanReport:
        """What such a transfer would be, and what would carry it; nothing is submitted. Raises what `store` raises."""
        wanted = (Direction(direction), blocks, slots, group, first_sub_block, NO_WAIT, copier, "auto", None)
        request = make_request(self.layout, self.num_slots, *wanted)
        with self.at_work():
            return self._dispatcher.report(self, request)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The context current and the engine locked."""
        with self.in_context(), self.lock:
            yield

    @contextmanager
    def in_context(self) -> Iterator[None]:
        """The context current; a lost context, wherever it shows, ends the engine."""
        try:
            with self.device.current():
                yield
        except DriverError as error:
            if not error.sticky:
                raise
            with self.lock:
                self._flights.lose(error)
                self._flights.check_alive()

    def check_usable(self) -> None:
        """Raise ClosedError or TransferError unless transfers can be submitted."""
        if self._closed or self._closers:
            raise ClosedError("the engine is closed" if self._closed else "the engine is being closed")
        self._flights.check_alive()

    def advance(self) -> None:
        """Take note of jobs that have ended. Never blocks; `poll`, `wait`, `done` and every submission do it too."""
        self.device.check_process()
        if not self._flights.in_flight:
            return
        try:
            with self.at_work():
                self._flights.advance()
        except TransferError:
            pass  # the context is lost: every job has failed and says so

    def poll(self) -> list[TransferResult]:
        """Results of jobs that have ended since the last call, in the order in which they were found to have ended.

        Each job is reported once, and not at all after `wait()` or `result()` returned or raised for it. Failed jobs
        are reported with their `error`. At most 65,536 results are kept for the next call, the newest.
        """
        self.advance()
        with self.lock:
            return self._flights.take_reports()

    def forget_report(self, job: Job) -> None:
        """Keep `poll` from reporting a job that its caller has waited for."""
        self.device.check_process()
        with self.lock:
            self._flights.reports.pop(job.id, None)

    def order_before(self, job: Job, stream: Any, part: int | None = None) -> None:
        """See `Job.order_before`."""
        self.callers.order_before(job, stream, part)

    @property
    def submitted(self) -> int:
        """How many transfers have been submitted so far."""
        with self.lock:
            return self._flights.submitted

    def touches(self, address: int, nbytes: int) -> bool:
        """Whether a plane lies, in part at least, in a range of device memory."""
        planes = (plane for group in self.layout.groups for plane in group.planes)
        return any(plane.address < address + nbytes and address < plane.end for plane in planes)

    def check_room(self, jobs: int) -> None:
        """Raise CapacityError unless so many more jobs may be in flight, and ClosedError if the engine is closed."""
        self.device.check_process()
        with self.lock:
            self.check_usable()
            self._flights.check_room(jobs)

    def jobs_in_flight(self) -> tuple[Job, ...]:
        """Jobs that have been submitted and have not ended."""
        with self.lock:
            return tuple(self._flights.jobs())

    def claim_slots(self, guard: SlotGuard) -> None:
        """Let a guard decide about stores from now on; it is not kept alive.

        Raises:
            CapacityError: another guard is in use.
        """
        with self.lock:
            if self._slot_guard is not None:
                other = self._slot_guard()
                if self._flights.in_flight if other is None else other.busy:
                    raise CapacityError(
                        "the engine's slots belong to another BlockCache: delete that one first, end its reservations, "
                        "leases and transfers, or make a second engine"
                    )
            self._slot_guard = weakref.ref(guard)

    def drain(self, timeout: float | None = None) -> None:
        """Wait until no job is unfinished. Failed jobs do not raise here; `poll` reports them.

        Raises:
            TimeoutError: `timeout` seconds have passed; the jobs go on.
        """

        def landed() -> bool:
            self.advance()
            return self._flights.in_flight == 0

        wait_until(landed, timeout, f"{self._flights.in_flight} jobs in flight")

    def close(self, timeout: float | None = None) -> None:
        """Refuse new transfers, drain, unpin the pool, destroy streams and events.

        Idempotent; in a forked child it does nothing.

        Arrays over `slots` stay valid: the bytes live on as ordinary memory. The results of finished jobs can still be
        polled.

        Raises:
            TimeoutError: jobs were still running; nothing was freed, and the engine stays open.
        """
        if self.device.foreign:
            return
        with self.lock:
            self._closers += 1
        try:
            self.drain(timeout)
            wait_until(lambda: self.callers.idle, timeout, "asking an array for its producer")
            with self.device.hold_lifecycle(timeout):
                self._free()
        finally:
            with self.lock:
                self._closers -= 1

    def _free(self) -> None:
        """Nothing is in flight and nothing new is taken; one thread at a time."""
        self._closed = True
        if not self._claim.alive:
            return
        try:
            with self.device.current():
                self._claim.free()
        except DriverError as error:
            if not error.sticky:
                raise
            self._flights.lose(error)
            self._claim.free()

    def __enter__(self) -> OffloadEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def missing_copiers(self) -> dict[str, str]:
        """The copiers that cannot run for this engine, and why."""
        return {name: reason for name, reason in self._copier_set.missing.items() if reason is not None}

    @property
    def slots(self) -> UInt8Array:
        """The pinned pool: uint8, (num_slots, layout.slot_bytes), writable.

        Row `s` holds plane 0's `blocks_per_slot` sub-blocks, then plane 1's, ...; the rest of the row is padding. A
        row may be read once the store into it has ended, and written when no transfer that uses it is unfinished.
        """
        return self._slots

    def statistics(self) -> EngineStatistics:
        """Counts and totals since the engine was made."""
        self.device.check_process()
        with self.lock:
            return self._flights.statistics(self.num_slots, self.device.simulated)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._flights.in_flight} in flight"
        simulated = "simulated, " if self.device.simulated else ""
        return (
            f"OffloadEngine({describe_groups(self.layout)}: {describe_fold(self._groups)}; "
            f"{self.num_slots} slots x {self.layout.slot_bytes} B, {simulated}{state})"
        )

    def _repr_html_(self) -> str:
        from kvoffload.observability.notebook import engine_card

        return engine_card(self, self._groups, self._copier_set.missing, closed=self._closed)

"""OffloadEngine: stores blocks to pinned slots and loads them back, ordered on the GPU.

Order. A transfer's stream waits for the caller's streams (`after`), for the previous transfer of its direction, and for
the latest transfer of the other direction that touches its slots or blocks. The GPU does the waiting, and only for work
queued earlier, so waits cannot form a cycle. Copies that do not fit into the driver's queues wait on the host, in
order; an urgent load goes ahead of them.

    caller's stream   ──compute──●after                          ┌─compute (order_before)
    store lane        ───────────┴─wait─[start copy copy end]────┤
    load lane                          wait for slot or block ───┴─[start copy copy end]
"""

from __future__ import annotations

from typing import Any

from kvoffload.copiers import STAGING_BYTES
from kvoffload.device.device import Device
from kvoffload.device.growth import Growing
from kvoffload.device.ownership import FORKS
from kvoffload.device.pinned import HostMemory, Progress
from kvoffload.device.streams import NO_WAIT, stream_handle
from kvoffload.driver import make_current
from kvoffload.engine import tracing
from kvoffload.engine.base import Engine
from kvoffload.engine.job import ENDED, SUBMITTED, Job, Transfer
from kvoffload.engine.plan_report import PlanReport
from kvoffload.engine.queues import MOST_REPORTS
from kvoffload.engine.request import Request, Requests
from kvoffload.engine.resources import EngineOptions, Prefer, slots_in
from kvoffload.engine.shard import Shard
from kvoffload.engine.wait_streams import After
from kvoffload.errors import DriverError
from kvoffload.internal.nesting import in_call, raise_nested, refuse_nested
from kvoffload.internal.representation import HtmlRepresentation
from kvoffload.internal.types import Int64Array, StreamLike, UInt8Array
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.layer_groups import as_parts
from kvoffload.planning.transfer_plan import STORE, Direction
from kvoffload.tuning import Profile


class OffloadEngine(Engine[After, PlanReport], HtmlRepresentation):
    """Moves blocks between the planes of `layout` and a pool of pinned slots.

    On the GPU, transfers of one direction end in the order of submission (except for urgent loads), and a transfer
    waits for earlier ones of the other direction that touch its slots or blocks. So a load from slots that are still
    being stored needs no `after` for that. Usable from any thread; a context manager.

    If you forget `close`, the engine is closed with its device, or by a later call of the device once the engine is
    garbage, with a ResourceWarning.

    Args:
        layout: the KV cache. Its memory must stay allocated until the engine is closed.
        device: the device that holds the planes.
        num_slots: how many slots the pinned pool has, `layout.slot_bytes` bytes each. None: 1024. With 0 slots the
            engine pins nothing and refuses every slot id.
        pool_bytes: instead of `num_slots`: as many slots as fit into so many bytes; also as text, "64GiB".
            `Growing(nbytes)`: the constructor returns once the first of them are pinned, and a thread pins the rest
            while you use the engine.
        host_memory: your own memory for the slots, see `HostMemory`; then leave out `num_slots` and `pool_bytes`.
        staging_bytes: device memory for each direction through which the copier "pack" carries blocks whose planes are
            apart: a kernel, for some microseconds on all multiprocessors, packs them there. Allocated when that copier
            is first used, with a codec by the constructor. A size of yours must have room for the largest block. 0
            forbids kernels and compiles none. (The simulated device runs a kernel only if you ask for it, or for a
            codec, since it interprets kernels slowly.) Without Triton the copy engine carries all transfers. So it does
            if kernels cannot be loaded, and then there is a KVOffloadWarning.
        prefer: "overlap", for a GPU that computes during transfers: selects the copier that costs least in the worse of
            two kinds of computation. "latency": selects the one that ends soonest on an idle GPU. That is for the first
            transfers: between "pack" and the copy engine, the times of the last ones decide from then on.
        profile: what transfers cost here, see `kvoffload.tuning`. None: the one that `kvoffload tune` measured for this
            GPU, driver, link and bindings, else one from the package.
        max_in_flight: how many jobs may be unfinished at a time. The next submission raises CapacityError.
        most_queued_bytes: how many payload bytes of each direction may be queued on the GPU at a time (one operation
            may always be); the rest waits on the host. An urgent load waits for that much at most, and for the rest of
            a load that has begun. The rest is queued by later calls (`poll`, `drain`, a submission, `done` or `wait` of
            a job) and by the thread of done callbacks, so set this only if your program keeps calling. None: as much as
            the driver's queues hold.
        stream_priority: of the engine's streams, within `device.stream_priorities`. It orders kernels, not copies.
            None: the highest for the kernels of "pack", which take microseconds. With 0, short kernels of yours are
            delayed less, and transfers beside long ones are slower.
        progress: called in this thread with (bytes done, bytes in all) after each GiB or less that is pinned; an
            exception from it ends the constructor, and nothing stays pinned. Not called for `host_memory`. Of a pool
            that grows: after each piece, from the second on in the thread that pins it, where an exception ends growth.

    Attributes:
        layout, device, num_slots, staging_bytes, prefer, profile, max_in_flight: as given, with defaults filled in.
        lock: guards the engine, and a BlockCache on it. Take it with `with` only. While you hold it, the engine treats
            calls as calls inside another call: it refuses them, or answers without asking the GPU.

    Raises:
        LayoutError: a plane is not memory of this device, or runs past the end of its allocation, or of mapped virtual
            memory without a gap.
        CapacityError: the pool, or 2 MiB for tables of kernels, cannot be pinned; the message says what is free. Or
            `pool_bytes` is less than a slot, but not 0.
        CapabilityError: the layout has a codec, and no kernel can run here.
        DriverError: the driver failed in another way.
        ValueError, TypeError: bad arguments; `host_memory` that does not fit the layout, overlaps registered memory, or
            is not registered although it says so.
        ClosedError: the device is closed, or this is a forked child.
        RuntimeError: you called it inside another call of an engine on this device, in the same thread.
    """

    layout: KVLayout

    def __init__(
        self,
        layout: KVLayout,
        *,
        device: Device,
        num_slots: int | None = None,
        pool_bytes: int | str | Growing | None = None,
        host_memory: HostMemory | None = None,
        staging_bytes: int = STAGING_BYTES,
        prefer: Prefer = "overlap",
        profile: Profile | None = None,
        max_in_flight: int = 4096,
        most_queued_bytes: int | None = None,
        stream_priority: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        num_slots, piece_bytes = slots_in(pool_bytes, num_slots, [layout], host_memory)
        given = num_slots, staging_bytes, prefer, profile, max_in_flight, most_queued_bytes, stream_priority, progress
        options = EngineOptions(*given, host_memory=host_memory, piece_bytes=piece_bytes)
        self._shard = shard = Shard(layout, device, options, self._shared, most_reports=MOST_REPORTS)
        self._shards, self._names = (shard,), ("",)
        self.layout, self.device, self.devices, self.num_slots = layout, device, (device,), shard.num_slots
        self.staging_bytes, self.prefer, self.profile = shard.staging_bytes, shard.prefer, shard.profile
        self.max_in_flight = shard.parts.in_flight.max_in_flight
        self._parts, self._in_flight, self._reports = shard.parts, shard.parts.in_flight, shard.reports
        # Bound methods, not methods that call them: this is on the path of every transfer.
        self._requests, self._requests_of_groups = shard.limits.requests, shard.limits.requests_of_groups
        self._plan, self._resolve, self._track = shard.report, shard.resolve, shard.track
        self._grow()

    def submit_locked(
        self, direction: Direction, blocks: Int64Array, slots: Int64Array, *, group: int, after: Any, parts: Any = None
    ) -> Job:
        planes = None if parts is None else as_parts(parts, len(self.layout.groups[group].planes))
        streams = () if after is NO_WAIT else after.streams
        request = Request(direction, group, slots, blocks, sources=streams, parts=planes)
        return self._submit((request,), locked=True)

    def _submit(self, requests: Requests, *, locked: bool = False) -> Job:
        """Submit a transfer in its five steps. `locked`: the guard of the slots calls it with the lock held."""
        if in_call(self.lock) and not locked:
            raise_nested("a submission")
        request, shard = requests[0], self._shard
        if shard.closed or len(FORKS) != self._forks:  # what follows needs the device's context
            self.check_process()
            shard.check_usable()
        followed = shard.follow(request.sources, True) if request.arrays else None  # while referred to, reserved
        streams: tuple[int, ...] = request.sources if followed is None else followed.streams
        try:
            with make_current(shard.driver, shard.context, False), self.lock:
                # 1. check: what depends on the moment
                shard.check(requests, streams)
                if self._slot_guard is not None and not locked and request.direction is STORE:
                    self._check_store(requests)
                if len(request.blocks) == 0:
                    empty = Transfer(next(self._ids), request.direction, 0, request.num_parts)
                    empty.simulated = shard.driver.simulated
                    empty.step(SUBMITTED)  # it ends at once, and is never in a queue
                    empty.step(ENDED)
                    self._reports.note(self._in_flight.of(empty.direction), empty)
                    return Job(self, empty)
                # 2. plan, 3. select, 4. order
                transfer = shard.prepare(requests, streams, next(self._ids))
                transfer.engine = self  # which is kept alive as long as it is in flight
                job = Job(self, transfer)
                # 5. enqueue: as much as there is room for; the rest waits on the host
                shard.enqueue(requests, transfer)
                if tracing.current is not None:
                    tracing.start(tracing.current, job, transfer, self._reports.notices)
                return job
        except DriverError as error:
            shard.mark_lost(error)
            raise

    def check_usable(self) -> None:
        self._shard.check_usable()

    def order_job_before(self, record: Transfer, streams: StreamLike, part: int | None) -> None:
        refuse_nested(self.lock, "order_before")
        self._shard.order_before(record, stream_handle(streams, "stream"), part, raise_error=True)

    def order_all_before(self, stream: int) -> None:
        self._shard.order_all_before(stream)

    def wait_stream(self) -> int:
        return self._shard.wait_stream()

    @property
    def slots(self) -> UInt8Array:
        """The pinned pool: uint8, (num_slots, layout.slot_bytes), writable.

        Row `s` holds `blocks_per_slot` blocks in the order of the group's `slot_order` (see `KVLayout`), then padding.
        Read a row only after the store into it has ended; write it only while no unfinished transfer uses it, and only
        below `pinned_slots`: pinning sets bytes of the others to zero. With
        `host_memory`, rows are `slot_stride` bytes apart, and after `close` the array has no rows.
        """
        return self._parts.slots

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name != "devices"]

    def __repr__(self) -> str:
        return repr(self._shard)

    def _html_options(self) -> dict[str, Any]:
        shard = self._shard
        return {"folded": shard.folds.groups, "copiers": shard.limits.missing_copiers, "closed": shard.closed}

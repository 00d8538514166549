"""ShardedEngine: one engine over the devices of a process.

A transfer is submitted in three steps, each for all devices before the next one, under one lock that all share:

    check      what can be refused is refused: nothing has happened on any device
    prepare    the record of each device; its markers are recorded on the caller's streams, which CUDA may refuse
    launch     the records are published, then put in flight, device after device; a driver error fails the job

So a refusal leaves nothing in flight, and what fails later is a job that ends when all devices have done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from kvoffload.engine import tracing
from kvoffload.engine.groups import GroupTransfer, make_group_requests
from kvoffload.engine.preparation import Requests, slots_of
from kvoffload.engine.report import PlanReport
from kvoffload.engine.request import SourceOrderName, make_request
from kvoffload.engine.wait_streams import After
from kvoffload.internal.checks import names_its_calls
from kvoffload.internal.nesting import in_call, raise_nested
from kvoffload.internal.types import Ids
from kvoffload.planning.transfer_plan import Direction
from kvoffload.sharded.after import ShardedAfter
from kvoffload.sharded.job import ShardedJob
from kvoffload.sharded.lifecycle import ShardedLifecycle
from kvoffload.sharded.record import ShardedTransfer
from kvoffload.sharded.shard import Shard
from kvoffload.tuning import CopierName, CopyMethod


@names_its_calls
class ShardedEngine(ShardedLifecycle):
    """Moves blocks between the planes of several devices and pinned slots, as one `OffloadEngine` does for one device.

    A transfer names blocks and slots once. On each device its blocks are copied between that device's planes and that
    device's pool. So a slot is one range of pinned memory for each device: row `s` of every array in `slots`. To save a
    slot elsewhere, copy its row of every array.

    Usable from any thread; a context manager. Each device's transfers are ordered as `OffloadEngine` says; devices do
    not wait for each other.

    Args:
        layouts: a `ShardedLayout`, or the layout of each device's planes, in the order of `devices`.
        devices: those that hold the planes, all opened by this process.
        num_slots: slots, of `layout.slot_bytes` bytes in each device's pool. (It takes no `host_memory`.)
        sm_limit, prefer, profile, max_in_flight, most_queued_bytes, stream_priority: as for `OffloadEngine`, for
            each device. `profile` None: that of each device's GPU.
        progress: called while the pools are pinned, one device after the other, with (bytes done, bytes in all) of
            that device's pool.

    Attributes:
        layout: the ShardedLayout.
        devices, num_slots, max_in_flight: as given.
        lock: guards all devices' engines; as that of `OffloadEngine`.

    Raises:
        LayoutError: layouts that do not agree, see `ShardedLayout`; or as `OffloadEngine`.
        CapacityError, ClosedError, ValueError, TypeError: as `OffloadEngine`, or the number of devices is not
            that of layouts. Nothing is left pinned.
    """

    # transfers ----------------------------------------------------------------------------------------------------

    def store(
        self,
        blocks: Ids,
        slots: Ids,
        *,
        group: int = 0,
        first_sub_block: int = 0,
        after: ShardedAfter = None,
        copier: CopierName | CopyMethod | None = None,
    ) -> ShardedJob:
        """Copy blocks from every device to slots. As `OffloadEngine.store`, on each device.

        Args:
            blocks, slots, group, first_sub_block, copier: as for `OffloadEngine.store`; the same on every device.
            after: what must have ended on each device before one of its blocks is read: a list or tuple with one value
                for each device, in their order; each value is what `OffloadEngine.store` takes, or a list of these.
                Or an object with a method `after()` that returns such a list, as `kvoffload.jax.OwnedCache`:
                `after=cache` is `after=cache.after()`. None or `NO_WAIT`: the same for all.

        Raises:
            As `OffloadEngine.store`. Nothing is in flight on any device then; a note on the exception names the device.
            A driver error on one device after that fails the job, which ends when all devices have ended theirs.
        """
        return self.submit(
            Direction.STORE, blocks, slots, group=group, first_sub_block=first_sub_block, after=after, copier=copier
        )

    def load(
        self,
        slots: Ids,
        blocks: Ids,
        *,
        group: int = 0,
        first_sub_block: int = 0,
        after: ShardedAfter = None,
        copier: CopierName | CopyMethod | None = None,
        source_order: SourceOrderName = "auto",
        parts: int | Sequence[Sequence[int]] | None = None,
        urgent: bool = False,
    ) -> ShardedJob:
        """Copy slots to blocks on every device. As `OffloadEngine.load`, on each device.

        Args:
            slots, blocks, group, first_sub_block, copier, source_order: as for `OffloadEngine.load`; the same on every
                device.
            after: as for `store`.
            urgent: as for `OffloadEngine.load`, on each device.
            parts: as for `OffloadEngine.load`. A number: each device's planes are divided into that many parts. Lists
                of planes: all devices must have the same number of planes in the group.

        Raises:
            As `OffloadEngine.load`, and as `store` says.
        """
        return self.submit(
            Direction.LOAD,
            blocks,
            slots,
            group=group,
            first_sub_block=first_sub_block,
            after=after,
            copier=copier,
            source_order=source_order,
            parts=parts,
            urgent=urgent,
        )

    def submit(
        self,
        direction: Direction | Literal["store", "load"],
        blocks: Ids,
        slots: Ids,
        *,
        group: int = 0,
        first_sub_block: int = 0,
        after: ShardedAfter = None,
        copier: CopierName | CopyMethod | None = None,
        source_order: SourceOrderName = "auto",
        parts: int | Sequence[Sequence[int]] | None = None,
        urgent: bool = False,
    ) -> ShardedJob:
        """`store` and `load` in one; arguments and errors as there."""
        options = copier, source_order, parts, urgent
        return self._submit(_maker(Direction(direction), blocks, slots, group, first_sub_block, options), after)

    def submit_locked(
        self,
        direction: Direction,
        blocks: Ids,
        slots: Ids,
        *,
        group: int,
        after: ShardedAfter,
        parts: int | Sequence[Sequence[int]] | None = None,
    ) -> ShardedJob:
        """`submit` for a cache, which calls it with the lock held."""
        make = _maker(direction, blocks, slots, group, 0, (None, "auto", parts, False))
        return self._submit(make, after, locked=True)

    def store_groups(
        self,
        transfers: Sequence[GroupTransfer],
        *,
        after: ShardedAfter = None,
        copier: CopierName | CopyMethod | None = None,
    ) -> ShardedJob:
        """Store blocks of several groups as one transfer. As `OffloadEngine.store_groups`, on each device.

        Args:
            transfers, copier: as for `OffloadEngine.store_groups`; the same on every device.
            after: as for `store`.

        Raises:
            As `OffloadEngine.store_groups`, and as `store` says.
        """
        return self._submit_groups(Direction.STORE, transfers, after, copier)

    def load_groups(
        self,
        transfers: Sequence[GroupTransfer],
        *,
        after: ShardedAfter = None,
        copier: CopierName | CopyMethod | None = None,
        source_order: SourceOrderName = "auto",
        urgent: bool = False,
    ) -> ShardedJob:
        """Load blocks of several groups as one transfer. As `OffloadEngine.load_groups`, on each device.

        Args:
            transfers, copier, source_order, urgent: as for `OffloadEngine.load_groups`; the same on every device.
            after: as for `store`.

        Raises:
            As `OffloadEngine.load_groups`, and as `store` says.
        """
        return self._submit_groups(Direction.LOAD, transfers, after, copier, source_order, urgent)

    def _submit_groups(
        self,
        direction: Direction,
        transfers: Sequence[GroupTransfer],
        after: ShardedAfter,
        copier: CopierName | CopyMethod | None,
        source_order: SourceOrderName = "auto",
        urgent: bool = False,
    ) -> ShardedJob:
        read = transfers

        def check(shard: Shard, following: After) -> Requests:
            nonlocal read
            requests = make_group_requests(shard.limits, direction, read, following, copier, source_order, urgent)
            read = [
                GroupTransfer(each.group, each.blocks, each.slots, first_sub_block=each.first_sub_block)
                for each in requests
            ]
            return requests

        return self._submit(check, after)

    def _submit(
        self, check: Callable[[Shard, After], Requests], after: ShardedAfter, *, locked: bool = False
    ) -> ShardedJob:
        """A transfer in the steps of this file's head; `check` makes its requests for a device. `locked`: for a cache,
        which holds the lock.
        """
        if in_call(self.lock) and not locked:
            raise_nested("a submission")
        requests = self._for_each(check, self._per_device("after", after, "value"))
        first = requests[0][0]
        direction = first.direction
        self.check_process()
        self.check_usable()
        followed = self._for_each(Shard.follow, requests)  # while referred to, reserved
        streams = [each.streams for each in followed]
        with self.lock:
            # 1. check, on every device
            self._check_submission(requests[0])
            self._for_each(Shard.check, requests, streams)
            number, names = next(self._ids), self._names
            if len(first.blocks) == 0:
                record = ShardedTransfer(number, direction, first.num_parts, (), names, self._simulated)
                self._tracker.report(record)
                return ShardedJob(self, record)
            # 2. prepare
            transfers = self._for_each(partial(Shard.prepare, number=number), requests, streams)
            # 3. launch: nothing is refused from here on
            record = ShardedTransfer(number, direction, first.num_parts, tuple(transfers), names, self._simulated)
            self._tracker.publish(record)
            for shard, each, transfer in zip(self._shards, requests, transfers, strict=True):
                shard.launch(each, transfer)
            self._tracker.consistent = True
            job = ShardedJob(self, record)
            if tracing.current is not None:
                tracing.start(tracing.current, job, record, self._tracker.notices)
            return job

    def _check_submission(self, requests: Requests) -> None:
        """Refuse what does not depend on a device."""
        request = requests[0]
        self.check_usable()
        self._tracker.repair()
        self._tracker.settle()
        self._make_room(1 if len(request.blocks) else 0)
        if request.direction is Direction.STORE:
            guard = None if self._slot_guard is None else self._slot_guard()
            if guard is not None:
                guard.check_store(slots_of(requests))

    def resolve(self, after: ShardedAfter) -> ShardedAfter:
        """What stands for `after` in several transfers, so that its arrays are asked for their producers once.

        Call it before taking the lock. Raises what `store` raises for `after`.
        """
        return tuple(self._for_each(Shard.resolve, self._per_device("after", after, "value")))

    def plan(
        self,
        direction: Direction | Literal["store", "load"],
        blocks: Ids,
        slots: Ids,
        *,
        group: int = 0,
        first_sub_block: int = 0,
        copier: CopierName | CopyMethod | None = None,
    ) -> tuple[PlanReport, ...]:
        """As `OffloadEngine.plan`, a report for each device."""
        transfer = partial(
            Shard.plan,
            direction=direction,
            blocks=blocks,
            slots=slots,
            group=group,
            first_sub_block=first_sub_block,
            copier=copier,
        )
        return tuple(self._for_each(transfer))


def _maker(
    direction: Direction, blocks: Ids, slots: Ids, group: int, first_sub_block: int, options: tuple[Any, ...]
) -> Callable[[Shard, After], Requests]:
    """A function that makes the request of a device; `options`: the arguments of `make_request` behind `after`."""
    read = blocks, slots

    def make(shard: Shard, after: After) -> Requests:
        nonlocal read
        request = make_request(shard.limits, direction, *read, group, first_sub_block, after, *options)
        read = request.blocks, request.slots  # once, so that all devices have the same
        return (request,)

    return make

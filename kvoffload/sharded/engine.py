"""ShardedEngine: one engine over the devices of a process.

A transfer is submitted in three steps, each for all devices before the next one, under one lock that all share:

    check      what can be refused is refused: nothing has happened on any device
    prepare    the record of each device; its markers are recorded on the caller's streams, which CUDA may refuse
    launch     the records are published, then put in flight, device after device; a driver error fails the job

So a refusal leaves nothing in flight, and what fails later is a job that ends when all devices have done with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from kvoffload.device.streams import NO_WAIT
from kvoffload.engine import tracing
from kvoffload.engine.report import PlanReport
from kvoffload.engine.request import Request, SourceOrderName, make_request
from kvoffload.engine.wait_streams import After
from kvoffload.internal.types import Ids
from kvoffload.planning.transfer_plan import Direction
from kvoffload.sharded.after import ShardedAfter
from kvoffload.sharded.job import ShardedJob
from kvoffload.sharded.lifecycle import ShardedLifecycle
from kvoffload.sharded.record import ShardedTransfer
from kvoffload.sharded.shard import Shard
from kvoffload.tuning import CopierName, CopyMethod


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
        num_slots: slots, of `layout.slot_bytes` bytes in each device's pool.
        sm_limit, prefer, profile, max_in_flight, stream_priority: as for `OffloadEngine`, for each device. `profile`
            None: that of each device's GPU.
        progress: called while the pools are pinned, one device after the other, with (bytes done, bytes in all) of
            that device's pool.

    Attributes:
        layout: the ShardedLayout.
        devices, num_slots, max_in_flight: as given.
        lock: guards all devices' engines; a BlockCache on this one shares it. Take it with `with` alone.

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
                Or an object with a method `after()` that returns such a list, as `kvoffload.jax.ShardedOwnedCache`:
                `after=cache` is `after=cache.after()`. None or `NO_WAIT`: the same for all.

        Raises:
            As `OffloadEngine.store`. Nothing is in flight on any device then; a note on the exception names the device.
            A driver error on one device after that fails the job, which ends when all devices have ended theirs.
        """
        return self._submit(Direction.STORE, blocks, slots, group, first_sub_block, after, copier, "auto", None)

    def load(
        self,
        slots: Ids,
        blocks: Ids,
        group: int = 0,
        first_sub_block: int = 0,
        after: ShardedAfter = None,
        copier: CopierName | CopyMethod | None = None,
        source_order: SourceOrderName = "auto",
        parts: int | Sequence[Sequence[int]] | None = None,
    ) -> ShardedJob:
        """Copy slots to blocks on every device. As `OffloadEngine.load`, on each device.

        Args:
            slots, blocks, group, first_sub_block, copier, source_order: as for `OffloadEngine.load`; the same on every
                device.
            after: as for `store`.
            parts: as for `OffloadEngine.load`. A number: each device's planes are divided into that many parts. Lists
                of planes: all devices must have the same number of planes in the group.

        Raises:
            As `OffloadEngine.load`, and as `store` says.
        """
        return self._submit(Direction.LOAD, blocks, slots, group, first_sub_block, after, copier, source_order, parts)

    def submit(
        self,
        direction: Direction | Literal["store", "load"],
        blocks: Ids,
        slots: Ids,
        group: int = 0,
        first_sub_block: int = 0,
        after: ShardedAfter = None,
        copier: CopierName | CopyMethod | None = None,
        source_order: SourceOrderName = "auto",
        parts: int | Sequence[Sequence[int]] | None = None,
    ) -> ShardedJob:
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
        after: ShardedAfter,
        copier: CopierName | CopyMethod | None,
        source_order: SourceOrderName,
        parts: int | Sequence[Sequence[int]] | None,
    ) -> ShardedJob:
        """A transfer in the steps of this file's head."""
        requests = self._requests(direction, blocks, slots, group, first_sub_block, after, copier, source_order, parts)
        first = requests[0]
        self.check_process()
        self.check_usable()
        followed = self._for_each(Shard.follow, requests)  # while referred to, reserved
        streams = [each.streams for each in followed]
        with self.lock:
            # 1. check, on every device
            self._check_submission(first)
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
            for shard, request, transfer in zip(self._shards, requests, transfers, strict=True):
                shard.launch(request, transfer)
            self._tracker.consistent = True
            job = ShardedJob(self, record)
            if tracing.current is not None:
                tracing.start(tracing.current, job, record, self._tracker.notices)
            return job

    def _requests(
        self,
        direction: Direction,
        blocks: Ids,
        slots: Ids,
        group: int,
        first_sub_block: int,
        after: ShardedAfter,
        copier: CopierName | CopyMethod | None,
        source_order: SourceOrderName,
        parts: int | Sequence[Sequence[int]] | None,
    ) -> list[Request]:
        """The checked arguments, for each device. Ids are read once, so that all devices have the same."""
        requests: list[Request] = []

        def check(shard: Shard, following: After) -> None:
            block_ids: Ids = requests[0].blocks if requests else blocks
            slot_ids: Ids = requests[0].slots if requests else slots
            request = make_request(
                shard.limits,
                direction,
                block_ids,
                slot_ids,
                group,
                first_sub_block,
                following,
                copier,
                source_order,
                parts,
            )
            requests.append(request)

        self._for_each(check, self._per_device("after", after, "value"))
        return requests

    def _check_submission(self, request: Request) -> None:
        """Refuse what does not depend on a device."""
        self.check_usable()
        self._tracker.repair()
        self._tracker.settle()
        self._make_room(1 if len(request.blocks) else 0)
        if request.direction is Direction.STORE:
            guard = None if self._slot_guard is None else self._slot_guard()
            if guard is not None:
                guard.check_store(request.slots)

    def resolve(self, after: ShardedAfter) -> ShardedAfter:
        """What stands for `after` in several transfers, so that its arrays are asked for their producers once.

        Call it before taking the lock. Raises what `store` raises for `after`.
        """
        if after is NO_WAIT:
            return after
        return tuple(self._for_each(Shard.resolve, self._per_device("after", after, "value")))

    def plan(
        self,
        direction: Direction | Literal["store", "load"],
        blocks: Ids,
        slots: Ids,
        group: int = 0,
        first_sub_block: int = 0,
        copier: CopierName | CopyMethod | None = None,
    ) -> tuple[PlanReport, ...]:
        """As `OffloadEngine.plan`, a report for each device."""
        step = partial(
            Shard.plan,
            direction=direction,
            blocks=blocks,
            slots=slots,
            group=group,
            first_sub_block=first_sub_block,
            copier=copier,
        )
        return tuple(self._for_each(step))

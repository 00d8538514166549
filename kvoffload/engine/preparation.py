"""What is checked and computed for a transfer before anything of it is queued."""

from __future__ import annotations

from typing import Literal

import numpy as np

from kvoffload.copiers import Share, shares_together
from kvoffload.device.current import make_current
from kvoffload.device.streams import NO_WAIT, NoWait, raise_for_stream, refuse_capturing
from kvoffload.driver import SourceOrder
from kvoffload.engine.groups import refuse_targets_of_several
from kvoffload.engine.lifecycle import EngineLifecycle
from kvoffload.engine.queues import TransferQueue
from kvoffload.engine.report import PlanReport, make_report
from kvoffload.engine.request import Request, make_request, refuse_repeated_targets, sources_of
from kvoffload.engine.transfer import Transfer
from kvoffload.engine.wait_streams import After, Followed, Source
from kvoffload.errors import DriverError
from kvoffload.internal.nesting import in_call, raise_nested, refuse_nested
from kvoffload.internal.types import Ids, Int64Array
from kvoffload.planning.transfer_plan import BlockPlan, Direction, build
from kvoffload.tuning import CopierName, CopyMethod

Requests = tuple[Request, ...]
"""What one transfer moves: of one group, or several, in one direction, following the same sources; at least one."""

_Selected = tuple[CopyMethod, str, tuple[Share, ...], int]  # method, reason, shares, bytes


class TransferPreparation(EngineLifecycle):
    """The steps of a submission before the last, see `OffloadEngine`: check, plan, select, order."""

    def _check_submission(self, requests: Requests, streams: tuple[int, ...]) -> None:
        """Refuse what cannot be submitted now; then take note of what has ended, where that can matter here."""
        in_flight = self._parts.in_flight
        if not in_flight.consistent:
            self._parts.tracker.repair()
        if self._closed or self._closing or in_flight.lost:
            self.check_usable()
        request = requests[0]
        refuse_repeated_targets(request, self._scratch)
        if len(requests) > 1:
            for each in requests[1:]:
                refuse_repeated_targets(each, self._scratch)
            refuse_targets_of_several(requests, self.layout, self._hazards)
        if request.direction is Direction.STORE:
            guard = None if self._slot_guard is None else self._slot_guard()
            if guard is not None:
                guard.check_store(slots_of(requests))
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

    def _new_transfer(self, number: int, requests: Requests) -> Transfer:
        """The record of a checked transfer, which is not in flight yet. Changes nothing."""
        request, in_flight = requests[0], self._parts.in_flight
        direction = request.direction
        opposite = in_flight.loads if direction is Direction.STORE else in_flight.stores
        opposed = len(opposite.transfers) > 0
        # 2. plan, 3. select
        if len(requests) == 1:
            method, reason, shares, nbytes = self._select(request, opposed)
        else:
            method, reason, shares, nbytes = self._select_several(requests, opposed)
        # 4. order: what it must follow
        transfer = Transfer(number, direction, nbytes, 1 if request.parts is None else len(request.parts))
        transfer.engine, transfer.simulated = self, self._driver.simulated
        if direction is Direction.LOAD:
            transfer.source_order = self._source_order(requests)
            if request.urgent:
                transfer.urgent = True
        transfer.conflict = self._conflict(requests, opposite) if opposed else None
        transfer.method, transfer.reason = method, reason
        transfer.shares = shares
        return transfer

    def _select(self, request: Request, opposed: bool) -> _Selected:
        """What a request copies, per block; and by the profile, how."""
        plan, copiers = self._plan(request), self._parts.copiers
        method, reason = copiers.select(plan, request.copier, self.profile, self.prefer, opposed)
        return method, reason, copiers.shares(method, plan), plan.nbytes

    def _select_several(self, requests: Requests, opposed: bool) -> _Selected:
        """`_select` for each, put together. The method is that of most bytes."""
        each = [self._select(request, opposed) for request in requests]
        method = max(each, key=lambda selected: selected[3])[0]
        reasons = zip(requests, (selected[1] for selected in each), strict=True)
        reason = "; ".join(dict.fromkeys(f"group {request.group}: {text}" for request, text in reasons))
        shares = [share for selected in each for share in selected[2]]
        return method, reason, shares_together(shares), sum(selected[3] for selected in each)

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

    def _source_order(self, requests: Requests) -> SourceOrder:
        """Of a load: ANY where it is safe. (Of stores STREAM always: reads of device memory would overtake the stream.)

        Raises:
            ValueError: "any" is asked for while a store to one of the slots is unfinished.
        """
        stores = self._parts.in_flight.stores
        if requests[0].source_order == "stream":
            return SourceOrder.STREAM
        if not stores.transfers:
            return SourceOrder.ANY
        latest = max([self._hazards.latest_on_slots(Direction.STORE, request.slots) for request in requests])
        if stores.unfinished(latest) is None:
            return SourceOrder.ANY
        if requests[0].source_order == "any":
            raise ValueError(
                'source_order="any" while a store to one of the slots is unfinished; use "auto" or "stream"'
            )
        return SourceOrder.STREAM

    def _conflict(self, requests: Requests, queue: TransferQueue) -> Transfer | None:
        """The unfinished transfer of the other direction, whose queue this is, that this one must follow; earlier ones
        end before it.
        """
        hazards, other, latest = self._hazards, requests[0].direction.opposite, 0
        for request in requests:
            on_slots = hazards.latest_on_slots(other, request.slots)
            latest = max(latest, on_slots, hazards.latest_on_blocks(other, request.group, request.blocks))
        return queue.unfinished(latest)

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
        if in_call(self.lock):
            raise_nested("a submission")
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

    def plan(
        self,
        direction: Direction | Literal["store", "load"],
        blocks: Ids,
        slots: Ids,
        *,
        group: int = 0,
        first_sub_block: int = 0,
        copier: CopierName | CopyMethod | None = None,
    ) -> PlanReport:
        """The operations, copy method and expected time of such a transfer. Submits nothing. Raises as `store`."""
        copiers = self._parts.copiers
        towards = Direction(direction)
        request = make_request(self._limits, towards, blocks, slots, group, first_sub_block, NO_WAIT, copier)
        self.device.check_process()
        refuse_nested(self.lock, "plan")
        with self.lock:
            self.check_usable()
            refuse_repeated_targets(request, self._scratch)
            return make_report(self, self._plan(request), request.copier, copiers, simulated=self._driver.simulated)


def slots_of(requests: Requests) -> Int64Array:
    """The slots of all of them."""
    return requests[0].slots if len(requests) == 1 else np.concatenate([request.slots for request in requests])

"""From a checked request to a job in flight: its plan, what carries it, and what it must follow."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvoffload.copiers import CopierSet, check_carries_parts, check_copier, shape_of
from kvoffload.copiers.selection import rank
from kvoffload.device.streams import refuse_capturing
from kvoffload.engine.books import Flight
from kvoffload.engine.flight import FlightDeck
from kvoffload.engine.hazards import HazardTable
from kvoffload.engine.job import Job
from kvoffload.engine.ordering import Ordering
from kvoffload.engine.report import Alternative, PlanReport
from kvoffload.engine.request import Request, refuse_repeated_targets
from kvoffload.layout.layout import KVLayout
from kvoffload.planning.layer_groups import Folds
from kvoffload.planning.transfer_plan import BlockPlan, build

if TYPE_CHECKING:
    from kvoffload.engine.engine import OffloadEngine


class Dispatcher:
    """Turns requests into jobs. Called under the engine's lock, with the context current.

    Args:
        layout, num_slots: of the engine.
        folds: of the layout.
        pool_address: host address of slot 0.
        toolbox: the copiers.
        flights: where jobs board.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_slots: int,
        folds: Folds,
        pool_address: int,
        copier_set: CopierSet,
        flights: FlightDeck,
    ) -> None:
        self._layout = layout
        self._folds = folds
        self._pool_address = pool_address
        self._copier_set = copier_set
        self._flights = flights
        self._ordering = Ordering(HazardTable(layout, num_slots), flights)
        self._scratch = np.empty(max(num_slots, *(group.num_blocks for group in layout.groups)), dtype=np.int64)

    def check(self, request: Request) -> None:
        """Raise unless what is asked for by name is there and can run."""
        check_copier(request.copier, self._copier_set.missing)
        if request.parts is not None:
            check_carries_parts(request.copier)

    def plan(self, request: Request) -> BlockPlan:
        """What a request moves; it has blocks."""
        return build(
            self._folds.of(request.group, request.parts),
            self._layout,
            request.direction,
            group_index=request.group,
            pool_address=self._pool_address,
            slots=request.slots,
            blocks=request.blocks,
            first_sub_block=request.first_sub_block,
        )

    def report(self, engine: OffloadEngine, request: Request) -> PlanReport:
        """What `submit` would do with a request, and what else could carry it. Asks nothing of the driver."""
        engine.check_usable()
        refuse_repeated_targets(request, self._scratch)
        self.check(request)
        profile, simulated = engine.profile, engine.device.simulated
        if len(request.blocks) == 0:
            nothing = (request.direction, 0, 0, 0, 0, None, "nothing to copy", 0.0, ())
            return PlanReport(*nothing, profile=profile.source, simulated=simulated)
        plan = self.plan(request)
        method, reason = self._copier_set.choose(plan, request.copier, profile, engine.prefer)
        shape = shape_of(plan)
        ranked = rank(shape, self._copier_set.offered, profile, engine.prefer, engine.sm_limit)
        return PlanReport(
            direction=request.direction,
            blocks=shape.blocks,
            nbytes=shape.nbytes,
            operations=shape.operations,
            rows=shape.rows,
            method=method,
            reason=reason,
            seconds=profile.seconds(method, shape),
            alternatives=tuple(
                Alternative(each.method, each.seconds) for each in ranked if each.method.label != method.label
            ),
            profile=profile.source,
            simulated=simulated,
        )

    def submit(self, engine: OffloadEngine, request: Request) -> Job:
        """Board a job for a request and queue what there is room for. If it raises, nothing has happened."""
        engine.check_usable()
        refuse_repeated_targets(request, self._scratch)
        self.check(request)
        if request.after is not None:
            refuse_capturing(engine.device.driver, request.after, "after")
        self._flights.advance()
        engine.check_usable()
        if len(request.blocks) == 0:
            nothing = Job(engine, self._flights.next_id(), request.direction, 0, request.num_parts)
            return self._flights.fly_nothing(nothing, request.listener)
        return self._fly(engine, request)

    def _fly(self, engine: OffloadEngine, request: Request) -> Job:
        plan = self.plan(request)
        method, reason = self._copier_set.choose(plan, request.copier, engine.profile, engine.prefer)
        order = self._ordering.source_order(request)
        self._flights.check_room(1)
        job = Job(engine, self._flights.next_id(), request.direction, plan.nbytes, request.num_parts)
        job.method, job.reason, job.listener = method, reason, request.listener
        shares, rival = self._copier_set.shares(method, plan), self._ordering.latest_rival(request)
        try:
            if request.after is not None:
                self._flights.mark(job, request.after)
            flight = Flight(shares, order, request.after is not None, rival)
            self._flights.board(job, flight, partial(self._ordering.record, request, job))
        except BaseException:
            self._flights.unboard(job)
            raise
        self._flights.launch()
        return job

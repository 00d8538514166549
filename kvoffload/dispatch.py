"""From a checked request to a job in flight: its plan, what carries it, and what it must follow."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvoffload.books import Flight
from kvoffload.copiers import Toolbox, check_copier
from kvoffload.flight import FlightDeck
from kvoffload.jobs import Job
from kvoffload.layout import KVLayout
from kvoffload.ordering import Ordering
from kvoffload.plan import BlockPlan, FoldedGroup, build
from kvoffload.requests import Request

if TYPE_CHECKING:
    from kvoffload.engine import OffloadEngine


class Dispatcher:
    """Turns requests into jobs. Called under the engine's lock, with the context current.

    Args:
        layout, groups: of the engine, as it is and folded.
        pool_address: host address of slot 0.
        toolbox: the copiers.
        flights: where jobs board.
        ordering: what a transfer must follow.
    """

    def __init__(
        self,
        layout: KVLayout,
        groups: tuple[FoldedGroup, ...],
        pool_address: int,
        toolbox: Toolbox,
        flights: FlightDeck,
        ordering: Ordering,
    ) -> None:
        self._layout = layout
        self._groups = groups
        self._pool_address = pool_address
        self._toolbox = toolbox
        self._flights = flights
        self._ordering = ordering

    def check(self, request: Request) -> None:
        """Raise unless what is asked for by name is there and can run."""
        check_copier(request.copier, self._toolbox.missing)

    def plan(self, request: Request) -> BlockPlan:
        """What a request moves; it has blocks."""
        return build(
            self._groups[request.group],
            self._layout,
            request.direction,
            group_index=request.group,
            pool_address=self._pool_address,
            slots=request.slots,
            blocks=request.blocks,
            first_sub_block=request.first_sub_block,
        )

    def submit(self, engine: OffloadEngine, request: Request) -> Job:
        """Board a job for a request and queue what there is room for. If it raises, nothing has happened."""
        plan = self.plan(request)
        way, reason = self._toolbox.choose(plan, request.copier, engine.profile, engine.prefer)
        order = self._ordering.source_order(request)
        self._flights.check_room(1)
        job = Job(engine, self._flights.next_id(), request.direction, plan.nbytes)
        job.way, job.reason, job.listener = way, reason, request.listener
        parts, rival = self._toolbox.parts(way, plan), self._ordering.latest_rival(request)
        try:
            if request.after is not None:
                self._flights.mark(job, request.after)
            flight = Flight(parts, order, request.after is not None, rival)
            self._flights.board(job, flight, partial(self._ordering.record, request, job))
        except BaseException:
            self._flights.unboard(job)
            raise
        self._flights.launch()
        return job

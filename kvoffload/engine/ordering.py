"""What a new transfer must follow, and when the driver may read its sources."""

from __future__ import annotations

from kvoffload.driver import SourceOrder
from kvoffload.engine.flight import FlightDeck
from kvoffload.engine.hazards import HazardTable
from kvoffload.engine.job import Job
from kvoffload.engine.request import Request
from kvoffload.planning.transfer_plan import Direction


class Ordering:
    """The hazards between directions against the jobs that are still in flight. Called under the engine's lock."""

    def __init__(self, hazards: HazardTable, flights: FlightDeck) -> None:
        self._hazards = hazards
        self._flights = flights

    def latest_rival(self, request: Request) -> Job | None:
        """The unfinished job of the other direction that this one must follow; earlier ones end before it."""
        other = request.direction.opposite
        if not self._flights.any_unfinished(other):
            return None
        latest = max(
            self._hazards.latest_on_slots(other, request.slots),
            self._hazards.latest_on_blocks(other, request.group, request.blocks),
        )
        return self._flights.unfinished(other, latest)

    def source_order(self, request: Request) -> SourceOrder:
        """STREAM for stores always: reads of device memory would overtake the stream. ANY for loads where it is safe.

        Raises:
            ValueError: "any" is asked for while a store to one of the slots is unfinished.
        """
        if request.direction is Direction.STORE or request.source_order == "stream":
            return SourceOrder.STREAM
        if not self._flights.any_unfinished(Direction.STORE):
            return SourceOrder.ANY
        latest = self._hazards.latest_on_slots(Direction.STORE, request.slots)
        if self._flights.unfinished(Direction.STORE, latest) is None:
            return SourceOrder.ANY
        if request.source_order == "any":
            raise ValueError(
                'source_order="any" while a store to one of the slots is unfinished; use "auto" or "stream"'
            )
        return SourceOrder.STREAM

    def record(self, request: Request, job: Job) -> None:
        """Note that a job in flight touches these slots and blocks."""
        self._hazards.record(request.direction, request.group, request.slots, request.blocks, job.sequence)

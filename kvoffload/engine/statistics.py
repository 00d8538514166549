"""Frozen snapshots of what an engine has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DirectionTotals:
    """Transfers of one direction that have ended.

    Attributes:
        jobs, failed: how many ended, and how many of them failed.
        nbytes: payload bytes of those that did not fail.
        seconds: their time on the GPU clock, summed.
    """

    jobs: int = 0
    failed: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, repr=False)
class EngineStatistics:
    """What an engine holds and has done.

    Attributes:
        simulated: whether `seconds` are simulated.
        in_flight: jobs that have not ended.
        held: those of them that wait on the host, wholly or in part, for room in the driver's queues.
        unreported: ended jobs that `poll` will report.
        dropped_reports: jobs whose result was not taken (see `poll`) before 65,536 newer ones ended.
        streams, streams_in_use, events, events_in_use: created, and busy now.
        pinned_bytes: of the slot pool.
    """

    simulated: bool
    num_slots: int
    pinned_bytes: int
    in_flight: int
    held: int
    unreported: int
    dropped_reports: int
    streams: int
    streams_in_use: int
    events: int
    events_in_use: int
    store: DirectionTotals
    load: DirectionTotals

    def __repr__(self) -> str:
        """One line: the pool, and what has ended or not. Every count is an attribute."""
        parts = [f"num_slots={self.num_slots}", f"pinned_bytes={self.pinned_bytes}", f"in_flight={self.in_flight}"]
        parts += [f"{name}={count}" for name in ("held", "dropped_reports") if (count := getattr(self, name))]
        parts += [f"{name}: {_described(totals)}" for name, totals in (("store", self.store), ("load", self.load))]
        return f"EngineStatistics({'simulated, ' if self.simulated else ''}{', '.join(parts)})"


def _described(totals: DirectionTotals) -> str:
    failed = f", {totals.failed} failed" if totals.failed else ""
    return f"{totals.jobs} jobs{failed}, {totals.nbytes} bytes"

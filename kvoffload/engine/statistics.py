"""Frozen snapshots of what an engine has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DirectionTotals:
    """Totals over the transfers of one direction that have ended.

    Attributes:
        jobs: how many ended, including failed and empty ones.
        failed: how many failed.
        nbytes: payload bytes of the others.
        seconds: their `TransferResult.seconds`, summed; unknown ones are left out. Invented on a simulated device.
    """

    jobs: int = 0
    failed: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, repr=False)
class EngineStatistics:
    """An engine's jobs and resources at one moment, and its totals so far.

    Attributes:
        simulated: whether a device is simulated, and `seconds` with it.
        num_slots: slots of the pool.
        pinned_slots: slots that are pinned so far: fewer while the pool grows, see `Growing`, or if it stopped early.
        pinned_bytes: bytes of these while they are pinned; 0 after `close`.
        pinning_error: why a pool has stopped growing early; None if it has not.
        staging_bytes: device memory of the staging rings, see `OffloadEngine`; 0 before "pack" is used, and after
            `close`.
        in_flight: jobs that are not known to have ended.
        held: jobs in flight with copies that wait on the host for room in the driver's queues.
        unreported: ended jobs that `poll` will report.
        dropped_reports: results that `poll` will never report, since 65,536 newer ones were waiting for it.
        streams, events: how many the engine has; 0 after `close`.
        streams_in_use, events_in_use: how many of these are busy now.
        store, load: totals of each direction.
    """

    simulated: bool
    num_slots: int
    pinned_slots: int
    pinned_bytes: int
    pinning_error: str | None
    staging_bytes: int
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
        parts = [f"num_slots={self.num_slots}", f"pinned_bytes={self.pinned_bytes}", f"in_flight={self.in_flight}"]
        if self.pinned_slots < self.num_slots:
            parts.insert(1, f"pinned_slots={self.pinned_slots}")
        parts += [f"{name}={count}" for name in ("held", "dropped_reports") if (count := getattr(self, name))]
        parts += [f"{name}: {_described(totals)}" for name, totals in (("store", self.store), ("load", self.load))]
        return f"EngineStatistics({'simulated, ' if self.simulated else ''}{', '.join(parts)})"


def _described(totals: DirectionTotals) -> str:
    failed = f", {totals.failed} failed" if totals.failed else ""
    return f"{totals.jobs} jobs{failed}, {totals.nbytes} bytes"

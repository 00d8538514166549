"""TierSpeed: what fetching records from a tier takes, as measured lately, against computing them again."""

from __future__ import annotations

_WEIGHT = 0.3  # of the newest measurement
_VALID = 30.0  # seconds: an older measurement says nothing, so that a tier that was slow is measured again


class TierSpeed:
    """Seconds a record while a tier fetches, measured over whole jobs. Not for several threads at a time."""

    def __init__(self) -> None:
        self.seconds_per_record: float | None = None
        self._measured_at = 0.0

    def measured(self, records: int, seconds: float, now: float) -> None:
        """A job has fetched so many records in that time, queueing included."""
        if records == 0:
            return
        latest = seconds / records
        known = self.expected(1, now)
        self.seconds_per_record = latest if known is None else known + _WEIGHT * (latest - known)
        self._measured_at = now

    def expected(self, records: int, now: float) -> float | None:
        """Seconds that fetching so many takes; None if that has not been measured lately."""
        if self.seconds_per_record is None or now - self._measured_at > _VALID:
            return None
        return records * self.seconds_per_record

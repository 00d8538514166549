"""Tiers that are slow, hang for a while, or fail, and that compare what they are told to write.

What a tier is to fill it first fills with other bytes, as it may: whoever takes these for a key's finds them wrong.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvoffload.tiers import DiskTier, MemoryTier, Origin, Outcome, ThreadedTier

HANG_SECONDS = 2.5
LONGEST = {"read": (0.0, 0.03, 0.1, 0.3), "write": (0.0, 0.03, 0.3, 1.0), "removal": (0.0, 0.03)}  # seconds
POISON = 0xEE

Row = np.ndarray[Any, np.dtype[np.uint8]]
Rows = list[Row]


class Weather:
    """What a tier's calls go through.

    Args:
        right: whether a row has the bytes of a key.
        says: told what is wrong.
        fails: some calls may.
    """

    def __init__(
        self,
        rng: random.Random,
        right: Callable[[bytes, Row], bool],
        says: Callable[[str], None],
        *,
        fails: bool = True,
    ) -> None:
        self.longest = {what: rng.choice(seconds) for what, seconds in LONGEST.items()}
        self.hangs, self.fails = rng.choice((0.0, 0.0, 0.02)), rng.choice((0.0, 0.0, 0.0, 0.03, 0.2)) * fails
        self.right, self.says = right, says
        self._rng, self._lock = rng, threading.Lock()

    def blow(self, what: str) -> None:
        """Wait. Raises OSError: the call fails."""
        with self._lock:
            chance, fraction, fails = self._rng.random(), self._rng.random(), self._rng.random() < self.fails
        time.sleep(fraction * (HANG_SECONDS if chance < self.hangs else self.longest[what]))
        if fails:
            raise OSError("the weather")

    def compare(self, keys: Sequence[bytes], rows: Sequence[Rows], when: str) -> None:
        for key, row in zip(keys, rows, strict=True):
            if not self.right(key, row[0]):
                self.says(f"{when} a write, the row of key {int(key)} has other bytes: {row[0][:8].tolist()} ...")


class Rough(ThreadedTier):
    """Mixed into a tier: its calls go through the weather."""

    weather: Weather

    def read_records(self, keys: Sequence[bytes], rows: Sequence[Rows]) -> list[Outcome]:
        for row in rows:
            row[0][:] = POISON
        self.weather.blow("read")
        return list(super().read_records(keys, rows))

    def write_records(self, keys: Sequence[bytes], rows: Sequence[Rows], origin: Origin) -> list[Outcome]:
        self.weather.compare(keys, rows, "before")
        self.weather.blow("write")
        outcomes = list(super().write_records(keys, rows, origin))
        self.weather.compare(keys, rows, "after")
        return outcomes

    def remove_records(self, keys: Sequence[bytes]) -> list[bool]:
        self.weather.blow("removal")
        return super().remove_records(keys)  # type: ignore[safe-super]  # that of the tier

    def remove_all(self) -> None:
        self.weather.blow("removal")
        super().remove_all()  # type: ignore[safe-super]


class RoughMemory(Rough, MemoryTier):
    """Ends with its owner."""


class RoughDisk(Rough, DiskTier):
    """Its file outlives owners, with whatever they were writing when they were killed."""

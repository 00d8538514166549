"""What has happened in a cache: counts, histograms, and events for whoever wants to hear of them."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.engine.statistics import CacheEvent, Histogram
from kvoffload.errors import KVOffloadWarning
from kvoffload.layout.layout import Int64Array

_RESIDENCY_SECONDS = tuple(float(4**power) for power in range(-5, 12))  # 1 ms to 48 days
_REUSE_DISTANCES = tuple(float(2**power) for power in range(6, 31))
_COUNTED = ("lookups", "hits", "stored", "loaded", "evicted", "failed", "declined", "removed")


class Tally:
    """A histogram while it grows: values by ranges whose upper bounds rise; each range includes its bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.array(bounds, dtype=np.float64)
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._total = 0.0

    def add(self, values: npt.NDArray[Any]) -> None:
        self._counts += np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts))
        self._total += float(values.sum())

    def snapshot(self) -> Histogram:
        return Histogram(tuple(self._bounds.tolist()), tuple(self._counts.tolist()), self._total)


class Journal:
    """Counts at once; events wait in order until somebody who holds no lock tells them."""

    def __init__(self, capacity: int, on_event: Callable[[CacheEvent], None] | None) -> None:
        if on_event is not None and not callable(on_event):
            raise TypeError(f"on_event must be a function of a CacheEvent, got {on_event!r:.80}")
        self._on_event = on_event
        self._events = deque[CacheEvent]()  # not told yet
        self._telling = threading.Lock()
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._asked = 0  # blocks touched
        self._stored_at = np.zeros(capacity)  # by entry, seconds
        self._touched_at = np.zeros(capacity, dtype=np.int64)  # by entry: `_asked` after its last touch, or 0
        self._residency = Tally(_RESIDENCY_SECONDS)
        self._distances = Tally(_REUSE_DISTANCES)

    def note(self, kind: str, keys: Sequence[bytes], namespace: str = "") -> None:
        """Something has happened to these keys."""
        self._counts[kind] += len(keys)
        self._announce(kind, keys, namespace)

    def note_lookup(self, keys: Sequence[bytes], found: int) -> None:
        self._counts["lookups"] += len(keys)
        self._counts["hits"] += found
        if self._on_event is not None:
            self._announce("hit", keys[:found])
            self._announce("miss", keys[found:])

    def note_loaded(self, count: int) -> None:
        self._counts["loaded"] += count

    def note_taken(self, entries: list[int]) -> None:
        """These entries have new keys, which may be touched before they are stored."""
        self._touched_at[entries] = 0

    def note_stored(self, keys: Sequence[bytes], entries: Sequence[int], namespace: str) -> None:
        self._stored_at[np.array(entries, dtype=np.int64)] = time.monotonic()
        self.note("stored", keys, namespace)

    def note_evicted(self, keys: Sequence[bytes], entries: list[int]) -> None:
        self._residency.add(time.monotonic() - self._stored_at[entries])
        self.note("evicted", keys)

    def note_touched(self, entries: Int64Array, asked: int) -> None:
        """A request for so many blocks has ended, of which these entries are here."""
        before = self._touched_at[entries]
        self._distances.add(self._asked - before[before > 0])
        self._asked += asked
        self._touched_at[entries] = self._asked

    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    @property
    def residency_seconds(self) -> Histogram:
        return self._residency.snapshot()

    @property
    def reuse_distance_blocks(self) -> Histogram:
        return self._distances.snapshot()

    def tell(self) -> None:
        """Call the hook for every event that has not been told; what it raises becomes a warning.

        If it is running, further up in this thread or in another one, whoever called it goes on with these: otherwise
        they would be told before events that came first.
        """
        while self._events and self._telling.acquire(blocking=False):
            try:
                while self._events:
                    event = self._events.popleft()
                    try:
                        self._on_event(event)  # type: ignore[misc]
                    except Exception as error:
                        warnings.warn(f"on_event raised {error!r}; the cache goes on", KVOffloadWarning, stacklevel=5)
            finally:
                self._telling.release()

    def _announce(self, kind: str, keys: Sequence[bytes], namespace: str = "") -> None:
        if keys and self._on_event is not None:
            self._events.append(CacheEvent(kind, tuple(keys), namespace))

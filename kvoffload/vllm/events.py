"""Events of the index as vLLM's offloading events."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from vllm.v1.kv_offload.base import Medium, OffloadingEvent, OffloadKey

from kvoffload.cache.statistics import CacheEvent


class EventLog:
    """Keeps events until vLLM asks for them. `note` is the hook of a CacheIndex."""

    def __init__(self) -> None:
        self._events: list[OffloadingEvent] = []
        self._lock = threading.RLock()  # with tiers, events come from a thread of theirs, too

    def note(self, event: CacheEvent) -> None:
        there, failed = event.kind in ("stored", "promoted"), event.kind == "failed"
        if there or failed or event.kind in ("evicted", "removed"):
            keys = [OffloadKey(key) for key in event.keys]
            # A failed store was never announced as stored: its event is for vLLM's own tracker alone.
            noted = OffloadingEvent(keys, Medium.CPU, removed=not there, metadata_only=failed)
            with self._lock:
                self._events.append(noted)

    def take(self) -> Iterable[OffloadingEvent]:
        with self._lock:
            events, self._events = self._events, []
        return events

    def cut_back(self, length: int) -> None:
        with self._lock:
            del self._events[length:]

    def __len__(self) -> int:
        return len(self._events)

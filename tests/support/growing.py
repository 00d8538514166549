"""Pools that grow when a test says so."""

from __future__ import annotations

import threading
import time
from typing import Any

from kvoffload import Growing

SECONDS = 30.0  # that anything may take


class Pieces:
    """`progress=` of a pool that grows: from the second piece on, each one pinned waits for a permit before the next.

    So once the constructor has returned, two pieces get pinned (of several devices: two rounds), and one more for each
    permit. It holds no lock, so that everything else goes on.

    Attributes:
        seen: (bytes done, bytes in all, thread) of every call.
    """

    def __init__(self, devices: int = 1) -> None:
        self.seen: list[tuple[int, int, int]] = []
        self._permits = threading.Semaphore(devices - 1)
        self._all = False
        self._devices = devices
        self._owner = threading.get_ident()

    def __call__(self, done: int, total: int) -> None:
        self.seen.append((done, total, threading.get_ident()))
        if threading.get_ident() != self._owner and not self._all:
            assert self._permits.acquire(timeout=SECONDS), "the test has left the pool waiting"

    def let(self, pieces: int) -> None:
        """Let so many more be pinned, on each device."""
        self._permits.release(pieces * self._devices)

    def let_all(self) -> None:
        self._all = True
        self._permits.release(8)  # for what waits already


def grows(slots: int, slot_bytes: int, piece_slots: int = 2) -> Growing:
    return Growing(slots * slot_bytes, piece_bytes=piece_slots * slot_bytes)


def wait_for(engine: Any, slots: int) -> None:
    """Until so many slots are pinned, or the pool does not grow any more."""
    end = time.monotonic() + SECONDS
    while engine.growing and engine.pinned_slots < slots:
        assert time.monotonic() < end, f"{engine.pinned_slots} of {slots} slots are pinned"
        time.sleep(1e-4)


def wait_for_the_end(engine: Any) -> None:
    wait_for(engine, engine.num_slots + 1)
    assert not engine.growing

"""Tiers for tests: a dict, one that outlives its tier, and one whose calls wait for the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvoffload.errors import LayoutError
from kvoffload.internal.types import UInt8Array
from kvoffload.testing.tier_pools import TierPools
from kvoffload.tiers import Limits, Origin, Outcome, ThreadedTier, Tier, TierCapabilities

Rows = list[UInt8Array]
SECONDS = 30.0  # that anything may take


class DictTier(ThreadedTier):
    """Records in a dict, without a bound. If `store` is given, it is what outlives the tier."""

    name = "dict"

    def __init__(self, store: dict[bytes, list[bytes]] | None = None, *, threads: int = 2, max_queued: int = 4096):
        super().__init__(limits=Limits(threads=threads, max_queued=max_queued))
        self.capabilities = TierCapabilities(durable=store is not None, shared=False, local_index=True)
        self.store: dict[bytes, list[bytes]] = {} if store is None else store
        self.released = 0

    def start(self, layout: bytes | None) -> None:
        if self.capabilities.durable and self.store.setdefault(b"", [layout or b""]) != [layout]:
            raise LayoutError("layout is not that of the records in the store")

    def release(self) -> None:
        self.released += 1

    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        record = self.store.get(key)
        if record is None:
            return Outcome.MISSING
        for row, content in zip(rows, record, strict=True):
            row[:] = memoryview(content)
        return Outcome.DONE

    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:  # noqa: ARG002
        self.store.setdefault(key, [row.tobytes() for row in rows])
        return Outcome.DONE

    def has_record(self, key: bytes) -> bool:
        return key in self.store

    def remove_records(self, keys: Sequence[bytes]) -> list[bool]:
        return [self.store.pop(key, None) is not None for key in keys]

    def remove_all(self) -> None:
        for key in [key for key in self.store if key]:
            self.store.pop(key, None)


class GatedTier(DictTier):
    """Each call of a method waits for a permit of the test; `begun` has the calls in their order.

    Keys that begin with "free" wait for nothing.
    """

    def __init__(self, *, threads: int = 1, max_queued: int = 4096) -> None:
        super().__init__(threads=threads, max_queued=max_queued)
        self.begun: list[tuple[str, bytes]] = []
        self.permits = threading.Semaphore(0)

    def permit(self, calls: int = 1000) -> None:
        self.permits.release(calls)

    def hold(self) -> None:
        """Permit no further call."""
        while self.permits.acquire(blocking=False):
            pass

    def _gate(self, kind: str, key: bytes) -> None:
        self.begun.append((kind, key))
        if not key.startswith(b"free"):
            assert self.permits.acquire(timeout=SECONDS), "the test has not permitted the call"

    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        self._gate("read", key)
        return super().read_record(key, rows)

    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:
        self._gate("write", key)
        return super().write_record(key, rows, origin)

    def remove_records(self, keys: Sequence[bytes]) -> list[bool]:
        self._gate("remove", keys[0])
        return super().remove_records(keys)

    def remove_all(self) -> None:
        self._gate("clear", b"")
        super().remove_all()


@contextmanager
def attached(tier: Tier, entries: int = 64, pools: int = 1) -> Iterator[TierPools]:
    """Pools that the tier has; it is closed afterwards."""
    memory = TierPools(entries, 4096, pools, seed=1)
    tier.attach(memory.arrays, memory.layout)
    try:
        yield memory
    finally:
        if isinstance(tier, GatedTier):
            tier.permit()
        assert tier.close(SECONDS)

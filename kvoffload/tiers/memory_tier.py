"""MemoryTier: records in ordinary host memory, for tests without a disk, and as the shortest example of a tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvoffload.cache.tiering.tier import Outcome, TierCapabilities
from kvoffload.errors import CapacityError
from kvoffload.internal.checks import at_least
from kvoffload.internal.nesting import new_lock
from kvoffload.internal.types import UInt8Array
from kvoffload.tiers.options import Limits
from kvoffload.tiers.threaded import Origin, Rows, ThreadedTier


class MemoryTier(ThreadedTier):
    """Records in unpinned host memory. A full tier evicts the record that was written or read longest ago.

    The memory is freed with the tier object, not by `close`.

    Args:
        nbytes: most bytes of all records, taken as records come. During puts each thread takes one record more.
        name: for metrics and messages.
        limits: see `Limits`; 2 threads by default.

    Raises:
        ValueError: `nbytes` is no integer of at least 1.
        TypeError: `limits` is no `Limits`.
        CapacityError: from `attach`: `nbytes` holds no record.
    """

    threads = 2

    def __init__(self, nbytes: int, *, name: str = "memory", limits: Limits | None = None) -> None:
        super().__init__(limits=limits)
        self.name = name
        self.nbytes = at_least("nbytes", nbytes, 1)
        self.capabilities = TierCapabilities(durable=False, shared=False, local_index=True, max_bytes=nbytes)
        self._records: OrderedDict[bytes, list[UInt8Array]] = OrderedDict()
        self._lock = new_lock()
        self._most = 0

    def start(self, layout: bytes | None) -> None:  # noqa: ARG002
        self._most = self.nbytes // self.record_bytes
        if self._most == 0:
            raise CapacityError(f"nbytes={self.nbytes} holds no record of {self.record_bytes} bytes; raise nbytes")

    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        with self._lock:
            record = self._records.get(key)
            if record is None:
                return Outcome.MISSING
            self._records.move_to_end(key)
        for row, stored in zip(rows, record, strict=True):
            row[:] = stored
        return Outcome.DONE

    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:  # noqa: ARG002
        if key not in self._records:
            record = [row.copy() for row in rows]
            with self._lock:
                for _ in range(len(self._records) + 1 - self._most):
                    self._records.popitem(last=False)
                self._records[key] = record
        return Outcome.DONE

    def has_record(self, key: bytes) -> bool:
        return key in self._records

    def remove_records(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [self._records.pop(key, None) is not None for key in keys]

    def remove_all(self) -> None:
        with self._lock:
            self._records.clear()

    def num_records(self) -> int:
        return len(self._records)

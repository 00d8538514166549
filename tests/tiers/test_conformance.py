"""check_tier passes what keeps the promises of `Tier`, and finds each of many tiers that break one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from seeds import rest_long
from tier_classes import DictTier, Rows

from kvoffload.internal.types import UInt8Array
from kvoffload.testing import FaultyTier, TierFaults, check_tier
from kvoffload.tiers import (
    Limits,
    MemoryTier,
    Origin,
    Outcome,
    ThreadedTier,
    Tier,
    TierCapabilities,
    TierJob,
    TierStatistics,
)

RECORDS = 64  # four times the entries of check_tier


@pytest.mark.parametrize(("threads", "pools"), rest_long([(4, 2), (1, 1), (1, 2), (4, 1)], 1))
def test_the_memory_tier_conforms(pools: int, threads: int, seed: int) -> None:
    names = check_tier(
        lambda: MemoryTier(RECORDS * pools * 4096, limits=Limits(threads=threads)), pools=pools, seed=seed
    )
    assert "it stays within its bytes" in names
    assert "records outlive the tier" not in names


def test_a_faulty_tier_without_faults_conforms(seed: int) -> None:
    slow = TierFaults(delay=0.2, longest_delay=1e-4)
    check_tier(lambda: FaultyTier(slow, seed=seed, limits=Limits(threads=2)), seed=seed, row_bytes=8192)


def test_a_durable_tier_conforms(seed: int) -> None:
    store: dict[bytes, list[bytes]] = {}
    names = check_tier(lambda: DictTier(store), seed=seed)
    assert "records outlive the tier" in names


# tiers that break a promise -------------------------------------------------------------------------------------------


class WrongByte(DictTier):
    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        outcome = super().read_record(key, rows)
        if outcome is Outcome.DONE:
            rows[-1][-1] ^= 1
        return outcome


class WritesToPut(DictTier):
    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:
        outcome = super().write_record(key, rows, origin)
        rows[0][100] = 3
        return outcome


class ShortKeys(DictTier):
    """Compares 62 bytes."""

    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        return super().read_record(key[:62], rows)

    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:
        return super().write_record(key[:62], rows, origin)


class Replaces(DictTier):
    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:
        self.store.pop(key, None)
        return super().write_record(key, rows, origin)


class RemoveSaysDone(DictTier):
    def remove_records(self, keys: Sequence[bytes]) -> list[bool]:
        super().remove_records(keys)
        return [True] * len(keys)


class RemoveReversed(DictTier):
    def remove_records(self, keys: Sequence[bytes]) -> list[bool]:
        return super().remove_records(keys)[::-1]


class RemovesNothing(DictTier):
    def remove_records(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.store for key in keys]


class ClearsNothing(DictTier):
    def remove_all(self) -> None:
        pass


class MissingRaises(DictTier):
    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        if key not in self.store:
            raise KeyError(key)
        return super().read_record(key, rows)


class SaysMissing(DictTier):
    def has_record(self, key: bytes) -> bool:
        return key.endswith(b"1") and super().has_record(key)


class SaysDone(DictTier):
    def has_record(self, key: bytes) -> bool:  # noqa: ARG002
        return True


class PutOvertakes(DictTier):
    """A removal neither cancels writes nor waits for them."""

    def remove(self, keys: Sequence[bytes], *, notify: Any = None) -> TierJob:
        super().exists(keys, notify=notify)  # refuses what is to be refused
        job = TierJob(keys, notify=notify)
        for at, found in enumerate(self.remove_records(keys)):
            job.begin([at])
            job.settle([at], [Outcome.DONE if found else Outcome.MISSING])
        return job

    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:
        time.sleep(1e-4)
        return super().write_record(key, rows, origin)


class Unbounded(DictTier):
    def __init__(self) -> None:
        super().__init__()
        self.capabilities = TierCapabilities(
            durable=False, shared=False, local_index=True, max_bytes=RECORDS * 2 * 4096
        )


class RecordsUnbounded(Unbounded):
    def num_records(self) -> int:
        return len(self.store)


class CountsDouble(DictTier):
    def statistics(self) -> TierStatistics:
        known = super().statistics()
        return TierStatistics(written=2 * known.written, read=known.read)


class OneBuffer(DictTier):
    """Reads go through one buffer that all threads share."""

    _buffer: UInt8Array = np.zeros(4096, np.uint8)

    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        if key not in self.store:
            return Outcome.MISSING
        for row, content in zip(rows, self.store[key], strict=True):
            self._buffer[:] = memoryview(content)
            time.sleep(1e-5)
            row[:] = self._buffer
        return Outcome.DONE


class WritesElsewhere(DictTier):
    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        self.pools[0][0][7] = 1
        return super().read_record(key, rows)


class LateWrite(DictTier):
    """Writes to an entry whose key has its outcome."""

    _before: Rows | None = None

    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        self._before = rows
        return super().read_record(key, rows)

    def has_record(self, key: bytes) -> bool:
        if self._before is not None:
            self._before[0][7] = 1
        return super().has_record(key)


class TouchesBeforeBegin(DictTier):
    def get(self, keys: Sequence[bytes], entries: Sequence[int], **more: Any) -> TierJob:
        job = super().get(keys, entries, **more)
        if more.get("deadline") is not None:
            self.pools[0][entries[0]] = 0
        return job


class WritesBeyond(DictTier):
    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        whole = self.pools[0].base
        if isinstance(whole, np.ndarray):
            whole[-1] = 1
        return super().read_record(key, rows)


class IgnoresDeadlines(DictTier):
    def put(self, keys: Sequence[bytes], entries: Sequence[int], **more: Any) -> TierJob:
        deadline = more.pop("deadline", None)
        if isinstance(deadline, float) and deadline == deadline:
            deadline = None
        return super().put(keys, entries, deadline=deadline, **more)


class CancelledIsWritten(DictTier):
    def put(self, keys: Sequence[bytes], entries: Sequence[int], **more: Any) -> TierJob:
        job = super().put(keys, entries, **more)
        for key, entry in zip(job.keys, job.entries, strict=True):
            self.store.setdefault(key, [pool[entry].tobytes() for pool in self.pools])
        return job


class NeverNotifies(DictTier):
    def get(self, keys: Sequence[bytes], entries: Sequence[int], **more: Any) -> TierJob:
        notify = more.pop("notify", None)
        return super().get(keys, entries, notify=None if callable(notify) else notify, **more)


class CloseForgets(DictTier):
    def close(self, timeout: float = 10.0) -> bool:
        super().close(timeout)
        return False


class WorksAfterClose(DictTier):
    def exists(self, keys: Sequence[bytes], **more: Any) -> TierJob:
        if self._workers.closed:
            return TierJob(())
        return super().exists(keys, **more)


class TakesPoolsTwice(DictTier):
    def attach(self, pools: Sequence[UInt8Array], layout: bytes | None) -> None:
        if not self.pools:
            super().attach(pools, layout)


class TakesAnyPool(DictTier):
    def attach(self, pools: Sequence[UInt8Array], layout: bytes | None) -> None:
        if len(pools) and isinstance(pools[0], np.ndarray) and pools[0].ndim == 2 and not pools[0].flags.writeable:
            return
        super().attach(pools, layout)


class TakesLongKeys(DictTier):
    def get(self, keys: Sequence[bytes], entries: Sequence[int], **more: Any) -> TierJob:
        return super().get([key[:64] if isinstance(key, bytes) else key for key in keys], entries, **more)


class TakesNoKeys(DictTier):
    def exists(self, keys: Sequence[bytes], **more: Any) -> TierJob:
        return super().exists([] if keys is None else keys, **more)


class TakesAnyTenant(DictTier):
    def put(self, keys: Sequence[bytes], entries: Sequence[int], **more: Any) -> TierJob:
        return super().put(keys, entries, **more | {"tenant": ""})


class TakesAnyEntry(DictTier):
    def put(self, keys: Sequence[bytes], entries: Sequence[int], **more: Any) -> TierJob:
        return super().put(keys, [5 if entry == -1 else entry for entry in entries], **more)


class GetHangs(DictTier):
    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        time.sleep(3.0)
        return super().read_record(key, rows)


class PutBlocks(DictTier):
    def put(self, keys: Sequence[bytes], entries: Sequence[int], **more: Any) -> TierJob:
        if keys:
            time.sleep(5.0)
        return super().put(keys, entries, **more)


BROKEN: list[tuple[type[ThreadedTier], str]] = [
    (WrongByte, "never put"),
    (WritesToPut, "put has written to entry"),
    (ShortKeys, "keys of all lengths"),
    (Replaces, "a known key keeps its record"),
    (RemoveSaysDone, "remove of keys without records"),
    (RemoveReversed, "remove"),
    (RemovesNothing, "remove"),
    (ClearsNothing, "clear"),
    (MissingRaises, "instead of DONE or MISSING"),
    (SaysMissing, "exists"),
    (SaysDone, "exists"),
    (PutOvertakes, "without waiting"),
    (Unbounded, "it stays within its bytes"),
    (RecordsUnbounded, "max_bytes is"),
    (CountsDouble, "written has grown"),
    (OneBuffer, "never put"),
    (WritesElsewhere, "which it was not given"),
    (LateWrite, "after its outcome"),
    (TouchesBeforeBegin, "written to"),
    (WritesBeyond, "has written after pools[0]"),
    (IgnoresDeadlines, "deadline in the past"),
    (CancelledIsWritten, "put"),
    (NeverNotifies, "notify was not called"),
    (CloseForgets, "close"),
    (WorksAfterClose, "exists after close"),
    (TakesPoolsTwice, "a second attach"),
    (TakesAnyPool, "pools that cannot be written to"),
    (TakesLongKeys, "a key of 65 bytes"),
    (TakesAnyEntry, "negative"),
    (TakesNoKeys, "exists, no list"),
    (TakesAnyTenant, "put, tenant=3"),
    (GetHangs, "not done within"),
    (PutBlocks, "not over after"),
]


@pytest.mark.parametrize(
    ("broken", "message"), rest_long(BROKEN[::2] + BROKEN[1::2], 16), ids=lambda each: getattr(each, "__name__", "")
)
def test_a_broken_promise_is_found(broken: Callable[[], Tier], message: str, seed: int) -> None:
    with pytest.raises(AssertionError) as found:
        check_tier(broken, seed=seed, timeout=0.5 if broken in (GetHangs, PutBlocks, NeverNotifies) else 30.0)
    assert message in str(found.value)
    assert f"seed={seed}" in str(found.value)


class Forgets(DictTier):
    def __init__(self, store: dict[bytes, list[bytes]]) -> None:
        super().__init__({})
        store.clear()


class ForgetsRemovals(DictTier):
    """Removals are not written to the store; what was cleared is there again, with the next tier."""

    def __init__(self, store: dict[bytes, list[bytes]]) -> None:
        super().__init__(dict(store))
        self._durable = store

    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:
        outcome = super().write_record(key, rows, origin)
        self._durable[key] = self.store[key]
        return outcome

    def remove_all(self) -> None:
        super().remove_all()
        self._durable.clear()


class AnyLayout(DictTier):
    def start(self, layout: bytes | None) -> None:
        pass


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Forgets, "records outlive the tier"),
        (ForgetsRemovals, "removed, then a second tier"),
        (AnyLayout, "attached with another layout"),
    ],
)
def test_a_broken_promise_of_durable_tiers_is_found(broken: type[DictTier], message: str, seed: int) -> None:
    store: dict[bytes, list[bytes]] = {}
    with pytest.raises(AssertionError, match=message):
        check_tier(lambda: broken(store), seed=seed)


def test_wrong_sizes_are_refused_before_a_tier_is_made() -> None:
    for row_bytes in (0, 4095, 6144):
        with pytest.raises(ValueError, match="row_bytes must be"):
            check_tier(pytest.fail, row_bytes=row_bytes)

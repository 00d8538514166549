"""The ids of a transfer are copied when it is submitted: its caller may change their array at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import STAGING, Rig, all_are, settled, simulated

from kvoffload import NO_WAIT, CapacityError
from kvoffload.engine import launcher

TRANSFERS = 60  # more than the launches that a queue holds of which `QUEUE_PLACES` may be used: many wait on the host
QUEUE_PLACES = 96
BLOCKS = 500


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Block `b` is filled with `(b + 1) % 256`, slot `s` with `(100 + s) % 256`; one program of a kernel."""
    monkeypatch.setattr(launcher, "QUEUE_LIMIT", QUEUE_PLACES)
    with simulated(1) as device:
        yield from settled(device, planes=2, num_blocks=BLOCKS, num_slots=BLOCKS, staging_bytes=STAGING)


def _wrong_slots(bench: Rig, count: int) -> list[int]:
    return [slot for slot in range(count) if not all_are(bench.slot(slot), (slot + 1) % 256)]


@pytest.mark.parametrize("copier", ["strided", "pack", "batch", "loop"])
def test_block_ids_of_stores_are_copied(bench: Rig, copier: str) -> None:
    held = bench.stream()
    gate = bench.gate(held)
    count = 1
    blocks, slots = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    jobs = []
    for index in range(TRANSFERS):
        blocks[:] = slots[:] = np.arange(count) + count * index
        jobs.append(bench.engine.store(blocks, slots, after=held, copier=copier))  # type: ignore[arg-type]
        blocks[:] = slots[:] = BLOCKS - 1
    assert copier != "pack" or bench.engine.statistics().held > 0, "else none is read later"
    gate.open()
    bench.engine.drain(60)
    assert [job.error for job in jobs if job.error] == []
    assert _wrong_slots(bench, TRANSFERS * count) == []


@pytest.mark.parametrize(("copier", "parts"), [("pack", None), ("strided", 2)])
def test_ids_of_loads_are_copied(bench: Rig, copier: Any, parts: int | None) -> None:
    held = bench.stream()
    gate = bench.gate(held)
    blocks, slots = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for index in range(TRANSFERS):
        blocks[0], slots[0] = index, index
        bench.engine.load(slots, blocks, after=held, copier=copier, parts=parts)
    blocks[0], slots[0] = BLOCKS - 1, BLOCKS - 1
    gate.open()
    bench.engine.drain(60)
    wrong = [block for block in range(TRANSFERS) if not all_are(bench.block(block), (100 + block) % 256)]
    assert wrong == []


# what owns the slots is asked before anything happens -----------------------------------------------------------------


class Guard:
    """Owns the slots below 4."""

    busy = True

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def check_store(self, slots: np.ndarray[Any, Any]) -> None:
        self.asked.append(slots.tolist())
        if slots.min() < 4:
            raise ValueError("slots below 4 are taken")


def test_the_owner_of_the_slots_is_asked_before_anything_happens(bench: Rig) -> None:
    engine, guard, simulator = bench.engine, Guard(), bench.device.simulator
    engine.guard_slots(guard)
    before, calls = engine.statistics(), simulator.faults.call_count.copy()
    for wait in (NO_WAIT, None):
        with pytest.raises(ValueError, match="slots below 4 are taken"):
            engine.store([1, 2], [5, 3], after=wait)
    assert guard.asked == [[5, 3], [5, 3]]
    done = simulator.faults.call_count - calls
    assert {"cuEventCreate", "cuEventRecord", "cuMemcpy3DBatchAsync", "cuLaunchKernel"}.isdisjoint(+done)
    assert (engine.statistics(), engine.submitted) == (before, 0)
    assert all_are(bench.slot(5), 105)
    engine.store([1], [5]).wait(10)
    engine.load([3], [9]).wait(10)
    assert guard.asked[2:] == [[5]], "loads write no slot"
    with pytest.raises(CapacityError, match="belong to another BlockCache"):
        engine.guard_slots(Guard())
    del guard
    engine.store([1], [3]).wait(10)
    engine.guard_slots(Guard())

"""Results that nobody polls: what each of them costs."""

from __future__ import annotations

import gc
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable

import pytest
from helpers import rig, simulated
from sharding import machine

from kvoffload import NO_WAIT, OffloadEngine, ShardedEngine

JOBS = 250
MOST_BYTES = 400  # a result is 230; its transfer would be 1,200, and on two devices 2,500


def bytes_per_job(engine: OffloadEngine | ShardedEngine, submit: Callable[[], object]) -> float:
    """What stays in memory of each job that has ended, and that nobody asks about."""
    for _ in range(20):
        submit()
        engine.drain(10)
    engine.poll()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(JOBS):
            submit()
            engine.drain(10)
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert engine.statistics().unreported == JOBS
    assert len(engine.poll()) == JOBS
    return kept / JOBS


def test_a_job_that_nobody_waits_for_keeps_its_result_and_no_transfer() -> None:
    with simulated(1) as device, rig(device) as bench:
        assert bytes_per_job(bench.engine, lambda: bench.engine.store([1], [1], after=NO_WAIT)) < MOST_BYTES


def test_a_job_of_several_devices_that_nobody_waits_for_keeps_its_result_and_no_transfer() -> None:
    with machine() as two:
        assert bytes_per_job(two.engine, lambda: two.engine.store([1], [1], after=NO_WAIT)) < MOST_BYTES


@pytest.mark.parametrize("devices", [1, 2])
def test_the_oldest_result_is_forgotten_at_the_same_cost_however_many_were_before_it(devices: int) -> None:
    # The first key of a dict is found by passing all that were deleted before it; an OrderedDict knows its first.
    if devices == 1:
        with simulated(1) as device, rig(device) as bench:
            bench.engine.poll()
            assert isinstance(bench.engine._reports.results, OrderedDict)
    else:
        with machine() as two:
            two.engine.poll()
            assert isinstance(two.engine._reports.results, OrderedDict)

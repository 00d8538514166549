"""Ctrl-C at any moment of a submission or of a completion: the exception comes out, and no job is lost.

`tests/interrupts/test_interrupts_everywhere.py` does this to every public call. Here, many points of a few are tried,
and what follows is looked at more closely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from call_counts import count_calls
from helpers import STAGING, Rig, interrupt_call, keys, leaks_of, number_blocks, release, rig, simulated, whole
from interrupts import interrupt_at, trace_points

import kvoffload
from kvoffload import NO_WAIT, BlockCache, TransferError
from kvoffload.tuning import CopierName

EVERY = 7  # points are that far apart, so that a test takes a second


@contextmanager
def rigs(**options: Any) -> Iterator[Rig]:
    """A rig that leaves nothing behind, but for a handle that an interrupted driver call has made."""
    with simulated(1) as device, rig(device, **options) as bench:
        yield bench
    assert sum(leaks_of(device).values()) <= 1


def at_points(seed: int, attempt: Callable[[int], bool], every: int = EVERY) -> int:
    """Call `attempt` with every so manyth number, as long as it says that there was such a point."""
    number = 1 + seed % every
    while attempt(number):
        number += every
    return number


def test_an_interrupted_submission_loses_no_job(seed: int) -> None:
    def attempt(number: int) -> bool:
        with rigs() as bench:
            engine, held = bench.engine, bench.stream()
            cache = BlockCache(engine)
            cache.store(keys(0), [0]).wait(10)
            bench.gate(held)
            outcome = interrupt_at(number, lambda: cache.store(keys(1, 2), [1, 2], after=held))
            if outcome.point is None:
                return False
            assert outcome.raised
            assert cache.lookup(keys(0, 1)) == 1
            follower = cache.store(keys(3), [3], after=NO_WAIT)
            release(bench)
            follower.wait(10)
            whole(engine)
            cache.check()
            assert len(engine.poll()) in (0, 1), "the job that was interrupted, if it was in flight"
            cache.store(keys(1, 2), [1, 2]).wait(10)
            cache.load(keys(1, 2, 3), [10, 11, 12]).wait(10)
            assert [int(bench.block(block)[0]) for block in (10, 11, 12)] == [2, 3, 4]
        return True

    assert at_points(seed, attempt) > 50


@pytest.mark.parametrize("failed", [False, True], ids=["well", "failed"])
def test_an_interrupted_completion_loses_no_job(seed: int, failed: bool) -> None:
    def attempt(number: int) -> bool:
        with rigs() as bench:
            engine, held = bench.engine, bench.stream()
            cache = BlockCache(engine)
            gate = bench.gate(held)
            if failed:  # the last event is not recorded: the engine does not know how far the job came
                bench.device.simulator.faults.fail_call("cuEventRecord", nth=3)
            job = cache.store(keys(1, 2), [1, 2], after=held)
            gate.open()
            bench.settle()
            outcome = interrupt_at(number, engine.advance)
            engine.drain(10)
            whole(engine)
            cache.check()
            assert [result.error is not None for result in engine.poll()] == [failed]
            totals = engine.statistics().store
            assert (totals.jobs, totals.failed) == (1, int(failed))
            if failed:
                with pytest.raises(TransferError):
                    job.wait(1)
                cache.store(keys(1, 2), [1, 2]).wait(10)
            else:
                job.wait(1)
            assert cache.lookup(keys(1, 2)) == 2
            return outcome.point is not None

    assert at_points(seed, attempt) > 5


def test_an_interrupted_submission_of_one_group_among_two(seed: int) -> None:
    def attempt(number: int) -> bool:
        with simulated(1) as device:
            groups = [device.allocate_planes(2, block_bytes=64, num_blocks=8) for _ in range(2)]
            number_blocks(groups[0], 11)
            number_blocks(groups[1], 101)
            layout = kvoffload.KVLayout(groups)
            with kvoffload.OffloadEngine(layout, device=device, num_slots=8, staging_bytes=0) as engine:
                cache = BlockCache(engine)
                outcome = interrupt_at(number, lambda: cache.store([b"a"], [[1], [1]], after=NO_WAIT))
                cache.check()
                engine.drain(10)
                if cache.lookup([b"a"]):  # the interrupt came when it was all submitted
                    with cache.acquire([b"a"]) as lease:
                        assert [int(engine.slots[lease.slots(group)[0], 0]) for group in (0, 1)] == [12, 102]
                cache.check()
                whole(engine)
                cache.store([b"a", b"b", b"c"], [[1, 2, 3], [1, 2, 3]]).wait(10)
                cache.check()
                assert cache.lookup([b"a", b"b", b"c"]) == 3
        return outcome.point is not None

    assert at_points(seed, attempt) > 50


def interrupt_a_load(bench: Rig, patch: pytest.MonkeyPatch) -> None:
    """In the middle of queueing it: the next call finds the engine inconsistent."""
    with patch.context() as once:
        interrupt_call(once, type(bench.device.driver), "event_record")
        with pytest.raises(KeyboardInterrupt):
            bench.engine.load([0], [0], after=NO_WAIT)


def test_jobs_behind_an_interrupted_one_are_counted_and_reported() -> None:
    """Wherever the engine itself was interrupted, which puts the job in flight."""

    def warm(bench: Rig) -> Callable[[], object]:
        bench.engine.store([1], [1], after=NO_WAIT).wait(10)
        return partial(bench.engine.store, [1], [1], after=NO_WAIT)

    with rigs() as bench:
        points = trace_points(warm(bench))
        bench.engine.drain(10)
    numbers = [
        number
        for number, point in enumerate(points, 1)
        if point.place.startswith(("engine/engine.py", "engine/shard.py"))
    ]
    assert len(numbers) > 10
    for number in numbers:
        with rigs() as bench:
            engine = bench.engine
            assert interrupt_at(number, warm(bench)).raised
            jobs = [engine.store([block], [block], after=NO_WAIT) for block in (2, 3)]
            engine.drain(10)
            reported = [result.job_id for result in engine.poll()]
            assert {job.id for job in jobs} <= set(reported), points[number - 1]
            assert engine.statistics().store.jobs == 1 + len(reported)
            whole(engine)


def test_an_interrupt_is_repaired_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the call that repairs has nothing else to do."""
    with rigs() as bench:
        job, stream = bench.engine.store([1], [1], after=NO_WAIT), bench.stream()
        job.wait(10)
        interrupt_a_load(bench, monkeypatch)
        calls = [count_calls(lambda: job.order_before(stream)).functions for _ in range(2)]
        assert [names.count("engine/tracker.py Tracker.repair") for names in calls] == [1, 0]
        release(bench)


def test_an_interrupted_wait_for_a_failed_transfer_loses_no_event() -> None:
    """Its submission failed, and so did recording where it ends: a stream that follows it needs another event."""
    number, point = 1, True
    while point:
        with rigs() as bench:
            engine, held, stream = bench.engine, bench.stream(), bench.stream()
            gate = bench.gate(held)
            for nth in (3, 4):
                bench.device.simulator.faults.fail_call("cuEventRecord", nth)
            engine.store([1], [1], after=held)
            assert bench.device.simulator.faults.pending == 0
            point = interrupt_at(number, lambda: engine.order_all_before(stream)).point is not None  # noqa: B023
            gate.open()
            engine.drain(10)
            whole(engine)
        number += 1
    assert number > 10


@pytest.mark.parametrize("copier", ["strided", "pack"])
def test_an_interrupt_leaves_every_transfer_in_flight_what_it_uses(
    copier: CopierName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events and tables of the second of two stores in flight, too: what is queued next must not take them."""
    with rigs(staging_bytes=STAGING, num_blocks=32, num_slots=32) as bench:
        engine, streams = bench.engine, [bench.stream(), bench.stream()]
        gates = [bench.gate(stream) for stream in streams]
        first, second = (
            engine.store([1 + n, 5 + n, 9 + n], [1 + n, 5 + n, 9 + n], after=stream, copier=copier)
            for n, stream in enumerate(streams)
        )
        interrupt_a_load(bench, monkeypatch)
        loads = [engine.load([n, n + 2], [n, n + 2], after=NO_WAIT, copier=copier) for n in (21, 22, 25, 26)]
        third = engine.store([13, 15, 17], [13, 15, 17], after=NO_WAIT, copier=copier)
        for load in loads:
            load.wait(10)
        gates[0].open()
        bench.settle()
        assert [job.done for job in (first, second, third)] == [True, False, False]
        gates[1].open()
        engine.drain(10)
        assert [job.error for job in (first, second, third)] == [None] * 3
        assert [int(bench.slot(slot)[0]) for slot in (1, 5, 9, 2, 6, 10, 13)] == [2, 6, 10, 3, 7, 11, 14]
        assert [int(bench.block(block)[0]) for block in range(21, 29)] == list(range(121, 129))
        whole(engine)


def test_an_interrupt_frees_no_room_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stores fill what the driver may be given at a time. The next one waits on the host, interrupt or not."""
    with rigs(most_queued_bytes=2 * 4 * 64) as bench:
        engine, held = bench.engine, bench.stream()
        bench.gate(held)
        for block in (1, 2):
            engine.store([block], [block], after=held)
        interrupt_a_load(bench, monkeypatch)
        engine.store([3], [3], after=NO_WAIT)
        assert engine.statistics().held == 1
        release(bench)
        assert [int(bench.slot(slot)[0]) for slot in (1, 2, 3)] == [2, 3, 4]
        whole(engine)

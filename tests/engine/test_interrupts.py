"""Ctrl-C at any moment of a submission or of a landing: the exception comes out, and no job is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from helpers import interrupt_call, keys, leaks_of, release, rig, simulated, whole
from workload import program, several_streams

from kvoffload import NO_WAIT, BlockCache, Direction, TransferError
from kvoffload.copiers import GatherCopier, StridedCopier
from kvoffload.copiers.table_arena import Table, TableArena
from kvoffload.device.streams import EventPool, Lane
from kvoffload.driver import Driver
from kvoffload.engine.flight import FlightDeck
from kvoffload.engine.job import Job, JobGroup, State
from kvoffload.engine.launcher import Launcher
from kvoffload.engine.ordering import Ordering
from kvoffload.tuning import CopyMethod


@pytest.fixture
def interrupt() -> Iterator[Callable[..., Any]]:
    """`interrupt(owner, name, nth, after=)`: the nth call of that method raises KeyboardInterrupt, and no other."""
    with pytest.MonkeyPatch.context() as patch:
        yield partial(interrupt_call, patch)


SUBMITTING: list[tuple[type, str, int, bool]] = [
    (FlightDeck, "mark", 1, False),
    (Driver, "event_record", 1, False),  # the marker
    (FlightDeck, "board", 1, False),
    (EventPool, "acquire", 2, False),  # in board: the start
    (EventPool, "acquire", 3, False),  # in board: the end
    (JobGroup, "boarded", 1, False),
    (JobGroup, "boarded", 1, True),
    (FlightDeck, "board", 1, True),
    (Ordering, "record", 1, False),
    (Ordering, "record", 1, True),
    (FlightDeck, "launch", 2, False),
    (Lane, "take", 1, False),
    (Launcher, "_launch_piece", 1, False),
    (Driver, "stream_wait_event", 1, False),
    (Driver, "stream_wait_event", 1, True),
    (Driver, "event_record", 2, False),  # the start
    (Driver, "event_record", 2, True),
    (StridedCopier, "stage", 1, False),
    (StridedCopier, "stage", 1, True),
    (Driver, "event_record", 3, False),  # the end
    (Driver, "event_record", 3, True),
    (Launcher, "_launch_piece", 1, True),
    (FlightDeck, "launch", 2, True),
]
LANDING: list[tuple[type, str, int, bool]] = [
    (FlightDeck, "_has_ended", 1, False),
    (FlightDeck, "_piece_has_ended", 1, True),
    (FlightDeck, "_has_ended", 1, True),
    (FlightDeck, "_measure", 1, False),
    (Driver, "event_seconds", 1, False),
    (FlightDeck, "_measure", 1, True),
    (FlightDeck, "_give_back", 1, False),
    (FlightDeck, "_give_back", 1, True),
    (FlightDeck, "_land", 1, False),
    (FlightDeck, "_settle", 1, False),
    (JobGroup, "ended", 1, False),
    (JobGroup, "ended", 1, True),
    (FlightDeck, "_settle", 1, True),
    (FlightDeck, "_land", 1, True),
]


def _id(point: Any) -> str | None:
    return point.__name__ if isinstance(point, type) else None


@pytest.mark.parametrize(("owner", "name", "nth", "after"), SUBMITTING, ids=_id)
def test_an_interrupted_submission_loses_no_job(
    interrupt: Callable[..., Any], owner: type, name: str, nth: int, after: bool
) -> None:
    with simulated(1) as device, rig(device) as bench:
        engine, held = bench.engine, bench.stream()
        cache = BlockCache(engine)
        cache.store(keys(0), [0]).wait(10)
        bench.gate(held)
        left = interrupt(owner, name, nth, after=after)
        with pytest.raises(KeyboardInterrupt):
            cache.store(keys(1, 2), [1, 2], after=held)
        assert left[0] <= 0
        assert cache.lookup(keys(0, 1)) == 1
        follower = cache.store(keys(3), [3], after=NO_WAIT)
        release(bench)
        follower.wait(10)
        whole(engine)
        cache.check()
        assert cache.lookup(keys(1)) == 0, "a store that was interrupted is not visible"
        assert len(engine.poll()) in (0, 1), "the job that was interrupted, if it had boarded"
        cache.store(keys(1, 2), [1, 2]).wait(10)
        cache.load(keys(1, 2, 3), [10, 11, 12]).wait(10)
        assert [int(bench.block(block)[0]) for block in (10, 11, 12)] == [2, 3, 4]
    assert leaks_of(device) == {}


OF_A_SPLIT: list[tuple[type, str, int, bool]] = [
    (GatherCopier, "stage", 1, False),
    (TableArena, "take", 1, True),  # somebody has the table and nobody knows
    (GatherCopier, "stage", 1, True),
    (Driver, "launch", 1, False),
    (Driver, "launch", 1, True),
    (Launcher, "_mark", 1, False),  # the end of the kernel's part
    (Launcher, "_mark", 1, True),
    (Launcher, "_launch_piece", 1, True),
    (StridedCopier, "stage", 1, False),
    (StridedCopier, "stage", 1, True),
    (Driver, "stream_wait_event", 2, False),  # the start of the copies' part
    (Driver, "stream_wait_event", 2, True),
    (Launcher, "_join", 1, False),
    (Launcher, "_join", 1, True),
    (Launcher, "_launch_piece", 2, True),
    (Table, "release", 1, False),  # when it lands
    (Table, "release", 1, True),
]


@pytest.mark.parametrize(("owner", "name", "nth", "after"), OF_A_SPLIT, ids=_id)
def test_an_interrupted_split_loses_no_job_and_no_table(
    interrupt: Callable[..., Any], owner: type, name: str, nth: int, after: bool
) -> None:
    with simulated(1) as device, rig(device, sm_limit=1) as bench:
        engine, held = bench.engine, bench.stream()
        method = CopyMethod("split", 1, 0.5)

        def store(first: int, after: Any) -> Job:
            return engine.submit(Direction.STORE, range(first, first + 4), range(4), copier=method, after=after)

        gate = bench.gate(held)
        left = interrupt(owner, name, nth, after=after)

        def store_and_land() -> None:
            store(0, held)
            gate.open()
            engine.drain(10)

        with pytest.raises(KeyboardInterrupt):
            store_and_land()
        assert left[0] <= 0
        follower = store(8, NO_WAIT)
        release(bench)
        follower.wait(10)
        assert [int(bench.slot(slot)[0]) for slot in range(4)] == [9, 10, 11, 12]
        statistics = engine.statistics()
        assert (statistics.in_flight, statistics.streams_in_use) == (0, 0)
        lost = 1 if owner is Table else 0  # of events there are some to spare for that
        assert statistics.events_in_use <= lost
        assert engine._parts.copiers._kernels is not None
        assert [arena.in_use for arena in engine._parts.copiers._kernels.arenas] == [0, 0]
        assert len(engine.poll()) in (0, 1), "the job that was interrupted"
    assert leaks_of(device) in ({}, {"events": lost})


@pytest.mark.parametrize("failed", [False, True], ids=["well", "failed"])
@pytest.mark.parametrize(("owner", "name", "nth", "after"), LANDING, ids=_id)
def test_an_interrupted_landing_loses_no_job(
    interrupt: Callable[..., Any], owner: type, name: str, nth: int, after: bool, failed: bool
) -> None:
    if failed and name == "event_seconds":
        pytest.skip("the time of a failed job is not asked for")
    with simulated(1) as device, rig(device) as bench:
        engine = bench.engine
        cache = BlockCache(engine)
        held = bench.stream()
        gate = bench.gate(held)
        if failed:
            assert device.simulator is not None
            device.simulator.faults.fail_call("cuEventRecord", nth=3)  # the end: nobody knows how far it came
        job = cache.store(keys(1, 2), [1, 2], after=held)
        gate.open()
        bench.settle()
        left = interrupt(owner, name, nth, after=after)
        with pytest.raises(KeyboardInterrupt):
            engine.advance()
        assert left[0] <= 0
        engine.drain(10)
        assert job.jobs[0].state is (State.FAILED if failed else State.DONE)
        whole(engine)
        cache.check()
        assert [result.job_id for result in engine.poll()] == [job.jobs[0].id]
        totals = engine.statistics().store
        assert (totals.jobs, totals.failed) == (1, int(failed))
        if failed:
            with pytest.raises(TransferError):
                job.wait(1)
            cache.store(keys(1, 2), [1, 2]).wait(10)
        else:
            job.wait(1)
        assert cache.lookup(keys(1, 2)) == 2
    assert leaks_of(device) == {}


def test_an_interrupted_wait_leaves_the_job_running() -> None:
    with simulated(1) as device, rig(device) as bench, pytest.MonkeyPatch.context() as patch:
        held = bench.stream()
        gate = bench.gate(held)
        job = bench.engine.store([1], [1], after=held)

        def interrupted(_: Job) -> bool:
            raise KeyboardInterrupt

        patch.setattr(Job, "done", property(interrupted))
        for call in (job.wait, job.result):
            with pytest.raises(KeyboardInterrupt):
                call()
        patch.undo()
        gate.open()
        assert job.wait(10).error is None
        whole(bench.engine)


def test_an_interrupted_submission_of_one_group_among_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C inside a copier: the exception comes out, and the books are right once the GPU is through."""
    several_streams(monkeypatch)
    with program() as made:

        def interrupted(submit: Callable[..., None], *arguments: Any) -> None:
            submit(*arguments)
            raise KeyboardInterrupt

        for name in ("strided", "batch"):
            copier: Any = getattr(made.cache_engine._parts.copiers, f"_{name}")
            monkeypatch.setattr(copier, "_submit", partial(interrupted, copier._submit))
        with pytest.raises(KeyboardInterrupt):
            made.cache.store([b"a"], [[1], [1]], after=NO_WAIT)
        monkeypatch.undo()
        assert made.cache.lookup([b"a"]) == 0
        made.cache.check()
        made.cache_engine.drain(10)
        made.cache.check()
        whole(made.cache_engine)
        made.cache.store([b"a", b"b", b"c"], [[1, 2, 3], [1, 2, 3]]).wait(10)
        made.cache.check()
        assert made.cache.lookup([b"a", b"b", b"c"]) == 3

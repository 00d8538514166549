"""An exception between the submissions of two devices: the job fails when what was submitted has ended, no earlier."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
from interrupts import Appends, Inside, Methods, interrupt_at
from sharding import Machine, machine

from kvoffload import NO_WAIT, BlockCache, CapacityError, TransferError, TransferResult
from kvoffload.engine.shard import Shard

COUNTS = (2, 3)


BEFORE_A_LAUNCH = Methods(Shard.enqueue)
SHARDED = Inside("kvoffload/engine/sharded.py")


@pytest.mark.parametrize("launched", range(len(COUNTS)))
def test_an_interrupt_before_a_device_is_launched_fails_the_job(launched: int) -> None:
    with machine(COUNTS) as made:
        streams = made.one_each()
        made.hold(0, streams[0])
        assert interrupt_at(
            launched + 1, lambda: made.engine.store([2], [2], after=streams), points=BEFORE_A_LAUNCH
        ).raised
        made.settle()
        made.engine.advance()
        jobs = made.engine.jobs_in_flight()
        assert len(jobs) == launched, "with one device launched, its transfer is in flight"
        assert all(job.error is not None and not job.finished for job in jobs)
        for gate in made.gates:
            gate.open()
        made.engine.drain(5)
        errors = [str(result.error) for result in made.engine.poll()]
        assert len(errors) == 1
        assert "its submission was interrupted" in errors[0]
        mirrors = made.mirrors()
        made.engine.store([2], [2], after=NO_WAIT).wait(10)
        mirrors.expect("store", [2], [2])
        mirrors.check()
        made.whole()


@pytest.mark.parametrize("launched", range(len(COUNTS)))
def test_an_interrupted_store_of_a_cache_keeps_its_slots_until_all_devices_have_ended(launched: int) -> None:
    with machine(COUNTS, num_slots=4) as made:
        cache = BlockCache(made.engine, policy="lru")
        streams = made.one_each()
        cache.store([b"0"], [0], after=streams).wait(10)
        made.hold(0, streams[0])
        assert interrupt_at(
            launched + 1, lambda: cache.store([b"2"], [2], after=streams), points=BEFORE_A_LAUNCH
        ).raised
        made.settle()
        assert cache.lookup([b"2"]) == 0
        if launched:  # the first device may still write the slot
            assert made.engine.in_flight == 1
            with pytest.raises(CapacityError):
                cache.store([b"3", b"4", b"5", b"6"], [3, 4, 5, 6], after=NO_WAIT, all_or_nothing=True)
        for gate in made.gates:
            gate.open()
        made.engine.drain(5)
        cache.check()
        cache.store([b"3", b"4", b"5", b"6"], [3, 4, 5, 6], after=NO_WAIT, all_or_nothing=True).wait(10)
        assert cache.lookup([b"3", b"4", b"5", b"6"]) == 4


def test_a_job_that_was_waited_for_is_not_reported_also_if_it_ended_before_an_earlier_one() -> None:
    with machine(COUNTS) as made:
        streams = made.one_each()
        gate = made.hold(0, streams[0])
        first = made.engine.store([1], [1], after=streams)
        assert interrupt_at(1, lambda: made.engine.store([2], [2], after=NO_WAIT), points=BEFORE_A_LAUNCH).raised
        _, second = made.engine.jobs_in_flight()
        with pytest.raises(TransferError, match="interrupted"):
            second.wait(5)
        assert not first.done
        gate.open()
        made.engine.drain(5)
        assert [result.job_id for result in made.engine.poll()] == [first.id]
        assert made.engine.statistics().store.failed == 1
        made.whole()


@pytest.mark.parametrize("call", ["load", "poll"])
def test_urgent_loads_are_reported_once_after_an_interrupt(call: str) -> None:
    for number in itertools.count(1):
        with machine(COUNTS, most_queued_bytes=1) as made:
            streams = made.one_each()
            for device, stream in enumerate(streams):
                made.hold(device, stream)

            def load(block: int, made: Machine = made, after: Any = NO_WAIT, **options: Any) -> None:
                made.engine.load([block], [block], after=after, **options)

            load(0, after=streams)
            load(1)
            load(2, urgent=True)
            seen: list[TransferResult] = []

            def poll(made: Machine = made, seen: list[TransferResult] = seen) -> None:
                seen.extend(made.engine.poll())

            if call == "load":
                outcome = interrupt_at(number, partial(load, 3, urgent=True), points=SHARDED)
            load(4)
            for gate in made.gates:
                gate.open()
            if call == "poll":
                for _ in range(3):  # the engine queues one load of a device at a time
                    made.settle()
                    made.engine.advance()
                made.settle()
                outcome = interrupt_at(number, poll, points=SHARDED)
            made.engine.drain(5)
            poll()
            ids = [result.job_id for result in seen]
            totals = made.engine.statistics().load
            assert sorted(ids) == sorted(set(ids)), outcome.point
            assert totals.jobs == made.engine.submitted, outcome.point
            if call == "load":  # results that an interrupted `poll` had taken are lost
                assert len(ids) == made.engine.submitted, outcome.point
                assert totals.failed == sum(result.error is not None for result in seen)
            made.whole()
        if outcome.point is None:
            break
    assert number > len(COUNTS)


def test_an_interrupted_job_leaves_its_number_to_no_later_one() -> None:
    """Else the later job would count as the one that was interrupted, and never be reported."""
    with machine(COUNTS) as made:
        for interrupted in itertools.count(1):
            outcome = interrupt_at(interrupted, lambda: made.engine.store([2], [2], after=NO_WAIT), points=Appends())
            made.engine.drain(5)
            made.engine.poll()
            later = made.engine.store([3], [3], after=NO_WAIT)
            made.engine.drain(5)
            assert [result.job_id for result in made.engine.poll()] == [later.id], outcome.point
            assert made.engine.submitted == made.engine.statistics().store.jobs
            if outcome.point is None:
                break
        assert interrupted > len(COUNTS)
        made.whole()

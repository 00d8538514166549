"""The state table of jobs, their results, and waiting."""

from __future__ import annotations

import itertools
import math
import time

import pytest
from helpers import LEVELS, rig, simulated

from kvoffload import NO_WAIT, Direction, TransferError
from kvoffload.engine.job import (
    FINAL,
    TRANSITIONS,
    Job,
    SimulatedTransferResult,
    State,
    Step,
    TransferResult,
    wait_until,
)


class _Device:
    simulated = True


class _Engine:
    device = _Device()


def made(state: State = State.NEW) -> Job:
    job = Job(_Engine(), 7, Direction.STORE, 64)  # type: ignore[arg-type]
    job.state = state
    return job


@pytest.mark.parametrize(("state", "step"), list(itertools.product(State, Step)))
def test_every_step_from_every_state(state: State, step: Step) -> None:
    """A legal step moves the job; an illegal one raises and changes nothing."""
    job = made(state)
    following = TRANSITIONS.get((state, step))
    if following is None:
        with pytest.raises(AssertionError, match="job 7"):
            job.step(step)
        assert job.state is state
    else:
        job.step(step)
        assert job.state is following


def test_final_states_are_final_and_all_states_can_be_reached() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] in FINAL]
    assert {State.NEW, *TRANSITIONS.values()} == set(State)
    in_flight = set(State) - FINAL - {State.NEW}
    assert all((state, Step.LOST) in TRANSITIONS for state in in_flight), "a context can be lost at any time"


def test_the_first_error_is_the_one_that_is_kept() -> None:
    job = made()
    first, second = RuntimeError("first"), RuntimeError("second")
    job.step(Step.SUBMITTED)
    job.fail(first)
    assert isinstance(job.error, TransferError)
    assert "first" in str(job.error)
    assert job.error.__cause__ is first
    assert not job.finished
    job.lose(second)
    assert job.finished
    assert job.outcome().error is job.error
    assert job.error.__cause__ is first


def test_wait_until_waits_as_long_as_it_takes_and_no_longer() -> None:
    ready = time.perf_counter() + 0.03
    wait_until(lambda: time.perf_counter() >= ready, None, "this")
    assert time.perf_counter() - ready < 1
    with pytest.raises(TimeoutError, match=r"that was not done within 0\.01 seconds; it goes on"):
        wait_until(lambda: False, 0.01, "that")
    wait_until(lambda: True, 0, "done already")


@pytest.mark.parametrize("level", LEVELS)
def test_what_a_job_says_of_itself(level: str) -> None:
    with simulated(1, level) as device, rig(device) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        job = bench.engine.store([1, 2], [1, 2], after=held)
        assert repr(job) == f"Job({job.id}, store, 512 bytes, strided, running)"
        assert job.reason.startswith("strided: ")
        assert f" {'loop' if level == 'no-batch' else 'batch'} " in job.reason, "what else it might have been"
        gate.open()
        result = job.wait(10)
        assert (result.job_id, result.direction, result.nbytes, result.copier) == (job.id, "store", 512, "strided")
        assert result.error is None
        assert 0 <= result.seconds < 1
        assert isinstance(result, SimulatedTransferResult)
        assert len(result) == 6
        assert repr(result).startswith("SimulatedTransferResult(")
        assert repr(job).endswith("done)")
        later = bench.engine.load([1], [1], after=NO_WAIT)
        assert later.id > job.id
        assert later.wait(10).direction is Direction.LOAD


def test_a_result_of_a_gpu_does_not_say_that_it_is_simulated() -> None:
    job = made(State.DONE)
    job._simulated = False
    assert type(job.outcome()) is TransferResult
    assert job.outcome() == (7, "store", 64, 0.0, "none", None)


def test_seconds_leave_out_what_a_transfer_waited_for() -> None:
    """The clock of the simulated device goes by work done: a long copy of the caller's comes before the start."""
    with simulated(1) as device, rig(device) as bench:
        stream = bench.stream()
        for _ in range(200):
            bench.fill(stream, 3)
        long_wait = bench.engine.store([1], [1], after=stream).wait(10).seconds
        assert long_wait < 100e-6


def test_seconds_are_nan_when_the_clock_cannot_be_read() -> None:
    with simulated(1) as device, rig(device) as bench:
        assert device.simulator is not None
        device.simulator.faults.fail_call("cuEventElapsedTime")
        result = bench.engine.store([1], [1]).wait(10)
        assert math.isnan(result.seconds)
        assert result.error is None
        assert (bench.slot(1) == 2).all()
        assert bench.engine.statistics().store.seconds == 0

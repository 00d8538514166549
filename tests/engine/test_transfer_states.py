"""The state table of transfers, their results, and waiting."""

from __future__ import annotations

import itertools
import math

import pytest
from helpers import rig, simulated

import kvoffload
from kvoffload import Direction, TransferError
from kvoffload.engine.job import TRANSITIONS, Event, State, Transfer, TransferResult, result_of
from kvoffload.internal.waiting import wait_until


def made(state: State = State.NEW) -> Transfer:
    transfer = Transfer(7, Direction.STORE, 64, 1)
    transfer.state = state
    return transfer


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_event_in_every_state(state: State, event: Event) -> None:
    """A legal event moves the transfer; an illegal one raises and changes nothing."""
    transfer = made(state)
    following = TRANSITIONS[state].get(event)
    if following is None:
        with pytest.raises(AssertionError, match="transfer 7"):
            transfer.step(event)
        assert transfer.state is state
    else:
        transfer.step(event)
        assert transfer.state is following


def test_final_states_are_final_and_all_states_can_be_reached() -> None:
    final = {state for state in State if made(state).finished}
    assert final == {State.DONE, State.FAILED}
    assert not any(TRANSITIONS[state] for state in final)
    assert {State.NEW, *(each for events in TRANSITIONS.values() for each in events.values())} == set(State)
    in_flight = set(State) - final - {State.NEW}
    assert all(Event.LOST in TRANSITIONS[state] for state in in_flight), "a context can be lost at any time"


def test_the_first_error_is_the_one_that_is_kept() -> None:
    transfer = made()
    first, second = RuntimeError("first"), RuntimeError("second")
    transfer.step(Event.SUBMITTED)
    transfer.fail(first)
    assert isinstance(transfer.error, TransferError)
    assert "first" in str(transfer.error)
    assert transfer.error.__cause__ is first
    assert not transfer.finished
    transfer.mark_lost(second)
    assert transfer.finished
    assert result_of(transfer).error is transfer.error
    assert transfer.error.__cause__ is first


def test_an_outcome_before_the_end_is_refused(device: kvoffload.Device) -> None:
    with rig(device) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        job = bench.engine.store([1], [1], after=held)
        with pytest.raises(
            RuntimeError, match=r"Job\(1, store, .*\) has not ended; call wait\(\), or ask done, before"
        ):
            job.outcome()
        gate.open()
        bench.engine.drain(10)
        assert (job.outcome().job_id, job.outcome().error) == (job.id, None)
        device.simulator.faults.fail_call("cuMemcpy3DBatchAsync")
        failed = bench.engine.store([1], [1])
        bench.engine.drain(10)
        assert failed.outcome().error is not None, "outcome() returns what wait() raises"


def test_wait_until_waits_as_long_as_it_takes_and_no_longer() -> None:
    answers = iter([False] * 20 + [True])
    wait_until(lambda: next(answers), None, "this")
    assert list(answers) == [], "asked until it was so"
    with pytest.raises(TimeoutError, match=r"that: not done within 0\.01 seconds; still going on"):
        wait_until(lambda: False, 0.01, "that")
    wait_until(lambda: True, 0, "done already")


def test_a_result_of_a_gpu_does_not_say_that_it_is_simulated() -> None:
    transfer = made(State.DONE)
    assert type(result_of(transfer)) is TransferResult
    assert result_of(transfer) == (7, "store", 64, 0.0, "none", None, frozenset())


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

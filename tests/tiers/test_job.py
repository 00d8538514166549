"""TierJob: who may set an outcome when, and that whatever happens in between a job ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvoffload.tiers import Outcome, TierJob

DONE, CANCELLED, EXPIRED = Outcome.DONE, Outcome.CANCELLED, Outcome.EXPIRED


def test_outcomes_in_the_order_of_the_keys() -> None:
    job = TierJob([b"a", b"b"], [3, 4])
    assert (job.keys, job.entries, job.outcomes, job.done) == ((b"a", b"b"), (3, 4), [None, None], False)
    for position, outcome in ((1, Outcome.MISSING), (0, DONE)):
        assert job.begin([position]) == [position]
        assert job.begin([position]) == []
        job.settle([position], [outcome])
    assert job.done
    assert job.wait(1) == [DONE, Outcome.MISSING]
    assert repr(job) == "TierJob(2 keys, 2 ended)"


@pytest.mark.parametrize("outcomes", [[DONE], [DONE, DONE, DONE]])
def test_outcomes_are_one_for_each_position(outcomes: list[Outcome]) -> None:
    job = TierJob([b"a", b"b"])
    job.begin([0, 1])
    with pytest.raises(ValueError, match="one for each of 2 positions"):
        job.settle([0, 1], outcomes)
    assert job.outcomes == [None, None]


def test_cancel_leaves_what_has_begun() -> None:
    job = TierJob([b"a", b"b"])
    job.begin([0])
    job.cancel()
    assert job.outcomes == [None, CANCELLED]
    assert job.cancelled
    assert job.begin([1]) == []
    job.settle([0], [DONE])
    assert job.wait(1) == [DONE, CANCELLED]


def test_what_has_not_begun_by_the_deadline_expires() -> None:
    job = TierJob([b"a", b"b", b"c"], deadline=time.monotonic() + 3600)
    assert job.begin([0]) == [0]
    job.deadline = time.monotonic()
    assert job.begin([1]) == []
    assert job.outcomes == [None, EXPIRED, EXPIRED]
    late = TierJob([b"a"], deadline=time.monotonic() - 1)
    late.cancel()
    assert late.outcomes == [EXPIRED]


def test_several_keys_begin_and_end_together() -> None:
    counted: list[Sequence[Outcome]] = []
    told: list[list[Outcome | None]] = []
    job = TierJob([b"a", b"b", b"c"], notify=lambda: told.append(list(job.outcomes)), count=counted.append)
    assert job.begin([1]) == [1]
    assert job.begin(range(3)) == [0, 2]
    wrong: list[Any] = [None, "done", True]
    for outcome in wrong:
        with pytest.raises(TypeError, match="must be an Outcome"):
            job.settle([0, 2], [DONE, outcome])
    job.settle([0], [DONE])
    with pytest.raises(RuntimeError, match=r"keys\[0\] is .*: an outcome is set once"):
        job.settle([2, 0], [DONE, DONE])
    assert job.outcomes == [DONE, None, None]
    job.settle([1, 2], [Outcome.MISSING, DONE])
    assert counted == [[DONE], [Outcome.MISSING, DONE]]
    assert told == [[DONE, None, None], [DONE, Outcome.MISSING, DONE]]


def test_some_of_the_waiting_keys() -> None:
    counted: list[Sequence[Outcome]] = []
    job = TierJob([b"a", b"b", b"c"], count=counted.append)
    job.begin([1])
    assert job.settle_waiting(Outcome.DECLINED, range(1, 3)) is job
    assert job.outcomes == [None, None, Outcome.DECLINED]
    job.cancel()
    job.cancel()
    job.settle([1], [DONE])
    assert counted == [[Outcome.DECLINED], [CANCELLED], [DONE]]


def test_an_end_that_raises_does_not_keep_notify_from_being_called() -> None:
    called = []
    job = TierJob([b"a"], notify=lambda: called.append(1), ended=lambda _: 1 // 0)  # type: ignore[arg-type]
    assert job.begin([0]) == [0]
    job.settle([0], [Outcome.DONE])
    assert called == [1]


def test_what_notify_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def notify() -> None:
        raise ValueError("of the caller's")

    job = TierJob([b"a", b"b"], notify=notify)
    job.begin([0])
    job.settle([0], [DONE])
    job.cancel()
    assert job.wait(1) == [DONE, CANCELLED]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


def test_an_interrupt_while_outcomes_are_set_loses_none() -> None:
    """Whether a job has ended is read from its outcomes; there is no counter that could be wrong for ever."""

    class Interrupted(list[Any]):
        def __setitem__(self, at: Any, value: Any) -> None:
            super().__setitem__(at, value)
            if at == 1 and interrupts:
                raise interrupts.pop()

    interrupts = [KeyboardInterrupt()]
    job = TierJob([b"a", b"b", b"c"])
    job.outcomes = Interrupted(job.outcomes)
    with pytest.raises(KeyboardInterrupt):
        job.cancel()
    assert not job.done
    job.cancel()
    assert job.wait(1) == [CANCELLED] * 3


def test_wait_has_a_timeout() -> None:
    job = TierJob([b"a"])
    with pytest.raises(TimeoutError, match="1 keys"):
        job.wait(0.01)


def test_one_of_many_threads_begins_a_key() -> None:
    """And none that one has begun is cancelled."""

    def at_once(barrier: threading.Barrier, call: Callable[..., Any], *arguments: Any) -> Any:
        barrier.wait(10)
        return call(*arguments)

    with ThreadPoolExecutor(3) as threads:
        for _ in range(200):
            job, barrier = TierJob([b"a"]), threading.Barrier(3)
            begins = [threads.submit(at_once, barrier, job.begin, [0]) for _ in range(2)]
            threads.submit(at_once, barrier, job.cancel).result(10)
            begun = [at for begin in begins for at in begin.result(10)]
            assert len(begun) + (job.outcomes == [CANCELLED]) == 1

"""ThreadedTier: its threads survive everything, its queues are fair, removals are final, closing ends every job."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from interrupts import interrupt_in_line
from programs import run_program
from tier_classes import SECONDS, DictTier, GatedTier, Rows, attached

from kvoffload.errors import ClosedError, LayoutError
from kvoffload.internal.waiting import wait_until
from kvoffload.testing import FaultyTier
from kvoffload.tiers import Origin, Outcome, TierJob
from kvoffload.tiers.workers import READS_PER_WRITE

DONE, FAILED, CANCELLED = Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED


def numbered(count: int, name: str = "k") -> list[bytes]:
    return [b"%s%d" % (name.encode(), number) for number in range(count)]


# threads survive ------------------------------------------------------------------------------------------------------


class Unreliable(DictTier):
    """Its methods return or raise what the key says."""

    results: dict[bytes, Any] = {  # noqa: RUF012
        b"none": None,
        b"text": "done",
        b"error": OSError("no medium"),
        b"exit": SystemExit(),
        b"interrupt": KeyboardInterrupt(),
    }

    def _result(self, key: bytes) -> Any:
        result = self.results[key]
        if isinstance(result, BaseException):
            raise result
        return result

    def read_record(self, key: bytes, rows: Rows) -> Any:
        return self._result(key) if key in self.results else super().read_record(key, rows)

    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Any:
        return self._result(key) if key in self.results else super().write_record(key, rows, origin)

    def remove_records(self, keys: Sequence[bytes]) -> Any:
        return self._result(keys[0]) if keys[0] in self.results else super().remove_records(keys)


@pytest.mark.parametrize("key", Unreliable.results)
def test_a_method_that_goes_wrong_fails_its_key_alone(key: bytes) -> None:
    tier = Unreliable(threads=1)
    with attached(tier):
        for call in (tier.put, tier.get):
            assert call([key, b"a"], [0, 1]).wait(SECONDS) == [FAILED, DONE]
        assert tier.remove([key]).wait(SECONDS) == [FAILED]
        assert tier.remove([b"a"]).wait(SECONDS) == [DONE]
        assert tier.statistics().failed == 3


def test_a_notify_function_that_raises_ends_no_thread() -> None:
    def notify() -> None:
        raise SystemExit

    tier = DictTier(threads=1)
    with attached(tier):
        assert tier.put([b"a"], [0], notify=notify).wait(SECONDS) == [DONE]
        assert tier.get([b"a"], [0], deadline=0.0, notify=notify).wait(SECONDS) == [Outcome.EXPIRED]
        assert tier.get([b"a"], [1]).wait(SECONDS) == [DONE]


def test_many_failures_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    tier = Unreliable(threads=1)
    with attached(tier):
        for _ in range(50):
            tier.get([b"error"], [0]).wait(SECONDS)
    assert [record.getMessage() for record in caplog.records] == ["tier dict: OSError: no medium; its keys are misses"]


def test_a_warning_has_the_reason_behind_a_long_address(caplog: pytest.LogCaptureFixture) -> None:
    reason = f"GET http://{'1' * 300}: refused"
    tier = Unreliable(threads=1)
    tier.results = {b"long": OSError(reason + "\n\nDebug source: ...")}
    with attached(tier):
        assert tier.get([b"long"], [0]).wait(SECONDS) == [FAILED]
    assert [record.getMessage() for record in caplog.records] == [f"tier dict: OSError: {reason}; its keys are misses"]


# fairness -------------------------------------------------------------------------------------------------------------


def begin_one(tier: GatedTier, key: bytes = b"first") -> TierJob:
    """A write that has begun and waits for a permit."""
    job = tier.put([key], [63])
    wait_until(lambda: ("write", key) in tier.begun, SECONDS, "the first write")
    return job


def test_reads_come_before_writes_and_steady_ones_do_not_starve_them() -> None:
    tier = GatedTier()
    with attached(tier):
        begin_one(tier)
        write = tier.put([b"w"], [1])
        reads = [tier.get([key], [0]) for key in numbered(200, "free")]
        tier.permit()
        write.wait(SECONDS)
        assert tier.begun.index(("write", b"w")) == 1 + READS_PER_WRITE
        for job in reads:
            job.wait(SECONDS)


def test_a_clear_is_not_declined_by_a_full_queue() -> None:
    tier = GatedTier(max_queued=2)
    with attached(tier):
        begin_one(tier)
        full = tier.get(numbered(4), [0, 1, 2, 3])
        assert full.outcomes[2:] == [Outcome.DECLINED] * 2
        clear = tier.clear()
        tier.permit()
        assert clear.wait(SECONDS) == [DONE]
        assert tier.statistics().declined == 2


def test_writes_that_are_put_after_a_clear_wait_for_it() -> None:
    """Steady writes would starve it."""
    tier = GatedTier(threads=3)
    with attached(tier):
        begin_one(tier)
        clear = tier.clear()
        after = tier.put([b"after"], [1])
        tier.permit()
        assert (clear.wait(SECONDS), after.wait(SECONDS)) == ([DONE], [DONE])
        assert tier.begun == [("write", b"first"), ("clear", b""), ("write", b"after")]
        assert tier.contains([b"first", b"after"]) == [False, True]


def test_a_write_that_is_put_after_a_removal_of_its_key_comes_after_it() -> None:
    tier = GatedTier(threads=3)
    with attached(tier) as memory:
        memory.fill(0, 10)
        memory.fill(1, 11)
        first = tier.put([b"a"], [0])
        wait_until(lambda: len(tier.begun) == 1, SECONDS, "the first write")
        removal, second, other = tier.remove([b"a"]), tier.put([b"a"], [1]), tier.put([b"free"], [2])
        assert other.wait(SECONDS) == [DONE]
        tier.permit(1)
        assert first.wait(SECONDS) == [DONE]
        wait_until(lambda: ("remove", b"a") in tier.begun, SECONDS, "the removal")
        assert tier.begun[2:] == [("remove", b"a")]
        tier.permit()
        assert (removal.wait(SECONDS), second.wait(SECONDS)) == ([DONE], [DONE])
        tier.get([b"a"], [2]).wait(SECONDS)
        assert memory.version(2) == 11


def test_a_removal_that_is_cancelled_holds_up_no_write() -> None:
    tier = GatedTier(threads=2)
    with attached(tier):
        begin_one(tier)
        clear, after = tier.clear(), tier.put([b"free"], [1])
        tier.exists([b"x"]).wait(SECONDS)
        time.sleep(0.05)  # so that the second thread waits for something to do
        clear.cancel()
        assert after.wait(SECONDS) == [DONE]


def test_what_a_removal_has_held_up_is_for_all_threads() -> None:
    """The first of these writes hangs, and there are two threads without work."""
    tier = GatedTier(threads=3)
    with attached(tier):
        begin_one(tier)
        tier.clear()
        tier.put([b"hangs"], [1])
        after = tier.put([b"free1", b"free2"], [2, 3])
        time.sleep(0.05)  # so that the other threads wait for something to do
        tier.permit(2)
        assert after.wait(SECONDS) == [DONE, DONE]
        assert ("write", b"hangs") in tier.begun


def test_two_writes_of_a_key_are_one_after_the_other() -> None:
    tier = GatedTier(threads=3)
    with attached(tier):
        begin_one(tier)
        again, other = tier.put([b"first"], [1]), tier.put([b"free"], [2])
        assert other.wait(SECONDS) == [DONE]
        assert tier.begun == [("write", b"first"), ("write", b"free")]
        tier.permit()
        assert again.wait(SECONDS) == [DONE]


def test_a_write_is_found_after_many_others_were_queued() -> None:
    """What the queue remembers of keys is bounded, and has all that wait."""
    tier = GatedTier(threads=2)
    with attached(tier, entries=1000):
        tier.put([b"first"], [0])
        wait_until(lambda: len(tier.begun) == 1, SECONDS, "the first write")
        waiting = tier.put([b"first"], [1])
        for start in range(0, 10_000, 500):
            keys = [b"free%d" % number for number in range(start, start + 500)]
            assert set(tier.put(keys, range(2, 502)).wait(SECONDS)) == {DONE}
        removal = tier.remove([b"first"])
        assert waiting.outcomes == [CANCELLED]
        tier.permit()
        assert removal.wait(SECONDS) == [DONE]


# queues and counts ----------------------------------------------------------------------------------------------------


def test_cancelled_keys_make_room_in_a_full_queue() -> None:
    tier = GatedTier(max_queued=4)
    with attached(tier):
        begin_one(tier)
        for kind in (tier.put, tier.get):
            waiting = kind(numbered(4), [0, 1, 2, 3])
            assert kind([b"more"], [4]).outcomes == [Outcome.DECLINED]
            waiting.cancel()
            assert kind([b"more"], [4]).outcomes == [None]


def test_every_outcome_is_counted_when_it_is_set() -> None:
    tier = GatedTier(max_queued=4)
    with attached(tier):
        begin_one(tier)
        tier.get(numbered(3), [0, 1, 2]).cancel()
        assert tier.statistics().cancelled == 3
        tier.put(numbered(4), [0, 1, 2, 3], deadline=0.0)
        statistics = tier.statistics()
        assert (statistics.queued_writes, statistics.queued_reads, statistics.in_calls) == (4, 0, 1)
        tier.permit()
        assert tier.drain(SECONDS)
        assert tier.statistics().expired == 4
        assert tier.get([b"first"], [0]).wait(SECONDS) == [DONE]
    assert tier.statistics().cancelled == 3


def test_a_key_that_has_ended_is_in_no_call() -> None:
    tier = DictTier(threads=1)
    with attached(tier):
        seen: list[int] = []
        for _ in range(100):
            tier.put([b"a"], [0], notify=lambda: seen.append(tier.statistics().in_calls)).wait(SECONDS)
        assert tier.drain(SECONDS)
    assert seen == [0] * 100


def is_waiting(thread: threading.Thread) -> bool:
    """Whether a thread is within `wait_until`."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not wait_until.__code__:
        frame = frame.f_back
    return frame is not None


def test_drain_waits_for_what_was_put_before_alone() -> None:
    """Else it would not return as long as others put more."""
    tier = GatedTier(threads=2)
    later: list[TierJob] = []
    drained: list[bool] = []
    with attached(tier):
        tier.put([b"first"], [0], notify=lambda: later.append(tier.put([b"later"], [1])))
        thread = threading.Thread(target=lambda: drained.append(tier.drain(5.0)))
        thread.start()
        wait_until(lambda: is_waiting(thread), SECONDS, "drain")
        tier.permit(1)
        thread.join(SECONDS)
        assert drained == [True]
        assert later[0].outcomes == [None]


def test_drain_has_a_timeout() -> None:
    tier = GatedTier()
    with attached(tier):
        begin_one(tier)
        assert tier.drain(0.01) is False
        tier.permit()
        assert tier.drain(SECONDS) is True


# the life of a tier ---------------------------------------------------------------------------------------------------


def test_close_with_a_call_that_hangs() -> None:
    """It says so; what waits is cancelled at once; and once the call has returned, all is closed."""
    tier = GatedTier()
    with attached(tier) as memory:
        memory.fill(63, 5)
        hung = begin_one(tier)
        waiting = [tier.put([b"a"], [0]), tier.get([b"b"], [1]), tier.remove([b"c"]), tier.clear(), tier.exists([b"d"])]
        assert tier.close(0.01) is False
        assert [job.wait(SECONDS) for job in waiting] == [[CANCELLED]] * 5
        assert (hung.outcomes, tier.released) == ([None], 0)
        tier.permit()
        assert hung.wait(SECONDS) == [DONE]
        assert tier.close(SECONDS) is True
        assert tier.released == 1
    assert tier.close() is True
    assert tier.released == 1
    assert tier.statistics().cancelled == 5


def test_a_thread_of_the_tier_may_close_it() -> None:
    closed: list[bool] = []
    tier = DictTier(threads=1)
    with attached(tier):
        tier.put([b"a"], [0], notify=lambda: closed.append(tier.close(0.0)))
        wait_until(lambda: bool(closed), SECONDS, "close")
        assert closed == [False]
        assert tier.close(SECONDS) is True


def test_contains_raises_nothing() -> None:
    class Raises(DictTier):
        def has_record(self, key: bytes) -> bool:
            if key == b"a":
                raise OSError(key)
            return super().has_record(key)

    tier = Raises()
    with attached(tier):
        tier.put([b"a", b"b"], [0, 1]).wait(SECONDS)
        assert tier.contains([b"a", b"b"]) == [False, True]
        assert tier.exists([b"a", b"b"]).wait(SECONDS) == [FAILED, DONE]


def test_a_wrong_number_of_answers_says_nothing_of_any_key() -> None:
    class Forgetful(DictTier):
        def have_records(self, keys: Sequence[bytes]) -> Sequence[bool]:
            return [True] * (len(keys) - 1)

    tier = Forgetful()
    with attached(tier):
        assert tier.contains([b"a", b"b", b"c"]) == [False] * 3
        assert tier.exists([b"a", b"b"]).wait(SECONDS) == [FAILED, FAILED]


def test_a_pool_may_be_given_again_if_start_has_failed() -> None:
    class Refuses(DictTier):
        refuse = True

        def start(self, layout: bytes | None) -> None:
            if self.refuse:
                raise LayoutError("another layout")
            super().start(layout)

    tier = Refuses()
    with pytest.raises(LayoutError, match="another layout"), attached(tier):
        pass
    assert (tier.pools, tier.record_bytes) == ((), 0)
    with pytest.raises(ClosedError, match="has no pool yet"):
        tier.put([b"a"], [0])
    tier.refuse = False
    with attached(tier):
        assert tier.put([b"a"], [0]).wait(SECONDS) == [DONE]
    assert tier.released == 1


def test_too_few_threads_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    tier = DictTier(threads=4)
    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(RuntimeError, match="can't start"), attached(tier):
        pass
    assert tier.released == 1
    assert not any(thread.is_alive() for thread in started)
    with pytest.raises(ClosedError, match="is closed"):
        tier.put([b"a"], [0])


class OverAnother(DictTier):
    """A user's tier whose records are another tier's: its methods wait for that one's jobs, and `release` closes it."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.closed = DictTier(), False

    def start(self, layout: bytes | None) -> None:
        self.below.attach(self.pools, layout)

    def has_record(self, key: bytes) -> bool:
        return self.below.exists([key]).wait(SECONDS) == [DONE]

    def flush(self) -> None:
        assert self.below.drain(SECONDS)

    def release(self) -> None:
        self.closed = self.below.close(SECONDS)


@pytest.mark.parametrize("faulty", [False, True])
def test_a_tier_may_wait_for_another_one_and_close_it(*, faulty: bool) -> None:
    below = OverAnother()
    tier = FaultyTier(inner=below) if faulty else below
    with attached(tier):
        assert below.below.put([b"a"], [0]).wait(SECONDS) == [DONE]
        assert tier.exists([b"a"]).wait(SECONDS) == [DONE]
        assert tier.drain(SECONDS)
    assert below.closed


def test_a_finalizer_in_a_thread_that_begins_may_ask_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Thread.start` waits for the new thread, which a collection in its first lines holds up."""
    tier, known, answers = DictTier(threads=2), {threading.get_ident()}, list[int | None]()
    begun = threading.Event.set

    def ask_before(event: threading.Event) -> None:
        if threading.get_ident() not in known:
            known.add(threading.get_ident())
            answers.append(tier.statistics().queued_reads)
        begun(event)

    def attach() -> None:
        with attached(tier):
            assert tier.put([b"a"], [0]).wait(SECONDS) == [DONE]

    monkeypatch.setattr(threading.Event, "set", ask_before)
    caller = threading.Thread(target=attach, daemon=True)
    caller.start()
    caller.join(5)
    assert not caller.is_alive()
    assert len(answers) == 3


def test_a_tier_that_is_closed_while_it_starts_is_released() -> None:
    class Closed(DictTier):
        def start(self, layout: bytes | None) -> None:
            super().start(layout)
            assert self.close(SECONDS) is True
            assert self.released == 0

    tier = Closed()
    with pytest.raises(ClosedError, match="was closed"), attached(tier):
        pass
    assert tier.released == 1


def test_an_interrupt_of_put_leaves_nothing_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller has no job to cancel."""
    settle_waiting = TierJob.settle_waiting
    interrupts = [KeyboardInterrupt()]

    def interrupted(job: TierJob, *arguments: Any) -> TierJob:
        if interrupts:
            raise interrupts.pop()
        return settle_waiting(job, *arguments)

    tier = GatedTier(max_queued=2)
    with attached(tier):
        begin_one(tier)
        monkeypatch.setattr(TierJob, "settle_waiting", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tier.put(numbered(3), [0, 1, 2])
        tier.permit()
        assert tier.drain(SECONDS)
        assert tier.begun == [("write", b"first")]


FORK = """
import os, signal, sys, threading, warnings
from programs import run_program
from tier_classes import DictTier, attached
from kvoffload.errors import ClosedError
tier = DictTier()
held, free = threading.Event(), threading.Event()
def hold():  # a notify function runs in a thread of the tier; statistics and calls need the lock that it may hold
    held.set()
    free.wait(30)
with attached(tier):
    job = tier.put([b"a"], [0], notify=hold)
    held.wait(30)
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork of a process with threads
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        calls = dict(
            put=lambda: tier.put([b"a"], [0]), get=lambda: tier.get([b"a"], [0]), exists=lambda: tier.exists([b"a"]),
            remove=lambda: tier.remove([b"a"]), clear=tier.clear, drain=lambda: tier.drain(1),
            statistics=tier.statistics, contains=lambda: tier.contains([b"a"]), close=tier.close,
            repr=lambda: repr(tier),
        )
        returned = []
        for name, call in calls.items():
            try:
                returned.append((name, call()))
            except ClosedError as error:
                assert "fork" in str(error), (name, error)
        print(returned, tier.released, flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    free.set()
    print(status, tier.get([b"a"], [0]).wait(30), flush=True)
"""


def test_a_forked_child_is_refused() -> None:
    assert run_program(FORK).splitlines() == [
        "[('contains', [False]), ('close', True), ('repr', \"DictTier('dict')\")] 0",
        "0 [<Outcome.DONE: 'done'>]",
    ]


def test_after_ctrl_c_in_close_a_call_that_runs_is_still_awaited() -> None:
    """What it writes must not get to a file that has taken a closed one's descriptor, or to memory of somebody else."""
    out = run_program(
        """
import os, signal, threading
from tier_classes import GatedTier, attached
from kvoffload.internal.waiting import wait_until
from kvoffload.testing import FaultyTier
tier = GatedTier(threads=2)
with attached(tier, 4):
    job = tier.put([b"key"], [0])
    wait_until(lambda: tier.begun, 30, "the write")
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        tier.close(30)
    except KeyboardInterrupt:
        print("interrupted")
    print(tier.close(0), tier.released, job.outcomes)
    tier.permit()
    print(tier.close(30), tier.released, job.outcomes[0].value)
"""
    )
    assert out.splitlines() == ["interrupted", "False 0 [None]", "True 1 done"]


@pytest.mark.parametrize("line", range(1, 11))
def test_an_interrupt_while_a_thread_is_woken_loses_no_later_work(line: int) -> None:
    """`Condition.notify` may leave a waiter behind that has gone, and the next call then wakes that one alone."""
    tier = DictTier(threads=1)
    with attached(tier, 4):
        assert tier.put([b"before"], [0]).wait(SECONDS) == [DONE]
        time.sleep(0.02)
        interrupt_in_line("notify", line, lambda: tier.put([b"interrupted"], [0]))
        time.sleep(0.02)  # until the thread waits again, else it finds the work without being woken
        assert tier.put([b"after"], [1]).wait(SECONDS) == [DONE]

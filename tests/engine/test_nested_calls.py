"""Calls inside calls, of a thread that holds the lock: each answers from the truth, is put off, or is refused.

Where a signal handler or a finalizer can make them, at every point, says `test_interrupts_everywhere.py`. Here is what
each of them does there.
"""

from __future__ import annotations

import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from helpers import Rig, keys, rig, settled, simulated
from interrupts import call_at
from sharding import machine
from tiering import keys as tier_keys
from tiering import tiered

import kvoffload
from kvoffload import NO_WAIT, BlockCache, CacheIndex, DriverError, Job, Status
from kvoffload.cache.policies.lru import LRU

REFUSED = "in the middle of another call"
SECONDS = 10.0
Call = Callable[[], object]


@contextmanager
def each_refused(lock: threading.RLock, calls: dict[str, Call]) -> Iterator[None]:
    """In a call that holds `lock`, each of these is refused."""
    with lock:
        answered = [name for name, call in calls.items() if not _is_refused(call)]
    assert not answered, "in a call that holds the lock"
    yield


def _is_refused(call: Call) -> bool:
    try:
        call()
    except RuntimeError as error:
        return REFUSED in str(error)
    return False


@pytest.fixture
def bench() -> Iterator[Rig]:
    with simulated() as device:
        yield from settled(device, num_blocks=32, num_slots=8)


def test_an_engine_refuses_what_changes_or_waits(bench: Rig) -> None:
    engine, stream = bench.engine, bench.stream()
    job = engine.store([1], [1], after=NO_WAIT)
    before = engine.submitted
    calls: dict[str, Call] = {
        "store": lambda: engine.store([2], [2], after=NO_WAIT),
        "load": lambda: engine.load([1], [3], after=NO_WAIT),
        "submit": lambda: engine.submit("store", [2], [2], after=NO_WAIT),
        "store_groups": lambda: engine.store_groups([kvoffload.GroupTransfer(0, [2], [2])], after=NO_WAIT),
        "plan": lambda: engine.plan("store", [2], [2]),
        "wait": lambda: job.wait(SECONDS),
        "wait for ever": job.wait,
        "order_before": lambda: job.order_before(stream),
        "order_all_before": lambda: engine.order_all_before(stream),
        "drain": lambda: engine.drain(SECONDS),
        "close": engine.close,
        "close the device": bench.device.close,
        "allocate": lambda: bench.device.allocate(64),
        "a stream": bench.device.stream,
        "a cache": lambda: BlockCache(engine),
        "another engine": lambda: kvoffload.OffloadEngine(engine.layout, device=bench.device, num_slots=1),
    }
    with each_refused(engine.lock, calls):
        assert engine.submitted == before
        assert job.wait(SECONDS).error is None
        engine.store([2], [2], after=NO_WAIT).wait(SECONDS)


def test_an_engine_answers_from_what_is_known(bench: Rig) -> None:
    """The copy ends meanwhile: nobody asks the GPU, and nothing is reported."""
    engine = bench.engine
    job = engine.store([1], [1], after=NO_WAIT)
    bench.device.simulator.run_all()
    with engine.lock:
        assert (job.done, job.finished, engine.poll(), engine.in_flight) == (False, False, [], 1)
        assert engine.statistics().in_flight == 1
        engine.advance()
        assert not job.finished
    assert job.done
    assert [result.job_id for result in engine.poll()] == [job.id]


def test_several_devices_refuse_and_answer_alike() -> None:
    with machine() as made:
        engine = made.engine
        job = engine.store([1], [1], after=NO_WAIT)
        made.simulator.run_all()
        calls: dict[str, Call] = {
            "store": lambda: engine.store([2], [2], after=NO_WAIT),
            "load_groups": lambda: engine.load_groups([kvoffload.GroupTransfer(0, [2], [2])], after=NO_WAIT),
            "plan": lambda: engine.plan("store", [2], [2]),
            "resolve": lambda: engine.resolve([NO_WAIT, NO_WAIT]),
            "wait": lambda: job.wait(SECONDS),
            "order_before": lambda: job.order_before([1, 1]),
            "drain": lambda: engine.drain(SECONDS),
            "close": engine.close,
            "a cache": lambda: BlockCache(engine),
        }
        with engine.lock:
            assert (job.done, engine.poll(), engine.in_flight, engine.statistics().in_flight) == (False, [], 1, 1)
            assert len(engine.jobs_in_flight()) == engine.submitted == 1
        with each_refused(engine.lock, calls):
            assert job.wait(SECONDS).error is None


def test_a_cache_answers_by_the_bytes_that_are_there(bench: Rig) -> None:
    cache = BlockCache(bench.engine, policy="lru")
    cache.store(keys(0, 1), [0, 1], after=NO_WAIT).wait(SECONDS)
    held = bench.stream()
    bench.gate(held)
    cache.store(keys(2), [2], after=held)
    reservation = cache.reserve(keys(3))
    before = cache.statistics()
    with bench.engine.lock:
        assert cache.status(keys(0, 1, 2, 3, 4)) == [Status.HIT, Status.HIT, *[Status.PENDING] * 2, Status.MISS]
        assert cache.lookup(keys(0, 1, 2)) == 2
        assert cache.lookup_many([keys(1, 4), keys(2)]) == [1, 0]
        assert [cache.status_of(name) for name in keys(1, 2)] == [Status.HIT, Status.PENDING]
        assert (len(cache), cache.statistics()) == (4, before)
    assert cache.statistics().lookups == before.lookups, "none is counted"
    reservation.abort()


def test_a_cache_refuses_what_changes_or_waits(bench: Rig) -> None:
    cache = BlockCache(bench.engine, policy="lru")
    stored = cache.store(keys(0), [0], after=NO_WAIT)
    stored.wait(SECONDS)
    lease, reservation, request = cache.acquire(keys(0)), cache.reserve(keys(1)), cache.open_request()
    calls: dict[str, Call] = {
        "store": lambda: cache.store(keys(2), [2], after=NO_WAIT),
        "load": lambda: cache.load(keys(0), [3], after=NO_WAIT),
        "reserve": lambda: cache.reserve(keys(2)),
        "commit": reservation.commit,
        "acquire": lambda: cache.acquire(keys(0)),
        "touch": lambda: cache.touch(keys(0)),
        "remove": lambda: cache.remove(keys(0)),
        "clear": cache.clear,
        "open_request": cache.open_request,
        "end": request.end,
        "wait": lambda: stored.wait(SECONDS),
        "wait for a lease": lambda: lease.wait(SECONDS),
        "check": cache.check,
    }
    with each_refused(bench.engine.lock, calls):
        assert cache.status(keys(0, 1, 2)) == [Status.HIT, Status.PENDING, Status.MISS]
        cache.check()
    reservation.abort()
    lease.release()


def test_what_ends_a_handle_is_put_off(bench: Rig) -> None:
    cache = BlockCache(bench.engine, policy="lru")
    cache.store(keys(0, 1), [0, 1], after=NO_WAIT).wait(SECONDS)
    lease, reservation = cache.acquire(keys(0)), cache.reserve(keys(2))
    dropped: list[Any] = [cache.acquire(keys(1)), cache.reserve(keys(3))]
    dropped.append(dropped)
    with bench.engine.lock:
        lease.release()
        reservation.abort()
        del dropped
        gc.collect()
        assert cache.statistics().pinned == 2
        assert cache.status(keys(2, 3)) == [Status.PENDING] * 2
    assert cache.status(keys(2, 3)) == [Status.MISS] * 2
    assert cache.statistics().pinned == 0
    cache.check()


def test_tiers_refuse_before_they_take_a_lock_of_theirs() -> None:
    """The thread of the tiers holds the manager's lock while it waits for the engine's."""
    with tiered(capacity=8) as bench:
        bench.written([0])
        promotion = bench.cache.promote(tier_keys([0]))
        assert promotion.wait(SECONDS) == 1
        calls: dict[str, Call] = {
            "promote": lambda: bench.cache.promote(tier_keys([0])),
            "load": lambda: promotion.load([1], after=None),
            "wait": lambda: promotion.wait(SECONDS),
            "remove": lambda: bench.cache.remove(tier_keys([0])),
            "clear": bench.cache.clear,
            "drain": lambda: bench.cache.drain(SECONDS),
            "close": bench.cache.close,
        }
        bench.cache.touch(tier_keys([0]))  # the thread of the tiers looks, and may wait for the lock meanwhile
        with each_refused(bench.engine.lock, calls):
            assert bench.cache.locate(tier_keys([0])) == ["host"]
        promotion.release()


def test_a_policy_is_refused_also_where_a_handler_is_answered() -> None:
    class Asking(LRU):
        def victims(self, count: int, protected: Callable[[bytes], bool]) -> list[bytes] | None:
            index.lookup(keys(0))
            return super().victims(count, protected)

    index = CacheIndex(1, policy=Asking())
    index.reserve(keys(0)).commit()
    with pytest.raises(RuntimeError, match=REFUSED):
        index.reserve(keys(1))
    with index.lock:
        assert index.lookup(keys(0)) == 1, "it is the policy's call no longer"
    index.check()


def test_the_error_names_the_handler_and_what_it_has_interrupted(bench: Rig) -> None:
    """A real signal, which comes while a policy runs."""
    seen: list[BaseException] = []

    def handler(_: int, __: FrameType | None) -> None:
        try:
            bench.engine.drain(SECONDS)
        except RuntimeError as error:
            seen.append(error)

    class Signalled(LRU):
        def insert(self, keys: Any) -> None:
            super().insert(keys)
            signal.raise_signal(signal.SIGUSR1)

    cache = BlockCache(bench.engine, policy=lambda _: Signalled())
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        cache.store(keys(0), [0], after=NO_WAIT).wait(SECONDS)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "drain was called by" in str(seen[0])
    assert "handler (" in str(seen[0])
    assert "CacheState.fill" in str(seen[0])
    assert cache.lookup(keys(0)) == 1


def test_a_finalizer_that_asks_for_a_job_ends_no_other(bench: Rig) -> None:
    """The collection runs between the end of the first transfer and its leaving the queue."""
    cache = BlockCache(bench.engine, policy="lru")
    first, second = bench.stream(), bench.stream()
    gate = bench.gate(first)
    bench.gate(second)
    stored = cache.store(keys(0), [0], after=first)
    waiting = cache.store(keys(1), [1], after=second)

    class Handle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            asked.append(stored.jobs[0].done)

    class Collecting:
        """A tracer, which runs where the end of a transfer is found."""

        def on_submit(self, job: Job) -> None:  # noqa: ARG002
            Handle()
            gc.collect()

        def on_end(self, started: None, result: Any) -> None: ...

    asked: list[bool] = []
    gate.open()
    bench.device.simulator.run_all()
    before = kvoffload.set_tracer(Collecting())
    try:
        cache.store(keys(2), [2], after=NO_WAIT)
    finally:
        kvoffload.set_tracer(before)
    assert len(asked) == 1
    bench.engine.poll()
    assert (stored.jobs[0].finished, waiting.jobs[0].finished) == (True, False)
    assert cache.status(keys(0, 1)) == [Status.HIT, Status.PENDING]


def test_close_inside_close_frees_nothing_twice(bench: Rig) -> None:
    for number in range(1, 300, 9):
        engine = kvoffload.OffloadEngine(bench.engine.layout, device=bench.device, num_slots=2, staging_bytes=0)
        engine.store([1], [1], after=NO_WAIT)
        refused: list[str] = []

        def again(engine: kvoffload.OffloadEngine = engine, refused: list[str] = refused) -> None:
            try:
                engine.close(SECONDS)
            except RuntimeError as refusal:
                refused.append(str(refusal))

        outcome, error = call_at(number, engine.close, again)
        assert error is None, outcome
        assert all(REFUSED in text for text in refused)
        engine.close(SECONDS)
        assert engine.closed
    assert not bench.device.simulator.violations


# done callbacks


def test_a_callback_that_exits_ends_no_other(bench: Rig, caplog: pytest.LogCaptureFixture) -> None:
    held = bench.stream()
    gate = bench.gate(held)
    jobs = [bench.engine.store([number], [number], after=held) for number in range(3)]
    called = threading.Semaphore(0)

    def exits(_: Job) -> None:
        raise SystemExit("a callback that calls sys.exit()")

    jobs[0].add_done_callback(exits)
    for job in jobs[1:]:
        job.add_done_callback(lambda _: called.release())
    with caplog.at_level(logging.ERROR, logger="kvoffload"):
        gate.open()
        for _ in jobs[1:]:
            assert called.acquire(timeout=SECONDS)
        for thread in threading.enumerate():
            if thread.name == "kvoffload-callbacks":
                thread.join(SECONDS)
    assert "a done callback of" in caplog.text


def test_a_passing_driver_error_calls_no_callback_before_the_end(bench: Rig) -> None:
    held = bench.stream()
    gate = bench.gate(held)
    job = bench.engine.store([1], [1], after=held)
    finished: list[bool] = []
    called, failed = threading.Event(), threading.Event()
    advance = bench.engine.advance

    def failing() -> None:
        if not failed.is_set():
            failed.set()
            raise DriverError("cuCtxPushCurrent", "CUDA_ERROR_UNKNOWN", 999)
        advance()

    bench.engine.advance = failing  # type: ignore[method-assign]

    def note(job: Job) -> None:
        finished.append(job.finished)
        called.set()

    job.add_done_callback(note)
    assert failed.wait(SECONDS)
    assert not called.wait(0.05)
    gate.open()
    assert called.wait(SECONDS)
    assert finished == [True]


def test_a_callback_may_add_a_callback_and_a_handler_may_do_so_meanwhile(bench: Rig) -> None:
    """Inside `add`, where its lock is held, another one is only noted: the outer call sees to the thread."""
    held = bench.stream()
    gate = bench.gate(held)
    job = bench.engine.store([1], [1], after=held)
    called = threading.Semaphore(0)
    job.add_done_callback(lambda ended: ended.add_done_callback(lambda _: called.release()))
    job.add_done_callback(lambda _: called.release())
    gate.open()
    for _ in range(2):
        assert called.acquire(timeout=SECONDS)


def test_another_engine_may_be_called_inside_a_call_of_one() -> None:
    """They share no lock."""
    with simulated() as device, rig(device) as bench, machine() as made, bench.engine.lock:
        assert made.engine.store([1], [1], after=NO_WAIT).wait(SECONDS).error is None

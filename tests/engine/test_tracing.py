"""`set_tracer`: a tracer hears of each transfer once when it is submitted, and once when it has ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from helpers import Rig, in_threads, keys, rig, simulated
from interrupts import interrupt_at
from seeds import rest_long

import kvoffload
from kvoffload import BlockCache, Job, KVLayout, ShardedEngine, Tracer, TransferError, TransferResult, set_tracer
from kvoffload.engine import tracing


class Recorder:
    """Remembers what it was called with."""

    def __init__(self, raising: str = "") -> None:
        self.submitted: list[Job] = []
        self.ended: list[tuple[str, TransferResult]] = []
        self._raising = raising

    def on_submit(self, job: Job) -> str:
        if self._raising == "on_submit":
            raise RuntimeError("a tracer's mistake")
        self.submitted.append(job)
        return f"span {len(self.submitted)}"

    def on_end(self, started: str, result: TransferResult) -> None:
        if self._raising == "on_end":
            raise RuntimeError("a tracer's mistake")
        self.ended.append((started, result))


@pytest.fixture(autouse=True)
def _unset() -> Iterator[None]:
    yield
    set_tracer(None)


@pytest.fixture
def bench(device: kvoffload.Device) -> Iterator[Rig]:
    with rig(device, num_blocks=32, num_slots=4) as made:
        yield made


@pytest.fixture
def recorder() -> Recorder:
    made = Recorder()
    set_tracer(made)
    return made


def test_each_transfer_is_followed_from_its_submission_to_its_end(bench: Rig, recorder: Recorder) -> None:
    store, load = bench.engine.store([1], [1]), bench.engine.load([1], [2])
    assert [job.id for job in recorder.submitted] == [store.id, load.id]
    assert recorder.ended == []
    load.wait(10)
    assert [started for started, _ in recorder.ended] == ["span 1", "span 2"]
    assert [result for _, result in recorder.ended] == [store.outcome(), load.outcome()]
    bench.engine.poll()
    assert len(recorder.ended) == 2, "once"


def test_a_transfer_that_fails_ends_with_its_error(bench: Rig, recorder: Recorder) -> None:
    bench.device.simulator.faults.fail_call("cuEventRecord", 2)
    job = bench.engine.store([1], [1])
    with pytest.raises(TransferError):
        job.wait(10)
    [(started, result)] = recorder.ended
    assert started == "span 1"
    assert result.error is not None


@pytest.mark.parametrize("at_call", [None, 3, 12])
def test_transfers_of_a_lost_context_end(at_call: int | None) -> None:
    with simulated() as device, rig(device) as bench:
        recorder = Recorder()
        set_tracer(recorder)
        bench.device.simulator.faults.sticky(at_call)
        try:
            bench.engine.store([1], [1]).wait(10)
        except TransferError:
            pass
        bench.engine.poll()
        assert [result.error is None for _, result in recorder.ended] == [False] * len(recorder.submitted)
        assert recorder.submitted or at_call is not None


def test_nothing_to_copy_is_not_followed(bench: Rig, recorder: Recorder) -> None:
    bench.engine.store([], []).wait(10)
    assert (recorder.submitted, recorder.ended) == ([], [])


def test_transfers_of_a_cache_are_followed(bench: Rig, recorder: Recorder) -> None:
    cache = BlockCache(bench.engine)
    cache.store(keys(0), [3]).wait(10)
    cache.load(keys(0), [4]).wait(10)
    assert [str(job.direction) for job in recorder.submitted] == ["store", "load"]
    assert [started for started, _ in recorder.ended] == ["span 1", "span 2"]


def test_a_transfer_on_several_devices_is_followed_once(device: kvoffload.Device, recorder: Recorder) -> None:
    layouts = [KVLayout([device.allocate_blocks(4, planes=2, block_bytes=64)]) for _ in range(2)]
    with ShardedEngine(layouts, devices=[device, device], num_slots=4) as engine:
        job = engine.store([0], [0])
        job.wait(10)
        assert [each.id for each in recorder.submitted] == [job.id]
        assert [result for _, result in recorder.ended] == [job.outcome()]


def test_the_end_is_reported_without_a_lock(bench: Rig) -> None:
    heard: list[bool] = []

    class Asking(Recorder):
        def on_end(self, started: str, result: TransferResult) -> None:  # noqa: ARG002
            thread = threading.Thread(target=lambda: heard.append(bench.engine.statistics().in_flight == 0))
            thread.start()
            thread.join(10)

    set_tracer(Asking())
    bench.engine.store([1], [1]).wait(10)
    assert heard == [True]


def test_the_tracer_of_the_submission_hears_of_the_end(bench: Rig, recorder: Recorder) -> None:
    job = bench.engine.store([1], [1])
    later = Recorder()
    assert set_tracer(later) is recorder
    job.wait(10)
    assert (len(recorder.ended), later.ended) == (1, [])
    assert set_tracer(None) is later
    bench.engine.store([1], [1]).wait(10)
    assert (len(recorder.submitted), later.submitted) == (1, [])


@pytest.mark.parametrize("later", rest_long(range(0, 6, 2), 1))  # every sixth point at once, more in long runs
def test_an_interrupt_loses_no_end(later: int, seed: int) -> None:
    """At any point but the entry of `on_end` itself; a call of the engine that asks the GPU delivers what was left."""
    number, raised = 1 + seed % 2 + later, 0
    while True:
        with simulated(1) as device, rig(device) as bench:
            recorder = Recorder()
            set_tracer(recorder)

            def store_and_load(bench: Rig = bench) -> None:
                bench.engine.store([1], [1])
                bench.engine.load([1], [2]).wait(10)

            outcome = interrupt_at(number, store_and_load)
            bench.engine.drain(10)
            if outcome.point is None:
                assert len(recorder.ended) == 2
                break
            raised += outcome.raised
            entered = "Recorder.on_end" in outcome.point.what
            spans = [started for started, _ in recorder.ended]
            expected = [f"span {index}" for index, _ in enumerate(recorder.submitted, 1)]
            assert spans == [each for each in expected if each in spans], f"in order, each once: {outcome}"
            assert len(expected) - len(spans) == entered, f"{outcome}"
        number += 6
    assert raised > 50 / 3


def test_threads_deliver_each_end_once(bench: Rig, recorder: Recorder) -> None:
    for _ in range(40):
        bench.engine.store([1], [1])
    in_threads(*[bench.engine.poll] * 4, *[partial(bench.engine.drain, 10)] * 2)
    assert sorted(started for started, _ in recorder.ended) == sorted(f"span {index}" for index in range(1, 41))


@pytest.mark.parametrize("method", ["on_submit", "on_end"])
def test_what_a_tracer_raises_is_logged_and_harms_nothing(
    bench: Rig, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    set_tracer(Recorder(raising=method))
    with caplog.at_level(logging.ERROR, logger="kvoffload"):
        assert bench.engine.store([1], [1]).wait(10).error is None
    assert [f"{method} of" in each.getMessage() for each in caplog.records] == [True]


@pytest.mark.parametrize("wrong", [3, print, Recorder])
def test_what_is_no_tracer_is_refused(wrong: Any, recorder: Recorder) -> None:
    if wrong is Recorder:
        wrong = type("Half", (), {"on_submit": print})()
    with pytest.raises(TypeError, match=r"^tracer must have on_submit\(job\) and on_end\(started, result\), got "):
        set_tracer(wrong)
    assert tracing.current is recorder


def test_a_tracer_is_a_protocol() -> None:
    tracer: Tracer = Recorder()
    assert set_tracer(tracer) is None

"""`await job` and `Job.add_done_callback`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator

import pytest
from helpers import Rig, settled

import kvoffload
from kvoffload import NO_WAIT, Job, TransferError


@pytest.fixture
def bench(device: kvoffload.Device) -> Iterator[Rig]:
    yield from settled(device)


class Called:
    """A callback that notes its jobs, and waits for as many as are expected."""

    def __init__(self, count: int) -> None:
        self._left = threading.Semaphore(0)
        self._count = count
        self.jobs: list[Job] = []
        self.threads: set[int] = set()

    def __call__(self, job: Job) -> None:
        self.jobs.append(job)
        self.threads.add(threading.get_ident())
        self._left.release()

    def wait(self) -> None:
        for _ in range(self._count):
            assert self._left.acquire(timeout=10)


def wait_for_the_thread() -> None:
    """Until it has called what there was to call, and has ended."""
    for thread in threading.enumerate():
        if thread.name == "kvoffload-callbacks":
            thread.join(10)
            assert not thread.is_alive()


def test_several_jobs_are_awaited_together(bench: Rig) -> None:
    held = bench.stream()
    gate = bench.gate(held)

    async def main() -> list[kvoffload.TransferResult]:
        jobs = [bench.engine.store([index], [index], after=held) for index in range(5)]

        async def wait_for(job: Job) -> kvoffload.TransferResult:
            return await job

        tasks = [asyncio.create_task(wait_for(job)) for job in jobs]
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        gate.open()
        results = await asyncio.gather(*tasks)
        assert [result.job_id for result in results] == [job.id for job in jobs]
        return results

    assert {result.error for result in asyncio.run(main())} == {None}
    assert bench.engine.poll() == [], "each was waited for"


def test_awaiting_a_job_that_fails_raises_its_error(bench: Rig) -> None:
    bench.device.simulator.faults.fail_call("cuMemcpy3DBatchAsync")

    async def main() -> None:
        await bench.engine.store([1], [1])

    with pytest.raises(TransferError, match="cuMemcpy3DBatchAsync"):
        asyncio.run(main())


def test_a_task_that_is_cancelled_leaves_the_job_alone(bench: Rig) -> None:
    held = bench.stream()
    gate = bench.gate(held)

    async def main() -> kvoffload.TransferResult:
        job = bench.engine.store([1], [1], after=held)

        async def wait_for() -> kvoffload.TransferResult:
            return await job

        cancelled, other = asyncio.create_task(wait_for()), asyncio.create_task(wait_for())
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert not job.finished
        gate.open()
        return await other

    assert asyncio.run(main()).error is None
    assert (bench.slot(1) == 2).all()


def test_callbacks_are_called_once_each_by_one_thread(bench: Rig) -> None:
    held = bench.stream()
    gate = bench.gate(held)
    called = Called(6)
    jobs = [bench.engine.store([index], [index], after=held) for index in range(3)]
    for job in jobs:
        job.add_done_callback(called)
        job.add_done_callback(called)
    assert called.jobs == []
    gate.open()
    called.wait()
    assert sorted(job.id for job in called.jobs) == sorted(2 * [job.id for job in jobs])
    assert len(called.threads) == 1
    assert threading.get_ident() not in called.threads


def test_a_callback_of_a_failed_job_is_called(bench: Rig) -> None:
    bench.device.simulator.faults.fail_call("cuMemcpy3DBatchAsync")
    job, called = bench.engine.store([1], [1]), Called(1)
    job.add_done_callback(called)
    called.wait()
    assert called.jobs[0].outcome().error is not None


def test_a_callback_that_raises_is_logged_and_stops_no_other(bench: Rig, caplog: pytest.LogCaptureFixture) -> None:
    held = bench.stream()
    gate = bench.gate(held)
    job, called = bench.engine.store([1], [1], after=held), Called(1)

    def broken(_: Job) -> None:
        raise RuntimeError("broken callback")

    with caplog.at_level(logging.ERROR, logger="kvoffload"):
        job.add_done_callback(broken)
        job.add_done_callback(called)
        gate.open()
        called.wait()
        wait_for_the_thread()
    (record,) = caplog.records
    assert record.getMessage() == f"a done callback of {job!r} raised"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "broken callback"


def test_a_thread_that_cannot_be_started_takes_no_later_callback_along(bench: Rig) -> None:
    held = bench.stream()
    gate = bench.gate(held)
    job, called = bench.engine.store([1], [1], after=held), Called(1)
    usual = threading.stack_size(1 << 47)  # more than a process can map
    try:
        with pytest.raises(RuntimeError, match="start new thread"):
            job.add_done_callback(lambda _: None)
    finally:
        threading.stack_size(usual)
    job.add_done_callback(called)
    gate.open()
    called.wait()


def test_callbacks_are_called_where_one_more_thread_can_be_started(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    held = bench.stream()
    gate = bench.gate(held)
    job, called = bench.engine.store([1], [1], after=held), Called(2)
    monkeypatch.setattr(threading.Thread, "start", none_left)
    job.add_done_callback(called)
    job.add_done_callback(called)
    gate.open()
    called.wait()
    assert threading.get_ident() not in called.threads


def test_a_callback_may_submit_and_add_another(bench: Rig) -> None:
    called = Called(1)

    def again(_: Job) -> None:
        bench.engine.load([1], [2], after=NO_WAIT).add_done_callback(called)

    bench.engine.store([5], [1]).add_done_callback(again)
    called.wait()
    assert (bench.block(2) == 6).all()


@pytest.mark.parametrize("callback", [None, 3, "print"])
def test_what_is_no_function_is_refused(bench: Rig, callback: object) -> None:
    job = bench.engine.store([1], [1])
    with pytest.raises(TypeError, match=r"callback must be a function of a Job, got "):
        job.add_done_callback(callback)  # type: ignore[arg-type]

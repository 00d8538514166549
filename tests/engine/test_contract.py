"""What every engine promises, over one device and over several: arguments, ids, results, streams, limits, the end.

`tests/sharded` has what is special to several devices, the other files here what is special to one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import LEVELS, PER_THREAD, all_are, in_threads
from sharding import BLOCKS, Machine, gpus, machine

from kvoffload import NO_WAIT, CapacityError, ClosedError, DriverError, Job, LayoutError, TransferError

SIMULATED = [*(f"one device, {level}" for level in LEVELS), "two devices"]
ON_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("one GPU", "two GPUs", "one GPU twice")]


def made_of(name: str, request: pytest.FixtureRequest, **options: Any) -> Iterator[Machine]:
    if "GPU" in name:
        first, sizes = request.getfixturevalue("gpu_device"), {"block_bytes": 64 << 10, **options}
        with gpus(first, name if name != "one GPU" else "one GPU twice") as devices:
            alone = name == "one GPU"
            with machine(
                (16,) if alone else (16, 8), devices=devices[: 1 if alone else 2], alone=alone, **sizes
            ) as made:
                made.warm_up()
                yield made
                check_whole(made)
        return
    level = name.partition(", ")[2]
    driver_version, bindings_version = LEVELS[level or "batch"]
    driver = {"driver_version": driver_version, "bindings_version": bindings_version}
    with machine((4,) if level else (3, 2), alone=bool(level), driver=driver, seed=11, **options) as made:
        yield made
        check_whole(made)


def check_whole(made: Machine) -> None:
    for gate in made.gates:
        gate.open()
    if not made.engine.closed and not any(device.closed for device in made.devices):
        made.engine.drain(30)
        made.whole()


@pytest.fixture(params=SIMULATED)
def made(request: pytest.FixtureRequest) -> Iterator[Machine]:
    yield from made_of(request.param, request)


@pytest.fixture(params=[*SIMULATED, *ON_GPU])
def each(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """`made`, and on GPUs, with blocks that are long enough to be overtaken."""
    yield from made_of(request.param, request)


@pytest.fixture(params=SIMULATED)
def few(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """At most three jobs in flight."""
    yield from made_of(request.param, request, max_in_flight=3)


def busy(made: Machine) -> Any:
    """A count of everything that a submission would change."""
    statistics, simulator = made.engine.statistics(), made.simulator
    counts = (statistics.in_flight, statistics.streams_in_use, statistics.events_in_use, statistics.unreported)
    return *counts, simulator.pending_operations() if simulator is not None else 0, made.engine.submitted


@pytest.fixture
def refused(made: Machine) -> Iterator[None]:
    """Nothing may happen in the test."""
    before, mirrors = busy(made), made.mirrors()
    yield
    made.settle()
    mirrors.check()
    assert busy(made) == before
    assert made.engine.poll() == []


# arguments

WRONG: list[tuple[str, Callable[[Any], object], type[Exception], str]] = [
    ("block too big", lambda e: e.store([16], [0]), LayoutError, r"blocks\[0\] is 16, outside \[0, 16\)"),
    ("second block too big", lambda e: e.store([1, 99], [1, 2]), LayoutError, r"blocks\[1\]"),
    ("block negative", lambda e: e.store([1, -1], [0, 1]), LayoutError, r"blocks\[1\] is -1"),
    ("slot too big", lambda e: e.load([99], [0]), LayoutError, r"slots\[0\] is 99"),
    ("lengths differ", lambda e: e.store([1, 2], [0]), LayoutError, "need 2 slots"),
    ("too many slots", lambda e: e.store([1], [1, 2]), LayoutError, "1 blocks .* need 1 slots"),
    ("two-dimensional", lambda e: e.store([[1]], [0]), LayoutError, "one-dimensional"),
    ("floats", lambda e: e.store([1.0], [0]), LayoutError, "integers"),
    ("text", lambda e: e.store("1", [0]), LayoutError, "blocks"),
    ("ragged", lambda e: e.store([[1], [2, 3]], [0]), LayoutError, "blocks"),
    ("slots repeat", lambda e: e.store([1, 2, 3], [5, 6, 5]), LayoutError, r"slots\[[02]\] repeats 5"),
    ("blocks repeat", lambda e: e.load([1, 2], [3, 3]), LayoutError, r"blocks\[[01]\] repeats 3"),
    ("group", lambda e: e.store([1], [0], group=1), LayoutError, "group must be"),
    ("group negative", lambda e: e.store([1], [0], group=-1), LayoutError, "group"),
    ("sub-block", lambda e: e.load([1], [0], first_sub_block=1), LayoutError, "first_sub_block must be"),
    (
        "copier",
        lambda e: e.store([1], [0], copier="fast"),
        ValueError,
        "strided, gather, split, batch, loop, pack or None",
    ),
    ("source order", lambda e: e.load([1], [0], source_order="never"), ValueError, "auto, stream, any"),
    ("after", lambda e: e.store([1], [0], after="stream"), TypeError, "after must be a (stream handle|list with one)"),
    ("after a bool", lambda e: e.store([1], [0], after=True), TypeError, "after"),
]


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(("call", "error", "text"), [each[1:] for each in WRONG], ids=[each[0] for each in WRONG])
def test_bad_arguments_raise_and_nothing_happens(
    made: Machine, call: Callable[[Any], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        call(made.engine)
    assert isinstance(caught.value, (ValueError, TypeError)), "bad values are ValueErrors"


def test_pitfall_08_sources_may_repeat(made: Machine) -> None:
    """Copies of one transfer have no order, so each target may be there once."""
    mirrors = made.mirrors()
    for direction, blocks, slots in (("store", [1, 1], [5, 6]), ("load", [3, 4], [5, 5])):
        made.engine.submit(direction, blocks, slots).wait(10)
        mirrors.expect(direction, blocks, slots)
    mirrors.check()


@pytest.mark.parametrize(
    "ids",
    [
        [3, 1],
        (3, 1),
        np.array([3, 1], np.uint8),
        np.array([3, 1], np.int32),
        np.array([9, 3, 9, 1])[1::2],
        range(3, 0, -2),
    ],
    ids=["list", "tuple", "uint8", "int32", "strided", "range"],
)
def test_ids_are_whatever_numpy_turns_into_integers(made: Machine, ids: Any) -> None:
    mirrors = made.mirrors()
    made.engine.store(ids, ids).wait(10)
    mirrors.expect("store", [3, 1], [3, 1])
    mirrors.check()


def test_ids_are_read_once(made: Machine) -> None:
    """Whatever is given is turned into ids once, so that all devices have the same."""

    class Changing:
        reads = 0

        def __array__(self, *_: Any, **__: Any) -> Any:
            self.reads += 1
            return np.array([self.reads], np.int64)

    ids, mirrors = Changing(), made.mirrors()
    made.engine.store(ids, [3]).wait(10)
    assert ids.reads == 1
    mirrors.expect("store", [1], [3])
    mirrors.check()


def test_ids_may_be_reused_by_the_caller_at_once(made: Machine) -> None:
    mirrors, (streams, gate) = made.mirrors(), made.held()
    ids = np.array([3, 4])
    job = made.engine.store(ids, ids, after=streams)
    ids[:] = 7
    follower = made.engine.load([3], [5], after=NO_WAIT)
    gate.open()
    for each, move in ((job, ("store", [3, 4], [3, 4])), (follower, ("load", [5], [3]))):
        each.wait(10)
        mirrors.expect(*move)
    mirrors.check()


def test_empty_transfers_are_done_at_once(made: Machine) -> None:
    before = busy(made)[:3]
    for job in (made.engine.store([], []), made.engine.load(np.empty(0), ())):
        assert job.done
        assert job.wait(0).nbytes == 0
        job.order_before(made.of_each(made.one_each()))
    assert busy(made)[:3] == before


def test_ids_go_up_to_the_end(made: Machine) -> None:
    mirrors = made.mirrors()
    assert made.engine.store([BLOCKS - 1], [15]).wait(10).nbytes == made.nbytes(1)
    mirrors.expect("store", [BLOCKS - 1], [15])
    mirrors.check()


# results


def test_a_transfer_moves_its_blocks_on_every_device(made: Machine) -> None:
    mirrors = made.mirrors()
    stored, loaded = made.engine.store([3, 1, 7], [5, 0, 2]), made.engine.load([5, 2], [10, 11])
    assert [job.wait(10).nbytes for job in (stored, loaded)] == [made.nbytes(3), made.nbytes(2)]
    mirrors.expect("store", [3, 1, 7], [5, 0, 2])
    mirrors.expect("load", [10, 11], [5, 2])
    mirrors.check()


def test_a_result_is_of_all_devices(made: Machine) -> None:
    job = made.engine.store([1, 2], [1, 2], copier="loop")
    result = job.wait(10)
    assert (result.job_id, result.direction, result.copier, result.error) == (job.id, "store", "loop", None)
    assert result.seconds > 0
    assert (job.done, job.finished, job.outcome()) == (True, True, result)
    assert (job.method is not None and job.method.copier, job.num_parts) == ("loop", 1)
    assert repr(job) == f"Job({job.id}, store, {made.nbytes(2)} bytes, loop, done)"
    totals = made.engine.statistics().store
    assert (totals.jobs, totals.failed, totals.nbytes, totals.seconds) == (1, 0, result.nbytes, result.seconds)


def test_poll_reports_each_job_once_and_not_those_waited_for(made: Machine) -> None:
    jobs = [made.engine.store([index], [index]) for index in range(6)]
    empty = made.engine.load([], [])
    jobs[2].wait(10)
    jobs[4].result()
    made.engine.drain(10)
    results = {result.job_id: result for result in made.engine.poll()}
    assert sorted(results) == sorted([*(jobs[index].id for index in (0, 1, 3, 5)), empty.id])
    assert made.engine.poll() == []
    assert made.engine.statistics().unreported == 0
    stored, nothing = results[jobs[0].id], results[empty.id]
    assert (stored.direction, stored.nbytes, stored.copier, stored.error) == (
        *("store", made.nbytes(1), jobs[0].copier),
        None,
    )
    assert stored.seconds >= 0
    assert repr(stored).startswith("SimulatedTransferResult(")
    assert (nothing.nbytes, nothing.copier, nothing.seconds) == (0, "none", 0.0)
    assert empty.wait().nbytes == 0


def test_done_does_not_take_the_report_away(made: Machine) -> None:
    job = made.engine.store([1], [1])
    while not job.done:
        pass
    assert [result.job_id for result in made.engine.poll()] == [job.id]


def test_wait_with_a_timeout_raises_and_the_job_goes_on(made: Machine) -> None:
    mirrors, (streams, gate) = made.mirrors(), made.held()
    job = made.engine.store([3], [0], after=streams)
    began = time.perf_counter()
    with pytest.raises(TimeoutError, match="still going on"):
        job.wait(timeout=0.05)
    assert time.perf_counter() - began >= 0.05
    with pytest.raises(TimeoutError):
        made.engine.drain(timeout=0.01)
    with pytest.raises(TimeoutError):
        job.wait(timeout=0)
    assert not job.done
    gate.open()
    assert job.wait(10).job_id == job.id
    assert job.result().job_id == job.id
    mirrors.expect("store", [3], [0])
    mirrors.check()


def test_a_job_can_be_awaited_and_calls_back(made: Machine) -> None:
    job, called = made.engine.store([1], [1]), threading.Event()
    job.add_done_callback(lambda _: called.set())

    async def wait() -> int:
        return int((await job).nbytes)

    assert asyncio.run(wait()) == made.nbytes(1)
    assert called.wait(10)


def test_a_callback_of_a_job_that_has_ended_is_called_at_once(made: Machine) -> None:
    job = made.engine.store([1], [1])
    job.wait(10)
    called: list[tuple[Job, int]] = []
    job.add_done_callback(lambda ended: called.append((ended, threading.get_ident())))
    assert called == [(job, threading.get_ident())]


def test_what_a_plan_says_of_a_transfer_is_not_submitted(made: Machine) -> None:
    before = busy(made)
    reports = made.engine.plan("store", [1, 2], [0, 1], copier="loop")
    assert sum(report.nbytes for report in ([reports] if made.alone else reports)) == made.nbytes(2)
    assert busy(made) == before


# streams


class WithProtocol:
    """A stream as CuPy and cuda.core show theirs."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class WithProperty:
    def __init__(self, handle: int) -> None:
        self.__cuda_stream__ = (0, handle)


@pytest.mark.parametrize(
    "wrap", [int, WithProtocol, WithProperty, np.int64], ids=["int", "method", "property", "numpy"]
)
def test_streams_by_handle_or_by_protocol(made: Machine, wrap: Callable[[int], Any]) -> None:
    streams, readers = made.one_each(), made.one_each()
    gate = made.hold(0, streams[0])
    for number, stream in enumerate(streams):
        made.fill(number, made.buffers[number][0], 77, stream)
    job = made.engine.store([3], [0], after=made.of_each([wrap(stream) for stream in streams]))
    job.order_before(made.of_each([wrap(reader) for reader in readers]))
    made.settle()
    assert not job.done
    gate.open()
    job.wait(10)
    for layout, pool in zip(made.layouts, made.pools, strict=True):
        assert all_are(pool[0, : layout.groups[0].bytes_per_block], 77)


def test_a_bindings_stream_is_taken(made: Machine) -> None:
    from cuda.bindings.driver import CUstream

    streams = [CUstream(stream) for stream in made.one_each()]
    made.engine.store([3], [0], after=made.of_each(streams)).wait(10)


def test_pitfall_07_a_capturing_stream_is_refused_and_nothing_happens(made: Machine) -> None:
    """The stream of the last device, so that no stream of another one waits."""
    streams, last = made.one_each(), made.devices[-1]
    with last.current():
        assert int(made.simulator.cuStreamBeginCapture(streams[-1], 0)[0]) == 0
    before, mirrors = busy(made), made.mirrors()
    for call, ids in ((made.engine.store, [1]), (made.engine.load, [1]), (made.engine.store, [])):
        with pytest.raises(TransferError, match="captured into a graph"):
            call(ids, ids, after=made.of_each(streams))
    made.settle()
    mirrors.check()
    assert busy(made) == before
    job = made.engine.store([1], [1], after=NO_WAIT)
    with pytest.raises(TransferError, match="captured into a graph"):
        job.order_before(made.of_each(streams))
    job.wait(10)
    with last.current():
        assert int(made.simulator.cuStreamEndCapture(streams[-1])[0]) == 0
    made.engine.store([1], [1], after=made.of_each(streams)).wait(10)


@pytest.mark.usefixtures("refused")
def test_what_is_no_stream_at_all_is_refused_and_nothing_happens(made: Machine) -> None:
    with pytest.raises((ValueError, DriverError)):
        made.engine.store([1], [1], after=made.of_each([0x1234560] * len(made.devices)))


@pytest.mark.parametrize("held", [0, -1], ids=["first", "last"])
def test_a_load_follows_the_store_into_its_slots_and_the_callers_streams_the_load(each: Machine, held: int) -> None:
    """Whichever device is held back, first or last."""
    theirs, mirrors = each.one_each(), each.mirrors()
    markers = [each.marker(number) for number in range(len(each.devices))]
    streams, gate = each.held(held)
    stored = each.engine.store([1, 2], [3, 4], after=streams)
    loaded = each.engine.load([3, 4], [9, 10], after=NO_WAIT)
    loaded.order_before(each.of_each(theirs))
    for number, marker in enumerate(markers):
        each.fill(number, marker, 9, theirs[number])
    each.settle()
    assert (stored.done, loaded.done) == (False, False)
    gate.open()
    assert [job.wait(30).error for job in (stored, loaded)] == [None, None]
    for number, stream in enumerate(theirs):
        each.synchronize(number, stream)
    mirrors.expect("store", [1, 2], [3, 4])
    mirrors.expect("load", [9, 10], [3, 4])
    mirrors.check()
    assert all(all_are(marker.to_numpy(), 9) for marker in markers)


# threads and contexts


def other_context(each: Machine, index: int) -> int:
    api: Any = each.devices[0].driver.api
    arguments = (None, 0, index) if each.devices[0].driver.bindings_version >= (13, 0) else (0, index)
    status, context = api.cuCtxCreate(*arguments)
    assert int(status) == 0, status
    return int(context)


def test_pitfall_36_any_thread_and_any_context(each: Machine) -> None:
    """A thread without a context, and one with another context current: right device, and theirs is current after."""
    api, mirrors = each.devices[0].driver.api, each.mirrors()
    legacy = each.of_each([PER_THREAD] * len(each.devices))

    def work(own: bool) -> None:
        context = other_context(each, each.devices[0].index) if own else 0
        each.engine.store([1], [1], after=NO_WAIT).wait(30)
        each.engine.load([1], [2], after=legacy).wait(30)
        each.engine.poll()
        with pytest.raises(LayoutError):
            each.engine.store([99], [1])
        assert int(api.cuCtxGetCurrent()[1]) == context
        if own:
            api.cuCtxDestroy(context)

    for own in (False, True):
        in_threads(partial(work, own))
    mirrors.expect("store", [1], [1])
    mirrors.expect("load", [2], [1])
    mirrors.check()


def test_a_stream_of_another_context_is_refused_and_nothing_happens(each: Machine) -> None:
    api, mirrors = each.devices[0].driver.api, each.mirrors()
    context = other_context(each, each.devices[0].index)
    stream = int(api.cuStreamCreate(1)[1])
    try:
        before = busy(each)
        for call in (each.engine.store, each.engine.load):
            with pytest.raises(ValueError, match=f"={stream:#x} is no stream of this device's context") as caught:
                call([1], [1], after=each.of_each([stream, *[NO_WAIT] * (len(each.devices) - 1)]))
            assert "NO_WAIT" in str(caught.value)
        assert busy(each) == before
        assert each.engine.poll() == []
        assert int(api.cuCtxGetCurrent()[1]) == context
    finally:
        api.cuStreamDestroy(stream)
        api.cuCtxDestroy(context)
    each.engine.store([1], [1], after=NO_WAIT).wait(30)
    mirrors.expect("store", [1], [1])
    mirrors.check()


# limits and the end


def test_too_many_jobs_in_flight_raise_and_nothing_happens(few: Machine) -> None:
    mirrors, each = few.mirrors(), few.one_each()
    gates, streams = [few.hold(number, stream) for number, stream in enumerate(each)], few.of_each(each)
    jobs = [few.engine.store([index], [index], after=streams) for index in range(3)]
    before = few.engine.statistics()
    for _ in range(3):
        with pytest.raises(CapacityError, match="max_in_flight=3"):
            few.engine.store([5], [5], after=streams)
        with pytest.raises(CapacityError):
            few.engine.load([6], [6])
        with pytest.raises(CapacityError, match="3 jobs are unfinished"):
            few.engine.check_room(1)
    assert few.engine.statistics() == before
    empty = [few.engine.store([], []), few.engine.load([], [])]
    assert all(job.done for job in empty), "they are never in flight"
    assert [result.job_id for result in few.engine.poll()] == [job.id for job in empty]
    for gate in gates:
        gate.open()
    few.engine.drain(10)
    assert [result.job_id for result in few.engine.poll()] == [job.id for job in jobs]
    for index in range(3):
        mirrors.expect("store", [index], [index])
    mirrors.check()
    assert few.engine.store([5], [5]).wait(10).job_id > jobs[-1].id


def test_pitfall_31_use_after_close_is_a_clear_error(made: Machine) -> None:
    waited, polled = made.engine.store([1], [1]), made.engine.load([1], [1])
    waited.wait(10)
    made.engine.close(10)
    made.engine.close(10)
    for call, ids in ((made.engine.store, [1]), (made.engine.load, [1]), (made.engine.store, [])):
        with pytest.raises(ClosedError, match="the engine is closed"):
            call(ids, ids)
    assert (waited.done, polled.done) == (True, True)
    assert waited.wait().nbytes == made.nbytes(1)
    assert [result.job_id for result in made.engine.poll()] == [polled.id]
    assert made.engine.statistics().in_flight == 0
    made.engine.drain(1)
    assert "closed" in repr(made.engine)


def test_a_closed_device_closes_the_engine(made: Machine) -> None:
    job = made.engine.store([1], [1])
    made.devices[-1].close(10)
    with pytest.raises(ClosedError):
        made.engine.store([1], [1])
    assert job.wait(10).error is None
    made.engine.close(10)


def test_a_close_that_runs_out_of_time_frees_nothing_and_can_be_repeated(made: Machine) -> None:
    streams, gate = made.held()
    job = made.engine.store([1], [1], after=streams)
    with pytest.raises(TimeoutError):
        made.engine.close(0.01)
    later = made.engine.store([2], [2], after=NO_WAIT)
    gate.open()
    made.engine.close(10)
    assert [each.outcome().error for each in (job, later)] == [None, None]

"""A CUDA context that is lost: wherever it shows first, every job ends, every call says so, everything closes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cuda.bindings import driver as cuda
from helpers import Rig, rig, simulated
from workload import Program, program, several_streams

import kvoffload
from kvoffload import NO_WAIT, KVOffloadError, OffloadEngine, TransferError
from kvoffload.simulator import SimulatedDriver, space

ILLEGAL_ADDRESS = cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


@pytest.fixture(autouse=True)
def _several_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    several_streams(monkeypatch)


@pytest.mark.parametrize("how", ["copy", "operation", "call"])
def test_a_lost_context_poisons_the_engine_with_one_exception(how: str) -> None:
    with program() as made:
        simulator, engine = made.simulator, made.bench.engine
        gate = made.bench.gate(made.streams[0])
        running = [engine.store([index], [index], after=made.streams[0]) for index in range(4)]
        if how == "copy":
            simulator.faults.fail_operation()
        elif how == "operation":
            simulator.faults.sticky()
        else:
            simulator.faults.sticky(at_call=3)  # the first two make the context current
        gate.open()
        for job in running:
            with pytest.raises(TransferError):
                job.wait(10)
        texts = set()
        for _ in range(3):
            with pytest.raises(TransferError, match="context is lost") as caught:
                engine.store([1], [1])
            texts.add(str(caught.value))
        assert len(texts) == 1
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in texts.pop()
        assert all(job.done for job in running)
        assert engine.statistics().in_flight == 0
        results = engine.poll()
        assert results == [], "each was waited for"
        _other_engine_knows(made)
        other = simulated(4)
        with rig(other) as healthy:
            healthy.engine.store([1], [1]).wait(10)
        other.close()
        made.bench.streams.clear()
        engine.close()
        engine.close()
        engine.device.close()


def _other_engine_knows(made: Program) -> None:
    with pytest.raises(KVOffloadError):
        made.cache.store([b"x"], [[1], [1]])
    made.cache.check()
    assert made.cache.lookup([b"x"]) == 0


@pytest.mark.parametrize("nth", range(1, 120, 7))
def test_a_context_lost_at_any_call_ends_every_job(nth: int) -> None:
    with program() as made:
        made.simulator.faults.sticky(at_call=nth)
        checks = made.run()
        for engine in (made.bench.engine, made.cache_engine):
            engine.drain(10)
        assert all(check.job is None or check.job.done for check in checks)
        made.cache.check()
        lost = [_is_lost(made.bench.engine, [1], [1]), _is_lost(made.cache_engine, [1], [1])]
        if any(context.error for context in made.simulator.contexts.values()):
            assert lost == [True, True]
            made.bench.streams.clear()
        else:  # no context was current when the call was made: only the engine that made it was told
            assert sorted(lost) == [False, True]


def _is_lost(engine: OffloadEngine, blocks: list[int], slots: list[int]) -> bool:
    """Whether a load says so; else it has to succeed. (Stores into slots of a cache are refused.)"""
    try:
        engine.load(slots, blocks).wait(10)
    except TransferError as error:
        return "context is lost" in str(error)
    return False


def test_a_lost_context_leaves_another_device_of_the_process_alone() -> None:
    driver = SimulatedDriver(device_count=2)
    first, second = (kvoffload.open_device(index, backend=driver) for index in range(2))
    with rig(first) as lost, rig(second) as healthy:
        driver.faults.fail_operation()
        with pytest.raises(TransferError):
            lost.engine.store([1], [1]).wait(10)
        healthy.engine.store([1], [1]).wait(10)
        assert (healthy.slot(1) == 2).all()
        assert not second.closed
    first.close()
    second.close()


# the call that shows it first


def _lose_at(device: kvoffload.Device, call: str) -> None:
    """Have the context lost by the next call of that name; a push finds it lost."""
    simulator: Any = device.simulator
    if call == "cuCtxPushCurrent":
        simulator.scheduler.fail_context(simulator.contexts.get(device.context), ILLEGAL_ADDRESS)
    else:
        simulator.faults._plan(call, 1, ILLEGAL_ADDRESS, sticky=True)


EARLY = ("cuCtxPushCurrent", "cuStreamIsCapturing")
FIRST = [
    (method, call, in_flight)
    for method, calls in {
        "store": (*EARLY, "cuEventRecord"),
        "load": (*EARLY, "cuEventRecord"),
        "order_before": (*EARLY, "cuStreamWaitEvent"),
    }.items()
    for call in calls
    for in_flight in (False, True)
    if (call, in_flight) != ("cuStreamWaitEvent", False)  # nothing is waited for
]


@pytest.mark.parametrize(("method", "call", "in_flight"), FIRST)
def test_a_loss_that_shows_first_in_a_call(method: str, call: str, in_flight: bool) -> None:
    device = simulated(5)
    with rig(device) as bench:
        engine, held, other = bench.engine, bench.stream(), bench.stream()
        bench.gate(held)
        jobs = [engine.store([1], [1], after=held), engine.load([1], [2], after=NO_WAIT)]
        if not in_flight:
            bench.gates[0].open()
            engine.drain(10)
        calls: dict[str, Callable[[], object]] = {
            "store": lambda: engine.store([3], [3], after=other),
            "load": lambda: engine.load([3], [3], after=other),
            "order_before": lambda: jobs[1].order_before(other),
        }
        _lose_at(device, call)
        with pytest.raises(TransferError, match=r"the CUDA context is lost.*CUDA_ERROR_ILLEGAL_ADDRESS"):
            calls[method]()
        assert device.simulator.faults.pending == 0
        for again in calls.values():
            with pytest.raises(TransferError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                again()
        _everything_ends(bench, jobs, failed=in_flight)
    assert device.closed


@pytest.mark.parametrize("seen_by", ["wait", "poll", "drain", "close", "device.close"])
def test_a_loss_that_shows_first_while_waiting(seen_by: str) -> None:
    device = simulated(5)
    with rig(device) as bench:
        held = bench.stream()
        bench.gate(held)
        jobs = [bench.engine.store([1], [1], after=held), bench.engine.load([1], [2], after=NO_WAIT)]
        _lose_at(device, "cuCtxPushCurrent")
        if seen_by == "wait":
            with pytest.raises(TransferError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                jobs[0].wait(10)
        elif seen_by == "poll":
            assert all(result.error is not None for result in bench.engine.poll())
        elif seen_by == "drain":
            bench.engine.drain(10)
        elif seen_by == "close":
            bench.engine.close(10)
        else:
            device.close(10)
        assert all(job.finished for job in jobs)
        _everything_ends(bench, jobs, failed=True)
    assert device.closed


def _everything_ends(bench: Rig, jobs: list[kvoffload.Job], *, failed: bool) -> None:
    """Waiting, polling, draining and closing come back at once."""
    engine = bench.engine
    for job in jobs:
        assert job.done
        assert (job.error is not None) == failed
        if failed:
            with pytest.raises(TransferError):
                job.wait(1)
    engine.drain(1)
    assert engine.poll() == [] or not failed
    assert engine.statistics().in_flight == 0
    bench.streams.clear()
    for _ in range(2):
        engine.close(1)
    for _ in range(2):
        bench.device.close(1)


def with_a_context() -> tuple[SimulatedDriver, Any]:
    """A driver with a context of the caller's, which is not current."""
    driver = SimulatedDriver(seed=2)
    driver.cuInit(0)
    context = driver.cuCtxCreate(None, 0, 0)[1]
    driver.cuCtxPopCurrent()
    return driver, context


@pytest.mark.parametrize("in_flight", [False, True], ids=["idle", "in flight"])
def test_a_callers_context_destroyed_under_the_engine(in_flight: bool) -> None:
    driver, context = with_a_context()
    device = kvoffload.open_device(backend=driver, context=context)
    with rig(device) as bench:
        held = bench.stream()
        bench.gate(held)
        jobs = [bench.engine.store([1], [1], after=held)]
        if not in_flight:
            bench.gates[0].open()
            bench.engine.drain(10)
        assert int(driver.cuCtxDestroy(context)[0]) == 0
        for call in (bench.engine.store, bench.engine.load):
            with pytest.raises(TransferError, match=r"context is lost.*CUDA_ERROR_CONTEXT_IS_DESTROYED"):
                call([3], [3])
        _everything_ends(bench, jobs, failed=in_flight)
    assert device.closed
    assert int(driver.cuCtxGetCurrent()[1]) == 0


@pytest.mark.parametrize("seen_by", ["poll", "done", "drain"])
def test_a_destroyed_context_that_shows_while_waiting(seen_by: str) -> None:
    """Nothing but making the context current says so: no query reaches the driver."""
    driver, context = with_a_context()
    with rig(kvoffload.open_device(backend=driver, context=context)) as bench:
        held = bench.stream()
        bench.gate(held)
        jobs = [bench.engine.store([1], [1], after=held), bench.engine.load([1], [2], after=NO_WAIT)]
        assert int(driver.cuCtxDestroy(context)[0]) == 0
        if seen_by == "poll":
            assert [result.error is not None for result in bench.engine.poll()] == [True, True]
        elif seen_by == "done":
            assert [job.done for job in jobs] == [True, True]
        else:
            bench.engine.drain(1)
        _everything_ends(bench, jobs, failed=True)


# queries that fail


def _fail_queries(device: kvoffload.Device, count: int, call: str = "cuEventQuery") -> None:
    assert device.simulator is not None
    for nth in range(1, count + 1):
        device.simulator.faults.fail_call(call, nth=nth)


def test_one_query_error_harms_no_job() -> None:
    with simulated(1) as device, rig(device) as bench:
        job = bench.engine.store([1], [1])
        _fail_queries(device, 1)
        assert job.wait(10).error is None
        assert device.simulator.faults.pending == 0
        assert (bench.slot(1) == 2).all()
        bench.engine.store([2], [2]).wait(10)


def test_query_errors_with_answers_in_between_never_add_up() -> None:
    with simulated(1) as device, rig(device) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        job = bench.engine.store([1], [1], after=held)
        for _ in range(4):
            _fail_queries(device, 7)
            for _ in range(8):  # the eighth is answered
                assert not job.done
            assert device.simulator.faults.pending == 0
        gate.open()
        assert job.wait(10).error is None
        assert (bench.slot(1) == 2).all()


@pytest.mark.parametrize("call", ["cuEventQuery", "cuStreamQuery"])
def test_a_query_that_keeps_failing_is_a_loss_and_frees_nothing_under_queued_copies(call: str) -> None:
    """The host can learn no more of the GPU, which goes on: what its queued copies use has to stay."""
    device = simulated(1, "no-batch")
    simulator: Any = device.simulator
    with rig(device) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        if call == "cuStreamQuery":
            simulator.faults.fail_call("cuMemcpy2DAsync", nth=2)  # the job has no end to ask for, nor a marker instead:
            simulator.faults.fail_call("cuEventRecord", nth=3)  # after the one on the caller's stream and the start
        job = bench.engine.store([1, 2], [1, 2], after=held, copier="strided")
        first_slot, address = bench.slot(1), bench.engine._parts.memory.address
        nbytes = bench.engine._parts.memory.nbytes
        _fail_queries(device, 8, call)
        for _ in range(7):
            assert not job.done
        assert job.done
        with pytest.raises(TransferError):
            job.wait(1)
        with pytest.raises(TransferError, match=f"context is lost.*{call} returned"):
            bench.engine.store([1], [1])
        bench.engine.close(1)
        assert simulator.leaks()["registered_ranges"] == 2, "the pool, and the word of the gate"
        assert simulator.pending_operations() > 0
        del job
        gate.open()
        simulator.run_all()
        assert simulator.pending_operations() == 0
        assert (first_slot == 2).all(), "the copy that was queued"
        del first_slot
    bench.engine = None  # type: ignore[assignment]
    device.close()
    assert (address, nbytes) in space.MappedPages()
    assert simulator.violations == []

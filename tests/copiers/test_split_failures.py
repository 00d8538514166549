"""Split transfers of which something fails: the one job fails, when nothing of it is left; what follows is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from helpers import Rig, all_are, rig, simulated, whole
from splitting import HALF, OPTIONS, hold_the_kernel

from kvoffload import NO_WAIT, Direction, Job, KVOffloadError, TransferError
from kvoffload.tuning import CopyMethod

PUSH_POP = ("cuCtxPushCurrent", "cuCtxPopCurrent")  # a caller's stack cannot be put right when these lie
CREATE = "cuEventCreate"  # made and denied: nobody has the handle


def attempt(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The call's value, or None if it raised an error of the library's."""
    try:
        return call(*arguments, **options)
    except KVOffloadError:
        return None


def store(bench: Rig, first: int, after: Any = NO_WAIT) -> Job:
    """Eight blocks from `first` on, to slots 0 to 7."""
    return bench.engine.submit(Direction.STORE, range(first, first + 8), range(8), after=after, copier=HALF)


def load(bench: Rig, after: Any = NO_WAIT) -> Job:
    """Slots 0 to 7 to blocks 30 to 37."""
    return bench.engine.submit(Direction.LOAD, range(30, 38), range(8), after=after, copier=HALF)


def there_and_back(bench: Rig, first: int, streams: list[int]) -> tuple[Job | None, Job | None]:
    """A split store, a split load of the same slots, and an order after it; what came of them."""
    stored = attempt(store, bench, first, after=streams[0])
    loaded = attempt(load, bench, after=streams[0])
    if loaded is not None:
        attempt(loaded.order_before, streams[1])
    attempt(bench.engine.drain, 10)
    return stored, loaded


def slots_hold(bench: Rig, first: int) -> bool:
    return all(all_are(bench.slot(slot), first + slot + 1) for slot in range(8))


def blocks_hold(bench: Rig, first: int) -> bool:
    return all(all_are(bench.block(30 + index), first + index + 1) for index in range(8))


def _calls_of_a_clean_run(level: str) -> list[str]:
    with simulated(4, level) as device, rig(device, **OPTIONS) as bench:
        streams = [bench.stream(), bench.stream()]
        device.simulator.faults.calls = []
        there_and_back(bench, 2, streams)
        names = [name for name, _ in device.simulator.faults.calls]
        assert slots_hold(bench, 2)
        assert blocks_hold(bench, 2)
    return names


def _fail_once(level: str, nth: int, name: str, after: bool) -> None:
    with simulated(4, level) as device:
        simulator: Any = device.simulator
        with rig(device, **OPTIONS) as bench:
            streams = [bench.stream(), bench.stream()]
            simulator.faults.fail_nth(nth, after=after)
            stored, loaded = there_and_back(bench, 2, streams)
            assert simulator.faults.pending == 0, "the failure happened"
            simulator.faults.clear()
            bench.engine.drain(10)
            whole(bench.engine)
            assert bench.engine._parts.copiers._kernels is not None
            assert [arena.in_use for arena in bench.engine._parts.copiers._kernels.arenas] == [0, 0]
            if stored is None:
                assert all(all_are(bench.slot(slot), 100 + slot) for slot in range(8)), "it raised: nothing happened"
            elif stored.error is None:
                assert slots_hold(bench, 2)
                assert loaded is None or loaded.error is not None or blocks_hold(bench, 2)
            if loaded is None:
                assert blocks_hold(bench, 30)
            stored, loaded = there_and_back(bench, 12, streams)
            assert stored is not None
            assert loaded is not None
            assert (stored.error, loaded.error) == (None, None)
            assert slots_hold(bench, 12)
            assert blocks_hold(bench, 12)
        leaks = {kind: count for kind, count in simulator.leaks().items() if count}
    left = sum(simulator.leaks().values())
    assert left <= (1 if after and name == CREATE else 0), leaks
    assert simulator.violations == []


@pytest.mark.parametrize(
    ("level", "after"),
    [("batch", False), ("no-batch", False), ("batch", True)],
    ids=["batch, instead", "no batch, instead", "batch, afterwards"],
)
def test_pitfall_29_every_driver_call_of_a_split_fails_once(level: str, after: bool) -> None:
    names = _calls_of_a_clean_run(level)
    assert names.count("cuLaunchKernel") == 2
    wanted = {"cuLaunchKernel", "cuStreamWaitEvent", "cuEventRecord", "cuEventQuery", "cuEventElapsedTime"}
    assert {*wanted, "cuMemcpy3DBatchAsync" if level == "batch" else "cuMemcpy2DAsync"} <= set(names)
    seen: Counter[str] = Counter()
    for nth, name in enumerate(names, start=1):
        seen[name] += 1
        polled = name in ("cuEventQuery", *PUSH_POP, "cuThreadExchangeStreamCaptureMode")
        if (after and name in PUSH_POP) or (seen[name] > 2 and nth % (10 if polled else 2)):
            continue
        try:
            _fail_once(level, nth, name, after)
        except BaseException as error:
            error.add_note(f"failing call {nth} of {len(names)}, {name}")
            raise


# one at a time


@pytest.mark.parametrize("call", ["cuMemcpy3DBatchAsync", "cuStreamWaitEvent", "cuEventRecord"])
def test_a_split_whose_second_part_fails_keeps_its_slots_until_its_kernel_has_ended(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The kernel is queued; a driver call after it fails: the copies, the wait for the start, the last event."""
    nth = {"cuMemcpy3DBatchAsync": 1, "cuStreamWaitEvent": 1, "cuEventRecord": 3}[call]  # start, kernel's end, then end
    with simulated(5) as device, rig(device, **OPTIONS) as bench:
        gate = bench.gate()
        hold_the_kernel(monkeypatch, gate)
        device.simulator.faults.fail_call(call, nth=nth)
        job = store(bench, 2)
        assert job.error is not None
        assert device.simulator.faults.pending == 0
        bench.settle()
        assert not job.done, "its kernel is still queued"
        follower = bench.engine.submit(
            Direction.STORE, range(12, 20), range(8), after=NO_WAIT, copier=CopyMethod("strided")
        )
        chained = bench.engine.submit(
            Direction.LOAD, range(30, 38), range(8), after=NO_WAIT, copier=CopyMethod("strided")
        )
        bench.settle()
        assert not follower.done
        assert not chained.done
        assert all(all_are(bench.slot(slot), 100 + slot) for slot in range(4, 8)), "the kernel's share, not written yet"
        gate.open()
        with pytest.raises(TransferError, match=f"{call} returned CUDA_ERROR_UNKNOWN"):
            job.wait(10)
        bench.engine.drain(10)
        assert (follower.error, chained.error) == (None, None)
        assert slots_hold(bench, 12)
        assert blocks_hold(bench, 12)
        whole(bench.engine)


def test_a_kernel_that_the_driver_refuses_fails_the_job_and_nothing_runs() -> None:
    with simulated(5) as device, rig(device, **OPTIONS) as bench:
        simulator: Any = device.simulator
        simulator.faults.fail_call("cuLaunchKernel")
        simulator.faults.calls = []
        job = store(bench, 2)
        with pytest.raises(TransferError, match="cuLaunchKernel returned CUDA_ERROR_UNKNOWN"):
            job.wait(10)
        assert "cuMemcpy3DBatchAsync" not in [name for name, _ in simulator.faults.calls]
        assert all(all_are(bench.slot(slot), 100 + slot) for slot in range(8))
        store(bench, 2).wait(10)
        assert slots_hold(bench, 2)


@pytest.mark.parametrize("nth", range(1, 40, 3))
def test_a_context_lost_during_a_split_ends_every_job(nth: int) -> None:
    device = simulated(6)
    simulator: Any = device.simulator
    with rig(device, **OPTIONS) as bench:
        streams = [bench.stream(), bench.stream()]
        simulator.faults.sticky(at_call=nth)
        stored, loaded = there_and_back(bench, 2, streams)
        bench.engine.drain(10)
        assert all(job is None or job.done for job in (stored, loaded))
        assert bench.engine.statistics().in_flight == 0
        if simulator.faults.pending == 0 and any(context.error for context in simulator.contexts.values()):
            with pytest.raises(TransferError, match="context is lost"):
                store(bench, 2)
        bench.streams.clear()
        bench.engine.close(10)
    device.close(10)
    assert simulator.violations == []


@pytest.mark.parametrize("nth", [1, 2])
def test_a_copy_that_faults_on_the_gpu_fails_the_split(nth: int) -> None:
    """Not at the call: when the copy engine's part of the store, or of the load, runs."""
    device = simulated(7)
    with rig(device, **OPTIONS) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        stored, loaded = store(bench, 2, after=held), load(bench, after=held)
        device.simulator.faults.fail_operation(nth)
        gate.open()
        bench.engine.drain(10)
        assert loaded.error is not None
        assert stored.error is not None or nth == 2
        with pytest.raises(TransferError, match="context is lost"):
            load(bench)
        bench.streams.clear()
        bench.engine.close(10)
    device.close(10)
    assert device.simulator.violations == []

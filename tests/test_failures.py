"""Every driver call fails once, before and after it did its work; contexts are lost; memory is short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import LEVELS, Rig, no_leaks, rig, simulated, whole

import kvoffload
from kvoffload import (
    NO_WAIT,
    BlockCache,
    CapacityError,
    DriverError,
    KVLayout,
    KVOffloadError,
    OffloadEngine,
    TransferError,
    memory,
    streams,
)
from kvoffload.copiers import loop, strided

PUSH_POP = ("cuCtxPushCurrent", "cuCtxPopCurrent")  # a caller's stack cannot be put right when these lie
CREATE = ("cuStreamCreateWithPriority", "cuEventCreate")  # made and denied: nobody has the handle

# what such a call was to give back is lost when it fails: nobody knows how much of it was done
LETTING_GO = ("cuStreamDestroy", "cuEventDestroy", "cuMemHostUnregister", "cuMemFree", "cuDevicePrimaryCtxRelease")


@pytest.fixture(autouse=True)
def _several_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short queues and small pieces, so that a few transfers use several streams and the links between them."""
    monkeypatch.setattr(streams, "QUEUE_LIMIT", 12)
    monkeypatch.setattr(strided.StridedCopier, "piece_operations", 2)
    monkeypatch.setattr(loop.LoopCopier, "piece_operations", 4)


class Check(NamedTuple):
    """One attempt: what it should have written, and where."""

    job: kvoffload.Job | None  # None: the call raised
    sources: tuple[kvoffload.Job | None, ...]  # jobs whose failure spoils what this one copied
    target: Callable[[], Any]
    before: int
    after: int


class Program:
    """A caller's program over one device: an engine, streams of its own, and a cache over two groups."""

    def __init__(self, bench: Rig) -> None:
        self.bench = bench
        self.streams = [bench.stream(), bench.stream()]
        planes = [bench.device.allocate_planes(2, block_bytes=48, num_blocks=8) for _ in range(2)]
        self.cache_planes = planes
        self.cache_engine = OffloadEngine(KVLayout(planes), device=bench.device, num_slots=6)
        self.cache = BlockCache(self.cache_engine)
        self.errors: list[Exception] = []
        self.stored: dict[bytes, kvoffload.CacheJob] = {}

    def attempt(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The call's value, or None if it raised an error of the library's."""
        try:
            return call(*arguments, **options)
        except KVOffloadError as error:
            self.errors.append(error)
            return None

    def run(self, offset: int = 0) -> list[Check]:
        """Stores and loads by every copier, chained, ordered with streams; `offset` picks fresh slots and blocks."""
        engine = self.bench.engine
        copiers = [name for name in ("strided", "batch", "loop") if name in engine._copiers]
        checks = [
            check
            for index, copier in enumerate(copiers)
            for check in self.there_and_back(copier, 4 * index + offset, 2 * index + offset)
        ]
        self.attempt(engine.poll)
        self.run_cache(offset)
        for each in (engine, self.cache_engine):
            self.attempt(each.drain, 10)
        self.attempt(engine.poll)
        return checks

    def there_and_back(self, copier: str, low: int, slot: int) -> list[Check]:
        """Store blocks `low` and `low + 1`; load the first of them, and a slot of old, into the next two."""
        bench, engine = self.bench, self.bench.engine
        store = self.attempt(engine.store, [low, low + 1, 30], [slot, slot + 1, 30], copier=copier)
        after = self.streams[0]
        load = self.attempt(engine.load, [slot, 20], [low + 2, low + 3], after=after, copier=copier)
        if load is not None:
            self.attempt(load.order_before, self.streams[1])
        return [
            Check(store, (), partial(bench.slot, slot), 100 + slot, low + 1),
            Check(load, (store,), partial(bench.block, low + 2), low + 3, low + 1),
            Check(load, (), partial(bench.block, low + 3), low + 4, 120),
        ]

    def run_cache(self, offset: int) -> None:
        for number in range(3):
            key = b"%d" % (number + offset)
            job = self.attempt(self.cache.store, [key], [[number], [number + 1]], after=self.streams[0])
            if job is not None:
                self.stored[key] = job
        first = [b"%d" % offset]
        self.attempt(self.cache.load, first, [[5], [6]], after=NO_WAIT)
        self.attempt(self.cache.lookup, first)

    def verify(self, checks: list[Check], *, all_well: bool) -> None:
        """Every pool is whole; what succeeded is right, and what raised has done nothing."""
        for engine in (self.bench.engine, self.cache_engine):
            engine.drain(10)
            whole(engine)
            engine.poll()
        self.cache.check()
        for check in checks:
            failed = check.job is None or check.job.error is not None
            if all_well:
                assert not failed, check.job and check.job.error
            if any(each is None or each.error is not None for each in check.sources):
                continue
            if check.job is None:
                assert (check.target() == check.before).all(), "the call raised, so nothing may have happened"
            elif not failed:
                assert (check.target() == check.after).all()
            assert check.job is None or check.job.finished
        for key, job in self.stored.items():
            failed = any(each.error is not None for each in job.jobs)
            assert (self.cache.lookup([key]) == 0) or not failed, "a failed store is never visible"
            if all_well:
                assert self.cache.lookup([key]) == 1
        self.stored.clear()

    def close(self) -> None:
        self.cache_engine.close(10)


@contextmanager
def program(level: str = "batch", **options: Any) -> Iterator[Program]:
    device = simulated(3, level, **options)
    with rig(device, num_blocks=40, num_slots=40) as bench:
        made = Program(bench)
        yield made
        made.close()
    device.close()


def _calls_of_a_clean_run(level: str) -> list[str]:
    with program(level) as made:
        simulator = _simulator(made)
        simulator.faults.calls = []
        checks = made.run()
        names = [name for name, _ in simulator.faults.calls]
        made.verify(checks, all_well=True)
    no_leaks(simulator)
    return names


def _simulator(made: Program) -> Any:
    assert made.bench.device.simulator is not None
    return made.bench.device.simulator


def _fail_once(level: str, nth: int, name: str, *, after: bool) -> None:
    with program(level) as made:
        simulator = _simulator(made)
        simulator.faults.fail_nth(nth, after=after)
        checks = made.run()
        assert simulator.faults.pending == 0, "the failure happened"
        simulator.faults.clear()
        made.verify(checks, all_well=False)
        made.bench.engine.poll()
        made.verify(made.run(offset=12), all_well=True)
    leaks = {kind: count for kind, count in simulator.leaks().items() if count}
    tolerated = 1 if after and name in CREATE else 0
    assert sum(leaks.values()) <= tolerated, leaks
    assert simulator.violations == []


SHARDS = 2  # so that two workers share the work


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("after", [False, True], ids=["instead", "afterwards"])
@pytest.mark.parametrize("level", LEVELS)
def test_pitfall_29_every_driver_call_fails_once(level: str, after: bool, shard: int) -> None:
    """The one job fails or the one call raises; the engine goes on, and nothing leaks."""
    names = _calls_of_a_clean_run(level)
    assert {"cuStreamWaitEvent", "cuEventRecord", "cuEventQuery", "cuEventElapsedTime"} <= set(names)
    seen: Counter[str] = Counter()
    stride = 2 if level == "batch" and not after else 5
    tried = 0
    for nth, name in enumerate(names, start=1):
        seen[name] += 1
        if after and name in PUSH_POP:
            continue
        polled = name in ("cuEventQuery", "cuStreamQuery", *PUSH_POP)
        if (seen[name] > 2 and nth % (5 * stride if polled else stride)) or nth % SHARDS != shard:
            continue
        tried += 1
        try:
            _fail_once(level, nth, name, after=after)
        except BaseException as error:
            error.add_note(f"failing call {nth} of {len(names)}, {name}, level {level}")
            raise
    assert tried > 5


# one call at a time, by name


@pytest.mark.parametrize("call", ["cuMemcpy3DBatchAsync", "cuStreamWaitEvent", "cuEventRecord"])
def test_a_failed_submission_fails_the_job_and_says_why(call: str) -> None:
    with simulated(1) as device, rig(device) as bench:
        assert device.simulator is not None
        device.simulator.faults.fail_call(call)
        job = bench.engine.store([1], [1])
        with pytest.raises(TransferError, match=f"{call} returned CUDA_ERROR_UNKNOWN") as caught:
            job.wait(10)
        assert isinstance(caught.value.__cause__, DriverError)
        assert caught.value.__cause__.name == "CUDA_ERROR_UNKNOWN"
        assert bench.engine.statistics().store.failed == 1
        assert bench.engine.poll() == []
        bench.engine.store([1], [1]).wait(10)
        whole(bench.engine)


def test_a_failed_job_is_polled_once_with_its_error() -> None:
    with simulated(1) as device, rig(device) as bench:
        assert device.simulator is not None
        device.simulator.faults.fail_call("cuMemcpy3DBatchAsync")
        job = bench.engine.store([1], [1])
        bench.engine.drain(10)
        (result,) = bench.engine.poll()
        assert (result.job_id, result.error) == (job.id, job.error)
        assert bench.engine.poll() == []


def test_a_failed_job_keeps_its_slots_until_nothing_of_it_is_left() -> None:
    with simulated(1, "no-batch") as device, rig(device) as bench:
        assert device.simulator is not None
        held = bench.stream()
        gate = bench.gate(held)
        device.simulator.faults.fail_call("cuMemcpy2DAsync", nth=3)
        job = bench.engine.store(range(4), range(4), after=held)
        bench.settle()
        assert job.error is not None
        assert not job.done, "two copies are still queued"
        with pytest.raises(TimeoutError):
            job.wait(0.01)
        gate.open()
        with pytest.raises(TransferError):
            job.wait(10)
        whole(bench.engine)


def test_a_query_that_keeps_failing_does_not_hang() -> None:
    """An engine that can no longer learn anything from its GPU gives up instead of waiting for ever."""
    with simulated(1) as device, rig(device) as bench:
        assert device.simulator is not None
        held = bench.stream()
        gate = bench.gate(held)
        job = bench.engine.store([1], [1], after=held)
        for _ in range(100):
            device.simulator.faults.fail_call("cuEventQuery")
        for nth in range(1, 101):
            device.simulator.faults.fail_call("cuEventQuery", nth=nth)
        with pytest.raises(TransferError):
            job.wait(10)
        device.simulator.faults.clear()
        gate.open()
        bench.settle()


def test_an_interrupted_submission_leaves_nothing_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C inside a copier: the exception comes out, and the books are right once the GPU is through."""
    with program() as made:
        copier: Any = made.cache_engine._copiers["strided"]
        submit = copier.submit

        def interrupted(*arguments: Any) -> None:
            submit(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(copier, "submit", interrupted)
        monkeypatch.setattr(made.cache_engine._copiers["batch"], "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.cache.store([b"a"], [[1], [1]], after=NO_WAIT)
        monkeypatch.undo()
        assert made.cache.lookup([b"a"]) == 0
        made.cache.check()
        made.cache_engine.drain(10)
        made.cache.check()
        whole(made.cache_engine)
        made.cache.store([b"a", b"b", b"c"], [[1, 2, 3], [1, 2, 3]]).wait(10)
        made.cache.check()
        assert made.cache.lookup([b"a", b"b", b"c"]) == 3


# a lost context


@pytest.mark.parametrize("how", ["copy", "operation", "call"])
def test_a_lost_context_poisons_the_engine_with_one_exception(how: str) -> None:
    with program() as made:
        simulator, engine = _simulator(made), made.bench.engine
        gate = made.bench.gate(made.streams[0])
        running = [engine.store([index], [index], after=made.streams[0]) for index in range(4)]
        if how == "copy":
            simulator.faults.fail_operation()
        elif how == "operation":
            simulator.faults.sticky()
        else:
            simulator.faults.sticky(at_call=2)  # the first one finds the context
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
        _simulator(made).faults.sticky(at_call=nth)
        checks = made.run()
        for engine in (made.bench.engine, made.cache_engine):
            engine.drain(10)
        assert all(check.job is None or check.job.done for check in checks)
        made.cache.check()
        if any(context.error for context in _simulator(made).contexts.values()):
            with pytest.raises(TransferError, match="context is lost"):
                made.bench.engine.store([1], [1])
            made.bench.streams.clear()
        else:  # no context was current when the call was made
            made.bench.engine.store([1], [1]).wait(10)


def test_a_lost_context_leaves_another_device_of_the_process_alone() -> None:
    driver = kvoffload.driver.simulator.SimulatedDriver(device_count=2)
    first, second = (kvoffload.open_device(index, backend=driver) for index in range(2))
    with rig(first) as lost, rig(second) as healthy:
        driver.faults.fail_operation()
        with pytest.raises(TransferError):
            lost.engine.store([1], [1]).wait(10)
        healthy.engine.store([1], [1]).wait(10)
        assert (healthy.slot(1) == 2).all()
    first.close()
    second.close()


# making and closing things


def test_every_call_of_making_an_engine_fails_once() -> None:
    with simulated(2) as device:
        layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)])
        simulator = device.simulator
        assert simulator is not None
        before = simulator.leaks()
        simulator.faults.calls = []
        OffloadEngine(layout, device=device, num_slots=2).close()
        for nth in range(1, len(simulator.faults.calls) + 1):
            simulator.faults.fail_nth(nth)
            try:
                OffloadEngine(layout, device=device, num_slots=2).close()
            except KVOffloadError:
                pass
            simulator.faults.clear()
            device.reclaim()
            name = simulator.faults.calls[nth - 1][0]
            left = sum(simulator.leaks().values()) - sum(before.values())
            assert left == (1 if name in LETTING_GO else 0), name
            before = simulator.leaks()


def test_every_call_of_opening_a_device_fails_once() -> None:
    driver = kvoffload.driver.simulator.SimulatedDriver()
    driver.faults.calls = []
    kvoffload.open_device(backend=driver).close()
    for nth, (name, _) in enumerate(list(driver.faults.calls), start=1):
        driver.faults.fail_nth(nth)
        try:
            kvoffload.open_device(backend=driver).close()
        except KVOffloadError:
            pass
        driver.faults.clear()
        tolerated = 1 if name == "cuDevicePrimaryCtxRelease" else 0  # the very call that lets go
        assert driver.leaks()["primary_retains"] <= tolerated, name
        if driver.leaks()["primary_retains"]:
            driver.cuDevicePrimaryCtxRelease(0)


def _used_device() -> kvoffload.Device:
    device = simulated(5)
    bench_planes = device.allocate_planes(2, block_bytes=64, num_blocks=4)
    engine = OffloadEngine(KVLayout([bench_planes]), device=device, num_slots=4)
    for index in range(3):
        engine.store([index], [index])
        engine.load([index], [index])
    engine.drain(10)
    device.allocate(100)
    return device


def test_every_call_of_closing_fails_once_and_closing_again_finishes() -> None:
    device = _used_device()
    assert device.simulator is not None
    device.simulator.faults.calls = []
    device.close()
    names = [name for name, _ in device.simulator.faults.calls]
    for nth, name in enumerate(names, start=1):
        device = _used_device()
        simulator = device.simulator
        assert simulator is not None
        simulator.faults.fail_nth(nth)
        try:
            device.close()
        except KVOffloadError:
            pass
        simulator.faults.clear()
        device.close()
        left = sum(simulator.leaks().values())
        assert left <= (1 if name in LETTING_GO else 0), (name, nth, simulator.leaks())
        assert simulator.violations == []


# memory


def test_pitfall_19_a_pool_that_cannot_be_pinned_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PIECE_BYTES", 8 * 4096)
    with simulated(1, pinnable_bytes=40 * 4096) as device:
        layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)])
        seen: list[int] = []
        with pytest.raises(CapacityError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            OffloadEngine(layout, device=device, num_slots=64, progress=lambda done, _: seen.append(done))
        assert len(seen) == 5, "five pieces were pinned before the sixth failed"
        assert device.simulator is not None
        assert device.simulator.leaks()["registered_ranges"] == 0
        with OffloadEngine(layout, device=device, num_slots=40) as engine:
            engine.store([1], [39]).wait(10)
    no_leaks(device.simulator)


def test_a_progress_callback_that_raises_is_rolled_back() -> None:
    def stop(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with simulated(1) as device:
        layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4)])
        with pytest.raises(KeyboardInterrupt):
            OffloadEngine(layout, device=device, num_slots=4, progress=stop)
        assert device.simulator is not None
        assert device.simulator.leaks()["registered_ranges"] == 0


def test_device_memory_that_runs_out_is_a_capacity_error() -> None:
    with simulated(1, memory_bytes=1 << 20) as device:
        with pytest.raises(CapacityError, match="1048576 of 1048576 bytes are free"):
            device.allocate(1 << 21)
        buffer = device.allocate(1 << 20)
        del buffer
        device.allocate(1 << 20)


def test_failed_transfers_do_not_spoil_bytes_of_others() -> None:
    """Random failures among many transfers: whatever is reported as done is right."""
    rng = np.random.default_rng(7)
    with simulated(6) as device, rig(device, num_blocks=40, num_slots=40) as bench:
        assert device.simulator is not None
        for _ in range(60):
            slot, block = int(rng.integers(40)), int(rng.integers(40))
            device.simulator.faults.clear()
            if rng.random() < 0.4:
                device.simulator.faults.fail_nth(int(rng.integers(1, 12)))
            bench.engine.slots[slot] = 200
            try:
                bench.engine.store([block], [slot]).wait(10)
            except KVOffloadError:
                continue
            assert (bench.slot(slot) == block + 1).all()
        device.simulator.faults.clear()
        bench.engine.drain(10)
        whole(bench.engine)

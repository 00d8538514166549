"""Closing in any order, what is left to garbage collection, and that the checks for leaks find some."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from cuda.bindings import driver as cuda
from helpers import held_stream, in_threads
from strategies import engine_on

import kvoffload
from kvoffload import CapacityError, ClosedError, KVLayout, OffloadEngine
from kvoffload.driver import address_of
from kvoffload.engine.shard import Shard
from kvoffload.simulator import space
from kvoffload.testing import SimulatedDriver, SimulatorError, check_clean_close, leak_check

DEVICE_WARNING = "a Device was never closed"
ENGINE_WARNING = "an OffloadEngine was never closed"


@contextmanager
def warned(*expected: str) -> Iterator[None]:
    """Check that these ResourceWarnings are given inside, in this order, and no others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [each.category for each in caught] == [ResourceWarning] * len(caught)
    texts = [str(each.message) for each in caught]
    assert len(texts) == len(expected), texts
    assert all(text in got for text, got in zip(expected, texts, strict=True)), texts


def left(simulator: SimulatedDriver) -> dict[str, int]:
    """What is alive on a simulated driver, without the zeros."""
    return {kind: count for kind, count in simulator.leaks().items() if count}


# order


def test_close_in_every_order(seed: int) -> None:
    for order in ("engine first", "device first", "buffer first", "device only"):
        device = kvoffload.open_device(backend=SimulatedDriver(seed=seed))
        engine, buffer = engine_on(device), device.allocate(64)
        slots = engine.slots
        engine.store(range(8), range(8))
        if order == "engine first":
            engine.close()
        elif order == "buffer first":
            buffer.close()
        check_clean_close(device)
        engine.close()
        buffer.close()
        device.close()
        assert (device.closed, slots.shape) == (True, (8, 4096))


def test_a_closed_device_refuses_every_use_and_says_so(seed: int) -> None:
    device = kvoffload.open_device(backend=SimulatedDriver(seed=seed))
    engine, buffer = engine_on(device), device.allocate(64)
    check_clean_close(device)
    layout = engine.layout
    for use in (
        lambda: device.allocate(5),
        lambda: device.allocate_planes(1, block_bytes=1, num_blocks=1),
        lambda: OffloadEngine(layout, device=device, num_slots=1),
        lambda: engine.store([0], [0]),
        buffer.to_numpy,
        device.reclaim,
        device.current,
    ):
        with pytest.raises(ClosedError, match="closed"):
            use()


def test_an_error_inside_with_still_closes(seed: int) -> None:
    device = kvoffload.open_device(backend=SimulatedDriver(seed=seed))

    def fail() -> None:
        with device, engine_on(device) as engine:
            engine.store([0], [0])
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert device.closed
    assert left(device.simulator) == {}


# time


def test_the_engines_of_a_device_share_one_deadline(device: kvoffload.Device) -> None:
    engines = [engine_on(device) for _ in range(4)]
    with ExitStack() as held:
        timers = []
        for number, engine in enumerate(engines, 1):
            stream, gate = held.enter_context(held_stream(device))
            engine.store([0], [0], after=stream)
            timers.append(threading.Timer(0.15 * number, gate.open))
        for timer in timers:
            timer.start()  # each engine alone would be in time
        with pytest.raises(TimeoutError):
            device.close(timeout=0.3)
        for timer in timers:
            timer.join()


def test_a_close_takes_only_what_the_other_engines_have_left_of_the_time(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [engine_on(device) for _ in range(3)]
    given: list[float] = []
    close = Shard.close

    def slowly(engine: Shard, timeout: float | None = None) -> None:
        assert timeout is not None
        given.append(timeout)
        time.sleep(0.05)
        close(engine, timeout)

    monkeypatch.setattr(Shard, "close", slowly)
    device.close(timeout=20)
    assert len(engines) == len(given) == 3
    assert 20 >= given[0] > given[0] - 0.04 > given[1] > given[1] - 0.04 > given[2] > 15


# threads


def test_two_threads_that_close_one_device_release_its_context_once(seed: int) -> None:
    simulator = SimulatedDriver(seed=seed)
    other = kvoffload.open_device(backend=simulator)  # a second release would take the context from it
    for _ in range(20):
        device = kvoffload.open_device(backend=simulator)
        engine = engine_on(device)
        engine.store([0], [0])
        simulator.faults.delay("cuDevicePrimaryCtxRelease", 0.002)
        before = simulator.call_count["cuDevicePrimaryCtxRelease"]
        in_threads(*[device.close] * 3)
        assert simulator.call_count["cuDevicePrimaryCtxRelease"] == before + 1
        assert left(simulator) == {"primary_retains": 1}
    check_clean_close(other)


@pytest.mark.parametrize("slow", ["cuMemAlloc", "cuMemFree", "cuDevicePrimaryCtxRelease"])
def test_an_allocation_that_races_a_close_leaves_nothing_behind(seed: int, slow: str) -> None:
    for attempt in range(8):
        device = kvoffload.open_device(backend=SimulatedDriver(seed=seed))
        kept: list[Any] = [device.allocate(64)]
        device.simulator.faults.delay("cuMemAlloc", 0.001)
        device.simulator.faults.delay(slow, 0.004)

        def allocate(device: kvoffload.Device = device, kept: list[Any] = kept) -> None:
            while True:
                kept.append(device.allocate(64))

        def close(device: kvoffload.Device = device, pause: float = 0.002 * attempt) -> None:
            time.sleep(pause)
            device.close()

        with pytest.raises(ClosedError):
            in_threads(allocate, close)
        assert left(device.simulator) == {}
        assert device.simulator.violations == []


def test_an_engine_made_while_its_device_closes_is_closed_or_refused(seed: int) -> None:
    for attempt in range(8):
        device = kvoffload.open_device(backend=SimulatedDriver(seed=seed))
        layout = KVLayout([device.allocate_planes(1, block_bytes=64, num_blocks=8)])
        device.simulator.faults.delay("cuMemHostRegister", 0.003)
        made: list[OffloadEngine] = []

        def make(device: kvoffload.Device = device, layout: KVLayout = layout, made: list[Any] = made) -> None:
            while True:
                made.append(OffloadEngine(layout, device=device, num_slots=2))

        def close(device: kvoffload.Device = device, pause: float = 0.001 * attempt) -> None:
            time.sleep(pause)
            device.close()

        with pytest.raises(ClosedError):
            in_threads(make, close)
        assert left(device.simulator) == {}
        with pytest.raises(ClosedError):
            OffloadEngine(layout, device=device, num_slots=2)
        for engine in made:
            engine.close()


def test_no_other_thread_closes_a_device_that_frees_what_was_dropped(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its context would be gone in the middle: a DriverError in place of a ClosedError."""
    refused = []

    def close() -> None:
        with pytest.raises(TimeoutError, match="another thread opens or closes an engine"):
            device.close(timeout=0.01)
        refused.append(True)

    monkeypatch.setattr(kvoffload.Device, "advance_engines", lambda _: in_threads(close))
    device.stream().close()
    assert refused == [True]


def test_an_engine_closes_while_another_thread_keeps_submitting(seed: int) -> None:
    device = kvoffload.open_device(backend=SimulatedDriver(seed=seed))
    engine = engine_on(device)
    submitted: list[kvoffload.Job] = []

    def submit() -> None:
        while True:
            try:
                submitted.append(engine.store([0, 1], [0, 1], after=kvoffload.NO_WAIT))
            except CapacityError:
                engine.poll()

    def close() -> None:
        while not submitted:
            time.sleep(0.001)
        engine.close(timeout=20)

    with pytest.raises(ClosedError, match=r"^the engine is (being )?closed(:|$)"):
        in_threads(submit, close)
    assert all(job.done and job.error is None for job in submitted)
    assert left(device.simulator) == {"device_allocations": 1, "primary_retains": 1}
    check_clean_close(device)


def test_an_engine_that_closes_takes_no_transfers_while_it_waits_for_the_others(device: kvoffload.Device) -> None:
    engine = engine_on(device)
    closing = threading.Thread(target=engine.close)

    def submit() -> None:
        deadline = time.perf_counter() + 5
        while time.perf_counter() < deadline:
            engine.store([1], [1])

    with held_stream(device) as (stream, _):
        job = engine.store([0], [0], after=stream)
        closing.start()
        with pytest.raises(ClosedError, match="the engine is being closed"):
            submit()
        assert closing.is_alive()
    closing.join(20)
    assert job.done
    with pytest.raises(ClosedError, match="the engine is closed"):
        engine.store([1], [1])


# forgotten


@pytest.mark.parametrize("chance", ["reclaim", "allocate", "engine", "close"])
def test_every_implicit_collection_frees_a_forgotten_engine(device: kvoffload.Device, chance: str) -> None:
    planes = device.allocate_planes(1, block_bytes=64, num_blocks=8)
    engine_on(device)
    gc.collect()
    with warned(ENGINE_WARNING):
        if chance == "reclaim":
            device.reclaim()
        elif chance == "allocate":
            device.allocate(64).close()
        elif chance == "engine":
            OffloadEngine(KVLayout([planes]), device=device, num_slots=1).close()
        else:
            device.close()
    assert device.simulator.leaks()["registered_ranges"] == 0


def test_what_cannot_be_freed_is_a_warning_and_not_the_callers_error(device: kvoffload.Device) -> None:
    device.allocate(64)
    gc.collect()
    device.simulator.faults.fail_call("cuMemFree", after=True)
    with warned("a resource whose owner is garbage could not be freed: cuMemFree returned"):
        buffer = device.allocate(32)
    assert buffer.to_numpy().shape == (32,)


def forget_a_device(simulator: SimulatedDriver, *, in_flight: bool) -> int:
    """Open a device with a buffer and an engine and lose them; the address of the pool."""
    device = kvoffload.open_device(backend=simulator)
    device.allocate(64)
    engine = engine_on(device)
    job = engine.store([0], [0])
    if not in_flight:
        job.wait(10)
    return address_of(engine.slots)


def test_a_device_forgotten_with_a_transfer_in_flight_is_freed_after_it_has_ended(seed: int) -> None:
    simulator = SimulatedDriver(seed=seed)
    address = forget_a_device(simulator, in_flight=True)
    gc.collect()
    assert simulator.memory.at(address) is not None
    deadline = time.perf_counter() + 3
    with warned(ENGINE_WARNING, DEVICE_WARNING):
        while left(simulator):
            assert time.perf_counter() < deadline, left(simulator)
            kvoffload.open_device(backend="simulated").close()
            gc.collect()
    assert simulator.violations == []


def test_a_later_engine_at_the_address_of_a_forgotten_one_can_pin_again(seed: int) -> None:
    """The pool of a forgotten device must stay mapped while it is registered, and be unregistered before it goes."""
    simulator = SimulatedDriver(seed=seed)
    seen = set()
    for _ in range(30):
        seen.add(forget_a_device(simulator, in_flight=False))
        gc.collect()
        registered = [each for each in simulator.memory.live() if not each.on_device]
        assert len(registered) == 1
        assert all(simulator.memory.mapped(each.base, each.nbytes) for each in registered)
        with warned(ENGINE_WARNING, DEVICE_WARNING):
            kvoffload.open_device(backend=simulator).close()
        assert left(simulator) == {}
    assert len(seen) < 30  # Linux hands the same addresses out again
    assert simulator.violations == []


def test_a_forgotten_device_that_cannot_be_freed_does_not_keep_the_next_one_from_opening(seed: int) -> None:
    simulator = SimulatedDriver(seed=seed)
    forget_a_device(simulator, in_flight=False)
    gc.collect()
    simulator.faults.fail_call("cuMemHostUnregister", error=cuda.CUresult.CUDA_ERROR_INVALID_VALUE)
    simulator.faults.fail_call("cuMemFree", after=True)
    with warned(
        ENGINE_WARNING, "a resource whose owner is garbage could not be freed: cuMemFree returned", DEVICE_WARNING
    ):
        opened = kvoffload.open_device(backend="simulated")
    opened.close()
    assert left(simulator) == {}  # unpinning was tried again, and freeing had been done in spite of its error


def test_warnings_that_are_errors_do_not_stop_the_freeing(seed: int) -> None:
    simulator = SimulatedDriver(seed=seed)
    forget_a_device(simulator, in_flight=False)
    gc.collect()
    with pytest.raises(ResourceWarning, match="was never closed"):  # the tests' filter makes it an error
        kvoffload.open_device(backend="simulated")
    assert left(simulator) == {}


# the checks themselves


def test_the_clean_close_check_finds_what_it_should() -> None:
    device = kvoffload.open_device(backend="simulated")
    with device.current():
        stream = device.driver.stream_create(0)
    with pytest.raises(AssertionError, match="'streams': 1"):
        check_clean_close(device)
    assert stream
    device = kvoffload.open_device(backend="simulated")
    buffer = device.allocate(64)
    beside = space.view(buffer.address + 64, 1)
    before = int(beside[0])
    beside[:] = before ^ 255
    with pytest.raises(SimulatorError, match="bytes next to the device allocation"):
        check_clean_close(device)
    beside[:] = before
    device.simulator.violations.clear()
    check_clean_close(device)


def test_the_leak_check_finds_what_it_should(device: kvoffload.Device) -> None:
    kept: list[Any] = []
    with pytest.raises(AssertionError, match=r"device_allocations: 0 before, 1 after"), leak_check(device):
        kept.append(device.allocate(5))
    with pytest.raises(AssertionError, match=r"file descriptors: \d+ before"), leak_check(device):
        kept.append(open("/dev/null"))  # noqa: SIM115
    kept[-1].close()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    with pytest.raises(AssertionError, match="threads: "), leak_check(device):
        thread.start()
    stop.set()
    thread.join()

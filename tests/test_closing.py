"""Closing in any order, what is left to garbage collection, and that the checks for leaks find some."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from strategies import engine_on

import kvoffload
from kvoffload import ClosedError, OffloadEngine
from kvoffload.driver.simulator import space
from kvoffload.memory import address_of
from kvoffload.testing import SimulatorError, check_clean_close, leak_check


def test_close_in_every_order(seed: int) -> None:
    for order in ("engine first", "device first", "buffer first", "device only"):
        device = kvoffload.open_device(backend="simulated", seed=seed)
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
    device = kvoffload.open_device(backend="simulated", seed=seed)
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


def test_a_close_that_runs_out_of_time_frees_nothing_and_can_be_repeated(device: kvoffload.Device) -> None:
    engine = engine_on(device)
    word = engine.slots[7, :4].view(np.uint32)
    word[0] = 0
    with device.current():
        gate = device.driver.stream_create(0)
        device.driver.call("cuStreamWaitValue32", gate, address_of(word), 1, 0)
    engine.store([0], [0], after=gate)
    with pytest.raises(TimeoutError):
        device.close(timeout=0.05)
    assert not device.closed
    assert device.simulator.leaks()["registered_ranges"] == 1
    word[0] = 1
    engine.drain(10)
    with device.current():
        device.driver.stream_destroy(gate)


def test_garbage_engines_are_taken_apart_at_the_next_chance(device: kvoffload.Device) -> None:
    with leak_check(device):
        for _ in range(3):
            engine = engine_on(device)
            engine.store([0], [0])
            del engine
        gc.collect()
        deadline = 200
        while device.simulator.leaks()["registered_ranges"] and deadline:
            device.reclaim()
            gc.collect()
            deadline -= 1
        assert deadline


def test_an_error_inside_with_still_closes(seed: int) -> None:
    device = kvoffload.open_device(backend="simulated", seed=seed)

    def fail() -> None:
        with device, engine_on(device) as engine:
            engine.store([0], [0])
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert device.closed
    assert not any(device.simulator.leaks().values())


def test_the_clean_close_check_finds_what_it_should() -> None:
    device = kvoffload.open_device(backend="simulated")
    with device.current():
        stream = device.driver.stream_create(0)
    with pytest.raises(AssertionError, match="'streams': 1"):
        check_clean_close(device)
    assert stream
    device = kvoffload.open_device(backend="simulated")
    buffer = device.allocate(64)
    space.view(buffer.address + 64, 1)[:] = 0
    with pytest.raises(SimulatorError, match="bytes beside the device allocation"):
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

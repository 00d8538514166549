"""Pools that grow while the engine serves: what may be used when, and what happens where growth ends early."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from growing import SECONDS, Pieces, grows, wait_for, wait_for_the_end
from helpers import COPY_ENGINE_ONLY, Bytes, copiers_in, number_blocks, simulated
from programs import run_program

import kvoffload
from kvoffload import (
    NO_WAIT,
    CapacityError,
    Direction,
    GroupTransfer,
    Growing,
    HostMemory,
    KVLayout,
    OffloadEngine,
    ShardedEngine,
    TransferError,
)
from kvoffload.device import pinned
from kvoffload.device.pinned import PAGE_BYTES
from kvoffload.internal import hostinfo
from kvoffload.testing import SimulatedDriver, check_clean_close, leak_check

SLOTS, BLOCKS = 12, 32


def layout_on(device: kvoffload.Device, planes: int = 2) -> KVLayout:
    """A slot has 4096 bytes. Block `b` of every plane is filled with `b + 1`."""
    made = device.allocate_planes(planes, block_bytes=64, num_blocks=BLOCKS)
    number_blocks(made, 1)
    return KVLayout([made])


def registered(device: kvoffload.Device) -> list[tuple[int, int]]:
    """Address and bytes of every range that was registered since `faults.calls` was set."""
    return [(args[0], args[1]) for name, args in device.simulator.faults.calls if name == "cuMemHostRegister"]


@contextmanager
def growing(
    device: kvoffload.Device, slots: int = SLOTS, piece_slots: int = 2, **options: Any
) -> Iterator[tuple[OffloadEngine, Pieces]]:
    """An engine with two pieces pinned."""
    pieces = Pieces()
    options = {**COPY_ENGINE_ONLY, "progress": pieces, **options}
    pool = grows(slots, PAGE_BYTES, piece_slots)
    with OffloadEngine(layout_on(device), device=device, pool_bytes=pool, **options) as engine:
        try:
            wait_for(engine, 2 * piece_slots)
            yield engine, pieces
        finally:
            pieces.let_all()


# what may be used -----------------------------------------------------------------------------------------------------


def test_the_engine_is_returned_after_the_first_piece_and_a_thread_pins_the_rest(device: kvoffload.Device) -> None:
    device.simulator.faults.calls = []
    with growing(device) as (engine, pieces):
        assert (engine.num_slots, engine.pinned_slots, engine.growing) == (SLOTS, 4, True)
        first, second = pieces.seen
        assert first == (2 * PAGE_BYTES, SLOTS * PAGE_BYTES, threading.get_ident())
        assert second[:2] == (4 * PAGE_BYTES, SLOTS * PAGE_BYTES)
        assert second[2] != threading.get_ident()
        slots, addresses = engine.slots, engine._parts.slot_addresses.copy()
        assert slots.shape == (SLOTS, PAGE_BYTES)
        for piece in range(3, 7):
            pieces.let(1)
            wait_for(engine, 2 * piece)
            statistics = engine.statistics()
            assert (statistics.num_slots, statistics.pinned_slots) == (SLOTS, min(SLOTS, 2 * piece))
            assert statistics.pinned_bytes == statistics.pinned_slots * PAGE_BYTES
        pieces.let_all()
        wait_for_the_end(engine)
        assert (engine.pinned_slots, engine.statistics().pinning_error) == (SLOTS, None)
        assert [done for done, _, _ in pieces.seen] == [2 * piece * PAGE_BYTES for piece in range(1, 7)]
        assert registered(device) == [(int(addresses[slot]), 2 * PAGE_BYTES) for slot in range(0, SLOTS, 2)]
        assert np.shares_memory(slots, engine.slots)
        assert (addresses == engine._parts.slot_addresses).all()
    assert device.simulator.leaks()["registered_ranges"] == 0


def test_a_program_that_ends_does_not_wait_for_its_pool_to_grow(device: kvoffload.Device) -> None:
    with growing(device):
        (thread,) = (each for each in threading.enumerate() if each.name == "kvoffload-growth")
        assert thread.daemon


def test_a_pool_pinned_at_once_registers_the_same_ranges(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mechanism: all pieces before the constructor returns, or all but the first afterwards."""
    monkeypatch.setattr(pinned, "RANGE_BYTES", 5 * PAGE_BYTES)
    sizes: list[list[int]] = []
    for pool in (SLOTS * PAGE_BYTES, Growing(SLOTS * PAGE_BYTES, piece_bytes=5 * PAGE_BYTES)):
        device.simulator.faults.calls = []
        with OffloadEngine(layout_on(device), device=device, pool_bytes=pool, **COPY_ENGINE_ONLY) as engine:
            wait_for_the_end(engine)
            sizes.append([nbytes for _, nbytes in registered(device)])
    assert sizes == [[5 * PAGE_BYTES, 5 * PAGE_BYTES, 2 * PAGE_BYTES]] * 2


@pytest.mark.parametrize("piece_bytes", [1, PAGE_BYTES, 3 * PAGE_BYTES - 1, 3 * PAGE_BYTES + 1, 100 * PAGE_BYTES])
def test_pitfall_20_no_slot_lies_in_two_pieces(device: kvoffload.Device, piece_bytes: int) -> None:
    """Slots of three pages; the simulated driver refuses a copy that spans two registered ranges."""
    planes = device.allocate_planes(3, block_bytes=PAGE_BYTES, num_blocks=8)
    number_blocks(planes, 1)
    pool = Growing(8 * 3 * PAGE_BYTES + 5, piece_bytes=piece_bytes)
    with OffloadEngine(KVLayout([planes]), device=device, pool_bytes=pool, **COPY_ENGINE_ONLY) as engine:
        wait_for_the_end(engine)
        assert engine.pinned_slots == engine.num_slots == 8
        for copier in copiers_in(engine):
            engine.slots[:] = 0
            engine.store(range(8), range(8), after=NO_WAIT, copier=copier).wait(SECONDS)
            assert (engine.slots == np.arange(1, 9)[:, np.newaxis]).all()
        pieces = max(1, min(8, piece_bytes // (3 * PAGE_BYTES)))
        assert device.simulator.leaks()["registered_ranges"] == -(-8 // pieces)


@pytest.mark.parametrize("direction", list(Direction))
def test_a_slot_that_is_not_pinned_yet_is_refused_and_nothing_has_happened(
    device: kvoffload.Device, direction: Direction
) -> None:
    with growing(device) as (engine, pieces):
        text = r"slots\[1\] is 4, of group 0, and the pool, which grows, has 4 of 12 slots pinned so far"
        before = engine.slots.copy()
        for wrong in (
            lambda: engine.submit(direction, [1, 2], [3, 4], after=NO_WAIT),
            lambda: getattr(engine, f"{direction.value}_groups")([GroupTransfer(0, [1, 2], [3, 4])], after=NO_WAIT),
        ):
            with pytest.raises(CapacityError, match=text):
                wrong()
        assert engine.submitted == 0
        assert (engine.slots == before).all()
        assert engine.plan(direction, [1, 2], [3, 4]).blocks == 2  # a plan asks nothing of the moment
        engine.submit(direction, [1, 2], [2, 3], after=NO_WAIT).wait(SECONDS)
        pieces.let(1)
        wait_for(engine, 6)
        engine.submit(direction, [1, 2], [3, 4], after=NO_WAIT).wait(SECONDS)
        engine.submit(direction, [], [], after=NO_WAIT).wait(SECONDS)
        pieces.let_all()
        wait_for_the_end(engine)
        engine.submit(direction, [1, 2], [3, 11], after=NO_WAIT).wait(SECONDS)


@pytest.mark.kernels
@pytest.mark.parametrize("staging_bytes", [0, 1 << 20])
def test_every_byte_is_right_while_the_pool_grows(seed: int, staging_bytes: int) -> None:
    """Random transfers by every copier, pieces come at random, and a naive loop says what each byte is."""
    dice = random.Random(seed)
    with simulated(seed) as device:
        layout, pieces = layout_on(device), Pieces()
        options: dict[str, Any] = {"staging_bytes": staging_bytes, "progress": pieces}
        pool = grows(SLOTS, PAGE_BYTES, 1)
        with OffloadEngine(layout, device=device, pool_bytes=pool, **options) as engine:
            wait_for(engine, 2)
            planes = layout.groups[0].planes
            slab = planes[0].owner
            assert isinstance(slab, kvoffload.DeviceBuffer)
            blocks: Bytes = np.repeat(np.arange(1, BLOCKS + 1, dtype=np.uint8)[:, np.newaxis], 128, axis=1)
            slots: Bytes = np.zeros((SLOTS, 128), np.uint8)
            seen = set[int]()
            assert device.simulator is not None
            pageable = device.simulator.pageable_copies  # of what has filled the blocks
            for step in range(150):
                if dice.random() < 0.1:
                    pieces.let(1)
                there = engine.pinned_slots
                seen.add(there)
                count = dice.randint(1, min(4, there))
                ids, places = dice.sample(range(BLOCKS), count), dice.sample(range(there), count)
                copier = dice.choice(copiers_in(engine))
                if dice.random() < 0.5:
                    blocks[ids] = slots[places]
                    engine.load(places, ids, after=NO_WAIT, copier=copier)
                else:
                    slots[places] = blocks[ids]
                    engine.store(ids, places, after=NO_WAIT, copier=copier)
                if step % 10 == 0:
                    engine.drain(SECONDS)
                    assert (engine.slots[:there, :128] == slots[:there]).all()
            pieces.let_all()
            wait_for_the_end(engine)
            engine.drain(SECONDS)
            assert (engine.slots[:, :128] == slots).all()
            assert not engine.slots[:, 128:].any()
            assert device.simulator.pageable_copies == pageable
            image = slab.to_numpy()
            for index, plane in enumerate(planes):
                start = plane.address - slab.address
                found = image[start : start + plane.span_bytes].reshape(BLOCKS, 64)
                assert (found == blocks[:, 64 * index : 64 * (index + 1)]).all()
            assert len(seen) > 3
            assert engine.poll()
        assert device.simulator.violations == []


def test_the_array_of_slots_is_the_whole_pool_and_pinning_keeps_what_pinned_rows_hold(device: kvoffload.Device) -> None:
    with growing(device) as (engine, pieces):
        engine.slots[:4] = 77
        pieces.let_all()
        wait_for_the_end(engine)
        assert (engine.slots[:4] == 77).all()
        assert not engine.slots[4:].any()


# several devices ------------------------------------------------------------------------------------------------------


@contextmanager
def two_growing(fails_at: int = 0) -> Iterator[tuple[ShardedEngine, Pieces]]:
    """Two devices with pools of 8 slots, of which two rounds of pieces are pinned."""
    simulator = SimulatedDriver(device_count=2)
    devices = [kvoffload.open_device(number, backend=simulator) for number in range(2)]
    layouts = [layout_on(device, planes) for device, planes in zip(devices, (2, 3), strict=True)]
    pieces = Pieces(devices=2)
    if fails_at:
        simulator.faults.fail_call("cuMemHostRegister", nth=fails_at, error=2)
    pool = Growing(8 * 2 * PAGE_BYTES, piece_bytes=2 * PAGE_BYTES)
    try:
        with ShardedEngine(layouts, devices=devices, pool_bytes=pool, progress=pieces, **COPY_ENGINE_ONLY) as engine:
            try:
                yield engine, pieces
            finally:
                pieces.let_all()
    finally:
        for device in devices:
            device.close()
        assert simulator.leaks()["registered_ranges"] == 0
        assert simulator.violations == []


def test_on_several_devices_a_slot_is_usable_once_all_have_pinned_it() -> None:
    with two_growing() as (engine, pieces):
        wait_for(engine, 4)
        assert engine.pinned_slots == 4
        assert engine.statistics().pinned_slots == 4
        assert engine.statistics().pinned_bytes == 2 * 4 * PAGE_BYTES
        with pytest.raises(CapacityError, match=r"slots\[0\] is 4, .* has 4 of 8 slots pinned so far") as caught:
            engine.store([1], [4], after=NO_WAIT)
        assert caught.value.__notes__ == ["on shard 0 (device 0)"]
        engine.store([1, 2], [3, 0], after=NO_WAIT).wait(SECONDS)
        pieces.let_all()
        wait_for_the_end(engine)
        engine.store([3], [7], after=NO_WAIT).wait(SECONDS)
        assert [int(pool[7, 0]) for pool in engine.slots] == [4, 4]
        assert [int(pool[3, 0]) for pool in engine.slots] == [2, 2]


def test_if_one_device_cannot_pin_more_all_stop_there(caplog: pytest.LogCaptureFixture) -> None:
    with two_growing(fails_at=6) as (engine, pieces):  # the second device's third piece
        pieces.let_all()
        wait_for_the_end(engine)
        statistics = engine.statistics()
        assert (statistics.pinned_slots, statistics.pinned_bytes) == (4, (6 + 4) * PAGE_BYTES)
        assert "CUDA_ERROR_OUT_OF_MEMORY" in str(statistics.pinning_error)
        assert "stopped growing" in caplog.text
        engine.store([1, 2], [3, 0], after=NO_WAIT).wait(SECONDS)
        with pytest.raises(CapacityError):
            engine.store([1], [4], after=NO_WAIT)


# growth that ends early -----------------------------------------------------------------------------------------------


def test_a_driver_that_cannot_pin_more_leaves_a_smaller_pool_that_serves(caplog: pytest.LogCaptureFixture) -> None:
    with simulated(1, pinnable_bytes=7 * PAGE_BYTES) as device:
        with growing(device) as (engine, pieces):
            pieces.let_all()
            wait_for_the_end(engine)
            statistics = engine.statistics()
            assert (statistics.num_slots, statistics.pinned_slots) == (SLOTS, 6)
            assert statistics.pinned_bytes == 6 * PAGE_BYTES
            assert "pinned_slots=6" in repr(statistics)
            text = str(statistics.pinning_error)
            assert f"cannot pin 0.00 GiB ({SLOTS * PAGE_BYTES} bytes)" in text
            assert "cuMemHostRegister returned CUDA_ERROR_OUT_OF_MEMORY" in text
            assert "(kept)" in text
            assert text in caplog.text
            engine.store([1], [5], after=NO_WAIT).wait(SECONDS)
            with pytest.raises(CapacityError):
                engine.store([1], [6], after=NO_WAIT)
        check_clean_close(device)


def test_a_machine_that_runs_short_of_memory_stops_before_a_page_is_touched(
    device: kvoffload.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with growing(device) as (engine, pieces):
        (tmp_path / "meminfo").write_text("MemTotal: 2000 kB\nMemFree: 5 kB\nMemAvailable: 8 kB\n")
        monkeypatch.setattr(hostinfo, "PROC", tmp_path)
        monkeypatch.setattr(pinned, "touch", lambda *_: pytest.fail("touched"))
        pieces.let_all()
        wait_for_the_end(engine)
        assert engine.pinned_slots == 4
        assert "memory is short" in str(engine.statistics().pinning_error)
        assert "memory is short" in caplog.text
        engine.store([1], [3], after=NO_WAIT).wait(SECONDS)


def test_a_first_piece_that_cannot_be_pinned_is_an_error_of_the_constructor() -> None:
    with simulated(1, pinnable_bytes=PAGE_BYTES) as device:
        pool = grows(SLOTS, PAGE_BYTES)
        with leak_check(device), pytest.raises(CapacityError, match=r"OUT_OF_MEMORY.*\(given back\)"):
            OffloadEngine(layout_on(device), device=device, pool_bytes=pool, **COPY_ENGINE_ONLY)
        check_clean_close(device)


@pytest.mark.parametrize("error", [ValueError("enough"), KeyboardInterrupt("enough")])
def test_an_exception_from_progress_ends_growth(
    device: kvoffload.Device, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def progress(done: int, _: int) -> None:
        if done == 6 * PAGE_BYTES:
            raise error

    pool = grows(SLOTS, PAGE_BYTES)
    with OffloadEngine(
        layout_on(device), device=device, pool_bytes=pool, progress=progress, **COPY_ENGINE_ONLY
    ) as engine:
        wait_for_the_end(engine)
        assert engine.pinned_slots == 6
        assert engine.statistics().pinning_error == f"{type(error).__name__}: enough"
        assert "enough" in caplog.text
        engine.store([1], [5], after=NO_WAIT).wait(SECONDS)


def test_a_system_without_threads_leaves_the_first_piece(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    layout = layout_on(device)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        engine = OffloadEngine(layout, device=device, pool_bytes=grows(SLOTS, PAGE_BYTES), **COPY_ENGINE_ONLY)
    with engine:
        assert (engine.growing, engine.pinned_slots) == (False, 2)
        assert engine.statistics().pinning_error == "RuntimeError: can't start new thread"
        engine.store([1], [1], after=NO_WAIT).wait(SECONDS)


def test_a_lost_context_ends_growth_and_what_is_registered_stays_mapped() -> None:
    with simulated(1) as device, growing(device) as (engine, pieces):
        simulator = device.simulator
        assert simulator is not None
        simulator.faults.sticky(at_call=3)  # the thread's registration: it makes the context current first
        pieces.let_all()
        wait_for_the_end(engine)
        ready = engine.pinned_slots
        assert ready == 4
        assert engine.statistics().pinning_error is not None
        with contextlib.suppress(TransferError, kvoffload.DriverError):  # here the engine learns of it
            engine.store([1], [1], after=NO_WAIT).wait(SECONDS)
        with pytest.raises(TransferError, match="context is lost"):
            engine.store([1], [1], after=NO_WAIT)
        engine.close()
        assert engine.pinned_slots == ready


# closing in the middle ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["engine", "device", "garbage"])
def test_closing_in_the_middle_leaves_nothing_registered_and_pins_nothing_more(how: str) -> None:
    with simulated(1) as device:
        simulator = device.simulator
        assert simulator is not None
        pieces, pool = Pieces(), grows(SLOTS, PAGE_BYTES)
        engine = OffloadEngine(layout_on(device), device=device, pool_bytes=pool, progress=pieces, **COPY_ENGINE_ONLY)
        wait_for(engine, 4)
        growth = engine._growth
        assert growth is not None
        if how == "garbage":
            alive = weakref.ref(engine)
            del engine
            gc.collect()
            assert alive() is None, "the thread keeps no engine alive"
            with pytest.warns(ResourceWarning, match="an OffloadEngine was never closed"):
                device.reclaim()
        else:
            engine.store([1], [1], after=NO_WAIT)
            (engine if how == "engine" else device).close(timeout=SECONDS)
            assert engine.statistics().pinned_bytes == 0
        assert simulator.leaks()["registered_ranges"] == 0
        calls = simulator.faults.total_calls
        pieces.let_all()
        end = time.monotonic() + SECONDS
        while growth.running and time.monotonic() < end:
            time.sleep(1e-4)
        assert (growth.running, growth.error) == (False, None)
        assert simulator.faults.total_calls == calls, "the context may be gone, so the thread calls nothing"
        check_clean_close(device)


def test_close_waits_for_the_piece_that_is_being_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The range is registered while `close` begins: it is unregistered, too."""
    with simulated(1) as device:
        begun, go_on = threading.Event(), threading.Event()
        register = device.driver.host_register

        def slow(address: int, nbytes: int) -> None:
            if threading.current_thread().name == "kvoffload-growth":
                begun.set()
                assert go_on.wait(SECONDS)
            register(address, nbytes)

        monkeypatch.setattr(device.driver, "host_register", slow)
        pool = grows(SLOTS, PAGE_BYTES)
        engine = OffloadEngine(layout_on(device), device=device, pool_bytes=pool, **COPY_ENGINE_ONLY)
        assert begun.wait(SECONDS)
        closing = threading.Thread(target=engine.close)
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
        go_on.set()
        closing.join(SECONDS)
        assert not closing.is_alive()
        assert device.simulator is not None
        assert device.simulator.leaks()["registered_ranges"] == 0
        assert engine.pinned_slots == 4, "the piece was pinned, and no other"
        check_clean_close(device)


def test_progress_may_close_the_engine(device: kvoffload.Device) -> None:
    made: list[OffloadEngine] = []
    ready = threading.Event()

    def progress(done: int, _: int) -> None:
        if done == 4 * PAGE_BYTES:
            assert ready.wait(SECONDS)
            made[0].close()

    pool = grows(SLOTS, PAGE_BYTES)
    made.append(OffloadEngine(layout_on(device), device=device, pool_bytes=pool, progress=progress, **COPY_ENGINE_ONLY))
    ready.set()
    wait_for_the_end(made[0])
    assert made[0].closed
    assert device.simulator.leaks()["registered_ranges"] == 0
    assert made[0].statistics().pinning_error is None


def test_a_finalizer_in_the_thread_that_pins_is_refused(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for what `close` in another thread holds, while that waits for this piece."""
    refused: list[str] = []
    with growing(device) as (engine, pieces):
        register = device.driver.host_register

        def finalized(address: int, nbytes: int) -> None:
            for call in (engine.close, device.close, lambda: device.allocate(64)):
                with pytest.raises(RuntimeError, match="in the middle of another call of the library") as caught:
                    call()
                refused.append(str(caught.value))
            register(address, nbytes)

        monkeypatch.setattr(device.driver, "host_register", finalized)
        pieces.let(1)
        wait_for(engine, 6)
        monkeypatch.undo()
        assert len(refused) == 3
        pieces.let_all()
        wait_for_the_end(engine)
        assert (engine.pinned_slots, engine.statistics().pinning_error) == (SLOTS, None)
        engine.store([1], [11], after=NO_WAIT).wait(SECONDS)


PROGRAM = """
import os, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from growing import Pieces, grows, wait_for, wait_for_the_end
from helpers import simulated
from kvoffload import NO_WAIT, ClosedError, KVLayout, OffloadEngine
device = simulated(1)
planes = device.allocate_planes(2, block_bytes=64, num_blocks=8)
pieces = Pieces()
pool = grows(8, 4096, 1)
engine = OffloadEngine(KVLayout([planes]), device=device, pool_bytes=pool, progress=pieces, staging_bytes=0)
wait_for(engine, 2)
"""


def test_the_interpreter_ends_in_the_middle() -> None:
    run_program(PROGRAM + "engine.store([1], [1])")
    run_program(PROGRAM + "pieces.let_all()")


def test_a_forked_child_does_nothing_and_the_parent_grows_on() -> None:
    out = run_program(
        PROGRAM
        + """
child = os.fork()
if child == 0:
    try:
        engine.store([1], [1])
    except ClosedError as error:
        print("child", "fork" in str(error), engine.growing, flush=True)
    engine.close()
    device.close()
    os._exit(0)
_, status = os.waitpid(child, 0)
pieces.let_all()
wait_for_the_end(engine)
engine.store([1], [7], after=NO_WAIT).wait(10)
print("parent", status, engine.pinned_slots)
engine.close()
print(device.simulator.leaks()["registered_ranges"])
"""
    )
    assert out.split() == ["child", "True", "False", "parent", "0", "8", "0"]


# arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -1, "8", True, 1.5])
def test_a_growing_pool_is_of_positive_integers(wrong: Any) -> None:
    with pytest.raises(ValueError, match="nbytes must be an integer of at least 1, got "):
        Growing(wrong)
    with pytest.raises(ValueError, match="piece_bytes must be an integer of at least 1, got "):
        Growing(4096, piece_bytes=wrong)
    with pytest.raises(TypeError, match="positional"):
        Growing(4096, 4096)  # type: ignore[call-arg]


def test_short_integers_of_numpy_do_not_overflow(device: kvoffload.Device) -> None:
    pool = Growing(np.int16(7 * PAGE_BYTES), piece_bytes=np.int16(3 * PAGE_BYTES))  # type: ignore[arg-type]
    with OffloadEngine(layout_on(device), device=device, pool_bytes=pool, **COPY_ENGINE_ONLY) as engine:
        wait_for_the_end(engine)
        statistics = engine.statistics()
        assert (engine.pinned_slots, statistics.pinning_error) == (7, None)
        assert type(statistics.pinned_bytes) is int


def test_what_a_pool_that_grows_is_refused_with(device: kvoffload.Device) -> None:
    layout = layout_on(device)
    memory = HostMemory(address=1 << 20, num_slots=2, slot_stride=PAGE_BYTES)
    with leak_check(device):
        with pytest.raises(ValueError, match="are both given: leave one out"):
            OffloadEngine(layout, device=device, num_slots=4, pool_bytes=Growing(1 << 20))
        for size in ("1MiB", Growing(1 << 20)):
            with pytest.raises(ValueError, match=r"^pool_bytes=.* and host_memory=.* are both given: leave one out"):
                OffloadEngine(layout, device=device, pool_bytes=size, host_memory=memory)
        with pytest.raises(CapacityError, match=r"pool_bytes=5 holds no slot of 4096 bytes"):
            OffloadEngine(layout, device=device, pool_bytes=Growing(5))


def test_a_pool_of_one_piece_does_not_grow(device: kvoffload.Device) -> None:
    before = threading.active_count()
    pool = Growing(4 * PAGE_BYTES)
    with OffloadEngine(layout_on(device), device=device, pool_bytes=pool, **COPY_ENGINE_ONLY) as engine:
        assert (engine.growing, engine.pinned_slots, threading.active_count()) == (False, 4, before)

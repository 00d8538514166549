"""Engines over host memory of the caller's: every byte of it as a naive loop has it, those between slots untouched."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import COPY_ENGINE_ONLY, STAGING, copiers_in
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import Case, cases, place

import kvoffload
from kvoffload import (
    NO_WAIT,
    BlockCache,
    CapacityError,
    GroupTransfer,
    HostMemory,
    KVLayout,
    LayoutError,
    OffloadEngine,
)
from kvoffload.device import pinned
from kvoffload.driver import address_of
from kvoffload.testing import Mirror, SimulatedDriver, check_clean_close, leak_check, scramble
from kvoffload.tiers import MemoryTier

PAGE = 4096
Bytes = npt.NDArray[np.uint8]


def mapped(nbytes: int, seed: int = 0) -> Bytes:
    """Memory of the process with random bytes, from a multiple of the page size on."""
    array = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
    array[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return array


class Owned(np.ndarray[Any, Any]):
    """An array that a weak reference can follow."""


@pytest.fixture
def layout(device: kvoffload.Device) -> KVLayout:
    """Slots of 256 bytes payload in 4096."""
    planes = device.allocate_planes(4, block_bytes=64, num_blocks=16)
    scramble(planes[0].owner, 1)  # type: ignore[arg-type]
    return KVLayout([planes], dtype="uint8", tokens_per_block=64, block_axes=("tokens",))


def buffer_of(layout: KVLayout) -> Any:
    return layout.groups[0].planes[0].owner


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=cases(),
    seed=st.integers(0, 1 << 16),
    gap=st.sampled_from((0, 1, 3)),
    first=st.integers(0, 2),
    registered=st.booleans(),
)
def test_any_transfers_touch_the_slots_and_nothing_between_them(
    case: Case, seed: int, gap: int, first: int, registered: bool
) -> None:
    device = kvoffload.open_device(backend=SimulatedDriver(seed=seed))
    layout, buffers = place(device, case.layout, seed)
    stride = layout.slot_bytes + gap * PAGE
    memory = mapped(first * PAGE + case.num_slots * stride, seed)
    expected = memory.copy()
    own = expected[first * PAGE :].reshape(case.num_slots, stride)[:, : layout.slot_bytes]
    with device.current():
        if registered:
            device.driver.host_register(address_of(memory), memory.nbytes)
        given_memory = HostMemory.of_buffer(
            memory, num_slots=case.num_slots, slot_stride=stride, offset=first * PAGE, registered=registered
        )
        with OffloadEngine(layout, device=device, host_memory=given_memory, staging_bytes=case.staging_bytes) as engine:
            assert np.array_equal(engine.slots, own), "what the memory held is still there"
            mirror = Mirror(engine, buffers)
            for direction, group, blocks, slots, sub_block, _ in case.transfers:
                engine.submit(direction, blocks, slots, group=group, first_sub_block=sub_block, after=NO_WAIT)
                mirror.expect(direction, blocks, slots, group=group, first_sub_block=sub_block)
            engine.drain(timeout=30)
            mirror.check()
            own[:] = mirror.pool
        assert np.array_equal(memory, expected), "a byte outside of the slots has changed"
        if registered:
            device.driver.host_unregister(address_of(memory))
    for buffer in buffers:
        buffer.close()
    check_clean_close(device)


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("copier", ["strided", "batch", "loop", "pack", None])
def test_every_copier_reaches_slots_with_a_stride_and_nothing_between_them(
    each_device: kvoffload.Device, registered: bool, copier: Any
) -> None:
    """Several groups in a transfer, and urgent loads."""
    simulated, num_slots = each_device.simulated, 32
    groups = [
        each_device.allocate_planes(8, block_bytes=64 if simulated else 8192, num_blocks=64),
        each_device.allocate_blocks(64, planes=4, block_bytes=16 if simulated else 2048),
    ]
    for number, planes in enumerate(groups):
        scramble(planes[0].owner, number)  # type: ignore[arg-type]
    layout = KVLayout(groups)
    stride = layout.slot_bytes + 3 * PAGE
    memory = mapped(num_slots * stride)
    expected = memory.copy()
    driver = each_device.driver
    with each_device.current():
        if registered:
            driver.host_register(address_of(memory), memory.nbytes)
        given = HostMemory.of_buffer(memory, num_slots=num_slots, slot_stride=stride, registered=registered)
        options: dict[str, Any] = {
            "host_memory": given,
            "most_queued_bytes": 1 << 18,
            "staging_bytes": STAGING if simulated else 1 << 18,
        }
        with OffloadEngine(layout, device=each_device, **options) as engine:
            mirror = Mirror(engine, [planes[0].owner for planes in groups])  # type: ignore[misc]
            rounds = np.random.default_rng(1)
            for _ in range(2 if simulated else 8):
                blocks, slots = rounds.permutation(64)[:24].tolist(), rounds.permutation(num_slots)[:24].tolist()
                several = [GroupTransfer(0, blocks[:12], slots[:12]), GroupTransfer(1, blocks[12:], slots[12:])]
                engine.store_groups(several, after=NO_WAIT, copier=copier)
                moved = [
                    replace(each, blocks=[(block + 7) % 64 for block in blocks[at : at + 12]])
                    for each, at in zip(several, (0, 12), strict=True)
                ]
                engine.load_groups(moved, after=NO_WAIT, copier=copier, urgent=True)
                for direction, transfers in (("store", several), ("load", moved)):
                    for each in transfers:
                        ids: tuple[Any, Any] = each.blocks, each.slots
                        mirror.expect(direction, *ids, group=each.group)
            engine.drain(30)
            mirror.check()
            expected.reshape(num_slots, stride)[:, : layout.slot_bytes] = mirror.pool
        assert np.array_equal(memory, expected), "a byte outside of the slots has changed"
        if registered:
            driver.host_unregister(address_of(memory))


@pytest.mark.parametrize("slots_a_range", [1, 3])
def test_no_slot_spans_two_registered_ranges(
    device: kvoffload.Device, layout: KVLayout, monkeypatch: pytest.MonkeyPatch, slots_a_range: int
) -> None:
    monkeypatch.setattr(pinned, "RANGE_BYTES", slots_a_range * 2 * PAGE + PAGE)
    memory = HostMemory.of_buffer(mapped(8 * 2 * PAGE), num_slots=8, slot_stride=2 * PAGE)
    with OffloadEngine(layout, device=device, host_memory=memory, **COPY_ENGINE_ONLY) as engine:
        assert device.simulator.leaks()["registered_ranges"] == -(-8 // slots_a_range)
        engine.store(range(8), range(8)).wait(10)
        assert engine.statistics().pinned_bytes == 8 * PAGE
    assert device.simulator.leaks()["registered_ranges"] == 0


def test_memory_that_its_owner_registered_stays_registered(device: kvoffload.Device, layout: KVLayout) -> None:
    memory = mapped(6 * PAGE)
    with device.current():
        device.driver.host_register(address_of(memory), memory.nbytes)
        for _ in range(2):
            given = HostMemory(
                address=address_of(memory), num_slots=3, slot_stride=2 * PAGE, registered=True, owner=memory
            )
            with OffloadEngine(layout, device=device, host_memory=given, **COPY_ENGINE_ONLY) as engine:
                engine.store([1], [2]).wait(10)
            assert device.simulator.leaks()["registered_ranges"] == 1
        device.driver.host_unregister(address_of(memory))


def test_two_engines_share_the_rows_of_memory_that_is_registered_once(
    device: kvoffload.Device, layout: KVLayout
) -> None:
    memory = mapped(8 * 2 * PAGE)
    with device.current():
        device.driver.host_register(address_of(memory), memory.nbytes)
        ranks = [
            HostMemory.of_buffer(memory, num_slots=8, slot_stride=2 * PAGE, offset=rank * PAGE, registered=True)
            for rank in (0, 1)
        ]
        with (
            OffloadEngine(layout, device=device, host_memory=ranks[0], **COPY_ENGINE_ONLY) as first,
            OffloadEngine(layout, device=device, host_memory=ranks[1], **COPY_ENGINE_ONLY) as second,
        ):
            first.store([1], [5])
            second.store([2], [5])
            for engine in (first, second):
                engine.drain(10)
            rows = memory.reshape(8, 2, PAGE)
            assert np.array_equal(rows[5, 0], first.slots[5])
            assert np.array_equal(rows[5, 1], second.slots[5])
            assert not np.array_equal(rows[5, 0], rows[5, 1])
        device.driver.host_unregister(address_of(memory))


def test_shared_memory_can_be_closed_after_the_engine(device: kvoffload.Device, layout: KVLayout) -> None:
    shared = SharedMemory(create=True, size=4 * PAGE)
    try:
        memory = HostMemory.of_buffer(shared.buf, num_slots=4, slot_stride=PAGE)
        with OffloadEngine(layout, device=device, host_memory=memory, **COPY_ENGINE_ONLY) as engine:
            engine.store([1, 2], [0, 3]).wait(10)
            stored = engine.slots.copy()
            del memory
        gc.collect()
        buffer: Any = shared.buf
        assert np.array_equal(np.frombuffer(bytes(buffer), np.uint8).reshape(4, PAGE), stored)
        assert engine.slots.shape == (0, PAGE)
    finally:
        shared.close()
        shared.unlink()


def test_the_owner_lives_until_the_engine_is_closed(device: kvoffload.Device, layout: KVLayout) -> None:
    class Owner:
        pass

    owner, memory = Owner(), mapped(2 * PAGE)
    alive = weakref.ref(owner)
    given = HostMemory(address=address_of(memory), num_slots=2, slot_stride=PAGE, owner=owner)
    engine = OffloadEngine(layout, device=device, host_memory=given, **COPY_ENGINE_ONLY)
    del owner, given
    gc.collect()
    assert alive() is not None
    row = engine.slots[1]
    engine.close()
    gc.collect()
    assert alive() is not None, "an array over the slots refers to it"
    del row
    gc.collect()
    assert alive() is None


def test_an_engine_that_was_forgotten_gives_the_memory_back(device: kvoffload.Device, layout: KVLayout) -> None:
    memory = HostMemory.of_buffer(mapped(2 * PAGE), num_slots=2, slot_stride=PAGE)
    engine = OffloadEngine(layout, device=device, host_memory=memory, **COPY_ENGINE_ONLY)
    del engine
    gc.collect()
    with pytest.warns(ResourceWarning, match="never closed"):
        device.reclaim()
    assert device.simulator.leaks()["registered_ranges"] == 0


ADDRESS = 1 << 30


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"address": ADDRESS + 16}, f"address must be a positive multiple of 4096 .* got {ADDRESS + 16}"),
        ({"address": 0}, "address must be a positive multiple of 4096"),
        ({"address": None}, "address must be a positive multiple of 4096 .* got None"),
        ({"slot_stride": 5000}, "slot_stride must be a positive multiple of 4096 .* got 5000"),
        ({"slot_stride": -PAGE}, "slot_stride must be a positive multiple of 4096"),
        ({"num_slots": -1}, "num_slots must be an integer of at least 0, got -1"),
        ({"num_slots": 1.0}, "num_slots must be an integer of at least 0"),
        ({"registered": 1}, "registered must be True or False, got 1"),
        ({"nbytes": -1}, "nbytes must be an integer of at least 0"),
    ],
    ids=str,
)
def test_a_bad_description_of_memory_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        HostMemory(**{"address": ADDRESS, "num_slots": 4, "slot_stride": PAGE, **options})


def test_a_buffer_that_cannot_hold_slots_is_refused() -> None:
    slots: dict[str, Any] = {"num_slots": 1, "slot_stride": PAGE}
    with pytest.raises(TypeError, match="buffer must have the buffer protocol, got object"):
        HostMemory.of_buffer(object(), **slots)
    with pytest.raises(ValueError, match="buffer must be writable, got a read-only bytes"):
        HostMemory.of_buffer(bytes(PAGE), **slots)
    with pytest.raises(ValueError, match="buffer must be C-contiguous and not empty"):
        HostMemory.of_buffer(mapped(2 * PAGE)[::2], **slots)
    with pytest.raises(ValueError, match="offset=8192 is past the end of a buffer of 4096 bytes"):
        HostMemory.of_buffer(mapped(PAGE), offset=2 * PAGE, **slots)
    with pytest.raises(ValueError, match=r"^the address of buffer, plus offset=64, must be a positive multiple"):
        HostMemory.of_buffer(mapped(2 * PAGE), offset=64, **slots)
    with pytest.raises(ValueError, match=r"^the address of buffer, plus offset=0, must be a positive multiple"):
        HostMemory.of_buffer(mapped(2 * PAGE)[64:], **slots)
    for empty in (bytearray(), mapped(PAGE)[:0]):
        with pytest.raises(ValueError, match=r"^buffer must not be empty, got an empty|^buffer must be .* not empty"):
            HostMemory.of_buffer(empty, **slots)


def test_memory_that_does_not_fit_the_layout_is_refused(device: kvoffload.Device) -> None:
    layout = KVLayout([device.allocate_planes(1, block_bytes=5000, num_blocks=4)])
    memory = mapped(6 * PAGE)
    options: dict[str, Any] = {"device": device, **COPY_ENGINE_ONLY}
    with leak_check(device):
        with pytest.raises(ValueError, match=r"slot_stride=4096 is less than layout.slot_bytes=8192.* at least 8192"):
            OffloadEngine(layout, host_memory=HostMemory.of_buffer(memory, num_slots=2, slot_stride=PAGE), **options)
        with pytest.raises(ValueError, match=r"num_slots=3 of 8192 bytes.* take 32768 bytes.* give at most 2 slots"):
            OffloadEngine(
                layout, host_memory=HostMemory.of_buffer(memory, num_slots=3, slot_stride=3 * PAGE), **options
            )
        with pytest.raises(ValueError, match="num_slots=4 and host_memory are both given: leave num_slots out"):
            OffloadEngine(
                layout,
                num_slots=4,
                host_memory=HostMemory.of_buffer(memory, num_slots=2, slot_stride=2 * PAGE),
                **options,
            )
        anything: Any = memory
        with pytest.raises(TypeError, match="host_memory must be a HostMemory or None"):
            OffloadEngine(layout, host_memory=anything, **options)


def test_memory_that_is_not_what_is_said_of_it_is_refused(each_device: kvoffload.Device) -> None:
    layout = KVLayout([each_device.allocate_blocks(8, planes=2, block_bytes=2048)])
    memory = mapped(8 * PAGE)
    options: dict[str, Any] = {"device": each_device, **COPY_ENGINE_ONLY}
    slots: dict[str, Any] = {"num_slots": 4, "slot_stride": 2 * PAGE}
    driver, start = each_device.driver, address_of(memory)
    with each_device.current(), leak_check(each_device) if each_device.simulated else nullcontext():
        with pytest.raises(ValueError, match=r"registered=True, but slot 0 .* is not registered with this driver"):
            OffloadEngine(layout, host_memory=HostMemory.of_buffer(memory, registered=True, **slots), **options)
        first = HostMemory.of_buffer(memory, **slots)
        with (
            OffloadEngine(layout, host_memory=first, **options),
            pytest.raises(ValueError, match=r"overlaps memory that is registered already.* give registered=True"),
        ):
            OffloadEngine(layout, host_memory=first, **options)
        if not each_device.simulated:  # what no GPU was asked yet
            return
        driver.host_register(start, 4 * PAGE)
        with pytest.raises(ValueError, match=r"registered=True, but slot 2 .* is not registered with this driver"):
            OffloadEngine(layout, host_memory=HostMemory.of_buffer(memory, registered=True, **slots), **options)
        with pytest.raises(ValueError, match=r"overlaps memory that is registered already.* give registered=True"):
            OffloadEngine(layout, host_memory=first, **options)
        driver.host_unregister(start)
        nowhere = HostMemory(address=1 << 45, **slots)
        with pytest.raises(ValueError, match=r"cannot be registered: .*is all of it mapped in this process"):
            OffloadEngine(layout, host_memory=nowhere, **options)


def test_a_slot_in_two_registered_ranges_is_refused(device: kvoffload.Device, layout: KVLayout) -> None:
    """Where a driver shows the GPU each range somewhere else."""
    memory = mapped(2 * PAGE)
    start, half = address_of(memory), address_of(memory) + PAGE + PAGE // 2

    def moved(function: Any) -> Any:
        def call(address: int, flags: int) -> Any:
            error, found = function(address, flags)
            return error, int(found) + (1 << 40 if int(address) >= half else 0)

        return call

    with device.current():
        device.driver.host_register(start, memory.nbytes)
        device.driver.intercept("cuMemHostGetDevicePointer", moved)
        given = HostMemory.of_buffer(memory, num_slots=2, slot_stride=PAGE, registered=True)
        with leak_check(device), pytest.raises(ValueError, match=r"slot 1 at .* lies in two registered ranges"):
            OffloadEngine(layout, device=device, host_memory=given, **COPY_ENGINE_ONLY)
        device.driver.host_unregister(start)


def test_a_slot_in_two_ranges_side_by_side_is_refused_though_the_gpu_sees_one(each_device: kvoffload.Device) -> None:
    planes = each_device.allocate_planes(2, block_bytes=PAGE, num_blocks=4)
    memory, layout = mapped(4 * PAGE), KVLayout([planes])
    assert layout.slot_bytes == 2 * PAGE
    start, driver = address_of(memory), each_device.driver
    given = HostMemory.of_buffer(memory, num_slots=2, slot_stride=2 * PAGE, registered=True)
    for first, fits in ((3, False), (2, True)):
        with each_device.current():
            driver.host_register(start, first * PAGE)
            driver.host_register(start + first * PAGE, (4 - first) * PAGE)
        if fits:
            with OffloadEngine(layout, device=each_device, host_memory=given, **COPY_ENGINE_ONLY) as engine:
                for copier in copiers_in(engine):  # none takes neighbouring slots together
                    engine.store([0, 1], [0, 1], copier=copier).wait(10)
                    engine.load([0, 1], [2, 3], copier=copier).wait(10)
        else:
            with pytest.raises(ValueError, match=r"slot 1 at .* lies in two registered ranges"):
                OffloadEngine(layout, device=each_device, host_memory=given, **COPY_ENGINE_ONLY)
        with each_device.current():
            driver.host_unregister(start)
            driver.host_unregister(start + first * PAGE)


def test_a_mapped_file_is_refused_with_what_to_do(device: kvoffload.Device, layout: KVLayout, tmp_path: Path) -> None:
    path = tmp_path / "slots"
    path.write_bytes(bytes(2 * PAGE))
    with path.open("r+b") as file:
        memory = HostMemory.of_buffer(mmap.mmap(file.fileno(), 2 * PAGE), num_slots=2, slot_stride=PAGE)
    with leak_check(device), pytest.raises(ValueError, match=r"none of it shared with a file on a disk\? Memory of a"):
        OffloadEngine(layout, device=device, host_memory=memory, **COPY_ENGINE_ONLY)


def test_what_was_registered_is_given_back_when_the_rest_cannot_be(
    device: kvoffload.Device, layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "RANGE_BYTES", PAGE)
    device.simulator.faults.fail_call("cuMemHostRegister", nth=3, error=2)
    memory = HostMemory.of_buffer(mapped(4 * PAGE), num_slots=4, slot_stride=PAGE)
    with leak_check(device), pytest.raises(CapacityError, match=r"pinned before: 8192, given back.* give fewer slots"):
        OffloadEngine(layout, device=device, host_memory=memory, **COPY_ENGINE_ONLY)


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    made = MemoryTier(1 << 16)
    yield made
    made.close()


def test_tiers_take_slots_that_follow_each_other_and_refuse_a_stride(
    device: kvoffload.Device, layout: KVLayout, tier: MemoryTier
) -> None:
    apart = HostMemory.of_buffer(mapped(8 * 2 * PAGE), num_slots=8, slot_stride=2 * PAGE)
    with (
        OffloadEngine(layout, device=device, host_memory=apart, **COPY_ENGINE_ONLY) as engine,
        pytest.raises(LayoutError, match=rf"host_memory of the engine must have slot_stride={PAGE}, the layout's slot"),
    ):
        BlockCache(engine, tiers=[tier])
    together = HostMemory.of_buffer(mapped(8 * PAGE), num_slots=8, slot_stride=PAGE)
    with OffloadEngine(layout, device=device, host_memory=together, **COPY_ENGINE_ONLY) as engine:
        cache = BlockCache(engine, tiers=[tier])
        cache.store([b"a"], [1]).wait(10)
        cache.close()


def test_tiers_refuse_a_stride_of_several_groups(device: kvoffload.Device, tier: MemoryTier) -> None:
    """Rows of all groups would be a copy of the slots, which tiers would fill for nobody."""
    layout = KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=4) for _ in range(2)])
    apart = HostMemory.of_buffer(mapped(8 * 2 * PAGE), num_slots=8, slot_stride=2 * PAGE)
    with OffloadEngine(layout, device=device, host_memory=apart, **COPY_ENGINE_ONLY) as engine:
        with pytest.raises(LayoutError, match=rf"host_memory of the engine must have slot_stride={PAGE}"):
            BlockCache(engine, tiers=[tier])
        BlockCache(engine)


# no slots


def test_an_engine_of_no_slots_pins_nothing_and_refuses_every_slot(device: kvoffload.Device, layout: KVLayout) -> None:
    with OffloadEngine(layout, device=device, num_slots=0, **COPY_ENGINE_ONLY) as engine:
        assert device.simulator.leaks()["registered_ranges"] == 0
        assert (engine.num_slots, engine.slots.shape) == (0, (0, PAGE))
        for submit in (engine.store, engine.load):
            with pytest.raises(LayoutError, match=r"slots\[0\]"):
                submit([0], [0])
            assert submit([], []).wait(10).nbytes == 0
        assert engine.plan("store", [], []).blocks == 0
        assert engine.statistics().pinned_bytes == 0
        assert "0 slots x 4096 B" in repr(engine)
        assert engine._repr_html_()
        engine.drain(10)
    assert engine.closed


def test_an_engine_of_no_slots_has_kernels(each_device: kvoffload.Device) -> None:
    layout = KVLayout([each_device.allocate_blocks(8, planes=2, block_bytes=2048)])
    with OffloadEngine(layout, device=each_device, num_slots=0, staging_bytes=STAGING) as engine:
        assert "pack" not in engine.missing_copiers
        assert engine.load([], []).wait(10).nbytes == 0


def test_memory_of_no_slots_is_memory_of_no_slots(device: kvoffload.Device, layout: KVLayout) -> None:
    memory = HostMemory.of_buffer(mapped(PAGE), num_slots=0, slot_stride=PAGE)
    with OffloadEngine(layout, device=device, host_memory=memory, staging_bytes=STAGING) as engine:
        assert engine.load([], []).wait(10).nbytes == 0
        assert device.simulator.leaks()["registered_ranges"] == 1, "the tables of kernels"

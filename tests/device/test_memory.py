"""Pinned memory: exact sizes, ranges, roll-back, the error when memory is short; and GPU buffers."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import COPY_ENGINE_ONLY, STAGING, copiers_in
from programs import run_program

import kvoffload
from kvoffload import NO_WAIT, CapacityError, ClosedError, Direction, KVLayout, OffloadEngine
from kvoffload.copiers import pack_kernels
from kvoffload.device import pinned as memory
from kvoffload.device.pinned import PAGE_BYTES, PinnedMemory, touch
from kvoffload.driver import address_of
from kvoffload.internal import hostinfo
from kvoffload.testing import SimulatedDriver, check_clean_close, leak_check

RANGE = 16 * PAGE_BYTES
TABLES_BYTES = len(Direction) * pack_kernels.ARENA_BYTES  # which an engine with kernels pins besides its pool


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "RANGE_BYTES", RANGE)


def registered(device: kvoffload.Device) -> list[tuple[int, int]]:
    """Address and bytes of every cuMemHostRegister since `faults.calls` was set."""
    calls = device.simulator.faults.calls
    return [(args[0], args[1]) for name, args in calls if name == "cuMemHostRegister"]


def pin(device: kvoffload.Device, nbytes: int, **options: Any) -> PinnedMemory:
    with device.current():
        return PinnedMemory(device.driver, nbytes, **options)


def unpin(device: kvoffload.Device, pinned: PinnedMemory) -> None:
    with device.current():
        pinned.release()


# pinning


@pytest.mark.parametrize("pages", [1, 3, 17, 234])
def test_pitfall_17_exactly_the_bytes_asked_for_are_pinned(device: kvoffload.Device, pages: int) -> None:
    device.simulator.faults.calls = []
    pinned = pin(device, pages * PAGE_BYTES)
    assert pinned.nbytes == pinned.array.nbytes == pages * PAGE_BYTES
    assert registered(device) == [(pinned.address, pages * PAGE_BYTES)]
    assert pinned.address % PAGE_BYTES == 0
    assert not pinned.array.any()
    unpin(device, pinned)


def test_pitfall_17_a_pool_takes_its_slots_and_no_more(device: kvoffload.Device) -> None:
    layout = KVLayout([device.allocate_planes(3, block_bytes=1000, num_blocks=4)], blocks_per_slot=3)
    device.simulator.faults.calls = []
    with OffloadEngine(layout, device=device, num_slots=11, **COPY_ENGINE_ONLY) as engine:
        assert layout.slot_bytes == 12288
        assert engine.slots.shape == (11, 12288)
        assert sum(nbytes for _, nbytes in registered(device)) == 11 * 12288
        assert engine.statistics().pinned_bytes == 11 * 12288


@pytest.mark.usefixtures("small_ranges")
def test_pitfall_22_a_big_pool_is_pinned_in_ranges_with_progress(device: kvoffload.Device) -> None:
    seen: list[tuple[int, int]] = []
    device.simulator.faults.calls = []
    nbytes = 3 * RANGE + 5 * PAGE_BYTES
    pinned = pin(device, nbytes, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(RANGE, nbytes), (2 * RANGE, nbytes), (3 * RANGE, nbytes), (nbytes, nbytes)]
    assert [size for _, size in registered(device)] == [RANGE] * 3 + [5 * PAGE_BYTES]
    unpin(device, pinned)
    assert device.simulator.leaks()["registered_ranges"] == 0


def test_pitfall_22_pages_are_touched_by_many_threads_before_they_are_registered(
    device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    register = device.driver.host_register

    def note(address: int, nbytes: int) -> None:
        order.append("register")
        register(address, nbytes)

    monkeypatch.setattr(memory, "touch", lambda *_: order.append("touch"))
    monkeypatch.setattr(device.driver, "host_register", note)
    unpin(device, pin(device, PAGE_BYTES))
    assert order == ["touch", "register"]

    monkeypatch.undo()
    monkeypatch.setattr(hostinfo, "usable_cpus", lambda: 4)
    threads: set[int] = set()

    class Watched(np.ndarray[Any, Any]):
        def fill(self, value: Any) -> None:
            threads.add(threading.get_ident())
            super().fill(value)

    array = np.full(64 << 20, 7, dtype=np.uint8).view(Watched)
    touch(array)
    assert threading.get_ident() not in threads
    assert threads
    assert not array[::PAGE_BYTES].any()
    assert (np.asarray(array).reshape(-1, PAGE_BYTES)[:, 1:] == 7).all()


@pytest.mark.parametrize("cpus", [1, 4])
def test_pages_of_shared_memory_are_only_read(cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.internal.hostinfo.usable_cpus", lambda: cpus)
    before = np.random.default_rng(cpus).integers(0, 256, 64 << 20, dtype=np.uint8)
    array = before.copy()
    array.flags.writeable = False
    touch(array, write=False)
    assert np.array_equal(array, before)


def test_touching_happens_on_the_cpus_of_the_node_and_leaves_this_thread_where_it_was() -> None:
    before = os.sched_getaffinity(0)
    cpus = frozenset(before)
    array = np.ones(48 << 20, dtype=np.uint8)
    touch(array, cpus)
    assert not array[::PAGE_BYTES].any()
    assert os.sched_getaffinity(0) == before


@pytest.mark.usefixtures("small_ranges")
def test_pitfall_19_a_failed_range_rolls_back_those_before_it(device: kvoffload.Device) -> None:
    device.simulator.faults.fail_call("cuMemHostRegister", nth=3, error=2)
    with leak_check(device), pytest.raises(CapacityError) as caught:
        pin(device, 5 * RANGE)
    text = str(caught.value)
    assert f"{5 * RANGE} bytes" in text
    assert "cuMemHostRegister returned CUDA_ERROR_OUT_OF_MEMORY" in text
    assert "given back" in text
    assert "num_slots" in text


@pytest.mark.usefixtures("small_ranges")
def test_pitfall_19_no_call_registers_more_than_a_range() -> None:
    simulator = SimulatedDriver(max_register_bytes=RANGE)
    device = kvoffload.open_device(backend=simulator)
    unpin(device, pin(device, 10 * RANGE))
    check_clean_close(device)


@pytest.mark.usefixtures("small_ranges")
def test_pitfall_19_a_progress_callback_that_raises_rolls_back_too(device: kvoffload.Device) -> None:
    def interrupt(done: int, _: int) -> None:
        if done == 2 * RANGE:
            raise KeyboardInterrupt

    with leak_check(device), pytest.raises(KeyboardInterrupt):
        pin(device, 5 * RANGE, progress=interrupt)


@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize(
    ("slot_pages", "staging_bytes"),
    [(1, 0), (3, 0), (5, 0), (7, 0), (16, 0), (17, 0), (40, 0), (1, STAGING), (7, STAGING), (17, STAGING)],
)
@pytest.mark.kernels
def test_pitfall_20_no_slot_spans_two_registered_ranges(
    device: kvoffload.Device, slot_pages: int, staging_bytes: int
) -> None:
    planes = device.allocate_planes(slot_pages, block_bytes=PAGE_BYTES, num_blocks=12)
    with OffloadEngine(KVLayout([planes]), device=device, num_slots=12, staging_bytes=staging_bytes) as engine:
        engine.slots[:] = np.arange(12, dtype=np.uint8)[:, np.newaxis]
        for copier in copiers_in(engine):
            engine.load(range(12), range(12), after=NO_WAIT, copier=copier).wait(10)
            engine.store(range(12), range(11, -1, -1), after=NO_WAIT, copier=copier).wait(10)
            engine.slots[:] = engine.slots[::-1].copy()
        assert (engine.slots == np.arange(12)[:, np.newaxis]).all()
        of_the_pool = -(-12 // max(1, RANGE // PAGE_BYTES // slot_pages))
        of_the_tables = TABLES_BYTES // RANGE if staging_bytes else 0
        assert device.simulator.leaks()["registered_ranges"] == of_the_pool + of_the_tables


def test_pitfall_20_the_simulated_driver_refuses_a_copy_that_spans_two_ranges(device: kvoffload.Device) -> None:
    """Else the test above could not fail."""
    buffer = device.allocate(2 * PAGE_BYTES)
    mapping = np.frombuffer(mmap.mmap(-1, 2 * PAGE_BYTES), dtype=np.uint8)
    address = address_of(mapping)
    with device.current():
        for page in range(2):
            device.driver.host_register(address + page * PAGE_BYTES, PAGE_BYTES)
        stream = device.driver.stream_create(0)
        with pytest.raises(kvoffload.DriverError, match="INVALID_VALUE"):
            device.driver.copy(buffer.address, address, 2 * PAGE_BYTES, stream)
        device.driver.stream_destroy(stream)
        for page in range(2):
            device.driver.host_unregister(address + page * PAGE_BYTES)


def test_pitfall_18_a_pool_that_cannot_be_pinned_is_not_used_unpinned() -> None:
    simulator = SimulatedDriver(pinnable_bytes=8 * PAGE_BYTES)
    device = kvoffload.open_device(backend=simulator)
    layout = KVLayout([device.allocate_planes(1, block_bytes=16, num_blocks=4)])
    with leak_check(device), pytest.raises(CapacityError, match=r"cannot pin .* of host memory"):
        OffloadEngine(layout, device=device, num_slots=9, **COPY_ENGINE_ONLY)
    with OffloadEngine(layout, device=device, num_slots=8, **COPY_ENGINE_ONLY) as engine:
        engine.store([0], [7]).wait(10)
    assert simulator.pageable_copies == 0
    check_clean_close(device)


# what is said when memory is short


def fake_proc(folder: Path, available_kib: int, cgroup: tuple[str, str] | None = None) -> None:
    (folder / "self").mkdir(exist_ok=True)
    (folder / "meminfo").write_text(f"MemTotal: 2000 kB\nMemFree: 5 kB\nMemAvailable: {available_kib} kB\n")
    (folder / "self/cgroup").write_text("1:cpu:/other\n0::/mine\n" if cgroup else "1:cpu:/other\n")
    if cgroup:
        group = folder / "fs/cgroup/mine"
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(cgroup[0] + "\n")
        (group / "memory.current").write_text(cgroup[1] + "\n")


def test_short_memory_is_refused_before_a_page_is_touched(
    device: kvoffload.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostinfo, "PROC", tmp_path)
    monkeypatch.setattr(hostinfo, "SYS", tmp_path)
    monkeypatch.setattr(memory, "touch", lambda *_: pytest.fail("touched"))
    fake_proc(tmp_path, 1000, ("600000", "200000"))
    assert hostinfo.total_bytes() == 2000 << 10
    with leak_check(device), pytest.raises(CapacityError) as caught:
        pin(device, 1 << 20)
    assert "memory is short" in str(caught.value)
    assert f"{tmp_path}/fs/cgroup/mine allows " in str(caught.value)
    assert "(1048576 bytes)" in str(caught.value)


def test_a_machine_that_tells_nothing_is_not_refused(
    device: kvoffload.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostinfo, "PROC", tmp_path / "nowhere")
    monkeypatch.setattr(hostinfo, "SYS", tmp_path / "nowhere")
    assert hostinfo.available_bytes() is None
    assert hostinfo.numa_node_cpus(0) == frozenset()
    assert hostinfo.pci_device("0000:01:00.0").generation is None
    unpin(device, pin(device, PAGE_BYTES))


def test_a_forked_child_has_zeros_and_its_own_memory_lies_elsewhere() -> None:
    """The child maps memory, lets go of the pool that it got from its parent, and still has what it mapped."""
    out = run_program(
        """
        import gc, mmap, os, warnings
        import kvoffload
        from kvoffload.device.pinned import PinnedMemory
        warnings.simplefilter("ignore")  # since 3.12 of a fork beside threads
        device = kvoffload.open_device(backend="simulated")
        with device.current():
            pool = PinnedMemory(device.driver, 64 << 20)
        pool.array[:] = 1
        child = os.fork()
        if child == 0:
            zeros = not pool.array.any()
            mine = [mmap.mmap(-1, 1 << 20) for _ in range(256)]
            for each in mine:
                each[0] = 7
            del pool
            gc.collect()
            os._exit(0 if zeros and all(each[0] == 7 for each in mine) else 1)
        print(os.waitpid(child, 0)[1], pool.array.all())
        with device.current():
            pool.release()
        device.close()
        """
    )
    assert out.split() == ["0", "True"]


def test_a_size_that_cannot_be_mapped_is_a_capacity_error(device: kvoffload.Device) -> None:
    with pytest.raises(CapacityError, match=r"cannot pin .*Linux would not map it"):
        pin(device, 1 << 62)


def test_a_gpus_link_and_numa_node_come_from_sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostinfo, "SYS", tmp_path)
    folder = tmp_path / "bus/pci/devices/0000:0a:00.0"
    folder.mkdir(parents=True)
    files = {
        "current_link_speed": "32.0 GT/s PCIe",
        "max_link_speed": "32.0 GT/s PCIe",
        "current_link_width": "8",
        "max_link_width": "16",
        "numa_node": "-1",
    }
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    found = hostinfo.pci_device("0000:0A:00.0")
    assert (found.generation, found.link_width, found.max_link_width, found.numa_node) == (5, 8, 16, None)
    node = tmp_path / "devices/system/node/node1"
    node.mkdir(parents=True)
    mine = min(os.sched_getaffinity(0))
    (node / "cpulist").write_text(f"{mine},100000-100003\n")
    assert hostinfo.numa_node_cpus(1) == frozenset({mine})


# the pool outlives its engine


def test_release_may_be_called_twice(device: kvoffload.Device) -> None:
    pinned = pin(device, PAGE_BYTES)
    unpin(device, pinned)
    unpin(device, pinned)
    assert pinned.array.shape == (PAGE_BYTES,)


# buffers


def test_buffers_take_and_give_bytes_of_any_array(any_device: kvoffload.Device) -> None:
    with any_device.allocate(1000) as buffer:
        assert buffer.nbytes == 1000
        buffer.copy_from(np.zeros(1000, np.uint8))
        buffer.copy_from(np.arange(10, dtype=np.int32)[::2], offset=4)
        buffer.copy_from(b"abc", offset=900)
        buffer.copy_from([], offset=1000)
        content = buffer.to_numpy()
        assert content[4:24].view(np.int32).tolist() == [0, 2, 4, 6, 8]
        assert content[900:903].tobytes() == b"abc"
        content[4:24] = content[900:903] = 0
        assert not content.any()
        content[:] = 1
        assert buffer.to_numpy()[0] == 0  # a copy, not a view


@pytest.mark.parametrize(("nbytes", "offset"), [(11, 0), (1, 10), (5, -1), (5, 6)])
def test_buffers_refuse_what_does_not_fit(device: kvoffload.Device, nbytes: int, offset: int) -> None:
    buffer = device.allocate(10)
    with pytest.raises(ValueError, match=f"array of {nbytes} bytes at offset {offset} does not fit into 10 bytes"):
        buffer.copy_from(np.zeros(nbytes, np.uint8), offset=offset)


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (None, "array must hold plain values, got None, which numpy holds as pointers"),
        (np.array([1, "a"], dtype=object), "array must hold plain values"),
        ([None, 3], "array must hold plain values"),
        (np.zeros(2, dtype=[("a", np.int8), ("b", object)]), "array must hold plain values"),
        (np.ma.masked_array([1, 2], mask=[False, True]), "array must not be masked"),
    ],
)
def test_buffers_take_no_pointers_and_no_masked_values(device: kvoffload.Device, array: Any, problem: str) -> None:
    buffer = device.allocate(64)
    before = buffer.to_numpy()
    with pytest.raises(TypeError, match=problem):
        buffer.copy_from(array)
    assert (buffer.to_numpy() == before).all()


@pytest.mark.parametrize("offset", [None, 1.0, "1", True])
def test_an_offset_is_an_integer(device: kvoffload.Device, offset: Any) -> None:
    with pytest.raises(TypeError, match=f"offset must be an integer, got {offset!r}"):
        device.allocate(64).copy_from(b"a", offset=offset)


def test_empty_bytes_copy_nothing(device: kvoffload.Device) -> None:
    buffer = device.allocate(4)
    buffer.copy_from(bytearray(b"abcd"), offset=np.int64(0).item())
    buffer.copy_from(b"")
    buffer.copy_from(b"", offset=4)
    assert buffer.to_numpy().tobytes() == b"abcd"


@pytest.mark.parametrize("shape", [(True, 2), (0,), (), 5, None, (2, -1), (1.5,), "ab"])
def test_a_shape_is_positive_integers(device: kvoffload.Device, shape: Any) -> None:
    with leak_check(device), pytest.raises(ValueError, match="shape must be a sequence of positive integers, got "):
        device.empty(shape, "uint8")


def test_a_buffer_is_a_cuda_array(device: kvoffload.Device) -> None:
    buffer = device.allocate(10)
    interface = buffer.__cuda_array_interface__
    assert interface["data"] == (buffer.address, False)
    assert (interface["shape"], interface["typestr"], interface["strides"]) == ((10,), "|u1", None)
    assert repr(buffer) == f"DeviceBuffer({buffer.address:#x}, 10 bytes)"
    buffer.close()
    buffer.close()
    assert repr(buffer).endswith("10 bytes, closed)")
    for use in (lambda: buffer.copy_from(b"a"), buffer.to_numpy, lambda: buffer.__cuda_array_interface__):
        with pytest.raises(ClosedError, match=r"buffer of 10 bytes at .* is closed"):
            use()


def test_a_buffer_of_a_lost_context_can_be_closed_after_a_copy_that_failed() -> None:
    device = kvoffload.open_device(backend=SimulatedDriver())
    buffer = device.allocate(10)
    assert device.simulator is not None
    device.simulator.faults.sticky()
    with pytest.raises(kvoffload.DriverError, match="ILLEGAL_ADDRESS"):
        buffer.copy_from(b"a")
    buffer.close()
    buffer.close()
    assert repr(buffer).endswith(", closed)")
    device.close()


def test_buffers_are_freed_once_when_closed_or_garbage(device: kvoffload.Device) -> None:
    leaks = device.simulator.leaks
    closed, dropped = device.allocate(10), device.allocate(20)
    assert leaks()["device_allocations"] == 2
    closed.close()
    assert leaks()["device_allocations"] == 1
    alive = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert alive() is None
    assert leaks()["device_allocations"] == 1  # a finalizer calls no driver
    device.reclaim()
    assert leaks()["device_allocations"] == 0


def test_a_full_gpu_is_a_capacity_error_with_figures(device: kvoffload.Device) -> None:
    free = device.simulator.memory_bytes
    with pytest.raises(
        CapacityError, match=rf"cannot allocate {free + 1} bytes on .*: {free} of {free} bytes are free"
    ):
        device.allocate(free + 1)


def test_garbage_is_freed_before_memory_is_called_short() -> None:
    simulator = SimulatedDriver(memory_bytes=1 << 20)
    device = kvoffload.open_device(backend=simulator)
    for _ in range(5):
        device.allocate(900 << 10)
    check_clean_close(device)

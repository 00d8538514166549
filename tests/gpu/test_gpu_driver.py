"""What only the real driver shows: structure layouts by copies, limits of rows and addresses, contexts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from capture_probe import GLOBAL, RELAXED, THREAD_LOCAL, Capturing, Probe
from helpers import copiers_in

import kvoffload
from kvoffload import NO_WAIT, Direction, DriverError, KVLayout, LayoutError, OffloadEngine, Plane, TransferError
from kvoffload.copiers import BatchCopier, Copier, LoopCopier, StridedCopier
from kvoffload.device.pinned import PAGE_BYTES, PinnedMemory
from kvoffload.driver import Driver, FlatTable, SourceOrder, StridedTable, address_of
from kvoffload.driver.tables import Columns
from kvoffload.layout.fold import fold
from kvoffload.planning.transfer_plan import addresses_of_slots, build
from kvoffload.testing import leak_check, scramble
from kvoffload.tuning import CopierName

pytestmark = pytest.mark.gpu

WIDTH, HEIGHT, HOST_PITCH, DEVICE_PITCH = 100, 5, 160, 256


class Bench:
    """A stream, pinned memory and a device buffer, with the context current."""

    def __init__(self, device: kvoffload.Device) -> None:
        self.device = device
        self.driver: Driver = device.driver
        self.stream = device.driver.stream_create(0)
        self.pinned = PinnedMemory(device.driver, 4 * PAGE_BYTES)
        self.host = self.pinned.array
        self.buffer = device.allocate(4 * PAGE_BYTES)

    def finish(self) -> None:
        self.driver.stream_synchronize(self.stream)

    def close(self) -> None:
        self.finish()
        self.pinned.release()
        self.driver.stream_destroy(self.stream)
        self.buffer.close()


@pytest.fixture
def bench(gpu_device: kvoffload.Device) -> Iterator[Bench]:
    with gpu_device.current():
        made = Bench(gpu_device)
        yield made
        made.close()


def columns(
    *,
    source: int | list[int],
    target: int | list[int],
    source_pitch: int,
    target_pitch: int,
    width: int,
    height: int | list[int],
) -> Columns:
    """In the order of `StridedTable.fill`. A single number holds for all operations."""
    return (
        np.atleast_1d(np.array(source, dtype=np.uint64)),
        np.atleast_1d(np.array(target, dtype=np.uint64)),
        np.array([source_pitch], dtype=np.uint64),
        np.array([target_pitch], dtype=np.uint64),
        np.array([width], dtype=np.uint64),
        np.atleast_1d(np.array(height, dtype=np.uint64)),
    )


def to_device(bench: Bench) -> Columns:
    """Two operations of rows from host to device."""
    host, device = bench.pinned.address, bench.buffer.address
    return columns(
        source=[host, host + 8 * HOST_PITCH],
        target=[device + 7, device + 7 + 8 * DEVICE_PITCH],
        source_pitch=HOST_PITCH,
        target_pitch=DEVICE_PITCH,
        width=WIDTH,
        height=[HEIGHT, HEIGHT - 2],
    )


def check_rows(bench: Bench, before: Any) -> None:
    expected = before.copy()
    for operation, height in enumerate((HEIGHT, HEIGHT - 2)):
        for row in range(height):
            source = (8 * operation + row) * HOST_PITCH
            target = 7 + (8 * operation + row) * DEVICE_PITCH
            expected[target : target + WIDTH] = bench.host[source : source + WIDTH]
    assert (bench.buffer.to_numpy() == expected).all()


def fill_host(bench: Bench) -> None:
    bench.host[:] = np.random.default_rng(1).integers(0, 256, bench.host.size, dtype=np.uint8)


def test_the_2d_structure_is_read_as_written(bench: Bench) -> None:
    fill_host(bench)
    before = scramble(bench.buffer, 2)
    table = StridedTable(4, batched=False)
    table.fill(to_device(bench), SourceOrder.STREAM)
    for index in range(2):
        bench.driver.copy_strided(table, index, bench.stream)
    bench.finish()
    check_rows(bench, before)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("order", SourceOrder)
def test_the_3d_batch_structure_is_read_as_written(bench: Bench, order: SourceOrder, raw: bool) -> None:
    if not bench.device.capabilities.strided_batch or (raw and not bench.device.capabilities.raw_addresses):
        pytest.skip(f"not offered here: {bench.device.capabilities.missing}")
    bench.driver.use_raw = raw
    fill_host(bench)
    before = scramble(bench.buffer, 2)
    table = StridedTable(4, batched=True)
    table.fill(to_device(bench), order)
    bench.driver.copy_strided_batch(table, 2, bench.stream)
    bench.finish()
    check_rows(bench, before)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("order", SourceOrder)
def test_the_flat_batch_arrays_are_read_as_written(bench: Bench, order: SourceOrder, raw: bool) -> None:
    if not bench.device.capabilities.flat_batch or (raw and not bench.device.capabilities.raw_addresses):
        pytest.skip(f"not offered here: {bench.device.capabilities.missing}")
    bench.driver.use_raw = raw
    fill_host(bench)
    before = scramble(bench.buffer, 3)
    starts = np.arange(5, dtype=np.uint64)
    table = FlatTable(8)
    sizes = starts * np.uint64(30) + np.uint64(1)
    targets = starts * np.uint64(200) + np.uint64(bench.buffer.address)
    table.fill(targets, starts * np.uint64(300) + np.uint64(bench.pinned.address), sizes)
    bench.driver.copy_batch(table, 1, 4, order, bench.stream)
    bench.finish()
    expected = before.copy()
    for index in range(1, 4):
        nbytes = 30 * index + 1
        expected[200 * index : 200 * index + nbytes] = bench.host[300 * index : 300 * index + nbytes]
    assert (bench.buffer.to_numpy() == expected).all()


def test_a_2d_copy_of_one_row_needs_a_pitch_of_its_width(bench: Bench) -> None:
    """Why single-row operations get a pitch too; the simulated driver refuses the same."""
    table = StridedTable(1, batched=False)
    one = columns(
        source=bench.pinned.address, target=bench.buffer.address, source_pitch=50, target_pitch=50, width=100, height=1
    )
    table.fill(one, SourceOrder.STREAM)
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        bench.driver.copy_strided(table, 0, bench.stream)


@pytest.mark.parametrize("batched", [False, True])
def test_pitfall_37_the_driver_refuses_rows_that_cross_allocations(bench: Bench, batched: bool) -> None:
    if batched and not bench.device.capabilities.strided_batch:
        pytest.skip("no batch calls here")
    buffers = [bench.device.allocate(4 << 20) for _ in range(2)]
    low, high = sorted(buffer.address for buffer in buffers)
    table = StridedTable(1, batched=batched)
    operation = columns(
        source=bench.pinned.address, target=low, source_pitch=100, target_pitch=high - low, width=100, height=2
    )
    table.fill(operation, SourceOrder.STREAM)
    copy = bench.driver.copy_strided_batch if batched else bench.driver.copy_strided
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        copy(table, 1 if batched else 0, bench.stream)
    bench.finish()


@pytest.mark.parametrize("copier", ["strided", "batch", "loop"])
def test_pitfall_37_an_engine_does_not_fold_there(gpu_device: kvoffload.Device, copier: CopierName) -> None:
    if copier == "batch" and not gpu_device.capabilities.flat_batch:
        pytest.skip("no batch calls here")
    # allocations of 2 MiB lie side by side: planes at a perfect constant stride
    buffers = sorted((gpu_device.allocate(2 << 20) for _ in range(8)), key=lambda buffer: buffer.address)
    contents = [scramble(buffer, index) for index, buffer in enumerate(buffers)]
    planes = [Plane(buffer.address, block_bytes=4096, num_blocks=512, owner=buffer) for buffer in buffers]
    with OffloadEngine(KVLayout([planes]), device=gpu_device, num_slots=4) as engine:
        assert "8 planes do not fold (8 operations a block)" in repr(engine)
        engine.store([511, 0, 7], [2, 0, 3], after=NO_WAIT, copier=copier).wait(10)
        for block, slot in ((511, 2), (0, 0), (7, 3)):
            for index, content in enumerate(contents):
                stored = engine.slots[slot, 4096 * index : 4096 * (index + 1)]
                assert (stored == content[4096 * block : 4096 * (block + 1)]).all()


def test_pitfall_09_a_plane_past_its_allocation_is_refused_and_nothing_breaks(gpu_device: kvoffload.Device) -> None:
    buffer = gpu_device.allocate(1 << 20)
    with leak_check(gpu_device), pytest.raises(LayoutError, match=r"groups\[0\]\[0\].* past the end of its allocation"):
        OffloadEngine(
            KVLayout([[Plane(buffer.address, block_bytes=4096, num_blocks=257)]]), device=gpu_device, num_slots=2
        )
    with OffloadEngine(
        KVLayout([[Plane(buffer.address, block_bytes=4096, num_blocks=256)]]), device=gpu_device, num_slots=2
    ) as engine:
        engine.store([255], [1]).wait(10)


def test_pitfall_32_host_memory_and_wild_addresses_are_refused_as_planes(gpu_device: kvoffload.Device) -> None:
    layout = KVLayout([gpu_device.allocate_planes(1, block_bytes=4096, num_blocks=2)])
    with OffloadEngine(layout, device=gpu_device, num_slots=2) as engine:
        for address in (address_of(engine.slots), address_of(np.empty(4096, np.uint8)), 4096):
            wrong = KVLayout([[Plane(address, block_bytes=64, num_blocks=2)]])
            with pytest.raises(LayoutError, match=r"groups\[0\]\[0\]"):
                OffloadEngine(wrong, device=gpu_device, num_slots=2)


def made_copier(bench: Bench, name: str) -> Copier:
    if name == "batch":
        return BatchCopier(bench.driver)
    if name == "loop":
        return LoopCopier(bench.driver)
    return StridedCopier(bench.driver, batched=bench.device.capabilities.strided_batch)


@pytest.mark.parametrize("name", ["strided", "batch", "loop"])
def test_pitfall_15_a_bad_pointer_raises_with_every_copier_and_the_context_lives(bench: Bench, name: str) -> None:
    if name == "batch" and not bench.device.capabilities.flat_batch:
        pytest.skip("no batch calls here")
    copier = made_copier(bench, name)
    # Wholly outside an allocation, an address counts as pageable host memory and the driver crashes when it reads it.
    for offset, fine in ((0, True), (PAGE_BYTES // 2, False)):  # the last block ends past the end of the allocation
        planes = [Plane(bench.buffer.address + offset, block_bytes=PAGE_BYTES, num_blocks=4)]
        layout = KVLayout([planes], blocks_per_slot=1)
        last = np.array([3])
        blocks = build(
            fold(layout)[0],
            layout,
            Direction.STORE,
            slot_addresses=addresses_of_slots(layout, bench.pinned.address, 1),
            slots=np.array([0]),
            blocks=last,
        )
        plan = copier.prepare(blocks)
        if fine:
            submit(copier, plan, bench.stream)
        else:
            with pytest.raises(DriverError, match="INVALID_VALUE"):
                submit(copier, plan, bench.stream)
    bench.finish()
    if isinstance(copier, BatchCopier):
        copier.close()


def submit(copier: Copier, work: Any, stream: int) -> None:
    copier.stage(work, SourceOrder.STREAM)(stream)


# contexts


def current_context() -> int:
    from cuda.bindings import driver as cuda

    return int(cuda.cuCtxGetCurrent()[1])


def test_pitfall_36_the_callers_context_is_current_again(gpu_device: kvoffload.Device) -> None:
    from cuda.bindings import driver as cuda

    create: Any = cuda.cuCtxCreate
    index = gpu_device.index
    arguments = (0, index) if gpu_device.capabilities.bindings_version < (13, 0) else (None, 0, index)
    error, mine = create(*arguments)
    assert int(error) == 0
    try:
        layout = KVLayout([gpu_device.allocate_planes(4, block_bytes=4096, num_blocks=8)])
        assert current_context() == int(mine)
        with OffloadEngine(layout, device=gpu_device, num_slots=4) as engine:
            engine.store([0], [0], after=NO_WAIT).wait(10)
            assert current_context() == int(mine)
        with kvoffload.open_device(index, context=mine) as embedded:
            planes = embedded.allocate_planes(4, block_bytes=4096, num_blocks=8)
            with OffloadEngine(KVLayout([planes]), device=embedded, num_slots=4) as engine:
                engine.load([0], [0]).wait(10)
        assert current_context() == int(mine)
    finally:
        cuda.cuCtxDestroy(mine)


def test_pitfall_07_every_default_stream_and_a_capturing_one(gpu_device: kvoffload.Device) -> None:
    from cuda.bindings import driver as cuda

    layout = KVLayout([gpu_device.allocate_planes(6, block_bytes=4096, num_blocks=8)])
    with OffloadEngine(layout, device=gpu_device, num_slots=4) as engine:
        for after in (None, 0, 1, 2, NO_WAIT):
            for copier in ("strided", "pack", "loop", None):
                engine.store([1], [1], after=after, copier=copier).wait(10)
        with gpu_device.current():
            stream = gpu_device.driver.stream_create(0)
            mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            assert int(cuda.cuStreamBeginCapture(stream, mode)[0]) == 0
            with pytest.raises(TransferError, match="is being captured"):
                engine.store([0], [0], after=stream)
            error, graph = cuda.cuStreamEndCapture(stream)
            assert int(error) == 0
            cuda.cuGraphDestroy(graph)
            gpu_device.driver.stream_destroy(stream)
        engine.store([0], [0]).wait(10)


@pytest.mark.parametrize("other_thread", [False, True])
@pytest.mark.parametrize("thread_mode", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("capture_mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_pitfall_07_a_capture_forbids_the_calls_that_the_simulated_driver_says(
    gpu_device: kvoffload.Device, capture_mode: Any, thread_mode: Any, other_thread: bool
) -> None:
    with gpu_device.current():
        real = Probe(gpu_device.driver.api, gpu_device.context).table(capture_mode, thread_mode, other_thread)
    with kvoffload.open_device(backend="simulated") as device, device.current():
        simulated = Probe(device.simulator, device.context).table(capture_mode, thread_mode, other_thread)
    assert {name: (real[name], simulated[name]) for name in real if real[name] != simulated[name]} == {}


@pytest.mark.parametrize("other_thread", [False, True])
def test_pitfall_07_transfers_leave_a_capture_of_another_stream_alone(
    gpu_device: kvoffload.Device, other_thread: bool
) -> None:
    layout = KVLayout([gpu_device.allocate_planes(4, block_bytes=4096, num_blocks=8)])
    with OffloadEngine(layout, device=gpu_device, num_slots=8) as engine:
        capture = Capturing(gpu_device, GLOBAL, other_thread=other_thread)
        for copier in (*copiers_in(engine), None):
            job = engine.store(range(8), range(8), copier=copier)
            assert job.wait(10).error is None
            second = engine.load(range(8), range(8), after=NO_WAIT, copier=copier)
            while not second.done:
                pass
            assert [result.error for result in engine.poll()] == [None]
        with gpu_device.allocate(64) as buffer:
            buffer.copy_from(np.arange(64, dtype=np.uint8))
            assert buffer.to_numpy()[9] == 9
        with OffloadEngine(layout, device=gpu_device, num_slots=2):
            pass
        assert capture.end() == "CUDA_SUCCESS"

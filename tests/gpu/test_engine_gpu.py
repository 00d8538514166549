"""The engine on a GPU: order with real streams, queues, leaks, contexts, and the time that a submission takes."""

from __future__ import annotations

import gc
import os
import statistics as averages
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import BLOCKING, LEGACY, NON_BLOCKING, PER_THREAD, Rig, paint, rig, whole

import kvoffload
from kvoffload import NO_WAIT, KVLayout, OffloadEngine, streams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

COPIERS = ("strided", "batch", "loop")
KIB = 1024


@pytest.fixture
def bench(gpu_device: kvoffload.Device) -> Iterator[Rig]:
    """Blocks of 16 planes of 64 KiB: 1 MiB each, long enough to be overtaken."""
    with rig(gpu_device, planes=16, block_bytes=64 * KIB, num_blocks=32, num_slots=32) as made:
        _warm_up(made)
        yield made
        made.engine.drain(30)
        whole(made.engine)


def _warm_up(bench: Rig) -> None:
    """The driver may synchronise when it first fills or copies; behind a closed gate that would be for ever."""
    stream, scratch = bench.stream(), bench.device.allocate(16 * 64 * KIB)
    bench.fill(stream, 1)
    bench.copy_block(stream, scratch.address, 0)
    bench.synchronize(stream)
    bench.gate(stream).open()
    paint(bench)


def all_are(array: Any, value: int) -> bool:
    return bool((np.asarray(array) == value).all())


def stream_of(bench: Rig, kind: str) -> int:
    handles = {"legacy": 0, "per-thread": PER_THREAD}
    return handles[kind] if kind in handles else bench.stream(BLOCKING if kind == "blocking" else NON_BLOCKING)


def release(bench: Rig, *held_back: kvoffload.Job) -> None:
    """Give the GPU time to do what it should not, open the gates, wait for everything."""
    bench.settle()
    for job in held_back:
        assert not job.done, "the gate holds this one back"
    for gate in bench.gates:
        gate.open()
    bench.engine.drain(30)


# order


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("kind", ["own", "blocking", "legacy", "per-thread"])
def test_pitfall_01_store_waits_for_the_writer(bench: Rig, kind: str, copier: str) -> None:
    stream = stream_of(bench, kind)
    bench.gate(stream or LEGACY)
    bench.fill(stream or LEGACY, 77)
    job = bench.engine.store(range(8), range(8), after=stream, copier=copier)
    release(bench, job)
    assert all(all_are(bench.slot(slot), 77) for slot in range(8))


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("kind", ["own", "blocking", "legacy", "per-thread"])
def test_pitfall_02_load_waits_for_the_reader(bench: Rig, kind: str, copier: str) -> None:
    stream = stream_of(bench, kind)
    scratch = bench.device.allocate(16 * 64 * KIB)
    bench.gate(stream or LEGACY)
    bench.copy_block(stream or LEGACY, scratch.address, 5)
    job = bench.engine.load([2], [5], after=stream, copier=copier)
    release(bench, job)
    bench.synchronize(stream or LEGACY)
    assert all_are(scratch.to_numpy(), 6), "the reader saw the block before the load"
    assert all_are(bench.block(5), 102)


def test_without_after_a_transfer_waits_for_the_legacy_stream_and_the_blocking_ones(bench: Rig) -> None:
    blocking = bench.stream(BLOCKING)
    bench.gate(blocking)
    bench.fill(blocking, 79, block=4)
    job = bench.engine.store([4], [1])
    release(bench, job)
    assert all_are(bench.slot(1), 79)


def test_no_wait_waits_for_no_stream(bench: Rig) -> None:
    bench.gate(bench.stream(), LEGACY)
    bench.engine.store([3], [0], after=NO_WAIT).wait(30)
    assert all_are(bench.slot(0), 4)


def test_a_cupy_kernel_that_writes_is_waited_for(bench: Rig) -> None:
    """A slow kernel on CuPy's own stream writes the blocks; the store follows it, `after` given as the CuPy stream."""
    cupy = pytest.importorskip("cupy")
    kernel = cupy.RawKernel(
        """extern "C" __global__ void slow(unsigned char* at, size_t n, long long cycles) {
               long long start = clock64();
               while (clock64() - start < cycles) {}
               for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) at[i] = 55;
           }""",
        "slow",
    )
    memory = cupy.ndarray(
        (bench.slab.nbytes,),
        cupy.uint8,
        cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(bench.slab.address, bench.slab.nbytes, bench.slab), 0),
    )
    kernel((1,), (32,), (memory, 1, 1))  # compiled and loaded before it counts
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        kernel((64,), (256,), (memory, memory.size, 100_000_000))
        job = bench.engine.store([3, 9], [0, 1], after=stream)
        assert not job.done
    job.wait(30)
    assert all_are(bench.slot(0), 55)
    assert all_are(bench.slot(1), 55)
    with stream:
        bench.engine.load([20], [3], after=stream).order_before(stream)
        assert int(memory[bench.planes[0].address - bench.slab.address + 3 * 64 * KIB]) == 120
    cupy.cuda.Device().synchronize()


@pytest.mark.parametrize("short", [False, True], ids=["one stream", "many streams"])
def test_transfers_keep_their_order(bench: Rig, short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if short:
        monkeypatch.setattr(streams, "QUEUE_LIMIT", 5)
    held = bench.stream()
    bench.gate(held)
    bench.engine.store([3], [0], after=held)
    for block in (4, 5, 6):
        last = bench.engine.store([block], [0], after=NO_WAIT)
    release(bench, last)
    assert all_are(bench.slot(0), 7)


@pytest.mark.parametrize("copier", COPIERS)
def test_a_chain_through_both_directions(bench: Rig, copier: str) -> None:
    held = bench.stream()
    bench.gate(held)
    bench.fill(held, 61, block=3)
    bench.engine.store([3], [0], after=held, copier=copier)
    for step in range(8):
        bench.engine.load([step], [4 + step], after=NO_WAIT, copier=copier)
        job = bench.engine.store([4 + step], [step + 1], after=NO_WAIT, copier=copier)
    release(bench, job)
    assert all(all_are(bench.slot(slot), 61) for slot in range(9))
    assert all(all_are(bench.block(block), 61) for block in range(3, 12))


def test_a_load_waits_until_a_store_has_read_its_blocks(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    bench.engine.store([3], [0], after=held)
    job = bench.engine.load([9], [3], after=NO_WAIT)
    release(bench, job)
    assert all_are(bench.slot(0), 4)
    assert all_are(bench.block(3), 109)


def test_order_before_in_both_directions(bench: Rig) -> None:
    held, other = bench.stream(), bench.stream()
    scratch = bench.device.allocate(16 * 64 * KIB)
    bench.gate(held)
    store = bench.engine.store([3], [0], after=held)
    store.order_before(other)
    bench.fill(other, 88, block=3)
    load = bench.engine.load([7], [8], after=held)
    load.order_before(other)
    bench.copy_block(other, scratch.address, 8)
    release(bench, store, load)
    bench.synchronize(other)
    assert all_are(bench.slot(0), 4)
    assert all_are(bench.block(3), 88)
    assert all_are(scratch.to_numpy(), 107)


@pytest.mark.parametrize("copier", ["strided", "loop"])
def test_pieces_on_several_streams(bench: Rig, copier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "QUEUE_LIMIT", 40)
    monkeypatch.setattr(bench.engine._copiers[copier], "piece_operations", 4)
    held = bench.stream()
    bench.gate(held)
    bench.fill(held, 33)
    store = bench.engine.store(range(16), range(16), after=held, copier=copier)
    load = bench.engine.load(range(16), range(16, 32), after=NO_WAIT, copier=copier)
    release(bench, store, load)
    assert all(all_are(bench.slot(slot), 33) for slot in range(16))
    assert all(all_are(bench.block(block), 33) for block in range(16, 32))


def test_many_random_transfers_give_the_bytes_of_program_order(bench: Rig) -> None:
    rng = np.random.default_rng(11)
    blocks, slots = np.arange(1, 33), np.arange(100, 132)
    own = [bench.stream(), bench.stream(), 0, 2]
    for _ in range(300):
        count = int(rng.integers(1, 9))
        some_blocks, some_slots = rng.permutation(32)[:count], rng.permutation(32)[:count]
        copier = COPIERS[int(rng.integers(3))]
        after = NO_WAIT if rng.random() < 0.5 else own[int(rng.integers(4))]
        if rng.random() < 0.5:
            job = bench.engine.store(some_blocks, some_slots, after=after, copier=copier)
            slots[some_slots] = blocks[some_blocks]
        else:
            job = bench.engine.load(some_slots, some_blocks, after=after, copier=copier)
            blocks[some_blocks] = slots[some_slots]
        if rng.random() < 0.1 and job.direction == "store":
            stream = own[int(rng.integers(4))]
            job.order_before(stream)
            bench.fill(stream or LEGACY, 200, block=int(some_blocks[0]))
            blocks[some_blocks[0]] = 200
            bench.engine.store(some_blocks[:1], [31], after=stream)
            slots[31] = 200
    bench.engine.drain(60)
    assert all(all_are(bench.slot(slot), slots[slot]) for slot in range(32))
    assert all(all_are(bench.block(block), blocks[block]) for block in range(32))


# queues


@pytest.mark.parametrize("copier", COPIERS)
def test_pitfall_06_submission_time_stays_bounded(gpu_device: kvoffload.Device, copier: str) -> None:
    """2000 transfers of 3 blocks behind a gate. A full driver queue would hold the submission up for good."""
    with rig(gpu_device, planes=4, block_bytes=4 * KIB, num_blocks=64, num_slots=64) as bench:
        held = bench.stream()
        gate = bench.gate(held)
        rng = np.random.default_rng(3)
        opener = threading.Timer(60, gate.open)  # so that a failure is a failure and no hang
        opener.start()
        seconds = []
        for number in range(2000):
            ids = rng.choice(64, 3, replace=False)
            call = bench.engine.load if number % 2 else bench.engine.store
            began = time.perf_counter()
            call(ids, ids, after=held if number < 2 else NO_WAIT, copier=copier)
            seconds.append(time.perf_counter() - began)
        in_flight = bench.engine.statistics().in_flight
        opener.cancel()
        gate.open()
        bench.engine.drain(60)
        micro = [each * 1e6 for each in seconds]
        late = averages.median(micro[-200:])
        print(f"{copier}: median {averages.median(micro):.0f} us, last 200 {late:.0f} us, max {max(micro):.0f} us")
        assert in_flight == 2000
        assert averages.median(seconds) < 500e-6
        assert averages.median(seconds[-200:]) < 4 * averages.median(seconds[100:300])
        assert max(seconds) < 0.1
        whole(bench.engine)


# leaks


def _host_state() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def test_pitfall_30_ten_thousand_transfers_leak_nothing(gpu_device: kvoffload.Device) -> None:
    with rig(gpu_device, planes=4, block_bytes=4 * KIB, num_blocks=64, num_slots=64) as bench:

        def transfers(count: int) -> None:
            rng = np.random.default_rng(5)
            for number in range(count):
                ids = rng.choice(64, 3, replace=False)
                (bench.engine.store if number % 2 else bench.engine.load)(
                    ids, ids, after=NO_WAIT, copier=COPIERS[number % 3]
                )
                if number % 100 == 0:
                    bench.engine.drain(30)
                    bench.engine.poll()
            bench.engine.drain(30)
            bench.engine.poll()

        def gpu_bytes() -> int:
            with gpu_device.current():
                return gpu_device.driver.free_and_total_bytes()[0]

        transfers(2000)
        gc.collect()
        before = (gpu_bytes(), _host_state(), bench.engine.statistics())
        transfers(10_000)
        gc.collect()
        after = (gpu_bytes(), _host_state(), bench.engine.statistics())
        assert before[0] - after[0] <= 4 << 20, "GPU memory"
        assert after[1] == before[1], "file descriptors and threads"
        assert after[2].streams - before[2].streams <= 2
        assert after[2].events - before[2].events <= 100
        whole(bench.engine)


def test_engines_and_buffers_give_their_memory_back(gpu_device: kvoffload.Device) -> None:
    def free_bytes() -> int:
        with gpu_device.current():
            return gpu_device.driver.free_and_total_bytes()[0]

    def use() -> None:
        with rig(gpu_device, planes=4, block_bytes=1 << 20, num_blocks=16, num_slots=16) as bench:
            bench.engine.store(range(16), range(16)).wait(30)
        del bench
        gc.collect()
        gpu_device.reclaim()

    use()
    before = free_bytes()
    for _ in range(5):
        use()
    assert before - free_bytes() <= 4 << 20


# contexts and threads


def test_pitfall_36_any_thread_and_any_context(bench: Rig) -> None:
    from cuda.bindings import driver as cuda

    def created() -> Any:
        arguments = (0, 0) if bench.device.driver.bindings_version < (13, 0) else (None, 0, 0)
        status, context = cuda.cuCtxCreate(*arguments)
        assert not status, status
        return context

    results: list[Any] = []

    def work(own: bool) -> None:
        try:
            context: Any = created() if own else None
            bench.engine.store([1], [1], after=NO_WAIT).wait(30)
            bench.engine.load([1], [2], after=PER_THREAD).wait(30)
            bench.engine.poll()
            current = int(cuda.cuCtxGetCurrent()[1])
            results.append(current == (int(context) if own else 0))
            if own:
                cuda.cuCtxDestroy(context)
        except BaseException as error:
            results.append(error)

    for own in (False, True):
        thread = threading.Thread(target=work, args=(own,))
        thread.start()
        thread.join()
    assert results == [True, True]
    assert all_are(bench.slot(1), 2)
    assert all_are(bench.block(2), 2)


def test_four_threads_submit_and_wait(bench: Rig) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            rng = np.random.default_rng(number)
            mine = range(8 * number, 8 * number + 8)
            for _ in range(50):
                blocks, slots = rng.permutation(mine)[:4], rng.permutation(mine)[:4]
                store = bench.engine.store(blocks, slots, after=NO_WAIT)
                load = bench.engine.load(slots, blocks, after=NO_WAIT)
                store.wait(60)
                load.wait(60)
                for block, slot in zip(blocks, slots, strict=True):
                    assert all_are(bench.slot(int(slot)), int(block) + 1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# a real geometry


@pytest.fixture(scope="module")
def llama_bytes() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random bytes of 64 planes x 128 blocks x 32 KiB: 256 MiB."""
    return np.random.default_rng(1).integers(0, 256, (64, 128, 32 * KIB), dtype=np.uint8)


@pytest.mark.parametrize("copier", [*COPIERS, None])
def test_llama_blocks_there_and_back(gpu_device: kvoffload.Device, llama_bytes: Any, copier: str | None) -> None:
    planes = gpu_device.allocate_planes(64, block_bytes=32 * KIB, num_blocks=128)
    slab: Any = planes[0].owner
    slab.copy_from(llama_bytes)
    rng = np.random.default_rng(2)
    stored, loaded, slots = rng.permutation(128)[:32], rng.permutation(128)[:32], rng.permutation(48)[:32]
    with OffloadEngine(KVLayout([planes]), device=gpu_device, num_slots=48) as engine:
        engine.store(stored, slots, copier=copier).wait(60)
        assert (engine.slots[slots].reshape(32, 64, 32 * KIB) == llama_bytes[:, stored].transpose(1, 0, 2)).all()
        engine.load(slots, loaded, copier=copier).wait(60)
        expected = llama_bytes.copy()
        expected[:, loaded] = llama_bytes[:, stored]
        assert (slab.to_numpy().reshape(expected.shape) == expected).all()


def _median_seconds(call: Callable[[], kvoffload.Job], count: int = 100) -> float:
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        job = call()
        seconds.append(time.perf_counter() - began)
        job.wait(30)
    return averages.median(seconds)


@pytest.mark.parametrize(("planes", "blocks", "limit"), [(64, 32, 250e-6), (160, 512, 1e-3)])
def test_submissions_return_at_once(gpu_device: kvoffload.Device, planes: int, blocks: int, limit: float) -> None:
    made = gpu_device.allocate_planes(planes, block_bytes=8 * KIB, num_blocks=1024)
    order = np.random.default_rng(4).permutation(1024)[:blocks]
    with OffloadEngine(KVLayout([made]), device=gpu_device, num_slots=blocks) as engine:
        slots = np.arange(blocks)
        _median_seconds(lambda: engine.store(order, slots), 10)
        store = _median_seconds(lambda: engine.store(order, slots))
        load = _median_seconds(lambda: engine.load(slots, order))
        print(f"{blocks} blocks x {planes} planes: store {store * 1e6:.0f} us, load {load * 1e6:.0f} us")
        assert store <= limit
        assert load <= limit


# the process


def test_pitfall_31_a_process_that_ends_with_work_in_flight(gpu_device: kvoffload.Device) -> None:
    import subprocess
    import sys

    assert not gpu_device.closed
    script = """
import kvoffload
device = kvoffload.open_device()
planes = device.allocate_planes(32, block_bytes=1 << 20, num_blocks=32)
engine = kvoffload.OffloadEngine(kvoffload.KVLayout([planes]), device=device, num_slots=32)
for _ in range(8):
    engine.store(range(32), range(32))
    engine.load(range(32), range(32))
"""
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")

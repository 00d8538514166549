"""The engine on a GPU: order with real streams, with CuPy's, between transfers, between segments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import (
    BLOCKING,
    LEGACY,
    NON_BLOCKING,
    PER_THREAD,
    Rig,
    all_are,
    change_streams,
    cut_segments,
    paint,
    release,
    rig,
    shuttles,
    warm_up,
    whole,
)

import kvoffload
from kvoffload import NO_WAIT
from kvoffload.tuning import CopierName

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

COPIERS: tuple[CopierName, ...] = ("strided", "gather", "split", "batch", "loop")
KIB = 1024


@pytest.fixture
def bench(gpu_device: kvoffload.Device) -> Iterator[Rig]:
    """Blocks of 16 planes of 64 KiB: 1 MiB each, long enough to be overtaken."""
    with rig(gpu_device, planes=16, block_bytes=64 * KIB, num_blocks=32, num_slots=32, sm_limit=2) as made:
        warm_up(made)
        yield made
        made.engine.drain(30)
        whole(made.engine)


def stream_of(bench: Rig, kind: str) -> int:
    handles = {"legacy": 0, "per-thread": PER_THREAD}
    return handles[kind] if kind in handles else bench.stream(BLOCKING if kind == "blocking" else NON_BLOCKING)


# order


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("kind", ["own", "blocking", "legacy", "per-thread"])
def test_pitfall_01_store_waits_for_the_writer(bench: Rig, kind: str, copier: CopierName) -> None:
    stream = stream_of(bench, kind)
    bench.gate(stream or LEGACY)
    bench.fill(stream or LEGACY, 77)
    job = bench.engine.store(range(8), range(8), after=stream, copier=copier)
    release(bench, job)
    assert all(all_are(bench.slot(slot), 77) for slot in range(8))


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("kind", ["own", "blocking", "legacy", "per-thread"])
def test_pitfall_02_load_waits_for_the_reader(bench: Rig, kind: str, copier: CopierName) -> None:
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


def test_a_cupy_kernel_that_writes_is_waited_for(bench: Rig, cupy: Any) -> None:
    """A slow kernel on CuPy's own stream writes the blocks; the store follows it, `after` given as the CuPy stream."""
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
    kernel((1,), (32,), (memory, 1, 1))  # compiled and loaded before it counts: that may wait for the whole GPU
    int(memory[0])  # so may CuPy's first copy to the host
    cupy.cuda.get_current_stream().synchronize()
    paint(bench)
    stream = cupy.cuda.Stream(non_blocking=True)
    gate = bench.gate(stream.ptr)  # so that the kernel cannot be over before the store is queued, however slow this is
    with stream:
        kernel((64,), (256,), (memory, memory.size, 20_000_000))
        job = bench.engine.store([3, 9], [0, 1], after=stream)
        bench.settle()
        assert not job.done
    gate.open()
    job.wait(30)
    assert all_are(bench.slot(0), 55)
    assert all_are(bench.slot(1), 55)
    with stream:
        bench.engine.load([20], [3], after=stream).order_before(stream)
        assert int(memory[bench.planes[0].address - bench.slab.address + 3 * 64 * KIB]) == 120
    stream.synchronize()


@pytest.mark.parametrize("short", [False, True], ids=["one stream", "many streams"])
def test_transfers_keep_their_order(bench: Rig, short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if short:
        change_streams(monkeypatch)
    held = bench.stream()
    bench.gate(held)
    bench.engine.store([3], [0], after=held)
    for block in (4, 5, 6):
        last = bench.engine.store([block], [0], after=NO_WAIT)
    release(bench, last)
    assert all_are(bench.slot(0), 7)


@pytest.mark.parametrize("copier", COPIERS)
def test_a_chain_through_both_directions(bench: Rig, copier: CopierName) -> None:
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


@pytest.mark.parametrize("copier", ["strided", "gather", "split", "loop"])
def test_segments_on_several_streams(bench: Rig, copier: CopierName, monkeypatch: pytest.MonkeyPatch) -> None:
    change_streams(monkeypatch)
    cut_segments(monkeypatch, bench.engine, 4)
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
        copier = COPIERS[int(rng.integers(len(COPIERS)))]
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


def test_four_threads_submit_and_wait(bench: Rig) -> None:
    assert len(set(shuttles(bench, 4, 50))) == 400

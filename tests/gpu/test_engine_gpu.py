"""The engine on a GPU: order with real streams, with CuPy's, between transfers, between segments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import (
    LEGACY,
    STAGING,
    Rig,
    all_are,
    paint,
    rig,
    warm_up,
    whole,
)

import kvoffload
from kvoffload import NO_WAIT
from kvoffload.tuning import CopierName

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

COPIERS: tuple[CopierName, ...] = ("strided", "pack", "batch", "loop")
KIB = 1024


@pytest.fixture
def bench(gpu_device: kvoffload.Device) -> Iterator[Rig]:
    """Blocks of 16 planes of 64 KiB: 1 MiB each, long enough to be overtaken."""
    with rig(gpu_device, planes=16, block_bytes=64 * KIB, num_blocks=32, num_slots=32, staging_bytes=STAGING) as made:
        warm_up(made)
        yield made
        made.engine.drain(30)
        whole(made.engine)


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

"""The engine on a GPU: full queues, leaks, contexts, a real geometry, submissions while the GPU is held."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import STAGING, Rig, held_by_process, rig, warm_up, whole
from leaks import leaked
from programs import run_program

import kvoffload
from kvoffload import NO_WAIT, KVLayout, OffloadEngine
from kvoffload.tuning import CopierName

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

COPIERS: tuple[CopierName, ...] = ("strided", "pack", "batch", "loop")
KIB = 1024


@pytest.fixture
def small(gpu_device: kvoffload.Device) -> Iterator[Rig]:
    """Blocks of 4 planes of 4 KiB."""
    with rig(gpu_device, planes=4, block_bytes=4 * KIB, num_blocks=64, num_slots=64, staging_bytes=STAGING) as made:
        warm_up(made)
        yield made
        made.engine.drain(60)
        whole(made.engine)


# queues


@pytest.mark.parametrize("copier", COPIERS)
def test_pitfall_06_no_submission_waits_for_a_full_queue(small: Rig, copier: CopierName) -> None:
    """2000 transfers of 3 blocks behind a gate. A full driver queue would block a submission until the gate opens."""
    engine, held = small.engine, small.stream()
    gate = small.gate(held)
    rng = np.random.default_rng(3)
    opened = threading.Event()

    def open_late() -> None:  # so that a failure is a failure and no hang
        opened.set()
        gate.open()

    opener = threading.Timer(60, open_late)
    opener.start()
    try:
        for number in range(2000):
            ids = rng.choice(64, 3, replace=False)
            call = engine.load if number % 2 else engine.store
            call(ids, ids, after=held if number < 2 else NO_WAIT, copier=copier)
        counts, waited_for_the_gate = engine.statistics(), opened.is_set()
    finally:
        opener.cancel()
        gate.open()
    engine.drain(60)
    assert not waited_for_the_gate
    assert counts.in_flight == 2000
    assert counts.held > 0, "what the queues of the driver have no room for waits on the host"


# leaks


def test_pitfall_30_ten_thousand_transfers_leak_nothing(gpu_device: kvoffload.Device, small: Rig) -> None:
    engine = small.engine
    rng = np.random.default_rng(5)

    def transfers(count: int) -> None:
        for number in range(count):
            ids = rng.choice(64, 3, replace=False)
            (engine.store if number % 2 else engine.load)(
                ids, ids, after=NO_WAIT, copier=COPIERS[number % len(COPIERS)]
            )
            if number % 100 == 0:
                engine.drain(30)
                engine.poll()
        engine.drain(30)
        engine.poll()

    transfers(2000)
    files, threads = held_by_process()
    assert leaked(gpu_device, lambda: transfers(2500)) == set()
    files_after, threads_after = held_by_process()
    assert files_after - files <= 4, "the driver opens some when it first needs them; a leak would be thousands"
    assert threads_after == threads


@pytest.mark.parametrize("copier", ["strided", "batch", "pack"])
def test_engines_and_buffers_give_their_memory_back(gpu_device: kvoffload.Device, copier: CopierName) -> None:
    staging_bytes = STAGING if copier == "pack" else 0

    def use() -> None:
        with rig(gpu_device, block_bytes=1 << 20, num_blocks=16, num_slots=16, staging_bytes=staging_bytes) as bench:
            bench.engine.store(range(16), range(16), copier=copier).wait(30)

    assert leaked(gpu_device, use) == set()


# a real geometry


@pytest.fixture(scope="module")
def llama_bytes() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random bytes of 64 planes x 128 blocks x 32 KiB: 256 MiB."""
    return np.random.default_rng(1).integers(0, 256, (64, 128, 32 * KIB), dtype=np.uint8)


@pytest.mark.parametrize("copier", [*COPIERS, None])
def test_llama_blocks_there_and_back(gpu_device: kvoffload.Device, llama_bytes: Any, copier: CopierName | None) -> None:
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


@pytest.mark.parametrize(("planes", "blocks"), [(64, 32), (160, 512)])
def test_submissions_return_while_the_gpu_is_held(gpu_device: kvoffload.Device, planes: int, blocks: int) -> None:
    """The host times of submissions are printed by `kvoffload bench submit`."""
    with rig(gpu_device, planes=planes, block_bytes=8 * KIB, num_blocks=1024, num_slots=blocks) as bench:
        held, slots = bench.stream(), np.arange(blocks)
        order = np.random.default_rng(4).permutation(1024)[:blocks]
        gate = bench.gate(held)
        jobs = [
            bench.engine.store(order, slots, after=held, copier="strided"),
            bench.engine.load(slots, order, after=held, copier="strided"),
        ]
        assert not any(job.done for job in jobs)
        gate.open()
        for job in jobs:
            job.wait(30)
        assert (bench.engine.slots[:, : planes * 8 * KIB] == (order + 1).astype(np.uint8)[:, np.newaxis]).all()


# the process


@pytest.mark.usefixtures("only_gpu")
def test_pitfall_31_a_process_that_ends_with_work_in_flight() -> None:
    run_program(
        """
        import kvoffload
        device = kvoffload.open_device()
        planes = device.allocate_planes(32, block_bytes=1 << 20, num_blocks=32)
        engine = kvoffload.OffloadEngine(kvoffload.KVLayout([planes]), device=device, num_slots=32)
        for _ in range(8):
            engine.store(range(32), range(32))
            engine.load(range(32), range(32))
        """,
        timeout=120,
        dev_mode=False,
    )

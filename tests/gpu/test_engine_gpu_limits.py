"""The engine on a GPU: full queues, leaks, contexts, a real geometry, the time that a submission takes."""

from __future__ import annotations

import gc
import statistics as averages
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers import COPY_ENGINE_ONLY, PER_THREAD, Rig, all_are, held_by_process, in_threads, rig, warm_up, whole
from programs import run_program

import kvoffload
from kvoffload import NO_WAIT, Direction, KVLayout, OffloadEngine
from kvoffload.driver import SourceOrder, StridedTable, address_of
from kvoffload.layout.fold import fold
from kvoffload.planning.transfer_plan import build

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

COPIERS = ("strided", "gather", "split", "batch", "loop")
KIB = 1024


@pytest.fixture
def small(gpu_device: kvoffload.Device) -> Iterator[Rig]:
    """Blocks of 4 planes of 4 KiB."""
    with rig(gpu_device, planes=4, block_bytes=4 * KIB, num_blocks=64, num_slots=64, sm_limit=2) as made:
        warm_up(made)
        yield made
        made.engine.drain(60)
        whole(made.engine)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection takes 0.1 s and more in a process that has CuPy and JAX loaded: too long for what is timed here."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# queues


@pytest.mark.parametrize("copier", COPIERS)
def test_pitfall_06_submission_time_stays_bounded(small: Rig, copier: str) -> None:
    """2000 transfers of 3 blocks behind a gate. A full driver queue would hold a submission up until it opens."""
    engine, held = small.engine, small.stream()
    gate = small.gate(held)
    rng = np.random.default_rng(3)
    opened = threading.Event()

    def open_late() -> None:  # so that a failure is a failure and no hang
        opened.set()
        gate.open()

    opener = threading.Timer(60, open_late)
    opener.start()
    seconds = []
    try:
        with no_garbage_collection():
            for number in range(2000):
                ids = rng.choice(64, 3, replace=False)
                call = engine.load if number % 2 else engine.store
                began = time.perf_counter()
                call(ids, ids, after=held if number < 2 else NO_WAIT, copier=copier)
                seconds.append(time.perf_counter() - began)
        in_flight, waited_for_the_gate = engine.statistics().in_flight, opened.is_set()
    finally:
        opener.cancel()
        gate.open()
    engine.drain(60)
    early, late = averages.median(seconds[100:300]), averages.median(seconds[-200:])
    slowest = max(range(2000), key=seconds.__getitem__)
    told = (
        f"{copier}: median {averages.median(seconds) * 1e6:.0f} us, 100 to 300: {early * 1e6:.0f} us, last 200: "
        f"{late * 1e6:.0f} us, slowest: number {slowest} with {seconds[slowest] * 1e6:.0f} us"
    )
    print(told)
    assert not waited_for_the_gate, told
    assert in_flight == 2000, told
    assert averages.median(seconds) < 1e-3, told
    assert late < 4 * early + 100e-6, told
    assert seconds[slowest] < 1, told  # one that waits for the gate takes up to 60


# leaks


def _least_loss(gpu_device: kvoffload.Device, use: Callable[[], None], rounds: int) -> int:
    """Bytes of GPU memory that each of several uses took for good, at least.

    Other programs use the GPU too, and the driver takes memory in lumps now and then: only what every use takes is a
    leak of ours.
    """

    def free_bytes() -> int:
        gc.collect()
        gpu_device.reclaim()
        with gpu_device.current():
            gpu_device.driver.api.cuCtxSynchronize()
            return gpu_device.driver.free_and_total_bytes()[0]

    use()
    free = [free_bytes()]
    for _ in range(rounds):
        use()
        free.append(free_bytes())
    return min(before - after for before, after in pairwise(free))


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
    counts, (files, threads) = engine.statistics(), held_by_process()
    lost = _least_loss(gpu_device, partial(transfers, 2500), 3)
    files_after, threads_after = held_by_process()
    assert lost <= 0, "GPU memory, in each of the rounds"
    assert files_after - files <= 4, "the driver opens some when it first needs them; a leak would be thousands"
    assert threads_after == threads
    assert engine.statistics().streams == counts.streams
    assert engine.statistics().events - counts.events <= 100


@pytest.mark.parametrize("copier", ["strided", "batch", "gather", "split"])
def test_engines_and_buffers_give_their_memory_back(gpu_device: kvoffload.Device, copier: str) -> None:
    sm_limit = 2 if copier in ("gather", "split") else 0

    def use() -> None:
        with rig(gpu_device, block_bytes=1 << 20, num_blocks=16, num_slots=16, sm_limit=sm_limit) as bench:
            bench.engine.store(range(16), range(16), copier=copier).wait(30)

    assert _least_loss(gpu_device, use, 4) <= 0


# contexts and threads


def test_pitfall_36_any_thread_and_any_context(small: Rig) -> None:
    from cuda.bindings import driver as cuda

    def work(own: bool) -> None:
        context: Any = None
        if own:
            arguments = (0, 0) if small.device.driver.bindings_version < (13, 0) else (None, 0, 0)
            status, context = cuda.cuCtxCreate(*arguments)
            assert not status, status
        small.engine.store([1], [1], after=NO_WAIT).wait(30)
        small.engine.load([1], [2], after=PER_THREAD).wait(30)
        small.engine.poll()
        assert int(cuda.cuCtxGetCurrent()[1]) == (int(context) if own else 0)
        if own:
            cuda.cuCtxDestroy(context)

    for own in (False, True):
        in_threads(partial(work, own))
    assert all_are(small.slot(1), 2)
    assert all_are(small.block(2), 2)


def test_a_stream_of_another_context_is_refused_and_nothing_happens(small: Rig) -> None:
    from cuda.bindings import driver as cuda

    arguments = (0, 0) if small.device.driver.bindings_version < (13, 0) else (None, 0, 0)
    status, context = cuda.cuCtxCreate(*arguments)
    assert not status, status
    stream = int(cuda.cuStreamCreate(1)[1])
    try:
        with pytest.raises(ValueError, match=f"after={stream:#x} is no stream of this device's context"):
            small.engine.store([1], [1], after=stream)
        assert small.engine.statistics().in_flight == 0
        assert int(cuda.cuCtxGetCurrent()[1]) == int(context)
    finally:
        cuda.cuStreamDestroy(stream)
        cuda.cuCtxDestroy(context)
    small.engine.store([1], [1], after=NO_WAIT).wait(30)
    assert all_are(small.slot(1), 2)


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


def _seconds(call: Callable[[], object], end: Callable[[], object]) -> float:
    """Host time of `call`, whose work on the GPU `end` waits for."""
    began = time.perf_counter()
    call()
    taken = time.perf_counter() - began
    end()
    return taken


def _bare_store(device: kvoffload.Device, engine: OffloadEngine, blocks: Any, slots: Any) -> Callable[[int], None]:
    """The driver's part of a store and nothing else, on a stream that is passed in."""
    layout = engine.layout
    address = address_of(engine.slots)
    group = fold(layout)[0]
    plan = build(group, layout, Direction.STORE, pool_address=address, slots=slots, blocks=blocks).operations()
    table = StridedTable(len(plan), batched=True)
    columns = ("source", "target", "source_pitch", "target_pitch", "width", "height")
    table.fill({name: getattr(plan, name) for name in columns}, SourceOrder.STREAM)
    return partial(device.driver.copy_strided_batch, table, len(plan))


@pytest.mark.parametrize(("planes", "blocks", "limit"), [(64, 32, 250e-6), (160, 512, 1e-3)])
def test_submissions_return_at_once(gpu_device: kvoffload.Device, planes: int, blocks: int, limit: float) -> None:
    made = gpu_device.allocate_planes(planes, block_bytes=8 * KIB, num_blocks=1024)
    order = np.random.default_rng(4).permutation(1024)[:blocks]
    with OffloadEngine(KVLayout([made]), device=gpu_device, num_slots=blocks, **COPY_ENGINE_ONLY) as engine:
        slots = np.arange(blocks)
        bare = _bare_store(gpu_device, engine, order, slots)
        taken: dict[str, list[float]] = {"store": [], "load": [], "driver call": []}
        with gpu_device.current(), no_garbage_collection():
            stream = gpu_device.driver.stream_create(0)
            for _ in range(100):
                drain = partial(engine.drain, 30)
                taken["store"].append(_seconds(lambda: engine.store(order, slots, copier="strided"), drain))
                taken["load"].append(_seconds(lambda: engine.load(slots, order, copier="strided"), drain))
                end = partial(gpu_device.driver.stream_synchronize, stream)
                taken["driver call"].append(_seconds(partial(bare, stream), end))
            gpu_device.driver.stream_destroy(stream)
        print(f"{blocks} x {planes}:", {name: f"{averages.median(each) * 1e6:.0f} us" for name, each in taken.items()})
        # The driver call alone takes 1.2 to 2.6 us an operation from one minute to the next, on one machine: so the
        # best of many, which are measured in turns.
        best = {name: min(each) for name, each in taken.items()}
        limit = max(limit, 1.7 * best["driver call"])
        assert best["store"] <= limit
        assert best["load"] <= limit


# the process


def test_pitfall_31_a_process_that_ends_with_work_in_flight(gpu_device: kvoffload.Device) -> None:
    assert not gpu_device.closed
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

"""Loads in parts on a GPU: every byte, and parts that end, and are used, while later ones are still copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from helpers import STAGING, Rig, copiers_in, release, rig, warm_up, whole
from layerwise import Reader, blocks_hold, hold_from, load
from strategies import slab_of
from transfers import COPY_CALLS, intercepted, queueing

import kvoffload
from kvoffload import NO_WAIT, Direction, KVLayout, OffloadEngine
from kvoffload.internal.waiting import wait_until
from kvoffload.testing import Mirror, scramble
from kvoffload.tuning import CopierName

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

KIB = 1 << 10
PLANES, PARTS = 64, 32
LAYERS = [[layer, layer + PARTS] for layer in range(PARTS)]  # all of K, then all of V
COPIERS: tuple[CopierName | None, ...] = (None, "strided", "batch", "loop")


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize(("block_bytes", "factor"), [(32 * KIB, 1), (4 * KIB, 1), (1000, 2)])
@pytest.mark.parametrize("parts", [PARTS, LAYERS, [[*range(60)], [63], [60, 62], [61]]], ids=["32", "layers", "four"])
def test_parts_move_the_bytes_of_a_naive_loop_and_no_others(
    gpu_device: kvoffload.Device, parts: Any, block_bytes: int, factor: int, copier: CopierName | None
) -> None:
    planes = gpu_device.allocate_planes(PLANES, block_bytes=block_bytes, num_blocks=64)
    layout = KVLayout([planes], blocks_per_slot=factor)
    random = np.random.default_rng(block_bytes)
    with slab_of(planes) as slab, OffloadEngine(layout, device=gpu_device, num_slots=40) as engine:
        if copier is not None and copier not in copiers_in(engine):
            pytest.skip(f"{copier}: {engine.missing_copiers[copier]}")
        scramble(slab, 1)
        engine.slots[:] = random.integers(0, 256, engine.slots.shape, dtype=np.uint8)
        mirror = Mirror(engine, [slab])
        for count in (1, 33, 40):
            blocks, slots = random.permutation(64)[:count], random.permutation(40)[: layout.slots_for(count)]
            job = engine.load(slots, blocks, after=NO_WAIT, copier=copier, parts=parts)
            mirror.expect(Direction.LOAD, blocks.tolist(), slots.tolist())
            for part in range(job.num_parts):
                job.order_before(1, part=part)
            assert copier in (None, job.wait(30).copier)
        mirror.check()
        whole(engine)


@pytest.fixture
def bench(gpu_device: kvoffload.Device) -> Iterator[Rig]:
    """64 planes, 128 blocks of 4 MiB: loads of them all take 10 ms."""
    with rig(
        gpu_device, planes=PLANES, block_bytes=64 * KIB, num_blocks=128, num_slots=128, staging_bytes=STAGING
    ) as made:
        warm_up(made)
        made.engine.load(range(2), range(2), parts=PARTS).wait(30)
        made.engine.poll()
        yield made
        made.engine.drain(30)
        whole(made.engine)


@contextmanager
def events(bench: Rig, count: int) -> Iterator[list[int]]:
    """Timing events."""
    driver = bench.device.driver
    with bench.device.current(), ExitStack() as undo:
        made = [driver.event_create(timing=True) for _ in range(count)]
        for event in made:
            undo.callback(driver.event_destroy, event)
        yield made


def ends_of_parts(bench: Rig, copier: CopierName) -> list[float]:
    """Load every block in a part for each layer: when each part has ended, in seconds on the GPU clock from the start
    of the first. The host may be late: what it has not submitted cannot end."""
    driver = bench.device.driver
    begun: list[int] = []
    with events(bench, PARTS + 1) as (begin, *ends):

        def timed(function: Callable[..., Any], *arguments: Any) -> Any:
            transfer = queueing(bench.engine)
            assert transfer is not None
            segment = transfer.segments[-1]
            if not begun:
                driver.event_record(begin, segment.stream.handle)
                begun.append(begin)
            answer = function(*arguments)
            driver.event_record(ends[segment.part], segment.stream.handle)  # a part's last copy is the last to record
            return answer

        with intercepted(driver, COPY_CALLS, timed):
            load(bench, range(128), range(128), parts=LAYERS, copier=copier).wait(30)
        wait_until(lambda: all(map(driver.event_query, ends)), 30, "the last event")
        return [driver.event_seconds(begin, end) for end in ends]


@pytest.mark.parametrize("copier", ["strided", "batch"])
def test_the_parts_of_a_large_load_end_in_order(bench: Rig, copier: CopierName) -> None:
    """512 MiB in 32 parts. How early part 0 ends is printed by `kvoffload bench parts`."""
    if copier not in copiers_in(bench.engine):
        pytest.skip(bench.engine.missing_copiers[copier])
    for _ in range(2):  # the first one makes tables and loads kernels
        ended = ends_of_parts(bench, copier)
    assert ended == sorted(ended)
    assert blocks_hold(bench, (0, 64, 127), (100, 164, 227))


@pytest.mark.parametrize("copier", ["strided"])
def test_a_stream_behind_part_0_runs_while_later_parts_are_held_back(bench: Rig, copier: CopierName) -> None:
    if copier not in copiers_in(bench.engine):
        pytest.skip(bench.engine.missing_copiers[copier])
    reader, late = Reader(bench), Reader(bench)
    hold_from(bench, PARTS // 2)
    job = load(bench, range(4), range(4), parts=LAYERS, copier=copier)
    for each, part in ((reader, 0), (late, PARTS - 1)):
        job.order_before(each.stream, part=part)
        each.read(LAYERS[part][1], 3)
    wait_until(lambda: reader.idle, 10, "the reader of layer 0")
    bench.settle()
    assert not job.done
    assert not late.idle
    release(bench, job)
    bench.synchronize(late.stream)
    assert (reader.value, late.value) == (103, 103)
    assert blocks_hold(bench, range(4), range(100, 104))


@pytest.mark.parametrize("copier", ["strided"])
@pytest.mark.parametrize("part", [0, 15, 31])
def test_what_needs_a_part_waits_for_it(bench: Rig, part: int, copier: CopierName) -> None:
    """The caller's stream is held: no part may begin, and no reader pass."""
    if copier not in copiers_in(bench.engine):
        pytest.skip(bench.engine.missing_copiers[copier])
    held, readers = bench.stream(), [Reader(bench) for _ in LAYERS[part]]
    bench.gate(held)
    job = load(bench, range(4), range(4), parts=LAYERS, after=held, copier=copier)
    for plane, reader in zip(LAYERS[part], readers, strict=True):
        job.order_before(reader.stream, part=part)
        reader.read(plane, 3)
    bench.settle()
    assert not any(reader.idle for reader in readers)
    release(bench, job)
    for reader in readers:
        bench.synchronize(reader.stream)
        assert reader.value == 103


def test_parts_beyond_what_the_queues_hold(gpu_device: kvoffload.Device) -> None:
    """64 parts of 192 blocks, copy by copy: 12,288 operations, of which later calls queue what finds no room."""
    planes = gpu_device.allocate_planes(PLANES, block_bytes=4 * KIB, num_blocks=192)
    with (
        slab_of(planes) as slab,
        OffloadEngine(KVLayout([planes]), device=gpu_device, num_slots=192, max_in_flight=4) as engine,
    ):
        engine.slots[:] = np.arange(192, dtype=np.uint8)[:, np.newaxis]
        jobs = [
            engine.load(range(192), np.roll(np.arange(192), turn), after=NO_WAIT, copier="loop", parts=PLANES)
            for turn in range(3)
        ]
        jobs[0].order_before(1, part=0)
        engine.drain(60)
        assert [job.error for job in jobs] == [None] * 3
        found = slab.to_numpy()[: PLANES * 192 * 4 * KIB].reshape(PLANES, 192, 4 * KIB)
        assert (found == np.roll(np.arange(192), -2).astype(np.uint8)[:, np.newaxis]).all()
        whole(engine)

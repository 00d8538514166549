"""Each wait of the engine, on a GPU and on the simulated one: without it the bytes are wrong.

A gate holds back what must come first. Everything that waits for nothing then runs, the gate opens, and bytes are
compared; so copies may be as quick as they like. `test_mutation_order.py` removes the waits one at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cuda.bindings import driver as cuda
from helpers import STAGING, Rig, all_are, change_streams, cut_segments, paint, release, rig, warm_up, whole
from layerwise import PARTS, Produced, Reader, hold_from
from packing import (
    OPTIONS,
    PROGRAMS,
    PROGRAMS_OF_ONE_PLACE,
    carry_by_group,
    hold_the_kernels,
    pieces_of_one_block,
    poison_places,
)
from transfers import intercepted

import kvoffload
from kvoffload import NO_WAIT

pytestmark = pytest.mark.timeout(120)


def opened(device: kvoffload.Device, **options: Any) -> Iterator[Rig]:
    sizes = {"planes": 8, "block_bytes": 64} if device.simulated else {"planes": 16, "block_bytes": 64 << 10}
    with rig(device, **sizes, **{"num_blocks": 32, "num_slots": 32, **options}) as made:
        warm_up(made)
        yield made
        for gate in made.gates:  # one that a failed test left closed
            gate.open()
        made.engine.drain(30)
        whole(made.engine)


@pytest.fixture
def bench(each_device: kvoffload.Device) -> Iterator[Rig]:
    yield from opened(each_device)


def check(found: Any, value: int) -> None:
    assert all_are(found, value), f"wrong bytes: {sorted(set(found.tolist()))[:4]}, not {value}"


@pytest.mark.parametrize("given", [int, Produced], ids=["a stream", "an array"])
def test_a_store_follows_what_the_caller_has_queued(bench: Rig, given: Callable[[int], Any]) -> None:
    held = bench.stream()
    bench.engine.store([1], [1], after=given(held)).wait(30)  # makes the stream that waits for an array
    bench.gate(held)
    bench.fill(held, 77)
    bench.engine.store([3], [0], after=given(held))
    release(bench)
    check(bench.slot(0), 77)


def test_a_load_follows_the_store_into_its_slots(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    bench.engine.store([3], [0], after=held)
    bench.engine.load([0], [5], after=NO_WAIT)
    release(bench)
    check(bench.block(5), 4)


def test_a_store_follows_the_load_into_its_blocks(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    bench.engine.load([0], [3], after=held)
    bench.engine.store([3], [6], after=NO_WAIT)
    release(bench)
    check(bench.slot(6), 100)


def test_stores_on_different_streams_keep_their_order(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    change_streams(monkeypatch)
    held = bench.stream()
    bench.gate(held)
    bench.engine.store([3], [0], after=held)
    bench.engine.store([4], [0], after=NO_WAIT)
    release(bench)
    check(bench.slot(0), 5)


def test_every_segment_waits(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    change_streams(monkeypatch)
    cut_segments(monkeypatch, bench.engine)
    held = bench.stream()
    bench.gate(held)
    bench.fill(held, 77)
    bench.engine.store(range(5), range(5), after=held, copier="strided")
    release(bench)
    for slot in range(5):
        check(bench.slot(slot), 77)


def test_a_store_follows_what_a_failed_one_has_left_queued(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    change_streams(monkeypatch)
    held, calls = bench.stream(), itertools.count(1)

    def refuse_the_second(function: Callable[..., Any], *arguments: Any) -> Any:
        return (cuda.CUresult.CUDA_ERROR_INVALID_VALUE,) if next(calls) == 2 else function(*arguments)

    bench.gate(held)
    with intercepted(bench.device.driver, ("cuMemcpyAsync",), refuse_the_second):
        failed = bench.engine.store(range(4), range(4), after=held, copier="loop")
    assert failed.error is not None
    bench.engine.store([9], [0], after=NO_WAIT, copier="loop")
    release(bench)
    check(bench.slot(0), 10)


def test_a_stream_that_was_ordered_after_a_job_waits(bench: Rig) -> None:
    held, writer = bench.stream(), bench.stream()
    bench.gate(held)
    bench.engine.store([3], [0], after=held).order_before(writer)
    bench.fill(writer, 88)
    release(bench)
    check(bench.slot(0), 4)
    check(bench.block(3), 88)


@pytest.mark.parametrize("part", range(PARTS))
def test_a_stream_that_was_ordered_after_a_part_waits(bench: Rig, part: int) -> None:
    reader, plane = Reader(bench), part * len(bench.planes) // PARTS
    hold_from(bench, part)
    job = bench.engine.load(range(6), range(6), after=NO_WAIT, parts=PARTS, copier="strided")
    job.order_before(reader.stream, part=part)
    reader.read(plane, 5)
    release(bench)
    bench.synchronize(reader.stream)
    assert reader.value == 105, f"wrong bytes: {reader.value}"


@pytest.mark.parametrize("program", [*PROGRAMS, *PROGRAMS_OF_ONE_PLACE], ids=lambda program: program.__name__)
def test_both_halves_of_a_piece_wait(
    each_device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch, program: Callable[[Rig, pytest.MonkeyPatch], bool]
) -> None:
    block_bytes = 8 * 64 if each_device.simulated else 16 * (64 << 10)
    pieces_of_one_block(monkeypatch, 1 if program in PROGRAMS_OF_ONE_PLACE else None, block_bytes)
    poison_places(monkeypatch)
    for bench in opened(each_device, **OPTIONS):
        assert program(bench, monkeypatch), "wrong bytes"


def test_a_load_of_two_groups_ends_behind_the_kernel_of_one(
    each_device: kvoffload.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group is packed, the other one strided; the last copy of the load is not on the kernel's stream."""
    nbytes = 64 if each_device.simulated else 64 << 10
    groups = [each_device.allocate_planes(4, block_bytes=nbytes, num_blocks=4) for _ in range(2)]
    layout = kvoffload.KVLayout(groups)
    carry_by_group(monkeypatch, "pack", "strided")
    slab: Any = groups[0][0].owner
    with kvoffload.OffloadEngine(layout, device=each_device, num_slots=4, staging_bytes=STAGING) as engine:
        bench = Rig(each_device, engine, slab, groups[0])
        both = [kvoffload.GroupTransfer(0, [1], [0]), kvoffload.GroupTransfer(1, [1], [1])]
        engine.load_groups(both, after=NO_WAIT).wait(30)  # kernels are loaded before a gate is closed
        paint(bench)
        reader, scratch = bench.stream(), each_device.allocate(4 * nbytes)
        hold_the_kernels(monkeypatch, bench.gate())
        engine.load_groups(both, after=NO_WAIT).order_before(reader)
        bench.copy_block(reader, scratch.address, 1)
        release(bench)
        bench.synchronize(reader)
        check(scratch.to_numpy(), 100)
        bench.close()

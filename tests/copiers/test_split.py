"""Split transfers: a kernel and the copy engine at once, one job, one beginning, one end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings.driver import CUresult
from gathering import Move, Seeded, check_moves, expect, fill_slots, layout_spec, move, small_tables, submit
from helpers import Rig, all_are, no_leaks, release, rig, simulated, whole
from splitting import HALF, OPTIONS, PROGRAMS, hold_the_kernel, load, store
from strategies import slab_of
from transfers import intercepted, queueing, segments_of, transfer_of

import kvoffload
from kvoffload import Direction, KVLayout, OffloadEngine
from kvoffload.copiers import StridedCopier
from kvoffload.engine import launcher
from kvoffload.testing import Mirror, SimulatedDriver, check_clean_close, scramble
from kvoffload.tuning import CopyMethod


@pytest.fixture
def bench() -> Iterator[Rig]:
    """A rig with kernels, whose pools are whole at the end and of which nothing is left."""
    with simulated(4) as device, rig(device, **OPTIONS) as made:
        yield made
        for gate in made.gates:
            gate.open()
        made.engine.drain(10)
        whole(made.engine)
    no_leaks(device.simulator)


def streams_of(simulator: Any, name: str, position: int) -> set[int]:
    """The streams of all calls of a function since `faults.calls` was set."""
    return {int(arguments[position]) for called, arguments in simulator.faults.calls if called == name}


# bytes


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.77, 0.99])
def test_any_share_moves_the_bytes_of_a_naive_loop(device: kvoffload.Device, share: float, factor: int) -> None:
    planes = device.allocate_planes(5, block_bytes=656, num_blocks=30, block_stride=672)
    scramble(slab_of(planes), 1)
    layout = KVLayout([planes], blocks_per_slot=factor)
    rng = np.random.default_rng(2)
    with OffloadEngine(layout, device=device, num_slots=30, sm_limit=4) as engine:
        fill_slots(engine, 3)
        mirror = Mirror(engine, [slab_of(planes)])
        for number, count in enumerate([1, 2, 3, 7, 28, 28]):
            direction, first = list(Direction)[number % 2], number % factor
            spanned = layout.slots_for(count, first_sub_block=first)
            blocks, slots = rng.permutation(30)[:count].tolist(), rng.permutation(30)[:spanned].tolist()
            each = Move(direction, 0, blocks, slots, first, CopyMethod("split", 1 + number % 2, share))
            submit(engine, each)
            expect(mirror, each)
        engine.drain(30)
        assert all(result.error is None for result in engine.poll())
        mirror.check()


@pytest.mark.parametrize("number", range(10))
def test_any_layout_and_segments_of_both_shares(number: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where planes do not fold. Every second time the shares are in segments, on several streams."""
    if number % 2:
        small_tables(monkeypatch, blocks=2)
        monkeypatch.setattr(StridedCopier, "segment_operations", 2)
        monkeypatch.setattr(launcher, "QUEUE_LIMIT", 10)
    chance = Seeded(seed)
    device = kvoffload.open_device(backend=SimulatedDriver(seed=number))
    spec = layout_spec(chance)
    methods = [CopyMethod("split", chance.number(1, 3), chance.number(1, 99) / 100) for _ in range(6)]
    check_moves(device, spec, [move(chance, spec, method) for method in methods], seed)
    check_clean_close(device)


# one job on two streams


def test_a_split_is_one_job_with_one_result(bench: Rig) -> None:
    simulator: Any = bench.device.simulator
    simulator.faults.calls = []
    job = store(bench, range(20), range(20))
    bench.engine.drain(10)
    (result,) = bench.engine.poll()
    assert (result.job_id, result.copier, result.nbytes) == (job.id, "split", 20 * 4 * 64)
    assert (job.method, job.reason, job.copier) == (HALF, "asked for", "split")
    least = result.nbytes / 50e9  # by the clock of the simulator, both shares one after the other
    assert least < result.seconds < 1
    totals = bench.engine.statistics().store
    assert (totals.jobs, totals.nbytes, totals.seconds) == (1, result.nbytes, result.seconds)
    by_kernel, by_engine = streams_of(simulator, "cuLaunchKernel", 8), streams_of(simulator, "cuMemcpy3DBatchAsync", 3)
    assert len(by_kernel) == len(by_engine) == 1
    assert by_kernel != by_engine
    ((_, copy),) = [call for call in simulator.faults.calls if call[0] == "cuMemcpy3DBatchAsync"]
    assert copy[0] == 10, "half of the blocks"


@pytest.mark.parametrize(("blocks", "share", "parts"), [(1, 0.4, "copies"), (1, 0.6, "kernel"), (40, 0.01, "copies")])
def test_too_few_blocks_to_share_are_carried_by_one_copier(bench: Rig, blocks: int, share: float, parts: str) -> None:
    simulator: Any = bench.device.simulator
    simulator.faults.calls = []
    result = store(bench, range(blocks), range(blocks), method=CopyMethod("split", 2, share)).wait(10)
    assert result.copier == "split"
    assert result.seconds > 0
    launches, copies = (streams_of(simulator, *each) for each in (("cuLaunchKernel", 8), ("cuMemcpy3DBatchAsync", 3)))
    assert (len(launches), len(copies)) == ((1, 0) if parts == "kernel" else (0, 1))


def test_both_shares_run_at_the_same_time(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them is held up, the other one ends."""
    gate = bench.gate()
    hold_the_kernel(monkeypatch, gate)
    job = store(bench, range(20), range(20))
    bench.settle()
    assert all(all_are(bench.slot(slot), slot + 1) for slot in range(10)), "the copy engine's share"
    assert all(all_are(bench.slot(slot), 100 + slot) for slot in range(10, 20))
    assert not job.done
    release(bench, job)
    assert all(all_are(bench.slot(slot), slot + 1) for slot in range(20))


# the two waits


def _without(bench: Rig, wait: str) -> None:
    """Leave out a wait: of the second share for the start, or of the end for the first share."""

    def leave_out(function: Callable[..., Any], stream: Any, event: Any, flags: Any) -> Any:
        transfer = queueing(bench.engine)
        if transfer is None:
            return function(stream, event, flags)
        of_the_first = {segment.event for segment in transfer.segments if segment.share == 0}
        left_out = {transfer.start} if wait == "start" else of_the_first if transfer.segments[-1].share else set()
        return (CUresult.CUDA_SUCCESS,) if int(event) in left_out else function(stream, event, flags)

    bench.cleanup.enter_context(intercepted(bench.device.driver, ("cuStreamWaitEvent",), leave_out))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("left_out", [False, True], ids=["", "without the wait"])
def test_both_shares_wait_and_are_waited_for(
    bench: Rig, monkeypatch: pytest.MonkeyPatch, program: Any, left_out: bool
) -> None:
    """Without one of the two waits, the bytes are wrong: these programs would see it."""
    if left_out:
        _without(bench, PROGRAMS[program])
    assert program(bench, monkeypatch) is not left_out


@pytest.mark.parametrize(
    "method",
    [CopyMethod("gather", 4, 1.0), CopyMethod("strided"), CopyMethod("batch"), CopyMethod("loop"), HALF],
    ids=str,
)
@pytest.mark.parametrize("first", ["split", "other"])
def test_copy_methods_follow_each_other_in_a_direction(
    bench: Rig, monkeypatch: pytest.MonkeyPatch, method: CopyMethod, first: str
) -> None:
    """Between a split and any other method, on one stream or two: the later store wins, and a load sees it."""
    hold_the_kernel(monkeypatch, bench.gate())
    methods = (HALF, method) if first == "split" else (method, HALF)
    store(bench, range(20), range(20), method=methods[0])
    store(bench, range(20, 40), range(20), method=methods[1])
    load(bench, range(20), range(20), method=method)
    release(bench)
    assert all(all_are(bench.slot(slot), slot + 21) for slot in range(20))
    assert all(all_are(bench.block(block), block + 21) for block in range(20))


# order_before of a split in several segments


def test_a_split_in_segments_waits_for_its_start_and_ends_with_its_last_one(
    bench: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier_set = bench.engine._parts.copiers
    monkeypatch.setattr(kvoffload.copiers.gather, "MAX_TABLE_BLOCKS", 3)
    monkeypatch.setattr(copier_set._of_copy_engine["strided"], "segment_operations", 3)
    monkeypatch.setattr(launcher, "QUEUE_LIMIT", 12)
    held, writer = bench.stream(), bench.stream()
    bench.gate(held)
    bench.fill(held, 77)
    job = store(bench, range(18), range(18), after=held)
    assert transfer_of(job).enqueued
    assert [segment.share for segment in segments_of(job)] == [0, 0, 0, 1, 1, 1]
    assert len({segment.stream for segment in segments_of(job)}) > 2
    job.order_before(writer)
    bench.fill(writer, 88)
    release(bench, job)
    assert all_are(bench.engine.slots[:18, :256], 77)

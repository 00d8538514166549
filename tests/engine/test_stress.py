"""Many transfers: queues that never fill, pools that stay bounded, nothing that leaks."""

from __future__ import annotations

import random
import statistics as averages
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from call_counts import count_calls
from helpers import ENGINE_STREAMS, LEVELS, STAGING, Rig, copiers_in, held_by_process, no_leaks, rig, simulated, whole
from seeds import seeds

from kvoffload import NO_WAIT, CapacityError, Direction, TransferError
from kvoffload.driver import functions
from kvoffload.tuning import CopierName

pytestmark = pytest.mark.long

GATED = 1300  # in both directions: 650 of each, of three operations and more


def submit_gated(bench: Rig, count: int, blocks_each: int, copier: CopierName | None) -> list[int]:
    """Calls that each of the first and last 100 submissions makes while the first waits for a gate; both directions."""
    held = bench.stream()
    bench.gate(held)
    rng = np.random.default_rng(3)
    made = []
    for number in range(count):
        ids = rng.choice(len(bench.engine.slots), blocks_each, replace=False)
        call = bench.engine.load if number % 2 else bench.engine.store
        after = held if number < 2 else NO_WAIT
        submit = partial(call, ids, ids, after=after, copier=copier)
        if 100 <= number < count - 100:
            submit()
        else:
            made.append(count_calls(submit).total)
    return made


@pytest.mark.parametrize(
    ("level", "copier"),
    [("batch", None), ("raw", "batch"), ("no-batch", None), ("no-batch", "loop"), ("batch", "loop")],
)
def test_pitfall_06_submission_never_meets_a_full_queue(level: str, copier: CopierName | None) -> None:
    """More transfers behind a gate than a queue of the driver holds: none fills, or each submission would wait."""
    with simulated(1, level, queue_depth=1022) as device, rig(device) as bench:
        simulator: Any = device.simulator
        made = submit_gated(bench, GATED, blocks_each=3, copier=copier)
        assert simulator.blocked_submissions == 0
        assert bench.engine.statistics().in_flight == GATED
        assert bench.engine.statistics().streams == ENGINE_STREAMS
        assert averages.median(made[-100:]) < 2 * averages.median(made[:100])
        bench.gates[0].open()
        bench.engine.drain(60)
        assert simulator.blocked_submissions == 0
        whole(bench.engine)
        assert len(bench.engine.poll()) == GATED
    no_leaks(simulator)


def test_pitfall_06_large_transfers_are_spread_over_streams() -> None:
    """One transfer of more operations than a queue holds."""
    with simulated(1, "no-batch", queue_depth=1022) as device, rig(device, num_blocks=3000, num_slots=3000) as bench:
        simulator: Any = device.simulator
        held = bench.stream()
        gate = bench.gate(held)
        order = np.random.default_rng(1).permutation(3000)
        jobs = [
            bench.engine.store(order, order, after=held),
            bench.engine.load(order, order, after=NO_WAIT, copier="loop"),
        ]
        assert simulator.blocked_submissions == 0
        gate.open()
        for job in jobs:
            job.wait(60)
        assert (bench.engine.slots[:, 0] == ((np.arange(3000) + 1) % 256)).all()
        whole(bench.engine)


def test_twelve_thousand_queued_small_loads() -> None:
    """Twelve times the limit on jobs in flight: all end, in order, and the pools stay as small as it makes them."""
    total, target = 12_288, 0
    with simulated(2) as device, rig(device, planes=1, block_bytes=16, max_in_flight=1024) as bench:
        ended = 0
        for number in range(total):
            if number % 997 == 0:
                ended += len(bench.engine.poll())
            try:
                bench.engine.load([number % 16], [target], after=NO_WAIT, copier="loop")
            except CapacityError:
                bench.engine.drain(60)
                ended += len(bench.engine.poll())
                bench.engine.load([number % 16], [target], after=NO_WAIT, copier="loop")
        bench.engine.drain(60)
        ended += len(bench.engine.poll())
        assert ended == total
        counts = bench.engine.statistics()
        assert (counts.load.jobs, counts.load.failed) == (total, 0)
        assert counts.events <= 2 * 1024 + 4 * 1024 + 1024
        assert counts.streams == ENGINE_STREAMS
        assert (bench.block(target) == 100 + (total - 1) % 16).all()
        whole(bench.engine)
    no_leaks(device.simulator)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_pitfall_30_ten_thousand_transfers_leak_nothing() -> None:
    chance = random.Random(5)
    with simulated(3) as device, rig(device, planes=1, block_bytes=16) as bench:
        simulator: Any = device.simulator

        def transfers(count: int) -> None:
            for number in range(count):
                ids = chance.sample(range(16), 2)
                if number % 50 == 0:
                    simulator.faults.fail_call(chance.choice(["cuMemcpyAsync", "cuEventRecord"]))
                job = (bench.engine.store if number % 2 else bench.engine.load)(ids, ids, after=NO_WAIT, copier="loop")
                if number % 10 == 0:
                    with suppress(TransferError):
                        job.order_before(bench.streams[0])
                if number % 100 == 0:
                    bench.engine.drain(10)
                    bench.engine.poll()
            bench.engine.drain(10)
            bench.engine.poll()
            simulator.faults.clear()

        bench.stream()
        transfers(2000)
        before = (simulator.leaks(), held_by_process(), bench.engine.statistics())
        transfers(10_000)
        after = (simulator.leaks(), held_by_process(), bench.engine.statistics())
        assert after[1] == before[1], "file descriptors and threads"
        for kind in ("device_allocations", "registered_ranges", "host_allocations", "contexts"):
            assert after[0][kind] == before[0][kind]
        assert after[2].events - before[2].events <= 100, "pools grow with what is in flight at once, not with time"
        assert after[2].streams - before[2].streams <= 2
        whole(bench.engine)
    no_leaks(simulator)


@pytest.mark.parametrize(("level", "kernels"), [*((level, False) for level in LEVELS), ("batch", True), ("raw", True)])
@pytest.mark.parametrize("seed", seeds(3))
def test_a_mixed_load_gives_the_bytes_of_doing_one_after_the_other(level: str, kernels: bool, seed: int) -> None:
    """Random transfers over few slots and blocks, all queued without waiting: the result is that of program order."""
    rng = np.random.default_rng(seed)
    with simulated(seed, level) as device, rig(device, staging_bytes=STAGING if kernels else 0) as bench:
        blocks, slots = np.arange(1, 17), np.arange(100, 116)
        copiers: list[CopierName | None] = [*copiers_in(bench.engine), None]
        if kernels:
            copiers = ["pack", "strided", None]
        streams = [bench.stream(), bench.stream(), 0, 2]
        filled: dict[int, int] = {}  # by block, the stream that wrote it: what reads it later must follow that stream
        for _ in range(120):
            count = int(rng.integers(1, 6))
            some_blocks, some_slots = rng.permutation(16)[:count], rng.permutation(16)[:count]
            copier = copiers[int(rng.integers(len(copiers)))]
            followed = [filled[block] for block in some_blocks.tolist() if block in filled]
            after = (followed or NO_WAIT) if rng.random() < 0.5 else [*followed, streams[int(rng.integers(4))]]
            if rng.random() < 0.5:
                job = bench.engine.submit(Direction.STORE, some_blocks, some_slots, after=after, copier=copier)
                slots[some_slots] = blocks[some_blocks]
            else:
                job = bench.engine.submit(Direction.LOAD, some_blocks, some_slots, after=after, copier=copier)
                blocks[some_blocks] = slots[some_slots]
            if rng.random() < 0.2:
                stream = streams[int(rng.integers(4))]
                job.order_before(stream)
                block = int(some_blocks[0])
                if job.direction == "store":
                    bench.fill(stream or 1, 200, block=block)
                    blocks[block], filled[block] = 200, stream
                    bench.engine.store([block], [15], after=stream)
                    slots[15] = 200
        bench.engine.drain(30)
        assert [int(bench.slot(slot)[0]) for slot in range(16)] == slots.tolist()
        assert all((bench.slot(slot) == slots[slot]).all() for slot in range(16))
        assert [int(bench.block(block)[-1]) for block in range(16)] == blocks.tolist()
        whole(bench.engine)


def test_nothing_runs_that_the_seam_does_not_list() -> None:
    """Whatever the engine calls is in the table of functions."""
    with simulated(4) as device:
        simulator: Any = device.simulator
        with rig(device, staging_bytes=STAGING) as bench:
            for copier in (*copiers_in(bench.engine), None):
                bench.engine.store([1], [1], copier=copier).wait(10)
                bench.engine.load([1], [2], copier=copier).wait(10)
        listed = {*functions.REQUIRED, *functions.OPTIONAL, *functions.RAW}
        rigs_own = {"cuCtxSynchronize"}
        assert set(simulator.faults.call_count) - rigs_own <= listed

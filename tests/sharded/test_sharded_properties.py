"""Random transfers over several devices: on each the bytes of a naive loop, whatever fails on one of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from seeds import rest_long
from sharding import Machine, Mirrors, RandomTransfers, machine

from kvoffload import NO_WAIT, KVOffloadError

SLOTS = 8
CALLS = (
    "cuMemcpy3DBatchAsync", "cuMemcpyBatchAsync", "cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent", "cuEventQuery",
    "cuEventCreate", "cuEventElapsedTime", "cuLaunchKernel",
)  # fmt: skip


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("number", rest_long(range(8), 3))
def test_random_transfers_give_the_bytes_of_loops(devices: int, number: int, seed: int) -> None:
    chance = np.random.default_rng(seed)
    counts = [2 * int(each) for each in chance.integers(1, 4, devices)]
    shape = {"groups": int(chance.integers(1, 3)), "blocks_per_slot": int(chance.integers(1, 4))}
    with machine(counts, seed=number, num_slots=SLOTS, **shape) as made:
        jobs = RandomTransfers(made, chance).check(40)
        assert sorted(result.job_id for result in made.engine.poll()) == [job.id for job in jobs]
        made.whole()


def resynchronise(made: Machine, before: Mirrors, expected: dict[str, Any]) -> Mirrors:
    """After a transfer that has failed: every byte is that of before or that of the transfer; what is there now."""
    after = made.mirrors()
    for old, now in zip(before, after, strict=True):
        unchanged = [old.pool.copy(), *(content.copy() for content in old.memory.values())]
        old.expect(**expected)
        for kept, moved, actual in zip(
            unchanged, [old.pool, *old.memory.values()], [now.pool, *now.memory.values()], strict=True
        ):
            assert ((actual == kept) | (actual == moved)).all(), "a byte of neither"
    return after


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("number", rest_long(range(4), 2))
def test_a_failure_on_one_device_fails_the_job_and_no_other(devices: int, number: int, seed: int) -> None:
    """The n-th call of some function fails, on the device that it happens to be for; the next transfer is right."""
    chance = np.random.default_rng(seed)
    counts = [2 * int(each) for each in chance.integers(1, 4, devices)]
    shape = {"groups": int(chance.integers(1, 3)), "blocks_per_slot": int(chance.integers(1, 4))}
    seen: Counter[str] = Counter()
    with machine(counts, seed=number, num_slots=SLOTS, **shape) as made:
        random = RandomTransfers(made, chance)
        for _ in range(40):
            made.simulator.faults.fail_call(str(chance.choice(CALLS)), nth=int(chance.integers(1, 3 * devices)))
            try:
                job, expected = random.transfer()
            except KVOffloadError:
                seen["raised"] += 1
                job, expected = None, None
            made.engine.drain(10)
            made.simulator.faults.clear()
            results = made.engine.poll()
            if job is not None and expected is not None:
                assert [result.job_id for result in results] == [job.id]
                seen["failed" if job.error is not None else "done"] += 1
                if job.error is None:
                    random.mirrors.expect(**expected)
                    random.mirrors.check()
                else:
                    random.mirrors = resynchronise(made, random.mirrors, expected)
            else:  # refused, or order_before was: then the transfer itself has ended
                random.mirrors = made.mirrors()
            job, expected = random.transfer()
            assert job.wait(10).error is None
            random.mirrors.expect(**expected)
            random.mirrors.check()
        made.whole()
    assert seen["done"] > 3, seen
    assert seen["failed"] > 0, seen


def test_every_driver_call_of_a_transfer_fails_once() -> None:
    """Each call of a store and of a load on two devices: the job fails, or the call raises and nothing has happened."""
    names = _calls()
    assert names.count("cuEventRecord") >= 6
    outcomes: Counter[str] = Counter()
    for nth, name in enumerate(names, 1):
        with machine((2, 3)) as made:
            streams, mirrors = made.one_each(), made.mirrors()
            made.engine.store([9], [9], after=streams).wait(10)
            made.engine.poll()
            mirrors.expect("store", [9], [9])
            made.simulator.faults.fail_nth(nth)
            job = None
            try:
                job = made.engine.store([1, 2], [3, 4], after=streams)
            except KVOffloadError:
                assert made.engine.in_flight == 0
            made.settle()
            assert made.simulator.faults.pending == 0
            made.engine.drain(10)
            failed = job is None or job.error is not None
            outcomes[f"{'raised' if job is None else 'failed' if failed else 'done'} {name}"] += 1
            if job is None:
                mirrors.check()
                assert made.engine.poll() == []
            elif not failed:
                mirrors.expect("store", [1, 2], [3, 4])
                mirrors.check()
            else:
                mirrors = resynchronise(made, mirrors, {"direction": "store", "blocks": [1, 2], "slots": [3, 4]})
                assert [result.error is None for result in made.engine.poll()] == [False]
            mirrors.expect("load", [5, 6], [3, 4])
            made.engine.load([3, 4], [5, 6], after=NO_WAIT).wait(10)
            mirrors.check()
            made.whole()
    assert {"failed cuCtxPushCurrent", "raised cuCtxPushCurrent", "raised cuEventRecord"} <= set(outcomes), outcomes
    assert sum(count for what, count in outcomes.items() if what.startswith("failed")) >= 6, outcomes


def _calls() -> list[str]:
    """The names of the driver calls of a warm store."""
    with machine((2, 3)) as made:
        streams = made.one_each()
        made.engine.store([9], [9], after=streams).wait(10)
        made.simulator.faults.calls = []
        made.engine.store([1, 2], [3, 4], after=streams)
        names = [name for name, _ in made.simulator.faults.calls]
        made.simulator.faults.calls = None
        return names

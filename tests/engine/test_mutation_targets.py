"""Tests that fail where a wait, a record or a retry is missing: each is named in `tests/support/mutations.py`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import Rig, all_are, in_threads, release, rig, settled, simulated
from interrupts import interrupt_at, trace_points
from layerwise import Produced
from transfers import transfer_of

import kvoffload
from kvoffload import NO_WAIT, KVLayout, OffloadEngine

BLOCKS = 8


@pytest.fixture
def bench() -> Iterator[Rig]:
    with simulated(3) as device:
        yield from settled(device, num_blocks=32, num_slots=32)


# what is exported to other libraries ----------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["store", "load"])
def test_the_stream_of_an_exported_array_follows_both_directions(bench: Rig, last: str) -> None:
    """What another library queues on it starts after the transfers in flight, whichever of them ends last."""
    array = bench.device.empty((2, 8, 64), "uint8")
    array.buffer.copy_from(np.full(array.nbytes, 5, np.uint8))
    engine = OffloadEngine(
        KVLayout.from_stacked(array, plane_axis=0, block_axis=1), device=bench.device, num_slots=8, staging_bytes=0
    )
    engine.slots[:] = 7
    streams = {"store": bench.stream(), "load": bench.stream()}
    gates = {name: bench.gate(stream) for name, stream in streams.items()}
    jobs = {
        "store": engine.store([0, 1], [0, 1], after=streams["store"]),
        "load": engine.load([4, 5], [4, 5], after=streams["load"]),
    }
    theirs = array.__cuda_array_interface__["stream"]
    with bench.device.current():
        bench.device.driver.fill(array.address, 9, array.nbytes, theirs)
    (first,) = set(gates) - {last}
    gates[first].open()
    bench.settle()
    written_early = bool((array.buffer.to_numpy() == 9).any())
    ended = {name: job.done for name, job in jobs.items()}
    gates[last].open()
    engine.drain(10)
    bench.settle()
    assert ended == {first: True, last: False}
    assert not written_early, f"written over while the {last} was not over"
    assert all_are(array.buffer.to_numpy(), 9)
    assert all_are(engine.slots[:2, :128], 5), "what the store read is what was there before"
    engine.close(10)


@pytest.mark.parametrize("last", [0, 1])
def test_the_stream_of_an_exported_array_follows_every_engine_over_it(bench: Rig, last: int) -> None:
    array = bench.device.empty((2, 8, 64), "uint8")
    layout = KVLayout.from_stacked(array, plane_axis=0, block_axis=1)
    engines = [OffloadEngine(layout, device=bench.device, num_slots=8, staging_bytes=0) for _ in range(2)]
    streams = [bench.stream(), bench.stream()]
    gates = [bench.gate(stream) for stream in streams]
    for engine, stream in zip(engines, streams, strict=True):
        engine.slots[:] = 7
        engine.load([0, 1], [0, 1], after=stream)
    theirs = array.__cuda_array_interface__["stream"]
    with bench.device.current():
        bench.device.driver.fill(array.address, 9, array.nbytes, theirs)
    gates[1 - last].open()
    bench.settle()
    assert [engine.in_flight and engine.poll() == [] for engine in engines] == [number == last for number in range(2)]
    assert not (array.buffer.to_numpy() == 9).any(), f"written over while the load of engine {last} was not over"
    gates[last].open()
    for engine in engines:
        engine.drain(10)
    bench.settle()
    assert all_are(array.buffer.to_numpy(), 9)
    for engine in engines:
        engine.close(10)


# hazards --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", range(BLOCKS))
@pytest.mark.parametrize("what", ["slot", "block"])
@pytest.mark.parametrize("first", ["store", "load"])
def test_every_slot_and_block_of_a_transfer_is_remembered(bench: Rig, first: str, what: str, position: int) -> None:
    engine, held = bench.engine, bench.stream()
    bench.gate(held)
    blocks, slots = list(range(BLOCKS)), list(range(10, 10 + BLOCKS))
    other_block = blocks[position] if what == "block" else 20
    other_slot = slots[position] if what == "slot" else 30
    if first == "store":
        engine.store(blocks, slots, after=held)
        conflicting = engine.load([other_slot], [other_block], after=NO_WAIT)
    else:
        engine.load(slots, blocks, after=held)
        conflicting = engine.store([other_block], [other_slot], after=NO_WAIT)
    release(bench, conflicting)
    assert conflicting.done


def test_a_transfer_that_shares_nothing_with_a_long_one_is_not_held_back(bench: Rig) -> None:
    engine, held = bench.engine, bench.stream()
    bench.gate(held)
    engine.store(range(BLOCKS), range(10, 10 + BLOCKS), after=held)
    free = engine.load([30], [20], after=NO_WAIT)
    bench.settle()
    assert free.done
    release(bench)


# streams that wait for several ----------------------------------------------------------------------------------------


class Alternation:
    """Calls of `stream_wait_event` that wait until another thread has recorded an event since they were entered.

    Under a lock around record and wait no other thread can: the first call then gives up after a second, and with it
    all later ones. A second is long enough for the other thread to get there on a busy machine, too.
    """

    def __init__(self, device: kvoffload.Device) -> None:
        self._wait_event = device.driver.stream_wait_event
        self._counts = device.simulator.faults.call_count
        self._given_up = False

    def __call__(self, *arguments: Any) -> None:
        recorded, deadline = self._counts["cuEventRecord"], time.monotonic() + 1.0
        while not self._given_up and self._counts["cuEventRecord"] == recorded:
            time.sleep(0.0005)
            self._given_up |= time.monotonic() > deadline
        self._wait_event(*arguments)


@pytest.mark.parametrize("kind", ["streams", "arrays"])
def test_two_threads_that_follow_several_streams_each_wait_for_their_own(
    bench: Rig, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One follows a stream that is held back; what the other follows has ended. They are in the driver together."""
    engine, held, free = bench.engine, bench.stream(), bench.stream()
    bench.gate(held)
    behind: dict[int, Any] = {each: each if kind == "streams" else Produced(each) for each in (held, free)}
    for _ in range(2):  # what is made at first use is made
        engine.store([1], [1], after=[behind[free]]).wait(10)
    faults: Any = bench.device.simulator.faults
    monkeypatch.setattr(bench.device.driver, "stream_wait_event", Alternation(bench.device))
    recorded = faults.call_count["cuEventRecord"]
    jobs: dict[str, kvoffload.Job] = {}

    def store() -> None:
        jobs["store"] = engine.store([0], [0], after=[behind[held], behind[held]])

    def load() -> None:
        while faults.call_count["cuEventRecord"] == recorded:
            time.sleep(0.0005)
        jobs["load"] = engine.load([20], [20], after=[behind[free], behind[free]])

    in_threads(store, load)
    monkeypatch.undo()
    release(bench, jobs["store"])
    assert jobs["load"].done


@pytest.mark.parametrize("position", range(3))
def test_every_stream_of_a_list_is_followed(bench: Rig, position: int) -> None:
    streams = [bench.stream() for _ in range(3)]
    bench.gate(streams[position])
    release(bench, bench.engine.store([0], [0], after=streams))


@pytest.mark.parametrize("part", range(4))
def test_a_stream_that_follows_a_part_waits_for_it(bench: Rig, part: int) -> None:
    held, theirs = bench.stream(), bench.stream()
    bench.gate(held)
    job = bench.engine.load([0], [0], after=held, parts=4)
    job.order_before(theirs, part=part)
    marker = bench.device.allocate(64)
    marker.copy_from(np.zeros(64, np.uint8))
    with bench.device.current():
        bench.device.driver.fill(marker.address, 9, 64, theirs)
    bench.settle()
    assert all_are(marker.to_numpy(), 0)
    release(bench, job)
    assert all_are(marker.to_numpy(), 9)


# exceptions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["cuEventRecord", "cuMemcpy3DBatchAsync"])
def test_an_interrupted_submission_ends(bench: Rig, call: str) -> None:
    """A KeyboardInterrupt as a driver call returns: the transfer fails, `drain` ends, and the engine goes on."""
    engine = bench.engine
    engine.store([1], [1], after=NO_WAIT).wait(10)
    points = trace_points(lambda: engine.store([2], [2], after=NO_WAIT))
    engine.drain(10)
    numbers = [number for number, point in enumerate(points, 1) if (point.kind, point.what) == ("driver", call)]
    assert numbers
    for number in numbers:
        engine.poll()
        outcome = interrupt_at(number, lambda: engine.store([2], [2], after=NO_WAIT))
        assert outcome.raised
        engine.drain(2)
        assert engine.statistics().in_flight == 0
        assert [result.error is None for result in engine.poll()] == [False]
        engine.store([3], [3], after=NO_WAIT).wait(2)
        assert int(bench.slot(3)[0]) == 4


def test_no_other_transfer_gets_the_number_of_an_interrupted_one(bench: Rig) -> None:
    """The interrupt comes as the transfer is put in flight: it runs, though its caller has no job of it."""
    engine, held, ids = bench.engine, bench.stream(), iter(range(32))

    def store() -> kvoffload.Job:
        return engine.store([1], [next(ids)], after=held)

    store().wait(10)
    points = trace_points(store)
    engine.drain(10)
    put = [number for number, point in enumerate(points, 1) if "deque.append at engine/shard.py" in str(point)]
    assert put
    for number in put:
        engine.poll()
        gate = bench.gate(held)
        assert interrupt_at(number, store).raised
        later = [store(), store()]
        assert len({transfer_of(job).sequence for job in engine.jobs_in_flight()}) == 3
        gate.open()
        assert [job.wait(10).error for job in later] == [None, None]
        engine.drain(10)


# what waits on the host -----------------------------------------------------------------------------------------------


def test_one_call_queues_both_of_two_transfers_that_follow_each_other() -> None:
    """A load waits on the host for room, and a store for that load. The call that queues the load queues both."""
    with simulated(3) as device, rig(device, planes=16, num_blocks=200, num_slots=200) as bench:
        engine, held, blocks = bench.engine, bench.stream(), range(64, 192)
        gate = bench.gate(held)
        engine.slots[:] = 77
        for last in (191, 191, 195):  # 2048 copies each, of 5110 that the simulated driver's queues take: one waits
            engine.load(blocks, [*blocks[:-1], last], after=held, copier="loop")
        engine.store([195], [3], after=NO_WAIT)  # of the block that the last load writes last
        engine.slots[3] = 1
        gate.open()
        bench.settle()
        turns = 0
        while not all_are(bench.block(195), 77) and turns < 10:
            assert all_are(engine.slots[3], 1)
            engine.advance()
            bench.settle()
            turns += 1
        assert 0 < turns < 10, "the load was not queued at once, and is not left"
        assert all_are(engine.slots[3, : 16 * 64], 77), "the store has run, too"
        engine.drain(10)


@pytest.mark.parametrize("number", range(4))
def test_each_of_several_stores_is_waited_for(number: int) -> None:
    """A lease of pending keys waits for all of their stores, whichever of them ends last."""
    with simulated(3) as device, rig(device, num_slots=4) as bench:
        cache = kvoffload.BlockCache(bench.engine, policy="lru")
        streams = [bench.stream() for _ in range(4)]
        gates = [bench.gate(stream) for stream in streams]
        keys = [b"%d" % each for each in range(4)]
        order = [*range(number), *range(number + 1, 4)]
        for each in range(4):
            cache.store([keys[each]], [each], after=streams[each])
        with cache.acquire(keys, pending=True) as lease:
            theirs = bench.stream()
            lease.order_before(theirs)
            marker = device.allocate(64)
            marker.copy_from(np.zeros(64, np.uint8))
            with device.current():
                device.driver.fill(marker.address, 9, 64, theirs)
            for each in order:
                gates[each].open()
            bench.settle()
            with pytest.raises(TimeoutError):
                lease.wait(0.05)
            assert all_are(marker.to_numpy(), 0), "a stream that follows the lease waits for all, too"
            gates[number].open()
            lease.wait(10)
            bench.settle()
            assert all_are(marker.to_numpy(), 9)
            assert [int(bench.engine.slots[slot][0]) for slot in lease.slots()] == [1, 2, 3, 4]

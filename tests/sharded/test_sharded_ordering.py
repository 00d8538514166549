"""Order on every device of a ShardedEngine: what a transfer follows, what follows it, and which device waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers import all_are
from sharding import Machine, machine

from kvoffload import NO_WAIT, Job, TransferError

COUNTS = (4, 2, 4)
DEVICES = range(len(COUNTS))


@pytest.fixture
def three() -> Iterator[Machine]:
    with machine(COUNTS) as made:
        yield made


def first_bytes(made: Machine, device: int) -> int:
    """Bytes of one block of a device."""
    return made.layouts[device].groups[0].bytes_per_block


def slot(made: Machine, device: int, number: int) -> list[int]:
    return list(made.engine.slots[device][number, : first_bytes(made, device)])


def blocks(made: Machine, device: int, number: int) -> list[int]:
    image = made.buffers[device][0].to_numpy()
    planes = made.engine.layout.layouts[device].groups[0].planes
    base = planes[0].address
    return [
        int(byte)
        for plane in planes
        for byte in image[plane.address - base + number * plane.block_stride :][: plane.block_bytes]
    ]


def let_run(made: Machine, *held_back: Job) -> None:
    made.settle()
    for job in held_back:
        assert not job.done
    for gate in made.gates:
        gate.open()
    made.engine.drain(10)


@pytest.mark.parametrize("held", DEVICES)
def test_each_device_follows_its_own_stream_of_after(three: Machine, held: int) -> None:
    streams = three.one_each()
    three.hold(held, streams[held])
    before = [slot(three, device, 2) for device in DEVICES]
    expected = [blocks(three, device, 1) for device in DEVICES]
    job = three.engine.store([1], [2], after=streams)
    three.settle()
    assert not job.done
    assert slot(three, held, 2) == before[held]
    assert [slot(three, each, 2) for each in DEVICES if each != held] == [
        expected[each] for each in DEVICES if each != held
    ]
    let_run(three, job)
    assert [slot(three, each, 2) for each in DEVICES] == expected


@pytest.mark.parametrize("position", range(2))
@pytest.mark.parametrize("held", DEVICES)
def test_a_device_may_follow_a_list_of_streams(three: Machine, held: int, position: int) -> None:
    streams = [[three.stream(device), three.stream(device)] for device in DEVICES]
    three.hold(held, streams[held][position])
    let_run(three, three.engine.store([1], [2], after=streams))


@pytest.mark.parametrize("held", DEVICES)
def test_an_urgent_load_is_reported_before_those_that_it_overtook(held: int) -> None:
    with machine(COUNTS, most_queued_bytes=1) as made:
        streams = made.one_each()
        for device in DEVICES:
            made.hold(device, streams[device])
        first = made.engine.load([0], [0], after=streams)
        usual = [made.engine.load([block], [block], after=NO_WAIT) for block in (1, 2)]
        urgent = [made.engine.load([block], [block], after=NO_WAIT, urgent=True) for block in (3, 4)]
        last = made.engine.load([5], [5], after=NO_WAIT)
        for device in DEVICES:
            if device != held:
                made.gates[device].open()
        made.settle()
        assert made.engine.poll() == [], "no job has ended on the device that is held"
        let_run(made, first, *urgent)
        order = [result.job_id for result in made.engine.poll()]
        assert order == [each.id for each in (first, *urgent, *usual, last)]
        totals = made.engine.statistics().load
        assert (totals.jobs, totals.failed, made.engine.in_flight) == (6, 0, 0)
        made.whole()


@pytest.mark.parametrize("held", DEVICES)
def test_a_store_after_a_load_of_its_slot_waits_on_each_device(three: Machine, held: int) -> None:
    streams = three.one_each()
    three.hold(held, streams[held])
    expected = [slot(three, device, 2) for device in DEVICES]
    loaded = three.engine.load([2], [9], after=streams)
    stored = three.engine.store([1], [2], after=NO_WAIT)
    three.settle()
    let_run(three, loaded, stored)
    assert [blocks(three, each, 9) for each in DEVICES] == expected


@pytest.mark.parametrize("part", [None, 0, 1])
@pytest.mark.parametrize("held", DEVICES)
def test_the_stream_of_each_device_waits_for_its_transfer(three: Machine, held: int, part: int | None) -> None:
    """`order_before` on every device's stream: the one whose transfer is held back waits, the others need not."""
    streams, theirs = three.one_each(), three.one_each()
    three.hold(held, streams[held])
    job = three.engine.load([2], [9], after=streams, parts=None if part is None else 2)
    assert job.num_parts == (1 if part is None else 2)
    job.order_before(theirs, part=part)
    markers = [three.marker(device) for device in DEVICES]
    for device in DEVICES:
        three.fill(device, markers[device], 9, theirs[device])
    three.settle()
    written = [bool((marker.to_numpy() == 9).any()) for marker in markers]
    assert written == [device != held for device in DEVICES]
    let_run(three, job)
    three.settle()
    assert all(all_are(marker.to_numpy(), 9) for marker in markers)


@pytest.mark.parametrize("held", DEVICES)
def test_a_job_has_ended_when_the_last_device_has(three: Machine, held: int) -> None:
    streams = three.one_each()
    three.hold(held, streams[held])
    job = three.engine.store([1], [2], after=streams)
    three.settle()
    three.engine.advance()
    assert not job.finished
    assert three.engine.poll() == []
    assert three.engine.in_flight == 1
    assert three.engine.jobs_in_flight()[0].id == job.id
    with pytest.raises(TimeoutError):
        job.wait(0.01)
    let_run(three, job)
    assert [result.job_id for result in three.engine.poll()] == [job.id]


@pytest.mark.parametrize("failing", DEVICES)
@pytest.mark.parametrize("held", DEVICES)
def test_a_failure_on_one_device_frees_nothing_early(three: Machine, failing: int, held: int) -> None:
    """The job has failed on one device, and on another one the GPU may still touch its slots and blocks."""
    streams = three.one_each()
    three.hold(held, streams[held])
    three.simulator.faults.fail_call("cuMemcpy3DBatchAsync", nth=1 + failing)
    job = three.engine.store([1], [2], after=streams, copier="strided")
    three.settle()
    three.engine.advance()
    assert job.error is not None
    assert str(job.error).startswith(f"shard {failing} (device {failing}): store {job.id} ")
    if held == failing:  # nothing of it was queued there but the wait
        let_run(three)
    else:
        assert not job.finished
        assert three.engine.in_flight == 1
        with pytest.raises(TransferError, match=f"shard {failing}"):
            job.order_before(three.one_each())
        let_run(three, job)
    with pytest.raises(TransferError, match=f"shard {failing}"):
        job.wait(10)
    assert three.engine.statistics().store.failed == 1
    three.whole()
    mirrors = three.mirrors()
    three.engine.store([1, 3], [2, 4], after=NO_WAIT).wait(10)
    mirrors.expect("store", [1, 3], [2, 4])
    mirrors.check()


@pytest.mark.parametrize("part", [None, 0])
def test_streams_in_another_order_than_the_devices_are_refused_and_none_waits(part: int | None) -> None:
    """A stream may wait for an event of another device; then the work on its own would not wait for its bytes."""
    with machine((2, 3)) as made:
        streams, mine = made.one_each(), made.one_each()
        gate = made.hold(1, streams[1])
        job = made.engine.load([1], [1], after=streams, parts=1)
        with pytest.raises(ValueError, match=r"^stream\[0\]=0x[0-9a-f]+ is no stream of this device's context"):
            job.order_before(mine[::-1], part=part)
        with pytest.raises(ValueError, match=r"^stream\[1\]=0x"):
            job.order_before([mine[0], mine[0]], part=part)
        wrong: list[Any] = [1, mine[:1], [*mine, mine[0]]]
        for given in wrong:
            with pytest.raises(TypeError, match=r"^stream must be a list with one stream for each of the 2 devices"):
                job.order_before(given, part=part)
        job.order_before(mine, part=part)
        gate.open()
        job.wait(10)
        made.whole()

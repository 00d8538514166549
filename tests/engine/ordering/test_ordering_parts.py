"""Order of the parts of a load, and of what waits for one of them.

As in test_ordering.py: a gate holds something back, everything else runs, the gate opens, and bytes are compared. To
hold a part and those behind it, a gate is put before its first copy.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers import (
    ORDERING_SEEDS,
    Rig,
    all_are,
    change_streams,
    copiers_in,
    cut_segments,
    release,
)
from layerwise import PARTS, PLANES, Reader, blocks_hold, hold_from, load, reader_of
from seeds import rest_long
from transfers import segments_of

from kvoffload import NO_WAIT, TransferError
from kvoffload.driver import Driver

BY_ENGINE = ("strided", "batch", "loop")


@pytest.fixture(params=rest_long(ORDERING_SEEDS[:6], 4), ids=lambda seed: f"seed{seed}")
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def rig_options() -> dict[str, Any]:
    return {"planes": PLANES, "staging_bytes": 0}


@pytest.fixture(params=["one stream", "segments on many streams"])
def cut(request: pytest.FixtureRequest, bench: Rig, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether each part is in several segments, each on another stream than the one before."""
    several = bool(request.param != "one stream")
    if several:
        change_streams(monkeypatch)
        cut_segments(monkeypatch, bench.engine, 3)
    return several


def test_a_part_is_at_least_a_segment_and_no_segment_is_of_two(bench: Rig, cut: bool) -> None:
    """Else the tests below would be about something else."""
    held = bench.stream()
    bench.gate(held)
    job = load(bench, range(6), range(6), after=held)
    of_each = [[segment.part for segment in segments_of(job)].count(part) for part in range(PARTS)]
    assert of_each == [2 if cut else 1] * PARTS
    assert len({segment.stream for segment in segments_of(job)}) == (4 if cut else 1)
    release(bench, job)
    assert blocks_hold(bench, range(6), range(100, 106))


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("ordered", [True, False], ids=["", "without order_before"])
def test_what_needs_a_part_waits_for_it_and_for_no_later_one(bench: Rig, part: int, ordered: bool) -> None:
    """Of planes 2k and 2k + 1, which are part k: the readers of earlier parts run while part k is held back."""
    hold_from(bench, part)
    job = load(bench, range(6), range(6))
    readers = []
    for number in range(PARTS):
        reader = reader_of(bench, job, number, 2 * number + 1, 5) if ordered else Reader(bench)
        if not ordered:
            reader.read(2 * number + 1, 5)
        readers.append(reader)
    bench.settle()
    assert not job.done
    assert [reader.idle for reader in readers] == [number < part or not ordered for number in range(PARTS)]
    values = [reader.value for reader in readers[:part]]
    assert values == [105] * part or not ordered
    release(bench, job)
    found = [reader.value for reader in readers[part:]]
    assert found == [105 if ordered else 6] * (PARTS - part), "5 + 1 is what the block held before"


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("named", [None, *BY_ENGINE])
def test_a_part_has_ended_after_all_parts_before_it(bench: Rig, named: str | None) -> None:
    named = named if named in (None, *copiers_in(bench.engine)) else "loop"
    hold_from(bench, 0)
    job = load(bench, range(6), range(6), copier=named)
    readers = [Reader(bench) for _ in range(PLANES)]
    for plane, reader in enumerate(readers):
        job.order_before(reader.stream, part=PARTS - 1)
        reader.read(plane, 3)
    release(bench, job)
    assert [reader.value for reader in readers] == [103] * PLANES


def test_the_planes_of_a_part_are_those_that_were_listed(bench: Rig) -> None:
    """Layers from the last to the first, K and V half the planes apart."""
    parts = [[3, 7], [2, 6], [1, 5], [0, 4]]
    hold_from(bench, 2)
    job = load(bench, range(6), range(6), parts=parts)
    readers = {plane: reader_of(bench, job, part, plane, 2) for part, planes in enumerate(parts) for plane in planes}
    bench.settle()
    assert {plane for plane, reader in readers.items() if reader.idle} == {2, 3, 6, 7}
    release(bench, job)
    assert {reader.value for reader in readers.values()} == {102}


@pytest.mark.usefixtures("cut")
def test_the_whole_job_is_ordered_behind_its_last_part(bench: Rig) -> None:
    hold_from(bench, PARTS - 1)
    job = load(bench, range(6), range(6))
    reader = Reader(bench)
    job.order_before(reader.stream)
    reader.read(PLANES - 1, 4)
    bench.settle()
    assert not reader.idle
    release(bench, job)
    assert reader.value == 104


def test_a_part_that_has_ended_is_not_waited_for(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_from(bench, 2)
    job = load(bench, range(6), range(6))
    bench.settle()
    assert not job.done  # asks, and gives the events of what has ended back
    assert [segment.part for segment in segments_of(job)] == [2, 3]
    waits: list[int] = []
    wait = Driver.stream_wait_event

    def noted(driver: Driver, stream: int, event: int) -> None:
        waits.append(stream)
        wait(driver, stream, event)

    monkeypatch.setattr(Driver, "stream_wait_event", noted)
    readers = [reader_of(bench, job, part, 2 * part, 1) for part in range(PARTS)]
    assert waits == [reader.stream for reader in readers[2:]]
    bench.settle()
    assert [reader.value for reader in readers[:2]] == [101, 101]
    release(bench, job)
    assert [reader.value for reader in readers] == [101] * PARTS


# with everything else


def test_every_part_waits_for_the_callers_stream(bench: Rig, cut: bool) -> None:
    held = bench.stream()
    scratch = bench.device.allocate(PLANES * 64)
    bench.gate(held)
    bench.copy_block(held, scratch.address, 5)
    job = load(bench, range(6), range(6), after=held)
    assert len(segments_of(job)) == PARTS * (2 if cut else 1)
    reader = reader_of(bench, job, 0, 0, 5)
    release(bench, job)
    assert all_are(scratch.to_numpy(), 6), "the caller's stream read the block before the load"
    assert reader.value == 105


@pytest.mark.usefixtures("cut")
def test_parts_follow_the_store_into_their_slots(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    bench.engine.store(range(6), range(6), after=held)
    job = load(bench, range(6), range(8, 14))
    readers = [reader_of(bench, job, part, 2 * part, 13) for part in range(PARTS)]
    release(bench, job)
    assert [reader.value for reader in readers] == [6] * PARTS
    assert blocks_hold(bench, range(8, 14), range(1, 7))


@pytest.mark.usefixtures("cut")
def test_a_store_out_of_the_blocks_follows_every_part(bench: Rig) -> None:
    hold_from(bench, PARTS - 1)
    load(bench, range(6), range(6))
    store = bench.engine.store(range(6), range(8, 14), after=NO_WAIT)
    release(bench, store)
    assert [set(bench.slot(slot).tolist()) for slot in range(8, 14)] == [{100 + slot} for slot in range(6)]


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("parts", [PARTS, None])
def test_loads_follow_every_part_of_the_one_before(bench: Rig, parts: int | None) -> None:
    hold_from(bench, PARTS - 1, most=1)
    load(bench, range(6), range(6))
    job = load(bench, range(8, 14), range(6), parts=parts)
    reader = reader_of(bench, job, 0, PLANES - 1 if parts is None else 0, 0)
    bench.settle()
    assert not reader.idle
    release(bench, job)
    assert reader.value == 108
    assert blocks_hold(bench, range(6), range(108, 114))


@pytest.mark.usefixtures("cut")
def test_parts_follow_what_a_failed_load_left_queued(bench: Rig) -> None:
    simulator = bench.device.simulator
    assert simulator is not None
    held = bench.stream()
    bench.gate(held)
    simulator.faults.fail_call("cuMemcpyAsync", nth=20)  # in the second part
    failed = load(bench, range(6), range(6), after=held, copier="loop")
    assert failed.error is not None
    job = load(bench, range(8, 14), range(6))
    reader = reader_of(bench, job, 0, 0, 0)
    for part in range(PARTS):
        with pytest.raises(TransferError, match="cuMemcpyAsync"):
            failed.order_before(reader.stream, part=part)
    release(bench, job)
    assert reader.value == 108
    assert blocks_hold(bench, range(6), range(108, 114))

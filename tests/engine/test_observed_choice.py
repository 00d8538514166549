"""Transfers that pack and the copy engine could both carry: the times of the last ones decide, and are not misread.

Times are given: those of the simulated device mean nothing. Kernels are interpreted: half a second a launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from helpers import STAGING, Rig, choose_kernels_too, rig, simulated

from kvoffload import NO_WAIT, GroupTransfer, Job, KVLayout, OffloadEngine
from kvoffload.copiers.observed import Comparison, Forecast

SIZES = {"planes": 4, "block_bytes": 64 << 10, "num_blocks": 8, "num_slots": 8}
IDS = range(4)  # 1 MiB: from there on times decide
FASTER_BY_PACK = {"pack": 60e-6, "strided": 300e-6, "batch": 300e-6}
FASTER_BY_STRIDED = {"pack": 300e-6, "strided": 60e-6, "batch": 300e-6}


class Times:
    """What transfers take, and what the choice is told about them.

    Attributes:
        seconds: by copier.
        overlap: between the start of a transfer and the end of the one before it.
        told: copiers and seconds, in order.
    """

    def __init__(self) -> None:
        self.seconds = FASTER_BY_STRIDED
        self.overlap = 0.0
        self.asked = 0
        self.told: list[tuple[str, Any]] = []  # seconds are approximate


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    choose_kernels_too(monkeypatch)
    made, note = Times(), Comparison.note

    def tell(comparison: Comparison, forecast: Forecast, seconds: float) -> None:
        made.told.append((forecast.copier, pytest.approx(seconds)))
        note(comparison, forecast, seconds)

    monkeypatch.setattr(Comparison, "note", tell)
    return made


@contextmanager
def choosing(times: Times, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Rig]:
    """An engine that chooses kernels, too, as on a GPU."""
    with simulated(1) as device, rig(device, **SIZES, **{"staging_bytes": STAGING, **options}) as bench:
        give(times, bench.engine, monkeypatch)
        yield bench


def give(times: Times, engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = engine._parts

    def seconds(start: int, end: int) -> float:
        times.asked += 1
        for queue in parts.in_flight.both:
            for transfer in queue.transfers:
                if (transfer.start, transfer.end) == (start, end):
                    return times.seconds[transfer.copier]
        return times.overlap

    monkeypatch.setattr(engine.device.driver, "event_seconds", seconds)


def stores(bench: Rig, count: int) -> list[Job]:
    """One after the other."""
    jobs = []
    for _ in range(count):
        jobs.append(bench.engine.store(IDS, IDS, after=NO_WAIT))
        jobs[-1].wait(60)
    return jobs


def test_the_faster_copier_carries_and_a_change_is_followed(monkeypatch: pytest.MonkeyPatch, times: Times) -> None:
    with choosing(times, monkeypatch) as bench:
        jobs = stores(bench, 14)
        assert [job.copier for job in jobs] == ["strided"] * 3 + ["pack"] + ["strided"] * 10
        assert "expected from the profile; pack" in jobs[0].reason
        assert jobs[3].reason.startswith("pack: ")
        assert "tried; strided" in jobs[3].reason
        assert jobs[4].reason.startswith("strided: 17.5 GB/s expected from the last transfers; pack ")
        times.seconds = FASTER_BY_PACK
        later = stores(bench, 6)
        assert [job.copier for job in later][-1] == "pack"
        assert [job.copier for job in later].count("pack") >= 3
        assert [copier for copier, _ in times.told] == [job.copier for job in jobs + later]
        assert bench.engine.statistics().store.jobs == 20


def test_a_named_copier_is_no_choice_and_a_plan_is_no_try(monkeypatch: pytest.MonkeyPatch, times: Times) -> None:
    with choosing(times, monkeypatch) as bench:
        for _ in range(20):
            job = bench.engine.store(IDS, IDS, after=NO_WAIT, copier="strided")
            job.wait(60)
            assert (job.copier, job.reason) == ("strided", "asked for by name")
        assert times.told == []
        stores(bench, 3)
        for _ in range(20):
            report = bench.engine.plan("store", IDS, IDS)
            assert (report.copier, "last transfers" in report.reason) == ("strided", True)
        assert stores(bench, 1)[0].copier == "pack", "as if nothing had been asked"


def test_where_one_copier_could_carry_it_nothing_is_compared(monkeypatch: pytest.MonkeyPatch, times: Times) -> None:
    """Small transfers, loads in parts that are no ranges of a slot, and an engine without kernels."""
    with choosing(times, monkeypatch) as bench:
        bench.engine.store([1], [1], after=NO_WAIT).wait(60)
        bench.engine.load(IDS, IDS, after=NO_WAIT, parts=[[0, 2], [1, 3]]).wait(60)
    with choosing(times, monkeypatch, staging_bytes=0) as bench:
        stores(bench, 6)
    assert times.told == []


@pytest.mark.long
def test_loads_in_parts_are_compared_among_themselves(monkeypatch: pytest.MonkeyPatch, times: Times) -> None:
    with choosing(times, monkeypatch) as bench:
        jobs = []
        for parts in 5 * [1] + 5 * [2]:
            jobs.append(bench.engine.load(IDS, IDS, after=NO_WAIT, parts=parts))
            jobs[-1].wait(60)
        packed = [job.copier == "pack" for job in jobs]
        assert packed == [False, False, False, True, False, False, False, True, True, False], "each is tried"
        assert [copier == "pack" for copier, _ in times.told] == packed


def test_a_transfer_that_waited_for_the_host_is_not_told(monkeypatch: pytest.MonkeyPatch, times: Times) -> None:
    """Its segments are queued as others end, so its time has waits in it."""
    with choosing(times, monkeypatch, most_queued_bytes=256 << 10) as bench:
        stores(bench, 5)
        assert times.told == []


def test_an_unknown_time_is_told_as_such(monkeypatch: pytest.MonkeyPatch, times: Times) -> None:
    with choosing(times, monkeypatch) as bench:
        times.seconds = {"strided": float("nan")}
        assert [job.copier for job in stores(bench, 8)] == ["strided"] * 8, "nothing is known, so nothing is tried"


@pytest.mark.long
def test_a_load_counts_from_the_end_of_the_one_before_it(monkeypatch: pytest.MonkeyPatch, times: Times) -> None:
    """Loads by pack overlap: copies of the next one run while this one's blocks are unpacked."""
    with choosing(times, monkeypatch) as bench:
        times.seconds, times.overlap = FASTER_BY_PACK, 20e-6
        while [copier for copier, _ in times.told[-3:]] != ["pack"] * 3:
            bench.engine.load(IDS, IDS, after=NO_WAIT).wait(60)
        times.told.clear()
        gate = bench.gate()
        stream = bench.stream()
        gate.hold(stream)
        pair = [bench.engine.load(IDS, [4, 5, 6, 7], after=stream), bench.engine.load(IDS, IDS, after=stream)]
        asked = times.asked
        gate.open()
        for job in pair:
            job.wait(60)
        assert [job.copier for job in pair] == ["pack", "pack"]
        assert times.told == [("pack", 60e-6), ("pack", 40e-6)]
        assert times.asked == asked + 3


@pytest.mark.long
def test_a_load_that_has_not_begun_overlaps_with_none(monkeypatch: pytest.MonkeyPatch, times: Times) -> None:
    with choosing(times, monkeypatch) as bench:
        times.seconds, times.overlap = FASTER_BY_PACK, 20e-6
        while [copier for copier, _ in times.told[-3:]] != ["pack"] * 3:
            bench.engine.load(IDS, IDS, after=NO_WAIT).wait(60)
        times.told.clear()
        gate, stream, asked = bench.gate(), bench.stream(), times.asked
        gate.hold(stream)
        first = bench.engine.load(IDS, IDS, after=NO_WAIT)
        later = bench.engine.load(IDS, [4, 5, 6, 7], after=stream)
        first.wait(60)
        assert (times.told, times.asked) == ([("pack", 60e-6)], asked + 1)
        gate.open()
        later.wait(60)
        assert (later.copier, times.told) == ("pack", 2 * [("pack", 60e-6)])


def test_groups_that_go_together_are_one_choice(monkeypatch: pytest.MonkeyPatch, times: Times) -> None:
    with simulated(1) as device:
        groups = [device.allocate_planes(4, block_bytes=64 << 10, num_blocks=8) for _ in range(2)]
        with OffloadEngine(KVLayout(groups), device=device, num_slots=8, staging_bytes=STAGING) as engine:
            give(times, engine, monkeypatch)
            times.seconds = {copier: 2.0 * seconds for copier, seconds in FASTER_BY_STRIDED.items()}
            both = [GroupTransfer(0, IDS, IDS), GroupTransfer(1, IDS, [4, 5, 6, 7])]
            jobs = []
            for _ in range(5):
                jobs.append(engine.store_groups(both, after=NO_WAIT))
                jobs[-1].wait(60)
            assert [job.copier for job in jobs] == ["strided"] * 3 + ["pack", "strided"]
            assert times.told == [(job.copier, times.seconds[job.copier] / 2) for job in jobs]
            assert jobs[-1].reason.startswith("strided: 17.5 GB/s expected from the last transfers; pack ")
            job = engine.store_groups([both[0], GroupTransfer(1, [1], [5])], after=NO_WAIT)
            job.wait(60)
            assert times.told[-1] == (job.copier, times.seconds[job.copier] * 4 / 5), "the share of the larger group"


@pytest.mark.parametrize("where", ["choose", "note"])
def test_an_interrupt_leaves_it_usable(monkeypatch: pytest.MonkeyPatch, times: Times, where: str) -> None:
    """Within a submission before anything is in flight, or while ended transfers are looked for."""
    inner, left = getattr(Comparison, where), [1]

    def interrupted(*arguments: Any) -> Any:
        found = inner(*arguments)
        if left:
            left.pop()
            raise KeyboardInterrupt
        return found

    with choosing(times, monkeypatch) as bench:
        monkeypatch.setattr(Comparison, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            stores(bench, 1)
        assert {job.copier for job in stores(bench, 3)} <= {"strided", "pack"}
        totals = bench.engine.statistics().store
        assert (totals.failed, totals.jobs) == (0, 3 if where == "choose" else 4)

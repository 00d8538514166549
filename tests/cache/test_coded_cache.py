"""Caches over engines with a codec: keys whose blocks do not fit are declined when their transfer has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coded import OF_LAYOUT, Values, coded, normal, read_blocks, unfit, write_blocks
from helpers import NON_BLOCKING, Gate, simulated

from kvoffload import (
    NO_WAIT,
    BlockCache,
    CacheEvent,
    KVLayout,
    LayoutError,
    MissingKeyError,
    OffloadEngine,
    Plane,
    TransferError,
    open_cache,
)

pytestmark = pytest.mark.kernels
KEYS = [bytes([65 + index]) for index in range(8)]


def spoil(engine: OffloadEngine, planes: list[Plane], blocks: Values, *which: int) -> None:
    for block in which:
        blocks[block] = unfit(blocks[block])
    write_blocks(engine.device, planes, blocks)


def test_keys_that_do_not_fit_are_declined() -> None:
    events: list[CacheEvent] = []
    with coded() as (engine, planes, blocks):
        spoil(engine, planes, blocks, 1, 3)
        with BlockCache(engine, on_event=events.append) as cache:
            job = cache.store(KEYS[:4], range(4), after=NO_WAIT)
            assert job.keys == tuple(KEYS[:4])
            assert [result.unfit for result in job.wait(30)] == [{1, 3}]
            assert job.unfit == (KEYS[1], KEYS[3])
            assert job.error is None
            cache.check()
            assert [event.keys for event in events if event.kind == "declined"] == [(KEYS[1], KEYS[3])]
            assert [event.keys for event in events if event.kind == "stored"] == [(KEYS[0], KEYS[2])]
            statistics = cache.statistics()
            assert (statistics.stored, statistics.declined, statistics.unfit, statistics.resident) == (2, 2, 2, 2)
            assert cache.lookup(KEYS[:4]) == 1
            with pytest.raises(MissingKeyError):
                cache.load([KEYS[1]], [6], after=NO_WAIT)
            cache.load([KEYS[0], KEYS[2]], [6, 7], after=NO_WAIT).wait(30)
            assert (read_blocks(engine.device, planes, [6, 7]) == blocks[[0, 2]]).all()
            spoil(engine, planes, blocks)
            again = cache.store(KEYS[4:8], [0, 0, 2, 2], after=NO_WAIT)
            again.wait(30)
            assert again.unfit == ()
            cache.check()
            assert cache.statistics().resident == 6, "the entries of the declined keys are free"


def test_a_pending_load_of_a_key_that_is_declined_fails() -> None:
    with coded() as (engine, planes, blocks):
        spoil(engine, planes, blocks, 1)
        with BlockCache(engine) as cache:
            device, gate = engine.device, Gate(engine.device)
            with device.current():
                stream = int(device.driver.call("cuStreamCreateWithPriority", NON_BLOCKING, 0))
            gate.hold(stream)
            cache.store(KEYS[:3], range(3), after=stream)
            fine = cache.load([KEYS[2]], [5], after=NO_WAIT, pending=True)
            wrong = cache.load([KEYS[1]], [6], after=NO_WAIT, pending=True)
            held, other = cache.acquire([KEYS[1]], pending=True), cache.acquire([KEYS[0]], pending=True)
            gate.open()
            with pytest.raises(TransferError, match="did not fit the codec"):
                wrong.wait(30)
            fine.wait(30)
            other.wait(30)
            with pytest.raises(TransferError, match="pending when they were leased has failed"):
                held.wait(30)
            held.release()
            other.release()
            assert cache.lookup([KEYS[1]]) == 0
            assert (read_blocks(engine.device, planes, [5]) == blocks[2]).all()
            cache.check()
            assert cache.statistics().unfit == 1
            gate.close()
            with device.current():
                device.driver.stream_destroy(stream)


@pytest.mark.parametrize("with_jobs", [True, False])
def test_reservations(with_jobs: bool) -> None:
    """Committed without its jobs, a key is found out by its first load."""
    with coded() as (engine, planes, blocks):
        spoil(engine, planes, blocks, 1)
        told: list[CacheEvent] = []
        with BlockCache(engine, on_event=told.append) as cache:
            reservation = cache.reserve(KEYS[:2])
            job = engine.store([0, 1], reservation.slots(), after=NO_WAIT)
            if with_jobs:
                reservation.commit(job)
                job.wait(30)
            else:
                job.wait(30)
                reservation.commit()
                assert cache.lookup(KEYS[:2]) == 2
                with pytest.raises(TransferError, match="did not fit the codec"):
                    cache.load(KEYS[:2], [5, 6], after=NO_WAIT).wait(30)
            assert cache.lookup(KEYS[:2]) == 1
            cache.check()
            found = cache.statistics()
            assert (found.unfit, found.stored - found.removed, found.resident) == (1, 1, 1)
            gone = [event.kind for event in told if KEYS[1] in event.keys and event.kind not in ("hit", "miss")]
            assert gone == (["declined"] if with_jobs else ["stored", "removed", "declined"])


@pytest.mark.parametrize("which", [0, 1])
def test_a_key_of_several_groups_goes_whole(which: int) -> None:
    random = np.random.default_rng(1)
    with simulated(1) as device:
        groups = [device.allocate_planes(count, block_bytes=512, num_blocks=6) for count in (2, 3)]
        for number, planes in enumerate(groups):
            values = normal(random, 6 * len(planes) * 256).reshape(6, -1, 256)
            if number == which:
                values[2] = unfit(values[2])
            write_blocks(device, planes, values)
        layout = KVLayout(groups, codec="bf16-12", **OF_LAYOUT)
        with OffloadEngine(layout, device=device, num_slots=9) as engine, BlockCache(engine) as cache:
            job = cache.store(KEYS[:3], [[0, 1, 2], [0, 1, 2]], after=NO_WAIT)
            job.wait(30)
            assert job.unfit == (KEYS[2],)
            assert cache.lookup(KEYS[:3]) == 2
            cache.check()


def test_traffic_that_never_fits(caplog: pytest.LogCaptureFixture) -> None:
    """Requests go on, and nothing is ever found. The log says what to do, when it begins and at ten times as many."""
    with coded() as (engine, planes, blocks):
        spoil(engine, planes, blocks, *range(8))
        with BlockCache(engine) as cache:
            for round_ in range(6):
                keys = [bytes([round_, index]) for index in range(8)]
                assert cache.fetch(keys, range(8), after=NO_WAIT).hits == 0
                cache.keep(keys, range(8), after=NO_WAIT).wait(30)
                cache.check()
            statistics = cache.statistics()
            assert (statistics.resident, statistics.stored, statistics.unfit) == (0, 0, 48)
            assert engine.statistics().store.failed == 0
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(" so far")[0].rpartition(" ")[2] for text in said] == ["8", "16"]
    assert all(text.endswith("leave the codec out") for text in said)


def test_records_of_a_disk_are_coded_slots(tmp_path: Path) -> None:
    """What was declined is not written; what was written comes back in another process's cache, but not without the
    codec."""
    random = np.random.default_rng(5)
    with simulated(3) as device:
        planes = device.allocate_planes(2, block_bytes=2048, num_blocks=6)
        values = normal(random, 6 * 2 * 1024).reshape(6, 2, 1024)
        values[2] = unfit(values[2])
        write_blocks(device, planes, values)
        layout = KVLayout([planes], codec="bf16-12", **OF_LAYOUT)
        disk: dict[str, Any] = {"disk": tmp_path / "disk", "disk_bytes": 1 << 20, "identity": "model"}
        options: dict[str, Any] = {"device": device, "pool_bytes": 4 * layout.slot_bytes, **disk}
        with open_cache(layout, **options) as cache:
            for _ in range(2):
                cache.keep(KEYS[:3], [0, 1, 2], after=NO_WAIT).wait(30)
            assert cache.statistics().unfit == 2
            cache.drain(30)
        with open_cache(layout, **options) as cache:
            job = cache.fetch(KEYS[:3], [3, 4, 5], after=NO_WAIT, deadline=30)
            assert job.hits == 2
            job.wait(30)
            assert cache.statistics().promoted == 2
            assert (read_blocks(device, planes, [3, 4]) == values[[0, 1]]).all()
        with pytest.raises(LayoutError, match="the digest of the layout"):
            open_cache(KVLayout([planes], **OF_LAYOUT), **options)


def test_parts_that_no_copier_can_carry_are_refused_by_the_call() -> None:
    with coded(planes=4) as (engine, planes, blocks), BlockCache(engine) as cache:
        cache.store(KEYS[:1], [1], after=NO_WAIT).wait(30)
        for call in (cache.load, cache.fetch):
            with pytest.raises(ValueError, match="copies parts whose planes follow each other"):
                call(KEYS[:1], [2], after=NO_WAIT, parts=[[0, 2], [1, 3]])
        cache.load(KEYS[:1], [2], after=NO_WAIT, parts=2).wait(30)
        assert (read_blocks(engine.device, planes, [2]) == blocks[[1]]).all()

"""Order between the segments of transfers, behind failed ones, and of reads of a source.

As in test_ordering.py: a gate holds a stream back, everything else runs, the gate opens, and bytes are compared.
"""

from __future__ import annotations

import pytest
from helpers import (
    OrderSpy,
    Rig,
    all_are,
    copiers_in,
    cut_segments,
    release,
    rig,
    simulated,
)
from transfers import segments_of

import kvoffload
from kvoffload import NO_WAIT, TransferError
from kvoffload.driver import SourceOrder
from kvoffload.tuning import CopierName

COPIERS = ("strided", "batch", "loop")


# transfers in segments


@pytest.mark.usefixtures("changing_streams")
@pytest.mark.parametrize("copier", COPIERS)
def test_every_segment_of_a_store_waits(bench: Rig, monkeypatch: pytest.MonkeyPatch, copier: str) -> None:
    copier = copier if copier in copiers_in(bench.engine) else "loop"
    cut_segments(monkeypatch, bench.engine)
    held = bench.stream()
    bench.gate(held)
    bench.fill(held, 77)
    job = bench.engine.store(range(5), range(5), after=held, copier=copier)
    assert len({segment.stream for segment in segments_of(job)}) > 2
    release(bench, job)
    assert all_are(bench.engine.slots[:5, :256], 77)


@pytest.mark.usefixtures("changing_streams")
def test_every_segment_of_a_load_waits(bench: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_segments(monkeypatch, bench.engine)
    held = bench.stream()
    scratch = bench.device.allocate(4 * 64)
    bench.gate(held)
    bench.copy_block(held, scratch.address, 4)
    job = bench.engine.load(range(5), range(5), after=held)
    release(bench, job)
    assert all_are(scratch.to_numpy(), 5)
    assert [int(bench.block(block)[-1]) for block in range(5)] == [100, 101, 102, 103, 104]


@pytest.mark.usefixtures("changing_streams")
def test_a_job_of_segments_ends_with_its_last_one(
    carried: tuple[Rig, CopierName | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, copier = carried
    cut_segments(monkeypatch, bench.engine)
    held = bench.stream()
    bench.gate(held)
    bench.fill(held, 33, block=2)
    store = bench.engine.store(range(8), range(8), after=held, copier=copier)
    load = bench.engine.load(range(8), range(8, 16), after=NO_WAIT, copier=copier)
    release(bench, store, load)
    expected = [1, 2, 33, 4, 5, 6, 7, 8]
    assert all(all_are(bench.slot(slot), value) for slot, value in enumerate(expected))
    assert all(all_are(bench.block(8 + block), value) for block, value in enumerate(expected))


# behind a failure


def _fail_in_the_middle(bench: Rig, held: int) -> kvoffload.Job:
    """A store of blocks 0..3 to slots 0..3 whose second copy the driver refuses; the first is queued behind a gate."""
    simulator = bench.device.simulator
    assert simulator is not None
    simulator.faults.fail_call("cuMemcpyAsync", nth=2)
    job = bench.engine.store(range(4), range(4), after=held, copier="loop")
    assert job.error is not None
    assert simulator.faults.pending == 0
    return job


@pytest.mark.usefixtures("changing_streams")
@pytest.mark.parametrize("segment_operations", [1, 512])
def test_stores_follow_what_a_failed_one_left_queued(
    bench: Rig, monkeypatch: pytest.MonkeyPatch, segment_operations: int
) -> None:
    cut_segments(monkeypatch, bench.engine, segment_operations)
    held = bench.stream()
    bench.gate(held)
    failed = _fail_in_the_middle(bench, held)
    job = bench.engine.store([9], [0], after=NO_WAIT, copier="loop")
    release(bench, job)
    assert all_are(bench.slot(0), 10)
    with pytest.raises(TransferError):
        failed.wait()


@pytest.mark.usefixtures("changing_streams")
def test_loads_follow_what_a_failed_store_left_queued(bench: Rig) -> None:
    held = bench.stream()
    bench.gate(held)
    failed = _fail_in_the_middle(bench, held)
    job = bench.engine.load([9], [0], after=NO_WAIT)
    release(bench, job)
    assert all_are(bench.slot(0)[:64], 1), "what was queued of the failed store read its block before the load"
    assert all_are(bench.block(0), 109)
    assert (failed.finished, failed.error is None) == (True, False)


@pytest.mark.usefixtures("changing_streams")
@pytest.mark.parametrize(("call", "nth"), [("cuStreamWaitEvent", 1), ("cuEventRecord", 1), ("cuEventRecord", 2)])
def test_a_failed_job_does_not_break_the_chain_of_its_direction(bench: Rig, call: str, nth: int) -> None:
    """The second store fails before it waits for the first; the third still has to follow the first."""
    simulator = bench.device.simulator
    assert simulator is not None
    held = bench.stream()
    bench.gate(held)
    bench.engine.store([3], [0], after=held)
    simulator.faults.fail_call(call, nth=nth)
    failed = bench.engine.store([4], [1], after=NO_WAIT, copier="loop")
    assert failed.error is not None
    job = bench.engine.store([5], [0], after=NO_WAIT)
    release(bench, job)
    assert all_are(bench.slot(0), 6)


@pytest.mark.usefixtures("changing_streams")
def test_a_load_behind_a_failed_store_follows_the_stores_before_it(bench: Rig) -> None:
    simulator = bench.device.simulator
    assert simulator is not None
    held = bench.stream()
    bench.gate(held)
    bench.engine.store([3], [0], after=held)
    simulator.faults.fail_call("cuStreamWaitEvent")
    assert bench.engine.store([4], [1], after=NO_WAIT, copier="loop").error is not None
    bench.engine.load([0, 1], [8, 9], after=NO_WAIT)
    release(bench)
    assert all_are(bench.block(8), 4)


@pytest.mark.usefixtures("changing_streams")
def test_order_before_a_running_job_behind_a_failed_one(bench: Rig) -> None:
    held, writer = bench.stream(), bench.stream()
    bench.gate(held)
    failed = _fail_in_the_middle(bench, held)
    job = bench.engine.store([9], [5], after=NO_WAIT)
    job.order_before(writer)
    bench.fill(writer, 88)
    with pytest.raises(TransferError):
        failed.order_before(writer)
    release(bench, job)
    assert all_are(bench.slot(5), 10)
    assert all_are(bench.slot(0)[:64], 1)


# when a source may be read


def _orders(spy: OrderSpy, direction: str) -> set[int]:
    return {order for method, order in spy.seen if method == direction}


@pytest.mark.parametrize("copier", ["strided", "batch"])
def test_pitfall_03_stores_read_in_stream_order(copier: CopierName, seed: int) -> None:
    level = ("batch", "fail-index", "raw")[seed % 3]
    with simulated(seed, level) as device, rig(device) as bench:
        spy = OrderSpy(device)
        stream = bench.stream()
        bench.gate(stream)
        bench.fill(stream, 77)
        job = bench.engine.store(range(8), range(8), after=stream, copier=copier)
        release(bench, job)
        assert _orders(spy, "store") == {SourceOrder.STREAM}
        assert all_are(bench.engine.slots[:8, :256], 77)
        bench.engine.load(range(8), range(8), copier=copier, source_order="auto").wait(10)
        assert _orders(spy, "load") == {SourceOrder.ANY}
        bench.engine.load(range(8), range(8), copier=copier, source_order="stream").wait(10)
        assert _orders(spy, "load") == {SourceOrder.ANY, SourceOrder.STREAM}
        bench.engine.load(range(8), range(8), copier=copier, source_order="any").wait(10)
        assert _orders(spy, "store") == {SourceOrder.STREAM}


@pytest.mark.parametrize("copier", ["strided", "batch"])
def test_pitfall_04_a_load_behind_an_unfinished_store_reads_in_stream_order(copier: CopierName, seed: int) -> None:
    level = ("batch", "fail-index", "raw")[seed % 3]
    with simulated(seed, level) as device, rig(device) as bench:
        spy = OrderSpy(device)
        held = bench.stream()
        bench.gate(held)
        store = bench.engine.store([3, 4], [0, 1], after=held, copier=copier)
        chained = bench.engine.load([7, 0], [8, 9], after=NO_WAIT, copier=copier)
        free = bench.engine.load([6, 7], [10, 11], after=NO_WAIT, copier=copier)
        orders = [order for method, order in spy.seen if method == "load"]
        assert orders == [SourceOrder.STREAM, SourceOrder.ANY]
        with pytest.raises(ValueError, match="unfinished"):
            bench.engine.load([0], [8], after=NO_WAIT, copier=copier, source_order="any")
        assert bench.engine.statistics().in_flight == 3
        release(bench, store)
        assert chained.done
        assert free.done
        assert all_are(bench.block(9), 4)


def test_pitfall_04_any_returns_once_the_host_has_seen_the_store_end(seed: int) -> None:
    with simulated(seed) as device, rig(device) as bench:
        spy = OrderSpy(device)
        for _ in range(3):
            bench.engine.store([3], [0]).wait(10)
            bench.engine.load([0], [4]).wait(10)
        assert _orders(spy, "load") == {SourceOrder.ANY}
        assert _orders(spy, "store") == {SourceOrder.STREAM}

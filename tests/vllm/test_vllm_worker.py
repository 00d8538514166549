"""KVOffloadWorker alone: bytes, partial chunks, groups, order, failures."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from coded import normal
from seeds import seeds
from vllm_parts import PAGE, Rig, gpu, host

import kvoffload  # isort: split

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata, TransferStats

from kvoffload.device.shared_slots import SharedSlots
from kvoffload.vllm import KVOffloadConnector
from kvoffload.vllm.connector import WorkerMetadata


def test_bytes_come_back() -> None:
    with Rig() as rig:
        before = rig.blocks.copy()
        assert rig.worker.submit_store(1, gpu((0, [3, 7, 4])), host(5, 0, 2))
        (result,) = rig.finish()
        assert (result.job_id, result.success, result.transfer_size) == (1, True, 3 * 2 * PAGE)
        rig.blocks[:] = 0
        assert rig.worker.submit_load(2, host(0, 5), gpu((0, [1, 9])))
        assert [result.job_id for result in rig.finish()] == [2]
        assert (rig.blocks[:, 1] == before[:, 7]).all()
        assert (rig.blocks[:, 9] == before[:, 3]).all()
        assert not rig.blocks[:, [0, 2, 3, 4, 5, 6, 7, 8]].any()
        assert rig.worker.get_finished() == []


def test_groups_and_partial_chunks_are_one_transfer() -> None:
    """Two blocks a chunk. Group 1 has none; loads begin at the second block of a chunk."""
    with Rig(3, blocks_per_chunk=2) as rig:
        before = rig.blocks.copy()
        submitted = rig.worker.engine.submitted
        rig.worker.submit_store(1, gpu((0, [1, 2, 3, 4]), (0, []), (4, [5, 6])), host(0, 1, 2))
        assert rig.worker.engine.submitted == submitted + 1
        assert [result.transfer_size for result in rig.finish()] == [6 * 2 * PAGE]
        rig.blocks[:] = 0
        rig.worker.submit_load(2, host(0, 1, 2), gpu((1, [10, 11, 12]), (0, []), (5, [13])))
        rig.finish()
        for target, source in ((10, 2), (11, 3), (12, 4), (13, 6)):
            assert (rig.blocks[:, target] == before[:, source]).all(), target


def test_blocks_of_a_chunk_can_be_packed() -> None:
    """vLLM's tensors lie apart; each block is one range of its slot all the same."""
    with Rig(2, blocks_per_chunk=2, staging_bytes=1 << 20) as rig:
        engine = rig.worker.engine
        assert [group.slot_order for group in engine.layout.groups] == ["block-major"] * 2
        engine.store([9, 4], [3], group=1, copier="pack").wait()
        assert (engine.slots[3, : 4 * PAGE].reshape(2, 2, PAGE) == rig.blocks[:, [9, 4]].swapaxes(0, 1)).all()


@pytest.mark.parametrize("seed", seeds(8))
def test_a_transfer_waits_for_what_was_queued_before(seed: int) -> None:
    with Rig(seed=seed) as rig:
        span = [(rig.memory.address, rig.memory.nbytes)]

        def queue(block: int, value: int) -> None:
            def write() -> None:
                rig.blocks[:, block] = value

            with rig.device.current():
                rig.device.simulator.enqueue(rig.stream.handle, write, writes=span)

        queue(0, 1)
        rig.worker.submit_store(1, gpu((0, [0])), host(0))
        rig.worker.wait({1})
        for value in (2, 3, 4):
            queue(1, value)
        rig.worker.submit_load(2, host(0), gpu((0, [1])))
        rig.worker.wait({2})
        rig.device.simulator.run_all()
        assert (rig.blocks[:, 1] == 1).all()  # stored after block 0 was written, and loaded after block 1 was


def test_wait_returns_once_the_transfers_have_ended() -> None:
    with Rig() as rig:
        rig.worker.submit_store(1, gpu((0, [0, 1])), host(0, 1))
        rig.worker.wait({1, 77})  # a number of before a reset is not known
        assert rig.worker.engine.in_flight == 0
        assert [result.job_id for result in rig.worker.get_finished()] == [1]
        rig.worker.wait({1})


def test_an_expedited_load_goes_ahead_of_those_held_on_the_host() -> None:
    with Rig(most_queued_bytes=1) as rig:
        for slot in range(4):
            rig.worker.submit_store(slot, gpu((0, [slot])), host(slot))
        rig.worker.wait(set(range(4)))
        rig.worker.get_finished()
        for slot in range(3):
            rig.worker.submit_load(10 + slot, host(slot), gpu((0, [8 + slot])))
        rig.worker.submit_load(20, host(3), gpu((0, [11])), expedited=True)
        rig.worker.wait({20})
        ended = [result.job_id for result in rig.worker.get_finished()]
        assert 20 in ended
        assert 12 not in ended
        rig.worker.wait({10, 11, 12})
        assert (rig.blocks[:, 8:12] == rig.blocks[:, :4]).all()


def failing(rig: Rig) -> None:
    rig.device.simulator.faults.fail_call("cuEventRecord")


def test_a_failed_store_leaves_slots_that_cannot_be_loaded(caplog: pytest.LogCaptureFixture) -> None:
    with Rig() as rig:
        failing(rig)
        rig.worker.submit_store(1, gpu((0, [0, 1])), host(3, 4))
        with caplog.at_level(logging.WARNING, "kvoffload"):
            assert [(result.job_id, result.success) for result in rig.finish()] == [(1, True)]
        assert "store 1 of vLLM has failed" in caplog.text
        with pytest.raises(kvoffload.TransferError, match=r"load 2 .* slots \[3\] hold no bytes .*KVOffloadConnector"):
            rig.load(2, [5, 6], [2, 3])


def test_a_store_of_chunks_that_lack_blocks_fails_where_there_are_windows() -> None:
    """vLLM leaves out blocks that have left a window. Those behind them would get into each other's places, and a
    request that ends a token earlier reads one of those that are missing.
    """
    with Rig(2, blocks_per_chunk=4, windowed=True) as rig:
        rig.worker.reports_failures = True
        before = rig.blocks.copy()
        rig.worker.submit_store(1, gpu((0, []), (4, [1, 2, 3, 4, 5, 6, 7, 8])), host(0, 1))
        rig.worker.submit_store(2, gpu((0, [1, 2, 3, 4]), (4, [1, 2, 4])), host(2, 3))
        rig.worker.submit_store(3, gpu((4, [1, 2, 4, 6]), (0, [])), host(4, 5))  # as many blocks as a chunk has
        rig.worker.submit_store(4, gpu((0, []), (6, [1, 2])), host(6))  # the last two of a chunk
        assert [result.job_id for result in rig.finish()] == [1, 2, 3, 4]
        assert rig.worker.take_failed_slots() == {2, 3, 4, 5, 6}
        rig.worker.submit_load(5, host(0), gpu((0, []), (7, [9])))
        rig.finish()
        assert (rig.blocks[:, 9] == before[:, 4]).all()


def test_a_store_that_succeeds_mends_its_slots() -> None:
    with Rig() as rig:
        failing(rig)
        rig.store(1, [0], [3])
        rig.store(2, [0], [3])
        rig.load(3, [5], [3])
        assert (rig.blocks[:, 5] == rig.blocks[:, 0]).all()


def test_shared_slots_are_filled_by_tiers_after_a_failed_store() -> None:
    """The scheduler, which hears of the failure, has no key for the slot until a tier or a store has filled it."""
    name = f"a worker's slots {os.getpid()}"
    with Rig(host=lambda layout: SharedSlots(8, layout.slot_bytes)) as rig:
        rig.worker.reports_failures = True
        failing(rig)
        rig.store(1, [3], [2])
        assert rig.worker.take_failed_slots() == {2}
        rig.worker.offer(name, "what they are")
        with kvoffload.SharedSlots.receive(name) as slots:
            assert slots.note == "what they are"
            slots.array[2] = 7
        rig.load(2, [5], [2])
        assert rig.worker.take_failed_loads() == set()
        assert (rig.blocks[:, 5] == 7).all()


def test_a_failed_load_ends_the_worker_where_it_cannot_be_reported() -> None:
    with Rig() as rig:
        rig.store(1, [0], [3])
        failing(rig)
        with pytest.raises(kvoffload.TransferError, match=r'load 2 of vLLM .*="KVOffloadConnector"'):
            rig.load(2, [5], [3])


def test_a_failed_load_that_is_awaited_raises() -> None:
    with Rig() as rig:
        rig.worker.reports_failures = True
        rig.store(1, [0], [3])
        failing(rig)
        rig.worker.submit_load(2, host(3), gpu((0, [5])), expedited=True)
        with pytest.raises(kvoffload.TransferError, match="sync_load_budget_bytes"):
            rig.worker.wait({2})


def test_too_many_transfers_wait_for_each_other() -> None:
    with Rig(max_in_flight=1) as rig:
        rig.worker.submit_store(1, gpu((0, [0])), host(0))
        ended = [(result.job_id, result.transfer_size) for result in rig.store(2, [1], [1])]
        assert ended == [(1, 2 * PAGE), (2, 2 * PAGE)]
        rig.load(3, [4, 5], [0, 1])
        assert (rig.blocks[:, 4:6] == rig.blocks[:, :2]).all()


def test_a_worker_is_shut_down_with_transfers_in_flight_and_twice() -> None:
    with Rig() as rig:
        rig.worker.submit_store(1, gpu((0, [0])), host(0))
        rig.worker.shutdown()
        rig.worker.shutdown()
        assert rig.device.simulator.leaks()["registered_ranges"] == 0


def connector_of(worker: Any, **parts: Any) -> Any:
    connector: Any = KVOffloadConnector.__new__(KVOffloadConnector)
    connector._loads = {}
    connector._connector_metadata = OffloadingConnectorMetadata({}, {})
    connector.connector_worker = SimpleNamespace(
        worker=worker,
        start_kv_transfers=lambda _: None,
        get_finished=lambda _: (set(), {"a", "b"}),
        build_connector_worker_meta=lambda: None,
    )
    for name, part in parts.items():
        setattr(connector, name, part)
    return connector


def test_the_connector_reports_failed_loads_and_slots() -> None:
    with Rig() as rig:
        rig.worker.reports_failures = True
        failing(rig)
        rig.load(2, [5], [3])
        loads = {
            1: SimpleNamespace(req_id="a", sync=False),
            2: SimpleNamespace(req_id="b", sync=False),
            3: SimpleNamespace(req_id="c", sync=True),
        }
        connector = connector_of(rig.worker, _connector_metadata=OffloadingConnectorMetadata(loads, {}))
        connector.start_load_kv(None)
        results = connector.get_transfer_results(set())
        assert (results.finished_recving, results.failed_recving) == ({"a", "b"}, {"b"})
        assert connector.build_connector_worker_meta().failed_slots == {3}
        assert connector.build_connector_worker_meta() is None


def test_what_workers_report_is_put_together() -> None:
    one = WorkerMetadata({1: 1}, TransferStats(), {4})
    two = WorkerMetadata({1: 1, 2: 1}, TransferStats(), {5})
    both = one.aggregate(two)
    assert isinstance(both, WorkerMetadata)
    assert (both.completed_jobs, both.failed_slots) == ({1: 2, 2: 1}, {4, 5})


def test_the_connector_refuses_another_spec() -> None:
    with pytest.raises(TypeError, match=r'spec_name="KVOffloadSpec".*got a worker of type object'):
        connector_of(object()).get_transfer_results(set())


def test_a_codec_and_blocks_that_do_not_fit() -> None:
    """Slots of such blocks are reported as those of a failed store are, and the others of their store are not."""
    with Rig(codec="bf16-12", staging_bytes=1 << 20) as rig:
        rig.worker.reports_failures = True
        values = normal(np.random.default_rng(1), 2 * 16 * PAGE // 2).view(np.uint8).reshape(2, 16, PAGE)
        unfit, rig.blocks[:] = rig.blocks[:, 1].copy(), values
        rig.blocks[:, 1] = unfit
        assert [result.success for result in rig.store(1, [0, 1, 2], [3, 4, 5])] == [True]
        assert rig.worker.take_failed_slots() == {4}
        rig.worker.submit_load(2, host(3, 5), gpu((0, [8, 9])))
        rig.load(3, [10], [4])
        assert rig.worker.take_failed_loads() == {3}
        assert (rig.blocks[:, [8, 9]] == values[:, [0, 2]]).all()
        rig.store(4, [2], [4])
        rig.load(5, [10], [4])
        assert rig.worker.take_failed_loads() == set()
        assert (rig.blocks[:, 10] == values[:, 2]).all()

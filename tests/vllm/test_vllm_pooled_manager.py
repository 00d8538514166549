"""KVOffloadManager over a shared pool, as vLLM's scheduler calls it: two engines, whose workers the test plays."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
from interrupts import interrupt
from pooling import Rows
from tiering import until

fake_vllm.install()

from vllm.v1.kv_offload.base import LookupResult  # noqa: E402
from vllm_parts import Scheduler, keys  # noqa: E402

from kvoffload import CapacityError  # noqa: E402
from kvoffload.pool import PoolOwner, SharedPool  # noqa: E402
from kvoffload.vllm import KVOffloadManager, KVOffloadSpec, pooled  # noqa: E402
from kvoffload.vllm.identity import making_connector  # noqa: E402
from kvoffload.vllm.pooled import PooledLookups  # noqa: E402

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
ROW = 4096


class Replica(Scheduler):
    """A scheduler, and the membership of its worker."""

    def __init__(self, path: str, name: str, asked: Counter[str]) -> None:
        self.worker = SharedPool.attach(path, Rows(), identity="m", engine=(name, 0))
        self.pool = SharedPool.beside(path, name, 1)
        ask = self.pool.ask

        def counted(operation: Any, *rest: Any, **options: Any) -> Any:
            asked[f"{name} {operation.name}"] += 1
            return ask(operation, *rest, **options)

        vars(self.pool)["ask"] = counted
        super().__init__(KVOffloadManager(0, enable_events=True, promotions=PooledLookups(lambda: self.pool)))

    def store(self, numbers: Sequence[int]) -> list[int]:
        output, context = self.begin_store(numbers)
        self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        return list(output.store_spec.block_ids)

    def close(self) -> None:
        self.manager.shutdown()  # which leaves the pool only if the manager has asked it anything
        self.pool.close()
        self.worker.close()


@contextmanager
def replicas(folder: Path, capacity: int = 64) -> Iterator[Any]:
    """The owner, two replicas, and what they have asked it."""
    path, asked = str(folder / "pool"), Counter[str]()
    with ExitStack() as stack:
        owner = stack.enter_context(PoolOwner(path, nbytes=(capacity + 2) * ROW + capacity * 128))
        pair = [Replica(path, name, asked) for name in "ab"]
        for each in pair:
            stack.callback(each.close)
        yield owner, *pair, asked


def test_one_replica_loads_what_another_has_stored(tmp_path: Path) -> None:
    with replicas(tmp_path) as (owner, a, b, asked):
        slots = a.store(range(40))
        asked.clear()
        context = b.context(range(41))
        assert b.look(range(41), context) == [HIT] * 40 + [MISS]
        spec = b.manager.prepare_load(keys(*range(5, 40)), context)
        assert list(spec.block_ids) == slots[5:]
        b.end_step()
        assert asked == {"b TAKE": 1}, "one question for all keys of a request and its load"
        assert owner.statistics()[0]["pinned"] == 40
        b.manager.complete_load(set(keys(*range(5, 40))), context)
        b.manager.on_request_finished(context)
        statistics = b.manager.index.statistics()
        assert (statistics.pinned, statistics.lookups, statistics.hits) == (0, 41, 40)
        assert not [*a.manager.take_events(), *b.manager.take_events()]


def test_hits_stay_until_the_end_of_the_step(tmp_path: Path) -> None:
    with replicas(tmp_path, capacity=8) as (owner, a, b, _):
        a.store(range(8))
        assert b.look(range(8)) == [HIT] * 8
        output, _ = a.begin_store(range(100, 104))
        assert not output.keys_to_store, "nothing can be evicted"
        b.end_step()
        assert b.manager.index.statistics().pinned == 0
        output, _ = a.begin_store(range(100, 104))
        assert len(output.keys_to_store) == 4
        assert owner.statistics()[0]["pending"] == 4
        assert sum(each is HIT for each in b.look(range(8))) == 4


def test_nobody_waits_for_what_another_engine_is_storing(tmp_path: Path) -> None:
    with replicas(tmp_path) as (_, a, b, _):
        output, context = a.begin_store(range(3))
        assert a.look(range(4)) == [PENDING] * 3 + [MISS]
        assert b.look(range(4)) == [MISS] * 4
        assert not b.begin_store(range(3))[0].keys_to_store
        a.manager.complete_store(output.keys_to_store, context)
        a.end_step()
        b.end_step()
        assert a.look(range(4)) == b.look(range(4)) == [HIT] * 3 + [MISS]


def test_after_a_reset_an_engine_has_keys_of_its_own(tmp_path: Path) -> None:
    with replicas(tmp_path) as (_, a, b, _):
        a.store(range(4))
        a.begin_store([9])
        loading = a.context(range(2))
        a.look(range(2), loading)
        a.manager.prepare_load(keys(0, 1), loading)
        a.manager.reset_cache()
        assert a.look([0, 1, 9]) == [MISS] * 3
        assert b.look(range(4)) == [HIT] * 4, "other weights, other keys: those of other replicas stay"
        a.manager.on_reset_flushed()
        a.store(range(2))
        a.end_step()
        assert a.look(range(4)) == [HIT] * 2 + [MISS] * 2
        b.store([20])
        a.end_step()
        assert a.look([20]) == [MISS]
        a.end_step()
        b.end_step()
        until(lambda: (now := a.manager.index.statistics()).pinned == now.pending == 0)


def test_a_failed_load_makes_keys_missing_for_all(tmp_path: Path) -> None:
    with replicas(tmp_path) as (_, a, b, _):
        slots = a.store(range(4))
        context = b.context(range(4))
        b.look(range(4), context)
        b.manager.prepare_load(keys(*range(4)), context)
        b.end_step()
        b.manager.note_failed([slots[2]])
        b.manager.complete_load(keys(*range(4)), context)
        assert a.look(range(4)) == [HIT, HIT, MISS, HIT]


def test_without_an_owner_what_has_begun_ends_and_all_else_is_a_miss(tmp_path: Path) -> None:
    with replicas(tmp_path) as (owner, a, b, _):
        slots = a.store(range(4))
        loading, storing = b.context(range(4)), b.begin_store([7])
        assert b.look(range(4), loading) == [HIT] * 4
        owner.close()
        assert list(b.manager.prepare_load(keys(1, 3), loading).block_ids) == [slots[1], slots[3]]
        b.end_step()
        b.manager.complete_load(keys(1, 3), loading)
        b.manager.complete_store(storing[0].keys_to_store, storing[1])
        b.manager.on_request_finished(loading)
        assert b.look(range(4)) == [MISS] * 4
        output, context = b.begin_store(range(4))
        assert not output.keys_to_store
        b.manager.on_request_finished(context)
        b.manager.reset_cache()
        b.manager.on_reset_flushed()
        assert b.manager.get_stats() is not None
        with PoolOwner(owner.path, nbytes=66 * ROW + 64 * 128) as following:  # takes over memory and keys
            until(lambda: [each["members"] for each in following.statistics()] == [4])
            until(lambda: a.look(range(4), a.context(range(4))) == [HIT] * 4 or a.end_step())


def test_a_manager_whose_index_cannot_be_opened_leaves_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be a member until its spec is collected."""
    path = str(tmp_path / "pool")
    offloading: Any = SimpleNamespace(
        extra_config={"kvoffload_pool": path}, worker_kv_bytes_per_block=ROW,
        cache=SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=4),
        parallel=SimpleNamespace(world_size=1), model=SimpleNamespace(max_model_len=100), groups=(), engine_id="a",
        enable_kv_cache_events=False,
    )  # fmt: skip

    def refuses(*_: Any) -> Any:
        raise CapacityError("no room")

    with (
        PoolOwner(path, nbytes=6 * ROW + 4 * 128) as owner,
        SharedPool.attach(path, Rows(), identity="m", engine=("a", 0)),
    ):
        connector: Any = SimpleNamespace()
        with making_connector(connector, connector):
            spec = KVOffloadSpec(offloading)
        monkeypatch.setattr(pooled, "CacheIndex", refuses)
        with pytest.raises(CapacityError, match="no room"):
            spec.get_manager()
        until(lambda: [each["members"] for each in owner.statistics()] == [1])


def test_gauges_are_asked_for_once_a_second(tmp_path: Path) -> None:
    with replicas(tmp_path) as (_, a, _, asked):
        a.store([1])
        begun = time.monotonic()
        for _ in range(50):
            a.manager.get_stats()
        assert asked["a COUNTS"] <= 2 + time.monotonic() - begun


def test_no_counter_is_reduced_when_an_owner_ends_and_another_one_follows(tmp_path: Path) -> None:
    """Prometheus raises for a counter that is increased by less than 0, and vLLM's front end ends with that."""
    with replicas(tmp_path, capacity=4) as (owner, a, _, _):
        increases = []

        def reports(resident: int) -> bool:
            values = a.manager.get_stats().reduce()
            increases.append(values.get("vllm:kvoffload_evicted_chunks", 0))
            return bool(values["vllm:kvoffload_resident_chunks"] == resident)

        for first in (0, 4, 8):
            a.store(range(first, first + 4))
        until(lambda: reports(4))
        owner.close()
        until(lambda: reports(0))
        assert (min(increases), sum(increases)) == (0, 8)
        with PoolOwner(owner.path, nbytes=6 * ROW + 4 * 128) as following:
            until(lambda: [each["members"] for each in following.statistics()] == [4])
            until(lambda: a.store([12]) or a.end_step())
            until(lambda: reports(4))
        assert (min(increases), sum(increases)) == (0, 9)


@contextmanager
def an_owner_follows(owner: PoolOwner, *replicas: Any) -> Iterator[PoolOwner]:
    """Whom all processes of these replicas have joined."""
    owner.close()
    with PoolOwner(owner.path, nbytes=66 * ROW + 64 * 128) as following:
        until(lambda: [each["members"] for each in following.statistics()] == [2 * len(replicas)])
        until(lambda: all(each.pool.connected for each in replicas))
        yield following


def test_an_interrupted_store_does_not_end_another_one_of_its_keys_while_an_owner_follows(
    tmp_path: Path,
) -> None:
    """At every point. Else the next store of these keys would be complete when the first one is: the next owner grants
    other entries for them, and vLLM says which keys a store had, not which store.
    """
    with replicas(tmp_path) as (owner, a, b, _):
        storing = a.begin_store([1, 2])
        with an_owner_follows(owner, a, b) as following:
            context, begun, points = a.context(range(3)), list[Any](), 0
            offer = partial(a.manager.prepare_store, keys(0, 1, 2), context)
            while None not in begun and points < 100:  # an owner that is late declines both
                points += 1
                until(lambda: a.pool.connected)
                interrupt(lambda: begun.append(offer()), points, "kvoffload/vllm/manager")
            assert begun[-1] is None, begun
            assert not any(each.keys_to_store for each in begun[:-1])
            assert points > 10
            a.manager.complete_store(storing[0].keys_to_store, storing[1])
            assert b.look(range(3)) == [MISS] * 3
            a.store(range(3))
            b.end_step()
            assert b.look(range(3)) == [HIT] * 3
            b.end_step()
            until(lambda: following.statistics()[0]["pinned"] == 0)

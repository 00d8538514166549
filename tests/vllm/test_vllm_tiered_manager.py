"""KVOffloadManager with tiers below, as vLLM's scheduler calls it, over memory that the test fills as workers would."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import fake_vllm
import numpy as np
import pytest
from tier_classes import DictTier
from tiering import SECONDS, aligned, until

fake_vllm.install()

from vllm.v1.kv_offload.base import LookupResult, ReqContext  # noqa: E402
from vllm.v1.metrics.cache_hit_source import CacheHitSource  # noqa: E402
from vllm_parts import Scheduler, keys  # noqa: E402

from kvoffload import CacheIndex, Status  # noqa: E402
from kvoffload.testing import FaultyTier  # noqa: E402
from kvoffload.tiers import Tier  # noqa: E402
from kvoffload.vllm import KVOffloadManager  # noqa: E402
from kvoffload.vllm.promotions import Promotions  # noqa: E402

HIT, MISS, RETRY, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY, LookupResult.HIT_PENDING


class Host(Scheduler):
    """And what workers do, in memory of the test's."""

    def __init__(self, manager: KVOffloadManager, pool: Any) -> None:
        super().__init__(manager)
        self.pool = pool

    def store(self, numbers: Sequence[int]) -> None:
        output, context = self.begin_store(numbers)
        for key, slot in zip(output.keys_to_store, output.store_spec.block_ids, strict=True):
            self.pool[slot] = int(key[:8])
        self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.end_step()

    def written(self, numbers: Sequence[int]) -> ReqContext:
        """Store, have the tiers take them, and evict them. Returns the context of a request for them."""
        self.store(numbers)
        assert self.index.drain(SECONDS)
        self.index.clear(below=False)
        return self.context(numbers)

    def look_until(self, numbers: Sequence[int], context: ReqContext, result: list[LookupResult]) -> int:
        """Steps, in each of which the request looks its keys up; how many there were."""
        steps = 0
        end = time.monotonic() + SECONDS
        while (found := self.look(numbers, context)) != result:
            assert time.monotonic() < end, found
            self.end_step()
            steps += 1
            time.sleep(1e-3)
        return steps

    def loaded(self, numbers: Sequence[int], context: ReqContext) -> bool:
        """Begin and end a load of keys; whether the slots hold their bytes."""
        spec = self.manager.prepare_load(keys(*numbers), context)
        self.end_step()
        right = [bool((self.pool[slot] == n % 256).all()) for n, slot in zip(numbers, spec.block_ids, strict=True)]
        self.manager.complete_load(keys(*numbers), context)
        return all(right)


@contextmanager
def host(
    *tiers: Tier,
    capacity: int = 8,
    seconds: float = SECONDS,
    write: Any = "through",
    source: CacheHitSource = CacheHitSource.EXTERNAL_UNSPECIFIED,
    **options: Any,
) -> Iterator[Host]:
    pool = aligned(capacity)

    def open_index(on_event: Callable[..., None] | None) -> CacheIndex:
        return CacheIndex(
            len(pool), pools=[pool], tiers=tiers, layout=None, write=write, policy="lru", on_event=on_event
        )

    promotions = Promotions(open_index, seconds=seconds, windows={1: 2}, source=source)
    manager = KVOffloadManager(capacity, promotions=promotions, **options)
    yield Host(manager, pool)
    for tier in tiers:
        if isinstance(tier, FaultyTier):
            tier.heal()
    manager.index.check()
    manager.shutdown()
    manager.shutdown()


class Asked(DictTier):
    """Does not know what it has without being asked."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = type(self.capabilities)(durable=False, shared=False, local_index=False)


def test_promoted_keys_are_hits_with_their_bytes() -> None:
    with host(DictTier(), source=CacheHitSource.DISK) as bench:
        bench.written(range(3))
        bench.store([7])
        context = bench.context([7, 0, 1, 2, 9])
        assert bench.look([7, 0, 1, 2, 9], context) == [HIT, PENDING, PENDING, PENDING, MISS]
        bench.end_step()
        until(lambda: bench.index.tier_statistics()[0].promoted == 3)
        assert bench.index.drain(SECONDS)  # until the promotion has ended
        assert bench.index.statistics().lookups == 2, "vLLM's own that have an answer; the promotion adds none"
        bench.look_until([7, 0, 1, 2, 9], context, [HIT] * 4 + [MISS])
        assert bench.loaded([7, 0, 1, 2], context)
        sources = [bench.manager.get_load_source(key, context) for key in keys(7, 0)]
        assert sources == [CacheHitSource.HOST, CacheHitSource.DISK]
        assert bench.index.statistics().pinned == 0


def test_a_chunk_that_is_being_promoted_is_counted_when_its_answer_is_final() -> None:
    """vLLM looks it up in every step until then: a key counts once for a request, as the hit that it becomes."""
    tier = FaultyTier()
    with host(tier) as bench:
        bench.written(range(2))
        bench.store([7])
        before = bench.index.statistics()
        tier.hang_all()
        context = bench.context([7, 0, 1, 9])
        for _ in range(5):
            assert MISS not in bench.look([7, 0, 1, 9], context)[1:3]
            bench.end_step()
        tier.heal()
        bench.look_until([7, 0, 1, 9], context, [HIT, HIT, HIT, MISS])
        now = bench.index.statistics()
        assert (now.lookups - before.lookups, now.hits - before.hits) == (4, 3)
        assert bench.loaded([7, 0, 1], context)
        bench.look([7], context)  # after a preemption
        assert bench.index.statistics().lookups == now.lookups + 1


def test_a_tier_that_has_to_be_asked_is() -> None:
    with host(Asked()) as bench:
        bench.written(range(2))
        context = bench.context(range(4))
        assert bench.look(range(4), context) == [RETRY] * 4
        bench.end_step()
        bench.look_until(range(4), context, [HIT, HIT, MISS, MISS])


def test_of_a_window_the_last_chunks_are_asked_for() -> None:
    with host(Asked()) as bench:
        context = bench.context([])
        results = [bench.manager.lookup(key, context) for key in reversed(keys(*range(6), group=1))]
        assert results == [RETRY] * 3 + [MISS] * 3


def test_a_request_waits_no_longer_than_its_deadline() -> None:
    tier = FaultyTier()
    with host(tier, seconds=0.3) as bench:
        context = bench.written(range(2))
        tier.hang_all()
        begun = time.monotonic()
        bench.look_until(range(2), context, [MISS, MISS])
        assert time.monotonic() - begun >= 0.29
        bench.end_step()
        assert bench.look(range(2), context) == [MISS, MISS], "asked for once"


def test_the_promotions_of_a_request_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it asks for in a later step has what is left of its time; after that nothing more is asked for."""
    tier, promote, given = FaultyTier(), CacheIndex.promote, []

    def noted(index: CacheIndex, *arguments: Any, deadline: float, **options: Any) -> Any:
        given.append(deadline)
        return promote(index, *arguments, deadline=deadline, **options)

    monkeypatch.setattr(CacheIndex, "promote", noted)
    with host(tier, seconds=1.0) as bench:
        context = bench.written(range(3))
        tier.hang_all()
        assert bench.look([0], context) == [PENDING]
        bench.end_step()
        time.sleep(0.1)
        assert bench.look([1], context) == [PENDING]
        bench.end_step()
        assert given[1] < given[0] - 0.05
        assert bench.look([2], context) == [PENDING]
        time.sleep(1.0)
        bench.end_step()
        bench.look_until(range(3), context, [MISS] * 3)
    assert len(given) == 2


def test_a_failing_tier_is_a_miss() -> None:
    tier = FaultyTier()
    with host(tier) as bench:
        bench.written(range(2))
        tier.fail_all()
        bench.look_until(range(2), bench.context(range(2)), [MISS, MISS])


def test_a_hit_is_held_until_the_step_has_ended() -> None:
    with host(DictTier(), capacity=4) as bench:
        bench.written(range(10, 14))
        bench.store(range(4))
        context = bench.context(range(4))
        assert bench.look(range(4), context) == [HIT] * 4
        with bench.index.promote(keys(*range(10, 14))) as promotion:  # as another request's, by the tiers' thread
            promotion.wait(SECONDS)
            assert bench.loaded(range(4), context)


def test_a_request_that_finishes_holds_nothing() -> None:
    with host(DictTier()) as bench:
        context = bench.written(range(3))
        bench.look_until(range(3), context, [HIT] * 3)
        bench.end_step()
        assert bench.index.statistics().pinned == 3
        bench.manager.on_request_finished(context)
        assert bench.index.statistics().pinned == 0


def test_what_is_not_loaded_is_held_until_the_deadline() -> None:
    with host(DictTier(), seconds=0.5) as bench:
        context = bench.written(range(3))
        bench.look(range(3), context)
        bench.end_step()
        until(lambda: bench.index.status(keys(*range(3))) == [Status.HIT] * 3)

        def released() -> bool:
            bench.end_step()
            return bench.index.statistics().pinned == 0

        until(released)


def test_a_reset_reaches_the_tiers() -> None:
    tier = DictTier()
    with host(tier) as bench:
        bench.written(range(3))
        bench.store([5])
        context = bench.context(range(3))
        bench.look(range(3), context)
        bench.manager.reset_cache()
        bench.manager.on_reset_flushed()
        assert not tier.store
        assert bench.look([0, 1, 2, 5], bench.context(range(3))) == [MISS] * 4


def test_tiers_that_cannot_be_reset_are_not_used_any_more() -> None:
    tier = FaultyTier()
    with host(tier) as bench:
        bench.written(range(3))
        tier.fail_all()
        bench.manager.reset_cache()
        bench.manager.on_reset_flushed()
        tier.heal()
        assert bench.look(range(3), bench.context(range(3))) == [MISS] * 3
        bench.store([4])
        assert bench.look([4], bench.context([4])) == [HIT]
        assert bench.manager.get_stats().reduce()["vllm:kvoffload_tier_usable:('faulty-memory',)"] == 0
        bench.manager.reset_cache()  # another one, for which no tier is asked
        bench.manager.on_reset_flushed()
        assert bench.look([4], bench.context([4])) == [MISS]
        bench.store([4])
        assert bench.look([4], bench.context([4])) == [HIT]


def test_a_load_that_failed_is_not_repeated_from_the_tier_for_ever() -> None:
    tier = DictTier()
    with host(tier) as bench:
        context = bench.written(range(2))
        bench.look_until(range(2), context, [HIT, HIT])
        spec = bench.manager.prepare_load(keys(*range(2)), context)
        bench.manager.note_failed(spec.block_ids.tolist())
        bench.manager.complete_load(keys(*range(2)), context)
        bench.end_step()
        assert len(tier.store) == 2, "its bytes are not at fault"
        assert bench.look(range(2), context) == [MISS, MISS]
        bench.manager.on_request_finished(context)
        bench.look_until(range(2), bench.context(range(2)), [HIT, HIT])


def test_events_and_statistics() -> None:
    with host(DictTier(), enable_events=True) as bench:
        bench.written(range(2))
        list(bench.manager.take_events())
        context = bench.context(range(2))
        bench.look_until(range(2), context, [HIT, HIT])
        found: list[Any] = []

        def told() -> bool:
            found.extend(bench.manager.take_events())
            return bool(found)

        until(told)
        assert [event.removed for event in found] == [False] * len(found)
        assert {key for event in found for key in event.keys} == set(keys(*range(2)))
        stats = bench.manager.get_stats()
        assert stats.reduce()["vllm:kvoffload_tier_promoted_chunks:('dict',)"] == 2
        assert stats.reduce()["vllm:kvoffload_tier_usable:('dict',)"] == 1
        assert "vllm:kvoffload_tier_promoted_chunks:('dict',)" not in bench.manager.get_stats().reduce()
        assert np.isfinite(bench.index.tier_statistics()[0].promoted)

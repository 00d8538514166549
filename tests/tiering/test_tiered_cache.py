"""BlockCache: what it promises about lookup, promotion and writing, on the simulated device."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import Gate
from tier_classes import DictTier, GatedTier, Rows
from tiering import SECONDS, Bench, key, keys, tiered, until

import kvoffload
from kvoffload import NO_WAIT, BlockCache, ClosedError, LayoutError, Tenant
from kvoffload.cache.tiering import BreakerState, Promotion
from kvoffload.cache.tiering.below import TierSpeed
from kvoffload.testing import FaultyTier
from kvoffload.tiers import DiskTier, Limits, MemoryTier, Origin, Outcome


def _is_ready(promotion: Promotion, count: int) -> bool:
    return promotion.ready == count


def pinned(bench: Bench) -> int:
    """Entries that promotions and loads hold, and no write."""
    assert bench.cache.drain(SECONDS)
    return bench.cache.statistics().pinned


def test_keys_come_back_from_a_tier_with_their_bytes() -> None:
    with tiered() as bench:
        bench.written(range(20))
        assert bench.cache.lookup(keys(range(4))) == 0
        with bench.cache.promote(keys(range(4))) as promotion:
            assert promotion.wait(SECONDS) == 4
            bench.check_loaded(range(4))
        assert bench.cache.statistics().promoted == 4


def test_drain_without_a_timeout_waits_for_as_long_as_writing_takes() -> None:
    with tiered() as bench:
        bench.store(range(4))
        assert bench.cache.drain()
        assert bench.cache.tier_statistics()[0].written == 4


def test_an_aborted_reservations_slots_wait_for_stores_that_may_write_them() -> None:
    """Else a tier's thread would fill them with a key, and a store that is still queued would overwrite its bytes."""
    with tiered(capacity=1) as bench:
        bench.written([0])
        bench.store([1])
        assert bench.cache.drain(SECONDS)
        stream = bench.device.stream()
        gate = Gate(bench.device)
        gate.hold(stream.handle)
        reservation = bench.cache.reserve([b"aborted"])
        bench.engine.store(bench.blocks([5]), reservation.slots(), after=stream)
        reservation.abort()
        with bench.cache.promote(keys([0]), deadline=0.05) as promotion:
            assert promotion.wait(SECONDS) == 0, "the slot is still written"
        gate.open()
        bench.engine.drain(SECONDS)
        with bench.cache.promote(keys([0])) as promotion:
            assert promotion.wait(SECONDS) == 1
            bench.check_loaded([0])
        gate.close()
        stream.close()


def test_locate_says_where_each_key_is() -> None:
    tiers = DictTier(), MemoryTier(1 << 20)
    with tiered(*tiers) as bench:
        bench.written([1, 2])
        tiers[0].store.pop(key(2))
        bench.store([0])
        reservation = bench.cache.reserve([b"reserved"])
        found = bench.cache.locate([*keys([0, 1, 2, 9]), b"reserved"])
        assert found == ["host", "dict", "memory", "missing", "pending"]
        reservation.abort()


def test_what_no_local_index_knows_is_unknown() -> None:
    tier = DictTier()
    tier.capabilities = kvoffload.tiers.TierCapabilities(durable=False, shared=False, local_index=False)
    with tiered(tier) as bench:
        bench.written([1])
        bench.store([2])
        assert bench.cache.locate(keys([1, 2, 3])) == ["unknown", "host", "unknown"]
        with bench.cache.promote(keys([1, 3])) as promotion:
            assert promotion.wait(SECONDS) == 1
            bench.check_loaded([1])


def test_ready_only_grows_and_counts_keys_that_can_be_loaded() -> None:
    tier = GatedTier()
    with tiered(tier) as bench:
        tier.permit()
        bench.written(range(4))
        tier.hold()
        seen = []
        with bench.cache.promote(keys(range(4)), deadline=None) as promotion:
            for number in range(4):
                assert not promotion.done
                tier.permit(1)
                until(partial(_is_ready, promotion, number + 1))
                seen.append(promotion.ready)
                bench.check_loaded(range(promotion.ready))
            assert promotion.wait(SECONDS) == 4
        assert seen == [1, 2, 3, 4]


def test_what_a_promotion_holds_is_not_evicted_and_what_it_has_released_is() -> None:
    with tiered() as bench:
        bench.written(range(4))
        promotion = bench.cache.promote(keys(range(4)))
        assert promotion.wait(SECONDS) == 4
        bench.store(range(10, 18))
        assert bench.cache.lookup(keys(range(10, 18))) == 4, "the other half of 8 entries"
        bench.check_loaded(range(4))
        promotion.release()
        promotion.release()
        assert pinned(bench) == 0
        bench.store(range(20, 28))
        assert bench.cache.lookup(keys(range(20, 28))) == 8
        with pytest.raises(ClosedError, match="released"):
            promotion.load([0, 1, 2, 3])


@pytest.mark.parametrize("waits", [True, False])
def test_a_promotion_that_is_garbage_holds_nothing(waits: bool) -> None:
    with tiered() as bench:
        bench.written(range(4))
        promotion = bench.cache.promote(keys(range(4)))
        if waits:
            promotion.wait(SECONDS)
        else:
            until(partial(_is_ready, promotion, 4))
        del promotion
        gc.collect()
        until(lambda: pinned(bench) == 0 and bench.cache.statistics().pending == 0)
        bench.store(range(20, 28))
        assert bench.cache.lookup(keys(range(20, 28))) == 8


def test_keys_in_slots_are_held_by_a_promotion() -> None:
    with tiered() as bench:
        bench.store([0, 1])
        with bench.cache.promote(keys([0, 1])) as promotion:
            assert promotion.wait(SECONDS) == 2
            assert pinned(bench) == 2
        assert pinned(bench) == 0


def test_two_promotions_of_one_prefix_fetch_it_once() -> None:
    tier = GatedTier()
    with tiered(tier) as bench:
        tier.permit()
        bench.written(range(3))
        begun = len(tier.begun)
        first, second = (bench.cache.promote(keys(range(3))) for _ in range(2))
        assert first.wait(SECONDS) == second.wait(SECONDS) == 3
        assert [kind for kind, _ in tier.begun[begun:]] == ["read"] * 3
        first.release()
        bench.store(range(10, 18))
        bench.check_loaded(range(3))
        second.release()


def test_a_promotion_asks_itself_for_what_another_one_gives_up() -> None:
    tier = GatedTier(threads=1)
    with tiered(tier) as bench:
        tier.permit()
        bench.written(range(2))
        tier.hold()
        first = bench.cache.promote(keys([0, 1]))
        until(lambda: bench.cache.statistics().pending == 2)
        second = bench.cache.promote(keys([1]))
        first.cancel()
        assert first.wait(SECONDS) == 0
        tier.permit()
        assert second.wait(SECONDS) == 1
        second.release()


def test_a_promotion_waits_for_keys_that_are_being_stored() -> None:
    with tiered() as bench:
        bench.written([1])
        stream = bench.device.stream()
        gate = Gate(bench.device)
        gate.hold(stream.handle)
        bench.cache.store(keys([0]), [0], after=stream)
        promotion = bench.cache.promote(keys([0, 1]))
        until(lambda: bench.cache.lookup(keys([1])) == 1)
        assert promotion.ready == 0
        assert not promotion.done
        gate.open()
        assert promotion.wait(SECONDS) == 2
        promotion.release()
        bench.engine.drain(SECONDS)
        gate.close()
        stream.close()


def test_a_promotion_does_not_wait_for_keys_behind_a_reservation_of_the_callers() -> None:
    tier = FaultyTier()
    with tiered(tier) as bench:
        bench.written([1])
        tier.hang_all()
        with bench.cache.reserve(keys([0])):
            assert bench.cache.promote(keys([0, 1]), deadline=None).wait(SECONDS) == 0
        tier.heal()


def test_promotions_occupy_half_of_the_entries_at_most() -> None:
    with tiered(capacity=8) as bench:
        bench.written(range(8))
        first = bench.cache.promote(keys(range(3)))
        assert first.wait(SECONDS) == 3
        second = bench.cache.promote(keys(range(3, 8)))
        assert second.wait(SECONDS) == 1
        assert pinned(bench) == 4
        first.release()
        third = bench.cache.promote(keys(range(4, 8)))
        assert third.wait(SECONDS) == 3


def test_writes_lease_a_quarter_of_the_entries_at_most_and_no_eviction_waits_for_a_tier() -> None:
    tier = FaultyTier(limits=Limits(threads=1))
    with tiered(tier, capacity=8) as bench:
        tier.hang_all()
        bench.store(range(8))
        until(lambda: tier.hung == 1)
        assert bench.cache.statistics().pinned == 2
        bench.store(range(10, 20))
        assert bench.cache.lookup(keys(range(10, 16))) == 6, "the other three quarters"
        assert not bench.cache.drain(0.05)
        tier.heal()
        assert bench.cache.drain(SECONDS)
        assert pinned(bench) == 0
        figures = bench.cache.tier_statistics()[0]
        assert figures.dropped > 0
        assert figures.written > 0


@pytest.mark.parametrize("deadline", [1e-9, 0.05, 1e6, 1e300, float("inf"), None])
def test_any_deadline_above_0_is_a_deadline(deadline: float | None) -> None:
    with tiered() as bench:
        bench.written([0])
        bench.cache.promote(keys([0, 5]), deadline=deadline).wait(SECONDS)
        assert bench.cache.promote(keys([0])).wait(SECONDS) == 1, "the thread has not ended"


def test_bad_arguments_are_refused_and_change_nothing() -> None:
    with tiered() as bench:
        bench.written([0])
        with pytest.raises(LayoutError):
            bench.cache.promote(keys([0, 0]))
        with pytest.raises(LayoutError):
            bench.cache.promote(key(0))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="tenant"):
            bench.cache.promote(keys([0]), tenant="nobody")
        promotion = bench.cache.promote(keys([0]))
        with pytest.raises(LayoutError):
            promotion.load([1, 2])
        with pytest.raises(LayoutError):
            promotion.load([9999])
        assert promotion.wait(SECONDS) == 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"tiers": [DictTier(), DictTier()]}, ValueError, "names of their own"),
        ({"hung": float("nan")}, ValueError, "hung must be"),
        ({"prefill_tokens_per_second": 0}, ValueError, "above 0"),
    ],
)
def test_bad_arguments_of_the_constructor(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with tiered() as bench:
        layout, device = bench.engine.layout, bench.device
        with kvoffload.OffloadEngine(layout, device=device, num_slots=2, staging_bytes=0) as engine:
            with pytest.raises(error, match=text):
                kvoffload.BlockCache(engine, **{"tiers": [DictTier()], **options})
            BlockCache(engine)


def test_a_promotion_is_not_waited_for_inside_a_call_of_a_tier() -> None:
    """The tier may hold a lock there that its threads need to bring the keys."""

    class Waiting(GatedTier):
        def contains(self, keys: Sequence[bytes]) -> list[bool]:
            if chained is not None and threading.current_thread() is threading.main_thread():
                for waitable in (promotion, chained):
                    with pytest.raises(RuntimeError, match=r"wait was called .* in the middle of another call"):
                        waitable.wait(SECONDS)
            return super().contains(keys)

    chained, tier = None, Waiting()
    with tiered(tier) as bench:
        tier.permit()
        bench.written([0])
        tier.hold()
        promotion = bench.cache.promote(keys([0]))
        chained = promotion.load([0], after=NO_WAIT)
        assert bench.cache.locate(keys([1])) == ["missing"]
        tier.permit()
        assert (promotion.wait(SECONDS), chained.wait(SECONDS)) == (1, (key(0),))


def test_a_chained_load_keeps_its_keys_although_the_promotion_is_released() -> None:
    """The load is queued behind the release: what has come is loaded, and nothing evicts it before."""
    with tiered() as bench:
        bench.written(range(4))
        for _ in range(20):
            with bench.cache.promote(keys(range(4))) as promotion:
                promotion.wait(SECONDS)
                chained = promotion.load(range(4), after=NO_WAIT)
            bench.cache.store(keys(range(10, 18)), [8] * 0 + list(range(8, 16)), after=NO_WAIT)
            assert chained.wait(SECONDS) == tuple(keys(range(4)))
            assert all(bench.holds(number, number) for number in range(4))
            bench.engine.drain(SECONDS)
            bench.cache.clear(below=False)
        del promotion
        assert pinned(bench) == 0, "although the chained load is kept"


def test_a_chained_load_without_keys_ends() -> None:
    with tiered() as bench:
        chained = bench.cache.promote(keys([1])).load([0])
        assert chained.wait(SECONDS) == ()
        assert chained.job is None


def test_events_and_statistics_of_promotions() -> None:
    events: list[kvoffload.CacheEvent] = []
    with tiered(on_event=events.append) as bench:
        bench.written([1, 2])
        events.clear()
        bench.cache.promote(keys([1, 2, 3])).wait(SECONDS)
        until(lambda: sum(len(each.keys) for each in events) == 5)
        *promoted, hit, miss = events
        assert {each.kind for each in promoted} == {"promoted"}
        assert sorted(each for event in promoted for each in event.keys) == keys([1, 2]), "the tier reads in any order"
        assert [(hit.kind, hit.keys), (miss.kind, miss.keys)] == [("hit", tuple(keys([1, 2]))), ("miss", (key(3),))]
        counts = bench.cache.statistics()
        assert (counts.promoted, counts.stored, counts.failed, counts.declined) == (2, 2, 0, 0)
        figures = bench.cache.tier_statistics()[0]
        assert (figures.promoted, figures.not_found, figures.written, figures.tier.read) == (2, 0, 2, 2)


def test_the_hook_is_called_without_locks() -> None:
    """Also by the thread of the tiers: another thread can use the cache meanwhile."""
    done: list[str] = []

    def hook(event: kvoffload.CacheEvent) -> None:
        if event.kind in ("promoted", "stored"):
            other = threading.Thread(target=lambda: bench.cache.remove([b"another"]))
            other.start()
            other.join(SECONDS)
            done.append("hung" if other.is_alive() else event.kind)

    with tiered(on_event=hook) as bench:
        bench.written([1])
        assert bench.cache.promote(keys([1])).wait(SECONDS) == 1
        until(lambda: len(done) == 2)
        assert done == ["stored", "promoted"]


def test_a_hook_may_use_the_cache() -> None:
    def hook(event: kvoffload.CacheEvent) -> None:
        if event.kind == "promoted":
            found.append(bench.cache.remove(event.keys))

    found: list[int] = []
    tier = DictTier()
    with tiered(tier, on_event=hook) as bench:
        bench.written([1])
        bench.cache.promote(keys([1])).wait(SECONDS)
        until(lambda: found)
        assert found == [1]
        assert tier.store == {}


def test_keys_that_no_tier_takes_are_misses_and_open_no_breaker() -> None:
    long = [b"x" * 65, b"y" * 200]
    with tiered() as bench:
        for _ in range(8):
            bench.cache.store(long, [0, 1], after=NO_WAIT).wait(SECONDS)
            assert bench.cache.drain(SECONDS)
            assert bench.cache.remove(long) == 2
            assert bench.cache.promote(long).wait(SECONDS) == 0
        assert bench.cache.locate(long) == ["missing"] * 2
        assert bench.cache.tier_statistics()[0].opened == 0


def test_what_a_tier_has_is_not_written_again() -> None:
    tier = DictTier()
    with tiered(tier) as bench:
        bench.written([1])
        bench.cache.promote(keys([1])).wait(SECONDS)
        bench.store([1, 2])
        assert bench.cache.drain(SECONDS)
        assert bench.cache.tier_statistics()[0].written == 2


def test_a_key_stored_again_is_written_for_its_new_tenant() -> None:
    written: list[tuple[bytes, str]] = []

    class Noting(DictTier):
        def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:
            written.append((key, origin.tenant))
            return super().write_record(key, rows, origin)

    tier = Noting()
    with tiered(tier, tenants={"guest": Tenant()}) as bench:
        for tenant in ("guest", ""):
            bench.cache.store(keys([0]), [0], after=NO_WAIT, tenant=tenant).wait(SECONDS)
            assert bench.cache.drain(SECONDS)
            bench.cache.remove(keys([0]))
        assert written == [(key(0), "guest"), (key(0), "")]


@pytest.mark.parametrize(("seconds_per_key", "asked"), [(0.1, False), (0.15, True)])
def test_a_tier_is_asked_for_what_takes_longer_to_compute(
    seconds_per_key: float, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TierSpeed, "expected", lambda *_: 0.1)
    with tiered(prefill_tokens_per_second=4 / seconds_per_key) as bench:
        bench.written([0])
        assert bench.cache.promote(keys([0])).wait(SECONDS) == asked


def test_a_slow_tier_is_not_asked() -> None:
    with tiered(prefill_tokens_per_second=1e12) as bench:
        bench.written([1])
        assert bench.cache.promote(keys([1])).wait(SECONDS) == 1, "nothing is known of its speed"
        bench.cache.clear(below=False)
        assert bench.cache.promote(keys([1])).wait(SECONDS) == 0
        assert bench.cache.tier_statistics()[0].slower == 1
    with tiered(prefill_tokens_per_second=1e-3) as bench:
        bench.written([1])
        for _ in range(3):
            assert bench.cache.promote(keys([1])).wait(SECONDS) == 1
            bench.cache.clear(below=False)


def test_several_devices(tmp_path: Any) -> None:
    from sharding import Machine

    machine = Machine((3, 2), num_slots=8)
    tier = DiskTier(tmp_path / "disk", nbytes=1 << 20, identity="test")
    with kvoffload.BlockCache(machine.engine, policy="lru", tiers=[tier], write="through") as cache:
        pools = [pool.copy() for pool in machine.engine.slots]
        cache.store(keys([0, 1]), [0, 1], after=NO_WAIT).wait(SECONDS)
        stored = [pool[:2].copy() for pool in machine.engine.slots]
        assert cache.drain(SECONDS)
        cache.clear(below=False)
        for pool in machine.engine.slots:
            pool[:] = 0xEE
        with cache.promote(keys([1, 0])) as promotion:
            assert promotion.wait(SECONDS) == 2
            lease = cache.acquire(keys([0, 1]))
            for pool, wanted, before in zip(machine.engine.slots, stored, pools, strict=True):
                assert np.array_equal(pool[list(lease.indices)], wanted)
                assert not np.array_equal(wanted, before[:2])
            lease.release()
    machine.close()


def test_records_of_a_disk_come_back_in_the_next_process(tmp_path: Any) -> None:
    def disk() -> DiskTier:
        return DiskTier(tmp_path / "disk", nbytes=1 << 20, identity="test")

    with tiered(disk()) as bench:
        bench.written(range(6))
    with tiered(disk()) as bench:
        assert bench.cache.locate(keys([0, 5, 6])) == ["disk", "disk", "missing"]
        with bench.cache.promote(keys([5, 0])) as promotion:
            assert promotion.wait(SECONDS) == 2
            bench.check_loaded([5, 0])
        bench.cache.remove(keys([5]))
    with tiered(disk()) as bench:
        assert bench.cache.locate(keys([0, 5])) == ["disk", "missing"]
        bench.cache.clear()
    with tiered(disk()) as bench:
        assert bench.cache.locate(keys(range(6))) == ["missing"] * 6


def test_the_text_of_a_cache_and_a_promotion() -> None:
    with tiered() as bench:
        bench.written([1])
        promotion = bench.cache.promote(keys([1, 2]))
        promotion.wait(SECONDS)
        assert repr(promotion) == "Promotion(1 of 2 keys ready, done)"
        assert repr(bench.cache).startswith("BlockCache(1 of 8 keys, ")
        assert repr(bench.cache).endswith("tiers ['dict'])")
        assert bench.cache.tier_statistics()[0].state is BreakerState.CLOSED

"""Tiers that fail, raise or hang: misses, breakers, and entries that stay kept."""

from __future__ import annotations

import dataclasses
import gc
import threading
from functools import partial
from typing import Any

import pytest
from tier_classes import DictTier, GatedTier, Rows
from tiering import SECONDS, Bench, RaisingTier, key, keys, tiered, until

import kvoffload
from kvoffload import NO_WAIT, BlockCache, CapacityError, TierError, TransferError
from kvoffload.cache.entries import LeaseRecord
from kvoffload.cache.state import CacheState
from kvoffload.cache.tiering.below import BreakerState
from kvoffload.testing import FaultyTier, TierFaults
from kvoffload.tiers import Limits, Origin, Outcome, TierJob, TierStatistics

METHODS = ("put", "get", "exists", "contains", "statistics", "drain", "close", "remove", "clear")


def _has_begun(tier: GatedTier, before: int) -> bool:
    return len(tier.begun) > before


def _has_queued(tier: GatedTier, writes: int) -> bool:
    return tier.statistics().queued_writes == writes and tier.statistics().in_calls == 1


def settled(bench: Bench) -> None:
    """The thread of the tiers has looked at everything so far."""
    bench.cache.promote([]).wait(SECONDS)


@pytest.mark.parametrize("error", [OSError, KeyError, MemoryError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("method", [*METHODS[:5], "all"])
def test_a_tier_that_raises_is_a_miss(method: str, error: type[BaseException]) -> None:
    raising = set(METHODS) if method == "all" else {method}
    if not issubclass(error, Exception):
        raising -= {"contains", "statistics", "drain", "close", "remove", "clear"}  # in the caller's thread
    tier, other = RaisingTier(raising, error), DictTier()
    with tiered(tier, other) as bench:
        for first in (0, 10, 20):
            there = range(first, first + 4)
            bench.store(there)
            bench.cache.touch(keys(there))
            assert bench.cache.lookup(keys(there)) == 4
            bench.cache.locate(keys(range(first, first + 6)))
            assert bench.cache.promote(keys(range(first, first + 6))).wait(SECONDS) == 4
            bench.check_loaded(there)
            bench.cache.tier_statistics()
            assert bench.cache.drain(SECONDS) is ("drain" not in raising)
            bench.cache.clear(below=False)
            bench.cache.promote(keys(there)).wait(SECONDS)
        settled(bench)
        assert bench.cache.statistics().pending == 0
        assert (bench.cache.tier_statistics()[0].opened == 1) == (method in ("get", "all"))
        tier.raising = raising - {"close"}


@pytest.mark.parametrize(
    "wrong", [None, 3, "job", kvoffload.tiers.TierJob([b"another"]), kvoffload.tiers.TierJob([], [])], ids=repr
)
def test_a_tier_that_returns_something_else_is_a_miss(wrong: Any) -> None:
    class Wrong(RaisingTier):
        def get(self, keys: Any, entries: Any, **options: Any) -> Any:  # noqa: ARG002
            return wrong

        put = get

        def contains(self, keys: Any) -> Any:  # noqa: ARG002
            return [True]

        def statistics(self) -> Any:
            return wrong

    with tiered(Wrong(set())) as bench:
        bench.store(range(2))
        assert bench.cache.drain(SECONDS)
        bench.cache.clear(below=False)
        assert bench.cache.promote(keys([0])).wait(SECONDS) == 0
        assert bench.cache.promote(keys([0, 1])).wait(SECONDS) == 0
        assert bench.cache.statistics().pending == 0
        assert bench.cache.locate(keys([0, 1])) == ["missing"] * 2
        bench.cache.tier_statistics()


def test_a_tier_that_cannot_be_attached_closes_those_before() -> None:
    first = DictTier()
    with tiered() as bench:
        layout, device = bench.engine.layout, bench.device
        with kvoffload.OffloadEngine(layout, device=device, num_slots=2, staging_bytes=0) as engine:
            with pytest.raises(OSError, match="broken"):
                BlockCache(engine, tiers=[first, RaisingTier({"attach"})])
            assert first.released == 1
            BlockCache(engine)


def test_questions_that_give_a_tier_no_job_use_up_no_try() -> None:
    tier = FaultyTier()
    with tiered(tier) as bench:
        bench.written([1])
        tier.fail_all()
        for _ in range(5):
            bench.cache.promote(keys([1])).wait(SECONDS)
        tier.heal()
        assert bench.cache.tier_statistics()[0].opened == 1
        assert bench.cache.statistics().failed == 0, "a promotion is no store"

        def comes_back() -> bool:
            assert bench.cache.promote(keys([99])).wait(SECONDS) == 0
            return bench.cache.promote(keys([1])).wait(SECONDS) == 1

        until(comes_back)


def test_cancelling_says_nothing_of_a_tier() -> None:
    tier = GatedTier(threads=1)
    with tiered(tier) as bench:
        tier.permit()
        bench.written(range(4))
        tier.hold()
        for _ in range(20):
            begun = len(tier.begun)
            promotion = bench.cache.promote(keys([0]))
            until(partial(_has_begun, tier, begun))
            promotion.cancel()
            assert promotion.wait(SECONDS) == 0
            tier.permit(1)
            until(lambda: tier.statistics().in_calls == 0)
        figures = bench.cache.tier_statistics()[0]
        assert (figures.state, figures.opened) == (BreakerState.CLOSED, 0)


def test_a_tier_is_not_asked_while_a_call_goes_on_that_was_given_up() -> None:
    """So a disk that hangs costs one deadline, and not one of each request until the call counts as hung."""
    tier = FaultyTier(limits=Limits(threads=8))
    with tiered(tier, capacity=32) as bench:
        bench.written(range(8))
        tier.hang_all()
        promotion = bench.cache.promote(keys([0]), deadline=0.5)
        until(lambda: tier.hung == 1)
        assert promotion.wait(SECONDS) == 0
        assert bench.cache.tier_statistics()[0].opened == 0
        for number in range(1, 5):
            assert bench.cache.promote(keys([number]), deadline=None).wait(SECONDS) == 0
        figures = bench.cache.tier_statistics()[0]
        assert (figures.state, figures.opened, tier.hung) == (BreakerState.OPEN, 1, 1)
        tier.heal()
        until(lambda: bench.cache.promote(keys([1])).wait(SECONDS) == 1)


def test_a_late_promotion_that_no_thread_began_with_leaves_the_tier_alone_too() -> None:
    """All threads of the tier hang in writes, so that reads wait behind them."""
    tier = FaultyTier(limits=Limits(threads=1))
    with tiered(tier, capacity=32) as bench:
        bench.written(range(2))
        tier.hang_all()
        bench.store([10])
        until(lambda: tier.hung == 1)
        assert bench.cache.promote(keys([0]), deadline=0.02).wait(SECONDS) == 0
        assert bench.cache.promote(keys([1]), deadline=None).wait(SECONDS) == 0
        done = tier.statistics()
        assert done.expired + done.cancelled == 1, "the second was not given to it"
        tier.heal()
        until(lambda: bench.cache.promote(keys([1])).wait(SECONDS) == 1)


def test_records_with_other_bytes_than_were_put_open_a_breaker() -> None:
    tier = FaultyTier(TierFaults(tear=1.0))
    with tiered(tier) as bench:
        bench.written(range(8))
        tier.heal()
        for number in range(5):  # one by one: keys behind one that does not come may be cancelled
            assert bench.cache.tier_statistics()[0].opened == 0
            assert bench.cache.promote(keys([number])).wait(SECONDS) == 0
        figures = bench.cache.tier_statistics()[0]
        assert (figures.state, figures.opened) == (BreakerState.OPEN, 1)
        assert tier.statistics().corrupt >= 5


def test_a_record_that_is_not_there_ends_a_row_of_failures() -> None:
    """Five in a row would open the breaker."""
    answers: list[Outcome] = []

    class Answering(DictTier):
        def read_record(self, key: bytes, rows: Rows) -> Outcome:  # noqa: ARG002
            return answers.pop(0)

    tier = Answering()
    tier.capabilities = dataclasses.replace(tier.capabilities, local_index=False)
    with tiered(tier) as bench:
        for _ in range(3):
            answers += [*[Outcome.FAILED] * 4, Outcome.MISSING]
            for number in range(5):
                assert bench.cache.promote(keys([number])).wait(SECONDS) == 0
        assert answers == [], "it was asked each time"
        assert bench.cache.tier_statistics()[0].opened == 0


class Refusing(DictTier):
    """A store that refuses all puts while `refuses` is set, as for a login without the right to write."""

    refuses = False

    def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:
        return Outcome.FAILED if self.refuses else super().write_record(key, rows, origin)


def test_a_store_that_refuses_puts_is_read_and_written_again_when_it_takes_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = Refusing()
    with tiered(tier, write="through") as bench:
        bench.written(range(4))
        tier.refuses = True
        for first in range(10, 50, 4):
            bench.store(range(first, first + 4))
            bench.cache.drain(SECONDS)
            bench.cache.clear(below=False)
            assert bench.cache.promote(keys(range(4))).wait(SECONDS) == 4
            bench.check_loaded(range(4))
            bench.cache.clear(below=False)
        figures = bench.cache.tier_statistics()[0]
        assert (figures.state, figures.puts) == (BreakerState.CLOSED, BreakerState.OPEN)
        assert figures.promoted == 40
        assert 5 <= figures.not_written < 40
        assert "tier dict takes no puts; it is only read for a while" in caplog.text
        bench.store(range(50, 54))  # while the breaker is open
        tier.refuses = False

        numbers = iter(range(60, 100_000))

        def all_written() -> bool:
            bench.cache.touch(keys(range(50, 54)))  # they stay in slots
            bench.store([next(numbers)])  # this is the try
            settled(bench)
            return all(tier.contains(keys(range(50, 54))))

        until(all_written)
        until(lambda: bench.cache.tier_statistics()[0].puts is BreakerState.CLOSED)


def test_puts_that_wait_give_their_slots_back_when_puts_are_refused() -> None:
    class Slow(GatedTier):
        def write_record(self, key: bytes, rows: Rows, origin: Origin) -> Outcome:
            super().write_record(key, rows, origin)
            return Outcome.FAILED

    tier = Slow(threads=1)
    with tiered(tier, capacity=64) as bench:
        for number in range(13):  # a job each
            bench.store([number])
            until(partial(_has_queued, tier, number))
        tier.permit(5)
        until(lambda: bench.cache.tier_statistics()[0].puts is BreakerState.OPEN)
        until(lambda: tier.statistics().queued_writes == 0)
        assert tier.statistics().cancelled >= 7
        tier.permit()
        until(lambda: bench.manager._writer.leased == 0)


def test_a_put_that_fails_as_the_try_leaves_the_next_try_to_a_promotion() -> None:
    """The tier failed, and comes back read-only: its puts fail, and do not keep it from being read."""
    tier = FaultyTier()
    with tiered(tier, write="through") as bench:
        bench.written(range(4))
        tier.fail_all()
        while bench.cache.tier_statistics()[0].state is not BreakerState.OPEN:
            bench.cache.promote(keys(range(4))).wait(SECONDS)
        tier.heal()
        tier.write_record = lambda *_: Outcome.FAILED  # type: ignore[method-assign]
        numbers = iter(range(8, 100_000))

        def refused() -> bool:
            bench.store([next(numbers)])
            settled(bench)
            return bench.cache.tier_statistics()[0].not_written > 0

        until(refused)
        until(lambda: bench.cache.promote(keys(range(4))).wait(SECONDS) == 4)
        assert bench.cache.tier_statistics()[0].state is BreakerState.CLOSED


def test_what_waits_to_be_written_gives_its_slots_back_when_a_breaker_opens() -> None:
    tier = FaultyTier(limits=Limits(threads=1))
    with tiered(tier, capacity=64) as bench:
        bench.written([0])
        tier.hang_all()
        bench.store(range(8, 16))
        until(lambda: tier.hung == 1)
        assert tier.statistics().queued_writes == 7
        assert bench.cache.promote(keys([0]), deadline=0.02).wait(SECONDS) == 0
        assert bench.cache.promote(keys([0]), deadline=None).wait(SECONDS) == 0
        until(lambda: tier.statistics().queued_writes == 0)


def test_keys_of_a_job_that_tries_a_tier_are_not_given_up() -> None:
    tier = FaultyTier(limits=Limits(threads=1))
    with tiered(tier, capacity=64) as bench:
        bench.written([0])
        tier.hang_all()
        while bench.cache.tier_statistics()[0].state is not BreakerState.OPEN:
            bench.cache.promote(keys([0]), deadline=0.02).wait(SECONDS)
        tier.heal()
        until(lambda: tier.statistics().in_calls == 0)
        tier.hang_all()
        stored = iter(range(8, 10_000, 4))

        def tried() -> bool:
            first = next(stored)
            bench.store(range(first, first + 4))
            settled(bench)
            return bench.cache.tier_statistics()[0].state is BreakerState.TRYING

        until(tried)
        until(lambda: tier.hung == 1)
        waiting = tier.statistics().queued_writes
        settled(bench)
        settled(bench)
        assert tier.statistics().queued_writes == waiting >= 3
        tier.heal()
        assert bench.cache.drain(SECONDS)
        assert bench.cache.tier_statistics()[0].not_written == 0


@pytest.mark.parametrize("fault", ["fail_all", "hang_all"])
def test_requests_leave_a_tier_alone_that_is_not_used_and_it_gets_what_they_stored_later(fault: str) -> None:
    tier = FaultyTier(limits=Limits(threads=1))
    with tiered(tier, capacity=64, write="through") as bench:
        bench.written([0])
        getattr(tier, fault)()
        while bench.cache.tier_statistics()[0].state is not BreakerState.OPEN:
            bench.cache.promote(keys([0]), deadline=0.02).wait(SECONDS)
        with bench.manager._lock:  # the thread does not look
            bench.store(range(16, 24))
            bench.cache.touch(keys(range(16, 24)))
            assert not bench.manager._messages
        tier.heal()

        def all_written() -> bool:
            bench.cache.promote(keys([0]), deadline=1.0).wait(SECONDS)
            return all(tier.contains(keys(range(16, 24))))

        until(all_written)


def test_a_promotion_that_no_tier_can_lengthen_ends_at_once() -> None:
    """Without the thread of the tiers, whose lock the test holds."""
    tier = FaultyTier()
    with tiered(tier, capacity=16) as bench:
        bench.written(range(4))
        bench.store(range(8, 12))
        assert bench.cache.drain(SECONDS)
        with bench.manager._lock:
            promotion = bench.cache.promote(keys([8, 9, 99, 10]))
            assert (promotion.done, promotion.ready) == (True, 2)
            assert not bench.cache.promote(keys([8, 0])).done, "the tier has the second"
            bench.store(range(20, 36))
            kept = bench.cache.status(keys([8, 9, 10, 11]))
            assert [status is kvoffload.Status.HIT for status in kept] == [True, True, True, False]
        promotion.release()


def test_one_late_promotion_of_many_keys_opens_no_breaker() -> None:
    tier = FaultyTier(limits=Limits(threads=8))
    with tiered(tier, capacity=32) as bench:
        bench.written(range(8))
        tier.hang_all()
        assert bench.cache.promote(keys(range(8)), deadline=0.05).wait(SECONDS) == 0
        assert bench.cache.tier_statistics()[0].opened == 0


def test_a_call_that_hangs_turns_a_tier_off_until_it_returns() -> None:
    tier = FaultyTier()
    with tiered(tier, hung=0.05) as bench:
        bench.written(range(3))
        tier.hang_all()
        promotion = bench.cache.promote(keys([0]), deadline=None)
        assert promotion.wait(SECONDS) == 0, "also without a deadline"
        assert bench.cache.promote(keys([1]), deadline=None).wait(SECONDS) == 0
        assert bench.cache.tier_statistics()[0].state is BreakerState.OPEN
        tier.heal()
        until(lambda: bench.cache.promote(keys([1])).wait(SECONDS) == 1)


def test_entries_of_keys_given_up_stay_kept_until_the_call_returns() -> None:
    """The late read fills its entry with the record's bytes: they may not appear under another key."""
    tier = FaultyTier()
    with tiered(tier, capacity=4) as bench:
        bench.written(range(4))
        tier.hang_all()
        promotion = bench.cache.promote(keys([0]))
        until(lambda: tier.hung)
        promotion.cancel()
        assert promotion.wait(SECONDS) == 0
        assert bench.cache.status(keys([0]))[0] is kvoffload.Status.MISS
        bench.store(range(10, 14))
        assert bench.cache.lookup(keys(range(10, 14))) == 3, "one of four entries is kept"
        bench.check_loaded(range(10, 13))
        for pool in [bench.engine.slots]:
            before = pool.copy()
        tier.heal()
        until(lambda: tier.hung == 0 and tier.statistics().in_calls == 0)
        assert (before != bench.engine.slots).any(), "the late read has written somewhere"
        bench.check_loaded(range(10, 13))

        def all_are_stored() -> bool:
            bench.store(range(20, 24))
            return bench.cache.lookup(keys(range(20, 24))) == 4

        until(all_are_stored)  # the entry is free again
        bench.check_loaded(range(20, 24))


def test_entries_of_keys_given_up_count_among_those_that_promotions_may_occupy() -> None:
    """Four of eight: until the calls of the first tier return, no promotion gets another one."""
    late, good = FaultyTier(limits=Limits(threads=4)), DictTier()
    with tiered(late, good, capacity=8) as bench:
        bench.written(range(8))
        late.inner.remove_records(keys(range(4, 8)))
        good.remove_records(keys(range(4)))
        late.hang_all()
        promotion = bench.cache.promote(keys(range(4)))
        until(lambda: late.hung == 4)
        promotion.cancel()
        assert promotion.wait(SECONDS) == 0
        assert bench.cache.promote(keys(range(4, 8))).wait(SECONDS) == 0
        late.heal()
        until(lambda: bench.cache.promote(keys(range(4, 8))).wait(SECONDS) == 4)


def test_a_promotion_that_waits_for_another_one_ends_at_its_own_deadline() -> None:
    tier = FaultyTier()
    with tiered(tier) as bench:
        bench.written(range(4))
        tier.hang_all()
        first = bench.cache.promote(keys(range(4)), deadline=None)
        until(lambda: tier.hung)
        assert bench.cache.promote(keys(range(4)), deadline=0.05).wait(5) == 0
        assert not first.done
        tier.heal()
        assert first.wait(SECONDS) == 4


def test_no_call_comes_between_the_hit_and_the_lease_of_what_a_tier_has_brought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store of another thread could evict the key there."""
    begin, others, between = CacheState.begin, list[threading.Thread](), list[bool]()
    with tiered(capacity=4) as bench:
        bench.written([0])

        def beginning(state: CacheState, lease: LeaseRecord) -> None:
            if threading.current_thread().name == "kvoffload-tiers":
                others.append(threading.Thread(target=bench.cache.touch, args=(keys([0]),)))
                others[-1].start()
                others[-1].join(0.1)
                between.append(not others[-1].is_alive())
            begin(state, lease)

        monkeypatch.setattr(CacheState, "begin", beginning)
        assert bench.cache.promote(keys([0])).wait(SECONDS) == 1
        monkeypatch.undo()
        others[0].join(SECONDS)
        assert between == [False]
        bench.check_loaded([0])


def test_another_cache_is_refused_while_a_late_call_may_write() -> None:
    tier = FaultyTier()
    with tiered() as bench:
        layout, device = bench.engine.layout, bench.device
        with kvoffload.OffloadEngine(layout, device=device, num_slots=4, staging_bytes=0) as engine:
            cache = BlockCache(engine, policy="lru", tiers=[tier], write="through")
            cache.store(keys([0]), [0], after=NO_WAIT).wait(SECONDS)
            assert cache.drain(SECONDS)
            cache.clear(below=False)
            tier.hang_all()
            assert cache.promote(keys([0]), deadline=0.02).wait(SECONDS) == 0
            assert not cache.close(0.05)
            del cache
            for _ in range(3):
                gc.collect()
                with pytest.raises(CapacityError, match="belong to another"):
                    BlockCache(engine)
            tier.heal()

            def free() -> bool:
                gc.collect()
                try:
                    BlockCache(engine)
                except CapacityError:
                    return False
                return True

            until(free, "the end of the late call")


@pytest.mark.parametrize("call", ["remove", "clear"])
def test_a_tier_that_fails_to_remove_is_said(call: str) -> None:
    tier, other = FaultyTier(), DictTier()
    with tiered(tier, other) as bench:
        bench.written(range(3))
        bench.store(range(3))
        tier.fail_all()
        with pytest.raises(TierError, match="faulty-memory failed to remove"):
            bench.cache.remove(keys([1])) if call == "remove" else bench.cache.clear()
        assert bench.cache.lookup(keys([1])) == 0
        assert key(1) not in other.store
        tier.heal()
        bench.cache.remove(keys([1])) if call == "remove" else bench.cache.clear()
        assert bench.cache.locate(keys([1])) == ["missing"]


def test_user_tiers_that_raise_in_remove_and_clear() -> None:
    with tiered(RaisingTier({"remove", "clear"})) as bench:
        with pytest.raises(TierError, match="raising"):
            bench.cache.remove(keys([1]))
        with pytest.raises(TierError, match="raising"):
            bench.cache.clear()
        bench.cache.remove([b"x" * 65])  # that no tier has


@pytest.mark.parametrize("call", ["remove", "clear"])
def test_a_tier_that_does_not_say_whether_it_has_removed_is_said(call: str) -> None:
    class Silent(TierJob):
        def wait(self, timeout: float | None = None) -> list[Outcome]:
            raise TimeoutError(timeout)

    tier = RaisingTier(set())
    tier.remove = tier.clear = lambda *_, **__: Silent([key(1)])  # type: ignore[assignment]
    with (
        tiered(tier) as bench,
        pytest.raises(TierError, match="tier raising failed to remove the keys, or did not answer"),
    ):
        bench.cache.remove(keys([1])) if call == "remove" else bench.cache.clear()


def test_promoted_while_all_is_removed_stays_removed() -> None:
    """The tier can still read its records when the promotion asks for them."""
    begun, permitted = threading.Event(), threading.Event()

    class Clearing(DictTier):
        def remove_all(self) -> None:
            begun.set()
            assert permitted.wait(SECONDS)
            super().remove_all()

    with tiered(Clearing()) as bench:
        bench.written(range(3))
        clearing = threading.Thread(target=bench.cache.clear)
        clearing.start()
        assert begun.wait(SECONDS)
        promotion = bench.cache.promote(keys(range(3)), deadline=None)
        try:
            assert promotion.wait(SECONDS) == 0
        finally:
            permitted.set()
            clearing.join(SECONDS)
        assert bench.cache.lookup(keys(range(3))) == 0


def test_removed_during_a_promotion_stays_removed() -> None:
    tier = GatedTier(threads=2)
    with tiered(tier) as bench:
        tier.permit()
        bench.written(range(3))
        tier.hold()
        promotion = bench.cache.promote(keys(range(3)))
        until(lambda: tier.begun.count(("read", key(1))) == 1)
        remover = threading.Thread(target=lambda: bench.cache.remove(keys([1])))
        remover.start()
        until(lambda: bench.cache.status(keys([1]))[0] is kvoffload.Status.MISS)
        tier.permit()
        remover.join(SECONDS)
        assert promotion.wait(SECONDS) == 1
        assert bench.cache.locate(keys(range(3)))[1] == "missing"
        assert key(1) not in tier.store
        promotion.release()


def test_removed_during_a_write_stays_removed() -> None:
    tier = GatedTier(threads=1)
    with tiered(tier) as bench:
        bench.store(range(3))
        until(lambda: tier.begun)
        remover = threading.Thread(target=lambda: bench.cache.remove(keys(range(3))))
        remover.start()
        until(lambda: bench.cache.lookup(keys([0])) == 0)
        tier.permit()
        remover.join(SECONDS)
        assert bench.cache.drain(SECONDS)
        assert tier.store == {}
        assert bench.cache.locate(keys(range(3))) == ["missing"] * 3


def test_removing_nothing_forgets_no_write() -> None:
    tier = GatedTier(threads=1)
    with tiered(tier) as bench:
        bench.store(range(8))
        until(lambda: tier.begun)
        assert bench.cache.remove([]) == 0
        tier.permit()
        assert bench.cache.drain(SECONDS)
        assert len(tier.store) == 8


def test_a_store_that_has_failed_is_not_written() -> None:
    """What is in its slot is another request's."""
    tier = DictTier()
    with tiered(tier) as bench:
        bench.written([0])
        simulator: Any = bench.device.simulator
        simulator.faults.fail_operation()
        with pytest.raises(TransferError):
            bench.cache.store(keys([1]), [1], after=NO_WAIT).wait(SECONDS)
        assert bench.cache.promote(keys([0, 1])).wait(SECONDS) == 1
        assert sorted(tier.store) == keys([0])


def test_the_thread_survives_what_is_no_exception(caplog: pytest.LogCaptureFixture) -> None:
    class Ending(DictTier):
        ends = False

        def statistics(self) -> TierStatistics:
            if self.ends and threading.current_thread().name == "kvoffload-tiers":
                raise SystemExit
            return super().statistics()

    tier = Ending()
    with tiered(tier) as bench:
        bench.written([1])
        tier.ends = True
        assert bench.cache.promote(keys([1])).wait(SECONDS) == 0
        assert "an error; it goes on" in caplog.text
        tier.ends = False
        assert bench.cache.promote(keys([1])).wait(SECONDS) == 1


def test_no_call_waits_for_a_tier_that_hangs() -> None:
    tier = FaultyTier()
    with tiered(tier, capacity=8) as bench:
        bench.written(range(8))
        bench.store(range(8, 12))
        assert bench.cache.drain(SECONDS)
        tier.hang_all()
        promotion = bench.cache.promote(keys(range(4)), deadline=None)
        until(lambda: tier.hung)
        bench.store(range(20, 24))
        bench.cache.touch(keys(range(20)))
        assert bench.cache.lookup(keys([8])) in (0, 1)
        bench.cache.locate(keys(range(20)))
        bench.cache.tier_statistics()
        bench.check_loaded(range(20, 24))
        assert not promotion.done


def test_a_lease_that_was_dropped_waits_for_no_tier() -> None:
    """Tiers write entries of promotions alone."""
    tier = FaultyTier()
    with tiered(tier) as bench:
        bench.written([0])
        bench.store([1])
        assert bench.cache.drain(SECONDS)
        tier.hang_all()
        promotion = bench.cache.promote(keys([0]), deadline=None)
        until(lambda: tier.hung)
        lease = bench.cache.acquire(keys([1]))
        assert bench.cache.statistics().pinned == 1
        del lease
        gc.collect()
        assert bench.cache.statistics().pinned == 0
        assert not promotion.done

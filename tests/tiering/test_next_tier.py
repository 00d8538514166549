"""Keys that one tier does not bring are asked of the next: in order, in time, and into entries that are free."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tier_classes import DictTier, Rows
from tiering import SECONDS, Bench, key, keys, tiered, until

import kvoffload
from kvoffload.cache.tiering.below import BreakerState
from kvoffload.testing import FaultyTier
from kvoffload.tiers import DiskTier, Limits, Outcome, TierCapabilities


class Store(DictTier):
    """As a distributed store: only asking says what it has. `asked`: keys that were read, in order."""

    def __init__(self, name: str = "store", *, local_index: bool = False) -> None:
        super().__init__(threads=1)
        self.name = name
        self.capabilities = TierCapabilities(durable=False, shared=False, local_index=local_index)
        self.asked: list[bytes] = []

    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        self.asked.append(key)
        return super().read_record(key, rows)


class Answering(Store):
    """Answers every read with one outcome; says that it has every key, unless `claims` is False."""

    def __init__(self, outcome: Outcome, name: str = "answering") -> None:
        super().__init__(name, local_index=True)
        self.outcome = outcome
        self.claims = True

    def has_record(self, key: bytes) -> bool:  # noqa: ARG002
        return self.claims

    def read_record(self, key: bytes, rows: Rows) -> Outcome:
        self.asked.append(key)
        for row in rows:
            row[:] = 0xEE
        return self.outcome


def promoted(bench: Bench, numbers: Sequence[int], **options: Any) -> int:
    """Promote, compare what has come, and release."""
    with bench.cache.promote(keys(numbers), **options) as promotion:
        ready = promotion.wait(SECONDS)
        bench.check_loaded(numbers[:ready])
    return ready


@pytest.mark.parametrize("local_index", [True, False])
@pytest.mark.parametrize("outcome", [each for each in Outcome if each is not Outcome.DONE])
def test_the_next_tier_is_asked_whatever_the_outcome(outcome: Outcome, local_index: bool) -> None:
    first, second = Answering(outcome), Store(local_index=local_index)
    with tiered(first, second) as bench:
        first.claims = False
        bench.written(range(4))
        first.claims = True
        assert promoted(bench, range(4)) == 4
        assert second.asked == keys(range(4))
        assert [each.promoted for each in bench.cache.tier_statistics()] == [0, 4]
        assert bench.cache.statistics().pending == 0


def test_tiers_are_asked_in_their_order_and_once() -> None:
    asked: list[str] = []

    class Noting(Answering):
        def read_record(self, key: bytes, rows: Rows) -> Outcome:
            asked.append(self.name)
            return super().read_record(key, rows)

    tiers = [Noting(Outcome.MISSING, "a"), Noting(Outcome.FAILED, "b"), Noting(Outcome.MISSING, "c")]
    with tiered(*tiers, write="none") as bench:
        assert promoted(bench, [0]) == 0
        assert asked == ["a", "b", "c"]
        assert bench.cache.status(keys([0])) == [kvoffload.Status.MISS]
        assert [each.not_found for each in bench.cache.tier_statistics()] == [1, 1, 1]


def test_a_record_that_is_torn_on_the_disk_comes_from_the_store(tmp_path: Any) -> None:
    disk, store = DiskTier(tmp_path / "disk", nbytes=1 << 20, identity="test"), Store()
    with tiered(disk, store) as bench:
        bench.written(range(4))
        content = (tmp_path / "disk").read_bytes()
        at = content.index(b"".join(store.store[key(1)])[:64])
        with (tmp_path / "disk").open("r+b") as file:
            file.seek(at)
            file.write(b"torn")
        assert promoted(bench, range(4)) == 4
        assert store.asked == keys([1])
        assert disk.statistics().corrupt == 1


def test_no_tier_is_asked_for_what_cannot_lengthen_the_promotion() -> None:
    first, second = Answering(Outcome.MISSING), Store(local_index=True)
    with tiered(first, second) as bench:
        first.claims = False
        bench.written(range(4))
        first.claims = True
        second.store.pop(key(1))
        assert promoted(bench, range(4)) == 1
        assert second.asked == keys([0])
        assert bench.cache.statistics().pending == 0


def test_a_full_queue_is_no_end() -> None:
    first, second = FaultyTier(limits=Limits(threads=1, max_queued=1)), DictTier()
    with tiered(first, second, write="none") as bench:
        bench.store(range(4))
        for tier in (first, second):
            for number in range(4):
                tier.put(keys([number]), bench.cache.acquire(keys([number])).indices).wait(SECONDS)
        bench.cache.clear(below=False)
        first.hang_all()
        blocker = bench.cache.promote(keys([0]))
        until(lambda: first.hung)
        assert promoted(bench, [2, 3], deadline=0.4) == 2, "one key waits in the queue until it is late"
        first.heal()
        assert blocker.wait(SECONDS) == 1


@pytest.mark.parametrize("limits", [{"deadline": 0.4}, {"deadline": None}])
def test_a_call_that_does_not_return_keeps_its_entry_and_the_next_tier_gets_another_one(limits: Any) -> None:
    """The late read of the first tier may write its entry at any time: nothing else may be there."""
    first, second = FaultyTier(limits=Limits(threads=1)), Store()
    hung = 30.0 if limits["deadline"] else 0.05
    with tiered(first, second, hung=hung, capacity=12) as bench:
        bench.written(range(6))
        first.hang_all()
        with bench.cache.promote(keys(range(4)), **limits) as promotion:
            assert promotion.wait(SECONDS) == 4
            assert first.hung == 1
            bench.check_loaded(range(4))
            for number in range(20, 32):
                bench.store([number])
                bench.check_loaded([number])
            before = bench.engine.slots.copy()
            first.heal()
            until(lambda: first.hung == 0 and first.statistics().in_calls == 0)
            changed = (before != bench.engine.slots).any(axis=1).nonzero()[0].tolist()
            assert len(changed) == 1, "the late read has written somewhere"
            bench.check_loaded(range(4))
            there = [number for number in range(20, 32) if bench.cache.lookup(keys([number]))]
            assert len(there) == 7, "12 entries, less four that are promoted and one that is kept"
            bench.check_loaded(there)
        assert bench.cache.statistics().pending == 0


def test_a_late_tier_is_blamed_and_the_next_one_asked_while_there_is_time() -> None:
    first, second = FaultyTier(limits=Limits(threads=8)), Store()
    with tiered(first, second, capacity=32) as bench:
        bench.written(range(8))
        first.hang_all()
        for number in range(5):
            assert promoted(bench, [number], deadline=0.2) == 1
        assert bench.cache.tier_statistics()[0].state is BreakerState.OPEN
        assert promoted(bench, [6], deadline=None) == 1, "an open breaker: the first tier is passed over"
        first.heal()


def test_a_promotion_that_is_cancelled_asks_no_other_tier() -> None:
    first, second = FaultyTier(limits=Limits(threads=1)), Store()
    with tiered(first, second) as bench:
        bench.written(range(2))
        first.hang_all()
        promotion = bench.cache.promote(keys(range(2)), deadline=None)
        until(lambda: first.hung)
        promotion.cancel()
        assert promotion.wait(SECONDS) == 0
        assert second.asked == []
        first.heal()


def test_a_tier_that_is_slower_than_computing_is_passed_over() -> None:
    first, second = Store("first", local_index=True), Store()
    with tiered(first, second, prefill_tokens_per_second=1e12) as bench:
        bench.written(range(2))
        assert promoted(bench, [0]) == 1
        bench.cache.clear(below=False)
        assert promoted(bench, [1]) == 1
        assert (first.asked, second.asked) == (keys([0]), keys([1]))


def test_a_key_that_is_being_removed_is_not_asked_for_again() -> None:
    go_on, remove = threading.Event(), threading.Event()

    class Failing(Answering):
        def read_record(self, key: bytes, rows: Rows) -> Outcome:
            go_on.wait(SECONDS)
            return super().read_record(key, rows)

    class Removing(Store):
        def remove_records(self, keys: Sequence[bytes]) -> list[bool]:
            remove.wait(SECONDS)
            return super().remove_records(keys)

    first, second = Failing(Outcome.FAILED), Removing()
    with tiered(first, second) as bench:
        promotion = bench.cache.promote(keys([0]), deadline=None)
        until(lambda: bench.cache.statistics().pending)
        remover = threading.Thread(target=lambda: bench.cache.remove(keys([0])))
        remover.start()
        until(lambda: bench.cache.statistics().pending == 0)
        go_on.set()
        assert promotion.wait(SECONDS) == 0
        remove.set()
        remover.join(SECONDS)
        assert second.drain(SECONDS)
        assert second.asked == []

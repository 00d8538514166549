"""FaultyTier: each fault shows as it is described, on demand too; random operations over it, every byte compared."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from interrupts import interrupt_at
from tier_classes import SECONDS, DictTier, attached

from kvoffload.internal.waiting import wait_until
from kvoffload.testing import FaultyTier, TierFaults, check_tier, fuzz_tier, pattern
from kvoffload.tiers import Limits, MemoryTier, Outcome

DONE, FAILED, MISSING = Outcome.DONE, Outcome.FAILED, Outcome.MISSING
KEYS = [b"a", b"b", b"c"]


def test_fail_all_and_heal() -> None:
    tier = FaultyTier()
    with attached(tier):
        assert tier.put(KEYS, [0, 1, 2]).wait(SECONDS) == [DONE] * 3
        tier.fail_all()
        assert tier.get(KEYS, [3, 4, 5]).wait(SECONDS) == [FAILED] * 3
        assert tier.put([b"d"], [0]).wait(SECONDS) == [FAILED]
        assert tier.remove(KEYS).wait(SECONDS) == [FAILED] * 3
        assert tier.clear().wait(SECONDS) == [FAILED]
        assert tier.drain(SECONDS) is False
        tier.heal()
        assert tier.get([*KEYS, b"d"], [3, 4, 5, 6]).wait(SECONDS) == [DONE, DONE, DONE, MISSING]


def test_an_interrupted_call_leaves_no_lock_taken() -> None:
    """Else the tier's threads, and every later call, would wait for ever."""
    tier = FaultyTier()
    for call in (tier.heal, tier.fail_all, tier.hang_all, tier.release_hung):
        for number in range(1, 100):
            outcome = interrupt_at(number, call)
            other = threading.Thread(target=tier.heal, daemon=True)
            other.start()
            other.join(SECONDS)
            assert not other.is_alive(), f"interrupted at {outcome.point}"
            if outcome.point is None:
                break


def test_a_hung_read_writes_to_its_entry_when_it_is_released() -> None:
    """So an entry that was used again meanwhile has other bytes: its owner must wait for the outcome."""
    tier = FaultyTier()
    with attached(tier) as memory:
        memory.fill(0, 5)
        tier.put([b"a"], [0]).wait(SECONDS)
        tier.hang_all()
        job = tier.get([b"a"], [3])
        wait_until(lambda: tier.hung == 1, SECONDS, "the hung call")
        assert job.outcomes == [None]
        assert tier.statistics().in_calls == 1
        assert tier.close(0.01) is False
        memory.fill(3, 9)
        tier.release_hung()
        assert job.wait(SECONDS) == [DONE]
        assert memory.version(3) == 5


def test_heal_releases_what_hangs() -> None:
    tier = FaultyTier(limits=Limits(threads=3))
    with attached(tier):
        tier.hang_all()
        job = tier.put(KEYS, [0, 1, 2])
        wait_until(lambda: tier.hung == 3, SECONDS, "the hung calls")
        tier.release_hung()
        assert job.wait(SECONDS) == [DONE] * 3
        again = tier.get([b"a"], [0])
        wait_until(lambda: tier.hung == 1, SECONDS, "the hung call")
        tier.heal()
        assert again.wait(SECONDS) == [DONE]
        assert tier.get([b"a"], [0]).wait(SECONDS) == [DONE]


def test_torn_writes_are_found_by_a_read() -> None:
    tier = FaultyTier(TierFaults(tear=1.0))
    with attached(tier) as memory:
        assert tier.put([b"a"], [0]).wait(SECONDS) == [DONE]
        assert tier.contains([b"a"]) == [True]
        assert tier.get([b"a"], [1]).wait(SECONDS) == [MISSING]
        assert memory.version(1) is None
        assert not memory.poisoned(1)
        assert tier.statistics().corrupt == 1
        assert tier.contains([b"a"]) == [False]
        tier.heal()
        memory.fill(0, 3)
        tier.put([b"a"], [0]).wait(SECONDS)
        assert tier.get([b"a"], [1]).wait(SECONDS) == [DONE]
        assert memory.version(1) == 3


@pytest.mark.parametrize(
    ("faults", "put", "get"),
    [
        (TierFaults(fail=1.0), FAILED, FAILED),
        (TierFaults(error=1.0), FAILED, FAILED),
        (TierFaults(decline=1.0), Outcome.DECLINED, MISSING),
        (TierFaults(drop=1.0), DONE, MISSING),
        (TierFaults(delay=1.0, longest_delay=1e-4), DONE, DONE),
    ],
)
def test_outcomes_of_faults(faults: TierFaults, put: Outcome, get: Outcome) -> None:
    tier = FaultyTier(faults)
    with attached(tier) as memory:
        assert tier.put([b"a"], [0]).wait(SECONDS) == [put]
        assert tier.get([b"a"], [1]).wait(SECONDS) == [get]
        assert memory.poisoned(1) == (faults.fail < 1.0), "a failed read leaves other bytes"


def test_wrong_bytes_are_switched_on() -> None:
    tier = FaultyTier(TierFaults(wrong_bytes=1.0))
    with attached(tier) as memory:
        memory.fill(0, 3)
        tier.put([b"a"], [0]).wait(SECONDS)
        assert tier.get([b"a"], [1]).wait(SECONDS) == [DONE]
        assert memory.version(1) is None


NUMBER: Any = 3


@pytest.mark.parametrize("rate", [2, -0.1, "x", None, float("nan")])
def test_rates_are_checked(rate: Any) -> None:
    with pytest.raises(ValueError, match=rf"^tear must be a number in \[0.0, 1.0\], got {rate!r}"):
        TierFaults(tear=rate)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: FaultyTier(inner=NUMBER), r"^inner must be a kvoffload\.tiers\.ThreadedTier, or None, got 3"),
        (lambda: check_tier(lambda: NUMBER), r"^make must return a kvoffload\.tiers\.Tier, got 3"),
        (lambda: pattern(1, -1), r"^nbytes must be an integer of at least 0, got -1"),
        (lambda: pattern(1, NUMBER / 2), r"^nbytes must be an integer of at least 0, got 1\.5"),
    ],
)
def test_what_a_test_gives_wrongly_is_named(call: Callable[[], object], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        call()


# random operations ----------------------------------------------------------------------------------------------------

FAULTS = TierFaults(
    fail=0.05, error=0.03, delay=0.02, hang=0.02, decline=0.05, drop=0.05, tear=0.05, longest_delay=1e-4
)


def test_fuzz_a_memory_tier_with_room_for_all(seed: int) -> None:
    report = fuzz_tier(
        MemoryTier(1 << 30, limits=Limits(threads=3)), operations=10_000, lossless=True, pools=2, seed=seed
    )
    assert report.operations >= 10_000
    assert report.outcomes["get", "done"] > 1500
    assert report.outcomes["get", "missing"] > 300


def test_fuzz_a_memory_tier_that_evicts(seed: int) -> None:
    report = fuzz_tier(MemoryTier(50 * 4096, limits=Limits(threads=3)), operations=12_000, seed=seed)
    assert report.outcomes["get", "done"] > 300


def test_fuzz_a_faulty_tier(seed: int) -> None:
    tier = FaultyTier(FAULTS, seed=seed, limits=Limits(threads=3))
    report = fuzz_tier(tier, operations=12_000, seed=seed, while_waiting=tier.release_hung)
    for kind in (("get", "done"), ("get", "missing"), ("get", "failed"), ("put", "failed"), ("put", "declined")):
        assert report.outcomes[kind] > 30
    assert tier.statistics().corrupt > 5


def test_the_seed_determines_what_one_thread_does(seed: int) -> None:
    """Jobs one at a time: else the moment at which a cancel comes is chance."""

    def outcomes() -> list[Outcome]:
        tier = FaultyTier(TierFaults(fail=0.2, error=0.1, decline=0.1, drop=0.1, tear=0.1), seed=seed)
        with attached(tier):
            jobs = (call([b"%d" % (at // 3)], [0]) for at in range(300) for call in (tier.put, tier.get))
            return [job.wait(SECONDS)[0] for job in jobs]

    first = outcomes()
    assert first == outcomes()
    assert set(first) == {DONE, FAILED, MISSING, Outcome.DECLINED}


def test_the_fuzz_finds_wrong_bytes(seed: int) -> None:
    with pytest.raises(AssertionError, match=rf"seed={seed}, after \d+ operations: .* never put"):
        fuzz_tier(FaultyTier(TierFaults(wrong_bytes=0.01), seed=seed), operations=50_000, seed=seed)


class OldRecords(DictTier):
    """What was removed is there again when it is put."""

    def __init__(self) -> None:
        super().__init__()
        self.old: dict[bytes, list[bytes]] = {}

    def remove_records(self, keys):  # type: ignore[no-untyped-def]
        self.old |= {key: self.store[key] for key in keys if key in self.store}
        return super().remove_records(keys)

    def write_record(self, key, rows, origin):  # type: ignore[no-untyped-def]
        if key in self.old:
            self.store[key] = self.old.pop(key)
        return super().write_record(key, rows, origin)


class LosesSome(DictTier):
    def write_record(self, key, rows, origin):  # type: ignore[no-untyped-def]
        return DONE if zlib.crc32(key) % 50 == 7 else super().write_record(key, rows, origin)


def test_the_fuzz_finds_removed_records(seed: int) -> None:
    with pytest.raises(AssertionError, match="possible were"):
        fuzz_tier(OldRecords(), operations=50_000, seed=seed)


def test_the_fuzz_finds_lost_records(seed: int) -> None:
    with pytest.raises(AssertionError, match=r"instead of|there: True|is MISSING"):
        fuzz_tier(LosesSome(), operations=50_000, lossless=True, seed=seed)

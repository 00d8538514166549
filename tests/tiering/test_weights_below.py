"""Weights above tiers and transfers: whatever is in flight when they change, and after a restart."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tier_classes import DictTier, GatedTier
from tiering import SECONDS, Bench, keys, tiered, until

from kvoffload import NO_WAIT, CacheEvent, Tenant
from kvoffload.tiers import DiskTier

FOUR = keys(range(4))


def kept(bench: Bench, name: str, salt: int) -> None:
    """Have the weights of this name, and the tiers, hold four keys with contents of their own."""
    bench.cache.use_weights(name)
    for block in range(4):
        bench.write(block, salt + block)
    bench.cache.store(FOUR, bench.blocks(range(4)), after=NO_WAIT).wait(SECONDS)


def check_fetched(bench: Bench, salt: int, hits: int = 4) -> None:
    for block in range(4):
        bench.write(block, 16_777_213)
    assert bench.cache.fetch(FOUR, bench.blocks(range(4)), after=NO_WAIT, deadline=SECONDS).wait(SECONDS) == hits
    assert all(bench.holds(block, salt + block) for block in range(hits))


def test_a_fetch_finds_bytes_of_its_weights_in_slots_and_in_tiers() -> None:
    with tiered(DictTier()) as bench:
        kept(bench, "one", 100)
        kept(bench, "two", 200)
        for name, salt in (("one", 100), ("two", 200)):
            bench.cache.use_weights(name)
            check_fetched(bench, salt)
        assert bench.cache.drain(SECONDS)
        for name, salt in (("one", 100), ("two", 200), ("one", 100)):
            bench.cache.use_weights(name)
            bench.cache.clear(below=False)
            assert bench.cache.locate(FOUR) == ["dict"] * 4
            check_fetched(bench, salt)
        bench.cache.use_weights("three")
        assert bench.cache.locate(FOUR) == ["missing"] * 4
        check_fetched(bench, 0, hits=0)


def test_a_fetch_whose_hits_were_read_is_loaded_and_one_whose_hits_were_not_has_none() -> None:
    with tiered() as bench:
        kept(bench, "one", 100)
        read, unread = (bench.cache.fetch(FOUR, bench.blocks(range(at, at + 4)), after=NO_WAIT) for at in (8, 12))
        assert read.hits == 4
        bench.cache.use_weights("two")
        assert (read.wait(SECONDS), read.hits) == (4, 4)
        assert (unread.wait(SECONDS), unread.hits) == (0, 0)
        assert all(bench.holds(8 + block, 100 + block) for block in range(4))
        bench.cache.use_weights("one")
        assert unread.hits == 0, "always the same answer"


def test_a_load_and_a_store_in_flight_end_as_usual() -> None:
    with tiered() as bench:
        kept(bench, "one", 100)
        load = bench.cache.load(FOUR, bench.blocks(range(8, 12)), after=NO_WAIT)
        for block in range(4):
            bench.write(16 + block, 300 + block)
        store = bench.cache.store(keys(range(4, 8)), bench.blocks(range(16, 20)), after=NO_WAIT)
        bench.cache.use_weights("two")
        load.wait(SECONDS)
        store.wait(SECONDS)
        assert list(store.keys) == keys(range(4, 8))
        assert all(bench.holds(8 + block, 100 + block) for block in range(4))
        assert bench.cache.lookup(keys(range(4, 8))) == 0
        bench.cache.use_weights("one")
        assert bench.cache.lookup(keys(range(8))) == 8


def test_a_promotion_and_a_fetch_that_wait_for_a_tier_end_with_nothing() -> None:
    tier = GatedTier()
    with tiered(tier) as bench:
        bench.cache.use_weights("one")
        tier.permit(4)
        bench.written(range(4))
        promotion = bench.cache.promote(FOUR, deadline=None)
        chained = promotion.load(bench.blocks(range(8, 12)), after=NO_WAIT)
        fetch = bench.cache.fetch(FOUR, bench.blocks(range(12, 16)), after=NO_WAIT, deadline=None)
        until(lambda: tier.begun[-1][0] == "read")
        bench.cache.use_weights("two")
        assert promotion.wait(SECONDS) == 0
        assert (chained.wait(SECONDS), fetch.wait(SECONDS), fetch.hits) == ((), 0, 0)
        tier.permit(100)
        promotion.release()
        assert bench.cache.drain(SECONDS)
        bench.cache.check()
        bench.cache.use_weights("one")
        until(lambda: bench.cache.promote(FOUR).wait(SECONDS) == 4)  # once the entries that were given up are back
        check_fetched(bench, 0)


def test_what_a_session_demotes_and_prefetches_stays_with_its_weights() -> None:
    with tiered(DictTier(), write="none", capacity=16) as bench:
        bench.cache.use_weights("one")
        with bench.cache.open_request(session="a") as request:
            bench.cache.store(FOUR, bench.blocks(range(4)), after=NO_WAIT, request=request).wait(SECONDS)
        assert bench.cache.hint("demote", session="a").blocks == 4
        bench.cache.use_weights("two")
        assert bench.cache.drain(SECONDS)
        assert bench.cache.hint("prefetch", session="a").outcome == "declined", "no session of these weights"
        assert bench.cache.locate(FOUR) == ["missing"] * 4
        bench.cache.use_weights("one")
        bench.cache.clear(below=False)
        assert bench.cache.locate(FOUR) == ["dict"] * 4


def test_tiers_are_told_the_names_in_use_and_namespaces_with_records() -> None:
    class Told(DictTier):
        def __init__(self) -> None:
            super().__init__()
            self.told = list[Any]()

        def keep_weights(self, names: frozenset[str]) -> None:
            self.told.append(names)

        def put(self, *given: Any, tenant: str = "", **options: Any) -> Any:
            self.told.append(tenant)
            return super().put(*given, tenant=tenant, **options)

    tier = Told()
    with tiered(tier) as bench:
        kept(bench, "", 100)
        assert bench.cache.drain(SECONDS)
        kept(bench, "one", 200)
        assert bench.cache.drain(SECONDS)
    assert [name for name, _ in groupby(tier.told)] == ["", frozenset({"one"}), "\0one"]


def test_a_tier_that_fails_at_it_is_no_error() -> None:
    class Fails(DictTier):
        def keep_weights(self, names: frozenset[str]) -> None:
            raise OSError(names)

    with tiered(Fails()) as bench:
        kept(bench, "one", 100)
        assert bench.cache.drain(SECONDS)
        bench.cache.clear(below=False)
        check_fetched(bench, 100)


def disk(folder: Path, records: int) -> DiskTier:
    return DiskTier(folder / "kv", nbytes=(1 << 14) + records * 3 * 4096, identity="m", policy="lru")


def test_a_disk_has_the_keys_of_each_weights_after_a_restart(tmp_path: Path) -> None:
    with tiered(disk(tmp_path, 32)) as bench:
        for name, salt in (("", 0), ("one", 100), ("two", 200)):
            kept(bench, name, salt)
            assert bench.cache.drain(SECONDS)
    with tiered(disk(tmp_path, 32)) as bench:
        for name, salt in (("two", 200), ("three", 0), ("one", 100), ("", 0)):
            bench.cache.use_weights(name)
            bench.cache.clear(below=False)
            check_fetched(bench, salt, hits=0 if name == "three" else 4)


@pytest.mark.parametrize("restart", [False, True])
def test_a_full_disk_evicts_records_of_other_weights_first(tmp_path: Path, restart: bool) -> None:
    def fill(bench: Bench, name: str, numbers: range) -> None:
        bench.cache.use_weights(name)
        for start in range(numbers.start, numbers.stop, 4):
            bench.store(range(start, start + 4))
            assert bench.cache.drain(SECONDS)

    def has(bench: Bench, name: str, numbers: range) -> int:
        bench.cache.use_weights(name)
        bench.cache.clear(below=False)
        return bench.cache.locate(keys(numbers)).count("disk")

    with tiered(disk(tmp_path, 12)) as bench:
        records = bench.manager.tiers[0].tier.num_slots  # type: ignore[attr-defined]
        assert records >= 8
        fill(bench, "one", range(4))  # the oldest
        fill(bench, "two", range(4))
        if not restart:
            check_first(bench, fill, has, records)
    if restart:
        with tiered(disk(tmp_path, 12)) as bench:
            check_first(bench, fill, has, records)


def check_first(bench: Bench, fill: Any, has: Any, records: int) -> None:
    """With "one" in use, whose records are older, those of "two" make room."""
    bench.cache.use_weights("one")
    fill(bench, "one", range(100, 100 + records - 4))
    assert has(bench, "one", range(4)) == 4
    assert has(bench, "two", range(4)) == 0


@pytest.mark.parametrize("tenant", [Tenant(), Tenant(max_blocks=4), Tenant(priority=1)])
def test_after_a_restart_a_disk_keeps_the_records_of_all_tenants_of_the_weights_in_use(
    tmp_path: Path, tenant: Tenant
) -> None:
    def opened() -> Any:
        of_disk = DiskTier(tmp_path / "kv", nbytes=1 << 18, identity="m", policy="lru", tenants={"a": tenant})
        return tiered(of_disk, tenants={"a": tenant})

    with opened() as bench:
        bench.cache.use_weights("one")
        for name, first in (("", 0), ("a", 4)):
            bench.cache.store(keys(range(first, first + 2)), [0, 1], after=NO_WAIT, tenant=name).wait(SECONDS)
    with opened() as bench:
        pools = bench.manager.tiers[0].tier._disk.index._state.pools
        assert pools.of_other_weights == 4
        bench.cache.use_weights("one")
        assert bench.cache.drain(SECONDS)
        assert pools.of_other_weights == 0


def test_events_above_tiers_have_the_keys_as_given() -> None:
    events: list[CacheEvent] = []
    with tiered(DictTier(), on_event=events.append) as bench:
        kept(bench, "one", 100)
        assert bench.cache.drain(SECONDS)
        bench.cache.clear(below=False)
        check_fetched(bench, 100)
        assert bench.cache.drain(SECONDS)
    told = [(event.kind, sorted(event.keys), event.weights) for event in events if event.keys]
    assert {kind for kind, _, _ in told} >= {"stored", "promoted", "removed", "hit"}
    assert all(weights == "one" and set(names) <= set(FOUR) for _, names, weights in told)

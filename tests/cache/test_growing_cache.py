"""Caches over pools that grow: how many entries there are when, what shares and policies are of, and tiers below."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from growing import SECONDS, Pieces, wait_for, wait_for_the_end
from helpers import COPY_ENGINE_ONLY, number_blocks, simulated
from tier_classes import DictTier

import kvoffload
from kvoffload import NO_WAIT, BlockCache, CapacityError, Growing, KVLayout, OffloadEngine, ShardedEngine, Tenant
from kvoffload.cache.policies import LRU, Policy
from kvoffload.device.pinned import PAGE_BYTES
from kvoffload.internal.types import UInt8Array
from kvoffload.testing import SimulatedDriver
from kvoffload.tiers import Origin, Outcome, TierCapabilities

CAPACITY, BLOCKS = 12, 64
NAMES = ("prefix", "lru", "arc", "s3fifo")


def keys(numbers: Sequence[int]) -> list[bytes]:
    return [b"key-%d" % number for number in numbers]


class Grown:
    """A cache over one device or two, with two groups of planes if asked for; block `b` is filled with `b + 1`."""

    def __init__(
        self,
        devices: int = 1,
        groups: int = 1,
        capacity: int = CAPACITY,
        *,
        seed: int = 0,
        faults: int = 0,
        **options: Any,
    ) -> None:
        self.simulator = SimulatedDriver(seed=seed, device_count=devices, deadlock_seconds=0.3)
        self.devices = [kvoffload.open_device(number, backend=self.simulator) for number in range(devices)]
        self.pieces, self.groups = Pieces(devices), groups
        layouts = []
        for device in self.devices:
            members = [device.allocate_planes(2, block_bytes=64, num_blocks=BLOCKS) for _ in range(groups)]
            for planes in members:
                number_blocks(planes, 1)
            layouts.append(KVLayout(members))
        if faults:
            self.simulator.faults.fail_call("cuMemHostRegister", nth=faults, error=2)
        pool = Growing(capacity * groups * devices * PAGE_BYTES, piece_bytes=groups * PAGE_BYTES)
        made: Any = {"pool_bytes": pool, "progress": self.pieces, **COPY_ENGINE_ONLY}
        self.engine: Any = (
            OffloadEngine(layouts[0], device=self.devices[0], **made)
            if devices == 1
            else ShardedEngine(layouts, devices=self.devices, **made)
        )
        wait_for(self.engine, 2 * groups)
        try:
            self.cache = BlockCache(self.engine, **options)
        except BaseException:
            self.close()
            raise

    def store(self, numbers: Sequence[int], **options: Any) -> list[bytes]:
        blocks = list(numbers) if self.groups == 1 else [list(numbers)] * self.groups
        job = self.cache.store(keys(numbers), blocks, after=NO_WAIT, **options)
        job.wait(SECONDS)
        self.cache.check()
        return list(job.keys)

    def check_hits(self, numbers: Sequence[int]) -> None:
        """Load what is there of these keys, with one group, and compare every byte of each plane."""
        hits = self.cache.lookup(keys(numbers))
        if not hits:
            return
        self.cache.load(keys(numbers[:hits]), list(range(50, 50 + hits)), after=NO_WAIT).wait(SECONDS)
        wanted = [[number + 1] * 64 for number in numbers[:hits]]
        for layout in getattr(self.engine.layout, "layouts", [self.engine.layout]):
            for plane in layout.groups[0].planes:
                image = plane.owner.to_numpy()[plane.address - plane.owner.address :]
                rows = [image[block * plane.block_stride :][:64].tolist() for block in range(50, 50 + hits)]
                assert rows == wanted

    def grow(self, entries: int) -> None:
        """Until there are so many, or the pool has stopped growing."""
        while self.engine.growing and self.engine.pinned_slots < entries * self.groups:
            before = self.engine.pinned_slots
            self.pieces.let(1)
            wait_for(self.engine, before + 1)

    def grow_to_the_end(self) -> None:
        self.pieces.let_all()
        wait_for_the_end(self.engine)

    def close(self) -> None:
        self.pieces.let_all()
        self.engine.close()
        for device in self.devices:
            device.close()
        assert self.simulator.leaks()["registered_ranges"] == 0
        assert self.simulator.violations == []


@contextmanager
def grown(*arguments: Any, **options: Any) -> Iterator[Grown]:
    made = Grown(*arguments, **options)
    try:
        yield made
    finally:
        made.close()


# entries --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize(("devices", "groups"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_there_are_as_many_entries_as_are_pinned(policy: str, devices: int, groups: int) -> None:
    with grown(devices, groups, policy=policy) as made:
        cache = made.cache
        assert cache.capacity == CAPACITY, "keys that fit in the end"
        assert cache.statistics().capacity == 2
        assert len(made.store(range(2))) == 2
        with pytest.raises(CapacityError, match=r"capacity 2"):
            made.store(range(10, 13), all_or_nothing=True)
        assert len(made.store(range(10, 13))) <= 2
        for entries in (5, 9, CAPACITY):
            made.grow(entries)
            assert cache.statistics().capacity == entries
            cache.clear()
            assert len(made.store(range(entries))) == entries, "free entries take keys without a question"
            assert cache.lookup(keys(range(entries + 1))) == entries
            assert made.store([50]) in ([], keys([50]))
            assert len(cache) == entries
        made.grow_to_the_end()
        assert cache.statistics().capacity == CAPACITY
        cache.check()
        assert made.cache._state.growing is None, "nothing is asked any more"


def test_what_is_reserved_and_leased_stays_while_entries_come() -> None:
    with grown() as made:
        cache = made.cache
        made.store([0])
        lease = cache.acquire(keys([0]))
        reservation = cache.reserve(keys([1]))
        assert cache.reserve(keys([2])).keys == ()
        made.grow(4)
        job = made.engine.store([1], reservation.slots(), after=NO_WAIT)
        reservation.commit(job)
        assert len(made.store([2, 3])) == 2
        with pytest.raises(ValueError, match="belongs to a BlockCache"):
            made.engine.store([1], [3], after=NO_WAIT)
        lease.release()
        assert cache.lookup(keys([0, 1, 2, 3])) == 4
        cache.check()


def test_transfers_in_flight_keep_their_order_while_entries_come() -> None:
    """Stores that a gate holds back; a load of their keys; more entries meanwhile."""
    with grown(policy="lru") as made:
        cache, engine = made.cache, made.engine
        jobs = [cache.store(keys([0, 1]), [0, 1], after=NO_WAIT)]
        for entries in range(3, CAPACITY + 1):
            made.grow(entries)
            jobs.append(cache.store(keys([entries]), [entries], after=NO_WAIT))
            jobs.append(cache.load(keys([entries]), [60], after=NO_WAIT, pending=True))
        made.simulator.run_all()
        for job in jobs:
            job.wait(SECONDS)
        assert len(cache) == CAPACITY
        assert engine.slots[11, 0] == CAPACITY + 1
        cache.check()


def test_an_open_request_uses_entries_that_have_come() -> None:
    with grown(policy="prefix") as made, made.cache.open_request(session="a") as opened:
        assert len(made.store([0, 1], request=opened)) == 2
        assert made.store([2], request=opened) == [], "its own keys are protected"
        made.grow(3)
        assert made.store([2], request=opened) == keys([2])
        made.cache.hint("retain", session="a")


# shares, quotas and policies ------------------------------------------------------------------------------------------


def test_a_quota_is_a_number_of_blocks_whatever_is_pinned() -> None:
    with grown(tenants={"a": Tenant(max_blocks=4), "b": Tenant(priority=1)}, policy="lru") as made:
        assert len(made.store([0, 1], tenant="a")) == 2
        made.grow(8)
        assert len(made.store(range(10, 16), tenant="a")) == 4
        assert len(made.store(range(20, 24), tenant="b")) == 4
        made.cache.check()


@pytest.mark.parametrize("policy", [*NAMES, "function"])
def test_policies_are_made_for_the_whole_pool_and_again_if_it_stays_smaller(policy: str) -> None:
    capacities: list[int] = []

    def make(capacity: int) -> Policy:
        capacities.append(capacity)
        return LRU()

    chosen: Any = make if policy == "function" else policy
    with grown(policy=chosen, tenants={"a": Tenant(max_blocks=9)}, faults=8) as made:  # of twelve pieces
        cache = made.cache
        made.grow(4)
        assert len(made.store(range(4))) == 4
        made.grow_to_the_end()
        assert made.engine.pinned_slots == 7
        assert cache.statistics().capacity == 7
        assert len(cache) == 4
        assert cache.lookup(keys(range(4))) == 4, "no key is lost"
        assert len(made.store(range(10, 13))) == 3
        made.store(range(20, 27))
        assert len(cache) <= 7
        cache.check()
        assert cache.capacity == CAPACITY
        if policy == "function":
            assert capacities == [CAPACITY, 9, 7, 7]
        if policy in ("arc", "s3fifo"):
            assert "of 7 keys" in str(cache._state.pools)


def test_a_policy_object_stays_the_callers_if_the_pool_stays_smaller() -> None:
    mine = LRU()
    with grown(policy=mine, faults=8) as made:
        made.store([0, 1])
        made.grow_to_the_end()
        assert len(made.store(range(10, 17))) == 7
        assert made.cache._state.pools.all[0].policy is mine
        assert len(mine) == 7


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("devices", [1, 2])
def test_random_calls_while_the_pool_grows(policy: str, devices: int, seed: int) -> None:
    """No entry beyond what is pinned is used, every hit has its bytes, and `check` passes at each step."""
    dice = random.Random(f"{seed} {policy} {devices}")
    fails = dice.choice([0, dice.randint(5, 12) * devices])
    with grown(devices, seed=seed, policy=policy, faults=fails) as made:
        cache, engine = made.cache, made.engine
        leases, reservations = list[Any](), list[Any]()
        for _ in range(120):
            if dice.random() < 0.12:
                made.pieces.let(1)
            first = dice.randrange(40)
            numbers = range(first, first + dice.randint(1, 5))
            action = dice.choice(["store", "store", "load", "acquire", "reserve", "release", "remove", "touch"])
            if action == "store":
                cache.store(keys(numbers), list(numbers), after=NO_WAIT)
            elif action == "load":
                made.check_hits(numbers)
            elif action == "acquire" and cache.lookup(keys(numbers[:1])):
                leases.append(cache.acquire(keys(numbers[:1])))
                assert max(leases[-1].indices) < engine.pinned_slots
            elif action == "reserve" and len(reservations) < 2:
                reservations.append(cache.reserve(keys(numbers)))
                assert all(index < engine.pinned_slots for index in reservations[-1].indices)
            elif action == "release":
                for handle in leases:
                    handle.release()
                for handle in reservations:
                    handle.abort()
                leases, reservations = [], []
            elif action == "remove":
                cache.remove(keys(numbers))
            elif action == "touch":
                cache.touch(keys(numbers))
            cache.check()
            statistics = cache.statistics()
            assert statistics.resident + statistics.pending <= statistics.capacity <= engine.pinned_slots
        made.grow_to_the_end()
        assert cache.statistics().capacity == engine.pinned_slots
        cache.check()


# tiers ----------------------------------------------------------------------------------------------------------------


class WatchingTier(DictTier):
    """Notes how many entries it gets, and which rows it is given."""

    def __init__(self, *, pins_pool: bool = False) -> None:
        super().__init__()
        self.capabilities = TierCapabilities(durable=False, shared=False, local_index=True, pins_pool=pins_pool)
        self.entries = 0
        self.beyond: list[int] = []
        self.engine: Any = None

    def attach(self, pools: Sequence[UInt8Array], layout: bytes | None) -> None:
        self.entries = len(pools[0])
        super().attach(pools, layout)

    def _note(self, rows: list[UInt8Array]) -> None:
        offset = rows[0].__array_interface__["data"][0] - self.pools[0].__array_interface__["data"][0]
        entry = offset // self.pools[0].shape[1]
        if entry >= self.engine.pinned_slots:
            self.beyond.append(entry)

    def read_record(self, key: bytes, rows: list[UInt8Array]) -> Outcome:
        self._note(rows)
        return super().read_record(key, rows)

    def write_record(self, key: bytes, rows: list[UInt8Array], origin: Origin) -> Outcome:
        self._note(rows)
        return super().write_record(key, rows, origin)


def test_a_tier_sees_the_whole_pool_and_is_given_rows_that_are_pinned() -> None:
    tier = WatchingTier()
    with grown(policy="lru", tiers=[tier], write="through") as made:
        tier.engine = made.engine
        assert tier.entries == CAPACITY
        cache = made.cache
        for first in range(0, 40, 2):
            made.store([first, first + 1])
            assert cache.drain(SECONDS)
            made.grow(min(CAPACITY, 2 + first // 4))
            with cache.promote(keys(range(0, first, 3))) as promotion:
                promotion.wait(SECONDS)
            cache.check()
        made.grow_to_the_end()
        cache.clear(below=False)
        with cache.promote(keys(range(6))) as promotion:
            assert promotion.wait(SECONDS) == 6, "half of the entries, of all that there are now"
            cache.load(keys(range(6)), list(range(50, 56)), after=NO_WAIT).wait(SECONDS)
        assert tier.beyond == []
        assert cache.close(SECONDS)


def test_shares_of_tiers_follow_what_is_pinned() -> None:
    """Promotions may occupy half of the entries: of those that there are."""
    with grown(policy="lru", tiers=[DictTier()], write="through") as made:
        cache = made.cache
        for number in range(12):
            made.store([number])
            assert cache.drain(SECONDS)
        cache.clear(below=False)
        with cache.promote(keys(range(12))) as promotion:
            assert promotion.wait(SECONDS) == 1
        made.grow_to_the_end()
        cache.clear(below=False)
        with cache.promote(keys(range(12))) as promotion:
            assert promotion.wait(SECONDS) == 6
        assert cache.close(SECONDS)


@pytest.mark.parametrize("faults", [0, 8])
def test_a_tier_that_pins_the_pool_is_attached_when_it_has_grown(faults: int) -> None:
    tier = WatchingTier(pins_pool=True)
    pieces = Pieces()
    with ExitStack() as stack:
        device = stack.enter_context(simulated(1))
        planes = device.allocate_planes(2, block_bytes=64, num_blocks=BLOCKS)
        if faults:
            device.simulator.faults.fail_call("cuMemHostRegister", nth=faults, error=2)
        pool = Growing(CAPACITY * PAGE_BYTES, piece_bytes=PAGE_BYTES)
        options: dict[str, Any] = {"pool_bytes": pool, "progress": pieces, **COPY_ENGINE_ONLY}
        engine = stack.enter_context(OffloadEngine(KVLayout([planes]), device=device, **options))
        stack.callback(pieces.let_all)
        made: list[BlockCache] = []
        thread = threading.Thread(target=lambda: made.append(BlockCache(engine, tiers=[tier], write="through")))
        thread.start()
        thread.join(0.05)
        assert (made, tier.entries) == ([], 0), "the constructor waits"
        pieces.let_all()
        thread.join(SECONDS)
        (cache,) = made
        assert tier.entries == engine.pinned_slots == (faults - 1 if faults else CAPACITY)
        assert cache.statistics().capacity == tier.entries
        cache.store(keys([1]), [1], after=NO_WAIT).wait(SECONDS)
        assert cache.drain(SECONDS)
        assert cache.close(SECONDS)
        made.clear()


# the door -------------------------------------------------------------------------------------------------------------


def test_open_cache_takes_a_pool_that_grows(device: kvoffload.Device) -> None:
    slab = device.allocate_planes(2, block_bytes=64, num_blocks=BLOCKS)
    number_blocks(slab, 1)
    pool = Growing(CAPACITY * PAGE_BYTES, piece_bytes=4 * PAGE_BYTES)
    with kvoffload.open_cache(KVLayout([slab]), device=device, pool_bytes=pool) as cache:
        cache.keep(keys(range(4)), range(4), after=NO_WAIT).wait(SECONDS)
        wait_for_the_end(cache.engine)
        cache.keep(keys(range(12)), range(12), after=NO_WAIT).wait(SECONDS)
        job = cache.fetch(keys(range(12)), range(40, 52), after=NO_WAIT)
        job.wait(SECONDS)
        assert job.hits == 12
        assert cache.engine.slots[11, 0] == 12
        assert np.unique(cache.engine.slots[:, 0]).size == 12

"""BlockCache over several devices: what it is over one, with every device's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cache_machine import MACHINE_SETTINGS, CacheMachine
from helpers import number_blocks
from hypothesis import settings
from sharding import Machine, machine

import kvoffload
from kvoffload import NO_WAIT, BlockCache, CapacityError, KVLayout, LayoutError, ShardedEngine, TransferError

COUNTS = (2, 4, 2)
DEVICES = range(len(COUNTS))


@pytest.fixture
def three() -> Iterator[Machine]:
    with machine(COUNTS) as made:
        yield made


def keys(*numbers: int) -> list[bytes]:
    return [b"key %d" % number for number in numbers]


def let_run(made: Machine) -> None:
    for gate in made.gates:
        gate.open()
    made.engine.drain(10)


class ShardedCacheMachine(CacheMachine):
    """With the same blocks on a second device, some of whose block bytes are others."""

    devices = 2

    def make_engine(self) -> Any:
        self.other = kvoffload.open_device(1, backend=self.simulator)
        self.others = self.other.allocate_planes(3, block_bytes=48, num_blocks=64)
        number_blocks(self.others, 1)
        layouts = [
            KVLayout([each] * self.groups, blocks_per_slot=self.factor) for each in (self.bench.planes, self.others)
        ]
        return ShardedEngine(
            layouts, devices=[self.device, self.other], num_slots=self.capacity * self.groups, staging_bytes=0
        )

    def follow(self) -> Any:
        return [self.held, NO_WAIT]

    def check_loaded(self, target: int, source: int) -> None:
        super().check_loaded(target, source)
        slab: Any = self.others[0].owner
        image = slab.to_numpy()
        for plane in self.others:
            start = plane.address - slab.address + target * plane.block_stride
            assert (image[start : start + plane.block_bytes] == source + 1).all()

    def close_engine(self) -> None:
        super().close_engine()
        self.other.close()


class GroupedShardedCacheMachine(ShardedCacheMachine):
    groups = 2
    factor = 2


TestShardedCacheAgainstModel = ShardedCacheMachine.TestCase
TestShardedCacheAgainstModel.settings = settings(MACHINE_SETTINGS, max_examples=25)
TestGroupedShardedCacheAgainstModel = GroupedShardedCacheMachine.TestCase
TestGroupedShardedCacheAgainstModel.settings = settings(MACHINE_SETTINGS, max_examples=15)


# by hand --------------------------------------------------------------------------------------------------------------


def test_what_was_stored_is_loaded_on_every_device(three: Machine) -> None:
    cache, mirrors = BlockCache(three.engine), three.mirrors()
    names = keys(1, 2, 3)
    cache.store(names, [4, 2, 9]).wait(10)
    assert cache.lookup(names) == 3
    cache.load(names[:2], [10, 11], parts=2).wait(10)
    with cache.acquire(names) as lease:
        slots = lease.slots().tolist()
    mirrors.expect("store", [4, 2, 9], slots)
    mirrors.expect("load", [10, 11], slots[:2])
    mirrors.check()
    assert cache.engine.slots[1].shape == (16, 4096)


def test_keys_of_two_groups() -> None:
    with machine(COUNTS, groups=2, blocks_per_slot=2) as made:
        cache, mirrors = BlockCache(made.engine, policy="lru"), made.mirrors()
        cache.store(keys(1, 2), [[4, 2, 9, 1], [0, 1, 2, 3]], after=made.one_each()).wait(10)
        cache.load(keys(2), [[7, 8], [8, 7]]).wait(10)
        for mirror in mirrors:
            for group, (stored, loaded) in enumerate((([4, 2, 9, 1], [7, 8]), ([0, 1, 2, 3], [8, 7]))):
                with cache.acquire(keys(1, 2)) as lease:
                    slots = lease.slots(group).tolist()
                mirror.expect("store", stored, slots, group=group)
                mirror.expect("load", loaded, slots[1:], group=group)
            mirror.check()


@pytest.mark.parametrize("failing", DEVICES)
def test_a_store_that_fails_on_one_device_is_never_visible(three: Machine, failing: int) -> None:
    cache = BlockCache(three.engine, policy="lru")
    three.simulator.faults.fail_call("cuMemcpy3DBatchAsync", nth=1 + failing)
    job = cache.store(keys(1), [1])
    three.engine.drain(10)
    assert cache.lookup(keys(1)) == 0
    with pytest.raises(TransferError, match=f"shard {failing} "):
        job.wait(10)
    cache.check()
    cache.store(keys(1), [1]).wait(10)
    assert cache.lookup(keys(1)) == 1


@pytest.mark.parametrize("failing", DEVICES)
def test_slots_of_a_failed_store_are_not_reused_before_all_devices_have_ended(three: Machine, failing: int) -> None:
    """The store has failed on one device; on the next one the GPU may still write the slot."""
    held = (failing + 1) % len(COUNTS)
    cache = BlockCache(three.engine, policy="lru")
    streams = three.one_each()
    three.hold(held, streams[held])
    three.simulator.faults.fail_call("cuMemcpy3DBatchAsync", nth=1 + failing)
    cache.store(keys(0), [0], after=streams)
    three.settle()
    assert cache.lookup(keys(0)) == 0
    with pytest.raises(CapacityError):
        cache.store(keys(*range(1, 17)), list(range(16)), all_or_nothing=True)
    assert len(cache.store(keys(*range(1, 17)), list(range(16)), after=NO_WAIT).keys) == 15
    let_run(three)
    cache.check()
    assert cache.store(keys(16), [15]).keys == (b"key 16",)


@pytest.mark.parametrize("held", DEVICES)
def test_a_key_that_one_device_still_loads_is_not_evicted(three: Machine, held: int) -> None:
    cache = BlockCache(three.engine, policy="lru")
    everything = keys(*range(16))
    cache.store(everything, list(range(16))).wait(10)
    streams = three.one_each()
    three.hold(held, streams[held])
    cache.load(everything[:2], [0, 1], after=streams)
    three.settle()
    stored = cache.store(keys(*range(20, 36)), list(range(16)), after=NO_WAIT)
    assert len(stored.keys) == 14
    assert cache.lookup(everything[:2]) == 2
    let_run(three)
    cache.check()


def test_a_reservation_is_filled_on_every_device(three: Machine) -> None:
    cache = BlockCache(three.engine, policy="lru")
    with pytest.raises(ValueError, match="belongs to a BlockCache"):
        three.engine.store([1], [1])
    with cache.reserve(keys(1)) as reservation:
        reservation.commit(three.engine.store([1], reservation.slots()))
    three.engine.drain(10)
    assert cache.lookup(keys(1)) == 1
    with cache.reserve(keys(2)) as reservation:
        for pool in three.engine.slots:
            pool[reservation.slots()] = 7
    mirrors = three.mirrors()
    cache.load(keys(2), [3]).wait(10)
    mirrors.expect("load", [3], reservation.slots().tolist())
    mirrors.check()


def test_an_array_is_asked_once_for_all_groups() -> None:
    class Produced:
        asked = 0

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, *_: Any, **__: Any) -> None:
            type(self).asked += 1

    with machine((2, 2), groups=2) as made:
        cache = BlockCache(made.engine, policy="lru")
        cache.store(keys(1), [[1], [2]], after=[Produced(), [Produced()]]).wait(10)
        assert Produced.asked == 2, "one on each device"


def test_parts_that_one_device_cannot_have_are_refused(three: Machine) -> None:
    cache = BlockCache(three.engine, policy="lru")
    cache.store(keys(1), [1]).wait(10)
    before = three.engine.submitted
    with pytest.raises(LayoutError, match="does not divide") as caught:
        cache.load(keys(1), [1], parts=4)
    assert caught.value.__notes__ == ["on shard 0 (device 0)"]
    assert three.engine.submitted == before


def test_another_cache_is_refused_while_a_device_is_busy(three: Machine) -> None:
    cache: Any = BlockCache(three.engine, policy="lru")
    streams = three.one_each()
    three.hold(2, streams[2])
    cache.store(keys(1), [1], after=streams)
    three.settle()
    with pytest.raises(CapacityError, match="another BlockCache"):
        BlockCache(three.engine, policy="lru")
    cache = None
    with pytest.raises(CapacityError, match="another BlockCache"):
        BlockCache(three.engine, policy="lru")
    let_run(three)
    assert len(BlockCache(three.engine, policy="lru")) == 0


def test_a_cache_of_several_devices_is_shown(three: Machine) -> None:
    cache = BlockCache(three.engine, policy="lru")
    assert "simulated" in cache._repr_html_()
    assert repr(cache).startswith("BlockCache(")


@pytest.mark.parametrize("held", DEVICES)
def test_a_key_is_visible_when_all_devices_have_its_bytes(three: Machine, held: int) -> None:
    cache = BlockCache(three.engine, policy="lru")
    streams = three.one_each()
    three.hold(held, streams[held])
    cache.store([b"one"], [1], after=streams)
    three.settle()
    assert cache.lookup([b"one"]) == 0
    with cache.acquire([b"one"], pending=True) as lease:
        theirs = three.one_each()
        lease.order_before(theirs)
        markers = [three.marker(device) for device in DEVICES]
        for device in DEVICES:
            three.fill(device, markers[device], 9, theirs[device])
        three.settle()
        assert not np.any(markers[held].to_numpy() == 9)
        with pytest.raises(TimeoutError):
            lease.wait(0.01)
        let_run(three)
    assert cache.lookup([b"one"]) == 1

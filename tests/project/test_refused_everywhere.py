"""Bad arguments of every public call of a kind: the message names the argument and the value, and nothing has happened.

What a call is refused for alone is tested where the call is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import COPY_ENGINE_ONLY
from public_calls import public_calls
from tiering import DESCRIBED, aligned, keys

import kvoffload
from kvoffload import (
    NO_WAIT,
    BlockCache,
    CacheIndex,
    ClosedError,
    HostMemory,
    KVLayout,
    LayoutError,
    OffloadEngine,
    ShardedEngine,
    SharedSlots,
)
from kvoffload.cache.tiering import ChainedLoad, FetchJob, Promotion
from kvoffload.pool import SharedPool
from kvoffload.testing import TierFaults, check_clean_close, check_tier, fuzz_tier
from kvoffload.tiers import DiskTier, MemoryTier, TierJob, ValkeyConnection


@dataclass
class World:
    """One of each, open. The engines of both caches are in use: key 0 is stored, from block 0."""

    device: kvoffload.Device
    layout: KVLayout
    cache: BlockCache[OffloadEngine]
    tiered: BlockCache[OffloadEngine]
    sharded: ShardedEngine
    index: CacheIndex
    below: CacheIndex
    promotion: Promotion
    chained: ChainedLoad
    fetched: FetchJob

    @property
    def engine(self) -> OffloadEngine:
        return self.cache.engine

    def state(self) -> tuple[object, ...]:
        """What a refused call leaves as it was."""
        counted = self.cache.statistics(), self.tiered.statistics(), self.index.statistics(), self.below.statistics()
        opened = self.device.closed, self.engine.closed, self.sharded.closed
        return (*counted, *opened, self.engine.submitted, self.tiered.engine.submitted, self.sharded.submitted)


@pytest.fixture
def world(device: kvoffload.Device) -> Iterator[World]:
    layout = KVLayout([device.allocate_blocks(8, planes=2, block_bytes=64)], **DESCRIBED)
    with ExitStack() as stack:
        engines = [OffloadEngine(layout, device=device, num_slots=4, **COPY_ENGINE_ONLY) for _ in range(2)]
        sharded = ShardedEngine([layout], devices=[device], num_slots=4, **COPY_ENGINE_ONLY)
        tiered = stack.enter_context(closing(BlockCache(engines[1], tiers=[MemoryTier(1 << 16)])))
        below = stack.enter_context(
            closing(CacheIndex(4, pools=[aligned(4)], tiers=[MemoryTier(1 << 16)], layout=None))
        )
        cache, index = BlockCache(engines[0]), CacheIndex(4)
        for each in (cache, tiered):
            each.store(keys([0]), [0], after=NO_WAIT).wait(10)
        promotion = stack.enter_context(tiered.promote(keys([0])))
        chained = promotion.load([1], after=NO_WAIT)
        chained.wait(10)
        fetched = cache.fetch(keys([0]), [1], after=NO_WAIT)
        fetched.wait(10)
        made = World(device, layout, cache, tiered, sharded, index, below, promotion, chained, fetched)
        for entries in (index, below):
            entries.reserve(keys([0])).commit()
        yield made
        made.cache.load(keys([0]), [1], after=NO_WAIT).wait(10)
        made.tiered.load(keys([0]), [1], after=NO_WAIT).wait(10)
        made.sharded.store([0], [0], after=NO_WAIT).wait(10)


Call = Callable[[World, Any], object]


def refuse(world: World, call: Call, values: list[Any], message: str) -> None:
    for value in values:
        before = world.state()
        with pytest.raises(ValueError, match=message):
            call(world, value)
        assert world.state() == before


# seconds --------------------------------------------------------------------------------------------------------------

NO_SECONDS: list[Any] = [float("nan"), np.float32("nan"), "1", True, [1.0], 1j]


class Rows(NamedTuple):
    """A layout as a shared pool sees it."""

    fingerprint: bytes = bytes(16)
    slot_bytes: int = 4096
    num_groups: int = 1


def tier() -> MemoryTier:
    return MemoryTier(1 << 16)


SECONDS: dict[str, Call] = {
    "CacheJob.wait timeout": lambda world, value: world.cache.load(keys([]), [], after=NO_WAIT).wait(value),
    "ChainedLoad.wait timeout": lambda world, value: world.chained.wait(value),
    "Device.close timeout": lambda world, value: world.device.close(value),
    "Promotion.wait timeout": lambda world, value: world.promotion.wait(value),
    "Job.wait timeout": lambda world, value: world.sharded.load([], [], after=NO_WAIT).wait(value),
    "Lease.wait timeout": lambda world, value: world.cache.acquire([]).wait(value),
    "OffloadEngine.close timeout": lambda world, value: world.engine.close(value),
    "OffloadEngine.drain timeout": lambda world, value: world.engine.drain(value),
    "ShardedEngine.close timeout": lambda world, value: world.sharded.close(value),
    "ShardedEngine.drain timeout": lambda world, value: world.sharded.drain(value),
    "SharedPool.attach answer_seconds": lambda _, value: SharedPool.attach(
        "/nowhere", Rows(), identity="x", answer_seconds=value
    ),
    "SharedPool.attach timeout": lambda _, value: SharedPool.attach("/nowhere", Rows(), identity="x", timeout=value),
    "SharedPool.beside timeout": lambda _, value: SharedPool.beside("/nowhere", "e", 1, timeout=value),
    "SharedSlots.receive timeout": lambda _, value: SharedSlots.receive("nobody offers this", timeout=value),
    "Stream.synchronize timeout": lambda world, value: _stream(world, value),
    "TierFaults longest_delay": lambda _, value: TierFaults(longest_delay=value),
    "TierJob.wait timeout": lambda _, value: TierJob([]).wait(value),
    "BlockCache hung": lambda world, value: BlockCache(world.engine, tiers=[tier()], hung=value),
    "BlockCache prefill_tokens_per_second": lambda world, value: BlockCache(
        world.engine, tiers=[tier()], prefill_tokens_per_second=value
    ),
    "BlockCache.close timeout": lambda world, value: world.tiered.close(value),
    "BlockCache.drain timeout": lambda world, value: world.tiered.drain(value),
    "BlockCache.fetch deadline": lambda world, value: world.tiered.fetch(keys([0]), [0], after=NO_WAIT, deadline=value),
    "FetchJob.wait timeout": lambda world, value: world.fetched.wait(value),
    "open_cache prefill_tokens_per_second": lambda world, value: kvoffload.open_cache(
        world.layout, pool_bytes=1 << 14, tiers=[tier()], prefill_tokens_per_second=value
    ),
    "BlockCache.promote deadline": lambda world, value: world.tiered.promote(keys([0]), deadline=value),
    "CacheIndex hung": lambda _, value: CacheIndex(4, pools=[aligned(4)], tiers=[tier()], layout=None, hung=value),
    "CacheIndex seconds_per_key": lambda _, value: CacheIndex(
        4, pools=[aligned(4)], tiers=[tier()], layout=None, seconds_per_key=value
    ),
    "CacheIndex.close timeout": lambda world, value: world.below.close(value),
    "CacheIndex.drain timeout": lambda world, value: world.below.drain(value),
    "CacheIndex.promote deadline": lambda world, value: world.below.promote(keys([0]), deadline=value),
    "check_clean_close timeout": lambda world, value: check_clean_close(world.device, timeout=value),
    "check_tier timeout": lambda _, value: check_tier(tier, timeout=value),
    "fuzz_tier timeout": lambda _, value: fuzz_tier(tier(), timeout=value),
}
OTHERS = {  # constructors that tests/tiers has, what only tiers and engines call, and the simulated driver
    *("MooncakeTier timeout", "ObjectStoreTier timeout", "ValkeyTier expiry", "ValkeyTier timeout"),
    *("Device.wait_lifecycle timeout", "TierJob deadline", "TierFaults delay", "Faults.delay seconds"),
}


def _stream(world: World, value: Any) -> None:
    with world.device.stream() as stream:
        stream.synchronize(value)


@pytest.mark.parametrize("name", SECONDS)
def test_what_are_no_seconds_is_refused(world: World, name: str) -> None:
    """A NaN, too: every comparison with one is false, so a wait would never time out."""
    refuse(world, SECONDS[name], NO_SECONDS, f"^{name.split()[-1]} must be .*, got ")


def test_a_tier_waits_for_seconds_alone() -> None:
    with_pool = tier()
    with_pool.attach([aligned(4)], None)
    for value in NO_SECONDS:
        for call in (with_pool.drain, with_pool.close):
            with pytest.raises(ValueError, match=r"^timeout must be a number of seconds, got "):
                call(value)
    assert with_pool.drain(float("inf"))
    assert with_pool.close(float("inf"))


def test_every_call_that_takes_seconds_is_in_the_table() -> None:
    words = ("timeout", "deadline", "hung", "second", "expiry", "delay")
    calls = public_calls().items()
    found = {
        f"{name} {each.name}" for name, (_, given) in calls for each in given if any(w in each.name for w in words)
    }
    assert found == SECONDS.keys() | OTHERS


# True and False -------------------------------------------------------------------------------------------------------

NO_FLAGS = [0, 1, None, "no", "", np.True_, np.array([False])]

FLAGS: dict[str, Call] = {
    "BlockCache.acquire pending": lambda world, value: world.cache.acquire(keys([0]), pending=value),
    "BlockCache.load pending": lambda world, value: world.cache.load(keys([0]), [1], after=NO_WAIT, pending=value),
    "BlockCache.reserve all_or_nothing": lambda world, value: world.cache.reserve(keys([1]), all_or_nothing=value),
    "BlockCache.store all_or_nothing": lambda world, value: world.cache.store(
        keys([1]), [1], after=NO_WAIT, all_or_nothing=value
    ),
    "CacheIndex.acquire pending": lambda world, value: world.index.acquire(keys([0]), pending=value),
    "CacheIndex.reserve all_or_nothing": lambda world, value: world.index.reserve(keys([1]), all_or_nothing=value),
    "DiskTier direct": lambda _, value: disk(direct=value),
    "DiskTier read_only": lambda _, value: disk(read_only=value),
    "DiskTier reset": lambda _, value: disk(reset=value),
    "HostMemory registered": lambda _, value: HostMemory(
        address=1 << 20, num_slots=1, slot_stride=4096, registered=value
    ),
    "HostMemory.of_buffer registered": lambda _, value: HostMemory.of_buffer(
        aligned(1), num_slots=1, slot_stride=4096, registered=value
    ),
    "KVLayout on_default_stream": lambda world, value: KVLayout(
        [list(world.layout.groups[0].planes)], on_default_stream=value
    ),
    "OffloadEngine.load urgent": lambda world, value: world.engine.load([0], [1], after=NO_WAIT, urgent=value),
    "OffloadEngine.load_groups urgent": lambda world, value: world.engine.load_groups([], after=NO_WAIT, urgent=value),
    "OffloadEngine.submit urgent": lambda world, value: world.engine.submit("load", [0], [0], urgent=value),
    "ShardedEngine.load urgent": lambda world, value: world.sharded.load([0], [1], after=NO_WAIT, urgent=value),
    "ShardedEngine.load_groups urgent": lambda world, value: world.sharded.load_groups([], urgent=value),
    "ShardedEngine.submit urgent": lambda world, value: world.sharded.submit("load", [0], [0], urgent=value),
    "ValkeyConnection tls": lambda _, value: ValkeyConnection(tls=value),
    "CacheIndex.promote counted": lambda world, value: world.below.promote(keys([0]), counted=value),
    "BlockCache.clear below": lambda world, value: world.tiered.clear(below=value),
    "BlockCache.promote counted": lambda world, value: world.tiered.promote(keys([0]), counted=value),
    "BlockCache.fetch counted": lambda world, value: world.tiered.fetch(keys([0]), [0], counted=value),
    "BlockCache.remove below": lambda world, value: world.tiered.remove(keys([0]), below=value),
    "CacheIndex.clear below": lambda world, value: world.below.clear(below=value),
    "CacheIndex.remove below": lambda world, value: world.below.remove(keys([0]), below=value),
}
NOT_CHECKED = {  # between the library's own classes, said by who implements a tier, or of no consequence
    "SharedPool.tell keep",
    *("RemoteTier durable", "TierCapabilities durable", "TierCapabilities local_index", "TierCapabilities shared"),
    "TierCapabilities pins_pool",
    *("ValkeyTier cluster", "Prefix declines"),
    *("Faults.fail_call after", "Faults.fail_nth after", "fuzz_tier lossless"),
    "OwnedCache adopt",  # needs JAX: tests/jax/test_jax_trees.py
}


def disk(**options: Any) -> DiskTier:
    return DiskTier(Path("/nowhere"), nbytes=1 << 20, identity="x", **options)


@pytest.mark.parametrize("name", FLAGS)
def test_what_is_neither_true_nor_false_is_refused(world: World, name: str) -> None:
    refuse(world, FLAGS[name], NO_FLAGS, f"^{name.split()[-1]} must be True or False, got ")


def test_every_flag_is_in_the_table() -> None:
    calls = public_calls().items()
    found = {f"{name} {each.name}" for name, (_, given) in calls for each in given if each.annotation == "bool"}
    assert found == FLAGS.keys() | NOT_CHECKED


# engines, tiers, names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [None, 7, "engine", object(), OffloadEngine], ids=lambda junk: type(junk).__name__)
def test_a_cache_over_what_is_no_engine_is_refused(junk: Any) -> None:
    taken = tier()
    for make in (BlockCache, partial(BlockCache, tiers=[taken])):
        with pytest.raises(TypeError, match=r"^engine must be an OffloadEngine or a ShardedEngine, got "):
            make(junk)
    taken.attach([aligned(4)], None)
    assert taken.close()


def test_a_cache_over_a_closed_engine_is_refused(world: World) -> None:
    sharded = ShardedEngine([world.layout], devices=[world.device], num_slots=4, **COPY_ENGINE_ONLY)
    single = OffloadEngine(world.layout, device=world.device, num_slots=4, **COPY_ENGINE_ONLY)
    for engine in (single, sharded):
        engine.close()
        for make in (BlockCache, partial(BlockCache, tiers=[tier()])):
            with pytest.raises(ClosedError, match=r"the engine is closed; make the cache over one that is open"):
                make(engine)


def test_a_tier_outside_of_a_list_is_refused(world: World) -> None:
    bare = tier()
    values: list[Any] = [bare, None, 7]
    with OffloadEngine(world.layout, device=world.device, num_slots=4, **COPY_ENGINE_ONLY) as engine:
        for make in (partial(BlockCache, engine), partial(CacheIndex, 4, pools=[aligned(4)], layout=None)):
            for value in values:
                with pytest.raises(TypeError, match=r"^tiers must be a list, even for one tier: tiers=\[tier\], got "):
                    make(tiers=value)
        with closing(BlockCache(engine, tiers=[bare])) as cache:
            assert cache.capacity == 4


@pytest.mark.parametrize("name", [1, None, b"name", ["name"]], ids=repr)
def test_an_offer_without_a_name_is_refused(name: Any) -> None:
    with SharedSlots(1, 4096) as slots:
        for call in (slots.offer, SharedSlots.receive):
            with pytest.raises(TypeError, match=r"^name must be a string, got "):
                call(name)
        with pytest.raises(TypeError, match=r"^note must be a string, got "):
            slots.offer("a name of this test's", note=name)
        assert "mapped" in repr(slots), "nothing is offered"


@pytest.mark.parametrize("shape", [b"1", bytearray(b"12"), "1", "ab"], ids=repr)
def test_a_shape_of_characters_is_refused(device: kvoffload.Device, shape: Any) -> None:
    with pytest.raises(ValueError, match=r"^shape must be a sequence of positive integers, got "):
        device.empty(shape, "uint8")
    assert device.simulator.faults.call_count["cuMemAlloc"] == 0


@pytest.mark.parametrize("dtype", [float("nan"), True, 1, np.float32(1.0), 2j], ids=repr)
def test_a_number_is_no_dtype(world: World, dtype: Any) -> None:
    planes = list(world.layout.groups[0].planes)
    calls = (lambda: KVLayout([planes], dtype=dtype), lambda: world.device.empty((1, 2), dtype))
    for call in calls:
        with pytest.raises(LayoutError, match=r"^dtype must be the type of one element, .*, got "):
            call()


# what Python says -----------------------------------------------------------------------------------------------------


def test_an_unknown_argument_names_the_class_that_was_called() -> None:
    with pytest.raises(TypeError, match=r"^OffloadEngine\.__init__\(\) got an unexpected keyword argument 'num_slot'"):
        OffloadEngine(num_slot=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^ShardedEngine\.__init__\(\) got an unexpected keyword argument 'num_slot'"):
        ShardedEngine(num_slot=8)  # type: ignore[call-arg]


def test_every_call_has_a_public_name_in_errors() -> None:
    calls = public_calls()
    public = {name.partition(".")[0] for name in calls} | {"Waitable", "KeyCache", "Engine"}  # of jobs, caches, engines
    for name, (function, given) in calls.items():
        called: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
        owner = called.__qualname__.partition(".")[0]  # "object" of a named tuple, whose `__new__` names it
        assert owner in {*public, "object"} or not given, f"an error of {name}() says {called.__qualname__}()"

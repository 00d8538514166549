"""Bad arguments of every public call of a kind: the message names the argument and the value, and nothing has happened.

What a call is refused for alone is tested where the call is.
"""

from __future__ import annotations

import inspect
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
    below: CacheIndex
    promotion: Promotion
    chained: ChainedLoad
    fetched: FetchJob
    stream: kvoffload.Stream

    @property
    def engine(self) -> OffloadEngine:
        return self.cache.engine

    def state(self) -> tuple[object, ...]:
        """What a refused call leaves as it was."""
        counted = self.cache.statistics(), self.tiered.statistics(), self.below.statistics()
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
        cache = BlockCache(engines[0])
        for each in (cache, tiered):
            each.store(keys([0]), [0], after=NO_WAIT).wait(10)
        promotion = stack.enter_context(tiered.promote(keys([0])))
        chained = promotion.load([1], after=NO_WAIT)
        chained.wait(10)
        fetched = cache.fetch(keys([0]), [1], after=NO_WAIT)
        fetched.wait(10)
        below.reserve(keys([0])).commit()
        stream = stack.enter_context(device.stream())
        made = World(device, layout, cache, tiered, sharded, below, promotion, chained, fetched, stream)
        yield made
        made.cache.load(keys([0]), [1], after=NO_WAIT).wait(10)
        made.tiered.load(keys([0]), [1], after=NO_WAIT).wait(10)
        made.sharded.store([0], [0], after=NO_WAIT).wait(10)


class Rows(NamedTuple):
    """A layout as a shared pool sees it."""

    fingerprint: bytes = bytes(16)
    slot_bytes: int = 4096
    num_groups: int = 1


def tier() -> MemoryTier:
    return MemoryTier(1 << 16)


OBJECTS: dict[str, Callable[[World], Any]] = {  # whose methods are called
    "BlockCache": lambda world: world.tiered,
    "CacheIndex": lambda world: world.below,
    "CacheJob": lambda world: world.cache.load(keys([]), [], after=NO_WAIT),
    "ChainedLoad": lambda world: world.chained,
    "Device": lambda world: world.device,
    "FetchJob": lambda world: world.fetched,
    "HostMemory": lambda _: HostMemory,
    "Job": lambda world: world.sharded.load([], [], after=NO_WAIT),
    "Lease": lambda world: world.cache.acquire([]),
    "OffloadEngine": lambda world: world.engine,
    "Promotion": lambda world: world.promotion,
    "ShardedEngine": lambda world: world.sharded,
    "SharedPool": lambda _: SharedPool,
    "SharedSlots": lambda _: SharedSlots,
    "Stream": lambda world: world.stream,
    "TierJob": lambda _: TierJob([]),
}
ARGUMENTS: dict[str, tuple[Any, ...]] = {  # that are right, by method, or by class and method
    "acquire": (keys([0]),),
    "attach": ("/nowhere", Rows()),
    "beside": ("/nowhere", "e", 1),
    "fetch": (keys([0]), [0]),
    "load": ([0], [1]),
    "BlockCache.load": (keys([0]), [1]),
    "load_groups": ([],),
    "of_buffer": (aligned(1),),
    "promote": (keys([0]),),
    "receive": ("nobody offers this",),
    "remove": (keys([0]),),
    "reserve": (keys([1]),),
    "save": ("/nowhere/s", [1]),
    "store": (keys([1]), [1]),
    "submit": ("load", [0], [0]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "SharedPool.attach": {"identity": "x"},
    "BlockCache.save": {"salt": "", "identity": {"model": "m"}},
    "HostMemory.of_buffer": {"num_slots": 1, "slot_stride": 4096},
}
CALLS: dict[str, Callable[[World], Callable[..., object]]] = {  # of functions and constructors
    "BlockCache": lambda world: partial(BlockCache, world.engine, tiers=[tier()]),
    "CacheIndex": lambda _: partial(CacheIndex, 4, pools=[aligned(4)], tiers=[tier()], layout=None),
    "DiskTier": lambda _: partial(DiskTier, Path("/nowhere"), nbytes=1 << 20, identity="x"),
    "HostMemory": lambda _: partial(HostMemory, address=1 << 20, num_slots=1, slot_stride=4096),
    "KVLayout": lambda world: partial(KVLayout, [list(world.layout.groups[0].planes)]),
    "TierFaults": lambda _: TierFaults,
    "ValkeyConnection": lambda _: ValkeyConnection,
    "check_clean_close": lambda world: partial(check_clean_close, world.device),
    "check_tier": lambda _: partial(check_tier, tier),
    "fuzz_tier": lambda _: partial(fuzz_tier, tier()),
    "open_cache": lambda world: partial(kvoffload.open_cache, world.layout, pool_bytes=1 << 14, tiers=[tier()]),
}


def refuse(world: World, named: str, values: list[Any], message: str) -> None:
    """Make the call `named`, "Class.method argument", with each of these values of the argument."""
    call, argument = named.split()
    owner, _, method = call.partition(".")
    if method:
        function = getattr(OBJECTS[owner](world), method)
        given = ARGUMENTS.get(call, ARGUMENTS.get(method, ()))
        function = partial(function, *given, **OPTIONS.get(call, {}))
    else:
        function = CALLS[call](world)
    for value in values:
        before = world.state()
        with pytest.raises(ValueError, match=f"^{argument} must be {message}, got "):
            function(**{argument: value})
        assert world.state() == before


def arguments(which: Callable[[inspect.Parameter], bool]) -> set[str]:
    """Those of all public calls, as "Class.method argument"."""
    return {f"{name} {each.name}" for name, (_, given) in public_calls().items() for each in given if which(each)}


# seconds --------------------------------------------------------------------------------------------------------------

NO_SECONDS: list[Any] = [float("nan"), np.float32("nan"), "1", True, [1.0], 1j]
WORDS = ("timeout", "deadline", "hung", "second", "expiry", "delay")
SECONDS = arguments(lambda each: any(word in each.name for word in WORDS))
OTHER_SECONDS = {  # of constructors that tests/tiers has, of what only tiers and engines call, of the simulated driver
    *("MooncakeTier timeout", "ObjectStoreTier timeout", "ValkeyTier expiry", "ValkeyTier timeout"),
    *("Device.wait_lifecycle timeout", "TierJob deadline", "TierFaults delay", "Faults.delay seconds"),
}


@pytest.mark.parametrize("named", sorted(SECONDS - OTHER_SECONDS))
def test_what_are_no_seconds_is_refused(world: World, named: str) -> None:
    """A NaN, too: every comparison with one is false, so a wait would never time out."""
    refuse(world, named, NO_SECONDS, ".*")


def test_a_tier_waits_for_seconds_alone() -> None:
    with_pool = tier()
    with_pool.attach([aligned(4)], None)
    for value in NO_SECONDS:
        for call in (with_pool.drain, with_pool.close):
            with pytest.raises(ValueError, match=r"^timeout must be a number of seconds, got "):
                call(value)
    assert with_pool.drain(float("inf"))
    assert with_pool.close(float("inf"))


# True and False -------------------------------------------------------------------------------------------------------

NO_FLAGS: list[Any] = [0, 1, None, "no", "", np.True_, np.array([False])]
FLAGS = arguments(lambda each: each.annotation == "bool")
NOT_CHECKED = {  # between the library's own classes, said by who implements a tier, or of no consequence
    *("RemoteTier durable", "TierCapabilities durable", "TierCapabilities local_index", "TierCapabilities shared"),
    "TierCapabilities pins_pool",
    *("ValkeyTier cluster", "Prefix declines"),
    *("Faults.fail_call after", "Faults.fail_nth after", "fuzz_tier lossless"),
    "OwnedCache adopt",  # needs JAX: tests/jax/test_jax_trees.py
}


@pytest.mark.parametrize("named", sorted(FLAGS - NOT_CHECKED))
def test_what_is_neither_true_nor_false_is_refused(world: World, named: str) -> None:
    refuse(world, named, NO_FLAGS, "True or False")


def test_what_is_left_out_is_there() -> None:
    assert OTHER_SECONDS <= SECONDS
    assert NOT_CHECKED <= FLAGS


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

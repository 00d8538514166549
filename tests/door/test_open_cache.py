"""`open_cache`: what it makes of arrays, what it owns and closes, what it refuses."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from doors import AXES, BLOCKS, KEY_BYTES, SHAPE, Host, host, tokens
from helpers import simulated
from interrupts import interrupt_at
from seeds import rest_long
from tier_classes import DictTier, GatedTier
from tiering import until

import kvoffload
from kvoffload import (
    NO_WAIT,
    CacheEvent,
    CapacityError,
    ClosedError,
    KVLayout,
    LayoutError,
    OffloadEngine,
    door,
)
from kvoffload.cache.tiering.tier_manager import TierManager
from kvoffload.testing import FaultyTier, SimulatedDriver, leak_check

SECONDS = 20.0
IDS = list(range(4))


def on_disk(folder: Path, **more: Any) -> dict[str, Any]:
    return {"disk": folder / "kv", "disk_bytes": 1 << 20, "identity": "model@1"} | more


def turn(there: Host, cache: Any, number: int) -> int:
    """A request of four keys: fetch what there is, compute the rest, keep all. Returns the hits."""
    keys = cache.keys(tokens(number), salt="")
    for block in IDS:
        there.write(block, 250)
    job = cache.fetch(keys, IDS, after=NO_WAIT)
    hits = int(job.wait(SECONDS))
    assert all(there.holds(block, 10 * number + block) for block in IDS[:hits])
    for block in IDS[hits:]:
        there.write(block, 10 * number + block)
    cache.keep(keys, IDS, after=NO_WAIT).wait(SECONDS)
    return hits


def test_a_tree_of_arrays_a_request_and_the_next_one() -> None:
    with host() as there, kvoffload.open_cache(there.arrays, axes=AXES, pool_bytes=8 * KEY_BYTES) as cache:
        assert cache.capacity == 8
        assert [turn(there, cache, 1), turn(there, cache, 2), turn(there, cache, 1)] == [0, 0, 4]
        statistics = cache.statistics()
        assert (statistics.lookups, statistics.hits, statistics.loaded, statistics.stored) == (12, 4, 4, 8)
        layout = cache.engine.layout
        assert [plane.address for plane in layout.groups[0].planes] == [
            array.address + plane * array.nbytes // 2 for array in there.each for plane in range(2)
        ]
        assert (layout.tokens_per_block, layout.block_axes, layout.dtype) == (4, ("tokens", "head"), "uint8")


def test_arrays_by_their_axes() -> None:
    """The planes are those of `from_arrays` and `from_stacked`, and so are the keys."""
    with simulated() as device:
        array = device.empty((16, 2, 4, 8), "bfloat16")
        named = kvoffload.open_cache(array, axes=("blocks", "planes", "tokens", "head"), pool_bytes=1 << 16)
        layout = KVLayout.from_stacked(
            array, plane_axis=1, block_axis=0, tokens_per_block=4, block_axes=("tokens", "head")
        )
        assert named.engine.layout.fingerprint == layout.fingerprint
        assert named.engine.layout.groups[0].planes == layout.groups[0].planes
        flat = [device.empty((16, 4, 8), "bfloat16") for _ in range(3)]
        several = kvoffload.open_cache(
            (flat[0], [flat[1], (flat[2],)]), axes=["blocks", "tokens", "head"], blocks_per_slot=2, pool_bytes=1 << 16
        )
        layout = KVLayout.from_arrays(flat, tokens_per_block=4, block_axes=("tokens", "head"), blocks_per_slot=2)
        assert several.engine.layout.fingerprint == layout.fingerprint
        assert several.engine.layout.groups[0].planes == layout.groups[0].planes
        assert named.close()
        assert several.close()


def test_a_layout_of_several_groups() -> None:
    with simulated() as device:
        planes = [device.allocate_planes(2, block_bytes=64 << group, num_blocks=16) for group in range(3)]
        layout = KVLayout(planes, dtype="uint8", tokens_per_block=4, block_axes=("tokens",))
        with kvoffload.open_cache(layout, pool_bytes=10 * 3 * 4096 + 4095) as cache:
            assert (cache.capacity, cache.engine.num_slots) == (10, 30)
            keys = cache.keys(tokens(1), salt="")
            cache.keep(keys, [IDS] * 3).wait(SECONDS)
            assert cache.fetch(keys, [[4, 5, 6, 7]] * 3).wait(SECONDS) == 4


def test_several_devices() -> None:
    driver = SimulatedDriver(device_count=2)
    devices = [kvoffload.open_device(index, backend=driver) for index in range(2)]
    layout = kvoffload.ShardedLayout(
        [
            KVLayout(
                [device.allocate_planes(2, block_bytes=64, num_blocks=16)],
                dtype="uint8",
                tokens_per_block=4,
                block_axes=("tokens",),
            )
            for device in devices
        ]
    )
    with kvoffload.open_cache(layout, device=devices, pool_bytes=10 * 2 * 4096) as cache:
        assert (cache.capacity, cache.engine.devices) == (10, tuple(devices))
        keys = cache.keys(tokens(1), salt="")
        cache.keep(keys, IDS, after=NO_WAIT).wait(SECONDS)
        job = cache.fetch(keys, IDS, after=NO_WAIT)
        with devices[0].stream() as first, devices[1].stream() as second:
            job.order_before([first, second])
        assert job.hits == 4
        job.wait(SECONDS)
    with pytest.raises(ValueError, match="device must be the open devices of the layout, 2 of them"):
        kvoffload.open_cache(layout, device=devices[:1], pool_bytes=1 << 20)
    for device in devices:
        device.close()


def test_an_object_with_a_layout_and_devices() -> None:
    """As `kvoffload.jax.OwnedCache` has them."""

    class Owned:
        def __init__(self, device: kvoffload.Device) -> None:
            planes = device.allocate_blocks(16, planes=2, block_bytes=64)
            self.layout = KVLayout([planes], dtype="uint8", tokens_per_block=4, block_axes=("tokens",))
            self.devices = (device,)

    with simulated() as device, kvoffload.open_cache(Owned(device), pool_bytes=1 << 16) as cache:
        assert cache.engine.device is device


# what it owns ---------------------------------------------------------------------------------------------------------


def test_closing_closes_what_it_has_made_and_no_more(tmp_path: Path) -> None:
    with host() as there:
        more = DictTier()
        with leak_check(there.device):
            cache = kvoffload.open_cache(
                there.arrays, axes=AXES, pool_bytes=8 * KEY_BYTES, tiers=[more], **on_disk(tmp_path)
            )
            turn(there, cache, 1)
            assert [each.name for each in cache.tier_statistics()] == ["disk", "dict"]
            assert cache.close()
            assert cache.close()
            assert cache.engine.closed
            assert more.released == 1
            assert not there.device.closed
            keys = cache.keys(tokens(1), salt="")
            for call in (cache.fetch, cache.keep):
                with pytest.raises(ClosedError, match="closed"):
                    call(keys, IDS, after=NO_WAIT)
            del cache


def test_closing_writes_what_the_disk_has_not_got(tmp_path: Path) -> None:
    with host() as there:
        for hits in (0, 4):
            with kvoffload.open_cache(there.arrays, axes=AXES, pool_bytes=80 * KEY_BYTES, **on_disk(tmp_path)) as cache:
                assert [turn(there, cache, number) for number in range(1, 16)] == [hits] * 15


def test_keys_whose_stores_are_told_late_are_written_no_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    post = TierManager.post

    def late(manager: TierManager, message: Any) -> None:
        if isinstance(message, CacheEvent) and message.kind == "stored":
            time.sleep(0.02)  # its request has ended meanwhile
        post(manager, message)

    monkeypatch.setattr(TierManager, "post", late)
    with host() as there:
        for hits in (0, 4):
            options = on_disk(tmp_path, prefill_tokens_per_second=1.0)
            with kvoffload.open_cache(there.arrays, axes=AXES, pool_bytes=80 * KEY_BYTES, **options) as cache:
                assert [turn(there, cache, number) for number in range(1, 6)] == [hits] * 5


def test_closing_without_time_gives_up_what_a_tier_has_not_got() -> None:
    slow = GatedTier()
    with host() as there:
        cache = kvoffload.open_cache(there.arrays, axes=AXES, pool_bytes=80 * KEY_BYTES, tiers=[slow])
        turn(there, cache, 1)
        turn(there, cache, 2)
        until(lambda: bool(slow.begun))
        cache.close(0)
        slow.permit()
        until(cache.close)
        assert [name for name, _ in slow.begun] == ["write"]


def test_a_device_that_it_has_opened_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimulatedDriver()
    with kvoffload.open_device(backend=driver) as other:
        array = other.empty(SHAPE, "uint8")
        monkeypatch.setattr(door, "open_device", lambda index: kvoffload.open_device(index, backend=driver))
        with kvoffload.open_cache(array, axes=AXES, pool_bytes=1 << 16, device=0) as cache:
            device = cache.engine.device
            assert device is not other
        assert device.closed
        assert not other.closed


def test_an_array_that_does_not_say_where_it_is_is_on_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has no DLPack, but CUDA's array interface."""
    driver, asked = SimulatedDriver(), list[int]()

    def opened(index: int) -> kvoffload.Device:
        asked.append(index)
        return kvoffload.open_device(index, backend=driver)

    monkeypatch.setattr(door, "open_device", opened)
    with kvoffload.open_device(backend=driver) as other:
        array = other.empty(SHAPE, "uint8")
        foreign = SimpleNamespace(__cuda_array_interface__=array.__cuda_array_interface__ | {"stream": None})
        with kvoffload.open_cache(foreign, axes=AXES, pool_bytes=1 << 16):
            assert asked == [0]


def test_a_disk_is_read_by_the_next_program(tmp_path: Path) -> None:
    with host() as there:
        for hits in (0, 4):
            with kvoffload.open_cache(there.arrays, axes=AXES, pool_bytes=8 * KEY_BYTES, **on_disk(tmp_path)) as cache:
                assert turn(there, cache, 1) == hits
                assert cache.drain(SECONDS)
        with pytest.raises(LayoutError, match="identity"), leak_check(there.device):
            kvoffload.open_cache(there.arrays, axes=AXES, pool_bytes=1 << 16, **on_disk(tmp_path, identity="model@2"))


def test_a_hanging_tier_does_not_keep_the_engine_open() -> None:
    tier = FaultyTier()
    with host() as there:
        cache = kvoffload.open_cache(there.arrays, axes=AXES, pool_bytes=8 * KEY_BYTES, tiers=[tier])
        turn(there, cache, 1)
        assert cache.drain(SECONDS)
        cache.clear(below=False)
        tier.hang_all()
        job = cache.fetch(cache.keys(tokens(1), salt=""), IDS, after=NO_WAIT, deadline=None)
        until(lambda: tier.hung, "the call of the tier")
        assert not cache.close(0.1)
        assert cache.engine.closed
        assert job.wait(SECONDS) == 0
        tier.heal()
        until(lambda: cache.close(0.1), "the end of the tier's call")


def test_transfers_in_flight_end_before_the_engine_is_closed() -> None:
    with host() as there:
        cache = kvoffload.open_cache(there.arrays, axes=AXES, pool_bytes=8 * KEY_BYTES)
        turn(there, cache, 1)
        there.write(0, 99)
        job = cache.fetch(cache.keys(tokens(1), salt=""), IDS, after=NO_WAIT)
        assert cache.close()
        assert job.done
        assert job.wait() == 4
        assert there.holds(0, 10)


@pytest.mark.parametrize("call", ["cuStreamCreateWithPriority", "cuMemHostRegister"])
def test_nothing_stays_open_if_a_driver_call_fails(call: str, tmp_path: Path) -> None:
    with host() as there, leak_check(there.device):
        there.device.simulator.faults.fail_call(call)
        with pytest.raises(kvoffload.KVOffloadError):
            kvoffload.open_cache(there.arrays, axes=AXES, pool_bytes=1 << 16, **on_disk(tmp_path))


@pytest.mark.parametrize("first", rest_long(range(1, 9), 1))
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # an engine whose constructor did not get to return it
def test_nothing_stays_open_if_it_is_interrupted(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At many points, with a device of its own. Each call has a disk of its own: a file that an interrupted `os.open`
    returned stays open, and locked.
    """
    with host() as there:
        driver = there.device.simulator
        monkeypatch.setattr(door, "open_device", lambda index: kvoffload.open_device(index, backend=driver))
        before, number = driver.leaks(), first
        while True:
            kept: list[Any] = []

            options = on_disk(tmp_path, disk=tmp_path / str(number), device=0)

            def open_one(kept: list[Any] = kept, options: dict[str, Any] = options) -> None:
                kept.append(kvoffload.open_cache(there.arrays, axes=AXES, pool_bytes=1 << 16, **options))

            outcome = interrupt_at(number, open_one)
            for cache in kept:
                cache.close()
            kept.clear()
            gc.collect()
            kvoffload.open_device(backend=driver).close()  # which releases devices that are garbage
            after = driver.leaks()
            grown = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
            assert sum(grown.values()) <= 1, f"{outcome}: {grown}"  # the handle that the interrupted call returned
            if outcome.point is None:
                assert not outcome.raised, outcome
                break
            before, number = after, number + 8 + number // 8
        assert number > 200


# what it refuses ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[type[Exception], str, Callable[[Host], dict[str, Any]]]] = {
    "no axes": (LayoutError, r"axes must name each axis .*\"blocks\".*, got \(\)", lambda _: {"axes": None}),
    "axes without blocks": (LayoutError, "axes must name .* got", lambda _: {"axes": ("planes", "x", "y", "z")}),
    "an axis twice": (LayoutError, "axes must name .* got", lambda _: {"axes": ("blocks", "x", "x", "y")}),
    "axes as text": (LayoutError, "axes must name .* got 'blocks'", lambda _: {"axes": "blocks"}),
    "too few axes": (LayoutError, r"arrays\['k'\]\[0\] has shape .* axes names 2", lambda _: {"axes": AXES[:2]}),
    "arrays in host memory": (
        LayoutError,
        r"arrays\[0\] is not in GPU memory",
        lambda _: {"arrays": [np.zeros(SHAPE, np.uint8)]},
    ),
    "no array": (LayoutError, r"arrays\['k'\] must be an array in GPU memory", lambda _: {"arrays": {"k": 3}}),
    "nothing": (LayoutError, r"arrays must be an array in GPU memory, .* got \[\]", lambda _: {"arrays": []}),
    "axes that are no names": (LayoutError, r"axes must name .* got 5", lambda _: {"axes": 5}),
    "axes without text": (LayoutError, r"axes must name .*\['blocks', \[\]\]", lambda _: {"axes": ["blocks", []]}),
    "no size": (ValueError, "pool_bytes .or pool. must be .* got None", lambda _: {"pool_bytes": None}),
    "more than any machine has": (CapacityError, "pool_bytes must be at most", lambda _: {"pool_bytes": 10**30}),
    "half a slot": (LayoutError, "blocks_per_slot .* 1.5", lambda _: {"blocks_per_slot": 1.5}),
    "a disk that is no path": (
        TypeError,
        r"path \(disk of open_cache\) must be a path, or a list of paths, got 3",
        lambda _: {"disk": 3, "disk_bytes": 1 << 20, "identity": "m"},
    ),
    "a disk of no size": (
        ValueError,
        "disk_bytes must be an integer .* got 'x'",
        lambda _: {"disk": "x", "disk_bytes": "x", "identity": "m"},
    ),
    "an identity that is no text": (
        TypeError,
        "identity must be a string .* got 0",
        lambda _: {"disk": "x", "disk_bytes": 1 << 20, "identity": 0},
    ),
    "other tokens": (
        LayoutError,
        "a block of all arrays must hold as many tokens, got .4, 8.",
        lambda there: {"arrays": [there.each[0], there.device.empty((2, BLOCKS, 8, 4), "uint8")]},
    ),
    "a small pool": (CapacityError, "pool_bytes=4095 holds no slot of 4096 bytes", lambda _: {"pool_bytes": 4095}),
    "a disk without size": (
        ValueError,
        "disk needs disk_bytes, .* identity, .* got disk='x', disk_bytes=0, identity='m'",
        lambda _: {"disk": "x", "identity": "m"},
    ),
    "a disk without identity": (
        ValueError,
        "disk needs disk_bytes, .* identity=None",
        lambda _: {"disk": "x", "disk_bytes": 1 << 20},
    ),
    "a size without disk": (ValueError, "these need disk, a path.* got disk=None", lambda _: {"disk_bytes": 1}),
    "two devices": (
        ValueError,
        "device must be the open devices of the layout, 1 of them",
        lambda there: {"device": [there.device, there.device]},
    ),
    "no policy": (ValueError, "policy", lambda _: {"policy": "none such"}),
    "no tier": (TypeError, r"tiers\[0\] must be a Tier", lambda _: {"tiers": [3]}),
    "no speed, and no tiers": (
        ValueError,
        "prefill_tokens_per_second must be above 0, or None, got 'fast'",
        lambda _: {"prefill_tokens_per_second": "fast"},
    ),
    "endless speed": (
        ValueError,
        "prefill_tokens_per_second must be above 0, or None, got inf",
        lambda _: {"prefill_tokens_per_second": float("inf")},
    ),
    "no tenants": (TypeError, "tenants", lambda _: {"tenants": 3}),
    "no list of tiers": (TypeError, "tiers must be a list", lambda _: {"tiers": DictTier()}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_argument_and_leaves_nothing(case: str) -> None:
    kind, text, make = REFUSED[case]
    with host() as there:
        changed = make(there)
        given = {"arrays": there.arrays, "axes": AXES, "pool_bytes": 1 << 16, **changed}
        with leak_check(there.device), pytest.raises(kind, match=text):
            kvoffload.open_cache(**given)


def test_a_layout_has_axes_of_its_own() -> None:
    with host() as there:
        layout = KVLayout.from_stacked(there.each[0], plane_axis=0, block_axis=1)
        for more in ({"axes": AXES}, {"blocks_per_slot": 2}):
            with pytest.raises(ValueError, match="axes and blocks_per_slot are for arrays"):
                kvoffload.open_cache(layout, pool_bytes=1 << 16, **more)


def test_pools_of_engines_in_bytes() -> None:
    driver = SimulatedDriver(device_count=2)
    devices = [kvoffload.open_device(index, backend=driver) for index in range(2)]
    layouts = [KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=16)]) for device in devices]
    with OffloadEngine(layouts[0], device=devices[0], pool_bytes=3 * 4096 + 1) as engine:
        assert (engine.num_slots, engine.statistics().pinned_bytes) == (3, 3 * 4096)
    with kvoffload.ShardedEngine(layouts, devices=devices, pool_bytes=3 * 8192 + 4096) as sharded:
        assert (sharded.num_slots, sharded.statistics().pinned_bytes) == (3, 3 * 8192)
    with OffloadEngine(layouts[0], device=devices[0], pool_bytes=0) as engine:
        assert engine.num_slots == 0
    for make in (
        lambda **given: OffloadEngine(layouts[0], device=devices[0], **given),
        lambda **given: kvoffload.ShardedEngine(layouts, devices=devices, **given),
    ):
        with pytest.raises(ValueError, match="pool_bytes=4096 and num_slots=1 are both given"):
            make(pool_bytes=4096, num_slots=1)
        with pytest.raises(CapacityError, match="pool_bytes=4095 holds no slot of"):
            make(pool_bytes=4095)
        for number in (-1, 1.5, "1 gig", True):
            with pytest.raises(ValueError, match=rf"pool_bytes must be .* got {number!r}"):
                make(pool_bytes=number)
        with pytest.raises(CapacityError, match="pool_bytes must be at most"):
            make(pool_bytes=1 << 60)
    sizes: list[dict[str, Any]] = [{"pool_bytes": 1 << 16}, {"num_slots": 2}, {}]
    none: list[Any] = [None, 3, "layout", [layouts[0]], object()]
    for wrong in none:
        for size in sizes:
            with leak_check(devices[0]), pytest.raises(TypeError, match="layout must be a KVLayout, got"):
                OffloadEngine(wrong, device=devices[0], **size)
            with leak_check(devices[0]), pytest.raises(TypeError, match=r"layouts\[0\] must be a KVLayout, got"):
                kvoffload.ShardedEngine([wrong], devices=devices[:1], **size)
    for device in devices:
        device.close()


def test_two_slots_hold_no_key_of_three_groups() -> None:
    with simulated() as device:
        planes = [device.allocate_planes(2, block_bytes=64, num_blocks=16) for _ in range(3)]
        with leak_check(device), pytest.raises(CapacityError, match="2 slots hold no key of 3 groups"):
            kvoffload.open_cache(KVLayout(planes), pool_bytes=2 * 4096)

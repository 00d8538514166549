"""`open_cache(pool=...)`: a cache over a pool that its owner serves; what it owns, closes and refuses."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from doors import AXES, KEY_BYTES, Host, host, tokens
from interrupts import interrupt_at
from seeds import rest_long
from tier_classes import DictTier
from tiering import until

import kvoffload
from kvoffload import NO_WAIT, CapacityError, KVLayout, LayoutError, Tenant, door
from kvoffload.pool import PoolOwner, SharedPool
from kvoffload.testing import SimulatedDriver, leak_check

SECONDS = 20.0
IDS = list(range(4))
NBYTES = 64 * KEY_BYTES  # of a region, which has room for fewer keys, beside its headers


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members wait for answers: on a busy machine a late one would be a miss."""
    monkeypatch.setattr(SharedPool, "attach", partial(SharedPool.attach, answer_seconds=10.0))


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[PoolOwner]:
    tenants = {"chat": Tenant(max_blocks=3)}
    with PoolOwner(tmp_path / "pool", nbytes=2 * NBYTES, region_bytes=NBYTES, tenants=tenants) as served:
        yield served


def joined(there: Host, owner: PoolOwner, **more: Any) -> Any:
    given = {"arrays": there.arrays, "axes": AXES, "pool": owner.path, "identity": "model@1"}
    return kvoffload.open_cache(**given | more)


def keep(there: Host, cache: Any, number: int) -> None:
    for block in IDS:
        there.write(block, 10 * number + block)
    keys = cache.keys(tokens(number), salt="")
    cache.keep(keys, IDS, after=NO_WAIT).wait(SECONDS)
    cache.lookup(keys)  # the owner has executed what came before, so others find the keys from now on


def fetched(there: Host, cache: Any, number: int) -> int:
    """Hits of a request, whose bytes are right."""
    for block in IDS:
        there.write(block, 250)
    hits = int(cache.fetch(cache.keys(tokens(number), salt=""), IDS, after=NO_WAIT).wait(SECONDS))
    assert all(there.holds(block, 10 * number + block) for block in IDS[:hits])
    assert all(there.holds(block, 250) for block in IDS[hits:])
    return hits


def test_what_one_cache_has_kept_another_fetches(owner: PoolOwner) -> None:
    with host(1) as one, host(2) as other, joined(one, owner) as first, joined(other, owner) as second:
        assert 55 < first.capacity == second.capacity < 64
        assert fetched(other, second, 1) == 0
        keep(one, first, 1)
        assert fetched(other, second, 1) == 4
        keep(other, second, 2)
        assert fetched(one, first, 2) == 4
        with host(3) as third, joined(third, owner, identity="model@2") as stranger:
            assert stranger.lookup(stranger.keys(tokens(1), salt="")) == 0, "another model's bytes"


def test_a_pool_that_was_attached_has_a_tenant_and_stays_its_callers(owner: PoolOwner) -> None:
    with host() as there:
        layout = KVLayout.from_tree(there.arrays, axes=AXES)
        with SharedPool.attach(owner.path, layout, identity="model@1", tenant="chat") as pool:
            with joined(there, owner, pool=pool, identity=None) as cache:
                keep(there, cache, 1)
                assert fetched(there, cache, 1) == 3, "its quota"
            assert cache.engine.closed
            assert pool.connected
            assert owner.statistics()[0]["members"] == 1


def left(owner: PoolOwner) -> None:
    until(lambda: "0 connections" in repr(owner), "the member has left")


def test_closing_closes_the_engine_and_then_leaves_the_pool(owner: PoolOwner) -> None:
    with host() as there:
        joined(there, owner).close()  # the owner has a region from now on
        left(owner)
        for _ in range(3):
            with leak_check(there.device):
                ended = used_and_closed(there, owner)
                left(owner)
            assert ended == (True, True, True, True)


def used_and_closed(there: Host, owner: PoolOwner) -> tuple[bool, ...]:
    """Nothing refers to the cache afterwards, which would keep its memory mapped."""
    cache = joined(there, owner)
    keep(there, cache, 1)
    job = cache.fetch(cache.keys(tokens(1), salt=""), IDS, after=NO_WAIT)
    return cache.close(), cache.close(), job.done, cache.engine.closed


def test_a_device_is_opened_and_closed(owner: PoolOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    with host() as there:
        driver = there.device.simulator
        monkeypatch.setattr(door, "open_device", lambda index: kvoffload.open_device(index, backend=driver))
        with joined(there, owner, device=0) as cache:
            keep(there, cache, 1)
            assert fetched(there, cache, 1) == 4
        assert cache.engine.device.closed
        assert not there.device.closed


@pytest.mark.parametrize("call", ["cuStreamCreateWithPriority", "cuMemHostRegister"])
def test_nothing_stays_open_if_a_driver_call_fails(owner: PoolOwner, call: str) -> None:
    with host() as there:
        joined(there, owner).close()
        left(owner)
        with leak_check(there.device):
            there.device.simulator.faults.fail_call(call)
            with pytest.raises((kvoffload.KVOffloadError, ValueError), match=call):
                joined(there, owner)
            left(owner)


@pytest.mark.parametrize("first", rest_long(range(1, 9), 1))
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # what an interrupted constructor did not get to return
def test_nothing_stays_open_if_it_is_interrupted(owner: PoolOwner, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At many points, with a device of its own; the owner sees each member leave."""
    with host() as there:
        driver = there.device.simulator
        monkeypatch.setattr(door, "open_device", lambda index: kvoffload.open_device(index, backend=driver))
        joined(there, owner).close()
        left(owner)
        number = first
        while True:
            kept: list[Any] = []
            before = driver.leaks() | {"files": len(os.listdir("/proc/self/fd"))}

            def open_one(kept: list[Any] = kept) -> None:
                kept.append(joined(there, owner, device=0))

            outcome = interrupt_at(number, open_one)
            for cache in kept:
                cache.close()
            kept.clear()
            gc.collect()
            kvoffload.open_device(backend=driver).close()  # which releases devices that are garbage
            left(owner)
            gc.collect()

            def grown(before: dict[str, int] = before) -> dict[str, int]:
                after = driver.leaks() | {"files": len(os.listdir("/proc/self/fd"))}
                return {
                    name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)
                }

            end = time.monotonic() + 10  # the owner's thread closes its end of a connection that never joined
            while sum(grown().values()) > 1 and time.monotonic() < end:
                time.sleep(0.01)
            assert sum(grown().values()) <= 1, f"{outcome}: {grown()}"  # the handle that the interrupted call returned
            if outcome.point is None:
                assert not outcome.raised, outcome
                break
            number += 16 + number // 8
        assert number > 200


# what it refuses ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "a pool of its own, too": (ValueError, "^pool_bytes cannot be given with pool, whose", {"pool_bytes": 1 << 16}),
    "a disk": (
        ValueError,
        "^disk and disk_bytes cannot be given with pool, .* `kvoffload pool serve --help`",
        {"disk": "x", "disk_bytes": 1 << 20},
    ),
    "tiers": (ValueError, "^tiers cannot be given with pool", {"tiers": [DictTier()]}),
    "a policy": (ValueError, "^policy cannot be given with pool", {"policy": "lru"}),
    "tenants": (ValueError, "^tenants cannot be given with pool", {"tenants": {"a": Tenant()}}),
    "a speed": (ValueError, "^prefill_tokens_per_second cannot", {"prefill_tokens_per_second": 1000.0}),
    "no identity": (ValueError, "^pool needs identity, .* got pool='.*', identity=None", {"identity": None}),
    "an identity that is no text": (TypeError, "identity", {"identity": 3}),
    "no path": (ValueError, "^pool needs identity, .* got pool=3, identity='model@1'", {"pool": 3}),
    "an unknown argument": (TypeError, r"open_cache\(\) got an unexpected .*'store_after'", {"store_after": 1}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_argument_and_leaves_nothing(owner: PoolOwner, case: str) -> None:
    kind, text, changed = REFUSED[case]
    with host() as there, leak_check(there.device), pytest.raises(kind, match=text):
        joined(there, owner, **changed)
    assert owner.statistics() == [], "no region was made"


def test_what_is_the_default_may_be_given(owner: PoolOwner) -> None:
    options: dict[str, Any] = {"policy": "prefix", "tenants": None, "prefill_tokens_per_second": None}
    with host() as there, joined(there, owner, disk=None, disk_bytes=0, tiers=[], **options) as cache:
        assert cache.capacity == owner.statistics()[0]["capacity"]


def test_a_pool_that_was_attached_has_its_identity(owner: PoolOwner) -> None:
    with host() as there:
        layout = KVLayout.from_tree(there.arrays, axes=AXES)
        with SharedPool.attach(owner.path, layout, identity="model@1") as pool:
            with leak_check(there.device), pytest.raises(ValueError, match="a SharedPool has been attached with one"):
                joined(there, owner, pool=pool)
            assert pool.connected


def test_an_engine_over_several_devices_has_no_shared_pool(owner: PoolOwner) -> None:
    driver = SimulatedDriver(device_count=2)
    devices = [kvoffload.open_device(index, backend=driver) for index in range(2)]
    layouts = [KVLayout([device.allocate_planes(2, block_bytes=64, num_blocks=16)]) for device in devices]
    with pytest.raises(LayoutError, match="a shared pool is for engines over one device each"):
        kvoffload.open_cache(kvoffload.ShardedLayout(layouts), device=devices, pool=owner.path, identity="model@1")
    for device in devices:
        device.close()


def test_a_path_without_a_socket_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not after the time that an owner is waited for, which may be starting."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(SharedPool, "attach", None)
    with host() as there:
        for path in (tmp_path / "pool", str(tmp_path / "none" / "pool"), tmp_path, tmp_path / "file"):
            with (
                leak_check(there.device),
                pytest.raises(FileNotFoundError, match=f"kvoffload pool serve {path} --bytes"),
            ):
                kvoffload.open_cache(there.arrays, axes=AXES, pool=path, identity="model@1")


def test_no_owner_at_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedPool, "attach", partial(SharedPool.attach, timeout=0.05))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left_behind:
        left_behind.bind(str(tmp_path / "pool"))
    said = "no owner answers at .*pool.*waited 0.05 seconds.*`kvoffload pool serve`"
    with host() as there, leak_check(there.device), pytest.raises(TimeoutError, match=said):
        kvoffload.open_cache(there.arrays, axes=AXES, pool=tmp_path / "pool", identity="model@1")


def test_the_home_of_a_user_is_found(owner: PoolOwner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with host() as there, joined(there, owner, pool="~/pool") as cache:
        assert cache.capacity == owner.statistics()[0]["capacity"]


def test_a_pool_with_a_cache_is_refused_by_its_name(owner: PoolOwner) -> None:
    with host() as there:
        layout = KVLayout.from_tree(there.arrays, axes=AXES)
        with SharedPool.attach(owner.path, layout, identity="model@1") as pool:
            with joined(there, owner, pool=pool, identity=None) as cache:
                with pytest.raises(CapacityError, match=r"^pool=SharedPool.* has a cache already: delete it"):
                    joined(there, owner, pool=pool, identity=None)
                keep(there, cache, 1)
                assert fetched(there, cache, 1) == 4
            del cache
            with leak_check(there.device), pytest.raises(LayoutError, match=r"the layout that the pool was attached"):
                joined(there, owner, pool=pool, identity=None, arrays=there.each[:1])

"""Shared pools at their ends: calls after `close`, slow beginnings and removals, restarts, forgotten members."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from pooling import (
    IDENTITY,
    PLANES,
    ROW_BYTES,
    SECONDS,
    SOURCES,
    Made,
    Rows,
    eventually,
    key_of,
    keys_of,
    layout_of,
    member,
    raw,
    serve,
)
from tier_classes import DictTier

import kvoffload
from kvoffload import (
    NO_WAIT,
    BlockCache,
    CacheIndex,
    LayoutError,
    MissingKeyError,
    ShardedEngine,
    ShardedLayout,
    Status,
)
from kvoffload.cache.policies import LRU, RequestPolicy
from kvoffload.pool import SharedPool, owner
from kvoffload.pool.messages import NUMBER, Operation, pack_keys
from kvoffload.pool.region import MOST_REMOVALS
from kvoffload.testing import SimulatedDriver


class Telling(LRU):
    """A policy that notes which keys are loaded, and raises in `insert` while it is to."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.loaded = list[list[bytes]]()
        self.raises = False

    def insert(self, keys: Sequence[bytes]) -> None:
        if self.raises:
            raise RuntimeError("this policy is wrong")
        super().insert(keys)

    def for_request(self, notes: dict[Any, Any]) -> RequestPolicy:
        del notes
        return self

    def load(self, keys: Sequence[bytes]) -> None:
        self.loaded.append(list(keys))
        super().load(keys)


class SlowToRemove(DictTier):
    """Removing takes longer than answers are waited for, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.removing = threading.Event(), threading.Event()

    def remove_records(self, keys: Sequence[bytes]) -> list[bool]:
        self.removing.set()
        self.go.wait(SECONDS)
        return super().remove_records(keys)


# what the owner does after its answer ---------------------------------------------------------------------------------


def test_a_load_tells_the_owners_policy_once(tmp_path: Path) -> None:
    policies = Made(Telling)

    def loaded() -> list[list[bytes]]:
        return [keys for each in policies for keys in each.loaded]

    with serve(tmp_path, 8, policy=policies) as owner, member(owner.path) as one:
        one.store(1, 2, 3)
        one.check_load(1, 2)
        assert one.hits(1) == 1  # the owner has executed what came before
        assert loaded() == [keys_of([1, 2])]
        with one.cache.open_request() as request:
            one.check_load(3, request=request)
            one.check_load(3, request=request)
            assert request.keys == (key_of(3),)
            assert one.hits(1) == 1
        assert loaded() == [keys_of([1, 2]), keys_of([3])]
        one.poison([64])
        assert one.cache.fetch(keys_of([1]), [64], after=NO_WAIT).wait(SECONDS) == 1
        assert one.hits(1) == 1
        assert loaded()[2:] == [keys_of([1])]
        reservation = one.cache.reserve(keys_of([4]))
        with pytest.raises(MissingKeyError):
            one.cache.load(keys_of([1, 4]), [64, 65], pending=True, after=NO_WAIT)  # no transfer fills it
        reservation.abort()
        assert one.hits(1) == 1
        assert len(loaded()) == 3, "a load that is refused uses no key"


def test_what_leases_hold_is_loaded_without_the_owner(tmp_path: Path) -> None:
    """Whichever of them was asked for last. What none of them has is missing, and so is what was given back."""
    with serve(tmp_path, 8) as owner, member(owner.path) as one:
        one.store(1, 2, 3, 4)
        leases = [one.cache.acquire(keys_of(numbers)) for numbers in ([1, 2], [3], [4])]
        owner.close()
        for _ in range(2):  # it has not seen that the owner has ended, and it has
            one.check_load(2, 1)
            one.check_load(3)
            one.check_load(1)
        leases[2].release()
        for numbers in ([1, 3], [4]):
            with pytest.raises(MissingKeyError):
                one.check_load(*numbers)
        leases[0].release()
        with pytest.raises(MissingKeyError):
            one.check_load(1)
        one.cache.check()


@pytest.mark.parametrize("how", ["remove", "clear", "part"])
def test_what_was_removed_is_not_loaded_without_the_owner(tmp_path: Path, how: str) -> None:
    """Though a lease holds it still: nor is it while the owner answers. What is leased afterwards is loaded."""
    with serve(tmp_path, 8) as owner, member(owner.path) as one:
        one.store(1, 2)
        lease = one.cache.acquire(keys_of([1, 2]))
        if how == "remove":
            one.cache.remove(keys_of([1]))
        elif how == "clear":
            one.cache.clear()
        else:
            one.cache._records.part(None)
        one.store(3)
        later = one.cache.acquire(keys_of([3]))
        for _ in range(2):
            with pytest.raises(MissingKeyError):
                one.check_load(1)
            one.check_load(3)
            owner.close()
        lease.release()
        later.release()
        one.cache.check()


def test_a_policy_that_raises_after_the_answer_takes_no_entry_away(tmp_path: Path, caplog: Any) -> None:
    policies = Made(Telling)
    with serve(tmp_path, 4, policy=policies) as pool, raw(pool.path) as one, raw(pool.path) as other:
        for each in policies:
            each.raises = True
        number, entries = one.reserve(keys_of([1, 2]))
        one.status([])  # the owner has executed what came before
        for each in policies:
            each.raises = False
        assert len(entries) == 2
        assert not {*other.reserve(keys_of(range(10, 14)))[1]} & {*entries}
        assert one.status(keys_of([1, 2])) == [2, 2]
        one.end(number)
        assert one.status(keys_of([1, 2])) == [1, 1]
        assert one.take(keys_of([1, 2]))[1] == entries
    assert "this policy is wrong" in caplog.text


# after close, and slow answers ----------------------------------------------------------------------------------------


def test_statistics_are_there_after_close_as_of_a_private_cache(tmp_path: Path) -> None:
    with serve(tmp_path, 8) as owner, member(owner.path) as one:
        one.store(1, 2)
        assert one.cache.statistics().resident == 2
        one.cache.close()
        one.engine.close()
        one.pool.close()
        statistics = one.cache.statistics()
        assert (statistics.stored, statistics.resident) == (2, 0)
        assert len(one.cache) == 0
        assert repr(one.cache) == f"BlockCache(0 pending, 0 leases; {one.pool})"


def test_what_a_member_cannot_have_is_refused(tmp_path: Path) -> None:
    with serve(tmp_path, 8) as owner, member(owner.path) as one:
        refused = r"tenant must be one of '', got 'b'; .* attach to a shared pool as one"
        with pytest.raises(ValueError, match=refused):
            one.cache.open_request(tenant="b")
        with pytest.raises(ValueError, match=refused):
            one.cache.hint("retain", session="a", tenant="b")
        one.cache = None  # an engine has one cache
        with pytest.raises(TypeError, match="pool must be a SharedPool, got '/a/path'"):
            BlockCache(one.engine, pool=cast(Any, "/a/path"))
        with pytest.raises(ValueError, match="with a shared pool there is no store_after"):
            BlockCache(one.engine, pool=one.pool, store_after=1)
        one.cache = BlockCache(one.engine, pool=one.pool)
        one.store(1)
        assert one.hits(1) == 1, "nothing has happened"


def test_remove_waits_for_the_owners_tiers_and_hides_nothing_meanwhile(tmp_path: Path) -> None:
    tier = SlowToRemove()
    options: dict[str, Any] = {"tiers": lambda *_: [tier], "write": "through"}
    with serve(tmp_path, 8, **options) as owner, member(owner.path, answer_seconds=0.5) as one:
        one.store(1, 2, 3)
        eventually(lambda: len(tier.store) == 3, "the tier has the keys")
        removed = list[int]()
        thread = threading.Thread(target=lambda: removed.append(one.cache.remove(keys_of([1, 2]))))
        thread.start()
        assert tier.removing.wait(SECONDS)
        end = time.monotonic() + 0.7  # longer than an answer is waited for
        while time.monotonic() < end:
            assert one.hits(3) == 1
        assert removed == []
        tier.go.set()
        thread.join()
        assert removed == [2]
        assert one.cache.status(keys_of([1, 2, 3])) == [Status.MISS, Status.MISS, Status.HIT]
        assert not tier.has_record(key_of(1))


def test_keys_are_removed_from_the_pool_alone_if_that_is_asked_for(tmp_path: Path) -> None:
    """No tier is asked, and none waited for."""
    tier = SlowToRemove()
    with serve(tmp_path, 8, tiers=lambda *_: [tier], write="through") as owner, member(owner.path) as one:
        one.store(1, 2, 3)
        eventually(lambda: len(tier.store) == 3, "the tier has the keys")
        assert one.cache.remove(keys_of([1, 2]), below=False) == 2
        assert one.cache.status(keys_of([1, 2, 3])) == [Status.MISS, Status.MISS, Status.HIT]
        assert one.cache.clear(below=False) == 1
        assert not tier.removing.is_set()
        one.poison([SOURCES, SOURCES + 1, SOURCES + 2])
        assert one.cache.fetch(keys_of([1, 2, 3]), range(SOURCES, SOURCES + 3), after=NO_WAIT).wait(SECONDS) == 3
        assert one.wrong([1, 2, 3], range(SOURCES, SOURCES + 3)) == []


def test_removals_that_wait_for_a_tier_that_hangs_are_so_many_and_others_do_nothing(tmp_path: Path) -> None:
    """One thread does them in order, and who asks for one too many hears so at once."""
    tier, more = SlowToRemove(), 5
    options: dict[str, Any] = {"tiers": lambda *_: [tier], "write": "through"}
    with serve(tmp_path, 256, **options) as served, raw(served.path) as one, raw(served.path) as other:
        one.store(keys_of(range(MOST_REMOVALS + more)), 1)
        eventually(lambda: len(tier.store) == MOST_REMOVALS + more, "the tier has the keys")
        first = one.number
        for number in range(MOST_REMOVALS + more):
            one.send(Operation.REMOVE, pack_keys(keys_of([number])))
        refused = [one.receive() for _ in range(more)]
        assert refused == [(first + 1 + MOST_REMOVALS + each, Operation.REMOVE, b"") for each in range(more)]
        assert tier.removing.wait(SECONDS)
        working = [each for each in threading.enumerate() if each.name == "kvoffload-pool-remove"]
        assert len(working) == 1
        assert other.status(keys_of([MOST_REMOVALS])) == [1], "calls of others go on"
        tier.go.set()
        for number in range(MOST_REMOVALS):
            assert one.receive() == (first + 1 + number, Operation.REMOVE, NUMBER.pack(1))
        last = keys_of(range(MOST_REMOVALS, MOST_REMOVALS + more))
        assert one.status(last) == [1] * more, "nothing of what was refused is removed"
        assert [tier.has_record(key) for key in last] == [True] * more
        working[0].join(SECONDS)
        assert one.ask(Operation.REMOVE, pack_keys(last)) == (Operation.REMOVE, NUMBER.pack(more)), "there is room"
    gc.collect()
    eventually(lambda: not any(each.name == "kvoffload-pool-remove" for each in threading.enumerate()), "it has ended")


# restarts -------------------------------------------------------------------------------------------------------------


def test_after_an_orderly_restart_members_come_before_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a kill: the new owner waits for the members that have the memory."""
    with serve(tmp_path, 8) as first, member(first.path) as one:
        one.store(1, 2, 3)
        first.close()
        with serve(tmp_path, 8) as second, member(first.path) as new:
            assert new.hits(1, 2, 3) == 3
            new.check_load(1, 2, 3)
            eventually(lambda: one.hits(1, 2, 3) == 3, "the member is back")
            assert [each["members"] for each in second.statistics()] == [2]
    assert os.path.lexists(first.path), "so that the next owner knows of the member"
    monkeypatch.setattr(owner, "GRACE_SECONDS", 0.05)  # no member is left that it could wait for
    with serve(tmp_path, 8), member(first.path) as one:
        assert one.hits(1) == 0
    assert not os.path.lexists(first.path), "nobody had the memory when it ended"


# forgotten ------------------------------------------------------------------------------------------------------------


def test_the_lock_of_a_forgotten_membership_lasts_as_long_as_an_engine_over_its_memory(tmp_path: Path) -> None:
    with serve(tmp_path, 8) as pool, raw(pool.path) as other:
        forgotten = SharedPool.attach(pool.path, Rows(), identity=IDENTITY)
        assert other.memory is not None
        number = 1 - other.place
        assert other.memory.locked(number)
        memory: Any = forgotten.host_memory
        gone = weakref.ref(forgotten)
        del forgotten
        gc.collect()
        assert gone() is None
        assert other.memory.locked(number), "what is over the memory may still touch it"
        del memory
        gc.collect()
        assert not other.memory.locked(number)


# several devices ------------------------------------------------------------------------------------------------------


def test_an_engine_over_several_devices_is_refused_by_name(tmp_path: Path) -> None:
    driver = SimulatedDriver(device_count=2)
    devices = [kvoffload.open_device(index, backend=driver) for index in range(2)]
    layouts = [layout_of(each.allocate_planes(PLANES, block_bytes=ROW_BYTES, num_blocks=16)) for each in devices]
    sharded: Any = ShardedLayout(layouts)
    with serve(tmp_path, 8) as pool, pytest.raises(LayoutError, match="one device"):
        SharedPool.attach(pool.path, sharded, identity=IDENTITY)
    with serve(tmp_path, 8) as pool, SharedPool.attach(pool.path, layouts[0], identity=IDENTITY) as joined:
        engine = ShardedEngine(sharded, devices=devices, num_slots=joined.capacity)
        with engine, pytest.raises(LayoutError, match="one device"):
            BlockCache(engine, pool=joined)
        with CacheIndex(joined) as index:
            assert index.lookup(keys_of([1])) == 0
    for device in devices:
        device.close()

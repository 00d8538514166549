"""Another owner of a shared pool: what its members find there, and what it must not give away."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from interrupts import Methods, interrupt_at, trace_points
from pooling import (
    IDENTITY,
    SECONDS,
    SOURCES,
    Made,
    Member,
    Rows,
    Standing,
    check_load_at_last,
    eventually,
    keys_of,
    member,
    members,
    raw,
    region_bytes,
    restarting,
    serve,
    stored,
)

from kvoffload import NO_WAIT, BlockCache, CacheEvent, CacheIndex, ClosedError, MissingKeyError, Tenant
from kvoffload.pool import PoolOwner, SharedPool
from kvoffload.pool import owner as owners
from kvoffload.pool.messages import Operation, pack_keys

pytestmark = pytest.mark.usefixtures("codec", "quick")


@contextmanager
def thread_stands_still(one: Member) -> Iterator[None]:
    """The thread of the membership is in a hook of its cache meanwhile, where it holds no lock."""
    there, leave = threading.Event(), threading.Event()

    def hook(_: CacheEvent) -> None:
        if threading.current_thread() is not threading.main_thread():
            there.set()
            assert leave.wait(SECONDS)

    one.cache = None  # an engine has one cache
    one.cache = BlockCache(one.engine, pool=one.pool, on_event=hook)
    one.cache.remove(keys_of([SOURCES - 1]))
    one.store(SOURCES - 1, wait=False)  # the thread settles it
    assert there.wait(SECONDS)
    try:
        yield
    finally:
        leave.set()


def taken_over(one: Member, *numbers: int) -> None:
    eventually(lambda: one.hits(*numbers) == len(numbers), "the next owner has the keys")


@contextmanager
def member_of_many_owners(path: str) -> Iterator[tuple[Member, Callable[[], None]]]:
    """A member that has stored key 1, and a function that ends its owner and begins another one."""
    with restarting(path) as restart, member(path) as one:
        one.store(1)
        yield one, restart


def test_the_next_owner_has_the_keys_and_the_members_their_numbers(tmp_path: Path) -> None:
    with serve(tmp_path, 8) as first, members(first.path, 2) as (a, b):
        a.store(1, 2, 3)
        first.close()
        assert (a.hits(1), b.store(4).keys) == (0, ())
        assert b.cache.fetch(keys_of([1]), [SOURCES], after=NO_WAIT).wait(SECONDS) == 0
        with serve(tmp_path, 8) as owner:
            taken_over(a, 1, 2, 3)
            taken_over(b, 1, 2, 3)
            b.check_load(1, 2, 3)
            b.store(5)
            a.check_load(5)
            with member(first.path) as third:
                third.check_load(1, 5)
                assert third.store(*range(10, 18)).keys, "entries are free"
            eventually(lambda: owner.statistics()[0]["pinned"] == 0, "nothing of the last owner is held")


def test_what_members_read_and_write_when_the_owner_ends_is_kept_until_they_have_ended(tmp_path: Path) -> None:
    with serve(tmp_path, 8) as first, members(first.path, 2) as (a, b):
        a.store(0, 1, 2, 3)
        lease = a.cache.acquire(keys_of([0, 1]))
        reservation = a.cache.reserve(keys_of([4, 5, 6]))
        first.close()
        with serve(tmp_path, 8), raw(first.path, join=False) as other:
            for each in (a, b):
                taken_over(each, 0, 1, 2, 3)
                each.cache.acquire(keys_of([3])).release()  # a member says then, at the latest, that it is clean
                assert each.hits(3)
            other.asked["fingerprint"] = a.layout.fingerprint.hex()
            other.join()
            for turn in range(10):
                number, entries = other.reserve([b"%d %d" % (turn, each) for each in range(8)])
                assert not {*entries} & {*lease.indices, *reservation.indices}
                assert other.memory is not None
                other.memory.rows[entries] = 1
                other.end(number)
            for number, slot in zip((0, 1), lease.slots(), strict=True):
                assert (a.row(slot) == a.in_slot(a.expected[number])).all()
            reservation.commit()
            with pytest.raises(ClosedError):
                reservation.commit()
            lease.release()
            assert a.hits(4) == 0, "it was reserved at an owner that has ended"
            eventually(lambda: other.counts()["pinned"] == 0, "nothing is held")


def test_what_a_member_reads_is_kept_by_each_owner_after_the_one_that_granted_it(tmp_path: Path) -> None:
    """Also if it has read the same key by another lease, which has ended."""
    with member_of_many_owners(str(tmp_path / "pool")) as (one, restart):
        lease = one.cache.acquire(keys_of([1]))
        for _ in range(3):
            restart()
            taken_over(one, 1)
            one.check_load(1)
        one.cache.remove(keys_of([1]))
        for first in range(10, 50, 8):
            one.store(*range(first, first + 8))
        assert (one.row(lease.slots()[0]) == one.in_slot(one.expected[1])).all()
        lease.release()
        eventually(lambda: len(one.store(*range(50, 58)).keys) == 8, "its entry is free")
        eventually(lambda: one.counts() == (8, 0, 0), "nothing is held")


def test_a_key_that_was_removed_does_not_come_back_with_the_next_owner(tmp_path: Path) -> None:
    """Also if an older header has it: its entry was given up when more keys were evicted than stored."""
    tenants = {"": Tenant(max_blocks=6), "b": Tenant(max_blocks=2)}
    with serve(tmp_path, 8, tenants=tenants) as first, members(first.path, 1) as (a,):
        a.store(*range(6))
        for turn in range(30):
            a.store(*range(6 + turn % 7, 6 + turn % 7 + 1 + turn % 5))
        resident = [number for number in range(20) if a.hits(number)]
        a.cache.remove(keys_of(resident[::2]))
        first.close()
        with serve(tmp_path, 8, tenants={"": Tenant(max_blocks=1)}) as second:
            eventually(lambda: [number for number in range(20) if a.hits(number)], "the next owner has a key")
            assert sum(a.hits(number) for number in range(20)) == 1
            a.cache.clear()
            second.close()
        with serve(tmp_path, 8):
            eventually(lambda: a.store(40).keys, "the third owner answers")
            assert [number for number in range(20) if a.hits(number)] == []


@pytest.mark.parametrize("how", ["fetch", "promotion", "lookup"])
def test_an_owner_that_ends_between_a_look_up_and_the_load_costs_hits_and_no_exception(
    how: str, tmp_path: Path
) -> None:
    """`load` alone may say that a key is missing, as it may after every look-up; see its Raises."""
    blocks = range(SOURCES, SOURCES + 3)
    with serve(tmp_path, 8) as owner, member(owner.path) as one:
        one.store(1, 2, 3)
        one.poison(blocks)
        ended = list[str]()

        def end(event: CacheEvent) -> None:
            ended.append(event.kind)
            owner.close()

        one.cache = None  # an engine has one cache
        cache: Any = BlockCache(one.engine, pool=one.pool, on_event=end)
        loaded = 0
        if how == "fetch":
            loaded = cache.fetch(keys_of([1, 2, 3]), blocks, after=NO_WAIT).wait(SECONDS)
        elif how == "promotion":
            with cache.promote(keys_of([1, 2, 3])) as promotion:
                try:
                    loaded = len(promotion.load(blocks, after=NO_WAIT).wait(SECONDS))
                except MissingKeyError:
                    pass
        else:
            assert cache.lookup(keys_of([1, 2, 3])) == 3
            with pytest.raises(MissingKeyError):
                cache.load(keys_of([1, 2, 3]), blocks, after=NO_WAIT)
        assert ended
        assert loaded in (0, 3)
        assert one.wrong([1, 2, 3][:loaded], blocks[:loaded]) == []
        assert cache.lookup(keys_of([1])) == 0
        cache.check()


def test_a_region_of_its_own_is_not_given_to_members_of_an_older_one(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "GRACE_SECONDS", 0.05)
    with serve(tmp_path, 8) as first, member(first.path) as one:
        one.store(1)
        with one.pool._lock:  # its thread does not come back in time
            closing = threading.Thread(target=first.close)
            closing.start()
            closing.join()
            second = PoolOwner(first.path, nbytes=region_bytes(8))
            with raw(first.path, fingerprint=bytes.fromhex(one.layout.fingerprint.hex())):
                pass
        eventually(lambda: "does not take" in caplog.text, "it is refused, once")
        assert "hits until you attach again and make a new engine" in caplog.text
        assert one.hits(1) == 0
        assert one.store(2).keys == ()
        second.close()


def test_an_interrupt_anywhere_while_a_new_owner_is_found_only_delays_it(tmp_path: Path) -> None:
    path, number, points = str(tmp_path / "pool"), 1, 0
    with member_of_many_owners(path) as (one, restart):
        while True:
            with thread_stands_still(one):  # so that this call finds the owner
                restart()
                one.pool._next_try = 0.0
                outcome = interrupt_at(number, lambda: [one.hits(1) for _ in range(3)])
            taken_over(one, 1)
            one.check_load(1)
            if outcome.point is None:
                break
            points, number = points + 1, number + 29
        assert points > 3


def test_an_interrupt_where_no_owner_is_found_does_not_keep_the_member_from_the_next_one(tmp_path: Path) -> None:
    """The socket that could not be connected was kept, so that no other one was made."""
    drop = Methods(SharedPool._drop)
    with serve(tmp_path, 8) as owner, member(owner.path) as one:

        def interrupted(number: int, points: Methods | None) -> bool:
            one.pool._next_try = 0.0
            return interrupt_at(number, lambda: one.hits(1), points=points).point is not None

        def next_owner() -> None:
            one.pool._next_try = 0.0
            with PoolOwner(owner.path, nbytes=region_bytes(8)):
                taken_over(one, 1)
            eventually(lambda: not one.pool.connected, "it knows that this owner has ended, too")

        one.store(1)
        owner.close()
        eventually(lambda: not one.pool.connected, "it knows that the owner has ended")
        for number in (1, 2):  # before an attempt, and after one that failed; the member's own thread may have made it
            eventually(partial(interrupted, number, drop), "a call is interrupted")
            next_owner()
        for number in itertools.count(1):
            if not interrupted(number, None):
                break
        next_owner()


def test_a_cache_that_is_made_after_a_takeover_frees_what_its_number_was_writing_before(tmp_path: Path) -> None:
    """An earlier member had the number, and its reservation's headers are all that is left of it."""
    first = PoolOwner(tmp_path / "pool", nbytes=region_bytes(8))
    with raw(first.path) as gone:
        gone.reserve(keys_of([1, 2, 3]))
    eventually(lambda: first.statistics()[0]["pending"] == 0, "its reservation is aborted")
    with SharedPool.attach(first.path, Rows(), identity=IDENTITY) as pool:
        first.close()
        with serve(tmp_path, 8) as second:
            eventually(lambda: second.statistics(), "the member has brought the memory")
            eventually(lambda: pool.connected, "it has joined")
            assert second.statistics()[0]["pinned"] == 3
            index: Any = CacheIndex(pool)
            assert index.lookup(keys_of([1])) == 0
            eventually(lambda: second.statistics()[0]["pinned"] == 0, "nothing is held")


def test_an_interrupt_anywhere_in_the_end_of_the_last_use_keeps_nothing_held_by_the_next_owner(tmp_path: Path) -> None:
    """It was told once that nothing is in use any more: an interrupt right before that had it never told."""
    path, number, points = str(tmp_path / "pool"), 1, list[str]()
    with member_of_many_owners(path) as (one, restart):
        while True:
            lease = one.cache.acquire(keys_of([1]))
            restart()
            taken_over(one, 1)
            outcome = interrupt_at(number, lease.release)
            lease.release()
            one.cache.status([])
            eventually(lambda: one.counts() == (1, 0, 0), "nothing is held")
            if outcome.point is None:
                break
            points.append(outcome.point.what)
            number += 1
        assert points.count("SharedPool.tell") == 2, "the end of the lease, and of all uses"


def test_an_answer_to_join_that_an_interrupt_has_lost_is_asked_for_again(tmp_path: Path) -> None:
    """The last point before it is stored. Some points come once in a process, on some Pythons: its neighbours, too."""
    found = set[str]()

    def calls(one: Member) -> list[int]:
        return [one.hits(1) for _ in range(3)]

    for place in (0, -1, 1, -2, 2, -3, 3):
        with member_of_many_owners(str(tmp_path / f"pool{place}")) as (one, restart):
            for _ in range(2):
                with thread_stands_still(one):
                    restart()
                    one.pool._next_try = 0.0
                    points = [point.what for point in trace_points(lambda: calls(one))]
            with thread_stands_still(one):
                restart()
                one.pool._next_try = 0.0
                outcome = interrupt_at(points.index("SharedPool._take_join") + 1 + place, lambda: calls(one))
            found.add("" if outcome.point is None else outcome.point.what)
            taken_over(one, 1)
        if "SharedPool._take_join" in found:
            return
    pytest.fail(f"only {found} was interrupted")


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.3, 0.01])
def test_an_owner_that_answers_late_to_a_member_that_is_back_has_its_keys(seconds: float, tmp_path: Path) -> None:
    """Also if the member has asked again meanwhile."""
    path, policies = str(tmp_path / "pool"), Made(Standing)
    with serve(tmp_path, 8) as first, member(first.path, answer_seconds=0.05) as one:
        stored(one, 1, 2)
        first.close()
        options: dict[str, Any] = {"nbytes": 2 * region_bytes(8), "region_bytes": region_bytes(8), "policy": policies}
        with PoolOwner(path, **options) as second, raw(path, fingerprint=b"another region's") as other:
            with one.pool._lock:  # so that the owner stands still when it comes
                other.store(keys_of([1]), 1)
                other.send(Operation.TOUCH, pack_keys(keys_of([1])))
                eventually(lambda: any(each.stands.is_set() for each in policies), "the owner stands still")
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                assert one.hits(1) == 0
            Standing.let_go(policies)
            check_load_at_last(one, 1, 2)
            stored(one, 3)
            eventually(lambda: [each["members"] for each in second.statistics()] == [1, 1], "each has one place")

"""Members of a shared pool: what they see of each other's keys, and when the owner is slow, gone or another one."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from interrupts import interrupt_at, trace_points
from pooling import (
    ENTRY_BYTES,
    IDENTITY,
    SECONDS,
    SOURCES,
    Member,
    eventually,
    held,
    key_of,
    keys_of,
    member,
    members,
    raw,
    region_bytes,
    serve,
)
from tier_classes import DictTier

from kvoffload import NO_WAIT, BlockCache, CacheEvent, CacheIndex, ClosedError, MissingKeyError, Status, Tenant
from kvoffload.cache.policies import LRU
from kvoffload.pool import PoolOwner, SharedPool, messages, shared_pool, watching
from kvoffload.pool import owner as owners
from kvoffload.pool.messages import Operation, pack_keys
from kvoffload.tiers import Outcome


@pytest.fixture(autouse=True, params=["raw", pytest.param("bf16-12", marks=pytest.mark.long)])
def codec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all members."""
    monkeypatch.setattr(Member, "codec", request.param)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members look for the next owner all the time: a second takes too long."""
    monkeypatch.setattr(watching, "RETRY_SECONDS", 0.02)


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


def stored(one: Member, *numbers: int) -> None:
    """Store them, by a member that does not wait for long: on a busy machine an answer may be late."""
    eventually(lambda: one.store(*numbers) and one.hits(*numbers) == len(numbers), "the keys are stored")


def check_load_at_last(one: Member, *numbers: int) -> None:
    """The same for a load."""

    def loaded() -> bool:
        try:
            one.check_load(*numbers)
        except MissingKeyError:
            return False
        return True

    eventually(loaded, "the keys are loaded")


class Standing(LRU):
    """A policy that stands still in `touch` until it is let go: so does its owner, as if it had been stopped."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.go, self.stands = threading.Event(), threading.Event()

    def touch(self, keys: Sequence[bytes]) -> None:
        self.stands.set()
        self.go.wait(SECONDS)
        super().touch(keys)


class SlowTier(DictTier):
    """Reads take longer than anyone waits."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def read_record(self, key: bytes, rows: Any) -> Outcome:
        self.asked.set()
        self.go.wait(SECONDS)
        return super().read_record(key, rows)


def test_a_key_that_one_member_stores_is_a_hit_for_all(tmp_path: Path) -> None:
    with serve(tmp_path, 16), members(str(tmp_path / "pool"), 3) as (a, b, c):
        a.store(*range(6))
        b.store(3, 4, 5, 6, 7)
        for each in (a, b, c):
            assert each.hits(*range(8)) == 8
            each.check_load(*range(8))
            each.check_load(7, 7, 0)
        job = c.cache.fetch(keys_of(range(10)), range(SOURCES, SOURCES + 10), after=NO_WAIT)
        assert (job.hits, job.wait(SECONDS)) == (8, 8)
        assert a.cache.remove(keys_of([0, 1, 40])) == 2
        assert b.cache.status(keys_of([0, 2])) == [Status.MISS, Status.HIT]
        assert c.cache.clear() == 6
        eventually(lambda: a.counts() == (0, 0, 0), "nothing is held")
        for each in (a, b, c):
            each.cache.check()


def test_what_was_evicted_is_still_counted_when_no_owner_answers(tmp_path: Path) -> None:
    """Whoever keeps the counter, as Prometheus does, takes one that falls and comes back for as many evictions more."""
    with serve(tmp_path, 4) as owner, members(str(tmp_path / "pool"), 1) as (a,):
        a.store(*range(4))
        a.store(*range(4, 8))
        assert (a.cache.statistics().evicted, a.cache.statistics().resident) == (4, 4)
        owner.close()
        eventually(lambda: not a.pool.connected, "the member sees that the owner has ended")
        assert (a.cache.statistics().evicted, a.cache.statistics().resident) == (4, 0)


def test_a_reserved_key_is_not_loaded_before_a_transfer_fills_it(tmp_path: Path) -> None:
    """As in a cache of one's own: neither one that is only reserved, nor one whose store was given up."""
    with serve(tmp_path, 8), member(str(tmp_path / "pool")) as one:
        one.store(1)
        reservation = one.cache.reserve(keys_of([2, 3]))
        for numbers in ([2], [1, 2], [3]):
            with pytest.raises(MissingKeyError):
                one.cache.load(keys_of(numbers), range(SOURCES, SOURCES + len(numbers)), after=NO_WAIT, pending=True)
            with pytest.raises(MissingKeyError):
                one.cache.acquire(keys_of(numbers), pending=True)
        job = one.engine.store([2, 3], reservation.slots(), after=NO_WAIT)
        reservation.commit(job)
        one.check_load(2, 1, 3, pending=True)
        one.cache.check()
        eventually(lambda: one.counts() == (3, 0, 0), "nothing is held")


def test_a_load_of_pending_keys_follows_their_store(tmp_path: Path) -> None:
    with serve(tmp_path, 8), members(str(tmp_path / "pool"), 2) as (one, other):
        for numbers in ((1, 2), (2, 3, 4)):
            one.store(*numbers, wait=False)
            one.check_load(*numbers, pending=True)
        with pytest.raises(MissingKeyError):
            other.cache.load(keys_of([9]), [SOURCES], after=NO_WAIT, pending=True)


def test_a_key_is_no_hit_before_its_transfer_has_ended(tmp_path: Path) -> None:
    with serve(tmp_path, 8) as owner, members(str(tmp_path / "pool"), 2) as (one, other), held(one) as (stream, gate):
        job = one.store(1, 2, wait=False, after=stream)
        reservation = one.cache.reserve(keys_of([3]))
        reservation.commit(one.engine.store([3], reservation.slots(), after=stream))
        for _ in range(3):
            one.cache.status([])
            assert other.cache.status(keys_of([1, 2, 3])) == [Status.PENDING] * 3
            assert other.hits(1) == 0
        reservation = one.cache.reserve(keys_of([4]))
        one.engine.store([4], reservation.slots(), after=stream)
        reservation.abort()  # its transfer may still write the entry
        one.cache.status([])  # the owner has read what was sent before
        assert owner.statistics()[0]["pending"] == 4
        gate.open()
        job.wait(SECONDS)
        eventually(lambda: other.cache.status(keys_of([1, 2, 3, 4])) == [Status.HIT] * 3 + [Status.MISS], "they end")
        other.check_load(1, 2, 3)


@pytest.mark.parametrize("how", ["load", "fetch", "lease"])
def test_entries_are_kept_until_the_transfers_that_read_them_have_ended(how: str, tmp_path: Path) -> None:
    targets = range(SOURCES, SOURCES + 3)
    with serve(tmp_path, 8) as owner, members(str(tmp_path / "pool"), 2) as (one, other), held(one) as (stream, gate):
        one.store(1, 2, 3)
        one.poison(targets)
        if how == "load":
            one.cache.load(keys_of([1, 2, 3]), targets, after=stream)
        elif how == "fetch":  # its load shares what its promotion held, which is released at once
            assert one.cache.fetch(keys_of([1, 2, 3]), targets, after=stream).hits == 3
        else:
            lease = one.cache.acquire(keys_of([1, 2, 3]))
            one.engine.load(lease.slots(), targets, after=stream)
            del lease  # what reads its slots is not known: it is held until all transfers have ended
        for first in range(10, 40, 5):
            one.cache.status([])
            assert len(other.store(*range(first, first + 5)).keys) == 5
        assert owner.statistics()[0]["pinned"] == 3
        gate.open()
        one.engine.drain(SECONDS)
        assert one.wrong([1, 2, 3], targets) == []
        assert one.cache.status([]) == []  # a later call finds their end
        eventually(lambda: owner.statistics()[0]["pinned"] == 0, "nothing is held")


def test_each_member_says_by_a_lock_that_it_may_touch_the_memory(tmp_path: Path) -> None:
    with serve(tmp_path, 8), raw(str(tmp_path / "pool"), join=False) as other:
        with members(str(tmp_path / "pool"), 2) as (one, _):
            other.asked["fingerprint"] = one.layout.fingerprint.hex()
            other.join()
            assert other.memory is not None
            assert [number for number in range(63) if other.memory.locked(number)] == [0, 1, 2]
        assert [number for number in range(63) if other.memory.locked(number)] == [2]


def test_others_see_what_was_stored_without_another_call_of_the_member(tmp_path: Path) -> None:
    with serve(tmp_path, 8), members(str(tmp_path / "pool"), 2) as (one, other):
        one.store(1, 2, wait=False)
        eventually(lambda: other.hits(1, 2) == 2, "the member's thread tells the owner")
        other.check_load(1, 2)


def test_what_a_late_owner_has_granted_ends_without_another_call(tmp_path: Path) -> None:
    """Its answer comes when nobody waits for it any more, and the member makes no more calls."""
    policies = list[Standing]()

    def policy(capacity: int) -> Standing:
        policies.append(Standing(capacity))
        return policies[-1]

    with serve(tmp_path, 8, policy=policy) as owner, member(str(tmp_path / "pool"), answer_seconds=0.1) as one:
        stored(one, 1)
        standing = next(each for each in policies if not each.go.is_set() and len(each))
        one.cache.touch(keys_of([1]))
        assert one.store(2, 3).keys == ()
        assert one.hits(1) == 0, "every key is a miss"
        reservation = one.cache.reserve(keys_of([4]))
        assert reservation.declined == (key_of(4),)
        with pytest.raises(MissingKeyError):
            one.cache.load(keys_of([1]), [SOURCES], after=NO_WAIT)
        standing.go.set()

        def idle() -> bool:
            (found,) = owner.statistics()
            return (found["pending"], found["pinned"], found["resident"]) == (0, 0, 1)

        eventually(idle, "the owner holds what nobody ends")
        check_load_at_last(one, 1)


@pytest.mark.parametrize("ask_seconds", [0.0, 1.0])
def test_the_owners_answer_is_asked_for_or_slept_for(
    ask_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many CPUs a call asks for a moment before it sleeps. Neither takes longer than `answer_seconds`."""
    monkeypatch.setattr(shared_pool, "ASK_SECONDS", ask_seconds)
    policies = list[Standing]()

    def policy(capacity: int) -> Standing:
        policies.append(Standing(capacity))
        return policies[-1]

    with serve(tmp_path, 8, policy=policy), member(str(tmp_path / "pool"), answer_seconds=0.1) as one:
        stored(one, 1)
        check_load_at_last(one, 1)
        standing = next(each for each in policies if not each.go.is_set() and len(each))
        one.cache.touch(keys_of([1]))
        assert one.hits(1) == 0, "the owner stands still: every key is a miss"
        standing.go.set()
        check_load_at_last(one, 1)


def test_calls_of_an_owner_that_stands_still_for_long_do_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor once the socket is full of what they have asked: all have ended while it stands still."""
    policies = list[Standing]()

    def policy(capacity: int) -> Standing:
        policies.append(Standing(capacity))
        return policies[-1]

    with serve(tmp_path, 8, policy=policy), member(str(tmp_path / "pool"), answer_seconds=0.2) as one:
        stored(one, 1)
        standing = next(each for each in policies if not each.go.is_set() and len(each))
        one.cache.touch(keys_of([1]))
        monkeypatch.setattr(watching, "RETRY_SECONDS", 0.0)  # as after minutes
        assert [one.hits(1) for _ in range(2000)] == [0] * 2000, "it has stood still for 10 seconds: calls have waited"
        monkeypatch.setattr(watching, "RETRY_SECONDS", 0.02)
        standing.go.set()
        check_load_at_last(one, 1)


def test_a_slow_tier_of_the_owner_hides_no_key_that_is_in_the_pool(tmp_path: Path) -> None:
    """And while one thread waits for it, another one's calls go on."""
    tier = SlowTier()
    with serve(tmp_path, 8, tiers=lambda *_: [tier], write="through"), member(str(tmp_path / "pool")) as one:
        one.store(1, 2, 3)
        eventually(lambda: len(tier.store) >= 3, "the tier has the keys")
        one.cache.remove(keys_of([3]), below=True)
        one.store(3)
        eventually(lambda: len(tier.store) >= 3, "the tier has the key again")
        with raw(str(tmp_path / "pool"), fingerprint=bytes.fromhex(one.layout.fingerprint.hex())) as other:
            assert other.room(8) >= 1  # evicts some
        there = one.hits(1, 2, 3)
        assert there < 3

        def fetch(first: int, deadline: float) -> int:
            targets = range(first, first + 3)
            fetching = one.cache.fetch(keys_of([1, 2, 3]), targets, after=NO_WAIT, deadline=deadline)
            return int(fetching.wait(3 * SECONDS))

        found = list[int]()
        thread = threading.Thread(target=lambda: found.append(fetch(SOURCES, 2 * SECONDS)))
        thread.start()
        assert tier.asked.wait(SECONDS), "the thread waits for the tier"
        for _ in range(20):
            assert one.hits(1, 2, 3) >= there
        assert fetch(SOURCES + 3, 0.05) >= there, "it came too late"
        thread.join(0.2)
        assert thread.is_alive(), "it goes on waiting"
        tier.go.set()
        thread.join()
        assert found[0] >= there


def test_a_late_answer_to_one_thread_does_not_keep_another_one_from_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else reads what has come: who waits for a tier goes on when that has, and not at the deadline."""
    monkeypatch.setattr(watching, "RETRY_SECONDS", SECONDS)
    tier, policies, ended = SlowTier(), list[Standing](), threading.Event()

    def policy(capacity: int) -> Standing:
        policies.append(Standing(capacity))
        return policies[-1]

    with (
        serve(tmp_path, 8, policy=policy, tiers=lambda *_: [tier], write="through") as owner,
        member(owner.path, answer_seconds=0.2) as one,
    ):
        stored(one, 1)
        eventually(lambda: tier.has_record(key_of(1)), "the tier has the key")
        with raw(owner.path, fingerprint=bytes.fromhex(one.layout.fingerprint.hex())) as other:
            eventually(lambda: other.room(8) == 8, "it is evicted, once the tier has written it")
        stored(one, 2)
        time.sleep(3 * watching.LINGER_SECONDS * 10)  # now the membership's thread sleeps for long

        def promote() -> None:
            one.cache.promote(keys_of([1]), deadline=6 * SECONDS).release()
            ended.set()

        thread = threading.Thread(target=promote)
        thread.start()
        assert tier.asked.wait(SECONDS), "the thread waits for the tier"
        one.cache.touch(keys_of([2]))
        assert one.hits(2) == 0, "the owner stands still"
        for standing in policies:
            standing.go.set()
        tier.go.set()
        assert ended.wait(SECONDS / 2)
        thread.join()


def test_who_waits_for_a_tier_of_the_owner_does_not_wait_for_one_that_stands_still(tmp_path: Path) -> None:
    """Also one who would wait for the tier without a limit."""
    tier, policies, found = SlowTier(), list[Standing](), list[int]()

    def policy(capacity: int) -> Standing:
        policies.append(Standing(capacity))
        return policies[-1]

    with (
        serve(tmp_path, 8, policy=policy, tiers=lambda *_: [tier], write="through") as owner,
        member(owner.path, answer_seconds=0.2) as one,
    ):
        stored(one, 1)
        eventually(lambda: tier.has_record(key_of(1)), "the tier has the key")
        with raw(owner.path, fingerprint=bytes.fromhex(one.layout.fingerprint.hex())) as other:
            eventually(lambda: other.room(8) == 8, "it is evicted, once the tier has written it")
        stored(one, 2)

        def wait() -> None:
            with one.cache.promote(keys_of([1]), deadline=None) as promotion:
                found.append(promotion.wait())
            found.append(one.cache.remove(keys_of([2])))

        thread = threading.Thread(target=wait)
        thread.start()
        assert tier.asked.wait(SECONDS), "the thread waits for the tier"
        one.cache.touch(keys_of([2]))
        thread.join(SECONDS)
        assert found == [0, 0]
        for standing in policies:
            standing.go.set()
        tier.go.set()
        thread.join()


def test_keys_that_only_the_owners_tier_has_come_back(tmp_path: Path) -> None:
    tier = DictTier()
    with serve(tmp_path, 4, tiers=lambda *_: [tier], write="through") as owner, member(str(tmp_path / "pool")) as one:
        for number in range(12):  # one after another: entries are held while they are written
            eventually(partial(lambda each: one.store(each).keys, number), "there is room")
            eventually(partial(tier.has_record, key_of(number)), "the tier has the key")
        assert one.hits(0, 1) == 0
        one.poison(range(SOURCES, SOURCES + 2))
        assert one.cache.fetch(keys_of([0, 1]), [SOURCES, SOURCES + 1], after=NO_WAIT).wait(SECONDS) == 2
        assert one.wrong([0, 1], [SOURCES, SOURCES + 1]) == []
        one.cache.remove(keys_of([0]))
        assert one.cache.fetch(keys_of([0]), [SOURCES], after=NO_WAIT, deadline=0.1).wait(SECONDS) == 0
        eventually(lambda: owner.statistics()[0]["pinned"] == 0, "nothing is held")


# another owner --------------------------------------------------------------------------------------------------------


def taken_over(one: Member, *numbers: int) -> None:
    eventually(lambda: one.hits(*numbers) == len(numbers), "the next owner has the keys")


def test_the_next_owner_has_the_keys_and_the_members_their_numbers(tmp_path: Path) -> None:
    path = str(tmp_path / "pool")
    first = PoolOwner(path, nbytes=region_bytes(8))
    with members(path, 2) as (a, b):
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
            with member(path) as third:
                third.check_load(1, 5)
                assert third.store(*range(10, 18)).keys, "entries are free"
            eventually(lambda: owner.statistics()[0]["pinned"] == 0, "nothing of the last owner is held")


def test_what_members_read_and_write_when_the_owner_ends_is_kept_until_they_have_ended(tmp_path: Path) -> None:
    path = str(tmp_path / "pool")
    first = PoolOwner(path, nbytes=region_bytes(8))
    with members(path, 2) as (a, b):
        a.store(0, 1, 2, 3)
        lease = a.cache.acquire(keys_of([0, 1]))
        reservation = a.cache.reserve(keys_of([4, 5, 6]))
        first.close()
        with serve(tmp_path, 8), raw(path, join=False) as other:
            for each in (a, b):
                taken_over(each, 0, 1, 2, 3)
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
    path = str(tmp_path / "pool")
    tenants = {"": Tenant(max_blocks=6), "b": Tenant(max_blocks=2)}
    first = PoolOwner(path, nbytes=region_bytes(8), tenants=tenants)
    with members(path, 1) as (a,):
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
    owner = PoolOwner(tmp_path / "pool", nbytes=region_bytes(8))
    blocks = range(SOURCES, SOURCES + 3)
    with member(str(tmp_path / "pool")) as one:
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
    owner.close()


def test_a_region_of_its_own_is_not_given_to_members_of_an_older_one(tmp_path: Path, caplog: Any) -> None:
    path = str(tmp_path / "pool")
    first = PoolOwner(path, nbytes=region_bytes(8))
    with member(path) as one:
        one.store(1)
        with one.pool._lock:  # its thread does not come back in time
            first.close()
            second = PoolOwner(path, nbytes=region_bytes(8))
            with raw(path, fingerprint=bytes.fromhex(one.layout.fingerprint.hex())):
                pass
        eventually(lambda: one.hits(1) or "does not take" in caplog.text, "it is refused, once")
        assert one.hits(1) or "hits until you attach again and make a new engine" in caplog.text
        assert one.store(2).keys == ()
        second.close()


def test_an_owner_of_another_version_is_named_once(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "pool")
    first = PoolOwner(path, nbytes=region_bytes(8))
    with member(path) as one:
        one.store(1)
        monkeypatch.setattr(messages, "VERSION", messages.VERSION + 1)  # what the member has said stays
        first.close()
        with serve(tmp_path, 8):
            eventually(
                lambda: one.hits(1) or "the owner speaks version 2, the member 1" in caplog.text, "it is refused"
            )
            for _ in range(20):
                assert one.hits(1) == 0
                time.sleep(0.01)
    assert [each.count("speaks version") for each in caplog.messages if "does not take" in each] == [1]


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


def test_a_cache_that_is_made_after_a_takeover_frees_what_its_number_was_writing_before(tmp_path: Path) -> None:
    """An earlier member had the number, and its reservation's headers are all that is left of it."""
    path = str(tmp_path / "pool")
    layout: Any = type("Rows", (), {"fingerprint": bytes(16), "slot_bytes": ENTRY_BYTES, "num_groups": 1})
    first = PoolOwner(path, nbytes=region_bytes(8))
    with raw(path, fingerprint=layout.fingerprint) as gone:
        gone.reserve(keys_of([1, 2, 3]))
    eventually(lambda: first.statistics()[0]["pending"] == 0, "its reservation is aborted")
    with SharedPool.attach(path, layout, identity=IDENTITY) as pool:
        first.close()
        with serve(tmp_path, 8) as second:
            eventually(lambda: second.statistics(), "the member has brought the memory")
            eventually(lambda: pool.connected, "it has joined")
            assert second.statistics()[0]["pinned"] == 3
            index: Any = CacheIndex(pool)
            assert index.lookup(keys_of([1])) == 0
            eventually(lambda: second.statistics()[0]["pinned"] == 0, "nothing is held")


def test_an_answer_to_join_that_an_interrupt_has_lost_is_asked_for_again(tmp_path: Path) -> None:
    """The last point before it is stored."""
    with member_of_many_owners(str(tmp_path / "pool")) as (one, restart):
        with thread_stands_still(one):
            restart()
            one.pool._next_try = 0.0
            points = trace_points(lambda: [one.hits(1) for _ in range(3)])
        number = next(place for place, point in enumerate(points, 1) if point.what == "SharedPool._take_join")
        with thread_stands_still(one):
            restart()
            one.pool._next_try = 0.0
            outcome = interrupt_at(number, lambda: [one.hits(1) for _ in range(3)])
        assert outcome.point is not None
        assert outcome.point.what == "SharedPool._take_join"
        taken_over(one, 1)


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.3, 0.01])
def test_an_owner_that_answers_late_to_a_member_that_is_back_has_its_keys(seconds: float, tmp_path: Path) -> None:
    """Also if the member has asked again meanwhile."""
    path, policies = str(tmp_path / "pool"), list[Standing]()

    def policy(capacity: int) -> Standing:
        policies.append(Standing(capacity))
        return policies[-1]

    first = PoolOwner(path, nbytes=region_bytes(8))
    with member(path, answer_seconds=0.05) as one:
        stored(one, 1, 2)
        first.close()
        options: dict[str, Any] = {"nbytes": 2 * region_bytes(8), "region_bytes": region_bytes(8), "policy": policy}
        with PoolOwner(path, **options) as second, raw(path, fingerprint=b"another region's") as other:
            with one.pool._lock:  # so that the owner stands still when it comes
                other.store(keys_of([1]), 1)
                other.send(Operation.TOUCH, pack_keys(keys_of([1])))
                eventually(lambda: any(each.stands.is_set() for each in policies), "the owner stands still")
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                assert one.hits(1) == 0
            for each in policies:
                each.go.set()
            check_load_at_last(one, 1, 2)
            stored(one, 3)
            eventually(lambda: [each["members"] for each in second.statistics()] == [1, 1], "each has one place")


class member_of_many_owners:  # noqa: N801  (a context manager)
    """A member, and a function that ends its owner and begins another one."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> tuple[Member, Any]:
        self.owner = PoolOwner(self.path, nbytes=region_bytes(8))
        self.entered = member(self.path)
        one = self.entered.__enter__()
        one.store(1)

        def restart() -> None:
            self.owner.close()
            self.owner = PoolOwner(self.path, nbytes=region_bytes(8))

        return one, restart

    def __exit__(self, *exception: Any) -> None:
        self.entered.__exit__(None, None, None)
        self.owner.close()


# forks, signals, the end ----------------------------------------------------------------------------------------------


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    """Also if another thread has the lock of the membership when it is forked."""
    with serve(tmp_path, 8) as owner, member(owner.path) as one, ExitStack() as stack:
        one.store(1, 2)
        index: Any = CacheIndex(stack.enter_context(SharedPool.attach(owner.path, one.layout, identity=IDENTITY)))
        taken, go = threading.Event(), threading.Event()

        def hold() -> None:
            with one.pool._lock:
                taken.set()
                go.wait(SECONDS)

        thread = threading.Thread(target=hold)
        thread.start()
        assert taken.wait(SECONDS)
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (
                lambda: one.cache.lookup(keys_of([1])),
                lambda: one.store(3),
                lambda: index.lookup(keys_of([1])),
                lambda: index.reserve(keys_of([3])),
                lambda: index.touch(keys_of([3])),
                lambda: one.pool.ask(4, b""),  # type: ignore[arg-type]
            ):
                try:
                    call()
                except ClosedError:
                    refused += 1
            one.pool.close()
            os._exit(refused)
        go.set()
        thread.join()
        end = time.monotonic() + SECONDS
        while not (found := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(found[1]) == 6
        assert one.hits(1, 2) == 2
        one.check_load(1, 2)


def test_inside_another_call_every_key_is_a_miss(tmp_path: Path) -> None:
    """A signal handler looks keys up while a call holds the lock; releasing is put off."""
    with serve(tmp_path, 8), member(str(tmp_path / "pool")) as one:
        one.store(1, 2)
        lease, seen = one.cache.acquire(keys_of([1])), list[Any]()

        def handler(*_: object) -> None:
            cache = one.cache
            seen.append(
                (cache.lookup(keys_of([1])), cache.status(keys_of([1])), cache.status_of(key_of(1)), len(cache))
            )
            lease.release()

        with one.engine.lock:
            handler()
            with pytest.raises(RuntimeError, match="in the middle of another call"):
                one.pool.close()
        assert seen == [(0, [Status.MISS], Status.MISS, 0)]
        assert one.hits(1, 2) == 2
        eventually(lambda: one.counts() == (2, 0, 0), "the lease is released")


def test_closing_a_membership_ends_what_it_held_and_may_be_done_twice_and_by_several(tmp_path: Path) -> None:
    with serve(tmp_path, 8) as owner, raw(str(tmp_path / "pool"), join=False) as other:
        with member(str(tmp_path / "pool")) as one:
            one.store(1, 2)
            lease = one.cache.acquire(keys_of([1]))
            reservation = one.cache.reserve(keys_of([5, 6]))
            threads = [threading.Thread(target=one.pool.close) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            with pytest.raises(ClosedError):
                one.cache.lookup(keys_of([1]))
            one.pool.close()
            assert (lease.released, len(reservation.keys)) == (False, 2)
        other.asked["fingerprint"] = one.layout.fingerprint.hex()
        other.join()
        eventually(lambda: other.room(8) == 8, "all entries are free")
        assert owner.statistics()[0]["members"] == 1


def test_closing_while_the_thread_looks_for_an_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "GRACE_SECONDS", 0.0)
    path = str(tmp_path / "pool")
    for turn in range(6):
        owner = PoolOwner(path, nbytes=region_bytes(8))
        with members(path, 3) as three:
            three[0].store(1, wait=False)
            owner.close()
            time.sleep(0.01 * turn)
    assert not [each.name for each in threading.enumerate() if each.name == "kvoffload-pool"]
    assert select.select([], [], [], 0) == ([], [], [])

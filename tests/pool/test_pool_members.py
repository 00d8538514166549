"""Members of a shared pool: what they see of each other's keys, and when the owner is slow or gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pooling import (
    IDENTITY,
    SECONDS,
    SOURCES,
    Made,
    Member,
    Standing,
    check_load_at_last,
    eventually,
    forks,
    held,
    held_by_a_thread,
    key_of,
    keys_of,
    member,
    members,
    raw,
    region_bytes,
    serve,
    stored,
)
from tier_classes import DictTier

from kvoffload import NO_WAIT, CacheIndex, ClosedError, MissingKeyError, Status
from kvoffload.pool import PoolOwner, SharedPool, shared_pool, watching
from kvoffload.pool import owner as owners
from kvoffload.tiers import Outcome

pytestmark = pytest.mark.usefixtures("codec", "quick")


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
    with serve(tmp_path, 16) as owner, members(owner.path, 3) as (a, b, c):
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
    with serve(tmp_path, 4) as owner, members(owner.path, 1) as (a,):
        a.store(*range(4))
        a.store(*range(4, 8))
        assert (a.cache.statistics().evicted, a.cache.statistics().resident) == (4, 4)
        owner.close()
        eventually(lambda: not a.pool.connected, "the member sees that the owner has ended")
        assert (a.cache.statistics().evicted, a.cache.statistics().resident) == (4, 0)


def test_a_reserved_key_is_not_loaded_before_a_transfer_fills_it(tmp_path: Path) -> None:
    """As in a cache of one's own: neither one that is only reserved, nor one whose store was given up."""
    with serve(tmp_path, 8) as owner, member(owner.path) as one:
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


def test_a_reservation_says_whether_there_was_too_little_room(tmp_path: Path) -> None:
    with serve(tmp_path, 8) as owner, member(owner.path) as one:
        first = one.cache.reserve(keys_of(range(6)))
        assert (first.short, first.declined) == (False, ())
        second = one.cache.reserve(keys_of([0, *range(10, 16)]))
        assert (second.short, second.declined) == (True, tuple(keys_of(range(12, 16))))
        assert second.present == (key_of(0),)
        for each in (first, second):
            each.abort()


def test_a_load_of_pending_keys_follows_their_store(tmp_path: Path) -> None:
    with serve(tmp_path, 8) as owner, members(owner.path, 2) as (one, other):
        for numbers in ((1, 2), (2, 3, 4)):
            one.store(*numbers, wait=False)
            one.check_load(*numbers, pending=True)
        with pytest.raises(MissingKeyError):
            other.cache.load(keys_of([9]), [SOURCES], after=NO_WAIT, pending=True)


def test_a_key_is_no_hit_before_its_transfer_has_ended(tmp_path: Path) -> None:
    with serve(tmp_path, 8) as owner, members(owner.path, 2) as (one, other), held(one) as (stream, gate):
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
    with serve(tmp_path, 8) as owner, members(owner.path, 2) as (one, other), held(one) as (stream, gate):
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
    with serve(tmp_path, 8) as owner, raw(owner.path, join=False) as other:
        with members(owner.path, 2) as (one, _):
            other.asked["fingerprint"] = one.layout.fingerprint.hex()
            other.join()
            assert other.memory is not None
            assert [number for number in range(63) if other.memory.locked(number)] == [0, 1, 2]
        assert [number for number in range(63) if other.memory.locked(number)] == [2]


@contextmanager
def owner_that_stands(folder: Path, answer_seconds: float = 0.1) -> Iterator[tuple[PoolOwner, Member, Made[Standing]]]:
    """An owner that stands still in its policy, with that, and a member whose key 1 it has."""
    policies = Made(Standing)
    with serve(folder, 8, policy=policies) as owner, member(owner.path, answer_seconds=answer_seconds) as one:
        stored(one, 1)
        check_load_at_last(one, 1)
        one.cache.touch(keys_of([1]))
        yield owner, one, policies


def test_what_a_late_owner_has_granted_ends_without_another_call(tmp_path: Path) -> None:
    """Its answer comes when nobody waits for it any more, and the member makes no more calls."""
    with owner_that_stands(tmp_path) as (owner, one, policies):
        assert one.store(2, 3).keys == ()
        assert one.hits(1) == 0, "every key is a miss"
        reservation = one.cache.reserve(keys_of([4]))
        assert reservation.declined == (key_of(4),)
        with pytest.raises(MissingKeyError):
            one.cache.load(keys_of([1]), [SOURCES], after=NO_WAIT)
        Standing.let_go(policies)

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
    with owner_that_stands(tmp_path) as (_, one, policies):
        assert one.hits(1) == 0, "the owner stands still: every key is a miss"
        Standing.let_go(policies)
        check_load_at_last(one, 1)


def test_calls_of_an_owner_that_stands_still_for_long_do_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor once the socket is full of what they have asked: all have ended while it stands still."""
    with owner_that_stands(tmp_path, 0.2) as (_, one, policies):
        monkeypatch.setattr(watching, "RETRY_SECONDS", 0.0)  # as after minutes
        assert [one.hits(1) for _ in range(2000)] == [0] * 2000, "it has stood still for 10 seconds: calls have waited"
        monkeypatch.setattr(watching, "RETRY_SECONDS", 0.02)
        Standing.let_go(policies)
        check_load_at_last(one, 1)


def test_a_slow_tier_of_the_owner_hides_no_key_that_is_in_the_pool(tmp_path: Path) -> None:
    """And while one thread waits for it, another one's calls go on."""
    tier = SlowTier()
    with serve(tmp_path, 8, tiers=lambda *_: [tier], write="through") as owner, member(owner.path) as one:
        one.store(1, 2, 3)
        eventually(lambda: len(tier.store) >= 3, "the tier has the keys")
        one.cache.remove(keys_of([3]), below=True)
        one.store(3)
        eventually(lambda: len(tier.store) >= 3, "the tier has the key again")
        with raw(owner.path, fingerprint=bytes.fromhex(one.layout.fingerprint.hex())) as other:
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


@contextmanager
def key_in_slow_tier(folder: Path) -> Iterator[tuple[Member, SlowTier, Made[Standing]]]:
    """A member whose key 1 only the owner's tier has, and key 2 the pool; and policies that stand still in `touch`."""
    tier, policies = SlowTier(), Made(Standing)
    with (
        serve(folder, 8, policy=policies, tiers=lambda *_: [tier], write="through") as owner,
        member(owner.path, answer_seconds=0.2) as one,
    ):
        stored(one, 1)
        eventually(lambda: tier.has_record(key_of(1)), "the tier has the key")
        with raw(owner.path, fingerprint=bytes.fromhex(one.layout.fingerprint.hex())) as other:
            eventually(lambda: other.room(8) == 8, "it is evicted, once the tier reads it no more")
        stored(one, 2)
        yield one, tier, policies


def test_a_late_answer_to_one_thread_does_not_keep_another_one_from_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else reads what has come: who waits for a tier goes on when that has, and not at the deadline."""
    monkeypatch.setattr(watching, "RETRY_SECONDS", SECONDS)
    ended = threading.Event()
    with key_in_slow_tier(tmp_path) as (one, tier, policies):
        eventually(lambda: not one.pool._woken, "the membership's thread sleeps for long")

        def promote() -> None:
            one.cache.promote(keys_of([1]), deadline=6 * SECONDS).release()
            ended.set()

        thread = threading.Thread(target=promote)
        thread.start()
        assert tier.asked.wait(SECONDS), "the thread waits for the tier"
        one.cache.touch(keys_of([2]))
        assert one.hits(2) == 0, "the owner stands still"
        Standing.let_go(policies)
        tier.go.set()
        assert ended.wait(SECONDS / 2)
        thread.join()


def test_who_waits_for_a_tier_of_the_owner_does_not_wait_for_one_that_stands_still(tmp_path: Path) -> None:
    """Also one who would wait for the tier without a limit."""
    found = list[int]()
    with key_in_slow_tier(tmp_path) as (one, tier, policies):

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
        Standing.let_go(policies)
        tier.go.set()
        thread.join()


def test_keys_that_only_the_owners_tier_has_come_back(tmp_path: Path) -> None:
    tier = DictTier()
    with serve(tmp_path, 4, tiers=lambda *_: [tier], write="through") as owner, member(owner.path) as one:
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


# forks, signals, the end ----------------------------------------------------------------------------------------------


@forks
def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    """Also if another thread has the lock of the membership when it is forked."""
    with serve(tmp_path, 8) as owner, member(owner.path) as one, ExitStack() as stack:
        one.store(1, 2)
        index: Any = CacheIndex(stack.enter_context(SharedPool.attach(owner.path, one.layout, identity=IDENTITY)))
        with held_by_a_thread(one.pool._lock):
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
    with serve(tmp_path, 8) as owner, member(owner.path) as one:
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
    with serve(tmp_path, 8) as owner, raw(owner.path, join=False) as other:
        with member(owner.path) as one:
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

"""A region by itself, without the owner's thread: who gets which number, and what is kept for whom."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pooling import SECONDS, eventually, keys_of
from tier_classes import DictTier, GatedTier

from kvoffload import CacheIndex, ClosedError, Tenant
from kvoffload.cache.policies import LRU
from kvoffload.pool import member_calls
from kvoffload.pool.member_calls import Message
from kvoffload.pool.messages import ENDING, FOR_REQUEST, pack_keys
from kvoffload.pool.pool_memory import PAGE, Meaning, PoolMemory
from kvoffload.pool.region import Member, Region

MEANING = Meaning(6, PAGE, b"f" * 16, b"i" * 16)


class Joined:
    """A member: its place in the region, and its own mapping with its lock."""

    def __init__(self, region: Region, number: int | None = None, *, lock: bool = True) -> None:
        self.region, self.asked = region, 0
        connection, epoll = cast(Any, SimpleNamespace(send=lambda _: None)), cast(Any, None)
        self.holdings = Member(connection, [], epoll, lambda step: step())
        self.holdings.number = region.number_for(self.holdings, number)
        region.members.add(self.holdings)
        self.memory = PoolMemory([os.dup(region.memory.descriptor)], region.memory.meaning, headers=False)
        if lock:
            self.memory.lock(self.holdings.number)

    def asks(self, *numbers: int) -> Message:
        self.asked += 1
        return Message(self.holdings, self.asked, FOR_REQUEST.pack(0, 0) + pack_keys(keys_of(numbers)))

    def reserve(self, *numbers: int) -> list[int]:
        member_calls.reserve(self.region, self.asks(*numbers))
        record = self.holdings.reservations.get(self.asked)
        return [] if record is None else list(record.indices)

    def take(self, *numbers: int) -> list[int]:
        member_calls.take(self.region, self.asks(*numbers))
        return list(self.holdings.leases[self.asked].indices)

    def end(self, number: int, *, well: bool = True) -> None:
        member_calls.end(self.region, Message(self.holdings, 0, ENDING.pack(number, well)))

    def leave(self, *, dead: bool = True) -> None:
        self.region.leave(self.holdings, dead=dead)

    def room(self) -> int:
        """How many new keys would get entries now."""
        found = len(self.reserve(*range(1000, 1020)))
        self.end(self.asked, well=False)
        return found


def index(memory: PoolMemory, **options: Any) -> CacheIndex:
    return CacheIndex(memory.meaning.capacity, policy="lru", **options)


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region(PoolMemory.create(MEANING), index)
    yield made
    made.index.check()
    made.close()


def test_a_number_is_given_again_only_when_nothing_of_its_last_member_is_in_quarantine(region: Region) -> None:
    """Else the lock of the new member would keep the last one's entries for as long as it lives."""
    dying = Joined(region)
    dying.reserve(1, 2)
    dying.leave()
    other = Joined(region)
    assert other.holdings.number != dying.holdings.number, "its lock is not free"
    assert other.room() == 4
    dying.memory.close()
    following = Joined(region)
    assert following.holdings.number == dying.holdings.number
    region.settle()
    assert other.room() == 6


def test_a_number_whose_lock_is_freed_while_another_member_joins_is_not_given_again_yet(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, other, settle = Joined(region), Joined(region), region.settle
    dying.reserve(1, 2)
    dying.leave()

    def dies_after() -> None:
        settle()
        dying.memory.close()

    with monkeypatch.context() as patched:
        patched.setattr(region, "settle", dies_after)
        following = Joined(region)
    assert following.holdings.number != dying.holdings.number
    region.settle()
    assert other.room() == 6


def test_a_member_that_loses_its_connection_twice_ends_both_quarantines(region: Region) -> None:
    one, other = Joined(region), Joined(region)
    for number in (1, 2):
        one.reserve(number)
        one.leave(dead=False)
        again = Joined(region, one.holdings.number)
        again.asked, again.memory, one = one.asked, one.memory, again
    assert other.room() == 4
    region.end_quarantine(one.holdings.number)
    region.settle()
    assert other.room() == 6


@pytest.mark.parametrize("dead", [True, False])
def test_what_a_gone_member_read_is_not_kept_for_the_one_that_gets_its_number(region: Region, dead: bool) -> None:
    """The next owner would hold it for a member that has never read it."""
    one = Joined(region)
    one.reserve(0, 1, 2)
    one.end(1)
    one.take(0, 1)
    one.leave(dead=dead)
    assert len(region.memory.found().users) == 2, "its lock is not free: it may read them"
    one.memory.close()
    following = Joined(region)
    assert following.holdings.number == one.holdings.number
    assert region.memory.found().users == {}


@pytest.mark.parametrize("quota", [None, 1])
def test_the_next_owner_holds_what_may_be_in_use_whatever_its_quotas_are(region: Region, quota: int | None) -> None:
    """Entries that are written, or read with or without a key, until each user has said that it has ended."""
    writer, reader, gone = Joined(region), Joined(region), Joined(region)
    writer.reserve(0, 1, 2, 3)
    writer.end(1)
    reading = reader.take(1, 2)
    region.records.remove((keys_of([2]), False))
    writing = writer.reserve(8)
    gone.reserve(9)
    gone.memory.close()  # nothing of it can write any more

    with_quota = partial(index, tenants={"": Tenant(max_blocks=quota)})
    with pytest.raises(BlockingIOError):  # its owner still grants rows
        Region(PoolMemory.adopt(writer.memory.descriptor, MEANING), with_quota, adopts=True)
    region.memory.close()
    memory = PoolMemory.adopt(writer.memory.descriptor, MEANING)
    following = Region(memory, with_quota, adopts=True)
    assert sorted(following.gone) == [writer.holdings.number, reader.holdings.number]
    other = Joined(following)
    assert other.holdings.number == gone.holdings.number
    assert following.records.size() == (3 if quota is None else 1)
    other.reserve(*range(100, 106))
    given = other.holdings.reservations.pop(other.asked)
    assert not set(given.indices) & {*reading, *writing}
    following.records.abort(given)
    following.index.check()
    for number in (writer.holdings.number, reader.holdings.number):
        following.end_quarantine(number)
    following.settle()
    assert following.gone == {}
    assert len(other.reserve(*range(200, 206))) == (6 if quota is None else 1)
    following.index.check()
    other.memory.close()
    following.close()
    for each in (writer, reader):
        each.memory.close()


def test_evicted_keys_whose_entries_no_new_key_takes_leave_no_header(region: Region) -> None:
    one = Joined(region)
    one.reserve(*range(6))
    one.end(1)
    found = region.memory.found()
    assert len(found.keys) == 6
    for turn in range(20):
        one.reserve(*range(10 * turn, 10 * turn + 1 + turn % 6))
        one.end(one.asked, well=turn % 3 > 0)
        found, of = region.memory.found(), region.records._state.table.of
        assert dict(zip(found.keys, found.entries.tolist(), strict=True)) == of


def test_the_next_owner_knows_in_which_order_keys_were_stored(region: Region) -> None:
    """Also where a new key has the entry of an older one."""
    one = Joined(region)
    for number in range(6):
        one.reserve(number)
        one.end(one.asked)
    region.records.remove((keys_of([0]), False))
    assert one.reserve(9) == [0]
    one.end(one.asked)
    assert region.memory.found().keys == keys_of([1, 2, 3, 4, 5, 9])


def test_keys_that_come_from_a_tier_while_a_region_closes_leave_no_header_of_those_that_they_displace() -> None:
    """As a prefetch that goes on while the index writes its last keys: the next owner finds no key without bytes."""
    tier, memory = GatedTier(threads=2), PoolMemory.create(MEANING)
    kept = PoolMemory([os.dup(memory.descriptor)], MEANING, headers=True)
    coming = [b"free %d" % number for number in range(3)]
    tier.store.update((key, [bytes([99]) * PAGE]) for key in coming)
    region = Region(
        memory, partial(index, tiers=[tier], pools=[memory.rows], layout=MEANING.fingerprint, write="through")
    )
    one = Joined(region)
    tier.permit(5)
    for number in range(6):
        one.memory.rows[one.reserve(number)] = number
        one.end(one.asked)
        eventually(partial(tier.has_record, keys_of([min(number, 4)])[0]), "all but the last are written")
    eventually(lambda: len(tier.begun) == 6, "the last one is about to be written")
    closing = threading.Thread(target=region.close)
    closing.start()
    assert region.index.promote(coming).wait(SECONDS) == 3
    tier.permit()
    closing.join()
    found = kept.found()
    assert keys_of([5])[0] in found.keys
    numbers = [99 if key in coming else int(key) for key in found.keys]
    assert kept.rows[found.entries].max(axis=1).tolist() == numbers
    for each in (one.memory, kept):
        each.close()


def test_a_region_whose_keys_cannot_be_taken_over_closes_its_index_and_the_tiers(region: Region) -> None:
    """As by an interrupt in the middle of it. The memory is closed, too, and another owner can follow."""

    class Interrupted(LRU):
        def insert(self, keys: Sequence[bytes]) -> None:
            raise KeyboardInterrupt(keys)

    one, tier = Joined(region), DictTier()
    one.reserve(1, 2)
    one.end(1)
    region.memory.close()

    def with_tier(memory: PoolMemory) -> CacheIndex:
        pools: Any = {"pools": [memory.rows], "layout": MEANING.fingerprint}
        return CacheIndex(MEANING.capacity, policy=Interrupted, tiers=[tier], **pools)

    with pytest.raises(KeyboardInterrupt):
        Region(PoolMemory.adopt(one.memory.descriptor, MEANING), with_tier, adopts=True)
    with pytest.raises(ClosedError):
        tier.put(keys_of([1]), [0])
    following = Region(PoolMemory.adopt(one.memory.descriptor, MEANING), index, adopts=True)
    assert sorted(following.index.keys) == keys_of([1, 2])
    following.close()

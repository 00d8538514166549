"""Owners of a pool that follow one another: which of them has a memory, and what it finds at the path."""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pooling import (
    IDENTITY,
    SECONDS,
    RawMember,
    Rows,
    SlowTiers,
    eventually,
    forks,
    held_by_a_thread,
    keys_of,
    raw,
    region_bytes,
    restarting,
    serve,
)

from kvoffload import CacheIndex, Tenant
from kvoffload.pool import PoolOwner, SharedPool, watching
from kvoffload.pool import owner as owners
from kvoffload.pool.messages import NUMBER, Operation, pack_keys
from kvoffload.testing import FaultyTier
from kvoffload.tiers import MemoryTier


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def returning(path: str, one: RawMember, stack: ExitStack, **changes: Any) -> RawMember:
    """One that asks to join with the memory of a member; it has no answer yet."""
    assert one.memory is not None
    back = RawMember(path)
    stack.callback(back.close)
    asked = {**back.asked, "number": one.place, "capacity": len(one.memory.rows), **changes}
    back.send(Operation.JOIN, json.dumps(asked).encode(), [one.memory.descriptor])
    return back


def joined(one: RawMember) -> bool:
    """Whether the owner has answered, and if so, that it has not refused."""
    if not select.select([one.connection], [], [], 0)[0]:
        return False
    _, kind, content = one.receive()
    if kind == Operation.WAIT:
        return False
    assert kind == Operation.JOIN, content
    return True


def has(tier: FaultyTier, keys: list[bytes]) -> bool:
    return all(tier.contains(keys))


# a memory has one owner -----------------------------------------------------------------------------------------------


def test_an_owner_takes_no_memory_that_another_one_still_grants(tmp_path: Path, stack: ExitStack) -> None:
    """Two owners live, since the socket of the first was removed. A member that brings its memory waits."""
    first = stack.enter_context(serve(tmp_path, 8))
    stays, moves = stack.enter_context(raw(first.path)), stack.enter_context(raw(first.path))
    stays.store(keys_of([1]), 7)
    os.unlink(first.path)
    second = stack.enter_context(serve(tmp_path, 8))
    moves.connection.close()
    back = returning(first.path, moves, stack)
    eventually(lambda: len(second._joining) == 1, "the second owner knows of it")
    second.statistics()  # it has tried
    assert not joined(back)
    assert second.statistics() == []
    entries = stays.store(keys_of([2, 3]), 8)
    first.close()
    eventually(lambda: joined(back), "its memory has no other owner any more")
    assert back.status(keys_of([1, 2, 3])) == [1, 1, 1]
    assert set(back.take(keys_of([2, 3]))[1]) == set(entries)


@forks
def test_a_forked_child_does_not_keep_the_memory_of_an_owner_that_was_killed(tmp_path: Path, stack: ExitStack) -> None:
    path = str(tmp_path / "pool")
    read, write = os.pipe()
    ready, say = os.pipe()
    killed = os.fork()
    if killed == 0:
        try:
            with PoolOwner(path, nbytes=region_bytes(8)):
                os.write(say, b"x")
                while len(select.select([read], [], [], SECONDS)[0]) == 0:
                    pass
                if os.fork() == 0:
                    os.write(say, b"x")
                    os.close(write)
                    os.read(read, 1)
                    os.read(read, 1)  # until the test ends
                else:
                    select.select([], [], [], SECONDS)
        finally:
            os._exit(0)
    os.read(ready, 1)
    one = stack.enter_context(raw(path))
    one.store(keys_of([1]), 7)
    assert one.status(keys_of([1])) == [1]
    os.write(write, b"x")
    os.read(ready, 1)
    os.kill(killed, 9)
    os.waitpid(killed, 0)
    assert one.cut_off(), "the child has not kept the connection"
    stack.enter_context(serve(tmp_path, 8))  # nor the socket
    back = returning(path, one, stack)
    eventually(lambda: joined(back), "no owner is left that has the memory")
    assert back.status(keys_of([1])) == [1]
    for each in (read, write, ready, say):
        os.close(each)


@forks
def test_a_child_of_the_owners_process_waits_for_no_thread_of_the_parents(tmp_path: Path) -> None:
    """Its calls end, also if another thread was asking the owner's when it was forked."""
    with serve(tmp_path, 8) as owner:
        with held_by_a_thread(owner._waking):
            child = os.fork()
            if child == 0:
                owner.statistics()
                owner.close()
                os._exit(0)
        ended = os.pidfd_open(child)
        select.select([ended], [], [], SECONDS)
        os.close(ended)
        os.kill(child, 9)  # if it waits
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert owner.statistics() == []


def test_a_memory_has_no_new_owner_while_a_tier_of_the_last_one_may_write_to_it(
    tmp_path: Path, stack: ExitStack, caplog: Any
) -> None:
    """The tier hangs in a read when the owner closes, and writes to the row after that."""
    path, tier = str(tmp_path / "pool"), FaultyTier(inner=MemoryTier(1 << 20))
    first = stack.enter_context(serve(tmp_path, 2, tiers=lambda *_: [tier], write="through"))
    one = stack.enter_context(raw(path))
    for numbers in ([1], [2, 3]):  # the others take the entry of key 1
        one.store(keys_of(numbers), 7)
        eventually(partial(has, tier, keys_of(numbers)), "the tier has them")
        eventually(lambda: one.counts()["pinned"] == 0, "it reads them no more")
    assert one.status(keys_of([1])) == [0]
    tier.hang_all()
    one.send(Operation.BRING, NUMBER.pack(60_000) + pack_keys(keys_of([1])))
    eventually(lambda: tier.hung > 0, "the tier hangs")
    first.close()
    assert "a tier of a shared pool hangs" in caplog.text
    second = stack.enter_context(serve(tmp_path, 2))
    back = returning(path, one, stack)
    eventually(lambda: len(second._joining) == 1, "the second owner knows of it")
    second.statistics()  # it has tried
    assert not joined(back)
    tier.heal()
    eventually(lambda: joined(back), "no call of the tier goes on")
    assert back.status(keys_of([1, 2, 3]))[0] == 0


def test_tiers_that_open_slowly_for_a_memory_of_the_last_owner_keep_no_other_region_waiting(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "GRACE_SECONDS", 0.05)
    path, tiers = str(tmp_path / "pool"), SlowTiers()
    with serve(tmp_path, 8):
        one = stack.enter_context(raw(path))
        one.store(keys_of([1]), 7)
    other = b"other fingerprin"
    tiers.go.set()
    options: Any = {"nbytes": 2 * region_bytes(8), "region_bytes": region_bytes(8)}
    stack.enter_context(serve(tmp_path, 8, tiers=tiers, **options))
    fast = stack.enter_context(raw(path, fingerprint=other))
    tiers.go.clear()
    tiers.opening.clear()
    back = returning(path, one, stack)
    assert tiers.opening.wait(SECONDS)
    assert fast.store(keys_of([2]), 8) == [0]
    assert not joined(back)
    tiers.go.set()
    eventually(lambda: joined(back), "the tiers are open")
    assert back.status(keys_of([1])) == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["close", "error"])
def test_an_owner_that_ends_while_it_takes_a_memory_over_leaves_all_to_the_next_one(
    how: str, tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tiers = str(tmp_path / "pool"), SlowTiers()
    with serve(tmp_path, 8):
        one = stack.enter_context(raw(path))
        one.store(keys_of([1]), 7)
    with monkeypatch.context() as patched:
        patched.setattr(owners, "GRACE_SECONDS", 0.0)
        with serve(tmp_path, 8, tiers=tiers) as second:
            back = returning(path, one, stack)
            assert tiers.opening.wait(SECONDS)
            if how == "error":
                patched.setattr(owners, "QUARANTINE_SECONDS", "soon")
                assert back.cut_off()
            back.connection.close()  # as a member that asks again
            eventually(lambda: "0 connections" in repr(second), "it has gone")
    assert os.path.lexists(path)
    stack.enter_context(serve(tmp_path, 8))
    back = returning(path, one, stack)
    tiers.go.set()
    eventually(lambda: joined(back), "the second owner has let go of it")
    assert back.status(keys_of([1])) == [1]


# restarts -------------------------------------------------------------------------------------------------------------


def test_owners_that_restart_twice_within_a_second_lose_nothing(tmp_path: Path, stack: ExitStack) -> None:
    """The one in between has ended before a member was back."""
    with serve(tmp_path, 8) as first:
        one = stack.enter_context(raw(first.path))
        one.store(keys_of([1]), 7)
        assert one.status(keys_of([1])) == [1]
    with serve(tmp_path, 8):
        pass
    stack.enter_context(serve(tmp_path, 8))
    new = RawMember(first.path)
    stack.callback(new.close)
    new.send(Operation.JOIN, new.asking())
    back = returning(first.path, one, stack)
    eventually(lambda: joined(back), "the member is back")
    eventually(lambda: joined(new), "it has waited for that")
    assert back.status(keys_of([1])) == [1]


def test_an_owner_keeps_the_socket_while_a_member_may_still_use_what_the_last_one_granted(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(tmp_path, 8) as first:
        one, other = stack.enter_context(raw(first.path)), stack.enter_context(raw(first.path))
        other.reserve(keys_of([1]))
    monkeypatch.setattr(owners, "GRACE_SECONDS", 0.0)
    with serve(tmp_path, 8) as second:
        back = returning(first.path, one, stack)
        eventually(lambda: joined(back), "the member is back")
        back.connection.close()
        eventually(lambda: second.statistics()[0]["members"] == 0, "it has gone")
    assert os.path.lexists(first.path)


def test_an_owner_keeps_the_socket_for_a_member_that_has_lost_its_connection_alone(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "GRACE_SECONDS", 0.05)
    path = tmp_path / "pool"
    with serve(tmp_path, 8) as first:
        one = stack.enter_context(raw(str(path)))
        one.connection.close()
        eventually(lambda: first.statistics()[0]["members"] == 0, "it has gone")
    assert os.path.lexists(path)
    one.close()
    with serve(tmp_path, 8), raw(str(path)):  # which has waited for those that may come back
        pass
    assert not os.path.lexists(path), "nobody can come back"


def test_a_member_that_tells_one_owner_that_nothing_is_in_use_does_not_tell_the_next_one(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner ends after the member has looked, and before it says so."""
    monkeypatch.setattr(watching, "RETRY_SECONDS", 0.02)
    path, tell = str(tmp_path / "pool"), SharedPool.tell
    another = stack.enter_context(restarting(path))
    pool = stack.enter_context(SharedPool.attach(path, Rows(), identity=IDENTITY))

    def restart(generation: int) -> None:
        restarts = threading.Thread(target=another)
        restarts.start()
        restarts.join()
        asks = partial(pool.ask, Operation.STATUS, pack_keys([]))
        eventually(lambda: asks() is not None and pool.generation == generation, "it is back")

    def late(self: SharedPool, operation: Operation, payload: bytes, **options: Any) -> None:
        if operation == Operation.CLEAN and pool.generation == 1:
            restart(2)
        tell(self, operation, payload, **options)

    index = CacheIndex(pool)
    first = index.reserve(keys_of([1]))
    restart(1)
    second = index.reserve(keys_of(range(2, 6)))
    assert len(second.keys) == 4
    monkeypatch.setattr(SharedPool, "tell", late)
    first.abort()
    assert pool.generation == 2
    other = stack.enter_context(raw(path))
    assert other.room(8) == 3, (
        "the second reservation may still be written, for all that this owner knows the first, too"
    )
    second.abort()
    eventually(lambda: other.room(8) == 8, "nothing is in use any more")


def test_an_owner_says_once_that_it_refuses_members_of_the_last_one(
    tmp_path: Path, stack: ExitStack, caplog: Any
) -> None:
    with serve(tmp_path, 8, tenants={"chat": Tenant(), "": Tenant()}) as first:
        one = stack.enter_context(raw(first.path, tenant="chat"))
    stack.enter_context(serve(tmp_path, 8))
    for _ in range(2):
        assert returning(first.path, one, stack, tenant="chat").receive()[1] == Operation.REFUSED
    why = "ValueError: tenant='chat' is none of the owner's: ''"
    said = [each for each in caplog.messages if "refuses a member" in each]
    assert said == [f"{first.path} refuses a member of the last owner: {why}"]


def test_a_member_whose_memory_was_lost_on_the_way_gets_no_other_one(tmp_path: Path) -> None:
    """The kernel drops descriptors for which the owner's process has no room."""
    with serve(tmp_path, 8) as first, raw(first.path, join=False) as one:
        asked = {**one.asked, "number": 0, "capacity": 8}
        kind, why = one.ask(Operation.JOIN, json.dumps(asked).encode())
        assert (kind, why[:46]) == (Operation.REFUSED, b"CapacityError: its memory has not come along: ")

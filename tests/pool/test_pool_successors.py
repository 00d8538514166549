"""Owners of a pool that follow one another: which of them has a memory, and what it finds at the path."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pooling import SECONDS, RawMember, eventually, key_of, keys_of, raw, region_bytes, serve

from kvoffload.pool import PoolOwner
from kvoffload.pool.messages import NUMBER, Operation, pack_keys
from kvoffload.testing import FaultyTier
from kvoffload.tiers import MemoryTier


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def returning(path: str, one: RawMember, stack: ExitStack) -> RawMember:
    """One that asks to join with the memory of a member; it has no answer yet."""
    assert one.memory is not None
    back = RawMember(path, fingerprint=bytes(16))
    stack.callback(back.close)
    asked = {**back.asked, "number": one.place, "capacity": len(one.memory.rows)}
    back.send(Operation.JOIN, json.dumps(asked).encode(), [one.memory.descriptor])
    return back


def joined(one: RawMember) -> bool:
    """Whether the owner has answered, and if so, that it has not refused."""
    if not select.select([one.connection], [], [], 0)[0]:
        return False
    _, kind, content = one.receive()
    assert kind == Operation.JOIN, content
    return True


# a memory has one owner -----------------------------------------------------------------------------------------------


def test_an_owner_takes_no_memory_that_another_one_still_grants(tmp_path: Path, stack: ExitStack) -> None:
    """Two owners live, since the socket of the first was removed. A member that brings its memory waits."""
    path = str(tmp_path / "pool")
    first = stack.enter_context(serve(tmp_path, 8))
    stays, moves = stack.enter_context(raw(path)), stack.enter_context(raw(path))
    stays.store(keys_of([1]), 7)
    os.unlink(path)
    second = stack.enter_context(serve(tmp_path, 8))
    moves.connection.close()
    back = returning(path, moves, stack)
    eventually(lambda: len(second._joining) == 1, "the second owner knows of it")
    second.statistics()  # it has tried
    assert not joined(back)
    assert second.statistics() == []
    entries = stays.store(keys_of([2, 3]), 8)
    first.close()
    eventually(lambda: joined(back), "its memory has no other owner any more")
    assert back.status(keys_of([1, 2, 3])) == [1, 1, 1]
    assert set(back.take(keys_of([2, 3]))[1]) == set(entries)


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
    os.write(write, b"x")
    os.read(ready, 1)
    os.kill(killed, 9)
    os.waitpid(killed, 0)
    stack.enter_context(serve(tmp_path, 8))
    back = returning(path, one, stack)
    eventually(lambda: joined(back), "no owner is left that has the memory")
    assert back.status(keys_of([1])) == [1]
    for each in (read, write, ready, say):
        os.close(each)


def test_a_memory_has_no_new_owner_while_a_tier_of_the_last_one_may_write_to_it(
    tmp_path: Path, stack: ExitStack, caplog: Any
) -> None:
    """The tier hangs in a read when the owner closes, and writes to the row after that."""
    path, tier = str(tmp_path / "pool"), FaultyTier(inner=MemoryTier(1 << 20))
    first = stack.enter_context(serve(tmp_path, 2, tiers=lambda *_: [tier], write="through"))
    one = stack.enter_context(raw(path))
    one.store(keys_of([1]), 7)
    eventually(lambda: tier.contains(key_of(1)), "the tier has the key")
    one.store(keys_of([2, 3]), 8)  # which takes the entry of key 1
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

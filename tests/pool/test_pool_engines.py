"""Engines of several processes: some copy, one has the index, and to the owner they are one member."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pooling import Rows
from tiering import until

from kvoffload import CacheIndex, CapacityError
from kvoffload.pool import PoolOwner, SharedPool

ROW, CAPACITY = 4096, 8


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[PoolOwner]:
    with PoolOwner(tmp_path / "pool", nbytes=(CAPACITY + 2) * ROW) as made:
        yield made


def worker(owner: PoolOwner, name: str = "engine", part: int = 0, rows: Rows = Rows()) -> SharedPool:  # noqa: B008
    return SharedPool.attach(owner.path, rows, identity="m", engine=(name, part))


def keys(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def reserved(index: CacheIndex) -> int:
    """How many of as many keys as fit get an entry."""
    with index.reserve(keys(*range(100, 100 + CAPACITY))) as reservation:
        found = len(reservation.keys)
        reservation.abort()
    return found


SCHEDULER = """
import os, sys
from kvoffload import CacheIndex, CapacityError
from kvoffload.pool import SharedPool
index = CacheIndex(SharedPool.beside(sys.argv[1], "engine", 1))
kept = index.reserve([b"%d" % number for number in range(5)])
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_what_a_dead_scheduler_was_storing_waits_for_its_workers(owner: PoolOwner) -> None:
    copies, other = worker(owner), SharedPool.attach(owner.path, Rows(), identity="m")
    with other, CacheIndex(other) as index:
        arguments = [sys.executable, "-c", SCHEDULER, owner.path]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            os.kill(int(process.stdout.readline()), signal.SIGKILL)
        until(lambda: owner.statistics()[0]["members"] == 2)
        assert reserved(index) == CAPACITY - 5, "the worker may still write the other five"
        another = worker(owner, "another")
        assert reserved(index) == CAPACITY - 5
        copies.close()
        until(lambda: reserved(index) == CAPACITY)
        another.close()


def test_a_second_scheduler_does_not_free_for_the_next_owner_what_the_first_one_was_storing(owner: PoolOwner) -> None:
    copies = worker(owner)
    first = SharedPool.beside(owner.path, "engine", 1)
    reservation = CacheIndex(first).reserve(keys(*range(5)))
    first.close()
    until(lambda: owner.statistics()[0]["members"] == 1)
    with SharedPool.beside(owner.path, "engine", 1) as pool, CacheIndex(pool) as index:
        owner.close()
        with PoolOwner(owner.path, nbytes=(CAPACITY + 2) * ROW) as second:
            until(lambda: reserved(index) > 0)
            until(lambda: second.statistics()[0]["members"] == 2)
            assert reserved(index) == CAPACITY - 5, "the worker may still write the other five"
            copies.close()
    del reservation


def test_a_scheduler_that_joins_the_next_owner_first_frees_for_the_one_after_what_it_was_storing(
    owner: PoolOwner,
) -> None:
    """Its worker had joined the first owner, and nothing was granted there."""

    def following(members: int) -> PoolOwner:
        made = PoolOwner(owner.path, nbytes=(CAPACITY + 2) * ROW)
        until(lambda: [each["members"] for each in made.statistics()] == [members])
        return made

    with worker(owner):
        owner.close()
        with following(1) as second, SharedPool.beside(owner.path, "engine", 1) as pool, CacheIndex(pool) as index:
            storing = index.reserve(keys(1, 2))
            second.close()
            with following(2) as third:
                assert third.statistics()[0]["pinned"] == 2
                storing.commit()
                until(lambda: third.statistics()[0]["pinned"] == 0)


def test_what_is_being_stored_for_a_dead_worker_waits_for_the_scheduler(owner: PoolOwner) -> None:
    copies, other = worker(owner), SharedPool.attach(owner.path, Rows(), identity="m")
    with other, CacheIndex(other) as index, SharedPool.beside(owner.path, "engine", 1) as pool:
        scheduler = CacheIndex(pool)
        reservation = scheduler.reserve(keys(*range(5)))
        copies.close()
        until(lambda: owner.statistics()[0]["members"] == 2)
        assert reserved(index) == CAPACITY - 5
        reservation.abort()
        until(lambda: reserved(index) == CAPACITY)


def test_workers_have_parts_of_each_row(owner: PoolOwner) -> None:
    pair = [worker(owner, part=part, rows=Rows(num_groups=2)) for part in range(2)]
    memory = [each.host_memory for each in pair]
    assert [each.num_slots for each in memory] == [pair[0].capacity] * 2
    assert [each.slot_stride for each in memory] == [2 * ROW] * 2
    whole = pair[0].capacity * 2 * ROW
    assert [each.nbytes for each in memory] == [whole, whole - ROW], "from the part's first byte on"
    with SharedPool.beside(owner.path, "engine", 2) as pool:
        assert pool.capacity == pair[0].capacity
        for each in pair:
            each.close()


def test_engines_are_told_apart(owner: PoolOwner) -> None:
    with worker(owner), SharedPool.beside(owner.path, "engine", 1):
        with pytest.raises(ValueError, match="an engine named engine is there already"):
            SharedPool.beside(owner.path, "engine", 1)
        with pytest.raises(TimeoutError, match=r"^the owner does not answer at .*exactly 2 processes of engine other"):
            SharedPool.beside(owner.path, "other", 2, timeout=0.2)
        with pytest.raises(TimeoutError, match=r"^the owner does not answer at .*exactly 2 processes of engine engine"):
            SharedPool.beside(owner.path, "engine", 2, timeout=0.2)
        with pytest.raises(CapacityError, match="no room"):
            worker(owner, rows=Rows(fingerprint=bytes(range(16))))


def test_the_owner_refuses_an_identity_that_fits_into_a_message_and_is_longer_than_it_may_be(owner: PoolOwner) -> None:
    with pytest.raises(ValueError, match="identity has 5000 characters"):
        SharedPool.attach(owner.path, Rows(), identity="m" * 5000)

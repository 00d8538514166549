"""Members of a shared pool: what one says right before it dies, and engines that are not of the pool's layout."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from pooling import ENTRY_BYTES, IDENTITY, SECONDS, SOURCES, Rows, eventually, held, keys_of, member, members, serve

from kvoffload import NO_WAIT, BlockCache, CacheIndex, CapacityError, KVLayout, LayoutError, OffloadEngine
from kvoffload.cache.entries import LeaseRecord
from kvoffload.cache.pools import RequestRecord
from kvoffload.cache.statistics import StatisticsRecorder
from kvoffload.pool import SharedPool, watching
from kvoffload.pool.messages import DATAGRAM_BYTES, ENDING, Assembler, Operation, datagrams, pack_keys
from kvoffload.pool.pool_memory import Meaning, PoolMemory
from kvoffload.pool.pooled_state import PooledState
from kvoffload.tiers import MemoryTier

LAST_WORDS = """
import os, sys
from types import SimpleNamespace
import kvoffload.pool.pooled_state  # here, not in each child
from kvoffload import CacheIndex
from kvoffload.pool import SharedPool
path, fingerprint, slot_bytes, identity, count = sys.argv[1:]
layout = SimpleNamespace(fingerprint=bytes.fromhex(fingerprint), slot_bytes=int(slot_bytes), num_groups=1)
for number in range(int(count)):
    if os.fork() == 0:
        index = CacheIndex(SharedPool.attach(path, layout, identity=identity, answer_seconds=10.0))
        index.reserve([b"%032d" % number]).commit()
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_what_a_member_says_right_before_it_dies_counts(tmp_path: Path) -> None:
    """Its pidfd may be seen before its socket is read."""
    count = 6
    with serve(tmp_path) as owner, member(owner.path) as one:
        words = [owner.path, one.layout.fingerprint.hex(), str(one.layout.slot_bytes), IDENTITY, str(count)]
        subprocess.run([sys.executable, "-c", LAST_WORDS, *words], check=True, timeout=60)
        eventually(lambda: owner.statistics()[0]["members"] == 1, "the members have left")
        assert one.cache.lookup(keys_of(range(count))) == count, "all keys were committed"


def test_an_engine_of_another_layout_or_over_other_memory_is_refused(tmp_path: Path) -> None:
    """Its keys would be hits for all, and their bytes nowhere in the pool, or with another meaning."""
    with serve(tmp_path, 8) as owner, member(owner.path) as one, ExitStack() as stack:
        pool = stack.enter_context(SharedPool.attach(owner.path, one.layout, identity=IDENTITY, answer_seconds=SECONDS))
        other = KVLayout([one.planes], dtype="int8", tokens_per_block=4, block_axes=("tokens", "x"))
        assert other.slot_bytes == one.layout.slot_bytes
        for layout, memory, error, why in (
            (other, {"host_memory": pool.host_memory}, LayoutError, "the layout that the pool was attached with"),
            (one.layout, {"num_slots": pool.capacity}, CapacityError, r"give it host_memory=pool\.host_memory"),
        ):
            options: Any = {"device": one.device, "staging_bytes": 0, **memory}
            with OffloadEngine(layout, **options) as engine, pytest.raises(error, match=why):
                BlockCache(engine, pool=pool)
        one.store(1)
        one.check_load(1)


def test_a_membership_has_one_cache_at_a_time(tmp_path: Path) -> None:
    """A second one is refused, and the thread goes on to look after the first."""
    with serve(tmp_path, 8) as owner, members(owner.path, 2) as (one, other):
        with pytest.raises(CapacityError, match="has a cache already"):
            BlockCache(one.engine, pool=one.pool)
        with pytest.raises(CapacityError, match="has a cache already"):
            CacheIndex(one.pool)
        one.store(1, 2, wait=False)
        eventually(lambda: other.hits(1, 2) == 2, "the member's thread tells the owner")
        one.cache = None
        one.cache = BlockCache(one.engine, pool=one.pool)
        one.check_load(1, 2)


def test_no_second_cache_takes_the_place_of_one_that_is_forgotten_but_whose_handles_are_in_use(tmp_path: Path) -> None:
    """It would tell the next owner that nothing is in use, and nobody would look after the store of the first one."""
    with serve(tmp_path, 8) as owner, members(owner.path, 2) as (one, other):
        with held(one) as (stream, gate):
            job = one.store(1, 2, wait=False, after=stream)
            one.cache = None
            with pytest.raises(CapacityError, match="end what it holds"):
                BlockCache(one.engine, pool=one.pool)
            gate.open()
            eventually(lambda: other.hits(1, 2) == 2, "the member's thread tells the owner")
        assert job.keys
    with serve(tmp_path, 8) as owner, SharedPool.attach(owner.path, other.layout, identity=IDENTITY) as pool:
        reservation = CacheIndex(pool).reserve(keys_of([1, 2]))
        with pytest.raises(CapacityError, match="end what it holds"):
            CacheIndex(pool)
        reservation.commit()
        assert CacheIndex(pool).lookup(keys_of([1, 2])) == 2


def test_what_an_engine_was_storing_when_it_was_closed_is_a_hit(tmp_path: Path) -> None:
    """Nobody waits for the store, and the membership goes on."""
    with serve(tmp_path, 8) as owner, members(owner.path, 2) as (one, other):
        one.store(1, 2, wait=False)
        one.engine.close()
        eventually(lambda: other.hits(1, 2) == 2, "the member's thread tells the owner")
        other.check_load(1, 2)


def test_a_reservation_that_waits_for_its_transfers_is_committed_without_another_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "RETRY_SECONDS", SECONDS)  # the thread sleeps until it is woken
    with serve(tmp_path, 8) as owner, members(owner.path, 2) as (one, other):
        eventually(lambda: not one.pool._woken, "it sleeps")
        with held(one) as (stream, gate):
            reservation = one.cache.reserve(keys_of([1]))
            reservation.commit(one.engine.store([1], reservation.slots(), after=stream))
            gate.open()
            eventually(lambda: other.hits(1), "the member's thread tells the owner")
        other.check_load(1)


def test_nothing_is_held_after_promotions_of_the_same_keys_at_the_same_time(tmp_path: Path) -> None:
    with serve(tmp_path, 8, tiers=lambda *_: [MemoryTier(1 << 20)]) as owner, member(owner.path) as one:
        one.store(1, 2, 3)
        with one.cache.promote(keys_of([1, 2, 3])) as first, one.cache.promote(keys_of([1, 2])) as second:
            assert (first.wait(SECONDS), second.wait(SECONDS)) == (3, 2)
            assert one.counts() == (3, 0, 3)
        assert one.counts() == (3, 0, 0)


def test_a_lease_of_no_keys_is_released_as_any(tmp_path: Path) -> None:
    with serve(tmp_path, 8) as owner, member(owner.path) as one:
        lease = one.cache.acquire([])
        assert not lease.released
        lease.release()
        assert lease.released
        one.cache.check()


def test_the_length_of_a_cache_counts_pending_keys_as_everywhere(tmp_path: Path) -> None:
    with serve(tmp_path, 8) as owner, member(owner.path) as one:
        one.store(1, 2)
        with one.cache.reserve(keys_of([3])):
            assert len(one.cache) == 3


@pytest.mark.parametrize("how", ["raises", "is dropped"])
def test_a_hint_after_a_request_that_has_not_ended_concerns_the_one_before(how: str, tmp_path: Path) -> None:
    """As in a cache of one's own. The owner took it for open, so that the hint promised its keys, for ever."""
    with serve(tmp_path, 16) as owner, member(owner.path) as one:
        for _ in range(2):  # the first promise is kept
            with one.cache.open_request(session="a") as request:
                one.store(1, 2, 3, request=request)
            one.cache.hint("retain", session="a")
        request = one.cache.open_request(session="a")
        one.store(1, 2, 3, request=request)
        if how == "raises":
            with suppress(KeyError), request:
                raise KeyError
        else:
            del request
        assert one.cache.hint("retain", session="a").blocks == 3
        assert one.cache.statistics().hints == (("retain accepted", 2), ("retain declined", 1))


class Restarting:
    """The way to an owner in whose place the member's thread finds another one, right after it was asked for."""

    tenant, num_groups, capacity, generation, has_tiers = "", 1, 8, 1, False

    def __init__(self) -> None:
        self.told = list[tuple[Operation, bytes]]()

    @property
    def connected(self) -> bool:
        self.generation += 1
        return True

    def next_number(self) -> int:
        return len(self.told)

    def wake(self) -> None: ...

    def use_weights(self, name: str) -> None: ...

    def ask(self, *_: Any, **__: Any) -> bytes | None: ...

    def ask_slowly(self, *_: Any) -> bytes | None: ...

    def tell(self, operation: Operation, payload: bytes, /, *, generation: int | None = None) -> None:
        if generation in (None, self.generation):
            self.told.append((operation, payload))


def test_an_owner_that_is_found_meanwhile_is_not_told_that_nothing_is_in_use() -> None:
    """What the one before it has granted may be in use: it would grant that to others."""
    pool = Restarting()
    state = PooledState(pool, StatisticsRecorder(8, None), None, 0)
    state.numbers[LeaseRecord([b"key"], [0], ())] = (1, 7)
    state.tidy()
    assert pool.told == []


def test_the_owner_hears_of_requests_that_were_dropped_without_a_session_too() -> None:
    """It keeps the keys of those that are open."""
    pool = Restarting()
    state = PooledState(pool, StatisticsRecorder(8, None), None, 0)
    for _ in range(1000):
        state.open_request(RequestRecord(state, "", None, state.weights.now), None)
    told = [operation for operation, _ in pool.told]
    assert told.count(Operation.OPEN) - told.count(Operation.END) <= 64


def test_a_signal_handler_in_the_middle_of_a_message_asks_nobody(tmp_path: Path) -> None:
    """Another message between two datagrams of one made the owner cut the member off."""
    with serve(tmp_path, 8) as owner, member(owner.path) as one:
        one.store(1, 2)
        lease = one.cache.acquire(keys_of([1]))
        with one.pool._calls, one.pool._lock:
            assert one.hits(1) == 0
            for call in (
                lambda: one.store(3),
                lambda: one.cache.fetch(keys_of([2]), [SOURCES], after=NO_WAIT),
                lambda: one.cache.touch(keys_of([1])),
                one.pool.close,
            ):
                with pytest.raises(RuntimeError, match="in the middle of another call"):
                    call()
            lease.release()
        assert one.hits(1, 2) == 2
        assert one.counts() == (2, 0, 0)
        one.check_load(1, 2)


class Reader:
    """An owner that reads and answers when the test says so: the other end of one membership, `pool`."""

    def __init__(self, connection: socket.socket, pool: SharedPool) -> None:
        self._connection, self.pool, self._assembler = connection, pool, Assembler()

    def answer(self, number: int, kind: int, payload: bytes) -> None:
        for datagram in datagrams(number, kind, payload):
            self._connection.send(datagram)

    def take(self) -> tuple[int, int, bytes] | None:
        """Read a datagram. The message that it completes."""
        return self._assembler.take(self._connection.recv(DATAGRAM_BYTES + 1))

    def read(self) -> tuple[int, int, bytes]:
        """The next message."""
        while (message := self.take()) is None:
            pass
        return message


@contextmanager
def reader(path: Path) -> Iterator[Reader]:
    meaning, joined = Meaning(8, ENTRY_BYTES, bytes(16), bytes(16)), list[SharedPool]()

    def join() -> None:
        joined.append(SharedPool.attach(path, Rows(), identity=IDENTITY, answer_seconds=0.1, timeout=SECONDS))

    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        closing(PoolMemory.create(meaning)) as memory,
    ):
        listener.settimeout(SECONDS)
        listener.bind(os.fspath(path))
        listener.listen()
        thread = threading.Thread(target=join)
        thread.start()
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(SECONDS)
            number, _, asked = Assembler().take(connection.recv(DATAGRAM_BYTES + 1)) or (0, 0, b"")
            said = {"number": 0, "capacity": 8, "tiers": False, "left": False, "joined": json.loads(asked)}
            answer = datagrams(number, Operation.JOIN, json.dumps(said).encode())
            socket.send_fds(connection, answer, [memory.descriptor])
            thread.join()
            with joined[0] as pool:
                yield Reader(connection, pool)


@pytest.mark.parametrize("before", [True, False])
def test_no_answer_to_another_message_is_taken_for_ones_own(before: bool, tmp_path: Path) -> None:
    """A thread has taken its number, and waits while another one asks, or the owner is asked for a lost answer."""
    with reader(tmp_path / "pool") as owner:
        pool, asked = owner.pool, pack_keys(keys_of([1]))
        mine = pool.next_number() if before else 0
        assert pool.ask(Operation.STATUS, asked) is None, "it is late"
        mine = mine or pool.next_number()
        late, _, _ = owner.read()
        again, kind, payload = owner.read()  # of the membership's thread
        assert (kind, payload) == (Operation.STATUS, pack_keys([]))
        for number, content in ((late, b"\1"), (again, b""), (mine, b"\2")):
            owner.answer(number, Operation.STATUS, content)
        assert pool.ask(Operation.STATUS, asked, granted=(0, mine)) == b"\2"
        early = pool.next_number()
        pool.tell(Operation.USE, asked)
        while (message := owner.read())[1] != Operation.USE:
            pass
        owner.answer(message[0], Operation.REFUSED, b"no request has this number")
        owner.answer(early, Operation.STATUS, b"\1")
        assert pool.ask(Operation.STATUS, asked, granted=(0, early)) == b"\1"


def test_a_message_that_is_sent_later_arrives_whole(tmp_path: Path) -> None:
    """The owner had read a part of it, which counted together with the rest, or all, of it."""
    with reader(tmp_path / "pool") as owner:
        payload = ENDING.pack(7, True) + os.urandom(10 * DATAGRAM_BYTES)
        owner.pool.tell(Operation.END, payload, generation=0)
        assert not owner.pool.connected, "the socket is full"
        for _ in range(2):  # now it sends again what fits, of all that it has not sent
            owner.answer(owner.pool.next_number(), Operation.REFUSED, b"of an earlier message")
            assert owner.take() is owner.take() is None
            owner.pool.tell(Operation.TOUCH, pack_keys([]))
        received = list[bytes]()
        while payload not in received:
            number, kind, content = owner.read()
            if kind == Operation.END:
                received.append(content)
            else:
                owner.answer(number, kind, b"")
        assert received == [payload]

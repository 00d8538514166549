"""What one connection, region or argument cannot do to an owner: end it, starve the others, keep it busy."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pooling import (
    IDENTITY,
    SECONDS,
    RawMember,
    Rows,
    eventually,
    forked_child,
    forks,
    keys_of,
    mapped,
    raw,
    region_bytes,
    serve,
)

from kvoffload import CacheIndex
from kvoffload.cache.policies import LRU
from kvoffload.pool import PoolOwner, SharedPool
from kvoffload.pool import owner as owners
from kvoffload.pool.messages import HEADER, Operation, pack_keys
from kvoffload.pool.region import Region
from kvoffload.tiers import MemoryTier

OTHER = b"other fingerprin"


def test_a_name_that_is_no_text_is_refused_and_the_owner_goes_on(tmp_path: Path) -> None:
    """A lone surrogate, which JSON can have and UTF-8 cannot."""
    path = str(tmp_path / "pool")
    with PoolOwner(path, nbytes=1 << 20, region_bytes=1 << 19) as owner, raw(path, join=False) as one:
        one.join(engine="\ud800")
        with raw(path, join=False, fingerprint=OTHER) as other:
            kind, why = other.ask(Operation.JOIN, other.asking(engine="\ud800"))
            assert kind == Operation.REFUSED
            assert why.startswith(b"ValueError: processes of the engine ? have joined")
        assert one.status([]) == []
        assert owner.failure is None


def test_a_tier_whose_error_is_no_text_is_refused_and_the_owner_goes_on(tmp_path: Path) -> None:
    def tiers(*_: str) -> list[Any]:
        raise OSError("\ud800")

    with serve(tmp_path, tiers=tiers) as owner, raw(owner.path, join=False) as one:
        assert one.ask(Operation.JOIN, one.asking()) == (Operation.REFUSED, b"OSError: ?")
        assert owner.statistics() == []


def test_one_who_is_refused_cannot_go_on_as_a_member(tmp_path: Path) -> None:
    with serve(tmp_path) as owner, raw(owner.path) as good, raw(owner.path, join=False) as bad:
        bad.asked.pop("fingerprint")
        kind, _ = bad.ask(Operation.JOIN, bad.asking(engine="nobody's", processes=0))
        assert kind == Operation.REFUSED
        bad.send(Operation.STATUS, pack_keys([]))
        assert bad.cut_off()
        assert good.counts()["members"] == 1


def test_an_error_in_a_region_ends_neither_the_owner_nor_other_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def broken(what: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"{what} is broken")

        return call

    with serve(tmp_path) as owner, raw(owner.path) as good, raw(owner.path) as bad:
        with monkeypatch.context() as patched:
            patched.setattr(Region, "leave", broken("leave"))
            bad.connection.send(b"garbage")
            assert bad.cut_off()
            assert good.status([]) == []
        with monkeypatch.context() as patched, raw(owner.path, join=False) as waits:
            patched.setattr(Region, "settle", broken("settle"))
            waits.asked.pop("fingerprint")
            waits.send(Operation.JOIN, waits.asking(engine="nobody's", processes=1))
            eventually(lambda: "settle is broken" in caplog.text, "it is tried while someone waits")
            eventually(lambda: good.status([]) == [], "the owner goes on")
            owner.statistics()
    assert [caplog.text.count(f"{what} is broken") for what in ("leave", "settle")] == [1, 1], "said once"


def test_a_thread_that_does_not_start_refuses_one_member_and_not_those_after_it(tmp_path: Path) -> None:
    with serve(tmp_path) as owner:
        with raw(owner.path, join=False) as one:
            usual = threading.stack_size(1 << 47)  # more than a process can map
            try:
                assert one.ask(Operation.JOIN, one.asking())[0] == Operation.REFUSED
            finally:
                threading.stack_size(usual)
        with raw(owner.path) as later:
            assert later.status([]) == []


def test_a_finalizer_in_a_thread_that_the_owner_begins_may_wait_for_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Thread.start` waits for the new thread, which a collection in its first lines holds up."""
    known, answers, begun = {threading.get_ident()}, list[object](), threading.Event.set

    def ask_before(event: threading.Event) -> None:
        if threading.get_ident() not in known:
            known.add(threading.get_ident())
            answers.append(owner.statistics())
        begun(event)

    with serve(tmp_path) as owner:
        monkeypatch.setattr(threading.Event, "set", ask_before)
        with raw(owner.path) as one:
            assert one.status([]) == []
    assert answers == [[]]


def test_a_region_without_members_keeps_its_keys_if_its_room_is_too_little(tmp_path: Path) -> None:
    with serve(tmp_path, nbytes=2 * region_bytes(4), region_bytes=region_bytes(4)) as owner:
        with raw(owner.path) as first:
            first.store(keys_of(range(4)), 1)
        with raw(owner.path, fingerprint=OTHER) as second, raw(owner.path, join=False) as large:
            eventually(lambda: [each["members"] for each in owner.statistics()] == [0, 1], "the first has left")
            kind, why = large.ask(Operation.JOIN, large.asking(identity="another's", row_bytes=1 << 20))
            assert (kind, why[:13]) == (Operation.REFUSED, b"CapacityError")
            assert second.counts()["members"] == 1
        with raw(owner.path) as first:
            assert first.status(keys_of(range(4))) == [1] * 4


def test_the_memory_of_a_region_that_made_room_is_not_kept_until_cycles_are_collected(tmp_path: Path) -> None:
    gc.collect()
    before, tiers = mapped(), lambda *_: [MemoryTier(1 << 20)]
    gc.disable()
    try:
        with serve(tmp_path, tiers=tiers) as owner:
            for number in range(3):
                with raw(owner.path, fingerprint=b"%016d" % number) as one:
                    one.store(keys_of([1]), 1)
                eventually(lambda: owner.statistics()[0]["members"] == 0, "it has left")
                assert mapped() == before + 1
        assert mapped() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_policy_that_raises_while_a_member_leaves_keeps_none_of_its_entries(
    tmp_path: Path, error: type[BaseException]
) -> None:
    class Raises(LRU):
        times = 0

        def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
            super().remove(keys, evicted=evicted)
            Raises.times += not evicted
            if Raises.times == 1:
                raise error("once")

    with serve(tmp_path, 8, policy=Raises) as owner, raw(owner.path) as good:
        with raw(owner.path) as gone:
            for number in range(4):
                gone.reserve(keys_of([number]))
        eventually(lambda: good.counts()["members"] == 1, "it has left")
        assert Raises.times >= 1
        eventually(lambda: good.room(8) == 8, "all entries are free")


def test_a_policy_that_raises_whenever_a_member_leaves_does_not_keep_the_owner_from_ending(tmp_path: Path) -> None:
    class Raises(LRU):
        def remove(self, keys: Sequence[bytes], evicted: bool) -> None:
            del keys, evicted
            raise SystemExit

    for _ in range(2):  # the second one listens at the path of the first
        with serve(tmp_path, 8, policy=Raises) as owner, raw(owner.path) as one, raw(owner.path) as other:
            one.reserve(keys_of([1]))
            other.reserve(keys_of([2]))
            owner.close()
            assert owner.failure is None
            assert owner.statistics() == []


@forks
def test_a_child_that_sends_on_after_its_parent_has_died_keeps_no_one_waiting(tmp_path: Path) -> None:
    """Only what was sent before the owner knew of the death is read."""

    class Slow(LRU):
        def touch(self, keys: Sequence[bytes]) -> None:
            time.sleep(0.001)  # longer than the child takes to send the next one
            super().touch(keys)

    read, write = os.pipe()
    with serve(tmp_path, policy=Slow) as owner, raw(owner.path) as good:
        child = os.fork()
        if child == 0:
            try:
                mine = RawMember(owner.path)
                mine.join()
                mine.store(keys_of([1]), 1)
                if os.fork() > 0:
                    os.read(read, 1)  # until it sends
                    os._exit(0)
                for number in itertools.count():  # until the owner does not read any more
                    mine.send(Operation.TOUCH, pack_keys(keys_of([1])))
                    if number == 100:
                        os.write(write, b"x")
            except OSError:
                os.write(write, b"x")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert select.select([read], [], [], SECONDS)[0], "the owner still reads what the child sends"
        assert good.counts()["members"] == 1
    os.close(read)
    os.close(write)


@forks
@pytest.mark.filterwarnings("ignore:unclosed <socket", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("closes", [True, False])
def test_a_member_that_closes_or_is_forgotten_has_left_though_a_forked_child_lives_on(
    closes: bool, tmp_path: Path
) -> None:
    """What it had is free at once if it closes."""
    with serve(tmp_path, 8) as owner, raw(owner.path) as other:
        pool = SharedPool.attach(owner.path, Rows(), identity=IDENTITY)
        index = CacheIndex(pool)
        index.reserve(keys_of(range(4))).commit()
        held = [index.acquire(keys_of(range(4))), index.reserve(keys_of(range(4, 8)))]
        assert other.counts()["members"] == 2
        with forked_child():
            if closes:
                pool.close()
            del pool, index, held
            gc.collect()
            eventually(lambda: other.counts()["members"] == 1, "the member has left")
            eventually(lambda: other.room(8) == 8 or not closes, "all entries are free")


# connections that do not join -----------------------------------------------------------------------------------------


def test_connections_that_do_not_ask_to_join_or_were_refused_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(tmp_path) as owner, raw(owner.path) as member:
        monkeypatch.setattr(owners, "JOIN_SECONDS", 0.05)
        with raw(owner.path, join=False) as idle:
            assert idle.cut_off()
        with raw(owner.path, join=False) as refused:
            kind, why = refused.ask(Operation.JOIN, refused.asking(version=77))
            assert kind == Operation.REFUSED
            assert why.startswith(b"CapabilityError: the owner speaks version 2, the member 77: ")
            assert refused.cut_off()
        assert member.status([]) == [], "a member may be silent"


def test_a_connection_that_waits_keeps_no_more_than_one_descriptor_of_what_it_sends(tmp_path: Path) -> None:
    with serve(tmp_path) as owner, raw(owner.path) as member, raw(owner.path, join=False) as waits:
        waits.asked.pop("fingerprint")
        waits.send(Operation.JOIN, waits.asking(engine="nobody's", processes=1))
        member.status([])
        before = len(os.listdir("/proc/self/fd"))
        for number in range(50):
            begins = HEADER.pack(number, Operation.FIND, True)
            socket.send_fds(waits.connection, [begins], [0])
            member.status([])
        eventually(lambda: len(os.listdir("/proc/self/fd")) == before + 1, "one is kept")


def test_an_owner_without_descriptors_says_so_once_and_does_not_spin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    accept, accepts = socket.socket.accept, list[int]()

    def counted(listener: socket.socket) -> Any:
        accepts.append(1)
        return accept(listener)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serve(tmp_path) as owner, raw(owner.path) as member:
        member.status([])
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        monkeypatch.setattr(socket.socket, "accept", counted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            connection.connect(owner.path)
            eventually(lambda: len(accepts) > 1, "it tries again")
            time.sleep(0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(accepts) < 50
        assert caplog.text.count("accepts no connection: OSError: [Errno 24]") == 1
        with raw(owner.path) as later:
            assert later.status([]) == [], "it accepts again"
        connection.close()


# arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"write": "x"}, "write must be one of admitted, through, back, none, got 'x'"),
        ({"policy": LRU(4)}, "policy must be a name or a function of the capacity, of each region, got LRU"),
        ({"busy_poll": -0.1}, "busy_poll must be a number of seconds"),
        ({"busy_poll": True}, "busy_poll must be a number of seconds"),
        ({"tiers": 5}, "tiers must be a function of a region's name and identity, or None, got 5"),
    ],
)
def test_arguments_that_cannot_be_are_named(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        PoolOwner(tmp_path / "pool", nbytes=region_bytes(8), **options)
    assert os.listdir(tmp_path) == []

"""The owner of a pool: whom it serves, with how much, and what it does with members that are gone, wrong or silent."""

from __future__ import annotations

import fcntl
import os
import random
import select
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pooling import (
    ENTRY_BYTES,
    SECONDS,
    Made,
    RawMember,
    Rows,
    Standing,
    descriptors,
    eventually,
    forks,
    keys_of,
    member,
    raw,
    region_bytes,
    serve,
)

import kvoffload
from kvoffload import CapacityError, Tenant
from kvoffload.pool import PoolOwner, SharedPool
from kvoffload.pool import owner as owners
from kvoffload.pool.messages import HEADER, PENDING, REQUEST, Operation, datagrams, pack_keys
from kvoffload.tiers import MemoryTier

OTHER = b"other fingerprin"


def pending(owner: PoolOwner) -> tuple[int, int]:
    (found,) = owner.statistics()
    return found["pending"], found["pinned"]


# where it serves ------------------------------------------------------------------------------------------------------


def test_a_path_that_cannot_be_served_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    before = descriptors()
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write"):
        PoolOwner(shared / "pool", nbytes=1 << 20)
    shared.chmod(0o1777)  # like /tmp
    PoolOwner(shared / "pool", nbytes=1 << 20).close()
    with pytest.raises(OSError, match="there is no such folder: mkdir -p"):
        PoolOwner(tmp_path / "nowhere" / "pool", nbytes=1 << 20)
    (tmp_path / "file").touch()
    for below in ("file/pool", "file/folder/pool"):
        with pytest.raises(NotADirectoryError, match=f"Not a directory: '{tmp_path}/{os.path.dirname(below)}'"):
            PoolOwner(tmp_path / below, nbytes=1 << 20)
    assert (tmp_path / "file").read_bytes() == b""
    with pytest.raises(ValueError, match="region_bytes must be at most nbytes, 1048576, got 1048577"):
        PoolOwner(tmp_path / "pool", nbytes=1 << 20, region_bytes=(1 << 20) + 1)
    assert descriptors() == before
    assert sorted(os.listdir(tmp_path)) == ["file", "shared"]
    assert os.listdir(shared) == []


def test_a_folder_that_another_process_keeps_locked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "LOCK_SECONDS", 0.05)
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match=r"keeps .* locked: choose a folder of your own"):
        PoolOwner(tmp_path / "pool", nbytes=1 << 20)
    os.close(folder)
    PoolOwner(tmp_path / "pool", nbytes=1 << 20).close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    for path in (tmp_path / "file", tmp_path / "folder"):
        path.write_text("precious") if path.name == "file" else path.mkdir()
        with pytest.raises(ValueError, match="no socket"):
            PoolOwner(path, nbytes=1 << 20)
    assert (tmp_path / "file").read_text() == "precious"
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(ValueError, match="no socket"):
        PoolOwner(tmp_path / "link", nbytes=1 << 20)


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that follows one that was killed waits for no members of that one: there are none."""
    monkeypatch.setattr(owners, "GRACE_SECONDS", 0.01)


@pytest.mark.usefixtures("no_grace")
def test_two_owners_at_one_path_are_refused_and_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    with serve(tmp_path), pytest.raises(ValueError, match="another owner serves"):
        PoolOwner(tmp_path / "pool", nbytes=1 << 20)
    assert os.listdir(tmp_path) == []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(tmp_path / "pool"))
    with serve(tmp_path) as owner, raw(owner.path):
        assert (tmp_path / "pool").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == []


def test_an_owner_that_ends_leaves_the_socket_of_the_next_one(tmp_path: Path) -> None:
    first = PoolOwner(tmp_path / "pool", nbytes=1 << 20)
    os.unlink(tmp_path / "pool")
    with serve(tmp_path):
        first.close()
        with raw(str(tmp_path / "pool")):
            pass


# regions --------------------------------------------------------------------------------------------------------------


def test_regions_without_members_make_room_for_others(tmp_path: Path) -> None:
    path = str(tmp_path / "pool")
    with PoolOwner(path, nbytes=2 * region_bytes(8), region_bytes=region_bytes(8)) as owner, raw(path) as first:
        first.store(keys_of([1]), 1)
        with raw(path, fingerprint=OTHER) as second:
            assert second.status(keys_of([1])) == [0], "other layouts have keys of their own"
            with raw(path, join=False, fingerprint=b"third fingerprin") as third:
                kind, why = third.ask(Operation.JOIN, third.asking())
            assert (kind, why[:13]) == (Operation.REFUSED, b"CapacityError"), "both regions have members"
        eventually(lambda: min(each["members"] for each in owner.statistics()) == 0, "a member is gone")
        with raw(path, fingerprint=b"third fingerprin"):
            assert len(owner.statistics()) == 2
        with raw(path) as again:
            assert again.status(keys_of([1])) == [1], "the region with a member has stayed"


def test_a_region_takes_63_members(tmp_path: Path) -> None:
    with serve(tmp_path) as owner, ExitStack() as stack:
        joined = [stack.enter_context(raw(owner.path)) for _ in range(63)]
        assert sorted(each.place for each in joined) == list(range(63))
        joined[-1].store(keys_of([1]), 7)
        with raw(owner.path, join=False) as more:
            kind, why = more.ask(Operation.JOIN, more.asking())
        assert kind == Operation.REFUSED
        assert b"63" in why
        joined[20].close()
        with raw(owner.path) as next_one:
            assert next_one.place == 20
            assert next_one.status(keys_of([1])) == [1]


def test_tenants_have_their_quotas_and_others_are_refused(tmp_path: Path) -> None:
    with serve(tmp_path, 16, tenants={"small": Tenant(max_blocks=3), "": Tenant(max_blocks=8)}) as owner:
        with raw(owner.path, tenant="small") as small, raw(owner.path) as other:
            assert len(small.reserve(keys_of(range(5)))[1]) == 3
            assert len(other.reserve(keys_of(range(10, 26)))[1]) == 8
            with raw(owner.path, join=False, tenant="nobody") as wrong:
                kind, why = wrong.ask(Operation.JOIN, wrong.asking())
            assert (kind, why[:10]) == (Operation.REFUSED, b"ValueError")
        eventually(lambda: pending(owner) == (0, 0), "reservations of members that are gone end")


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 1}, {"version": None}, {"fingerprint": "xy"}, {"fingerprint": "00"}, {"row_bytes": 0},
        {"tenant": 3}, {"row_bytes": 4095}, {"row_bytes": "x"}, {"row_bytes": None}, {"row_bytes": 1 << 50},
        {"row_bytes": -4096}, {"number": "x", "capacity": 10**30}, {"row_bytes": float("inf")}, {"row_bytes": 1e300},
    ],
)  # fmt: skip
def test_a_member_that_asks_for_nonsense_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with serve(tmp_path) as owner:
        with raw(owner.path, join=False) as asking:
            kind, _ = asking.ask(Operation.JOIN, asking.asking(**changes))
        assert kind == Operation.REFUSED
        with raw(owner.path) as good:
            assert good.status([]) == []
        assert len(owner.statistics()) == 1


# wrong members --------------------------------------------------------------------------------------------------------


def test_garbage_ends_its_senders_connection_and_no_other(tmp_path: Path, seed: int) -> None:
    rng, path = random.Random(seed), str(tmp_path / "pool")
    with serve(tmp_path) as owner, raw(path) as good:
        good.store(keys_of(range(8)), 1)
        for number in range(150):
            with raw(path, join=number % 3 > 0) as bad:
                sent = rng.choice(
                    (
                        rng.randbytes(rng.randint(1, 100)),
                        HEADER.pack(1, rng.randint(0, 20), False) + rng.randbytes(rng.randint(0, 60)),
                        HEADER.pack(rng.randrange(1 << 60), rng.randint(0, 20), rng.random() < 0.2) + pack_keys([b"x"]),
                        datagrams(1, Operation.JOIN, b"[" * 40_000)[0],
                        datagrams(1, Operation.HINT, b"{}")[0],
                        bytes(60_000),
                    )
                )
                try:
                    for _ in range(rng.randint(1, 3)):
                        bad.connection.send(sent)
                    bad.connection.settimeout(0.005)
                    bad.receive()
                except (OSError, kvoffload.KVOffloadError):
                    pass
        assert good.status(keys_of(range(8))) == [1] * 8
        eventually(lambda: owner.statistics()[0]["members"] == 1, "the others are gone")
        assert pending(owner) == (0, 0)


@pytest.mark.parametrize("operation", list(Operation))
def test_every_message_cut_off_anywhere_is_survived(operation: Operation, tmp_path: Path) -> None:
    """Of a message that is wrong the owner refuses the content, or ends the connection."""
    path, keys = str(tmp_path / "pool"), pack_keys(keys_of([1, 2]))
    payload = bytes(9) + keys if operation in (Operation.RESERVE, Operation.USE, Operation.TAKE) else keys
    with serve(tmp_path, 8) as owner, raw(path) as good:
        for length in range(len(payload) + 1):
            with raw(path) as bad:
                bad.send(operation, payload[:length])
        assert good.status(keys_of([5])) == [0]
        eventually(lambda: owner.statistics()[0]["members"] == 1, "the others are gone")
        eventually(lambda: good.room(8) == 8, "all entries are free")


def test_asking_to_join_again_ends_the_connection_and_leaves_no_member(tmp_path: Path) -> None:
    with serve(tmp_path) as owner:
        for joined in (True, False):
            with raw(owner.path, join=joined) as bad:
                for _ in range(2 - joined):
                    bad.send(Operation.JOIN, bad.asking())
                assert bad.cut_off()
        with raw(owner.path):
            eventually(lambda: owner.statistics()[0]["members"] == 1, "the others are gone")


def test_keys_given_twice_reserve_no_entry_for_ever(tmp_path: Path) -> None:
    with serve(tmp_path, 8) as owner, raw(owner.path) as good:
        with raw(owner.path) as bad:
            bad.send(Operation.RESERVE, bytes(9) + pack_keys([b"a", b"a", b"b", b"a"]))
            assert bad.cut_off()
        eventually(lambda: good.room(8) == 8, "all entries are free")


@pytest.mark.parametrize("again", [Operation.RESERVE, Operation.TAKE])
@pytest.mark.parametrize("first", [Operation.RESERVE, Operation.TAKE])
def test_a_number_that_holds_entries_is_not_used_again(first: Operation, again: Operation, tmp_path: Path) -> None:
    with serve(tmp_path, 8) as owner, raw(owner.path) as good:
        good.store(keys_of([1, 2]), 1)
        keys = {Operation.RESERVE: [keys_of([10]), keys_of([11])], Operation.TAKE: [keys_of([1]), keys_of([2])]}
        with raw(owner.path) as bad:
            bad.ask(first, bytes(9) + pack_keys(keys[first][0]))
            bad.number -= 1
            bad.send(again, bytes(9) + pack_keys(keys[again][1]))
            assert bad.cut_off()
        eventually(lambda: pending(owner) == (0, 0), "nothing is held")
        eventually(lambda: good.room(6) == 6, "all entries are free")


def test_a_member_that_does_not_read_its_answers_is_cut_off(tmp_path: Path) -> None:
    path, keys = str(tmp_path / "pool"), pack_keys([b"key"])
    with serve(tmp_path), raw(path) as good, raw(path) as bad:

        def ask_on() -> None:
            for _ in range(20_000):
                bad.send(Operation.STATUS, keys)

        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            ask_on()
        assert good.status([]) == []


def test_what_a_member_ends_twice_or_never_had_is_ignored(tmp_path: Path) -> None:
    with serve(tmp_path, 8) as owner, raw(owner.path) as one, raw(owner.path) as other:
        number, _ = one.reserve(keys_of([1]))
        other.end(number)
        other.end(12345, well=False)
        assert other.status(keys_of([1])) == [2]
        one.end(number)
        one.end(number)
        one.end(number, well=False)
        assert one.status(keys_of([1])) == [1]
        lease, entries = other.take(keys_of([1, 1]))
        assert len(entries) == 2
        assert pending(owner) == (0, 1)
        other.end(lease)
        other.end(lease)
        assert other.counts()["pinned"] == 0


# members that are gone ------------------------------------------------------------------------------------------------


def test_entries_of_a_member_that_is_gone_are_kept_until_its_lock_is_free(tmp_path: Path) -> None:
    with serve(tmp_path, 4) as owner, raw(owner.path) as other, raw(owner.path) as dying:
        _, entries = dying.reserve(keys_of([1, 2]))
        assert other.status(keys_of([1])) == [2]
        dying.connection.close()
        eventually(lambda: other.status(keys_of([1])) == [0], "its keys are missing")
        number, found = other.reserve(keys_of([1, *range(10, 14)]))  # a key in quarantine can be stored at once
        assert len(found) == 2
        assert not set(found) & set(entries)
        other.end(number)
        dying.close()
        eventually(lambda: other.room(4) == 4, "the quarantine is over")
        assert owner.statistics()[0]["members"] == 1


def test_a_member_that_lost_its_connection_alone_keeps_what_it_reads(tmp_path: Path) -> None:
    """The owner cuts off who sends garbage; its GPU may still read what it has leased."""
    with serve(tmp_path, 4) as owner, raw(owner.path) as other, raw(owner.path) as cut, ExitStack() as stack:
        entries = cut.store(keys_of([1, 2]), 7)
        cut.take(keys_of([1, 2]))
        cut.connection.send(b"garbage")
        assert cut.cut_off()
        for first in (10, 20, 30):
            number, found = other.reserve(keys_of(range(first, first + 4)))
            assert not set(found) & set(entries)
            other.end(number)
        assert cut.memory is not None
        assert (cut.memory.rows[entries] == 7).all()
        again = stack.enter_context(raw(owner.path, join=False))  # it comes back with its memory
        again.join(cut.memory, number=cut.place, capacity=4)
        assert again.place == cut.place
        assert len(other.reserve(keys_of(range(40, 44)))[1]) == 2
        again.send(Operation.CLEAN)
        eventually(lambda: other.room(2) == 2, "the quarantine is over")


def test_what_a_member_read_before_it_lost_its_connection_the_next_owner_keeps(tmp_path: Path) -> None:
    """Also if it has read the same keys once more since."""
    with serve(tmp_path, 4) as owner, raw(owner.path) as cut, raw(owner.path, join=False) as again:
        entries = cut.store(keys_of([1, 2]), 7)
        cut.take(keys_of([1, 2]))
        cut.connection.send(b"garbage")
        assert cut.cut_off()
        back = {"number": cut.place, "capacity": 4}
        again.join(cut.memory, **back)
        lease, _ = again.take(keys_of([1, 2]))
        again.end(lease)
        assert again.counts()["pinned"] == 2
        owner.close()
        with serve(tmp_path, 4), raw(owner.path, join=False) as later, raw(owner.path, join=False) as other:
            later.join(cut.memory, **back)
            other.join()
            number, found = other.reserve(keys_of(range(10, 14)))
            assert not set(found) & set(entries)
            other.end(number, well=False)
            later.send(Operation.CLEAN)
            eventually(lambda: other.room(4) == 4, "nothing is held")


@forks
def test_a_socket_that_a_child_has_inherited_does_not_keep_a_member_alive(tmp_path: Path) -> None:
    """The member's process ends, and another one has its socket and its lock: its leases end, its entries stay kept."""
    with serve(tmp_path, 4) as owner, raw(owner.path) as other:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                mine = RawMember(owner.path)
                mine.join()
                mine.store(keys_of([9]), 3)
                mine.take(keys_of([9]))
                mine.reserve(keys_of([1, 2]))
                if os.fork() == 0:
                    os.close(write)
                    select.select([read], [], [], 20)  # until the test ends it
            finally:
                os._exit(0)
        os.close(read)
        os.waitpid(child, 0)
        eventually(lambda: owner.statistics()[0]["members"] == 1, "the member is gone")
        assert other.status(keys_of([9, 1, 2])) == [1, 0, 0]
        number, found = other.reserve(keys_of(range(20, 24)))
        assert len(found) == 2, "the lease has ended, and what it was writing is in quarantine"
        other.end(number, well=False)
        os.close(write)
        eventually(lambda: other.room(4) == 4, "the quarantine is over")


def test_nothing_is_left_when_an_owner_and_its_members_have_ended(tmp_path: Path) -> None:
    shm = set(os.listdir("/dev/shm"))
    for turn in range(3):
        if turn == 1:
            before, threads = descriptors(), threading.active_count()
        with serve(tmp_path, 8, tiers=lambda *_: [MemoryTier(1 << 20)]) as owner, member(owner.path) as one:
            one.store(1, 2, 3)
            one.check_load(1, 2, 3)
            with raw(owner.path, fingerprint=OTHER, join=False):
                pass
        del one
    eventually(lambda: threading.active_count() == threads, "threads are left")
    eventually(lambda: descriptors() == before, "descriptors are left")
    assert not [each for each in set(os.listdir("/dev/shm")) - shm if "kvoffload" in each]
    assert os.listdir(tmp_path) == []


def test_attach_says_what_is_wrong(tmp_path: Path) -> None:
    path = str(tmp_path / "pool")
    (tmp_path / "file").touch()
    for nowhere in (path, str(tmp_path / "file" / "pool"), str(tmp_path / "file")):
        before = descriptors()
        with pytest.raises(TimeoutError, match=r"no owner answers at '/.*; waited 0.05 seconds"):
            SharedPool.attach(nowhere, Rows(), identity="m", timeout=0.05)
        assert descriptors() == before
    with serve(tmp_path, nbytes=ENTRY_BYTES), pytest.raises(CapacityError, match="no room for a region"):
        SharedPool.attach(path, Rows(), identity="m")
    with serve(tmp_path), pytest.raises(ValueError, match=r"tenant='x' is none of the owner's: ''$"):
        SharedPool.attach(path, Rows(), identity="m", tenant="x")


def test_promotions_and_requests_of_a_member_that_is_gone_end(tmp_path: Path) -> None:
    with serve(tmp_path, 4, tiers=lambda *_: [MemoryTier(1 << 20)], write="through") as owner:
        with raw(owner.path) as one:
            one.store(keys_of([1, 2]), 9)
            one.send(Operation.OPEN, (77).to_bytes(8, "little") + b"\1session")
            one.send(Operation.BRING, (50).to_bytes(4, "little") + pack_keys(keys_of([1, 2, 3])))
            kind, content = one.receive()[1:]
            assert (kind, content) == (Operation.BRING, (2).to_bytes(4, "little"))
            assert one.counts()["pinned"] == 2
            one.send(Operation.CLOSE, REQUEST.pack(77))
            one.send(Operation.BRING, (60_000).to_bytes(4, "little") + pack_keys(keys_of([1, 4])))
        eventually(lambda: pending(owner) == (0, 0), "nothing is held")
        with raw(owner.path) as two:
            eventually(lambda: two.room(4) == 4, "all entries are free")


def test_what_was_promoted_for_a_member_that_does_not_take_it_is_not_held_for_long(tmp_path: Path) -> None:
    """Its fetch was interrupted, or had given up: it held half of the entries, all that promotions may have, for ever,
    so that no other member got a key from a tier.
    """
    path, tier = str(tmp_path / "pool"), MemoryTier(1 << 20)
    with serve(tmp_path, 4, tiers=lambda *_: [tier], write="through") as owner, raw(path) as one:
        one.store(keys_of([1, 2]), 9)
        eventually(lambda: all(tier.contains(keys_of([1, 2]))), "the tier has them")
        eventually(lambda: pending(owner) == (0, 0), "it reads them no more")
        one.ask(Operation.FORGET, pack_keys(keys_of([1, 2])))
        assert one.ask(Operation.BRING, (1000).to_bytes(4, "little") + pack_keys(keys_of([1, 2])))[1][0] == 2
        assert pending(owner) == (0, 2)
        eventually(lambda: pending(owner) == (0, 0), "nothing is held")
        assert one.status(keys_of([1, 2])) == [1, 1]
        one.send(Operation.BRING, (5).to_bytes(4, "little") + pack_keys(keys_of([1, 3])))
        eventually(lambda: pending(owner) == (0, 0), "nothing is held")


def test_pending_keys_of_others_are_not_taken(tmp_path: Path) -> None:
    with serve(tmp_path, 4) as owner, raw(owner.path) as one, raw(owner.path) as other:
        _, entries = one.reserve(keys_of([1, 2]))
        assert other.take(keys_of([1, 2]), PENDING)[1] == []
        assert one.take(keys_of([1, 2]), PENDING)[1] == entries
        assert one.take(keys_of([1, 2]))[1] == []


@pytest.mark.parametrize("busy_poll", [0.0, 1.0])
def test_statistics_count_what_members_had_done_before(busy_poll: float, tmp_path: Path) -> None:
    """Also the end of a member, whether the owner sleeps between messages or asks for the next one all the time."""
    with serve(tmp_path, busy_poll=busy_poll) as owner:
        for number in range(1, 15):
            with raw(owner.path) as one:
                reserved, _ = one.reserve([b"key %d" % number])
                one.end(reserved)
                assert owner.statistics()[0]["resident"] == number
            assert owner.statistics()[0]["members"] == 0


LEAVES = """
import socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect(sys.argv[1])
    print("there", flush=True)
    sys.stdin.readline()
print("gone", flush=True)
sys.stdin.readline()
"""


def test_the_end_of_a_process_is_not_taken_for_that_of_one_that_comes_meanwhile(tmp_path: Path) -> None:
    """The owner closes the descriptors of the first one, and gets the same numbers for the second, in one look."""
    policies = Made(Standing)
    with serve(tmp_path, 8, policy=policies) as owner, raw(owner.path) as one:
        command = [sys.executable, "-c", LEAVES, owner.path]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            owner.statistics()  # it has been accepted
            one.send(Operation.TOUCH, pack_keys([b"key"]))
            eventually(lambda: any(each.stands.is_set() for each in policies), "the owner is busy")
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "gone\n"
            with raw(owner.path, join=False) as other:
                process.kill()
                process.wait(SECONDS)
                Standing.let_go(policies)
                other.join()
                other.reserve([b"another"])
                assert owner.statistics()[0]["members"] == 2

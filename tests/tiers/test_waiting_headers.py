"""Headers that wait until no payload is being written: read, removed, synced, and failing when they are written."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk_sets import FaultyFiles, kill, open_set, payload, stored, write_one

from kvoffload.testing.tier_pools import TierPools
from kvoffload.tiers import DiskTier, Limits, Outcome
from kvoffload.tiers.format import HEADER_BYTES, TABLE_OFFSET
from kvoffload.tiers.member_file import _MOST_WAITING
from kvoffload.tiers.slot_files import SlotFiles

HELD = 0  # the slot of the payload that is being written


@contextmanager
def a_payload_being_written(files: SlotFiles, operations: FaultyFiles) -> Iterator[Callable[[], None]]:
    """A thread writes the record of slot 0 and does not get on; the function that is yielded lets it end."""
    begun, released = threading.Event(), threading.Event()
    holder = threading.Thread(target=write_one, args=(files, HELD, b"held", "", payload(0), 0, 0))

    def before(name: str) -> None:
        if name == "pwritev" and threading.current_thread() is holder and not released.is_set():
            begun.set()
            assert released.wait(60)

    def release() -> None:
        released.set()
        holder.join()

    operations.before = before
    holder.start()
    try:
        assert begun.wait(60)
        yield release
    finally:
        release()
        operations.before = lambda _: None


def in_the_file(files: SlotFiles) -> set[bytes]:
    """The keys of valid headers, as another process sees them."""
    return set(open_set(*map(Path, files.paths), read_only=True).load().keys)


def test_headers_are_written_together_after_the_last_payload(files: SlotFiles, operations: FaultyFiles) -> None:
    with a_payload_being_written(files, operations) as release:
        for slot in (1, 2, 3, 6):
            assert write_one(files, slot, b"%d" % slot, "", payload(slot), slot, 0)
        assert all(stored(files, slot, b"%d" % slot, slot) for slot in (1, 2, 3, 6))
        assert in_the_file(files) == set()
        operations.calls.clear()
        release()
        assert operations.calls == ["pwritev", "pwritev"], "slots 0 to 3, and 6"
    assert in_the_file(files) == {b"held", b"1", b"2", b"3", b"6"}


def test_no_more_than_512_wait(operations: FaultyFiles, tmp_path: Path) -> None:
    files = open_set(tmp_path / "a.kv", slots=_MOST_WAITING + 2, operations=operations)
    with a_payload_being_written(files, operations):
        for slot in range(1, _MOST_WAITING):
            write_one(files, slot, b"%d" % slot, "", payload(slot), slot, 0)
        assert in_the_file(files) == set()
        write_one(files, _MOST_WAITING, b"last", "", payload(1), 0, 0)
        assert len(in_the_file(files)) == _MOST_WAITING == 512


def test_a_sync_writes_those_that_wait(files: SlotFiles, operations: FaultyFiles) -> None:
    with a_payload_being_written(files, operations):
        write_one(files, 1, b"key", "", payload(1), 1, 0)
        operations.calls.clear()
        files.sync()
        assert operations.calls == ["pwritev", "fdatasync"]
        assert in_the_file(files) == {b"key"}


def test_a_write_that_raises_keeps_no_later_header_from_the_file(files: SlotFiles) -> None:

    def wanted(_: bytes) -> bool:
        raise MemoryError

    with pytest.raises(MemoryError):
        write_one(files, 0, b"first", "", payload(0), 0, 0, wanted=wanted)
    assert write_one(files, 1, b"key", "", payload(1), 1, 0)
    assert in_the_file(files) == {b"key"}


def test_no_header_waits_when_a_tier_is_idle(tmp_path: Path) -> None:
    """A process that is killed then loses no record: another one finds all without a flush."""
    names = [b"key %d" % number for number in range(64)]
    memory = TierPools(64, 4096, 1, seed=1)
    tier, reader = (
        DiskTier(tmp_path / "a.kv", nbytes=1 << 20, identity="model@1", read_only=read_only)
        for read_only in (False, True)
    )
    tier.attach(memory.arrays, memory.layout)
    jobs = [tier.put(names[start : start + 8], range(start, start + 8)) for start in range(0, 64, 8)]
    assert [job.wait(60) for job in jobs] == [[Outcome.DONE] * 8] * 8
    reader.attach(memory.arrays, memory.layout)
    assert all(reader.contains(names))
    assert tier.close(60)
    assert reader.close(60)


@pytest.mark.parametrize("call", ["remove", "clear"])
def test_what_is_removed_while_its_header_waits_is_never_in_the_file(
    files: SlotFiles, operations: FaultyFiles, call: str
) -> None:
    write_one(files, 1, b"older", "", payload(9), 0, 0)
    with a_payload_being_written(files, operations) as release:
        write_one(files, 1, b"key", "", payload(1), 1, 0)
        write_one(files, 2, b"other", "", payload(2), 1, 1)
        if call == "remove":
            files.remove([b"key"])
        else:
            files.clear()
        assert not stored(files, 1, b"key", 1)
        release()
        assert in_the_file(files) == ({b"held", b"other"} if call == "remove" else {b"held"})


def test_a_removal_of_the_key_before_it_writes_the_header_first(files: SlotFiles, operations: FaultyFiles) -> None:
    """The file still has the older header, and must not keep it."""
    write_one(files, 1, b"older", "", payload(9), 0, 0)
    files.remove([b"nothing"])  # the first removal of a process syncs
    with a_payload_being_written(files, operations):
        write_one(files, 1, b"key", "", payload(1), 1, 0)
        assert in_the_file(files) == {b"older"}
        files.remove([b"older"])
        assert in_the_file(files) == {b"key"}


def test_headers_that_cannot_be_written_go_on_waiting_and_a_sync_fails_until_they_are(
    files: SlotFiles, operations: FaultyFiles
) -> None:
    with a_payload_being_written(files, operations):
        write_one(files, 1, b"first", "", payload(1), 1, 0)
        write_one(files, 5, b"second", "", payload(5), 1, 1)
        operations.failing["pwritev"] = errno.EIO
        for _ in range(2):
            with pytest.raises(OSError, match="error"):
                files.sync()
        assert in_the_file(files) == set()
        assert stored(files, 1, b"first", 1)
        operations.failing.clear()
        files.sync()
        assert in_the_file(files) == {b"first", b"second"}
    assert stored(files, 5, b"second", 5)


@pytest.mark.parametrize("neighbours", [True, False])
def test_a_write_is_refused_for_its_own_header_alone_and_the_next_one_tries_the_others_again(
    files: SlotFiles, operations: FaultyFiles, neighbours: bool
) -> None:
    waiting = {slot: b"%d" % slot for slot in ((1, 2) if neighbours else (2, 5))}
    with a_payload_being_written(files, operations) as release:
        for slot, key in waiting.items():
            write_one(files, slot, key, "", payload(slot), 1, 0)

        def fail_all_headers(name: str) -> None:
            release()  # the payload of slot 3 is the last one
            if operations.calls.count(name) > 1:
                operations.failing["pwritev"] = errno.EIO

        operations.calls.clear()
        operations.before = fail_all_headers
        with pytest.raises(OSError, match="error"):
            write_one(files, 3, b"refused", "", payload(3), 1, 1)
        operations.before = lambda _: None
        operations.failing.clear()
    assert not stored(files, 3, b"refused", 3)
    assert all(stored(files, slot, key, slot) for slot, key in waiting.items())
    assert write_one(files, 6, b"next", "", payload(6), 2, 0)
    kill(files)
    assert in_the_file(files) == {b"held", b"next", *waiting.values()}


def test_one_header_that_cannot_be_written_keeps_no_neighbour_waiting(tmp_path: Path) -> None:
    """They are written in one call, and one by one if that fails."""

    class BadSector(FaultyFiles):
        broken = True

        def pwritev(self, file: int, views: Sequence[memoryview], offset: int) -> int:
            end = offset + sum(map(len, views))
            if self.broken and len(views[0]) == HEADER_BYTES and offset <= TABLE_OFFSET + 2 * HEADER_BYTES < end:
                raise OSError(errno.EIO, "bad sector")
            return super().pwritev(file, views, offset)

    operations = BadSector()
    files = open_set(tmp_path / "a.kv", operations=operations)
    with a_payload_being_written(files, operations):
        for slot in (1, 2, 3):
            write_one(files, slot, b"%d" % slot, "", payload(slot), slot, 0)
    assert in_the_file(files) == {b"held", b"1", b"3"}
    with pytest.raises(OSError, match="bad sector"):
        files.sync()
    operations.broken = False
    files.sync()
    assert in_the_file(files) == {b"held", b"1", b"2", b"3"}


@pytest.mark.parametrize("call", ["remove", "clear"])
def test_a_removal_while_a_header_cannot_be_written_is_not_undone_by_the_next_try(
    files: SlotFiles, operations: FaultyFiles, call: str
) -> None:
    write_one(files, 1, b"older", "", payload(9), 0, 0)
    files.remove([b"nothing"])  # the first removal of a process syncs
    with a_payload_being_written(files, operations):
        write_one(files, 1, b"key", "", payload(1), 1, 0)
        operations.failing["pwritev"] = errno.EIO
        with pytest.raises(OSError, match="error"):
            files.sync()
        with pytest.raises(OSError, match="error"):  # the file still has its header
            files.remove([b"older"])
        operations.failing.clear()
        if call == "remove":
            files.remove([b"older", b"key"])
        else:
            files.clear()
        assert not stored(files, 1, b"key", 1)
        files.sync()
        assert in_the_file(files) == set()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_put_that_was_done_is_drained_and_found_after_a_restart_though_another_puts_headers_failed(
    tmp_path: Path, number: int
) -> None:
    operations, memory = FaultyFiles(), TierPools(8, 4096, 1, seed=1)
    hold = threading.Event()
    tier = DiskTier(
        tmp_path / "a.kv", nbytes=1 << 20, identity="model@1", operations=operations, limits=Limits(threads=2)
    )
    tier.attach(memory.arrays, memory.layout)
    begun = threading.Event()

    def hold_the_first(_: str) -> None:
        if not begun.is_set():
            begun.set()
            assert hold.wait(60)

    operations.before = hold_the_first
    other = tier.put([b"other"], [0])
    assert begun.wait(60)
    assert tier.put([b"a", b"b"], [1, 2]).wait(60) == [Outcome.DONE] * 2
    payloads = operations.calls.count("pwritev")

    def fail_headers(name: str) -> None:
        if name == "pwritev" and operations.calls.count(name) > payloads:
            operations.failing[name] = number

    operations.before = fail_headers
    hold.set()
    assert other.wait(60) == [Outcome.FAILED if number == errno.EIO else Outcome.DECLINED]
    assert tier.contains([b"a", b"b", b"other"]) == [True, True, False]
    assert not tier.drain(60)
    operations.before = lambda _: None
    operations.failing.clear()
    assert tier.get([b"a", b"b"], [6, 7]).wait(60) == [Outcome.DONE] * 2
    assert tier.drain(60)
    again = DiskTier(tmp_path / "a.kv", nbytes=1 << 20, identity="model@1", read_only=True)
    again.attach(memory.arrays, memory.layout)
    assert again.get([b"a", b"b"], [4, 5]).wait(60) == [Outcome.DONE] * 2
    assert all((pool[[4, 5]] == pool[[1, 2]]).all() for pool in memory.arrays)
    assert again.close(60)
    assert tier.close(60)


def test_a_record_over_one_whose_header_could_not_be_written_does_not_make_that_one_durably_gone(
    files: SlotFiles, operations: FaultyFiles
) -> None:
    """The header may have reached the file all the same, and a crash may bring it back until the next sync."""
    files.remove([b"nothing"])  # the first removal of a process syncs
    written: list[str] = []

    def fail_the_header(name: str) -> None:
        written.extend([name] * (name == "pwritev"))
        if len(written) > 1:
            operations.failing["pwritev"] = errno.EIO

    operations.before = fail_the_header
    with pytest.raises(OSError, match="error"):
        write_one(files, 1, b"failed", "", payload(1), 1, 0)
    operations.before = lambda _: None
    operations.failing.clear()
    write_one(files, 1, b"next", "", payload(2), 2, 0)
    for key, syncs in ((b"failed", 1), (b"never there", 0)):
        operations.calls.clear()
        files.remove([key])
        assert operations.calls.count("fdatasync") == syncs

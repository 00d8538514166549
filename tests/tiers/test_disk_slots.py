"""Slots of a disk set: system calls that are short or fail, direct I/O, and a second process that reads."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from disk_sets import PAGE, SLOT_BYTES, FaultyFiles, blank, open_set, payload, read_one, same, stored, write_one

from kvoffload.tiers.slot_files import SlotFiles


def test_a_record_is_read_back(tmp_path: Path) -> None:
    files = open_set(tmp_path / "a.kv", tmp_path / "b.kv")
    for slot in range(files.num_slots):
        assert write_one(files, slot, b"%d" % slot, "", payload(slot), slot, 0)
    for slot in range(files.num_slots):
        assert stored(files, slot, b"%d" % slot, slot)
        assert not stored(files, slot, b"other", slot)
        assert not stored(files, (slot + 1) % files.num_slots, b"%d" % slot, slot)
    assert f"{files.num_slots} slots of {SLOT_BYTES} bytes" in repr(files)
    for _ in range(2):
        files.close()


@pytest.mark.parametrize("most", [1, 7, 512, PAGE, PAGE + 1, SLOT_BYTES - 1])
def test_short_reads_and_writes_are_completed(operations: FaultyFiles, tmp_path: Path, most: int) -> None:
    operations.most_bytes = most
    files = open_set(tmp_path / "a.kv", slots=2, operations=operations)
    write_one(files, 1, b"key", "", payload(1), 0, 0)
    assert stored(files, 1, b"key", 1)
    files.close()
    again = open_set(tmp_path / "a.kv", slots=2)
    assert again.load().keys == [b"key"]
    assert stored(again, 1, b"key", 1)


def test_a_write_that_transfers_nothing_is_an_error(files: SlotFiles, operations: FaultyFiles) -> None:
    operations.most_bytes = 0
    with pytest.raises(OSError, match="wrote nothing"):
        write_one(files, 0, b"key", "", payload(1), 0, 0)
    assert not read_one(files, 0, b"key", blank())
    operations.most_bytes = None


def test_many_ranges_go_in_one_record(tmp_path: Path) -> None:
    """More than one call of preadv takes."""
    count = 3000
    files = open_set(tmp_path / "a.kv", slot_bytes=PAGE * 3, nbytes=1 << 20)
    whole = memoryview(bytearray(os.urandom(3 * PAGE)))
    ranges = [whole[start : start + 4] for start in range(0, 4 * count, 4)] + [whole[4 * count :]]
    write_one(files, 0, b"key", "", ranges, 0, 0)
    back = memoryview(bytearray(3 * PAGE))
    assert read_one(files, 0, b"key", [back[: 2 * PAGE], back[2 * PAGE :]])
    assert back == whole


def test_one_call_for_a_payload(files: SlotFiles, operations: FaultyFiles) -> None:
    """All ranges of a record go in one call, and a header in another; nothing is synced."""
    operations.calls.clear()
    write_one(files, 0, b"key", "", payload(1), 0, 0)
    assert operations.calls == ["pwritev", "pwritev"]
    operations.calls.clear()
    assert read_one(files, 0, b"key", blank())
    assert operations.calls == ["preadv"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_write_that_fails_leaves_no_record(
    files: SlotFiles, operations: FaultyFiles, tmp_path: Path, failing: int
) -> None:
    """Of payload or header: the slot holds neither the new nor the old record for this process or the next."""
    write_one(files, 0, b"old", "", payload(1), 0, 0)
    left = failing

    def before(name: str) -> None:
        nonlocal left
        if name == "pwritev":
            if left == 0:
                operations.failing["pwritev"] = errno.ENOSPC
            left -= 1

    operations.before = before
    with pytest.raises(OSError, match="No space left"):
        write_one(files, 0, b"new", "", payload(2), 1, 0)
    operations.before = lambda _: None
    operations.failing.clear()
    assert not read_one(files, 0, b"new", blank())
    assert read_one(files, 0, b"old", blank()) is (failing == 0), "it was there before, and an index has evicted it"
    files.remove([b"old", b"new"])
    files.close()
    again = open_set(tmp_path / "a.kv")
    assert again.load().keys == []


def test_a_read_error_is_raised_and_a_short_file_is_a_miss(
    files: SlotFiles, operations: FaultyFiles, tmp_path: Path
) -> None:
    write_one(files, 0, b"key", "", payload(1), 0, 0)
    operations.failing["preadv"] = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        read_one(files, 0, b"key", blank())
    operations.failing.clear()
    assert stored(files, 0, b"key", 1)
    os.truncate(tmp_path / "a.kv", 3 * PAGE + 100)
    assert not read_one(files, 0, b"key", blank())


def test_a_deleted_or_replaced_file_gives_no_wrong_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    files = open_set(path)
    write_one(files, 0, b"key", "", payload(1), 0, 0)
    path.unlink()
    path.write_bytes(b"something else")
    assert stored(files, 0, b"key", 1), "the open file is still there"
    files.close()
    assert path.read_bytes() == b"something else"


def test_threads_write_and_read_different_slots(tmp_path: Path) -> None:
    files = open_set(tmp_path / "a.kv", tmp_path / "b.kv", slots=32)

    def work(slots: Sequence[int]) -> None:
        for turn in range(5):
            for slot in slots:
                write_one(files, slot, b"%d" % slot, "", payload(slot + turn), turn, 0)
            assert all(stored(files, slot, b"%d" % slot, slot + turn) for slot in slots)

    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(work, range(first, 64, 4)) for first in range(4)]
        for _ in range(10):
            files.sync()
    for call in calls:
        call.result()
    files.close()
    again = open_set(tmp_path / "a.kv", tmp_path / "b.kv", slots=32)
    assert len(again.load().keys) == 64


# direct I/O -----------------------------------------------------------------------------------------------------------


class DirectFiles(FaultyFiles):
    """Descriptors for direct I/O are real or refused, and calls by them are recorded as such."""

    def __init__(self, refuse: str = "") -> None:
        super().__init__()
        self.refuse = refuse
        self.direct: set[int] = set()

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        direct = bool(flags & os.O_DIRECT)
        if direct and self.refuse == "open":
            raise OSError(errno.EINVAL, "no direct I/O here")
        file = super().open(path, flags & ~os.O_DIRECT, mode)
        if direct:
            self.direct.add(file)
        return file

    def close(self, file: int) -> None:
        self.direct.discard(file)
        super().close(file)

    def preadv(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        self._check(file, "read", views, offset)
        return super().preadv(file, views, offset)

    def pwritev(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        self._check(file, "write", views, offset)
        return super().pwritev(file, views, offset)

    def _check(self, file: int, name: str, views: Sequence[memoryview], offset: int) -> None:
        if file not in self.direct:
            return
        self.calls.append(f"direct {name}")
        if self.refuse == name or offset % 512 or any(len(view) % 512 for view in views):
            raise OSError(errno.EINVAL, "not by direct I/O")


@pytest.mark.parametrize("refuse", ["", "open", "read", "write"])
def test_pitfall_61_direct_io_is_tried_for_each_file(tmp_path: Path, refuse: str) -> None:
    operations = DirectFiles(refuse)
    before = len(os.listdir("/proc/self/fd"))
    files = open_set(tmp_path / "a.kv", operations=operations, direct=True)
    assert files.direct == (refuse == "",)
    operations.calls.clear()
    write_one(files, 0, b"key", "", payload(1), 0, 0)
    assert stored(files, 0, b"key", 1)
    assert ("direct write" in operations.calls, "direct read" in operations.calls) == (refuse == "", refuse == "")
    assert operations.calls.count("direct write") <= 1, "headers go through the page cache"
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_direct_io_does_not_take_is_copied(tmp_path: Path) -> None:
    files = open_set(tmp_path / "a.kv", operations=DirectFiles(), direct=True)
    whole = memoryview(bytearray(os.urandom(SLOT_BYTES)))
    odd = [whole[:100], whole[100:]]
    write_one(files, 0, b"key", "", odd, 0, 0)
    back = memoryview(bytearray(SLOT_BYTES))
    assert read_one(files, 0, b"key", [back[:1], back[1:]])
    assert back == whole


@pytest.mark.parametrize("name", ["read", "write"])
def test_a_failing_disk_is_not_asked_again_by_the_page_cache(tmp_path: Path, name: str) -> None:
    operations = DirectFiles()
    files = open_set(tmp_path / "a.kv", operations=operations, direct=True)
    write_one(files, 0, b"key", "", payload(1), 0, 0)
    operations.failing["preadv" if name == "read" else "pwritev"] = errno.EIO
    operations.calls.clear()
    call = partial(read_one, files, 0, b"key", blank())
    if name == "write":
        call = partial(write_one, files, 0, b"key", "", payload(1), 0, 0)
    with pytest.raises(OSError, match="Input/output"):
        call()
    assert operations.calls == [f"direct {name}", "preadv" if name == "read" else "pwritev"]
    operations.failing.clear()


def test_real_direct_io_where_the_file_system_has_it(tmp_path: Path) -> None:
    files = open_set(tmp_path / "a.kv", direct=True)
    if not files.direct[0]:
        files.close()
        pytest.skip("the file system of the temporary folder has no direct I/O")
    write_one(files, 0, b"key", "", payload(1), 0, 0)
    assert stored(files, 0, b"key", 1)
    files.close()
    reader = open_set(tmp_path / "a.kv", read_only=True)
    assert stored(reader, 0, b"key", 1)


# a second process that reads ------------------------------------------------------------------------------------------


class Racing(FaultyFiles):
    """A reader's system calls; something happens right after its n-th read."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1
        self.happens: Callable[[], object] = lambda: None

    def preadv(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        count = super().preadv(file, views, offset)
        self.left -= 1
        if self.left == 0:
            self.happens()
        return count


CHANGES: dict[str, Callable[[SlotFiles], object]] = {
    "replaced": lambda files: write_one(files, 0, b"new", "", payload(2), 1, 0),
    "put again": lambda files: write_one(files, 0, b"key", "", payload(3), 1, 0),
    "removed": lambda files: files.remove([b"key"]),
    "erased": lambda files: files.erase(0),
    "cleared": lambda files: files.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_reader_sees_what_the_writer_does(files: SlotFiles, tmp_path: Path, change: str) -> None:
    write_one(files, 0, b"key", "", payload(1), 0, 0)
    reader = open_set(tmp_path / "a.kv", read_only=True)
    assert reader.load().keys == [b"key"]
    assert stored(reader, 0, b"key", 1)
    CHANGES[change](files)
    assert stored(reader, 0, b"key", 3) is (change == "put again")
    assert not stored(reader, 0, b"key", 1)
    assert stored(reader, 0, b"new", 2) is (change == "replaced")


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_while_it_is_read_is_a_miss(tmp_path: Path, change: str) -> None:
    """A reader reads two superblocks and a header, the payload, and these three again: 7 reads."""
    for moment in range(1, 8):
        operations = Racing()
        files = open_set(tmp_path / f"{moment}.kv")
        write_one(files, 0, b"key", "", payload(1), 0, 0)
        reader = open_set(tmp_path / f"{moment}.kv", read_only=True, operations=operations)
        operations.left, operations.happens = moment, lambda files=files: CHANGES[change](files)  # type: ignore[misc]
        views = blank()
        found = read_one(reader, 0, b"key", views)
        assert operations.left <= 0
        if found:
            assert any(same(views, payload(number)) for number in (1, 3))
        late = moment >= (6 if change == "cleared" else 7)
        assert found is (late or (change == "put again" and moment <= 2)), moment
        reader.close()
        files.close()


def test_a_reader_of_a_set_that_was_formatted_again_reads_nothing(files: SlotFiles, tmp_path: Path) -> None:
    write_one(files, 0, b"key", "", payload(1), 0, 0)
    files.close()
    reader = open_set(tmp_path / "a.kv", read_only=True)
    other = open_set(tmp_path / "a.kv", identity="model@2", reset=True)
    write_one(other, 0, b"key", "", payload(2), 0, 0)
    assert not read_one(reader, 0, b"key", blank())


def test_a_reader_writes_and_locks_nothing(operations: FaultyFiles, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="a writer creates it"):
        open_set(tmp_path / "a.kv", read_only=True)
    assert list(tmp_path.iterdir()) == []
    open_set(tmp_path / "a.kv").close()
    before = (tmp_path / "a.kv").read_bytes()
    reader = open_set(tmp_path / "a.kv", read_only=True, operations=operations, direct=True)
    writer = open_set(tmp_path / "a.kv")
    with pytest.raises(OSError, match="Bad file descriptor"):
        write_one(reader, 0, b"key", "", payload(1), 0, 0)
    reader.close()
    writer.close()
    assert {"pwritev", "fdatasync", "fallocate"} & set(operations.calls) <= {"pwritev"}
    assert (tmp_path / "a.kv").read_bytes() == before

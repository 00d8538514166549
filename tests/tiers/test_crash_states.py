"""What a disk set holds after a crash: any subset of unsynced writes, by sector: no wrong or removed record."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from disk_sets import LosingFiles, blank, kill, open_set, payload, read_key, read_one, same, write_key, write_one
from seeds import rest_long

from kvoffload.tiers.disk_index import DiskIndex

KEYS = 12
FILES = 2


class Program:
    """Random calls of a DiskIndex on two files, with what a restart may find of each key afterwards."""

    def __init__(self, folder: Path, rng: random.Random, *, waiting: bool = False) -> None:
        self.rng = rng
        self.waiting = waiting  # headers are written by syncs alone, as if another payload were always being written
        self.folder = folder
        self.files = LosingFiles()
        self.names = [f"{number}.kv" for number in range(FILES)]
        self.disk = self.opened(folder)
        self.legal: dict[bytes, set[int]] = {}  # numbers of payloads that were put since the key was removed
        self.number = 0
        self.durable = False  # what the writer has: the last step was a sync that succeeded, and none has lost writes
        self.loses_syncs = rng.random() < 0.5

    def opened(self, folder: Path) -> DiskIndex:
        slots = open_set(*(folder / name for name in self.names), slots=3, operations=self.files)
        for member in slots._members:
            member._writes = int(self.waiting)
        return DiskIndex(slots, policy="lru", tenants={})

    def put(self) -> None:
        keys = self.rng.sample([b"key %d" % number for number in range(KEYS)], self.rng.randint(1, 3))
        put = self.disk.reserve(keys)
        for key in put.slots:
            self.number += 1
            self.legal.setdefault(key, set()).add(self.number)
            if self.rng.random() < 0.1:
                self.files.failing["pwritev"] = errno.EIO
            try:
                write_key(self.disk, put, key, payload(self.number))
            except OSError:
                pass
            self.files.failing.clear()
        self.disk.finish(put)

    def remove(self) -> None:
        keys = self.rng.sample([b"key %d" % number for number in range(KEYS)], 2)
        if self.rng.random() < 0.1:
            self.files.failing["pwritev"] = errno.EIO
        try:
            self.disk.remove(keys)
        except OSError:
            pass
        else:
            for key in keys:
                self.legal.pop(key, None)
        self.files.failing.clear()

    def clear(self) -> None:
        try:
            self.disk.clear()
        except OSError:
            return
        self.legal.clear()

    def sync(self) -> None:
        self.files.lose_sync = self.loses_syncs and self.rng.random() < 0.3
        if self.rng.random() < 0.2:
            self.files.failing["pwritev"] = errno.EIO
        try:
            self.disk.files.sync()
            self.durable = not self.loses_syncs
        except OSError:
            pass
        self.files.failing.clear()

    def restart(self) -> None:
        """The process is killed: what is in the page cache stays."""
        kill(self.disk.files)
        self.disk = self.opened(self.folder)

    def step(self) -> None:
        self.durable = False
        calls = [self.put] * 8 + [self.remove] * 4 + [self.sync] * 2 + [self.restart, self.clear]
        self.rng.choice(calls)()

    def verify(self, disk: DiskIndex, where: str) -> set[bytes]:
        """All records are legal: put since their key was removed. Their keys."""
        found = set[bytes]()
        for number in range(KEYS):
            key, views = b"key %d" % number, blank()
            if read_key(disk, key, views):
                found.add(key)
                assert any(same(views, payload(each)) for each in self.legal.get(key, ())), f"{key!r} {where}"
        return found


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("round_", rest_long(range(16), 5))
def test_pitfall_64_no_crash_state_has_a_wrong_or_removed_record(
    tmp_path: Path, seed: int, round_: int, waiting: bool
) -> None:
    rng = random.Random(seed + round_)
    (tmp_path / "after").mkdir(mode=0o700)
    program = Program(tmp_path, rng, waiting=waiting)
    found = 0
    for _ in range(30):
        program.step()
        program.files.crash(rng, tmp_path / "after")
        files = program.files
        program.files = LosingFiles()
        after = program.opened(tmp_path / "after")
        there = program.verify(after, "after a crash")
        found += len(there)
        after.files.close()
        program.files = files
        of_writer = program.verify(program.disk, "in the writer")
        assert there >= of_writer or not program.durable, "a sync has succeeded"
    assert found > 0


def crashed(files: LosingFiles, folder: Path, choose: str) -> Path:
    """The files after a crash that has lost all ("oldest") or no ("newest") unsynced writes."""

    class Chooser(random.Random):
        def choice(self, options):  # type: ignore[no-untyped-def]
            if isinstance(options, tuple):
                return 0.0 if choose == "oldest" else 1.0
            return options[0]

    after = folder / "after"
    after.mkdir(mode=0o700, exist_ok=True)
    files.crash(Chooser(), after)
    return after / "a.kv"


def keys_after_a_crash(files: LosingFiles, folder: Path, choose: str, *, slots: int = 8) -> list[bytes]:
    return sorted(open_set(crashed(files, folder, choose), slots=slots).load().keys)


def test_a_key_evicted_before_a_restart_stays_removed(tmp_path: Path) -> None:
    """The new process cannot know which header a crash may bring back: every first removal syncs."""
    files = LosingFiles()
    slots = open_set(tmp_path / "a.kv", slots=1, operations=files)
    write_one(slots, 0, b"old", "", payload(1), 0, 0)
    slots.sync()
    write_one(slots, 0, b"new", "", payload(2), 1, 0)
    kill(slots)
    again = open_set(tmp_path / "a.kv", slots=1, operations=files)
    assert again.load().keys == [b"new"]
    again.remove([b"old"])
    assert keys_after_a_crash(files, tmp_path, "oldest", slots=1) == [b"new"]


def test_a_removal_of_what_was_never_there_syncs_nothing(tmp_path: Path) -> None:
    files = LosingFiles()
    slots = open_set(tmp_path / "a.kv", slots=2, operations=files)
    slots.remove([b"first"])
    files.calls.clear()
    write_one(slots, 0, b"old", "", payload(1), 0, 0)
    write_one(slots, 0, b"new", "", payload(2), 1, 0)
    slots.remove([b"never there"])
    assert "fdatasync" not in files.calls
    slots.remove([b"old"])
    assert files.calls.count("fdatasync") == 1


def test_the_first_removal_of_a_process_writes_the_header_table_also_after_a_sync(tmp_path: Path) -> None:
    """A sync makes durable what this process has written, not what the page cache shows of the one before."""
    slots = open_set(tmp_path / "a.kv", slots=2)
    write_one(slots, 0, b"key", "", payload(1), 0, 0)
    slots.close()
    files = LosingFiles()
    again = open_set(tmp_path / "a.kv", slots=2, operations=files)
    again.load()
    again.sync()
    for writes in (1, 0):
        files.calls.clear()
        again.remove([b"lost"])
        assert (files.calls.count("pwritev"), files.calls.count("fdatasync")) == (writes, writes)


@pytest.mark.parametrize("call", ["remove", "clear"])
def test_what_is_removed_while_it_is_written_is_not_in_the_file(tmp_path: Path, call: str) -> None:
    disk = DiskIndex(open_set(tmp_path / "a.kv"), policy="lru", tenants={})
    put = disk.reserve([b"key", b"other"])
    if call == "remove":
        assert disk.remove([b"key"]) == [True]
    else:
        disk.clear()
    assert not write_key(disk, put, b"key", payload(1))
    assert write_key(disk, put, b"other", payload(2)) is (call == "remove")
    disk.finish(put)
    assert disk.contains([b"key", b"other"]) == [False, call == "remove"]
    disk.files.close()
    again = open_set(tmp_path / "a.kv")
    assert again.load().keys == ([b"other"] if call == "remove" else [])


@pytest.mark.parametrize("oldest", ["oldest", "newest"])
def test_a_crash_in_the_middle_of_a_clear_leaves_the_old_or_no_records(tmp_path: Path, oldest: str) -> None:
    files = LosingFiles()
    slots = open_set(tmp_path / "a.kv", operations=files)
    write_one(slots, 0, b"key", "", payload(1), 0, 0)
    slots.sync()
    states = []

    def look(name: str) -> None:
        if name == "fdatasync":
            files.before = lambda _: None
            states.append(keys_after_a_crash(files, tmp_path, oldest))
            files.before = look

    files.before = look
    slots.clear()
    files.before = lambda _: None
    assert states == ([[b"key"], []] if oldest == "oldest" else [[], []])


def test_every_crash_state_of_a_creation_is_an_empty_set(tmp_path: Path, seed: int) -> None:
    """Or refused, where the name of a file is not durable and the superblock of another one is: that cannot be."""
    files, rng, states = LosingFiles(), random.Random(seed), []
    (tmp_path / "after").mkdir(mode=0o700)

    def look(name: str) -> None:
        if name in ("pwritev", "fdatasync") and (tmp_path / "b.kv").exists():
            files.before = lambda _: None
            files.crash(rng, tmp_path / "after")
            states.append(open_set(tmp_path / "after" / "a.kv", tmp_path / "after" / "b.kv").load().keys)
            files.before = look

    files.before = look
    open_set(tmp_path / "a.kv", tmp_path / "b.kv", operations=files)
    assert len(states) >= 8
    assert set(map(tuple, states)) == {()}
    files.before = lambda _: None


def test_what_was_durable_before_a_sync_failed_is_durable_again_after_the_next_one(tmp_path: Path) -> None:
    """The failed sync begins another epoch, and its headers are written again."""
    files = LosingFiles()
    slots = open_set(tmp_path / "a.kv", operations=files)
    for slot, key in enumerate((b"kept", b"removed", b"replaced")):
        write_one(slots, slot, key, "", payload(slot), slot, 0)
    slots.sync()
    files.lose_sync = True
    with pytest.raises(OSError, match="lost"):
        slots.sync()
    files.lose_sync = True
    with pytest.raises(OSError, match="lost"):
        slots.remove([b"removed"])
    slots.remove([b"removed"])
    write_one(slots, 2, b"new", "", payload(9), 4, 0)
    slots.sync()
    for choose in ("oldest", "newest"):
        after = open_set(crashed(files, tmp_path, choose))
        assert sorted(after.load().keys) == [b"kept", b"new"]
        views = blank()
        assert read_one(after, 0, b"kept", views)
        assert same(views, payload(0))
        after.close()


def test_a_header_of_another_key_with_the_same_payload_is_not_renewed(tmp_path: Path) -> None:
    files = LosingFiles()
    slots = open_set(tmp_path / "a.kv", operations=files)
    write_one(slots, 0, b"older", "", payload(1), 0, 0)
    slots.remove([b"nothing"])
    slots._members[0]._writes = 1  # as if another payload were being written: the next header waits
    write_one(slots, 0, b"newer", "", payload(1), 1, 0)
    files.failing["pwritev"] = errno.EIO
    with pytest.raises(OSError, match="error"):
        slots.remove([b"older"])
    files.failing.clear()
    files.lose_sync = True
    with pytest.raises(OSError, match="lost"):
        slots.remove([b"older"])
    slots.remove([b"older"])
    for choose in ("oldest", "newest"):
        assert keys_after_a_crash(files, tmp_path, choose) == [b"newer"]

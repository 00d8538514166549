"""What a disk set holds after a crash: any subset of unsynced writes, sector by sector. Never a wrong or removed record."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from disk_sets import LosingFiles, blank, open_set, payload, same

from kvoffload.tiers.disk_index import DiskIndex

KEYS = 12
FILES = 2


class Program:
    """Random calls of a DiskIndex on two files, with what a restart may find of each key afterwards."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.rng = rng
        self.folder = folder
        self.files = LosingFiles()
        self.names = [f"{number}.kv" for number in range(FILES)]
        self.disk = self.opened(folder)
        self.legal: dict[bytes, set[int]] = {}  # numbers of payloads that were put since the key was removed
        self.number = 0

    def opened(self, folder: Path) -> DiskIndex:
        slots = open_set(*(folder / name for name in self.names), slots=3, operations=self.files)
        return DiskIndex(slots, policy="lru")

    def put(self) -> None:
        keys = self.rng.sample([b"key %d" % number for number in range(KEYS)], self.rng.randint(1, 3))
        put = self.disk.reserve(keys)
        for key in put.slots:
            self.number += 1
            self.legal.setdefault(key, set()).add(self.number)
            if self.rng.random() < 0.1:
                self.files.failing["pwritev"] = errno.EIO
            try:
                self.disk.write(put, key, payload(self.number))
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
        self.files.lose_sync = self.rng.random() < 0.3
        try:
            self.disk.sync()
        except OSError:
            pass

    def restart(self) -> None:
        """The process is killed: what is in the page cache stays."""
        for member in self.disk.files._members:  # its locks end with it
            member.file.close()
        self.disk = self.opened(self.folder)

    def step(self) -> None:
        calls = [self.put] * 8 + [self.remove] * 4 + [self.sync, self.restart, self.clear]
        self.rng.choice(calls)()

    def verify(self, disk: DiskIndex, where: str) -> int:
        """All records are legal: put since their key was removed. How many there are."""
        found = 0
        for number in range(KEYS):
            key, views = b"key %d" % number, blank()
            if disk.read(key, views):
                found += 1
                assert any(same(views, payload(each)) for each in self.legal.get(key, ())), f"{key!r} {where}"
        return found


@pytest.mark.parametrize("round_", range(40))
def test_pitfall_64_no_crash_state_has_a_wrong_or_removed_record(tmp_path: Path, seed: int, round_: int) -> None:
    rng = random.Random(seed + round_)
    (tmp_path / "after").mkdir(mode=0o700)
    program = Program(tmp_path, rng)
    found = 0
    for _ in range(30):
        program.step()
        program.files.crash(rng, tmp_path / "after")
        files = program.files
        program.files = LosingFiles()
        try:
            after = program.opened(tmp_path / "after")
        except ValueError as error:
            assert "another set" not in str(error)
            raise
        found += program.verify(after, "after a crash")
        after.close()
        program.files = files
        program.verify(program.disk, "in the writer")
    assert found > 0
    program.disk.close()

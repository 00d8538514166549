"""Several records of a disk in one call: neighbours by one system call, and no record pays for what another meets."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from disk_sets import SLOT_BYTES, FaultyFiles, blank, flip, open_set, payload, same
from tier_classes import SECONDS, attached

from kvoffload.tiers import DiskTier, Limits, Outcome
from kvoffload.tiers.disk_index import DiskIndex
from kvoffload.tiers.files import FileOperations
from kvoffload.tiers.member_file import ReadResult, SlotPut
from kvoffload.tiers.slot_files import SlotFiles


class BadSlots(FileOperations):
    """Transfers that touch some offsets fail; `transfers` has (name, offset, bytes) of payloads."""

    def __init__(self) -> None:
        self.transfers: list[tuple[str, int, int]] = []
        self.bad: dict[int, int] = {}  # errno by offset

    def preadv(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        self._note("preadv", views, offset)
        return super().preadv(file, views, offset)

    def pwritev(self, file: int, views: Sequence[memoryview], offset: int) -> int:
        self._note("pwritev", views, offset)
        return super().pwritev(file, views, offset)

    def _note(self, name: str, views: Sequence[memoryview], offset: int) -> None:
        nbytes = sum(view.nbytes for view in views)
        if nbytes % SLOT_BYTES == 0:
            self.transfers.append((name, offset, nbytes // SLOT_BYTES))
        for bad, number in self.bad.items():
            if offset <= bad < offset + nbytes:
                raise OSError(number, os.strerror(number))


def put_all(files: SlotFiles, slots: Sequence[int]) -> list[bool | OSError]:
    puts = [SlotPut(slot, b"%d" % slot, at, payload(slot)) for at, slot in enumerate(slots)]
    return files.write(puts, "", 1, lambda _: True)


def get_all(files: SlotFiles, slots: Sequence[int]) -> list[ReadResult]:
    """What `read` says; what it says is there has the right bytes."""
    payloads = [blank() for _ in slots]
    results = files.read(slots, [b"%d" % slot for slot in slots], payloads)
    for slot, result, views in zip(slots, results, payloads, strict=True):
        assert result is not True or same(views, payload(slot))
    return results


def offset_of(files: SlotFiles, slot: int) -> int:
    return files._members[0].payload_offset(slot)


def counts(operations: BadSlots, name: str) -> list[int]:
    return [records for called, _, records in operations.transfers if called == name]


def test_neighbours_are_transferred_by_one_call(tmp_path: Path) -> None:
    operations = BadSlots()
    files = open_set(tmp_path / "a.kv", slots=12, operations=operations)
    operations.transfers.clear()
    slots = [3, 4, 5, 9, 8, 0]
    assert put_all(files, slots) == [True] * 6
    assert counts(operations, "pwritev") == [3, 1, 1, 1]
    assert get_all(files, slots) == [True] * 6
    assert counts(operations, "preadv") == [3, 1, 1, 1]
    assert get_all(files, [2, 3, 6, 4]) == [False, True, False, True]


def test_files_of_a_set_each_get_their_neighbours(tmp_path: Path) -> None:
    operations = BadSlots()
    files = open_set(tmp_path / "a.kv", tmp_path / "b.kv", slots=4, operations=operations)
    operations.transfers.clear()
    assert put_all(files, range(6)) == [True] * 6
    assert counts(operations, "pwritev") == [3, 3]
    assert get_all(files, [5, 0, 3, 2, 1, 7]) == [True] * 5 + [False]


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_bad_sector_costs_its_record_alone(tmp_path: Path, verb: str) -> None:
    operations = BadSlots()
    files = open_set(tmp_path / "a.kv", slots=8, operations=operations)
    if verb == "read":
        assert put_all(files, range(8)) == [True] * 8
    operations.bad = {offset_of(files, 2) + 4096: errno.EIO, offset_of(files, 5): errno.ENOSPC}
    results = put_all(files, range(8)) if verb == "write" else get_all(files, range(8))
    assert [result.errno for result in results if isinstance(result, OSError)] == [errno.EIO, errno.ENOSPC]
    assert [at for at, result in enumerate(results) if result is True] == [0, 1, 3, 4, 6, 7]
    operations.bad = {}
    assert get_all(files, range(8)) == [verb == "read" or slot not in (2, 5) for slot in range(8)]


def test_a_file_that_ends_in_the_middle_of_neighbours(files: SlotFiles, tmp_path: Path) -> None:
    put_all(files, range(6))
    os.truncate(tmp_path / "a.kv", offset_of(files, 3) + 100)
    assert get_all(files, range(6)) == [True] * 3 + [None] * 3


def test_wrong_bytes_in_the_middle_of_neighbours(files: SlotFiles, tmp_path: Path) -> None:
    put_all(files, range(6))
    flip(tmp_path / "a.kv", offset_of(files, 3) + 7)
    assert get_all(files, range(6)) == [True, True, True, None, True, True]


def test_a_disk_that_fails_for_every_record_is_one_line_of_the_log(
    operations: FaultyFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier(
        tmp_path / "a.kv", nbytes=1 << 20, identity="model@1", limits=Limits(threads=1), operations=operations
    )
    keys = [b"%d" % number for number in range(8)]
    with attached(tier):
        assert tier.put(keys, range(8)).wait(SECONDS) == [Outcome.DONE] * 8
        operations.failing = {"preadv": errno.EIO, "pwritev": errno.EIO}
        assert tier.get(keys, range(8, 16)).wait(SECONDS) == [Outcome.FAILED] * 8
        assert tier.put([b"new", b"other"], [0, 1]).wait(SECONDS) == [Outcome.FAILED] * 2
        operations.failing = {}
    assert len([record for record in caplog.records if "its keys are misses" in record.getMessage()]) == 1
    assert len(caplog.records) == 1


def opened(path: Path, **options: Any) -> DiskIndex:
    return DiskIndex(open_set(path, slots=8, **options), policy="lru", tenants={})


def test_keys_that_are_there_missing_or_unfinished_are_read_together(tmp_path: Path) -> None:
    disk = opened(tmp_path / "a.kv")
    finished = disk.reserve([b"a", b"b", b"c"])
    disk.write(finished, [b"a", b"b", b"c"], [payload(1), payload(2), payload(3)])
    disk.finish(finished)
    unfinished = disk.reserve([b"d", b"e"])
    assert disk.write(unfinished, [b"d"], [payload(4)]) == [True]
    payloads = [blank() for _ in range(5)]
    assert disk.read([b"d", b"c", b"none", b"e", b"a"], payloads) == [True, True, False, False, True]
    assert [same(payloads[at], payload(number)) for at, number in ((0, 4), (1, 3), (4, 1))] == [True] * 3
    disk.finish(unfinished)
    disk.index.check()


def test_of_several_records_those_that_cannot_be_read_are_removed(tmp_path: Path) -> None:
    operations = BadSlots()
    disk = opened(tmp_path / "a.kv", operations=operations)
    put = disk.reserve([b"a", b"b", b"c"])
    disk.write(put, [b"a", b"b", b"c"], [payload(1), payload(2), payload(3)])
    disk.finish(put)
    operations.bad = {offset_of(disk.files, put.slots[b"b"]): errno.EIO}
    results = disk.read([b"a", b"b", b"c"], [blank() for _ in range(3)])
    assert [result is True for result in results] == [True, False, True]
    assert isinstance(results[1], OSError)
    assert disk.contains([b"a", b"b", b"c"]) == [True, False, True]
    disk.index.check()

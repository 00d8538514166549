"""DiskIndex: the records of a disk with the policies, tenants and quotas of a cache, before and after a restart."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from disk_sets import FaultyFiles, blank, flip, open_set, payload, read_key, same, write_key, write_one

from kvoffload.cache.policies import LRU, PolicyChoice, PolicyName
from kvoffload.cache.pools import Tenant
from kvoffload.errors import CapabilityError, LayoutError
from kvoffload.tiers.disk_index import DiskIndex
from kvoffload.tiers.format import MOST_SEQUENCE
from kvoffload.tiers.slot_files import SlotFiles


def opened(path: Path, *, policy: PolicyChoice = "lru", tenants: Any = None, slots: int = 4, **files: Any) -> DiskIndex:
    return DiskIndex(open_set(path, slots=slots, **files), policy=policy, tenants=tenants or {})


@pytest.fixture
def disk(tmp_path: Path, operations: FaultyFiles) -> DiskIndex:
    """Of four slots."""
    return opened(tmp_path / "a.kv", operations=operations)


def restarted(disk: DiskIndex, **options: Any) -> DiskIndex:
    disk.files.close()
    return opened(Path(disk.files.paths[0]), **options)


def put(disk: DiskIndex, *keys: bytes, tenant: str = "") -> None:
    """The payload of a key is that of its last byte."""
    started = disk.reserve(keys, tenant)
    for key in started.slots:
        assert write_key(disk, started, key, payload(key[-1]))
    disk.finish(started)
    disk.index.check()


def there(disk: DiskIndex, keys: Sequence[bytes]) -> list[bytes]:
    """Those that can be read, with the right bytes."""
    found = []
    for key in keys:
        views = blank()
        if read_key(disk, key, views):
            assert same(views, payload(key[-1]))
            found.append(key)
    disk.index.check()
    return found


KEYS = [b"key %d" % number for number in range(10)]


def test_a_full_disk_evicts_by_its_policy(disk: DiskIndex) -> None:
    put(disk, *KEYS[:4])
    disk.index.touch(KEYS[:1])
    put(disk, KEYS[4])
    assert there(disk, KEYS) == [*KEYS[:3], KEYS[4]]
    assert len(disk) == 4
    assert disk.contains(KEYS[:5]) == [True, True, True, False, True]


def test_a_disk_that_cannot_be_read_keeps_no_policy_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: SlotFiles) -> Any:
        raise OSError("no medium")

    policy = LRU()
    files = open_set(tmp_path / "a.kv", slots=4)
    with monkeypatch.context() as patch:
        patch.setattr(SlotFiles, "load", fail)
        with pytest.raises(OSError, match="no medium"):
            DiskIndex(files, policy=policy, tenants={})
    files.close()
    disk = opened(tmp_path / "a.kv", policy=policy)
    put(disk, KEYS[0])
    assert list(policy) == KEYS[:1]


@pytest.mark.parametrize("policy", ["prefix", "lru", "arc", "s3fifo"])
def test_a_restart_evicts_in_the_order_of_requests(tmp_path: Path, policy: PolicyName) -> None:
    disk = opened(tmp_path / "a.kv", slots=6, policy=policy)
    put(disk, *KEYS[3:6])
    put(disk, *KEYS[:3])
    disk = restarted(disk, slots=6, policy=policy)
    assert len(disk) == 6
    disk.index.check()
    put(disk, KEYS[6])
    gone = [key for key in KEYS[:6] if key not in there(disk, KEYS)]
    assert gone == [KEYS[5]], "the end of the oldest request"


def test_the_numbers_of_put_calls_go_on_after_a_restart(tmp_path: Path) -> None:
    for turn in range(3):
        disk = opened(tmp_path / "a.kv")
        put(disk, KEYS[turn])
        disk.files.close()
    disk = opened(tmp_path / "a.kv")
    assert disk.files.load().sequences.tolist() == [0, 1, 2]
    put(disk, KEYS[3])
    put(disk, KEYS[4])
    assert there(disk, KEYS[:5]) == KEYS[1:5]


def test_pitfall_65_tenants_and_quotas_outlive_a_restart(tmp_path: Path) -> None:
    tenants = {"a": Tenant(max_blocks=2), "b": Tenant(priority=-1)}
    disk = opened(tmp_path / "a.kv", slots=6, tenants=tenants)
    put(disk, *KEYS[:2], tenant="a")
    put(disk, *KEYS[2:4], tenant="b")
    put(disk, *KEYS[4:6])
    disk = restarted(disk, slots=6, tenants=tenants)
    put(disk, KEYS[6], tenant="a")
    assert there(disk, KEYS) == [KEYS[0], *KEYS[2:7]], "its own key went, as its quota is full"
    put(disk, KEYS[7])
    assert there(disk, KEYS[:4]) == [KEYS[0], KEYS[2]], "of the lower priority"
    disk = restarted(disk, slots=6, tenants={"a": Tenant(max_blocks=1)})
    assert there(disk, KEYS) == [KEYS[2], *KEYS[4:8]], "the quota is lower now; b's key belongs to all"
    disk.index.check()


def test_a_key_in_two_slots_is_the_latest_one(tmp_path: Path) -> None:
    """An evicted key that was put again, while its first slot was not used again."""
    files = open_set(tmp_path / "a.kv", slots=4)
    write_one(files, 0, b"key", "", payload(1), 5, 1)
    write_one(files, 1, b"key", "", payload(2), 5, 2)
    write_one(files, 2, b"key", "", payload(3), 4, 9)
    files.close()
    disk = opened(tmp_path / "a.kv")
    views = blank()
    assert read_key(disk, b"key", views)
    assert same(views, payload(2))
    disk.index.check()
    assert disk.remove([b"key"]) == [True]
    disk = restarted(disk)
    assert len(disk) == 0


def test_keys_can_be_read_before_their_put_is_finished(disk: DiskIndex) -> None:
    started = disk.reserve(KEYS[:2])
    assert disk.contains(KEYS[:2]) == [False, False]
    write_key(disk, started, KEYS[0], payload(KEYS[0][-1]))
    assert disk.contains(KEYS[:2]) == [True, False]
    assert there(disk, KEYS[:2]) == KEYS[:1]
    disk.finish(started)
    assert disk.contains(KEYS[:2]) == [True, False]
    assert there(disk, KEYS[:2]) == KEYS[:1]


def test_a_put_that_fails_leaves_its_keys_missing(disk: DiskIndex, operations: FaultyFiles) -> None:
    started = disk.reserve(KEYS[:2])
    operations.failing["pwritev"] = errno.EIO
    for key in KEYS[:2]:
        with pytest.raises(OSError, match="Input/output"):
            write_key(disk, started, key, payload(0))
    operations.failing.clear()
    disk.finish(started)
    assert disk.contains(KEYS[:2]) == [False, False]
    assert len(disk) == 0
    put(disk, *KEYS[:2])
    assert there(disk, KEYS) == KEYS[:2]


@pytest.mark.parametrize("damage", ["payload", "error"])
def test_pitfall_44_what_cannot_be_read_is_removed(
    disk: DiskIndex, operations: FaultyFiles, tmp_path: Path, damage: str
) -> None:
    put(disk, *KEYS[:2])
    slot = disk.files.load().slots.tolist()[0]
    if damage == "payload":
        flip(tmp_path / "a.kv", disk.files._members[0].payload_offset(slot) + 5000)
        assert not read_key(disk, KEYS[0], blank())
    else:
        operations.failing["preadv"] = errno.EIO
        with pytest.raises(OSError, match="Input/output"):
            read_key(disk, KEYS[0], blank())
        operations.failing.clear()
    assert disk.contains(KEYS[:2]) == [False, True]
    assert there(disk, KEYS) == KEYS[1:2]
    disk = restarted(disk)
    assert disk.contains(KEYS[:2]) == [False, True]
    put(disk, KEYS[0])
    assert there(disk, KEYS) == KEYS[:2]


def test_remove_and_clear_say_what_was_there(disk: DiskIndex) -> None:
    put(disk, *KEYS[:3])
    assert disk.remove([KEYS[1], KEYS[9]]) == [True, False]
    assert there(disk, KEYS) == [KEYS[0], KEYS[2]]
    disk = restarted(disk)
    assert there(disk, KEYS) == [KEYS[0], KEYS[2]]
    disk.clear()
    assert there(disk, KEYS) == []
    put(disk, KEYS[5])
    disk = restarted(disk)
    assert there(disk, KEYS) == [KEYS[5]]


@pytest.mark.parametrize("highest", [(1 << 63) - 1, 1 << 63, MOST_SEQUENCE - 1, MOST_SEQUENCE])
def test_records_can_be_put_behind_one_of_the_highest_sequence_number(tmp_path: Path, highest: int) -> None:
    """Another program may have written it."""
    files = open_set(tmp_path / "a.kv", slots=4)
    write_one(files, 0, KEYS[0], "", payload(KEYS[0][-1]), highest, 0)
    files.close()
    for new in (KEYS[1], KEYS[2]):
        disk = opened(tmp_path / "a.kv")
        put(disk, new)
        disk.files.close()
    disk = opened(tmp_path / "a.kv")
    assert there(disk, KEYS) == KEYS[:3]


@pytest.mark.parametrize("call", ["remove", "clear"])
def test_what_cannot_be_removed_durably_is_an_error_and_a_miss(
    disk: DiskIndex, operations: FaultyFiles, call: str
) -> None:
    put(disk, *KEYS[:2])
    operations.failing["fdatasync"] = errno.EIO
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            disk.remove(KEYS[:1]) if call == "remove" else disk.clear()
        assert disk.contains(KEYS[:1]) == [False]
    operations.failing.clear()
    disk.remove(KEYS[:1]) if call == "remove" else disk.clear()
    disk = restarted(disk)
    assert disk.contains(KEYS[:1]) == [False]


def test_present_and_declined_keys_have_no_slots(disk: DiskIndex) -> None:
    put(disk, KEYS[0])
    started = disk.reserve(KEYS[:6])
    assert started.reservation.present == (KEYS[0],)
    assert list(started.slots) == KEYS[1:4]
    assert started.reservation.declined == tuple(KEYS[4:6])
    assert [started.positions[key] for key in started.slots] == [1, 2, 3]
    disk.finish(started)
    assert there(disk, KEYS) == KEYS[:1]
    with pytest.raises(LayoutError, match="repeats"):
        disk.reserve([b"k", b"k"])
    with pytest.raises(ValueError, match="tenant must be one of"):
        disk.reserve([b"k"], "nobody")
    disk.index.check()


def test_a_reader_has_what_was_there_when_it_was_opened(disk: DiskIndex, tmp_path: Path) -> None:
    put(disk, *KEYS[:2])
    before = (tmp_path / "a.kv").stat().st_size
    reader = opened(tmp_path / "a.kv", read_only=True)
    assert there(reader, KEYS) == KEYS[:2]
    with pytest.raises(CapabilityError, match="reading only"):
        reader.reserve(KEYS[2:3])
    disk.remove(KEYS[:1])
    assert there(reader, KEYS) == KEYS[1:2]
    assert reader.contains(KEYS[:2]) == [False, True]
    assert (tmp_path / "a.kv").stat().st_size == before

"""Files of a disk set: which are opened, created, refused or formatted again; locks, permissions, space."""

from __future__ import annotations

import errno
import logging
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from disk_sets import PAGE, SLOT_BYTES, FaultyFiles, blank, open_set, payload, read_one, same, write_one

from kvoffload.cache.policies import LRU
from kvoffload.cache.pools import Tenant
from kvoffload.errors import CapacityError
from kvoffload.tiers import DiskTier
from kvoffload.tiers.format import MOST_EPOCH, make_checksum, unpack_superblock


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """The files of a set with one record, in slot 1."""
    paths = tmp_path / "a.kv", tmp_path / "b.kv"
    files = open_set(*paths)
    write_one(files, 1, b"key", "", payload(1), 0, 0)
    files.close()
    return paths


def keys_in(*paths: Path, **options: Any) -> list[bytes]:
    files = open_set(*paths, **options)
    keys = files.load().keys
    files.close()
    return keys


def refused(*paths: Path, **options: Any) -> str:
    with pytest.raises(ValueError, match=r"reset=True|delete it") as caught:
        open_set(*paths, **options)
    return str(caught.value)


def test_pitfall_47_a_restart_finds_what_was_written(pair: tuple[Path, Path]) -> None:
    files = open_set(*pair)
    records, views = files.load(), blank()
    assert records.keys == [b"key"]
    assert read_one(files, int(records.slots[0]), b"key", views)
    assert same(views, payload(1))


def test_pitfall_49_a_set_is_one_file_for_each_disk_of_the_size_asked_for(pair: tuple[Path, Path]) -> None:
    folder = pair[0].parent
    assert sorted(folder.iterdir()) == sorted(pair)
    for path in pair:
        assert path.stat().st_size == SET_BYTES
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_pitfall_55_the_space_is_allocated(tmp_path: Path) -> None:
    open_set(tmp_path / "a.kv", slots=64)
    assert (tmp_path / "a.kv").stat().st_blocks * 512 >= 64 * SLOT_BYTES


def test_the_order_of_paths_does_not_matter(pair: tuple[Path, Path]) -> None:
    files = open_set(*reversed(pair))
    assert files.load().slots.tolist() == [1]
    assert read_one(files, 1, b"key", blank())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"identity": "model@2"}, "identity 'model@1', and this call wants 'model@2'"),
        ({"layout_digest": b"L" * 16}, "bytes of planes) was 000102"),
        ({"slots": 9}, "the size of all files together, in bytes, was"),
        ({"slot_bytes": PAGE}, "the size of a record, in bytes, was 8192, and this call wants 4096"),
        ({"key": b"k" * 16}, "another checksum key"),
    ],
)
def test_pitfalls_48_and_63_another_cache_is_refused_or_reset(
    pair: tuple[Path, Path], options: dict[str, Any], said: str
) -> None:
    text = refused(*pair, **options)
    assert said in text
    assert str(pair[0]) in text
    assert keys_in(*pair) == [b"key"], "refusing has changed nothing"
    assert keys_in(*pair, reset=True, **options) == []
    assert keys_in(*pair, **options) == []
    refused(*pair)


def test_reset_keeps_the_set_that_was_asked_for(pair: tuple[Path, Path]) -> None:
    assert keys_in(*pair, reset=True) == [b"key"]


def test_identities_that_differ_late_differ(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    keys_in(path, identity="m" * 300 + "1")
    refused(path, identity="m" * 300 + "2")
    assert keys_in(path, identity="m" * 300 + "1") == []


def test_a_missing_member_is_refused(pair: tuple[Path, Path]) -> None:
    pair[1].rename(pair[1].with_suffix(".away"))
    assert "b.kv is missing" in refused(*pair)
    assert not pair[1].exists()
    assert "the number of files in its set was 2, and this call wants 1" in refused(pair[0])
    pair[1].with_suffix(".away").rename(pair[1])
    assert keys_in(*pair) == [b"key"]


def test_pitfall_65_a_member_of_another_set_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    others = tmp_path / "c.kv", tmp_path / "d.kv"
    keys_in(*others)
    assert "another set" in refused(pair[0], others[1])
    pair[1].write_bytes(pair[0].read_bytes())
    assert "another set" in refused(*pair)
    assert keys_in(*pair, reset=True) == []


SET_BYTES = 3 * PAGE + 8 * SLOT_BYTES  # of each file of the sets here


@pytest.mark.parametrize("size", [0, SET_BYTES])
def test_a_blank_member_makes_the_set_empty(pair: tuple[Path, Path], size: int) -> None:
    pair[1].write_bytes(bytes(size))
    reader = open_set(*pair, read_only=True)
    assert (reader.num_slots, reader.load().keys) == (0, [])
    reader.close()
    refused(*pair, identity="model@2")
    assert keys_in(*pair) == []
    files = open_set(*pair)
    assert write_one(files, 1, b"key", "", payload(1), 0, 0)


@pytest.mark.parametrize("damage", ["version", "checksum"])
def test_an_unknown_version_is_an_empty_set(
    pair: tuple[Path, Path], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = bytearray(pair[1].read_bytes())
    for copy in (0, PAGE):
        data[copy + 8 : copy + 12] = struct.pack("<I", 2 if damage == "version" else 1)
        data[copy + 500] ^= 1
    pair[1].write_bytes(data)
    with caplog.at_level(logging.WARNING, "kvoffload"):
        reader = open_set(*pair, read_only=True)
        assert reader.load().keys == []
        reader.close()
        assert pair[1].read_bytes() == data, "a reader changes nothing"
        assert keys_in(*pair) == []
    texts = [record.getMessage() for record in caplog.records]
    said = "of another version" if damage == "version" else "damaged"
    assert len(texts) == 2
    assert all(f"b.kv is {said}" in text for text in texts)
    assert keys_in(*pair) == []


@pytest.mark.parametrize(
    "content",
    [
        b"a diary",
        *map(bytes, (1, 2 * PAGE, SET_BYTES - 1, SET_BYTES + 1, 4 * SET_BYTES)),
        bytes(2 * PAGE + 100) + b"\1".ljust(SET_BYTES - 2 * PAGE - 100, b"\0"),
    ],
    ids=len,
)
def test_a_file_of_another_program_is_never_overwritten(pair: tuple[Path, Path], content: bytes) -> None:
    """Zeros of another size may be the image of a disk, or a file that another program has allocated. A file of the
    size that begins with zeros is blank only if there are zeros up to its payloads.
    """
    pair[1].write_bytes(content)
    for reset in (False, True):
        assert "not a file of a disk tier" in refused(*pair, reset=reset)
    assert pair[1].read_bytes() == content


@pytest.mark.parametrize("slots", [4, 64])
def test_a_format_that_was_killed_goes_on_whatever_the_size(tmp_path: Path, slots: int) -> None:
    """After `fallocate` began: it may have allocated a part, and a set of another size may have been there."""
    path, operations = tmp_path / "a.kv", FaultyFiles()
    keys_in(path)
    operations.failing["fallocate"] = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        open_set(path, slots=slots, identity="model@2", reset=True, operations=operations)
    os.truncate(path, 5 * PAGE)
    assert keys_in(path, slots=slots, identity="model@2") == []
    assert keys_in(path, slots=slots, identity="model@2") == []


# one writer -----------------------------------------------------------------------------------------------------------


def test_pitfall_51_one_writer_at_a_time(pair: tuple[Path, Path]) -> None:
    files = open_set(*pair)
    with pytest.raises(BlockingIOError, match="open for writing"):
        open_set(*pair)
    with pytest.raises(BlockingIOError, match="open for writing"):
        open_set(*pair, reset=True)
    program = (
        "import sys; sys.path += sys.argv[1:2]\nfrom pathlib import Path\nfrom disk_sets import open_set\n"
        "try: open_set(*map(Path, sys.argv[2:]))\nexcept BlockingIOError: print('locked')"
    )
    support = str(Path(__file__).parent)
    command = [sys.executable, "-c", program, support, *map(str, pair)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "locked\n", done.stderr
    files.close()
    assert keys_in(*pair) == [b"key"]


def test_a_refusal_leaves_no_lock_and_no_descriptor(pair: tuple[Path, Path]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    refused(*pair, identity="other")
    assert len(os.listdir("/proc/self/fd")) == before
    assert keys_in(*pair) == [b"key"]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_path_is_given_once(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"each file of a disk must be another one, got .* twice"):
        open_set(tmp_path / "a.kv", tmp_path / "folder" / ".." / "a.kv")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": "nonsense"}, "policy must be one of .*, a Policy or a function, got 'nonsense'"),
        ({"policy": 3}, "policy must be a name, .*, got 3"),
        ({"policy": LRU(8), "tenants": {"a": Tenant(max_blocks=1)}}, "policy must be a name or a function"),
        ({"tenants": [1]}, r"tenants must be a mapping of names to Tenant, got \[1\]"),
        ({"tenants": {"a": 3}}, r"tenants\['a'\] must be a Tenant, got 3"),
    ],
    ids=repr,
)
def test_a_policy_and_tenants_are_refused_before_there_is_a_file(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        DiskTier(tmp_path / "kv", nbytes=1 << 20, identity="x", **options)
    assert not list(tmp_path.iterdir())


# trust ----------------------------------------------------------------------------------------------------------------


def test_files_that_others_may_use_are_refused(pair: tuple[Path, Path]) -> None:
    for mode in (0o640, 0o604, 0o620, 0o602):
        pair[0].chmod(mode)
        with pytest.raises(PermissionError, match=f"mode {mode:o}"):
            open_set(*pair)
        with pytest.raises(PermissionError, match=f"mode {mode:o}"):
            open_set(*pair, read_only=True)
    pair[0].chmod(0o600)
    assert keys_in(*pair) == [b"key"]


def test_the_mode_does_not_depend_on_the_mask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        open_set(tmp_path / "a.kv").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.kv").stat().st_mode) == 0o600


def test_folders_that_others_may_write_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="every user may write"):
        open_set(folder / "a.kv")
    assert list(folder.iterdir()) == []


@pytest.fixture
def sticky(tmp_path: Path) -> Path:
    """A folder as /tmp is: every user may write it, and remove only files of their own."""
    folder = tmp_path / "sticky"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_a_folder_such_as_tmp_is_used_for_files_of_this_user_alone(sticky: Path) -> None:
    path = sticky / "a.kv"
    files = open_set(path)
    assert write_one(files, 1, b"key", "", payload(1), 0, 0)
    files.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys_in(path) == keys_in(path, read_only=True) == [b"key"]
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="mode 644"):
        open_set(path)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_that_another_user_may_have_put_there_is_refused(sticky: Path, read_only: bool) -> None:
    path = sticky / "a.kv"
    open_set(path).close()
    os.link(path, sticky / "second name")
    with pytest.raises(PermissionError, match="2 names"):
        open_set(path, read_only=read_only)
    (sticky / "second name").unlink()
    path.rename(sticky / "b.kv")
    path.symlink_to(sticky / "b.kv")
    with pytest.raises(OSError, match=r"a\.kv"):
        open_set(path, read_only=read_only)
    assert keys_in(sticky / "b.kv") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_or_folder_of_another_user_is_refused(sticky: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sticky / "a.kv"
    open_set(path).close()
    os.chown(path, 12345, -1)
    with pytest.raises(PermissionError, match="owner 12345"):
        open_set(path)
    os.chown(path, 0, -1)
    os.chown(sticky, 12345, -1)
    with pytest.raises(PermissionError, match="every user may write"):
        open_set(path)
    os.chown(sticky, 0, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # a file of root's is trusted elsewhere, here it may be a link
    with pytest.raises(PermissionError, match="owner 0"):
        open_set(path)


def test_symbolic_links_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    link = tmp_path / "link.kv"
    link.symlink_to(tmp_path / "new.kv")
    with pytest.raises(OSError, match=r"link\.kv"):
        open_set(link)
    assert not (tmp_path / "new.kv").exists()
    folder = tmp_path / "folder"
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="symbolic link"):
        open_set(folder / "a.kv", folder / "b.kv")
    assert keys_in(*pair) == [b"key"]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="regular file"):
        open_set(tmp_path / "pipe")
    with pytest.raises(OSError, match="missing"):
        open_set(tmp_path / "missing" / "a.kv")


def test_a_superblock_whose_epoch_no_other_can_follow_is_damaged(tmp_path: Path) -> None:
    """Another program may have written it; `clear` and a failed sync begin another epoch."""
    path = tmp_path / "a.kv"
    for epoch in (MOST_EPOCH, MOST_EPOCH + 1, (1 << 64) - 1):
        keys_in(path, reset=True)
        found = unpack_superblock(path.read_bytes()[:512])
        assert found is not None
        with path.open("r+b") as file:
            for offset in (0, PAGE):
                file.seek(offset)
                file.write(found._replace(epoch=epoch).pack())
        files = open_set(path)
        assert files.load().keys == []
        files.clear()
        write_one(files, 0, b"key", "", payload(1), 0, 0)
        assert read_one(files, 0, b"key", blank())
        files.close()
        assert keys_in(path) == ([] if epoch == MOST_EPOCH else [b"key"])


# space ----------------------------------------------------------------------------------------------------------------


def test_pitfall_55_too_little_space_is_refused_at_creation(operations: FaultyFiles, tmp_path: Path) -> None:
    operations.failing["fallocate"] = errno.ENOSPC
    with pytest.raises(CapacityError, match=r"b.kv|a.kv"):
        open_set(tmp_path / "a.kv", tmp_path / "b.kv", operations=operations)
    assert list(tmp_path.iterdir()) == []
    operations.failing["fallocate"] = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        open_set(tmp_path / "a.kv", operations=operations)


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_a_creation_that_fails_leaves_nothing(operations: FaultyFiles, tmp_path: Path, call: str) -> None:
    operations.failing[call] = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        open_set(tmp_path / "a.kv", operations=operations)
    assert list(tmp_path.iterdir()) == []
    assert keys_in(tmp_path / "a.kv") == []


def test_reset_to_a_smaller_set_gives_space_back(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    keys_in(path, slots=64)
    keys_in(path, slots=4, reset=True)
    assert path.stat().st_size == 3 * PAGE + 4 * SLOT_BYTES


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"nbytes": 3 * PAGE}, CapacityError, "no room for a record of 8192 bytes in each file: give it 20480 or more"),
        ({"nbytes": 0}, ValueError, "nbytes"),
        ({"key": b"short"}, ValueError, "16 to 64 bytes, got 5"),
        ({"key": "text" * 8}, TypeError, "key must be bytes"),
    ],
)
def test_wrong_arguments(tmp_path: Path, options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        open_set(tmp_path / "a.kv", **options)
    assert list(tmp_path.iterdir()) == []


def test_slots_fill_the_space_that_was_given(tmp_path: Path) -> None:
    """Around one page of headers: no more bytes than asked for, and none for a slot unused."""
    for nbytes in range(20 * PAGE, 60 * PAGE, 1000):
        files = open_set(tmp_path / "a.kv", nbytes=nbytes, slot_bytes=PAGE, reset=True)
        size = (tmp_path / "a.kv").stat().st_size
        assert nbytes - 2 * PAGE - 192 < size <= nbytes
        files.close()


@pytest.mark.parametrize("key", [None, b"k" * 16])
def test_a_digest_of_several_ranges_is_that_of_all_as_one(key: bytes | None) -> None:
    checksum = make_checksum(key)
    data = memoryview(os.urandom(5000))
    one = checksum.of([data])
    assert checksum.of([data[:1], data[1:1], data[1:4097], data[4097:]]) == one == checksum.of_bytes(bytes(data))
    assert len(one) == len(checksum.key_check) == 16
    assert make_checksum(b"j" * 16).key_check != checksum.key_check

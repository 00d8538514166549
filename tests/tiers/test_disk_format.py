"""The format of a disk set: golden files, read as docs/disk-format.md says, and every byte of them changed."""

from __future__ import annotations

import shutil
from hashlib import blake2b
from pathlib import Path

import pytest
import xxhash
from disk_sets import LAYOUT, PAGE, flip, open_set, read_one
from golden_sets import RECORDS, SETS, options, payload_of, unpack, write_golden_sets
from seeds import rest_long

from kvoffload.tiers.format import tenant_digest, unpack_superblock

NAMES = sorted(SETS)


def digest(person: str, message: bytes, key: bytes = b"") -> bytes:
    return blake2b(message, digest_size=16, person=person.encode(), key=key).digest()


def number(data: bytes, offset: int, length: int) -> int:
    return int.from_bytes(data[offset : offset + length], "little")


def as_specified(path: Path, member: int, name: str) -> dict[int, tuple[bytes, int, int]]:
    """Key, sequence and position by slot of the file, read with nothing of the library, every field checked."""
    data, chosen = path.read_bytes(), SETS[name]
    superblock = data[:512]
    assert data[4096:8192] == superblock + bytes(4096 - 512)
    assert superblock[:8] == bytes.fromhex("894b564f44534b0a")
    assert [number(superblock, at, 4) for at in (8, 12, 40, 44)] == [1, 192, member, chosen["files"]]
    slot_bytes, slots, begin = (number(superblock, at, 8) for at in (16, 24, 32))
    assert (slot_bytes, begin) == (4096, 8192 + -(-192 * slots // 4096) * 4096)
    assert number(superblock, 48, 8) >> 32 == 1, "one `clear`"
    checksum_key = chosen["checksum_key"]
    assert number(superblock, 56, 8) == (1 if checksum_key is None else 2)
    identity = chosen["identity"].encode()
    assert superblock[80:112] == LAYOUT + digest("kvoffload ident", identity)
    assert superblock[112:128] == (bytes(16) if checksum_key is None else digest("kvoffload key", b"", checksum_key))
    assert number(superblock, 128, 8) == len(identity)
    assert superblock[136:496] == identity.ljust(360, b"\0")
    assert superblock[496:] == digest("kvoffload super", superblock[:496])

    def check(message: bytes) -> bytes:
        if checksum_key is None:
            return xxhash.xxh3_128_intdigest(message).to_bytes(16, "big")
        return digest("kvoffload disk", message, checksum_key)

    found = {}
    for slot in range(slots):
        header = data[8192 + 192 * slot : 8192 + 192 * (slot + 1)]
        if header[:16] != check(header[16:]) or number(header, 136, 8) != number(superblock, 48, 8):
            continue
        payload = data[begin + slot_bytes * slot : begin + slot_bytes * (slot + 1)]
        assert header[16:32] == digest("kvoffload member", superblock[:48] + superblock[56:128])
        assert header[32:48] == check(payload)
        tenant = chosen["tenant"].encode()
        assert header[112:128] == (digest("kvoffload tenant", tenant) if tenant else bytes(16))
        assert [number(header, at, 8) for at in (128, 152)] == [slot_bytes, slot]
        assert header[165:] == bytes([number(superblock, 56, 4)]) + bytes(26)
        length = header[164]
        assert header[48 + length : 112] == bytes(64 - length)
        found[slot] = header[48 : 48 + length], number(header, 144, 8), number(header, 160, 4)
    return found


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_golden_files_are_as_the_page_says(
    name: str, anew: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are kept here, and those that are written now."""
    if anew:
        monkeypatch.setattr("golden_sets.GOLDEN", tmp_path)
        write_golden_sets()
    paths = unpack(name, tmp_path)
    count = len(paths)
    found = {
        slot * count + member: record
        for member, path in enumerate(paths)
        for slot, record in as_specified(path, member, name).items()
    }
    assert found == {slot: (key, sequence, position) for slot, key, sequence, position in RECORDS}


@pytest.mark.parametrize("name", NAMES)
def test_golden_files_are_read(name: str, tmp_path: Path) -> None:
    paths = unpack(name, tmp_path)
    files = open_set(*paths, **options(name))
    records = files.load()
    assert records.keys == [key for _, key, _, _ in RECORDS]
    assert records.slots.tolist() == [slot for slot, *_ in RECORDS]
    assert records.sequences.tolist() == [sequence for _, _, sequence, _ in RECORDS]
    assert records.tenants.tobytes() == tenant_digest(SETS[name]["tenant"]) * len(RECORDS)
    for slot, key, _, _ in RECORDS:
        view = memoryview(bytearray(PAGE))
        assert read_one(files, slot, key, [view])
        assert view == payload_of(slot)


def read_all(path: Path, *, read_only: bool = False) -> dict[bytes, bytes]:
    """What a set of one file has, by key."""
    files = open_set(path, **options("blake2b"), read_only=read_only)
    records, found = files.load(), {}
    for key, slot in zip(records.keys, records.slots.tolist(), strict=True):
        view = memoryview(bytearray(PAGE))
        if read_one(files, slot, key, [view]):
            found[key] = bytes(view)
    files.close()
    return found


ALL = {key: payload_of(slot) for slot, key, _, _ in RECORDS}


@pytest.mark.parametrize("bits", rest_long([255, 1], 1))
@pytest.mark.parametrize("copy", rest_long([PAGE, 0], 1))
def test_any_byte_of_one_superblock_may_be_wrong(tmp_path: Path, copy: int, bits: int) -> None:
    (golden,) = unpack("blake2b", tmp_path)
    path = tmp_path / "changed.kv"
    for offset in range(512):
        shutil.copy(golden, path)
        flip(path, copy + offset, bits)
        assert read_all(path, read_only=True) == ALL
    assert read_all(path) == ALL
    assert path.read_bytes() == golden.read_bytes(), "the copy is written again"


def test_an_older_superblock_does_not_count(tmp_path: Path) -> None:
    """And a writer replaces it, so that the newer one may become unreadable afterwards."""
    (path,) = unpack("blake2b", tmp_path)
    data = path.read_bytes()
    newest = unpack_superblock(data[:512])
    assert newest is not None
    older = newest._replace(epoch=0).pack()
    for copy in (0, PAGE):
        path.write_bytes(data[:copy] + older + data[copy + 512 :])
        assert read_all(path, read_only=True) == ALL
        assert read_all(path) == ALL
        assert path.read_bytes() == data


@pytest.mark.parametrize("name", NAMES)
def test_any_byte_of_a_header_may_be_wrong(tmp_path: Path, name: str) -> None:
    paths = unpack(name, tmp_path)
    files = open_set(*paths, **options(name), read_only=True)
    key, begin = RECORDS[0][1], 8192
    for offset in range(192):
        for bits in (1, 128):
            flip(paths[0], begin + offset, bits)
            assert key not in files.load().keys
            assert not read_one(files, 0, key, [memoryview(bytearray(PAGE))])
            flip(paths[0], begin + offset, bits)
    assert key in files.load().keys
    assert read_one(files, 0, key, [memoryview(bytearray(PAGE))])


@pytest.mark.long
def test_any_byte_of_a_payload_may_be_wrong(tmp_path: Path) -> None:
    (path,) = unpack("blake2b", tmp_path)
    for read_only in (False, True):
        files = open_set(path, **options("blake2b"), read_only=read_only)
        files.load()
        view = memoryview(bytearray(PAGE))
        for offset in range(PAGE):
            flip(path, 3 * PAGE + offset, 16)
            assert not read_one(files, 0, b"k", [view])
            flip(path, 3 * PAGE + offset, 16)
        assert read_one(files, 0, b"k", [view])
        files.close()


@pytest.mark.parametrize("size", [0, 1, 511, 512, 4096, 8192, 8192 + 191, 8192 + 192, 3 * PAGE, 4 * PAGE - 1, 4 * PAGE])
def test_a_truncated_file_has_right_bytes_or_none(tmp_path: Path, size: int) -> None:
    (path,) = unpack("blake2b", tmp_path)
    with path.open("r+b") as file:
        file.truncate(size)
    for read_only in (True, False):
        found = read_all(path, read_only=read_only)
        assert found.items() <= ALL.items()
        assert len(found) == (1 if size == 4 * PAGE else 0)
    assert path.stat().st_size == open_set(path, **options("blake2b"))._members[0].superblock.file_bytes


def test_what_is_copied_from_another_slot_is_a_miss(tmp_path: Path) -> None:
    """A header, a payload, and both: the header names its slot."""
    (path,) = unpack("blake2b", tmp_path)
    data = path.read_bytes()
    header, body = data[8192 : 8192 + 192], data[3 * PAGE : 4 * PAGE]
    with_header = data[: 8192 + 192] + header + data[8192 + 2 * 192 :]
    for changed in (with_header, with_header[: 4 * PAGE] + body + data[5 * PAGE :]):
        path.write_bytes(changed)
        assert read_all(path) == {key: body for key, body in ALL.items() if key != RECORDS[1][1]}
    path.write_bytes(data[: 4 * PAGE] + body + data[5 * PAGE :])
    assert read_all(path) == {key: body for key, body in ALL.items() if key != RECORDS[1][1]}


def test_what_is_copied_from_another_member_or_set_is_a_miss(tmp_path: Path) -> None:
    first, second = unpack("xxh3", tmp_path)
    a, b = first.read_bytes(), second.read_bytes()
    second.write_bytes(b[: 2 * PAGE] + a[2 * PAGE :])  # tables and payloads; the superblock stays
    files = open_set(first, second, **options("xxh3"))
    assert files.load().keys == [RECORDS[0][1]], "of the records of the second file there is none"
    files.close()
    other = open_set(tmp_path / "c.kv", tmp_path / "d.kv", **options("xxh3"))
    other.close()
    new = (tmp_path / "c.kv").read_bytes()
    (tmp_path / "c.kv").write_bytes(new[: 2 * PAGE] + a[2 * PAGE :])
    other = open_set(tmp_path / "c.kv", tmp_path / "d.kv", **options("xxh3"))
    assert other.load().keys == []

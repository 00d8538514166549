"""Files that are damaged, cut, or made by a stranger: no wrong byte, no other error, and no memory beyond the file."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversations import SMALL, World, talk, values_of, world
from seeds import rest_long, seeds

from kvoffload import LayoutError, SessionFileError
from kvoffload.session import session_file
from kvoffload.session.saving import whole_blocks
from kvoffload.session.session_file import Plan, SessionFile
from kvoffload.session.whole_blocks import GroupForm

KIND = SMALL._replace(groups=2, factor=2)
BLOCKS, FILES, ROUNDS = 12, 125, 80
ALLOWED = (SessionFileError, LayoutError, ValueError, OSError)
TOKENS, OTHER = talk(0, BLOCKS), talk(1, BLOCKS)
LATER = np.concatenate([OTHER[:4], TOKENS[4:]])  # the tokens of most blocks are those of TOKENS, but not the first
Sample = dict[str, bytes]


@pytest.fixture(autouse=True)
def segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five blocks, so that files of these tests have several."""
    monkeypatch.setattr(session_file, "SEGMENT_BYTES", 5 * sum(each[0].nbytes for each in values_of(KIND, TOKENS)))


@pytest.fixture
def target(seed: int) -> Iterator[World]:
    with world(KIND, capacity=8, blocks=32, seed=seed) as each:
        yield each


@pytest.fixture
def sample(target: World, tmp_path: Path) -> Sample:
    """Files with the same header and other tokens, and one whose header differs, too. No salt: it would tell."""
    files = {}
    for name, tokens in {"a": TOKENS, "b": OTHER, "c": LATER, "short": TOKENS[:24]}.items():
        target.store(tokens, salt="")
        target.save(tmp_path / "made", tokens, salt="")
        files[name] = (tmp_path / "made").read_bytes()
        target.cache.clear()
    return files


def truth(target: World) -> dict[bytes, list[bytes]]:
    found = {}
    for tokens in (TOKENS, OTHER, LATER):
        values = target.values(tokens)
        for place, key in enumerate(target.keys(tokens, salt="")):
            found[key] = [each[2 * place : 2 * place + 2].tobytes() for each in values]
    return found


def check(target: World, known: dict[bytes, list[bytes]]) -> None:
    """Every key that is there has its bytes."""
    whole = whole_blocks(target.cache)
    for key in target.resident():
        with target.cache.acquire([key]) as lease:
            assert [whole.gather(group, lease.slots(group)).tobytes() for group in (0, 1)] == known[key]
    target.cache.clear()
    assert target.held() == (0, 0, 0)


def plan_of(content: bytes) -> Plan:
    end = 8 + struct.unpack_from("<Q", content)[0]
    metadata = json.loads(content[8:end])["__metadata__"]
    return Plan(session_file.Contents.of(metadata))


# damages: of a file, with others that have the same header ---------------------------------------------------------

Damage = Callable[[random.Random, Sample], bytes]


def flip(choose: random.Random, files: Sample) -> bytes:
    found = bytearray(files["a"])
    plan = plan_of(files["a"])
    parts = [0, 8, 300, plan.tokens_at, plan.digests_at, plan.blocks_at, plan.seal_at, plan.nbytes]
    place = choose.randrange(len(parts) - 1)
    for _ in range(choose.choice([1, 1, 2, 9])):
        found[choose.randrange(parts[place], parts[place + 1])] ^= 1 << choose.randrange(8)
    return bytes(found)


def cut(choose: random.Random, files: Sample) -> bytes:
    plan = plan_of(files["a"])
    edges = [0, 8, 4096, plan.tokens_at, plan.digests_at, plan.blocks_at, plan.seal_at, plan.nbytes]
    edges += [plan.place(block, group) for block in range(BLOCKS) for group in range(2)]
    found = files["a"][: max(0, choose.choice(edges) + choose.choice([-1, 0, 1, choose.randrange(-64, 64)]))]
    return found + choose.choice([b"", b"", bytes(choose.randrange(1, 9000))])


def append(choose: random.Random, files: Sample) -> bytes:
    return files["a"] + choose.randbytes(choose.choice([1, 32, 4096, 10_000]))


def length(choose: random.Random, files: Sample) -> bytes:
    right = len(plan_of(files["a"]).header) - 8
    wrong = [0, 1, right - 1, right + 1, 1 << 24, (1 << 24) + 1, 1 << 63, (1 << 64) - 1, choose.randrange(1 << 20)]
    return struct.pack("<Q", choose.choice(wrong)) + files["a"][8:]


def with_header(text: bytes, files: Sample, choose: random.Random) -> bytes:
    """A header of whole pages, and what comes after it in a right file."""
    text += b" " * (-(8 + len(text)) % choose.choice([1, 4096, 4096, 4096]))
    return struct.pack("<Q", len(text)) + text + files["a"][len(plan_of(files["a"]).header) :]


ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2, 4, 1 << 31, 1 << 32, 1 << 64, 10**400, 1.5, float("inf"), float("nan"), "", "1",
    "-1", "0", "1e9", "٣", "x" * 5000, "9" * 5000, [], [[]], [0], {}, {"a": 1}, "[]", "{}", "[0]", "null", "Infinity",
    '[{"kind":"full","planes":4294967296,"shape":[4294967296,4294967296]}]', '[{"kind":"full","planes":1,"shape":[]}]',
    '[{"kind":"window","planes":2,"shape":[4,2,4]},{"kind":"full","planes":2,"shape":[4,2,8]}]', '[{"planes":1e999}]',
    "uint9", "O", "V0", "S0", "(1,", "a5", "f8,f8", "bfloat16", "float8_e5m2", ">u2", "datetime64[ns]", "\ud800", "2",
    "[" * 3000, "kvoffload session", ["tokens"], '["dim","heads","tokens"]', '{"model":"m","revision":"2"}',
]  # fmt: skip


def metadata(choose: random.Random, files: Sample) -> bytes:
    """Another value in it, with or without entries and offsets that fit."""
    header = json.loads(files["a"][8 : len(plan_of(files["a"]).header)])
    said = header["__metadata__"]
    for _ in range(choose.choice([1, 1, 2])):
        said[choose.choice(list(said))] = choose.choice(ODD)
    if choose.random() < 0.1:
        del said[choose.choice(list(said))]
    if choose.random() < 0.5:
        try:
            return Plan(session_file.Contents.of(said), 1000).header + files["a"][len(plan_of(files["a"]).header) :]
        except Exception:
            pass
    return with_header(session_file._json(header).encode(), files, choose)


def entries(choose: random.Random, files: Sample) -> bytes:
    """Other tensors: wrong types, offsets that overlap, leave gaps or lie outside, names twice."""
    header = json.loads(files["a"][8 : len(plan_of(files["a"]).header)])
    names = [name for name in header if name != "__metadata__"]
    one, other = choose.sample(names, 2)
    what = choose.randrange(6)
    if what == 0:
        header[one]["data_offsets"] = header[other]["data_offsets"]
    elif what == 1:
        header[one]["data_offsets"] = [choose.choice(ODD), choose.choice(ODD)]
    elif what == 2:
        header[one][choose.choice(["dtype", "shape"])] = choose.choice(ODD)
    elif what == 3:
        header[one] = choose.choice(ODD)
    elif what == 4:
        del header[one]
    text = session_file._json(header)
    if what == 5:
        text = text[:-1] + f',"{one}":{session_file._json(header[other])}}}'
    return with_header(text.encode(), files, choose)


def texts(choose: random.Random, files: Sample) -> bytes:
    """Headers that are other JSON, or none."""
    begin = '{"__metadata__":'
    deep = choose.choice([10, 1000, 30_000])
    found = [
        b"", b"{}", b"[]", b"null", choose.randbytes(5000), begin.encode(), (begin + "{" * deep).encode(),
        (begin + "[" * deep + "]" * deep + "}").encode(), (begin + '{"a":' * deep).encode(),
        (begin + "1" * deep + "}").encode(), (begin + "1e" + "9" * deep + "}").encode(), (begin + "[]}").encode(),
        (begin + '"' + "\\ud800" * 100 + '"}').encode(), (begin + '{"format":"kvoffload session"}}').encode(),
        (begin + '"' + "ä" * 9000).encode(), (begin + '{"format":"kvoffload session","version":"2"}}').encode(),
    ]  # fmt: skip
    return with_header(choose.choice(found), files, choose)


def swap(choose: random.Random, files: Sample) -> bytes:
    """Blocks, with tokens and digests or without some of them, change places, or are those of the other files."""
    plan, found = plan_of(files["a"]), bytearray(files["a"])
    source = files[choose.choice("abc")]
    one, other = choose.randrange(BLOCKS), choose.randrange(BLOCKS)
    other = choose.choice([one, other])
    spans = [(plan.tokens_at + 16 * one, plan.tokens_at + 16 * other, 16)]
    spans += [(plan.digests_at + 16 * one, plan.digests_at + 16 * other, 16)]
    spans += [(plan.place(one, group), plan.place(other, group), plan.block_bytes[group]) for group in range(2)]
    for target, begin, size in spans if choose.random() < 0.6 else choose.sample(spans, choose.randrange(1, 4)):
        found[target : target + size] = source[begin : begin + size]
    return bytes(found)


def splice(choose: random.Random, files: Sample) -> bytes:
    """The rest of another file, from any place on."""
    place = choose.randrange(len(files["a"]))
    return files["a"][:place] + files[choose.choice(["b", "c", "short"])][place:]


DAMAGES: list[Damage] = [flip, cut, append, length, metadata, entries, texts, swap, splice]


def most(nbytes: int) -> int:
    """Bytes that a restore may have at a time: threads, texts of errors, and some copies of what lies in the file."""
    return (1 << 20) + 16 * nbytes


@pytest.mark.parametrize("number", rest_long(seeds(ROUNDS), 1))
def test_no_damage_gives_a_wrong_byte(number: int, target: World, sample: Sample, tmp_path: Path) -> None:
    choose, path, known, outcomes = random.Random(number), tmp_path / "file", truth(target), set[str]()
    tracemalloc.start()
    try:
        for turn in range(FILES):
            damage = DAMAGES[turn % len(DAMAGES)]
            content = damage(choose, sample)
            path.write_bytes(content)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            try:
                found = target.restore(path, salt="")
            except ALLOWED as error:
                outcomes.add(type(error).__name__)
                assert not target.resident(), f"{damage.__name__} {turn}"
            else:
                outcomes.add(found.reason.partition(" ")[0])
                assert len(target.resident()) * 8 == found.tokens, f"{damage.__name__} {turn}: {found}"
                assert found.tokens == found.of or found.reason, "a whole file of fewer blocks is one, too"
            assert tracemalloc.get_traced_memory()[1] - before < most(len(content)), f"{damage.__name__} {turn}"
            check(target, known)
    finally:
        tracemalloc.stop()
    assert {"SessionFileError", "", "block", "the"} <= outcomes


def test_a_block_of_another_conversation_is_not_taken_for_its_own_tokens(
    target: World, sample: Sample, tmp_path: Path
) -> None:
    """Its tokens, digest and bytes fit each other: all but the first block of "c" have the tokens of those of "a"."""
    plan, found = plan_of(sample["a"]), bytearray(sample["a"])
    spans = [(plan.tokens_at + 16, plan.digests_at), (plan.digests_at + 16, plan.digests_at + 16 * BLOCKS)]
    spans += [
        (place, place + plan.block_bytes[group])
        for group in range(2)
        for place in (plan.place(block, group) for block in range(1, BLOCKS))
    ]
    for begin, end in spans:
        found[begin:end] = sample["c"][begin:end]
    (tmp_path / "file").write_bytes(found)
    assert target.restore(tmp_path / "file", salt="") == (0, 4 * BLOCKS, "block 1 is damaged")
    with SessionFile(tmp_path / "file") as file:
        assert not file.sealed
    check(target, truth(target))


def test_every_block_whose_byte_was_flipped_is_named(target: World, sample: Sample, tmp_path: Path) -> None:
    plan, known = plan_of(sample["a"]), truth(target)
    for block in range(BLOCKS):
        for at in (plan.tokens_at + 16 * block, plan.digests_at + 16 * block, plan.place(block, block % 2)):
            found = bytearray(sample["a"])
            found[at] ^= 0x10
            (tmp_path / "file").write_bytes(found)
            whole, first = target.restore(tmp_path / "file", salt=""), block
            assert whole == (first // 2 * 8, 4 * BLOCKS, f"block {first} is damaged")
            check(target, known)


def test_a_cut_file_gives_the_blocks_that_are_whole(target: World, sample: Sample, tmp_path: Path) -> None:
    plan, known = plan_of(sample["a"]), truth(target)
    for block in range(BLOCKS):
        for group, more in ((0, 0), (0, 1), (1, plan.block_bytes[1] - 1), (1, plan.block_bytes[1])):
            nbytes = plan.place(block, group) + more
            (tmp_path / "file").write_bytes(sample["a"][:nbytes])
            ends = [max(plan.place(each, part) + plan.block_bytes[part] for part in (0, 1)) for each in range(BLOCKS)]
            leading = next((each for each, end in enumerate(ends) if end > nbytes), BLOCKS)
            reason = f"the file ends in block {leading}" if leading < BLOCKS else ""
            assert target.restore(tmp_path / "file", salt="") == (leading // 2 * 8, 4 * BLOCKS, reason)
            check(target, known)


def test_what_is_no_file(target: World, sample: Sample, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    (tmp_path / "file").write_bytes(sample["a"])
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nothing")
    for name, error in {
        "fifo": SessionFileError, "empty": SessionFileError, ".": SessionFileError, "/dev/zero": SessionFileError,
        "dangling": OSError, "none": OSError, "file/more": OSError,
    }.items():  # fmt: skip
        with pytest.raises(error):
            target.restore(tmp_path / name, salt="")
        assert not target.resident()
    assert target.restore(tmp_path / "link", salt="").tokens == 4 * BLOCKS
    check(target, truth(target))


@pytest.mark.parametrize("what", ["blocks", "tokens", "shape", "groups", "header"])
def test_sparse_files_that_claim_much_are_refused_or_cheap(
    what: str, target: World, sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_file, "MOST_TOKENS", 1 << 18)
    monkeypatch.setattr(session_file, "SEGMENT_BYTES", 16 << 20)
    contents, header = plan_of(sample["a"]).contents, b""
    form = contents.form
    if what == "blocks":  # as many as a header has
        contents = contents._replace(blocks=session_file.MOST_TOKENS // 4)
    elif what == "tokens":
        contents = contents._replace(form=form._replace(tokens_per_block=session_file.MOST_TOKENS), blocks=1)
    elif what == "shape":
        huge = GroupForm(1 << 31, (1 << 31, 1 << 31, 1 << 31))
        contents = contents._replace(form=form._replace(groups=(huge,)), blocks=3)
    elif what == "groups":
        contents = contents._replace(form=form._replace(groups=form.groups * 200))
    else:
        header = struct.pack("<Q", session_file.MOST_HEADER)
    with (tmp_path / "file").open("wb") as file:
        file.write(header or Plan(contents).header)
        file.truncate(1 << 42)
    tracemalloc.start()
    try:
        assert target.restore(tmp_path / "file", salt="").tokens == 0
    except ALLOWED:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < (session_file.MOST_HEADER << 4 if what == "header" else 24 * 4 * session_file.MOST_TOKENS)
    assert not target.resident()


def test_more_tokens_than_a_file_may_have_are_neither_saved_nor_read(
    target: World, sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(sample["a"])
    target.store(TOKENS)
    monkeypatch.setattr(session_file, "MOST_TOKENS", 4 * BLOCKS - 1)
    with pytest.raises(ValueError, match=f"at most {4 * BLOCKS - 1} tokens, got {4 * BLOCKS}"):
        target.save(tmp_path / "new", TOKENS)
    with pytest.raises(SessionFileError):
        target.restore(tmp_path / "file", salt="")
    assert [each.name for each in tmp_path.iterdir() if each.name != "made"] == ["file"]

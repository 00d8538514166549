"""`kvoffload session convert`, with files in the layout of mlx-lm. `mlx_round_trip.py` compares with mlx-lm itself."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benching import refused, run_json
from numpy.typing import NDArray
from session_folders import LAYOUTS, flip, write

from kvoffload.commands import main
from kvoffload.session import session_file
from kvoffload.session.mlx_cache import PLANES
from kvoffload.session.saving import Terms
from kvoffload.session.session_file import SessionFile

LAYERS, HEADS, DIM, COUNT, ROOM = 3, 2, 8, 53, 256
TOKENS = list(range(7, 7 + COUNT))
IDENTITY = {"model": "m=1", **PLANES}
KINDS: dict[str, np.dtype[Any]] = {"F32": np.dtype("u4"), "BF16": np.dtype("u2"), "F16": np.dtype("u2")}
Header = dict[str, Any]


def values(kind: str = "F32", count: int = ROOM) -> NDArray[Any]:
    """Keys and values of each layer: (planes, heads, tokens, dim). What is behind the tokens is not 0, as in mlx-lm."""
    extents = 2 * LAYERS, HEADS, count, DIM * KINDS[kind].itemsize
    found: NDArray[Any] = np.random.default_rng(1).integers(0, 256, extents, np.uint8).view(KINDS[kind])
    return found


def prompt_cache(
    path: Path, kind: str = "F32", *, old: bool = False, change: Callable[[Header], object] = id, count: int = COUNT
) -> Path:
    """Write what `save_prompt_cache` of mlx-lm 0.32 writes, or of 0.31: tensors in any order, nothing aligned."""
    found = values(kind, count if old else ROOM)
    planes = {f"{plane // 2}.{plane % 2}": each[np.newaxis] for plane, each in enumerate(found)}
    counts = {} if old else {f"{layer}.2": np.array(count, "<i4") for layer in range(LAYERS)}
    classes = {f"{2 if old else 1}.{layer}": "KVCache" for layer in range(LAYERS)}
    scalars = {
        f"2.{layer + 1}.{at}": text for layer in range(LAYERS) for at, text in ((0, f"{layer}.2"), (1, "scalar"))
    }
    infos = {f"0.{layer}": "" for layer in range(LAYERS)}
    header: Header = {}
    content = b""
    for name, array in reversed((planes | counts).items()):
        span = [len(content), len(content) + array.nbytes]
        header[name] = {"data_offsets": span, "dtype": kind if array.ndim else "I32", "shape": list(array.shape)}
        content += array.tobytes()
    header["__metadata__"] = (
        {"1.mine": "x", **infos, **classes} if old else {"0.mine": "x", "2.0": "", **classes, **scalars}
    )
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)
    return path


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    (tmp_path / "ids.json").write_text(json.dumps(TOKENS))
    return ["--tokens", str(tmp_path / "ids.json"), "--identity", "model=m=1"]


def converted(capsys: pytest.CaptureFixture[str], source: Path, *words: str) -> Path:
    target = source.with_suffix(".out")
    fields = run_json(capsys, "session", "convert", str(source), str(target), *words)
    assert fields == {"file": str(target), "tokens": COUNT // 16 * 16}
    assert target.stat().st_mode & 0o777 == 0o600
    return target


def planes_of(path: Path) -> NDArray[Any]:
    """The values in a session file, as (planes, heads, tokens, dim)."""
    with SessionFile(path) as file:
        [blocks], good = file.read(0, file.whole)
        assert good == file.plan.blocks
    return np.concatenate(blocks.transpose(0, 1, 3, 2, 4), axis=2)


def read(path: Path) -> tuple[Header, bytes]:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), content[start:]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_cache_is_the_same_after_both_ways(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    old: bool,
) -> None:
    monkeypatch.setattr(session_file, "SEGMENT_BYTES", 1)  # a segment for each block
    source = prompt_cache(tmp_path / "a.safetensors", kind, old=old)
    file = converted(capsys, source, *given, "--salt", "s")
    expected = values(kind, COUNT if old else ROOM)[:, :, :48]
    with SessionFile(file) as opened:
        assert opened.sealed
        assert opened.tokens.tolist() == TOKENS[:48]
        contents, form = opened.contents, opened.contents.form
        assert contents.identity == IDENTITY
        assert contents.salt == Terms("s", b"", {}).digest(opened.tokens[: contents.form.tokens_per_block]) != ""
        assert (form.axes, form.tokens_per_block, form.groups) == (("tokens", "heads", "dim"), 16, ((6, (16, 2, 8)),))
    assert np.array_equal(planes_of(file), expected)

    header, content = read(converted(capsys, file))
    metadata = header.pop("__metadata__")
    assert metadata.pop("2.0") == ""
    assert {name[2:]: metadata.pop(name) for name in sorted(metadata) if name[0] == "0"} == IDENTITY
    assert [metadata.pop(f"1.{layer}") for layer in range(LAYERS)] == ["KVCache"] * LAYERS
    assert metadata == {f"2.{layer}.{at}": (f"{layer - 1}.2", "scalar")[at] for layer in (1, 2, 3) for at in (0, 1)}
    assert sorted(header) == [f"{layer}.{part}" for layer in range(LAYERS) for part in range(3)]
    spans = sorted(each["data_offsets"] for each in header.values())
    assert [0, *(end for _, end in spans)] == [*(begin for begin, _ in spans), len(content)]
    for name, each in header.items():
        part = content[slice(*each["data_offsets"])]
        if name.endswith(".2"):
            assert (each["dtype"], each["shape"], part) == ("I32", [], struct.pack("<i", 48))
        else:
            assert (each["dtype"], each["shape"]) == (kind, [1, HEADS, 48, DIM])
            assert part == expected[2 * int(name[0]) + int(name[2])].tobytes()


def test_others_read_what_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str]) -> None:
    safetensors = pytest.importorskip("safetensors")
    back = converted(
        capsys, converted(capsys, prompt_cache(tmp_path / "a.safetensors"), *given).rename(tmp_path / "a.kv")
    )
    with safetensors.safe_open(back, framework="np") as file:
        assert np.array_equal(file.get_tensor("1.1")[0].view(np.uint32), values()[3, :, :48])


def drop(name: str) -> Callable[[Header], object]:
    return lambda header: header.pop(name)


def entry(name: str, **changes: object) -> Callable[[Header], object]:
    return lambda header: header[name].update(changes)


def all_planes(**changes: object) -> Callable[[Header], object]:
    return lambda header: [header[f"{plane // 2}.{plane % 2}"].update(changes) for plane in range(2 * LAYERS)]


def layer(name: str, since_32: bool = True) -> Callable[[Header], object]:
    return lambda header: header["__metadata__"].update({"1.1" if since_32 else "2.1": name})


def swap_ends(header: Header) -> None:
    """Two tensors over each other: as many bytes altogether."""
    header["0.0"]["data_offsets"] = header["0.1"]["data_offsets"]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", ["RotatingKVCache", "QuantizedKVCache", "ChunkedKVCache", "CacheList", "\x1b[2J"])
def test_other_classes_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], name: str, old: bool
) -> None:
    source = prompt_cache(tmp_path / "a", old=old, change=layer(name, not old))
    said = refused(capsys, "session", "convert", str(source), str(tmp_path / "b"), *given)
    assert repr(name) in said
    assert "\x1b" not in said


DAMAGES: dict[str, tuple[Callable[[Header], object], str]] = {
    "no metadata": (drop("__metadata__"), "__metadata__"),
    "a layer's values missing": (drop("1.1"), "alike"),
    "a number of tokens missing": (drop("1.2"), "alike"),
    "no first keys": (drop("0.0"), "0.0"),
    "another shape": (entry("1.1", shape=[1, HEADS, ROOM // 2, 2 * DIM]), "alike"),
    "another type": (entry("1.1", dtype="U32"), "alike"),
    "no array of four axes": (all_planes(shape=[HEADS, ROOM, DIM]), ""),
    "a batch": (all_planes(shape=[2, 1, ROOM, DIM]), "alike"),
    "integers": (all_planes(dtype="I32"), "alike"),
    "more heads than bytes": (all_planes(shape=[1, 1 << 40, ROOM, DIM]), ""),
    "no heads": (all_planes(shape=[1, 0, ROOM, DIM]), ""),
    "an offset behind the end": (entry("0.0", data_offsets=[0, 1 << 50]), "gaps"),
    "a negative offset": (entry("0.0", data_offsets=[-4, 16380]), "gaps"),
    "offsets that are none": (entry("0.0", data_offsets="ab"), ""),
    "overlaps": (swap_ends, "gaps"),
    "an entry that is none": (lambda header: header.update({"0.0": 7}), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_headers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], name: str
) -> None:
    change, why = DAMAGES[name]
    source = prompt_cache(tmp_path / "a.safetensors", change=change)
    said = refused(capsys, "session", "convert", str(source), str(tmp_path / "b"), *given)
    assert "a.safetensors cannot be converted: " in said
    assert why in said
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.safetensors", "ids.json"]


def test_any_byte_of_a_header_may_be_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], seed: int
) -> None:
    source, target, random = tmp_path / "a", tmp_path / "b", np.random.default_rng(seed)
    content = prompt_cache(source).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for _ in range(150):
        changed = bytearray(content)
        changed[random.integers(start)] = random.integers(256)
        source.write_bytes(changed)
        code = main(["session", "convert", str(source), str(target), *given])
        assert code in (0, 2)
        assert target.exists() == (code == 0)
        if code == 0:  # it was in the user's metadata, say
            assert np.array_equal(planes_of(target), values()[:, :, :48])
            target.unlink()
    capsys.readouterr()
    for size in (0, 7, 8, 60, start, len(content) - 1):
        source.write_bytes(content[:size])
        assert refused(capsys, "session", "convert", str(source), str(target), *given)


def test_a_long_header_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str]) -> None:
    source = prompt_cache(tmp_path / "a", change=lambda header: header["__metadata__"].update({"0.x": "x" * (1 << 20)}))
    assert "JSONDecodeError" in refused(capsys, "session", "convert", str(source), str(tmp_path / "b"), *given)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--identity", "model=m"], "token_ids must be"),
        (["--tokens", "ids.json"], "identity must be a mapping"),
        (["--tokens", "ids.json", "--identity", "model"], "ValueError"),
        (["--tokens", "few.json", "--identity", "model=m"], "it has {53} tokens, and room for 256, got 52 ids"),
        (["--tokens", "words.json", "--identity", "model=m"], "token_ids must be"),
        (["--tokens", "missing.json", "--identity", "model=m"], "missing.json"),
        (["--tokens", "ids.json", "--identity", "model=m", "--block-tokens", "64"], "a block needs 64"),
    ],
)
def test_what_the_file_does_not_say_must_be_given_and_right(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ids.json").write_text(json.dumps(TOKENS))
    Path("few.json").write_text(json.dumps(TOKENS[1:]))
    Path("words.json").write_text('["a"]')
    prompt_cache(Path("a"))
    assert why in refused(capsys, "session", "convert", "a", "b", *words)
    assert not Path("b").exists()


def test_session_files_without_the_order_of_planes_are_refused_until_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "b")
    source = write(tmp_path / "a.kv", range(48))
    assert "keys and values by layer" in refused(capsys, "session", "convert", str(source), target)
    run_json(capsys, "session", "convert", str(source), target, "--identity", f"planes={PLANES['planes']}")
    assert read(Path(target))[0]["0.1"]["shape"] == [1, 4, 48, 64]
    two = write(tmp_path / "two.kv", range(48), LAYOUTS["two groups, heads first"], identity=IDENTITY)
    assert "one group" in refused(capsys, "session", "convert", str(two), target)


def test_damaged_session_files_are_refused_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write(tmp_path / "a.kv", range(48), identity=IDENTITY), tmp_path / "b"
    target.write_bytes(b"as before")
    with SessionFile(source) as file:
        flip(source, file.plan.place(3, 0))
        cut = file.plan.place(7, 0)
    assert "session verify" in refused(capsys, "session", "convert", str(source), str(target))
    flip(source, cut - 1)
    os.truncate(source, cut)
    assert "session verify" in refused(capsys, "session", "convert", str(source), str(target))
    flip(source, 4)
    assert "no session file" in refused(capsys, "session", "convert", str(source), str(target))
    assert sorted(tmp_path.iterdir()) == [source, target]
    assert target.read_bytes() == b"as before"


def test_it_holds_a_few_blocks_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.DIM", 1024)
    monkeypatch.setattr(session_file, "SEGMENT_BYTES", 1)
    first, file, back = prompt_cache(tmp_path / "a"), tmp_path / "b", tmp_path / "c"
    block = 2 * LAYERS * HEADS * 2 * 1024 * 4
    for source, target, words in ((first, file, [*given, "--block-tokens", "2"]), (file, back, [])):
        tracemalloc.start()
        fields = run_json(capsys, "session", "convert", str(source), str(target), *words)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert fields["tokens"] == 52
        assert peak < 8 * block < target.stat().st_size / 3
    assert np.array_equal(planes_of(file), values()[:, :, :52])


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], None]
) -> None:
    make(tmp_path / "a")
    assert "cannot be converted" in refused(capsys, "session", "convert", str(tmp_path / "a"), str(tmp_path / "b"))

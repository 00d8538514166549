"""`kvoffload session`: what it says of files that are whole, cut, damaged, and none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from benching import refused, run_json
from session_folders import GIVEN, LAYOUTS, TOKENS, flip, write

from kvoffload.commands import main
from kvoffload.session import session_file
from kvoffload.session.session_file import SessionFile
from kvoffload.terminal.console import Advance, Output

PROMPT = range(100, 100 + 12 * TOKENS)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return write(tmp_path / "chat.kv", PROMPT, LAYOUTS["two groups, heads first"])


def test_inspect_says_what_the_header_says_and_reads_no_blocks(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    group = {"planes": 2, "shape": [4, 4, 64]}
    expected = {
        "file": str(saved), "bytes": saved.stat().st_size, "state": "as saved", "tokens": 48, "blocks": 12,
        "blocks_in_file": 12, "block_tokens": 4, "dtype": "bfloat16", "axes": ["tokens", "heads", "dim"],
        "groups": [group, group], "identity": GIVEN["identity"], "weights": "", "salted": True, "producer": "a test",
    }  # fmt: skip
    assert run_json(capsys, "session", "inspect", str(saved)) == expected
    with SessionFile(saved) as file:
        flip(saved, file.plan.place(3, 0))
    assert run_json(capsys, "session", "inspect", str(saved)) == expected
    assert main(["session", "inspect", str(saved)]) == 0
    said = capsys.readouterr().out
    assert f"{saved}\n" in said
    assert "state           'as saved'" in said


@pytest.mark.parametrize(("block", "state"), [(12, "damaged"), (7, "cut"), (0, "cut")])
def test_inspect_says_how_much_of_a_file_there_is(
    saved: Path, capsys: pytest.CaptureFixture[str], block: int, state: str
) -> None:
    with SessionFile(saved) as file:
        end = file.plan.seal_at if block == 12 else file.plan.place(block, 1)  # they lie group by group
    os.truncate(saved, end)
    fields = run_json(capsys, "session", "inspect", str(saved))
    assert (fields["state"], fields["blocks_in_file"], fields["tokens"]) == (state, block, 48)


def test_texts_of_strangers_do_not_command_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.kv", PROMPT, identity={"model": "\x1b[2J"}, weights="\x1b]0;", producer="\r\n\x07")
    assert main(["session", "inspect", str(path)]) == 0
    assert {each for each in capsys.readouterr().out if not each.isprintable()} == {"\n"}


def test_verify_finds_what_is_whole_damaged_cut_or_none(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, files = saved.read_bytes(), {}
    for name in ("block", "tokens", "seal", "cut", "longer", "none"):
        files[name] = saved.with_name(f"{name}.kv")
        files[name].write_bytes(content)
    with SessionFile(saved) as file:
        plan = file.plan
    for name, at in (("block", plan.place(7, 1)), ("tokens", plan.tokens_at), ("seal", plan.seal_at), ("none", 4000)):
        flip(files[name], at)
    os.truncate(files["cut"], plan.place(4, 1))
    files["longer"].write_bytes(content + b"\0")
    found = {
        saved: (12, None, 0), files["block"]: (7, "block 7 is damaged", 1),
        files["tokens"]: (0, "block 0 is damaged", 1),
        files["seal"]: (12, "its end is damaged", 1), files["cut"]: (4, "the file ends in block 4", 1),
    }  # fmt: skip
    for path, (whole, problem, code) in found.items():
        [fields] = run_json(capsys, "session", "verify", str(path), code=code)["files"]
        assert fields == {
            "file": str(path), "blocks": 12, "whole_blocks": whole, "whole_tokens": whole * TOKENS, "problem": problem
        }  # fmt: skip
    several = [str(saved), str(files["cut"])]
    assert main(["session", "verify", *several]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{saved}: as saved; the first 12 blocks of 12 are whole",
        f"{files['cut']}: the file ends in block 4; the first 4 blocks of 12 are whole",
    ]
    fields = run_json(capsys, "session", "verify", str(files["none"]), str(files["longer"]), *several, code=2)
    assert [each["blocks"] for each in fields["files"]] == [None, None, 12, 12]
    assert "its header is damaged" in fields["files"][0]["problem"]


def test_verify_shows_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[tuple[int, int]]()

    @contextmanager
    def progress(_output: Output, _what: str) -> Iterator[Advance]:
        yield lambda done, total: seen.append((done, total))

    monkeypatch.setattr(session_file, "SEGMENT_BYTES", 5 * 4096)
    monkeypatch.setattr(Output, "progress", progress)
    run_json(capsys, "session", "verify", str(write(tmp_path / "a.kv", PROMPT)))
    assert seen == [(5, 12), (10, 12), (12, 12)]


@pytest.mark.parametrize("action", ["inspect", "verify"])
def test_what_is_no_session_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("nothing")
    for path, why in ((text, "no session file"), (tmp_path / "missing", "No such file"), (tmp_path, "")):
        assert main(["session", action, str(path)]) == 2
        captured = capsys.readouterr()
        said = captured.out + captured.err
        assert str(path) in said
        assert why in said


def test_without_an_action_it_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["session"]) == 0
    assert "inspect" in (said := capsys.readouterr().out)
    assert "verify" in said
    assert "usage: kvoffload session verify FILE" in refused(capsys, "session", "verify")

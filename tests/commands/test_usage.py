"""What is refused before anything runs: one line of the sub-command's usage, and a message with option and value."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from benching import refused
from printed import Terminal

from kvoffload.commands import main
from kvoffload.replay.trace import require_readable
from kvoffload.terminal.console import WIDTH


def words(each: str | tuple[str, ...]) -> str:
    return each if isinstance(each, str) else " ".join(each)


# usage ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "command", "unknown"),
    [
        (("--juggle",), "kvoffload", "--juggle"),
        (("demo", "--juggle"), "kvoffload demo", "--juggle"),
        (("demo", "more"), "kvoffload demo", "more"),
    ],
    ids=words,
)
def test_what_is_not_known_is_refused_with_one_line_of_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], command: str, unknown: str
) -> None:
    usage, message = refused(capsys, *arguments).splitlines()
    assert usage.startswith(f"usage: {command} ")
    assert message == f"{command}: error: unrecognized arguments: {unknown}; `{command} --help` lists the options"


@pytest.mark.parametrize("arguments", [("juggle",), ("demo", "--model", "x")])
def test_usage_and_message_on_a_terminal_have_at_most_80_columns(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(arguments) == 2
    usage, *message = terminal.getvalue().splitlines()
    assert usage.startswith("usage: kvoffload ")
    assert len(message) > 1, "a message that is too long for a line"
    assert [line for line in message if len(line) > WIDTH] == []


# values ---------------------------------------------------------------------------------------------------------------

COUNTED = ("replay", "--workload", "agents", "--metadata-only", "--slots")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (("demo", "--slots"), "1,000"),
        (("demo", "--turns"), "1'000'000"),
        (COUNTED, "1,000"),
        (COUNTED, "1,024"),
        (COUNTED, "16,1,000"),
    ],
    ids=words,
)
def test_thousands_separators_are_refused_by_option_and_value(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], value: str
) -> None:
    message = refused(capsys, *arguments, value)
    assert f"argument {arguments[-1]}: must be " in message
    assert "without thousands separators" in message
    assert f"got {value!r}" in message


# files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [(), ("--slots", "4,8"), ("--metadata-only", "--in-flight", "2"), ("--metadata-only", "--plot", "hits.pdf")],
    ids=" ".join,
)
def test_a_missing_trace_is_named_before_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    path = tmp_path / "missing.jsonl"
    message = refused(capsys, "replay", str(path), *options)
    assert message == f"kvoffload: error: cannot read the trace {path}: No such file or directory\n"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "missing" / "file.json"
    message = refused(capsys, "tune", "--output", str(path), "--backend", "simulated")
    assert message.endswith(f"error: --output {path} cannot be written: No such file or directory\n")


def test_a_pipe_is_not_opened_to_see_whether_it_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    require_readable(path)  # would wait for a writer


@pytest.mark.parametrize("options", [("--metadata-only",), ("--model", "qwen2.5-0.5b", "--backend", "simulated")])
@pytest.mark.parametrize(
    ("content", "said"), [("", "has no requests"), ("\n \n", "has no requests"), ('{"hash_ids": []}\n' * 2, "2 req")]
)
def test_a_trace_without_blocks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], content: str, said: str
) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    message = refused(capsys, "replay", str(path), *options)
    assert str(path) in message
    assert said in message
    assert '{"hash_ids": [1, 2]}' in message

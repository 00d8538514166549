"""What is refused before anything runs: one line of the sub-command's usage, and a message with option and value."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from kvoffload.commands import main
from kvoffload.replay.trace import require_readable
from kvoffload.terminal.options import numbers
from kvoffload.terminal.tables import WIDTH


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that is refused prints to standard error; nothing else."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def words(each: str | tuple[str, ...]) -> str:
    return each if isinstance(each, str) else " ".join(each)


# usage ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "command", "unknown"),
    [
        (("--juggle",), "kvoffload", "--juggle"),
        (("demo", "--juggle"), "kvoffload demo", "--juggle"),
        (("demo", "more"), "kvoffload demo", "more"),
        (("bench", "transfer", "--juggle", "3"), "kvoffload bench transfer", "--juggle 3"),
        (("bench", "--juggle", "transfer"), "kvoffload bench", "--juggle"),
    ],
    ids=words,
)
def test_what_is_not_known_is_refused_with_one_line_of_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], command: str, unknown: str
) -> None:
    usage, message = refused(capsys, *arguments).splitlines()
    assert usage.startswith(f"usage: {command} ")
    assert message == f"{command}: error: unrecognized arguments: {unknown}; `{command} --help` lists the options"


@pytest.mark.parametrize(
    "arguments", [("juggle",), ("bench", "juggle"), ("demo", "--model", "x"), ("bench", "cache", "--policy", "x")]
)
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


def test_the_list_of_benchmarks_has_a_line_for_each_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    listed = capsys.readouterr().out.partition("benchmarks:\n")[2].partition("\n\n")[0].splitlines()
    names = [
        "transfer",
        "sweep",
        "field",
        "sharded",
        "interference",
        "parts",
        "interop",
        "vllm",
        "submit",
        "cache",
        "disk",
        "remote",
        "plot",
    ]
    assert [line.split()[0] for line in listed] == names


# values ---------------------------------------------------------------------------------------------------------------

COUNTED = ("replay", "--workload", "agents", "--metadata-only", "--slots")


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (("demo", "--slots"), "1,000"),
        (("bench", "cache", "--blocks"), "1'000'000"),
        (COUNTED, "1,000"),
        (COUNTED, "1,024"),
        (COUNTED, "16,1,000"),
        (("bench", "field", "--blocks"), "1,000"),
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


def test_a_comma_separates_numbers() -> None:
    assert numbers("4096,100,7") == [4096, 100, 7]


@pytest.mark.parametrize(
    ("bench", "value", "known"),
    [("transfer", "elsewhere", "folded, scattered, interleaved"), ("sweep", "interleaved", "folded, scattered")],
)
def test_a_name_of_planes_that_is_not_known_is_refused_with_those_that_are(
    capsys: pytest.CaptureFixture[str], bench: str, value: str, known: str
) -> None:
    message = refused(capsys, "bench", bench, "--planes", value)
    assert f"argument --planes: must be one of {known}, got {value!r}" in message


def test_the_help_of_scale_says_which_end_is_included(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--help"]) == 0
    assert "shrink blocks to X of their bytes, 0 < X <= 1" in capsys.readouterr().out


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


@pytest.mark.parametrize("command", [("bench", "submit", "--save"), ("tune", "--output")], ids=words)
def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    path = tmp_path / "missing" / "file.json"
    message = refused(capsys, *command, str(path), "--backend", "simulated")
    assert message.endswith(f"error: {command[-1]} {path} cannot be written: No such file or directory\n")


def test_parts_that_do_not_divide_the_planes_are_refused_by_option_and_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = refused(capsys, "bench", "parts", "--parts", "1,3", "--backend", "simulated")
    assert message.startswith("kvoffload: error: --parts 3 does not divide the 64 planes of llama-3.1-8b: ")


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


@pytest.mark.parametrize("options", [(), ("--output", "figures")])
def test_bench_plot_names_a_missing_file_and_what_writes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvoffload.terminal.figures.find_spec", lambda _: None)  # said second
    message = refused(capsys, "bench", "plot", "missing.json", *options)
    assert message.startswith("kvoffload: error: cannot read missing.json: No such file or directory; ")
    assert "`kvoffload bench field --save FILE` writes a result" in message
    assert list(tmp_path.iterdir()) == []

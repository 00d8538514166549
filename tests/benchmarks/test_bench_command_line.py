"""The command line of the benchmarks: streams, exit codes, and what is refused before anything runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benching import refused, run_json
from printed import Terminal

import kvoffload
from kvoffload.commands import main
from kvoffload.terminal.console import SIMULATED_NOTE, WIDTH

SMALL_OPTIONS = ("--model", "gpt-oss-20b", "--planes", "folded", "--blocks-per-slot", "2", "--blocks", "2")
SMALL_TRANSFER = ("bench", "transfer", *SMALL_OPTIONS, "--backend", "simulated")
SMALL_CACHE = ("bench", "cache", "--blocks", "1024", "--repeats", "1")
SWEEP = ("bench", "sweep", "--sizes", "4096", "--counts", "8", "--planes", "folded", "--backend", "simulated")
SIMULATED = ("--backend", "simulated")
PYTHON = (sys.executable, "-m", "kvoffload")
HUGE = "99999999999999999999999999"


def words(each: str | tuple[str, ...]) -> str:
    return each if isinstance(each, str) else " ".join(each)


# streams --------------------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_runs_simulated_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_driver() -> None:
        raise kvoffload.CapabilityError("no driver library here; install one")

    monkeypatch.setattr("kvoffload.driver.cuda.load", no_driver)
    assert main(SMALL_TRANSFER[:-2]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"kvoffload: no GPU to use (`kvoffload doctor` shows why): {SIMULATED_NOTE}\n"
    assert "times need a GPU" in captured.out
    assert not re.search(r"GB/s|gb_per_s|GPU clock", captured.out, re.IGNORECASE)
    assert main([*SMALL_TRANSFER[:-2], "--backend", "cuda"]) == 2
    assert "no driver library here; install one" in capsys.readouterr().err


def test_json_is_one_object_that_says_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, *SMALL_TRANSFER)
    assert fields["simulated"] is True
    assert not any(name.endswith("gb_per_s") for name in fields)


def test_no_escape_codes_and_no_progress_when_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL_TRANSFER) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert captured.err.count("\n") == 1, "the note about the simulated device"


@pytest.mark.parametrize("command", [SMALL_TRANSFER, SMALL_CACHE], ids=lambda each: each[1])
def test_without_rich_tables_are_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr("kvoffload.terminal.console.find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(command) == 0
    captured = capsys.readouterr()
    assert captured.out
    assert len(captured.err.splitlines()) <= 2
    assert all(len(line) <= 80 for line in captured.err.splitlines())


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (("bench", "cache", "--blocks", "2048", "--repeats", "1"), "caches"),
        (("bench", "parts", "--parts", "1", "--backend", "simulated"), "loads"),
    ],
    ids=words,
)
def test_whatever_may_take_seconds_shows_progress_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], what: str
) -> None:
    assert main(command) == 0
    assert what not in capsys.readouterr().err
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(command) == 0
    assert what in terminal.getvalue()
    assert "\x1b" not in capsys.readouterr().out


def test_figures_are_saved_although_stdout_is_full(tmp_path: Path) -> None:
    saved = tmp_path / "sweep.json"
    line = " ".join((*PYTHON, *SWEEP, "--save", str(saved), ">/dev/full"))
    assert subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, timeout=60, check=False).returncode == 3
    assert json.loads(saved.read_text())["wrong_rows"] == 0


# usage ----------------------------------------------------------------------------------------------------------------


def test_a_benchmark_that_is_not_known_is_exit_code_2_with_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert "usage: kvoffload" in refused(capsys, "bench", "juggle")


@pytest.mark.parametrize(
    ("arguments", "command", "unknown"),
    [
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


@pytest.mark.parametrize("arguments", [("bench", "juggle"), ("bench", "cache", "--policy", "x")], ids=words)
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
        "parts",
        "interop",
        "vllm",
        "submit",
        "cache",
        "pool",
        "growth",
        "disk",
        "remote",
        "fleet",
        "plot",
    ]
    assert [line.split()[0] for line in listed] == names


# values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bench", "option"),
    [
        *((bench, "--repeats") for bench in ("transfer", "sweep", "field", "parts", "submit", "cache")),
        ("transfer", "--blocks"),
        ("transfer", "--blocks-per-slot"),
        ("field", "--blocks"),
        ("field", "--transfers"),
        ("sweep", "--sizes"),
        ("sweep", "--counts"),
        ("parts", "--parts"),
        ("interop", "--blocks"),
        ("cache", "--blocks"),
        ("cache", "--keys"),
        ("disk", "--sizes"),
        ("disk", "--threads"),
        ("disk", "--nbytes"),
        ("disk", "--records"),
        ("disk", "--repeats"),
    ],
)
def test_a_number_without_measure_is_refused_by_its_option(
    capsys: pytest.CaptureFixture[str], bench: str, option: str
) -> None:
    assert f"argument {option}: must be at most" in refused(capsys, "bench", bench, option, HUGE)


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "sweep", "--sizes", "4294967264", "--counts", "4294967295"),
        ("bench", "transfer", "--blocks", "4294967295"),
        ("bench", "transfer", "--blocks-per-slot", "4294967295"),
        ("bench", "parts", "--blocks", "4294967295"),
    ],
    ids=words,
)
def test_the_largest_numbers_are_refused_with_a_message(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert "kvoffload: error: " in refused(capsys, *command, *SIMULATED)


@pytest.mark.parametrize(
    ("arguments", "value"), [(("cache", "--blocks"), "1'000'000"), (("field", "--blocks"), "1,000")]
)
def test_thousands_separators_are_refused_by_option_and_value(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], value: str
) -> None:
    message = refused(capsys, "bench", *arguments, value)
    assert f"argument {arguments[-1]}: must be " in message
    assert "without thousands separators" in message
    assert f"got {value!r}" in message


@pytest.mark.parametrize(
    ("bench", "value", "known"),
    [("transfer", "elsewhere", "folded, scattered, interleaved"), ("sweep", "interleaved", "folded, scattered")],
)
def test_a_name_of_planes_that_is_not_known_is_refused_with_those_that_are(
    capsys: pytest.CaptureFixture[str], bench: str, value: str, known: str
) -> None:
    message = refused(capsys, "bench", bench, "--planes", value)
    assert f"argument --planes: invalid choice: {value!r}" in message
    assert all(name in message.partition("choose from")[2] for name in known.split(", "))


# files ----------------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "missing" / "file.json"
    message = refused(capsys, "bench", "submit", "--save", str(path), *SIMULATED)
    assert message.endswith(f"error: --save {path} cannot be written: No such file or directory\n")


def test_parts_that_do_not_divide_the_planes_are_refused_by_option_and_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = refused(capsys, "bench", "parts", "--parts", "1,3", "--backend", "simulated")
    assert message.startswith("kvoffload: error: --parts 3 does not divide the 64 planes of llama-3.1-8b: ")


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

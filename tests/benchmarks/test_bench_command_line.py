"""The command line of the benchmarks: streams, exit codes, and what is refused before anything runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benching import refused
from printed import Terminal

import kvoffload
from kvoffload.commands import main
from kvoffload.terminal.console import SIMULATED_NOTE

SMALL_OPTIONS = ("--model", "gpt-oss-20b", "--planes", "folded", "--blocks-per-slot", "2", "--blocks", "2")
SMALL_TRANSFER = ("bench", "transfer", *SMALL_OPTIONS, "--backend", "simulated")
SWEEP = ("bench", "sweep", "--sizes", "4096", "--counts", "8", "--planes", "folded", "--backend", "simulated")
SIMULATED = ("--backend", "simulated")
PYTHON = (sys.executable, "-m", "kvoffload")


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


def test_the_list_of_benchmarks_has_a_line_for_each_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    listed = capsys.readouterr().out.partition("benchmarks:\n")[2].partition("\n\n")[0].splitlines()
    names = "transfer sweep field sharded parts interop vllm submit cache pool growth disk session remote fleet plot"
    assert [line.split()[0] for line in listed] == names.split()


# values ---------------------------------------------------------------------------------------------------------------


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

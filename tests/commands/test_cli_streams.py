"""Standard output that is closed, full or read by nothing; options with numbers that no machine can serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from printed import Terminal
from seeds import rest_long

from kvoffload.commands import main

DEMO = ("demo", "--turns", "2", "--conversations", "2", "--backend", "simulated")
DOCTOR = ("doctor", "--backend", "simulated")
SUCCESSFUL = [DOCTOR, (*DOCTOR, "--json"), ("replay", "--help")]
PYTHON = (sys.executable, "-m", "kvoffload")
by_words = pytest.mark.parametrize("command", SUCCESSFUL, ids=" ".join)


def run(command: tuple[str, ...], *, redirect: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, through a shell that redirects."""
    line = " ".join((*PYTHON, *command, redirect))
    return subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, text=True, timeout=60, check=False, **options)


@pytest.mark.parametrize("unbuffered", rest_long(["1", ""], 1))
@by_words
def test_a_full_device_is_exit_code_3_and_a_message(command: tuple[str, ...], unbuffered: str) -> None:
    done = run(command, redirect=">/dev/full", env=os.environ | {"PYTHONUNBUFFERED": unbuffered})
    assert done.returncode == 3
    assert done.stderr.endswith("kvoffload: error: cannot write to standard output: No space left on device\n")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@by_words
def test_a_closed_descriptor_is_exit_code_3_and_a_message(command: tuple[str, ...]) -> None:
    done = run(command, redirect=">&-")
    assert done.returncode == 3
    assert done.stderr.endswith("kvoffload: error: standard output is closed\n")
    assert "Traceback" not in done.stderr


@by_words
def test_a_reader_that_has_ended_ends_a_command_silently(command: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(command, stdout=writer)
    finally:
        os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.parametrize("redirect", [">/dev/full", ">&-", ">/dev/null"])
def test_bad_usage_is_exit_code_2_wherever_stdout_goes(redirect: str) -> None:
    done = run(("demo", "--turns", "0"), redirect=redirect)
    assert done.returncode == 2
    assert "must be at least 1, got 0" in done.stderr


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full"])
def test_without_standard_error_the_result_alone_is_printed(redirect: str) -> None:
    done = run((*DEMO, "--json"), redirect=redirect, stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert json.loads(done.stdout)["corrupt_blocks"] == 0


# numbers --------------------------------------------------------------------------------------------------------------

WORKLOAD = ("replay", "--workload", "agents", "--requests", "2")
WITH_BYTES = (*WORKLOAD, "--model", "llama-3.1-8b", "--scale", "0.01", "--backend", "simulated")


@pytest.mark.parametrize(
    "command",
    [
        (*WITH_BYTES, "--slots", "4294967295"),
        (*WITH_BYTES, "--slots", "4", "--blocks-per-hash", "4294967295"),
        ("demo", "--backend", "simulated", "--slots", "4294967295"),
        ("doctor", "--device", "4294967295", "--backend", "simulated"),
    ],
    ids=" ".join,
)
def test_the_largest_numbers_are_refused_with_a_message(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "kvoffload: error: " in captured.err


def test_a_memory_error_is_exit_code_2_and_says_what_to_change(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: object) -> None:
        raise MemoryError("Unable to allocate 745. GiB")

    monkeypatch.setattr("kvoffload.replay.report.hits_of_policies", short)
    assert main([*WORKLOAD, "--metadata-only"]) == 2
    assert "host memory is short: Unable to allocate 745. GiB; choose smaller numbers" in capsys.readouterr().err


# progress -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ((*WORKLOAD, "--metadata-only"), ("reading requests", "prefix, 4096 slots", "belady, 4096 slots")),
        (WITH_BYTES, ("reading requests", "pinning the pool", "requests")),
        (("doctor", "--backend", "simulated"), ("trying copy methods",)),
        (("tune", "--show", "--backend", "simulated"), ("trying copy methods",)),
        (("demo", "--turns", "1", "--backend", "simulated"), ("turns",)),
    ],
    ids=lambda each: " ".join(each[:2]),
)
def test_whatever_may_take_seconds_shows_progress_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], what: tuple[str, ...]
) -> None:
    assert main(command) == 0
    captured = capsys.readouterr()
    assert not any(name in captured.err for name in what)
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(command) == 0
    assert [name for name in what if name not in terminal.getvalue()] == []
    assert "\x1b" not in capsys.readouterr().out

"""Running the command line in this process, for its `--json`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from kvoffload.commands import main

Run = Callable[..., tuple[int, dict[str, Any], str]]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """What a command prints as JSON; it ends with `code`."""
    capsys.readouterr()
    assert main([*arguments, "--json"]) == code
    fields = json.loads(capsys.readouterr().out)
    assert isinstance(fields, dict)
    return fields


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that is refused prints to standard error; nothing else."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def running(*words: str) -> Callable[[pytest.CaptureFixture[str]], Run]:
    """A fixture that runs a command with `--json`: its exit code, fields, stderr."""

    def fixture(capsys: pytest.CaptureFixture[str]) -> Run:
        def run(*arguments: object) -> tuple[int, dict[str, Any], str]:
            capsys.readouterr()
            code = main([*words, *map(str, arguments), "--json"])
            captured = capsys.readouterr()
            return code, json.loads(captured.out) if captured.out else {}, captured.err

        return run

    return fixture


def times_in(value: Any, path: str = "") -> list[str]:
    """The paths of JSON fields whose values come from a clock."""
    if isinstance(value, dict):
        return [found for key, each in value.items() for found in times_in(each, f"{path}.{key}")]
    if isinstance(value, list):
        return [found for each in value for found in times_in(each, path)]
    clock = re.search(r"_us$|_s$|seconds$|gb_per_s|slowdown|ratio", path)
    return [path] if clock and isinstance(value, float | int) else []

"""What a command prints, checked: a verdict first, 80 columns, nothing twice, an example in its help."""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.commands.pool import tenant
from kvoffload.terminal.console import WIDTH
from kvoffload.terminal.options import not_negative, positive

SIMULATED = ("--backend", "simulated")
DOCUMENT = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
GPU: dict[str, Any] = {  # what describes a device, as a GPU has it
    "simulated": False,
    "device": "NVIDIA H200",
    "driver": "13.0",
    "bindings": "13.3",
    "link": "32.0 GT/s PCIe x16",
    "profile": "measured on 2026-11-20 on NVIDIA H200, driver 13.0, PCIe generation 5 x16, bindings 13.3",
    "not_run": {"CuPy": "cupy is not installed: pip install 'kvoffload[cupy]'"},
}
_NO_WHOLE_NUMBERS = (None, Path, float, positive, not_negative, tenant)  # types of options
_CONTINUED = r"\n(?! )|\n(?=  (?:ok|warn|fail) )"  # a line that begins with a space continues the one before it


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        return True


def check(text: str, verdict: str) -> str:
    """The text, if it begins with the verdict, fits 80 columns, and says nothing twice."""
    lines = text.splitlines()
    assert lines[0].startswith(verdict)
    assert [line for line in lines if len(line) > WIDTH] == []
    parts = [part.splitlines() for part in text.strip().split("\n\n")]
    tables = [part for part in parts if any(re.fullmatch("-+(  -+)+", line) for line in part)]
    told = [said for part in parts if part not in tables for said in re.split(_CONTINUED, "\n".join(part))]
    told += [part[0] for part in tables]
    assert [line for line in told if told.count(line) > 1] == []
    assert "SIMULATED" not in text
    return text


def check_help(text: str, example: str = "example: kvoffload ") -> None:
    """A help has lines of 80 columns and an example, and ends with the page that says more."""
    lines = text.splitlines()
    assert len(lines) <= 40
    assert [line for line in lines if re.search(r"\d,000\b", line)] == [], "numbers are written as options take them"
    assert [line for line in lines if len(line) > WIDTH] == []
    assert any(line.strip().startswith(example) for line in lines)
    assert lines[-1] == "more: docs/command-line.md"


def examples(text: str) -> list[list[str]]:
    """The command lines that a help gives as examples, in words."""
    return [each.split() for each in re.findall(r"(?:example: | {6,})kvoffload (.+)", text)]


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


def check_options(parser: argparse.ArgumentParser) -> None:
    """Every option is in the help of its command; those that take whole numbers refuse ones that are out of bounds."""
    shown = parser.format_help()
    for action in parser._actions:
        names = action.option_strings or [str(action.metavar)]
        if names != ["-h", "--help"]:
            assert re.search(rf"(?<![\w-]){re.escape(names[-1])}(?![\w-])", shown), names
        kind: Any = action.type
        for number in () if kind in _NO_WHOLE_NUMBERS else ("9" * 26, "-1"):
            with pytest.raises(argparse.ArgumentTypeError):
                kind(number)

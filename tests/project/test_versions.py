"""The tables of versions in docs/limits.md have what ran, and what ran has the versions that we promise."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from documents import ROOT
from versions import PACKAGES, note, numbers, rows_of, table_of, version_of, with_table

PAGE = (ROOT / "docs" / "limits.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RAN = table_of(PAGE, "ran")
EXTRAS = PROJECT["optional-dependencies"]


def minors(column: int, rows: list[list[str]] = RAN) -> set[tuple[int, ...]]:
    """The minor releases in a column, without "none"."""
    return {tuple(numbers([row[column]])[0][:2]) for row in rows} - {()}


def test_every_python_that_we_name_has_run() -> None:
    named = {(3, int(each.rpartition(".")[2])) for each in PROJECT["classifiers"] if "Python :: 3." in each}
    assert minors(0) == named
    oldest, newest = (".".join(map(str, each)) for each in (min(named), max(named)))
    assert f"Python {oldest} to {newest}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("column", "bound"),
    [
        ("numpy", PROJECT["dependencies"][0]),
        ("cuda-bindings", PROJECT["dependencies"][1]),
        ("Triton", EXTRAS["kernels"][0]),
        ("JAX", EXTRAS["jax"][0]),
    ],
)
def test_the_lowest_releases_that_we_take_have_run_and_newer_ones(column: str, bound: str) -> None:
    found = minors(1 + PACKAGES.index(column))
    assert bound.lower().startswith(column.lower())
    lowest = tuple(numbers([bound.partition(">=")[2]])[0][:2])
    assert min(found) == lowest
    assert max(found) > lowest, "the newest at that time"


def test_what_has_run_are_whole_suites_and_no_single_tests() -> None:
    assert min(int(row[-1].replace(",", "")) for row in RAN) > 100
    assert max(int(row[-1].replace(",", "")) for row in RAN) > 5000


def test_kernels_were_compiled_by_every_minor_release_of_triton() -> None:
    rows = table_of(PAGE, "triton")
    session = (ROOT / "noxfile.py").read_text() if (ROOT / "noxfile.py").exists() else None
    (listed,) = re.findall(r"^TRITONS = \((.+)\)", session, re.MULTILINE) if session is not None else [None]
    assert listed is None or [".".join(row[0].split(".")[:2]) for row in rows] == re.findall(r"[\d.]+", listed)
    assert minors(0, rows) >= minors(1 + PACKAGES.index("Triton"))
    assert rows == sorted(rows, key=lambda row: numbers(row[:1]))
    for version, *cells in rows:
        assert all(re.fullmatch(r"8\.\d|9\.\d, CUDA 12: 8\.\d", cell) for cell in cells), version


# the tools


def test_calls_of_the_same_versions_are_one_row(tmp_path: Path) -> None:
    for passed in (1000, 234):
        note(tmp_path / "ran", passed)
    lines = (tmp_path / "ran").read_text().splitlines()
    ours = [*json.loads(lines[0])[:-1]]
    assert ours[1] == version_of("numpy") != "none"
    older = json.dumps(["3.9.18", "2.10.0", "12.9.1", "none", "none", 7])
    newer = json.dumps(["3.9.18", "2.9.0", "12.9.1", "none", "none", 8])
    assert rows_of([older, *lines, newer]) == [
        ["3.9.18", "2.9.0", "12.9.1", "none", "none", "8"],
        ["3.9.18", "2.10.0", "12.9.1", "none", "none", "7"],
        [*ours, "1,234"],
    ]


@pytest.mark.long
@pytest.mark.parametrize(("test", "passed"), [("test_calls_are_counted", 1), ("no_such_test", None)])
def test_a_call_of_pytest_that_passes_notes_itself(tmp_path: Path, test: str, passed: int | None) -> None:
    file = tmp_path / "ran"
    chosen = [str(ROOT / "tests" / "project" / "test_call_counts.py"), "-k", test]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "", "-p", "no:cacheprovider", *chosen]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "KVOFFLOAD_RAN": str(file)}, capture_output=True, timeout=100)
    found = [json.loads(line)[-1] for line in file.read_text().splitlines()] if file.exists() else None
    assert found == (None if passed is None else [passed])


def test_a_table_is_written_in_the_place_of_the_former_one() -> None:
    page = "<!-- table: a -->\n| x | y |\n|---|---|\n| 1 | 2 |\n\ntext\n\n<!-- table: b -->\n| z |\n|---|\n"
    assert table_of(page, "a") == [["1", "2"]]
    assert table_of(page, "b") == []
    made = with_table(page, "b", [["8\\1"], ["9"]])
    assert table_of(made, "b") == [["8\\1"], ["9"]]
    assert with_table(made, "b", []) == page
    with pytest.raises(AssertionError, match="no table c"):
        table_of(page, "c")

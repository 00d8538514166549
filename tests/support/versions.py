"""Tables of versions in docs/limits.md, made by what ran.

KVOFFLOAD_RAN=FILE nox -s lowest          each call of pytest that passed appends a line to FILE
python tests/support/versions.py FILE     prints the table of these lines; with --write, it goes into the page
nox -s triton                             writes the row of each release of Triton, by `compile_kernels.py`
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
PACKAGES = ("numpy", "cuda-bindings", "Triton", "JAX")


def note(file: Path, passed: int) -> None:
    """Append what this process has run, as a line of JSON."""
    with file.open("a") as lines:
        lines.write(json.dumps([platform.python_version(), *map(version_of, PACKAGES), passed]) + "\n")


def version_of(package: str) -> str:
    try:
        return metadata.version(package.lower())
    except metadata.PackageNotFoundError:
        return "none"


def rows_of(lines: Iterable[str]) -> list[list[str]]:
    """A row for each combination of versions, with the number of tests that passed in all calls."""
    passed = Counter[tuple[str, ...]]()
    for line in lines:
        *versions, count = json.loads(line)
        passed[tuple(versions)] += count
    return [[*versions, f"{passed[versions]:,}"] for versions in sorted(passed, key=numbers)]


def numbers(versions: Iterable[str]) -> list[list[int]]:
    """By which versions are sorted: as numbers, not as texts."""
    return [list(map(int, re.findall(r"\d+", each))) for each in versions]


def table_of(page: str, name: str) -> list[list[str]]:
    """The rows below the comment that names a table, without its header."""
    rows = re.search(rf"<!-- table: {name} -->\n\|.*\n\|[-|]+\n((?:\|.*\n)*)", page)
    assert rows is not None, f"the page has no table {name}"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1].splitlines()]


def with_table(page: str, name: str, rows: list[list[str]]) -> str:
    """The page with other rows in this table."""
    made = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    pattern = rf"(<!-- table: {name} -->\n\|.*\n\|[-|]+\n)(?:\|.*\n)*"
    return re.sub(pattern, lambda found: found[1] + made, page)


if __name__ == "__main__":
    ran = rows_of(Path(sys.argv[1]).read_text().splitlines())
    print("\n".join(f"| {' | '.join(row)} |" for row in [["Python", *PACKAGES, "tests passed"], *ran]))
    if "--write" in sys.argv:
        PAGE.write_text(with_table(PAGE.read_text(), "ran", ran))

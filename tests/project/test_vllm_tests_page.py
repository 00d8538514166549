"""docs/vllm-tests.md has tables of the shape that `vllm_own_tests` prints, and their numbers agree."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_own_tests import counts_table, reason_of, reasons_table

PAGE = Path(__file__).parent.parent.parent / "docs" / "vllm-tests.md"


def _rows(header: list[str]) -> list[list[str]]:
    """The cells of the table of the page that begins so."""
    lines = PAGE.read_text().splitlines()
    start = lines.index(header[0])
    assert lines[start : start + 2] == header
    end = lines.index("", start)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2 : end]]


def test_the_totals_are_those_of_the_files() -> None:
    *files, total = _rows(counts_table({}, {})[:2])
    assert [total[0], *(file[0] for file in files)][:2] == ["Total", "cpu/test_manager.py"]
    for column in (1, 2):
        counts = [[int(number) for number in re.fullmatch(r"(\d+), (\d+), (\d+)", row[column]).groups()]  # type: ignore[union-attr]
                  for row in [*files, total]]  # fmt: skip
        assert counts[-1] == [sum(numbers) for numbers in zip(*counts[:-1], strict=True)]
    assert int(total[3]) == sum(int(row[3]) for row in files)


def test_every_test_that_does_not_pass_with_ours_has_a_reason() -> None:
    counted = {row[0]: int(row[2].split(", ")[1]) for row in _rows(counts_table({}, {})[:2])}
    total = counted.pop("Total")
    found = dict.fromkeys(counted, 0)
    for file, reason, names in _rows(reasons_table({}, {})[:2]):
        assert "Error" not in reason
        found[file] += sum(int(count or 1) for count in re.findall(r"`test_\w+`(?: \((\d+)\))?", names))
    assert (found, sum(found.values())) == (counted, total)


def test_tables_of_results() -> None:
    name = "tests/v1/kv_offload/cpu/test_a.py::Some::test_{}[1]"
    theirs = {name.format(each): {"outcome": "passed", "reason": "", "made": []} for each in "xyz"}
    failed = {"outcome": "failed", "reason": "AttributeError: 'Manager' object has no attribute '_policy'"}
    ours = {**theirs, name.format("y"): {**failed, "made": ["manager"]}}
    assert counts_table(theirs, ours)[2:] == [
        "| cpu/test_a.py | 3, 0, 0 | 2, 1, 0 | 1 |",
        "| Total | 3, 0, 0 | 2, 1, 0 | 1 |",
    ]
    assert reasons_table(theirs, ours)[2:] == ["| cpu/test_a.py | private: `_policy` | `test_y` |"]
    assert reason_of("assert 1 == 2\nmore") == "assert 1 == 2"

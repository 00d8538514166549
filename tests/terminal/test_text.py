"""Text and tables of at most 80 columns, broken between words only."""

from __future__ import annotations

import pytest

from kvoffload.terminal.console import WIDTH, Output, column_widths, mib, render, wrap

LINES = [
    ("a b c", "1", "2,000"),
    ("a long name of words that has to be broken in two or in three lines, since it is longer than a line", "10", "3"),
]


def test_a_table_that_fits_is_as_wide_as_its_cells() -> None:
    assert render(("name", "n"), [("one", 1), ("two, three", 23)], wide=False) == (
        "name         n\n----------  --\none          1\ntwo, three  23\n"
    )


def test_the_widest_column_is_broken_between_words() -> None:
    text = render(("what", "few", "many"), LINES, wide=False)
    assert max(map(len, text.splitlines())) == WIDTH
    words = {word for line in text.splitlines() for word in line.split()}
    assert {word for line in LINES for cell in line for word in cell.split()} <= words


def test_wide_breaks_nothing() -> None:
    assert LINES[1][0] in render(("what", "few", "many"), LINES, wide=True)


def test_no_column_is_narrower_than_its_longest_word() -> None:
    assert column_widths([["a" * 50, "b" * 50]], WIDTH) == [50, 50]
    assert column_widths([["a" * 30 + " a", "b" * 45]], 78) == [31, 45]


def test_headings_are_broken_before_cells() -> None:
    cells = [("GB/s", "a heading of some words"), ("48.2 (0.87)", "1")]
    assert column_widths(cells, len("48.2 (0.87)") + 2 + len("heading")) == [len("48.2 (0.87)"), len("heading")]


def test_named_columns_are_aligned_to_the_left() -> None:
    lines = [("one", 12, "gather 4", "store"), ("two", 1, "batch", "load")]
    assert render(("name", "n", "by", "to"), lines, wide=False, left=("by",)) == (
        "name   n  by           to\n----  --  --------  -----\none   12  gather 4  store\ntwo    1  batch      load\n"
    )


@pytest.mark.parametrize("lines", [[], [("", "")]])
def test_a_table_of_nothing_has_its_headings(lines: list[tuple[str, str]]) -> None:
    assert render(("what", "n"), lines, wide=False).startswith("what  n\n----  -\n")


def test_lines_are_broken_between_words_and_indented() -> None:
    path = "/" + "long-path/" * 12
    assert wrap(f"wrote {path} whole", "  ") == f"wrote\n  {path}\n  whole"
    assert wrap("one two-three", width=9) == "one\ntwo-three"


def test_with_json_there_is_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(as_json=True)
    output.line("text")
    output.path("path")
    output.table("title", ("what",), [("cell",)])
    assert capsys.readouterr().out == ""
    output.result({"value": 1})
    assert capsys.readouterr().out == '{"value": 1}\n'


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0.0 KiB"), (1536, "1.5 KiB"), (3 << 19, "1.50 MiB"), (5 << 30, "5.00 GiB")]
)
def test_bytes_as_text(nbytes: int, text: str) -> None:
    assert mib(nbytes) == text

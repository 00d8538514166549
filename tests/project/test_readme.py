"""The README's size and claims about files; what its snippets print. The rest is in `test_docs_*`."""

from __future__ import annotations

import re

import pytest
from documents import ROOT, snippets

README = (ROOT / "README.md").read_text()
SNIPPETS = {each.name: each for each in snippets() if each.document in ("README.md", "docs/cache.md")}


def run(name: str) -> None:
    exec(compile(SNIPPETS[name].code, name, "exec"), {"__name__": "__readme__"})


def test_it_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 130
    assert max(map(len, lines)) <= 120


def test_the_first_snippet_runs_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    first = next(each for each in snippets() if each.document == "README.md")
    assert first.mark == "run: cache"
    run("cache")
    assert capsys.readouterr().out.startswith("3 ")


def test_the_servers_request_runs_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    run("server")
    assert capsys.readouterr().out.startswith("6 BlockCache(6 of 16 keys")


def test_both_commands_are_there() -> None:
    for name in ("demo", "tests"):
        assert re.search(rf"<!-- command: {name} -->\n```\n.+\n```", README)


def test_every_example_is_named() -> None:
    for example in (ROOT / "examples").iterdir():
        if example.suffix in (".py", ".ipynb"):
            assert example.name in README


def test_figures_of_the_readme_stand_in_the_benchmarks() -> None:
    tables = (ROOT / "docs" / "benchmarks.md").read_text()
    assert "| 53 / 53 / 98 (1.02) |" in tables, "the block-major row, concurrent with large products"
    assert "| default, 106 cells | 1.99 in the median, at least 1.13 in all |" in tables
    assert "| expandable segments, 106 cells | 2.01 in the median, at least 1.11 in all |" in tables
    for capacity in ("512", "32,768"):
        assert f"| {capacity} | **" in tables, "hits of the default policy over those of LRU"

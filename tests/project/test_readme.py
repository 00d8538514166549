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
    tables = "".join(page.read_text() for page in (ROOT / "docs" / "benchmarks").glob("*.md"))
    assert "| 54 / 54 / 95 | 53 / 54 / 97 (1.02) | 53 / 54 / 98 (1.07) | 53 / 53 / 94 (1.15) |" in tables, "block-major"
    assert "| 53 / 51 / 97 | 51 / 53 / 92 (1.06) | 53 / 53 / 92 (1.13) | 52 / 53 / 92 (1.22) |" in tables, "plane-major"
    for both in ("17 / 69", "20 / 79", "37 / 330", "33 / 255", "608 / 5,251", "153 / 1,630", "1,732 / 8,802"):
        assert f"{both} |" in tables, "time to first token"
        assert f"{both} ms" in README
    assert "In the median of 107 cells 1.76, at least 1.04 in all" in tables
    for capacity in ("512", "16,384"):
        assert f"| {capacity} | **" in tables, "hits of the default policy over those of LRU"

"""Links of all documents lead to files and headings; every page is in the site, and so is what is at the root."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT, anchors, links, objects, title
from house import sources, tree

NAVIGATION = re.findall(r"^ +- (?:[\w ]+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
OF_THE_ROOT = {"index.md": "README.md", "guides/chat-server.md": "examples/chat_server/README.md"} | {
    f"{name.lower()}.md": f"{name}.md" for name in ("ARCHITECTURE", "GLOSSARY", "CONTRIBUTING", "CHANGELOG")
}
OF_MAINTAINERS = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/how/*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=title)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for target in links(document.read_text()):
        name, _, heading = target.partition("#")
        file = document.parent / name if name else document
        assert file.exists(), target
        if heading:
            text = file.read_text()
            shown = tuple(f"{each}" for each in objects(text))
            assert heading in anchors(text) or heading.startswith(shown or ("\0",)), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=title)
def test_links_stay_in_what_the_site_has(document: Path) -> None:
    """mkdocs cannot link to source files: they are named, not linked."""
    for target in links(document.read_text()):
        file = (document.parent / target.partition("#")[0]).resolve().relative_to(ROOT)
        assert file.parts[0] == "docs" or str(file) in OF_THE_ROOT.values() or file.parts[0] == document.name, target


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    assert sorted(NAVIGATION) == sorted(pages | OF_THE_ROOT.keys())


def test_the_architecture_is_a_map() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.encode()) <= 12_000, "a specification belongs to docs/how, or into the docstring of its module"
    changes = text.partition("## Where do I change")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| .* \| .*`.* \|$", changes, re.MULTILINE)) >= 25


@pytest.mark.parametrize("document", OF_MAINTAINERS, ids=title)
def test_files_that_are_named_are_there(document: Path) -> None:
    """As `engine/base.py`, within the package, or as `tests/support/interrupts.py`."""
    named = set(re.findall(r"`(?:python )?([\w/]+/\w+\.py)\b", document.read_text()))
    assert len(named) > 30 or document.name != "ARCHITECTURE.md"
    assert [name for name in named if not any((ROOT / folder / name).exists() for folder in ("", "kvoffload"))] == []


@cache
def classes_and_names() -> tuple[set[str], set[str]]:
    """Of the package: its classes; its functions and attributes."""
    nodes = [node for path in sources() for node in ast.walk(tree(path))]
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return {node.name for node in nodes if isinstance(node, ast.ClassDef)}, names


@pytest.mark.parametrize("document", OF_MAINTAINERS, ids=title)
def test_classes_that_are_named_have_what_is_named(document: Path) -> None:
    """As `Shard.check`, or `CacheState.enter`: the method, of this class or one below or above, is in the package."""
    classes, names = classes_and_names()
    named = re.findall(r"\b([A-Z][a-z]\w+)\.(_?[a-z]\w+)\b(?!\()", document.read_text())
    ours = [(name, of_it) for name, of_it in named if name != "Thread"]
    assert [(name, of_it) for name, of_it in ours if name not in classes or of_it not in names] == []


@pytest.mark.parametrize(
    ("title_line", "anchor"),
    [
        ("## What to allocate", "what-to-allocate"),
        ("### `order_before`, and when", "order_before-and-when"),
        ("## Where: concurrent, and both", "where-concurrent-and-both"),
    ],
)
def test_anchors_are_those_of_github(title_line: str, anchor: str) -> None:
    assert anchors(f"{title_line}\n```\n# not this\n```\n") == {anchor}


def test_links_in_code_are_none() -> None:
    assert links("[a](b.md#c) and [d](https://e)\n```\n[f](g)\n```\n[h]: i.md\n") == ["b.md#c", "i.md"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=title)
def test_everything_is_installed_from_a_clone(document: Path) -> None:
    """The name is not published. (Installed, pip adds 'kvoffload[valkey]' to it: so messages may say that.)"""
    assert not re.search(r"pip install '?kvoffload\[", document.read_text())

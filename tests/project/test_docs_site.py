"""The site: how links are rewritten for it, what becomes of docstrings, and that it needs no other host."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from documents import ROOT


def loaded(name: str) -> ModuleType:
    """A file of docs/, which is no package."""
    found = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("index.md", "[a](docs/limits.md#slow-cases)", "[a](limits.md#slow-cases)"),
        ("index.md", "![a](docs/field.png)", "![a](field.png)"),
        ("index.md", "[a](ARCHITECTURE.md)", "[a](architecture.md)"),
        ("architecture.md", "[a](docs/jax.md) [b](GLOSSARY.md)", "[a](jax.md) [b](glossary.md)"),
        ("guides/x.md", "[a](../../README.md#install)", "[a](../index.md#install)"),
        ("guides/x.md", "[a](../cache.md) [b](y.md)", "[a](../cache.md) [b](y.md)"),
        ("limits.md", "[a](../ARCHITECTURE.md#order)", "[a](architecture.md#order)"),
        ("limits.md", "[a](#slow-cases) [b](https://x/y.md)", "[a](#slow-cases) [b](https://x/y.md)"),
        ("limits.md", "```\n[a](../README.md)\n```\n", "```\n[a](../README.md)\n```\n"),
        ("limits.md", "[a](../examples/x.py)", "[a](../examples/x.py)"),
    ],
)
def test_links_are_right_in_the_site(page: str, text: str, expected: str) -> None:
    assert loaded("hooks").for_site(text, page) == expected


def test_entries_of_several_names_are_divided() -> None:
    pytest.importorskip("griffe")
    parsable = loaded("griffe_customs").parsable
    text = "Do.\n\nArgs:\n    a, b: both,\n        so.\n    c: one: more.\n\nReturns it.\n"
    assert parsable(text) == (
        "Do.\n\nArgs:\n    a: both,\n        so.\n    b: both,\n        so.\n    c: one: more.\n\nReturns it.\n"
    )


def test_sentences_of_raises_are_kept() -> None:
    pytest.importorskip("griffe")
    split = loaded("griffe_customs").parsable
    text = "Do.\n\nRaises:\n    ValueError: bad,\n        so.\n    Nothing has\n        changed in any case.\n"
    assert split(text) == "Do.\n\nRaises:\n    ValueError: bad,\n        so.\n\nNothing has changed in any case.\n"
    assert split("Raises:\n    ValueError: bad.\n") == "Raises:\n    ValueError: bad.\n"
    assert split("Raises:\n    As `store`.\n") == "Raises: As `store`.\n"


@pytest.mark.filterwarnings("default")
def test_the_site_is_built_and_needs_no_other_host(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    engine = (tmp_path / "reference" / "engine.html").read_text()
    assert 'id="kvoffload.OffloadEngine.store"' in engine
    assert 'id="kvoffload.OffloadEngine.check_room"' not in engine, "`dir()` does not show it"
    jax = (tmp_path / "reference" / "jax.html").read_text()
    assert 'id="kvoffload.jax.OwnedCache.unordered"' in jax, "its docstring is that of the base class"
    for page in pages:
        text = page.read_text()
        fetched = re.findall(r"<(?:script|img|iframe)[^>]*src=\"?(https?:[^\" >]+)", text)
        fetched += re.findall(r"<link[^>]*rel=\"?(?:stylesheet|preconnect|preload)[^>]*href=\"?(https?:[^\" >]+)", text)
        assert not fetched, page
    assert not [
        path for path in tmp_path.rglob("*.css") if re.search(r"(?:@import|url\()[^;]{0,8}http", path.read_text())
    ]

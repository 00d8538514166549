"""The snippets of the pages under docs/start, docs/how and docs/guides, docs/cache.md and docs/jax.md: each says
whether it runs, and those that run do so as they stand."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("start", "how", "guides")
DOCUMENTS = sorted([path for folder in FOLDERS for path in (ROOT / "docs" / folder).glob("*.md")])
DOCUMENTS += [ROOT / "docs" / "cache.md", ROOT / "docs" / "jax.md"]
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]+) -->\n)?^```python\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
ELSEWHERE = ("several devices",)  # `tests/jax/test_jax_sharded.py` runs it on simulated devices
NEEDED = {"jax": "jax", "cupy": "cupy", "metrics": "prometheus_client"}  # by the first word of a snippet's name


class Snippet(NamedTuple):
    """A block of Python on a page; `mark` is "fragment", "run: name" or "run: name gpu"."""

    page: str
    mark: str
    code: str

    @property
    def name(self) -> str:
        return self.mark.removeprefix("run: ").removesuffix(" gpu")

    @property
    def runs(self) -> bool:
        return self.mark.startswith("run: ") and self.name not in ELSEWHERE

    @property
    def on_gpu(self) -> bool:
        return self.mark.endswith(" gpu")


def snippets() -> list[Snippet]:
    return [
        Snippet(str(path.relative_to(ROOT)), found["mark"] or "", found["code"])
        for path in DOCUMENTS
        for found in BLOCK.finditer(path.read_text())
    ]


SNIPPETS = snippets()


def named(snippet: Snippet) -> str:
    return f"{snippet.page}: {snippet.name}"


def skip_without(snippet: Snippet) -> None:
    module = NEEDED.get(snippet.name.split(" ")[0])
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


@pytest.mark.parametrize("snippet", SNIPPETS, ids=named)
def test_each_snippet_is_marked_and_compiles(snippet: Snippet) -> None:
    assert snippet.mark == "fragment" or snippet.mark.startswith("run: "), snippet.code
    assert not snippet.on_gpu or re.search("^import (cupy|jax)", snippet.code, re.MULTILINE), "all others run anywhere"
    compile(snippet.code, snippet.page, "exec")


def test_names_are_used_once() -> None:
    names = [snippet.mark for snippet in SNIPPETS if snippet.mark.startswith("run: ")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("snippet", [each for each in SNIPPETS if each.runs and not each.on_gpu], ids=named)
def test_snippets_run_as_they_stand(snippet: Snippet) -> None:
    skip_without(snippet)
    exec(compile(snippet.code, snippet.page, "exec"), {"__name__": "__page__"})


@pytest.mark.gpu
@pytest.mark.parametrize("snippet", [each for each in SNIPPETS if each.on_gpu], ids=named)
@pytest.mark.usefixtures("only_gpu")
def test_snippets_run_on_a_gpu(snippet: Snippet) -> None:
    skip_without(snippet)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", snippet.code],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_short_and_have_a_heading(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert 40 <= len(lines) <= (125 if page.parent.name in FOLDERS else 160)
    prose = [line for line in lines if not line.startswith("|")]
    assert max(map(len, prose)) <= 140 or page.name in ("cache.md", "jax.md")

"""The documents of the project: their snippets, links and anchors, as GitHub reads them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/*/*.md"))]
_SNIPPET = re.compile(r"(?:^<!-- (?P<mark>[^\n]+) -->\n)?^```python\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_TARGET = re.compile(r"(?:\]\(|^\[[^\]]+\]: )(?!https?:)([^)\s]+)", re.MULTILINE)
_OBJECT = re.compile(r"^::: (\S+)$", re.MULTILINE)


class Snippet(NamedTuple):
    """A block of Python in a document.

    Attributes:
        document: relative to the root.
        mark: "run: name", "run: name gpu" or "fragment"; "" without one.
    """

    document: str
    mark: str
    code: str

    @property
    def name(self) -> str:
        return self.mark.removeprefix("run: ").removesuffix(" gpu")

    @property
    def runs(self) -> bool:
        return self.mark.startswith("run: ")

    @property
    def needs_gpu(self) -> bool:
        return self.mark.endswith(" gpu")

    def imports(self) -> set[str]:
        """The packages that it imports."""
        nodes = list(ast.walk(ast.parse(self.code)))
        modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        return {module.split(".")[0] for module in modules}


def title(path: Path) -> str:
    return str(path.relative_to(ROOT))


def snippets() -> list[Snippet]:
    """All blocks of Python in all documents."""
    return [
        Snippet(title(path), found["mark"] or "", found["code"])
        for path in DOCUMENTS
        for found in _SNIPPET.finditer(path.read_text())
    ]


def links(text: str) -> list[str]:
    """Targets of links and images that are no addresses of other hosts; none in code."""
    return _TARGET.findall(_FENCED.sub("", text))


def anchors(text: str) -> set[str]:
    """The anchors that GitHub and the site make of the headings."""
    titles = _HEADING.findall(_FENCED.sub("", text))
    return {re.sub(r"[^\w -]", "", each.lower()).strip().replace(" ", "-") for each in titles}


def objects(text: str) -> list[str]:
    """The names whose docstrings a page of the reference shows."""
    return _OBJECT.findall(text)

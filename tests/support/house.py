"""The package's source, read: its files, what they import and on which floor, and the words in them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import kvoffload

ROOT = Path(kvoffload.__file__).parent

# From the bottom up. A file imports from its own folder and from folders further up in this list. Folders of one line
# do not import each other.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("internal",),
    ("layout",),
    ("planning",),
    ("driver",),
    ("simulator",),
    ("device",),
    ("kernels",),
    ("tuning",),
    ("copiers",),
    ("engine",),
    ("sharded",),
    ("cache",),
    ("tiers",),
    ("tiering",),
    ("jax", "observability", "testing", "vllm"),
    ("__init__",),
    ("calibration", "terminal"),
    ("replay",),
    ("bench",),
    ("commands",),
    ("__main__",),
)
LOOSE_FILES = {"__init__", "__main__", "errors"}  # in no folder


class Import(NamedTuple):
    """An import statement.

    Attributes:
        path, line: where it stands.
        module: what it names, as far as that is a module.
        where: "top", "function" or "typing".
    """

    path: Path
    line: int
    module: str
    where: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT.parent)}:{self.line} imports {self.module} ({self.where})"


@cache
def sources() -> tuple[Path, ...]:
    """Every file of the package."""
    return tuple(sorted(ROOT.rglob("*.py")))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def folder_of(path: Path) -> str:
    """The folder of kvoffload that a file is in, or the name of a file that is in none."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def floor_of(folder: str) -> int:
    """The number of its line in FLOORS; -1 for a folder without a floor."""
    return next((number for number, line in enumerate(FLOORS) if folder in line), -1)


def file_of(module: str) -> Path | None:
    """The file of a module of the package; None for other packages and for what is no module."""
    names = module.split(".")
    if names[0] != ROOT.name:
        return None
    base = ROOT.joinpath(*names[1:])
    found = [path for path in (base / "__init__.py", base.with_suffix(".py")) if path.exists()]
    return found[0] if found else None


class _Imports(ast.NodeVisitor):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = "top"
        self.found: list[Import] = []

    def _inside(self, where: str, node: ast.AST) -> None:
        before, self.where = self.where, where
        self.generic_visit(node)
        self.where = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside("function", node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._inside("function", node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._inside("function", node)

    def visit_If(self, node: ast.If) -> None:
        typing = "TYPE_CHECKING" in ast.unparse(node.test)
        self._inside("typing" if typing else self.where, node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [Import(self.path, node.lineno, alias.name, self.where) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        assert node.level == 0, f"{self.path}:{node.lineno}: imports name their module in full"
        for alias in node.names:
            full = f"{module}.{alias.name}"
            target = full if file_of(full) is not None else module
            self.found.append(Import(self.path, node.lineno, target, self.where))


@cache
def imports() -> tuple[Import, ...]:
    """Every import statement of the package, wherever it stands."""
    found: list[Import] = []
    for path in sources():
        collector = _Imports(path)
        collector.visit(tree(path))
        found += collector.found
    return tuple(dict.fromkeys(found))


def circles(edges: dict[Path, set[Path]]) -> list[list[Path]]:
    """The strongly connected components of more than one file (Tarjan's algorithm)."""
    index: dict[Path, int] = {}
    low: dict[Path, int] = {}
    stack: list[Path] = []
    found: list[list[Path]] = []

    def visit(node: Path) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in edges[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for node in list(edges):
        if node not in index:
            visit(node)
    return found


def edges_between_files() -> dict[Path, set[Path]]:
    """Which files each file imports."""
    edges: dict[Path, set[Path]] = defaultdict(set)
    for each in imports():
        target = file_of(each.module)
        if target is not None and target != each.path:
            edges[each.path].add(target)
            edges[target] |= set()
    return edges


# words ----------------------------------------------------------------------------------------------------------------


class Word(NamedTuple):
    """A name or a text of the package: file, line, and the text itself."""

    path: Path
    line: int
    text: str


@cache
def identifiers() -> tuple[Word, ...]:
    """Names of modules, classes, functions, arguments, attributes, variables, as often as they are used."""
    return tuple(_identifiers())


def _identifiers() -> Iterator[Word]:
    for path in sources():
        for part in path.relative_to(ROOT).with_suffix("").parts:
            yield Word(path, 1, part)
        for node in ast.walk(tree(path)):
            line = getattr(node, "lineno", 1)
            for name in _names(node):
                yield Word(path, line, name)


def _names(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.keyword) and node.arg:
        return [node.arg]
    return []


@cache
def words_of(identifier: str) -> tuple[str, ...]:
    """`FlightDeck` and `flight_deck`: flight, deck."""
    return tuple(re.findall(r"[a-z]+|[0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower()))


@cache
def prose() -> tuple[Word, ...]:
    """Docstrings, comments, and the texts of messages."""
    return tuple(_prose())


def _prose() -> Iterator[Word]:
    for path in sources():
        text = path.read_text()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield Word(path, token.start[0], token.string)
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for offset, line in enumerate(node.value.splitlines()):
                    yield Word(path, node.lineno + offset, line)


def table_of(offenders: Iterable[Word]) -> str:
    """A line for each folder: how many, and the most frequent texts."""
    by_folder: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for word in offenders:
        by_folder[folder_of(word.path)][word.text] += 1
    lines = []
    for folder, counts in sorted(by_folder.items()):
        ranked = sorted(counts.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{text} {count}" for text, count in ranked[:12])
        lines.append(f"{folder:14} {sum(counts.values()):5}  {shown}")
    return "\n".join(lines)

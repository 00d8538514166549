"""The package's source, read: its files, what they import and on which floor."""

from __future__ import annotations

import ast
from collections import defaultdict
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
    ("cache",),
    ("pool", "tiers"),
    ("session",),
    ("door",),
    ("jax", "observability", "testing", "vllm"),
    ("__init__",),
    ("calibration", "terminal"),
    ("replay",),
    ("commands",),
    ("__main__",),
)
LOOSE_FILES = {"__init__", "__main__", "door", "errors"}  # in no folder


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

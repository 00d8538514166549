"""Mistakes that can be made in a source file, one at a time, and a drawing of some of them by a seed.

Left alone are docstrings, messages of errors and logs, assertions, annotations and `__repr__`: no behaviour follows
from them. So are numbers of seconds, which no test may judge.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple


class Area(NamedTuple):
    """Files of the package, as patterns, and the folders of the tests that look at them, the first ones first."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


_SESSIONS = ("cache", "tiering", "vllm")
AREAS: Mapping[str, Area] = {
    "pool": Area(("pool/*.py",), ("pool", "door", "observability", "chaos")),
    "sessions": Area(("cache/sessions.py", "cache/policies/promised.py", "vllm/hints.py"), _SESSIONS),
    "door": Area(("door.py",), ("door",)),
    "pack": Area(("copiers/pack*.py",), ("copiers", "kernels", "engine")),
    "coding": Area(("layout/coding.py", "kernels/coding.py"), ("layout", "kernels", "engine", "cache")),
    "growth": Area(("device/growth.py",), ("cache", "engine", "device")),
    "tiering": Area(("cache/tiering/*.py",), ("tiering", "cache", "door", "tiers")),
}
_LOOSER = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_OPPOSITE = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn}
_COMPARED = _LOOSER | _OPPOSITE | {ast.NotIn: ast.In}
_SILENT = frozenset({"__repr__", "__str__", "__dir__", "_html_options"})
_MESSAGES = frozenset({"warn", "debug", "info", "warning", "error", "exception", "log"})
_LARGEST = 8  # of the constants that are changed: larger ones are limits and sizes, one more of which is as good
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


class Mistake(NamedTuple):
    """A text of a file in place of another.

    Attributes:
        file: of the package.
        function: its qualified name; "" for a module's own lines.
        operator: the kind of mistake.
        first, last: lines of the text, from 1.
        begin, end: of the text: offsets in bytes.
        old, new: the text, normalized, and what stands in its place.
        number: which place of this operator in the function, from 1.
    """

    file: str
    function: str
    operator: str
    first: int
    last: int
    begin: int
    end: int
    old: str
    new: str
    number: int = 1

    @property
    def name(self) -> str:
        """The same wherever else the file changes: it can be made again in later code."""
        return "\t".join((self.file, self.function or "-", self.operator, str(self.number)))

    def applied(self, text: bytes) -> bytes:
        """The file with the mistake in it."""
        return text[: self.begin] + self.new.encode() + text[self.end :]

    def __str__(self) -> str:
        return f"{self.file}:{self.first} {self.function or '(module)'}: {self.operator}: {self.old} -> {self.new}"


def everything(package: Path, areas: Collection[str] = AREAS) -> dict[str, list[Mistake]]:
    """All mistakes that can be made in these areas, by area."""
    return {
        name: [
            mistake
            for pattern in area.files
            for path in sorted(package.glob(pattern))
            for mistake in mistakes(path.read_bytes(), str(path.relative_to(package)))
        ]
        for name, area in AREAS.items()
        if name in areas
    }


def draw(found: Mapping[str, Sequence[Mistake]], number: int, seed: int) -> list[Mistake]:
    """One of each area in turn, in the order of a hash of their names and the seed."""

    def place(each: Mistake) -> bytes:
        return hashlib.sha256(f"{seed} {each.name}".encode()).digest()

    rounds = zip_longest(*(sorted(each, key=place) for each in found.values()))
    return [each for each in chain.from_iterable(rounds) if each is not None][:number]


def mistakes(text: bytes, file: str) -> list[Mistake]:
    """All that can be made in a file; without those that the compiler does not see."""
    tree = ast.parse(text)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: Counter[tuple[str, ...]] = Counter()
    found = []
    for function, operator, node, new in _proposals(tree, ()):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        lines = node.lineno, node.end_lineno or node.lineno
        seen[*function, operator] += 1
        number = seen[*function, operator]
        found.append(Mistake(file, ".".join(function), operator, *lines, begin, end, ast.unparse(node), new, number))
    return found


_Proposal = tuple[tuple[str, ...], str, ast.expr | ast.stmt, str]


def _proposals(node: ast.AST, function: tuple[str, ...]) -> Iterator[_Proposal]:
    for child in _children(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if child.name in _SILENT:
                continue
            inner = (*function, child.name)
        elif isinstance(child, ast.expr):
            yield from ((function, operator, child, f"({new})") for operator, new in _of_expression(child))
        elif isinstance(child, ast.stmt):
            yield from ((function, operator, child, new) for operator, new in _of_statement(child, function))
        yield from _conditions(child, function)
        yield from _proposals(child, inner)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """What of a node is run, and does more than tell."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or _tells(node):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of `zip`, which asserts what holds
        return
    typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    for name, value in ast.iter_fields(node):
        left_out = name in ("annotation", "returns", "decorator_list", "bases") or (typing_only and name == "body")
        if not left_out:
            yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST))


def _tells(node: ast.AST) -> bool:
    """A docstring, a call of a logger, or of `warnings`."""
    if not isinstance(node, ast.Expr):
        return False
    call = node.value
    logs = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _MESSAGES
    return logs or isinstance(call, ast.Constant)


def _of_expression(node: ast.expr) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        left, right = ast.unparse(node.left), node.comparators
        other = ast.Compare(node.left, [_COMPARED[type(node.ops[0])](), *node.ops[1:]], right)
        yield "another comparison", ast.unparse(other)
        if type(node.ops[0]) in _LOOSER and len(right) == 1:  # the other comparison moves it the other way
            sign = ast.unparse(ast.Compare(ast.Constant(0), node.ops, [ast.Constant(0)]))[1:-1]
            step = "+ 1" if isinstance(node.ops[0], ast.LtE | ast.Gt) else "- 1"
            yield "another boundary", f"{left}{sign}({ast.unparse(right[0])}) {step}"
    elif isinstance(node, ast.BoolOp):
        other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and for or", ast.unparse(ast.BoolOp(other_op, node.values))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value <= _LARGEST:
        new = not node.value if isinstance(node.value, bool) else node.value + 1
        yield "another constant", ast.unparse(ast.Constant(new))
    elif isinstance(node, ast.IfExp):
        yield "the first of two values", ast.unparse(node.body)
        yield "the second of two values", ast.unparse(node.orelse)
    elif isinstance(node, _COMPREHENSIONS) and any(each.ifs for each in node.generators):
        copy = ast.parse(ast.unparse(node), mode="eval").body
        assert isinstance(copy, _COMPREHENSIONS)
        for generator in copy.generators:
            generator.ifs = []
        yield "no filter", ast.unparse(copy)


def _of_statement(node: ast.stmt, function: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Left out are statements without which a name would have no value: any test would notice."""
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _tells(node)
    targets = node.targets if isinstance(node, ast.Assign) else []
    stored = any(isinstance(each, ast.Attribute | ast.Subscript) for each in targets) and "__init__" not in function
    if function and (called or stored or isinstance(node, ast.AugAssign | ast.Break | ast.Continue | ast.Delete)):
        yield "a statement left out", "pass"
    elif isinstance(node, ast.Return) and node.value is not None:
        value = ast.unparse(node.value)
        truth = isinstance(node.value, ast.Compare | ast.BoolOp | ast.UnaryOp)
        if not isinstance(node.value, ast.Constant):  # a constant is changed as such
            yield "another result", f"return not ({value})" if truth else "return None"


def _conditions(node: ast.AST, function: tuple[str, ...]) -> Iterator[_Proposal]:
    """What decides an `if` or a `while`. No `while` without an end: it would only cost time."""
    if not isinstance(node, ast.If | ast.While) or ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield function, "the opposite condition", node.test, f"(not ({ast.unparse(node.test)}))"
    yield function, "never", node.test, "False"
    if isinstance(node, ast.If):
        yield function, "always", node.test, "True"

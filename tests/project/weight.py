"""How much there is to hold: code lines, files, helpers used once, classes cut into pages, wide signatures."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

BLANK = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
PRESCRIBED = ("simulator", "kernels", "driver", "vllm")  # whose signatures the driver, Triton and vLLM say
LONG = 40  # lines, of a base class
Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(text: str, nodes: Sequence[ast.AST] | None = None) -> int:
    """Lines without blank ones, comments and docstrings. `nodes` are those of the text, if they are known."""
    nodes = nodes or list(ast.walk(ast.parse(text)))
    docstrings, others = set[int](), set[int]()
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        elif isinstance(node, ast.Constant | ast.JoinedStr):
            others |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    stripped = enumerate(map(str.lstrip, text.splitlines()), 1)
    lines = {number for number, line in stripped if line and not line.startswith("#")}
    if not others - docstrings <= lines:  # some look blank, or like comments, in a string or between its pieces
        lines = {
            line
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type not in BLANK
            for line in range(token.start[0], token.end[0] + 1)
        }
    return len(lines - docstrings)


def is_wide(function: Function) -> bool:
    """More than 12 parameters, or more than 8 that can be given by position."""
    positional = [*function.args.posonlyargs, *function.args.args]
    owner = bool(positional) and positional[0].arg in ("self", "cls")
    return len(positional) - owner > 8 or len(positional) + len(function.args.kwonlyargs) - owner > 12


def weigh(package: Path) -> dict[str, float]:
    """The figures of a package, by their names in `tests/project/test_ratchet.py`."""
    texts = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    nodes_of = {path: list(ast.walk(ast.parse(text))) for path, text in texts.items()}
    nodes = [(path, node) for path, found in nodes_of.items() for node in found]
    functions = [(path, node) for path, node in nodes if isinstance(node, Function)]
    classes = [node for _, node in nodes if isinstance(node, ast.ClassDef)]
    named = Counter(name for text in texts.values() for name in re.findall(r"\b_[a-z]\w*", text))
    private = Counter(node.name for _, node in functions if node.name.startswith("_") and node.name[1] != "_")
    lengths = {node.name: (node.end_lineno or 0) - node.lineno for node in classes}
    wide = [node for path, node in functions if is_wide(node) and not set(PRESCRIBED) & set(path.parts)]
    once = [name for name, count in private.items() if count == 1 and named[name] == 2]
    return {
        "code lines": sum(code_lines(text, nodes_of[path]) for path, text in texts.items()),
        "files": len(texts),
        "helpers used once, in 1000 functions": 1000 * len(once) / len(functions),
        "pages": len(
            [name for name, count in Counter(bases(classes)).items() if count == 1 and lengths.get(name, 0) > LONG]
        ),
        "wide signatures": len(wide),
    }


def bases(classes: Sequence[ast.ClassDef]) -> list[str]:
    """The names of the base classes of all of them."""
    given = [base.value if isinstance(base, ast.Subscript) else base for each in classes for base in each.bases]
    return [
        base.attr if isinstance(base, ast.Attribute) else base.id
        for base in given
        if isinstance(base, ast.Name | ast.Attribute)
    ]


if __name__ == "__main__":
    for name, figure in weigh(Path(__file__).parents[2] / "kvoffload").items():
        print(f"{name:40} {figure:.0f}")

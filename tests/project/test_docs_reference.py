"""The reference has every public name, and the page on the environment every variable that the library reads."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import ROOT, objects

import kvoffload

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
SHOWN = [name for page in PAGES for name in objects(page.read_text())]
PUBLIC = (
    "kvoffload",
    "kvoffload.jax",
    "kvoffload.testing",
    "kvoffload.cache.policies",
    "kvoffload.tiers",
    "kvoffload.tiering",
)
OWN = {  # modules without `__all__`
    "kvoffload.observability.prometheus": ("CacheCollector", "register"),
    "kvoffload.observability.router_events": ("Batch", "RouterEvents"),
}


def public_names(module: str) -> list[str]:
    """`__all__` of a module, read and not imported: JAX may be missing."""
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    for node in ast.parse(Path(found.origin).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise AssertionError(f"{module} has no __all__")


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_shown(module: str) -> None:
    missing = {f"{module}.{name}" for name in public_names(module)} - set(SHOWN)
    assert not missing, f"add a line `::: name` to a page of docs/reference for each of {sorted(missing)}"


@pytest.mark.parametrize("module", OWN)
def test_names_of_modules_without_a_list_are_shown(module: str) -> None:
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert set(OWN[module]) <= defined
    assert {f"{module}.{name}" for name in OWN[module]} <= set(SHOWN)


def test_what_is_shown_is_public_and_shown_once() -> None:
    names = {f"{module}.{name}" for module in PUBLIC for name in public_names(module)}
    names |= {f"{module}.{name}" for module, own in OWN.items() for name in own}
    assert sorted(SHOWN) == sorted(set(SHOWN))
    assert set(SHOWN) <= names


# the environment ------------------------------------------------------------------------------------------------------


def variables(tree: ast.Module) -> Iterator[str]:
    """Names given to `os.environ` and `os.getenv`: literals, or what a name in the same file stands for."""
    constants = {
        node.targets[0].id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            key: ast.expr = node.slice
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("os.environ.", "os.getenv")):
            key = node.args[0]
        else:
            continue
        yield str(key.value) if isinstance(key, ast.Constant) else constants[ast.unparse(key)]


def test_every_variable_is_documented() -> None:
    folder = Path(kvoffload.__file__).parent
    read = {name for path in folder.rglob("*.py") for name in variables(ast.parse(path.read_text()))}
    assert "KVOFFLOAD_CACHE" in read
    page = (ROOT / "docs" / "environment.md").read_text()
    assert not {name for name in read if f"| `{name}` |" not in page}


def test_variables_are_found() -> None:
    text = "import os\nA = 'X'\nos.environ.get(A)\nos.environ['Y'] = '1'\nos.getenv('Z')\nos.environ.pop('W')\n"
    assert set(variables(ast.parse(text))) == {"W", "X", "Y", "Z"}

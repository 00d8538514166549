"""The reference has every public name, and the page on the environment every variable that the library reads."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from documents import ROOT, objects

import kvoffload

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
SHOWN = [name for page in PAGES for name in objects(page.read_text())]
PUBLIC = (
    "kvoffload",
    "kvoffload.pool",
    "kvoffload.jax",
    "kvoffload.testing",
    "kvoffload.cache.policies",
    "kvoffload.session",
    "kvoffload.tiers",
    "kvoffload.cache.tiering",
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

PAGE = (ROOT / "docs" / "environment.md").read_text()
OURS = re.compile(r"KVOFFLOAD_[A-Z_]+")


def variables(text: str) -> set[str]:
    """What a file may read: if it looks at the environment at all, its strings that look like a variable's name; ours
    in any case. So it does not matter how a name reaches `os.environ`: by a constant, or a function's argument.
    """
    pattern = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+") if re.search(r"environ\b|getenv", text) else OURS
    tree = ast.parse(text if pattern.search(text) else "")
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {each for each in strings if pattern.fullmatch(each)}


def read_in(folder: Path) -> set[str]:
    return {name for path in folder.rglob("*.py") for name in variables(path.read_text())}


def test_every_variable_is_documented() -> None:
    read = read_in(Path(kvoffload.__file__).parent) | read_in(ROOT / "benchmarks")
    assert {"KVOFFLOAD_CACHE", "KVOFFLOAD_VLLM_UNTESTED", "TRITON_CACHE_DIR"} <= read
    assert {name for name in read if f"| `{name}` |" not in PAGE} == set()


def test_our_variables_on_the_page_are_those_that_the_code_reads() -> None:
    """The package's in the first table, those of the tests in the last."""
    first, _, last = PAGE.partition("## In the tests")
    in_package, in_tests = read_in(Path(kvoffload.__file__).parent), read_in(ROOT / "tests")
    assert set(OURS.findall(first)) == {name for name in in_package if OURS.fullmatch(name)}
    assert set(OURS.findall(last)) == {name for name in in_tests - in_package if OURS.fullmatch(name)}


def test_variables_are_found() -> None:
    text = "import os\nA = 'X_A'\nos.environ.get(A)\nos.environ['Y_1'] = '1'\ndef f(v=os.environ): v.get('W_W')"
    assert variables(text) == {"X_A", "Y_1", "W_W"}
    assert variables("os.getenv('Z_Z')") == {"Z_Z"}
    assert variables("A = 'X_A'; B = 'KVOFFLOAD_CACHE'") == {"KVOFFLOAD_CACHE"}


# the limits -----------------------------------------------------------------------------------------------------------


def test_limits_deny_nothing_that_the_package_has() -> None:
    """What another page explains how to do is linked there, and no list of what is missing names it."""
    page = (ROOT / "docs" / "limits.md").read_text()
    for guide in ("share-a-store", "tiers-below-ranks", "vllm", "add-a-disk"):
        assert f"](guides/{guide}.md)" in page
    denied = " ".join(re.findall(r"\b(?:no|none|not)\b[^.;|]*", page)).lower()
    assert not set(re.findall(r"[a-z]+", denied)) & {"vllm", "mooncake", "valkey", "plug", "network", "pool"}

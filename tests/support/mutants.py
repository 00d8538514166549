"""Run pytest with a mistake in the package.

    python mutants.py MODULE LINE COLUMN PYTEST_ARGUMENT...     one wait less
    python mutants.py --mutation NAME PYTEST_ARGUMENT...        a mistake of `mutations.py`

The call at MODULE LINE COLUMN becomes `None`, its arguments unevaluated. MODULE `-` removes nothing, under the same
hook. `run_mutant` does the same in a process that is forked from one in which other people's packages are imported:
importing them takes longer than most tests that notice a mistake.
"""

from __future__ import annotations

import ast
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from mutations import BY_NAME, Mutation

PACKAGE = Path(__file__).resolve().parent.parent.parent / "kvoffload"
NOT_MUTATED = {PACKAGE / name for name in ("driver", "simulator", "calibration", "commands", "replay", "terminal")}
WAITS = frozenset({"stream_wait_event", "wait_for_transfer", "wait_for_part", "wait_for"})


class Site(NamedTuple):
    """A call in the product."""

    module: str
    line: int
    column: int
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}:{self.name}"


def wait_sites() -> list[Site]:
    """Every call that makes a stream wait, outside the driver seam and the commands, which order no user's bytes."""
    sites = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if NOT_MUTATED & set(path.parents):
            continue
        text = path.read_text()
        if any(wait in text for wait in WAITS):
            module = ".".join(("kvoffload", *path.relative_to(PACKAGE).with_suffix("").parts))
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            sites += [
                Site(module, call.lineno, call.col_offset, call.func.attr)
                for call in calls
                if isinstance(call.func, ast.Attribute) and call.func.attr in WAITS
            ]
    return sorted(sites)


class _Remove(ast.NodeTransformer):
    def __init__(self, line: int, column: int) -> None:
        self._place = (line, column)
        self.removed = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if (node.lineno, node.col_offset) != self._place or not isinstance(node.func, ast.Attribute):
            return node
        if node.func.attr not in WAITS:
            return node
        self.removed += 1
        return ast.copy_location(ast.Constant(None), node)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the module concerned from its source, with the mistake in it; its code is not cached."""

    place: tuple[str, int, int] = ("-", 0, 0)
    mutation: Mutation | None = None

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        path = Path(self.get_filename(fullname))
        module, line, column = self.place
        concerned = self.mutation is not None and path == PACKAGE / self.mutation.file
        if not concerned and fullname != module:
            return super().get_code(fullname)
        text = path.read_text()
        if concerned:
            assert self.mutation is not None
            text = mutated(self.mutation, text)
        tree = ast.parse(text)
        if fullname == module:
            remover = _Remove(line, column)
            tree = ast.fix_missing_locations(remover.visit(tree))
            assert remover.removed == 1, f"no single wait at {self.place}"
        return compile(tree, str(path), "exec", dont_inherit=True)


def mutated(mutation: Mutation, text: str) -> str:
    """The file's text with the mistake in it.

    Raises:
        AssertionError: the text to replace is not there, or more than once.
    """
    count = text.count(mutation.old)
    assert count == 1, f"{mutation.name}: {mutation.file} has {count} times: {mutation.old!r}"
    return text.replace(mutation.old, mutation.new)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != PACKAGE.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(
            fullname, [str(PACKAGE.parent)] if path is None else path, target
        )
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return spec
        spec.loader = _Loader(fullname, spec.loader.path)
        return spec


# What the tests of mutants import, apart from the package and the tests: no mutation changes it.
_PRELOADED = [
    *("cuda.bindings.driver", "hypothesis.stateful", "hypothesis.strategies", "numpy", "platformdirs", "pytest"),
    *("_hypothesis_pytestplugin", "pytest_timeout", "xdist.plugin", "triton.language", "triton.runtime.interpreter"),
    *("concurrent.futures", "execnet", "faulthandler", "http.server", "multiprocessing.shared_memory", "pdb", "runpy"),
    *("numpy.ma", "numpy.random", "platformdirs.unix", "readline", "secrets", "ssl", "tomllib", "urllib.request"),
    *("xdist.newhooks", "_pytest.tracemalloc"),
]


class Run(NamedTuple):
    """What came of running pytest: its exit code, negative for the signal that killed it; and all that it printed."""

    returncode: int
    output: str


def run_mutant(arguments: Sequence[str], environment: Mapping[str, str], output: Path, seconds: float = 100) -> Run:
    """As `python mutants.py ARGUMENT...`, with `environment` added and no variable of the running pytest's.

    Args:
        output: a file to write what is printed to.
        seconds: after which the process is killed.
    """
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(_PRELOADED)
    process = forks.Process(target=_in_child, args=(list(arguments), dict(environment), str(output)))
    process.start()
    process.join(seconds)
    process.kill()  # nothing, where it has ended
    process.join()
    code, text = process.exitcode, output.read_text()
    process.close()
    return Run(-1 if code is None else code, text)


def _in_child(arguments: list[str], environment: dict[str, str], output: str) -> None:
    with open(output, "wb", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    code = 70  # none of pytest's
    try:
        for name in [name for name in os.environ if name.startswith(("PYTEST_", "COV_"))]:
            del os.environ[name]
        os.environ.update(environment)
        sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ  # the running pytest's flags are handed on
        gc.freeze()  # what was imported is no garbage
        os.chdir(PACKAGE.parent)
        sys.path.insert(0, str(PACKAGE.parent))
        imported = [name for name in sys.modules if name.split(".")[0] == PACKAGE.name]
        assert not imported, f"imported before it could be mutated: {imported}"
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(arguments: list[str]) -> int:
    if arguments[0] == "--mutation":
        _Loader.mutation, rest = BY_NAME[arguments[1]], arguments[2:]
    else:
        module, line, column, *rest = arguments
        _Loader.place = (module, int(line), int(column))
    sys.meta_path.insert(0, _Finder())
    return int(pytest.main(rest, plugins=[_OneCollection()]))


class _OneCollection:
    """pytest ends with ten garbage collections, a fifth of a short run; the first of them finds what there is."""

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        gc.collect()
        gc.freeze()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

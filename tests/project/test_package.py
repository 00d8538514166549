"""The rules of the house, held by walking the source; what importing costs; what is public."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typing_calls

import kvoffload
from kvoffload import testing

ROOT = Path(kvoffload.__file__).parent

# From the bottom up. A module imports from lower rows only, at its top level; its own package counts as one module.
LAYERS = (
    {"checks", "errors", "metrics", "policies", "teardown", "hostinfo", "models"},
    {"layout", "cachefiles"},
    {"plan", "arena", "admission", "entries", "journal", "keys", "prometheus"},
    {"jobs", "hazards", "parts"},
    {"driver", "tuning", "reservations", "html"},
    {"memory", "ownership", "streams", "kernels", "choice", "report"},
    {"cache_jobs", "cacheindex", "copiers", "wait_streams", "buffers", "patterns"},
    {"requests", "interop"},
    {"books"},
    {"launch"},
    {"device", "flight"},
    {"ordering", "compute"},
    {"dispatch", "callers"},
    {"engine"},
    {"cache", "tuner", "jax"},
    {"testing", "__init__"},
    {"cli"},
    {"__main__"},
)
# A layout's reprs and its constructors from arrays reach up, when they are called.
LAZY_UPWARD = {("layout", "plan"), ("layout", "interop"), ("layout", "html")}

LAZY_ONLY = {"cuda", "triton", "jax", "cupy", "numba", "matplotlib", "rich", "platformdirs", "prometheus_client"}
NEVER = {"torch", "ctypes", "cffi"}


class Import(NamedTuple):
    path: Path
    line: int
    module: str
    where: str  # "top", "function" or "typing"

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT.parent)}:{self.line} imports {self.module} ({self.where})"


class _Collector(ast.NodeVisitor):
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

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._inside("function", node)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test).endswith("TYPE_CHECKING"):
            self._inside("typing", node)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self._add(node, *(alias.name for alias in node.names))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, f"{self.path}:{node.lineno}: imports are absolute"
        assert node.module is not None
        if node.module == "kvoffload":  # each name is a module of its own, or comes from __init__
            self._add(node, *(f"kvoffload.{alias.name}" for alias in node.names))
        else:
            self._add(node, node.module)

    def _add(self, node: ast.stmt, *modules: str) -> None:
        self.found += [Import(self.path, node.lineno, module, self.where) for module in modules]


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imports() -> Iterator[Import]:
    for path in sources():
        collector = _Collector(path)
        collector.visit(ast.parse(path.read_text()))
        yield from collector.found


def unit_of(path: Path) -> str:
    """The module or subpackage of kvoffload that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def layer_of(unit: str) -> int:
    for level, units in enumerate(LAYERS):
        if unit in units:
            return level
    raise AssertionError(f"{unit} is in no layer; give it its place in LAYERS")


def target_unit(module: str) -> str | None:
    """The unit of kvoffload that `module` belongs to, or None for other packages."""
    package, _, rest = module.partition(".")
    if package != "kvoffload":
        return None
    name = rest.partition(".")[0]
    return name if (ROOT / f"{name}.py").exists() or (ROOT / name / "__init__.py").exists() else "__init__"


# structure


def test_every_module_has_its_layer_and_every_layer_its_modules() -> None:
    units = {unit_of(path) for path in sources()}
    assert units == set().union(*LAYERS)
    assert sum(len(units) for units in LAYERS) == len(set().union(*LAYERS))


def test_imports_point_down_only() -> None:
    wrong = []
    for each in imports():
        target = target_unit(each.module)
        source = unit_of(each.path)
        if target in (None, source) or each.where == "typing":
            continue
        assert target is not None
        lazily = each.where == "function" and (source, target) in LAZY_UPWARD
        if layer_of(target) >= layer_of(source) and not lazily:
            wrong.append(str(each))
    assert wrong == []


def test_the_simulated_driver_knows_nothing_of_the_library() -> None:
    """Else it would agree with the library's mistakes."""
    folder = ROOT / "driver" / "simulator"
    own = "kvoffload.simulator"
    wrong = [
        str(each)
        for each in imports()
        if folder in each.path.parents and each.module.startswith("kvoffload") and not each.module.startswith(own)
    ]
    assert wrong == []


def test_only_the_driver_package_imports_cuda() -> None:
    wrong = [str(each) for each in imports() if each.module.split(".")[0] == "cuda" and unit_of(each.path) != "driver"]
    assert wrong == []


def test_heavy_packages_are_imported_inside_functions() -> None:
    simulator = ROOT / "driver" / "simulator"  # itself loaded inside functions only: see below
    wrong = [
        str(each)
        for each in imports()
        if each.module.split(".")[0] in LAZY_ONLY
        and each.where == "top"
        and simulator not in each.path.parents
        and not (each.module.split(".")[0] == "triton" and each.path in kernel_files())
    ]
    wrong += [
        str(each)
        for each in imports()
        if each.module.startswith("kvoffload.simulator")
        and each.where == "top"
        and simulator not in each.path.parents
        and unit_of(each.path) != "testing"
    ]
    assert wrong == []


def kernel_files() -> list[Path]:
    """The modules with Triton kernels, which need Triton to be imported themselves."""
    return [path for path in sources() if "@triton.jit" in path.read_text().splitlines()]


def test_modules_with_kernels_are_imported_by_nobody() -> None:
    """They are named as text in a KernelSpec, and imported when a kernel is compiled or interpreted."""
    names = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in kernel_files()}
    assert "kvoffload.kernels.gather" in names
    wrong = [str(each) for each in imports() if any(f"{each.module}.".startswith(f"{name}.") for name in names)]
    for path in sources():
        package = ".".join(path.relative_to(ROOT.parent).parent.parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                module = node.module or package
                wrong += [f"{path}:{node.lineno}" for alias in node.names if f"{module}.{alias.name}" in names]
    assert wrong == []


def test_modules_with_kernels_hold_nothing_else() -> None:
    """They are imported where there is Triton only, so nobody may need a constant of theirs."""
    wrong = []
    for path in kernel_files():
        for node in ast.parse(path.read_text()).body:
            kernel = isinstance(node, ast.FunctionDef) and [ast.unparse(d) for d in node.decorator_list] == [
                "triton.jit"
            ]
            text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not (kernel or text or isinstance(node, ast.Import | ast.ImportFrom)):
                wrong.append(f"{path}:{node.lineno}: {ast.unparse(node):.60}")
    assert wrong == []


def test_no_torch_and_no_ctypes_anywhere() -> None:
    wrong = [str(each) for each in imports() if each.module.split(".")[0] in NEVER or "ctypeslib" in each.module]
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            if name in ("ctypes", "ctypeslib"):
                wrong.append(f"{path}: .{name}")
            if isinstance(node, ast.Constant) and node.value in NEVER:
                wrong.append(f"{path}: {node.value!r}")  # as for __import__ and import_module
    assert wrong == []


def test_files_and_functions_stay_small() -> None:
    long_files = [path.name for path in sources() if len(path.read_text().splitlines()) > 400]
    long_functions = [
        f"{path.name}: {node.name}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > 60
    ]
    assert (long_files, long_functions) == ([], [])


# what importing costs

HEAVY = (
    "torch", "triton", "jax", "cupy", "numba", "matplotlib", "rich", "platformdirs", "prometheus_client",
    "ctypes.wintypes",
)  # fmt: skip


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_costs_little_beyond_numpy() -> None:
    """CPU time: what else runs on the machine does not count. A shared CPU has slow minutes, so the best of many."""
    program = "import numpy, time; t = time.process_time(); import kvoffload; print(time.process_time() - t)"
    assert any(float(run(program)) < 0.15 for _ in range(20))


def test_pitfall_21_importing_loads_no_cuda_and_nothing_heavy() -> None:
    program = "import sys; before = set(sys.modules); import kvoffload; print(*(set(sys.modules) - before))"
    loaded = set(run(program).split())
    assert not {name for name in loaded if name.split(".")[0] == "cuda"}
    assert not loaded & set(HEAVY)
    assert not {name for name in loaded if name.startswith(("kvoffload.simulator", "kvoffload.commands"))}
    assert "kvoffload.engine.engine" in loaded


def test_pitfall_21_importing_makes_no_driver_call() -> None:
    """Not even by the modules that know the bindings: cuInit is patched to fail the test."""
    program = (
        "import cuda.bindings.driver as d\n"
        "def fail(*_): raise SystemExit('a driver call at import')\n"
        "for name in dir(d):\n"
        "    if name.startswith('cu') and callable(getattr(d, name)) and not isinstance(getattr(d, name), type):\n"
        "        setattr(d, name, fail)\n"
        "import kvoffload, kvoffload.testing, kvoffload.driver.cuda\n"
        "kvoffload.open_device(backend='simulated').close()"
    )
    assert run(program) == ""


# public names

CONTRACT = {
    "BlockCache", "CapabilityError", "CapacityError", "ClosedError", "DriverError", "KVLayout", "KVOffloadError",
    "LayoutError", "NO_WAIT", "OffloadEngine", "Plane", "TransferError", "open_device",
}  # fmt: skip


def test_every_public_name_is_exported_once() -> None:
    for module in (kvoffload, testing):
        names = module.__all__
        assert len(names) == len(set(names))
        assert all(hasattr(module, name) for name in names)
    assert set(kvoffload.__all__) >= CONTRACT
    modules = {unit_of(path) for path in sources()} | {"annotations"}
    public = {name for name in vars(kvoffload) if not name.startswith("_")} - modules
    assert public == set(kvoffload.__all__)
    defined = [getattr(kvoffload, name) for name in kvoffload.__all__]
    assert len({id(each) for each in defined}) == len(defined)


def test_public_names_are_documented() -> None:
    bare = [name for name in kvoffload.__all__ if name != "NO_WAIT" and not getattr(kvoffload, name).__doc__]
    assert bare == []


@pytest.mark.parametrize(
    ("error", "parents"),
    [
        ("LayoutError", (kvoffload.KVOffloadError, ValueError)),
        ("TransferError", (kvoffload.KVOffloadError,)),
        ("DriverError", (kvoffload.KVOffloadError,)),
        ("CapabilityError", (kvoffload.KVOffloadError,)),
        ("CapacityError", (kvoffload.KVOffloadError,)),
        ("ClosedError", (kvoffload.KVOffloadError,)),
    ],
)
def test_the_error_tree(error: str, parents: tuple[type, ...]) -> None:
    assert issubclass(getattr(kvoffload, error), parents[0])
    assert all(issubclass(getattr(kvoffload, error), parent) for parent in parents)


def test_the_package_is_typed_and_has_a_version() -> None:
    assert (ROOT / "py.typed").exists()
    assert kvoffload.__version__.count(".") == 2


def test_typical_calls_do_what_their_types_say() -> None:
    typing_calls.main()

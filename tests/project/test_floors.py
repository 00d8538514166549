"""The house: a folder a floor, imports point down only, files and functions are small, nothing heavy is imported."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from house import (
    FLOORS,
    LOOSE_FILES,
    ROOT,
    circles,
    edges_between_files,
    file_of,
    floor_of,
    folder_of,
    imports,
    sources,
    tree,
)

LAZY_ONLY = {
    "cuda",
    "triton",
    "jax",
    "cupy",
    "numba",
    "matplotlib",
    "rich",
    "nvtx",
    "platformdirs",
    "prometheus_client",
    "xxhash",
}
NEVER = {"torch", "ctypes", "cffi"}
IN_VLLM = {"vllm"}  # that only `kvoffload/vllm` imports
# One class, one file: a class that is cut over files by inheritance is harder to read than a long file. A function fits
# a screen; it is not cut into helpers that are called once to make it shorter.
FILE_LINES, FUNCTION_LINES = 600, 60
SHARED_FILES = {
    "base": "the interface of a folder's classes",
    "errors": "the library's, and those of the simulated driver",
    "options": "what the user gives to the folder's classes",
    "statistics": "what the folder's classes count",
    "coding": "a format, and its kernels",
    "compute": "a backdrop, and its kernels",
    "pack": "a copier, and its kernels",
}


def test_every_folder_has_its_floor_and_every_floor_its_folder() -> None:
    named = [folder for line in FLOORS for folder in line]
    assert sorted(named) == sorted(set(named))
    assert {folder_of(path) for path in sources()} == set(named)


def test_the_drawing_of_the_floors_has_each_of_them_in_order() -> None:
    text = (ROOT.parent / "ARCHITECTURE.md").read_text()
    drawing = text.partition("## Folders are floors")[2].split("```")[1]
    drawn = [line.split("  ")[0].split(", ") for line in drawing.strip().splitlines()]
    assert [sorted(map(str.strip, line)) for line in drawn] == [sorted(line) for line in reversed(FLOORS)]


def test_one_class_has_one_name_and_one_file_has_one() -> None:
    """The simulator's words are the driver's."""
    rooms = [path for path in sources() if folder_of(path) != "simulator"]
    classes = {(node.name, path) for path in rooms for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)}
    of_class = Counter(name for name, _ in classes)
    assert not {name for name, count in of_class.items() if count > 1}
    of_file = Counter(path.stem for path in sources() if path.stem != "__init__")
    assert {name for name, count in of_file.items() if count > 1} == set(SHARED_FILES)


def test_files_are_in_folders() -> None:
    loose = {path.stem for path in sources() if path.parent == ROOT}
    assert loose <= LOOSE_FILES, f"each of these belongs into a folder: {sorted(loose - LOOSE_FILES)}"


def test_imports_point_down_only() -> None:
    """Those for typing and those within functions, too: a need upwards is a Protocol or a registration."""
    wrong = []
    for each in imports():
        target = file_of(each.module)
        if target is None:
            continue
        here, there = folder_of(each.path), folder_of(target)
        if here != there and floor_of(there) >= floor_of(here):
            wrong.append((f"{here} -> {there}", str(each)))
    counts = Counter(arrow for arrow, _ in wrong)
    assert not wrong, f"{len(wrong)} upward imports: {dict(counts)}\n" + "\n".join(text for _, text in wrong)


def test_no_circles_between_files() -> None:
    found = [[str(path.relative_to(ROOT)) for path in circle] for circle in circles(edges_between_files())]
    assert not found, "\n".join(f"{len(circle)} files: {', '.join(circle)}" for circle in found)


def test_the_circle_finder_finds_circles() -> None:
    a, b, c = Path("a"), Path("b"), Path("c")
    assert circles({a: {b}, b: {c}, c: {a}}) == [[a, b, c]]
    assert circles({a: {b, c}, b: {c}, c: set()}) == []
    assert circles({a: {b}, b: {a}, c: {a}}) == [[a, b]]


def test_the_simulated_driver_knows_nothing_of_the_library() -> None:
    """Else it would agree with the library's mistakes."""
    wrong = [
        str(each)
        for each in imports()
        if folder_of(each.path) == "simulator"
        and each.module.startswith("kvoffload")
        and not each.module.startswith("kvoffload.simulator")
    ]
    assert wrong == []


def test_cuda_is_imported_by_the_driver_and_the_simulator() -> None:
    """And where arrays of other libraries come in, which cuda.core reads."""
    wrong = [
        str(each)
        for each in imports()
        if each.module.split(".")[0] == "cuda"
        and folder_of(each.path) not in ("driver", "simulator")
        and not (each.module.startswith("cuda.core") and each.path == ROOT / "layout" / "dlpack.py")
    ]
    assert wrong == []


def test_heavy_packages_are_imported_inside_functions() -> None:
    wrong = [
        str(each)
        for each in imports()
        if each.module.split(".")[0] in LAZY_ONLY
        and each.where == "top"
        and folder_of(each.path) != "simulator"  # itself imported inside functions only: see below
        and not (each.module.split(".")[0] == "triton" and each.path in kernel_files())
    ]
    wrong += [
        str(each)
        for each in imports()
        if each.module.startswith("kvoffload.simulator")
        and each.where == "top"
        and folder_of(each.path) not in ("simulator", "testing")
    ]
    assert wrong == []


def kernel_files() -> list[Path]:
    """The modules with Triton kernels, which need Triton to be imported themselves."""
    return [path for path in sources() if "@triton.jit" in path.read_text().splitlines()]


def test_modules_with_kernels_are_imported_nowhere() -> None:
    """They are named as text in a KernelSpec, and imported when a kernel is compiled or interpreted."""
    names = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in kernel_files()}
    assert "kvoffload.kernels.pack" in names
    assert [str(each) for each in imports() if any(f"{each.module}.".startswith(f"{name}.") for name in names)] == []


def test_modules_with_kernels_hold_nothing_else() -> None:
    """They are imported where there is Triton only, so a constant of theirs would not be there elsewhere."""
    wrong = []
    for path in kernel_files():
        for node in tree(path).body:
            kernel = isinstance(node, ast.FunctionDef) and [ast.unparse(d) for d in node.decorator_list] == [
                "triton.jit"
            ]
            text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not (kernel or text or isinstance(node, ast.Import | ast.ImportFrom)):
                wrong.append(f"{path}:{node.lineno}: {ast.unparse(node):.60}")
    assert wrong == []


def test_no_torch_and_no_ctypes_anywhere() -> None:
    wrong = [str(each) for each in imports() if each.module.split(".")[0] in NEVER or "ctypeslib" in each.module]
    [torch] = [
        each for each in wrong if each.startswith("kvoffload/vllm/spec.py") and each.endswith("torch (function)")
    ]
    wrong.remove(torch)  # vLLM's current stream
    for path in sources():
        for node in ast.walk(tree(path)):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            if name in ("ctypes", "ctypeslib"):
                wrong.append(f"{path}: .{name}")
            if isinstance(node, ast.Constant) and node.value in NEVER:
                wrong.append(f"{path}: {node.value!r}")  # as for __import__ and import_module
    assert wrong == []


def test_vllm_is_imported_for_vllm_alone() -> None:
    """Its folder imports vLLM, and no other file imports that folder."""
    outside = [each for each in imports() if folder_of(each.path) != "vllm"]
    assert [str(each) for each in outside if each.module.split(".")[0] in IN_VLLM] == []
    assert [str(each) for each in outside if each.module.split(".")[:2] == ["kvoffload", "vllm"]] == []


def test_the_package_and_its_tests_know_nothing_of_the_benchmarks() -> None:
    """They are a distribution of their own, which need not be installed; an entry point leads to them."""
    tests = ROOT.parent / "tests"
    outside = [path for path in tests.rglob("*.py") if tests / "benchmarks" not in path.parents]
    pattern = re.compile(r"^ *(?:from|import) kvoffload_bench\b", re.MULTILINE)
    assert [path for path in (*sources(), *outside) if pattern.search(path.read_text())] == []


def test_files_stay_small() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert {name: length for name, length in lengths.items() if length > FILE_LINES} == {}


def test_functions_stay_small() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES} == {}


@pytest.mark.parametrize("folder", [folder for line in FLOORS for folder in line])
def test_a_floor_says_what_it_holds(folder: str) -> None:
    path = ROOT / folder / "__init__.py" if (ROOT / folder).is_dir() else ROOT / f"{folder}.py"
    assert ast.get_docstring(tree(path)), f"{path.relative_to(ROOT)} has no docstring"

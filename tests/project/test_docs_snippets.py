"""Every block of Python in a document says whether it runs; those that run do so as they stand."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from documents import ROOT, Snippet, snippets

SNIPPETS = snippets()
RUNNABLE = [each for each in SNIPPETS if each.runs]
ELSEWHERE = {
    "several devices",  # `tests/jax/test_jax_sharded.py` runs it, with devices of its own
    "what a store brings",  # `tests/benchmarks/test_bench_fleet.py`: it needs the benchmarks
}

AUTO = 'backend="auto"'


def titled(snippet: Snippet) -> str:
    return f"{snippet.document}: {snippet.name}"


def skip_without_packages(snippet: Snippet) -> None:
    for package in sorted(snippet.imports()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("snippet", SNIPPETS, ids=titled)
def test_each_is_marked_and_compiles(snippet: Snippet) -> None:
    assert snippet.runs or snippet.mark == "fragment", f"a mark goes above it:\n{snippet.code}"
    compile(snippet.code, snippet.document, "exec")


def test_names_are_used_once() -> None:
    names = [each.name for each in RUNNABLE]
    assert sorted(names) == sorted(set(names))


def test_what_runs_elsewhere_is_there() -> None:
    assert {each.name for each in RUNNABLE} >= ELSEWHERE


def test_only_what_needs_a_gpu_is_marked_so() -> None:
    for each in RUNNABLE:
        assert not each.needs_gpu or each.imports() & {"cupy", "jax"}, titled(each)


@pytest.mark.parametrize(
    "snippet", [each for each in RUNNABLE if not each.needs_gpu and each.name not in ELSEWHERE], ids=titled
)
def test_it_runs_anywhere(snippet: Snippet) -> None:
    skip_without_packages(snippet)
    exec(compile(snippet.code, snippet.document, "exec"), {"__name__": "__document__"})


def run_on_a_gpu(code: str) -> None:
    """In a process of its own, which sees the GPU under test alone."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    error = done.stderr.strip().rpartition("\n")[2]
    if "CapabilityError" in error and "pip install" in error:
        pytest.skip(error)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("snippet", [each for each in RUNNABLE if each.needs_gpu], ids=titled)
@pytest.mark.usefixtures("only_gpu")
def test_it_runs_on_a_gpu(snippet: Snippet) -> None:
    skip_without_packages(snippet)
    run_on_a_gpu(snippet.code)


@pytest.mark.gpu
@pytest.mark.parametrize("snippet", [each for each in RUNNABLE if AUTO in each.code], ids=titled)
@pytest.mark.usefixtures("only_gpu")
def test_what_takes_any_device_runs_on_a_gpu(snippet: Snippet) -> None:
    """As it stands such a block would also pass where the GPU was not found."""
    skip_without_packages(snippet)
    run_on_a_gpu(snippet.code.replace(AUTO, 'backend="cuda"'))

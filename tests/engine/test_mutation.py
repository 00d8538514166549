"""Every wait matters: each call that makes a stream wait is removed in turn, and the ordering tests must then fail. So
do the mistakes of `mutations.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import PACKAGE, Site, mutated, wait_sites
from mutations import MUTATIONS, Mutation

HERE = Path(__file__).resolve().parent
SUPPORT = HERE.parent / "support"
ORDERING_TESTS = [
    str(HERE / name)
    for name in (
        "test_ordering.py",
        "test_ordering_segments.py",
        "test_ordering_split.py",
        "test_ordering_parts.py",
        "test_mutation_targets.py",
        "test_wait_streams.py",
    )
] + [str(HERE.parent / "sharded" / "test_sharded_ordering.py")]
SITES = wait_sites()
TESTS_PASSED, TESTS_FAILED = 0, 1  # pytest's exit codes; 2 to 5 would mean that no test was asked


def _ordering_tests(module: str, line: int, column: int, *, stop_early: bool) -> subprocess.CompletedProcess[str]:
    return _pytest([module, str(line), str(column)], _likeliest_first(module), stop_early=stop_early)


def _pytest(mutant: list[str], tests: list[str], *, stop_early: bool = True) -> subprocess.CompletedProcess[str]:
    """Run tests under a mutant of the package."""
    options = ["-n", "0", "-p", "no:cacheprovider", "-q", "--no-header", "--tb=line", "-W", "error", "--timeout=40"]
    paths = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))},
        "KVOFFLOAD_ORDERING_SEEDS": "2",
        "PYTHONPATH": paths,
    }
    return subprocess.run(
        [sys.executable, str(SUPPORT / "mutants.py"), *mutant, *options, *(["-x"] if stop_early else []), *tests],
        cwd=PACKAGE.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def _likeliest_first(module: str) -> list[str]:
    """The ordering tests; those of a module's own before the others."""
    own = f"test_{module.rpartition('.')[2]}.py"
    return sorted(ORDERING_TESTS, key=lambda path: Path(path).name != own)


def test_the_sites_are_found() -> None:
    """For the caller's streams and arrays, the direction, conflicts; between segments; of and for the second share of a
    split; by a caller's stream; for what a failure left."""
    names = [site.name for site in SITES]
    assert names.count("stream_wait_event") >= 6
    assert names.count("wait_for_transfer") >= 3
    assert {site.module for site in SITES} >= {
        f"kvoffload.engine.{name}" for name in ("launcher", "lifecycle", "stream_order", "wait_streams")
    }


def test_the_ordering_tests_pass_with_every_wait_in_place() -> None:
    run = _ordering_tests("-", 0, 0, stop_early=False)
    assert run.returncode == TESTS_PASSED, run.stdout + run.stderr


@pytest.mark.parametrize("site", SITES, ids=str)
def test_removing_a_wait_is_noticed(site: Site) -> None:
    run = _ordering_tests(site.module, site.line, site.column, stop_early=True)
    assert run.returncode == TESTS_FAILED, (
        f"{site.module.replace('.', '/')}.py:{site.line}: no test fails without this call of {site.name}\n"
        + run.stdout[-2000:]
        + run.stderr[-2000:]
    )
    assert " failed" in run.stdout, run.stdout


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_place_of_a_mutation_is_there(mutation: Mutation) -> None:
    assert mutated(mutation, (PACKAGE / mutation.file).read_text()) != (PACKAGE / mutation.file).read_text()


def test_the_named_tests_pass_without_a_mutation() -> None:
    tests = sorted({test for mutation in MUTATIONS for test in mutation.tests if "::" in test})
    done = _pytest(["-", "0", "0"], tests, stop_early=False)
    assert done.returncode == TESTS_PASSED, done.stdout + done.stderr


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_is_noticed(mutation: Mutation) -> None:
    done = _pytest(["--mutation", mutation.name], list(mutation.tests))
    assert done.returncode == TESTS_FAILED, f"{mutation.tests} pass\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert " failed" in done.stdout, done.stdout

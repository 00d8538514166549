"""Every wait matters: each call that makes a stream wait is removed in turn, and the ordering tests must then fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import PACKAGE, Site, wait_sites

HERE = Path(__file__).resolve().parent
SUPPORT = HERE.parent / "support"
ORDERING_TESTS = [
    str(HERE / name)
    for name in (
        "test_ordering.py",
        "test_ordering_segments.py",
        "test_ordering_split.py",
        "test_ordering_parts.py",
        "test_wait_streams.py",
    )
]
SITES = wait_sites()
TESTS_PASSED, TESTS_FAILED = 0, 1  # pytest's exit codes; 2 to 5 would mean that no test was asked


def _ordering_tests(module: str, line: int, column: int, *, stop_early: bool) -> subprocess.CompletedProcess[str]:
    options = ["-n", "0", "-p", "no:cacheprovider", "-q", "--no-header", "--tb=line", "-W", "error"]
    command = [sys.executable, str(SUPPORT / "mutants.py"), module, str(line), str(column)]
    paths = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))},
        "KVOFFLOAD_ORDERING_SEEDS": "2",
        "PYTHONPATH": paths,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [*command, *options, *(["-x"] if stop_early else []), *_likeliest_first(module)],
        cwd=PACKAGE.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def _likeliest_first(module: str) -> list[str]:
    """The ordering tests; those of a module's own before the others."""
    own = f"test_{module.rpartition('.')[2]}.py"
    return sorted(ORDERING_TESTS, key=lambda path: Path(path).name != own)


def test_the_sites_are_found() -> None:
    """For the caller's streams and arrays, the direction, the rivals; between pieces; of and for the second share of a
    split; by a caller's stream; for what a failure left."""
    names = [site.name for site in SITES]
    assert names.count("stream_wait_event") >= 6
    assert names.count("wait_for_job") >= 4
    assert {site.module for site in SITES} == {
        f"kvoffload.{name}" for name in ("callers", "flight", "launch", "wait_streams")
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

"""Every test is run by a step of `.ci/run`, but for those that need a GPU."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from documents import ROOT

TESTS = ROOT / "tests"
SCRIPT = ROOT / ".ci" / "run"
PYTEST = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
HELPERS_OF_SERVERS = re.compile(
    r"^(from|import) (servers|mooncake_servers|remote_stores|exhaust_remote)\b", re.MULTILINE
)
NEEDS_JAX = re.compile(r"needs_jax|HAS_JAX|jax_on|sharded_jax|importorskip\(\"jax\"")


def left_out() -> list[str]:
    """The markers whose tests plain `pytest` leaves out."""
    options = shlex.split(PYTEST["addopts"])
    expression = options[options.index("-m") + 1]
    return [each.removeprefix("not ") for each in expression.split(" and ")]


def script() -> str:
    if not SCRIPT.exists():
        pytest.skip(".ci/run is not in the source distribution")
    return SCRIPT.read_text()


def steps() -> list[list[str]]:
    """The arguments of each call of pytest in `.ci/run`, but for `-n 0`; "jax" is an item where JAX is installed."""
    found = []
    for line in script().splitlines():
        if line.endswith("pip install --quiet jax"):
            found.append(["jax"])
        elif " -m pytest" in line:
            found.append(shlex.split(line.partition(" -m pytest")[2].removeprefix(" -n 0"), comments=True))
    return found


def test_what_plain_pytest_leaves_out_is_a_step() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"<!-- command: tests -->\n```\n.+ -m pytest\n```", readme), "all folders, no option"
    assert 'eval "$test_command"' in script()
    assert PYTEST["testpaths"] == ["tests"]
    assert "export KVOFFLOAD_SERVERS=required" in script(), "else they may all be skipped"
    for marker in left_out():
        assert ["-m", marker] in steps(), f"no test with the marker {marker} is run"


def test_the_benchmarks_are_installed_and_tested_by_steps_of_their_own() -> None:
    assert "tests/benchmarks" in PYTEST["norecursedirs"], "the README's command needs the package alone"
    assert script().index("pip install --quiet ./benchmarks") < script().index("pytest tests/benchmarks")
    assert ["tests/benchmarks"] in steps()
    for marker in left_out():
        assert ["-m", marker, "tests/benchmarks"] in steps()


def test_markers_are_those_that_are_left_out_and_gpu() -> None:
    assert [each.partition(":")[0] for each in PYTEST["markers"]] == ["gpu", *left_out()]


def test_what_starts_a_server_is_marked() -> None:
    files = [path for path in TESTS.rglob("test_*.py") if HELPERS_OF_SERVERS.search(path.read_text())]
    assert len(files) > 5
    assert [path.name for path in files if "pytest.mark.servers" not in path.read_text()] == []


def test_what_needs_jax_is_run_after_jax_is_installed() -> None:
    found = steps()
    paths = [ROOT / argument for step in found[found.index(["jax"]) + 1 :] for argument in step]
    files = [path for path in TESTS.rglob("test_*.py") if NEEDS_JAX.search(path.read_text()) and path != Path(__file__)]
    assert len(files) > 5
    missing = [path for path in files if not {path, *path.parents} & set(paths) and path.parent.name != "gpu"]
    assert missing == [], "the steps before skip what needs JAX"
    assert all(path.exists() for path in paths)

"""Every test is run by a session of `noxfile.py` that `.ci/run` calls, but for those that need a GPU."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from documents import ROOT

TESTS = ROOT / "tests"
SCRIPT = ROOT / ".ci" / "run"
PYTHONS = ROOT / ".ci" / "pythons"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTEST = PROJECT["tool"]["pytest"]["ini_options"]
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


class Session:
    """What a session of `noxfile.py` is given: it notes what would be installed and run."""

    posargs: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.cache_dir = self._folder = folder
        self.installed: list[str] = []
        self.commands: list[tuple[list[str], dict[str, str]]] = []

    def create_tmp(self) -> str:
        return str(self._folder)

    def install(self, *packages: str) -> None:
        self.installed += packages

    def run(self, *command: str, env: dict[str, str] | None = None, external: bool = False) -> None:  # noqa: ARG002
        self.commands.append((list(command), env or {}))

    @property
    def tests(self) -> list[list[str]]:
        """The arguments of each call of pytest."""
        return [command[command.index("pytest") + 1 :] for command, _ in self.commands if "pytest" in command]


Sessions = dict[str, Session]


@pytest.fixture
def pythons() -> dict[str, list[str]]:
    """The versions of Python of each session; filled by `sessions`."""
    return {}


@pytest.fixture
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pythons: dict[str, list[str]]) -> Sessions:
    """Each session of `noxfile.py`, run with a nox that does nothing."""
    if not (ROOT / "noxfile.py").exists():
        pytest.skip("noxfile.py is not in the source distribution")
    functions: list[Callable[[Session], None]] = []

    def session(function: Any = None, *, python: Any = (), **_: Any) -> Any:
        if function is None:
            return lambda function: session(function, python=python)
        functions.append(function)
        pythons[function.__name__] = [python] if isinstance(python, str) else list(python)
        return function

    nox: Any = SimpleNamespace(session=session, options=SimpleNamespace(), Session=Session)
    monkeypatch.setitem(sys.modules, "nox", nox)
    runpy.run_path(str(ROOT / "noxfile.py"))
    made = {}
    for function in functions:
        made[function.__name__] = Session(tmp_path)
        function(made[function.__name__])
    return made


@pytest.fixture
def called(sessions: Sessions) -> Sessions:
    """The sessions that `.ci/run` calls."""
    return {name: sessions[name] for name in [*names_in("newest"), *names_in("sessions")]}


def names_in(array: str) -> list[str]:
    """The sessions in an array of the script, over which it loops."""
    (names,) = re.findall(rf"^{array}=\((.+)\)$", script(), re.MULTILINE)
    assert f'for name in "${{{array}[@]}}"' in script()
    return str(names).split()


def test_what_plain_pytest_leaves_out_is_a_session(called: Sessions) -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"<!-- command: tests -->\n```\n.+ -m pytest\n```", readme), "all folders, no option"
    assert 'eval "$test_command"' in script()
    assert PYTEST["testpaths"] == ["tests"]
    assert called["servers"].commands[0][1] == {"KVOFFLOAD_SERVERS": "required"}, "else they may all be skipped"
    for marker in left_out():
        assert called[marker].tests == [["-m", marker]], f"no test with the marker {marker} is run"


def test_the_script_calls_all_sessions_but_the_matrix_and_those_of_a_gpu(called: Sessions, sessions: Sessions) -> None:
    """`esurge` tests an example, with 1 GB of packages of its own, and `triton` installs 4 GB and writes a table."""
    assert set(sessions) - set(called) == {"matrix", "gpu", "esurge", "triton"}
    assert sessions["esurge"].tests == [["-n", "0", "tests/easydel"]]


def test_the_suite_and_jax_are_run_on_the_newest_python_too(called: Sessions) -> None:
    """README's command takes `python3`, which may be the oldest; there pip finds only what still supports that."""
    assert names_in("newest") == ["tests", "jax"]
    assert 'session "$name" --force-python "${pythons[-1]}"' in script()
    assert "--error-on-missing-interpreters" in script(), "nox leaves out a session whose Python is missing"
    assert called["tests"].installed == [".[test]"], "the newest of everything"
    assert not [each for each in called["jax"].installed if "=" in each]


def find_pythons(folder: Path, *installed: str, pyenv: str = "") -> subprocess.CompletedProcess[str]:
    """What `.ci/pythons` finds where these commands are installed. `pyenv`: versions that it has, of which the first is
    in use; its commands fail for the others, unless PYENV_VERSION names them.
    """
    if not PYTHONS.exists():
        pytest.skip(".ci/pythons is not in the source distribution")
    commands = {f"python{version}": "exit 0" for version in installed}
    if pyenv:
        versions = pyenv.split()
        listed = "\n".join(versions)
        commands["pyenv"] = f'[ "$1" = versions ] && echo "{listed}" || echo {versions[0]}'
        for each in (version for version in versions if "/" not in version):
            commands[f"python{each.rpartition('.')[0]}"] = (
                f'case ":$PYENV_VERSION:" in *:{each}:*) ;; *) exit 127;; esac'
            )
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o700)
    for tool in ("grep", "sort", "paste"):
        (folder / tool).symlink_to(str(shutil.which(tool)))
    program = f'set -euo pipefail; source {shlex.quote(str(PYTHONS))}; echo "newest ${{pythons[-1]}}"'
    bash = ["/bin/bash", "-c", program]
    return subprocess.run(bash, env={"PATH": str(folder)}, capture_output=True, text=True, timeout=60)


def test_the_script_finds_each_python(tmp_path: Path) -> None:
    done = find_pythons(tmp_path, "3.11", "3.13")
    assert (done.returncode, done.stdout) == (0, "Pythons found: 3.11 3.13\nnewest 3.13\n")


def test_the_script_finds_the_pythons_of_pyenv(tmp_path: Path) -> None:
    done = find_pythons(tmp_path, "3.11", pyenv="3.11.7 3.12.1 3.13.0 3.13.0/envs/other 2.7.18")
    assert (done.returncode, done.stdout) == (0, "Pythons found: 3.11 3.12 3.13\nnewest 3.13\n")


@pytest.mark.parametrize("installed", [(), ("3.11",)])
def test_the_script_fails_without_a_newer_python(tmp_path: Path, installed: tuple[str, ...]) -> None:
    done = find_pythons(tmp_path, *installed)
    assert done.returncode == 1
    assert f"Pythons found: {' '.join(installed) or 'none'}" in done.stdout
    assert "a Python newer than 3.11, too: install one" in done.stderr


def test_the_script_deletes_nothing_of_a_developer() -> None:
    removed = re.findall(r"\brm -rf (\S+)", script())
    assert len(removed) == script().count("rm -") == 3
    assert all(path.startswith('"$folder') for path in removed), removed
    assert "folder=$(mktemp -d)" in script()
    assert '--envdir "$folder/' in script()


def test_the_matrix_has_the_versions_of_python_that_we_name(sessions: Sessions, pythons: dict[str, list[str]]) -> None:
    assert sessions["matrix"].tests == [[]], "the whole suite"
    versions = [each.rpartition(" ")[2] for each in PROJECT["project"]["classifiers"] if "Python :: 3." in each]
    assert pythons["matrix"][: len(versions)] == versions, "one is named where the suite has passed on it"
    assert pythons["lowest"] == [PROJECT["project"]["requires-python"].removeprefix(">=")]
    text = PYTHONS.read_text() if PYTHONS.exists() else ""
    assert not text or f"for version in {' '.join(pythons['matrix'])}; do" in text


def test_lowest_versions_are_those_of_the_project(sessions: Sessions, tmp_path: Path) -> None:
    installed = sessions["lowest"].installed
    constraints = Path(installed[installed.index("--constraint") + 1])
    assert constraints.parent == tmp_path
    lowest = [*constraints.read_text().split(), installed[-1]]
    assert installed[-1].startswith("jax==")
    assert [call for call in sessions["lowest"].tests if "tests/jax" in call] == [["tests/jax"]]
    assert {"tests/layout", "tests/kernels", "tests/device"} <= set(sessions["lowest"].tests[0])
    assert len(lowest) >= len(PROJECT["project"]["dependencies"])
    assert all(re.fullmatch(r"[\w.-]+==\d+\.\d+\.\*", each) for each in lowest), lowest


def test_the_benchmarks_are_installed_and_tested_by_a_session_of_their_own(called: Sessions) -> None:
    assert "tests/benchmarks" in PYTEST["norecursedirs"], "the README's command needs the package alone"
    assert "./benchmarks" in called["benchmarks"].installed
    assert called["benchmarks"].tests == [["tests/benchmarks"], ["-m", "servers", "tests/benchmarks"]]


def test_markers_are_those_that_are_left_out_and_those_of_what_may_be_missing() -> None:
    assert [each.partition(":")[0] for each in PYTEST["markers"]] == ["gpu", "kernels", *left_out()]


def test_what_starts_a_server_is_marked() -> None:
    files = [path for path in TESTS.rglob("test_*.py") if HELPERS_OF_SERVERS.search(path.read_text())]
    assert len(files) > 5
    assert [path.name for path in files if "pytest.mark.servers" not in path.read_text()] == []


def test_what_needs_jax_is_run_where_jax_is_installed(called: Sessions) -> None:
    calls = [call for each in called.values() if "jax" in each.installed for call in each.tests]
    paths = [ROOT / argument for call in calls for argument in call if argument.startswith("tests")]
    files = [path for path in TESTS.rglob("test_*.py") if NEEDS_JAX.search(path.read_text()) and path != Path(__file__)]
    assert len(files) > 5
    missing = [path for path in files if not {path, *path.parents} & set(paths) and path.parent.name != "gpu"]
    assert missing == [], "the other sessions skip what needs JAX"
    assert all(path.exists() for path in paths)

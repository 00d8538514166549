"""The public API under mypy and pyright: typical calls and whole programs pass in strict mode, and misuses are refused.

Each misuse is refused on its line. The programs run, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from programs import run_program
from typed_programs import two_streams

import kvoffload
from kvoffload.testing import SimulatedDriver

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CALLS, MISUSES = HERE / "typing_calls.py", HERE / "typing_misuses.py"
HAS_JAX = importlib.util.find_spec("jax") is not None
PROGRAMS = [path for path in sorted((HERE / "typed_programs").glob("*.py")) if HAS_JAX or "jax" not in path.name]
RIGHT = [CALLS, *PROGRAMS]

Found = dict[Path, dict[int, str]]  # by file and line: the first error


def marked() -> set[int]:
    """The lines of MISUSES that a type checker must refuse."""
    lines = MISUSES.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}


def _environment() -> dict[str, str]:
    return {**os.environ, "MYPYPATH": str(ROOT), "NO_COLOR": "1"}


def mypy(_: Path) -> Found:
    pytest.importorskip("mypy", reason="mypy is not installed")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--no-pretty",
        *map(str, [*RIGHT, MISUSES]),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=115, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: Found = {path: {} for path in (*RIGHT, MISUSES)}
    for name, line, text in re.findall(r"^(\S+?):(\d+): error: (.*)$", done.stdout, re.MULTILINE):
        found.setdefault((ROOT / name).resolve(), {}).setdefault(int(line), text)
    return found


def pyright(folder: Path) -> Found:
    package = pytest.importorskip("pyright", reason="pyright is not installed")
    program, node = Path(package.__file__).parent / "dist" / "index.js", shutil.which("node")
    if node is None or not program.exists():
        pytest.skip("pyright needs node, which is not installed")
    settings = {
        "include": [os.path.relpath(path, folder) for path in (*RIGHT, MISUSES)],
        "strict": [os.path.relpath(path, folder) for path in RIGHT],
        "extraPaths": [str(ROOT), str(HERE)],
        "reportUnusedExpression": False,  # attributes that do not exist are asked for
        "useLibraryCodeForTypes": True,
    }
    project = folder / "pyrightconfig.json"
    project.write_text(json.dumps(settings))
    command = [node, str(program), "--outputjson", "--pythonpath", sys.executable, "--project", str(project)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=115, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: Found = {path: {} for path in (*RIGHT, MISUSES)}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        if each["severity"] == "error":
            lines = found.setdefault(Path(each["file"]), {})
            lines.setdefault(each["range"]["start"]["line"] + 1, each["message"])
    return found


@pytest.mark.long  # `nox -s types` runs it: the extra `test` has neither
@pytest.mark.parametrize("checker", [mypy, pyright], ids=["mypy", "pyright"])
def test_type_checkers_refuse_misuses_and_nothing_else(checker: Callable[[Path], Found], tmp_path: Path) -> None:
    found = checker(tmp_path)
    lines = MISUSES.read_text().splitlines()
    passed = [f"{number}: {lines[number - 1].strip()}" for number in sorted(marked() - set(found[MISUSES]))]
    wrongly = {number: text for number, text in found[MISUSES].items() if number not in marked()}
    refused = {path.name: found[path] for path in RIGHT if found[path]}
    assert refused == {}, "typical calls are refused"
    assert wrongly == {}, "lines that are not marked are refused"
    assert not passed, f"{len(passed)} of {len(marked())} misuses pass:\n" + "\n".join(passed)


# the programs do what they say


@pytest.fixture
def device() -> Iterator[kvoffload.Device]:
    with kvoffload.open_device(backend=SimulatedDriver(seed=1)) as opened:
        yield opened


def test_a_runtime_with_two_streams_stores_and_loads(device: kvoffload.Device) -> None:
    results = two_streams.main(device)
    assert [str(result.direction) for result in results] == ["store", "load"] * 2
    assert {result.nbytes for result in results} == {2 * two_streams.PLANES * two_streams.BLOCK_BYTES}


def test_tenants_are_scraped_over_http(device: kvoffload.Device) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from typed_programs import tenants_over_http

    events, lines = tenants_over_http.main(device)
    assert [event.kind for event in events] == ["miss", "declined", "stored", "miss", "stored", "hit"]
    for line in (
        'kvoffload_cache_tenant_declined_total{gpu="0",tenant="batch"} 2.0',
        'kvoffload_cache_loaded_total{gpu="0"} 3.0',
        'kvoffload_cache_hits_total{gpu="0"} 3.0',
    ):
        assert line in lines


@pytest.mark.skipif(not HAS_JAX, reason="jax is not installed")
def test_jax_finds_its_blocks_by_their_tokens() -> None:
    program = """
    import jax

    jax.config.update("jax_platforms", "cpu")
    import kvoffload
    from typed_programs import jax_keys

    with kvoffload.open_device(backend="simulated") as device:
        print(jax_keys.main(device))
    """
    assert run_program(program, dev_mode=False) == "[1. 2. 3.]\n"

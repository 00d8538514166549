"""The public API under mypy and pyright: typical calls and whole programs pass in strict mode, and misuses are refused.

Each misuse is refused on its line. `test_package` runs the calls, `test_examples` the programs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CALLS, MISUSES = HERE / "typing_calls.py", HERE / "typing_misuses.py"
RIGHT = [CALLS, *(ROOT / "examples" / name for name in ("quickstart.py", "shared_folder_tier.py"))]

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

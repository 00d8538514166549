"""The examples run as they are, in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from seeds import rest_long

ROOT = Path(__file__).parent.parent.parent


def run(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart() -> None:
    assert "every byte came back" in run("quickstart.py")


def test_embedded_runtime() -> None:
    assert "32 of 32 turns came back right" in run("embedded_runtime.py")


@pytest.mark.long
def test_shared_folder_tier() -> None:
    assert "checks passed with 2 devices" in run("shared_folder_tier.py")


@pytest.mark.parametrize("name", rest_long(sorted(path.name for path in (ROOT / "examples").glob("*.py")), 3))
def test_without_optional_packages_an_example_says_what_to_install(name: str) -> None:
    program = "import runpy, sys; sys.modules |= dict.fromkeys(('cupy', 'jax'))\n"
    program += f"sys.path.insert(0, 'examples'); runpy.run_path('examples/{name}', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0 or "pip install" in done.stderr.splitlines()[-1], done.stderr
    assert "ModuleNotFoundError: No module" not in done.stderr


@pytest.mark.gpu
@pytest.mark.usefixtures("only_gpu")
def test_cupy_offload() -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    assert "every byte came back" in run("cupy_offload.py")

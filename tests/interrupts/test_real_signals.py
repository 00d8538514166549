"""Real signals at random moments, in processes of their own: no hit without its bytes, nothing hangs, nothing leaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "signal_program.py"
CPU_SECONDS = 2.0


@pytest.mark.parametrize("policy", ["prefix", "lru", "user"])
def test_signals_leave_the_truth(policy: str, seed: int) -> None:
    folders = (HERE.parents[1], HERE.parent / "support", HERE.parent / "chaos" / "support")
    paths = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(seed), str(CPU_SECONDS), policy],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    print(report)
    assert report["signals"] > 10
    assert report["problems"] == [], f"seed {seed}"

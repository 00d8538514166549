"""Programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def run_program(program: str, *, exit_code: int = 0, timeout: float = 60, dev_mode: bool = True) -> str:
    """Run it with warnings as errors; nothing may come out on its stderr. Its stdout.

    It imports what this process can.
    """
    options = ["-X", "dev"] if dev_mode else []
    done = subprocess.run(
        [sys.executable, *options, "-W", "error", "-c", textwrap.dedent(program)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert (done.returncode, done.stderr) == (exit_code, ""), f"{done.stdout}\n{done.stderr}"
    return done.stdout
